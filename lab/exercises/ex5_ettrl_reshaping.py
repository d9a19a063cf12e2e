"""Exercise 5: ETTRL's reshaped advantages (EAR; ETTRL Eq. 12 to 14, Adv-Res).

An advantage counts more where the response was surer than the average of its group, and less where it was
less sure. With the mean token entropies H_i of the G responses and their average avg H it becomes

    A_i clip(1 + (avg H - H_i) / avg H, 1 - alpha, 1 + beta), or stays A_i if all entropies are 0

Worked example: A = [1, -1, 1] and H = [0.9, 1.0, 1.1]: the factors are 1.1, 1.0 and 0.9, so [1.1, -1, 0.9].
"""

import torch


def reshape_advantages(advantages: torch.Tensor, entropies: torch.Tensor, alpha: float = 0.2,
                       beta: float = 0.2) -> torch.Tensor:
    """The reshaped advantages [G] of the advantages [G] and the entropies [G] (nats)."""
    raise NotImplementedError
