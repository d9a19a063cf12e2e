"""The shape of the repository: what lies where, what imports what, one loop in six files, bad input."""

import re

import pytest
from conftest import ROOT, SCRIPTS

METHODS = SCRIPTS[1:]


# ------------------------------------------------ what imports what --------------------------------------
FLOORS = dict(answers=1, engine=2, common=3, evaluate=4, **dict.fromkeys(SCRIPTS, 4), tools=5, lab=6)


def test_imports_point_down():
    """Scripts never import each other."""
    for place, floor in FLOORS.items():
        for path in [*ROOT.glob(f"{place}.py"), *ROOT.glob(f"{place}/*.py")]:
            for other in re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE):
                assert other == place or FLOORS.get(other, 0) < floor, f"{path} imports {other}"


# ------------------------------------------------ one loop in six files ----------------------------------
# The numbered parts of main that a method changes, 0: before the first. All others are ttrl.py's.
CHANGED = {"evol_rl": {0, 3}, "scrl": {2, 3, 4}, "restrain": {0, 3, 6, 7}, "ettrl": {2, 4, 7},
           "dynamic_rl": {2, 3, 6, 7}}


def parts_of(module: str) -> dict[int, list[str]]:
    """The lines of main by the numbers of its comments."""
    text = (ROOT / f"{module}.py").read_text()
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
        text = (ROOT / f"{module}.py").read_text()
        texts += re.findall(rf"^def {function}\(.*?(?=\n\n\n)", text, re.DOTALL | re.MULTILINE)
    assert len(texts) >= 3 and len(set(texts)) == 1


# ------------------------------------------- bad input is one sentence -----------------------------------
BAD = [  # (script, flags and environment variables, the sentence or its beginning)
    ("ttrl", dict(lr="nan"), "--lr is nan"),
    ("ettrl", dict(train_samples=99), "--train_samples is 99"),
    ("dynamic_rl", dict(labels="gold"), "--labels is 'gold'"),
    ("ttrl", dict(WORLD_SIZE="2", tensor_parallel=2), "--tensor_parallel is 2"),
    ("ttrl", dict(max_new_tokens=9000), "--max_prompt_tokens + --max_new_tokens"),
    ("ttrl", dict(resume=True, out="nowhere"), "--resume needs --out")]


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
