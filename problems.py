"""Problems, prompts and grading: benchmarks to load, how they are put to the model, how its responses are scored."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

from answers import answers_equal, equivalence_classes, extract_answer, normal_gold

TOY = Path(__file__).parent / "toy"


class UserError(Exception):
    """Something the user can mend. Shown as one sentence, never as a traceback."""


def seed_of(*parts) -> int:
    """A seed derived from its parts and nothing else, so that a resumed run repeats the uninterrupted one.

    Multiples of 2**16: an engine that gives sample i the seed s + i never lets two prompts share a stream."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") >> 1 << 16 & (1 << 62) - 1


@dataclass
class Problem:
    question: str
    answer: str | None = None
    """Gold answer. For evaluation and for logging label accuracy, never for a label-free reward."""
    id: int = 0
    choices: bool = False
    """Multiple choice: the answer is a letter."""
    prompt_ids: list[int] = field(default_factory=list)


STEM = ("abstract_algebra anatomy astronomy college_biology college_chemistry college_computer_science "
        "college_mathematics college_physics computer_security conceptual_physics electrical_engineering "
        "elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science "
        "high_school_mathematics high_school_physics high_school_statistics machine_learning").split()
MATH_CONFIGS = ("algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra "
                "precalculus").split()
BENCHMARKS = {  # short name: (Hub id, configs, split)
    "math500": ("HuggingFaceH4/MATH-500", [None], "test"),
    "aime24": ("HuggingFaceH4/aime_2024", [None], "train"),
    "aime25": ("math-ai/aime25", [None], "test"),
    "amc": ("AI-MO/aimo-validation-amc", [None], "train"),
    "minerva": ("math-ai/minervamath", [None], "test"),
    "olympiad": ("math-ai/olympiadbench", [None], "test"),
    "gpqa": ("Idavidrein/gpqa", ["gpqa_diamond"], "train"),
    "mmlu_stem": ("cais/mmlu", ["all"], "test"),
    "math_train": ("EleutherAI/hendrycks_math", MATH_CONFIGS, "train"),
    "dapo": ("open-r1/DAPO-Math-17k-Processed", ["en"], "train"),
}
TOYS = {"toy": "train.jsonl", "toy_test": "test.jsonl", "toy_ood": "ood.jsonl"}
QUESTION_FIELDS = "question problem Question Problem prompt query instruction".split()
ANSWER_FIELDS = ("answer Answer final_answer gold gold_answer ground_truth target expected_answer Correct_Answer "
                 "reward_model solution").split()


def read_rows(name: str) -> tuple[list[dict], str]:
    """Rows of a benchmark, Hub data set or local file, and where they came from.

    Raises UserError naming the file, line or known names where nothing can be read."""
    path = TOY / TOYS[name] if name in TOYS else Path(name).expanduser()
    if path.is_dir():
        from datasets import DatasetDict, load_from_disk
        try:
            data = load_from_disk(str(path))
        except Exception as error:
            raise UserError(f"{path} is a folder, but not a saved data set ({error}).") from None
        if isinstance(data, DatasetDict):
            data = data[next((s for s in ("test", "train") if s in data), next(iter(data)))]
        return [dict(row) for row in data], str(path)
    if path.suffix in (".json", ".jsonl", ".parquet", ".csv"):
        if not path.is_file():
            raise UserError(f"the file {path} does not exist.")
        try:
            if path.suffix == ".parquet":
                import pyarrow.parquet
                rows = pyarrow.parquet.read_table(path).to_pylist()
            elif path.suffix == ".csv":
                rows = list(csv.DictReader(path.open(encoding="utf-8", newline="")))
            elif path.suffix == ".jsonl":
                rows = []
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    try:
                        rows += [json.loads(line)] if line.strip() else []
                    except json.JSONDecodeError as error:
                        raise UserError(f"{path}, line {number} is not valid JSON: {error}.") from None
            else:
                rows = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(rows, dict):  # {"data": [...]} or {"train": [...]}
                    rows = next((v for v in rows.values() if isinstance(v, list)), None)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{path} cannot be read: {error}.") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UserError(f"{path} must hold a list of objects, each with a question.")
        return rows, str(path)
    if name not in BENCHMARKS and "/" not in name:
        known = ", ".join([*BENCHMARKS, *TOYS])
        raise UserError(f"unknown benchmark '{name}': known are {known}; or a Hub id owner/name, or a local file.")
    import datasets
    hub_id, configs, split = BENCHMARKS.get(name, (name, [None], None))
    try:
        rows = []
        for config in configs:
            data = datasets.load_dataset(hub_id, config, split=split)
            if isinstance(data, dict):
                data = data[next((s for s in ("test", "train") if s in data), next(iter(data)))]
            rows += [dict(row) for row in data]
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"the data set {hub_id} cannot be loaded from the Hub (no network, or gated?): {reason}") from None
    return rows, hub_id


def load_problems(name: str, question_field: str = "", answer_field: str = "", quiet: bool = False) -> list[Problem]:
    """Problems of a benchmark's short name, a Hub id, a local file or a saved data set folder.

    The question and answer columns are found from a short list of usual names (printed) unless given. Problems with
    the same text are kept once. Raises UserError on an unknown name, a missing column, an empty or broken file."""
    rows, source = read_rows(name)
    if not rows:
        raise UserError(f"{source} holds no problems.")
    if name == "mmlu_stem":
        rows = [row for row in rows if row["subject"] in STEM]
    columns = {column.replace(" ", "_"): column for column in rows[0]}

    def find(flag: str, given: str, usual: list[str]) -> str | None:
        if given and given not in rows[0]:
            raise UserError(f"--{flag} is '{given}', but {source} has the columns {', '.join(rows[0])}.")
        return given or next((columns[name] for name in usual if name in columns), None)

    question, answer = find("question_field", question_field, QUESTION_FIELDS), find("answer_field", answer_field, ANSWER_FIELDS)
    if question is None:
        raise UserError(f"{source} has no question column (columns: {', '.join(rows[0])}); name it with --question_field.")
    problems, seen = [], set()
    for number, row in enumerate(rows):
        text, gold, choices = row.get(question), row.get(answer) if answer else None, None
        if isinstance(text, list):  # chat format: the first message
            text = text[0].get("content") if text else None
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{source}, row {number + 1}: column '{question}' holds no text.")
        if isinstance(gold, dict):  # DAPO's reward_model column
            gold = gold.get("ground_truth")
        if "Incorrect Answer 1" in row:  # GPQA: shuffled with a seed of its own, the same in every run
            choices = [str(row["Correct Answer"])] + [str(row[f"Incorrect Answer {i}"]) for i in (1, 2, 3)]
            order = random.Random(seed_of("choices", text)).sample(range(4), 4)
            choices, gold = [choices[i] for i in order], "ABCD"[order.index(0)]
        elif isinstance(row.get("choices"), list):  # MMLU: answer is an index; shuffled likewise
            order = random.Random(seed_of("choices", text)).sample(range(len(row["choices"])), len(row["choices"]))
            choices, gold = [str(row["choices"][i]) for i in order], "ABCDEFGHIJ"[order.index(int(gold))]
        elif answer == "solution" and isinstance(gold, str):
            gold = extract_answer(gold) if "\\boxed" in gold else gold if len(gold) < 50 else None
        if choices:
            text += "\n\n" + "\n".join(f"{letter}. {choice.strip()}" for letter, choice in zip("ABCDEFGHIJ", choices))
        if text.strip() in seen:
            continue
        seen.add(text.strip())
        problems.append(Problem(text.strip(), normal_gold(gold), len(problems), bool(choices)))
    if not quiet:
        known = sum(p.answer is not None for p in problems)
        column = f"answer column '{answer}'" if answer else "no answer column"
        print(f"{name}: {len(problems)} problems from {source}, question column '{question}', {column} ({known} gold answers), "
              f"{len(rows) - len(problems)} duplicates removed", flush=True)
    return problems


# ------------------------------------------------------ prompts ------------------------------------------------------
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."


def encode_prompt(tokenizer, question: str, style: str = "system") -> list[int]:
    """Token ids of a question in the style of --prompt (methods: system; SCRL: suffix; base models: plain)."""
    if style == "plain":
        return tokenizer.encode(f"Question: {question}\n{SYSTEM}\nAnswer:")
    turns = [{"role": "user", "content": question + (SUFFIX if style == "suffix" else "")}]
    if style == "system":
        turns.insert(0, {"role": "system", "content": SYSTEM})
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


# ------------------------------------------------------ grading ------------------------------------------------------
def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of P(one of k samples is correct) from n samples (Chen et al. 2021, Eq. 1): 1 - C(n-c, k) / C(n, k)."""
    return 1.0 if n - correct < k else 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(classes: list[int | None]) -> int | None:
    """The most frequent class; ties go to the class seen first; None (no answer) never votes."""
    counts: dict[int, int] = {}
    for c in classes:
        if c is not None:
            counts[c] = counts.get(c, 0) + 1
    return max(counts, key=counts.get) if counts else None  # max keeps the first of equals; dicts keep the order seen


def label_classes(rollouts: list, label: str | None) -> list[int | None]:
    """Classes for a label that is given: 0 where the answer equals it, None elsewhere, so that the label always wins the vote."""
    equal = {r.answer: r.answer is not None and label is not None and answers_equal(r.answer, label) for r in rollouts}
    return [0 if equal[r.answer] else None for r in rollouts]


def grade(problem: Problem, rollouts: list) -> dict:
    """Verdicts of one problem's responses against its gold answer, as plain numbers."""
    classes = equivalence_classes([r.answer for r in rollouts])
    right: dict[int | None, bool] = {None: False}  # one comparison per class, not per response
    for c, r in zip(classes, rollouts):
        if c not in right:
            right[c] = problem.answer is not None and answers_equal(r.answer, problem.answer)
    return dict(known=problem.answer is not None, correct=[right[c] for c in classes], majority=right[majority(classes)],
                length=[len(r.response_ids) for r in rollouts], answered=[r.answer is not None for r in rollouts],
                truncated=[not r.finished for r in rollouts], distinct=len({r.text for r in rollouts}) / len(rollouts))


def summary(graded: list[dict]) -> dict[str, float]:
    """The row of one benchmark: pass@1 with its standard error over problems, unbiased pass@k, maj@k, lengths, shares.

    Scores are over the problems with a gold answer, and left out where there is none."""
    known = [g for g in graded if g["known"]]
    samples, problems = len(graded[0]["correct"]), len(known)
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    row = {}
    if known:
        rates = [mean(g["correct"]) for g in known]
        spread = math.sqrt(sum((r - mean(rates)) ** 2 for r in rates) / max(problems - 1, 1))
        row = {"pass@1": mean(rates), "stderr": spread / math.sqrt(problems)}
        for k in (2 ** i for i in range(1, samples.bit_length())):
            row[f"pass@{k}"] = mean([pass_at_k(samples, sum(g["correct"]), k) for g in known])
        row[f"maj@{samples}"] = mean([g["majority"] for g in known])
    for name in ("length", "answered", "truncated"):
        row[name] = mean([mean(g[name]) for g in graded])
    row["distinct"] = mean([g["distinct"] for g in graded])
    return row
