"""The sampler of --plain: slow and obvious, with the same tokens. Its log-probs: PlainHead in policy.py."""

from __future__ import annotations

import math
from itertools import islice

import torch
from transformers import GenerationConfig, LogitsProcessor

from engine.hf_sampler import HFSampler, draw, pad_left, samples_of, uniform_numbers
from engine.policy import Request, Rollout, load_model


# ------------------------------------------------------------------------------------------------------------
# Sampling: transformers' own generate, every sample a row, prompts padded on the left
# ------------------------------------------------------------------------------------------------------------
class PlainSampler:
    """HFSampler's interface and, given the same seeds, its tokens."""

    def __init__(self, model: str, stop_ids: list[int], device, dtype, trust_remote_code: bool = False):
        self.model = load_model(model, trust_remote_code, dtype).eval().to(device)
        self.model.generation_config = GenerationConfig()  # the model's own may penalize or force tokens
        self.stop_ids = stop_ids

    load = HFSampler.load
    sleep = HFSampler.sleep

    @torch.inference_mode()
    def generate(self, requests: list[Request], temperature: float, top_p: float = 1.0,
                 top_k: int = 0) -> list[list[Rollout]]:
        """Responses per request. Temperature 0: greedy. Log-probs are of the distribution sampled from."""
        samples = samples_of(requests)
        rollouts = []
        for i in range(0, len(samples), 512):
            rollouts += self._rollouts(samples[i:i + 512], temperature, top_p, top_k)
        rest = iter(rollouts)
        return [list(islice(rest, request.n)) for request in requests]

    def _rollouts(self, samples, temperature, top_p, top_k) -> list[Rollout]:
        steps = max(request.max_new_tokens for request, _ in samples)
        ids, mask = pad_left([request.prompt_ids for request, _ in samples], self.model.device)
        uniform = uniform_numbers(samples, steps, self.model.device)            # [samples, steps]
        drawing = Drawing(uniform, temperature, top_p, top_k)
        config = GenerationConfig(max_new_tokens=steps, eos_token_id=self.stop_ids or None, pad_token_id=0)
        out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config,
                                  logits_processor=[drawing])
        tokens = out[:, ids.shape[1]:].tolist()                                 # [samples, steps]
        logprobs = torch.stack(drawing.logprobs, 1).cpu()                       # [samples, steps]
        rollouts = []
        for i, (request, _) in enumerate(samples):
            response = tokens[i][:request.max_new_tokens]
            stops = [t for t, token in enumerate(response) if token in self.stop_ids]
            if stops:
                response = response[:stops[0] + 1]
            logprob = logprobs[i, :len(response)].clone()
            rollouts.append(Rollout(request.prompt_ids, response, logprob, finished=bool(stops)))
        return rollouts


class Drawing(LogitsProcessor):
    """Draws a token for every sample and leaves only that one finite, so that greedy search takes it."""

    def __init__(self, uniform: torch.Tensor, *options):
        self.uniform = uniform  # [samples, steps]
        self.options = options  # temperature, top_p, top_k
        self.logprobs = []      # [samples] of every step

    def __call__(self, input_ids, logits):
        token, logprob = draw(logits, self.uniform[:, len(self.logprobs)], *self.options)
        self.logprobs.append(logprob)
        return torch.full_like(logits, -math.inf).scatter(-1, token[:, None], 0.0)
