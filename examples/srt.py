"""SRT: ttrl.py with the initial model's labels or on easy prompts (Shafayat et al. 2025, arXiv:2505.21444).

The idea: training on one's own majority works until the model learns to agree with itself. Two remedies,
which delay that: take the labels from the initial model, once (offline), and train on the prompts it agrees
on most (easy).

    label      y*  = the most frequent answer of the initial model (--labels offline) or of the current one
    easy       the share --easy_fraction of the problems with the highest initial majority; SRT's: one third
    advantage, loss: GRPO, as in ttrl.py

Checked: the paper's text (v2), appendix I.2 (offline labels), I.3 (the easiest third of DAPO, with the
current model's labels). The paper counts that majority over 32 responses of Qwen2.5-Math-7B; ours over
--votes of the model that is trained. Its released script trains with RLOO; the paper finds GRPO alike
(Figure 8).

    python -m examples.srt                                                             # the toy, on a laptop
    torchrun --nproc-per-node 8 -m examples.srt --model Qwen/Qwen3-4B-Base --dataset dapo --eval math500 \\
        --epochs 1 --labels majority --easy_fraction 0.333 --eval_every 100

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per token of a micro-batch.
"""

import math
from dataclasses import dataclass
from typing import Literal

import common  # first: it sets what torch reads when it is loaded
import torch
from common import majority
from engine.initial_votes import initial_votes


@dataclass
class Args(common.Args):
    labels: Literal["offline", "majority", "gold"] = "offline"
    """offline: the initial model's majority answer, once. majority: TTRL's. gold: supervised GRPO."""
    easy_fraction: common.PositiveShare = 1.0
    """Keep this share of the problems, those with the highest majority ratio of the initial model."""


# ------------------------------------------------- the method -----------------------------------------------
def majority_reward(classes: list[int | None]) -> torch.Tensor:
    """1 for responses in the most frequent answer class, else 0; [N] float. TTRL; ETTRL paper, Eq. 7.

    None (no answer) never votes and gets 0; a tie goes to the class seen first.

    >>> majority_reward([0, 1, 0, None]).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    winner = majority(classes)
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


def easiest(problems: list, votes: dict, args: Args) -> list:
    """The share of the problems with the most votes for their majority answer, at least a batch of them."""
    n = max(args.prompts_per_batch, round(args.easy_fraction * len(problems)))
    return sorted(problems, key=lambda problem: -votes[problem.id][1])[:n]


def offline_classes(prompt: common.Problem, responses: list, label: str | None) -> list[int | None]:
    """[N] 0 if the answer equals the initial model's, else None, so that this label wins every vote."""
    right, *classes = prompt.classes([label, *[response.answer for response in responses]])
    return [0 if c is not None and c == right else None for c in classes]


# -------------------------------------------------- the loop ------------------------------------------------
def main(args: Args) -> None:
    run = common.Run(args)
    policy, reference, sampler, optimizer = run.policy, run.reference, run.sampler, run.optimizer
    votes = initial_votes(run) if args.labels == "offline" or args.easy_fraction < 1 else {}
    if args.easy_fraction < 1:
        run.problems = easiest(run.problems, votes, args)
        run.count_steps()

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
            if args.labels == "offline":
                classes_N = offline_classes(prompt, responses, votes[prompt.id][0])
            else:
                # equal answers share a class
                classes_N = common.answer_classes(prompt, responses, args.labels)
            rewards_N = majority_reward(classes_N)
            trained_G = run.subset(len(responses), args.train_samples, prompt)  # indices
            run.log_group(prompt, responses, classes_N, rewards_N, trained_G, majority(classes_N))
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
    common.launch(main, Args, common.TOY)
