"""Everything that only runs on a GPU, once, in under ten minutes: run it first, paste its end into an issue.

    python -m tools.gpu_smoke

On all GPUs it sees, with a randomly initialised model of Qwen2.5-0.5B's shape: nothing is downloaded. Without
a GPU the model is tiny, it takes three minutes, and what needs CUDA is NOT RUN. Every check is a process of
its own: one that dies, or takes more than five minutes, is a FAIL, and the others go on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import common  # first: it sets what torch and vLLM read when they are loaded
import torch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from engine import checkpoint, plan, sizes
from engine.base import Request, Rollout, seed_of
from engine.embedder import Embedder
from engine.policy import MicroBatch, Policy
from engine.setup import describe, has_vllm, start_processes

ROOT = Path(__file__).resolve().parent.parent
VERDICTS = ("PASS", "FAIL", "NOT RUN")
CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CUDA else torch.float32
CLOSE = 0.05 if CUDA else 1e-4  # two log-probs of a token, on average
SIZES = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
             vocab_size=151936)
if not CUDA:
    SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                 vocab_size=1024)
PROMPT, RESPONSE = (256, 256) if CUDA else (128, 64)
FLAGS = dict(dataset="toy", sampler="vllm" if CUDA else "hf", steps=1, votes=16, train_samples=16, trunks=4,
             num_minibatches=2, max_prompt_tokens=PROMPT, max_new_tokens=RESPONSE, lr=1e-4, entropy_coef=0.1,
             eval="", checkpoint_every=0)  # random responses have no answers: entropy gives the gradient
lines: list[str] = []


def say(verdict: str | bool, name: str, detail: str) -> None:
    """One line; True is PASS, False is FAIL."""
    lines.append(f"{verdict if verdict in VERDICTS else VERDICTS[not verdict]:9}{name:36}{detail}")
    print(lines[-1], flush=True)


# ------------------------------------------- parts, each in a process --------------------------------------
def random_rollouts(count: int, prompt: int, longest: int, shortest: int = 0) -> list[Rollout]:
    rng, rollouts = random.Random(0), []
    for _ in range(count):
        length = rng.randint(shortest or longest, longest)
        ids = [rng.randrange(5, SIZES["vocab_size"]) for _ in range(prompt + length)]
        rollouts.append(Rollout(ids[:prompt], ids[prompt:], torch.zeros(length), True))
    return rollouts


def attention(model: str, device) -> None:
    """Packed rows, with whatever kernel they use here, give the log-probs and gradients of padded ones."""
    rollouts, found = random_rollouts(8, 20, 200, shortest=30), []
    for k in range(1, 4):  # four responses to one prompt
        rollouts[k].prompt_ids = rollouts[0].prompt_ids
    for plain in (True, False):
        policy = Policy(model, device, DTYPE, plain=plain)
        logp_T, entropy_T = policy.logprobs(MicroBatch(rollouts, list(range(8)), device), 1.0)
        (logp_T.mean() + entropy_T.mean()).backward()
        found.append((logp_T.detach(), policy.clip_grad_norm(1e9)))
    difference, ratio = float((found[0][0] - found[1][0]).abs().mean()), found[0][1] / found[1][1]
    say(policy.packed and difference < CLOSE and abs(ratio - 1) < 0.05, "packed rows = padded rows",
        f"log-probs differ by {difference:.1e}, ratio of gradients {ratio:.3f}, packed {policy.packed}, "
        f"variable-length kernel {policy.varlen}")


def update(model: str, device) -> None:
    """Memory of scoring and of an update as planned, and speed: two full micro-batches a step."""
    length, rows = (1024, 16) if CUDA else (128, 16)
    limits = dict(max_prompt_tokens=length // 4, max_new_tokens=length - length // 4)
    policy = Policy(model, device, DTYPE, gradient_checkpointing=True, micro_tokens=length * rows)
    reference = Policy(model, device, DTYPE, trainable=False, micro_tokens=length * rows)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    rollouts = random_rollouts(2 * rows, *limits.values())
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
        measured["update"], seconds = peak(), time.time() - began
    speed = len(rollouts) * length / seconds
    if not CUDA:
        say("NOT RUN", "memory as planned, MFU", f"need CUDA; an update makes {speed:,.0f} tokens/s")
        return
    gpu = torch.cuda.get_device_properties(device)
    planned = plan.plan(AutoConfig.from_pretrained(model), sizes.Options(
        micro_tokens=length * rows, prompts_per_batch=2, train_samples=rows, num_minibatches=1, gpu=gpu.name,
        gpu_gib=gpu.total_memory / sizes.GIB, **limits))
    for phase, size in measured.items():
        expected = sum(v for purpose, v in planned.phases[phase].items() if purpose != "vLLM")
        say(size < 1.1 * expected, f"memory of {phase} as planned",
            f"measured {size / sizes.GIB:.2f} GiB, planned {expected / sizes.GIB:.2f}")
    name, flops, _ = plan.gpu_speed(planned.options)
    mfu = speed * plan.flops_per_token(planned.shape, length) / flops
    say(True, "speed of an update", f"{speed:,.0f} tokens/s, MFU {mfu:.1%} of {flops / 1e12:.0f} TFLOP/s "
                                    f"({name}), recomputation not counted")


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


def difference(policy: Policy, rollouts: list[Rollout]) -> float:
    """Between the sampler's log-probs and the policy's, on average."""
    for r in rollouts:
        r.old_logp = None
    policy.score(rollouts, "old_logp", 1.0)
    return float(torch.cat([(r.old_logp - r.logprobs).abs() for r in rollouts]).mean())


def engine(model: str, device) -> None:
    """vLLM beside a policy: dummy start, sync, speed, prefix cache, sleep and wake, sync after an update."""
    if not has_vllm():
        say("NOT RUN", "vLLM: sync, prefix cache, sleep", "vLLM does not import")
        return
    policy, before, began = Policy(model, device, DTYPE, gradient_checkpointing=CUDA), taken(), time.time()
    args = common.Args(max_prompt_tokens=PROMPT, max_new_tokens=RESPONSE)
    sampler = common.VLLMSampler(args, model, [2], device, DTYPE, dummy=True)
    prompts = [r.prompt_ids for r in random_rollouts(8, PROMPT // 2, 1)]
    requests = [Request(ids, 32 if CUDA else 4, seed_of(i), RESPONSE) for i, ids in enumerate(prompts)]

    def sync_and_sample() -> list[Rollout]:
        sampler.load(policy.named_tensors(DTYPE))
        return [r for group in sampler.generate(requests, 1.0) for r in group]

    sync_and_sample()
    began, started = time.time(), time.time() - began
    rollouts = sync_and_sample()
    speed, found = sum(len(r.response_ids) for r in rollouts) / (time.time() - began), difference(policy, rollouts)
    say(found < CLOSE, "sampler = trainer", f"log-probs differ by {found:.1e}; started and warmed up in "
                                            f"{started:.0f} s; {speed:,.0f} tokens/s")
    stems = [r.prompt_ids + r.response_ids[:len(r.response_ids) // 2] for r in rollouts[::len(requests)]]
    inputs = [dict(prompt_token_ids=ids) for ids in stems]
    cached = sum(o.num_cached_tokens or 0 for o in sampler.llm.generate(inputs, use_tqdm=False))
    say(cached > sum(map(len, stems)) / 2, "prefix cache serves forks (ETMR)",
        f"{cached} of {sum(map(len, stems))} tokens of prompts and trunks were cached")
    awake = taken() - before
    sampler.sleep()
    asleep, again = taken() - before, sync_and_sample()
    found, same = difference(policy, again), sum(a.response_ids == b.response_ids for a, b in zip(rollouts, again))
    say(found < CLOSE and asleep < 2 if CUDA else "NOT RUN", "sleep and wake",
        f"awake {awake:.1f} GiB, asleep {asleep:.1f} (planned {sizes.VLLM_ASLEEP / sizes.GIB:.1f}), log-probs "
        f"differ by {found:.1e}, {same} of {len(again)} responses as before" if CUDA else "needs CUDA")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
    for micro in policy.micro_batches(rollouts):
        logp_T, _ = policy.logprobs(micro, 1.0)
        (-logp_T.mean()).backward()
    optimizer.step()
    sampler.sleep()
    stale, found = difference(policy, rollouts), difference(policy, sync_and_sample())
    say(found < min(CLOSE, stale / 3), "sampler = trainer after an update",
        f"log-probs differ by {found:.1e}, without the sync by {stale:.1e}")


def embedder(model: str, device) -> None:
    """EVOL-RL's embedder gives unit vectors and takes GPU memory only while it works."""
    before = taken()
    vectors = torch.stack(Embedder(f"{model}-embedder")(["3 apples and 4 pears", "12 - 5", "seven"] * 20))
    kept = taken() - before
    same = torch.allclose(vectors[:3], vectors[3:6], atol=0.05)
    unit = torch.allclose(vectors.norm(dim=-1), torch.ones(60), atol=1e-3)
    say(same and unit and kept < 1, "embedder", f"vectors of {vectors.shape[1]}; {kept:.1f} GiB of the GPU kept")


PARTS = dict(attention=attention, update=update, engine=engine, embedder=embedder)


# ------------------------------------------------ whole runs -----------------------------------------------
def call(command: list, name: str) -> bool:
    """Run a command; its verdicts are said again, and if it fails, its last error."""
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, env=os.environ | dict(HF_HUB_OFFLINE="1"),
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's ranks, too
        output, errors = process.communicate()
        errors += "\nError: it took more than 300 s"
    for line in output.splitlines():
        if line.startswith(VERDICTS):
            lines.append(line)
            print(line, flush=True)
    if process.returncode:
        reasons = [line for line in errors.splitlines() if "Error" in line and "ChildFailed" not in line]
        say(False, name, (reasons or [f"exit code {process.returncode}"])[-1][:300])
    return process.returncode == 0


def run(name: str, script: str, model: str, out: Path, ranks: int = 1, like: dict | None = None,
        **flags) -> dict:
    """Run a script and judge its last step: as `like`, if given. Returns its metrics, {} if it failed."""
    flags = FLAGS | dict(model=model, prompts_per_batch=max(8, ranks), embedder=f"{model}-embedder") | flags
    known = import_module(script).Args.__dataclass_fields__
    given = ["--resume"] if (out / "run.json").exists() else [f"--{k}={v}" for k, v in flags.items() if k in known]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    if not call([sys.executable, *torchrun, f"{script}.py", *given, f"--out={out}"], name):
        return {}
    step = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    norm, wanted = step["grad_norm"], (like or step)["grad_norm"]
    speeds = [f"{what} {step[f'tokens_per_second/{what}']:,.0f}" for what in ("sample", "update")]
    say(step["logp_diff_mean"] < CLOSE and abs(norm / wanted - 1) < (0.1 if CUDA else 1e-3), name,
        f"log-probs differ by {step['logp_diff_mean']:.1e}, gradient norm {norm:.4g}"
        f"{f' (wanted {wanted:.4g})' if like else ''}, {step['seconds/step']:.1f} s, tokens/s: {', '.join(speeds)}")
    return step


def runs(model: str, folder: Path, gpus: int) -> None:
    """Whole steps of the scripts; a checkpoint and a resume; FSDP; an engine of two GPUs."""
    two = run("ttrl.py, two steps", "ttrl", model, folder / "ttrl", steps=2, checkpoint_every=1)
    if two:
        shutil.rmtree(checkpoint.complete(folder / "ttrl")[0])
        run("the second again, from a checkpoint", "ttrl", model, folder / "ttrl", like=two)
    for script in ("evol_rl", "ettrl"):
        run(f"{script}.py, one step", script, model, folder / script)
    first = None
    for ranks in sorted({1, 2, gpus} - {0}) if gpus != 1 else [1]:
        name = f"FSDP on {ranks} GPU(s)" if CUDA else f"{ranks} process(es) without a GPU"
        first = run(name, "ttrl", model, folder / f"fsdp-{ranks}", ranks, first, sampler="hf") or first
    if gpus > 1:
        run("vLLM on two GPUs", "ttrl", model, folder / "parallel", 2, tensor_parallel=2)
    else:
        say("NOT RUN", "vLLM on two GPUs", "needs two GPUs")


def make_models(folder: str) -> str:
    """A random model with the toy's tokenizer; beside it the same as a sentence-transformers model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    path = f"{folder}/model"
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=None,
                         eos_token_id=2, pad_token_id=2, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).to(DTYPE).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(common.TOY_MODEL) / name, path)
    pooling = Pooling(SIZES["hidden_size"], "mean")
    SentenceTransformer(modules=[Transformer(path), pooling], device="cpu").save(f"{path}-embedder")
    return path


def machine() -> str:
    """What an issue must say of it."""
    record = describe(common.Args(), 1, torch.device("cuda" if CUDA else "cpu"))
    gpus = "GPUs: none"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        gpus = f"GPUs: {'; '.join(subprocess.run(query, capture_output=True, text=True).stdout.splitlines())}"
    versions = ", ".join([f"{name} {version}" for name, version in record["versions"].items()])
    return (f"{gpus}\nPython {record['python']}, {versions}, CUDA {torch.version.cuda}\n"
            f"commit {record['git']}{', changed' if record['git_changes'] else ''}")


def main() -> None:
    if len(sys.argv) == 3:  # a part and the model, by call()
        device, _, _ = start_processes()
        PARTS[sys.argv[1]](sys.argv[2], device)
        os._exit(0)  # at once: an engine takes its time to end
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        model = make_models(folder)
        for part in PARTS:
            call([sys.executable, "-m", "tools.gpu_smoke", part, model], part)
        runs(model, Path(folder), torch.cuda.device_count())
    counts = [f"{sum(line.startswith(verdict) for line in lines)} {verdict}" for verdict in VERDICTS]
    print("\n".join(["", "Paste from here into an issue:", "```", machine(), *lines,
                     f"{', '.join(counts)}; {(time.time() - began) / 60:.1f} minutes", "```"]))
    sys.exit(any(line.startswith("FAIL") for line in lines))


if __name__ == "__main__":
    main()
