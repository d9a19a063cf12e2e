"""EM-FT: ttrl.py without any reward, entropy itself is the loss (Agarwal et al. 2025, arXiv:2505.15134).

The idea: no vote, no reward, no advantage: sample from the model and make every token's distribution sharper
where it was sampled, by the gradient of the entropy itself.

    loss       mean_i mean_t  H_t + kl_coef KL_t,   H_t = - sum_v pi(v | y_<t) log pi(v | y_<t)

Checked: the paper's text, Eq. 2, section 3.1 and Table 1: the gradient goes through H_t alone, not through
what was sampled. The paper sums over a response's tokens, which weighs all tokens alike, as
--loss_aggregation token-mean does. Our reading: the KL term of ttrl.py stays; the paper's main result is
without it (--kl_coef 0), with one response per prompt (Table 2; its appendix C has both).

    python -m examples.em_ft                                                           # the toy, on a laptop
    torchrun --nproc-per-node 8 -m examples.em_ft --model Qwen/Qwen2.5-Math-7B --dataset amc

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per token of a micro-batch.
"""

import math
from dataclasses import dataclass

import common  # first: it sets what torch reads when it is loaded
import torch


@dataclass
class Args(common.Args):
    num_minibatches: common.Count = 1
    """Optimizer steps per rollout batch: a second one would see samples of another policy, unweighted."""


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
        run.phase("vote")
        train = []
        for prompt, responses in zip(prompts, groups):
            classes_N = common.answer_classes(prompt, responses)  # for the log alone
            trained_G = run.subset(len(responses), args.train_samples, prompt)  # indices
            run.log_group(prompt, responses, classes_N, torch.zeros(len(responses)), trained_G, None)
            for i in trained_G:
                responses[i].advantage = 1.0  # alike: entropy is the loss
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
                loss_T = entropy_T
                d_T = (micro.ref_logp_T if reference else logp_T.detach()) - logp_T
                kl_T = d_T.exp() - d_T - 1  # k3, never negative; 0 without a reference
                loss_T = loss_T + args.kl_coef * kl_T - args.entropy_coef * entropy_T
                # GRPO: the mean over a response's tokens, then over the minibatch's responses, of all ranks.
                weight_T = micro.mask_T / (micro.length_T * len(minibatch))
                if args.loss_aggregation == "token-mean":  # DAPO: over all tokens of the minibatch
                    weight_T = micro.mask_T / minibatch_tokens
                loss = (loss_T * weight_T).sum()
                (loss * run.world_size).backward()  # FSDP averages over ranks, but their losses add up
                run.log_tokens(weight_T, loss=loss_T, kl=kl_T, entropy=entropy_T)
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
    common.launch(main, Args, common.TOY | dict(num_minibatches=1))
