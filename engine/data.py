"""Problems and prompts: the benchmarks and files to load, and how a question is put to the model."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import os
import random
import re
import zlib
from collections import namedtuple
from functools import lru_cache
from io import StringIO
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
TOYS = "toy toy_test toy_ood smollm2 smollm2_test smollm2_ood".split()  # smollm2's: made by `make smollm2`
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")  # each also with .gz behind it
ABOUT = re.compile(r"(^|/)(\..*|(dataset_infos?|dataset_dict|state)\.json$)")  # files without rows
SPLITS = dict(train="train", training="train", test="test", testing="test", eval="test", evaluation="test",
              validation="validation", valid="validation", val="validation", dev="validation")
HUB_ID = re.compile(r"([^:@/]+/[^:@/]+)(?::([^:@]*))?(?::([^@]*))?(?:@(.+))?")  # name:config:split@revision
QUESTION_FIELDS = "question problem Question Problem prompt query instruction messages input".split()
ANSWER_FIELDS = ("answer", "Answer", "final_answer", "gold", "gold_answer", "ground_truth", "target",
                 "expected_answer", "Correct Answer", "answerKey", "reward_model", "solution",
                 "golden_answers", "answers")
GOLD_KEYS = (*ANSWER_FIELDS, "aliases", "value", "text", "content", "label")  # of a dict that holds gold
EMPTY, TURN = ("", "[]", "{}", "null"), {"role", "content", "text", "type"}
# Other columns that are part of a prompt: text before or behind the question, a system turn. Or refused.
PART = re.compile(
    r"(?P<before>instruction|body|context|passage|paragraph|article|document|story|background|table|schema)|"
    r"(?P<behind>inputs?)|(?P<system>system(?:_prompt|_message)?)|"
    r"(?P<refused>(?:\w+_)?(?:image|picture|figure|audio|video|tool|function|history)s?(?:_\w+)?|"
    r"(?:option|choice)_?[a-j1-9]|op[a-d]|[a-d])", re.IGNORECASE)
TAGGED = re.compile(r"<(?:final_?)?answer>(.*?)(?:</(?:final_?)?answer>|$)", re.DOTALL | re.IGNORECASE)
CODED = re.compile(r"""[{\[(]\s*(?:[{\[(]|b?["']|null|None).*|\[[-\s\d.]+\]|b?(["']).*\1""", re.DOTALL)
# Short text with a digit and braces that close, without a box, list or tag: it comes back as it is.
PLAIN = re.compile(r"(?=.*\d)(?:[-\w+ .,/$^=()]++|\\(?!boxed|fbox)[a-zA-Z]++|\{[-\w+ .,/$^=()]*+\})+")
LETTERED = re.compile(r"[(\[]?([A-J])\s*[.):\]]\s*(?=\S)", re.IGNORECASE)  # A. x, (b) x
# A problem as the data has it: the first fields of common.Problem, which says what they are.
Row = namedtuple("Row", "question answer id choices before prompt_ids also_right row")


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
    source, rows = _read(name, train)
    rows = [(where, row) for where, row in rows if name != "mmlu_stem" or row.get("subject") in STEM]
    columns = {}  # and the first thing that each holds
    for _, row in rows:
        for column, value in row.items():
            if columns.get(column) is None:
                columns[column] = value if _is_filled(value) else None
    filled = [column for column, value in columns.items() if value is not None]
    benchmark = BENCHMARKS.get(name, Benchmark(name, None))
    alone, named = question_field or benchmark.question, answer_field or benchmark.answer
    question = alone or next((c for c in QUESTION_FIELDS if c in filled), "")
    answer = named or next((c for c in ANSWER_FIELDS if c in filled), "")  # if found, rows may lack it
    if not rows or not question:
        wrong = f"has no question column that holds text (columns: {', '.join(columns)}); name it with"
        raise UserError(f"{source} {f'{wrong} --question_field' if rows else 'holds no problems'}.")
    others = [c for c in filled if c not in (question, answer) and not isinstance(columns[c], int | float)]
    parts = sorted((match.lastgroup, c) for c in others if not alone and (match := PART.fullmatch(c)))
    needed = {question, named, *(GPQA if GPQA[1] in columns else ())} - {""}
    problems, differ = {}, set()
    faults = {"answers cannot be given in a box": [], "duplicates have another gold answer": []}
    lost, other = faults.values()
    for where, row in rows:
        if missing := needed - row.keys():
            raise UserError(f"{where} has no column '{min(missing)}' (columns: {', '.join(row)}).")
        text, before = _turns(row[question], f"{where}: column '{question}'")
        text, before = _with_parts(text, before, row, parts, where)
        text, golds, choices = _with_choices(text, row, answer, where)
        if held := control and control.search("\n".join([text, *(said for _, said in before)])):
            raise UserError(f"{where} holds {held[0]!r}, a control token of --model, which would begin or "
                            "end a turn; take it out, or give --prompt plain if the data brings a template.")
        if None in golds:
            golds.remove(None)
            lost.append(f"{where}: {str(row[answer])[:80]!r}")
        gold, *also = [*golds, ", ".join(golds)] if len(golds) > 1 else golds or [None]
        problem = Row(text.strip(), gold, len(problems), choices, before, [], also, row)
        kept = problems.setdefault((problem.question, *before), problem)
        if kept is not problem:
            differ |= {c for c in filled if row.get(c) != kept.row.get(c)}
            other += [where] if gold != kept.answer and not equal(gold or "", kept.answer or "") else []
    golds = [repr(problem.answer) for problem in problems.values() if problem.answer is not None]
    asked = [question, *(column for _, column in parts)]
    used = {answer, *asked, *(("choices", "options", *GPQA) if choices else [])}
    unused = [column for column in filled if column not in used]
    chats = sum(bool(problem.before) for problem in problems.values())
    print0(f"{name}: {len(problems)} problems from {source}, question column '{' + '.join(asked)}'"
           f"{f', {chats} with earlier turns, which replace those of --prompt' if chats else ''}, "
           f"{f'answer column {answer!r}' if answer else 'no answer column'} ({len(golds)} gold answers"
           f"{': ' if golds else ''}{', '.join(golds[:2])}), {len(rows) - len(problems)} duplicates removed"
           f"{', which differ in ' if differ & {*unused} else ''}{_some(sorted(differ & {*unused}))}"
           f"{'; not used: ' if unused else ''}{_some(unused)}")
    for words, found in faults.items():
        if found:
            print0(f"Warning: {name}: {len(found)} {words}, the first in {found[0]}")
    return list(problems.values())


def _is_filled(value) -> bool:
    if isinstance(value, list | dict):  # parquet fills up with nulls
        return any(map(_is_filled, value.values() if isinstance(value, dict) else value))
    return value is not None and value == value and (not isinstance(value, str) or value.strip() not in EMPTY)


def _some(names: list) -> str:
    return ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _turns(value, where: str) -> tuple[str, list[tuple[str, str]]]:
    """(the question, the turns before it) of text, or of a chat whose last turn is the question."""
    turns = []
    try:
        for turn in value if isinstance(value, list) else []:
            parts = turn["content"] if isinstance(turn["content"], list) else [dict(text=turn["content"])]
            turns.append((turn["role"], "".join([part["text"] for part in parts])))
            held = [key for part in (turn, *parts) for key in {*part} - TURN if _is_filled(part[key])]
            if any(part.get("type", "text") not in ("text", None) for part in parts) or any(
                    (match := PART.fullmatch(key)) and match["refused"] for key in held):
                raise KeyError  # an image, or the call of a tool
        role, text = turns.pop() if isinstance(value, list) else ("user", value)
    except (TypeError, KeyError, IndexError, AttributeError):
        role = ""
    spoken = role == "user" and isinstance(text, str) and text.strip()
    if not spoken or spoken[0] == "[" and re.match(r"""\[\s*\{\s*['"](role|content|from)""", spoken):
        raise UserError(f"{where} holds no text, nor a list of turns, each with a role and a content of text "
                        "alone (no image, no tool), the last of them the user's; see --question_field.")
    return text, turns


def _with_parts(text: str, before: list, row: dict, parts: list, where: str) -> tuple[str, list]:
    """(question, turns before it) with the text of the row's other columns that belong to a prompt."""
    chat = before[:1]
    for place, column in parts:  # a system turn comes last
        more = row.get(column)
        held = [text, *(said for _, said in before)]
        again = isinstance(more, str) and (more.strip() in held or len(more) > 40 and more.strip() in text)
        if not _is_filled(more) or again and place != "refused":  # some prompts hold it already
            continue
        fits = place == "system" and chat[0][0] == "user" if chat else place != "refused"
        if not isinstance(more, str) or not fits:
            raise UserError(f"{where}: column '{column}' seems to be part of the prompt, but cannot be put "
                            "into it; --question_field, which takes one column alone, leaves it out.")
        if place == "system":
            before = [("system", more.strip()), *before]
        else:
            text = "\n\n".join([more.strip(), text][:: 1 if place == "before" else -1])
    return text, before


def _with_choices(text: str, row: dict, answer: str, where: str) -> tuple[str, list[str | None], int]:
    """(question, gold answers, number of choices); with lettered choices and the right letters if it has any.

    They are GPQA's columns, or `choices` or `options`: a list, or labels and texts (ARC). The right one is
    named by label, letter, text or index from 0. They are shuffled (GPQA's first is right) with a seed of the
    question's own, alike in every run, unless the question lists them already."""
    options, gold = row.get("choices") or row.get("options"), row.get(answer)
    if GPQA[1] in row:
        options, gold = [row[column] for column in GPQA], 0
    if not options:
        return text, _golds(gold), 0
    labels = LETTERS
    if isinstance(options, dict):
        labels, options = options.get("label", [*options]), options.get("text", [*options.values()])
    listed = isinstance(options, list) and not any(isinstance(option, dict | list) for option in options)
    texts = {i: str(text).strip() for i, text in enumerate(options) if listed and _is_filled(text)}
    right, *_ = [gold] if isinstance(gold, int) else [*_open(gold), None]
    if isinstance(right, str) and not right.isdecimal():
        right = next((i for i in texts if texts[i] == right), right)
    right = {str(label): i for i, label in enumerate(labels)}.get(str(right), right)
    if not texts or max(texts) >= len(LETTERS) or answer and right not in texts:
        raise UserError(f"{where}: its choices must be a list of at most {len(LETTERS)}, and column "
                        f"'{answer}' must name the right one.")
    marks = {i: LETTERED.match(option) for i, option in texts.items()}
    if all(mark and mark[1].upper() == LETTERS[i] for i, mark in marks.items()):  # letters of their own
        texts = {i: option[marks[i].end():] for i, option in texts.items()}
    order = random.Random(stable_hash("choices", text)).sample([*texts], len(texts))
    letters = dict(zip(order, LETTERS))
    if all(re.search(rf"(?<!\w){LETTERS[i]}\s*[.):\]]\s*{re.escape(texts[i])}", text) for i in texts):
        letters = {i: LETTERS[i] for i in texts}
    else:
        text = "\n".join([text, "", *(f"{letters[i]}. {texts[i]}" for i in order)])
    golds = [letters[i] for i in texts if answer and texts[i] == texts[right]]  # equal choices are all right
    return text, golds, LETTERS.index(max(letters.values())) + 1


def _golds(value) -> list[str | None]:
    """The gold answers in a cell as text; None for what no response could give in a box."""
    if isinstance(value, str) and len(value) <= 300 and PLAIN.fullmatch(value.strip()):
        return [value.strip()]
    golds = {}
    for plain in _open(value):
        found = [] if isinstance(plain, dict) else gold_answers(plain)
        missing = not isinstance(plain, dict) and len(str(plain)) <= 4  # None, N/A, #N/A, NaN
        golds |= {gold if _comes_back(gold) else None: 1 for gold in found or ([] if missing else [""])}
    return list(golds)


@lru_cache(maxsize=10_000)
def _comes_back(gold: str) -> bool:  # a text of more than 300 characters is about an answer
    answer = gold if PLAIN.fullmatch(gold) else extract_answer(f"\\boxed{{{gold}}}")
    return len(gold) <= 300 and (answer == gold or equal(answer, gold))


def _open(value) -> list:
    """The plain values in a cell of gold answers: in bytes, lists, tags, dicts, text that is JSON or Python.

    A dict with several keys, none of which is known, stays."""
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    if isinstance(value, list | tuple | set):
        return [plain for item in value for plain in _open(item)]
    if isinstance(value, dict):
        held = {key: item for key, item in value.items() if _is_filled(item)}
        known = [held[key] for key in GOLD_KEYS if key in held]
        known = known or [item for item in held.values() if len(held) == 1 or isinstance(item, dict)]
        return _open(known[0]) if known else [value] if held else []
    if not isinstance(value, str) or len(value) <= 300 and PLAIN.fullmatch(value):
        return [value]
    value = re.sub(r"\barray\((\[.*?\])(?:,\s*dtype=\w+)?\)", r"\1", value.strip())  # numpy
    value = re.sub(r"^```\w*\s*|\s*```$", "", value)
    if tagged := TAGGED.findall(value):
        return _open(tagged[-1])
    coded = CODED.fullmatch(value) and (value[0] == "{" or gold_answers(value) == [value])
    for decode in (json.loads, ast.literal_eval) if coded else ():
        try:
            plain = _open(decode(value))
        except (ValueError, SyntaxError, TypeError):
            continue
        # a point or an interval is no list of answers
        numbers = len(plain) > 1 and any(isinstance(item, int | float) for item in plain)
        return [value] if numbers else plain
    return [{}] if re.match(r"""\{\s*["']""", value) else [value]


# -------------------------------------------------- files -------------------------------------------------
def _read(name: str, train: bool) -> tuple[str, list[tuple[str, dict]]]:
    """What a benchmark, Hub data set, local file or folder is read from; its rows, each with its place."""
    folder, _, part = name.partition("_")
    toy = TOY.parent / folder / f"{part or 'train'}.jsonl"
    path, split, hub = toy if name in TOYS else Path(os.path.expanduser(name)), "", HUB_ID.fullmatch(name)
    outer, _, word = os.path.expanduser(name).rpartition(":")
    if not path.exists() and len(outer) > 1 and os.path.exists(outer):
        path, split = Path(outer), word
    local = name and name not in BENCHMARKS and path.exists()
    if local and (path.is_dir() or _kind(path) in FILES):
        if split and path.is_file():
            raise UserError(f"{path} is a file, which has no split '{split}'; name the file alone.")
        source, files = _files_of(path, split, train) if path.is_dir() else (path, [path])
        tables = {file: _read_file(file) for file in files}
        return source, [(f"{file}, row {n}", row) for file in files for n, row in enumerate(tables[file], 1)]
    likely = name[:1] in ("/", ".", "~") or path.suffix.lower() in (*FILES, ".gz", ".zip", ".xlsx")
    if likely and not path.exists():
        raise UserError(f"there is no file {path}.")
    if local or name not in BENCHMARKS and not hub:
        raise UserError(f"unknown data set '{name}': known are {', '.join([*BENCHMARKS, *TOYS])}, a Hub id "
                        "owner/name, owner/name:config:split or owner/name@revision, a folder, folder:split, "
                        f"or a local {', '.join(FILES)} file.")
    source, config, split, revision = hub.groups() if hub else (name, None, None, None)
    benchmark, rows = BENCHMARKS.get(name, Benchmark(source, split or None, configs=(config or None,))), []
    source = benchmark.hub_id
    try:
        import datasets  # not above: it takes half a second, and local text does without
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told once, by UserError
        for config in benchmark.configs:
            data = datasets.load_dataset(benchmark.hub_id, config, split=benchmark.split, revision=revision)
            if isinstance(data, dict):
                split = _meant(data, train, f"{benchmark.hub_id}:{config or ''}")
                source, data = f"{benchmark.hub_id}, split {split}", data[split]
            rows += _rows(data.with_format("arrow")[:])
        return source, [(f"{benchmark.hub_id}, row {n}", row) for n, row in enumerate(rows, 1)]
    except UserError:
        raise
    except Exception as error:  # `datasets` raises many kinds, some of which only say that there is a cause
        error = error.__cause__ or error
        doubt = " (no network, gated, or no such name?)" if isinstance(error, OSError) else ""
        raise UserError(f"{name} cannot be read{doubt}: {' '.join(str(error).split())}") from None


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
    splits = {None: []}  # None: no data
    found = [Path(top, name) for top, _, names in os.walk(folder, followlinks=True) for name in names]
    for path in sorted(path for path in found if not ABOUT.search(str(path.relative_to(folder)))):
        file, state = path.relative_to(folder), path.with_name("state.json")
        # the state.json of save_to_disk names its files; others are caches, or left from before
        stale = path.suffix == ".arrow" and state.is_file() and path.name not in state.read_text()
        words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", "/".join(file.parts[::-1]))
        told = next((SPLITS[word.lower()] for word in words if word.lower() in SPLITS), "")
        splits.setdefault(None if stale or _kind(path) not in FILES else told, []).append(file)
    rest = splits.pop(None)
    split = SPLITS.get(split, split) or (_meant(splits, train, folder) if splits else "")
    if split not in splits:
        raise UserError(f"{folder} has no {split or 'data'} in files of {', '.join(FILES)}.")
    files = splits.pop(split)
    rest = sum(splits.values(), []) + rest
    words = f"{_some(files)}{'; not read: ' if rest else ''}{_some(rest)}"
    return f"{folder}{', split ' if split else ''}{split} ({words})", [folder / file for file in files]


def _read_file(path: Path) -> list[dict]:
    """The rows of a file, packed by gzip or not; all text of .csv and .tsv. Raises UserError.

    `datasets` does not name the broken line; of a .csv file it reads 007 as 7, and N/A as nothing."""
    kind, number, rows = _kind(path), 0, []
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        if kind in (".parquet", ".arrow"):
            from pyarrow import BufferReader, ipc, parquet  # not above: many machines do without
            reader = ipc.open_file if data[:6] == b"ARROW1" else ipc.open_stream
            data = BufferReader(data)
            return _rows(parquet.read_table(data) if kind == ".parquet" else reader(data).read_all())
        # -sig: some editors write a byte order mark; newline: \r\n becomes \n
        text = StringIO(data.decode("utf-8-sig"), newline=None).getvalue()
        if kind == ".json":
            rows = json.loads(text)
        elif kind == ".jsonl":
            for number, line in enumerate(text.split("\n")):  # splitlines() also splits at U+2028
                rows += [json.loads(line)] if line.strip() else []
        else:
            csv.field_size_limit(2**31 - 1)
            lines = csv.reader(StringIO(text), delimiter="\t" if kind == ".tsv" else ",", strict=True)
            header, *lines = [line for line in lines if line] or [[]]
            if ragged := [n for n, line in enumerate(lines, 1) if len(line) != len(header)]:
                raise ValueError(f"row {ragged[0]} has more or fewer fields than the first line")
            if len({*header}) < len(header):
                raise ValueError("two of its columns have the same name")
            rows = [dict(zip(header, line)) for line in lines]
    except ImportError:
        raise UserError(f"{path} is read with pyarrow: pip install datasets, which brings it.") from None
    except (ValueError, OSError, EOFError, zlib.error, csv.Error) as error:
        where = f", line {number + getattr(error, 'lineno', 1)}" if kind in (".json", ".jsonl") else ""
        reason = getattr(error, "msg", first_line(error))
        raise UserError(f"{path}{where} is not valid {kind[1:].upper()}: {reason.rstrip('.')}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} must hold a list of objects, each with a question.")
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
