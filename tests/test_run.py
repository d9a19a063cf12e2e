"""A run survives being killed, goes on bit for bit, guards its folder, and says clearly what is wrong."""

import contextlib
import dataclasses
import importlib
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL, fresh_state, random_rollouts, read_lines, run_toy, toy_args, toy_of, untimed
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import common
import restrain
import ttrl
from engine import checkpoint, options
from engine.base import UserError
from engine.hf_sampler import HFSampler
from common import Rollout

STEPS = dict(steps=6, checkpoint_every=1, votes=4, train_samples=4, max_new_tokens=48, eval="toy_test",
             eval_every=3, eval_samples=1)
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


# ------------------------------------------- runs in a process of their own --------------------------------
def run_quietly(out, overrides):
    """A whole run in this process, which is a fork of the test's: starting one costs no imports."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(out.with_suffix(".err"), os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    sys.argv, sys.stdout, sys.stderr = ["ttrl.py"], os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    # progress bars share a lock with the parent's: killed while it holds that, this process would block it
    tqdm.set_lock(threading.RLock())
    try:
        run_toy(ttrl, out, **overrides)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        os._exit(2)
    except SystemExit as leave:
        os._exit(leave.code)
    os._exit(0)


def start(out, **overrides):
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=run_quietly, args=(out, {**STEPS, **overrides}))
    process.start()
    return process


def finish(out, code=0, **overrides) -> str:
    """A run that ends with this exit code, and what it wrote to stderr."""
    process = start(out, **overrides)
    process.join(120)
    errors = out.with_suffix(".err").read_text()
    assert process.exitcode == code, errors
    return errors


def wait_for(condition, process) -> bool:
    """Until it holds, or the process has ended; whether it holds."""
    end = time.monotonic() + 60
    while not condition() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.0005)
    return bool(condition())


def metrics_of(out):
    """The lines as they are: one that stands twice is seen."""
    return untimed(read_lines(out / "metrics.jsonl"))


def assert_same_runs(out, whole):
    """No gap, no step or vote twice, every value the same."""
    assert metrics_of(out) == metrics_of(whole)
    for name in ("samples.jsonl", "votes.jsonl"):
        assert read_lines(out / name) == read_lines(whole / name)
    assert_equal(fresh_state(out / "final"), fresh_state(whole / "final"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    finish(out)
    return out


# -------------------------------------------------- kill -9 ------------------------------------------------
def test_killed_at_twenty_moments_and_bitwise_the_same(tmp_path, whole):
    """kill -9 in the middle of steps, evaluations and checkpoints; every resume goes on exactly."""
    out, rng, caught_writing, resumed = tmp_path / "run", random.Random(0), 0, 0
    for kill in range(20):
        resume = (out / "run.json").exists()
        resumed += resume
        process = start(out, resume=resume)
        if kill % 2:  # in the middle of a checkpoint: its folder is there, but not yet complete
            wait_for(lambda: list(out.glob("checkpoints/*.partial")), process)
            time.sleep(rng.random() * 0.01)
        else:
            wait_for((out / "metrics.jsonl").exists, process)
            time.sleep(rng.random() * 1.2)
        process.kill()
        process.join()
        caught_writing += bool(list(out.glob("checkpoints/*.partial")))
        assert process.exitcode in (0, -signal.SIGKILL), out.with_suffix(".err").read_text()
        if process.exitcode == 0:  # it had ended before: begin another life
            assert_same_runs(out, whole)
            shutil.rmtree(out)
    finish(out, resume=(out / "run.json").exists())
    assert caught_writing >= 3 and resumed >= 10
    assert_same_runs(out, whole)
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path, whole, number):
    out = tmp_path / "run"
    process = start(out, checkpoint_every=0)
    assert wait_for(lambda: (out / "metrics.jsonl").exists() and len(metrics_of(out)) >= 3, process)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    done = metrics_of(out)[-1]["step"]
    assert [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:08d}"]
    finish(out, resume=True, checkpoint_every=0)
    assert_same_runs(out, whole)
    record = json.loads((out / "run.json").read_text())  # of both starts
    assert [begun["args"]["resume"] for begun in [*record["before"], record]] == [False, True]


def test_a_signal_in_the_middle_of_a_print_stops_the_run(tmp_path, monkeypatch):
    signals = [signal.SIGTERM]

    class Stderr(io.FileIO):
        def write(self, data):
            if signals and b"reward" in bytes(data):  # the progress bar's
                signal.raise_signal(signals.pop())
            return len(data)

    buffer = io.BufferedWriter(Stderr(os.devnull, "w"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(buffer, write_through=True))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run_toy(ttrl, tmp_path / "run", **STEPS)


# ------------------------------------------- checkpoints that are not whole --------------------------------
@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run with checkpoints of steps 3 and 4, killed at step 5."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    process = start(out, keep=9)
    assert wait_for((out / "checkpoints/step_00000004").exists, process)
    process.kill()
    process.join()
    for folder in out.glob("checkpoints/*"):
        if folder.name not in ("step_00000003", "step_00000004"):  # the kill came late
            shutil.rmtree(folder)
    return out


def cut(folder):
    victim = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1000])


@pytest.mark.parametrize("fault", ["cut short", "lacks a file", "lacks its state"])
def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_is_used(
        fault, tmp_path, interrupted, whole):
    out = tmp_path / "run"
    shutil.copytree(interrupted, out)
    newest = out / "checkpoints/step_00000004"
    shutil.copytree(newest, newest.with_suffix(".partial"))  # of a killed run: it goes, with no word
    if fault == "cut short":
        cut(newest)
    elif fault == "lacks a file":
        state = json.loads((newest / "state.json").read_text())
        files = state["files"] | {"of-rank-1.safetensors": 1000}
        (newest / "state.json").write_text(json.dumps(state | dict(files=files)))
    else:
        (newest / "state.json").unlink()
    kept = (out / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=f"{newest} is damaged .*; delete this folder, and the one"):
        run_toy(ttrl, out, **STEPS, resume=True)
    assert (out / "metrics.jsonl").read_text() == kept
    shutil.rmtree(newest)
    run_toy(ttrl, out, **STEPS, resume=True)
    assert_same_runs(out, whole)


@pytest.mark.parametrize("left", ["metrics.jsonl", "final"])
def test_progress_without_a_checkpoint_is_kept(tmp_path, interrupted, whole, left):
    out = tmp_path / "run"
    shutil.copytree(whole if left == "final" else interrupted, out)
    if left == "final":
        (out / "metrics.jsonl").unlink()
    shutil.rmtree(out / "checkpoints")
    kept = (out / left).stat().st_mtime_ns
    with pytest.raises(UserError, match="has made steps, but has no checkpoint; start a new run"):
        run_toy(ttrl, out, **STEPS, resume=True)
    assert (out / left).stat().st_mtime_ns == kept


# ---------------------------------------- folders that are not the run's -----------------------------------
CONTENT = dict(model="./model", dataset="data.jsonl", eval="bench.jsonl", out="run", eval_samples=1,
               checkpoint_every=1)


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    """A folder with a model, data and a run of one step."""
    folder = tmp_path_factory.mktemp("content")
    shutil.copytree(ROOT / "toy", folder / "model")
    for name in ("data.jsonl", "bench.jsonl"):
        lines = (ROOT / "toy/train.jsonl").read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:8]))
    with contextlib.chdir(folder):
        run_toy(ttrl, **CONTENT, steps=1)
    return folder


@pytest.mark.parametrize("file, sentence", [
    ("", ""), ("model/model.safetensors", "the weights of --model"), ("data.jsonl", "the data of --dataset"),
    ("bench.jsonl", "the data of --eval"), ("model/generation_config.json", "the stop tokens of --model")])
def test_a_run_with_other_content_under_the_same_names_is_refused(
        tmp_path, monkeypatch, first_step, file, sentence):
    shutil.copytree(first_step, tmp_path, dirs_exist_ok=True)  # content counts, not its place
    monkeypatch.chdir(tmp_path)
    if not file:
        assert run_toy(ttrl, **CONTENT, steps=2, resume=True)[-1]["step"] == 2
        return
    if file.endswith(".safetensors"):
        weights = load_file(file)
        weights["model.norm.weight"] += 0.1
        save_file(weights, file, metadata={"format": "pt"})
    else:
        text = Path(file).read_text().replace('"answer": "', '"answer": "1', 1)
        Path(file).write_text(text.replace('"eos_token_id": 2', '"eos_token_id": [2, 7]'))
    with pytest.raises(UserError, match=f"{sentence}.* differs from what the run in .* had; start a new run"):
        run_toy(ttrl, **CONTENT, steps=2, resume=True)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step_00000005"])
def test_a_link_in_a_strangers_folder_is_refused(tmp_path, interrupted, name):
    out, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(interrupted, out)
    victim.write_text("mine")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(victim)
    with pytest.raises(UserError, match=f"holds the link '{Path(name).name}'; remove it"):
        run_toy(ttrl, out, **STEPS, resume=True)
    assert victim.read_text() == "mine"


def test_a_strangers_checkpoint_cannot_execute_code(tmp_path, interrupted):
    """Files that would, wherever torch's own checkpoints are unpickled from, with their sizes."""
    out, executed = tmp_path / "run", tmp_path / "executed"
    payload = f"cos\nmkdir\n(V{executed}\ntR.".encode()  # a pickle that calls os.mkdir
    shutil.copytree(interrupted, out)
    folder = out / "checkpoints/step_00000004"
    for name in (".metadata", "__0_0.distcp", "state.pt", "shard-00009-model-00001-of-00001.safetensors"):
        (folder / name).write_bytes(payload)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | dict(files=checkpoint.sizes(folder))))
    with pytest.raises(UserError, match=f"{folder} is damaged .SafetensorError Error while deser"):
        run_toy(ttrl, out, **STEPS, resume=True)
    assert not executed.exists()
    pickle.loads(payload)
    assert executed.exists()  # it would have


def test_two_runs_in_one_folder_the_second_is_refused(tmp_path):
    """Also with --resume; the first goes on undisturbed. After its death, whatever it died of, it is free."""
    out = tmp_path / "run"
    first = start(out, steps=500, eval="", checkpoint_every=500)
    assert wait_for((out / "metrics.jsonl").exists, first)
    run_json = (out / "run.json").read_bytes()
    with pytest.raises(UserError, match="in which another process is running; give another folder"):
        run_toy(ttrl, out, resume=True)
    before = len(metrics_of(out))
    assert (out / "run.json").read_bytes() == run_json
    assert wait_for(lambda: len(metrics_of(out)) > before, first)
    first.kill()
    first.join()
    assert run_toy(ttrl, out, resume=True, steps=1, checkpoint_every=500)[-1]["step"] == 1


def test_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, whole):
    out = tmp_path / "run"
    out.mkdir()
    # room for so few files, not bytes: too few bytes are found before the run starts
    command = ["mount", "-t", "tmpfs", "-o", "size=60m,nr_inodes=20", "tmpfs", str(out)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("optional: needs the right to mount a small tmpfs")
    try:
        error = finish(out, code=2, keep=9, eval="")
        shutil.copytree(out, tmp_path / "copy", ignore=shutil.ignore_patterns("*.partial"))
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)
    assert "No space left" in error and "--resume continues from" in error and "Traceback" not in error
    finish(tmp_path / "copy", eval="", resume=True)
    assert_equal(fresh_state(tmp_path / "copy/final"), fresh_state(whole / "final"))


# ------------------------------------------- resume with other arguments -----------------------------------
@pytest.fixture
def parse_resumed(tmp_path, monkeypatch):
    """parse_resumed(script, *flags): the arguments that --resume takes from the run.json of a run of ttrl.py
    by another version, with an option that is unknown and without one that is known."""
    values = toy_of(ttrl) | dict(votes=24, out=str(tmp_path))
    args = options.options_dict(options.make_args(ttrl.Args, values)) | dict(no_such_option=3)
    del args["grad_clip"]
    (tmp_path / "run.json").write_text(json.dumps(dict(script="ttrl", args=args, identity={"data": "1"})))

    def parse(script, *flags):
        module = importlib.import_module(script)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--resume", "--out", str(tmp_path), *flags])
        return options.parse(module.Args, toy_of(module), common.SMOLLM2)

    return parse


def test_resume_takes_the_arguments_of_the_run(parse_resumed, capsys):
    """`--resume --out FOLDER` is enough; what is given beside it wins and is said."""
    args = parse_resumed("ttrl")
    assert (args.votes, args.seed, args.lr, args.grad_clip, args.machine.resume) == (24, 1, 2e-4, 1.0, True)
    capsys.readouterr()
    args = parse_resumed("ttrl", "--eval_samples", "7", "--lr=0.1", "--votes", "24")
    assert (args.votes, args.eval_samples, args.lr, args.machine.resume) == (24, 7, 0.1, True)
    printed = capsys.readouterr().out.splitlines()
    assert "Resuming with another --eval_samples: 7 (was 16)" in printed
    jump = "; the learning rate jumps to the new schedule"
    assert f"Resuming with another --lr: 0.1 (was 0.0002){jump}" in printed


@pytest.mark.parametrize("script, flags, sentence", [
    ("ttrl", ["--seed", "2"], "--seed is 2, but the run in .* has 1; start a new run."),
    ("scrl", [], "is a run of ttrl.py")])
def test_resume_refuses_another_run(parse_resumed, script, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_resumed(script, *flags)


# ----------------------------------------------- the initial votes -----------------------------------------
def test_initial_votes_continue_after_a_kill(tmp_path, monkeypatch):
    """Stored call by call. What is stored is not asked again."""
    problems, path = tmp_path / "problems.jsonl", tmp_path / "run/initial_votes.jsonl"
    problems.write_text("\n".join((ROOT / "toy/train.jsonl").read_text().splitlines()[:6]))
    flags = dict(dataset=str(problems), out=str(tmp_path / "run"))
    run_toy(restrain, **flags, steps=1)
    stored = {record["id"]: (record["answer"], record["votes"]) for record in read_lines(path)}
    assert sorted(stored) == list(range(6))
    kept = path.read_text().splitlines(keepends=True)[:3]
    path.write_text("".join(kept))
    run = common.start(toy_args(restrain, resume=True, **flags))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # before the loop, it ends at once
    calls, sample = [], common.sample

    def counted(run, step, prompts, n):
        calls.append({prompt.id for prompt in prompts})
        return sample(run, step, prompts, n)

    monkeypatch.setattr(common, "sample", counted)
    for _ in range(2):  # the same votes as the uninterrupted pass; the second time all are stored
        assert common.initial_votes(run, prompts_per_call=2) == stored
    assert [len(ids) for ids in calls] == [2, 1]
    assert not set.union(*calls) & {json.loads(line)["id"] for line in kept}


def test_initial_votes_by_hand(tmp_path, monkeypatch):
    cases = {("3", "0.5", None, r"\frac{1}{2}", "3", "3.0"): ("3", 3),
             ("7", "8"): ("7", 1),  # a tie: the answer seen first
             (None, None): (None, 0)}
    groups = []
    for case in cases:
        groups.append([Rollout([1], [2], torch.zeros(1), True, answer=answer) for answer in case])
    monkeypatch.setattr(common, "sample", lambda run, step, prompts, n: groups)
    quiet = SimpleNamespace(load=lambda tensors: None, sleep=lambda: None)
    run = SimpleNamespace(args=common.Args(), log=SimpleNamespace(path=tmp_path), sampler=quiet,
                          problems=[common.Problem("p", id=i) for i in range(3)],
                          policy=SimpleNamespace(named_tensors=lambda: []))
    assert list(common.initial_votes(run).values()) == list(cases.values())


# ------------------------------------------------ the loop's functions ------------------------------------
def test_learning_rate_by_hand():
    rates = [common.learning_rate(common.Args(lr=1.0, warmup=0.2), step, 10) for step in range(1, 11)]
    # two warm-up steps 1/2 and 1, then a cosine over the other eight that is 0 at step 11: cos(pi k / 9)
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == pytest.approx(0.5 * (1 + 0.9396926))
    assert rates[5] == pytest.approx(0.5 * (1 + 0.1736482))  # k = 4: cos(80 degrees)
    assert rates[-1] == pytest.approx(0.5 * (1 - 0.9396926), abs=1e-6)
    # without warm-up the cosine has one step of full rate before it
    assert common.learning_rate(common.Args(lr=1.0, warmup=0.0), 1, 10) == 1.0


def test_every_epoch_is_a_new_order_and_no_batch_holds_a_problem_twice():
    args, problems = common.Args(prompts_per_batch=3), list("abcdefgh")  # two batches an epoch, two left over
    batches = [common.next_prompts(args, problems, number) for number in range(1, 21)]
    epochs = [first + second for first, second in zip(batches[::2], batches[1::2])]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 10
    assert {problem for epoch in epochs for problem in epoch} == set("abcdefgh")
    assert common.next_prompts(dataclasses.replace(args, seed=2), problems, 7) != batches[6]


@pytest.mark.parametrize("kind", ["mixed", "by_prompt"])
def test_minibatches_are_a_partition(kind):
    args, train = common.Args(minibatches=kind, num_minibatches=3), random_rollouts(12)
    parts = common.minibatches(args, 1, train)
    assert sorted(sum(parts, []), key=train.index) == train and [len(part) for part in parts] == [4] * 3
    assert (common.minibatches(args, 2, train) == parts) == (sum(parts, []) == train) == (kind == "by_prompt")
    args.num_minibatches = 50
    assert len(common.minibatches(args, 2, train)) == 12  # no empty optimizer step
    assert common.minibatches(args, 2, []) == []


@pytest.mark.parametrize("dtype, shift, tokens, result", [
    ("float32", 1e-5, 8, "goes on"), ("float32", 0.01, 1, "ends"), ("float32", 0.01, 0, "goes on"),
    ("bfloat16", 0.04, 8, "goes on"), ("bfloat16", 0.06, 8, "warns"), ("bfloat16", 0.6, 8, "ends")])
def test_a_sampler_of_other_weights_stops_the_run(dtype, shift, tokens, result, monkeypatch):
    """float32: if one token differs. bfloat16 rounds: on average 0.05 is a warning, 0.5 the end."""
    warned, (response,) = [], random_rollouts(1, shortest=8, longest=8)
    run = SimpleNamespace(args=common.Args(), dtype=getattr(torch, dtype))
    monkeypatch.setattr(common, "print0", warned.append)
    response.old_logp = response.sampler_logp + shift * (torch.arange(8) < tokens)
    if result == "ends":
        with pytest.raises(UserError, match=f"sampler does not run the current policy: .* by up to {shift}"):
            common.check_sampler(run, [response])
        return
    found = common.check_sampler(run, [response] if tokens else [])  # []: Dynamic RL, no usable question
    warning = "Warning: sampler and trainer log-probs differ by 0.060 on average."
    assert warned == [warning] * (result == "warns")
    expected = dict(logp_diff_max=shift * (tokens > 0), logp_diff_mean=shift * tokens / 8)
    assert found == pytest.approx(expected)


def test_every_sync_begins_with_a_sleeping_sampler(tmp_path, monkeypatch):
    """vLLM's KV cache and the gathered weights may not fit together, nor it and what restoring takes. Sync,
    generate, sleep: each step once, with an evaluation if one is due; and one more sync for the last one."""
    calls = []

    def noted(letter, function):
        def call(*args, **options):
            calls.append(letter)
            return function(*args, **options)
        return call

    for name in ("load", "generate", "sleep"):
        monkeypatch.setattr(HFSampler, name, noted(name[0], getattr(HFSampler, name)))
    monkeypatch.setattr(checkpoint, "load", noted("r", checkpoint.load))
    few = dict(max_new_tokens=8, eval="toy_test", eval_samples=1, eval_every=1, checkpoint_every=1)
    run_toy(ttrl, tmp_path / "run", steps=1, **few)
    run_toy(ttrl, tmp_path / "run", steps=2, resume=True, **few)
    assert re.fullmatch("gs" "lg{2,}s" "lg+" "gsr" "lgs" "lg+", "".join(calls)), calls  # first: measured


def test_gold_answers_never_reach_the_weights(tmp_path):
    """A run without --labels gold ends with the same weights if its gold answers are nonsense."""
    rows = read_lines(ROOT / "toy/train.jsonl")[:8]
    for name, change in (("right", {}), ("nonsense", dict(answer="0"))):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row | change) + "\n" for row in rows))
        run_toy(ttrl, tmp_path / name, dataset=str(data))
    assert_equal(fresh_state(tmp_path / "right/final"), fresh_state(tmp_path / "nonsense/final"))


def test_the_run_folder_describes_itself(whole):
    run = json.loads((whole / "run.json").read_text())
    assert run["args"]["seed"] == 1 and run["script"] == "ttrl" and run["command"]
    assert run["versions"]["torch"] and "git" in run
    assert list((whole / "tensorboard").iterdir())
    assert [line["step"] for line in metrics_of(whole)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]  # evaluations: 0, 3, 6


# --------------------------------------------------- vLLM -------------------------------------------------
@pytest.mark.slow
def test_resume_with_vllm_repeats_the_rollouts(tmp_path):
    """Seeds reach the engine and derive from (seed, step, problem): it samples what the whole run did."""
    options = {**SMALL, **STEPS, "steps": 4, "eval": "", "sampler": "vllm", "keep": 9}

    def go(out, *more):
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, str(ROOT / "ttrl.py"), *flags, f"--out={out}", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-2000:]

    whole, resumed = tmp_path / "whole", tmp_path / "run"
    go(whole)
    shutil.copytree(whole, resumed)
    for step in (3, 4):  # as if it had been killed in the third
        shutil.rmtree(resumed / f"checkpoints/step_{step:08d}")
    go(resumed, "--resume")
    for a, b in zip(*(read_lines(out / "samples.jsonl") for out in (whole, resumed)), strict=True):
        assert [r["text"] for r in a["responses"]] == [r["text"] for r in b["responses"]]
    for a, b in zip(metrics_of(whole), metrics_of(resumed), strict=True):
        assert a["step"] == b["step"] and a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
