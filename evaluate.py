"""Score a model on benchmarks: pass@1 with its standard error, pass@k, maj@k, length, answered, truncated.

    python evaluate.py                                                      # the toy on its own problems
    python evaluate.py --model runs/NAME/final --benchmarks math500,aime24,aime25 --preset ttrl
    torchrun --nproc-per-node 8 evaluate.py --model Qwen/Qwen3-4B-Base --benchmarks math500,gpqa \\
        --preset evol_rl

A preset is a paper's evaluation: samples, temperature, top-p, top-k, length limits and prompt, not its
grader. A flag given beside a preset wins over it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from typing import Annotated, Literal

import tyro

import common
from engine.base import UserError, write_atomically
from engine.metrics import few_answers, mean, summary
from engine.options import SMOLLM2, Shared, make_args, out_of_range
from engine.ranks import print0, rank_and_ranks
from engine.run_folder import read_run

SIXTEEN = dict(samples=16, temperature=0.6, top_p=0.95, top_k=0, max_new_tokens=3072, prompt="system",
               max_prompt_tokens=1024, sampler="auto")
PRESETS = {
    "ttrl": SIXTEEN,
    "evol_rl": SIXTEEN | dict(samples=32, top_k=20, max_new_tokens=12288),  # Table 1; released code: top-k
    "scrl": SIXTEEN | dict(prompt="suffix"),  # section 4.1; Qwen2.5-Math: --prompt system
    "restrain": SIXTEEN | dict(max_new_tokens=4096),  # D.2
    "ettrl": SIXTEEN,  # the tables' values are averages of 16, though section 4 says greedy
    "dynamic_rl": SIXTEEN | dict(top_k=20),  # section 3.1; its MATH500 values fit one response
    "greedy": SIXTEEN | dict(samples=1, temperature=0.0, top_p=1.0),
    # as it is trained; its context is 512 tokens, and vLLM is slower with so small a model
    "toy": SIXTEEN | dict(samples=64, temperature=1.0, top_p=1.0, max_new_tokens=128, max_prompt_tokens=128,
                          sampler="hf"),
    "smollm2": SIXTEEN | dict(samples=4, temperature=1.0, top_p=1.0, max_new_tokens=40,
                              prompt=SMOLLM2["prompt"], max_prompt_tokens=192, sampler="hf")}
TOY = dict(benchmarks="toy,toy_test,toy_ood", preset="toy")
REAL = dict(benchmarks="smollm2,smollm2_test,smollm2_ood", preset="smollm2")
shown = partial(tyro.conf.arg, help_behavior_hint="(default: the preset's)")  # in --help, for None


@dataclass
class Args(Shared):
    model: common.Place = ""
    """Hub id or folder of a model or of a run; empty: the built-in toy; smollm2: a small real one."""
    benchmarks: common.Place = "math500,aime24"
    """Comma-separated short names (see engine/data.py), Hub ids or files."""
    preset: Literal[*PRESETS] = "ttrl"
    """A paper's evaluation settings, for what is not given."""
    samples: Annotated[common.Count | None, shown(metavar="INT")] = None
    """Responses per problem."""
    temperature: Annotated[common.NonNegative | None, shown(metavar="FLOAT")] = None
    """Sampling temperature; 0: greedy, with one response."""
    top_p: Annotated[common.PositiveShare | None, shown(metavar="FLOAT")] = None
    """Top-p of sampling; 1 turns it off."""
    top_k: Annotated[common.CountOrZero | None, shown(metavar="INT")] = None
    """Top-k of sampling; 0 turns it off."""
    max_new_tokens: Annotated[common.Count | None, shown(metavar="INT")] = None
    """Length limit of a response."""
    prompt: Annotated[common.Place | None, shown(metavar="STR")] = None
    """Prompt format. system: instruction as system turn. suffix: after the question. plain, or a file."""
    max_prompt_tokens: Annotated[common.Count | None, shown(metavar="INT")] = None
    """Length limit of a prompt; the responses to a longer one count as wrong."""
    grader: Literal["answers", "math_verify"] = "answers"
    """What is right: answers that equal gold by answers/; or, to compare with published numbers, what
    Math-Verify finds in the response's text (docs/readings.md). Votes of maj@k are counted by answers/."""
    seed: common.CountOrZero = 1
    """Seed, from which those of the samples derive."""
    sampler: Annotated[Literal["auto", "vllm", "hf"] | None, shown(metavar="{auto,vllm,hf}")] = None
    """Sampling engine. auto: vLLM if it imports, else transformers (hf)."""
    gpu_memory: common.PositiveShare = 0.9
    """Share of each GPU's memory that vLLM may take."""
    save_generations: bool = False
    """Write all responses with their verdicts to generations.jsonl."""

    def run_args(self) -> common.Args:
        """The arguments of a run that only evaluates. Raises UserError if an option is out of its range."""
        if bad := out_of_range(self):
            raise UserError("\n".join(bad))
        if (Path(self.model) / "state.json").is_file():
            raise UserError(f"--model is '{self.model}', a checkpoint of a run, which is no model; "
                            "docs/fork.md says how to get one from it.")
        if self.grader == "math_verify" and not util.find_spec("math_verify"):
            raise UserError("--grader is 'math_verify', which needs another package: pip install "
                            "math-verify.")
        chosen = dict(PRESETS[self.preset])
        chosen |= {name: getattr(self, name) for name in chosen if getattr(self, name) is not None}
        if chosen["temperature"] == 0 and (self.samples or 1) > 1:
            raise UserError(f"--samples is {self.samples}, but at temperature 0 (--preset greedy) a problem "
                            "has one response; leave it out, or give a --temperature.")
        options = {name: getattr(self, name) for name in Shared.__dataclass_fields__}
        for name in "max_new_tokens max_prompt_tokens prompt sampler".split():
            options[name] = chosen.pop(name)
        options |= {f"eval_{name}": value for name, value in chosen.items()}
        options |= dict(prompts_per_batch=10**6)  # no training: any number of ranks
        options |= dict(model=self.model, eval=self.benchmarks, seed=self.seed)
        return make_args(common.Args, options)


def main(args: Args, **task) -> dict[str, dict[str, float]]:
    """Scores by benchmark, and of several the mean of their pass@1, as "mean".

    task: what a script of one's own gives common.start: problem, generate."""
    if not args.benchmarks.replace(",", "").strip():
        raise UserError("--benchmarks is empty; name at least one benchmark.")
    run = common.start(args.run_args(), train=False, **task)
    results, warnings, model = {}, [], args.model or "the toy"
    print0(f"Evaluating {model} with --prompt {run.args.prompt} ...")
    for name, problems in run.benchmarks.items():
        keep = args.save_generations or args.grader == "math_verify"
        graded = common.evaluate_benchmark(run, name, problems, keep=keep)
        if args.grader == "math_verify":
            graded = [math_verify_grades(p, *row) for p, row in zip(problems, graded, strict=True)]
        verdicts = [verdict for verdict, _ in graded]
        with_gold = sum(verdict["known"] for verdict in verdicts)  # what the scores are means of
        results[name] = dict(problems=with_gold) | summary(verdicts)
        if advice := few_answers(verdicts):
            warnings.append(f"Warning: {name}: {advice}")
        if args.save_generations:
            save_generations(run.log, name, problems, graded)
        save_results(run.log.path, model, results)  # a later benchmark may fail
    rates = [row["pass@1"] for row in results.values() if "pass@1" in row]
    if len(rates) > 1:
        results["mean"] = {"pass@1": mean(rates)}
        save_results(run.log.path, model, results)
    print0("\n".join([table(results), *warnings, "", str(run.log.path / "results.json")]))
    return results


def save_results(folder: Path, model: str, results: dict) -> None:
    if rank_and_ranks()[0] == 0:
        record = read_run(folder) | dict(model=model, results=results)
        write_atomically(folder / "results.json", json.dumps(record, indent=1))


def math_verify_grades(problem, verdicts: dict, responses: list) -> tuple[dict, list]:
    """(verdicts, responses): right is what Math-Verify finds in the response's text, whatever its box holds.

    Its rule is no equality (it is not symmetric): a class is right if most of its responses are."""
    from math_verify import parse, verify  # only this needs it
    golds = [parse(f"${gold}$") for gold in [problem.answer, *problem.also_right] if gold is not None]
    correct = []
    for response in responses:
        answer = parse(response.text)
        correct.append(any(verify(gold, answer) for gold in golds))
    right = set()
    for c in set(verdicts["classes"]) - {None}:
        if mean([is_right for is_right, own in zip(correct, verdicts["classes"]) if own == c]) > 0.5:
            right.add(c)
    return verdicts | dict(correct=correct, right=right), responses


def save_generations(log, name: str, problems: list, graded: list) -> None:
    """Every response with its verdict, one line each."""
    for problem, (verdicts, responses) in zip(problems, graded):
        for response, correct, c in zip(responses, verdicts["correct"], verdicts["classes"]):
            log.append("generations.jsonl", dict(
                benchmark=name, problem=problem.question, gold=problem.answer, response=response.text,
                answer=response.answer, answer_class=c, correct=correct, finished=response.finished))


def table(results: dict[str, dict[str, float]]) -> str:
    """One row per metric, one column per benchmark; pass@1 with its standard error. problems: those with a
    gold answer, which the scores are means of."""
    metrics = dict.fromkeys(name for row in results.values() for name in row if name != "stderr")
    width = 2 + max(14, *map(len, results))
    lines = [f"{'':10}" + "".join(f"{name:>{width}}" for name in results)]
    for metric in metrics:
        cells = [cell(metric, row) for row in results.values()]
        lines.append(f"{metric:10}" + "".join(f"{text:>{width}}" for text in cells))
    return "\n".join([*lines, "+-: the standard error of pass@1, over the problems"])


def cell(metric: str, row: dict[str, float]) -> str:
    """Empty for what the row lacks: scores without gold answers, all but pass@1 of the mean."""
    if metric not in row:
        return ""
    text = f"{row[metric]:.{dict(problems=0, length=1).get(metric, 3)}f}"
    return f"{text} +- {row['stderr']:.3f}" if metric == "pass@1" and "stderr" in row else text


if __name__ == "__main__":
    common.launch(main, Args, toy=TOY, smollm2=REAL)
