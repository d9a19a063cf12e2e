"""Loading problems from every kind of file and from a stand-in for the Hub, and their prompts."""

import csv
import gzip
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
from engine.data import BENCHMARKS, STEM, STYLES, SUFFIX, SYSTEM, encode_prompt, load_problems

ROWS = [{"problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(1, 5)]


def write(path, rows):
    """The rows as a file of the kind that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, kind, file = [json.dumps(row) for row in rows], path.name.partition(".")[2], io.StringIO()
    if kind.startswith("arrow"):
        with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
            writer.write_table(datasets.Dataset.from_list(rows).data.table)
    elif kind.startswith("parquet"):
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif kind[1:3] == "sv":
        table = csv.DictWriter(file, rows[0], delimiter="\t" if kind[0] == "t" else ",")
        table.writeheader()
        table.writerows(rows)
        path.write_text(file.getvalue())
    else:
        path.write_text("\n".join(lines) if kind.startswith("jsonl") else f"[{', '.join(lines)}]")
    if kind.endswith("gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    return str(path)


def questions_and_answers(name, **options):
    return [(p.question, p.answer) for p in load_problems(str(name), **options)]


# ------------------------------------------------- files -------------------------------------------------
KINDS = [f"a{kind}{gz}" for kind in data.FILES for gz in ("", ".gz")]


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_files_give_the_same_problems(tmp_path, name, capsys):
    """Also in a folder."""
    file = write(tmp_path / name, [*ROWS, ROWS[0]])
    problems = load_problems(file)
    assert [(p.question, p.answer, p.id) for p in problems] == [
        (f"What is {i} + {i}?", str(2 * i), i - 1) for i in range(1, 5)]
    assert all(str(p.row["answer"]) == p.answer and p.row["problem"] == p.question for p in problems)
    printed = capsys.readouterr().out
    assert f"4 problems from {file}, question column 'problem', answer column 'answer' (4 gold" in printed
    assert "answers: '2', '4'), 1 duplicates removed\n" in printed and "Warning" not in printed
    assert load_problems(str(tmp_path)) == problems
    assert f"from {tmp_path} ({name}), question" in capsys.readouterr().out


BAD_FILES = {
    "broken line": ("a.jsonl", '{"problem": "p"}\n\n{"problem": \n', "line 3 is not valid JSONL: Exp"),
    "not UTF-8": ("a.jsonl", "\udce9", "a.jsonl is not valid JSONL: 'utf-8' codec"),
    "empty": ("a.jsonl", "", "a.jsonl holds no problems"),
    "an object": ("a.json", '{"problem": "p"}', "must hold a list of objects"),
    "a comma too many": ("a.csv", "problem,answer\np,1\nq, 2,3\n", "not valid CSV: row 2 has more or fewer"),
    "an open quote": ("a.csv", 'problem,answer\n"p,1\n', "is not valid CSV: unexpected end of data"),
    "semicolons": ("a.csv", "problem;answer\np;1\n", "that holds text (columns: problem;answer); name"),
    "another kind": ("a.xlsx", "x", "or a local .json, .jsonl, .csv, .tsv, .parquet, .arrow file"),
    "a pointer of git-lfs": ("a.parquet", "version https://git-lfs.github.com/spec/v1\nsize 1\n",
                             "a.parquet is not valid PARQUET: Could not open Parquet"),
    "a cut gz": ("a.csv.gz", "\x1f\udc8b\b\0\0\0\0\0\0\0", "a.csv.gz is not valid CSV: Compressed file"),
    "two columns of one name": ("a.csv", "problem,a,a\n1,2,3", "two of its columns have the same name"),
    "no question": ("a.jsonl", '{"text": "p", "x": 1}', "that holds text (columns: text, x); name"),
    "question missing": ("a.jsonl", '{"problem": "p"}\n{"x": 1}', "row 2 has no column 'problem' (col"),
    "question is null": ("a.jsonl", '{"problem": "p"}\n{"problem": null}', "row 2: column 'problem' holds "),
    "GPQA, two choices": ("a.jsonl", '{"Question": "p", "Correct Answer": "y", "Incorrect Answer 1": "x"}',
                          "row 1 has no column 'Incorrect Answer 2'"),
    "no right choice": ("a.jsonl", '{"question": "p", "choices": ["x", "y"], "answer": "C"}',
                        "row 1: its choices must be a list of at most 10, and column 'answer'"),
    "a dict as right choice": ("a.jsonl", '{"question": "q", "choices": ["x"], "answer": {"a": 1, "b": 2}}',
                               "and column 'answer' must name the right one"),
    "choices are text": ("a.jsonl", '{"question": "q", "options": "x, y", "answer": "A"}',
                         "row 1: its choices must be a list of at most 10, and"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_files_are_one_sentence(tmp_path, fault):
    name, content, words = BAD_FILES[fault]
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as error:
        load_problems(str(tmp_path / name))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("name", "no.csv no.tsv no.parquet no.jsonl.gz d/no.arrow no.xlsx ./no /no/such "
                         "~/no/such ~nobody/no ../no/such nothing a:b owner/name/more:x:y:z @v1 /:x".split())
def test_what_is_no_hub_id_is_not_looked_for_on_the_hub(name, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^(there is no file .*|unknown data set '.*': known are math500)"):
        load_problems(name)
    assert not hub.calls


LINE = '"p, ""q""\nr\u2028s",007\nNA,N/A\n'
FIELDS = [('p, "q"\nr\u2028s', "007"), ("NA", None)]


@pytest.mark.parametrize("kind, text, expected", [
    (".csv", f"problem,answer\n{LINE}", FIELDS),
    (".csv", "\ufeffproblem,answer\r\n" + LINE.replace("\n", "\r\n"), FIELDS),
    (".tsv", "problem\tanswer\n" + LINE.replace('",', '"\t').replace("A,N", "A\tN"), FIELDS),
    (".jsonl", '{"problem": "p\u2028q\x85r"}\n', [("p\u2028q\x85r", None)]),
    (".jsonl", '\ufeff{"problem": "p", "answer": "007"}', [("p", "007")])])
def test_fields_are_read_as_they_are_written(kind, text, expected, tmp_path):
    """Other line ends, a byte order mark, and 007, which `datasets` reads as 7."""
    (tmp_path / f"a{kind}").write_bytes(text.encode())
    read = questions_and_answers(tmp_path / f"a{kind}")
    assert [(question.replace("\r", ""), answer) for question, answer in read] == expected


def test_csv_fields_may_be_long_and_parquet_needs_pyarrow(tmp_path, monkeypatch):
    assert len(load_problems(write(tmp_path / "a.csv", [dict(problem="p" * 200_000)]))[0].question) == 200_000
    name = write(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=f"^{name} is read with pyarrow: pip install datasets"):
        load_problems(name)


SAVED = {"data-00000-of-00001.arrow": 3, "cache-1.arrow": 4, "state.json": "data-00000-of-00001.arrow"}
FOLDERS = [  # files: the row of ROWS that each holds, or its text; what is behind the name; rows read
    ({"train.jsonl": 1, "test.jsonl": 2}, "", [1], [2]),
    ({"train/a.parquet": 1, "test/0.csv": 2}, ":train", [1], [1]),
    ({"data/train-00000-of-00002.parquet": 1, "data/train-00001-of-00002.parquet": 2,
      "data/validation-00000-of-00001.parquet": 3}, "", [1, 2], [3]),
    ({"gsm_dev.jsonl.gz": 1, "gsm_trainData.tsv": 2, "README.md": "#"}, ":dev", [1], [1]),
    ({"trainset.json": 1, "math-testdata.csv": 2}, "", [1], [2]), ({"latest.csv": 1}, "", [1], [1]),
    ({"eval.json": 1, "rest.jsonl": 2}, "", [2], [1]),
    ({"0.jsonl": 1, "1.csv": 2, ".cache/2.jsonl": "x", ".git/x": ""}, "", [1, 2], [1, 2]),
    ({"test.csv": 1}, "", [1], [1]),
    (SAVED, "", [3], [3]), ({"train_sft.json": 1, "train_rl.json": 2}, ":training", [2, 1], [2, 1]),
    ({f"train/{name}": held for name, held in SAVED.items()} | {"test/a.jsonl": 1, "dataset_dict.json": "{}"},
     "", [3], [1]),
    ({"a.csv": 1}, "/a.csv:train", *["/a.csv is a file, which has no split 'train'; name the file al"] * 2),
    ({"test.csv": 1, "dev.csv": 2}, "", "has the splits validation, test; name one, as /", [1]),
    ({"a/x.csv": 1, "test.csv": 2}, ":no", "has no no in files of", "has no no in files of"),
    ({"notes.txt": "x"}, "", "has no data in files", "has no data in files")]


@pytest.mark.parametrize("files, split, trained, evaluated", FOLDERS)
def test_a_folders_splits_are_chosen_by_name_and_shown(files, split, trained, evaluated, tmp_path, capsys):
    for name, held in files.items():
        if isinstance(held, int):
            write(tmp_path / name, [ROWS[held - 1]])
        else:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(held)
    for train, found in ((True, trained), (False, evaluated)):
        if isinstance(found, str):
            with pytest.raises(UserError, match=found):
                load_problems(f"{tmp_path}{split}", train=train)
        else:
            rows = load_problems(f"{tmp_path}{split}", train=train)
            assert [(row.question, row.answer) for row in rows] == [
                (ROWS[n - 1]["problem"], str(ROWS[n - 1]["answer"])) for n in found]
            printed = capsys.readouterr().out
            hidden = ("cache-1.arrow", "state.json", "dataset_dict.json", ".cache/2.jsonl", ".git/x")
            assert all((name in printed) != name.endswith(hidden) for name in files)


def test_mixed_files_of_a_folder_are_read_as_each_alone(tmp_path):
    write(tmp_path / "a.jsonl", [dict(problem="p", answer=None), dict(problem="q", answer=3, level=1)])
    write(tmp_path / "b.parquet", [dict(problem="r", answer="x")])
    write(tmp_path / "c.csv", [dict(problem="s", answer="007"), dict(problem="t", answer="N/A")])
    expected = [("p", None), ("q", "3"), ("r", "x"), ("s", "007"), ("t", None)]
    assert questions_and_answers(tmp_path) == expected
    write(tmp_path / "d.json", [dict(question="u")])
    with pytest.raises(UserError, match="d.json, row 1 has no column 'problem'|a.jsonl, row 1 has no column"):
        load_problems(str(tmp_path))


# ------------------------------------------------ columns ------------------------------------------------
USER, SYSTEM_TURN = dict(role="user", content="q"), dict(role="system", content="Box it.")
EARLIER = [dict(role="user", content="1+1?"), dict(role="assistant", content="\\boxed{2}")]
TOLD = dict(content="so \\boxed{40}", role="assistant")
LOST = "1 answers cannot be given in a box, the first in "
CODE = dict(inputs=["1"], outputs=["2"])
TARGET = {"style": "rule", "ground_truth": {"target": ["40"]}}


@pytest.mark.parametrize("row, answer", [
    ({"Question": "q", "Answer": "7"}, "7"),
    ({"question": "q", "final_answer": ["3"]}, "3"),
    ({"problem": "q"}, None),
    ({"problem": "q", "solution": "so it is \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}"),
    ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": 1}, "1"),
    ({"problem": "q", "reward_model": {"ground_truth": "#### 1,040"}}, "1,040"),
    ({"problem": "q", "answer": math.nan}, None),
    ({"question": "q", "answer": None, "solution": "\\boxed{3}"}, "3"),
    ({"problem": "q", "answer": [None, "3"]}, "3"),
    ({"question": "q", "answer": " Washington, D.C. ", "hint": "east"}, "Washington, D.C."),
    ({"problem": "q", "answer": "He has 10 + 30 = 40.\n#### 40"}, "40"),
    ({"question": "q", "reward_model": TARGET}, "40"), ({"question": "q", "golden_answers": ["40"]}, "40"),
    *[({"question": "q", "answer": cell}, "40") for cell in (
        str(TARGET), json.dumps(TARGET), json.dumps(json.dumps(TARGET)), '"40"', "[40]", '[["40"]]',
        str(b"40"), '[null,"40",40]', '{"answer": "40"}', '{"answer": [40, 40]}',
        '[{"value": "40", "unit": "m"}]', dict(i=3, x=dict(Y="40")), "<ANSWER>40",
        "<think>\\boxed{1}</think><answer> 40 </answer>", "so <final_answer>\\boxed{40}", [TOLD])],
    *[({"question": "q", "answer": cell}, cell) for cell in (  # mathematics that looks like Python
        "[1, 2]", "((1, 2), (3, 4))", "{(1,2)}", "('a' or \"b\")", "[0, \\infty)", "{1, 2}")],
    ({"question": "q", "answer": "['$\\frac{1}{2}$']"}, "$\\frac{1}{2}$"),
    ({"question": "q", "answer": dict(ground_truth=None, x=None)}, None),
    *[({"question": "q", "answer": cell}, LOST) for cell in (
        CODE, str(CODE), json.dumps(CODE), "the final answer", "\\boxed{40",
        "For a proof " * 30, dict(target=dict(x=1, y=2)), '{"answer": "40')],
    *[({"question": "q", "answer": cell}, "\\frac{1}{2}") for cell in (  # with one backslash
        '{"answer": "\\frac{1}{2}"}', '["\\frac{1}{2}", null]', "{'answer': '\\frac{1}{2}'}")],
])
def test_a_usual_column_is_found(tmp_path, row, answer, capsys):
    file = write(tmp_path / "a.jsonl", [row])
    problem, = load_problems(file)
    assert (problem.question, problem.answer) == ("q", None if answer == LOST else answer)
    assert (LOST + f"{file}, row 1: " in capsys.readouterr().out) == (answer == LOST)
    assert not problem.choices and problem.row.keys() == row.keys()


def test_class_labels_and_bytes_are_read(tmp_path):
    label = datasets.ClassLabel(names=["cat", "cow"])
    kind = datasets.Features(problem=datasets.Value("string"), answer=label)
    rows = datasets.Dataset.from_dict(dict(problem=list("pqr"), answer=[0, 1, -1]), features=kind)
    rows.save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "a.parquet")
    for name in ("saved", "a.parquet"):
        assert questions_and_answers(tmp_path / name) == [("p", "cat"), ("q", "cow"), ("r", None)]
    datasets.Dataset.from_dict(dict(problem=["p"], answer=[b"cat"])).to_parquet(tmp_path / "b.parquet")
    assert questions_and_answers(tmp_path / "b.parquet") == [("p", "cat")]


REFUSED = "seems to be part of the prompt, but cannot be put into it; --question_field, which takes one col"
COLUMNS = [  # a row: its question, the turns before it, the end of the loading line; or a refusal
    ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "Add.\n\n1 and 2", [], "not used: output"),
    ({"instruction": "x^2?", "input": "2"}, "x^2?\n\n2", [], "'instruction + input'"),
    ({"question": "a b " * 20 + "?", "context": "a b " * 20}, "a b " * 20 + "?", [], "'question + context'"),
    ({"context": "Two cows.", "question": "How many?"}, "Two cows.\n\nHow many?", [], "'question + context'"),
    ({"Body": "Two cows.", "Question": "How many?", "Type": "x"}, "Two cows.\n\nHow many?", [], "used: Type"),
    ({"system": "Box it.", "query": "q"}, "q", [("system", "Box it.")], "1 with earlier turns"),
    ({"passage": "P", "system_prompt": "S", "question": "q"}, "P\n\nq", [("system", "S")], "+ passage + s"),
    ({"question": "q", "image": {"x": None}, "tools": "[]", "has_image": 1}, "q", [], "used: has_image"),
    ({"problem": "<image>How many?", "images": ["x.png"]}, "column 'images' " + REFUSED),
    ({"system": "S", "prompt": [SYSTEM_TURN, USER]}, "column 'system' " + REFUSED),
    ({"system": "Box it.", "prompt": [SYSTEM_TURN, USER]}, "q", [("system", "Box it.")], "'prompt + system'"),
    ({"question": "q", "tools": '[{"name": "f"}]'}, "column 'tools' " + REFUSED),
    ({"question": "q", "history": [["a", "b"]]}, "column 'history' " + REFUSED),
    ({"question": "q", "paragraphs": [dict(title="a")]}, "column 'paragraphs' " + REFUSED),
    ({"question": "q", "context": dict(title=["a"])}, "column 'context' " + REFUSED),
    ({"context": "c", "messages": EARLIER + [dict(role="user", content="q")]}, "column 'context' " + REFUSED)]


@pytest.mark.parametrize("case", COLUMNS, ids=str)
def test_every_filled_column_is_used_refused_or_named(case, tmp_path, capsys):
    row, *expected = case
    file = write(tmp_path / "a.jsonl", [row])
    try:
        problem, = load_problems(file)
        assert [problem.question, problem.before] == expected[:2] and expected[2] in capsys.readouterr().out
    except UserError as error:
        assert f"{file}, row 1: {expected[0]}" in str(error)
        assert load_problems(file, next(c for c in data.QUESTION_FIELDS if c in row))
        assert "not used: " in capsys.readouterr().out


def test_what_duplicates_do_not_share_is_said(tmp_path, capsys):
    rows = [dict(problem="p", answer=a, input=i, id=n) for n, (a, i) in enumerate(["1a", "1b", "1a", "2a"])]
    file = write(tmp_path / "a.jsonl", rows)
    assert len(load_problems(file)) == 2
    printed = capsys.readouterr().out
    assert "2 duplicates removed, which differ in id; not used: id\n" in printed
    assert f"1 duplicates have another gold answer, the first in {file}, row 4\n" in printed


def test_columns_are_named_or_found_in_all_rows(tmp_path):
    """The first row has no answer, and a column is empty in all of them."""
    file = write(tmp_path / "a.jsonl", [{"x": "q", "y": 1, "question": "no", "answer": 2}])
    assert questions_and_answers(file, question_field="x", answer_field="y") == [("q", "1")]
    with pytest.raises(UserError, match=r"row 1 has no column 'z' \(columns: x, y, question, answer\)"):
        load_problems(file, "x", "z")
    rows = [{"problem": None, "question": "p", "x": 1}, {"problem": None, "question": "q", "answer": 2}]
    assert questions_and_answers(write(tmp_path / "b.jsonl", rows)) == [("p", None), ("q", "2")]


# ------------------------------------------------- chats -------------------------------------------------
CHATS = {  # name: (the column, the turns before its question "q")
    "one turn": ([USER], []),
    "several turns": ([*EARLIER, USER], [("user", "1+1?"), ("assistant", "\\boxed{2}")]),
    "parts of a parquet file": ([dict(role="user", content=[dict(type="text", text="q", image=None)])], []),
    "an answer last": ([USER, EARLIER[1]], None),
    "no turn": ([], None),
    "a call of a tool": ([dict(USER, tool_calls=[dict(name="f")])], None),
    "no call of a tool": ([dict(USER, tool_calls=None, name=None)], []),
    "an image beside": ([dict(role="user", content=[dict(type="text", text="q", image_url="x")])], None),
    "an image": ([dict(role="user", content=[dict(type="image", text=None), dict(text="q")])], None),
    "no content": ([dict(role="user", content=None)], None),
    "other keys": ([{"from": "human", "value": "q"}], None),
    "a chat as text": (json.dumps([SYSTEM_TURN, USER]), None),
    "ShareGPT's as text": ('[ {"from": "human", "value": "q"}]', None),
    "text like a list": ("[1, 2] q", ())}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_chat_is_taken_as_it_is_or_refused_with_its_row(name, column, tmp_path):
    chat, before = CHATS[name]
    file = write(tmp_path / "a.jsonl", [{column: "p", "answer": 1}, {column: chat, "answer": 2}])
    if before is None:
        with pytest.raises(UserError, match=f"a.jsonl, row 2: column '{column}' holds no text, nor a l"):
            load_problems(file)
        return
    first, second = load_problems(file)
    assert (second.question, second.answer) == ("[1, 2] q" if before == () else "q", "2")
    assert second.before == list(before) and first.before == []


def test_turns_of_the_data_replace_those_of_the_prompt(tokenizer, tmp_path, capsys):
    chats = [[USER], [*EARLIER, USER], [SYSTEM_TURN, *EARLIER, USER], [SYSTEM_TURN, *EARLIER, USER]]
    file = write(tmp_path / "a.parquet", [{"messages": chat, "answer": 1} for chat in chats])
    problems = load_problems(file)
    printed = capsys.readouterr().out
    assert "3 problems" in printed
    assert "column 'messages', 2 with earlier turns, which replace those of --prompt, answer col" in printed
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


@pytest.mark.parametrize("row, question, answer", [  # of MMLU and MMLU-Pro
    ({"choices": list("wxyz"), "answer": 0}, "q\n\nA. y\nB. z\nC. w\nD. x", "C"),
    ({"options": list("tuvwxyz"), "answer": "B"}, "q\n\nA. v\nB. y\nC. t\nD. z\nE. w\nF. u\nG. x", "F"),
    ({"options": [], "answer": 3}, "q", "3"),
    *[(row, "q\n\nA. b\nB. a", "A") for row in (
        {"choices": ["a", "b", None], "answer": "B"}, {"choices": [None, "a", "", "b"], "answer": 3},
        {"choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
        {"options": {"A": "a", "B": "b", "C": None}, "answer": "B"}, {"choices": ["a", "b"], "answer": "b"},
        {"choices": ["(a) a", "(b) b"], "answer": 1},
        {"choices": ["a", "b"], "answer": {"ground_truth": "B"}})],
    ({"question": "q\nA) a\nB) b", "choices": ["a", "b"], "answer": 1}, "q\nA) a\nB) b", "B"),
    ({"question": "a or b?", "choices": ["a", "b"], "answer": 1}, "a or b?\n\nA. a\nB. b", "B"),
    ({"choices": ["a", "b", "a "], "answer": "C"}, "q\n\nA. b\nB. a\nC. a", "B"),
])
def test_options_are_lettered_in_a_seeded_order(tmp_path, row, question, answer):
    problem, = load_problems(write(tmp_path / "a.jsonl", [{"question": "q"} | row]))
    assert (problem.question, problem.answer) == (question, answer)
    assert ("B. a\nC. a" in question) == bool(problem.also_right)


GOLD = "(1 gold answers: '40'), 0 duplicates removed"
PUBLIC = {  # shapes of public data: a row, what the loading line says of it or why it is refused
    "gsm8k": (dict(question="q", answer="4 * 10 = 40.\n#### 40"), f"answer column 'answer' {GOLD}\n"),
    "MATH": (dict(problem="q", level="Level 5", type="Algebra", solution="so $\\boxed{40}$."),
             f"column 'problem', answer column 'solution' {GOLD}; not used: level, type\n"),
    "DAPO": (dict(data_source="x", prompt=[USER], ability="MATH", extra_info=dict(index="1"),
                  reward_model=dict(ground_truth="40", style="rule")),
             f"column 'prompt', answer column 'reward_model' {GOLD}; not used: data_source, ability, extra"),
    "NuminaMath": (dict(source="x", problem="q", solution="so \\boxed{40}", messages=[USER, TOLD]),
                   f"column 'problem', answer column 'solution' {GOLD}; not used: source, messages\n"),
    "Search-R1": (dict(id="1", question="q", golden_answers=["40"], prompt=[USER], ability="fact-reasoning",
                       reward_model=dict(ground_truth=dict(target=["40"]), style="rule"), metadata=None),
                  f"answer column 'reward_model' {GOLD}; not used: id, golden_answers, prompt, ability\n"),
    "alpaca": (dict(instruction="Add.", input="20 and 20", output="40", text="Add. 20 and 20: 40"),
               "'instruction + input', no answer column (0 gold answers), 0 duplicates removed; not used: "),
    "ShareGPT": (dict(id="1", conversations=[{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]),
                 "has no question column that holds text (columns: id, conversations); name it with --quest"),
    "OpenR1": (dict(problem="q", solution="long", answer="40", generations=["a"], messages=[USER, TOLD]),
               f"answer column 'answer' {GOLD}; not used: solution, generations, messages\n"),
    "OpenR1, messages": (dict(messages=[USER, TOLD]), "column 'messages' holds no text, nor a list of turns"),
    "ARC": (dict(id="1", question="q", choices=dict(text=["39", "40"], label=["1", "2"]), answerKey="2"),
            "answer column 'answerKey' (1 gold answers: 'A'), 0 duplicates removed; not used: id\n")}


@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ""])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_formats_are_read_or_refused(name, kind, tmp_path, capsys):
    row, words = PUBLIC[name]
    write(tmp_path / f"train{kind or '.jsonl'}", [row])
    write(tmp_path / "test.jsonl", [dict(problem="another")])
    try:
        problem, = load_problems(str(tmp_path / f"train{kind}" if kind else tmp_path))
        assert (problem.answer or "40") in ("40", "A") and words in capsys.readouterr().out
        assert problem.question.endswith(("q", "20 and 20", "q\n\nA. 40\nB. 39"))
    except UserError as error:
        assert words in str(error)


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


def rows_of(name, count):
    """So many rows, with the columns that the benchmark is known to have and nothing else."""
    benchmark = BENCHMARKS[name]
    columns = dict.fromkeys([benchmark.question, benchmark.answer], "1")
    if name == "mmlu_stem":
        columns |= {"choices": ["1", "2"], "answer": 1, "subject": STEM[0]}
    return [columns | {benchmark.question: f"What is {i}?"} for i in range(count)]


def test_only_the_tables_subjects_and_splits_are_read(hub):
    hub.rows = rows_of("math_train", 3)
    load_problems("math_train")
    assert hub.calls == [("EleutherAI/hendrycks_math", subject, "train") for subject in data.MATH]
    hub.calls, hub.rows = [], rows_of("mmlu_stem", 4)
    hub.rows[3]["subject"] = "anatomy"
    assert len(load_problems("mmlu_stem")) == 3
    assert hub.calls == [("cais/mmlu", "all", "test")]
    assert len(set(STEM)) == 18 and "anatomy" not in STEM


@pytest.mark.parametrize("name, call", [
    ("owner/name", ("owner/name", None, None)), ("owner/name:main", ("owner/name", "main", None)),
    ("o/name:main:train[:9]", ("o/name", "main", "train[:9]")), ("o/name::dev", ("o/name", None, "dev")),
    ("o/n@v1.0", ("o/n", None, None, "v1.0")), ("owner/name:a:b@c/d", ("owner/name", "a", "b", "c/d"))])
def test_config_split_and_revision_of_a_hub_id(name, call, hub):
    hub.rows = rows_of("math500", 2)
    assert len(load_problems(name)) == 2 and hub.calls == [call]


def test_a_benchmark_wins_over_a_folder_of_its_name(hub, tmp_path, monkeypatch):
    (tmp_path / "aime24").mkdir()
    monkeypatch.chdir(tmp_path)
    hub.rows = rows_of("aime24", 2)
    assert len(load_problems("aime24")) == 2 and hub.calls


def test_what_the_hub_does_not_give_is_one_true_sentence(tmp_path, monkeypatch):
    """There is no Hub here: what `datasets` says of configs and splits comes from a folder with two."""
    with pytest.raises(UserError, match="^owner/name cannot be read .no network, gated, or no such"):
        load_problems("owner/name")
    for config in ("main", "other"):
        datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / f"{config}/a.parquet")
    configs = [f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in ("main", "other")]
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *config, **options: load(
        str(tmp_path), *config, **options))
    for name, words in {"o/n": "Config name is missing. Please pick one among the available configs: .'main",
                        "o/n:no": "BuilderConfig 'no' not found. Available: .'main', 'other'.",
                        "o/n:main:dev": "Unknown split \"dev\". Should be one of .'train'."}.items():
        with pytest.raises(UserError, match=f"^{name} cannot be read: {words}") as error:
            load_problems(name)
        assert "\n" not in str(error.value) and "network" not in str(error.value)
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
    (CHATML, "Hi", FILE), (CHATML, "[user]\nHi\n[assistant]\n{question}", FILE),
    (CHATML, "Hi\n[user]\n{question}", FILE), (CHATML, "[System]\nBox.\n[user]\n{question}", FILE),
    *[(CHATML, text, "{question}; its line '") for text in (
        "[User]\n{question}", "[user]:\n{question}", "[user] {question}", " [user]\n{question}", "[AI]",
        "[user]\n{question}\n[model]", "[system]\nx\n[human]\ny\n[user]\n{question}")],
    (CHATML, "[user]\nHi\n[system]\nBox.\n[user]\n{question}", FILE),
    (CHATML, "[user]\nHi\n[user]\n{question}", FILE),
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
    assert words is FILE or "its line" in words or "--prompt plain" in said
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
