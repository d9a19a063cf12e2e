"""Runs -> one HTML page: curves, the votes of every logged step, problems whose majority flipped.

    python -m tools.report runs/NAME                     # writes runs/NAME/report.html
    python -m tools.report runs/a runs/b -o both.html

The page needs no network and opens by a double click. At its address, #run=0&step=20 shows that run's step.
Whatever a response holds stays text: it reaches the page as JSON, and the page's script sets text only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from engine.answers import equivalence_classes, grading_budget
from engine.base import UserError
from engine.metrics import majority
from engine.runfolder import json_object
from tools import plot

# A response on the page is a list in this order: names would be half of the page.
ROW = "number answer_class answer right reward advantage trained entropy tokens finished text".split()
QUESTION = "text kept p answer advantage".split()
FACTS = "model dataset votes train_samples lr temperature seed".split()
SHOWN_STEPS, SHOWN_FLIPS, SHOWN_POINTS = 50, 20, 400


# ------------------------------------------------- reading -------------------------------------------------
def read_samples(folder: Path) -> tuple[list[dict], int]:
    """(records with votes or questions, number of other whole lines) of a run's samples.jsonl.

    Other lines are of an older version, which logged single responses; a half-written line is skipped."""
    path, records, others = Path(folder) / "samples.jsonl", [], 0
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.split("\n"):
        record = json_object(line)
        if isinstance(record.get("step"), int) and has_rows(record):
            records.append(record)
        elif record:
            others += 1
    return records, others


def has_rows(record: dict) -> bool:
    rows = record.get("responses") or record.get("questions")
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def finite(value) -> float | None:
    """A number that JSON can hold, else None."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


# -------------------------------------------------- votes --------------------------------------------------
def vote_of(record: dict) -> dict:
    """What the page shows of one prompt's responses: answer classes, most frequent first, and rows."""
    responses, gold = record["responses"], record.get("gold")
    answers = [row.get("answer") for row in responses]
    gold_class, *classes = record.get("equal") or equivalence_classes([gold, *answers])
    order = sorted(set(classes) - {None}, key=lambda c: (-classes.count(c), classes.index(c)))
    logged = [row.get("answer_class") for row in responses]  # EVOL-RL and --labels gold have their own
    label = record.get("label")
    weights = {}
    for own, weight in (label if isinstance(label, dict) else {}).items():
        if own in map(str, logged):  # else nobody gave the gold answer, which is the label
            weights[classes[list(map(str, logged)).index(own)]] = weight
    shown = []
    for c in order:
        shown.append(dict(answer=answers[classes.index(c)], votes=classes.count(c), gold=c == gold_class,
                          weight=finite(weights.get(c))))
    rows = []
    for i, (row, c) in enumerate(zip(responses, classes)):
        values = dict(row, number=i + 1, answer_class=order.index(c) if c is not None else None,
                      right=None if gold is None else c == gold_class, text=str(row.get("text") or ""))
        for name in ("reward", "advantage", "entropy", "tokens"):
            values[name] = finite(row.get(name))
        rows.append([values.get(name) for name in ROW])
    rows.sort(key=lambda row: math.inf if row[1] is None else row[1])  # answers together, in order of votes
    return dict(question=str(record.get("problem")), gold=gold, n=len(rows), classes=shown, rows=rows,
                none=classes.count(None))


def verdict(script: str, vote: dict) -> str:
    """One sentence: what became the label, and whether it is right."""
    labels = [entry for entry in vote["classes"] if entry["weight"]]
    if not vote["classes"]:
        return "No response has an answer, so there is no label."
    if not labels:
        why = dict(scrl="SCRL abstains: the majority is too weak, or its lead too small.",
                   restrain="RESTRAIN penalises all responses: too few of them agree.")
        return "No label. " + why.get(script, "")
    if len(labels) > 1:
        top = labels[0]
        return (f"{len(labels)} labels, weighted by their votes; '{top['answer']}' weighs most, "
                f"{top['weight']:.2f}" + right_or_wrong(top, vote))
    entry = labels[0]
    return f"Label: '{entry['answer']}', {entry['votes']} of {vote['n']} votes" + right_or_wrong(entry, vote)


def right_or_wrong(entry: dict, vote: dict) -> str:
    if vote["gold"] is None:
        return "."
    return ", right." if entry["gold"] else f", wrong: gold is '{vote['gold']}'."


def flips(records: list[dict]) -> list[dict]:
    """Problems whose majority changed sides between the first and the last time they were logged.

    lost: right, then wrong. locked in: wrong both times, the last time with more votes and at least half of
    them. freed: wrong, then right. Needs gold answers."""
    seen: dict[str, list[dict]] = {}
    for record in records:
        if record.get("responses") and record.get("gold") is not None:
            seen.setdefault(str(record.get("problem")), []).append(record)
    found = []
    for question, times in seen.items():
        if len(times) < 2:
            continue
        before, after = side(times[0]), side(times[-1])
        kind = ""
        if before["right"] != after["right"]:
            kind = "freed" if after["right"] else "lost"
        elif not after["right"] and after["share"] > before["share"] and after["share"] >= 0.5:
            kind = "locked in"
        if kind:
            found.append(dict(kind=kind, question=question, before=before, after=after))
    order = ["locked in", "lost", "freed"]
    return sorted(found, key=lambda flip: (order.index(flip["kind"]), -flip["after"]["share"]))


def side(record: dict) -> dict:
    """The majority answer of a logged vote, its share of the votes, and whether it is right."""
    answers = [row.get("answer") for row in record["responses"]]
    gold, *classes = record.get("equal") or equivalence_classes([record["gold"], *answers])
    top = majority(classes)
    return dict(step=record["step"], answer=None if top is None else answers[classes.index(top)],
                share=classes.count(top) / len(classes) if top is not None else 0.0,
                right=top is not None and top == gold)


# --------------------------------------------------- page --------------------------------------------------
def describe_run(folder: Path) -> dict:
    """All that the page shows of a run. Raises UserError if the folder holds none."""
    files = [folder / name for name in ("run.json", "metrics.jsonl", "samples.jsonl")]
    if not any(path.is_file() for path in files):
        raise UserError(f"'{folder}' holds no run: it has no run.json; give the folder of a run.")
    about = json_object(files[0].read_text(encoding="utf-8", errors="replace")) if files[0].is_file() else {}
    script, args = str(about.get("script", "")), about.get("args")
    metrics, (records, others) = plot.read_metrics(folder), read_samples(folder)
    logged = sorted({record["step"] for record in records})
    with grading_budget():  # answers made to be slow take a few seconds, not minutes
        flipped = flips(records)[:SHOWN_FLIPS]
        every = max(1, math.ceil(len(logged) / SHOWN_STEPS))
        wanted = {*logged[::every], *logged[-1:]}
        wanted |= {flip[when]["step"] for flip in flipped for when in ("before", "after")}
        steps = [step_of(step, records, script) for step in sorted(wanted)]
    notes = []
    if not (folder / "final").is_dir():
        last = metrics[-1]["step"] if metrics else 0
        notes.append("This run has no final model: it is still going on, or was stopped. "
                     f"Last logged step: {last}.")
    if others:
        notes.append(f"{others} lines of samples.jsonl are of an older version and not shown.")
    if not logged:
        notes.append("No step's responses are logged.")
    if every > 1:
        notes.append(f"{len(steps)} of {len(logged)} logged steps are shown: evenly chosen, and the flips'.")
    facts = args if isinstance(args, dict) else {}
    facts = {name: facts[name] for name in FACTS if name in facts}
    return dict(name=folder.resolve().name, script=script, facts=facts, notes=notes, flips=flipped,
                steps=steps, lines=metrics)


def step_of(step: int, records: list[dict], script: str) -> dict:
    """The votes and, of Dynamic RL, the questions that were logged at this step."""
    found = dict(step=step, votes=[], questions=[])
    for record in records:
        if record["step"] != step:
            continue
        if record.get("responses"):
            vote = vote_of(record)
            found["votes"].append(dict(vote, verdict=verdict(script, vote)))
        for row in record.get("questions") or []:
            p, advantage = finite(row.get("p")), finite(row.get("advantage"))
            values = dict(row, text=str(row.get("text") or ""), p=p, advantage=advantage)
            found["questions"].append([values.get(name) for name in QUESTION])
    return found


def curves(runs: list[dict]) -> list[dict]:
    """[{title, points of every run: [[step, value], ...]}], those of tools/plot that have any."""
    benchmark, k = plot.choose_benchmark([run["lines"] for run in runs])
    panels = []
    for title, metric in [("reward", "reward"), *plot.titles_and_metrics(benchmark, k, [])]:
        lines = []
        for run in runs:
            found = plot.series(run["lines"], metric)
            points = [[step, float(f"{value:.5g}")] for step, value in found.items()]
            lines.append(points[::math.ceil(len(points) / SHOWN_POINTS) or 1])
        if any(len(points) > 1 for points in lines):
            panels.append(dict(title=title, metric=metric, lines=lines))
    return panels


def write_report(folders: list[Path], out: Path) -> None:
    """One page of these runs. Raises UserError if one is none, OSError if the file cannot be written."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    runs = [describe_run(Path(folder)) for folder in folders]
    data = dict(panels=curves(runs), row=ROW, question=QUESTION)
    data["runs"] = [{name: value for name, value in run.items() if name != "lines"} for run in runs]
    # without "<" nothing in it can end the script element
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # no lone surrogates
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = pages.get_template("report.html").render(runs=runs, colours=plot.COLOURS, data=Markup(text))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, encoding="utf-8", errors="replace")


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.report", description=__doc__, formatter_class=shape)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("-o", "--out", type=Path, help="default: report.html in the first run's folder")
    options = parser.parse_args()
    out = options.out or options.runs[0] / "report.html"
    try:
        write_report(options.runs, out)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"Error: {out} cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
    print(out)


if __name__ == "__main__":
    main()
