"""RESTRAIN: the limits of its formulas, by hand. (Stored votes of the base model: test_run.py.)"""

import math

import pytest

from restrain import Args, label_weights, prompt_weight, restrain_advantages, weighted_labels


# ------------------------------------------------- formulas -----------------------------------------------
@pytest.mark.parametrize("sigma, expected", [
    (0.0, [0.0, 0.0, 1.0]),
    (0.5, [0.135335, 0.606531, 1.0]),  # exp(-2), exp(-1/2)
    (math.inf, [1.0, 1.0, 1.0])])
def test_prompt_weight_by_hand(sigma, expected):
    assert [prompt_weight(votes, 16, sigma) for votes in (0, 8, 16)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("counts, sigma, expected", [
    # Counts 8 and 8 x 1 of 16: g(1/2) = exp(-0.5) = 0.606531;
    # g(1/16) = exp(-(15/16)^2 / 0.5) = exp(-1.757813) = 0.172421.  Sum 0.606531 + 8 x 0.172421 = 1.985899:
    # the majority of 8 holds 0.305419 of the weight, each single answer 0.086823.
    ([8] + [1] * 8, 0.5, [0.305419] + [0.086823] * 8),
    ([], 0.5, []),
    ([2, 5, 5], 0.0, [0.0, 1.0, 0.0]),  # sigma 0: the majority vote, of equals the first
    # g itself is 0 for every label, and the plain quotient would be 0 / 0: the limit of Eq. 3
    ([4, 4, 1], 1e-9, [0.5, 0.5, 0.0]),
    ([5, 1, 2], math.inf, [1 / 3] * 3)])
def test_label_weights_of_16_votes(counts, sigma, expected):
    assert label_weights(counts, 16, sigma).tolist() == pytest.approx(expected, abs=1e-5)


def test_weighted_labels():
    # n = 4 counts the response without an answer: g(0.5) = 0.606531, g(0.25) = 0.324652
    assert weighted_labels([7, 4, 7, None]) == pytest.approx({7: 0.651355, 4: 0.348645}, abs=1e-6)
    assert weighted_labels([7, 4, 4, 7], sigma=0) == {7: 1.0, 4: 0.0}  # a tie: the answer seen first
    assert weighted_labels([None, None]) == {}


@pytest.mark.parametrize("classes, flags, penalty", [
    ([0, 1], {}, -1.0),                                       # one vote each: fewer than the paper's 3
    ([None] * 3, dict(kappa=0), 0.0),                         # no penalty, no label: nothing to learn
    ([0] * 4, {}, 0.0)])                                      # all agree
def test_penalised_and_unanimous_prompts(classes, flags, penalty):
    a_plus, a_minus = restrain_advantages(classes, **flags)
    assert a_plus.tolist() == [0.0] * len(classes) and a_minus.tolist() == [penalty] * len(classes)


def test_all_bad_flags_are_told_and_gold_labels_refused():
    kappa, gold = Args(kappa=17, labels="gold").errors()
    assert kappa.startswith("--kappa is 17") and gold.startswith("--labels is 'gold'")
