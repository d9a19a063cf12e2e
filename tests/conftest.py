"""Shared by the tests: short toy runs in this process, tiny random models, toy policies and rollouts."""

import contextlib
import functools
import json
import os
import random
import runpy
import signal
from pathlib import Path
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import common
from engine.base import Rollout
from engine.policy import Policy

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
SCRIPTS = "ttrl evol_rl scrl restrain ettrl dynamic_rl".split()
SMALL = dict(steps=2, votes=8, train_samples=8, prompts_per_batch=4, max_new_tokens=64, eval="",
             checkpoint_every=0, num_minibatches=2)
SMALL_OF = dict(restrain=dict(kappa=2), ettrl=dict(trunks=2))  # what else is sized by the number of responses
TIMED = ("seconds/", "tokens_per_second/")


# ------------------------------------------------- toy runs ------------------------------------------------
@functools.cache
def toy_of(module) -> dict:
    """The toy's overrides that a script gives to common.launch in its last line."""
    with mock.patch.object(common, "launch") as launch:
        runpy.run_path(module.__file__, run_name="__main__")
    _, args_class, toy = launch.call_args.args
    assert args_class.__name__ == "Args"
    return toy


def toy_args(module, **overrides):
    """A script's arguments on the toy with a small budget."""
    values = toy_of(module) | SMALL | SMALL_OF.get(module.__name__, {}) | overrides
    return module.Args(**values)


def run_toy(module, out, curves=False, **overrides) -> list[dict]:
    """Run a script's main on the toy with a small budget; returns the lines of metrics.jsonl."""
    args = toy_args(module, **overrides, out=str(out))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    no_curves = contextlib.nullcontext() if curves else mock.patch("tools.plot.plot")  # they take longer than a step
    try:
        with no_curves:
            module.main(args)
    finally:  # the handlers hold the run, and the run holds the lock of its folder
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return read_lines(Path(out) / "metrics.jsonl")


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def untimed(lines: list[dict]) -> list[dict]:
    """The lines of metrics.jsonl without times and speeds."""
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


# ---------------------------------------------- policies, rollouts -----------------------------------------
def make_policy(model=None, trainable=True, **options) -> Policy:
    options = {"max_length": 192, **options}
    return Policy(str(model or common.TOY_MODEL), torch.device("cpu"), torch.float32, trainable, **options)


def random_rollouts(count, seed=0, vocabulary=300, shortest=1, longest=40) -> list[Rollout]:
    """Responses of very uneven length over random tokens."""
    rng = random.Random(seed)
    rollouts = []
    for _ in range(count):
        prompt = [rng.randrange(5, vocabulary) for _ in range(rng.randint(2, 30))]
        response = [rng.randrange(5, vocabulary) for _ in range(rng.randint(shortest, longest))]
        rollouts.append(Rollout(prompt, response, torch.zeros(len(response)), True, advantage=rng.uniform(-2, 2)))
    return rollouts


def fresh_state(path) -> dict[str, torch.Tensor]:
    """The weights of a saved model, by name."""
    from safetensors.torch import load_file
    return load_file(Path(path) / "model.safetensors")


# ------------------------------------------------ tiny models ----------------------------------------------
ARCHITECTURES = ["Llama", "Qwen3", "Mistral", "Phi3", "Gemma", "GPT2", "Falcon", "OPT", "GPTJ", "Bloom"]


def tiny_model(name, folder):
    """A randomly initialised model of this architecture, vocabulary 64, saved to folder."""
    import transformers
    options = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                   num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.5)
    options |= dict(GPTJ=dict(rotary_dim=8), OPT=dict(ffn_dim=64, word_embed_proj_dim=32, init_std=0.5)).get(name, {})
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**options)
    model = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(config)
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A randomly initialised model of another architecture (untied head) with the toy's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(common.TOY_MODEL)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=4096,
                         tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.eos_token_id, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
