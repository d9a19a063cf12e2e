"""All samplers: what they draw, that they run the current policy, and that stale weights are noticed."""

import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import ARCHITECTURES, ROOT, tiny_model
from equations import relative_error
from transformers import AutoTokenizer

import common
from common import VLLMSampler
from engine import hf_sampler
from engine.base import seed_of
from engine.data import encode_prompt, load_problems
from engine.hf_sampler import HFSampler, SharedPrompts, _truncate, samples_of, uniform_numbers
from engine.plain import PlainSampler
from engine.policy import Policy, Request
from engine.setup import has_vllm

CPU = torch.device("cpu")
TOY = common.TOY_MODEL
TOKENIZER = AutoTokenizer.from_pretrained(TOY)
STOP = [TOKENIZER.eos_token_id]
QUESTIONS = [problem.question for problem in load_problems("toy", quiet=True)[:4]]
PROMPTS = [encode_prompt(TOKENIZER, question) for question in QUESTIONS]
NOT_SHARED = ("Mistral", "Falcon", "GPTJ", "Bloom")  # a sliding window; attention code of their own


def requests(prompts=PROMPTS, n=4, seed=1, limit=64):
    return [Request(prompt, n, seed_of(seed, "test", i), limit) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=["hf", "plain", "vllm"])
def sampler(request):
    if request.param != "vllm":
        kind = {"hf": HFSampler, "plain": PlainSampler}[request.param]
        return kind(TOY, STOP, CPU, torch.float32)
    if not has_vllm():
        pytest.fail("vLLM does not import; install requirements-cpu.txt")
    args = common.Args(max_prompt_tokens=384, max_new_tokens=64)
    return VLLMSampler(args, TOY, STOP, CPU, torch.float32)


def toy_policy():
    return Policy(TOY, CPU, torch.float32)


def ids(groups):
    found = []
    for group in groups:
        found.append([rollout.response_ids for rollout in group])
    return found


def flat(groups):
    return list(itertools.chain.from_iterable(groups))


def error(policy, groups, temperature=1.0):
    """Of the sampler's log-probs, relative to the policy's."""
    rollouts = flat(groups)
    policy.score(rollouts, "old_logp", temperature)
    sampled = torch.cat([r.logprobs for r in rollouts])
    return relative_error(sampled, torch.cat([r.old_logp for r in rollouts]))


def train(policy, groups, temperature=1.0, steps=2):
    """Make what was sampled likelier; afterwards it is another policy."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for _ in range(steps):
        for micro in policy.micro_batches(flat(groups)):
            logp_T, _ = policy.logprobs(micro, temperature)
            (-logp_T.sum() / 100).backward()
        policy.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_seeds_limits_and_stops(sampler):
    groups = sampler.generate(requests(), 1.0)
    assert [len(group) for group in groups] == [4] * 4
    assert ids(groups) == ids(sampler.generate(requests(), 1.0))
    assert ids(groups) != ids(sampler.generate(requests(seed=2), 1.0))
    for group in ids(groups):  # samples within a group differ
        assert len(set(map(tuple, group))) > 1
    for r in flat(groups):
        assert r.finished == (r.response_ids[-1] in STOP)
        assert not set(r.response_ids[:-1]) & set(STOP)
        assert len(r.logprobs) == len(r.response_ids) <= 64
    for r in flat(sampler.generate(requests(limit=3), 1.0)):
        assert len(r.response_ids) == 3
        assert not r.finished
    greedy = ids(sampler.generate(requests(n=1), 0.0))
    assert greedy == ids(sampler.generate(requests(n=1, seed=9), 0.0))


def test_a_response_does_not_depend_on_its_neighbours(sampler):
    alone = [sampler.generate([request], 1.0)[0] for request in requests(n=2)]
    assert ids(alone) == ids(sampler.generate(requests(n=2), 1.0))


def test_hf_splits_what_memory_does_not_hold(monkeypatch):
    """Many responses to one prompt: as many at a time as keys and values fit; each is what it was."""
    hf, sizes = HFSampler(TOY, STOP, CPU, torch.float32), []
    expected = ids(hf.generate(requests(n=7), 1.0))
    original = hf._generate

    def generate(chunk, *options):
        sizes.append(sum(request.n for request in chunk))
        return original(chunk, *options)

    monkeypatch.setattr(hf, "_generate", generate)
    longest = 64 + max(len(prompt) for prompt in PROMPTS)
    config = hf.model.config
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    kept = 2 * 4 * config.num_hidden_layers * width * longest  # bytes of a sequence's keys and values
    monkeypatch.setattr(hf_sampler, "host_memory", lambda: 2 * 3 * kept)  # half of it: three sequences
    assert ids(hf.generate(requests(n=7), 1.0)) == expected and max(sizes) == 3 and sum(sizes) == 28


def test_requests_of_one_call_may_differ(sampler):
    """In the number of responses and in their limits; every request gets its own, in order."""
    mixed = [
        Request(PROMPTS[0], 3, seed_of("mixed", 0), 5),
        Request(PROMPTS[1], 1, seed_of("mixed", 1), 64),
        Request(PROMPTS[2], 1, seed_of("mixed", 2), 1),
        Request(PROMPTS[3], 2, seed_of("mixed", 3), 2),
    ]
    groups = sampler.generate(mixed, 1.0)
    for request, group in zip(mixed, groups, strict=True):
        assert len(group) == request.n
        assert ids([group]) == ids(sampler.generate([request], 1.0))
        for r in group:
            assert r.prompt_ids == request.prompt_ids
            assert len(r.response_ids) == request.max_new_tokens or r.finished


def test_logprobs_are_the_trainers_also_after_updates(sampler):
    policy = toy_policy()
    groups = sampler.generate(requests(), 0.8)
    assert error(policy, groups, 0.8) < 1e-5
    train(policy, groups, 0.8)
    stale = sampler.generate(requests(), 0.8)
    assert error(policy, stale, 0.8) > 1e-2  # the sampler was not told
    sampler.load(policy.named_tensors(torch.float32))
    assert error(policy, sampler.generate(requests(), 0.8), 0.8) < 1e-4  # the update made large logits
    sampler.load(toy_policy().named_tensors(torch.float32))  # as it was, for the other tests


@pytest.mark.parametrize("sampler", ["vllm"], indirect=True)  # the others have no cache between calls
def test_a_stale_prefix_cache_is_noticed(sampler, monkeypatch):
    long = [encode_prompt(TOKENIZER, " ".join(QUESTIONS * 2))[-300:]]  # the cache holds whole blocks only
    policy = toy_policy()
    groups = sampler.generate(requests(long), 1.0)
    train(policy, groups)
    monkeypatch.setattr(sampler.llm, "reset_prefix_cache", lambda: True)
    sampler.load(policy.named_tensors(torch.float32))
    assert error(policy, sampler.generate(requests(long), 1.0)) > 1e-3
    monkeypatch.undo()
    sampler.load(policy.named_tensors(torch.float32))
    assert error(policy, sampler.generate(requests(long), 1.0)) < 1e-4
    sampler.load(toy_policy().named_tensors(torch.float32))


def test_a_weight_that_was_not_taken_is_an_error(sampler):
    tensors = list(toy_policy().named_tensors(torch.float32))
    without_one = [t for t in tensors if "layers.1.mlp.down_proj" not in t[0]]
    assert len(without_one) == len(tensors) - 1
    with pytest.raises(RuntimeError, match="weights"):
        sampler.load(iter(without_one))
    sampler.load(iter(tensors))


@pytest.mark.parametrize("sampler", ["hf", "plain"], indirect=True)
def test_a_weight_that_is_not_known_is_an_error(sampler):
    tensors = list(toy_policy().named_tensors(torch.float32))
    with pytest.raises(RuntimeError, match="weights model.layers.99"):
        sampler.load([*tensors, ("model.layers.99", torch.zeros(1))])
    sampler.load(iter(tensors))


def test_truncation_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def kept(top_p=1.0, top_k=0):
        return torch.isfinite(_truncate(logits, top_p, top_k))[0].tolist()

    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.5) == [True, False, False, False]   # the first alone reaches 0.5
    assert kept(top_p=0.6) == [True, True, False, False]    # the token that crosses 0.6 stays


def test_hf_frequencies_follow_the_distribution():
    sampler = HFSampler(TOY, STOP, CPU, torch.float32)
    group = sampler.generate([Request(PROMPTS[0], 1000, seed_of("frequency"), 1)], 1.0)[0]
    counts = torch.zeros(len(TOKENIZER))
    for r in group:
        counts[r.response_ids[0]] += 1
    policy = toy_policy()
    with torch.no_grad():
        expected = policy.model.to(CPU)(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    for token in expected.topk(3).indices:
        p = float(expected[token])
        assert abs(float(counts[token]) / 1000 - p) < 4 * math.sqrt(p * (1 - p) / 1000) + 1e-3


def assert_same(groups, others):
    assert ids(groups) == ids(others)
    for a, b in zip(flat(groups), flat(others), strict=True):
        assert (a.prompt_ids, a.finished) == (b.prompt_ids, b.finished)
    expected = torch.cat([r.logprobs for r in flat(others)])
    assert relative_error(torch.cat([r.logprobs for r in flat(groups)]), expected) < 1e-5


def test_exact_numbers_are_on_the_cpu_where_the_device_has_no_float64():
    """Not tried on Apple's Metal; the numbers themselves and their place are."""
    assert hf_sampler.exact_device(torch.device("mps")).type == "cpu"
    assert hf_sampler.exact_device(torch.device("meta")).type == "meta"
    samples = hf_sampler.samples_of([Request([1], 2, 7, 3)])
    ours = hf_sampler.uniform_numbers(samples, 3, torch.device("mps"))
    assert ours.device.type == "cpu" and ours.dtype == torch.float64
    assert hf_sampler.uniform_numbers(samples, 3, torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("temperature, top_p, top_k", [
    (1.0, 1.0, 0),
    (0.7, 0.9, 0),
    (1.0, 1.0, 5),
    (0.0, 1.0, 0),
])
def test_plain_draws_the_same_tokens(temperature, top_p, top_k):
    """transformers' generate and the engine: prompts of uneven length, groups and limits of uneven size."""
    uneven = requests(n=6) + requests(PROMPTS[:2], n=2, seed=3, limit=7) + requests(n=1, seed=4)
    options = (uneven, temperature, top_p, top_k)
    engine = HFSampler(TOY, STOP, CPU, torch.float32).generate(*options)
    assert_same(engine, PlainSampler(TOY, STOP, CPU, torch.float32).generate(*options))
    lengths = {len(r.response_ids) for r in flat(engine)}
    assert len(lengths) > 2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hf_shared_prompts_give_the_models_own_logprobs(tmp_path, name):
    """Prompts of uneven length, rows that end at different times; not shared: every row has a copy."""
    model = tiny_model(name, tmp_path)
    stop = [2, 3, 4, 5]
    sampler = HFSampler(str(tmp_path), stop, CPU, torch.float32)
    assert sampler.shares == (name not in NOT_SHARED)
    uneven = [
        Request([7, 8, 9, 10, 11], 5, 100, 12),
        Request([12, 13], 5, 200, 12),
        Request([14], 5, 300, 2),
        Request([15, 16], 5, 400, 12),
    ]
    groups = sampler.generate(uneven, 0.7)
    assert len({len(r.response_ids) for r in flat(groups)}) > 2
    for r in flat(groups):
        with torch.no_grad():
            logits = model(torch.tensor([r.prompt_ids + r.response_ids])).logits[0]
        logp = torch.log_softmax(logits[len(r.prompt_ids) - 1:-1] / 0.7, -1)
        expected = logp.gather(-1, torch.tensor(r.response_ids)[:, None]).squeeze(-1)
        assert relative_error(r.logprobs, expected) < 1e-5
    plain = PlainSampler(str(tmp_path), stop, CPU, torch.float32)
    assert_same(groups, plain.generate(uneven, 0.7))


def test_hf_says_once_why_prompts_are_copied(tmp_path, capsys, monkeypatch):
    tiny_model("Falcon", tmp_path)
    hf_sampler.say_once.cache_clear()
    for _ in range(2):
        HFSampler(str(tmp_path), [2], CPU, torch.float32)
    assert capsys.readouterr().out.count("architecture falcon has attention code of its own") == 1
    monkeypatch.setenv("RANK", "1")
    hf_sampler.say_once.cache_clear()
    HFSampler(str(tmp_path), [2], CPU, torch.float32)
    assert "falcon" not in capsys.readouterr().out


def test_hf_copies_prompts_if_sharing_fails(monkeypatch, capsys):
    """An error while sharing is tried is told, and what is sampled is what it was."""
    expected = HFSampler(TOY, STOP, CPU, torch.float32).generate(requests(), 1.0)

    def broken(self, prompt_of_row):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(SharedPrompts, "assign", broken)
    hf_sampler.say_once.cache_clear()
    sampler = HFSampler(TOY, STOP, CPU, torch.float32)
    assert not sampler.shares
    assert "no such kernel" in capsys.readouterr().out
    assert_same(expected, sampler.generate(requests(), 1.0))


def test_shared_prompts_by_hand():
    """The example in the docstring of SharedPrompts.assign."""
    class Cache:
        def batch_select_indices(self, keep):
            self.kept = keep.tolist()

    shared = SharedPrompts(Cache(), torch.tensor([[0, 1], [1, 1], [1, 1], [1, 1]]))
    shared.assign(torch.tensor([0, 0, 3, 3, 3]))
    assert shared.cache.kept == [0, 3]
    assert shared.slot.tolist() == [0, 1, 3, 4, 5]
    assert shared.rows.tolist() == [0, 1, 0, 2, 3, 4]
    assert shared.bias.flatten(1).tolist() == [[-math.inf, 0.0], [0.0, 0.0]]


def test_hf_half_precision_shares_prompts_too():
    sampler = HFSampler(TOY, STOP, CPU, torch.bfloat16)
    assert sampler.shares
    assert {p.dtype for p in sampler.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in sampler.model.buffers()} == {torch.float32}  # rotary frequencies
    assert 1e-4 < error(toy_policy(), sampler.generate(requests(), 1.0)) < 0.1


def test_two_samples_draw_the_same_numbers():
    """Of 1,000 steps of 8 problems: torch's CPU generator, which takes 32 bits of a seed, repeats streams."""
    requests = [Request([1], 2, seed_of(1, step, problem), 1) for step in range(1000) for problem in range(8)]
    first = uniform_numbers(samples_of(requests), 1, CPU).flatten().tolist()
    assert len(set(first)) == len(first)


SHORT_RUN = dict(steps=3, votes=8, train_samples=8, prompts_per_batch=4, num_minibatches=2, max_new_tokens=64,
                 eval="", checkpoint_every=0)


@pytest.mark.parametrize("stale", [False, True])
def test_a_run_with_a_stale_engine_is_stopped(tmp_path, stale):
    """A whole run with vLLM, in a process of its own. Without the sync it must stop, with one sentence."""
    code = f"""
import common, ttrl
if {stale}:
    common.VLLMSampler.load = lambda self, tensors: None
common.launch(ttrl.main, ttrl.Args, common.TOY)
"""
    flags = ["--sampler", "vllm", "--lr", "1e-3", "--out", str(tmp_path / "run")]
    for name, value in SHORT_RUN.items():
        flags += [f"--{name}", str(value)]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if stale:
        assert done.returncode == 2
        assert "the sampler does not run the current policy" in done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == 3
        assert max(line["logp_diff_max"] for line in lines if "logp_diff_max" in line) < 1e-4
