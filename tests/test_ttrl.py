"""TTRL: formulas against hand-worked numbers, and learning on the toy."""

import math

import pytest
import torch

from common import Problem, Rollout, answer_classes
from ttrl import group_advantages, majority_reward


# ------------------------------------------------- formulas -----------------------------------------------
@pytest.mark.quick
@pytest.mark.parametrize("classes, expected", [
    ([0, 1, 1, 0], [1, 0, 0, 1]),          # tie: the class seen first wins
    ([None, None, 0], [0, 0, 1]),          # None never votes, even as the most frequent
    ([None, None], [0, 0]),                # all None: zeros
    ([], [])])
def test_votes_ties_and_none_by_hand(classes, expected):
    assert majority_reward(classes).tolist() == expected


@pytest.mark.quick
def test_group_advantages_by_hand():
    # rewards 1, 0, 0: mean 1/3; deviations 2/3, -1/3, -1/3; unbiased variance (4/9 + 1/9 + 1/9) / 2 = 1/3,
    # std 0.57735; advantages 0.66667 / 0.57735 = 1.15470 and -0.33333 / 0.57735 = -0.57735
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0]))
    assert advantages.tolist() == pytest.approx([1.15470, -0.57735, -0.57735], abs=1e-4)
    # the scale goes, up to eps: rewards 1e-6, 0, 0 have std 5.8e-7, so eps = 1e-6 takes 1.1547 / (1 + 1.732)
    tiny = group_advantages(torch.tensor([1e-6, 0.0, 0.0]))
    assert tiny[0].item() == pytest.approx(1.15470 / (1 + math.sqrt(3)), rel=1e-3)


@pytest.mark.quick
@pytest.mark.parametrize("rewards", [[-1.3] * 6, [0.0], []])
def test_group_advantages_without_spread_are_zero(rewards):
    """Also of six rewards of -1.3, which have not quite this mean in float32."""
    assert group_advantages(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_answer_classes_by_hand():
    """Equal answers share a class, however they are written; with gold labels only right ones have one."""
    answers = ["3", r"\frac{1}{2}", None, "0.5", "3.0", "7"]
    given = [Rollout([1], [2], torch.zeros(1), True, answer=answer) for answer in answers]
    assert answer_classes(Problem("p", "0.5"), given) == [0, 1, None, 1, 0, 2]
    assert answer_classes(Problem("p", "0.5"), given, "gold") == [None, 0, None, 0, None, None]
    assert answer_classes(Problem("p", "8"), given, "gold") == [None] * 6
