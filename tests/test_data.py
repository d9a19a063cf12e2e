"""Loading problems from every kind of file and from a stand-in for the Hub, and their prompts."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from transformers import AutoTokenizer

from engine import data
from engine.base import UserError
from engine.data import BENCHMARKS, STEM, STYLES, SUFFIX, SYSTEM, encode_prompt, load_problems, show_prompt

ROOT = Path(__file__).parent.parent
ROWS = [{"problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(1, 5)]


def write(path, rows):
    """The rows as a file of the kind that its name says."""
    lines = [json.dumps(row) for row in rows]
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{', '.join(lines)}]")
    return str(path)


def questions_and_answers(name, **options):
    return [(p.question, p.answer) for p in load_problems(str(name), quiet=True, **options)]


# ------------------------------------------------- files -------------------------------------------------
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path, name, capsys, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = write(tmp_path / name, [*ROWS, ROWS[0]])
    problems = load_problems(file)
    assert [(p.question, p.answer, p.id) for p in problems] == [
        (f"What is {i} + {i}?", str(2 * i), i - 1) for i in range(1, 5)]
    assert all(str(p.row["answer"]) == p.answer and p.row["problem"] == p.question for p in problems)
    printed = capsys.readouterr().out
    assert f"4 problems from {file}, question column 'problem', answer column 'answer' (4 gold" in printed
    assert "1 duplicates removed" in printed and "Warning" not in printed
    assert not list(tmp_path.rglob("*.arrow")) and {p.name for p in tmp_path.iterdir()} <= {name, "cache"}
    load_problems(file, quiet=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content, problem", [
    ('{"problem": "p\u2028q\x85r"}\n', ("p\u2028q\x85r", None)),
    ('\r\n{"problem": " p\\n"}\r\n\r\n', ("p", None)),
    ('\ufeff{"problem": "p", "answer": 1}', ("p", "1")),
    ('{"problem": "p", "answer": "007"}', ("p", "007"))])
def test_lines_are_read_as_they_are_written(tmp_path, content, problem):
    """Other line ends, a byte order mark, and 007, which `datasets` reads as 7."""
    (tmp_path / "a.jsonl").write_bytes(content.encode())
    assert questions_and_answers(tmp_path / "a.jsonl", same_answer=list) == [problem]


def test_a_column_of_several_types(tmp_path):
    rows = [{"problem": str(i), "answer": answer} for i, answer in enumerate([1, "x", 1.5, ["2", "3"], None])]
    problems = load_problems(write(tmp_path / "a.jsonl", rows), quiet=True)
    assert [p.answer for p in problems] == ["1", "x", "1.5", "2, 3", None]


BAD_FILES = {
    "broken line": ("a.jsonl", '{"problem": "p"}\n\n{"problem": \n', "line 3 is not valid JSON: Expecting"),
    "broken list": ("a.json", '[\n{"problem": "p"},\n{"problem" "q"}]', "line 3 is not valid JSON"),
    "not UTF-8": ("a.jsonl", b"\xe9", "line 1 is not valid JSON: 'utf-8' codec"),
    "empty jsonl": ("a.jsonl", "", "a.jsonl holds no problems"),
    "empty json": ("a.json", " \n", "a.json holds no problems"),
    "numbers": ("a.json", "[1, 2]", "must hold a list of objects"),
    "an object": ("a.json", '{"problem": "p"}', "must hold a list of objects"),
    "a list on a line": ("a.jsonl", '[{"problem": "p"}]', "must hold a list of objects"),
    "no parquet": ("a.parquet", "no", "Parquet file size is 2 bytes"),
    "csv": ("a.csv", "problem,answer\np,1\n", "or a local .json, .jsonl, .parquet file"),
    "no question": ("a.jsonl", '{"text": "p", "x": 1}', "no question column (columns: text, x); name"),
    "question missing": ("a.jsonl", '{"problem": "p"}\n{"x": 1}', "row 2 has no column 'problem' (col"),
    "question is a number": ("a.jsonl", '{"problem": 3}', "row 1: column 'problem' holds no text"),
    "question is blank": ("a.jsonl", '{"problem": "p"}\n{"problem": " "}', "row 2: column 'problem' holds"),
    "chat without a user": ("a.jsonl", '{"prompt": [{"role": "system", "content": "s"}]}', "holds no text"),
    "GPQA, no answer": ("a.jsonl", '{"Question": "p", "Incorrect Answer 1": "x"}', "'Correct Answer'"),
    "GPQA, two choices": ("a.jsonl", '{"Question": "p", "Correct Answer": "y", "Incorrect Answer 1": "x"}',
                          "row 1 has no column 'Incorrect Answer 2'"),
}
WRONG_CHOICES = [(None, "xy"), (2, "xy"), ("C", "xy"), ("AB", "x"), ([0], "x"), (math.nan, "x")]


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_files_are_one_sentence(tmp_path, fault):
    name, content, words = BAD_FILES[fault]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        load_problems(str(tmp_path / name))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("right, choices", WRONG_CHOICES)
def test_choices_without_a_right_one(tmp_path, right, choices):
    file = write(tmp_path / "a.jsonl", [{"question": "p", "choices": list(choices), "answer": right}])
    with pytest.raises(UserError, match="row 1: column 'answer' must name the right one of the [12] ch"):
        load_problems(file)


def test_names_that_are_no_data_set(tmp_path):
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(UserError, match=rf"^there is no file .*{name}\.$"):
            load_problems(str(tmp_path / name))
    for name in ("math5000", "", str(tmp_path / "a.txt")):
        words = rf"unknown data set '{name}': known are math500, .* toy_ood, .*, a Hub id"
        with pytest.raises(UserError, match=words):
            load_problems(name)


# ------------------------------------------------ columns ------------------------------------------------
@pytest.mark.parametrize("row, answer", [
    ({"Question": "q", "Answer": "7"}, "7"),
    ({"question": "q", "final_answer": ["3"]}, "3"),
    ({"prompt": "q", "answer": 142.0}, "142"),
    ({"problem": "q"}, None),
    ({"problem": "q", "Correct Answer": "5"}, "5"),
    ({"problem": "q", "solution": "so it is \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}"),
    ({"problem": "q", "solution": "34"}, "34"),
    ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34"}}, "34"),
    ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": 1}, "1"),
    ({"problem": "q", "answer": math.nan}, None),
    ({"problem": "q", "answer": None}, None),
    ({"problem": "q", "answer": " "}, None),
    ({"problem": "q", "answer": []}, None),
    ({"problem": "q", "answer": [None]}, None),
    ({"problem": "q", "answer": [None, "3"]}, "3"),
    ({"problem": "q", "reward_model": {}}, None),
    ({"problem": "q", "answer": 0}, "0"),
    ({"problem": "q", "answer": "He has 10 + 30 = 40.\n#### 40"}, "40"),
    ({"problem": "q", "target": "So \\boxed{1}, no: \\boxed{40}."}, "40"),
    ({"problem": "q", "reward_model": {"ground_truth": "#### 1,040"}}, "1040"),
    ({"problem": "q", "solution": "a proof " * 10 + "\n#### 7"}, "7"),
    ({"problem": "q", "answer": ["9.6\n"]}, "9.6"),
])
def test_usual_columns(tmp_path, row, answer):
    (problem,) = load_problems(write(tmp_path / "a.jsonl", [row]), quiet=True)
    assert problem.question == "q" and problem.answer == answer
    assert not problem.choices and problem.row.keys() == row.keys()


def test_named_columns(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"x": "q", "y": 1, "question": "no"}, {"x": "r", "question": "no"}])
    with pytest.raises(UserError, match=r"row 2 has no column 'y' \(columns: x, question\)"):
        load_problems(file, "x", "y")
    with pytest.raises(UserError, match=r"row 1 has no column 'z' \(columns: x, y, question\)"):
        load_problems(file, "z")
    assert questions_and_answers(file, question_field="x") == [("q", None), ("r", None)]
    (tmp_path / "a.jsonl").write_text('{"x": "q", "y": 1, "question": "no"}')
    assert questions_and_answers(file, question_field="x", answer_field="y") == [("q", "1")]


def test_an_answer_column_that_is_found_may_have_gaps(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"problem": "p", "answer": 1}\n{"problem": "q"}')
    assert questions_and_answers(tmp_path / "a.jsonl") == [("p", "1"), ("q", None)]


def test_multiple_choice_keeps_its_order(tmp_path):
    """Red if the orders change: then so does every multiple-choice benchmark."""
    gpqa = [{"Question": f" What {i}? ", "Correct Answer": " right", "Incorrect Answer 1": "a",
             "Incorrect Answer 2": 3, "Incorrect Answer 3": "c\n"} for i in range(40)]
    problems = load_problems(write(tmp_path / "g.jsonl", gpqa), quiet=True)
    assert problems[0].question == "What 0? \n\nA. c\nB. a\nC. right\nD. 3" and problems[0].answer == "C"
    assert problems[1].question == "What 1? \n\nA. a\nB. right\nC. c\nD. 3"
    assert {p.answer for p in problems} == set("ABCD") and all(p.choices for p in problems)
    assert all(f"{p.answer}. right" in p.question for p in problems)
    mmlu = [{"question": "Which 0?", "choices": ["w", "x"], "answer": 0},
            {"question": "Which 2?", "choices": ["w", "x", "y", "z"], "answer": "A"}]
    assert questions_and_answers(write(tmp_path / "m.jsonl", mmlu)) == [
        ("Which 0?\n\nA. x\nB. w", "B"), ("Which 2?\n\nA. y\nB. w\nC. x\nD. z", "B")]


@pytest.mark.parametrize("row, question, answer", [
    # MMLU-Pro
    ({"options": list("tuvwxyz"), "answer": "B"}, "q\n\nA. v\nB. y\nC. t\nD. z\nE. w\nF. u\nG. x", "F"),
    ({"choices": ["x", "y"]}, "q\n\nA. y\nB. x", None),
    ({"options": [], "answer": 3}, "q", "3"),
    ({"options": None, "answer": 3}, "q", "3"),
])
def test_the_options_of_other_multiple_choice_are_in_the_question(tmp_path, row, question, answer):
    problem, = load_problems(write(tmp_path / "a.jsonl", [{"question": "q"} | row]), quiet=True)
    assert (problem.question, problem.answer) == (question, answer)
    assert problem.choices == question.count("\n") - (1 if problem.choices else 0)


@pytest.mark.parametrize("options", [{"A": "x", "B": "y"}, "x, y", list("abcdefghijk"), {"text": "x"}])
def test_options_of_an_unknown_shape_are_refused(tmp_path, options):
    file = write(tmp_path / "a.jsonl", [{"question": "q", "options": options, "answer": "A"}])
    with pytest.raises(UserError, match="row 1: its choices must be a list of at most 10.$"):
        load_problems(file)


# ----------------------------------------- benchmarks and the toy -----------------------------------------
@pytest.mark.parametrize("name, count", [("toy", 128), ("toy_test", 128), ("toy_ood", 64)])
def test_the_toy(name, count):
    problems = load_problems(name, quiet=True)
    assert len(problems) == count and all(p.answer.isdigit() and not p.choices for p in problems)


def test_the_toy_starts_without_the_datasets_library():
    code = "import sys, engine.data as d; d.load_problems('toy'); assert 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub: hub.rows answers every call, hub.calls has what was asked for."""
    hub = SimpleNamespace(rows=[], calls=[])

    def load_dataset(name, config=None, split=None):
        hub.calls.append((name, config, split))
        if isinstance(hub.rows, Exception):
            raise hub.rows
        return hub.rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return hub


def rows_of(name, count):
    """As many rows with the columns that the benchmark is known to have, and nothing else."""
    benchmark = BENCHMARKS[name]
    gpqa = data.GPQA if "gpqa" in name else ()
    columns = dict.fromkeys([benchmark.question, benchmark.answer, *gpqa], "1")
    if name == "mmlu_stem":
        columns |= {"choices": ["1", "2"], "answer": 1, "subject": STEM[0]}
    return [columns | {benchmark.question: f"What is {i}?"} for i in range(count)]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_of_another_size_is_warned_about(name, hub, capsys):
    benchmark = BENCHMARKS[name]
    hub.rows = rows_of(name, benchmark.size)
    problems = load_problems(name)
    assert len(problems) == benchmark.size and all(p.answer for p in problems)
    assert "Warning" not in capsys.readouterr().out
    hub.rows = hub.rows[:2]
    load_problems(name)
    warning = f"Warning: {name} should have {benchmark.size} problems, but {benchmark.hub_id} has 2."
    assert warning in capsys.readouterr().out


def test_duplicates_that_a_benchmark_is_counted_with(hub, capsys):
    hub.rows = [*rows_of("aime24", 29), rows_of("aime24", 1)[0]]  # 30 rows, 29 problems
    assert len(load_problems("aime24")) == 29 and "Warning" not in capsys.readouterr().out
    hub.rows = 32 * rows_of("aime24", 30)
    assert len(load_problems("aime24")) == 30 and "Warning" not in capsys.readouterr().out
    hub.rows = 32 * rows_of("aime24", 29)
    assert len(load_problems("aime24")) == 29 and "should have 30 problems" in capsys.readouterr().out


def test_benchmarks_are_read_as_their_table_says(hub):
    hub.rows = rows_of("math_train", 3)
    load_problems("math_train", quiet=True)
    assert hub.calls == [("EleutherAI/hendrycks_math", subject, "train") for subject in data.MATH]
    hub.calls, hub.rows = [], rows_of("mmlu_stem", 4)
    hub.rows[3]["subject"] = "anatomy"
    assert len(load_problems("mmlu_stem", quiet=True)) == 3 and hub.calls == [("cais/mmlu", "all", "test")]
    assert len(set(STEM)) == 18 and "anatomy" not in STEM
    for benchmark in BENCHMARKS.values():
        assert benchmark.split in ("train", "test") and benchmark.hub_id.count("/") == 1


def test_other_sets_of_the_hub(hub):
    train, test = [{"problem": "p", "answer": 1}], [{"problem": "q", "answer": 2}]
    for splits, question in [({"train": train, "test": test}, "q"), ({"x": test, "train": train}, "p"),
                             ({"x": test, "y": train}, "q"), (train, "p")]:
        hub.rows = splits
        assert questions_and_answers("owner/name")[0][0] == question
    assert hub.calls[0] == ("owner/name", None, None)
    hub.rows = RuntimeError("An error occurred while generating the dataset")
    hub.rows.__cause__ = ValueError("bad column\nof many")
    with pytest.raises(UserError, match="^owner/name cannot be read .no network, .*: bad column$"):
        load_problems("owner/name")


# ------------------------------------------------ prompts ------------------------------------------------
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
NO_SYSTEM = CHATML.replace("in messages", "in messages if m.role != 'system'")
GEMMA = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
NO_ROLE = "{% for m in messages if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% endfor %}"


def toy_tokenizer(template=CHATML):
    tokenizer = AutoTokenizer.from_pretrained(data.TOY)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer():
    return toy_tokenizer()


def test_prompt_styles(tokenizer):
    text = {style: show_prompt(tokenizer, encode_prompt(tokenizer, "1+1?", style)) for style in STYLES}
    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert text == {"system": f"<|im_start|>system\n{SYSTEM}<|im_end|>\n" + user.format("1+1?"),
                    "suffix": user.format(f"1+1?{SUFFIX}"),
                    "plain": f"Question: 1+1?\n{SYSTEM}\nAnswer:"}


def test_ids_are_the_templates_own(tokenizer):
    def own(*turns):
        turns = [{"role": role, "content": content} for role, content in turns]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    toy = [p.question for p in load_problems("toy", quiet=True)[:16]]
    for question in [*toy, "", " ", "\n\nx", "a < b > c", "<|im|>", "<", "\u00e9"]:
        plain = tokenizer.encode(f"Question: {question}\n{SYSTEM}\nAnswer:")
        assert encode_prompt(tokenizer, question) == own(("system", SYSTEM), ("user", question))
        assert encode_prompt(tokenizer, question, "suffix") == own(("user", question + SUFFIX))
        assert encode_prompt(tokenizer, question, "plain") == plain


TURNS = "[system]\nBox it.\n[user]\n1+1?\n[assistant]\n\\boxed{2}\n\n[user]\nNow: {question}\n"


def test_a_template_file_has_turns_or_is_plain_text(tokenizer, tmp_path):
    file = tmp_path / "template.txt"
    for text, expected in {
            TURNS: "<|im_start|>system\nBox it.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
                   "<|im_start|>assistant\n\\boxed{2}<|im_end|>\n"
                   "<|im_start|>user\nNow: 2+2?<|im_end|>\n<|im_start|>assistant\n",
            "\ufeff[user] \n{question}\n": "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
            "Q: 1+1? A: \\boxed{2}\nQ: {question} A:\n": "Q: 1+1? A: \\boxed{2}\nQ: 2+2? A:"}.items():
        data.read_template.cache_clear()
        file.write_text(text)
        assert show_prompt(tokenizer, encode_prompt(tokenizer, "2+2?", str(file))) == expected
    assert data.encode_alone(tokenizer, "Hi", str(file)) == tokenizer.encode("Hi\n\n")
    tokenizer.chat_template = None  # a base model's
    assert encode_prompt(tokenizer, "2+2?", str(file))


@pytest.mark.parametrize("text", [
    None, b"\xff{question}", "Hi", "[user]\nHi\n", "[user]\n{question}\n[assistant]\nSo",
    "Hi\n[user]\n{question}", "[user]\nHi\n[system]\nBox.\n[user]\n{question}",
    "[System]\nBox.\n[user]\n{question}", "[user]\nHi\n[assistent]\nHi\n[user]\n{question}",
    "[user]\nHi\n[user]\n{question}", "[system]\nBox.\n[assistant]\nHi\n[user]\n{question}"])
def test_a_bad_template_is_one_sentence(tokenizer, tmp_path, text):
    file = tmp_path / "template.txt"
    if text:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        encode_prompt(tokenizer, "1+1?", str(file))
    said = str(error.value)
    assert said.startswith(f"--prompt is '{file}', but must be system, suffix, plain or a template file: ")
    assert "\n" not in said


def test_a_template_is_looked_up_here_and_then_in_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Path("examples/prompts/few_shot.txt")
    assert len(data.read_template(str(name))) == 5  # the repository's
    name.parent.mkdir(parents=True)
    name.write_text("{question}")
    data.read_template.cache_clear()
    assert data.read_template(str(name)) == [("", "{question}")]
    data.read_template.cache_clear()


NO_ANSWERS = "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}" + CHATML


@pytest.mark.parametrize("template, words", [
    (GEMMA, "no system role"), (NO_SYSTEM, "it leaves out the [system] turn"),
    (NO_ROLE, "it leaves out the [system] turn"), (NO_ANSWERS, "one question only")])
def test_a_turn_that_the_chat_template_does_not_take_is_not_lost_in_silence(template, words, tmp_path):
    file = tmp_path / "template.txt"
    file.write_text(TURNS)
    with pytest.raises(UserError) as error:
        encode_prompt(toy_tokenizer(template), "2+2?", str(file))
    assert f"fails ({words}); fix it or give --prompt plain." in str(error.value)


def test_a_plain_prompt_has_the_tokenizers_first_token_once(tokenizer):
    from tokenizers.processors import TemplateProcessing
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    assert encode_prompt(tokenizer, "1+1?", "plain").count(start) == 1
    assert encode_prompt(tokenizer, "1+1?", "plain")[0] == start
    assert encode_prompt(tokenizer, "1+1?", "suffix").count(start) == 2  # only the template's


@pytest.mark.parametrize("template", [GEMMA, NO_ROLE, "{# no system role #}" + NO_SYSTEM])
def test_without_a_system_role_the_instruction_is_in_the_user_turn(template, capsys):
    data.say_once.cache_clear()
    tokenizer = toy_tokenizer(template)
    suffix = show_prompt(tokenizer, encode_prompt(tokenizer, "1+1?", "suffix"))
    for _ in range(3):
        text = show_prompt(tokenizer, encode_prompt(tokenizer, "1+1?"))
    assert text == suffix.replace(f"1+1?{SUFFIX}", f"{SYSTEM}\n\n1+1?")
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "has no system role" in said
    capsys.readouterr()
    encode_prompt(tokenizer, "1+1?", "suffix")
    encode_prompt(toy_tokenizer(), "1+1?")
    assert capsys.readouterr().out == ""


def test_the_toys_template_leaves_the_system_turn_out_on_purpose(capsys):
    tokenizer = AutoTokenizer.from_pretrained(data.TOY)
    text = show_prompt(tokenizer, encode_prompt(tokenizer, "1+1?"))
    assert text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("template, words", [
    ("{{ raise_exception('no, never') }}", "fails (no, never)"), ("{% if %}", "fails ("),
    ("{{ messages[7].x.y }}", "fails ("), (None, "chat template")])
def test_a_template_that_fails_is_one_sentence(template, words, capsys):
    tokenizer = toy_tokenizer(template)
    for style in ("system", "suffix"):
        with pytest.raises(UserError) as error:
            encode_prompt(tokenizer, "1+1?", style)
        assert words in str(error.value) and "--prompt plain" in str(error.value)
        assert "\n" not in str(error.value)
    assert encode_prompt(tokenizer, "1+1?", "plain") and capsys.readouterr().out == ""


def test_overlong_prompts(tokenizer):
    for style in STYLES:
        ids = encode_prompt(tokenizer, "1+1?", style)
        assert encode_prompt(tokenizer, "1+1?", style, len(ids)) == ids
        assert encode_prompt(tokenizer, "1+1?", style, len(ids) - 1) == []
