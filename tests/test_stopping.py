"""A run saves before it does anything long, and stops when it is told to: signals and kills in evaluations,
alone and under torchrun."""

import functools
import os
import signal
import subprocess
import time

import pytest
from conftest import ROOT, fresh_state, read_lines, untimed
from test_ranks import python

FLAGS = ("--steps 4 --votes 4 --train_samples 4 --prompts_per_batch 4 --num_minibatches 1 --sampler hf "
         "--max_new_tokens 24 --eval toy_test --eval_samples 1 --eval_every 3").split()
# ttrl.py whose evaluation of one step first waits for a minute: long enough to be stopped in it.
SLOW = """
import os, pathlib, time
import common, ttrl

original = common.evaluate

def slow(run, step):
    if step == int(os.environ["SLOW"]):
        with run.stop.at_once(step):
            pathlib.Path(str(run.log.path) + f".evaluating{os.environ.get('RANK', 0)}").touch()
            time.sleep(60)
    original(run, step)

common.evaluate = slow
if __name__ == "__main__":
    common.launch(ttrl.main, ttrl.Args)
"""


def begin(folder, *flags, slow=-1, ranks=1):
    """The process of a run in folder/run whose evaluation of step `slow` waits."""
    (folder / "slow.py").write_text(SLOW)
    environment = os.environ | dict(SLOW=str(slow), PYTHONPATH=str(ROOT))
    command = [*python(ranks), "slow.py", *FLAGS, "--out", str(folder / "run"), *flags]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE)


def finish(folder, *flags, ranks=1):
    """The folder of the run, which has ended well."""
    process = begin(folder, *flags, ranks=ranks)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(ranks): the folder of the run that nobody stops."""
    return functools.cache(lambda ranks: finish(tmp_path_factory.mktemp("whole"), ranks=ranks))


def wait_for_evaluation(tmp_path, process, ranks) -> None:
    end = time.monotonic() + 120
    while not all((tmp_path / f"run.evaluating{rank}").exists() for rank in range(ranks)):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.05)


@pytest.mark.parametrize("step, number, ranks", [
    (0, signal.SIGTERM, 1), (3, signal.SIGINT, 1), (3, signal.SIGKILL, 1), (4, signal.SIGTERM, 1),
    pytest.param(0, signal.SIGTERM, 2, marks=pytest.mark.slow),
    pytest.param(3, signal.SIGTERM, 2, marks=pytest.mark.slow)])
def test_a_run_stopped_in_an_evaluation_has_lost_nothing(step, number, ranks, whole, tmp_path):
    """It leaves at once, and continues from the step whose evaluation it was, as if it had never stopped."""
    process = begin(tmp_path, slow=step, ranks=ranks)
    wait_for_evaluation(tmp_path, process, ranks)
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=50)  # the evaluation waits for 60 seconds
    assert time.monotonic() - began < 50
    if ranks == 1:
        assert process.returncode == (128 + number if number != signal.SIGKILL else -number)
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*"))
    assert saved[-1:] == ([f"step_{step:08d}"] if step else [])
    assert (number == signal.SIGKILL) or f"Stopped by {signal.Signals(number).name}; continue with" in errors
    assert (tmp_path / "run/final").exists() == (step == 4)

    resumed, expected = finish(tmp_path, "--resume", ranks=ranks), whole(ranks)
    for name in ("metrics.jsonl", "evaluations.jsonl", "votes.jsonl"):
        assert untimed(read_lines(resumed / name)) == untimed(read_lines(expected / name))
    ours, theirs = fresh_state(resumed / "final"), fresh_state(expected / "final")
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_without_checkpoints_an_evaluation_ends_before_the_run_stops(tmp_path):
    """Its steps are not saved, so a signal waits for the end of the next step, which is then saved."""
    process = begin(tmp_path, "--checkpoint_every", "0", "--eval_every", "1", slow=1)
    wait_for_evaluation(tmp_path, process, 1)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.kill()
    process.communicate()
