"""Does a run fit? A sum of a few terms for each phase of a step, from the model's config alone:

    python ttrl.py --model Qwen/Qwen2.5-Math-7B --plan --gpus 8 --gpu_gib 80

The terms are those of dense decoders (Llama, Qwen) under FSDP2; of another model only the parameters are
exact. It is an estimate, checked on one GPU (docs/measured.md), so a run that may not fit is only warned."""

from __future__ import annotations

import re
import shutil
import sys
from collections import ChainMap
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.base import UserError, first_line
from engine.checkpoint import complete
from engine.ranks import from_torchrun, print0, rank_and_ranks, same_on_all_ranks
from engine.logprobs import CHUNK

GIB = 2 ** 30
MICRO_TOKENS = (16384, 12288, 8192, 6144, 4096)  # for --micro_tokens 0; else one sequence at a time
# Assumed: CUDA context, NCCL and cuBLAS; what fragmentation leaves of a GPU; CUDA graphs of a sleeping vLLM;
# activations and logits of vLLM's largest batch, and those, keys and values of the sampler without vLLM.
OVERHEAD, USABLE, ASLEEP, WORKSPACE = 2 * GIB, 0.95, 1 * GIB, 3 * GIB
# Assumed, of an H100 with NVLink: bytes a second that sampling reads, seconds of an all-reduce of a layer.
BANDWIDTH, ALL_REDUCE = 2.85e12, 12e-6
UNTRIED = "num_.*experts$|^n_.*experts$|^kv_lora_rank$"  # entries of a config that is refused with vLLM
REMEDIES = dict(
    sampling="a smaller --gpu_memory, --offload optimizer, more GPUs",
    vote="a smaller embedder, --offload optimizer, more GPUs",
    update="--gradient_checkpointing on, a smaller --micro_tokens, --offload optimizer, more GPUs",
    sync="--offload optimizer, --tensor_parallel, more GPUs",
    cache="a larger --gpu_memory, --tensor_parallel, fewer --max_new_tokens")


class Plan:
    """Bytes that a run takes of each of its GPUs: --gpus of --gpu_gib, else the ranks and GPUs here, without
    a GPU 80 GiB.

    micro_tokens, recompute: what --micro_tokens 0 and --gradient_checkpointing auto become: the largest of
    MICRO_TOKENS that fits without recomputation, but for the smallest (responses are seldom half as long as
    they may be, so that ranks get less); else the largest that fits with it, else one sequence."""

    def __init__(self, args, config):
        """q, kv: width of all query heads, of all key (or value) heads. weights: the parameters; root: those
        of embeddings and (untied) head, which FSDP gathers together; layer: those of one layer."""
        self.args, self.machine, self.vllm = args, args.machine, args.machine.uses_vllm
        self.ranks, self.gpu = self.machine.gpus or rank_and_ranks()[1], (self.machine.gpu_gib or 80.0) * GIB
        if torch.cuda.is_available() and not self.machine.gpu_gib:
            self.gpu = torch.cuda.get_device_properties(from_torchrun("LOCAL_RANK", 0)).total_memory
        self.c = 4 if self.machine.dtype == "float32" else 2  # bytes of a number in the compute type
        self.length = args.max_prompt_tokens + args.max_new_tokens  # of the longest prompt and response
        text = config.get_text_config()
        self.layers, self.hidden, self.vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
        self.inner = getattr(text, "intermediate_size", None) or 4 * self.hidden
        self.heads = text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_size = getattr(text, "head_dim", None) or self.hidden // self.heads
        self.q, self.kv = self.heads * self.head_size, self.kv_heads * self.head_size
        self.weights = parameters_of(config, self.machine.trust_remote_code)
        self.root = self.vocabulary * self.hidden * (1 if text.tie_word_embeddings else 2)
        self.layer = (self.weights - self.root) // self.layers
        own = {name: own_model(name, args.max_new_tokens) for name in args.own_models()}
        self.own = {name: size for name, size in own.items() if size}
        self.usable = USABLE * self.gpu - OVERHEAD
        checkpoints = self.machine.keep + 1 if self.machine.checkpoint_every else 1  # also the next one
        self.disk = (12 * checkpoints + self.c) * self.weights  # with the final model
        reference = self.c if args.kl_coef > 0 else 0
        offloaded = dict(none=0, reference=reference, optimizer=16 + reference)[self.machine.offload]
        self.host = offloaded * self.weights  # memory of all nodes together
        sizes = [self.machine.micro_tokens] if self.machine.micro_tokens else [*MICRO_TOKENS, 1]
        choices = [(size, self.machine.gradient_checkpointing) for size in sizes]
        if self.machine.gradient_checkpointing == "auto":
            some = 1 if self.machine.offload == "optimizer" else 4  # there all weights travel each time
            choices = [(size, "off") for size in sizes[:some]] + [(size, "on") for size in sizes]
        for self.micro_tokens, self.recompute in choices:
            if sum(self.phases()["update"].values()) <= self.usable:
                break

    def phases(self) -> dict[str, dict[str, float]]:
        """{phase: {what: bytes at the phase's peak}}. Scoring takes less than the update."""
        a, m, c = self.args, self.machine, self.c
        head, shard = self.vocabulary * self.hidden, self.weights / self.ranks
        offload = m.offload == "optimizer"
        stays = {"weights and Adam": 0 if offload else 12 * shard,
                 "reference": c * shard if a.kl_coef > 0 and m.offload == "none" else 0}
        rows = -(-a.prompts_per_batch * a.train_samples // a.num_minibatches)
        tokens = max(self.length, min(self.micro_tokens, -(-rows // self.ranks) * self.length))
        # kept for the backward pass: norms (Qwen3: of q and k, too), q, k, v, output, gate, up, their product
        layer = c * tokens * (8 * self.hidden + 4 * self.inner + 6 * self.q + 4 * self.kv)
        inputs = c * tokens * self.hidden * self.layers
        logits = tokens * self.vocabulary
        update = {"gradients": 0 if offload else 4 * shard,
                  "gathered weights": c * (self.root + 2 * self.layer),
                  "activations": self.layers * layer if self.recompute == "off" else inputs + layer,
                  "logits": 20 * (logits if m.plain else min(CHUNK["cuda"], logits)),
                  "gradient of the head": 2 * c * head}
        awake, asleep = ASLEEP + c * self.weights / m.tensor_parallel, ASLEEP
        sampling = m.gpu_memory * self.gpu
        if not self.vllm:  # it never sleeps
            awake = asleep = c * self.weights
            sampling = awake + WORKSPACE
        phases = dict(sampling=dict(sampler=sampling), vote=self.own | dict(sampler=asleep),
                      update=update | dict(sampler=asleep),
                      sync={"gathered weights": 2 * c * head, "sampler": awake})
        if not self.own:
            del phases["vote"]
        return {phase: stays | parts for phase, parts in phases.items()}

    def cached(self, parallel: int) -> tuple[int, int]:
        """(sequences of full length that an engine of so many GPUs has room for, sequences that it gets)."""
        room = self.machine.gpu_memory * self.gpu - self.c * self.weights / parallel - WORKSPACE
        given = self.args.prompts_per_batch * self.args.responses_per_prompt()
        return int(max(0, room) / self.sequence(parallel)), -(-given * parallel // self.ranks)

    def sequence(self, parallel: int) -> int:
        """Bytes of the keys and values of a sequence of full length on each of its engine's GPUs."""
        return 2 * self.c * self.layers * -(-self.kv_heads // parallel) * self.head_size * self.length

    def sampling_seconds(self, parallel: int) -> float:
        """A step's, on paper: each token of the longest response reads the weights and, as most responses
        are short, a quarter of all keys and values. Sequences without room wait."""
        room, given = self.cached(parallel)
        read = self.c * self.weights / parallel + min(given, 2 * room) * self.sequence(parallel) / 4
        token = read / BANDWIDTH + 2 * self.layers * ALL_REDUCE * (parallel > 1)
        return self.args.max_new_tokens * token * max(1, given / max(1, 2 * room))

    def parallel_advice(self) -> str:
        """A sentence if engines of more GPUs sample a step in less than three quarters of the time."""
        now, heads = self.machine.tensor_parallel, range(1, self.heads + 1)
        possible = [n for n in heads if not (self.ranks % n or self.heads % n) and now <= n <= 8]
        times = {n: self.sampling_seconds(n) for n in [now, *possible]}
        best = min(n for n, time in times.items() if time < 1.15 * min(times.values()))
        if not self.vllm or times[best] > 0.75 * times[now]:
            return ""
        return (f"On paper, with NVLink, --tensor_parallel {best} samples a step in {times[best]:,.0f} s, "
                f"{now} in {times[now]:,.0f} s.")

    def misfit(self) -> str:
        """One sentence: the phase that takes more than there is, and what may help. Empty: the run fits."""
        for phase, parts in self.phases().items():
            if sum(parts.values()) > self.usable:
                return (f"It does not fit: {phase} takes {sum(parts.values()) / GIB:.1f} GiB of each GPU's "
                        f"{self.gpu / GIB:g}, of which a twentieth and {OVERHEAD / GIB:.0f} must stay free; "
                        f"try {REMEDIES[phase]}.")
        if self.vllm and not self.cached(self.machine.tensor_parallel)[0]:
            return (f"It does not fit: vLLM's share of a GPU has no room for a sequence of {self.length:,} "
                    f"tokens; try {REMEDIES['cache']}.")
        return ""

    def shortages(self) -> list[str]:
        """What this machine's disk and memory lack."""
        out, found = Path(self.machine.out or "runs").resolve(), []
        there = 12 * self.weights * len(complete(out))
        free = shutil.disk_usage(next(folder for folder in [out, *out.parents] if folder.exists())).free
        if self.disk > there + free:
            found.append(f"the run takes up to {self.disk / 1e9:,.0f} GB of disk, but {out} has "
                         f"{free / 1e9:,.0f} GB left; give another --out or a smaller --keep.")
        here = self.host * from_torchrun("LOCAL_WORLD_SIZE", 1) / self.ranks
        if here > (free := free_memory()):
            found.append(f"--offload {self.machine.offload} takes {here / GIB:,.0f} GiB of this machine's "
                         f"memory, of which {free / GIB:,.0f} GiB are free.")
        return found

    def table(self) -> str:
        """GiB of each GPU by phase, vLLM's room for sequences, disk and host memory, and the verdict."""
        phases = self.phases()
        lines = [f"Plan for {self.ranks} GPU(s) of {self.gpu / GIB:g} GiB; {self.weights / 1e9:.2f}e9 "
                 "parameters", f"{'GiB of each GPU in':22}" + "".join([f"{phase:>10}" for phase in phases])]
        for name in [*ChainMap(*phases.values()), "together"]:
            sizes = [parts.get(name, 0) for parts in phases.values()]
            if name == "together":
                sizes = [sum(parts.values()) for parts in phases.values()]
            lines.append(f"{name:22}" + "".join([f"{size / GIB:10.1f}" for size in sizes]))
        for name in self.args.own_models():
            if name not in self.own:
                lines.append(f"Not in the plan: {name}, whose config cannot be read here.")
        room, given = self.cached(self.machine.tensor_parallel)
        if self.vllm:
            lines.append(f"vLLM has room for {room:,} sequences of {self.length:,} tokens; an engine gets "
                         f"{given:,}.")
        size = f"up to {self.micro_tokens:,} tokens" if self.micro_tokens > 1 else "one sequence"
        lines.append(f"Micro-batches have {size} (--micro_tokens), activations are "
                     f"{'' if self.recompute == 'on' else 'not '}recomputed (--gradient_checkpointing).")
        lines.append(f"A checkpoint takes {12 * self.weights / 1e9:,.1f} GB of disk; all that are kept, and "
                     f"the final model, take {self.disk / 1e9:,.1f} GB.")
        if self.machine.offload != "none":
            lines.append(f"--offload {self.machine.offload} takes {self.host / GIB:,.1f} GiB of host "
                         "memory, over all nodes.")
        here = [] if self.machine.gpus else self.shortages()  # else another machine is planned
        advice = filter(None, [self.parallel_advice()])
        return "\n".join([*lines, *here, *advice, self.misfit() or "It fits."])


def parameters_of(config, trust_remote_code: bool = False) -> int:
    """The parameters of a model, counted in one without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in model.parameters())


def own_model(name: str, tokens: int) -> float:
    """Bytes of a script's own model in bfloat16 while it reads 8 texts of so many tokens: its weights and the
    inner products of a layer. 0 if its config cannot be read."""
    try:
        config = AutoConfig.from_pretrained(name)
        inner = 3 * config.intermediate_size + 4 * config.hidden_size
        return 2.0 * (parameters_of(config) + 8 * tokens * inner)
    except Exception:
        return 0.0


def free_memory() -> float:
    """Bytes of host memory that are free or hold files that can be read again."""
    return int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


def plan_of(args, config) -> Plan:
    """Raises UserError if the config has not what its terms need, which are those of a dense decoder."""
    try:
        return Plan(args, config)
    except Exception as error:
        raise UserError(f"--model is of the type {config.model_type}, of which --plan does not know the "
                        f"memory: {type(error).__name__} {first_line(error)}") from None


def show(args, config) -> None:
    """Print the table on rank 0 and exit, with code 0 if the run fits, else 1."""
    plan = plan_of(args, config)
    print0(plan.table())
    sys.exit(1 if plan.misfit() else 0)


def choose_memory_settings(args, config, cuda: bool) -> dict:
    """Choose Policy's micro_tokens where --micro_tokens is 0, and gradient_checkpointing where it is auto: on
    a GPU by the plan, with a warning of what may not fit. Raises UserError if ranks choose differently."""
    micro_tokens, recompute = args.machine.micro_tokens, args.machine.gradient_checkpointing
    if cuda:
        entries = [name for name, value in config.get_text_config().to_dict().items() if value]
        if args.machine.uses_vllm and any(re.search(UNTRIED, name) for name in entries):
            raise UserError(f"--model is of the type {config.model_type}, with experts or latent attention, "
                            "whose weights vLLM may not take again on a GPU, as nobody has tried; give "
                            "--sampler hf.")
        try:
            plan = plan_of(args, config)
        except UserError as error:
            print0(f"Warning: {error}")
        else:
            micro_tokens, recompute = plan.micro_tokens, plan.recompute
            misfit = plan.misfit() and f"{plan.misfit()} That is an estimate (--plan)."
            for warning in filter(None, [misfit, plan.parallel_advice(), *plan.shortages()]):
                print0(f"Warning: {warning}")
    on = recompute == "on" or recompute == "auto" and cuda
    memory = dict(micro_tokens=micro_tokens or MICRO_TOKENS[0], gradient_checkpointing=on)
    same_on_all_ranks({f"--{name}": value for name, value in memory.items()})
    return memory
