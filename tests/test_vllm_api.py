"""What VLLMSampler passes to vLLM exists there and means what it relies on, on CUDA, too.

The CPU build of vLLM has the Python files of the CUDA build, its GPU workers included: signatures, defaults
and the rules of sleeping are checked without a GPU. What the kernels do is not: python -m tools.gpu_smoke."""

import dataclasses
import inspect
import re
import typing
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import make_policy
from equations import relative_error
from transformers import AutoTokenizer

import common
from engine.base import seed_of
from engine.data import encode_prompt, load_problems
from engine.plan import MOST_SEQUENCES
from engine.policy import Request
from engine.setup import has_vllm

if not has_vllm():
    pytest.skip("optional: vLLM is not installed", allow_module_level=True)

import vllm
from vllm.config import ModelConfig
from vllm.config.model import LogprobsMode
from vllm.config.parallel import DistributedExecutorBackend
from vllm.engine.arg_utils import EngineArgs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def constructor(monkeypatch):
    """Stands for vllm.LLM and has its signatures: a call that does not fit them is an error."""
    stand_in = mock.create_autospec(vllm.LLM)
    monkeypatch.setattr(vllm, "LLM", stand_in)
    return stand_in


def cuda_sampler(**options):
    args = common.Args(max_prompt_tokens=384, max_new_tokens=64, **options)
    return common.VLLMSampler(args, "M", [2], CUDA, torch.bfloat16, dummy=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_engine_knows_every_argument(constructor, monkeypatch, device):
    monkeypatch.setenv("RANK", "0")
    args = common.Args(tensor_parallel=2)
    common.VLLMSampler(args, "M", [2], torch.device(device), torch.bfloat16)
    given = constructor.call_args.kwargs
    assert {"tensor_parallel_size", "logprobs_mode", "load_format", "seed"} < given.keys()
    assert given.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    EngineArgs(model=common.TOY_MODEL, **given)
    assert given["logprobs_mode"] in typing.get_args(LogprobsMode)
    assert given["distributed_executor_backend"] in typing.get_args(DistributedExecutorBackend)
    assert given["enable_prefix_caching"]
    if device == "cuda":
        assert given["enable_sleep_mode"]
        assert given["gpu_memory_utilization"] == 0.5
        assert given["max_num_seqs"] == MOST_SEQUENCES  # the plan's
        assert given["disable_custom_all_reduce"]
        common.VLLMSampler(common.Args(), "M", [2], CUDA, torch.bfloat16)
        assert not constructor.call_args.kwargs["disable_custom_all_reduce"]


def test_a_sync_wakes_weights_first_and_the_cache_last(constructor):
    sampler = cuda_sampler()
    llm = constructor.return_value
    llm.collective_rpc.return_value = [set()]
    sampler.load([])  # it never slept
    assert [call[0] for call in llm.method_calls] == ["collective_rpc", "reset_prefix_cache"]
    sampler.sleep()
    sampler.sleep()
    llm.sleep.assert_called_once_with(level=2)
    llm.reset_mock()
    sampler.load([])
    assert llm.method_calls == [
        mock.call.wake_up(tags=["weights"]),
        mock.call.collective_rpc(common._load_into_worker, args=([],)),
        mock.call.reset_prefix_cache(),
        mock.call.wake_up(tags=["kv_cache"]),
    ]
    llm.collective_rpc.return_value = [{"lm_head"}]
    with pytest.raises(RuntimeError, match="lm_head"):
        sampler.load([])
    llm.collective_rpc.return_value, llm.reset_prefix_cache.return_value = [set()], False
    with pytest.raises(RuntimeError, match="did not drop its prefix cache"):
        sampler.load([])


def test_requests_become_sampling_params(constructor):
    sampler = cuda_sampler()
    llm = constructor.return_value
    llm.generate.return_value = []
    seed = seed_of("largest seeds") + 65535
    sampler.generate([Request([5, 6], 3, seed, 7)], 0.6, 0.95, 20)
    (prompts, [params]), _ = llm.generate.call_args
    assert prompts == [{"prompt_token_ids": [5, 6]}]
    assert (params.n, params.max_tokens, params.seed) == (3, 7, seed)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
    assert params.stop_token_ids == [2]
    assert params.flat_logprobs
    assert not params.detokenize
    assert params.num_logprobs == 0  # beside the sampled token's
    assert seed < 2**63  # the GPU holds seeds as int64


def test_level_two_drops_the_weights_and_wakes_by_tag():
    from vllm.device_allocator import sleep_mode_backend
    from vllm.device_allocator.cumem import CuMemAllocator
    allocator = mock.create_autospec(CuMemAllocator, instance=True)
    config = SimpleNamespace(sleep_mode_backend="cumem")
    with mock.patch("vllm.device_allocator.get_mem_allocator_instance", return_value=allocator):
        backend = sleep_mode_backend.SleepModeBackendFactory.create_backend(config)
        for level in (1, 2):  # what is not offloaded is dropped
            backend.suspend(level)
            kept = allocator.sleep.call_args.kwargs["offload_tags"]
            assert ("weights" in kept) == (level == 1)
            assert "kv_cache" not in kept
        backend.resume(["weights"])
        allocator.wake_up.assert_called_once_with(["weights"])


def test_workers_allocate_by_these_tags_and_take_an_iterator():
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner
    source = inspect.getsource(gpu_worker)
    assert {"weights", "kv_cache"} <= set(re.findall(r'tag="(\w+)"', source))
    assert "reload_weights" in vars(gpu_worker.Worker)
    for runner in (FirstRunner, SecondRunner):
        inspect.signature(runner.reload_weights).bind(None, weights_iterator=iter([]))


def test_sleeping_engines_keep_their_graphs():
    """engine/plan.py counts them: ASLEEP."""
    [field] = [f for f in dataclasses.fields(ModelConfig) if f.name == "sleep_mode_offload_cudagraph"]
    assert field.default is False


def test_flat_logprobs_of_a_dummy_engine():
    """Random weights until `load`; then the policy's, and flat log-probs are the ones of a dict per token."""
    tokenizer = AutoTokenizer.from_pretrained(common.TOY_MODEL)
    prompts = [encode_prompt(tokenizer, p.question) for p in load_problems("toy", quiet=True)[:3]]
    requests = [Request(ids, 4, seed_of("flat", i), 32) for i, ids in enumerate(prompts)]
    args = common.Args(max_prompt_tokens=128, max_new_tokens=32)
    stop = [tokenizer.eos_token_id]
    sampler = common.VLLMSampler(args, common.TOY_MODEL, stop, CPU, torch.float32, dummy=True)
    policy = make_policy()

    def error(groups):
        rollouts = [rollout for group in groups for rollout in group]
        policy.score_old(rollouts, 0.7)
        sampled = torch.cat([r.logprobs for r in rollouts])
        return relative_error(sampled, torch.cat([r.old_logp for r in rollouts]))

    assert error(sampler.generate(requests, 0.7)) > 0.1
    sampler.load(policy.named_tensors(torch.float32))
    groups = sampler.generate(requests, 0.7)
    assert error(groups) < 1e-4
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    params = [vllm.SamplingParams(n=4, max_tokens=32, seed=request.seed, temperature=0.7, logprobs=0,
                                  stop_token_ids=sampler.stop_ids, detokenize=False) for request in requests]
    for group, output in zip(groups, sampler.llm.generate(inputs, params, use_tqdm=False), strict=True):
        for rollout, o in zip(group, output.outputs, strict=True):
            assert rollout.response_ids == list(o.token_ids)
            by_dict = [step[token].logprob for token, step in zip(o.token_ids, o.logprobs, strict=True)]
            assert torch.equal(rollout.logprobs, torch.tensor(by_dict))
