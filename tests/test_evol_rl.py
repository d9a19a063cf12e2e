"""EVOL-RL against numbers worked out by hand from sections 2.2 and A.3, the embedder, and runs."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import run_toy, toy_args, toy_of

import common
import evol_rl
from engine.embedder import Embedder
from evol_rl import Args, embed_texts, evol_rewards, novelty, scaled_novelty, spoken, valid_classes

TOY_EMBEDDER = toy_of(evol_rl)["embedder"]


def unit(*degrees):
    """[n, 2] unit vectors at these angles: their cosines are those of the differences."""
    radians = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], 1)


def test_defaults_are_the_papers():
    """Section 3.1; Tables 3, 4; A.3; evaluation: Table 1, the released test's top-k; not on the toy."""
    args = Args()
    assert args.errors() == [] and args.embedder == "Qwen/Qwen3-Embedding-4B"
    assert (args.votes, args.train_samples, args.max_new_tokens, args.temperature) == (64, 32, 12288, 1)
    assert (args.prompts_per_batch, args.num_minibatches, args.lr, args.epochs) == (8, 8, 5e-7, 3)
    assert (args.alpha, args.clip_low, args.clip_high) == (0.5, 0.2, 0.28)
    assert (args.entropy_coef, args.kl_coef) == (0.003, 0.001)
    assert (args.eval_samples, args.eval_temperature, args.eval_top_p, args.eval_top_k) == (32, 0.6, 0.95, 20)
    toy = toy_of(evol_rl)
    assert (toy["eval_samples"], toy["eval_top_k"]) == (16, 0)


# ------------------------------------------------ section 2.2 --------------------------------------------
# Angles 0, 0, 60 (majority), 90, 150 (minority).
# Cosines: 0 deg 1, 30 deg 0.8660, 60 deg 0.5, 90 deg 0, 150 deg -0.8660.
#   0 (0 deg):   mean of (1, 0.5) = 0.75, max of (1, 0.5, 0, -0.866) = 1:        u = 1 - 0.375 - 0.5 = 0.125
#   1 (0 deg):   the same
#   2 (60 deg):  mean of (0.5, 0.5) = 0.5, max of (0.5, 0.5, 0.866, 0) = 0.866:  u = 1 - 0.25 - 0.433 = 0.317
#   3 (90 deg):  mean of (0.5,), max of (0, 0, 0.866, 0.5) = 0.866:              u = 0.317
#   4 (150 deg): mean of (0.5,), max of (-0.866, -0.866, 0, 0.5) = 0.5:          u = 1 - 0.25 - 0.25 = 0.5
CLASSES, VECTORS = [0, 0, 0, 1, 2], unit(0, 0, 60, 90, 150)


def test_novelty_by_hand():
    similarity = VECTORS @ VECTORS.T
    valid = [0, 1, 2, 3, 4]
    assert novelty(similarity, [0, 1, 2], valid).tolist() == pytest.approx([0.125, 0.125, 0.3169873])
    assert novelty(similarity, [3, 4], valid).tolist() == pytest.approx([0.3169873, 0.5])
    # alpha 1: the mean alone; alpha 0: the maximum alone
    assert novelty(similarity, [0, 1, 2], valid, alpha=1.0).tolist() == pytest.approx([0.25, 0.25, 0.5])
    assert novelty(similarity, [0, 1, 2], valid, alpha=0.0).tolist() == pytest.approx([0.0, 0.0, 0.1339746])
    # Opposite directions are more novel than unrelated ones: 0 and 180 degrees, mean and max -1, u = 2
    opposite = unit(0, 180) @ unit(0, 180).T
    assert novelty(opposite, [0, 1], [0, 1]).tolist() == pytest.approx([2.0, 2.0])
    # The maximum is over all valid responses: without 3 (90 deg) that of 2 falls to 0.5, u = 1 - 0.25 - 0.25
    assert novelty(similarity, [0, 1, 2], [0, 1, 2, 4]).tolist() == pytest.approx([0.125, 0.125, 0.5])


def test_min_max_of_novelty_by_hand():
    similarity = VECTORS @ VECTORS.T
    valid = [0, 1, 2, 3, 4]
    # A block of 0, 1, 2 and 4.
    # 0, 1: mean (1 + 0.5 - 0.866025) / 3 = 0.211325, max 1, u = 1 - 0.105662 - 0.5 = 0.394338
    # 2: mean (0.5 + 0.5 + 0) / 3 = 1/3, max 0.866025, u = 1 - 0.166667 - 0.433013 = 0.400321
    # 4: mean (-0.866025 - 0.866025 + 0) / 3 = -0.577350, max 0.5, u = 1 + 0.288675 - 0.25 = 1.038675
    # u~ of 2: (0.400321 - 0.394338) / (1.038675 - 0.394338) = 0.009286
    scaled = scaled_novelty(similarity, [0, 1, 2, 4], valid)
    assert scaled.tolist() == pytest.approx([0, 0, 0.009286, 1], abs=2e-6)


# 0, 60 and 90 degrees with alpha 1 have u = 0.75, 0.317, 0.567: means (0.5 + 0) / 2 = 0.25,
# (0.5 + 0.866) / 2 = 0.683, (0 + 0.866) / 2 = 0.433; u~ = 1, 0, 0.25 / 0.433 = 0.57735
@pytest.mark.parametrize("classes, degrees, flags, expected", [
    # u~: majority 0, 0, 1; minority (different wrong answers are one block) 0, 1
    (CLASSES, (0, 0, 60, 90, 150), {}, [0.5, 0.5, 1, -1, -0.5]),
    ([0, 0, 0], (0, 60, 90), dict(alpha=1.0), [1, 0.5, 0.5 + 0.5 * 0.57735]),
    ([0, 0, 0], (0, 60, 90), dict(alpha=1.0, winner=-1), [-0.5, -1, -1 + 0.5 * 0.57735]),  # a minority
    # invalid ones get -1 and change nothing
    ([None, 0, 0, None, 0, 1, 2], (60, 0, 0, 0, 60, 90, 150), {}, [-1, 0.5, 0.5, -1, 1, -1, -0.5]),
    ([None, None, 0, None], (0, 1, 2, 3), {}, [-1, -1, 1, -1]),  # the only valid one wins
    ([None, None], (0, 1), {}, [-1, -1]),
    # alone in its block: u~ is 1, so not -1, which is for invalid responses
    ([0, 0, 1], (0, 0, 0), {}, [0.75, 0.75, -0.5]),
    ([0], (0,), {}, [1]),
    ([0, 1], (0, 0), {}, [1, -0.5]),      # a tie: the class seen first
    ([3, 3], (0, 60), {}, [0.75, 0.75]),  # no second block; both u = 1 - 0.5
    # equally novel, also if u differ by rounding, less than 1e-6
    ([0] * 3 + [1] * 2, (10, 10, 10, 50, 50), {}, [0.75] * 3 + [-0.75] * 2),
    ([0] * 3, (0, 1e-3, 2e-3), {}, [0.75] * 3),
    # 0, 0, 5.73 degrees (0.1 rad, cosine 0.995): u = 1 - 0.5 * 0.9975 - 0.5 = 0.00125 twice, then 0.005
    ([0] * 3, (0, 0, 5.73), {}, [0.5, 0.5, 1]),
    # gold labels: without a right response there is no upper band. 0, 30, 90 degrees: u = 0.3505, 0.2255 and
    # 0.625, u~ = 0.312876, 0, 1. A right minority is in the upper band
    ([0, 1, None, 1], (0, 30, 0, 90), dict(winner=-1), [-1 + 0.5 * 0.312876, -1, -1, -0.5]),
    ([0, 1, None, 1], (0, 30, 0, 90), dict(winner=0), [1, -1, -1, -0.5])])
def test_bands_and_their_borders_by_hand(classes, degrees, flags, expected):
    assert evol_rewards(classes, unit(*degrees), **flags).tolist() == pytest.approx(expected, abs=2e-6)


# ---------------------------------------------- validity and gold ----------------------------------------
@pytest.mark.parametrize("answers, flags, classes, winner", [
    # A.2: an answer is valid with a digit
    (["12", "\\frac{1}{2}", "\\pi", "", None, "B", "0.5"], {}, [0, 1, None, None, None, None, 1], 1),
    (["\\pi", "\\pi", "\\pi", "3"], {}, [None, None, None, 3], 3),      # invalid ones do not vote
    (["\\pi", None], {}, [None, None], None),
    (["4", "3", "3", "4"], {}, [0, 1, 1, 0], 0),                        # a tie: the answer seen first
    # letters of multiple choice are valid without one
    ([None, "B", "A", "B"], dict(choices=True), [None, 1, 2, 1], 1),
    # gold labels: the right answer's class is the upper band, also if few gave it; -1: nobody did
    (["3", "4", None, "4"], dict(labels="gold", gold="3"), [0, 1, None, 1], 0),
    (["3", "4", None, "4"], dict(labels="gold", gold="5"), [0, 1, None, 1], -1),
    (["x", "4", "4"], dict(labels="gold", gold="5"), [None, 1, 1], -1),  # x is wrong and has no digit
    # the right answer is valid without a digit, a wrong one is not
    (["\\pi", "4", "y", "\\pi"], dict(labels="gold", gold="\\pi"), [0, 1, None, 0], 0),
    (["B", "A"], dict(labels="gold", gold="A", choices=True), [0, 1], 1),
    (["1/2", "0.5"], dict(labels="gold", gold="\\frac{1}{2}"), [0, 0], 0)])
def test_valid_classes(answers, flags, classes, winner):
    problem = common.Problem("p", flags.get("gold", "7"), choices=flags.get("choices", False))
    responses = [SimpleNamespace(answer=answer) for answer in answers]
    found, upper = valid_classes(problem, responses, flags.get("labels", "majority"))
    if winner is not None and winner >= 0:  # names of classes are free: compare their members
        assert [c == upper for c in found] == [c == winner for c in classes]
    else:
        assert upper == winner
    assert [c is None for c in found] == [c is None for c in classes]
    pairs = set(zip(classes, found))  # one to one
    assert len(pairs) == len(set(classes)) == len(set(found))


# ------------------------------------------------ the embedder -------------------------------------------
def response(text, answer="1") -> SimpleNamespace:
    return SimpleNamespace(text=text, answer=answer)


@pytest.mark.parametrize("text, answer, expected", [
    ("no thoughts", "1", "no thoughts"),
    ("<think>long</think> short", "1", " short"),
    ("<think>a</think> b</think> c", "1", " b</think> c"),  # from the first end of thoughts on
    ("<think>never ends", "1", "<think>never ends"),
    ("all sorts of things", None, "")])
def test_spoken(text, answer, expected):
    assert spoken(response(text, answer)) == expected


def test_equal_texts_are_embedded_once():
    calls = []

    def embedder(texts):
        calls.append(texts)
        return [torch.tensor([float(len(text))]) for text in texts]

    groups = [[response("one"), response("three"), response("x</think>one")],
              [response("?", None), response("one")]]
    vectors = embed_texts(embedder, groups)
    assert calls == [["one", "three", ""]]  # "": without an answer
    assert {text: vector.tolist() for text, vector in vectors.items()} == {"one": [3], "three": [5], "": [0]}


def test_embedder():
    embedder, words = Embedder(TOY_EMBEDDER), " apple" * 1000
    texts = ["Tom buys 3 apples.", "Anna sells 5 pears.", "Tom buys 3 apples."]
    first, second, third = embedder(texts)
    assert first.shape == (384,) and first.norm() == pytest.approx(1.0)
    assert first @ third > 0.9999 and first @ second < 0.9
    assert embedder([]) == []
    # long texts lose their beginning
    end, begin, none = embedder([words + " The answer is twelve.", "The answer is twelve." + words, words])
    assert begin @ none > 0.9999 and end @ none < 0.999


def test_hashed_words_are_the_same_in_every_process_and_need_no_model():
    """python's own hash() differs from process to process, and with it the novelty rewards of two ranks."""
    code = ("from engine.embedder import Embedder; "
            "print(Embedder('words')(['so 2 + 2', 'so 2 + 2', 'a b', ''])[0].nonzero()[:, 0].tolist())")
    done = subprocess.run([sys.executable, "-c", code], cwd=common.TOY_MODEL + "/..", capture_output=True,
                          text=True)
    here = Embedder("words")(["so 2 + 2", "2 so 2 +", "a b", ""])
    assert done.stdout.strip() == str(here[0].nonzero()[:, 0].tolist()) and len(here[0].nonzero()) == 3
    assert here[0] @ here[0] == pytest.approx(1.0) and torch.equal(here[0], here[1])
    # counts 1, 2, 1 of so, 2, + against 1, 1 of a, b: no word in common; the same two words, one twice
    assert here[0] @ here[2] == 0 and not here[3].any()
    once, twice = Embedder("words")(["a b", "a b b"])
    assert once @ twice == pytest.approx((1 * 1 + 1 * 2) / (2 * 5) ** 0.5)


@pytest.mark.parametrize("name", ["", "/no/such/folder", "package:no_such_package", common.TOY_MODEL])
def test_wrong_embedder(name, monkeypatch):
    monkeypatch.setattr(common, "Run", None)  # it shows before any weights are loaded
    with pytest.raises(common.UserError) as error:
        evol_rl.main(toy_args(evol_rl, embedder=name))
    rule = "must be words, or a Hub id, a folder or package:NAME of a sentence-transformers model: "
    assert str(error.value).startswith(f"--embedder is {name!r}, but {rule}")


# ---------------------------------------------------- runs -----------------------------------------------
TINY = dict(steps=1, max_new_tokens=64, train_samples=4)


def test_run_with_a_real_embedder(tmp_path):
    line, = run_toy(evol_rl, tmp_path / "run", **TINY)
    assert line["grad_norm"] > 0 and line["logp_diff_max"] < 1e-3 and -1 <= line["reward"] <= 1
    assert line["seconds/embed"] > 0  # the embedding step is timed on its own
