"""Score a model on benchmarks: pass@1 with its standard error, unbiased pass@k, maj@k, length, shares answered and cut off.

    python evaluate.py                                                      # the toy on its own problems
    python evaluate.py --model runs/NAME/final --benchmarks math500,aime24,aime25 --samples 16
    torchrun --nproc-per-node 8 evaluate.py --model Qwen/Qwen2.5-Math-7B --benchmarks math500 --save_generations

Presets are the papers' evaluation settings; a flag given beside one wins over it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Literal

import common

PRESETS = {  # TTRL, EVOL-RL, SCRL and RESTRAIN report avg@16; Dynamic RL adds top-k 20; ETTRL reports greedy pass@1
    "avg16": dict(samples=16, temperature=0.6, top_p=0.95, top_k=0),
    "dynamic_rl": dict(samples=16, temperature=0.6, top_p=0.95, top_k=20),
    "greedy": dict(samples=1, temperature=0.0, top_p=1.0, top_k=0),
    "toy": dict(samples=64, temperature=1.0, top_p=1.0, top_k=0)}  # sampled as it is trained
TOY = dict(benchmarks="toy,toy_test,toy_ood", preset="toy", max_prompt_tokens=128, max_new_tokens=128, sampler="hf")


@dataclass
class Args:
    model: str = ""
    """Hub id or local folder; empty: the built-in toy."""
    benchmarks: str = "math500,aime24"
    """Comma-separated short names (math500 aime24 aime25 amc minerva olympiad gpqa mmlu_stem), Hub ids or files."""
    preset: Literal["avg16", "dynamic_rl", "greedy", "toy"] = "avg16"
    """Sets samples, temperature, top_p and top_k where they are not given."""
    samples: int | None = None
    temperature: float | None = None
    """0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    question_field: str = ""
    """Column of the question; empty: found from a list of usual names."""
    answer_field: str = ""
    """Column of the gold answer; empty: found likewise."""
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 3072
    prompt: Literal["system", "suffix", "plain"] = "system"
    seed: int = 1
    sampler: Literal["auto", "vllm", "hf"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    gpu_memory: float = 0.9
    trust_remote_code: bool = False
    save_generations: bool = False
    """Write every response with its verdict to generations.jsonl."""
    out: str = ""
    """Folder for results.json; empty: runs/evaluate-<time>."""


def main(args: Args) -> dict[str, dict[str, float]]:
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    shared = {k: getattr(args, k) for k in ("model max_prompt_tokens max_new_tokens prompt seed sampler dtype gpu_memory "
                                            "trust_remote_code out question_field answer_field").split()}
    options = common.Args(**shared, eval=args.benchmarks, eval_samples=args.samples, eval_temperature=args.temperature,
                          eval_top_p=args.top_p, eval_top_k=args.top_k)
    try:
        run = common.Run(options, train=False)
    except common.UserError as error:
        raise common.UserError(str(error).replace("--eval_", "--")) from None  # the flags have shorter names here
    if not run.benchmarks:
        raise common.UserError("--benchmarks is empty; name at least one benchmark.")
    results = {}
    for name, problems in run.benchmarks.items():
        graded = run.evaluate_benchmark(name, problems, progress=True)
        results[name] = common.summary([verdicts for verdicts, _ in graded])
        if args.save_generations and run.rank == 0:
            with (run.out / "generations.jsonl").open("a") as file:
                for problem, (verdicts, rollouts) in zip(problems, graded):
                    for rollout, correct in zip(rollouts, verdicts["correct"]):
                        file.write(json.dumps(dict(benchmark=name, problem=problem.question, gold=problem.answer, response=rollout.text,
                                                   answer=rollout.answer, correct=correct, finished=rollout.finished)) + "\n")
    if run.rank == 0:
        print(table(results))
        common.write_atomically(run.out / "results.json", json.dumps(dict(run.describe(), results=results), indent=1))
        print(f"\n{run.out / 'results.json'}")
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    """One row per metric, one column per benchmark; pass@1 as percent with its standard error."""
    metrics = list(dict.fromkeys(k for row in results.values() for k in row if k != "stderr"))
    lines = [f"{'':10}" + "".join(f"{name[-15:]:>16}" for name in results)]
    for metric in metrics:
        cells = []
        for row in results.values():
            value = row.get(metric, math.nan)
            cells.append(f"{100 * value:.1f} ± {100 * row['stderr']:.1f}" if metric == "pass@1"
                         else f"{value:.1f}" if metric == "length" else f"{100 * value:.1f}")
        lines.append(f"{metric:10}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    common.launch(main, Args, TOY)
