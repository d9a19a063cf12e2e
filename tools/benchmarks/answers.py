"""Grouping 8 prompts x 64 answers: engine/answers.py against pairwise math-verify, in the same run.

    python -m tools.benchmarks.answers [--seconds 1] [--out answers.json]

"first call" starts the worker process; "new answers" has the worker running and nothing cached, which is
what a training step sees; "seen answers" is what a later step sees of a problem it returns to. Baselines,
both parsing every distinct string once: every pair of answers with `verify`, and the cheaper greedy
grouping (each answer against one answer of each class so far), whose result depends on the order. Also
counts the pairs on which the two sides disagree.
"""

from __future__ import annotations

import logging
import random
import time
from itertools import combinations

from math_verify import parse, verify

from engine import answers
from tools.benchmarks.measure import arguments, save

# What samples of a small model look like: a few spellings of the right answer, popular mistakes, a tail.
PROMPTS = [
    (["204", "204.0", "x = 204", r"\text{204}"], ["192", "210", "408", "1020"]),
    (["10080", "10,080", r"10,\!080", "10{,}080"], ["5040", "40,320", "720", r"\frac{10080}{2}"]),
    ([r"\frac{1}{2}", r"\dfrac{1}{2}", "0.5", "1/2"], [r"\frac{1}{3}", "2", r"\frac{2}{3}", "0.25"]),
    ([r"2\sqrt{5}", r"\sqrt{20}", r"2 \sqrt 5", r"2\sqrt{5} \text{ cm}"],
     [r"\sqrt{5}", r"5\sqrt{2}", "4.47", r"\sqrt{10}"]),
    ([r"\left(3, \frac{\pi}{2}\right)", r"(3, \pi/2)", r"\left( 3,\dfrac{\pi}{2} \right)"],
     [r"(3, \pi)", r"(3, 0)", r"\left(-3,\frac{\pi}{2}\right)"]),
    ([r"[-2, 7]", r"x \in [-2,7]", r"-2 \le x \le 7"], [r"(-2, 7)", r"[-2, 7)", r"(-\infty, 7]", r"[2,7]"]),
    ([r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", r"\frac{1}{2}n(n+1)"],
     [r"\frac{n(n-1)}{2}", "n^2", "2^n", r"\binom{n}{2}", "n(n+1)"]),
    ([r"90^\circ", "90", r"90^{\circ}", r"90 \text{ degrees}"],
     [r"60^\circ", r"45^\circ", "120", r"\frac{\pi}{2}"])]


def tail_of(k: int, rng: random.Random) -> list[str]:
    """Answers that are given once or twice: to every other prompt fractions, to the later ones roots, too."""
    tail = []
    for _ in range(8):
        fraction = rf"\frac{{{rng.randint(1, 30)}}}{{{rng.randint(2, 30)}}}" if k % 2 else ""
        tail.append(fraction or str(rng.randint(1, 500)))
    for _ in range(3 if k > 2 else 0):
        tail.append(rf"{rng.randint(2, 9)}\sqrt{{{rng.choice([2, 3, 7])}}}")
    return tail


def samples(seed: int = 0, n: int = 64) -> list[list[str]]:
    """n answers to every prompt: half of them right, a quarter popular mistakes, a quarter tail."""
    rng = random.Random(seed)
    groups = []
    for k, (right, mistakes) in enumerate(PROMPTS):
        tail = tail_of(k, rng)
        group = rng.choices(right, k=n // 2) + rng.choices(mistakes, k=n // 4)
        group += rng.choices(tail, k=n - len(group))
        rng.shuffle(group)
        groups.append(group)
    return groups


# ------------------------------------------------ three ways -----------------------------------------------
def ours(groups: list[list[str]]) -> list[list[int | None]]:
    return [answers.equivalence_classes(group) for group in groups]


def equal(a, b) -> bool:
    return verify(a, b, timeout_seconds=None)


def parsed(group: list[str]) -> dict[str, list]:
    return {answer: parse(f"${answer}$", parsing_timeout=None) for answer in set(group)}


def pairwise(groups: list[list[str]]) -> list[list[bool]]:
    """Per group, whether two answers are equal, for all pairs."""
    verdicts = []
    for group in groups:
        tree = parsed(group)
        verdicts.append([equal(tree[a], tree[b]) for a, b in combinations(group, 2)])
    return verdicts


def greedy(groups: list[list[str]]) -> None:
    """Every answer against the first one of each class so far."""
    for group in groups:
        tree, firsts = parsed(group), []
        for answer in group:
            if not any(equal(tree[first], tree[answer]) for first in firsts):
                firsts.append(answer)


# ------------------------------------------------ measuring ------------------------------------------------
def forget() -> None:
    """Empty the caches and start a new worker: the old one's sympy remembers what it has seen."""
    answers.normal_form.cache_clear()
    answers._computed.cache_clear()
    answers._worker.kill()
    answers._worker.wait()
    answers.answers_equal(r"\sqrt{97}+1", r"1+\sqrt{97}")


def timed(function, groups: list[list[str]], least: float = 0.0, before=None) -> tuple[float, list]:
    """(median seconds, result) of calls that take at least so many seconds together."""
    times = []
    while not times or sum(times) < least:
        if before:
            before()
        start = time.perf_counter()
        result = function(groups)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2], result


def disagreements(groups, classes, verdicts) -> list[tuple[str, str]]:
    """The different pairs of answers that the two sides judge differently."""
    differ = set()
    for group, ids, equals in zip(groups, classes, verdicts):
        for (a, b), (id_a, id_b), same in zip(combinations(group, 2), combinations(ids, 2), equals):
            if (id_a == id_b) != same:
                differ.add(tuple(sorted((a, b))))
    return sorted(differ)


def main() -> None:
    parser = arguments("answers", __doc__)
    parser.add_argument("--seconds", type=float, default=1, help="measure ours for at least this long")
    parser.add_argument("--out", default="", help="also write the numbers to this .json file")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # that its time limits are off
    groups = samples()
    for group in groups:
        parsed(group)  # its parser's tables are filled
    first, _ = timed(ours, groups)
    new, classes = timed(ours, groups, args.seconds, before=forget)
    seen, _ = timed(ours, groups, 0.2)
    slow, verdicts = timed(pairwise, groups)
    medium, _ = timed(greedy, groups)
    differ = disagreements(groups, classes, verdicts)
    count = sum(map(len, groups))
    print(f"{count} answers: new {new:.3f} s, seen {seen * 1000:.2f} ms, first call {first:.2f} s")
    print(f"math-verify: pairwise {slow:.2f} s ({slow / new:.0f} x), "
          f"greedy {medium:.2f} s ({medium / new:.1f} x)")
    print(f"{len(differ)} different pairs judged differently by verify(a, b):", *differ[:12], sep="\n  ")
    result = dict(answers=count, first_call_s=first, new_answers_s=new, seen_answers_s=seen,
                  math_verify_pairwise_s=slow, math_verify_greedy_s=medium, ratio_pairwise=slow / new,
                  ratio_greedy=medium / new, disagreements=differ)
    save(args.out, result, "math-verify", "sympy")


if __name__ == "__main__":
    main()
