"""Log-probs and entropies of responses: the plain way, and without padding and full logits, equal by test.

Packed: a micro-batch is one row of tokens: the prompts' common beginning, then each one's rest and responses;
only attention sees rows of responses. By chunks: logits exist for a few tokens at a time."""

from __future__ import annotations

from functools import partial
from itertools import groupby, takewhile

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


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

    def forward(self, inputs: dict, predict_from: torch.Tensor, targets: torch.Tensor, *options):
        """inputs, predict_from: see `rows`. targets: [T] response tokens. options: those of
        `values`, which makes the result."""
        logits = self.model(**inputs, use_cache=False).logits  # [rows, longest, V]
        return self.values(logits.flatten(0, 1)[predict_from], targets, *options)

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
    def values(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, statistics=(),
               entropy_gradient: bool = True) -> tuple:
        """(log-prob of the target, entropy in nats), both [T], of logits [T, V] / temperature; then each
        statistic of the log-probs of the whole vocabulary, [T, V] -> [T]."""
        logits = logits.float() if temperature == 1 else logits.float() / temperature  # a division is a copy
        logp = logits.log_softmax(-1)
        # Most losses have no entropy term, and its gradient is a third of the work on the logits.
        of_entropy = logp if entropy_gradient else logp.detach()
        entropy_T = -torch.linalg.vecdot(of_entropy.exp(), of_entropy)
        others = [function(logp.detach()) for function in statistics]
        return logp.gather(-1, targets[:, None]).sum(-1), entropy_T, *others


# ----------------------------------------------------- by chunks --------------------------------------------
# elements of a chunk of logits; the backward pass holds about five such tensors at a time
CHUNK = {"cpu": 2 ** 24, "cuda": 2 ** 27}


class ChunkedHead(PlainHead):
    """Logits exist at response positions only, a chunk at a time; the backward pass makes several again.

    (torch's own F.linear_cross_entropy gives no entropy, and of bfloat16 weights bfloat16 log-probs. The
    gradient of bfloat16 weights is summed over the chunks in bfloat16.)"""

    def forward(self, inputs: dict, predict_from: torch.Tensor, targets: torch.Tensor, *options):
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1)[predict_from]  # [T, d]
        last = self.model.get_output_embeddings()

        def of_chunk(hidden, targets):
            # one tensor: a chunk made again for a loss of one of the values alone would not be freed
            return torch.stack(self.values(last(hidden), targets, *options))

        size = max(1, CHUNK.get(hidden.device.type, 2 ** 27) // len(last.weight))
        if len(targets) <= size:  # a single chunk is kept
            return [values_T.clone() for values_T in of_chunk(hidden, targets)]  # FSDP warns of views
        chunks = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
                  for chunk in zip(hidden.split(size), targets.split(size))]
        return [values_T.clone() for values_T in torch.cat(chunks, 1)]


# ------------------------------------------------------ packed ---------------------------------------------
class PackedHead(ChunkedHead):
    """For models whose attention is `packed_attention`."""

    @staticmethod
    def rows(rollouts: list) -> tuple[dict, torch.Tensor]:
        """(model inputs, predict_from [T]): one row of what all prompts begin with and, prompt by prompt, its
        rest and its responses.

        A response's last token predicts nothing: it is left out. `shared`: the length of what all begin with.
        `groups`: of each prompt the length of its rest; the (responses, longest) of right-padded rows of what
        is behind it; and `pack`, where in those rows, one behind the other, each token stands.
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
            places = pad_sequence(places, batch_first=True, padding_value=-1)
            pack = (places.flatten() >= 0).nonzero().squeeze(-1)
            groups.append((len(prompt) - shared, places.shape, pack))
        inputs = dict(input_ids=torch.tensor([input_ids]), position_ids=torch.tensor([positions]))
        return inputs | dict(packing=(shared, groups)), torch.tensor(predict_from)


# where attention of float32 that shares keys and values among heads would hold all scores in memory
ONE_HEAD_EACH = ("cuda",)


def packed_attention(module, query, key, value, attention_mask, packing=None, scaling=None, **options):
    """Attention of packed rows, [1, heads, tokens, d] -> [1, tokens, heads, d]. What prompts share attends to
    itself, once; the rest of a prompt attends to that and to itself; each response, a row, attends to both
    and to itself. packing: (shared, groups), see `rows`; without it: ordinary causal attention.

    Padding is on the right, where causal attention never sees it."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **options)

    def attend(q, k, v):  # the last query stands at the last key
        if q.dtype == torch.float32 and q.device.type in ONE_HEAD_EACH:
            k, v = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
        mask = causal_lower_right(q.shape[2], k.shape[2])
        x = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        return x.transpose(1, 2).flatten(0, 1).flatten(1)                # [rows * tokens, heads * d]

    shared, groups = packing
    sizes = [size for length, _, pack in groups for size in (length, len(pack))]
    begin, *parts = zip(*[x.split([shared, *sizes], dim=2) for x in (query, key, value)])
    out = [attend(*begin)] if shared else []
    for (_, size, pack), rest, responses in zip(groups, parts[::2], parts[1::2]):
        prompt = [torch.cat(pair, 2) for pair in zip(begin[1:], rest[1:])]  # its keys and values
        out.append(attend(rest[0], *prompt))
        if not len(pack):  # all responses are one token long
            continue
        rows = []
        for x in responses:
            tokens = x[0].transpose(0, 1)                                # [tokens, heads, d]
            # Each token has one place: no gradient has to sort, as those of indexing and F.embedding do.
            padded = tokens.new_zeros(*size, *tokens.shape[1:])
            padded = padded.flatten(0, 1).index_copy_(0, pack, tokens).unflatten(0, size)
            rows.append(padded.transpose(1, 2))
        q, *own = rows                                                   # [responses, heads, longest, d]
        k, v = [torch.cat([x.expand(len(q), -1, -1, -1), row], 2) for x, row in zip(prompt, own)]
        out.append(attend(q, k, v).index_select(0, pack))
    return torch.cat(out)[None].unflatten(-1, query.shape[1::2]), None


AttentionInterface.register("packed", packed_attention)


def head_logprobs(head, responses: list, device="cpu", *options):
    """What this head computes of the responses' tokens: log-probs, entropies, statistics, [T] each. options:
    of `PlainHead.values`."""
    inputs, predict_from = head.rows(responses)
    inputs = tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
    targets = torch.tensor([token for r in responses for token in r.response_ids], device=device)
    return head(inputs, predict_from.to(device), targets, *options)
