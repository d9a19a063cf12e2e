"""The pages' pictures are those that docs/pictures.py draws today."""

import re

import pytest
from conftest import ROOT
from docs.pictures import PICTURES, main


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    main(folder)
    return folder


@pytest.mark.parametrize("name", [draw.__name__ for draw in PICTURES])
def test_a_picture_is_older_than_what_it_draws(name, fresh):
    """A formula, a threshold or a step of a loop changed: `python -m docs.pictures` draws them anew."""
    committed = (ROOT / f"docs/images/pictures/{name}.svg").read_text()
    drawn = (fresh / f"{name}.svg").read_text()
    words = r"<(?:text|tspan)[^>]*>([^<]*)"
    assert re.findall(words, committed) == re.findall(words, drawn)
    numbers = [[float(number) for number in re.findall(r"-?\d+\.\d+", text)] for text in (committed, drawn)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.5)  # points of 1/72 inch, of pictures 475 wide
