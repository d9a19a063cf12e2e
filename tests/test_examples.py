"""The forks in examples/: their formulas by hand, and that each does in a run what it says."""

import importlib
import json
import math
import shutil

import pytest
import torch
from conftest import ROOT, fresh_state, read_lines, run_toy, untimed
from equations import (
    answers_of, double_model, log_probs, log_softmax_rows, model_with, relative_error, ttrl_rewards, vote, z)
from test_ranks import FLAGS, assert_same_runs, drive, ended, job, runs_of, turned_tokens

import common
import evaluate
import ttrl
from common import Problem, Rollout, UserError
from engine.hf_sampler import HFSampler
from examples import co_rewarding, empo, gspo, intuitor, rent, srt, tis


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
    given, prompt = responses("3", "0.5", None, r"\frac{1}{2}"), Problem("?")
    assert srt.offline_classes(prompt, given, "1/2") == [None, 0, None, 0]
    assert srt.offline_classes(prompt, given, "8") == srt.offline_classes(prompt, given, None) == [None] * 4
    rewards = srt.majority_reward(srt.offline_classes(prompt, given, "1/2"))
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
    assert rent.entropy_reward([1.0, 0.25, 1.0]).tolist() == [-1, -0.25, -1]
    assert rent.entropy_reward([1.0, 0.25, 1.0], beta=2.0).tolist() == [-2, -0.5, -2]


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


# ------------------------------------- every example, through its own main() ------------------------------
# What each wants of a response's tokens, [T], from log-probs and entropies of full logits in float64.
def grpo(args, response, logp, old, entropy):
    ratio = (logp - old).exp()
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    return -torch.minimum(ratio * response.advantage, clipped * response.advantage)


def sequence_ratio(args, response, logp, old, entropy):
    whole = (logp - old).sum() / len(logp)
    return grpo(args, response, whole.expand(len(logp)), torch.zeros(len(logp)), entropy)


def truncated_importance(args, response, logp, old, entropy):
    weight = (old - response.logprobs).exp().clamp(max=args.tis_cap)
    return weight * grpo(args, response, logp, old, entropy)


def entropy_itself(args, response, logp, old, entropy):
    return entropy


OBJECTIVES = dict(gspo=sequence_ratio, tis=truncated_importance, em_ft=entropy_itself)
FLAGS_OF = dict(gspo=dict(clip_low=0.004, clip_high=0.006), empo=dict(entropy_high=1.5),
                dynamic_sampling=dict(max_rounds=2), em_ft=dict(num_minibatches=2), rlsc=dict(alpha=0.2))
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
each_example = pytest.mark.parametrize("name", EXAMPLES)


def expected_loss(seen, name, update) -> torch.Tensor:
    """The printed objective of a minibatch: mean over responses of the mean over tokens."""
    args, responses = seen.args, update.responses
    old = log_probs(seen, seen.weights[update.step], responses)
    ref = log_probs(seen, seen.weights["initial"], responses)
    model, losses = model_with(seen, update.weights), []
    for response in responses:
        rows = log_softmax_rows(model, response, args.temperature)
        logp = rows.gather(-1, torch.tensor(response.response_ids)[:, None]).squeeze(-1)
        entropy = -(rows.exp() * rows).sum(-1)
        d = torch.tensor(ref[id(response)]) - logp
        wanted = OBJECTIVES.get(name, grpo)(args, response, logp, torch.tensor(old[id(response)]), entropy)
        losses.append((wanted + args.kl_coef * (d.exp() - d - 1) - args.entropy_coef * entropy).mean())
    return torch.stack(losses).mean()


@each_example
def test_gradient_is_the_printed_objectives(name, watch):
    """Two minibatches with the clip active; the second one's old policy is not the current one."""
    seen = watch(f"examples.{name}", **FLAGS_OF.get(name, {}))
    assert len(seen.updates) == 2 and (name == "em_ft" or seen.metrics[-1]["clip_fraction"] > 0.01)
    for update in seen.updates:
        expected_loss(seen, name, update).backward()
        model = double_model(common.TOY_MODEL)
        expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        assert relative_error(update.clipped, expected) < 1e-4


# What each rewards, from the answers and from full logits alone.
def ttrl_reward(seen, group):
    return ttrl_rewards(seen, group)[0]


def full_logits(seen, group) -> list[torch.Tensor]:
    model = model_with(seen, seen.weights[group.step])
    return [log_softmax_rows(model, response, seen.args.temperature).detach() for response in group.responses]


def share_reward(seen, group):
    answers = answers_of(group)
    return [0.0 if answer is None else answers.count(answer) / len(answers) for answer in answers]


def certainty_reward(seen, group):
    """KL(U || p) = sum_v 1/V log((1/V) / p_v), token by token."""
    found = []
    for rows in full_logits(seen, group):
        size = rows.shape[1]
        found.append(float((torch.full_like(rows, 1 / size) * (-math.log(size) - rows)).sum(-1).mean()))
    return found


def entropy_rewards(seen, group):
    return [-float((-(rows.exp() * rows).sum(-1)).mean()) for rows in full_logits(seen, group)]


def confidence_reward(seen, group):
    values = log_probs(seen, seen.weights[group.step], group.responses)
    return [math.exp(sum(v) / len(v)) + seen.args.alpha for v in values.values()]


def crossed_reward(seen, group):
    half = len(seen.groups) // 2
    place = [other is group for other in seen.groups].index(True)
    label = vote(answers_of(seen.groups[(place + half) % len(seen.groups)]))
    return [float(answer is not None and answer == label) for answer in answers_of(group)]


def no_reward(seen, group):
    return [0.0] * len(group.responses)


REWARDS = dict(gspo=ttrl_reward, tis=ttrl_reward, dynamic_sampling=ttrl_reward, empo=share_reward,
               intuitor=certainty_reward, rent=entropy_rewards, rlsc=confidence_reward, em_ft=no_reward,
               co_rewarding=crossed_reward)


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_and_advantages_are_the_papers(name, watch):
    seen = watch(f"examples.{name}", **FLAGS_OF.get(name, {}))
    trained = {id(response) for response in seen.updates[0].train}
    assert len(seen.groups) == {"co_rewarding": 10, "dynamic_sampling": 4}.get(name, 5)
    left_out = 0
    for group in seen.groups:
        rewards = REWARDS[name](seen, group)
        assert group.rewards == pytest.approx(rewards, abs=1e-3)
        wanted = z([rewards[i] for i in group.trained])
        if name == "rlsc":
            wanted = [rewards[i] for i in group.trained]
        if name == "em_ft":  # all alike: no prompt is logged as one that teaches nothing
            wanted = [1.0] * len(group.trained)
        for i, advantage in zip(group.trained, wanted):
            response = group.responses[i]
            left_out += id(response) not in trained
            if id(response) in trained:
                assert response.advantage == pytest.approx(advantage, abs=5e-3)
    assert left_out == {"empo": 6}.get(name, 0)  # one prompt has four answers


# ------------------------------------------------- their own flags ---------------------------------------
def test_entropy_band_of_empo(watch):
    """VOTES: 4 g, 2 a, 1 b of 7 | 3 a, 3 g, 1 b, 1 w | a, 2 b, c, 2 g, w of 7 | 7 a, 1 g | 8 g, unanimous."""
    entropies = []
    for counts in ([4, 2, 1], [3, 3, 1, 1], [1, 2, 1, 1, 1, 1], [7, 1], [8]):
        total = sum(counts)
        entropies.append(-sum(n / total * math.log(n / total) for n in counts))
    for low, high in ((0.0, 2.0), (0.5, 2.0), (0.0, 1.0), (0.5, 1.0)):
        seen = watch("examples.empo", entropy_low=low, entropy_high=high)
        kept = sum(low <= entropy <= high for entropy in entropies)
        assert len(seen.updates[0].train) == 6 * kept
    with pytest.raises(UserError, match=r"--entropy_low is 3\.0, but must be at most --entropy_high, 2\.0\."):
        watch("examples.empo", entropy_low=3.0)


def test_answer_entropy_by_hand():
    expected = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert empo.answer_entropy([0, 0, 1, None]) == pytest.approx(expected)
    assert empo.answer_entropy([None]) == 0 and empo.answer_entropy([0, 0]) == 0


def test_rounds_of_dynamic_sampling(watch):
    """Four of five problems teach something; another round asks the same five again and adds none."""
    for rounds in (1, 3):
        seen = watch("examples.dynamic_sampling", max_rounds=rounds)
        assert seen.metrics[-1]["rounds"] == rounds == seen.run.state["drawn"]
        assert seen.metrics[-1]["sampled_prompts"] == 5 * rounds and seen.metrics[-1]["zero_variance"] == 0
    seen = watch("examples.dynamic_sampling", max_rounds=3, prompts_per_batch=2)
    assert seen.metrics[-1]["rounds"] <= 2 and len(seen.groups) == 2  # full before


def test_dynamic_sampling_of_unanimous_prompts_trains_nothing(watch):
    seen = watch("examples.dynamic_sampling", answers=dict.fromkeys(range(5), "g"), max_rounds=2)
    assert seen.updates == [] and seen.metrics[-1]["rounds"] == 2 and "loss" not in seen.metrics[-1]


def test_the_rephrased_column(tmp_path, problems):
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row | dict(twin="In short: " + row["problem"])) for row in rows))
    options = dict(steps=1, dataset=str(path), rephrased_field="twin")
    run_toy(co_rewarding, tmp_path / "run", **options)
    asked = {record["problem"] for record in read_lines(tmp_path / "run/samples.jsonl")}
    assert asked <= {text for row in rows for text in (row["problem"], "In short: " + row["problem"])}
    with pytest.raises(UserError, match="--rephrased_field is 'other', but --dataset has a row "):
        run_toy(co_rewarding, tmp_path / "bad", **options | dict(rephrased_field="other"))


def test_gspo_is_grpo_until_the_second_minibatch(tmp_path):
    ours = run_toy(gspo, tmp_path / "gspo", steps=1, num_minibatches=1)[0]
    theirs = run_toy(ttrl, tmp_path / "ttrl", steps=1, num_minibatches=1)[0]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


# ----------------------------------------------- resume, evaluate, ranks ----------------------------------
@each_example
def test_resume_repeats_the_uninterrupted_run(name, tmp_path):
    """Three steps; what was written after the first checkpoint is lost and done again, bit for bit."""
    module = importlib.import_module(f"examples.{name}")
    options = dict(steps=3, checkpoint_every=1, keep=3, votes=4, train_samples=4, max_new_tokens=32)
    whole, again = tmp_path / "whole", tmp_path / "again"
    run_toy(module, whole, **options)
    shutil.copytree(whole, again)
    for late in ("checkpoints/step_00000002", "checkpoints/step_00000003", "final"):
        shutil.rmtree(again / late)
    run_toy(module, again, **options, resume=True)
    first, second = untimed(read_lines(whole / "metrics.jsonl")), untimed(read_lines(again / "metrics.jsonl"))
    assert [line["step"] for line in second] == [1, 2, 3] and first == second
    expected = fresh_state(whole / "final")
    assert all(torch.equal(value, expected[key]) for key, value in fresh_state(again / "final").items())


@pytest.mark.slow
def test_one_rank_equals_two(tmp_path):
    """Every example, one step of two minibatches, on one rank and on two."""
    for ranks in (1, 2):
        jobs = []
        for name in EXAMPLES:
            flags = [*FLAGS, "--num_minibatches", "2", "--seed", "1", "--micro_tokens", str(1500 // ranks)]
            jobs.append(job(f"examples.{name}", tmp_path / f"examples.{name}-{ranks}", *flags))
        done = ended(drive(ranks, tmp_path, *jobs), timeout=580)
        (tmp_path / f"errors-{ranks}").write_text(done.errors)
    for name in EXAMPLES:
        one, two = runs_of(tmp_path, f"examples.{name}")
        assert turned_tokens(one, two) <= 1
        if turned_tokens(one, two) == 0:
            assert_same_runs(one, two)


def test_a_trained_example_is_evaluated_like_any_model(tmp_path):
    run_toy(intuitor, tmp_path / "run", steps=1)
    settings = dict(evaluate.TOY, model=str(tmp_path / "run/final"), benchmarks="toy", samples=2)
    results = evaluate.main(evaluate.Args(**settings | dict(max_new_tokens=32), out=str(tmp_path / "eval")))
    assert 0 <= results["toy"]["pass@1"] <= 1
