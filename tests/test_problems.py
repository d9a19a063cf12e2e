"""Loading problems from every kind of file, prompts, and the estimators of the evaluation."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import common
from common import Problem, Rollout, UserError, grade, load_problems, majority, pass_at_k, summary
from problems import BENCHMARKS, SUFFIX, SYSTEM

DATA = Path(__file__).parent.parent.parent / "shared/data"
ROWS = [{"problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(1, 5)]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        path.write_text("\n".join([",".join(rows[0]), *(",".join(str(v) for v in r.values()) for r in rows)]))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        import datasets
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.parquet", "saved"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path, name, capsys):
    problems = load_problems(write(tmp_path / name, [*ROWS, ROWS[0]]))
    assert [(p.question, p.answer, p.id) for p in problems] == [(f"What is {i} + {i}?", str(2 * i), i - 1) for i in range(1, 5)]
    printed = capsys.readouterr().out
    assert "question column 'problem'" in printed and "answer column 'answer'" in printed and "1 duplicates removed" in printed


@pytest.mark.parametrize("row, answer", [
    ({"Question": "q", "Answer": "7"}, "7"), ({"question": "q", "final_answer": ["3", ]}, "3"),
    ({"prompt": "q", "answer": 142.0}, "142"), ({"problem": "q"}, None),
    ({"problem": "q", "solution": "so it is \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}"),
    ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34"}}, "34")])
def test_usual_columns(tmp_path, row, answer):
    (problem,) = load_problems(write(tmp_path / "a.jsonl", [row]))
    assert problem.question == "q" and problem.answer == answer


def test_named_columns(tmp_path):
    (problem,) = load_problems(write(tmp_path / "a.jsonl", [{"x": "q", "y": 1, "question": "no"}]), "x", "y")
    assert (problem.question, problem.answer) == ("q", "1")


def test_multiple_choice_is_shuffled_the_same_way_always(tmp_path):
    gpqa = {"Question": "Which?", "Correct Answer": "right", **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}}
    mmlu = {"question": "Which one?", "choices": ["w", "x", "right", "z"], "answer": 2}
    letters = set()
    for number in range(20):
        rows = [{**gpqa, "Question": f"Which {number}?"}]
        (problem,) = load_problems(write(tmp_path / "g.jsonl", rows), quiet=True)
        assert f"{problem.answer}. right" in problem.question and problem.choices
        assert load_problems(write(tmp_path / "g.jsonl", rows), quiet=True) == [problem]
        letters.add(problem.answer)
    assert len(letters) == 4
    (problem,) = load_problems(write(tmp_path / "m.jsonl", [mmlu]), quiet=True)
    assert f"{problem.answer}. right" in problem.question


@pytest.mark.parametrize("name, content, words", [
    ("a.jsonl", '{"problem": "q"}\n{"problem": \n', "line 2 is not valid JSON"), ("a.jsonl", "", "holds no problems"),
    ("a.json", "[1, 2]", "must hold a list of objects"), ("a.json", "{", "cannot be read"),
    ("a.jsonl", '{"text": "q", "label": 1}', "has no question column (columns: text, label)"),
    ("a.jsonl", '{"problem": 3}', "row 1: column 'problem' holds no text"), ("a.parquet", "no", "cannot be read")])
def test_bad_files_are_one_sentence(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        load_problems(str(tmp_path / name))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_unknown_names(tmp_path):
    with pytest.raises(UserError, match="unknown benchmark 'math5000': known are math500, aime24"):
        load_problems("math5000")
    with pytest.raises(UserError, match="does not exist"):
        load_problems(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="not a saved data set"):
        load_problems(str(tmp_path))
    with pytest.raises(UserError, match="cannot be loaded from the Hub"):  # the tests run offline
        load_problems("math500")


@pytest.mark.skipif(not DATA.exists(), reason="optional: needs the real benchmark files beside the repository")
@pytest.mark.parametrize("name, count", [("math500.jsonl", 500), ("aime24.jsonl", 30), ("aime25.json", 30), ("amc.json", 83),
                                         ("minerva", 272), ("olympiad_bench", 674)])
def test_real_benchmarks_load(name, count):
    problems = load_problems(str(DATA / name))
    assert len(problems) >= 0.98 * count and all(p.answer for p in problems)
    assert len({p.question for p in problems}) == len(problems)


def test_the_table_of_benchmarks():
    assert set(BENCHMARKS) == set("math500 aime24 aime25 amc minerva olympiad gpqa mmlu_stem math_train dapo".split())


def test_prompt_styles():
    tokenizer = AutoTokenizer.from_pretrained(common.TOY)
    tokenizer.chat_template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}[go]{% endif %}")
    text = lambda style: tokenizer.decode(common.encode_prompt(tokenizer, "1+1?", style))  # noqa: E731
    assert text("system") == f"[system]{SYSTEM}[user]1+1?[go]"
    assert text("suffix") == f"[user]1+1?{SUFFIX}[go]"
    assert text("plain") == f"Question: 1+1?\n{SYSTEM}\nAnswer:"


# ---- estimators -----------------------------------------------------------------------------------------------------
def test_pass_at_k_against_brute_force():
    for n, c in itertools.product(range(1, 7), range(7)):
        for k in range(1, n + 1):
            if c <= n:
                draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    # closed form by hand: n 4, c 1, k 2: 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(4, 1, 2) == 0.5


@pytest.mark.parametrize("classes, winner", [([0, 1, 1], 1), ([1, 0, 0, 1], 1), ([0, 1], 0), ([None, None, 2], 2), ([None], None),
                                             ([], None)])
def test_majority_and_its_ties(classes, winner):
    assert majority(classes) == winner


def test_grade_and_summary_by_hand():
    def rollout(answer, length, finished=True):
        return Rollout([1], [1] * length, None, finished, text=str(answer), answer=answer)

    first = grade(Problem("p", "2"), [rollout("2", 4), rollout("2.0", 2), rollout("3", 2), rollout(None, 8, False)])
    second = grade(Problem("q", "5"), [rollout("1", 1), rollout("1", 1), rollout("5", 1), rollout("7", 1)])
    assert first["correct"] == [True, True, False, False] and first["majority"]
    assert second["correct"] == [False, False, True, False] and not second["majority"]
    row = summary([first, second])
    # rates 1/2 and 1/4: mean 0.375; spread sqrt(2 x 0.125^2 / 1) = 0.17678, standard error 0.17678 / sqrt 2 = 0.125
    assert row["pass@1"] == 0.375 and row["stderr"] == pytest.approx(0.125)
    # pass@2: 1 - C(2,2)/C(4,2) = 5/6 and 1 - C(3,2)/C(4,2) = 1/2
    assert row["pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2) and row["pass@4"] == 1.0
    assert row["maj@4"] == 0.5 and row["length"] == 2.5 and row["answered"] == 7 / 8 and row["truncated"] == 1 / 8
    assert row["distinct"] == pytest.approx((4 / 4 + 3 / 4) / 2)
    # without any gold answer there is no score, but the rest; with some, the score is over those
    unknown = grade(Problem("r"), [rollout("1", 3)] * 4)
    assert summary([unknown]).keys() == {"length", "answered", "truncated", "distinct"}
    assert summary([first, second, unknown])["pass@1"] == 0.375


def test_pass_at_k_is_unbiased():
    rng, p, n, k = random.Random(0), 0.3, 8, 4
    estimates = [pass_at_k(n, sum(rng.random() < p for _ in range(n)), k) for _ in range(4000)]
    assert sum(estimates) / 4000 == pytest.approx(1 - (1 - p) ** k, abs=4 * math.sqrt(0.25 / 4000))
