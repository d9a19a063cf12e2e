"""Copy this file for a fork: name your script, and write its formulas in other words. Also docs/fork.md."""

import importlib
import math
from statistics import mean, stdev
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, as_if_killed, fresh_state, load_script, read_lines, run_toy, untimed

import common
from engine.log import Log

fork = load_script("empo")  # yours: "my_idea", for my_idea.py beside ttrl.py
# Four of eight problems in a step, so each comes up again; a later step may depend on the first two, which
# another run resumes. Fewer are trained than vote: else a reward that reaches another response is not seen.
# Give your own flags, too, with values that are no defaults.
SHORT = dict(votes=8, train_samples=4, prompts_per_batch=4, steps=5, checkpoint_every=1, keep_checkpoints=5,
             max_new_tokens=96, entropy_high=1.5)


def expected_problems(step, earlier):
    """The numbers of the problems that vote in a step, 0 to 7; here they come in the data's order."""
    return common.next_prompts(SimpleNamespace(prompts_per_batch=4, seed=1), range(8), step)


def expected(vote, trained, others, earlier):
    """(rewards of vote.responses, which have the classes vote.classes; advantages of those that are trained,
    None if this prompt must not be).

    trained: their indices, or those that were drawn to be. vote.step: from 1 on. others: trained responses
    that are in no vote (verifications, say). earlier: earlier steps' votes."""
    counts = [vote.classes.count(c) for c in vote.classes]
    rewards = [0 if c is None else count / len(counts) for c, count in zip(vote.classes, counts)]
    answered = len(counts) - vote.classes.count(None)
    terms = [math.log(answered / count) for c, count in zip(vote.classes, counts) if c is not None]
    if sum(terms) > 1.5 * answered:  # the entropy of the answers
        return rewards, None
    own = [rewards[i] for i in trained]
    return rewards, [(reward - mean(own)) / (stdev(own) + 1e-6) for reward in own]


def expected_others(others, votes):
    return []  # their advantages


def watched(folder):
    """Five steps on the toy: their votes, what they trained, and how much likelier the update made it."""
    steps, keep, log_step = [], common.save_when_due, Log.step
    (folder / "few.jsonl").write_text("".join((ROOT / "toy/train.jsonl").open().readlines()[:8]))

    def watch(log, step, trained, **own):
        votes = [SimpleNamespace(**group, step=step) for group in log.groups]
        steps.append(SimpleNamespace(votes=votes, trained=list(trained), gain=0.0))
        log_step(log, step, trained, **own)

    def measure(run, step, optimizer):
        trained = steps[-1].trained
        for response, (logp_T, _) in zip(trained, run.policy.score(trained, run.args.temperature)):
            steps[-1].gain += response.advantage * response.mean(logp_T - response.old_logp)
        keep(run, step, optimizer)

    options = dict(SHORT, dataset=str(folder / "few.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Log, "step", watch)
        patch.setattr(common, "save_when_due", measure)
        run_toy(fork, folder / "run", **options)
    return SimpleNamespace(folder=folder, options=options, steps=steps)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return watched(tmp_path_factory.mktemp("fork"))


def test_the_chosen_problems_vote_and_all_that_is_trained_has_the_formulas_advantage(run):
    earlier, draws = [], SimpleNamespace(seed=1, train_samples=SHORT["train_samples"])
    for number, step in enumerate(run.steps, 1):
        assert [vote.prompt.id for vote in step.votes] == expected_problems(number, earlier)
        voted = {response for vote in step.votes for response in vote.responses}
        others = [response for response in step.trained if response not in voted]
        for vote in step.votes:
            ours = {i: r.advantage for i, r in enumerate(vote.responses) if r in step.trained}
            drawn = common.subset(draws, number, vote.prompt, len(vote.responses))
            rewards, theirs = expected(vote, [*ours] or drawn, others, earlier)
            assert vote.rewards == pytest.approx(rewards, abs=1e-5)
            assert bool(ours) == (theirs is not None), f"problem {vote.prompt.id} is trained: {bool(ours)}"
            assert [*ours.values()] == pytest.approx(theirs or [], abs=1e-3)
        assert [r.advantage for r in others] == pytest.approx(expected_others(others, step.votes), abs=1e-3)
        earlier += step.votes
    gain = sum(step.gain for step in run.steps)
    assert gain > 0, "0: nothing is trained, raise SHORT; below: is the sign of the loss wrong?"


def test_the_plain_path_gives_the_same_step(run, tmp_path):
    plain = run_toy(fork, tmp_path / "plain", plain=True, **run.options)
    both = read_lines(run.folder / "run/metrics.jsonl"), plain
    ours, theirs = [next(line for line in lines if "loss" in line) for lines in both]  # the first that trains
    for name in ("step", "loss", "grad_norm", "reward"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-2, abs=1e-4), name


def test_a_resumed_run_repeats_the_uninterrupted_one(run, tmp_path):
    whole, again = run.folder / "run", tmp_path / "again"
    as_if_killed(whole, again, 2)
    importlib.reload(fork)  # as in a new process: what the script keeps elsewhere than in run.state is lost
    run_toy(fork, again, **run.options, resume=True)
    assert untimed(read_lines(again / "metrics.jsonl")) == untimed(read_lines(whole / "metrics.jsonl"))
    weights = fresh_state(again / "final")
    assert all(torch.equal(value, weights[name]) for name, value in fresh_state(whole / "final").items())
