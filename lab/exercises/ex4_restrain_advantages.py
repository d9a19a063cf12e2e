"""Exercise 4: RESTRAIN's advantages (RESTRAIN Eq. 3 and 4; the positive and negative parts: Eq. 6 and 7).

Every answer j is a label, weighted by its votes c_j: with g(f) = exp(-(f - 1)^2 / (2 sigma^2)),

    w_j   = g(c_j / n) / sum_l g(c_l / n)
    A_ij  = GRPO's advantage of response i if j were the label (exercise 2, eps = 1e-6)
    A+_i  = sum_j w_j max(A_ij, 0)        A-_i = sum_j w_j min(A_ij, 0)

A response without an answer, None, is no label, but counts in n; its reward is 0 under every label. If the
most frequent answer has fewer than kappa votes, all responses are penalised: A+_i = 0 and A-_i = -delta.

Worked example: classes [0, 0, 1, None], kappa = 2, sigma = 0.5. g(0.5) = 0.607 and g(0.25) = 0.325, so the
weights are 0.651 and 0.349. Under label 0 the advantages are 0.866, 0.866, -0.866, -0.866, under label 1
they are -0.5, -0.5, 1.5, -0.5. A+ = [0.564, 0.564, 0.523, 0] and A- = [-0.174, -0.174, -0.564, -0.738].
"""

import torch


def restrain_advantages(classes: list[int | None], kappa: int = 3, delta: float = 1.0,
                        sigma: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """(A+ [N], A- [N]) of the answer classes [N]."""
    raise NotImplementedError
