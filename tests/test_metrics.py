"""What a run is watched by, against numbers worked out by hand: grading, pass@k, and the votes of a step.

evaluate.py: a final model, the model of a checkpoint, and the presets."""

import itertools
import json
import math
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, run_toy
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import common
import evaluate
import restrain
import ttrl
from common import Problem, Rollout, majority
from engine.run_folder import read_run
from engine.metrics import few_answers, grade, group_metrics, maj_at_k, mean, pass_at_k, step_metrics, summary
from engine.log import model_card, sample_record


def rollout(answer, length=1, finished=True, text=""):
    text = text or f"so {answer}"
    return Rollout([1], [1] * length, torch.zeros(length), finished, text=text, answer=answer)


# ------------------------------------------------ evaluation ----------------------------------------------
def test_pass_at_k_against_brute_force():
    for n, c in itertools.product(range(1, 7), range(7)):
        for k in range(1, n + 1):
            if c <= n:
                draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_grade_and_summary_by_hand():
    responses = [rollout("2", 4), rollout("2.0", 2), rollout("3", 2), rollout(None, 8, finished=False)]
    first = grade(Problem("p", "2"), responses)
    second = grade(Problem("q", "5"), [rollout("1"), rollout("1"), rollout("5"), rollout("7")])
    assert first["correct"] == [True, True, False, False] and first["majority"]
    assert second["correct"] == [False, False, True, False] and not second["majority"]
    row = summary([first, second])
    # rates 1/2 and 1/4: mean 0.375; spread sqrt(2 x 0.125^2 / 1) = 0.17678; standard error 0.17678 / sqrt 2
    assert row["pass@1"] == 0.375 and row["stderr"] == pytest.approx(0.125)
    # pass@2: 1 - C(2,2) / C(4,2) = 5/6 and 1 - C(3,2) / C(4,2) = 1/2
    assert row["pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2) and row["pass@4"] == 1.0
    assert row["maj@4"] == 0.5 and row["length"] == 2.5
    assert row["answered"] == 7 / 8 and row["truncated"] == 1 / 8
    assert row["distinct"] == pytest.approx((4 / 4 + 3 / 4) / 2)


def test_majority_of_k_against_all_orders():
    """Six responses: 0, which is right, has three votes, 1 two, and one has no answer."""
    classes, right = [0, 0, 0, 1, 1, None], {0}
    for k in (1, 2, 3):
        won = mean(majority(list(order)) in right for order in itertools.permutations(classes, k))
        spread = math.sqrt(won * (1 - won))
        assert maj_at_k(classes, right, k, subsets=4000) == pytest.approx(won, abs=4 * spread / 4000**0.5)
        assert maj_at_k(classes, right, k) == maj_at_k(classes, right, k)  # of 64 subsets, the same each time
    assert maj_at_k(classes, right, 6) == 1 and maj_at_k(classes, {1}, 6) == 0


def test_the_mean_over_benchmarks_is_printed_and_saved(tmp_path, monkeypatch, capsys):
    """pass@1 is (1/4 + 3/4) / 2 = .5 of one, 1/4 of the other: .375, not the .417 of the three problems."""
    shares = dict(toy=[1, 3], toy_test=[1])  # of four responses right, problem by problem

    def graded(run, name, problems):
        found = []
        for share in shares[name]:
            responses = [rollout(answer) for answer in share * ["1"] + (4 - share) * ["2"]]
            found.append((grade(Problem("p", "1"), responses), responses))
        return found

    monkeypatch.setattr(common, "evaluate_benchmark", graded)
    settings = dict(evaluate.TOY, benchmarks=",".join(shares), out=str(tmp_path / "out"))
    results = evaluate.main(evaluate.Args(**settings))
    assert results["mean"] == {"pass@1": 0.375}
    assert json.loads((tmp_path / "out/results.json").read_text())["results"] == results
    printed = capsys.readouterr().out.splitlines()
    header, *rows = [line.split() for line in printed if line.startswith((" ", "pass@"))]
    assert header[-1] == "mean" and rows[0] == "pass@1 0.500 +- 0.250 0.250 +- 0.000 0.375".split()
    assert rows[1][:3] == ["pass@2", "0.750", "0.500"]
    training = mock.MagicMock(benchmarks=dict.fromkeys(shares, []), args=SimpleNamespace(eval_greedy=False))
    common.evaluate(training, 1)  # the same mean in a run's log
    assert training.log.evaluation.call_args.args[1]["eval/mean/pass@1"] == 0.375


def test_without_a_gold_answer_there_is_no_score():
    known = grade(Problem("p", "2"), [rollout("2"), rollout("3")])
    unknown = grade(Problem("r"), [rollout("1", 3)] * 2)
    row = summary([unknown])
    assert row.keys() == {"length", "answered", "truncated", "distinct"}
    assert summary([known, unknown])["pass@1"] == 0.5  # over those that are known
    assert summary([known, unknown])["length"] == 2.0  # over all


# ------------------------------------------------ votes of a step -----------------------------------------
# Eight responses to a problem whose answer is 5. Classes: 7 7 7 5 5.0 9 and two without an answer.
ANSWERS = ["7", "7", "5", "7", "5.0", None, "9", None]
CLASSES = [0, 0, 1, 0, 1, None, 2, None]


def group(label, rewards=None, gold="5", trained=range(8), negatives=(), classes=None, advantages=None):
    responses = [rollout(answer, text=f"text {i % 6}") for i, answer in enumerate(ANSWERS)]
    for response, advantage in zip(responses, advantages or [0.0] * 8):
        response.advantage = advantage
    return dict(prompt=Problem("p", gold), responses=responses, classes=classes or CLASSES,
                rewards=rewards or [0.0] * 8, trained=set(trained), label=label, negatives=sorted(negatives),
                verdicts=grade(Problem("p", gold), responses), flipped=None)


NOTHING, ANSWER, CUT_BEFORE, CUT_BEHIND = (None, True), ("1", True), (None, False), ("1", False)


@pytest.mark.parametrize("given, begins, shown", [  # (answer, finished) of responses; whose text is shown
    ([ANSWER] * 3 + [NOTHING] * 3, "", None), ([ANSWER] * 3 + [CUT_BEHIND] * 3, "", None),
    ([CUT_BEHIND] * 2 + [NOTHING] * 4, "33% of the responses have an", 2),
    ([ANSWER] * 2 + [CUT_BEFORE] * 4, "33% of the responses have an", 2),
    ([NOTHING] + [CUT_BEHIND] * 5, "83% of the responses have an", 1)])
def test_the_warning_shows_what_most_responses_lack(given, begins, shown):
    responses = [rollout(answer, 1, finished, f"text {i}") for i, (answer, finished) in enumerate(given)]
    said = few_answers(responses + 9 * [Rollout([], [], torch.zeros(0), False)])  # overlong: nothing sampled
    assert said.startswith(begins) and (f"One ends: 'text {shown}'" in said) == bool(said) == bool(begins)


PASS, ACCURACIES = {"batch_pass@1": 2 / 8}, {"majority_accuracy", "label_accuracy", "reward_accuracy"}
UNTRAINED = [0.5, -1.0, 1.5, 0.0, 9.0, 0.0, 0.0, 0.0]  # the fifth's advantage is not trained


@pytest.mark.parametrize("made, expected, absent", [
    # three of eight say 7; no answer counts among the eight. There are 7, 5 (twice, written differently) and
    # 9. The label, 7, is not 5; three were judged right and are not, two wrong and are right: three of eight
    # are judged rightly
    (dict(label={0: 1.0}, rewards=[1, 1, 0, 1, 0, 0, 0, 0]), PASS | dict(
        reward=3 / 8, majority_ratio=3 / 8, distinct_answers=3, distinct=6 / 8, majority_accuracy=0,
        label_coverage=1, negative_coverage=0, label_accuracy=0, reward_accuracy=3 / 8), ()),
    (dict(label={0: 1.0}, gold=None), {}, ACCURACIES | {"batch_pass@1"}),
    # a gold label, in common.answer_classes of --labels gold, too: all are judged rightly, although the
    # majority, of the answers, is wrong
    (dict(label={1: 1.0}), dict(label_accuracy=1, reward_accuracy=1, majority_accuracy=0), ()),
    (dict(label={0: 1.0}, classes=[None, None, 0, None, 0, None, None, None]), dict(
        label_accuracy=1, reward_accuracy=1, majority_accuracy=0, majority_ratio=3 / 8, distinct_answers=3),
     ()),
    # an abstention has no accuracy
    (dict(label={}), PASS | dict(label_coverage=0, majority_accuracy=0), ACCURACIES - {"majority_accuracy"}),
    # RESTRAIN: weights 0.5, 0.25, 0.25 on 7 (wrong), 5 (right), 9 (wrong): a quarter of the label is right.
    # Judged rightly: 7: 3 of 8 (above); 5: 8; 9: 5 of 8 (the 9 and both 5 are judged wrongly)
    (dict(label={0: 0.5, 1: 0.25, 2: 0.25}), dict(
        label_accuracy=0.25, reward_accuracy=0.5 * 3 / 8 + 0.25 + 0.25 * 5 / 8), ()),
    # SCRL: 9 and 5 are taken as wrong; 9 is, 5 is the gold answer: half of them are right
    (dict(label={0: 1.0}, negatives={1, 2}), dict(negative_coverage=1, negative_accuracy=0.5), ()),
    # trained are the first four, of which two have a positive advantage; then two that have none
    (dict(label={}, advantages=UNTRAINED, trained=range(4)), dict(positive_advantage=1, zero_variance=0), ()),
    (dict(label={}, advantages=UNTRAINED, trained=[3, 5]), dict(zero_variance=1), {"positive_advantage"})])
def test_metrics_of_a_vote_by_hand(made, expected, absent):
    row = group_metrics(group(**made))
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert not row.keys() & absent


def test_means_are_over_the_prompts_that_have_a_value():
    metrics = step_metrics([group({}), group({1: 1.0})])
    assert metrics["label_coverage"] == 0.5 and metrics["label_accuracy"] == 1
    metrics = step_metrics([group({}, negatives={1, 2}), group({}), group({}, gold=None, negatives={1})])
    assert metrics["negative_coverage"] == pytest.approx(2 / 3)
    assert metrics["negative_accuracy"] == 0.5  # only where there is a negative label and a gold answer


def test_entropies_of_right_and_wrong_responses_by_hand():
    # The third and the fifth are right: (.1 + .3) / 2 = .2 and .4, mean .3. Wrong, or without an answer:
    # 1, (.5 + .7 + .9) / 3 = .7 and 1.3, mean 1. The other three were not scored.
    made = group({0: 1.0})
    for i, entropy in {2: [0.1, 0.3], 4: [0.4], 0: [1.0], 6: [0.5, 0.7, 0.9], 7: [1.3]}.items():
        made["responses"][i].entropy = torch.tensor(entropy)
    row = group_metrics(made)
    assert (row["entropy_right"], row["entropy_wrong"]) == (pytest.approx(0.3), pytest.approx(1.0))
    assert not {"entropy_right", "entropy_wrong"} & group_metrics(group({0: 1.0})).keys()


def test_lengths_are_means_over_responses():
    """ETTRL's groups are not all of one size: (4 + 4 + 1) / 3, not (4 + 1) / 2."""
    made = group({}, trained=[])
    sizes = []
    for lengths in ([4, 4], [1]):
        responses = [rollout("1", length) for length in lengths]
        sizes.append(made | dict(responses=responses, classes=[0] * len(lengths), rewards=[0] * len(lengths)))
    assert step_metrics(sizes)["length"] == 3


# ------------------------------------------------ samples.jsonl -------------------------------------------
def test_a_sample_record_by_hand():
    made = group({0: 0.75, 1: 0.25}, rewards=[1, 1, 0, 1, 0, -1, 0.1234567, -1], trained=[1, 2],
                 advantages=[9, 0.5, -0.5] + [9] * 5)
    made["responses"][2].text = made["responses"][1].text = "x" * 4000 + "y" * 50
    made["responses"][3].entropy = torch.tensor([0.25, 0.5])
    record = sample_record(4, made)
    assert (record["step"], record["problem"], record["gold"]) == (4, "p", "5")
    assert record["label"] == {"0": 0.75, "1": 0.25}
    by_name = {}
    for name in record["responses"][0]:
        by_name[name] = [r[name] for r in record["responses"]]
    assert by_name["answer"] == ANSWERS and by_name["answer_class"] == CLASSES
    assert by_name["reward"] == [1, 1, 0, 1, 0, -1, 0.123457, -1]
    assert by_name["trained"] == [False, True, True] + [False] * 5
    assert by_name["advantage"] == [None, 0.5, -0.5] + [None] * 5  # null, not 0: it has none
    assert by_name["tokens"] == [1] * 8 and by_name["finished"] == [True] * 8
    # the ends of the texts: long ones of the first two, else short ones
    assert by_name["text"][1:3] == ["x" * 1950 + "y" * 50, "x" * 150 + "y" * 50]
    assert by_name["entropy"] == [None] * 3 + [0.375] + [None] * 4
    assert record["negatives"] == []
    assert sample_record(4, group({}, negatives={2, 1}))["negatives"] == [1, 2]


# ------------------------------------------------ the model card ------------------------------------------
def test_the_final_model_tells_how_it_was_made(tmp_path):
    run_toy(restrain, tmp_path / "run", steps=1, eval="toy", eval_samples=2, eval_greedy=True)
    card = ModelCard.load(tmp_path / "run/final/README.md")  # raises if the metadata are no YAML
    assert card.data.tags[0] == "label-free-rl" and card.data.base_model is None  # the Hub has no toy
    assert "--steps 1 " in card.text and "--kappa 2" in card.text and str(tmp_path) not in card.text
    for name in ("greedy", "pass@1", "maj@2"):
        assert re.search(rf"toy/{name} +0\.\d+ +0\.\d+\n", card.text)
    options = read_run(tmp_path / "run")["args"] | dict(model="Qwen/Qwen3-4B", dataset=str(tmp_path))
    card = ModelCard(model_card(options, {}, []))
    assert card.data.base_model == "Qwen/Qwen3-4B"
    assert f"Data: {tmp_path.name}. Labels: majority." in card.text


# -------------------------------------------------- evaluate.py -------------------------------------------
def test_the_results_of_a_benchmark_stay_if_a_later_one_fails(tmp_path, monkeypatch):
    def graded(run, name, problems):
        assert name == "toy"
        return [(grade(Problem("p", "1"), [rollout("1")]), [])]

    monkeypatch.setattr(common, "evaluate_benchmark", graded)
    with pytest.raises(AssertionError):
        evaluate.main(evaluate.Args(**evaluate.TOY, out=str(tmp_path / "out")))
    assert json.loads((tmp_path / "out/results.json").read_text())["results"]["toy"]["pass@1"] == 1


def test_without_a_network_the_remedy_is_said(launch, monkeypatch):
    monkeypatch.setattr("engine.models.is_offline_mode", lambda: False)
    monkeypatch.setattr("engine.models.ENDPOINT", "http://127.0.0.1:9")
    code, _, error = launch("evaluate", model="owner/name")
    assert code == 2 and "without a network HF_HUB_OFFLINE=1 takes what its cache holds" in error


def test_a_grader_that_is_not_installed_is_said(launch, monkeypatch):
    monkeypatch.setattr("evaluate.util.find_spec", lambda name: None)
    code, _, error = launch("evaluate", grader="math_verify")
    assert code == 2 and error.endswith("which needs another package: pip install math-verify.\n")


def test_a_final_model_scores_as_itself_and_a_checkpoint_becomes_one(tmp_path, launch):
    """Every response, of a run's folder and of its final/, not of the base model. As docs/fork.md says, a
    copy that is resumed to end at a checkpoint's step has that checkpoint's weights, bit for bit."""
    run, copy = tmp_path / "run", tmp_path / "copy"  # with a rate that changes what the model says
    run_toy(ttrl, run, steps=2, checkpoint_every=1, lr=2e-3, warmup=0.0)
    code, _, error = launch("evaluate", model=run / "checkpoints/step_00000001")
    assert code == 2 and "a checkpoint of a run, which is no model; docs/fork.md says how" in error
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints/step_00000002")
    args = json.loads((copy / "run.json").read_text())["args"]
    run_toy(ttrl, **args | dict(resume=True, out=str(copy), steps=1))
    stored = {}
    for file in (copy / "checkpoints/step_00000001").glob("*.safetensors"):
        stored |= load_file(file)
    final = load_file(copy / "final/model.safetensors")
    assert final and all(torch.equal(stored[name], tensor) for name, tensor in final.items())
    said = {}
    for name in ("run/final", "run", "copy", ""):
        out, model = tmp_path / f"of-{name.replace('/', '-')}", str(tmp_path / name) if name else ""
        evaluate.main(evaluate.Args(model=model, benchmarks="toy", out=str(out), preset="toy", samples=1,
                                    max_new_tokens=48, save_generations=True))
        said[name] = (out / "generations.jsonl").read_text()
        assert json.loads((out / "results.json").read_text())["model"] == (model or "the toy")
    assert said["run/final"] == said["run"] and len(set(said.values())) == 3


def test_the_toy_by_its_name_has_its_own_settings(launch):
    code, out, _ = launch("evaluate", model="toy", show_prompt=True)
    assert code == 0 and "--model toy runs with these overrides" in out and "--preset toy" in out
    assert "first problem of toy" in out


def test_a_trained_toy_without_its_settings_is_told_of_them(launch, tmp_path):
    shutil.copytree(ROOT / "toy", tmp_path / "toy")
    code, _, error = launch("evaluate", model=tmp_path / "toy", benchmarks="toy")
    assert code == 2 and error.endswith("lower one of them (evaluate.py --preset toy has a trained toy's).\n")


def test_math_verify_grades_the_text_and_our_classes_vote():
    """A right number outside a box is right then; votes and what they are right about stay our classes."""
    said = [("5", r"\boxed{5}"), (None, "The answer is $5$."), ("5.0", r"\boxed{5.0}"), ("6", r"\boxed{6}")]
    responses = [Rollout([], [0], torch.zeros(1), True, text, answer) for answer, text in said]
    problem = Problem("2 + 3?", "5")
    ours = grade(problem, responses)
    theirs, _ = evaluate.math_verify_grades(problem, ours, responses)
    assert ours["correct"] == [True, False, True, False] and theirs["correct"] == [True, True, True, False]
    assert theirs["classes"] == ours["classes"] and theirs["right"] == ours["right"] == {0}
