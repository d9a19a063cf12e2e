"""Sampling without vLLM: a transformers model that reads a prompt once for all its samples.

For machines without vLLM, and faster than it for tiny models. tests/test_samplers.py and
tests/test_architectures.py compare its log-probs with the trainer's and with the model's own."""

from __future__ import annotations

import copy
import re
from itertools import groupby, islice

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import TopKLogitsWarper, TopPLogitsWarper

from engine.base import Request, Sample, stop_texts, timed
from engine.logprobs import fastest_that_agrees, probe_responses, sample_probe
from engine.models import load_model

CACHE = 2 ** 30  # bytes of keys and values that are kept at a time


class HFSampler:
    """Prompts are read once for all their samples, and finished rows are dropped an eighth at a time.

    The uniform numbers of a sample come from its own seed and are turned into tokens by the inverse of the
    cumulative distribution, so a response does not depend on what else is in the batch or on which rank
    samples it (beyond float rounding)."""

    def __init__(self, model: str, stop_ids: list[int], device, dtype, trust_remote_code: bool = False):
        """model: folder or Hub id. stop_ids: tokens that finish a response. device, dtype: of the weights."""
        self.model = load_model(model, trust_remote_code, dtype).eval()
        self.device, self.stop_ids = torch.device("cpu"), torch.zeros(0)
        ways = [(padded, attention) for padded in (True, False) for attention in ("sdpa", "eager")]
        self.pad_prompts, attention = fastest_that_agrees(self.model, "--sampler hf", ways, self._probe,
                                                          "; give --sampler vllm")
        self.model.set_attn_implementation(attention)
        self.model.to(device)
        self.device = device
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=device)

    def _probe(self, model, pad_prompts: bool) -> tuple[list, torch.Tensor]:
        """What this sampler would sample from a small copy. Padding may reach a recurrent state."""
        sampler = copy.copy(self)
        sampler.model, sampler.pad_prompts = model, pad_prompts
        short, long = probe_responses(model)[1:]
        requests = [Request(short.prompt_ids[:3], 2, 0, 2), Request(long.prompt_ids, 2, 1, 6),
                    Request(long.prompt_ids, 2, 1, 3)]
        responses, logprobs = sample_probe(sampler, requests)
        return responses, logprobs[None]

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
        heads, queries = getattr(text, "num_key_value_heads", None), text.num_attention_heads
        numbers = 2 * text.num_hidden_layers * text.hidden_size * (heads or queries) // queries
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
                rows, token, position, mask, live = (x[keep] for x in (rows, token, position, mask, live))
                cache.reorder_cache(keep)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)            # [rows, one longer]
            out = self.model(input_ids=token[:, None], attention_mask=mask, position_ids=position[:, None],
                             past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]
            position = position + 1

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
