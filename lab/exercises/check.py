"""Checks an exercise: `python -m lab.exercises.check 3`; without a number, all six.

Your function is compared with the script's own on some inputs: the solutions are the scripts."""

import argparse
import copy
import importlib
import re
import sys
import traceback
from pathlib import Path

import scrl
import torch

ROOT = Path(__file__).resolve().parents[2]
EXERCISES = dict(enumerate("""ttrl.majority_reward ttrl.group_advantages scrl.pseudo_labels
    restrain.restrain_advantages ettrl.reshape_advantages ttrl.k3""".split(), 1))  # number: script.function
# Kinds of inputs, ordinary ones first: (what is right there, calls). Their words: letters are answers, - is
# none, digits are entropies in eighths, commas make a tensor, = names an argument. No result depends on how a
# number is rounded: shares are of 8 or 16 votes, and equal rewards have an exact mean.
INPUTS = {
    1: [("Whoever agrees with the most frequent answer gets 1, all others 0, in a float tensor [N].",
         "aab; cabaac"),
        ("None is no answer: it does not vote, and its reward is 0. Perhaps nobody has answered.",
         "a--; --; -b--cb"),
        ("A tie: of equals the class seen first wins.", "ba; -cbbca")],
    2: [("Subtract the mean, divide by the unbiased std (of G - 1) plus eps. Rewards may be any numbers.",
         "1,0,0,1; .3,-2,1.5,0,.5; 1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0"),
        ("All rewards are equal, or there is one: all advantages are 0.", "1,; 0,0; .5,.5,.5,.5"),
        ("Rewards that differ by a millionth: eps, which is an argument, is added to their std.",
         "0,1e-6,3e-6; 0,1e-6,3e-6 eps=1e-5")],
    3: [("Positive: share >= 3/8, lead > 1/8 (alone: its share). Negative: share < 1/8 and H_j >= H_bar.",
         "aaaaaabc 44444444; aaabbccd 11111111; aaabcdef 12481248; aaaaaaaabbbbccde 1111111111111181; "
         "abbbbbbbbbbbbbcd 4444444444444444"),
        ("If the top answer is no positive label, it may be a negative one.",
         "abcdefghijklmnop 4444444444444444"),
        ("None counts in N, and its entropy in H_bar, but it is no answer.",
         "--- 111; aa-bc--- 11111111; aaaaaaaaaaaab--- 1111111111114888"),
        ("An answer that is alone leads by its share.",
         "aaa----- 11111111 tau_pos=.1 tau_marg=.3; aa------ 11111111 tau_pos=.1 tau_marg=.3"),
        ("The thresholds are those of args. The positive label is never a negative one.",
         "aaaaaabb 44444444 tau_neg=.9; aabbbccc 44444444 tau_pos=.25 tau_marg=0")],
    4: [("One label after the other: its weight (is their sum 1?) times both parts of its advantages.",
         "aaab; caaabbc"),
        ("None is no label, but counts in n; its reward is 0 under every label.", "aaab-; -aaabb--"),
        ("The majority has fewer than kappa votes (perhaps nobody has answered): A+ is 0, A- is -delta.",
         "ab; --; aabb-"),
        ("kappa, delta and sigma are arguments.", "aab kappa=2; aaab kappa=4 delta=.5; aaab sigma=2")],
    5: [("The factor is 1 + (avg H - H_i) / avg H, clipped to 1 - alpha .. 1 + beta.",
         "1,-1 .2,.25; 1,-1,.5 .1,.4,.9 alpha=.5 beta=.1; 1,2 1e-5,2e-5"),
        ("All entropies are 0: the advantages stay.", "1,-1 0,0")],
    6: [("The value is exp(d) - d - 1 with d = log pi_ref - log pi, its gradient 1 - exp(d), at each token.",
         "-1,-2,-.5,-3 -1.5,-1,-.5,-5")]}


def read(call: str) -> tuple[list, dict[str, float]]:
    """The arguments of a call of INPUTS, and those by name."""
    values, named = [], {}
    for word in call.split():
        name, _, text = word.rpartition("=")
        if name:
            named[name] = float(text)
        elif "," in text:
            values.append(torch.tensor([float(number) for number in text.split(",") if number]))
        else:
            values.append([int(c) / 8 if c.isdigit() else None if c == "-" else ord(c) % 26 for c in text])
    return values, named


def solution(number: int, change: str = " => "):
    """The script's function, after a change of its text; k3 is two lines of the loop."""
    script, name = EXERCISES[number].split(".")
    text = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    loop = re.findall(r"    ((?:d|kl)_T = .*)", text.replace("micro.", ""))
    text += "\n    ".join(["def k3(logp_T, ref_logp_T):", *loop, "return kl_T"])
    names = dict(__name__=script)
    exec(text.replace(*change.split(" => ")), names)
    return names[name]


def outcome(number: int, function, values: list, named: dict):
    """What an answer returns for copies of the arguments, k3 with its gradient; else what went wrong."""
    copies = copy.deepcopy(values)
    if number == 3:
        named = dict(args=scrl.Args(**named))
    try:
        if number < 6:
            result = function(*copies, **named)
        else:  # the tokens weigh 1 to 4; + 0: a detached result has the gradient 0
            value = function(copies[0].requires_grad_(), copies[1])
            (value @ torch.arange(1.0, 5) + 0 * copies[0].sum()).backward()
            result = value.detach(), copies[0].grad
    except Exception as error:
        return error
    return result if same(copies, values) else "The input is changed: work on a copy."


def same(ours, theirs) -> bool:
    """Whether a result is the expected one: float tensors of one shape, sets, classes or None."""
    if isinstance(theirs, tuple | list):
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
    for hint, calls in INPUTS[number]:
        for values, named in map(read, calls.split(";")):
            found, expected = (outcome(number, f, values, named) for f in (function, solution(number)))
            if isinstance(found, NotImplementedError):
                print(f"Exercise {number} is open: write {name}. The task: lab/exercises/{file}.py.")
                return False
            if not same(found, expected):
                print(f"Exercise {number} is wrong for {name}{(*values, *named.items())}\n"
                      f"    yours: {found!r}\n    {script}.py: {expected}\n{hint}")
                if isinstance(found, Exception):  # with the line of the bug
                    traceback.print_exception(found, file=sys.stdout)
                return False
    print(f"Exercise {number} is right. Now compare your text with {script}.py's.")
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m lab.exercises.check", description=__doc__.split("\n\n")[1])
    parser.add_argument("number", type=int, nargs="?", choices=EXERCISES, help="without it, all are checked")
    number = parser.parse_args().number
    sys.exit(sum(not check(each) for each in ([number] if number else EXERCISES)))
