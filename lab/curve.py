"""The picture of README.md: `python -m lab.curve` draws docs/images/curve.png.

toy/curve.csv has the runs, toy/results.csv what was not trained. A thin line is a run on the uneven
toy, evaluated every five steps, a thick one their mean."""

import csv
from statistics import fmean

import matplotlib.pyplot as plt
from PIL import Image

from lab.compare import ROOT, stored

# row: what the picture calls it, its colour, the height of its label
LABELS = {"gold labels": ("gold labels", "black", .98), "TTRL": ("majority: TTRL", "#0072b2", .89),
          "prompt": ("best prompt", "#707070", .79), "vote": ("vote of 16", "#9a6a00", .70),
          "random reward": ("a coin", "#d55e00", .09), "length reward": ("length", "#a03070", .0)}


def draw() -> None:
    """Write the picture."""
    rows = [line for line in stored() if line["toy"] == "uneven"]
    base = fmean(float(line["test"]) for line in rows if line["row"] == "base")
    with (ROOT / "toy/curve.csv").open(encoding="utf-8", newline="") as file:
        (_, _, *steps), *runs = csv.reader(file)
    plt.rcParams["font.size"] = 20
    figure, axes = plt.subplots(figsize=(7.2, 5.4), dpi=90, layout="constrained")
    for name, (label, colour, height) in LABELS.items():
        lines = [[base, *map(float, values)] for row, _, *values in runs if row == name]
        mean = [fmean(values) for values in zip(*lines)]
        for values, width in [*[(line, .8) for line in lines], (mean, 3)] if lines else []:
            axes.plot([0, *map(int, steps)], values, color=colour, linewidth=width)
        if not lines:  # not trained
            mean = [fmean(float(line["test"]) for line in rows if line["row"] == name)]
            axes.axhline(mean[0], color=colour, linestyle="--", linewidth=2)
        axes.annotate(label, (60, mean[-1]), (64, height), va="center", color=colour, annotation_clip=False,
                      arrowprops=dict(arrowstyle="-", color=colour, relpos=(0, .5), shrinkB=2))
    axes.text(13, .50, "thin: one run\ndashed: the toy model\nwithout training", color="#707070", va="top")
    axes.set(xlim=(0, 60), ylim=(-.03, 1.02), xlabel="steps of training", yticks=(0, .5, 1),
             yticklabels=("0%", "50%", "100%"))
    axes.set_title("Right answers to unseen problems,\nby what is rewarded in training", loc="left", size=20)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path := ROOT / "docs/images/curve.png")
    Image.open(path).quantize(64).save(path)  # a third of the bytes


if __name__ == "__main__":
    draw()
