"""A model's folder or Hub id: its config, its weights, its generation_config.json."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import cached_file

from engine.base import UserError, first_line, stable_hash

# Masks and angles that older checkpoints hold, though the model computes them: they change nothing
BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|position_ids|_extra_state)$")
# Names of classes with a head for the next token, or with none: then it is the tied embedding, or missing
LANGUAGE_MODEL = re.compile("(ForCausalLM|LMHeadModel|ForConditionalGeneration)$|"
                            "^(?!.*(For|Reward|Heads)).*Model$")
PACKED = ("llama", "mistral", "qwen2", "qwen3")  # model types that logprobs.py may pack


def read_config(path: str, max_prompt_tokens: int, max_new_tokens: int, tensor_parallel: int = 1,
                trust_remote_code: bool = False):
    """The model's config, which is all that a plan needs.

    Raises UserError if it cannot be read, is of another kind of model or too small for the flags."""
    wanted = f"--model is '{path}', but no model can be read from a folder or the Hub by that name"
    try:
        adapter = file_of(path, "adapter_config.json")
        config = None if adapter else AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"{wanted}: {first_line(error)}") from None
    if adapter:
        raise UserError(f"--model is '{path}', which holds an adapter (adapter_config.json); merge it into "
                        "its model (peft's merge_and_unload), or give the model's folder without it.")
    if getattr(config, "quantization_config", None):
        raise UserError(f"--model is '{path}', which is quantised; give one in float32, bfloat16 or float16.")
    for name in config.architectures or []:
        if not LANGUAGE_MODEL.search(name):
            raise UserError(f"--model is '{path}', a {name} by its config.json, but must be a causal "
                            "language model: its head must give the next token.")
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # a longer sequence rotates its first tokens otherwise, too
        context = rope.get("original_max_position_embeddings", context)
    if context is not None and max_prompt_tokens + max_new_tokens > context:
        raise UserError(f"--max_prompt_tokens {max_prompt_tokens} + --max_new_tokens "
                        f"{max_new_tokens} must fit the model's context of {context} tokens; lower one "
                        "of them (evaluate.py --preset toy has a trained toy's).")
    if tensor_parallel > 1 and text.num_attention_heads % tensor_parallel:
        raise UserError(f"--tensor_parallel is {tensor_parallel}, but must divide the attention "
                        f"heads of {path}, {text.num_attention_heads}.")
    return config


def load_model(path: str, trust_remote_code: bool = False, dtype="auto"):
    """The model, memory-mapped in its checkpoint's own type. Raises UserError if weights are missing."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            generation_config=GenerationConfig())  # transformers refuses to save what some models come with
        model.own_generation_config = generation_config(path)
    except Exception as error:
        raise UserError(f"--model is '{path}', but its weights cannot be read: "
                        f"{type(error).__name__} {first_line(error)}") from None
    if wrong := sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"]):
        raise UserError(f"--model is '{path}', but {len(wrong)} of its weights are missing or of another "
                        f"shape, among them {', '.join(wrong[:3])}; they would be random.")
    if unused := sorted(key for key in info["unexpected_keys"] if not BUFFER.search(key)):
        raise UserError(f"--model is '{path}', but a {type(model).__name__} does not use {len(unused)} of "
                        f"its weights, among them {', '.join(unused[:3])}; without them it is another model.")
    return model


def file_of(path: str, name: str) -> str | None:
    """The path of a model's file, in its folder or in the Hub's cache; None if it has none."""
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False)


def generation_config(path: str) -> bytes | None:
    """A model's generation_config.json; None if it has none."""
    file = file_of(path, "generation_config.json")
    return Path(file).read_bytes() if file else None


def weights_digest(model) -> int:
    """Hash of the first 256 values of every parameter: it identifies the weights in any folder or file."""
    parameters = model.named_parameters()
    return stable_hash([(name, p.shape, p.detach().flatten()[:256].tolist()) for name, p in parameters])
