"""EMPO: ttrl.py with the share of an answer as its reward (Zhang et al. 2025, arXiv:2504.05812).

The idea: minimise the entropy over meanings, not over tokens. Every response earns how many others say the
same; prompts on which the model is already sure, or has no idea, are left out.

    entropy    H = - sum_c p_c log p_c, with p_c the share of answer class c among the N responses  (Eq. 3, 4)
    reward     R_i = p_c of response i's class, 0 without an answer                                    (Eq. 6)
    prompts    trained if entropy_low <= H <= entropy_high                                             (Eq. 7)
    advantage, loss: GRPO, as in ttrl.py                                                               (Eq. 5)

Checked: the paper's text and released code. Our reading: classes are answers that are equal (the paper: so
for mathematics, by a small model that compares meanings elsewhere); a response without an answer is in no
class, and H is over those that answered, in nats. The code makes each such response a class of its own for
mathematics, where it rewards log p_c, and gives it -0.5 elsewhere. The paper's band is open, its text names
no numbers; the code's for mathematics is H < log N alone. The paper has no KL term (--kl_coef 0) and clips
the ratio of whole responses, as gspo.py does.

    python -m examples.empo                                                            # the toy, on a laptop
    torchrun --nproc-per-node 8 -m examples.empo --model Qwen/Qwen2.5-Math-7B --dataset amc

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per token of a micro-batch.
"""

import math
from dataclasses import dataclass

import common  # first: it sets what torch reads when it is loaded
import torch
from common import majority


@dataclass
class Args(common.Args):
    entropy_low: common.NonNegative = 0.0
    """Prompts whose answers have less entropy are left out (nats)."""
    entropy_high: common.NonNegative = 2.0
    """Prompts whose answers have more entropy are left out (nats)."""

    def errors(self) -> list[str]:
        bad = super().errors()
        if self.entropy_low > self.entropy_high:
            bad.append(f"--entropy_low is {self.entropy_low}, but must be at most --entropy_high, "
                       f"{self.entropy_high}.")
        return bad


# ------------------------------------------------- the method -----------------------------------------------
def shares(classes: list[int | None]) -> torch.Tensor:
    """The share of each response's class among all N, 0 without an answer; [N].

    >>> shares([0, 1, 0, None])
    tensor([0.5000, 0.2500, 0.5000, 0.0000])
    """
    return torch.tensor([0.0 if c is None else classes.count(c) / len(classes) for c in classes])


def answer_entropy(classes: list[int | None]) -> float:
    """Entropy (nats) over the classes of those that answered; 0 if none did.

    >>> round(answer_entropy([0, 1, 0, 1, None]), 4)
    0.6931
    """
    given = [c for c in classes if c is not None]
    return -sum(math.log(given.count(c) / len(given)) for c in given) / max(len(given), 1)


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
        groups = run.sample(prompts, args.votes)
        sampler.sleep()  # gives the GPU's memory to the update

        # 3. Vote, reward, advantage: all N vote, a seeded random G of them are trained.
        run.phase("vote")
        train = []
        for prompt, responses in zip(prompts, groups):
            classes_N = common.answer_classes(prompt, responses)  # equal answers share a class
            rewards_N = shares(classes_N)
            in_band = args.entropy_low <= answer_entropy(classes_N) <= args.entropy_high
            trained_G = run.subset(len(responses), args.train_samples, prompt)  # indices
            run.log_group(prompt, responses, classes_N, rewards_N, trained_G, majority(classes_N))
            advantages_G = in_band * group_advantages(rewards_N[trained_G])
            for i, advantage in zip(trained_G, advantages_G.tolist(), strict=True):
                responses[i].advantage = advantage
                if in_band:
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
