"""The quick tests see a wrong sign, clip or mean: one line of a copy of the scripts is changed at a time."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

MUTANTS = [  # script, a piece of one of its lines, what it becomes
    ("ttrl", "optimizer.zero_grad()", "optimizer.zero_grad()"),  # the copy itself is green
    ("ttrl", "pg_T = -torch.min(", "pg_T = torch.min("),
    ("ttrl", "pg_T = -torch.min(", "pg_T = -torch.max("),
    ("ttrl", "(1 - args.clip_low, 1 + args.clip_high)", "(1 - args.clip_high, 1 + args.clip_low)"),
    ("ttrl", "micro.mask_T / (micro.length_T * len(minibatch))", "micro.mask_T / minibatch_tokens"),
    ("ttrl", "args.entropy_coef * entropy_T", "args.kl_coef * entropy_T"),
    ("ttrl", "(rewards.std() + eps)", "(rewards.std() + 1)"),
    ("evol_rl", "others.max(1)", "others.min(1)"),
    ("scrl", "- lambda_h * (entropy - average)", "+ lambda_h * (entropy - average)"),
    ("restrain", "a_minus * torch.max(ratio, clipped)", "a_minus * torch.min(ratio, clipped)"),
    ("ettrl", "(average - entropies) / average", "(entropies - average) / average"),
    ("dynamic_rl", "len(minibatch) - n_questions", "len(minibatch) + n_questions")]


@pytest.mark.slow
@pytest.mark.parametrize("script, old, new", MUTANTS)
def test_a_changed_line_is_seen(script, old, new, tmp_path):
    for name in ("engine", "tests", "toy"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    text = (ROOT / f"{script}.py").read_text()
    assert text.count(old) == 1, f"change it here, too: {old}"
    (tmp_path / f"{script}.py").write_text(text.replace(old, new))
    nodes = [f"{script}.py", f"tests/test_scripts.py::test_gradient_is_the_printed_objectives[{script}]"]
    command = [sys.executable, "-m", "pytest", "-x", "-m", "quick", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == (old != new), done.stdout[-3000:] + done.stderr[-3000:]
