"""Checkpoints that survive kill -9 and a full disk: written to one side, then renamed.

They hold tensors only, as safetensors: reading a stranger's cannot execute code, as unpickling one would."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from engine.base import UserError, distributed, on_all_ranks, rank_and_ranks, write_atomically


def complete(run_folder: Path) -> list[Path]:
    """Complete checkpoints, newest first. A folder gets its name only after everything in it is written."""
    return sorted((run_folder / "checkpoints").glob("step_" + "[0-9]" * 8), reverse=True)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the tensor files that this rank sees."""
    return {file.name: file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file()}


def tensors_of(policy, optimizer) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's tensors (step, exp_avg ...) by parameter name, so that another number of
    ranks can load them. Not copies: loading into them is loading."""
    get_optimizer_state_dict(policy.model, optimizer)  # makes the optimizer's state if it has none yet
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
                "goes on from the last good one.")

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


def restore(run_folder: Path, policy, optimizer, every: int, say=print) -> tuple[int, dict]:
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
    log = run_folder / "metrics.jsonl"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    made = max(map(int, re.findall(r'"step":(\d+)', text)), default=0)  # logged before its checkpoint
    if made > every or complete(run_folder) or (run_folder / "final").exists():
        raise UserError(f"--resume: the run in '{run_folder}' has made steps, but has no usable checkpoint; "
                        "start a new run in another --out.")
    return 0, {}
