"""Exercise 6: the k3 term, GRPO's estimate of the KL divergence from the reference model, at every token.

    d_t = log pi_ref(y_t) - log pi(y_t)        KL_t = exp(d_t) - d_t - 1

It is never negative, and 0 where both models agree. It stands in the loss, so its gradient must reach log pi.

Worked example: pi = 0.5 and pi_ref = 0.25, so exp(d) = 0.5, d = -0.693 and KL = 0.5 + 0.693 - 1 = 0.193.
"""

import torch


def k3(logp_T: torch.Tensor, ref_logp_T: torch.Tensor) -> torch.Tensor:
    """KL_t [T] of the log-probs of a response's tokens under the policy [T] and the reference model [T]."""
    raise NotImplementedError
