"""lab.compare on few lines; no run is made."""

import json
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


def test_a_row_has_means_intervals_and_the_difference_to_ttrl(tmp_path):
    task, folders = {"data": [1, 2], "eval_samples": [32]}, []
    votes = [dict(problem="a", right=right, flipped=None) for right in (True, False)]
    for seed, greedy in ((1, 0.5), (2, 0.7)):
        lines = [{"step": 0, "eval/toy_test/greedy": .1, "eval/toy_test/maj@32": .5, "seconds/evaluate": 60},
                 {"step": 1, "seconds/step": 60}, {"step": 1, "eval/toy_test/greedy": greedy}]
        args = dict(seed=seed, eval="toy_test", eval_samples=32)
        folders.append(write_run(tmp_path / f"a-seed{seed}", args, metrics=lines, votes=votes))
        (folders[-1] / "final").mkdir()
    row = compare.row_of(folders, "toy", task)
    ends = {"learned": 0, "kept": 0, "corrupted": 1, "minutes": 2}
    assert row["runs"] == [ends | {"seed": i, "test/greedy": x} for i, x in ((1, 0.5), (2, 0.7))]
    start = compare.row_of(folders, "toy", task, start=True)
    # 0.5 and 0.7: deviation 0.1414, of two values t = 12.706, so 12.706 * 0.1414 / sqrt(2) = 1.27
    assert compare.table({"start": start, "a": row}).splitlines()[2:] == [
        "| start | .10±.00 | – | – | .50±.00 | – | – | – | – | – | – | – |",
        "| a | .60±1.27 | – | – | – | – | – | .00±.00 | .00±.00 | 1.00±.00 | 2.00±.00 | 0 |"]
    runs = [{"seed": i, "test/greedy": 0.1 * i, "test/pass@1": 0.75} for i in range(5)]
    base = [run | {"test/greedy": 0, "test/pass@1": 0.5} for run in runs]
    assert compare.difference("a", runs, base[:4]) == (
        "a less TTRL is not printed: it takes five seeds that a stored row of TTRL has, too; here are 4.")
    assert compare.difference("a", runs, base) == (  # t = 2.776, so 2.776 * 0.1581 / sqrt(5) = 0.196
        "a less TTRL, seed by seed: test greedy +0.200, 95% interval +0.004 to +0.396: above; "
        "test pass@1 +0.250, 95% interval +0.250 to +0.250: above.")
    with pytest.raises(UserError, match="has another eval_samples than the stored"):
        compare.row_of(folders, "toy", task | {"eval_samples": [8]})
    (folders[1] / "metrics.jsonl").open("a").write('{"step": 2}')  # of which there is no evaluation yet
    with pytest.raises(UserError, match="a-seed2 holds no finished run"):
        compare.row_of(folders, "toy", task)


def test_the_leaderboards_page_has_the_stored_rows():
    rows = json.loads(compare.STORED.read_text())["rows"]
    assert compare.table(rows) + "\n" in compare.PAGE.read_text()
    assert compare.changed_lines(Path(load_script("flip_rate").__file__)) == 30  # examples/README.md
