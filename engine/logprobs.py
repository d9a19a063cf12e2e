"""Log-probs and entropies of responses: the plain way, and without padding and full logits, equal by test.

Packed: a micro-batch is one row of tokens: the prompts' common beginning, then each one's rest and responses;
only attention sees rows of responses. By chunks: logits exist for a few tokens at a time."""

from __future__ import annotations

from functools import partial
from itertools import groupby, takewhile
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.base import Request, UserError, first_line
from engine.ranks import on_rank_0, print0


# --------------------------------------------- float32 logits ----------------------------------------------
def product(a: torch.Tensor, b: torch.Tensor, dtype) -> torch.Tensor:
    """a b as this type, summed in float32."""
    if a.device.type == "cpu":
        return (a.float() @ b.float()).to(dtype)
    return torch.mm(a.to(b.dtype), b, out_dtype=dtype)  # it has no gradient of its own


class Float32Logits(torch.autograd.Function):
    """Hidden states [T, d] times weights [V, d], in float32 [T, V]: in bfloat16 a logit of 12 would be
    rounded to a sixteenth, and ratios and KL would be mostly rounding."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return product(hidden, weight.t(), torch.float32)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return product(grad, weight, hidden.dtype), product(grad.t(), hidden, weight.dtype)


def head_forward(last, hidden: torch.Tensor) -> torch.Tensor:
    """What the linear layer `last` makes of hidden [..., d], in float32."""
    logits = Float32Logits.apply(hidden.flatten(0, -2), last.weight).unflatten(0, hidden.shape[:-1])
    return logits if last.bias is None else logits + last.bias


# ------------------------------------------------------ plain ----------------------------------------------
class PlainHead(torch.nn.Module):
    """The model with its logits made into log-probs, the obvious way. FSDP shards it as the root."""

    def __init__(self, model):
        super().__init__()
        self.model, last = model, model.get_output_embeddings()
        if type(last) is torch.nn.Linear:
            last.forward = partial(head_forward, last)

    def forward(self, inputs: dict, predict_from: torch.Tensor, targets: torch.Tensor, temperature: float,
                statistics=()):
        """inputs, predict_from: see `rows`. targets: [T] response tokens. Returns `values`."""
        logits = self.model(**inputs, use_cache=False).logits  # [rows, longest, V]
        return self.values(logits.flatten(0, 1)[predict_from], targets, temperature, statistics)

    @staticmethod
    def rows(rollouts: list) -> tuple[dict, torch.Tensor]:
        """(model inputs [rows, longest], predict_from [T]): one row of prompt + response per response.

        predict_from: for each response token, the position in the flattened rows that predicts it."""
        rows = [torch.tensor(r.prompt_ids + r.response_ids[:-1]) for r in rollouts]
        # a response's last token predicts nothing; padding is on the right, unseen by causal attention
        input_ids, predict_from = pad_sequence(rows, batch_first=True), []
        for i, rollout in enumerate(rollouts):
            first = i * input_ids.shape[1] + len(rollout.prompt_ids) - 1  # position t predicts token t + 1
            predict_from += range(first, first + len(rollout.response_ids))
        return dict(input_ids=input_ids), torch.tensor(predict_from)

    @staticmethod
    def values(logits: torch.Tensor, targets: torch.Tensor, temperature: float, statistics) -> tuple:
        """(log-prob of the target, entropy in nats), both [T], of logits [T, V] / temperature; then each
        statistic of the log-probs of the whole vocabulary, [T, V] -> [T]."""
        logp = (logits.float() / temperature).log_softmax(-1)
        entropy_T = -torch.linalg.vecdot(logp.exp(), logp)
        others = [function(logp.detach()) for function in statistics]
        return logp.gather(-1, targets[:, None]).sum(-1), entropy_T, *others


# ----------------------------------------------------- by chunks --------------------------------------------
# elements of a chunk of logits; the backward pass holds about five such tensors at a time
CHUNK = {"cpu": 2 ** 24, "cuda": 2 ** 26}


class ChunkedHead(PlainHead):
    """Logits exist at response positions only, a chunk at a time; the backward pass makes several again.

    (torch's own F.linear_cross_entropy gives no entropy, and of bfloat16 weights bfloat16 log-probs. The
    gradient of bfloat16 weights is summed over the chunks in bfloat16.)"""

    def forward(self, inputs: dict, predict_from: torch.Tensor, targets: torch.Tensor, temperature: float,
                statistics=()):
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1)[predict_from]  # [T, d]
        last = self.model.get_output_embeddings()

        def of_chunk(hidden, targets):
            # one tensor: a chunk made again for a loss of one of the values alone would not be freed
            return torch.stack(self.values(last(hidden), targets, temperature, statistics))

        size = max(1, CHUNK.get(hidden.device.type, 2 ** 26) // len(last.weight))
        if len(targets) <= size:  # a single chunk is kept
            return [values_T.clone() for values_T in of_chunk(hidden, targets)]  # FSDP warns of views
        chunks = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
                  for chunk in zip(hidden.split(size), targets.split(size))]
        return [values_T.clone() for values_T in torch.cat(chunks, 1)]


# ------------------------------------------------------ packed ---------------------------------------------
class PackedHead(ChunkedHead):
    """For models whose attention is `packed_attention`."""

    def forward(self, inputs: dict, *others):
        packing = inputs.get("packing")
        # a function, as compiled layers look into a list, and are compiled again for one of another length
        return super().forward(inputs | dict(packing=packing and (lambda: packing)), *others)

    @staticmethod
    def rows(rollouts: list) -> tuple[dict, torch.Tensor]:
        """(model inputs, predict_from [T]): one row of what all prompts begin with and, prompt by prompt, its
        rest and its responses.

        A response's last token predicts nothing: it is left out. `shared`: the length of what all begin with.
        `groups`: of each prompt the length of its rest; `unpack` [responses, longest], which token behind the
        prompt stands where in (right-padded) rows; and `pack`, where in those rows each token stands.
        `predict_from`: of each response token the one before it."""
        columns = zip(*[rollout.prompt_ids[:-1] for rollout in rollouts])  # no rest is empty
        shared = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
        input_ids, positions = rollouts[0].prompt_ids[:shared], list(range(shared))
        groups, predict_from = [], []
        for prompt, responses in groupby(rollouts, key=lambda rollout: rollout.prompt_ids):
            input_ids += prompt[shared:]
            positions += range(shared, len(prompt))
            first, places = len(input_ids), []
            for response_ids in [rollout.response_ids[:-1] for rollout in responses]:
                tokens = torch.arange(len(response_ids)) + len(input_ids)
                predict_from += [first - 1, *tokens.tolist()]
                positions += range(len(prompt), len(prompt) + len(tokens))
                input_ids += response_ids
                places.append(tokens - first)
            unpack = pad_sequence(places, batch_first=True, padding_value=-1)
            pack = (unpack.flatten() >= 0).nonzero().squeeze(-1)
            groups.append((len(prompt) - shared, unpack.clamp(min=0), pack))
        inputs = dict(input_ids=torch.tensor([input_ids]), position_ids=torch.tensor([positions]))
        return inputs | dict(packing=(shared, groups)), torch.tensor(predict_from)


# where attention of float32 that shares keys and values among heads would hold all scores in memory
ONE_HEAD_EACH = ("cuda",)


def packed_attention(module, query, key, value, attention_mask, packing=None, scaling=None, **options):
    """Attention of packed rows, [1, heads, tokens, d] -> [1, tokens, heads, d]. What prompts share attends to
    itself, once; the rest of a prompt attends to that and to itself; each response, a row, attends to both
    and to itself. packing: () -> (shared, groups), see `rows`; without it: ordinary causal attention.

    Padding is on the right, where causal attention never sees it."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **options)

    def attend(q, k, v):  # the last query stands at the last key
        if q.dtype == torch.float32 and q.device.type in ONE_HEAD_EACH:
            k, v = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
        mask = causal_lower_right(q.shape[2], k.shape[2])
        x = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        return x.transpose(1, 2).flatten(0, 1).flatten(1)                # [rows * tokens, heads * d]

    shared, groups = packing()
    sizes = [size for length, _, pack in groups for size in (length, len(pack))]
    begin, *parts = zip(*[x.split([shared, *sizes], dim=2) for x in (query, key, value)])
    out = [attend(*begin)] if shared else []
    for (_, unpack, pack), rest, responses in zip(groups, parts[::2], parts[1::2]):
        prompt = [torch.cat(pair, 2) for pair in zip(begin[1:], rest[1:])]  # its keys and values
        out.append(attend(rest[0], *prompt))
        if not len(pack):  # all responses are one token long
            continue
        rows = []
        for x in responses:
            table = x[0].transpose(0, 1).flatten(1)                      # [tokens, heads * d]
            # embedding is indexing, table[unpack], with a faster gradient
            rows.append(F.embedding(unpack, table).unflatten(-1, x.shape[1::2]).transpose(1, 2))
        q, *own = rows                                                   # [responses, heads, longest, d]
        k, v = [torch.cat([x.expand(len(q), -1, -1, -1), row], 2) for x, row in zip(prompt, own)]
        out.append(F.embedding(pack, attend(q, k, v)))
    return torch.cat(out)[None].unflatten(-1, query.shape[1::2]), None


AttentionInterface.register("packed", packed_attention)


def head_logprobs(head, responses: list, device="cpu", temperature: float = 1.0, statistics=()):
    """What this head computes of the responses' tokens: log-probs, entropies, statistics, [T] each."""
    inputs, predict_from = head.rows(responses)
    inputs = tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
    targets = torch.tensor([token for r in responses for token in r.response_ids], device=device)
    return head(inputs, predict_from.to(device), targets, temperature, statistics)


# ------------------------------------- are they the model's own? --------------------------------------------
# A few tokens are computed by a small random copy of the model, one sequence at a time, with transformers'
# plain ("eager") attention and no cache, and then each faster way, until one agrees. So no list of
# architectures is needed, and a large model is asked in seconds.
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


@torch.no_grad()
def eager_logprobs(model, responses: list) -> torch.Tensor:
    """[2, T] the model's own log-probs and entropies of the responses' tokens. Raises UserError for NaN."""
    model.set_attn_implementation("eager")
    head = PlainHead(model)
    own = torch.cat([torch.stack(head_logprobs(head, [r])) for r in responses], 1)
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
        return responses, torch.stack(head_logprobs(head(copy), responses))

    return fastest_that_agrees(model, "the trainer", ways, probe, max_length=max_length)


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
