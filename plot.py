"""metrics.jsonl of one or several runs -> one PNG: python plot.py RUN [RUN ...] -o out.png

Runs that differ only in their seed are drawn as one line, their mean, with a band from the lowest to the highest.
Panels without data are left out, so the same command serves the toy and a run on eight GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

PANELS = [  # (title, metric; {eval} is the run's first benchmark, {max} its largest k)
    ("pass@1", "{eval}/pass@1"), ("pass@{k}", "{eval}/pass@{max}"), ("maj@{k}", "{eval}/maj@{max}"),
    ("label accuracy", "label_accuracy"), ("majority ratio", "majority_ratio"), ("token entropy (nats)", "entropy"),
    ("different answers per prompt", "distinct_answers"), ("distinct responses", "distinct"), ("response length (tokens)", "length")]
# Okabe and Ito's colours, told apart by colour-blind readers; the line styles tell them apart in black and white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933"]
STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 2, 1, 2))]


def read_run(folder: Path) -> tuple[str, list[dict]]:
    """(label without the seed, lines of metrics.jsonl). Raises ValueError naming the file where there are none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder of a run.")
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty.")
    label = folder.name.split("-seed")[0]
    return label, lines


def series(lines: list[dict], metric: str, smooth: int = 1) -> dict[int, float]:
    """{step: value} of a metric, averaged over the last `smooth` values."""
    points = [(line["step"], line[metric]) for line in lines if metric in line]
    return {step: sum(v for _, v in points[max(0, i + 1 - smooth):i + 1]) / min(i + 1, smooth) for i, (step, _) in enumerate(points)}


def plot(folders: list[Path], out: Path) -> None:
    """Draw the panels for these runs into `out`."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: dict[str, list[list[dict]]] = {}
    for folder in folders:
        label, lines = read_run(Path(folder))
        runs.setdefault(label, []).append(lines)
    curves = []  # (title, {label: [{step: value} per seed]})
    for title, metric in PANELS:
        panel = {}
        for label, seeds in runs.items():
            for lines in seeds:
                keys = [k for line in lines for k in line if k.startswith("eval/") and k.endswith("/pass@1")]
                benchmark = keys[0].removesuffix("/pass@1") if keys else "eval/none"
                ks = [int(k.rsplit("@", 1)[1]) for line in lines for k in line if k.startswith(benchmark + "/pass@")]
                largest = max(ks, default=1)
                name = metric.format(eval=benchmark, max=largest)
                found = series(lines, name, 1 if name.startswith("eval/") else max(1, len(lines) // 20))
                if found and not (largest == 1 and "@{max}" in metric):
                    panel.setdefault(label, []).append(found)
                    shown = title.format(k=largest) + (f" on {benchmark[5:]}" if "eval" in metric else "")
        if panel:
            curves.append((shown if "eval" in metric else title, panel))
    columns = 3
    rows = max(1, -(-len(curves) // columns))
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 2.7 * rows), squeeze=False)
    for axis, (title, panel) in zip(axes.flat, curves):
        for i, label in enumerate(runs):
            seeds = panel.get(label, [])
            steps = sorted(set.intersection(*(set(s) for s in seeds))) if seeds else []
            if not steps:
                continue
            mean = [sum(s[t] for s in seeds) / len(seeds) for t in steps]
            colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
            axis.plot(steps, mean, color=colour, linestyle=style, label=label, linewidth=1.6, marker="." if len(steps) < 10 else None)
            if len(seeds) > 1:
                axis.fill_between(steps, [min(s[t] for s in seeds) for t in steps], [max(s[t] for s in seeds) for t in steps],
                                  color=colour, alpha=0.15, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
        if panel and all(0 <= v <= 1 for seeds in panel.values() for s in seeds for v in s.values()) and "entropy" not in title:
            axis.set_ylim(0, 1.02)
    for axis in list(axes.flat)[len(curves):]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=9)
    handles = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.035 * -(-len(handles) // 4), 1, 1))
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, each with a metrics.jsonl")
    parser.add_argument("-o", "--out", type=Path, default=Path("curves.png"))
    options = parser.parse_args()
    try:
        plot(options.runs, options.out)
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    print(options.out)
