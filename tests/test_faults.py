"""What goes wrong, by promise: kills, signals, damaged checkpoints, folders and models that are not what they
should be, and how a run ends."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, SMALL, as_if_killed, fresh_state, make_policy, read_lines, run_toy
from conftest import signal_handlers_kept, untimed
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import common
import ttrl
from engine import checkpoint
from engine.base import UserError
from engine.models import model_folder
from engine.process import StopSignal

STEPS = dict(steps=6, checkpoint_every=1, votes=4, train_samples=4, max_new_tokens=48, eval="toy",
             eval_every=3, eval_samples=1, eval_greedy=False)
TINY = SMALL | dict(votes=2, train_samples=2, prompts_per_batch=2, max_new_tokens=8, num_minibatches=1)
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


# ------------------------------------------- runs in a process of their own --------------------------------
def run_quietly(out, waits, overrides):
    """A whole run in this process, which is a fork of the test's: starting one costs no imports.
    The evaluation of step `waits` first waits for a minute: long enough to be stopped in it."""
    def slow(run, step, evaluate=common.evaluate):
        if step == waits:
            with run.stop.at_once(step):
                out.with_suffix(".evaluating").touch()
                time.sleep(60)
        evaluate(run, step)

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(out.with_suffix(".err"), os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    sys.argv, sys.stdout, sys.stderr = ["ttrl.py"], os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    common.evaluate = slow
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


def start(out, waits=-1, **overrides):
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=run_quietly, args=(out, waits, {**STEPS, **overrides}))
    process.start()
    return process


def finish(out, code=0, **overrides) -> str:
    """A run that ends with this exit code, and what it wrote to stderr."""
    process = start(out, **overrides)
    process.join(300)
    errors = out.with_suffix(".err").read_text()
    assert process.exitcode == code, errors
    return errors


def wait_for(condition, process) -> bool:
    """Until it holds, or the process has ended; whether it holds."""
    end = time.monotonic() + 300
    while not condition() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.0005)
    return bool(condition())


def metrics_of(out):
    """The lines as they are: one that stands twice is seen."""
    return untimed(read_lines(out / "metrics.jsonl"))


def assert_same_runs(out, whole):
    """No gap, no step or vote twice, every value the same."""
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "votes.jsonl"):
        assert untimed(read_lines(out / name)) == untimed(read_lines(whole / name))
    assert_equal(fresh_state(out / "final"), fresh_state(whole / "final"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    finish(out, keep_checkpoints=9)
    return out


# --------------------------------------------- kills and signals ------------------------------------------
@pytest.mark.parametrize("kills", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_bitwise_the_same(kills, tmp_path, whole):
    """kill -9 in the middle of steps, evaluations and checkpoints; every resume goes on exactly."""
    out, rng, caught_writing, resumed = tmp_path / "run", random.Random(0), 0, 0
    for kill in range(kills):
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
    assert caught_writing >= kills // 6 and resumed >= kills // 2
    assert_same_runs(out, whole)
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize("step, number", [(0, signal.SIGINT), (3, signal.SIGKILL), (6, signal.SIGTERM)])
def test_a_run_stopped_in_an_evaluation_has_lost_nothing(step, number, whole, tmp_path):
    """It leaves at once, and continues from the step whose evaluation it was, as if it had never stopped."""
    out = tmp_path / "run"
    process = start(out, waits=step, checkpoint_every=5)  # so step 3 is saved because it is evaluated
    assert wait_for(out.with_suffix(".evaluating").exists, process)
    os.kill(process.pid, number)
    process.join(50)  # the evaluation waits for 60 seconds
    assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
    saved = sorted(path.name for path in out.glob("checkpoints/step_*"))
    assert saved[-1:] == [f"step_{step:08d}"] * (step > 0)
    assert (out / "final").exists() == (step == 6)
    finish(out, resume=True)
    assert_same_runs(out, whole)


def test_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path, whole):
    out = tmp_path / "run"
    process = start(out, checkpoint_every=0)
    assert wait_for(lambda: (out / "metrics.jsonl").exists() and len(metrics_of(out)) >= 3, process)
    for _ in range(2):  # Slurm's, and the one that torchrun passes on
        os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.01)
    process.join(60)
    assert process.exitcode == 128 + signal.SIGHUP
    done = metrics_of(out)[-1]["step"]
    assert [p.name for p in (out / "checkpoints").iterdir()] == [f"step_{done:08d}"]
    finish(out, resume=True, checkpoint_every=0)
    assert_same_runs(out, whole)


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path):
    with signal_handlers_kept():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        StopSignal(tmp_path, 0).listen()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN != signal.getsignal(signal.SIGTERM)


# ------------------------------------------- checkpoints that are not whole --------------------------------
@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, whole):
    """A run that was killed after the checkpoint of step 4, while it wrote a line."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    as_if_killed(whole, out, 4)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step":7,"reward":1.0}\n{"st')
    return out


@pytest.mark.parametrize("fault", ["cut short", "lacks a file"])
def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_is_used(
        fault, tmp_path, interrupted, whole):
    out = tmp_path / "run"
    shutil.copytree(interrupted, out)
    newest = out / "checkpoints/step_00000004"
    shutil.copytree(newest, newest.with_suffix(".partial"))  # of a killed run: it goes, with no word
    victim = max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    if fault == "cut short":
        victim.write_bytes(victim.read_bytes()[:-1000])
    else:  # torch would load what the other files have
        victim.unlink()
    kept = (out / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="the newest checkpoint .*step_00000004"):
        run_toy(ttrl, out, **STEPS, resume=True)
    assert (out / "metrics.jsonl").read_text() == kept
    shutil.rmtree(newest)
    run_toy(ttrl, out, **STEPS, resume=True)
    assert_same_runs(out, whole)


@pytest.mark.parametrize("lost", ["metrics.jsonl", "final"])
def test_progress_without_a_checkpoint_is_kept(lost, tmp_path, whole):
    """A resume would begin anew and drop the lines."""
    out = tmp_path / "run"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints", lost))
    with pytest.raises(UserError, match="has no checkpoint"):
        run_toy(ttrl, out, **STEPS, resume=True)


def test_another_runs_checkpoint_is_refused_and_another_code_is_told(tmp_path, interrupted, capsys):
    out = tmp_path / "run"
    shutil.copytree(interrupted, out)
    run = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(run | dict(id="another", code=1)))
    with pytest.raises(UserError, match="not what this run wrote"):
        run_toy(ttrl, out, **STEPS, resume=True)
    assert "this is other code" in capsys.readouterr().out


def test_a_run_that_goes_on_has_no_final_model(tmp_path, whole):
    """What it was before, which evaluate.py would take for the run's, is named by its step."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    with pytest.raises(UserError, match="is of step 6"):
        run_toy(ttrl, out, **STEPS | dict(steps=5, resume=True))
    with mock.patch("common.sample", side_effect=RuntimeError), pytest.raises(RuntimeError):
        run_toy(ttrl, out, **STEPS | dict(steps=7, resume=True))
    with pytest.raises(UserError, match="has not ended"):
        model_folder(str(out))
    assert_equal(fresh_state(out / "final_step_6"), fresh_state(whole / "final"))


def test_a_checkpoint_before_the_first_update_leaves_the_optimizer_as_it_was(tmp_path):
    """Else AdamW would correct its averages for one step too many."""
    policy = make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    checkpoint.save(tmp_path, 1, policy, optimizer, keep=2)
    assert not any(state["step"] for state in optimizer.state.values())


# ---------------------------------------- folders that are not the run's -----------------------------------
@pytest.mark.parametrize("script, flags, names", [
    ("ttrl", TINY, ["run.json", "votes.jsonl"]), ("evaluate", dict(samples=1), ["results.json"])])
def test_somebodys_own_file_is_not_written_over(tmp_path, launch, script, flags, names):
    for name in names:
        (tmp_path / name).write_text("mine")
    code, _, errors = launch(script, out=tmp_path, **flags)
    assert code == 2 and "which is not empty" in errors
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(names, "mine")


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
    ("model/model.safetensors", "the weights of --model"), ("data.jsonl", "the data of --dataset"),
    ("model/generation_config.json", "the stop tokens of --model")])
def test_a_run_with_other_content_under_the_same_names_is_refused(
        tmp_path, monkeypatch, first_step, file, sentence):
    shutil.copytree(first_step, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if file.endswith(".safetensors"):
        weights = load_file(file)
        weights["model.norm.weight"] += 0.1
        save_file(weights, file, metadata={"format": "pt"})
    else:
        text = Path(file).read_text().replace('"answer": "', '"answer": "1', 1)
        Path(file).write_text(text.replace('"eos_token_id": 2', '"eos_token_id": [2, 7]'))
    before = Path("run/run.json").read_bytes()
    with pytest.raises(UserError, match=sentence):
        run_toy(ttrl, **CONTENT, steps=2, lr=1e-9, resume=True)
    assert Path("run/run.json").read_bytes() == before  # so it is refused again


def test_two_runs_in_one_folder_the_second_is_refused(tmp_path):
    """Also with --resume; the first goes on undisturbed. After its death, whatever it died of, it is free."""
    out = tmp_path / "run"
    first = start(out, steps=500, eval="", checkpoint_every=500)
    assert wait_for((out / "metrics.jsonl").exists, first)
    with pytest.raises(UserError, match="another process is running"):
        run_toy(ttrl, out, resume=True)
    before = len(metrics_of(out))
    assert wait_for(lambda: len(metrics_of(out)) > before, first)
    first.kill()
    first.join()
    assert run_toy(ttrl, out, resume=True, steps=1, checkpoint_every=500)[-1]["step"] == 1


def test_a_strangers_folder_runs_no_code(tmp_path, launch, interrupted):
    """Neither the flag nor the code of a stranger's run.json acts, unless trust is given again."""
    out, executed = tmp_path / "run", tmp_path / "executed"
    model = copy_of_the_toy(tmp_path / "model", CONFIG, dict(
        model_type="other", auto_map={"AutoConfig": "other.Config", "AutoModelForCausalLM": "other.Model"}))
    (model / "other.py").write_text(f"open({str(executed)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    shutil.copytree(interrupted, out)
    run = json.loads((out / "run.json").read_text())
    run["args"] |= dict(model=str(model), trust_remote_code=True)
    (out / "run.json").write_text(json.dumps(run))
    code, _, errors = launch(resume=True, out=out)
    assert code == 2 and not executed.exists()
    assert "contains custom code" in errors
    launch(resume=True, out=out, trust_remote_code=True)
    assert executed.exists()  # it would have


# ---------------------------------------------------- models -----------------------------------------------
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def copy_of_the_toy(folder, file, change):
    """The toy with one file changed: fields of JSON, or a function of its tensors."""
    folder.mkdir()
    for name in (CONFIG, WEIGHTS, "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        shutil.copy(ROOT / "toy" / name, folder)
    path = folder / file
    if isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    else:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


BAD_MODELS = {
    "a tensor is missing": (WEIGHTS, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
                            "1 of its weights are missing"),
    "left over": (WEIGHTS, lambda tensors: tensors.update({"score.weight": torch.ones(96)}),
                  "does not use 1 of its weights"),
    "NaN": (WEIGHTS, lambda tensors: tensors["model.norm.weight"][0].fill_(torch.nan),
            "tokens have the probability NaN")}


@pytest.mark.parametrize("fault", BAD_MODELS)
def test_a_bad_model_is_one_sentence(tmp_path, launch, fault):
    file, change, words = BAD_MODELS[fault]
    model = copy_of_the_toy(tmp_path / "model", file, change)
    flags = TINY | dict(dataset="toy", sampler="hf", max_prompt_tokens=128)
    code, _, errors = launch(model=model, out=tmp_path / "run", **flags)
    assert code == 2 and "Traceback" not in errors
    assert words in errors[errors.index("Error: "):]


# --------------------------------------------- the folder, and how a run ends ------------------------------
def test_wandb_knows_a_resumed_run_again(tmp_path, launch, monkeypatch):
    """Two runs in folders of one name are two."""
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for out, more in (("a/exp", {}), ("b/exp", {}), ("b/exp", dict(resume=True, steps=3))):
        assert launch(**TINY | dict(wandb=True, out=tmp_path / out, checkpoint_every=1) | more)[0] == 0
    first, second, again = [call.kwargs["id"] for call in wandb.init.call_args_list]
    assert first != second == again


@pytest.mark.parametrize("script, flags", [
    ("ttrl", TINY), ("evaluate", dict(samples=1, max_new_tokens=8, benchmarks="toy"))])
def test_responses_without_answers_are_told_once(script, flags, tmp_path, launch):
    _, output, _ = launch(script, out=tmp_path / "run", **flags)
    assert output.count("0% of the responses have an answer") == 1
    assert "100% were cut off" in output and "One ends: '" in output


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, whole, monkeypatch):
    out, save = tmp_path / "run", checkpoint.dcp.save

    def full(*arguments, **options):
        if (out / "checkpoints/step_00000005").exists():
            raise OSError(28, "No space left on device")
        return save(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.dcp, "save", full)
        errors = finish(out, code=2)
    assert f"the checkpoint of step 6 could not be written to {out}/checkpoints (" in errors
    assert "No space left" in errors and "Traceback" not in errors
    finish(out, resume=True)
    assert_same_runs(out, whole)
