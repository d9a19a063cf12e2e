"""How many tokens a micro-batch may have, and whether activations are recomputed: what a GPU's memory holds,
from the model's config alone.

A sum of a few terms, those of dense decoders (Llama, Qwen) under FSDP2. On one H200 it was 2% off what three
updates took (docs/measured.md). The other phases of a step, disk and advice: tools/plan.py (--plan)."""

from __future__ import annotations

import re

import torch
from transformers import AutoModelForCausalLM

from engine.base import UserError, first_line
from engine.ranks import from_torchrun, print0, rank_and_ranks, same_on_all_ranks
from engine.logprobs import CHUNK

GIB = 2 ** 30
MICRO_TOKENS = (16384, 12288, 8192, 6144, 4096)  # for --micro_tokens 0; else one sequence at a time
# Bytes of CUDA context, NCCL and cuBLAS; of a sleeping vLLM and its CUDA graphs; of a logit in the update:
# five float32 tensors, not all at once. The last two are fitted to the three measurements.
OVERHEAD, ASLEEP, OF_LOGIT = 2 * GIB, 4 * GIB, 17.5
USABLE = 0.95  # what fragmentation leaves of a GPU (assumed)
UNTRIED = "num_.*experts$|^n_.*experts$|^kv_lora_rank$"  # entries of a config that is refused with vLLM


def parameters_of(config, trust_remote_code: bool = False) -> int:
    """The parameters of a model, counted in one without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in model.parameters())


def gpu_memory(machine) -> float:
    """Bytes of a GPU: --gpu_gib, else what the GPU here has, without one 80 GiB."""
    if torch.cuda.is_available() and not machine.gpu_gib:
        return torch.cuda.get_device_properties(from_torchrun("LOCAL_RANK", 0)).total_memory
    return (machine.gpu_gib or 80.0) * GIB


def update_memory(args, config, weights: int, micro_tokens: int, recompute: str) -> dict[str, float]:
    """{what: bytes of each GPU} at the peak of the update, for the longest prompts and responses. Scoring
    takes less. weights: the parameters. recompute: on or off."""
    machine, text = args.machine, config.get_text_config()
    ranks, offload = machine.gpus or rank_and_ranks()[1], machine.offload == "optimizer"
    c = 4 if machine.dtype == "float32" else 2  # bytes of a number in the compute type
    hidden, heads = text.hidden_size, text.num_attention_heads
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    head_size = getattr(text, "head_dim", None) or hidden // heads
    q, kv = heads * head_size, (getattr(text, "num_key_value_heads", None) or heads) * head_size
    root = text.vocab_size * hidden * (1 if text.tie_word_embeddings else 2)  # FSDP gathers it together
    # A rank's share of a minibatch: packed rows have each prompt once.
    rows = -(-args.prompts_per_batch * args.train_samples // (args.num_minibatches * ranks))
    prompts = rows if machine.plain else min(rows, args.prompts_per_batch)
    share = rows * args.max_new_tokens + prompts * args.max_prompt_tokens
    tokens = max(args.max_prompt_tokens + args.max_new_tokens, min(micro_tokens, share))
    # kept for the backward pass: norms (Qwen3: of q and k, too), q, k, v, output, gate, up, their product
    layer = c * tokens * (8 * hidden + 4 * inner + 6 * q + 4 * kv)
    inputs = c * tokens * hidden * text.num_hidden_layers
    logits = tokens * text.vocab_size
    return {"weights and Adam": 0 if offload else 12 * weights / ranks,
            "reference": c * weights / ranks if args.kl_coef > 0 and machine.offload == "none" else 0,
            "gradients": 0 if offload else 4 * weights / ranks,
            "gathered weights": c * (root + 2 * (weights - root) // text.num_hidden_layers),
            "activations": inputs + layer if recompute == "on" else text.num_hidden_layers * layer,
            "logits": OF_LOGIT * (logits if machine.plain else min(CHUNK["cuda"], logits)),
            "gradient of the head": 2 * c * text.vocab_size * hidden,
            "sampler": ASLEEP if machine.uses_vllm else c * weights}  # transformers' never sleeps


def fitting(args, config, weights: int) -> tuple[int, str]:
    """(micro_tokens, recompute): what --micro_tokens 0 and --gradient_checkpointing auto become. The most of
    MICRO_TOKENS that fit without recomputation, but for the smallest (each of its many passes gathers all
    weights); else the most that fit with it; else one sequence."""
    machine = args.machine
    sizes = [machine.micro_tokens] if machine.micro_tokens else [*MICRO_TOKENS, 1]
    choices = [(size, machine.gradient_checkpointing) for size in sizes]
    if machine.gradient_checkpointing == "auto":
        some = 1 if machine.offload == "optimizer" else 4  # there all weights travel each time
        choices = [(size, "off") for size in sizes[:some]] + [(size, "on") for size in sizes]
    usable = USABLE * gpu_memory(machine) - OVERHEAD
    for choice in choices:
        if sum(update_memory(args, config, weights, *choice).values()) <= usable:
            break
    return choice  # the last one, the smallest, also if it does not fit: --plan says so, and a run tries


def choose_memory_settings(args, config, cuda: bool) -> dict:
    """Policy's micro_tokens and gradient_checkpointing. Raises UserError if ranks choose differently."""
    machine, kind = args.machine, config and config.model_type
    micro_tokens, recompute = machine.micro_tokens, machine.gradient_checkpointing
    if cuda:
        entries = [name for name, value in config.get_text_config().to_dict().items() if value]
        if machine.uses_vllm and any(re.search(UNTRIED, name) for name in entries):
            raise UserError(f"--model is of the type {kind}, with experts or latent attention, whose weights "
                            "vLLM may not take again on a GPU, as nobody has tried; give --sampler hf.")
        try:
            weights = parameters_of(config, machine.trust_remote_code)
            micro_tokens, recompute = fitting(args, config, weights)
        except Exception as error:  # its config has not the entries of a dense decoder
            print0(f"Warning: --model is of the type {kind}, whose memory is not known "
                   f"({first_line(error)}); if it does not fit, give a smaller --micro_tokens.")
    memory = dict(micro_tokens=micro_tokens or MICRO_TOKENS[0],
                  gradient_checkpointing=recompute == "on" or recompute == "auto" and cuda)
    same_on_all_ranks({f"--{name}": value for name, value in memory.items()})
    return memory
