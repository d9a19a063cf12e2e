"""restrain.py: weights and advantages against numbers worked out by hand, the loss against the paper's Listing 1, and short runs."""

import doctest
import json
import math

import pytest
import torch

import restrain
import ttrl
from restrain import (
    TOY, Args, gaussian_weight, label_weights, majority_count, prompt_weight, restrain_advantages, restrain_surrogate)

SMALL = {**TOY, "steps": 2, "votes": 8, "train_samples": 8, "prompts_per_batch": 4, "eval_samples": 4, "eval": "", "kappa": 2,
         "checkpoint_every": 0, "max_new_tokens": 48}


def run(out, method=restrain, **flags):
    method.main(method.Args(**{**SMALL, "out": str(out), **flags}))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def close(got, expected, tolerance=1e-5):
    return torch.allclose(torch.as_tensor(got).double(), torch.tensor(expected).double(), atol=tolerance, rtol=0)


# ------------------------------------------------------ formulas -----------------------------------------------------
@pytest.mark.parametrize("name", ("gaussian_weight label_weights restrain_advantages restrain_surrogate prompt_weight "
                                  "majority_count").split())
def test_doctest(name):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    tests = finder.find(getattr(restrain, name), name, globs=vars(restrain).copy())
    assert sum(len(t.examples) for t in tests) > 0
    assert sum(runner.run(t).failed for t in tests) == 0


def test_gaussian_by_hand():
    # sigma 0.5: 2 sigma^2 = 0.5.  f = 0: exp(-1 / 0.5) = exp(-2).  f = 0.5: exp(-0.25 / 0.5) = exp(-0.5).  f = 1: 1.
    assert close(gaussian_weight(torch.tensor([0.0, 0.5, 1.0]), 0.5), [0.135335, 0.606531, 1.0])
    # sigma 1: f = 0.5: exp(-0.25 / 2) = exp(-0.125)
    assert close(gaussian_weight(torch.tensor([0.5]), 1.0), [0.882497])


@pytest.mark.parametrize("sigma,expected", [(0.0, [0.0, 0.0, 1.0]), (1e-6, [0.0, 0.0, 1.0]), (1e-300, [0.0, 0.0, 1.0]),
                                            (math.inf, [1.0, 1.0, 1.0])])
def test_gaussian_extreme_sigma(sigma, expected):
    assert gaussian_weight(torch.tensor([0.0, 0.9375, 1.0]), sigma).tolist() == expected


def test_label_weights_by_hand():
    # counts 8 and 8 x 1 of 16: g(1/2) = exp(-0.5) = 0.606531; g(1/16) = exp(-(15/16)^2 / 0.5) = exp(-1.757813) = 0.172421.
    # Sum 0.606531 + 8 x 0.172421 = 1.985899: the majority of 8 holds 0.305419 of the weight, each single answer 0.086823.
    assert close(label_weights([8] + [1] * 8, 16), [0.305419] + [0.086823] * 8)


def test_label_weights_with_sigma_zero_are_the_majority_vote():
    assert label_weights([1, 5, 2], 16, sigma=0).tolist() == [0.0, 1.0, 0.0]
    assert label_weights([2, 5, 5], 16, sigma=0).tolist() == [0.0, 1.0, 0.0]  # a tie: the first, as in the vote


@pytest.mark.parametrize("sigma", [1e-3, 1e-9, 1e-160, 1e-300])
def test_label_weights_stay_finite_for_a_tiny_sigma(sigma):
    # g itself is 0 for every label: the plain quotient would be 0 / 0
    assert label_weights([5, 1, 2], 16, sigma).tolist() == [1.0, 0.0, 0.0]
    assert label_weights([4, 4, 1], 16, sigma).tolist() == [0.5, 0.5, 0.0]  # the limit of Eq. 3 for equal counts


def test_label_weights_uniform_and_edges():
    assert close(label_weights([5, 1, 2], 16, math.inf), [1 / 3] * 3)
    assert close(label_weights([5, 1, 2], 16, 1e9), [1 / 3] * 3)
    assert label_weights([3], 16).tolist() == [1.0]
    for sigma in (0.0, 0.5, math.inf):
        assert label_weights([], 16, sigma).tolist() == []


def test_advantages_by_hand():
    # n = 4, counts 2 and 1: g(0.5) = exp(-0.5) = 0.606531, g(0.25) = exp(-1.125) = 0.324652; sum 0.931183,
    #   w = 0.651355, 0.348645.
    # Label 0: rewards 1 1 0 0, mean 0.5, unbiased std sqrt(4 x 0.25 / 3) = 0.577350: advantages +-0.866025.
    # Label 1: rewards 0 0 1 0, mean 0.25, std sqrt((3 x 0.0625 + 0.5625) / 3) = 0.5: advantages 1.5 and -0.5.
    # A+: 0.651355 x 0.866025 = 0.564090 (twice), 0.348645 x 1.5 = 0.522968, 0.
    # A-: 0.348645 x -0.5 = -0.174323 (twice), 0.651355 x -0.866025 = -0.564090, -0.564090 - 0.174323 = -0.738413.
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


def test_agreement_of_all_teaches_nothing():
    assert [a.tolist() for a in restrain_advantages([0] * 4)] == [[0.0] * 4] * 2


def test_majority_weighting_is_ttrl():
    classes = [1, 0, 0, None, 2, 1]  # tie: class 1 was seen first
    a_plus, a_minus = restrain_advantages(classes, kappa=0, sigma=0)
    expected = ttrl.group_advantages(ttrl.majority_reward(classes))
    assert torch.equal(a_plus + a_minus, expected) and torch.equal(a_plus, expected.clamp(min=0))


def test_prompt_weight_by_hand():
    assert prompt_weight(16, 16) == 1.0
    assert prompt_weight(8, 16) == pytest.approx(0.606531, abs=1e-6)  # exp(-0.25 / 0.5)
    assert prompt_weight(0, 16) == pytest.approx(0.135335, abs=1e-6)  # exp(-1 / 0.5): no answer at all keeps exp(-2)
    assert prompt_weight(8, 16, sigma=0) == 0.0 and prompt_weight(16, 16, sigma=0) == 1.0
    assert prompt_weight(1, 16, sigma=math.inf) == 1.0


def test_majority_count():
    assert [majority_count(c) for c in ([], [None, None], [0, 1, 1, None], [0, 1, 2])] == [0, 0, 2, 1]


# -------------------------------------- one pass for all labels = Listing 1 -------------------------------------------
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
    generator = torch.Generator().manual_seed(seed)
    rand = lambda low, high: float(low + (high - low) * torch.rand(1, generator=generator))  # noqa: E731
    n = int(rand(2, 17))
    classes = [None if rand(0, 1) < 0.2 else int(rand(0, 1 + seed % 6)) for _ in range(n)]
    lengths = [int(rand(1, 9)) for _ in range(n)]
    kappa, delta, sigma, weight = seed % 4, rand(0, 3), rand(0.2, 2), rand(0.1, 1)
    clip_low, clip_high = rand(0.05, 0.5), rand(0.05, 0.5)
    old = torch.randn(sum(lengths), dtype=torch.float64, generator=generator)
    new = old + 0.5 * torch.randn(sum(lengths), dtype=torch.float64, generator=generator)  # ratios well beyond both borders

    slow_logp = new.clone().requires_grad_()
    slow = listing_1(slow_logp, old, classes, lengths, weight, kappa, delta, sigma, clip_low, clip_high)
    slow.backward()

    logp, spread = new.clone().requires_grad_(), torch.tensor(lengths)
    a_plus, a_minus = (a.double().repeat_interleave(spread) for a in restrain_advantages(classes, kappa, delta, sigma))
    rho = (logp - old).exp()
    clipped = rho.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * restrain_surrogate(rho, clipped, a_plus, a_minus)
    fast = (loss / (n * spread).repeat_interleave(spread)).sum()
    fast.backward()

    assert abs(slow.item() - fast.item()) < 1e-6
    assert torch.allclose(slow_logp.grad, logp.grad, atol=1e-6, rtol=0)


# ------------------------------------------------------ bad input ----------------------------------------------------
@pytest.mark.parametrize("flags,message", [
    (dict(kappa=17), "--kappa is 17, but must be between 0 and --votes, 16."),
    (dict(kappa=-1), "--kappa is -1, but must be between 0 and --votes, 16."),
    (dict(delta=-0.5), "--delta is -0.5, but must be a finite number, 0 or more."),
    (dict(delta=math.inf), "--delta is inf, but must be a finite number, 0 or more."),
    (dict(sigma=-1.0), "--sigma is -1.0, but must be 0 or more, or inf."),
    (dict(sigma=math.nan), "--sigma is nan, but must be 0 or more, or inf."),
    (dict(prompt_sigma=-2.0), "--prompt_sigma is -2.0, but must be 0 or more, or inf."),
])
def test_bad_flags(flags, message):
    assert Args(**flags).errors() == [message]


def test_good_borders():
    assert Args().errors() == [] and Args(**TOY).errors() == []
    assert Args(kappa=16, sigma=0.0, delta=0.0).errors() == [] and Args(kappa=0, sigma=math.inf, prompt_sigma=0.0).errors() == []


def test_paper_defaults():
    a = Args()
    assert (a.votes, a.train_samples, a.lr, a.episodes, a.max_new_tokens, a.kl_coef, a.entropy_coef, a.temperature) == (
        16, 16, 1e-6, 20, 4096, 0.001, 0.0, 1.0)
    assert (a.sigma, a.delta, a.kappa) == (0.5, 1.0, 3)


# ------------------------------------------------------ end to end ---------------------------------------------------
def test_run_and_resume_with_the_stored_weights(tmp_path):
    metrics = run(tmp_path / "run", checkpoint_every=1)
    assert [m["step"] for m in metrics] == [1, 2] and (tmp_path / "run" / "final" / "config.json").exists()
    path = tmp_path / "run" / "prompt_weights.json"
    weights = json.loads(path.read_text())
    assert len(weights) == len(restrain.common.load_problems("toy", quiet=True)) and all(0.135 < w <= 1 for w in weights)
    assert 0.135 < metrics[0]["prompt_weight"] <= 1 and 0 <= metrics[0]["penalised"] <= 1
    path.write_text(json.dumps([0.25] * len(weights)))
    metrics = run(tmp_path / "run", checkpoint_every=1, resume=True, steps=3)
    assert metrics[2]["step"] == 3 and metrics[2]["prompt_weight"] == 0.25


def test_weight_zero_means_no_gradient(tmp_path):
    """u multiplies a prompt's whole loss, the KL term included."""
    problems = len(restrain.common.load_problems("toy", quiet=True))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "prompt_weights.json").write_text(json.dumps([0.0] * problems))
    metrics = run(tmp_path / "run", resume=True, kl_coef=1.0, weight_decay=0.0)
    assert all(m["grad_norm"] == 0 and m["loss"] == 0 for m in metrics)


def test_without_its_three_parts_it_is_ttrl(tmp_path):
    mine = run(tmp_path / "a", label_weighting="majority", kappa=0, prompt_weighting="none")
    flags = {k: v for k, v in SMALL.items() if k != "kappa"}
    ttrl.main(ttrl.Args(**flags, out=str(tmp_path / "b")))
    other = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(mine, other, strict=True):
        assert all(a[k] == pytest.approx(b[k], abs=1e-5) for k in ("loss", "grad_norm", "reward", "length", "kl", "entropy"))
    assert any(m["grad_norm"] > 0 for m in mine)


@pytest.mark.parametrize("flags", [dict(label_weighting="uniform"), dict(prompt_weighting="online"), dict(sigma=0.0), dict(sigma=math.inf),
                                   dict(delta=0.0), dict(kappa=8), dict(kappa=0), dict(train_samples=4)], ids=str)
def test_every_ablation_runs(tmp_path, flags):
    metrics = run(tmp_path / "run", **{"steps": 1, "prompt_weighting": "none", "kl_coef": 0.0, **flags})
    assert len(metrics) == 1 and math.isfinite(metrics[0]["loss"])
    if flags.get("kappa") == 8:
        assert metrics[0]["penalised"] > 0
    if flags.get("kappa") == 0:
        assert metrics[0]["penalised"] == 0
