"""The policy: micro-batch plans, packed rows, the head without full logits, two optimizer steps, saving."""

import math

import pytest
import torch
import transformers
from conftest import make_policy, random_rollouts, tiny_model, toy_args
from equations import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import ttrl
from engine import fast
from engine.base import UserError
from engine.policy import (
    MicroBatch, Rollout, fill, load_model, pad_right, plan_micro_batches, twin)


# ------------------------------------------------- the plan ------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60), ranks=st.integers(1, 9),
       budget=st.integers(1, 2000), n_groups=st.sampled_from([1, 4]))
def test_plan_is_complete_within_budget_and_equal_in_number(lengths, ranks, budget, n_groups):
    groups = [i % n_groups for i in range(len(lengths))]
    plan = plan_micro_batches(lengths, groups, ranks, budget)
    assert len(plan) == ranks
    assert len({len(micros) for micros in plan}) == 1
    planned = [micro for micros in plan for micro in micros]
    assert sorted(i for micro in planned for i in micro) == list(range(len(lengths)))
    for micro in planned:
        assert len(micro) <= 1 or max(lengths[i] for i in micro) * len(micro) <= budget
    # nobody is idle from the start, unless a longest sequence, for which the others wait, takes as long
    if sum(lengths) // ranks >= max(lengths):
        assert all(micros[0] for micros in plan)


def test_plan_by_hand():
    # lengths 9, 1, 8, 2 within 16 tokens: 9 alone (two rows of 9 are 18), then 8 with 2 (2 x 8 = 16), then 1;
    # 8 + 2 tokens come before 9
    assert plan_micro_batches([9, 1, 8, 2], [0] * 4, 1, 16) == [[[2, 3], [0], [1]]]
    # on two ranks 20 / 2 = 10 tokens are enough: 9, then 8 (2 x 8 = 16 is too much), then 2 with 1
    # (2 x 2 = 4); they are dealt in turn, and the second rank gets an empty one
    assert plan_micro_batches([9, 1, 8, 2], [0] * 4, 2, 16) == [[[0], [3, 1]], [[2], []]]


def test_plan_keeps_the_responses_of_a_prompt_together():
    # groups a (9, 1) and b (8, 2): a takes 2 x 9 = 18 tokens, a third row would make it 27; b takes 2 x 8
    assert plan_micro_batches([9, 8, 1, 2], [0, 1, 0, 1], 1, 18) == [[[0, 2], [1, 3]]]


def test_plan_gives_every_rank_a_share_of_a_large_budget():
    # 40 tokens on two ranks: the budget becomes 20, which holds two rows of 10, instead of all four in one
    assert plan_micro_batches([10] * 4, [0] * 4, 1, 1000) == [[[0, 1, 2, 3]]]
    assert plan_micro_batches([10] * 4, [0] * 4, 2, 1000) == [[[0, 1]], [[2, 3]]]


def test_fill_by_hand():
    # 5 and 4 are 2 x 5 = 10; a third row would make it 15. 7 after 4 would pad 4 to 7: 2 x 7 = 14
    assert fill([0, 1, 2, 3], [5, 4, 4, 7], 10) == [[0, 1], [2], [3]]
    assert fill([0, 1], [30, 2], 10) == [[0], [1]]  # longer than the budget: alone
    assert fill([], [], 10) == []


# ------------------------------------------------ micro-batches --------------------------------------------
def rollout(prompt, response, **values):
    made = Rollout(prompt, response, torch.zeros(len(response)), True)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_micro_batch_by_hand():
    a = rollout([1], [5, 6], advantage=0.5, old_logp=torch.tensor([-1.0, -2.0]))
    b = rollout([1], [7], advantage=-2.0, old_logp=torch.tensor([-3.0]))
    micro = MicroBatch([a, b], [0, 1], "cpu")
    assert micro.length_T.tolist() == [2, 2, 1]
    assert micro.mask_T.tolist() == [1, 1, 1]
    assert micro.advantage_T.tolist() == [0.5, 0.5, -2.0]
    assert micro.old_logp_T.tolist() == [-1, -2, -3]
    assert micro.ref_logp_T is None
    assert micro.per_token([True, False]).tolist() == [1, 1, 0]
    assert MicroBatch([a], [], "cpu", filler=True).mask_T.tolist() == [0, 0]


def test_a_rank_without_work_computes_the_shortest_sequence_with_weight_zero():
    policy, rollouts = make_policy(), random_rollouts(3)
    shortest = min(rollouts, key=lambda r: len(r.prompt_ids) + len(r.response_ids))
    policy.ranks, per_rank = 5, []
    for policy.rank in range(5):
        per_rank.append(list(policy.micro_batches(rollouts)))
    assert [len(micros) for micros in per_rank] == [1] * 5
    assert [micro.filler for (micro,) in per_rank] == [False] * 3 + [True] * 2
    for (micro,) in per_rank[3:]:
        assert micro.rollouts == [shortest] and micro.indices == [] and micro.mask_T.sum() == 0
    assert list(policy.micro_batches([])) == []


def test_pad_right_by_hand():
    # Rows are prompt + response without its last token; position t predicts token t + 1.
    # a: 1 2 | 5 6 7 -> row 1 2 5 6, tokens 5 6 7 are predicted by positions 1 2 3
    # b: 3 | 8       -> row 3 0 0 0 (padded), token 8 is predicted by its position 0, 4 in the flat table
    inputs, predict_from = pad_right([rollout([1, 2], [5, 6, 7]), rollout([3], [8])])
    assert inputs["input_ids"].tolist() == [[1, 2, 5, 6], [3, 0, 0, 0]]
    assert predict_from.tolist() == [1, 2, 3, 4]


def test_pack_by_hand():
    # One row of tokens: prompt 1 2, then 5 6 (of response 5 6 7), then 8 (of 8 9), which shares the prompt;
    # then prompt 3, whose response 4 has one token, so nothing of it goes in.
    a, b, c = rollout([1, 2], [5, 6, 7]), rollout([1, 2], [8, 9]), rollout([3], [4])
    inputs, predict_from = fast.pack([a, b, c])
    assert inputs["input_ids"].tolist() == [[1, 2, 5, 6, 8, 3]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0]]
    # attention sees the rows 1 2 5 6, 1 2 8 and 3, as indices of the tokens above
    assert inputs["unpack"].tolist() == [[0, 1, 2, 3], [0, 1, 4, 0], [5, 0, 0, 0]]
    # where each token stands among these rows; the shared prompt is read back from the first
    assert inputs["pack"].tolist() == [0, 1, 2, 3, 6, 8]
    # 5 6 7 are predicted by tokens 1 2 3, 8 9 by 1 4, 4 by 5
    assert predict_from.tolist() == [1, 2, 3, 1, 4, 5]


# ------------------------------------------------- log-probs -----------------------------------------------
def by_the_model_itself(model, rollouts, temperature=1.0):
    """(log-probs, entropies), both [T]: one response at a time through the model's own forward."""
    logps, entropies = [], []
    for r in rollouts:
        logits = model(input_ids=torch.tensor([r.prompt_ids + r.response_ids])).logits[0] / temperature
        distribution = logits[len(r.prompt_ids) - 1:-1].log_softmax(-1)
        logps.append(distribution.gather(-1, torch.tensor(r.response_ids)[:, None]).squeeze(-1))
        entropies.append(-(distribution.exp() * distribution).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def share_a_prompt(rollouts):
    for r in rollouts[2:]:
        r.prompt_ids = rollouts[1].prompt_ids
    return rollouts


def gradients_of(policy, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("rows", ["packed", "padded", "plain"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_head_equals_full_logits(temperature, chunked, rows, monkeypatch):
    """Log-probs to 1e-5, entropies and gradients to 1e-4, with chunks that cut responses in the middle."""
    policy, other = make_policy(plain=rows == "plain"), make_policy()
    if rows == "padded":  # what an architecture gets that cannot be packed
        policy.packed = False
        policy.model.set_attn_implementation("sdpa")
    other.model.set_attn_implementation("eager")
    if chunked:
        monkeypatch.setattr(fast.LogProbs, "ELEMENTS", {"cpu": 7 * policy.model.config.vocab_size})
    micro = next(policy.micro_batches(share_a_prompt(random_rollouts(6))))
    logp, entropy = policy.logprobs(micro, temperature)
    expected_logp, expected_entropy = by_the_model_itself(other.model, micro.rollouts, temperature)
    assert relative_error(logp, expected_logp) < 1e-5
    assert relative_error(entropy, expected_entropy) < 1e-4
    weights = torch.linspace(-1, 1, len(logp))
    got = gradients_of(policy, (weights * logp + entropy).sum())
    expected = gradients_of(other, (weights * expected_logp + expected_entropy).sum())
    assert relative_error(got, expected) < 1e-4


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3", "Gemma", "GPT2", "Bloom"])
def test_fast_head_equals_plain_head(tmp_path, name):
    """On random models in training mode: log-probs, entropies and gradients; dropout is off."""
    model = tiny_model(name, tmp_path)
    rollouts = share_a_prompt(random_rollouts(5, vocabulary=64))
    results = []
    for plain in (False, True):
        policy = make_policy(tmp_path, plain=plain)
        assert policy.head.training and type(policy.head).__name__ == ("PlainHead" if plain else "FastHead")
        micros = list(policy.micro_batches(rollouts))
        order = [i for micro in micros for i in micro.indices]
        (micro,) = micros
        logp, entropy = policy.logprobs(micro, 0.8)
        logps, entropies = logp.split(micro.sizes), entropy.split(micro.sizes)
        gradients = gradients_of(policy, (logp + 0.5 * entropy).sum())
        sort = sorted(range(5), key=order.__getitem__)
        logp, entropy = torch.cat([logps[i] for i in sort]), torch.cat([entropies[i] for i in sort])
        results.append((logp, entropy, gradients))
    (logp, entropy, gradients), (plain_logp, plain_entropy, plain_gradients) = results
    assert relative_error(logp, plain_logp) < 1e-5 and relative_error(entropy, plain_entropy) < 1e-5
    assert relative_error(gradients, plain_gradients) < 1e-4
    with torch.no_grad():
        expected, _ = by_the_model_itself(model, rollouts, 0.8)
    assert relative_error(logp, expected) < 1e-5


def test_packed_computes_every_prompt_once_and_no_padding():
    rollouts = random_rollouts(5)
    for r in rollouts:
        r.prompt_ids = rollouts[0].prompt_ids
    prompt, responses = len(rollouts[0].prompt_ids), [len(r.response_ids) for r in rollouts]
    for plain, expected in ((False, prompt + sum(responses) - 5), (True, 5 * (prompt + max(responses) - 1))):
        policy, seen = make_policy(plain=plain), []

        def hook(module, args, out, seen=seen):
            seen.append(out[..., 0].numel())

        policy.model.base_model.layers[0].mlp.register_forward_hook(hook)
        policy.logprobs(next(policy.micro_batches(rollouts)), 1.0)
        assert seen == [expected], plain


@pytest.mark.parametrize("window, packed", [(4, False), (3000, True)])
def test_a_window_shorter_than_the_responses_is_not_packed(tmp_path, window, packed):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, use_sliding_window=True,
                         sliding_window=window, max_window_layers=1)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    policy = make_policy(tmp_path)
    assert policy.packed == packed
    assert policy.model.config._attn_implementation == ("packed" if packed else "sdpa")


@pytest.mark.parametrize("kind, options", [
    ("Cohere", dict(logit_scale=0.0625)), ("Gemma2", dict(head_dim=16)), ("GPTJ", dict(rotary_dim=8))])
def test_a_model_with_other_logits_is_refused_and_plain_takes_it(tmp_path, kind, options):
    """Logits that are scaled, capped, or shifted by a bias of the head."""
    config = getattr(transformers, kind + "Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **options)
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="scales, caps or shifts its logits, .* give --plain"):
        make_policy(tmp_path)
    policy = make_policy(tmp_path, plain=True)
    micro = next(policy.micro_batches(random_rollouts(3, vocabulary=64)))
    with torch.no_grad():
        logp, _ = policy.logprobs(micro, 1.0)
        expected, _ = by_the_model_itself(policy.model, micro.rollouts)
    assert relative_error(logp, expected) < 1e-5


def test_gradient_checkpointing_changes_nothing():
    rollouts, gradients = random_rollouts(6), []
    for flag in (False, True):
        policy = make_policy(gradient_checkpointing=flag)
        assert policy.model.is_gradient_checkpointing == flag
        logp, _ = policy.logprobs(next(policy.micro_batches(rollouts)), 1.0)
        gradients.append(gradients_of(policy, -logp.mean()))
    assert relative_error(gradients[1], gradients[0]) < 1e-5


def test_entropy_of_a_flat_distribution():
    policy = make_policy()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.zero_()
    logp, entropy = policy.logprobs(next(policy.micro_batches(random_rollouts(2))), 1.0)
    expected = math.log(policy.model.config.vocab_size)  # all logits equal: uniform over the vocabulary
    assert relative_error(entropy, [expected] * len(entropy)) < 1e-5
    assert relative_error(logp, [-expected] * len(logp)) < 1e-5


def test_stop_token_is_trained_although_pad_is_eos(llama):
    """Masks come from lengths: with pad = eos a response's last token still gets its log-prob and weight."""
    policy = make_policy(llama)
    eos = policy.model.config.eos_token_id
    assert policy.model.config.pad_token_id == eos
    short, long = random_rollouts(2, shortest=5, longest=6)
    long.response_ids = long.response_ids * 4
    short.response_ids[-1] = eos
    micro = next(policy.micro_batches([short, long]))
    logp, _ = policy.logprobs(micro, 1.0)
    row = micro.rollouts.index(short)
    at = sum(micro.sizes[:row + 1]) - 1  # where the end of the short response lies
    expected, _ = by_the_model_itself(policy.model, [short])
    assert relative_error(logp[at], expected[-1]) < 1e-5
    assert float(micro.mask_T[at]) == 1 and float(micro.length_T[at]) == len(short.response_ids)


# -------------------------------------------------- scoring ------------------------------------------------
def test_scores_are_the_models_own_and_those_of_the_reference_leave_the_entropies():
    policy, rollouts = make_policy(micro_tokens=100), random_rollouts(6)
    policy.score_old(rollouts, 0.7)
    with torch.no_grad():
        logp, entropy = by_the_model_itself(policy.model, rollouts, 0.7)
        ref_logp, _ = by_the_model_itself(policy.model, rollouts, 1.0)
    entropies = [r.entropy for r in rollouts]
    policy.score_ref(rollouts, 1.0)
    assert relative_error(torch.cat([r.old_logp for r in rollouts]), logp) < 1e-5
    assert relative_error(torch.cat([r.ref_logp for r in rollouts]), ref_logp) < 1e-5
    assert relative_error(torch.cat(entropies), entropy) < 1e-5
    assert all(r.entropy is entropy for r, entropy in zip(rollouts, entropies))
    assert not any(r.ref_logp.requires_grad for r in rollouts)


# --------------------------------------------- the optimizer step ------------------------------------------
def test_two_optimizer_steps_by_hand(tmp_path):
    """Adam (Kingma & Ba 2015, Algorithm 1) with decoupled weight decay, after clipping the gradient's norm.

    The run's own policy; the rate comes with the step, as in the scripts."""
    run = common.Run(toy_args(ttrl, grad_clip=1.0, kl_coef=0.0, out=str(tmp_path / "run")))
    optimizer = torch.optim.AdamW(run.policy.parameters(), lr=1.0, weight_decay=0.1, fused=True)
    value = next(run.policy.parameters())
    expected, m, v = value.detach().clone(), 0.0, 0.0
    steps = [(1e-2, 2.0), (3e-2, 0.5)]  # the first gradient is clipped, the second is not
    for t, (rate, norm) in enumerate(steps, start=1):
        grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(t))
        grad *= norm / grad.norm()
        value.grad = grad.clone()
        assert run.policy.clip_grad_norm(run.args.grad_clip) == pytest.approx(norm, rel=1e-4)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        grad /= max(norm, 1.0)
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * grad ** 2
        m_hat, v_hat = m / (1 - 0.9 ** t), v / (1 - 0.999 ** t)
        expected -= rate * (0.1 * expected + m_hat / (v_hat.sqrt() + 1e-8))
    assert relative_error(value, expected) < 1e-5


def test_the_papers_learning_rate_moves_the_float32_weights():
    """5e-7 is below half a bfloat16 step of most weights: these would stand still."""
    policy = make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-7)
    before = [p.detach().clone() for p in policy.parameters()]
    logp, _ = policy.logprobs(next(policy.micro_batches(random_rollouts(6))), 1.0)
    logp.mean().backward()
    optimizer.step()
    moved, moved_in_bfloat16, weights = 0, 0, 0
    for p, old in zip(policy.parameters(), before):
        weights += old.numel()
        moved += int((p.detach() != old).sum())
        moved_in_bfloat16 += int((p.detach().bfloat16() != old.bfloat16()).sum())
    assert moved > 0.5 * weights and moved_in_bfloat16 < 0.01 * weights


# ---------------------------------------------- loading and saving -----------------------------------------
def test_policy_and_reference_come_from_one_read_and_part():
    loaded = load_model(common.TOY_MODEL)
    second = twin(loaded)
    pairs = list(zip(loaded.parameters(), second.parameters(), strict=True))
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert second.lm_head.weight is second.model.embed_tokens.weight  # still tied
    policy, reference = make_policy(loaded=loaded), make_policy(trainable=False, loaded=second)
    before = dict(make_policy().named_tensors(torch.float32))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    for (name, ours), theirs in zip(reference.named_tensors(torch.float32), policy.parameters()):
        assert torch.equal(ours, before[name]) and torch.equal(theirs, before[name] + 1), name


@pytest.mark.parametrize("source", ["tied", "untied"])
def test_saved_model_loads_and_is_the_same(tmp_path, llama, source):
    source = llama if source == "untied" else common.TOY_MODEL
    policy = make_policy(source)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.01)
    policy.save(tmp_path / "saved", AutoTokenizer.from_pretrained(source))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(5, 25)[None]
    assert torch.equal(loaded(ids).logits, policy.model.eval()(ids).logits)
    AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("damage, words", [
    ("missing", "1 are missing or of another shape, among them model.norm.weight; they would be random"),
    ("shape", "1 are missing or of another shape, among them model.norm.weight; they would be random"),
    ("cut", "its weights cannot be read"),
    ("gone", "its weights cannot be read")])
def test_a_model_file_that_lacks_tensors_is_refused(tmp_path, llama, damage, words):
    import shutil

    from safetensors.torch import load_file, save_file
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if damage == "missing":
        del tensors["model.norm.weight"]
    if damage == "shape":
        tensors["model.norm.weight"] = torch.ones(3)
    if damage == "gone":
        file.unlink()
    else:
        save_file(tensors, file, metadata={"format": "pt"})
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=words) as error:
        load_model(str(folder))
    assert str(error.value).startswith(f"--model is '{folder}', but its weights")
    assert "\n" not in str(error.value)
