"""What forks hang on to: masks, another task, state, own sampling, and
the sentences for what a script hands over wrongly. All through the real main() of ttrl.py."""

import functools
import math
import os
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, SMALL, read_lines, run_toy, spy
from test_ranks import python
from equations import gradient_is_the_objectives

import common
import evaluate
import ttrl
from common import Problem

TINY = dict(steps=1, prompts_per_batch=2, votes=4, train_samples=4, max_new_tokens=12, num_minibatches=1)


# ------------------------------------------------- (a) masked tokens --------------------------------------
def mask_some(run) -> None:
    """Every third token was a tool's, of which the sampler has no log-probs."""
    def mask(groups, run, step, prompts, n):
        for response in sum(groups, []):
            response.mask = torch.tensor([float(t % 3 != 1) for t in range(len(response.response_ids))])
            response.sampler_logp = response.sampler_logp.where(response.mask > 0, math.nan)

    spy(common, "sample", after=mask)


@pytest.mark.parametrize("flags", [{}, dict(loss_aggregation="token-mean", num_minibatches=1)])
def test_masked_tokens_are_in_no_loss_and_no_metric(flags, watch):
    seen = watch("ttrl", meddle=mask_some, **flags)
    gradient_is_the_objectives(seen)
    lengths = []
    for group in seen.groups:
        for response in group.responses:
            lengths.append(sum(t % 3 != 1 for t in range(len(response.response_ids))))
            for logp in (response.old_logp, response.ref_logp):  # of a trained one; else a ratio could be inf
                assert logp is None or not logp[response.mask == 0].any()
    assert seen.metrics[-1]["length"] == pytest.approx(sum(lengths) / len(lengths))
    assert seen.metrics[-1]["logp_diff_max"] < 1e-3  # else the sampler check had stopped the run


def test_a_forks_statistics_leave_masked_tokens_out(watch):
    """They are in no entropy that RENT rewards."""
    for group in watch("rent", meddle=mask_some).groups:
        expected = [-float(r.entropy[r.mask.bool()].mean()) for r in group.responses]
        assert group.rewards == pytest.approx(expected, abs=1e-6)


# --------------------------------------- (b) another notion of the same answer ----------------------------
def last_digit(text: str, problem: Problem) -> str | None:
    digits = [s for s in text if s.isdigit()]
    return digits[-1] if digits else None


def parity(answers: list[str]) -> list[int]:
    return [int(answer[-1]) % 2 for answer in answers]


def test_votes_metrics_and_evaluation_share_one_equality(tmp_path, monkeypatch):
    """Odd equals odd: three of four responses are right (three of ten as numbers); two answers are left."""
    class Parity(Problem):
        keys = staticmethod(parity)

        def read(self, text, end_of_prompt=""):
            return last_digit(text, self)

    task = dict(problem=Parity)
    monkeypatch.setattr(common, "start", functools.partial(common.start, **task))
    data = tmp_path / "few.jsonl"
    data.write_text("".join((ROOT / "toy/train.jsonl").open().readlines()[:64]))
    lines = run_toy(ttrl, tmp_path / "run", steps=1, dataset=str(data), eval="train", eval_samples=2)
    for record in read_lines(tmp_path / "run/samples.jsonl"):
        odd = [response["answer"] and int(response["answer"]) % 2 for response in record["responses"]]
        votes = [value for value in odd if value is not None]
        label = max(votes, key=votes.count)
        assert [response["reward"] for response in record["responses"]] == [value == label for value in odd]
    assert all(line["eval/train/pass@1"] > 0.6 for line in lines)
    assert lines[1]["distinct_answers"] <= 2 < lines[1]["distinct"] * 8 and lines[1]["batch_pass@1"] > 0.55

    monkeypatch.undo()
    settings = dict(evaluate.TOY, benchmarks=str(data), samples=2, out=str(tmp_path / "eval"))
    (row,) = evaluate.main(evaluate.Args(**settings), **task).values()
    assert row["pass@1"] > 0.6


# ------------------------------------------------ own sampling -------------------------------------------
def test_evaluation_samples_as_the_fork_does(tmp_path, monkeypatch):
    seen = []

    def own(run, work, temperature, **options):
        seen.append("evaluation" if "top_p" in options else "training")
        return common.generate(run, work, temperature, **options)

    monkeypatch.setattr(common, "start", functools.partial(common.start, generate=own))
    run_toy(ttrl, tmp_path / "own", **SMALL | TINY | dict(eval="toy", eval_samples=1, eval_greedy=False))
    assert seen == ["evaluation", "training", "evaluation"]


# ------------------------------------------- what a fork hands over ---------------------------------------
start, sample = common.start, common.sample


def long(prompt):
    return replace(prompt, prompt_ids=prompt.prompt_ids * 99)


def number_in_state(args, **task):
    run = start(args, **task)
    run.state[1] = 2
    return run


WRONG = [  # what a fork replaces, by what, and the sentence
    (ttrl, "group_advantages", lambda rewards: rewards * math.nan,
     "a response has the advantage nan"),
    (common, "sample", lambda run, step, prompts, n: sample(run, step, [prompts[0], *prompts[:-1]], n),
     "was sampled in this step already"),
    (common, "sample", lambda run, step, prompts, n: sample(run, step, [long(p) for p in prompts], n),
     "leaves no room for a response"),
    (common, "start", number_in_state, "must hold what JSON keeps")]


@pytest.mark.parametrize("module, name, function, sentence", WRONG, ids=[row[3][:40] for row in WRONG])
def test_a_forks_mistake_ends_in_a_sentence(module, name, function, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(module, name, function)
    with pytest.raises((ValueError, TypeError), match=sentence):
        run_toy(ttrl, tmp_path / "run", **SMALL | TINY)


def test_what_a_fork_holds_of_its_state_goes_on(tmp_path, monkeypatch):
    held = []

    def keep(args, **task):
        run = start(args, **task)
        held.append(run.state)
        return run

    def count(run, *rest):
        held[-1]["calls"] = held[-1].get("calls", 0) + 1
        return sample(run, *rest)

    monkeypatch.setattr(common, "start", keep)
    monkeypatch.setattr(common, "sample", count)
    for steps in 1, 2:
        run_toy(ttrl, tmp_path, **SMALL | TINY | dict(steps=steps, resume=steps > 1, checkpoint_every=1))
    assert held == [{"calls": 1}, {"calls": 2}]


SLIPS = [  # a piece of ttrl.py's loop, what a fork makes of it, and the end of the run
    ("(ratio_T * micro", "(ratio_T[:, None] * micro", "loss must have one value"),
    ("(logp_T - micro", "(logp_T.detach() - micro", "the loss is not 0, but its gradient is"),
    ("loss.backward()", "(loss * math.nan).backward()", "all 2 optimizer steps were skipped"),
    ("majority_reward(classes_N)", "majority_reward(classes_N)[:, None]", "there must be 8 classes"),
    ("majority_reward(classes_N)", "majority_reward(classes_N) / 0", "finite rewards"),
    ("advantage = advantage", "advantage = advantages_G", "a response has the advantage tensor"),
    ("d_T = micro.ref_logp_T - logp_T", "d_T = micro.ref_logp_T.sum() - logp_T.sum()", "kl must have one")]


def run_slip(old, new, folder, steps=1):
    """A run of ttrl.py with one piece of its text changed."""
    text = (ROOT / "ttrl.py").read_text()
    assert text.count(old) == 1
    slip = types.ModuleType("ttrl")
    sys.modules["slip"], slip.__file__ = slip, ttrl.__file__
    exec(compile(text.replace(old, new), "slip.py", "exec"), vars(slip))
    run_toy(slip, folder, **SMALL | dict(steps=steps))


@pytest.mark.parametrize("old, new, sentence", SLIPS)
def test_a_slip_in_the_loop_does_not_train_on(old, new, sentence, tmp_path):
    with pytest.raises((ValueError, TypeError, RuntimeError, common.UserError), match=sentence):
        run_slip(old, new, tmp_path / "run")


def test_a_run_that_learns_nothing_says_so_after_five_steps(tmp_path, capsys):
    run_slip("= majority_reward(classes_N)", "= torch.ones(len(responses))", tmp_path / "run", steps=6)
    assert "Warning: all advantages were 0 in 5 steps" in capsys.readouterr().out


def test_a_forks_bug_shows_its_traceback(tmp_path):
    """All frames of a bug, also under torchrun, which by itself shows none of a rank's."""
    script = (ROOT / "ttrl.py").read_text()
    bug = script.replace("winner = common.majority(classes)\n", "winner = torch.ones(3) * torch.ones(5)\n")
    (tmp_path / "my_idea.py").write_text(bug)
    command = [*python(2), str(tmp_path / "my_idea.py"), "--out", str(tmp_path / "run")]
    command += [f"--{name}={value}" for name, value in (SMALL | TINY).items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert done.returncode == 1
    for frame in ("in main", "in majority_reward", "torch.ones(3)", "RuntimeError: The size of"):
        assert frame in done.stderr and frame in (tmp_path / "run/rank_1.log").read_text()
