"""tools.plot, tools.compare and tools.gpu_smoke, each on a few hand-made lines or in tiny."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from matplotlib import pyplot

from engine.base import UserError
from tools import compare, plot

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
    plot.draw_panel(axis, "length", {"a": [{1: 10.0, 2: 20.0}, {1: 30.0}]}, plot.styles(["a"]), {})
    assert axis.lines[0].get_xdata().tolist() == [1] and axis.lines[0].get_ydata().tolist() == [20.0]
    assert [line.get_ydata().tolist() for line in axis.lines[1:]] == [[10.0, 20.0], [30.0]]  # the seeds, thin
    pyplot.close()


def test_pass_at_1_has_error_bars_where_one_seed_logs_them():
    line = {"step": 2, "eval/toy/stderr": 0.125}
    errors = plot.errors_of({"one": [[line]], "two": [[line], [line]]}, "eval/toy/pass@1")
    assert errors == {"one": {2: 0.125}, "two": {}}
    _, axis = pyplot.subplots()
    plot.draw_panel(axis, "pass@1", {"one": [{2: 0.5, 3: 1.0}]}, plot.styles(["one"]), errors)
    assert axis.collections[0].get_segments()[0].tolist() == [[2, 0.375], [2, 0.625]]
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


def test_a_run_of_other_code_or_arguments_is_kept(repository):
    run, command = repository / "out/run-seed1", ["good.py", "--steps", "5"]
    assert compare.state_of(run, command) == "new"
    run.mkdir(parents=True)
    record = dict(command=["/x/good.py", "--steps", "5", "--out", str(run), "--resume"], code=GOOD)
    (run / "run.json").write_text(json.dumps(record))
    assert compare.state_of(run, command) == "unfinished"
    (run / "final").mkdir()
    assert compare.state_of(run, command) == "finished"
    compare.run_all({run: command}, workers=1)
    assert not (run.parent / "logs").exists()  # it did not run again
    assert compare.state_of(run, ["good.py", "--steps", "6"]) == "other"
    (repository / "good.py").write_text(GOOD + "loss = 2")
    assert compare.state_of(run, command) == "other"
    compare.run_all({run: command}, workers=1)
    assert (run / "final").exists() and not (run / "run.json").exists()
    assert len(list(repository.glob("out/until-*/run-seed1/run.json"))) == 1


def test_a_failed_run_is_named_and_ends_the_others(repository):
    jobs = {repository / "slow-seed1": ["slow.py"], repository / "bad-seed1": ["bad.py"]}
    with pytest.raises(UserError, match=r"a run failed; see .*bad-seed1.txt"):
        compare.run_all(jobs, workers=2)
    if (repository / "pid").exists():  # else it was ended before it had started
        assert not Path(f"/proc/{(repository / 'pid').read_text()}").exists()


def test_a_set_names_scripts_that_are_there():
    for variants in compare.SETS.values():
        for command in variants.values():
            script = command.split()[0]
            assert (ROOT / script).is_file() or (ROOT / "examples" / script).with_suffix(".diff").is_file()


def test_table_is_the_last_evaluation_and_the_mean_of_the_last_ten_steps():
    seeds = []
    for rate in (0.5, 0.7):  # mean 0.6, deviation 0.1 sqrt(2) = 0.14; the last ten: 3 to 12, mean 7.5
        lines = [dict(step=i, entropy=i, length=7) for i in range(1, 13)]
        ends = [{"step": step, "eval/toy/pass@1": value} for step, value in ((0, rate / 2), (12, rate))]
        seeds.append([ends[0], *lines, ends[1]])
    assert compare.table({"a": seeds, "b": [[]]}).splitlines() == [
        "| | toy/pass@1 | entropy |", "|---|---|---|", "| start | 0.30 +- 0.07 |  |",
        "| a | 0.60 +- 0.14 | 7.50 +- 0.00 |", "| b |  |  |"]


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
