"""How many bytes a run takes: formulas over the model's config; engine/plan.py makes a plan of them.

They cover dense decoders of the Llama and Qwen kind (grouped KV heads, SwiGLU, RMSNorm, tied or untied head)
under FSDP2, as engine/policy.py and engine/fast.py run them; of other architectures only the parameters are
counted, the rest is an estimate. Sizes are bytes per GPU unless said otherwise; c is the size of a number in
the compute type. tests/test_plan.py holds `resident`, `scoring_moments` and `update_moments` to a simulation;
not simulated, so estimates: --offload, the constants below, all samplers, the embedder. Attention is counted
with padded rows, of which CUDA's variable-length kernel needs none."""

from __future__ import annotations

import os
from dataclasses import dataclass

GIB = 2 ** 30
KNOWN = ("llama", "mistral", "qwen2", "qwen3")
HEAD_CHUNK = 2 ** 28      # logits that exist at a time: LogProbs.ELEMENTS["cuda"] of engine/fast.py
VLLM_ASLEEP = 1 * GIB     # CUDA graphs and compiled code stay: 0.5 to 1.5
VLLM_WORKSPACE = 3 * GIB  # activations and logits of its largest batch, within its share
MOST_SEQUENCES = 256      # that vLLM decodes at a time; the workspace has room for their logits
PROCESS = 3 * GIB         # host memory of one rank: torch, CUDA, vLLM


@dataclass(frozen=True)
class Options:
    """What of a run decides its size and time. Flags by their names, then the machine."""
    micro_tokens: int = 16384
    """0: plan_from_args chooses."""
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 3072
    prompts_per_batch: int = 8
    votes: int = 64
    train_samples: int = 32
    num_minibatches: int = 8
    kl_coef: float = 0.001
    """0: no reference model."""
    entropy_coef: float = 0.0
    gradient_checkpointing: str = "auto"
    gpu_memory: float = 0.5
    tensor_parallel: int = 1
    offload: str = "none"
    """reference: it waits in host memory; optimizer: float32 weights, gradients and Adam do, too."""
    dtype: str = "auto"
    steps: int = 0
    keep: int = 2
    ranks: int = 1
    gpu_gib: float = 80.0
    gpu: str = ""
    """Name of the GPU, for its speed; empty: guessed from its memory."""
    train: bool = True
    """False: an evaluation, in which the sampler is alone."""
    engine: str = "vllm"
    """What samples: vllm, hf, or plain, whose updates have full logits as well."""
    embedding: Shape | None = None
    """EVOL-RL's embedder."""

    @property
    def c(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def full_length(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def recompute(self) -> bool:
        return self.gradient_checkpointing != "off"

    def largest_micro_batch(self, rows: int) -> int:
        """Its tokens if the ranks share so many sequences of full length (plan_micro_batches)."""
        return max(self.full_length, min(self.micro_tokens, rows * self.full_length // self.ranks))


# -------------------------------------------------- the model -----------------------------------------------
@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. q, kv: width of all query heads, of all key (or value) heads."""
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    qk_norm: bool
    layer: int
    """Parameters of one layer: one FSDP group."""
    root: int
    """Parameters of embeddings, head and last norm: FSDP's last group."""
    exact: bool
    """The formulas know this architecture."""

    @property
    def weights(self) -> int:
        return self.layers * self.layer + self.root

    @property
    def head(self) -> int:
        """Parameters of the head (and of the embeddings), the largest matrix."""
        return self.vocabulary * self.hidden


def shape_of(config) -> Shape:
    """Sizes from a transformers config; if it is not KNOWN, parameters are counted on the meta device."""
    text = config.get_text_config()
    hidden, heads, vocabulary = text.hidden_size, text.num_attention_heads, text.vocab_size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or hidden // heads
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    tied, qk_norm = text.tie_word_embeddings, text.model_type == "qwen3"
    q, kv = heads * head_size, kv_heads * head_size
    layer = 2 * hidden * (q + kv) + 3 * hidden * inner + 2 * hidden  # q, o, k, v; gate, up, down; two norms
    layer += 2 * head_size if qk_norm else 0                         # norms of q and k
    layer += q + 2 * kv if text.model_type == "qwen2" else 0         # biases of q, k, v
    root = vocabulary * hidden * (1 if tied else 2) + hidden         # embeddings, head, last norm
    exact = text.model_type in KNOWN and not getattr(text, "attention_bias", False)
    if not exact:
        layer = (parameters_on_meta(config) - root) // text.num_hidden_layers
    return Shape(text.num_hidden_layers, hidden, inner, heads, kv_heads, head_size, vocabulary, tied, qk_norm,
                 layer, root, exact)


def parameters_on_meta(config) -> int:
    """Parameters of the model that transformers makes of this config, without memory for them."""
    import torch
    from transformers import AutoModelForCausalLM
    trusted = type(config).__module__.startswith("transformers_modules")  # its code has run already
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    return sum(p.numel() for p in model.parameters())


# ----------------------------------------- the policy (simulated as well) -----------------------------------
def resident(s: Shape, o: Options, gradients: bool) -> dict[str, int]:
    """What stays between micro-batches: this rank's shards, 4 + 4 + 8 bytes a parameter, c of the reference.

    Offloaded weights come to the GPU matrix by matrix."""
    shard, on_gpu = s.weights // o.ranks, o.offload != "optimizer"
    return {"weights, float32": 4 * shard if on_gpu else 4 * s.head // o.ranks,
            "gradients": 4 * shard if on_gpu and gradients else 0,
            "Adam": 8 * shard if on_gpu else 0,
            "reference": o.c * shard if o.offload == "none" and o.kl_coef > 0 else 0}


def layer_activations(s: Shape, c: int, tokens: int, padded: int) -> int:
    """What a layer keeps for its backward pass. padded: rows x longest, which attention sees."""
    q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    norms = 2 * (4 + 2 * c) * s.hidden                 # two RMSNorms: float32 copy, normalised, scaled
    norms += (4 + c) * (q + kv) if s.qk_norm else 0    # of q and k: float32 copy, normalised
    mlp = 4 * c * s.inner                              # gate, silu(gate), up, their product
    attention = 2 * c * (q + kv) + 4 * s.heads         # q, k, v, output in padded rows; log-sum-exp
    return tokens * (norms + mlp + c * q) + padded * attention  # c q: the output once more, packed


def activations(s: Shape, c: int, tokens: int, recompute: bool) -> int:
    """What all layers keep if nothing is padding: all, or their inputs and all of the one computed again."""
    one = layer_activations(s, c, tokens, tokens)
    return s.layers * c * s.hidden * tokens + one if recompute else s.layers * one


def scoring_moments(s: Shape, o: Options, tokens: int, responses: int) -> list[dict[str, int]]:
    """Beside what is resident, at three moments of the reference's forward pass (the policy's takes less).

    responses: tokens of responses. With several ranks a group is gathered into one flat buffer and copied out
    of it, so for a while it takes twice its size; one rank only casts its weights."""
    c, twice = o.c, 2 if o.ranks > 1 else 1
    stream = c * s.hidden * tokens          # the activations between two layers
    chunk = min(HEAD_CHUNK, responses * s.vocabulary)
    # Root and first layer; a layer's silu(gate), up and product; logits of a chunk and their exponentials.
    first = {"gathered weights": twice * c * (s.root + s.layer), "activations": stream}
    layer = {"gathered weights": c * s.root + twice * c * s.layer,
             "activations": 3 * c * s.inner * tokens + 4 * stream}
    logits = 4 * 4 * responses * s.vocabulary if o.engine == "plain" else 2 * 4 * chunk
    head = {"gathered weights": c * s.root + (twice - 1) * c * s.layer,
            "activations": c * s.hidden * responses, "logits": logits}
    return [first, layer, head]


def update_moments(s: Shape, o: Options, tokens: int, padded: int, responses: int) -> list[dict[str, int]]:
    """Beside what is resident, at three moments of the backward pass of one micro-batch."""
    c, twice = o.c, 2 if o.ranks > 1 else 1
    stream = c * s.hidden * tokens
    one = layer_activations(s, c, tokens, padded)
    kept = s.layers * (stream if o.recompute else one)
    chunk = min(HEAD_CHUNK, responses * s.vocabulary)
    # Head: last norm, hidden states, their gradient; the head's float32 gradient; a chunk's logits and (in c)
    # their gradient, an entropy term needs two more; then that beside the head's gradient in c.
    of_chunk = max((12 if o.entropy_coef > 0 else 4 + c) * chunk, c * chunk + c * s.head)
    head = {"gathered weights": c * s.root + (twice - 1) * c * s.layer,
            "activations": kept + (4 + c) * s.hidden * tokens + 2 * c * s.hidden * responses,
            "logits": of_chunk, "gradients in transit": 4 * s.head}
    if o.engine == "plain":  # log-probs, their exponentials, four gradients as large; the head's comes later
        head |= {"logits": 6 * 4 * responses * s.vocabulary, "gradients in transit": 0}
    # Layer: all of it, if recomputed; three gradients as wide as the MLP when its product is gone, two of the
    # stream. Gradients in c: the head's, one matrix of this layer; float32: those of the layer before.
    inside = (one if o.recompute else 0) - stream + 2 * c * s.inner * tokens + 2 * stream
    layer = {"gathered weights": c * s.root + twice * c * s.layer, "activations": kept + inside,
             "gradients in transit": c * s.head + c * s.layer // 3 + 4 * s.layer}
    # End: the root's float32 gradients beside those in c, and then beside this rank's shard.
    end = {"gradients in transit": 4 * s.root + max(c * s.root, 4 * s.root // o.ranks)}
    return [head, layer, end]


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())


# ------------------------------- samplers, embedder, disk, host memory (not simulated) ----------------------
def sampler_awake(s: Shape, o: Options) -> int:
    """vLLM: its share of the GPU. Without it: weights, keys and values of all rows (those of a prompt once;
    plain: in every row), and about 40 bytes a logit to draw from."""
    if o.engine == "vllm":
        return int(o.gpu_memory * o.gpu_gib * GIB)
    most = 512 if o.engine == "plain" else max(o.votes, min(1024, 2 ** 26 // s.vocabulary))
    rows = min(most, o.votes * -(-o.prompts_per_batch // o.ranks))
    prompts = rows if o.engine == "plain" else -(-rows // o.votes)
    tokens = rows * o.max_new_tokens + prompts * o.max_prompt_tokens
    return o.c * s.weights + kv_bytes_per_token(s, o) * tokens + 40 * rows * s.vocabulary


def sampler_asleep(s: Shape, o: Options) -> int:
    """While others work. The samplers without vLLM keep their weights."""
    return VLLM_ASLEEP if o.engine == "vllm" else o.c * s.weights


def embedder_bytes(e: Shape, o: Options) -> int:
    """Its weights, and a layer of eight responses of full length: MLP, four streams, attention's mask."""
    tokens = 8 * o.max_new_tokens
    return 2 * e.weights + 2 * tokens * (3 * e.inner + 4 * e.hidden) + 3 * tokens * o.max_new_tokens


def kv_bytes_per_token(s: Shape, o: Options) -> int:
    """Keys and values of one token in all layers, of the heads that one GPU of an engine holds."""
    return 2 * s.layers * max(1, s.kv_heads // o.tensor_parallel) * s.head_size * o.c


def kv_room(s: Shape, o: Options) -> int:
    """What vLLM's share of the GPU leaves for keys and values beside its weights and workspace."""
    return int(o.gpu_memory * o.gpu_gib * GIB) - o.c * s.weights // o.tensor_parallel - VLLM_WORKSPACE


def kv_sequences(s: Shape, o: Options) -> int:
    """How many sequences of full length the KV cache holds."""
    return max(0, kv_room(s, o)) // (kv_bytes_per_token(s, o) * o.full_length)


def checkpoint_bytes(s: Shape) -> int:
    """On disk: float32 weights and two moments."""
    return 12 * s.weights


def final_bytes(s: Shape, o: Options) -> int:
    """On disk: the final model, in the compute type."""
    return o.c * s.weights


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes(s: Shape, o: Options) -> int:
    """Of a node (8 ranks at most): the bf16 file, mapped once for all ranks, who read it group by group;
    processes; rank 0's copy of the final model while it is saved; what is offloaded; and of HFSampler, which
    is tried in float32 first, a copy per rank."""
    node = min(o.ranks, 8)
    memory = 2 * s.weights + node * PROCESS + (2 * o.embedding.weights if o.embedding else 0)
    memory += 4 * s.weights * node if o.engine == "hf" else 0
    if o.train:
        memory += final_bytes(s, o)
        memory += 16 * s.weights * node // o.ranks if o.offload == "optimizer" else 0
        memory += o.c * s.weights * node // o.ranks if o.offload != "none" and o.kl_coef > 0 else 0
    return memory
