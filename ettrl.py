"""ETTRL: Balancing Exploration and Exploitation in LLM Test-Time RL via Entropy Mechanism (Liu et al. 2025, arXiv:2508.11356).

The idea: most tokens of 64 parallel responses repeat each other, so sample few trunks and fork them where the model was least
sure (ETMR); and where the vote is won by responses the model was unsure of, scale their advantage down (EAR). Here all forks
of all prompts go to the engine in one second call, as prompt + prefix, so that its prefix cache reuses the trunks.

    ETMR       score_t = -log pi(y_t) of a trunk's own tokens; fork at the N highest, draw token t anew    (Algorithm 1)
               leaves M (1 + B N), all of which vote                                                       (Eq. 8)
               tokens (1 + B N / 2) / (1 + B N) of parallel sampling's, if forks were spread evenly        (Eq. 9-11)
    EAR        Y_i = 1 + (avg H - H_i) / avg H,   H_i = mean_t entropy of response i's tokens              (Eq. 5, 12, 13)
               Adv-Res   A_i = clip(Y_i, 1 - alpha, 1 + beta) A_i                                          (Eq. 14)
               Adv-Clip  A_i = clip(A_i, -beta, beta)                                                      (Eq. 15)
    The reward, A_i and the loss are TTRL's (ttrl.py).

Run it:
    python ettrl.py                                                                    # the toy, on a laptop
    python ettrl.py --model Qwen/Qwen2.5-Math-1.5B --dataset aime24                    # one GPU
    torchrun --nproc-per-node 8 ettrl.py --model meta-llama/Llama-3.1-8B --prompt plain --dataset amc --episodes 30

What differs from ttrl.py: where the responses come from, and one factor on the advantages. The paper tests each alone;
both are on unless turned off. (Eq. 12 scales unsure responses down; the sentence after Eq. 14 says the opposite.)
Table 1: --rollout etmr --advantage none. Table 2: --rollout parallel --advantage res, or clip. Both tables' TTRL rows:
--rollout parallel --advantage none. Their metric is eval/NAME/greedy.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch

import common
from common import Rollout, equivalence_classes, majority

# Without --model: the toy. It is a thousand times smaller than the papers' models, so it takes a larger learning rate.
TOY = dict(dataset="toy", eval="train,toy_test", steps=40, eval_every=20, checkpoint_every=10, prompts_per_batch=16, votes=32,
           train_samples=16, max_prompt_tokens=128, max_new_tokens=128, micro_tokens=2048, lr=5e-4, updates_per_batch=2, sampler="hf",
           eval_temperature=1.0, eval_top_p=1.0, temperature=1.0, trunks=7)


@dataclass
class Args(common.Args):
    rollout: Literal["etmr", "parallel"] = "etmr"
    """etmr: entropy-fork tree majority rollout (section 3.2). parallel: TTRL's --votes independent responses."""
    trunks: int = 12
    """M, trees per prompt (section 4)."""
    forks: int = 2
    """N, fork points per trunk (section 4); 0: plain sampling of M responses."""
    branches: int = 2
    """B, continuations per fork point (section 4). M (1 + B N) = 60 leaves vote instead of --votes."""
    fork_score: Literal["surprisal", "entropy"] = "surprisal"
    """surprisal: -log pi(y_t), Algorithm 1. entropy: of the next-token distribution, Eq. 4 (one more pass over the trunks)."""
    advantage: Literal["res", "clip", "none"] = "res"
    """EAR (section 3.3). res: scaled by relative entropy (Eq. 14). clip: Eq. 15. none: TTRL's."""
    alpha: float = 0.2
    """alpha, Adv-Res scales by at least 1 - alpha (Eq. 14; section 4)."""
    beta: float = 0.2
    """beta, ... and by at most 1 + beta (Eq. 14; section 4)."""
    bound: float = 2.0
    """beta of Adv-Clip (Eq. 15; section 4)."""
    temperature: float = 0.6
    """Rollout temperature (section 4); log-probs, entropies and ratios use logits / temperature, too."""
    eval_greedy: bool = True
    """The paper's metric (section 4): greedy pass@1, here beside avg@16."""

    def errors(self):
        bad = super().errors()
        for flag, ok, allowed in (("trunks", self.trunks >= 1, "at least 1"), ("forks", self.forks >= 0, "0 or more"),
                                  ("branches", self.branches >= 1, "at least 1"), ("alpha", 0 <= self.alpha <= 1, "between 0 and 1"),
                                  ("beta", self.beta >= 0, "0 or more"), ("bound", self.bound > 0, "above 0")):
            if not ok:
                bad.append(f"--{flag} is {getattr(self, flag)!r}, but must be {allowed}.")
        leaves = tree_leaves(self.trunks, self.forks, self.branches)
        if self.rollout == "etmr":  # the leaves vote, so they limit --train_samples, and --votes does not
            bad = [sentence for sentence in bad if not sentence.startswith("--train_samples")]
            if not 1 <= self.train_samples <= leaves:
                bad.append(f"--train_samples is {self.train_samples!r}, but must be between 1 and {leaves}, the leaves that vote.")
        return bad


# ------------------------------------------------------ the method ---------------------------------------------------
def majority_reward(classes: list[int | None]) -> torch.Tensor:
    """1 for responses in the most frequent answer class, else 0; [n] float. TTRL; ETTRL paper, Eq. 7.

    None (no answer) never votes and gets 0; a tie goes to the class seen first.

    >>> majority_reward([0, 1, 0, None]).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    winner = majority(classes)
    return torch.tensor([float(c is not None and c == winner) for c in classes])


def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (std + eps) with the unbiased std; zeros where all rewards are equal or there is one. [n] -> [n]. GRPO.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


def fork_points(logprobs: list[float], n_forks: int, forbidden: set[int] | None = None) -> list[int]:
    """Positions of the n highest surprisals -log pi(y_t) of a trunk, best first, ties to the earlier. ETTRL Algorithm 1.

    Fewer where there are fewer. `forbidden` positions are left out: the end-of-sequence token is no place to fork.

    >>> fork_points([-0.1, -2.0, -0.5, -3.0], 2, forbidden={3})
    [1, 2]
    """
    allowed = [t for t in range(len(logprobs)) if t not in (forbidden or ())]
    return sorted(allowed, key=lambda t: float(logprobs[t]))[:n_forks]  # sorted keeps the order of equals


def tree_leaves(m: int, n: int, b: int) -> int:
    """Responses from M trunks with N fork points of B branches each. ETTRL Eq. 8.

    >>> tree_leaves(12, 2, 2)
    60
    """
    return m * (1 + b * n)


def token_ratio(n: int, b: int) -> float:
    """Tokens of a tree / tokens of as many parallel responses, if its fork points were spread evenly. ETTRL Eq. 11.

    >>> token_ratio(2, 2)
    0.6
    """
    return (1 + 0.5 * b * n) / (1 + b * n)


def reshape_advantages(advantages: torch.Tensor, entropies: torch.Tensor, alpha: float = 0.2, beta: float = 0.2) -> torch.Tensor:
    """A_i clip(1 + (avg H - H_i) / avg H, 1 - alpha, 1 + beta), both signs of A; [n] each. ETTRL Eq. 12-14, Adv-Res.

    `entropies`: mean token entropy of each response; avg is over the n. All 0: nothing to compare, so unchanged.

    >>> reshape_advantages(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0.9, 1.0, 1.1]))
    tensor([ 1.1000, -1.0000,  0.9000])
    """
    average = entropies.mean()
    if average == 0:
        return advantages
    return (1 + (average - entropies) / average).clamp(1 - alpha, 1 + beta) * advantages


def clip_advantages(advantages: torch.Tensor, beta: float = 2.0) -> torch.Tensor:
    """clip(A_i, -beta, beta); [n] -> [n]. ETTRL Eq. 15, Adv-Clip.

    >>> clip_advantages(torch.tensor([5.0, -0.2]))
    tensor([ 2.0000, -0.2000])
    """
    return advantages.clamp(-beta, beta)


def graft(trunk: Rollout, position: int, branch: Rollout) -> Rollout:
    """The response that follows the trunk up to (not including) `position` and the branch from there on."""
    return Rollout(trunk.prompt_ids, trunk.response_ids[:position] + branch.response_ids,
                   torch.cat([trunk.logprobs[:position], branch.logprobs]), branch.finished)


def tree_rollouts(run, problems, args):
    """The leaves of every problem, trunks first, in two engine calls; and what they cost. ETTRL Algorithm 1."""
    groups = run.sample([p.prompt_ids for p in problems], args.trunks, [p.id for p in problems], choices=[p.choices for p in problems])
    if args.fork_score == "entropy":
        run.entropies([r for trunks in groups for r in trunks])
    points = []  # per problem: (problem, trunk, position) of its forks
    for i, trunks in enumerate(groups):
        points.append([])
        for m, trunk in enumerate(trunks):
            scores = trunk.logprobs if args.fork_score == "surprisal" else -trunk.entropies
            end = {len(trunk.response_ids) - 1} if trunk.finished else None
            points[i] += [(i, m, t) for t in fork_points(scores.tolist(), args.forks, end)]
    # Fork by fork instead of problem by problem: then a fork goes to the rank whose prefix cache holds its trunk.
    points = [point for row in zip_longest(*points) for point in row if point]
    branches = run.sample([groups[i][m].prompt_ids + groups[i][m].response_ids[:t] for i, m, t in points], args.branches,
                          [(problems[i].id, m, t) for i, m, t in points],
                          max_new_tokens=[args.max_new_tokens - t for _, _, t in points])  # the rest of the length limit
    leaves = [list(trunks) for trunks in groups]
    for (i, m, t), rollouts in zip(points, branches):
        leaves[i] += [graft(groups[i][m], t, branch) for branch in rollouts]
    for problem, group in zip(problems, leaves):
        run.read(group[args.trunks:], problem.choices)
    run.sampler.sleep()
    generated = sum(len(r.response_ids) for group in groups + branches for r in group)
    # Trunks are ordinary samples, so parallel sampling of as many responses would have taken their mean length for each.
    parallel = sum(len(group) * sum(len(r.response_ids) for r in trunks) / len(trunks) for group, trunks in zip(leaves, groups))
    depth = [t / len(groups[i][m].response_ids) for i, m, t in points]
    return leaves, dict(token_ratio=generated / parallel, fork_position=sum(depth) / max(len(depth), 1))  # Eq. 9 assumes 1/2


# ------------------------------------------------------ the loop -----------------------------------------------------
def main(args: Args) -> None:
    run = common.Run(args)
    policy = run.policy

    for _ in run.steps():
        # Sample: the leaves of M trees for every problem of the batch, from the current policy.
        problems, cost = run.batch(), {}
        if args.rollout == "etmr":
            groups, cost = tree_rollouts(run, problems, args)
        else:
            groups = run.rollouts(problems, args.votes)

        # Reward: all N vote; a seeded random G of them are trained.
        classes, rewards, train, trained = [], [], [], []
        for problem, rollouts in zip(problems, groups):
            classes.append(equivalence_classes([r.answer for r in rollouts]))
            rewards.append(majority_reward(classes[-1]))
            chosen = run.subset(range(len(rollouts)), args.train_samples, problem.id)
            advantages = group_advantages(rewards[-1][chosen])
            for i, advantage in zip(chosen, advantages.tolist()):
                rollouts[i].advantage = advantage
            trained.append([rollouts[i] for i in chosen])
            train += trained[-1]

        # EAR: the advantages of each trained group, reshaped by the entropies of the policy that sampled it.
        if args.advantage == "res":
            run.entropies(train)
        for group in trained if args.advantage != "none" else []:
            advantages = torch.tensor([r.advantage for r in group])
            if args.advantage == "res":
                advantages = reshape_advantages(advantages, torch.stack([r.entropies.mean() for r in group]), args.alpha, args.beta)
            else:
                advantages = clip_advantages(advantages, args.bound)
            for r, advantage in zip(group, advantages.tolist()):
                r.advantage = advantage

        # Update: clipped policy gradient, updates_per_batch optimizer steps. Tensors are 1-D over response tokens.
        run.score(train)
        updates = []
        with run.timer("update"):
            for minibatch in run.split(train):
                for micro in policy.micro_batches(minibatch):
                    logp, entropy = policy.logprobs(micro, entropy_grad=args.entropy_coef > 0)
                    rho = (logp - micro.old_logprobs).exp()
                    clipped = rho.clamp(1 - args.clip_low, 1 + args.clip_high)
                    loss = -micro.tis * torch.min(rho * micro.advantages, clipped * micro.advantages)  # tis: 1 unless --tis_cap
                    kl = common.k3(logp, micro.ref_logprobs)
                    loss = loss + args.kl_coef * kl - args.entropy_coef * entropy
                    policy.backward(micro, loss, kl=kl, entropy=entropy, clip_fraction=rho != clipped)
                updates.append(policy.step(run.learning_rate()))

        run.end_step(run.vote_metrics(problems, groups, classes, rewards) | cost, updates, problems, groups)


if __name__ == "__main__":
    common.launch(main, Args, TOY)
