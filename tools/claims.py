"""The papers' claims, tested side by side: votes of the start model, and pairs of runs that differ by a switch.

    python -m tools.claims list          # every claim, its minutes, its verdict so far
    python -m tools.claims votes         # what the labels are worth: one sampling of the start model, no training
    python -m tools.claims T4            # one claim (or several): its runs, figure, paired table and verdict
    python -m tools.claims all           # all of them, and docs/claims.md; hours. It goes on where it stopped
    python -m tools.claims page          # docs/claims.md and its figures anew, from results/claims.json

`--held_out` runs the held-out seeds instead of the reported ones. The verdict is the same rule for all claims:
*shown* if the 95% interval of the paired difference excludes 0 in the claimed direction and the mean exceeds the
margin, *opposite* if it excludes 0 in the other direction, else *not shown here*.
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

from engine.base import UserError
from engine.runfolder import read_jsonl
from tools import compare, plot
from tools.claim_records import CLAIMS, REGIMES, VOTES, Claim

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results/claims.json"
RUNS = ROOT / "runs/claims"
SIZES = (8, 16, 32)  # votes that are counted, of 64; claims are judged at 16
SUBSETS = 8          # random subsets of that size per problem


# ------------------------------------------ reading a run ---------------------------------------------------
def value(folder: Path, metric: str, start: bool = False) -> float:
    """A finished run's metric.

    end NAME: in the last evaluation; last NAME: mean of the last five steps; mean NAME: of all steps; with
    start, the first evaluation or step. Of batch_pass@1: kept, the last ten steps less the best ten in a row;
    late NAME, the mean of the last fifth less that of the middle fifth; collapse, the first step from which ten
    steps' mean is below the start's evaluation by .05, or the number of steps plus one. sharpening: mean gain
    of the problems whose majority was right at the start, less that of the others."""
    kind, _, name = metric.partition(" ")
    lines = plot.read_metrics(folder)
    series = [line[name or "batch_pass@1"] for line in lines if (name or "batch_pass@1") in line]
    if kind == "sharpening":
        first, *_, last = read_jsonl(folder / "evaluations.jsonl")
        gains: dict[bool, list[float]] = {True: [], False: []}
        for before, after, right in zip(first["right"], last["right"], first["majority"]):
            gains[right].append(after - before)
        return fmean(gains[True]) - fmean(gains[False])
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
    return series[-1] if kind == "end" else fmean(series[-5:] if kind == "last" else series)


def command_of(claim: Claim, arm: str, seed: int) -> list[str]:
    script, *switches = arm.split()
    return [script, *REGIMES[claim.regime].split(), *switches, "--seed", str(seed)]  # the last of two counts


def folder_of(claim: Claim, arm: str, seed: int) -> Path:
    """Claims with the same regime and arm share a run."""
    return RUNS / f"{claim.regime}-{re.sub(r'[^a-z0-9_.]+', '-', arm.replace('.py', ''))}-seed{seed}"


def values_of(claim: Claim, arm: str, seeds) -> list[float]:
    """Of one arm; "start NAME" and a plain "start" read the first arm's runs, a number is itself."""
    if arm.startswith("start"):
        metric = arm.replace("start", "end") if " " in arm else claim.metric
        return [value(folder_of(claim, claim.arms[0], seed), metric, start=True) for seed in seeds]
    if ".py" in arm:
        return [value(folder_of(claim, arm, seed), claim.metric) for seed in seeds]
    return [float(arm)] * len(seeds)


# ------------------------------------------- the verdict ----------------------------------------------------
def verdict(mean: float, low: float, high: float, direction: int, margin: float) -> str:
    """From the 95% interval (low, high) of the paired difference."""
    below, above = (low, high) if direction > 0 else (-high, -low)
    if below > 0 and direction * mean > margin:
        return "shown"
    return "opposite" if above < 0 else "not shown here"


def judge(first: list[float], second: list[float], claim: Claim) -> dict:
    """Paired t over seeds. detectable: the smallest true difference that so many seeds would have found with
    90% power; p: two-sided, of `collapse`, whose values are censored, by Wilcoxon's signed ranks."""
    from scipy import stats
    differences = [a - b for a, b in zip(first, second, strict=True)]
    n, mean = len(differences), fmean(differences)
    error = stdev(differences) / math.sqrt(n)
    half = stats.t.ppf(.975, n - 1) * error
    p = 2 * stats.t.sf(abs(mean) / error, n - 1) if error else float(mean == 0)
    if claim.metric == "collapse":
        p = stats.wilcoxon(differences).pvalue if any(differences) else 1.0
    return dict(mean=mean, low=mean - half, high=mean + half, p=float(p), first=first, second=second,
                detectable=(stats.t.ppf(.975, n - 1) + stats.t.ppf(.9, n - 1)) * error,
                verdict=verdict(mean, mean - half, mean + half, claim.direction, claim.margin))


def holm(ps: dict[str, float]) -> dict[str, float]:
    """p values adjusted for their number (Holm 1979)."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(ps, key=ps.get)):
        largest = max(largest, min(1.0, ps[name] * (len(ps) - rank)))
        adjusted[name] = largest
    return adjusted


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
        raise UserError(f"results/claims.json has results of another record of {', '.join(other)}: the claim has "
                        "changed since its runs. Delete its entry there and run it again.")
    return results


def keep(results: dict, claim: Claim, part: str, judged: dict) -> None:
    results.setdefault(claim.id, dict(record=digest(claim)))[part] = judged
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def sentence(claim: Claim, result: dict) -> str:
    said = f"{result['mean']:+.3f}, 95% interval {result['low']:+.3f} to {result['high']:+.3f}"
    if result["verdict"] == "not shown here":
        said += f"; these runs would have found {result['detectable']:.3f} with 90% power"
    return f"{claim.id}, {claim.says} {result['verdict'].capitalize()}: {said}."


# ------------------------------------------ votes, no training ----------------------------------------------
def vote_row(classes: list, right: list[bool], entropies: list[float]) -> dict:
    """What each method would do with one vote; by the names that claims use. Values or None, and conditions."""
    import torch

    import ettrl
    import restrain
    import scrl
    import ttrl
    n, top = len(classes), ttrl.majority(classes)
    rewards, gold = ttrl.majority_reward(classes), classes[right.index(True)] if True in right else None
    won, share = top is not None and top == gold, classes.count(top) / n if top is not None else 0.0
    positive, gated = scrl.pseudo_labels(classes, entropies)
    _, ungated = scrl.pseudo_labels(classes, entropies, entropy_gate=False)
    factors = ettrl.reshape_advantages(torch.ones(n), torch.tensor(entropies))
    many = restrain.majority_count(classes) >= 3 * n / 16

    def average(values, wanted):
        chosen = [float(v) for v, w in zip(values, wanted) if w]
        return fmean(chosen) if chosen else None

    return {
        "right": won, "wrong": not won, "share": share, "clear": share >= .375, "unclear": share < .375,
        "many": many, "few": not many, "positive": positive is not None, "seen": gold is not None,
        "pass@1": fmean(right), "reward right": fmean(bool(r) == ok for r, ok in zip(rewards, right)),
        "advantage": float(ttrl.group_advantages(rewards).max()),
        "negative right": average([c != gold for c in gated], [True] * len(gated)),
        "ungated right": average([c != gold for c in ungated], [True] * len(ungated)),
        "gold negative": gold in gated if gold is not None else None,
        "gold ungated": gold in ungated if gold is not None else None,
        "entropy right": average(entropies, right), "entropy wrong": average(entropies, [not r for r in right]),
        "factor": average(factors, [c == top for c in classes])}


def measured(rows: list[dict], measure: str) -> float:
    """Mean of a name over these rows; "name | condition": over those where the condition holds; or a number."""
    if measure.replace(".", "").isdigit():
        return float(measure)
    name, _, condition = measure.partition(" | ")
    values = [row[name] for row in rows if (not condition or row[condition]) and row[name] is not None]
    return fmean(values) if values else math.nan


def judge_votes(problems: list[list[dict]], claim: Claim, resamples: int = 1000) -> dict:
    """Bootstrap over problems of the difference between the claim's two measures."""
    from scipy import stats
    draw, drawn = random.Random(1), []
    every = [row for rows in problems for row in rows]
    first, second = (measured(every, arm) for arm in claim.arms)
    for _ in range(resamples):
        rows = [row for rows in draw.choices(problems, k=len(problems)) for row in rows]
        drawn.append(measured(rows, claim.arms[0]) - measured(rows, claim.arms[1]))
    drawn = sorted(x for x in drawn if not math.isnan(x))
    if len(drawn) < resamples / 2:
        return {}  # no such votes, as SCRL's negative labels among 8
    low, high, error = drawn[int(.025 * len(drawn))], drawn[int(.975 * len(drawn))], stdev(drawn)
    p = 2 * stats.norm.sf(abs(first - second) / error) if error else 1.0
    return dict(mean=first - second, low=low, high=high, p=float(p), first=first, second=second,
                detectable=3.24 * error,  # 1.96 + 1.28 standard errors
                verdict=verdict(first - second, low, high, claim.direction, claim.margin))


def count_votes(options) -> dict[int, list[list[dict]]]:
    """{N: for each problem the rows of random subsets of N votes}, from one sampling of the start model."""
    from tools.explain import sample_votes
    sampled = sample_votes(options.model, options.dataset, options.n, 1, options.problems, options.prompt)
    draw, found = random.Random(1), {}
    for size in [size for size in SIZES if size < options.n or size == options.n]:
        found[size] = []
        for vote in sampled:
            found[size].append([])
            for _ in range(SUBSETS):
                chosen = draw.sample(range(options.n), size)
                parts = (vote.classes, vote.right, vote.entropies)
                found[size][-1].append(vote_row(*([part[i] for i in chosen] for part in parts)))
    return found


def draw_votes(found: dict[int, list[list[dict]]], out: Path) -> None:
    """Four panels: label accuracy over N, over the share, the advantage over the share, negatives' accuracy."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.4))
    rows = {size: [row for problem in problems for row in problem] for size, problems in found.items()}
    for axis, names in ((axes[0], ("reward right", "right | positive", "right", "pass@1")),
                        (axes[3], ("negative right", "ungated right"))):
        for name in names:
            axis.plot(list(rows), [measured(rows[size], name) for size in rows], marker="o", label=name)
        axis.set_xlabel("votes N")
        axis.legend(fontsize=8)
    largest = rows[max(rows)]
    bins = [(low / 8, [row for row in largest if low / 8 <= row["share"] < (low + 1) / 8]) for low in range(8)]
    bins = [(low, members) for low, members in bins if members]
    axes[1].bar([low + .06 for low, _ in bins], [measured(members, "right") for _, members in bins], width=.1)
    axes[2].plot([low + .06 for low, _ in bins], [measured(members, "advantage") for _, members in bins], "o-")
    for axis, title in zip(axes, ("how often labels and rewards are right",
                                  f"P(majority right) by its share, N = {max(rows)}",
                                  "GRPO's advantage of the majority, by share", "how often negative labels are right")):
        axis.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    pyplot.close(figure)


def votes(options) -> None:
    found = count_votes(options)
    records = [claim for claim in CLAIMS if claim.regime == VOTES]
    print("| id | claim | " + " | ".join(f"N = {size}" for size in found) + " | verdict at N = "
          f"{sorted(found)[len(found) // 2]} |\n|---|---|" + "---|" * (len(found) + 1))
    toy = not options.model and options.dataset == "toy/hard.jsonl"
    results = read_results()
    for claim in records:
        judged = {size: judge_votes(problems, claim) for size, problems in found.items()}
        cells = [f"{j['mean']:+.3f} ({j['low']:+.3f} to {j['high']:+.3f})" if j else "none" for j in judged.values()]
        main = judged[sorted(found)[len(found) // 2]]
        print(f"| {claim.id} | {claim.says} | {' | '.join(cells)} | {main.get('verdict', 'not testable here')} |")
        if toy and main:
            keep(results, claim, "reported", main)
    out = ROOT / "docs/images/claims/votes.png" if toy else Path("votes.png")
    draw_votes(found, out)
    print(f"Figure: {out}")


# ----------------------------------------------- runs -------------------------------------------------------
def run_claims(claims: list[Claim], held_out: bool, workers: int) -> None:
    """Their unfinished runs, then each one's result and sentence."""
    results, part = read_results(), "held_out" if held_out else "reported"
    for claim in claims:
        seeds = claim.held_out if held_out else claim.seeds
        if not claim.regime or claim.regime == VOTES or not seeds:
            continue
        arms = [arm for arm in claim.arms if ".py" in arm]
        jobs = {}
        for seed in seeds:
            for arm in arms:
                jobs[folder_of(claim, arm, seed)] = command_of(claim, arm, seed)
        todo = [folder for folder, command in jobs.items() if compare.state_of(folder, command) != "finished"]
        print(f"\n{claim.id}: {claim.says} ({claim.place})\nCompared: {' - '.join(claim.arms)}, {claim.metric}, "
              f"{claim.regime}, seeds {seeds[0]} to {seeds[-1]}; {len(todo)} of {len(jobs)} runs to do, about "
              f"{minutes(claim) * len(todo) / max(1, len(jobs)):.0f} core-minutes.", flush=True)
        compare.run_all(jobs, workers)
        judged = judge(*(values_of(claim, arm, seeds) for arm in claim.arms), claim)
        keep(results, claim, part, judged | dict(seeds=list(seeds)))
        print("| seed | " + " | ".join(claim.arms) + " |\n|---|---|---|")
        for seed, a, b in zip(seeds, judged["first"], judged["second"]):
            print(f"| {seed} | {a:.3f} | {b:.3f} |")
        print(sentence(claim, judged), flush=True)
        if not held_out:
            draw(claim, ROOT / f"docs/images/claims/{claim.id}.png")


MINUTES = dict(HARD8=.3, LONG8=2.7, HARD16=.8, PLAIN=.8, SLIPS=1.0, TREE=.3, DYN=.9)  # a run, on an idle core


def minutes(claim: Claim) -> float:
    """Core-minutes of both arms' reported runs."""
    if claim.regime == VOTES:
        return 1.0
    return MINUTES.get(claim.regime, 0.0) * len(claim.seeds) * sum(".py" in arm for arm in claim.arms)


def draw(claim: Claim, out: Path) -> None:
    """Left the metric (or, of an evaluation, the batch's pass@1) over the steps, thin lines the seeds; right
    the values that the verdict compares, a line for each seed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    _, _, name = claim.metric.partition(" ")
    name = "batch_pass@1" if not name or name.startswith("eval/") else name
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.5, 2.8), width_ratios=(2, 1))
    for arm, colour in zip(claim.arms, ("#0072B2", "#D55E00")):
        if ".py" not in arm:
            continue
        curves = [[line[name] for line in plot.read_metrics(folder_of(claim, arm, seed)) if name in line]
                  for seed in claim.seeds]
        for curve in curves:
            left.plot(range(1, len(curve) + 1), curve, color=colour, alpha=.25, linewidth=.7)
        means = [fmean(values) for values in zip(*curves)]
        left.plot(range(1, len(means) + 1), means, color=colour, linewidth=2, label=arm)
    pairs = zip(*(values_of(claim, arm, claim.seeds) for arm in claim.arms))
    for pair in pairs:
        right.plot((0, 1), pair, color="#555555", marker=".", linewidth=.8)
    right.set_xticks((0, 1), ["first", "second" if ".py" in claim.arms[1] else claim.arms[1].split()[0]])
    right.set_title(claim.metric.replace("eval/train/", ""), fontsize=9)
    left.set_title(f"{name}, {claim.regime}", fontsize=9)
    left.legend(fontsize=7)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=80)
    pyplot.close(figure)


def page() -> str:
    """docs/claims.md, from the records, the results and the template beside this file."""
    import jinja2
    results = read_results()
    reported = {claim.id: results.get(claim.id, {}).get("reported", {}) for claim in CLAIMS}
    adjusted = holm({name: result["p"] for name, result in reported.items() if result})
    counts: dict[str, int] = {}
    rows = []
    for claim in CLAIMS:
        result = reported[claim.id]
        said = result.get("verdict", "not run yet" if claim.regime else "not testable here")
        counts[said] = counts.get(said, 0) + 1
        rows.append(dict(claim=claim, result=result, held_out=results.get(claim.id, {}).get("held_out", {}),
                         verdict=said, holm=adjusted.get(claim.id), minutes=minutes(claim)))
    template = (ROOT / "tools/templates/claims.md").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    by_id = {row["claim"].id: row for row in rows}
    return environment.from_string(template).render(rows=rows, counts=counts, of=by_id, regimes=REGIMES) + "\n"


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.claims", description=__doc__, formatter_class=shape)
    parser.add_argument("what", nargs="+", help="list, votes, all, page, or the ids of claims")
    parser.add_argument("--held_out", action="store_true", help="the held-out seeds, 11 to 18")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    for_votes = parser.add_argument_group("votes, of another model or other problems")
    for_votes.add_argument("--model", default="", help="Hub id or folder; empty: the toy; smollm2")
    for_votes.add_argument("--dataset", default="toy/hard.jsonl", help="Hub id, short name or file")
    for_votes.add_argument("--prompt", default="system", help="as in the scripts")
    for_votes.add_argument("--problems", type=int, default=96, help="the first so many")
    for_votes.add_argument("--n", type=int, default=64, help="responses per problem, at least 8")
    options = parser.parse_args()
    by_id = {claim.id: claim for claim in CLAIMS}
    unknown = [name for name in options.what if name not in by_id and name not in ("list", "votes", "all", "page")]
    if unknown:
        parser.error(f"there is no claim {unknown[0]}; there are {', '.join(by_id)} (python -m tools.claims list).")
    try:
        if "list" in options.what:
            results = read_results()
            for claim in CLAIMS:
                found = results.get(claim.id, {}).get("reported", {}).get("verdict", "not run yet")
                found = found if claim.regime else "not testable here"
                print(f"{claim.id:6} {minutes(claim):5.1f} min  {found:18} {claim.says}")
        if "votes" in options.what or "all" in options.what:
            votes(options)
        chosen = CLAIMS if "all" in options.what else [by_id[name] for name in options.what if name in by_id]
        run_claims(chosen, options.held_out, max(1, options.workers))
        if {"all", "page"} & set(options.what):
            (ROOT / "docs/claims.md").write_text(page(), encoding="utf-8")
            print("Written: docs/claims.md")
    except UserError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
