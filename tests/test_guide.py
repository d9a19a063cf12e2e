"""docs/fork.md, followed: every diff is applied to ttrl.py, and the command behind it shows what it says."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, run_toy

import common
from engine.options import options_dict, parse

GUIDE = (ROOT / "docs/fork.md").read_text()
# a diff, and the first commands behind it
STEPS = re.findall(r"^```diff\n(.*?)^```.*?^```bash\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
TINY = SMALL | dict(votes=4, train_samples=4, max_new_tokens=48, checkpoint_every=10)


def applied(diff: str, text: str) -> str:
    """The text with every hunk's old lines replaced by its new ones; each must be there exactly once."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_the_guide_was_followed(number, tmp_path, monkeypatch):
    """What a step's last command prints is what its page reads."""
    diff, commands = STEPS[number]
    monkeypatch.chdir(tmp_path)
    Path("toy").symlink_to(ROOT / "toy")
    Path("my_idea.py").write_text(applied(diff, (ROOT / "ttrl.py").read_text()))
    spec = importlib.util.spec_from_file_location("my_idea", tmp_path / "my_idea.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_idea", module)  # dataclasses look it up
    spec.loader.exec_module(module)
    for line in commands.splitlines():
        if line.startswith("python my_idea.py "):
            monkeypatch.setattr(sys, "argv", shlex.split(line)[1:])
            run_toy(module, **options_dict(parse(module.Args, common.TOY | TINY)))
        else:
            printed = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60).stdout
    assert printed, line
