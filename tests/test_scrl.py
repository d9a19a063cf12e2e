"""SCRL against numbers worked out by hand from Eq. 4, 8 and 9."""

import pytest

from scrl import pseudo_labels, scrl_rewards


def classes_of(*counts, none=0):
    """[0] * counts[0] + [1] * counts[1] + ..., then None."""
    classes = []
    for c, n in enumerate(counts):
        classes += [c] * n
    return classes + [None] * none


# ------------------------------------------------ Eq. 4 and 8 ---------------------------------------------
@pytest.mark.parametrize("counts, none, positive", [
    ((12, 7), 13, 0),  # 12/32 = 0.375 = tau_pos is enough; the lead is 5/32 = 0.156
    ((11, 1), 20, None),  # 11/32 = 0.344 is not; None counts in N
    ((12, 8), 12, None),  # the lead, 4/32 = 0.125 = tau_marg, must be exceeded
    ((13, 8), 11, 0),  # 5/32 does
    ((8, 12), 12, None),  # the order in which the answers are seen does not matter
    ((16, 16), 0, None),  # a tie
    ((32,), 0, 0),  # one class only: there is no second, its share is 0
    ((), 32, None),  # no answer at all
])
def test_positive_label(counts, none, positive):
    assert pseudo_labels(classes_of(*counts, none=none), [0.0] * 32)[0] == positive


def test_margin_is_exact_for_shares_that_are_not_binary_fractions():
    # 4/10 - 1/10 = 0.3 = tau_marg is not above it, although 0.4 - 0.1 > 0.3 in floating point
    assert pseudo_labels(classes_of(4, 1, 1, 1, 1, 1, 1), [0.0] * 10, tau_marg=0.3)[0] is None


@pytest.mark.parametrize("counts, none, entropies, flags, expected", [
    # 20/32 is positive; 4/32 = 0.125 = tau_neg is not below it, 3/32 is; all entropies are equal: H_j = H_bar
    ((20, 4, 3, 1), 4, [0.5] * 32, {}, (0, {2, 3})),
    # Equal entropies, whose rounded sums give unequal means: H_j = H_bar all the same, hence negative
    ((26, 3, 3), 0, [0.7] * 32, {}, (0, {1, 2})),
    # H_bar = (26 * 0.5 + 3 * 0.25 + 3 * 0.75) / 32 = 16 / 32 = 0.5: 0.25 is below it, 0.75 above
    ((26, 3, 3), 0, [0.5] * 26 + [0.25] * 3 + [0.75] * 3, {}, (0, {2})),
    # A class of two (2/17 < 0.125) has the mean of both: (0.25 + 0.75) / 2 = 0.5 = H_bar
    ((15, 2), 0, [0.5] * 15 + [0.25, 0.75], {}, (0, {1})),
    # Those without an answer are in H_bar, too: (15 * 0.4 + 0.5 + 16 * 0.6) / 32 = 16.1 / 32 = 0.503 > 0.5
    ((15, 1), 16, [0.4] * 15 + [0.5] + [0.6] * 16, {}, (0, set())),
    # The top answer may be negative: 1/16 < tau_neg, above the mean entropy (0.9 + 15 * 0.5) / 16 = 0.525
    ((1,), 15, [0.9] + [0.5] * 15, {}, (None, {0})),
    # tau_neg above the majority's share: the positive label still is no negative one (10/16, 6/16 < 0.7)
    ((10, 6), 0, [0.5] * 16, dict(tau_neg=0.7), (0, {1}))])
def test_negative_labels(counts, none, entropies, flags, expected):
    assert pseudo_labels(classes_of(*counts, none=none), entropies, **flags) == expected


# ------------------------------------------------ Eq. 9 ---------------------------------------------------
# Sixteen responses: 8 x answer 0 (H 0.2), 4 x 1 (0.4), 1 x 2 (1.2), 1 x 3 (0.2), 2 x None (0.6).
# H_bar = (1.6 + 1.6 + 1.2 + 0.2 + 1.2) / 16 = 5.8 / 16 = 0.3625
# 0: 8/16 = 0.5 >= 0.375 and the lead 4/16 = 0.25 > 0.125: positive.  1: 0.25 is no label.
# 2: 1/16 = 0.0625 < 0.125 and 1.2 >= 0.3625: negative.               3: 0.0625, but 0.2 < 0.3625: no label.
CLASSES = classes_of(8, 4, 1, 1, none=2)
ENTROPIES = [0.2] * 8 + [0.4] * 4 + [1.2, 0.2, 0.6, 0.6]


def one_each(rewards):
    """The rewards of answers 0, 1, 2, 3 and None, after checking that an answer's responses share theirs."""
    for same in (rewards[:8], rewards[8:12], rewards[14:]):
        assert len(set(same.tolist())) == 1
    return rewards[[0, 8, 12, 13, 14]].tolist()


def test_rewards_of_eq_9_by_hand():
    assert pseudo_labels(CLASSES, ENTROPIES) == (0, {2})
    # 0: 0.5 - 0.1 (0.2 - 0.3625) = 0.51625                      1: -0.1 (0.4 - 0.3625) = -0.00375
    # 2: (0.0625 - 0.125) - 0.1 (1.2 - 0.3625) = -0.14625        3: -0.1 (0.2 - 0.3625) = 0.01625
    rewards = scrl_rewards(CLASSES, ENTROPIES)
    assert one_each(rewards) == pytest.approx([0.51625, -0.00375, -0.14625, 0.01625, -1])
    # Table 9: without and with a ten times larger penalty (-0.1 becomes 0 and -1)
    rewards = scrl_rewards(CLASSES, ENTROPIES, lambda_h=0.0)
    assert one_each(rewards) == pytest.approx([0.5, 0, -0.0625, 0, -1])
    rewards = scrl_rewards(CLASSES, ENTROPIES, lambda_h=1.0)
    assert one_each(rewards) == pytest.approx([0.6625, -0.0375, -0.9, 0.1625, -1])
    # The paper's silence on responses without an answer, read as Eq. 9 without any of its terms
    assert one_each(scrl_rewards(CLASSES, ENTROPIES, null_reward=0.0))[-1] == 0


def test_rewards_without_a_positive_label_or_other_answers():
    # 4 of 16 is no positive label (0.25 < 0.375): nothing but the entropy term,
    # H_bar = (4 * 0.5 + 12 * 0.1) / 16 = 0.2.
    # 0: -0.1 (0.5 - 0.2) = -0.03; the twelve others have 1/16 and H 0.1 < 0.2: -0.1 (0.1 - 0.2) = 0.01
    rewards = scrl_rewards([0] * 4 + list(range(1, 13)), [0.5] * 4 + [0.1] * 12)
    assert rewards.tolist() == pytest.approx([-0.03] * 4 + [0.01] * 12)
    # 6/8 - 0.1 (0.2 - 0.3), H_bar = (6 * 0.2 + 2 * 0.6) / 8 = 0.3
    rewards = scrl_rewards([0] * 6 + [None] * 2, [0.2] * 6 + [0.6] * 2)
    assert rewards.tolist() == pytest.approx([0.76] * 6 + [-1] * 2)
    assert scrl_rewards([None] * 4, [0.1, 0.2, 0.3, 0.4]).tolist() == [-1.0] * 4


def test_ablations_of_table_3():
    assert one_each(scrl_rewards(CLASSES, ENTROPIES, hard=True)) == [1, 0, -1, 0, -1]
    # No gate: 3, too, is negative, (0.0625 - 0.125) + 0.01625 = -0.04625
    positive, negatives = pseudo_labels(CLASSES, ENTROPIES, entropy_gate=False)
    rewards = scrl_rewards(CLASSES, ENTROPIES, positive=positive, negatives=negatives)
    assert one_each(rewards)[3] == pytest.approx(-0.04625)
    # No negatives: 2 has the entropy term only, -0.1 (1.2 - 0.3625)
    positive, negatives = pseudo_labels(CLASSES, ENTROPIES, negatives=False)
    rewards = scrl_rewards(CLASSES, ENTROPIES, positive=positive, negatives=negatives)
    assert one_each(rewards)[2] == pytest.approx(-0.08375)
    # No selection: a tie of 1/4 each goes to the answer seen first
    tie, entropies = [5, 3, 5, 3, 0, 0, 1, 2], [0.0] * 8
    assert pseudo_labels(tie, entropies, negatives=False) == (None, set())
    assert pseudo_labels(tie, entropies, negatives=False, selective_positive=False) == (5, set())
    assert pseudo_labels([None] * 2, [0.0] * 2, selective_positive=False) == (None, set())
