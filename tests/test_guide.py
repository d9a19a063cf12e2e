"""docs/fork.md, followed: every diff is applied to ttrl.py, and the command behind it shows what it says."""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections import defaultdict
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


def printed(line: str, folder) -> dict[str, list]:
    """What a command of the guide prints, {"name": its values}; and texts."""
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60)
    found = defaultdict(list)
    for words in ("Verify: .*", "Think twice"):
        found[words.partition(":")[0]] = re.findall(words, done.stdout)
    for name, value in re.findall(r'"(\w+)":([-\d.e]+)', done.stdout):
        found[name].append(float(value))
    return found


WORKS = [  # what the page says that a command shows, of what it prints; in the order of the page
    lambda found: found["reward"] and all(map(float.__lt__, found["reward"], found["majority_ratio"])),
    lambda found: found["reward"] and all(map(float.__gt__, found["reward"], found["majority_ratio"])),
    lambda found: found["sure"] and 0 < min(found["sure"]) <= max(found["sure"]) < 1,
    lambda found: found["Verify"] and max(found["logp_diff_max"]) < 1e-3,
    lambda found: found["Think twice"],
    lambda found: set(found["zero_variance"]) == {1},
    lambda found: set(found["answered"]) == {1},
    lambda found: found["unclear_so_far"] and 0 < found["unclear_so_far"][1] < found["unclear_so_far"][3]]


@pytest.mark.parametrize("number", range(len(WORKS)))
def test_the_guide_was_followed(number, tmp_path, monkeypatch):
    assert len(STEPS) == len(WORKS) == GUIDE.count("```diff") == GUIDE.count("It works if")
    works, (diff, commands) = WORKS[number], STEPS[number]
    monkeypatch.chdir(tmp_path)
    Path("toy").symlink_to(ROOT / "toy")
    Path("my_idea.py").write_text(applied(diff, (ROOT / "ttrl.py").read_text()))
    spec = importlib.util.spec_from_file_location("my_idea", tmp_path / "my_idea.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_idea", module)  # dataclasses look it up
    spec.loader.exec_module(module)
    *before, last = commands.splitlines()
    for line in before:
        if line.startswith("python my_idea.py "):
            monkeypatch.setattr(sys, "argv", shlex.split(line)[1:])
            run_toy(module, **options_dict(parse(module.Args, common.TOY | TINY)))
        else:
            printed(line, tmp_path)
    assert works(printed(last, tmp_path)), last
