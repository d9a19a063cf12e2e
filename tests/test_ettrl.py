"""ettrl.py: the paper's equations against numbers worked out by hand, the tree against its trunks, and short runs."""

import doctest
import json
import math

import pytest
import torch

import common
import ettrl
import ttrl
from ettrl import TOY, Args, clip_advantages, fork_points, graft, reshape_advantages, token_ratio, tree_leaves, tree_rollouts

SMALL = {**TOY, "steps": 2, "votes": 8, "train_samples": 8, "prompts_per_batch": 4, "eval_samples": 4, "eval": "", "trunks": 2,
         "checkpoint_every": 0, "max_new_tokens": 48}


def run(out, method=ettrl, **flags):
    method.main(method.Args(**{**SMALL, "out": str(out), **flags}))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def close(got, expected, tolerance=1e-6):
    return torch.allclose(got.double(), torch.tensor(expected).double(), atol=tolerance, rtol=0)


# ------------------------------------------------------ formulas -----------------------------------------------------
@pytest.mark.parametrize("name", "fork_points tree_leaves token_ratio reshape_advantages clip_advantages".split())
def test_doctest(name):
    runner = doctest.DocTestRunner()
    tests = doctest.DocTestFinder().find(getattr(ettrl, name), name, globs=vars(ettrl).copy())
    assert sum(len(t.examples) for t in tests) > 0
    assert sum(runner.run(t).failed for t in tests) == 0


def test_leaves_by_hand():
    # Eq. 8: M (1 + B N). 12 (1 + 2 x 2) = 60; 3 (1 + 1 x 4) = 15; without forks the M trunks alone
    assert [tree_leaves(12, 2, 2), tree_leaves(3, 4, 1), tree_leaves(12, 0, 2), tree_leaves(1, 1, 1)] == [60, 15, 12, 2]


def test_token_ratio_by_hand():
    # Eq. 11: N 2, B 2: (1 + 0.5 x 4) / 5 = 3 / 5. N 3, B 2: (1 + 3) / 7 = 0.571 (the paper's text calls it 60%). N 0: 1
    assert token_ratio(2, 2) == pytest.approx(0.6)
    assert token_ratio(3, 2) == pytest.approx(4 / 7)
    assert token_ratio(0, 2) == 1.0
    # Eq. 10 written out, with M and Len cancelling: N 5, B 3
    longhand = 7 * 100 * (1 + 3 * sum(k / 6 for k in range(1, 6))) / (7 * 100 * (1 + 3 * 5))
    assert token_ratio(5, 3) == pytest.approx(longhand)


@pytest.mark.parametrize("logprobs,n,forbidden,expected", [
    ([-0.1, -2.0, -0.5, -3.0], 2, None, [3, 1]),  # surprisals 0.1 2 0.5 3, best first
    ([-0.1, -2.0, -0.5, -3.0], 2, {3}, [1, 2]),  # the end-of-sequence token is left out
    ([-1.0, -2.0, -2.0, -1.0], 3, None, [1, 2, 0]),  # ties to the earlier
    ([-1.0, -2.0], 5, None, [1, 0]),  # fewer where there are fewer
    ([-1.0], 2, {0}, []),  # a response that is only its end-of-sequence token
    ([], 2, None, []),
    ([-1.0, -2.0], 0, None, []),
])
def test_fork_points(logprobs, n, forbidden, expected):
    assert fork_points(logprobs, n, forbidden) == expected
    assert fork_points(torch.tensor(logprobs), n, forbidden) == expected


def test_reshape_by_hand():
    # H = 1.0 1.2 0.8 3.0, average 1.5. Y = 1 + (1.5 - H) / 1.5 = 1.333, 1.2, 1.467, 0: clipped to 0.8..1.2: 1.2 1.2 1.2 0.8
    advantages, entropies = torch.tensor([1.0, -0.5, 2.0, -1.0]), torch.tensor([1.0, 1.2, 0.8, 3.0])
    assert close(reshape_advantages(advantages, entropies), [1.2, -0.6, 2.4, -0.8])
    # alpha 0.9, beta 0.4: Y = 1.333, 1.2, 1.4, 0.1; both signs of A are scaled
    assert close(reshape_advantages(advantages, entropies, 0.9, 0.4), [4 / 3, -0.6, 2.8, -0.1])


def test_reshape_scales_down_above_average_entropy():
    # Eq. 12, against the sentence after Eq. 14. H = 0.9 1.1, average 1: Y = 1.1, 0.9
    assert close(reshape_advantages(torch.ones(2), torch.tensor([0.9, 1.1])), [1.1, 0.9])


def test_reshape_edges():
    advantages = torch.tensor([1.0, -1.0])
    assert reshape_advantages(advantages, torch.zeros(2)).tolist() == [1.0, -1.0]  # average 0: Y = 1
    assert reshape_advantages(advantages, torch.tensor([0.7, 0.7])).tolist() == [1.0, -1.0]
    assert reshape_advantages(advantages, torch.tensor([0.1, 5.0]), 0.0, 0.0).tolist() == [1.0, -1.0]
    assert reshape_advantages(torch.tensor([1.5]), torch.tensor([2.0])).tolist() == [1.5]


def test_clip_by_hand():
    assert clip_advantages(torch.tensor([-3.0, -2.0, 0.5, 5.48])).tolist() == [-2.0, -2.0, 0.5, 2.0]
    assert clip_advantages(torch.tensor([-3.0, 0.5]), 1.0).tolist() == [-1.0, 0.5]


# ------------------------------------------------------ the tree ----------------------------------------------------
def test_graft():
    trunk = common.Rollout([1, 2], [10, 11, 12, 13], torch.tensor([-0.1, -0.2, -0.3, -0.4]), True)
    branch = common.Rollout([1, 2, 10, 11], [20], torch.tensor([-0.9]), False)
    leaf = graft(trunk, 2, branch)
    assert leaf.prompt_ids == [1, 2] and leaf.response_ids == [10, 11, 20] and leaf.finished is False
    assert close(leaf.logprobs, [-0.1, -0.2, -0.9])
    assert graft(trunk, 0, branch).response_ids == [20]  # a fork at the first token shares the prompt alone


@pytest.mark.parametrize("score", ["surprisal", "entropy"])
def test_leaves_against_their_trunks(tmp_path, score):
    args = Args(**{**SMALL, "trunks": 3, "fork_score": score, "max_new_tokens": 40, "out": str(tmp_path / "run")})
    r = common.Run(args)
    calls, sample = [], r.sample
    r.sample = lambda *a, **k: calls.append((a, k)) or sample(*a, **k)
    problems = r.problems[:4]
    groups, cost = tree_rollouts(r, problems, args)

    assert len(calls) == 2  # trunks; all forks of all problems
    (prompts, n, keys), options = calls[1]
    assert n == 2 and len(prompts) == 4 * 3 * 2 and len(set(keys)) == len(keys)
    new_tokens = sum(len(r.response_ids) for g in groups for r in g[:3])
    for problem, group in zip(problems, groups):
        trunks, leaves = group[:3], group[3:]
        assert len(group) == tree_leaves(3, 2, 2)
        for m, trunk in enumerate(trunks):
            scores = trunk.logprobs if score == "surprisal" else -trunk.entropies
            expected = fork_points(scores.tolist(), 2, {len(trunk.response_ids) - 1} if trunk.finished else None)
            positions = [key[2] for key in keys if key[:2] == (problem.id, m)]
            assert positions == expected
            for k, t in enumerate(positions):
                request = keys.index((problem.id, m, t))
                assert prompts[request] == problem.prompt_ids + trunk.response_ids[:t]
                assert options["max_new_tokens"][request] == 40 - t
                for leaf in [leaves[i] for i in range(len(leaves)) if _point(problem, keys, i // 2) == (m, t)]:
                    assert leaf.prompt_ids == problem.prompt_ids
                    assert leaf.response_ids[:t] == trunk.response_ids[:t]
                    assert torch.equal(leaf.logprobs[:t], trunk.logprobs[:t])
                    new_tokens += len(leaf.response_ids) - t
        for leaf in group:
            assert 1 <= len(leaf.response_ids) == len(leaf.logprobs) <= 40
            assert leaf.finished == (leaf.response_ids[-1] in r.stop_ids)
            assert leaf.text == r.tokenizer.decode(leaf.response_ids, skip_special_tokens=True)
            assert leaf.answer == common.extract_answer(leaf.text)
    # The log: tokens generated over those of as many parallel responses of the trunks' mean length
    parallel = sum(15 * sum(len(r.response_ids) for r in g[:3]) / 3 for g in groups)
    assert cost["token_ratio"] == pytest.approx(new_tokens / parallel)
    assert 0 <= cost["fork_position"] < 1
    # The sampler's log-probs of a leaf are the trainer's of the whole response: prefix and branch fit together
    flat = [leaf for g in groups for leaf in g]
    r.policy.score(flat)
    assert max(float((leaf.logprobs - leaf.old_logprobs).abs().max()) for leaf in flat) < 1e-4


def _point(problem, keys, k):
    """Trunk and position of a problem's k-th fork."""
    return [key[1:] for key in keys if key[0] == problem.id][k]


def test_forks_follow_the_ranks_of_their_trunks(tmp_path):
    """Request j runs on rank j % ranks: with two ranks, forks of problem i (trunks on rank i % 2) stay on that rank."""
    args = Args(**{**SMALL, "out": str(tmp_path / "run")})
    r = common.Run(args)
    sample, seen = r.sample, []
    r.sample = lambda *a, **k: seen.append(a[2]) or sample(*a, **k)
    tree_rollouts(r, r.problems[:4], args)
    home = {key: j % 2 for j, key in enumerate(seen[0])}
    assert all(home[key[0]] == j % 2 for j, key in enumerate(seen[1]))


# ------------------------------------------------------ bad input ----------------------------------------------------
@pytest.mark.parametrize("flags,message", [
    (dict(trunks=0, train_samples=1), "--trunks is 0, but must be at least 1."),
    (dict(forks=-1, train_samples=1), "--forks is -1, but must be 0 or more."),
    (dict(branches=0, train_samples=1), "--branches is 0, but must be at least 1."),
    (dict(train_samples=61), "--train_samples is 61, but must be between 1 and 60, the leaves that vote."),
    (dict(forks=0), "--train_samples is 32, but must be between 1 and 12, the leaves that vote."),
    (dict(alpha=1.5), "--alpha is 1.5, but must be between 0 and 1."),
    (dict(beta=-0.1), "--beta is -0.1, but must be 0 or more."),
    (dict(bound=0.0), "--bound is 0.0, but must be above 0."),
])
def test_bad_flags(flags, message):
    assert message in Args(**flags).errors()


def test_only_the_flag_at_fault_is_named():
    assert len(Args(train_samples=61).errors()) == 1
    assert Args(votes=8).errors() == []  # the leaves vote: --votes does not matter ...
    assert len(Args(votes=8, rollout="parallel").errors()) == 1  # ... but here it does


def test_paper_defaults():
    assert Args().errors() == [] and Args(**TOY).errors() == []
    a = Args()
    assert (a.trunks, a.forks, a.branches, a.alpha, a.beta, a.bound) == (12, 2, 2, 0.2, 0.2, 2.0)
    assert (a.temperature, a.votes, a.train_samples, a.lr, a.max_new_tokens) == (0.6, 64, 32, 5e-7, 3072)


# ------------------------------------------------------ end to end ---------------------------------------------------
def test_run(tmp_path):
    metrics = run(tmp_path / "run")
    assert [m["step"] for m in metrics] == [1, 2] and (tmp_path / "run" / "final" / "config.json").exists()
    assert all(0 < m["token_ratio"] < 1.5 and math.isfinite(m["loss"]) for m in metrics)
    assert any(m["grad_norm"] > 0 for m in metrics)


def test_parallel_without_reshaping_is_ttrl(tmp_path):
    mine = run(tmp_path / "a", rollout="parallel", advantage="none")
    flags = {k: v for k, v in SMALL.items() if k != "trunks"}
    ttrl.main(ttrl.Args(**flags, out=str(tmp_path / "b")))
    other = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(mine, other, strict=True):
        assert all(a[k] == pytest.approx(b[k], abs=1e-6) for k in ("loss", "grad_norm", "reward", "length", "kl", "entropy"))


def test_reshaping_reaches_the_update(tmp_path):
    flags = dict(steps=1, kl_coef=0.0, rollout="parallel")
    none, one, res = (run(tmp_path / name, **flags, **more)[0]["grad_norm"] for name, more in (
        ("none", dict(advantage="none")), ("one", dict(alpha=0.0, beta=0.0)), ("res", dict(alpha=0.9, beta=0.9))))
    assert none == pytest.approx(one, abs=1e-6) and abs(none - res) > 1e-4


@pytest.mark.parametrize("flags", [dict(rollout="parallel"), dict(advantage="none"), dict(advantage="clip", bound=0.5),
                                   dict(fork_score="entropy"), dict(forks=0, trunks=8), dict(branches=1, forks=3),
                                   dict(old_logprobs="sampler"), dict(updates_per_batch=1)], ids=str)
def test_every_flag_runs(tmp_path, flags):
    metrics = run(tmp_path / "run", **{"steps": 1, "kl_coef": 0.0, **flags})
    assert len(metrics) == 1 and math.isfinite(metrics[0]["loss"])
    if flags.get("forks") == 0:
        assert metrics[0]["token_ratio"] == 1


def test_responses_shorter_than_the_number_of_forks(tmp_path):
    metrics = run(tmp_path / "run", steps=1, kl_coef=0.0, max_new_tokens=2, forks=6)  # 2 positions: 2 (1 + 2 x 2) = 10 leaves
    assert len(metrics) == 1 and metrics[0]["truncated"] == 1
