"""An idea beside six papers and their controls: five runs on the toy, then one row with its intervals.

    python -m lab.compare my_idea.py                        # trains seeds 1 to 5, then prints the table
    python -m lab.compare "my_idea.py --kappa 4" gspo.py    # several; forks of examples/ are made first
    python -m lab.compare runs/a-seed1 runs/a-seed2         # finished runs; nothing is trained
    python -m lab.compare --store "my idea" runs/a-seed*    # keeps their row in docs/leaderboard.md
    python -m lab.compare --on smollm2 ttrl.py scrl.py      # on SmolLM2, of which no rows are stored

The stored rows, and what they mean: docs/leaderboard.md. Ctrl-C ends the runs after a checkpoint; called
again, the command resumes them and keeps those that are finished. Do not edit the script before its last seed
has started: then the command stops, since a row is of one code. Write the next idea into another file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from scipy import stats

from engine.base import UserError
from engine.run_folder import code_digest, has_evaluation, read_jsonl, read_metrics
from tools.report import fates

ROOT = Path(__file__).resolve().parent.parent
STORED, PAGE = ROOT / "docs/leaderboard.json", ROOT / "docs/leaderboard.md"
REGIMES = {  # its flags; the responses to a problem, k
    "toy": ("--eval toy,toy_test --eval_every 0 --eval_samples 32 --eval_top_k 0", 32),
    "smollm2": ("--model smollm2 --eval smollm2,smollm2_test,smollm2_ood", 16)}
SCORES = "test/greedy test/pass@1 test/pass@k test/maj@k train/greedy train/pass@1".split()
COLUMNS = [*SCORES, "learned", "kept", "corrupted", "minutes"]


def is_done(folder: Path, args: dict) -> bool:
    """Whether a run has saved its final model and, if it evaluates, evaluated it, which comes after."""
    saved = (folder / "final").exists()
    return saved and (not args.get("eval") or has_evaluation(read_metrics(folder)[-1]))


def is_finished(folder: Path, command: list[str]) -> bool:
    """Whether the folder holds the finished run of this command. Raises UserError if it holds another run, of
    other arguments or before its script, common.py, answers/, engine/ or toy/ changed."""
    if not (folder / "run.json").is_file():
        return False
    script, *flags = command
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    given = [word for word in run.get("command", []) if word not in ("--resume", "--out", str(folder))]
    if given[1:] != flags or run.get("code") != code_digest(ROOT / script):
        raise UserError(f"{folder} holds a run of other code or arguments; delete it or give another --out.")
    return is_done(folder, run.get("args", {}))


def start(folder: Path, command: list[str]) -> subprocess.Popen:
    """Begin a run or continue it, in a session of its own: Ctrl-C reaches it through run_all alone."""
    told = folder.parent / "logs" / f"{folder.name}.txt"
    told.parent.mkdir(parents=True, exist_ok=True)
    words = [*command, "--out", str(folder), *(["--resume"] if (folder / "run.json").is_file() else [])]
    with told.open("a") as file:
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=file, stderr=file,
                                start_new_session=True, env=os.environ | dict(OMP_NUM_THREADS="1"))


def run_all(jobs: dict[Path, list[str]], workers: int) -> None:
    """Run the commands {folder: command} that are not finished, `workers` at a time.

    Raises UserError if one fails, a folder holds another run, or the code is edited before the last starts.
    However this ends, no run is left behind: on SIGTERM each finishes its step and writes a checkpoint."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    waiting = [folder for folder, command in jobs.items() if not is_finished(folder, command)]
    codes = {folder: code_digest(ROOT / command[0]) for folder, command in jobs.items()}
    running: dict[Path, subprocess.Popen] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                folder = waiting.pop(0)
                if code_digest(ROOT / jobs[folder][0]) != codes[folder]:
                    raise UserError(f"{jobs[folder][0]}, or code that it uses, was edited before all seeds "
                                    "started. Undo that, or train all of them anew in another --out.")
                running[folder] = start(folder, jobs[folder])
                print(f"{folder} has started (see logs/ beside it); to start: {len(waiting)}.", flush=True)
            time.sleep(1)
            for folder in [folder for folder, process in running.items() if process.poll() is not None]:
                if running.pop(folder).returncode:
                    raise UserError(f"a run failed; see {folder.parent}/logs, {folder.name}.txt.")
                print(f"{folder} has ended; still running: {len(running)}.", flush=True)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def changed_lines(script: Path) -> int:
    """Lines that a diff from ttrl.py to this script removes or adds."""
    before, after = [path.read_text(encoding="utf-8").splitlines() for path in (ROOT / "ttrl.py", script)]
    same = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    return len(before) + len(after) - 2 * sum(block.size for block in same)


def row_of(folders: list[Path], regime: str, task: dict, start: bool = False) -> dict:
    """{lines, runs: a dict of COLUMNS for each seed} of finished runs of one script; start: before training.

    Raises UserError if one is not finished, or evaluated otherwise than the stored rows: task."""
    runs, k = [], REGIMES[regime][1]
    for folder in folders:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if not is_done(folder, about["args"]):
            raise UserError(f"{folder} holds no finished run.")
        had = about["args"] | about.get("identity", {})
        for name, values in task.items():
            if had.get(name) not in values:
                raise UserError(f"{folder} has another {name} than the stored rows; let lab.compare train.")
        lines = read_metrics(folder)
        scores = [line for line in lines if has_evaluation(line)][0 if start else -1]
        took = [line.get(f"seconds/{what}", 0) for line in lines for what in ("step", "evaluate")]
        found = {} if start else fates(read_jsonl(folder / "votes.jsonl")) | dict(minutes=sum(took) / 60)
        for column in SCORES:
            name = column.replace("test", f"{regime}_test").replace("train", regime).replace("@k", f"@{k}")
            found[column] = scores.get(f"eval/{name}")
        kept = {name: round(found[name], 6) for name in COLUMNS if found.get(name) is not None}
        runs.append(dict(seed=about["args"]["seed"]) | kept)
    script = folders[0] / "script.py"  # as it ran
    lines = changed_lines(script if script.exists() else ROOT / f"{about['script']}.py")
    return dict(lines=None if start else lines, runs=runs)


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half its 95% interval (Student's t; nan: of one value)."""
    n, spread = len(values), statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.fmean(values), float(stats.t.ppf(.975, n - 1)) * spread / n ** .5


def cell(runs: list[dict], column: str) -> str:
    """The column's mean and, of more than one value, half its 95% interval."""
    if not (values := [run[column] for run in runs if column in run]):
        return "–"
    mean, half = [f"{x:.2f}".removeprefix("0") for x in interval(values)]
    return mean if half == "nan" else f"{mean}±{half}"


def table(rows: dict[str, dict], regime: str = "toy") -> str:
    """Markdown of {name: row}."""
    names = [name.replace("@k", f"@{REGIMES[regime][1]}").replace("/", " ") for name in COLUMNS]
    names.append("changed lines")
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for name, row in rows.items():
        cells = [cell(row["runs"], column) for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} | {'–' if row['lines'] is None else row['lines']} |")
    return "\n".join(lines)


def difference(name: str, runs: list[dict], others: list[dict]) -> str:
    """A sentence: how far these runs end above TTRL's of the same seeds, or why that is not printed."""
    said, base = [], {run["seed"]: run for run in others}
    pairs = [(run, base[run["seed"]]) for run in runs if run["seed"] in base]
    if len(pairs) < 5:
        return (f"{name} less TTRL is not printed: it takes five seeds that a stored row of TTRL has, too; "
                f"here are {len(pairs)}.")
    for column in ("test/greedy", "test/pass@1"):
        mean, half = interval([run[column] - other[column] for run, other in pairs])
        verdict = "above" if mean > half else "below" if mean < -half else "no difference is shown"
        ends = f"{mean - half:+.3f} to {mean + half:+.3f}"
        said.append(f"{column.replace('/', ' ')} {mean:+.3f}, 95% interval {ends}: {verdict}")
    return f"{name} less TTRL, seed by seed: {'; '.join(said)}."


def store(rows: dict[str, dict], stored: dict) -> None:
    """Add a row to the stored ones, or replace it, and write the page's table anew."""
    stored["rows"] |= rows
    text = json.dumps(stored, indent=1, ensure_ascii=False)
    text = re.sub(r"\{\s+\"seed[^}]*\}", lambda run: re.sub(r"\s+", " ", run[0]), text)  # a run, a line
    STORED.write_text(text + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"(?m)(?:^\|.*\n)+", table(stored["rows"]) + "\n", page, count=1), "utf-8")


def folders_of(options) -> dict[str, list[Path]]:
    """{name: folders of finished runs}, after the runs of the scripts among the arguments."""
    found, jobs = {}, {}
    for words in [what.split() for what in options.what if not Path(what).is_dir()]:
        name = re.sub(r"\W+", "-", " ".join(words).replace(".py", ""))
        script = ROOT / words[0]
        if (ROOT / f"examples/{script.stem}.diff").exists():
            subprocess.run(["make", "-s", script.name], cwd=ROOT, check=True)
        if not script.is_file():
            raise UserError(f"there is no script and no run's folder {words[0]}.")
        found[name] = [options.out.resolve() / f"{name}-seed{seed}" for seed in options.seeds]
        for seed, folder in zip(options.seeds, found[name]):
            jobs[folder] = [*words, "--seed", str(seed), *REGIMES[options.on][0].split()]
    run_all(jobs, max(1, options.workers))
    for folder in [Path(what) for what in options.what if Path(what).is_dir()]:
        found.setdefault(re.sub(r"-seed\d+$", "", folder.resolve().name), []).append(folder)
    return found


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m lab.compare", description=__doc__, formatter_class=shape)
    parser.add_argument("what", nargs="*", help="scripts with their switches, or folders of finished runs")
    parser.add_argument("--on", choices=REGIMES, default="toy", help="the model and its problems")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="a run for each")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="where the runs' folders go")
    parser.add_argument("--store", metavar="NAME", help="keep the row under this name in docs/leaderboard.md")
    options = parser.parse_args()
    stored = json.loads(STORED.read_text(encoding="utf-8")) if options.on == "toy" else dict(task={}, rows={})
    try:
        rows = {}
        for name, folders in folders_of(options).items():
            if not stored["rows"]:
                stored["rows"]["start"] = row_of(folders, options.on, {}, start=True)
            rows[name] = row_of(folders, options.on, stored["task"])
        if options.store and len(rows) != 1:
            raise UserError(f"--store keeps one row, but these are {len(rows)}.")
    except UserError as error:
        sys.exit(f"Error: {error}")
    if options.store:
        rows = {options.store: rows.popitem()[1]}
        store(rows, stored)
    print(table(stored["rows"] | rows, options.on))
    for name, row in rows.items():
        print(difference(name, row["runs"], stored["rows"].get("TTRL", dict(runs=[]))["runs"]))


if __name__ == "__main__":
    main()
