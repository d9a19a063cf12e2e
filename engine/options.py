"""Options: ranges declared on the fields of Args, the command line, and how a script starts and ends."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import tyro
from torch.distributed.elastic.multiprocessing.errors import record

from engine.base import UserError, distributed, gather
from engine.smollm2 import SMOLLM2


# ------------------------------------------------------- ranges ---------------------------------------------
@dataclass(frozen=True)
class Between:
    """Allowed values of an option: low <= value <= high; `above`: low < value; infinity only if `high` is."""
    low: float
    high: float = math.inf
    above: bool = False
    finite: bool = True

    def holds(self, value) -> bool:
        if value != value or self.finite and abs(value) == math.inf:  # NaN; whole numbers can be any size
            return False
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        if self.high < math.inf:
            if self.above:
                return f"above {self.low:g} and at most {self.high:g}"
            return f"between {self.low:g} and {self.high:g}"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        return low + ("" if self.finite else ", or inf")


Count = Annotated[int, Between(1)]
CountOrZero = Annotated[int, Between(0)]
NonNegative = Annotated[float, Between(0)]
NonNegativeOrInf = Annotated[float, Between(0, finite=False)]
Positive = Annotated[float, Between(0, above=True)]
Share = Annotated[float, Between(0, 1)]
PositiveShare = Annotated[float, Between(0, 1, above=True)]
Finite = Annotated[float, Between(-1e30)]
Seed = CountOrZero


def out_of_range(args) -> list[str]:
    """One sentence per option whose value is outside its declared range: flag, value, what is allowed."""
    sentences = []
    for name, hint in typing.get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if isinstance(value, int) and value > 2**62:
            sentences.append(f"--{name} is {value}, but must be at most 2^62.")
        if isinstance(value, str) and value[:4096] != value.encode(errors="ignore").decode():
            sentences.append(f"--{name} is {value!r}, but must be text in UTF-8, at most 4096 characters.")
        optional = typing.get_args(hint)[0] if type(None) in typing.get_args(hint) else hint  # Count | None
        for allowed in getattr(optional, "__metadata__", ()):
            if isinstance(allowed, Between) and value is not None and not allowed.holds(value):
                sentences.append(f"--{name} is {value!r}, but must be {allowed}.")
    return sentences


# ---------------------------------------------------- command line ------------------------------------------
def overrides_of(args_class: type, toy: dict, model: str | None) -> dict:
    """Values instead of the paper's: the toy's without a model, the toy's and smollm2's with that one."""
    if model not in (None, "", "smollm2"):
        return {}
    overrides = dict(toy)
    for name, value in SMOLLM2.items() if model else ():
        field = args_class.__dataclass_fields__.get(name)
        preset = field and field.default is None  # evaluate.py: its --preset has them
        if field and not preset and toy.get(name) != "":  # no --dataset: Dynamic RL
            overrides[name] = value
    return overrides


def parse(args_class: type, toy: dict):
    """Command line -> args. Defaults: the toy's without --model, the toy's and smollm2's with that model,
    with --resume those of the run resumed."""
    description = sys.modules[args_class.__module__].__doc__
    words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
    model = dict(zip(words, [*words[1:], ""])).get("--model")
    overrides = {} if {"-h", "--help"} & set(words) else overrides_of(args_class, toy, model)
    args = tyro.cli(args_class, default=args_class(**overrides), description=description)
    if getattr(args, "resume", False):
        return parse_resumed(args_class, args, description)
    if overrides and int(os.environ.get("RANK", 0)) == 0:
        which = "--model smollm2 runs" if model else "No --model given, so this runs the built-in toy"
        given = {word.lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
        shown = " ".join(f"--{k} {v}" for k, v in overrides.items() if k not in given)
        print(f"{which} with these overrides of the paper's values:\n  {shown}", flush=True)
    return args


def parse_resumed(args_class: type, args, description: str):
    """The arguments of the run in --out, and what is given beside them, which wins and is said."""
    if not args.out:
        raise UserError("--resume needs --out, the folder of the run to go on with.")
    run = read_run(Path(args.out))
    if run["script"] != script_name():
        raise UserError(f"--resume: {args.out} is a run of {run['script']}.py.")
    hints, known = typing.get_type_hints(args_class), {}
    for name, value in run["args"].items():
        if name in hints and not fits(value, hints[name]):
            raise UserError(f"--resume: {args.out}/run.json is damaged, its {name} is {value!r}; there is no "
                            "run to go on with.")
        if name in hints:
            known[name] = value
    known["trust_remote_code"] = False  # never taken from a folder
    args = tyro.cli(args_class, default=args_class(**known), description=description)
    if run["args"].get("trust_remote_code") and not args.trust_remote_code:
        print(f"The run in {args.out} was given --trust_remote_code, which is never taken from a folder; "
              "give it again if you trust this folder and its model.", flush=True)
    for name, value in dataclasses.asdict(args).items():
        was = known.get(name, "not in run.json")
        if name not in ("resume", "out", "trust_remote_code") and value != was:
            if name == "seed":
                raise UserError(f"--seed is {value}, but the run in {args.out} has {was}; start a new run.")
            if int(os.environ.get("RANK", 0)) == 0:
                print(f"Resuming with another --{name}: {value} (was {was})", flush=True)
    return args


def fits(value, hint) -> bool:
    """Whether an option of this type can have this value."""
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    return isinstance(value, int | float if hint is float else hint)


def read_run(folder: Path) -> dict:
    """run.json of a run folder. Raises UserError if there is none or it is damaged."""
    path = folder / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(run["script"], str) and isinstance(run["args"], dict) and run["identity"]:
            return run
        reason = "it lacks the script, its arguments or its identity"
    except Exception as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else f"it is damaged ({error})"
    raise UserError(f"--resume: {path} cannot be read, {reason}; there is no run to go on with.")


def script_name() -> str:
    """The name that run folders and run.json know a script by: ttrl.py is ttrl."""
    return Path(sys.argv[0]).stem


@record  # torchrun shows the traceback of the first rank that fails
def launch(main, args_class: type, toy: dict) -> None:
    """Run a script's main. Bad input (UserError) ends with one sentence and exit code 2, a bug with its
    traceback."""
    try:
        main(parse(args_class, toy))
    except UserError as error:
        rank = int(os.environ.get("RANK", 0))
        if rank:  # most errors are every rank's: rank 0 prints it, and torchrun ends the others
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"Error{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr, flush=True)
        leave(2)
    except torch.OutOfMemoryError as error:
        error.add_note("The GPU's memory was not enough: give a smaller --micro_tokens, --offload optimizer, "
                       "--gradient_checkpointing on, or leave vLLM less with --gpu_memory. --plan shows what "
                       "takes it; --resume goes on from the newest checkpoint.")
        raise
    if distributed() and "vllm" not in sys.modules:
        # leave together, and at once: a rank that unwinds while another still talks to it may abort
        gather(None)
        dist.destroy_process_group()
        leave(0)


def leave(code: int) -> None:
    """Exit without unwinding: a rank that failed alone must not wait in a collective for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
