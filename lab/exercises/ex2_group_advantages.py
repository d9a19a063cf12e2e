"""Exercise 2: GRPO's advantages.

A response is judged against the others of its group: with the G rewards of one problem,

    A_i = (R_i - mean R) / (std R + eps)

std is the unbiased one, which divides by G - 1. If all rewards are equal, or there is only one, there is
nothing to compare: all advantages are 0.

Worked example: R = [1, 0, 0, 1], mean 0.5, std sqrt(4 * 0.25 / 3) = 0.577: A = [.866, -.866, -.866, .866].
"""

import torch


def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The advantages [G] of the rewards [G]."""
    raise NotImplementedError
