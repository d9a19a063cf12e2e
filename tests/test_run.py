"""A run survives being killed, goes on bit for bit, guards its folder, and says clearly what is wrong."""

import importlib
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
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT, SMALL, fresh_state, random_rollouts, read_lines, run_toy, toy_args, toy_of, untimed)
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import common
import ettrl
import restrain
import scrl
import ttrl
from engine import checkpoint, initial_votes, options
from engine.base import UserError, seed_of
from engine.hf_sampler import HFSampler
from engine.policy import Rollout

STEPS = dict(steps=6, checkpoint_every=1, votes=4, train_samples=4, max_new_tokens=48, eval="toy_test",
             eval_every=3, eval_samples=1)


# ------------------------------------------- runs in a process of their own --------------------------------
def run_quietly(out, overrides):
    """A whole run in this process, which is a fork of the test's: starting one costs no imports."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(error_file(out), os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
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


def finish(out, **overrides):
    process = start(out, **overrides)
    process.join(120)
    return process.exitcode


def error_file(out):
    """Not on the disk that a test fills."""
    return Path(tempfile.gettempdir()) / (str(out).replace("/", "_") + ".err")


def errors_of(out):
    return error_file(out).read_text()


def metrics_of(out):
    return untimed(read_lines(Path(out) / "metrics.jsonl"))


def same_weights(a, b):
    first, second = fresh_state(Path(a) / "final"), fresh_state(Path(b) / "final")
    return all(torch.equal(first[name], second[name]) for name in first)


def wait_for(condition, process, seconds=60):
    """Until it holds; fails if the process ends before."""
    began = time.time()
    while not condition():
        assert process.is_alive() or condition(), "the run ended"
        assert time.time() - began < seconds
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert finish(out) == 0, errors_of(out)
    return out


# -------------------------------------------------- kill -9 ------------------------------------------------
def partial(out) -> list[Path]:
    """Checkpoints that are not yet whole."""
    return list(out.glob("checkpoints/*.partial"))


def test_killed_at_twenty_moments_and_bitwise_the_same(tmp_path, whole):
    """kill -9 in the middle of steps, evaluations and checkpoints; every resume goes on exactly."""
    out, rng, caught_writing, resumed = tmp_path / "run", random.Random(0), 0, 0
    for kill in range(20):
        resume = (out / "run.json").exists()
        resumed += resume
        process, began = start(out, resume=resume), time.time()
        if kill % 2:  # in the middle of a checkpoint: its folder is there, but not yet complete
            while process.is_alive() and time.time() - began < 20 and not partial(out):
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.01)
        else:
            while process.is_alive() and not (out / "metrics.jsonl").exists():
                time.sleep(0.005)
            time.sleep(rng.random() * 1.2)
        process.kill()
        process.join()
        caught_writing += bool(partial(out))
        assert process.exitcode in (0, -signal.SIGKILL), errors_of(out)
        if process.exitcode == 0:  # it had ended before: begin another life
            assert same_weights(out, whole)
            shutil.rmtree(out)
    assert finish(out, resume=(out / "run.json").exists()) == 0, errors_of(out)
    assert caught_writing >= 3 and resumed >= 10
    assert metrics_of(out) == metrics_of(whole)  # no gap, no step twice, every value the same
    assert same_weights(out, whole)
    assert read_lines(out / "samples.jsonl") == read_lines(whole / "samples.jsonl")
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path, whole, number):
    out = tmp_path / "run"
    process = start(out, checkpoint_every=0)
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(metrics_of(out)) >= 3, process)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    done = metrics_of(out)[-1]["step"]
    assert [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:08d}"]
    assert finish(out, resume=True, checkpoint_every=0) == 0, errors_of(out)
    assert metrics_of(out) == metrics_of(whole)
    assert same_weights(out, whole)


# ------------------------------------------- checkpoints that are not whole --------------------------------
@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run with checkpoints of steps 3 and 4, killed at step 5."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    process = start(out)
    wait_for((out / "checkpoints/step_00000004").exists, process)
    process.kill()
    process.join()
    for folder in out.glob("checkpoints/*"):  # the kill came late, or before the oldest was removed
        if folder.name not in ("step_00000003", "step_00000004"):
            shutil.rmtree(folder)
    if not (out / "checkpoints/step_00000003").exists():
        shutil.copytree(out / "checkpoints/step_00000004", out / "checkpoints/step_00000003")
    return out


def cut(folder):
    victim = largest(folder)
    victim.write_bytes(victim.read_bytes()[:-1000])


def remove(folder):
    largest(folder).unlink()


def unnamed(folder):
    folder.rename(folder.with_suffix(".partial"))


def no_state(folder):
    (folder / "state.json").unlink()


def largest(folder):
    return max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("damage", [cut, remove, unnamed, no_state])
def test_damaged_checkpoint_falls_back_with_a_warning(tmp_path, interrupted, whole, damage, capfd):
    out = tmp_path / "run"
    shutil.copytree(interrupted, out)
    newest = out / "checkpoints/step_00000004"
    damage(newest)
    run_toy(ttrl, out, **STEPS, resume=True)
    printed = capfd.readouterr().out
    assert (f"Warning: {newest} is not usable" in printed) == (damage is not unnamed)
    assert f"Resumed from {out / 'checkpoints/step_00000003'}\n" in printed
    assert metrics_of(out) == metrics_of(whole)
    assert same_weights(out, whole)


@pytest.mark.parametrize("left", ["metrics.jsonl", "final"])
def test_progress_without_a_usable_checkpoint_is_thrown_away(tmp_path, interrupted, whole, left):
    out = tmp_path / "run"
    shutil.copytree(whole if left == "final" else interrupted, out)
    if left == "final":
        (out / "metrics.jsonl").unlink()
    for folder in (out / "checkpoints").iterdir():
        cut(folder)
    kept = (out / left).stat().st_mtime_ns
    with pytest.raises(UserError, match="has made steps, but has no usable checkpoint; start a new run"):
        run_toy(ttrl, out, **STEPS, resume=True)
    assert (out / left).stat().st_mtime_ns == kept


def test_damaged_checkpoints_push_out_the_good_one(tmp_path, interrupted):
    """With --keep 1, the newest two damaged: what the resumed run saves next stays."""
    out = tmp_path / "run"
    shutil.copytree(interrupted, out)
    good, damaged = out / "checkpoints/step_00000003", out / "checkpoints/step_00000004"
    shutil.copytree(damaged, out / "checkpoints/step_00000009")
    cut(damaged)
    cut(out / "checkpoints/step_00000009")
    run_toy(ttrl, out, **STEPS | dict(steps=4), keep=1, resume=True)
    assert checkpoint.complete(out) == [damaged] and not good.exists()
    assert damaged.joinpath("state.json").exists()
    run_toy(ttrl, out, **STEPS, keep=1, resume=True)  # it is whole now


@pytest.mark.parametrize("change, sentence", [
    ("weights", "the weights of --model"), ("problems", "the data of --dataset"),
    ("eval", "the data of --eval"), ("stop", "the stop tokens of --model")])
def test_a_run_goes_on_with_other_content_under_the_same_names(tmp_path, change, sentence):
    model, data, bench = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "bench.jsonl"
    shutil.copytree(ROOT / "toy", model)
    for path in (data, bench):
        path.write_text("".join((ROOT / "toy/train.jsonl").read_text().splitlines(keepends=True)[:8]))
    flags = dict(model=str(model), dataset=str(data), eval=str(bench), eval_samples=1, checkpoint_every=1)
    run_toy(ttrl, tmp_path / "run", **flags, steps=1)
    shutil.move(model, tmp_path / "moved")  # content counts, not its place
    flags["model"] = str(tmp_path / "moved")
    run_toy(ttrl, tmp_path / "run", **flags, steps=2, resume=True)
    if change == "weights":
        weights = load_file(tmp_path / "moved/model.safetensors")
        weights["model.norm.weight"] += 0.1
        save_file(weights, tmp_path / "moved/model.safetensors", metadata={"format": "pt"})
    elif change == "stop":
        (tmp_path / "moved/generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    else:
        path = data if change == "problems" else bench
        path.write_text(path.read_text().replace('"answer": "', '"answer": "1', 1))
    with pytest.raises(UserError, match=f"{sentence}.* differs from what the run in .* had; start a new run"):
        run_toy(ttrl, tmp_path / "run", **flags, steps=3, resume=True)


def test_a_resumed_run_forgets_how_it_was_started(tmp_path):
    run_toy(ttrl, tmp_path / "run", steps=1, checkpoint_every=1, lr=1e-4)
    for steps in (2, 3):
        run_toy(ttrl, tmp_path / "run", steps=steps, checkpoint_every=1, lr=1e-4 * steps, resume=True)
    record = json.loads((tmp_path / "run/run.json").read_text())
    starts = [*record["before"], record]
    assert [start["args"]["lr"] for start in starts] == pytest.approx([1e-4, 2e-4, 3e-4])
    assert all("versions" in start and "git" in start for start in starts)


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json.partial", "checkpoints/step_00000005"])
def test_a_link_in_a_strangers_folder_is_written_through(tmp_path, interrupted, name):
    out, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(interrupted, out)
    victim.write_text("mine")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(victim)
    with pytest.raises(UserError, match=f"holds the link '{Path(name).name}'; remove it"):
        run_toy(ttrl, out, **STEPS, resume=True)
    assert victim.read_text() == "mine"


class Payload:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_strangers_checkpoint_cannot_execute_code(tmp_path, interrupted, capfd):
    """Files that would, wherever torch's own checkpoints are unpickled from, with their sizes."""
    out, executed = tmp_path / "run", tmp_path / "executed"
    shutil.copytree(interrupted, out)
    folder = out / "checkpoints/step_00000004"
    for name in (".metadata", "__0_0.distcp", "state.pt", "shard-00009-model-00001-of-00001.safetensors"):
        (folder / name).write_bytes(pickle.dumps(Payload(executed)))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | dict(files=checkpoint.sizes(folder))))
    run_toy(ttrl, out, **STEPS, resume=True)
    printed = capfd.readouterr().out
    assert f"Warning: {folder} is not usable (SafetensorError Error while deserializing header" in printed
    assert "step_00000003\n" in printed and not executed.exists()
    pickle.loads(pickle.dumps(Payload(executed)))
    assert executed.exists()  # it would have


# -------------------------------------------------- full disk ----------------------------------------------
def test_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, whole):
    mount = tmp_path / "small"
    mount.mkdir()
    # room for so few files, not bytes: too few bytes are found before the run starts
    command = ["mount", "-t", "tmpfs", "-o", "size=60m,nr_inodes=20", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("optional: needs the right to mount a small tmpfs")
    try:
        out = mount / "run"
        assert finish(out, keep=9, eval="") == 2
        error = errors_of(out)
        assert "No space left" in error and "the last good checkpoint is" in error
        assert "Traceback" not in error
        shutil.copytree(out, tmp_path / "copy", ignore=shutil.ignore_patterns("*.partial"))
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
    assert finish(tmp_path / "copy", eval="", resume=True) == 0, errors_of(tmp_path / "copy")
    assert same_weights(tmp_path / "copy", whole)


# ----------------------------------------------- guarding the folder ---------------------------------------
def test_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out is '.*/file/run', which cannot be written: Not a directory"):
        run_toy(ttrl, tmp_path / "file/run")


def test_a_run_folder_is_not_overwritten(tmp_path):
    run_toy(ttrl, tmp_path / "run", steps=1)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="already holds a run; give another folder, or --resume"):
        run_toy(ttrl, tmp_path / "run", steps=1)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_two_runs_in_one_folder_the_second_is_refused(tmp_path):
    """Also with --resume; the first goes on undisturbed. After its death, whatever it died of, it is free."""
    out = tmp_path / "run"
    first = start(out, steps=500, eval="", checkpoint_every=500)
    wait_for(lambda: (out / "metrics.jsonl").exists(), first)
    run_json = (out / "run.json").read_bytes()
    with pytest.raises(UserError, match="in which another process is running; give another folder"):
        run_toy(ttrl, out, resume=True)
    with pytest.raises(UserError, match="already holds a run"):
        run_toy(ttrl, out)
    assert (out / "run.json").read_bytes() == run_json and first.is_alive()
    before = len(metrics_of(out))
    wait_for(lambda: len(metrics_of(out)) > before, first)
    first.kill()
    first.join()
    assert run_toy(ttrl, out, resume=True, steps=1, checkpoint_every=500)[-1]["step"] == 1


# ------------------------------------------- resume with other arguments -----------------------------------
def a_run_of(folder, module=ttrl, **saved):
    """A folder with the run.json of a script's toy run."""
    args = vars(module.Args(**{**toy_of(module), **saved, "out": str(folder)}))
    record = dict(script=module.__name__, args=args, identity={"data": "1"})
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def parse(monkeypatch, script, *flags):
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
    return options.parse(module.Args, toy_of(module))


def test_resume_takes_the_arguments_of_the_run(tmp_path, monkeypatch, capsys):
    """`--resume --out FOLDER` is enough; what is given beside it wins and is said."""
    a_run_of(tmp_path, votes=24)
    args = parse(monkeypatch, "ttrl", "--resume", "--out", tmp_path)
    assert (args.votes, args.seed, args.lr, args.resume) == (24, 1, 5e-4, True)
    assert capsys.readouterr().out == ""
    more = ["--eval_samples", "7", "--lr=0.1", "--votes", "24"]
    args = parse(monkeypatch, "ttrl", "--resume", "--out", tmp_path, *more)
    assert (args.votes, args.eval_samples, args.lr, args.resume) == (24, 7, 0.1, True)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "Resuming with another --eval_samples: 7 (was 16)", "Resuming with another --lr: 0.1 (was 0.0005)"]


def test_resume_refuses_another_seed(tmp_path, monkeypatch):
    a_run_of(tmp_path)
    with pytest.raises(UserError, match=f"--seed is 2, but the run in {tmp_path} has 1; start a new run."):
        parse(monkeypatch, "ttrl", "--resume", "--out", tmp_path, "--seed", "2")


def test_a_folder_of_an_older_or_newer_version_resumes(tmp_path, monkeypatch):
    """Arguments that the script no longer has are dropped, new ones have their defaults."""
    a_run_of(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    run["args"]["no_such_option"] = 3
    del run["args"]["grad_clip"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert parse(monkeypatch, "ttrl", "--resume", "--out", tmp_path).grad_clip == 1.0


def test_a_run_of_another_script_is_refused(tmp_path, monkeypatch):
    a_run_of(tmp_path)
    with pytest.raises(UserError, match="is a run of ttrl.py"):
        parse(monkeypatch, "scrl", "--resume", "--out", tmp_path)


def test_resume_without_a_folder_or_a_run_in_it_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--resume needs --out"):
        parse(monkeypatch, "ttrl", "--resume")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="run.json cannot be read, it does not exist; there is no run"):
            parse(monkeypatch, "ttrl", "--resume", "--out", folder)
    with pytest.raises(UserError, match="there is no run to go on with"):  # a fork that calls main itself
        run_toy(ttrl, tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, value", [("votes", "many"), ("votes", 0), ("minibatches", "loud")])
def test_a_damaged_run_json_is_resumed(tmp_path, monkeypatch, name, value):
    a_run_of(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    run["args"][name] = value
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match=f"--resume: .*run.json is damaged: --{name} is "):
        parse(monkeypatch, "ttrl", "--resume", "--out", tmp_path)


# ----------------------------------------------- the initial votes -----------------------------------------
@pytest.fixture(scope="module")
def voted(tmp_path_factory):
    """A RESTRAIN run that stopped after its first step, with the initial model's votes on its problems."""
    out = tmp_path_factory.mktemp("votes")
    problems = out / "problems.jsonl"
    lines = (ROOT / "toy/train.jsonl").read_text().splitlines()[:6]
    problems.write_text("\n".join(lines))
    run_toy(restrain, out / "run", dataset=str(problems), steps=1, checkpoint_every=1)
    return out


def test_initial_votes_are_stored_and_used_again_on_resume(tmp_path, voted, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(voted / "run", out)
    stored = read_lines(out / "initial_votes.jsonl")
    assert sorted(record["id"] for record in stored) == list(range(6))
    assert len({record["key"] for record in stored}) == 1
    for record in stored:
        assert 0 <= record["votes"] <= 8
        assert (record["answer"] is None) == (record["votes"] == 0)
    seen, original = [], restrain.prompt_weights

    def prompt_weights(run, args):
        run.sample = None  # nothing is sampled for it
        weights = original(run, args)
        del run.sample
        seen.append(weights)
        return weights

    monkeypatch.setattr(restrain, "prompt_weights", prompt_weights)
    options = dict(dataset=str(voted / "problems.jsonl"), steps=2, checkpoint_every=1)
    run_toy(restrain, out, resume=True, **options)
    # g(votes / n), Eq. 5: exp(-(votes / 8 - 1)^2 / 0.5)
    for record in stored:
        expected = 2.718281828 ** (-((record["votes"] / 8 - 1) ** 2) / 0.5)
        assert seen[0][record["id"]] == pytest.approx(expected, abs=1e-6)
    assert read_lines(out / "initial_votes.jsonl") == stored


def test_initial_votes_go_on_after_a_kill(tmp_path, voted):
    """Stored call by call, in one rename: there is no half-written line."""
    out = tmp_path / "run"
    shutil.copytree(voted / "run", out)
    lines = (out / "initial_votes.jsonl").read_text().splitlines()
    (out / "initial_votes.jsonl").write_text("\n".join(lines[:3]) + "\n")
    run = common.Run(toy_args(restrain, dataset=str(voted / "problems.jsonl"), resume=True, out=str(out)))
    calls, sample = [], run.sample

    def counted(prompts, n, limits=None):
        calls.append([prompt.id for prompt in prompts])
        return sample(prompts, n, limits)

    run.sample = counted
    votes = initial_votes.initial_votes(run, prompts_per_call=2)
    done = {json.loads(line)["id"] for line in lines[:3]}
    assert [len(ids) for ids in calls] == [2, 1]
    assert not done & {i for ids in calls for i in ids}
    for line in lines:  # the same votes as the uninterrupted pass
        record = json.loads(line)
        assert votes[record["id"]] == (record["answer"], record["votes"])


def test_count_votes_by_hand():
    def responses(*answers):
        return [Rollout([1], [2], torch.zeros(1), True, answer=answer) for answer in answers]

    def votes(*answers):
        return initial_votes.count_votes(common.Problem("p"), responses(*answers))

    assert votes("3", "0.5", None, r"\frac{1}{2}", "3", "3.0") == ("3", 3)
    assert votes("7", "8") == ("7", 1)  # a tie: the answer seen first
    assert votes(None, None) == (None, 0)


# ------------------------------------------------ the run's verbs -----------------------------------------
def bare_run(**overrides):
    """A run without model, data or folder: for verbs that only compute."""
    run = object.__new__(common.Run)
    run.args, run.step, run.trained = common.Args(**overrides), 1, []
    return run


def test_a_run_with_few_answers_says_nothing():
    run = bare_run()
    run.read_answer = None
    responses = [SimpleNamespace(answer=a, text=f"so {a}", finished=a == "1", response_ids=[1])
                 for a in (None, "1", None, None)]
    said = run.few_answers(responses)
    assert said.startswith("only 25% of the responses have an answer in \\boxed{}")
    for words in ("--prompt", "--show_prompt", "--max_new_tokens", "75% were cut off", "'so None'"):
        assert words in said
    assert run.few_answers(responses[:2]) == run.few_answers([]) == ""  # half of them; none
    overlong = SimpleNamespace(answer=None, text="", finished=False, response_ids=[])  # no prompt was sent
    assert run.few_answers([overlong]) == ""
    run.read_answer = str  # another task: no box is asked for
    assert "have an answer that read_answer finds." in run.few_answers(responses)


def test_learning_rate_by_hand():
    run, rates = bare_run(lr=1.0, warmup=0.2), []
    run.total_steps = 10
    for run.step in range(1, 11):
        rates.append(run.learning_rate())
    # two warm-up steps 1/2 and 1, then a cosine over the other eight that is 0 at step 11: cos(pi k / 9)
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == pytest.approx(0.5 * (1 + 0.9396926))
    assert rates[5] == pytest.approx(0.5 * (1 + 0.1736482))  # k = 4: cos(80 degrees)
    assert rates[-1] == pytest.approx(0.5 * (1 - 0.9396926), abs=1e-6)
    run.args.warmup, run.step = 0.0, 1  # without warm-up the cosine has one step of full rate before it
    assert run.learning_rate() == 1.0


def test_every_epoch_is_a_new_order_and_no_batch_holds_a_problem_twice():
    run, batches = bare_run(prompts_per_batch=3), []
    run.problems = list("abcdefgh")  # 8 problems: two batches an epoch, two are left over
    for run.step in range(1, 21):
        batches.append(run.next_prompts())
    assert all(len(set(batch)) == 3 for batch in batches)
    epochs = [first + second for first, second in zip(batches[::2], batches[1::2])]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 10
    assert {problem for epoch in epochs for problem in epoch} == set("abcdefgh")
    run.step = 7
    assert run.next_prompts() == batches[6]  # whatever was asked for before
    run.args.seed = 2
    assert run.next_prompts() != batches[6]


def test_subset_is_random_seeded_and_in_order():
    run, prompts = bare_run(), [common.Problem("p", id=i) for i in range(200)]
    drawn = [run.subset(8, 4, prompt) for prompt in prompts]
    for chosen in drawn:
        assert len(set(chosen)) == 4 and set(chosen) <= set(range(8))
        assert chosen == sorted(chosen) and len(chosen) == 4
    for i in range(8):
        share = sum(i in chosen for chosen in drawn) / 200
        assert share == pytest.approx(0.5, abs=0.15)  # 4 standard errors
    assert drawn == [run.subset(8, 4, prompt) for prompt in prompts]
    run.step = 2
    assert drawn != [run.subset(8, 4, prompt) for prompt in prompts]
    assert run.subset(4, 4, prompts[0]) == run.subset(4, 9, prompts[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["mixed", "by_prompt"])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_minibatches_are_a_partition(kind, n):
    run, train = bare_run(minibatches=kind, num_minibatches=n), random_rollouts(12)
    parts = run.minibatches(train)
    assert sorted(sum(parts, []), key=train.index) == train and run.trained == train
    assert [len(part) for part in parts] == [12 // n] * n
    if kind == "by_prompt":
        assert sum(parts, []) == train
    elif n > 1:
        assert sum(parts, []) != train
        run.step = 2
        assert run.minibatches(train) != parts
    run.args.num_minibatches = 50
    assert len(run.minibatches(train)) == 12  # no empty optimizer step
    assert run.minibatches([]) == []


def test_a_sampler_of_other_weights_stops_a_float32_run(tmp_path):
    run = common.Run(toy_args(ttrl, out=str(tmp_path / "run"), kl_coef=0.0))
    said = []
    run.folder.warn = said.append
    responses = random_rollouts(2, shortest=4)
    for r in responses:
        r.old_logp = r.logprobs + 1e-5
    run.check_sampler(responses)
    assert run.logp_diff == pytest.approx(dict(logp_diff_max=1e-5, logp_diff_mean=1e-5), rel=1e-3)
    responses[0].old_logp[2] = -0.01  # one token
    with pytest.raises(UserError, match="the sampler does not run the current policy: .* by up to 0.01"):
        run.check_sampler(responses)
    run.dtype = torch.bfloat16  # rounds: on average 0.05 is a warning, 0.5 the end
    run.check_sampler(responses)
    assert said == []
    for shift, warns in ((0.06, True), (0.6, False)):
        for r in responses:
            r.old_logp = r.logprobs - shift
        if warns:
            run.check_sampler(responses)
            assert said == ["sampler and trainer log-probs differ by 0.060 on average."]
        else:
            with pytest.raises(UserError, match="the sampler does not run the current policy"):
                run.check_sampler(responses)
    run.check_sampler([])  # Dynamic RL without a usable question
    assert run.logp_diff == dict(logp_diff_max=0.0, logp_diff_mean=0.0)


def test_no_sync_begins_with_an_awake_sampler(tmp_path, monkeypatch):
    """vLLM's KV cache and the gathered weights may not fit together, nor it and what restoring takes. Load,
    generate, sleep: at the start, then each step twice, for its rollouts and its evaluation."""
    calls = []

    def spied(letter, method):
        def call(self, *args, **options):
            calls.append(letter)
            return method(self, *args, **options)
        return call

    for name in ("load", "generate", "sleep"):
        monkeypatch.setattr(HFSampler, name, spied(name[0], getattr(HFSampler, name)))
    monkeypatch.setattr(checkpoint, "restore", spied("r", checkpoint.restore))
    few = dict(max_new_tokens=8, eval="toy_test", eval_samples=1, eval_every=1, checkpoint_every=1)
    run_toy(ttrl, tmp_path / "run", steps=2, **few)
    assert re.fullmatch("slg+s(lg+slg+s){2}", "".join(calls)), calls
    calls.clear()
    run_toy(ttrl, tmp_path / "run", steps=3, resume=True, **few)
    assert re.fullmatch("srlg+slg+s", "".join(calls)), calls


def test_seeds_derive_from_step_and_problem_alone(tmp_path):
    run = common.Run(toy_args(ttrl, out=str(tmp_path / "run"), kl_coef=0.0, max_new_tokens=8))
    seen, generate = [], run.sampler.generate

    def spy(requests, temperature, **options):
        seen.extend(requests)
        return generate(requests, temperature, **options)

    run.sampler.generate, run.step = spy, 5
    problems = run.problems[:3]
    both = run.sample(problems, 2, limits=[8, 4, 500])
    assert [r.seed for r in seen] == [seed_of(1, 5, problem.id) for problem in problems]
    # a limit never passes the context that was planned for: 128 prompt tokens + 8 new ones
    assert [r.max_new_tokens for r in seen] == [8, 4, 136 - len(problems[2].prompt_ids)]
    with pytest.raises(ValueError, match="was sampled in this step already"):
        run.sample(problems[1:2], 2)
    with pytest.raises(ValueError, match="shorter|longer"):  # a limit for each prompt
        run.sample(run.problems[3:5], 2, limits=[8])
    run.sampled.clear()
    (alone,) = run.sample(problems[1:2], 2, limits=[4])
    assert [r.response_ids for r in alone] == [r.response_ids for r in both[1]]
    assert all(r.text == run.tokenizer.decode(r.response_ids, skip_special_tokens=True) for r in both[0])


@pytest.mark.parametrize("module", [ttrl, scrl])
def test_gold_answers_reach_the_weights(tmp_path, module):
    """With nonsense as gold answers a run without --labels gold ends with the same weights."""
    rows = read_lines(ROOT / "toy/train.jsonl")[:8]
    for name, change in (("right", {}), ("nonsense", dict(answer="0"))):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row | change) + "\n" for row in rows))
        run_toy(module, tmp_path / name, dataset=str(data))
    assert same_weights(tmp_path / "right", tmp_path / "nonsense")


# ------------------------------------------------ the folder's files --------------------------------------
def no_constants(text):
    raise AssertionError(f"{text} is not JSON")


def test_the_run_folder_describes_itself(whole):
    run = json.loads((whole / "run.json").read_text())
    assert run["args"]["seed"] == 1 and run["script"] == "ttrl"
    assert run["versions"]["torch"] and "git" in run and run["command"]
    assert list((whole / "tensorboard").iterdir())
    for line in (whole / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=no_constants)
    steps = [line["step"] for line in metrics_of(whole)]
    assert steps == list(range(7))
    evaluated = [line["step"] for line in metrics_of(whole) if "eval/toy_test/pass@1" in line]
    assert evaluated == [0, 3, 6]


@pytest.mark.parametrize("module, train_samples", [(ttrl, 4), (scrl, 8), (ettrl, 5)])
def test_samples_are_whole_groups(tmp_path, module, train_samples):
    run_toy(module, tmp_path / "run", steps=2, train_samples=train_samples)
    records = read_lines(tmp_path / "run/samples.jsonl")
    size = 10 if module is ettrl else 8  # 2 trunks x (1 + 2 forks x 2 branches) leaves
    assert [record["step"] for record in records] == [1, 1, 2, 2]  # the first two prompts of every step
    assert len({record["problem"] for record in records}) == 4
    for record in records:
        responses = record["responses"]
        assert len(responses) == size and record["gold"]
        trained = [r for r in responses if r["trained"]]
        assert len(trained) == train_samples
        assert all(r["advantage"] is None for r in responses if not r["trained"])
        assert sum(r["advantage"] for r in trained) == pytest.approx(0, abs=2 if module is ettrl else 1e-4)
        for r in responses:
            same = [other for other in responses if other["answer_class"] == r["answer_class"]]
            assert r["votes"] == (len(same) if r["answer"] is not None else 0)
            assert {other["reward"] for other in same} == {r["reward"]}
            assert r["tokens"] <= 64 and r["finished"] in (True, False)
            if r["answer"] is not None:
                assert r["answer"] in r["text"]
        if module is not scrl:  # the label's answers are rewarded, the others are not
            (label,) = record["label"]
            assert all(r["reward"] == (str(r["answer_class"]) == label) for r in responses)


# --------------------------------------------------- vLLM -------------------------------------------------
def test_resume_with_vllm_repeats_the_rollouts(tmp_path):
    """Seeds reach the engine and derive from (seed, step, problem): it samples what the whole run did."""
    options = {**SMALL, **STEPS, "steps": 4, "eval": "", "sampler": "vllm", "keep": 9}

    def go(out, *more):
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, str(ROOT / "ttrl.py"), *flags, f"--out={out}", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-2000:]

    go(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in (3, 4):  # as if it had been killed in the third
        shutil.rmtree(tmp_path / f"run/checkpoints/step_{step:08d}")
    go(tmp_path / "run", "--resume")
    whole, resumed = (read_lines(tmp_path / name / "samples.jsonl") for name in ("whole", "run"))
    assert len(whole) == 8
    for a, b in zip(whole, resumed, strict=True):
        assert [r["text"] for r in a["responses"]] == [r["text"] for r in b["responses"]]
    for a, b in zip(metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "run"), strict=True):
        assert a["step"] == b["step"] and a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


# ------------------------------------------------ another model -------------------------------------------
def test_another_architecture_on_a_file_of_problems(tmp_path, llama):
    path = tmp_path / "problems.jsonl"
    rows = [{"id": i, "problem": f"Find $x$ if $x + {i} = {3 * i}$.", "answer": str(2 * i)} for i in range(8)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    lines = run_toy(ttrl, tmp_path / "run", model=str(llama), dataset=str(path), max_prompt_tokens=512)
    assert lines[-1]["step"] == 2 and lines[-1]["logp_diff_max"] < 1e-3
