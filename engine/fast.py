"""Log-probs without padding and without full logits. Equal, by test, to the plain path of engine/policy.py.

Packed: a micro-batch is one row of tokens that holds each different prompt once and then its responses; only
attention sees rows of prompt + response. Chunked head: logits exist for a few tokens at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


# ------------------------------------------------ packed attention ------------------------------------------
def pack(rollouts: list) -> tuple[dict, torch.Tensor]:
    """(model inputs, predict_from [T]): one row with each different prompt once, then its responses.

    A response's last token predicts nothing and is left out. `unpack` [rows, longest] says which token of the
    row stands where in a (right-padded) row of prompt + response, `pack` [tokens] where a token stands among
    those rows, and `predict_from` which token of the row predicts each response token: the one before it."""
    longest = max(len(r.prompt_ids) + len(r.response_ids) - 1 for r in rollouts)
    input_ids, positions, unpack, place, predict_from = [], [], [], [], []
    tokens_of_prompt: dict[tuple, range] = {}
    for row, rollout in enumerate(rollouts):
        prompt = tokens_of_prompt.get(tuple(rollout.prompt_ids))
        if prompt is None:
            prompt = range(len(input_ids), len(input_ids) + len(rollout.prompt_ids))
            tokens_of_prompt[tuple(rollout.prompt_ids)] = prompt
            input_ids += rollout.prompt_ids
            positions += range(len(prompt))
            place += range(row * longest, row * longest + len(prompt))
        response = range(len(input_ids), len(input_ids) + len(rollout.response_ids) - 1)
        input_ids += rollout.response_ids[:-1]
        positions += range(len(prompt), len(prompt) + len(response))
        first = row * longest + len(prompt)
        place += range(first, first + len(response))
        tokens = [*prompt, *response]
        unpack.append(tokens + [0] * (longest - len(tokens)))
        predict_from += tokens[len(prompt) - 1:]
    inputs = dict(input_ids=torch.tensor([input_ids]), position_ids=torch.tensor([positions]),
                  unpack=torch.tensor(unpack), pack=torch.tensor(place))
    return inputs, torch.tensor(predict_from)


def packed_attention(module, query, key, value, attention_mask, unpack=None, pack=None, **options):
    """Attention of rows that lie packed in one row of tokens: [1, heads, tokens, d] -> [1, tokens, heads, d].

    Padding is on the right, so causal attention never sees it and needs no mask. Without `unpack`, ordinary
    causal attention."""
    if unpack is None:
        return sdpa_attention_forward(module, query, key, value, None, **options)

    def to_rows(x):
        table = x[0].transpose(0, 1).flatten(1)                     # [tokens, heads * d]
        # embedding is indexing, table[unpack], with a faster gradient
        rows = F.embedding(unpack, table)                           # [rows, longest, heads * d]
        return rows.unflatten(-1, x.shape[1::2]).transpose(1, 2)    # [rows, heads, longest, d]

    out = F.scaled_dot_product_attention(to_rows(query), to_rows(key), to_rows(value), is_causal=True,
                                         enable_gqa=True, scale=options.get("scaling"))
    table = out.transpose(1, 2).flatten(0, 1).flatten(1)            # [rows * longest, heads * d]
    return F.embedding(pack[None], table).unflatten(-1, query.shape[1::2]), None


AttentionInterface.register("packed", packed_attention)


# -------------------------------------------------- chunked head --------------------------------------------
class FastHead(torch.nn.Module):
    """The model with its head applied to response positions only, by chunks. FSDP shards it as the root."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs: dict, predict_from: torch.Tensor, targets: torch.Tensor, temperature: float,
                statistics=()):
        """(log-prob of the target, entropy), both [T], of logits / temperature; then each function of the
        log-probs [rows, V] of a chunk -> [rows], without a gradient."""
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1)[predict_from]  # [T, d]
        weight = self.model.get_output_embeddings().weight
        others = [[] for _ in statistics]
        for rows in LogProbs.chunks(hidden, weight) if statistics else []:
            with torch.no_grad():
                whole = LogProbs.logits(hidden[rows], weight, temperature).log_softmax(-1)
            for function, parts in zip(statistics, others):
                parts.append(function(whole))
            del whole  # or the next chunk's are made beside these
        return *LogProbs.apply(hidden, weight, targets, temperature), *map(torch.cat, others)


class LogProbs(torch.autograd.Function):
    """(log-prob of the target, entropy in nats), both [T], of hidden @ weight.T / temperature.

    Logits exist for one chunk of rows at a time; the backward pass computes them again and turns them into
    their own gradient in place. With p the probabilities, H the entropy, 1 the one-hot target:
        d logp / d logits = (1 - p) / temperature,      d H / d logits = -p (log p + H) / temperature

    torch's own F.linear_cross_entropy gives no entropy, and of bfloat16 weights bfloat16 log-probs, which
    are too coarse for a ratio."""
    # a chunk's logits: 64 MiB on a CPU, 1 GiB on a GPU, whatever the vocabulary
    ELEMENTS = {"cpu": 2 ** 24, "cuda": 2 ** 28}

    @staticmethod
    def chunks(hidden, weight):
        rows = max(1, LogProbs.ELEMENTS.get(hidden.device.type, 2 ** 28) // len(weight))
        return [slice(i, i + rows) for i in range(0, len(hidden), rows)]

    @staticmethod
    def logits(hidden, weight, temperature):
        return F.linear(hidden, weight).float().div_(temperature)

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        logp, entropy, log_z = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for rows in LogProbs.chunks(hidden, weight):
            logits = LogProbs.logits(hidden[rows], weight, temperature)
            target = logits.gather(-1, targets[rows, None]).squeeze(-1)
            largest = logits.amax(-1)
            weights = logits.sub_(largest[:, None]).exp()
            z = weights.sum(-1)
            entropy[rows] = z.log() - weights.mul_(logits).sum(-1) / z
            log_z[rows] = largest + z.log()
            logp[rows] = target - log_z[rows]
            del logits, weights  # or the next chunk's logits are made beside these
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        of_logp, of_entropy = grad_logp[:, None] / ctx.temperature, grad_entropy[:, None] / ctx.temperature
        for rows in LogProbs.chunks(hidden, weight):
            log_p = LogProbs.logits(hidden[rows], weight, ctx.temperature).sub_(log_z[rows, None])
            p = log_p.exp()
            grad = log_p.add_(entropy[rows, None]).mul_(of_entropy[rows]).add_(of_logp[rows]).mul_(p).neg_()
            grad = grad.scatter_add_(-1, targets[rows, None], of_logp[rows]).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight += grad.T @ hidden[rows]
            del log_p, p, grad
        return grad_hidden, grad_weight.to(weight.dtype), None, None
