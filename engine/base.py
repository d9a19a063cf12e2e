"""The few things that everything else needs: errors, seeds, and talking to the other ranks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


class UserError(Exception):
    """Something the user can fix. Shown as one sentence, without a traceback."""


def seed_of(*parts) -> int:
    """62 bits that derive from the parts alone, so that a resumed run repeats an uninterrupted one.

    Sample i of a prompt draws from seed + i."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def distributed() -> bool:
    """Whether this process is one of torchrun's ranks. (Without ranks, vLLM opens a process group, too.)"""
    return dist.is_initialized() and "RANK" in os.environ


def rank_and_ranks() -> tuple[int, int]:
    """torchrun's (rank of this process, number of ranks), also before these meet; (0, 1) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def gather(item) -> list:
    """The item of every rank, in rank order, on every rank."""
    if not distributed():
        return [item]
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def on_all_ranks(work, sentence=str) -> list:
    """What work() returns on every rank. If it fails on one, all raise UserError: with the text of its own,
    or with sentence(kind and first line of another error)."""
    result, error = None, None
    try:
        result = work()
    except UserError as e:
        error = str(e)
    except (Exception, CheckpointException) as e:
        if isinstance(e, CheckpointException):  # of any rank
            e = next(iter(e.failures.values()))[0]
        error = sentence(f"{type(e).__name__} {first_line(e)}")
    results = gather((result, error))
    if error := next((error for _, error in results if error), None):
        raise UserError(error)
    return [result for result, _ in results]


def same_on_all_ranks(mine: dict) -> None:
    """Raises UserError, naming the entry and the rank, if one of these values differs from rank 0's."""
    first, *others = gather(mine)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                raise UserError(f"{name} is {other.get(name)!r} on rank {rank}, but {value!r} on rank 0; all "
                                "ranks need the same command, data and weights.")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with the next if it ends in a colon; its kind if it has none."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join([first, *rest[:1]]) if first.endswith(":") else first


def sharded(items: list, work, per_engine: int = 1) -> list:
    """work(this rank's share of the items), one result per item: all results, in order, on every rank.

    per_engine: so many consecutive ranks get the same share; only the first of them sends its results."""
    rank, ranks = rank_and_ranks()
    engine, engines = rank // per_engine, ranks // per_engine
    results = work(items[engine::engines])
    parts = gather(results if rank % per_engine == 0 else None)[::per_engine]
    return [parts[i % engines][i // engines] for i in range(len(items))]


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file and rename: a reader sees the old text or the new one, also after a kill."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)
