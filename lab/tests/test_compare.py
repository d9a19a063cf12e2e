"""lab.compare on few lines; no run is made."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, write_run
from scipy import stats

from engine.base import UserError
from lab import compare

GOOD = "import os, sys\nos.makedirs(sys.argv[sys.argv.index('--out') + 1] + '/final')\n"
SLOW = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(99)\n"
EVALUATION = '{"step": 1, "eval/toy_test/pass@1": 0.5}\n'


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that compare takes for the repository; a script's digest is its text."""
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "code_digest", lambda script: script.read_text(), raising=False)
    for name, text in dict(good=GOOD, bad="raise SystemExit(3)", slow=SLOW).items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_a_run_of_other_code_or_arguments_is_refused(repository):
    run, command = repository / "out/run-seed1", ["good.py", "--steps", "5"]
    assert not compare.is_finished(run, command)
    (run / "final").mkdir(parents=True)
    record = dict(command=["/x/good.py", "--steps", "5", "--out", str(run), "--resume"], code=GOOD)
    (run / "run.json").write_text(json.dumps(record))
    for metrics, finished in (('{"step": 1}\n', False), (EVALUATION, True)):
        (run / "metrics.jsonl").write_text(metrics)
        assert compare.is_finished(run, command) == finished
    compare.train({run: command}, workers=1)
    assert not run.with_suffix(".txt").exists()  # it did not run again
    for steps, code in (("6", GOOD), ("5", GOOD + "loss = 2")):
        (repository / "good.py").write_text(code)
        with pytest.raises(UserError, match=f"^{run} holds a run of other code or arguments; "):
            compare.train({run: ["good.py", "--steps", steps]}, workers=1)


def test_a_failed_run_is_named_and_ends_the_others(repository):
    jobs = {repository / "slow-seed1": ["slow.py"], repository / "bad-seed1": ["bad.py"]}
    with pytest.raises(UserError, match=r"a run failed; see .*bad-seed1.txt"):
        compare.train(jobs, workers=2)
    if (repository / "pid").exists():  # else it was ended before it had started
        assert not Path(f"/proc/{(repository / 'pid').read_text()}").exists()


def test_a_line_is_read_from_a_run_of_the_shipped_toy(repository):
    (repository / "toy").mkdir()
    texts = ["Max has 5 fewer than Omar.", "Max has 5 more than Omar.", "2 + 2", "3 + 3"]
    lines = [json.dumps(dict(problem=text)) + "\n" for text in texts]
    (repository / "toy/test.jsonl").write_text("".join(lines))
    last = {"step": 2, "eval/toy_test/pass@1": .5, "eval/toy_test/pass@8": .75}
    votes = [dict(problem="a", right=right, flipped=None) for right in (True, False)]
    run = write_run(repository / "a-seed2", dict(seed=2), metrics=[{"step": 1}, last], votes=votes)
    record = dict(step=2, benchmark="toy_test")
    lines = [json.dumps(record | dict(greedy=greedy)) + "\n" for greedy in ([0] * 4, [1, 1, 0, 0])]
    (run / "evaluations.jsonl").write_text("".join(lines))
    described = json.loads((run / "run.json").read_text())
    for digest in (1, compare.TOYS["even"][1]):
        described["identity"] = {"the weights of --model": digest}
        (run / "run.json").write_text(json.dumps(described))
        if digest == 1:
            with pytest.raises(UserError, match="a-seed2 has other weights than the stored rows' even toy"):
                compare.line_of(run, "a", "even", 2)
    assert compare.line_of(run, "a", "even", 2) == dict(
        row="a", toy="even", seed=2, step=2, test="0.5000", fewer="1.0000", learned="0.0000",
        corrupted="1.0000", lines="") | {"pass@1": "0.5000", "pass@8": "0.7500"}


def line(seed: int, test: float, step: int = 60) -> dict:
    shares = dict.fromkeys(compare.COLUMNS, str(test))
    return dict(row="a", toy="even", seed=seed, step=str(step)) | shares | dict(lines="" if seed > 1 else "3")


def test_an_interval_is_t_over_seeds_and_binomial_over_problems_in_squares():
    lines = [line(1, .4), line(2, .5), line(3, .6)]
    of_seeds = stats.t.interval(.95, 2, .5, stats.sem([.4, .5, .6]))[1] - .5
    for problems in (171, 10 ** 9):
        half = (of_seeds ** 2 + 1.96 ** 2 * .25 / problems) ** .5
        assert compare.cell(lines, "test", problems) == f".50±{half:.2f}".replace("±0", "±")
    assert compare.cell(lines[:2], "test", 100) == ".45"  # fewer than three seeds
    assert compare.cell([line(1, .0), line(2, .1), line(3, .2)], "test", 100) == ".10 (.00–.36)"  # cut at 0
    assert compare.cell([line(1, .5, step=0)], "test", 100) == ".50±.10"  # not trained: its problems alone


@pytest.mark.parametrize("harm, verdict", [(0, "not told apart"), (.3, "below"), (-.3, "above")])
def test_the_difference_to_ttrl_is_seed_by_seed(harm, verdict):
    base = [line(seed, .5 + .03 * seed) for seed in range(1, 6)]
    lines = [line(seed, .5 + .03 * seed - harm + .01 * (seed - 3)) for seed in range(1, 6)]
    half = stats.sem([-.02, -.01, 0, .01, .02]) * stats.t.ppf(.975, 4)
    sentence = compare.difference(lines, base[::-1])  # paired by their seeds
    assert sentence.startswith(f"seed by seed: test {-harm + 0:+.3f} ± {half:.3f}: {verdict}; fewer ")


def test_the_pages_tables_are_the_stored_rows():
    """Whichever rows and columns of the stored lines a page shows; other tables are passed over."""
    lines, found = compare.stored() + compare.stored("toy/smollm2.csv"), 0
    for page in ["README.md", *(ROOT / "docs").glob("*.md")]:
        for text in re.findall(r"^\| \|.*(?:\n\|.*)+", (ROOT / page).read_text(), re.MULTILINE):
            heads = text.partition(" |\n")[0].removesuffix(" | changed lines").split(" | ")[1:]
            toys = [*dict.fromkeys(head.rpartition(": ")[0] for head in heads)]
            columns = [*dict.fromkeys(head.rpartition(": ")[2] for head in heads)]
            names, made = re.findall(r"\n\| ([^|]+?) \|", text), []
            for group in [toys] if toys[0] else (["uneven"], ["even"], ["smollm2"], ["smollm2_best"]):
                sizes = compare.SMOLLM2 if "smollm2" in group[0] else compare.COLUMNS
                stored = {line["row"] for line in lines if line["toy"] in group}
                if set(columns) <= set(sizes) and set(names) <= stored:
                    shown = {column: sizes[column] for column in columns}
                    made.append(compare.table(lines, group, shown, names))
            found += bool(made)
            assert not made or text in made, f"{page} has\n{text}\nbut the lines give\n" + "\n".join(made)
    assert found > 2
