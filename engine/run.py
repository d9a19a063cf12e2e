"""A run: what it consists of, how it continues after a stop, and when it is saved.

What a checkpoint is on disk is checkpoint.py's business, how a signal is heard process.py's. `common.start`
puts a Run together."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.base import UserError
from engine.checkpoint import load, save
from engine.log import Log
from engine.policy import Policy
from engine.process import StopSignal
from engine.ranks import all_gather, on_rank_0, print0
from engine.run_folder import read_metrics
from engine.samplers import HFSampler, VLLMSampler


@dataclass
class Run:
    """What a run consists of; `common.start` makes it. Then only state and sampled change."""
    args: object
    tokenizer: object
    problems: list
    benchmarks: dict[str, list]
    total_steps: int
    policy: Policy | None
    reference: Policy | None  # the frozen base model; None without a KL term
    sampler: HFSampler | VLLMSampler
    log: Log  # also the run's folder, log.path
    stop: StopSignal
    device: torch.device
    dtype: torch.dtype
    problem: type  # common.Problem, or a task's own
    generate: Callable | None
    state: dict = field(default_factory=dict)  # what a script wants checkpoints to keep, as JSON
    sampled: set = field(default_factory=set)  # (step, prompt.id) of what this step has sampled


def restore(run, optimizer) -> int:
    """Load the newest checkpoint with --resume: weights, AdamW's state, run.state. The rate, the order of the
    data and all seeds derive from the step. Return the steps that are done."""
    args, done = run.args, run.stop.saved
    if done > run.total_steps:  # else its weights are saved and evaluated as those of an earlier step
        raise UserError(f"--steps is {run.total_steps}, but the newest checkpoint is of step {done}; delete "
                        "it, and the one before it is used.")

    def put_aside() -> None:  # the run goes on, so its older final model must not pass for its last
        final = run.log.path / "final"
        if final.exists() and done < run.total_steps:
            final.rename(f"{final}_step_{read_metrics(run.log.path)[-1]['step']}")

    on_rank_0(put_aside)
    run.sampler.sleep()  # loading makes gradients beside Adam, as much as an update holds
    if done:
        run.state.update(load(run.log.path, done, run.policy, optimizer))  # a fork may hold this dict
        print0(f"Resumed from step {done}.")
    if done >= run.total_steps:
        print0(f"All {run.total_steps} steps are done; a larger --steps continues.")
    else:
        print0(f"Steps {done + 1} to {run.total_steps}: {args.prompts_per_batch} prompts x "
               f"{args.responses_per_prompt()} responses, {args.train_samples} of them trained on.")
    run.stop.listen()  # only now: a signal before the first step has nothing to save, and ends the process
    run.log.begin(run.total_steps, run.benchmarks)
    return done


def save_when_due(run, step: int, optimizer) -> None:
    """Write a checkpoint: every --checkpoint_every steps, after the last one, before an evaluation, and when
    a signal came, which then ends the run.

    Raises ValueError or TypeError if run.state holds what JSON does not keep."""
    if json.loads(json.dumps(run.state)) != run.state:  # a number as a key would come back as a text
        raise ValueError(f"run.state must hold what JSON keeps as it is, but is {repr(run.state)[:80]}")
    every, last = run.args.machine.checkpoint_every, step == run.total_steps
    signaled = max(all_gather(run.stop.number))  # it may have reached one rank alone
    if signaled or every and (last or step % every == 0 or run.log.evaluation_is_due(step)):
        save(run.log.path, step, run.policy, optimizer, run.args.machine.keep_checkpoints,
             run.log.record["id"], run.state)
        run.stop.saved = step  # where a signal in an evaluation may end the run
    if signaled and not last:
        print0(f"\nStopped after step {step} by {signal.Signals(signaled).name}; {run.stop.advice}")
        sys.exit(128 + signaled)
