"""RLSC: ttrl.py with a response's own probability as its weight (Li et al. 2025, arXiv:2506.06395).

The idea: make the model more self-confident. To maximise the chance that two samples agree, E_y[pi(y)], is to
raise each response by its own probability: no vote, no group, no baseline.

    weight     A_i = pi_old(y_i) + alpha, a constant;  d/d theta sum_y pi(y)^2 = 2 E_y[ pi(y) d log pi(y) ]
    loss       mean_i mean_t  -min(ratio A_i, clip(ratio) A_i) + ..., as in ttrl.py

Checked: the paper's text (v3), Eq. 1 to 7 and Algorithm 1; L1 (Eq. 5) is alpha = 0, L2 (Eq. 6) adds it, and
Eq. 4 lacks the factor 2, which the learning rate takes. Our reading: pi_old(y_i) is the geometric mean of
its tokens' probabilities and log pi(y_i) their mean; in the paper they are the product and the sum, so that
a long response weighs alpha alone. And GRPO's clipped ratio instead of log pi, which has the same gradient
in the first minibatch. The paper samples 16 responses at temperature 0.5.

    python -m examples.rlsc                                                            # the toy, on a laptop
    torchrun --nproc-per-node 8 -m examples.rlsc --model Qwen/Qwen2.5-Math-7B --dataset amc

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per token of a micro-batch.
"""

import math
from dataclasses import dataclass

import common  # first: it sets what torch reads when it is loaded
import torch


@dataclass
class Args(common.Args):
    alpha: common.NonNegative = 0.1
    """Added to every weight (Eq. 6), so that unlikely responses count, too; the paper names 0.1."""


# ------------------------------------------------- the method -----------------------------------------------
def self_confidence(mean_logps: list[float], alpha: float) -> torch.Tensor:
    """exp(mean log-prob) + alpha of each response, [N].

    >>> self_confidence([0.0, math.log(0.5)], alpha=0.1)
    tensor([1.1000, 0.6000])
    """
    return torch.tensor(mean_logps).exp() + alpha


# -------------------------------------------------- the loop ------------------------------------------------
def main(args: Args) -> None:
    run = common.Run(args)
    policy, reference, sampler, optimizer = run.policy, run.reference, run.sampler, run.optimizer

    run.start()  # --resume: back to the newest checkpoint; else evaluate the initial model
    for step in run.steps():
        # 1. Sync: the sampler takes the policy's current weights, once per rollout batch.
        run.phase("sync")
        sampler.load(policy.named_tensors(run.dtype))

        # 2. Sample N responses to every prompt at --temperature: sharded over the ranks, gathered on all.
        run.phase("sample")
        prompts = run.next_prompts()
        groups = run.sample(prompts, args.votes)
        sampler.sleep()  # gives the GPU's memory to the update

        # 3. Vote, reward, advantage: all N vote, a seeded random G of them are trained.
        run.phase("score")
        policy.score(sum(groups, []), "old_logp", args.temperature)  # of all N
        run.phase("vote")
        train = []
        for prompt, responses in zip(prompts, groups):
            classes_N = common.answer_classes(prompt, responses)  # for the log alone
            logps_N = [response.mean(response.old_logp) for response in responses]
            rewards_N = self_confidence(logps_N, args.alpha)
            trained_G = run.subset(len(responses), args.train_samples, prompt)  # indices
            run.log_group(prompt, responses, classes_N, rewards_N, trained_G, None)
            for i, advantage in zip(trained_G, rewards_N[trained_G].tolist(), strict=True):
                responses[i].advantage = advantage
                train.append(responses[i])

        # 4. Score: the trainer's own log-probs of the responses under the policy that sampled them (the ratio
        #    divides by them; a single minibatch: step 6 computes them), and under the frozen initial model.
        run.phase("score")
        if args.num_minibatches > 1:
            policy.score(train, "old_logp", args.temperature)
        if reference:
            reference.score(train, "ref_logp", args.temperature)

        # 5. Compare: the sampler must have run this very policy, else stop (a single minibatch: in step 7).
        if args.num_minibatches > 1:
            run.check_sampler(train)

        # 6. Update: one optimizer step per minibatch; the ranks share its micro-batches, what fits in memory.
        run.phase("update")
        optimizer.param_groups[0]["lr"] = run.learning_rate()
        for minibatch in run.minibatches(train):
            minibatch_tokens = sum(response.length for response in minibatch)
            for micro in policy.micro_batches(minibatch):
                logp_T, entropy_T = policy.logprobs(micro, args.temperature)  # of logits / temperature
                if micro.old_logp_T is None:
                    micro.keep_old_logp(logp_T.detach())  # a single minibatch: ratio 1, gradient grad log pi
                ratio_T = (logp_T - micro.old_logp_T).exp()
                clipped_T = ratio_T.clamp(1 - args.clip_low, 1 + args.clip_high)
                loss_T = -torch.min(ratio_T * micro.advantage_T, clipped_T * micro.advantage_T)
                d_T = (micro.ref_logp_T if reference else logp_T.detach()) - logp_T
                kl_T = d_T.exp() - d_T - 1  # k3, never negative; 0 without a reference
                loss_T = loss_T + args.kl_coef * kl_T - args.entropy_coef * entropy_T
                # GRPO: the mean over a response's tokens, then over the minibatch's responses, of all ranks.
                weight_T = micro.mask_T / (micro.length_T * len(minibatch))
                if args.loss_aggregation == "token-mean":  # DAPO: over all tokens of the minibatch
                    weight_T = micro.mask_T / minibatch_tokens
                loss = (loss_T * weight_T).sum()
                (loss * run.world_size).backward()  # FSDP averages over ranks, but their losses add up
                run.log_tokens(weight_T, loss=loss_T, kl=kl_T, entropy=entropy_T,
                               clip_fraction=ratio_T != clipped_T)
            grad_norm = policy.clip_grad_norm(args.grad_clip)
            if math.isfinite(grad_norm):  # else skipped and counted
                optimizer.step()
            optimizer.zero_grad()
            run.log_update(grad_norm)

        # 7. Compare (a single minibatch: log-probs of step 6), log, evaluate, save a checkpoint.
        if args.num_minibatches == 1:
            run.check_sampler(train)
        run.end_step()
    run.finish()


if __name__ == "__main__":
    common.launch(main, Args, common.TOY)
