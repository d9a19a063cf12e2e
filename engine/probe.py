"""Is a fast way of computing a model the model's own? The types for which the tests show it stand in
models.py. Any other type is computed in the way that is its own by definition: full logits, transformers'
plain ("eager") attention, prompts of one length. That is slow, so a line says it, and no type trains wrongly
in silence.

Left out: asking every type at every start, with a small copy of it. That was three times the code, for types
that few people train. Who trains one adds it to a list and runs tests/test_architectures.py."""

from __future__ import annotations

import re
from types import SimpleNamespace

import torch

from engine.base import Request, UserError
from engine.ranks import print0
from engine.logprobs import ChunkedHead, PackedHead, PlainHead, head_logprobs
from engine.models import CHUNKED, PACKED

# Entries of a config that change logits or attention scores in ways which only the model's own code knows
SCALES = re.compile("softcap|logit_scale|logits_scal")


def is_fast(config) -> bool:
    """Whether the tests show that fused attention, chunks of logits and padded prompts compute it rightly."""
    text = config.get_text_config()
    scales = [value for name, value in text.to_dict().items() if SCALES.search(name)]
    return text.model_type in PACKED + CHUNKED and set(scales) <= {None, 1}


def trainers_way(model, plain: bool, max_length: int) -> tuple[type, str]:
    """(head, attention) with which to train. plain: full logits. max_length: of prompt and response, in
    tokens; rows are not packed where a window is shorter."""
    text = model.config.get_text_config()
    if not is_fast(model.config):
        print0(f"{text.model_type}: no test shows a faster way, so the trainer uses full logits and eager "
               "attention")
        return PlainHead, "eager"
    if plain:
        return PlainHead, "sdpa"
    if text.model_type in PACKED and max_length <= (getattr(text, "sliding_window", None) or max_length):
        return PackedHead, "packed"
    return ChunkedHead, "sdpa"


def probe_response(prompt_ids: list[int], response_ids: list[int]) -> SimpleNamespace:
    """What the heads and a policy need to know of a response."""
    return SimpleNamespace(prompt_ids=prompt_ids, response_ids=response_ids, length=len(response_ids),
                           mask=None, advantage=0.0, old_logp=None, ref_logp=None)


def probe_requests(model) -> list[Request]:
    """A few tokens behind two short prompts that begin alike. Rows of the longer one end at other times,
    which a cache must survive. Tokens are from the middle of the vocabulary: its ends are special ones."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [(vocabulary // 2 + 5 * i) % vocabulary for i in range(7)]
    return [Request(ids[:3], 2, 0, 2), Request(ids, 2, 1, 6), Request(ids, 2, 1, 3)]


def sample_probe(sampler, requests: list[Request]) -> tuple[list, torch.Tensor]:
    """(responses that the sampler makes, its log-probs of their tokens [T])."""
    groups = sampler.generate(requests, 1.0)
    pairs = [(request.prompt_ids, sample) for request, group in zip(requests, groups) for sample in group]
    return ([probe_response(prompt_ids, sample.response_ids) for prompt_ids, sample in pairs],
            torch.cat([sample.logprobs for _, sample in pairs]))


@torch.no_grad()
def eager_logprobs(model, responses: list) -> torch.Tensor:
    """[2, T] the model's own log-probs and entropies of the responses' tokens. Raises UserError for NaN."""
    model.set_attn_implementation("eager")
    head = PlainHead(model)
    own = torch.cat([torch.stack(head_logprobs(head, [r], model.device)).cpu() for r in responses], 1)
    if not own.isfinite().all():
        raise UserError("--model gives tokens the probability NaN: it holds NaN or infinite weights.")
    return own
