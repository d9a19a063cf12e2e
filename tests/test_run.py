"""A run's arguments when it is resumed, the initial votes, the loop's functions one by one."""

import dataclasses
import importlib
import json
import pickle
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, fresh_state, random_rollouts, read_lines, run_toy
from conftest import toy_args, toy_of

import common
import evaluate
import restrain
import ttrl
from engine import options, samplers
from engine.base import UserError


# ------------------------------------------- resume with other arguments -----------------------------------
@pytest.fixture
def parse_resumed(tmp_path, monkeypatch):
    """parse_resumed(script, *flags): the arguments that --resume takes from the run.json of a run of ttrl.py
    by another version, with an option that is unknown and without one that is known."""
    values = toy_of(ttrl) | dict(votes=24, out=str(tmp_path))
    args = options.options_dict(options.make_args(ttrl.Args, values)) | dict(no_such_option=3)
    del args["grad_clip"]
    (tmp_path / "run.json").write_text(json.dumps(dict(script="ttrl", args=args, identity={"data": "1"})))

    def parse(script, *flags):
        module = importlib.import_module(script)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--resume", "--out", str(tmp_path), *flags])
        return options.parse(module.Args, toy_of(module), common.SMOLLM2)

    return parse


def test_resume_takes_the_arguments_of_the_run(parse_resumed, capsys):
    """`--resume --out FOLDER` is enough; what is given beside it wins and is said."""
    args = parse_resumed("ttrl", "--eval_samples", "7", "--lr=0.1", "--votes", "24")
    assert (args.votes, args.seed, args.eval_samples, args.lr, args.grad_clip) == (24, 1, 7, 0.1, 1.0)
    assert "Resuming with another --lr: 0.1 (was 0.0002)" in capsys.readouterr().out


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    """A shell leaves ~ alone behind an equals sign."""
    monkeypatch.setenv("HOME", "/home/me")
    paths = dict(model="~/model", dataset="~/a.jsonl", eval="toy,~/b.jsonl", prompt="~/p", out="~/run")
    monkeypatch.setattr(sys, "argv", ["ttrl.py", *(f"--{name}={path}" for name, path in paths.items())])
    read = options.options_dict(options.parse(ttrl.Args))
    for name, path in paths.items():
        assert read[name] == path.replace("~", "/home/me")


@pytest.mark.parametrize("script, flags, sentence", [
    ("ttrl", ["--seed", "2"], "--seed is 2"),
    ("ttrl", ["--prompts_per_batch", "8"], "--prompts_per_batch is 8"),
    ("scrl", [], "is a run of ttrl.py")])
def test_resume_refuses_another_run(parse_resumed, script, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_resumed(script, *flags)


# ------------------------ the initial votes (what they count: test_scripts.py) ------------------------------
def test_initial_votes_continue_after_a_kill(tmp_path, monkeypatch):
    """Stored call by call. What is stored is not asked again."""
    problems, path = tmp_path / "problems.jsonl", tmp_path / "run/initial_votes.jsonl"
    problems.write_text("\n".join((ROOT / "toy/train.jsonl").read_text().splitlines()[:6]))
    flags = dict(dataset=str(problems), out=str(tmp_path / "run"))
    run_toy(restrain, **flags, steps=1)
    stored = {record["id"]: (record["answer"], record["votes"]) for record in read_lines(path)}
    assert sorted(stored) == list(range(6))
    kept = path.read_text().splitlines(keepends=True)[:3]
    path.write_text("".join(kept))
    (tmp_path / "run/metrics.jsonl").unlink()  # the kill came before the first step
    (tmp_path / "run/final").rename(tmp_path / "final")
    run = common.start(toy_args(restrain, resume=True, **flags))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # before the loop, it ends at once
    asked, sample = [], common.sample

    def counted(run, step, prompts, n, gather):
        asked.extend(prompt.id for prompt in prompts)
        return sample(run, step, prompts, n, gather=gather)

    monkeypatch.setattr(common, "sample", counted)
    assert common.initial_votes(run, prompts_per_call=2) == stored  # those of the uninterrupted pass
    assert sorted([*asked, *(json.loads(line)["id"] for line in kept)]) == list(range(6))


@pytest.fixture
def few(tmp_path):
    """A file of a few problems."""
    (tmp_path / "few.jsonl").write_text("\n".join((ROOT / "toy/train.jsonl").read_text().splitlines()[:6]))
    return str(tmp_path / "few.jsonl")


def test_initial_votes_of_another_engine_are_not_taken(few, tmp_path, monkeypatch):
    def draw(*arguments, draw=samplers.draw):
        token, logp = draw(*arguments)
        return token, logp - 0.01

    monkeypatch.setattr(samplers, "draw", draw)
    with pytest.raises(UserError, match="sampler and trainer disagree"):
        run_toy(restrain, tmp_path / "run", dataset=few)
    assert not (tmp_path / "run/initial_votes.jsonl").exists()


def test_a_prompt_without_an_initial_vote_takes_this_steps_count(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "initial_votes", lambda run: {"another": ("7", 0)})
    added = run_toy(restrain, tmp_path / "added", steps=1)
    online = run_toy(restrain, tmp_path / "online", steps=1, prompt_weighting="online")
    assert added[-1]["prompt_weight"] == online[-1]["prompt_weight"] < 1


def test_votes_and_scores_are_gathered_and_no_tokens(few, tmp_path, monkeypatch):
    """Every rank would hold all: EVOL-RL's evaluation of 16,000 long responses took gigabytes on each."""
    gathered, gather = [], common.gather_shares

    def counted(results, *per_engine):
        gathered.append(len(pickle.dumps(results)) / len(results))
        return gather(results, *per_engine)

    monkeypatch.setattr(common, "gather_shares", counted)
    run_toy(restrain, tmp_path / "run", steps=1, dataset=few, eval="train")
    settings = dict(evaluate.TOY, benchmarks=few, samples=8, max_new_tokens=64)
    evaluate.main(evaluate.Args(**settings, out=str(tmp_path / "scores")))
    assert len(gathered) == 6 and max(gathered) < 8 * 60  # bytes a problem


# ------------------------------------------------ the loop's functions ------------------------------------
def test_learning_rate_by_hand():
    rates = [common.learning_rate(common.Args(lr=1.0, warmup=0.2), step, 10) for step in range(1, 11)]
    # two warm-up steps 1/2 and 1, then a cosine over the other eight that is 0 at step 11: cos(pi k / 9)
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == pytest.approx(0.5 * (1 + 0.9396926))
    assert rates[5] == pytest.approx(0.5 * (1 + 0.1736482))  # k = 4: cos(80 degrees)
    assert rates[-1] == pytest.approx(0.5 * (1 - 0.9396926), abs=1e-6)
    # without warm-up the cosine has one step of full rate before it
    assert common.learning_rate(common.Args(lr=1.0, warmup=0.0), 1, 10) == 1.0


def test_every_epoch_is_a_new_order_and_no_batch_holds_a_problem_twice():
    args, problems = common.Args(prompts_per_batch=3), list("abcdefgh")  # two batches an epoch, two left over
    batches = [common.next_prompts(args, problems, number) for number in range(1, 21)]
    epochs = [first + second for first, second in zip(batches[::2], batches[1::2])]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 10
    assert {problem for epoch in epochs for problem in epoch} == set("abcdefgh")
    assert common.next_prompts(dataclasses.replace(args, seed=2), problems, 7) != batches[6]


@pytest.mark.parametrize("kind", ["mixed", "by_prompt"])
def test_minibatches_are_a_partition(kind):
    args, train = common.Args(minibatches=kind, num_minibatches=3), random_rollouts(12)
    parts = common.minibatches(args, 1, train)
    assert sorted(sum(parts, []), key=train.index) == train and [len(part) for part in parts] == [4] * 3
    assert (common.minibatches(args, 2, train) == parts) == (sum(parts, []) == train) == (kind == "by_prompt")
    args.num_minibatches = 50
    assert len(common.minibatches(args, 2, train)) == 12  # no empty optimizer step
    assert common.minibatches(args, 2, []) == []


@pytest.mark.parametrize("dtype, first, shift, tokens, result", [
    ("float32", 0, 1e-5, 8, "goes on"), ("float32", 0, 0.01, 1, "ends"), ("float32", 0, 0.01, 0, "goes on"),
    ("bfloat16", 0, 0.04, 8, "goes on"), ("bfloat16", 0, 0.09, 8, "warns"), ("bfloat16", 0, 0.11, 8, "ends"),
    ("bfloat16", 0.01, 0.09, 8, "warns"),
    ("bfloat16", 0.04, 0.19, 8, "warns"), ("bfloat16", 0.04, 0.21, 8, "ends")])
def test_a_sampler_of_other_weights_stops_the_run(dtype, first, shift, tokens, result, monkeypatch):
    """float32: if one token differs. bfloat16 rounds: an average above .1, which is also five times the first
    step's, ends it."""
    warned, (response,) = [], random_rollouts(1, shortest=8, longest=8)
    log = SimpleNamespace(first_diff=first)
    run = SimpleNamespace(args=common.Args(), dtype=getattr(torch, dtype), log=log)
    monkeypatch.setattr(common, "print0", warned.append)
    response.old_logp = response.sampler_logp + shift * (torch.arange(8) < tokens)
    if result == "ends":
        with pytest.raises(UserError, match="sampler and trainer disagree"):
            common.check_sampler(run, [response])
        return
    metrics = common.check_sampler(run, [response] if tokens else [])  # []: Dynamic RL, no usable question
    assert log.first_diff == pytest.approx(first or shift * tokens / 8)
    assert len(warned) == (result == "warns")
    expected = dict(logp_diff_max=shift * (tokens > 0), logp_diff_mean=shift * tokens / 8, logp_nan=0)
    assert metrics == pytest.approx(expected)


def test_gold_answers_never_reach_the_weights(tmp_path):
    """A run without --labels gold ends with the same weights if its gold answers are nonsense."""
    rows = read_lines(ROOT / "toy/train.jsonl")[:8]
    for name, change in (("right", {}), ("nonsense", dict(answer="0"))):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row | change) + "\n" for row in rows))
        run_toy(ttrl, tmp_path / name, dataset=str(data))
    right, nonsense = (fresh_state(tmp_path / f"{name}/final") for name in ("right", "nonsense"))
    torch.testing.assert_close(right, nonsense, rtol=0, atol=0)
