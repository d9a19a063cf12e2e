"""The six scripts, watched through their own main(): one step on the toy against the papers' equations.

Nothing here is a copy of the loop. conftest.Watched puts spies on the run, the sampler, the policy and the
optimizer; what they saw is compared with the equations, written out below token by token on full logits."""

import dataclasses
import functools
import importlib
import json
import math
import random
import statistics
import sys
import types
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from conftest import ANSWERS, ROOT, SCRIPTS, TIMED, FakeEmbedder, fresh_state, full, read_lines, spy, untimed
from transformers import AutoModelForCausalLM

import common
from common import UserError
from engine.base import seed_of
from engine.policy import MicroBatch

each_script = pytest.mark.parametrize("script", SCRIPTS)


# ------------------------------------------- the model, slow and obvious -----------------------------------
@functools.cache
def double_model(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def model_with(seen, weights: dict[str, torch.Tensor]):
    """Transformers' own model in float64 with these weights."""
    model = double_model(seen.args.model or common.TOY_MODEL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.zero_grad()
    return model


def log_softmax_rows(model, response, temperature: float) -> torch.Tensor:
    """[T, V] log-probs of every token of the vocabulary where response token t stands."""
    ids = torch.tensor([response.prompt_ids + response.response_ids])
    first = len(response.prompt_ids) - 1
    logits = model(input_ids=ids).logits[0, first:first + len(response.response_ids)]
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def log_probs(seen, weights, responses) -> dict[int, list[float]]:
    """{id of a response: log-probs of its tokens}."""
    model = model_with(seen, weights)
    values = {}
    for response in responses:
        rows = log_softmax_rows(model, response, seen.args.temperature)
        values[id(response)] = [float(rows[t, token]) for t, token in enumerate(response.response_ids)]
    return values


@torch.no_grad()
def mean_entropies(seen, step: int, responses) -> list[float]:
    """SCRL Eq. 5, 6; ETTRL Eq. 5: mean token entropy under the policy that sampled."""
    model = model_with(seen, seen.weights[step])
    means = []
    for response in responses:
        rows = log_softmax_rows(model, response, seen.args.temperature)
        means.append(statistics.fmean((-(rows.exp() * rows).sum(-1)).tolist()))
    return means


# ------------------------------------ the papers' equations, from the answers alone ------------------------
class Target(NamedTuple):
    """What the objective wants of a response: sum_j weight_j min(ratio A_j, clip(ratio) A_j), times a scale."""
    parts: list[tuple[float, float]]
    scale: float = 1.0
    question: bool = False


def answers_of(group) -> list[str | None]:
    return [response.answer for response in group.responses]


def vote(answers: list[str | None]) -> str | None:
    given = [answer for answer in answers if answer is not None]
    return max(given, key=given.count, default=None)  # of equals the first


def z(values: list[float]) -> list[float]:
    """(value - mean) / std, 0 if all are equal."""
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / spread if spread > 1e-7 else 0.0 for value in values]


def ttrl_rewards(seen, group) -> tuple[list[float], object, set]:
    """1[answer = label]; the label; no negative labels."""
    answers = answers_of(group)
    label = vote(answers)
    if getattr(seen.args, "labels", "majority") == "gold":
        label = group.prompt.answer if group.prompt.answer in answers else None
    return [float(answer is not None and answer == label) for answer in answers], label, set()


def evol_rl_rewards(seen, group) -> tuple[list[float], object, set]:
    """Section 2.2: bands of -1 (invalid), -1 to -0.5 (minority), 0.5 to 1 (majority), by novelty inside."""
    answers, gold = answers_of(group), seen.args.labels == "gold"
    right = group.prompt.answer
    valid = []
    for i, answer in enumerate(answers):
        if answer is not None and (any(s.isdigit() for s in answer) or gold and answer == right):
            valid.append(i)
    label = right if gold else vote([answer if i in valid else None for i, answer in enumerate(answers)])
    if not seen.args.novelty:
        return [float(i in valid and answer == label) for i, answer in enumerate(answers)], label, set()
    embed = FakeEmbedder(seen.args.embedder)
    vectors = embed([response.text for response in group.responses])
    rewards = [-1.0] * len(answers)
    for in_majority in (True, False):
        block = [i for i in valid if (answers[i] == label) == in_majority]
        novelties = []
        for i in block:
            mates = [float(vectors[i] @ vectors[j]) for j in block if j != i]
            others = [float(vectors[i] @ vectors[j]) for j in valid if j != i]
            alpha = seen.args.alpha
            novelties.append(1 - alpha * statistics.fmean(mates or [0]) - (1 - alpha) * max(others, default=0))
        for i, u in zip(block, novelties):
            low, high = min(novelties), max(novelties)
            scaled = (u - low) / (high - low) if high > low else 1.0
            rewards[i] = 0.5 + 0.5 * scaled if in_majority else -1 + 0.5 * scaled
    return rewards, label, set()


def scrl_rewards(seen, group) -> tuple[list[float], object, set]:
    """Eq. 4 (positive label), 8 (negative ones) and 9 (reward)."""
    args, answers = seen.args, answers_of(group)
    entropies = mean_entropies(seen, group.step, group.responses)
    average = statistics.fmean(entropies)
    counts = Counter(answer for answer in answers if answer is not None)
    entropy_of = {}
    for answer in counts:
        entropy_of[answer] = statistics.fmean(h for h, own in zip(entropies, answers) if own == answer)
    top = vote(answers)
    rest = [count for answer, count in counts.items() if answer != top]
    share, lead = counts[top] / len(answers), (counts[top] - max(rest, default=0)) / len(answers)
    positive = top if share >= args.tau_pos and lead > args.tau_marg or not args.selective_positive else None
    negatives = set()
    for answer, count in counts.items():
        unsure = entropy_of[answer] >= average or not args.entropy_gate
        if args.negatives and answer != positive and count / len(answers) < args.tau_neg and unsure:
            negatives.add(answer)
    rewards = []
    for answer in answers:
        if answer is None:
            rewards.append(args.null_reward)
            continue
        p = counts[answer] / len(answers)
        reward = p if answer == positive else p - args.tau_neg if answer in negatives else 0.0
        reward -= args.lambda_h * (entropy_of[answer] - average)
        if not args.dynamic_rewards:
            reward = 1.0 if answer == positive else -1.0 if answer in negatives else 0.0
        rewards.append(reward)
    return rewards, positive, negatives


def gaussian(share: float, sigma: float) -> float:
    if sigma == 0:
        return float(share == 1)
    return math.exp(-(share - 1) ** 2 / (2 * sigma ** 2))


def restrain_targets(seen, group) -> tuple[list[Target], object]:
    """Eq. 3 (w_j), 4 (A_ij and the penalty), 5 (u); and w, None if all are penalised."""
    args, answers = seen.args, answers_of(group)
    counts = Counter(answer for answer in answers if answer is not None)
    votes, n = max(counts.values(), default=0), len(answers)
    u = 1.0
    if args.prompt_weighting == "offline":  # of the initial model's own responses
        before = next(s for s in seen.samples if s.step == 0)
        initial = [r.answer for r in before.groups[before.prompts.index(group.prompt)]]
        u = gaussian(initial.count(vote(initial)) / len(initial), args.prompt_sigma)
    if args.prompt_weighting == "online":
        u = gaussian(votes / n, args.prompt_sigma)
    if votes < args.kappa:
        return [Target([(1.0, -args.delta)], u)] * n, None
    if args.label_weighting == "majority" or args.sigma == 0:
        raw = {answer: float(answer == vote(answers)) for answer in counts}
    elif args.label_weighting == "uniform":
        raw = dict.fromkeys(counts, 1.0)
    else:
        raw = {answer: gaussian(count / n, args.sigma) for answer, count in counts.items()}
    weights = {answer: weight / sum(raw.values()) for answer, weight in raw.items()}
    advantages = {label: z([float(answer == label) for answer in answers]) for label in weights}
    targets = []
    for i in range(n):
        targets.append(Target([(weight, advantages[label][i]) for label, weight in weights.items()], u))
    return targets, weights


def ettrl_advantages(seen, group, advantages: list[float]) -> list[float]:
    """Eq. 12 to 15 on the advantages of the trained responses."""
    args, reshaped = seen.args, []
    trained = [group.responses[i] for i in group.trained]
    if args.advantage == "clip":
        return [max(-args.bound, min(args.bound, a)) for a in advantages]
    if args.advantage == "none":
        return advantages
    entropies = mean_entropies(seen, group.step, trained)
    average = statistics.fmean(entropies)
    for a, h in zip(advantages, entropies):
        factor = 1 + (average - h) / average
        reshaped.append(a * max(1 - args.alpha, min(1 + args.beta, factor)))
    return reshaped


def written_questions(seen) -> list[SimpleNamespace]:
    """Dynamic RL's questions from what was sampled for z_0: text, tokens up to its end, its own tokens."""
    tokenizer, questions = seen.run.tokenizer, []
    asked = seen.samples[0]
    for i, ((response,), (tokens,)) in enumerate(zip(asked.groups, asked.tokens)):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        question = text.split("Question:")[1].split("Solution:")[0].strip()
        end = text[:text.index(question) + len(question)]
        count = 1
        while not tokenizer.decode(tokens[:count], skip_special_tokens=True).startswith(end):
            count += 1
        own = tokenizer.encode(question, add_special_tokens=False)
        kept = i != 1 or not seen.args.filter  # conftest filters the second
        questions.append(SimpleNamespace(response=response, text=question, trained=tokens[:count], tokens=own,
                                         kept=kept))
    return questions


def question_targets(seen) -> dict[int, Target]:
    """Eq. 4 to 12 and 14, from the questions' texts and their solutions' answers."""
    args, questions = seen.args, written_questions(seen)
    r_q, labels = [], []
    for question, group in zip(questions, seen.groups):
        assert group.prompt.question == question.text
        answers = answers_of(group)
        label = vote(answers)
        p = answers.count(label) / len(answers)
        difficulty = p / args.tau if p <= args.tau else (1 - p) / (1 - args.tau)
        r_q.append(difficulty * question.kept)
        labels.append(label)
    r_dq = []
    for own in questions:
        overlaps = []
        for other in questions:
            same = sum(x == y for x, y in zip(own.tokens, other.tokens))
            overlaps.append(same / min(len(own.tokens), len(other.tokens)))
        r_dq.append(1 / sum(overlaps))
    r_da = [1 / labels.count(label) for label in labels]
    targets = {}
    for question, q, dq, da in zip(questions, z(r_q), z(r_dq), z(r_da)):
        a = args.lambda_q * q * args.rq + args.lambda_dq * dq * args.rdq + args.lambda_da * da * args.rda
        targets[id(question.response)] = Target([(1.0, a)], question=True)
    return targets


REWARDS = dict(ttrl=ttrl_rewards, ettrl=ttrl_rewards, evol_rl=evol_rl_rewards, scrl=scrl_rewards,
               dynamic_rl=ttrl_rewards)


def targets_of(seen, step: int = 1) -> dict[int, Target]:
    """{id of a response: its target} of all that a step must train."""
    targets = {}
    written = seen.script == "dynamic_rl" and not seen.args.dataset
    if written:
        targets = question_targets(seen)
    for k, group in enumerate(group for group in seen.groups if group.step == step):
        if seen.script == "restrain":
            whole, _ = restrain_targets(seen, group)
            targets |= {id(group.responses[i]): whole[i] for i in group.trained}
            continue
        rewards, _, _ = REWARDS[seen.script](seen, group)
        advantages = z([rewards[i] for i in group.trained])
        if seen.script == "ettrl":
            advantages = ettrl_advantages(seen, group, advantages)
        if seen.script == "dynamic_rl":
            solved = written_questions(seen)[k].kept if written else True
            advantages = [seen.args.lambda_s * a * solved for a in advantages]
        for i, a in zip(group.trained, advantages):
            targets[id(group.responses[i])] = Target([(1.0, a)])
    return targets


def follows_the_paper(seen) -> None:
    """Rewards, labels and advantages of every prompt of the first step are those worked out above."""
    targets = targets_of(seen)
    groups = [group for group in seen.groups if group.step == 1]
    assert groups
    for k, group in enumerate(groups):
        answers = answers_of(group)
        name_of = dict(zip(group.classes, answers))
        if seen.script == "restrain":
            whole, weights = restrain_targets(seen, group)
            rewards = [sum(weight * a for weight, a in target.parts) for target in whole]
            if weights and any(rewards):
                assert {name_of[c]: w for c, w in group.label.items()} == pytest.approx(weights, abs=1e-6)
            elif weights is None:
                assert group.label is None
        else:
            rewards, label, negatives = REWARDS[seen.script](seen, group)
            if seen.script == "dynamic_rl" and not seen.args.dataset and not written_questions(seen)[k].kept:
                rewards = [0.0] * len(rewards)
            if not (seen.script == "evol_rl" and label not in answers):
                assert name_of[group.label] == label if group.label is not None else label is None
            assert {name_of[c] for c in group.negatives} == negatives
        assert group.rewards == pytest.approx(rewards, abs=1e-5)
        for i in group.trained:
            response, target = group.responses[i], targets[id(group.responses[i])]
            if seen.script == "restrain":
                assert response.plus == pytest.approx(sum(w * max(a, 0) for w, a in target.parts), abs=1e-5)
                assert response.minus == pytest.approx(sum(w * min(a, 0) for w, a in target.parts), abs=1e-5)
                assert response.weight == pytest.approx(target.scale, abs=1e-6)
            advantage = sum(w * a for w, a in target.parts)
            assert response.advantage == pytest.approx(advantage, abs=2e-4)  # z divides by std + 1e-6
    assert len(targets) == len(seen.updates[0].train)
    if seen.script == "dynamic_rl" and not seen.args.dataset:
        for question in written_questions(seen):
            assert question.response.response_ids == question.trained
            assert question.response.advantage == pytest.approx(targets[id(question.response)].parts[0][1], abs=2e-4)


# --------------------------------------- the objective, token by token -------------------------------------
LOGGED = (["kl", "entropy", "clip_fraction"], ["kl", "entropy", "clip_fraction", "question_entropy"])


def objective(seen, update) -> tuple[torch.Tensor, dict[str, float]]:
    """The printed loss of a minibatch, with a graph, and the means that are logged of it."""
    args, minibatch, targets = seen.args, update.responses, targets_of(seen, update.step)
    old = log_probs(seen, seen.weights[update.step], minibatch)
    ref = log_probs(seen, seen.weights["initial"], minibatch)
    model = model_with(seen, update.weights)
    tokens = sum(len(response.response_ids) for response in minibatch)
    loss, logged = 0.0, dict.fromkeys(LOGGED[seen.script == "dynamic_rl"], 0.0)
    for response in minibatch:
        target = targets[id(response)]
        mates = [other for other in minibatch if targets[id(other)].question == target.question]
        rows = log_softmax_rows(model, response, args.temperature).unbind()
        of_response = []
        for t, token in enumerate(response.response_ids):
            logp = rows[t][token]
            ratio = torch.exp(logp - old[id(response)][t])
            clipped = torch.clamp(ratio, 1 - args.clip_low, 1 + args.clip_high)
            surrogate = sum(weight * torch.minimum(ratio * a, clipped * a) for weight, a in target.parts)
            d = ref[id(response)][t] - logp
            kl = torch.exp(d) - d - 1 if args.kl_coef else torch.zeros(())
            entropy = -(rows[t].exp() * rows[t]).sum()
            wanted = -surrogate + args.kl_coef * kl - args.entropy_coef * entropy
            of_response.append(target.scale * wanted)
            share = 1 / len(response.response_ids) / len(mates)
            if args.loss_aggregation == "token-mean":
                share = 1 / tokens
            outside = not 1 - args.clip_low <= float(ratio.detach()) <= 1 + args.clip_high
            if target.question:
                logged["question_entropy"] += share * float(entropy.detach())
            else:
                for name, value in dict(kl=kl, entropy=entropy, clip_fraction=outside).items():
                    logged[name] += share * float(value)
        if args.loss_aggregation == "token-mean":
            loss = loss + sum(of_response) / tokens
        else:
            loss = loss + sum(of_response) / len(of_response) / len(mates)
    return loss, dict(logged, loss=float(loss.detach()))


def relative_error(gradient: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|gradient - expected| / |expected| over all parameters."""
    assert gradient.keys() == expected.keys()
    difference = sum(float((gradient[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(float(expected[n].double().square().sum()) for n in expected)
    return math.sqrt(difference / size)


def gradient_is_the_objectives(seen) -> None:
    """Every optimizer step's gradient and the step's logged means are the printed objective's."""
    means = []
    for update in seen.updates:
        loss, logged = objective(seen, update)
        loss.backward()
        model = double_model(seen.args.model or common.TOY_MODEL)
        expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        assert relative_error(update.clipped, expected) < 1e-4
        logged["grad_norm"] = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
        means.append(logged)
    for name in means[0]:
        average = statistics.fmean(logged[name] for logged in means)
        assert seen.metrics[-1][name] == pytest.approx(average, rel=1e-3, abs=2e-5), name


@pytest.mark.quick
@each_script
def test_gradient_is_the_printed_objectives(script, watch):
    """Clip active, KL, entropy bonus, two minibatches, several micro-batches, advantages of both signs."""
    seen = watch(script)
    signs = {response.advantage > 0 for response in seen.updates[1].responses if response.advantage}
    assert signs == {True, False} and len(seen.updates) == 2 and min(u.micros for u in seen.updates) > 1
    assert seen.metrics[-1]["clip_fraction"] > 0.02 and seen.metrics[-1]["kl"] > 0.01
    follows_the_paper(seen)
    gradient_is_the_objectives(seen)
    assert seen.updates[0].grad_norm == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in seen.updates[0].gradient.values())), rel=1e-4)


@each_script
def test_one_minibatch_token_mean_no_reference(script, watch):
    """A single minibatch: its own log-probs are the old ones. KL 0: no reference model. Mean over all tokens."""
    seen = watch(script, **PLAIN_STEP)
    scored = ["old_logp"] if script in ("scrl", "ettrl") else []  # their rewards need entropies
    assert [call for call in seen.calls if call.endswith("logp")] == scored
    assert seen.run.reference is None and seen.metrics[-1]["kl"] == 0 and len(seen.updates) == 1
    gradient_is_the_objectives(seen)
    old = log_probs(seen, seen.weights[1], seen.updates[0].responses)
    for response in seen.updates[0].responses:
        assert response.old_logp.tolist() == pytest.approx(old[id(response)], abs=1e-4)


PLAIN_STEP = dict(num_minibatches=1, loss_aggregation="token-mean", kl_coef=0.0)


@each_script
@pytest.mark.parametrize("flags", [{}, PLAIN_STEP], ids=["seq-mean", "token-mean"])
def test_rank_of_two_with_nothing_left(script, flags, watch):
    """A filler (a response computed once more so that ranks agree) counts for nothing, and the loss is doubled,
    because FSDP averages over two ranks."""
    def second_rank(run):
        original = run.policy.micro_batches

        def micro_batches(rollouts):
            yield from original(rollouts)
            yield MicroBatch([rollouts[0]], [], run.device, filler=True)

        def pretend(ranks):
            run.world_size = ranks

        run.policy.micro_batches = micro_batches
        spy(run, "begin_step", after=lambda result, step: pretend(2))
        spy(run, "log_update", before=lambda norm: pretend(1), after=lambda result, norm: pretend(2))

    alone, seen = watch(script, **flags), watch(script, meddle=second_rank, **flags)
    twice = {name: 2 * g for name, g in alone.updates[0].gradient.items()}
    assert relative_error(seen.updates[0].gradient, twice) < 1e-4
    assert seen.metrics[-1]["entropy"] == pytest.approx(alone.metrics[-1]["entropy"], rel=1e-3)


@each_script
def test_plain_is_the_same_step(script, watch):
    """--plain, transformers' generate with padded rows and full logits, draws the same tokens and updates alike."""
    engine, plain = watch(script), watch(script, plain=True)
    assert type(plain.run.sampler).__name__ == "PlainSampler" and not plain.run.policy.packed
    assert [s.tokens for s in plain.samples] == [s.tokens for s in engine.samples]
    for ours, theirs in zip(engine.updates, plain.updates, strict=True):
        assert relative_error(ours.clipped, theirs.clipped) < 1e-3
    ours, theirs = untimed(engine.metrics)[-1], untimed(plain.metrics)[-1]
    assert ours.pop("logp_diff_max") < 1e-3 and theirs.pop("logp_diff_max") < 1e-3
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


# --------------------------------------------- what is trained, and when -----------------------------------
@each_script
def test_trained_are_the_seeded_subset(script, watch):
    """G different responses of each prompt, by (seed, step, prompt) alone; all of them, and no others, once."""
    seen = watch(script)
    expected = []
    for group in seen.groups:
        n = len(group.responses)
        rng = random.Random(seed_of(seen.args.seed, "subset", 1, group.prompt.id))
        assert group.trained == sorted(rng.sample(range(n), 6)) and n == seen.args.responses_per_prompt()
        expected += [group.responses[i] for i in group.trained]
    if script == "dynamic_rl":
        expected = [response for (response,) in seen.samples[0].groups] + expected
    assert list(map(id, seen.updates[0].train)) == list(map(id, expected))
    updated = [id(response) for update in seen.updates for response in update.responses]
    assert sorted(updated) == sorted(map(id, expected))
    sizes = [len(update.responses) for update in seen.updates]
    assert max(sizes) - min(sizes) <= 1
    assert len({tuple(group.trained) for group in seen.groups}) > 1


SAMPLED = dict(ettrl=["generate"] * 2, dynamic_rl=["generate"] * 2)  # trunks and branches, questions and solutions
SCORED = dict(scrl=["old_logp"], ettrl=["old_logp"])


@each_script
def test_two_steps(script, watch):
    """The order of everything, the learning rate, the clipped gradient, AdamW by hand, and what is left on disk."""
    seen = watch(script, steps=2, warmup=1.0, grad_clip=0.05)
    votes = ["sync", "generate", "sleep"] if script == "restrain" else []  # of the initial model
    step = ["sync", *SAMPLED.get(script, ["generate"]), "sleep", *SCORED.get(script, []), "old_logp", "ref_logp",
            "compare", "split", "update", "update", "end"]
    assert seen.calls == votes + step + step
    assert all(call.fresh for call in seen.generated)
    assert not torch.equal(*(next(iter(seen.weights[k].values())) for k in (1, 2)))

    lr = seen.args.lr
    assert [update.lr for update in seen.updates] == pytest.approx([lr / 2, lr / 2, lr, lr])
    for update in seen.updates:
        assert update.grad_norm > 0.05
        scaled = {name: g * 0.05 / update.grad_norm for name, g in update.gradient.items()}
        assert relative_error(update.clipped, scaled) < 1e-4
    for number, line in enumerate(seen.metrics, 1):
        norms = [update.grad_norm for update in seen.updates if update.step == number]
        assert line["step"] == number and line["lr"] == pytest.approx(lr * number / 2)
        assert line["grad_norm"] == pytest.approx(statistics.fmean(norms)) and line["skipped_updates"] == 0

    by_hand = adamw(seen)
    weights = seen.policy_weights()
    for name, value in by_hand.items():
        torch.testing.assert_close(weights[name].double(), value, atol=2e-7, rtol=1e-5)
    saved = fresh_state(seen.out / "final")
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
    timed = {name for name in seen.metrics[-1] if name.startswith("seconds/")}
    assert timed >= {f"seconds/{phase}" for phase in "sync sample vote score update step".split()}


def adamw(seen) -> dict[str, torch.Tensor]:
    """AdamW's weights after all updates (Loshchilov and Hutter 2019, Algorithm 2), in float64."""
    values = {name: value.double() for name, value in seen.updates[0].weights.items()}
    m = {name: torch.zeros_like(value) for name, value in values.items()}
    v = {name: torch.zeros_like(value) for name, value in values.items()}
    for t, update in enumerate(seen.updates, 1):
        for name in values:
            g = update.clipped[name].double()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            step = m[name] / (1 - 0.9 ** t) / ((v[name] / (1 - 0.999 ** t)).sqrt() + 1e-8)
            values[name] = values[name] - update.lr * (step + seen.args.weight_decay * values[name])
    return values


TINY = dict(votes=2, train_samples=2, max_new_tokens=2, num_minibatches=1, kl_coef=0.0)


def test_learning_rate_of_every_step(watch):
    """Warm-up over a quarter of 8 steps, then a cosine that would be 0 at the 9th."""
    seen = watch("ttrl", steps=8, warmup=0.25, prompts_per_batch=1, **TINY)
    cosine = [0.5 * (1 + math.cos(math.pi * k / 7)) for k in range(1, 7)]
    expected = [seen.args.lr * share for share in [0.5, 1.0, *cosine]]
    assert [update.lr for update in seen.updates] == pytest.approx(expected)
    assert [line["lr"] for line in seen.metrics] == pytest.approx(expected)


def poison(*bad: int):
    """Make the loss of these updates (counted over the whole run) NaN."""
    def meddle(run):
        original, done = run.policy.logprobs, Counter()

        def logprobs(micro, temperature):
            logp, entropy = original(micro, temperature)
            poisoned = torch.is_grad_enabled() and done["updates"] in bad
            return logp * math.nan if poisoned else logp, entropy

        def count(norm, largest):
            done["updates"] += 1

        run.policy.logprobs = logprobs
        spy(run.policy, "clip_grad_norm", after=count)

    return meddle


@each_script
def test_a_bad_update_is_skipped_and_counted(script, watch):
    """The first of two updates has no finite gradient: weights stay, the second is made, the log is JSON."""
    seen = watch(script, meddle=poison(0))
    bad, good = seen.updates
    assert (bad.stepped, good.stepped) == (False, True) and math.isnan(bad.grad_norm)
    assert all(torch.equal(bad.weights[name], good.weights[name]) for name in bad.weights)
    assert all(torch.isfinite(g).all() for g in good.clipped.values())
    line = seen.metrics[-1]
    assert line["skipped_updates"] == 1 and line["grad_norm"] == pytest.approx(good.grad_norm)
    assert all(math.isfinite(value) for value in line.values()) and "loss" in line


def test_bad_updates_in_a_row_stop_the_run(watch):
    options = dict(steps=2, max_bad_steps=2)
    seen = watch("ttrl", meddle=poison(0, 2), **options)  # a good one between them
    assert [line["skipped_updates"] for line in seen.metrics] == [1, 1]
    seen = watch.prepare("ttrl", meddle=poison(1, 2), **options)
    with pytest.raises(UserError, match="2 optimizer steps in a row had a non-finite loss"):
        seen.main()
    assert [update.stepped for update in seen.updates] == [True, False, False, False]


def stale(factor):
    """The sampler gets other weights than the policy's."""
    def meddle(run):
        original = run.sampler.load

        def load(tensors):
            original((name, tensor * factor) for name, tensor in tensors)

        run.sampler.load = load

    return meddle


@each_script
def test_a_sampler_with_other_weights_stops_the_run(script, watch):
    seen = watch.prepare(script, meddle=stale(1.02))
    with pytest.raises(UserError, match="the sampler does not run the current policy"):
        seen.main()
    assert seen.calls[-1] == "compare" and not seen.updates  # before anything is updated
    assert seen.run.logp_diff["logp_diff_max"] > 1e-3


def test_a_sampler_with_other_weights_and_a_single_minibatch(watch):
    seen = watch.prepare("ttrl", meddle=stale(1.02), **PLAIN_STEP)
    with pytest.raises(UserError, match="the sampler does not run the current policy"):
        seen.main()
    seen = watch("ttrl", meddle=stale(1.02), max_logp_diff=100.0, **PLAIN_STEP)
    assert seen.metrics[-1]["logp_diff_max"] > 1e-3


@pytest.mark.parametrize("script", ["ttrl", "evol_rl", "scrl", "restrain", "ettrl"])
def test_unanimous_prompts_teach_nothing(script, watch):
    """All answers alike, right, wrong or none: advantages 0, and without KL and entropy a gradient of 0."""
    options = dict(kl_coef=0.0, entropy_coef=0.0)
    if script == "evol_rl":
        options["novelty"] = False  # or the more novel of the majority are paid more
    if script == "restrain":
        options["kappa"] = 0  # or the prompt without answers is penalised
    same = {0: "gggggggg", 1: "aaaaaaaa", 2: "--------", 3: "bbbbbbbb", 4: "gggggggg"}
    seen = watch(script, answers=same, **options)
    assert all(response.advantage == 0 for response in seen.updates[0].train)
    assert all(update.grad_norm == 0 for update in seen.updates)
    assert seen.metrics[-1]["zero_variance"] == 1
