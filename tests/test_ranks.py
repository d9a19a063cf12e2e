"""Real ranks under torchrun: 1 rank = 2 ranks for every script, two nodes, and one engine per rank."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

SCRIPTS = [name for name in ("ttrl", "evol_rl", "scrl", "restrain", "ettrl", "dynamic_rl") if (ROOT / f"{name}.py").exists()]
FLAGS = ("--steps 1 --updates_per_batch 4 --votes 8 --train_samples 8 --prompts_per_batch 4 --max_new_tokens 64 --eval_samples 2 --eval_every 0 "
         "--checkpoint_every 0 --lr 1e-3 --eval=").split()
OWN = {  # scripts whose budget has other names
    "restrain": "--prompt_weighting online".split(), "ettrl": "--trunks 2 --forks 2 --branches 2".split(), "dynamic_rl": "--votes 6 --train_samples 6".split()}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def torchrun(ranks, script, *flags, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", free_port(),
               str(ROOT / f"{script}.py"), *flags]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, **options)


def metrics_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "tokens_per", "padding", "shared_", "sync_"))} for line in lines]


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_rank_equals_two(tmp_path, script):
    """Same rollouts and rewards, losses to 1e-5, weights to 1e-4 after four optimizer steps, micro-batches cut differently.

    One batch: after an update, rounding alone can turn a sampled token, and the rollouts would no longer be the same. As
    rounding may turn one in the first batch, too (once in 100,000 tokens), a second seed is tried before this counts."""
    def compare(seed):
        flags = [*FLAGS, *OWN.get(script, []), "--seed", str(seed)]
        out = {ranks: tmp_path / f"{seed}-{ranks}" for ranks in (1, 2)}
        one = subprocess.run([sys.executable, str(ROOT / f"{script}.py"), *flags, "--micro_tokens", "3000", "--out", str(out[1])],
                             env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
        assert one.returncode == 0, one.stderr[-2000:]
        two = torchrun(2, script, *flags, "--micro_tokens", "500", "--out", str(out[2]))
        assert two.returncode == 0, two.stderr[-2000:]
        for a, b in zip(metrics_of(out[1]), metrics_of(out[2]), strict=True):
            assert a.keys() == b.keys()
            for name in a.keys() - {"clip_fraction"}:  # that counts tokens on either side of a border
                assert a[name] == pytest.approx(b[name], abs=1e-5, rel=1e-4), (a["step"], name)
        first, second = (load_file(out[ranks] / "final/model.safetensors") for ranks in (1, 2))
        for name in first:
            assert torch.allclose(first[name], second[name], atol=1e-4), name

    try:
        compare(seed=1)
    except AssertionError:
        compare(seed=2)


def test_vllm_on_two_ranks(tmp_path):
    done = torchrun(2, "ttrl", *FLAGS, "--steps", "3", "--sampler", "vllm", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 3 and all(line["sync_max"] < 1e-4 for line in lines)


def test_two_nodes(tmp_path):
    """Two torchrun agents on this machine, one rank each."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1",
               "--master-port", port]
    flags = [*FLAGS, "--steps", "2", "--hsdp", "2", "--out", str(tmp_path / "run")]
    nodes = [subprocess.Popen([*command, "--node-rank", str(node), str(ROOT / "ttrl.py"), *flags], env=ENVIRONMENT, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for node in (0, 1)]
    for node in nodes:
        output, _ = node.communicate(timeout=300)
        assert node.returncode == 0, output[-2000:]
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2


def test_more_ranks_than_prompts_is_one_sentence(tmp_path):
    done = torchrun(2, "ttrl", *FLAGS, "--prompts_per_batch", "1", "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    assert done.stderr.count("--prompts_per_batch is 1, but must be at least the number of ranks, 2.") == 1


def test_evaluation_is_the_same_table_for_one_and_two_ranks(tmp_path):
    flags = ["--benchmarks", "toy_test", "--samples", "4", "--max_new_tokens", "64"]
    results = []
    for ranks in (1, 2):
        done = torchrun(ranks, "evaluate", *flags, "--out", str(tmp_path / str(ranks)))
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(json.loads((tmp_path / str(ranks) / "results.json").read_text())["results"])
    for name, value in results[0]["toy_test"].items():  # rounding may turn one token in a hundred thousand
        assert value == pytest.approx(results[1]["toy_test"][name], abs=0.5 if name == "length" else 0.01), name
