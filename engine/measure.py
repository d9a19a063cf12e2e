"""Before a run: is what the trainer and the sampler compute what the model itself computes?

A few tokens are computed by a small random copy of the model, one sequence at a time, with transformers'
plain ("eager") attention and no cache, and then each faster way, until one agrees. So no list of
architectures is needed, and a large model is asked in seconds."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface

from engine.base import Request, UserError, first_line, on_all_ranks, on_rank_0, print0
from engine.logprobs import ChunkedHead, PackedHead, PlainHead, packed_attention

AGREES = 1e-4  # largest mean difference, in nats, of two float32 computations of the same
NAMES = {PackedHead: "packed rows", ChunkedHead: "chunks of logits", PlainHead: "--plain",
         "packed": "packed attention", "sdpa": "fused attention", "eager": "eager attention",
         True: "padded prompts", False: "one prompt at a time"}
# At most so large are these in a copy: none of them decides how attention, cache and logits work.
SMALL = dict(vocab_size=512, vocab_size_per_layer_input=512, intermediate_size=256, moe_intermediate_size=64,
             num_experts=8, num_local_experts=8, n_routed_experts=8, n_group=1, topk_group=1, pad_token_id=0,
             bos_token_id=1, eos_token_id=2)


def small_copy(model, max_length: int = 0, all_layers: bool = False):
    """A random float32 model of the same class and config, but SMALL, with few layers, one of every kind.

    Attention is sharp, so that a soft cap shows. A window shorter than max_length is 4, and shows, too."""
    config = model.config.to_dict()
    text, values = model.config.get_text_config(), config.get("text_config", config)
    total, names = text.num_hidden_layers, text.attribute_map
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    layers = max([2, *[kinds.index(kind) + 1 for kind in kinds]])
    layers = total if all_layers else min(total, layers)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == total:
            values[name] = value[:layers]
    for name, value in (SMALL | {"num_hidden_layers": layers}).items():
        name = names.get(name, name)
        if isinstance(values.get(name), int):
            values[name] = min(value, values[name])
    if (values.get("sliding_window") or max_length) < max_length:
        values["sliding_window"] = 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        copy = type(model)(type(model.config).from_dict(config)).float().eval()
        for parameter in copy.parameters():
            if parameter.ndim == 2:
                parameter.data.normal_(std=2 / parameter.shape[1] ** 0.5)
            elif parameter.ndim == 1:  # else norms are ones, biases zeros, which hides what forgets them
                parameter.data += torch.randn_like(parameter) / 10
    return copy


def smallest_copy(model, max_length: int = 0):
    """A small copy that computes log-probs; some types need all layers. Raises UserError if none does."""
    for all_layers in (False, True):
        try:
            copy = small_copy(model, max_length, all_layers)
            eager_logprobs(copy, probe_responses(copy))
            return copy
        except Exception as error:
            reason = error
    raise UserError(f"--model: {model.config.model_type} computes no log-probs of a text: "
                    f"{type(reason).__name__} {first_line(reason)}")


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


def head_logprobs(head, responses: list, device="cpu") -> torch.Tensor:
    """[2, T] log-probs and entropies of the responses' tokens, as this head computes them together."""
    inputs, predict_from = head.rows(responses)
    inputs = tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
    targets = torch.tensor([token for r in responses for token in r.response_ids], device=device)
    return torch.stack(head(inputs, predict_from.to(device), targets, 1.0))


@torch.no_grad()
def eager_logprobs(model, responses: list) -> torch.Tensor:
    """[2, T] the model's own log-probs and entropies of the responses' tokens. Raises UserError for NaN."""
    model.set_attn_implementation("eager")
    head = PlainHead(model)
    own = torch.cat([head_logprobs(head, [r]) for r in responses], 1)
    if not own.isfinite().all():
        raise UserError("--model gives tokens the probability NaN: it holds NaN or infinite weights.")
    return own


def fastest_exact_implementation(model, plain: bool, packed: bool, max_length: int = 0) -> tuple[type, str]:
    """(head, attention) with which to train. plain: without chunks of logits. packed: packed rows may be
    tried."""
    heads = [PlainHead] if plain else [ChunkedHead, PlainHead]
    ways = [(PackedHead, "packed")] if packed and not plain else []
    ways += [(head, attention) for head in heads for attention in ("sdpa", "eager")]

    @torch.no_grad()
    def probe(copy, head: type) -> tuple[list, torch.Tensor]:
        responses = probe_responses(copy)
        return responses, head_logprobs(head(copy), responses)

    return fastest_that_agrees(model, "the trainer", ways, probe, max_length=max_length)


def decoder_layers(model) -> list:
    """The modules that transformers keeps whole on a device."""
    return [module for module in model.modules() if type(module).__name__ in model._no_split_modules]


def compile_layers(model) -> None:
    """Fuse norms, rotary embedding, SwiGLU and residuals. Attention, packed differently in each micro-batch,
    stays as it is; recomputation and FSDP stay outside."""
    AttentionInterface.register("packed", torch.compiler.disable(packed_attention))
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def compiled_layers_agree(model, head: type, attention: str, device, max_length: int = 0) -> bool:
    """Whether a small copy has, on every rank's device, its own log-probs and gradients with compiled layers,
    too. If not, a line says so."""
    def compare() -> None:
        found = []
        for compiled in (False, True):
            copy = smallest_copy(model, max_length).to(device)
            copy.set_attn_implementation(attention)
            if compiled:
                compile_layers(copy)
            values = head_logprobs(head(copy), probe_responses(copy), device)
            values.sum().backward()
            found.append([values.detach(), *(p.grad for p in copy.parameters() if p.grad is not None)])
        for own, other in zip(*found, strict=True):
            torch.testing.assert_close(other, own, rtol=0, atol=AGREES * max(1, float(own.abs().max())))

    try:
        on_all_ranks(compare)
    except UserError as error:  # no C compiler, for one
        print0(f"Warning: --compile is left out, since compiled layers fail a test: {error}")
        return False
    return True


def fastest_that_agrees(model, who: str, ways: list[tuple], probe, advice: str = "", max_length: int = 0):
    """The first of these ways, (what to try, attention), in which a small copy computes its own log-probs.

    probe: (copy, what to try) -> (responses, values of their tokens [1 or 2, T]). If it is not the fastest
    way, a line says so. Raises UserError, which ends with the advice, if none agrees."""
    def choose() -> tuple:
        copy, failed = smallest_copy(model, max_length), []
        kind = model.config.model_type
        for way, attention in ways:
            names = f"{NAMES[way]} and {NAMES[attention]}"
            try:
                copy.set_attn_implementation(attention)
                responses, found = probe(copy, way)
                off = float((found - eager_logprobs(copy, responses)[:len(found)]).abs().mean())
            except Exception as error:  # what a type cannot do shows in many kinds of error
                failed.append(f"with {names}: {type(error).__name__} {first_line(error)[:100]}")
                continue
            if off < AGREES:
                if failed:
                    print0(f"{kind}: {who} uses {names}, but would not compute the model's own log-probs "
                           f"{failed[0]}")
                return way, attention
            failed.append(f"with {names}: {off:.2g} off")
        raise UserError(f"--model is of the type {kind}, whose own log-probs {who} does not compute{advice} "
                        f"({failed[-1]}).")

    return on_rank_0(choose)


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
