"""SCRL against numbers worked out by hand from Eq. 4, 8 and 9."""

import pytest

from scrl import Args, pseudo_labels, scrl_rewards


def classes_of(*counts, none=0):
    """[0] * counts[0] + [1] * counts[1] + ..., then None."""
    classes = []
    for c, n in enumerate(counts):
        classes += [c] * n
    return classes + [None] * none


def rewards_of(classes, entropies, **flags):
    args = Args(**flags)
    return scrl_rewards(classes, entropies, *pseudo_labels(classes, entropies, args), args).tolist()


# ------------------------------------------------ Eq. 4 and 8 ---------------------------------------------
@pytest.mark.parametrize("counts, none, flags, positive", [
    ((12, 7), 13, {}, 0),  # 12/32 = 0.375 = tau_pos is enough; the lead is 5/32 = 0.156
    ((11, 1), 20, {}, None),  # 11/32 = 0.344 is not; None counts in N
    ((12, 8), 12, {}, None),  # the lead, 4/32 = 0.125 = tau_marg, must be exceeded
    # 4/10 - 1/10 = 0.3 = tau_marg is not above it, although 0.4 - 0.1 > 0.3 in floating point
    ((4, 1, 1, 1, 1, 1, 1), 0, dict(tau_marg=0.3), None),
    ((8, 12), 12, {}, None),  # the order in which the answers are seen does not matter
    ((), 32, {}, None),  # no answer at all
    # Table 3, no selection: a tie goes to the answer seen first
    ((2, 2, 2, 1, 1), 0, dict(selective_positive=False), 0), ((), 2, dict(selective_positive=False), None)])
def test_positive_label(counts, none, flags, positive):
    classes = classes_of(*counts, none=none)
    assert pseudo_labels(classes, [0.0] * len(classes), Args(**flags))[0] == positive


@pytest.mark.parametrize("counts, none, entropies, flags, expected", [
    # 20/32 is positive; 4/32 = 0.125 = tau_neg is not below it, 3/32 is; all entropies are equal: H_j = H_bar
    ((20, 4, 3, 1), 4, [0.5] * 32, {}, (0, {2, 3})),
    # Equal entropies, whose rounded sums give unequal means: H_j = H_bar all the same, hence negative
    ((26, 3, 3), 0, [0.7] * 32, {}, (0, {1, 2})),
    # Those without an answer are in H_bar, too: (15 * 0.4 + 0.5 + 16 * 0.6) / 32 = 16.1 / 32 = 0.503 > 0.5
    ((15, 1), 16, [0.4] * 15 + [0.5] + [0.6] * 16, {}, (0, set())),
    # The top answer may be negative: 1/16 < tau_neg, above the mean entropy (0.9 + 15 * 0.5) / 16 = 0.525
    ((1,), 15, [0.9] + [0.5] * 15, {}, (None, {0})),
    # tau_neg above the majority's share: the positive label still is no negative one (10/16, 6/16 < 0.7)
    ((10, 6), 0, [0.5] * 16, dict(tau_neg=0.7), (0, {1}))])
def test_negative_labels(counts, none, entropies, flags, expected):
    assert pseudo_labels(classes_of(*counts, none=none), entropies, Args(**flags)) == expected


# ------------------------------------------------ Eq. 9 ---------------------------------------------------
# Sixteen responses: 8 x answer 0 (H 0.2), 4 x 1 (0.4), 1 x 2 (1.2), 1 x 3 (0.2), 2 x None (0.6).
# H_bar = (1.6 + 1.6 + 1.2 + 0.2 + 1.2) / 16 = 5.8 / 16 = 0.3625
# 0: 8/16 = 0.5 >= 0.375 and the lead 4/16 = 0.25 > 0.125: positive.  1: 0.25 is no label.
# 2: 1/16 = 0.0625 < 0.125 and 1.2 >= 0.3625: negative.               3: 0.0625, but 0.2 < 0.3625: no label.
CLASSES = classes_of(8, 4, 1, 1, none=2)
ENTROPIES = [0.2] * 8 + [0.4] * 4 + [1.2, 0.2, 0.6, 0.6]


@pytest.mark.parametrize("flags, expected", [
    # 0: 0.5 - 0.1 (0.2 - 0.3625) = 0.51625                      1: -0.1 (0.4 - 0.3625) = -0.00375
    # 2: (0.0625 - 0.125) - 0.1 (1.2 - 0.3625) = -0.14625        3: -0.1 (0.2 - 0.3625) = 0.01625
    ({}, [0.51625, -0.00375, -0.14625, 0.01625, -1]),
    # The paper's silence on responses without an answer, read as Eq. 9 without any of its terms
    (dict(null_reward=0.0), [0.51625, -0.00375, -0.14625, 0.01625, 0]),
    # Table 3. Hard rewards; no gate: 3, too, is negative; no negatives: 2 has the entropy term only
    (dict(dynamic_rewards=False), [1, 0, -1, 0, -1]),
    (dict(entropy_gate=False), [0.51625, -0.00375, -0.14625, -0.0625 + 0.01625, -1]),
    (dict(negatives=False), [0.51625, -0.00375, -0.08375, 0.01625, -1])])
def test_rewards_of_eq_9_by_hand(flags, expected):
    zero, one, two, three, none = expected
    rewards = [zero] * 8 + [one] * 4 + [two, three, none, none]
    assert rewards_of(CLASSES, ENTROPIES, **flags) == pytest.approx(rewards)


def test_rewards_without_a_positive_label():
    # 4 of 16 is no positive label (0.25 < 0.375): nothing but the entropy term,
    # H_bar = (4 * 0.5 + 12 * 0.1) / 16 = 0.2.
    # 0: -0.1 (0.5 - 0.2) = -0.03; the twelve others have 1/16 and H 0.1 < 0.2: -0.1 (0.1 - 0.2) = 0.01
    rewards = rewards_of([0] * 4 + list(range(1, 13)), [0.5] * 4 + [0.1] * 12)
    assert rewards == pytest.approx([-0.03] * 4 + [0.01] * 12)
    assert rewards_of([None] * 4, [0.1, 0.2, 0.3, 0.4]) == [-1.0] * 4


def test_gold_labels_are_refused():
    assert [sentence[:19] for sentence in Args(labels="gold").errors()] == ["--labels is 'gold',"]
