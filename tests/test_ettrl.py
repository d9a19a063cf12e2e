"""ETTRL: reshaping against numbers worked out by hand, and a run without room for forks."""

import pytest
import torch
from conftest import run_toy

import ettrl
from ettrl import reshape_advantages


@pytest.mark.parametrize("advantages, entropies, bounds, expected", [
    # H = 1.0 1.2 0.8 3.0, average 1.5. Y = 1 + (1.5 - H) / 1.5 = 1.333, 1.2, 1.467, 0: clipped to 0.8 .. 1.2
    ([1.0, -0.5, 2.0, -1.0], [1.0, 1.2, 0.8, 3.0], (), [1.2, -0.6, 2.4, -0.8]),
    # alpha 0.9, beta 0.4: Y = 1.333, 1.2, 1.4, 0.1; both signs of A are scaled
    ([1.0, -0.5, 2.0, -1.0], [1.0, 1.2, 0.8, 3.0], (0.9, 0.4), [4 / 3, -0.6, 2.8, -0.1]),
    ([1.0, -1.0], [0.0, 0.0], (), [1.0, -1.0])])  # average 0: Y = 1
def test_reshaping_by_hand(advantages, entropies, bounds, expected):
    reshaped = reshape_advantages(torch.tensor(advantages), torch.tensor(entropies), *bounds)
    assert reshaped.tolist() == pytest.approx(expected)


def test_responses_shorter_than_the_number_of_forks(tmp_path):
    line, = run_toy(ettrl, tmp_path / "run", steps=1, max_new_tokens=2, kl_coef=0.0, trunks=2, forks=6)
    # Two positions to fork at: 2 (1 + 2 x 2) = 10 leaves, parallel 20 tokens; here 2 x 2 + 4 x (2 + 1) = 16
    assert line["truncated"] == 1 and line["length"] == 2
    assert line["token_ratio"] == pytest.approx(0.8) and line["fork_position"] == 0.25
