"""The policy: micro-batch plans, packed rows, the head without full logits, saving."""

import math
from unittest import mock

import pytest
import torch
from conftest import make_policy, random_rollouts, tiny_model
from equations import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import Rollout
from engine import logprobs
from engine.policy import plan_micro_batches


# ------------------------------------------------- the plan ------------------------------------------------
def size_of(micro, prompts, responses, groups, padding) -> float:
    """Tokens: each prompt of the micro-batch once, its responses, a share of what pads these."""
    rows = {}
    for i in micro:
        rows.setdefault(groups[i], []).append(responses[i])
    prompt_tokens = sum({groups[i]: prompts[i] for i in micro}.values())
    padded = sum(len(row) * max(row) for row in rows.values())
    return prompt_tokens + padding * padded + (1 - padding) * sum(responses[i] for i in micro)


@settings(max_examples=200, deadline=None)
@given(responses=st.lists(st.integers(1, 500), min_size=1, max_size=60), ranks=st.integers(1, 9),
       budget=st.integers(1, 2000), lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4),
       padding=st.sampled_from([0, 1 / 8, 1]))
def test_plan_is_complete_within_budget_and_equal_in_number(responses, ranks, budget, lengths, padding):
    groups = [i % len(lengths) for i in range(len(responses))]
    prompts = [lengths[group] for group in groups]
    plan = plan_micro_batches(prompts, responses, groups, ranks, budget, padding)
    assert len(plan) == ranks
    assert len({len(micros) for micros in plan}) == 1
    planned = [micro for micros in plan for micro in micros]
    assert sorted(i for micro in planned for i in micro) == list(range(len(responses)))
    longest = max(sum(pair) for pair in zip(prompts, responses))
    for micro in planned:
        assert size_of(micro, prompts, responses, groups, padding) <= max(budget, longest) + 1e-6
        assert [groups[i] for i in micro] == sorted(groups[i] for i in micro)  # packed prompt by prompt
    # nobody is idle while another has two
    for micros in zip(*plan):
        assert min(map(len, micros)) > 0 or max(map(len, micros)) == 1 or min(prompts) == 0


@pytest.mark.parametrize("prompts, responses, groups, ranks, budget, padding, expected", [
    # padded rows: 8 and 2 take 2 x 8 = 16 tokens, 9 and 1 take 18, too many: the 20 tokens become two rounds,
    # 9 with 8 (the first 17 tokens begin below 10), and 2 with 1
    ([0] * 4, [9, 1, 8, 2], [0] * 4, 2, 16, 1, [[[0], [3]], [[2], [1]]]),
    # a prompt of 5 tokens is computed where it is already: b's 3 go to b (8 + 3 = 11), not to a (9 + 5 + 3)
    ([5] * 3, [4, 3, 3], [0, 1, 1], 2, 16, 0, [[[0]], [[1, 2]]]),
    # the longest sequence, 5 + 9, is allowed where the budget is not
    ([5] * 2, [9, 2], [0, 0], 1, 3, 0, [[[0], [1]]])])
def test_plan_by_hand(prompts, responses, groups, ranks, budget, padding, expected):
    assert plan_micro_batches(prompts, responses, groups, ranks, budget, padding) == expected


# ------------------------------------------------ micro-batches --------------------------------------------
def test_a_rank_without_work_computes_the_shortest_sequence_with_weight_zero():
    policy, rollouts = make_policy(), random_rollouts(3)
    shortest = min(rollouts, key=lambda r: len(r.prompt_ids) + len(r.response_ids))
    policy.ranks, indices = 5, []
    for policy.rank in range(5):
        micro, = policy.micro_batches(rollouts)
        indices.append(micro.indices)
        if not micro.indices:
            assert micro.responses[0].response_ids == shortest.response_ids and micro.mask_T.sum() == 0
    assert sorted(indices) == [[], [], [0], [1], [2]] and shortest.mask is None


def test_packed_rows_by_hand():
    # One row of tokens: 1 2, with which both prompts begin; 3, the rest of the first, then 5 6 (of its
    # response 5 6 7) and 8 (of 8 9); then 4, the rest of the second, whose response has one token.
    pairs = [([1, 2, 3], [5, 6, 7]), ([1, 2, 3], [8, 9]), ([1, 2, 4], [4])]
    responses = [Rollout(prompt, ids, torch.zeros(len(ids)), True) for prompt, ids in pairs]
    inputs, predict_from = logprobs.PackedHead.rows(responses)
    shared, groups = inputs["packing"]
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 5, 6, 8, 4]] and shared == 2
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 2]]
    (length, size, pack), (other_length, nothing, no_place) = groups
    assert (length, other_length) == (1, 1) and nothing == (1, 0) and len(no_place) == 0
    # attention sees the rows 5 6 and 8 -, in which the tokens 5 6 8 stand at 0, 1 and 2
    assert size == (2, 2) and pack.tolist() == [0, 1, 2]
    # 5 6 7 are predicted by tokens 2 3 4, 8 9 by 2 5, 4 by 6
    assert predict_from.tolist() == [2, 3, 4, 2, 5, 6]
    # a prompt that is another's beginning keeps its last token, which predicts
    responses[2].prompt_ids = [1, 2]
    assert logprobs.PackedHead.rows(responses)[0]["packing"][0] == 1


# ------------------------------------------------- log-probs -----------------------------------------------
def is_the_models_own(policy, model, vocabulary: int, shared: int = 2) -> None:
    """Log-probs, entropies and gradients are those of the model's own forward, one response at a time.
    The two prompts begin with the same `shared` tokens."""
    rollouts = random_rollouts(6, vocabulary=vocabulary)
    rollouts[0].prompt_ids = rollouts[1].prompt_ids[:shared] + rollouts[0].prompt_ids
    for rollout in rollouts[2:]:
        rollout.prompt_ids = rollouts[1].prompt_ids
    micro, = policy.micro_batches(rollouts)
    logps, entropies = [], []
    for r in micro.responses:
        logits = model(input_ids=torch.tensor([r.prompt_ids + r.response_ids])).logits[0] / 0.6
        distribution = logits[len(r.prompt_ids) - 1:-1].log_softmax(-1)
        logps.append(distribution.gather(-1, torch.tensor(r.response_ids)[:, None]).squeeze(-1))
        entropies.append(-(distribution.exp() * distribution).sum(-1))
    expected_logp, expected_entropy = torch.cat(logps), torch.cat(entropies)
    logp, entropy = policy.logprobs(micro, 0.6)
    assert relative_error(logp, expected_logp) < 1e-5
    assert relative_error(entropy, expected_entropy) < 1e-4
    weights = torch.linspace(-1, 1, len(logp))
    (weights * logp + entropy).sum().backward()
    (weights * expected_logp + expected_entropy).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize("rows", ["packed", "padded", "plain"])
@pytest.mark.parametrize("chunked", [True, False])
def test_head_equals_full_logits(chunked, rows, monkeypatch):
    """Also with chunks that cut responses in the middle."""
    policy, other = make_policy(plain=rows == "plain"), make_policy()
    if rows == "padded":  # what an architecture gets that cannot be packed
        policy.head.rows = logprobs.PlainHead.rows
        policy.model.set_attn_implementation("sdpa")
    other.model.set_attn_implementation("eager")
    if chunked:
        monkeypatch.setitem(logprobs.CHUNK, "cpu", 7 * policy.model.config.vocab_size)
    is_the_models_own(policy, other.model, 300)


def test_attention_in_which_every_head_has_keys_of_its_own_is_the_same(tmp_path, monkeypatch):
    """What float32 gets on a GPU."""
    model = tiny_model("Qwen2", tmp_path, num_attention_heads=4, num_key_value_heads=2)
    monkeypatch.setattr(logprobs, "ONE_HEAD_EACH", ("cpu",))
    policy = make_policy(tmp_path)
    assert policy.packed
    is_the_models_own(policy, model, 64)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3", "Gemma", "GPT2", "Bloom", "OPT", "Phi"])
def test_fast_head_of_other_architectures(tmp_path, name):
    """The models have dropout, which is off; OPT's layers would drop while they are recomputed."""
    model, policy = tiny_model(name, tmp_path), make_policy(tmp_path, gradient_checkpointing=True)
    is_the_models_own(policy, model, 64)


@pytest.mark.parametrize("window, packed", [(4, False), (3000, True)])
def test_a_window_shorter_than_the_responses_is_not_packed(tmp_path, window, packed):
    model = tiny_model("Qwen2", tmp_path, use_sliding_window=True, sliding_window=window, max_window_layers=1)
    policy = make_policy(tmp_path)
    assert policy.packed == packed
    is_the_models_own(policy, model, 64, shared=0)


@pytest.mark.parametrize("head", [logprobs.ChunkedHead, logprobs.PlainHead])
@pytest.mark.parametrize("name", ["Qwen2", "Phi"])  # Phi's head has a bias
def test_logits_of_bfloat16_weights_are_float32(tmp_path, name, head):
    """Log-probs, entropies and gradients against float64. A logit of 12 in bfloat16 is off by up to 1/32."""
    model = tiny_model(name, tmp_path, vocab_size=512, initializer_range=0.8).bfloat16()
    last, ids, targets = model.lm_head, torch.arange(5, 45)[None], torch.arange(40)
    hidden = model.base_model(ids).last_hidden_state[0].detach().double()
    weight = last.weight.detach().double().requires_grad_()
    exact = hidden @ weight.t() + (0 if last.bias is None else last.bias.detach().double())
    assert exact.max() > 8
    expected = head.values(exact, targets, 1.0, ())
    found = head(model)(dict(input_ids=ids), torch.arange(40), targets, 1.0)
    for (logp, entropy), parameter in ((found, last.weight), (expected, weight)):
        (logp.sum() + entropy.sum()).backward(inputs=[parameter])
    assert max((a - b).abs().max().item() for a, b in zip(found, expected)) < 1e-4
    assert relative_error(last.weight.grad, weight.grad) < 2.5e-3
    last.to("meta")  # what a GPU calls, by shape and type: torch.mm with out_dtype
    logits = logprobs.head_forward(last, torch.empty(3, 5, 32, dtype=torch.bfloat16, device="meta"))
    logits.sum().backward()
    assert (logits.dtype, last.weight.grad.dtype) == (torch.float32, torch.bfloat16)


def test_entropies_without_a_weight_have_no_gradient():
    """The gradient of a loss without an entropy term is the same to the bit; a loss that has one all the same
    is an error."""
    policy, gradients = make_policy(), []
    micro, = policy.micro_batches(random_rollouts(6))
    for coef in (1.0, 0.0):
        logp, entropy = policy.logprobs(micro, 0.6, coef)
        (torch.linspace(-1, 1, len(logp)) * logp.exp() - 0.0 * entropy).sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
        policy.model.zero_grad()
    assert all(map(torch.equal, *gradients))
    logp, entropy = policy.logprobs(micro, 0.6, 0.0)
    with pytest.raises(ValueError, match="entropy term, but policy.logprobs was told the entropy_coef 0"):
        (logp + entropy).sum().backward()


# -------------------------------------------------- saving -------------------------------------------------
def test_a_saved_model_with_a_head_of_its_own_loads_and_is_the_same(tmp_path, llama):
    policy = make_policy(llama)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.01)
    policy.save(tmp_path / "saved", AutoTokenizer.from_pretrained(llama))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(5, 25)[None]
    assert torch.equal(loaded(ids).logits, policy.model.eval()(ids).logits)
    AutoTokenizer.from_pretrained(tmp_path / "saved")


def test_a_final_model_of_nan_is_told(tmp_path, capsys):
    policy = make_policy()
    next(policy.parameters()).data[0, 0] = math.nan
    policy.save(tmp_path / "final", mock.Mock())
    assert "Warning: the final model holds NaN or infinite weights" in capsys.readouterr().out
