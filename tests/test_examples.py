"""The forks in examples/: their formulas by hand, and that each does in a run what it says."""

import json

import pytest
import torch
from conftest import ROOT, read_lines, run_toy

import ttrl
from common import Problem, Rollout
from engine.hf_sampler import HFSampler
from examples import rent, srt, tis


def responses(*answers):
    return [Rollout([1], [2], torch.zeros(1), True, answer=answer) for answer in answers]


# --------------------------------------------- SRT: labels of the initial model ---------------------------
def test_easiest_by_hand():
    problems = [Problem(str(i), id=i) for i in range(5)]
    votes = {0: ("7", 2), 1: (None, 0), 2: ("8", 6), 3: ("9", 5), 4: ("1", 6)}
    args = srt.Args(easy_fraction=0.6, prompts_per_batch=2)
    # 0.6 x 5 = 3 problems: those with 6, 6 and 5 votes, of equals the first
    assert [p.id for p in srt.easiest(problems, votes, args)] == [2, 4, 3]
    args.easy_fraction = 0.1  # but never less than a batch
    assert [p.id for p in srt.easiest(problems, votes, args)] == [2, 4]


def test_offline_classes_by_hand():
    given = responses("3", "0.5", None, r"\frac{1}{2}")
    assert srt.offline_classes(given, "1/2") == [None, 0, None, 0]
    assert srt.offline_classes(given, "8") == srt.offline_classes(given, None) == [None] * 4
    rewards = srt.majority_reward(srt.offline_classes(given, "1/2"))
    assert rewards.tolist() == [0, 1, 0, 1]  # half of them, although three do not agree


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Twelve problems of the toy."""
    path = tmp_path_factory.mktemp("srt") / "problems.jsonl"
    path.write_text("\n".join((ROOT / "toy/train.jsonl").read_text().splitlines()[:12]))
    return path


def test_srt_trains_the_easy_problems_with_the_initial_labels(tmp_path, problems):
    """Of 12 problems the third with most votes, 4; their labels stay what the initial model said."""
    options = dict(dataset=str(problems), easy_fraction=1 / 3, prompts_per_batch=2, steps=0, epochs=2)
    lines = run_toy(srt, tmp_path / "run", **options)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # 2 epochs of 4 // 2
    questions = [json.loads(line)["problem"] for line in problems.read_text().splitlines()]
    votes = {}
    for record in read_lines(tmp_path / "run/initial_votes.jsonl"):
        votes[questions[record["id"]]] = record
    counts = sorted((record["votes"] for record in votes.values()), reverse=True)
    samples = read_lines(tmp_path / "run/samples.jsonl")
    assert len(samples) == 8 and len({sample["problem"] for sample in samples}) == 4
    for sample in samples:
        assert votes[sample["problem"]]["votes"] >= counts[3]
        for response in sample["responses"]:
            assert response["reward"] == (response["answer"] == votes[sample["problem"]]["answer"])
    assert len({response["reward"] for sample in samples for response in sample["responses"]}) == 2


def test_srt_with_majority_labels_is_ttrl(tmp_path):
    ours = run_toy(srt, tmp_path / "srt", steps=1, labels="majority")[0]
    theirs = run_toy(ttrl, tmp_path / "ttrl", steps=1)[0]
    assert not (tmp_path / "srt/initial_votes.jsonl").exists()
    for name in ("loss", "grad_norm", "reward", "kl"):
        assert ours[name] == theirs[name], name


# -------------------------------------------- TIS: an unlike sampler --------------------------------------
@pytest.mark.parametrize("ratio, cap, weight", [(1.5, 2.0, 1.5), (1.5, 1.2, 1.2), (0.7, 2.0, 0.7)])
def test_tis_weighs_every_token_by_trainer_over_sampler(tmp_path, monkeypatch, ratio, cap, weight):
    """The sampler says every token is less likely by this ratio: so many times larger is the gradient."""
    options = dict(steps=1, num_minibatches=1, kl_coef=0.0, weight_decay=0.0)
    plain = run_toy(ttrl, tmp_path / "ttrl", **options)[0]
    generate = HFSampler.generate

    def unlike(self, *arguments, **settings):
        groups = generate(self, *arguments, **settings)
        for response in sum(groups, []):
            response.logprobs = response.logprobs - torch.tensor(ratio).log()
        return groups

    monkeypatch.setattr(HFSampler, "generate", unlike)
    line = run_toy(tis, tmp_path / "tis", max_logp_diff=100.0, tis_cap=cap, **options)[0]
    assert line["tis"] == pytest.approx(weight, rel=1e-3)
    assert line["grad_norm"] == pytest.approx(weight * plain["grad_norm"], rel=1e-3)
    assert line["reward"] == plain["reward"]


# -------------------------------------------- RENT: no votes at all ---------------------------------------
def test_entropy_reward_by_hand():
    entropies = [torch.tensor([0.5, 1.5]), torch.tensor([0.25]), torch.tensor([0.0, 0.0, 3.0])]
    # means 1, 0.25, 1
    assert rent.entropy_reward(entropies).tolist() == [-1, -0.25, -1]
    assert rent.entropy_reward(entropies, beta=2.0).tolist() == [-2, -0.5, -2]


def test_rent_rewards_what_the_model_was_sure_of(tmp_path):
    line = run_toy(rent, tmp_path / "run", steps=1, beta=2.0, train_samples=4)[0]
    samples = read_lines(tmp_path / "run/samples.jsonl")
    for sample in samples:
        assert sample["label"] == {}
        rewards = [response["reward"] for response in sample["responses"]]
        expected = [-2 * response["entropy"] for response in sample["responses"]]
        assert rewards == pytest.approx(expected, abs=2e-4)
        trained = [response for response in sample["responses"] if response["trained"]]
        best = max(trained, key=lambda response: response["reward"])
        assert best["advantage"] == max(response["advantage"] for response in trained) > 0
    assert line["label_coverage"] == 0 and line["reward"] < 0 and line["grad_norm"] > 0
