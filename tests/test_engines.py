"""--tensor_parallel: ranks share an engine of vLLM, here real engines of its CPU build."""

import subprocess

import pytest
from conftest import ROOT, read_lines, untimed
from test_ranks import ENVIRONMENT, python

from engine.base import Request
from engine.ranks import split_requests
from engine.run_folder import read_metrics

SHARED = dict(dataset="toy", sampler="vllm", steps=2, votes=4, train_samples=4, prompts_per_batch=4,
              num_minibatches=2, max_prompt_tokens=128, max_new_tokens=64, lr=3e-3, entropy_coef=1.0,
              eval_samples=2, eval_every=0, checkpoint_every=0)


def shared(folder, model, ranks, parallel) -> list[dict]:
    """A run of two steps, with evaluations of five problems, which no number of engines here divides."""
    problems = folder / "five.jsonl"
    problems.write_text("\n".join((ROOT / "toy/test.jsonl").read_text().splitlines()[:5]) + "\n")
    out = folder / f"{ranks}-{parallel}"
    flags = SHARED | dict(model=model, tensor_parallel=parallel, out=out, eval=problems)
    command = [*python(ranks), "ttrl.py", *(f"--{name}={value}" for name, value in flags.items())]
    environment = ENVIRONMENT | dict(VLLM_CPU_KVCACHE_SPACE="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return read_metrics(out)


def texts(out) -> list[list[str]]:
    texts_of_prompts = []
    for record in read_lines(out / "samples.jsonl"):
        texts_of_prompts.append([response["text"] for response in record["responses"]])
    return texts_of_prompts


@pytest.mark.slow
def test_the_same_run_with_shared_engines(tmp_path, llama):
    """An engine of one rank, one of two ranks, and two of two ranks each run the current policy and sample
    the same tokens, before and after updates. The third run finds what the second left on the machine."""
    runs = {setup: shared(tmp_path, llama, *setup) for setup in [(1, 1), (2, 2), (4, 2)]}
    for lines in runs.values():
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert max(line["logp_diff_max"] for line in lines[1:]) < 1e-4
        assert lines[-1]["grad_norm"] > 1e-3 and lines[-1]["kl"] > 1e-3
    for ranks, parallel in [(2, 2), (4, 2)]:
        for expected, line in zip(untimed(runs[1, 1]), untimed(runs[ranks, parallel]), strict=True):
            for name in expected.keys() - {"clip_fraction", "logp_diff_max", "logp_diff_mean"}:
                assert line[name] == pytest.approx(expected[name], abs=1e-4, rel=1e-3), name
        assert texts(tmp_path / f"{ranks}-{parallel}") == texts(tmp_path / "1-1")


@pytest.mark.parametrize("engines, prompts, n, expected", [
    (4, 2, 6, [[3], [3], [3], [3]]), (3, 2, 7, [[2, 2], [2, 2], [3, 3]]), (8, 3, 2, [[1]] * 6 + [[]] * 2),
    (2, 3, 6, [[6, 6], [6]]), (1, 2, 6, [[6, 6]])])
def test_more_engines_than_prompts_share_these(engines, prompts, n, expected):
    """Samples of each piece of an engine. Sample i of a prompt draws from its seed + i, whoever makes it."""
    work = [(prompt, Request([prompt], n, 100 * prompt, 9)) for prompt in range(prompts)]
    pieces, parts = split_requests(work, n, engines)
    for engine, sizes in enumerate(expected):
        assert [request.n for _, request in pieces[engine::engines]] == sizes
    for prompt in range(prompts):
        own = [request for _, request in pieces[prompt * parts:(prompt + 1) * parts]]
        seeds = [request.seed + i for request in own for i in range(request.n)]
        assert seeds == [100 * prompt + i for i in range(n)]
