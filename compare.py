"""All methods on the toy: same start, same number of steps and trained responses, three seeds; one table and one figure.

    python compare.py                       # or `make compare`: gold, TTRL, EVOL-RL, SCRL, RESTRAIN, ETTRL, Dynamic RL
    python compare.py --set ettrl           # ETTRL's two switches, each alone and both
    python compare.py --set dynamic         # Dynamic RL without answer diversity, without question diversity

Runs that are finished are kept, one that was cut off is resumed: call it again and it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import plot

SETS = {
    "main": {"gold GRPO": "ttrl.py --labels gold", "TTRL": "ttrl.py", "EVOL-RL": "evol_rl.py", "SCRL": "scrl.py",
             "RESTRAIN": "restrain.py", "ETTRL": "ettrl.py", "Dynamic RL": "dynamic_rl.py"},
    "ettrl": {"TTRL (parallel, none)": "ettrl.py --rollout parallel --advantage none", "EAR (parallel, res)": "ettrl.py --rollout parallel",
              "ETMR (etmr, none)": "ettrl.py --advantage none", "ETTRL (etmr, res)": "ettrl.py"},
    "dynamic": {"Dynamic RL": "dynamic_rl.py", "no answer diversity": "dynamic_rl.py --no-rda",
                "no question diversity": "dynamic_rl.py --no-rdq", "neither": "dynamic_rl.py --no-rda --no-rdq"}}
ROWS = {"pass@1": "eval/toy/pass@1", "pass@8": "eval/toy/pass@8", "pass@32": "eval/toy/pass@32", "maj@32": "eval/toy/maj@32",
        "distinct": "eval/toy/distinct", "length": "eval/toy/length", "pass@1 test": "eval/toy_test/pass@1",
        "pass@32 test": "eval/toy_test/pass@32", "label acc.": "label_accuracy", "entropy": "entropy",
        "answers": "distinct_answers",
        "unique ans.": "unique_answers", "question ent.": "question_entropy"}


def lines_of(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def run_all(variants: dict[str, str], seeds: list[int], steps: int, workers: int, root: Path) -> dict[str, list[Path]]:
    """Run what is missing, `workers` at a time, under one progress bar over all steps; returns the folders by name."""
    from tqdm import tqdm
    folders = {name: [root / f"{name}-seed{seed}" for seed in seeds] for name in variants}
    waiting = [(folder, command, seed) for seed_index, seed in enumerate(seeds) for name, command in variants.items()
               if not ((folder := folders[name][seed_index]) / "final").exists()]
    everything, running = [f for fs in folders.values() for f in fs], []
    with tqdm(total=steps * len(everything), desc="compare", unit="step") as bar:
        while waiting or running:
            while waiting and len(running) < workers:
                folder, command, seed = waiting.pop(0)
                folder.mkdir(parents=True, exist_ok=True)
                flags = ["--seed", str(seed), "--steps", str(steps), "--eval", "toy,toy_test", "--eval_every", "10",
                         "--eval_samples", "32", "--out", str(folder)]
                flags += ["--resume"] if (folder / "metrics.jsonl").exists() else []
                log = (folder / "log.txt").open("a")
                script, *options = command.split()
                process = subprocess.Popen([sys.executable, str(Path(__file__).parent / script), *options, *flags], stdout=log, stderr=log,
                                           env={**os.environ, "OMP_NUM_THREADS": "1"})
                running.append((process, folder))
            time.sleep(1)
            for process, folder in list(running):
                if process.poll() is not None:
                    running.remove((process, folder))
                    if process.returncode:
                        for other, _ in running:
                            other.terminate()
                        sys.exit(f"Error: a run failed; see {folder / 'log.txt'}")
            bar.n = sum(max((line["step"] for line in lines_of(f)), default=0) for f in everything)
            bar.set_postfix_str(", ".join(f.name for _, f in running))
            bar.refresh()
    return folders


def table(folders: dict[str, list[Path]]) -> str:
    """Mean and spread (standard deviation over the seeds) at the end; the first row is the model all start from.

    Figures of the benchmark are those of the last evaluation, the others means over the last ten steps."""
    def at(lines: list[dict], key: str, first: bool) -> float | None:
        values = [line[key] for line in lines if key in line]
        if not values:
            return None
        return values[0] if first else values[-1] if key.startswith("eval/") else statistics.fmean(values[-10:])

    keys = {title: key for title, key in ROWS.items() if any(key in line for fs in folders.values() for line in lines_of(fs[0]))}
    out = ["| | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
    start = lines_of(next(iter(folders.values()))[0])
    cell = lambda key, v: "" if v is None else f"{v:.1f}" if key.endswith("length") else f"{v:.2f}"  # noqa: E731
    first = [cell(key, at(start, key, True)) if key.startswith("eval/") else "" for key in keys.values()]
    out.append("| start | " + " | ".join(first) + " |")
    for name, runs in folders.items():
        row = []
        for key in keys.values():
            values = [v for f in runs if (v := at(lines_of(f), key, False)) is not None]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            row.append(cell(key, statistics.fmean(values)) + spread if values else "")
        out.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="main")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time (each uses one core)")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    options = parser.parse_args()
    found = run_all(SETS[options.set], options.seeds, options.steps, options.workers, options.out)
    text = table(found)
    figure = options.out / f"{options.set}.png"
    plot.plot([f for fs in found.values() for f in fs], figure)
    (options.out / f"{options.set}.md").write_text(text + "\n")
    print(text, f"\nFigure: {figure}", sep="\n")
