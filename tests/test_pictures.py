"""The pages' pictures, and the functions that their tables name, are today's."""

import re

import pytest
from conftest import ROOT, SCRIPTS
from docs.pictures import PICTURES, main
from docs.site_hooks import functions, line_of


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    main(folder)
    return folder


@pytest.mark.parametrize("name", [draw.__name__ for draw in PICTURES])
def test_a_picture_shows_what_it_draws(name, fresh):
    """A formula, a threshold or a step of a loop changed: `python -m docs.pictures` draws them anew."""
    committed = (ROOT / f"docs/images/pictures/{name}.svg").read_text()
    drawn = (fresh / f"{name}.svg").read_text()
    words = r"<(?:text|tspan)[^>]*>([^<]*)"
    assert re.findall(words, committed) == re.findall(words, drawn)
    old, new = (list(map(float, re.findall(r"-?\d+\.\d+", text))) for text in (committed, drawn))
    assert old == pytest.approx(new, abs=0.5)  # points of 1/72 inch, of pictures 475 wide


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_equation_names_a_function_of_the_script(script):
    found = functions((ROOT / f"docs/{script}.md").read_text())
    assert len(found) >= 2
    for name in found:
        assert line_of(script, name)
