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

from engine.base import UserError, write_atomically
from engine.ranks import distributed, on_all_ranks, on_rank_0, rank_and_ranks
from engine.run_folder import read_jsonl


def complete(run_folder: Path) -> list[Path]:
    """Complete checkpoints, newest first. A folder gets its name only after everything in it is written."""
    return sorted((run_folder / "checkpoints").glob("step_" + "[0-9]" * 8), reverse=True)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the tensor files that this rank sees."""
    return {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}


def tensors_of(policy, optimizer) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's tensors (step, exp_avg ...) by parameter name, so that another number of
    ranks can load them. They are no copies: what is loaded into them is in the model and the optimizer."""
    if not optimizer.state:  # AdamW makes its state in its first step; before, there is nothing to load into
        get_optimizer_state_dict(policy.model, optimizer)  # takes this step, at rate 0, and counts it
        for state in optimizer.state.values():
            state["step"].zero_()
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        tensors[name] = parameter
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{name}.{kind}"] = value
    return tensors


def save(run_folder: Path, step: int, policy, optimizer, keep: int, run_id: str = "",
         script: dict | None = None) -> None:
    """Write to checkpoints/step_N.partial in this folder and rename it; then keep only the `keep` checkpoints
    with the largest steps. The folder must be the run's own: if another run had left larger steps in it, the
    new checkpoint would be removed at once.

    run_id: run.json's. script: the script's own state, kept as it is on rank 0. Raises UserError, on all
    ranks, if it cannot be written; the checkpoints before it are untouched."""
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
        return set(sizes(partial))

    def publish() -> None:
        files = sizes(partial)
        if unseen := sorted(written - files.keys()):  # each node has written to a disk of its own
            raise OSError(f"rank 0 does not see {unseen[0]}, which another rank wrote: --out must be on a "
                          "file system that all nodes share")
        state = dict(run=run_id, step=step, files=files, script=script or {})
        write_atomically(partial / "state.json", json.dumps(state))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)  # from here on it counts
        for folder in complete(run_folder)[keep:]:
            shutil.rmtree(folder)

    written = set().union(*on_all_ranks(write, failed))
    on_rank_0(publish, failed)


def steps_done(run_folder: Path, every: int, run_id: str | None) -> int:
    """The step of the newest checkpoint; 0 if there is none and none was due (every: steps between them).
    What a killed run was writing is removed.

    Raises UserError if one was due, or if the newest one is damaged, renamed or another run's."""
    def read() -> int:
        for folder in (run_folder / "checkpoints").glob("*.partial"):
            shutil.rmtree(folder)
        for newest in complete(run_folder)[:1]:
            state, step = json.loads((newest / "state.json").read_text()), int(newest.name[5:])
            # else it goes on from other weights; and with a file missing torch loads half and says nothing
            if state != state | dict(run=run_id, step=step, files=sizes(newest)):
                raise ValueError(f"{newest.name} is not what this run wrote")
            return step
        steps = [line["step"] for line in read_jsonl(run_folder / "metrics.jsonl")]
        if max(steps, default=0) > every or (run_folder / "final").exists():  # it would begin anew
            raise UserError(f"--resume: the run in '{run_folder}' has made steps, but has no checkpoint; "
                            "start a new run in another --out.")
        return 0

    return on_rank_0(read, damaged(run_folder))


def damaged(run_folder: Path):
    """The sentence for it. The user deletes it, not we: who copied half may still have the other half."""
    return lambda reason: (f"--resume: the newest checkpoint in {run_folder / 'checkpoints'} is damaged or "
                           f"another run's ({reason}); delete it, and the one before it is used.")


def load(run_folder: Path, step: int, policy, optimizer) -> dict:
    """Load the checkpoint of this step; returns the script's own state. Raises UserError if it is damaged."""
    folder = run_folder / "checkpoints" / f"step_{step:08d}"

    def read() -> dict:
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(tensors_of(policy, optimizer), storage_reader=reader, no_dist=not distributed())
        return json.loads((folder / "state.json").read_text())["script"]

    return on_all_ranks(read, damaged(run_folder))[0]
