"""One step of ttrl.py against one of TRL's GRPOTrainer: seconds, sampling and update apart, peak memory.

    python -m tools.benchmarks.vs_trl                      # the toy: 16 prompts x 32 responses
    python -m tools.benchmarks.vs_trl --trl default        # TRL as it comes
    python -m tools.benchmarks.vs_trl --model smollm2      # or a folder: 8 prompts x 8 responses

The same on both sides: model, prompts, group size, sampling with transformers at temperature 1 until the
response ends, float32, one optimizer step (AdamW) per batch, no KL term. Ours never recomputes activations.
TRL does by default, and takes 8 sequences per forward pass; with --trl tuned it does not, and takes the
fastest number of sequences. Every run is a process of its own, ours and TRL's in turns; the first step of
each run is not counted.

sample   generation alone (ours: the sampler's call with decoding and answers; TRL: the call of `generate`)
update   forward, backward and optimizer step (TRL: the step without generation and scoring)
CPU      processor seconds of the whole step; on a busy machine, the ratio of these is the one to trust
memory   how much resident memory comes on top during an update
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PARTS = "step", "sample", "update", "cpu"
# micro: TRL's fastest number of sequences per forward pass, a divisor of prompts x responses
SIZES = {"toy": dict(prompts=16, responses=32, tokens=128, micro=64, micro_tokens=8192),
         "model": dict(prompts=8, responses=8, tokens=40, micro=16, micro_tokens=4096)}


def memory(field: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}")


class Peak:
    """How far the resident memory rises between start and stop, in MiB, each time."""

    def __init__(self):
        self.rises: list[float] = []

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.before = memory("VmRSS")

    def stop(self) -> None:
        self.rises.append(memory("VmHWM") - self.before)


def prepare(folder: Path, model: str, size: dict, seed: int, tuned: bool) -> None:
    """Write job.json, what both sides read: the model, the sizes, and the prompts as text."""
    from transformers import AutoTokenizer

    import common
    from engine.smollm2 import SMOLLM2, smollm2_folder
    from toy.make_smollm2 import problems
    style, rows = SMOLLM2["prompt"], problems()["train"]
    if not model:
        model, style = common.TOY_MODEL, "system"
        rows = map(json.loads, (Path(model) / "train.jsonl").read_text().splitlines())
    model = smollm2_folder() if model == "smollm2" else model
    rows = list(rows)[:size["prompts"]]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = [common.encode_prompt(tokenizer, row["problem"], style) for row in rows]
    texts = [tokenizer.decode(ids) for ids in encoded]
    job = size | dict(model=model, texts=texts, style=style, seed=seed, tuned=tuned)
    (folder / "job.json").write_text(json.dumps(job))


# ------------------------------------------------ ours ----------------------------------------------------
def ours(folder: Path, job: dict, steps: int) -> tuple[list[dict], Peak]:
    """ttrl.py itself: the seconds of each step's parts, and the memory of its updates."""
    import common
    import ttrl
    from engine.answers import answers_equal
    peak, clock, last, run_class = Peak(), [], [None], common.Run
    phase, start, end_step = run_class.phase, run_class.start, run_class.end_step

    def timed_start(run, *rest) -> None:
        start(run, *rest)
        clock.append(time.process_time())

    def watched_phase(run, name: str | None) -> None:
        if last[0] == "update":
            peak.stop()
        phase(run, name)
        if name == "update":
            peak.start()
        last[0] = name

    def timed_end_step(run, *extra) -> None:
        end_step(run, *extra)
        clock.append(time.process_time())

    answers_equal("x+1", "1+x")  # loads math-verify: once in a run, no part of a step
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    args = ttrl.Args(
        model=job["model"], dataset=str(folder / "problems.jsonl"), prompt=job["style"], sampler="hf",
        steps=steps, prompts_per_batch=job["prompts"], votes=job["responses"], train_samples=job["responses"],
        max_prompt_tokens=256, max_new_tokens=job["tokens"], micro_tokens=job["micro_tokens"], eval="",
        checkpoint_every=0, kl_coef=0.0, num_minibatches=1, lr=1e-5, seed=job["seed"], out=str(out))
    watched = dict(start=timed_start, phase=watched_phase, end_step=timed_end_step)
    with contextlib.redirect_stdout(sys.stderr), mock.patch.multiple(run_class, **watched):
        ttrl.main(args)
    rows = []
    for i, text in enumerate((out / "metrics.jsonl").read_text().splitlines()):
        line = json.loads(text)
        row = {name: line[f"seconds/{name}"] for name in ("step", "sample", "update")}
        rows.append(row | dict(cpu=clock[i + 1] - clock[i], length=line["length"]))
    return rows, peak


# ------------------------------------------------- TRL ----------------------------------------------------
def trl(folder: Path, job: dict, steps: int) -> tuple[list[dict], Peak]:
    """GRPOTrainer, with a clock around its generation and its scoring: as ours."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    peak, rows = Peak(), []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            rows.append(dict(sample=0.0, outside=0.0, start=time.perf_counter(), cpu=time.process_time()))

        def on_step_end(self, *args, **kwargs):
            peak.stop()
            row = rows[-1]
            row["step"] = time.perf_counter() - row.pop("start")
            row["cpu"] = time.process_time() - row["cpu"]
            row["update"] = row["step"] - row.pop("outside")

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            rows[-1]["sample"] += time.perf_counter() - start
            rows[-1]["length"] = statistics.mean(map(len, result[0]))
            return result

        def _generate_and_score_completions(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_and_score_completions(*args, **kwargs)
            rows[-1]["outside"] += time.perf_counter() - start
            peak.start()
            return result

    def reward(completion_ids, **kwargs):  # a cheap one: the majority vote is in our step's seconds alone
        return [float(sum(ids) % 2) for ids in completion_ids]

    micro = job["micro"] if job["tuned"] else 8
    config = GRPOConfig(
        output_dir=str(folder / "output"), max_steps=steps, per_device_train_batch_size=micro,
        gradient_accumulation_steps=job["prompts"] * job["responses"] // micro,
        num_generations=job["responses"], max_completion_length=job["tokens"], temperature=1.0, top_p=1.0,
        top_k=0, beta=0.0, num_iterations=1, loss_type="grpo", learning_rate=1e-5, max_grad_norm=1.0,
        weight_decay=0.01, optim="adamw_torch", bf16=False, use_cpu=True, seed=job["seed"],
        gradient_checkpointing=not job["tuned"], report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, dataloader_pin_memory=False)
    trainer = Timed(model=job["model"], reward_funcs=reward, args=config, callbacks=[Clock()],
                    train_dataset=Dataset.from_dict(dict(prompt=job["texts"])),
                    processing_class=AutoTokenizer.from_pretrained(job["model"]))
    trainer.train()
    return rows, peak


# ------------------------------------------------- both ---------------------------------------------------
def one_side(side: str, folder: Path, steps: int) -> None:
    """In a process of its own: run a side and write its figures to result.json."""
    import torch
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    job = json.loads((folder / "job.json").read_text())
    rows, peak = (ours if side == "ours" else trl)(folder, job, steps)
    found = dict(memory=max(peak.rises[1:]))
    for name in (*PARTS, "length"):
        found[name] = statistics.median(row[name] for row in rows[1:])
    packages = ["torch", "transformers"] + ["trl"] * (side == "trl")
    found["versions"] = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    (folder / "result.json").write_text(json.dumps(found))


def child(python: str, side: str, folder: Path, args) -> dict:
    """The figures of one run of a side: medians over its steps."""
    env = os.environ | dict(OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads),
                            PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false",
                            HF_HUB_OFFLINE="1")
    command = [python, "-m", "tools.benchmarks.vs_trl", "--side", side, "--folder", str(folder),
               "--steps", str(args.steps)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads((folder / "result.json").read_text())
    print(f"{side:6}" + "".join(f"{found[name]:10.3f}" for name in (*PARTS, "length", "memory")), flush=True)
    return found


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.benchmarks.vs_trl", description=__doc__,
                                     formatter_class=shape)
    parser.add_argument("--model", default="", help="a model's folder, or smollm2; empty: the toy")
    parser.add_argument("--trl", choices=["tuned", "default"], default="tuned",
                        help="TRL's micro-batch and activation checkpointing")
    parser.add_argument("--trl_python", default=".venv-trl/bin/python", help="of the environment with TRL")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run; the first is not counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        one_side(args.side, args.folder, args.steps)
        return
    if not Path(args.trl_python).exists():
        parser.error(f"--trl_python is '{args.trl_python}', which does not exist; make it with: python3 -m "
                     "venv .venv-trl && .venv-trl/bin/pip install -r tools/benchmarks/requirements.txt")
    python = {"ours": sys.executable, "trl": str(Path(args.trl_python).absolute())}
    runs: dict[str, list[dict]] = {side: [] for side in python}
    size = SIZES["model" if args.model else "toy"]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), args.model, size, args.seed, args.trl == "tuned")
        print(f"{'':6}{'step s':>10}{'sample s':>10}{'update s':>10}{'CPU s':>10}{'tokens':>10}{'MiB':>10}")
        for _, side in itertools.product(range(args.runs), python):
            runs[side].append(child(python[side], side, Path(folder), args))
    print(f"ours: {runs['ours'][0]['versions']}; TRL's: {runs['trl'][0]['versions']}")
    print("TRL's / ours: the median pair of runs, and the range")
    for name in (*PARTS, "memory"):
        ratios = sorted(b[name] / a[name] for a, b in zip(runs["ours"], runs["trl"]))
        print(f"{name:6} {statistics.median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
