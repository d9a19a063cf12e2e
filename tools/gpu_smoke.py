"""Does it run on this GPU? ttrl.py for two steps with a random 0.5B model, then --resume, then two ranks.

    python -m tools.gpu_smoke                # a few minutes on a GPU; nothing is downloaded
    python -m tools.gpu_smoke --size tiny    # also without one

The model has Qwen2.5-0.5B's shape and the toy's tokenizer. Two ranks need two GPUs (tiny: none). Of the last
step of each run it prints how far the sampler's log-probs are from the trainer's, GiB and tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from engine import builtin  # first: it sets what torch reads when it is loaded
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "0.5b": dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                 num_attention_heads=14, num_key_value_heads=2),
    "tiny": dict(vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2)}
# Random responses have no answers, so that all rewards are 0: the entropy bonus gives the gradient.
FLAGS = ("--dataset toy --steps 2 --prompts_per_batch 8 --votes 8 --train_samples 8 --num_minibatches 2 "
         "--lr 1e-4 --max_prompt_tokens 128 --entropy_coef 0.1 --eval= --checkpoint_every 1").split()


def make_model(folder: Path, size: str) -> None:
    """Save a model of random weights, in bfloat16, with the toy's tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[size], max_position_embeddings=4096, bos_token_id=None, eos_token_id=2,
                         pad_token_id=2, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(builtin.TOY_MODEL) / name, folder)


def run(name: str, out: Path, flags: list[str], ranks: int = 1) -> dict:
    """Run ttrl.py and return the last line of its metrics.jsonl; leaves with the run's error if it fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "ttrl.py", *flags, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(HF_HUB_OFFLINE="1"), capture_output=True,
                          text=True)
    if done.returncode:
        sys.exit(f"{name} FAILED: {' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    step = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    sample, update = step["tokens_per_second/sample"], step["tokens_per_second/update"]
    print(f"{name:12}logp_diff mean {step['logp_diff_mean']:.1e}, max {step['logp_diff_max']:.1e}; "
          f"{step.get('peak_memory_gib', 0):.1f} GiB; gradient norm {step['grad_norm']:.4g}; "
          f"tokens/s: sample {sample:,.0f}, update {update:,.0f}", flush=True)
    return step


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.gpu_smoke", description=__doc__, formatter_class=shape)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    size, cuda = parser.parse_args().size, torch.cuda.is_available()
    if cuda:
        print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}", end=", ")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    given = torch._C._accelerator_getAllocatorSettings()
    assert "expandable_segments:True" in given, f"torch did not get the allocator settings: '{given}'"
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "model", Path(folder) / "run"
        make_model(model, size)
        tokens = "256" if size == "0.5b" else "32"
        flags = [*FLAGS, "--model", str(model), "--max_new_tokens", tokens]
        whole = run("two steps", out, flags)
        shutil.rmtree(max((out / "checkpoints").iterdir()))
        resumed = run("--resume", out, ["--resume"])
        # on a GPU the sampler's tokens need not be the same
        apart = abs(resumed["grad_norm"] / whole["grad_norm"] - 1)
        assert apart < (0.1 if cuda else 1e-3), "the resumed run's second step is another one"
        if size == "tiny" or torch.cuda.device_count() > 1:
            run("two ranks", Path(folder) / "ranks", flags, ranks=2)
    print("PASS")


if __name__ == "__main__":
    main()
