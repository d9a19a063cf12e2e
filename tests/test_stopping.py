"""A run saves before it does anything long, and stops when it is told to: signals and kills in evaluations,
alone and under torchrun."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TIMED, fresh_state, read_lines
from test_ranks import free_port

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


@pytest.fixture
def run(tmp_path):
    """run(*flags, slow=step, ranks=1) -> the process of a run in tmp_path/run, and where it waits."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)

    def begin(*flags, slow=-1, ranks=1, out="run"):
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            launcher += ["--master-port", free_port()]
        environment = os.environ | dict(SLOW=str(slow), PYTHONPATH=str(ROOT))
        command = [*launcher, str(script), *FLAGS, "--out", str(tmp_path / out), *flags]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE,
                                stdout=subprocess.PIPE)

    return begin


def wait_for_evaluation(tmp_path, process, ranks) -> None:
    end = time.monotonic() + 120
    while not all((tmp_path / f"run.evaluating{rank}").exists() for rank in range(ranks)):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.05)


def untimed_lines(folder) -> list[dict]:
    kept = []
    for line in read_lines(folder / "metrics.jsonl"):
        kept.append({name: value for name, value in line.items() if not name.startswith(TIMED)})
    return kept


@pytest.mark.parametrize("step, number, ranks", [
    (0, signal.SIGTERM, 1), (3, signal.SIGINT, 1), (3, signal.SIGKILL, 1), (4, signal.SIGTERM, 1),
    pytest.param(0, signal.SIGTERM, 2, marks=pytest.mark.slow),
    pytest.param(3, signal.SIGTERM, 2, marks=pytest.mark.slow)])
def test_a_run_stopped_in_an_evaluation_has_lost_nothing(step, number, ranks, run, tmp_path):
    """It leaves at once, and continues from the step whose evaluation it was, as if it had never stopped."""
    process = run(slow=step, ranks=ranks)
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

    for flags, out in ((["--resume"], "run"), ([], "whole")):
        ended = run(*flags, ranks=ranks, out=out)
        _, errors = ended.communicate(timeout=200)
        assert ended.returncode == 0, errors
    assert untimed_lines(tmp_path / "run") == untimed_lines(tmp_path / "whole")
    for name in ("evaluations.jsonl", "votes.jsonl"):
        assert read_lines(tmp_path / "run" / name) == read_lines(tmp_path / "whole" / name)
    ours, theirs = fresh_state(tmp_path / "run/final"), fresh_state(tmp_path / "whole/final")
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_without_checkpoints_an_evaluation_ends_before_the_run_stops(run, tmp_path):
    """Its steps are not saved, so a signal waits for the end of the next step, which is then saved."""
    process = run("--checkpoint_every", "0", "--eval_every", "1", slow=1)
    wait_for_evaluation(tmp_path, process, 1)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.kill()
    process.communicate()
