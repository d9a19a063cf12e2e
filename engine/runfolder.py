"""A run's folder and what is shown of it: run.json, metrics, samples, TensorBoard, progress bar."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tqdm import tqdm

from engine.base import UserError, gather, on_all_ranks, same_on_all_ranks, seed_of, write_atomically
from engine.options import read_run, script_name
from engine.setup import describe

HEADLINE = ("reward", "majority_ratio", "entropy", "length", "batch_pass@1")  # beside the progress bar
# JSON without spaces, and characters as they are: an escape takes twice the bytes of most of them
compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class RunFolder:
    """Rank 0 writes, the others only take part in the errors."""

    def __init__(self, args, rank: int, ranks: int, device, identity: dict):
        """identity: setup.identity's. Raises UserError if the folder cannot be used."""
        self.args, self.rank, self.history, self.bar, self.board = args, rank, [], None, None
        self.identity, self.before, self.record = {}, {}, {}
        name = f"{script_name()}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.path = Path(gather(args.out or f"runs/{name}")[0])
        on_all_ranks(partial(self._open, ranks, device),
                     lambda reason: f"--out is '{self.path}', which cannot be written: {reason}.")
        self.identify(identity)

    def identify(self, content: dict[str, int]) -> None:
        """Keep in run.json what all ranks must share, and a resumed run with the one before it.

        Raises UserError, naming the entry, if they do not."""
        same_on_all_ranks(content)
        other = [name for name, value in content.items() if self.before.get(name, value) != value]
        if other := gather(other)[0]:
            raise UserError(f"--resume: {other[0]} differs from what the run in '{self.path}' had; start a "
                            "new run.")
        self.identity |= content
        if self.rank == 0:
            record = self.record | dict(identity=self.identity)
            write_atomically(self.path / "run.json", json.dumps(record, indent=1))

    def _open(self, ranks: int, device) -> None:
        """Lock the folder and look at the run in it, before anything slow."""
        if self.rank:
            return
        out, wrong = self.path, f"--out is '{self.path}', "
        if self.args.resume:
            run = read_run(out)
        elif out.is_dir() and set(os.listdir(out)) - {"lock"}:
            raise UserError(wrong + "which is not empty; give another folder, or --resume if it holds a run.")
        for path in out.rglob("*"):
            if path.is_symlink():  # through which a stranger's folder could have a run write anywhere
                raise UserError(wrong + f"which holds the link '{path.name}'; remove it.")
        out.mkdir(parents=True, exist_ok=True)
        self.lock = (out / "lock").open("a")
        try:  # the system lets go of it when this process dies, however it dies
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(wrong + "in which another process is running; give another folder.") from None
        except OSError:  # some network file systems have no locks
            pass
        self.record = describe(self.args, ranks, device)
        if self.args.resume:
            self.before = run["identity"]
            self.record["before"] = [*run.pop("before", []), run]  # the run's earlier starts, oldest first
        script, start = Path(sys.argv[0]), 1 + len(self.record.get("before", []))
        if script.suffix == ".py" and script.is_file():
            shutil.copyfile(script, out / ("script.py" if start == 1 else f"script-{start}.py"))

    def say(self, text: str) -> None:
        """Print a line on rank 0, above the progress bar if there is one."""
        if self.rank == 0:
            tqdm.write(text)
            sys.stdout.flush()

    # -- during the run --------------------------------------------------------------------------------------
    def start(self, first_step: int, total: int) -> None:
        """Drop the lines of steps that are done again, open TensorBoard and the progress bar."""
        if self.rank:
            return
        from torch.utils.tensorboard import SummaryWriter
        self.history += self._keep_lines("metrics.jsonl", first_step)
        for name in ("samples.jsonl", "evaluations.jsonl", "votes.jsonl"):
            self._keep_lines(name, first_step)
        if self.args.wandb:
            import wandb
            wandb.init(project="label-free-rl", name=self.path.name, id=self.path.name, resume="allow",
                       sync_tensorboard=True)
        self.board = SummaryWriter(str(self.path / "tensorboard"), purge_step=first_step)
        self.bar = tqdm(total=total, initial=first_step - 1, desc=script_name(), dynamic_ncols=True)

    def _keep_lines(self, name: str, first_step: int) -> list[dict]:
        path = self.path / name
        done = range(first_step) if first_step > 1 else ()  # a run that begins anew evaluates step 0 again
        kept = [line for line in read_jsonl(path) if line.get("step") in done]
        if path.exists():
            write_atomically(path, "".join(compact(line) + "\n" for line in kept))
        return kept

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl, TensorBoard and the progress bar. Only finite values are kept."""
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.history.append(dict(step=step, **metrics))
        if self.rank:
            return
        self.append("metrics.jsonl", self.history[-1])
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        if step:
            self.bar.set_postfix({name: metrics[name] for name in HEADLINE if name in metrics})
            self.bar.update(1)

    def log_samples(self, step: int, groups: list[dict]) -> None:
        """A line of votes.jsonl for each of a step's prompts; and of two the whole vote in samples.jsonl: of
        the same problems whenever they come up."""
        for group in groups:
            self.append("votes.jsonl", dict(step=step, **vote_record(group)))
        for group in sorted(groups, key=lambda group: seed_of("watch", group["prompt"].question))[:2]:
            self.append("samples.jsonl", sample_record(step, group))

    def append(self, name: str, record: dict) -> None:
        """Add a line to a .jsonl file of the run. Raises UserError if it cannot be written."""
        if self.rank:
            return
        try:
            with (self.path / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(compact(record) + "\n")  # a lone surrogate becomes \ud800, as in JSON
        except OSError as error:
            raise UserError(f"{self.path / name} cannot be written: {error.strerror}; --resume goes on from "
                            "the last checkpoint.") from None

    def finish(self) -> None:
        """A table of the evaluations before and after, and what to open next."""
        if self.rank:
            return
        self.bar.close()
        self.board.close()
        print(evaluation_table(self.history))
        print(f"Final model: {self.path / 'final'}\nCurves: python -m tools.plot {self.path}\n"
              f"Votes step by step: python -m tools.report {self.path}", flush=True)


def read_jsonl(path: Path) -> list[dict]:
    """The objects in a file's lines; none if there is no file. A killed run may leave half a last line."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def evaluation_table(history: list[dict]) -> str:
    """The first and the last evaluation side by side; empty without one."""
    evaluated = [line for line in history if "eval/" in " ".join(line)]
    if not evaluated:
        return ""
    before, after = evaluated[0], evaluated[-1]
    lines = [f"\n{'':34}{'step ' + str(before['step']):>12}{'step ' + str(after['step']):>12}"]
    for name, value in after.items():
        if name.startswith("eval/") and not name.endswith("stderr"):
            lines.append(f"{name.removeprefix('eval/'):34}{before.get(name, math.nan):12.3f}{value:12.3f}")
    return "\n".join([*lines, "pass@1: the share of right responses; pass@k: of problems that at least one "
                      "of k solves; maj@k: of problems where the majority of k is right"])


def vote_record(group: dict) -> dict:
    """One prompt's vote in short, for votes.jsonl.

    problem, answer: its text and gold answer; n: responses; counts: [[answer, votes], ...], most votes
    first, of an answer its first 40 characters; share: of the majority; gold: the place of the gold answer in
    counts (null: nobody gave it, or there is none); right: whether the majority is (null: no gold answer);
    label: right, wrong, none (the script abstained) or given (no gold answer), of several weighted labels the
    heaviest; trained: responses."""
    prompt, label, answers = group["prompt"], group["label"], [r.answer for r in group["responses"]]
    gold, *classes = prompt.classes([prompt.answer, *answers])
    ranked = Counter(c for c in classes if c is not None).most_common()
    order = [c for c, _ in ranked]
    kind = "none"
    if label:  # it names the script's own classes
        taken = dict(zip(group["classes"], classes)).get(max(label, key=label.get))
        kind = "given" if gold is None else "right" if taken == gold else "wrong"
    right = None if gold is None else order[:1] == [gold]
    return dict(problem=prompt.question, answer=prompt.answer, n=len(answers),
                counts=[[answers[classes.index(c)][:40], votes] for c, votes in ranked],
                share=round(ranked[0][1] / len(answers), 4) if ranked else 0.0, right=right,
                gold=order.index(gold) if gold in order else None, label=kind, trained=len(group["trained"]))


def sample_record(step: int, group: dict) -> dict:
    """One prompt's whole vote for samples.jsonl. The texts are the ends of the responses, long ones of the
    first two."""
    prompt, responses = group["prompt"], group["responses"]
    rows = []
    for i, (r, c, reward) in enumerate(zip(responses, group["classes"], group["rewards"])):
        trained = i in group["trained"]
        rows.append(dict(
            text=r.text[-2000 if i < 2 else -100:], answer=r.answer, answer_class=c, reward=round(reward, 6),
            trained=trained, advantage=round(r.advantage, 6) if trained else None, tokens=r.length,
            finished=r.finished, entropy=None if r.entropy is None else round(r.mean(r.entropy), 4)))
    label = {str(c): round(weight, 6) for c, weight in group["label"].items()}
    equal = prompt.classes([prompt.answer, *(r.answer for r in responses)])  # gold, then the answers
    return dict(step=step, problem=prompt.question, gold=prompt.answer, equal=equal, label=label,
                negatives=group["negatives"], responses=rows)
