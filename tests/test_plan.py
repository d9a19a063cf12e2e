"""The plan against a simulation of the real update, against hand-worked numbers, and what it says.

The simulation runs engine/policy.py itself on fake tensors (tools/simulate_memory.py), with few layers and
extrapolated, and once with all of them."""

import dataclasses
import random
import types

import pytest
import torch

from engine import plan as planning
from engine.base import UserError
from engine.plan import plan, plan_from_args
from engine.policy import plan_micro_batches
from engine.sizes import (
    GIB, Options, activations, checkpoint_bytes, host_bytes, kv_bytes_per_token, kv_sequences,
    layer_activations, parameters_on_meta, resident, scoring_moments, shape_of, total, update_moments)
from tools.simulate_memory import SHAPES, config_of, extrapolated, simulate

torch.set_num_threads(1)
FULL = "qwen2.5-math-1.5b qwen2.5-math-7b qwen3-4b llama-3.1-8b".split()


# -------------------------------------------- plan and simulation -------------------------------------------
def compare(config, peaks, options: Options) -> None:
    """The aim is 10%; the formulas reach 1%, so 3% guards them. Here gradients are there in all phases."""
    s, tokens = shape_of(config), peaks.tokens
    stays = total(resident(s, options, gradients=True))
    assert stays == pytest.approx(peaks.live["built"], rel=0.001)
    scoring = scoring_moments(s, options, tokens["computed"], tokens["responses"])
    if options.kl_coef:
        assert stays + max(map(total, scoring)) == pytest.approx(peaks.peak["scoring"], rel=0.03)
    update = update_moments(s, options, tokens["computed"], tokens["padded"], tokens["responses"])
    assert stays + max(map(total, update)) == pytest.approx(peaks.peak["backward"], rel=0.03)
    assert peaks.peak["step"] <= peaks.peak["backward"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("shape", FULL)
def test_plan_is_the_simulated_peak(shape, ranks, checkpointing):
    """A full micro-batch of 5 x 3,200 tokens."""
    peaks = extrapolated(shape, ranks=ranks, checkpointing=checkpointing)
    options = Options(ranks=ranks, gradient_checkpointing="on" if checkpointing else "off")
    compare(config_of(shape), peaks, options)


def test_all_layers():
    """A whole model, without extrapolation."""
    config = config_of("llama-3.2-1b")
    compare(config, simulate(config, ranks=8, checkpointing=True), Options(ranks=8))


@pytest.mark.parametrize("shape,ranks,micro,options", [
    ("qwen3-8b", 8, dict(rows=1, row_tokens=13312, prompt_tokens=1024), dict()),  # EVOL-RL: 12k tokens
    ("qwen2.5-math-1.5b", 1, dict(rows=1, row_tokens=600), dict()),
    ("qwen3-4b", 8, dict(entropy=True), dict(entropy_coef=0.01)),
    ("qwen2.5-math-7b", 8, dict(reference=False), dict(kl_coef=0.0)),
    ("llama-3.1-8b", 8, dict(rows=4, row_tokens=1024, plain=True, entropy=True), dict(engine="plain")),
    ("qwen2.5-math-1.5b", 1, dict(rows=1, row_tokens=4096, plain=True, entropy=True), dict(engine="plain")),
])
def test_other_micro_batches(shape, ranks, micro, options):
    config = config_of(shape, layers=4)
    peaks = simulate(config, ranks=ranks, checkpointing=True, **micro)
    compare(config, peaks, Options(ranks=ranks, **options))


def test_ranks_offload_and_recomputation():
    s = shape_of(config_of("qwen2.5-math-7b"))
    assert total(resident(s, Options(), True)) == 18 * s.weights  # 4 + 4 + 8, and 2 of the reference
    assert total(resident(s, Options(ranks=8, kl_coef=0), True)) == 2 * s.weights
    assert total(resident(s, Options(offload="optimizer"), True)) == 4 * s.head  # a matrix on its way
    kept, again = activations(s, 2, 4096, False), activations(s, 2, 4096, True)
    assert kept == 28 * layer_activations(s, 2, 4096, 4096) and again < kept / 14


# ------------------------------------------------- by hand --------------------------------------------------
@pytest.mark.parametrize("shape", SHAPES)
def test_parameters(shape):
    config = config_of(shape)
    assert shape_of(config).weights == parameters_on_meta(config)
    assert shape_of(config).exact


def test_hand_worked_numbers():
    seven, four, eight = (shape_of(config_of(name)) for name in FULL[1:])
    assert seven.weights == 7_615_616_512 and eight.weights == 8_030_261_248
    # keys and values: 2 x layers x KV heads x 128 x 2 bytes
    assert kv_bytes_per_token(seven, Options()) == 57_344
    assert kv_bytes_per_token(four, Options()) == 147_456
    assert kv_bytes_per_token(eight, Options()) == 131_072
    assert kv_bytes_per_token(seven, Options(ranks=4, tensor_parallel=4)) == 57_344 // 4
    assert checkpoint_bytes(seven) == 91_387_398_144  # 85 GiB
    # one layer, one token: norms 2 x 8 x 3584, MLP 8 x 18944, packed output 2 x 3584,
    # attention 2 x (q and output 2 x 3584, k and v 2 x 512) and log-sum-exp 4 x 28
    assert layer_activations(seven, 2, 1, 1) == 57_344 + 151_552 + 7_168 + 16_384 + 112
    # 40 GiB less 14.2 of weights less 3: 22.8 GiB of KV cache, sequences of 4,096 tokens take 0.21875 GiB
    assert kv_sequences(seven, Options(gpu_gib=80)) == int((40 - 2 * 7_615_616_512 / GIB - 3) / 0.21875)


def test_host_memory_of_a_32b_on_8_ranks():
    """One bf16 file, a bf16 copy on rank 0 while saving, 8 processes; 8 float32 copies would be 976."""
    s = shape_of(config_of("qwen2.5-32b"))
    assert host_bytes(s, Options(ranks=8)) / GIB == pytest.approx(61 + 61 + 24, abs=1)
    assert host_bytes(s, Options(ranks=8, offload="optimizer")) / GIB == pytest.approx(146 + 488 + 61, abs=2)


def test_the_transformers_sampler_is_tried_in_float32_on_every_rank():
    s = shape_of(config_of("qwen2.5-math-1.5b"))
    more = host_bytes(s, Options(ranks=8, engine="hf")) - host_bytes(s, Options(ranks=8))
    assert more == 8 * 4 * s.weights
    assert host_bytes(s, Options(ranks=8, engine="plain")) == host_bytes(s, Options(ranks=8))


def test_rates_are_the_ceilings_of_the_benchmarks(monkeypatch):
    """One H200, 1.5B, responses of 3k tokens: 98,600 trained tokens/s, 80,900 decoded with 256 sequences."""
    monkeypatch.setattr(planning, "MFU", 1.0)
    monkeypatch.setattr(planning, "BANDWIDTH_SHARE", 1.0)
    s = shape_of(config_of("qwen2.5-math-1.5b"))
    o = Options(gpu="NVIDIA H200", gpu_gib=140, max_prompt_tokens=112)
    assert 989e12 / planning.flops_per_token(s, 3072) == pytest.approx(98_600, rel=0.01)
    assert planning.decode_rate(s, o) == pytest.approx(80_900, rel=0.01)
    assert planning.gpu_speed(Options(gpu_gib=79.2))[0] == "H100"
    assert planning.gpu_speed(Options(gpu_gib=24))[0] == "RTX 4090"


def test_largest_micro_batch_is_what_the_policy_makes():
    generator = random.Random(0)
    for _ in range(200):
        ranks, rows = generator.choice([1, 2, 8]), generator.randint(1, 64)
        o = Options(micro_tokens=generator.choice([512, 4096, 16384]), ranks=ranks)
        lengths = [generator.randint(2, o.full_length) for _ in range(rows)]
        micros = [m for rank in plan_micro_batches(lengths, ranks, o.micro_tokens) for m in rank if m]
        for micro in micros:
            assert max(lengths[i] for i in micro) * len(micro) <= o.largest_micro_batch(rows)


# ------------------------------------------------ what it says ----------------------------------------------
RECIPES = [  # shape, GPUs, GiB of each, options; and whether it also fits without recomputation
    ("qwen2.5-math-7b", 8, 79.2, dict(), False),                               # TTRL, SCRL
    ("qwen2.5-math-7b", 8, 79.2, dict(kl_coef=0.0), False),                    # Dynamic RL
    ("qwen3-8b", 8, 79.2, dict(max_new_tokens=12288), False),                  # EVOL-RL
    ("qwen3-4b", 8, 79.2, dict(max_new_tokens=12288), False),
    ("qwen3-4b", 8, 79.2, dict(), False),                                      # RESTRAIN
    ("llama-3.1-8b", 8, 79.2, dict(), False),
    ("qwen2.5-3b", 8, 79.2, dict(), False),                                    # SCRL
    ("qwen2.5-math-1.5b", 2, 79.2, dict(), True),                              # TTRL, MATH-500
    ("qwen2.5-math-1.5b", 1, 79.2, dict(), False),
    ("qwen2.5-math-1.5b", 8, 39.4, dict(), False),                             # ETTRL
    ("llama-3.2-1b", 8, 39.4, dict(), True),                                   # SCRL
]


@pytest.mark.parametrize("shape,ranks,gib,options,without", RECIPES)
def test_recipes_fit_with_recomputation(shape, ranks, gib, options, without):
    on = plan(config_of(shape), Options(ranks=ranks, gpu_gib=gib, **options))
    assert on.fits and not on.advice, on.verdict()
    off = plan(config_of(shape), Options(ranks=ranks, gpu_gib=gib, gradient_checkpointing="off", **options))
    assert off.fits == without
    if not without:
        assert off.verdict().endswith("it fits with --gradient_checkpointing on.")
        with pytest.raises(UserError, match="update takes .* GiB a GPU"):
            off.check()


@pytest.mark.parametrize("shape,ranks,gib,flag", [
    ("qwen2.5-math-1.5b", 1, 23.6, "offload"),
    ("qwen2.5-math-7b", 4, 39.4, "offload"),
    ("qwen2.5-math-7b", 8, 23.6, "offload"),
    ("qwen3-4b", 1, 79.2, "gpu_memory"),
    ("qwen2.5-32b", 8, 79.2, "tensor_parallel"),
    ("qwen2.5-32b", 16, 79.2, "tensor_parallel"),
])
def test_advice_makes_it_fit(shape, ranks, gib, flag):
    made = plan(config_of(shape), Options(ranks=ranks, gpu_gib=gib))
    assert not made.fits and flag in made.advice, made.verdict()
    assert plan(config_of(shape), made.advised()).fits
    assert f"--{flag}" in made.verdict()


@pytest.mark.parametrize("shape,ranks,gib,host", [
    ("qwen2.5-math-1.5b", 1, 23.6, 35), ("qwen2.5-math-7b", 4, 39.4, 168), ("llama-3.1-8b", 4, 39.4, 177),
    ("qwen3-8b", 4, 39.4, 180)])
def test_the_smallest_gpus_of_the_readme(shape, ranks, gib, host):
    """No other flag is advised beside --offload."""
    made = plan(config_of(shape), Options(ranks=ranks, gpu_gib=gib))
    assert made.advice == {"offload": "optimizer"}
    assert round(host_bytes(made.shape, made.advised()) / GIB) == host


def test_more_gpus_are_the_last_resort_and_sometimes_nothing_helps():
    made = plan(config_of("qwen2.5-math-7b"), Options(gpu_gib=79.2), flags=("gpu_memory", "micro_tokens"))
    assert made.advice["ranks"] > 1 and "GPUs" in made.verdict()
    made = plan(config_of("qwen2.5-32b"), Options(gpu_gib=8.0), flags=("gpu_memory",))
    assert made.advice == {} and "nothing tried makes it fit" in made.verdict()


def test_a_share_too_small_for_one_sequence():
    made = plan(config_of("qwen2.5-math-7b"), Options(ranks=8, gpu_memory=0.2))
    assert "--gpu_memory 0.2 leaves vLLM no room for one sequence of 4,096 tokens" in made.verdict()
    assert made.advice.keys() == {"gpu_memory"}


@pytest.mark.parametrize("options,sentence", [
    (dict(ranks=8, tensor_parallel=3), "--tensor_parallel is 3, but must divide the number of GPUs, 8"),
    (dict(ranks=8, tensor_parallel=8), "--tensor_parallel is 8, .* attention heads, 28"),
    (dict(tensor_parallel=0), "--tensor_parallel is 0"),
    (dict(ranks=0), "--gpus is 0"),
    (dict(gpu_gib=0.0), "--gpu_gib is 0"),
    (dict(gpu_gib=float("nan")), "--gpu_gib is nan"),
    (dict(offload="all"), "--offload is 'all', but must be none, reference or optimizer"),
])
def test_bad_input_is_one_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        plan(config_of("qwen2.5-math-7b"), Options(**options))


def test_a_larger_share_for_vllm_is_named_if_sequences_wait():
    """Qwen3-8B at 12,288 tokens: 64 responses a GPU; 13.3 GiB stay, so that 0.75 of 79.2 fit, but not 0.8."""
    options = Options(ranks=8, gpu_gib=79.2, max_new_tokens=12288)
    made = plan(config_of("qwen3-8b"), options)
    assert "KV cache of 11 sequences" in made.table()
    assert "--gpu_memory 0.75, which fits as well: room for 22 of the 64 that are asked for" in made.table()
    more = plan(config_of("qwen3-8b"), dataclasses.replace(options, gpu_memory=0.75))
    assert more.fits and "faster" not in more.table()
    assert not plan(config_of("qwen3-8b"), dataclasses.replace(options, gpu_memory=0.8)).fits
    assert "faster" not in plan(config_of("qwen2.5-math-1.5b"), Options(ranks=8)).table()  # all have room


def test_table():
    text = plan(config_of("qwen2.5-math-7b"), Options(ranks=8, gpu_gib=79.2, steps=300)).table()
    assert len(text.splitlines()) < 30 and max(map(len, text.splitlines())) <= 110 and text.isascii()
    for word in "sampling scoring update sync Adam reference 57,344 disk host hours".split():
        assert word in text, word
    assert "gradients: 1.5\n" in text  # 2^28 logits, 4 bytes each and 2 for the gradient
    assert text.endswith("It fits.")


def test_an_evaluation_has_no_policy():
    made = plan(config_of("qwen3-4b"), Options(ranks=8, train=False))
    assert list(made.phases) == ["sampling"] and made.fits and "Adam" not in made.table()


def test_the_embedder_has_a_phase_of_its_own():
    """By hand: 2 bytes a weight; 8 x 12,288 tokens, of a layer 3 x 9,728 and 4 x 2,560 numbers of 2 bytes; a
    mask of 8 x 12,288 x 12,288, once as bool and once in bfloat16."""
    e = shape_of(config_of("qwen3-4b"))
    options = Options(ranks=8, max_new_tokens=12288, embedding=e)
    made = plan(config_of("qwen3-4b"), options)
    assert list(made.phases) == ["sampling", "embedding", "scoring", "update", "sync"] and made.fits
    by_hand = 2 * 4_022_468_096 + 98_304 * 2 * (29_184 + 10_240) + 3 * 8 * 12_288 ** 2
    assert made.phases["embedding"]["embedder"] == by_hand == pytest.approx(18.1 * GIB, rel=0.01)
    without = made.phases["scoring"]
    assert made.peaks["embedding"] == by_hand + without["Adam"] * 2 + without["reference"] - without[
        "weights, float32"] + GIB
    assert "embedder " in made.table()
    assert host_bytes(e, options) - host_bytes(e, Options(ranks=8)) == 2 * e.weights


@pytest.mark.parametrize("engine,rows,prompts", [("hf", 441, 7), ("plain", 512, 512)])
def test_sampling_without_vllm(engine, rows, prompts):
    """Its weights stay, so that the update has less; no --gpu_memory can help."""
    s = shape_of(config_of("qwen2.5-math-1.5b"))
    options = Options(engine=engine, gpu_gib=80, gpu_memory=0.1, votes=63 if engine == "hf" else 64)
    tokens = rows * 3072 + prompts * 1024
    expected = 2 * s.weights + 28_672 * tokens + 40 * rows * 151_936
    made = plan(config_of("qwen2.5-math-1.5b"), options)
    assert made.phases["sampling"]["sampler"] == expected
    assert made.phases["update"]["sampler"] == made.phases["sync"]["sampler"] == 2 * s.weights
    assert "vLLM:" not in made.table() and made.excess == sum(max(0, p - made.usable) for p in
                                                              made.peaks.values())
    small = plan(config_of("qwen2.5-math-1.5b"), Options(engine=engine, gpu_gib=24))
    assert not small.advice.keys() & {"gpu_memory", "tensor_parallel"}
    alone = plan(config_of("qwen2.5-math-1.5b"), Options(engine=engine, train=False, prompts_per_batch=500))
    assert list(alone.phases) == ["sampling"] and "time: only that of vLLM" in alone.table()


def test_an_unknown_architecture_is_an_estimate_and_says_so():
    from transformers import AutoConfig
    config = AutoConfig.for_model("gpt2")
    made = plan(config, Options())
    assert not made.shape.exact and "do not know this architecture" in made.table()
    assert made.shape.weights == pytest.approx(124_439_808, rel=0.001)


def test_plan_from_the_arguments_of_a_script():
    args = types.SimpleNamespace(micro_tokens=8192, prompts_per_batch=16, epochs=3, steps=0, gpu_memory=0.6)
    made = plan_from_args(args, config_of("qwen2.5-math-1.5b"), ranks=2, gpu_gib=79.2, problems=500)
    assert made.options == Options(micro_tokens=8192, prompts_per_batch=16, steps=93, gpu_memory=0.6, ranks=2,
                                   gpu_gib=79.2)
    small = plan_from_args(args, config_of("qwen2.5-math-1.5b"), ranks=1, gpu_gib=23.6)
    assert "offload" not in small.advice  # the script has no such flag
    evaluation = plan_from_args(args, config_of("qwen2.5-math-1.5b"), ranks=1, gpu_gib=23.6, train=False)
    assert evaluation.fits and evaluation.options.votes == 16 and evaluation.options.prompts_per_batch == 500
