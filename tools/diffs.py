"""How much each method's file changes ttrl.py, and how much of that is its paper. Density cannot fool it.

    python -m tools.diffs                 # a table
    python -m tools.diffs --check         # exit code 1 if a limit is exceeded, too

lines     of the file
code      changed lines of code: both files through ast.parse, docstrings dropped (also those under fields),
          and ast.unparse, which lays every statement out in one way; lines of a unified diff of these
diff      added and removed lines of the plain diff of the two files, blank ones left out
paper     the share of the plain diff that is the paper's
its code  the share of the plain diff that is the paper's code: `paper` without docstrings and comments

A line of the plain diff is the paper's if it is
- in the module docstring, but no command to run (python ..., torchrun ...): the idea and its equations;
- an option of the method's own Args or the docstring under it;
- in a top-level statement that ttrl.py does not have by that name, a function of the method or a table it
  needs, with its docstring and the comments above it;
- in the loop (main): added, or removed where an added line takes its place.
Not the paper's are imports, commands, everything else, and lines of ttrl.py that only go. This is generous:
what a method logs and how it reports errors counts as its own, too, and so do all docstrings.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"evol_rl": 80, "scrl": 65, "restrain": 80, "ettrl": 95, "dynamic_rl": 135}  # changed lines of code
EXAMPLES = "rent srt tis empo intuitor gspo dynamic_sampling em_ft co_rewarding rlsc".split()
EXAMPLE_LIMIT = 60  # changed lines of code of a fork in examples/
LEAST_SHARE = 0.5  # of the diff, the paper's
COMMAND = re.compile(r"\s*(python|torchrun) ")


def without_docstrings(source: str) -> str:
    """The source as ast.unparse lays it out, without docstrings and without texts under fields."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not is_text(statement)] or [ast.Pass()]
    return ast.unparse(tree)


def is_text(statement: ast.stmt) -> bool:
    """A docstring, or a text under a field."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def changed_code(base: str, other: str) -> int:
    """Added and removed lines between two sources, both laid out by ast.unparse without docstrings."""
    old, new = without_docstrings(base).splitlines(), without_docstrings(other).splitlines()
    diff = list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]
    return sum(line.startswith(("+", "-")) for line in diff)


def names_of(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement defines: a function, a class, constants."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def kinds(source: str, known: set[str]) -> list[str]:
    """What every line of a script is: idea, field, method, loop, or "" for everything else.

    known: the top-level names of ttrl.py, which are not the method's own."""
    lines = source.splitlines()
    found = [""] * len(lines)

    def mark(first: int, last: int, kind: str) -> None:
        found[first - 1:last] = [kind] * (last - first + 1)

    end = 0  # the last line of the statement before
    for i, statement in enumerate(ast.parse(source).body):
        names = names_of(statement)
        if i == 0 and is_text(statement):
            mark(1, statement.end_lineno, "idea")
        elif names == ["Args"]:
            for field in statement.body:
                if isinstance(field, ast.AnnAssign) or is_text(field):
                    mark(field.lineno, field.end_lineno, "field")
        elif names == ["main"]:
            mark(statement.lineno, statement.end_lineno, "loop")
        elif names and not known & set(names):
            mark(end + 1, statement.end_lineno, "method")
        end = statement.end_lineno
    for i, line in enumerate(lines):
        heading = line.startswith("# ---")
        if heading or found[i] == "idea" and COMMAND.match(line):
            found[i] = ""
    return found


def is_code(source: str) -> list[bool]:
    """Whether a line of a source is code, not a docstring, comment or blank."""
    lines = source.splitlines()
    found = [not line.strip().startswith("#") and line.strip() != "" for line in lines]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and is_text(node):
            for number in range(node.lineno, node.end_lineno + 1):
                found[number - 1] = False
    return found


def count(base: str, other: str) -> tuple[int, int, int]:
    """Lines of a plain diff from base to other that are not blank: (all, the paper's, the paper's code)."""
    known = set()
    for statement in ast.parse(base).body:
        known |= set(names_of(statement))
    old, new = base.splitlines(), other.splitlines()
    old_kinds, new_kinds = kinds(base, known), kinds(other, known)
    old_code, new_code = is_code(base), is_code(other)
    changed = paper = code = 0
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        removed = [n for n in range(i, j) if old[n].strip()]
        added = [n for n in range(k, m) if new[n].strip()]
        own = [n for n in added if new_kinds[n]]
        replaced = [n for n in removed if old_kinds[n] == "loop"]
        if not any(new_kinds[n] == "loop" for n in added):
            replaced = []
        changed += len(removed) + len(added)
        paper += len(own) + len(replaced)
        code += sum(new_code[n] for n in own) + sum(old_code[n] for n in replaced)
    return changed, paper, code


def measure(root: Path, name: str) -> dict[str, float]:
    """The figures of one method's file against ttrl.py (see the module's docstring)."""
    base, other = ((root / f"{script}.py").read_text(encoding="utf-8") for script in ("ttrl", name))
    diff, paper, code = count(base, other)
    return {"lines": len(other.splitlines()), "code": changed_code(base, other), "diff": diff,
            "paper": paper / max(diff, 1), "its code": code / max(diff, 1)}


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.diffs", description=__doc__, formatter_class=shape)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the scripts")
    options = parser.parse_args()
    missing = [name for name in ("ttrl", *LIMITS) if not (options.root / f"{name}.py").exists()]
    if missing:
        parser.error(f"--root is '{options.root}', but there is no {missing[0]}.py in it.")
    base = (options.root / "ttrl.py").read_text(encoding="utf-8")
    print(f"ttrl.py: {len(base.splitlines())} lines\n")
    print(f"{'':15}{'lines':>7}{'code':>7}{'limit':>7}{'diff':>7}{'paper':>8}{'its code':>10}")
    exceeded = []
    for name, limit in LIMITS.items():
        row = measure(options.root, name)
        print(f"{name + '.py':15}{row['lines']:7}{row['code']:7}{limit:7}{row['diff']:7}"
              f"{row['paper']:8.0%}{row['its code']:10.0%}")
        if row["code"] > limit:
            exceeded.append(f"{name}.py changes {row['code']} lines of code, more than {limit}.")
        if row["paper"] < LEAST_SHARE:
            share = f"{row['paper']:.0%}"
            exceeded.append(f"{share} of {name}.py's diff are the paper's, less than {LEAST_SHARE:.0%}.")
    for name in EXAMPLES if (options.root / "examples").exists() else []:
        code = changed_code(base, (options.root / f"examples/{name}.py").read_text(encoding="utf-8"))
        print(f"{name + '.py':22}{code:7}{EXAMPLE_LIMIT:7}")
        if code > EXAMPLE_LIMIT:
            exceeded.append(f"examples/{name}.py changes {code} lines of code, more than {EXAMPLE_LIMIT}.")
    for sentence in exceeded:
        print(sentence)
    sys.exit(1 if options.check and exceeded else 0)


if __name__ == "__main__":
    main()
