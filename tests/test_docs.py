"""The pages keep their word: commands parse, numbers of rows are right, metrics are logged, links exist."""

import functools
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import EXAMPLES, ROOT, SCRIPTS, load_script, launched_with

import common
import evaluate
from engine.data import BENCHMARKS
from engine.options import Machine, parse

RECIPES = [ROOT / "docs/recipes" / f"{script}.md" for script in SCRIPTS]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [*SCRIPTS, "evaluate", *EXAMPLES]
HEADERS = [["row", "command", "paper"], ["row", "command", "read", "paper"]]
# Prompt and response must fit; the other models of the pages have 32k and more
CONTEXT = {"Qwen/Qwen2.5-Math": 4096, "deepseek-ai/deepseek-math": 4096}
METRIC = r"eval/[\w.]+/[\w@]+|(?:seconds|agreeing)/\w+|(?:pass|maj)@\w+|[a-z]+(?:_[a-z]+)+"
KNOWN_FLAGS = ("nproc-per-node shutdown-timeout signals-to-handle nnodes node-rank master-addr "  # torchrun's
               "durations").split()  # pytest's
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
each_recipe = pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)


# ------------------------------------------- commands of the pages -----------------------------------------
def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the header first."""
    blocks_of_rows = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [line for line in block.splitlines() if not line.startswith("|---")]
        blocks_of_rows.append([re.split(r" *\| *", line.strip("|").strip()) for line in lines])
    return blocks_of_rows


def expand(text: str, variables: dict[str, list]) -> list[tuple[str, int | None]]:
    """(text with shell variables replaced, the batches that the last of them states), one of each choice."""
    texts = [("", None)]
    for plain, name in re.findall(r"([^$]*)(?:\$(\w+))?", text):
        choices = variables[name] if name else [("", None)]
        texts = [(start + plain + value, n or own) for start, own in texts for value, n in choices]
    return texts


def assigned(value: str, comment: str, variables: dict[str, list]) -> list[tuple[str, int | None]]:
    """What a variable may be: its value, or another one of its comment: "240 batches" or "or $AMC, $MATH"."""
    stated = re.match(r"(\d+) batches", comment)
    texts = [value, *re.findall(r"\$\w+", comment if comment.startswith("or ") else "")]
    values = sum([expand(text, variables) for text in texts], [])
    return [(text, int(stated[1]) if stated else n) for text, n in values]


@functools.cache
def commands_of(page: Path) -> tuple[list[tuple[str, str]], list[SimpleNamespace]]:
    """(commands outside of recipe tables as (where, command), commands of recipe tables), all expanded."""
    text, variables, free, rows = page.read_text(), {}, [], []
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for line in filter(None, blocks.replace("\\\n", " ").splitlines()):
        if assignment := re.fullmatch(r'(\w+)="(.*)"(?: +# (.*))?', line):
            variables[assignment[1]] = assigned(assignment[2], assignment[3] or "", variables)
        else:
            free += [(f"{page.name}: {line}", command) for command, _ in expand(line, variables)]
    for header, *cells_of_rows in tables(text):
        if header not in HEADERS:
            continue
        for cells in cells_of_rows:
            assert len(cells) == len(header), f"{page.name}: a row with {len(cells)} cells: {cells}"
            cell = dict(zip(header, cells))
            own = re.search(r"(\d+) batches", cell["row"])
            for command, n in expand(cell["command"].strip("`"), variables):
                n = int(own[1]) if own else n
                row = dict(where=f"{page.name}: {cell['row']}", command=command, batches=n)
                rows.append(SimpleNamespace(**row, read=cell.get("read", "")))
    return free, rows


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


def batches(args) -> int:
    """Rollout batches of a training command."""
    if args.steps or not args.dataset:
        return args.steps
    assert args.dataset in BENCHMARKS, "the number of a file's problems is not known: give --steps"
    problems = round(getattr(args, "easy_fraction", 1) * BENCHMARKS[args.dataset].size)
    return args.epochs * (problems // args.prompts_per_batch)


@each_page
def test_commands_parse_and_their_batches_are_right(page, capsys, monkeypatch):
    free, rows = commands_of(page)
    assert bool(rows) == (page in RECIPES)
    for where, command in free:
        check(where, command, capsys, monkeypatch)
    for row in rows:
        run = check(row.where, row.command, capsys, monkeypatch)
        assert run.world == (16 if "--nnodes 2" in row.command else 8), row.where
        if run.name != "evaluate":
            assert batches(run.args) == (row.batches or run.args.steps) > 0, row.where


SETTINGS = "eval_samples eval_temperature eval_top_p eval_top_k max_new_tokens prompt".split()


def evaluation_of(args) -> tuple:
    return tuple(getattr(args, name) for name in SETTINGS)


@each_recipe
def test_a_preset_is_what_most_of_the_papers_runs_evaluate_with(page):
    """The rows without a prompt file, and the script without a flag."""
    settings = []
    for row in commands_of(page)[1]:
        run = understand(row.command)
        if run.name == page.stem and not run.args.prompt.endswith(".txt"):
            settings.append(evaluation_of(run.args))
    preset = tuple(evaluate.PRESETS[page.stem][name.removeprefix("eval_")] for name in SETTINGS)
    assert preset == max(settings, key=settings.count) == evaluation_of(load_script(page.stem).Args())


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


@each_page
def test_every_flag_exists(page):
    flags = {"help", *KNOWN_FLAGS}
    for tool in [ROOT / "toy/make_toy.py", *(ROOT / "lab").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        flags |= set(re.findall(r'"--([a-z][\w-]*)"', tool.read_text()))
    for name in MODULES:
        fields = load_script(name).Args.__dataclass_fields__.keys() | Machine.__dataclass_fields__.keys()
        for field in fields:
            flags |= {field, f"no-{field}"}
    assert set(re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", page.read_text())) <= flags


# --------------------------------------------------- metrics -----------------------------------------------
@pytest.fixture(scope="module")
def logged(watch):
    """Names that a toy step of the six scripts and an evaluation log, in the form of docs/metrics.md."""
    names = set()
    for script in SCRIPTS:
        names |= set().union(*watch(script).metrics)
    verdicts = dict(known=True, correct=[True] * 4, classes=[0] * 4, right={0}, majority=True,
                    length=[9] * 4, answered=[True] * 4, truncated=[False] * 4, distinct=1.0)
    stub = mock.MagicMock(benchmarks=dict(toy=[], train=[]), args=SimpleNamespace(eval_greedy=True))
    with mock.patch.object(common, "evaluate_benchmark", lambda *a, **options: [(verdicts, [])]):
        common.evaluate(stub, 1)
    names |= set(stub.log.evaluation.call_args.args[1]) | {"seconds/evaluate"}
    return {general(name) for name in names - {"step"}}


def general(name: str) -> str:
    """eval/aime24/pass@8 -> eval/NAME/pass@k; pass@1 and the mean over the benchmarks stay."""
    name = re.sub(r"^eval/(?!mean/).*/", "eval/NAME/", name)
    name = re.sub(r"(?<=[shj]@)(?!1$)\w+$", "k", name)
    return re.sub(r"^(seconds|tokens_per_second|agreeing)/\w+$", r"\1/*", name)


def test_metrics_page_names_what_is_logged(logged):
    documented = set()
    for _, *rows in tables((ROOT / "docs/metrics.md").read_text()):
        for cells in rows:
            first, *others = re.findall(r"`([^`]+)`", cells[0])
            prefix = "eval/NAME/" if first.startswith("eval/NAME/") else ""
            documented |= {general(first), *(general(prefix + other) for other in others)}
    assert documented - logged == {"peak_memory_gib", "flip_rate"}  # on a GPU; of problems seen again
    assert logged - documented == set()


@each_recipe
def test_a_metric_of_the_read_column_is_logged(page, logged):
    known = logged | {name.rpartition("/")[2] for name in logged}
    for row in commands_of(page)[1]:
        for name in re.findall(METRIC, row.read):
            assert general(name) in known, f"{row.where}: {name}"


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
