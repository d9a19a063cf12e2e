"""One run or several -> one HTML page: curves, every problem's votes over the steps, sharpening.

    python -m tools.report runs/NAME             # writes runs/NAME/report.html
    python -m tools.report runs/A runs/B         # their votes side by side, in runs/A/report.html
    python -m tools.report runs/EVALUATION       # the responses of evaluate.py --save_generations

The page needs no network. At its address, #20 shows step 20, #20-3 problem 3 at step 20. Whatever a response
holds stays text: the page's script builds its elements from data and never from HTML.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path

from engine.base import UserError
from engine.log import read_jsonl
from tools import plot

SHOWN_STEPS = 50
OPTIMIZER = """loss kl grad_norm clip_fraction logp_diff_max zero_variance reward_accuracy prompt_weight lr
    skipped_updates""".split()
OPTIONS = "model dataset votes train_samples lr temperature seed".split()
OF_EVALUATION = "model eval_samples eval_temperature eval_top_p max_new_tokens seed".split()
TEMPLATE = Path(__file__).parent / "templates/report.html"


def vote_of(record: dict) -> dict:
    """A vote of samples.jsonl as the page shows it: {question, correct (gold), step, classes}.

    classes: of each answer, most votes first, its number of votes, the weight of its label (None: no label),
    whether it is a negative label or gold, and its responses with their numbers; at the end, with None as
    their answer, the responses without one."""
    responses, (gold_class, *classes) = record["responses"], record["equal"]
    # label and negatives name the script's own classes, which are others with --labels gold and in EVOL-RL
    own = {str(row["answer_class"]): c for row, c in zip(responses, classes)}
    weights = {own.get(name): weight for name, weight in record["label"].items()}
    negatives = [own.get(str(name)) for name in record.get("negatives") or []]
    shown = []
    for c, votes in Counter(classes).most_common():
        known = c is not None
        fact = dict(right=known and c == gold_class)
        rows = [fact | row | dict(number=i + 1) for i, row in enumerate(responses) if classes[i] == c]
        shown.append(dict(answer=rows[0]["answer"], votes=votes, weight=weights.get(c) if known else None,
                          negative=known and c in negatives, gold=known and c == gold_class, rows=rows))
    shown.sort(key=lambda entry: entry["answer"] is None)
    return dict(question=record["problem"], correct=record["gold"], step=record["step"], classes=shown)


def fates(votes: list[dict]) -> dict[str, float]:
    """What became of a run's majorities, from the lines of votes.jsonl; of problems seen more than once.

    flip_rate: how often a vote's majority differs from the problem's last one. Of the problems with a gold
    answer the shares, by their first and their last majority, that were learned (wrong, then right), kept
    (right, right), corrupted (right, then wrong) and never right at either (arXiv:2605.19444)."""
    names = {(0, 1): "learned", (1, 1): "kept", (1, 0): "corrupted", (0, 0): "never"}
    seen: dict[str, list[bool]] = {}
    for vote in votes:
        if vote["right"] is not None:
            seen.setdefault(vote["problem"], []).append(vote["right"])
    pairs = [(majorities[0], majorities[-1]) for majorities in seen.values() if len(majorities) > 1]
    found = {name: pairs.count(pair) / len(pairs) for pair, name in names.items() if pairs}
    flips = [vote["flipped"] for vote in votes if vote["flipped"] is not None]
    return found | (dict(flip_rate=sum(flips) / len(flips)) if flips else {})


def read_run(folder: Path, numbers: dict[str, int]) -> dict:
    """What the page shows of a run. numbers: {question: its number on the page}, to which new ones are added.

    votes: a line for every prompt of every step; kept: votes with their responses' texts, and others: records
    of the script's own (`log.append`), both of at most 50 steps, evenly chosen."""
    record = next(filter(Path.is_file, [folder / "results.json", folder / "run.json"]), None)
    about = json.loads(record.read_text(encoding="utf-8")) if record else {}
    args, votes, kept, others = about.get("args", {}), [], [], []
    for line in read_jsonl(folder / "votes.jsonl"):
        number = numbers.setdefault(line["problem"], len(numbers))
        votes.append(line | dict(problem=number, correct=line.pop("answer", None)))
    records = read_jsonl(folder / "samples.jsonl") + generations(folder)
    steps = sorted({line["step"] for line in records})
    shown = set(steps[::math.ceil(len(steps) / SHOWN_STEPS) or 1])
    for line in records:
        if line["step"] in shown and "equal" in line:
            vote = vote_of(line)
            kept.append(vote | dict(problem=numbers.setdefault(vote["question"], len(numbers))))
        elif line["step"] in shown:
            others.append(line)
    names = OF_EVALUATION if "results" in about else OPTIONS
    options = [f"{name} {args[name] if args[name] != '' else '(toy)'}" for name in names if name in args]
    return dict(name=folder.resolve().name, method=plot.method_of(folder), about=", ".join(options),
                results=about.get("results", {}), votes=votes, fates=fates(votes), kept=kept, others=others,
                evaluations=read_jsonl(folder / "evaluations.jsonl"))


def generations(folder: Path) -> list[dict]:
    """generations.jsonl of an evaluation as lines of samples.jsonl, one for each problem, without a label."""
    found: dict[str, dict] = {}
    for line in read_jsonl(folder / "generations.jsonl"):
        name, c = f"{line['benchmark']} | {line['problem']}", line["answer_class"]
        new = dict(step=0, problem=name, gold=line["gold"], label={}, equal=[None], responses=[])
        vote = found.setdefault(name, new)
        vote["equal"] = [c if line["correct"] else vote["equal"][0], *vote["equal"][1:], c]
        vote["responses"].append(dict(text=line["response"][-2000:], answer=line["answer"], answer_class=c,
                                      right=line["correct"], finished=line["finished"]))
    return list(found.values())


def page_data(folders: list[Path]) -> dict:
    """All that the page shows: {runs, questions, curves}. Raises UserError if a folder holds no run."""
    numbers: dict[str, int] = {}
    lines = [[[]] if (folder / "results.json").is_file() else [*plot.read_runs([folder]).values()][0]
             for folder in folders]
    runs = [read_run(Path(folder), numbers) for folder in folders]
    named = {f"{run['method']} {i}": seeds for i, (run, seeds) in enumerate(zip(runs, lines))}
    for run, style in zip(runs, plot.styles(list(named)).values()):
        run["style"] = style
    logged = {name for seeds in lines for line in seeds[0] for name in line}
    curves = {"Learning": plot.curves(named, [])} if logged else {}
    if panels := [name for name in OPTIMIZER if name in logged]:
        curves["The optimizer"] = plot.curves(named, panels)
    return dict(runs=runs, questions=list(numbers), curves=curves)


def write_report(folders: list[Path], out: Path) -> None:
    """Write the page of these runs. Raises UserError if one is no run, OSError if `out` cannot be written."""
    data = json.dumps(page_data(folders), ensure_ascii=False)
    page = TEMPLATE.read_text(encoding="utf-8").replace("{{ data }}", data.replace("<", "\\u003c"))
    out.write_text(page, encoding="utf-8", errors="replace")  # a response may hold half a surrogate pair


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.report", description=__doc__, formatter_class=shape)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs or evaluations")
    parser.add_argument("-o", "--out", type=Path, help="default: report.html in the first run's folder")
    options = parser.parse_args()
    out = options.out or options.runs[0] / "report.html"
    try:
        write_report(options.runs, out)
    except (UserError, OSError) as error:
        sys.exit(f"Error: {error}")
    print(out)


if __name__ == "__main__":
    main()
