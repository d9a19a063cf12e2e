"""Problems and prompts: the benchmarks and files to load, and how a question is put to the model.

A row is a question and perhaps an answer, or a multiple choice as GPQA and MMLU have it. What else it holds
is not read, and its columns are printed; docs/data.md has recipes."""

from __future__ import annotations

import csv
import json
import random
import re
import sys
from collections import Counter, namedtuple
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from answers import LETTERS, equal, extract_answer, gold_answers
from engine.base import UserError, first_line, stable_hash
from engine.ranks import print0

Benchmark = namedtuple("Benchmark", "hub_id split question answer configs", defaults=("", "", [None]))
GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
MATH = tuple("algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra "
             "precalculus".split())
STEM = ("abstract_algebra astronomy college_biology college_chemistry college_computer_science "
        "college_mathematics college_physics computer_security conceptual_physics electrical_engineering "
        "elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science "
        "high_school_mathematics high_school_physics high_school_statistics machine_learning").split()
BENCHMARKS = {
    # all six papers: 500 and 30 problems
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", "problem", "answer"),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", "problem", "answer"),
    # EVOL-RL, SCRL, RESTRAIN, Dynamic RL: 30
    "aime25": Benchmark("math-ai/aime25", "test", "problem", "answer"),
    # TTRL, EVOL-RL, SCRL, ETTRL: 83, of 2022 and 2023; RESTRAIN, Dynamic RL: Qwen2.5-Math's AMC23, 40
    "amc": Benchmark("AI-MO/aimo-validation-amc", "train", "problem", "answer"),
    "amc23": Benchmark("math-ai/amc23", "test", "question", "answer"),
    # SCRL, RESTRAIN: 272; RESTRAIN: 675; RESTRAIN: 3,018 of the 18 subjects of Qwen2.5-Math's evaluation
    "minerva": Benchmark("math-ai/minervamath", "test", "question", "answer"),
    "olympiad": Benchmark("math-ai/olympiadbench", "test", "question", "final_answer"),
    "mmlu_stem": Benchmark("cais/mmlu", "test", "question", "answer", ("all",)),
    # EVOL-RL, RESTRAIN: 198, diamond; SCRL: all 448 (appendix B.1)
    "gpqa": Benchmark("Idavidrein/gpqa", "train", "Question", GPQA[0], ("gpqa_diamond",)),
    "gpqa_main": Benchmark("Idavidrein/gpqa", "train", "Question", GPQA[0], ("gpqa_main",)),
    # for training: EVOL-RL, Dynamic RL: 7,500; RESTRAIN: DAPO-14k; Dynamic RL: 17,398, and 40,315
    "math_train": Benchmark("EleutherAI/hendrycks_math", "train", "problem", "solution", MATH),
    "dapo": Benchmark("open-r1/DAPO-Math-17k-Processed", "train", "prompt", "solution", ("en",)),
    "dapo_17k": Benchmark("open-r1/DAPO-Math-17k-Processed", "train", "prompt", "solution", ("all",)),
    "deepscaler": Benchmark("agentica-org/DeepScaleR-Preview-Dataset", "train", "problem", "answer"),
}
TOY = Path(__file__).parent.parent / "toy"
TOY_FILES = {name + part: TOY.parent / name / f"{part[1:] or 'train'}.jsonl"
             for name in ("toy", "smollm2") for part in ("", "_test", "_ood")}  # smollm2's: by `make smollm2`
FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
# Usual names of columns, in any case; the first one that holds something is taken. solution: MATH's
QUESTIONS = ("question", "problem", "prompt", "messages")
ANSWERS = ("answer", "final_answer", "ground_truth", "expected_answer", "reward_model", "solution")
# Behind the choices: what the box must hold, since an option's text in it is no answer
LETTER = "Give the letter of your choice as the final answer."
# A choice that speaks of others by their letter or place is wrong in another order
FIXED_ORDER = re.compile(r"(?i:\b(above|below|both|neither|the previous|(all|none|any) of)\b"
                         r"|\b[a-j]\)?,? (and|or|&) \(?[a-j]\b)|\b[A-J](, ?|/)[A-J]\b")
# name:config:split@revision of the Hub
HUB_ID = re.compile(r"([^:@/]+/[^:@/]+)(?::([^:@]*))?(?::([^@]*))?(?:@(.+))?")
# A problem as the data has it: the first fields of common.Problem, which says what they are.
Row = namedtuple("Row", "question answer id choices prompt_ids also_right row")


# ----------------------------------------------- a run's data ---------------------------------------------
def read_data(args, tokenizer, train: bool, problem: type) -> tuple[list, dict[str, list]]:
    """(the problems of --dataset, those of each benchmark), of this class. Raises UserError if any are
    missing."""
    machine, problems, benchmarks = args.machine, [], {}
    fields = machine.question_field, machine.answer_field
    load = partial(read_problems, problem=problem, tokenizer=tokenizer, style=args.prompt,
                   max_tokens=args.max_prompt_tokens)
    if train and args.dataset:
        problems = load("--dataset", args.dataset, fields)
    trained = {problem.question for problem in problems}
    for name in filter(None, map(str.strip, args.eval.split(","))):
        if name == "train" and problems:
            benchmarks[name] = problems
            continue
        part = benchmarks[name] = load("--eval", name) if train else load("--benchmarks", name, fields)
        if seen := sum(problem.question in trained for problem in part):
            print0(f"--eval {name}: {seen} of its {len(part)} questions are in --dataset, too.")
    if train and args.labels == "gold" and not (problems and all(p.answer is not None for p in problems)):
        raise UserError("--labels is 'gold', but --dataset is empty or has problems without a gold answer.")
    if problems and len(problems) < args.prompts_per_batch and not machine.show_prompt:
        raise UserError(f"--prompts_per_batch is {args.prompts_per_batch}, but must be at most "
                        f"{len(problems)}, the problems of --dataset: a batch holds none twice.")
    return problems, benchmarks


def print_prompts(args, tokenizer, problems: list, benchmarks: dict[str, list]) -> None:
    """Print the exact text of each data set's first prompt and of the script's own prompts, and exit."""
    sources = {"--dataset": problems} | benchmarks
    prompts = {f"first problem of {name}": part[0].prompt_ids for name, part in sources.items() if part}
    for name, ids in (prompts | args.own_prompts(tokenizer)).items():
        print0(f"--- {name}: {len(ids)} tokens\n{tokenizer.decode(ids)}")
    sys.exit(0)


def count_steps(args, problems: list, tokenizer) -> int:
    """Rollout batches of the whole run: --steps, else those of --epochs."""
    steps = args.steps or args.epochs * (len(problems) // args.prompts_per_batch)
    if not steps or not problems and not args.own_prompts(tokenizer):
        raise UserError("there is nothing to train on: --dataset is empty, or --steps and --epochs are 0.")
    return steps


def digests(problems: list, benchmarks: dict[str, list], stop_ids: list[int]) -> dict[str, int]:
    """Digests of what all ranks must share, and a resumed run with the one before; keys as errors name it."""
    sources = {"--dataset": problems} | {f"--eval {name}": part for name, part in benchmarks.items()}
    contents = {"the stop tokens of --model": stable_hash(stop_ids)}
    for flag, part in sources.items():
        rows = [(row.prompt_ids, row.answer, *row.also_right) for row in part]
        contents[f"the data of {flag}"] = stable_hash(rows)
    return contents


# ------------------------------------------------ problems ------------------------------------------------
def read_problems(flag: str, name: str, fields: tuple[str, str] = ("", ""), *, problem: type, tokenizer,
                  style: str, max_tokens: int) -> list:
    """Problems with their prompts. Overlong ones: left out of training (--dataset), without a prompt else.

    Raises UserError, naming the flag, if they cannot be read or all are too long."""
    train, limit = flag == "--dataset", f"more than --max_prompt_tokens {max_tokens}"

    usual = Counter(encode_prompt(tokenizer, "forty-two", style))

    def encode(question: str) -> list[int]:
        ids = encode_prompt(tokenizer, question, style, max_tokens)
        # the model would read a turn that ends or begins within the question
        if more := [i for i in Counter(ids) - usual if i in tokenizer.control]:
            raise ValueError(f"the question holds control tokens of --model, {tokenizer.decode(more)!r}; "
                             "take them out, or give --prompt plain if the data brings a template")
        return ids

    problems = [problem(**row._asdict()) for row in load_problems(name, *fields, train, encode)]
    kept = [problem for problem in problems if problem.prompt_ids]
    if not kept:
        raise UserError(f"{flag}: all {len(problems)} problems of {name} have {limit}; raise it.")
    if len(kept) < len(problems):
        print0(f"{name}: {len(problems) - len(kept)} problems have {limit} and "
               f"{'are left out' if train else 'count as wrong'}")
    return kept if train else problems


def load_problems(name: str, question_field: str = "", answer_field: str = "", train: bool = True,
                  encode: Callable[[str], list[int]] = lambda question: []) -> list[Row]:
    """Problems of a benchmark's short name, a Hub id, a local file (FILES) or folder.

    The columns are those given, else the benchmark's, else found by usual names. What is used and what is not
    is printed: whether the question is whole, only its reader can say. Problems with the same question are
    kept once. train: which split is meant if none is named. encode: makes a question's prompt, and raises
    ValueError if it is none. Raises UserError, with the row."""
    source, rows = _read(name, train)
    filled = list(dict.fromkeys(column for row in rows for column in row if _is_filled(row[column])))
    question, answer = _find_columns(name, source, filled, question_field, answer_field)
    problems = {}
    for number, row in enumerate(rows, 1):
        try:
            text, golds, choices = _read_row(row, question, answer)
            text.encode()  # raises for half of a character (a lone surrogate), which no tokenizer takes
            prompt_ids = encode(text)
        except ValueError as error:
            raise UserError(f"{source}, row {number}: {error} (docs/data.md).") from None
        first_gold, *also_right = golds or [None]
        # ids have no gaps where duplicates were: the seeds of sampling derive from them
        problems.setdefault(text, Row(text, first_gold, len(problems), choices, prompt_ids, also_right, row))
    problems = [*problems.values()]
    graded = [problem for problem in problems if problem.answer is not None]
    unfit = sum(not any(map(_comes_back, [problem.answer, *problem.also_right])) for problem in graded)
    unused = [column for column in filled if column not in (question, answer, "choices", *GPQA)]
    if any(isinstance(row[question], list) and len(row[question]) > 1 for row in rows):
        unused.append("system turns: --prompt says what stands before a question")
    print0(f"{name}: {len(problems)} problems from {source}, question column '{question}'; {len(graded)} "
           f"of them have a gold answer (column {answer or 'none'}: {[p.answer for p in graded[:2]]}); "
           f"{f'{unfit} of these fit in no box; ' if unfit else ''}"
           f"{len(rows) - len(problems)} duplicates removed; columns not used: {unused}")
    return problems


def _is_filled(value) -> bool:
    """Whether a cell holds anything. Parquet and pandas write null or NaN where a row has nothing."""
    return str(value).strip() not in ("", "None", "nan", "[]", "{}")


def _find_columns(name: str, source: str, filled: list[str], question: str, answer: str) -> tuple[str, str]:
    """(the question's column, the answer's, "" for none): those given, the benchmark's, or usual ones.

    Raises UserError if one of them holds nothing."""
    benchmark = BENCHMARKS.get(name, Benchmark(name, None))
    question = question or benchmark.question or _usual(QUESTIONS, filled)
    answer = answer or benchmark.answer or (GPQA[0] if GPQA[1] in filled else _usual(ANSWERS, filled))
    if missing := {question, answer} - {*filled, ""} or not question:
        wanted = f"'{min(missing)}'" if question else f"{', '.join(QUESTIONS[:-1])} or {QUESTIONS[-1]}"
        raise UserError(f"{source} has no column {wanted} that holds anything (columns: "
                        f"{', '.join(filled)}); --question_field and --answer_field name others.")
    return question, answer


def _usual(names: tuple[str, ...], columns: list[str]) -> str:
    return next((column for name in names for column in columns if column.lower() == name), "")


def _read_row(row: dict, question: str, answer: str) -> tuple[str, list[str], int]:
    """(question, gold answers, number of choices): the contract of a row. Raises ValueError, as a row that is
    read otherwise than it is meant would train or be graded wrongly without a word."""
    text, options, right, shuffle = row.get(question), row.get("choices"), row.get(answer), GPQA[1] in row
    if isinstance(text, list):  # a chat, as verl has it
        roles = [isinstance(turn, dict) and turn.get("role") for turn in text]
        text = text[-1].get("content") if roles in (["user"], ["system", "user"]) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"'{question}' must hold text that is not empty, or a chat of one user turn, "
                         f"perhaps behind a system turn, but holds {row.get(question)!r:.60}")
    if shuffle:  # its first option is the right one
        options, right = [row.get(column) for column in GPQA], 0
    if not _is_filled(options):
        return text.strip(), gold_answers(right), 0
    if not (isinstance(options, list) and 2 <= len(options) <= len(LETTERS)
            and all(isinstance(option, str | int | float) for option in options)):
        raise ValueError(f"choices must be a list of 2 to {len(LETTERS)} texts, but are {options!r:.60}")
    if not _is_filled(right):
        right = None
    elif type(right) is not int or not 0 <= right < len(options):  # True is none, and -1 would be the last
        raise ValueError(f"'{answer}' must be the right choice's index, from 0 on, but is {right!r:.60}")
    return _with_choices(text, [str(option).strip() for option in options], right, shuffle)


def _with_choices(text: str, options: list[str], right: int | None,
                  shuffle: bool) -> tuple[str, list[str], int]:
    """(the question with lettered choices, the letters of the right ones, the number of choices).

    They are shuffled with a seed of the question's own, alike in every run, unless one speaks of others."""
    order = range(len(options))
    if shuffle or not any(map(FIXED_ORDER.search, options)):
        order = random.Random(stable_hash("choices", text)).sample(order, len(options))
    letters = [*zip(LETTERS, order)]
    golds = [] if right is None else [letter for letter, i in letters if options[i] == options[right]]
    lines = [f"{letter}. {options[i]}" for letter, i in letters]
    return "\n".join([text, "", *lines, "", LETTER]).strip(), golds, len(options)


def _comes_back(gold: str) -> bool:
    """Whether a response that gives it in a box is right. A text that is longer is about an answer."""
    boxed = extract_answer(f"\\boxed{{{gold}}}")
    return len(gold) <= 300 and (boxed == gold or equal(gold, boxed))


# -------------------------------------------------- files -------------------------------------------------
def _read(name: str, train: bool) -> tuple[str, list[dict]]:
    """(what is read, as errors name it; its rows) of a benchmark, Hub data set or local file.

    Where a Hub id names no split, --dataset reads train, and --eval test."""
    path = TOY_FILES.get(name) or Path(name)
    if name in BENCHMARKS:  # also beside a folder of that name
        return _read_hub(BENCHMARKS[name])
    if (path / "state.json").is_file():
        return str(path), _ask("load_from_disk", str(path))
    if path.suffix.lower() in FILES:
        return str(path), _read_file(path)
    hub = HUB_ID.fullmatch(name)
    if not hub or path.exists():  # `datasets` would read a folder of that name, out of its cache
        raise UserError(f"unknown data set '{name}': known are {', '.join([*BENCHMARKS, *TOY_FILES])}, a Hub "
                        "id owner/name, owner/name:config:split or owner/name@revision, and here a "
                        f"{', '.join(FILES)} file or a folder that `save_to_disk` wrote.")
    hub_id, config, split, revision = hub.groups()
    split = split or ("train" if train else "test")
    return _read_hub(Benchmark(hub_id, split, configs=(config or None,)), revision)


def _read_hub(benchmark: Benchmark, revision: str | None = None) -> tuple[str, list[dict]]:
    """What `_read` returns, of a benchmark or a data set of the Hub."""
    rows = []
    for config in benchmark.configs:
        rows += _ask("load_dataset", benchmark.hub_id, config, split=benchmark.split, revision=revision)
    if benchmark is BENCHMARKS["mmlu_stem"]:
        rows = [row for row in rows if row["subject"] in STEM]
    return f"{benchmark.hub_id}, split {benchmark.split}", rows


def _ask(function: str, source: str, *args, **options) -> list[dict]:
    """The rows that a function of `datasets` reads, as they are stored. Raises UserError, as the errors of
    `datasets` are of many kinds."""
    import datasets  # not above: it takes half a second, and text does without
    try:
        table = getattr(datasets, function)(source, *args, **options).with_format("arrow")[:]
    except Exception as error:
        raise UserError(f"{source} cannot be read: {first_line(error)}.") from None
    return _rows_of(table)


def _read_table(path: Path):
    """The arrow table of a .parquet file, or of an .arrow file in either format. `datasets` would answer from
    its cache where a file was replaced and kept its time stamp."""
    from pyarrow import ipc, parquet
    if path.suffix.lower() == ".parquet":
        return parquet.ParquetFile(path).read()
    content = path.read_bytes()
    return (ipc.open_file if content.startswith(b"ARROW1") else ipc.open_stream)(content).read_all()


def _rows_of(table) -> list[dict]:
    """The rows of an arrow table."""
    return [_digits(row, table.schema) for row in table.to_pylist(maps_as_pydicts="strict")]


def _digits(value, kind):
    """A value of this arrow type, or a row of this schema, floats of 16 and 32 bits as they were written: .1
    would be 0.10000000149011612 as a Python float, which no response's 0.1 equals."""
    if isinstance(value, dict):
        of = getattr(kind, "item_type", None)  # a map's; its pairs as a list would be two gold answers each
        return {name: _digits(item, of or kind.field(name).type) for name, item in value.items()}
    kind = getattr(kind, "value_type", kind)  # of a list, or of an encoded column
    if isinstance(value, list):
        return [_digits(item, kind) for item in value]
    if isinstance(value, float) and kind in ("float", "halffloat"):
        return float(str(kind.to_pandas_dtype()(value)))
    return value


def _read_file(path: Path) -> list[dict]:
    """The rows of a file. Raises UserError.

    Text is read by Python. `datasets` would make 1.2e19 of 12345678901234567890 and a date of 2020-01-01, and
    where a comma lacks its quotation marks it would take what stands behind it for the question."""
    kind = path.suffix.lower()
    try:
        if kind in (".parquet", ".arrow"):
            return _rows_of(_read_table(path))
        with path.open(encoding="utf-8-sig", newline="") as file:
            if kind == ".json":
                return json.load(file)
            if kind == ".csv":
                return _read_csv(file)
            return _read_jsonl(file)
    except (ValueError, OSError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from None


def _read_jsonl(file) -> list[dict]:
    rows = []
    for line in filter(str.strip, file):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:  # it speaks of line 1 or 2, and means those of this row
            raise ValueError(f"row {len(rows) + 1}, character {error.pos + 1}: {error.msg}") from None
    return rows


def _read_csv(file) -> list[dict]:
    # strict: quotation marks that are not closed raise; a blank behind a comma belongs to no field
    reader = csv.DictReader(file, skipinitialspace=True, strict=True)
    rows = [*reader]
    for number, row in enumerate(rows, 1):
        # DictReader gives a missing field the value None, and fields too many the name None
        if len(row) != len(reader.fieldnames) or None in row.values():
            raise ValueError(f"row {number} must have one field for each column of the first line (a text "
                             "with a comma needs quotation marks, and each column a name of its own)")
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
    file = Path(style)
    file = file if file.exists() else TOY.parent / style
    wrong = f"--prompt is '{style}', but must be system, suffix, plain or a template file"
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{wrong}: {first_line(error)}.") from None
    # a line that looks like one, as [User] or [human], begins a turn of a role that is refused
    before, *parts = re.split(r"^[ \t]*\[([A-Za-z]{2,})\][ \t]*$", text, flags=re.MULTILINE)
    turns = [(role, part.strip()) for role, part in zip(parts[::2], parts[1::2])]
    turns = turns or [("", before.rstrip("\n"))]
    roles = " ".join(role for role, _ in turns)
    in_order = re.fullmatch("|(system )?(user assistant )*user( assistant)?", roles)
    last_user = [part for role, part in turns if role != "assistant"][-1:]
    # text before the first turn would be lost, and a turn that begins in the middle of a line is none
    is_mixed = before.strip() if roles else "[user]" in before
    if not in_order or is_mixed or "{question}" not in last_user[0]:
        raise UserError(f"{wrong}: plain text with {{question}}, or turns, each begun by a line [system], "
                        "[user] or [assistant], in this order, the last [user] turn with {question}; it has "
                        f"{roles or 'none'}.")
    return turns


def encode_alone(tokenizer, text: str, style: str = "system") -> list[int]:
    """Token ids of a user turn of its own, without the instruction (Dynamic RL's z_0); a chat template may
    add a system turn: see --show_prompt."""
    return _encode(tokenizer, [("user", text) if read_template(style)[0][0] else ("", text + "\n\n")])


def encode_prompt(tokenizer, question: str, style: str = "system", max_tokens: int = 0) -> list[int]:
    """Token ids of a question in the style of --prompt; [] if there are more than max_tokens (0: any number).

    Raises UserError if the chat template fails."""
    turns = [(role, text.replace("{question}", question)) for role, text in read_template(style)]
    ids = _encode(tokenizer, turns)
    return ids if not max_tokens or len(ids) <= max_tokens else []


def _encode(tokenizer, turns: list[tuple[str, str]]) -> list[int]:
    """Token ids of these turns (role, text); of one of role "" without a chat template.

    Raises UserError if the chat template fails or leaves a turn out.
    If there is no system role (Gemma), the instruction is put before the question, in the user turn."""
    text, chat = turns[0][1], [dict(role=role, content=content) for role, content in turns if role]
    prefill = chat.pop()["content"] if turns[-1][0] == "assistant" else ""  # the response goes on from here
    try:
        if chat:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + prefill
        if missing := [role for role, content in turns if content.strip() not in text]:
            raise ValueError(f"it leaves out the [{missing[0]}] turn")
    except Exception as error:
        if turns[0] != ("system", SYSTEM):
            raise UserError(f"the chat template of {tokenizer.name_or_path} fails ({first_line(error)}); fix "
                            "it or give --prompt plain.") from None
        toys = json.loads((TOY / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
        instruction = "" if tokenizer.chat_template == toys else f"{SYSTEM}\n\n"  # the toy has never seen one
        return _encode(tokenizer, [("user", instruction + turns[1][1]), *turns[2:]])
    # a chat template brings its own special tokens, and so may a text
    bare = not chat and not text.startswith(tokenizer.bos_token or "\0")
    encoded = tokenizer(text, add_special_tokens=bare, return_special_tokens_mask=True)
    while encoded["special_tokens_mask"].pop():  # an end token that the tokenizer puts behind every text
        encoded["input_ids"].pop()
    return encoded["input_ids"]


def end_of_prompt(tokenizer, style: str, prompt_ids: list[int]) -> str:
    """What a prompt in the style of --prompt has behind its last question, and with it the beginning of the
    response: the chat template's header, the tags that it opens, a prefill; of a plain one the text behind
    {question}. All of a prompt that has another form."""
    role, text = read_template(style)[0]
    turn = ("user", "{question}") if role else ("", text)
    header = tokenizer.decode(_encode(tokenizer, [turn])).rpartition("{question}")[2]
    text = tokenizer.decode(prompt_ids)
    return text[max(0, text.rfind(header)):]
