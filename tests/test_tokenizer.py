"""Models as people bring them: chat templates, stop tokens, big vocabularies, odd generation_config.json."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import make_policy, run_toy, tiny_model, untimed
from transformers import AutoTokenizer

import ttrl
from engine.options import TOY_MODEL
from engine.data import SUFFIX, SYSTEM, load_problems

TOKENS = json.loads((Path(TOY_MODEL) / "config.json").read_text())["vocab_size"]
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
END = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TURN + "<|im_end|>\n" + END
DATED = "Today is {{ date_string or strftime_now('%d %b %Y') }}.\n" + CHATML
NO_THOUGHT = "{% if enable_thinking is false %}<think></think>{% endif %}"
THINKING = CHATML.replace("{% endif %}", NO_THOUGHT + "{% endif %}")


@pytest.fixture
def bring(tmp_path):
    """bring(template, tokens, **config) -> a folder with the toy's weights, another template and more special
    tokens; it ends with <|endoftext|>, which the toy never writes, and has no generation_config.json."""
    def brought(template=CHATML, tokens=(), **config):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        shutil.copy(Path(TOY_MODEL) / "model.safetensors", folder)
        own = json.loads((Path(TOY_MODEL) / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(own | config))
        tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
        special = dict(eos_token="<|endoftext|>", additional_special_tokens=list(tokens))
        tokenizer.add_special_tokens(special)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return str(folder)

    return brought


@pytest.fixture
def show(launch):
    """show(folder, **flags) -> what --show_prompt prints, or the error."""
    def shown(folder, **flags):
        flags = dict(dataset="toy", eval="", max_prompt_tokens=128, max_new_tokens=64) | flags
        code, out, error = launch(model=folder, show_prompt=True, **flags)
        assert (code, error.count("\n")) == ((2, 1) if error else (0, 0))
        return error or out

    return shown


# ------------------------------------------------- what is sent ------------------------------------------
def system(text):
    return f"<|im_start|>system\n{text}<|im_end|>\n"


def user(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_the_prompt_is_shown_as_it_is_sent(bring, launch):
    """Of a folder without weights, whose template inserts a system turn, like Qwen's."""
    own = system("You are Qwen, created by Alibaba Cloud.")
    folder = bring("{% if messages[0].role != 'system' %}" + own + "{% endif %}" + CHATML)
    (Path(folder) / "model.safetensors").unlink()
    question = load_problems("toy")[0].question
    theirs = dict(model=folder, max_prompt_tokens=256, max_new_tokens=64)
    train, first, questions = "first problem of --dataset", "first problem of toy", "z_0 (--question_prompt)"
    for script, flags, expected in [
            ("ttrl", dict(theirs, dataset="toy", eval="", prompt="suffix"),
             {train: own + user(question + SUFFIX)}),
            ("dynamic_rl", dict(theirs, eval="toy", prompt="system", question_prompt="Write a problem."),
             {first: system(SYSTEM) + user(question), questions: own + user("Write a problem.")})]:
        code, out, error = launch(script, show_prompt=True, **flags)
        assert not code, error
        shown = dict(re.findall(r"^--- (.*?): \d+ tokens\n(.*?)\n(?=--- |\Z)", out, re.DOTALL | re.MULTILINE))
        assert shown == expected


# ------------------------------------------------- where a response ends ---------------------------------
def test_a_response_ends_where_the_chat_template_ends_a_turn(bring, tmp_path, capsys):
    """The toy with another end of sequence, which it never writes, trains as it does with its own."""
    ours = run_toy(ttrl, tmp_path / "ours", steps=1)
    capsys.readouterr()
    folder = bring(AutoTokenizer.from_pretrained(TOY_MODEL).chat_template)
    theirs = run_toy(ttrl, tmp_path / "theirs", steps=1, model=folder)
    assert "its chat template ends a turn with <|im_end|> (2), so this token ends" in capsys.readouterr().out
    assert untimed(ours) == untimed(theirs) and ours[-1]["truncated"] < 0.5


BEHIND = {  # what stands behind an assistant's turn -> the token that ends a response beside <|endoftext|>
    "its own": ("<|endoftext|>", None),
    "of the last turn another one": ("{% if loop.last %}<a>{% else %}<|im_end|>{% endif %}", "<a>"),
    "a token that the model does not have": ("<b>", None)}


@pytest.mark.parametrize("name", BEHIND)
def test_the_token_behind_a_turn_ends_a_response(name, bring, show):
    behind, end = BEHIND[name]
    folder = bring(TURN + behind + END, tokens=["<a>", "<b>"], vocab_size=TOKENS + 1)
    said = re.findall(r"ends a turn with (\S+) \(\d+\), so this token ends a response, too", show(folder))
    assert said == ([end] if end else [])


# ------------------------------------------------------ saving -------------------------------------------
@pytest.mark.parametrize("text", [None, '{"top_p": 7, "pad_token_id": -1,\r\n\t"of_its_own": "\u00e9"}'])
def test_the_saved_generation_config_is_the_one_that_came(text, tmp_path):
    """Also one that transformers would refuse."""
    source, final = tmp_path / "source", tmp_path / "final"
    tiny_model("Llama", source)
    file = source / "generation_config.json"
    file.unlink()
    if text is not None:
        file.write_bytes(text.encode())
    policy = make_policy(source)
    shutil.rmtree(source)  # may be gone when the run ends
    policy.save(final, AutoTokenizer.from_pretrained(TOY_MODEL))
    saved = final / "generation_config.json"
    assert (saved.read_bytes() if saved.exists() else None) == (text.encode() if text is not None else None)


# ------------------------------------------- vocabulary, date, variables ---------------------------------
def test_a_template_with_todays_date_gives_the_same_prompts_every_day(bring, show):
    folder = bring(DATED)
    assert "Today is 26 Jul 2024.\n" in show(folder)
    assert "Today is 1 May 2025.\n" in show(folder, template_vars='{"date_string": "1 May 2025"}')


def test_a_variable_reaches_the_chat_template(bring, show):
    folder, given = bring(THINKING), '{"enable_thinking": false}'
    assert "assistant\n<think></think>" in show(folder, template_vars=given)
    assert "<think>" not in show(folder)


@pytest.mark.parametrize("given", ['{"enable_thinkng": false}', '{"enable_thinking": "false"}'])
def test_a_bad_variable_is_refused(given, bring, show):
    assert show(bring(THINKING), template_vars=given).startswith("Error: --template_vars ")
