"""Host memory of all ranks of a node while policy and reference are loaded, in copies of the model.

    python -m tools.benchmarks.loading [--ranks 2,4] [--layers 24] [--out loading.json]

A random model of Qwen2.5-0.5B's shape, saved in bfloat16, on ranks of gloo. What counts is the memory that
the ranks hold together beyond what they held before: pages of the file that all of them map count once. On
GPUs the shards (float32 of the policy, bfloat16 of the reference) lie on the devices; here they are in host
memory, so "without shards" is what a node of GPUs would hold. A copy is the whole model in float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tools.benchmarks.measure import arguments, save

SHAPE = dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_attention_heads=14,
             num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2)


def make_model(folder: str, layers: int) -> None:
    """Save it without ever holding it in float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_hidden_layers=layers))
    model.to(torch.bfloat16).to_empty(device="cpu").init_weights()
    model.save_pretrained(folder)


def proportional_bytes() -> int:
    """Of this process; a page that n processes map counts 1/n."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/smaps_rollup has no Pss")


class Watch(threading.Thread):
    """(seconds, bytes) of this process, twenty times a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen, self.over = [], threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            self.seen.append((time.monotonic(), proportional_bytes()))
            time.sleep(0.05)


def together(seen_by_rank: list[list[tuple[float, int]]]) -> int:
    """The most bytes that the ranks held at one time; each counts with what it held last."""
    held, most = [0] * len(seen_by_rank), 0
    events = [(moment, rank, size) for rank, seen in enumerate(seen_by_rank) for moment, size in seen]
    for _, rank, size in sorted(events):
        held[rank] = size
        most = max(most, sum(held))
    return most


def child(folder: str) -> None:
    """One rank: load both; rank 0 prints the result."""
    import torch

    from engine.base import gather
    from engine.policy import Policy, load_model, twin
    from engine.setup import start_processes
    device, rank, _ = start_processes()
    torch.set_num_threads(1)
    gather(None)
    before, watch, began = proportional_bytes(), Watch(), time.monotonic()
    watch.start()
    loaded, policies = load_model(folder), []
    for trainable, model in ((True, loaded), (False, twin(loaded))):
        policies.append(Policy(folder, device, torch.bfloat16, trainable, loaded=model))
    seconds = time.monotonic() - began
    gather(None)
    watch.over.set()
    watch.join()
    seen, befores = gather(watch.seen), gather(before)
    if rank == 0:
        count = sum(p.numel() for p in policies[0].parameters())
        most = together(seen) - sum(befores)
        print(json.dumps(dict(parameters=count, seconds=seconds, bytes=most, shards=(4 + 2) * count)))
    gather(None)
    os._exit(0)


def measure(folder: str, ranks: int) -> dict:
    """Copies of the model, seconds, on so many ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "tools.benchmarks.loading", "--child", folder]
    environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    copy = 4 * found["parameters"]
    return dict(ranks=ranks, gib=found["bytes"] / 2 ** 30, copies=found["bytes"] / copy,
                without_shards=(found["bytes"] - found["shards"]) / copy, seconds=found["seconds"])


def main() -> None:
    parser = arguments("loading", __doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--out", default="")
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    if options.child:
        child(options.child)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, options.layers)
        for ranks in options.ranks.split(","):
            rows.append(measure(folder, int(ranks)))
            print("{ranks} ranks: {gib:.2f} GiB, {copies:.2f} copies, without shards {without_shards:.2f}, "
                  "{seconds:.1f} s".format(**rows[-1]), flush=True)
    save(options.out, dict(rows=rows, layers=options.layers), "torch", "transformers")


if __name__ == "__main__":
    main()
