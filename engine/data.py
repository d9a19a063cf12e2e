"""Problems and prompts: the benchmarks and files to load, and how a question is put to the model."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import os
import random
import re
import sys
import zlib
from collections import namedtuple
from functools import lru_cache, partial
from io import StringIO
from itertools import chain
from pathlib import Path

from answers import LETTERS, equal, extract_answer, gold_answers
from engine.base import UserError, first_line, stable_hash
from engine.ranks import print0

# size: the problems that it is known to have; some sets are counted with their duplicates
Benchmark = namedtuple("Benchmark", "hub_id split size question answer configs", defaults=(0, "", "", [None]))
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
TOYS = {name + part: TOY.parent / name / f"{part[1:] or 'train'}.jsonl"
        for name in ("toy", "smollm2") for part in ("", "_test", "_ood")}  # smollm2's: by `make smollm2`
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")  # each also with .gz behind it
SPLITS = dict(train="train", training="train", test="test", testing="test", eval="test", evaluation="test",
              validation="validation", valid="validation", val="validation", dev="validation")
QUESTION_FIELDS = ("question problem Question Problem prompt query question_stem instruction messages "
                   "input").split()
ANSWER_FIELDS = ("answer", "Answer", "final_answer", "gold", "gold_answer", "ground_truth", "target",
                 "expected_answer", "Correct Answer", "correct_answer", "answerKey", "reward_model",
                 "solution", "golden_answers", "answers")
GOLD_KEYS = (*ANSWER_FIELDS, "aliases", "value", "text", "content", "label")  # of a dict that holds gold
# name:config:split@revision of the Hub
HUB_ID = re.compile(r"([^:@/]+/[^:@/]+)(?::([^:@]*))?(?::([^@]*))?(?:@(.+))?")
# files without rows: hidden ones, those about a data set, the caches of `datasets`
ABOUT = re.compile(r"(^|/)(\..*|cache-.*\.arrow|(dataset_infos?|dataset_dict|state)\.json)$")
# columns that are part of a prompt: text before or behind the question, a system turn; the rest are refused
PART = re.compile(
    r"(?P<before>(?:instruction|body|context|passage|paragraph|article|document|story|table|schema)s?|"
    r"background)|(?P<behind>inputs?)|(?P<system>system(?:_prompt|_message)?)|"
    r"(?P<refused>(?:\w+_)?(?:image|picture|figure|audio|video|tool|function|history)s?(?:_\w+)?|"
    r"(?:option|choice)_?[a-j1-9]|op[a-d]|[a-d])", re.IGNORECASE)
# a chat that was written as text
CHAT = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from)""")
# <answer>40</answer>, <final_answer>40
TAGGED = re.compile(r"<(?:final_?)?answer>(.*?)(?:</(?:final_?)?answer>|$)", re.DOTALL | re.IGNORECASE)
# text that may be JSON or Python: a list, a dict, a text in quotation marks
CODED = re.compile(r"""\[.*\]|\{.*\}|b?(["']).*\1""", re.DOTALL)
# a backslash that should be two, as in {"answer": "\frac{1}{2}"}, where \f would be a form feed
SINGLE = re.compile(r"(?<!\\)\\(?=[a-tv-zA-Z][a-zA-Z])")
# the letter before an option: A. x, (b) x
LETTERED = re.compile(r"[(\[]?([A-J])\s*[.):\]]\s*(?=\S)", re.IGNORECASE)
# A problem as the data has it: the first fields of common.Problem, which says what they are.
Row = namedtuple("Row", "question answer id choices before prompt_ids also_right row")
# filled: all that hold something. parts: (place, column) of PART. needed: what every row must have
Columns = namedtuple("Columns", "filled question answer parts needed")


# ----------------------------------------------- a run's data ---------------------------------------------
def read_data(args, tokenizer, train: bool) -> dict[str, list[Row]]:
    """The problems of --dataset, under that name, and those of every benchmark. Raises UserError if any are
    missing."""
    machine, problems, sets = args.machine, [], {}
    fields = machine.question_field, machine.answer_field
    read = partial(read_rows, tokenizer=tokenizer, style=args.prompt, max_tokens=args.max_prompt_tokens)
    if train and args.dataset:
        problems = read("--dataset", args.dataset, fields)
    for name in filter(None, map(str.strip, args.eval.split(","))):
        if name != "train":
            sets[name] = read("--eval", name) if train else read("--benchmarks", name, fields)
        elif problems:
            sets[name] = problems
        else:
            raise UserError("the benchmark 'train' means --dataset, which is empty; name another one.")
    held = {}
    for name, part in sets.items():
        twin = held.setdefault(stable_hash(sorted(problem.prompt_ids for problem in part)), name)
        if twin != name:
            print0(f"Warning: {twin} and {name} hold the same problems, which eval/mean counts twice.")
    for name, ids in args.own_prompts(tokenizer).items():
        if len(ids) > args.max_prompt_tokens:
            raise UserError(f"{name} has {len(ids)} tokens, more than "
                            f"--max_prompt_tokens {args.max_prompt_tokens}; raise it.")
    if train and args.labels == "gold" and not (problems and all(p.answer is not None for p in problems)):
        raise UserError("--labels is 'gold', but --dataset is empty or has problems without a gold answer.")
    if problems and len(problems) < args.prompts_per_batch and not machine.show_prompt:
        raise UserError(f"--prompts_per_batch is {args.prompts_per_batch}, but must be at most "
                        f"{len(problems)}, the problems of --dataset: a batch holds none twice.")
    return {"--dataset": problems} | sets


def print_prompts(tokenizer, sets: dict[str, list], own: dict[str, list[int]]) -> None:
    """Print the exact text of the first problem's prompt and of the script's own prompts, and exit."""
    firsts = [(f"first problem of {name}", part[0].prompt_ids) for name, part in sets.items() if part]
    for name, ids in [*firsts[:1], *own.items()]:
        print0(f"--- {name}: {len(ids)} tokens\n{tokenizer.decode(ids)}")
    sys.exit(0)


def count_steps(args, problems: list, tokenizer) -> int:
    """Rollout batches of the whole run: --steps, else those of --epochs."""
    steps = args.steps or args.epochs * (len(problems) // args.prompts_per_batch)
    if not steps or not problems and not args.own_prompts(tokenizer):
        raise UserError("there is nothing to train on: --dataset is empty, or --steps and --epochs are 0.")
    return steps


def digests(sets: dict[str, list], stop_ids: list[int]) -> dict[str, int]:
    """Digests of what all ranks must share, and a resumed run with the one before; keys as errors name it."""
    found = {"the stop tokens of --model": stable_hash(stop_ids)}
    for name, part in sets.items():
        flag = name if name == "--dataset" else f"--eval {name}"
        found[f"the data of {flag}"] = stable_hash([(problem.prompt_ids, problem.answer) for problem in part])
    return found


# ------------------------------------------------ problems ------------------------------------------------
def read_rows(flag: str, name: str, fields: tuple[str, str] = ("", ""), *, tokenizer, style: str,
              max_tokens: int) -> list[Row]:
    """Problems with their prompts. Overlong ones: left out of training (--dataset), without a prompt else.

    Raises UserError, naming the flag, if they cannot be read or all are too long."""
    train, limit = flag == "--dataset", f"more than --max_prompt_tokens {max_tokens}"
    try:
        rows = load_problems(name, *fields, train, tokenizer.control)
        rows = [row._replace(prompt_ids=encode_prompt(tokenizer, row.question, style, max_tokens, row.before))
                for row in rows]
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    kept = [row for row in rows if row.prompt_ids]
    if not kept:
        raise UserError(f"{flag}: all {len(rows)} problems of {name} have {limit}; raise it.")
    if len(kept) < len(rows):
        print0(f"{name}: {len(rows) - len(kept)} problems have {limit} and "
               f"{'are left out' if train else 'count as wrong'}")
    return kept if train else rows


def load_problems(name: str, question_field: str = "", answer_field: str = "", train: bool = True,
                  control: re.Pattern | None = None) -> list[Row]:
    """Problems, yet without prompts, of a benchmark's short name, a Hub id, a local file or folder (FILES).

    The columns are those given, else the benchmark's, else found by usual names; what is used and what is not
    is printed. Problems with the same prompt are kept once. train: which split is meant if none is named.
    control: tokens that a prompt may not hold. Raises UserError, with the row, on what cannot be used."""
    source, tables = _read(name, train)
    rows = [*chain.from_iterable(tables.values())]
    columns = _find_columns(name, source, rows, question_field, answer_field)
    problems, differ, lost, contrary = {}, set(), [], []
    for file, table in tables.items():
        for number, row in enumerate(table, 1):
            where = f"{file}, row {number}"
            problem, is_lost = _problem(row, len(problems), columns, control, where)
            if is_lost:
                lost.append(f"{where}: {str(row[columns.answer])[:80]!r}")
            kept = problems.setdefault((problem.question, *problem.before), problem)
            if kept is not problem:
                differ |= {column for column in columns.filled if row.get(column) != kept.row.get(column)}
                if problem.answer != kept.answer and not equal(problem.answer or "", kept.answer or ""):
                    contrary.append(where)
    problems = [*problems.values()]
    print0(f"{name}: {_loading_line(problems, source, columns, len(rows), differ)}")
    for fault, found in (("answers cannot be given in a box", lost),
                         ("duplicates have another gold answer", contrary)):
        if found:
            print0(f"Warning: {name}: {len(found)} {fault}, the first in {found[0]}")
    return problems


def _find_columns(name: str, source: str, rows: list, question_field: str, answer_field: str) -> Columns:
    """The columns of the question, its answer and the rest of its prompt. Raises UserError."""
    first = {}  # of every column, what it holds first
    for column in dict.fromkeys(chain.from_iterable(rows)):
        first[column] = next((row[column] for row in rows if _is_filled(row.get(column))), None)
    filled = [column for column, value in first.items() if value is not None]
    benchmark = BENCHMARKS.get(name, Benchmark(name, None))
    alone, named = question_field or benchmark.question, answer_field or benchmark.answer
    question = alone or next((column for column in QUESTION_FIELDS if column in filled), "")
    answer = named or next((column for column in ANSWER_FIELDS if column in filled), "")
    if not rows:
        raise UserError(f"{source} holds no problems.")
    if not question:
        raise UserError(f"{source} has no question column that holds text (columns: {', '.join(first)}); "
                        "name it with --question_field.")
    others = [column for column in filled if not isinstance(first[column], int | float)]
    others = [] if alone else [column for column in others if column not in (question, answer)]
    parts = [(match.lastgroup, column) for column in others if (match := PART.fullmatch(column))]
    needed = {question, named, *(GPQA if GPQA[1] in first else ())} - {""}
    return Columns(filled, question, answer, sorted(parts), needed)


def _is_filled(value) -> bool:
    """Whether a cell holds anything; parquet fills lists and dicts up with nulls."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return any(map(_is_filled, value))
    return value is not None and value == value and str(value).strip() not in ("", "[]", "{}", "null")


def _problem(row: dict, number: int, columns: Columns, control, where: str) -> tuple[Row, bool]:
    """(the problem of a row, whether it has a gold answer that no response could give). Raises UserError."""
    if not columns.needed <= row.keys():
        missing = min(columns.needed - row.keys())
        raise UserError(f"{where} has no column '{missing}' (columns: {', '.join(row)}).")
    text, before = _turns(row[columns.question], f"{where}: column '{columns.question}'")
    for place, column in columns.parts:  # a system turn comes last
        text, before = _with_part(text, before, place, row.get(column), f"{where}: column '{column}'")
    text, golds, choices = _with_choices(text, row, columns.answer, where)
    if held := control and control.search("\n".join([text, *(said for _, said in before)])):
        raise UserError(f"{where} holds {held[0]!r}, a control token of --model, which would begin or end a "
                        "turn; take it out, or give --prompt plain if the data brings a template.")
    given = [gold for gold in golds if gold is not None]
    gold, *also = [*given, ", ".join(given)] if len(given) > 1 else given or [None]
    return Row(text.strip(), gold, number, choices, before, [], also, row), None in golds


def _loading_line(problems: list[Row], source: str, columns: Columns, rows: int, differ: set) -> str:
    """What was read and from which columns, the first gold answers, and what was not used."""
    asked = [columns.question, *(column for _, column in columns.parts)]
    choices = ("choices", "options", *GPQA) if any(problem.choices for problem in problems) else ()
    unused = [column for column in columns.filled if column not in (columns.answer, *asked, *choices)]
    chats = sum(bool(problem.before) for problem in problems)
    golds = [problem.answer for problem in problems if problem.answer is not None]
    shown = f"{len(golds)} gold answers{': ' if golds else ''}{', '.join(map(repr, golds[:2]))}"
    words = [f"{len(problems)} problems from {source}", f"question column '{' + '.join(asked)}'"]
    if chats:
        words.append(f"{chats} with earlier turns, which replace those of --prompt")
    words.append(f"{f'answer column {columns.answer!r}' if columns.answer else 'no answer column'} ({shown})")
    words.append(f"{rows - len(problems)} duplicates removed")
    if differ := sorted(differ & {*unused}):
        words.append(f"which differ in {_some(differ)}")
    return ", ".join(words) + (f"; not used: {_some(unused)}" if unused else "")


def _some(names: list) -> str:
    return ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _turns(value, where: str) -> tuple[str, list[tuple[str, str]]]:
    """(the question, the turns before it) of text, or of a chat whose last turn is the question."""
    turns = []
    try:
        for turn in value if isinstance(value, list) else ():
            content = turn["content"]
            pieces = content if isinstance(content, list) else [dict(text=content)]
            for piece in (turn, *pieces):
                held = [match for key in piece if (match := PART.fullmatch(key)) and _is_filled(piece[key])]
                if any(match["refused"] for match in held) or piece.get("type") not in ("text", None):
                    raise KeyError  # an image, or the call of a tool
            turns.append((turn["role"], "".join([piece["text"] for piece in pieces])))
        role, text = turns.pop() if isinstance(value, list) else ("user", value)
    except (TypeError, KeyError, IndexError, AttributeError):
        role, text = "", ""
    if role != "user" or not isinstance(text, str) or not text.strip() or CHAT.match(text):
        raise UserError(f"{where} holds no text, nor a list of turns, each with a role and a content of text "
                        "alone (no image, no tool), the last of them the user's; see --question_field.")
    return text, turns


def _with_part(text: str, before: list, place: str, more, where: str) -> tuple[str, list]:
    """(question, turns before it) with what another column has for this place."""
    held = [text, *(said for _, said in before)]
    # some prompts hold it already
    is_held = isinstance(more, str) and (more.strip() in held or len(more) > 40 and more.strip() in text)
    if not _is_filled(more) or is_held and place != "refused":
        return text, before
    begun = before[0][0] if before else ""
    places = {"": ("before", "behind", "system"), "user": ("system",)}
    if not isinstance(more, str) or place not in places.get(begun, ()):
        raise UserError(f"{where} seems to be part of the prompt, but cannot be put into it; "
                        "--question_field, which takes one column alone, leaves it out.")
    if place == "system":
        return text, [("system", more.strip()), *before]
    return "\n\n".join([more.strip(), text] if place == "before" else [text, more.strip()]), before


def _with_choices(text: str, row: dict, answer: str, where: str) -> tuple[str, list[str | None], int]:
    """(question, gold answers, number of choices); with lettered choices and the right letters if it has any.

    They are shuffled (GPQA's first is right) with a seed of the question's own, alike in every run, unless
    the question lists them already."""
    options, gold = row.get("choices") or row.get("options"), row.get(answer)
    if GPQA[1] in row:
        options, gold = [row[column] for column in GPQA], 0
    if not options:
        return text, _golds(gold), 0
    texts, right = _choices(options, gold)
    if not texts or max(texts) >= len(LETTERS) or answer and right not in [*texts]:
        naming = f", and column '{answer}' must name the right one" if answer else ""
        raise UserError(f"{where}: its choices must be a list of at most {len(LETTERS)}{naming}.")
    order = random.Random(stable_hash("choices", text)).sample([*texts], len(texts))
    letters = dict(zip(order, LETTERS))
    if all(re.search(rf"(?<!\w){LETTERS[i]}\s*[.):\]]\s*{re.escape(texts[i])}", text) for i in texts):
        letters = {i: LETTERS[i] for i in texts}
    else:
        text = "\n".join([text, "", *(f"{letters[i]}. {texts[i]}" for i in order)])
    golds = [letters[i] for i in texts if answer and texts[i] == texts[right]]  # equal choices are all right
    return text, golds, LETTERS.index(max(letters.values())) + 1


def _choices(options, gold) -> tuple[dict[int, str], object]:
    """({index: option without its letter}, the right one's index, which is named by label, letter, text or
    index from 0); options: a list, or a dict of labels and texts (ARC) or {label: text}."""
    labels = LETTERS
    if isinstance(options, dict):
        labels, options = options.get("label", [*options]), options.get("text", [*options.values()])
    if not isinstance(options, list) or any(isinstance(option, dict | list) for option in options):
        return {}, None
    texts = {i: str(option).strip() for i, option in enumerate(options) if _is_filled(option)}
    right = gold if isinstance(gold, int) else next(iter(_open(gold)), None)
    if isinstance(right, str) and not right.isdecimal():
        right = next((i for i in texts if texts[i] == right), right)
    right = {str(label): i for i, label in enumerate(labels)}.get(str(right), right)
    marks = {i: LETTERED.match(option) for i, option in texts.items()}
    if all(mark and mark[1].upper() == LETTERS[i:i + 1] for i, mark in marks.items()):
        texts = {i: option[marks[i].end():] for i, option in texts.items()}
    return texts, right


def _golds(value) -> list[str | None]:
    """The gold answers in a cell as text; None for what no response could give in a box."""
    golds = []
    for plain in _open(value):
        found = [] if isinstance(plain, dict) else gold_answers(plain)
        golds += [gold if _comes_back(gold) else None for gold in found]
        if not found and len(str(plain)) > 4:  # not None, N/A, #N/A, NaN
            golds.append(None)
    return list(dict.fromkeys(golds))


def _comes_back(gold: str) -> bool:
    """Whether a response that gives it in a box is right. A text that is longer is about an answer."""
    if len(gold) > 300 or gold.startswith(('{"', "{'")):  # JSON that is cut off
        return False
    answer = extract_answer(f"\\boxed{{{gold}}}")
    return answer == gold or equal(answer, gold)


def _open(value) -> list:
    """The plain values in a cell of gold answers: in bytes, lists, tags, dicts, text that is JSON or Python.

    A dict with several keys, none of which is known, stays."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str):
        return _open_text(value.strip())
    if isinstance(value, list | tuple | set):
        return [*chain.from_iterable(map(_open, value))]
    if not isinstance(value, dict):
        return [value]
    held = {key: item for key, item in value.items() if _is_filled(item)}
    known = [held[key] for key in GOLD_KEYS if key in held]
    known = known or [item for item in held.values() if len(held) == 1 or isinstance(item, dict)]
    return _open(known[0]) if known else [held] if held else []


def _open_text(text: str) -> list:
    """The plain values in text; mathematics that looks like Python, such as the point [1, 2], stays."""
    if "<" in text and (tagged := TAGGED.findall(text)):
        return _open(tagged[-1])
    if not CODED.fullmatch(text) or text[0] == "[" and gold_answers(text) != [text]:
        return [text]
    for decode in (json.loads, ast.literal_eval):
        try:
            value = decode(SINGLE.sub(r"\\\\", text))
        except (ValueError, SyntaxError, TypeError):
            continue
        plain = _open(value)
        is_point = len(plain) > 1 and all(isinstance(item, int | float) for item in plain)
        return [text] if is_point and not isinstance(value, dict) else plain
    return [text]


# -------------------------------------------------- files -------------------------------------------------
def _read(name: str, train: bool) -> tuple[str, dict[str, list[dict]]]:
    """(what is read, in words; the rows of each file) of a benchmark, Hub data set, local file or folder."""
    if name in BENCHMARKS:  # also beside a folder of that name
        return _read_hub(name, train)
    path, split = TOYS.get(name) or Path(os.path.expanduser(name)), ""
    outer, _, word = str(path).rpartition(":")
    if not path.exists() and len(outer) > 1 and os.path.exists(outer):
        path, split = Path(outer), word
    if name and path.is_dir():
        source, files = _files_of(path, split, train)
        return source, {str(file): _read_file(file) for file in files}
    if path.exists() and _kind(path) in FILES:
        if split:
            raise UserError(f"{path} is a file, which has no split '{split}'; name the file alone.")
        return str(path), {str(path): _read_file(path)}
    likely = name[:1] in ("/", ".", "~") or path.suffix.lower() in (*FILES, ".gz", ".zip", ".xlsx")
    if likely and not path.exists():
        raise UserError(f"there is no file {path}.")
    if path.exists() or not HUB_ID.fullmatch(name):
        raise UserError(f"unknown data set '{name}': known are {', '.join([*BENCHMARKS, *TOYS])}, a Hub id "
                        "owner/name, owner/name:config:split or owner/name@revision, a folder, folder:split, "
                        f"or a local {', '.join(FILES)} file.")
    return _read_hub(name, train)


def _read_hub(name: str, train: bool) -> tuple[str, dict[str, list[dict]]]:
    """What `_read` returns, of a benchmark or a data set of the Hub."""
    hub = HUB_ID.fullmatch(name)
    hub_id, config, split, revision = hub.groups() if hub else (name, None, None, None)
    benchmark = BENCHMARKS.get(name, Benchmark(hub_id, split or None, configs=(config or None,)))
    source, rows = benchmark.hub_id, []
    try:
        import datasets  # not above: it takes half a second, and local text does without
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told once, by UserError
        for config in benchmark.configs:
            data = datasets.load_dataset(benchmark.hub_id, config, split=benchmark.split, revision=revision)
            if isinstance(data, dict):
                split = _meant(data, train, f"{benchmark.hub_id}:{config or ''}")
                source, data = f"{benchmark.hub_id}, split {split}", data[split]
            rows += _rows(data.with_format("arrow")[:])
    except UserError:
        raise
    except Exception as error:  # `datasets` raises many kinds, some of which only say that there is a cause
        error = error.__cause__ or error
        doubt = " (no network, gated, or no such name?)" if isinstance(error, OSError) else ""
        raise UserError(f"{name} cannot be read{doubt}: {' '.join(str(error).split())}") from None
    return source, {benchmark.hub_id: [row for row in rows if name != "mmlu_stem" or row["subject"] in STEM]}


def _kind(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _meant(splits: dict, train: bool, source) -> str:
    """The split that --dataset or, without train, --eval means; "" are files whose names tell none."""
    order = [s for s in (["train", ""] if train else ["test", "validation", "", "train"]) if s in splits]
    if not order and len(splits) > 1:
        raise UserError(f"{source} has the splits {_some([*splits])}; name one, as {source}:{[*splits][0]}.")
    return [*order, *splits][0]


def _files_of(folder: Path, split: str, train: bool) -> tuple[str, list[Path]]:
    """(what is read and what is not, in words; the files) of a split, which file and folder names tell."""
    splits, rest = {}, []
    found = [Path(top, name) for top, _, names in os.walk(folder, followlinks=True) for name in names]
    found = [path.relative_to(folder) for path in found]
    for file in sorted(file for file in found if not ABOUT.search(str(file))):
        parts = re.sub("set|data", "", "/".join(file.parts[::-1]))  # trainset, test_data
        words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", parts)
        told = next((SPLITS[word.lower()] for word in words if word.lower() in SPLITS), "")
        (splits.setdefault(told, []) if _kind(file) in FILES else rest).append(file)
    split = SPLITS.get(split, split) or (_meant(splits, train, folder) if splits else "")
    if split not in splits:
        raise UserError(f"{folder} has no {split or 'data'} in files of {', '.join(FILES)}.")
    files = splits.pop(split)
    rest = [*chain.from_iterable(splits.values()), *rest]
    words = f"{_some(files)}{'; not read: ' if rest else ''}{_some(rest)}"
    return f"{folder}{', split ' if split else ''}{split} ({words})", [folder / file for file in files]


def _read_file(path: Path) -> list[dict]:
    """The rows of a file, packed by gzip or not; all text of .csv and .tsv. Raises UserError.

    `datasets` does not name the broken line; of a .csv file it reads 007 as 7, and N/A as nothing."""
    kind, number = _kind(path), 0
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        if kind in (".parquet", ".arrow"):
            from pyarrow import BufferReader, ipc, parquet  # not above: many machines do without
            reader = ipc.open_file if data[:6] == b"ARROW1" else ipc.open_stream
            data = BufferReader(data)
            return _rows(parquet.read_table(data) if kind == ".parquet" else reader(data).read_all())
        text = data.decode("utf-8-sig")  # -sig: some editors write a byte order mark
        if kind == ".json":
            rows = json.loads(text)
        elif kind == ".jsonl":
            rows = []
            for number, line in enumerate(text.split("\n")):  # splitlines() also splits at U+2028
                rows += [json.loads(line)] if line.strip() else []
        else:
            rows = _read_csv(text, "\t" if kind == ".tsv" else ",")
    except ImportError:
        raise UserError(f"{path} is read with pyarrow: pip install datasets, which brings it.") from None
    except (ValueError, OSError, EOFError, zlib.error, csv.Error) as error:
        where = f", line {number + error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = getattr(error, "msg", first_line(error))
        raise UserError(f"{path}{where} is not valid {kind[1:].upper()}: {reason.rstrip('.')}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} must hold a list of objects, each with a question.")
    return rows


def _read_csv(text: str, delimiter: str) -> list[dict]:
    csv.field_size_limit(2**31 - 1)
    lines = filter(None, csv.reader(StringIO(text, newline=None), delimiter=delimiter, strict=True))
    header, rows = next(lines, []), []
    if len({*header}) < len(header):
        raise ValueError("two of its columns have the same name")
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"row {len(rows) + 1} has more or fewer fields than the first line")
        rows.append(dict(zip(header, line)))
    return rows


def _rows(table) -> list[dict]:
    """The rows of a table of pyarrow, with the names of class labels, which `datasets` keeps beside it."""
    about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
    rows = table.to_pylist(maps_as_pydicts="strict")
    for column, feature in (about.get("features") or {}).items():
        for row in rows if "names" in feature else ():
            row[column] = None if row[column] in (None, -1) else feature["names"][row[column]]
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

    In a file a line [system], [user] or [assistant] begins a turn. The last user turn has {question}; turns
    before it are worked examples, and the response continues an assistant turn behind it. Without such lines
    it is plain text. A relative path is looked up here, then in the repository. Raises UserError."""
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
    like = r"^[ \t]*\[ *(?:[a-z]{2,} *\]:?[ \t]*$|(?:system|user|assistant) *\].*)"
    odd = re.search(like, "\n".join([before, *parts[1::2]]), re.MULTILINE | re.IGNORECASE)
    turns = turns or [("", before.rstrip("\n"))]
    roles = " ".join(role for role, _ in turns)
    in_order = re.fullmatch("|(system )?(user assistant )*user( assistant)?", roles)
    asked = [text for role, text in turns if role != "assistant"][-1:]
    if odd or roles and before.strip() or not in_order or "{question}" not in asked[0]:
        raise UserError(f"{wrong}: plain text with {{question}}, or turns, each begun by a line [system], "
                        "[user] or [assistant], in this order, the last [user] turn with {question}"
                        f"{odd and f'; its line {odd[0].strip()!r} only looks like one' or ''}.")
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
    if unknown := [i for i in ids if i >= getattr(tokenizer, "known_to_model", 10**9)]:
        raise UserError(f"a prompt has the token {tokenizer.decode(unknown[:1])!r} ({unknown[0]}), but the "
                        f"model knows the tokens 0 to {tokenizer.known_to_model - 1}.")
    return ids
