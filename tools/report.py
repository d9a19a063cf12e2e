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
from engine.metrics import majority, mean
from engine.runfolder import json_object
from tools import plot

# A response on the page is a list in this order: names would be half of the page.
ROW = "number answer_class answer right reward advantage trained entropy tokens finished".split()
ROW += ["shade", "fork", "text"]
QUESTION = "text kept p answer rewards advantage".split()
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
    negatives = {classes[logged.index(own)] for own in record.get("negatives") or [] if own in logged}
    shown = []
    for c in order:
        entry = dict(answer=answers[classes.index(c)], votes=classes.count(c), gold=c == gold_class)
        why = why_negative(responses, [own == c for own in classes]) if c in negatives else ""
        shown.append(dict(entry, weight=finite(weights.get(c)), negative=why))
    rows = []
    for i, (row, c) in enumerate(zip(responses, classes)):
        values = dict(row, number=i + 1, answer_class=order.index(c) if c is not None else None,
                      right=None if gold is None else c == gold_class, text=str(row.get("text") or ""))
        for name in ("reward", "advantage", "entropy", "tokens"):
            values[name] = finite(row.get(name))
        values["shade"] = row.get("token_entropy") if is_pairs(row.get("token_entropy")) else None
        values["fork"] = row.get("fork") if is_fork(row.get("fork"), len(responses)) else None
        rows.append([values.get(name) for name in ROW])
    rows.sort(key=lambda row: math.inf if row[1] is None else row[1])  # answers together, in order of votes
    return dict(question=str(record.get("problem")), gold=gold, n=len(rows), classes=shown, rows=rows,
                none=classes.count(None))


def is_pairs(shade) -> bool:
    """Whether it is [[token, entropy], ...], as a run logs it."""
    return isinstance(shade, list) and all(
        isinstance(pair, list) and len(pair) == 2 and finite(pair[1]) is not None for pair in shade)


def is_fork(fork, n: int) -> bool:
    """Whether it is [index of one of n responses, position, token, token], as a run logs it."""
    return isinstance(fork, list) and len(fork) == 4 and fork[0] in range(n) and finite(fork[1]) is not None


def why_negative(responses: list[dict], members: list[bool]) -> str:
    """SCRL, Eq. 8: rare, and given with at least the mean entropy."""
    entropies = [finite(row.get("entropy")) for row in responses]
    why = f"rare, {sum(members)} of {len(members)}"
    if None in entropies:
        return why
    own = mean(entropy for entropy, member in zip(entropies, members) if member)
    return f"{why}, and unsure: entropy {own:.2f}, mean {mean(entropies):.2f}"


def verdict(script: str, vote: dict, args: dict) -> str:
    """One sentence: what became the label, and whether it is right."""
    labels = [entry for entry in vote["classes"] if entry["weight"]]
    if not vote["classes"]:
        return "No response has an answer, so there is no label."
    if not labels:
        votes, second = [entry["votes"] for entry in [*vote["classes"], dict(votes=0)]][:2]
        of_n, tau, kappa = f"of {vote['n']} votes", args.get("tau_pos", 0.375), args.get("kappa", 3)
        why = dict(restrain=f"RESTRAIN penalises all: {votes} {of_n} are fewer than kappa, {kappa}.",
                   scrl=f"SCRL abstains: {votes} {of_n} is below tau_pos, {tau}.")
        if votes / vote["n"] >= tau:
            why["scrl"] = f"SCRL abstains: a lead of {votes - second} {of_n} does not exceed tau_marg."
        return "No label. " + why.get(script, "")
    if len(labels) > 1:
        top = labels[0]
        return (f"{len(labels)} labels, weighted by their votes; '{top['answer']}' weighs most, "
                f"{top['weight']:.2f}" + right_or_wrong(top, vote))
    entry = labels[0]
    return f"Label: '{entry['answer']}', {entry['votes']} of {vote['n']} votes" + right_or_wrong(entry, vote)


def bands(vote: dict) -> str:
    """EVOL-RL's two bands of rewards, and who is most novel in each."""
    said = ""
    for name, low, high in (("majority, 0.5 to 1", 0.5, 1), ("others, -1 to -0.5", -1, -0.5)):
        rewards = {}
        for row in vote["rows"]:
            row = dict(zip(ROW, row))
            if row["reward"] is not None and low <= row["reward"] <= high and row["answer"] is not None:
                rewards[row["number"]] = row["reward"]
        if rewards:
            best = max(rewards, key=rewards.get)
            said += f" Most novel of the {name}: number {best} with {rewards[best]:.2f}."
    return said


def alike(diversities: list[float | None]) -> str:
    """Dynamic RL: how alike the questions of a step are, from R_dq = 1 / (1 + overlaps with the others)."""
    known = [r for r in diversities if r]
    if len(known) < 2:
        return ""
    share = mean(1 / r - 1 for r in known) / (len(diversities) - 1)
    return f"How alike: on average two of them have the same token at {share:.0%} of their places."


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
    logged, facts = sorted({record["step"] for record in records}), args if isinstance(args, dict) else {}
    with grading_budget():  # answers made to be slow take a few seconds, not minutes
        flipped = flips(records)[:SHOWN_FLIPS]
        every = max(1, math.ceil(len(logged) / SHOWN_STEPS))
        wanted = {*logged[::every], *logged[-1:]}
        wanted |= {flip[when]["step"] for flip in flipped for when in ("before", "after")}
        steps = [step_of(step, records, script, facts) for step in sorted(wanted)]
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
    facts = {name: facts[name] for name in FACTS if name in facts}
    return dict(name=folder.resolve().name, script=script, facts=facts, notes=notes, flips=flipped,
                steps=steps, lines=metrics)


def step_of(step: int, records: list[dict], script: str, args: dict) -> dict:
    """The votes and, of Dynamic RL, the questions that were logged at this step."""
    found = dict(step=step, votes=[], questions=[])
    for record in records:
        if record["step"] != step:
            continue
        if record.get("responses"):
            vote = vote_of(record)
            said = verdict(script, vote, args) + (bands(vote) if script == "evol_rl" else "")
            found["votes"].append(dict(vote, verdict=said, strip=script == "evol_rl"))
        for row in record.get("questions") or []:
            p, advantage = finite(row.get("p")), finite(row.get("advantage"))
            rewards = row.get("rewards") if isinstance(row.get("rewards"), list) else []
            rewards = [finite(reward) for reward in [*rewards, None, None, None][:3]]
            values = dict(row, text=str(row.get("text") or ""), p=p, advantage=advantage, rewards=rewards)
            found["questions"].append([values.get(name) for name in QUESTION])
    found["alike"] = alike([question[QUESTION.index("rewards")][1] for question in found["questions"]])
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
