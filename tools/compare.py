"""All methods on the toy: same start, same steps and responses, five seeds, beside what needs no training.

    python -m tools.compare                        # or `make compare`: the controls and the six methods
    python -m tools.compare --set examples         # TTRL and the forks in examples/
    python -m tools.compare --set smollm2          # the first set's on a real model, hours: docs/measured.md

The row "start" holds three controls: greedy (temperature 0), sampled (pass@1) and its vote (maj@k). Ctrl-C
ends the runs after a checkpoint; called again, it resumes them and keeps those that are finished.
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

import evaluate
from engine import log
from engine.base import UserError
from tools import plot, report

ROOT = Path(__file__).resolve().parent.parent
TOY = "--eval toy,toy_test --eval_every 0 --eval_samples 32"
REAL = "--model smollm2 --eval smollm2,smollm2_test,smollm2_ood --eval_every 0 --eval_samples 16"
SETS = {  # set -> name -> command, from the repository root
    "main": {
        "gold GRPO": "ttrl.py --labels gold",
        "random reward": "random_reward.py",
        "TTRL": "ttrl.py",
        "EVOL-RL": "evol_rl.py",
        "SCRL": "scrl.py",
        "RESTRAIN": "restrain.py",
        "ETTRL": "ettrl.py",
        "Dynamic RL": "dynamic_rl.py"},
    "examples": {"TTRL": "ttrl.py"}}
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.diff"))
SETS["examples"] |= {name: f"{name}.py" for name in EXAMPLES}
SETS["smollm2"] = SETS["main"]
# Columns of the table; those that no row has are left out.
COLUMNS = """eval/toy_test/greedy eval/toy_test/pass@1 eval/toy/greedy eval/toy/pass@1 eval/toy_test/pass@32
    eval/toy_test/maj@32 eval/smollm2_test/greedy eval/smollm2_test/pass@1 eval/smollm2/greedy
    eval/smollm2/pass@1 eval/smollm2_test/pass@16 eval/smollm2_test/maj@16 eval/smollm2_ood/greedy
    eval/smollm2_ood/pass@1 learned kept corrupted never flip_rate eval/toy_test/length
    eval/smollm2_test/length""".split()


# ----------------------------------------------- running --------------------------------------------------
def is_finished(folder: Path, command: list[str]) -> bool:
    """Whether the folder holds the finished run of this command. Raises UserError if it holds another run, of
    other arguments or before its script, common.py, engine/ or toy/ changed."""
    if not (folder / "run.json").is_file():
        return False
    script, *flags = command
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    given = [word for word in run.get("command", []) if word not in ("--resume", "--out", str(folder))]
    if given[1:] != flags or run.get("code") != log.code_digest(ROOT / script):
        raise UserError(f"{folder} holds a run of other code or arguments; delete it or give another --out.")
    return (folder / "final").exists()


def start(folder: Path, command: list[str]) -> subprocess.Popen:
    """Begin a run or continue it, in a session of its own: Ctrl-C reaches it through run_all alone."""
    log = folder.parent / "logs" / f"{folder.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [*command, "--out", str(folder), *(["--resume"] if (folder / "run.json").is_file() else [])]
    with log.open("a") as file:
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=file, stderr=file,
                                start_new_session=True, env=os.environ | dict(OMP_NUM_THREADS="1"))


def run_all(jobs: dict[Path, list[str]], workers: int) -> None:
    """Run the commands {folder: command} that are not finished, `workers` at a time.

    Raises UserError if one fails, or if a folder holds another run. However this ends, no run is left behind:
    each is sent SIGTERM, on which it finishes its step and writes a checkpoint."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    waiting = [folder for folder, command in jobs.items() if not is_finished(folder, command)]
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
def rows_of(folders: dict[str, list[Path]]) -> dict[str, list[dict[str, float]]]:
    """{name: each seed's last evaluation, with what became of its majorities}; start: TTRL's first ones."""
    rows: dict[str, list[dict]] = {"start": []} | {name: [] for name in folders}
    for name, folder in [(name, folder) for name, seeds in folders.items() for folder in seeds]:
        first, *_, last = [line for line in plot.read_metrics(folder) if log.has_evaluation(line)]
        rows[name].append(last | report.fates(log.read_jsonl(folder / "votes.jsonl")))
        rows["start"] += [first] if name == "TTRL" else []
    return rows


def cell(seeds: list[dict[str, float]], column: str) -> str:
    """Mean over the seeds and, of more than one, the standard deviation."""
    values = [row[column] for row in seeds if column in row]
    spread = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}" if values else ""


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """Markdown of {name: {metric: value} of each seed}."""
    columns = [column for column in COLUMNS if column in set().union(*sum(rows.values(), []))]
    lines = [f"| | {' | '.join(columns)} |".replace("eval/", ""), "|---" * (len(columns) + 1) + "|"]
    for name, seeds in rows.items():
        cells = [cell(seeds, column) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.compare", description=__doc__, formatter_class=shape)
    parser.add_argument("--set", choices=SETS, default="main")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 1 to 5, of smollm2 1 to 3")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--steps", type=int, help="default: the scripts' own")
    parser.add_argument("--out", type=Path, help="default: runs/compare, of smollm2 runs/compare-smollm2")
    options = parser.parse_args()
    real = options.set == "smollm2"
    flags = (REAL if real else TOY) + (f" --steps {options.steps}" if options.steps else "")
    out = (options.out or Path("runs/compare-smollm2" if real else "runs/compare")).resolve()
    seeds, jobs, folders = options.seeds or range(1, 4 if real else 6), {}, {}
    for name, command in SETS[options.set].items():
        folders[name] = [out / f"{name}-seed{seed}" for seed in seeds]
        for seed, folder in zip(seeds, folders[name]):
            jobs[folder] = f"{command} --seed {seed} {flags}".split()
    forks = {command[0] for command in jobs.values()} & {f"{name}.py" for name in EXAMPLES}
    subprocess.run(["make", *forks], cwd=ROOT, check=True)
    try:
        run_all(jobs, max(1, options.workers))
    except UserError as error:
        sys.exit(f"Error: {error}")
    rows = rows_of(folders)
    controls = {"start": rows.pop("start")}
    if not real:  # greedy, with the beginning of a worked solution put before the response
        worked = evaluate.main(evaluate.Args(benchmarks="toy,toy_test", preset="toy", temperature=0.0,
                                             prompt="examples/prompts/worked.txt"))
        greedy = {f"eval/{name}/greedy": scores["pass@1"] for name, scores in worked.items()}
        controls["start, worked manner prefilled"] = [greedy]
    text = table(controls | rows)
    (out / f"{options.set}.md").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\nCurves: python -m tools.plot {out}/*-seed*")


if __name__ == "__main__":
    main()
