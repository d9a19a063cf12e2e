"""Both engines: what they sample, that they run the current policy, and that stale weights are noticed."""

import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import ARCHITECTURES, ROOT, SMALL, make_policy, tiny_model
from transformers import AutoTokenizer

import common
from common import Request, seed_of
from samplers import _truncate

TOKENIZER = AutoTokenizer.from_pretrained(common.TOY)
STOP = [TOKENIZER.eos_token_id]
QUESTIONS = [p.question for p in common.load_problems("toy", quiet=True)[:4]]
PROMPTS = [common.encode_prompt(TOKENIZER, q) for q in QUESTIONS]


def make_sampler(kind, **overrides):
    args = common.Args(**{"max_prompt_tokens": 384, "max_new_tokens": 64, **overrides})
    return kind(args, str(common.TOY), TOKENIZER, STOP, torch.device("cpu"), torch.float32)


def requests(prompts=PROMPTS, n=4, seed=1, limit=64):
    return [Request(p, n, seed_of(seed, "test", i), limit) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module", params=["hf", "vllm"])
def sampler(request):
    if request.param == "vllm" and not common.has_vllm():
        pytest.fail("vLLM does not import; install requirements-cpu.txt")
    return make_sampler(dict(hf=common.HFSampler, vllm=common.VLLMSampler)[request.param])


def ids(groups):
    return [[r.response_ids for r in g] for g in groups]


def worst(policy, groups):
    rollouts = [r for g in groups for r in g]
    policy.score(rollouts)
    return max(float((r.old_logprobs - r.logprobs).abs().max()) for r in rollouts)


def train(policy, groups, steps=2):
    rollouts = [r for g in groups for r in g]
    for _ in range(steps):
        for micro in policy.micro_batches(rollouts):
            logp, _ = policy.logprobs(micro)
            policy.backward(micro, -logp)
        policy.step(1e-2)


def test_seeds_limits_and_stops(sampler):
    groups = sampler.generate(requests(), 1.0)
    assert [len(g) for g in groups] == [4] * 4
    assert ids(groups) == ids(sampler.generate(requests(), 1.0))
    assert ids(groups) != ids(sampler.generate(requests(seed=2), 1.0))
    assert all(len({tuple(r) for r in g}) > 1 for g in ids(groups))  # samples within a group differ
    for r in (r for g in groups for r in g):
        assert r.finished == (r.response_ids[-1] in STOP) and not set(r.response_ids[:-1]) & set(STOP)
        assert len(r.logprobs) == len(r.response_ids) <= 64
    for g in sampler.generate(requests(limit=3), 1.0):
        assert all(len(r.response_ids) == 3 and not r.finished for r in g)
    greedy = ids(sampler.generate(requests(n=1), 0.0))
    assert greedy == ids(sampler.generate(requests(n=1, seed=9), 0.0))


def test_a_response_does_not_depend_on_its_neighbours(sampler):
    alone = [sampler.generate([r], 1.0)[0] for r in requests(n=2)]
    assert ids(alone) == ids(sampler.generate(requests(n=2), 1.0))


def test_logprobs_are_the_trainers_also_after_updates(sampler):
    policy = make_policy(temperature=0.8)
    groups = sampler.generate(requests(), 0.8)
    assert worst(policy, groups) < 1e-4
    train(policy, groups)
    stale = sampler.generate(requests(), 0.8)
    assert worst(policy, stale) > 1e-2  # without a sync the proof fails
    sampler.load(policy.named_tensors(torch.float32))
    assert worst(policy, sampler.generate(requests(), 0.8)) < 2e-4  # the update made large logits
    sampler.load(make_policy().named_tensors(torch.float32))  # as it was, for the other tests


def test_a_stale_prefix_cache_is_noticed(sampler, monkeypatch):
    if isinstance(sampler, common.HFSampler):
        return  # has no cache between calls
    long = [common.encode_prompt(TOKENIZER, " ".join(QUESTIONS * 2))[-300:]]  # the cache holds whole blocks only
    policy = make_policy()
    groups = sampler.generate(requests(long), 1.0)
    train(policy, groups)
    monkeypatch.setattr(sampler.llm, "reset_prefix_cache", lambda: None)
    sampler.load(policy.named_tensors(torch.float32))
    assert worst(policy, sampler.generate(requests(long), 1.0)) > 1e-3
    monkeypatch.undo()
    sampler.load(policy.named_tensors(torch.float32))
    assert worst(policy, sampler.generate(requests(long), 1.0)) < 1e-4
    sampler.load(make_policy().named_tensors(torch.float32))


def test_a_weight_that_was_not_taken_is_an_error(sampler):
    tensors = list(make_policy().named_tensors(torch.float32))
    with pytest.raises(RuntimeError, match="weights"):
        sampler.load(t for t in tensors if "layers.1.mlp.down_proj" not in t[0])
    sampler.load(iter(tensors))


def test_truncation_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = lambda **k: torch.isfinite(_truncate(logits, **{"top_p": 1.0, "top_k": 0, **k}))[0].tolist()  # noqa: E731
    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.5) == [True, False, False, False]   # the first alone reaches 0.5
    assert kept(top_p=0.6) == [True, True, False, False]    # the token that crosses 0.6 stays


def test_hf_frequencies_follow_the_distribution():
    sampler, policy = make_sampler(common.HFSampler), make_policy()
    group = sampler.generate([Request(PROMPTS[0], 1000, seed_of("frequency"), 1)], 1.0)[0]
    counts = torch.zeros(policy.model.config.vocab_size)
    for r in group:
        counts[r.response_ids[0]] += 1
    with torch.no_grad():
        expected = policy.model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    for token in expected.topk(3).indices:
        p = float(expected[token])
        assert abs(float(counts[token]) / 1000 - p) < 4 * math.sqrt(p * (1 - p) / 1000) + 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hf_shared_prompts_give_the_models_own_logprobs(tmp_path, name):
    """Prompts of uneven length, rows that end at different times; where prompts cannot be shared, every row has a copy."""
    model = tiny_model(name, tmp_path)
    sampler = common.HFSampler(common.Args(), str(tmp_path), None, [2, 3, 4, 5], torch.device("cpu"), torch.float32)
    assert sampler.shares == (name not in ("Mistral", "Falcon", "GPTJ", "Bloom"))  # sliding window; attention of their own
    groups = sampler.generate([Request([7, 8, 9, 10, 11], 5, 100, 12), Request([12, 13], 5, 200, 12), Request([14], 5, 300, 2), Request([15, 16], 5, 400, 12)], 0.7)
    assert len({len(r.response_ids) for g in groups for r in g}) > 2
    for r in sum(groups, []):
        with torch.no_grad():
            logits = model(torch.tensor([r.prompt_ids + r.response_ids])).logits[0, len(r.prompt_ids) - 1:-1] / 0.7
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(r.response_ids)[:, None]).squeeze(-1)
        assert torch.allclose(r.logprobs, expected, atol=1e-4)


def test_hf_half_precision_shares_prompts_too():
    sampler = common.HFSampler(common.Args(), str(common.TOY), TOKENIZER, STOP, torch.device("cpu"), torch.bfloat16)
    assert sampler.shares and {p.dtype for p in sampler.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in sampler.model.buffers()} == {torch.float32}  # rotary frequencies
    assert 1e-4 < worst(make_policy(), sampler.generate(requests(), 1.0)) < 0.3


def test_seeds_never_share_a_stream():
    seeds = [seed_of(1, step, problem) for step in range(50) for problem in range(50)]
    assert len(set(seeds)) == 2500 and all(s % 65536 == 0 and 0 <= s < 2 ** 62 for s in seeds)


@pytest.mark.parametrize("stale", [False, True])
def test_the_sync_proof_stops_a_run_with_a_stale_engine(tmp_path, stale):
    """A whole run with vLLM, in a process of its own; with the sync taken out it must stop with one sentence."""
    code = f"""
import common, ttrl
if {stale}:
    common.VLLMSampler.load = lambda self, tensors: None
common.launch(ttrl.main, ttrl.Args, ttrl.TOY)
"""
    flags = ["--sampler", "vllm", "--lr", "1e-3", "--out", str(tmp_path / "run")]
    for name, value in dict(SMALL, steps=3).items():
        flags += [f"--{name}", str(value)]
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if stale:
        assert done.returncode == 2 and "the sampler does not run the current policy" in done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == 3 and max(line["sync_max"] for line in lines) < 1e-4
