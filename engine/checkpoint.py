"""Checkpoints that survive kill -9 and a full disk: written to one side, then renamed. And signals to stop.

They hold tensors only, as safetensors: reading a stranger's cannot execute code, as unpickling one would."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from engine.base import UserError, all_gather, distributed, on_all_ranks, rank_and_ranks, say
from engine.base import write_atomically
from engine.log import read_jsonl
from engine.options import leave


def complete(run_folder: Path) -> list[Path]:
    """Complete checkpoints, newest first. A folder gets its name only after everything in it is written."""
    return sorted((run_folder / "checkpoints").glob("step_" + "[0-9]" * 8), reverse=True)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the tensor files that this rank sees."""
    return {file.name: file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file()}


def tensors_of(policy, optimizer) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's tensors (step, exp_avg ...) by parameter name, so that another number of
    ranks can load them. Not copies: loading into them is loading."""
    if not optimizer.state:
        get_optimizer_state_dict(policy.model, optimizer)  # makes the state, and counts that as a step
        for state in optimizer.state.values():
            state["step"].zero_()
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        tensors[name] = parameter
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{name}.{kind}"] = value
    return tensors


def save(run_folder: Path, step: int, policy, optimizer, keep: int, script: dict | None = None) -> None:
    """Write to step_N.partial, rename; then remove all but the last `keep`.

    script: the script's own state, kept as it is on rank 0. Raises UserError, on all ranks, if it cannot be
    written; the checkpoints before it are untouched."""
    rank, ranks = rank_and_ranks()
    final = run_folder / "checkpoints" / f"step_{step:08d}"
    partial = final.with_suffix(".partial")

    def failed(reason: str) -> str:  # full disk, lost mount
        return (f"the checkpoint of step {step} could not be written to {final.parent} ({reason}); --resume "
                "continues from the last good one.")

    def write() -> set[str]:
        partial.mkdir(parents=True, exist_ok=True)
        tensors, files, size = tensors_of(policy, optimizer), {}, 0
        for name, tensor in tensors.items():  # a file, put together in host memory, takes 256 MiB
            files[name] = 1 + (size // ranks >> 28)
            size += tensor.nbytes
        writer = HuggingFaceStorageWriter(str(partial), files, save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=not distributed())
        return set(sizes(partial))

    def publish() -> None:
        if rank:
            return
        files = sizes(partial)
        if unseen := sorted(written - files.keys()):
            raise OSError(f"rank 0 does not see {unseen[0]}, which another rank wrote: --out must be on a "
                          "file system that all nodes share")
        state = dict(step=step, files=files, script=script or {})
        write_atomically(partial / "state.json", json.dumps(state))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        # newer ones are damaged: `restore` passed over them
        good = [folder for folder in complete(run_folder) if folder.name <= final.name][:keep]
        for folder in set(complete(run_folder)) - set(good):
            shutil.rmtree(folder)

    written = set().union(*on_all_ranks(write, failed))
    on_all_ranks(publish, failed)


def load_newest(run_folder: Path, policy, optimizer, every: int) -> tuple[int, dict]:
    """Load the newest checkpoint that is complete: its files have the sizes they were written with.

    Its step and the script's own state, the same on all ranks; (0, {}) if there is none and none was due
    (every: steps between checkpoints). Raises UserError if one was."""
    def read_state() -> tuple[int, dict]:
        state = json.loads((folder / "state.json").read_text())
        if state["step"] != int(folder.name[5:]) or state["files"] != sizes(folder):
            raise ValueError("its files are not those that were written")
        HuggingFaceStorageReader(str(folder)).read_metadata()
        return state["step"], dict(state["script"])

    def load() -> None:
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(tensors_of(policy, optimizer), storage_reader=reader, no_dist=not distributed())

    for folder in (run_folder / "checkpoints").glob("*.partial") if rank_and_ranks()[0] == 0 else ():
        shutil.rmtree(folder)  # a killed run's
    for folder in complete(run_folder):
        try:
            (step, script), *_ = on_all_ranks(read_state)
            on_all_ranks(load)  # what it has loaded before it fails, the next one overwrites
        except UserError as error:
            say(f"Warning: {folder} is not usable ({error}); trying the one before it.")
            continue
        say(f"Resumed from {folder}")
        return step, script
    made = max([line.get("step") or 0 for line in read_jsonl(run_folder / "metrics.jsonl")], default=0)
    if made > every or complete(run_folder) or (run_folder / "final").exists():
        raise UserError(f"--resume: the run in '{run_folder}' has made steps, but has no usable checkpoint; "
                        "start a new run in another --out.")
    return 0, {}


# ------------------------------------------------ what the loop calls ---------------------------------------
def restore(run, optimizer) -> int:
    """Steps that are done: with --resume those of the newest checkpoint, which is loaded, else 0."""
    args, done = run.args, 0
    run.sampler.sleep()  # loading makes gradients beside Adam, as much as an update holds
    if args.machine.resume:
        done, run.state = load_newest(run.log.path, run.policy, optimizer, args.machine.checkpoint_every)
    run.stop = StopSignal(run.log.path, done)
    run.log.open(done, run.total_steps, run.benchmarks)
    if done >= run.total_steps:
        say(f"All {run.total_steps} steps are done; a larger --steps continues.")
    else:
        say(f"Steps {done + 1} to {run.total_steps}: {args.prompts_per_batch} prompts x "
            f"{args.responses_per_prompt()} responses, {args.train_samples} of them trained on.")
    return done


def save_when_due(run, step: int, optimizer) -> None:
    """Write a checkpoint: every --checkpoint_every steps, after the last one, before an evaluation, and when
    a signal came, which then ends the run.

    Raises ValueError if run.state holds what JSON does not keep."""
    try:
        kept = json.loads(json.dumps(run.state)) == run.state
    except (TypeError, ValueError):
        kept = False
    if not kept:
        raise ValueError(f"run.state is {repr(run.state)[:80]}, but must hold what JSON keeps: text as "
                         "keys, and lists, dicts, text, numbers, True, False, None")
    every, last = run.args.machine.checkpoint_every, step == run.total_steps
    signaled = max(all_gather(run.stop.number))
    if signaled or every and (last or step % every == 0 or run.log.evaluation_is_due(step)):
        save(run.log.path, step, run.policy, optimizer, run.args.machine.keep, run.state)
        run.stop.saved = step
    if signaled and not last:
        say(f"\nStopped after step {step} by {signal.Signals(signaled).name}; continue with --resume --out "
            f"{run.log.path}")
        sys.exit(128 + signaled)


class StopSignal:
    """SIGTERM and Ctrl-C: the number of the one that came, 0 before. The loop obeys it when a step is saved.

    A second one ends the process at once; so does the first in an evaluation, if all steps are saved."""

    def __init__(self, run_folder: Path, saved: int):
        """saved: the step of the newest checkpoint, 0 before the first."""
        self.number, self.saved, self.idle, self.run_folder = 0, saved, False, run_folder
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # only the main thread may
                signal.signal(number, self)

    def __call__(self, number, frame) -> None:
        if self.number or self.idle:
            self._leave(number)
        self.number = number
        self._print(f"{signal.Signals(number).name}: finishing this step, then writing a checkpoint (again: "
                    "leave at once)")

    @contextlib.contextmanager
    def at_once(self, step: int):
        """While this lasts, a signal ends the process at once, if the checkpoint of this step is written."""
        self.idle = step == self.saved
        if self.idle and self.number:  # it came since the loop last looked
            self._leave(self.number)
        yield
        self.idle = False

    def _leave(self, number: int) -> None:
        name = signal.Signals(number).name
        self._print(f"Stopped by {name}; continue with --resume --out {self.run_folder}")
        leave(128 + number)

    def _print(self, text: str) -> None:
        if rank_and_ranks()[0] == 0:  # the signal may have interrupted a print, which cannot be entered twice
            os.write(2, f"\n{text}\n".encode())
