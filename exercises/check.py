"""Checks an exercise: `python -m exercises.check 3`; without a number, all six.

Your function is compared with the script's own on a few telling cases: the solutions are the scripts."""

import argparse
import ast
import importlib
import math
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

from exercises.cases import CASES

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = dict(enumerate("""ttrl.majority_reward ttrl.group_advantages scrl.pseudo_labels
    restrain.restrain_advantages ettrl.reshape_advantages ttrl.k3""".split(), 1))  # number: script.function


def solution(script: str, name: str):
    """The script's function, from its text (its import takes seconds), and `majority`, which it may call.

    k3 is two lines of the loop."""
    text = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    if name == "k3":
        lines = [line.strip() for line in text.splitlines() if line.strip().startswith(("d_T =", "kl_T ="))]
        text = "\n    ".join(["def k3(logp_T, ref_logp_T):",
                              "micro = SimpleNamespace(ref_logp_T=ref_logp_T)", *lines, "return kl_T"])
    future, *rest = ast.parse("from __future__ import annotations\n" + text).body  # these name absent classes
    rest += [node for node in ast.parse((ROOT / "engine/metrics.py").read_text(encoding="utf-8")).body
             if getattr(node, "name", "") == "majority"]
    functions = [node for node in rest if isinstance(node, ast.FunctionDef)]
    names = dict(math=math, mean=mean, Counter=Counter, SimpleNamespace=SimpleNamespace)
    if name != "pseudo_labels":  # which needs no tensors, and no second for this import
        names["torch"] = importlib.import_module("torch")
    exec(compile(ast.Module([future, *functions], []), script, "exec"), names)
    names["common"] = SimpleNamespace(majority=names["majority"])
    return names[name]


def real_step(text: str = "6*9=54. 54+8=62. Answer: \\boxed{62}.") -> tuple:
    """Log-probs [T] of a text under the toy after a gradient step towards it, and before."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(ROOT / "toy")
    ids, found = AutoTokenizer.from_pretrained(ROOT / "toy")(text, return_tensors="pt").input_ids, []
    for _ in range(2):
        logp_T = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        (-logp_T.mean()).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found.append(logp_T.detach())
    return found[1], found[0]


def with_gradient(k3, logp_T, ref_logp_T) -> tuple:
    """k3's values [T], and their gradient at the policy's log-probs [T]."""
    logp_T = logp_T.clone().requires_grad_()
    kl_T = k3(logp_T, ref_logp_T)
    (kl_T + 0 * logp_T).sum().backward()  # the second term: k3's own graph may be empty
    return kl_T.detach(), logp_T.grad


def plain(result):
    """Tensors and lists as floats of 3 decimals: results are compared by their repr, NaN and all."""
    if isinstance(result, tuple):
        return tuple(map(plain, result))
    result = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(result, list):
        return result
    return [round(float(value), 3) + 0.0 for value in result]  # + 0.0: no -0.0


def check(number: int, function=None) -> bool:
    """Whether an exercise is right; prints what to tell the student. function: instead of the file's."""
    script, name = EXERCISES[number].split(".")
    file = next(ROOT.glob(f"exercises/ex{number}_*.py")).stem
    function = function or getattr(importlib.import_module(f"exercises.{file}"), name)
    wrap = partial(partial, with_gradient) if name == "k3" else lambda function: function
    for place, (arguments, hint, *mistakes) in enumerate(CASES[number], 1):
        if number in (2, 5, 6):
            tensor = importlib.import_module("torch").tensor
            arguments = tuple(map(tensor, arguments)) or real_step()
        expected = plain(wrap(solution(script, name))(*arguments))
        try:
            result = plain(wrap(function)(*arguments))
        except NotImplementedError:
            print(f"Exercise {number} is open: write {name}. The task: exercises/{file}.py.")
            return False
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        if repr(result) != repr(expected):
            hint = {repr(plain(wrong)): its_own for wrong, its_own in mistakes}.get(repr(result), hint)
            print(f"Exercise {number}, case {place} of {len(CASES[number])}: {name}{arguments}\n"
                  f"    yours: {result}\n    {script}.py: {expected}\n{hint}")
            return False
    print(f"Exercise {number} is right. Now compare your text with {script}.py's.")
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m exercises.check", description=__doc__.split("\n\n")[1])
    parser.add_argument("number", type=int, nargs="?", choices=EXERCISES, help="without it, all are checked")
    number = parser.parse_args().number
    sys.exit(sum(not check(each) for each in ([number] if number else EXERCISES)))
