"""What only runs on a GPU, tried without one as far as that goes, and what a first hour on one may meet."""

import contextlib
import json
import os
import subprocess
import sys
from importlib import util
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, SCRIPTS, fresh_state, make_policy, random_rollouts, toy_args
from equations import relative_error
from torch.distributed import fsdp
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

import common
import ttrl
from engine import fast, options, runfolder, setup
from engine.base import UserError
from engine.checkpoint import writer_of
from engine.plan import OVERHEAD, cpu_sentence
from engine.policy import MicroBatch, Policy, Rollout, ahead

from engine.sizes import GIB

torch.set_num_threads(1)
MATH_1_5B = Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                        num_attention_heads=12, num_key_value_heads=2, vocab_size=151936,
                        tie_word_embeddings=True)
MATH_7B = Qwen2Config(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                      num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False)


# ------------------------------------------ variable-length attention --------------------------------------
def varlen_by_loop(query, key, value, query_starts, key_starts, max_q, max_k, scale=None,
                   window_size=(-1, -1),
                   enable_gqa=False, from_the_end=True):
    """What torch.nn.attention.varlen documents, sequence by sequence; causal masks end at the last key."""
    assert query_starts.dtype == key_starts.dtype == torch.int32 and window_size == (-1, 0) and enable_gqa
    groups, rows = query.shape[1] // key.shape[1], []
    for i in range(len(query_starts) - 1):
        q = query[query_starts[i]:query_starts[i + 1]].transpose(0, 1)
        k, v = (x[key_starts[i]:key_starts[i + 1]].transpose(0, 1).repeat_interleave(groups, 0)
                for x in (key, value))
        asked, seen = q.shape[1], k.shape[1]
        assert 0 < asked <= max_q and asked <= seen <= max_k
        mask = torch.ones(asked, seen).tril(seen - asked if from_the_end else 0).bool()
        row = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        rows.append(row.transpose(0, 1))
    assert query_starts[-1] == len(query) and key_starts[-1] == len(key)
    return torch.cat(rows)


def test_pack_varlen_by_hand():
    """Three responses to one prompt, of 3, 1 and 2 tokens, and one to another; last tokens are left out."""
    responses = [([5, 6], [7, 8, 9]), ([5, 6], [9]), ([5, 6], [8, 7]), ([4], [6, 6])]
    rollouts = [Rollout(prompt, response, torch.zeros(len(response)), True) for prompt, response in responses]
    inputs, predict_from = fast.pack_varlen(rollouts)
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8, 8, 4, 6]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert inputs["keys"].tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]  # the second response asks nothing
    assert inputs["query_starts"].tolist() == [0, 4, 5, 7]
    assert inputs["key_starts"].tolist() == [0, 4, 7, 9]
    assert inputs["longest"] == 4 and inputs.keys().isdisjoint({"pack", "unpack"})
    assert predict_from.tolist() == [1, 2, 3, 1, 1, 4, 5, 6]


def test_variable_length_attention_gives_the_same_log_probs_and_gradients(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_loop)
    rollouts = random_rollouts(6) + random_rollouts(2, seed=1, longest=1)
    for k in (1, 2, 7):  # two groups of one prompt
        rollouts[k].prompt_ids = rollouts[0].prompt_ids
    found = []
    for used in (False, True):
        policy = make_policy()
        policy.varlen = used
        logp_T, entropy_T = policy.logprobs(MicroBatch(rollouts, list(range(8)), torch.device("cpu")), 0.7)
        (logp_T.sum() + entropy_T.sum()).backward()
        found.append([logp_T, entropy_T, *(p.grad for p in policy.parameters())])
    for padded, without in zip(*found):
        assert relative_error(without, padded) < 1e-4


def test_variable_length_attention_is_tried_before_it_is_used(monkeypatch):
    """Right, also if it rounds otherwise than padded rows: used. Causal from the first key instead of the
    last, or no kernel at all: padded rows."""
    def in_float32(query, key, value, *others, **options):
        return varlen_by_loop(query.float(), key.float(), value.float(), *others, **options).to(query.dtype)

    config, cpu = make_policy().model.config, torch.device("cpu")
    assert not fast.varlen_works(config, cpu, torch.float32)  # torch has no CPU kernel
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_loop)
    assert fast.varlen_works(config, cpu, torch.float32) and fast.varlen_works(config, cpu, torch.bfloat16)
    monkeypatch.setattr(varlen, "varlen_attn", in_float32)
    assert fast.varlen_works(config_of("qwen2.5-math-1.5b"), cpu, torch.bfloat16)
    monkeypatch.setattr(varlen, "varlen_attn", lambda *a, **k: varlen_by_loop(*a, **k, from_the_end=False))
    assert not fast.varlen_works(config, cpu, torch.float32)
    assert not make_policy().varlen


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
    policy.score(rollouts, "old_logp", 1.0)
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
        policy.score(random_rollouts(3), "old_logp", 1.0)
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
        original = AutoModelForCausalLM.from_pretrained(common.TOY_MODEL, dtype=torch.float32).state_dict()
        for name, tensor in policy.named_tensors(torch.float32):
            assert torch.equal(tensor, original[name]), name


def test_the_final_model_has_the_compute_type(tmp_path):
    with one_rank():
        policy = Policy(common.TOY_MODEL, torch.device("cpu"), torch.bfloat16, max_length=192)
        policy.save(tmp_path / "final", AutoTokenizer.from_pretrained(common.TOY_MODEL))
    assert json.loads((tmp_path / "final/config.json").read_text())["dtype"] == "bfloat16"
    saved, original = fresh_state(tmp_path / "final"), fresh_state(common.TOY_MODEL)
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        assert saved[name].dtype == torch.bfloat16 and torch.equal(saved[name], tensor.bfloat16()), name


def test_tensors_are_begun_ahead_of_their_use():
    """Of 4 bytes each, two may be on their way while one is taken; all come, in order."""
    begun = []

    def pairs():
        for i in range(5):
            begun.append(i)
            yield i, torch.zeros(1)

    taken = [(name, len(begun)) for name, _ in ahead(pairs(), most=8)]
    assert taken == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]
    assert [name for name, _ in ahead(pairs(), most=0)] == [0, 1, 2, 3, 4]


def test_the_syncs_own_peak_is_that_before_the_kv_cache_wakes(monkeypatch):
    """named_tensors measures while the sampler takes the weights."""
    taken = iter([3.0, 5.0, 4.0])
    monkeypatch.setattr("engine.policy.gib_taken", lambda: next(taken, 2.0))
    policy = make_policy()
    policy.device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, dtype: tensor)
    for _ in policy.named_tensors(torch.float32):
        pass
    assert policy.sync_peak == 5.0 and policy.synced == 4 * 355_584


def test_every_rank_checks_its_own_files():
    names = ["shard-00001-model-00001-of-00002.safetensors", "shard-00012-model-00002-of-00002.safetensors"]
    assert [writer_of(name) for name in [*names, "state.json"]] == [0, 11, 0]


# -------------------------------------------------- before a run -------------------------------------------
def checked(gib: float, monkeypatch, **flags) -> Plumbing:
    """A run of Qwen2.5-Math-7B on 8 GPUs of this size, as far as its check."""
    monkeypatch.setattr("engine.run.machine", lambda args: (8, gib, "NVIDIA H100"))
    run = Plumbing()
    run.args, run.trains, run.engine = ttrl.Args(**flags), True, "vllm"
    run.device, run.config, run.problems = torch.device("cuda"), MATH_7B, [None] * 30
    run._check_plan()
    return run


def test_a_run_that_does_not_fit_stops_before_weights(monkeypatch):
    with pytest.raises(UserError, match="This run does not fit: .* it fits with .*--offload"):
        checked(23.6, monkeypatch)
    run = checked(79.2, monkeypatch, gradient_checkpointing="off")
    assert run.plan.fits and run.args.micro_tokens == run.plan.options.micro_tokens < 16384
    assert run.plan.options.steps == 240


def test_what_is_taken_is_logged_beside_the_plan(monkeypatch):
    run = checked(79.2, monkeypatch)
    taken = iter([50, 30, 35, 20, 40])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((79 - next(taken)) * GIB, 79 * GIB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run.measured, run.seconds, run.running = {}, {}, None
    for phase in ("sync", "sample", "embed", "score", "score", "update", None):
        run.phase(phase)
    assert run.measured == dict(embedding=50, scoring=35, update=20)
    run.measure("sampling")
    assert run.measured["sampling"] == 40 and run.plan.peaks.keys() >= run.measured.keys() - {"embedding"}
    assert run.plan.peaks["update"] + OVERHEAD < 79.2 * GIB


def test_offload_needs_a_gpu(tmp_path):
    with pytest.raises(UserError, match="--offload is 'optimizer', but there is no GPU here"):
        common.Run(toy_args(ttrl, offload="optimizer", out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_too_little_disk_space_is_found_before_the_run(tmp_path, monkeypatch):
    """The toy: two checkpoints and one being written of 12 bytes a parameter, and the model of 4."""
    needed = (3 * 12 + 4) * 355_584
    for spare, fits in ((-1, False), (0, True)):
        monkeypatch.setattr(runfolder.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed + spare))
        args = toy_args(ttrl, checkpoint_every=10, out=str(tmp_path / f"new/run{spare}"))
        if fits:
            common.Run(args)
            continue
        with pytest.raises(UserError, match="GiB to spare, but checkpoints and final model take 0.01; give"):
            common.Run(args)
        assert not (tmp_path / "new").exists()


def test_a_step_too_large_for_a_cpu_is_said(capsys):
    sentence = cpu_sentence(ttrl.Args(), MATH_1_5B, threads=2)
    assert "a step samples up to 1,572,864 tokens from 1.54e9 parameters" in sentence
    assert "about 108.5 hours a step. It goes on" in sentence
    small = ttrl.Args(votes=16, train_samples=8, prompts_per_batch=8, max_new_tokens=40,
                      max_prompt_tokens=192)
    assert " minutes a step" in cpu_sentence(small, MATH_1_5B, threads=4)
    smollm2 = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                          num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    assert cpu_sentence(small, smollm2, threads=1) == ""  # what --model smollm2 runs
    toy = toy_args(ttrl, votes=32, prompts_per_batch=16, max_new_tokens=128)
    assert cpu_sentence(toy, make_policy().model.config, threads=1) == ""


# ------------------------------------------------- the first hour ------------------------------------------
def test_a_broken_vllm_is_never_replaced_without_a_word(monkeypatch):
    """A null in sys.modules makes an import fail."""
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="vLLM is installed, but does not import here .* --sampler hf"):
        setup.has_vllm()
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert setup.has_vllm() is False


def test_a_driver_that_is_too_old_is_said_instead_of_running_on_the_cpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/proc/driver/nvidia" or exists(path))
    with pytest.raises(UserError, match="the driver is probably too old for this torch .CUDA 13.0."):
        setup.start_processes()
    for hidden in ("", "-1"):  # on purpose
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert setup.start_processes() == (torch.device("cpu"), 0, 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/proc/driver/nvidia" and exists(path))
    assert setup.start_processes() == (torch.device("cpu"), 0, 1)


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


@pytest.mark.parametrize("module", [*SCRIPTS, *(f"examples/{name}" for name in EXAMPLES)])
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
