"""Peak memory and time of forward + backward: our chunked head against a forward with full logits.

    python benchmarks/memory.py [--hidden 256] [--layers 2] [--out memory.json]

Two series on a Qwen2 of random weights: vocabularies of 20k, 50k and 150k at one length, and lengths at one vocabulary. Every
measurement is a process of its own. "rise" is the peak of the resident memory during an update minus what was resident before
it (weights, Python, libraries). It holds the gradients, of which the head's (vocabulary x hidden x 4 bytes; ours and the
baseline's alike) are counted apart, because no chunking can avoid them; "beyond head" is the rest.

The baseline is what a plain trainer does: logits = model(ids).logits, log_softmax, gather; entropy without a gradient.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vs_trl import Peak, cpu_name

PROMPT = 32


def build(folder: Path, vocabulary: int, hidden: int, layers: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=8192,
        tie_word_embeddings=True)).save_pretrained(folder)


def full_logits(policy, micro):
    """[tokens] log-probs and entropies by way of logits of [batch, length, vocabulary]."""
    import torch
    ids = torch.tensor([r.prompt_ids + r.response_ids for r in micro.rollouts])
    logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1].float() / policy.args.temperature
    logp = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    logp = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logp[:, PROMPT - 1:].flatten(), entropy[:, PROMPT - 1:].flatten()


def measure(folder: Path, way: str, vocabulary: int, sequences: int, length: int, updates: int) -> dict:
    """Rise of memory and seconds of forward + backward, all sequences in one micro-batch."""
    import torch

    import common
    import ttrl
    args = ttrl.Args(micro_tokens=10 ** 9, updates_per_batch=1, kl_coef=0.0)
    policy = common.Policy(args, str(folder), torch.device("cpu"), torch.float32)
    head = policy.model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)

    def update(sequences, length):
        rollouts = []
        for i in range(sequences):
            ids = torch.randint(vocabulary, (PROMPT + length,), generator=generator).tolist()
            rollouts.append(common.Rollout(ids[:PROMPT], ids[PROMPT:], torch.zeros(length), True, advantage=(-1.0) ** i))
        policy.optimizer.zero_grad(set_to_none=True)
        peak.start()
        start, cpu = time.perf_counter(), time.process_time()
        for micro in policy.micro_batches(rollouts):
            logp, entropy = policy.logprobs(micro) if way == "ours" else full_logits(policy, micro)
            policy.backward(micro, -(logp - logp.detach()).exp() * micro.advantages, entropy=entropy)
        peak.stop()
        return dict(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu)

    peak = Peak()
    update(1, 8)  # libraries set up what they keep
    peak.rises.clear()
    times = [update(sequences, length) for _ in range(updates)]
    return dict(way=way, vocabulary=vocabulary, tokens=sequences * length, rise_mib=max(peak.rises),
                beyond_head_mib=max(peak.rises) - head.numel() * 4 / 2 ** 20,
                seconds=min(t["seconds"] for t in times), cpu=min(t["cpu"] for t in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--updates", type=int, default=2, help="updates per process; the largest memory and the smallest time count")
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[20_000, 50_000, 150_000], help="all at the last of --lengths")
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 128, 256], help="all at the second of --vocabularies")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="", help="also write the result to this .json file")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, way, vocabulary, length = args.child
        print(json.dumps(measure(Path(folder), way, int(vocabulary), args.sequences, int(length), args.updates)))
        return
    # glibc keeps freed blocks below this size for later; then the resident memory would not show what is in use
    env = dict(os.environ, OMP_NUM_THREADS=str(args.threads), CUDA_VISIBLE_DEVICES="", MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    cells = [(v, args.lengths[-1]) for v in args.vocabularies]
    cells += [(args.vocabularies[min(1, len(args.vocabularies) - 1)], length) for length in args.lengths[:-1]]
    rows = []
    print(f"{'vocabulary':>10}{'tokens':>8}{'':>6}{'rise MiB':>10}{'beyond head':>12}{'seconds':>9}{'CPU s':>8}   full / ours")
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary, length in cells:
            model = Path(folder) / str(vocabulary)
            if not model.exists():
                build(model, vocabulary, args.hidden, args.layers)
            pair = {}
            for way in ("ours", "full"):
                command = [sys.executable, __file__, "--sequences", str(args.sequences), "--updates", str(args.updates), "--child",
                           model, way, str(vocabulary), str(length)]
                done = subprocess.run(command, env=env, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{way}, vocabulary {vocabulary}, length {length} failed:\n{done.stderr[-3000:]}")
                row = pair[way] = json.loads(done.stdout.splitlines()[-1])
                ratio = "" if way == "ours" else f"   memory {row['rise_mib'] / pair['ours']['rise_mib']:.2f}, beyond the head " \
                    f"{row['beyond_head_mib'] / pair['ours']['beyond_head_mib']:.2f}, CPU time {row['cpu'] / pair['ours']['cpu']:.2f}"
                print(f"{vocabulary:10,}{row['tokens']:8,}{way:>6}{row['rise_mib']:10.0f}{row['beyond_head_mib']:12.0f}"
                      f"{row['seconds']:9.2f}{row['cpu']:8.2f}{ratio}", flush=True)
                rows.append(row)
    ours = [r["beyond_head_mib"] for r in rows[:2 * len(args.vocabularies)] if r["way"] == "ours"]
    print(f"ours beyond the head, largest vocabulary / smallest: {ours[-1] / ours[0]:.2f}")
    if args.out:
        result = dict(rows=rows, options=vars(args), hardware=cpu_name(), python=platform.python_version(),
                      versions={n: metadata.version(n) for n in ("torch", "transformers")}, date=time.strftime("%Y-%m-%d"))
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
