"""Checks an exercise: `python -m lab.exercises.check 3`; without a number, all six.

Your function is compared with the script's own on random inputs: the solutions are the scripts."""

import argparse
import copy
import importlib
import random
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
EXERCISES = dict(enumerate("""ttrl.majority_reward ttrl.group_advantages scrl.pseudo_labels
    restrain.restrain_advantages ettrl.reshape_advantages ttrl.k3""".split(), 1))  # number: script.function


# ------------------------------------------- random inputs; d: a random.Random -----------------------------
def votes(d, *counts, few: int = 0, none: int = 0) -> list[int | None]:
    """Classes with these vote counts and up to nine with at most `few`, under random names, in any order."""
    counts, classes = list(counts), [None] * d.randint(0, none)
    counts += [d.randint(1, few) for _ in range(d.randint(0, 9) if few else 0)]
    for name, count in zip(d.sample(range(2 * len(counts)), len(counts)), counts):
        classes += [name] * count
    return d.sample(classes, len(classes))


def sure(d, classes, **thresholds) -> tuple:
    """SCRL's arguments: the entropies, eighths, whose means are exact, or all equal."""
    choice = d.choice([[4], [1, 1, 2, 4, 8], [1, 1, 2, 4, 8]])
    return classes, [d.choice(choice) / 8 for _ in classes], thresholds


def floats(d, n: int, scale: float = 1.0, least: int = -20) -> torch.Tensor:
    return torch.tensor([d.randint(least, 20) / 10 * scale for _ in range(n)])


VOTES = [6, 3, 3, 2, 1, 1], [7, 5, 2, 1, 1], [7, 7, 1, 1], [8], [5, 4, 3, 3, 1], [2, 1], [4, 4, 4, 2, 1, 1]
INPUTS = {  # kinds of inputs, ordinary ones first: (what is right there, the arguments, a dict: by name)
    1: [("Whoever agrees with the most frequent answer gets 1, all others 0, in a float tensor [N].",
         lambda d: [votes(d, d.choice([5, 6]), few=d.choice([1, 4]))]),
        ("None is no answer: it does not vote, and its reward is 0. Perhaps nobody has answered.",
         lambda d: [votes(d, *d.choice([[], [1], [3]]), none=6) + [None]]),
        ("A tie: of equals the class seen first wins.", lambda d: [votes(d, 2, 2, few=2, none=2)])],
    2: [("Subtract the mean, then divide by the std (plus eps). Rewards may be any numbers.",
         lambda d: [d.choice([floats(d, d.randint(2, 16)), torch.eye(d.choice([2, 5, 20, 200]))[0]])]),
        ("All rewards are equal, or there is one: all advantages are 0. (A std may be a rounding error.)",
         lambda d: [floats(d, 1).repeat(d.randint(1, 9))]),
        ("Rewards that differ by a millionth: eps, which is an argument, is added to their std.",
         lambda d: [d.choice([floats(d, 5, 1e-6), 1 + torch.tensor([0, 1, 1, 2]) / 2 ** 18]),
                    dict(eps=d.choice([1e-6, 1e-5]))])],
    3: [("Positive: share >= 3/8, lead > 1/8 (alone: its share). Negative: share < 1/8 and H_j >= H_bar.",
         lambda d: sure(d, votes(d, *d.choice(VOTES)))),
        ("If the top answer is no positive label, it may be a negative one.",
         lambda d: sure(d, votes(d, *[1] * 9, few=1))),
        ("None counts in N, and its entropy in H_bar, but it is no answer.",
         lambda d: sure(d, votes(d, *d.choice([[], [5, 1, 1], [7, 5]]), few=2, none=9) + [None])),
        ("An answer that is alone leads by its share.",
         lambda d: sure(d, votes(d, 2, none=9), tau_pos=0.1, tau_marg=0.3)),
        ("The thresholds are arguments. The positive label is never a negative one.",
         lambda d: sure(d, votes(d, *d.choice(VOTES)), tau_pos=d.randint(0, 8) / 16,
                        tau_marg=d.randint(0, 4) / 16, tau_neg=d.randint(1, 8) / 16))],
    4: [("One label after the other: advantages, both their parts, times the weight.",
         lambda d: [votes(d, d.randint(3, 5), few=4)]),
        ("None is no label, but counts in n; its reward is 0 under every label.",
         lambda d: [votes(d, 3, few=3) + [None] * d.randint(1, 6)]),
        ("The majority has fewer than kappa votes (perhaps nobody has answered): A+ is 0, A- is -delta.",
         lambda d: [votes(d, few=2, none=4) + [None]]),
        ("kappa, delta and sigma are arguments.", lambda d: [
            votes(d, 2, few=5), d.randint(1, 5), d.choice([0.5, 2.0]), d.choice([0.3, 2.0])])],
    5: [("The factor is 1 + (avg H - H_i) / avg H, clipped to 1 - alpha .. 1 + beta.", lambda d: [
            floats(d, n := d.randint(2, 6)), floats(d, n, d.choice([.01, 1e-5]), 0),
            d.choice([{}, dict(alpha=d.random(), beta=d.random())])]),
        ("All entropies are 0: the advantages stay.", lambda d: [floats(d, 3), torch.zeros(3)])],
    6: [("The value is exp(d) - d - 1 with d = log pi_ref - log pi, its gradient 1 - exp(d), at each token.",
         lambda d: [floats(d, 4, 9) - 18, floats(d, 4, 9) - 18])]}


def solution(number: int, change: str = " => "):
    """The script's function, after a change of its text; k3 is two lines of the loop."""
    script, name = EXERCISES[number].split(".")
    text = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    loop = re.findall(r"    ((?:d|kl)_T = .*)", text.replace("micro.", ""))
    text += "\n    ".join(["def k3(logp_T, ref_logp_T):", *loop, "return kl_T"])
    names = dict(__name__=script)
    exec(text.replace(*change.split(" => ")), names)
    return names[name]


def outcome(number: int, function, arguments: list):
    """What an answer returns for copies of the arguments, k3 with its gradient; else what went wrong."""
    copies = copy.deepcopy(list(arguments))
    named = copies.pop() if isinstance(copies[-1], dict) else {}
    try:
        if number < 6:
            result = function(*copies, **named)
        else:  # the tokens weigh 1 to 4; + 0: a detached result has the gradient 0
            value = function(copies[0].requires_grad_(), copies[1])
            (value @ torch.arange(1.0, 5) + 0 * copies[0].sum()).backward()
            result = value.detach(), copies[0].grad
    except Exception as error:
        return error
    return result if same(copies, tuple(arguments[:len(copies)])) else "The input is changed: work on a copy."


def same(ours, theirs) -> bool:
    """Whether a result is the expected one: float tensors of one shape, sets, classes or None."""
    if isinstance(theirs, tuple):
        return isinstance(ours, tuple | list) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if not isinstance(theirs, torch.Tensor):
        return not isinstance(ours, torch.Tensor) and ours == theirs
    floats = isinstance(ours, torch.Tensor) and ours.is_floating_point() and ours.shape == theirs.shape
    return floats and torch.allclose(ours.double(), theirs.double(), 1e-3, 1e-4)


def check(number: int, function=None) -> bool:
    """Whether an exercise is right; prints what to tell the student. function: instead of the file's."""
    script, name = EXERCISES[number].split(".")
    file = next(ROOT.glob(f"lab/exercises/ex{number}_*.py")).stem
    function = function or getattr(importlib.import_module(f"lab.exercises.{file}"), name)
    right = solution(number)
    for hint, make in INPUTS[number]:
        inputs = [make(random.Random(seed)) for seed in range(50)]
        tried = [(given, outcome(number, function, given), outcome(number, right, given)) for given in inputs]
        if wrong := [row for row in tried if not same(*row[1:])]:
            break
    else:
        print(f"Exercise {number} is right. Now compare your text with {script}.py's.")
        return True
    arguments, found, expected = min(wrong, key=lambda row: len(str(row[0])))
    if isinstance(found, NotImplementedError):
        print(f"Exercise {number} is open: write {name}. The task: lab/exercises/{file}.py.")
        return False
    print(f"Exercise {number} is wrong for {name}{tuple(arguments)}\n    yours: {found!r}\n"
          f"    {script}.py: {expected}\n{hint}")
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m lab.exercises.check", description=__doc__.split("\n\n")[1])
    parser.add_argument("number", type=int, nargs="?", choices=EXERCISES, help="without it, all are checked")
    number = parser.parse_args().number
    sys.exit(sum(not check(each) for each in ([number] if number else EXERCISES)))
