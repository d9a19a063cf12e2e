"""--plan: its terms by hand, what it says of runs that do not fit, and that docs/plan.md is up to date."""

import re

import pytest
import torch
from conftest import ROOT
from transformers import AutoConfig

import ttrl
from engine import plan as planning
from engine.base import UserError
from engine.options import flat, with_values
from engine.plan import GIB, Plan, check_plan

SHAPES = {  # from config.json: type, hidden, inner, layers, heads, KV heads, vocabulary, tied head
    "Qwen2.5-Math-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-Math-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 151936, True),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 151936, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False)}


def config_of(name: str):
    kind, hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    return AutoConfig.for_model(kind, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                                num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128,
                                vocab_size=vocabulary, tie_word_embeddings=tied)


def plan_of(name: str, gpus: int, gib: float, **flags):
    return Plan(with_values(ttrl.Args, dict(gpus=gpus, gpu_gib=gib) | flags), config_of(name))


def test_the_terms_of_each_phase():
    """Qwen2.5-Math-7B on 8 GPUs. A micro-batch has 4 sequences of 4,096 tokens."""
    weights, head, tokens = 7_615_616_512, 152_064 * 3584, 16384
    layer = (weights - 2 * head) // 28  # the last norm is shared out among the layers
    made = plan_of("Qwen2.5-Math-7B", 8, 80)
    assert made.weights == weights
    phases = made.phases()
    assert phases["sampling"] == {"weights and Adam": 12 * weights / 8, "reference": 2 * weights / 8,
                                  "vLLM": 40 * GIB}
    assert phases["update"] == {
        "weights and Adam": 12 * weights / 8, "reference": 2 * weights / 8, "gradients": 4 * weights / 8,
        "gathered weights": 2 * (2 * head + 2 * layer),
        "activations": 2 * tokens * (28 * 3584 + 8 * 3584 + 4 * 18944 + 6 * 3584 + 4 * 512),
        "logits": 20 * 2 ** 26, "gradient of the head": 4 * head, "vLLM": GIB}
    assert phases["sync"]["vLLM"] == GIB + 2 * weights
    # keys and values of a token: 2 x 28 layers x 512 x 2 bytes; 40 GiB hold weights and 3 GiB, too
    assert made.cached_sequences() == (40 * GIB - 2 * weights - 3 * GIB) // (57_344 * 4096)


@pytest.mark.parametrize("flags, phase, what, expected", [
    (dict(kl_coef=0.0), "update", "reference", 0),
    (dict(offload="reference"), "update", "reference", 0),
    (dict(offload="optimizer"), "update", "gradients", 0),
    (dict(dtype="float32"), "update", "reference", 4 * 7_615_616_512 / 8),
    (dict(tensor_parallel=4), "sync", "vLLM", GIB + 2 * 7_615_616_512 / 4),
    (dict(gpu_memory=0.25), "sampling", "vLLM", 20 * GIB),
])
def test_a_flag_changes_its_term(flags, phase, what, expected):
    assert plan_of("Qwen2.5-Math-7B", 8, 80, **flags).phases()[phase][what] == expected


@pytest.mark.parametrize("gib, flags, tokens", [
    (80, {}, 16384), (36, {}, 8192), (36, dict(micro_tokens=9000), 9000)])
def test_micro_batches_are_as_large_as_fit(gib, flags, tokens):
    """Of 1.5B, without recomputation."""
    flags = dict(gradient_checkpointing="off", gpu_memory=0.3) | flags
    assert plan_of("Qwen2.5-Math-1.5B", 8, gib, **flags).micro_tokens == tokens


@pytest.mark.parametrize("name, gpus, gib, flags, words", [
    ("Qwen2.5-Math-7B", 4, 40, dict(), "sampling takes .* GiB of each GPU's 40, .* --offload optimizer"),
    ("Qwen3-8B", 8, 80, dict(gradient_checkpointing="off", micro_tokens=16384),
     "update takes .*; try --gradient_checkpointing on, a smaller --micro_tokens"),
    ("Qwen2.5-32B", 8, 68, dict(offload="optimizer", gpu_memory=0.9), "sync takes .* --tensor_parallel"),
    ("Qwen2.5-Math-7B", 8, 80, dict(gpu_memory=0.2), "no room for a sequence of 4,096 tokens; try a larger"),
])
def test_what_does_not_fit_is_named_with_what_may_help(name, gpus, gib, flags, words):
    made = plan_of(name, gpus, gib, **flags)
    assert re.match(f"It does not fit: .*{words}", made.verdict())
    with pytest.raises(UserError, match="It does not fit"):
        check_plan(made.args, config_of(name))


def test_a_run_is_planned_for_the_gpu_it_has(monkeypatch):
    class Gpu:
        total_memory = 24 * GIB

    monkeypatch.setattr(planning.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Gpu)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="each GPU's 24, .* --plan shows the memory of every phase"):
        check_plan(ttrl.Args(), config_of("Qwen2.5-Math-7B"))
    monkeypatch.setattr(Gpu, "total_memory", 100 * GIB)
    assert check_plan(ttrl.Args(), config_of("Qwen2.5-Math-7B")) == 16384


def test_the_table_of_the_page_is_the_plans():
    """docs/plan.md, a row for every model and machine."""
    page = (ROOT / "docs/plan.md").read_text()
    rows = re.findall(r"\| (\S+) \| (\d) x (\d+) GB \| (.*?) \| ?(.*) \|\n", page)
    assert len(rows) == 4 * len(SHAPES)
    for name, gpus, gb, flags, cells in rows:
        values = {}
        for flag, value in re.findall(r"--(\S+) ([^ `]+)", flags):
            values[flag] = type(flat(ttrl.Args())[flag])(value)
        made = plan_of(name, int(gpus), int(gb) * 0.98, **values)
        assert bool(made.misfit()) == (flags == "does not fit"), (name, gpus, made.verdict())
        numbers = [sum(parts.values()) / GIB for parts in made.phases().values()]
        expected = " | ".join([f"{number:.0f}" for number in [*numbers, made.cached_sequences()]])
        assert made.misfit() or cells == expected, (name, gpus)
