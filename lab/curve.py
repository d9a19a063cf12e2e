"""`python -m lab.curve` draws two pictures: curve.png for README.md, methods.png for docs/results.md.

toy/curve.csv has the runs, evaluated every five or ten steps; toy/results.csv what was not trained. A thin
line is a run, a thick one their mean."""

import csv
from statistics import fmean

import matplotlib.pyplot as plt
from PIL import Image

from lab.compare import ROOT, stored

# row: what the picture calls it, its colour, the height of its label
LABELS = {"gold labels": ("gold labels", "black", .98), "TTRL": ("majority: TTRL", "#0072b2", .89),
          "prompt": ("best prompt", "#707070", .79), "vote": ("vote of 16", "#9a6a00", .70),
          "random reward": ("a coin", "#d55e00", .09), "length reward": ("length", "#a03070", .0)}


PANELS = ("gold labels", "TTRL", "EVOL-RL", "SCRL", "RESTRAIN", "ETTRL", "Dynamic RL")


def untrained(row: str, toy: str) -> float:
    """Mean accuracy on the test problems of a row that is not trained."""
    return fmean(float(line["test"]) for line in stored() if (line["row"], line["toy"]) == (row, toy))


def runs(row: str, toy: str, every: int) -> list[tuple[list[int], list[float]]]:
    """A row's runs as (steps, accuracy on the test problems); at step 0 it is the base model's."""
    with (ROOT / "toy/curve.csv").open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if (line["row"], line["toy"]) == (row, toy)]
    found = []
    for line in lines:
        steps = [step for step in line if step.isdigit() and int(step) % every == 0]
        accuracies = [float(line[step]) for step in steps]
        found.append(([0, *map(int, steps)], [untrained("base", toy), *accuracies]))
    return found


def plot(axes, row: str, toy: str, colour: str, every: int = 5) -> list[float]:
    """Draw a row's runs and their mean, which is returned."""
    drawn = runs(row, toy, every)
    mean = [fmean(values) for values in zip(*(accuracies for _, accuracies in drawn), strict=True)]
    for steps, accuracies in drawn:
        axes.plot(steps, accuracies, color=colour, linewidth=.8)
    axes.plot(drawn[0][0], mean, color=colour, linewidth=3)
    axes.set(xlim=(0, 60), ylim=(-.03, 1.02), yticks=(0, .5, 1), yticklabels=("0%", "50%", "100%"))
    axes.spines[["top", "right"]].set_visible(False)
    return mean


def save(figure, name: str) -> None:
    """Write a picture with few colours: a third of the bytes."""
    figure.savefig(path := ROOT / "docs/images" / name)
    Image.open(path).quantize(64).save(path)


def controls() -> None:
    """README's picture: rewards beside each other on the uneven toy."""
    plt.rcParams["font.size"] = 20
    figure, axes = plt.subplots(figsize=(7.2, 5.4), dpi=90, layout="constrained")
    for row, (label, colour, height) in LABELS.items():
        if runs(row, "uneven", 5):
            end = plot(axes, row, "uneven", colour)[-1]
        else:  # not trained
            end = untrained(row, "uneven")
            axes.axhline(end, color=colour, linestyle="--", linewidth=2)
        axes.annotate(label, (60, end), (64, height), va="center", color=colour, annotation_clip=False,
                      arrowprops=dict(arrowstyle="-", color=colour, relpos=(0, .5), shrinkB=2))
    axes.text(13, .50, "thin: one run\ndashed: the toy model\nwithout training", color="#707070", va="top")
    axes.set_xlabel("steps of training")
    axes.set_title("Right answers to unseen problems,\nby what is rewarded in training", loc="left", size=20)
    save(figure, "curve.png")


def methods() -> None:
    """The picture of docs/results.md: a column for each method, a row for each toy."""
    plt.rcParams["font.size"] = 15
    figure, axes = plt.subplots(2, len(PANELS), figsize=(14, 5.4), dpi=90, layout="constrained", sharey=True)
    for toy, panels in zip(("uneven", "even"), axes, strict=True):
        for row, panel in zip(PANELS, panels, strict=True):
            for control, (line, colour) in dict(vote=("--", "#9a6a00"), prompt=(":", "#707070")).items():
                panel.axhline(untrained(control, toy), color=colour, linestyle=line, linewidth=1.5)
            end = plot(panel, row, toy, "black" if row == "gold labels" else "#0072b2", every=10)[-1]
            panel.text(58, .05, f"{end:.2f}"[1:], ha="right")
            panel.set(xticks=(0, 30, 60), title=row if toy == "uneven" else "")
        panels[0].set_ylabel(f"{toy} toy")
    figure.supxlabel("steps of training; dashed: the untrained model's vote, dotted: its best prompt; "
                     "the number: the mean at the end", size=14)
    save(figure, "methods.png")


if __name__ == "__main__":
    controls()
    methods()
