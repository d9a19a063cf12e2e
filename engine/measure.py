"""Before a run: is what the trainer and the sampler compute what the model itself computes?

A few tokens are computed the model's own way, one sequence at a time, with transformers' plain ("eager")
attention and no cache, and then each faster way, until one agrees. So no list of architectures is needed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from engine.base import Request, UserError, first_line
from engine.logprobs import ChunkedHead, PackedHead, PlainHead
from engine.ranks import on_all_ranks, print0, rank_and_ranks

AGREES = 1e-4  # largest mean difference, in nats, of two float32 computations of the same
NAMES = {PackedHead: "packed rows", ChunkedHead: "chunks of logits", PlainHead: "--plain",
         "packed": "packed attention", "one_token": "one-token attention", "sdpa": "fused attention",
         "eager": "eager attention", True: "padded prompts", False: "one prompt at a time"}
HALF = (torch.bfloat16, torch.float16)


class InFloat32(TorchFunctionMode):
    """Every operation reads 16-bit numbers as float32. So a model is measured exactly as it lies
    memory-mapped in its checkpoint, and only one weight at a time takes memory."""

    def __torch_function__(self, operation, types, args=(), kwargs=None):
        if operation.__name__ != "__get__":  # a property reads no numbers
            args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return operation(*args, **kwargs or {})


def _widened(x):
    if isinstance(x, torch.Tensor):
        return x.float() if x.dtype in HALF else x
    return torch.float32 if isinstance(x, torch.dtype) and x in HALF else x


def in_float32(model):
    """The context in which to measure the model."""
    return InFloat32() if model.dtype in HALF else nullcontext()


def probe_response(prompt_ids: list[int], response_ids: list[int]) -> SimpleNamespace:
    """What the heads and a policy need to know of a response."""
    return SimpleNamespace(prompt_ids=prompt_ids, response_ids=response_ids, length=len(response_ids),
                           mask=None, advantage=0.0, old_logp=None, ref_logp=None)


def probe_responses(model) -> list:
    """Three responses to two prompts that begin alike, of uneven length. Their tokens are from the middle of
    the vocabulary, as special ones are at its ends."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [(vocabulary // 2 + 5 * i) % vocabulary for i in range(24)]
    return [probe_response(ids[:5], ids[5:12]), probe_response(ids[:5], ids[12:15]),
            probe_response(ids[:3] + ids[15:17], ids[17:])]


def sample_probe(sampler, requests: list[Request]) -> tuple[list, torch.Tensor]:
    """(responses that the sampler makes, its log-probs of their tokens [T])."""
    groups = sampler.generate(requests, 1.0)
    pairs = [(request.prompt_ids, sample) for request, group in zip(requests, groups) for sample in group]
    return ([probe_response(prompt_ids, sample.response_ids) for prompt_ids, sample in pairs],
            torch.cat([sample.logprobs for _, sample in pairs]))


@torch.no_grad()
def head_logprobs(head, responses: list) -> torch.Tensor:
    """[2, T] log-probs and entropies of the responses' tokens, as this head computes them together."""
    inputs, predict_from = head.rows(responses)
    targets = torch.tensor([token for r in responses for token in r.response_ids])
    with in_float32(head.model):
        return torch.stack(head(inputs, predict_from, targets, 1.0))


def eager_logprobs(model, responses: list) -> torch.Tensor:
    """[2, T] the model's own log-probs and entropies of the responses' tokens.

    Raises UserError if it computes none."""
    model.set_attn_implementation("eager")
    head = PlainHead(model)
    try:
        own = torch.cat([head_logprobs(head, [r]) for r in responses], 1)
    except Exception as error:
        raise UserError(f"--model: {model.config.model_type} computes no log-probs of a text: "
                        f"{type(error).__name__} {first_line(error)}") from None
    if not own.isfinite().all():
        raise UserError("--model gives tokens the probability NaN: it holds NaN or infinite weights.")
    return own


def fastest_exact_implementation(model, plain: bool, packed: bool) -> tuple[type, str]:
    """(head, attention) with which to train: the fastest that computes the model's own values.

    plain: without chunks of logits. packed: packed rows may be tried. Raises UserError if none does."""
    heads = [PlainHead] if plain else [ChunkedHead, PlainHead]
    ways = [(PackedHead, "packed")] if packed and not plain else []
    ways += [(head, attention) for head in heads for attention in ("sdpa", "eager")]
    responses = probe_responses(model)

    def choose() -> tuple[type, str]:
        expected = eager_logprobs(model, responses)

        def difference(way: tuple[type, str]) -> float:
            model.set_attn_implementation(way[1])
            return float((head_logprobs(way[0](model), responses) - expected).abs().mean())

        return first_that_agrees(model, "the trainer", ways, difference)

    return on_all_ranks(lambda: choose() if rank_and_ranks()[0] == 0 else None)[0]


def first_that_agrees(model, who: str, ways: list[tuple], difference, advice: str = ""):
    """The first of these ways whose mean difference to the model's own log-probs is small.

    If it is not the fastest one, a line says so. Raises UserError, which ends with the advice, if none is."""
    kind, failed = model.config.model_type, []
    for way in ways:
        names = " and ".join([NAMES[part] for part in way])
        try:
            found = difference(way)
        except Exception as error:  # what a type cannot do shows in many kinds of error
            failed.append(f"with {names}: {type(error).__name__} {first_line(error)[:100]}")
            continue
        if found < AGREES and failed:
            print0(f"{kind}: {who} uses {names}, but would not compute the model's own log-probs {failed[0]}")
        if found < AGREES:
            return way
        failed.append(f"with {names}: {found:.2g} off")
    raise UserError(f"--model is of the type {kind}, whose own log-probs {who} does not compute{advice} "
                    f"({failed[-1]}).")


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
        own = on_all_ranks(lambda: eager_logprobs(model, responses) if rank_and_ranks()[0] == 0 else None)
        expected = own[0][0]
    difference = (logprobs - expected).abs()
    largest = float(difference.max())
    if not largest <= (allowed if exact else torch.inf) or difference.mean() > 0.5:  # NaN, too
        raise UserError(f"vLLM computes log-probs up to {largest:.2g} off those of transformers for {end}.")
