"""RESTRAIN: From Spurious Votes to Signals - Self-Driven RL with Self-Penalization (Yu et al. 2025, arXiv:2510.02172).

The idea: a wrong majority label teaches more harm than a hedge. Take every answer as a pseudo-label, weighted by its votes;
where hardly two responses agree, push all of them down; scale a prompt's loss by how sure the initial model was of it.

    labels     w_j  = g(c_j / n) / sum_l g(c_l / n),  c_j of n responses gave answer j                        (Eq. 3)
               g(f) = exp(-(f - 1)^2 / (2 sigma^2))                                                (section 2.1, D.2)
    advantage  A_ij = GRPO advantage of response i if j is the label; -delta if max_j c_j < kappa             (Eq. 4)
    prompt     u    = g(c_ref / n),  c_ref = votes for the initial model's majority answer                    (Eq. 5)
    loss       u (sum_j w_j mean_i mean_t  -min(rho A_ij, clip(rho, 1-clip_low, 1+clip_high) A_ij) + kl_coef KL_t)  (Eq. 6, 7)

(Eq. 7 prints -beta KL in a loss that is minimised; the sign is Eq. 1's.)
One pass serves all labels: with A+_i = sum_j w_j max(A_ij, 0) and A-_i = sum_j w_j min(A_ij, 0),
    sum_j w_j min(rho A_ij, clip A_ij) = A+_i min(rho, clip) + A-_i max(rho, clip),  exactly.

Run it:
    python restrain.py                                                                 # the toy, on a laptop
    python restrain.py --model Qwen/Qwen3-1.7B-Base --prompt plain --dataset aime24    # one GPU
    torchrun --nproc-per-node 8 restrain.py --model Qwen/Qwen3-4B-Base --dataset dapo --eval math500,aime25,minerva

What differs from ttrl.py: the advantages, one factor in the loss, a sampling pass for u before step 1. Ablations:
--label_weighting majority | uniform (Table 4, Figure 5a), --kappa 0 (Table 4, no penalty), --prompt_weighting none | online
(Table 4, Figure 8), --sigma 0 ... inf (Table 8), --delta 0 ... 5 (Table 9), --kappa 2, 3, 5, 8 (Table 10).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from tqdm import tqdm

import common
from common import equivalence_classes, majority

# Without --model: the toy. It is a thousand times smaller than the papers' models, so it takes a larger learning rate.
TOY = dict(dataset="toy", eval="train,toy_test", steps=40, eval_every=20, checkpoint_every=10, prompts_per_batch=16, votes=32,
           train_samples=16, max_prompt_tokens=128, max_new_tokens=128, micro_tokens=2048, lr=5e-4, updates_per_batch=2, sampler="hf",
           eval_temperature=1.0, eval_top_p=1.0, kappa=6)  # kappa counts votes: 3 of the paper's 16 are 6 of 32


@dataclass
class Args(common.Args):
    label_weighting: Literal["gaussian", "majority", "uniform"] = "gaussian"
    """w_j of Eq. 3. majority: all weight on the majority label, as sigma 0. uniform: the same for all labels, as sigma inf."""
    sigma: float = 0.5
    """sigma of the label weights, 0 to inf (section 2.1; value: D.2; Table 8)."""
    kappa: int = 3
    """kappa: fewer votes than this for the majority answer, and all responses are penalised (Eq. 4; D.2). 0: never (Table 4)."""
    delta: float = 1.0
    """delta, the penalty: their advantage is -delta (Eq. 4; D.2; Table 9)."""
    prompt_weighting: Literal["offline", "online", "none"] = "offline"
    """u of Eq. 5. offline: from the initial model, once. online: from the current responses (Appendix E). none: 1 (Table 4)."""
    prompt_sigma: float = 0.5
    """sigma of the prompt weights (D.2: the same as of the label weights; Table 8 varies those alone)."""
    votes: int = 16
    """n, responses sampled per prompt; all of them vote (D.2)."""
    train_samples: int = 16
    """Responses trained per prompt: all (D.2)."""
    lr: float = 1e-6
    """Peak learning rate of AdamW (D.2)."""
    episodes: int = 20
    """Passes over the problems (D.2)."""
    max_new_tokens: int = 4096
    """Length limit of a response (D.2; OctoThinker: 8192)."""

    def errors(self):
        bad = super().errors()
        for flag, ok, allowed in (("sigma", self.sigma >= 0, "0 or more, or inf"),
                                  ("prompt_sigma", self.prompt_sigma >= 0, "0 or more, or inf"),
                                  ("delta", 0 <= self.delta < math.inf, "a finite number, 0 or more"),
                                  ("kappa", 0 <= self.kappa <= self.votes, f"between 0 and --votes, {self.votes}")):
            if not ok:
                bad.append(f"--{flag} is {getattr(self, flag)!r}, but must be {allowed}.")
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


def gaussian_weight(f: torch.Tensor, sigma: float) -> torch.Tensor:
    """g(f) = exp(-(f - 1)^2 / (2 sigma^2)) of vote shares f, in 0..1; [m] -> [m]. RESTRAIN section 2.1, centre 1 (D.2).

    Without the 1 / (sigma sqrt(2 pi)) of a density: full agreement weighs 1. At sigma 0 everything else weighs 0.

    >>> gaussian_weight(torch.tensor([0.0, 0.5, 1.0]), 0.5)
    tensor([0.1353, 0.6065, 1.0000])
    """
    f = torch.as_tensor(f, dtype=torch.float64)  # in float32 a tiny sigma would be 0
    return (f == 1).float() if sigma == 0 else (-0.5 * ((f - 1) / sigma) ** 2).exp().float()


def label_weights(counts: list[int], n: int, sigma: float = 0.5) -> torch.Tensor:
    """w_j = g(c_j / n) / sum_l g(c_l / n) of the labels' vote counts; [m] -> [m], sums to 1. RESTRAIN Eq. 3.

    sigma 0: all weight on the majority label (of equals on the first, as in the vote); inf: the same for all labels.

    >>> label_weights([8, 4, 1], 16)
    tensor([0.5496, 0.2942, 0.1562])
    """
    if sigma == 0 or not counts:
        return torch.tensor([float(j == counts.index(max(counts))) for j in range(len(counts))])
    f = torch.tensor(counts, dtype=torch.float64) / n
    log_g = ((f.max() - 1) ** 2 - (f - 1) ** 2) / sigma / sigma / 2  # the top label's is 0, so that the sum never underflows
    return log_g.softmax(0).float()


def restrain_advantages(classes: list[int | None], kappa: int = 3, delta: float = 1.0,
                        sigma: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """A+_i = sum_j w_j max(A_ij, 0) and A-_i = sum_j w_j min(A_ij, 0) of one prompt's n responses, both [n]. RESTRAIN Eq. 3, 4.

    None (no answer) is no label, but one of the n: its reward is 0 for every label. Majority below kappa: all -delta.

    >>> restrain_advantages([0, 0, 1, None], kappa=2)
    (tensor([0.5641, 0.5641, 0.5230, 0.0000]), tensor([-0.1743, -0.1743, -0.5641, -0.7384]))
    """
    n, labels = len(classes), list(dict.fromkeys(c for c in classes if c is not None))
    counts = [classes.count(label) for label in labels]
    if max(counts, default=0) < kappa:  # Eq. 4: rewards 0, so advantages 0, minus delta; the weights sum to 1
        return torch.zeros(n), torch.full((n,), -float(delta))
    advantages = torch.zeros(len(labels), n)  # A_ij, one row per label
    for j, label in enumerate(labels):
        advantages[j] = group_advantages(torch.tensor([float(c == label) for c in classes]))
    weights = label_weights(counts, n, sigma)
    return weights @ advantages.clamp(min=0), weights @ advantages.clamp(max=0)


def restrain_surrogate(rho: torch.Tensor, clipped: torch.Tensor, a_plus: torch.Tensor, a_minus: torch.Tensor) -> torch.Tensor:
    """sum_j w_j min(rho A_j, clipped A_j) per token, from A+ and A- alone; all [tokens]. RESTRAIN Eq. 6, 7 (the inner sum).

    >>> restrain_surrogate(torch.tensor(1.5), torch.tensor(1.2), torch.tensor(0.5), torch.tensor(-0.25))
    tensor(0.2250)
    """
    return a_plus * torch.min(rho, clipped) + a_minus * torch.max(rho, clipped)


def prompt_weight(majority_count: int, n: int, sigma: float = 0.5) -> float:
    """u = g(c_ref / n), the factor of a prompt's loss; 1 where all n agree, 0.135 where none answers. RESTRAIN Eq. 5.

    >>> round(prompt_weight(8, 16), 3)
    0.607
    """
    return float(gaussian_weight(majority_count / n, sigma))


def majority_count(classes: list[int | None]) -> int:
    """Votes for the most frequent answer; 0 where there is none. M(x) of Eq. 4, c_ref of Eq. 5.

    >>> majority_count([0, 1, 0, None])
    2
    """
    return classes.count(majority(classes)) if majority(classes) is not None else 0


def initial_prompt_weights(run, args):
    """u of every problem, from as many responses of the initial model as train it later (Eq. 5)."""
    weights = []
    starts = range(0, len(run.problems), args.prompts_per_batch)
    for start in tqdm(starts, desc="prompt weights", disable=run.rank != 0, dynamic_ncols=True):
        problems = run.problems[start:start + args.prompts_per_batch]
        groups = run.sample([p.prompt_ids for p in problems], args.votes, [p.id for p in problems], choices=[p.choices for p in problems])
        counts = [majority_count(equivalence_classes([r.answer for r in rollouts])) for rollouts in groups]
        weights += [prompt_weight(count, args.votes, args.prompt_sigma) for count in counts]
    return weights


# ------------------------------------------------------ the loop -----------------------------------------------------
def main(args: Args) -> None:
    run = common.Run(args)
    policy = run.policy
    sigma = dict(gaussian=args.sigma, majority=0.0, uniform=math.inf)[args.label_weighting]
    weights = [1.0] * len(run.problems)
    if args.prompt_weighting == "offline":
        weights = run.once("prompt_weights", lambda: initial_prompt_weights(run, args))
    weights = {p.id: weight for p, weight in zip(run.problems, weights)}

    for _ in run.steps():
        # Sample: N responses to every problem of the batch, from the current policy.
        problems = run.batch()
        groups = run.rollouts(problems, args.votes)

        # Reward: every answer is a label; A+ and A- hold all labels' advantages, the prompt's weight scales its loss.
        classes, rewards, train = [], [], []
        for problem, rollouts in zip(problems, groups):
            classes.append(equivalence_classes([r.answer for r in rollouts]))
            rewards.append(majority_reward(classes[-1]))  # for the log only, to compare with ttrl.py's
            chosen = run.subset(range(args.votes), args.train_samples, problem.id)
            a_plus, a_minus = (a.tolist() for a in restrain_advantages(classes[-1], args.kappa, args.delta, sigma))
            if args.prompt_weighting == "online":
                weights[problem.id] = prompt_weight(majority_count(classes[-1]), args.votes, args.prompt_sigma)
            for i in chosen:
                rollouts[i].a_plus, rollouts[i].a_minus, rollouts[i].weight = a_plus[i], a_minus[i], weights[problem.id]
                rollouts[i].advantage = a_plus[i] + a_minus[i]  # what acts at rho = 1; for samples.jsonl
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
                    loss = -micro.tis * restrain_surrogate(rho, clipped, micro.expand("a_plus"), micro.expand("a_minus"))
                    kl = common.k3(logp, micro.ref_logprobs)
                    loss = loss + args.kl_coef * kl - args.entropy_coef * entropy
                    loss = micro.expand("weight") * loss  # Eq. 6: u scales the KL term, too
                    policy.backward(micro, loss, kl=kl, entropy=entropy, clip_fraction=rho != clipped)
                updates.append(policy.step(run.learning_rate()))

        metrics = run.vote_metrics(problems, groups, classes, rewards) | dict(
            penalised=sum(majority_count(c) < args.kappa for c in classes) / len(classes),
            prompt_weight=sum(r.weight for r in train) / len(train))
        run.end_step(metrics, updates, problems, groups)


if __name__ == "__main__":
    common.launch(main, Args, TOY)
