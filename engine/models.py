"""A model's folder or Hub id: its config, its tokenizer with its chat template, its weights."""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast)
from transformers.utils import cached_file

from engine.base import UserError, first_line, stable_hash
from engine.data import read_template
from engine.logprobs import ChunkedHead, PackedHead, PlainHead
from engine.options import SMOLLM2_MODEL, TOYS
from engine.ranks import print0

# Masks and angles that older checkpoints hold, though the model computes them: they change nothing
BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|position_ids|_extra_state)$")
# What templates that write today's date get instead: else a run's prompts would change overnight.
DATE = datetime(2024, 7, 26)  # Llama 3.2's own, where it knows no clock
CHAT = [dict(role="user", content="question"), dict(role="assistant", content="forty-two")]
# What tokenizers that are not the same read differently: blanks, lines, digits, a power in one character
SAMPLE = "What is 10² + 2023?\n\n  5 apples"


def model_folder(model: str) -> str:
    """The folder of a built-in model, or of the final one in a run's folder; any other name as it is.

    Raises UserError if the run has none: the Hub's error would speak of names."""
    if model and (Path(model) / "run.json").is_file():
        if not (final := Path(model) / "final").is_dir():
            raise UserError(f"--model is '{model}', a run that has not ended; --resume continues it.")
        return str(final)
    return (TOYS | dict(smollm2=SMOLLM2_MODEL)).get(model, model)


def read_config(path: str, length: int, trust_remote_code: bool = False):
    """The model's config. length: of prompt and response. Raises UserError if it cannot be read, or if the
    model would train wrongly: adapted, quantised, or beyond its context."""
    wrong = f"--model is '{path}', "
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"{wrong}but no model can be read from a folder or the Hub by that name: "
                        f"{first_line(error)}") from None
    if file_of(path, "adapter_config.json"):
        raise UserError(f"{wrong}which holds an adapter (adapter_config.json); merge it into its model "
                        "(peft's merge_and_unload), or give the model's folder without it.")
    if getattr(config, "quantization_config", None):  # its weights are no floats that AdamW could change
        raise UserError(f"{wrong}which is quantised; give one in float32, bfloat16 or float16.")
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)  # some architectures have no limit
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # a longer sequence rotates its first tokens otherwise, too
        context = rope.get("original_max_position_embeddings", context)
    if context is not None and length > context:
        raise UserError(f"--max_prompt_tokens + --max_new_tokens are {length}, but must fit the model's "
                        f"context of {context} tokens; lower one of them (evaluate.py --preset toy has a "
                        "trained toy's).")
    return config


def file_of(path: str, name: str) -> str | None:
    """The path of a model's file, in its folder or in the Hub's cache; None if it has none."""
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False)


def generation_config(path: str) -> bytes | None:
    """A model's generation_config.json; None if it has none."""
    file = file_of(path, "generation_config.json")
    return Path(file).read_bytes() if file else None


# ---------------------------------------------- the tokenizer ----------------------------------------------
def read_tokenizer(path: str, config, prompt: str, template_vars: str = "", trust_remote_code: bool = False):
    """(tokenizer, ids of the tokens that end a response). Raises UserError if it makes no prompts."""
    wrong = f"--model is '{path}', "
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and (file := file_of(path, "tokenizer.json")):
        # transformers builds some classes by their own rules instead of the file's (its issue 45488): the
        # Llama models of DeepSeek would read all words without the blanks between them
        ids = Tokenizer.from_file(file).encode(SAMPLE, add_special_tokens=False).ids
        if ids != tokenizer.encode(SAMPLE, add_special_tokens=False):
            print0(f"{path}: a {type(tokenizer).__name__} reads texts otherwise than its tokenizer.json; "
                   "the file is followed.")
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    own = GenerationConfig.from_model_config(config).eos_token_id  # of config.json, or of its text_config
    own = json.loads(generation_config(path) or "{}").get("eos_token_id", own)
    chat = read_template(prompt)[0][0]
    if chat and not tokenizer.chat_template:
        raise UserError(f"--prompt is '{prompt}', but the tokenizer of {path} has no chat template; "
                        "give --prompt plain.")
    template = str(tokenizer.chat_template) if chat else ""
    variables = read_variables(template_vars)
    if unknown := [name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise UserError(f"--template_vars sets '{unknown[0]}', but no chat template that is used here has a "
                        "variable of that name.")
    if "strftime_now" in template:
        variables = dict(strftime_now=DATE.strftime) | variables
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **variables)

    vocabulary = config.get_text_config().vocab_size
    stop = [i for i in [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id] if i is not None]
    if not stop or not all(type(i) is int and 0 <= i < vocabulary for i in stop):
        raise UserError(f"{wrong}whose eos_token_id (generation_config.json, tokenizer) are {stop}, but the "
                        f"model knows the tokens 0 to {vocabulary - 1}.")
    tokenizer.control, ends = control_tokens(tokenizer) if chat else (set(), [])
    for end in ends[:1]:
        if end not in stop and end < vocabulary:
            stop.append(end)
            print0(f"{path}: its chat template ends a turn with {tokenizer.decode([end])} ({end}), so this "
                   "token ends a response, too.")
    return tokenizer, sorted(set(stop))


def read_variables(text: str) -> dict:
    """--template_vars as a dict. Raises UserError."""
    # a template takes the text "false" for true
    if re.search(r'"\s*(true|false)\s*"', text, re.IGNORECASE):
        raise UserError(f"--template_vars is '{text}', but must have true and false without quotation marks.")
    return json.loads(text or "{}")


def control_tokens(tokenizer) -> tuple[set[int], list[int]]:
    """(the tokens that begin or end a turn, and special ones; those that the chat template writes behind an
    assistant's turn, its end first).

    Some end the last turn with another token than those before (GPT-OSS), some with the next turn (GLM).
    Raises UserError if the tokenizer makes pieces of such a token: the model would read letters, no turn."""
    try:
        text = tokenizer.apply_chat_template([*CHAT, *CHAT], tokenize=False)
    except Exception:  # it takes no such turns, and what it raises is its own
        text = ""
    # thinking tags, which a last turn alone may have, are no control tokens: a question may speak of them
    first, *behind = text.split("forty-two")
    added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    control = {i for i, token in added.items() if token.special or token.content in first}
    encode = partial(tokenizer.encode, add_special_tokens=False)
    ids = encode(first)
    if split := [added[i].content for i in control if added[i].content in first and i not in ids]:
        raise UserError(f"the tokenizer of {tokenizer.name_or_path} makes pieces of {split[0]}, a token of "
                        "its chat template; see split_special_tokens in its tokenizer_config.json.")
    return control, [i for i in encode("".join(reversed(behind))) if i in added]


# ----------------------------------------------- the weights -----------------------------------------------
def load_model(path: str, trust_remote_code: bool = False, dtype="auto"):
    """The model, memory-mapped in its checkpoint's own type. Raises UserError if weights are missing."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
        generation_config=GenerationConfig())  # transformers refuses to save what some models come with
    model.own_generation_config = generation_config(path)
    if wrong := sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"]):
        raise UserError(f"--model is '{path}', but {len(wrong)} of its weights are missing or of another "
                        f"shape, among them {', '.join(wrong[:3])}; they would be random.")
    if unused := sorted(key for key in info["unexpected_keys"] if not BUFFER.search(key)):
        raise UserError(f"--model is '{path}', but a {type(model).__name__} does not use {len(unused)} of "
                        f"its weights, among them {', '.join(unused[:3])}; without them it is another model.")
    return model


def weights_digest(model) -> int:
    """Hash of the first 256 values of every parameter: it identifies the weights in any folder or file."""
    parameters = model.named_parameters()
    return stable_hash([(name, p.shape, p.detach().flatten()[:256].tolist()) for name, p in parameters])


# ------------------------------------------- how a model may be computed -----------------------------------
# Types of models for which tests/test_architectures.py shows that a fast way computes what the model's own
# code does. logprobs.py may pack the first ones; of the second ones it may take logits by chunks, with fused
# attention. Any other type is computed in the slow way that is right by definition: full logits, plain
# ("eager") attention, prompts of one length. Whoever trains another type adds it and runs that test.
PACKED = ("llama", "mistral", "qwen2", "qwen3")
CHUNKED = ("gemma", "gemma3_text", "gemma4_text", "phi", "phi3", "olmo2", "olmo3", "smollm3")
# Entries of a config that change logits or attention scores in ways which only the model's own code knows
SCALES = re.compile("softcap|logit_scale|logits_scal")


def is_fast(config) -> bool:
    """Whether the tests show that fused attention, chunks of logits and padded prompts compute it rightly."""
    text = config.get_text_config()
    scales = [value for name, value in text.to_dict().items() if SCALES.search(name)]
    return text.model_type in PACKED + CHUNKED and set(scales) <= {None, 1}


def trainers_way(model, plain: bool, max_length: int) -> tuple[type, str]:
    """(head, attention) with which to train. plain: full logits. max_length: of prompt and response, in
    tokens; rows are not packed where a window is shorter."""
    text = model.config.get_text_config()
    if not is_fast(model.config):
        print0(f"{text.model_type}: no test shows a faster way, so the trainer uses full logits and eager "
               "attention")
        return PlainHead, "eager"
    if plain:
        return PlainHead, "sdpa"
    if text.model_type in PACKED and max_length <= (getattr(text, "sliding_window", None) or max_length):
        return PackedHead, "packed"
    return ChunkedHead, "sdpa"
