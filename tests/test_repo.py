"""The shape of the repository: what lies where, what imports what, one loop in six files, bad input."""

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT, SCRIPTS, toy_of

import common
from engine.options import parse

TOP = "README.md requirements.txt requirements-cpu.txt requirements-smollm2.txt Makefile LICENSE".split()
TOP += "common.py ttrl.py evol_rl.py scrl.py restrain.py ettrl.py dynamic_rl.py evaluate.py".split()
TOP += "engine tools examples docs toy tests .ci pyproject.toml .gitignore".split()
METHODS = SCRIPTS[1:]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@functools.cache
def files(kind: str) -> list[str]:
    """Files of the repository that end so, also those not yet committed."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", f"*{kind}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("optional: no git, or no git checkout")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


@functools.cache
def source(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text()


# ------------------------------------------------- what lies where ---------------------------------------
def test_top_level():
    assert {name.split("/")[0] for name in files("")} == set(TOP)


def test_common_is_small():
    assert len(source("common").splitlines()) <= 480


def test_lines_are_short_and_ascii():
    found = []
    for name in files(".py"):
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if not line.isascii() or len(line) > 110:
                found.append(f"{name}:{number}")
    assert not found


def test_one_statement_a_line():
    """No tuple of calls as a statement, no semicolon, nothing behind a colon that opens a block."""
    found = []
    for name in files(".py"):
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple):
                found.append(f"{name}:{node.lineno}")
            for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if not isinstance(body, list) or not body or isinstance(node, ast.Module):
                    continue
                starts = [node.lineno, *(statement.lineno for statement in body)]
                inline = isinstance(node, ast.stmt) and len(set(starts)) < len(starts)
                found += [f"{name}:{node.lineno}"] if inline else []
    assert not found


def test_no_comprehension_in_another():
    found = []
    for name in files(".py"):
        for outer in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(outer, COMPREHENSIONS):
                nested = [node for node in ast.walk(outer) if isinstance(node, COMPREHENSIONS)]
                found += [f"{name}:{outer.lineno}"] if len(nested) > 1 else []  # itself is the first
    assert not found, found


# ------------------------------------------------ what imports what --------------------------------------
def module_names() -> list[str]:
    named = []
    for name in files(".py"):
        if name.split("/")[0] in ("tests", "toy"):
            continue
        named.append(name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    return named


def imports_of(module: str) -> set[str]:
    """Modules of the repository that it imports, wherever the import stands."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & set(module_names()) - {"engine"}  # the folder itself holds nothing


# At the end of a run, and only there: the pictures of it.
CURVES = {"engine.runfolder": {"tools.plot", "tools.report"}}


def test_imports_run_one_way():
    """engine <- common <- scripts <- tools; scripts never import each other."""
    for module in module_names():
        own, imported = module.split(".")[0], imports_of(module) - CURVES.get(module, set())
        if own == "engine":
            assert all(name.startswith("engine.") for name in imported), (module, imported)
        elif own == "common":
            assert all(name.startswith("engine.") for name in imported), (module, imported)
        elif own in SCRIPTS or own == "evaluate":
            imported -= {"common"}
            assert all(name.startswith("engine.") for name in imported), (module, imported)


def test_imports_have_no_circles():
    graph = {module: imports_of(module) - CURVES.get(module, set()) for module in module_names()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    places = [order.index(module) for module in ("engine.base", "engine.policy", "common", "ttrl")]
    assert places == sorted(places)


# ------------------------------------------------ one loop in six files ----------------------------------
# The numbered parts of main that a method changes, 0: before the first. All others are ttrl.py's.
CHANGED = {"evol_rl": {0, 3}, "scrl": {2, 3, 4}, "restrain": {0, 3, 6}, "ettrl": {2, 4, 7},
           "dynamic_rl": {2, 3, 6, 7}}


def parts_of(module: str) -> dict[int, list[str]]:
    """The lines of main by the numbers of its comments."""
    text = source(module)
    start = text.index("def main(args: Args)")
    found = {0: []}
    for line in text[start:text.index('\n\n\nif __name__ == "__main__"', start)].splitlines():
        if number := re.match(r" {8}# (\d)\. ", line):
            found[int(number[1])] = []
        found[max(found)].append(line)
    assert list(found) == list(range(8))
    return found


@pytest.mark.parametrize("module", METHODS)
def test_the_loop_differs_where_the_paper_does_not(module):
    ours, theirs = parts_of("ttrl"), parts_of(module)
    assert {number for number in ours if ours[number] != theirs[number]} == CHANGED[module]


@pytest.mark.parametrize("function", ["group_advantages", "majority_reward"])
def test_a_shared_function_differs_between_scripts(function):
    texts = []
    for module in SCRIPTS:
        texts += re.findall(rf"^def {function}\(.*?(?=\n\n\n)", source(module), re.DOTALL | re.MULTILINE)
    assert len(texts) >= 3 and len(set(texts)) == 1


# ------------------------------------------------ options and help ---------------------------------------
def explained(module: str) -> dict[str, str]:
    """The options that a module declares, and what is said under each."""
    found = {}
    for node in ast.parse(source(module)).body:
        if not isinstance(node, ast.ClassDef) or node.name != "Args":
            continue
        for field, after in zip(node.body, [*node.body[1:], None]):
            if isinstance(field, ast.AnnAssign):
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                found[field.target.id] = after.value.value if said else ""
    return found


@pytest.mark.parametrize("module", ["common", "evaluate", *SCRIPTS])
def test_every_option_is_explained(module):
    silent = {name for name, said in explained(module).items() if not said}
    if module == "evaluate":  # what means the same in every script
        silent -= set("samples top_p max_new_tokens seed sampler dtype gpu_memory trust_remote_code".split())
    assert not silent


@pytest.mark.parametrize("name", ["evaluate", *SCRIPTS])
def test_help_is_a_manual(name, monkeypatch, capsys):
    """Its commands, and every option with what is said of it in the source."""
    module = importlib.import_module(name)
    toy = module.TOY if name == "evaluate" else toy_of(module)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as leave:
        parse(module.Args, toy)
    assert leave.value.code == 0
    shown = " ".join(re.sub("[^!-~]", " ", capsys.readouterr().out).split())  # without the frame
    assert "torchrun --nproc-per-node 8" in shown
    options = explained(name) if name == "evaluate" else explained("common") | explained(name)
    assert set(options) == set(module.Args.__dataclass_fields__)
    for option, said in options.items():
        assert re.search(rf"--(no-)?{option.replace('_', '[-_]')}\b", shown), option
        assert " ".join(said.split()) in shown, option


def test_help_from_the_shell():
    command = [sys.executable, "ttrl.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr
    assert "TTRL: Test-Time Reinforcement Learning" in done.stdout and "python ttrl.py" in done.stdout


# ------------------------------------------- bad input is one sentence -----------------------------------
BAD = [  # (script, flags, the sentence or its beginning)
    # options: values out of range, together
    ("ttrl", "--votes 0", "--votes is 0, but must be 1 or more."),
    ("ettrl", "--trunks 999 --forks 99", "--votes (ETTRL: its tree) makes "),
    ("ttrl", f"--votes {'9' * 400}", f"--votes is {'9' * 400}, but must be at most 2^62."),
    ("ttrl", f"--keep {2**62 + 1}", f"--keep is {2**62 + 1}, but must be at most 2^62."),
    ("ttrl", f"--steps {'9' * 400}", f"--steps is {'9' * 400}, but must be at most 2^62."),
    ("ttrl", "--seed 99999999999999999999", "--seed is 99999999999999999999, but must be at most 2^62."),
    ("ttrl", "--out \ud800", "--out is '\\ud800', but must be text in UTF-8, at"),
    ("evaluate", "--model \udcff", "--model is '\\udcff', but must be text in UTF-8, at"),
    ("ttrl", "--temperature 0", "--temperature is 0.0, but must be above 0."),
    ("ttrl", "--lr -1", "--lr is -1.0, but must be 0 or more."),
    ("ttrl", "--lr nan", "--lr is nan, but must be 0 or more."),
    ("ttrl", "--clip_low 2", "--clip_low is 2.0, but must be between 0 and 1."),
    ("ttrl", "--clip_high -1", "--clip_high is -1.0, but must be 0 or more, or inf."),
    ("ttrl", "--warmup 1.5", "--warmup is 1.5, but must be between 0 and 1."),
    ("ttrl", "--kl_coef inf", "--kl_coef is inf, but must be 0 or more."),
    ("ttrl", "--eval_top_p 0", "--eval_top_p is 0.0, but must be above 0 and at most 1."),
    ("ttrl", "--max_new_tokens 0", "--max_new_tokens is 0, but must be 1 or more."),
    ("ttrl", "--micro_tokens -1", "--micro_tokens is -1, but must be"),
    ("ttrl", "--keep 0", "--keep is 0, but must be 1 or more."),
    ("ttrl", "--max_bad_steps 0", "--max_bad_steps is 0, but must be 1 or more."),
    ("ttrl", "--steps -1", "--steps is -1, but must be 0 or more."),
    ("ttrl", "--gpu_memory 0", "--gpu_memory is 0.0, but must be above 0 and at most 1."),
    ("ttrl", "--num_minibatches 0", "--num_minibatches is 0, but must be 1 or more."),
    ("ttrl", "--grad_clip 0", "--grad_clip is 0.0, but must be above 0."),
    ("ttrl", "--seed -1", "--seed is -1, but must be 0 or more."),
    ("evol_rl", "--alpha 1.5", "--alpha is 1.5, but must be between 0 and 1."),
    ("scrl", "--tau_pos 2", "--tau_pos is 2.0, but must be between 0 and 1."),
    ("scrl", "--tau_marg nan", "--tau_marg is nan, but must be between 0 and 1."),
    ("scrl", "--lambda_h -1", "--lambda_h is -1.0, but must be 0 or more."),
    ("scrl", "--null_reward inf", "--null_reward is inf, but must be"),
    ("restrain", "--kappa -1", "--kappa is -1, but must be 0 or more."),
    ("restrain", "--delta -1", "--delta is -1.0, but must be 0 or more."),
    ("restrain", "--sigma -0.1", "--sigma is -0.1, but must be 0 or more, or inf."),
    ("restrain", "--prompt_sigma nan", "--prompt_sigma is nan, but must be 0 or more, or inf."),
    ("ettrl", "--trunks 0 --train_samples 0", "--train_samples is 0, but must be 1 or more."),
    ("ettrl", "--branches 0 --train_samples 1", "--branches is 0, but must be 1 or more."),
    ("ettrl", "--bound 0", "--bound is 0.0, but must be above 0."),
    ("dynamic_rl", "--tau 0", "--tau is 0.0, but must be above 0 and at most 1."),
    ("dynamic_rl", "--lambda_dq -1", "--lambda_dq is -1.0, but must be 0 or more."),
    ("dynamic_rl", "--max_question_tokens 0", "--max_question_tokens is 0, but must be 1 or more."),
    ("evaluate", "--samples 0", "--samples is 0, but must be 1 or more."),
    ("evaluate", "--top_p 0", "--top_p is 0.0, but must be above 0 and at most 1."),
    # options that do not go together
    ("ttrl", "--train_samples 33", "--train_samples is 33, but must be at most 32, the responses per prompt"),
    ("ettrl", "--train_samples 99", "--train_samples is 99, but must be at most 35, the responses per"),
    ("ettrl", "--rollout parallel --votes 8", "--train_samples is 16, but must be at most 8, the "),
    ("ttrl", "--num_minibatches 300", "--num_minibatches is 300, but must be at most 256, the trained "),
    ("ttrl", "--steps 0 --epochs 0", "--epochs is 0 and --steps is 0, so there is nothing to do; give one "),
    ("ttrl", "--prompts_per_batch 200", "--prompts_per_batch is 200, but must be at most 128, the problems "),
    ("ttrl", "--dataset= --eval toy", "there is nothing to train on: --dataset is empty; name one."),
    ("dynamic_rl", "--labels gold", "--labels is 'gold', but --dataset is empty or has problems without a "),
    ("dynamic_rl", "--eval train", "the benchmark 'train' means --dataset, which is empty; name another"),
    ("ttrl", "--gpu_gib 40", "--gpus and --gpu_gib are taken only by --plan; a run has torchrun's --nproc"),
    ("ttrl", "--plan --gpu_gib 1e300", "--gpu_gib is 1e+300, but must be above 0 and below 1e9: one"),
    ("ttrl", f"--out {'a/' * 2100}", f"--out is '{'a/' * 2100}', but must be text in UTF-8, at most 4096"),
    ("ttrl", "--sampler vllm --plain", "--plain samples with transformers, but --sampler is 'vllm'; give"),
    # data
    ("ttrl", "--eval ,", "--eval: unknown data set '': known are math500"),
    ("evaluate", "--benchmarks toy,", "--benchmarks: unknown data set '': known are math500"),
    ("ttrl", "--dataset nothing", "--dataset: unknown data set 'nothing': known are math500, aime24"),
    ("ttrl", "--dataset no.jsonl", "--dataset: there is no file no.jsonl."),
    ("ttrl", "--question_field x", "--dataset: {root}/toy/train.jsonl, row 1 has no column 'x'"),
    ("ttrl", "--question_field answer", "--dataset: {root}/toy/train.jsonl: column 'answer' cannot be "),
    ("ttrl", "--eval math5", "--eval: unknown data set 'math5'"),
    ("ttrl", "--dataset /etc/problems.txt", "--dataset: unknown data set '/etc/problems.txt'"),
    ("ttrl", "--max_prompt_tokens 3", "all 128 problems of toy have more than --max_prompt_tokens 3"),
    ("dynamic_rl", "--max_prompt_tokens 3 --eval=", "z_0 (Dynamic RL: --question_prompt) has "),
    ("evaluate", "--benchmarks nothing", "--benchmarks: unknown data set 'nothing'"),
    ("evaluate", "--benchmarks=", "--benchmarks is empty; name at least one benchmark."),
    ("ttrl", "--prompt sytem", "--prompt is 'sytem', but must be system, suffix, plain or a template file: "),
    ("ttrl", "--prompt /dev/zero", "--prompt is '/dev/zero', but must be system, suffix, plain or a template "
     "file: it is no file of less than 1 MB."),
    ("evaluate", "--prompt /proc/version", "--prompt is '/proc/version', but must be system, suffix, plain "
     "or a template file with {question} in its last turn, a [user] turn."),
    # models, folders
    ("ttrl", "--model nowhere", "--model is 'nowhere', but must be a Hub id or a folder with a model "),
    ("ttrl", "--model ./nowhere", "--model is './nowhere', but must be a Hub id or a folder with a model and "
     "its tokenizer: no such folder."),
    ("ttrl", "--max_new_tokens 9000", "--max_prompt_tokens 128 + --max_new_tokens 9000 must fit "),
    ("evaluate", "--model ./nowhere", "--model is './nowhere'"),
    ("evol_rl", "--embedder nowhere", "--embedder is 'nowhere', but must be a Hub id, a folder or package:"),
    ("ttrl", "--out /proc/run", "--out is '/proc/run', "),
    ("ttrl", f"--out {'x' * 300}", f"--out is '{'x' * 300}', which cannot be written: File name too long."),
    ("ttrl", "--resume", "--resume needs --out, the folder of the run to go on with."),
    ("ttrl", "--resume --out nowhere", "--resume: nowhere/run.json cannot be read, it does not ")]
# Every case runs in a fork of one process, because starting Python sixty times would take minutes.
ONE_BY_ONE = """
import importlib, json, os, sys
sys.path.insert(0, sys.argv[1])
import common
common.Policy = None  # weights are never loaded
for script, flags, toy in json.loads(sys.stdin.read()):
    module = importlib.import_module(script)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = [script + ".py", *flags.split()]
        common.launch(module.main, module.Args, toy)
        os._exit(0)
    os.close(write)
    error = os.fdopen(read).read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), error]), flush=True)
"""


def test_bad_input_ends_with_one_sentence_and_code_2(tmp_path):
    cases = []
    for script, flags, _ in BAD:
        module = importlib.import_module(script)
        cases.append((script, flags, module.TOY if script == "evaluate" else toy_of(module)))
    command = [sys.executable, "-c", ONE_BY_ONE, str(ROOT)]
    done = subprocess.run(command, input=json.dumps(cases), cwd=tmp_path, capture_output=True, text=True,
                          timeout=600)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(BAD), done.stderr[-1000:]
    wrong = []
    for (script, flags, words), (status, error) in zip(BAD, results):
        error = error.removeprefix("Error: ") if error.startswith("Error: ") else "no error: " + error
        lines = error.splitlines()  # one for each bad option
        clear = error.startswith(words.replace("{root}", str(ROOT)))
        clear = clear and all(line.endswith(".") for line in lines)
        if status != 2 or not clear or any(not line.strip().startswith("--") for line in lines[1:]):
            wrong.append((script, flags, status, error[-600:]))
    assert not wrong
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_all_bad_options_are_said_at_once():
    sentences = common.Args(keep=0, grad_clip=0.0, lr=-1.0).errors()
    assert sorted(sentence.split()[0] for sentence in sentences) == ["--grad_clip", "--keep", "--lr"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_papers_and_the_toys_values_are_in_range(name):
    module = importlib.import_module(name)
    assert module.Args().errors() == []
    assert module.Args(**toy_of(module)).errors() == []
