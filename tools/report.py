"""A run -> one HTML page: what happened in a sentence, curves, every problem's votes.

    python -m tools.report runs/NAME             # writes runs/NAME/report.html

The page needs no network. At its address, #20 shows step 20, #20-3 problem 3 at step 20. Whatever a response
holds stays text: the page's script builds its elements from data and never from HTML.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from statistics import mean

from engine.base import UserError
from engine.run_folder import has_evaluation, read_jsonl, read_metrics

OPTIMIZER = "loss kl grad_norm clip_fraction logp_diff_max prompt_weight lr skipped_updates".split()
# Logged, too, but not drawn; nor are these groups. A fork's own metrics are.
HIDDEN = """step logp_diff_mean logp_nan truncated answered batch_pass@1 entropy_right entropy_wrong
    positive_advantage negative_coverage fork_position filtered no_question unanimous unique_answers
    question_entropy question_length peak_memory_gib""".split()
GROUPS = ("eval/", "seconds/", "tokens_per_second/", "agreeing/")
OPTIONS = "model dataset votes train_samples lr temperature seed".split()
ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "tools/templates/report.html"
METRICS = ROOT / "docs/metrics.md"


def vote_of(record: dict) -> dict:
    """A vote of samples.jsonl as the page shows it: {question, correct (gold), step, classes}.

    classes: of each answer, most votes first, its number of votes, the weight of its label (None: no label),
    whether it is a negative label or gold, and its responses with their numbers; at the end, with None as
    their answer, the responses without one."""
    responses, (gold_class, *classes) = record["responses"], record["equal"]
    right = {*record.get("right", [gold_class])} - {None}  # of several gold answers any is
    # label and negatives name the script's own classes, which are others with --labels gold and in EVOL-RL
    own = {str(row["answer_class"]): c for row, c in zip(responses, classes)}
    weights = {own.get(name): weight for name, weight in record["label"].items()}
    negatives = [own.get(str(name)) for name in record.get("negatives") or []]
    groups = []
    for c, votes in Counter(classes).most_common():
        answered = c is not None
        fact = dict(right=c in right)
        rows = [fact | row | dict(number=i + 1) for i, row in enumerate(responses) if classes[i] == c]
        groups.append(dict(answer=rows[0]["answer"], votes=votes, weight=weights.get(c) if answered else None,
                          negative=answered and c in negatives, gold=c in right, rows=rows))
    groups.sort(key=lambda entry: entry["answer"] is None)
    return dict(question=record["problem"], correct=record["gold"], step=record["step"], classes=groups)


def fates(votes: list[dict]) -> dict[str, float]:
    """What became of a run's majorities, from the lines of votes.jsonl; of problems seen more than once.

    flip_rate: how often a vote's majority differs from the problem's last one. Of the problems with a gold
    answer the shares, by their first and their last majority, that were learned (wrong, then right), kept
    (right, right), corrupted (right, then wrong) and never right at either (arXiv:2605.19444)."""
    names = {(0, 1): "learned", (1, 1): "kept", (1, 0): "corrupted", (0, 0): "never"}
    verdicts: dict[str, list[bool]] = {}
    for vote in votes:
        if vote["right"] is not None:
            verdicts.setdefault(vote["problem"], []).append(vote["right"])
    pairs = [(majorities[0], majorities[-1]) for majorities in verdicts.values() if len(majorities) > 1]
    shares = {name: pairs.count(pair) / len(pairs) for pair, name in names.items() if pairs}
    flips = [vote["flipped"] for vote in votes if vote["flipped"] is not None]
    return shares | (dict(flip_rate=sum(flips) / len(flips)) if flips else {})


def what_happened(lines: list[dict], options: dict) -> str:
    """From where to where the accuracy went, on another data set than --dataset if one was evaluated, beside
    what the base model can do without training; empty without an evaluation. lines: of metrics.jsonl."""
    evaluated, data = [line for line in lines if has_evaluation(line)], options.get("dataset", "")
    names = [name[5:-7] for line in evaluated[-1:] for name in line if name.endswith("/pass@1")]
    names.sort(key=lambda name: name in ("mean", "train", data))
    if not names:
        return ""
    name, first, last = names[0], evaluated[0], evaluated[-1]
    scores = []
    for metric, words in ((f"eval/{name}/greedy", "greedy"), (f"eval/{name}/pass@1", "sampled")):
        if metric in last:
            untrained = first is not last and first["step"] == 0 and metric in first
            before = f"{first[metric]:.0%} before, " if untrained else ""
            scores.append(f"{words} {before}{last[metric]:.0%}{before and ' after'}")
    text = f"Accuracy on {name}: {'; '.join(scores)}. "
    toy = {"": "uneven", "toy": "uneven", "toy_even": "even"}.get(options.get("model"))
    if toy and name == "toy_test":  # measured once, with as many votes as the toy's training has
        known = {}
        with (ROOT / "toy/results.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["toy"] == toy:
                    known.setdefault(row["row"], []).append(float(row["test"]))
        vote, prompt = mean(known["vote"]), mean(known["prompt"])
        return text + (f"Without training the base model's vote of 16 is right on {vote:.0%} of them, its "
                       f"best prompt on {prompt:.0%}.")
    votes = [metric for metric in first if metric.startswith(f"eval/{name}/maj@")]
    if votes and first["step"] == 0:  # the last is of all samples
        k = votes[-1].rpartition("@")[2]
        text += (f"Without training the base model's vote of {k} (maj@{k}) is right on "
                 f"{first[votes[-1]]:.0%}; another prompt was not tried.")
    return text.strip()


def told(lines: list[dict], fates: dict[str, float], options: dict) -> str:
    """What happened, in sentences made of the run's own numbers."""
    text = what_happened(lines, options)
    if "learned" in fates:
        text += (f" Majorities in training, first and last: {fates['corrupted']:.0%} of the problems were "
                 f"corrupted (right, then wrong), {fates['learned']:.0%} learned (wrong, then right), "
                 f"{fates['kept']:.0%} kept (right, right), {fates['never']:.0%} never right.")
    if "flip_rate" in fates:
        text += f" Between two votes on the same problem {fates['flip_rate']:.0%} of the majorities changed."
    return text.strip()


def explained(metrics: list[str]) -> dict[str, str]:
    """{metric: what docs/metrics.md says of it}, of those that it has."""
    page, meanings = METRICS.read_text(encoding="utf-8"), {}
    for cell, text in re.findall(r"^\| (`.*?) \| (.*) \|$", page, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", cell)
        plain = re.sub(r"\[(.*?)\]\(.*?\)|`", r"\1", text)
        for name in names:
            meanings.setdefault(name.removeprefix("eval/NAME/"), f"{', '.join(names)}: {plain}")
    ends = {name: re.sub(r"@(?!1$)\d+$", "@k", name.rpartition("/")[2]) for name in metrics}
    return {name: meanings[end] for name, end in ends.items() if end in meanings}


def panels(lines: list[dict]) -> dict[str, dict]:
    """{heading: {metric: its curve {step: value}}}. Left out below Accuracy: what never changes, and what is
    the same as a panel before it."""
    found: dict[str, dict] = {"Accuracy": {}, "Learning": {}, "The optimizer": {}}
    names = dict.fromkeys(name for line in lines for name in line)
    sizes = [int(name.rpartition("@")[2]) for name in names if "/pass@" in name]
    shown = ("greedy", "pass@1", f"pass@{max(sizes, default=1)}", f"maj@{max(sizes, default=1)}")
    for name in names:
        kind = "The optimizer" if name in OPTIMIZER else "Learning"
        if name.startswith("eval/") and name.rpartition("/")[2] in shown and "/mean/" not in name:
            kind = "Accuracy"
        elif name in HIDDEN or name.startswith(GROUPS):
            continue
        curve = {line["step"]: line[name] for line in lines if name in line}
        if kind == "Accuracy" or len({*curve.values()}) > 1 and curve not in found[kind].values():
            found[kind][name] = curve
    return {kind: drawn for kind, drawn in found.items() if drawn}


def read_run(folder: Path, numbers: dict[str, int], lines: list[dict]) -> dict:
    """What the page shows of a run. numbers: {question: its number on the page}, which is filled.

    votes: a line for every prompt of every step; kept: votes with their responses' texts, and others: records
    of the script's own (`log.append`), both of at most 50 steps, evenly chosen."""
    record = folder / "run.json"
    about = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    args, votes, kept, others = about.get("args", {}), [], [], []
    for line in read_jsonl(folder / "votes.jsonl"):
        number = numbers.setdefault(line["problem"], len(numbers))
        votes.append(line | dict(problem=number, correct=line.pop("answer", None)))
    records = read_jsonl(folder / "samples.jsonl")
    steps = sorted({line["step"] for line in records})
    shown = set(steps[::math.ceil(len(steps) / 50) or 1])
    for line in records:
        if line["step"] in shown and "equal" in line:
            vote = vote_of(line)
            kept.append(vote | dict(problem=numbers.setdefault(vote["question"], len(numbers))))
        elif line["step"] in shown:
            others.append(line)
    options = [f"{name} {args[name] if args[name] != '' else 'none'}" for name in OPTIONS if name in args]
    script = folder / "script.py"  # as it ran; its first line names the paper
    paper = script.read_text(encoding="utf-8").partition("\n")[0].strip('"') if script.exists() else ""
    return dict(name=folder.resolve().name, method=about.get("script", ""), paper=paper,
                about=", ".join(options), votes=votes, kept=kept, others=others,
                told=told(lines, fates(votes), args),
                evaluations=read_jsonl(folder / "evaluations.jsonl"))


def most_disputed(votes: list[dict]) -> int:
    """The step with texts at which the responses agree least."""
    shares: dict[int, list[float]] = {}
    for vote in votes:
        counts = [entry["votes"] for entry in vote["classes"]]
        shares.setdefault(vote["step"], []).append(max(counts) / sum(counts))
    return min(shares, key=lambda step: sum(shares[step]) / len(shares[step]), default=0)


def page_data(folder: Path) -> dict:
    """All that the page shows. Raises UserError if the folder holds no run."""
    lines = read_metrics(folder)
    if not lines:
        raise UserError(f"'{folder}' holds no run: it has no metrics.jsonl with a finished line.")
    numbers: dict[str, int] = {}
    run, curves = read_run(folder, numbers, lines), panels(lines)
    return dict(run=run, questions=list(numbers), curves=curves, opens=most_disputed(run["kept"]),
                explained=explained([name for drawn in curves.values() for name in drawn]))


def write_report(folder: Path, out: Path) -> str:
    """Write the page of a run; returns its first sentences. Raises UserError if it is no run, OSError if
    `out` cannot be written."""
    data = page_data(folder)
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8").replace("{{ data }}", text)
    out.write_text(page, encoding="utf-8", errors="replace")  # a response may hold half a surrogate pair
    return data["run"]["told"]


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.report", description=__doc__, formatter_class=shape)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("-o", "--out", type=Path, help="default: report.html in that folder")
    options = parser.parse_args()
    out = options.out or options.run / "report.html"
    try:
        print(f"{textwrap.fill(write_report(options.run, out), 100)}\n{out}")
    except (UserError, OSError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
