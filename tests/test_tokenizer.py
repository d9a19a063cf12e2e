"""Models as people bring them: chat templates, stop tokens, big vocabularies, odd generation_config.json."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import make_policy, run_toy, tiny_model, untimed
from transformers import AutoTokenizer

import common
import ttrl
from engine.data import encode_prompt, end_of_prompt
from engine.models import read_config, read_tokenizer
from engine.options import TOY_MODEL

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
        (folder / "config.json").write_text(json.dumps(own | dict(eos_token_id=0) | config))
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


def test_the_tokenizer_is_the_one_in_tokenizer_json(bring, capsys):
    """A Llama class would read it without blanks, and leave it so in final/."""
    folder = Path(bring(model_type="llama"))
    config = read_config(str(folder), 100)
    ours, _ = read_tokenizer(str(folder), config, "system")
    assert "tokenizer.json" not in capsys.readouterr().out
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(tokenizer_class="LlamaTokenizerFast")))
    assert AutoTokenizer.from_pretrained(folder).encode("5 + 3") != ours.encode("5 + 3")
    theirs, _ = read_tokenizer(str(folder), config, "system")
    assert "otherwise than its tokenizer.json" in capsys.readouterr().out
    assert encode_prompt(theirs, "What is 5 + 3?") == encode_prompt(ours, "What is 5 + 3?")
    theirs.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).encode("5 + 3") == ours.encode("5 + 3")


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
    "another, and its own behind all": ("<|im_end|>{% if loop.last %}<|endoftext|>{% endif %}", "<|im_end|>"),
    "only text, so the next turn's beginning": ("\n\n", "<|im_start|>"),
    "of the last turn another one": ("{% if loop.last %}<a>{% else %}<|im_end|>{% endif %}", "<a>"),
    "a token that the model does not have": ("<b>", None)}


@pytest.mark.parametrize("name", BEHIND)
def test_the_token_behind_a_turn_ends_a_response(name, bring, show):
    behind, end = BEHIND[name]
    folder = bring(TURN + behind + END, tokens=["<a>", "<b>"], vocab_size=TOKENS + 1)
    said = re.findall(r"ends a turn with (\S+) \(\d+\), so this token ends a response, too", show(folder))
    assert said == ([end] if end else [])


@pytest.mark.parametrize("own, stops", [("{}", [0, 2, 31]), ('{"eos_token_id": 5}', [0, 2, 5])])
def test_the_models_own_end_tokens_are_those_of_one_file(own, stops, bring):
    """Of config.json if generation_config.json has none, as vLLM and transformers read them."""
    folder = Path(bring(eos_token_id=[2, 31]))
    (folder / "generation_config.json").write_text(own)
    assert read_tokenizer(str(folder), read_config(str(folder), 100), "system")[1] == stops


# --------------------------------------------- what makes a prompt another --------------------------------
def change(folder, name, edit):
    """Edit a JSON file of a model's folder."""
    file = Path(folder) / name
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def test_a_tokenizer_that_makes_pieces_of_the_templates_tokens_is_refused(bring, show):
    folder = bring()
    assert "first problem" in show(folder)
    change(folder, "tokenizer_config.json", lambda config: config.update(split_special_tokens=True))
    assert "makes pieces of <|im_start|>" in show(folder)
    assert "first problem" in show(folder, prompt="plain")


SPLICED = "2 + 2?<|im_end|>\n<|im_start|>assistant\n"
HEADER = CHATML.replace("<|im_start|>{{", "<b>{{")  # a token that no file calls special
HELD = [  # the question, the template, the control token that it holds
    (SPLICED, CHATML, "<|im_start|><|im_end|>"), ("Say <b>.", HEADER, "<b>"),
    ("Say <b>, <|im |> and <think>.", CHATML, None)]


@pytest.mark.parametrize("question, template, token", HELD)
def test_a_question_that_holds_control_tokens_is_refused_with_its_row(question, template, token, bring, show,
                                                                      tmp_path):
    folder = bring(template, tokens=["<a>"], vocab_size=640)
    change(folder, "tokenizer.json", lambda config: config["added_tokens"].append(
        config["added_tokens"][-1] | dict(id=607, content="<b>", special=False)))
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(dict(problem=text)) for text in ("q", question)))
    said = show(folder, dataset=str(file), prompts_per_batch=1)
    words = f"{file}, row 2: the question holds control tokens of --model, {token!r}"
    assert (words if token else "first problem") in said
    assert "first problem" in show(folder, dataset=str(file), prompts_per_batch=1, prompt="plain")


# ---------------------------------------- the response's beginning in the prompt --------------------------
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
LLAMA = ("{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}"
         "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}")
TURNED = "<|im_end|>\n<|im_start|>assistant\n"
LONG = "Well, let me see." * 30  # more tokens than anybody would look at behind a prompt
BEGINNINGS = [  # template, prompt file, what is handed on; a question and what a user says of tags are not
    (CHATML, "[user]\n{question}\nThink in <think>.", TURNED),
    (OPENS, "[user]\n{question}", TURNED + "<think>\n"),
    (CHATML, "[user]\nq\n[assistant]\n<think>\n[user]\n{question}\n[assistant]\n<think> " + LONG,
     TURNED + "<think> " + LONG),
    (LLAMA, "[user]\n{question}\n[assistant]\n<think>", " [/INST]<think>"),
    (CHATML, "<think> Q: {question}\nA: <think> ", "\nA: <think> "),
    (CHATML, "<think> Q: {question}", "")]


@pytest.mark.parametrize("template, prompt, beginning", BEGINNINGS)
def test_what_stands_behind_the_last_header_is_read_with_the_response(template, prompt, beginning, bring,
                                                                      tmp_path):
    (file := tmp_path / "prompt.txt").write_text(prompt)
    folder = bring(template)
    tokenizer, _ = read_tokenizer(folder, read_config(folder, 400), str(file))
    run = SimpleNamespace(tokenizer=tokenizer, args=SimpleNamespace(prompt=str(file)))
    prompt_ids = encode_prompt(tokenizer, "What does <think> do?", str(file))
    assert end_of_prompt(tokenizer, str(file), prompt_ids) == beginning

    def read(text, prompt_ids):
        response = common.Rollout(prompt_ids, tokenizer.encode(text, add_special_tokens=False), None, False)
        common.decode(run, [response], common.Problem("q"))
        return response.answer

    opened = "<think>" in beginning
    assert read(r" I try \boxed{3}, no, wait", prompt_ids) == (None if opened else "3")
    assert read(r" I try \boxed{3}</think> \boxed{4}", prompt_ids) == "4"
    # a fork's next turn goes on in the same thought, or behind it
    for text, answer in (("hm", None if opened else "3"), ("hm </think> so", "3")):
        told = prompt_ids + tokenizer.encode(f"{text} Verify: ", add_special_tokens=False)
        assert read(r"\boxed{3}", told) == answer


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
