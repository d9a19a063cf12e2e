"""Faults that other trainers are known for: what a checkpoint does to a fresh optimizer, how a run ends and
is named elsewhere, what was not measured, masked tokens, the last save, ranks that differ."""

import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL, make_policy, random_rollouts, read_lines, run_toy
from test_ranks import python
from torch.optim import AdamW

import ttrl
from engine import checkpoint, process
from engine.log import read_metrics

TINY = SMALL | dict(votes=2, train_samples=2, prompts_per_batch=2, max_new_tokens=8, num_minibatches=1)
SHELL = [f"--{name}={value}" for name, value in TINY.items()] + ["--sampler", "hf"]


def shell(script, *flags, ranks=1, **environment):
    """Run a script as from the shell; ranks: under torchrun."""
    return subprocess.run([*python(ranks), str(script), *SHELL, *flags], cwd=ROOT, text=True,
                          env=os.environ | dict(PYTHONPATH=str(ROOT)) | environment, capture_output=True)


# --------------------------------------------- a checkpoint changes nothing -------------------------------
@pytest.mark.parametrize("saves", [1, 3])
def test_a_checkpoint_before_the_first_update_leaves_the_optimizer_as_it_was(saves, tmp_path):
    """After one real update AdamW has counted one step, and the weights are those without a checkpoint."""
    weights = []
    for count in (0, saves):
        policy = make_policy()
        optimizer = AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        for step in range(count):
            checkpoint.save(tmp_path / str(count), step, policy, optimizer, keep=2)
        for number, parameter in enumerate(policy.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (-1) ** number)
        optimizer.step()
        assert {int(state["step"]) for state in optimizer.state.values()} == {1}
        weights.append({name: p.detach().clone() for name, p in policy.model.named_parameters()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_final_save_fails_in_one_sentence(tmp_path, launch, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(make_policy().model), "save_pretrained", full)
    code, _, errors = launch(out=tmp_path / "run", **TINY)
    assert code == 2 and "Traceback" not in errors
    assert f"the final model could not be written to {tmp_path / 'run/final'} (OSError [Errno 28]" in errors


# ------------------------------------------------- Weights & Biases ---------------------------------------
WANDB = """
import atexit, json, os
def note(**what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")
def init(**options):
    note(init=options)
def finish(exit_code=None, quiet=None):
    note(finish=exit_code)
atexit.register(lambda: note(at_exit=True))  # Python's own exit, at which wandb itself ends a run
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_is_closed_and_has_an_identity_of_its_own(ranks, tmp_path):
    """Two runs in folders of one name are two; a resumed one is the same; its arguments are its config."""
    (tmp_path / "wandb.py").write_text(WANDB)
    environment = dict(PYTHONPATH=f"{tmp_path}:{ROOT}", NOTES=str(tmp_path / "notes"))
    for out, more in (("a/exp", []), ("b/exp", []), ("b/exp", ["--resume", "--steps", "3"])):
        flags = ["--wandb", "--out", str(tmp_path / out), "--checkpoint_every", "1", *more]
        done = shell("ttrl.py", *flags, ranks=ranks, **environment)
        assert done.returncode == 0, done.stderr
    notes = read_lines(tmp_path / "notes")
    begun = [note["init"] for note in notes if "init" in note]
    first, second, again = [options["id"] for options in begun]
    assert first != second == again and begun[0]["config"]["votes"] == 2
    assert sum("finish" in note or "at_exit" in note for note in notes) >= 3
    if ranks > 1:  # which end without Python's own exit
        assert [note["finish"] for note in notes if "finish" in note] == [0, 0, 0]


def test_a_run_that_fails_is_closed_as_failed(tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "bad.py").write_text("import common, ttrl\nfrom engine.base import UserError\n"
                                     "def fail(*arguments):\n    raise UserError('so it is')\n"
                                     "common.check_sampler = fail\ncommon.launch(ttrl.main, ttrl.Args)\n")
    environment = dict(PYTHONPATH=f"{tmp_path}:{ROOT}", NOTES=str(tmp_path / "notes"))
    done = shell(tmp_path / "bad.py", "--wandb", "--out", str(tmp_path / "run"), **environment)
    assert done.returncode == 2 and "Error: so it is" in done.stderr
    assert read_lines(tmp_path / "notes")[-1] == dict(finish=2)


# ------------------------------------------- what counts, and what was measured ---------------------------
@pytest.mark.parametrize("kl_coef", [0.0, 0.01])
def test_a_kl_that_was_not_measured_is_not_logged(kl_coef, tmp_path):
    run_toy(ttrl, tmp_path / "run", **TINY | dict(kl_coef=kl_coef))
    for line in read_metrics(tmp_path / "run"):
        assert "grad_norm" not in line or ("kl" in line) == (kl_coef > 0)


@pytest.mark.parametrize("plain", [False, True])
def test_a_token_with_mask_0_counts_in_nothing_whatever_its_log_prob(plain):
    """Its ratio would overflow: inf x 0 is NaN. Loss and gradient are those without it."""
    policy, results = make_policy(plain=plain), []
    for logp in (-1.0, -1000.0, 1000.0, -math.inf):
        response, = random_rollouts(1, longest=20, shortest=20)
        response.mask = torch.tensor([1.0] * 12 + [0.0] * 8)
        policy.score_old([response], 1.0)
        response.ref_logp = response.old_logp.clone()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.01)
        policy.model.zero_grad()
        for own in (response.old_logp, response.ref_logp):
            own[12:] = own[12:] if logp == -1.0 else logp
        micro, = policy.micro_batches([response])
        logp_T, entropy_T = policy.logprobs(micro, 1.0)
        assert logp_T[12:].tolist() == [0.0] * 8
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.div_(1.01)
        results.append(logp_T[:12].detach())
    for result in results[1:]:
        assert torch.allclose(result, results[0], rtol=1e-4)


# --------------------------------------------------- the start --------------------------------------------
def test_ranks_wait_for_each_other_for_hours(monkeypatch):
    given = {}
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *a, **options: given.update(options))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    process.start_processes(dtype="bfloat16")
    assert given["timeout"].total_seconds() >= 3600


@pytest.mark.parametrize("script, name", [("ttrl", "temperature"), ("ttrl", "eval_temperature"),
                                          ("evaluate", "temperature")])
def test_a_temperature_that_vllm_would_raise_is_refused(script, name, launch, monkeypatch):
    monkeypatch.setattr("engine.startup.has_vllm", lambda: True)
    code, _, error = launch(script, sampler="vllm", **{name: 0.005})
    assert code == 2 and "is 0.005, but must be at least 0.01 with vLLM" in error
    assert error.startswith("Error: --") and error.count("\n") == 1


def test_a_schedule_that_jumps_at_a_resume_is_announced(launch, tmp_path):
    launch(out=tmp_path / "run", **TINY | dict(checkpoint_every=1))
    code, output, _ = launch(out=tmp_path / "run", resume=True, steps=4, keep=3)
    assert code == 0
    assert "Resuming with another --steps: 4 (was 2); the learning rate jumps to the new schedule" in output
    assert "Resuming with another --keep: 3 (was 2)\n" in output


def test_help_can_be_piped_into_head():
    done = subprocess.run(f"{sys.executable} ttrl.py --help | head -n 3", cwd=ROOT, shell=True, text=True,
                          capture_output=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr and done.stdout


# --------------------------------------------------- ranks ------------------------------------------------
LEFT_OUT = {"one prompt": "os.environ['RANK'] == '1' and prompt is prompts[-1]",
            "all prompts": "os.environ['RANK'] == '1'"}


@pytest.mark.slow
@pytest.mark.parametrize("left", LEFT_OUT)
def test_ranks_that_train_other_responses_are_told_so_before_they_are_scored(left, tmp_path):
    where = "            trained_G = "
    script = (ROOT / "ttrl.py").read_text().replace("import math\n", "import math\nimport os\n")
    script = script.replace(where, f"            if {LEFT_OUT[left]}:\n                continue\n{where}")
    (tmp_path / "fork.py").write_text(script)
    done = shell(tmp_path / "fork.py", "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 1
    assert "ValueError: the ranks have different responses to score or train: every rank must" in done.stderr


@pytest.mark.slow
def test_two_ranks_print_no_warning_of_torch(tmp_path):
    done = shell("ttrl.py", "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0 and "returned a view tensor" not in done.stderr
