"""Problems and prompts: the benchmarks and files to load, and how a question is put to the model."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from answers import LETTERS, gold_answers
from engine.base import UserError, first_line, stable_hash
from engine.ranks import print0


class Benchmark(NamedTuple):
    hub_id: str
    split: str | None = None
    size: int = 0
    """Problems that it is known to have; some sets are counted with their duplicates."""
    question: str = ""
    answer: str = ""
    configs: tuple = (None,)


GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
MATH = tuple("algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra "
             "precalculus".split())
STEM = ("abstract_algebra astronomy college_biology college_chemistry college_computer_science "
        "college_mathematics college_physics computer_security conceptual_physics electrical_engineering "
        "elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science "
        "high_school_mathematics high_school_physics high_school_statistics machine_learning").split()
BENCHMARKS = {
    # all six papers
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", 500, "problem", "answer"),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", 30, "problem", "answer"),
    # EVOL-RL, SCRL, RESTRAIN, Dynamic RL
    "aime25": Benchmark("math-ai/aime25", "test", 30, "problem", "answer"),
    # TTRL, EVOL-RL, SCRL, ETTRL: 2022 and 2023; RESTRAIN, Dynamic RL: the AMC23 of Qwen2.5-Math's evaluation
    "amc": Benchmark("AI-MO/aimo-validation-amc", "train", 83, "problem", "answer"),
    "amc23": Benchmark("math-ai/amc23", "test", 40, "question", "answer"),
    # SCRL, RESTRAIN; RESTRAIN; RESTRAIN, with the 18 subjects of Qwen2.5-Math's evaluation
    "minerva": Benchmark("math-ai/minervamath", "test", 272, "question", "answer"),
    "olympiad": Benchmark("math-ai/olympiadbench", "test", 675, "question", "final_answer"),
    "mmlu_stem": Benchmark("cais/mmlu", "test", 3018, "question", "answer", ("all",)),
    # EVOL-RL, RESTRAIN: diamond; SCRL: all 448 (appendix B.1)
    "gpqa": Benchmark("Idavidrein/gpqa", "train", 198, "Question", GPQA[0], ("gpqa_diamond",)),
    "gpqa_main": Benchmark("Idavidrein/gpqa", "train", 448, "Question", GPQA[0], ("gpqa_main",)),
    # for training: EVOL-RL, Dynamic RL; RESTRAIN (DAPO-14k); Dynamic RL; Dynamic RL
    "math_train": Benchmark("EleutherAI/hendrycks_math", "train", 7500, "problem", "solution", MATH),
    "dapo": Benchmark("open-r1/DAPO-Math-17k-Processed", "train", 14_116, "prompt", "solution", ("en",)),
    "dapo_17k": Benchmark("open-r1/DAPO-Math-17k-Processed", "train", 17_398, "prompt", "solution", ("all",)),
    "deepscaler": Benchmark("agentica-org/DeepScaleR-Preview-Dataset", "train", 40_315, "problem", "answer"),
}
TOY = Path(__file__).parent.parent / "toy"
TOYS = "toy toy_test toy_ood smollm2 smollm2_test smollm2_ood".split()  # smollm2's: made by `make smollm2`
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
HUB_ID = re.compile(r"([^:@/]+/[^:@/]+)(?::([^:@]*))?(?::([^@]*))?(?:@(.+))?")  # name:config:split@revision
QUESTION_FIELDS = "question problem Question Problem prompt query instruction messages".split()
ANSWER_FIELDS = ("answer", "Answer", "final_answer", "gold", "gold_answer", "ground_truth", "target",
                 "expected_answer", "Correct Answer", "answerKey", "reward_model", "solution")


# ------------------------------------------------ problems ------------------------------------------------
class Row(NamedTuple):
    """A problem as the data has it: the first fields of common.Problem, which says what they are."""
    question: str
    answer: str | None
    id: int
    choices: int
    before: list[tuple[str, str]]
    prompt_ids: list[int]
    also_right: list[str]
    row: dict


def read_rows(flag: str, name: str, fields: tuple[str, str] = ("", ""), *, tokenizer, style: str,
              max_tokens: int) -> list[Row]:
    """Problems with their prompts. Overlong ones: left out of training (--dataset), without a prompt else.

    Raises UserError, naming the flag, if they cannot be read or all are too long."""
    train, rows = flag == "--dataset", []
    try:
        for row in load_problems(name, *fields):
            ids = encode_prompt(tokenizer, row.question, style, max_tokens, row.before)
            rows.append(row._replace(prompt_ids=ids))
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    kept = [row for row in rows if row.prompt_ids]
    if not kept:
        raise UserError(f"{flag}: all {len(rows)} problems of {name} have more than --max_prompt_tokens "
                        f"{max_tokens}; raise it.")
    if len(kept) < len(rows):
        print0(f"{name}: {len(rows) - len(kept)} problems have more than --max_prompt_tokens {max_tokens} "
               f"and {'are left out' if train else 'count as wrong'}")
    return kept if train else rows


def load_problems(name: str, question_field: str = "", answer_field: str = "") -> list[Row]:
    """Problems, yet without prompts, of a benchmark's short name, a Hub id or a local file (FILES).

    The columns are those given, else the benchmark's, else found in a short list of usual names (printed).
    Problems with the same text are kept once. Raises UserError on an unknown name, a missing column, an
    empty or broken file."""
    rows, source = _read(name)
    if name == "mmlu_stem":
        rows = [row for row in rows if row.get("subject") in STEM]
    if not rows:
        raise UserError(f"{source} holds no problems.")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    filled = {column for row in rows for column, value in row.items() if value not in (None, "")}
    benchmark = BENCHMARKS.get(name, Benchmark(name))
    question = question_field or benchmark.question or next((c for c in QUESTION_FIELDS if c in filled), "")
    named = answer_field or benchmark.answer
    # rows need not have one that is only found
    answer = named or next((c for c in ANSWER_FIELDS if c in filled), "")
    if not question:
        raise UserError(f"{source} has no question column that holds text (columns: {', '.join(columns)}); "
                        "name it with --question_field.")
    needed = {question, named, *(GPQA if GPQA[1] in columns else ())} - {""}
    problems = {}
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        if missing := sorted(needed - row.keys()):
            raise UserError(f"{where} has no column '{missing[0]}' (columns: {', '.join(row)}).")
        text, before = _turns(row[question], f"{where}: column '{question}'")
        text, gold, choices = _with_choices(text, row, row.get(answer), answer, where)
        text, golds = text.strip(), gold_answers(gold)
        gold, *also = [*golds, ", ".join(golds)] if len(golds) > 1 else golds or [None]
        problems.setdefault((text, *before), Row(text, gold, len(problems), choices, before, [], also, row))
    known = sum(p.answer is not None for p in problems.values())
    column = f"answer column '{answer}'" if answer else "no answer column"
    chats = sum(bool(p.before) for p in problems.values())
    turns = f", {chats} with earlier turns, which replace those of --prompt" if chats else ""
    print0(f"{name}: {len(problems)} problems from {source}, question column '{question}'{turns}, {column} "
           f"({known} gold answers), {len(rows) - len(problems)} duplicates removed")
    return list(problems.values())


def _turns(value, where: str) -> tuple[str, list[tuple[str, str]]]:
    """(the question, the turns before it) of text, or of a chat whose last turn is the question.

    Raises UserError for anything else: an answer as last turn, an image, a chat that was written as text."""
    turns = []
    try:
        for turn in value if isinstance(value, list) else [dict(role="user", content=value)]:
            content = turn["content"]
            content = content if isinstance(content, str) else "".join([part["text"] for part in content])
            turns.append((turn["role"], content))
        role, text = turns.pop()
    except (TypeError, KeyError, IndexError):
        role, text = "", ""
    if role != "user" or not text.strip() or re.match(r"""\s*\[\s*\{\s*['"](role|content|from)""", text):
        raise UserError(f"{where} holds no text, nor a list of turns, each with a role and a content of "
                        "text, the last of them the user's.")
    return text, turns


def _with_choices(text: str, row: dict, gold, answer: str, where: str) -> tuple[str, object, int]:
    """(question, gold answer, number of choices); with lettered choices and the right letter if it has any.

    They are GPQA's four columns, or a list `choices` or `options` with the right one's index from 0 or its
    letter, shuffled (GPQA's first is right) with a seed of the question's own, alike in every run."""
    options = row.get("choices") or row.get("options")
    if GPQA[1] in row:
        options, gold = [row[column] for column in GPQA], 0
    if not options:
        return text, gold, 0
    right = LETTERS.index(gold) if gold in list(LETTERS) else gold
    listed = isinstance(options, list) and len(options) <= len(LETTERS)
    if not listed or answer and right not in range(len(options)):
        raise UserError(f"{where}: its choices must be a list of at most {len(LETTERS)}, and column "
                        f"'{answer}' must name the right one.")
    order = random.Random(stable_hash("choices", text)).sample(range(len(options)), len(options))
    lines = [f"{letter}. {str(options[i]).strip()}" for letter, i in zip(LETTERS, order)]
    return "\n".join([text, "", *lines]), LETTERS[order.index(right)] if answer else None, len(options)


def _read(name: str) -> tuple[list[dict], str]:
    """The rows of a benchmark, Hub data set, local file or folder, and where they came from."""
    folder, _, part = name.partition("_")
    toy = TOY.parent / folder / f"{part or 'train'}.jsonl"
    path = toy if name in TOYS else Path(os.path.expanduser(name))
    kind, hub = path.suffix.lower(), HUB_ID.fullmatch(name)
    if path.is_file() and kind in FILES[:4]:
        return _read_text(path, kind), str(path)
    local = name and name not in BENCHMARKS and (path.is_dir() or path.is_file() and kind in FILES)
    if not path.exists() and (name[:1] in ("/", ".", "~") or kind in (*FILES, ".gz", ".zip", ".xlsx")):
        raise UserError(f"there is no file {path}.")
    if not local and name not in BENCHMARKS and (path.exists() or not hub):
        raise UserError(f"unknown data set '{name}': known are {', '.join([*BENCHMARKS, *TOYS])}, a Hub id "
                        f"owner/name, owner/name:config:split or owner/name@revision, a folder, or a local "
                        f"{', '.join(FILES)} file.")
    source, config, split, revision = hub.groups() if hub and not local else (str(path), None, None, None)
    benchmark = BENCHMARKS.get(name, Benchmark(source, split or None, configs=(config or None,)))
    source, rows = benchmark.hub_id, []
    try:
        import datasets  # not above: it takes half a second, and the toy does without
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told once, by UserError
        if local and path.is_file():  # streaming: no copy of it in a cache
            data = datasets.load_dataset(kind[1:], data_files=source, split="train", streaming=True)
            return list(data), source
        if local and (path / "state.json").is_file():
            return list(datasets.load_from_disk(source)), source
        for config in benchmark.configs:
            data = datasets.load_dataset(source, config, split=benchmark.split, revision=revision)
            if isinstance(data, dict):  # several splits: test, train or whichever is first
                data = data[next((split for split in ("test", "train") if split in data), next(iter(data)))]
            rows += data
        return rows, source
    except Exception as error:  # `datasets` raises many kinds, some of which only say that there is a cause
        error = error.__cause__ or error
        doubt = "" if local or not isinstance(error, OSError) else " (no network, gated, or no such name?)"
        raise UserError(f"{name} cannot be read{doubt}: {' '.join(str(error).split())}") from None


def _read_text(path: Path, kind: str) -> list[dict]:
    """The objects of a .json list or of .jsonl's lines; the rows of .csv and .tsv, all text.

    `datasets` does not name the broken line; of a .csv file it reads 007 as 7, and N/A as nothing."""
    number, rows = 0, []
    try:
        text = path.read_text(encoding="utf-8-sig")  # -sig: some editors write a byte order mark
        if kind == ".json":
            rows = json.loads(text)
        elif kind == ".jsonl":
            for number, line in enumerate(text.split("\n")):  # splitlines() also splits at U+2028
                rows += [json.loads(line)] if line.strip() else []
        else:
            rows = csv.DictReader(StringIO(text), delimiter="\t" if kind == ".tsv" else ",", strict=True)
            rows = list(rows)
            if ragged := [n for n, row in enumerate(rows, 1) if None in row or None in row.values()]:
                raise ValueError(f"row {ragged[0]} has more or fewer fields than the first line")
    except (ValueError, csv.Error) as error:
        where = "" if kind in (".csv", ".tsv") else f", line {number + getattr(error, 'lineno', 1)}"
        reason = getattr(error, "msg", error)
        raise UserError(f"{path}{where} is not valid {kind[1:].upper()}: {reason}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} must hold a list of objects, each with a question.")
    return rows


# ------------------------------------------------- prompts ------------------------------------------------
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."
STYLES = {
    "system": [("system", SYSTEM), ("user", "{question}")],
    "suffix": [("user", "{question}" + SUFFIX)],  # SCRL
    "plain": [("", "Question: {question}\n" + SYSTEM + "\nAnswer:")],  # no chat template, for base models
}


@lru_cache
def read_template(style: str) -> list[tuple[str, str]]:
    """The turns (role, text) of a --prompt, one of STYLES or a file; plain text is one turn of role "".

    In a file a line [system], [user] or [assistant] begins a turn. The last user turn has {question}; worked
    examples are turns before it, and an assistant turn behind it is one that the response continues. Without
    such lines it is plain text, for base models. A relative path is looked up here, then in the repository.
    Raises UserError for anything else."""
    if style in STYLES:
        return STYLES[style]
    file = Path(style).expanduser()
    file = file if file.exists() else TOY.parent / style
    wrong = f"--prompt is '{style}', but must be system, suffix, plain or a template file"
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{wrong}: {first_line(error)}.") from None
    before, *parts = re.split(r"^\[(system|user|assistant)\][ \t]*$", text, flags=re.MULTILINE)
    turns = [(role, text.strip()) for role, text in zip(parts[::2], parts[1::2])]
    if not turns:
        turns, before = [("", before.rstrip("\n"))], ""
    roles = " ".join(role for role, _ in turns)
    in_order = re.fullmatch("|(system )?(user assistant )*user( assistant)?", roles)
    asked = [text for role, text in turns if role != "assistant"][-1:]
    if before.strip() or not in_order or "{question}" not in asked[0]:
        raise UserError(f"{wrong}: plain text with {{question}}, or turns, each begun by a line [system], "
                        "[user] or [assistant], in this order, the last [user] turn with {question}.")
    return turns


def encode_alone(tokenizer, text: str, style: str = "system") -> list[int]:
    """Token ids of a user turn of its own, without the instruction (Dynamic RL's z_0); a chat template may
    add a system turn: see --show_prompt."""
    return _encode(tokenizer, [("user", text) if read_template(style)[0][0] else ("", text + "\n\n")])


def encode_prompt(tokenizer, question: str, style: str = "system", max_tokens: int = 0,
                  before: list[tuple[str, str]] = ()) -> list[int]:
    """Token ids of a question in the style of --prompt; [] if there are more than max_tokens (0: any number).

    before: turns (role, text) instead of those that --prompt has before the question. Raises UserError if the
    chat template fails, if --prompt has no turns but the data has, if the model does not know a token."""
    turns = [(role, text.replace("{question}", question)) for role, text in read_template(style)]
    if before and not turns[-1][0]:
        raise UserError(f"--prompt is '{style}', plain text, but the data has turns before the question.")
    asked = turns[-2 if turns[-1][0] == "assistant" else -1:]
    ids = _encode(tokenizer, [*before, *asked] if before else turns)
    return ids if not max_tokens or len(ids) <= max_tokens else []


def _encode(tokenizer, turns: list[tuple[str, str]]) -> list[int]:
    """Token ids of these turns (role, text); of one of role "" without a chat template.

    Raises UserError if the chat template fails or leaves a turn out, or if the model does not know a token.
    If there is no system role (Gemma), the instruction is put before the question, in the user turn."""
    text, chat = turns[0][1], [dict(role=role, content=content) for role, content in turns if role]
    begun = chat.pop()["content"] if turns[-1][0] == "assistant" else ""  # the response goes on from here
    try:
        if chat:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + begun
        if missing := [role for role, content in turns if content.strip() not in text]:
            raise ValueError(f"it leaves out the [{missing[0]}] turn")
    except Exception as error:
        if turns[0] != ("system", SYSTEM):
            raise UserError(f"the chat template of {tokenizer.name_or_path} fails ({first_line(error)}); fix "
                            "it or give --prompt plain.") from None
        toys = json.loads((TOY / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
        instruction = "" if tokenizer.chat_template == toys else f"{SYSTEM}\n\n"  # the toy has never seen one
        return _encode(tokenizer, [("user", instruction + turns[1][1]), *turns[2:]])
    ids = tokenizer.encode(text, add_special_tokens=not chat)  # a chat template brings its own special tokens
    if unknown := [i for i in ids if i >= getattr(tokenizer, "known_to_model", math.inf)]:
        raise UserError(f"a prompt has the token {tokenizer.decode(unknown[:1])!r} ({unknown[0]}), but the "
                        f"model knows the tokens 0 to {tokenizer.known_to_model - 1}.")
    return ids
