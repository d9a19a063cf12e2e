"""Peak memory and time of forward + backward: our chunked head against a forward with full logits.

    python -m tools.benchmarks.memory [--hidden 256] [--layers 2] [--out memory.json]

Two series on a Qwen2 of random weights: vocabularies of 20k, 50k and 150k at one length, and lengths at one
vocabulary. Every measurement is a process of its own. "rise" is the peak of the resident memory during an
update minus what was resident before it (weights, Python, libraries). It holds the gradients, of which the
head's (vocabulary x hidden x 4 bytes; ours and the baseline's alike) are counted apart, because no chunking
can avoid them; "beyond head" is the rest.

The baseline is what a plain trainer does: logits = model(ids).logits, log_softmax, gather; entropy without
a gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.benchmarks.measure import Peak, arguments, random_qwen2, save

ROOT = Path(__file__).resolve().parents[2]
PROMPT = 32


def full_logits(policy, micro):
    """[T] log-probs and [T] entropies by way of logits of [batch, length, vocabulary]."""
    import torch
    ids = torch.tensor([r.prompt_ids + r.response_ids for r in micro.rollouts])
    logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    logp = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    logp = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logp[:, PROMPT - 1:].flatten(), entropy[:, PROMPT - 1:].flatten()


def measure(folder: Path, way: str, vocabulary: int, sequences: int, length: int, updates: int) -> dict:
    """Rise of memory (MiB) and seconds of forward + backward, all sequences in one micro-batch."""
    import torch

    from engine.policy import Policy, Rollout
    policy = Policy(str(folder), torch.device("cpu"), torch.float32, micro_tokens=10 ** 9, max_length=8192)
    head = policy.model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    peak = Peak()

    def update(sequences: int, length: int) -> dict[str, float]:
        rollouts = []
        for i in range(sequences):
            ids = torch.randint(vocabulary, (PROMPT + length,), generator=generator).tolist()
            rollout = Rollout(ids[:PROMPT], ids[PROMPT:], torch.zeros(length), True, advantage=(-1.0) ** i)
            rollouts.append(rollout)
        policy.model.zero_grad(set_to_none=True)
        peak.start()
        start, cpu = time.perf_counter(), time.process_time()
        for micro in policy.micro_batches(rollouts):
            logp_T, _ = policy.logprobs(micro, 1.0) if way == "ours" else full_logits(policy, micro)
            loss_T = -(logp_T - logp_T.detach()).exp() * micro.advantage_T
            (loss_T * micro.mask_T / (micro.length_T * sequences)).sum().backward()
        peak.stop()
        return dict(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu)

    update(1, 8)  # libraries set up what they keep
    peak.rises.clear()
    times = [update(sequences, length) for _ in range(updates)]
    rise = max(peak.rises)
    return dict(way=way, vocabulary=vocabulary, tokens=sequences * length, rise_mib=rise,
                beyond_head_mib=rise - head.numel() * 4 / 2 ** 20, seconds=min(t["seconds"] for t in times),
                cpu=min(t["cpu"] for t in times))


def measure_in_child(args, model: Path, way: str, vocabulary: int, length: int) -> dict:
    # glibc keeps freed blocks below this size for later; the resident memory would show them, too
    env = dict(os.environ, OMP_NUM_THREADS=str(args.threads), CUDA_VISIBLE_DEVICES="",
               MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    flags = ["--sequences", str(args.sequences), "--updates", str(args.updates)]
    command = [sys.executable, "-m", "tools.benchmarks.memory", *flags, "--child", str(model), way,
               str(vocabulary), str(length)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way}, vocabulary {vocabulary}, length {length} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(ours: dict, full: dict) -> str:
    ratios = [full[key] / ours[key] for key in ("rise_mib", "beyond_head_mib", "cpu")]
    return "   memory {:.2f}, beyond the head {:.2f}, CPU time {:.2f}".format(*ratios)


def main() -> None:
    parser = arguments("memory", __doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--updates", type=int, default=2,
                        help="updates per process; the largest memory and the smallest time count")
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[20_000, 50_000, 150_000],
                        help="all at the last of --lengths")
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 128, 256],
                        help="all at the second of --vocabularies")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="", help="also write the result to this .json file")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, way, vocabulary, length = args.child
        result = measure(Path(folder), way, int(vocabulary), args.sequences, int(length), args.updates)
        print(json.dumps(result))
        return
    middle = args.vocabularies[min(1, len(args.vocabularies) - 1)]
    cells = [(vocabulary, args.lengths[-1]) for vocabulary in args.vocabularies]
    cells += [(middle, length) for length in args.lengths[:-1]]
    rows = []
    print(f"{'vocabulary':>10}{'tokens':>8}{'':>6}{'rise MiB':>10}{'beyond head':>12}{'seconds':>9}"
          f"{'CPU s':>8}   full / ours")
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary, length in cells:
            model = Path(folder) / str(vocabulary)
            if not model.exists():
                random_qwen2(model, vocabulary, args.hidden, args.layers, max_position_embeddings=8192)
            for way in ("ours", "full"):
                row = measure_in_child(args, model, way, vocabulary, length)
                ratio = compare(rows[-1], row) if way == "full" else ""
                print(f"{vocabulary:10,}{row['tokens']:8,}{way:>6}{row['rise_mib']:10.0f}"
                      f"{row['beyond_head_mib']:12.0f}{row['seconds']:9.2f}{row['cpu']:8.2f}{ratio}",
                      flush=True)
                rows.append(row)
    ours = [row["beyond_head_mib"] for row in rows[:2 * len(args.vocabularies)] if row["way"] == "ours"]
    print(f"ours beyond the head, largest vocabulary / smallest: {ours[-1] / ours[0]:.2f}")
    save(args.out, dict(rows=rows, options=vars(args)), "torch", "transformers")


if __name__ == "__main__":
    main()
