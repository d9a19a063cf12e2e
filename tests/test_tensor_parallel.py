"""--tensor_parallel: consecutive ranks share a vLLM engine. Real engines of the CPU build, real torchrun."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import ROOT, fresh_state, read_lines, untimed
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import common
import ttrl
from engine.base import UserError

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
FLAGS = dict(dataset="toy", sampler="vllm", steps=2, votes=8, train_samples=8, prompts_per_batch=4,
             num_minibatches=2, max_prompt_tokens=128, max_new_tokens=64, lr=3e-4, eval_samples=2,
             eval_every=0, checkpoint_every=0)
ONLY_VLLM = "--tensor_parallel is 2, but only vLLM splits a model among ranks"


def start(ranks, *command):
    """Run it, under torchrun if there are several ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", port]
    words = [sys.executable, *(torchrun if ranks > 1 else []), *command]
    return subprocess.run([str(word) for word in words], cwd=ROOT, env=ENVIRONMENT, capture_output=True,
                          text=True, timeout=600)


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory):
    """The toy with 4 heads and 2 KV heads in place of 3 and 1.

    The same function: the new head's output is not used, and the KV heads are equal. As a Llama, because
    vLLM's Qwen2 knows no other head size than hidden size / heads."""
    folder = tmp_path_factory.mktemp("four_heads")
    tokenizer = AutoTokenizer.from_pretrained(common.TOY_MODEL)
    tokenizer.save_pretrained(folder)
    state = fresh_state(common.TOY_MODEL)
    for name, weight in list(state.items()):
        if ".q_proj." in name:
            state[name] = torch.cat([weight, torch.zeros_like(weight[:32])])
        if ".k_proj." in name or ".v_proj." in name:
            state[name] = torch.cat([weight, weight])
        if ".o_proj." in name:
            state[name] = torch.cat([weight, torch.zeros_like(weight[:, :32])], 1)
            state[name.replace("weight", "bias")] = torch.zeros(len(weight))
    toy = json.loads((ROOT / "toy/config.json").read_text())
    kept = ("vocab_size hidden_size intermediate_size num_hidden_layers rms_norm_eps max_position_embeddings "
            "eos_token_id pad_token_id bos_token_id rope_parameters tie_word_embeddings").split()
    config = LlamaConfig(**{name: toy[name] for name in kept}, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=32, attention_bias=True)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)
    return folder


def run(folder, model, ranks, parallel) -> list[dict]:
    """A run of two steps, with evaluations of five problems, which no number of engines here divides."""
    problems = folder / "five.jsonl"
    problems.write_text("\n".join((ROOT / "toy/test.jsonl").read_text().splitlines()[:5]) + "\n")
    out = folder / f"{ranks}-{parallel}"
    flags = FLAGS | dict(model=model, tensor_parallel=parallel, out=out, eval=problems)
    done = start(ranks, "ttrl.py", *[f"--{name}={value}" for name, value in flags.items()])
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return read_lines(out / "metrics.jsonl")


def texts(out) -> list[list[str]]:
    found = []
    for record in read_lines(out / "samples.jsonl"):
        found.append([response["text"] for response in record["responses"]])
    return found


@pytest.mark.slow
def test_the_same_run_with_shared_engines(tmp_path, four_heads):
    """An engine of one rank, one of two ranks, two of two ranks: all run the current policy, and all sample
    the same tokens, before and after updates."""
    runs = {setup: run(tmp_path, four_heads, *setup) for setup in [(1, 1), (2, 2), (4, 2)]}
    for lines in runs.values():
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert max(line["logp_diff_max"] for line in lines[1:]) < 1e-4
        assert lines[-1]["grad_norm"] > 1e-3
    for setup in [(2, 2), (4, 2)]:
        for expected, line in zip(untimed(runs[1, 1]), untimed(runs[setup]), strict=True):
            for name in expected.keys() - {"clip_fraction", "logp_diff_max", "logp_diff_mean"}:
                assert line[name] == pytest.approx(expected[name], abs=1e-4, rel=1e-3), (setup, name)
        assert texts(tmp_path / "{}-{}".format(*setup)) == texts(tmp_path / "1-1")


def test_shares_of_engines(tmp_path):
    """Four ranks: every item once and in order, on all ranks; ranks of an engine work on the same share."""
    script = tmp_path / "share.py"
    script.write_text(textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        import torch.distributed as dist
        from engine.base import gather, sharded
        dist.init_process_group("gloo")
        for per_engine in (1, 2, 4):
            for count in (0, 1, 3, 4, 9):
                seen = []
                def work(share):
                    seen.append(tuple(share))
                    return [(item, dist.get_rank()) for item in share]
                results = sharded(list(range(count)), work, per_engine)
                assert [item for item, _ in results] == list(range(count))
                assert all(rank % per_engine == 0 for _, rank in results)
                shares = [share for [share] in gather(seen)]
                assert all(shares[i] == shares[i // per_engine * per_engine] for i in range(4)), shares
        dist.barrier()
        dist.destroy_process_group()
    """))
    done = start(4, script)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("ranks, values, sentence", [
    (1, dict(tensor_parallel=2), "--tensor_parallel is 2, but must divide the number of ranks, 1."),
    (8, dict(tensor_parallel=3), "--tensor_parallel is 3, but must divide the number of ranks, 8."),
    (8, dict(tensor_parallel=0), "--tensor_parallel is 0, but the input should be greater"),
    (2, dict(tensor_parallel=2, sampler="hf"), ONLY_VLLM),
])
def test_bad_values_are_one_sentence(monkeypatch, ranks, values, sentence):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    [error] = ttrl.Args(**{"sampler": "vllm", **values}).errors()
    assert error.startswith(sentence)


def test_a_model_that_does_not_split_is_loaded(tmp_path, monkeypatch):
    """The toy has 3 heads."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = ttrl.Args(**common.TOY | dict(sampler="vllm", tensor_parallel=2, out=str(tmp_path / "run")))
    with pytest.raises(UserError, match="--tensor_parallel is 2, but must divide the attention heads of"):
        common.Run(args)
    assert not (tmp_path / "run").exists()
