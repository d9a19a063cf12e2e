"""RENT: ttrl.py with one more reward, the negative entropy of a response (Prabhudesai et al. 2025; ETTRL paper, Eq. 6).

The idea: no vote at all, what the model was sure of is rewarded. This file shows how small a fork is: python -m examples.rent

    label      y*  = the most frequent answer among the N responses
    reward     R_i = -beta mean_t H_t over response i's tokens (ETTRL paper, Eq. 5, 6); --labels majority: R_i = 1[answer_i = y*]
    advantage  A_i = (R_i - mean R) / (std R + eps)             over the G trained ones   (GRPO)
    loss       mean_i mean_t  -min(rho A_i, clip(rho, 1-clip_low, 1+clip_high) A_i) + kl_coef KL_t - entropy_coef H_t
               rho = pi(y_t) / pi_old(y_t),   KL_t = exp(d) - d - 1 with d = log pi_ref(y_t) - log pi(y_t)   (k3)

What papers compare with: --labels gold (supervised GRPO, the upper bound), --labels offline (SRT: majority labels of the
initial model, computed once), --easy_fraction 0.5 (SRT: train on the prompts with the highest initial majority only).
"""

from dataclasses import dataclass
from typing import Literal

import torch

import common
from common import equivalence_classes, majority

# Without --model: the toy. It is a thousand times smaller than the papers' models, so it takes a larger learning rate.
TOY = dict(dataset="toy", eval="train,toy_test", steps=40, eval_every=20, checkpoint_every=10, prompts_per_batch=16, votes=32,
           train_samples=16, max_prompt_tokens=128, max_new_tokens=128, micro_tokens=2048, lr=5e-4, updates_per_batch=2, sampler="hf",
           eval_temperature=1.0, eval_top_p=1.0)


@dataclass
class Args(common.Args):
    labels: Literal["entropy", "majority", "gold", "offline"] = "entropy"
    """entropy: RENT. majority: TTRL. gold: supervised GRPO, the upper bound. offline: SRT, the initial model's majority, once."""
    beta: float = 1.0
    """beta of Eq. 6; the normalisation over the group takes any positive value out again."""
    easy_fraction: float = 1.0
    """SRT easy prompts: keep this share of the problems, those with the highest majority ratio of the initial model."""

    def errors(self):
        bad = super().errors()
        if not 0 < self.easy_fraction <= 1:
            bad.append(f"--easy_fraction is {self.easy_fraction!r}, but must be above 0 and at most 1.")
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


def entropy_reward(entropies: list[torch.Tensor], beta: float = 1.0) -> torch.Tensor:
    """-beta times the mean of each response's token entropies; n tensors [T_i] -> [n]. RENT; ETTRL paper, Eq. 5 and 6.

    >>> entropy_reward([torch.tensor([0.5, 1.5]), torch.tensor([0.25])])
    tensor([-1.0000, -0.2500])
    """
    return torch.stack([-beta * h.mean() for h in entropies])


def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (std + eps) with the unbiased std; zeros where all rewards are equal or there is one. [n] -> [n]. GRPO.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


# ------------------------------------------------------ the loop -----------------------------------------------------
def main(args: Args) -> None:
    run = common.Run(args)
    policy = run.policy
    if args.labels == "gold" and any(p.answer is None for p in run.problems):
        raise common.UserError("--labels is 'gold', but some problems of --dataset have no gold answer.")
    if args.labels == "offline" or args.easy_fraction < 1:  # SRT: what the initial model votes, once, before step 1
        offline, votes = run.initial_votes()
        easy = max(args.prompts_per_batch, round(args.easy_fraction * len(votes)))
        run.problems = sorted(run.problems, key=lambda p: -votes[p.id])[:easy]

    for _ in run.steps():
        # Sample: N responses to every problem of the batch, from the current policy.
        problems = run.batch()
        groups = run.rollouts(problems, args.votes)

        run.entropies([r for rollouts in groups for r in rollouts])
        # Reward: all N vote; a seeded random G of them are trained.
        classes, rewards, train = [], [], []
        for problem, rollouts in zip(problems, groups):
            if args.labels in ("majority", "entropy"):
                classes.append(equivalence_classes([r.answer for r in rollouts]))
            else:
                label = problem.answer if args.labels == "gold" else offline[problem.id]
                classes.append(common.label_classes(rollouts, label))
            entropy_based = args.labels == "entropy"
            rewards.append(entropy_reward([r.entropies for r in rollouts], args.beta) if entropy_based else majority_reward(classes[-1]))
            chosen = run.subset(range(args.votes), args.train_samples, problem.id)
            advantages = group_advantages(rewards[-1][chosen])
            for i, advantage in zip(chosen, advantages.tolist()):
                rollouts[i].advantage = advantage
            train += [rollouts[i] for i in chosen]

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

        run.end_step(run.vote_metrics(problems, groups, classes, rewards), updates, problems, groups)


if __name__ == "__main__":
    common.launch(main, Args, TOY)
