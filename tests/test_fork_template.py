"""Copy this file for a fork: name it in FORK, and write your formula's numbers by hand. Also docs/fork.md."""

import importlib
import shutil

import pytest
import torch
from conftest import fresh_state, read_lines, run_toy, untimed

FORK = "examples.empo"  # yours: "my_idea"
fork = importlib.import_module(FORK)
SHORT = dict(votes=4, train_samples=4, max_new_tokens=32)


def test_the_formula_by_hand():
    # of four responses two say the same, one says something else, one has no answer
    assert fork.shares([0, 1, 0, None]).tolist() == [0.5, 0.25, 0.5, 0]


def test_it_learns_something(tmp_path):
    line = run_toy(fork, tmp_path / "run", steps=1, **SHORT)[0]
    assert line["grad_norm"] > 0 and line["zero_variance"] < 1


def test_the_plain_path_gives_the_same_step(tmp_path):
    ours = run_toy(fork, tmp_path / "fast", steps=1, **SHORT)[0]
    plain = run_toy(fork, tmp_path / "plain", steps=1, plain=True, **SHORT)[0]
    for name in ("loss", "grad_norm", "reward"):
        assert ours[name] == pytest.approx(plain[name], rel=1e-2, abs=1e-4), name


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path):
    options = dict(steps=2, checkpoint_every=1, **SHORT)
    whole, again = tmp_path / "whole", tmp_path / "again"
    run_toy(fork, whole, **options)
    shutil.copytree(whole, again)
    for late in ("checkpoints/step_00000002", "final"):
        shutil.rmtree(again / late)
    run_toy(fork, again, **options, resume=True)
    assert "grad_norm" in read_lines(whole / "metrics.jsonl")[0]  # or nothing was trained before the resume
    first, second = (untimed(read_lines(folder / "metrics.jsonl")) for folder in (whole, again))
    assert first == second
    expected = fresh_state(whole / "final")
    assert all(torch.equal(value, expected[name]) for name, value in fresh_state(again / "final").items())


# ------------------------------------------- the guide, step by step (not to copy) ------------------------
import importlib.util
import re

from conftest import ROOT

GUIDE = (ROOT / "docs/fork.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


def applied(diff: str, text: str) -> str:
    """The text with every hunk's old lines replaced by its new ones; each must be there exactly once."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


EXPECTED = [  # what shows that a step of the guide works, in the order of the page
    lambda line: 0 < line["reward"] < line["majority_ratio"],
    lambda line: 0 < line["reward"] < 1,
    lambda line: 0 < line["sure"] < 1,
    lambda line: line["grad_norm"] > 0,
    lambda line: line["answered"] > 0.99,
    lambda line: line["unclear"] * 4 == line["unclear_so_far"]]


@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_the_guide_was_followed(number, tmp_path):
    path = tmp_path / "my_idea.py"
    path.write_text(applied(DIFFS[number], (ROOT / "ttrl.py").read_text()))
    spec = importlib.util.spec_from_file_location("my_idea", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "my_idea", module)  # dataclasses look it up
        spec.loader.exec_module(module)
        line = run_toy(module, tmp_path / "run", steps=1)[0]
    assert len(DIFFS) == len(EXPECTED) and EXPECTED[number](line), line
