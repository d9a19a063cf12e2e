"""Options: allowed ranges, the command line, and how a script starts and ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import tyro
from pydantic import Field, TypeAdapter, ValidationError
from torch.distributed.elastic.multiprocessing.errors import record

from engine.base import UserError, distributed, gather, rank_and_ranks
from engine.smollm2 import SMOLLM2

# ------------------------------------------------------- ranges ---------------------------------------------
Count = Annotated[int, Field(ge=1, le=2**62)]
CountOrZero = Annotated[int, Field(ge=0, le=2**62)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NonNegativeOrInf = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def out_of_range(args) -> list[str]:
    """One sentence per option whose value is not of its type or outside its range."""
    try:
        TypeAdapter(type(args)).validate_python(vars(args))
    except ValidationError as error:
        return [f"--{e['loc'][0]} is {e['input']!r}, but {e['msg'].replace('Input should', 'must')}."
                for e in error.errors()]
    return []


# ---------------------------------------------------- command line ------------------------------------------
def overrides_of(args_class: type, toy: dict, model: str | None) -> dict:
    """Values instead of the paper's: the toy's without a model, the toy's and smollm2's with that one."""
    if model not in (None, "", "smollm2"):
        return {}
    overrides = dict(toy)
    for field in dataclasses.fields(args_class) if model else ():
        # not what evaluate.py's --preset has (None), and no --dataset for Dynamic RL ("")
        if field.name in SMOLLM2 and field.default is not None and toy.get(field.name) != "":
            overrides[field.name] = SMOLLM2[field.name]
    return overrides


def parse(args_class: type, toy: dict):
    """Command line -> args. Defaults: the toy's without --model, the toy's and smollm2's with that model,
    with --resume those of the run that is resumed."""
    description = sys.modules[args_class.__module__].__doc__
    args = tyro.cli(args_class, description=description)  # --help ends here, with the paper's values
    if getattr(args, "resume", False):
        return parse_resumed(args_class, args, description)
    overrides = overrides_of(args_class, toy, args.model)
    if overrides:
        args = tyro.cli(args_class, default=args_class(**overrides), description=description)
    if overrides and rank_and_ranks()[0] == 0:
        which = "--model smollm2 runs" if args.model else "No --model given, so this runs the built-in toy"
        shown = " ".join(f"--{k} {v}" for k, v in overrides.items() if getattr(args, k) == v)
        print(f"{which} with these overrides of the paper's values:\n  {shown}", flush=True)
    return args


def parse_resumed(args_class: type, args, description: str):
    """The arguments of the run in --out. What is given beside them wins and is printed."""
    if not args.out:
        raise UserError("--resume needs --out, the folder of the run to go on with.")
    run = read_run(Path(args.out))
    if run["script"] != script_name():
        raise UserError(f"--resume: {args.out} is a run of {run['script']}.py.")
    # options that the script no longer has are dropped, new ones have their defaults
    known = {name: value for name, value in run["args"].items() if name in args_class.__dataclass_fields__}
    known["trust_remote_code"] = False  # never taken from a folder
    if bad := out_of_range(args_class(**known)):
        raise UserError(f"--resume: {args.out}/run.json is damaged: {bad[0]}")
    args = tyro.cli(args_class, default=args_class(**known), description=description)
    for name, value in dataclasses.asdict(args).items():
        was = known.get(name, "not in run.json")
        if value == was or name in ("resume", "out", "trust_remote_code"):
            continue
        if name == "seed":
            raise UserError(f"--seed is {value}, but the run in {args.out} has {was}; start a new run.")
        if rank_and_ranks()[0] == 0:
            print(f"Resuming with another --{name}: {value} (was {was})", flush=True)
    return args


def read_run(folder: Path) -> dict:
    """run.json of a run folder. Raises UserError if there is none or it is damaged."""
    path = folder / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        return run | dict(script=run["script"], args=dict(run["args"]), identity=dict(run["identity"]))
    except Exception as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else f"it is damaged ({error})"
        raise UserError(f"--resume: {path} cannot be read, {reason}; there is no run to go on "
                        "with.") from None


def script_name() -> str:
    """The name that run folders and run.json know a script by: ttrl.py is ttrl."""
    return Path(sys.argv[0]).stem


# ---------------------------------------------------- start and end -----------------------------------------
@record  # torchrun shows the traceback of the first rank that fails
def launch(main, args_class: type, toy: dict) -> None:
    """Run a script's main. Bad input (UserError) ends with one sentence and exit code 2, a bug with its
    traceback."""
    try:
        main(parse(args_class, toy))
    except UserError as error:
        rank, _ = rank_and_ranks()
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
