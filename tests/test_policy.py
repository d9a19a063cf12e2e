"""The policy: micro-batch plans, the head without full logits, saving."""

import math

import pytest
import torch
from conftest import ARCHITECTURES, make_policy, random_rollouts, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
from policy import _LogProbs


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60), ranks=st.integers(1, 9), budget=st.integers(1, 2000))
def test_plan_is_complete_within_budget_and_equal_in_number(lengths, ranks, budget):
    plan = common.plan_micro_batches(lengths, ranks, budget)
    assert len(plan) == ranks and len({len(micros) for micros in plan}) == 1
    assert sorted(i for micros in plan for m in micros for i in m) == list(range(len(lengths)))
    for micro in (m for micros in plan for m in micros):
        assert len(micro) <= 1 or max(lengths[i] for i in micro) * len(micro) <= budget


def test_plan_by_hand():
    # lengths 9, 1, 8, 2 within 16 tokens: 9 alone (two rows of 9 are 18), then 8 with 2 (2 x 8 = 16), then 1
    assert common.plan_micro_batches([9, 1, 8, 2], 1, 16) == [[[0], [2, 3], [1]]]
    # on two ranks they are dealt in turn, and the second rank gets an empty one
    assert common.plan_micro_batches([9, 1, 8, 2], 2, 16) == [[[0], [1]], [[2, 3], []]]


def test_plan_keeps_the_responses_of_a_prompt_together():
    # groups a (9, 1) and b (8, 2): a takes 2 x 9 = 18 tokens, a third row would make it 27; b takes 2 x 8
    assert common.plan_micro_batches([9, 8, 1, 2], 1, 18, groups=[0, 1, 0, 1]) == [[[0, 2], [1, 3]]]


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_head_equals_full_logits(temperature, chunked, attention, monkeypatch):
    """Log-probs and entropies to 1e-5, gradients to 1e-4, with chunks that cut responses in the middle and shared prompts."""
    policy, plain = make_policy(temperature=temperature, attention=attention), make_policy(temperature=temperature)
    if chunked:
        monkeypatch.setattr(_LogProbs, "ELEMENTS", {"cpu": 7 * policy.model.config.vocab_size})
    rollouts = random_rollouts(6)
    for r in rollouts[2:5]:
        r.prompt_ids = rollouts[1].prompt_ids
    micro = next(policy.micro_batches(rollouts))
    logp, entropy = policy.logprobs(micro, entropy_grad=True)
    expected_logp, expected_entropy = [], []
    for r in micro.rollouts:
        logits = plain.model(input_ids=torch.tensor([r.prompt_ids + r.response_ids])).logits[0] / temperature
        distribution = torch.log_softmax(logits[len(r.prompt_ids) - 1:-1], -1)
        expected_logp.append(distribution.gather(-1, torch.tensor(r.response_ids)[:, None]).squeeze(-1))
        expected_entropy.append(-(distribution.exp() * distribution).sum(-1))
    expected_logp, expected_entropy = torch.cat(expected_logp), torch.cat(expected_entropy)
    assert torch.allclose(logp, expected_logp, atol=1e-5) and torch.allclose(entropy, expected_entropy, atol=1e-5)
    (logp.sum() + entropy.sum()).backward()
    (expected_logp.sum() + expected_entropy.sum()).backward()
    for (name, p), q in zip(policy.model.named_parameters(), plain.model.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-4 * max(1.0, float(q.grad.abs().max()))), name


def test_packed_computes_every_prompt_once_and_no_padding():
    rollouts = random_rollouts(5)
    for r in rollouts:
        r.prompt_ids = rollouts[0].prompt_ids
    for attention, expected in (("packed", len(rollouts[0].prompt_ids) + sum(len(r.response_ids) - 1 for r in rollouts)),
                                ("sdpa", 5 * (len(rollouts[0].prompt_ids) + max(len(r.response_ids) for r in rollouts) - 1))):
        policy, seen = make_policy(attention=attention), []
        policy.model.base_model.layers[0].mlp.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out[..., 0].numel()))
        policy.logprobs(next(policy.micro_batches(rollouts)))
        assert seen == [expected], attention


@pytest.mark.parametrize("window, packed", [(4, False), (3000, True)])
def test_packed_gives_way_to_padded_rows_where_a_layer_does_not_see_the_whole_row(tmp_path, window, packed):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, use_sliding_window=True, sliding_window=window, max_window_layers=1)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    policy = make_policy(tmp_path)
    assert policy.packed == packed and policy.model.config._attn_implementation == ("packed" if packed else "sdpa")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_in_training_mode(tmp_path, name):
    """Log-probs of shared prompts are those of each row alone, dropout is off, whatever attention the model has."""
    model = tiny_model(name, tmp_path)
    policy, rollouts = make_policy(tmp_path), random_rollouts(4, vocabulary=64)
    for r in rollouts[1:3]:
        r.prompt_ids = rollouts[0].prompt_ids
    micro = next(policy.micro_batches(rollouts))
    logp, _ = policy.logprobs(micro)
    with torch.no_grad():
        expected = [torch.log_softmax(model(torch.tensor([r.prompt_ids + r.response_ids])).logits[0, len(r.prompt_ids) - 1:-1], -1)
                    .gather(-1, torch.tensor(r.response_ids)[:, None]).squeeze(-1) for r in micro.rollouts]
    assert torch.allclose(logp, torch.cat(expected), atol=1e-5)


def test_packed_gives_way_where_a_model_takes_no_further_arguments(monkeypatch, capsys):
    from transformers import Qwen2Model
    forward = Qwen2Model.forward
    monkeypatch.setattr(Qwen2Model, "forward", lambda self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                        inputs_embeds=None, use_cache=None: forward(self, input_ids=input_ids, position_ids=position_ids))
    assert not make_policy().packed and "cannot be packed" in capsys.readouterr().out


def test_gradient_checkpointing_changes_nothing():
    gradients = []
    for flag in (False, True):
        policy = make_policy(gradient_checkpointing=flag)
        micro = next(policy.micro_batches(random_rollouts(6)))
        policy.backward(micro, -policy.logprobs(micro)[0])
        gradients.append([p.grad for p in policy.model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))


def test_two_optimizer_steps_by_hand():
    """Adam (Kingma & Ba 2015, Algorithm 1) with decoupled weight decay, at each step's own rate, after clipping the gradient's norm."""
    policy = make_policy(lr=1.0, weight_decay=0.1, grad_clip=1.0)  # the rate comes with the step
    value = next(policy.model.parameters())
    expected, m, v = value.detach().clone(), 0.0, 0.0
    for t, (rate, norm) in enumerate([(1e-2, 2.0), (3e-2, 0.5)], start=1):  # the first gradient is clipped, the second is not
        grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(t))
        grad *= norm / grad.norm()
        value.grad, policy.sums = grad.clone(), {"loss": torch.tensor(0.0)}
        assert policy.step(rate)["grad_norm"] == pytest.approx(norm, rel=1e-4)
        grad /= max(norm, 1.0)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad ** 2
        expected -= rate * (0.1 * expected + m / (1 - 0.9 ** t) / ((v / (1 - 0.999 ** t)).sqrt() + 1e-8))
    assert torch.allclose(value, expected, atol=1e-6)


def test_entropy_of_a_flat_distribution():
    policy = make_policy()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.zero_()
    logp, entropy = policy.logprobs(next(policy.micro_batches(random_rollouts(2))))
    expected = math.log(policy.model.config.vocab_size)  # all logits equal: uniform over the vocabulary
    assert entropy.tolist() == pytest.approx([expected] * len(entropy), abs=1e-4)
    assert logp.tolist() == pytest.approx([-expected] * len(logp), abs=1e-4)


def test_entropy_bonus_raises_entropy_and_clip_high_lets_a_rising_ratio_go_on():
    policy = make_policy(lr=1e-3)
    rollouts = random_rollouts(8)
    before = None
    for _ in range(2):
        for micro in policy.micro_batches(rollouts):
            logp, entropy = policy.logprobs(micro, entropy_grad=True)
            policy.backward(micro, -entropy, entropy=entropy)
        metrics = policy.step(1e-5)
        before, after = metrics["entropy"] if before is None else before, metrics["entropy"]
    assert after > before
    # ratio 1.25 and a positive advantage: at clip_high 0.2 the gradient is cut off, at 0.28 it is not
    for clip_high, flows in ((0.2, False), (0.28, True)):
        logp = torch.tensor([math.log(1.25)], requires_grad=True)
        rho = logp.exp()
        torch.min(rho * 1.0, rho.clamp(0.8, 1 + clip_high) * 1.0).sum().backward()
        assert bool(logp.grad.abs().sum() > 0) == flows


def test_saved_model_loads_and_is_the_same(tmp_path, llama):
    for source in (common.TOY, llama):  # tied and untied head
        policy = make_policy(source)
        with torch.no_grad():
            for p in policy.model.parameters():
                p.add_(0.01)
        policy.save(tmp_path / "saved", AutoTokenizer.from_pretrained(source))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        ids = torch.arange(5, 25)[None]
        assert torch.equal(loaded(ids).logits, policy.model.eval()(ids).logits)
        AutoTokenizer.from_pretrained(tmp_path / "saved")


def test_an_architecture_with_other_logits_is_refused(tmp_path):
    from transformers import CohereConfig, CohereForCausalLM
    config = CohereConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                          num_key_value_heads=1, logit_scale=0.0625)
    CohereForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match="cohere does not compute its logits"):
        make_policy(tmp_path)


def test_flops_per_token_by_hand(llama):
    # untied Llama, hidden 64: the embedding does no matmul, everything else does; attention 12 x 2 layers x 64 x 100 / 2
    policy = make_policy(llama)
    numbers = {n: p.numel() for n, p in policy.model.named_parameters()}
    expected = 6 * (sum(numbers.values()) - numbers["model.embed_tokens.weight"]) + 12 * 2 * 64 * 50
    assert policy.flops_per_token(100) == expected
