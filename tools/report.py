"""A run -> one HTML page: its curves, and the votes of its logged steps.

    python -m tools.report runs/NAME                     # writes runs/NAME/report.html

The page needs no network. At its address, #20 shows step 20. Whatever a response holds stays text: the
template escapes all of it.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from engine.base import UserError
from engine.runfolder import read_jsonl
from tools import plot

SHOWN_STEPS = 50
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), trim_blocks=True,
                        lstrip_blocks=True, undefined=StrictUndefined, autoescape=True)


def figures(value, digits: int = 2) -> str:
    """A number with so many digits; a dash for None and whatever else is no finite number."""
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.{digits}f}" if known else "-"


TEMPLATES.filters["figures"] = figures


def vote_of(record: dict) -> dict:
    """A vote of samples.jsonl as the page shows it: answer classes, most frequent first, and their responses.

    `classes` holds, of each class, its answer, its number of votes, the weight of its label (None: no label),
    and whether it is a negative label or gold; `rows` holds the responses, class by class, with their numbers
    and whether they are right (None: no gold answer)."""
    responses, (gold_class, *classes) = record["responses"], record["equal"]
    # label and negatives name the script's own classes, which are others with --labels gold and in EVOL-RL
    own = {str(row["answer_class"]): c for row, c in zip(responses, classes)}
    weights = {own.get(name): weight for name, weight in record["label"].items()}
    negatives = [own.get(str(name)) for name in record.get("negatives") or []]
    shown, rows = [], []
    given = sorted(dict.fromkeys(c for c in classes if c is not None), key=classes.count, reverse=True)
    for c in [*given, None]:
        members = [i for i, other in enumerate(classes) if other == c]
        for i in members:
            right = None if record["gold"] is None else c is not None and c == gold_class
            rows.append(dict(responses[i], number=i + 1, right=right))
        if c is not None:
            answer = responses[members[0]]["answer"]
            shown.append(dict(answer=answer, votes=len(members), weight=weights.get(c),
                              negative=c in negatives, gold=c == gold_class))
    return dict(problem=record["problem"], gold=record["gold"], classes=shown, rows=rows,
                none=classes.count(None))


def steps_of(records: list[dict]) -> list[dict]:
    """[{step, votes, others}, ...] of at most 50 steps, evenly chosen; others: the records that are no votes.

    A script's own records (`run.log_sample`) are such: {name: value}, as Dynamic RL's questions are."""
    by_step: dict[int, dict] = {}
    for record in records:
        entry = by_step.setdefault(record["step"], dict(step=record["step"], votes=[], others=[]))
        if "equal" in record:
            entry["votes"].append(vote_of(record))
        else:
            entry["others"].append({name: value for name, value in record.items() if name != "step"})
    steps = [by_step[step] for step in sorted(by_step)]
    return steps[::math.ceil(len(steps) / SHOWN_STEPS) or 1]


def write_report(folder: Path, out: Path) -> None:
    """Write a run's page. Raises UserError if the folder holds no run, OSError if `out` cannot be written."""
    picture = io.BytesIO()
    plot.plot([folder], picture)
    record = folder / "run.json"
    about = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    records = read_jsonl(folder / "samples.jsonl")
    html = TEMPLATES.get_template("report.html").render(
        name=folder.resolve().name, script=about.get("script", ""), args=about.get("args", {}),
        logged=len({line["step"] for line in records}), steps=steps_of(records),
        curves=base64.b64encode(picture.getvalue()).decode())
    out.write_text(html, encoding="utf-8", errors="replace")  # a response may hold half a surrogate pair


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.report", description=__doc__, formatter_class=shape)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("-o", "--out", type=Path, help="default: report.html in the run's folder")
    options = parser.parse_args()
    out = options.out or options.run / "report.html"
    try:
        write_report(options.run, out)
    except (UserError, OSError) as error:
        sys.exit(f"Error: {error}")
    print(out)


if __name__ == "__main__":
    main()
