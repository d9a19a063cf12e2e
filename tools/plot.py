"""metrics.jsonl of one or several runs -> one figure.

    python -m tools.plot runs/a                                    # writes runs/a/curves.png
    python -m tools.plot runs/a runs/b -o both.png
    python -m tools.plot runs/compare/*-seed* --benchmark toy_test --panels pass@1,pass@k,loss -o three.png

Runs that differ only in their seed (folders NAME-seed1, NAME-seed2 ...) are one line, their mean, above thin
lines, the seeds. The default panels are those of PANELS that the runs have, and every metric
that no script of this repository logs, such as a fork's own; --panels draws any metric of docs/metrics.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path

from engine.base import UserError
from engine.log import read_metrics

# pass@k and maj@k are those of the benchmark's largest k.
PANELS = """pass@1 greedy pass@k maj@k reward label_accuracy majority_accuracy majority_ratio flip_rate
    entropy distinct_answers distinct length label_coverage negative_accuracy token_ratio question_reward
    question_diversity answer_diversity""".split()
# Logged by the scripts, too, but drawn only if --panels names it.
NOT_DRAWN = """step loss kl clip_fraction grad_norm lr skipped_updates logp_diff_max logp_diff_mean truncated
    answered batch_pass@1 entropy_right entropy_wrong zero_variance positive_advantage reward_accuracy
    negative_coverage fork_position filtered no_question unanimous unique_answers question_entropy
    question_length prompt_weight peak_memory_gib""".split()
GROUPS = ("eval/", "seconds/", "tokens_per_second/", "agreeing/")
STYLES = {  # a method's colour (Okabe and Ito's) and line style, in every figure
    "gold": ("#000000", "-"),
    "ttrl": ("#0072B2", "-"),
    "evol_rl": ("#D55E00", "--"),
    "scrl": ("#009E73", "-."),
    "restrain": ("#CC79A7", ":"),
    "ettrl": ("#E69F00", (0, (5, 1))),
    "dynamic_rl": ("#56B4E9", (0, (3, 1, 1, 1)))}
OTHERS = [(colour, line) for line in ("--", ":", "-.", "-") for colour, _ in STYLES.values()]
COLUMNS = 3


# ---------------------------------------------- reading --------------------------------------------------
def name_of(folder: Path) -> str:
    """A run's name without its seed."""
    return re.sub(r"-seed\d+$", "", Path(folder).resolve().name)


def read_runs(folders: list[Path]) -> dict[str, list[list[dict]]]:
    """{name without the seed: [lines of a run, ...]}. Raises UserError naming a folder without a run."""
    runs: dict[str, list[list[dict]]] = {}
    for folder in map(Path, folders):
        lines = read_metrics(folder)
        if not lines:
            raise UserError(f"'{folder}' holds no run: it has no metrics.jsonl with a finished line.")
        runs.setdefault(name_of(folder), []).append(lines)
    return runs


def method_of(folder: Path) -> str:
    """What gives a run its colour and line: its script, or gold if it trains on gold labels; maybe empty."""
    record = Path(folder) / "run.json"
    about = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    return "gold" if about.get("args", {}).get("labels") == "gold" else about.get("script", "")


def metric_of(panel: str, names: list[str], benchmark: str) -> str:
    """The metric of a panel of runs that log these names; an empty benchmark is the first of them."""
    if panel not in ("pass@1", "greedy", "pass@k", "maj@k"):
        return panel
    found = [re.fullmatch(r"eval/(.+)/pass@(\d+)", name) for name in names]
    sizes = [match.groups() for match in found if match]
    benchmark = benchmark or [*(name for name, _ in sizes), "none"][0]
    largest = max([int(k) for name, k in sizes if name == benchmark], default=1)
    return f"eval/{benchmark}/{panel.replace('@k', f'@{largest}')}"


def curves(runs: dict[str, list[list[dict]]], panels: list[str], benchmark: str = "") -> dict[str, dict]:
    """{metric: {name: [{step: value} of a seed, ...]}} of these panels or, without any, of the default ones.

    Raises UserError if the runs log none of them, or not one that is named."""
    names: dict[str, None] = {}  # in the order of the log
    for lines in itertools.chain(*runs.values()):
        for line in lines:
            names |= dict.fromkeys(line)
    own = [name for name in names if name not in PANELS + NOT_DRAWN and not name.startswith(GROUPS)]
    metrics = dict.fromkeys(metric_of(panel, list(names), benchmark) for panel in panels or PANELS + own)
    unknown = [metric for metric in metrics if metric not in names]
    if unknown and (panels or len(unknown) == len(metrics)):
        raise UserError(f"no run has {unknown[0]}; they have {', '.join(sorted(names)) or 'nothing'}.")
    found: dict[str, dict] = {}
    for metric in [metric for metric in metrics if metric in names]:
        found[metric] = {name: [] for name in runs}
        for name, seeds in runs.items():
            for lines in seeds:
                values = {line["step"]: line[metric] for line in lines if metric in line}
                found[metric][name] += [values] if values else []
    return found


def styles(names: list[str], methods: dict[str, str] | None = None) -> dict[str, tuple]:
    """{name: (colour, line style)}: those of the method that methods[name], or the name itself, begins with.

    A method's second name has its colour and another line; a name without a method has what is still free."""
    found: dict[str, tuple] = {}
    for name in names:
        key = re.sub(r"\W", "_", ((methods or {}).get(name) or name).lower())
        own = [style for method, style in STYLES.items() if key.startswith(method)]
        own += [other for other in OTHERS if own and other[0] == own[0][0]]
        free = [style for style in own + OTHERS if style not in found.values()]
        found[name] = [*free, *OTHERS][0]
    return found


# ---------------------------------------------- drawing --------------------------------------------------
def draw_panel(axis, title: str, drawn: dict[str, list[dict[int, float]]], style: dict[str, tuple]) -> None:
    """A line per name, the mean over its seeds at the steps that all have; thin lines: seeds."""
    for name, seeds in drawn.items():
        steps = sorted(set.intersection(*map(set, seeds))) if seeds else []
        columns = []
        for step in steps:
            columns.append([seed[step] for seed in seeds])
        colour, line = style[name]
        axis.plot(steps, list(map(statistics.fmean, columns)), color=colour, linestyle=line, label=name,
                  marker="." if len(steps) < 10 else None)
        for seed in seeds if len(seeds) > 1 else []:
            axis.plot(list(seed), list(seed.values()), color=colour, alpha=0.3, linewidth=0.6)
    axis.set_title(title.removeprefix("eval/").replace("_", " "), fontsize=10)
    axis.set_xlabel("step", fontsize=8)
    axis.grid(alpha=0.3)
    axis.locator_params(axis="x", integer=True)


def plot(folders: list[Path], out, benchmark: str = "", panels: list[str] | None = None) -> None:
    """Draw these runs into a file, or anything else that matplotlib writes to.

    Raises UserError if there is nothing to draw, OSError if the file cannot be written."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, methods = read_runs(folders), {name_of(folder): method_of(folder) for folder in folders}
    found, style = curves(runs, panels or [], benchmark), styles(list(runs), methods)
    rows = math.ceil(len(found) / COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 2.7 * rows), squeeze=False)
    for axis in axes.flat[len(found):]:
        axis.axis("off")
    for axis, (metric, drawn) in zip(axes.flat, found.items()):
        draw_panel(axis, metric, drawn, style)
    lines, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, math.ceil(len(runs) / 4) * 0.1 / rows, 1, 1))
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.plot", description=__doc__, formatter_class=shape)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("-o", "--out", type=Path, help="default: curves.png in the first run's folder")
    parser.add_argument("--benchmark", default="", help="whose pass@k to draw; default: the first of the run")
    parser.add_argument("--panels", default="", help="draw only these, for example pass@1,pass@k,entropy")
    options = parser.parse_args()
    out = options.out or options.runs[0] / "curves.png"
    try:
        plot(options.runs, out, options.benchmark, [name for name in options.panels.split(",") if name])
    except (UserError, OSError, ValueError) as error:  # ValueError: matplotlib cannot write such a file
        sys.exit(f"Error: {error}")
    print(out)


if __name__ == "__main__":
    main()
