"""How a run starts: config, tokenizer and data are read, the processes find each other, then weights load."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import AutoConfig

from engine.base import UserError, first_line, rank_and_ranks, same_on_all_ranks, say, seed_of as digest
from engine.builtin import model_folder
from engine.data import encode_prompt, load_problems
from engine.hf_sampler import HFSampler
from engine.log import Log
from engine.measure import check_vllm
from engine.options import flat, out_of_range
from engine import plan
from engine.policy import Policy, load_model
from engine.tokenizer import read_tokenizer
from engine.vllm_sampler import VLLMSampler, has_vllm, uses_vllm


# ----------------------------------------------------- options ----------------------------------------------
def errors(args) -> list[str]:
    """One sentence per bad flag: flag, value, what is allowed."""
    if bad := out_of_range(args):
        return bad
    responses, least = args.responses_per_prompt(), args.LEAST_TRAINED
    if responses < 2:
        bad.append(f"the responses per prompt are {responses}, but must be at least 2: an advantage compares "
                   "them.")
    elif not least <= args.train_samples <= responses:
        bad.append(f"--train_samples is {args.train_samples}, but must be at least {least} and at most "
                   f"{responses}, the responses per prompt.")
    sequences = args.prompts_per_batch * args.train_samples
    if args.num_minibatches > sequences:
        bad.append(f"--num_minibatches is {args.num_minibatches}, but must be at most {sequences}, the "
                   "trained responses of a batch (prompts_per_batch x train_samples).")
    if args.steps == 0 and args.epochs == 0:
        bad.append("--epochs is 0 and --steps is 0, so there is nothing to do; give one of them.")
    return bad + machine_errors(args)


def machine_errors(args) -> list[str]:
    """One sentence for each thing that is wrong with --sampler, --tensor_parallel, --dtype."""
    ranks, parallel, bad = args.machine.gpus or rank_and_ranks()[1], args.machine.tensor_parallel, []
    if (args.machine.gpus or args.machine.gpu_gib) and not args.machine.plan:
        bad.append("--gpus and --gpu_gib are taken only by --plan; a run has torchrun's --nproc-per-node.")
    if ranks % parallel:
        bad.append(f"--tensor_parallel is {parallel}, but must divide the number of ranks, {ranks}.")
    if parallel > 1 and not uses_vllm(args):
        bad.append(f"--tensor_parallel is {parallel}, but only vLLM splits a model among ranks; give "
                   "--sampler vllm.")
    elif args.machine.sampler == "vllm" and not args.machine.plan and not has_vllm():
        bad.append("--sampler is 'vllm', but vllm is not installed here; install it or give --sampler hf.")
    for flag, value in (("--temperature", args.temperature),
                        ("--eval_temperature (evaluate.py: --temperature)", args.eval_temperature)):
        if uses_vllm(args) and 0 < value < 0.01:
            bad.append(f"{flag} is {value}, but must be at least 0.01 with vLLM, which raises it to that; "
                       "give a larger one or --sampler hf.")
    hidden = args.machine.plan or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    small = args.model in ("", "toy", "smollm2")
    if torch.version.cuda and not (torch.cuda.is_available() or hidden or small):
        bad.append(f"this torch is built for CUDA {torch.version.cuda}, but it sees no GPU: nvidia-smi shows "
                   "the driver, and CUDA 13 needs 580 or newer. To use the CPU, set CUDA_VISIBLE_DEVICES= "
                   "(empty).")
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    if old and args.machine.dtype != "float32" and not args.machine.plan:
        bad.append(f"--dtype is '{args.machine.dtype}', but must be float32: this GPU has no bfloat16.")
    return bad


# ------------------------------------------------ model and data --------------------------------------------
def read_config(path: str, args):
    """The model's config, which is all that a plan needs.

    Raises UserError if it cannot be read, is of another kind of model or too small for the flags."""
    wanted = f"--model is '{path}', but no model can be read from a folder or the Hub by that name"
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=args.machine.trust_remote_code)
    except Exception as error:
        raise UserError(f"{wanted}: {first_line(error)}") from None
    if getattr(config, "quantization_config", None):
        raise UserError(f"--model is '{path}', which is quantised; give one in float32, bfloat16 or float16.")
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # a longer sequence rotates its first tokens otherwise, too
        context = rope.get("original_max_position_embeddings", context)
    if context is not None and args.max_prompt_tokens + args.max_new_tokens > context:
        raise UserError(f"--max_prompt_tokens {args.max_prompt_tokens} + --max_new_tokens "
                        f"{args.max_new_tokens} must fit the model's context of {context} tokens; lower one "
                        "of them (evaluate.py --preset toy has a trained toy's).")
    if args.machine.tensor_parallel > 1 and text.num_attention_heads % args.machine.tensor_parallel:
        raise UserError(f"--tensor_parallel is {args.machine.tensor_parallel}, but must divide the attention "
                        f"heads of {path}, {text.num_attention_heads}.")
    return config


def read_problems(make, name: str, args, tokenizer, flag: str) -> list:
    """Problems with their prompts. Overlong ones: left out of training (--dataset), without a prompt else.

    Raises UserError, naming the flag, if they cannot be read or all are too long."""
    fields = () if flag == "--eval" else (args.machine.question_field, args.machine.answer_field)
    try:
        problems = load_problems(make, name, *fields)
        for p in problems:
            p.prompt_ids = encode_prompt(tokenizer, p.question, args.prompt, args.max_prompt_tokens, p.before)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    kept = [p for p in problems if p.prompt_ids]
    if not kept:
        raise UserError(f"{flag}: all {len(problems)} problems of {name} have more than --max_prompt_tokens "
                        f"{args.max_prompt_tokens}; raise it.")
    train = flag == "--dataset"
    if len(kept) < len(problems):
        say(f"{name}: {len(problems) - len(kept)} problems have more than --max_prompt_tokens "
            f"{args.max_prompt_tokens} and {'are left out' if train else 'count as wrong'}")
    return kept if train else problems


def read_data(make, args, tokenizer, train: bool) -> tuple[list, dict[str, list]]:
    """(the problems of --dataset, those of every benchmark by name). Raises UserError if any are missing.

    make: see `load_problems`."""
    problems, benchmarks = [], {}
    if train and args.dataset:
        problems = read_problems(make, args.dataset, args, tokenizer, "--dataset")
    flag = "--eval" if train else "--benchmarks"
    for name in [name.strip() for name in args.eval.split(",")] if args.eval else []:
        if name != "train":
            benchmarks[name] = read_problems(make, name, args, tokenizer, flag)
        elif problems:
            benchmarks[name] = problems
        else:
            raise UserError("the benchmark 'train' means --dataset, which is empty; name another one.")
    for name, ids in args.own_prompts(tokenizer).items():
        if len(ids) > args.max_prompt_tokens:
            raise UserError(f"{name} has {len(ids)} tokens, more than "
                            f"--max_prompt_tokens {args.max_prompt_tokens}; raise it.")
    if train and args.labels == "gold" and not (problems and all(p.answer is not None for p in problems)):
        raise UserError("--labels is 'gold', but --dataset is empty or has problems without a gold answer.")
    if problems and len(problems) < args.prompts_per_batch:
        raise UserError(f"--prompts_per_batch is {args.prompts_per_batch}, but must be at most "
                        f"{len(problems)}, the problems of --dataset: a batch holds none twice.")
    return problems, benchmarks


def print_prompts(args, tokenizer, problems: list, benchmarks: dict[str, list]) -> None:
    """Print the exact text of the first problem's prompt and of the script's own prompts, and exit."""
    sets = {"--dataset": problems} | benchmarks
    first = next((name for name, part in sets.items() if part), None)
    prompts = {f"first problem of {first}": sets[first][0].prompt_ids} if first else {}
    for name, ids in (prompts | args.own_prompts(tokenizer)).items():
        say(f"--- {name}: {len(ids)} tokens\n{tokenizer.decode(ids)}")
    sys.exit(0)


# -------------------------------------------------- processes -----------------------------------------------
def start_processes(bf16: bool = False) -> torch.device:
    """This process's device. Opens the process group if there are ranks or a GPU, or for bfloat16.

    A single device has one, too: it is FSDP that computes in bfloat16 on float32 weights."""
    cuda, ranks = torch.cuda.is_available(), rank_and_ranks()[1]
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        if device.index >= torch.cuda.device_count():
            raise UserError("--nproc-per-node asks for more processes than the "
                            f"{torch.cuda.device_count()} GPU(s) here.")
        torch.cuda.set_device(device)
    if (ranks > 1 or cuda or bf16) and not dist.is_initialized():
        if "MASTER_ADDR" not in os.environ:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(get_free_port()), RANK="0",
                              LOCAL_RANK="0", WORLD_SIZE="1")
        # a rank may wait for another that samples or scores much longer responses
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=6),
                                device_id=device if cuda else None)
    libc = None if cuda or sys.platform != "linux" else ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # glibc returns the memory of big tensors and gets it anew, page by page: a sixth of SmolLM2's step
        libc.mallopt(-4, 0)   # M_MMAP_MAX: no big tensor gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: freed memory is kept
    return device


# --------------------------------------------------- the start ----------------------------------------------
@dataclass
class Run:
    """The handles of a run. Only `state` changes: what a script wants checkpoints to keep, as JSON."""
    args: object
    tokenizer: object
    problems: list
    benchmarks: dict[str, list]
    total_steps: int
    policy: Policy | None
    reference: Policy | None  # the frozen initial model; None without a KL term
    sampler: HFSampler | VLLMSampler
    log: Log
    device: torch.device
    dtype: torch.dtype
    answer_keys: Callable | None
    read_answer: Callable | None
    generate: Callable | None
    state: dict = field(default_factory=dict)
    stop: object = None  # the StopSignal that `restore` installs
    sampled: set = field(default_factory=set)  # (step, prompt.id)


def start(args, make, train: bool = True, answer_keys=None, read_answer=None, generate=None,
          adapt=None) -> Run:
    """Refuse bad flags, model and data, then load weights. make: common.Problem. train: False to evaluate.

    For forks, the same on all ranks. Another task than mathematics: answer_keys (see Problem), used by votes,
    metrics and evaluation; read_answer(text, problem) -> the answer in a response, or None. Other
    sampling, in training and evaluation: generate(run, work, temperature, **options), which may call
    common.generate. adapt(policy) changes the policy's model before it is sharded (examples/lora.diff)."""
    if bad := args.errors():
        raise UserError("\n       ".join(bad))
    machine = args.machine
    torch.manual_seed(args.seed)
    if args.model in ("", "toy"):
        torch.set_num_threads(1)  # the toy is too small to share: two threads mostly wait for each other
    path = model_folder(args.model)
    config = read_config(path, args)
    if machine.plan:
        plan.show(args, config)  # and exit
    tokenizer, stop_ids = read_tokenizer(path, config, args)
    make = partial(make, answer_keys=answer_keys)
    problems, benchmarks = read_data(make, args, tokenizer, train)
    if machine.show_prompt:
        print_prompts(args, tokenizer, problems, benchmarks)
    total_steps = count_steps(args, problems, tokenizer) if train else 0
    device = start_processes(train and machine.dtype == "bfloat16")
    bf16 = machine.dtype == "bfloat16" or machine.dtype == "auto" and device.type == "cuda"
    dtype = torch.bfloat16 if bf16 else torch.float32
    if machine.offload != "none" and device.type != "cuda":
        raise UserError(f"--offload is '{machine.offload}', but there is no GPU here to take anything off.")
    memory = plan.settle(args, config, device) if train else {}
    same_on_all_ranks({f"--{name}": value for name, value in (flat(args) | memory).items()})
    log = Log(args, device, identity(problems, benchmarks, stop_ids))
    vllm = uses_vllm(args)
    say(f"{path}: {'vllm' if vllm else 'hf'} sampler, {str(dtype)[6:]} compute, "
        f"{rank_and_ranks()[1]} rank(s) on {device.type}, stop ids {stop_ids}")
    policy = reference = None
    if train:
        policy, reference = load_policies(args, path, device, dtype, log, adapt, **memory)
    if vllm:
        say("Starting vLLM (on a GPU it compiles for minutes) ...")
        sampler = VLLMSampler(args, path, stop_ids, device, dtype, dummy=train)
        if train:
            check_vllm(sampler, policy.model, dtype == torch.float32, machine.max_logp_diff, policy)
    else:
        sampler = HFSampler(path, stop_ids, device, dtype, machine.trust_remote_code)
    torch.manual_seed(args.seed)  # building a vLLM engine re-seeds the process
    return Run(args, tokenizer, problems, benchmarks, total_steps, policy, reference, sampler, log, device,
               dtype, answer_keys, read_answer, generate)


def count_steps(args, problems: list, tokenizer) -> int:
    """Rollout batches of the whole run: --steps, else those of --epochs."""
    steps = args.steps or args.epochs * (len(problems) // args.prompts_per_batch)
    if not steps or not problems and not args.own_prompts(tokenizer):
        raise UserError("there is nothing to train on: --dataset is empty; name one.")
    return steps


def load_policies(args, path: str, device, dtype, log: Log, adapt,
                  **memory) -> tuple[Policy, Policy | None]:
    """(the policy, the frozen initial model or None without a KL term). memory: see `plan.settle`."""
    machine, models = args.machine, []
    say(f"Reading the weights of {path} ...")
    for trainable in (True, False) if args.kl_coef else (True,):
        loaded = load_model(path, machine.trust_remote_code)  # memory-mapped: the second takes no more memory
        if trainable:
            log.identify({"the weights of --model": weights_digest(loaded)})
        offload = machine.offload == "optimizer" or machine.offload == "reference" and not trainable
        models.append(Policy(loaded, device, dtype, trainable, plain=machine.plain, offload=offload,
                             max_length=args.max_prompt_tokens + args.max_new_tokens,
                             way=models[0].way if models else None, adapt=adapt if trainable else None,
                             **memory))
    return models[0], models[1] if args.kl_coef else None


# ------------------------------------------------ what a run is ---------------------------------------------
def identity(problems: list, benchmarks: dict[str, list], stop_ids: list[int]) -> dict[str, int]:
    """Digests of what all ranks must share, and a resumed run with the one before; keys as errors name it."""
    found = {"the stop tokens of --model": digest(stop_ids)}
    data = {"--dataset": problems} | {f"--eval {name}": part for name, part in benchmarks.items()}
    for flag, part in data.items():
        found[f"the data of {flag}"] = digest([(problem.prompt_ids, problem.answer) for problem in part])
    return found


def weights_digest(model) -> int:
    """Hash of the first 256 values of every parameter: it identifies the weights in any folder or file."""
    parameters = model.named_parameters()
    return digest([(name, p.shape, p.detach().flatten()[:256].tolist()) for name, p in parameters])
