"""--plan: its terms by hand, what it says of runs that do not fit, and its table in docs."""

import re
import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from conftest import ROOT
from transformers import AutoConfig

import evol_rl
import ttrl
from engine import plan as planning
from engine.base import UserError
from engine.options import options_dict, make_args
from engine.plan import GIB
from tools.plan import ASLEEP, Plan

SHAPES = {  # from config.json: type, hidden, inner, layers, heads, KV heads, vocabulary, tied head
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-Math-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-Math-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 151936, True),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 151936, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False)}


def config_of(name: str):
    kind, hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    return AutoConfig.for_model(kind, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                                num_attention_heads=heads, num_key_value_heads=kv_heads,
                                head_dim=64 if hidden == 896 else 128,
                                vocab_size=vocabulary, tie_word_embeddings=tied)


def plan_of(name: str, gpus: int, gib: float, script=ttrl, **flags):
    return Plan(make_args(script.Args, dict(gpus=gpus, gpu_gib=gib, plan=True) | flags), config_of(name))


# ----------------------------------------------------- GPUs ------------------------------------------------
@pytest.mark.parametrize("name, tokens, flags, measured", [
    ("Qwen2.5-0.5B", 8520, dict(sampler="hf", max_new_tokens=256), 25.8),
    ("Qwen2.5-0.5B", 9500, dict(sampler="hf", max_new_tokens=256, plain=True), 48.8),
    ("Qwen2.5-Math-1.5B", 8520, dict(max_new_tokens=1024), 61.6)])
def test_the_update_takes_what_one_h200_took(name, tokens, flags, measured, monkeypatch):
    """docs/measured.md, by the tokens that the micro-batches there had, and its chunks of logits."""
    monkeypatch.setitem(planning.CHUNK, "cuda", 2 ** 26)
    flags, config = dict(gpus=1, plan=True, max_prompt_tokens=41) | flags, config_of(name)
    args = make_args(ttrl.Args, flags)
    made = planning.update_memory(args, config, planning.parameters_of(config), tokens, "off")
    assert (sum(made.values()) + planning.OVERHEAD) / GIB == pytest.approx(measured, rel=0.025)


@pytest.mark.parametrize("flags, phase, what, expected", [
    (dict(kl_coef=0.0), "update", "reference", 0),
    (dict(offload="reference"), "update", "reference", 0),
    (dict(offload="optimizer"), "update", "gradients", 0),
    (dict(offload="optimizer"), "sync", "weights and Adam", 0),
    (dict(dtype="float32"), "update", "reference", 4 * 7_615_616_512 / 8),
    (dict(tensor_parallel=4), "sync", "sampler", ASLEEP + 2 * 7_615_616_512 / 4),
    (dict(gpu_memory=0.25), "sampling", "sampler", 20 * GIB),
    (dict(plain=True, sampler="vllm"), "update", "logits", 17.5 * 16384 * 152_064),
    (dict(sampler="hf"), "update", "sampler", 2 * 7_615_616_512),  # it never sleeps
    (dict(num_minibatches=7, micro_tokens=99999), "update", "logits", 17.5 * 2 ** 27)])
def test_a_flag_changes_its_term(flags, phase, what, expected):
    made = plan_of("Qwen2.5-Math-7B", 8, 80, **dict(gradient_checkpointing="on") | flags)
    assert made.phases()[phase][what] == expected


@pytest.mark.parametrize("name, gpus, gib, flags, idle, update, sync", [
    ("Qwen2.5-0.5B", 1, 23.6, {}, 6.4, 11.9, 9.1),
    ("Qwen2.5-Math-1.5B", 1, 80, {}, 20.1, 30.9, 24.9),
    ("Qwen2.5-Math-7B", 8, 80, {}, 12.4, 28.3, 29.8),
    ("Qwen2.5-3B", 16, 79.2, dict(gradient_checkpointing="off", micro_tokens=4096), 2.5, 26.1, 10.4),
    ("Qwen2.5-Math-7B", 1, 79.2, dict(offload="optimizer"), 0, 11.9, 17.3),
    ("Llama-3.1-8B", 4, 39.4, dict(offload="optimizer"), 0, 12.4, 18.2),
    ("Qwen2.5-Math-1.5B", 1, 79.2, dict(plain=True, sampler="vllm", micro_tokens=4096), 20.1, 38.1, None)])
def test_the_plan_is_within_a_tenth_of_a_simulation(name, gpus, gib, flags, idle, update, sync, monkeypatch):
    """GiB that a simulation counted: the real Policy on fake tensors, and 1 GiB for a sleeping vLLM. One
    prompt of 1,024 tokens with four responses of 3,072 are 13,308 tokens in packed rows."""
    monkeypatch.setitem(planning.CHUNK, "cuda", 2 ** 26)
    monkeypatch.setattr(planning, "ASLEEP", GIB)
    monkeypatch.setattr("tools.plan.ASLEEP", GIB)
    made = plan_of(name, gpus, gib, **dict(gradient_checkpointing="on", micro_tokens=13308) | flags)
    phases = {phase: sum(parts.values()) / GIB for phase, parts in made.phases().items()}
    stays = sum(made.phases()["update"][name] for name in ("weights and Adam", "reference")) / GIB
    assert stays == pytest.approx(idle, abs=0.2)
    assert phases["update"] == pytest.approx(update, rel=0.1)
    assert sync is None or phases["sync"] == pytest.approx(sync, rel=0.1)


@pytest.mark.parametrize("name, gpus, gib, flags, expected", [
    ("Qwen2.5-Math-1.5B", 8, 80, {}, (16384, "off")),
    ("Qwen2.5-Math-1.5B", 8, 36, {}, (6144, "off")),
    ("Qwen2.5-Math-1.5B", 8, 24, {}, (16384, "on")),
    ("Qwen2.5-Math-7B", 8, 80, {}, (6144, "off")),
    ("Qwen2.5-32B", 16, 80, {}, (16384, "on")),  # the sync that does not fit is no reason for small ones
    ("Qwen2.5-Math-1.5B", 1, 39.4, {}, (8192, "on")),  # nor is sampling
    ("Qwen2.5-Math-7B", 4, 24, {}, (1, "on")),
    ("Qwen2.5-Math-7B", 1, 80, dict(offload="optimizer"), (16384, "on")),  # weights travel each time
    ("Qwen2.5-Math-1.5B", 8, 36, dict(gradient_checkpointing="off", gpu_memory=0.3), (6144, "off")),
    ("Qwen2.5-Math-1.5B", 8, 36, dict(gradient_checkpointing="off", micro_tokens=9000), (9000, "off")),
    ("Qwen2.5-Math-1.5B", 8, 80, dict(gradient_checkpointing="on"), (16384, "on"))])
def test_activations_are_kept_if_what_ranks_get_fits(name, gpus, gib, flags, expected):
    """Else micro-batches are as large as fit; only what the update takes matters."""
    made = plan_of(name, gpus, gib, **flags)
    assert (made.micro_tokens, made.recompute) == expected
    assert ("have one sequence (" in made.table()) == (expected[0] == 1)


@pytest.mark.parametrize("name, gpus, gib, flags, words", [
    ("Qwen2.5-Math-7B", 8, 80, {}, "--tensor_parallel 2 samples a step in 14 s, 1 in 20 s"),
    ("Qwen2.5-Math-7B", 8, 80, dict(tensor_parallel=2), ""),  # 4 ranks each schedule 256 sequences: 15 s
    ("Qwen2.5-Math-1.5B", 8, 80, {}, ""),                     # the host would take twice what reading saves
    ("Qwen2.5-Math-7B", 1, 80, dict(offload="optimizer"), ""),  # one GPU cannot share an engine
    ("Qwen2.5-Math-7B", 8, 40, dict(sampler="hf"), "")])
def test_engines_of_more_gpus_are_advised_by_time(name, gpus, gib, flags, words):
    advice = plan_of(name, gpus, gib, **flags).parallel_advice()
    assert bool(advice) == bool(words) and re.search(words, advice), advice


def test_a_models_own_embedder_has_a_phase(tmp_path):
    """8 texts of 12,288 tokens: 3 x 9,728 + 4 x 2,560 numbers of a token beside the weights, in bfloat16."""
    config_of("Qwen3-4B").save_pretrained(tmp_path)
    made = plan_of("Qwen3-4B", 8, 79.2, script=evol_rl, embedder=str(tmp_path))
    parts = made.phases()["vote"]
    assert parts[str(tmp_path)] == 2 * (made.weights + 8 * 12288 * (3 * 9728 + 4 * 2560))
    assert parts["sampler"] == ASLEEP and "vote" in made.table().splitlines()[1]
    for flags in (dict(embedder="words"), dict(novelty=False)):
        assert "vote" not in plan_of("Qwen3-4B", 8, 79.2, script=evol_rl, **flags).phases()


# --------------------------------------------- disk and host memory ----------------------------------------
@pytest.mark.parametrize("flags, disk, host", [
    ({}, 3 * 12 + 2, 0),  # bytes of a parameter: --keep 2 and the one that is being written; the final model
    (dict(keep=1, offload="optimizer"), 2 * 12 + 2, 18),
    (dict(checkpoint_every=0, offload="optimizer", kl_coef=0.0), 12 + 2, 16),  # one on a signal
    (dict(offload="reference"), 3 * 12 + 2, 2)])
def test_disk_and_host_memory(flags, disk, host):
    made = plan_of("Qwen2.5-Math-7B", 8, 80, **flags)
    assert (made.disk, made.host) == (disk * made.weights, host * made.weights)
    assert f"take {disk * made.weights / 1e9:,.1f} GB" in made.table()


# ------------------------------------------------------ a run ----------------------------------------------
def test_a_run_chooses_for_the_gpu_it_has(monkeypatch):
    class Gpu:
        total_memory = 24 * GIB

    config = config_of("Qwen2.5-Math-7B")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Gpu)
    monkeypatch.setattr("engine.options.has_vllm", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = make_args(ttrl.Args, {})
    chosen = planning.choose_memory_settings(args, config, True)
    assert chosen == dict(micro_tokens=1, gradient_checkpointing=True)
    monkeypatch.setattr(Gpu, "total_memory", 100 * GIB)
    chosen = planning.choose_memory_settings(args, config, True)
    assert chosen == dict(micro_tokens=6144, gradient_checkpointing=False)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "minicpm3"])
def test_experts_and_latent_attention_are_refused_with_vllm_on_a_gpu(monkeypatch, kind):
    monkeypatch.setattr(planning, "parameters_of", mock.Mock(side_effect=ValueError("not counted")))
    for config, sampler in ((kind, "hf"), ("llama", "vllm"), (kind, "vllm")):
        with pytest.raises(UserError, match="hf") if (config, sampler) == (kind, "vllm") else nullcontext():
            planning.choose_memory_settings(make_args(ttrl.Args, dict(sampler=sampler)),
                                            AutoConfig.for_model(config), True)


@pytest.mark.parametrize("flags, expected", [
    ({}, (16384, False)), (dict(gradient_checkpointing="on", micro_tokens=500), (500, True))])
def test_without_a_gpu_nothing_is_planned(flags, expected):
    memory = planning.choose_memory_settings(make_args(ttrl.Args, flags), None, False)
    assert tuple(memory.values()) == expected


def test_the_tool_prints_what_plan_prints():
    """It takes a script and its flags; the exit code is 1 if the run does not fit."""
    command = "-m tools.plan ttrl.py --gpus 1 --gpu_gib 1 --sampler hf".split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "It does not fit: sampling takes" in done.stdout, done.stderr


def test_the_table_of_the_page_is_the_plans():
    """docs/measured.md, a row for every model and machine."""
    page = (ROOT / "docs/measured.md").read_text()
    rows = re.findall(r"\| (\S+) \| (\d) x (\d+) GB \| (.*?) \| ?(.*) \|\n", page)
    assert len(rows) == 4 * 6
    for name, gpus, gb, flags, cells in rows:
        values = {}
        for flag, value in re.findall(r"--(\S+) ([^ `]+)", flags):
            values[flag] = type(options_dict(ttrl.Args())[flag])(value)
        made = plan_of(name, int(gpus), int(gb) * 0.98, **values)
        assert bool(made.misfit()) == (flags == "does not fit"), (name, gpus, made.misfit())
        numbers = [sum(parts.values()) / GIB for parts in made.phases().values()]
        room, given = made.cached(made.machine.tensor_parallel)
        texts = [f"{number:.0f}" for number in numbers] + [f"{room} of {given}"]
        assert made.misfit() or cells == " | ".join(texts), (name, gpus, texts)
