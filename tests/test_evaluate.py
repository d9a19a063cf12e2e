"""evaluate.py: a checkpoint as well as a final model, and the guide's command as it is printed."""

import importlib
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS, run_toy
from test_docs import commands_of, understand

import common
import evaluate
import ttrl
from engine.options import parse

SETTINGS = "eval_samples eval_temperature eval_top_p eval_top_k max_new_tokens prompt".split()
FEW = dict(preset="toy", samples=4, max_new_tokens=48, save_generations=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps with a learning rate that changes what the model says; the checkpoint is of the second."""
    out = tmp_path_factory.mktemp("trained") / "run"
    run_toy(ttrl, out, steps=2, checkpoint_every=2, lr=2e-3, warmup=0.0)
    return out


def test_a_checkpoint_scores_as_the_model_that_it_is_of(run, tmp_path):
    """pass@1 and every response, of the last step's checkpoint and of final/, not of the start model."""
    said, results = {}, {}
    for name in ("final", "checkpoints/step_00000002", ""):
        out = tmp_path / (name or "start")
        model = str(run / name) if name else ""
        args = evaluate.Args(model=model, benchmarks="toy_test", out=str(out), **FEW)
        results[name] = evaluate.main(args)
        said[name] = (out / "generations.jsonl").read_text()
        assert json.loads((out / "results.json").read_text())["model"] == model or not name
    assert said["final"] == said["checkpoints/step_00000002"] != said[""]
    assert results["final"] == results["checkpoints/step_00000002"]


def test_a_checkpoint_without_its_run_is_one_sentence(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(common.UserError, match="a checkpoint, but .*run.json, which names the model that"):
        evaluate.Args(model=str(tmp_path)).run_args()


def test_formulas_that_were_given_up_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "given_up", {"a", "b"})
    evaluate.main(evaluate.Args(benchmarks="toy_test", out=str(tmp_path / "out"), **FEW | dict(samples=1)))
    warning = "Warning: 2 formulas took more than a second each; they were compared as text."
    assert warning in capsys.readouterr().out


@pytest.mark.slow
def test_the_guides_command_runs_as_printed(run, tmp_path):
    """docs/fork.md's first block: in less than two minutes on two cores."""
    command, = re.findall(r"^python (evaluate\.py .*)$", (ROOT / "docs/fork.md").read_text(), re.MULTILINE)
    words = command.replace("runs/mine", str(run)).split()
    done = subprocess.run([sys.executable, *words, "--out", str(tmp_path / "out")], cwd=ROOT, timeout=120,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pass@1" in done.stdout and "hf sampler" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_preset_is_what_most_of_the_papers_runs_evaluate_with(script):
    """Those of docs/recipes without a prompt file, and the script without a flag."""
    settings = []
    for row in commands_of(ROOT / f"docs/recipes/{script}.md")[1]:
        run = understand(row.command) if row.command else None
        if run and run.name == script and not run.args.prompt.endswith(".txt"):
            settings.append(evaluation_of(run.args))
    preset = tuple(evaluate.PRESETS[script][name.removeprefix("eval_")] for name in SETTINGS)
    assert preset == max(settings, key=settings.count)
    assert preset == evaluation_of(importlib.import_module(script).Args())


def evaluation_of(args) -> tuple:
    return tuple(getattr(args, name) for name in SETTINGS)


def test_an_unknown_preset_is_named_with_those_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--preset", "nonsense"])
    with pytest.raises(SystemExit) as exit:
        parse(evaluate.Args, evaluate.TOY)
    printed = " ".join(re.sub(r"[^\x20-\x7e]", " ", capsys.readouterr().err).split())
    assert exit.value.code == 2 and "invalid choice 'nonsense' for argument '--preset'" in printed
    assert all(f"'{name}'" in printed for name in evaluate.PRESETS)
