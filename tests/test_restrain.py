"""RESTRAIN: formulas against numbers worked out by hand, the loss against Listing 1, and runs."""

import json
import math
import random

import pytest
import torch
from conftest import ROOT, read_lines, run_toy
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import restrain
import ttrl
from restrain import Args, gaussian_weight, label_sigma, label_weights, majority_count, prompt_weight
from restrain import restrain_advantages, restrain_surrogate, weighted_labels


def close(tensor, expected, tolerance=1e-5):
    return torch.allclose(tensor.double(), torch.tensor(expected).double(), atol=tolerance, rtol=0)


# ------------------------------------------------- formulas -----------------------------------------------
def test_gaussian_by_hand():
    # sigma 0.5: 2 sigma^2 = 0.5.  f = 0: exp(-1 / 0.5) = exp(-2).  f = 0.5: exp(-0.25 / 0.5) = exp(-0.5)
    assert close(gaussian_weight(torch.tensor([0.0, 0.5, 1.0]), 0.5), [0.135335, 0.606531, 1.0])
    # sigma 1: f = 0.5: exp(-0.25 / 2) = exp(-0.125)
    assert close(gaussian_weight(torch.tensor([0.5]), 1.0), [0.882497])


@pytest.mark.parametrize("sigma, expected", [
    (0.0, [0.0, 0.0, 1.0]),
    (1e-6, [0.0, 0.0, 1.0]),
    (1e-300, [0.0, 0.0, 1.0]),
    (math.inf, [1.0, 1.0, 1.0])])
def test_gaussian_extreme_sigma(sigma, expected):
    assert gaussian_weight(torch.tensor([0.0, 0.9375, 1.0]), sigma).tolist() == expected


def test_label_weights_by_hand():
    # Counts 8 and 8 x 1 of 16: g(1/2) = exp(-0.5) = 0.606531;
    # g(1/16) = exp(-(15/16)^2 / 0.5) = exp(-1.757813) = 0.172421.  Sum 0.606531 + 8 x 0.172421 = 1.985899:
    # the majority of 8 holds 0.305419 of the weight, each single answer 0.086823.
    assert close(label_weights([8] + [1] * 8, 16), [0.305419] + [0.086823] * 8)


def test_label_weights_with_sigma_zero_are_the_majority_vote():
    assert label_weights([1, 5, 2], 16, sigma=0).tolist() == [0.0, 1.0, 0.0]
    assert label_weights([2, 5, 5], 16, sigma=0).tolist() == [0.0, 1.0, 0.0]  # a tie: the first, as voted


@pytest.mark.parametrize("sigma", [1e-3, 1e-9, 1e-160, 1e-300])
def test_label_weights_stay_finite_for_a_tiny_sigma(sigma):
    # g itself is 0 for every label: the plain quotient would be 0 / 0
    assert label_weights([5, 1, 2], 16, sigma).tolist() == [1.0, 0.0, 0.0]
    assert label_weights([4, 4, 1], 16, sigma).tolist() == [0.5, 0.5, 0.0]  # the limit of Eq. 3


def test_label_weights_uniform_and_edges():
    assert close(label_weights([5, 1, 2], 16, math.inf), [1 / 3] * 3)
    assert close(label_weights([5, 1, 2], 16, 1e9), [1 / 3] * 3)
    assert label_weights([3], 16).tolist() == [1.0]
    for sigma in (0.0, 0.5, math.inf):
        assert label_weights([], 16, sigma).tolist() == []


def test_weighted_labels():
    # n = 4 counts the response without an answer: g(0.5) = 0.606531, g(0.25) = 0.324652
    assert weighted_labels([7, 4, 7, None]) == pytest.approx({7: 0.651355, 4: 0.348645}, abs=1e-6)
    assert weighted_labels([7, 4, 4, 7], sigma=0) == {7: 1.0, 4: 0.0}  # a tie: the answer seen first
    assert weighted_labels([None, None]) == {}


def test_label_sigma():
    assert label_sigma(Args()) == 0.5 and label_sigma(Args(sigma=0.25)) == 0.25
    assert label_sigma(Args(label_weighting="majority", sigma=0.25)) == 0
    assert label_sigma(Args(label_weighting="uniform", sigma=0.25)) == math.inf


def test_advantages_by_hand():
    # n = 4, counts 2 and 1: g(0.5) = exp(-0.5) = 0.606531, g(0.25) = exp(-1.125) = 0.324652; sum 0.931183,
    #   w = 0.651355, 0.348645.
    # Label 0: rewards 1 1 0 0, mean 0.5, unbiased std sqrt(4 x 0.25 / 3) = 0.577350: advantages +-0.866025.
    # Label 1: rewards 0 0 1 0, mean 0.25, std sqrt((3 x 0.0625 + 0.5625) / 3) = 0.5: advantages 1.5 and -0.5.
    # A+: 0.651355 x 0.866025 = 0.564090 (twice), 0.348645 x 1.5 = 0.522968, 0.
    # A-: 0.348645 x -0.5 = -0.174323 (twice), 0.651355 x -0.866025 = -0.564090, the sum of both = -0.738413.
    a_plus, a_minus = restrain_advantages([0, 0, 1, None], kappa=2)
    assert close(a_plus, [0.564090, 0.564090, 0.522968, 0.0])
    assert close(a_minus, [-0.174323, -0.174323, -0.564090, -0.738413])


def test_kappa_border():
    classes = [0, 0, 0, 1, 1, None]  # M = 3
    assert (restrain_advantages(classes, kappa=3)[0] > 0).any()  # M < kappa is false: no penalty
    a_plus, a_minus = restrain_advantages(classes, kappa=4, delta=1.5)
    assert a_plus.tolist() == [0.0] * 6 and a_minus.tolist() == [-1.5] * 6


def test_delta_zero_ignores_the_prompt():
    a_plus, a_minus = restrain_advantages([0, 1, 2, 3], kappa=3, delta=0)
    assert (a_plus == 0).all() and (a_minus == 0).all()


def test_no_answer_at_all():
    a_plus, a_minus = restrain_advantages([None] * 3, kappa=1, delta=2)  # M = 0 < 1
    assert a_plus.tolist() == [0.0] * 3 and a_minus.tolist() == [-2.0] * 3
    a_plus, a_minus = restrain_advantages([None] * 3, kappa=0)  # no penalty, no label: nothing to learn
    assert a_plus.tolist() == [0.0] * 3 and a_minus.tolist() == [0.0] * 3


def test_the_penalty_by_default():
    assert restrain_advantages([0, 1])[1].tolist() == [-1.0, -1.0]  # one vote each: fewer than kappa = 3


def test_agreement_of_all_teaches_nothing():
    a_plus, a_minus = restrain_advantages([0] * 4)
    assert a_plus.tolist() == a_minus.tolist() == [0.0] * 4


def test_majority_weighting_is_ttrl():
    classes = [1, 0, 0, None, 2, 1]  # tie: class 1 was seen first
    a_plus, a_minus = restrain_advantages(classes, kappa=0, sigma=0)
    expected = ttrl.group_advantages(ttrl.majority_reward(classes))
    assert torch.equal(a_plus + a_minus, expected) and torch.equal(a_plus, expected.clamp(min=0))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=2, max_size=12),
       st.sampled_from([0.0, 0.3, math.inf]))
def test_properties_of_any_votes(classes, sigma):
    labels = weighted_labels(classes, sigma)
    assert sum(labels.values()) == pytest.approx(1.0 if labels else 0.0, abs=1e-5)
    assert len(labels) == len(set(classes) - {None})
    by_votes = [labels[c] for c in sorted(labels, key=classes.count)]
    assert sigma == 0 or by_votes == sorted(by_votes)  # more votes never weigh less
    a_plus, a_minus = restrain_advantages(classes, 0, sigma=sigma)
    assert (a_plus >= 0).all() and (a_minus <= 0).all()
    assert float((a_plus + a_minus).sum()) == pytest.approx(0, abs=1e-4)  # centred, label by label


def test_prompt_weight_by_hand():
    assert prompt_weight(16, 16) == 1.0
    assert prompt_weight(8, 16) == pytest.approx(0.606531, abs=1e-6)  # exp(-0.25 / 0.5)
    assert prompt_weight(0, 16) == pytest.approx(0.135335, abs=1e-6)  # exp(-1 / 0.5): no answer keeps exp(-2)
    assert prompt_weight(8, 16, sigma=0) == 0.0 and prompt_weight(16, 16, sigma=0) == 1.0
    assert prompt_weight(1, 16, sigma=math.inf) == 1.0


@pytest.mark.parametrize("classes, count", [([], 0), ([None, None], 0), ([0, 1, 1, None], 2), ([0, 1, 2], 1)])
def test_majority_count(classes, count):
    assert majority_count(classes) == count


def test_paper_defaults():
    args = Args()
    assert args.errors() == []
    assert (args.sigma, args.delta, args.kappa, args.prompt_sigma) == (0.5, 1.0, 3, 0.5)
    assert (args.votes, args.train_samples, args.lr, args.epochs) == (16, 16, 1e-6, 20)
    assert (args.max_new_tokens, args.kl_coef, args.entropy_coef, args.temperature) == (4096, 0.001, 0.0, 1.0)


def test_good_borders():
    assert Args(kappa=16, sigma=0.0, delta=0.0).errors() == []
    assert Args(kappa=0, sigma=math.inf, prompt_sigma=0.0).errors() == []


# ---------------------------------- one pass for all labels = Listing 1 ----------------------------------
def listing_1(logp, old_logp, classes, lengths, weight, kappa, delta, sigma, clip_low, clip_high):
    """The paper's pseudo-code, label by label, response by response, token by token."""
    n = len(classes)
    counts = {}
    for c in classes:
        if c is not None:
            counts[c] = counts.get(c, 0) + 1

    def calculate_advantages(rewards):
        mean = sum(rewards) / n
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
        return [0.0 if std == 0 else (r - mean) / (std + 1e-6) for r in rewards]

    def calculate_loss(adv):
        loss, start = 0.0, 0
        for i in range(n):
            for t in range(start, start + lengths[i]):
                rho = torch.exp(logp[t] - old_logp[t])
                clipped = torch.clamp(rho, 1 - clip_low, 1 + clip_high)
                loss = loss - torch.minimum(rho * adv[i], clipped * adv[i]) / lengths[i] / n
            start += lengths[i]
        return loss

    if max(counts.values(), default=0) < kappa:
        return weight * calculate_loss([a - delta for a in calculate_advantages([0.0] * n)])
    g = {label: math.exp(-(count / n - 1) ** 2 / (2 * sigma ** 2)) for label, count in counts.items()}
    final_loss = torch.zeros((), dtype=logp.dtype)
    for label in counts:
        adv = calculate_advantages([1.0 if c == label else 0.0 for c in classes])
        final_loss = final_loss + g[label] / sum(g.values()) * calculate_loss(adv)
    return weight * final_loss


@pytest.mark.parametrize("seed", range(12))
def test_one_pass_equals_listing_1(seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n = draw.randint(2, 16)
    classes = [None if draw.random() < 0.2 else draw.randint(0, seed % 6) for _ in range(n)]
    lengths = [draw.randint(1, 8) for _ in range(n)]
    kappa, delta, sigma, weight = seed % 4, draw.uniform(0, 3), draw.uniform(0.2, 2), draw.uniform(0.1, 1)
    clip_low, clip_high = draw.uniform(0.05, 0.5), draw.uniform(0.05, 0.5)
    old = torch.randn(sum(lengths), dtype=torch.float64, generator=generator)
    step = torch.randn(sum(lengths), dtype=torch.float64, generator=generator)
    new = old + 0.5 * step  # ratios well beyond both borders

    slow_logp = new.clone().requires_grad_()
    slow = listing_1(slow_logp, old, classes, lengths, weight, kappa, delta, sigma, clip_low, clip_high)
    slow.backward()

    logp, lengths = new.clone().requires_grad_(), torch.tensor(lengths)
    plus, minus = restrain_advantages(classes, kappa, delta, sigma)
    rho = (logp - old).exp()
    clipped = rho.clamp(1 - clip_low, 1 + clip_high)
    plus_T, minus_T = plus.double().repeat_interleave(lengths), minus.double().repeat_interleave(lengths)
    loss_T = -weight * restrain_surrogate(rho, clipped, plus_T, minus_T)
    fast = (loss_T / (n * lengths).repeat_interleave(lengths)).sum()
    fast.backward()

    assert abs(slow.item() - fast.item()) < 1e-6
    assert torch.allclose(slow_logp.grad, logp.grad, atol=1e-6, rtol=0)


# ---------------------------------------------------- runs ------------------------------------------------
TINY = dict(steps=1, max_new_tokens=40)


@pytest.fixture
def weights_seen(monkeypatch):
    """{(step, problem id): u of its responses}, of the runs of a test."""
    seen, end_step = {}, common.Run.end_step

    def note(run, extra=None):
        for group in run.groups:
            assert len({response.weight for response in group["responses"]}) == 1
            seen[run.step, group["prompt"].id] = group["responses"][0].weight
        end_step(run, extra)

    monkeypatch.setattr(common.Run, "end_step", note)
    return seen


def test_stored_votes_weigh_the_prompts_of_a_resumed_run(tmp_path, weights_seen):
    problems, out = tmp_path / "problems.jsonl", tmp_path / "run"
    rows = read_lines(ROOT / "toy" / "train.jsonl")[:4]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = TINY | dict(dataset=str(problems), checkpoint_every=1)
    run_toy(restrain, out, **flags)
    votes = read_lines(out / "initial_votes.jsonl")
    assert [record["id"] for record in votes] == [0, 1, 2, 3]
    for record in votes:
        u = math.exp(-(record["votes"] / 8 - 1) ** 2 / 0.5)  # Eq. 5
        assert weights_seen[1, record["id"]] == pytest.approx(u)
    edited = [record | dict(votes=2 * record["id"]) for record in votes]
    (out / "initial_votes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in edited))
    lines = run_toy(restrain, out, **flags | dict(resume=True, steps=2))
    assert [line["step"] for line in lines] == [1, 2] and read_lines(out / "initial_votes.jsonl") == edited
    # 0, 2, 4 and 6 votes of 8: exp(-2), exp(-1.125), exp(-0.5), exp(-0.125)
    weights = [weights_seen[2, i] for i in range(4)]
    assert weights == pytest.approx([0.135335, 0.324652, 0.606531, 0.882497], abs=1e-6)


def test_weight_zero_means_no_gradient(tmp_path, monkeypatch):
    """u multiplies a prompt's whole loss, the KL term included."""
    def nobody(run):
        return {problem.id: (None, 0) for problem in run.problems}

    monkeypatch.setattr(restrain, "initial_votes", nobody)
    lines = run_toy(restrain, tmp_path / "run", **TINY | dict(steps=2, kl_coef=1.0), prompt_sigma=0.0)
    assert len(lines) == 2 and all(line["grad_norm"] == 0 and line["loss"] == 0 for line in lines)


def test_without_its_three_parts_it_is_ttrl(tmp_path):
    parts = dict(label_weighting="majority", kappa=0, prompt_weighting="none")
    ours = run_toy(restrain, tmp_path / "ours", **TINY | dict(steps=2), **parts)
    theirs = run_toy(ttrl, tmp_path / "theirs", **TINY | dict(steps=2))
    assert any(line["grad_norm"] > 0 for line in ours)
    for a, b in zip(ours, theirs, strict=True):
        for name in "loss grad_norm length kl entropy label_accuracy clip_fraction".split():
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


def test_a_penalised_batch_pushes_everything_down(tmp_path):
    flags = TINY | dict(prompt_weighting="none", kl_coef=0.0)
    line, = run_toy(restrain, tmp_path / "run", **flags, kappa=8, delta=0.5)
    # kappa is all of the votes: only prompts on which all agree are spared, and those teach nothing
    assert line["label_coverage"] < 1 and line["reward"] == pytest.approx(-0.5 * (1 - line["label_coverage"]))
