"""The initial model's votes on every training problem, before step 1: RESTRAIN's weights, SRT's labels."""

from __future__ import annotations

import hashlib
import json

from engine.base import gather, write_atomically
from engine.metrics import majority


def initial_votes(run, prompts_per_call: int = 0) -> dict[int, tuple[str | None, int]]:
    """{problem id: (majority answer, its votes)} from --votes responses of the initial model.

    Few large engine calls (about 8,192 responses per rank), each stored with the run as it ends, so that a
    killed run goes on. What is stored is used only if all that it depends on is the same (`depends`)."""
    args, path = run.args, run.out / "initial_votes.jsonl"
    prompts = [p.prompt_ids for p in run.problems]
    weights = run.folder.identity["the weights of --model"]
    depends = [weights, prompts, args.votes, args.seed, args.temperature, args.max_new_tokens]
    key = hashlib.sha256(repr(depends).encode()).hexdigest()[:16]
    lines = path.read_text().splitlines() if run.rank == 0 and args.resume and path.is_file() else []
    stored = [json.loads(line) for line in gather(lines)[0]]
    votes = {record["id"]: (record["answer"], record["votes"]) for record in stored if record["key"] == key}
    todo = [p for p in run.problems if p.id not in votes]
    if todo:
        run.sampler.load(run.policy.named_tensors(run.dtype))
    size = prompts_per_call or run.world_size * max(1, 8192 // args.votes)
    for start in range(0, len(todo), size):
        part = todo[start:start + size]
        run.say(f"Initial votes: {len(votes)} of {len(run.problems)} problems")
        for problem, responses in zip(part, run.sample(part, args.votes)):
            votes[problem.id] = count_votes(problem, responses)
        if run.rank == 0:
            records = [dict(key=key, id=i, answer=answer, votes=n) for i, (answer, n) in votes.items()]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
    run.sampler.sleep()
    return votes


def count_votes(prompt, responses: list) -> tuple[str | None, int]:
    """(majority answer, its votes); (None, 0) without any answer."""
    classes = prompt.classes([r.answer for r in responses])
    winner = majority(classes)
    return (None, 0) if winner is None else (responses[classes.index(winner)].answer, classes.count(winner))
