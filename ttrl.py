"""TTRL: Test-Time Reinforcement Learning (Zuo et al. 2025, arXiv:2504.16084).

The idea: without labels, the model's own majority answer serves as the label. Sample N responses to a
problem, let their answers vote, reward every response that agrees with the winner, and take GRPO steps on G
of them. Even if the label is wrong, most responses get the right reward, as long as most give some other
wrong answer: they get 0, as they should (section 4.2).

    label      y*  = the most frequent answer among the N responses                               (TTRL Eq. 4)
    reward     R_i = 1[answer_i = y*]                                                             (TTRL Eq. 3)
    advantage  A_i = (R_i - mean R) / (std R + eps)   over the G trained ones                           (GRPO)
    loss       mean_i mean_t  -min(ratio A_i, clip(ratio) A_i)                     (GRPO; TTRL prints no loss)
               + kl_coef KL_t                                                           (TTRL's released code)
               - entropy_coef H_t                                                    (EVOL-RL's Eq. 2; 0 here)
               ratio = pi(y_t) / pi_old(y_t), clipped at 1 - clip_low and 1 + clip_high
               KL_t = exp(d) - d - 1 with d = log pi_ref(y_t) - log pi(y_t)                               (k3)

Why it works, a worked example: docs/ttrl.md. The tables' rows as commands: docs/recipes/ttrl.md.

    python ttrl.py                                                                     # the toy, on a laptop
    python ttrl.py --model Qwen/Qwen2.5-Math-1.5B --dataset aime24                     # one GPU
    torchrun --nproc-per-node 8 ttrl.py --model Qwen/Qwen2.5-Math-7B --dataset amc --epochs 30

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per response token.
"""

import math
from dataclasses import dataclass

import common  # keep above torch: it sets environment variables
import torch


@dataclass
class Args(common.Args):
    """TTRL has no options of its own."""


# ------------------------------------------------- the method -----------------------------------------------
def majority_reward(classes: list[int | None]) -> torch.Tensor:
    """1 for the most frequent answer class, else 0; [N] float. TTRL Eq. 3, ETTRL Eq. 7, Dynamic RL Eq. 6.

    None (no answer) never votes and gets 0; a tie goes to the class seen first.

    >>> majority_reward([0, 1, 0, None]).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    winner = common.majority(classes)
    return torch.tensor([float(c is not None and c == winner) for c in classes])


def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (std + eps), [G] -> [G]. GRPO.

    std is the unbiased one; all 0 if all rewards are equal or there is only one.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


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

        # 3. Vote, reward, advantage: all N vote, a seeded random G of them are trained.
        train = []
        for prompt, responses in zip(prompts, groups):
            # Equal answers share a class; None: no answer. With --labels gold only right answers have one.
            classes_N = common.answer_classes(prompt, responses, args.labels)
            rewards_N = majority_reward(classes_N)
            trained_G = common.subset(args, step, prompt, len(responses))  # indices
            log.vote(prompt, responses, classes_N, rewards_N, label=common.majority(classes_N))
            advantages_G = group_advantages(rewards_N[trained_G])
            for i, advantage in zip(trained_G, advantages_G.tolist(), strict=True):
                responses[i].advantage = advantage
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
    common.launch(main, Args)
