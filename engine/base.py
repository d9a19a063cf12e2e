"""The few things that everything else needs: errors, requests, hashes, clocks, what a run folder names."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE


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
