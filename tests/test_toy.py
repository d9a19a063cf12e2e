"""The two toys: the files as they are shipped, and that the demo learns."""

import json

import pytest
from conftest import ROOT, run_toy, toy_of

import ttrl
from toy import make_toy


def test_the_generator_makes_the_shipped_problems_and_tokenizers(tmp_path):
    """No problem stands in two sets."""
    sets = make_toy.problem_sets()
    for name, rows in sets.items():
        assert "".join(json.dumps(row) + "\n" for row in rows) == (ROOT / f"toy/{name}.jsonl").read_text()
    texts = [row["problem"] for name in ("train", "test", "ood") for row in sets[name]]
    assert len(set(texts)) == len(texts) == 256 + 1024 + 512
    make_toy.make_tokenizer(tmp_path, 58)
    for folder in ("toy", "toy/even"):
        assert (tmp_path / "tokenizer.json").read_text() == (ROOT / folder / "tokenizer.json").read_text()


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    """TTRL's greedy accuracy on problems that it does not train on ends above its base model's vote."""
    unseen = tmp_path / "unseen.jsonl"  # a quarter of the test problems
    unseen.write_text("".join((ROOT / "toy/test.jsonl").read_text().splitlines(keepends=True)[:256]))
    flags = toy_of(ttrl) | dict(eval=str(unseen), eval_samples=8, eval_every=0)
    start, *steps, end = run_toy(ttrl, tmp_path / "run", **flags)
    assert end[f"eval/{unseen}/greedy"] > start[f"eval/{unseen}/maj@8"] + .1
    assert end[f"eval/{unseen}/greedy"] > 5 * start[f"eval/{unseen}/greedy"] > 0
