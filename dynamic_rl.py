"""Dynamic RL: "All by Large Language Model Itself" (anonymous authors, under double-blind review; no arXiv id known).

The idea: the model needs no data set at all. It writes questions to one fixed prompt z_0, solves each of them several
times, and its majority answer is the label. Solutions are rewarded for agreeing with it; questions are rewarded for being
of moderate difficulty and for differing, in text and in answer, from the other questions of the batch.

    label                l(q) = the most frequent answer among the m solutions of q, r(q) = how many give it   (Eq. 4, 5)
    solution reward      R_s = 1[answer = l(q)],   p(q) = r(q) / m                                             (Eq. 6, 7)
    question reward      R_q = p / tau where p <= tau, (1 - p) / (1 - tau) where p > tau                       (Eq. 8)
    question diversity   R_dq = 1 / sum_i S_q(q, q_i),   S_q = share of positions with the same token          (Eq. 10, 11)
    answer diversity     R_da = 1 / number of questions of the batch with the same label                       (Eq. 12)
    filtering            R_q = 0 and R_s = 0 for proofs, several questions in one, and questions that hold a solution
    advantages           A_q = lambda_q z(R_q) + lambda_dq z(R_dq) + lambda_da z(R_da) over the n questions    (Eq. 14)
                         A_s = lambda_s z(R_s) over the m solutions of a question,   z(R) = (R - mean R) / (std R + eps)
    loss                 that of ttrl.py on the questions plus that on the solutions; at rho = 1 its gradient is Eq. 14's, with
                         log pi averaged over a response's tokens

Run it:
    python dynamic_rl.py                                                               # the toy, on a laptop
    python dynamic_rl.py --model Qwen/Qwen2.5-Math-1.5B                                # one GPU
    torchrun --nproc-per-node 8 dynamic_rl.py --model Qwen/Qwen2.5-Math-7B             # eight

What differs from ttrl.py: "the method" is new up to `majority_reward`, and so are the steps "Sample" and "Reward" of the
loop; the update adds two parts, the questions (only their tokens up to the end of the question) and the solutions.

Table 2:  w/o filtering --no-filter   w/o R_q --no-rq   w/o R_dq --no-rdq   w/o R_da --no-rda   tau --tau 0.25
          (a second row says tau = 3/4, which is the default; probably it was --tau 0.5)
          lambda_dq --lambda_dq 1, 1e-5   lambda_q --lambda_q 1, 1e-5
Tables 5, 6: --lambda_q and --lambda_dq 1, 1e-1, ..., 1e-5
Table 1, semi-dynamic RL: --dataset math_train, dapo or a Hub id, --labels gold, --steps 0 (one epoch)
"""

import bisect
import itertools
import re
from dataclasses import dataclass
from typing import Literal

import torch

import common
from common import Problem, encode_prompt, equivalence_classes, majority

# Without --model: the toy. It is a thousand times smaller than the papers' models, so it takes a larger learning rate.
TOY = dict(eval="toy,toy_test", steps=40, eval_every=20, checkpoint_every=10, prompts_per_batch=16, votes=16,
           train_samples=16, max_prompt_tokens=128, max_new_tokens=128, micro_tokens=2048, lr=5e-4, updates_per_batch=1, sampler="hf",
           eval_temperature=1.0, eval_top_p=1.0, eval_top_k=0, max_question_tokens=128, question_prompt="Write a problem.")

Z_0 = """Generate exactly one math question and its step-by-step solution. The answer to the question should exist and be unique.

Format the output as follows:

Question: <math question here>

Solution: <step-by-step solution here>"""


@dataclass
class Args(common.Args):
    labels: Literal["majority", "gold"] = "majority"
    """gold: supervised GRPO, only with --dataset. Semi-dynamic RL is --dataset with either kind of label (Table 1)."""
    dataset: str = ""
    """Empty: Dynamic RL, the model writes its own questions. Given: semi-dynamic RL on these problems (as in ttrl.py)."""
    question_prompt: str = Z_0
    """z_0, the one prompt that all questions answer (section 2, box "Prompt z_0"); a user turn of its own."""
    max_question_tokens: int = 1024
    """Length limit of a response to z_0 (section 3.1: 1024). A question longer than --max_prompt_tokens is filtered."""
    filter: bool = True
    """Question filtering (section 2); --no-filter is Table 2's "w/o filtering"."""
    rq: bool = True
    """Question reward R_q; --no-rq is Table 2's "w/o R_q"."""
    rdq: bool = True
    """Question diversity reward R_dq; --no-rdq is Table 2's "w/o R_dq"."""
    rda: bool = True
    """Answer diversity reward R_da; --no-rda is Table 2's "w/o R_da"."""
    tau: float = 0.75
    """tau of Eq. 8, the share of agreeing solutions that is rewarded most: 3/4 (section 3.1)."""
    lambda_q: float = 1e-3
    """lambda_q of Eq. 14, weight of R_q: 1e-3 (section 3.1; Table 5)."""
    lambda_dq: float = 1e-1
    """lambda_dq of Eq. 14, weight of R_dq: 1e-1 (section 3.1; Table 6)."""
    lambda_da: float = 1.0
    """lambda_da of Eq. 14, weight of R_da: 1 (section 3.1)."""
    lambda_s: float = 1.0
    """lambda_s of Eq. 14, weight of R_s: 1 (section 3.1)."""
    prompts_per_batch: int = 32
    """n, questions per batch: 32 (section 3.1)."""
    votes: int = 16
    """m, solutions sampled per question: 16 (section 3.1)."""
    train_samples: int = 16
    """Solutions per question that are trained: all m."""
    steps: int = 1250
    """As many as one epoch of DeepScaleR-40K has at 32 problems per batch (section 3.1)."""
    episodes: int = 1
    """With --dataset and --steps 0: one epoch (section 3.1)."""
    lr: float = 1e-6
    """Section 3.1: 1e-6."""
    updates_per_batch: int = 1
    """Not in the paper: one step, so that the clipped loss has the gradient of Eq. 14 (up to the mean over tokens)."""
    kl_coef: float = 0.0
    """Not in the paper's objective, Eq. 14."""
    eval: str = "math500,amc,aime24,aime25"
    """Section 3.1: MATH500, AMC23, AIME2024, AIME2025. 'train' needs --dataset."""
    eval_top_k: int = 20
    """Section 3.1: top-k 20, with temperature 0.6 and top-p 0.95."""

    def errors(self):
        bad = super().errors()
        checks = [("tau", 0 < self.tau <= 1, "above 0 and at most 1"), ("question_prompt", self.question_prompt.strip(), "a text"),
                  ("prompts_per_batch", self.prompts_per_batch >= 2, "at least 2: rewards are compared within the batch"),
                  ("votes", self.votes >= 2, "at least 2: rewards are compared within a question's solutions"),
                  ("max_question_tokens", self.max_question_tokens >= 1, "at least 1")]
        checks += [(flag, 0 <= getattr(self, flag) < float("inf"), "a finite number, 0 or more")
                   for flag in "lambda_q lambda_dq lambda_da lambda_s".split()]
        if not self.dataset:
            checks += [("labels", self.labels == "majority", "'majority' without --dataset: the model's own questions have no gold answer"),
                       ("steps", self.steps != 0, "at least 1 without --dataset"),
                       ("eval", "train" not in self.eval.replace(" ", "").split(","), "without 'train' where there is no --dataset")]
        return bad + [f"--{flag} is {getattr(self, flag)!r}, but must be {allowed}." for flag, ok, allowed in checks if not ok]


# ------------------------------------------------------ the method ---------------------------------------------------
def find_question(text: str) -> tuple[str | None, int]:
    """(question, where it ends in the text) of a response to z_0; (None, len(text)) where there is none.

    The question is what stands between "Question:" and the first "Solution:" after it. Section 2, "Prompt".

    >>> find_question("Question: What is 1 + 1?\\n\\nSolution: It is 2.")
    ('What is 1 + 1?', 24)
    """
    found = re.search(r"Question:(.*?)Solution:", text, re.DOTALL)
    if not found or not found[1].strip():
        return None, len(text)
    return found[1].strip(), found.start(1) + len(found[1].rstrip())


# Rule 2, "find ... and ...": both words in one sentence, which ends at . ? ! before a space (not at a decimal point).
FIND_AND = re.compile(r"\bfind\b(?:(?![.?!](?:\s|$)).)*?\band\b", re.IGNORECASE | re.DOTALL)
# Rule 2, enumerations. A marker begins a text, a line or, after . : ? !, a sentence: "f(1)", "(x - a)", "the radius is 1. Its
# height is 2." and an equation's number "(1)" behind it are none. "1." may number the one question, so it needs its "2.".
START = r"(?:^|\n\s*|[.:?!]\s+)"
ENUMERATIONS = [re.compile(pattern, re.DOTALL) for pattern in (
    START + r"1\.\s.*?(?<!\S)2\.\s", START + r"\(?(?:1|a|i)\)\s", r"(?<!\S)\((?:a|i)\)\s+(?=[\w$\\])")]
SOLVED = ("Solution:", "Answer:", "\\boxed{", "The final answer is", "To solve", "Let's break down")


def keep_question(text: str) -> bool:
    """False for a question that majority voting cannot judge. Section 2, "Question Filtering".

    Rule 1: the word "prove" (whole, any case). Rule 2, several questions in one: two question marks, "find ... and ..." in a
    sentence, an enumeration. Rule 3: one of six strings (exact case) that belong to a solution.

    >>> keep_question("Prove that 2 is even."), keep_question("Find x and y."), keep_question("How can we improve f(1)?")
    (False, False, True)
    """
    if re.search(r"\bprove\b", text, re.IGNORECASE):
        return False
    if text.count("?") > 1 or FIND_AND.search(text) or any(pattern.search(text) for pattern in ENUMERATIONS):
        return False
    return not any(phrase in text for phrase in SOLVED)


def question_reward(p: float, tau: float = 0.75) -> float:
    """R_q of a question from the share p of its solutions that agree, highest (1) at p = tau. Eq. 8.

    >>> question_reward(0.375), question_reward(0.75), question_reward(1.0)
    (0.5, 1.0, 0.0)
    """
    return p / tau if p <= tau else (1 - p) / (1 - tau)


def token_overlap(a: list[int], b: list[int]) -> float:
    """S_q: share of positions with the same token, over the shorter length; 1 if both are empty, 0 if one is. Eq. 11.

    >>> token_overlap([7, 8, 9, 5], [7, 1, 9])
    0.6666666666666666
    """
    if not a or not b:
        return float(not a and not b)
    return sum(x == y for x, y in zip(a, b)) / min(len(a), len(b))


def question_diversity(token_lists: list[list[int]]) -> torch.Tensor:
    """R_dq of n questions: 1 / sum of a question's overlaps with all n, itself among them; [n] float. Eq. 10.

    >>> question_diversity([[1, 2], [1, 2], [3, 4]]).tolist()
    [0.5, 0.5, 1.0]
    """
    return torch.tensor([1 / sum(token_overlap(a, b) for b in token_lists) for a in token_lists])


def answer_diversity(classes: list[int | None]) -> torch.Tensor:
    """R_da of n questions: 1 / number of questions with the same estimated answer l(q); [n] float. Eq. 12.

    None (no answer) gets 0 and is not counted: else a broken question would earn full diversity.

    >>> answer_diversity([0, 1, 0, None]).tolist()
    [0.5, 1.0, 0.5, 0.0]
    """
    return torch.tensor([0.0 if c is None else 1 / classes.count(c) for c in classes])


def question_advantages(r_q: torch.Tensor, r_dq: torch.Tensor, r_da: torch.Tensor, lambda_q: float = 1e-3,
                        lambda_dq: float = 0.1, lambda_da: float = 1.0) -> torch.Tensor:
    """A_q: each reward normalised over the n questions by itself, then weighted and summed; [n] each -> [n]. Eq. 14.

    >>> same, one = torch.ones(3), torch.tensor([0.0, 0.0, 1.0])
    >>> [round(a, 3) for a in question_advantages(same, one, one).tolist()]
    [-0.635, -0.635, 1.27]
    """
    return lambda_q * group_advantages(r_q) + lambda_dq * group_advantages(r_dq) + lambda_da * group_advantages(r_da)


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


def tokens_covering(prefix: str, ids: list[int], decode) -> int:
    """How many of the first tokens it takes until their text holds the whole prefix.

    >>> tokens_covering("cab", [2, 0, 1, 1], lambda ids: "".join("abc"[i] for i in ids))
    3
    """
    return 1 + bisect.bisect_left(range(1, len(ids)), True, key=lambda t: decode(ids[:t]).startswith(prefix))


def write_questions(run, args, z_0):
    """n responses to z_0, each cut after its question, and the problems in them that can be solved. Algorithm 1, step 3.

    Sets on every response: asked (1: it is a question), tokens (of the question alone), kept, and p and answer (l(q)), which
    wait for the solutions. Where no question is found the whole response is trained: its rewards are all 0, so that
    writing none is discouraged."""
    n = args.prompts_per_batch
    groups = run.sample([z_0] * n, 1, [("question", i) for i in range(n)], max_new_tokens=args.max_question_tokens)
    questions, problems = [group[0] for group in groups], []
    for i, q in enumerate(questions):
        text, end = find_question(q.text)
        q.asked, q.tokens, q.kept, q.p, q.answer, q.advantage = 1.0, [], False, 0.0, None, 0.0
        if text is None:
            continue
        # The solution that the model wrote behind its question is neither used nor trained (section 2, "Prompt").
        length = tokens_covering(q.text[:end], q.response_ids, lambda ids: run.tokenizer.decode(ids, skip_special_tokens=True))
        q.text, q.response_ids, q.logprobs = q.text[:end], q.response_ids[:length], q.logprobs[:length]
        q.tokens = run.tokenizer.encode(text, add_special_tokens=False)
        problem = Problem(text, id=i, prompt_ids=encode_prompt(run.tokenizer, text, args.prompt))
        if len(problem.prompt_ids) <= args.max_prompt_tokens:
            q.kept = keep_question(text) or not args.filter
            problems.append(problem)
    return problems, questions


def reward_questions(questions, args):
    """Set the questions' advantages from the three question rewards; returns what is logged. Algorithm 1, steps 7 to 10."""
    labels = equivalence_classes([q.answer for q in questions])
    r_q = torch.tensor([question_reward(q.p, args.tau) * q.kept for q in questions])  # filtered: 0 before normalisation
    r_dq = question_diversity([q.tokens for q in questions]) * torch.tensor([bool(q.tokens) for q in questions])
    r_da = answer_diversity(labels)
    advantages = question_advantages(r_q, r_dq, r_da, args.rq * args.lambda_q, args.rdq * args.lambda_dq, args.rda * args.lambda_da)
    for q, advantage in zip(questions, advantages.tolist()):
        q.advantage = advantage
    n = len(questions)
    return dict(question_reward=float(r_q.mean()), question_diversity=float(r_dq.mean()), answer_diversity=float(r_da.mean()),
                filtered=sum(not q.kept for q in questions) / n, no_question=sum(not q.tokens for q in questions) / n,
                unanimous=sum(q.p == 1 for q in questions),  # questions with r(q) = m, Figure 3
                unique_answers=len(set(labels) - {None}) / n,  # Figure 6
                question_length=sum(len(q.tokens) for q in questions) / n)


# ------------------------------------------------------ the loop -----------------------------------------------------
def main(args: Args) -> None:
    run = common.Run(args)
    policy = run.policy
    if args.labels == "gold" and any(p.answer is None for p in run.problems):
        raise common.UserError("--labels is 'gold', but some problems of --dataset have no gold answer.")
    turn = [{"role": "user", "content": args.question_prompt}]  # a turn of its own, without the solver's instruction
    z_0 = list(run.tokenizer.encode(args.question_prompt + "\n\n") if args.prompt == "plain" else
               run.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))
    if len(z_0) + args.max_question_tokens > args.max_prompt_tokens + args.max_new_tokens:
        raise common.UserError(f"--max_question_tokens is {args.max_question_tokens}, but must, with the {len(z_0)} tokens of "
                               f"--question_prompt, be at most --max_prompt_tokens + --max_new_tokens.")

    for _ in run.steps():
        # Sample: n questions to z_0, then m solutions to every question, all from the current policy.
        problems, questions = (run.batch(), []) if args.dataset else write_questions(run, args, z_0)
        groups = run.rollouts(problems, args.votes)

        # Reward: all N vote; a seeded random G of them are trained.
        classes, rewards, train = [], [], []
        for problem, rollouts in zip(problems, groups):
            if args.labels == "majority":
                classes.append(equivalence_classes([r.answer for r in rollouts]))
            else:
                classes.append(common.label_classes(rollouts, problem.answer))
            rewards.append(majority_reward(classes[-1]))
            if questions:  # Eq. 7 and l(q) are taken before the filter sets R_s to 0
                q, winner = questions[problem.id], majority(classes[-1])
                q.p = float(rewards[-1].mean())
                q.answer = rollouts[classes[-1].index(winner)].answer if winner is not None else None
                rewards[-1] = rewards[-1] * q.kept
            chosen = run.subset(range(args.votes), args.train_samples, problem.id)
            advantages = args.lambda_s * group_advantages(rewards[-1][chosen])
            for i, advantage in zip(chosen, advantages.tolist()):
                rollouts[i].advantage, rollouts[i].asked = advantage, 0.0
            train += [rollouts[i] for i in chosen]
        metrics = run.vote_metrics(problems, groups, classes, rewards) | (reward_questions(questions, args) if questions else {})
        written = questions
        if questions and not any(q.kept and q.answer is not None for q in questions):
            written, train = [], []  # not one usable question: diversity alone would reward noise, so there is no update

        # Update: clipped policy gradient, updates_per_batch optimizer steps. Tensors are 1-D over response tokens.
        # Both expectations of Eq. 14: the mean over the questions plus the mean over the solutions.
        run.score(written + train)
        updates = []
        with run.timer("update"):
            for parts in itertools.zip_longest(run.split(written), run.split(train), fillvalue=[]):
                for micro in policy.micro_batches(sum(parts, []), parts=parts):
                    logp, entropy = policy.logprobs(micro, entropy_grad=args.entropy_coef > 0)
                    rho = (logp - micro.old_logprobs).exp()
                    clipped = rho.clamp(1 - args.clip_low, 1 + args.clip_high)
                    loss = -micro.tis * torch.min(rho * micro.advantages, clipped * micro.advantages)  # tis: 1 unless --tis_cap
                    kl = common.k3(logp, micro.ref_logprobs)
                    loss = loss + args.kl_coef * kl - args.entropy_coef * entropy
                    asked = micro.expand("asked")  # 1 on tokens of questions, 0 on tokens of solutions: logged apart
                    policy.backward(micro, loss, kl=(1 - asked) * kl, entropy=(1 - asked) * entropy,
                                    clip_fraction=(1 - asked) * (rho != clipped), question_entropy=asked * entropy)
                updates.append(policy.step(run.learning_rate()))

        # z_0 and the questions lead, so that samples.jsonl shows some with their estimated answer and advantage.
        run.end_step(metrics, updates, [Problem(args.question_prompt)] + problems, [questions] + groups)


if __name__ == "__main__":
    common.launch(main, Args, TOY)
