"""Two samplers with the same three methods, load, generate and sleep: vLLM, and a transformers model.

vLLM runs in the trainer's process; its own way to update weights (LLM.update_weights) is for other processes.
The transformers model is for machines without vLLM, and faster than it for tiny models."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, nullcontext
from itertools import chain, groupby, islice

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import TopKLogitsWarper, TopPLogitsWarper

from engine import vllm_cpu
from engine.base import Request, Sample, UserError, stop_texts, timed
from engine.ranks import print0, rank_and_ranks
from engine.models import is_fast, load_model

# Entries of a config that is refused with vLLM
UNTRIED = re.compile("num_.*experts$|^n_.*experts$|^kv_lora_rank$")
# Of a token's log-probs in sampler and trainer, both in float32: rounding reaches a hundredth of it.
MAX_LOGP_DIFF = 1e-3


def load_sampler(path: str, device, dtype, machine, max_length: int, stop_ids: list[int], seed: int,
                 policy=None) -> HFSampler | VLLMSampler:
    """The sampler. policy: whose weights it will get; None: it samples with those of the path."""
    print0(f"{path}: {'vllm' if machine.uses_vllm else 'hf'} sampler, {str(dtype)[6:]} compute, "
           f"{rank_and_ranks()[1]} rank(s) on {device.type}, stop ids {stop_ids}")
    if machine.uses_vllm:
        entries = policy.model.config.get_text_config().to_dict() if policy else {}
        if any(value and UNTRIED.search(name) for name, value in entries.items()):
            raise UserError("--model has experts or latent attention, whose weights vLLM may not take again; "
                            "give --sampler hf.")
        print0("Starting vLLM (on a GPU it compiles for minutes) ...")
        sampler = VLLMSampler(path, stop_ids, device, dtype, seed, machine, max_length, dummy=bool(policy))
    else:
        sampler = HFSampler(path, stop_ids, device, dtype, machine.trust_remote_code)
    torch.manual_seed(seed)  # building a vLLM engine re-seeds the process
    return sampler


# ------------------------------------------------------ vLLM -----------------------------------------------
def vllm_options(machine, max_length: int, cuda: bool) -> dict:
    """vLLM's options for speed and safety, on a GPU or on a CPU."""
    if cuda:
        # vLLM's own all-reduce shares memory between ranks. With expandable segments, or with memory that can
        # sleep, this fails: the process ends while graphs are captured. FlashInfer's all-reduce compiles or
        # downloads code at the start. So both are off; NCCL's and the one by symmetric memory stay.
        # head_dtype: logits in float32, as the trainer's; in bfloat16 one of 20 is rounded by up to 1/16
        options = dict(gpu_memory_utilization=machine.gpu_memory, enable_sleep_mode=True,
                       disable_custom_all_reduce=machine.tensor_parallel > 1,
                       compilation_config=dict(pass_config=dict(fuse_allreduce_rms=False)),
                       enable_flashinfer_autotune=False,  # of kernels that no dense model has
                       hf_overrides=dict(head_dtype="float32"))
    else:
        # no chunked prefill: after a part of a prompt vLLM would have to rewind the request's random
        # generator, which only a GPU's generator can do
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
        # the same model in transformers' class: `load` takes its buffers. Memory-mapped, so it is cheap.
        self.model = load_model(model, machine.trust_remote_code)
        starting = nullcontext() if self.cuda else vllm_cpu.starting(machine.tensor_parallel)
        with classes_kept(self.model), starting:
            from vllm import LLM  # only now: it replaces some of transformers' configs
            self.llm = LLM(
                model, dtype=str(dtype).removeprefix("torch."), seed=seed, max_model_len=max_length,
                enable_prefix_caching=True, logprobs_mode="processed_logprobs", disable_log_stats=True,
                trust_remote_code=machine.trust_remote_code, load_format="dummy" if dummy else "auto",
                tensor_parallel_size=machine.tensor_parallel, **vllm_options(machine, max_length, self.cuda))

    @timed("sync")
    def load(self, named_tensors) -> None:
        """Stream new weights into the engine, not over the disk, then drop what the prefix cache knows.

        Raises RuntimeError if the engine did not take one of its parameters."""
        if self.asleep:  # first the weights alone: weights, old KV cache and trainer may not fit together
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        stored = self.model.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in self.model.named_buffers() if name in stored]
        missing = self.llm.collective_rpc(_load_into_worker, args=(chain(named_tensors, buffers),))[0]
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
        # ignore_eos: else vLLM would stop not only at our stop_ids, but also at the model's own end tokens
        shared = dict(temperature=temperature, top_p=top_p, top_k=top_k, logprobs=0,  # 0: the sampled token's
                      flat_logprobs=True, stop_token_ids=self.stop_ids, ignore_eos=True,
                      detokenize=bool(stop), stop=stop, include_stop_str_in_output=bool(stop),
                      skip_special_tokens=not stop)
        params = [SamplingParams(n=r.n, max_tokens=r.max_new_tokens, seed=r.seed, **shared) for r in requests]
        prompts = [{"prompt_token_ids": r.prompt_ids} for r in requests]
        groups = []
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            groups.append([])
            for o in output.outputs:
                logprobs = torch.tensor(o.logprobs.logprobs, dtype=torch.float32)
                groups[-1].append(Sample(list(o.token_ids), logprobs, finished=o.finish_reason == "stop"))
        return groups


@contextmanager
def classes_kept(model):
    """While vLLM starts: what it changes in this process is put back. Where it runs a model in transformers'
    own class, it has torch.compile wrap this class, which is the trainer's, too; and it sets the number of
    torch's threads, to 1 on a GPU."""
    threads = torch.get_num_threads()
    original_inits = {kind: kind.__init__ for kind in map(type, model.modules())}
    yield
    for kind, original_init in original_inits.items():
        if kind.__init__ is not original_init:
            kind.__init__, kind.do_not_compile = original_init, True
    torch.set_num_threads(threads)


def _load_into_worker(worker, named_tensors) -> set[str]:
    """Runs inside vLLM's worker; returns the parameters that were not loaded (vLLM itself only warns)."""
    model, taken = worker.get_model(), set()
    original = model.load_weights

    def load_weights(weights):
        taken.update(original(weights))
        return taken

    model.load_weights = load_weights
    try:
        # without weights_iterator vLLM would load the model's files again
        worker.reload_weights(weights_iterator=iter(named_tensors))
        if worker.device.type == "cpu":
            vllm_cpu.pack_again(model)
    finally:
        del model.load_weights
    return {name for name, _ in model.named_parameters()} - taken


# ---------------------------------------------- a transformers model ---------------------------------------
CACHE = 2 ** 30  # bytes of keys and values that are kept at a time


class HFSampler:
    """Prompts are read once for all their samples, and finished rows are dropped an eighth at a time.

    The uniform numbers of a sample come from its own seed and are turned into tokens by the inverse of the
    cumulative distribution, so a response does not depend on what else is in the batch or on which rank
    samples it (beyond float rounding)."""

    def __init__(self, model: str, stop_ids: list[int], device, dtype, trust_remote_code: bool = False):
        """model: folder or Hub id. stop_ids: tokens that finish a response. device, dtype: of the weights."""
        self.model = load_model(model, trust_remote_code, dtype).eval()
        # padding may reach a recurrent state
        self.pad_prompts, self.device = is_fast(self.model.config), torch.device(device)
        self.model.set_attn_implementation("sdpa" if self.pad_prompts else "eager")
        self.model.to(device)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self.bar = tqdm(disable=True)  # an evaluation gives its own, which counts responses

    @timed("sync")
    @torch.no_grad()
    def load(self, named_tensors) -> None:
        """Take new weights. Raises KeyError for one that is not known, RuntimeError if one was not sent."""
        waiting = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            waiting.pop(name).copy_(tensor)
        if waiting:
            raise RuntimeError(f"the sampler did not receive the weights {sorted(waiting)[:3]}")

    def sleep(self) -> None:
        """vLLM gives its memory to the update here; this sampler has none to give."""

    @torch.inference_mode()
    def generate(self, requests: list[Request], temperature: float, top_p: float = 1.0, top_k: int = 0,
                 stop: list[str] = (), decode=None) -> list[list[Sample]]:
        """Responses per request. Temperature 0: greedy. Log-probs are of the distribution sampled from.

        A response ends, finished, with a token of stop_ids, or with the first token after which decode(ids)
        of its last tokens contains one of the texts in stop."""
        responses, rows, stop = [], self._rows(requests), stop_texts(stop)
        samples = [(request, request.seed + i) for request in requests for i in range(request.n)]
        for _, part in groupby(samples, key=lambda sample: self.pad_prompts or len(sample[0].prompt_ids)):
            part = list(part)
            for first in range(0, len(part), rows):
                responses += self._generate(part[first:first + rows], temperature, top_p, top_k, stop, decode)
        rest = iter(responses)
        return [list(islice(rest, request.n)) for request in requests]

    def _rows(self, requests: list[Request]) -> int:
        """Sequences at a time: at most 1,024, fewer if their logits or keys and values take much memory."""
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        text = self.model.config.get_text_config()
        queries = text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or queries
        # The attribute raises where widths differ by layer (Gemma 4); an estimate is enough here.
        head_size = text.to_dict().get("head_dim") or text.hidden_size // queries
        numbers = 2 * text.num_hidden_layers * heads * head_size
        sequence = numbers * longest * self.model.dtype.itemsize  # about
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        return max(1, min(1024, 2 ** 26 // vocabulary, CACHE // max(1, sequence)))

    def _generate(self, samples, temperature, top_p, top_k, stop, decode) -> list[Sample]:
        """[all] is all samples, [rows] those that are still being sampled."""
        limit = torch.tensor([request.max_new_tokens for request, _ in samples], device=self.device)  # [all]
        steps = int(limit.max())
        uniform = uniform_numbers(samples, steps, self.device)                  # [all, steps]
        tokens = torch.zeros(len(samples), steps, dtype=torch.long, device=self.device)  # [all, steps]
        logprobs = torch.zeros(len(samples), steps, device=self.device)         # [all, steps]
        length = torch.zeros_like(limit)                                        # [all]
        finished = torch.zeros_like(limit, dtype=torch.bool)                    # [all]
        # a text may be spread over as many tokens as it has bytes, and decoding may eat a first space
        tail = 1 + max([len(text.encode()) for text in stop], default=0)
        stops = re.compile("|".join(map(re.escape, stop)))
        # the samples of a prompt share one row until the first token is drawn
        number = {}  # of each different prompt
        prompt_of = [number.setdefault(tuple(request.prompt_ids), len(number)) for request, _ in samples]
        prompt_of = torch.tensor(prompt_of, device=self.device)                 # [rows]
        left = dict(batch_first=True, padding_side="left")                      # both [prompts, longest]
        ids = pad_sequence([torch.tensor(prompt) for prompt in number], **left).to(self.device)
        mask = pad_sequence([torch.ones(len(prompt)).long() for prompt in number], **left).to(self.device)
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=True,
                         logits_to_keep=1)
        logits = out.logits[:, -1][prompt_of]                                   # [rows, vocabulary]
        cache = out.past_key_values
        cache.reorder_cache(prompt_of)  # the one way to select rows that all kinds of layers have
        mask = mask[prompt_of]                                                  # [rows, longest]
        position = mask.sum(1)                                                  # [rows], of the next token
        rows = torch.arange(len(samples), device=self.device)                   # [rows], of [all]
        live = torch.ones_like(rows, dtype=torch.bool)                          # [rows]
        for t in range(steps):
            u = uniform[rows, t]                                                # [rows]
            token, logprob = draw(logits, u, temperature, top_p, top_k)         # [rows], [rows]
            tokens[rows, t] = token
            logprobs[rows, t] = logprob
            length[rows[live]] = t + 1
            ended = torch.isin(token, self.stop_ids)
            if stop:
                tails = tokens[rows, max(0, t + 1 - tail):t + 1].tolist()
                ended |= torch.tensor([bool(stops.search(decode(ids))) for ids in tails], device=self.device)
            finished[rows[live & ended]] = True
            live &= ~ended & (t + 1 < limit[rows])
            if not live.any():
                break
            if live.float().mean() < 7 / 8:  # to drop the others copies the cache
                keep = live.nonzero().squeeze(-1)
                self.bar.update(len(rows) - len(keep))
                rows, token, position, mask, live = (x[keep] for x in (rows, token, position, mask, live))
                cache.reorder_cache(keep)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)            # [rows, one longer]
            out = self.model(input_ids=token[:, None], attention_mask=mask, position_ids=position[:, None],
                             past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]
            position = position + 1

        self.bar.update(len(rows))
        logprobs, responses = logprobs.cpu(), []
        for i, end in enumerate(length.tolist()):
            responses.append(Sample(tokens[i, :end].tolist(), logprobs[i, :end].clone(),
                                    finished=bool(finished[i])))
        return responses


def uniform_numbers(samples: list[tuple[Request, int]], steps: int, device: torch.device) -> torch.Tensor:
    """[samples, steps] float64 in [0, 1), a stream of its own for every sample.

    Philox takes the whole seed as its key; torch's CPU generator takes only the lowest 32 bits."""
    streams = [np.random.Generator(np.random.Philox(key=seed)).random(steps) for _, seed in samples]
    return torch.from_numpy(np.stack(streams)).to(device)


def draw(logits, uniform, temperature: float, top_p: float, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, vocabulary] logits and [rows] uniform numbers -> [rows] tokens and [rows] their log-probs.

    Inverse transform sampling: the first token at which the cumulative distribution exceeds the uniform
    number. Temperature 0: the likeliest token."""
    logits = logits.float() / (temperature or 1.0)
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    probs = torch.softmax(logits, -1)
    if temperature == 0:
        token = probs.argmax(-1)
    else:
        # float64: a float32 sum over 150k entries loses the tail
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
        token = token.squeeze(-1).clamp(max=probs.shape[-1] - 1)
    return token, probs.gather(-1, token[:, None]).squeeze(-1).log()
