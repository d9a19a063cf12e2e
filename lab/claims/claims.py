"""The papers' claims, tested side by side: votes of the start model, and pairs of runs, one switch apart.

    python -m lab.claims.claims list     # every claim, its minutes, its verdict so far
    python -m lab.claims.claims votes    # what labels are worth: the start model is sampled once, no training
    python -m lab.claims.claims T4       # one claim (or several): its runs, values and verdict
    python -m lab.claims.claims all      # all of the toy's, then the pages: hours; goes on where it stopped
    python -m lab.claims.claims page     # docs/claims.md and this folder's README.md, from results.json

A claim is a row of claims.csv, committed before its runs. How verdicts are made: README.md.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import random
import re
from dataclasses import dataclass
from itertools import compress, count, product
from pathlib import Path
from statistics import fmean, stdev

import jinja2
import torch
from matplotlib import pyplot
from scipy import stats

import common
import ettrl
import restrain
import scrl
import ttrl
from engine.base import UserError
from engine.run_folder import read_jsonl, read_metrics
from lab import compare
from tools.explain import sample_votes
from tools.report import fates

ROOT = Path(__file__).resolve().parents[2]
RESULTS, RUNS, IMAGES = ROOT / "lab/claims/results.json", ROOT / "runs/claims", ROOT / "docs/images/claims"
SIZES, SUBSETS = (8, 16, 32), 8  # votes counted of those sampled, random subsets per problem; 16 is judged


@dataclass
class Claim:
    """A row of lab/claims/claims.csv."""
    id: str
    says: str        # the paper's sentence
    place: str
    arms: list[str]  # commands; "start", the first arm's own; a number; of VOTES: two measures of `vote_row`
    regime: str      # of regimes.csv; VOTES: no training, the unit is the problem; empty: not testable
    metric: str      # see `value`
    direction: int   # of first arm less second, as the paper has it
    margin: float    # what the mean must exceed, in the metric's unit
    seeds: list[int]
    note: str        # why it cannot be tested here, or what one must know
    here: str = ""   # what is tested of the sentence, in our regime
    lacks: str = ""  # the condition of the sentence that does not occur in these runs

    def sentence(self) -> str:
        """What the paper says, and what is tested of it."""
        return self.says + (f" Here: {self.here}." if self.here else "")


CLAIMS, REGIMES = [], {}
for row in csv.DictReader(open(ROOT / "lab/claims/regimes.csv", encoding="utf-8")):
    name = row.pop("regime")
    REGIMES[name] = row | dict(minutes=float(row["minutes"]))
for row in csv.DictReader(open(ROOT / "lab/claims/claims.csv", encoding="utf-8")):
    row["arms"] = [row.pop("first"), row.pop("second")]
    row["seeds"] = list(map(int, row["seeds"].split()))
    CLAIMS.append(Claim(**row | dict(direction=int(row["direction"]), margin=float(row["margin"]))))


# ------------------------------------------- a run's values -------------------------------------------------
def value(folder: Path, metric: str, start: bool = False) -> float:
    """A finished run's metric.

    end NAME: in the last evaluation; last NAME: mean of the last five steps; mean NAME: of all steps; with
    start, the first evaluation or step. sharpening: mean gain in pass@1 of the training problems whose
    majority was right at the start, less that of the others. corrupted less learned: shares of the training
    problems (`fates`). flips before labels: steps from the epoch whose flip rate is half of its first epoch's
    to the one whose labels are right .05 less often than in theirs (if there is none, to the end)."""
    kind, _, name = metric.partition(" ")
    if kind == "sharpening":
        first, *_, last = [r for r in read_jsonl(folder / "evaluations.jsonl") if r["benchmark"] == "toy"]
        gains = [after - before for before, after in zip(first["right"], last["right"])]
        wrong = [not right for right in first["majority"]]
        return fmean(compress(gains, first["majority"])) - fmean(compress(gains, wrong))
    if kind == "corrupted":
        found = fates(read_jsonl(folder / "votes.jsonl"))
        return found["corrupted"] - found["learned"]
    lines = read_metrics(folder)
    if kind == "flips":
        halved = epoch_when(lines, "flip_rate", lambda now, first: now <= first / 2)
        return float(epoch_when(lines, "label_accuracy", lambda now, first: now < first - .05) - halved)
    series = [line[name] for line in lines if name in line]
    if start:
        return series[0]
    return dict(end=series[-1], last=fmean(series[-5:]), mean=fmean(series))[kind]


def epoch_when(lines: list[dict], name: str, holds, size: int = 8) -> int:
    """The last of the first 8 steps in a row (an epoch of the toy) of which holds(their mean of a metric,
    that of its first 8 steps); one after the last step if there are none."""
    known = [line for line in lines if name in line]
    values = [line[name] for line in known]
    means = [fmean(values[i:i + size]) for i in range(len(values) - size + 1)]
    found = [line["step"] for line, mean in zip(known[size - 1:], means) if holds(mean, means[0])]
    return found[0] if found else lines[-1]["step"] + 1


def folder_of(claim: Claim, arm: str, seed: int) -> Path:
    return RUNS / f"{claim.regime}-{re.sub(r'[^a-z0-9_.]+', '-', arm.replace('.py', ''))}-seed{seed}"


def jobs_of(claim: Claim) -> dict[Path, list[str]]:
    """{folder: command} of its runs. Claims with the same regime and arm share them."""
    jobs = {}
    for seed, arm in product(claim.seeds, [arm for arm in claim.arms if ".py" in arm]):
        script, *switches = arm.split()  # of an option given twice the last counts
        command = [script, *REGIMES[claim.regime]["flags"].split(), *switches, "--seed", str(seed)]
        jobs[folder_of(claim, arm, seed)] = command
    return jobs


def values_of(claim: Claim, arm: str, seeds, metric: str) -> list[float]:
    """One arm's values of a metric; "start", "start NAME": of the first arm's runs; a number is itself."""
    start, _, name = arm.partition(" ")
    if start != "start" and ".py" not in arm:
        return [float(arm)] * len(seeds)
    runs = claim.arms[0] if start == "start" else arm
    metric = f"end {name}" if start == "start" and name else metric
    return [value(folder_of(claim, runs, seed), metric, start == "start") for seed in seeds]


# ------------------------------------------- the verdict ----------------------------------------------------
def judged(claim: Claim, arms: dict, mean: float, low: float, high: float, least: float, p: float) -> dict:
    """A claim's result. low, high: the 95% interval; least: what would have been found with 90% power."""
    below, above = (low, high) if claim.direction > 0 else (-high, -low)
    shown = below > 0 and claim.direction * mean > claim.margin
    said = "shown" if shown else "opposite" if above < 0 else "not shown here"
    return dict(verdict=said, mean=mean, low=low, high=high, detectable=least, p=p) | arms


def judge(first: list[float], second: list[float], claim: Claim) -> dict:
    """Paired t over seeds."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    p = stats.ttest_rel(first, second).pvalue if any(differences) else 1.0
    t, power = stats.t.ppf([.975, .9], len(differences) - 1).tolist()
    mean, error = fmean(differences), float(stats.sem(differences))
    arms, half = dict(first=first, second=second), t * error
    return judged(claim, arms, mean, mean - half, mean + half, half + power * error, float(p))


def judge_votes(problems: list[list[dict]], claim: Claim, resamples: int = 1000) -> dict | None:
    """Difference of two measures on rows of votes, by a bootstrap over problems; None without such votes."""
    def measures(chosen: list[list[dict]]) -> list[float]:
        rows = [row for rows in chosen for row in rows]
        return [measured(rows, arm) for arm in claim.arms]

    draw, (first, second) = random.Random(1), measures(problems)
    if math.isnan(first - second):
        return None
    drawn = [measures(draw.choices(problems, k=len(problems))) for _ in range(resamples)]
    differences = sorted(a - b for a, b in drawn if not math.isnan(a - b))
    low, high = (differences[int(share * len(differences))] for share in (.025, .975))
    mean, error = first - second, stdev(differences)  # 90% power: 1.96 + 1.28 standard errors
    p = 2 * stats.norm.sf(abs(mean) / error) if error else 1.0
    return judged(claim, dict(first=[first], second=[second]), mean, low, high, 3.24 * error, float(p))


def holm(ps: dict[str, float]) -> dict[str, float]:
    """p values adjusted for their number (Holm 1979)."""
    adjusted, least = {}, 0.0
    for i, name in enumerate(sorted(ps, key=ps.get)):
        adjusted[name] = least = max(least, min(1.0, ps[name] * (len(ps) - i)))
    return adjusted


# ------------------------------------------- the results ----------------------------------------------------
def digest(claim: Claim) -> str:
    """Hash of what a result depends on: with another record it must be made again."""
    flags = REGIMES.get(claim.regime, {}).get("flags")
    record = [claim.arms, flags, claim.metric, claim.direction, claim.margin, claim.seeds]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def read_results() -> dict[str, dict]:
    """{id: {record, and a result for each metric}}. Raises UserError if a record has changed since."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    digests = {claim.id: digest(claim) for claim in CLAIMS}
    other = [name for name, result in results.items() if result["record"] != digests.get(name)]
    if other:
        raise UserError(f"lab/claims/results.json has results of another record of {', '.join(other)}: the "
                        "claim has changed since its runs. Delete its entry there and run it again.")
    return results


def keep(claim: Claim, part: str, result: dict) -> None:
    results = read_results()
    results.setdefault(claim.id, dict(record=digest(claim)))[part] = result
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def run(claim: Claim, workers: int) -> None:
    """Its unfinished runs, then its results and sentences."""
    seeds, jobs = claim.seeds, jobs_of(claim)
    if not jobs:
        return
    print(f"\n{claim.id}, {claim.place}: {claim.sentence()}\nCompared: {' less '.join(claim.arms)}; "
          f"{claim.metric}; {claim.regime}; seeds {seeds[0]} to {seeds[-1]}; at most "
          f"{len(jobs) * REGIMES[claim.regime]['minutes']:.0f} core-minutes. {claim.note}", flush=True)
    compare.run_all(jobs, workers)
    for metric in claim.metric.split(" & "):
        result = judge(*(values_of(claim, arm, seeds, metric) for arm in claim.arms), claim)
        keep(claim, metric, result)
        for arm, values in zip(claim.arms, (result["first"], result["second"])):
            print(f"{arm:40} {' '.join(f'{x:.2f}' for x in values)}  mean {fmean(values):.3f}")
        print(f"{metric}: {result['verdict']}, {result['mean']:+.3f}, 95% interval {result['low']:+.3f} to "
              f"{result['high']:+.3f}; {result['detectable']:.3f} would be found with 90% power.", flush=True)


# ------------------------------------------ votes, no training ----------------------------------------------
def vote_row(classes: list, right: list[bool], entropies: list[float]) -> dict:
    """What the methods make of one vote, by the names that claims use: values or None, and conditions."""
    n, top = len(classes), common.majority(classes)
    gold = classes[right.index(True)] if any(right) else None
    won, share = top is not None and top == gold, classes.count(top) / n
    many = restrain.majority_count(classes) >= 3 * n / 16
    positive, gated = scrl.pseudo_labels(classes, entropies)
    ungated = scrl.pseudo_labels(classes, entropies, entropy_gate=False)[1]
    rewards = ttrl.majority_reward(classes)
    factors = ettrl.reshape_advantages(torch.ones(n), torch.tensor(entropies)).tolist()

    def average(values) -> float | None:
        values = list(values)
        return fmean(values) if values else None

    return {
        "right": won, "wrong": not won, "clear": share >= .375, "unclear": share < .375, "share": share,
        "many": many, "few": not many, "positive": positive is not None,
        "seen": any(right), "pass@1": average(right),
        "advantage": float(ttrl.group_advantages(rewards).max()),
        "reward right": average(bool(reward) == ok for reward, ok in zip(rewards, right)),
        "negative right": average(c != gold for c in gated),
        "ungated right": average(c != gold for c in ungated),
        "gold negative": gold in gated if any(right) else None,
        "gold ungated": gold in ungated if any(right) else None,
        "entropy right": average(h for h, ok in zip(entropies, right) if ok),
        "entropy wrong": average(h for h, ok in zip(entropies, right) if not ok),
        "factor": average(factor for factor, c in zip(factors, classes) if c == top)}


def measured(rows: list[dict], measure: str) -> float:
    """Mean of a name over rows; "name | condition": of those where that holds; or a number. nan: no row."""
    if measure.isdigit():
        return float(measure)
    name, _, condition = measure.partition(" | ")
    values = [row[name] for row in rows if (not condition or row[condition]) and row[name] is not None]
    return fmean(values) if values else math.nan


def votes(options) -> None:
    """Table and figure of all claims about votes; of the toy's also the results."""
    sampled = sample_votes(options.model, options.dataset, options.n, 1, options.problems, options.prompt)
    draw, found = random.Random(1), {}
    for size in [size for size in SIZES if size <= options.n]:
        found[size] = []
        for vote in sampled:
            responses = list(zip(vote.classes, vote.right, vote.entropies))
            drawn = [draw.sample(responses, size) for _ in range(SUBSETS)]
            found[size].append([vote_row(*map(list, zip(*some))) for some in drawn])
    toy = not options.model and options.dataset == "toy/hard.jsonl"
    print(f"| id | claim | {' | '.join(f'N = {n}' for n in found)} |\n|---|---|{'---|' * len(found)}")
    for claim in [claim for claim in CLAIMS if claim.regime == "VOTES"]:
        cells = []
        for size, problems in found.items():
            result = judge_votes(problems, claim)
            words = "{mean:+.3f} ({low:+.3f} to {high:+.3f}), {verdict}"
            cells.append(words.format(**result) if result else "no votes")
            if toy and size == 16:
                keep(claim, "votes", result)
        print(f"| {claim.id} | {claim.sentence()} | {' | '.join(cells)} |")
    out = IMAGES / "votes.png" if toy else Path("votes.png")
    draw_votes(found, out)
    print(f"Figure: {out}")


def draw_votes(found: dict[int, list[list[dict]]], out: Path) -> None:
    """How often labels are right; under each point the number of problems that its Wilson interval counts."""
    agree = {"3 or less": [], "4, 5": [], "6, 7": [], "8 or more": []}
    for (index, votes), rows in product(enumerate(agree, 1), found[16]):
        agree[votes].append([row for row in rows if min(max(int(row["share"] * 8), 1), 4) == index])
    names = {"reward right": "rewards", "right | positive": "SCRL's labels", "right": "majority labels",
             "pass@1": "responses"}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.2, 4), layout="constrained", sharey=True)
    for i, axis, groups in [*((i, left, found) for i in range(len(names))), (2, right, agree)]:
        name = list(names)[i]
        for x, problems in zip(count(.16 * i - .24 if axis is left else 0), groups.values()):
            y, n = measured(sum(problems, []), name), sum(measured(rows, name) >= 0 for rows in problems)
            low, high = stats.binomtest(round(y * n) if n else 0, n or 1).proportion_ci(method="wilson")
            axis.errorbar(x, y, [[y - low], [high - y]], fmt="o", color=f"C{i}", capsize=3)
            axis.annotate(n, (x, low), (0, -12), textcoords="offset points", ha="center", fontsize=9)
        axis.set(xticks=range(len(groups)), xticklabels=groups, xlim=(-.5, len(groups) - .5))
    left.set(ylabel="how often right", xlabel="votes on a problem", ylim=(0, 1))
    right.set(xlabel="votes that agree, of 16", title="majority labels")
    figure.legend(left.containers[::len(found)], names.values(), loc="outside upper left", ncols=4)
    figure.savefig(out, dpi=100)
    pyplot.close(figure)


# ------------------------------------------------ the page --------------------------------------------------
def page_rows() -> dict[str, dict]:
    """Every claim's record and, as far as it has run, what came out: verdict, and results by metric."""
    found, rows = read_results(), {}
    # of a claim with two metrics the larger p: it is shown if both are
    ps = {}
    for name, results in found.items():
        ps[name] = max(result["p"] for metric, result in results.items() if metric != "record")
    adjusted = holm(ps)
    for claim in CLAIMS:
        results = {metric: result for metric, result in found.get(claim.id, {}).items() if metric != "record"}
        verdicts = {result["verdict"] for result in results.values()} or {"not run yet"}
        verdict = verdicts.pop() if len(verdicts) == 1 else "mixed"
        if claim.lacks or not claim.regime:
            verdict = "not testable here"
        minutes = len(jobs_of(claim)) * REGIMES.get(claim.regime, dict(minutes=0))["minutes"]
        rows[claim.id] = dict(claim=claim, minutes=minutes, holm=adjusted.get(claim.id), results=results,
                              verdict=verdict)
    return rows


def pages() -> dict[Path, str]:
    """{path: text}, from the records, the results and the templates."""
    texts = jinja2.FileSystemLoader(ROOT / "lab/claims/templates")
    jinja = jinja2.Environment(loader=texts, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                               undefined=jinja2.StrictUndefined)
    paths = ROOT / "docs/claims.md", ROOT / "lab/claims/README.md"
    return {path: jinja.get_template(path.name).render(rows=page_rows(), regimes=REGIMES) for path in paths}


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m lab.claims.claims", description=__doc__, formatter_class=shape)
    words = ["list", "votes", "all", "page", *[claim.id for claim in CLAIMS]]
    parser.add_argument("what", nargs="+", metavar="WHAT", choices=words, help="as above, or ids")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--model", default="", help="of votes: Hub id or folder; empty: the toy; smollm2")
    parser.add_argument("--dataset", default="toy/hard.jsonl", help="of votes: Hub id, short name or file")
    parser.add_argument("--prompt", default="system", help="of votes: as in the scripts")
    parser.add_argument("--problems", type=int, default=96, help="of votes: the first so many")
    parser.add_argument("--n", type=int, default=64, help="of votes: responses per problem, at least 16")
    options = parser.parse_args()
    if options.n < 16:
        parser.error(f"--n is {options.n}, but must be at least 16, the votes that are judged.")
    every = "all" in options.what
    chosen = [claim for claim in CLAIMS if claim.id in options.what or every and claim.regime != "REAL"]
    try:
        for row in page_rows().values() if "list" in options.what else []:
            claim = row["claim"]
            print(f"{claim.id:5} {row['minutes']:5.1f} core-minutes  {row['verdict']:17} {claim.sentence()}")
        if "votes" in options.what or "VOTES" in [claim.regime for claim in chosen]:
            votes(options)
        for claim in chosen:
            run(claim, max(1, options.workers))
        if every or "page" in options.what:
            for path, text in pages().items():
                path.write_text(text, encoding="utf-8")
    except UserError as error:
        parser.exit(1, f"Error: {error}\n")


if __name__ == "__main__":
    main()
