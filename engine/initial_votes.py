"""The initial model's votes on every training problem, before step 1: RESTRAIN's weights, SRT's labels."""

from __future__ import annotations

import hashlib
import json

from engine.base import gather, sharded
from engine.runfolder import read_jsonl


def initial_votes(run, prompts_per_call: int = 0) -> dict[int, tuple[str | None, int]]:
    """{problem id: (majority answer, its votes)} from --votes responses of the initial model.

    Few large engine calls (about 8,192 responses per rank), each stored with the run as it ends, so that a
    killed run goes on. What is stored is used only if all that it depends on is the same (`depends`)."""
    args, path = run.args, run.out / "initial_votes.jsonl"
    prompts = [p.prompt_ids for p in run.problems]
    weights = run.folder.identity["the weights of --model"]
    depends = [weights, prompts, args.votes, args.seed, args.temperature, args.max_new_tokens]
    key = hashlib.sha256(repr(depends).encode()).hexdigest()[:16]
    stored = []
    if run.rank == 0 and args.resume:
        stored = read_jsonl(path)
    votes = {}
    for record in gather(stored)[0]:
        if record.get("key") == key and isinstance(record.get("votes"), int):
            votes[record.get("id")] = (record.get("answer"), record["votes"])
    todo = [p for p in run.problems if p.id not in votes]
    if todo:
        run.sampler.load(run.policy.named_tensors(run.dtype))
    size = prompts_per_call or run.world_size * max(1, 8192 // args.votes)
    for start in range(0, len(todo), size):
        part = todo[start:start + size]
        run.say(f"Initial votes: {len(votes)} of {len(run.problems)} problems")
        counted = sharded(list(zip(part, run.sample(part, args.votes))), count_each)
        for problem, (answer, count) in zip(part, counted):
            votes[problem.id] = (answer, count)
        if run.rank == 0:
            with path.open("a", encoding="utf-8") as file:
                for problem in part:
                    answer, count = votes[problem.id]
                    file.write(json.dumps(dict(key=key, id=problem.id, answer=answer, votes=count)) + "\n")
    run.sampler.sleep()
    return votes


def count_each(asked: list[tuple]) -> list[tuple[str | None, int]]:
    """count_votes of every (prompt, responses)."""
    return [count_votes(prompt, responses) for prompt, responses in asked]


def count_votes(prompt, responses: list) -> tuple[str | None, int]:
    """(majority answer, its votes); (None, 0) without any answer."""
    classes = prompt.classes([r.answer for r in responses])
    counts = {c: classes.count(c) for c in classes if c is not None}
    if not counts:
        return None, 0
    winner = max(counts, key=counts.get)
    return responses[classes.index(winner)].answer, counts[winner]
