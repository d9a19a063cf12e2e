"""What vLLM's build for CPUs changes in this process, and what it forgets. On a GPU none of this runs."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import torch

from engine.ranks import on_rank_0


@contextmanager
def starting(ranks: int):
    """While an engine of so many ranks starts."""
    if ranks > 1:
        # Its ranks share memory under names that are the same in every run. They stay when a run ends, and
        # the next one would not start. A run that still uses such memory does not need its name.
        on_rank_0(lambda: [path.unlink() for path in Path("/dev/shm").glob("-tp:*-cpushm_*")])
    set_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_threads  # it has put a stub there


def pack_again(model) -> None:
    """Once the engine's model has taken new weights: what was packed at the start, as the embedding that is a
    tied head, is not packed again by itself."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
