"""A run survives being killed, goes on bit for bit, and says clearly what is wrong."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, run_toy
from safetensors.torch import load_file

import common
import ttrl

STEPS = dict(steps=8, checkpoint_every=1, votes=4, train_samples=4, eval="toy_test", eval_every=4, eval_samples=1)


def run_quietly(out, overrides):
    """A whole run in this process, which is a fork of the test's: starting one costs no imports."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(os.open(error_file(out), os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    sys.argv, sys.stdout, sys.stderr = ["ttrl.py"], os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    try:
        run_toy(ttrl, out, **overrides)
    except common.UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        os._exit(2)
    except SystemExit as leave:
        os._exit(leave.code)
    os._exit(0)


def start(out, **overrides):
    process = multiprocessing.get_context("fork").Process(target=run_quietly, args=(out, {**STEPS, **overrides}))
    process.start()
    return process


def finish(out, **overrides):
    process = start(out, **overrides)
    process.join(120)
    return process.exitcode


def metrics_of(out):
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds/", "tokens_per_second/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def same_weights(a, b):
    first, second = load_file(Path(a) / "final/model.safetensors"), load_file(Path(b) / "final/model.safetensors")
    return all(torch.equal(first[name], second[name]) for name in first)


def error_file(out):
    return Path(tempfile.gettempdir()) / (str(out).replace("/", "_") + ".err")  # not on the disk that a test fills


def errors_of(out):
    return error_file(out).read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert finish(out) == 0, errors_of(out)
    return out


def test_killed_at_twenty_moments_and_bitwise_the_same(tmp_path, whole):
    """kill -9 at random moments of steps, evaluations and checkpoint writing; every resume goes on exactly."""
    out, rng, kills, caught_writing = tmp_path / "run", random.Random(0), 0, 0
    while kills < 20:
        process = start(out, resume=(out / "metrics.jsonl").exists())
        began = time.time()
        if kills % 2:  # in the middle of a checkpoint: its folder is there, but not yet complete
            while process.is_alive() and not list(out.glob("checkpoints/*.partial")) and time.time() - began < 20:
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.02)
        else:
            while process.is_alive() and not (out / "metrics.jsonl").exists():
                time.sleep(0.01)
            time.sleep(rng.random() * 2.5)
        process.kill()
        process.join()
        kills += 1
        caught_writing += bool(list(out.glob("checkpoints/*.partial")))
        if process.exitcode == 0:  # it had ended before: begin another life
            assert same_weights(out, whole)
            shutil.rmtree(out)
    assert finish(out, resume=(out / "metrics.jsonl").exists()) == 0, errors_of(out)
    assert caught_writing >= 3
    assert metrics_of(out) == metrics_of(whole)  # no gap, no step twice, every value the same
    assert same_weights(out, whole)
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert lines == [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path, whole, number):
    out = tmp_path / "run"
    process = start(out, checkpoint_every=0)
    while not (out / "metrics.jsonl").exists() or len(metrics_of(out)) < 3:
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    done = metrics_of(out)[-1]["step"]
    assert [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:08d}"]
    assert finish(out, resume=True, checkpoint_every=0) == 0
    assert metrics_of(out) == metrics_of(whole) and same_weights(out, whole)


def interrupted(out, steps=4):
    """A run with checkpoints of steps 3 and 4, killed by an exception in step 5."""
    process = start(out)
    while not (out / f"checkpoints/step_{steps:08d}").exists():
        time.sleep(0.01)
    process.kill()
    process.join()


@pytest.mark.parametrize("damage", ["truncate", "corrupt", "remove", "partial"])
def test_damaged_checkpoint_falls_back_with_a_warning(tmp_path, whole, damage, capfd):
    out = tmp_path / "run"
    interrupted(out)
    newest = max((out / "checkpoints").glob("step_" + "[0-9]" * 8))
    victim = max(newest.glob("*.distcp"), key=lambda f: f.stat().st_size)
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-1000])
    elif damage == "corrupt":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 255
        victim.write_bytes(data)
    elif damage == "remove":
        victim.unlink()
    else:
        newest.rename(newest.with_suffix(".partial"))
    run_toy(ttrl, out, **STEPS, resume=True)
    printed = capfd.readouterr().out
    assert damage == "partial" or f"Warning: {newest} is not usable" in printed
    assert "Resumed from" in printed and newest.name not in printed.split("Resumed from")[1].splitlines()[0]
    assert metrics_of(out) == metrics_of(whole) and same_weights(out, whole)


def test_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, whole):
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("optional: needs the right to mount a small tmpfs")
    try:
        out = mount / "run"
        assert finish(out, keep=9, eval="") == 2
        error = errors_of(out)
        assert "MiB are free on this disk" in error and "the last good checkpoint is" in error and "Traceback" not in error
        shutil.copytree(out, tmp_path / "copy", ignore=shutil.ignore_patterns("*.partial"))
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
    assert finish(tmp_path / "copy", eval="", resume=True) == 0, errors_of(tmp_path / "copy")
    assert same_weights(tmp_path / "copy", whole)


def test_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(common.UserError, match="which cannot be written"):
        run_toy(ttrl, tmp_path / "file/run")


def test_a_run_folder_is_not_overwritten(tmp_path):
    run_toy(ttrl, tmp_path / "run", steps=1)
    with pytest.raises(common.UserError, match="already holds a run; give --resume"):
        run_toy(ttrl, tmp_path / "run", steps=1)


def test_nan_is_skipped_and_stops_after_a_while(tmp_path, monkeypatch, capfd):
    original = common.k3
    bad = dict(steps={2}, now=0)

    def poisoned(logp, reference):
        return original(logp, reference) * (float("nan") if bad["now"] in bad["steps"] else 1.0)

    def batch(self, original=common.Run.batch):
        bad["now"] = self.step
        return original(self)

    monkeypatch.setattr(common, "k3", poisoned)
    monkeypatch.setattr(common.Run, "batch", batch)
    lines = run_toy(ttrl, tmp_path / "once", steps=3, updates_per_batch=1)
    assert [line["skipped_updates"] for line in lines] == [0, 1, 0]
    bad["steps"] = {2, 3, 4}  # the weights of step 2 are still good: its update was left out
    with pytest.raises(common.UserError, match="2 optimizer steps in a row .* last good checkpoint is .*step_00000002"):
        run_toy(ttrl, tmp_path / "often", steps=5, updates_per_batch=1, max_bad_steps=2, checkpoint_every=1)


def test_resume_on_another_number_of_ranks(tmp_path):
    """2 ranks -> 1 -> 2, against one uninterrupted run on one rank.

    The learning rate is small and a second seed is tried, because the ranks' rounding alone can turn a sampled token."""
    try:
        resume_on_other_ranks(tmp_path / "1", seed=1)
    except AssertionError:
        resume_on_other_ranks(tmp_path / "2", seed=2)


def resume_on_other_ranks(tmp_path, seed):
    flags = [f"--{k}={v}" for k, v in {**SMALL, **STEPS, "steps": 6, "eval": "", "lr": 1e-4, "seed": seed}.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def go(ranks, out, stop_at=None, resume=True):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(ROOT / "ttrl.py"),
                   *flags, f"--out={out}", *(["--resume"] if resume else [])]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while stop_at and process.poll() is None and not (Path(out) / f"checkpoints/step_{stop_at:08d}").exists():
            time.sleep(0.05)
        if stop_at:
            process.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks
        _, errors = process.communicate(timeout=120)
        assert stop_at or process.returncode == 0, errors[-2000:]

    go(1, tmp_path / "one", resume=False)
    go(2, tmp_path / "run", stop_at=2, resume=False)
    go(1, tmp_path / "run", stop_at=4)
    go(2, tmp_path / "run")
    for a, b in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "run"), strict=True):
        assert a["step"] == b["step"] and a["reward"] == b["reward"] and a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    first, second = (load_file(tmp_path / n / "final/model.safetensors") for n in ("one", "run"))
    assert all(torch.allclose(first[n], second[n], atol=1e-4) for n in first)


def test_resume_with_vllm_repeats_the_rollouts(tmp_path):
    """Seeds reach the engine and derive from (seed, step, problem), so the resumed run samples what the whole one did."""
    flags = [f"--{k}={v}" for k, v in {**SMALL, **STEPS, "steps": 4, "eval": "", "sampler": "vllm"}.items()]

    def go(out, *more, stop_at=None):
        process = subprocess.Popen([sys.executable, str(ROOT / "ttrl.py"), *flags, f"--out={out}", *more], text=True,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while stop_at and process.poll() is None and not (Path(out) / f"checkpoints/step_{stop_at:08d}").exists():
            time.sleep(0.05)
        if stop_at:
            process.kill()
        _, errors = process.communicate(timeout=200)
        assert stop_at or process.returncode == 0, errors[-2000:]

    go(tmp_path / "whole")
    go(tmp_path / "run", stop_at=2)
    go(tmp_path / "run", "--resume")
    whole, resumed = ([json.loads(line) for line in (tmp_path / n / "samples.jsonl").read_text().splitlines()] for n in ("whole", "run"))
    assert [s["response"] for s in resumed] == [s["response"] for s in whole] and len(whole) == 16
    for a, b in zip(metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "run"), strict=True):
        assert a["step"] == b["step"] and a["reward"] == b["reward"] and a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_a_dead_rank_takes_the_others_down_and_is_named(tmp_path):
    flags = [f"--{k}={v}" for k, v in {**SMALL, **STEPS, "steps": 200, "eval": ""}.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "ttrl.py"), *flags,
               f"--out={tmp_path / 'run'}"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run/checkpoints/step_00000001").exists():
        assert process.poll() is None
        time.sleep(0.1)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
    began = time.time()
    os.kill(int(children[1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode != 0 and time.time() - began < 60
    assert "rank" in errors and "exitcode  : -9" in errors


def test_the_run_folder_describes_itself(whole):
    run = json.loads((whole / "run.json").read_text())
    assert run["args"]["seed"] == 1 and run["versions"]["torch"] and "git" in run and run["command"]
    sample = json.loads((whole / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "problem", "gold", "response", "answer", "advantage"} <= sample.keys()
    assert (whole / "best/model.safetensors").exists() and list((whole / "tensorboard").iterdir())


def test_nothing_is_unpickled_and_remote_code_is_off():
    """Models come from safetensors, checkpoints through torch.distributed.checkpoint; no other loader is called."""
    for path in ROOT.glob("*.py"):
        text = path.read_text()
        assert "pickle" not in text and "torch.load(" not in text and "eval(" not in text.replace(".eval()", "").replace("_eval(", "")
    assert common.Args().trust_remote_code is False


def test_learning_rate_by_hand(tmp_path):
    run = object.__new__(common.Run)
    run.args, run.total = common.Args(lr=1.0, warmup=0.2), 10
    rates = []
    for run.step in range(1, 11):
        rates.append(run.learning_rate())
    # two warm-up steps 1/2 and 1, then a cosine over the other eight that would reach 0 at step 11: cos(pi k / 9), k = 1 ... 8
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == pytest.approx(0.5 * (1 + 0.9396926)) and rates[-1] == pytest.approx(0.5 * (1 - 0.9396926), abs=1e-6)


def test_resume_takes_the_arguments_of_the_run(tmp_path, monkeypatch, capsys):
    """`--resume --out FOLDER` is enough; what is given beside it wins and is said; another script's run is refused."""
    saved = {**ttrl.Args(**ttrl.TOY).__dict__, "votes": 24, "out": str(tmp_path)}
    (tmp_path / "run.json").write_text(json.dumps(dict(script="ttrl", args=saved)))
    monkeypatch.setattr(sys, "argv", ["ttrl.py", "--resume", "--out", str(tmp_path), "--seed", "7"])
    args = common.parse(ttrl.Args, ttrl.TOY)
    assert (args.votes, args.seed, args.lr, args.resume) == (24, 7, ttrl.TOY["lr"], True)
    assert "Resuming with other arguments than before: --seed 7 (was 1)\n" == capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["scrl.py", "--resume", "--out", str(tmp_path)])
    with pytest.raises(common.UserError, match="is a run of ttrl.py"):
        common.parse(ttrl.Args, ttrl.TOY)
