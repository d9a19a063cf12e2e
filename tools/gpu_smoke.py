"""Everything that only runs on a GPU, once, in under ten minutes: run it first, paste its output in an issue.

    python -m tools.gpu_smoke

On all GPUs it sees, with a randomly initialised model of Qwen2.5-0.5B's shape: nothing is downloaded. Without
a GPU the model is tiny, it takes three minutes, and what needs CUDA is NOT RUN. Every check is a process of
its own: one that dies, or takes more than five minutes, is a FAIL, and the others go on."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import common  # first: it sets what torch reads when it is loaded
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine import checkpoint
from engine.setup import describe
from tools.gpu_parts import CLOSE, CUDA, DTYPE, PARTS, PROMPT, RESPONSE, VERDICTS, verdict

ROOT = Path(__file__).resolve().parent.parent
SIZES = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
             vocab_size=151936)
TINY = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=1024)
FLAGS = dict(dataset="toy", sampler="vllm" if CUDA else "hf", steps=1, votes=16, train_samples=16, trunks=4,
             num_minibatches=2, max_prompt_tokens=PROMPT, max_new_tokens=RESPONSE, lr=1e-4, entropy_coef=0.1,
             eval="", checkpoint_every=0)  # random responses have no answers: entropy gives the gradient
lines: list[str] = []


def tell(line: str) -> None:
    lines.append(line)
    print(line, flush=True)


def make_models(folder: str) -> str:
    """A random model with the toy's tokenizer; beside it the same as a sentence-transformers model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    path = f"{folder}/model"
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES if CUDA else TINY, num_key_value_heads=2, max_position_embeddings=4096,
                         bos_token_id=None, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).to(DTYPE).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(common.TOY_MODEL) / name, path)
    modules = [Transformer(path), Pooling(config.hidden_size, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(f"{path}-embedder")
    return path


def call(command: list, name: str) -> bool:
    """Run a command; its verdicts are told, and if it fails, its last error."""
    environment = os.environ | dict(HF_HUB_OFFLINE="1")
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's ranks, too
        output, errors = process.communicate()
        errors += "\nError: it took more than 300 s"
    for line in output.splitlines():
        if line.startswith(VERDICTS):
            tell(line)
    if process.returncode:
        reasons = [line for line in errors.splitlines() if "Error" in line and "ChildFailed" not in line]
        tell(verdict(False, name, (reasons or [f"exit code {process.returncode}"])[-1][:300]))
    return process.returncode == 0


def run(name: str, script: str, model: str, out: Path, ranks: int = 1, like: dict | None = None,
        **flags) -> dict:
    """Run a script, or resume it, and judge its last step (`like`: as this one); {} if it failed.

    Right is: the sampler's log-probs are the trainer's, and the gradient's norm is the expected one."""
    flags = FLAGS | dict(model=model, prompts_per_batch=max(8, ranks), embedder=f"{model}-embedder") | flags
    known = import_module(script).Args.__dataclass_fields__
    given = [f"--{flag}={value}" for flag, value in flags.items() if flag in known]
    if (out / "run.json").exists():
        given = ["--resume"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    if not call([sys.executable, *torchrun, f"{script}.py", *given, f"--out={out}"], name):
        return {}
    step = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    apart, norm = step["logp_diff_mean"], step["grad_norm"]
    expected = (like or step)["grad_norm"]
    right = apart < CLOSE and abs(norm / expected - 1) < (0.1 if CUDA else 1e-3)
    tell(verdict(right, name, (
        f"log-probs differ by {apart:.1e}, gradient norm {norm:.4g} (expected {expected:.4g}), "
        f"{step['seconds/step']:.1f} s, tokens/s: sample {step['tokens_per_second/sample']:,.0f}, "
        f"update {step['tokens_per_second/update']:,.0f}{memory(step)}")))
    return step


def memory(step: dict) -> str:
    """GiB of the GPU at the end of every phase of a step, as measured and as planned."""
    found = ""
    for name, taken in step.items():
        if name.startswith("measured_gib/"):
            planned = step.get(name.replace("measured", "planned"), math.nan)
            found += f"; GiB of {name.removeprefix('measured_gib/')} {taken:.1f} (planned {planned:.1f})"
    return found


def runs(model: str, folder: Path, gpus: int) -> None:
    """Whole steps of the scripts; a checkpoint and a resume; FSDP; offloading; an engine of two GPUs."""
    two = run("ttrl.py, two steps", "ttrl", model, folder / "ttrl", steps=2, checkpoint_every=1)
    if two:
        shutil.rmtree(checkpoint.complete(folder / "ttrl")[0])
        run("the second again, from a checkpoint", "ttrl", model, folder / "ttrl", like=two)
    for script in ("evol_rl", "ettrl"):
        run(f"{script}.py, one step", script, model, folder / script)
    first = None
    for ranks in [1] if gpus == 1 else sorted({1, 2, gpus or 2}):
        name = f"FSDP on {ranks} GPU(s)" if CUDA else f"{ranks} process(es) without a GPU"
        step = run(name, "ttrl", model, folder / f"fsdp-{ranks}", ranks, first, sampler="hf")
        first = first or step
    if CUDA:
        run("--offload optimizer", "ttrl", model, folder / "offload", 1, first, sampler="hf",
            offload="optimizer")
    else:
        tell(verdict(None, "--offload optimizer", "needs CUDA"))
    if gpus > 1:
        run("vLLM on two GPUs", "ttrl", model, folder / "parallel", 2, tensor_parallel=2)
    else:
        tell(verdict(None, "vLLM on two GPUs", "needs two GPUs"))


def machine() -> str:
    """What an issue must say of it."""
    record, gpus = describe(common.Args(), 1, torch.device("cpu")), "none"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        gpus = "; ".join(subprocess.run(query, capture_output=True, text=True).stdout.splitlines())
    versions = ", ".join([f"{name} {version}" for name, version in record["versions"].items()])
    changed = ", changed" if record["git_changes"] else ""
    return (f"GPUs (name, driver, memory): {gpus}\nPython {record['python']}, CUDA {torch.version.cuda}, "
            f"{versions}\ncommit {record['git']}{changed}")


def main() -> None:
    began = time.time()
    print("Paste all of this into an issue:\n```", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_models(folder)
        for part in PARTS:
            call([sys.executable, "-m", "tools.gpu_parts", part, model], part)
        runs(model, Path(folder), torch.cuda.device_count())
    counts = []
    for word in VERDICTS:
        counts.append(f"{sum(line.startswith(word) for line in lines)} {word}")
    print(f"{machine()}\n{', '.join(counts)}; {(time.time() - began) / 60:.1f} minutes\n```")
    sys.exit(any(line.startswith("FAIL") for line in lines))


if __name__ == "__main__":
    main()
