"""Dynamic RL: "All by Large Language Model Itself" (submitted to ICLR 2026 and rejected; no arXiv id known).

The idea: learning is static on given solutions, semi-dynamic (usual RL) if the model samples solutions to
given questions, and dynamic if it writes the questions, too. Then they change with the model, and no data set
is needed; the paper's 7B model reaches 47.4 on average, semi-dynamic RL on 40K labelled problems 47.8. The
model writes questions to one prompt z_0 and solves each several times; its majority answer is the label.
Solutions are rewarded for agreeing with it. The principle is to write questions whose answers a vote can
estimate reliably, so moderate difficulty is rewarded, most at tau = 3/4: labels are safer, yet not all
solutions agree. Questions must also differ from the others of the batch, in answer and in text: else all
become alike. Answer, text and difficulty, each z-scored, weigh 1 : 1e-1 : 1e-3.

    label                l(q) = most frequent answer of the m solutions of q, r(q) = its votes      (Eq. 4, 5)
    solution reward      R_s = 1[answer = l(q)],   p(q) = r(q) / m                                  (Eq. 6, 7)
    question reward      R_q = p / tau if p <= tau, (1 - p) / (1 - tau) if p > tau                     (Eq. 8)
    question diversity   R_dq = 1 / sum_i S_q(q, q_i), q itself among them: at most 1             (Eq. 10, 11)
                         S_q = share of same-token positions
    answer diversity     R_da = 1 / number of questions of the batch with the same label              (Eq. 12)
    filtering            R_q = R_s = 0, R_dq and R_da stay: proofs, several questions in one, with a solution
    advantages           A_q = lambda_q z(R_q) + lambda_dq z(R_dq) + lambda_da z(R_da)                (Eq. 14)
                         A_s = lambda_s z(R_s) over the m solutions of a question, also if fewer are trained
                         z(R) = (R - mean R) / (std R + eps), for A_q over the n questions
    loss                 that of ttrl.py on the questions plus that on the solutions; at ratio 1 its gradient
                         is Eq. 14's, but log pi is averaged over a response's tokens, and the solutions' mean
                         is over those of solved questions. Clipping is not in the paper.

Why it works, a worked example: docs/dynamic_rl.md. The tables' rows as commands: docs/recipes/dynamic_rl.md.

    python dynamic_rl.py                                                               # the toy, on a laptop
    python dynamic_rl.py --model Qwen/Qwen2.5-Math-1.5B --eval_every 50                # one GPU
    torchrun --nproc-per-node 8 dynamic_rl.py --model Qwen/Qwen2.5-Math-7B --eval_every 50

Shapes are suffixes: x_N per response of a prompt, x_G per trained one, x_T per response token.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

import common  # keep above torch: it sets environment variables
import torch
from common import Problem, Rollout
from engine.data import encode_alone, encode_prompt
from engine.metrics import mean


Z_0 = """\
Generate exactly one math question and its step-by-step solution. The answer to the question should exist \
and be unique.

Format the output as follows:

Question: <math question here>

Solution: <step-by-step solution here>"""
# SmolLM2 writes no question without two worked examples as earlier turns.
EXAMPLE = """Write a problem.<|im_end|>
<|im_start|>assistant
Question: What is {}?

Solution: {}<|im_end|>
<|im_start|>user
"""
EXAMPLES = (EXAMPLE.format("3 * 4 + 2", "3 * 4 = 12, 12 + 2 = 14, so \\boxed{14}.")
            + EXAMPLE.format("5 * 6 + 7", "5 * 6 = 30, 30 + 7 = 37, so \\boxed{37}."))


@dataclass
class Args(common.Args):
    dataset: common.Place = ""
    """Training problems. Empty: none, Dynamic RL. Given, with --labels gold: semi-dynamic RL on these."""
    question_prompt: str = Z_0
    """The one prompt z_0 that all questions answer (section 2, box "Prompt z_0"); a user turn of its own."""
    max_question_tokens: common.Count = 1024
    """Length limit of a question (3.1). A question over --max_prompt_tokens is not solved."""
    filter: bool = True
    """Filter of questions (section 2); --no-filter is Table 2's "w/o filtering"."""
    rq: bool = True
    """Question reward R_q; --no-rq is Table 2's "w/o R_q"."""
    rdq: bool = True
    """Question diversity reward R_dq; --no-rdq is Table 2's "w/o R_dq"."""
    rda: bool = True
    """Answer diversity reward R_da; --no-rda is Table 2's "w/o R_da"."""
    tau: common.PositiveShare = 0.75
    """Share of agreeing solutions that is rewarded most: 3/4 (tau of Eq. 8; section 3.1)."""
    lambda_q: common.NonNegative = 1e-3
    """Weight of R_q: 1e-3 (lambda_q of Eq. 14; section 3.1; Table 5)."""
    lambda_dq: common.NonNegative = 1e-1
    """Weight of R_dq: 1e-1 (lambda_dq of Eq. 14; section 3.1; Table 6)."""
    lambda_da: common.NonNegative = 1.0
    """Weight of R_da: 1 (lambda_da of Eq. 14; section 3.1)."""
    lambda_s: common.NonNegative = 1.0
    """Weight of R_s: 1 (lambda_s of Eq. 14; section 3.1)."""
    prompts_per_batch: common.Count = 32
    """Number n of questions per batch: 32 (section 3.1)."""
    votes: common.Count = 16
    """Number m of solutions sampled per question: 16 (section 3.1)."""
    train_samples: common.Count = 16
    """Solutions per question that are trained, all m (Eq. 14); if fewer, advantages are still over all m."""
    steps: common.CountOrZero = 1259
    """Batches to train on: one epoch of DeepScaleR-40K (section 3.1), 40,315 problems (its card) by 32."""
    epochs: common.CountOrZero = 1
    """Passes over --dataset if --steps is 0: one (section 3.1)."""
    lr: common.NonNegative = 1e-6
    """Peak learning rate of AdamW: 1e-6 (section 3.1)."""
    num_minibatches: common.Count = 1
    """Optimizer steps per batch: one, which has the gradient of Eq. 14 up to the mean over tokens (ours)."""
    kl_coef: common.NonNegative = 0.0
    """Weight of the KL term; the paper's objective (Eq. 14) has none."""
    eval: common.Place = "math500,amc23,aime24,aime25"
    """Benchmarks: MATH500, AMC23, AIME2024, AIME2025 (section 3.1). 'train' needs --dataset."""
    eval_top_k: common.CountOrZero = 20
    """Top-k of evaluation: 20, with temperature 0.6 and top-p 0.95 (section 3.1)."""

    def errors(self):
        bad = super().errors()
        of_questions = self.rq * self.lambda_q, self.rdq * self.lambda_dq, self.rda * self.lambda_da
        if not any(of_questions) and not self.lambda_s:
            bad.append("--lambda_q, --lambda_dq, --lambda_da and --lambda_s are all 0 or off, but one must "
                       "be larger: else every advantage is 0.")
        return bad

    def own_prompts(self, tokenizer):
        return {"z_0 (--question_prompt)": encode_alone(tokenizer, self.question_prompt, self.prompt)}


# ------------------------------------------------- the method -----------------------------------------------
def find_question(text: str) -> tuple[str | None, int]:
    """(question, where it ends in the text) of a response to z_0; (None, len(text)) if there is none.

    The question is what stands between "Question:" and the first "Solution:" after it. Section 2, "Prompt".

    >>> find_question("Question: What is 1 + 1?\\n\\nSolution: It is 2.")
    ('What is 1 + 1?', 24)
    """
    found = re.search(r"Question:(.*?)Solution:", text, re.DOTALL)
    if not found or not found[1].strip():
        return None, len(text)
    return found[1].strip(), found.start(1) + len(found[1].rstrip())


# Rule 2, several questions in one. The paper names "find ... and ..." and enumerations "1. ... 2. ..."; the
# rest is ours. KEEP and FILTER in tests/test_dynamic_rl.py are questions that the rules leave and find.
START = r"(?:^|\n[^\S\n]*|[.:?!]\s+)"  # where a text, a line or a sentence begins
SEVERAL = [re.compile(pattern, re.DOTALL) for pattern in (
    r"(?i:\bfind\b(?:(?![.?!](?:\s|$)).)*?\band\b)",  # both words in one sentence: no . ? ! between them
    START + r"1\.\s.*?(?<!\S)2\.\s",                  # "1. ... 2. ...": "1." alone may number one question
    START + r"\(?(?:1|a|i)\)\s",                       # "(1) ...", "a) ...", "i) ..."
    r"(?<!\S)\((?:a|i)\)\s+(?=[\w$\\])")]             # "... (a) ..." within a sentence, too
SOLVED = ("Solution:", "Answer:", "\\boxed{", "The final answer is", "To solve", "Let's break down")


def keep_question(text: str) -> bool:
    """False for a question that a rule filters out. Section 2, "Question Filtering".

    Rule 1: the word "prove" (whole, any case). Rule 2, several questions in one: two question marks, "find
    ... and ..." in a sentence, an enumeration. Rule 3: one of six strings of solutions (exact case).

    >>> keep_question("Prove that 2 is even."), keep_question("Find x and y."), keep_question("Improve f(1)?")
    (False, False, True)
    """
    proof = re.search(r"\bprove\b", text, re.IGNORECASE)
    # only so far: a model can write what takes these patterns quadratic time
    several = text.count("?") > 1 or any(rule.search(text[:4000]) for rule in SEVERAL)
    solved = any(phrase in text for phrase in SOLVED)
    return not (proof or several or solved)


def question_reward(p: float, tau: float = 0.75) -> float:
    """R_q of a question from the share p of its solutions that agree, highest (1) at p = tau. Eq. 8.

    >>> question_reward(0.375), question_reward(0.75), question_reward(1.0)
    (0.5, 1.0, 0.0)
    """
    return p / tau if p <= tau else (1 - p) / (1 - tau)


def token_overlap(a: list[int], b: list[int]) -> float:
    """S_q: share of positions with the same token, over the shorter length. Eq. 11.

    1 if both are empty, 0 if one is.

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
    diversity = []
    for a in token_lists:
        diversity.append(1 / sum(token_overlap(a, b) for b in token_lists))
    return torch.tensor(diversity)


def answer_diversity(classes: list[int | None]) -> torch.Tensor:
    """R_da of n questions: 1 / number of questions with the same estimated answer l(q); [n] float. Eq. 12.

    None (no answer) gets 0 and is not counted (ours): else a broken question would earn full diversity.

    >>> answer_diversity([0, 1, 0, None]).tolist()
    [0.5, 1.0, 0.5, 0.0]
    """
    return torch.tensor([0.0 if c is None else 1 / classes.count(c) for c in classes])


def question_advantages(r_q: torch.Tensor, r_dq: torch.Tensor, r_da: torch.Tensor, lambda_q: float = 1e-3,
                        lambda_dq: float = 0.1, lambda_da: float = 1.0) -> torch.Tensor:
    """A_q: each reward normalised over the n questions, then weighted and summed; [n] each -> [n]. Eq. 14.

    The separate normalisation is Xiao et al.'s (2025), as the paper says.

    >>> same, one = torch.ones(3), torch.tensor([0.0, 0.0, 1.0])
    >>> [round(a, 3) for a in question_advantages(same, one, one).tolist()]
    [-0.635, -0.635, 1.27]
    """
    a_q, a_dq, a_da = group_advantages(r_q), group_advantages(r_dq), group_advantages(r_da)
    return lambda_q * a_q + lambda_dq * a_dq + lambda_da * a_da


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


def tokens_covering(prefix: str, ids: list[int], decode) -> int:
    """How many of the first tokens it takes until their text holds the whole prefix, which all of them hold.

    >>> tokens_covering("cab", [2, 0, 1, 1], lambda ids: "".join("abc"[i] for i in ids))
    3
    """
    n = len(ids)
    while n > 1 and decode(ids[:n - 1]).startswith(prefix):  # few are behind it: sampling stops there
        n -= 1
    return n


def write_questions(run, step: int, args: Args) -> tuple[list[Rollout], list[Problem]]:
    """(n responses to z_0, cut after their questions; the problems in them to solve). Algorithm 1, step 3.

    Each response gets: is_question, True; tokens, of the question alone; kept, False if it is filtered; p and
    label, l(q), which its solutions will tell. If no question is found, tokens are empty, and the whole
    response is trained: its rewards are all 0, which discourages it (ours)."""
    n, [z_0] = args.prompts_per_batch, args.own_prompts(run.tokenizer).values()
    asked = [Problem(args.question_prompt, id=("question", i), prompt_ids=z_0) for i in range(n)]
    questions, problems = [], []
    text_of = run.tokenizer.decode  # with special tokens, as common.decode
    limits = [args.max_question_tokens] * n
    for i, (rollout,) in enumerate(common.sample(run, step, asked, 1, limits, stop=["Solution:"])):
        questions.append(rollout)
        rollout.is_question, rollout.tokens, rollout.kept = True, [], False
        rollout.p, rollout.label = 0.0, None
        text, end = find_question(rollout.text)
        if text is None:
            continue
        # A solution that the model would write behind its question is neither used nor trained (section 2).
        length = tokens_covering(rollout.text[:end], rollout.response_ids, text_of)
        rollout.text, rollout.response_ids = rollout.text[:end], rollout.response_ids[:length]
        rollout.sampler_logp = rollout.sampler_logp[:length]
        rollout.tokens = run.tokenizer.encode(text, add_special_tokens=False)
        prompt_ids = encode_prompt(run.tokenizer, text, args.prompt, args.max_prompt_tokens)
        if prompt_ids:  # else too long
            rollout.kept = keep_question(text) or not args.filter
            problems.append(run.problem(text, id=i, prompt_ids=prompt_ids))
    return questions, problems


def judge_question(question: Rollout, responses: list[Rollout], classes: list[int | None],
                   rewards: torch.Tensor) -> torch.Tensor:
    """Set p (Eq. 7) and l(q) from a question's solutions; returns R_s [m], 0 if filtered (Algorithm 1)."""
    winner = common.majority(classes)
    question.p = float(rewards.mean())
    question.label = responses[classes.index(winner)].answer if winner is not None else None
    return rewards * question.kept


def reward_questions(questions: list[Rollout], args: Args, problem: type = Problem) -> dict[str, float]:
    """Set the questions' advantages from their three rewards; returns metrics. Algorithm 1, steps 7 to 10."""
    labels = problem.classes([q.label for q in questions])
    r_q = torch.tensor([question_reward(q.p, args.tau) * q.kept for q in questions])  # filtered: 0
    r_dq = (question_diversity([q.tokens for q in questions])
            * torch.tensor([bool(q.tokens) for q in questions]))  # no question: 0
    r_da = answer_diversity(labels)
    advantages = question_advantages(r_q, r_dq, r_da, args.rq * args.lambda_q, args.rdq * args.lambda_dq,
                                     args.rda * args.lambda_da)
    for i, q in enumerate(questions):
        q.advantage = float(advantages[i])
        q.rewards = [float(r_q[i]), float(r_dq[i]), float(r_da[i])]
    agreeing = Counter(round(q.p * args.votes) for q in questions)
    return dict(question_reward=float(r_q.mean()), question_diversity=float(r_dq.mean()),
                answer_diversity=float(r_da.mean()), filtered=mean(not q.kept for q in questions),
                no_question=mean(not q.tokens for q in questions),
                unanimous=sum(q.p == 1 for q in questions),  # questions with r(q) = m
                unique_answers=len(set(labels) - {None}) / len(questions),  # Figure 6
                question_length=mean(len(q.tokens) for q in questions),
                **{f"agreeing/{k}": agreeing[k] for k in range(1, args.votes + 1)})  # Figure 3


def question_record(q: Rollout) -> dict:
    """What samples.jsonl keeps of a question."""
    return dict(text=q.text, kept=q.kept, p=q.p, answer=q.label, rewards=q.rewards, advantage=q.advantage)


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
        if args.dataset:
            questions, prompts = [], common.next_prompts(args, run.problems, step)
        else:
            questions, prompts = write_questions(run, step, args)
        groups = common.sample(run, step, prompts, args.votes)
        sampler.sleep()  # gives the GPU's memory to the update

        # 3. Vote, reward, advantage: all N vote, a seeded random G of them are trained.
        train = []
        for prompt, responses in zip(prompts, groups):
            # Equal answers share a class; None: no answer. With --labels gold only right answers have one.
            classes_N = common.answer_classes(prompt, responses, args.labels)
            rewards_N = majority_reward(classes_N)
            if questions:
                rewards_N = judge_question(questions[prompt.id], responses, classes_N, rewards_N)
            trained_G = common.subset(args, step, prompt, len(responses))  # indices
            log.vote(prompt, responses, classes_N, rewards_N, label=common.majority(classes_N))
            advantages_N = args.lambda_s * group_advantages(rewards_N)  # Eq. 14: over all m solutions
            for i in trained_G:
                responses[i].advantage = float(advantages_N[i])
                responses[i].is_question = False
                train.append(responses[i])
        question_metrics = reward_questions(questions, args, run.problem) if questions else {}
        usable = any(question.kept and question.label is not None for question in questions)
        # not one usable question: diversity alone would reward noise, so there is no update (ours)
        train = questions + train if usable or not questions else []

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
            n_questions = sum(response.is_question for response in minibatch)
            n_solutions = len(minibatch) - n_questions
            for micro in policy.micro_batches(minibatch, args.has_gradient):
                # Of logits / temperature. The entropy has a gradient only where it has a weight.
                logp_T, entropy_T = policy.logprobs(micro, args.temperature, args.entropy_coef)
                ratio_T = (logp_T - micro.old_logp_T).exp()
                clipped_T = ratio_T.clamp(1 - args.clip_low, 1 + args.clip_high)
                pg_T = -torch.min(ratio_T * micro.advantage_T, clipped_T * micro.advantage_T)
                loss_T = pg_T - args.entropy_coef * entropy_T
                # The mean over a response's tokens, then over the minibatch's questions, or its solutions.
                question_T = micro.per_token([response.is_question for response in micro.responses])  # 1, 0
                part_T = torch.where(question_T == 1, n_questions, n_solutions)
                weight_T = micro.mask_T / (micro.length_T * part_T)  # Eq. 14: two means, added
                if args.loss_aggregation == "token-mean":  # DAPO: over all tokens of the minibatch
                    weight_T = micro.mask_T / minibatch_tokens
                if reference:
                    d_T = micro.ref_logp_T - logp_T
                    kl_T = d_T.exp() - d_T - 1  # k3, never negative
                    loss_T = loss_T + args.kl_coef * kl_T
                    log.tokens((1 - question_T) * weight_T, kl=kl_T)
                loss = (loss_T * weight_T).sum()
                loss.backward()  # gradients add up over micro-batches; FSDP sums them over the ranks
                log.tokens(weight_T, loss=loss_T)
                log.tokens(question_T * weight_T, question_entropy=entropy_T)
                log.tokens((1 - question_T) * weight_T, entropy=entropy_T, clip_fraction=ratio_T != clipped_T)
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).item()
            if math.isfinite(grad_norm):  # else skipped and counted
                optimizer.step()
            optimizer.zero_grad()
            log.update(grad_norm)

        # 7. Log the step, and save a checkpoint when it is due.
        log.append("samples.jsonl", dict(step=step, questions=[question_record(q) for q in questions]))
        log.step(step, train, lr=lr, **logp_diff, **question_metrics)
        common.save_when_due(run, step, optimizer)  # and before an evaluation; after a signal it exits

    policy.save(log.path / "final", run.tokenizer)
    if log.evaluation_is_due(run.total_steps):
        sampler.load(policy.named_tensors())
        common.evaluate(run, run.total_steps)
    log.finish()


if __name__ == "__main__":
    common.launch(
        main, Args,
        toy=common.TOY | dict(dataset="", eval="toy,toy_test", train_samples=16, num_minibatches=1,
                              eval_top_k=0, max_question_tokens=128, question_prompt="Write a problem."),
        smollm2=common.SMOLLM2 | dict(dataset="", question_prompt=EXAMPLES + "Write a problem."))
