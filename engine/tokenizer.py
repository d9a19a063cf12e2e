"""The tokenizer: its chat template with variables of one's own, and the tokens that end a response."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from functools import partial

from transformers import AutoTokenizer

from engine.base import UserError, first_line
from engine.data import read_template
from engine.models import generation_config
from engine.ranks import print0

# What templates that write today's date get instead: else a run's prompts would change overnight.
DATE = datetime(2024, 7, 26)  # Llama 3.2's own, where it knows no clock
CHAT = [dict(role="user", content="question"), dict(role="assistant", content="forty-two")]


def read_tokenizer(path: str, config, prompt: str, template_vars: str = "", trust_remote_code: bool = False):
    """(tokenizer, ids of the tokens that end a response). Raises UserError if it makes no prompts."""
    wrong = f"--model is '{path}', "
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        own = json.loads(generation_config(path) or "{}").get("eos_token_id")
    except Exception as error:
        raise UserError(f"{wrong}but its tokenizer or generation_config.json cannot be read: "
                        f"{first_line(error)}") from None
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
    tokenizer.control = control_tokens(tokenizer, path) if chat else None

    known = tokenizer.known_to_model = config.get_text_config().vocab_size  # Gemma 3 1B: one less than it has
    stop = [i for i in [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id] if i is not None]
    if not stop or not all(type(i) is int and 0 <= i < known for i in stop):
        raise UserError(f"{wrong}whose eos_token_id (generation_config.json, tokenizer) are {stop}, but the "
                        f"model knows the tokens 0 to {known - 1}.")
    ends = [i for i in end_of_turn(tokenizer) if i < known] if chat else []
    if ends and not set(ends) & set(stop):
        stop.append(ends[0])
        print0(f"{path}: its chat template ends a turn with {tokenizer.decode(ends[:1])} ({ends[0]}), so "
               "this token ends a response, too.")
    return tokenizer, sorted(set(stop))


def read_variables(text: str) -> dict:
    """--template_vars as a dict. Raises UserError."""
    try:
        if re.search(r"""["']\s*(true|false)\s*["']\s*[],}]""", text, re.IGNORECASE):
            raise ValueError
        return dict(json.loads(text or "{}").items())
    except (ValueError, AttributeError):
        raise UserError(f"--template_vars is '{text}', but must be a JSON object such as "
                        '\'{"enable_thinking": false}\', true and false without quotation marks.') from None


def _render(tokenizer, turns: list[dict], begin: bool = False) -> str:
    """The text of these turns; "" if the chat template takes no such turns: what it raises is its own."""
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=begin)
    except Exception:
        return ""


def control_tokens(tokenizer, path: str) -> re.Pattern:
    """What no text of the data may hold: special tokens, and those that the template puts around a turn.

    Prints a warning if the template does not begin the assistant's turn."""
    asked, begun = _render(tokenizer, CHAT[:1]), _render(tokenizer, CHAT[:1], begin=True)
    before, said, _ = _render(tokenizer, CHAT).partition("forty-two")
    if asked and said and asked.strip() == begun.strip() != before.strip():
        print0(f"Warning: {path}: its chat template ignores add_generation_prompt, so a prompt lacks what "
               f"begins the assistant's turn, {before.removeprefix(asked)!r}; fix it or give --prompt plain.")
    around = os.path.commonprefix([begun, before])
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    held = [re.escape(token.content) for token in added if token.special or token.content in around]
    return re.compile("|".join(held) or "(?!)")


def end_of_turn(tokenizer) -> list[int]:
    """The tokens, but for those of ordinary text, that the chat template writes behind an assistant's turn.

    Some end the last turn with another token than those before (GPT-OSS), some with the next turn (GLM)."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    for turns in (CHAT, [*CHAT, CHAT[0]]):
        _, said, after = _render(tokenizer, turns).rpartition("forty-two")
        ids = tokenizer.encode(after, add_special_tokens=False) if said else []
        if ends := [i for i in ids if i in special]:
            return ends
    return []
