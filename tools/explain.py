"""The same responses under six papers: who gets which reward and advantage, and why.

    python -m tools.explain                                    # three problems of the toy that differ
    python -m tools.explain --model Qwen/Qwen2.5-Math-1.5B --dataset aime24 --n 64

It calls the public functions of the six scripts with their defaults. All N responses count as trained.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

import torch

import common
import dynamic_rl
import ettrl
import evol_rl
import restrain
import scrl
import ttrl
from engine.base import UserError
from engine.options import defaults_of, make_args
from evol_rl import Embedder


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
    rewards["SCRL"] = scrl.scrl_rewards(classes, vote.entropies)
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
    positive, negatives = scrl.pseudo_labels(vote.classes, vote.entropies)
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


def as_text(vote: Vote, embed=None) -> str:
    """A problem, the sentences, and a table with a row for every response."""
    columns = columns_of(vote, embed)
    methods = dict.fromkeys(title.split()[0] for title in columns)  # each has two columns
    rows = [["#", "answer", "votes", "H", *(title.split()[1] for title in columns)]]
    for i, (response, c) in enumerate(zip(vote.responses, vote.classes)):
        answer = str(response.answer)[:8]
        rows.append([str(i + 1), answer, str(vote.counts[c]), f"{vote.entropies[i]:.2f}"])
        rows[-1] += [f"{values[i]:+.2f}" for values in columns.values()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    above = "".join(f"{name:>14}" for name in methods).rjust(len(lines[0]))
    problem = textwrap.fill(f"Problem: {vote.problem.question}", 110)
    paragraphs = [textwrap.fill(text, 110) for text in sentences(vote, columns)]
    return "\n".join([problem, "", *paragraphs, "", above, *lines, ""])


def sample_votes(model: str, dataset: str, n: int, seed: int, problems: int, prompt: str = "") -> list[Vote]:
    """n responses of the base model to each of the first problems."""
    options = defaults_of(model) | dict(model=model)
    options |= dict(eval="", steps=1, kl_coef=0.0, seed=seed, votes=n, train_samples=n, prompts_per_batch=1,
                    num_minibatches=1, dataset=dataset or options.get("dataset", ""))
    options |= dict(prompt=prompt) if prompt else {}
    with tempfile.TemporaryDirectory() as folder:
        run = common.start(make_args(common.Args, options | dict(out=str(Path(folder) / "run"))))
        run.sampler.load(run.policy.named_tensors())
        prompts, votes = run.problems[:problems], []
        for question, responses in zip(prompts, common.sample(run, 1, prompts, n)):
            run.policy.score_old(responses, run.args.temperature)
            entropies = [response.mean(response.entropy.double()) for response in responses]
            votes.append(Vote(question, responses, entropies))
    return votes


def telling(votes: list[Vote]) -> list[Vote]:
    """The most agreed right and wrong majority, and the most scattered vote."""
    order = sorted(votes, key=lambda vote: vote.votes, reverse=True)
    right = [vote for vote in order if vote.counts and vote.right[vote.classes.index(vote.top)]]
    wrong = [vote for vote in order if vote not in right]
    return list(dict.fromkeys([*right[:1], *wrong[:1], *order[-1:]]))


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.explain", description=__doc__, formatter_class=shape)
    parser.add_argument("--model", default="", help="Hub id or folder; empty: the toy; smollm2")
    parser.add_argument("--dataset", default="", help="Hub id, short name or file; of the toy: its own")
    parser.add_argument("--n", type=int, default=16, help="responses per problem")
    parser.add_argument("--seed", type=int, default=1, help="of the samples")
    parser.add_argument("--embedder", default="words", help="EVOL-RL's, as in evol_rl.py; empty: without")
    options = parser.parse_args()
    if options.n < 2:
        parser.error(f"--n is {options.n}, but must be at least 2: responses are compared with each other.")
    try:
        embed = Embedder(options.embedder) if options.embedder else None
        print("R: rewards. A: advantages. RESTRAIN's A+ counts towards a response, A- against it.\n"
              "H: a response's mean token entropy, nats. ETTRL x: EAR's factor.\n")
        for vote in telling(sample_votes(options.model, options.dataset, options.n, options.seed, 48)):
            print(as_text(vote, embed))
    except UserError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
