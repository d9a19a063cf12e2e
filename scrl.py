"""SCRL: What If Consensus Lies? Selective-Complementary Reinforcement Learning at Test Time (Yan et al. 2026,
arXiv:2603.19880).

The idea: a weak majority can be wrong, above all on hard problems or with few votes, and the z-score pays it
most: with rewards 1 and 0 and a share f of winners, their advantage is sqrt((1 - f) / f) (Eq. 3). So only a
strong and clear majority becomes a positive label. Which answers are wrong is easier to say than which one is
right: with a positive label or without, rare answers that were also given with high entropy are negative
labels, so that the model moves to more plausible answers without committing to one too early. The entropy
gate spares rare answers of low entropy, which may be right. Fixed rewards could amplify noise (3.4), so a
positive label earns its share, a negative one loses tau_neg less its share, and every answer gains a little
for entropy below the mean and loses a little for entropy above it. No answer at all costs most: -1 (released
code).

    p_j        = n_j / N, the share of answer j among all N responses
    H_i        = mean_t of the full-vocabulary entropy of response i                                (Eq. 5, 6)
    H_j, H_bar = means of H_i over the responses with answer j, and over all N                         (Eq. 7)
    positive   y+ = the top answer if p >= tau_pos and p - (second share) > tau_marg, else none        (Eq. 4)
    negative   N- = {j : p_j < tau_neg and H_j >= H_bar}; y+ is never one (ours)                       (Eq. 8)
    reward     R_i = p_j 1[j = y+] + (p_j - tau_neg) 1[j in N-] - lambda_h (H_j - H_bar),  j = a_i     (Eq. 9)
    advantage  A_i = (R_i - mean R) / (std R + eps)   over the G trained ones                           (GRPO)
    loss       mean_i mean_t  -min(ratio A_i, clip(ratio) A_i)                                   (GRPO, Eq. 2)
               + kl_coef KL_t                                             (SCRL's released code; not in Eq. 2)
               - entropy_coef H_t                                                          (EVOL-RL's; 0 here)
               ratio = pi(y_t) / pi_old(y_t), clipped at 1 - clip_low, 1 + clip_high (Eq. 2: one epsilon)
               KL_t = exp(d) - d - 1 with d = log pi_ref(y_t) - log pi(y_t)                               (k3)

Why it works, a worked example: docs/scrl.md. The tables' rows as commands: docs/recipes/scrl.md.

    python scrl.py                                                                     # the toy, on a laptop
    python scrl.py --model meta-llama/Llama-3.2-1B-Instruct --dataset math500 --epochs 10   # one GPU, Table 2
    torchrun --nproc-per-node 8 scrl.py --model Qwen/Qwen2.5-Math-7B --dataset amc --epochs 30 \\
        --prompt system --temperature 1

The paper samples N = 64 (or 32) responses and trains G = 32 (or 16). Shapes are suffixes: x_N per response of
a prompt, x_G per trained one, x_T per response token.
"""

import math
from dataclasses import dataclass
from statistics import mean

import common  # keep above torch: it sets environment variables
import torch


@dataclass
class Args(common.Args):
    temperature: common.Positive = 0.6
    """Sampling temperature (section 4.1; Qwen2.5-Math: 1.0); log-probs and entropies use it, too."""
    prompt: common.Place = "suffix"
    """Prompt format. suffix: SCRL's for Qwen2.5-3B; Qwen2.5-Math takes 'system' (B.2; released code)."""
    tau_pos: common.Share = 0.375
    """Smallest share of a majority that is a positive label (tau_pos of Eq. 4; section 4.1; Table 5)."""
    tau_marg: common.Share = 0.125
    """Lead over the second answer that the majority must exceed (tau_marg of Eq. 4; section 4.1; Table 9)."""
    tau_neg: common.Share = 0.125
    """Share below which an answer may be a negative label (tau_neg of Eq. 8; section 4.1; Table 5)."""
    lambda_h: common.NonNegative = 0.1
    """Weight of the entropy penalty (lambda_H of Eq. 9; section 4.1; Table 9)."""
    null_reward: common.Finite = -1.0
    """Reward of a response without an answer (released code; the paper does not say)."""
    selective_positive: bool = True
    """Selection of positive labels. Off: the majority is one, however weak (Table 3)."""
    negatives: bool = True
    """Negative labels. Off: none (Table 3)."""
    entropy_gate: bool = True
    """Entropy gate. Off: every rare answer is a negative label, whatever its entropy (Table 3)."""
    dynamic_rewards: bool = True
    """Dynamic rewards. Off: +1, -1 and 0 for answers; those without one keep --null_reward (Table 3)."""

    def errors(self):
        bad = super().errors()
        if self.labels == "gold":
            bad.append("--labels is 'gold', but SCRL would take a rare right answer as a negative label; "
                       "give --labels majority.")
        return bad


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


def answer_entropies(classes: list[int | None], entropies: list[float]) -> tuple[dict[int, float], float]:
    """(H_j of every answer class, H_bar of all N responses, also those without an answer), nats. SCRL, Eq. 7.

    >>> answer_entropies([0, 1, 0, None], [0.25, 0.5, 0.75, 1.5])
    ({0: 0.5, 1: 0.5}, 0.75)
    """
    members = {}
    for c, entropy in zip(classes, entropies):
        members.setdefault(c, []).append(float(entropy))
    # statistics.mean sums exactly: equal entropies have equal means, so H_j >= H_bar is no matter of rounding
    return {c: mean(values) for c, values in members.items() if c is not None}, mean(map(float, entropies))


def pseudo_labels(classes: list[int | None], entropies: list[float],
                  args: Args) -> tuple[int | None, set[int]]:
    """(the positive label or None, the negative labels), from [N] classes and entropies. SCRL, Eq. 4, 8.

    None (no answer) counts in N, but is no label; a tie goes to the class seen first. The positive label is
    never a negative one, which Eq. 8 does not say; it matters with --no-selective_positive, or if tau_pos and
    tau_marg are below tau_neg.

    >>> pseudo_labels([0] * 7 + [1, 2], [0.3] * 7 + [0.9, 0.2], Args())
    (0, {1})
    """
    n, top = len(classes), common.majority(classes)
    counts = {c: classes.count(c) for c in classes if c is not None}
    second = max((count for c, count in counts.items() if c != top), default=0)
    # subtracted before divided: 4 votes in 10 lead 1 by 0.3, but 0.4 - 0.1 is 0.30000000000000004
    strong = bool(counts) and counts[top] / n >= args.tau_pos and (counts[top] - second) / n > args.tau_marg
    positive = top if strong or not args.selective_positive else None
    if not args.negatives:
        return positive, set()
    of_class, average = answer_entropies(classes, entropies)
    rare = {c for c, count in counts.items() if c != positive and count / n < args.tau_neg}
    return positive, {c for c in rare if of_class[c] >= average or not args.entropy_gate}


def scrl_rewards(classes: list[int | None], entropies: list[float], positive: int | None,
                 negatives: set[int], args: Args) -> torch.Tensor:
    """Rewards [N] from [N] classes, [N] entropies and the labels y+ and N-. SCRL, Eq. 9.

    >>> args = Args(tau_neg=0.25, lambda_h=0.5)
    >>> scrl_rewards([0, 0, 0, 1, None], [0.5, 0.5, 0.5, 1.0, 0.0], 0, {1}, args)
    tensor([ 0.6000,  0.6000,  0.6000, -0.3000, -1.0000])
    """
    of_class, average = answer_entropies(classes, entropies)
    reward = {None: args.null_reward}
    for c, entropy in of_class.items():
        p = classes.count(c) / len(classes)
        reward[c] = p * (c == positive) + (p - args.tau_neg) * (c in negatives)
        reward[c] -= args.lambda_h * (entropy - average)
        if not args.dynamic_rewards:
            reward[c] = (c == positive) - (c in negatives)
    return torch.tensor([float(reward[c]) for c in classes])


# -------------------------------------------------- the loop ------------------------------------------------
def main(args: Args) -> None:
    run = common.start(args)  # refuses bad input, then loads models, data and log
    policy, reference, sampler, log = run.policy, run.reference, run.sampler, run.log
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=(0.9, 0.999),
                                  weight_decay=args.weight_decay, fused=True)

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

        # Eq. 7: the labels need the entropies of all N, so they are scored here, before step 3.
        policy.score_old(sum(groups, []), args.temperature)  # sets old_logp and entropy of each response, [T]

        # 3. Vote, reward, advantage: all N vote, a seeded random G of them are trained.
        train = []
        for prompt, responses in zip(prompts, groups):
            # Equal answers share a class; None: no answer. With --labels gold only right answers have one.
            classes_N = common.answer_classes(prompt, responses, args.labels)
            entropies_N = [response.mean(response.entropy.double()) for response in responses]  # Eq. 6
            positive, negatives = pseudo_labels(classes_N, entropies_N, args)
            rewards_N = scrl_rewards(classes_N, entropies_N, positive, negatives, args)
            trained_G = common.subset(args, step, prompt, len(responses))  # indices
            log.vote(prompt, responses, classes_N, rewards_N, label=positive, negatives=negatives)
            advantages_G = group_advantages(rewards_N[trained_G])
            for i, advantage in zip(trained_G, advantages_G.tolist(), strict=True):
                responses[i].advantage = advantage
                train.append(responses[i])

        # 4. Score: log-probs under the base model (for KL).
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
                pg_T = -torch.min(ratio_T * micro.advantage_T, clipped_T * micro.advantage_T)
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
                loss = (loss_T * weight_T).sum()
                loss.backward()  # gradients add up over micro-batches; FSDP sums them over the ranks
                log.tokens(weight_T, loss=loss_T, entropy=entropy_T, clip_fraction=ratio_T != clipped_T)
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).item()
            if math.isfinite(grad_norm):  # else skipped and counted
                optimizer.step()
            optimizer.zero_grad()
            log.update(grad_norm)

        # 7. Log the step, and save a checkpoint when it is due.
        log.step(step, train, lr=lr, **logp_diff)
        common.save_when_due(run, step, optimizer)  # and before an evaluation; after a signal it exits

    policy.save(log.path / "final", run.tokenizer)
    if log.evaluation_is_due(run.total_steps):
        sampler.load(policy.named_tensors())
        common.evaluate(run, run.total_steps)
    log.finish()


if __name__ == "__main__":
    common.launch(main, Args, toy=common.TOY | dict(prompt="system", temperature=1.0))
