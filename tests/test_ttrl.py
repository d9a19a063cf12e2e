"""TTRL: formulas against hand-worked numbers, the update against plain autograd, and learning on the toy."""

import json
import math
import shutil

import pytest
import torch
from conftest import make_policy, random_rollouts, run_toy

import common
import ttrl
from ttrl import group_advantages, majority_reward


# ---- formulas -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("classes, expected", [
    ([0, 1, 0, 2], [1, 0, 1, 0]),          # two of four
    ([0, 1, 1, 0], [1, 0, 0, 1]),          # tie: the class seen first wins
    ([None, None, 0], [0, 0, 1]),          # None never votes, even as the most frequent
    ([None, None], [0, 0]),                # all None: zeros
    ([0], [1])])
def test_majority_reward(classes, expected):
    assert majority_reward(classes).tolist() == expected


def test_group_advantages_by_hand():
    # rewards 1, 0, 0: mean 1/3; deviations 2/3, -1/3, -1/3; unbiased variance (4/9 + 1/9 + 1/9) / 2 = 1/3, std 0.57735
    # advantages: 0.66667 / 0.57735 = 1.15470 and -0.33333 / 0.57735 = -0.57735
    assert group_advantages(torch.tensor([1.0, 0.0, 0.0])).tolist() == pytest.approx([1.15470, -0.57735, -0.57735], abs=1e-4)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0], [0.3, 0.3]])
def test_group_advantages_without_spread_are_zero(rewards):
    assert group_advantages(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_k3_by_hand():
    # log-prob -1, reference -1.5: d = -0.5, exp(-0.5) + 0.5 - 1 = 0.106531
    assert float(common.k3(torch.tensor(-1.0), torch.tensor(-1.5))) == pytest.approx(0.106531, abs=1e-5)
    assert float(common.k3(torch.tensor(-1.0), torch.tensor(-1.0))) == 0


# ---- the update -----------------------------------------------------------------------------------------------------
def slow_loss(policy, rollouts, args, reference=None):
    """The objective as printed, one response and one token at a time, by plain autograd on full logits."""
    total = 0.0
    tokens = sum(len(r.response_ids) for r in rollouts)
    for r in rollouts:
        logits = policy.model(input_ids=torch.tensor([r.prompt_ids + r.response_ids])).logits[0] / args.temperature
        terms = []
        for t, token in enumerate(r.response_ids):
            distribution = torch.log_softmax(logits[len(r.prompt_ids) - 1 + t], -1)
            rho = torch.exp(distribution[token] - r.old_logprobs[t])
            surrogate = torch.minimum(rho * r.advantage, rho.clamp(1 - args.clip_low, 1 + args.clip_high) * r.advantage)
            d = r.ref_logprobs[t] - distribution[token]
            entropy = -(distribution.exp() * distribution).sum()
            terms.append(-surrogate + args.kl_coef * (d.exp() - d - 1) - args.entropy_coef * entropy)
        total = total + (sum(terms) / len(terms) / len(rollouts) if args.loss_aggregation == "sequence" else sum(terms) / tokens)
    return total


def fast_backward(policy, rollouts, args):
    """The loop of ttrl.py, up to the optimizer step."""
    losses = []
    for micro in policy.micro_batches(rollouts):
        logp, entropy = policy.logprobs(micro, entropy_grad=args.entropy_coef > 0)
        rho = (logp - micro.old_logprobs).exp()
        clipped = rho.clamp(1 - args.clip_low, 1 + args.clip_high)
        loss = -micro.tis * torch.min(rho * micro.advantages, clipped * micro.advantages)
        loss = loss + args.kl_coef * common.k3(logp, micro.ref_logprobs) - args.entropy_coef * entropy
        policy.backward(micro, loss)
        losses.append(float((loss * micro.weights).sum().detach()))
    return sum(losses), {n: p.grad.clone() for n, p in policy.model.named_parameters()}


def prepared(policy, count=12):
    rollouts = random_rollouts(count)
    policy.score(rollouts)
    generator = torch.Generator().manual_seed(0)
    for r in rollouts:  # ratios on both sides of the clip range, and a reference that differs
        r.ref_logprobs = r.old_logprobs + 0.2 * torch.randn(len(r.response_ids), generator=generator)
        r.old_logprobs = r.old_logprobs + 0.3 * torch.randn(len(r.response_ids), generator=generator)
    return rollouts


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_update_equals_plain_autograd_and_every_cut(aggregation):
    options = dict(temperature=0.7, kl_coef=0.1, entropy_coef=0.05, clip_high=0.28, loss_aggregation=aggregation)
    policy = make_policy(**options)
    args, rollouts = policy.args, prepared(policy)
    slow = slow_loss(policy, rollouts, args)
    slow.backward()
    expected = {n: p.grad.clone() for n, p in policy.model.named_parameters()}
    for budget in (10 ** 6, 200, 1):  # one micro-batch, several, one response each
        policy.optimizer.zero_grad()
        args.micro_tokens = budget
        loss, gradients = fast_backward(policy, rollouts, args)
        assert loss == pytest.approx(float(slow.detach()), abs=1e-5)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[name], atol=1e-5, rtol=1e-4), (name, budget)


def test_stop_token_is_trained_although_pad_is_eos(llama):
    """Masks come from lengths: with pad = eos the last token of a response still gets its gradient."""
    policy = make_policy(llama)
    eos = policy.model.config.eos_token_id
    assert policy.model.config.pad_token_id == eos
    short, long = random_rollouts(2, shortest=5, longest=6)
    long.response_ids = long.response_ids * 4
    short.response_ids[-1] = eos
    micro = next(policy.micro_batches([short, long]))
    logp, _ = policy.logprobs(micro)
    row = micro.rollouts.index(short)
    at = int(micro.lengths[:row + 1].sum()) - 1  # where the end of the short response lies
    full = policy.model(input_ids=torch.tensor([short.prompt_ids + short.response_ids])).logits[0]
    expected = torch.log_softmax(full[len(short.prompt_ids) + len(short.response_ids) - 2], -1)[eos]
    assert float(logp[at]) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert float(micro.weights[at]) == pytest.approx(1 / (2 * len(short.response_ids)))


def test_small_learning_rate_moves_the_float32_weights():
    policy = make_policy(lr=5e-7)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    fast_backward(policy, prepared(policy), policy.args)
    policy.step(5e-7)
    moved = sum(int((p.detach() != before[n]).sum()) for n, p in policy.model.named_parameters())
    total = sum(p.numel() for p in before.values())
    assert moved > 0.5 * total


def test_non_finite_gradient_is_skipped():
    policy = make_policy()
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    micro = next(policy.micro_batches(random_rollouts(3)))
    logp, _ = policy.logprobs(micro)
    policy.backward(micro, logp * math.nan)
    policy.step(1e-3)
    assert policy.bad_steps == 1
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())


# ---- the script -----------------------------------------------------------------------------------------------------
def strip(lines):
    return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "tokens_per_second/"))} for line in lines]


def test_equal_seeds_give_equal_runs_and_the_saved_model_scores_the_same(tmp_path):
    options = dict(eval="train", eval_samples=4)
    first = run_toy(ttrl, tmp_path / "a", **options)
    assert strip(first) == strip(run_toy(ttrl, tmp_path / "b", **options))
    other = run_toy(ttrl, tmp_path / "c", seed=2)
    assert other[-1]["reward"] != first[-1]["reward"]
    for name in ("run.json", "samples.jsonl", "tensorboard", "final/model.safetensors", "curves.png"):
        assert (tmp_path / "a" / name).exists(), name
    # the final model, loaded again, gives the same evaluation
    again = run_toy(ttrl, tmp_path / "d", model=str(tmp_path / "a/final"), steps=1, lr=0.0, **options)
    assert again[0]["eval/train/pass@1"] == first[-1]["eval/train/pass@1"]


@pytest.mark.parametrize("options", [
    dict(labels="gold"), dict(labels="offline"), dict(easy_fraction=0.25), dict(loss_aggregation="token"), dict(kl_coef=0.0),
    dict(entropy_coef=0.01), dict(old_logprobs="sampler", tis_cap=2.0), dict(updates_per_batch=1), dict(train_samples=4),
    dict(prompt="plain"), dict(prompt="suffix"), dict(gradient_checkpointing=True), dict(attention="eager"),
    dict(updates_per_batch=8, temperature=0.6)])
def test_flags_run(tmp_path, options):
    lines = run_toy(ttrl, tmp_path / "run", steps=1, **options)
    assert math.isfinite(lines[-1]["loss"]) and lines[-1]["sync_max"] < 1e-3


def test_another_architecture_on_a_real_file(tmp_path, llama):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"id": i, "problem": f"Find $x$ if $x + {i} = {3 * i}$.", "answer": str(2 * i)}) + "\n"
                            for i in range(8)))
    lines = run_toy(ttrl, tmp_path / "run", model=str(llama), dataset=str(path), max_prompt_tokens=512)
    assert lines[-1]["step"] == 2 and lines[-1]["sync_max"] < 1e-3


@pytest.mark.parametrize("flags, words", [
    (dict(model="no/such/folder"), "--model is 'no/such/folder'"),
    (dict(dataset="no_such_benchmark"), "unknown benchmark 'no_such_benchmark'"),
    (dict(question_field="text"), "--question_field is 'text'"),
    (dict(votes=4, train_samples=8), "--train_samples is 8, but must be at most --votes, 4"),
    (dict(max_new_tokens=-1), "--max_new_tokens is -1, but must be at least 1"),
    (dict(max_new_tokens=5000), "context of"),
    (dict(max_prompt_tokens=5), "more than --max_prompt_tokens 5"),
    (dict(prompts_per_batch=500), "a batch never holds a problem twice"),
    (dict(easy_fraction=0.0), "--easy_fraction is 0.0")])
def test_bad_input_is_one_sentence(tmp_path, flags, words):
    with pytest.raises(common.UserError, match=words.replace("(", r"\(")):
        run_toy(ttrl, tmp_path / "run", **flags)


def test_unfit_tokenizers_and_engines_are_one_sentence(tmp_path, llama, monkeypatch):
    from transformers import AutoTokenizer
    for name, words in (("template", "has no chat template; give --prompt plain"), ("eos", "has no end-of-sequence token")):
        shutil.copytree(llama, tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(llama)
        if name == "template":
            tokenizer.chat_template = None
        else:
            tokenizer.eos_token = None
            (tmp_path / name / "generation_config.json").unlink()
        for file in (tmp_path / name).glob("chat_template*"):
            file.unlink()
        tokenizer.save_pretrained(tmp_path / name)
        with pytest.raises(common.UserError, match=words):
            run_toy(ttrl, tmp_path / "run", model=str(tmp_path / name))
    monkeypatch.setattr(common, "has_vllm", lambda: False)
    with pytest.raises(common.UserError, match="--sampler is 'vllm', but vllm does not import here"):
        run_toy(ttrl, tmp_path / "run", sampler="vllm")


def test_learning_and_that_the_test_can_fail(tmp_path, monkeypatch):
    """Gold-rewarded GRPO must raise pass@1 well above the start; with the reward's sign turned it must fall below it."""
    options = dict(steps=12, prompts_per_batch=16, votes=16, train_samples=16, labels="gold", eval="train", eval_samples=8, eval_every=0)
    lines = run_toy(ttrl, tmp_path / "right", **options)
    start, end = lines[0]["eval/train/pass@1"], lines[-1]["eval/train/pass@1"]
    assert end > start + 0.08
    monkeypatch.setattr(ttrl, "majority_reward", lambda classes: 1 - majority_reward(classes))
    wrong = run_toy(ttrl, tmp_path / "wrong", **options)
    assert wrong[-1]["eval/train/pass@1"] < start
