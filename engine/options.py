"""Options: ranges declared on the fields of Args, the command line, and how a script starts and ends."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import tyro

from engine.base import UserError, distributed, first_line, gather
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
Samples = Annotated[int, Between(1, 2**16)]  # seed_of has room for so many streams
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
            if name in ("model", "dataset", "seed", "prompt", "question_field", "answer_field"):
                raise UserError(f"--{name} is {value!r}, but the run in {args.out} has {was!r}; "
                                "start a new run.")
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
        if isinstance(run["script"], str) and isinstance(run["args"], dict):
            return run
        reason = "it lacks the script or its arguments"
    except Exception as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else f"it is damaged ({error})"
    raise UserError(f"--resume: {path} cannot be read, {reason}; there is no run to go on with.")


def script_name() -> str:
    """The name that run folders and run.json know a script by: ttrl.py is ttrl."""
    return Path(sys.argv[0]).stem


DOING = ["start-up", None]  # what the run is at, and its folder: for sentences about what went wrong


def launch(main, args_class: type, toy: dict) -> None:
    """Run a script's main: bad input ends with one sentence and exit code 2, not with a traceback."""
    args = None
    if hasattr(sys.stdout, "reconfigure"):  # a terminal without the letters of a question
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = Unread(sys.stdout), Unread(sys.stderr)
    try:
        args = parse(args_class, toy)
        if "RANK" in os.environ:
            threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
        main(args)
    except UserError as error:
        leave_after(error)
    except Exception as error:
        if sentence := out_of_memory(error) or unreadable(error, args) or in_script(error):
            leave_after(UserError(sentence))
        raise
    if distributed() and "vllm" not in sys.modules:
        # leave together, and at once: a rank that unwinds while another still talks to it may abort
        gather(None)
        dist.destroy_process_group()
        leave(0)


class Unread:
    """A text stream; once nobody reads it (`| head`), what is written goes nowhere and the run goes on."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def _quietly(self, work, *given):
        try:
            return work(*given)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def write(self, text: str):
        return self._quietly(self.stream.write, text)

    def flush(self) -> None:
        self._quietly(self.stream.flush)


def end_with_parent(parent: int) -> None:
    """Leave when torchrun is gone: nobody would know of the ranks, nor end them if one fails."""
    while os.getppid() == parent:
        time.sleep(0.5)
    print("Error: torchrun is gone, so its ranks leave; --resume goes on from the newest checkpoint.",
          file=sys.stderr, flush=True)
    os._exit(1)


def out_of_memory(error: Exception) -> str:
    """What to do if a GPU's memory was not enough, for torch or for vLLM as it starts or wakes. Else empty.

    vLLM's allocator raises a plain RuntimeError, and so may NCCL."""
    at_start = isinstance(error, ValueError) and DOING[0] == "starting vLLM" and "memory" in str(error)
    if not at_start and not (isinstance(error, RuntimeError) and "out of memory" in str(error)):
        return ""
    remedy = "give a smaller --micro_tokens, --gradient_checkpointing on, or --offload optimizer"
    if DOING[0] in ("starting vLLM", "sync", "sample", "evaluate"):
        remedy = "a smaller --gpu_memory leaves more to the trainer, a larger one more to vLLM"
    if DOING[0] == "embed":
        remedy = "give a smaller --embedder, or --offload optimizer"
    reason = ". ".join(str(error).split(". ")[:2]).rstrip(".")
    return (f"the GPU's memory was not enough ({DOING[0]}: {reason}); {remedy}. --plan shows what takes it; "
            "--resume goes on from the newest checkpoint.")


def unreadable(error: Exception, args) -> str:
    """What failed while data or a model were read, or a file of the run was written; else empty."""
    of_disk = isinstance(error, OSError) and (error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
                                              or DOING[1] and str(DOING[1]) in str(error.filename))
    if not of_disk and not DOING[0].startswith(("reading", "loading", "starting vLLM")):
        return ""
    blamed = f"--model is '{args.model}', but " if DOING[0] in ("loading", "starting vLLM") else ""
    doing = f"writing to {DOING[1]}" if of_disk and not DOING[0].startswith("reading") else DOING[0]
    return blamed + failed(doing, error)


def in_script(error: Exception) -> str:
    """The innermost line of the script, or of a function that it handed over, that met this error."""
    engine = Path(__file__).parent
    others = (Path(os.__file__).parent, Path(tyro.__file__).parents[1], engine, engine.parent / "common.py")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(tuple(map(str, others)))]
    where = [f"{Path(frame.filename).name}, line {frame.lineno}: `{frame.line}`" for frame in own]
    return failed(where[-1], error) if where else ""


def failed(what: str, error: Exception) -> str:
    """One sentence; the traceback goes to a file, of the run if there is one and its disk takes it."""
    for folder in filter(None, (DOING[1], tempfile.gettempdir())):
        log = Path(folder) / f"traceback-{os.getpid()}.txt"
        with contextlib.suppress(OSError):
            log.write_text(traceback.format_exc(), encoding="utf-8")
            break
    return f"{what} failed: {type(error).__name__} {first_line(error)} (traceback: {log})."


def leave_after(error: UserError) -> None:
    """Show the error and exit with code 2."""
    rank = int(os.environ.get("RANK", 0))
    if rank:  # most errors are every rank's: rank 0 says so, and torchrun ends the others while they wait
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
    where = f" on rank {rank}" if rank else ""
    print(f"Error{where}: {error}", file=sys.stderr, flush=True)
    leave(2)


def leave(code: int) -> None:
    """Exit without unwinding: a rank that failed alone must not wait in a collective for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
