"""ETTRL: the equations and the tree against numbers worked out by hand, and a run without room for forks."""

import pytest
import torch
from conftest import run_toy

import common
import ettrl
from ettrl import Args, Fork, choose_forks, fork_points, reshape_advantages, tree_cost


# ------------------------------------------------- formulas -----------------------------------------------
def test_the_responses_that_vote_limit_the_trained_ones():
    """12 trunks (1 + 2 branches x 2 forks) are 60; without forks the trunks alone vote."""
    assert [Args(forks=forks, train_samples=2).responses_per_prompt() for forks in (2, 0)] == [60, 12]
    assert Args(votes=8).errors() == []  # the leaves vote: --votes does not matter ...
    assert len(Args(votes=8, rollout="parallel").errors()) == 1  # ... but here it does
    assert len(Args(train_samples=61).errors()) == 1


@pytest.mark.parametrize("logprobs, n, forbidden, expected", [
    ([-0.1, -2.0, -0.5, -3.0], 2, None, [3, 1]),     # surprisals 0.1 2 0.5 3, best first
    ([-1.0, -2.0, -2.0, -1.0], 3, None, [1, 2, 0]),  # ties to the earlier
    ([-1.0, -2.0], 5, None, [1, 0]),                 # fewer if there are fewer
    ([-1.0], 2, {0}, [])])                           # a response that is only its end-of-sequence token
def test_fork_points(logprobs, n, forbidden, expected):
    assert fork_points(logprobs, n, forbidden) == expected


@pytest.mark.parametrize("advantages, entropies, bounds, expected", [
    # H = 1.0 1.2 0.8 3.0, average 1.5. Y = 1 + (1.5 - H) / 1.5 = 1.333, 1.2, 1.467, 0: clipped to 0.8 .. 1.2
    ([1.0, -0.5, 2.0, -1.0], [1.0, 1.2, 0.8, 3.0], (), [1.2, -0.6, 2.4, -0.8]),
    # alpha 0.9, beta 0.4: Y = 1.333, 1.2, 1.4, 0.1; both signs of A are scaled
    ([1.0, -0.5, 2.0, -1.0], [1.0, 1.2, 0.8, 3.0], (0.9, 0.4), [4 / 3, -0.6, 2.8, -0.1]),
    ([1.0, -1.0], [0.0, 0.0], (), [1.0, -1.0])])  # average 0: Y = 1
def test_reshaping_by_hand(advantages, entropies, bounds, expected):
    reshaped = reshape_advantages(torch.tensor(advantages), torch.tensor(entropies), *bounds)
    assert reshaped.tolist() == pytest.approx(expected)


# ------------------------------------------------- the tree -----------------------------------------------
def rollout(ids, logprobs=None) -> common.Rollout:
    return common.Rollout([1, 2], ids, torch.tensor(logprobs or [0.0] * len(ids)), True)


def test_a_fork_is_not_at_the_end_of_the_text_and_prompts_take_turns():
    # surprisal 9: an end of the text; the last trunk is nothing else
    groups = [[rollout([5, 6, 7], [-1.0, -3.0, -9.0])],
              [rollout([5, 6, 7, 8], [-4.0, -3.0, -5.0, -9.0]), rollout([9], [-1.0])]]
    forks = choose_forks(None, groups, Args(trunks=2, forks=2))
    assert forks == [Fork(0, 0, 1), Fork(1, 0, 2), Fork(0, 0, 0), Fork(1, 0, 0)]


def test_cost_by_hand():
    # Two trunks of 4 and 6 tokens; branches of 2 and 3 from token 1, of 1 and 2 from token 3: 18 tokens.
    # Six parallel responses of the trunks' mean length, 5, are 30. Positions 1/4 and 3/6.
    trunks = [rollout([5] * 4), rollout([5] * 6)]
    forks = [Fork(0, 0, 1), Fork(0, 1, 3)]
    branches = [[rollout([6] * 2), rollout([6] * 3)], [rollout([6]), rollout([6] * 2)]]
    cost = tree_cost([trunks], [trunks + [None] * 4], forks, branches)
    assert cost == pytest.approx(dict(token_ratio=0.6, fork_position=0.375))


def test_responses_shorter_than_the_number_of_forks(tmp_path):
    line, = run_toy(ettrl, tmp_path / "run", steps=1, max_new_tokens=2, kl_coef=0.0, trunks=2, forks=6)
    # Two positions to fork at: 2 (1 + 2 x 2) = 10 leaves, parallel 20 tokens; here 2 x 2 + 4 x (2 + 1) = 16
    assert line["truncated"] == 1 and line["length"] == 2
    assert line["token_ratio"] == pytest.approx(0.8) and line["fork_position"] == 0.25
