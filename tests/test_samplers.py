"""All samplers: what they draw, that they run the current policy, and that stale weights are noticed."""

import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny_model
from equations import relative_error
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessor

import common
from common import VLLMSampler
from engine import hf_sampler
from engine.base import seed_of
from engine.data import encode_prompt, load_problems
from engine.hf_sampler import HFSampler, _truncate, draw, pad_left, samples_of, uniform_numbers
from engine.policy import Policy, Request, Rollout, load_model
from engine.setup import has_vllm

CPU = torch.device("cpu")
TOY = common.TOY_MODEL
TOKENIZER = AutoTokenizer.from_pretrained(TOY)
STOP = [TOKENIZER.eos_token_id]
QUESTIONS = [problem.question for problem in load_problems("toy", quiet=True)[:4]]
PROMPTS = [encode_prompt(TOKENIZER, question) for question in QUESTIONS]


def requests(prompts=PROMPTS, n=4, seed=1, limit=64):
    return [Request(prompt, n, seed_of(seed, "test", i), limit) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=["hf", "vllm"])
def sampler(request):
    if request.param == "hf":
        return HFSampler(TOY, STOP, CPU, torch.float32)
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
    policy.score_old(rollouts, temperature)
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


def test_more_responses_than_fit_are_sampled_in_turns(monkeypatch):
    """Three sequences at a time, whose keys and values fit; each response is what it was."""
    hf, sizes = HFSampler(TOY, STOP, CPU, torch.float32), []
    expected = ids(hf.generate(requests(n=7), 1.0))
    original = hf._generate

    def generate(samples, *options):
        sizes.append(len(samples))
        return original(samples, *options)

    monkeypatch.setattr(hf, "_generate", generate)
    config, longest = hf.model.config, 64 + max(len(prompt) for prompt in PROMPTS)
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    monkeypatch.setattr(hf_sampler, "CACHE", 3 * 2 * 4 * config.num_hidden_layers * width * longest)
    assert ids(hf.generate(requests(n=7), 1.0)) == expected and sizes == [3] * 9 + [1]


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


@pytest.mark.parametrize("sampler", ["vllm"], indirect=True)  # the other has no cache between calls
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


@pytest.mark.parametrize("sampler", ["hf"], indirect=True)
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


# ---------------------------------- against transformers' own generate -----------------------------------
class Drawing(LogitsProcessor):
    """Draws a token for every sample and leaves only that one finite, so that greedy search takes it."""

    def __init__(self, uniform: torch.Tensor, *options):
        self.uniform = uniform  # [samples, steps]
        self.options = options  # temperature, top_p, top_k
        self.logprobs = []      # [samples] of every step

    def __call__(self, input_ids, logits):
        token, logprob = draw(logits, self.uniform[:, len(self.logprobs)], *self.options)
        self.logprobs.append(logprob)
        return torch.full_like(logits, -math.inf).scatter(-1, token[:, None], 0.0)


@torch.inference_mode()
def generate_by_transformers(model: str, stop_ids, requests, *options) -> list[Rollout]:
    """Every sample a row, prompts padded on the left, no row dropped."""
    model = load_model(model, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # the model's own may penalize or force tokens
    samples, rollouts = samples_of(requests), []
    steps = max(request.max_new_tokens for request in requests)
    ids, mask = pad_left([request.prompt_ids for request, _ in samples], CPU)
    drawing = Drawing(uniform_numbers(samples, steps, CPU), *options)
    config = GenerationConfig(max_new_tokens=steps, eos_token_id=stop_ids, pad_token_id=0)
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config,
                         logits_processor=[drawing])
    logprobs = torch.stack(drawing.logprobs, 1)  # [samples, steps]
    for i, (request, _) in enumerate(samples):
        response = out[i, ids.shape[1]:][:request.max_new_tokens].tolist()
        stops = [t for t, token in enumerate(response) if token in stop_ids]
        end = stops[0] + 1 if stops else len(response)
        rollouts.append(Rollout(request.prompt_ids, response[:end], logprobs[i, :end], finished=bool(stops)))
    return rollouts


def assert_same(rollouts, others):
    assert ids([rollouts]) == ids([others])
    for a, b in zip(rollouts, others, strict=True):
        assert (a.prompt_ids, a.finished) == (b.prompt_ids, b.finished)
    expected = torch.cat([r.logprobs for r in others])
    assert relative_error(torch.cat([r.logprobs for r in rollouts]), expected) < 1e-5
    assert len({len(r.response_ids) for r in rollouts}) > 2


@pytest.mark.parametrize("options", [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 1.0, 5), (0.0, 1.0, 0)])
def test_the_tokens_are_those_of_transformers_generate(options):
    """Prompts of uneven length, groups and limits of uneven size."""
    uneven = requests(n=6) + requests(PROMPTS[:2], n=2, seed=3, limit=7) + requests(n=1, seed=4)
    ours = HFSampler(TOY, STOP, CPU, torch.float32).generate(uneven, *options)
    assert_same(flat(ours), generate_by_transformers(TOY, STOP, uneven, *options))


@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "GPT2", "Bloom"])  # RoPE, a window, positions, ALiBi
def test_other_architectures_sample_the_tokens_of_transformers_generate(tmp_path, name):
    """Prompts of uneven length, rows that end at different times."""
    tiny_model(name, tmp_path)
    stop = [2, 3, 4, 5]
    prompts = [[7, 8, 9, 10, 11], [12, 13], [14], [15, 16]]
    uneven = [Request(prompt, 5, 100 * i, 12) for i, prompt in enumerate(prompts)]
    ours = HFSampler(str(tmp_path), stop, CPU, torch.float32).generate(uneven, 0.7)
    assert_same(flat(ours), generate_by_transformers(str(tmp_path), stop, uneven, 0.7, 1.0, 0))


def test_a_text_ends_a_response_with_the_token_that_completes_it():
    """Tokens are letters: "ab" ends a response at the first b after an a, also if that is its only sample."""
    def decode(ids):
        return "".join("ab"[i % 2] for i in ids)

    hf = HFSampler(TOY, STOP, CPU, torch.float32)
    free = flat(hf.generate(requests(limit=12), 1.0))
    ended = flat(hf.generate(requests(limit=12), 1.0, stop=("ab", "bbbbb"), decode=decode))
    cut_short = 0
    for long, short in zip(free, ended, strict=True):
        text = decode(long.response_ids)
        ends = [text.find(word) + len(word) for word in ("ab", "bbbbb") if word in text]
        end = min([*ends, len(text)])
        assert short.response_ids == long.response_ids[:end]
        assert torch.allclose(short.logprobs, long.logprobs[:end], atol=1e-5)
        assert short.finished == (bool(ends) or long.finished)
        cut_short += end < len(text)
    assert cut_short > 5


def test_weights_are_of_the_type_that_is_asked_for():
    sampler = HFSampler(TOY, STOP, CPU, torch.bfloat16)
    assert {p.dtype for p in sampler.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in sampler.model.buffers()} == {torch.float32}  # rotary frequencies
    assert 1e-4 < error(toy_policy(), sampler.generate(requests(), 1.0)) < 0.1


def test_exact_numbers_are_on_the_cpu_where_the_device_has_no_float64():
    """Not tried on Apple's Metal."""
    assert hf_sampler.exact_device(torch.device("mps")).type == "cpu"
    assert hf_sampler.exact_device(torch.device("meta")).type == "meta"


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
