"""Before weights are loaded: config, tokenizer and data are read, and the processes find each other."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import subprocess
import sys
import time
from importlib import metadata, util
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from engine.base import UserError, first_line, rank_and_ranks, seed_of as digest
from engine.data import Problem, encode_prompt, load_problems, read_template
from engine.options import script_name


# ------------------------------------------------------- vLLM -----------------------------------------------
def has_vllm() -> bool:
    """Whether vLLM is installed. A broken install is not replaced by --sampler hf, it shows its traceback."""
    return util.find_spec("vllm") is not None


def vllm_options(args, cuda: bool) -> dict:
    """vLLM's options for speed and safety, on a GPU or on a CPU."""
    if cuda:
        # vLLM's own all-reduce shares memory between ranks, which neither expandable segments nor memory that
        # can sleep allow: the process ends while graphs are captured. NCCL, symmetric memory, FlashInfer stay
        options = dict(gpu_memory_utilization=args.gpu_memory, enable_sleep_mode=True,
                       max_num_seqs=256, disable_custom_all_reduce=args.tensor_parallel > 1)
    else:
        # whole prompts only: the CPU build cannot rewind a request's seed over a partly prefilled one
        # block_size: the smallest it has, so that the prefix cache finds short prefixes (ETTRL), too
        options = dict(enforce_eager=True, block_size=32, enable_chunked_prefill=False,
                       max_num_batched_tokens=max(8192, args.max_prompt_tokens + args.max_new_tokens),
                       kv_cache_memory_bytes=int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 2)) << 30)
    if "RANK" in os.environ:  # under torchrun: every rank calls its engine
        options["distributed_executor_backend"] = "external_launcher"
    return options


def engine_errors(args) -> list[str]:
    """One sentence each: what is wrong with --sampler, --tensor_parallel, --dtype."""
    ranks, parallel, bad = args.gpus or rank_and_ranks()[1], max(1, args.tensor_parallel), []
    if (args.gpus or args.gpu_gib) and not args.plan:
        bad.append("--gpus and --gpu_gib are taken only by --plan; a run has torchrun's --nproc-per-node.")
    if ranks % parallel:
        bad.append(f"--tensor_parallel is {parallel}, but must divide the number of ranks, {ranks}.")
    vllm = args.sampler == "vllm" or args.sampler == "auto" and not args.plain
    if parallel > 1 and not (vllm and (args.plan or has_vllm())):
        bad.append(f"--tensor_parallel is {parallel}, but only vLLM splits a model among ranks; give "
                   "--sampler vllm.")
    elif args.sampler == "vllm" and not args.plan and not has_vllm():
        bad.append("--sampler is 'vllm', but vllm is not installed here; install it or give --sampler hf.")
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    if old and args.dtype != "float32" and not args.plan:
        bad.append(f"--dtype is '{args.dtype}', but must be float32: this GPU has no bfloat16.")
    return bad


# ------------------------------------------------ model and data --------------------------------------------
def read_config(path: str, args):
    """The model's config, which is all that a plan needs.

    Raises UserError if it cannot be read, is of another kind of model or too small for the flags."""
    wanted = f"--model is '{path}', but no model can be read from a folder or the Hub by that name"
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    except Exception as error:
        raise UserError(f"{wanted}: {first_line(error)}") from None
    if getattr(config, "quantization_config", None):
        raise UserError(f"--model is '{path}', which is quantised; give one in float32, bfloat16 or float16.")
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and args.max_prompt_tokens + args.max_new_tokens > context:
        raise UserError(f"--max_prompt_tokens {args.max_prompt_tokens} + --max_new_tokens "
                        f"{args.max_new_tokens} must fit the model's context of {context} tokens.")
    if text.num_attention_heads % args.tensor_parallel:
        raise UserError(f"--tensor_parallel is {args.tensor_parallel}, but must divide the attention heads "
                        f"of {path}, {text.num_attention_heads}.")
    return config


def read_tokenizer(path: str, config, args):
    """(tokenizer, ids of the tokens that end a response). Raises UserError if it makes no prompts."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    except Exception as error:
        raise UserError(f"--model is '{path}', but its tokenizer cannot be read: "
                        f"{first_line(error)}") from None
    if read_template(args.prompt)[0][0] and not tokenizer.chat_template:
        raise UserError(f"--prompt is '{args.prompt}', but the tokenizer of {path} has no chat template; "
                        "give --prompt plain.")
    try:
        stop = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # it has none
        stop = None
    stop = [*(stop if isinstance(stop, list) else [stop]), tokenizer.eos_token_id]
    vocabulary = config.get_text_config().vocab_size
    ids = sorted({i for i in stop if i is not None})
    if not ids or not 0 <= ids[0] <= ids[-1] < vocabulary or len(tokenizer) > vocabulary:
        raise UserError(f"--model is '{path}', whose tokenizer has {len(tokenizer)} tokens and ends a "
                        f"response with {ids}, but the model knows the tokens 0 to {vocabulary - 1}.")
    return tokenizer, ids


def read_problems(name: str, args, tokenizer, flag: str, same_answer=None) -> list[Problem]:
    """Problems with their prompts. Overlong ones: left out of training (--dataset), without a prompt else.

    Raises UserError, naming the flag, if they cannot be read or all are too long."""
    fields = () if flag == "--eval" else (args.question_field, args.answer_field)
    try:
        quiet = rank_and_ranks()[0] != 0
        problems = load_problems(name, *fields, quiet=quiet, same_answer=same_answer)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    for p in problems:
        p.prompt_ids = encode_prompt(tokenizer, p.question, args.prompt, args.max_prompt_tokens)
    kept = [p for p in problems if p.prompt_ids]
    if not kept:
        raise UserError(f"{flag}: all {len(problems)} problems of {name} have more than --max_prompt_tokens "
                        f"{args.max_prompt_tokens}; raise it.")
    train = flag == "--dataset"
    if len(kept) < len(problems) and not quiet:
        print(f"{name}: {len(problems) - len(kept)} problems have more than --max_prompt_tokens "
              f"{args.max_prompt_tokens} and {'are left out' if train else 'count as wrong'}", flush=True)
    return kept if train else problems


def read_data(args, tokenizer, train: bool, same_answer=None) -> tuple[list, dict[str, list]]:
    """(the problems of --dataset, those of every benchmark by name). Raises UserError if any are missing."""
    problems, benchmarks = [], {}
    if train and args.dataset:
        problems = read_problems(args.dataset, args, tokenizer, "--dataset", same_answer)
    flag = "--eval" if train else "--benchmarks"
    for name in [name.strip() for name in args.eval.split(",")] if args.eval else []:
        if name != "train":
            benchmarks[name] = read_problems(name, args, tokenizer, flag, same_answer)
        elif problems:
            benchmarks[name] = problems
        else:
            raise UserError("the benchmark 'train' means --dataset, which is empty; name another one.")
    for name, ids in args.own_prompts(tokenizer).items():
        if len(ids) > args.max_prompt_tokens:
            raise UserError(f"{name} (Dynamic RL: --question_prompt) has {len(ids)} tokens, more than "
                            f"--max_prompt_tokens {args.max_prompt_tokens}; raise it.")
    if train and args.labels == "gold" and not (problems and all(p.answer is not None for p in problems)):
        raise UserError("--labels is 'gold', but --dataset is empty or has problems without a gold answer.")
    if problems and len(problems) < args.prompts_per_batch:
        raise UserError(f"--prompts_per_batch is {args.prompts_per_batch}, but must be at most "
                        f"{len(problems)}, the problems of --dataset: a batch holds none twice.")
    return problems, benchmarks


def print_prompts(args, tokenizer, problems: list[Problem], benchmarks: dict[str, list[Problem]]) -> None:
    """Print the exact text of the first problem's prompt and of the script's own prompts, and exit."""
    sets = {"--dataset": problems} | benchmarks
    first = next((name for name, part in sets.items() if part), None)
    prompts = {f"first problem of {first}": sets[first][0].prompt_ids} if first else {}
    for name, ids in (prompts | args.own_prompts(tokenizer)).items():
        if rank_and_ranks()[0] == 0:
            print(f"--- {name}: {len(ids)} tokens\n{tokenizer.decode(ids)}")
    sys.exit(0)


# -------------------------------------------------- processes -----------------------------------------------
def start_processes(bf16: bool = False) -> tuple[torch.device, int, int]:
    """(device, rank, ranks). Opens the process group if there are ranks or a GPU, or for bfloat16.

    A single device has one, too: it is FSDP that computes in bfloat16 on float32 weights."""
    cuda, (rank, ranks) = torch.cuda.is_available(), rank_and_ranks()
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
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None)
    libc = None if cuda or sys.platform != "linux" else ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # glibc returns the memory of big tensors and gets it anew, page by page: a sixth of SmolLM2's step
        libc.mallopt(-4, 0)   # M_MMAP_MAX: no big tensor gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: freed memory is kept
    return device, rank, ranks


# ------------------------------------------------ what a run is ---------------------------------------------
def identity(problems: list, benchmarks: dict[str, list], stop_ids: list[int]) -> dict[str, int]:
    """Digests of what all ranks must share, and a resumed run with the one before; keys as errors name it."""
    found = {"the stop tokens of --model": digest(stop_ids)}
    data = {"--dataset": problems} | {f"--eval {name}": part for name, part in benchmarks.items()}
    for flag, part in data.items():
        found[f"the data of {flag}"] = digest([(problem.prompt_ids, problem.answer) for problem in part])
    return found


def weights_digest(model) -> int:
    """Of the first numbers of every parameter: the same for the same weights, in whatever folder or file."""
    parameters = model.named_parameters()
    return digest([(name, p.shape, p.detach().flatten()[:256].tolist()) for name, p in parameters])


def code_digest(script: Path) -> int:
    """Of a run's script, common.py, engine/ and toy/."""
    root = Path(__file__).parent.parent
    files = [script, root / "common.py", *sorted(root.glob("engine/*.py")), *sorted(root.glob("toy/*"))]
    return digest([file.read_bytes() for file in files if file.is_file()])


def describe(args, ranks: int, device) -> dict:
    """What run.json holds: script, command line, arguments, hardware, versions, git state, code, time."""
    done = subprocess.run("git describe --always --dirty --abbrev=40 --exclude=*".split(),
                          cwd=Path(__file__).parent, capture_output=True, text=True)
    versions = {package.name: package.version for package in metadata.distributions()}
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    return dict(script=script_name(), command=sys.argv, args=dataclasses.asdict(args), ranks=ranks,
                device=hardware, python=platform.python_version(), versions=versions,
                git=done.stdout.strip(), code=code_digest(Path(sys.argv[0])),
                started=time.strftime("%Y-%m-%dT%H:%M:%S"))
