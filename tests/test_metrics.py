"""What a run is watched by, against numbers worked out by hand: grading, pass@k, and the votes of a step;
what evaluate.py says of a final model."""

import itertools
import math
import shutil

import pytest
import torch
from conftest import run_toy
from safetensors.torch import load_file

import evaluate
import ttrl
from common import Problem, Rollout, majority
from engine.run_folder import read_run
from engine.metrics import grade, group_metrics, maj_at_k, mean, pass_at_k, step_metrics, summary


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
    # a gold label, in common.answer_classes of --labels gold: all are judged rightly, although the
    # majority, of the answers, is wrong
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
    groups = [group({1: 1.0}, negatives={1, 2}), group({}), group({}, gold=None, negatives={1})]
    metrics = step_metrics(groups)
    assert metrics["label_coverage"] == pytest.approx(1 / 3) and metrics["label_accuracy"] == 1
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


# ------------------------------------------ what a run leaves behind --------------------------------------
def test_a_final_model_scores_as_itself(tmp_path):
    """Every response, of a run's folder and of its final/, not of the base model. As docs/fork.md says, a
    copy that is resumed to end at a checkpoint's step has that checkpoint's weights, bit for bit."""
    run, copy = tmp_path / "run", tmp_path / "copy"  # with a rate that changes what the model says
    run_toy(ttrl, run, steps=2, checkpoint_every=1, lr=2e-3, warmup=0.0)
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints/step_00000002")
    run_toy(ttrl, **read_run(copy)["args"] | dict(resume=True, out=str(copy), steps=1))
    final, stored = load_file(copy / "final/model.safetensors"), {}
    for file in (copy / "checkpoints/step_00000001").glob("*.safetensors"):
        stored |= load_file(file)
    assert final and all(torch.equal(stored[name], tensor) for name, tensor in final.items())
    said = {}
    for name in ("run/final", "run", "copy", ""):
        out, model = tmp_path / f"of-{name.replace('/', '-')}", str(tmp_path / name) if name else ""
        evaluate.main(evaluate.Args(model=model, benchmarks="toy", out=str(out), preset="toy",
                                    samples=1, max_new_tokens=48, save_generations=True))
        said[name] = (out / "generations.jsonl").read_text()
    assert said["run/final"] == said["run"] and len(set(said.values())) == 3
