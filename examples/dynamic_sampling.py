"""Dynamic sampling on TTRL: ttrl.py with DAPO's batches (Yu et al. 2025, arXiv:2503.14476, section 3.2).

The idea: a prompt on which all rewards are equal teaches nothing. Go on sampling until the batch is full of
prompts that do.

    batch      the first prompts_per_batch prompts with 0 < |{i in G: R_i = 1}| < G, from as many rounds of
               sampling as it takes, at most max_rounds
    reward, advantage, loss: as in ttrl.py

Checked: summaries that quote the paper's Eq. 11 (R_i is right or wrong there: --labels gold), and verl's
documentation of its recipe, which samples 1536 prompts a round for batches of 512, drops what is beyond a
full batch, as we do, and ends the run after ten rounds. Our reading: G are the trained responses, and after
max_rounds the step trains what it has. Logged: rounds, and sampled_prompts, the price of a step.

    python -m examples.dynamic_sampling                                                # the toy, on a laptop
    torchrun --nproc-per-node 8 -m examples.dynamic_sampling --model Qwen/Qwen2.5-Math-7B --dataset amc

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per token of a micro-batch.
"""

import math
from dataclasses import dataclass
from typing import Literal

import common  # first: it sets what torch reads when it is loaded
import torch
from common import majority


@dataclass
class Args(common.Args):
    labels: Literal["majority", "gold"] = "majority"
    """majority: TTRL. gold: supervised GRPO, the papers' upper bound."""
    max_rounds: common.Count = 4
    """Rounds of prompts_per_batch prompts that a step samples at most; then it trains what it has."""


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


def teaches(run, prompt: common.Problem, responses: list[common.Rollout], args: Args) -> bool:
    """Whether the trained responses to a prompt do not all have the same reward. DAPO, Eq. 11."""
    rewards_N = majority_reward(common.answer_classes(prompt, responses, args.labels))
    trained_G = run.subset(len(responses), args.train_samples, prompt)
    return bool(group_advantages(rewards_N[trained_G]).any())


def full_batch(run, args: Args) -> tuple[list[common.Problem], list[list[common.Rollout]], dict[str, float]]:
    """(prompts that teach something, their responses, what they cost), of at most max_rounds rounds.

    run.state counts the batches that were drawn, so that a resumed run goes on behind them."""
    kept: dict[int, tuple] = {}
    for number in range(1, args.max_rounds + 1):
        run.state["drawn"] = run.state.get("drawn", 0) + 1
        prompts = run.next_prompts(run.state["drawn"])
        for prompt, responses in zip(prompts, run.sample(prompts, args.votes)):
            if teaches(run, prompt, responses, args):  # asked again in a step, it answers the same
                kept[prompt.id] = (prompt, responses)
        if len(kept) >= args.prompts_per_batch:
            break
    pairs = list(kept.values())[:args.prompts_per_batch]
    cost = dict(rounds=number, sampled_prompts=number * args.prompts_per_batch)
    return [prompt for prompt, _ in pairs], [responses for _, responses in pairs], cost


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
        prompts, groups, cost = full_batch(run, args)
        sampler.sleep()  # gives the GPU's memory to the update

        # 3. Vote, reward, advantage: all N vote, a seeded random G of them are trained.
        run.phase("vote")
        train = []
        for prompt, responses in zip(prompts, groups):
            # Equal answers share a class; None: no answer. With gold labels: 0 if right, else None.
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
        run.end_step(cost)
    run.finish()


if __name__ == "__main__":
    common.launch(main, Args, common.TOY)
