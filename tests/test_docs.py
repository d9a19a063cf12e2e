"""The pages keep their word: links, files, flags exist; commands of docstrings parse; --help can be read."""

import re
import shlex
import sys

import pytest
from conftest import EXAMPLES, ROOT, SCRIPTS, load_script, launched_with

from engine.options import parse

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [*SCRIPTS, "evaluate", *EXAMPLES]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("name", MODULES)
def test_the_commands_of_a_docstring_parse(name, monkeypatch):
    """A script's docstring, or the header of an example's diff; the script has nothing against them."""
    module = load_script(name)
    text = module.__doc__
    if name in EXAMPLES:
        text = (ROOT / f"examples/{name}.diff").read_text().partition("--- ttrl.py")[0]
    command = rf"^ *(?:python|torchrun --nproc-per-node (\d)) {name}.py(.*)"
    commands = re.findall(command, text.replace("\\\n", " "), re.MULTILINE)
    assert len(commands) >= 2
    monkeypatch.setattr("engine.options.has_vllm", lambda: True)
    for ranks, flags in commands:
        monkeypatch.setenv("WORLD_SIZE", ranks or "1")
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(flags, comments=True)])
        args = parse(module.Args, **launched_with(module))
        assert (args.run_args() if name == "evaluate" else args).errors() == [], flags


# ------------------------------------------------ names and links ------------------------------------------
@each_page
def test_links_files_and_tests_that_are_named_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "../../actions/workflows/")):  # on GitHub, of this repository
            continue
        assert (page.parent / target.partition("#")[0]).exists(), target
    for path in re.findall(r"(?<![\w/])((?:engine|tools|lab|examples|docs|toy|tests)/[\w/]+\.\w+)", text):
        assert path == "tests/test_my_idea.py" or (ROOT / path).exists(), path
    for path, name in re.findall(r"(tests/\w+\.py)::(\w+)", text):
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
