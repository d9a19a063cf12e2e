"""Checkpoints as bytes on disk. They survive kill -9 and a full disk: each is written to a temporary folder,
which is renamed once everything in it is there.

They hold tensors only, as safetensors: reading a stranger's cannot execute code, as unpickling one would.
When one is written, and what a run continues with, is run.py's business."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from engine.base import write_atomically
from engine.ranks import distributed, on_all_ranks, on_rank_0, rank_and_ranks


def complete(run_folder: Path) -> list[Path]:
    """Complete checkpoints, newest first. A folder gets its name only after everything in it is written."""
    return sorted((run_folder / "checkpoints").glob("step_" + "[0-9]" * 8), reverse=True)


def tensor_files(folder: Path) -> set[str]:
    """Names of the tensor files that this rank sees."""
    return {file.name for file in folder.glob("*.safetensors")}


def tensors_of(policy, optimizer) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's tensors (step, exp_avg ...) by parameter name, so that another number of
    ranks can load them. Not copies: loading into them is loading."""
    if not optimizer.state:  # AdamW makes its state in the first step, so there is nothing to load into yet
        get_optimizer_state_dict(policy.model, optimizer)  # by a step at learning rate 0, which counts
        for state in optimizer.state.values():
            state["step"].zero_()
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        tensors[name] = parameter
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{name}.{kind}"] = value
    return tensors


def save(run_folder: Path, step: int, policy, optimizer, keep: int, script: dict | None = None) -> None:
    """Write to checkpoints/step_N.partial in this folder and rename it; then remove all but the last `keep`
    checkpoints. The folder must be the run's own: the last ones are those of the largest steps, so beside
    another run's larger steps this checkpoint would be the one that is removed.

    script: the script's own state, kept as it is on rank 0. Raises UserError, on all ranks, if it cannot be
    written; the checkpoints before it are untouched."""
    final = run_folder / "checkpoints" / f"step_{step:08d}"
    partial = final.with_suffix(".partial")

    def failed(reason: str) -> str:  # full disk, lost mount
        return (f"the checkpoint of step {step} could not be written to {final.parent} ({reason}); --resume "
                "continues from the last good one.")

    def write() -> set[str]:
        partial.mkdir(parents=True, exist_ok=True)
        tensors, files, size = tensors_of(policy, optimizer), {}, 0
        # torch puts a file together in host memory before it writes it, so a file gets 256 MiB a rank
        for name, tensor in tensors.items():
            files[name] = 1 + (size // rank_and_ranks()[1] >> 28)  # the number of its file
            size += tensor.nbytes
        writer = HuggingFaceStorageWriter(str(partial), files, save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=not distributed())
        return tensor_files(partial)

    def publish() -> None:
        if unseen := sorted(written - tensor_files(partial)):  # each node has written to a disk of its own
            raise OSError(f"rank 0 does not see {unseen[0]}, which another rank wrote: --out must be on a "
                          "file system that all nodes share")
        write_atomically(partial / "state.json", json.dumps(script or {}))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)  # from here on it counts
        for folder in complete(run_folder)[keep:]:
            shutil.rmtree(folder)

    written = set().union(*on_all_ranks(write, failed))
    on_rank_0(publish, failed)


def steps_done(run_folder: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none. What a killed run was writing is removed."""
    def read() -> int:
        for folder in (run_folder / "checkpoints").glob("*.partial"):
            shutil.rmtree(folder)
        return max((int(folder.name[5:]) for folder in complete(run_folder)), default=0)

    return on_rank_0(read)


def load(run_folder: Path, step: int, policy, optimizer) -> dict:
    """Load the checkpoint of this step; returns the script's own state. Raises UserError if it is damaged."""
    folder = run_folder / "checkpoints" / f"step_{step:08d}"

    def read() -> dict:
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(tensors_of(policy, optimizer), storage_reader=reader, no_dist=not distributed())
        return json.loads((folder / "state.json").read_text())

    # The user deletes it, not we: whoever copied half a checkpoint may still have the other half.
    return on_all_ranks(read, lambda reason: f"--resume: {folder} is damaged ({reason}); delete this folder, "
                                             "and the one before it is used.")[0]
