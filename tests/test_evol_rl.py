"""EVOL-RL against numbers worked out by hand from sections 2.2 and A.3, its gradients' signs, and runs of every ablation."""

import doctest
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import run_toy
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import evol_rl
from evol_rl import Args, Embedder, evol_rewards, gold_class, novelty, valid_answers

TOY_EMBEDDER = evol_rl.TOY["embedder"]


def unit(*degrees):
    """[n, 2] unit vectors at these angles: their cosines are those of the differences."""
    radians = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], 1)


@pytest.mark.parametrize("name", ["novelty", "evol_rewards"])
def test_doctest(name):
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(getattr(evol_rl, name), name, globs=vars(evol_rl).copy()):
        assert test.examples and runner.run(test).failed == 0


# ------------------------------------------------------ section 2.2 --------------------------------------------------
# Angles 0, 0, 60 (majority), 90, 150 (minority). Cosines: 0 deg 1, 30 deg 0.8660, 60 deg 0.5, 90 deg 0, 150 deg -0.8660.
#   0 (0 deg):   mean of (1, 0.5) = 0.75;    max of (1, 0.5, 0, -0.866) = 1            u = 1 - 0.375  - 0.5   = 0.125
#   1 (0 deg):   the same                                                              u = 0.125
#   2 (60 deg):  mean of (0.5, 0.5) = 0.5;   max of (0.5, 0.5, 0.866, 0) = 0.866       u = 1 - 0.25   - 0.433 = 0.317
#   3 (90 deg):  mean of (0.5,) = 0.5;       max of (0, 0, 0.866, 0.5) = 0.866         u = 0.317
#   4 (150 deg): mean of (0.5,) = 0.5;       max of (-0.866, -0.866, 0, 0.5) = 0.5     u = 1 - 0.25   - 0.25  = 0.5
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
    assert novelty(unit(0, 180) @ unit(0, 180).T, [0, 1], [0, 1]).tolist() == pytest.approx([2.0, 2.0])
    # The maximum is over all valid responses: without 3 (90 deg) that of 2 falls to 0.5, u = 1 - 0.25 - 0.25
    assert novelty(similarity, [0, 1, 2], [0, 1, 2, 4]).tolist() == pytest.approx([0.125, 0.125, 0.5])


def test_rewards():
    # u~: majority 0, 0, 1; minority (different wrong answers are one block) 0, 1
    assert evol_rewards(CLASSES, VECTORS).tolist() == [0.5, 0.5, 1.0, -1.0, -0.5]
    # Three at 0, 60 and 90 degrees, alpha 1: means (0.5 + 0) / 2 = 0.25, (0.5 + 0.866) / 2 = 0.683, (0 + 0.866) / 2 = 0.433;
    # u = 0.75, 0.317, 0.567; u~ = 1, 0, 0.25 / 0.433 = 0.57735
    assert evol_rewards([0, 0, 0], unit(0, 60, 90), alpha=1.0).tolist() == pytest.approx([1.0, 0.5, 0.5 + 0.5 * 0.57735])
    # The same as a minority, by another winner
    assert evol_rewards([0, 0, 0], unit(0, 60, 90), 1.0, winner=-1).tolist() == pytest.approx([-0.5, -1.0, -1 + 0.5 * 0.57735])


def test_invalid_responses_get_minus_one_and_change_nothing():
    rewards = evol_rewards([None, 0, 0, None, 0, 1, 2], torch.cat([unit(60), VECTORS[:2], unit(0), VECTORS[2:]]))
    assert rewards.tolist() == [-1.0, 0.5, 0.5, -1.0, 1.0, -1.0, -0.5]
    assert evol_rewards([None, None, 0, None], unit(0, 1, 2, 3)).tolist() == [-1.0, -1.0, 1.0, -1.0]  # the only valid one wins
    assert evol_rewards([None, None], unit(0, 1)).tolist() == [-1.0, -1.0]


def test_alone_in_its_block():
    assert evol_rewards([0, 0, 1], unit(0, 0, 0)).tolist() == [0.75, 0.75, -0.5]  # not -1, which is for invalid responses
    assert evol_rewards([0], unit(0)).tolist() == [1.0]
    assert evol_rewards([0, 1], unit(0, 0)).tolist() == [1.0, -0.5]  # a tie: the class seen first is the majority
    # All in the majority: there is no second block. 0, 60 degrees: both u = 1 - 0.5
    assert evol_rewards([3, 3], unit(0, 60)).tolist() == [0.75, 0.75]


def test_equal_novelty():
    assert evol_rewards([0] * 3 + [1] * 2, unit(10, 10, 10, 50, 50)).tolist() == [0.75] * 3 + [-0.75] * 2
    # Differences of float32 rounding are none: u differ by less than 1e-6
    assert evol_rewards([0] * 3, unit(0, 1e-3, 2e-3)).tolist() == [0.75] * 3
    # 0, 0, 5.73 degrees (0.1 rad, cosine 0.995): u = 1 - 0.5 * 0.9975 - 0.5 = 0.00125 twice, then 1 - 0.995 = 0.005
    assert evol_rewards([0] * 3, unit(0, 0, 5.73)).tolist() == [0.5, 0.5, 1.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=12), st.integers(0, 10 ** 6), st.sampled_from([0.0, 0.5, 1.0]))
def test_any_majority_response_outranks_any_minority_one(classes, seed, alpha):
    vectors = torch.nn.functional.normalize(torch.randn(len(classes), 4, generator=torch.Generator().manual_seed(seed)), dim=-1)
    rewards, winner = evol_rewards(classes, vectors, alpha).tolist(), common.majority(classes)
    for c, reward in zip(classes, rewards):
        assert reward == -1 if c is None else 0.5 <= reward <= 1 if c == winner else -1 <= reward <= -0.5
    # One pays as much as another that is given in another order
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    again = evol_rewards([classes[i] for i in order], vectors[order], alpha, winner)
    assert again.tolist() == pytest.approx([rewards[i] for i in order], abs=1e-5)


# ------------------------------------------------------ validity and gold --------------------------------------------
def test_valid_answers():
    rollouts = [SimpleNamespace(answer=a) for a in ("12", "\\frac{1}{2}", "\\pi", "", None, "B")]
    assert valid_answers(SimpleNamespace(choices=False), rollouts) == ["12", "\\frac{1}{2}", None, None, None, None]
    assert valid_answers(SimpleNamespace(choices=True), rollouts[-2:]) == [None, "B"]


def test_gold_class():
    rollouts = [SimpleNamespace(answer=a) for a in ("3", "4", None, "4")]
    assert gold_class(SimpleNamespace(answer="4"), rollouts, [0, 1, None, 1]) == 1
    assert gold_class(SimpleNamespace(answer="5"), rollouts, [0, 1, None, 1]) == -1
    # No correct response: all valid ones are in the lower band, although there is a majority
    assert evol_rewards([0, 1, None, 1], unit(0, 30, 0, 90), winner=-1).max() <= -0.5
    # A correct minority is in the upper band
    assert evol_rewards([0, 1, None, 1], unit(0, 30, 0, 90), winner=0).tolist() == [1.0, -1.0, -1.0, -0.5]


# ------------------------------------------------------ the embedder -------------------------------------------------
def test_embedder():
    texts = ["Tom buys 3 apples.", "Anna sells 5 pears.", "Tom buys 3 apples."]
    vectors = Embedder(TOY_EMBEDDER)(texts)
    assert vectors.shape == (3, 384) and vectors.norm(dim=1).tolist() == pytest.approx([1.0] * 3)
    assert vectors[0] @ vectors[2] > 0.9999 and vectors[0] @ vectors[1] < 0.9


def test_embedder_cuts_long_texts_from_the_left():
    embedder, words = Embedder(TOY_EMBEDDER), " apple" * 1000
    end, begin, none = embedder([words + " The answer is twelve.", "The answer is twelve." + words, words])
    assert begin @ none > 0.9999 and end @ none < 0.999


@pytest.mark.parametrize("name", ["", "/no/such/folder", "package:no_such_package", str(common.TOY)])
def test_wrong_embedder(name, monkeypatch):
    monkeypatch.setattr(common, "Run", None)  # it shows before any weights are loaded
    with pytest.raises(common.UserError) as error:
        evol_rl.main(Args(**{**evol_rl.TOY, "embedder": name}))
    message = f"--embedder is {name!r}, but must be a Hub id, a folder or package:NAME of a sentence-transformers model: "
    assert str(error.value).startswith(message)


def test_failing_embedder_stops(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(Path(Embedder(TOY_EMBEDDER).path), folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(common.UserError, match="could not be embedded with --embedder"):
        Embedder(str(folder))(["text"])
    embedder = Embedder(TOY_EMBEDDER)
    embedder(["text"])
    monkeypatch.setattr(embedder.model, "encode", lambda texts, **options: torch.full((len(texts), 2), math.nan))
    with pytest.raises(common.UserError, match="embeddings are not finite"):
        embedder(["text"])


# ------------------------------------------------------ flags --------------------------------------------------------
@pytest.mark.parametrize("alpha", [-0.1, 1.5, math.nan])
def test_bad_flags(alpha):
    assert Args(alpha=alpha).errors() == [f"--alpha is {alpha}, but must be between 0 and 1."]


def test_defaults_are_the_papers():
    args = Args()
    assert (args.alpha, args.clip_low, args.clip_high, args.entropy_coef, args.kl_coef) == (0.5, 0.2, 0.28, 0.003, 0.001)
    assert (args.votes, args.train_samples, args.temperature, args.max_new_tokens, args.lr) == (64, 32, 1.0, 12288, 5e-7)
    assert args.embedder == "Qwen/Qwen3-Embedding-4B" and args.errors() == []


# ------------------------------------------------------ runs ---------------------------------------------------------
def run(folder, **flags):
    return run_toy(evol_rl, folder / "run", **dict(steps=1, train_samples=4, max_new_tokens=128) | flags)


def test_end_to_end(tmp_path):
    lines = run(tmp_path, steps=2, eval="train", eval_samples=4)
    assert [line["step"] for line in lines] == [0, 1, 2] and (tmp_path / "run" / "final" / "config.json").exists()
    for line in lines[1:]:
        assert line["grad_norm"] > 0 and line["sync_max"] < 1e-3 and -1 <= line["reward"] <= 1
        assert line["seconds/embed"] > 0  # the embedding step is timed on its own


@pytest.mark.parametrize("flags", [dict(clip_high=0.2), dict(entropy_coef=0.0), dict(clip_high=0.2, entropy_coef=0.0), dict(novelty=False),
                                   dict(labels="gold"), dict(labels="gold", novelty=False, entropy_coef=0.0), dict(alpha=0.0)])
def test_each_ablation_runs(tmp_path, flags):
    line = run(tmp_path, **flags)[-1]
    assert math.isfinite(line["loss"])
    assert ("seconds/embed" in line) == flags.get("novelty", True)
    if flags.get("labels") == "gold":
        assert line["reward_accuracy"] == 1.0  # the bands lie around gold correctness


def test_without_novelty_the_reward_is_ttrls(tmp_path, monkeypatch):
    seen = []
    original = common.Run.vote_metrics

    def vote_metrics(self, problems, groups, classes, rewards):
        seen.extend(zip(classes, rewards))
        return original(self, problems, groups, classes, rewards)

    monkeypatch.setattr(common.Run, "vote_metrics", vote_metrics)
    run(tmp_path, novelty=False)
    assert len(seen) == 4 and all(rewards.tolist() == evol_rl.majority_reward(classes).tolist() for classes, rewards in seen)


def test_equal_texts_are_embedded_once_and_thoughts_not_at_all(tmp_path, monkeypatch):
    texts = []
    read = common.Run.read

    def same_text(self, rollouts, choices=False):
        read(self, rollouts, choices)
        for i, r in enumerate(rollouts):
            r.text, r.answer = f"thought {i}</think> so it is {i % 2}", str(i % 2) if i < 6 else "pi"

    def embed(self, batch):
        texts.extend(batch)
        return torch.nn.functional.normalize(torch.randn(len(batch), 3), dim=-1)

    monkeypatch.setattr(common.Run, "read", same_text)
    monkeypatch.setattr(Embedder, "__call__", embed)
    line = run(tmp_path)[-1]
    assert texts == [" so it is 0", " so it is 1", ""]  # "": the invalid ones
    # Of eight responses three say 0, the majority, three 1, two are invalid; equal texts are equally novel:
    # (3 * 0.75 - 3 * 0.75 - 2) / 8 = -0.25
    assert line["reward"] == pytest.approx(-0.25)


# -- signs of the gradients, in the loop itself -----------------------------------------------------------------------
def after_the_update(monkeypatch, look):
    """Call look(rollout before, the same scored by the updated policy) -> number on all trained rollouts; the list gets the sum."""
    end_step, sums = common.Run.end_step, []

    def compare(self, metrics, updates, problems, groups):
        trained = [r for g in groups for r in g if r.old_logprobs is not None]
        again = [replace(r) for r in trained]
        self.policy.score(again)
        sums.append(sum(float(look(r, a)) for r, a in zip(trained, again)))
        end_step(self, metrics, updates, problems, groups)

    monkeypatch.setattr(common.Run, "end_step", compare)
    return sums


QUIET = dict(kl_coef=0.0, weight_decay=0.0, novelty=False, lr=1e-4)  # nothing moves the policy but what a test turns on


@pytest.mark.parametrize("clip_high, moves", [(0.28, True), (0.2, False)])
def test_clip_higher_lets_rising_probabilities_rise_further(tmp_path, monkeypatch, clip_high, moves):
    # All advantages are 1, and the old log-probs are set such that all ratios start from 1.25: inside 1.28, outside 1.2
    score = common.Run.score

    def shifted(self, rollouts):
        score(self, rollouts)
        for r in rollouts:
            r.old_logprobs = r.old_logprobs - math.log(1.25)

    monkeypatch.setattr(common.Run, "score", shifted)
    monkeypatch.setattr(evol_rl, "group_advantages", torch.ones_like)
    rises = after_the_update(monkeypatch, lambda old, new: (new.old_logprobs - old.old_logprobs - math.log(1.25)).sum())
    line = run(tmp_path, clip_high=clip_high, entropy_coef=0.0, **QUIET)[-1]
    assert (line["grad_norm"] > 0) == moves
    if moves:
        assert rises[0] > 0
    else:
        assert line["clip_fraction"] == pytest.approx(1.0) and rises[0] == pytest.approx(0.0, abs=1e-2)


@pytest.mark.parametrize("coef", [1.0, 0.0])
def test_entropy_bonus_raises_entropy(tmp_path, monkeypatch, coef):
    monkeypatch.setattr(evol_rl, "group_advantages", torch.zeros_like)
    rises = after_the_update(monkeypatch, lambda old, new: (new.entropies - old.entropies).sum())
    line = run(tmp_path, entropy_coef=coef, **QUIET)[-1]
    assert (line["grad_norm"] > 0) == (coef > 0)
    assert rises[0] > 0.1 if coef else rises[0] == pytest.approx(0.0, abs=1e-2)
