"""The pages keep their word: links, files, flags exist; commands of docstrings parse; --help can be read."""

import functools
import inspect
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import EXAMPLES, ROOT, SCRIPTS, load_script, launched_with

import evaluate
from engine.options import Machine, parse
from lab import compare

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [*SCRIPTS, "evaluate", *EXAMPLES]
# Prompt and response must fit; the other models of the pages have 32k and more
CONTEXT = {"Qwen/Qwen2.5-Math": 4096, "deepseek-ai/deepseek-math": 4096}
KNOWN_FLAGS = ("nproc-per-node shutdown-timeout numa-binding signals-to-handle nnodes node-rank "
               "master-addr "  # torchrun's
               "durations").split()  # pytest's
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@functools.cache
def understand(command: str) -> SimpleNamespace | None:
    """(module, its Args from the flags, world size) of a command that runs a script; None: another program.

    Asserts that the program, the script or the file exists. SystemExit: an unknown flag or value."""
    words = shlex.split(command, comments=True)
    program, world = words.pop(0), 1
    if program == "make":
        fork = (ROOT / f"examples/{words[0].removesuffix('.py')}.diff").exists()  # a pattern rule makes them
        assert fork or re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
    if program not in ("python", "torchrun"):
        assert program in ("make", "pip", "python3", "source", "cp", "grep", "sed", "printf"), command
        return None
    while program == "torchrun" and words[0].startswith("--n"):
        world *= int(words[1])
        del words[:2]
    script = words.pop(0)
    script = words.pop(0).replace(".", "/") + ".py" if script == "-m" else script
    name = script.removesuffix(".py").replace("/", ".")
    if name not in MODULES:
        exists = script in ("my_idea.py", "pytest.py") or (ROOT / script).is_file()
        assert exists, f"there is no {script}: {command}"
        return None
    module = load_script(name)
    with mock.patch.object(sys, "argv", [script, *words]):
        return SimpleNamespace(name=name, args=parse(module.Args, **launched_with(module)), world=world)


def check(where: str, command: str, capsys, monkeypatch) -> SimpleNamespace | None:
    """Understand a command; the script itself, and a known model's context, have nothing against it."""
    try:
        run = understand(command)
    except SystemExit:
        pytest.fail(f"{where}\n{command}\n{capsys.readouterr().err}")
    if not run:
        return None
    monkeypatch.setenv("WORLD_SIZE", str(run.world))
    monkeypatch.setattr("engine.options.has_vllm", lambda: True)  # the pages' machines have it
    args = run.args.run_args() if run.name == "evaluate" else run.args
    assert args.errors() == [], f"{where}\n{command}"
    room = min([context for model, context in CONTEXT.items() if args.model.startswith(model)], default=10**9)
    assert args.max_prompt_tokens + args.max_new_tokens <= room, f"{where}: {args.model} has {room} tokens"
    return run


@pytest.mark.parametrize("name", MODULES)
def test_the_commands_of_a_docstring_parse(name, capsys, monkeypatch):
    """A script's docstring, or the header of an example's diff."""
    text = load_script(name).__doc__
    if name in EXAMPLES:
        text = (ROOT / f"examples/{name}.diff").read_text().partition("--- ttrl.py")[0]
    commands = re.findall(r"^ *((?:python|torchrun) .*)", text.replace("\\\n", " "), re.MULTILINE)
    assert len(commands) >= 2
    assert {check(f"{name}'s docstring", command, capsys, monkeypatch).name for command in commands} == {name}


@pytest.mark.parametrize("name", [*SCRIPTS, "evaluate"])
@pytest.mark.parametrize("columns", [80, 100])
def test_help_reflows_and_begins_with_the_scripts_own_options(name, columns, capsys, monkeypatch):
    """No line ends before the next word would not fit: none of the source's line ends is left."""
    module = load_script(name)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit):
        parse(module.Args, **launched_with(module))
    lines = capsys.readouterr().out.splitlines()
    column = next(line.index("show this help") for line in lines if "show this help" in line)
    for line, following in zip(lines, lines[1:]):
        text, rest = line[column:-2].rstrip(), following[1:-2].strip()
        if text and line[column - 2:column] == "  " and following[1:column].isspace() and rest:
            assert column + len(f"{text} {rest.split()[0]}") > columns - 2, line
    assert lines[1] == lines[4] == "" and lines[2] and lines[3] and "-h, --help" in "".join(lines[5:9])
    flags = [line[2:].split()[0].rstrip(",") for line in lines if re.match(". --[a-z]", line)]
    fields = module.Args.__dataclass_fields__
    own = [f"--{option.replace('_', '-')}" for option in module.Args.__annotations__ if option in fields]
    assert flags[:len(own)] == own and (name != "restrain" or "--kappa" in "".join(lines[:40]))
    printed = " ".join([line[2:-2].strip() for line in lines])
    assert "the toy's: " in printed and "smollm2's: " not in printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_preset_is_what_the_script_evaluates_with(script):
    args, preset = load_script(script).Args(), evaluate.PRESETS[script]
    for name in ("samples", "temperature", "top_p", "top_k"):
        assert preset[name] == getattr(args, f"eval_{name}"), name
    assert (preset["max_new_tokens"], preset["prompt"]) == (args.max_new_tokens, args.prompt)


@each_page
def test_every_flag_exists(page):
    flags = {"help", *KNOWN_FLAGS, *inspect.signature(compare.main).parameters}
    for tool in [ROOT / "toy/make_toy.py", *(ROOT / "lab").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        flags |= set(re.findall(r'"--([a-z][\w-]*)"', tool.read_text()))
    for name in MODULES:
        fields = load_script(name).Args.__dataclass_fields__.keys() | Machine.__dataclass_fields__.keys()
        for field in fields:
            flags |= {field, f"no-{field}"}
    assert set(re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", page.read_text())) <= flags


# ------------------------------------------------ names and links ------------------------------------------
def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them, and its own anchors."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    named = set(re.findall(r'<a id="([\w-]+)">', page.read_text()))
    return named | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_files_and_tests_that_are_named_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "../../actions/workflows/")):  # on GitHub, of this repository
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
    for path in re.findall(r"(?<![\w/])((?:engine|tools|lab|examples|docs|toy|tests)/[\w/]+\.\w+)", text):
        assert path == "tests/test_my_idea.py" or (ROOT / path).exists(), path
    for path, name in re.findall(r"(tests/\w+\.py)::(\w+)", text):
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
