"""What everything else needs: the user's errors, requests to a sampler, the clock of a step, hashes, files.

It knows nothing of models, runs or ranks."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch


class UserError(Exception):
    """Something the user can fix. Shown as one sentence, without a traceback."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with the next if it ends in a colon; its kind if it has no text."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    if "trust_remote_code=True" in str(error):  # transformers names its own option, and on a later line
        return f"{first.rstrip(' .')}; if you trust its author, give --trust_remote_code (also with --resume)"
    return " ".join([first, *rest[:1]]) if first.endswith(":") else first


# ------------------------------------------------- what a sampler is asked ---------------------------------
@dataclass
class Request:
    """n responses to one prompt. Sample i draws from the stream of seed + i."""
    prompt_ids: list[int]
    n: int
    seed: int
    max_new_tokens: int


class Sample(NamedTuple):
    """One response: its tokens [T], their log-probs [T] float32, and whether it ended before its limit."""
    response_ids: list[int]
    logprobs: torch.Tensor
    finished: bool


def stop_texts(stop) -> list[str]:
    """The texts that end a response. Raises ValueError if there are none such."""
    # one bare text would be read as a list of letters, and an empty text ends every response at once
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop is {stop!r}, but must be a list of texts, none of them empty")
    return list(stop)


# ------------------------------------------------- where a step's time goes --------------------------------
seconds = Counter()  # by phase, since the step began


@contextmanager
def timed(phase: str):
    """Log the time of a `with` block, or of a function with this decorator, as seconds/phase.

    The time of a phase within it counts for that phase alone."""
    began, inner = now(), seconds.total()
    yield
    seconds[phase] += now() - began - (seconds.total() - inner)


def timed_loop(phase: str, items):
    """The items, one by one; the time that the loop spends on them is logged as seconds/phase."""
    for item in items:
        with timed(phase):
            yield item


def now() -> float:
    """Seconds, once a GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


# ------------------------------------------------------ hashes, files --------------------------------------
def stable_hash(*parts) -> int:
    """A hash of 62 bits, the same in every process: a seed, or a digest of data."""
    # Python's own hash() of a text differs from process to process
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file and rename: a reader sees the old text or the new one, also after a kill."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)
