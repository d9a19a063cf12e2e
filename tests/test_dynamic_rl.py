"""Dynamic RL: formulas against numbers worked out by hand, the filter rules on real questions, and runs."""

from types import SimpleNamespace

import pytest
import torch
from conftest import fresh_state, run_toy

import common
from engine import options
from answers import classes as equivalence_classes
import dynamic_rl
from dynamic_rl import Args, find_question, judge_question, keep_question
from dynamic_rl import question_advantages, question_diversity, question_reward, reward_questions
from dynamic_rl import token_overlap


# ------------------------------------------------- formulas -----------------------------------------------
@pytest.mark.parametrize("p, tau, expected", [
    (14 / 16, 0.75, 0.5),       # (1 - 0.875) / (1 - 0.75) = 0.125 / 0.25
    (1.0, 1.0, 1.0)])           # tau = 1: the first branch only, no division by 0
def test_question_reward_eq_8(p, tau, expected):
    assert question_reward(p, tau) == pytest.approx(expected)


@pytest.mark.parametrize("a, b, expected", [
    ([1, 2, 3, 4], [1, 2], 1.0),          # over the shorter length: a beginning overlaps wholly
    ([1, 2, 3], [9, 1, 2, 3], 0.0),       # by position: shifted by one, nothing is the same
    ([], [], 1.0),
    ([], [1], 0.0)])
def test_token_overlap_eq_11(a, b, expected):
    assert token_overlap(a, b) == pytest.approx(expected)


def test_question_diversity_eq_10():
    # Overlaps: [8, 2] with [8, 3, 4] 1/2; [8, 2] with [8], over one token, 1; [8, 3, 4] with [8] 1.
    # R_dq: 1 / (1 + 1/2 + 1) = 0.4;  1 / (1/2 + 1 + 1) = 0.4;  1 / (1 + 1 + 1) = 1/3;  [5, 5]: 1
    rewards = question_diversity([[8, 2], [8, 3, 4], [8], [5, 5]])
    assert rewards.tolist() == pytest.approx([0.4, 0.4, 1 / 3, 1.0])
    assert question_diversity([[], [], [1]]).tolist() == pytest.approx([0.5, 0.5, 1.0])


def test_question_advantages_eq_14():
    # R_q = 0, 1:       mean 1/2, unbiased std sqrt((1/4 + 1/4) / 1) = 0.70711, z = -0.70711, 0.70711
    # R_dq = 0.6, 0.2:  mean 0.4, std sqrt(0.04 + 0.04) = 0.28284, z = 0.70711, -0.70711 (the scale goes)
    # R_da = 1, 1:      no spread, z = 0, 0
    # A = 0.001 (-0.70711) + 0.1 (0.70711) + 1 (0) = 0.0700036 and its negative
    r_q, r_dq, r_da = torch.tensor([0.0, 1.0]), torch.tensor([0.6, 0.2]), torch.ones(2)
    advantages = question_advantages(r_q, r_dq, r_da)
    assert advantages.tolist() == pytest.approx([0.0700036, -0.0700036], abs=2e-6)


def written(p, label, tokens, kept=True) -> common.Rollout:
    question = common.Rollout([1], [2], torch.zeros(1), True)
    question.p, question.label, question.tokens, question.kept = p, label, tokens, kept
    return question


def test_reward_questions_by_hand():
    # tau 0.75, n = 4.  R_q: 1 for p = 0.75; filtered: 0 (its own would be 0.5); 0 for p = 1; none found: 0
    # R_dq: [1, 2] and [1, 3] overlap 1/2: 2/3 each; [7, 7] 1; none found: 0 (not 1: it is no question)
    # R_da: answers 4, 4, 9, none: 1/2, 1/2, 1, 0
    questions = [written(0.75, "4", [1, 2]), written(0.375, "4", [1, 3], kept=False),
                 written(1.0, "9", [7, 7]), written(0.0, None, [], kept=False)]
    metrics = reward_questions(questions, Args(lambda_q=1, lambda_dq=1, lambda_da=1))
    agreeing = {f"agreeing/{i}": int(i in (6, 12, 16)) for i in range(1, 17)}  # p times 16 solutions
    assert metrics == pytest.approx(agreeing | dict(
        question_reward=1 / 4, question_diversity=(2 / 3 + 2 / 3 + 1) / 4, answer_diversity=2 / 4,
        filtered=0.5, no_question=0.25, unanimous=1, unique_answers=0.5, question_length=1.5))
    # z(R_q): mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, std 1/2: 1.5, -0.5, -0.5, -0.5
    # z(R_da): mean 1/2, variance (0 + 0 + 1/4 + 1/4) / 3 = 1/6, std 0.40825: 0, 0, 1.22474, -1.22474
    # z(R_dq): mean 7/12, deviations 1/12, 1/12, 5/12, -7/12, variance (1 + 1 + 25 + 49) / 144 / 3 = 0.175926,
    #          std 0.419435: 0.198680, 0.198680, 0.993400, -1.390760
    expected = [1.5 + 0.198680, -0.5 + 0.198680, -0.5 + 0.993400 + 1.224745, -0.5 - 1.390760 - 1.224745]
    assert [q.advantage for q in questions] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("answers, kept, p, answer, rewards", [
    (["4", "5", "4", None], True, 0.5, "4", [1, 0, 1, 0]),
    (["4", "5", "4", None], False, 0.5, "4", [0, 0, 0, 0]),        # filtered: p and l(q) all the same
    (["5", "4", "4", "5"], True, 0.5, "5", [1, 0, 0, 1])])         # a tie: the answer seen first
def test_judge_question_eq_4_to_7(answers, kept, p, answer, rewards):
    question = written(0.9, "old", [1], kept)
    responses = [SimpleNamespace(answer=a) for a in answers]
    classes = equivalence_classes(answers)
    judged = judge_question(question, responses, classes, dynamic_rl.majority_reward(classes))
    assert judged.tolist() == rewards and (question.p, question.label) == (p, answer)


# ------------------------------------------------- questions ----------------------------------------------
@pytest.mark.parametrize("text, question, rest", [
    ("Sure!\n\nQuestion:\nSolve $x = 3$.\nSolution: a\nQuestion: b Solution: c",
     "Solve $x = 3$.", "\nSolution: a\nQuestion: b Solution: c"),
    ("Question: never ends", None, ""),
    ("Question: \n\nSolution: 3", None, "")])
def test_find_question(text, question, rest):
    found, end = find_question(text)
    assert found == question and text[end:] == rest


KEEP = [
    # "find" and "and" in different sentences, or inside another word
    "Find $x$ if $3x = 12$. Tom and Ann each have $x$ pens.",
    "Finding a seat takes 5 minutes and walking home takes 10. How long is that together?",
    "Find the standard deviation of a fair die.",
    # numbers, points and labels that are no list
    "The radius of circle A is 1. The radius of circle B is 2. What is the ratio of their areas?",
    "Expand $(x - a) (x + a)$.",
    "If $x + y = 5$ (1) and $x - y = 1$ (2), what is $xy$?",
    "1. What is the value of $\\sqrt{144}$?",
    "Which is largest: (A) $2^{10}$ (B) $3^7$ (C) $5^4$?",
    # rule 3 is exact in case and spelling
    "Give your answer as a fraction: what is 0.125?",
    "A robot needs 4 steps to solve a maze. How many to solve 12 mazes like it?",
]
FILTER = [
    "PROVE: $\\sqrt{2}$ is irrational.",
    # several questions; a decimal point ends no sentence
    "What is the area of a circle of radius 3? What is its circumference?",
    "Find the sum $x + y$ where $2x = 6.5$ and $y = 4$.",
    "Find the eigenvalues\nand the eigenvectors of $\\begin{pmatrix} 2 & 0 \\\\ 0 & 3 \\end{pmatrix}$.",
    # enumerations
    "A die is rolled. Compute the following. 1. The chance of a six. 2. The expected value.",
    "Let $f(x) = x^3$.\n1) Compute $f'(2)$.\n2) Compute $f''(2)$.",
    "A box has 5 red balls. Determine: (1) the chance of red (2) the chance of blue",
    "For the parabola $y = x^2 - 2x$, determine (a) its vertex, (b) its roots.",
    "Consider the vector (1, 2). Compute (i) its length, (ii) its angle with the first axis.",
    # solutions inside
    "What is $2 + 2$? Answer: 4",
    "What is $2 + 2$?\nSolution: 4",
    "What is $3 \\cdot 4$, in the form \\boxed{12}?",
    "Compute $5!$. The final answer is 120.",
    "What is $x$ if $x + 1 = 3$? To solve it, subtract 1.",
    "How many primes are below 10? Let's break down the numbers.",
]


@pytest.mark.parametrize("text", KEEP + FILTER)
def test_kept_and_filtered_questions(text):
    assert keep_question(text) == (text in KEEP)


# ---------------------------------------------------- runs ------------------------------------------------
@pytest.mark.parametrize("fault, flags, expected", [
    ((dynamic_rl, "keep_question", lambda text: False), dict(kl_coef=0.5),
     dict(filtered=1, reward=0, question_reward=0)),
    ((common, "extract_answer", lambda *rest, **options: None), {},
     dict(answered=0, unique_answers=0, answer_diversity=0)),
    (None, dict(max_prompt_tokens=12, max_new_tokens=200), dict(no_question=0, filtered=1, reward=None))],
    ids=["all filtered", "no answers", "too long"])
def test_without_a_usable_question_there_is_no_update(fault, flags, expected, tmp_path, monkeypatch):
    if fault:
        monkeypatch.setattr(*fault)
    flags = dict(steps=1, votes=4, train_samples=4, kl_coef=0.0) | flags
    line, = run_toy(dynamic_rl, tmp_path / "run", **flags)
    assert "loss" not in line and "grad_norm" not in line and line["skipped_updates"] == 0
    for name, value in expected.items():
        assert line.get(name) == value, name
    before, after = fresh_state(options.TOY_MODEL), fresh_state(tmp_path / "run" / "final")
    assert all(torch.equal(weight.float(), after[name].float()) for name, weight in before.items())
