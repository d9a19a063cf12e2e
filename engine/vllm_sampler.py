"""Sampling with vLLM, in the trainer's process.

vLLM's own way to update weights (LLM.update_weights) is for engines in processes of their own."""

from __future__ import annotations

import os
import re
from itertools import chain, groupby

import torch
from transformers.core_model_loading import revert_weight_conversion

from engine import VARIABLES
from engine.base import Request, Sample, UserError, on_all_ranks, on_rank_0, stop_texts, timed
from engine.logprobs import eager_logprobs, probe_responses, sample_probe
from engine.models import load_model


def vllm_options(machine, max_length: int, cuda: bool) -> dict:
    """vLLM's options for speed and safety, on a GPU or on a CPU."""
    if cuda:
        # vLLM's own all-reduce shares memory between ranks, which neither expandable segments nor memory that
        # can sleep allow: the process ends while graphs are captured. FlashInfer's compiles or downloads at
        # the start. NCCL and symmetric memory stay
        options = dict(gpu_memory_utilization=machine.gpu_memory, enable_sleep_mode=True,
                       disable_custom_all_reduce=machine.tensor_parallel > 1,
                       compilation_config=dict(pass_config=dict(fuse_allreduce_rms=False)))
    else:
        # whole prompts only: the CPU build cannot rewind a request's seed over a partly prefilled one
        # block_size: the smallest it has, so that the prefix cache finds short prefixes (ETTRL), too
        options = dict(enforce_eager=True, block_size=32, enable_chunked_prefill=False,
                       max_num_batched_tokens=max(8192, max_length),
                       kv_cache_memory_bytes=int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 2)) << 30)
    if os.environ.get("RANK"):  # under torchrun: every rank calls its engine
        options["distributed_executor_backend"] = "external_launcher"
    return options


class VLLMSampler:
    """vLLM in the trainer's process, one engine per rank or per --tensor_parallel ranks; CUDA and CPU alike.

    dummy: it starts with random weights and reads no checkpoint; `load` must come before `generate`."""

    def __init__(self, model: str, stop_ids: list[int], device, dtype, seed: int, machine, max_length: int,
                 dummy: bool = False):
        self.cuda, self.stop_ids, self.asleep = device.type == "cuda", stop_ids, False
        threads, set_threads = torch.get_num_threads(), torch.set_num_threads
        # memory-mapped; for the names of its weights and its buffers
        self.model = load_model(model, machine.trust_remote_code)
        original_inits = {kind: kind.__init__ for kind in map(type, self.model.modules())}
        try:
            from vllm import LLM  # only now: it replaces some of transformers' configs
            self.llm = LLM(
                model, dtype=str(dtype).removeprefix("torch."), seed=seed, max_model_len=max_length,
                enable_prefix_caching=True, logprobs_mode="processed_logprobs", disable_log_stats=True,
                trust_remote_code=machine.trust_remote_code, load_format="dummy" if dummy else "auto",
                tensor_parallel_size=machine.tensor_parallel,
                **vllm_options(machine, max_length, self.cuda))
        except ImportError:  # a broken install is no matter of the model
            raise
        except Exception as error:
            # its errors seldom name the environment variable at fault
            own = {name: value for name, value in sorted(os.environ.items()) if name.startswith("VLLM_")}
            given = [f"; {name} is '{value}'" for name, value in own.items() if VARIABLES.get(name) != value]
            raise UserError(f"vLLM does not start with --model, which is of the type "
                            f"{self.model.config.model_type}; give --sampler hf. It says: "
                            f"{' '.join(str(error).split())[:200]}{''.join(given)}") from None
        finally:
            for kind, original_init in original_inits.items():
                if kind.__init__ is not original_init:  # vLLM replaced it; the trainer has it, too
                    kind.__init__, kind.do_not_compile = original_init, True
        # the CPU engine replaces set_num_threads with a stub and may change their number
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)

    @timed("sync")
    def load(self, named_tensors) -> None:
        """Stream new weights into the engine, not over the disk, then drop what the prefix cache knows.

        Raises RuntimeError if the engine did not take one of its parameters."""
        if self.asleep:  # first the weights alone: weights, old KV cache and trainer may not fit together
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        stored = self.model.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in self.model.named_buffers() if name in stored]
        named_tensors = as_in_checkpoints(self.model, chain(named_tensors, buffers))
        missing = self.llm.collective_rpc(_load_into_worker, args=(named_tensors,))[0]
        if missing:
            raise RuntimeError(f"vLLM did not take the weights {sorted(missing)[:3]}")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache, which old weights computed")
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        """Give the GPU memory to the update. The weights go, too: the next `load` must send them again."""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def generate(self, requests: list[Request], temperature: float, top_p: float = 1.0, top_k: int = 0,
                 stop: list[str] = (), decode=None) -> list[list[Sample]]:
        """Responses per request, in one engine call. Temperature 0 is greedy. stop: texts that end one."""
        from vllm import SamplingParams
        stop = stop_texts(stop)
        shared = dict(temperature=temperature, top_p=top_p, top_k=top_k, logprobs=0,  # 0: the sampled token's
                      flat_logprobs=True, stop_token_ids=self.stop_ids, detokenize=bool(stop),
                      stop=stop, include_stop_str_in_output=bool(stop), skip_special_tokens=not stop)
        params = [SamplingParams(n=r.n, max_tokens=r.max_new_tokens, seed=r.seed, **shared) for r in requests]
        prompts = [{"prompt_token_ids": r.prompt_ids} for r in requests]
        groups = []
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            groups.append([])
            for o in output.outputs:
                logprobs = torch.tensor(o.logprobs.logprobs, dtype=torch.float32)
                groups[-1].append(Sample(list(o.token_ids), logprobs, finished=o.finish_reason == "stop"))
        return groups


def as_in_checkpoints(model, named_tensors):
    """The weights under the names and in the parts that checkpoints have, which vLLM reads. transformers
    renames and joins some (the experts of Mixtral), never beyond a layer."""
    for _, layer in groupby(named_tensors, key=lambda item: re.match(r"\D*\d*", item[0])[0]):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _load_into_worker(worker, named_tensors) -> set[str]:
    """Runs inside vLLM's worker; returns the parameters that were not loaded (vLLM itself only warns)."""
    model, taken = worker.get_model(), set()
    original = model.load_weights

    def load_weights(weights):
        taken.update(original(weights))
        return taken

    model.load_weights = load_weights
    # What the CPU build once packed, it does not pack again: experts, and the embedding as a tied head.
    modules = dict(model.named_modules()) if worker.device.type == "cpu" else {}
    experts = {n: m for n, m in modules.items() if hasattr(getattr(m, "quant_method", None), "moe_kernel")}
    for module in experts.values():
        module.quant_method.moe_kernel = None
    try:
        # without an iterator it re-reads the checkpoint
        worker.reload_weights(weights_iterator=iter(named_tensors))
    finally:
        del model.load_weights
    for module in modules.values():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
    unpacked = {name for name, module in experts.items() if module.quant_method.moe_kernel is None}
    return {name for name, _ in model.named_parameters()} - taken | unpacked


def check_vllm(sampler, model, exact: bool, allowed: float, policy=None) -> None:
    """Let vLLM sample a few tokens and compare its log-probs with the policy's, whose weights it takes first,
    or with the model's own. Raises UserError if vLLM fails, or if they differ as `check_sampler` forbids.

    exact: they are float32, of which none may differ by more than allowed."""
    requests = [Request(r.prompt_ids, 1, i, 8) for i, r in enumerate(probe_responses(model))]
    end = f"--model, which is of the type {model.config.model_type}; give --sampler hf"

    def sample() -> tuple[list, torch.Tensor]:
        if policy:
            sampler.sleep()
            sampler.load(policy.named_tensors())
        return sample_probe(sampler, requests)

    responses, logprobs = on_all_ranks(sample, lambda error: f"vLLM does not run {end}. It says: {error}")[0]
    if policy:
        expected = torch.cat([logp_T for logp_T, _ in policy.score(responses, 1.0)])
    else:
        expected = on_rank_0(lambda: eager_logprobs(model, responses))[0]
    difference = (logprobs - expected).abs()
    largest = float(difference.max())
    if not largest <= (allowed if exact else torch.inf) or difference.mean() > 0.5:  # NaN, too
        raise UserError(f"vLLM computes log-probs up to {largest:.2g} off those of transformers for {end}.")
