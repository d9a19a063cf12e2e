"""SCRL: What If Consensus Lies? Selective-Complementary Reinforcement Learning at Test Time (Yan et al. 2026, arXiv:2603.19880).

The idea: a weak majority is often wrong, so only a strong and clear one becomes a label; otherwise there is none. Rare
answers that were also given with high entropy are most likely wrong and become negative labels. The size of a reward
follows the share of the votes, and answers given with high entropy lose a little.

    p_j        = n_j / N, the share of answer j among all N responses
    H_i        = mean_t of the full-vocabulary entropy; H_j = mean over answer j's responses, H_bar over all N   (Eq. 5-7)
    positive   y+ = the top answer if p >= tau_pos and p - (second share) > tau_marg, else none                  (Eq. 4)
    negative   N- = {j other than y+ : p_j < tau_neg and H_j >= H_bar}                                           (Eq. 8)
    reward     R_i = p(a_i) 1[a_i = y+] + (p(a_i) - tau_neg) 1[a_i in N-] - lambda_h (H(a_i) - H_bar)            (Eq. 9)
    advantage  A_i = (R_i - mean R) / (std R + eps)             over the G trained ones   (GRPO)
    loss       mean_i mean_t  -min(rho A_i, clip(rho, 1-clip_low, 1+clip_high) A_i) + kl_coef KL_t - entropy_coef H_t
               rho = pi(y_t) / pi_old(y_t),   KL_t = exp(d) - d - 1 with d = log pi_ref(y_t) - log pi(y_t)   (k3)

Run it:
    python scrl.py                                                                     # the toy, on a laptop
    python scrl.py --model Qwen/Qwen2.5-3B --dataset aime25                            # one GPU
    torchrun --nproc-per-node 8 scrl.py --model Qwen/Qwen2.5-Math-7B --prompt system --temperature 1 --dataset amc --episodes 30

Against ttrl.py: the entropies of all N responses (from the pass that gives the old log-probs anyway) and the reward.
Table 3: --no-selective_positive, --no-negatives, --no-entropy_gate, --no-dynamic_rewards. Table 5: --tau_pos 0.25,
--tau_neg 0.0625. Table 9: --tau_marg 0 | 0.0625 | 0.25, --lambda_h 0. Small budget of Table 1: --votes 32 --train_samples 16.
"""

import math
from dataclasses import dataclass
from statistics import fmean, mean
from typing import Literal

import torch

import common
from common import answers_equal, equivalence_classes, majority

# Without --model: the toy. It is a thousand times smaller than the papers' models, so it takes a larger learning rate.
TOY = dict(dataset="toy", eval="train,toy_test", steps=40, eval_every=20, checkpoint_every=10, prompts_per_batch=16, votes=32,
           train_samples=16, max_prompt_tokens=128, max_new_tokens=128, micro_tokens=2048, lr=5e-4, updates_per_batch=2, sampler="hf",
           eval_temperature=1.0, eval_top_p=1.0, prompt="system", temperature=1.0)


@dataclass
class Args(common.Args):
    temperature: float = 0.6
    """Rollout temperature (section 4.1): 1.0 for Qwen2.5-Math, 0.6 for other models. Also that of log-probs and entropies."""
    prompt: Literal["system", "suffix", "plain"] = "suffix"
    """suffix: SCRL's prompt. Math-specialised models take 'system' (released code)."""
    tau_pos: float = 0.375
    """tau_pos of Eq. 4 (section 4.1; Table 5): the share of the votes from which on the majority is a label."""
    tau_marg: float = 0.125
    """tau_marg of Eq. 4 (section 4.1; Table 9): the lead over the second answer that the majority must exceed."""
    tau_neg: float = 0.125
    """tau_neg of Eq. 8 (section 4.1; Table 5): only answers with a smaller share of the votes are negative labels."""
    lambda_h: float = 0.1
    """lambda_H of Eq. 9 (section 4.1; Table 9): weight of the entropy penalty."""
    null_reward: float = -1.0
    """Reward of a response without an answer. From the released code; the paper does not say."""
    selective_positive: bool = True
    """Table 3. Off: the majority is the positive label, however weak."""
    negatives: bool = True
    """Table 3. Off: no negative labels."""
    entropy_gate: bool = True
    """Table 3. Off: every rare answer is a negative label, whatever its entropy."""
    dynamic_rewards: bool = True
    """Table 3. Off: hard rewards, +1 for the positive label, -1 for negative ones, 0 for others."""

    def errors(self):
        bad = super().errors()
        for flag in ("tau_pos", "tau_marg", "tau_neg"):
            if not 0 <= getattr(self, flag) <= 1:
                bad.append(f"--{flag} is {getattr(self, flag)!r}, but must be between 0 and 1.")
        if self.tau_neg > self.tau_pos:
            bad.append(f"--tau_neg is {self.tau_neg!r}, but must be at most --tau_pos, {self.tau_pos!r}: no answer is both labels.")
        if not 0 <= self.lambda_h < math.inf:
            bad.append(f"--lambda_h is {self.lambda_h!r}, but must be a finite number, 0 or more.")
        if not math.isfinite(self.null_reward):
            bad.append(f"--null_reward is {self.null_reward!r}, but must be a finite number.")
        return bad


# ------------------------------------------------------ the method ---------------------------------------------------
def answer_entropies(classes: list[int | None], entropies: list[float]) -> tuple[dict[int, float], float]:
    """H_j of every answer class, and H_bar of all n responses, those without an answer included; nats. SCRL, Eq. 7.

    >>> answer_entropies([0, 1, 0, None], [0.25, 0.5, 0.75, 1.5])
    ({0: 0.5, 1: 0.5}, 0.75)
    """
    entropies = [float(h) for h in entropies]
    # statistics.mean sums exactly: equal entropies have equal means, so that H_j >= H_bar is no matter of rounding
    return {j: mean([h for c, h in zip(classes, entropies) if c == j]) for j in dict.fromkeys(classes) if j is not None}, mean(entropies)


def pseudo_labels(classes: list[int | None], entropies: list[float], tau_pos: float = 0.375, tau_marg: float = 0.125,
                  tau_neg: float = 0.125, entropy_gate: bool = True) -> tuple[int | None, set[int]]:
    """The positive label (None: abstain) and the set of negative ones, from [n] classes and [n] entropies. SCRL, Eq. 4 and 8.

    None (no answer) counts in n, but is no label; a tie goes to the class seen first.

    >>> pseudo_labels([0] * 7 + [1, 2], [0.3] * 7 + [0.9, 0.2])
    (0, {1})
    """
    n, counts, top = len(classes), {c: classes.count(c) for c in classes if c is not None}, majority(classes)
    second = max((count for c, count in counts.items() if c != top), default=0)
    # counts are subtracted before they are divided: 4 votes in 10 lead 1 by 0.3, but 0.4 - 0.1 is 0.30000000000000004
    strong = top is not None and counts[top] / n >= tau_pos and (counts[top] - second) / n > tau_marg
    positive = top if strong else None
    of_class, average = answer_entropies(classes, entropies)
    return positive, {c for c, count in counts.items()
                      if c != positive and count / n < tau_neg and (of_class[c] >= average or not entropy_gate)}


def scrl_rewards(classes: list[int | None], entropies: list[float], tau_pos: float = 0.375, tau_marg: float = 0.125,
                 tau_neg: float = 0.125, lambda_h: float = 0.1, null_reward: float = -1.0, entropy_gate: bool = True,
                 hard: bool = False) -> torch.Tensor:
    """Dynamic rewards [n] from [n] classes and [n] entropies; hard: +1, -1 and 0 instead. SCRL, Eq. 9.

    >>> scrl_rewards([0, 0, 0, 1, None], [0.5, 0.5, 0.5, 1.0, 0.0], tau_neg=0.25, lambda_h=0.5)
    tensor([ 0.6000,  0.6000,  0.6000, -0.3000, -1.0000])
    """
    positive, negatives = pseudo_labels(classes, entropies, tau_pos, tau_marg, tau_neg, entropy_gate)
    of_class, average = answer_entropies(classes, entropies)
    reward = {None: null_reward}
    for c, entropy in of_class.items():
        p = classes.count(c) / len(classes)
        reward[c] = p * (c == positive) + (p - tau_neg) * (c in negatives) - lambda_h * (entropy - average)
        if hard:
            reward[c] = (c == positive) - (c in negatives)
    return torch.tensor([float(reward[c]) for c in classes])


def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (std + eps) with the unbiased std; zeros where all rewards are equal or there is one. [n] -> [n]. GRPO.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


def label_metrics(problems, groups, classes, labels):
    """Share of problems with a label and, where gold is known, share of right labels (negative: the answer is wrong). Figure 3."""
    metrics = dict(positive_coverage=fmean(positive is not None for positive, _ in labels),
                   negative_coverage=fmean(len(negatives) > 0 for _, negatives in labels))
    right = dict(positive_accuracy=[], negative_accuracy=[])
    for problem, rollouts, of_response, (positive, negatives) in zip(problems, groups, classes, labels):
        if problem.answer is not None:
            for c in negatives | {positive} - {None}:
                equal = answers_equal(rollouts[of_response.index(c)].answer, problem.answer)
                right["positive_accuracy" if c == positive else "negative_accuracy"].append(equal == (c == positive))
    return metrics | {name: fmean(values) for name, values in right.items() if values}


# ------------------------------------------------------ the loop -----------------------------------------------------
def main(args: Args) -> None:
    run = common.Run(args)
    policy = run.policy
    # Two rows of Table 3 are thresholds: a majority of any share and lead is a label; no share is below 0.
    thresholds = dict(tau_pos=args.tau_pos if args.selective_positive else 0.0, tau_marg=args.tau_marg if args.selective_positive else -1.0,
                      tau_neg=args.tau_neg if args.negatives else 0.0, entropy_gate=args.entropy_gate)

    for _ in run.steps():
        # Sample: N responses to every problem of the batch, from the current policy.
        problems = run.batch()
        groups = run.rollouts(problems, args.votes)

        # Entropies of all N (Eq. 5); the same pass gives the old log-probs of the G that are trained.
        run.entropies([r for rollouts in groups for r in rollouts])

        # Reward: all N vote; a seeded random G of them are trained.
        classes, labels, rewards, train = [], [], [], []
        for problem, rollouts in zip(problems, groups):
            classes.append(equivalence_classes([r.answer for r in rollouts]))
            entropies = [r.entropies.double().mean().item() for r in rollouts]  # Eq. 6
            labels.append(pseudo_labels(classes[-1], entropies, **thresholds))
            rewards.append(scrl_rewards(classes[-1], entropies, **thresholds, lambda_h=args.lambda_h,
                                        null_reward=args.null_reward, hard=not args.dynamic_rewards))
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

        metrics = run.vote_metrics(problems, groups, classes, rewards) | label_metrics(problems, groups, classes, labels)
        run.end_step(metrics, updates, problems, groups)


if __name__ == "__main__":
    common.launch(main, Args, TOY)
