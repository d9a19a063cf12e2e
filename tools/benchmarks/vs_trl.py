"""One step of ttrl.py against one of TRL's GRPOTrainer: seconds, sampling and update apart, peak memory.

    python -m tools.benchmarks.vs_trl                      # the toy: 16 prompts x 32 rollouts x 64 tokens
    python -m tools.benchmarks.vs_trl --lengths natural    # responses end by themselves, at most 128 tokens
    python -m tools.benchmarks.vs_trl --trl default        # TRL as it comes
    python -m tools.benchmarks.vs_trl --size 100m          # 2 prompts x 8 rollouts x 64, vocabulary 150k
    python -m tools.benchmarks.vs_trl --model smollm2      # or a folder: 8 prompts x 8 rollouts that end by
                                                           # themselves, at most 40 tokens

The same on both sides: model, prompts, group size, response length (fixed: end-of-sequence never ends a
response), sampling with transformers at temperature 1, float32, one optimizer step (AdamW) per batch, no KL
term. Ours never recomputes activations. TRL does by default, and takes 8 sequences per forward pass; with
--trl tuned it does not, and takes the fastest number of sequences. Every run is a process of its own, ours
and TRL's in turns; the first step of each run is not counted.

sample   generation alone (ours: the sampler's call with decoding and answers; TRL: the call of `generate` and
         its masks)
update   forward, backward and optimizer step (TRL: everything of the step outside of generation and scoring)
CPU      processor seconds of the whole step; on a busy machine, the ratio of these is the one to trust
memory   peak resident memory of the process, and how much of it came on top during an update
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.benchmarks.measure import (Peak, arguments, memory, never_end, random_qwen2, save, steps_of_ttrl,
                                      versions)

ROOT = Path(__file__).resolve().parents[2]
PARTS = "step", "sample", "update", "cpu"
# micro: TRL's fastest number of sequences per forward pass, of prompts x rollouts a divisor
SIZES = {
    "toy": dict(prompts=16, rollouts=32, tokens=64, micro=64, micro_tokens=2048),
    "100m": dict(prompts=2, rollouts=8, tokens=64, micro=16, micro_tokens=2048, hidden=512, layers=8,
                 vocabulary=150_000),
    "model": dict(prompts=8, rollouts=8, tokens=40, micro=16, micro_tokens=16384)}


def prepare(folder: Path, size: dict, seed: int) -> None:
    """What both sides read: model, problems, and the same prompts as text."""
    from transformers import AutoTokenizer

    import common
    from engine.smollm2 import SMOLLM2, problems, smollm2_folder
    model, style, rows = size["model"], SMOLLM2["prompt"], problems()["train"]
    if not model:
        model, style = common.TOY_MODEL, "system"
        rows = map(json.loads, (Path(model) / "train.jsonl").read_text().splitlines())
    elif model == "smollm2":
        model = smollm2_folder()
    lines = [json.dumps(row) for row in itertools.islice(rows, size["prompts"])]
    tokenizer = AutoTokenizer.from_pretrained(model)
    if "hidden" in size:
        model = str(folder / "model")
        random_qwen2(folder / "model", size["vocabulary"], size["hidden"], size["layers"], seed,
                     intermediate_size=size["hidden"] * 11 // 4, num_key_value_heads=2,
                     max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id)
        tokenizer.save_pretrained(model)
    (folder / "problems.jsonl").write_text("\n".join(lines) + "\n")
    prompts = []
    for line in lines:
        ids = common.encode_prompt(tokenizer, json.loads(line)["problem"], style)
        prompts.append(tokenizer.decode(ids))
    job = dict(size, model=model, prompts=prompts, style=style, seed=seed)
    (folder / "job.json").write_text(json.dumps(job))


# ------------------------------------------------ ours ----------------------------------------------------
def ours(folder: Path, steps: int) -> dict:
    """ttrl.py itself."""
    import torch

    import common
    job, peak = json.loads((folder / "job.json").read_text()), Peak()
    common.answers_equal("x+1", "1+x")  # loads math-verify: once in a run, no part of a step

    def prepare_run(run) -> None:
        if job["fixed"]:
            never_end(run.sampler)

    rows = steps_of_ttrl(
        Path(tempfile.mkdtemp(dir=folder)) / "run", prepare_run, peak, model=job["model"], steps=steps,
        dataset=str(folder / "problems.jsonl"), prompts_per_batch=len(job["prompts"]), votes=job["rollouts"],
        train_samples=job["rollouts"], max_prompt_tokens=256, max_new_tokens=job["tokens"],
        prompt=job["style"], micro_tokens=job["micro_tokens"], sampler="hf", seed=job["seed"])
    assert not job["fixed"] or all(row["length"] == job["tokens"] for row in rows)
    return dict(seconds=rows[1:], rise_mib=max(peak.rises[1:]), peak_mib=max(peak.process, memory("VmHWM")),
                sync_share=statistics.mean(row["sync"] / row["step"] for row in rows[1:]),
                sequences=len(job["prompts"]) * job["rollouts"], threads=torch.get_num_threads(),
                versions=versions("torch", "transformers"))


# ------------------------------------------------- TRL ----------------------------------------------------
def trl(folder: Path, steps: int) -> dict:
    """GRPOTrainer, with a clock around its generation and its scoring."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    job, peak, rows = json.loads((folder / "job.json").read_text()), Peak(), []
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

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
            assert not job["fixed"] or rows[-1]["length"] == job["tokens"]
            return result

        def _generate_and_score_completions(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_and_score_completions(*args, **kwargs)
            rows[-1]["outside"] += time.perf_counter() - start
            peak.start()
            return result

    def reward(completion_ids, **kwargs):  # a cheap one: the majority vote is inside our step's seconds alone
        return [float(sum(ids) % 2) for ids in completion_ids]

    sequences = len(job["prompts"]) * job["rollouts"]
    config = GRPOConfig(
        output_dir=str(folder / "output"), max_steps=steps, per_device_train_batch_size=job["micro"],
        gradient_accumulation_steps=sequences // job["micro"], num_generations=job["rollouts"],
        max_completion_length=job["tokens"], temperature=1.0, top_p=1.0, top_k=0,
        generation_kwargs=dict(min_new_tokens=job["tokens"]) if job["fixed"] else None,
        beta=0.0, num_iterations=1, loss_type="grpo", learning_rate=1e-5, max_grad_norm=1.0,
        weight_decay=0.01, optim="adamw_torch", bf16=False, use_cpu=True, seed=job["seed"],
        gradient_checkpointing=not job["tuned"], report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, dataloader_pin_memory=False)
    trainer = Timed(model=job["model"], reward_funcs=reward, args=config, callbacks=[Clock()],
                    train_dataset=Dataset.from_dict(dict(prompt=job["prompts"])),
                    processing_class=AutoTokenizer.from_pretrained(job["model"]))
    trainer.train()
    return dict(seconds=rows[1:], rise_mib=max(peak.rises[1:]), peak_mib=max(peak.process, memory("VmHWM")),
                sequences=sequences, threads=torch.get_num_threads(),
                versions=versions("torch", "transformers", "trl", "accelerate"))


# ------------------------------------------------- both ---------------------------------------------------
def child(python: str, side: str, folder: Path, steps: int, threads: int) -> dict:
    """One run of a side, in a process of its own; its figures."""
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), PYTHONPATH=str(ROOT),
               CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    command = [python, "-m", "tools.benchmarks.vs_trl", "--side", side, "--folder", str(folder),
               "--steps", str(steps)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads((folder / "result.json").read_text())


def medians(runs: list[dict]) -> dict[str, float]:
    """Of every part, over all steps of these runs."""
    steps = [row for run in runs for row in run["seconds"]]
    found = {}
    for part in PARTS:
        found[part] = statistics.median(row[part] for row in steps)
    return found


def measure(args, size: dict, python: dict[str, str]) -> dict[str, list[dict]]:
    """All runs of both sides, in turns."""
    runs: dict[str, list[dict]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), size, args.seed)
        print(f"{args.size}: {size}\n{'':6}{'step s':>9}{'sample s':>9}{'update s':>9}{'CPU s':>9}"
              f"{'tokens':>9}{'peak MiB':>11}  rise in an update (medians of a run)")
        for _ in range(args.runs):
            for side in runs:
                run = child(python[side], side, Path(folder), args.steps, args.threads)
                runs[side].append(run)
                figures = "".join(f"{value:9.3f}" for value in medians([run]).values())
                length = statistics.mean(row["length"] for row in run["seconds"])
                print(f"{side:6}{figures}{length:9.1f}{run['peak_mib']:11.0f}{run['rise_mib']:10.0f}",
                      flush=True)
    return runs


def compare(runs: dict[str, list[dict]]) -> dict:
    """Ratios of medians; of processor time also pair by pair of runs."""
    best = {side: medians(runs[side]) for side in runs}
    pairs = []
    for a, b in zip(runs["ours"], runs["trl"]):
        pairs.append(medians([b])["cpu"] / medians([a])["cpu"])
    share = {}
    for key in ("rise_mib", "peak_mib"):
        ours = statistics.median(run[key] for run in runs["ours"])
        share[key] = ours / statistics.median(run[key] for run in runs["trl"])
    ratios = {part: best["trl"][part] / best["ours"][part] for part in PARTS}
    return dict(median_seconds=best, trl_over_ours=ratios, cpu_ratio_pairs=pairs, ours_over_trl_memory=share)


def main() -> None:
    parser = arguments("vs_trl", __doc__)
    parser.add_argument("--size", choices=[*SIZES][:2], default="toy")
    parser.add_argument("--model", default="", help="instead of --size: a model's folder, or smollm2")
    parser.add_argument("--lengths", choices=["fixed", "natural"], default="fixed",
                        help="whether end-of-sequence ends a response")
    parser.add_argument("--trl", choices=["tuned", "default"], default="tuned",
                        help="TRL's micro-batch and activation checkpointing")
    parser.add_argument("--trl_python", default=".venv-trl/bin/python", help="of the environment with TRL")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run, the first is not counted")
    parser.add_argument("--micro", type=int, default=0, help="TRL's sequences per forward pass; 0: --size's")
    parser.add_argument("--tokens", type=int, default=0, help="of a response (natural: at most); 0: --size's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="", help="also write the result to this .json file")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        result = (ours if args.side == "ours" else trl)(args.folder, args.steps)
        (args.folder / "result.json").write_text(json.dumps(result))
        return
    if not Path(args.trl_python).exists():
        parser.error(f"--trl_python is '{args.trl_python}', which does not exist; make it with: python3 -m "
                     "venv .venv-trl && .venv-trl/bin/pip install -r tools/benchmarks/requirements.txt")
    if args.model:
        args.size, args.lengths = "model", "natural"
    python = {"ours": sys.executable, "trl": str(Path(args.trl_python).absolute())}
    size = dict(SIZES[args.size], model=args.model, fixed=args.lengths == "fixed", tuned=args.trl == "tuned")
    size["micro"] = args.micro or (size["micro"] if size["tuned"] else 8)
    if args.size == "toy" and not size["fixed"]:
        size["tokens"] = 128
    size["tokens"] = args.tokens or size["tokens"]
    runs = measure(args, size, python)
    result = compare(runs)
    ratios, pairs, share = result["trl_over_ours"], result["cpu_ratio_pairs"], result["ours_over_trl_memory"]
    print("TRL's seconds / ours: " + ", ".join(f"{part} {ratio:.2f}" for part, ratio in ratios.items()) +
          f"; CPU by pairs of runs {min(pairs):.2f} to {max(pairs):.2f}")
    print(f"our memory / TRL's: rise in an update {share['rise_mib']:.2f}, "
          f"whole process {share['peak_mib']:.2f}")
    print(f"sync of weights: {statistics.mean(run['sync_share'] for run in runs['ours']):.2%} of our step")
    save(args.out, result | size | dict(size=args.size, runs=runs, threads=args.threads, seed=args.seed))


if __name__ == "__main__":
    main()
