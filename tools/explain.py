"""The same responses under six papers: who gets which reward and advantage, and why. For docs/lesson.ipynb.

It calls the public functions of the six scripts with their defaults. All N responses count as trained.
"""

from __future__ import annotations

from collections import Counter

import torch

import common
import dynamic_rl
import ettrl
import evol_rl
import restrain
import scrl
import ttrl


class Vote:
    """N responses to one problem, with their mean token entropies [N] in nats, and their answer classes."""

    def __init__(self, problem: common.Problem, responses: list, entropies: list[float]):
        self.problem, self.responses, self.entropies = problem, responses, entropies
        self.classes = common.answer_classes(problem, responses)
        self.counts = Counter(c for c in self.classes if c is not None)
        self.top = common.majority(self.classes)
        self.votes = self.counts[self.top]
        self.right = [c == 0 for c in common.answer_classes(problem, responses, "gold")]

    def answer_of(self, c: int) -> str:
        """The answer in the spelling of the class's first response."""
        return f"'{self.responses[self.classes.index(c)].answer}'"


def columns_of(vote: Vote, embed=None) -> dict[str, list[float]]:
    """{title: values [N]}: R is a method's rewards, A its advantages. embed: EVOL-RL's; None: without."""
    classes, entropies_N = vote.classes, torch.tensor(vote.entropies)
    rewards = {"gold": torch.tensor(vote.right).float()} if vote.problem.answer is not None else {}
    rewards["TTRL"] = ttrl.majority_reward(classes)
    if embed:
        valid, _ = evol_rl.valid_classes(vote.problem, vote.responses)
        vectors = evol_rl.embed_texts(embed, [vote.responses])
        embeddings = torch.stack([vectors[evol_rl.spoken(response)] for response in vote.responses])
        rewards["EVOL"] = evol_rl.evol_rewards(valid, embeddings, evol_rl.Args().alpha)
    labels = scrl.pseudo_labels(classes, vote.entropies, scrl.Args())
    rewards["SCRL"] = scrl.scrl_rewards(classes, vote.entropies, *labels, scrl.Args())
    columns = {}
    for name, rewards_N in rewards.items():
        columns |= {f"{name} R": rewards_N, f"{name} A": ttrl.group_advantages(rewards_N)}
    soft, ear = restrain.Args(), ettrl.Args()
    plus_N, minus_N = restrain.restrain_advantages(classes, soft.kappa, soft.delta, soft.sigma)
    columns |= {"RESTRAIN A+": plus_N, "RESTRAIN A-": minus_N}
    factor_N = ettrl.reshape_advantages(torch.ones(len(classes)), entropies_N, ear.alpha, ear.beta)
    columns |= {"ETTRL x": factor_N, "ETTRL A": factor_N * columns["TTRL A"]}
    return {title: values_N.tolist() for title, values_N in columns.items()}


def sentences(vote: Vote, columns: dict[str, list[float]]) -> list[str]:
    """One for each method: what it did with this vote, and why."""
    n, votes, counts = len(vote.classes), f"{vote.votes} of {len(vote.classes)} votes", vote.counts
    lead = vote.votes - max([count for c, count in counts.items() if c != vote.top], default=0)
    label, gold = vote.answer_of(vote.top) if counts else "nothing", vote.problem.answer or "unknown"
    texts = [f"TTRL takes {label} as the label: {votes}; the gold answer is {gold}."]
    evol = columns.get("EVOL R", [])
    if evol and max(evol) > 0:
        texts.append("EVOL-RL gives the majority 0.5 to 1 and the others -1 to -0.5; the most novel response "
                     f"of the majority is number {evol.index(max(evol)) + 1}.")
    strict = scrl.Args()
    positive, negatives = scrl.pseudo_labels(vote.classes, vote.entropies, strict)
    if positive is not None:
        text = f"SCRL takes {label} as the positive label: {votes}, {lead} ahead."
    elif vote.votes / n < strict.tau_pos:
        text = f"SCRL has no positive label: {votes} are a share below tau_pos, {strict.tau_pos}."
    else:
        text = (f"SCRL has no positive label: a lead of {lead} of {n} votes is not above tau_marg, "
                f"{strict.tau_marg}.")
    rare = ", ".join(map(vote.answer_of, sorted(negatives))) or "none"
    texts.append(f"{text} Its negative labels, rare answers that were given with high entropy: {rare}.")
    soft = restrain.Args()
    u = restrain.prompt_weight(vote.votes, n, soft.prompt_sigma)
    if vote.votes < soft.kappa:
        text = f"RESTRAIN penalises all responses, since no answer has kappa = {soft.kappa} votes."
    else:
        weights = restrain.weighted_labels(vote.classes, soft.sigma)
        heaviest = sorted(weights, key=weights.get, reverse=True)[:4]
        labels = ", ".join(f"{vote.answer_of(c)} {weights[c]:.2f}" for c in heaviest)
        text = f"RESTRAIN takes all {len(weights)} answers as labels, weighted; the heaviest are {labels}."
    texts.append(f"{text} The prompt's loss is multiplied by u = {u:.2f} (a run takes u from the base "
                 "model's vote).")
    factors = columns["ETTRL x"]
    texts.append(f"ETTRL (EAR) multiplies TTRL's advantages by {min(factors):.2f} to {max(factors):.2f}: "
                 "less for responses with more entropy than the average.")
    p, tau = vote.votes / n, dynamic_rl.Args().tau
    texts.append("Dynamic RL rewards the solutions as TTRL does. Had the model written this question: "
                 f"p = {p:.2f} and R_q = {dynamic_rl.question_reward(p, tau):.2f}, which is 1 at p = {tau}.")
    return texts
