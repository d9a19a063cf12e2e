"""Sampling. Token ids in, token ids and log-probs out; two engines with the same three methods: load, generate, sleep."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in the trainer's process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


@dataclass
class Request:
    """n responses to one prompt. Sample i draws from the stream of seed + i."""
    prompt_ids: list[int]
    n: int
    seed: int
    max_new_tokens: int


@dataclass(eq=False)
class Rollout:
    """One response. The methods add what they compute (reward, advantage, ...) as further attributes."""
    prompt_ids: list[int]
    response_ids: list[int]
    """[T] sampled tokens, the end-of-sequence token included where the response finished."""
    logprobs: torch.Tensor
    """[T] float32, the sampler's log-probs of them at rollout temperature."""
    finished: bool
    """False: cut off at max_new_tokens."""
    text: str = ""
    answer: str | None = None
    old_logprobs: torch.Tensor | None = None
    """[T] what the ratio divides by: the trainer's log-probs under the policy that sampled it, or the sampler's."""
    trainer_logprobs: torch.Tensor | None = None
    """[T] the trainer's, for the sync proof."""
    ref_logprobs: torch.Tensor | None = None
    """[T] likewise under the frozen initial model."""
    entropies: torch.Tensor | None = None
    """[T] full-vocabulary Shannon entropies at rollout temperature, nats (Policy.score)."""
    advantage: float = 0.0
    weight: float = 1.0


class SharedPrompts:
    """Keys and values of prompts, kept and read once for all their responses; and which live row continues which prompt."""

    def __init__(self, cache: DynamicCache, mask: torch.Tensor):
        self.cache, self.prompts = cache, torch.arange(len(mask), device=mask.device)
        self.bias = torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, -math.inf)[:, None, None]  # left padding

    def assign(self, prompts: torch.Tensor) -> None:
        """Row i continues prompt prompts[i] (ascending); prompts without rows are dropped. Sets `rows`, the row at every place
        of a table [prompt, most rows of any prompt], and `place`, where in that table a row is."""
        kept, prompts, counts = prompts.unique_consecutive(return_inverse=True, return_counts=True)
        if len(kept) < len(self.prompts):
            keep = torch.isin(self.prompts, kept).nonzero().squeeze(-1)
            self.cache.batch_select_indices(keep)
            self.prompts, self.bias = kept, self.bias[keep]
        rows, most = torch.arange(len(prompts), device=prompts.device), int(counts.max())
        self.place = prompts * most + rows - (counts.cumsum(0) - counts)[prompts]
        self.rows = rows.new_zeros(len(counts) * most)  # empty places compute row 0, nobody reads them
        self.rows[self.place] = rows


def shared_prompt_attention(module, query, key, value, attention_mask, shared=None, scaling=None, **options):
    """Attention of one new token per row to its prompt (SharedPrompts) and to the row's own tokens (key, value).

    The softmax over both is the two softmaxes, weighted by their normalizers. query [rows, heads, 1, d], key and value
    [rows, KV heads, tokens, d] -> [rows, 1, heads, d]. Without `shared`, while prompts are read, ordinary attention."""
    if shared is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if attention_mask is not None:
        raise ValueError("a mask of the model's own cannot be shared")

    def attend(query, key, value, bias=0.0):
        """All queries of a KV head side by side. In float32; the log of the softmax's normalizer is the last column."""
        scores = query @ key.float().transpose(2, 3) + bias
        return torch.cat([scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1, keepdim=True)], -1)

    prompt, (rows, _, _, d), heads = shared.cache.layers[module.layer_idx], query.shape, key.shape[1]
    query = query.reshape(rows, heads, -1, d).float() * (d ** -0.5 if scaling is None else scaling)
    own, log_own = attend(query, key, value).split([d, 1], -1)
    table = query.index_select(0, shared.rows).unflatten(0, (len(shared.bias), -1))
    out = attend(table.transpose(1, 2).flatten(2, 3), prompt.keys, prompt.values, shared.bias)
    out = out.unflatten(2, (table.shape[1], -1)).transpose(1, 2).flatten(0, 1).index_select(0, shared.place)
    out, log_prompt = out.split([d, 1], -1)
    return own.lerp(out, (log_prompt - log_own).sigmoid()).to(value.dtype).view(rows, 1, -1, d), None


AttentionInterface.register("shared_prompt", shared_prompt_attention)
AttentionMaskInterface.register("shared_prompt", sdpa_mask)


class HFSampler:
    """Sampling through a transformers model: prompts read once for all their samples, finished rows dropped.

    Prompts are kept once, too (SharedPrompts), unless the architecture cannot do with that: then every row has a copy.

    For machines without vLLM, and faster than it for tiny models. Uniform numbers of a sample come from its own seed
    and are turned into tokens by the inverse of the cumulative distribution, so a response does not depend on what
    else is in the batch or on which rank samples it (beyond float rounding)."""

    def __init__(self, args, model: str, tokenizer, stop_ids: list[int], device, dtype):
        load = partial(AutoModelForCausalLM.from_pretrained, model, trust_remote_code=args.trust_remote_code)
        self.model, self.device, self.stop_ids = load(dtype=torch.float32).eval(), torch.device("cpu"), torch.tensor([], dtype=torch.long)
        self.max_rows = min(1024, max(16, 2 ** 26 // self.model.config.get_text_config().vocab_size))
        self.version, self.shares = -1, False
        self.shares = all(type(layer) is DynamicLayer for layer in self._cache().layers) and self._shares_prompts()
        if dtype != torch.float32:  # half precision would have hidden a difference
            self.model = load(dtype=dtype).eval()
            if self.shares:
                self.model.set_attn_implementation("shared_prompt")
        self.model.to(device)
        self.device, self.stop_ids = device, torch.tensor(stop_ids, device=device)

    def _cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def _shares_prompts(self) -> bool:
        """Whether this architecture samples with shared prompts what it samples without; then the model is set to share."""
        requests = [Request([5, 6, 7], 2, 1, 3), Request([8, 9], 2, 3, 3)]
        alone, attention = self._generate(requests, 1.0, 1.0, 0), self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation("shared_prompt")
            self.shares = self.model.config.get_text_config()._attn_implementation == "shared_prompt"  # some stay as they are
            pairs = zip(sum(alone, []), sum(self._generate(requests, 1.0, 1.0, 0), []))
            same = all(a.response_ids == b.response_ids and torch.allclose(a.logprobs, b.logprobs, atol=1e-3) for a, b in pairs)
            if self.shares and same:
                return True
        except Exception:  # whatever it is: copies work everywhere
            pass
        self.model.set_attn_implementation(attention)
        return False

    @torch.no_grad()
    def load(self, named_tensors) -> None:
        """Take new weights. Raises RuntimeError where a parameter was not sent or is not known."""
        waiting = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            waiting.pop(name).copy_(tensor)
        if waiting:
            raise RuntimeError(f"the sampler did not receive the weights {sorted(waiting)[:3]}")

    def sleep(self) -> None:
        pass

    @torch.inference_mode()
    def generate(self, requests: list[Request], temperature: float, top_p: float = 1.0, top_k: int = 0) -> list[list[Rollout]]:
        """Responses per request. Temperature 0 is greedy. Log-probs are those of the distribution sampled from."""
        results, chunk = [], []
        for i, request in enumerate(requests):  # chunks of at most max_rows sequences of one n
            chunk.append(request)
            last = i + 1 == len(requests) or requests[i + 1].n != request.n
            if last or (len(chunk) + 1) * request.n > self.max_rows:
                results += self._generate(chunk, temperature, top_p, top_k)
                chunk = []
        return results

    def _generate(self, requests, temperature, top_p, top_k):
        device, n, longest = self.device, requests[0].n, max(len(r.prompt_ids) for r in requests)
        ids = torch.tensor([[0] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in requests], device=device)
        mask = torch.tensor([[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests], device=device)
        steps = max(r.max_new_tokens for r in requests)
        limit = torch.tensor([r.max_new_tokens for r in requests for _ in range(n)], device=device)
        uniform = torch.stack([torch.rand(steps, dtype=torch.float64, generator=torch.Generator().manual_seed(r.seed + i))
                               for r in requests for i in range(n)]).to(device)
        cache, position = self._cache(), mask.sum(1).repeat_interleave(n, 0)
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                            past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].repeat_interleave(n, 0)
        rows = torch.arange(len(requests) * n, device=device)  # which response each live row is
        if self.shares:
            shared, cache = SharedPrompts(cache, mask), self._cache()
            shared.assign(rows // n)
        else:
            cache.batch_repeat_interleave(n)
            mask = mask.repeat_interleave(n, 0)
        tokens = torch.zeros(len(rows), steps, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(rows), steps, device=device)
        length = torch.zeros(len(rows), dtype=torch.long, device=device)
        finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
        for t in range(steps):
            probs = torch.softmax(_truncate(logits.float() / (temperature or 1.0), top_p, top_k), -1)
            if temperature == 0:
                token = probs.argmax(-1)
            else:
                cumulative = probs.cumsum(-1, dtype=torch.float64)  # a float32 sum over 150k entries loses the tail
                u = uniform[rows, t, None] * cumulative[:, -1:]
                token = torch.searchsorted(cumulative, u, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)
            tokens[rows, t], logprobs[rows, t] = token, probs.gather(-1, token[:, None]).squeeze(-1).log()
            length[rows] = t + 1
            ended = torch.isin(token, self.stop_ids)
            finished[rows[ended]] = True
            live = ~ended & (t + 1 < limit[rows])
            if not live.any():
                break
            if not live.all():
                keep = live.nonzero().squeeze(-1)
                rows, token, position = rows[keep], token[keep], position[keep]
                cache.batch_select_indices(keep)
                if self.shares:
                    shared.assign(rows // n)
                else:
                    mask = mask[keep]
            if self.shares:
                context = dict(shared=shared)
            else:
                context = dict(attention_mask=(mask := torch.cat([mask, mask.new_ones(len(mask), 1)], 1)))
            logits = self.model(input_ids=token[:, None], position_ids=position[:, None], past_key_values=cache, use_cache=True,
                                **context).logits[:, -1]
            position = position + 1
        tokens, logprobs, length, finished = tokens.tolist(), logprobs.cpu(), length.tolist(), finished.tolist()
        flat = [Rollout(requests[i // n].prompt_ids, tokens[i][:length[i]], logprobs[i, :length[i]].clone(), finished[i])
                for i in range(len(tokens))]
        return [flat[i * n:(i + 1) * n] for i in range(len(requests))]


def _truncate(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Logits with all but the top k, or the smallest set of probability top_p, at minus infinity."""
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        cut = probs.cumsum(-1) - probs >= top_p  # keeps the token that crosses top_p
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -math.inf)
    return logits


class VLLMSampler:
    """vLLM in the trainer's process, one engine per rank; the CUDA and CPU builds alike."""

    def __init__(self, args, model: str, tokenizer, stop_ids: list[int], device, dtype):
        from vllm import LLM
        self.cuda = device.type == "cuda"
        options = dict(gpu_memory_utilization=args.gpu_memory, enable_sleep_mode=True) if self.cuda else dict(
            # whole prompts only: the CPU build cannot rewind a request's seed over a partly prefilled one
            # block_size: the smallest it has, so that the prefix cache finds short prefixes (ETTRL), too
            enforce_eager=True, block_size=32, kv_cache_memory_bytes=int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 2)) << 30,
            enable_chunked_prefill=False, max_num_batched_tokens=max(8192, args.max_prompt_tokens + args.max_new_tokens))
        if "RANK" in os.environ:  # under torchrun: one engine per rank
            options["distributed_executor_backend"] = "external_launcher"
        threads, set_threads = torch.get_num_threads(), torch.set_num_threads
        self.llm = LLM(model, tensor_parallel_size=1, dtype=str(dtype).removeprefix("torch."), seed=args.seed,
                       max_model_len=args.max_prompt_tokens + args.max_new_tokens, enable_prefix_caching=True,
                       logprobs_mode="processed_logprobs", trust_remote_code=args.trust_remote_code,
                       disable_log_stats=True, **options)
        torch.set_num_threads = set_threads  # the CPU engine replaces it with a stub and may change the number
        torch.set_num_threads(threads)
        self.stop_ids, self.version, self.asleep = stop_ids, -1, False

    def load(self, named_tensors) -> None:
        """Stream new weights into the engine without touching the disk, then drop what the prefix cache knows.

        Raises RuntimeError where the engine did not take one of its parameters."""
        if self.asleep:  # first the weights alone: weights, old KV cache and trainer may not fit together
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        missing = self.llm.collective_rpc(_load_into_worker, args=(named_tensors,))[0]
        if missing:
            raise RuntimeError(f"vLLM did not take the weights {sorted(missing)[:3]}")
        self.llm.reset_prefix_cache()
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        """Give the GPU memory to the update. The weights are dropped too: the next `load` must send them again."""
        if self.cuda:
            self.llm.sleep(level=2)
            self.asleep, self.version = True, -1

    def generate(self, requests: list[Request], temperature: float, top_p: float = 1.0, top_k: int = 0) -> list[list[Rollout]]:
        """Responses per request, in one engine call. Temperature 0 is greedy."""
        from vllm import SamplingParams
        params = [SamplingParams(n=r.n, temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=r.max_new_tokens,
                                 seed=r.seed, logprobs=0, stop_token_ids=self.stop_ids, detokenize=False)
                  for r in requests]
        outputs = self.llm.generate([{"prompt_token_ids": r.prompt_ids} for r in requests], params, use_tqdm=False)
        return [[Rollout(r.prompt_ids, list(o.token_ids),
                         torch.tensor([step[token].logprob for token, step in zip(o.token_ids, o.logprobs)]),
                         o.finish_reason == "stop") for o in output.outputs] for r, output in zip(requests, outputs)]


def _load_into_worker(worker, named_tensors) -> set[str]:
    """Runs inside vLLM's worker; returns the parameters that were not loaded (vLLM itself only warns of them)."""
    model, taken = worker.get_model(), set()
    original = model.load_weights

    def load_weights(weights):
        taken.update(original(weights))
        return taken

    model.load_weights = load_weights
    try:
        worker.reload_weights(weights_iterator=iter(named_tensors))  # without an iterator it re-reads the checkpoint
    finally:
        del model.load_weights
    if worker.device.type == "cpu" and worker.model_config.hf_text_config.tie_word_embeddings:
        # The CPU build computes a tied head from a packed copy of the embedding that the reload leaves stale.
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    return {name for name, _ in model.named_parameters()} - taken
