"""Runs -> one HTML page: curves, the votes of every logged step, problems whose majority flipped.

    python -m tools.report runs/NAME                     # writes runs/NAME/report.html
    python -m tools.report runs/a runs/b -o both.html

The page needs no network and opens by a double click. At its address, #run=0&step=20 shows that run's step.
Whatever a response holds stays text: it reaches the page as JSON, and the page's script sets text only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from engine.answers import equivalence_classes
from engine.base import UserError
from engine.metrics import mean
from engine.runfolder import json_object
from tools import plot

# A response on the page is a list in this order: names would be half of the page.
ROW = "number answer right reward advantage trained entropy tokens finished token_entropy fork text".split()
SHOWN_STEPS, SHOWN_FLIPS, SHOWN_POINTS = 50, 20, 400
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), trim_blocks=True,
                        lstrip_blocks=True, undefined=StrictUndefined, autoescape=select_autoescape(["html"]))
TEMPLATES.policies["json.dumps_kwargs"] = dict(separators=(",", ":"))


def sentences(template: str, **values) -> list[str]:
    """The paragraphs of a text template, each in one line."""
    text = TEMPLATES.get_template(template).render(values)
    found = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return [sentence for sentence in found if sentence]


@contextlib.contextmanager
def errors_in_a_sentence(out: Path | None):
    """Leave with exit code 2 and one sentence on what the user can mend; OSError: `out` cannot be written."""
    try:
        yield
    except (UserError, OSError) as error:
        unwritten = isinstance(error, OSError)
        sentence = f"{out} cannot be written: {error.strerror}." if unwritten else error
        print(f"Error: {sentence}", file=sys.stderr)
        sys.exit(2)


# -------------------------------------------------- votes --------------------------------------------------
def about_run(folder: Path) -> dict:
    """A run's run.json, {} if there is none."""
    path = folder / "run.json"
    return json_object(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def read_samples(folder: Path) -> tuple[list[dict], int]:
    """(records with votes or questions, number of other lines) of a run's samples.jsonl.

    The others are damaged or of an older version, which logged single responses."""
    records, lines = [], plot.read_lines(folder, "samples.jsonl")
    for record in lines:
        rows = record.get("responses") or record.get("questions")
        try:
            alike(rows) if rows is record.get("questions") else majority_of(record)
            text = all(isinstance(row.get("text", ""), str) for row in rows)
            whole = text and isinstance(record.get("gold"), str | None)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            whole = False
        if whole and isinstance(record.get("step"), int):
            records.append(record)
    return records, len(lines) - len(records)


def vote_of(record: dict) -> dict:
    """What the page shows of one prompt's responses: answer classes, most frequent first, and rows."""
    responses, gold = record["responses"], record.get("gold")
    answers = [row.get("answer") for row in responses]
    gold_class, *classes = record.get("equal") or equivalence_classes([gold, *answers])
    given = dict.fromkeys(c for c in classes if c is not None)
    # label and negatives name the script's own classes: EVOL-RL and --labels gold have such
    class_of = dict(zip([str(row.get("answer_class")) for row in responses], classes))
    weights = {class_of.get(own): weight for own, weight in (record.get("label") or {}).items()}
    negatives = [class_of.get(str(own)) for own in record.get("negatives") or []]
    shown, rows = [], []
    for c in [*sorted(given, key=classes.count, reverse=True), None]:
        members = [i for i, own in enumerate(classes) if own == c]
        for i in members:
            rows.append(dict(responses[i], number=i + 1, right=None if gold is None else c == gold_class))
        if c is not None:
            shown.append(dict(answer=answers[members[0]], votes=len(members), gold=c == gold_class,
                              weight=weights.get(c), negative=c in negatives,
                              entropy=mean_entropy(rows[-len(members):])))
    return dict(question=str(record.get("problem")), gold=gold, n=len(rows), classes=shown, rows=rows,
                none=classes.count(None), entropy=mean_entropy(responses))


def mean_entropy(rows: list[dict]) -> float | None:
    """Nats, None if a response was not scored."""
    entropies = [row.get("entropy") for row in rows]
    return None if None in entropies else mean(entropies)


def alike(questions: list[dict]) -> float | None:
    """Dynamic RL: the share of places at which two questions of a step have the same token, on average.

    From R_dq = 1 / (1 + overlaps with the others); None if fewer than two are known."""
    known = [row["rewards"][1] for row in questions if row.get("rewards") and row["rewards"][1]]
    return mean(1 / r - 1 for r in known) / (len(questions) - 1) if len(known) > 1 else None


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
        before, after = majority_of(times[0]), majority_of(times[-1])
        if before["right"] != after["right"]:
            kind = "freed" if after["right"] else "lost"
        elif not after["right"] and after["share"] > before["share"] and after["share"] >= 0.5:
            kind = "locked in"
        else:
            continue
        found.append(dict(kind=kind, question=question, before=before, after=after))
    order = ["locked in", "lost", "freed"]
    return sorted(found, key=lambda flip: (order.index(flip["kind"]), -flip["after"]["share"]))


def majority_of(record: dict) -> dict:
    """The majority answer of a logged vote, its share of the votes, and whether it is right."""
    vote = vote_of(record)
    top = [*vote["classes"], dict(answer=None, votes=0, gold=False)][0]
    return dict(step=record["step"], answer=top["answer"], share=top["votes"] / vote["n"], right=top["gold"])


# --------------------------------------------------- page --------------------------------------------------
def describe_run(folder: Path) -> dict:
    """All that the page shows of a run. Raises UserError if the folder holds none."""
    files = [folder / name for name in ("run.json", "metrics.jsonl", "samples.jsonl")]
    if not any(path.is_file() for path in files):
        raise UserError(f"'{folder}' holds no run: it has no run.json; give the folder of a run.")
    about = about_run(folder)
    script, args = str(about.get("script", "")), about.get("args") or {}
    metrics, (records, others) = plot.read_metrics(folder), read_samples(folder)
    logged = sorted({record["step"] for record in records})
    flipped = flips(records)[:SHOWN_FLIPS]
    wanted = {*logged[::math.ceil(len(logged) / SHOWN_STEPS) or 1], *logged[-1:]}
    for flip in flipped:
        wanted |= {flip["before"]["step"], flip["after"]["step"]}
    steps = [step_of(step, records, script, args) for step in sorted(wanted)]
    shown = dict(name=folder.resolve().name, script=script, flips=flipped, steps=steps)
    return dict(shown=shown, script=script, args=args, metrics=metrics, logged=len(logged), others=others,
                finished=(folder / "final").is_dir())


def step_of(step: int, records: list[dict], script: str, args: dict) -> dict:
    """The votes and, of Dynamic RL, the questions that were logged at this step."""
    votes, questions = [], []
    for record in [record for record in records if record["step"] == step]:
        questions += record.get("questions") or []
        if record.get("responses"):
            vote = vote_of(record)
            said = " ".join(sentences("verdict.txt", vote=vote, script=script, args=args))
            rows = []
            for row in vote["rows"]:
                rows.append([row.get(name) for name in ROW])
            votes.append(dict(vote, verdict=said, rows=rows, strip=script == "evol_rl"))
    return dict(step=step, votes=votes, questions=questions, alike=alike(questions))


def curves(runs: list[dict]) -> list[dict]:
    """[{title, points of every run: [[step, value], ...]}], those of tools/plot that have any."""
    benchmark, k = plot.choose_benchmark([run["metrics"] for run in runs])
    panels = []
    for title, metric in [("reward", "reward"), *plot.titles_and_metrics(benchmark, k, [], set())]:
        lines = []
        for run in runs:
            found = plot.series(run["metrics"], metric)
            points = [[step, float(f"{value:.5g}")] for step, value in found.items()]
            lines.append(points[::math.ceil(len(points) / SHOWN_POINTS) or 1])
        drawn = [points for points in lines if len(points) > 1]
        # RESTRAIN's rewards sum to 0 where no prompt is penalised: nothing to see then
        if any(abs(value) > 1e-6 for _, value in itertools.chain(*drawn)):
            panels.append(dict(title=title, metric=metric, lines=lines))
    return panels


def write_report(folders: list[Path], out: Path) -> None:
    """One page of these runs. Raises UserError if one is none, OSError if the file cannot be written."""
    def no_number(name: str) -> None:
        """NaN and infinity become null: a browser's JSON has neither."""

    runs = [describe_run(Path(folder)) for folder in folders]
    data = dict(panels=curves(runs), row=ROW, runs=[run["shown"] for run in runs])
    text = json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")  # lone surrogates crash browsers
    data = json.loads(text, parse_constant=no_number)
    html = TEMPLATES.get_template("report.html").render(runs=runs, colours=plot.COLOURS, data=data)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, encoding="utf-8", errors="replace")


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.report", description=__doc__, formatter_class=shape)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("-o", "--out", type=Path, help="default: report.html in the first run's folder")
    options = parser.parse_args()
    out = options.out or options.runs[0] / "report.html"
    with errors_in_a_sentence(out):
        write_report(options.runs, out)
    print(out)


if __name__ == "__main__":
    main()
