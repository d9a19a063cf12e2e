"""Problems and prompts: the benchmarks and files to load, and how a question is put to the model."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from engine.answers import equivalence_classes, extract_answer, normal_gold
from engine.base import UserError, say_once, seed_of


@dataclass
class Problem:
    question: str
    answer: str | None = None
    """Gold answer. For evaluation and for logging label accuracy, never for a label-free reward."""
    id: int = 0
    choices: int = 0
    """Multiple choice: so many options are in the question, and the answer is a letter. 0: not."""
    prompt_ids: list[int] = field(default_factory=list)
    row: dict = field(default_factory=dict, repr=False)
    """The whole row of the data set, for methods that need its other columns."""
    same_answer: Callable[[list[str]], list] | None = field(default=None, repr=False)
    """n answers -> n keys, equal for equal answers (text, numbers); None: equality of engine/answers.py."""

    def classes(self, answers: list[str | None]) -> list[int | None]:
        """[n] equal answers have equal classes, numbered as they appear; None (no answer) stays None.

        Raises UserError if same_answer does not return a list of n keys."""
        if self.same_answer is None:
            return equivalence_classes(answers)
        given = [answer for answer in answers if answer is not None]
        keys = self.same_answer(given) if given else []
        one_each = isinstance(keys, list) and len(keys) == len(given)
        if not one_each or not all(isinstance(key, (str, int)) for key in keys):
            name = getattr(self.same_answer, "__name__", "same_answer")
            raise UserError(f"{name}, given to common.Run as same_answer, must return a list of {len(given)} "
                            f"keys (text or whole numbers), one per answer, but returned {repr(keys)[:80]}.")
        number, rest = {}, iter(keys)
        return [None if a is None else number.setdefault(next(rest), len(number)) for a in answers]

    def is_right(self, answer: str | None) -> bool:
        """Whether it is the gold answer; False without one."""
        known = answer is not None and self.answer is not None
        return known and self.classes([answer, self.answer]) == [0, 0]


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
TOYS = {"toy": "train.jsonl", "toy_test": "test.jsonl", "toy_ood": "ood.jsonl"}
# Made with --model smollm2 (engine/smollm2.py)
TOYS |= {"smollm2": "../smollm2/train.jsonl", "smollm2_test": "../smollm2/test.jsonl",
         "smollm2_ood": "../smollm2/ood.jsonl"}
FILES = (".json", ".jsonl", ".csv", ".parquet")
QUESTION_FIELDS = "question problem Question Problem prompt query instruction".split()
ANSWER_FIELDS = ("answer Answer final_answer gold gold_answer ground_truth target expected_answer "
                 "Correct_Answer answerKey reward_model solution").split()
LETTERS = "ABCDEFGHIJ"


# ------------------------------------------------ problems ------------------------------------------------
def load_problems(name: str, question_field: str = "", answer_field: str = "",
                  quiet: bool = False, same_answer: Callable | None = None) -> list[Problem]:
    """Problems of a benchmark's short name, a Hub id, a local file (FILES) or a folder of save_to_disk.

    The columns are those given, else the benchmark's, else found in a short list of usual names (printed).
    Of a gold answer its last \\boxed{}, or what follows #### (GSM8K), counts. same_answer: see Problem; the
    rest of it then stays as it is written, but for spaces around it.
    Problems with the same text are kept once. A benchmark of another size than known gives a warning.
    Raises UserError on an unknown name, a missing column, an empty or broken file."""
    rows, source = _read(name)
    if name == "mmlu_stem":
        rows = [row for row in rows if row.get("subject") in STEM]
    if not rows:
        raise UserError(f"{source} holds no problems.")
    benchmark = BENCHMARKS.get(name, Benchmark(name))
    columns = {str(column).replace(" ", "_"): column for column in rows[0]}
    question = question_field or benchmark.question or _first(QUESTION_FIELDS, columns)
    named = answer_field or benchmark.answer
    answer = named or _first(ANSWER_FIELDS, columns)  # rows need not have one that is only found
    if question and question == answer:
        raise UserError(f"{source}: column '{question}' cannot be question and answer; name the other one.")
    if not question:
        raise UserError(f"{source} has no question column (columns: {', '.join(rows[0])}); name it with "
                        f"--question_field.")
    needed = {question, named, *(GPQA if GPQA[1] in rows[0] else ())} - {""}
    seen, sentences, conflicts = {}, 0, 0
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        if missing := sorted(needed - row.keys()):
            raise UserError(f"{where} has no column '{missing[0]}' (columns: {', '.join(row)}).")
        text = _user_turn(row[question])
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: column '{question}' holds no text (and no chat with one user turn).")
        gold = row.get(answer) if answer else None
        options, right = _options(row, gold, answer, where)
        if options:  # shuffled (GPQA's first is right), with a seed of the question's own, alike in every run
            order = random.Random(seed_of("choices", text)).sample(range(len(options)), len(options))
            lines = [f"{letter}. {str(options[i]).strip()}" for letter, i in zip(LETTERS, order)]
            text = text + "\n\n" + "\n".join(lines)
            gold = None if right is None else LETTERS[order.index(right)]
        elif answer == "solution" and len(str(gold)) > 49 and not re.search(r"\\boxed|####", str(gold)):
            gold = None  # a text without an answer; DAPO's solution is the answer
        sentences += not options and same_answer is None and _is_sentence(gold)
        gold = _gold(gold, exact=same_answer is not None)
        text = text.strip().encode(errors="replace").decode()  # no half surrogate pairs
        first = seen.get(text)
        if not first:
            seen[text] = Problem(text, gold, len(seen), len(options), row=row, same_answer=same_answer)
        elif gold and first.answer and gold != first.answer:
            conflicts += not first.is_right(gold)
    problems = list(seen.values())
    if not quiet:
        known = sum(p.answer is not None for p in problems)
        column = f"answer column '{answer}'" if answer else "no answer column"
        print(f"{name}: {len(problems)} problems from {source}, question column '{question}', {column} "
              f"({known} gold answers), {len(rows) - len(problems)} duplicates removed", flush=True)
        if benchmark.size not in (0, len(problems), len(rows)):
            print(f"Warning: {name} should have {benchmark.size} problems, but {source} has {len(problems)}.",
                  flush=True)
        if sentences:
            print(f"Warning: {sentences} gold answers of {name} are sentences or longer than 100 characters, "
                  "so hardly a response can equal them; name a column of short answers.", flush=True)
        if conflicts:
            print(f"Warning: {conflicts} rows of {name} repeat a question with another gold answer; the "
                  "first is kept.", flush=True)
    return problems


def _options(row: dict, gold, answer: str, where: str) -> tuple[list, int | None]:
    """The options of multiple choice and the right one's index (None: not known); [] if there are none.

    GPQA's four columns; a list `choices` or `options` with the right one's index from 0 (MMLU) or letter
    (MMLU-Pro); a dict of lists `text` and `label` with the right one's label (ARC)."""
    options, labels = row.get("choices") or row.get("options"), list(LETTERS)
    if GPQA[1] in row:
        options, gold, answer = [row[column] for column in GPQA], 0, GPQA[0]
    if not options:
        return [], None
    if isinstance(options, dict):
        options, labels = options.get("text"), options.get("label")
    if not isinstance(options, list) or not isinstance(labels, list) or len(options) > len(LETTERS):
        raise UserError(f"{where}: its choices must be a list of at most {len(LETTERS)}, or lists called "
                        "text and label.")
    if None in options:
        raise UserError(f"{where}: one of its choices is missing.")
    right = labels.index(gold) if gold in labels else gold
    if answer and right not in range(len(options)):
        raise UserError(f"{where}: column '{answer}' must name the right one of the {len(options)} choices.")
    return options, right


def _is_sentence(gold) -> bool:
    """Whether no answer in a box could be this one: several words in a row, a full stop, a long text."""
    text = _final(gold) if isinstance(gold, str) else ""
    return bool(text) and (len(text) > 100 or re.search(r"([a-zA-Z]{2,} ){3}|[a-z]{2,}\.$", text) is not None)


def _final(gold: str) -> str | None:
    r"""What a solution ends with: its last \boxed{}, or what follows #### (GSM8K); other text as it is."""
    return extract_answer(gold) if "\\boxed" in gold else gold.rpartition("####")[2].strip()


def known_size(name: str, question_field: str = "", answer_field: str = "") -> int:
    """Problems of a data set, without a download; 0 if they are not known."""
    if name in BENCHMARKS:
        return BENCHMARKS[name].size
    here = name in TOYS or name.endswith(FILES)
    return len(load_problems(name, question_field, answer_field, quiet=True)) if here else 0


def _first(names: list[str], columns: dict[str, str]) -> str:
    return next((columns[name] for name in names if name in columns), "")


def _user_turn(value):
    """The only user turn of a chat; any other value as it is."""
    if not isinstance(value, list):
        return value
    turns = [turn for turn in value if isinstance(turn, dict) and turn.get("role", "user") == "user"]
    return turns[0].get("content") if len(turns) == 1 else None


def _gold(value, exact: bool = False) -> str | None:
    """The gold answer as text. None, NaN and empty text are no answer."""
    if isinstance(value, dict):  # DAPO's reward_model column
        value = value.get("ground_truth")
    values = [_final(v) if isinstance(v, str) else v for v in (value if isinstance(value, list) else [value])]
    values = [v for v in values if v is not None and v == v and str(v).strip() and not isinstance(v, list)]
    if not values:
        return None
    value = values if len(values) > 1 else values[0]
    return str(value).strip() if exact else normal_gold(value)


def _read(name: str) -> tuple[list[dict], str]:
    """The rows of a benchmark, Hub data set or local file, and where they came from."""
    path = (TOY / TOYS[name]).resolve() if name in TOYS else Path(name).expanduser()
    kind, source, hint = path.suffix.lower(), str(path), ""
    if kind in FILES and not path.is_file():
        hint = " (--model smollm2 makes it at its first run)" if TOYS.get(name, "").startswith("..") else ""
        raise UserError(f"there is no file {path}{hint}.")
    known, on_hub = name in BENCHMARKS, "/" in name and name[0] not in "/.~" and not path.exists()
    saved = not known and any((path / made).is_file() for made in ("dataset_info.json", "dataset_dict.json"))
    if not known and kind not in FILES and not saved and not on_hub:
        raise UserError(f"unknown data set '{name}': known are {', '.join([*BENCHMARKS, *TOYS])}, a Hub id "
                        f"owner/name, a local {', '.join(FILES[:-1])} or {FILES[-1]} file, or a folder that "
                        "`datasets` saved (save_to_disk).")
    try:
        if kind == ".csv":
            rows = _read_csv(path)
        elif kind == ".parquet":
            rows = _load_dataset("parquet", data_files=source, split="train", streaming=True)  # no cache
        elif kind in FILES:
            rows = _read_json(path, lines=kind == ".jsonl")
        elif saved:
            rows = _load_dataset(str(path.resolve()))
        else:
            benchmark, rows = BENCHMARKS.get(name, Benchmark(name)), []
            source, hint = benchmark.hub_id, " from the Hub (no network, gated, or no such name?)"
            for config in benchmark.configs:
                rows += _load_dataset(source, config, split=benchmark.split)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} cannot be read{hint}: {_reason(error)}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{source} must hold a list of objects, each with a question.")
    return rows, source


def _load_dataset(*args, **options) -> list[dict]:
    import datasets  # not above: it takes half a second, and the toy does without
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told once, by UserError
    load = datasets.load_from_disk if Path(args[0]).is_absolute() else datasets.load_dataset
    data = load(*args, **options)
    if isinstance(data, dict):  # all splits
        data = data[next((split for split in ("test", "train") if split in data), next(iter(data)))]
    return list(data)


def _read_csv(path: Path) -> list[dict]:
    """Every field as it is written. `datasets` shifts the columns if rows are longer than the header, reads
    the answers 007 and None as 7 and nothing, and refuses integers of more than 64 bits."""
    with path.open(encoding="utf-8-sig", newline="") as file:  # -sig: spreadsheets write a byte order mark
        reader = csv.DictReader(file, strict=True)
        rows, columns = list(reader), reader.fieldnames or []
    if len(set(columns)) < len(columns):
        raise UserError(f"{path} has two columns of the same name (columns: {', '.join(columns)}).")
    for number, row in enumerate(rows, 1):
        if None in row:
            raise UserError(f"{path}, row {number} has more fields than the header.")
    return rows


def _read_json(path: Path, lines: bool):
    """`datasets` reads {"data": [...]} as one row and does not say which line is broken."""
    text = path.read_text(encoding="utf-8-sig")
    values = []
    for number, part in enumerate(text.split("\n") if lines else [text]):  # splitlines(): also at U+2028
        try:
            values += [json.loads(part, object_pairs_hook=_row)] if part.strip() else []
        except ValueError as error:
            line, reason = number + getattr(error, "lineno", 1), getattr(error, "msg", error)
            raise UserError(f"{path}, line {line} is not valid JSON: {reason}.") from None
    if lines or not values:
        return values
    if isinstance(values[0], dict):  # {"data": [...]}
        return next((value for value in values[0].values() if isinstance(value, list)), None)
    return values[0]


def _row(pairs: list[tuple]) -> dict:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object has two keys of the same name")
    return dict(pairs)


def _reason(error: Exception) -> str:
    """One line: the first of the error, or of what caused it (`datasets` says only that there was one)."""
    return (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]


# ------------------------------------------------- prompts ------------------------------------------------
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."
STYLES = ("system", "suffix", "plain")
ROLES = ("system", "user", "assistant")
_CUT = "\ufdd0"  # Unicode keeps this code point for programs' own use: no text has it


@lru_cache
def read_template(path: str) -> list[tuple[str, str]]:
    """The turns (role, text) of a prompt template; one turn of role "" if it is plain text, for base models.

    A line [system], [user] or [assistant] begins a turn. {question} stands in the last, a user turn; worked
    examples are turns before it. A relative path is looked up here, then in the repository. Raises UserError
    for anything else."""
    wrong = f"--prompt is '{path}', but must be system, suffix, plain or a template file"
    try:
        file = Path(path).expanduser()
        file = next((found for found in (file, TOY.parent / file) if found.exists()), file)
        if file.exists() and not (file.is_file() and file.stat().st_size < 10**6):
            raise ValueError("it is no file of less than 1 MB")
        text = file.read_text(encoding="utf-8-sig")  # -sig: some editors write a byte order mark
    except (OSError, ValueError, RuntimeError) as error:  # the last: ~ of an unknown user
        raise UserError(f"{wrong}: {_reason(error).rstrip('.')}.") from None
    before, *parts = re.split(rf"^\[({'|'.join(ROLES)})\][ \t]*$", text, flags=re.MULTILINE)
    for line in "\n".join([before, *parts[1::2]]).split("\n"):
        if re.fullmatch(r"\s*\[\w+\]:?\s*", line):
            raise UserError(f"{wrong}: its line {line!r} begins no turn; one that does is exactly [system], "
                            "[user] or [assistant].")
    roles, texts = parts[::2], [part.strip() for part in parts[1::2]]
    if roles and before.strip():
        raise UserError(f"{wrong}: the text before the first line [role] belongs to no turn.")
    if not roles:
        roles, texts = [""], [before.rstrip("\n")]
    if "{question}" not in texts[-1] or roles[-1] not in ("user", ""):
        raise UserError(f"{wrong} with {{question}} in its last turn, a [user] turn.")
    if "{question}" in "\n".join(texts[:-1]):
        raise UserError(f"{wrong} with {{question}} in its last turn only.")
    if "system" in roles[1:]:
        raise UserError(f"{wrong} whose [system] turn, if any, comes first.")
    talk = [role for role in roles if role in ("user", "assistant")]
    if "assistant" in talk[::2] or "user" in talk[1::2]:
        raise UserError(f"{wrong} whose other turns are [user] and [assistant] in turn, [user] first.")
    if "" in texts:
        raise UserError(f"{wrong} without empty turns, as its [{roles[texts.index('')]}] turn is.")
    return list(zip(roles, texts))


def uses_chat_template(style: str) -> bool:
    """Whether prompts of this --prompt have turns; else they are plain text. Raises UserError."""
    return style in ("system", "suffix") or style != "plain" and read_template(style)[0][0] != ""


def encode_alone(tokenizer, text: str, style: str = "system") -> list[int]:
    """Token ids of a user turn of its own, without the instruction (Dynamic RL's z_0); a chat template may
    add a system turn: see --show_prompt."""
    if not uses_chat_template(style):
        return tokenizer.encode(text + "\n\n")
    return tokenizer.encode(_chat(tokenizer, text), add_special_tokens=False)


def encode_prompt(tokenizer, question: str, style: str = "system", max_tokens: int = 0) -> list[int]:
    """Token ids of a question in the style of --prompt; [] if there are more than max_tokens (0: any number).

    system: the instruction is the system turn. suffix: it follows the question (SCRL). plain: no chat
    template, for base models. Else the path of a template (read_template). Raises UserError if the chat
    template fails."""
    if max_tokens and len(question) > 20 * max_tokens:  # not tokenized: no text has 20 characters a token
        return []
    # A special token in a question is text, so that no data set can end the user's turn: it is cut in two,
    # and the pieces are tokenized one by one. Without one there is one piece, tokenized as always.
    question = _special_tokens(tokenizer).sub(_cut, question)
    text = _prompt_text(tokenizer, question, style)
    if max_tokens and len(text) > 100 * max_tokens:  # a template can make a long text of a short question
        return []
    first, *rest = text.split(_CUT)
    # a chat template brings its own
    ids = tokenizer.encode(first, add_special_tokens=not uses_chat_template(style))
    for piece in rest:
        ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids if not max_tokens or len(ids) <= max_tokens else []


@lru_cache(maxsize=4)
def _special_tokens(tokenizer) -> re.Pattern:
    """Those of the tokenizer, and added ones in angle brackets: <think> acts as one without being called so.

    (split_special_tokens=True would leave <think> whole, and split the template's own tokens as well.)"""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()
              if len(token.content) > 1 and (token.special or token.content[0] + token.content[-1] == "<>")]
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")  # without any: never matches


def _cut(token: re.Match) -> str:
    half = len(token[0]) // 2
    return token[0][:half] + _CUT + token[0][half:]


def _prompt_text(tokenizer, question: str, style: str) -> str:
    if style == "plain":
        return f"Question: {question}\n{SYSTEM}\nAnswer:"
    if style == "suffix":
        return _chat(tokenizer, question + SUFFIX)
    if style not in STYLES:
        turns = [{"role": role, "content": text} for role, text in read_template(style)]
        turns[-1]["content"] = turns[-1]["content"].replace("{question}", question)
        if not uses_chat_template(style):
            return turns[0]["content"]
        _check_turns(tokenizer, style)
        return _apply(tokenizer, turns)
    try:
        text = _chat(tokenizer, question, SYSTEM)
    except UserError:  # Gemma's: "System role not supported"
        text = ""
    # The toy has never seen an instruction: its template leaves the system turn out on purpose.
    if SYSTEM not in text and tokenizer.chat_template != _toys_template():
        text = _chat(tokenizer, f"{SYSTEM}\n\n{question}")
        say_once(f"the chat template of {tokenizer.name_or_path} has no system role: the instruction is put "
                  f"before the question, in the user turn")
    return text


@lru_cache
def _toys_template() -> str:
    return json.loads((TOY / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]


@lru_cache(maxsize=4)
def _check_turns(tokenizer, file: str) -> None:
    """Raises UserError, naming the role, if the chat template does not take all turns of a --prompt file."""
    turns = [{"role": role, "content": text} for role, text in read_template(file)]
    _apply(tokenizer, turns[-1:])  # fails by itself if it takes no turn at all
    for role, remedy in (("assistant", "put the worked examples and {question} into one [user] turn"),
                         ("system", "put its text at the beginning of the first [user] turn")):
        part = [turn for turn in turns if turn["role"] in ("user", "assistant", role)]
        try:
            text = _apply(tokenizer, part)
        except UserError:
            text = ""
        if not all(turn["content"] in text for turn in part):
            raise UserError(f"the chat template of {tokenizer.name_or_path} refuses the [{role}] turn of "
                            f"--prompt {file} or leaves out text of it; {remedy}.")


def _chat(tokenizer, user: str, system: str = "") -> str:
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": user})
    return _apply(tokenizer, turns)


def _apply(tokenizer, turns: list[dict]) -> str:
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        if not all(turn["content"].strip() in text for turn in turns if turn["role"] == "user"):
            raise ValueError("it leaves out the question")
        return text
    except Exception as error:
        raise UserError(f"the chat template of {tokenizer.name_or_path} fails ({_reason(error)}); fix it or "
                        f"give --prompt plain.") from None


def show_prompt(tokenizer, prompt_ids: list[int]) -> str:
    """The text that the model reads, special tokens and all, for --show_prompt."""
    return tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
