"""RESTRAIN: formulas against numbers worked out by hand. (Stored votes of the initial model: test_run.py.)"""

import math

import pytest
import torch

from restrain import Args, gaussian_weight, label_weights, majority_count, prompt_weight
from restrain import restrain_advantages, weighted_labels


def close(tensor, expected, tolerance=1e-5):
    return torch.allclose(tensor.double(), torch.tensor(expected).double(), atol=tolerance, rtol=0)


# ------------------------------------------------- formulas -----------------------------------------------
def test_gaussian_by_hand():
    # sigma 1, f = 0.5: exp(-0.25 / 2) = exp(-0.125); sigma 0.5 is in its docstring
    assert close(gaussian_weight(torch.tensor([0.5]), 1.0), [0.882497])


@pytest.mark.parametrize("sigma, expected", [
    (0.0, [0.0, 0.0, 1.0]),
    (1e-6, [0.0, 0.0, 1.0]),
    (1e-300, [0.0, 0.0, 1.0]),
    (math.inf, [1.0, 1.0, 1.0])])
def test_gaussian_extreme_sigma(sigma, expected):
    assert gaussian_weight(torch.tensor([0.0, 0.9375, 1.0]), sigma).tolist() == expected


@pytest.mark.parametrize("counts, sigma, expected", [
    # Counts 8 and 8 x 1 of 16: g(1/2) = exp(-0.5) = 0.606531;
    # g(1/16) = exp(-(15/16)^2 / 0.5) = exp(-1.757813) = 0.172421.  Sum 0.606531 + 8 x 0.172421 = 1.985899:
    # the majority of 8 holds 0.305419 of the weight, each single answer 0.086823.
    ([8] + [1] * 8, 0.5, [0.305419] + [0.086823] * 8),
    ([3], 0.5, [1.0]),
    ([], 0.5, []),
    # sigma 0: the majority vote, of equals the first
    ([1, 5, 2], 0.0, [0.0, 1.0, 0.0]),
    ([2, 5, 5], 0.0, [0.0, 1.0, 0.0]),
    ([], 0.0, []),
    # next to 0, where g itself is 0 for every label and the plain quotient would be 0 / 0: the limit of Eq. 3
    ([5, 1, 2], 1e-3, [1.0, 0.0, 0.0]),
    ([5, 1, 2], 1e-300, [1.0, 0.0, 0.0]),
    ([4, 4, 1], 1e-160, [0.5, 0.5, 0.0]),
    ([5, 1, 2], math.inf, [1 / 3] * 3),
    ([5, 1, 2], 1e9, [1 / 3] * 3)])
def test_label_weights_of_16_votes(counts, sigma, expected):
    assert close(label_weights(counts, 16, sigma), expected)


def test_weighted_labels():
    # n = 4 counts the response without an answer: g(0.5) = 0.606531, g(0.25) = 0.324652
    assert weighted_labels([7, 4, 7, None]) == pytest.approx({7: 0.651355, 4: 0.348645}, abs=1e-6)
    assert weighted_labels([7, 4, 4, 7], sigma=0) == {7: 1.0, 4: 0.0}  # a tie: the answer seen first
    assert weighted_labels([None, None]) == {}


def test_advantages_by_hand():
    # n = 4, counts 2 and 1: g(0.5) = exp(-0.5) = 0.606531, g(0.25) = exp(-1.125) = 0.324652; sum 0.931183,
    #   w = 0.651355, 0.348645.
    # Label 0: rewards 1 1 0 0, mean 0.5, unbiased std sqrt(4 x 0.25 / 3) = 0.577350: advantages +-0.866025.
    # Label 1: rewards 0 0 1 0, mean 0.25, std sqrt((3 x 0.0625 + 0.5625) / 3) = 0.5: advantages 1.5 and -0.5.
    # A+: 0.651355 x 0.866025 = 0.564090 (twice), 0.348645 x 1.5 = 0.522968, 0.
    # A-: 0.348645 x -0.5 = -0.174323 (twice), 0.651355 x -0.866025 = -0.564090, the sum of both = -0.738413.
    a_plus, a_minus = restrain_advantages([0, 0, 1, None], kappa=2)
    assert close(a_plus, [0.564090, 0.564090, 0.522968, 0.0])
    assert close(a_minus, [-0.174323, -0.174323, -0.564090, -0.738413])


@pytest.mark.parametrize("classes, flags, penalty", [
    ([0, 0, 0, 1, 1, None], dict(kappa=4, delta=1.5), -1.5),  # M = 3 < kappa
    ([0, 1], {}, -1.0),                                       # one vote each: fewer than the paper's 3
    ([0, 1, 2, 3], dict(delta=0), 0.0),                       # delta 0 ignores the prompt
    ([None] * 3, dict(kappa=1, delta=2), -2.0),               # M = 0 < 1
    ([None] * 3, dict(kappa=0), 0.0),                         # no penalty, no label: nothing to learn
    ([0] * 4, {}, 0.0)])                                      # all agree
def test_penalised_and_unanimous_prompts(classes, flags, penalty):
    a_plus, a_minus = restrain_advantages(classes, **flags)
    assert a_plus.tolist() == [0.0] * len(classes) and a_minus.tolist() == [penalty] * len(classes)


def test_kappa_votes_are_enough():
    assert (restrain_advantages([0, 0, 0, 1, 1, None], kappa=3)[0] > 0).any()  # M = 3 < kappa is false


def test_prompt_weight_by_hand():
    assert prompt_weight(16, 16) == 1.0
    assert prompt_weight(8, 16) == pytest.approx(0.606531, abs=1e-6)  # exp(-0.25 / 0.5)
    assert prompt_weight(0, 16) == pytest.approx(0.135335, abs=1e-6)  # exp(-1 / 0.5): no answer keeps exp(-2)
    assert prompt_weight(8, 16, sigma=0) == 0.0 and prompt_weight(16, 16, sigma=0) == 1.0
    assert prompt_weight(1, 16, sigma=math.inf) == 1.0


@pytest.mark.parametrize("classes, count", [([], 0), ([None, None], 0), ([0, 1, 2], 1)])
def test_majority_count(classes, count):
    assert majority_count(classes) == count


def test_paper_defaults():
    args = Args()
    assert args.errors() == []
    assert (args.sigma, args.delta, args.kappa, args.prompt_sigma) == (0.5, 1.0, 3, 0.5)
    assert (args.votes, args.train_samples, args.lr, args.epochs) == (16, 16, 1e-6, 20)
    assert (args.max_new_tokens, args.kl_coef, args.entropy_coef, args.temperature) == (4096, 0.001, 0.0, 1.0)


def test_good_borders():
    assert Args(kappa=16, sigma=0.0, delta=0.0).errors() == []
    assert Args(kappa=0, sigma=math.inf, prompt_sigma=0.0).errors() == []
