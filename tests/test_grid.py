"""tools.report: what a run logs of every vote, the page's data, hostile texts, the page in a real browser."""

import functools
import json
from collections import Counter

import torch
from conftest import read_lines, run_toy, write_run

import common
import ttrl
from engine.log import vote_record
from engine.metrics import grade
from tools import report

ARGS = dict(dataset="<i>toy", votes=4)
HOSTILE = ["<script>alert(1)</script> \\boxed{7}", "</pre></script><img src=x onerror=alert(1)> \\boxed{7}",
           "broken \ud800 and \udfff \\boxed{8}", "<!--<script> {{ 7 * 7 }} & \u2028 \\boxed{<b>9</b>}"]


def test_a_vote_in_short_is_that_of_its_answers():
    answers = ["7", "8.0", "8", None, "7" * 99, "8"]

    def record(gold="7.0", also=(), **more):
        problem = common.Problem("p", gold, also_right=list(also))
        responses = [common.Rollout([], [], torch.zeros(0), True, answer=answer) for answer in answers]
        group = dict(prompt=problem, responses=responses, classes=[0, 1, 1, None, 2, 1], trained={0, 1},
                     label={0: 0.4, 1: 0.6}, verdicts=grade(problem, responses), flipped=None)
        return vote_record(group | more)

    found = record()
    assert found["counts"] == [["8.0", 3], ["7", 1], ["7" * 40, 1]] and found["share"] == 0.5
    assert (found["right"], found["gold"], found["label"]) == (False, 1, "wrong")
    assert record(label={0: 0.6, 1: 0.4})["label"] == "right" and record(label={})["label"] == "none"
    other = record("1", also=["8"])
    assert (other["right"], other["gold"], other["label"]) == (True, 0, "right")
    assert record(None)["label"] == "given"


# The majorities of four problems in four steps: one is corrupted, one learned, one kept, one never right.
MAJORITIES = {"a": ("1/2", ["1/2", "0.5", "7", "7.0"]), "b": ("9", [None, None, "3", "9"]),
              "c": ("5", ["5", "5", None, "5.0"]), "d": ("2", ["1", "1", "1", "1"])}


def test_flips_and_fates_of_a_run_by_hand(tmp_path, monkeypatch):
    """Equal answers do not flip, nor does none after none. Across --resume: test_ranks.py."""
    data, asked = tmp_path / "four.jsonl", Counter()
    data.write_text("".join(json.dumps(dict(problem=p, answer=a)) + "\n" for p, (a, _) in MAJORITIES.items()))

    def answer(text, problem):  # six of a step's eight responses agree
        step, i = divmod(asked[problem.question], 8)
        asked[problem.question] += 1
        agreed = MAJORITIES[problem.question][1][step]
        return agreed and ("0" if i < 2 else agreed)

    own = type("Own", (common.Problem,), dict(read=lambda self, text, end: answer(text, self)))
    monkeypatch.setattr(common, "start", functools.partial(common.start, problem=own))
    lines = run_toy(ttrl, tmp_path / "run", steps=4, dataset=str(data), max_new_tokens=4)
    # step 2: none; step 3: a, b and c of four; step 4: b and c
    assert [line.get("flip_rate") for line in lines] == [None, 0, 0.75, 0.5]
    votes = read_lines(tmp_path / "run/votes.jsonl")
    assert report.fates(votes) == dict(
        learned=.25, kept=.25, corrupted=.25, never=.25, flip_rate=5 / 12)
    assert report.fates(votes[:4]) == {}


# -------------------------------------------------- the page -----------------------------------------------
def test_nothing_in_a_response_ends_the_pages_script(tmp_path):
    """A text is data: no "<" of it stands in the page."""
    rows = []
    for i, text in enumerate(HOSTILE):
        rows.append(dict(text=text, answer=text.split("boxed{")[1][:-1], answer_class=i, reward=1.0,
                         trained=True, advantage=0.5, tokens=9, finished=True, entropy=0.25))
    asked = dict(problem="<script>alert(2)</script>\ud800")
    samples = [dict(asked, step=1, gold="<b>9</b>", equal=[3, 0, 0, 2, 3], label={"0": 1.0}, negatives=[],
                    responses=rows)]
    report.write_report(write_run(tmp_path / "<i>run", ARGS, samples=samples), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == page.count("</script") == 1  # its own
    for tag in ("<img", "<b>9", "<i>run", "<i>toy"):
        assert tag not in page
