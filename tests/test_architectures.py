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
from transformers.masking_utils import AttentionMaskInterface

import ttrl
from engine import logprobs, plan
from engine.base import Request, UserError
from engine.run_folder import read_metrics
from engine.logprobs import ChunkedHead, PackedHead, PlainHead
from engine.models import load_model, read_config
from engine.options import make_args
from engine.samplers import HFSampler, check_vllm

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
@pytest.mark.parametrize("kind, head, attention", [
    ("qwen3", PackedHead, "packed"), ("olmo2", ChunkedHead, "sdpa"),
    ("gemma2", PlainHead, "eager"), ("vaultgemma", PlainHead, "eager"),      # sdpa leaves their soft cap out
    ("gpt_oss", ChunkedHead, "eager"), ("granite_swa", ChunkedHead, "eager"),    # sdpa has no sinks
    ("recurrent_gemma", PlainHead, "sdpa"), ("inkling_text", PlainHead, "sdpa"),  # other names, other logits
    ("llama4_text", PlainHead, "sdpa"),                                      # its base_model is itself
    ("mamba", ChunkedHead, "eager"), ("qwen3_5_text", ChunkedHead, "sdpa")])
def test_a_type_is_trained_in_the_fastest_way_that_is_its_own(folder_of, kind, head, attention, capsys):
    policy = make_policy(folder_of(kind))
    assert policy.implementation == (head, attention)
    said = f"{kind}: the trainer uses" in capsys.readouterr().out
    assert said == (policy.implementation not in [(PackedHead, "packed"), (ChunkedHead, "sdpa")])
    assert from_eager(folder_of(kind)) < 1e-4


def test_a_real_soft_cap_and_a_real_window_show_in_the_small_copy(tmp_path, monkeypatch):
    """Gemma 2's own cap, 50, with weights as they are initialised; a window longer than what is measured."""
    tiny_model("Gemma2", tmp_path / "gemma", head_dim=16, initializer_range=0.02, attn_logit_softcapping=50.0,
               final_logit_softcapping=None)
    assert make_policy(tmp_path / "gemma").implementation == (ChunkedHead, "eager")
    tiny_model("Mistral", tmp_path / "mistral", sliding_window=100, num_hidden_layers=8)
    model = load_model(str(tmp_path / "mistral"))
    assert logprobs.small_copy(model).config.num_hidden_layers == 2
    assert logprobs.fastest_exact_implementation(model, False, False, 101) == (ChunkedHead, "sdpa")
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", lambda *arguments, **options: None)
    assert logprobs.fastest_exact_implementation(model, False, False, 101) == (ChunkedHead, "eager")
    assert logprobs.fastest_exact_implementation(model, False, False, 100) == (ChunkedHead, "sdpa")


def test_a_wrong_kernel_is_not_used(folder_of, monkeypatch, capsys):
    def wrong(module, query, key, value, attention_mask, **options):
        out, weights = right(module, query, key, value, attention_mask, **options)
        return out * 1.01, weights

    right = logprobs.packed_attention
    monkeypatch.setitem(logprobs.AttentionInterface._global_mapping, "packed", wrong)
    assert make_policy(folder_of("qwen2")).implementation == (ChunkedHead, "sdpa")
    assert "log-probs with packed rows and packed attention: 0.0" in capsys.readouterr().out
    monkeypatch.setitem(logprobs.AttentionInterface._global_mapping, "sdpa", wrong)
    assert make_policy(folder_of("qwen2")).implementation == (ChunkedHead, "eager")


@pytest.mark.parametrize("compiled, said", [
    (lambda layer: lambda *args, **options: layer(*args, **options) * 1.01, "AssertionError Tensor"),
    (lambda layer: {}["gcc"], "KeyError 'gcc'")])
def test_layers_that_compile_badly_are_not_compiled(monkeypatch, capsys, compiled, said):
    monkeypatch.setattr(torch, "compile", lambda layer, dynamic: compiled(layer))
    assert not make_policy(compile=True).compiled
    assert f"--compile is left out, since compiled layers fail a test: {said}" in capsys.readouterr().out


def test_a_type_that_no_way_computes_is_one_sentence(folder_of, monkeypatch):
    monkeypatch.setattr(PlainHead, "rows", staticmethod(ChunkedHead.rows))
    monkeypatch.setattr(logprobs, "AGREES", -1)
    with pytest.raises(UserError, match="--model is of the type olmo2, whose own log-probs the trainer "):
        make_policy(folder_of("olmo2"))


# ------------------------------------------------- the sampler --------------------------------------------
RECURRENT = ["qwen3_next", "qwen3_5_text", "kimi_linear", "lfm2", "nemotron_h", "jamba", "falcon_h1",
             "granitemoehybrid", "olmo_hybrid"]


@pytest.mark.parametrize("kind", [
    *RECURRENT, "gemma2", "gpt_oss", "gemma4_text", "deepseek_v3", "mistral", "gpt2", "bloom"])
def test_the_hf_sampler_samples_from_the_model_itself(folder_of, kind):
    """Prompts of uneven length, several responses to each, and limits at which rows are dropped."""
    hf, vocabulary = HFSampler(str(folder_of(kind)), [2], CPU, torch.float32), range(30, 600, 7)
    prompts = [list(vocabulary)[:12], [31, 33], list(vocabulary)[20:27], [40] * 5]
    requests = [Request(prompt, 3, i, 4 + 5 * i) for i, prompt in enumerate(prompts)]
    responses, found = logprobs.sample_probe(hf, requests)
    own = logprobs.eager_logprobs(load_model(str(folder_of(kind))).eval(), responses)[0]
    assert (found - own).abs().max() < 1e-3
    alone = [hf.generate([request], 1.0)[0] for request in requests]
    assert [r.response_ids for r in responses] == [r.response_ids for group in alone for r in group]


@pytest.mark.parametrize("kind", ["mamba", "recurrent_gemma", "minimax", "xlstm"])
def test_a_type_that_the_hf_sampler_cannot_sample_from_is_one_sentence(folder_of, kind):
    with pytest.raises(UserError, match=f"{kind}, whose own log-probs --sampler hf does not compute; give -"):
        HFSampler(str(folder_of(kind)), [2], CPU, torch.float32)


def test_prompts_that_padding_would_change_are_computed_one_by_one(folder_of, monkeypatch, capsys):
    """A model that reads padding like any other token, as some recurrent layers do."""
    def forward(self, input_ids, attention_mask=None, **options):
        if attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        return original(self, input_ids=input_ids, attention_mask=attention_mask, **options)

    model = load_model(str(folder_of("qwen3")))
    original = type(model).forward
    monkeypatch.setattr(type(model), "forward", forward)
    hf = HFSampler(str(folder_of("qwen3")), [2], CPU, torch.float32)
    assert not hf.pad_prompts and "uses one prompt at a time and fused attention" in capsys.readouterr().out
    responses, found = logprobs.sample_probe(hf, [Request([31, 33, 40][:n], 2, n, 5) for n in (3, 1, 2)])
    assert (found - logprobs.eager_logprobs(model.eval(), responses)[0]).abs().max() < 1e-4


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
    model = policy.model if trained else load_model(str(folder))
    check_vllm(engine(folder), model, True, 1e-3, policy)
    check_vllm(engine(folder, off=0.3), model, False, 1e-3, policy)  # bfloat16 rounds
    for exact, off in ((True, 0.01), (True, torch.nan), (False, 0.6), (False, torch.nan)):
        with pytest.raises(UserError, match="off those of transformers for --model"):
            check_vllm(engine(folder, off=off), model, exact, 1e-3, policy)
    with pytest.raises(UserError, match="vLLM does not run .* give --sampler hf. It says: KeyError"):
        check_vllm(engine(folder, error=KeyError("x")), model, True, 1e-3, policy)


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


@pytest.mark.parametrize("kind", ["mamba", "gemma3n_text", "gemma4_text"])
def test_a_type_without_the_sizes_of_a_dense_decoder_has_no_plan_but_runs(folder_of, kind, capsys):
    options = dict(max_prompt_tokens=64, max_new_tokens=64, gpus=1, gpu_gib=80)
    config = read_config(str(folder_of(kind)), 64, 64)
    with pytest.raises(UserError, match=f"type {kind}, of which --plan does not know the memory: "):
        plan.show(make_args(ttrl.Args, options | dict(plan=True)), config)
    memory = plan.choose_memory_settings(make_args(ttrl.Args, options), config, True)
    assert memory == dict(micro_tokens=16384, gradient_checkpointing=True)
    assert f"Warning: --model is of the type {kind}, of which --plan does not know" in capsys.readouterr().out
