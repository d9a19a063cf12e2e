"""The toy: what its page and the demo promise, on the files as they are shipped."""

import json
import subprocess

import pytest
from conftest import ROOT, run_toy, toy_of
from safetensors.torch import load_file

import evaluate
import ttrl
from engine.metrics import mean


def evaluated(folder, **settings) -> list[dict]:
    """The base model's results on the training and on the test problems."""
    args = evaluate.Args(benchmarks="toy,toy_test", preset="toy", out=str(folder), **settings)
    results = evaluate.main(args)
    return [results["toy"], results["toy_test"]]


def test_there_is_one_toy_and_it_is_small():
    files = subprocess.run(["git", "ls-files", "*.safetensors"], cwd=ROOT, capture_output=True, text=True)
    assert files.stdout.split() == ["toy/model.safetensors"]
    assert sum(tensor.numel() for tensor in load_file(ROOT / "toy/model.safetensors").values()) <= 500_000


def test_the_start_is_nearly_always_wrong_greedily(tmp_path):
    for row in evaluated(tmp_path, temperature=0.0):
        assert row["pass@1"] < 0.15


@pytest.mark.slow
def test_the_start_holds_what_its_greedy_answers_do_not_show(tmp_path):
    for row in evaluated(tmp_path):
        assert 0.4 < row["maj@32"] < 0.75 and row["pass@64"] > 0.95


@pytest.mark.slow
def test_the_demo_learns_to_work_problems_out(tmp_path):
    """TTRL at least triples greedy accuracy on problems that it does not train on; responses grow longer."""
    start, *steps, end = run_toy(ttrl, tmp_path / "run", **toy_of(ttrl) | dict(eval="toy_test", eval_every=0))
    assert end["eval/toy_test/greedy"] >= 3 * start["eval/toy_test/greedy"] > 0
    assert mean(line["length"] for line in steps[-5:]) > 1.3 * mean(line["length"] for line in steps[:5])


def test_in_the_reported_runs_every_seed_learned_and_gold_labels_learned_more():
    """TTRL's five runs, which are the demo's but for the seed and the evaluation, and gold labels' five."""
    results = json.loads((ROOT / "lab/claims/results.json").read_text())
    learned, longer = results["T1"]["end eval/toy_test/greedy"], results["E1c"]["last length"]
    assert len(learned["first"]) == len(longer["first"]) == 5
    assert all(end >= 3 * start for end, start in zip(learned["first"], learned["second"], strict=True))
    assert all(end > start for end, start in zip(longer["first"], longer["second"], strict=True))
    assert min(results["T4"]["end eval/toy_test/greedy"]["first"]) > max(learned["first"])
