"""EVOL-RL against numbers worked out by hand from sections 2.2 and A.3, signs of its gradients, and runs."""

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import run_toy, toy_args, toy_of
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import evol_rl
import ttrl
from engine.embedder import Embedder, embedder_path
from evol_rl import Args, embed_texts, evol_rewards, novelty, scaled_novelty, spoken, valid_classes

TOY_EMBEDDER = toy_of(evol_rl)["embedder"]


def unit(*degrees):
    """[n, 2] unit vectors at these angles: their cosines are those of the differences."""
    radians = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], 1)


def test_defaults_are_the_papers():
    """Section 3.1; Tables 3, 4; evaluation: Table 1, in the released test with top-k 20; not on the toy."""
    args = Args()
    assert (args.votes, args.train_samples, args.max_new_tokens, args.temperature) == (64, 32, 12288, 1)
    assert (args.prompts_per_batch, args.num_minibatches, args.lr, args.kl_coef) == (8, 8, 5e-7, 0.001)
    assert (args.clip_high, args.entropy_coef, args.alpha) == (0.28, 0.003, 0.5)
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


def test_novelty():
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


def test_scaled_novelty():
    similarity = VECTORS @ VECTORS.T
    valid = [0, 1, 2, 3, 4]
    assert scaled_novelty(similarity, [0, 1, 2], valid).tolist() == [0.0, 0.0, 1.0]
    # A block of 0, 1, 2 and 4.
    # 0, 1: mean (1 + 0.5 - 0.866025) / 3 = 0.211325, max 1, u = 1 - 0.105662 - 0.5 = 0.394338
    # 2: mean (0.5 + 0.5 + 0) / 3 = 1/3, max 0.866025, u = 1 - 0.166667 - 0.433013 = 0.400321
    # 4: mean (-0.866025 - 0.866025 + 0) / 3 = -0.577350, max 0.5, u = 1 + 0.288675 - 0.25 = 1.038675
    # u~ of 2: (0.400321 - 0.394338) / (1.038675 - 0.394338) = 0.009286
    scaled = scaled_novelty(similarity, [0, 1, 2, 4], valid)
    assert scaled.tolist() == pytest.approx([0, 0, 0.009286, 1], abs=2e-6)
    assert scaled_novelty(similarity, [0, 1], valid).tolist() == [0.5, 0.5]  # equally novel
    assert scaled_novelty(similarity, [3], valid).tolist() == [1.0]          # alone
    assert scaled_novelty(similarity, [], valid).tolist() == []


def test_rewards():
    # u~: majority 0, 0, 1; minority (different wrong answers are one block) 0, 1
    assert evol_rewards(CLASSES, VECTORS).tolist() == [0.5, 0.5, 1.0, -1.0, -0.5]
    # Three at 0, 60 and 90 degrees, alpha 1: means (0.5 + 0) / 2 = 0.25, (0.5 + 0.866) / 2 = 0.683,
    # (0 + 0.866) / 2 = 0.433; u = 0.75, 0.317, 0.567; u~ = 1, 0, 0.25 / 0.433 = 0.57735
    rewards = evol_rewards([0, 0, 0], unit(0, 60, 90), alpha=1.0)
    assert rewards.tolist() == pytest.approx([1.0, 0.5, 0.5 + 0.5 * 0.57735])
    # The same as a minority, by another winner
    rewards = evol_rewards([0, 0, 0], unit(0, 60, 90), 1.0, winner=-1)
    assert rewards.tolist() == pytest.approx([-0.5, -1.0, -1 + 0.5 * 0.57735])


def test_invalid_responses_get_minus_one_and_change_nothing():
    vectors = torch.cat([unit(60), VECTORS[:2], unit(0), VECTORS[2:]])
    rewards = evol_rewards([None, 0, 0, None, 0, 1, 2], vectors)
    assert rewards.tolist() == [-1.0, 0.5, 0.5, -1.0, 1.0, -1.0, -0.5]
    rewards = evol_rewards([None, None, 0, None], unit(0, 1, 2, 3))
    assert rewards.tolist() == [-1.0, -1.0, 1.0, -1.0]  # the only valid one wins
    assert evol_rewards([None, None], unit(0, 1)).tolist() == [-1.0, -1.0]


def test_alone_in_its_block():
    rewards = evol_rewards([0, 0, 1], unit(0, 0, 0))
    assert rewards.tolist() == [0.75, 0.75, -0.5]  # not -1, which is for invalid responses
    assert evol_rewards([0], unit(0)).tolist() == [1.0]
    assert evol_rewards([0, 1], unit(0, 0)).tolist() == [1.0, -0.5]  # a tie: the class seen first
    # All in the majority: there is no second block. 0, 60 degrees: both u = 1 - 0.5
    assert evol_rewards([3, 3], unit(0, 60)).tolist() == [0.75, 0.75]


def test_equal_novelty():
    rewards = evol_rewards([0] * 3 + [1] * 2, unit(10, 10, 10, 50, 50))
    assert rewards.tolist() == [0.75] * 3 + [-0.75] * 2
    # Differences of float32 rounding are none: u differ by less than 1e-6
    assert evol_rewards([0] * 3, unit(0, 1e-3, 2e-3)).tolist() == [0.75] * 3
    # 0, 0, 5.73 degrees (0.1 rad, cosine 0.995): u = 1 - 0.5 * 0.9975 - 0.5 = 0.00125 twice, then 0.005
    assert evol_rewards([0] * 3, unit(0, 0, 5.73)).tolist() == [0.5, 0.5, 1.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=12), st.integers(0, 10 ** 6),
       st.sampled_from([0.0, 0.5, 1.0]))
def test_any_majority_response_outranks_any_minority_one(classes, seed, alpha):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.nn.functional.normalize(torch.randn(len(classes), 4, generator=generator), dim=-1)
    winner = common.majority(classes)
    rewards = evol_rewards(classes, vectors, alpha).tolist()
    for c, reward in zip(classes, rewards):
        low, high = (0.5, 1) if c == winner else (-1, -0.5)
        assert reward == -1 if c is None else low <= reward <= high
    # A response's reward does not depend on the order in which they are given
    order = torch.randperm(len(classes), generator=generator).tolist()
    again = evol_rewards([classes[i] for i in order], vectors[order], alpha, winner)
    assert again.tolist() == pytest.approx([rewards[i] for i in order], abs=1e-5)


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


def test_bands_around_the_gold_answer():
    # No correct response: all valid ones are in the lower band, although there is a majority
    assert evol_rewards([0, 1, None, 1], unit(0, 30, 0, 90), winner=-1).max() <= -0.5
    # A correct minority is in the upper band
    rewards = evol_rewards([0, 1, None, 1], unit(0, 30, 0, 90), winner=0)
    assert rewards.tolist() == [1.0, -1.0, -1.0, -0.5]


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


def test_failing_embedder_stops(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(embedder_path(TOY_EMBEDDER), folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(common.UserError, match="^--embedder is .*, but must be"):
        Embedder(str(folder))
    embedder = Embedder(TOY_EMBEDDER)

    def encode(texts, **options):
        return torch.full((len(texts), 2), math.nan)

    monkeypatch.setattr(embedder.model, "encode", encode)
    with pytest.raises(ValueError, match="embeddings are not finite"):
        embedder(["text"])


def test_paper_defaults():
    args = Args()
    assert args.errors() == [] and args.embedder == "Qwen/Qwen3-Embedding-4B"
    assert (args.alpha, args.clip_low, args.clip_high) == (0.5, 0.2, 0.28)
    assert (args.entropy_coef, args.kl_coef, args.lr, args.epochs) == (0.003, 0.001, 5e-7, 3)
    assert (args.votes, args.train_samples, args.temperature, args.max_new_tokens) == (64, 32, 1.0, 12288)


# ---------------------------------------------------- runs -----------------------------------------------
TINY = dict(steps=1, max_new_tokens=64, train_samples=4)


def test_run_with_a_real_embedder(tmp_path):
    line, = run_toy(evol_rl, tmp_path / "run", **TINY)
    assert line["grad_norm"] > 0 and line["logp_diff_max"] < 1e-3 and -1 <= line["reward"] <= 1
    assert line["seconds/embed"] > 0  # the embedding step is timed on its own


def write_alternately(monkeypatch, invalid="pi"):
    """Of a prompt's eight responses three answer 0, three 1, two are invalid; all say so after a thought."""
    def decode(run, responses, problem):
        for i, r in enumerate(responses):
            r.text, r.answer = f"thought {i}</think> so it is {i % 2}", str(i % 2) if i < 6 else invalid

    monkeypatch.setattr(common.Run, "decode", decode)


@pytest.mark.parametrize("invalid, expected", [
    ("pi", [" so it is 0", " so it is 1"]),
    (None, [" so it is 0", " so it is 1", ""])])
def test_thoughts_are_not_embedded(invalid, expected, tmp_path, monkeypatch):
    texts = []

    def embed(embedder, batch):
        texts.extend(batch)
        return list(torch.nn.functional.normalize(torch.randn(len(batch), 3), dim=-1))

    write_alternately(monkeypatch, invalid)
    monkeypatch.setattr(Embedder, "__call__", embed)
    line, = run_toy(evol_rl, tmp_path / "run", **TINY)
    assert texts == expected
    # 0, seen first, is the majority; equal texts are equally novel: (3 * 0.75 - 3 * 0.75 - 2) / 8 = -0.25
    assert line["reward"] == pytest.approx(-0.25)


def test_without_its_parts_it_is_ttrl(tmp_path):
    """Without novelty, wider clip and entropy bonus what remains is the vote of valid answers."""
    parts = dict(novelty=False, embedder="none is loaded", clip_high=0.2, entropy_coef=0.0)
    flags = TINY | dict(steps=2)
    ours = run_toy(evol_rl, tmp_path / "ours", **flags, **parts)
    theirs = run_toy(ttrl, tmp_path / "theirs", **flags)
    assert any(line["grad_norm"] > 0 for line in ours)
    for a, b in zip(ours, theirs, strict=True):
        for name in "loss grad_norm reward length kl entropy label_accuracy clip_fraction".split():
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


def test_right_answer_without_a_digit_is_in_the_upper_band(tmp_path, monkeypatch):
    answers = ["\\pi", "4", "4", "4", "4", "y", "y", None]

    def decode(run, responses, problem):
        problem.answer = "\\pi"
        for r, answer in zip(responses, answers):
            r.text, r.answer = f"{answer}", answer

    rewards, log_group = [], common.Run.log_group

    def note(run, prompt, responses, classes, rewards_N, trained, label):
        rewards.append(rewards_N.tolist())
        log_group(run, prompt, responses, classes, rewards_N, trained, label)

    monkeypatch.setattr(common.Run, "decode", decode)
    monkeypatch.setattr(common.Run, "log_group", note)
    line, = run_toy(evol_rl, tmp_path / "run", **TINY, labels="gold")
    # alone in its band: 1; the four 4s are equally novel: -0.75; y is invalid
    assert rewards == [[1.0] + [-0.75] * 4 + [-1.0] * 3] * 4
    assert line["reward_accuracy"] == line["label_accuracy"] == 1 and line["majority_accuracy"] == 0


# -- signs of the gradients, in the loop itself -----------------------------------------------------------
# nothing moves the policy but what a test turns on
QUIET = dict(kl_coef=0.0, weight_decay=0.0, novelty=False, lr=1e-4, warmup=0.0)


def change_of(monkeypatch, name):
    """A list that gets how much a step changed old_logp or entropy, summed over the trained tokens."""
    sums, end_step = [], common.Run.end_step

    def compare(run, extra=None):
        again = [replace(r, old_logp=None, ref_logp=None, entropy=None) for r in run.trained]
        run.policy.score_old(again, run.args.temperature)
        changes = [getattr(a, name) - getattr(r, name) for a, r in zip(again, run.trained)]
        sums.append(float(torch.cat(changes).sum()))
        end_step(run, extra)

    monkeypatch.setattr(common.Run, "end_step", compare)
    return sums


@pytest.mark.parametrize("clip_high, moves", [(0.28, True), (0.2, False)])
def test_clip_higher_lets_rising_probabilities_rise_further(clip_high, moves, tmp_path, monkeypatch):
    """All advantages are 1, and the old log-probs are such that all ratios start from 1.25."""
    score_old = common.Policy.score_old

    def shifted(policy, rollouts, temperature):
        score_old(policy, rollouts, temperature)
        for r in rollouts:
            r.old_logp = r.old_logp - math.log(1.25)

    monkeypatch.setattr(evol_rl, "group_advantages", torch.ones_like)
    flags = TINY | QUIET | dict(clip_high=clip_high, entropy_coef=0.0, max_logp_diff=1.0)
    rises = change_of(monkeypatch, "old_logp")  # both are shifted
    monkeypatch.setattr(common.Policy, "score_old", shifted)
    line, = run_toy(evol_rl, tmp_path / "run", **flags)
    if moves:
        assert line["grad_norm"] > 0 and rises[0] > 0
    else:
        assert line["grad_norm"] == 0 and line["clip_fraction"] == pytest.approx(1.0)
        assert rises[0] == pytest.approx(0, abs=1e-2)


@pytest.mark.parametrize("coef", [1.0, 0.0])
def test_entropy_bonus_raises_entropy(coef, tmp_path, monkeypatch):
    monkeypatch.setattr(evol_rl, "group_advantages", torch.zeros_like)
    rises = change_of(monkeypatch, "entropy")
    line, = run_toy(evol_rl, tmp_path / "run", **TINY | QUIET, entropy_coef=coef)
    assert (line["grad_norm"] > 0) == (coef > 0)
    assert rises[0] > 0.1 if coef else rises[0] == pytest.approx(0.0, abs=1e-2)
