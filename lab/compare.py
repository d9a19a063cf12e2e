"""An idea beside six papers and their controls: five runs on a toy, then one row with its intervals.

    python -m lab.compare my_idea.py                   # trains seeds 1 to 5, then prints the table
    python -m lab.compare --on even my_idea.py         # on the toy where nothing corrects the vote
    python -m lab.compare "my_idea.py --kappa 4"       # with switches; a fork of examples/ is made first

The stored rows are toy/results.csv; what they and the intervals mean: docs/leaderboard.md. Ctrl-C ends the
runs after a checkpoint; called again, the command resumes them and keeps those that are finished. Do not edit
the script before its last seed has started: then the command stops, since a row is of one code. Write the
next idea into another file.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import tyro
from scipy import stats
from tyro.conf import Positional

from engine.base import UserError
from engine.run_folder import code_digest, has_evaluation, read_jsonl, read_metrics
from tools.report import fates
from toy.make_toy import phrases

ROOT = Path(__file__).resolve().parent.parent
TOYS = {"uneven": ("toy", 672293790085379022), "even": ("toy_even", 550812363883466328)}  # digest: run.json's
# Behind the words of the command line, so that every row is evaluated alike.
FLAGS = ("--eval toy_test --eval_every 0 --no-eval_start --eval_greedy --eval_samples 8 --eval_temperature 1 "
         "--eval_top_p 1 --eval_top_k 0").split()
COLUMNS = {"test": 1024, "fewer": 171, "pass@1": 1024, "pass@8": 1024, "learned": 256, "corrupted": 256}
SMOLLM2 = {"train": 240, "test": 270, "out of domain": 240, "pass@1": 270, "pass@8": 270}  # of what problems


# --------------------------------------------------- runs --------------------------------------------------
def is_finished(folder: Path, command: list[str]) -> bool:
    """Whether the folder holds this command's run, with its last evaluation. Raises UserError if it holds
    another run, of other arguments or before its script, common.py, answers/, engine/ or toy/ changed."""
    if not (folder / "run.json").is_file():
        return False
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    recorded = [word for word in run["command"] if word not in ("--resume", "--out", str(folder))]
    if recorded[1:] != command[1:] or run["code"] != code_digest(ROOT / command[0]):
        raise UserError(f"{folder} holds a run of other code or arguments; delete it or give another --out.")
    return (folder / "final").exists() and has_evaluation(read_metrics(folder)[-1])


def train(jobs: dict[Path, list[str]], workers: int) -> None:
    """Run the commands {folder: command} that are not finished, `workers` at a time.

    Raises UserError if one fails, or if the code has changed since one started. However this ends, no run is
    left behind: on SIGTERM each finishes its step and writes a checkpoint."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    waiting = [folder for folder, command in jobs.items() if not is_finished(folder, command)]
    running: dict[Path, subprocess.Popen] = {}
    began = time.time()
    try:
        while waiting or running:
            if waiting and len(running) < workers:
                for job in jobs.items():  # all are of one code, also of what was edited meanwhile
                    is_finished(*job)
                folder = waiting.pop(0)
                words = [*jobs[folder], "--out", str(folder), *["--resume"] * (folder / "run.json").is_file()]
                folder.parent.mkdir(parents=True, exist_ok=True)
                with folder.with_suffix(".txt").open("a") as log:  # Ctrl-C reaches it through us alone
                    running[folder] = subprocess.Popen(
                        [sys.executable, *words], cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                        env=os.environ | dict(OMP_NUM_THREADS="1"))
            time.sleep(.5)
            steps = [f"{folder.name}: step {len(read_metrics(folder))}" for folder in running]
            after = f"{(time.time() - began) / 60:.1f} minutes"
            print(f"\r{after}; {'; '.join(steps)}; waiting: {len(waiting)} ", end="", flush=True)
            for folder, process in [*running.items()]:
                if process.poll() is not None:
                    del running[folder]
                    if process.returncode:
                        raise UserError(f"a run failed; see {folder.with_suffix('.txt')}.")
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


# --------------------------------------------------- rows --------------------------------------------------
def changed_lines(script: Path) -> int:
    """Lines that a diff from ttrl.py to this script removes or adds."""
    diff = subprocess.run(["diff", "ttrl.py", script], cwd=ROOT, capture_output=True, text=True).stdout
    return len(re.findall("^[<>]", diff, re.MULTILINE))


def line_of(folder: Path, name: str, toy: str, seed: int) -> dict:
    """A line of toy/results.csv from a finished run. Raises UserError if its model is not the shipped toy."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if run["identity"]["the weights of --model"] != TOYS[toy][1]:
        raise UserError(f"{folder} has other weights than the stored rows' {toy} toy.")
    last, problems = read_metrics(folder)[-1], read_jsonl(ROOT / "toy/test.jsonl")
    right = read_jsonl(folder / "evaluations.jsonl")[-1]["greedy"]
    fewer = [r for r, row in zip(right, problems, strict=True) if "fewer" in phrases(row["problem"])]
    values = dict(test=fmean(right), fewer=fmean(fewer)) | fates(read_jsonl(folder / "votes.jsonl"))
    values |= {column: last[f"eval/toy_test/{column}"] for column in ("pass@1", "pass@8")}
    shares = {column: f"{values[column]:.4f}" if column in values else "" for column in COLUMNS}
    return dict(row=name, toy=toy, seed=seed, step=last["step"]) | shares | dict(lines="")


def stored(path: str = "toy/results.csv") -> list[dict]:
    """The stored lines, of each row and seed the last step; step 0: not trained."""
    with (ROOT / path).open(encoding="utf-8", newline="") as file:
        return [*{(line["row"], line["toy"], line["seed"]): line for line in csv.DictReader(file)}.values()]


def over_seeds(values: list[float]) -> float:
    """Half the 95% interval of a mean over seeds: Student's t."""
    return float(stats.t.ppf(.975, len(values) - 1)) * stdev(values) / len(values) ** .5


def share(value: float) -> str:
    """Two digits of a share, which is between 0 and 1."""
    return f"{min(max(value, 0), 1):.2f}".removeprefix("0")


def cell(lines: list[dict], column: str, problems: int) -> str:
    """A mean, and half its 95% interval: t over the seeds and the binomial error of the problems, added in
    squares; the latter alone for what was not trained, none of fewer than three trained seeds. An interval
    that would leave 0 to 1 is cut there, and printed from end to end."""
    values = [float(line[column]) for line in lines if line.get(column)]
    if not values:
        return "–"
    mean, trained = fmean(values), lines[0]["step"] != "0"
    if trained and len(values) < 3:
        return share(mean)
    half = math.hypot(over_seeds(values) if trained else 0, 1.96 * (mean * (1 - mean) / problems) ** .5)
    if .005 < half - mean or .005 < half + mean - 1:
        return f"{share(mean)} ({share(mean - half)}–{share(mean + half)})"
    return f"{share(mean)}±{share(half)}"


def table(lines: list[dict], toys: list[str], columns: dict[str, int] = COLUMNS, names=()) -> str:
    """Markdown of stored lines: a row for each name (all, if none is given), a column for each toy and
    column, and of one toy the changed lines."""
    heads = [f"{toy}: {column}" if len(toys) > 1 else column for toy in toys for column in columns]
    heads += ["changed lines"] * (len(toys) == 1)
    text = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in names or dict.fromkeys(line["row"] for line in lines if line["toy"] in toys):
        cells = []
        for toy in toys:
            row = [line for line in lines if (line["row"], line["toy"]) == (name, toy)]
            cells += [cell(row, column, problems) for column, problems in columns.items()]
        cells += [str(row[0]["lines"] or "–")] * (len(toys) == 1)
        text.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(text)


def difference(lines: list[dict], others: list[dict]) -> str:
    """A sentence: how far a row ends above TTRL's runs of the same seeds, or why that is not printed."""
    base, verdicts = {int(line["seed"]): line for line in others}, []
    pairs = [(line, base[int(line["seed"])]) for line in lines if int(line["seed"]) in base]
    if len(pairs) < 3:
        return f"is not printed: it takes three seeds that TTRL's row has, too; here are {len(pairs)}."
    for column in ("test", "fewer", "pass@1"):
        apart = [float(line[column]) - float(other[column]) for line, other in pairs]
        mean, half = fmean(apart), over_seeds(apart)
        verdict = "above" if mean > half else "below" if mean < -half else "not told apart"
        verdicts.append(f"{column} {mean:+.3f} ± {half:.3f}: {verdict}")
    return f"seed by seed: {'; '.join(verdicts)}."


def main(script: Positional[str], on: Literal["uneven", "even"] = "uneven",
         seeds: tuple[int, ...] = (1, 2, 3, 4, 5), workers: int = os.cpu_count() or 1,
         out: Path = Path("runs/compare")) -> None:
    """Train, then print.

    Args:
        script: a script; with switches in quotes
        on: the model and its problems
        seeds: a run for each
        workers: runs at a time, one core each
        out: where the runs' folders go
    """
    script, *flags = script.split()
    name, jobs = " ".join([script.removesuffix(".py"), *flags]), {}
    for seed in seeds:
        folder = out.resolve() / re.sub(r"\W+", "-", f"{name} {on} seed{seed}")
        jobs[folder] = [script, *flags, "--seed", str(seed), "--model", TOYS[on][0], *FLAGS]
    try:
        if (ROOT / f"examples/{script.removesuffix('.py')}.diff").exists() and not (ROOT / script).exists():
            subprocess.run(["make", "-s", script], cwd=ROOT, check=True)
        if not (ROOT / script).is_file():
            raise UserError(f"there is no script {script}.")
        train(jobs, workers)
        new = [line_of(folder, name, on, seed) for folder, seed in zip(jobs, seeds)]
    except UserError as error:
        sys.exit(f"\nError: {error}")
    except KeyboardInterrupt:
        sys.exit("\nStopped; the same command goes on.")
    new[0]["lines"] = changed_lines(ROOT / script)  # once a row
    alike = " ".join(["TTRL", *flags])  # TTRL with the same switches: beside it, if it is stored
    kept = [line for line in stored() if line["toy"] == on]
    kept = [line for line in kept if " --" not in line["row"] or line["row"] == alike]
    base = [line for line in kept if line["row"] == alike] or [line for line in kept if line["row"] == "TTRL"]
    print(f"\n{table(kept + new, [on])}\n{name} less {base[0]['row']}", difference(new, base))
    print("\nIts lines, as toy/results.csv would have them:")
    csv.writer(sys.stdout, lineterminator="\n").writerows(line.values() for line in new)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m lab.compare", description=__doc__)
