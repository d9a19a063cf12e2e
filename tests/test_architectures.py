"""Model types other than Llama's (architectures.json): their own log-probs, or one sentence."""

import functools
import json
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from conftest import ROOT, make_policy, random_rollouts, spy, tiny_model
from equations import log_softmax_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.base import Request, UserError
from engine.run_folder import read_metrics
from engine.logprobs import ChunkedHead, PackedHead, PlainHead
from engine.models import CHUNKED, PACKED, is_fast, load_model, read_config
from engine.options import Machine
from engine.samplers import HFSampler, check_engine, eager_logprobs, load_sampler, sample_probe

CPU = torch.device("cpu")
TYPES = json.loads((ROOT / "tests/architectures.json").read_text())
SHAPE = TYPES.pop("every type")
FLAGS = ("--dataset toy --steps 2 --prompts_per_batch 4 --votes 4 --train_samples 4 --num_minibatches 2 "
         "--lr 1e-2 --max_prompt_tokens 128 --max_new_tokens 48 --eval= --checkpoint_every 0")


def make_model(kind, folder):
    """Save a model of this type with random weights and the toy's tokenizer; returns the folder."""
    torch.manual_seed(0)
    default = AutoConfig.for_model(kind)
    names = set(dir(default)) | set(default.attribute_map)
    for name in ("head_dim", "sliding_window"):
        names -= {name} if isinstance(getattr(type(default), name, None), property) else set()
    shape = {name: value for name, value in (SHAPE | TYPES[kind]).items() if name in names}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).float()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms begin as ones and biases as zeros, which hides what forgets them
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "toy").save_pretrained(folder)
    return folder


def from_eager(folder):
    """The largest difference of the trainer's log-probs from the model's own, eager and without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.config.use_cache = False
    responses = random_rollouts(4, vocabulary=600)
    make_policy(folder).score_old(responses, 1.0)
    own = [log_softmax_rows(model, r, 1.0)[range(r.length), r.response_ids] for r in responses]
    return float((torch.cat(own) - torch.cat([r.old_logp for r in responses])).abs().max())


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(type): a tiny random model of this type."""
    return functools.cache(lambda kind: make_model(kind, tmp_path_factory.mktemp(kind)))


# ------------------------------------------------- the trainer --------------------------------------------
# The first of each list here, all of them in the slow tests
FAST = [*PACKED, *CHUNKED[:3], *[pytest.param(kind, marks=pytest.mark.slow) for kind in CHUNKED[3:]]]


@pytest.mark.parametrize("kind", [*FAST, "gemma2", "gpt_oss", "granite", "llama4_text", "mamba"])
def test_the_trainer_computes_the_models_own_log_probs(folder_of, kind, capsys):
    """In the fast way that models.py names; any other type in the plain way, which a line says."""
    policy = make_policy(folder_of(kind))
    window = policy.model.config.get_text_config().to_dict().get("sliding_window")
    expected = (ChunkedHead, "sdpa") if is_fast(policy.model.config) else (PlainHead, "eager")
    if kind in PACKED and not window:
        expected = PackedHead, "packed"
    assert policy.implementation == expected
    assert (f"{kind}: no test shows a faster way" in capsys.readouterr().out) == (expected[1] == "eager")
    assert from_eager(folder_of(kind)) < 1e-4


def test_a_config_that_scales_logits_is_computed_in_the_plain_way(tmp_path):
    """A type may have an entry that no test has set: what only the model's own code does with it."""
    entries = [(dict(), True), (dict(logit_scale=1), True), (dict(final_logit_softcapping=30.0), False),
               (dict(logits_scaling=8.0), False)]
    for entry, fast in entries:
        assert is_fast(AutoConfig.for_model("llama", **entry)) == fast


# ------------------------------------------------- the sampler --------------------------------------------
@pytest.mark.parametrize("kind", [
    *FAST, "jamba", "qwen3_5_text", "gemma2", "gpt_oss", "granite_swa"])
def test_the_hf_sampler_samples_from_the_model_itself(folder_of, kind):
    """Prompts of uneven length, several responses to each, and limits at which rows are dropped. Padded
    together, or, where padding may reach a recurrent state, one by one."""
    hf, vocabulary = HFSampler(str(folder_of(kind)), [2], CPU, torch.float32), range(30, 600, 7)
    prompts = [list(vocabulary)[:12], [31, 33], list(vocabulary)[20:27], [40] * 5]
    requests = [Request(prompt, 3, i, 4 + 5 * i) for i, prompt in enumerate(prompts)]
    responses, logprobs = sample_probe(hf, requests)
    own = eager_logprobs(load_model(str(folder_of(kind))).eval(), responses)[0]
    assert (logprobs - own).abs().max() < 1e-3
    alone = [hf.generate([request], 1.0)[0] for request in requests]
    assert [r.response_ids for r in responses] == [r.response_ids for group in alone for r in group]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", ["mamba", "recurrent_gemma", "minimax", "xlstm"])
def test_a_type_that_the_hf_sampler_cannot_sample_from_is_one_sentence(folder_of, kind, trained):
    folder = str(folder_of(kind))
    policy = make_policy(folder) if trained else None
    with pytest.raises(UserError, match=f"--sampler hf .*, which is of the type {kind}; give --sampler vllm"):
        load_sampler(folder, CPU, torch.float32, Machine(sampler="hf"), 192, [2], 1, policy)


# ----------------------------------------------------- vLLM -----------------------------------------------
def engine(folder, off=0.0, error=None):
    """Stands for vLLM: samples with transformers, but with weights that are off, or not at all."""
    def shift(groups, requests, temperature):
        for group in groups:
            group[:] = [sample._replace(logprobs=sample.logprobs + off) for sample in group]

    hf = HFSampler(str(folder), [2], CPU, torch.float32)
    spy(hf, "generate", before=mock.Mock(side_effect=error), after=shift)
    return hf


@pytest.mark.parametrize("trained", [True, False])
def test_an_engine_that_computes_something_else_is_refused_before_it_is_used(folder_of, trained):
    folder = folder_of("qwen2")
    policy = make_policy(folder) if trained else None
    machine = Machine(sampler="vllm")
    check_engine(engine(folder), machine, True, policy)
    check_engine(engine(folder, off=0.3), machine, False, policy)  # bfloat16 rounds
    for exact, off in ((True, 0.01), (True, torch.nan), (False, 0.6), (False, torch.nan)):
        with pytest.raises(UserError, match="off those of the trainer for --model"):
            check_engine(engine(folder, off=off), machine, exact, policy)
    with pytest.raises(UserError, match="vLLM does not run .* give --sampler hf. It says: KeyError"):
        check_engine(engine(folder, error=KeyError("x")), machine, True, policy)


def test_an_engine_that_fails_on_one_rank_ends_that_rank(folder_of, monkeypatch):
    """The others are gathering weights: if it told them of its error, all would wait for hours."""
    monkeypatch.setattr("engine.samplers.all_gather", mock.Mock(side_effect=AssertionError("waits")))
    policy = make_policy(folder_of("qwen2"))
    hf = engine(folder_of("qwen2"))
    hf.load = mock.Mock(side_effect=RuntimeError("out of memory"))
    with pytest.raises(UserError, match="out of memory"):
        check_engine(hf, Machine(sampler="vllm"), True, policy)


BY_VLLM = ["olmo2", "gemma2", "mixtral"]
REFUSED = ["gpt_oss", "mamba"]  # by its CPU build


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_VLLM + REFUSED)
def test_the_row_of_a_type(kind, folder_of, tmp_path):
    """Real runs with the real vLLM, in processes that it may change: a small difference or one sentence."""
    for sampler, works in (("hf", kind != "mamba"), ("vllm", kind in BY_VLLM)):
        out = tmp_path / sampler
        command = f"ttrl.py --model {folder_of(kind)} --out {out} --sampler {sampler} {FLAGS}"
        done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, text=True, capture_output=True)
        found = [line["logp_diff_max"] for line in read_metrics(out)]
        assert done.returncode == (0 if works else 2), done.stderr
        assert max(found) < 1e-3 if works else re.search(r"^Error: .*; give --", done.stderr, re.MULTILINE)
    if kind != "mamba":
        assert from_eager(tmp_path / "hf/final") < 1e-4


# --------------------------------------------------- configs ----------------------------------------------
def test_longrope_beyond_its_first_length_is_refused(tmp_path):
    """A longer sequence turns all its positions otherwise, so sampler and trainer would differ."""
    rope = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    tiny_model("Phi3", tmp_path, max_position_embeddings=1024, original_max_position_embeddings=256,
               rope_parameters=rope)
    read_config(str(tmp_path), 128, 128)
    with pytest.raises(UserError, match="must fit the model's context of 256 tokens"):
        read_config(str(tmp_path), 128, 129)
