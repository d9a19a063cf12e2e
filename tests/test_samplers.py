"""All samplers: what they draw, that they run the current policy, and that stale weights are noticed."""

import dataclasses
import itertools
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import make_policy, read_lines, run_toy
from equations import relative_error
from transformers import AutoTokenizer

import common
import ttrl
from engine import samplers
from engine.base import Request, UserError, stable_hash
from engine.data import encode_prompt, load_problems
from engine.options import TOY_MODEL, Machine, has_vllm
from engine.samplers import HFSampler, VLLMSampler, draw, uniform_numbers

CPU = torch.device("cpu")
TOY = TOY_MODEL
TOKENIZER = AutoTokenizer.from_pretrained(TOY)
STOP = [TOKENIZER.eos_token_id]
QUESTIONS = [problem.question for problem in load_problems("toy")[:4]]
PROMPTS = [encode_prompt(TOKENIZER, question) for question in QUESTIONS]
PROMPTS[3] = encode_prompt(TOKENIZER, " ".join(QUESTIONS * 2))[-300:]  # prefix caches hold whole blocks only


def requests(n=4, seed=1):
    return [Request(prompt, n, stable_hash(seed, "test", i), 64) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module", params=["hf", "vllm"])
def sampler(request):
    if request.param == "hf":
        return HFSampler(TOY, STOP, CPU, torch.float32)
    if not has_vllm():
        pytest.fail("vLLM does not import; install requirements/cpu.txt")
    return VLLMSampler(TOY, STOP, CPU, torch.float32, 1, Machine(), 448)


def ids(groups):
    found = []
    for group in groups:
        found.append([sample.response_ids for sample in group])
    return found


def flat(groups):
    return list(itertools.chain.from_iterable(groups))


def error(policy, groups):
    """Error of the sampler's log-probs at temperature 0.8, relative to the policy's."""
    responses = rollouts(groups)
    policy.score_old(responses, 0.8)
    sampled = torch.cat([r.sampler_logp for r in responses])
    return relative_error(sampled, torch.cat([r.old_logp for r in responses]))


def rollouts(groups) -> list[common.Rollout]:
    """The samples for PROMPTS as responses."""
    found = []
    for prompt, group in zip(PROMPTS, groups):
        found += [common.Rollout(prompt, *sample) for sample in group]
    return found


def test_a_response_ends_with_the_given_tokens_alone(sampler, monkeypatch):
    """And not with the one that the model's files name."""
    ends = [TOKENIZER.pad_token_id]
    given = ends if isinstance(sampler.stop_ids, list) else torch.tensor(ends)
    monkeypatch.setattr(sampler, "stop_ids", given)
    responses = sum(ids(sampler.generate(requests(), 1.0)), [])
    assert any(STOP[0] in response[:-1] for response in responses)
    assert all(ends[0] not in response[:-1] for response in responses)


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
    greedy = ids(sampler.generate(requests(n=1), 0.0))
    for seed, *truncated in ((9, 1.0, 1), (10, 1e-6, 0)):  # top-k 1 and a tiny top-p take the likeliest token
        assert ids(sampler.generate(requests(n=1, seed=seed), 1.0, *truncated)) == greedy


def test_a_response_does_not_depend_on_its_neighbours(sampler):
    """Requests of one call may differ in the number of responses and in their limits."""
    sizes = [(3, 5), (1, 64), (1, 1), (2, 2)]
    mixed = [Request(prompt, n, stable_hash("mixed", n), limit) for prompt, (n, limit) in zip(PROMPTS, sizes)]
    for request, group in zip(mixed, sampler.generate(mixed, 1.0), strict=True):
        assert len(group) == request.n
        assert ids([group]) == ids(sampler.generate([request], 1.0))
        for r in group:
            assert len(r.response_ids) == request.max_new_tokens or r.finished


def test_responses_whose_keys_and_values_do_not_fit_together_are_the_same(monkeypatch):
    """They are sampled in turns, here one at a time."""
    hf = HFSampler(TOY, STOP, CPU, torch.float32)
    expected = ids(hf.generate(requests(n=2), 1.0))
    monkeypatch.setattr(samplers, "CACHE", 1)
    assert ids(hf.generate(requests(n=2), 1.0)) == expected


def test_logprobs_are_the_trainers_also_after_updates(sampler):
    policy = make_policy()
    original = [(name, tensor.clone()) for name, tensor in policy.named_tensors()]
    groups = sampler.generate(requests(), 0.8)
    assert error(policy, groups) < 1e-5
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for _ in range(2):  # make what was sampled likelier
        for micro in policy.micro_batches(rollouts(groups)):
            logp_T, _ = policy.logprobs(micro, 0.8)
            (-logp_T.sum() / 100).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert error(policy, sampler.generate(requests(), 0.8)) > 1e-2  # the sampler was not told
    sampler.load(policy.named_tensors())
    # the update made large logits; the long prompt's come from the prefix cache if it is not dropped
    assert error(policy, sampler.generate(requests(), 0.8)) < 1e-4
    sampler.load(original)


def test_a_weight_that_was_not_taken_is_an_error(sampler):
    tensors = list(make_policy().named_tensors())
    without_one = [t for t in tensors if "layers.1.mlp.down_proj" not in t[0]]
    assert len(without_one) == len(tensors) - 1
    with pytest.raises(RuntimeError, match="weights"):
        sampler.load(iter(without_one))
    sampler.load(iter(tensors))


@pytest.mark.parametrize("options, expected", [
    # of 0.5, 0.3, 0.15, 0.05 a number below 0.5 draws the first, below 0.8 the second ...
    ((1.0, 1.0, 0), [0, 0, 1, 1, 2, 3]),
    ((1.0, 1.0, 2), [0, 0, 0, 1, 1, 1]),  # 5/8 and 3/8 are left
    ((1.0, 0.5, 0), [0, 0, 0, 0, 0, 0]),  # the first alone reaches 0.5
    ((1.0, 0.6, 0), [0, 0, 0, 1, 1, 1]),  # the token that crosses 0.6 stays
    ((0.5, 1.0, 0), [0, 0, 0, 1, 2, 2]),  # squared: 0.685, 0.247, 0.062, 0.007
    ((0.0, 1.0, 0), [0, 0, 0, 0, 0, 0])])
def test_draw_by_hand(options, expected):
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(6, 1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.94, 0.96], dtype=torch.float64)
    token, logprob = draw(logits, uniform, *options)
    assert token.tolist() == expected
    if options == (1.0, 1.0, 2):
        assert logprob.exp().tolist() == pytest.approx([0.625] * 3 + [0.375] * 3)


@pytest.mark.parametrize("stop", [
    ["e "], ["no such text", "<|im_start|>", "<|endoftext|>"]])
def test_a_text_or_a_special_token_ends_a_response_with_the_token_that_completes_it(sampler, stop):
    """The toy, with a norm that makes every token likely."""
    def sampled(**stop):
        run = SimpleNamespace(args=args, sampler=sampler, tokenizer=TOKENIZER, sampled=set(),
                              log=SimpleNamespace(sampled_tokens=0), generate=None)
        return flat(common.sample(run, 1, problems, 16, **stop))

    args, ends = common.Args(max_new_tokens=100), re.compile("|".join(map(re.escape, stop)))
    problems = [common.Problem("question", id=i, prompt_ids=ids) for i, ids in enumerate(PROMPTS)]
    original = list(make_policy().named_tensors())
    sampler.load((name, tensor * (0.05 if name == "model.norm.weight" else 1)) for name, tensor in original)
    free, ended = sampled(), sampled(stop=stop)
    sampler.load(original)
    for long, short in zip(free, ended, strict=True):
        end, text = 0, ""
        while end < len(long.response_ids) and not ends.search(text):
            text += TOKENIZER.decode(long.response_ids[end])
            end += 1
        assert short.response_ids == long.response_ids[:end]
        assert short.finished == (bool(ends.search(text)) or long.finished)
    assert sum(len(short.response_ids) < len(long.response_ids) for long, short in zip(free, ended)) > 3


def test_two_samples_draw_the_same_numbers():
    """1,000 steps of 8 problems: torch's CPU generator, which takes 32 bits of a seed, repeats streams."""
    seeds = [stable_hash(1, step, problem) for step in range(1000) for problem in range(8)]
    requests = [Request([1], 2, seed, 1) for seed in seeds]
    samples = [(request, request.seed + i) for request in requests for i in range(request.n)]
    first = uniform_numbers(samples, 1, CPU).flatten().tolist()
    assert len(set(first)) == len(first)


def test_a_run_with_a_stale_engine_is_stopped(sampler, tmp_path, monkeypatch):
    """A whole run goes well; one whose second step's weights do not reach the sampler ends there."""
    monkeypatch.setattr("engine.samplers.VLLMSampler", lambda *arguments, **options: sampler)
    flags = dict(sampler="vllm", lr=1e-3)
    lines = run_toy(ttrl, tmp_path / "run", **flags)
    assert len(lines) == 2 and max(line["logp_diff_max"] for line in lines) < 1e-4
    sampler.load(make_policy().named_tensors())
    monkeypatch.setattr(sampler, "load", lambda tensors: None)
    with pytest.raises(UserError, match="sampler and trainer disagree"):
        run_toy(ttrl, tmp_path / "stale", **flags)
    assert len(read_lines(tmp_path / "stale/metrics.jsonl")) == 1


# ------------------------------------- what VLLMSampler passes to vLLM -------------------------------------
# vLLM's CPU build has the Python files of the CUDA build: signatures and arguments are checked without a GPU.
# What the kernels do is not: python -m tools.gpu_smoke.
@pytest.fixture
def constructor(monkeypatch):
    """Stands for vllm.LLM and has its signatures: a call that does not fit them is an error."""
    import vllm
    stand_in = mock.create_autospec(vllm.LLM)
    monkeypatch.setattr(vllm, "LLM", stand_in)
    return stand_in


def gpu_sampler(device="cuda", **flags):
    return VLLMSampler(TOY, [2], torch.device(device), torch.bfloat16, 1, Machine(**flags), 448, dummy=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_engine_knows_every_argument(constructor, monkeypatch, device):
    from vllm.engine.arg_utils import EngineArgs
    monkeypatch.setenv("RANK", "0")
    gpu_sampler(device, tensor_parallel=2, gpu_memory=0.3)
    given = constructor.call_args.kwargs
    assert given.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    EngineArgs(model=TOY, **given)
    expected = dict(tensor_parallel_size=2, max_model_len=448, dtype="bfloat16", load_format="dummy",
                    enable_prefix_caching=True)
    if device == "cuda":
        expected |= dict(gpu_memory_utilization=0.3, enable_sleep_mode=True, disable_custom_all_reduce=True,
                         hf_overrides=dict(head_dtype="float32"))
    assert given | expected == given


def test_a_sync_wakes_weights_first_and_the_cache_last(constructor):
    engine = gpu_sampler()
    llm = constructor.return_value
    llm.collective_rpc.return_value = [set()]
    engine.sleep()
    engine.sleep()
    llm.sleep.assert_called_once_with(level=2)
    llm.reset_mock()
    engine.load([])
    assert llm.method_calls == [
        mock.call.wake_up(tags=["weights"]),
        mock.call.collective_rpc(samplers._load_into_worker, args=(mock.ANY,)),
        mock.call.reset_prefix_cache(),
        mock.call.wake_up(tags=["kv_cache"]),
    ]
    llm.reset_prefix_cache.return_value = False
    with pytest.raises(RuntimeError, match="did not drop its prefix cache"):
        engine.load([])
