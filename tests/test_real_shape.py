"""One full step of a model of real shape on the CPU: Qwen2.5-0.5B's, vocabulary 151,936, half its layers."""

import subprocess
import sys

import pytest
from conftest import ROOT, read_lines

CODE = """
import resource, sys
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
import common, ttrl
folder = sys.argv.pop(1)
tokenizer = AutoTokenizer.from_pretrained(common.TOY_MODEL)
torch.manual_seed(0)
config = Qwen2Config(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=12,
                     num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
                     tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, dtype=torch.bfloat16)
with torch.device("meta"):
    model = Qwen2ForCausalLM(config)
model.to_empty(device="cpu").init_weights()
print("parameters", sum(p.numel() for p in model.parameters()))
model.to(torch.bfloat16).save_pretrained(folder)
tokenizer.save_pretrained(folder)
del model
try:
    common.launch(ttrl.main, ttrl.Args, common.TOY)
finally:
    print("peak GiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20)
"""


@pytest.mark.slow
def test_one_step_of_a_model_of_real_width(tmp_path):
    """In float32, from a bfloat16 checkpoint, as the real one is."""
    flags = ("--dataset toy --steps 1 --prompts_per_batch 2 --votes 2 --train_samples 2 --num_minibatches 1 "
             "--max_prompt_tokens 128 --max_new_tokens 16 --eval= --checkpoint_every 0 --sampler hf").split()
    model = str(tmp_path / "model")
    command = [sys.executable, "-c", CODE, model, *flags, "--model", model, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert line["logp_diff_max"] < 1e-3 and line["skipped_updates"] == 0
    assert int(done.stdout.split("parameters")[1].split()[0]) == 315_084_160
    # float32: policy, reference, sampler, gradients and two moments are 6 x 1.17 = 7.0 GiB
    assert float(done.stdout.split("peak GiB")[1]) < 9.5
