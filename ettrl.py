"""ETTRL: Balancing Exploration and Exploitation in LLM Test-Time RL via Entropy Mechanism (Liu et al. 2025,
arXiv:2508.11356).

The idea: many tokens of 64 parallel responses are redundant, and a few uncertain ones ("but", "however") make
responses differ. So sample few trunks and fork them at such tokens (ETMR: TreeRL's rollouts, with a vote):
that takes fewer tokens and, the paper says, gives more diverse responses and better labels. And early in
training few responses win the vote, often wrongly, and GRPO pays few winners most. Some of them have high
entropy: the model was not sure of them. So multiply every trained response's advantage by 0.8 to 1.2, by less
if its entropy is above its group's average (EAR): relative, since the size of entropies differs between data
and models. "Uncertain" is two things in the paper: its text forks at tokens of high entropy (Eq. 4),
Algorithm 1 at tokens of low probability. Ours is Algorithm 1's.

    ETMR       M trunks, whole responses; score_t = -log pi(y_t) of their tokens                 (Algorithm 1)
               at each trunk's N highest scores draw token t anew and go on, B times  (B: Eq. 8 and Figure 2)
               leaves M (1 + B N), all of which vote                                                   (Eq. 8)
               tokens (1 + B N / 2) / (1 + B N) of parallel sampling's, if forks were spread evenly (Eq. 9-11)
    EAR        Y_i = 1 + (avg H - H_i) / avg H,   H_i = mean_t entropy of response i's tokens  (Eq. 5, 12, 13)
               Adv-Res   A_i = clip(Y_i, 1 - alpha, 1 + beta) A_i                                     (Eq. 14)
               Adv-Clip  A_i = clip(A_i, -bound, bound), the paper's other beta                       (Eq. 15)
    The reward, A_i and the loss are TTRL's (ttrl.py); ETTRL's loss, Eq. 3, has no KL term (3.1),
    nor an entropy term. The paper tests ETMR and EAR each alone; here both are on unless turned off.
    (Eq. 12 scales unsure responses down; the text after Eq. 14 says the opposite.)
    Below, N counts the forks of a trunk in the options alone; in shapes it counts responses, as everywhere.

Why it works, a worked example: docs/ettrl.md. The tables' rows as commands: docs/recipes/ettrl.md.

    python ettrl.py                                                                    # the toy, on a laptop
    python ettrl.py --model Qwen/Qwen2.5-Math-1.5B --dataset aime24                    # both, on one GPU
    torchrun --nproc-per-node 8 ettrl.py --model Qwen/Qwen2.5-Math-1.5B --advantage none     # ETMR: Table 1
    torchrun --nproc-per-node 8 ettrl.py --model Qwen/Qwen2.5-Math-1.5B --rollout parallel   # EAR: Table 2

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per response token.
"""

import math
from collections import namedtuple
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import Literal

import common  # keep above torch: it sets environment variables
import torch
from common import Problem, Rollout
from engine.metrics import mean


@dataclass
class Args(common.Args):
    rollout: Literal["etmr", "parallel"] = "etmr"
    """Kind of rollout. etmr: entropy-fork tree majority rollout (3.2). parallel: TTRL's --votes separate
    responses. The default has etmr and res together (ours): no table of the paper does."""
    trunks: common.Count = 12
    """Number M of trees per prompt (section 4)."""
    forks: common.CountOrZero = 2
    """Number N of fork points per trunk (section 4); 0: plain sampling of M responses."""
    branches: common.Count = 2
    """Number B of continuations per fork (section 4). M (1 + B N) = 60 leaves vote instead of --votes."""
    fork_score: Literal["surprisal", "entropy"] = "surprisal"
    """What makes a fork. surprisal: -log pi(y_t), Algorithm 1. entropy: of the next token, Eq. 4, the text's
    (section 3.2), by one more pass."""
    advantage: Literal["res", "clip", "none"] = "res"
    """Reshaping of advantages, EAR (3.3). res: by relative entropy (Eq. 14). clip: Eq. 15. none: TTRL's."""
    alpha: common.Share = 0.2
    """Lower bound of Adv-Res, which scales by at least 1 - alpha (Eq. 14; section 4)."""
    beta: common.NonNegative = 0.2
    """Upper bound of Adv-Res, which scales by at most 1 + beta (Eq. 14; section 4)."""
    bound: common.Positive = 2.0
    """Largest size of an advantage under Adv-Clip (beta of Eq. 15; section 4)."""
    temperature: common.Positive = 0.6
    """Sampling temperature (section 4); log-probs, entropies and ratios use it, too."""
    kl_coef: common.NonNegative = 0.001
    """Weight of the KL term; 0: none. No equation of ETTRL has one ("No KL penalty", 3.1), but TTRL's code,
    whose configuration section 4 follows."""
    eval_greedy: bool = True
    """Greedy pass@1, too (section 4); the tables' values fit means of 16 samples, eval/NAME/pass@1."""

    def responses_per_prompt(self) -> int:
        return tree_leaves(self.trunks, self.forks, self.branches) if self.rollout == "etmr" else self.votes


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


def fork_points(logprobs: list[float], n_forks: int, forbidden: set[int] | None = None) -> list[int]:
    """Positions of a trunk's n highest surprisals -log pi(y_t), best first. ETTRL Algorithm 1.

    Ties go to the earlier one; fewer than n if there are fewer. `forbidden` positions are left out: the
    end-of-sequence token is no place to fork.

    >>> fork_points([-0.1, -2.0, -0.5, -3.0], 2, forbidden={3})
    [1, 2]
    """
    allowed = [t for t in range(len(logprobs)) if t not in (forbidden or ())]
    return sorted(allowed, key=logprobs.__getitem__)[:n_forks]  # sorted keeps the order of equals


def tree_leaves(m: int, n: int, b: int) -> int:
    """Responses from M trunks with N fork points of B branches each. ETTRL Eq. 8.

    >>> tree_leaves(12, 2, 2)
    60
    """
    return m * (1 + b * n)


def reshape_advantages(advantages: torch.Tensor, entropies: torch.Tensor, alpha: float = 0.2,
                       beta: float = 0.2) -> torch.Tensor:
    """A_i clip(1 + (avg H - H_i) / avg H, 1 - alpha, 1 + beta), [G]. ETTRL Eq. 12-14, Adv-Res.

    Advantages of both signs are scaled. `entropies` [G]: mean token entropy of each
    response; avg H is over the G. If all are 0, there is nothing to compare: unchanged.

    >>> reshape_advantages(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0.9, 1.0, 1.1]))
    tensor([ 1.1000, -1.0000,  0.9000])
    """
    average = entropies.mean()
    if average == 0:
        return advantages
    return (1 + (average - entropies) / average).clamp(1 - alpha, 1 + beta) * advantages


def clip_advantages(advantages: torch.Tensor, beta: float = 2.0) -> torch.Tensor:
    """clip(A_i, -beta, beta); [G] -> [G]. ETTRL Eq. 15, Adv-Clip, the paper's comparison without entropy.

    >>> clip_advantages(torch.tensor([5.0, -0.2]))
    tensor([ 2.0000, -0.2000])
    """
    return advantages.clamp(-beta, beta)


def reshape_by_entropy(trained: list[Rollout], args: Args) -> None:
    """EAR: reshape a trained group's advantages by the sampling policy's entropies."""
    advantages_G = torch.tensor([response.advantage for response in trained])
    if not advantages_G.any():
        return  # nothing to reshape, and perhaps not scored
    if args.advantage == "res":
        entropies_G = torch.tensor([response.mean(response.entropy) for response in trained])  # Eq. 5
        advantages_G = reshape_advantages(advantages_G, entropies_G, args.alpha, args.beta)
    elif args.advantage == "clip":
        advantages_G = clip_advantages(advantages_G, args.bound)
    for response, advantage in zip(trained, advantages_G.tolist(), strict=True):
        response.advantage = advantage


# indices: of the prompt, of its trunk, of the trunk's token
Fork = namedtuple("Fork", "prompt trunk position")


def choose_forks(run, groups: list[list[Rollout]], args: Args) -> list[Fork]:
    """Where to fork every trunk: the first forks of all prompts, then the second ones, and so on.

    In this order most forks go to the rank that sampled their trunk, whose prefix cache may still hold it."""
    if args.fork_score == "entropy":
        run.sampler.sleep()  # on a GPU, its KV cache and the policy's activations may not fit together
        run.policy.score_old([trunk for trunks in groups for trunk in trunks], args.temperature)
        run.sampler.load(run.policy.named_tensors())
    forks_of_prompt = [[] for _ in groups]
    for i, trunks in enumerate(groups):
        for m, trunk in enumerate(trunks):
            minus_scores = trunk.sampler_logp if args.fork_score == "surprisal" else -trunk.entropy
            end = {len(trunk.response_ids) - 1} if trunk.finished else None
            forks_of_prompt[i] += [Fork(i, m, t) for t in fork_points(minus_scores.tolist(), args.forks, end)]
    return [fork for row in zip_longest(*forks_of_prompt) for fork in row if fork]


def graft(trunk: Rollout, position: int, branch: Rollout) -> Rollout:
    """The response that follows the trunk up to (not including) `position` and the branch from there on."""
    return Rollout(trunk.prompt_ids, trunk.response_ids[:position] + branch.response_ids,
                   torch.cat([trunk.sampler_logp[:position], branch.sampler_logp]), branch.finished)


def tree_rollouts(run, step: int, prompts: list[Problem],
                  args: Args) -> tuple[list[list[Rollout]], dict[str, float]]:
    """(the leaves of every prompt, trunks first; what they cost), in two engine calls. ETTRL Algorithm 1."""
    groups = common.sample(run, step, prompts, args.trunks)
    forks = choose_forks(run, groups, args)
    stems = [Problem("", id=(prompts[i].id, m, t),
                     prompt_ids=groups[i][m].prompt_ids + groups[i][m].response_ids[:t]) for i, m, t in forks]
    limits = [args.max_new_tokens - fork.position for fork in forks]
    branches = common.sample(run, step, stems, args.branches, limits)
    leaves = [list(trunks) for trunks in groups]
    for (i, m, position), responses in zip(forks, branches):
        leaves[i] += [graft(groups[i][m], position, branch) for branch in responses]
    for prompt, group in zip(prompts, leaves):
        common.decode(run, group[args.trunks:], prompt)
    return leaves, tree_cost(groups, leaves, forks, branches)


def tree_cost(groups: list, leaves: list, forks: list[Fork], branches: list) -> dict[str, float]:
    """Tokens generated per token of as many parallel responses (Eq. 10), and the forks' mean position.

    Of the trunk's length; Eq. 9 assumes 1/2."""
    generated = sum(len(response.response_ids) for group in groups + branches for response in group)
    parallel = 0.0
    for trunks, group in zip(groups, leaves):  # trunks are ordinary samples: parallel ones would be as long
        parallel += len(group) * mean(len(trunk.response_ids) for trunk in trunks)
    return dict(token_ratio=generated / parallel,
                fork_position=mean(t / len(groups[i][m].response_ids) for i, m, t in forks))


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
        if args.rollout == "etmr":
            groups, cost = tree_rollouts(run, step, prompts, args)
        else:
            groups, cost = common.sample(run, step, prompts, args.votes), {}
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

        # EAR: with the entropies of step 4, the advantages of each prompt's trained responses are reshaped.
        for _, trained in groupby(train, key=attrgetter("prompt_ids")):
            reshape_by_entropy(list(trained), args)

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
        log.step(step, train, lr=lr, **logp_diff, **cost)
        common.save_when_due(run, step, optimizer)  # and before an evaluation; after a signal it exits

    policy.save(log.path / "final", run.tokenizer)
    if log.evaluation_is_due(run.total_steps):
        sampler.load(policy.named_tensors())
        common.evaluate(run, run.total_steps)
    log.finish()


if __name__ == "__main__":
    common.launch(main, Args, toy=common.TOY | dict(temperature=1.0, trunks=3),
                  smollm2=common.SMOLLM2 | dict(trunks=3))
