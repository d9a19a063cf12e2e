"""tools.explain and tools.report: their numbers, hostile texts, the page in a real browser; the lesson."""

import html
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, read_lines, run_toy

import common
import dynamic_rl
import ettrl
import restrain
import scrl
import ttrl
from tools import explain, report

HOSTILE = ["<script>alert(1)</script> \\boxed{7}", "</pre></script><img src=x onerror=alert(1)> \\boxed{7}",
           "broken \ud800 and \udfff \\boxed{8}", "<!--<script> {{ 7 * 7 }} & \u2028 \\boxed{<b>9</b>}"]


def response(text, answer, own, **more):
    row = dict(text=text, answer=answer, answer_class=own, reward=1.0, votes=1, trained=True, advantage=0.5,
               tokens=9, finished=True, entropy=0.25)
    return row | more


def logged(step, responses, equal, label, **more):
    """A line of samples.jsonl; equal: the classes of gold and of the answers."""
    record = dict(step=step, problem="What is 3 + 4?", gold="7", equal=equal, label=label, cut=False)
    return record | dict(negatives=[], responses=responses) | more


def write_run(folder, records):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(dict(script="ttrl", args=dict(dataset="<i>toy", votes=4))))
    metrics = [dict(step=1, reward=0.5), dict(step=2, reward=1)]
    for name, lines in dict(samples=records, metrics=metrics).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def page_of(run) -> str:
    report.write_report(run, run / "report.html")
    return (run / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """Two steps of TTRL, of eight responses six are trained."""
    folder = tmp_path_factory.mktemp("report") / "run"
    run_toy(ttrl, folder, train_samples=6)
    report.write_report(folder, folder / "report.html")
    return folder


# -------------------------------------------------- explain -----------------------------------------------
def test_explain_shows_problems_that_do_not_differ(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["explain", "--embedder", ""])
    explain.main()
    text = capsys.readouterr().out
    assert len(set(re.findall(r"^Problem: (.*)", text, re.MULTILINE))) == 3
    sentence = r"TTRL takes '(.*)' as the label: (\d+) of 16 votes; the gold answer is (.*)\."
    (right, most, gold), (wrong, many, other_gold), (_, few, _) = re.findall(sentence, text)
    assert right == gold and wrong != other_gold and int(few) < int(many) <= int(most)


def a_vote():
    answers, entropies = ["91", "91.0", "73", "73", "91", "38", None, "91"], [.2, .2, .3, .4, .3, .6, .7, .3]
    responses = [SimpleNamespace(text=f"so \\boxed{{{a}}}" if a else "hm", answer=a) for a in answers]
    return explain.Vote(common.Problem("What is 7 * 13?", "91"), responses, entropies)


def test_explain_shows_something_else_than_the_scripts_functions_give():
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
    row = next(line.split() for line in text.splitlines() if line.lstrip().startswith("3 "))
    assert row[-len(columns):] == [f"{values[2]:+.2f}" for values in columns.values()]


# --------------------------------------------------- report -----------------------------------------------
def test_report_holds_other_votes_than_were_logged(toy_run):
    page = (toy_run / "report.html").read_text(encoding="utf-8")
    records = read_lines(toy_run / "samples.jsonl")
    steps = report.steps_of(records)
    votes = [vote for step in steps for vote in step["votes"]]
    assert [step["step"] for step in steps] == [1, 2] and len(votes) == len(records)
    for vote, record in zip(votes, records):
        for row in vote["rows"]:
            source = record["responses"][row["number"] - 1]
            assert source.items() <= row.items() and source["text"] in html.unescape(page)
        assert len(vote["rows"]) == 8 == vote["none"] + sum(c["votes"] for c in vote["classes"])
        assert [c["weight"] for c in vote["classes"] if c["weight"]] == list(record["label"].values())
    assert page.count("<section") == 2 and page.count("<tr class=\"untrained\"") == 2 * len(votes)
    assert not re.findall(r"https?:|(?:src|href)=\"(?!data:)", page)  # nothing is loaded


def test_report_marks_another_label_negative_or_gold_answer():
    rows = [response("a", "6", 0), response("b", "7.0", 1), response("c", "7", 1), response("d", None, None)]
    vote = report.vote_of(logged(1, rows, [1, 0, 1, 1, None], {"0": 0.4, "1": 0.6}, negatives=[0]))
    shown = [(c["answer"], c["votes"], c["gold"], c["weight"], c["negative"]) for c in vote["classes"]]
    assert shown == [("7.0", 2, True, 0.6, False), ("6", 1, False, 0.4, True)]
    order = [(row["number"], row["right"]) for row in vote["rows"]]
    assert order == [(2, True), (3, True), (1, False), (4, False)]
    # --labels gold: the script's class 0 is the gold answer, whoever gave it first
    rows = [dict(row, answer_class=0 if row["answer"] in ("7", "7.0") else None) for row in rows]
    gold = report.vote_of(logged(1, rows, [1, 0, 1, 1, None], {"0": 1.0}))
    assert [c["weight"] for c in gold["classes"]] == [1.0, None]


def test_report_lacks_a_scripts_own_records_trees_or_odd_numbers(tmp_path):
    fork = dict(fork=[0, 1, " <i>", " no"], reward=float("nan"), advantage=None, trained=False)
    rows = [response("a", "7", 0, token_entropy=[["<b>so", 0.9]]), response("b", "7", 0, **fork)]
    questions = [dict(text="<b>1 + 1?</b>", kept=True, rewards=[1.0, None])]
    run = write_run(tmp_path / "run", [logged(1, rows, [0, 0, 0], {}), dict(step=1, questions=questions),
                                       dict(step=2, note="<u>mine")])
    page = page_of(run)
    assert "&lt;b&gt;1 + 1?&lt;/b&gt;" in page and "&lt;u&gt;mine" in page and "No label." in page
    assert "forked from number 1 at token 2" in page and 'title="0.90 nats"' in page
    assert "<td>-</td><td>-</td><td>0.25</td>" in page
    assert not re.findall("<[biu]>(?:so|1|mine|toy)", page)


def hostile_run(folder):
    rows = [response(text, text.split("boxed{")[1][:-1], i) for i, text in enumerate(HOSTILE)]
    texts = dict(problem="<script>alert(2)</script>\ud800", gold="<b>9</b>")
    record = logged(1, rows, [3, 0, 0, 2, 3], {"0": 1.0}, **texts)
    return write_run(folder, [record])


def test_nothing_in_a_response_can_run(tmp_path):
    page = page_of(hostile_run(tmp_path / "<i>run"))
    assert page.count("<script") == page.count("</script") == 1  # the page's own
    assert not re.findall("<img src=x|<b>9|<i>run|<i>toy|<!--", page) and "{{ 7 * 7 }}" in page
    for text in HOSTILE:
        assert html.unescape(page).count(re.sub("[\ud800-\udfff]", "?", text)) == 2  # its end, and all of it


@pytest.mark.skipif(not shutil.which("chromium"), reason="optional: no chromium")
def test_page_in_a_browser_shows_one_step_and_runs_nothing_hostile(toy_run, tmp_path):
    def browse(page, fragment=""):
        """(the document after its script ran, the lines of the browser's console)"""
        flags = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
                 "--disable-background-networking --disable-component-update --enable-logging=stderr "
                 "--dump-dom").split()
        command = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri() + fragment]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    document, console = browse(toy_run / "report.html", "#1")
    assert console == [] and '<output id="shown">1</output>' in document
    assert re.findall(r'<section data-step="(\d)" hidden', document) == ["2"]
    moved = tmp_path / "moved.html"  # a line behind the page's own script drags the slider, as a hand would
    drag = "<script>slider.value = 1; slider.dispatchEvent(new Event('input'));</script></body>"
    moved.write_text((toy_run / "report.html").read_text().replace("</body>", drag))
    document, console = browse(moved)
    assert console == [] and '<output id="shown">2</output>' in document
    run = hostile_run(tmp_path / "run")
    page_of(run)
    document, console = browse(run / "report.html")
    assert console == [] and document.count("<script") == 1 and document.count("<img") == 1


# --------------------------------------------------- lesson -----------------------------------------------
def test_lesson_runs():
    """Every cell of docs/lesson.ipynb, and what it says of its outputs is true of those committed, too."""
    nbclient = pytest.importorskip("nbclient", reason="optional: no nbclient")
    pytest.importorskip("ipykernel", reason="optional: no ipykernel")
    import nbformat
    lesson = nbformat.read(ROOT / "docs/lesson.ipynb", as_version=4)
    check_lesson(printed(lesson))
    place = dict(metadata=dict(path=str(ROOT / "docs")))
    nbclient.NotebookClient(lesson, timeout=120, kernel_name="python3", resources=place).execute()
    check_lesson(printed(lesson))


def printed(lesson) -> str:
    return "".join(o.get("text", "") for cell in lesson.cells for o in cell.get("outputs", []))


def check_lesson(text):
    right, wrong, gold = re.findall(r"^(\d+): (\d+) votes, then (\d+)$", text, re.MULTILINE)
    for _, before, after in (right, wrong):
        assert int(after) > int(before)  # both majorities grew
    assert wrong[0] != gold[0] and int(gold[2]) < int(gold[1])
    assert text.count(" is open: write ") == 4  # the holes
    assert "loss 0.0000" in text and float(re.search(r"gradient norm ([\d.]+)", text)[1]) > 0.01
    lengths = [float(number) for number in re.findall(r"mean length ([\d.]+)", text)]
    assert len(lengths) == 12 and lengths[11] < lengths[5]  # the brief ones became briefer
