"""docs/fork.md, followed: every diff is applied to ttrl.py, and the command behind it shows what it says."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import test_fork_template as template
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


# ------------------------------------------------ a fork's own test ---------------------------------------
VOTE = "            log.vote(prompt, responses, classes_N, rewards_N, label=common.majority(classes_N))\n"
SKIP = "            if rewards_N.mean() < {} * (1 - step / run.total_steps):\n                continue\n"
FORKS = [  # changed lines of ttrl.py; the least share of the majority that is trained: this, then ever less
    (VOTE, VOTE + SKIP.format(.6), .6, "right"),
    (VOTE, VOTE + SKIP.format(1.3), 1.3, "right"),  # the first step trains nothing
    (VOTE, VOTE + SKIP.format(.6).replace("1 - step", "step"), .6, "is trained: "),
    (VOTE, SKIP.format(.6) + VOTE, .6, r"assert \[\d"),  # other problems vote
    ("rewards_N[trained_G]", "rewards_N[:len(trained_G)]", 0, "approx"),
    ("= group_advantages(", "= -group_advantages(", 0, "approx"),
    ("(logp_T - micro.old_logp_T)", "(micro.old_logp_T - logp_T)", 0, "sign of the loss")]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FORKS)))
def test_a_forks_test_tells_a_wrong_fork_from_a_right_one(number, tmp_path, monkeypatch):
    old, new, least, verdict = FORKS[number]
    (tmp_path / f"fork{number}.py").write_text((ROOT / "ttrl.py").read_text().replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)

    def expected(vote, trained, others, earlier):
        winners = [float(c is not None and c == common.majority(vote.classes)) for c in vote.classes]
        if sum(winners) / 8 < least * (1 - vote.step / 5):
            return winners, None
        own = [winners[i] for i in trained]
        spread = template.stdev(own) + 1e-6
        return winners, [(winner - template.mean(own)) / spread for winner in own]

    monkeypatch.setattr(template, "fork", importlib.import_module(f"fork{number}"))
    monkeypatch.setattr(template, "expected", expected)
    monkeypatch.delitem(template.SHORT, "entropy_high")
    run = template.watched(tmp_path)
    tests = [test for name, test in vars(template).items() if name.startswith("test_")]
    if verdict != "right":
        with pytest.raises(AssertionError, match=verdict):
            tests[0](run)
        return
    tests[0](run)
    for test in tests[1:]:
        test(run, tmp_path)
