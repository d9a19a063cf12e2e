"""Exercise 1: TTRL's majority reward (TTRL Eq. 3 and 4; ETTRL, Eq. 7).

N responses vote. Equal answers have the same class, a number that is only a name. A response without an
answer has None: it does not vote, and its reward is 0. The label y* is the most frequent class, and of equals
the one seen first:

    R_i = 1 if a_i = y*, else 0

Worked example: classes [0, 1, 0, None] have two votes for 0 and one for 1, so y* = 0 and R = [1, 0, 1, 0].
"""

import torch


def majority_reward(classes: list[int | None]) -> torch.Tensor:
    """The rewards [N] of the answer classes [N], as floats."""
    raise NotImplementedError
