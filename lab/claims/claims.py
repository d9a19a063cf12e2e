"""The papers' claims, tested on the two toys: votes of the base model, and pairs of the leaderboard's rows.

    python -m lab.claims.claims list     # every claim and its verdict so far
    python -m lab.claims.claims votes    # what labels are worth: the base model is sampled once, no training
    python -m lab.claims.claims page     # docs/claims.md and this folder's README.md, from the stored rows

A claim is a row of claims.csv, committed before its runs. How verdicts are made: README.md.
Rows are trained and stored by lab.compare.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from statistics import fmean, stdev

import jinja2
import numpy
import torch
from matplotlib import pyplot
from scipy import stats

import common
import ettrl
import restrain
import scrl
import ttrl
from engine.base import UserError
from lab import compare
from tools.explain import sample_votes

ROOT = Path(__file__).resolve().parents[2]
RESULTS, IMAGES = ROOT / "lab/claims/votes.json", ROOT / "docs/images/claims"
TURNING = ROOT / "docs/images/turning.png"
SIZES, SUBSETS = (8, 16, 32), 8  # votes counted of those sampled, random subsets per problem; 16 is judged


@dataclass
class Claim:
    """A row of claims.csv."""
    id: str
    says: str        # the paper's sentence
    here: str        # what is tested of it
    place: str
    arms: list[str]  # rows of the leaderboard, "first step", a number; of VOTES: two measures of `vote_row`
    regime: str      # uneven, even; VOTES: no training, the unit is the problem
    metric: str      # a column of the leaderboard, or of lab.compare's CURVES
    direction: int   # of first arm less second, as the paper has it
    margin: float    # what the mean must exceed, in the metric's unit
    note: str        # what one must know

    def sentence(self) -> str:
        """What the paper says, and what is tested of it."""
        return f"{self.says} Here: {self.here}."


CLAIMS = []
for row in csv.DictReader(open(ROOT / "lab/claims/claims.csv", encoding="utf-8")):
    row["arms"] = [row.pop("first"), row.pop("second")]
    CLAIMS.append(Claim(**row | dict(direction=int(row["direction"]), margin=float(row["margin"]))))


# ------------------------------------------- a row's values ------------------------------------------------
def value(run: dict, metric: str, first: bool = False) -> float:
    """A run's metric: a share, "corrupted less learned", or the mean of a curve's last five steps; first: the
    curve's first step."""
    if metric == "corrupted less learned":
        return run["corrupted"] - run["learned"]
    return run[metric][0 if first else 1] if metric in compare.CURVES else run[metric]


def paired_values(claim: Claim, rows: dict[str, dict]) -> list[list[float]]:
    """[2, seeds] both arms' values, of the seeds that both have. A single run stands for every seed."""
    first, second = claim.arms
    runs, metric = rows[first]["runs"], claim.metric
    if second not in rows:
        values = [value(run, metric, first=True) if second == "first step" else float(second) for run in runs]
        return [[value(run, metric) for run in runs], values]
    others = {run["seed"]: run for run in rows[second]["runs"]}
    if len(others) == 1:
        others = {run["seed"]: rows[second]["runs"][0] for run in runs}
    runs = [run for run in runs if run["seed"] in others]
    pairs = [(value(run, metric), value(others[run["seed"]], metric)) for run in runs]
    return [list(values) for values in zip(*pairs)]


# ------------------------------------------- the verdict ----------------------------------------------------
def judged(claim: Claim, arms: dict, mean: float, low: float, high: float, least: float, p: float) -> dict:
    """A claim's result. low, high: the 95% interval; least: what would have been found with 90% power."""
    below, above = (low, high) if claim.direction > 0 else (-high, -low)
    is_shown = below > 0 and claim.direction * mean > claim.margin
    verdict = "shown" if is_shown else "opposite" if above < 0 else "not shown here"
    return dict(verdict=verdict, mean=mean, low=low, high=high, detectable=least, p=p) | arms


def judge(claim: Claim, rows: dict[str, dict]) -> dict:
    """Greedy answers: a bootstrap over runs and problems. Other metrics: paired t over seeds."""
    first, second = claim.arms
    if claim.metric in [name for name, *_ in compare.GREEDY]:
        runs = rows[first]["runs"]
        others = rows[second]["runs"] if second in rows else []
        differences = compare.paired(runs, others, claim.metric)
        if not others:  # a number
            bits = [compare.greedy(run, claim.metric) for run in runs]
            differences = numpy.array(bits) - float(second)
        mean, low, high = compare.crossed(differences)
        error = (high - low) / 3.92
        arms = dict(first=[fmean(compare.greedy(run, claim.metric)) for run in runs],
                    second=[fmean(compare.greedy(run, claim.metric)) for run in others] or [float(second)])
        p = 2 * stats.norm.sf(abs(mean) / error) if error else 1.0
        return judged(claim, arms, mean, low, high, 3.24 * error, float(p))
    arms = paired_values(claim, rows)
    differences = [a - b for a, b in zip(*arms, strict=True)]
    p = stats.ttest_rel(*arms).pvalue if any(differences) else 1.0
    t, power = stats.t.ppf([.975, .9], len(differences) - 1).tolist()
    mean, error = fmean(differences), float(stats.sem(differences))
    return judged(claim, dict(zip(("first", "second"), arms)), mean, mean - t * error, mean + t * error,
                  (t + power) * error, float(p))


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
    draw, rows_of = random.Random(1), {}
    for size in [size for size in SIZES if size <= options.n]:
        rows_of[size] = []
        for vote in sampled:
            responses = list(zip(vote.classes, vote.right, vote.entropies))
            drawn = [draw.sample(responses, size) for _ in range(SUBSETS)]
            rows_of[size].append([vote_row(*map(list, zip(*some))) for some in drawn])
    toy, results = not options.model and options.dataset == "toy", {}
    print(f"| id | claim | {' | '.join(f'N = {n}' for n in rows_of)} |\n|---|---|{'---|' * len(rows_of)}")
    for claim in [claim for claim in CLAIMS if claim.regime == "VOTES"]:
        cells = []
        for size, problems in rows_of.items():
            result = judge_votes(problems, claim)
            words = "{mean:+.3f} ({low:+.3f} to {high:+.3f}), {verdict}"
            cells.append(words.format(**result) if result else "no votes")
            if toy and size == 16 and result:
                results[claim.id] = result
        print(f"| {claim.id} | {claim.sentence()} | {' | '.join(cells)} |")
    if toy:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out = IMAGES / "votes.png" if toy else Path("votes.png")
    draw_votes(rows_of, out)
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


def draw_turning(stored: dict, out: Path) -> None:
    """The wrong majority of "fewer": over the steps of each run on both toys, and after training, on all
    models, by how often the base model's vote is right there."""
    colors = {"TTRL": "C0", "SCRL": "C1", "RESTRAIN": "C2", "gold labels": "0.6"}
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3), layout="constrained", sharey=True)
    for regime, kept in stored.items():
        if regime in compare.HEADINGS:  # another model, of no such phrase; other options
            continue
        votes = [fmean(compare.greedy(run, "fewer")) for run in kept["rows"]["vote"]["runs"]]
        for name, color in colors.items():
            runs = kept["rows"].get(name, dict(runs=[]))["runs"]
            ends = [fmean(compare.greedy(run, "fewer")) for run in runs]
            face = "none" if regime == "even" else color
            x = fmean(votes) + .006 * list(colors).index(name)  # beside each other
            axes[2].scatter([x] * len(ends), ends, edgecolors=color, facecolors=face, s=28)
            if regime in compare.REGIMES:
                axis = axes[list(compare.REGIMES).index(regime)]
                for i, shares in enumerate(run["fewer majorities"] for run in runs):
                    middles = [60 * (part + .5) / len(shares) for part in range(len(shares))]
                    axis.plot(middles, shares, color=color, label=None if i else name, linewidth=1.3)
                axis.set(title=f"the {regime} toy", xlabel="step", xlim=(0, 60), ylim=(-.03, 1.03))
    axes[0].set_ylabel('right on "fewer"')
    axes[1].legend(frameon=False, loc="center right", fontsize=8)
    axes[2].set(title="seven models (rings: even)", xlim=(.1, .85),
                xlabel='right on "fewer": vote of the base model')
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


# ------------------------------------------------ the page --------------------------------------------------
def page_rows() -> dict[str, dict]:
    """Every claim's record and, as far as its rows are stored, what came out."""
    stored = json.loads(compare.STORED.read_text(encoding="utf-8"))
    votes = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results = {}
    for claim in CLAIMS:
        rows = stored.get(claim.regime, dict(rows={}))["rows"]
        missing = [arm for arm in claim.arms if arm not in rows and not arm.replace(".", "").isdigit()]
        if claim.id in votes:
            results[claim.id] = votes[claim.id]
        elif missing in ([], ["first step"]) and claim.regime != "VOTES":
            results[claim.id] = judge(claim, rows)
    adjusted = holm({name: result["p"] for name, result in results.items()})
    return {claim.id: dict(claim=claim, result=results.get(claim.id), holm=adjusted.get(claim.id),
                           verdict=results.get(claim.id, dict(verdict="not run yet"))["verdict"])
            for claim in CLAIMS}


def pages() -> dict[Path, str]:
    """{path: text}, from the records, the results and the templates."""
    texts = jinja2.FileSystemLoader(ROOT / "lab/claims/templates")
    jinja = jinja2.Environment(loader=texts, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                               undefined=jinja2.StrictUndefined)
    paths = ROOT / "docs/claims.md", ROOT / "lab/claims/README.md"
    return {path: jinja.get_template(path.name).render(rows=page_rows()) for path in paths}


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    name = "python -m lab.claims.claims"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=shape)
    parser.add_argument("what", choices=["list", "votes", "page"], help="as above")
    parser.add_argument("--model", default="", help="of votes: Hub id or folder; empty: the toy; smollm2")
    parser.add_argument("--dataset", default="toy", help="of votes: Hub id, short name or file")
    parser.add_argument("--prompt", default="system", help="of votes: as in the scripts")
    parser.add_argument("--problems", type=int, default=256, help="of votes: the first so many")
    parser.add_argument("--n", type=int, default=32, help="of votes: responses per problem, at least 16")
    options = parser.parse_args()
    if options.n < 16:
        parser.error(f"--n is {options.n}, but must be at least 16, the votes that are judged.")
    try:
        if options.what == "list":
            for row in page_rows().values():
                print(f"{row['claim'].id:5} {row['verdict']:17} {row['claim'].sentence()}")
        elif options.what == "votes":
            votes(options)
        else:
            for path, text in pages().items():
                path.write_text(text, encoding="utf-8")
            draw_turning(json.loads(compare.STORED.read_text(encoding="utf-8")), TURNING)
    except UserError as error:
        parser.exit(1, f"Error: {error}\n")


if __name__ == "__main__":
    main()
