"""The papers' equations and the objective, written out slowly: what the tests compare the scripts with.

From a run that conftest.Watched recorded: rewards, labels and advantages from the answers alone, log-probs
and entropies from transformers' own model in float64 on full logits, and the loss token by token."""

import functools
import math
import statistics
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import options
from evol_rl import Embedder


# ------------------------------------------- the model, slow and obvious -----------------------------------
@functools.cache
def double_model(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def model_with(seen, weights: dict[str, torch.Tensor]):
    """Transformers' own model in float64 with these weights."""
    model = double_model(seen.args.model or options.TOY_MODEL)
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
def log_probs(seen, weights, responses) -> dict[int, torch.Tensor]:
    """{id of a response: log-probs of its tokens, [T]}."""
    model = model_with(seen, weights)
    values = {}
    for response in responses:
        rows = log_softmax_rows(model, response, seen.args.temperature)
        values[id(response)] = rows[range(len(rows)), response.response_ids]
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
    """What the objective wants of a response: scale * sum_j weight_j min(ratio A_j, clip(ratio) A_j)."""
    parts: list[tuple[float, float]]
    scale: float = 1.0
    question: bool = False

    def advantage(self) -> float:
        """sum_j weight_j A_j"""
        return sum(weight * a for weight, a in self.parts)


def answers_of(group) -> list[str | None]:
    return [response.answer for response in group.responses]


def vote(answers: list[str | None]) -> str | None:
    given = [answer for answer in answers if answer is not None]
    return max(given, key=given.count, default=None)  # of equals the first


def z(values: list[float]) -> list[float]:
    """(value - mean) / (std + 1e-6), 0 if all are equal or there is one."""
    if len(values) < 2:
        return [0.0]
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / (spread + 1e-6) if spread > 1e-7 else 0.0 for value in values]


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
        if answer is None:
            continue
        has_number, is_right = any(s.isdigit() for s in answer), gold and answer == right
        if has_number or is_right:
            valid.append(i)
    label = right if gold else vote([answer if i in valid else None for i, answer in enumerate(answers)])
    if not seen.args.novelty:
        return [float(i in valid and answer == label) for i, answer in enumerate(answers)], label, set()
    vectors = Embedder("words")([response.text for response in group.responses])
    rewards = [-1.0] * len(answers)
    for in_majority in (True, False):
        block = [i for i in valid if (answers[i] == label) == in_majority]
        novelties = []
        for i in block:
            mates = [float(vectors[i] @ vectors[j]) for j in block if j != i]
            others = [float(vectors[i] @ vectors[j]) for j in valid if j != i]
            alpha = seen.args.alpha
            mean, most = statistics.fmean(mates or [0]), max(others, default=0)
            novelties.append(1 - (alpha * mean + (1 - alpha) * most))
        for i, u in zip(block, novelties):
            low, high = min(novelties), max(novelties)
            scaled = 0.5  # all equally novel, and 1 if alone: as in the released code
            if high - low > 1e-6 or len(block) == 1:
                scaled = 1.0 if len(block) == 1 else (u - low) / (high - low)
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
    clear = share >= args.tau_pos and lead > args.tau_marg
    positive = top if clear or not args.selective_positive else None
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
    return math.exp(-(share - 1) ** 2 / (2 * sigma ** 2))


def restrain_targets(seen, group) -> tuple[list[Target], object]:
    """Eq. 3 (w_j), 4 (A_ij and the penalty), 5 (u); and w, None if all are penalised."""
    args, answers = seen.args, answers_of(group)
    counts = Counter(answer for answer in answers if answer is not None)
    votes, n = max(counts.values(), default=0), len(answers)
    u = 1.0
    if args.prompt_weighting == "offline":  # of the base model's own responses
        before = next(s for s in seen.samples if s.step == 0)
        initial = [r.answer for r in before.groups[before.prompts.index(group.prompt)]]
        given = [answer for answer in initial if answer is not None]
        u = gaussian(given.count(vote(initial)) / len(initial), args.prompt_sigma)
    if args.prompt_weighting == "online":
        u = gaussian(votes / n, args.prompt_sigma)
    if votes < args.kappa:
        return [Target([(1.0, -args.delta)], u)] * n, None
    if args.label_weighting == "majority":
        raw = {answer: float(answer == vote(answers)) for answer in counts}
    elif args.label_weighting == "uniform":
        raw = dict.fromkeys(counts, 1.0)
    else:
        raw = {answer: gaussian(count / n, args.sigma) for answer, count in counts.items()}
    weights = {answer: weight / sum(raw.values()) for answer, weight in raw.items()}
    advantages = {}
    for label in weights:
        advantages[label] = z([float(answer == label) for answer in answers])
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
        if seen.script == "dynamic_rl":  # Eq. 14: of all m solutions
            scale, whole = seen.args.lambda_s * (not written or written_questions(seen)[k].kept), z(rewards)
            advantages = [scale * whole[i] for i in group.trained]
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
            rewards = [target.advantage() for target in whole]
            if weights is None:
                assert group.label is None
            else:
                assert {name_of[c]: w for c, w in group.label.items()} == pytest.approx(weights, abs=1e-6)
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
            assert response.advantage == pytest.approx(target.advantage(), abs=2e-4)
    assert len(targets) == len(seen.updates[0].train)
    if seen.script == "dynamic_rl" and not seen.args.dataset:
        for question in written_questions(seen):
            assert question.response.response_ids == question.trained
            (_, advantage), = targets[id(question.response)].parts
            assert question.response.advantage == pytest.approx(advantage, abs=2e-4)


# ---------------------------------------------- the objective ----------------------------------------------
def per_token(seen, update):
    """(response, log-probs before the update, log-probs, KL and entropy, [T] each) of a minibatch's
    responses, with a graph, which must be used before other weights are put into the model."""
    old = log_probs(seen, seen.weights[update.step], update.responses)
    ref = log_probs(seen, seen.weights["initial"], update.responses)
    model = model_with(seen, update.weights)
    for response in update.responses:
        rows = log_softmax_rows(model, response, seen.args.temperature)
        logp = rows[range(len(rows)), response.response_ids]
        d = (ref[id(response)] - logp) * bool(seen.args.kl_coef)
        yield response, old[id(response)], logp, d.exp() - d - 1, -(rows.exp() * rows).sum(-1)


def objective(seen, update) -> tuple[torch.Tensor, Counter]:
    """The printed loss of a minibatch, with a graph, and the means that are logged of it."""
    args, targets, loss = seen.args, targets_of(seen, update.step), 0.0
    logged, weights = Counter(), Counter()
    masks = {}  # which tokens count
    for response in update.responses:
        all_T = torch.ones(len(response.response_ids))
        masks[id(response)] = all_T if response.mask is None else response.mask
    tokens = sum(mask.sum() for mask in masks.values())
    for response, old, logp, kl, entropy in per_token(seen, update):
        target, mask = targets[id(response)], masks[id(response)].double()
        mates = sum(targets[id(other)].question == target.question for other in update.responses)
        share_T = mask / (mask.sum() * mates)
        if args.loss_aggregation == "token-mean":
            share_T = mask / tokens
        ratio = (logp - old).exp()
        clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
        surrogate = sum(weight * torch.minimum(ratio * a, clipped * a) for weight, a in target.parts)
        wanted = -surrogate + args.kl_coef * kl - args.entropy_coef * entropy
        loss = loss + target.scale * (share_T * wanted).sum()
        means = dict(entropy=entropy, clip_fraction=ratio != clipped) | (dict(kl=kl) if args.kl_coef else {})
        if target.question:
            means = dict(question_entropy=entropy)
        for name, x_T in means.items():
            logged[name] += (share_T * x_T).sum().item()
            weights[name] += share_T.sum().item()
    logged = {name: total / weights[name] for name, total in logged.items()}
    logged["loss"] = loss.item()
    return loss, logged


def norm(gradient: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))


def relative_error(found, expected) -> float:
    """|found - expected| / |expected|: of tensors or lists of numbers, of dicts over all their tensors.

    For what a model computes: a small element may round by far more than itself on another processor."""
    if not isinstance(expected, dict):
        found, expected = ({"": torch.as_tensor(x).detach()} for x in (found, expected))
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in expected.items()}
    difference = {name: found[name].double() - expected[name].double() for name in expected}
    return norm(difference) / norm(expected)


def gradient_is_the_objectives(seen, objective=objective, through=None) -> None:
    """Every optimizer step's gradient and the step's logged means are the printed objective's.

    through: makes the weights' gradient that of the parameters which are trained."""
    means = []
    for update in seen.updates:
        loss, logged = objective(seen, update)
        loss.backward()
        model = double_model(seen.args.model or options.TOY_MODEL)
        expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        expected = through(seen, update, expected) if through else expected
        assert relative_error(update.clipped, expected) < 1e-4
        logged["grad_norm"] = norm(expected)
        means.append(logged)
    for name in means[0]:
        average = statistics.fmean(logged[name] for logged in means if name in logged)
        assert seen.metrics[-1][name] == pytest.approx(average, rel=1e-3, abs=2e-5), name
