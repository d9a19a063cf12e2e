"""The pages' pictures, one for each idea, drawn from the scripts' own functions: docs/images/pictures/*.svg.

    python -m lab.pictures           # writes them all anew, in seconds; or into the folder that it is given

No number is typed in that a function of the project can give. What was measured is named where it stands.
"""

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

from answers import classes as equivalence_classes
import torch
import dynamic_rl
import ettrl
import evol_rl
import restrain
import scrl
import ttrl
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tools.report import STYLES

ROOT = Path(__file__).resolve().parent.parent
COLOUR = {name: colour for name, (colour, _) in STYLES.items()}
INK, GREY, PALE, GREEN, RED = "#222222", "#6b6b6b", "#e4e4e4", "#00724f", "#b34700"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "pictures", "axes.titlesize": 10, "legend.fontsize": 8.5,
         "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False}
FORK_POSITION = 0.27  # of the trunk, measured: `python -m lab.claims.claims ET1a`, the metric fork_position


def steps_of(script: str) -> dict[int, list[str]]:
    """{number of a step: its lines} of a script's main, 0: what stands before step 1."""
    text = (ROOT / f"{script}.py").read_text()
    steps, number = {0: []}, 0
    for line in text[text.index("def main("):text.index("\n\n    policy.save(")].splitlines():
        if begins := re.match(r" {8}# (\d)\. ", line):
            number = int(begins[1])
        steps.setdefault(number, []).append(line)
    return steps


def loop(axis: Axes) -> None:
    """The seven steps as ttrl.py's comments name them; a dot for every script that changes a step."""
    ours, others = steps_of("ttrl"), {name: steps_of(name) for name in STYLES if name not in ("gold", "ttrl")}
    for number in range(1, 8):
        angle = math.pi / 2 - 2 * math.pi * (number - 1) / 7
        x, y = 1.55 * math.cos(angle), math.sin(angle)
        name = re.match(r" *# \d\. (\w+)", ours[number][0])[1]
        axis.text(x, y, f"{number}. {name}", ha="center", va="center", fontsize=12, weight="bold",
                  bbox=dict(boxstyle="round,pad=0.5", facecolor="white", edgecolor=INK))
        changed = [script for script in others if others[script][number] != ours[number]]
        for k, script in enumerate(changed):
            axis.plot(x + 0.13 * (k - (len(changed) - 1) / 2), y - 0.22, "o", color=COLOUR[script],
                      fillstyle="none" if name == "Log" else "full")
        middle = angle - math.pi / 7  # an arrow halfway to the next step
        start, end = [(1.55 * math.cos(a), math.sin(a)) for a in (middle + 0.09, middle - 0.09)]
        axis.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color=GREY))
    for k, script in enumerate(others):
        axis.plot(-0.55, 0.42 - 0.17 * k, "o", color=COLOUR[script])
        axis.text(-0.43, 0.42 - 0.17 * k, f"{script}.py changes it", va="center")
    axis.text(0, -0.66, "no dot: all six files have\nttrl.py's lines, word for word;\n"
              "ring: it logs numbers of its own", ha="center")
    axis.set(xlim=(-2.1, 2.1), ylim=(-1.25, 1.2))
    axis.set_axis_off()


def vote(axis: Axes) -> None:
    """16 responses of an invented problem, their vote and TTRL's rewards."""
    votes, gold = {"42": 7, "36": 4, "40": 2, "12": 1, "7": 1, None: 1}, "36"
    answers = sum(([answer] * count for answer, count in votes.items()), [])
    advantages = ttrl.group_advantages(rewards := ttrl.majority_reward(equivalence_classes(answers)))
    for place, (answer, count) in enumerate(votes.items()):
        i = answers.index(answer)
        label = "the label\n" * (rewards[i] == 1) + "the right one\n" * (answer == gold)
        label += f"reward {rewards[i]:.0f}\nA = {advantages[i]:+.2f}"
        colour = GREEN if answer == gold else RED if rewards[i] == 1 else "#8a8a8a"
        axis.bar(place, count, color=colour)
        axis.text(place, count + 0.15, label, ha="center")
    axis.set_xticks(range(len(votes)), [answer or "no answer" for answer in votes])
    axis.set(ylabel="votes of 16", ylim=(0, 9.6), xlabel="answer")


def push(axis: Axes) -> None:
    """The winners' and the losers' advantage over the winners' share of 32 responses."""
    shares = torch.arange(1, 32) / 32
    ends = [ttrl.group_advantages((torch.arange(32) < 32 * f).float()) for f in shares]
    axis.plot(shares, ((1 - shares) / shares) ** 0.5, color=PALE, linewidth=6, label="sqrt((1 - f) / f)")
    axis.plot(shares, [a[0] for a in ends], "o", markersize=4, color=COLOUR["ttrl"], label="a winner's")
    axis.plot(shares, [a[-1] for a in ends], "x", markersize=4, color=GREY, label="a loser's")
    axis.set(xlabel="f, the winners' share of 32 responses", ylabel="advantage")
    axis.legend()


def bands(*axes: Axes) -> None:
    """Ten majority responses, four others, one invalid; their embeddings are directions in the plane."""
    angles = torch.tensor([0, 2, 9, 20, 33, 48, 62, 80, 100, 125, 27, 70, 150, 155, 0]).deg2rad()
    classes = [0] * 10 + [1, 1, 2, 3, None]
    embeddings = torch.stack([angles.cos(), angles.sin()], 1)
    rewards, plain = evol_rl.evol_rewards(classes, embeddings), evol_rl.majority_reward(classes)
    blocks = {"majority": list(range(10)), "minority": list(range(10, 14))}
    for (who, block), colour, other in zip(blocks.items(), (COLOUR["evol_rl"], GREY), ("TTRL", None)):
        u = evol_rl.novelty(embeddings @ embeddings.T, block, list(range(14)))
        axes[0].axhspan(min(rewards[block]), max(rewards[block]), color=PALE)
        for axis, shown in zip(axes, (torch.clone, evol_rl.group_advantages)):
            axis.plot(u, shown(rewards)[block], "o", color=colour, label=who)
            axis.plot(u, shown(plain)[block], "_", color=COLOUR["ttrl"], label=other)
    axes[0].axhline(rewards[-1].item(), color=RED, linestyle=":", label="invalid")
    for axis, name in zip(axes, ("reward", "advantage")):
        axis.set(xlabel="novelty u of the response", ylabel=name)
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 0.26), ncols=2)


def two_kinds(axis: Axes, points: dict[bool, list], colour: str, marker: str, names: tuple[str, str]) -> None:
    axis.scatter(*zip(*points[True]), s=11, color=colour, marker=marker, label=names[0])
    axis.scatter(*zip(*points[False]), s=11, color="#8a8a8a", marker="x", linewidths=0.8, label=names[1])
    axis.legend(loc="upper right")


def thresholds(left: Axes, right: Axes) -> None:
    """Left: which votes of 32 have a positive label. Right: which rare answers are negative ones."""
    n, labels, rare = 32, {True: [], False: []}, {True: [], False: []}
    for top in range(1, n + 1):
        for second in range(min(top, n - top) + 1):
            rest = list(range(2, 2 + n - top - second)) if second else [None] * (n - top)
            positive, _ = scrl.pseudo_labels([0] * top + [1] * second + rest, [0.3] * n)
            labels[positive is not None].append((top / n, second / n))
    for count in range(1, 8):
        for more in [tenth / 10 for tenth in range(-4, 5)]:
            entropies = [0.5 + more] * count + [0.5 - more * count / (n - count)] * (n - count)  # mean 0.5
            _, negatives = scrl.pseudo_labels([1] * count + [0] * (n - count), entropies)
            rare[1 in negatives].append((count / n, more))
    two_kinds(left, labels, COLOUR["scrl"], "o", ("it is the label", "no label: SCRL abstains"))
    two_kinds(right, rare, RED, "v", ("a negative label", "left alone"))
    left.set(xlabel="share of the top answer", ylabel="share of the second answer", ylim=(-0.02, 0.66))
    right.set(xlabel="share of an answer", ylabel="its entropy less the mean (nats)", ylim=(-0.45, 0.68))


def hedge(left: Axes, right: Axes) -> None:
    """Left: g over the share of the votes. Right: the push over the majority's votes, all others single."""
    shares, votes, kappa = torch.linspace(0, 1, 41), list(range(1, 16)), restrain.Args.kappa
    for sigma, line in ((0.25, ":"), (restrain.Args.sigma, "-"), (1.0, "--")):
        name = f"sigma {sigma}" + " (paper)" * (sigma == restrain.Args.sigma)
        left.plot(shares, restrain.gaussian_weight(shares, sigma), line, color=COLOUR["restrain"], label=name)
    left.set(xlabel="share of the votes", ylabel="g, a label's weight before their sum is 1")
    left.legend(loc="upper left")
    groups = [[0] * c + list(range(1, 17 - c)) for c in votes]
    hedged = [sum(restrain.restrain_advantages(classes)) for classes in groups]
    plain = [ttrl.group_advantages(ttrl.majority_reward(classes)) for classes in groups]
    for i, who, mark in ((0, "majority", "o"), (-1, "other", "v")):
        right.plot(votes, [a[i] for a in hedged], mark, markersize=5, color=COLOUR["restrain"], label=who)
        right.plot(votes, [a[i] for a in plain], ":", color=COLOUR["ttrl"], label=f"{who}, TTRL")
    border, arrow = hedged[votes.index(kappa)], dict(arrowstyle="->", color=GREY)
    said = f"{kappa} votes:\nmajority {border[0]:+.3f}\nothers {border[-1]:+.3f}"
    right.axvspan(0.5, kappa - 0.5, color=PALE)
    right.annotate(f"below kappa = {kappa}:\nall are pushed down", (1.5, -1.1), (0.7, -3.8), arrowprops=arrow)
    right.annotate(said, (kappa, -0.1), (4, -2.6), arrowprops=arrow)
    right.set(xlabel="votes of 16, all others single", ylabel="advantage", ylim=(-4, 4))
    right.legend(loc="upper right")


def forks(*axes: Axes) -> None:
    """A trunk of 100 tokens with the paper's forks and branches, forked halfway and where the toy forks."""
    trunk, b = SimpleNamespace(response_ids=range(100)), ettrl.Args.branches
    for axis, middle, who in zip(axes, (0.5, FORK_POSITION), ("Eq. 9 to 11 assume", "The toy, measured")):
        points = [ettrl.Fork(0, 0, round(100 * middle) + shift) for shift in (-10, 10)]
        branches = [[SimpleNamespace(response_ids=range(100 - t))] * b for *_, t in points]
        leaves = ettrl.tree_leaves(1, len(points), b)
        cost = ettrl.tree_cost([[trunk]], [[None] * leaves], points, branches)
        axis.plot([0, 100], [0, 0], color=INK, linewidth=4)
        for side, (*_, t) in zip((1, -1), points):
            for y in [side * (0.8 + 0.7 * k) for k in range(b)]:
                axis.plot([t, t + 6, 100], [0, y, y], color=COLOUR["ettrl"], linewidth=3)
            axis.plot(t, 0, "o", color=INK, markersize=9)
        axis.set_title(f"{who}: forks at {cost['fork_position']:.2f},\n"
                       f"{leaves} responses for {cost['token_ratio']:.0%} of the tokens")
        axis.set(xlabel="token of the trunk", yticks=[], ylim=(-2, 2))


def questions(left: Axes, right: Axes) -> None:
    """Left: R_q over p. Right: the parts of four questions' advantages, those of the page's example."""
    p = [k / 16 for k in range(17)]
    left.plot(p, [dynamic_rl.question_reward(x) for x in p], "o-", color=COLOUR["dynamic_rl"])
    left.set(xlabel="p, the share of 16 solutions that agree", ylabel="R_q", xticks=[0, 0.25, 0.5, 0.75, 1])
    rewards = (torch.tensor([dynamic_rl.question_reward(x) for x in (0.75, 1.0, 0.5, 0.0)]),
               dynamic_rl.question_diversity([[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4], [5, 6, 0, 0]]),
               dynamic_rl.answer_diversity([0, 0, 1, None]))
    names = "difficulty x 0.001", "question diversity x 0.1", "answer diversity x 1"
    for k, (name, colour) in enumerate(zip(names, (GREY, RED, COLOUR["dynamic_rl"]))):
        part = dynamic_rl.question_advantages(*[reward * (j == k) for j, reward in enumerate(rewards)])
        right.bar([i + 0.27 * (k - 1) for i in range(4)], part, 0.25, color=colour, label=name)
    right.set_xticks(range(4), ["a", "its copy", "other", "unsolved"])
    right.set(ylabel="part of the advantage", ylim=(-1.4, 2.3))
    right.legend()


# the panels of each picture, and its height in inches
PICTURES = {loop: (1, 4.6), vote: (1, 3.2), push: (1, 3.2), bands: (2, 3.2), thresholds: (2, 3.4),
            hedge: (2, 3.8), forks: (2, 2.8), questions: (2, 3.2)}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        for draw, (panels, height) in PICTURES.items():
            figure = Figure(figsize=(6.6, height), layout="constrained")
            axes = figure.subplots(1, panels, squeeze=False)[0]
            draw(*axes)
            for axis in axes:
                axis.axhline(0, color=GREY, linewidth=0.7, visible=axis.axison, zorder=0)
            figure.savefig(out / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/images/pictures")
