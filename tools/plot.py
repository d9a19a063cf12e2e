"""metrics.jsonl of one or several runs -> one PNG.

    python -m tools.plot runs/a runs/b -o both.png
    python -m tools.plot runs/compare/*-seed* --benchmark toy_test --panels pass@1,pass@k,entropy -o three.png
    python -m tools.plot runs/examples/*-seed* --behind TTRL --panels pass@1,pass@k -o examples.png

Runs that differ only in their seed (folders NAME-seed1, NAME-seed2 ...) are drawn as one line, their mean,
with a band from the lowest to the highest. Panels without data are left out, so the same command serves the
toy and a run on GPUs. --panels draws any metric of docs/metrics.md: loss,agreeing/16,eval/toy/length.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from pathlib import Path

from engine.base import UserError
from engine.runfolder import json_object, numbers

# Panel -> title. pass@1, pass@k and maj@k are of one benchmark, with the largest k that all its runs have;
# the others are metrics of docs/metrics.md.
BENCHMARK_PANELS = {"pass@1": "pass@1", "pass@k": "pass@{k}", "maj@k": "maj@{k}"}
PANELS = {
    "label_accuracy": "label accuracy",
    "majority_accuracy": "majority accuracy",
    "majority_ratio": "majority ratio",
    "entropy": "token entropy (nats)",
    "entropy_right": "token entropy, right responses",
    "entropy_wrong": "token entropy, wrong responses",
    "distinct_answers": "different answers per prompt",
    "distinct": "distinct responses",
    "length": "response length (tokens)",
    "label_coverage": "prompts with a label (SCRL, RESTRAIN)",
    "negative_coverage": "SCRL: prompts with a negative label",
    "negative_accuracy": "SCRL: negative labels that are wrong answers",
    "token_ratio": "ETTRL: tokens, tree / parallel",
    "question_reward": "Dynamic RL: question reward",
    "question_entropy": "Dynamic RL: question entropy (nats)",
    "question_diversity": "Dynamic RL: question diversity",
    "answer_diversity": "Dynamic RL: answer diversity",
    "unique_answers": "Dynamic RL: unique answers",
    "unanimous": "Dynamic RL: unanimous questions"}
# Okabe and Ito's colours, told apart by colour-blind readers; the line styles serve black and white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933"]
STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 2, 1, 2))]
COLUMNS = 3


# ---------------------------------------------- reading --------------------------------------------------
def read_lines(folder: Path, name: str) -> list[dict]:
    """The JSON objects in the lines of one of a run's files, [] if there is none.

    What is none is skipped: a killed run leaves its last line half-written."""
    path = Path(folder) / name
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line for line in map(json_object, text.split("\n")) if line]


def read_metrics(folder: Path) -> list[dict]:
    """The numbers in the lines of a run's metrics.jsonl that have a step, [] if there are none."""
    lines = map(numbers, read_lines(folder, "metrics.jsonl"))
    return [line for line in lines if isinstance(line.get("step"), int)]


def read_runs(folders: list[Path]) -> dict[str, list[list[dict]]]:
    """{name without the seed: [lines of a run, ...]}. Raises UserError naming a folder without a run."""
    if not folders:
        raise UserError("no run to draw; give at least one run folder, for example runs/ttrl.")
    runs: dict[Path, list[list[dict]]] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"there is no folder '{folder}'; give the folder of a run.")
        lines = read_metrics(folder)
        if not lines:
            raise UserError(f"'{folder}' holds no run: it has no metrics.jsonl with a finished line.")
        name = re.sub(r"-seed\d+$", "", folder.resolve().name)
        runs.setdefault(folder.resolve().parent / name, []).append(lines)
    names = [path.name for path in runs]
    return {path.name if names.count(path.name) == 1 else str(path): seeds for path, seeds in runs.items()}


def evaluated(lines: list[dict]) -> dict[str, set[int]]:
    """{benchmark: the k of its pass@k} of one run, in the order of the run."""
    found: dict[str, set[int]] = {}
    for line in lines:
        for key in line:
            parts = re.fullmatch(r"eval/(.+)/pass@(\d+)", key)
            if parts:
                found.setdefault(parts[1], set()).add(int(parts[2]))
    return found


def choose_benchmark(runs: list[list[dict]], wanted: str = "") -> tuple[str, int]:
    """(benchmark, largest k that all runs with it have).

    The wanted one, else the first that all evaluated runs share, else the first; ("", 1) if nothing
    was evaluated. Raises UserError if no run has the wanted one."""
    tables = [table for table in map(evaluated, runs) if table]
    names = list(dict.fromkeys(name for table in tables for name in table))
    if wanted and wanted not in names:
        found = ", ".join(names) or "nothing"
        raise UserError(f"--benchmark is '{wanted}', but the runs were evaluated on {found}.")
    if not names:
        return "", 1
    by_all = set.intersection(*map(set, tables))
    shared = [name for name in names if name in by_all]
    chosen = wanted or (shared + names)[0]
    ks = set.intersection(*(table[chosen] for table in tables if chosen in table))
    return chosen, max(ks, default=1)


def series(lines: list[dict], metric: str, smooth: int = 1) -> dict[int, float]:
    """{step: value} of a metric, averaged over its last `smooth` values; NaN, null and texts are left out."""
    points = []
    for line in lines:
        value = line.get(metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            points.append((line["step"], value))
    averaged = {}
    for i, (step, _) in enumerate(points):
        last = [value for _, value in points[max(0, i + 1 - smooth):i + 1]]
        averaged[step] = sum(last) / len(last)
    return averaged


# ---------------------------------------------- drawing --------------------------------------------------
def titles_and_metrics(benchmark: str, k: int, only: list[str], logged: set[str]) -> list[tuple[str, str]]:
    """(title, metric) of every panel, or of those named in `only`, panels or logged metrics.

    Raises UserError naming an unknown one."""
    known = [*BENCHMARK_PANELS, *PANELS, *sorted(logged - PANELS.keys() - {"step"})]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UserError(f"--panels names '{unknown[0]}', but must be of {', '.join(known)}.")
    panels = []
    for name in only or [*BENCHMARK_PANELS, *PANELS]:
        if name not in BENCHMARK_PANELS:
            panels.append((PANELS.get(name, name), name))
        elif name == "pass@1" or k > 1:
            panels.append((BENCHMARK_PANELS[name].format(k=k) + f" on {benchmark}",
                           f"eval/{benchmark}/" + name.replace("@k", f"@{k}")))
    return panels


def values_of(panel: dict[str, list[dict[int, float]]]) -> list[float]:
    """All that is drawn in a panel."""
    values = []
    for seed in itertools.chain(*panel.values()):
        values += seed.values()
    return values


def one_by_one(curves: list[tuple[str, dict]], names: list[str], behind: str) -> list[tuple[str, dict]]:
    """Every panel once for each name, beside the one that stands behind all. Raises UserError without it."""
    if behind not in names:
        raise UserError(f"--behind is '{behind}', but must be of {', '.join(names)}.")
    single = []
    for (title, panel), name in itertools.product(curves, names):
        if name != behind and name in panel:
            single.append((f"{name}\n{title}", {n: panel[n] for n in (behind, name) if n in panel}))
    return single


def draw_panel(axis, title: str, panel: dict[str, list[dict[int, float]]], order: list[str],
               behind: str = "") -> None:
    """One line per name that the panel has: the mean over its seeds, at the steps that all have."""
    for i, name in enumerate(order):
        seeds = panel.get(name, [])
        steps = sorted(set.intersection(*map(set, seeds))) if seeds else []
        if not steps:
            continue
        columns = []
        for step in steps:
            columns.append([seed[step] for seed in seeds])
        mean = [sum(column) / len(column) for column in columns]
        colour, style = COLOURS[i % 8], STYLES[(i + i // 8) % 8]  # 64 pairs
        if behind:
            colour, style = ("#888888", "--") if name == behind else (COLOURS[0], "-")
        axis.plot(steps, mean, color=colour, linestyle=style, label=name, linewidth=1.6,
                  marker="." if len(steps) < 10 else None)
        if len(seeds) > 1:
            lowest, highest = list(map(min, columns)), list(map(max, columns))
            axis.fill_between(steps, lowest, highest, color=colour, alpha=0.15, linewidth=0)
    values = values_of(panel)
    if min(values) >= 0 and max(values) <= 1 and "entropy" not in title:
        axis.set_ylim(0, 1.02)
    axis.set_title(title, fontsize=8 if behind else 10)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.locator_params(axis="x", integer=True)


def plot(folders: list[Path], out: Path, benchmark: str = "", panels: list[str] | None = None,
         behind: str = "") -> None:
    """Draw these runs into a file; a panel for each of them, if one is to stand behind all others.

    Raises UserError if there is nothing to draw, OSError if the file cannot be written."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = read_runs(folders)
    every = list(itertools.chain(*runs.values()))  # lines of each run
    benchmark, k = choose_benchmark(every, benchmark)
    logged = set().union(*itertools.chain(*every))
    curves = []  # (title, {name: one {step: value} per seed})
    for title, metric in titles_and_metrics(benchmark, k, panels or [], logged):
        panel: dict[str, list[dict[int, float]]] = {}
        for name, seeds in runs.items():
            for lines in seeds:
                found = series(lines, metric, 1 if metric.startswith("eval/") else max(1, len(lines) // 20))
                if found:
                    panel.setdefault(name, []).append(found)
        flat = metric.endswith("_coverage") and len(set(values_of(panel))) < 2  # TTRL labels every prompt
        if panel and (panels or not flat):
            curves.append((title, panel))
    if not curves:
        raise UserError("the runs hold none of the metrics to draw; --panels chooses others.")
    curves = one_by_one(curves, list(runs), behind) if behind else curves
    columns, width, height = (5, 2, 1.6) if behind else (COLUMNS, 4, 2.7)  # inches
    rows = math.ceil(len(curves) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    for axis in axes.flat[len(curves):]:
        axis.axis("off")
    handles = {}
    for axis, (title, panel) in zip(axes.flat, curves):
        draw_panel(axis, title, panel, list(runs), behind)
        for handle, name in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(name, handle)
    for axis in axes.flat[max(0, len(curves) - columns):len(curves)]:  # the lowest panel of every column
        axis.set_xlabel("step", fontsize=9)
    names = [behind] if behind else [name for name in runs if name in handles]
    lines = [handles[name] for name in names]
    figure.legend(lines, names, loc="lower center", ncol=4, fontsize=9, frameon=False)
    legend_rows = math.ceil(len(names) / 4)
    figure.tight_layout(rect=(0, min(0.5, legend_rows * 0.3 / (height * rows)), 1, 1))
    kinds = figure.canvas.get_supported_filetypes()
    try:
        if Path(out).suffix.removeprefix(".") not in kinds:
            raise UserError(f"--out is '{out}', but must end in one of {', '.join(kinds)}.")
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=130)
    finally:
        pyplot.close(figure)


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.plot", description=__doc__, formatter_class=shape)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, each with a metrics.jsonl")
    parser.add_argument("-o", "--out", type=Path, default=Path("curves.png"))
    parser.add_argument("--benchmark", default="", help="whose pass@k to draw; default: the first of the run")
    parser.add_argument("--panels", default="", help="draw only these, for example pass@1,pass@k,entropy")
    parser.add_argument("--behind", default="", help="a panel for every other run, with this one in grey")
    options = parser.parse_args()
    panels = [name.strip() for name in options.panels.split(",") if name.strip()]
    try:
        plot(options.runs, options.out, options.benchmark, panels, options.behind)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"Error: --out is '{options.out}', which cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
    print(options.out)


if __name__ == "__main__":
    main()
