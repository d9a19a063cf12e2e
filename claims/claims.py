"""The papers' claims, tested side by side: votes of the start model, and pairs of runs, one switch apart.

    python -m claims.claims list     # every claim, its minutes, its verdict so far
    python -m claims.claims votes    # what labels are worth: the start model is sampled once, no training
    python -m claims.claims T4       # one claim (or several): its runs, figure, values and verdict
    python -m claims.claims all      # all of the toy's, then the pages: hours; goes on where it stopped
    python -m claims.claims page     # docs/claims.md and claims/README.md, from claims/results.json

A claim is a row of claims/claims.csv, committed before its runs. How verdicts are made: claims/README.md.
"""

from __future__ import annotations

import argparse
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
import pandas
import torch
from matplotlib import pyplot
from scipy import stats

import common
import ettrl
import restrain
import scrl
import ttrl
from engine.base import UserError
from engine.log import read_jsonl
from tools import compare, plot
from tools.explain import sample_votes

ROOT = Path(__file__).resolve().parent.parent
RESULTS, RUNS, IMAGES = ROOT / "claims/results.json", ROOT / "runs/claims", ROOT / "docs/images/claims"
SIZES, SUBSETS = (8, 16, 32), 8  # votes counted of those sampled, random subsets per problem; 16 is judged


@dataclass
class Claim:
    """A row of claims/claims.csv."""
    id: str
    says: str        # the paper's sentence
    place: str
    arms: list[str]  # commands; "start", the first arm's own; a number; of VOTES: two measures of `vote_row`
    regime: str      # of claims/regimes.csv; VOTES: no training, the unit is the problem; empty: not testable
    metric: str      # see `value`
    direction: int   # of first arm less second, as the paper has it
    margin: float    # what the mean must exceed, in the metric's unit
    seeds: list[int]
    held_out: list[int]
    note: str        # why it cannot be tested here, or what one must know
    here: str = ""   # what is tested of the sentence, in our regime
    lacks: str = ""  # the condition of the sentence that does not occur in these runs

    def sentence(self) -> str:
        """What the paper says, and what is tested of it."""
        return self.says + (f" Here: {self.here}." if self.here else "")


CLAIMS, REGIMES = [], pandas.read_csv(ROOT / "claims/regimes.csv", index_col="regime").to_dict("index")
for row in pandas.read_csv(ROOT / "claims/claims.csv", keep_default_na=False).to_dict("records"):
    row["arms"] = [row.pop("first"), row.pop("second")]
    row["seeds"], row["held_out"] = [list(map(int, row[name].split())) for name in ("seeds", "held_out")]
    CLAIMS.append(Claim(**row))


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
        gains = [after - before for before, after in zip(first["right"], last["right"])]
        wrong = [not right for right in first["majority"]]
        return fmean(compress(gains, first["majority"])) - fmean(compress(gains, wrong))
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


def folder_of(claim: Claim, arm: str, seed: int) -> Path:
    return RUNS / f"{claim.regime}-{re.sub(r'[^a-z0-9_.]+', '-', arm.replace('.py', ''))}-seed{seed}"


def jobs_of(claim: Claim, seeds: list[int]) -> dict[Path, list[str]]:
    """{folder: command} of its runs. Claims with the same regime and arm share them."""
    jobs = {}
    for seed, arm in product(seeds, [arm for arm in claim.arms if ".py" in arm]):
        script, *switches = arm.split()  # of an option given twice the last counts
        command = [script, *REGIMES[claim.regime]["flags"].split(), *switches, "--seed", str(seed)]
        jobs[folder_of(claim, arm, seed)] = command
    return jobs


def values_of(claim: Claim, arm: str, seeds) -> list[float]:
    """Value of one arm; "start" and "start NAME" read the first arm's runs, a number is itself."""
    start, _, name = arm.partition(" ")
    if start != "start" and ".py" not in arm:
        return [float(arm)] * len(seeds)
    runs = claim.arms[0] if start == "start" else arm
    metric = f"end {name}" if start == "start" and name else claim.metric
    return [value(folder_of(claim, runs, seed), metric, start == "start") for seed in seeds]


# ------------------------------------------- the verdict ----------------------------------------------------
def judged(claim: Claim, arms: dict, mean: float, low: float, high: float, least: float, p: float) -> dict:
    """A claim's result. low, high: the 95% interval; least: what would have been found with 90% power."""
    below, above = (low, high) if claim.direction > 0 else (-high, -low)
    shown = below > 0 and claim.direction * mean > claim.margin
    said = "shown" if shown else "opposite" if above < 0 else "not shown here"
    return dict(verdict=said, mean=mean, low=low, high=high, detectable=least, p=p) | arms


def judge(first: list[float], second: list[float], claim: Claim) -> dict:
    """Paired t over seeds; the p of `collapse`, whose values are censored, by Wilcoxon's signed ranks."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    test = stats.wilcoxon if claim.metric == "collapse" else stats.ttest_rel
    p = test(first, second).pvalue if any(differences) else 1.0
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
    ordered = pandas.Series(ps).sort_values()
    return (ordered * (len(ps) + 1 - ordered.rank(method="first"))).clip(upper=1).cummax().to_dict()


# ------------------------------------------- the results ----------------------------------------------------
def digest(claim: Claim) -> str:
    """Hash of what a result depends on: with another record it must be made again."""
    flags = REGIMES.get(claim.regime, {}).get("flags")
    record = [claim.arms, flags, claim.metric, claim.direction, claim.margin, claim.seeds, claim.held_out]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def read_results() -> dict[str, dict]:
    """{id: {record, reported, held_out}}. Raises UserError if a record has changed since its results."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    digests = {claim.id: digest(claim) for claim in CLAIMS}
    other = [name for name, result in results.items() if result["record"] != digests.get(name)]
    if other:
        raise UserError(f"claims/results.json has results of another record of {', '.join(other)}: the claim "
                        "has changed since its runs. Delete its entry there and run it again.")
    return results


def keep(claim: Claim, part: str, result: dict) -> None:
    results = read_results()
    results.setdefault(claim.id, dict(record=digest(claim)))[part] = result
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def run(claim: Claim, held_out: bool, workers: int) -> None:
    """Its unfinished runs, then its result, figure and sentence."""
    seeds = claim.held_out if held_out else claim.seeds
    jobs = jobs_of(claim, seeds)
    if not jobs:
        return
    print(f"\n{claim.id}, {claim.place}: {claim.sentence()}\nCompared: {' less '.join(claim.arms)}; "
          f"{claim.metric}; {claim.regime}; seeds {seeds[0]} to {seeds[-1]}; at most "
          f"{len(jobs) * REGIMES[claim.regime]['minutes']:.0f} core-minutes. {claim.note}", flush=True)
    compare.run_all(jobs, workers)
    result = judge(*(values_of(claim, arm, seeds) for arm in claim.arms), claim)
    keep(claim, "held_out" if held_out else "reported", result)
    for arm, values in zip(claim.arms, (result["first"], result["second"])):
        print(f"{arm:40} {' '.join(f'{x:.2f}' for x in values)}  mean {fmean(values):.3f}")
    print(f"{result['verdict'].capitalize()}: {result['mean']:+.3f}, 95% interval {result['low']:+.3f} to "
          f"{result['high']:+.3f}; {result['detectable']:.3f} would be found with 90% power.", flush=True)
    if not held_out:
        logged = plot.read_metrics(next(iter(jobs)))[-2]  # a step without an evaluation
        panels = [name for name in curves_of(claim) if name in logged]
        plot.plot(list(jobs), IMAGES / f"{figure_of(claim)}.png", panels=panels)


def curves_of(claim: Claim) -> list[str]:
    own = re.findall(r" (\w+)$", claim.metric)
    return list(dict.fromkeys(["batch_pass@1", "majority_ratio", "entropy", *own]))


def figure_of(claim: Claim) -> str:
    """The id of the first claim with the same runs and curves: one figure serves them all."""
    wanted = jobs_of(claim, claim.seeds)
    return next(c.id for c in CLAIMS if jobs_of(c, c.seeds) == wanted and curves_of(c) == curves_of(claim))


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
                keep(claim, "reported", result)
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
    """Every claim's record and, as far as it has run, what came out."""
    results, rows = read_results(), {}
    adjusted = holm({name: parts["reported"]["p"] for name, parts in results.items() if "reported" in parts})
    for claim in CLAIMS:
        parts = results.get(claim.id, {})
        verdict = parts.get("reported", dict(verdict="not run yet"))["verdict"]
        if claim.lacks or not claim.regime:
            verdict = "not testable here"
        minutes = len(jobs_of(claim, claim.seeds)) * REGIMES.get(claim.regime, dict(minutes=0))["minutes"]
        rows[claim.id] = dict(claim=claim, minutes=minutes, holm=adjusted.get(claim.id),
                              result=parts.get("reported"), held_out=parts.get("held_out"), verdict=verdict,
                              figure=figure_of(claim) if minutes else "")
    return rows


def pages() -> dict[Path, str]:
    """{path: text}, from the records, the results and the templates."""
    texts = jinja2.FileSystemLoader(ROOT / "claims/templates")
    jinja = jinja2.Environment(loader=texts, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                               undefined=jinja2.StrictUndefined)
    paths = ROOT / "docs/claims.md", ROOT / "claims/README.md"
    return {path: jinja.get_template(path.name).render(rows=page_rows(), regimes=REGIMES) for path in paths}


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m claims.claims", description=__doc__, formatter_class=shape)
    words = ["list", "votes", "all", "page", *[claim.id for claim in CLAIMS]]
    parser.add_argument("what", nargs="+", metavar="WHAT", choices=words, help="as above, or ids")
    parser.add_argument("--held_out", action="store_true", help="their held-out seeds, 11 to 18")
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
        if "votes" in options.what or "VOTES" in [claim.regime for claim in chosen] and not options.held_out:
            votes(options)
        for claim in chosen:
            run(claim, options.held_out, max(1, options.workers))
        if every or "page" in options.what:
            for path, text in pages().items():
                path.write_text(text, encoding="utf-8")
    except UserError as error:
        parser.exit(1, f"Error: {error}\n")


if __name__ == "__main__":
    main()
