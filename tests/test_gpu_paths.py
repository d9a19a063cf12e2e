"""What only runs on a GPU, tried without one as far as that goes, and what a first hour on one may meet."""

import contextlib
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, SCRIPTS, fresh_state, make_policy, random_rollouts, toy_args
from torch.distributed import fsdp
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import ttrl
from engine import options, setup
from engine.base import UserError
from engine.policy import Policy

torch.set_num_threads(1)


# ------------------------------------------------ FSDP, with one rank --------------------------------------
@contextlib.contextmanager
def one_rank():
    """A process group of this process alone, so that Policy is sharded."""
    with mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
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
        norm = policy.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return norm, dict(policy.named_tensors(torch.float32))


def test_offload_changes_no_number(monkeypatch):
    """FSDP's own offloading, here from host memory to host memory."""
    monkeypatch.setattr(fsdp.CPUOffloadPolicy, "__init__", lambda self: setattr(self, "pin_memory", False))
    with one_rank():
        (norm, weights), (norm_off, weights_off) = trained(), trained(offload=True)
    assert norm == norm_off and all(torch.equal(weights[name], weights_off[name]) for name in weights)


@pytest.mark.parametrize("trainable,stored", [(True, torch.float32), (False, torch.bfloat16)])
def test_shards_are_cast_and_buffers_are_not(trainable, stored):
    """float32 masters of the policy, the compute type of the reference; RoPE's frequencies stay float32."""
    with one_rank():
        policy = Policy(common.TOY_MODEL, torch.device("cpu"), torch.bfloat16, trainable, max_length=192)
        assert {parameter.dtype for parameter in policy.parameters()} == {stored}
        assert {buffer.dtype for buffer in policy.model.buffers()} == {torch.float32}


def test_scoring_leaves_no_gathered_weights():
    """Else the weights that go to the sampler would be those of the compute type, rounded."""
    with one_rank():
        policy = Policy(common.TOY_MODEL, torch.device("cpu"), torch.bfloat16, max_length=192)
        policy.score_old(random_rollouts(3), 1.0)
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
        original = AutoModelForCausalLM.from_pretrained(common.TOY_MODEL, dtype=torch.float32).state_dict()
        sent = dict(policy.named_tensors(torch.float32))
        assert sent and all(torch.equal(tensor, original[name]) for name, tensor in sent.items())


def test_the_final_model_has_the_compute_type(tmp_path):
    with one_rank():
        policy = Policy(common.TOY_MODEL, torch.device("cpu"), torch.bfloat16, max_length=192)
        policy.save(tmp_path / "final", AutoTokenizer.from_pretrained(common.TOY_MODEL))
    assert json.loads((tmp_path / "final/config.json").read_text())["dtype"] == "bfloat16"
    saved, original = fresh_state(tmp_path / "final"), fresh_state(common.TOY_MODEL)
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        assert saved[name].dtype == torch.bfloat16 and torch.equal(saved[name], tensor.bfloat16()), name


# -------------------------------------------------- before a run -------------------------------------------
def test_offload_needs_a_gpu(tmp_path):
    with pytest.raises(UserError, match="--offload is 'optimizer', but there is no GPU here"):
        common.Run(toy_args(ttrl, offload="optimizer", out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


# ------------------------------------------------- the first hour ------------------------------------------
def test_more_processes_than_gpus_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UserError, match="--nproc-per-node asks for more processes than the 4 GPU.s. here."):
        setup.start_processes()


def test_a_gpu_without_bfloat16_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, dtype, refused in (((7, 5), "auto", True), ((7, 5), "float32", False),
                                       ((8, 0), "bfloat16", False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        bad = ttrl.Args(dtype=dtype).errors()
        assert ("--dtype is 'auto', but must be float32: this GPU has no bfloat16." in bad) == refused


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_allocators_settings_are_made_before_torch_is_loaded(module):
    """Only then every version of torch reads them; this one, whenever it first allocates."""
    code = (ROOT / f"{module}.py").read_text()
    assert 0 < code.index("\nimport common") < code.index("\nimport torch")
    settings = torch._C._accelerator_getAllocatorSettings()
    assert settings == "expandable_segments:True,pinned_max_round_threshold_mb:1"


def test_bfloat16_on_one_cpu_is_computed_in_bfloat16():
    """By FSDP, as on a GPU; without it the sampler alone would round."""
    code = """
import torch
from engine.policy import Policy
from engine.setup import start_processes
from tests.conftest import random_rollouts
device = start_processes(bf16=True)[0]
logps = []
for dtype in (torch.float32, torch.bfloat16):
    policy = Policy("toy", device, dtype)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    (micro,) = policy.micro_batches(random_rollouts(4))
    logps.append(policy.logprobs(micro, 1.0)[0].detach())
print(float((logps[0] - logps[1]).abs().max()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert 1e-4 < float(done.stdout) < 0.5, done.stderr


def test_memory_that_ran_out_names_no_flag(monkeypatch):
    def main(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(options, "parse", lambda args_class, toy: None)
    with pytest.raises(torch.OutOfMemoryError) as error:
        options.launch(main, None, {})
    assert "--micro_tokens" in error.value.__notes__[0] and "--gpu_memory" in error.value.__notes__[0]
