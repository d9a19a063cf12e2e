"""tools.plot, tools.compare, tools.explain and tools.gpu_smoke on few lines or in tiny; the lesson."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from matplotlib import pyplot

import common
import dynamic_rl
import ettrl
import restrain
import scrl
import ttrl
from engine.base import UserError
from tools import compare, explain, plot

GOOD = "import os, sys\nos.makedirs(sys.argv[sys.argv.index('--out') + 1] + '/final')\n"
SLOW = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(99)\n"
LINES = ['{"step": 0, "eval/toy/pass@1": 0.25, "eval/toy/pass@4": 0.5, "eval/other/pass@1": 0.1}',
         '{"step": 1, "entropy": 0.5, "loss": 0.1, "surprise": 2}',
         "[1, 2]", "",
         '{"step": 3, "entropy": 1.5, "eval/toy/pass@1": 0.75, "surprise": 3}',
         '{"step": 4, "entr']  # a killed run leaves its last line half-written


def make_run(folder: Path, lines: list[str]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


# ------------------------------------------------- plot ---------------------------------------------------
def test_default_panels_have_the_runs_known_metrics_and_a_forks_own(tmp_path):
    runs = plot.read_runs([make_run(tmp_path / "run", LINES)])
    assert plot.curves(runs, []) == {
        "eval/toy/pass@1": {"run": [{0: 0.25, 3: 0.75}]}, "eval/toy/pass@4": {"run": [{0: 0.5}]},
        "entropy": {"run": [{1: 0.5, 3: 1.5}]}, "surprise": {"run": [{1: 2, 3: 3}]}}  # loss is not drawn
    assert list(plot.curves(runs, ["loss", "pass@1"], "other")) == ["loss", "eval/other/pass@1"]
    with pytest.raises(UserError, match="no run has no; they have entropy, eval/other/pass@1, "):
        plot.curves(runs, ["no"])


def test_seeds_are_one_line_their_mean_at_the_steps_that_all_have(tmp_path):
    folders = [make_run(tmp_path / f"a-seed{seed}", LINES) for seed in (1, 3)]
    assert list(plot.read_runs(folders)) == ["a"]
    _, axis = pyplot.subplots()
    plot.draw_panel(axis, "length", {"a": [{1: 10.0, 2: 20.0}, {1: 30.0}]}, plot.styles(["a"]))
    assert axis.lines[0].get_xdata().tolist() == [1] and axis.lines[0].get_ydata().tolist() == [20.0]
    assert [line.get_ydata().tolist() for line in axis.lines[1:]] == [[10.0, 20.0], [30.0]]  # the seeds, thin
    pyplot.close()


def test_plot_writes_a_figure_or_a_sentence(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", LINES)
    monkeypatch.setattr(sys, "argv", ["plot", str(run)])
    plot.main()
    assert capsys.readouterr().out == f"{run / 'curves.png'}\n"
    assert (run / "curves.png").stat().st_size > 5000
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"Error: '{tmp_path}' holds no run: it has no metrics.jsonl"):
        plot.main()


# ------------------------------------------------ compare -------------------------------------------------
@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that compare takes for the repository; a script's digest is its text."""
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare.log, "code_digest", lambda script: script.read_text(), raising=False)
    for name, text in dict(good=GOOD, bad="raise SystemExit(3)", slow=SLOW).items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_a_run_of_other_code_or_arguments_is_refused(repository):
    run, command = repository / "out/run-seed1", ["good.py", "--steps", "5"]
    assert not compare.is_finished(run, command)
    run.mkdir(parents=True)
    record = dict(command=["/x/good.py", "--steps", "5", "--out", str(run), "--resume"], code=GOOD)
    (run / "run.json").write_text(json.dumps(record))
    assert not compare.is_finished(run, command)
    (run / "final").mkdir()
    assert compare.is_finished(run, command)
    compare.run_all({run: command}, workers=1)
    assert not (run.parent / "logs").exists()  # it did not run again
    with pytest.raises(UserError, match=f"^{run} holds a run of other code or arguments; "):
        compare.run_all({run: ["good.py", "--steps", "6"]}, workers=1)
    (repository / "good.py").write_text(GOOD + "loss = 2")
    with pytest.raises(UserError, match="other code or arguments"):
        compare.is_finished(run, command)


def test_a_failed_run_is_named_and_ends_the_others(repository):
    jobs = {repository / "slow-seed1": ["slow.py"], repository / "bad-seed1": ["bad.py"]}
    with pytest.raises(UserError, match=r"a run failed; see .*bad-seed1.txt"):
        compare.run_all(jobs, workers=2)
    if (repository / "pid").exists():  # else it was ended before it had started
        assert not Path(f"/proc/{(repository / 'pid').read_text()}").exists()


def test_table_has_the_start_the_last_evaluations_and_what_became_of_majorities(tmp_path):
    folders = {"TTRL": [tmp_path / "TTRL-seed1", tmp_path / "TTRL-seed2"], "b": [tmp_path / "b-seed1"]}
    for folder, rate in zip([*folders["TTRL"], *folders["b"]], (0.5, 0.7, 0.1)):
        lines = [{"step": i, "eval/toy/pass@1": rate * i, "eval/toy/greedy": rate} for i in (1, 2)]
        make_run(folder, list(map(json.dumps, [lines[0], dict(step=2, loss=0.1), lines[1]])))
        votes = [dict(problem="a", right=None, flipped=flipped) for flipped in (None, True, rate > 0.6)]
        (folder / "votes.jsonl").write_text("\n".join(map(json.dumps, votes)))
    rows = compare.rows_of(folders)  # 0.5 and 0.7: mean 0.6, deviation 0.1 sqrt(2) = 0.14
    assert compare.table(rows | {"worked": [{"eval/toy/greedy": 0.25}]}).splitlines() == [
        "| | toy/greedy | toy/pass@1 | flip_rate |", "|---|---|---|---|",
        "| start | 0.60 +- 0.14 | 0.60 +- 0.14 |  |", "| TTRL | 0.60 +- 0.14 | 1.20 +- 0.28 | 0.75 +- 0.35 |",
        "| b | 0.10 | 0.20 | 0.50 |", "| worked | 0.25 |  |  |"]


# ----------------------------------------------- gpu_smoke ------------------------------------------------
@pytest.mark.slow
def test_gpu_smoke_passes_without_a_gpu():
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-m", "tools.gpu_smoke", "--size", "tiny"], cwd=ROOT, text=True,
                          env=environment, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    verdicts = re.findall(r"^(PASS|SKIP|FAIL) (.{22}) ", done.stdout, re.MULTILINE)
    assert {"hf", "hf, --resume", "hf, two ranks"} <= {name.strip() for _, name in verdicts}
    assert len(verdicts) == 9 and {verdict for verdict, _ in verdicts} <= {"PASS", "SKIP"}
    assert re.search(r"^\d+ PASS, \d SKIP, 0 FAIL in ", done.stdout, re.MULTILINE)


# -------------------------------------------------- explain -----------------------------------------------
def test_explain_shows_problems_that_differ(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["explain", "--embedder", ""])
    explain.main()
    text = capsys.readouterr().out
    assert len(set(re.findall(r"^Problem: (.*)", text, re.MULTILINE))) == 3
    sentence = r"TTRL takes '(.*)' as the label: (\d+) of 16 votes; the gold answer is (.*)\."
    (right, most, gold), (wrong, many, other_gold), (_, few, _) = re.findall(sentence, text)
    assert right == gold and wrong != other_gold and int(few) < int(many) <= int(most)


def a_vote():
    answers, entropies = ["91", "91.0", "73", "73", "91", "38", None, "91"], [.2, .2, .3, .4, .3, .6, .7, .3]
    responses = [SimpleNamespace(text=f"so \\boxed{{{a}}}" if a else "hm", answer=a) for a in answers]
    return explain.Vote(common.Problem("What is 7 * 13?", "91"), responses, entropies)


def test_explain_shows_what_the_scripts_functions_give():
    vote = a_vote()
    classes, entropies, columns = [0, 0, 1, 1, 0, 2, None, 0], vote.entropies, explain.columns_of(vote)
    assert vote.classes == classes and vote.right == [c == 0 for c in classes]
    advantages = ttrl.group_advantages(ttrl.majority_reward(classes))
    assert columns["gold A"] == columns["TTRL A"] == advantages.tolist()
    assert columns["TTRL A"][:3] == pytest.approx([0.9354, 0.9354, -0.9354], abs=1e-4)  # 0.5 / 0.5345
    assert columns["SCRL R"] == scrl.scrl_rewards(classes, entropies).tolist()
    plus, minus = restrain.restrain_advantages(classes, 3)
    assert (columns["RESTRAIN A+"], columns["RESTRAIN A-"]) == (plus.tolist(), minus.tolist())
    reshaped = ettrl.reshape_advantages(advantages, explain.torch.tensor(entropies))
    assert columns["ETTRL A"] == pytest.approx(reshaped.tolist(), rel=1e-6)
    text = explain.as_text(vote)
    assert max(map(len, text.splitlines())) <= 110
    assert f"u = {restrain.prompt_weight(4, 8):.2f}" in text
    assert f"p = 0.50 and R_q = {dynamic_rl.question_reward(0.5):.2f}" in text
    row = next(line.split() for line in text.splitlines() if line.lstrip().startswith("3 "))
    assert row[-len(columns):] == [f"{values[2]:+.2f}" for values in columns.values()]


# --------------------------------------------------- lesson -----------------------------------------------
@pytest.mark.slow
def test_lesson_runs():
    """Every cell of docs/lesson.ipynb, and what it says of its outputs is true of those committed, too."""
    nbclient = pytest.importorskip("nbclient", reason="optional: no nbclient")
    pytest.importorskip("ipykernel", reason="optional: no ipykernel")
    import nbformat
    lesson = nbformat.read(ROOT / "docs/lesson.ipynb", as_version=4)
    check_lesson(printed(lesson))
    place = dict(metadata=dict(path=str(ROOT / "docs")))
    nbclient.NotebookClient(lesson, timeout=120, kernel_name="python3", resources=place).execute()
    check_lesson(printed(lesson))


def printed(lesson) -> str:
    return "".join(o.get("text", "") for cell in lesson.cells for o in cell.get("outputs", []))


def check_lesson(text):
    right, wrong, gold = re.findall(r"^(\d+): (\d+) votes, then (\d+)$", text, re.MULTILINE)
    for _, before, after in (right, wrong):
        assert int(after) > int(before)  # both majorities grew
    assert wrong[0] != gold[0] and int(gold[2]) < int(gold[1])
    before, after = re.search(r"answers at once: (\d+) of 32, then (\d+)", text).groups()
    assert int(after) < int(before)
    assert text.count(" is open: write ") == 4  # the holes
    assert "loss 0.0000" in text and float(re.search(r"gradient norm ([\d.]+)", text)[1]) > 0.01
    lengths = [float(number) for number in re.findall(r"mean length ([\d.]+)", text)]
    assert len(lengths) == 12 and lengths[11] < lengths[5]  # the brief ones became briefer
