"""lab.compare on few lines; no run is made."""

import json
import random
from pathlib import Path

import pytest
from conftest import load_script, write_run

from engine.base import UserError
from lab import compare

GOOD = "import os, sys\nos.makedirs(sys.argv[sys.argv.index('--out') + 1] + '/final')\n"
SLOW = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(99)\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that compare takes for the repository; a script's digest is its text."""
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "code_digest", lambda script: script.read_text(), raising=False)
    for name, text in dict(good=GOOD, bad="raise SystemExit(3)", slow=SLOW).items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_a_run_of_other_code_or_arguments_is_refused(repository, capsys):
    run, command = repository / "out/run-seed1", ["good.py", "--steps", "5"]
    assert not compare.is_finished(run, command)
    (run / "final").mkdir(parents=True)
    record = dict(command=["/x/good.py", "--steps", "5", "--out", str(run), "--resume"], code=GOOD)
    (run / "run.json").write_text(json.dumps(record))
    compare.run_all({run: command}, workers=1)
    assert not (run.parent / "logs").exists()  # it did not run again
    for steps, code in (("6", GOOD), ("5", GOOD + "loss = 2")):
        (repository / "good.py").write_text(code)
        with pytest.raises(UserError, match=f"^{run} holds a run of other code or arguments; "):
            compare.run_all({run: ["good.py", "--steps", steps]}, workers=1)
    (repository / "edits.py").write_text(GOOD + "open('edits.py', 'a').write('#')\n")  # while seeds wait
    jobs = {repository / f"out/edits-seed{seed}": ["edits.py"] for seed in (1, 2)}
    with pytest.raises(UserError, match="^edits.py, or code that it uses, was edited before all seeds"):
        compare.run_all(jobs, workers=1)
    assert capsys.readouterr().out.endswith("edits-seed1 has ended; still running: 0.\n")


def test_a_failed_run_is_named_and_ends_the_others(repository):
    jobs = {repository / "slow-seed1": ["slow.py"], repository / "bad-seed1": ["bad.py"]}
    with pytest.raises(UserError, match=r"a run failed; see .*bad-seed1.txt"):
        compare.run_all(jobs, workers=2)
    if (repository / "pid").exists():  # else it was ended before it had started
        assert not Path(f"/proc/{(repository / 'pid').read_text()}").exists()


def test_a_row_has_means_intervals_and_the_difference_to_ttrl(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "has_fewer", lambda: [True, False, False, False])
    task, folders = {"data": [1, 2], "eval_samples": [32]}, []
    votes = [dict(problem="a", right=right, flipped=None) for right in (True, False)]
    for seed, greedy in ((1, [0, 1, 0, 0]), (2, [1, 1, 1, 0])):
        lines = [{"step": 1, "seconds/step": 60, "entropy": .5},
                 {"step": 2, "seconds/step": 60, "entropy": .1},
                 {"step": 2, "eval/toy_test/pass@1": .5, "seconds/evaluate": 60}]
        args = dict(seed=seed, eval="toy_test", eval_samples=32, steps=2)
        folders.append(write_run(tmp_path / f"a-seed{seed}", args, metrics=lines, votes=votes))
        record = dict(step=2, benchmark="toy_test", right=[], majority=[True] * 4, greedy=greedy)
        (folders[-1] / "evaluations.jsonl").write_text(json.dumps(record))
        (folders[-1] / "final").mkdir()
    row = compare.row_of(folders, "uneven", task)
    kept = {"": "0:0", "test": "4:e", "ood": "0:0"}
    assert row["runs"][1] == dict(seed=2, greedy=kept, learned=0, kept=0, corrupted=1, minutes=3,
                                  entropy=[.5, .3]) | {"fewer majorities": [], "pass@1": .5}
    assert [compare.greedy(run, "fewer") for run in row["runs"]] == [[0], [1]]
    assert [compare.greedy(run, "others") for run in row["runs"]] == [[1, 0, 0], [1, 1, 0]]
    vote = compare.row_of(folders, "uneven", task, vote=True)
    cells = compare.table({"vote": vote, "a": row}).splitlines()[2:]
    assert cells[0].startswith("| vote | 1.00±.00 | 1.00±.00 | 1.00±.00 | – | – | .50±.00 |")
    assert cells[1].startswith("| a | .50±.")
    assert cells[1].endswith(" | .00±.00 | .00±.00 | 1.00±.00 | 3.00±.00 | 0 |")
    assert compare.difference("a", row["runs"], row["runs"]) == (
        "a less TTRL is not printed: it takes five seeds that a stored row of TTRL has, too; here are 2.")
    with pytest.raises(UserError, match="has another eval_samples than the stored"):
        compare.row_of(folders, "uneven", task | {"eval_samples": [8]})
    (folders[1] / "metrics.jsonl").open("a").write('{"step": 3}')  # of which there is no evaluation yet
    with pytest.raises(UserError, match="a-seed2 holds no finished run"):
        compare.row_of(folders, "uneven", task)


def test_intervals_are_over_runs_and_problems():
    """Both halves of a table vary alone, then neither: by the normal approximation, 1.96 standard errors."""
    problems = [[1] * 50 + [0] * 50] * 5  # only problems differ: sqrt(.25 / 100) = .05
    mean, low, high = compare.crossed(problems)
    assert mean == .5 and high - low == pytest.approx(2 * 1.96 * .05, rel=.15)
    runs = [[i % 2] * 100 for i in range(20)]  # only runs differ: sqrt(.25 / 20) = .112
    _, low, high = compare.crossed(runs)
    assert high - low == pytest.approx(2 * 1.96 * .112, rel=.15)
    assert compare.crossed([[1] * 9] * 3) == pytest.approx((1, 1, 1))
    assert compare.unpack(compare.pack([0, 0, 1, 0, 1])) == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("harm, verdict", [(0, "equal within 0.03"), (.3, "below"), (-.3, "above")])
def test_the_table_tells_an_idea_with_an_effect_from_one_without(harm, verdict):
    """Five runs each, drawn with a known difference to TTRL's; 1,024 problems of which a fifth are hard."""
    draw = random.Random(1)

    def runs(shift: float) -> list[dict]:
        made = []
        for seed in range(5):
            bits = [draw.random() < (.2 if i % 5 else .7) - shift / 2 for i in range(1024)]
            made.append(dict(seed=seed, greedy={"": "0:0", "test": compare.pack(bits),
                                                "ood": compare.pack(bits[:512])}))
        return made

    base = runs(0)
    sentence = compare.difference("a", base if harm == 0 else runs(harm), base)
    assert sentence.startswith("a less TTRL, seed by seed and problem by problem, greedy: test ")
    assert f": {verdict}; fewer " in sentence


def test_the_leaderboards_page_has_the_stored_rows():
    for regime, kept in json.loads(compare.STORED.read_text()).items():
        assert compare.table(kept["rows"], regime) + "\n" in compare.PAGE.read_text(), regime
    for path in compare.SUMMARIES:
        assert compare.summary(json.loads(compare.STORED.read_text())) + "\n" in path.read_text(), path
    assert compare.changed_lines(Path(load_script("flip_rate").__file__)) == 30  # examples/README.md
