"""Does a run fit, and how many GPUs should share a vLLM engine? From the model's config alone:

    python -m tools.plan ttrl.py --model Qwen/Qwen2.5-Math-7B --gpus 8 --gpu_gib 80

It takes a script's own flags; the script itself prints the same with --plan: the GiB of every phase of a
step, vLLM's room for sequences, disk and host memory. It is an estimate (docs/measured.md). The update's
terms are those of engine/plan.py, which a run itself goes by; the others are only used here."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections import ChainMap
from pathlib import Path

from engine.base import UserError, first_line
from engine.ranks import from_torchrun, print0, rank_and_ranks
from engine.checkpoint import complete
from engine.plan import ASLEEP, GIB, OVERHEAD, USABLE, fitting, gpu_memory, parameters_of, update_memory
from transformers import AutoConfig

# Assumed: activations and logits of vLLM's largest batch; those, keys and values of the sampler without it.
WORKSPACE = 3 * GIB
# Assumed, of an H100 with NVLink: bytes a second that sampling reads, seconds of an all-reduce of a layer.
# And of its host: seconds of one core, in every rank of an engine, for a sampled token and for a step. vLLM's
# scheduler alone takes 27 microseconds a token on a CPU core; one H200's host took 30 to 36 in all.
BANDWIDTH, ALL_REDUCE, HOST_TOKEN, HOST_STEP = 2.85e12, 12e-6, 34e-6, 1.5e-3
ALIVE = 0.4  # share of the sequences that are still being sampled, on average over the longest one's steps
REMEDIES = dict(
    sampling="a smaller --gpu_memory, --offload optimizer, more GPUs",
    vote="a smaller embedder, --offload optimizer, more GPUs",
    update="--gradient_checkpointing on, a smaller --micro_tokens, --offload optimizer, more GPUs",
    sync="--offload optimizer, --tensor_parallel, more GPUs",
    cache="a larger --gpu_memory, --tensor_parallel, fewer --max_new_tokens")


class Plan:
    """What a run takes of each of its GPUs: --gpus of --gpu_gib, else the ranks and GPUs here."""

    def __init__(self, args, config):
        self.args, self.machine, self.vllm = args, args.machine, args.machine.uses_vllm
        self.ranks, self.gpu = self.machine.gpus or rank_and_ranks()[1], gpu_memory(self.machine)
        self.usable = USABLE * self.gpu - OVERHEAD
        self.weights = parameters_of(config, self.machine.trust_remote_code)
        self.micro_tokens, self.recompute = fitting(args, config, self.weights)
        self.update = update_memory(args, config, self.weights, self.micro_tokens, self.recompute)
        self.c, text = 4 if self.machine.dtype == "float32" else 2, config.get_text_config()
        self.layers, self.heads = text.num_hidden_layers, text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_size = getattr(text, "head_dim", None) or text.hidden_size // self.heads
        self.length = args.max_prompt_tokens + args.max_new_tokens  # of the longest prompt and response
        own = {name: own_model(name, args.max_new_tokens) for name in args.own_models()}
        self.own = {name: size for name, size in own.items() if size}
        checkpoints = self.machine.keep + 1 if self.machine.checkpoint_every else 1  # also the next one
        self.disk = (12 * checkpoints + self.c) * self.weights  # with the final model
        reference = self.c if args.kl_coef > 0 else 0
        offloaded = dict(none=0, reference=reference, optimizer=16 + reference)[self.machine.offload]
        self.host = offloaded * self.weights  # memory of all nodes together

    def phases(self) -> dict[str, dict[str, float]]:
        """{phase: {what: bytes at the phase's peak}}."""
        stays = {name: self.update[name] for name in ("weights and Adam", "reference")}
        asleep = self.update["sampler"]
        awake = ASLEEP + self.c * self.weights / self.machine.tensor_parallel if self.vllm else asleep
        sampling = self.machine.gpu_memory * self.gpu if self.vllm else awake + WORKSPACE
        phases = dict(sampling=dict(sampler=sampling), vote=self.own | dict(sampler=asleep),
                      update=self.update,
                      sync={"gathered weights": self.update["gradient of the head"], "sampler": awake})
        if not self.own:
            del phases["vote"]
        return {phase: stays | parts for phase, parts in phases.items()}

    def cached(self, parallel: int) -> tuple[int, int]:
        """(sequences of full length that an engine of so many GPUs has room for, sequences that it gets)."""
        room = self.machine.gpu_memory * self.gpu - self.c * self.weights / parallel - WORKSPACE
        responses = self.args.prompts_per_batch * self.args.responses_per_prompt()
        return int(max(0, room) / self.sequence(parallel)), -(-responses * parallel // self.ranks)

    def sequence(self, parallel: int) -> int:
        """Bytes of the keys and values of a sequence of full length on each of its engine's GPUs."""
        return 2 * self.c * self.layers * -(-self.kv_heads // parallel) * self.head_size * self.length

    def sampling_seconds(self, parallel: int) -> float:
        """A step's, on paper. On the GPU each token of the longest response reads the weights and, as most
        responses are short, a quarter of all keys and values. Meanwhile every rank of an engine schedules all
        of its sequences on the host: the slower of both counts. Sequences without room wait."""
        room, sequences = self.cached(parallel)
        together = min(sequences, 2 * room)
        bytes_read = self.c * self.weights / parallel + together * self.sequence(parallel) / 4
        gpu = bytes_read / BANDWIDTH + 2 * self.layers * ALL_REDUCE * (parallel > 1)
        host = HOST_STEP + HOST_TOKEN * ALIVE * together
        return self.args.max_new_tokens * max(gpu, host) * max(1, sequences / max(1, 2 * room))

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
        out, lacking = Path(self.machine.out or "runs").resolve(), []
        there = 12 * self.weights * len(complete(out))
        free = shutil.disk_usage(next(folder for folder in [out, *out.parents] if folder.exists())).free
        if self.disk > there + free:
            lacking.append(f"The run takes up to {self.disk / 1e9:,.0f} GB of disk, but {out} has "
                           f"{free / 1e9:,.0f} GB left; give another --out or a smaller --keep.")
        here, free = self.host * from_torchrun("LOCAL_WORLD_SIZE", 1) / self.ranks, free_memory()
        if here > free:
            lacking.append(f"--offload {self.machine.offload} takes {here / GIB:,.0f} GiB of this machine's "
                           f"memory, of which {free / GIB:,.0f} GiB are free.")
        return lacking

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
        room, sequences = self.cached(self.machine.tensor_parallel)
        if self.vllm:
            lines.append(f"vLLM has room for {room:,} sequences of {self.length:,} tokens; an engine gets "
                         f"{sequences:,}.")
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


def show(args, config) -> None:
    """Print the table on rank 0 and exit, with code 0 if the run fits, else 1. Raises UserError if the config
    lacks what the terms need, which are those of a dense decoder."""
    try:
        plan = Plan(args, config)
    except Exception as error:
        raise UserError(f"--model is of the type {config.model_type}, of which --plan does not know the "
                        f"memory: {type(error).__name__} {first_line(error)}") from None
    print0(plan.table())
    sys.exit(1 if plan.misfit() else 0)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"{__doc__}\n\nError: name a script first, such as ttrl.py.")
    sys.argv = [*sys.argv[1:], "--plan"]
    runpy.run_path(sys.argv[0], run_name="__main__")
