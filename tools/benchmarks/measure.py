"""What the benchmarks share: memory, the machine's name, steps of ttrl.py itself with a clock around them.

Imports nothing but the standard library, because TRL's side of vs_trl.py runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from unittest import mock


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """A parser whose --help is the benchmark's docstring."""
    shape = argparse.RawDescriptionHelpFormatter
    command = f"python -m tools.benchmarks.{name}"
    return argparse.ArgumentParser(command, description=description, formatter_class=shape)


def memory(field: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}")


class Peak:
    """How far the resident memory rises between start and stop, MiB; and the process's own peak."""

    def __init__(self):
        self.process, self.rises = 0.0, []

    def start(self) -> None:
        self.process = max(self.process, memory("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.before = memory("VmRSS")

    def stop(self) -> None:
        self.process = max(self.process, memory("VmHWM"))
        self.rises.append(memory("VmHWM") - self.before)


def hardware() -> str:
    """The processors, for example "2 x AMD EPYC"."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def versions(*names: str) -> dict[str, str]:
    """The installed ones of these packages."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def save(out: str, result: dict, *packages: str) -> None:
    """Write a result with the machine, the versions and the date, as JSON; "": not at all."""
    if out:
        result = result | dict(hardware=hardware(), python=platform.python_version(),
                               date=time.strftime("%Y-%m-%d"))
        if packages:
            result["versions"] = versions(*packages)
        Path(out).write_text(json.dumps(result, indent=1, default=str) + "\n")


def random_qwen2(folder: Path, vocabulary: int, hidden: int, layers: int, seed: int = 0, **options) -> None:
    """Save a Qwen2 of random weights, heads of size 64."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(seed)
    heads = hidden // 64
    defaults = dict(intermediate_size=3 * hidden, num_key_value_heads=heads, tie_word_embeddings=True)
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, **(defaults | options))
    Qwen2ForCausalLM(config).save_pretrained(folder)


def never_end(sampler) -> None:
    """Responses run to their length limit: end-of-sequence never ends one."""
    sampler.stop_ids = sampler.stop_ids[:0]
    if hasattr(sampler, "llm"):
        import vllm
        vllm.SamplingParams = functools.partial(vllm.SamplingParams, ignore_eos=True)


def steps_of_ttrl(out: Path, prepare=None, peak: Peak | None = None, **options) -> list[dict[str, float]]:
    """Run ttrl.py with these options: per step the seconds of step, sample, update and sync, cpu, and length.

    prepare(run): called before the first step. peak: the update's memory. Evaluates and draws nothing."""
    import common
    import ttrl
    run_class = common.Run
    start, phase, end_step = run_class.start, run_class.phase, run_class.end_step
    clock, last = [], [None]

    def prepared_start(run) -> None:
        if prepare:
            prepare(run)
        start(run)
        clock.append(time.process_time())

    def watched_phase(run, name: str | None) -> None:
        if peak and last[0] == "update":
            peak.stop()
        phase(run, name)
        if peak and name == "update":
            peak.start()
        last[0] = name

    def timed_end_step(run, *extra) -> None:
        end_step(run, *extra)
        clock.append(time.process_time())

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    args = ttrl.Args(eval="", checkpoint_every=0, kl_coef=0.0, num_minibatches=1, lr=1e-5, out=str(out),
                     **options)
    watched = mock.patch.multiple(run_class, start=prepared_start, phase=watched_phase,
                                  end_step=timed_end_step)
    try:
        with contextlib.redirect_stdout(sys.stderr), mock.patch("tools.plot.plot"), watched:
            ttrl.main(args)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    rows = []
    for i, text in enumerate((out / "metrics.jsonl").read_text().splitlines()):
        line = json.loads(text)
        row = {name: line.get(f"seconds/{name}", 0.0) for name in ("step", "sample", "update", "sync")}
        rows.append(row | dict(cpu=clock[i + 1] - clock[i], length=line["length"]))
    return rows
