"""The models that run anywhere, the two built-in toys and SmolLM2, and the options that suit them.

A script's last lines add what suits its own method's options."""

from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TOY_MODEL = str(ROOT / "toy")
# --model: the two toys have the same problems and options (toy/README.md)
TOYS = {"": TOY_MODEL, "toy": TOY_MODEL, "toy_even": str(ROOT / "toy/even")}
SMOLLM2_MODEL = str(ROOT / "smollm2")
# Without --model: the toy, a thousand times smaller than the papers' models, so with a larger learning rate.
TOY = dict(dataset="toy", eval="train,toy_test", steps=60, eval_every=20, eval_samples=8, checkpoint_every=10,
           sampler="hf", prompts_per_batch=16, votes=16, train_samples=8, max_prompt_tokens=128,
           max_new_tokens=128, micro_tokens=4096, lr=2e-4, num_minibatches=2, eval_temperature=1.0,
           eval_top_p=1.0, eval_greedy=True, log_texts=1000)  # all of a step's prompts
# --model smollm2, a real pretrained model that toy/make_smollm2.py makes: these beside the toy's.
SMOLLM2 = dict(
    dataset="smollm2", eval="smollm2_test,smollm2_ood", prompt="examples/prompts/few_shot.txt",
    max_prompt_tokens=192, max_new_tokens=40, prompts_per_batch=8, votes=16, train_samples=8, steps=16,
    eval_every=0, eval_samples=2, checkpoint_every=4, lr=1e-5, micro_tokens=768,
    # a processor that multiplies matrices in bfloat16 does so seven times as fast as in float32
    dtype="bfloat16" if torch.cpu.get_capabilities().get("amx_bf16") else "auto",
    num_minibatches=1, kl_coef=0.0)
