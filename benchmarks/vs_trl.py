"""One step of ttrl.py against one step of TRL's GRPOTrainer: seconds, sampling and update apart, and peak memory.

    python benchmarks/vs_trl.py                                      # the toy: 16 prompts x 32 rollouts x 64 tokens
    python benchmarks/vs_trl.py --lengths natural                    # responses end where the model ends them, 128 tokens at most
    python benchmarks/vs_trl.py --trl default                        # TRL as it comes: checkpointing, 8 sequences per forward
    python benchmarks/vs_trl.py --size 100m --out vs_trl_100m.json   # 2 prompts x 8 rollouts x 64 tokens, vocabulary 150k

The same on both sides: model, prompts, group size, response length (fixed: end-of-sequence never ends a response), sampling with
transformers at temperature 1, float32, one optimizer step (AdamW) per batch, no KL term. Ours never recomputes activations. TRL does by
default; with --trl tuned it does not, and takes the fastest number of sequences per forward.
Every run is a process of its own, ours and TRL's in turns; the first step of each run is not counted.

sample   generation alone (ours: the sampler's call with decoding and answers; TRL: the call of `generate` and its masks)
update   forward, backward and optimizer step (TRL: everything of the step outside of generation and scoring)
CPU      processor seconds of the whole step; on a machine that does other work, too, the ratio of these is the one to trust
memory   peak resident memory of the process, and how much of it came on top during an update
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = "step", "sample", "update", "cpu"
SIZES = {  # micro: TRL's sequences per forward pass, its fastest (it wants a divisor of prompts x rollouts); micro_tokens: ours
    "toy": dict(prompts=16, rollouts=32, tokens=64, micro=64, micro_tokens=2048),
    "100m": dict(prompts=2, rollouts=8, tokens=64, micro=16, micro_tokens=2048, hidden=512, layers=8, vocabulary=150_000)}


def memory(field: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process in MiB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


class Peak:
    """How far the resident memory rises between start and stop; the process's own peak is kept, too."""

    def __init__(self):
        self.process, self.rises = 0.0, []

    def start(self):
        self.process = max(self.process, memory("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.before = memory("VmRSS")

    def stop(self):
        self.process = max(self.process, memory("VmHWM"))
        self.rises.append(memory("VmHWM") - self.before)


def prepare(folder: Path, size: dict, seed: int) -> None:
    """What both sides read: model, problems, and the same prompts as text."""
    sys.path.insert(0, str(ROOT))
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    import common
    model, tokenizer = str(common.TOY), AutoTokenizer.from_pretrained(common.TOY)
    if "hidden" in size:
        model, hidden = str(folder / "model"), size["hidden"]
        torch.manual_seed(seed)
        config = Qwen2Config(vocab_size=size["vocabulary"], hidden_size=hidden, intermediate_size=hidden * 11 // 4,
                             num_hidden_layers=size["layers"], num_attention_heads=hidden // 64, num_key_value_heads=2,
                             max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id)
        Qwen2ForCausalLM(config).save_pretrained(model)
        tokenizer.save_pretrained(model)
    lines = [json.loads(line) for line in (common.TOY / "train.jsonl").read_text().splitlines()][:size["prompts"]]
    (folder / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = [tokenizer.decode(common.encode_prompt(tokenizer, line["problem"], "system")) for line in lines]
    (folder / "job.json").write_text(json.dumps(dict(size, model=model, prompts=prompts, seed=seed)))


# ------------------------------------------------------ ours --------------------------------------------------------
def ours(folder: Path, steps: int) -> dict:
    """ttrl.py itself; its metrics.jsonl has the seconds."""
    sys.path.insert(0, str(ROOT))
    import contextlib

    import torch

    import common
    import ttrl
    job, peak = json.loads((folder / "job.json").read_text()), Peak()

    class FixedLength(common.HFSampler):
        def __init__(self, *args):
            super().__init__(*args)
            self.stop_ids = self.stop_ids[:0]

    timer, end_step, clock = common.Run.timer, common.Run.end_step, [time.process_time()]

    def timed_end_step(run, *args):
        end_step(run, *args)
        clock.append(time.process_time())

    @contextlib.contextmanager
    def measured(run, phase):
        if phase == "update":
            peak.start()
        with timer(run, phase):
            yield
        if phase == "update":
            peak.stop()

    common.Run.timer, common.Run.end_step = measured, timed_end_step
    if job["fixed"]:
        common.HFSampler = FixedLength
    out = tempfile.mkdtemp(dir=folder)
    rows = len(job["prompts"]) * job["rollouts"]
    common.answers_equal("x+1", "1+x")  # loads math-verify: once in a run, no part of a step
    with contextlib.redirect_stdout(sys.stderr):
        ttrl.main(ttrl.Args(
            model=job["model"], dataset=str(folder / "problems.jsonl"), eval="", steps=steps, prompts_per_batch=len(job["prompts"]),
            votes=job["rollouts"], train_samples=job["rollouts"], max_prompt_tokens=128, max_new_tokens=job["tokens"],
            micro_tokens=job["micro_tokens"], lr=1e-5, updates_per_batch=1, kl_coef=0.0, sampler="hf", checkpoint_every=0,
            seed=job["seed"], out=out + "/run"))
    lines = [json.loads(line) for line in (Path(out) / "run/metrics.jsonl").read_text().splitlines()]
    assert not job["fixed"] or all(line["length"] == job["tokens"] for line in lines)
    seconds = [dict(step=line["seconds/step"], sample=line["seconds/sample"], update=line["seconds/update"], cpu=after - before,
                    length=line["length"]) for line, before, after in zip(lines, clock, clock[1:])]
    return dict(seconds=seconds[1:], rise_mib=max(peak.rises[1:]), peak_mib=max(peak.process, memory("VmHWM")),
                sync_share=sum(line.get("seconds/sync", 0) / line["seconds/step"] for line in lines[1:]) / (len(lines) - 1),
                sequences=rows, threads=torch.get_num_threads(), versions=versions("torch", "transformers"))


# ------------------------------------------------------ TRL ---------------------------------------------------------
def trl(folder: Path, steps: int) -> dict:
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
            row["step"], row["cpu"] = time.perf_counter() - row.pop("start"), time.process_time() - row["cpu"]
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

    def reward(completion_ids, **kwargs):  # any cheap one: the majority vote is ours alone, and inside our step's seconds
        return [float(sum(ids) % 2) for ids in completion_ids]

    sequences = len(job["prompts"]) * job["rollouts"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=job["micro"],
        gradient_accumulation_steps=sequences // job["micro"], num_generations=job["rollouts"], max_completion_length=job["tokens"],
        generation_kwargs=dict(min_new_tokens=job["tokens"]) if job["fixed"] else None, temperature=1.0, top_p=1.0, top_k=0,
        beta=0.0, num_iterations=1, loss_type="grpo", learning_rate=1e-5, max_grad_norm=1.0, weight_decay=0.01, optim="adamw_torch",
        bf16=False, use_cpu=True, gradient_checkpointing=not job["tuned"], report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, seed=job["seed"], dataloader_pin_memory=False)
    trainer = Timed(model=job["model"], reward_funcs=reward, args=config, callbacks=[Clock()],
                    train_dataset=Dataset.from_dict(dict(prompt=job["prompts"])),
                    processing_class=AutoTokenizer.from_pretrained(job["model"]))
    trainer.train()
    return dict(seconds=rows[1:], rise_mib=max(peak.rises[1:]), peak_mib=max(peak.process, memory("VmHWM")),
                sequences=sequences, threads=torch.get_num_threads(), versions=versions("torch", "transformers", "trl", "accelerate"))


# ------------------------------------------------------ both --------------------------------------------------------
def versions(*names: str) -> dict:
    return {name: metadata.version(name) for name in names}


def cpu_name() -> str:
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def child(python: str, side: str, folder: Path, steps: int, threads: int) -> dict:
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false",
               CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    result = folder / "result.json"
    done = subprocess.run([python, __file__, "--side", side, "--folder", folder, "--steps", str(steps)], env=env, cwd=folder,
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--lengths", choices=["fixed", "natural"], default="fixed", help="whether end-of-sequence ends a response")
    parser.add_argument("--trl", choices=["tuned", "default"], default="tuned", help="TRL's micro-batch and activation checkpointing")
    parser.add_argument("--trl_python", default=".venv-trl/bin/python", help="python of the environment that has TRL")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run, the first is not counted")
    parser.add_argument("--micro", type=int, default=0, help="TRL's sequences per forward pass, if not the default")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of a response (natural lengths: at most), if not the default")
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
        sys.exit(f"--trl_python is '{args.trl_python}', which does not exist; make it with: python3 -m venv .venv-trl && "
                 ".venv-trl/bin/pip install -r benchmarks/requirements.txt")
    python = {"ours": sys.executable, "trl": str(Path(args.trl_python).absolute())}
    size = dict(SIZES[args.size], fixed=args.lengths == "fixed", tuned=args.trl == "tuned")
    size["micro"] = args.micro or (size["micro"] if size["tuned"] else 8)
    if args.size == "toy" and not size["fixed"]:
        size["tokens"] = 128
    size["tokens"] = args.tokens or size["tokens"]
    runs: dict[str, list[dict]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), size, args.seed)
        print(f"{args.size}: {size}\n{'':6}{'step s':>9}{'sample s':>9}{'update s':>9}{'CPU s':>9}{'tokens':>9}{'peak MiB':>11}"
              "  rise in an update (medians of a run)")
        for _ in range(args.runs):
            for side in runs:
                run = child(python[side], side, Path(folder), args.steps, args.threads)
                runs[side].append(run)
                middle = {k: statistics.median(row[k] for row in run["seconds"]) for k in PARTS}
                length = statistics.mean(row["length"] for row in run["seconds"])
                print(f"{side:6}" + "".join(f"{v:9.3f}" for v in middle.values()) +
                      f"{length:9.1f}{run['peak_mib']:11.0f}{run['rise_mib']:10.0f}", flush=True)
    best = {side: {k: statistics.median(row[k] for run in runs[side] for row in run["seconds"]) for k in PARTS}
            for side in runs}
    ratios = {k: best["trl"][k] / best["ours"][k] for k in best["ours"]}
    pairs = [statistics.median(r["cpu"] for r in b["seconds"]) / statistics.median(r["cpu"] for r in a["seconds"])
             for a, b in zip(runs["ours"], runs["trl"])]
    share = {k: statistics.median(r[k] for r in runs["ours"]) / statistics.median(r[k] for r in runs["trl"])
             for k in ("rise_mib", "peak_mib")}
    print("TRL's seconds / ours: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()) +
          f"; CPU by pairs of runs {min(pairs):.2f} to {max(pairs):.2f}")
    print(f"our memory / TRL's: rise in an update {share['rise_mib']:.2f}, whole process {share['peak_mib']:.2f}")
    print(f"sync of weights: {statistics.mean(r['sync_share'] for r in runs['ours']):.2%} of our step")
    if args.out:
        result = dict(size=args.size, **size, runs=runs, median_seconds=best, trl_over_ours=ratios, cpu_ratio_pairs=pairs,
                      ours_over_trl_memory=share, threads=args.threads, seed=args.seed, hardware=cpu_name(),
                      python=platform.python_version(), date=time.strftime("%Y-%m-%d"))
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
