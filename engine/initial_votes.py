"""The initial model's votes on every training problem, before step 1: RESTRAIN's weights, SRT's labels."""

from __future__ import annotations

import json

from engine.base import gather, write_atomically
from engine.metrics import majority


def initial_votes(run, prompts_per_call: int = 0) -> dict[int, tuple[str | None, int]]:
    """{problem id: (majority answer, its votes)} from --votes responses of the initial model.

    Few large engine calls (about 8,192 responses per rank), each stored with the run as it ends, so that a
    killed run goes on. What was stored with other flags is not used (--resume refuses other prompts, weights
    or another seed)."""
    args, path = run.args, run.out / "initial_votes.jsonl"
    flags = [args.votes, args.temperature, args.max_new_tokens]
    lines = path.read_text().splitlines() if run.rank == 0 and path.is_file() else []
    stored = [json.loads(line) for line in gather(lines)[0]]
    votes = {r["id"]: (r["answer"], r["votes"]) for r in stored if r["flags"] == flags}
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
            records = [dict(flags=flags, id=i, answer=answer, votes=n) for i, (answer, n) in votes.items()]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
    run.sampler.sleep()
    return votes


def count_votes(prompt, responses: list) -> tuple[str | None, int]:
    """(majority answer, its votes); (None, 0) without any answer."""
    classes = prompt.classes([r.answer for r in responses])
    winner = majority(classes)
    return (None, 0) if winner is None else (responses[classes.index(winner)].answer, classes.count(winner))
