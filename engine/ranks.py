"""torchrun's ranks: which one this process is, what all of them must share, and how work is split among them.

Everything here works without torchrun, too: then there is one rank, number 0. Nothing else in the code asks
torch.distributed who is there. What runs on the ranks, models and their shards, is policy.py's business."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from tqdm import tqdm

from engine.base import UserError, first_line


def distributed() -> bool:
    """Whether this process is one of torchrun's ranks, and these have met."""
    # vLLM opens a process group of its own, also where there are no ranks
    return dist.is_initialized() and bool(os.environ.get("RANK"))


def from_torchrun(name: str, default: int) -> int:
    """A number that torchrun puts into the environment."""
    # some launchers set it to an empty text, which means that it is not set
    return int(os.environ.get(name) or default)


def rank_and_ranks() -> tuple[int, int]:
    """torchrun's (rank of this process, number of ranks), also before these meet; (0, 1) without it."""
    return from_torchrun("RANK", 0), from_torchrun("WORLD_SIZE", 1)


def print0(text: str) -> None:
    """Print a line on rank 0, above the progress bar if there is one."""
    if rank_and_ranks()[0] == 0:
        tqdm.write(text)
        sys.stdout.flush()  # a log file shows it now, not after another 8 kB


def all_gather(item) -> list:
    """The item of every rank, in rank order, on every rank."""
    if not distributed():
        return [item]
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def on_all_ranks(work, sentence=str) -> list:
    """What work() returns on every rank. If it fails on one, all raise UserError: with the text of its own,
    or with sentence(kind and first line of another error)."""
    # A rank that raised alone would leave the others waiting for it in their next collective, for hours. So
    # each tells the others how it went before any of them raises.
    result, error = None, None
    try:
        result = work()
    except UserError as e:
        error = str(e)
    except (Exception, CheckpointException) as e:
        if isinstance(e, CheckpointException):  # it holds the errors of all ranks that failed
            e = next(iter(e.failures.values()))[0]
        error = sentence(f"{type(e).__name__} {first_line(e)}")
    results = all_gather((result, error))
    if error := next((error for _, error in results if error), None):
        raise UserError(error)
    return [result for result, _ in results]


def on_rank_0(work, sentence=str):
    """What work() returns on rank 0, on every rank; if it fails there, all raise UserError, as above."""
    return on_all_ranks(lambda: work() if rank_and_ranks()[0] == 0 else None, sentence)[0]


def same_on_all_ranks(mine: dict) -> None:
    """Raises UserError, naming the entry and the rank, if one of these values differs from rank 0's."""
    first, *others = all_gather(mine)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                raise UserError(f"{name} is {other.get(name)!r} on rank {rank}, but {value!r} on rank 0; all "
                                "ranks need the same command, data and weights.")


def share_of_rank(items: list, per_engine: int = 1) -> list:
    """Every n-th of the items, for n engines. per_engine: so many consecutive ranks get the same share."""
    # every n-th and not the n-th part: in a data set long problems may stand together
    rank, ranks = rank_and_ranks()
    return items[rank // per_engine::ranks // per_engine]


def gather_shares(results: list, per_engine: int = 1) -> list:
    """The results of all ranks' shares, in the order of the items they were made from, on every rank."""
    rank, ranks = rank_and_ranks()
    # the ranks of an engine have the same results: only the first of them sends any
    shares = all_gather(results if rank % per_engine == 0 else None)[::per_engine]
    engines, items = ranks // per_engine, sum(len(share) for share in shares)
    return [shares[i % engines][i // engines] for i in range(items)]


def on_all_engines(sample, work: list[tuple], n: int, per_engine: int, split: bool = True) -> list[list]:
    """n responses to each (prompt, request) of the work, in its order, on every rank.

    sample: makes the responses to one engine's share. per_engine: the number of ranks that share an engine.
    split: whether a prompt's responses may come from several engines."""
    engines = rank_and_ranks()[1] // per_engine if split else 1
    requests, parts = split_requests(work, n, engines)
    groups = gather_shares(sample(share_of_rank(requests, per_engine)), per_engine)
    return [sum(groups[first:first + parts], []) for first in range(0, len(groups), parts)]


def split_requests(work: list[tuple], n: int, engines: int) -> tuple[list[tuple], int]:
    """(the requests of n samples each, split; how many each became). work: (prompt, request).

    Each prompt's samples are split into `parts` requests, so that no engine idles when there are fewer
    prompts than engines: a multiple of the engines, if n allows it."""
    parts, requests = 1, []
    if len(work) < engines:
        # the fewest parts with which all prompts together have a multiple of the engines
        parts = min(n, engines // math.gcd(engines, len(work)))
    ends = [n * k // parts for k in range(parts + 1)]  # sample i keeps its seed, whichever engine draws it
    for prompt, request in work:
        for begin, end in zip(ends, ends[1:]):
            requests.append((prompt, replace(request, n=end - begin, seed=request.seed + begin)))
    return requests, parts
