"""Grading with gold answers, and what shows how a run goes. Gold never reaches a label-free reward."""

from __future__ import annotations

import math
import random
from collections import Counter
from statistics import stdev

from answers import majority
from engine.base import stable_hash


def mean(values) -> float:
    """The mean of any numbers; 0 if there are none."""
    values = list(values)
    return sum(values) / max(len(values), 1)


def few_answers(graded: list[dict]) -> str:
    """What to do if most responses of these verdicts have no answer or were cut off; else empty."""
    answered, cut = [mean(mean(verdicts[name]) for verdicts in graded) for name in ("answered", "truncated")]
    if not graded or answered >= 0.5 >= cut:
        return ""
    example = next((verdicts["failed"] for verdicts in graded if verdicts["failed"]), "")
    return (f"{answered:.0%} of the responses have an answer (in \\boxed{{}}, or where Problem.read finds "
            f"it) and {cut:.0%} were cut off. --show_prompt shows what the model is asked; small models need "
            "worked examples, as in examples/prompts/few_shot.txt, long responses a larger --max_new_tokens. "
            f"One ends: {example!r}")


# ------------------------------------------------ evaluation ------------------------------------------------
def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of P(one of k samples is correct) from n samples: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, Eq. 1."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def maj_at_k(classes: list[int | None], right: set[int], k: int, subsets: int = 64) -> float:
    """P(the majority of k of these responses is right), over seeded random subsets of size k.

    With k the number of responses there is one subset, so 0 or 1."""
    if k >= len(classes):  # there is one such subset: all of them
        return float(majority(classes) in right)
    draw = random.Random(stable_hash("maj", k, classes))
    return mean(majority(draw.sample(classes, k)) in right for _ in range(subsets))


def grade(problem, responses: list) -> dict:
    """Verdicts of one problem's responses against its gold answer; gold: its class, right: the classes that
    are. answer: the most frequent, as it was first written (None: no response has one); majority: whether it
    is right. failed: the end of a text without an answer or an end, if there is one."""
    # gold answers are classed together with the responses', so that one equality holds for both
    together = problem.classes([*(r.answer for r in responses), problem.answer, *problem.also_right])
    classes, golds = together[:len(responses)], together[len(responses):]
    winner, right = majority(classes), set(golds) & set(classes) - {None}
    return dict(known=problem.answer is not None, correct=[c in right for c in classes], classes=classes,
                gold=golds[0], right=right, majority=winner in right,
                answer=responses[classes.index(winner)].answer, length=[r.length for r in responses],
                answered=[r.answer is not None for r in responses],
                truncated=[not r.finished for r in responses],
                failed=next((r.text[-200:] for r in responses if r.answer is None or not r.finished), ""),
                distinct=len({r.text for r in responses}) / len(responses))


def summary(graded: list[dict]) -> dict[str, float]:
    """The row of one benchmark: pass@1 with its standard error over problems (one problem has none), pass@k,
    maj@k, lengths, shares.

    Scores are over the problems with a gold answer, and left out if there is none."""
    known = [g for g in graded if g["known"]]
    samples, row = len(graded[0]["correct"]), {}
    if known:
        rates = [mean(g["correct"]) for g in known]
        row["pass@1"] = mean(rates)
        if len(rates) > 1:
            row["stderr"] = stdev(rates) / math.sqrt(len(rates))
        # 2, 4, 8 ... as far as there are samples; maj@k also for all of them
        powers = [2 ** i for i in range(1, samples.bit_length())]
        for k in powers:
            row[f"pass@{k}"] = mean(pass_at_k(samples, sum(g["correct"]), k) for g in known)
        for k in sorted({*powers, samples}):
            row[f"maj@{k}"] = mean(maj_at_k(g["classes"], g["right"], k) for g in known)
    for name in ("length", "answered", "truncated"):
        row[name] = mean(mean(g[name]) for g in graded)
    row["distinct"] = mean(g["distinct"] for g in graded)
    return row


# ------------------------------------------------- training -------------------------------------------------
def step_metrics(groups: list[dict]) -> dict[str, float]:
    """Means over the prompts of a step. groups: what Log.vote kept, one per prompt."""
    rows = [group_metrics(group) for group in groups]
    names = dict.fromkeys(name for row in rows for name in row)
    metrics = {}
    for name in names:
        metrics[name] = mean(row[name] for row in rows if name in row)
    responses = [r for group in groups for r in group["responses"]]  # ETTRL's groups are not all of one size
    if responses:  # else Dynamic RL found no question: a 0 would be a false point of these curves
        metrics["length"] = mean(r.length for r in responses)
        metrics["answered"] = mean(r.answer is not None for r in responses)
        metrics["truncated"] = mean(not r.finished for r in responses)
    return metrics


def group_metrics(group: dict) -> dict[str, float]:
    """One prompt's votes: all that can be said without gold, and, if there is gold, how right they are."""
    prompt, responses, label = group["prompt"], group["responses"], group["label"]
    trained = [r for i, r in enumerate(responses) if i in group["trained"]]
    verdicts = group["verdicts"]
    votes = Counter(c for c in verdicts["classes"] if c is not None)
    row = dict(
        reward=mean(group["rewards"]),
        majority_ratio=max(votes.values(), default=0) / len(responses),     # of the most frequent answer
        zero_variance=float(all(r.advantage == 0 for r in trained)),        # this prompt teaches nothing
        distinct=verdicts["distinct"],                                      # different texts
        distinct_answers=len(votes),
        label_coverage=float(bool(label)),                                  # the script did not abstain
        negative_coverage=float(bool(group["negatives"])))
    if group["flipped"] is not None:
        row["flip_rate"] = float(group["flipped"])
    if winners := [r.advantage for r in trained if r.advantage > 0]:
        row["positive_advantage"] = mean(winners)  # ETTRL Figure 3
    if prompt.answer is None:
        return row
    correct = verdicts["correct"]
    row["batch_pass@1"] = mean(correct)
    row["majority_accuracy"] = float(verdicts["majority"])
    scored = [(r.mean(r.entropy), ok) for r, ok in zip(responses, correct) if r.entropy is not None]
    for name, wanted in (("entropy_right", True), ("entropy_wrong", False)):  # SCRL Table 8
        if any(ok == wanted for _, ok in scored):
            row[name] = mean(entropy for entropy, ok in scored if ok == wanted)
    if group["negatives"]:
        wrong = [responses[group["classes"].index(c)].answer for c in group["negatives"]]
        row["negative_accuracy"] = mean(not prompt.is_right(answer) for answer in wrong)
    if label:  # the script did not abstain: is its label right, and how many responses did it judge rightly?
        row["label_accuracy"] = row["reward_accuracy"] = 0.0
    for c, weight in label.items():
        share = weight / sum(label.values())
        members = [own == c for own in group["classes"]]
        row["label_accuracy"] += share * mean(ok for member, ok in zip(members, correct) if member)
        row["reward_accuracy"] += share * mean(member == ok for member, ok in zip(members, correct))
    return row
