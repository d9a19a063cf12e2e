"""Grouping 8 prompts x 64 answers: answers.equivalence_classes against pairwise math-verify, in the same run.

    python benchmarks/answers.py [--seconds 1] [--out answers.json]

"first call" starts the worker process; "new answers" has the worker running and nothing cached, which is what a training
step sees; "seen answers" is what a later step sees of a problem it returns to. Baselines, both parsing every distinct
string once: every pair of answers with `verify`, and the cheaper greedy grouping (each answer against one answer of
each class so far), whose result depends on the order. Also counts the pairs on which the two sides disagree.
"""

import argparse
import json
import logging
import random
import sys
import time
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import answers

# What samples of a small model look like: a few spellings of the right answer, a few popular mistakes, a tail.
PROMPTS = [
    (["204", "204.0", "x = 204", r"\text{204}"], ["192", "210", "408", "1020"]),
    (["10080", "10,080", r"10,\!080", "10{,}080"], ["5040", "40,320", "720", r"\frac{10080}{2}"]),
    ([r"\frac{1}{2}", r"\dfrac{1}{2}", "0.5", "1/2"], [r"\frac{1}{3}", "2", r"\frac{2}{3}", "0.25"]),
    ([r"2\sqrt{5}", r"\sqrt{20}", r"2 \sqrt 5", r"2\sqrt{5} \text{ cm}"], [r"\sqrt{5}", r"5\sqrt{2}", "4.47", r"\sqrt{10}"]),
    ([r"\left(3, \frac{\pi}{2}\right)", r"(3, \pi/2)", r"\left( 3,\dfrac{\pi}{2} \right)"],
     [r"(3, \pi)", r"(3, 0)", r"\left(-3,\frac{\pi}{2}\right)"]),
    ([r"[-2, 7]", r"x \in [-2,7]", r"-2 \le x \le 7"], [r"(-2, 7)", r"[-2, 7)", r"(-\infty, 7]", r"[2,7]"]),
    ([r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", r"\frac{1}{2}n(n+1)"], [r"\frac{n(n-1)}{2}", "n^2", "2^n", r"\binom{n}{2}", "n(n+1)"]),
    ([r"90^\circ", "90", r"90^{\circ}", r"90 \text{ degrees}"], [r"60^\circ", r"45^\circ", "120", r"\frac{\pi}{2}"]),
]


def samples(seed=0, n=64):
    rng = random.Random(seed)
    groups = []
    for k, (right, mistakes) in enumerate(PROMPTS):
        tail = [f"\\frac{{{rng.randint(1, 30)}}}{{{rng.randint(2, 30)}}}" if k % 2 else str(rng.randint(1, 500)) for _ in range(8)]
        tail += [f"{rng.randint(2, 9)}\\sqrt{{{rng.choice([2, 3, 7])}}}" for _ in range(3)] if k > 2 else []
        groups.append(rng.choices(right, k=n // 2) + rng.choices(mistakes, k=n // 4) + rng.choices(tail, k=n - n // 2 - n // 4))
        rng.shuffle(groups[-1])
    return groups


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=1, help="measure ours for at least this long")
    options.add_argument("--out", help="write the numbers here as JSON")
    args = options.parse_args()
    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # that its time limits are off
    groups = samples()

    def ours():
        return [answers.equivalence_classes(group) for group in groups]

    def forget():
        """A new worker too: the old one's sympy remembers what it has seen."""
        answers._key_of.cache_clear(), answers._formula.cache_clear()
        answers._worker.kill(), answers._worker.wait()
        answers._formula(r"\sqrt{97}+1")

    def timed(function, least=0.0, before=lambda: None):
        times = []
        while not times or sum(times) < least:
            before()
            start = time.perf_counter()
            result = function()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2], result

    def equal(a, b):
        return verify(a, b, timeout_seconds=None)

    def parsed(group):
        return {a: parse(f"${a}$", parsing_timeout=None) for a in set(group)}

    def pairwise():
        verdicts = []
        for group in groups:
            tree = parsed(group)
            verdicts.append([equal(tree[a], tree[b]) for a, b in combinations(group, 2)])
        return verdicts

    def greedy():
        for group in groups:
            tree, firsts = parsed(group), []
            for a in group:
                if not any(equal(tree[first], tree[a]) for first in firsts):
                    firsts.append(a)

    [parse(f"${a}$", parsing_timeout=None) for group in groups for a in set(group)]  # its parser's tables are filled
    first, _ = timed(ours)
    new, classes = timed(ours, args.seconds, before=forget)
    seen, _ = timed(ours, 0.2)
    slow, verdicts = timed(pairwise)
    medium, _ = timed(greedy)
    differ = {tuple(sorted((a, b))) for group, c, v in zip(groups, classes, verdicts)
              for (a, b), (ca, cb), same in zip(combinations(group, 2), combinations(c, 2), v) if (ca == cb) != same}
    result = {"answers": sum(map(len, groups)), "first_call_s": first, "new_answers_s": new, "seen_answers_s": seen,
              "math_verify_pairwise_s": slow, "math_verify_greedy_s": medium, "ratio_pairwise": slow / new,
              "ratio_greedy": medium / new, "disagreements": sorted(differ)}
    print(f"{result['answers']} answers: new {new:.3f} s, seen {seen * 1000:.2f} ms, first call {first:.2f} s")
    print(f"math-verify: pairwise {slow:.2f} s ({slow / new:.0f} x), greedy {medium:.2f} s ({medium / new:.1f} x)")
    print(f"{len(differ)} different pairs judged differently by verify(a, b):", *sorted(differ)[:12], sep="\n  ")
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
