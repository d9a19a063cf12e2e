"""What only runs on a GPU, tried without one as far as that goes, and what a first hour on one may meet."""

import torch
from conftest import make_policy, random_rollouts
from torch.nn.attention import varlen

from engine import fast
from engine.base import Rollout
from engine.policy import MicroBatch

torch.set_num_threads(1)


# ------------------------------------------ variable-length attention --------------------------------------
def varlen_by_loop(query, key, value, query_starts, key_starts, max_q, max_k, scale=None, window_size=(-1, -1),
                   enable_gqa=False, from_the_end=True):
    """What torch.nn.attention.varlen documents, sequence by sequence; causal masks end at the last key."""
    assert query_starts.dtype == key_starts.dtype == torch.int32 and window_size == (-1, 0) and enable_gqa
    groups, rows = query.shape[1] // key.shape[1], []
    for i in range(len(query_starts) - 1):
        q = query[query_starts[i]:query_starts[i + 1]].transpose(0, 1)
        k, v = (x[key_starts[i]:key_starts[i + 1]].transpose(0, 1).repeat_interleave(groups, 0)
                for x in (key, value))
        asked, seen = q.shape[1], k.shape[1]
        assert 0 < asked <= max_q and asked <= seen <= max_k
        mask = torch.ones(asked, seen).tril(seen - asked if from_the_end else 0).bool()
        rows.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(0, 1))
    assert query_starts[-1] == len(query) and key_starts[-1] == len(key)
    return torch.cat(rows)


def test_pack_varlen_by_hand():
    """Three responses to one prompt, of 3, 1 and 2 tokens, and one to another; last tokens are left out."""
    responses = [([5, 6], [7, 8, 9]), ([5, 6], [9]), ([5, 6], [8, 7]), ([4], [6, 6])]
    rollouts = [Rollout(prompt, response, torch.zeros(len(response)), True) for prompt, response in responses]
    inputs, predict_from = fast.pack_varlen(rollouts)
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8, 8, 4, 6]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert inputs["keys"].tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]  # the second response asks nothing
    assert inputs["query_starts"].tolist() == [0, 4, 5, 7]
    assert inputs["key_starts"].tolist() == [0, 4, 7, 9]
    assert inputs["longest"] == 4 and inputs.keys().isdisjoint({"pack", "unpack"})
    assert predict_from.tolist() == [1, 2, 3, 1, 1, 4, 5, 6]


def test_variable_length_attention_gives_the_same_log_probs_and_gradients(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_loop)
    rollouts = random_rollouts(6) + random_rollouts(2, seed=1, longest=1)
    for k in (1, 2, 7):  # two groups of one prompt
        rollouts[k].prompt_ids = rollouts[0].prompt_ids
    found = []
    for used in (False, True):
        policy = make_policy()
        policy.varlen = used
        logp_T, entropy_T = policy.logprobs(MicroBatch(rollouts, list(range(8)), torch.device("cpu")), 0.7)
        (logp_T.sum() + entropy_T.sum()).backward()
        found.append([logp_T, entropy_T, *(p.grad for p in policy.parameters())])
    for padded, without in zip(*found):
        torch.testing.assert_close(padded, without, atol=2e-4, rtol=1e-4)


def test_variable_length_attention_is_tried_before_it_is_used(monkeypatch):
    """Right: used. Causal from the first key instead of the last, or no kernel at all: padded rows."""
    config, cpu = make_policy().model.config, torch.device("cpu")
    assert not fast.varlen_works(config, cpu, torch.float32)  # torch has no CPU kernel
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_loop)
    assert fast.varlen_works(config, cpu, torch.float32) and fast.varlen_works(config, cpu, torch.bfloat16)
    monkeypatch.setattr(varlen, "varlen_attn", lambda *a, **k: varlen_by_loop(*a, **k, from_the_end=False))
    assert not fast.varlen_works(config, cpu, torch.float32)
    assert not make_policy().varlen
