"""An idea beside six papers and their controls: five runs on a toy, then one row with its intervals.

    python -m lab.compare my_idea.py                        # trains seeds 1 to 5, then prints the table
    python -m lab.compare --on even my_idea.py              # on the toy where nothing corrects the vote
    python -m lab.compare "my_idea.py --kappa 4" gspo.py    # several; forks of examples/ are made first
    python -m lab.compare runs/a-seed1 runs/a-seed2         # finished runs; nothing is trained
    python -m lab.compare --store "my idea" runs/a-seed*    # keeps their row in docs/leaderboard.md
    python -m lab.compare --on smollm2 --seeds 11 12 13 ttrl.py    # on SmolLM2, a real model; for GPUs

The stored rows, and what they mean: docs/leaderboard.md. Ctrl-C ends the runs after a checkpoint; called
again, the command resumes them and keeps those that are finished. Do not edit the script before its last seed
has started: then the command stops, since a row is of one code. Write the next idea into another file.
"""

from __future__ import annotations

import argparse
import difflib
import functools
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

import numpy
from scipy import stats

from engine.base import UserError
from engine.run_folder import code_digest, has_evaluation, read_jsonl, read_metrics
from tools.report import fates
from toy.make_toy import phrases

ROOT = Path(__file__).resolve().parent.parent
STORED, PAGE = ROOT / "docs/leaderboard.json", ROOT / "docs/leaderboard.md"
EVALUATION = "--eval_every 0 --no-eval_start --eval_top_k 0"
REGIMES = {  # flags
    "uneven": "--eval toy,toy_test,toy_ood",
    "even": "--model toy_even --eval toy,toy_test,toy_ood",
    "smollm2": "--model smollm2 --eval smollm2,smollm2_test,smollm2_ood --steps 30 --prompts_per_batch 16"}
# Stored rows are also of five more models of the uneven kind, of which no weights are shipped, and of other
# options on the uneven toy: see "Other models" and "Other options" on the page.
# The base model without training, one step at the rate 0. Its row is stored as base, its vote as vote.
BASE = ("ttrl.py --steps 1 --lr 0 --kl_coef 0 --prompts_per_batch 1 --votes 2 --train_samples 2 "
        "--num_minibatches 1 --eval_samples 16")
# Where the summary of both toys stands: the first table behind the mark.
SUMMARIES = [ROOT / "README.md", ROOT / "docs/measured.md"]
MARK, TABLE = "<!-- this table is written by lab.compare -->", r"(?m)(?:^\|.*\n)+"
# Greedy accuracy is kept problem by problem: (column, benchmark, which of its problems).
GREEDY = [("test", "test", None), ("fewer", "test", True), ("others", "test", False),
          ("4 operations", "ood", None), ("train", "", None), ("out of domain", "ood", None)]
SAMPLED = ["pass@1", "pass@8", "maj@8"]
FATES = ["learned", "kept", "corrupted"]
COLUMNS = [name for name, *_ in GREEDY[:-1]] + SAMPLED + FATES + ["minutes"]
OF_SMOLLM2 = ["train", "test", "out of domain", *SAMPLED]
HEADINGS = dict(smollm2="SmolLM2", options="Other options")  # of the others: The NAME toy
# Of training: kept for the claims as [first step, mean of the last five].
CURVES = "entropy length distinct_answers majority_accuracy label_accuracy label_coverage token_ratio".split()
MARGIN = 0.03  # two rows are called equal if the interval of their difference lies within this


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
    recorded = [word for word in run.get("command", []) if word not in ("--resume", "--out", str(folder))]
    if recorded[1:] != flags or run.get("code") != code_digest(ROOT / script):
        raise UserError(f"{folder} holds a run of other code or arguments; delete it or give another --out.")
    return is_done(folder, run.get("args", {}))


def start(folder: Path, command: list[str]) -> subprocess.Popen:
    """Begin a run or continue it, in a session of its own: Ctrl-C reaches it through run_all alone."""
    output = folder.parent / "logs" / f"{folder.name}.txt"
    output.parent.mkdir(parents=True, exist_ok=True)
    words = [*command, "--out", str(folder), *(["--resume"] if (folder / "run.json").is_file() else [])]
    with output.open("a") as file:
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


def pack(bits: list) -> str:
    """0s and 1s as a text of hexadecimal digits, which stays short in a file of many runs."""
    text = "".join(str(int(bit)) for bit in bits)
    return f"{len(text)}:{int(text or '0', 2):x}"


def unpack(text: str) -> list[int]:
    length, _, digits = text.partition(":")
    return [int(bit) for bit in f"{int(digits, 16):0{length}b}"] if int(length) else []


@functools.cache
def has_fewer() -> list[bool]:
    """Of the toys' test problems: whether they have the phrase that most styles misread."""
    problems = (ROOT / "toy/test.jsonl").read_text(encoding="utf-8").splitlines()
    return ["fewer" in phrases(json.loads(line)["problem"]) for line in problems]


def greedy(run: dict, column: str) -> list[int]:
    """[problems] 1 where a run's greedy answer is right, of a column of GREEDY."""
    _, benchmark, chosen = next(row for row in GREEDY if row[0] == column)
    bits = unpack(run["greedy"][benchmark])
    if chosen is None:
        return bits
    return [bit for bit, has in zip(bits, has_fewer(), strict=True) if has == chosen]


def right_over_time(votes: list[dict], parts: int = 5) -> list[float]:
    """How often the majorities on training problems with "fewer" were right, in each fifth of the steps."""
    size, shares = max(1, len(votes) // parts), []
    for first in range(0, size * parts, size):
        some = [vote for vote in votes[first:first + size] if vote["right"] is not None]
        right = [vote["right"] for vote in some if "fewer" in phrases(vote["problem"])]
        shares += [round(statistics.fmean(right), 4)] if right else []
    return shares


def row_of(folders: list[Path], regime: str, task: dict, vote: bool = False) -> dict:
    """{lines, runs: a dict of columns for each seed} of finished runs of one script; vote: the majorities of
    their evaluation's samples stand in the place of greedy answers.

    Raises UserError if one is not finished, or evaluated otherwise than the stored rows: task."""
    runs, name = [], "smollm2" if regime == "smollm2" else "toy"
    for folder in folders:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if not is_done(folder, about["args"]):
            raise UserError(f"{folder} holds no finished run.")
        had = about["args"] | about.get("identity", {})
        for key, values in task.items():
            if had.get(key) not in values:
                raise UserError(f"{folder} has another {key} than the stored rows; let lab.compare train.")
        lines = read_metrics(folder)
        steps = [line for line in lines if "seconds/step" in line]
        scores = [line for line in lines if has_evaluation(line)][-1]
        last = {row["benchmark"]: row for row in read_jsonl(folder / "evaluations.jsonl")}
        run = dict(seed=about["args"]["seed"], greedy={})
        for part in ("", "test", "ood"):
            graded = last.get(f"{name}_{part}" if part else name, {})
            run["greedy"][part] = pack(graded.get("majority" if vote else "greedy", []))
        for column in SAMPLED:
            if f"eval/{name}_test/{column}" in scores:
                run[column] = round(scores[f"eval/{name}_test/{column}"], 4)
        if len(steps) > 1:  # it was trained
            votes = read_jsonl(folder / "votes.jsonl")
            run["fewer majorities"] = right_over_time(votes)
            happened = fates(votes)
            run |= {column: round(happened[column], 4) for column in FATES if column in happened}
            seconds = [line.get(f"seconds/{what}", 0) for line in lines for what in ("step", "evaluate")]
            run["minutes"] = round(sum(seconds) / 60, 2)
        for curve in CURVES:
            values = [line[curve] for line in steps if curve in line]
            if len(steps) > 1 and values:
                run[curve] = [round(values[0], 4), round(statistics.fmean(values[-5:]), 4)]
        runs.append(run)
    for run, other in zip(runs, runs[1:] if vote else []):  # what two votes of one model differ by
        pairs = list(zip(unpack(run["greedy"][""]), unpack(other["greedy"][""])))
        for name, fate in (("learned", (0, 1)), ("kept", (1, 1)), ("corrupted", (1, 0))):
            if pairs:
                run[name] = round(pairs.count(fate) / len(pairs), 4)
    script = folders[0] / "script.py"  # as it ran
    lines = changed_lines(script if script.exists() else ROOT / f"{about['script']}.py")
    return dict(lines=None if about["args"]["steps"] == 1 else lines, runs=runs)


def crossed(values: list[list[float]], draws: int = 1000) -> tuple[float, float, float]:
    """The mean of [runs, problems], and its 95% interval over both: a bootstrap that draws runs and problems
    anew. Of one run it is over problems alone; of five runs it is too narrow by about a tenth."""
    table, rng = numpy.array(values, dtype=float), numpy.random.default_rng(1)
    runs, problems = table.shape
    by_run = rng.multinomial(runs, [1 / runs] * runs, draws) @ table / runs
    drawn = rng.multinomial(problems, [1 / problems] * problems, draws) / problems
    low, high = numpy.quantile((by_run * drawn).sum(1), [.025, .975])
    return float(table.mean()), float(low), float(high)


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half its 95% interval (Student's t; nan: of one value)."""
    n, spread = len(values), statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.fmean(values), float(stats.t.ppf(.975, n - 1)) * spread / n ** .5


def cell(runs: list[dict], column: str) -> str:
    """The column's mean and half its 95% interval: over runs and problems for greedy answers, else runs."""
    if column in [name for name, *_ in GREEDY]:
        values = [bits for run in runs if (bits := greedy(run, column))]
        if not values:
            return "–"
        mean, low, high = crossed(values)
        half = (high - low) / 2
    else:
        values = [run[column] for run in runs if column in run]
        if not values:
            return "–"
        mean, half = interval(values)
    mean, half = f"{mean:.2f}".removeprefix("0"), f"{half:.2f}".removeprefix("0")
    return mean if half == "nan" else f"{mean}±{half}"


def table(rows: dict[str, dict], regime: str = "uneven") -> str:
    """Markdown of {name: row}."""
    columns = OF_SMOLLM2 if regime == "smollm2" else COLUMNS
    lines = [f"| | {' | '.join(columns)} | changed lines |", "|---" * (len(columns) + 2) + "|"]
    for name, row in rows.items():
        cells = [cell(row["runs"], column) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} | {'–' if row['lines'] is None else row['lines']} |")
    return "\n".join(lines)


def summary(stored: dict) -> str:
    """Markdown of both toys side by side, for the first screens."""
    columns, toys = ["test", "fewer", "others", "pass@1"], ["uneven", "even"]
    heads = [f"{regime}: {column}" for regime in toys for column in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in stored[toys[0]]["rows"]:
        cells = []
        for regime in toys:
            runs = stored[regime]["rows"].get(name, dict(runs=[]))["runs"]
            cells += [cell(runs, "test")]
            cells += [cell(runs, column).partition("±")[0] for column in columns[1:]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def paired(runs: list[dict], others: list[dict], column: str) -> list[list[int]]:
    """[runs, problems] differences of greedy verdicts: of the same seeds, or with the others' one run."""
    base = {run["seed"]: run for run in others}
    if len(others) == 1:
        base = {run["seed"]: others[0] for run in runs}
    pairs = [(greedy(run, column), greedy(base[run["seed"]], column)) for run in runs if run["seed"] in base]
    return [(numpy.array(one) - numpy.array(other)).tolist() for one, other in pairs]


def difference(name: str, runs: list[dict], others: list[dict]) -> str:
    """A sentence: how far these runs end above TTRL's of the same seeds, or why that is not printed."""
    verdicts = []
    for column in ("test", "fewer", "4 operations"):
        if len(pairs := paired(runs, others, column)) < 5:
            return (f"{name} less TTRL is not printed: it takes five seeds that a stored row of TTRL has, "
                    f"too; here are {len(pairs)}.")
        mean, low, high = crossed(pairs)
        verdict = "above" if low > 0 else "below" if high < 0 else "not told apart"
        if -MARGIN < low and high < MARGIN:
            verdict = f"equal within {MARGIN}"
        verdicts.append(f"{column} {mean:+.3f} (95% interval {low:+.3f} to {high:+.3f}): {verdict}")
    return f"{name} less TTRL, seed by seed and problem by problem, greedy: {'; '.join(verdicts)}."


def store(rows: dict[str, dict], regime: str, stored: dict) -> None:
    """Add a row to the stored ones, or replace it, and write the page's table anew."""
    stored[regime]["rows"] |= rows
    text = json.dumps(stored, indent=1, ensure_ascii=False)
    one_line = functools.partial(re.sub, r"\s+", " ")
    text = re.sub(r"\{\s+\"seed.*?\n     \}", lambda run: one_line(run[0]), text, flags=re.S)  # a run, a line
    STORED.write_text(text + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    for name, kept in stored.items():  # the first table behind the regime's heading
        head, mark, rest = page.partition(f"## {HEADINGS.get(name, f'The {name} toy')}\n")
        page = head + mark + re.sub(TABLE, lambda _: table(kept["rows"], name) + "\n", rest, count=1)
    PAGE.write_text(page, "utf-8")
    for path in SUMMARIES:
        head, mark, rest = path.read_text(encoding="utf-8").partition(MARK)
        path.write_text(head + mark + re.sub(TABLE, lambda _: summary(stored) + "\n", rest, count=1), "utf-8")


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
            jobs[folder] = [*words, "--seed", str(seed), *REGIMES[options.on].split(),
                            *EVALUATION.split()]
    run_all(jobs, max(1, options.workers))
    for folder in [Path(what) for what in options.what if Path(what).is_dir()]:
        found.setdefault(re.sub(r"-seed\d+$", "", folder.resolve().name), []).append(folder)
    return found


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m lab.compare", description=__doc__, formatter_class=shape)
    parser.add_argument("what", nargs="*", help="scripts with their switches, or folders of finished runs")
    parser.add_argument("--on", choices=REGIMES, default="uneven", help="the model and its problems")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="a run for each")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="where the runs' folders go")
    parser.add_argument("--store", metavar="NAME", help="keep the row under this name in docs/leaderboard.md")
    options = parser.parse_args()
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    kept = stored.get(options.on, dict(task={}, rows={}))
    try:
        rows = {}
        for name, folders in folders_of(options).items():
            rows[name] = row_of(folders, options.on, kept["task"], vote=options.store == "vote")
        if options.store and len(rows) != 1:
            raise UserError(f"--store keeps one row, but these are {len(rows)}.")
    except UserError as error:
        sys.exit(f"Error: {error}")
    if options.store:
        rows = {options.store: rows.popitem()[1]}
        store(rows, options.on, stored)
    print(table(kept["rows"] | rows, options.on))
    for name, row in rows.items():
        print(difference(name, row["runs"], kept["rows"].get("TTRL", dict(runs=[]))["runs"]))


if __name__ == "__main__":
    main()
