"""Dynamic RL: formulas against hand-worked numbers, filter rules on real questions, the loop's gradient against Eq. 14."""

import doctest
import json
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import run_toy
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import dynamic_rl
from dynamic_rl import (
    Args, answer_diversity, find_question, keep_question, question_advantages, question_diversity, question_reward,
    reward_questions, token_overlap, tokens_covering, write_questions)


# ---- formulas -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("p, tau, expected", [
    (0.0, 0.75, 0.0), (0.75, 0.75, 1.0), (1.0, 0.75, 0.0),
    (6 / 16, 0.75, 0.5),        # 0.375 / 0.75
    (14 / 16, 0.75, 0.5),       # (1 - 0.875) / (1 - 0.75) = 0.125 / 0.25
    (0.5, 0.25, 2 / 3),         # (1 - 0.5) / (1 - 0.25)
    (0.125, 0.25, 0.5),         # 0.125 / 0.25
    (0.3, 1.0, 0.3), (1.0, 1.0, 1.0)])  # tau = 1: the first branch only, no division by 0
def test_question_reward_eq_8(p, tau, expected):
    assert question_reward(p, tau) == pytest.approx(expected)


@pytest.mark.parametrize("a, b, expected", [
    ([1, 2, 3, 4], [1, 9, 3, 4], 3 / 4),
    ([1, 2, 3, 4], [1, 2], 1.0),          # over the shorter length: a beginning overlaps wholly
    ([1, 2, 3], [9, 1, 2, 3], 0.0),       # by position: shifted by one, nothing is the same
    ([5], [5, 6, 7], 1.0), ([], [], 1.0), ([], [1], 0.0), ([1], [], 0.0)])
def test_token_overlap_eq_11(a, b, expected):
    assert token_overlap(a, b) == pytest.approx(expected)


def test_question_diversity_eq_10():
    # Overlaps: (1,2) 1/2; (1,3) [8, 2] with [8] over one token: 1; (2,3) [8, 3, 4] with [8]: 1; (1,2) [8, 2] with [8, 3, 4]: 1/2
    # R_dq: 1 / (1 + 1/2 + 1) = 0.4;  1 / (1/2 + 1 + 1) = 0.4;  1 / (1 + 1 + 1) = 1/3;  [5, 5] is like none but itself: 1
    assert question_diversity([[8, 2], [8, 3, 4], [8], [5, 5]]).tolist() == pytest.approx([0.4, 0.4, 1 / 3, 1.0])
    assert question_diversity([[], [], [1]]).tolist() == pytest.approx([0.5, 0.5, 1.0])
    assert question_diversity([[1, 2]] * 4).tolist() == [0.25] * 4  # collapse: 1 / n


@pytest.mark.parametrize("classes, expected", [
    ([0, 1, 0, 2, 0], [1 / 3, 1, 1 / 3, 1, 1 / 3]),
    ([0, None, None, 0], [0.5, 0, 0, 0.5]),     # None gets 0 and is not counted
    ([None, None], [0, 0]), ([], [])])
def test_answer_diversity_eq_12(classes, expected):
    assert answer_diversity(classes).tolist() == pytest.approx(expected)


def test_question_advantages_eq_14():
    # R_q = 0, 1:       mean 1/2, unbiased std sqrt((1/4 + 1/4) / 1) = 0.70711, z = -0.70711, 0.70711
    # R_dq = 0.6, 0.2:  mean 0.4, std sqrt(0.04 + 0.04) = 0.28284, z = 0.70711, -0.70711 (the scale goes)
    # R_da = 1, 1:      no spread, z = 0, 0
    # A = 0.001 (-0.70711) + 0.1 (0.70711) + 1 (0) = 0.0700036 and its negative
    r_q, r_dq, r_da = torch.tensor([0.0, 1.0]), torch.tensor([0.6, 0.2]), torch.ones(2)
    assert question_advantages(r_q, r_dq, r_da).tolist() == pytest.approx([0.0700036, -0.0700036], abs=2e-6)
    # lambdas 2, 0, 3 with R_da = 0.5, 1: z = -0.70711, 0.70711; A = 2 (-0.70711) + 3 (-0.70711) = -3.53553
    got = question_advantages(r_q, r_dq, torch.tensor([0.5, 1.0]), lambda_q=2, lambda_dq=0, lambda_da=3)
    assert got.tolist() == pytest.approx([-3.53553, 3.53553], abs=5e-5)
    assert question_advantages(torch.zeros(3), torch.ones(3), torch.zeros(3)).tolist() == [0, 0, 0]


def written(p, answer, tokens, kept=True):
    return SimpleNamespace(p=p, answer=answer, tokens=tokens, kept=kept)


def test_reward_questions_by_hand():
    # tau 0.75, n = 4.  R_q: 1 for p = 0.75; filtered: 0 (its own would be 0.5); 0 for p = 1; nothing found: 0
    # R_dq: [1, 2] and [1, 3] overlap 1/2: 2/3 each; [7, 7] 1; nothing found: 0 (not 1: it is no question)
    # R_da: answers 4, 4, 9, none: 1/2, 1/2, 1, 0
    questions = [written(0.75, "4", [1, 2]), written(0.375, "4", [1, 3], kept=False), written(1.0, "9", [7, 7]),
                 written(0.0, None, [], kept=False)]
    metrics = reward_questions(questions, Args(lambda_q=1, lambda_dq=1, lambda_da=1))
    assert metrics["question_reward"] == pytest.approx(1 / 4)
    assert metrics["question_diversity"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 4)
    assert metrics["answer_diversity"] == pytest.approx(2 / 4)
    assert (metrics["filtered"], metrics["no_question"], metrics["unanimous"], metrics["unique_answers"]) == (0.5, 0.25, 1, 0.5)
    # z(R_q): mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, std 1/2: 1.5, -0.5, -0.5, -0.5
    # z(R_da): mean 1/2, variance (0 + 0 + 1/4 + 1/4) / 3 = 1/6, std 0.40825: 0, 0, 1.22474, -1.22474
    # z(R_dq): mean 7/12, deviations 1/12, 1/12, 5/12, -7/12, variance (1 + 1 + 25 + 49) / 144 / 3 = 0.175926, std 0.419435:
    #          0.198680, 0.198680, 0.993400, -1.390760
    expected = [1.5 + 0.198680, -0.5 + 0.198680, -0.5 + 0.993400 + 1.224745, -0.5 - 1.390760 - 1.224745]
    assert [q.advantage for q in questions] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("flags, expected", [  # the z-scores above, one reward switched off
    (dict(rq=False), [0.198680, 0.198680, 2.218145, -2.615505]),
    (dict(rdq=False), [1.5, -0.5, 0.724745, -1.724745]),
    (dict(rda=False), [1.698680, -0.301320, 0.493400, -1.890760])])
def test_ablation_flags_remove_one_reward(flags, expected):
    questions = [written(0.75, "4", [1, 2]), written(0.375, "4", [1, 3], kept=False), written(1.0, "9", [7, 7]),
                 written(0.0, None, [], kept=False)]
    reward_questions(questions, Args(lambda_q=1, lambda_dq=1, lambda_da=1, **flags))
    assert [q.advantage for q in questions] == pytest.approx(expected, abs=2e-5)


# ---- questions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, question, rest", [
    ("Question: What is 1 + 1?\n\nSolution: 2", "What is 1 + 1?", "\n\nSolution: 2"),
    ("Sure!\n\nQuestion:\nSolve $x = 3$.\nSolution: a\nQuestion: b Solution: c",
     "Solve $x = 3$.", "\nSolution: a\nQuestion: b Solution: c"),
    ("Solution: none. Question: Here?Solution:", "Here?", "Solution:"),
    ("Question: never ends", None, ""), ("Solution: 3", None, ""), ("Question: \n\nSolution: 3", None, ""), ("", None, "")])
def test_find_question(text, question, rest):
    found, end = find_question(text)
    assert found == question and text[end:] == rest


def test_tokens_covering():
    pieces = ["Ques", "tion:", " How", " many?\n\n", "Solution", ":"]
    decode = lambda ids: "".join(pieces[i] for i in ids)
    assert tokens_covering("Question: How many?", list(range(6)), decode) == 4  # the token that also holds the line break
    assert tokens_covering("Question: How", list(range(6)), decode) == 3
    assert tokens_covering("Ques", [0], decode) == 1


KEEP = [
    # the paper: Table 4, and the cases of Table 3 that its rules do not catch
    "What is the value of x in the equation $2x + 3 = 7$?",
    "Solve for x:\n$x^2 - 5x + 6 = 0$",
    "Consider three sets A, B, and C defined as follows:\n$A = \\{x \\in \\mathbb{R} \\mid x^2 - 3x + 2 \\geq 0\\}$\n$B = \\{x \\in "
    "\\mathbb{R} \\mid x < 2\\}$\n$C = \\{x \\in \\mathbb{R} \\mid x^2 - 4 \\leq 0\\}$\nDetermine $(A \\cup B) \\cap C$.",
    "Evaluate the line integral of the vector field $\\vec{F}(x, y) = (y^2, x^2)$ along the curve defined by the parametric "
    "equations $x = \\cos(t)$, $y = \\sin(t)$, $0 \\leq t \\leq 2\\pi$.",
    "Given the function $f(v) = v^5 + v^3$, find the integral of $\\frac{f'(v)}{2f(v)}$ with respect to $v$.",
    "Find the unique positive integer x such that $\\lfloor \\frac{x}{5} \\rfloor \\times \\lfloor \\frac{x}{7} \\rfloor = 15$.",
    "What is the determinant of a 2x2 matrix?",
    "Suppose the probability that a randomly chosen 10-digit phone number contains at least one digit that is 1 is calculated. If "
    "there are 9 choices for digits 2-9 and 10 choices for digit 0, find this probability. Also, consider if each digit is used "
    "independently for the phone number.",
    "Let X and Y be independent random variables, each following a uniform distribution on the interval $[0, 1]$. Let "
    "$Z = \\min(X, Y)$ and $W = \\max(X, Y)$. Find the value of $P(Z + W \\geq 1.5)$.",
    # "prove" only as a word of its own
    "A coach wants to improve a runner's time of 60 seconds by 5%. What is the new time in seconds?",
    "It was proved in 1994 that $x^n + y^n = z^n$ has no solution for $n > 2$. How many has it for $n = 1$, $x + y = 4$, $x < y$?",
    "A company approves 3 of every 8 loans. How many of 64 loans does it approve?",
    "An improved engine uses 12% less fuel than 50 litres. How much fuel does it use?",
    # "find" and "and" in different sentences, in the other order, or inside other words
    "Find $x$ if $3x = 12$. Tom and Ann each have $x$ pens.",
    "The legs of a right triangle are 3 and 4. Find its hypotenuse.",
    "Find the remainder when $7^{2023}$ is divided by 10.",
    "Find the area of a band of width 2.5 around a circle of radius 10.",
    "Finding a seat takes 5 minutes and walking home takes 10. How long is that together?",
    "Find the standard deviation of a fair die.",
    # numbers, functions, points and labels that are no list
    "The radius of circle A is 1. The radius of circle B is 2. What is the ratio of their areas?",
    "If $f(1) = 2$ for a linear function with slope 3, what is $f(2)$?",
    "Let $g(x) = 3x - 1$. Compute $g(1) + g(2)$.",
    "Expand $(x - a) (x + a)$.",
    "Compute $(x + 1) (x + 2)$ at $x = 3$.",
    "If $x + y = 5$ (1) and $x - y = 1$ (2), what is $xy$?",
    "Let $f(x, a) = ax^2$. What is $f(2, 3)$?",
    "Simplify $(3 + 2i)(1 - i)$.",
    "What is the sum of 3.1 and 2.2?",
    "The ratio of boys to girls is 2:1. There are 12 girls. How many boys are there?",
    "1. What is the value of $\\sqrt{144}$?",
    "How many integers $n$ with $1 \\leq n \\leq 100$ are divisible by 3?",
    "The temperatures were 1.5, 2.5 and 3.5 degrees. What is their mean?",
    "A bag holds 5 red balls, 4 blue balls, and 3 green balls. What is the probability of drawing a blue one?",
    "Which is largest: (A) $2^{10}$ (B) $3^7$ (C) $5^4$?",
    # rule 3 is exact in case and spelling
    "Two solutions are mixed: 3 litres of 20% acid with 2 litres of 45% acid. What percentage is the mixture?",
    "Give your answer as a fraction: what is 0.125?",
    "A robot needs 4 steps to solve a maze. How many to solve 12 mazes like it?",
    "Leo has 29 apples. That is 5 fewer than Mia has. How many apples does Mia have?",
]
FILTER = [
    # the paper: the sub-questions of Table 3, its non-unique case (by "find ... and ..."), its examples of the rules
    "In triangle ABC, vertex A has an angle of 163°, side BC measures 1.9 units, and vertex C has an angle of 7°. Find: 1. The "
    "area of triangle ABC. 2. The circumradius of triangle ABC. 3. The inradius of triangle ABC. 4. The semiperimeter of triangle ABC.",
    "In triangle ABC, side BC measures 1.9 units. Find:\n1. The area of triangle ABC.\n2. The circumradius of triangle ABC.",
    "Find two integers x and y such that $x^2 + y^2 = 7$.",
    # proofs
    "Prove that the sum of two even integers is even.",
    "Let $n$ be odd. Can you prove that $n^2$ is odd?",
    "PROVE: $\\sqrt{2}$ is irrational.",
    "Compute $1 + 2 + \\dots + 100$; then prove your formula.",
    # several questions
    "What is the area of a circle of radius 3? What is its circumference?",
    "A train travels 120 km in 2 hours. How fast is it? How far does it go in 5 hours?",
    "Find the mean and the median of 1, 4, 7, 8.",
    "For $f(x) = x^2 - 4x$, find its minimum value and the point where it is reached.",
    "Find the sum $x + y$ where $2x = 6.5$ and $y = 4$.",
    "Find the eigenvalues\nand the eigenvectors of $\\begin{pmatrix} 2 & 0 \\\\ 0 & 3 \\end{pmatrix}$.",
    # enumerations
    "A die is rolled. Compute the following. 1. The chance of a six. 2. The expected value.",
    "Let $f(x) = x^3$.\n1) Compute $f'(2)$.\n2) Compute $f''(2)$.",
    "Let $f(x) = x^3$.\n(1) Compute $f'(2)$.\n(2) Compute $f''(2)$.",
    "A box has 5 red balls. Determine: (1) the chance of red (2) the chance of blue",
    "For the parabola $y = x^2 - 2x$, determine (a) its vertex, (b) its roots.",
    "(a) Solve $x^2 = 9$. (b) Solve $x^2 = 16$.",
    "Consider the sequence 2, 4, 8.\na) Give the next term.\nb) Give the tenth term.",
    "Consider the vector (1, 2). Compute (i) its length, (ii) its angle with the first axis.",
    "Consider the vector (1, 2).\n(i) Compute its length.\n(ii) Normalise it.",
    # solutions inside
    "What is $2 + 2$? Answer: 4",
    "What is $2 + 2$?\nSolution: 4",
    "What is $3 \\cdot 4$, in the form \\boxed{12}?",
    "Compute $5!$. The final answer is 120.",
    "What is $x$ if $x + 1 = 3$? To solve it, subtract 1.",
    "How many primes are below 10? Let's break down the numbers.",
]


@pytest.mark.parametrize("text", KEEP)
def test_kept_questions(text):
    assert keep_question(text)


@pytest.mark.parametrize("text", FILTER)
def test_filtered_questions(text):
    assert not keep_question(text)


def test_the_table_is_long_enough():
    assert len(set(KEEP + FILTER)) == len(KEEP + FILTER) >= 50


def test_write_questions_cuts_and_filters():
    tokenizer = AutoTokenizer.from_pretrained(common.TOY)
    texts = ["Question: Tom has 25 apples.\n\nSolution: That is \\boxed{25}.", "Tom has \\boxed{3} apples.",
             "Question: Tom has 2 pens? Ann has 3 pens?\n\nSolution:", "Question: " + "Tom has 2 pens. " * 30 + "\n\nSolution:"]
    responses = []
    for text in texts:
        ids = tokenizer.encode(text) + [tokenizer.eos_token_id]
        responses.append(common.Rollout([1], ids, torch.arange(len(ids)).float(), True, text=text, answer=common.extract_answer(text)))
    keys = []

    def sample(prompts, n, names, max_new_tokens):
        assert prompts == [[1]] * 4 and n == 1 and max_new_tokens == 99
        keys.extend(names)
        return [[r] for r in responses]

    whole = [list(r.response_ids) for r in responses]
    args = Args(prompts_per_batch=4, max_prompt_tokens=100, max_question_tokens=99)
    problems, questions = write_questions(SimpleNamespace(sample=sample, tokenizer=tokenizer), args, [1])
    assert len(set(keys)) == 4  # equal prompts, different seeds
    assert [p.id for p in problems] == [0, 2] and problems[0].question == "Tom has 25 apples."
    assert problems[0].prompt_ids == common.encode_prompt(tokenizer, "Tom has 25 apples.")
    # "Question: Tom has 25 apples." and not a token more; the solution's answer does not become the question's
    assert tokenizer.decode(questions[0].response_ids).rstrip() == questions[0].text == "Question: Tom has 25 apples."
    assert questions[0].response_ids == whole[0][:len(questions[0].response_ids)]
    assert questions[0].logprobs.tolist() == list(range(len(questions[0].response_ids)))
    assert questions[0].tokens == tokenizer.encode("Tom has 25 apples.", add_special_tokens=False)
    # no question: the whole response with its end; two question marks: filtered but solved; too long: filtered, not solved
    assert questions[1].response_ids == whole[1] and questions[1].tokens == []
    assert questions[3].tokens and len(questions[3].response_ids) < len(whole[3])
    assert [q.kept for q in questions] == [True, False, False, False]
    assert [q.answer for q in questions] == [None] * 4 and [q.p for q in questions] == [0] * 4


# ---- the loop -------------------------------------------------------------------------------------------------------
def spy(monkeypatch):
    """Record what one step of the real loop samples, trains and computes as gradient."""
    seen = SimpleNamespace(parts=[], gradients=[])
    rollouts, micro_batches, step = common.Run.rollouts, common.Policy.micro_batches, common.Policy.step

    def spy_rollouts(self, problems, n):
        seen.problems, seen.groups = problems, rollouts(self, problems, n)
        return seen.groups

    def spy_micro_batches(self, minibatch, parts=None):
        seen.parts.append(parts)
        return micro_batches(self, minibatch, parts)

    def spy_step(self, lr):
        seen.gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters()})
        return step(self, lr)

    monkeypatch.setattr(common.Run, "rollouts", spy_rollouts)
    monkeypatch.setattr(common.Policy, "micro_batches", spy_micro_batches)
    monkeypatch.setattr(common.Policy, "step", spy_step)
    return seen


def z(values):
    mean, spread = statistics.mean(values), statistics.stdev(values)
    return [(v - mean) / spread if spread > 1e-9 else 0.0 for v in values]


def test_gradient_is_eq_14(tmp_path, monkeypatch):
    """The loop's gradient on the toy against autograd of Eq. 14 on full logits, with advantages worked out anew."""
    seen = spy(monkeypatch)
    lambdas = dict(lambda_q=0.7, lambda_dq=0.4, lambda_da=1.3, lambda_s=0.6)
    run_toy(dynamic_rl, tmp_path / "run", steps=1, updates_per_batch=1, grad_clip=1e9, micro_tokens=500, **lambdas)
    (questions, solutions), = seen.parts
    questions = sorted(questions, key=lambda q: [p.question for p in seen.problems].index(q.text.removeprefix("Question: ")))
    assert len(questions) == len(seen.problems) == 4 and len(solutions) == 32

    # Eq. 4 to 12, straight from the texts
    r_q, labels, a_s = [], [], {}
    for problem, group in zip(seen.problems, seen.groups):
        answers = [r.answer for r in group]
        label = max((a for a in answers if a), key=lambda a: (answers.count(a), -answers.index(a)))
        p = answers.count(label) / 8
        kept = keep_question(problem.question)
        r_q.append((p / 0.75 if p <= 0.75 else (1 - p) / 0.25) * kept)
        labels.append(label)
        a_s |= dict(zip(map(id, group), z([float(a == label and kept) for a in answers])))
    tokens = [q.tokens for q in questions]
    overlap = lambda a, b: sum(x == y for x, y in zip(a, b)) / min(len(a), len(b))
    r_dq = [1 / sum(overlap(a, b) for b in tokens) for a in tokens]
    r_da = [1 / labels.count(label) for label in labels]
    a_q = [0.7 * x + 0.4 * y + 1.3 * w for x, y, w in zip(z(r_q), z(r_dq), z(r_da))]

    tokenizer = AutoTokenizer.from_pretrained(common.TOY)
    model = AutoModelForCausalLM.from_pretrained(common.TOY, dtype=torch.float32)

    def mean_log_pi(r):
        logits = model(input_ids=torch.tensor([r.prompt_ids + r.response_ids])).logits[0]
        logp = torch.log_softmax(logits, -1)
        return sum(logp[len(r.prompt_ids) - 1 + t, token] for t, token in enumerate(r.response_ids)) / len(r.response_ids)

    for q in questions:  # only question tokens are trained
        assert tokenizer.decode(q.response_ids).rstrip() == q.text and "Solution" not in q.text
    objective = sum(a * mean_log_pi(q) for a, q in zip(a_q, questions)) / 4
    objective = objective + sum(0.6 * a_s[id(s)] * mean_log_pi(s) for s in solutions) / 32
    (-objective).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(seen.gradients[0][name], parameter.grad, atol=2e-5, rtol=1e-3)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) > 1e-2


def test_run_logs_everything(tmp_path):
    metrics = run_toy(dynamic_rl, tmp_path / "run")
    assert [m["step"] for m in metrics] == [1, 2]
    for m in metrics:
        for name in ("reward question_reward question_diversity answer_diversity filtered unanimous unique_answers question_entropy "
                     "entropy grad_norm loss").split():
            assert torch.isfinite(torch.tensor(float(m[name]))), name
        assert 0 < m["question_diversity"] <= 1 and 0 <= m["answer_diversity"] <= 1 and m["question_entropy"] > 0
        assert m["sync_max"] < 1e-3
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sum(line["problem"] == "Write a problem." and line["response"].startswith("Question:") for line in lines) >= 2


@pytest.mark.parametrize("flags", [
    dict(filter=False), dict(rq=False), dict(rdq=False), dict(rda=False), dict(tau=0.25), dict(tau=0.5), dict(tau=1.0),
    dict(lambda_q=1.0), dict(lambda_dq=1e-5), dict(lambda_s=0.0, train_samples=4), dict(updates_per_batch=8),
    dict(kl_coef=0.01, entropy_coef=0.01, loss_aggregation="token"), dict(old_logprobs="sampler", tis_cap=2.0)])
def test_every_flag_runs_a_step(tmp_path, flags):
    metrics, = run_toy(dynamic_rl, tmp_path / "run", steps=1, **flags)
    assert metrics["grad_norm"] > 0 and metrics["skipped_updates"] == 0


def assert_no_update(folder, metrics):
    assert all("loss" not in m and m["skipped_updates"] == 0 for m in metrics) and len(metrics) == 2
    before = AutoModelForCausalLM.from_pretrained(common.TOY, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float32).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_all_filtered_is_no_update(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_rl, "keep_question", lambda text: False)
    metrics = run_toy(dynamic_rl, tmp_path / "run", kl_coef=0.01)
    assert metrics[0]["filtered"] == 1 and metrics[0]["reward"] == metrics[0]["question_reward"] == 0
    assert_no_update(tmp_path / "run", metrics)


def test_all_unanswerable_is_no_update(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "extract_answer", lambda text, choices=False: None)
    metrics = run_toy(dynamic_rl, tmp_path / "run")
    assert metrics[0]["answered"] == metrics[0]["unique_answers"] == metrics[0]["answer_diversity"] == 0
    assert_no_update(tmp_path / "run", metrics)


def test_no_question_found_is_no_update(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_rl, "find_question", lambda text: (None, len(text)))
    metrics = run_toy(dynamic_rl, tmp_path / "run")
    assert metrics[0]["no_question"] == metrics[0]["filtered"] == 1 and metrics[0]["question_diversity"] == 0
    assert_no_update(tmp_path / "run", metrics)


def test_all_too_long_is_no_update(tmp_path):
    metrics = run_toy(dynamic_rl, tmp_path / "run", max_prompt_tokens=12, max_new_tokens=200)
    assert metrics[0]["filtered"] == 1 and metrics[0]["no_question"] < 1
    assert_no_update(tmp_path / "run", metrics)


@pytest.mark.parametrize("labels", ["gold", "majority"])
def test_semi_dynamic(tmp_path, labels):
    metrics, = run_toy(dynamic_rl, tmp_path / "run", steps=1, dataset="toy", labels=labels)
    assert "question_reward" not in metrics and metrics["grad_norm"] > 0
    if labels == "gold":
        assert metrics["reward"] == pytest.approx(metrics["batch_pass@1"]) and metrics["reward_accuracy"] == 1


# ---- bad input ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags, expected", [
    (dict(tau=0.0), "--tau is 0.0, but must be above 0 and at most 1."),
    (dict(tau=1.5), "--tau is 1.5, but must be above 0 and at most 1."),
    (dict(tau=float("nan")), "--tau is nan, but must be above 0 and at most 1."),
    (dict(prompts_per_batch=1), "--prompts_per_batch is 1, but must be at least 2: rewards are compared within the batch."),
    (dict(votes=1, train_samples=1), "--votes is 1, but must be at least 2: rewards are compared within a question's solutions."),
    (dict(lambda_q=-0.1), "--lambda_q is -0.1, but must be a finite number, 0 or more."),
    (dict(lambda_dq=-1.0), "--lambda_dq is -1.0, but must be a finite number, 0 or more."),
    (dict(lambda_da=float("nan")), "--lambda_da is nan, but must be a finite number, 0 or more."),
    (dict(lambda_s=float("inf")), "--lambda_s is inf, but must be a finite number, 0 or more."),
    (dict(max_question_tokens=0), "--max_question_tokens is 0, but must be at least 1."),
    (dict(question_prompt=" "), "--question_prompt is ' ', but must be a text."),
    (dict(labels="gold"), "--labels is 'gold', but must be 'majority' without --dataset: the model's own questions have no gold answer."),
    (dict(steps=0), "--steps is 0, but must be at least 1 without --dataset."),
    (dict(eval="aime24, train"), "--eval is 'aime24, train', but must be without 'train' where there is no --dataset.")])
def test_bad_flags(flags, expected):
    assert Args(**flags).errors() == [expected]


def test_good_flags():
    assert Args().errors() == Args(**dynamic_rl.TOY).errors() == Args(tau=1.0, lambda_q=0.0).errors() == []
    assert Args(dataset="toy", labels="gold", steps=0, eval="train").errors() == []


def test_question_prompt_must_fit(tmp_path):
    with pytest.raises(common.UserError, match="--max_question_tokens is 190, but must, with the .* be at most"):
        run_toy(dynamic_rl, tmp_path / "run", max_question_tokens=190)


def test_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", "dynamic_rl.py --no-filter --no-rq --no-rdq --no-rda --tau 0.5 --lambda_dq 1e-5".split())
    args = common.parse(Args, dynamic_rl.TOY)
    assert (args.filter, args.rq, args.rdq, args.rda, args.tau, args.lambda_dq) == (False, False, False, False, 0.5, 1e-5)
    assert args.question_prompt == "Write a problem." and args.dataset == ""


def test_docstring_examples():
    finder = doctest.DocTestFinder()
    for name in ("find_question keep_question question_reward token_overlap question_diversity answer_diversity question_advantages "
                 "tokens_covering").split():
        for test in finder.find(getattr(dynamic_rl, name), name, globs=vars(dynamic_rl)):
            assert test.examples and doctest.DocTestRunner().run(test).failed == 0, name
