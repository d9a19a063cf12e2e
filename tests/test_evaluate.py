"""evaluate.py: a checkpoint as well as a final model, and the presets."""

import importlib
import json
import shutil

import pytest
import torch
from conftest import ROOT, SCRIPTS, run_toy
from test_docs import commands_of, understand

from engine.base import UserError
from engine.metrics import grade
import common
import evaluate
import ttrl

SETTINGS = "eval_samples eval_temperature eval_top_p eval_top_k max_new_tokens prompt".split()


def test_a_checkpoint_scores_as_the_model_that_it_is_of(tmp_path):
    """pass@1 and every response, of the last step's checkpoint and of final/, not of the start model."""
    run = tmp_path / "run"  # with a learning rate that changes what the model says
    run_toy(ttrl, run, steps=2, checkpoint_every=2, lr=2e-3, warmup=0.0)
    said, results = {}, {}
    for name in ("final", "checkpoints/step_00000002", "../run", ""):  # ../run: the run's folder
        out, model = tmp_path / "out" / (name.strip("./") or "start"), str(run / name) if name else ""
        args = evaluate.Args(model=model, benchmarks="toy_test", out=str(out), preset="toy", samples=4,
                             max_new_tokens=48, save_generations=True)
        results[name] = evaluate.main(args)
        said[name] = (out / "generations.jsonl").read_text()
        assert json.loads((out / "results.json").read_text())["model"] == model or not name
    assert said["final"] == said["checkpoints/step_00000002"] != said[""]
    assert results["final"] == results["checkpoints/step_00000002"] == results["../run"]
    assert said["final"] == said["../run"]


def test_a_checkpoint_without_its_run_is_one_sentence(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match="a checkpoint, but .*run.json, which names the model that"):
        evaluate.Args(model=str(tmp_path)).run_args()


def test_the_toy_by_its_name_has_its_own_settings(launch):
    code, out, _ = launch("evaluate", model="toy", show_prompt=True)
    assert code == 0 and "--model toy runs with these overrides" in out and "--preset toy" in out
    assert "first problem of toy" in out


def test_a_trained_toy_without_its_settings_is_told_of_them(launch, tmp_path):
    shutil.copytree(ROOT / "toy", tmp_path / "toy")
    code, _, error = launch("evaluate", model=tmp_path / "toy", benchmarks="toy")
    assert code == 2 and error.endswith("lower one of them (evaluate.py --preset toy has a trained toy's).\n")


def test_math_verify_grades_the_text_and_our_classes_vote():
    """A right number outside a box is right then; votes, and what they are right about, stay our classes."""
    said = [("5", r"\boxed{5}"), (None, "The answer is $5$."), ("5.0", r"\boxed{5.0}"), ("6", r"\boxed{6}")]
    responses = [common.Rollout([], [0], torch.zeros(1), True, text, answer) for answer, text in said]
    problem = common.Problem("2 + 3?", "5")
    ours = grade(problem, responses)
    theirs, _ = evaluate.math_verify_grades(problem, ours, responses)
    assert ours["correct"] == [True, False, True, False] and theirs["correct"] == [True, True, True, False]
    assert theirs["classes"] == ours["classes"] and theirs["right"] == ours["right"] == {0}


def evaluation_of(args) -> tuple:
    return tuple(getattr(args, name) for name in SETTINGS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_preset_is_what_most_of_the_papers_runs_evaluate_with(script):
    """The rows of docs/recipes without a prompt file, and the script without a flag."""
    settings = []
    for row in commands_of(ROOT / f"docs/recipes/{script}.md")[1]:
        run = understand(row.command)
        if run.name == script and not run.args.prompt.endswith(".txt"):
            settings.append(evaluation_of(run.args))
    preset = tuple(evaluate.PRESETS[script][name.removeprefix("eval_")] for name in SETTINGS)
    assert preset == max(settings, key=settings.count)
    assert preset == evaluation_of(importlib.import_module(script).Args())
