"""The papers' claims, tested side by side: votes of the start model, and pairs of runs, one switch apart.

    python -m tools.claims list      # every claim, its minutes, its verdict so far
    python -m tools.claims votes     # what labels are worth: the start model is sampled once, no training
    python -m tools.claims T4        # one claim (or several): its runs, figure, values and verdict
    python -m tools.claims all       # all of the toy's, then docs/claims.md: hours; goes on where it stopped
    python -m tools.claims page      # docs/claims.md anew, from results/claims.json

One rule gives all verdicts: *shown* if the 95% interval of the paired difference excludes 0 in the claimed
direction and the mean exceeds the margin, *opposite* if it excludes 0 in the other, else *not shown here*.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import sys
from pathlib import Path
from statistics import fmean, stdev

import jinja2
import matplotlib
import torch
from scipy import stats

import ettrl
import restrain
import scrl
import ttrl
from common import UserError
from engine.runfolder import read_jsonl
from tools import compare, plot
from tools.claim_records import CLAIMS, EVOL, MINUTES, REGIMES, VOTES, Claim
from tools.explain import sample_votes

ROOT = Path(__file__).resolve().parent.parent
RESULTS, RUNS, IMAGES = ROOT / "results/claims.json", ROOT / "runs/claims", ROOT / "docs/images/claims"
SIZES, SUBSETS = (8, 16, 32), 8  # votes counted of those sampled, random subsets per problem; 16 is judged


# ------------------------------------------- a run's values -------------------------------------------------
def value(folder: Path, metric: str, start: bool = False) -> float:
    """A finished run's metric.

    end NAME: in the last evaluation; last NAME: mean of the last five steps; mean NAME: of all steps; with
    start, the first evaluation or step. Of batch_pass@1: kept, the last ten steps less the best ten in a row;
    late NAME, the last fifth's mean less the middle fifth's; collapse, the first step from which the mean of
    ten is below the start's evaluation by .05, or the number of steps plus one. sharpening: mean gain of the
    problems whose majority was right at the start, less that of the others."""
    kind, _, name = metric.partition(" ")
    if kind == "sharpening":
        first, *_, last = read_jsonl(folder / "evaluations.jsonl")
        gains: dict[bool, list[float]] = {True: [], False: []}
        for before, after, right in zip(first["right"], last["right"], first["majority"]):
            gains[right].append(after - before)
        return fmean(gains[True]) - fmean(gains[False])
    lines, name = plot.read_metrics(folder), name or "batch_pass@1"
    series = [line[name] for line in lines if name in line]
    if start:
        return series[0]
    tens = [fmean(series[i:i + 10]) for i in range(max(1, len(series) - 9))]
    fifth = max(1, len(series) // 5)
    if kind == "kept":
        return tens[-1] - max(tens)
    if kind == "late":
        return fmean(series[-fifth:]) - fmean(series[2 * fifth:3 * fifth])
    if kind == "collapse":
        least = lines[0]["eval/train/pass@1"] - .05
        return next((i + 1 for i, mean in enumerate(tens) if mean < least), len(series) + 1)
    return dict(end=series[-1], last=fmean(series[-5:]), mean=fmean(series))[kind]


def command_of(claim: Claim, arm: str, seed: int) -> list[str]:
    script, *switches = arm.split()
    return [script, *REGIMES[claim.regime].split(), *switches, "--seed", str(seed)]  # the last of two counts


def folder_of(claim: Claim, arm: str, seed: int) -> Path:
    """Claims with the same regime and arm share a run."""
    return RUNS / f"{claim.regime}-{re.sub(r'[^a-z0-9_.]+', '-', arm.replace('.py', ''))}-seed{seed}"


def values_of(claim: Claim, arm: str, seeds) -> list[float]:
    """Of one arm; "start" and "start NAME" read the first arm's runs, a number is itself."""
    start, _, name = arm.partition(" ")
    if start != "start" and ".py" not in arm:
        return [float(arm)] * len(seeds)
    runs = claim.arms[0] if start == "start" else arm
    metric = f"end {name}" if start == "start" and name else claim.metric
    return [value(folder_of(claim, runs, seed), metric, start == "start") for seed in seeds]


# ------------------------------------------- the verdict ----------------------------------------------------
def judged(claim: Claim, first, second, mean: float, half: tuple, detectable: float, p: float) -> dict:
    """A claim's result. half: how far the 95% interval reaches below and above the mean of the differences;
    detectable: the smallest true difference that would have been found with 90% power."""
    low, high = mean - half[0], mean + half[1]
    below, above = (low, high) if claim.direction > 0 else (-high, -low)
    said = "opposite" if above < 0 else "not shown here"
    if below > 0 and claim.direction * mean > claim.margin:
        said = "shown"
    return dict(verdict=said, mean=mean, low=low, high=high, detectable=detectable, p=float(p), first=first,
                second=second)


def judge(first: list[float], second: list[float], claim: Claim) -> dict:
    """Paired t over seeds; the p of `collapse`, whose values are censored, by Wilcoxon's signed ranks."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    n, mean = len(differences), fmean(differences)
    error = stdev(differences) / math.sqrt(n)
    t = stats.t.ppf(.975, n - 1)
    p = 2 * stats.t.sf(abs(mean) / error, n - 1) if error else float(mean == 0)
    if claim.metric == "collapse":
        p = stats.wilcoxon(differences).pvalue if any(differences) else 1.0
    return judged(claim, first, second, mean, (t * error, t * error), (t + stats.t.ppf(.9, n - 1)) * error, p)


def judge_votes(problems: list[list[dict]], claim: Claim, resamples: int = 1000) -> dict | None:
    """The claim's two measures on rows of votes, and a bootstrap of their difference over problems; None if
    there are no such votes."""
    def measures(chosen: list[list[dict]]) -> list[float]:
        rows = [row for rows in chosen for row in rows]
        return [measured(rows, arm) for arm in claim.arms]

    draw, (first, second) = random.Random(1), measures(problems)
    if math.isnan(first - second):
        return None
    drawn = [measures(draw.choices(problems, k=len(problems))) for _ in range(resamples)]
    differences = sorted(a - b for a, b in drawn if not math.isnan(a - b))
    low, high = (differences[int(share * len(differences))] for share in (.025, .975))
    mean, error = first - second, stdev(differences)
    p = 2 * stats.norm.sf(abs(mean) / error) if error else 1.0
    return judged(claim, [first], [second], mean, (mean - low, high - mean), 3.24 * error, p)  # 1.96 + 1.28


def holm(ps: dict[str, float]) -> dict[str, float]:
    """p values adjusted for their number (Holm 1979)."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(ps, key=ps.get)):
        largest = max(largest, min(1.0, ps[name] * (len(ps) - rank)))
        adjusted[name] = largest
    return adjusted


# ------------------------------------------- the results ----------------------------------------------------
def digest(claim: Claim) -> str:
    """Of what a result depends on: with another record it must be made again."""
    record = [claim.arms, REGIMES.get(claim.regime), claim.metric, claim.direction, claim.margin, claim.seeds,
              claim.held_out]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def read_results() -> dict[str, dict]:
    """{id: {record, reported, held_out}}. Raises UserError if a record has changed since its results."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    digests = {claim.id: digest(claim) for claim in CLAIMS}
    other = [name for name, result in results.items() if result["record"] != digests.get(name)]
    if other:
        raise UserError(f"results/claims.json has results of another record of {', '.join(other)}: the claim "
                        "has changed since its runs. Delete its entry there and run it again.")
    return results


def keep(claim: Claim, part: str, result: dict) -> None:
    results = read_results()
    results.setdefault(claim.id, dict(record=digest(claim)))[part] = result
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def minutes(claim: Claim) -> float:
    """Core-minutes of both arms' reported runs."""
    return MINUTES.get(claim.regime, 0.0) * len(claim.seeds) * sum(".py" in arm for arm in claim.arms)


def run(claim: Claim, held_out: bool, workers: int) -> None:
    """Its unfinished runs, then its result, figure and sentence."""
    seeds = claim.held_out if held_out else claim.seeds
    arms = [arm for arm in claim.arms if ".py" in arm]
    if not arms or not seeds:
        return
    jobs = {}
    for seed in seeds:
        jobs |= {folder_of(claim, arm, seed): command_of(claim, arm, seed) for arm in arms}
    print(f"\n{claim.id}, {claim.place}: {claim.says}\nCompared: {' less '.join(claim.arms)}; "
          f"{claim.metric}; {claim.regime}; seeds {seeds[0]} to {seeds[-1]}; at most {minutes(claim):.0f} "
          f"core-minutes. {claim.note}", flush=True)
    compare.run_all(jobs, workers)
    result = judge(*(values_of(claim, arm, seeds) for arm in claim.arms), claim)
    keep(claim, "held_out" if held_out else "reported", result)
    for arm, values in zip(claim.arms, (result["first"], result["second"])):
        print(f"{arm:40} {' '.join(f'{x:.2f}' for x in values)}  mean {fmean(values):.3f}")
    print(f"{result['verdict'].capitalize()}: {result['mean']:+.3f}, 95% interval {result['low']:+.3f} to "
          f"{result['high']:+.3f}; {result['detectable']:.3f} would be found with 90% power.", flush=True)
    if not held_out:
        IMAGES.mkdir(parents=True, exist_ok=True)
        logged = plot.read_metrics(next(iter(jobs)))[-2]  # a step without an evaluation
        panels = dict.fromkeys(["batch_pass@1", claim.metric.partition(" ")[2], "majority_ratio", "entropy"])
        names = [plot.name_of(folder_of(claim, arm, seeds[0])) for arm in arms]
        labels = dict(zip(names, [arm.replace(EVOL, "evol_rl").replace(".py", "") for arm in arms]))
        panels = [name for name in panels if name in logged]
        plot.plot(list(jobs), IMAGES / f"{claim.id}.png", panels=panels, labels=labels)


# ------------------------------------------ votes, no training ----------------------------------------------
def vote_row(classes: list, right: list[bool], entropies: list[float]) -> dict:
    """What the methods make of one vote, by the names that claims use: values or None, and conditions."""
    n, top = len(classes), ttrl.majority(classes)
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
            found[size].append([])
            responses = list(zip(vote.classes, vote.right, vote.entropies))
            for _ in range(SUBSETS):
                found[size][-1].append(vote_row(*map(list, zip(*draw.sample(responses, size)))))
    toy = not options.model and options.dataset == "toy/hard.jsonl"
    print(f"| id | claim | {' | '.join(f'N = {n}' for n in found)} |\n|---|---|{'---|' * len(found)}")
    for claim in [claim for claim in CLAIMS if claim.regime == VOTES]:
        cells = []
        for size, problems in found.items():
            result = judge_votes(problems, claim)
            interval = f"{result['low']:+.3f} to {result['high']:+.3f}" if result else ""
            cells.append(f"{result['mean']:+.3f} ({interval}), {result['verdict']}" if result else "no votes")
            if toy and size == 16:
                keep(claim, "reported", result)
        print(f"| {claim.id} | {claim.says} | {' | '.join(cells)} |")
    IMAGES.mkdir(parents=True, exist_ok=True)
    out = IMAGES / "votes.png" if toy else Path("votes.png")
    draw_votes({size: sum(problems, []) for size, problems in found.items()}, out)
    print(f"Figure: {out}")


def draw_votes(rows: dict[int, list[dict]], out: Path) -> None:
    """Four panels: labels and negatives over the number of votes, majorities over their share."""
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.4))
    bins: dict[float, list[dict]] = {}
    for row in rows[max(rows)]:
        bins.setdefault(min(int(row["share"] * 8), 7) / 8 + .0625, []).append(row)
    panels = (("how often right, over N", rows, ("reward right", "right | positive", "right", "pass@1")),
              ("P(majority right), over its share", bins, ("right",)),
              ("the majority's GRPO advantage, over its share", bins, ("advantage",)),
              ("how often negative labels are right, over N", rows, ("negative right", "ungated right")))
    for axis, (title, groups, names) in zip(axes, panels):
        for name in names:
            axis.plot(sorted(groups), [measured(groups[x], name) for x in sorted(groups)], "o-", label=name)
        axis.set_title(title, fontsize=9)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    pyplot.close(figure)


# ------------------------------------------------ the page --------------------------------------------------
def page() -> str:
    """docs/claims.md, from the records, the results and its template."""
    results, rows = read_results(), {}
    adjusted = holm({name: parts["reported"]["p"] for name, parts in results.items() if "reported" in parts})
    for claim in CLAIMS:
        parts = results.get(claim.id, {})
        said = "not run yet" if claim.regime else "not testable here"
        rows[claim.id] = dict(claim=claim, minutes=minutes(claim), holm=adjusted.get(claim.id),
                              result=parts.get("reported"), held_out=parts.get("held_out"),
                              verdict=parts["reported"]["verdict"] if "reported" in parts else said)
    runs = {}  # claims share some
    for claim in CLAIMS:
        for arm in [arm for arm in claim.arms if ".py" in arm]:
            runs |= {folder_of(claim, arm, seed): claim.regime for seed in claim.seeds + claim.held_out}
    hours = sum(MINUTES[regime] for regime in runs.values() if regime != "REAL") / 60
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((ROOT / "tools/templates/claims.md").read_text(encoding="utf-8"))
    weak = [name for name, row in rows.items() if row["verdict"] == "shown" and row["holm"] >= .05]
    sure = [name for name, row in rows.items() if row["verdict"] == "opposite" and row["holm"] < .05]
    return template.render(rows=rows, weak=weak, sure=sure, regimes=REGIMES, hours=hours) + "\n"


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.claims", description=__doc__, formatter_class=shape)
    parser.add_argument("what", nargs="+", help="list, votes, all, page, or ids of claims")
    parser.add_argument("--held_out", action="store_true", help="their held-out seeds, 11 to 18")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--model", default="", help="of votes: Hub id or folder; empty: the toy; smollm2")
    parser.add_argument("--dataset", default="toy/hard.jsonl", help="of votes: Hub id, short name or file")
    parser.add_argument("--prompt", default="system", help="of votes: as in the scripts")
    parser.add_argument("--problems", type=int, default=96, help="of votes: the first so many")
    parser.add_argument("--n", type=int, default=64, help="of votes: responses per problem, at least 8")
    options = parser.parse_args()
    by_id = {claim.id: claim for claim in CLAIMS}
    for word in options.what:
        if word not in {*by_id, "list", "votes", "all", "page"}:
            parser.error(f"there is no claim {word}; the claims are {', '.join(by_id)}.")
    try:
        for row in CLAIMS if "list" in options.what else []:
            said = "not run" if row.regime else "not testable"
            said = read_results().get(row.id, {}).get("reported", {}).get("verdict", said)
            print(f"{row.id:5} {minutes(row):5.1f} core-minutes  {said:15} {row.says}")
        every = "all" in options.what
        if every and not options.held_out or "votes" in options.what:
            votes(options)
        toy = [claim for claim in CLAIMS if claim.regime != "REAL"]
        for claim in toy if every else [by_id[word] for word in options.what if word in by_id]:
            run(claim, options.held_out, max(1, options.workers))
        if every or "page" in options.what:
            (ROOT / "docs/claims.md").write_text(page(), encoding="utf-8")
            print("docs/claims.md is written.")
    except UserError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
