"""How a run starts: flags are checked, data is read, weights are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import util

import torch

from engine.base import UserError, print0, rank_and_ranks, stable_hash
from engine.data import Row, read_rows
from engine.hf_sampler import HFSampler
from engine.log import Log
from engine.models import load_model, weights_digest
from engine.options import has_vllm, out_of_range, uses_vllm
from engine.policy import Policy
from engine.process import StopSignal
from engine.vllm_sampler import VLLMSampler, check_vllm


# ----------------------------------------------------- options ----------------------------------------------
def errors(args) -> list[str]:
    """One sentence per bad flag: flag, value, what is allowed."""
    if bad := out_of_range(args):
        return bad
    machine, ranks = args.machine, args.machine.gpus or rank_and_ranks()[1]
    responses, least, parallel = args.responses_per_prompt(), args.LEAST_TRAINED, machine.tensor_parallel
    sequences, vllm, here = args.prompts_per_batch * args.train_samples, uses_vllm(machine), not machine.plan
    cuda, wanted = torch.cuda.is_available(), torch.version.cuda or os.path.exists("/proc/driver/nvidia")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or args.model in ("", "toy", "smollm2")
    cause = "nvidia-smi shows the driver, and CUDA 13 needs 580 or newer"
    if not torch.version.cuda:
        cause = "it has no CUDA; install requirements.txt into an environment of its own"
    table = [  # (what is wrong, sentence)
        (responses < 2,
         f"the responses per prompt are {responses}, but must be at least 2: an advantage compares them."),
        (responses >= 2 and not least <= args.train_samples <= responses,
         f"--train_samples is {args.train_samples}, but must be at least {least} and at most {responses}, "
         "the responses per prompt."),
        (args.num_minibatches > sequences,
         f"--num_minibatches is {args.num_minibatches}, but must be at most {sequences}, the trained "
         "responses of a batch (prompts_per_batch x train_samples)."),
        (here and (machine.gpus or machine.gpu_gib),
         "--gpus and --gpu_gib are taken only by --plan; a run has torchrun's --nproc-per-node."),
        (ranks % parallel,
         f"--tensor_parallel is {parallel}, but must divide the number of ranks, {ranks}."),
        (parallel > 1 and not vllm,
         f"--tensor_parallel is {parallel}, but only vLLM splits a model among ranks; give --sampler vllm."),
        (here and vllm and not has_vllm(),
         "--sampler is 'vllm', but vllm is not installed here; install it or give --sampler hf."),
        (machine.wandb and not (sys.modules.get("wandb") or util.find_spec("wandb")),
         "--wandb is given, but wandb is not installed here; `pip install wandb` or leave it out."),
        (vllm and any(0 < value < 0.01 for value in (args.temperature, args.eval_temperature)),
         f"--temperature is {args.temperature}, --eval_temperature (evaluate.py: --temperature) is "
         f"{args.eval_temperature}, but vLLM raises less than 0.01 to that; give more or --sampler hf."),
        (here and wanted and not (cuda or hidden),
         f"this torch ({torch.__version__}) sees no GPU: {cause}. To use the CPU, set CUDA_VISIBLE_DEVICES= "
         "(empty)."),
        (here and machine.offload != "none" and not cuda,
         f"--offload is '{machine.offload}', but there is no GPU here to take anything off.")]
    return [sentence for wrong, sentence in table if wrong]


# ------------------------------------------------ model and data --------------------------------------------
def read_data(args, tokenizer, train: bool) -> dict[str, list[Row]]:
    """The problems of --dataset, under that name, and those of every benchmark. Raises UserError if any are
    missing."""
    machine, problems, sets = args.machine, [], {}
    fields = machine.question_field, machine.answer_field
    read = partial(read_rows, tokenizer=tokenizer, style=args.prompt, max_tokens=args.max_prompt_tokens)
    if train and args.dataset:
        problems = read("--dataset", args.dataset, fields)
    for name in filter(None, map(str.strip, args.eval.split(","))):
        if name != "train":
            sets[name] = read("--eval", name) if train else read("--benchmarks", name, fields)
        elif problems:
            sets[name] = problems
        else:
            raise UserError("the benchmark 'train' means --dataset, which is empty; name another one.")
    held = {}
    for name, part in sets.items():
        twin = held.setdefault(stable_hash(sorted(problem.prompt_ids for problem in part)), name)
        if twin != name:
            print0(f"Warning: {twin} and {name} hold the same problems, which eval/mean counts twice.")
    for name, ids in args.own_prompts(tokenizer).items():
        if len(ids) > args.max_prompt_tokens:
            raise UserError(f"{name} has {len(ids)} tokens, more than "
                            f"--max_prompt_tokens {args.max_prompt_tokens}; raise it.")
    if train and args.labels == "gold" and not (problems and all(p.answer is not None for p in problems)):
        raise UserError("--labels is 'gold', but --dataset is empty or has problems without a gold answer.")
    if problems and len(problems) < args.prompts_per_batch and not machine.show_prompt:
        raise UserError(f"--prompts_per_batch is {args.prompts_per_batch}, but must be at most "
                        f"{len(problems)}, the problems of --dataset: a batch holds none twice.")
    return {"--dataset": problems} | sets


def print_prompts(tokenizer, sets: dict[str, list], own: dict[str, list[int]]) -> None:
    """Print the exact text of the first problem's prompt and of the script's own prompts, and exit."""
    firsts = [(f"first problem of {name}", part[0].prompt_ids) for name, part in sets.items() if part]
    for name, ids in [*firsts[:1], *own.items()]:
        print0(f"--- {name}: {len(ids)} tokens\n{tokenizer.decode(ids)}")
    sys.exit(0)


# --------------------------------------------------- the start ----------------------------------------------
@dataclass
class Run:
    """What a run consists of. After `start` only state and sampled change."""
    args: object
    tokenizer: object
    problems: list
    benchmarks: dict[str, list]
    total_steps: int
    policy: Policy | None
    reference: Policy | None  # the frozen initial model; None without a KL term
    sampler: HFSampler | VLLMSampler
    log: Log
    stop: StopSignal
    device: torch.device
    dtype: torch.dtype
    answer_keys: Callable | None
    read_answer: Callable | None
    generate: Callable | None
    state: dict = field(default_factory=dict)  # what a script wants checkpoints to keep, as JSON
    sampled: set = field(default_factory=set)  # (step, prompt.id)


def count_steps(args, problems: list, tokenizer) -> int:
    """Rollout batches of the whole run: --steps, else those of --epochs."""
    steps = args.steps or args.epochs * (len(problems) // args.prompts_per_batch)
    if not steps or not problems and not args.own_prompts(tokenizer):
        raise UserError("there is nothing to train on: --dataset is empty, or --steps and --epochs are 0.")
    return steps


def load_policies(path: str, device, dtype, machine, max_length: int, log: Log, train: bool,
                  reference: bool, adapt=None, **memory) -> tuple[Policy | None, Policy | None]:
    """(the policy if this is training, the frozen initial model if there is a KL term). memory: of
    `plan.choose_memory_settings`."""
    models = []
    for trainable in [True, False] if train and reference else [True] if train else []:
        loaded = load_model(path, machine.trust_remote_code)  # memory-mapped: the second takes no more memory
        if trainable:
            log.identify({"the weights of --model": weights_digest(loaded)})
        offload = machine.offload == "optimizer" or machine.offload == "reference" and not trainable
        models.append(Policy(loaded, device, dtype, trainable, plain=machine.plain, offload=offload,
                             max_length=max_length, adapt=adapt if trainable else None,
                             compile=models[0].compiled if models else machine.compile,
                             implementation=models[0].implementation if models else None, **memory))
    return *models, *[None] * (2 - len(models))


def load_sampler(path: str, device, dtype, machine, max_length: int, stop_ids: list[int], seed: int,
                 policy: Policy | None) -> HFSampler | VLLMSampler:
    """The sampler. policy: whose weights it will get; None: it samples with those of the path."""
    print0(f"{path}: {'vllm' if uses_vllm(machine) else 'hf'} sampler, {str(dtype)[6:]} compute, "
           f"{rank_and_ranks()[1]} rank(s) on {device.type}, stop ids {stop_ids}")
    if uses_vllm(machine):
        print0("Starting vLLM (on a GPU it compiles for minutes) ...")
        sampler = VLLMSampler(path, stop_ids, device, dtype, seed, machine, max_length, dummy=bool(policy))
        if policy:
            check_vllm(sampler, policy.model, dtype == torch.float32, machine.max_logp_diff, policy)
    else:
        sampler = HFSampler(path, stop_ids, device, dtype, machine.trust_remote_code)
    torch.manual_seed(seed)  # building a vLLM engine re-seeds the process
    return sampler


# ------------------------------------------------ what a run is ---------------------------------------------
def digests(sets: dict[str, list], stop_ids: list[int]) -> dict[str, int]:
    """Digests of what all ranks must share, and a resumed run with the one before; keys as errors name it."""
    found = {"the stop tokens of --model": stable_hash(stop_ids)}
    for name, part in sets.items():
        flag = name if name == "--dataset" else f"--eval {name}"
        found[f"the data of {flag}"] = stable_hash([(problem.prompt_ids, problem.answer) for problem in part])
    return found
