"""A run's plumbing: start-up, time, signals, the log, checkpoints. No number of an update is made here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from functools import partial

import torch

from engine import checkpoint
from engine.base import UserError, gather, same_on_all_ranks
from engine.data import Problem, encode_prompt, load_problems, show_prompt
from engine.metrics import mean, step_metrics
from engine.runfolder import RunFolder
from engine.plan import GIB, check_plan, checkpoint_bytes, plan, shape_of
from engine.policy import Rollout
from engine.setup import has_vllm, identity, read_config, read_tokenizer, start_processes


# ------------------------------------------ what scripts hand over -----------------------------------------
def check_votes(responses: list[Rollout], classes: list[int | None], rewards: torch.Tensor, label) -> None:
    """Raises ValueError if there is not one class (or None) and one finite reward per response, or the label
    is of another type."""
    n = len(responses)
    is_tensor = isinstance(rewards, torch.Tensor)
    if not is_tensor or rewards.shape != (n,) or not rewards.is_floating_point():
        got = f"{list(rewards.shape)} of {rewards.dtype}" if is_tensor else type(rewards).__name__
        raise ValueError(f"rewards must be a tensor [{n}] of floats, one per response, but are {got}")
    if not rewards.isfinite().all():
        raise ValueError(f"every reward must be a finite number, but they are {rewards.tolist()}")
    of_type = isinstance(classes, list) and all(c is None or isinstance(c, int) for c in classes)
    if not of_type or len(classes) != n:
        raise ValueError(f"classes must be a list of {n}, a whole number or None (no answer) per response, "
                         f"but are {repr(classes)[:80]}")
    if label is not None and not isinstance(label, (int, dict)):
        raise ValueError(f"label must be the class taken as right, or {{class: weight}}, or None, but is "
                         f"{repr(label)[:80]}")


def check_answer(answer: str | None, read_answer) -> str | None:
    """The same. Raises TypeError if it is neither text nor None, but whatever read_answer returned."""
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"{read_answer} must return text or None (no answer), but returned {answer!r}")
    return answer


def check_trained(train: list[Rollout]) -> None:
    """Raises ValueError if a response has no finite advantage or a mask that is not its own, or if the ranks
    have different batches."""
    for response in train:
        size, advantage = len(response.response_ids), response.advantage
        if not isinstance(advantage, (int, float)) or not math.isfinite(advantage):
            raise ValueError(f"a response has the advantage {advantage!r}; set response.advantage to a "
                             "finite number for all that is trained (of a tensor: .tolist())")
        if response.mask is not None and response.mask.shape != (size,):
            raise ValueError(f"a response of {size} tokens has a mask {list(response.mask.shape)}; "
                             "response.mask must have 1 or 0 for each token")
    ids = hashlib.blake2b(repr([r.response_ids for r in train]).encode()).digest()
    advantages = torch.tensor([r.advantage for r in train])
    for other_ids, others in gather((ids, advantages)):
        if other_ids != ids or not torch.allclose(advantages, others, rtol=1e-4):
            raise ValueError("the ranks have different batches: every rank must compute the same responses "
                             "and advantages, from all responses, without its rank, process id, clock or own "
                             "random numbers")


def check_state(state: dict) -> None:
    """Raises ValueError if a checkpoint would not give run.state back as it is."""
    if json.loads(json.dumps(state)) != state:
        raise ValueError(f"run.state is {repr(state)[:80]}, but must hold what JSON keeps: text as keys, and "
                         "lists, dicts, text, numbers, True, False, None")


class Plumbing:
    """Base of common.Run, which adds what touches the numbers: models, sampling, evaluation."""

    # -- before weights are loaded ---------------------------------------------------------------------------
    def prepare(self, args, model_path: str, train: bool, same_answer=None) -> None:
        """Arguments, tokenizer, data, processes, run folder. Raises UserError if something is wrong."""
        self.args, self.model_path, self.trains = args, model_path, train
        self.same_answer, self.state = same_answer, {}
        self.longest = args.max_prompt_tokens + args.max_new_tokens
        if bad := args.errors():
            raise UserError("\n       ".join(bad))
        torch.manual_seed(args.seed)
        if not args.model:
            torch.set_num_threads(1)  # the toy is too small to share: two threads mostly wait for each other
        self.config = read_config(model_path, args)
        if args.plan:
            self._print_plan()
        self.tokenizer, self.stop_ids = read_tokenizer(model_path, self.config, args)
        self._load_data()
        if args.show_prompt:
            self._show_prompt()
        self.device, self.rank, self.world_size = start_processes(train and args.dtype == "bfloat16")
        bf16 = args.dtype == "bfloat16" or args.dtype == "auto" and self.device.type == "cuda"
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        vllm = args.sampler == "vllm" or args.sampler == "auto" and self.device.type != "mps" and has_vllm()
        self.engine = "vllm" if vllm else "hf"
        if args.plain:
            self.engine = "plain"
        self._check_plan()
        same_on_all_ranks({f"--{name}": value for name, value in vars(args).items()})
        self.folder = RunFolder(args, self.rank, self.world_size, self.device, self._disk_bytes(),
                                identity(self.problems, self.benchmarks, self.stop_ids))
        self.say, self.out = self.folder.say, self.folder.path
        self.say(f"{model_path}: {self.engine} sampler, {str(self.dtype)[6:]} compute, "
                 f"{self.world_size} rank(s) on {self.device.type}, stop ids {self.stop_ids}")
        self.first_step, self.stop_signal, self.bad_steps, self.told = 1, 0, 0, False
        self.begin_step(0)

    def _print_plan(self) -> None:
        """--plan: the table, from the config alone, and exit: code 0 if it fits, else 1."""
        made = plan(self.args, self.config, self.trains)
        if int(os.environ.get("RANK", 0)) == 0:
            print(made.table(), flush=True)
        sys.exit(1 if made.misfit() else 0)

    def _check_plan(self) -> None:
        """Before weights are loaded on a GPU: raises UserError if they would not fit, with what would.

        Sets --micro_tokens if the plan is to choose it."""
        args = self.args
        if args.offload != "none" and self.device.type == "cpu":
            raise UserError(f"--offload is '{args.offload}', but there is no GPU here to take anything off.")
        if self.device.type == "cuda":
            args.micro_tokens = check_plan(args, self.config, self.trains)
        args.micro_tokens = args.micro_tokens or 16384

    def _disk_bytes(self) -> int:
        """What the run writes at most: --keep checkpoints, one more while it is written, the final model."""
        if not self.trains:
            return 0
        checkpoints = self.args.keep + 1 if self.args.checkpoint_every else 0
        final = self.dtype.itemsize * shape_of(self.config).weights
        return checkpoints * checkpoint_bytes(self.config) + final

    def _load_data(self) -> None:
        args = self.args
        self.problems = self._load(args.dataset, train=True) if self.trains and args.dataset else []
        self.benchmarks = {}
        for name in [name.strip() for name in args.eval.split(",")] if args.eval else []:
            self.benchmarks[name] = self.problems if name == "train" else self._load(name)
        if self.problems and len(self.problems) < args.prompts_per_batch:
            raise UserError(f"--prompts_per_batch is {args.prompts_per_batch}, but must be at most "
                            f"{len(self.problems)}, the problems of --dataset: a batch holds none twice.")
        if self.trains and args.labels == "gold":
            if not self.problems or any(p.answer is None for p in self.problems):
                raise UserError("--labels is 'gold', but --dataset is empty or has problems without a gold "
                                "answer.")
        if not all(self.benchmarks.values()):
            raise UserError("the benchmark 'train' means --dataset, which is empty; name another one.")
        for name, ids in args.own_prompts(self.tokenizer).items():
            if len(ids) > args.max_prompt_tokens:
                raise UserError(f"{name} (Dynamic RL: --question_prompt) has {len(ids)} tokens, more than "
                                f"--max_prompt_tokens {args.max_prompt_tokens}; raise it.")
        self.count_steps()

    def count_steps(self) -> None:
        """Rollout batches of the whole run: --steps, else those of --epochs."""
        args = self.args
        self.total_steps = args.steps or args.epochs * (len(self.problems) // args.prompts_per_batch)
        if self.trains and not (self.total_steps and (self.problems or args.own_prompts(self.tokenizer))):
            raise UserError("there is nothing to train on: --dataset is empty; name one.")

    def _load(self, name: str, train: bool = False) -> list[Problem]:
        """Problems with their prompts. Overlong ones: left out of training, without one in evaluation."""
        args, quiet = self.args, int(os.environ.get("RANK", 0)) != 0
        flag = "--dataset" if train else "--eval" if self.trains else "--benchmarks"
        fields = (args.question_field, args.answer_field) if train or not self.trains else ("", "")
        try:
            problems = load_problems(name, *fields, quiet=quiet, same_answer=self.same_answer)
        except UserError as error:
            raise UserError(f"{flag}: {error}") from None
        for p in problems:
            p.prompt_ids = encode_prompt(self.tokenizer, p.question, args.prompt, args.max_prompt_tokens)
        kept = [p for p in problems if p.prompt_ids]
        if train and not kept:
            raise UserError(f"all {len(problems)} problems of {name} have more than --max_prompt_tokens "
                            f"{args.max_prompt_tokens}; raise it.")
        if len(kept) < len(problems) and not quiet:
            print(f"{name}: {len(problems) - len(kept)} problems have more than --max_prompt_tokens "
                  f"{args.max_prompt_tokens} and {'are left out' if train else 'count as wrong'}", flush=True)
        return kept if train else problems

    def _show_prompt(self) -> None:
        """Print the exact text of the first problem's prompt and of the script's own prompts, and exit."""
        prompts = {}
        for name, problems in {"--dataset": self.problems, **self.benchmarks}.items():
            if problems and "first problem" not in str(prompts):
                prompts[f"first problem of {name}"] = problems[0].prompt_ids
        for name, ids in (prompts | self.args.own_prompts(self.tokenizer)).items():
            if int(os.environ.get("RANK", 0)) == 0:
                print(f"--- {name}: {len(ids)} tokens\n{show_prompt(self.tokenizer, ids)}")
        sys.exit(0)

    # -- around the loop -------------------------------------------------------------------------------------
    def start(self, optimizer) -> None:
        """With --resume: restore the newest checkpoint. Else: evaluate the initial model."""
        self.optimizer = optimizer
        self.sampler.sleep()  # restore makes gradients beside Adam, as much as the plan's update phase holds
        if self.args.resume:
            done, self.state = checkpoint.restore(self.out, self.policy, self.optimizer,
                                                  self.args.checkpoint_every, self.say)
            self.first_step = done + 1
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # only the main thread may
                signal.signal(number, self._on_signal)
        self.folder.start(self.first_step, self.total_steps)
        if self.first_step == 1 and self.benchmarks:
            self.say(f"Evaluating the initial model on {', '.join(self.benchmarks)} ...")
            self.folder.log(0, self.evaluate())
            self.sampler.sleep()

    def steps(self):
        """Numbers of the rollout batches still to do, from 1 on."""
        for step in range(self.first_step, self.total_steps + 1):
            self.begin_step(step)
            yield step

    def begin_step(self, step: int) -> None:
        """Forget what the last step left for the log. Step 0: before the first."""
        self.step, self.began, self.seconds, self.running = step, time.monotonic(), {}, None
        self.sampled = set()  # ids of the prompts that were sampled in this step
        self.groups, self.trained, self.updates, self.sums, self.skipped = [], [], [], {}, 0
        self.logp_diff, self.tokens = {}, Counter()
        if step:
            self.policy.synced = 0

    def phase(self, name: str | None) -> None:
        """The time from here to the next call is logged as seconds/name."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if self.running:
            last, since = self.running
            self.seconds[last] = self.seconds.get(last, 0.0) + now - since
            if last == "embed" and self.device.type == "cuda":
                torch.cuda.empty_cache()  # else the next phase would be measured with the embedder
        self.running = (name, now) if name else None

    def finish(self) -> None:
        """Final model, the first and last evaluation side by side, where the time went, curves."""
        fall_back = partial(checkpoint.save, self.out, self.total_steps, self.policy, self.optimizer,
                            self.args.keep, self.state)
        self.folder.save_model(self.policy, self.tokenizer, None if self.args.checkpoint_every else fall_back)
        self.folder.finish()

    def _on_signal(self, number, frame) -> None:
        if self.stop_signal:
            os._exit(128 + number)  # the second one leaves at once
        self.stop_signal = number
        self.say(f"\n{signal.Signals(number).name}: finishing this step, then writing a checkpoint "
                 "(again: leave at once)")

    # -- the log ---------------------------------------------------------------------------------------------
    def log_group(self, prompt: Problem, responses: list[Rollout], classes: list[int | None],
                  rewards: torch.Tensor, trained: list[int], label: int | None | dict[int, float],
                  negatives: set[int] = frozenset()) -> None:
        """Keep a prompt's votes for the log.

        label: the class taken as right, or {class: weight}; None: abstained. negatives: taken as wrong.
        Raises ValueError if there is not one class and one finite reward per response."""
        check_votes(responses, classes, rewards, label)
        if not isinstance(label, dict):
            label = {label: 1.0} if label in classes and label is not None else {}  # gold: maybe nobody's
        self.groups.append(dict(prompt=prompt, responses=responses, classes=classes, rewards=rewards.tolist(),
                                trained=set(trained), label=label, negatives=sorted(negatives)))

    def log_sample(self, **record) -> None:
        """A line of the script's own for samples.jsonl."""
        if self.rank == 0:
            self.folder.append("samples.jsonl", dict(step=self.step, **record))

    def log_tokens(self, weight_T: torch.Tensor, **values_T: torch.Tensor) -> None:
        """Add up weighted means of per-token values [T] over the micro-batches of an optimizer step."""
        for name, values in values_T.items():
            self.sums[name] = self.sums.get(name, 0.0) + (values.detach().float() * weight_T).sum()

    def log_update(self, grad_norm: float) -> None:
        """End of an optimizer step: its means over all ranks are kept; one that was skipped is counted."""
        names = sorted(self.sums)
        sums = torch.stack([self.sums[name] for name in names])
        if self.world_size > 1:
            torch.distributed.all_reduce(sums)
        self.sums = {}
        if math.isfinite(grad_norm):
            self.updates.append(dict(zip(names, sums.tolist()), grad_norm=grad_norm))
            self.bad_steps = 0
            return
        self.skipped += 1
        self.bad_steps += 1
        if self.bad_steps >= self.args.max_bad_steps:
            raise UserError(f"{self.bad_steps} optimizer steps in a row had a non-finite loss or gradient "
                            f"(--max_bad_steps); the last good checkpoint is {checkpoint.newest(self.out)}.")

    def end_step(self, extra: dict[str, float] | None = None) -> None:
        """Log the step, evaluate and save when due, obey signals. extra: metrics of the script's own.

        Raises TypeError or ValueError if one of them is no number or has a name of the run's own metrics."""
        args, last, extra = self.args, self.step == self.total_steps, extra or {}
        self.phase(None)
        check_state(self.state)
        trained = set(self.trained)
        for group in self.groups:  # a script may leave prompts out of the update
            group["trained"] = {i for i in group["trained"] if group["responses"][i] in trained}
        metrics = step_metrics(self.groups)
        for name in self.updates[0] if self.updates else []:
            metrics[name] = mean(update[name] for update in self.updates)
        metrics |= self.logp_diff | dict(lr=self.learning_rate(), skipped_updates=self.skipped)
        self._warn(metrics)
        self.folder.log_samples(self.step, self.groups, self.tokenizer)
        self.tokens["update"] = sum(len(r.prompt_ids) + len(r.response_ids) for r in self.trained)
        if self.benchmarks and (last or args.eval_every and self.step % args.eval_every == 0):
            self.phase("evaluate")
            metrics |= self.evaluate()
            self.sampler.sleep()  # beside its KV cache saving and the next sync may not fit
            self.phase(None)
        metrics |= {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        metrics["seconds/step"] = time.monotonic() - self.began
        for name, count in self.tokens.items():
            metrics[f"tokens_per_second/{name}"] = count / max(self.seconds.get(name, 0.0), 1e-9)
        metrics["sync_gib"] = self.policy.synced / GIB
        if self.device.type == "cuda":
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2 ** 30
            torch.cuda.reset_peak_memory_stats()
        for name, value in extra.items():
            if not isinstance(value, int | float):
                raise TypeError(f"the metric {name!r} is {value!r}, but must be a number (of a tensor: "
                                ".item())")
            if name in metrics:
                raise ValueError(f"the run has a metric {name!r} of its own; give yours another name")
        self.folder.log(self.step, metrics | extra)
        stop = max(gather(self.stop_signal))
        if stop or args.checkpoint_every and (last or self.step % args.checkpoint_every == 0):
            checkpoint.save(self.out, self.step, self.policy, self.optimizer, args.keep, self.state)
        if stop and not last:
            self.say(f"\nStopped after step {self.step} by {signal.Signals(stop).name}; go on with "
                     f"--resume --out {self.out}")
            sys.exit(128 + stop)

    def _warn(self, metrics: dict[str, float]) -> None:
        """Say aloud what makes a run pointless and is easy to mend."""
        responses = [response for group in self.groups for response in group["responses"]]
        if few := self.few_answers(responses):
            if not self.told:
                self.folder.warn(f"step {self.step}: {few}")
            self.told = True
        elif metrics.get("truncated", 0.0) > 0.5:
            share = metrics["truncated"]
            self.folder.warn(f"{share:.0%} of the responses were cut off; raise --max_new_tokens.")

    def few_answers(self, responses: list[Rollout]) -> str:
        """What to do if most of these responses have no answer; else empty."""
        responses = [response for response in responses if response.response_ids]  # overlong: no prompt
        silent = [response.text for response in responses if response.answer is None]
        if len(silent) <= len(responses) / 2:
            return ""
        share, cut = 1 - len(silent) / len(responses), mean(not response.finished for response in responses)
        where = "that read_answer finds" if self.read_answer else "in \\boxed{}"
        return (f"only {share:.0%} of the responses have an answer {where}. "
                "Either --prompt does not bring this model to give one (--show_prompt shows it; small models "
                "need worked examples, as in examples/prompts/few_shot.txt), or --max_new_tokens is too "
                f"small ({cut:.0%} were cut off). One without an answer ends: {silent[0][-200:]!r}")
