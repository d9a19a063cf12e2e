"""tools/gpu_smoke.py without a GPU: what can run passes, what needs CUDA is not run, a failure is seen."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from tools import gpu_smoke

NEEDS_CUDA = ["memory as planned, MFU", "sleep and wake", "--offload optimizer", "vLLM on two GPUs"]


@pytest.mark.slow
def test_it_runs_on_a_cpu():
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-m", "tools.gpu_smoke"], cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[1] == lines[-1] == "```"
    verdicts = [line for line in lines if line.startswith(gpu_smoke.VERDICTS)]
    assert [line[9:47].strip() for line in verdicts if line.startswith("NOT RUN")] == NEEDS_CUDA
    assert len(verdicts) == 15
    assert "11 PASS, 0 FAIL, 4 NOT RUN" in lines[-2]


def test_a_part_that_dies_is_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(gpu_smoke, "lines", [])
    code = "print('PASS     one'); raise ValueError('no such kernel')"
    assert not gpu_smoke.call([sys.executable, "-c", code], "two")
    assert capsys.readouterr().out.splitlines() == gpu_smoke.lines
    first, second = gpu_smoke.lines
    assert first == "PASS     one"
    assert second.startswith("FAIL     two ")
    assert second.endswith("ValueError: no such kernel")


def test_memory_is_shown_beside_the_plan():
    step = {"measured_gib/update": 30.04, "planned_gib/update": 31.8, "measured_gib/embedding": 9.0, "lr": 1}
    assert gpu_smoke.memory(step) == (
        "; GiB of update 30.0 (planned 31.8); GiB of embedding 9.0 (planned nan)")
    assert gpu_smoke.memory({"lr": 1}) == ""


def test_what_an_issue_must_say():
    text = gpu_smoke.machine()
    assert "torch 2." in text
    assert "GPUs (name, driver, memory): " in text
