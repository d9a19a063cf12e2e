"""What only runs on a GPU, tried without one as far as that goes, and what a first hour on one may meet."""

import contextlib
import json
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import fresh_state, make_policy, random_rollouts, run_toy
from torch.distributed import fsdp
from transformers import AutoTokenizer

import ttrl
from engine import options, process
from engine.base import UserError
from engine.samplers import HFSampler

# ------------------------------------------------ FSDP, with one rank --------------------------------------
@contextlib.contextmanager
def one_rank():
    """A process group of this process alone, as --dtype bfloat16 has it, so that Policy is sharded."""
    with mock.patch.dict(os.environ):
        process.start_processes("bfloat16")
        try:
            yield
        finally:
            dist.destroy_process_group()


def trained(**flags) -> tuple[float, dict[str, torch.Tensor]]:
    """(gradient norm, weights) after two optimizer steps."""
    policy, rollouts = make_policy(**flags), random_rollouts(5)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
    policy.score_old(rollouts, 1.0)
    for _ in range(2):
        for micro in policy.micro_batches(rollouts):
            policy.logprobs(micro, 1.0)[0].sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
    return norm, dict(policy.named_tensors())


def test_offload_changes_no_number(monkeypatch):
    """FSDP's own offloading, here from host memory to host memory."""
    monkeypatch.setattr(fsdp.CPUOffloadPolicy, "__init__", lambda self: setattr(self, "pin_memory", False))
    with one_rank():
        (norm, weights), (norm_off, weights_off) = trained(), trained(offload=True)
    assert norm == norm_off and all(torch.equal(weights[name], weights_off[name]) for name in weights)


@pytest.mark.parametrize("trainable, stored", [(True, torch.float32), (False, torch.bfloat16)])
def test_shards_are_cast_and_buffers_are_not(trainable, stored):
    """float32 masters of the policy, the compute type of the reference; RoPE's frequencies stay float32."""
    with one_rank():
        policy = make_policy(trainable=trainable, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in policy.parameters()} == {stored}
        assert {buffer.dtype for buffer in policy.model.buffers()} == {torch.float32}


def test_the_sampler_gets_what_is_saved(tmp_path):
    """The float32 masters, rounded once to the compute type."""
    original = fresh_state(options.TOY_MODEL)
    with one_rank():
        policy = make_policy(dtype=torch.bfloat16)
        policy.score_old(random_rollouts(3), 1.0)
        sent = dict(policy.named_tensors())
        policy.save(tmp_path / "final", AutoTokenizer.from_pretrained(options.TOY_MODEL))
    assert json.loads((tmp_path / "final/config.json").read_text())["dtype"] == "bfloat16"
    rounded = {name: tensor.bfloat16() for name, tensor in original.items()}
    torch.testing.assert_close({name: sent[name] for name in original}, rounded, rtol=0, atol=0)
    torch.testing.assert_close(fresh_state(tmp_path / "final"), rounded, rtol=0, atol=0)


def test_stale_weights_stop_a_run_in_bfloat16_also_after_a_resume(tmp_path, monkeypatch):
    """The first step's log-probs differ by .002 on average; one missed sync makes that .3, less than the .5
    at which every run ends. So the resumed run must know the first step's."""
    flags = dict(dtype="bfloat16", sampler="hf", lr=2e-3, warmup=0.0, checkpoint_every=1, out=tmp_path)
    with one_rank():
        run_toy(ttrl, steps=1, **flags)
        monkeypatch.setattr(HFSampler, "load", lambda self, tensors: None)
        with pytest.raises(UserError, match=r"0\.[1-4]\d* on average, 0\.00\d* in the first step"):
            run_toy(ttrl, steps=2, resume=True, **flags)


# ------------------------------------------------- the first hour ------------------------------------------
SLURM = dict(SLURM_NTASKS="2", SLURM_PROCID="0")


@pytest.mark.parametrize("variables, warned", [
    (SLURM, True), (dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0"), True),
    (SLURM | dict(SLURM_PROCID="1"), False), (SLURM | dict(WORLD_SIZE="16"), False)])
def test_tasks_without_torchrun_are_told_once(monkeypatch, capsys, variables, warned):
    """Else each trains on the same GPU, and nobody sees that they do not share the work."""
    for name in (*process.TASKS.keys(), *process.TASKS.values(), "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process.warn_of_tasks()
    assert capsys.readouterr().out.count("Warning: ") == warned


def test_bfloat16_on_one_cpu_is_computed_in_bfloat16():
    """FSDP rounds, as on a GPU; without it the sampler alone would."""
    logps, rollouts = [], random_rollouts(4)
    with one_rank():
        for dtype in (torch.float32, torch.bfloat16):
            policy = make_policy(dtype=dtype)
            (micro,) = policy.micro_batches(rollouts)
            logps.append(policy.logprobs(micro, 1.0)[0].detach())
    assert 1e-4 < float((logps[0] - logps[1]).abs().max()) < 0.5
