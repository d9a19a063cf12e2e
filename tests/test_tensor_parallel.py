"""--tensor_parallel: consecutive ranks share a vLLM engine. Real engines of the CPU build, real torchrun."""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, read_lines, untimed
from test_ranks import ENVIRONMENT, python

import common
import ttrl
from engine import base, ranks
from engine.log import read_metrics
from engine.options import make_args

FLAGS = dict(dataset="toy", sampler="vllm", steps=2, votes=4, train_samples=4, prompts_per_batch=4,
             num_minibatches=2, max_prompt_tokens=128, max_new_tokens=64, lr=3e-3, entropy_coef=1.0,
             eval_samples=2, eval_every=0, checkpoint_every=0)


def run(folder, model, ranks, parallel) -> list[dict]:
    """A run of two steps, with evaluations of five problems, which no number of engines here divides."""
    problems = folder / "five.jsonl"
    problems.write_text("\n".join((ROOT / "toy/test.jsonl").read_text().splitlines()[:5]) + "\n")
    out = folder / f"{ranks}-{parallel}"
    flags = FLAGS | dict(model=model, tensor_parallel=parallel, out=out, eval=problems)
    command = [*python(ranks), "ttrl.py", *(f"--{name}={value}" for name, value in flags.items())]
    environment = ENVIRONMENT | dict(VLLM_CPU_KVCACHE_SPACE="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return read_metrics(out)


def texts(out) -> list[list[str]]:
    found = []
    for record in read_lines(out / "samples.jsonl"):
        found.append([response["text"] for response in record["responses"]])
    return found


@pytest.mark.slow
def test_the_same_run_with_shared_engines(tmp_path, llama):
    """An engine of one rank, and two of two ranks each, run the current policy and sample the same tokens,
    before and after updates. (Two engines of one rank: test_vllm_on_two_nodes.)"""
    runs = {setup: run(tmp_path, llama, *setup) for setup in [(1, 1), (4, 2)]}
    for lines in runs.values():
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert max(line["logp_diff_max"] for line in lines[1:]) < 1e-4
        assert lines[-1]["grad_norm"] > 1e-3 and lines[-1]["kl"] > 1e-3
    for expected, line in zip(untimed(runs[1, 1]), untimed(runs[4, 2]), strict=True):
        for name in expected.keys() - {"clip_fraction", "logp_diff_max", "logp_diff_mean"}:
            assert line[name] == pytest.approx(expected[name], abs=1e-4, rel=1e-3), name
    assert texts(tmp_path / "4-2") == texts(tmp_path / "1-1")


@pytest.mark.parametrize("per_engine", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_shares_of_engines(count, per_engine, monkeypatch):
    """Four ranks, here threads: every item once and in order, on all; ranks of an engine share theirs."""
    barrier, this, parts, shares = threading.Barrier(4, timeout=60), threading.local(), [None] * 4, [None] * 4

    def gather(part):
        parts[this.rank] = part
        barrier.wait()
        return parts

    def on_rank(rank):
        this.rank = rank
        shares[rank] = ranks.share_of_rank(list(range(count)), per_engine)
        return ranks.gather_shares([(item, rank) for item in shares[rank]], per_engine)

    monkeypatch.setattr(ranks, "rank_and_ranks", lambda: (this.rank, 4))
    monkeypatch.setattr(ranks, "all_gather", gather)
    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(on_rank, range(4)):
            assert [item for item, _ in results] == list(range(count))
            assert all(rank % per_engine == 0 for _, rank in results)
    assert all(shares[i] == shares[i // per_engine * per_engine] for i in range(4))


@pytest.mark.parametrize("engines, prompts, n, expected", [
    (4, 2, 6, [[3], [3], [3], [3]]), (3, 2, 7, [[2, 2], [2, 2], [3, 3]]), (8, 3, 2, [[1]] * 6 + [[]] * 2),
    (2, 3, 6, [[6, 6], [6]]), (1, 2, 6, [[6, 6]])])
def test_more_engines_than_prompts_share_these(engines, prompts, n, expected):
    """Samples of each piece of an engine. Sample i of a prompt draws from its seed + i, whoever makes it."""
    work = [(prompt, base.Request([prompt], n, 100 * prompt, 9)) for prompt in range(prompts)]
    pieces, parts = ranks.split_requests(work, n, engines)
    shares = [pieces[engine::engines] for engine in range(engines)]
    for share, sizes in zip(shares, expected, strict=True):
        assert [request.n for _, request in share] == sizes
    for prompt in range(prompts):
        own = pieces[prompt * parts:(prompt + 1) * parts]
        seeds = [request.seed + i for _, request in own for i in range(request.n)]
        assert seeds == [100 * prompt + i for i in range(n)]
        assert {(name, *request.prompt_ids, request.max_new_tokens) for name, request in own} == {
            (prompt, prompt, 9)}


@pytest.mark.parametrize("ranks, values, sentence", [
    (8, dict(tensor_parallel=3), "--tensor_parallel is 3, but must divide the number of ranks, 8."),
    (2, dict(tensor_parallel=2, sampler="hf"),
     "--tensor_parallel is 2, but only vLLM splits a model among ranks; give --sampler vllm."),
])
def test_bad_values_are_one_sentence(monkeypatch, ranks, values, sentence):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert make_args(ttrl.Args, {"sampler": "vllm", **values}).errors() == [sentence]


def test_a_model_that_does_not_split_is_refused(tmp_path, monkeypatch):
    """The toy has 3 heads."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = make_args(
        ttrl.Args, common.TOY | dict(sampler="vllm", tensor_parallel=2, out=str(tmp_path / "run")))
    with pytest.raises(base.UserError, match="--tensor_parallel is 2, but must divide the attention heads"):
        common.start(args)
    assert not (tmp_path / "run").exists()
