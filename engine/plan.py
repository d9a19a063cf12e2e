"""Does a run fit its GPUs? A sum of a few terms for each phase of a step, from the model's config alone:

    python ttrl.py --model Qwen/Qwen2.5-Math-7B --plan --gpus 8 --gpu_gib 80

The terms are those of dense decoders (Llama, Qwen) under FSDP2 that sample with vLLM; of another model only
the parameters are exact. Nothing here was measured on a GPU. docs/plan.md has a table of models and flags."""

from __future__ import annotations

import os
import sys

import torch
from transformers import AutoModelForCausalLM

from engine.base import UserError, first_line, rank_and_ranks, say

GIB = 2 ** 30
MICRO_TOKENS = (16384, 8192, 4096)  # what --micro_tokens 0 chooses from; else one sequence at a time
HEAD_CHUNK = 2 ** 26                # logits that exist at a time: CHUNK["cuda"] of engine/logprobs.py
# Assumed: CUDA context, NCCL and cuBLAS; what fragmentation leaves of a GPU; CUDA graphs of a sleeping vLLM;
# activations and logits of its largest batch.
OVERHEAD, USABLE, ASLEEP, WORKSPACE = 2 * GIB, 0.95, 1 * GIB, 3 * GIB
REMEDIES = dict(
    sampling="a smaller --gpu_memory, --offload optimizer, more GPUs",
    update="--gradient_checkpointing on, a smaller --micro_tokens, --offload optimizer, more GPUs",
    sync="--offload optimizer, --tensor_parallel, more GPUs",
    cache="a larger --gpu_memory, --tensor_parallel, fewer --max_new_tokens")


class Plan:
    """Bytes that a run takes of each of its GPUs: --gpus of --gpu_gib, else the ranks and GPUs here, without
    a GPU 80 GiB. --micro_tokens 0 becomes the largest of MICRO_TOKENS that fits, else one sequence."""

    def __init__(self, args, config):
        """args: of a script. config: the model's.

        q, kv: width of all query heads, of all key (or value) heads. weights: the parameters, counted in a
        model without memory; root: those of embeddings and (untied) head, which FSDP gathers together; layer:
        those of one layer."""
        self.args = args
        self.ranks, self.gpu = args.machine.gpus or rank_and_ranks()[1], (args.machine.gpu_gib or 80.0) * GIB
        if torch.cuda.is_available() and not args.machine.gpu_gib:
            self.gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0))).total_memory
        self.c = 4 if args.machine.dtype == "float32" else 2  # bytes of a number in the compute type
        self.length = args.max_prompt_tokens + args.max_new_tokens  # of the longest prompt and response
        text = config.get_text_config()
        self.layers, self.hidden, self.vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
        self.inner = getattr(text, "intermediate_size", None) or 4 * self.hidden
        head_size = getattr(text, "head_dim", None) or self.hidden // text.num_attention_heads
        self.q = text.num_attention_heads * head_size
        self.kv = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.machine.trust_remote_code)
        self.weights = sum(p.numel() for p in model.parameters())
        self.root = self.vocabulary * self.hidden * (1 if text.tie_word_embeddings else 2)
        self.layer = (self.weights - self.root) // self.layers
        for tokens in [args.machine.micro_tokens] if args.machine.micro_tokens else [*MICRO_TOKENS, 1]:
            self.micro_tokens = tokens
            if not self.misfit():
                break

    def phases(self) -> dict[str, dict[str, float]]:
        """{phase: {what: bytes at the phase's peak}}. Scoring takes less than the update."""
        a, machine, c = self.args, self.args.machine, self.c
        head, shard = self.vocabulary * self.hidden, self.weights / self.ranks
        offload = machine.offload == "optimizer"
        stays = {"weights and Adam": 4 * head / self.ranks if offload else 12 * shard,
                 "reference": c * shard if a.kl_coef > 0 and machine.offload == "none" else 0}
        rows = -(-a.prompts_per_batch * a.train_samples // a.num_minibatches)
        tokens = max(self.length, min(self.micro_tokens, rows * self.length // self.ranks))
        # kept for the backward pass: norms (Qwen3: of q and k, too), q, k, v, output, gate, up, their product
        layer = c * tokens * (8 * self.hidden + 4 * self.inner + 6 * self.q + 4 * self.kv)
        inputs, keep = c * tokens * self.hidden * self.layers, machine.gradient_checkpointing == "off"
        update = {"gradients": 0 if offload else 4 * shard,
                  "gathered weights": c * (self.root + 2 * self.layer),
                  "activations": self.layers * layer if keep else inputs + layer,
                  "logits": 20 * min(HEAD_CHUNK, tokens * self.vocabulary),
                  "gradient of the head": 2 * c * head, "vLLM": ASLEEP}
        sync = {"gathered weights": 2 * c * head, "vLLM": ASLEEP + c * self.weights / machine.tensor_parallel}
        sampling = {"vLLM": machine.gpu_memory * self.gpu}
        return dict(sampling=stays | sampling, update=stays | update, sync=stays | sync)

    def cached_sequences(self) -> int:
        """Sequences of full length whose keys and values fit into vLLM's share beside its weights."""
        parallel = self.args.machine.tensor_parallel
        room = self.args.machine.gpu_memory * self.gpu - self.c * self.weights / parallel - WORKSPACE
        return int(max(0, room) / (2 * self.c * self.layers * self.kv / parallel * self.length))

    def misfit(self) -> str:
        """The phase that takes more than there is; "cache": vLLM has no room for a sequence; "": it fits."""
        usable = USABLE * self.gpu - OVERHEAD
        for phase, parts in self.phases().items():
            if sum(parts.values()) > usable:
                return phase
        return "" if self.cached_sequences() else "cache"

    def verdict(self) -> str:
        """One sentence: it fits, or what does not and what may help."""
        phase = self.misfit()
        if not phase:
            return "It fits."
        what = f"vLLM's share of a GPU has no room for a sequence of {self.length:,} tokens"
        if phase != "cache":
            what = (f"{phase} takes {sum(self.phases()[phase].values()) / GIB:.1f} GiB of each GPU's "
                    f"{self.gpu / GIB:g}, of which a twentieth and {OVERHEAD / GIB:.0f} must stay free")
        return f"It does not fit: {what}; try {REMEDIES[phase]}."

    def table(self) -> str:
        """GiB of each GPU by phase, vLLM's room for sequences, and the verdict."""
        phases = {phase: parts | {"together": sum(parts.values())} for phase, parts in self.phases().items()}
        lines = [f"Plan for {self.ranks} GPU(s) of {self.gpu / GIB:g} GiB; {self.weights / 1e9:.2f}e9 "
                 "parameters", f"{'GiB of each GPU in':22}" + "".join([f"{phase:>10}" for phase in phases])]
        for name in phases["update"]:
            sizes = [parts.get(name, 0) / GIB for parts in phases.values()]
            lines.append(f"{name:22}" + "".join([f"{size:10.1f}" for size in sizes]))
        return "\n".join([
            *lines, f"vLLM has room for {self.cached_sequences():,} sequences of {self.length:,} tokens.",
            f"Micro-batches have up to {self.micro_tokens:,} tokens (--micro_tokens).", self.verdict()])


def check_plan(args, config) -> int:
    """--micro_tokens of a run on the GPUs here; raises UserError if it does not fit them. With --plan: prints
    the table on rank 0 and exits, with code 0 if the run fits, else 1."""
    try:
        plan = Plan(args, config)
    except Exception as error:  # its terms need what the config of a dense decoder has
        sentence = f"--model is of the type {config.model_type}, of which --plan does not know the memory: "
        sentence += f"{type(error).__name__} {first_line(error)}"
        if args.machine.plan:
            raise UserError(sentence) from None
        say(sentence)
        return args.machine.micro_tokens
    if args.machine.plan:
        if rank_and_ranks()[0] == 0:
            print(plan.table(), flush=True)
        sys.exit(1 if plan.misfit() else 0)
    if plan.misfit():
        raise UserError(f"{plan.verdict()} --plan shows the memory of every phase.")
    return plan.micro_tokens
