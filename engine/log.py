"""A run's folder and what is written there: run.json, metrics, votes, samples, TensorBoard, progress bar."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from engine.base import UserError, all_gather, distributed, first_line, now, on_rank_0, print0, rank_and_ranks
from engine.base import read_run, same_on_all_ranks, script_name, seconds, stable_hash, write_atomically
from engine.metrics import few_answers, grade, mean, step_metrics
from engine.process import at_exit, begun

HEADLINE = ("reward", "majority_ratio", "entropy", "length", "batch_pass@1")  # beside the progress bar
MAX_BAD_STEPS = 5  # optimizer steps in a row with a non-finite gradient, each skipped, that end a run
# JSON without spaces, and characters as they are: an escape takes twice the bytes of most of them
compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Log:
    """What a run writes down. Only rank 0 writes; if it fails, every rank raises the same error.

    vote, tokens and update keep what a step is made of until `step` writes it."""

    def __init__(self, options: dict, device, identity: dict):
        """options: all, by name. identity: data.digests'. Raises UserError if the folder cannot be used."""
        self.options, self.device, (self.rank, ranks) = options, device, rank_and_ranks()
        self.board, self.bad_steps, self.warned = None, 0, False
        self.identity, self.before, self.record = {}, {}, {}
        self.begin_step()
        name = f"{script_name()}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.path = Path(all_gather(options["out"] or f"runs/{name}")[0])
        if self.rank == 0:
            self.record = describe(options, ranks, device) | dict(wandb=uuid.uuid4().hex[:8])
        on_rank_0(self._open, lambda reason: f"--out is '{self.path}', which cannot be written: {reason}.")
        self.identify(identity, write=not self.before)  # a --resume that is refused changes nothing

    def begin_step(self) -> None:
        """Forget what the last step left, and start the clock."""
        self.groups, self.updates, self.sums, self.skipped = [], [], {}, 0
        self.began, self.sampled = now(), 0  # sampled: tokens
        seconds.clear()

    # -- the folder ------------------------------------------------------------------------------------------
    def identify(self, content: dict[str, int], write: bool = True) -> None:
        """Keep in run.json what all ranks must share, and a resumed run with the one before it.

        Raises UserError, naming the entry, if they do not."""
        same_on_all_ranks(content)
        other = [name for name, value in content.items() if self.before.get(name, value) != value]
        if other := all_gather(other)[0]:
            raise UserError(f"--resume: {other[0]} differs from what the run in '{self.path}' had; start a "
                            "new run.")
        self.identity |= content
        if self.rank == 0 and write:
            record = self.record | dict(identity=self.identity)
            write_atomically(self.path / "run.json", json.dumps(record, indent=1))

    def _open(self) -> None:
        """Lock the folder and look at the run in it, before anything slow."""
        out, wrong = self.path, f"--out is '{self.path}', "
        if self.options["resume"]:
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
        if self.options["resume"]:
            self.before = run["identity"]
            self.record["wandb"] = run.get("wandb", self.record["wandb"])
            self.record["before"] = [*run.pop("before", []), run]  # the run's earlier starts, oldest first
        else:
            begun.append(out)
        script, start = Path(sys.argv[0]), 1 + len(self.record.get("before", []))
        if script.suffix == ".py" and script.is_file():
            shutil.copyfile(script, out / ("script.py" if start == 1 else f"script-{start}.py"))

    def open_boards(self, steps_done: int) -> None:
        """Open TensorBoard and with --wandb Weights & Biases. Raises UserError if one cannot be opened."""
        self.first_step = steps_done + 1
        names = "--wandb or TensorBoard" if self.options["wandb"] else "TensorBoard"
        on_rank_0(self._open_boards, lambda reason: f"{names} does not start: {reason}.")

    def _open_boards(self) -> None:
        from torch.utils.tensorboard import SummaryWriter
        if self.options["wandb"]:
            import wandb
            at_exit.append(wandb.finish)  # also where a run ends without unwinding
            wandb.init(project="label-free-rl", name=self.path.name, id=self.record["wandb"], resume="allow",
                       config=self.options, sync_tensorboard=True)
        self.board = SummaryWriter(str(self.path / "tensorboard"), purge_step=self.first_step)

    def _draw(self, method: str, *values) -> None:
        """Call a method of TensorBoard's writer. If that fails, as on a full disk, the curves end."""
        try:
            if self.board:
                getattr(self.board, method)(*values)
        except Exception as error:
            self.board = None
            print0(f"Warning: the curves end here, since TensorBoard cannot write ({type(error).__name__} "
                   f"{first_line(error)}); the run goes on, and metrics.jsonl has all numbers.")

    def begin(self, total_steps: int, benchmarks: dict) -> None:
        """Drop the lines of steps that are done again, and show the progress bar. The first step begins."""
        self.total_steps, self.benchmarks, steps_done = total_steps, benchmarks, self.first_step - 1
        done = range(steps_done + 1) if steps_done else ()  # a run that begins anew evaluates step 0 again
        self.history = self._keep_lines("metrics.jsonl", done)
        self.evaluated = {line["step"] for line in self.history if has_evaluation(line)}  # steps
        self._keep_lines("evaluations.jsonl", self.evaluated)
        self._keep_lines("samples.jsonl", done)
        votes = self._keep_lines("votes.jsonl", done)
        self.majorities = {vote["problem"]: vote["majority"] for vote in votes}  # the last of each problem
        diffs = [line["logp_diff_mean"] for line in self.history if line.get("logp_diff_mean")]
        self.first_diff = diffs[0] if diffs else 0.0  # see common.check_sampler
        self.bar = tqdm(total=total_steps, initial=steps_done, desc=script_name(), dynamic_ncols=True,
                        disable=self.rank > 0)
        self.begin_step()

    def _keep_lines(self, name: str, steps) -> list[dict]:
        """The lines of these steps, on all ranks; the others are dropped from the file."""
        path, kept = self.path / name, [line for line in self.lines(name) if line.get("step") in steps]
        if self.rank == 0 and path.exists():
            write_atomically(path, "".join(compact(line) + "\n" for line in kept))
        return kept

    def append(self, name: str, record: dict) -> None:
        """Add a line to a .jsonl file of the run. Raises UserError if it cannot be written."""
        if self.rank:
            return
        try:
            with (self.path / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(compact(record) + "\n")  # a lone surrogate becomes \ud800, as in JSON
        except OSError as error:
            raise UserError(f"{self.path / name} cannot be written: {error.strerror}; --resume continues "
                            "from the last checkpoint.") from None

    def lines(self, name: str) -> list[dict]:
        """The lines of a .jsonl file of the run, on all ranks."""
        return on_rank_0(lambda: read_jsonl(self.path / name))

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """A line of metrics.jsonl, also for TensorBoard. Only finite values are kept."""
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.history.append(dict(step=step, **metrics))
        self.append("metrics.jsonl", self.history[-1])
        for name, value in metrics.items():
            self._draw("add_scalar", name, value, step)

    # -- during a step ---------------------------------------------------------------------------------------
    def vote(self, prompt, responses: list, classes: list[int | None], rewards: torch.Tensor,
             label: int | None | dict[int, float], negatives: set[int] = frozenset()) -> None:
        """Keep a prompt's votes for the log.

        label: the class taken as right, or {class: weight}; None: abstained. negatives: taken as wrong.
        Raises ValueError if there is not one class and one finite reward per response, or if a label is no
        class."""
        n, floats = len(responses), isinstance(rewards, torch.Tensor) and rewards.is_floating_point()
        if not floats or rewards.shape != (n,) or not rewards.isfinite().all():
            raise ValueError(f"rewards must be a tensor [{n}] of finite floats, but are {repr(rewards)[:80]}")
        if len(classes) != n or not all(c is None or isinstance(c, int) for c in classes):
            raise ValueError(f"classes must be a list of {n} whole numbers or None, but are "
                             f"{repr(classes)[:80]}")
        named = [*(label if isinstance(label, dict) else [label]), *negatives]
        if not all(c is None or isinstance(c, int) for c in named):
            raise ValueError(f"label and negatives must be classes, which are whole numbers, but are {named}")
        if not isinstance(label, dict):
            label = {label: 1.0} if label in classes and label is not None else {}  # gold: maybe nobody's
        self.groups.append(dict(prompt=prompt, responses=responses, classes=classes, rewards=rewards.tolist(),
                                label=label, negatives=sorted(negatives)))

    def tokens(self, weight_T: torch.Tensor, **values_T: torch.Tensor) -> None:
        """Add up per-token values [T], and their weights, over the micro-batches of an optimizer step."""
        for name, values in values_T.items():
            sums = torch.stack([(values.detach().float() * weight_T).sum(), weight_T.sum()])
            self.sums[name] = self.sums.get(name, 0.0) + sums

    def update(self, grad_norm: float) -> None:
        """End of an optimizer step: its means over all ranks are kept, or it is counted as skipped."""
        names, means = sorted(self.sums), dict(grad_norm=grad_norm)
        sums = torch.stack([self.sums[name] for name in names])  # [names, 2]
        if distributed():
            dist.all_reduce(sums)
        for name, (total, weight) in zip(names, sums.tolist()):
            # Responses without a gradient were not computed: they add 0 to the loss, but are in no mean.
            if name == "loss":
                means[name] = total
            elif weight:
                means[name] = total / weight
        self.sums = {}
        if math.isfinite(grad_norm):
            self.updates.append(means)
            self.bad_steps = 0
            return
        self.skipped += 1
        self.bad_steps += 1
        if self.bad_steps >= MAX_BAD_STEPS:
            raise UserError(f"{self.bad_steps} optimizer steps in a row had a non-finite loss or gradient; "
                            "give a lower --lr.")

    def step(self, step: int, trained: list, **own: float) -> None:
        """End of a step: its line of metrics.jsonl, its votes and samples, the progress bar.

        trained: the responses that were trained. own: the script's own metrics, which are numbers (of a
        tensor: .item()) and have none of the log's names, else Python raises TypeError."""
        chosen = set(trained)
        for group in self.groups:
            group["trained"] = {i for i, response in enumerate(group["responses"]) if response in chosen}
            group["verdicts"] = grade(group["prompt"], group["responses"])
            group["flipped"], question = None, group["prompt"].question
            if question in self.majorities:
                pair = [self.majorities[question], group["verdicts"]["answer"]]
                group["flipped"] = len(set(group["prompt"].classes(pair))) > 1
        self.majorities |= {group["prompt"].question: group["verdicts"]["answer"] for group in self.groups}
        metrics = step_metrics(self.groups)
        for name in dict.fromkeys(name for update in self.updates for name in update):
            metrics[name] = mean(update[name] for update in self.updates if name in update)
        metrics["skipped_updates"] = self.skipped
        if self.device.type == "cuda":  # what the update has taken, as torch keeps it; vLLM sleeps
            free, total = torch.cuda.mem_get_info()
            metrics["peak_memory_gib"] = (total - free) / 2 ** 30
        few = few_answers([response for group in self.groups for response in group["responses"]])
        if few and not self.warned:
            print0(f"Warning: step {step}: {few}")
            self.warned = True
        updated = sum(len(r.prompt_ids) + len(r.response_ids) for r in trained)
        for name, tokens in dict(sample=self.sampled, update=updated).items():
            metrics[f"tokens_per_second/{name}"] = tokens / max(seconds[name], 1e-9)
        took = now() - self.began
        for name, value in (seconds | dict(other=took - seconds.total(), step=took)).items():
            metrics[f"seconds/{name}"] = value
        if no_number := [name for name, value in own.items() if not isinstance(value, int | float)]:
            raise TypeError(f"the metric {no_number[0]!r} must be a number (of a tensor: .item())")
        self._write(step, dict(**metrics, **own))  # and not |, which would take one of two of the same name
        self.bar.set_postfix({name: metrics[name] for name in HEADLINE if name in metrics})
        self.bar.update(1)
        for group in self.groups:
            self.append("votes.jsonl", dict(step=step, **vote_record(group)))
        # the same problems whenever they come up
        self.groups.sort(key=lambda group: stable_hash("watch", group["prompt"].question))
        for group in self.groups[:self.options["log_texts"]]:
            self.append("samples.jsonl", sample_record(step, group))
        self.begin_step()

    def evaluation(self, step: int, metrics: dict[str, float], verdicts: dict[str, list[dict]],
                   greedy: dict[str, list[dict]]) -> None:
        """Write a line of metrics.jsonl and one per benchmark of evaluations.jsonl: what came out for each
        problem, so that intervals over problems can be computed later."""
        for name, graded in verdicts.items():
            known = [verdict for verdict in graded if verdict["known"]]
            row = dict(step=step, benchmark=name, right=[mean(v["correct"]) for v in known],
                       majority=[v["majority"] for v in known])
            if name in greedy:
                row["greedy"] = [int(v["correct"][0]) for v in greedy[name] if v["known"]]
            self.append("evaluations.jsonl", row)
        took = seconds.pop("evaluate")
        self.began += took  # the next step's time is without it
        self._write(step, metrics | {"seconds/evaluate": took})
        self.evaluated.add(step)

    def evaluation_is_due(self, step: int) -> bool:
        """Whether the policy that has made so many steps is still to be evaluated."""
        every = self.options["eval_every"]
        due = step == self.total_steps or every and step % every == 0
        due = due if step else self.options["eval_start"]
        return bool(self.benchmarks and due and step not in self.evaluated)

    def finish(self) -> None:
        """Close what is open; print a table of the evaluations before and after, and what to open next."""
        self.bar.close()
        self._draw("close")
        print0(f"{evaluation_table(self.history)}\nFinal model: {self.path / 'final'}\n"
               f"What happened, with every vote: python -m tools.report {self.path}")
        card = model_card(self.options, self.changed, self.history)
        on_rank_0(lambda: write_atomically(self.path / "final/README.md", card))


def has_evaluation(line: dict) -> bool:
    return any(name.startswith("eval/") for name in line)


def read_metrics(folder: Path) -> list[dict]:
    """A run's metrics, one dict per step: its line of metrics.jsonl and that of its evaluation, together."""
    steps = {}
    for line in read_jsonl(Path(folder) / "metrics.jsonl"):
        steps[line.get("step")] = steps.get(line.get("step"), {}) | line
    return list(steps.values())


def read_jsonl(path: Path) -> list[dict]:
    """The objects in a file's lines; none if there is no file. A killed run may leave half a last line."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def evaluation_table(history: list[dict]) -> str:
    """The first and the last evaluation side by side; empty without one."""
    evaluated = [line for line in history if has_evaluation(line)]
    if not evaluated:
        return ""
    before, after = evaluated[0], evaluated[-1]
    lines = [f"\n{'':34}{'step ' + str(before['step']):>12}{'step ' + str(after['step']):>12}"]
    for name, value in after.items():
        if name.startswith("eval/") and not name.endswith("stderr"):
            lines.append(f"{name.removeprefix('eval/'):34}{before.get(name, math.nan):12.3f}{value:12.3f}")
    return "\n".join([*lines, "pass@1: the share of right responses, greedy: at temperature 0; pass@k: of "
                      "problems that at least one of k solves; maj@k: where the majority of k is right"])


def model_card(options: dict, changed: dict, history: list[dict]) -> str:
    """README.md of the final model, as the Hub shows it. Of local paths only the names are told."""
    def told(value) -> str:
        return Path(value).name if isinstance(value, str) and os.path.exists(value) else str(value)

    model = told(options["model"]) or "toy"
    script, paper = script_name(), (sys.modules["__main__"].__doc__ or "").partition("\n")[0]
    head = ["library_name: transformers", "pipeline_tag: text-generation", f"tags: [label-free-rl, {script}]"]
    if "/" in model:  # a name of the Hub
        head.append(f"base_model: {model}")
    flags = [f"--{name} {told(value)}" for name, value in changed.items() if name not in ("out", "resume")]
    data = f"Data: {told(options['dataset']) or 'none'}. Labels: {options['labels']}. "
    return "\n".join(["---", *head, "---", "", f"# {model}, trained by {script}.py", "", paper, "",
                      f"{data}Flags that differ from the script's defaults: `{' '.join(flags)}`", "",
                      "```", evaluation_table(history).strip("\n") or "not evaluated", "```", ""])


def vote_record(group: dict) -> dict:
    """One prompt's vote in short, a line of votes.jsonl, as docs/metrics.md describes it."""
    prompt, label, verdicts = group["prompt"], group["label"], group["verdicts"]
    classes, kind = verdicts["classes"], "none"
    ranked = Counter(c for c in classes if c is not None).most_common()
    right = [c in verdicts["right"] for c, _ in ranked]
    if label:  # it names the script's own classes
        taken = dict(zip(group["classes"], classes)).get(max(label, key=label.get))
        kind = "given" if not verdicts["known"] else "right" if taken in verdicts["right"] else "wrong"
    return dict(problem=prompt.question, answer=prompt.answer, n=len(classes),
                counts=[[group["responses"][classes.index(c)].answer[:40], votes] for c, votes in ranked],
                majority=verdicts["answer"], flipped=group["flipped"], label=kind,
                share=round(ranked[0][1] / len(classes), 4) if ranked else 0.0, trained=len(group["trained"]),
                right=verdicts["majority"] if verdicts["known"] else None,
                gold=right.index(True) if True in right else None)


def sample_record(step: int, group: dict) -> dict:
    """One prompt's whole vote for samples.jsonl. The texts are the ends of the responses, long ones of the
    first two."""
    prompt, responses = group["prompt"], group["responses"]
    rows = []
    for i, (r, c, reward) in enumerate(zip(responses, group["classes"], group["rewards"])):
        trained = i in group["trained"]
        rows.append(dict(
            text=r.text[-2000 if i < 2 else -200:], answer=r.answer, answer_class=c, reward=round(reward, 6),
            trained=trained, advantage=round(r.advantage, 6) if trained else None, tokens=r.length,
            finished=r.finished, entropy=None if r.entropy is None else round(r.mean(r.entropy), 4)))
    label = {str(c): round(weight, 6) for c, weight in group["label"].items()}
    equal = [group["verdicts"]["gold"], *group["verdicts"]["classes"]]  # gold, then the answers
    return dict(step=step, problem=prompt.question, gold=prompt.answer, equal=equal, label=label,
                negatives=group["negatives"], responses=rows)


# ------------------------------------------------ what run.json holds ---------------------------------------
def code_digest(script: Path) -> int:
    """Hash of a run's script, common.py, answers/, engine/ and toy/."""
    root, files = Path(__file__).parent.parent, [script]
    for pattern in ("common.py", "answers/*.py", "engine/*.py", "toy/*"):
        files += sorted(root.glob(pattern))
    return stable_hash([file.read_bytes() for file in files if file.is_file()])


def describe(options: dict, ranks: int, device) -> dict:
    """What run.json holds: script, command line, arguments, hardware, versions, git state, code, time."""
    git = ""  # also where there is no git, as in a slim container
    with contextlib.suppress(OSError):
        git = subprocess.run("git describe --always --dirty --abbrev=40 --exclude=*".split(),
                             cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    versions = {package.name: package.version for package in metadata.distributions()}
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    return dict(script=script_name(), command=sys.argv, args=options, ranks=ranks,
                device=hardware, python=platform.python_version(), versions=versions,
                git=git, code=code_digest(Path(sys.argv[0])),
                started=time.strftime("%Y-%m-%dT%H:%M:%S"))
