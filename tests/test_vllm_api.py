"""What VLLMSampler passes to vLLM exists there and means what it relies on, on CUDA, too.

The CPU build of vLLM has the Python files of the CUDA build: signatures and arguments are checked without a
GPU. What the kernels do is not: python -m tools.gpu_smoke."""

import dataclasses
import typing
from unittest import mock

import pytest
import torch

from engine import builtin, vllm_sampler
from engine.options import Machine, has_vllm

if not has_vllm():
    pytest.skip("optional: vLLM is not installed", allow_module_level=True)

import vllm
from vllm.config.model import LogprobsMode
from vllm.config.parallel import DistributedExecutorBackend
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture
def constructor(monkeypatch):
    """Stands for vllm.LLM and has its signatures: a call that does not fit them is an error."""
    stand_in = mock.create_autospec(vllm.LLM)
    monkeypatch.setattr(vllm, "LLM", stand_in)
    return stand_in


def sampler(device="cuda", **flags):
    model, device = builtin.TOY_MODEL, torch.device(device)
    return vllm_sampler.VLLMSampler(model, [2], device, torch.bfloat16, 1, Machine(**flags), 448, dummy=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_engine_knows_every_argument(constructor, monkeypatch, device):
    monkeypatch.setenv("RANK", "0")
    sampler(device, tensor_parallel=2, gpu_memory=0.3)
    given = constructor.call_args.kwargs
    assert given.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    EngineArgs(model=builtin.TOY_MODEL, **given)
    assert given["logprobs_mode"] in typing.get_args(LogprobsMode)
    assert given["distributed_executor_backend"] in typing.get_args(DistributedExecutorBackend)
    expected = dict(tensor_parallel_size=2, max_model_len=448, dtype="bfloat16", load_format="dummy",
                    enable_prefix_caching=True)
    if device == "cuda":
        expected |= dict(gpu_memory_utilization=0.3, enable_sleep_mode=True, disable_custom_all_reduce=True)
    assert given | expected == given


def test_a_sync_wakes_weights_first_and_the_cache_last(constructor):
    engine = sampler()
    llm = constructor.return_value
    llm.collective_rpc.return_value = [set()]
    engine.sleep()
    engine.sleep()
    llm.sleep.assert_called_once_with(level=2)
    llm.reset_mock()
    engine.load([])
    assert llm.method_calls == [
        mock.call.wake_up(tags=["weights"]),
        mock.call.collective_rpc(vllm_sampler._load_into_worker, args=(mock.ANY,)),
        mock.call.reset_prefix_cache(),
        mock.call.wake_up(tags=["kv_cache"]),
    ]
    llm.reset_prefix_cache.return_value = False
    with pytest.raises(RuntimeError, match="did not drop its prefix cache"):
        engine.load([])
