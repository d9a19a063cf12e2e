"""The few things that everything else needs: errors, requests, clocks, hashes, files; torchrun's ranks: which
one this is, what all must share, and how work is split among them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE
from torch.distributed.checkpoint.api import CheckpointException
from tqdm import tqdm


class UserError(Exception):
    """Something the user can fix. Shown as one sentence, without a traceback."""


@dataclass
class Request:
    """n responses to one prompt. Sample i draws from the stream of seed + i."""
    prompt_ids: list[int]
    n: int
    seed: int
    max_new_tokens: int


class Sample(NamedTuple):
    """What a sampler makes: the tokens of a response [T], their log-probs [T] float32, and whether it ended
    before its limit."""
    response_ids: list[int]
    logprobs: torch.Tensor
    finished: bool


seconds = Counter()  # by phase: where the time of the current step went


@contextmanager
def timed(phase: str):
    """The time of a `with` block, or of a function with this decorator, is logged as seconds/phase, less that
    of phases within it."""
    began, inner = now(), seconds.total()
    yield
    seconds[phase] += now() - began - (seconds.total() - inner)


def timed_loop(phase: str, items):
    """The items, one by one; the time of the loop over them is logged as seconds/phase."""
    for item in items:
        with timed(phase):
            yield item


def now() -> float:
    """Seconds, once a GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def stable_hash(*parts) -> int:
    """A hash of 62 bits, the same in every process: a seed, or a digest of data."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with the next if it ends in a colon; its kind if it has none.

    A library that asks for its own option, or cannot write its cache, does not know our flag for it."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    if "trust_remote_code=True" in str(error):
        return (f"{first.rstrip(' .')}; if you trust its author, give --trust_remote_code, at every start (a "
                "run's folder does not keep it)")
    if isinstance(error, OSError) and str(error.filename).startswith((HF_HOME, HF_HUB_CACHE)):
        return f"the cache {error.filename} cannot be used ({error.strerror}); HF_HOME names another"
    return " ".join([first, *rest[:1]]) if first.endswith(":") else first


def stop_texts(stop) -> list[str]:
    """The texts that end a response. Raises ValueError if they are one bare text, each letter of which would
    end it, or if one is empty, which every token completes."""
    texts = None if isinstance(stop, str | bytes) else list(stop or ())
    if texts is None or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop is {stop!r}, but must be a list of texts, none of them empty")
    return texts


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file and rename: a reader sees the old text or the new one, also after a kill."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def read_run(folder: Path, wanted: str = "--resume: ") -> dict:
    """run.json of a run folder. Raises UserError, which begins with `wanted`, if it is missing or damaged."""
    path = folder / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        return run | dict(script=run["script"], args=dict(run["args"]), identity=dict(run["identity"]))
    except Exception as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else f"it is damaged ({error})"
        raise UserError(f"{wanted}{path} cannot be read, {reason}.") from None


def script_name() -> str:
    """The name that run folders and run.json know a script by: ttrl.py is ttrl."""
    return Path(sys.argv[0]).stem


# ------------------------------------------------------- ranks ----------------------------------------------
def distributed() -> bool:
    """Whether this process is one of torchrun's ranks. (Without ranks, vLLM opens a process group, too.)"""
    return dist.is_initialized() and bool(os.environ.get("RANK"))


def from_torchrun(name: str, default: int) -> int:
    """An environment variable that torchrun sets; empty, as some launchers leave it, it is not set."""
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise UserError(f"the environment variable {name} is '{text}', but must be a whole number or unset.")
    return int(text or default)


def rank_and_ranks() -> tuple[int, int]:
    """torchrun's (rank of this process, number of ranks), also before these meet; (0, 1) without it."""
    return from_torchrun("RANK", 0), from_torchrun("WORLD_SIZE", 1)


def print0(text: str) -> None:
    """Print a line on rank 0, above the progress bar if there is one."""
    if rank_and_ranks()[0] == 0:
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # what it was piped into, as `head`, has ended; the run goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


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
    result, error = None, None
    try:
        result = work()
    except UserError as e:
        error = str(e)
    except (Exception, CheckpointException) as e:
        if isinstance(e, CheckpointException):  # of any rank
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
    rank, ranks = rank_and_ranks()
    return items[rank // per_engine::ranks // per_engine]


def gather_shares(results: list, per_engine: int = 1) -> list:
    """The results of all ranks' shares, in the order of the items they were made from, on every rank."""
    rank, ranks = rank_and_ranks()
    # the ranks of an engine have the same results: only the first of them sends any
    shares = all_gather(results if rank % per_engine == 0 else None)[::per_engine]
    engines, items = ranks // per_engine, sum(len(share) for share in shares)
    return [shares[i % engines][i // engines] for i in range(items)]


def split_requests(work: list[tuple], n: int, engines: int) -> tuple[list[tuple], int]:
    """(the requests of n samples each, split; how many each became). work: (prompt, request).

    Each prompt's samples are split into `parts` requests, so that no engine idles when there are fewer
    prompts than engines: a multiple of the engines, if n allows it."""
    parts, requests = 1, []
    if len(work) < engines:
        parts = min(n, engines // math.gcd(engines, len(work)))
    ends = [n * k // parts for k in range(parts + 1)]
    for prompt, request in work:
        for begin, end in zip(ends, ends[1:]):
            requests.append((prompt, replace(request, n=end - begin, seed=request.seed + begin)))
    return requests, parts
