"""Sampling without vLLM: a transformers model that reads every prompt once for all its samples.

engine/plain.py draws the same tokens with transformers' own `generate`; nothing here changes a number.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from engine.base import say_once
from engine.policy import Request, Rollout, load_model
from engine.sizes import host_memory, shape_of


# ------------------------------------------------------------------------------------------------------------
# Shared prompts: the keys and values of a prompt are kept and read once, whatever the number of its samples
# ------------------------------------------------------------------------------------------------------------
class SharedPrompts:
    """Keys and values of prompts, and which of the rows that are still sampled continues which prompt."""

    def __init__(self, cache: DynamicCache, mask: torch.Tensor):
        """cache: the model's, of the prompts. mask: [prompts, longest], 0 on the padding at the left."""
        self.cache = cache
        self.prompts = torch.arange(len(mask), device=mask.device)  # [prompts] those that still have rows
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, -math.inf)
        self.bias = bias[:, None, None]  # [prompts, 1, 1, longest], added to the scores

    def assign(self, prompt_of_row: torch.Tensor) -> None:
        """Row i continues prompt prompt_of_row[i] (ascending). Prompts without rows are dropped.

        Attention wants the rows in a table [prompts, most rows of any prompt], one line per prompt. This sets
        `slot` [rows], where a row is in the flat table, and `rows` [table], the row in every slot. Example:

            prompt_of_row   0 0 3 3 3      5 rows; of prompts 0 to 3, keys and values of 1 and 2 are dropped
            line            0 0 1 1 1      of the row's prompt in the table
            counts          2 3            rows per prompt: a line has 3 slots
            nth_of_prompt   0 1 0 1 2
            slot            0 1 3 4 5      line * 3 + nth_of_prompt
            rows            0 1 0 2 3 4    slot 2 is empty: it computes row 0 once more, and nobody reads it
        """
        kept, line, counts = prompt_of_row.unique_consecutive(return_inverse=True, return_counts=True)
        if len(kept) < len(self.prompts):
            keep = torch.isin(self.prompts, kept).nonzero().squeeze(-1)
            self.cache.batch_select_indices(keep)
            self.prompts = kept
            self.bias = self.bias[keep]
        row = torch.arange(len(line), device=line.device)
        first_row = counts.cumsum(0) - counts  # [prompts]
        nth_of_prompt = row - first_row[line]
        slots = int(counts.max())
        self.slot = line * slots + nth_of_prompt
        self.rows = row.new_zeros(len(counts) * slots)
        self.rows[self.slot] = row


def shared_prompt_attention(module, query, key, value, attention_mask, shared=None, scaling=None, **options):
    """Attention of one new token per row to its prompt (SharedPrompts) and to its own tokens (key, value).

    With Z_own and Z_prompt the sums of exp(score) over own and prompt tokens, and with `own` and `prompt` the
    outputs of attention to either of them alone,

        softmax over [prompt, own]  =  own + sigmoid(log Z_prompt - log Z_own) (prompt - own)

    query: [rows, heads, 1, d]. key, value: [rows, KV heads, own tokens, d]. Returns [rows, 1, heads, d] and
    None. Without `shared`, while prompts are read, this is ordinary attention. Raises ValueError if the
    architecture has a mask of its own. Below: p prompts, s slots (SharedPrompts), g query heads per KV head.
    """
    if shared is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if attention_mask is not None:
        raise ValueError("an attention mask of the model's own")
    rows, _, _, d = query.shape
    kv_heads = key.shape[1]
    prompts = len(shared.bias)
    scale = d ** -0.5 if scaling is None else scaling

    query = query.reshape(rows, kv_heads, -1, d).float() * scale    # [rows, KV heads, g, d]
    own, log_z_own = _attend(query, key, value).split([d, 1], -1)   # [rows, KV heads, g, d and 1]

    layer = shared.cache.layers[module.layer_idx]                   # its keys: [p, KV heads, longest, d]
    table = query.index_select(0, shared.rows)                      # [p * s, KV heads, g, d]
    table = table.unflatten(0, (prompts, -1))                       # [p, s, KV heads, g, d]
    slots = table.shape[1]
    lines = table.transpose(1, 2).flatten(2, 3)                     # [p, KV heads, s * g, d]
    out = _attend(lines, layer.keys, layer.values, shared.bias)     # [p, KV heads, s * g, d + 1]
    out = out.unflatten(2, (slots, -1)).transpose(1, 2)             # [p, s, KV heads, g, d + 1]
    out = out.flatten(0, 1).index_select(0, shared.slot)            # [rows, KV heads, g, d + 1]
    prompt, log_z_prompt = out.split([d, 1], -1)

    both = own.lerp(prompt, (log_z_prompt - log_z_own).sigmoid())   # [rows, KV heads, g, d]
    return both.to(value.dtype).view(rows, 1, -1, d), None


def _attend(query, key, value, bias=0.0):
    """[..., queries, d + 1]: attention of all queries of a KV head; log Z in the last column. Float32."""
    scores = query @ key.float().transpose(2, 3) + bias             # [..., queries, tokens]
    out = scores.softmax(-1).to(value.dtype) @ value
    log_z = scores.logsumexp(-1, keepdim=True)
    return torch.cat([out, log_z], -1)


AttentionInterface.register("shared_prompt", shared_prompt_attention)
AttentionMaskInterface.register("shared_prompt", sdpa_mask)


# ------------------------------------------------------------------------------------------------------------
# The sampler
# ------------------------------------------------------------------------------------------------------------
class HFSampler:
    """Sampling through a transformers model: prompts read once for all their samples, finished rows dropped.

    Prompts are kept once, too (SharedPrompts), if the architecture allows it; else every row has a copy.

    For machines without vLLM, and faster than it for tiny models. The uniform numbers of a sample come from
    its own seed and are turned into tokens by the inverse of the cumulative distribution, so a response does
    not depend on what else is in the batch or on which rank samples it (beyond float rounding).
    """

    def __init__(self, model: str, stop_ids: list[int], device, dtype, trust_remote_code: bool = False):
        """model: folder or Hub id. stop_ids: tokens that finish a response. device, dtype: of the weights."""
        # sharing prompts is tried in float32, on the CPU: half precision would hide a difference
        self.model = load_model(model, trust_remote_code, torch.float32).eval()
        self.device = torch.device("cpu")
        self.stop_ids = torch.tensor([], dtype=torch.long)
        self.max_rows = min(1024, max(16, 2 ** 26 // self.model.config.get_text_config().vocab_size))
        reason = self._share_prompts()
        self.shares = not reason
        if reason:
            kind = self.model.config.model_type
            say_once(f"The sampler copies a prompt for each of its samples: architecture {kind} {reason}.")
        if dtype != torch.float32:
            self.model = load_model(model, trust_remote_code, dtype).eval()
            if self.shares:
                self.model.set_attn_implementation("shared_prompt")
        s = shape_of(self.model.config)
        self.token_bytes = 2 * s.layers * s.kv_heads * s.head_size * dtype.itemsize  # of keys and values
        self.model.to(device)
        self.device = device
        self.stop_ids = torch.tensor(stop_ids, device=device)

    def _cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def _share_prompts(self) -> str:
        """Set the model to share prompts if it samples the same then. Returns "", or why it cannot."""
        self.shares = False
        if not all(type(layer) is DynamicLayer for layer in self._cache().layers):
            return "has layers with a cache of another kind (a sliding window, a recurrence)"
        # any tokens of any vocabulary do: two prompts of uneven length
        requests = [Request([5, 6, 7], 2, 1, 3), Request([8, 9], 2, 3, 3)]
        alone = self._generate(requests, 1.0, 1.0, 0)
        attention = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation("shared_prompt")
            self.shares = self.model.config.get_text_config()._attn_implementation == "shared_prompt"
            if not self.shares:
                reason = "has attention code of its own"
            elif _same(alone, self._generate(requests, 1.0, 1.0, 0)):
                return ""
            else:
                reason = "samples something else with shared prompts"
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
            reason = f"does not run with shared prompts ({error!r:.200})"
        self.shares = False
        self.model.set_attn_implementation(attention)
        return reason

    @torch.no_grad()
    def load(self, named_tensors) -> None:
        """Take new weights. Raises RuntimeError if a parameter was not sent or is not known."""
        waiting = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            if name not in waiting:
                raise RuntimeError(f"the sampler has no weights {name}, or got them twice")
            waiting.pop(name).copy_(tensor)
        if waiting:
            raise RuntimeError(f"the sampler did not receive the weights {sorted(waiting)[:3]}")

    def sleep(self) -> None:
        """vLLM gives its memory to the update here; this sampler has none to give."""

    @torch.inference_mode()
    def generate(self, requests: list[Request], temperature: float, top_p: float = 1.0,
                 top_k: int = 0) -> list[list[Rollout]]:
        """Responses per request. Temperature 0: greedy. Log-probs are of the distribution sampled from."""
        results, chunk, rows = [], [], self._rows(requests)
        for request in requests:  # chunks of one n, at most so many sequences each
            for first in range(0, request.n, rows):
                part = replace(request, n=min(rows, request.n - first), seed=request.seed + first)
                if chunk and (part.n != chunk[0].n or (len(chunk) + 1) * part.n > rows):
                    results += self._generate(chunk, temperature, top_p, top_k)
                    chunk = []
                chunk.append(part)
        if chunk:
            results += self._generate(chunk, temperature, top_p, top_k)
        responses = itertools.chain.from_iterable(results)
        return [list(itertools.islice(responses, request.n)) for request in requests]

    def _rows(self, requests: list[Request]) -> int:
        """Sequences at a time: max_rows; fewer if keys and values would take half of the host's memory."""
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        fit = host_memory() // 2 // (self.token_bytes * longest)
        return max(1, min(self.max_rows, fit)) if self.device.type == "cpu" else self.max_rows

    def _generate(self, requests, temperature, top_p, top_k) -> list[list[Rollout]]:
        """Requests of one n. [all] is all their responses, [rows] those that are still being sampled."""
        n = requests[0].n
        steps = max(request.max_new_tokens for request in requests)
        ids, mask = pad_left([request.prompt_ids for request in requests], self.device)  # [prompts, longest]
        samples = samples_of(requests)
        uniform = uniform_numbers(samples, steps, self.device)                  # [all, steps]
        limit = [request.max_new_tokens for request, _ in samples]
        limit = torch.tensor(limit, device=self.device)                         # [all]

        cache = self._cache()
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache,
                         use_cache=True, logits_to_keep=1)
        logits = out.logits[:, -1].repeat_interleave(n, 0)                      # [rows, vocabulary]
        position = mask.sum(1).repeat_interleave(n, 0)                          # [rows], of the next token
        rows = torch.arange(len(samples), device=self.device)                   # [rows], of [all]
        if self.shares:
            shared = SharedPrompts(cache, mask)
            shared.assign(rows // n)
            cache = self._cache()  # of the rows' own tokens
        else:
            cache.batch_repeat_interleave(n)
            mask = mask.repeat_interleave(n, 0)                                 # [rows, longest]

        tokens = torch.zeros(len(rows), steps, dtype=torch.long, device=self.device)  # [all, steps]
        logprobs = torch.zeros(len(rows), steps, device=self.device)            # [all, steps]
        length = torch.zeros(len(rows), dtype=torch.long, device=self.device)   # [all]
        finished = torch.zeros(len(rows), dtype=torch.bool, device=self.device)  # [all]
        for t in range(steps):
            u = uniform[rows.to(uniform.device), t]                             # [rows]
            token, logprob = draw(logits, u, temperature, top_p, top_k)         # [rows], [rows]
            tokens[rows, t] = token
            logprobs[rows, t] = logprob
            length[rows] = t + 1
            ended = torch.isin(token, self.stop_ids)
            finished[rows[ended]] = True
            live = ~ended & (t + 1 < limit[rows])
            if not live.any():
                break
            if not live.all():
                keep = live.nonzero().squeeze(-1)
                rows = rows[keep]
                token = token[keep]
                position = position[keep]
                cache.batch_select_indices(keep)
                if self.shares:
                    shared.assign(rows // n)
                else:
                    mask = mask[keep]
            if self.shares:
                context = dict(shared=shared)
            else:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)        # [rows, one longer]
                context = dict(attention_mask=mask)
            out = self.model(input_ids=token[:, None], position_ids=position[:, None], past_key_values=cache,
                             use_cache=True, **context)
            logits = out.logits[:, -1]
            position = position + 1

        tokens = tokens.tolist()
        logprobs = logprobs.cpu()
        length = length.tolist()
        finished = finished.tolist()
        groups = []
        for i, (request, _) in enumerate(samples):
            if i % n == 0:
                groups.append([])
            end = length[i]
            rollout = Rollout(request.prompt_ids, tokens[i][:end], logprobs[i, :end].clone(), finished[i])
            groups[-1].append(rollout)
        return groups


# ------------------------------------------------------------------------------------------------------------
# What HFSampler and PlainSampler (engine/plain.py) have in common
# ------------------------------------------------------------------------------------------------------------
def samples_of(requests: list[Request]) -> list[tuple[Request, int]]:
    """(request, seed) of every single response: sample i of a request draws from seed + i."""
    return [(request, request.seed + i) for request in requests for i in range(request.n)]


def pad_left(prompts: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, both [prompts, longest]; the padding, at the left, has mask 0."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def exact_device(device: torch.device) -> torch.device:
    """Where float64 numbers of this device are: Apple's Metal has none. Not tried there by us."""
    return torch.device("cpu") if device.type == "mps" else device


def uniform_numbers(samples: list[tuple[Request, int]], steps: int, device: torch.device) -> torch.Tensor:
    """[samples, steps] float64 in [0, 1), a stream of its own for every sample.

    Philox takes the whole seed as its key; torch's CPU generator takes only the lowest 32 bits."""
    streams = [np.random.Generator(np.random.Philox(key=seed)).random(steps) for _, seed in samples]
    return torch.from_numpy(np.stack(streams)).to(exact_device(device))


def draw(logits, uniform, temperature: float, top_p: float, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, vocabulary] logits and [rows] uniform numbers -> [rows] tokens and [rows] their log-probs.

    Inverse transform sampling: the first token at which the cumulative distribution exceeds the uniform
    number. Temperature 0: the likeliest token.
    """
    probs = torch.softmax(_truncate(logits.float() / (temperature or 1.0), top_p, top_k), -1)
    if temperature == 0:
        token = probs.argmax(-1)
    else:
        # float64: a float32 sum over 150k entries loses the tail
        cumulative = probs.to(uniform.device).cumsum(-1, dtype=torch.float64)
        u = uniform[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, u, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)
        token = token.to(probs.device)
    return token, probs.gather(-1, token[:, None]).squeeze(-1).log()


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


def _same(one: list[list[Rollout]], other: list[list[Rollout]]) -> bool:
    flatten = itertools.chain.from_iterable
    for a, b in zip(flatten(one), flatten(other)):
        if a.response_ids != b.response_ids or not torch.allclose(a.logprobs, b.logprobs, atol=1e-3):
            return False
    return True
