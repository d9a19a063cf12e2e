"""Loading problems from every kind of file and from a stand-in for the Hub, and their prompts."""

import json
import os
from types import SimpleNamespace

import datasets
import pyarrow
import pytest
from pyarrow import ipc, parquet
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from common import Args, Problem
from engine import data
from engine.base import UserError
from engine.data import LETTER, STEM, STYLES, SUFFIX, SYSTEM, encode_alone, encode_prompt, load_problems

ROWS = [{"problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(1, 5)]
CSV = "problem,answer\n" + "".join(f"{row['problem']},{row['answer']}\n" for row in ROWS)


def write(path, rows):
    """The rows as a file of the kind that its name says; a text as it is."""
    if isinstance(rows, str):
        path.write_text(rows)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("\n\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows))
    return str(path)


def loaded(name, *fields, **options):
    """[(question, answer)], or the sentence of the refusal."""
    try:
        return [(p.question, p.answer) for p in load_problems(str(name), *fields, **options)]
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


# ------------------------------------------------- files -------------------------------------------------
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.parquet"])
def test_all_kinds_of_files_give_the_same_problems(tmp_path, name, capsys):
    file = write(tmp_path / name, CSV + CSV.splitlines()[1] if name == "a.csv" else [*ROWS, ROWS[0]])
    problems = load_problems(file)
    assert [(p.question, p.answer, p.id) for p in problems] == [
        (f"What is {i} + {i}?", str(2 * i), i - 1) for i in range(1, 5)]
    assert all(str(p.row["answer"]) == p.answer and p.row["problem"] == p.question for p in problems)
    assert "4 of them have a gold answer" in capsys.readouterr().out


def test_a_comma_without_quotation_marks_is_refused(tmp_path):
    """It would make another question."""
    file = write(tmp_path / "a.csv", "problem,answer\nIs 1,000 even?,yes\n")
    assert loaded(file).startswith(f"{file} cannot be read: row 1 ")


LINE = '"p, ""q""\nr\u2028s", "007"\nNA,N/A\n'
FIELDS = [('p, "q"\nr\u2028s', "007"), ("NA", None)]


@pytest.mark.parametrize("name, text, expected", [
    ("a.csv", "\ufeffproblem, answer\r\n" + LINE.replace("\n", "\r\n"), FIELDS),  # a blank is no name's
    ("a.jsonl", '{"problem": "p\u2028q\x85r", "answer": 12345678901234567890}\n',
     [("p\u2028q\x85r", "12345678901234567890")]),
    ("a.jsonl", '\ufeff{"problem": "2020-01-01", "answer": "007"}', [("2020-01-01", "007")])])
def test_fields_are_read_as_they_are_written(name, text, expected, tmp_path):
    """What `datasets` makes other values of; other line ends, a byte order mark."""
    (tmp_path / name).write_bytes(text.encode())
    read = loaded(tmp_path / name)
    assert [(question.replace("\r", ""), answer) for question, answer in read] == expected


def write_table(table, path):
    """As .parquet, or as pandas and polars write .arrow."""
    if path.suffix == ".parquet":
        return parquet.write_table(table, path)
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_file_that_was_replaced_and_kept_its_time_is_read_anew(name, tmp_path):
    for problem, answer in (("p", "1"), ("q", "2")):
        write_table(pyarrow.table(dict(problem=[problem], answer=[answer])), tmp_path / name)
        os.utime(tmp_path / name, (1_700_000_000, 1_700_000_000))
        assert loaded(tmp_path / name) == [(problem, answer)]


@pytest.mark.parametrize("kind, value", [
    (pyarrow.float16(), 0.1), (pyarrow.float32(), 1e20), (pyarrow.list_(pyarrow.float32()), [0.1, None]),
    (pyarrow.dictionary(pyarrow.int8(), pyarrow.float32()), 0.1),
    (pyarrow.map_(pyarrow.string(), pyarrow.float32()), dict(a=0.1)),
    (pyarrow.struct([("a", pyarrow.float32())]), dict(a=0.1))], ids=str)
def test_a_float_of_16_or_32_bits_has_the_digits_that_were_written(kind, value, tmp_path):
    table = pyarrow.table(dict(problem=["p"], extra=pyarrow.array([value], kind)))
    write_table(table, tmp_path / "a.arrow")
    problem, = load_problems(str(tmp_path / "a.arrow"))
    assert problem.row["extra"] == value


def test_a_saved_data_set_is_read(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path)
    assert loaded(tmp_path) == loaded(tmp_path / "data-00000-of-00001.arrow") == [
        (row["problem"], str(row["answer"])) for row in ROWS]


# ------------------------------------------------- rows --------------------------------------------------
USER, SYSTEM_TURN = dict(role="user", content="q"), dict(role="system", content="Box it.")
VERL = dict(style="rule", ground_truth="40")


@pytest.mark.parametrize("row, answer", [
    ({"Question": "q", "Answer": "7"}, "7"),
    ({"problem": "q", "solution": "so it is \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}"),
    ({"prompt": [SYSTEM_TURN, USER], "reward_model": VERL}, "40"),
    ({"problem": "q", "answer": [None, "3"]}, "3"),
    ({"question": "q", "answer": "He has 10 + 30 = 40.\n#### 40"}, "40"),
    ({"question": "q", "answer": "[1, 2]"}, "[1, 2]")])
def test_a_usual_column_is_found(tmp_path, row, answer):
    assert loaded(write(tmp_path / "a.jsonl", [row])) == [("q", answer)]


TWO = dict(choices=["x", "y"])


@pytest.mark.parametrize("row", [
    *[dict(question=question) for question in (5, " \n", "2+3 \ud83d?", [USER, USER], [SYSTEM_TURN])],
    *[dict(question="q", choices=choices, answer=0) for choices in (
        "['x', 'y']", ["x"], list("abcdefghijk"), ["x", None])],
    *[dict(question="q", answer=right) | TWO for right in (2, -1, True, "1")]], ids=str)
def test_what_would_be_read_otherwise_than_it_is_meant_is_refused_with_its_row(row, tmp_path):
    refusal = loaded(write(tmp_path / "a.jsonl", [dict(question="p"), row]))
    assert "a.jsonl, row 2: " in refusal


def test_golds_that_fit_in_no_box_and_turns_that_are_not_used_are_said(tmp_path, capsys):
    rows = [dict(prompt=[SYSTEM_TURN, USER], answer="It is clear. " * 40), dict(prompt="r", answer="1")]
    load_problems(write(tmp_path / "a.jsonl", rows))
    out = capsys.readouterr().out
    assert "1 of these fit in no box; " in out and "columns not used: ['system turns" in out


def test_choices_of_gpqa_are_shuffled_alike_in_every_run(tmp_path):
    gpqa = [{"Question": f" What {i}? ", "Correct Answer": " right", "Incorrect Answer 1": "a",
             "Incorrect Answer 2": 3, "Incorrect Answer 3": "none of these\n"} for i in range(40)]
    problems = load_problems(write(tmp_path / "g.jsonl", gpqa))
    assert problems[0].question == "What 0? \n\nA. none of these\nB. a\nC. right\nD. 3\n\n" + LETTER
    assert {p.answer for p in problems} == set("ABCD") and all(p.choices == 4 for p in problems)
    assert all(f"{p.answer}. right" in p.question for p in problems)


@pytest.mark.parametrize("row, question, golds", [  # of MMLU
    (dict(choices=list("wxyz"), answer=0), "q\n\nA. y\nB. z\nC. w\nD. x", ["C"]),
    (dict(choices=["a", "b", "a "], answer=2), "q\n\nA. b\nB. a\nC. a", ["B", "C"]),
    (TWO, "q\n\nA. y\nB. x", [None]),
    *[(dict(choices=["a", "b", text], answer=1), f"q\n\nA. a\nB. b\nC. {text}", ["B"])
      for text in ("Both A and B", "None of the above", "(A) and (C)", "B, C", "the previous two")]])
def test_options_are_lettered_in_a_seeded_order_unless_one_names_others(tmp_path, row, question, golds):
    problem, = load_problems(write(tmp_path / "a.jsonl", [dict(question="q") | row]))
    assert problem.question == f"{question}\n\n{LETTER}"
    assert [problem.answer, *problem.also_right] == golds


# ----------------------------------------- benchmarks and the toy -----------------------------------------
@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub: hub.rows answers every call, hub.calls has what was asked for."""
    hub = SimpleNamespace(rows=ROWS, calls=[])

    def load_dataset(name, config=None, split=None, revision=None):
        hub.calls.append((name, config, split, revision)[:4 if revision else 3])
        return datasets.Dataset.from_list(hub.rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return hub


def test_only_the_tables_subjects_and_splits_are_read(hub):
    load_problems("math500")
    hub.rows = [dict(problem="q", solution="\\boxed{1}")]
    load_problems("math_train")
    assert hub.calls == [("HuggingFaceH4/MATH-500", None, "test"), *(
        ("EleutherAI/hendrycks_math", subject, "train") for subject in data.MATH)]
    row = dict(choices=["1", "2"], answer=1)
    hub.rows = [row | dict(question=name, subject=name) for name in (*STEM, "anatomy")]
    assert len(load_problems("mmlu_stem")) == 18 and hub.calls[-1] == ("cais/mmlu", "all", "test")


@pytest.mark.parametrize("name, train, call", [
    ("owner/name", True, ("owner/name", None, "train")), ("owner/name", False, ("owner/name", None, "test")),
    ("owner/name:a:b@c/d", True, ("owner/name", "a", "b", "c/d"))])
def test_config_split_and_revision_of_a_hub_id(name, train, call, hub):
    assert len(load_problems(name, train=train)) == 4 and hub.calls == [call]


def test_a_folder_here_is_not_asked_from_the_hub(hub, tmp_path, monkeypatch):
    """`datasets` would read it, through its cache."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    assert loaded("owner/name").startswith("unknown data set 'owner/name'") and not hub.calls


def test_questions_of_an_evaluation_that_are_trained_on_are_counted(tokenizer, tmp_path, capsys):
    seen, unseen = (write(tmp_path / name, rows) for name, rows in (
        ("test.jsonl", [*ROWS[:2], dict(problem="3 * 3?")]), ("b.jsonl", [dict(problem="3 * 3?")])))
    args = Args(dataset=write(tmp_path / "a.jsonl", ROWS), eval=f"train,{seen},{unseen}", prompts_per_batch=1)
    tokenizer.control = set()
    data.read_data(args, tokenizer, True, Problem)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--eval")]
    assert said == [f"--eval {seen}: 2 of its 3 questions are in --dataset, too."]


# ------------------------------------------------ prompts ------------------------------------------------
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
GEMMA = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
NO_ROLE = "{% for m in messages if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% endfor %}"


def toy_tokenizer(template=CHATML):
    tokenizer = AutoTokenizer.from_pretrained(data.TOY)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer():
    return toy_tokenizer()


def test_the_prompt_is_the_chat_templates(tokenizer):
    def own(*turns):
        turns = [{"role": role, "content": content} for role, content in turns]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    for question in ["1+1?", "", "\n\nx", "a < b > c", "\u00e9"]:
        plain = tokenizer.encode(f"Question: {question}\n{SYSTEM}\nAnswer:")
        assert encode_prompt(tokenizer, question) == own(("system", SYSTEM), ("user", question))
        assert encode_prompt(tokenizer, question, "suffix") == own(("user", question + SUFFIX))
        assert encode_prompt(tokenizer, question, "plain") == plain
    for style in STYLES:  # one that is too long is left out
        ids = encode_prompt(tokenizer, "1+1?", style)
        assert encode_prompt(tokenizer, "1+1?", style, len(ids)) == ids
        assert encode_prompt(tokenizer, "1+1?", style, len(ids) - 1) == []


TURNS = "[system]\nBox it.\n[user]\n1+1?\n[assistant]\n\\boxed{2}\n\n[user]\nNow: {question}\n"


def test_turns_and_text_of_a_template_file_are_kept(tokenizer, tmp_path):
    file = tmp_path / "template.txt"
    for text, expected in {
            TURNS: "<|im_start|>system\nBox it.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
                   "<|im_start|>assistant\n\\boxed{2}<|im_end|>\n"
                   "<|im_start|>user\nNow: 2+2?<|im_end|>\n<|im_start|>assistant\n",
            "[user]\n{question}\n[assistant]\nStep 1:\n":
                "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nStep 1:",
            "Q: 1+1? A: \\boxed{2}\nQ: {question} A:\n": "Q: 1+1? A: \\boxed{2}\nQ: 2+2? A:"}.items():
        data.read_template.cache_clear()
        file.write_text(text)
        assert tokenizer.decode(encode_prompt(tokenizer, "2+2?", str(file))) == expected


@pytest.mark.parametrize("template, text", [
    (CHATML, "[user]\nHi\n[assistant]\n{question}"), (CHATML, "[User]\n{question}"), (NO_ROLE, TURNS)])
def test_a_template_that_is_bad_or_loses_a_turn_is_refused(template, text, tmp_path):
    file = tmp_path / "template.txt"
    file.write_text(text)
    with pytest.raises(UserError):
        encode_prompt(toy_tokenizer(template), "1+1?", str(file))


def test_a_prompt_has_the_tokenizers_first_token_once_and_no_end_token(tokenizer):
    """Of a tokenizer that puts tokens around every text."""
    def encode():
        chats = [encode_prompt(tokenizer, "1+1?", style) for style in ("system", "suffix")]
        plain = encode_prompt(tokenizer, "1+1?", "plain"), encode_alone(tokenizer, "1+1?", "plain")
        return plain, [*chats, encode_alone(tokenizer, "1+1?")]

    plain, chats = encode()
    end, start, other = range(3)
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|> <|endoftext|>",
        special_tokens=[("<|endoftext|>", end), ("<|im_start|>", start), ("<|im_end|>", other)])
    assert encode() == (tuple([start, *ids] for ids in plain), chats)
    tokenizer.bos_token = "<|im_start|>"  # a text that brings its own
    assert encode_alone(tokenizer, "<|im_start|>1+1?", "plain") == [start, *plain[1]]


@pytest.mark.parametrize("template", [GEMMA, NO_ROLE])
def test_without_a_system_role_the_instruction_is_in_the_user_turn(template):
    tokenizer = toy_tokenizer(template)
    suffix = tokenizer.decode(encode_prompt(tokenizer, "1+1?", "suffix"))
    text = tokenizer.decode(encode_prompt(tokenizer, "1+1?"))
    assert text == suffix.replace(f"1+1?{SUFFIX}", f"{SYSTEM}\n\n1+1?")
