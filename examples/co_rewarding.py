"""Co-rewarding-I: ttrl.py with labels from a rephrased question (Zhang et al. 2025, arXiv:2508.00410).

The idea: a model that votes for itself can agree on nonsense. Ask every question in two wordings, and let the
majority of the one label the responses to the other: what holds in both is less likely an illusion.

    label      y*(x)  = the most frequent answer to x', the rephrased question;  y*(x') = that to x
    reward     R_i = 1[answer_i = y*] for the responses to x and to x'; both are trained
    advantage, loss: GRPO, as in ttrl.py

Checked: the paper's abstract and the released code (each wording's majority labels the other's responses,
with the reward 1 or 0, and each is normalised by itself); the paper's own equations were not at hand. Its
x' are written by Qwen3-32B: put them in a column of the data (--rephrased_field). The code's KL weight is
0.005, its group 8 responses. Our reading for the toy: x' is x with its people renamed.

    python -m examples.co_rewarding                                                    # the toy, on a laptop
    torchrun --nproc-per-node 8 -m examples.co_rewarding --model Qwen/Qwen2.5-Math-7B \\
        --dataset problems.jsonl --steps 200

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per token of a micro-batch.
"""

import math
import re
from dataclasses import dataclass, replace

import common  # first: it sets what torch reads when it is loaded
import torch
from common import majority


@dataclass
class Args(common.Args):
    rephrased_field: str = "rephrased"
    """Column of the rephrased question; empty: people are renamed, as suits the toy."""


NAMES = "Amy Ann Dan Eva Ivy Jack Leo Lily Mia Omar Sam".split()


# ------------------------------------------------- the method -----------------------------------------------
def rephrase(problem: common.Problem, field: str) -> str:
    """The question in other words: the data's own, or with every person renamed to the next of NAMES.

    Raises UserError if the problem's row has no such column.

    >>> rephrase(common.Problem("Sam has 3 keys, Amy 2."), "")
    'Amy has 3 keys, Ann 2.'
    """
    def next_name(name: re.Match) -> str:
        return NAMES[(NAMES.index(name[0]) + 1) % len(NAMES)]

    if not field:
        return re.sub(rf"\b({'|'.join(NAMES)})\b", next_name, problem.question)
    if not isinstance(problem.row.get(field), str):
        raise common.UserError(f"--rephrased_field is {field!r}, but --dataset has a row without text in "
                               f"such a column: {problem.question[:60]!r}.")
    return problem.row[field]


def crossed_classes(prompt: common.Problem, responses: list, others: list) -> tuple[list, int | None]:
    """([N] answer classes of the responses, the class that wins the vote of the others; None: nobody's)."""
    classes = prompt.classes([response.answer for response in [*responses, *others]])
    return classes[:len(responses)], majority(classes[len(responses):])


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
        for prompt in list(prompts):
            question = rephrase(prompt, args.rephrased_field)
            ids = common.encode_prompt(run.tokenizer, question, args.prompt, args.max_prompt_tokens)
            ids = ids or prompt.prompt_ids  # too long: the question itself
            prompts.append(replace(prompt, question=question, id=(prompt.id, "twin"), prompt_ids=ids))
        groups = run.sample(prompts, args.votes)
        crossed = groups[len(groups) // 2:] + groups[:len(groups) // 2]  # each question's other wording
        sampler.sleep()  # gives the GPU's memory to the update

        # 3. Vote, reward, advantage: all N vote, a seeded random G of them are trained.
        run.phase("vote")
        train = []
        for prompt, responses, others in zip(prompts, groups, crossed):
            classes_N, label = crossed_classes(prompt, responses, others)
            rewards_N = torch.tensor([float(c is not None and c == label) for c in classes_N])
            trained_G = run.subset(len(responses), args.train_samples, prompt)  # indices
            run.log_group(prompt, responses, classes_N, rewards_N, trained_G, label)
            advantages_G = group_advantages(rewards_N[trained_G])
            for i, advantage in zip(trained_G, advantages_G.tolist(), strict=True):
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
    common.launch(main, Args, common.TOY | dict(rephrased_field=""))
