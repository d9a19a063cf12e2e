"""The shape of the repository: what lies where, what imports what, one loop in six files, bad input."""

import ast
import functools
import re
import subprocess
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT, SCRIPTS


METHODS = SCRIPTS[1:]
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


# ------------------------------------------------ what imports what --------------------------------------
def module_names() -> list[str]:
    named = []
    for name in files(".py"):
        if name.startswith(("tests/", "toy/", "lab/tests/")):
            continue
        named.append(name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    return named


def imports_of(module: str) -> set[str]:
    """Modules of the repository that it imports, wherever the import stands."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return imported & set(module_names()) - {"engine"}  # the folder itself holds nothing


FLOORS = dict(answers=1, engine=2, common=3, evaluate=4, **dict.fromkeys(SCRIPTS, 4), tools=5, lab=6)


def test_imports_point_down_and_in_no_circle():
    """Scripts never import each other."""
    graph = {module: imports_of(module) for module in module_names()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError
    for module, imported in graph.items():
        place = module.partition(".")[0]
        for other in imported:
            below = other.partition(".")[0]
            assert below == place or FLOORS[below] < FLOORS[place], f"{module} imports {other}"


# ------------------------------------------------ one loop in six files ----------------------------------
# The numbered parts of main that a method changes, 0: before the first. All others are ttrl.py's.
CHANGED = {"evol_rl": {0, 3}, "scrl": {2, 3, 4}, "restrain": {0, 3, 6, 7}, "ettrl": {2, 4, 7},
           "dynamic_rl": {2, 3, 6, 7}}


def parts_of(module: str) -> dict[int, list[str]]:
    """The lines of main by the numbers of its comments."""
    text = source(module)
    start = text.index("def main(args: Args)")
    parts = {0: []}
    for line in text[start:text.index('\n\n\nif __name__ == "__main__"', start)].splitlines():
        if number := re.match(r" {8}# (\d)\. ", line):
            parts[int(number[1])] = []
        parts[max(parts)].append(line)
    assert list(parts) == list(range(8))
    return parts


@pytest.mark.parametrize("module", METHODS)
def test_the_loop_differs_only_where_the_paper_does(module):
    ours, theirs = parts_of("ttrl"), parts_of(module)
    assert {number for number in ours if ours[number] != theirs[number]} == CHANGED[module]


@pytest.mark.parametrize("function", ["group_advantages", "majority_reward"])
def test_a_shared_function_is_the_same_in_all_scripts(function):
    texts = []
    for module in SCRIPTS:
        texts += re.findall(rf"^def {function}\(.*?(?=\n\n\n)", source(module), re.DOTALL | re.MULTILINE)
    assert len(texts) >= 3 and len(set(texts)) == 1


# ------------------------------------------- bad input is one sentence -----------------------------------
BAD = [  # (script, flags and environment variables, the sentence or its beginning)
    ("ttrl", dict(lr="nan"), "--lr is nan, but must be "),
    ("ettrl", dict(train_samples=99), "--train_samples is 99, but must be at least 2 and at most 15, the "),
    ("dynamic_rl", dict(labels="gold"), "--labels is 'gold', but --dataset is empty or has problems without"),
    ("ttrl", dict(WORLD_SIZE="8", sampler="vllm", tensor_parallel=3), "--tensor_parallel is 3, but must div"),
    ("ttrl", dict(WORLD_SIZE="2", tensor_parallel=2), "--tensor_parallel is 2, but only vLLM splits"),
    ("ttrl", dict(max_prompt_tokens=3), "--dataset: all 256 problems of toy have more than --max_prompt"),
    ("ttrl", dict(max_new_tokens=9000), "--max_prompt_tokens + --max_new_tokens are 9128, but must fit"),
    ("ttrl", dict(resume=True, out="nowhere"), "--resume: nowhere/run.json does not exist.")]


@pytest.mark.parametrize("script, flags, words", BAD, ids=str)
def test_bad_input_ends_with_one_sentence_and_code_2(script, flags, words, launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.load_model", None)  # weights are never loaded
    for name in filter(str.isupper, flags):
        monkeypatch.setenv(name, flags[name])
    code, _, error = launch(script, **{name: value for name, value in flags.items() if name.islower()})
    assert code == 2 and error.startswith(f"Error: {words}"), error
    assert error.endswith(".\n") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
