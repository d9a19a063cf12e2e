"""The parts of tools/gpu_smoke.py that look inside: attention, memory of an update, vLLM, the embedder.

    python -m tools.gpu_parts engine FOLDER_OF_THE_MODEL

Each prints lines that begin with PASS, FAIL or NOT RUN."""

from __future__ import annotations

import os
import random
import sys
import time

import common  # first: it sets what torch and vLLM read when they are loaded
import torch
from transformers import AutoConfig

from engine import plan, sizes
from engine.base import seed_of
from engine.embedder import Embedder
from engine.policy import MicroBatch, Policy, Request, Rollout
from engine.setup import has_vllm, start_processes

VERDICTS = ("PASS", "FAIL", "NOT RUN")
CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CUDA else torch.float32
CLOSE = 0.05 if CUDA else 1e-4  # two log-probs of a token, on average
PROMPT, RESPONSE = (256, 256) if CUDA else (128, 64)


def verdict(good: bool | None, name: str, detail: str) -> str:
    """One line: PASS, FAIL, or NOT RUN if `good` is None."""
    word = "NOT RUN" if good is None else "PASS" if good else "FAIL"
    return f"{word:9}{name:38}{detail}"


def say(good: bool | None, name: str, detail: str) -> None:
    print(verdict(good, name, detail), flush=True)


def random_rollouts(count: int, prompt: int, shortest: int, longest: int) -> list[Rollout]:
    """Prompts of so many tokens, responses of so many, all drawn at random."""
    rng, rollouts = random.Random(0), []
    for _ in range(count):
        length = rng.randint(shortest, longest)
        ids = [rng.randrange(5, 1000) for _ in range(prompt + length)]
        rollouts.append(Rollout(ids[:prompt], ids[prompt:], torch.zeros(length), True))
    return rollouts


def peak() -> int:
    """Bytes that torch held at most since the last call."""
    if not CUDA:
        return 0
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def taken() -> float:
    """GiB of the GPU that are in use, by whatever."""
    if not CUDA:
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / sizes.GIB


# -------------------------------------------------- the policy ---------------------------------------------
def attention(model: str, device) -> None:
    """Packed rows, by whatever kernel they use here, give the log-probs and gradients of padded ones."""
    rollouts, found = random_rollouts(8, 20, 30, 200), []
    for k in range(1, 4):  # four responses to one prompt
        rollouts[k].prompt_ids = rollouts[0].prompt_ids
    for plain in (True, False):
        policy = Policy(model, device, DTYPE, plain=plain)
        logp_T, entropy_T = policy.logprobs(MicroBatch(rollouts, list(range(8)), device), 1.0)
        (logp_T.mean() + entropy_T.mean()).backward()
        found.append((logp_T.detach(), policy.clip_grad_norm(1e9)))
    (padded_T, padded_norm), (packed_T, packed_norm) = found
    kernel = policy.varlen or not CUDA or torch.cuda.get_device_capability(device) < (8, 0)
    apart, ratio = float((padded_T - packed_T).abs().mean()), packed_norm / padded_norm
    say(policy.packed and kernel and apart < CLOSE and abs(ratio - 1) < 0.05, "packed rows = padded rows",
        f"log-probs differ by {apart:.1e}, ratio of gradients {ratio:.3f}, packed {policy.packed}, "
        f"variable-length kernel {policy.varlen}")


def update(model: str, device) -> None:
    """Memory of scoring and of an update as planned, and speed: two full micro-batches a step."""
    length, rows = (1024, 16) if CUDA else (128, 16)
    limits = dict(max_prompt_tokens=length // 4, max_new_tokens=length - length // 4)
    policy = Policy(model, device, DTYPE, gradient_checkpointing=True, micro_tokens=length * rows)
    reference = Policy(model, device, DTYPE, trainable=False, micro_tokens=length * rows)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    rollouts = random_rollouts(2 * rows, length // 4, length - length // 4, length - length // 4)
    for _ in range(2):  # the second time, Adam's moments exist
        for r in rollouts:
            r.old_logp = r.ref_logp = None
        peak()
        policy.score(rollouts, "old_logp", 1.0)
        reference.score(rollouts, "ref_logp", 1.0)
        measured, began = dict(scoring=peak()), time.time()
        for micro in policy.micro_batches(rollouts):
            logp_T, _ = policy.logprobs(micro, 1.0)
            (-(logp_T - micro.old_logp_T).exp().mean()).backward()
        policy.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        measured["update"] = peak()
        speed = len(rollouts) * length / (time.time() - began)
    if not CUDA:
        say(None, "memory as planned, MFU", f"need CUDA; an update makes {speed:,.0f} tokens/s")
        return
    gpu = torch.cuda.get_device_properties(device)
    planned = plan.plan(AutoConfig.from_pretrained(model), sizes.Options(
        micro_tokens=length * rows, prompts_per_batch=2, train_samples=rows, num_minibatches=1, gpu=gpu.name,
        gpu_gib=gpu.total_memory / sizes.GIB, **limits))
    for phase, found in measured.items():
        expected = planned.peaks[phase] - planned.phases[phase]["sampler"]
        say(found < 1.1 * expected, f"memory of {phase} as planned",
            f"measured {found / sizes.GIB:.2f} GiB, planned {expected / sizes.GIB:.2f}")
    name, flops, _ = plan.gpu_speed(planned.options)
    mfu = speed * plan.flops_per_token(planned.shape, length) / flops
    say(True, "speed of an update", f"{speed:,.0f} tokens/s, MFU {mfu:.1%} of {flops / 1e12:.0f} TFLOP/s "
                                    f"({name}), recomputation not counted")


# ----------------------------------------------------- vLLM ------------------------------------------------
class Engine:
    """A policy and vLLM beside it, started with dummy weights; 8 prompts with 32 responses (CPU: 4) each."""

    def __init__(self, model: str, device):
        self.policy = Policy(model, device, DTYPE, gradient_checkpointing=CUDA)
        self.before = taken()
        args = common.Args(max_prompt_tokens=PROMPT, max_new_tokens=RESPONSE)
        self.sampler = common.VLLMSampler(args, model, [2], device, DTYPE, dummy=True)
        self.requests = []
        for i, rollout in enumerate(random_rollouts(8, PROMPT // 2, 1, 1)):
            self.requests.append(Request(rollout.prompt_ids, 32 if CUDA else 4, seed_of(i), RESPONSE))

    def sync_and_sample(self) -> list[Rollout]:
        self.sampler.load(self.policy.named_tensors(DTYPE))
        return [r for group in self.sampler.generate(self.requests, 1.0) for r in group]

    def apart(self, rollouts: list[Rollout]) -> float:
        """Of a token, on average: the sampler's log-prob and the policy's."""
        for r in rollouts:
            r.old_logp = None
        self.policy.score(rollouts, "old_logp", 1.0)
        return float(torch.cat([(r.old_logp - r.logprobs).abs() for r in rollouts]).mean())

    def train(self, rollouts: list[Rollout]) -> None:
        """One large step towards these responses."""
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3, fused=True)
        for micro in self.policy.micro_batches(rollouts):
            logp_T, _ = self.policy.logprobs(micro, 1.0)
            (-logp_T.mean()).backward()
        optimizer.step()


def engine(model: str, device) -> None:
    """vLLM: sync from a dummy start, speed, prefix cache, sleep and wake, sync after an update."""
    if not has_vllm():
        say(None, "vLLM: sync, prefix cache, sleep", "vLLM does not import")
        return
    began, e = time.time(), Engine(model, device)
    e.sync_and_sample()
    began, started = time.time(), time.time() - began
    rollouts = e.sync_and_sample()
    speed = sum(len(r.response_ids) for r in rollouts) / (time.time() - began)
    apart = e.apart(rollouts)
    say(apart < CLOSE, "sampler = trainer", f"log-probs differ by {apart:.1e}; started and warmed up in "
                                            f"{started:.0f} s; {speed:,.0f} tokens/s")

    stems = [r.prompt_ids + r.response_ids[:len(r.response_ids) // 2] for r in rollouts[::8]]
    outputs = e.sampler.llm.generate([dict(prompt_token_ids=ids) for ids in stems], use_tqdm=False)
    cached, asked = sum(o.num_cached_tokens or 0 for o in outputs), sum(map(len, stems))
    say(cached > asked / 2, "prefix cache serves forks (ETMR)",
        f"{cached} of {asked} tokens of prompts and trunks were cached")

    if CUDA:
        awake = taken() - e.before
        e.sampler.sleep()
        asleep, again = taken() - e.before, e.sync_and_sample()
        apart = e.apart(again)
        same = sum(a.response_ids == b.response_ids for a, b in zip(rollouts, again))
        say(apart < CLOSE and asleep < 2, "sleep and wake",
            f"awake {awake:.1f} GiB, asleep {asleep:.1f} (planned {sizes.VLLM_ASLEEP / sizes.GIB:.1f}), "
            f"log-probs differ by {apart:.1e}, {same} of {len(again)} responses as before")
    else:
        say(None, "sleep and wake", "needs CUDA")

    e.sampler.sleep()
    e.train(rollouts)
    stale = e.apart(rollouts)
    apart = e.apart(e.sync_and_sample())
    say(apart < min(CLOSE, stale / 3), "sampler = trainer after an update",
        f"log-probs differ by {apart:.1e}, without the sync by {stale:.1e}")


def embedder(model: str, device) -> None:
    """EVOL-RL's embedder gives unit vectors and takes GPU memory only while it works."""
    before = taken()
    vectors = torch.stack(Embedder(f"{model}-embedder")(["3 apples and 4 pears", "12 - 5", "seven"] * 20))
    kept = taken() - before
    same = torch.allclose(vectors[:3], vectors[3:6], atol=0.05)
    unit = torch.allclose(vectors.norm(dim=-1), torch.ones(60), atol=1e-3)
    say(same and unit and kept < 1, "embedder",
        f"vectors of {vectors.shape[1]}; {kept:.1f} GiB of the GPU kept")


PARTS = dict(attention=attention, update=update, engine=engine, embedder=embedder)

if __name__ == "__main__":
    PARTS[sys.argv[1]](sys.argv[2], start_processes()[0])
    os._exit(0)  # at once: an engine takes its time to end
