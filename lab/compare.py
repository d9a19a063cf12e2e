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

import argparse
import csv
import difflib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from itertools import repeat
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from engine.base import UserError
from engine.run_folder import code_digest, has_evaluation, read_jsonl, read_metrics
from tools.report import fates
from toy.make_toy import phrases

ROOT = Path(__file__).resolve().parent.parent
TOYS = {"uneven": ("toy", 672293790085379022), "even": ("toy_even", 550812363883466328)}  # digest: run.json's
# Behind the words of the command line, so that every row is evaluated alike.
FLAGS = ("--eval toy,toy_test,toy_ood --eval_every 0 --no-eval_start --eval_greedy --eval_samples 8 "
         "--eval_temperature 1 --eval_top_p 1 --eval_top_k 0").split()
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

    Raises UserError if one fails, a folder holds another run, or the code is edited before the last starts.
    However this ends, no run is left behind: on SIGTERM each finishes its step and writes a checkpoint."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    waiting = [folder for folder, command in jobs.items() if not is_finished(folder, command)]
    codes = {folder: code_digest(ROOT / command[0]) for folder, command in jobs.items()}
    running: dict[Path, subprocess.Popen] = {}
    try:
        while waiting or running:
            if waiting and len(running) < workers:
                folder = waiting.pop(0)
                if code_digest(ROOT / jobs[folder][0]) != codes[folder]:
                    raise UserError(f"{jobs[folder][0]}, or code that it uses, was edited before all seeds "
                                    "started. Undo that, or train all of them anew in another --out.")
                log = folder.with_suffix(".txt")
                print(f"{folder} starts (its output: {log.name}); still to start: {len(waiting)}", flush=True)
                words = [*jobs[folder], "--out", str(folder), *["--resume"] * (folder / "run.json").is_file()]
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a") as file:  # in a session of its own, which Ctrl-C reaches through us alone
                    running[folder] = subprocess.Popen(
                        [sys.executable, *words], cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
                        env=os.environ | dict(OMP_NUM_THREADS="1"))
            time.sleep(.2)
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
    before, after = [path.read_text(encoding="utf-8").splitlines() for path in (ROOT / "ttrl.py", script)]
    same = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    return len(before) + len(after) - 2 * sum(block.size for block in same)


def line_of(folder: Path, name: str, toy: str, seed: int, lines: int | str) -> dict:
    """A line of toy/results.csv from a finished run. Raises UserError if its model is not the shipped toy."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if run["identity"]["the weights of --model"] != TOYS[toy][1]:
        raise UserError(f"{folder} has other weights than the stored rows' {toy} toy.")
    last, problems = read_metrics(folder)[-1], read_jsonl(ROOT / "toy/test.jsonl")
    right = {row["benchmark"]: row for row in read_jsonl(folder / "evaluations.jsonl")}["toy_test"]["greedy"]
    fewer = [r for r, row in zip(right, problems, strict=True) if "fewer" in phrases(row["problem"])]
    values = dict(test=fmean(right), fewer=fmean(fewer)) | fates(read_jsonl(folder / "votes.jsonl"))
    for column in ("pass@1", "pass@8"):
        values[column] = last[f"eval/toy_test/{column}"]
    shares = {column: f"{values[column]:.4f}" if column in values else "" for column in COLUMNS}
    return dict(row=name, toy=toy, seed=seed, step=last["step"]) | shares | dict(lines=lines)


def stored(path: str = "toy/results.csv") -> list[dict]:
    """The lines of the stored rows; step 0: not trained."""
    with (ROOT / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def over_seeds(values: list[float]) -> float:
    """Half the 95% interval of a mean over seeds: Student's t."""
    return float(stats.t.ppf(.975, len(values) - 1)) * stdev(values) / len(values) ** .5


def cell(lines: list[dict], column: str, problems: int) -> str:
    """A mean, and half its 95% interval: t over the seeds and the binomial error of the problems, added in
    squares; the latter alone for what was not trained, none of fewer than three trained seeds."""
    values = [float(line[column]) for line in lines if line.get(column)]
    if not values:
        return "–"
    mean, trained = fmean(values), lines[0]["step"] != "0"
    text = f"{mean:.2f}".removeprefix("0")
    if trained and len(values) < 3:
        return text
    half = math.hypot(over_seeds(values) if trained else 0, 1.96 * (mean * (1 - mean) / problems) ** .5)
    return text + f"±{half:.2f}".replace("±0", "±")


def table(lines: list[dict], toys: list[str], columns: dict[str, int] = COLUMNS) -> str:
    """Markdown of stored lines: a row for each name, a column for each toy and column; of one toy also the
    changed lines."""
    heads = [f"{toy}: {column}" if len(toys) > 1 else column for toy in toys for column in columns]
    heads += ["changed lines"] if len(toys) == 1 else []
    text = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(line["row"] for line in lines if line["toy"] in toys):
        cells, row = [], [line for line in lines if line["row"] == name]
        for toy in toys:
            of_toy = [line for line in row if line["toy"] == toy]
            cells += [cell(of_toy, column, problems) for column, problems in columns.items()]
        cells += [row[0]["lines"] or "–"] if len(toys) == 1 else []
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


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m lab.compare", description=__doc__, formatter_class=shape)
    parser.add_argument("script", type=str.split, help="a script; with switches in quotes")
    parser.add_argument("--on", choices=TOYS, default="uneven", help="the model and its problems")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="a run for each")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="where the runs' folders go")
    options = parser.parse_args()
    script, *flags = options.script
    name, toy = " ".join([script.removesuffix(".py"), *flags]), options.on
    jobs = {}
    for seed in options.seeds:
        folder = options.out.resolve() / re.sub(r"\W+", "-", f"{name} {toy} seed{seed}")
        jobs[folder] = [script, *flags, "--seed", str(seed), "--model", TOYS[toy][0], *FLAGS]
    try:
        if (ROOT / f"examples/{script.removesuffix('.py')}.diff").exists():
            subprocess.run(["make", "-s", script], cwd=ROOT, check=True)
        if not (ROOT / script).is_file():
            raise UserError(f"there is no script {script}.")
        train(jobs, max(1, options.workers))
        counts = [changed_lines(ROOT / script), *[""] * len(jobs)]  # once a row
        new = [line_of(*job) for job in zip(jobs, repeat(name), repeat(toy), options.seeds, counts)]
    except UserError as error:
        sys.exit(f"Error: {error}")
    kept = [line for line in stored() if line["toy"] == toy and " --" not in line["row"]]
    print(table(kept + new, [toy], COLUMNS))
    print(f"{name} less TTRL", difference(new, [line for line in kept if line["row"] == "TTRL"]))
    print("\nIts lines of toy/results.csv:")
    csv.writer(sys.stdout, lineterminator="\n").writerows(line.values() for line in new)


if __name__ == "__main__":
    main()
