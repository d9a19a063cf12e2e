"""A plan before anything is loaded: does a run fit its GPUs, which flags make it fit, how long does it take?

    python ttrl.py --model Qwen/Qwen2.5-Math-7B --plan --gpus 8 --gpu_gib 80

From the model's config alone, with the formulas of engine/sizes.py. tests/test_plan.py holds the policy's
part to a simulation; what CUDA, NCCL and vLLM take, and all times, are estimates, not confirmed on a GPU."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from engine.base import UserError
from engine.embedder import embedder_path
from engine.setup import first_line, planned_ranks
from engine.sizes import (
    GIB, MOST_SEQUENCES, Options, Shape, activations, checkpoint_bytes, final_bytes, host_bytes,
    host_memory, embedder_bytes, kv_bytes_per_token, kv_room, kv_sequences, resident, sampler_asleep,
    sampler_awake, scoring_moments, shape_of, total, update_moments)

# What no tensor accounts for: CUDA context 0.5 GiB, NCCL 0.3 to 1, cuBLAS and what FSDP holds for its other
# streams, about 2 together; and 5% of a GPU for fragmentation, since micro-batches differ in shape.
OVERHEAD, USABLE_SHARE = 2 * GIB, 0.95
MFU, BANDWIDTH_SHARE = 0.4, 0.6  # assumed: reached of the data sheets' peaks
SYNC_SPEED = 20e9                # assumed: bytes/s of gathering weights and writing them into vLLM
MICRO_TOKENS = (16384, 8192, 4096, 1)  # tried in turn; 1: one sequence at a time
CPU_FLOPS = 30e9                 # assumed: float32 operations/s of one thread
TOY_WORK = 16 * 32 * 128 * 355_584  # tokens sampled in a step x parameters
GPUS = {  # dense bf16 FLOP/s and bytes/s (data sheets); GIB from which a GPU of unknown name is taken for it
    "B200": (2250e12, 8.0e12, 160), "H200": (989e12, 4.8e12, 120), "H100": (989e12, 3.35e12, 60),
    "L40S": (362e12, 0.86e12, 41), "A100": (312e12, 1.55e12, 36), "RTX 4090": (165e12, 1.0e12, 0)}
PURPOSES = ("weights, float32", "gradients", "Adam", "reference", "gathered weights", "activations", "logits",
            "gradients in transit", "embedder", "sampler")


# ----------------------------------------------------- time -------------------------------------------------
def gpu_speed(o: Options) -> tuple[str, float, float]:
    """(name, FLOP/s, bytes/s) of the GPU of this name, else of one that its memory suggests."""
    names = [name for name in GPUS if name in o.gpu] or [name for name in GPUS if GPUS[name][2] <= o.gpu_gib]
    return names[0], *GPUS[names[0]][:2]


def wanted_sequences(o: Options) -> int:
    """That an engine would decode at a time if they had room."""
    return min(o.prompts_per_batch * o.votes * o.tensor_parallel // o.ranks, MOST_SEQUENCES)


def decode_rate(s: Shape, o: Options) -> float:
    """Tokens/s of one engine. A decoding step reads all weights once and, of every sequence, keys and values
    of its prompt and of half its response; or its 2 FLOPs a weight and sequence take longer."""
    _, flops, bandwidth = gpu_speed(o)
    batch = max(1, min(wanted_sequences(o), kv_sequences(s, o)))
    context = o.max_prompt_tokens + o.max_new_tokens / 2
    read = o.c * s.weights / o.tensor_parallel + batch * kv_bytes_per_token(s, o) * context
    compute = 2 * s.weights * batch / o.tensor_parallel
    return batch / max(read / (bandwidth * BANDWIDTH_SHARE), compute / (flops * MFU))


def flops_per_token(s: Shape, length: int, passes: int = 3) -> float:
    """In a sequence of this length. passes: 1 forward, 3 with backward, 4 with recomputation. Each takes 2
    FLOPs a weight that is multiplied, and 4 x layers x query width x length / 2 for causal attention."""
    weights = s.weights - (0 if s.tied else s.head)  # embeddings are looked up
    return passes * (2 * weights + 2 * s.layers * s.heads * s.head_size * length)


def seconds_per_step(s: Shape, o: Options) -> dict[str, float]:
    """Of one rollout batch, by phase. Pessimistic: all prompts and responses have full length (most are far
    shorter). Optimistic: ranks never wait for each other. Without evaluations and checkpoints."""
    _, flops, _ = gpu_speed(o)
    sampled = o.prompts_per_batch * o.votes * o.max_new_tokens
    seconds = {"sampling": sampled / decode_rate(s, o) * o.tensor_parallel / o.ranks}
    if o.train:
        a_pass = trained_tokens(o) / o.ranks * flops_per_token(s, o.full_length, 1) / (flops * MFU)
        scored = (1 if o.num_minibatches > 1 else 0) + (1 if o.kl_coef > 0 else 0)  # by policy, by reference
        seconds["scoring"] = scored * a_pass
        seconds["update"] = (4 if o.recompute else 3) * a_pass
        seconds["sync"] = o.c * s.weights / SYNC_SPEED
    return seconds


def trained_tokens(o: Options) -> int:
    """Of one rollout batch, prompts included."""
    return o.prompts_per_batch * o.train_samples * o.full_length


# --------------------------------------------------- the plan -----------------------------------------------
def update_tokens(o: Options) -> int:
    """Tokens of the largest micro-batch of an optimizer step."""
    return o.largest_micro_batch(-(-o.prompts_per_batch * o.train_samples // o.num_minibatches))


def phases_of(s: Shape, o: Options) -> dict[str, dict[str, int]]:
    """Bytes per GPU by purpose, at the moment of every phase that takes most. The worst case: micro-batches
    as large as they may be, no prompt shared, all tokens of responses."""
    sampling = {"sampler": sampler_awake(s, o)}
    if not o.train:
        return {"sampling": sampling}
    idle, updating = resident(s, o, gradients=False), resident(s, o, gradients=True)
    asleep = {"sampler": sampler_asleep(s, o)}
    scored, tokens = o.largest_micro_batch(o.prompts_per_batch * o.train_samples), update_tokens(o)
    phases = {"sampling": idle | sampling}
    if o.embedding:
        phases["embedding"] = idle | asleep | {"embedder": embedder_bytes(o.embedding, o)}
    # the largest matrix gathered and in the sampler's type, beside its weights; vLLM's KV cache wakes later
    weights = o.c * s.weights // o.tensor_parallel if o.engine == "vllm" else 0  # else they count as asleep
    syncing = {"gathered weights": 2 * o.c * s.head, "sampler": asleep["sampler"] + weights}
    return phases | {
        "scoring": idle | max(scoring_moments(s, o, scored, scored), key=total) | asleep,
        "update": updating | max(update_moments(s, o, tokens, tokens, tokens), key=total) | asleep,
        "sync": idle | syncing}


@dataclass(frozen=True)
class Plan:
    shape: Shape
    options: Options
    phases: dict[str, dict[str, int]]
    """Of every phase, bytes per GPU by purpose (PURPOSES) at its peak."""
    advice: dict[str, object] = dataclasses.field(default_factory=dict)
    """Flags that make it fit, if it does not; `ranks` is the number of GPUs. Empty: none were found."""

    @property
    def usable(self) -> int:
        """Bytes of a GPU that phases may take. In an evaluation the overhead is part of vLLM's share."""
        alone = self.options.engine == "vllm" and not self.options.train
        return int(self.options.gpu_gib * GIB * USABLE_SHARE) - (0 if alone else OVERHEAD)

    @property
    def peaks(self) -> dict[str, int]:
        return {phase: total(parts) for phase, parts in self.phases.items()}

    @property
    def excess(self) -> int:
        """Bytes beyond the usable ones in all phases, and those the KV cache lacks for one sequence."""
        beyond = [max(0, peak - self.usable) for peak in self.peaks.values()]
        if self.options.engine != "vllm":
            return sum(beyond)
        sequence = kv_bytes_per_token(self.shape, self.options) * self.options.full_length
        return sum(beyond) + max(0, sequence - kv_room(self.shape, self.options))

    @property
    def fits(self) -> bool:
        return self.excess == 0

    def verdict(self) -> str:
        """It fits, or else what does not, and what would."""
        if self.fits:
            return "It fits."
        phase = max(self.peaks, key=self.peaks.get)
        problem = (f"{phase} takes {gib(self.peaks[phase])} GiB a GPU, of whose {self.options.gpu_gib:g} GiB "
                   f"{gib(self.usable)} can be used")
        if self.peaks[phase] <= self.usable:
            problem = (f"--gpu_memory {self.options.gpu_memory:g} leaves vLLM no room for one sequence of "
                       f"{self.options.full_length:,} tokens beside its weights")
        flags = [f"{v} GPUs" if flag == "ranks" else f"--{flag} {v}" for flag, v in self.advice.items()]
        remedy = f"it fits with {', '.join(flags)}" if flags else "nothing tried makes it fit"
        if "offload" in self.advice:
            remedy += f" and {gib(host_bytes(self.shape, self.advised()))} GiB of host memory a node"
        return f"This run does not fit: {problem}; {remedy}."

    def largest_share(self) -> float:
        """--gpu_memory, in steps of 0.05, that leaves room for what stays on the GPU while vLLM samples."""
        left = self.usable - self.peaks["sampling"] + self.phases["sampling"]["sampler"]
        return max(0.05, min(0.9, int(20 * left / (self.options.gpu_gib * GIB)) / 20))

    def advised(self) -> Options:
        return dataclasses.replace(self.options, **self.advice)

    def check(self) -> None:
        """Raises UserError with the verdict if the run does not fit."""
        if not self.fits:
            raise UserError(self.verdict())

    def table(self) -> str:
        """The whole plan, in fewer than 30 lines."""
        s, o = self.shape, self.options
        lines = [f"Plan for {o.ranks} GPU(s) of {o.gpu_gib:g} GiB; {s.weights / 1e9:.2f}e9 parameters",
                 line("GiB of each GPU at the peak of", self.phases)]
        for purpose in PURPOSES:
            sizes = [parts.get(purpose, 0) for parts in self.phases.values()]
            lines += [line(purpose, map(gib, sizes))] if any(sizes) else []
        lines += [line(f"together (usable: {gib(self.usable)})", map(gib, self.peaks.values()))]
        if not s.exact:
            lines += ["The formulas do not know this architecture: only its parameters are exact."]
        lines += self._other_sizes()
        if self.fits:
            lines += self.times() if o.engine == "vllm" else ["time: only that of vLLM is planned"]
        return "\n".join([*lines, self.verdict()])

    def _other_sizes(self) -> list[str]:
        s, o = self.shape, self.options
        lines = []
        if o.train:
            for what, tokens in {"micro-batch": update_tokens(o), "sequence": o.full_length}.items():
                kept, again = activations(s, o.c, tokens, False), activations(s, o.c, tokens, True)
                sizes = f"{gib(kept)}, recomputed {gib(again)}"
                lines += [f"activations of the largest {what}, {tokens:,} tokens: {sizes}"]
            head = update_moments(s, o, tokens, tokens, tokens)[0]["logits"]
            lines += [f"logits that exist at a time, with their gradients: {gib(head)}"]
            at_most = (o.keep + 1) * checkpoint_bytes(s) + final_bytes(s, o)  # one is being written
            lines += [f"disk: {gib(checkpoint_bytes(s))} a checkpoint, {gib(at_most)} at most in all"]
        lines += [f"host memory of a node: {gib(host_bytes(s, o))}"]
        if o.engine != "vllm":
            return lines
        cache = f"{kv_sequences(s, o):,} sequences of {o.full_length:,} tokens"
        lines += [f"vLLM: weights {gib(o.c * s.weights // o.tensor_parallel)}, KV cache of {cache} "
                  f"({kv_bytes_per_token(s, o):,} bytes a token)"]
        return lines

    def times(self) -> list[str]:
        """What a run that fits takes, with vLLM, and what would make it faster."""
        s, o = self.shape, self.options
        name, flops, bandwidth = gpu_speed(o)
        lines = [f"time on {name}, at {MFU:.0%} of {flops / 1e12:.0f} TFLOP/s and {BANDWIDTH_SHARE:.0%} of "
                 f"{bandwidth / 1e12:.2f} TB/s, if all sequences have full length:",
                 f"  sampling {decode_rate(s, o) * o.ranks / o.tensor_parallel:,.0f} tokens/s"]
        if o.train:
            seconds = seconds_per_step(s, o)
            step = sum(seconds.values())
            parts = ", ".join([f"{phase} {value:.0f}" for phase, value in seconds.items()])
            rate = trained_tokens(o) / seconds["update"]
            lines[-1] += f", update {rate:,.0f}; a step {step:,.0f} s ({parts})"
            hours = f"{o.steps * step / 3600:,.1f} hours, without evaluations"
            lines += [f"  {o.steps:,} steps: at most about {hours}"] if o.steps else []
        else:
            seconds = seconds_per_step(s, o)["sampling"]
            lines += [f"  {o.prompts_per_batch * o.votes:,} responses: at most {seconds / 3600:,.1f} hours"]
        more = dataclasses.replace(o, gpu_memory=self.largest_share())
        if more.gpu_memory > o.gpu_memory and kv_sequences(s, o) < wanted_sequences(o):
            lines += [f"  faster with --gpu_memory {more.gpu_memory:g}, which fits as well: room for "
                      f"{kv_sequences(s, more)} of the {wanted_sequences(o)} that are asked for at a time"]
        return lines


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def line(name: str, cells) -> str:
    return f"{name:32}" + "".join([f"{cell:>10}" for cell in cells])


# -------------------------------------------------- making one ----------------------------------------------
def plan(config, options: Options, flags=None) -> Plan:
    """The plan of a run of the model with this config; flags: those that advice may name (None: all).

    Raises UserError: one sentence for an option that no plan can be made of."""
    s, o = shape_of(config), options
    if o.ranks < 1:
        raise UserError(f"--gpus is {o.ranks}, but must be 1 or more.")
    if not 0 < o.gpu_gib < 1e9:
        raise UserError(f"--gpu_gib is {o.gpu_gib:g}, but must be above 0 and below 1e9: one GPU's GiB.")
    if o.tensor_parallel < 1 or o.ranks % o.tensor_parallel or s.heads % o.tensor_parallel:
        raise UserError(f"--tensor_parallel is {o.tensor_parallel}, but must divide the number of GPUs, "
                        f"{o.ranks}, and the model's attention heads, {s.heads}.")
    if o.offload not in ("none", "reference", "optimizer"):
        raise UserError(f"--offload is {o.offload!r}, but must be none, reference or optimizer.")
    made = Plan(s, o, phases_of(s, o))
    return made if made.fits else dataclasses.replace(made, advice=find_advice(s, o, flags))


def remedies(s: Shape, o: Options):
    """(flag, value) to try in turn, cheapest first. None for gpu_memory: what the others leave."""
    yield "gradient_checkpointing", "on"
    tokens = o.micro_tokens
    while tokens > o.full_length:
        tokens = max(tokens // 2, o.full_length)
        yield "micro_tokens", tokens
    yield "gpu_memory", None
    for offload in ("none", "reference", "optimizer"):
        if offload != "none":
            yield "offload", offload
            yield "gpu_memory", None
        for parallel in (2, 4, 8):
            if o.engine == "vllm" and o.ranks % parallel == 0 and s.heads % parallel == 0:
                yield "tensor_parallel", parallel
                yield "gpu_memory", None
    for factor in (2, 4, 8, 16):
        yield "ranks", o.ranks * factor
        yield "gpu_memory", None


def find_advice(s: Shape, o: Options, flags=None) -> dict[str, object]:
    """Few changes that together make it fit; empty if none were found."""
    def changed(changes: dict) -> Plan:
        options = dataclasses.replace(o, **changes)
        return Plan(s, options, phases_of(s, options))

    changes, best = {}, changed({})
    for flag, value in remedies(s, o):
        if flags is not None and flag not in (*flags, "ranks"):
            continue
        if flag == "gpu_memory" and o.engine != "vllm":
            continue
        if value is None:
            value = best.largest_share()
        trial = changed({**changes, flag: value})
        if trial.excess < best.excess:
            changes[flag], best = value, trial
    if not best.fits:
        return {}
    for flag in list(changes) * 2:  # others may have made it needless, or once they are gone themselves
        fewer = {name: value for name, value in changes.items() if name != flag}
        if changed(fewer).fits:
            changes = fewer
    return changes


def machine(args) -> tuple[int, float, str]:
    """(number of GPUs, GiB of each, their name) to plan for: --gpus and --gpu_gib, else what is here."""
    ranks = planned_ranks(args)
    if not torch.cuda.is_available():
        return ranks, args.gpu_gib or 80.0, ""
    here = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0)))
    return ranks, args.gpu_gib or here.total_memory / GIB, "" if args.gpu_gib else here.name


def plan_from_args(args, config, ranks: int, gpu_gib: float, gpu: str = "", train: bool = True,
                   problems: int = 0, engine: str = "", embedding: Shape | None = None) -> Plan:
    """The plan for a script's arguments; an option they lack keeps its default and is never advised.

    ranks: GPUs; gpu_gib: memory of each, in GiB; gpu: its name, for its speed; problems: how many are trained
    on, for the number of steps if --steps is 0; engine: what samples, empty: what the arguments ask for;
    embedding: EVOL-RL's embedder. --micro_tokens 0 becomes the largest tried that fits."""
    names = [field.name for field in dataclasses.fields(Options)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    flags = tuple(given)
    engine = engine or ("plain" if getattr(args, "plain", False) else getattr(args, "sampler", "vllm"))
    given |= dict(ranks=ranks, gpu_gib=gpu_gib, train=train, gpu=gpu, embedding=embedding,
                  engine="vllm" if engine == "auto" else engine)
    if hasattr(args, "responses_per_prompt"):
        given["votes"] = args.responses_per_prompt()
    if not given.get("steps"):
        given["steps"] = getattr(args, "epochs", 0) * (problems // given.get("prompts_per_batch", 8))
    if not train:  # all problems are asked at once
        given |= dict(votes=getattr(args, "eval_samples", 16), prompts_per_batch=problems or 500)
    if given.get("micro_tokens") != 0:
        return plan(config, Options(**given), flags)
    plans = [plan(config, Options(**given | dict(micro_tokens=tokens)), flags) for tokens in MICRO_TOKENS]
    return next((made for made in plans if made.fits), plans[0])


def embedder_of(args) -> Shape | None:
    """Sizes of EVOL-RL's embedder; None if there is none, or if its config cannot be read, which is said."""
    if not getattr(args, "novelty", False):
        return None
    try:
        return shape_of(AutoConfig.from_pretrained(embedder_path(args.embedder)))
    except Exception as error:  # a plan is no reason to stop; a run stops at Embedder
        print(f"The plan is without the embedder {args.embedder}: {first_line(error)}", flush=True)
        return None


# --------------------------------------------------- on a CPU -----------------------------------------------
def check_host(args, config) -> None:
    """Raises UserError if policy and Adam (16 bytes a weight) and a step's responses (Python's integers and
    four log-probs a token) take more than half of this machine's memory; the rest is the KV cache's."""
    responses, host = args.prompts_per_batch * args.responses_per_prompt(), host_memory()
    needed = 16 * shape_of(config).weights + responses * (2048 + 64 * args.max_new_tokens)
    if needed > host / 2:
        raise UserError(f"the policy and a step's {responses:,} responses take up to {gib(needed)} GiB, more "
                        f"than half of this machine's {gib(host)}; give smaller --votes, --prompts_per_batch "
                        "or --max_new_tokens, or a smaller --model.")


def cpu_sentence(args, config, threads: int) -> str:
    """What a step of this size means for a CPU; empty if it is not much more than the toy's."""
    s, length = shape_of(config), args.max_prompt_tokens + args.max_new_tokens
    sampled = args.prompts_per_batch * args.responses_per_prompt() * args.max_new_tokens
    if sampled * s.weights < 40 * TOY_WORK:
        return ""
    trained = args.prompts_per_batch * args.train_samples * length
    passes = 3 + (args.num_minibatches > 1) + (args.kl_coef > 0)  # update; scores of policy and reference
    work = sampled * flops_per_token(s, length, 1) + trained * flops_per_token(s, length, passes)
    minutes = work / (threads * CPU_FLOPS) / 60
    time = f"{minutes / 60:,.1f} hours" if minutes > 60 else f"{minutes:.0f} minutes"
    return (f"This is a CPU, and a step samples up to {sampled:,} tokens from {s.weights / 1e9:.2f}e9 "
            f"parameters: if responses have full length, about {time} a step. It goes on; a GPU, "
            "or smaller --votes, --prompts_per_batch and --max_new_tokens, take less.")
