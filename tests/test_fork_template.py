"""Copy this file for a fork: name your script, write your formula's numbers by hand. Also docs/fork.md."""

import shutil

import pytest
import torch
from conftest import fresh_state, load_script, read_lines, run_toy, untimed

fork = load_script("empo")  # yours: "my_idea", for my_idea.py beside ttrl.py
SHORT = dict(votes=4, train_samples=4, max_new_tokens=32)
# If your script leaves prompts out, take dict(votes=8, train_samples=8, max_new_tokens=96).


def test_the_formula_by_hand():
    # of four responses two say the same, one says something else, one has no answer
    assert fork.shares([0, 1, 0, None]).tolist() == [0.5, 0.25, 0.5, 0]
    assert fork.answer_entropy([0, 0]) == fork.answer_entropy([None]) == 0


def test_the_loop_uses_the_formula_and_learns(tmp_path):
    """Give your own flags here, too, with values that are not their defaults."""
    line = run_toy(fork, tmp_path / "run", steps=1, **SHORT)[0]
    assert line.get("grad_norm", 0) > 1e-6, "nothing was trained: raise SHORT, or are all rewards equal?"
    for prompt in read_lines(tmp_path / "run/samples.jsonl"):
        classes = [response["answer_class"] for response in prompt["responses"]]
        rewards = [response["reward"] for response in prompt["responses"]]
        assert rewards == pytest.approx(fork.shares(classes).tolist(), abs=1e-5)


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
    before = read_lines(whole / "metrics.jsonl")[0]
    assert before.get("grad_norm", 0) > 1e-6, "nothing was trained before the resume: raise SHORT"
    first, second = (untimed(read_lines(folder / "metrics.jsonl")) for folder in (whole, again))
    assert first == second
    expected = fresh_state(whole / "final")
    assert all(torch.equal(value, expected[name]) for name, value in fresh_state(again / "final").items())
