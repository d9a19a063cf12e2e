"""ETTRL: the equations against numbers worked out by hand, the tree against its trunks, and runs."""

from types import SimpleNamespace

import pytest
import torch
from conftest import run_toy, toy_args
from equations import relative_error

import common
import ettrl
import ttrl
from ettrl import Args, Fork, choose_forks, clip_advantages, fork_points, graft
from ettrl import reshape_advantages, reshape_by_entropy, tree_cost, tree_leaves, tree_rollouts


def close(tensor, expected, tolerance=1e-6):
    return torch.allclose(tensor.double(), torch.tensor(expected).double(), atol=tolerance, rtol=0)


# ------------------------------------------------- formulas -----------------------------------------------
@pytest.mark.parametrize("m, n, b, expected", [
    (12, 2, 2, 60),    # Eq. 8: M (1 + B N) = 12 (1 + 2 x 2)
    (3, 4, 1, 15),
    (12, 0, 2, 12),    # without forks the M trunks alone
    (1, 1, 1, 2)])
def test_leaves_by_hand(m, n, b, expected):
    assert tree_leaves(m, n, b) == expected
    args = Args(trunks=m, forks=n, branches=b, train_samples=1)
    assert args.responses_per_prompt() == expected and args.errors() == []


def test_only_what_votes_limits_the_trained_ones():
    assert Args(votes=8).errors() == []  # the leaves vote: --votes does not matter ...
    assert len(Args(votes=8, rollout="parallel").errors()) == 1  # ... but here it does
    assert len(Args(train_samples=61).errors()) == 1


def test_paper_defaults():
    args = Args()
    assert args.errors() == []
    assert (args.trunks, args.forks, args.branches) == (12, 2, 2)
    assert (args.alpha, args.beta, args.bound, args.temperature) == (0.2, 0.2, 2.0, 0.6)
    assert (args.votes, args.train_samples, args.lr, args.max_new_tokens) == (64, 32, 5e-7, 3072)


@pytest.mark.parametrize("logprobs, n, forbidden, expected", [
    ([-0.1, -2.0, -0.5, -3.0], 2, None, [3, 1]),     # surprisals 0.1 2 0.5 3, best first
    ([-0.1, -2.0, -0.5, -3.0], 2, {3}, [1, 2]),      # the end-of-sequence token is left out
    ([-1.0, -2.0, -2.0, -1.0], 3, None, [1, 2, 0]),  # ties to the earlier
    ([-1.0, -2.0], 5, None, [1, 0]),                 # fewer if there are fewer
    ([-1.0], 2, {0}, []),                            # a response that is only its end-of-sequence token
    ([], 2, None, []),
    ([-1.0, -2.0], 0, None, [])])
def test_fork_points(logprobs, n, forbidden, expected):
    assert fork_points(logprobs, n, forbidden) == expected


def test_reshape_by_hand():
    # H = 1.0 1.2 0.8 3.0, average 1.5. Y = 1 + (1.5 - H) / 1.5 = 1.333, 1.2, 1.467, 0: clipped to 0.8 .. 1.2
    advantages, entropies = torch.tensor([1.0, -0.5, 2.0, -1.0]), torch.tensor([1.0, 1.2, 0.8, 3.0])
    assert close(reshape_advantages(advantages, entropies), [1.2, -0.6, 2.4, -0.8])
    # alpha 0.9, beta 0.4: Y = 1.333, 1.2, 1.4, 0.1; both signs of A are scaled
    assert close(reshape_advantages(advantages, entropies, 0.9, 0.4), [4 / 3, -0.6, 2.8, -0.1])


def test_reshape_scales_down_above_average_entropy():
    # Eq. 12, against the text after Eq. 14. H = 0.9 1.1, average 1: Y = 1.1, 0.9
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


@pytest.mark.parametrize("flags, entropies, expected", [
    # H_i, means over tokens: 0.5 and 1.5, average 1: Y = 1.5, 0.5, clipped to 1.2 and 0.8
    (dict(), ([0.25, 0.75], [1.5]), [3.6, -3.2]),
    # 0.9 and 1.1: Y = 1.1, 0.9, clipped to 1.05 and 0.95
    (dict(alpha=0.05, beta=0.05), ([0.3, 1.5], [1.1]), [3.15, -3.8]),
    (dict(advantage="clip"), ([0.3, 1.5], [1.1]), [2.0, -2.0]),
    (dict(advantage="clip", bound=3.5), ([0.3, 1.5], [1.1]), [3.0, -3.5]),
    (dict(advantage="none"), ([0.3, 1.5], [1.1]), [3.0, -4.0])])
def test_reshaping_is_not_by_a_groups_entropies(flags, entropies, expected):
    trained = []
    for h_T, advantage in zip(entropies, [3.0, -4.0]):
        one = common.Rollout([1], [2] * len(h_T), None, True, entropy=torch.tensor(h_T), advantage=advantage)
        trained.append(one)
    reshape_by_entropy(trained, Args(**flags))
    assert close(torch.tensor([one.advantage for one in trained]), expected)


# ------------------------------------------------- the tree -----------------------------------------------
def rollout(ids, finished=True, logprobs=None) -> common.Rollout:
    logprobs = torch.zeros(len(ids)) if logprobs is None else torch.tensor(logprobs)
    return common.Rollout([1, 2], ids, logprobs, finished)


def test_graft():
    trunk = rollout([10, 11, 12, 13], logprobs=[-0.1, -0.2, -0.3, -0.4])
    branch = common.Rollout([1, 2, 10, 11], [20], torch.tensor([-0.9]), False)
    leaf = graft(trunk, 2, branch)
    assert leaf.prompt_ids == [1, 2] and leaf.response_ids == [10, 11, 20] and leaf.finished is False
    assert close(leaf.logprobs, [-0.1, -0.2, -0.9])
    assert graft(trunk, 0, branch).response_ids == [20]  # a fork at the first token shares the prompt alone


def test_forks_take_turns():
    """The first forks of all prompts, then the second ones, and so on; best first."""
    groups = [[rollout([5, 6, 7], logprobs=[-1.0, -3.0, -9.0]), rollout([5, 6], False, [-1.0, -2.0])],
              [rollout([5, 6, 7, 8], logprobs=[-4.0, -3.0, -5.0, -9.0]), rollout([9])]]
    # 9.0 is the surprisal of an end of the text: no place to fork. The last trunk is nothing else.
    forks = choose_forks(None, groups, Args(trunks=2, forks=2))
    assert forks == [Fork(0, 0, 1), Fork(1, 0, 2), Fork(0, 0, 0), Fork(1, 0, 0), Fork(0, 1, 1), Fork(0, 1, 0)]


@pytest.mark.parametrize("length, n, b", [(3, 2, 2), (4, 3, 2), (6, 5, 3), (5, 0, 2)])
def test_cost_of_evenly_spread_forks_is_eq_11(length, n, b):
    """All trunks and leaves as long as each other, forks at k / (N + 1) of it: (1 + B N / 2) / (1 + B N)."""
    trunks = [rollout([5] * length) for _ in range(2)]
    forks = [Fork(0, m, length * k // (n + 1)) for m in range(2) for k in range(1, n + 1)]
    branches, leaves = [], list(trunks)
    for fork in forks:
        grown = [rollout([6] * (length - fork.position)) for _ in range(b)]
        branches.append(grown)
        leaves += [graft(trunks[fork.trunk], fork.position, branch) for branch in grown]
    cost = tree_cost([trunks], [leaves], forks, branches)
    assert cost["token_ratio"] == pytest.approx((1 + b * n / 2) / (1 + b * n))  # the defaults: 3 / 5
    assert cost["fork_position"] == pytest.approx(0.5 if n else 0)


def test_cost_by_hand():
    # Two trunks of 4 and 6 tokens; branches of 2 and 3 from token 1, of 1 and 2 from token 3: 18 tokens.
    # Six parallel responses of the trunks' mean length, 5, are 30. Positions 1/4 and 3/6.
    trunks = [rollout([5] * 4), rollout([5] * 6)]
    forks = [Fork(0, 0, 1), Fork(0, 1, 3)]
    branches = [[rollout([6] * 2), rollout([6] * 3)], [rollout([6]), rollout([6] * 2)]]
    cost = tree_cost([trunks], [trunks + [None] * 4], forks, branches)
    assert cost == pytest.approx(dict(token_ratio=0.6, fork_position=0.375))


def watched_run(out, **flags):
    """(a run on the toy, its arguments, what was asked of run.sample)."""
    args = toy_args(ettrl, out=str(out), kl_coef=0.0, **flags)
    run, calls = common.Run(args), []
    sample = run.sample

    def sample_and_note(prompts, n, limits=None):
        calls.append(SimpleNamespace(prompts=prompts, n=n, limits=limits))
        return sample(prompts, n, limits)

    run.sample = sample_and_note
    return run, args, calls


@pytest.mark.parametrize("score", ["surprisal", "entropy"])
def test_leaves_against_their_trunks(tmp_path, score):
    run, args, calls = watched_run(tmp_path / "run", trunks=3, forks=2, fork_score=score, max_new_tokens=40)
    problems = run.problems[:3]
    groups, _ = tree_rollouts(run, problems, args)
    trunk_call, fork_call = calls  # two engine calls: trunks; all forks of all problems
    assert trunk_call.prompts == problems and trunk_call.n == 3 and fork_call.n == 2
    asked = {}
    for j, (stem, limit) in enumerate(zip(fork_call.prompts, fork_call.limits)):
        asked[stem.id] = (stem.prompt_ids, limit)
        assert stem.id[0] == problems[j % 3].id  # of three ranks, the one of its trunk
    assert len(asked) == 3 * 3 * 2
    for problem, group in zip(problems, groups):
        assert len(group) == tree_leaves(3, 2, 2)
        positions = []
        for m, trunk in enumerate(group[:3]):
            scores = trunk.logprobs if score == "surprisal" else -trunk.entropy
            end = {len(trunk.response_ids) - 1} if trunk.finished else None
            for t in fork_points(scores.tolist(), 2, end):
                assert asked[problem.id, m, t] == (problem.prompt_ids + trunk.response_ids[:t], 40 - t)
                positions += [(trunk, t)] * 2
        for (trunk, t), leaf in zip(positions, group[3:], strict=True):
            assert leaf.prompt_ids == problem.prompt_ids and leaf.response_ids[:t] == trunk.response_ids[:t]
            assert torch.equal(leaf.logprobs[:t], trunk.logprobs[:t])
        for leaf in group:
            assert 1 <= len(leaf.response_ids) == len(leaf.logprobs) <= 40
            assert leaf.finished == (leaf.response_ids[-1] in run.stop_ids)
            assert leaf.text == run.tokenizer.decode(leaf.response_ids, skip_special_tokens=True)
            assert leaf.answer == common.extract_answer(leaf.text)
    # Prefix and branch fit together: the sampler's log-probs of a leaf are the trainer's of it whole
    flat = [leaf for group in groups for leaf in group]
    run.policy.score_old(flat, args.temperature)
    sampled = torch.cat([leaf.logprobs for leaf in flat])
    assert relative_error(sampled, torch.cat([leaf.old_logp for leaf in flat])) < 1e-5


# ---------------------------------------------------- runs ------------------------------------------------
TINY = dict(max_new_tokens=40, eval="", steps=1)


@pytest.mark.parametrize("flags", [dict(advantage="none"), dict(alpha=0.0, beta=0.0)], ids=["none", "res"])
def test_parallel_without_reshaping_is_ttrl(flags, tmp_path):
    ours = run_toy(ettrl, tmp_path / "ours", **TINY | dict(steps=2), rollout="parallel", **flags)
    theirs = run_toy(ttrl, tmp_path / "theirs", **TINY | dict(steps=2))
    assert any(line["grad_norm"] > 0 for line in ours)
    for a, b in zip(ours, theirs, strict=True):
        assert "token_ratio" not in a
        for name in "loss grad_norm reward label_accuracy length kl entropy clip_fraction".split():
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


def test_without_forks_it_is_parallel_sampling_of_the_trunks(tmp_path):
    flags = TINY | dict(votes=8, trunks=8, forks=0)
    tree, = run_toy(ettrl, tmp_path / "tree", **flags)
    parallel, = run_toy(ettrl, tmp_path / "parallel", **flags, rollout="parallel")
    assert tree["token_ratio"] == 1 and tree["fork_position"] == 0
    for name in "loss grad_norm reward length entropy".split():
        assert tree[name] == pytest.approx(parallel[name], rel=1e-4, abs=1e-5), name


def test_responses_shorter_than_the_number_of_forks(tmp_path):
    line, = run_toy(ettrl, tmp_path / "run", **TINY | dict(max_new_tokens=2, kl_coef=0.0), trunks=2, forks=6)
    # Two positions to fork at: 2 (1 + 2 x 2) = 10 leaves, parallel 20 tokens; here 2 x 2 + 4 x (2 + 1) = 16
    assert line["truncated"] == 1 and line["length"] == 2
    assert line["token_ratio"] == pytest.approx(0.8) and line["fork_position"] == 0.25
