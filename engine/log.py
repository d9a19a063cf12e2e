"""The diary of a run: what a step was made of, its line of metrics.jsonl, its votes and samples, and curves.

What is computed from votes is in metrics.py; where the files lie, and what they are read with, in
run_folder.py."""

from __future__ import annotations

import math
from collections import Counter

import torch
import torch.distributed as dist
from tqdm import tqdm

from engine.base import UserError, now, seconds, stable_hash
from engine.metrics import few_answers, grade, mean, step_metrics
from engine.ranks import distributed, print0
from engine.run_folder import RunFolder, has_evaluation

HEADLINE = {"majority_ratio": "majority", "length": "length", "batch_pass@1": "pass@1"}  # beside the bar
BAR = "{n_fmt}/{total_fmt}|{bar}| {elapsed}<{remaining}{postfix}"  # 100 columns show all
MAX_BAD_STEPS = 5  # optimizer steps in a row with a non-finite gradient, each skipped, that end a run


class Log(RunFolder):
    """What a run writes down, in the folder --out.

    vote, tokens and update keep what a step is made of until `step` writes it."""

    def __init__(self, options: dict, device, identity: dict):
        super().__init__(options, device, identity)
        self.board, self.bad_steps, self.warned = None, 0, set()
        self.first_diff = 0.0  # the first average difference of sampler and trainer, see common.check_sampler
        self.learns = False  # whether a loss has had a gradient
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what the last step left, and start the clock."""
        # groups: a dict of each prompt; updates: the means of each optimizer step; sums: [sum, weight,
        # sum of sizes] of each name, of the step that is being computed
        self.groups, self.updates, self.sums, self.skipped = [], [], {}, 0
        self.began, self.sampled_tokens = now(), 0
        seconds.clear()

    def open_board(self, steps_done: int) -> None:
        """Open TensorBoard and, with --wandb, Weights & Biases."""
        self.first_step = steps_done + 1
        if self.rank == 0:
            from torch.utils.tensorboard import SummaryWriter
            if self.options["wandb"]:
                import wandb
                wandb.init(project="label-free-rl", name=self.path.name, id=self.record["id"],
                           resume="allow", config=self.options, sync_tensorboard=True)
            self.board = SummaryWriter(str(self.path / "tensorboard"), purge_step=self.first_step)

    def begin(self, total_steps: int, benchmarks: dict) -> None:
        """Drop the lines of steps that are done again, and show the progress bar. The first step begins."""
        self.total_steps, self.benchmarks, steps_done = total_steps, benchmarks, self.first_step - 1
        # a killed run has written lines of steps that no checkpoint holds; a run that begins anew evaluates
        # step 0 again
        done = range(steps_done + 1) if steps_done else ()
        self.history = self.keep_lines("metrics.jsonl", done)
        self.learns = any(line.get("grad_norm", 0) > 1e-6 for line in self.history)
        self.evaluated = {line["step"] for line in self.history if has_evaluation(line)}  # steps
        self.keep_lines("evaluations.jsonl", self.evaluated)
        self.keep_lines("samples.jsonl", done)
        votes = self.keep_lines("votes.jsonl", done)
        self.majorities = {vote["problem"]: vote["majority"] for vote in votes}  # the last of each problem
        diffs = [line["logp_diff_mean"] for line in self.history if line.get("logp_diff_mean")]
        self.first_diff = diffs[0] if diffs else 0.0
        self.bar = tqdm(total=total_steps, initial=steps_done, bar_format=BAR, dynamic_ncols=True,
                        disable=self.rank > 0)
        self.begin_step()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """A line of metrics.jsonl, also for TensorBoard. Only finite values are kept."""
        # JSON knows neither NaN nor infinity
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.history.append(dict(step=step, **metrics))
        self.append("metrics.jsonl", self.history[-1])
        for name, value in metrics.items():
            if self.board:
                self.board.add_scalar(name, value, step)

    # -- during a step ---------------------------------------------------------------------------------------
    def vote(self, prompt, responses: list, classes: list[int | None], rewards: torch.Tensor,
             label: int | None | dict[int, float], negatives: set[int] = frozenset()) -> None:
        """Keep a prompt's votes for the log.

        label: the class taken as right, or {class: weight}; None: abstained. negatives: taken as wrong.
        Raises ValueError if there is not one class and one finite reward per response."""
        n = len(responses)
        # [n, 1] would be compared with [n] as [n, n], and NaN trains every response of the prompt by NaN
        if len(classes) != n or rewards.shape != (n,) or not rewards.isfinite().all():
            raise ValueError(f"there must be {n} classes and finite rewards [{n}], but there are "
                             f"{len(classes)} and {list(rewards.shape)}: {repr(rewards)[:80]}")
        if not isinstance(label, dict):
            label = {label: 1.0} if label in classes and label is not None else {}  # gold: maybe nobody's
        self.groups.append(dict(prompt=prompt, responses=responses, classes=classes, rewards=rewards.tolist(),
                                label=label, negatives=sorted(negatives)))

    def tokens(self, weight_T: torch.Tensor, **values_T: torch.Tensor) -> None:
        """Add up per-token values [T], and their weights, over the micro-batches of an optimizer step.

        Raises ValueError if they have another shape than the weights: [T, 1] times [T] would be a loss of
        every token with the advantage of every other one."""
        for name, values in values_T.items():
            if weight_T.dim() != 1 or values.shape != weight_T.shape:
                raise ValueError(f"{name} must have one value per response token, as weight_T, but has the "
                                 f"shape {list(values.shape)}, and weight_T has {list(weight_T.shape)}")
            weighted_T = values.detach().float() * weight_T
            sums = torch.stack([weighted_T.sum(), weight_T.sum(), weighted_T.abs().sum()])
            self.sums[name] = self.sums.get(name, 0.0) + sums

    def update(self, grad_norm: float) -> None:
        """End of an optimizer step: its means over all ranks are kept, or it is counted as skipped.

        Raises ValueError if the loss has no gradient, UserError after MAX_BAD_STEPS skipped ones in a row."""
        # sorted: the same order on all ranks, whose micro-batches may differ
        names, means = sorted(self.sums), dict(grad_norm=grad_norm)
        sums = torch.stack([self.sums[name] for name in names])  # [names, 3]
        if distributed():
            dist.all_reduce(sums)
        for name, (total, weight, size) in zip(names, sums.tolist()):
            # Responses without a gradient were not computed: they add 0 to the loss, but are in no mean.
            if name == "loss":
                means[name] = total
                # A run's first update is at ratio 1, where nothing is clipped. What rounds is no loss, and
                # what once had a gradient has a log-prob in it.
                if not self.learns and 1e-6 < size < math.inf and grad_norm < 1e-7 * size:
                    raise ValueError("the loss is not 0, but its gradient is: a log-prob in it was detached")
                self.learns |= grad_norm > 1e-6
            elif weight:
                means[name] = total / weight
        self.sums = {}
        if math.isfinite(grad_norm):
            self.updates.append(means)
            self.bad_steps = 0
            return
        self.skipped += 1
        self.bad_steps += 1
        wrong = f"a {'gradient' if math.isfinite(means.get('loss', 0.0)) else 'loss'} that is NaN or infinite"
        self.warn_once("skipped", f"an optimizer step was skipped: it had {wrong}.")
        if self.bad_steps >= MAX_BAD_STEPS:
            raise UserError(f"{self.bad_steps} optimizer steps in a row had {wrong}; give a lower --lr, or "
                            "look for a division by 0, a root or a logarithm in a loss of your own.")

    def step(self, step: int, trained: list, **own: float) -> None:
        """End of a step: its line of metrics.jsonl, its votes and samples, the progress bar.

        trained: the responses that were trained. own: the script's own metrics, which are numbers (of a
        tensor: .item()) and have none of the log's names, else Python raises TypeError."""
        self._judge(set(trained))
        if advice := few_answers([group["verdicts"] for group in self.groups]):
            self.warn_once("answers", f"step {step}: {advice}")
        metrics = step_metrics(self.groups)
        for name in dict.fromkeys(name for update in self.updates for name in update):
            metrics[name] = mean(update[name] for update in self.updates if name in update)
        metrics["skipped_updates"] = self.skipped
        if self.device.type == "cuda":  # what the update has taken, as torch keeps it; vLLM sleeps
            free, total = torch.cuda.mem_get_info()
            metrics["peak_memory_gib"] = (total - free) / 2 ** 30
        updated = sum(len(r.prompt_ids) + len(r.response_ids) for r in trained)
        for name, tokens in dict(sample=self.sampled_tokens, update=updated).items():
            metrics[f"tokens_per_second/{name}"] = tokens / max(seconds[name], 1e-9)
        took = now() - self.began  # other: what belongs to no phase
        for name, value in (seconds | dict(other=took - seconds.total(), step=took)).items():
            metrics[f"seconds/{name}"] = value
        self._write(step, dict(**metrics, **own))  # and not |, which would take one of two of the same name
        self._warn_if_idle(step)
        shown = {short: round(metrics[name], 2) for name, short in HEADLINE.items() if name in metrics}
        self.bar.set_postfix(shown)
        self.bar.update(1)
        for group in self.groups:
            self.append("votes.jsonl", dict(step=step, **vote_record(group)))
        # sorted by a hash, so that samples.jsonl follows the same problems whenever they come up
        self.groups.sort(key=lambda group: stable_hash("watch", group["prompt"].question))
        # votes.jsonl above has all of a step's problems in short, this some of them with their texts
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
        self.began += took  # an evaluation lies in the middle of a step, but is none of its time
        self._write(step, metrics | {"seconds/evaluate": took})
        self.bar.unpause()  # and of none that the bar expects
        scores = [f"{name} {value:.3f}" for name, value in metrics.items()
                  if name.endswith(("/greedy", "/pass@1"))]
        print0(f"Step {step}: {', '.join(scores)}")
        self.evaluated.add(step)

    def evaluation_is_due(self, step: int) -> bool:
        """Whether the policy that has made so many steps is still to be evaluated."""
        every = self.options["eval_every"]
        due = step == self.total_steps or every and step % every == 0
        due = due if step else self.options["eval_start"]
        return bool(self.benchmarks and due and step not in self.evaluated)

    def _judge(self, trained: set) -> None:
        """Add to each vote who was trained, the verdicts by the gold answer, and whether its majority is
        another one than when the problem was last seen (None: it is new)."""
        for group in self.groups:
            prompt, responses = group["prompt"], group["responses"]
            group["trained"] = {i for i, response in enumerate(responses) if response in trained}
            group["verdicts"] = grade(prompt, responses)
            group["flipped"] = None
            if prompt.question in self.majorities:
                pair = [self.majorities[prompt.question], group["verdicts"]["answer"]]
                group["flipped"] = len(set(prompt.classes(pair))) > 1
        for group in self.groups:  # only now: a fork may ask the same problem twice in a step
            self.majorities[group["prompt"].question] = group["verdicts"]["answer"]

    def _warn_if_idle(self, step: int) -> None:
        """Tell after five steps, and after the last, if none so far has taught anything: it costs as long."""
        steps = [line for line in self.history if "skipped_updates" in line]
        # the loss: of Dynamic RL's questions, which are no votes
        idle = all(line.get("zero_variance") == 1 and abs(line.get("loss", 1)) < 1e-3 for line in steps)
        if idle and step in (5, self.total_steps):
            print0(f"Warning: all advantages were 0 in {len(steps)} steps, since the rewards of a prompt "
                   "were equal: nothing was learned.")

    def warn_once(self, kind: str, text: str) -> None:
        """Print a warning, each kind once in a run."""
        if kind not in self.warned:
            self.warned.add(kind)
            print0(f"Warning: {text}")

    def finish(self) -> None:
        """Close what is open; print the evaluations and what to open next.

        Raises UserError if no optimizer step was taken, since all were skipped."""
        self.bar.close()
        if self.board:
            self.board.close()
        skipped = int(sum(line.get("skipped_updates", 0) for line in self.history))
        if skipped and not any("grad_norm" in line for line in self.history):
            raise UserError(f"all {skipped} optimizer steps were skipped, since their loss or gradient was "
                            f"NaN or infinite: {self.path / 'final'} is the model that the run began with.")
        print0(f"{evaluation_table(self.history)}\n\nFinal model: {self.path / 'final'}\n"
               f"The votes on one page: python -m tools.report {self.path}")


def evaluation_table(history: list[dict]) -> str:
    """The first and the last evaluation side by side, with the largest k alone; empty without one."""
    evaluated = [line for line in history if has_evaluation(line)]
    if not evaluated:
        return ""
    before, after = evaluated[0], evaluated[-1]
    largest = str(max((int(name.rpartition("@")[2]) for name in after if "@" in name), default=1))
    lines = [f"\n{'':34}{'step ' + str(before['step']):>12}{'step ' + str(after['step']):>12}"]
    for name, value in after.items():
        metric, _, k = name.rpartition("/")[2].partition("@")
        if name.startswith("eval/") and (metric in ("greedy", "length") or k in ("1", largest)):
            lines.append(f"{name.removeprefix('eval/'):34}{before.get(name, math.nan):12.3f}{value:12.3f}")
    return "\n".join(lines)


def vote_record(group: dict) -> dict:
    """One prompt's vote in short, a line of votes.jsonl, as docs/metrics.md describes it."""
    prompt, label, verdicts = group["prompt"], group["label"], group["verdicts"]
    classes, kind = verdicts["classes"], "none"
    ranked = Counter(c for c in classes if c is not None).most_common()
    right = [c in verdicts["right"] for c, _ in ranked]
    if label:  # it names the script's own classes, which are others than ours with --labels gold
        taken = dict(zip(group["classes"], classes)).get(max(label, key=label.get))
        kind = "given" if not verdicts["known"] else "right" if taken in verdicts["right"] else "wrong"
    # an answer can be as long as a response, but only the majority's is needed whole: it is compared later
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
    # a text's end holds the answer; whole texts of all responses would fill a disk
    for i, (r, c, reward) in enumerate(zip(responses, group["classes"], group["rewards"])):
        trained = i in group["trained"]
        rows.append(dict(
            text=r.text[-2000 if i < 2 else -200:], answer=r.answer, answer_class=c, reward=round(reward, 6),
            trained=trained, advantage=round(r.advantage, 6) if trained else None, tokens=r.length,
            finished=r.finished, entropy=None if r.entropy is None else round(r.mean(r.entropy), 4)))
    label = {str(c): round(weight, 6) for c, weight in group["label"].items()}
    equal = [group["verdicts"]["gold"], *group["verdicts"]["classes"]]  # gold, then the answers
    return dict(step=step, problem=prompt.question, gold=prompt.answer, equal=equal, label=label,
                right=sorted(group["verdicts"]["right"]), negatives=group["negatives"], responses=rows)
