"""lab.claims.claims: records, verdicts and values; the runs themselves are its user's."""

import dataclasses
import random

import pytest

from lab.claims import claims
from lab.claims.claims import CLAIMS, Claim
from lab import compare

PAIR = Claim("X", "", "", "", ["a", "b"], "uneven", "pass@1", +1, .05, "")


def rows_of(first: list[float], second: list[float]) -> dict:
    def row(values: list[float]) -> dict:
        return dict(runs=[{"seed": i, "pass@1": x} for i, x in enumerate(values)])

    return dict(a=row(first), b=row(second))


# ------------------------------------------------ records -----------------------------------------------
def test_every_claim_is_of_a_regime_and_names_its_problems():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    greedy = [name for name, *_ in compare.GREEDY]
    for claim in CLAIMS:
        assert claim.regime in ("uneven", "even", "53%", "62%", "VOTES"), claim.id
        assert "problems" in claim.here or claim.metric == "4 operations", f"{claim.id}: of which problems?"
        known = [*greedy, *compare.SAMPLED, *compare.CURVES, "corrupted less learned", ""]
        assert claim.metric in known, claim.id


def test_the_pages_are_those_of_the_records_and_results_as_they_stand():
    for path, text in claims.pages().items():
        assert path.read_text() == text, path


# ------------------------------------------------ verdicts ----------------------------------------------
def test_the_paired_t_by_hand():
    # differences .1 .2 .3: mean .2, standard error .1 / sqrt(3), t(.975, 2) = 4.303, t(.9, 2) = 1.886
    result = claims.judge(PAIR, rows_of([.5, .7, .9], [.4, .5, .6]))
    assert result["mean"] == pytest.approx(.2) and result["low"] == pytest.approx(.2 - .2484, abs=1e-4)
    assert result["detectable"] == pytest.approx(.0577 * 6.189, abs=1e-3)
    assert result["p"] == pytest.approx(.0742, abs=1e-4) and result["verdict"] == "not shown here"


@pytest.mark.parametrize("first, verdict", [
    ([.50, .51, .52, .50], "shown"), ([.43, .44, .43, .44], "not shown here"),  # below the margin of .05
    ([.1, .9, .2, .8], "not shown here"), ([.2, .21, .2, .19], "opposite"), ([.4] * 4, "not shown here")])
def test_the_rule_needs_the_interval_and_the_margin(first, verdict):
    assert claims.judge(PAIR, rows_of(first, [.4] * 4))["verdict"] == verdict


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
def test_greedy_answers_are_compared_problem_by_problem():
    claim = dataclasses.replace(PAIR, metric="4 operations", margin=0)
    runs = [{"seed": i, "greedy": {"ood": compare.pack([1, 1, 1, 0] * 25)}} for i in range(3)]
    others = [{"seed": i, "greedy": {"ood": compare.pack([1, 0, 0, 0] * 25)}} for i in range(3)]
    result = claims.judge(claim, dict(a=dict(runs=runs), b=dict(runs=others)))
    assert result["mean"] == .5 and result["first"] == [.75] * 3 and result["verdict"] == "shown"
    half = dataclasses.replace(claim, arms=["a", "0.7"])  # a number: .05 above it, of 100 problems
    assert claims.judge(half, dict(a=dict(runs=runs)))["verdict"] == "not shown here"


def test_what_a_metric_reads():
    run = {"seed": 1, "corrupted": .3, "learned": .1, "entropy": [.9, .2], "maj@8": .5}
    assert claims.value(run, "corrupted less learned") == pytest.approx(.2)
    assert claims.value(run, "entropy") == .2 and claims.value(run, "entropy", first=True) == .9
    claim = dataclasses.replace(PAIR, arms=["a", "first step"], metric="entropy", direction=-1)
    result = claims.judge(claim, dict(a=dict(runs=[run | dict(seed=i) for i in range(3)])))
    assert result["mean"] == pytest.approx(-.7) and result["verdict"] == "shown"


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
