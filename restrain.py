"""RESTRAIN: From Spurious Votes to Signals (Yu et al., ICLR 2026, arXiv:2510.02172).

The idea: the majority is often wrong although some response is right. Rewarding the majority alone then
trains on a wrong label and ignores the right one. So every answer is a pseudo-label, with a weight that grows
with its votes. The label that a response gives pushes it up, all other labels push it down. Rare answers are
mostly wrong, so they weigh less; with the majority alone, or with equal weights, training collapses (5, F).
Where fewer than kappa agree, probably none is right, and all are pushed down. A prompt's loss is scaled by
how sure the base model was of it; weights from the policy would grow with its own overconfidence.

    labels     w_j  = g(c_j / n) / sum_l g(c_l / n),  c_j of n responses gave answer j                 (Eq. 3)
               g(f) = exp(-(f - 1)^2 / (2 sigma^2)), our form of "a Gaussian ... with bias sigma"   (2.1, D.2)
               small sigma: all weight on the majority; large: equal weights
    advantage  A_ij = GRPO advantage of response i if j is the label; the paper prints no division by std
               A_ij = -delta for all, if max_j c_j < kappa: rewards 0, less the penalty                (Eq. 4)
    prompt     u    = g(c_ref / n),  c_ref = votes for the base model's majority answer             (Eq. 5)
    loss       u mean_i mean_t [ sum_j w_j (-min(ratio A_ij, clip(ratio) A_ij)) + kl_coef KL_t ]    (Eq. 6, 7)
               KL_t stands once, as the w_j sum to 1

(Eq. 7 prints -beta KL in a loss that is minimised; the sign is Eq. 1's. Its ratio is one per response; ours
is one per token, as in GRPO (docs/readings.md). The paper's other numbers: KL coefficient 0.001, entropy
bonus 0, sampling temperature 1 (D.2). It does not give its clip epsilon.)
One pass serves all labels. With r = ratio and k = clip(ratio), min(r A, k A) is A min(r, k) if A >= 0, and
A max(r, k) if A < 0. So with A+_i = sum_j w_j max(A_ij, 0) and A-_i = sum_j w_j min(A_ij, 0), exactly:
    sum_j w_j min(r A_ij, k A_ij) = A+_i min(r, k) + A-_i max(r, k)

Why it works, a worked example: docs/restrain.md. The tables' rows as commands: docs/recipes/restrain.md.

    python restrain.py                                                                 # the toy, on a laptop
    python restrain.py --model Qwen/Qwen3-1.7B-Base --dataset aime24                   # one GPU
    torchrun --nproc-per-node 8 restrain.py --model Qwen/Qwen3-4B-Base --dataset dapo --eval math500 \\
        --prompts_per_batch 128

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per response token.
"""

import math
from dataclasses import dataclass
from typing import Literal

import common  # keep above torch: it sets environment variables
import torch
from engine.metrics import mean


@dataclass
class Args(common.Args):
    label_weighting: Literal["gaussian", "majority", "uniform"] = "gaussian"
    """Label weights w_j (Eq. 3). majority: all on the majority's, as sigma 0. uniform: equal (sigma inf)."""
    sigma: common.NonNegativeOrInf = 0.5
    """Width sigma of the label weights (D.2), from 0 to inf (Table 8). The optimum is narrow: with 0.25 the
    paper's mean is 8.8 points lower, with 1 it is 14.0 lower (Table 8)."""
    kappa: common.CountOrZero = 3
    """Minimum number of majority votes; with fewer, every response of a prompt is penalised (Eq. 4; D.2).
    With 2 the paper's mean is 8.5 points lower, with 5 it is 8.0 lower (Table 10, 16 votes). If you raise
    --votes, raise kappa in proportion (G). 0: no penalty, our reading of Table 4's row without it."""
    delta: common.NonNegative = 1.0
    """The penalty: responses to such a prompt have the advantage -delta (Eq. 4; D.2). With 0.1 the paper's
    mean is 7.0 points lower, with 2 it is 11.9 lower (Table 9)."""
    prompt_weighting: Literal["offline", "online", "none"] = "offline"
    """Prompt weights u of Eq. 5, from the base model, or online (Appendix E does not say how; we take the
    current responses); none: 1 (Table 4)."""
    prompt_sigma: common.NonNegativeOrInf = 0.5
    """Width sigma of the prompt weights (D.2: one for both; we read Table 8 as varying only the labels')."""
    votes: common.Count = 16
    """Number n of responses sampled per prompt (D.2); all of them vote (section 2.1)."""
    train_samples: common.Count = 16
    """Responses trained per prompt: all (Eq. 7)."""
    lr: common.NonNegative = 1e-6
    """Peak learning rate of AdamW. D.2 has the number, but no schedule: ours is in docs/readings.md."""
    epochs: common.CountOrZero = 20
    """Passes over the problems (D.2). The paper gives no --prompts_per_batch; for DAPO we take 128."""
    max_new_tokens: common.Count = 4096
    """Length limit of a response (D.2; OctoThinker: 8192)."""
    MIN_TRAIN_SAMPLES = 1  # the advantages compare all that vote, not those that are trained

    def errors(self):
        bad = super().errors()
        if self.kappa > self.votes:
            bad.append(f"--kappa is {self.kappa}, but must be at most {self.votes}, the responses per "
                       "prompt: a larger one penalises every prompt.")
        if self.labels == "gold":
            bad.append("--labels is 'gold', but where fewer than kappa responses are right, RESTRAIN would "
                       "punish them; give --labels majority.")
        return bad

    @property
    def label_sigma(self) -> float:
        """sigma of the label weights, by --label_weighting."""
        return dict(gaussian=self.sigma, majority=0.0, uniform=math.inf)[self.label_weighting]

    @property
    def u_sigma(self) -> float:
        """sigma of the prompt weights; at inf every u is 1."""
        return math.inf if self.prompt_weighting == "none" else self.prompt_sigma

    def has_gradient(self, response):
        # With plus = -minus the advantage is 0. But once the ratio is clipped, only one of the two still has
        # a gradient, so such a response is computed.
        return super().has_gradient(response) or response.minus != 0


# ------------------------------------------------- the method -----------------------------------------------
def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (std + eps), [G] -> [G]. GRPO.

    std is the unbiased one; all 0 if all rewards are equal or there is only one.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


def label_weights(counts: list[int], n: int, sigma: float = 0.5) -> torch.Tensor:
    """w_j = g(c_j / n) / sum_l g(c_l / n) of the labels' vote counts; [m] -> [m], sums to 1. RESTRAIN Eq. 3.

    g(f) = exp(-(f - 1)^2 / (2 sigma^2)), so it is a softmax. g rises with f, since no share exceeds the
    centre, 1 (D.2). sigma 0: all weight on the majority label (of equals on the first, as in the vote); inf:
    equal weights.

    >>> label_weights([8, 4, 1], 16)
    tensor([0.5496, 0.2942, 0.1562])
    """
    if sigma == 0 or not counts:
        return torch.tensor([float(j == counts.index(max(counts))) for j in range(len(counts))])
    shares = torch.tensor(counts, dtype=torch.float64) / n
    return (-0.5 * ((shares - 1) / sigma) ** 2).softmax(0).float()


def weighted_labels(classes: list[int | None], sigma: float = 0.5) -> dict[int, float]:
    """{label: w_j}: every answer class is a label. RESTRAIN Eq. 3.

    >>> weighted_labels([4, 4, None, 7], sigma=0)
    {4: 1.0, 7: 0.0}
    """
    counts = {c: classes.count(c) for c in classes if c is not None}
    return dict(zip(counts, label_weights(list(counts.values()), len(classes), sigma).tolist()))


def restrain_advantages(classes: list[int | None], kappa: int = 3, delta: float = 1.0,
                        sigma: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """A+_i = sum_j w_j max(A_ij, 0), A-_i = sum_j w_j min(A_ij, 0), [N] each. w, A: RESTRAIN Eq. 3, 4.

    None (no answer) is no label, but one of the N: its reward is 0 for every label. If the majority has fewer
    than kappa votes, all advantages are -delta.

    >>> restrain_advantages([0, 0, 1, None], kappa=2)
    (tensor([0.5641, 0.5641, 0.5230, 0.0000]), tensor([-0.1743, -0.1743, -0.5641, -0.7384]))
    """
    n = len(classes)
    if majority_count(classes) < kappa:  # Eq. 4: rewards 0 give advantages 0, less delta, for every label
        return torch.zeros(n), torch.full((n,), -float(delta))
    weights = weighted_labels(classes, sigma)
    advantages = torch.zeros(len(weights), n)  # A_ij, one row per label
    for j, label in enumerate(weights):
        advantages[j] = group_advantages(torch.tensor([float(c == label) for c in classes]))
    weights = torch.tensor(list(weights.values()))
    return weights @ advantages.clamp(min=0), weights @ advantages.clamp(max=0)


def restrain_surrogate(ratio: torch.Tensor, clipped: torch.Tensor, a_plus: torch.Tensor,
                       a_minus: torch.Tensor) -> torch.Tensor:
    """sum_j w_j min(ratio A_j, clipped A_j) per token, from A+ and A-; all [T]. RESTRAIN Eq. 2, 6, 7.

    >>> restrain_surrogate(torch.tensor(1.5), torch.tensor(1.2), torch.tensor(0.5), torch.tensor(-0.25))
    tensor(0.2250)
    """
    return a_plus * torch.min(ratio, clipped) + a_minus * torch.max(ratio, clipped)


def prompt_weight(c_ref: int, n: int, sigma: float = 0.5) -> float:
    """u = g(c_ref / n), the factor of a prompt's loss. RESTRAIN Eq. 5.

    1 if all n agree; 0.135 if none answers, at the paper's sigma. sigma 0: 1 or 0.

    >>> round(prompt_weight(8, 16), 3)
    0.607
    """
    return math.exp(-0.5 * ((c_ref / n - 1) / sigma) ** 2) if sigma else float(c_ref == n)


def majority_count(classes: list[int | None]) -> int:
    """Votes for the most frequent answer; 0 if there is none. M(x) of Eq. 4, c_ref of Eq. 5.

    >>> majority_count([0, 1, 0, None])
    2
    """
    winner = common.majority(classes)
    return 0 if winner is None else classes.count(winner)


# -------------------------------------------------- the loop ------------------------------------------------
def main(args: Args) -> None:
    run = common.start(args)  # refuses bad input, then loads models, data and log
    policy, reference, sampler, log = run.policy, run.reference, run.sampler, run.log
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=(0.9, 0.999),
                                  weight_decay=args.weight_decay, fused=True)
    # Eq. 5: c_ref is measured once, with as many responses of the base model as will vote in a step.
    initial = common.initial_votes(run) if args.prompt_weighting == "offline" else {}

    done = common.restore(run, optimizer)  # steps: with --resume those of the newest checkpoint, else 0
    for step in range(done + 1, run.total_steps + 1):
        # 1. Sync: the sampler takes the policy's weights. If an evaluation is due, they are evaluated.
        sampler.load(policy.named_tensors())
        if log.evaluation_is_due(step - 1):
            common.evaluate(run, step - 1)

        # 2. Sample N responses to every prompt at --temperature: each rank a share, then all ranks have all.
        prompts = common.next_prompts(args, run.problems, step)
        groups = common.sample(run, step, prompts, args.votes)
        sampler.sleep()  # gives the GPU's memory to the update

        # 3. Vote, reward, advantage: all N vote, a seeded random G of them are trained.
        train = []
        for prompt, responses in zip(prompts, groups):
            # Equal answers share a class; None: no answer. With --labels gold only right answers have one.
            classes_N = common.answer_classes(prompt, responses, args.labels)
            plus_N, minus_N = restrain_advantages(classes_N, args.kappa, args.delta, args.label_sigma)
            trained_G = common.subset(args, step, prompt, len(responses))  # indices
            count = majority_count(classes_N)
            label = weighted_labels(classes_N, args.label_sigma) if count >= args.kappa else None
            log.vote(prompt, responses, classes_N, plus_N + minus_N, label=label)
            # Votes of the base model, or this step's own if none were counted (online; a prompt added later).
            c_ref = initial[prompt.id][1] if prompt.id in initial else count
            u = prompt_weight(c_ref, args.votes, args.u_sigma)
            for i in trained_G:
                responses[i].plus, responses[i].minus = float(plus_N[i]), float(minus_N[i])
                responses[i].weight = u
                responses[i].advantage = responses[i].plus + responses[i].minus  # at ratio 1; for the log
                train.append(responses[i])

        # 4. Score: log-probs under the policy that sampled (for the ratio) and the base model (for KL).
        policy.score_old(train, args.temperature, args.has_gradient)  # sets old_logp and entropy, [T]
        if reference:
            reference.score_ref(train, args.temperature)  # sets ref_logp

        # 5. Check: the sampler's log-probs must be close to old_logp, else it ran other weights: an error.
        logp_diff = common.check_sampler(run, train)

        # 6. Update: one optimizer step per minibatch. Micro-batches fit in memory; the ranks share them.
        lr = common.learning_rate(args, step, run.total_steps)
        optimizer.param_groups[0]["lr"] = lr
        for minibatch in common.timed_loop("update", common.minibatches(args, step, train)):
            minibatch_tokens = sum(response.length for response in minibatch)
            for micro in policy.micro_batches(minibatch, args.has_gradient):
                # Of logits / temperature. The entropy has a gradient only where it has a weight.
                logp_T, entropy_T = policy.logprobs(micro, args.temperature, args.entropy_coef)
                ratio_T = (logp_T - micro.old_logp_T).exp()
                clipped_T = ratio_T.clamp(1 - args.clip_low, 1 + args.clip_high)
                plus_T = micro.per_token([response.plus for response in micro.responses])
                minus_T = micro.per_token([response.minus for response in micro.responses])
                pg_T = -restrain_surrogate(ratio_T, clipped_T, plus_T, minus_T)
                loss_T = pg_T - args.entropy_coef * entropy_T
                # GRPO: the mean over a response's tokens, then over the minibatch's responses, of all ranks.
                weight_T = micro.mask_T / (micro.length_T * len(minibatch))
                if args.loss_aggregation == "token-mean":  # DAPO: over all tokens of the minibatch
                    weight_T = micro.mask_T / minibatch_tokens
                if reference:
                    d_T = micro.ref_logp_T - logp_T
                    kl_T = d_T.exp() - d_T - 1  # k3, never negative
                    loss_T = loss_T + args.kl_coef * kl_T
                    log.tokens(weight_T, kl=kl_T)
                # Eq. 6: u, the prompt's weight, scales the KL term, too
                loss_T = micro.per_token([response.weight for response in micro.responses]) * loss_T
                loss = (loss_T * weight_T).sum()
                loss.backward()  # gradients add up over micro-batches; FSDP sums them over the ranks
                log.tokens(weight_T, loss=loss_T, entropy=entropy_T, clip_fraction=ratio_T != clipped_T)
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).item()
            if math.isfinite(grad_norm):  # else skipped and counted
                optimizer.step()
            optimizer.zero_grad()
            log.update(grad_norm)

        # 7. Log the step, and save a checkpoint when it is due.
        log.step(step, train, lr=lr, **logp_diff, prompt_weight=mean(r.weight for r in train))
        common.save_when_due(run, step, optimizer)  # and before an evaluation; after a signal it exits

    policy.save(log.path / "final", run.tokenizer)
    if log.evaluation_is_due(run.total_steps):
        sampler.load(policy.named_tensors())
        common.evaluate(run, run.total_steps)
    log.finish()


if __name__ == "__main__":
    common.launch(main, Args)
