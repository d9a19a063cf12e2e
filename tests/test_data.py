"""Loading problems from every kind of file and from a stand-in for the Hub, and their prompts."""

import csv
import gzip
import io
import json
import math
import re
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
    elif kind[1:3] == "sv":
        table = csv.DictWriter(file, rows[0], delimiter="\t" if kind[0] == "t" else ",")
        table.writeheader()
        table.writerows(rows)
        path.write_text(file.getvalue())
    else:
        path.write_text("\n\n".join(map(json.dumps, rows)) if kind.startswith("jsonl") else json.dumps(rows))
    if kind.endswith("gz") and not isinstance(rows, str):
        path.write_bytes(gzip.compress(path.read_bytes()))
    return str(path)


def loaded(name, *fields, **options):
    """[(question, answer)], or the sentence of the refusal."""
    try:
        return [(p.question, p.answer) for p in load_problems(str(name), *fields, **options)]
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


# ------------------------------------------------- files -------------------------------------------------
@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.csv.gz", "a.tsv", "a.parquet"])
def test_all_kinds_of_files_give_the_same_problems(tmp_path, name, capsys):
    """Also in a folder."""
    file = write(tmp_path / name, [*ROWS, ROWS[0]])
    problems = load_problems(file)
    assert [(p.question, p.answer, p.id) for p in problems] == [
        (f"What is {i} + {i}?", str(2 * i), i - 1) for i in range(1, 5)]
    assert all(str(p.row["answer"]) == p.answer and p.row["problem"] == p.question for p in problems)
    printed = capsys.readouterr().out
    assert f"4 problems from {file}, question column 'problem', answer column 'answer' (4 gold" in printed
    assert "answers: '2', '4'), 1 duplicates removed; columns not used: none\n" in printed
    assert load_problems(str(tmp_path)) == problems


BAD_FILES = {
    "broken line": ("a.jsonl", '{"problem": "p"}\n\n{"problem": \n', "cannot be read behind row 1: Exp"),
    "not UTF-8": ("a.jsonl", "\udce9", "cannot be read behind row 0: 'utf-8' codec"),
    "empty": ("a.jsonl", "", "has no column 'question' that holds anything (columns: )"),
    "an object": ("a.json", '{"problem": "p"}', "cannot be read: it must hold a list of objects"),
    "a comma in all questions": ("a.csv", "problem,answer\nIs 1,000 even?,yes\n", "row 1 must have one"),
    "a field is missing": ("a.csv", "problem,answer\np,1\nq\n", "row 2 must have one field for each column"),
    "an open quote": ("a.csv", 'problem,answer\n"p,1\n', "cannot be read: unexpected end of data"),
    "two columns of one name": ("a.csv", "problem,a,a\n1,2,3", "each column a name of its own"),
    "semicolons": ("a.csv", "problem;answer\np;1\n", "(columns: problem;answer); --question_field and"),
    "another kind": ("a.xlsx", "x", "or a .json, .jsonl, .csv, .tsv, .parquet, .arrow file"),
    "a pointer of git-lfs": ("a.parquet", "version https://git-lfs.github.com/spec/v1\nsize 1\n", "Parquet"),
    "a cut gz": ("a.csv.gz", "\x1f\udc8b\b\0\0\0\0\0\0\0", "cannot be read: Compressed file"),
    "no question": ("a.jsonl", '{"text": "p", "x": 1}', "'question' that holds anything (columns: text, x)")}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_files_are_one_sentence(tmp_path, fault):
    name, content, words = BAD_FILES[fault]
    file = write(tmp_path / name, content)
    refusal = loaded(file)
    assert file in refusal and words in refusal


@pytest.mark.parametrize("name", "no.csv no.jsonl.gz d/no.arrow ./no /no/such ~nobody/no nothing a:b "
                         "owner/name/more:x:y:z @v1".split())
def test_what_is_no_hub_id_is_not_looked_for_on_the_hub(name, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert loaded(name).startswith(f"unknown data set '{name}': known are math500") and not hub.calls


LINE = '"p, ""q""\nr\u2028s", "007"\nNA,N/A\n'
FIELDS = [('p, "q"\nr\u2028s', "007"), ("NA", None)]


@pytest.mark.parametrize("kind, text, expected", [
    (".csv", f"problem, answer\n{LINE}", FIELDS),  # a blank behind a comma belongs to nothing
    (".csv", "\ufeffproblem,answer\r\n" + LINE.replace("\n", "\r\n"), FIELDS),
    (".tsv", "problem\tanswer\n" + LINE.replace('", ', '"\t').replace("A,N", "A\tN"), FIELDS),
    (".jsonl", '{"problem": "p\u2028q\x85r", "answer": 12345678901234567890}\n',
     [("p\u2028q\x85r", "12345678901234567890")]),
    (".jsonl", '\ufeff{"problem": "2020-01-01", "answer": "007"}', [("2020-01-01", "007")])])
def test_fields_are_read_as_they_are_written(kind, text, expected, tmp_path):
    """What `datasets` makes other values of; other line ends, a byte order mark."""
    read = loaded(write(tmp_path / f"a{kind}", text))
    assert [(question.replace("\r", ""), answer) for question, answer in read] == expected


def test_parquet_alone_needs_datasets(tmp_path, monkeypatch):
    names = [write(tmp_path / name, ROWS) for name in ("a.parquet", "a.jsonl.gz", "a.csv")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    refusal, *read = map(loaded, names)
    assert "is read by a library: pip install datasets" in refusal and len(read[0]) == len(read[1]) == 4


FOLDERS = [  # files: the row of ROWS that each holds, or its text; what is behind the name; the rows read
    ({"train.jsonl": 1, "test.jsonl": 2}, "", [1], [2]),
    ({"train/a.parquet": 1, "test/0.parquet": 2}, ":train", [1], [1]),
    ({"data/train-00000-of-00002.parquet": 1, "data/train-00001-of-00002.parquet": 2,
      "data/test-00000-of-00001.parquet": 3}, "", [1, 2], [3]),
    ({"gsm_dev.jsonl.gz": 1, "gsm_train.jsonl.gz": 2, "README.md": "#"}, ":validation", [1], [1]),
    ({"a.csv": 1, "b.csv": 2}, "", [1, 2], "has no split test, but train: {}:train."),
    ({"train.csv": 1, "rest.csv": 2}, ":train", [1], [1]),
    ({"train.csv": 1, "test.jsonl": 2}, "", *["cannot be read: Couldn't infer the same data file"] * 2),
    ({"test.csv": 1, "dev.csv": 2}, "", "has no split train, but validation, test: {}:validation.", [1]),
    ({"notes.txt": "x"}, ":train", *["split train (1 files; 0 not read: none) has no column"] * 2)]


@pytest.mark.parametrize("files, split, trained, evaluated", FOLDERS)
def test_a_folders_splits_are_chosen_by_name_and_shown(files, split, trained, evaluated, tmp_path, capsys):
    for name, held in files.items():
        write(tmp_path / name, [ROWS[held - 1]] if isinstance(held, int) else held)
    for train, expected in ((True, trained), (False, evaluated)):
        read = loaded(f"{tmp_path}{split}", train=train)
        if isinstance(expected, str):
            assert expected.replace("{}", str(tmp_path)) in read
            continue
        assert read == [(ROWS[n - 1]["problem"], str(ROWS[n - 1]["answer"])) for n in expected]
        counts = f"({len(expected)} files; {len(files) - len(expected)} not read: "
        assert counts in capsys.readouterr().out


def test_a_saved_data_set_is_read_without_what_its_library_has_cached(tmp_path):
    parts = {"train": ROWS[:2], "test": ROWS}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    saved.save_to_disk(tmp_path)
    write(tmp_path / "test/cache-1.arrow", [dict(problem="cached")])
    assert len(loaded(tmp_path)) == 2 and len(loaded(tmp_path, train=False)) == 4
    saved["train"].save_to_disk(tmp_path / "one")
    assert loaded(tmp_path / "one") == loaded(tmp_path / "one/data-00000-of-00001.arrow") == loaded(tmp_path)


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


DAPO = "Solve it. The last line should be of the form Answer: $Answer (without quotes).\n\nq"
PICTURE = "1 questions show or mention a picture, which the model does not see, the first in {}, row 2\n"
SAID = [  # rows, and what is printed of them
    ([dict(question="q", answers=["a", "b"], label=0)], "no answer column (0 gold answers: none), 0 "
     "duplicates removed; columns not used: answers, label\n"),
    ([dict(question=f"q{i}", answer=["3", "5", "proof", "proof"][i]) for i in range(4)],
     "(4 gold answers: '3', '5', 2 times 'proof')"),
    ([dict(prompt=DAPO), dict(prompt=[dict(role="user", content='q, after "####"')])],
     "2 questions ask for the answer elsewhere than in \\boxed{}, the first in {}, row 1\n"),
    *[([dict(question="q"), dict(question=text)], PICTURE)
      for text in ("P ![](https://x.jpg)", "<img src=x> q", "Seen in the figure.")],
    ([dict(question="q\nA) a\nB) b", choices=["a", "b"]), dict(question="r", choices=["(A) a", "(B) b"])],
     "2 questions have letters of their own for the choices, the first in {}, row 1\n"),
    ([dict(question="q", solution="It is clear. " * 40), dict(question="r", solution="\\boxed{3}")],
     "1 answers fit in no \\boxed{} and are not used, the first in {}, row 1\n"),
    ([dict(question="q", answer=a) for a in (1, "1.0", 3)],
     "1 duplicates have another gold answer, the first in {}, row 3\n")]


@pytest.mark.parametrize("rows, words", SAID)
def test_what_is_odd_is_printed(rows, words, tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", rows)
    load_problems(file)
    assert words.replace("{}, row", f"{file}, row") in capsys.readouterr().out
    load_problems(write(tmp_path / "b.jsonl", [dict(problem="As [asy] draw; [/asy] in the figure shows, q")]))
    assert "Warning" not in capsys.readouterr().out


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


# ---------------------------------------- the guide's public data sets -------------------------------------
GUIDE = (data.TOY.parent / "docs/fork.md").read_text()
RECIPES = re.findall(r"^```python\n(from datasets.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
RECIPES = {re.search(r'load_dataset\("(.*?)"', code)[1]: code for code in RECIPES}
ABCD = "q\n\nA. %s\nB. %s\nC. %s\nD. %s"
ABCD4 = ["1", "2", "3", "4"]
NUMINA = dict(solution="...", problem_type="Algebra", question_type="proof", problem_is_valid="Yes",
              solution_is_valid="Yes", source="olympiads", synthetic=False)
ASK = ("Solve the following math problem step by step. The last line of your response should be of the form "
       "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n2 + 3?\n\nRemember "
       'to put your answer on its own line after "Answer:".')
PUBLIC = {  # rows of each one's shape; what is said of them as they are; question and answer by the recipe
    "AI-MO/NuminaMath-1.5": (
        [dict(problem="Prove it.", answer="proof", **NUMINA), dict(problem="2 + 3?", answer="5", **NUMINA)],
        "1 times 'proof'", [("2 + 3?", "5")]),
    "TIGER-Lab/MMLU-Pro": (
        [dict(question_id=1, question="q", options=ABCD4, answer="B", answer_index=1, src="x")],
        "column 'options' may be", [(ABCD % (3, 4, 1, 2), "D")]),
    "allenai/ai2_arc": (
        [dict(id="1", question="q", choices=dict(text=ABCD4, label=list("ABCD")), answerKey="C")],
        "its choices must be a list", [(ABCD % (3, 4, 1, 2), "A")]),
    "deepmind/aqua_rat": (
        [dict(question="q", options=["A)1", "B)2", "C)3", "D)4"], rationale="...", correct="A")],
        "column 'options' may be", [(ABCD % (3, 4, 1, 2), "C")]),
    "allenai/sciq": (
        [dict(question="q", distractor3="4", distractor1="2", distractor2="3", correct_answer="1")],
        "column 'distractor3' may be", [(ABCD % (3, 4, 1, 2), "C")]),
    "google/boolq": (
        [dict(question="is it so", answer=True, passage="It is so.")],
        "column 'passage' may be", [("It is so.\n\nis it so? Answer yes or no.", "yes")]),
    "ChilleD/SVAMP": (
        [dict(ID="chal-1", Body="Two cows", Question="How many?", Equation="2", Answer="2.0", Type="Addition",
              question_concat="Two cows How many?")],
        "column 'Body' may be", [("Two cows How many?", "2.0")]),
    "metaeval/reclor": (
        [dict(context="c", question="q", answers=ABCD4, label=3, id_string="x")],
        "column 'context' may be", [("c\n\n" + ABCD % (1, 4, 2, 3), "B")]),
    "mandarjoshi/trivia_qa": (
        [dict(question="q", question_id="1", answer=dict(value="Sinclair", aliases=["Sinclair", "Lewis"]))],
        "column 'answer' must hold a text", [("q", "Sinclair")]),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        [dict(data_source="x", prompt=[dict(role="user", content=ASK)], ability="MATH",
              reward_model=dict(ground_truth="5", style="rule-lighteval"), extra_info=dict(index="1"))],
        "1 questions ask for the answer elsewhere", [("2 + 3?", "5")])}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_data_set_is_refused_or_doubted_and_read_by_its_recipe(name, tmp_path, monkeypatch, capsys):
    rows, words, expected = PUBLIC[name]
    assert RECIPES.keys() == PUBLIC.keys() and 3 <= RECIPES[name].count("\n") <= 10
    refusal = loaded(write(tmp_path / "raw.parquet", rows))
    assert words in (refusal if isinstance(refusal, str) else capsys.readouterr().out)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    exec(RECIPES[name], {})
    monkeypatch.undo()
    made, = [path for path in tmp_path.iterdir() if path.name != "raw.parquet"]
    assert loaded(made) == expected and "Warning" not in capsys.readouterr().out


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
