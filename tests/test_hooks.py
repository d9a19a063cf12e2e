"""What forks hang on to: statistics of the scoring pass, masks, another task, state, prompts of their choice,
and the sentences for what a script hands over wrongly. All through the real main() of ttrl.py."""

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL, load_script, read_lines, run_toy, spy, toy_args
from equations import gradient_is_the_objectives, log_softmax_rows, model_with

import common
import dynamic_rl
import evaluate
import ttrl
from common import Problem, Rollout
from engine.data import load_problems
from engine.fast import LogProbs
from engine.policy import MicroBatch

TINY = dict(steps=1, prompts_per_batch=2, votes=4, train_samples=4, max_new_tokens=12, num_minibatches=1)


# --------------------------------------- (a) statistics of the scoring pass -------------------------------
def largest(logp: torch.Tensor) -> torch.Tensor:
    return logp.amax(-1)


def certainty(logp: torch.Tensor) -> torch.Tensor:
    return -logp.mean(-1)


@pytest.mark.parametrize("plain", [False, True])
def test_a_pass_over_a_batch_is_not_that_of_full_logits(plain, watch, monkeypatch):
    """Two statistics, 7 rows at a time; another temperature, the initial model, another prompt."""
    monkeypatch.setitem(LogProbs.ELEMENTS, "cpu", 620 * 7)
    sizes, passes = [], []

    def counted(logp):
        sizes.append(len(logp))
        return largest(logp)

    def score(run):
        def several(responses, temperature):
            copies = [dataclasses.replace(r, prompt_ids=r.prompt_ids[1:], old_logp=None) for r in responses]
            first = run.policy.score(responses + copies, temperature, counted, certainty)
            passes.extend(zip(responses + copies, first, [temperature] * 8, [1] * 8))
            passes.extend(zip(responses, run.policy.score(responses, 0.5), [0.5] * 4, [1] * 4))
            initial = run.reference.score(responses, temperature, largest)
            passes.extend(zip(responses, initial, [temperature] * 4, ["initial"] * 4))
            assert all(copy.old_logp is None for copy in copies)

        spy(run.policy, "score_old", before=several)

    seen = watch("ttrl", meddle=score, plain=plain, prompts_per_batch=1, votes=4, train_samples=4)
    assert len(passes) == 16 and (max(sizes) <= 7 or plain)
    for response, (logp, entropy, *others), temperature, weights in passes:
        rows = log_softmax_rows(model_with(seen, seen.weights[weights]), response, temperature).detach()
        expected = [rows.gather(-1, torch.tensor(response.response_ids)[:, None]).squeeze(-1),
                    -(rows.exp() * rows).sum(-1), largest(rows), certainty(rows)]
        for found, wanted in zip([logp, entropy, *others], expected):
            assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-3)


# ------------------------------------------------- (b) masked tokens --------------------------------------
def mask_some(run) -> None:
    """Every third token was a tool's, of which the sampler has no log-probs."""
    def mask(groups, prompts, n, limits=None):
        for response in sum(groups, []):
            response.mask = torch.tensor([float(t % 3 != 1) for t in range(len(response.response_ids))])
            response.logprobs = response.logprobs.where(response.mask > 0, math.nan)

    spy(run, "sample", after=mask)


@pytest.mark.parametrize("flags", [{}, dict(loss_aggregation="token-mean", num_minibatches=1)])
def test_masked_tokens_are_in_no_loss_and_no_metric(flags, watch):
    seen = watch("ttrl", meddle=mask_some, **flags)
    gradient_is_the_objectives(seen)
    lengths = []
    for group in seen.groups:
        for response in group.responses:
            lengths.append(sum(t % 3 != 1 for t in range(len(response.response_ids))))
    assert seen.metrics[-1]["length"] == pytest.approx(sum(lengths) / len(lengths))
    assert seen.metrics[-1]["logp_diff_max"] < 1e-3  # else the sampler check had stopped the run


def test_tis_does_not_read_what_a_sampler_says_of_masked_tokens(watch):
    line = watch("tis", meddle=mask_some).metrics[-1]
    assert line["skipped_updates"] == 0 and line["grad_norm"] > 0
    assert line["tis"] == pytest.approx(1, abs=1e-3)


def test_masked_tokens_are_in_no_entropy_that_is_rewarded(watch):
    seen = watch("rent", meddle=mask_some)
    for group in seen.groups:
        expected = [-float(r.entropy[r.mask.bool()].mean()) for r in group.responses]
        assert group.rewards == pytest.approx(expected, abs=1e-6)


def test_micro_batch_of_masked_responses_by_hand():
    one = common.Rollout([1], [2, 3, 4], torch.zeros(3), True, advantage=1.0, mask=torch.tensor([1., 0., 1.]))
    two = common.Rollout([1], [5, 6], torch.zeros(2), True, advantage=2.0)
    none = common.Rollout([1], [7], torch.zeros(1), True, advantage=2.0, mask=torch.zeros(1))
    micro = MicroBatch([one, two, none], [0, 1, 2], torch.device("cpu"))
    means_T = load_script("gspo").sequence_mean(micro, torch.tensor([1., 100., 3., 5., 6., 100.]))
    assert means_T.tolist() == [2, 2, 2, 5.5, 5.5, 0]
    assert micro.mask_T.tolist() == [1, 0, 1, 1, 1, 0] and micro.length_T.tolist() == [2, 2, 2, 2, 2, 1]
    assert [one.length, two.length, none.length] == [2, 2, 0]
    assert one.mean(torch.tensor([1., 100., 3.])) == 2 and none.mean(torch.tensor([100.])) == 0


# --------------------------------------- (c) another notion of the same answer ----------------------------
def last_digit(text: str, problem: Problem) -> str | None:
    digits = [s for s in text if s.isdigit()]
    return digits[-1] if digits else None


def parity(answers: list[str]) -> list[int]:
    return [int(answer[-1]) % 2 for answer in answers]


def test_votes_metrics_and_evaluation_share_one_equality(tmp_path, monkeypatch):
    """Odd equals odd: four of five responses are right (two of five as numbers), and two answers are left."""
    monkeypatch.setattr(common, "Run", functools.partial(common.Run, same_answer=parity,
                                                         read_answer=last_digit))
    lines = run_toy(ttrl, tmp_path / "run", steps=1, eval="train", eval_samples=2)
    for record in read_lines(tmp_path / "run/samples.jsonl"):
        odd = [response["answer"] and int(response["answer"]) % 2 for response in record["responses"]]
        votes = [value for value in odd if value is not None]
        label = max(votes, key=votes.count)
        assert [response["reward"] for response in record["responses"]] == [value == label for value in odd]
        right = [c == record["equal"][0] for c in record["equal"][1:]]
        assert right == [value == int(record["gold"][-1]) % 2 for value in odd]
    assert all(line["eval/train/pass@1"] > 0.6 for line in lines)
    assert lines[1]["distinct_answers"] <= 2 < lines[1]["distinct"] * 8 and lines[1]["batch_pass@1"] > 0.55

    task = dict(same_answer=parity, read_answer=last_digit)
    monkeypatch.undo()
    settings = dict(evaluate.TOY, benchmarks="toy", samples=2, max_new_tokens=64, save_generations=True)
    results = evaluate.main(evaluate.Args(**settings, out=str(tmp_path / "evaluated")), **task)
    assert results["toy"]["pass@1"] > 0.6
    for record in read_lines(tmp_path / "evaluated/generations.jsonl")[:20]:
        same = record["answer"] and int(record["answer"]) % 2 == int(record["gold"][-1]) % 2
        assert record["correct"] == bool(same)


def test_answer_diversity_is_not_of_the_task():
    """Odd equals odd: two questions of Dynamic RL share an answer."""
    given = [Rollout([1], [2], torch.zeros(1), True, answer=answer) for answer in ("3", "5", None, "8")]
    questions = [dynamic_rl.Question(response, [i], True, 0.5, response.answer)
                 for i, response in enumerate(given)]
    for task, different, diversity in [({}, 3, 3), (dict(same_answer=parity), 2, 1 / 2 + 1 / 2 + 1)]:
        metrics = dynamic_rl.reward_questions(questions, dynamic_rl.Args(), **task)
        assert metrics["unique_answers"] == different / 4
        assert metrics["answer_diversity"] == pytest.approx(diversity / 4)


def exact(answers: list[str]) -> list[str]:
    return [answer.strip().lower() for answer in answers]


def test_classes_of_a_problem_by_hand():
    given = [None, "Paris", "paris ", "Rome", None, "PARIS"]
    problem = Problem("p", "Paris", same_answer=exact)
    assert problem.classes(given) == [None, 0, 0, 1, None, 0] and problem.classes([None]) == [None]
    assert problem.is_right("pARIS") and not problem.is_right("Rome") and not problem.is_right(None)
    assert not Problem("p", same_answer=exact).is_right("Paris")
    assert Problem("p", "0.5").classes(["1/2", "0.5"]) == [0, 0] and Problem("p", "0.5").is_right("1/2")
    assert Problem("p", "0.5", same_answer=exact).classes(["1/2", "0.5"]) == [0, 1]


@pytest.mark.parametrize("keys", [None, [1, 2], torch.tensor([1, 2, 3]), [1, 2, [3]], [0.5, 1.0, None]])
def test_a_vote_function_of_another_type_votes(keys):
    with pytest.raises((TypeError, ValueError)):
        Problem("p", same_answer=lambda answers: keys).classes(["a", None, "b", "c"])


def test_gold_answers_of_another_task_stay_as_written(tmp_path):
    path = tmp_path / "cities.jsonl"
    path.write_text(json.dumps(dict(question="Capital of the US?", answer=" Washington, D.C. ", hint="east")))
    problem, = load_problems(str(path), quiet=True, same_answer=exact)
    assert problem.answer == "Washington, D.C." and problem.row["hint"] == "east"  # (d) the whole row
    assert load_problems(str(path), quiet=True)[0].answer != "Washington, D.C."


# ------------------------------------------- (e) the script's text -----------------------------
def test_the_run_folder_holds_the_script(tmp_path, monkeypatch, capsys):
    script, text = tmp_path / "my_idea.py", (ROOT / "ttrl.py").read_text()
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", [str(script)])
    run_toy(ttrl, tmp_path / "run", **TINY, checkpoint_every=1)
    assert (tmp_path / "run/script.py").read_text() == text
    run_toy(ttrl, tmp_path / "run", **TINY, checkpoint_every=1, resume=True)
    assert "has changed" not in capsys.readouterr().out
    script.write_text(text + "\n# another idea\n")
    run_toy(ttrl, tmp_path / "run", **TINY, checkpoint_every=1, resume=True)
    assert "my_idea.py has changed since this run was started" in capsys.readouterr().out
    assert (tmp_path / "run/script.py").read_text() == text + "\n# another idea\n"
    old, = (tmp_path / "run").glob("script-until-*.py")
    assert old.read_text() == text


# -------------------------------- (h) prompts of one's choice, (g) what teaches nothing --------------------
def test_batches_beyond_the_steps():
    """Every batch of an epoch once, then all in another order; without a number, the step's."""
    run = common.Run.__new__(common.Run)
    run.args, run.step = common.Args(prompts_per_batch=2), 3
    run.problems = [Problem(str(i), id=i) for i in range(7)]
    batches = []
    for batch in range(1, 7):
        batches.append([problem.id for problem in run.next_prompts(batch)])
    for epoch in (batches[:3], batches[3:]):
        assert len(set(sum(epoch, []))) == 6
    assert batches[:3] != batches[3:]
    assert [problem.id for problem in run.next_prompts()] == batches[2]


@pytest.mark.parametrize("left", [6, 0])
def test_prompts_left_out_of_an_update(left, watch):
    def meddle(run):
        original = run.minibatches
        run.minibatches = lambda train: original(train[:left])

    seen = watch("ttrl", meddle=meddle)
    assert sum(len(update.responses) for update in seen.updates) == left
    assert ("loss" in seen.metrics[-1]) == (left > 0) and "reward" in seen.metrics[-1]
    sampled = [row for line in read_lines(seen.out / "samples.jsonl") for row in line["responses"]]
    assert all(row["trained"] == (row["advantage"] is not None) for row in sampled)  # NaN is no JSON
    assert sum(row["trained"] for row in sampled) <= left and seen.metrics[-1]["zero_variance"] > 0.5
    now = seen.policy_weights()
    assert any(not torch.equal(now[name], value) for name, value in seen.weights[1].items()) == (left > 0)


# ------------------------------------------------ own sampling -------------------------------------------
def test_evaluation_samples_otherwise_than_the_fork(tmp_path, monkeypatch):
    seen = []

    def own(run, work, temperature, **options):
        seen.append("evaluation" if "top_p" in options else "training")
        return run.generate(work, temperature, **options)

    run_toy(ttrl, tmp_path / "plain", **SMALL | TINY | dict(eval="toy_test", eval_samples=1))
    monkeypatch.setattr(common, "Run", functools.partial(common.Run, generate=own))
    run_toy(ttrl, tmp_path / "own", **SMALL | TINY | dict(eval="toy_test", eval_samples=1))
    assert seen == ["evaluation", "training", "evaluation"]
    plain, ours = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("plain", "own"))
    assert [line["eval/toy_test/pass@1"] for line in ours] == [line["eval/toy_test/pass@1"] for line in plain]


def test_a_stop_text_ends_no_response(tmp_path):
    run = common.Run(toy_args(ttrl, out=str(tmp_path / "run"), kl_coef=0.0))
    run.begin_step(1)
    for response in sum(run.sample(run.problems[:2], 8, stop=["="]), []):
        assert "=" not in response.text[:-1] and response.finished
        assert response.text.endswith("=") or response.response_ids[-1] in run.stop_ids


# ------------------------------------------- what a fork hands over ---------------------------------------
build, sample, end_step = common.Run, common.Run.sample, common.Run.end_step
WRONG = [  # what a fork replaces, by what, and the sentence
    (ttrl, "majority_reward", lambda classes: torch.ones(len(classes) - 1),
     r"rewards must be a tensor \[4\] of finite floats, one per response"),
    (ttrl, "majority_reward", lambda classes: [1.0] * len(classes),
     r"rewards must be a tensor \[4\] of finite floats, .* but are \[1\.0"),
    (ttrl, "majority_reward", lambda classes: torch.tensor([math.nan] + [0.0] * (len(classes) - 1)),
     r"rewards must be a tensor \[4\] of finite floats, .* tensor\(\[nan"),
    (ttrl, "group_advantages", lambda rewards: rewards * math.nan,
     "a response has the advantage nan; set response.advantage"),
    (ttrl, "group_advantages", lambda rewards: SimpleNamespace(tolist=rewards.unbind),  # .tolist() forgotten
     r"a response has the advantage tensor\([01]\.\)"),
    (common, "answer_classes", lambda problem, responses, labels: ["none"] * len(responses),
     "classes must be a list of 4, a whole number or None"),
    (ttrl, "majority", lambda classes: "42", "label must be the class taken as right"),
    (common.Run, "sample", lambda run, prompts, n: sample(run, [prompts[0], *prompts[:-1]], n),
     r"the prompt with id \d+ was sampled in this step already"),
    (common.Run, "end_step", lambda run, extra=None: end_step(run, dict(mine=torch.ones(1))),
     r"the metric 'mine' is tensor\(\[1\.\]\), but must be a number"),
    (common.Run, "end_step", lambda run, extra=None: end_step(run, dict(reward=5.0)),
     "the run has a metric 'reward' of its own"),
    (common.Run, "next_prompts", lambda run: run.state.update({1: "x"}) or run.problems[:2],
     r"run\.state is \{1: 'x'\}, but must hold what JSON keeps"),
    (common, "Run", lambda args: build(args, read_answer=lambda text, problem: 7),
     "must return text or None .*, but returned 7")]


@pytest.mark.parametrize("module, name, function, sentence", WRONG, ids=[row[3][:40] for row in WRONG])
def test_a_forks_mistake_trains_on_in_silence(module, name, function, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(module, name, function)
    with pytest.raises((ValueError, TypeError), match=sentence):
        run_toy(ttrl, tmp_path / "run", **SMALL | TINY)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forks_bug_hides_its_traceback(tmp_path, ranks):
    """All frames of a bug three calls deep, from the shell, alone and under torchrun."""
    script = (ROOT / "ttrl.py").read_text().replace("def majority_reward", """def first(x):
    return second(x)


def second(x):
    return torch.ones(3) * torch.ones(5)


def majority_reward""").replace("    winner = majority(classes)\n", "    winner = first(classes)\n")
    (tmp_path / "my_idea.py").write_text(script)
    command = [sys.executable, str(tmp_path / "my_idea.py"), "--out", str(tmp_path / "run")]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    for name, value in (SMALL | TINY).items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert done.returncode == 1
    for frame in ("in main", "in majority_reward", "in first", "in second", "RuntimeError: The size of"):
        assert frame in done.stderr
