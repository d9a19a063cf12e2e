"""All methods on the toy: same start, same number of steps and responses, three seeds; a table and a figure.

    python -m tools.compare                        # or `make compare`: gold GRPO and the six methods
    python -m tools.compare --set ettrl            # ETTRL's two switches, each alone and both
    python -m tools.compare --set dynamic          # Dynamic RL without answer or question diversity
    python -m tools.compare --set minibatches      # TTRL: eight optimizer steps, mixed or prompt by prompt
    python -m tools.compare --set examples         # TTRL and the forks of examples/, which it makes
    python -m tools.compare --set smollm2          # the first set's on a real model, hours: docs/real.md

Finished runs are kept, one that was cut off is resumed: call it again and it goes on. Ctrl-C or SIGTERM ends
the runs, too, after a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from engine.base import UserError
from tools import plot

ROOT = Path(__file__).resolve().parent.parent
SETS = {  # set -> name -> command, from the repository root
    "main": {
        "gold GRPO": "ttrl.py --labels gold",
        "TTRL": "ttrl.py",
        "EVOL-RL": "evol_rl.py",
        "SCRL": "scrl.py",
        "RESTRAIN": "restrain.py",
        "ETTRL": "ettrl.py",
        "Dynamic RL": "dynamic_rl.py"},
    "ettrl": {
        "TTRL (parallel, none)": "ettrl.py --rollout parallel --advantage none",
        "EAR (parallel, res)": "ettrl.py --rollout parallel",
        "ETMR (etmr, none)": "ettrl.py --advantage none",
        "ETTRL (etmr, res)": "ettrl.py"},
    "dynamic": {
        "Dynamic RL": "dynamic_rl.py",
        "no answer diversity": "dynamic_rl.py --no-rda",
        "no question diversity": "dynamic_rl.py --no-rdq",
        "neither": "dynamic_rl.py --no-rda --no-rdq"},
    "minibatches": {
        "TTRL, mixed": "ttrl.py --num_minibatches 8 --minibatches mixed",
        "TTRL, by prompt": "ttrl.py --num_minibatches 8 --minibatches by_prompt"},
    "examples": {
        "TTRL": "ttrl.py",
        "RENT": "rent.py",
        "SRT": "srt.py",
        "TIS": "tis.py",
        "EMPO": "empo.py",
        "Intuitor": "intuitor.py",
        "GSPO on TTRL": "gspo.py",
        "dynamic sampling": "dynamic_sampling.py",
        "EM-FT": "em_ft.py",
        "Co-rewarding-I": "co_rewarding.py",
        "RLSC": "rlsc.py"}}
REAL = "--model smollm2 --eval smollm2,smollm2_test,smollm2_ood --eval_every 0 --eval_samples 16"
SETS["smollm2"] = {name: f"{command} {REAL}" for name, command in SETS["main"].items()}
STEPS = {"smollm2": 16}
FIGURES = {  # what plot is told beside the runs
    "examples": dict(behind="TTRL", panels=["pass@1", "pass@k"]),  # too many for one panel
    "smollm2": dict(benchmark="smollm2_test", panels=["pass@1", "pass@k", "maj@k", "label_accuracy",
                                                      "majority_ratio", "distinct_answers"])}
ROWS = {
    "pass@1": "eval/toy/pass@1",
    "pass@8": "eval/toy/pass@8",
    "pass@32": "eval/toy/pass@32",
    "maj@32": "eval/toy/maj@32",
    "distinct": "eval/toy/distinct",
    "length": "eval/toy/length",
    "pass@1 test": "eval/toy_test/pass@1",
    "pass@32 test": "eval/toy_test/pass@32",
    "label acc.": "label_accuracy",
    "majority acc.": "majority_accuracy",
    "entropy": "entropy",
    "answers": "distinct_answers",
    "unique ans.": "unique_answers",
    "question ent.": "question_entropy"}
REAL_ROWS = {}
for part in ("", "_test", "_ood"):
    for metric in ("pass@1", "pass@16", "maj@16"):
        REAL_ROWS[f"{metric} {part[1:]}".strip()] = f"eval/smollm2{part}/{metric}"
REAL_ROWS |= {title: ROWS[title] for title in ("label acc.", "majority acc.", "entropy", "answers")}
REAL_ROWS |= {"distinct": "eval/smollm2_test/distinct", "length": "eval/smollm2_test/length"}


# ----------------------------------------------- running --------------------------------------------------
@dataclass
class Job:
    """One run: its folder and its command line, a script and its options, without the interpreter."""
    folder: Path
    command: list[str]

    def wanted(self) -> dict[str, str]:
        """{option: value} of the command line as text: `--labels gold`, `--no-rda` (False)."""
        options = {}
        for word, following in zip(self.command, [*self.command[1:], "--"]):
            if word.startswith("--no-"):
                options[word[5:]] = "False"
            elif word.startswith("--"):
                options[word[2:]] = "True" if following.startswith("--") else following
        options.pop("out")
        return options

    def state(self) -> str:
        """new, unfinished or finished. Raises UserError if the folder holds a run with other arguments."""
        record = self.folder / "run.json"
        if not record.exists() and not plot.read_metrics(self.folder):
            return "new"
        another = "give another folder with --out, or remove it"
        try:
            run = json.loads(record.read_text(encoding="utf-8"))
            script, options = run["script"], dict(run["args"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"'{self.folder}' holds a run without a readable run.json; {another}.") from None
        if script != Path(self.command[0]).stem:
            raise UserError(f"'{self.folder}' holds a run of {script}.py, not {self.command[0]}; {another}.")
        for option, value in self.wanted().items():
            if str(options.get(option)) != value:
                raise UserError(f"'{self.folder}' holds a run with --{option} {options.get(option)}, "
                                f"not {value}; {another}.")
        return "finished" if (self.folder / "final").exists() else "unfinished"

    def start(self) -> subprocess.Popen:
        """Begin the run or go on with it, in a session of its own: Ctrl-C must reach it once, through us."""
        resume = ["--resume"] if self.state() == "unfinished" else []
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *self.command, *resume]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / "log.txt").open("a") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                                    env=one_thread)

    def steps_done(self) -> int:
        return max((line["step"] for line in plot.read_metrics(self.folder)), default=0)


def jobs_of(variants: dict[str, str], seeds: list[int], steps: int, root: Path) -> dict[str, list[Job]]:
    """{name: one job per seed}; the toy's evaluate it and its test problems every ten steps."""
    jobs: dict[str, list[Job]] = {name: [] for name in variants}
    for name, command in variants.items():
        for seed in seeds:
            folder = root / f"{name}-seed{seed}"
            flags = f"--seed {seed} --steps {steps}"
            if "--eval" not in command:
                flags += " --eval toy,toy_test --eval_every 10 --eval_samples 32"
            jobs[name].append(Job(folder, [*command.split(), *flags.split(), "--out", str(folder)]))
    return jobs


def run_all(jobs: list[Job], workers: int) -> None:
    """Run what is not finished, `workers` at a time, under one progress bar over all steps.

    Raises UserError if a folder holds another run or a fork cannot be made, before anything starts, or if a
    run fails. However this ends, no run is left behind."""
    waiting = [job for job in jobs if job.state() != "finished"]
    scripts = dict.fromkeys(job.command[0] for job in waiting)
    forks = [script for script in scripts if (ROOT / "examples" / script).with_suffix(".diff").exists()]
    if forks and subprocess.run(["make", *forks], cwd=ROOT).returncode:
        raise UserError(f"`make {' '.join(forks)}` failed; make says above which hunk does not fit.")
    steps = sum(int(job.wanted()["steps"]) for job in jobs)
    running: list[tuple[subprocess.Popen, Job]] = []
    try:
        with tqdm(total=steps, desc="compare", unit="step") as bar:
            while waiting or running:
                while waiting and len(running) < workers:
                    job = waiting.pop(0)
                    running.append((job.start(), job))
                time.sleep(1)
                for process, job in list(running):
                    if process.poll() is not None:
                        running.remove((process, job))
                        if process.returncode:
                            raise UserError(f"a run failed; see {job.folder / 'log.txt'}.")
                        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)  # gigabytes
                bar.set_postfix_str(", ".join(job.folder.name for _, job in running), refresh=False)
                bar.update(sum(job.steps_done() for job in jobs) - bar.n)
    finally:
        end([process for process, _ in running])


def end(processes: list[subprocess.Popen], patience: float = 60) -> None:
    """Terminate the runs: each finishes its step and writes a checkpoint. After `patience` seconds, or if we
    are interrupted once more, they are killed."""
    for process in processes:
        process.terminate()
    try:
        deadline = time.time() + patience
        for process in processes:
            process.wait(max(0.0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def leave(number: int, frame) -> None:
    sys.exit(128 + number)


# ---------------------------------------------- the table -------------------------------------------------
def start_value(lines: list[dict], key: str) -> float | None:
    """A benchmark's figure before the first step; None for other metrics and if there is none."""
    values = [line[key] for line in lines if key in line]
    return values[0] if values and key.startswith("eval/") else None


def end_value(lines: list[dict], key: str) -> float | None:
    """A benchmark's figure at the end, another metric's mean over the last ten steps; None without any."""
    values = [line[key] for line in lines if key in line]
    if not values:
        return None
    return values[-1] if key.startswith("eval/") else statistics.fmean(values[-10:])


def cell(key: str, values: list[float | None]) -> str:
    """Mean over the seeds and, of more than one, the standard deviation."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    mean = statistics.fmean(found)
    text = f"{mean:.1f}" if key.endswith("length") else f"{mean:.2f}"
    return text + (f" +- {statistics.stdev(found):.2f}" if len(found) > 1 else "")


def table(folders: dict[str, list[Path]], columns: dict[str, str] = ROWS) -> str:
    """Markdown: a row per name, mean and standard deviation over its runs; first the model all start from.

    columns: {title: metric}; those that no run has are left out."""
    runs: dict[str, list[list[dict]]] = {}
    for name, seeds in folders.items():
        runs[name] = [plot.read_metrics(folder) for folder in seeds]
    every = [lines for seeds in runs.values() for lines in seeds]
    logged = set().union(*sum(every, []))  # of every line its keys
    titles = [title for title, key in columns.items() if key in logged]
    rows = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    first = next(iter(runs.values()))  # they all begin with the same model
    start = []
    for title in titles:
        start.append(cell(columns[title], [start_value(lines, columns[title]) for lines in first]))
    rows.append("| start | " + " | ".join(start) + " |")
    for name, seeds in runs.items():
        cells = []
        for title in titles:
            key = columns[title]
            cells.append(cell(key, [end_value(lines, key) for lines in seeds]))
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def compare(name: str, seeds: list[int], steps: int, workers: int, out: Path) -> str:
    """Run a set, write its figure and table (NAME.png, NAME.md) into `out`, return the table.

    Raises UserError for bad options, folders that hold other runs, and failed runs."""
    for flag, value in {"--workers": workers, "--steps": steps}.items():
        if value < 1:
            raise UserError(f"{flag} is {value}, but must be at least 1.")
    if min(seeds) < 0:
        raise UserError(f"--seeds has {min(seeds)}, but must have whole numbers from 0 on.")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out is '{out}', but must be a folder.")
    jobs = jobs_of(SETS[name], list(dict.fromkeys(seeds)), steps, out.resolve())
    run_all([job for of_name in jobs.values() for job in of_name], workers)
    folders = {}
    for title, of_name in jobs.items():
        folders[title] = [job.folder for job in of_name]
    text = table(folders, REAL_ROWS if name == "smollm2" else ROWS)
    every = [folder for seeds in folders.values() for folder in seeds]
    plot.plot(every, out / f"{name}.png", **FIGURES.get(name, {}))
    (out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    return text


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.compare", description=__doc__, formatter_class=shape)
    parser.add_argument("--set", choices=SETS, default="main")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="default: 40, of smollm2 16")
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=cores, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, help="default: runs/compare, of smollm2 runs/compare-smollm2")
    options = parser.parse_args()
    if options.out is None:  # the toy's sets share runs of one name
        options.out = Path("runs/compare-smollm2" if options.set == "smollm2" else "runs/compare")
    if options.steps is None:
        options.steps = STEPS.get(options.set, 40)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    try:
        print(compare(options.set, options.seeds, options.steps, options.workers, options.out))
    except (UserError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"Figure: {options.out / options.set}.png")


if __name__ == "__main__":
    main()
