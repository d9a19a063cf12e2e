"""The pages keep their word: commands parse, cost what they claim and log what is read; links exist.

And --show_prompt shows what is sent."""

import dataclasses
import functools
import importlib
import itertools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import EXAMPLES, SCRIPTS, load_script, toy_args, toy_of

import common
import evaluate
from engine.data import BENCHMARKS, SUFFIX, SYSTEM, TOYS, load_problems
from engine.options import parse
from tools import plot

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
PAPERS = [ROOT / "docs" / f"{script}.md" for script in SCRIPTS]
MODULES = [*SCRIPTS, "evaluate", *EXAMPLES]
TRAINING = [name for name in MODULES if name != "evaluate"]
HEADER = ["row", "command", "GPUs", "batches", "read", "paper"]
# Files that a page says how to make, with the number of problems that it gives
LOCAL = {f"math500_level{level}.jsonl": size for level, size in enumerate([43, 90, 105, 128, 134], 1)}
LOCAL |= {"numinamath_10k.jsonl": 10_000, "problems.jsonl": 0}
# Prompt and response must fit; the other models of the pages have 32k and more
CONTEXT = {"Qwen/Qwen2.5-Math": 4096, "deepseek-ai/deepseek-math": 4096}
KNOWN_FLAGS = "nproc-per-node nnodes node-rank master-addr durations".split()  # torchrun's and pytest's
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
each_paper = pytest.mark.parametrize("page", PAPERS, ids=lambda page: page.stem)
each_script = pytest.mark.parametrize("script", SCRIPTS)


# ------------------------------------------- commands of the pages -----------------------------------------
def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the header first."""
    found, last = [], -2
    for number, line in enumerate(text.splitlines()):
        if not line.startswith("|"):
            continue
        if number != last + 1:
            found.append([])
        last = number
        if not line.startswith("|---"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def fenced(text: str, language: str) -> list[str]:
    """Lines of the fenced blocks of this language; a line that ends in a backslash goes on in the next."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def spans(text: str) -> list[str]:
    """What stands between single backticks outside of fenced blocks and tables, line breaks as blanks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\|.*\n", "\n", text, flags=re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def expand(text: str, variables: dict[str, str]) -> str:
    """Shell variables replaced; one that the page does not set is an error."""
    return re.sub(r"\$(\w+)", lambda name: variables[name[1]], text)


@functools.cache
def commands_of(page: Path) -> tuple[list[tuple[str, str]], list[SimpleNamespace]]:
    """(commands outside of Reproduce tables as (where, command), rows of Reproduce tables), all expanded."""
    text, variables, free, rows = page.read_text(), {}, [], []
    for line in fenced(text, "bash"):
        if assignment := re.fullmatch(r'(\w+)="(.*)"', line):
            variables[assignment[1]] = expand(assignment[2], variables)
        else:
            free.append((f"{page.name}: {line}", expand(line, variables)))
    for header, *cells_of_rows in tables(text):
        if header != HEADER:
            continue
        for cells in cells_of_rows:
            assert len(cells) == len(HEADER), f"{page.name}: a row with {len(cells)} cells: {cells}"
            row, command, gpus, batches, read, _ = cells
            command = expand(command.strip("`"), variables) if command != "-" else ""
            where = f"{page.name}: {row}"
            rows.append(SimpleNamespace(where=where, command=command, gpus=gpus, batches=batches, read=read))
    for span in spans(text):
        if not re.match(r"(\$\w+ |python |torchrun |\w+\.py -)", span) or "..." in span:
            continue
        command = ("python " if re.match(r"\w+\.py ", span) else "") + expand(span, variables)
        if command.startswith(("python ", "torchrun ")):  # else a variable that holds a part of one
            free.append((f"{page.name}: {span}", command))
    return free, rows


def understand(command: str) -> SimpleNamespace | None:
    """(module, its Args from the flags, world size) of a command that runs a script; None: another program.

    Asserts that the program, the script or the file exists. SystemExit: an unknown flag or value."""
    models = re.findall(r" --model (\S+)", command)
    run = understand_any_model(re.sub(r" --model \S+", " --model M", command))
    if not run or not models:
        return run
    args = dataclasses.replace(run.args, model=models[-1])  # of a flag given twice the later value counts
    return SimpleNamespace(name=run.name, args=args, world=run.world)


@functools.cache
def understand_any_model(command: str) -> SimpleNamespace | None:
    """Commands that differ in the model alone are parsed once: it takes 20 ms."""
    words = shlex.split(command, comments=True)
    program, world = words.pop(0), 1
    if program == "make":
        target = re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert target or words[0].removesuffix(".py") in EXAMPLES, command
        return None
    if program in ("pip", "source", "cp"):
        files = [word for word in words if word.endswith((".txt", "ttrl.py"))]
        assert all((ROOT / file).is_file() for file in files), command
        return None
    if program in ("grep", "sed", "printf"):  # test_guide.py runs them
        return None
    assert program in ("python", "torchrun"), command
    while program == "torchrun" and words[0].startswith("--n"):
        world *= int(words[1])
        del words[:2]
    script = words.pop(0)
    script = words.pop(0).replace(".", "/") + ".py" if script == "-m" else script
    if script == "my_idea.py":  # the copy of the guide
        return None
    name = script.removesuffix(".py")
    assert name in EXAMPLES or (ROOT / script).is_file(), f"there is no {script}: {command}"
    if name not in MODULES:
        return None
    module = load_script(name)
    toy = evaluate.TOY if name == "evaluate" else toy_of(module)
    before, sys.argv = sys.argv, [script, *words]
    try:
        args = parse(module.Args, toy)
    finally:
        sys.argv = before
    return SimpleNamespace(name=name, args=args, world=world)


def errors_of(run: SimpleNamespace, monkeypatch) -> list[str]:
    """What the script itself says against its arguments, and prompts and responses beyond a known context."""
    monkeypatch.setenv("WORLD_SIZE", str(run.world))
    for module in ("common", "engine.setup"):  # the pages' machines have vLLM
        monkeypatch.setattr(f"{module}.has_vllm", lambda: True)
    args = run.args.run_args() if run.name == "evaluate" else run.args
    bad = args.errors()
    for model, context in CONTEXT.items():
        if args.model.startswith(model) and args.max_prompt_tokens + args.max_new_tokens > context:
            tokens = f"{args.max_prompt_tokens} + {args.max_new_tokens}"
            bad.append(f"{tokens} tokens exceed {args.model}'s {context}.")
    return bad


def size(name: str, run: SimpleNamespace) -> int:
    """Problems of a data set of this run, as the table of benchmarks or the page has it."""
    if name == "train":
        return size(run.args.dataset, run)
    if name in TOYS:
        return len(load_problems(name, quiet=True))
    return BENCHMARKS[name].size if name in BENCHMARKS else LOCAL[name]


def batches(run: SimpleNamespace) -> int:
    """Rollout batches of a training command."""
    args = run.args
    if args.dataset and args.dataset not in BENCHMARKS and args.dataset not in TOYS:
        assert args.steps, "a file's number of problems is not known before it is read: give --steps"
    problems = round(getattr(args, "easy_fraction", 1) * size(args.dataset, run)) if args.dataset else 0
    return args.steps or args.epochs * (problems // args.prompts_per_batch)


def sampled(run: SimpleNamespace) -> tuple[int, int]:
    """Responses that a training command samples for training and for evaluation."""
    args, steps = run.args, batches(run)
    problems = sum(size(name, run) for name in args.eval.split(",") if name)
    due = {0, steps, *(range(0, steps, args.eval_every) if args.eval_every else [])}
    evaluation = len(due) * problems * (args.eval_samples + args.eval_greedy)
    questions = run.name == "dynamic_rl" and not args.dataset
    training = steps * args.prompts_per_batch * (args.responses_per_prompt() + questions)
    return training, evaluation


def check(where: str, command: str, capsys, monkeypatch) -> SimpleNamespace | None:
    """Understand a command; what tyro prints about a wrong flag becomes the test's message."""
    try:
        run = understand(command)
    except SystemExit:
        pytest.fail(f"{where}\n{command}\n{capsys.readouterr().err}")
    if run:
        assert errors_of(run, monkeypatch) == [], f"{where}\n{command}"
    return run


def check_cost(where: str, run: SimpleNamespace) -> None:
    training, evaluation = sampled(run)
    share = evaluation / (training + evaluation)
    assert share <= 0.4, f"{where}: {share:.0%} of {training + evaluation} responses are for evaluation"


@each_page
def test_every_command_parses_and_is_free_of_errors(page, capsys, monkeypatch):
    free, rows = commands_of(page)
    for where, command in [*free, *((row.where, row.command) for row in rows if row.command)]:
        check(where, command, capsys, monkeypatch)
    assert rows if page in PAPERS else not rows


@each_page
def test_batches_and_the_share_of_evaluation(page):
    """The number of rollout batches is recomputed; at most two fifths of what is sampled is evaluation's."""
    free, rows = commands_of(page)
    for row in rows:
        run = understand(row.command) if row.command else None
        if not run or run.name == "evaluate":
            assert row.batches == "-", row.where
            assert bool(row.command) == (row.gpus != "-"), row.where
            continue
        assert row.batches == str(batches(run)), f"{row.where}: {batches(run)} batches"
        assert run.world == int(row.gpus.split(" x ")[0]), row.where
        check_cost(row.where, run)
    for where, command in free:
        run = understand(command)
        if run and run.name != "evaluate" and run.args.model and LOCAL.get(run.args.dataset, 1):
            check_cost(where, run)


def commands_of_docstring(name: str) -> list[str]:
    """Those at the top of a script; of an example at the top of its diff."""
    diff = ROOT / f"examples/{name}.diff"
    text = diff.read_text().partition("\n--- ")[0] if name in EXAMPLES else load_script(name).__doc__
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(("python ", "torchrun "))]


@pytest.mark.parametrize("name", MODULES)
def test_commands_of_the_docstrings(name, capsys, monkeypatch):
    commands = commands_of_docstring(name)
    assert len(commands) >= 2
    for command in commands:
        run = check(f"{name}'s docstring", command, capsys, monkeypatch)
        assert run.name == name
        if name in TRAINING and run.args.model:
            check_cost(f"{name}'s docstring: {command}", run)


def test_the_readmes_commands_are_rows_of_the_pages():
    """But for what is evaluated when, and where the run is written."""
    free = (understand(command) for _, command in commands_of(ROOT / "README.md")[0])
    runs = [run for run in free if run and run.name in SCRIPTS and run.args.model]
    assert {run.name for run in runs} == {"ttrl", "evol_rl"}
    for run in runs:
        same = dict(out="", plan=False, gpus=0, gpu_gib=0.0, eval="", eval_every=0, eval_greedy=False)
        commands = [row.command for row in commands_of(ROOT / f"docs/{run.name}.md")[1] if row.command]
        rows = [row.args for row in map(understand, commands) if row.name == run.name]
        rows = [dataclasses.replace(row, **same) for row in rows]
        assert dataclasses.replace(run.args, **same) in rows, run.args


@each_page
def test_flags_exist(page):
    known = {"help", *KNOWN_FLAGS}
    for tool in (ROOT / "tools").rglob("*.py"):
        known |= set(re.findall(r'"--([a-z][\w-]*)"', tool.read_text()))
    for name in MODULES:
        for field in load_script(name).Args.__dataclass_fields__:
            known |= {field, f"no-{field}"}
    for flag in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", page.read_text()):
        assert flag in known, f"{page.name}: --{flag}"


def test_local_files_have_the_sizes_that_the_pages_give():
    rows = [row for page in PAPERS for row in commands_of(page)[1]]
    for number, problems in enumerate([43, 90, 105, 128, 134], 1):
        row, = [row for row in rows if f"math500_level{number}.jsonl" in row.command]
        assert f"({problems}" in row.where and row.batches == str(10 * (problems // 8))
    assert sum(LOCAL[f"math500_level{level}.jsonl"] for level in range(1, 6)) == BENCHMARKS["math500"].size


@each_paper
def test_the_preset_is_the_pages_evaluation(page):
    """evaluate.py --preset NAME evaluates as most of the page's runs of NAME.py do without a prompt file."""
    preset = evaluate.PRESETS[page.stem]
    settings = []
    for row in commands_of(page)[1]:
        run = understand(row.command) if row.command else None
        if run and run.name == page.stem and not run.args.prompt.endswith(".txt"):
            args = run.args
            settings.append((args.eval_samples, args.eval_temperature, args.eval_top_p, args.eval_top_k,
                             args.max_new_tokens, args.prompt))
    names = "samples temperature top_p top_k max_new_tokens prompt".split()
    assert tuple(preset[name] for name in names) == max(settings, key=settings.count)
    defaults = importlib.import_module(page.stem).Args()  # ... and NAME.py without a flag
    assert [preset[name] for name in names[:4]] == [getattr(defaults, "eval_" + name) for name in names[:4]]
    assert [preset[name] for name in names[4:]] == [getattr(defaults, name) for name in names[4:]]
    assert f"--preset {page.stem}" in page.read_text() or page.stem == "ettrl"


# --------------------------------------------------- metrics -----------------------------------------------
@pytest.fixture(scope="module")
def logged(watch):
    """Names that a toy step of the six scripts and an evaluation log, in the form of docs/metrics.md."""
    names = set()
    for script in SCRIPTS:
        for line in watch(script).metrics:
            names |= set(line)
    verdicts = dict(known=True, correct=[True] * 4, classes=[0] * 4, length=[9] * 4, answered=[True] * 4,
                    truncated=[False] * 4, distinct=1.0)
    stub = mock.Mock(benchmarks=dict(toy=[], train=[]), args=SimpleNamespace(eval_greedy=True))
    stub.evaluate_benchmark.return_value = [(verdicts, [])]
    names |= set(common.Run.evaluate(stub))
    return {general(name) for name in names - {"step"}}


def general(name: str) -> str:
    """eval/aime24/pass@8 -> eval/NAME/pass@k; pass@1 and the mean over the benchmarks stay."""
    name = re.sub(r"^eval/(?!mean/).*/", "eval/NAME/", name)
    name = re.sub(r"(?<=[shj]@)(?!1$)\w+$", "k", name)
    return re.sub(r"^(seconds|tokens_per_second|measured_gib|planned_gib|agreeing)/\w+$", r"\1/*", name)


def test_metrics_page_names_what_is_logged_and_nothing_else(logged):
    text = (ROOT / "docs/metrics.md").read_text()
    documented = set()
    for _, *rows in tables(text):
        for cells in rows:
            first, *others = re.findall(r"`([^`]+)`", cells[0])
            documented |= {general(first)}
            prefix = "eval/NAME/" if first.startswith("eval/NAME/") else ""
            documented |= {general(prefix + other.removeprefix(prefix)) for other in others}
    assert documented - logged == {"peak_memory_gib", "measured_gib/*", "planned_gib/*"}  # on a GPU
    assert logged - documented == set()


def test_the_curves_know_every_metric_of_the_scripts(logged):
    """Another name is a fork's own, which is drawn by default."""
    named = {name for name in logged if not name.startswith(plot.GROUPS)}
    known = {*plot.PANELS, *plot.NOT_DRAWN} - {"pass@1", "pass@k", "maj@k", "step"}
    assert known - {"peak_memory_gib"} == named  # on a GPU


def read_names(cell: str, known: set[str]) -> tuple[list[str], list[str]]:
    """(metrics that a `read` cell names, what looks like one and is none)."""
    looks = (r"eval/[\w.]+/[\w@]+|(?:seconds|tokens_per_second|agreeing)/\w+|(?:pass|maj)@\w+|"
             r"[a-z]+(?:_[a-z0-9]+)+")
    names = re.findall(looks, cell)
    names += [span.removeprefix("1 - ") for span in re.findall(r"`([^`]+)`", cell) if "/" not in span]
    short = {name.rpartition("/")[2] for name in known}
    wrong = [name for name in names if general(name) not in known | short]
    names += [word for word in re.findall(r"[\w@/]+", cell) if word in known]
    return list(dict.fromkeys(names)), wrong


@each_paper
def test_metrics_of_the_read_column_exist(page, logged):
    """They are logged by this very command: its benchmarks, its number of samples, its greedy evaluation."""
    other_rows = ("as above", "next row", "the same", "not a metric")
    for row in commands_of(page)[1]:
        names, wrong = read_names(row.read, logged)
        assert wrong == [], f"{row.where}: {wrong}"
        assert names or row.read == "-" or row.read.startswith(other_rows), f"{row.where}: {row.read}"
        run = understand(row.command) if row.command else None
        if not run:
            continue
        args = run.args.run_args() if run.name == "evaluate" else run.args
        for name in names:
            prefix, _, metric = name.rpartition("/")
            if prefix.startswith("eval/"):
                assert run.name != "evaluate", f"{row.where}: evaluate.py has no {name}, but {metric}"
                assert prefix[5:] in ("NAME", "mean", *args.eval.split(",")), f"{row.where}: {name}"
            if metric == "greedy":
                assert args.eval_greedy, f"{row.where}: {name} needs --eval_greedy"
            if (k := re.fullmatch(r"(?:pass|maj)@(\d+)", metric)) and int(k[1]) not in (1, args.eval_samples):
                assert int(k[1]) <= args.eval_samples and int(k[1]).bit_count() == 1, f"{row.where}: {name}"
            if metric in ("token_ratio", "fork_position"):
                assert run.name == "ettrl" and args.rollout == "etmr", f"{row.where}: {name}"


# ------------------------------------------------ names and links ------------------------------------------
def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_and_file_names_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"
    for path in re.findall(r"(?<![\w/])((?:engine|tools|examples|docs|toy|tests)/[\w/]+\.\w+)", text):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


@each_paper
def test_functions_of_the_equations_exist(page):
    module = importlib.import_module(page.stem)
    found = [rows for header, *rows in tables(page.read_text()) if header[-1] == "function in the script"]
    for cells in itertools.chain(*found):
        for name in re.findall(r"`(\w[\w.]*)`", cells[-1]):
            owner = common if name.startswith("common.") else module
            known = hasattr(owner, name.rpartition(".")[2]) or name in ("token_ratio", "fork_position")
            assert known, f"{page.name}: {cells[0]}: {name}"
    assert found


# ------------------------------------------------- --show_prompt -------------------------------------------
# Qwen2.5's template, in short: where no system turn is given it inserts one of its own
INSERTED = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN = f"""\
{{%- if messages[0].role != 'system' %}}{{{{ '<|im_start|>system\\n{INSERTED}<|im_end|>\\n' }}}}{{% endif %}}
{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' + m.content }}}}<|im_end|>
{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""
SYSTEM_TURN = "<|im_start|>system\n{}<|im_end|>\n"
USER_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def shown(script: str, capsys, **flags) -> dict[str, str]:
    """{title: text} of what --show_prompt prints; the script exits with code 0 and has written nothing."""
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as exit:
        module.main(toy_args(module, show_prompt=True, **flags))
    assert not exit.value.code
    printed = capsys.readouterr().out.split("--- ")[1:]
    found = {}
    for part in printed:
        title, _, text = part.partition("\n")
        found[re.sub(r": \d+ tokens$", "", title)] = text.removesuffix("\n")
    return found


@pytest.fixture
def qwen(tmp_path):
    """A folder with the toy's config and tokenizer, a template that inserts a system turn, and no weights."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(common.TOY_MODEL) / name, tmp_path / name)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | dict(chat_template=QWEN)))
    return str(tmp_path)


def test_show_prompt_on_the_toy(capsys):
    question = load_problems("toy", quiet=True)[0].question
    assert shown("ttrl", capsys) == {"first problem of --dataset": USER_TURN.format(question)}
    own = {"z_0": USER_TURN.format("Write a problem.")}
    assert shown("dynamic_rl", capsys) == own
    benchmark = {"first problem of toy": USER_TURN.format(question)}
    assert shown("dynamic_rl", capsys, eval="toy") == benchmark | own


def test_show_prompt_shows_the_system_turn_that_a_template_inserts(qwen, capsys):
    question = load_problems("toy", quiet=True)[0].question
    room = dict(model=qwen, max_prompt_tokens=256)
    z_0 = SYSTEM_TURN.format(INSERTED) + USER_TURN.format("Write a problem.")
    first = {"system": SYSTEM_TURN.format(SYSTEM) + USER_TURN.format(question),
             "suffix": SYSTEM_TURN.format(INSERTED) + USER_TURN.format(question + SUFFIX)}
    for prompt in ("system", "suffix"):
        expected = {"first problem of toy": first[prompt], "z_0": z_0}
        assert shown("dynamic_rl", capsys, prompt=prompt, eval="toy", **room) == expected
        assert shown("ttrl", capsys, prompt=prompt, **room) == {"first problem of --dataset": first[prompt]}
    assert shown("dynamic_rl", capsys, prompt="plain", **room) == {"z_0": "Write a problem.\n\n"}


# --------------------------------------------------- bad input ---------------------------------------------
def test_an_unknown_preset_is_named_with_those_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--preset", "nonsense"])
    with pytest.raises(SystemExit) as exit:
        parse(evaluate.Args, evaluate.TOY)
    printed = " ".join(re.sub(r"[^\x20-\x7e]", " ", capsys.readouterr().err).split())
    assert exit.value.code == 2 and "invalid choice 'nonsense' for argument '--preset'" in printed
    assert all(f"'{name}'" in printed for name in evaluate.PRESETS)
