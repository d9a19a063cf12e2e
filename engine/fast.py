"""Log-probs without padding and without full logits. Equal, by test, to the plain path of engine/policy.py.

Packed: a micro-batch is one row of tokens that holds each different prompt once and then its responses; only
attention sees rows of prompt + response. Chunked head: logits exist for a few tokens at a time."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
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


def pack_split(rollouts: list) -> tuple[dict, torch.Tensor]:
    """`pack` for a CPU: a shared prompt attends to itself once; then only responses ask, in their own rows.

    `prompts` [prompts, longest] and `queries` [rows, longest response] say which tokens ask, `unpack` which
    ones a response's tokens see where `visible` [rows, 1, queries, keys], up to themselves; `pack` says where
    a token stands among the rows of prompts, then of responses."""
    inputs, predict_from = pack(rollouts)
    unpack, place = inputs["unpack"], inputs["pack"]
    longest = unpack.shape[1]
    length = torch.tensor([len(r.prompt_ids) for r in rollouts])                  # [rows]
    asks = max(1, *(len(r.response_ids) - 1 for r in rollouts))
    row, column = place // longest, place % longest
    first = row[column == 0].unique()                                             # with a prompt's first copy
    prompts = unpack[first, :length.max()]
    column_of = length[:, None] + torch.arange(asks)                              # [rows, queries]
    queries = unpack.gather(1, column_of.clamp(max=longest - 1))
    visible = torch.arange(longest) <= column_of[:, :, None]
    of_prompt = torch.searchsorted(first, row) * prompts.shape[1] + column
    of_response = prompts.numel() + row * asks + column - length[row]
    inputs["pack"] = torch.where(column < length[row], of_prompt, of_response)
    return inputs | dict(prompts=prompts, queries=queries, visible=visible[:, None]), predict_from


def pack_varlen(rollouts: list) -> tuple[dict, torch.Tensor]:
    """`pack` for a kernel that takes sequences of different length: nothing is padded, queries lie in place.

    A response asks only with its own tokens, the first one of a prompt with the prompt's, too; `keys` lists
    the tokens of prompt + response, one sequence after another. `query_starts` and `key_starts` [sequences +
    1] say where sequences begin; one that asks nothing (a response of one token) is left out."""
    inputs, predict_from = pack(rollouts)
    unpack = inputs.pop("unpack")
    longest = unpack.shape[1]
    lengths = torch.tensor([len(r.prompt_ids) + len(r.response_ids) - 1 for r in rollouts])
    queries = torch.bincount(inputs.pop("pack") // longest, minlength=len(rollouts))
    asks = queries > 0
    keys = torch.cat([row[:length] for row, length in zip(unpack[asks], lengths[asks])])
    query_starts, key_starts = (F.pad(n[asks].cumsum(0), (1, 0)).int() for n in (queries, lengths))
    inputs |= dict(keys=keys, query_starts=query_starts, key_starts=key_starts, longest=longest)
    return inputs, predict_from


def packed_attention(module, query, key, value, attention_mask, unpack=None, pack=None, keys=None,
                     query_starts=None, key_starts=None, longest=0, prompts=None, queries=None, visible=None,
                     **options):
    """Attention of rows that lie packed in one row of tokens: [1, heads, tokens, d] -> [1, tokens, heads, d].

    Padding is on the right, so causal attention never sees it and needs no mask. With `keys` it is torch's
    variable-length attention (not run on a GPU by us yet), without any of them ordinary causal attention."""
    if keys is not None:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, d]
        key, value = (F.embedding(keys, x.flatten(1)).unflatten(1, x.shape[1:]) for x in (key, value))
        # causal: the last query of a sequence sees its last key, the one before sees one less, and so on
        out = varlen.varlen_attn(query, key, value, query_starts, key_starts, longest, longest,
                                 scale=options.get("scaling"), window_size=(-1, 0), enable_gqa=True)
        return out[None], None
    if unpack is None:
        return sdpa_attention_forward(module, query, key, value, None, **options)

    def to_rows(x, index):
        table = x[0].transpose(0, 1).flatten(1)                     # [tokens, heads * d]
        # embedding is indexing, table[index], with a faster gradient
        rows = F.embedding(index, table)                            # [rows, longest, heads * d]
        return rows.unflatten(-1, x.shape[1::2]).transpose(1, 2)    # [rows, heads, longest, d]

    def attend(asking, seen, mask=None):
        rows = [to_rows(query, asking), to_rows(key, seen), to_rows(value, seen)]
        out = F.scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=mask is None, enable_gqa=True,
                                             scale=options.get("scaling"))
        return out.transpose(1, 2).flatten(0, 1).flatten(1)         # [rows * longest, heads * d]

    dtype, shape = query.dtype, query.shape[1::2]
    if prompts is None:
        table = attend(unpack, unpack)
    else:  # on a CPU, where the kernel's backward pass is slower in 16 bits
        query, key, value = query.float(), key.float(), value.float()
        table = torch.cat([attend(prompts, prompts), attend(queries, unpack, visible)])
    return F.embedding(pack[None], table.to(dtype)).unflatten(-1, shape), None


AttentionInterface.register("packed", packed_attention)


def varlen_works(config, device, dtype) -> bool:
    """Whether variable-length attention gives what padded rows give, gradients included, on this device."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads)
    rollouts = []
    for prompt, response in ((5, 40), (5, 1), (5, 3), (70, 2)):  # three responses to a prompt, one to another
        rollouts.append(SimpleNamespace(prompt_ids=[prompt] * prompt, response_ids=[0] * response))
    tokens, generator = len(pack(rollouts)[0]["position_ids"][0]), torch.Generator().manual_seed(0)
    tensors, results = [], []
    for n in (heads, kv_heads, kv_heads):
        x = torch.randn(1, n, tokens, head_size, generator=generator)
        tensors.append(x.to(device, dtype).requires_grad_())
    try:
        for rows in (pack, pack_varlen):
            inputs = on_device(rows(rollouts)[0], device)
            out, _ = packed_attention(module, *tensors, None, **inputs)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    except (RuntimeError, ValueError, NotImplementedError):  # no kernel for this GPU, type or head size
        return False
    return all((a - b).norm() < 0.02 * b.norm() for a, b in zip(*results))  # single elements round apart


def on_device(inputs: dict, device) -> dict:
    """Model inputs with their tensors moved there."""
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


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
        head = self.model.get_output_embeddings()
        logp, entropy = LogProbs.apply(hidden, head.weight, head.bias, targets, temperature)
        others = [[] for _ in statistics]
        for rows in LogProbs.chunks(hidden, head.weight) if statistics else []:
            with torch.no_grad():
                whole = LogProbs.logits(hidden[rows], head.weight, head.bias, temperature).log_softmax(-1)
                for function, parts in zip(statistics, others):
                    parts.append(function(whole))
            del whole  # or the next chunk's are made beside these
        return logp, entropy, *map(torch.cat, others)


class LogProbs(torch.autograd.Function):
    """(log-prob of the target, entropy in nats), both [T], of (hidden @ weight.T + bias) / temperature.

    Logits exist for one chunk of rows at a time; the backward pass computes them again and turns them into
    their own gradient in place. With p the probabilities, H the entropy, 1 the one-hot target:
        d logp / d logits = (1 - p) / temperature,      d H / d logits = -p (log p + H) / temperature"""
    # a chunk's logits: 64 MiB on a CPU, 1 GiB on a GPU, whatever the vocabulary
    ELEMENTS = {"cpu": 2 ** 24, "cuda": 2 ** 28}

    @staticmethod
    def chunks(hidden, weight):
        rows = max(1, LogProbs.ELEMENTS.get(hidden.device.type, 2 ** 28) // len(weight))
        return [slice(i, i + rows) for i in range(0, len(hidden), rows)]

    @staticmethod
    def logits(hidden, weight, bias, temperature):
        logits = F.linear(hidden, weight, bias).float()
        return logits.div_(temperature) if temperature != 1 else logits

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        logp, entropy, log_z = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for rows in LogProbs.chunks(hidden, weight):
            logits = LogProbs.logits(hidden[rows], weight, bias, temperature)
            target = logits.gather(-1, targets[rows, None]).squeeze(-1)
            largest = logits.amax(-1)
            weights = logits.sub_(largest[:, None]).exp()
            z = weights.sum(-1)
            entropy[rows] = z.log() - weights.mul_(logits).sum(-1) / z
            log_z[rows] = largest + z.log()
            logp[rows] = target - log_z[rows]
            del logits, weights  # or the next chunk's logits are made beside these
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        if grad_entropy is not None and not grad_entropy.any():  # --entropy_coef 0
            grad_entropy = None
        for rows in LogProbs.chunks(hidden, weight):
            scale = torch.zeros_like(log_z[rows]) if grad_logp is None else grad_logp[rows] / ctx.temperature
            grad = LogProbs.logits(hidden[rows], weight, bias, ctx.temperature).sub_(log_z[rows, None])
            if grad_entropy is None:
                grad = grad.exp_().mul_(-scale[:, None])
            else:
                factor = grad_entropy[rows, None] / ctx.temperature
                grad = grad.exp().neg_().mul_((grad + entropy[rows, None]).mul_(factor).add_(scale[:, None]))
            grad.scatter_add_(-1, targets[rows, None], scale[:, None])
            if bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if grad.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[rows])
            else:
                grad_weight += grad.T @ hidden[rows]
            del grad
        grad_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None
