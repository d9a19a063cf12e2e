"""Loading problems from every kind of file and from a stand-in for the Hub, and their prompts."""

import csv
import io
import json
import math
import sys
from types import SimpleNamespace

import datasets
import pytest
from transformers import AutoTokenizer

from engine import data
from engine.base import UserError
from engine.data import STEM, STYLES, SUFFIX, SYSTEM, encode_prompt, load_problems

ROWS = [{"problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(1, 5)]


def write(path, rows):
    """The rows as a file of the kind that its name says; a text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, file = path.name.partition(".")[2], io.StringIO()
    if isinstance(rows, str):
        path.write_bytes(rows.encode(errors="surrogateescape"))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif kind == "csv":
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
        path.write_text(file.getvalue())
    else:
        path.write_text("\n\n".join(map(json.dumps, rows)) if kind == "jsonl" else json.dumps(rows))
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
    file = write(tmp_path / name, [*ROWS, ROWS[0]])
    problems = load_problems(file)
    assert [(p.question, p.answer, p.id) for p in problems] == [
        (f"What is {i} + {i}?", str(2 * i), i - 1) for i in range(1, 5)]
    assert all(str(p.row["answer"]) == p.answer and p.row["problem"] == p.question for p in problems)
    printed = capsys.readouterr().out
    assert f"4 problems from {file}, question column 'problem', answer column 'answer' (4 gold" in printed
    assert "answers: '2', '4'), 1 duplicates removed; columns not used: none\n" in printed


BAD_FILES = {
    "broken line": ("a.jsonl", '{"problem": "p"}\n\n{"problem": \n', "cannot be read behind row 1: Exp"),
    "an object": ("a.json", '{"problem": "p"}', "cannot be read: it must hold a list of objects"),
    "a comma in all questions": ("a.csv", "problem,answer\nIs 1,000 even?,yes\n", "row 1 must have one"),
    "an open quote": ("a.csv", 'problem,answer\n"p,1\n', "cannot be read: unexpected end of data"),
    "a pointer of git-lfs": ("a.parquet", "version https://git-lfs.github.com/spec/v1\nsize 1\n", "Parquet"),
    "no question": ("a.jsonl", '{"text": "p", "x": 1}', "'question' that holds anything (columns: text, x)"),
    "another kind": ("a.xlsx", "x", "or a folder that `save_to_disk` wrote, with its state.json."),
    "packed": ("a.jsonl.gz", "x", "(unpack a .gz, make a .csv of a .tsv)"),
    "tabs": ("a.tsv", "problem\tanswer\np\t1\n", "(unpack a .gz, make a .csv of a .tsv)"),
    "in a folder": ("folder/a.jsonl", '{"problem": "p"}', "folder': known are math500")}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_files_are_one_sentence(tmp_path, fault):
    name, content, words = BAD_FILES[fault]
    file = write(tmp_path / name, content)
    file = str(tmp_path / "folder") if fault == "in a folder" else file
    refusal = loaded(file)
    assert file in refusal and words in refusal


@pytest.mark.parametrize("name", "no.csv d/no.jsonl.gz d/no.arrow ./no /no/such ~nobody/no nothing a:b "
                         "owner/name/more:x:y:z @v1".split())
def test_what_is_no_hub_id_is_not_looked_for_on_the_hub(name, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert loaded(name).startswith(f"unknown data set '{name}': known are math500") and not hub.calls


LINE = '"p, ""q""\nr\u2028s", "007"\nNA,N/A\n'
FIELDS = [('p, "q"\nr\u2028s', "007"), ("NA", None)]


@pytest.mark.parametrize("kind, text, expected", [
    (".csv", f"problem, answer\n{LINE}", FIELDS),  # a blank behind a comma belongs to nothing
    (".csv", "\ufeffproblem,answer\r\n" + LINE.replace("\n", "\r\n"), FIELDS),
    (".jsonl", '{"problem": "p\u2028q\x85r", "answer": 12345678901234567890}\n',
     [("p\u2028q\x85r", "12345678901234567890")]),
    (".jsonl", '\ufeff{"problem": "2020-01-01", "answer": "007"}', [("2020-01-01", "007")])])
def test_fields_are_read_as_they_are_written(kind, text, expected, tmp_path):
    """What `datasets` makes other values of; other line ends, a byte order mark."""
    read = loaded(write(tmp_path / f"a{kind}", text))
    assert [(question.replace("\r", ""), answer) for question, answer in read] == expected


def test_parquet_alone_needs_datasets(tmp_path, monkeypatch):
    names = [write(tmp_path / name, ROWS) for name in ("a.parquet", "a.jsonl", "a.csv")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    refusal, *read = map(loaded, names)
    assert "is read by a library: pip install datasets" in refusal and len(read[0]) == len(read[1]) == 4


def test_a_saved_data_set_is_read_without_what_its_library_has_cached(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path)
    datasets.Dataset.from_list([dict(problem="cached")]).save_to_disk(tmp_path / "other")
    (tmp_path / "other/data-00000-of-00001.arrow").rename(tmp_path / "cache-1.arrow")
    assert loaded(tmp_path) == loaded(tmp_path / "data-00000-of-00001.arrow") == [
        (row["problem"], str(row["answer"])) for row in ROWS]


# ------------------------------------------------- rows --------------------------------------------------
USER, SYSTEM_TURN = dict(role="user", content="q"), dict(role="system", content="Box it.")
EARLIER = [dict(role="user", content="1+1?"), dict(role="assistant", content="\\boxed{2}")]
VERL = dict(style="rule", ground_truth="40")


@pytest.mark.parametrize("row, answer", [
    ({"Question": "q", "Answer": "7"}, "7"),
    ({"question": "q", "final_answer": ["3"]}, "3"),
    ({"problem": "q"}, None),
    ({"problem": "q", "solution": "so it is \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}"),
    ({"prompt": [USER], "reward_model": VERL}, "40"),
    ({"prompt": [USER], "reward_model": VERL | dict(ground_truth=["72"])}, "72"),
    ({"problem": "q", "answer": math.nan}, None),
    ({"problem": None, "question": "q", "answer": None, "solution": "\\boxed{3}"}, "3"),
    ({"problem": "q", "answer": [None, "3"]}, "3"),
    ({"question": "q", "answer": " Washington, D.C. ", "hint": "east"}, "Washington, D.C."),
    ({"problem": "q", "answer": "He has 10 + 30 = 40.\n#### 40"}, "40"),
    *[({"question": "q", "answer": cell}, cell) for cell in ("[1, 2]", "{(1,2)}", "[0, \\infty)", "{1, 2}")]])
def test_a_usual_column_is_found(tmp_path, row, answer, capsys):
    file = write(tmp_path / "a.jsonl", [row])
    assert loaded(file) == [("q", answer)] and "Warning" not in capsys.readouterr().out


INDEX, TEXT = "the index of the right one, from 0, not ", "must hold a text (no JSON in it)"
ODD = {  # a row that is refused, with words of the sentence, which names its row and column
    "yes as an index": (dict(question="q", choices=["yes", "no"], answer=True), INDEX + "True"),
    "several letters": (dict(question="q", choices=list("wxyz"), answer=["A", "C"]), INDEX + "['A', 'C']"),
    "the right option's text": (dict(question="q", choices=["4", "5"], answer="5"), INDEX + "'5'"),
    "an index too large": (dict(question="q", choices=["x", "y"], answer=2), INDEX + "2"),
    "eleven choices": (dict(question="q", choices=list("abcdefghijk"), answer=2), "a list of at most 10 te"),
    "ARC's choices": (dict(question="q", choices=dict(text=["a"], label=["A"]), answer=0), "its choices mus"),
    "choices in a text": (dict(question="q", choices="x, y", answer=0), "its choices must be a list"),
    "choices in dicts": (dict(question="q", choices=[dict(a="x")], answer=0), "its choices must be a list"),
    **{column: ({"question": "q", column: "x"}, f"column '{column}' may be part of the question; put all")
       for column in ("context", "input", "options", "system", "Body", "image_1", "tools", "A", "option_b")},
    **{f"gold {gold!r}": (dict(question="q", answer=gold), f"column 'answer' {TEXT}")
       for gold in (True, 1e20, dict(a=1), [[1]], '{"answer": "40"}', "{'a': 1}", '["40"]', "<answer>40")},
    "targets": (dict(question="q", reward_model=dict(ground_truth=dict(target=["1"]))), f"model' {TEXT}"),
    **{f"question {question!r}": (dict(question=question, x="y"), f"column 'question' {TEXT}")
       for question in (5, ["q"], [USER, EARLIER[1]], '[{"role": "user", "content": "q"}]',
                        [dict(role="user")], [dict(USER, tool_calls=[dict(name="f")])],
                        [{"from": "human", "value": "q"}], [dict(USER, content=[dict(text="q")])])}}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_question_and_answer_is_refused_with_row_and_column(name, tmp_path):
    row, words = ODD[name]
    file = write(tmp_path / "a.jsonl", [dict(question="p"), row])
    refusal = loaded(file)
    assert refusal.startswith(f"{file}, row 2: ") and words in refusal


def test_a_flag_takes_one_column_alone(tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", [dict(question="q", context="c", x="r", y=1)])
    assert loaded(file, "x", "y") == [("r", "1")]
    assert "columns not used: question, context\n" in capsys.readouterr().out
    for fields in (("z", ""), ("x", "z")):
        assert loaded(file, *fields).startswith(f"{file} has no column 'z' that holds anything (columns: que")


SAID = [  # rows, and what is printed of them
    ([dict(question="q", answers=["a", "b"], label=0)], "no answer column (0 gold answers: none), 0 "
     "duplicates removed; columns not used: answers, label\n"),
    ([dict(question=f"q{i}", answer=["3", "5", "proof", "proof"][i]) for i in range(4)],
     "(4 gold answers: '3', '5', 2 times 'proof')"),
    ([dict(question="q", answer=1), dict(question="r"), dict(question="s", answer=None)],
     "2 rows have no gold answer, the first is {}, row 2\n"),
    ([dict(question="q", solution="It is clear. " * 40), dict(question="r", solution="\\boxed{3}")],
     "1 rows have an answer that fits in no \\boxed{} and is not used, the first is {}, row 1\n"),
    ([dict(question="q", answer=a) for a in (1, "1.0", 3)],
     "1 rows are duplicates with another gold answer, the first is {}, row 3\n")]


@pytest.mark.parametrize("rows, words", SAID)
def test_what_is_odd_is_printed(rows, words, tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", rows)
    load_problems(file)
    assert words.replace("{}, row", f"{file}, row") in capsys.readouterr().out


CHATS = {  # the turns before the question "q"
    "one turn": ([USER], []), "several turns": ([*EARLIER, USER], EARLIER),
    "a system turn": ([SYSTEM_TURN, USER], [SYSTEM_TURN]),
    "keys that hold nothing": ([dict(USER, tool_calls=None, name="")], []),
    "text like a list": ("[1, 2] q", [])}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_ends_with_the_question(name, kind, tmp_path, capsys):
    chat, before = CHATS[name]
    problem, = load_problems(write(tmp_path / f"a.{kind}", [{"messages": chat, "answer": 2}]))
    assert (problem.question, problem.answer) == ("[1, 2] q" if isinstance(chat, str) else "q", "2")
    assert problem.before == [(turn["role"], turn["content"]) for turn in before]
    said = "1 with earlier turns, which replace those of --prompt" in capsys.readouterr().out
    assert said == bool(before)


def test_turns_of_the_data_replace_those_of_the_prompt(tokenizer, tmp_path):
    chats = [[USER], [*EARLIER, USER], [SYSTEM_TURN, *EARLIER, USER], [SYSTEM_TURN, *EARLIER, USER]]
    file = write(tmp_path / "a.parquet", [{"messages": chat, "answer": 1} for chat in chats])
    problems = load_problems(file)
    assert len(problems) == 3
    for style, suffix, first in (("system", "", [("system", SYSTEM)]), ("suffix", SUFFIX, [])):
        first = [dict(role=role, content=content) for role, content in first]
        for problem, chat in zip(problems, [[*first, USER], *chats[1:]]):
            chat = [*chat[:-1], dict(role="user", content="q" + suffix)]
            expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            assert encode_prompt(tokenizer, problem.question, style, 0, problem.before) == expected
    assert encode_prompt(tokenizer, "q", "plain", 0, problems[0].before)
    with pytest.raises(UserError, match="^--prompt is 'plain', plain text, but the data has turns before th"):
        encode_prompt(tokenizer, "q", "plain", 0, problems[1].before)
    braces = encode_prompt(tokenizer, "q", "system", 0, [("system", "Say {question}.")])
    assert "Say {question}." in tokenizer.decode(braces)  # the data's text is no template


def test_choices_of_gpqa_are_shuffled_alike_in_every_run(tmp_path):
    gpqa = [{"Question": f" What {i}? ", "Correct Answer": " right", "Incorrect Answer 1": "a",
             "Incorrect Answer 2": 3, "Incorrect Answer 3": "c\n"} for i in range(40)]
    problems = load_problems(write(tmp_path / "g.jsonl", gpqa))
    assert problems[0].question == "What 0? \n\nA. c\nB. a\nC. right\nD. 3" and problems[0].answer == "C"
    assert {p.answer for p in problems} == set("ABCD") and all(p.choices == 4 for p in problems)
    assert all(f"{p.answer}. right" in p.question for p in problems)


@pytest.mark.parametrize("row, question, answer", [  # of MMLU
    ({"choices": list("wxyz"), "answer": 0}, "q\n\nA. y\nB. z\nC. w\nD. x", "C"),
    ({"choices": [None, "a", "", "b"], "answer": 3}, "q\n\nA. b\nB. a", "A"),
    ({"choices": ["a", "b"]}, "q\n\nA. b\nB. a", None),
    ({"choices": [], "answer": 3}, "q", "3"),
    ({"choices": ["a", "b", "a "], "answer": 2}, "q\n\nA. b\nB. a\nC. a", "B")])
def test_options_are_lettered_in_a_seeded_order(tmp_path, row, question, answer):
    problem, = load_problems(write(tmp_path / "a.jsonl", [{"question": "q"} | row]))
    assert (problem.question, problem.answer) == (question, answer)
    assert ("B. a\nC. a" in question) == bool(problem.also_right)


# ----------------------------------------- benchmarks and the toy -----------------------------------------
@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub: hub.rows answers every call, hub.calls has what was asked for."""
    hub = SimpleNamespace(rows=[], calls=[])

    def load_dataset(name, config=None, split=None, revision=None):
        hub.calls.append((name, config, split, revision)[:4 if revision else 3])
        return datasets.Dataset.from_list(hub.rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return hub


def test_only_the_tables_subjects_and_splits_are_read(hub):
    hub.rows = [dict(problem="q", solution="\\boxed{1}")]
    load_problems("math_train")
    assert hub.calls == [("EleutherAI/hendrycks_math", subject, "train") for subject in data.MATH]
    hub.calls.clear()
    row = dict(choices=["1", "2"], answer=1)
    hub.rows = [row | dict(question=name, subject=name) for name in (*STEM, "anatomy")]
    assert len(load_problems("mmlu_stem")) == 18
    assert hub.calls == [("cais/mmlu", "all", "test")]


@pytest.mark.parametrize("name, call", [
    ("owner/name", ("owner/name", None, "train")), ("owner/name:main", ("owner/name", "main", "train")),
    ("o/name:main:train[:9]", ("o/name", "main", "train[:9]")), ("o/name::dev", ("o/name", None, "dev")),
    ("o/n@v1.0", ("o/n", None, "train", "v1.0")), ("owner/name:a:b@c/d", ("owner/name", "a", "b", "c/d"))])
def test_config_split_and_revision_of_a_hub_id(name, call, hub):
    hub.rows = ROWS
    assert len(load_problems(name)) == 4 and hub.calls == [call]
    load_problems("owner/name", train=False)
    assert hub.calls[1:] == [("owner/name", None, "test")]


def test_a_benchmark_wins_over_a_folder_of_its_name(hub, tmp_path, monkeypatch):
    (tmp_path / "aime24").mkdir()
    monkeypatch.chdir(tmp_path)
    hub.rows = ROWS
    assert len(load_problems("aime24")) == 4 and hub.calls


def test_what_the_hub_does_not_give_is_one_true_sentence(tmp_path, monkeypatch):
    """There is no Hub here: what `datasets` says of configs and splits comes from a folder with two."""
    assert loaded("owner/name").startswith("owner/name cannot be read: ")
    for config in ("main", "other"):
        datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / f"{config}/a.parquet")
    configs = [f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in ("main", "other")]
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *config, **options: load(
        str(tmp_path), *config, **options))
    for name, words in {"o/n": "Config name is missing. Please pick one among the available configs: ['main",
                        "o/n:no": "BuilderConfig 'no' not found. Available: ['main', 'other'].",
                        "o/n:main:dev": "Unknown split \"dev\". Should be one of ['train']."}.items():
        assert loaded(name).startswith(f"o/n cannot be read: {words}")
    assert len(load_problems("o/n:main")) == 4


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

    for question in ["1+1?", "", "\n\nx", "a < b > c", "<|im|>", "\u00e9"]:
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
            "\ufeff[user] \n{question}\n": "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
            "Q: 1+1? A: \\boxed{2}\nQ: {question} A:\n": "Q: 1+1? A: \\boxed{2}\nQ: 2+2? A:"}.items():
        data.read_template.cache_clear()
        file.write_text(text)
        assert tokenizer.decode(encode_prompt(tokenizer, "2+2?", str(file))) == expected


FILE = "--prompt is '{file}', but must be system, suffix, plain or a template file: "


@pytest.mark.parametrize("template, text, words", [
    *[(CHATML, text, FILE) for text in (
        "Hi", "[user]\nHi\n[assistant]\n{question}", "Hi\n[user]\n{question}", "[User]\n{question}",
        "[System]\nBox.\n[user]\n{question}", "[user]:\n{question}", "[user] {question}", "[AI]",
        "[user]\n{question}\n[model]", "[system]\nx\n[human]\ny\n[user]\n{question}",
        "[user]\nHi\n[system]\nBox.\n[user]\n{question}", "[user]\nHi\n[user]\n{question}")],
    (GEMMA, TURNS, "fails (no system role)"), (NO_ROLE, TURNS, "fails (it leaves out the [system] turn)"),
    ("{{ raise_exception('no, never') }}", "", "fails (no, never)"), (None, "", "chat template")])
def test_a_template_that_is_bad_loses_a_turn_or_fails_is_one_sentence(template, text, words, tmp_path):
    file = tmp_path / "template.txt"
    file.write_text(text)
    tokenizer = toy_tokenizer(template)
    with pytest.raises(UserError) as error:
        encode_prompt(tokenizer, "1+1?", str(file) if text else "system")
    said = str(error.value)
    assert words.replace("{file}", str(file)) in said and "\n" not in said
    assert words is FILE or "--prompt plain" in said
    assert encode_prompt(tokenizer, "1+1?", "plain")


def test_a_prompt_has_the_tokenizers_first_token_once(tokenizer):
    from tokenizers.processors import TemplateProcessing
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    assert encode_prompt(tokenizer, "1+1?", "plain").count(start) == 1
    assert encode_prompt(tokenizer, "1+1?", "plain")[0] == start
    assert encode_prompt(tokenizer, "1+1?", "suffix").count(start) == 2  # only the template's


@pytest.mark.parametrize("template", [GEMMA, NO_ROLE])
def test_without_a_system_role_the_instruction_is_in_the_user_turn(template):
    tokenizer = toy_tokenizer(template)
    suffix = tokenizer.decode(encode_prompt(tokenizer, "1+1?", "suffix"))
    text = tokenizer.decode(encode_prompt(tokenizer, "1+1?"))
    assert text == suffix.replace(f"1+1?{SUFFIX}", f"{SYSTEM}\n\n1+1?")
