"""The forks in examples/: each diff applied to ttrl.py, run through its own main(), against its objective."""

import dataclasses
import doctest
import functools
from types import SimpleNamespace

import pytest
import test_ranks
import torch
from conftest import EXAMPLES, VOTES, load_script, patched, spy
from equations import (
    answers_of, gradient_is_the_objectives, log_probs, log_softmax_rows, mean_entropies, model_with,
    per_token, ttrl_rewards, vote, z)
from test_ranks import FLAGS, assert_same_runs, drive, ended, job, runs_of, turned_tokens

import common
from engine.base import Sample


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
    weight = (old - response.sampler_logp).exp().clamp(max=args.tis_cap)
    return weight * grpo(args, response, logp, old, entropy)


def entropy_itself(args, response, logp, old, entropy):
    return entropy


def unlike(run) -> None:
    """The sampler says of every token that it is up to e^0.6 likelier, or less likely, than it is."""
    def shift(groups, *arguments, **options):
        for group in groups:
            for i, (ids, logprobs, finished) in enumerate(group):
                group[i] = Sample(ids, logprobs + 0.6 * torch.arange(len(ids)).sin(), finished)

    spy(run.sampler, "generate", after=shift)


@pytest.fixture(autouse=True)
def unlike_stops_no_run(request, monkeypatch):
    if "[tis]" in request.node.name:
        monkeypatch.setattr("engine.samplers.MAX_LOGP_DIFF", 1.0)


def imitation(args, response, logp, old, entropy):
    return -logp * response.advantage


OBJECTIVES = dict(gspo=sequence_ratio, tis=truncated_importance, em_ft=entropy_itself, vote_sft=imitation,
                  ssd=imitation)
FLAGS_OF = dict(gspo=dict(clip_low=0.004, clip_high=0.006), empo=dict(entropy_high=1.5),
                tis=dict(tis_cap=1.3, meddle=unlike),
                dynamic_sampling=dict(max_rounds=2), em_ft=dict(num_minibatches=2), rlsc=dict(alpha=0.2))


def fork_objective(name, seen, update):
    """Mean over responses of the means over tokens, as equations.objective."""
    args, losses = seen.args, []
    if name == "ssd":  # of undivided logits, whatever the temperature of the samples was
        seen = SimpleNamespace(args=dataclasses.replace(args, temperature=1.0), weights=seen.weights)
    for response, old, logp, kl, entropy in per_token(seen, update):
        wanted = OBJECTIVES.get(name, grpo)(args, response, logp, old, entropy)
        losses.append(wanted + args.kl_coef * kl - args.entropy_coef * entropy)
    if args.loss_aggregation == "token-mean":
        return torch.cat(losses).mean(), {}
    return torch.stack([loss_T.mean() for loss_T in losses]).mean(), {}


def of_adapters(seen, update, gradients):
    """W + s B A: the gradient of A is s B^T G, that of B is s G A^T."""
    found = {}
    for name, tensor in update.trained.items():
        layer, _, part = name.partition("parametrizations.weight.0.")
        a, b = (update.trained[f"{layer}parametrizations.weight.0.{kind}"] for kind in "ab")
        gradient = seen.args.lora_scale * gradients[layer + "weight"]
        found[name] = b.T @ gradient if part == "a" else gradient @ a.T
    return found


# What each rewards, from the answers and from full logits alone.
def ttrl_reward(seen, group):
    return ttrl_rewards(seen, group)[0]


def entropy_reward(seen, group):
    return [-h for h in mean_entropies(seen, group.step, group.responses)]


def share_reward(seen, group):
    answers = answers_of(group)
    return [0.0 if answer is None else answers.count(answer) / len(answers) for answer in answers]


def certainty_reward(seen, group):
    """KL(U || p) = sum_v 1/V log((1/V) / p_v), token by token."""
    model, found = model_with(seen, seen.weights[group.step]), []
    for response in group.responses:
        rows = log_softmax_rows(model, response, seen.args.temperature).detach()
        u = torch.full_like(rows, 1 / rows.shape[1])
        found.append(float((u * (u.log() - rows)).sum(-1).mean()))
    return found


def confidence_reward(seen, group):
    values = log_probs(seen, seen.weights[group.step], group.responses)
    return [float(v.mean().exp()) + seen.args.alpha for v in values.values()]


def sequence_reward(seen, group):
    return [float(v.sum()) for v in log_probs(seen, seen.weights[group.step], group.responses).values()]


def crossed_reward(seen, group):
    half = len(seen.groups) // 2
    place = [other is group for other in seen.groups].index(True)
    label = vote(answers_of(seen.groups[(place + half) % len(seen.groups)]))
    return [float(answer is not None and answer == label) for answer in answers_of(group)]


def initial_reward(seen, group):
    """SRT: the label is the vote of the base model's responses, sampled before step 1."""
    before, = (sampled for sampled in seen.samples if sampled.step == 0)
    initial = [response.answer for response in before.groups[before.prompts.index(group.prompt)]]
    return [float(answer is not None and answer == vote(initial)) for answer in answers_of(group)]


def coin_reward(seen, group):
    """The coins of seed 1, step 1 and the problem's id, tossed once and written down."""
    coins = ["01111011", "00011000", "10000101", "00100111", "10010111"]
    return list(map(float, coins[group.prompt.id]))


def length_reward(seen, group):
    lengths = sorted(len(response.response_ids) for response in group.responses)
    return [float(len(response.response_ids) > (lengths[3] + lengths[4]) / 2) for response in group.responses]


def runner_up_reward(seen, group):
    """Of VOTES: the class that came second, the first seen of equal ones."""
    answers = answers_of(group)
    second = vote([None if answer == vote(answers) else answer for answer in answers])
    return [float(answer is not None and answer == second) for answer in answers]


REWARDS = dict(empo=share_reward, intuitor=certainty_reward, rent=entropy_reward, rlsc=confidence_reward,
               co_rewarding=crossed_reward, srt=initial_reward, random_reward=coin_reward,
               length_reward=length_reward, runner_up=runner_up_reward, em_rl=sequence_reward,
               ssd=lambda seen, group: [1.0] * len(group.responses))
# Of VOTES: 3 of 6 with the most votes (of problem 2, whose majority has two, 2), the rest from the end
DDRL_TRAINS = dict.fromkeys(VOTES, [0, 1, 2, 5, 6, 7]) | {2: [0, 1, 2, 3, 4, 5]}


def test_srt_knows_no_gold_answer():
    problem = common.Problem("q", answer="5", also_right=["7"])
    responses = [SimpleNamespace(answer=answer) for answer in ("9", "7", "5", None)]
    offline_classes = load_script("srt").offline_classes
    assert offline_classes(problem, responses, "9") == [0, None, None, None]
    assert offline_classes(problem, responses, None) == [None] * 4


@pytest.mark.parametrize("name", EXAMPLES)
def test_rewards_advantages_and_gradient_are_the_papers(name, watch):
    """Two minibatches with the clip active; the second one's old policy is not the current one."""
    seen = watch(name, **FLAGS_OF.get(name, {}))
    assert doctest.testmod(seen.module).failed == 0
    trained = {id(response) for response in seen.updates[0].train}
    assert len(seen.groups) == {"co_rewarding": 10, "dynamic_sampling": 3}.get(name, 5)
    left_out, args = 0, seen.args
    for group in seen.groups:
        rewards = REWARDS.get(name, ttrl_reward)(seen, group)
        assert group.rewards == pytest.approx(rewards, abs=1e-3)
        chosen = common.subset(args, group.step, group.prompt, len(rewards))
        own = [rewards[i] for i in chosen]
        wanted = z(own)
        if name in ("rlsc", "vote_sft", "ssd"):
            wanted = own
        if name == "no_std":
            wanted = [reward - sum(own) / len(own) for reward in own]
        if name == "negatives_only":  # of all, not of the trained ones
            wanted = [min(z(rewards)[i], 0) for i in chosen]
        if name == "ddrl":
            chosen = DDRL_TRAINS[group.prompt.id]
            assert group.trained == chosen
            wanted = [1 if rewards[i] else -1 for i in chosen]
        for i, advantage in zip(chosen, wanted):
            response = group.responses[i]
            left_out += id(response) not in trained
            if id(response) in trained:
                assert response.advantage == pytest.approx(advantage, abs=5e-3)
    assert left_out == {"empo": 6}.get(name, 0)  # one prompt has four answers

    assert len(seen.updates) == 2 and seen.metrics[-1]["clip_fraction"] > 0.005
    through = of_adapters if name == "lora" else None
    gradient_is_the_objectives(seen, functools.partial(fork_objective, name), through)


@pytest.mark.parametrize("name", ["vote_sft", "ssd"])
def test_the_base_model_is_sampled_in_every_step(name, watch):
    """The policy moves on; the sampler's log-probs are the base model's at --temperature."""
    seen = watch(name, steps=2)
    for group in seen.groups:
        base = log_probs(seen, seen.weights["initial"], group.responses)
        for response in group.responses:
            assert torch.allclose(response.sampler_logp.double(), base[id(response)], atol=1e-3)


# ------------------------------------------------- their own flags ---------------------------------------
# ------------------------------------------------------- ranks ---------------------------------------------
@pytest.mark.slow
def test_two_ranks_compute_the_update_of_one(tmp_path, monkeypatch):
    """Of forks in which prompts, rounds or weights of their own meet: one step of two minibatches."""
    names = ("co_rewarding", "dynamic_sampling", "lora")
    monkeypatch.setitem(test_ranks.ENVIRONMENT, "PYTHONPATH", str(patched()))
    for ranks in (1, 2):
        flags = [*FLAGS, "--num_minibatches", "2", "--seed", "1", "--micro_tokens", str(1500 // ranks)]
        jobs = [job(name, tmp_path / f"{name}-{ranks}", *flags) for name in names]
        done = ended(drive(ranks, tmp_path, *jobs), timeout=580)
        (tmp_path / f"errors-{ranks}").write_text(done.errors)
    for name in names:
        one, two = runs_of(tmp_path, name)
        assert turned_tokens(one, two) <= 1
        if turned_tokens(one, two) == 0:
            assert_same_runs(one, two)
