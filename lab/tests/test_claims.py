"""lab.claims.claims: records, verdicts and values; the runs themselves are its user's."""

import dataclasses
import json
import random

import pytest
from conftest import write_run

from engine.base import UserError
from lab.claims import claims
from lab.claims.claims import CLAIMS, REGIMES, Claim

PAIR = Claim("X", "", "", ["a.py", "b.py"], "HARD", "end eval/toy_ood/pass@1", +1, .05, [1, 2, 3], "")


# ------------------------------------------------ records -----------------------------------------------
def test_every_claim_has_one_regime_no_rate_of_its_own_and_no_development_seed():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert not [seed for seed in claim.seeds if seed >= 101], claim.id
        assert not any("--lr" in arm or "--seed" in arm for arm in claim.arms), claim.id
        assert claim.regime in {*REGIMES, "VOTES"} or claim.note, f"{claim.id}: why can it not be tested?"
        assert not claim.lacks or claims.page_rows()[claim.id]["verdict"] == "not testable here"


def test_results_are_those_of_the_records_as_they_stand():
    results = claims.read_results()
    assert results, "lab/claims/results.json is empty"
    for path, text in claims.pages().items():
        assert path.read_text() == text, path


def test_a_changed_record_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "RESULTS", tmp_path / "claims.json")
    claims.keep(CLAIMS[0], "last entropy", dict(verdict="shown"))
    assert list(claims.read_results()) == [CLAIMS[0].id]
    claims.RESULTS.write_text(json.dumps({CLAIMS[0].id: dict(record="0" * 16)}))
    with pytest.raises(UserError, match=f"of another record of {CLAIMS[0].id}: the claim has changed"):
        claims.read_results()


# ------------------------------------------------ verdicts ----------------------------------------------
def test_the_paired_t_by_hand():
    # differences .1 .2 .3: mean .2, standard error .1 / sqrt(3), t(.975, 2) = 4.303, t(.9, 2) = 1.886
    result = claims.judge([.5, .7, .9], [.4, .5, .6], PAIR)
    assert result["mean"] == pytest.approx(.2) and result["low"] == pytest.approx(.2 - .2484, abs=1e-4)
    assert result["detectable"] == pytest.approx(.0577 * 6.189, abs=1e-3)
    assert result["p"] == pytest.approx(.0742, abs=1e-4) and result["verdict"] == "not shown here"


@pytest.mark.parametrize("first, verdict", [
    ([.50, .51, .52, .50], "shown"), ([.43, .44, .43, .44], "not shown here"),  # below the margin of .05
    ([.1, .9, .2, .8], "not shown here"), ([.2, .21, .2, .19], "opposite"), ([.4] * 4, "not shown here")])
def test_the_rule_needs_the_interval_and_the_margin(first, verdict):
    assert claims.judge(first, [.4] * 4, PAIR)["verdict"] == verdict


def test_with_shuffled_labels_of_votes_shown_is_as_rare_as_it_should_be():
    draw, said = random.Random(1), []
    claim = dataclasses.replace(PAIR, arms=["right | clear", "right | unclear"], margin=0)
    for _ in range(200):
        rows = []
        for _ in range(40):
            clear = draw.random() < .5
            rows.append([dict(right=draw.random() < .6, clear=clear, unclear=not clear)])
        said.append(claims.judge_votes(rows, claim, resamples=100)["verdict"])
    assert said.count("shown") <= 14


def test_holm_by_hand():
    assert claims.holm(dict(a=.01, b=.04, c=.03)) == pytest.approx(dict(a=.03, c=.06, b=.06))


# ------------------------------------------------- values -----------------------------------------------
def test_what_a_metric_reads(tmp_path):
    lines = [dict(step=0) | {"eval/toy/pass@1": .5}]
    curve = [.5] * 10 + [.9] * 10 + [.3] * 10
    lines += [{"step": i + 1, "batch_pass@1": x} for i, x in enumerate(curve)]
    lines[-1]["eval/toy/pass@1"] = .25
    run = write_run(tmp_path / "run", {}, metrics=lines)
    (run / "evaluations.jsonl").write_text(
        '{"step": 0, "benchmark": "toy", "right": [0.5, 0.25], "majority": [true, false]}\n'
        '{"step": 0, "benchmark": "toy_test", "right": [0.0, 0.0], "majority": [true, false]}\n'
        '{"step": 30, "benchmark": "toy", "right": [1.0, 0.0], "majority": [true, false]}\n'
        '{"step": 30, "benchmark": "toy_test", "right": [1.0, 1.0], "majority": [true, false]}\n')
    assert claims.value(run, "end eval/toy/pass@1") == .25
    assert claims.value(run, "end eval/toy/pass@1", start=True) == .5
    assert claims.value(run, "last batch_pass@1") == pytest.approx(.3)
    assert claims.value(run, "mean batch_pass@1") == pytest.approx(17 / 30)
    assert claims.value(run, "sharpening") == pytest.approx(.75)


def test_who_was_corrupted_less_who_learned(tmp_path):
    majorities = dict(a=[True, False], b=[True, False], c=[False, True], d=[True, True])  # problem: right?
    votes = []
    for i in range(2):
        for name, right in majorities.items():
            votes.append(dict(problem=name, right=right[i], flipped=None))
    run = write_run(tmp_path / "run", {}, votes=votes)
    assert claims.value(run, "corrupted less learned") == 1 / 4


@pytest.mark.parametrize("labels, steps", [
    ([.7] * 40, 41 - 21),  # no epoch is worse than the first: to the end
    ([.7] * 16 + [.5] * 24, 19 - 21)])  # steps 12 to 19: three of eight at .5, a mean of .625
def test_steps_from_the_flips_fall_to_that_of_the_labels(tmp_path, labels, steps):
    lines = [dict(step=0)]
    for step, label in enumerate(labels, 1):
        lines.append(dict(step=step, label_accuracy=label))
        if step > 8:  # nothing was seen before in the first epoch
            lines[-1]["flip_rate"] = .5 if step < 17 else .1  # steps 14 to 21: five of eight at .1, .25
    run = write_run(tmp_path / "run", {}, metrics=lines)
    assert claims.value(run, "flips before labels") == steps


def test_a_votes_row_by_hand():
    # eight votes: the answer 0 four times (wrong), 1 twice (right), 2 once, none once
    classes, entropies = [0, 0, 0, 0, 1, 1, 2, None], [.1, .1, .1, .1, .2, .2, .9, .9]
    row = claims.vote_row(classes, [c == 1 for c in classes], entropies)
    assert row["wrong"] and row["clear"] and row["many"] and row["seen"] and row["positive"]
    assert row["share"] == .5 and row["pass@1"] == .25
    assert row["reward right"] == 2 / 8  # only 2 and the missing answer are judged rightly
    assert row["advantage"] == pytest.approx(.5 / (2 / 7) ** .5, rel=1e-4)  # (1 - 1/2) / unbiased std
    assert row["negative right"] is None  # 1/8 is not below tau_neg
    assert row["entropy right"] == pytest.approx(.2) and row["entropy wrong"] == pytest.approx(2.2 / 6)
    assert row["factor"] == pytest.approx(1.2)  # 1 + (.325 - .1) / .325, at most 1.2
    assert claims.measured([row], "right | wrong") == 0 and claims.measured([row], "3") == 3
