"""Shared by the tests: short toy runs in this process, a tiny random Llama, toy policies and rollouts."""

import json
import os
import random
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import common

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
SMALL = dict(steps=2, votes=8, train_samples=8, prompts_per_batch=4, max_new_tokens=64, eval="", checkpoint_every=0, updates_per_batch=2)


def run_toy(module, out, **overrides) -> list[dict]:
    """Run a script's main on the toy with a small budget; returns the lines of metrics.jsonl."""
    module.main(module.Args(**{**module.TOY, **{k: v for k, v in SMALL.items() if k in module.Args.__dataclass_fields__},
                               **overrides, "out": str(out)}))
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def make_policy(model=None, trainable=True, **overrides):
    args = common.Args(**{"lr": 1e-3, "max_new_tokens": 64, **overrides})
    return common.Policy(args, str(model or common.TOY), torch.device("cpu"), torch.float32, trainable)


def random_rollouts(count, seed=0, vocabulary=300, shortest=1, longest=40):
    """Responses of very uneven length over random tokens."""
    rng = random.Random(seed)
    rollouts = []
    for _ in range(count):
        prompt = [rng.randrange(5, vocabulary) for _ in range(rng.randint(2, 30))]
        response = [rng.randrange(5, vocabulary) for _ in range(rng.randint(shortest, longest))]
        rollouts.append(common.Rollout(prompt, response, torch.zeros(len(response)), True, advantage=rng.uniform(-2, 2)))
    return rollouts


ARCHITECTURES = ["Llama", "Qwen3", "Mistral", "Phi3", "Gemma", "GPT2", "Falcon", "OPT", "GPTJ", "Bloom"]


def tiny_model(name, folder):
    """A randomly initialised model of this architecture, vocabulary 64, saved to folder."""
    import transformers
    options = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                   pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.5)
    options |= dict(GPTJ=dict(rotary_dim=8), OPT=dict(ffn_dim=64, word_embed_proj_dim=32, init_std=0.5)).get(name, {})
    torch.manual_seed(0)
    model = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(getattr(transformers, name + "Config")(**options))
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A randomly initialised model of another architecture (untied head) with the toy's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(common.TOY)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
