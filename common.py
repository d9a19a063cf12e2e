"""What the six papers do NOT differ in: options, sampling with vLLM, evaluation, and the run's verbs.

The scripts read as if there were one process. Under torchrun every rank runs the same script: `Run.sample`
shards the prompts over the ranks and gathers all responses on every rank, rewards are a deterministic
function of the whole batch, and `policy.micro_batches` hands each rank its share of the update. One rank and
N ranks compute the same update. engine/ holds what is only fast or safe; no reader of a paper needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in the trainer's process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# micro-batches differ in shape; pinned memory (--offload) is not rounded up to powers of two
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,pinned_max_round_threshold_mb:1")
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

import torch
import transformers

from engine import checkpoint, setup
from engine.answers import extract_answer
from engine.base import UserError, gather, same_on_all_ranks, seed_of, sharded
from engine.data import Problem
from engine.hf_sampler import HFSampler
from engine.metrics import grade, mean, step_metrics, summary
from engine.options import Count, CountOrZero, NonNegative, NonNegativeOrInf, Positive, PositiveShare
from engine.options import Share, out_of_range
from engine.plan import check_plan
from engine.policy import Policy, Request, Rollout, load_model
from engine.runfolder import RunFolder
from engine.smollm2 import smollm2_folder

# What scripts and forks call by the name common.X, though only they do.
from engine.answers import equivalence_classes as equivalence_classes
from engine.data import encode_alone as encode_alone, encode_prompt as encode_prompt
from engine.metrics import majority as majority
from engine.options import Finite as Finite, launch as launch

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Without --model: the toy, a thousand times smaller than the papers' models, so with a larger learning rate.
TOY_MODEL = str(Path(__file__).parent / "toy")
TOY = dict(dataset="toy", eval="train,toy_test", steps=40, eval_every=20, checkpoint_every=10, sampler="hf",
           prompts_per_batch=16, votes=32, train_samples=16, max_prompt_tokens=128, max_new_tokens=128,
           micro_tokens=8192, lr=5e-4, num_minibatches=2, eval_temperature=1.0, eval_top_p=1.0)


# ------------------------------------------------------------------------------------------------------------
# Options; --help is the manual. A default is the paper's value, of one experiment if these differ, or ours.
# ------------------------------------------------------------------------------------------------------------
@dataclass
class Args:
    model: str = ""
    """Hub id or local folder of a causal language model. Empty: the built-in toy, smollm2: a real one that
    comes as a package (docs/real.md), both with defaults of their own."""
    dataset: str = "aime24"
    """Training problems: a short name (engine/data.py), a Hub id, or a json, jsonl or parquet file."""
    question_field: str = ""
    """Column of the question; empty: found from a list of usual names."""
    answer_field: str = ""
    """Column of the gold answer (only for evaluation and logging label accuracy); empty: found likewise."""
    prompt: str = "system"
    """system: instruction as system turn (EVOL-RL A.1). suffix: after the question. plain: no chat template.
    Or a file (examples/prompts): lines [system], [user], [assistant] begin its turns, {question} is in the
    last; without such lines it is plain text, for base models (docs/real.md)."""
    show_prompt: bool = False
    """Print the exact text of the first problem's prompt, and of z_0 (Dynamic RL), and exit."""
    labels: Literal["majority", "gold"] = "majority"
    """majority: the model's own answers vote. gold: only right answers do; in ttrl.py that is supervised
    GRPO, the papers' upper bound."""
    seed: CountOrZero = 1
    """Seeds of data order, sampling and subsets all derive from it."""
    epochs: CountOrZero = 80
    """Passes over the problems (TTRL 3.1, SCRL 4.1, ETTRL 4: AIME 80, AMC 30, MATH-500 10)."""
    steps: CountOrZero = 0
    """Rollout batches to train on; 0: epochs x (problems // prompts_per_batch)."""
    prompts_per_batch: Count = 8
    """Problems per rollout batch (EVOL-RL Table 3: 8; TTRL's released code: 8, for MATH-500 32)."""
    votes: Count = 64
    """N, responses sampled per prompt; all of them vote (TTRL 3.1, SCRL 4.1, ETTRL 4: 64)."""
    train_samples: Count = 32
    """G, the seeded random subset of the N that is trained (TTRL 3.1, SCRL 4.1, ETTRL 4: 32)."""
    temperature: Positive = 1.0
    """Of rollouts, log-probs, entropies (TTRL 3.1: 0.6, but 1.0 for Qwen2.5-Math; EVOL-RL Table 3: 1.0)."""
    max_prompt_tokens: Count = 1024
    """A longer prompt is left out of training, and counts as wrong in evaluation (TTRL's code: 512, 1024)."""
    max_new_tokens: Count = 3072
    """Length limit of a response (TTRL 3.1, SCRL 4.1, ETTRL 4: 3072)."""
    lr: NonNegative = 5e-7
    """Peak learning rate of AdamW, betas 0.9 and 0.999 (TTRL 3.1, SCRL 4.1, ETTRL 4: 5e-7)."""
    weight_decay: NonNegative = 0.01
    """Of AdamW (TTRL's released code)."""
    warmup: Share = 0.03
    """Share of the steps with linear warm-up (TTRL's released code), before a cosine to 0 (TTRL 3.1)."""
    grad_clip: Positive = 1.0
    """Largest norm of an optimizer step's gradient (TTRL's released code)."""
    num_minibatches: Count = 8
    """Optimizer steps per rollout batch (EVOL-RL Table 3, TTRL's released code: one per prompt's worth)."""
    minibatches: Literal["mixed", "by_prompt"] = "mixed"
    """What an optimizer step holds. mixed: all prompts. by_prompt: one after the other (EVOL-RL Table 3)."""
    clip_low: Share = 0.2
    """Ratios are clipped at 1 - clip_low (TTRL's released code) ..."""
    clip_high: NonNegativeOrInf = 0.2
    """... and at 1 + clip_high."""
    kl_coef: NonNegative = 0.001
    """Weight of the KL term to the initial model (EVOL-RL Table 3; TTRL's code); 0: no reference model."""
    entropy_coef: NonNegative = 0.0
    """Weight of the mean token entropy; positive raises entropy (EVOL-RL Eq. 2; RESTRAIN D.2: 0)."""
    loss_aggregation: Literal["seq-mean", "token-mean"] = "seq-mean"
    """seq-mean: over a response's tokens, then over responses (ETTRL Eq. 3). token-mean: over all tokens."""
    sampler: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM if it is installed, else transformers, as with --plain."""
    gpu_memory: PositiveShare = 0.5
    """Share of each GPU's memory that vLLM may take while it samples (it sleeps during the update)."""
    tensor_parallel: Count = 1
    """Consecutive ranks that share one vLLM engine: for a model that one GPU cannot hold while sampling."""
    max_logp_diff: NonNegative = 1e-3
    """The run stops if sampler and trainer log-probs of a token differ by more (bf16: see check_sampler)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto: bfloat16 on GPU, float32 on CPU. Master weights are float32 always."""
    plain: bool = False
    """Padded rows and full logits, the slow and obvious way, which gives the same step."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations backward: a third more compute, a quarter of the memory. auto: on a GPU."""
    micro_tokens: CountOrZero = 0
    """Padded tokens per micro-batch and rank: memory, not the result. 0: 16384, or less if the GPU asks."""
    offload: Literal["none", "reference", "optimizer"] = "none"
    """In host memory: the reference model; optimizer: weights, gradients and AdamW, too. Not run on a GPU."""
    plan: bool = False
    """Print the memory that this run takes, from the model's config alone, and exit."""
    gpus: CountOrZero = 0
    """With --plan: GPUs to plan for; 0: torchrun's ranks."""
    gpu_gib: NonNegative = 0.0
    """Memory of each GPU, in GiB, to plan with; 0: what the GPU here has, without one 80."""
    eval: str = "train"
    """Benchmarks to evaluate, comma-separated; 'train' is --dataset; empty: none."""
    eval_every: CountOrZero = 20
    """Steps between evaluations, beside those at the start and at the end; 0: only these two."""
    eval_start: bool = True
    """Off: the initial model is not evaluated, so a short run is shorter."""
    eval_samples: Count = 16
    """Responses per problem (TTRL 3.1, SCRL 4.1, RESTRAIN 3: 16; EVOL-RL Table 1: 32)."""
    eval_temperature: NonNegative = 0.6
    """0: greedy, with one sample (TTRL 3.1, SCRL 4.1, RESTRAIN 3, EVOL-RL Table 3: 0.6)."""
    eval_top_p: PositiveShare = 0.95
    """TTRL 3.1, SCRL 4.1, RESTRAIN 3: 0.95."""
    eval_top_k: CountOrZero = 0
    """0: off (Dynamic RL 3.1, EVOL-RL's released test: 20)."""
    eval_greedy: bool = False
    """Report greedy pass@1 beside the sampled one (TTRL 3.1 for its analysis, RESTRAIN Table 3)."""
    out: str = ""
    """Run folder; empty: runs/<script>-<time>-<process>."""
    resume: bool = False
    """Go on from the latest good checkpoint in --out (any number of ranks)."""
    checkpoint_every: CountOrZero = 20
    """Steps between checkpoints; 0: none but the final model (and one on SIGTERM or Ctrl-C)."""
    keep: Count = 2
    """Checkpoints kept."""
    max_bad_steps: Count = 5
    """Stop after so many optimizer steps in a row with a non-finite gradient; each is skipped and counted."""
    wandb: bool = False
    """Send what TensorBoard gets to Weights & Biases, too (needs `pip install wandb`)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""
    AT_MOST_RESPONSES = ("train_samples",)  # options that count responses of one prompt

    def errors(self) -> list[str]:
        """One sentence per bad flag (flag, value, what is allowed), all found before anything is loaded."""
        if bad := out_of_range(self):
            return bad
        for name in self.AT_MOST_RESPONSES:
            if getattr(self, name) > self.responses_per_prompt():
                bad.append(f"--{name} is {getattr(self, name)}, but must be at most "
                           f"{self.responses_per_prompt()}, the responses per prompt.")
        sequences = self.prompts_per_batch * self.train_samples
        if self.num_minibatches > sequences:
            bad.append(f"--num_minibatches is {self.num_minibatches}, but must be at most {sequences}, the "
                       "trained responses of a batch (prompts_per_batch x train_samples).")
        names = [name.strip() for name in self.eval.split(",")]
        if twice := [name for name in names if name and names.count(name) > 1]:
            bad.append(f"--eval (evaluate.py: --benchmarks) is '{self.eval}', but must name {twice[0]} once.")
        bad += setup.engine_errors(self)
        if self.steps == 0 and self.epochs == 0:
            bad.append("--epochs is 0 and --steps is 0, so there is nothing to do; give one of them.")
        return bad

    def responses_per_prompt(self) -> int:
        """Of which --train_samples are trained (ETTRL: the leaves of its trees)."""
        return self.votes

    def own_prompts(self, tokenizer) -> dict[str, list[int]]:
        """Prompts beside the problems' own (Dynamic RL: z_0), for --show_prompt."""
        return {}


# -------------------------------------------- sampling with vLLM -------------------------------------------
class VLLMSampler:
    """vLLM in the trainer's process, one engine per rank or per --tensor_parallel ranks; CUDA and CPU alike.

    dummy: it starts with random weights and reads no checkpoint; `load` must come before `generate`."""

    def __init__(self, args, model: str, stop_ids: list[int], device, dtype, dummy: bool = False):
        from vllm import LLM
        self.cuda, self.stop_ids, self.asleep = device.type == "cuda", stop_ids, False
        length = args.max_prompt_tokens + args.max_new_tokens
        threads, set_threads = torch.get_num_threads(), torch.set_num_threads
        self.llm = LLM(model, dtype=str(dtype).removeprefix("torch."), seed=args.seed, max_model_len=length,
                       enable_prefix_caching=True, logprobs_mode="processed_logprobs", disable_log_stats=True,
                       trust_remote_code=args.trust_remote_code, load_format="dummy" if dummy else "auto",
                       tensor_parallel_size=args.tensor_parallel, **setup.vllm_options(args, self.cuda))
        # the CPU engine replaces set_num_threads with a stub and may change their number
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)

    def load(self, named_tensors) -> None:
        """Stream new weights into the engine, not over the disk, then drop what the prefix cache knows.

        Raises RuntimeError if the engine did not take one of its parameters."""
        if self.asleep:  # first the weights alone: weights, old KV cache and trainer may not fit together
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        missing = self.llm.collective_rpc(_load_into_worker, args=(named_tensors,))[0]
        if missing:
            raise RuntimeError(f"vLLM did not take the weights {sorted(missing)[:3]}")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache, which old weights computed")
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def sleep(self) -> None:
        """Give the GPU memory to the update. The weights go, too: the next `load` must send them again."""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def generate(self, requests: list[Request], temperature: float, top_p: float = 1.0, top_k: int = 0,
                 stop: list[str] = (), decode=None) -> list[list[Rollout]]:
        """Responses per request, in one engine call. Temperature 0 is greedy. stop: texts that end one."""
        from vllm import SamplingParams
        shared = dict(temperature=temperature, top_p=top_p, top_k=top_k, logprobs=0,  # 0: the sampled token's
                      flat_logprobs=True, stop_token_ids=self.stop_ids, detokenize=bool(stop),
                      stop=list(stop), include_stop_str_in_output=bool(stop))
        params = [SamplingParams(n=r.n, max_tokens=r.max_new_tokens, seed=r.seed, **shared) for r in requests]
        prompts = [{"prompt_token_ids": r.prompt_ids} for r in requests]
        groups = []
        for request, output in zip(requests, self.llm.generate(prompts, params, use_tqdm=False)):
            groups.append([])
            for o in output.outputs:
                logprobs = torch.tensor(o.logprobs.logprobs, dtype=torch.float32)
                groups[-1].append(Rollout(request.prompt_ids, list(o.token_ids), logprobs,
                                          finished=o.finish_reason == "stop"))
        return groups


def _load_into_worker(worker, named_tensors) -> set[str]:
    """Runs inside vLLM's worker; returns the parameters that were not loaded (vLLM itself only warns)."""
    model, taken = worker.get_model(), set()
    original = model.load_weights

    def load_weights(weights):
        taken.update(original(weights))
        return taken

    model.load_weights = load_weights
    try:
        # without an iterator it re-reads the checkpoint
        worker.reload_weights(weights_iterator=iter(named_tensors))
    finally:
        del model.load_weights
    if worker.device.type == "cpu" and worker.model_config.hf_text_config.tie_word_embeddings:
        # The CPU build computes a tied head from a packed copy of the embedding that the reload leaves stale.
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    return {name for name, _ in model.named_parameters()} - taken


# --------------------------------------------------- the run ------------------------------------------------
class Run:
    """What a script needs around its algorithm: models, sampler, data, log, checkpoints, the loop's verbs.

    Options and data are checked before any weights are loaded."""

    def __init__(self, args: Args, train: bool = True, same_answer=None, read_answer=None, generate=None):
        """For forks, the same on all ranks. Another task than mathematics: same_answer (see Problem), used
        by votes, metrics and evaluation; read_answer(text, problem) -> the answer in a response, or None.
        Other sampling, in training and evaluation: generate(run, work, temperature, **options), which may
        call run.generate(work, temperature, **options)."""
        self.args, self.trains, self.state = args, train, {}
        self.same_answer, self.read_answer, self.own_generate = same_answer, read_answer, generate
        self.longest = args.max_prompt_tokens + args.max_new_tokens
        if bad := args.errors():
            raise UserError("\n       ".join(bad))
        torch.manual_seed(args.seed)
        if not args.model:
            torch.set_num_threads(1)  # the toy is too small to share: two threads mostly wait for each other
        self.model_path = smollm2_folder() if args.model == "smollm2" else args.model or TOY_MODEL
        self.config = setup.read_config(self.model_path, args)
        if args.plan:
            check_plan(args, self.config)  # prints it and exits
        self.tokenizer, self.stop_ids = setup.read_tokenizer(self.model_path, self.config, args)
        self.problems, self.benchmarks = setup.read_data(args, self.tokenizer, train, same_answer)
        if args.show_prompt:
            setup.print_prompts(args, self.tokenizer, self.problems, self.benchmarks)
        self.total_steps = self.count_steps() if train else 0
        self.device, self.rank, self.world_size = setup.start_processes(train and args.dtype == "bfloat16")
        bf16 = args.dtype == "bfloat16" or args.dtype == "auto" and self.device.type == "cuda"
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        wanted = args.sampler == "auto" and not args.plain
        self.engine = "vllm" if args.sampler == "vllm" or wanted and setup.has_vllm() else "hf"
        if train and self.device.type == "cuda":
            args.micro_tokens = check_plan(args, self.config)
        elif args.offload != "none":
            raise UserError(f"--offload is '{args.offload}', but there is no GPU here to take anything off.")
        args.micro_tokens = args.micro_tokens or 16384
        same_on_all_ranks({f"--{name}": value for name, value in vars(args).items()})
        self.folder = RunFolder(args, self.rank, self.world_size, self.device,
                                setup.identity(self.problems, self.benchmarks, self.stop_ids))
        self.say, self.out = self.folder.say, self.folder.path
        self.say(f"{self.model_path}: {self.engine} sampler, {str(self.dtype)[6:]} compute, "
                 f"{self.world_size} rank(s) on {self.device.type}, stop ids {self.stop_ids}")
        self.first_step, self.stop_signal, self.bad_steps, self.told = 1, 0, 0, False
        self.evaluation_seconds = 0.0  # the last one's
        self.begin_step(0)
        self.policy = self.reference = None
        if train:
            self.say(f"Reading the weights of {self.model_path} ...")
            loaded = load_model(self.model_path, args.trust_remote_code)
            self.folder.identify({"the weights of --model": setup.weights_digest(loaded)})
            self.policy = self._load_policy(loaded, trainable=True)
            if args.kl_coef:  # memory-mapped: the second read takes no memory
                initial = load_model(self.model_path, args.trust_remote_code)
                self.reference = self._load_policy(initial, trainable=False)  # frozen
        if self.engine == "vllm":
            self.say("Starting vLLM (on a GPU it compiles for minutes) ...")
            self.sampler = VLLMSampler(args, self.model_path, self.stop_ids, self.device, self.dtype, train)
        else:
            self.sampler = HFSampler(self.model_path, self.stop_ids, self.device, self.dtype,
                                     args.trust_remote_code)
        torch.manual_seed(args.seed)  # building a vLLM engine re-seeds the process

    def count_steps(self) -> int:
        """Rollout batches of the whole run: --steps, else those of --epochs."""
        args = self.args
        steps = args.steps or args.epochs * (len(self.problems) // args.prompts_per_batch)
        if not steps or not self.problems and not args.own_prompts(self.tokenizer):
            raise UserError("there is nothing to train on: --dataset is empty; name one.")
        return steps

    def _load_policy(self, loaded, trainable: bool) -> Policy:
        args, gpu = self.args, self.device.type == "cuda"
        recompute = gpu if args.gradient_checkpointing == "auto" else args.gradient_checkpointing == "on"
        offload = args.offload == "optimizer" or (args.offload == "reference" and not trainable)
        return Policy(loaded, self.device, self.dtype, trainable, gradient_checkpointing=recompute,
                      micro_tokens=args.micro_tokens, plain=args.plain, max_length=self.longest,
                      offload=offload)

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
        args = self.args
        todo = (f"Steps {self.first_step} to {self.total_steps} have {args.prompts_per_batch} prompts each, "
                f"with {args.responses_per_prompt()} responses, of which {args.train_samples} are trained; "
                "how long they take is printed after the first of them.")
        done = f"All {self.total_steps} steps are done; a larger --steps goes on."
        self.say(todo if self.first_step <= self.total_steps else done)
        if self.first_step == 1 and self.benchmarks and self.args.eval_start:
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

    def phase(self, name: str | None) -> None:
        """The time from here to the next call is logged as seconds/name."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if self.running:
            last, since = self.running
            self.seconds[last] = self.seconds.get(last, 0.0) + now - since
        self.running = (name, now) if name else None

    def end_step(self, extra: dict[str, float] | None = None) -> None:
        """Log the step, evaluate and save when due, obey signals. extra: metrics of the script's own.

        Raises TypeError or ValueError if one of them is no number or has a name of the run's own metrics."""
        args, last, extra = self.args, self.step == self.total_steps, extra or {}
        self.phase(None)
        if json.loads(json.dumps(self.state)) != self.state:
            raise ValueError(f"run.state is {repr(self.state)[:80]}, but must hold what JSON keeps: text as "
                             "keys, and lists, dicts, text, numbers, True, False, None")
        metrics = self._metrics()
        if self.rank == 0:
            self.folder.log_samples(self.step, self.groups)
        if self.is_evaluated(self.step):
            self.phase("evaluate")
            metrics |= self.evaluate()
            self.sampler.sleep()  # beside its KV cache saving and the next sync may not fit
            self.phase(None)
        metrics |= {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        metrics["seconds/step"] = time.monotonic() - self.began
        for name, count in self.tokens.items():
            metrics[f"tokens_per_second/{name}"] = count / max(self.seconds.get(name, 0.0), 1e-9)
        for name, value in extra.items():
            if not isinstance(value, int | float):
                raise TypeError(f"the metric {name!r} is {value!r}, but must be a number (of a tensor: "
                                ".item())")
            if name in metrics:
                raise ValueError(f"the run has a metric {name!r} of its own; give yours another name")
        self.folder.log(self.step, metrics | extra)
        if self.step == self.first_step and not last:
            self.say_how_long(metrics["seconds/step"] - self.seconds.get("evaluate", 0.0))
        stop = max(gather(self.stop_signal))
        if stop or args.checkpoint_every and (last or self.step % args.checkpoint_every == 0):
            checkpoint.save(self.out, self.step, self.policy, self.optimizer, args.keep, self.state)
        if stop and not last:
            self.say(f"\nStopped after step {self.step} by {signal.Signals(stop).name}; go on with "
                     f"--resume --out {self.out}")
            sys.exit(128 + stop)

    def is_evaluated(self, step: int) -> bool:
        due = step == self.total_steps or self.args.eval_every and step % self.args.eval_every == 0
        return bool(self.benchmarks and due)

    def say_how_long(self, seconds: float) -> None:
        """Print what is left, at the pace of the first step and of the last evaluation so far."""
        steps = range(self.step + 1, self.total_steps + 1)
        evaluations = sum(map(self.is_evaluated, steps))
        text = f"A step takes {seconds:.1f} s: {duration(len(steps) * seconds)} for the {len(steps)} left"
        if evaluations and self.evaluation_seconds:
            text += f", and {duration(evaluations * self.evaluation_seconds)} for {evaluations} evaluations"
        self.say(text + ".")

    def finish(self) -> None:
        """The final model, the first and last evaluation side by side, where the time went."""
        self.policy.save(self.out / "final", self.tokenizer)
        self.folder.finish()

    def _on_signal(self, number, frame) -> None:
        if self.stop_signal:
            os._exit(128 + number)  # the second one leaves at once
        self.stop_signal = number
        if self.rank == 0:  # os.write: the signal may have interrupted a print, which cannot be entered twice
            os.write(2, f"\n{signal.Signals(number).name}: finishing this step, then writing a checkpoint "
                        "(again: leave at once)\n".encode())

    # -- the loop's verbs ------------------------------------------------------------------------------------
    def next_prompts(self, batch: int | None = None) -> list[Problem]:
        """This step's problems: shuffled anew each epoch, the incomplete last batch dropped, none twice.

        batch: another one than the step's, counted from 1 without an end (dynamic sampling)."""
        size, n = self.args.prompts_per_batch, len(self.problems)
        epoch, position = divmod((batch or self.step) - 1, n // size)
        order = random.Random(seed_of(self.args.seed, "order", epoch)).sample(range(n), n)
        return [self.problems[i] for i in order[position * size:(position + 1) * size]]

    def sample(self, prompts: list[Problem], n: int, limits: list[int] | None = None,
               stop: list[str] = ()) -> list[list[Rollout]]:
        """n responses to every prompt, sharded over the engines, gathered on all ranks, with text and answer.

        Seeds derive from (seed, step, prompt.id) alone. limits: max_new_tokens of each prompt. stop: texts
        that end a response (kept at its end). Raises ValueError if a prompt.id was sampled in this step
        already: it would get the same responses again."""
        limits = limits or [self.args.max_new_tokens] * len(prompts)
        work = []
        for prompt, limit in zip(prompts, limits, strict=True):
            if prompt.id in self.sampled:
                raise ValueError(f"the prompt with id {prompt.id!r} was sampled in this step already; "
                                 "another id has other random numbers")
            self.sampled.add(prompt.id)
            seed = seed_of(self.args.seed, self.step, prompt.id)
            room = self.longest - len(prompt.prompt_ids)
            work.append((prompt, Request(prompt.prompt_ids, n, seed, min(limit, room))))
        options = dict(temperature=self.args.temperature) | (dict(stop=list(stop)) if stop else {})
        generate = partial(self.own_generate, self) if self.own_generate else self.generate
        groups = sharded(work, partial(generate, **options), self.args.tensor_parallel)
        self.tokens["sample"] += sum(len(r.response_ids) for group in groups for r in group)
        return groups

    def generate(self, work: list[tuple[Problem, Request]], temperature: float,
                 **options) -> list[list[Rollout]]:
        """This engine's share of the responses, in one engine call, with text and answer."""
        if not work:
            return []
        if options.get("stop"):
            options["decode"] = self.decode_ids
        groups = self.sampler.generate([request for _, request in work], temperature, **options)
        if any(response.logprobs.isnan().any() for group in groups for response in group):
            raise UserError(f"--model is '{self.model_path}', but tokens have the probability NaN: it or the "
                            "checkpoint holds NaN or infinite weights, or a temperature is next to 0.")
        for (problem, _), group in zip(work, groups):
            self.decode(group, problem)
        return groups

    def decode(self, responses: list[Rollout], problem: Problem) -> None:
        """Set text and answer from the responses' tokens."""
        texts = self.tokenizer.batch_decode([r.response_ids for r in responses], skip_special_tokens=True)
        for response, text in zip(responses, texts):
            response.text, response.answer = text, extract_answer(text, choices=problem.choices)
            if self.read_answer:
                response.answer = self.read_answer(text, problem)
                if response.answer is not None and not isinstance(response.answer, str):
                    raise TypeError(f"{self.read_answer} must return text or None (no answer), but returned "
                                    f"{response.answer!r}")

    def decode_ids(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def subset(self, n: int, size: int, prompt: Problem) -> list[int]:
        """`size` of the indices 0 to n - 1 at random, in order; seeded by (seed, step, prompt.id)."""
        if size >= n:
            return list(range(n))
        seed = seed_of(self.args.seed, "subset", self.step, prompt.id)
        return sorted(random.Random(seed).sample(range(n), size))

    def check_sampler(self, responses: list[Rollout]) -> None:
        """Compare the sampler's log-probs of the tokens it sampled with the trainer's own (old_logp).

        Stale weights, a stale prefix cache, a wrong temperature all show here. Stops the run: in float32 if
        any token differs by more than --max_logp_diff; in bf16, which rounds, above 0.5 on average (above
        0.05 it warns)."""
        differences = [r.counted((r.old_logp - r.logprobs).abs()) for r in responses]
        difference = torch.cat([torch.zeros(0), *differences])
        difference = difference[torch.isfinite(difference)]
        largest = max(gather(float(difference.max()) if len(difference) else 0.0))
        average = max(gather(float(difference.mean()) if len(difference) else 0.0))
        self.logp_diff = dict(logp_diff_max=largest, logp_diff_mean=average)
        exact = self.dtype == torch.float32
        if average > 0.5 or exact and largest > self.args.max_logp_diff:
            raise UserError(f"the sampler does not run the current policy: its log-probs differ from the "
                            f"trainer's by up to {largest:.2g}, {average:.2g} on average (--max_logp_diff "
                            f"{self.args.max_logp_diff}); its weights or its prefix cache are stale, or "
                            "tokens that the model did not write have no mask 0.")
        if not exact and average > 0.05:
            self.say(f"Warning: sampler and trainer log-probs differ by {average:.3f} on average.")

    def minibatches(self, train: list[Rollout]) -> list[list[Rollout]]:
        """The batch in num_minibatches parts, one optimizer step each: a random mix, or by prompt.

        Raises ValueError if a response has no finite advantage, or if the ranks have different batches."""
        check_batch(train)
        self.trained = train
        n = min(self.args.num_minibatches, len(train))
        if self.args.minibatches == "by_prompt":  # the prompts are in random order already
            return [train[k * len(train) // n:(k + 1) * len(train) // n] for k in range(n)]
        seed = seed_of(self.args.seed, "split", self.step)
        mixed = random.Random(seed).sample(train, len(train))
        return [mixed[k::n] for k in range(n)]

    def learning_rate(self) -> float:
        """Linear warm-up that starts above 0, then a cosine to 0 after the last step."""
        warm = max(1, round(self.args.warmup * self.total_steps))
        if self.step <= warm and self.args.warmup:
            return self.args.lr * self.step / warm
        progress = (self.step - warm) / max(1, self.total_steps + 1 - warm)
        return self.args.lr * 0.5 * (1 + math.cos(math.pi * progress))

    # -- the log ---------------------------------------------------------------------------------------------
    def log_group(self, prompt: Problem, responses: list[Rollout], classes: list[int | None],
                  rewards: torch.Tensor, trained: list[int], label: int | None | dict[int, float],
                  negatives: set[int] = frozenset()) -> None:
        """Keep a prompt's votes for the log.

        label: the class taken as right, or {class: weight}; None: abstained. negatives: taken as wrong.
        Raises ValueError if there is not one class and one finite reward per response."""
        n = len(responses)
        if not isinstance(rewards, torch.Tensor) or rewards.shape != (n,) or not rewards.isfinite().all():
            raise ValueError(f"rewards must be a tensor [{n}] of finite floats, one per response, but are "
                             f"{repr(rewards)[:80]}")
        of_type = isinstance(classes, list) and all(c is None or isinstance(c, int) for c in classes)
        if not of_type or len(classes) != n:
            raise ValueError(f"classes must be a list of {n}, a whole number or None (no answer) per "
                             f"response, but are {repr(classes)[:80]}")
        if label is not None and not isinstance(label, (int, dict)):
            raise ValueError("label must be the class taken as right, or {class: weight}, or None, but is "
                             f"{repr(label)[:80]}")
        if not isinstance(label, dict):
            label = {label: 1.0} if label in classes and label is not None else {}  # gold: maybe nobody's
        self.groups.append(dict(prompt=prompt, responses=responses, classes=classes, rewards=rewards.tolist(),
                                trained=set(trained), label=label, negatives=sorted(negatives)))

    def log_sample(self, **record) -> None:
        """A line of the script's own for samples.jsonl."""
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
                            f"(--max_bad_steps); --resume goes on from the last checkpoint.")

    def _metrics(self) -> dict[str, float]:
        """Of the step's votes and updates; with a warning if most responses are of no use."""
        trained = set(self.trained)
        for group in self.groups:  # a script may leave prompts out of the update
            group["trained"] = {i for i in group["trained"] if group["responses"][i] in trained}
        metrics = step_metrics(self.groups)
        for name in self.updates[0] if self.updates else []:
            metrics[name] = mean(update[name] for update in self.updates)
        metrics |= self.logp_diff | dict(lr=self.learning_rate(), skipped_updates=self.skipped)
        if self.device.type == "cuda":
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2 ** 30
            torch.cuda.reset_peak_memory_stats()
        self.tokens["update"] = sum(len(r.prompt_ids) + len(r.response_ids) for r in self.trained)
        few = self.few_answers([response for group in self.groups for response in group["responses"]])
        if few and not self.told:
            self.say(f"Warning: step {self.step}: {few}")
            self.told = True
        elif metrics.get("truncated", 0.0) > 0.5 and not few:
            self.say(f"Warning: {metrics['truncated']:.0%} of the responses were cut off; raise "
                     "--max_new_tokens.")
        return metrics

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

    # -- evaluation ------------------------------------------------------------------------------------------
    def evaluate(self) -> dict[str, float]:
        """All benchmarks with the current policy: {"eval/NAME/pass@1": ...}."""
        metrics, began = {}, time.monotonic()
        self.sampler.load(self.policy.named_tensors(self.dtype))
        for name, problems in self.benchmarks.items():
            graded = self.evaluate_benchmark(name, problems)
            row = summary([verdicts for verdicts, _ in graded])
            known = [verdicts for verdicts, _ in graded if verdicts["known"]]
            self.folder.append("evaluations.jsonl", dict(
                step=self.step, benchmark=name, right=[mean(v["correct"]) for v in known],
                majority=[v["majority"] for v in known]))
            metrics |= {f"eval/{name}/{metric}": value for metric, value in row.items()}
            if self.args.eval_greedy:
                graded = self.evaluate_benchmark(name, problems, greedy=True)
                row = summary([verdicts for verdicts, _ in graded])
                metrics[f"eval/{name}/greedy"] = row.get("pass@1", math.nan)
        rates = [value for name, value in metrics.items() if name.endswith("/pass@1")]
        self.evaluation_seconds = time.monotonic() - began
        return metrics | ({"eval/mean/pass@1": mean(rates)} if len(rates) > 1 else {})

    def evaluate_benchmark(self, name: str, problems: list[Problem],
                           greedy: bool = False) -> list[tuple[dict, list[Rollout]]]:
        """(verdicts, responses) of every problem, in order, on all ranks; each samples and grades a share.

        An overlong problem has no prompt: its responses are empty, so they count as wrong."""
        from tqdm import tqdm
        args = self.args
        temperature = 0.0 if greedy else args.eval_temperature
        samples = args.eval_samples if temperature else 1
        size = max(1, 4096 // samples)  # problems per engine call
        generate = partial(self.own_generate, self) if self.own_generate else self.generate

        def sample_and_grade(mine: list[Problem]) -> list[tuple[dict, list[Rollout]]]:
            graded, bar = [], tqdm(total=len(mine), desc=f"evaluating {name}", leave=False,
                                   disable=self.rank != 0)
            for start in range(0, len(mine), size):
                todo = mine[start:start + size]
                work = []
                for p in todo:
                    seed = seed_of(args.seed, "eval", name, p.id)
                    work.append((p, Request(p.prompt_ids, samples, seed, args.max_new_tokens)))
                work = [(p, request) for p, request in work if p.prompt_ids]
                sampled = iter(generate(work, temperature, top_p=args.eval_top_p, top_k=args.eval_top_k))
                for p in todo:
                    empty = [Rollout([], [], torch.zeros(0), False) for _ in range(samples)]
                    group = next(sampled) if p.prompt_ids else empty
                    graded.append((grade(p, group), group))
                bar.update(len(todo))
            bar.close()
            return graded

        return sharded(problems, sample_and_grade, args.tensor_parallel)


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))  # 0:02:30


def check_batch(train: list[Rollout]) -> None:
    """Raises ValueError if a response has no finite advantage, or if the ranks have different batches."""
    for response in train:
        advantage = response.advantage
        if not isinstance(advantage, (int, float)) or not math.isfinite(advantage):
            raise ValueError(f"a response has the advantage {advantage!r}; set response.advantage to a "
                             "finite number for all that is trained (of a tensor: .tolist())")
    ids = hashlib.blake2b(repr([r.response_ids for r in train]).encode()).digest()
    advantages = torch.tensor([r.advantage for r in train])
    for other_ids, others in gather((ids, advantages)):
        if other_ids != ids or not torch.allclose(advantages, others, rtol=1e-4):
            raise ValueError("the ranks have different batches: every rank must compute the same responses "
                             "and advantages, from all responses, without its rank, process id, clock or own "
                             "random numbers")


def answer_classes(problem: Problem, responses: list[Rollout], labels: str = "majority") -> list[int | None]:
    """[N] the class of each response's answer; equal answers have equal classes, None is no answer.

    labels 'gold': 0 if the answer is the gold one, else None: in ttrl.py the gold answer wins every vote."""
    classes = problem.classes([r.answer for r in responses])
    if labels == "majority":
        return classes
    right = {None: False}  # one comparison per class of answers
    for c, response in zip(classes, responses):
        if c not in right:
            right[c] = problem.is_right(response.answer)
    return [0 if right[c] else None for c in classes]
