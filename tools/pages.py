"""The pages of docs/site: one annotated page per paper, and the loop with a glossary.

    python -m tools.pages            # or: make pages

Nothing is said twice: ideas, equations in words, worked examples and readings are lifted from docs/*.md, code
and what it says of itself from the scripts, figures from docs/results.md. What can only be written by hand
(TeX, reasons of the diff's hunks, exercises) stands in templates/pages/*.toml. The pages need no network.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import re
import tokenize
import tomllib
from pathlib import Path
from types import SimpleNamespace

import torch
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markupsafe import Markup

import common
from tools import explain
from tools.report import TEMPLATES

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "docs" / "site"
SCRIPTS = ["ttrl", "evol_rl", "scrl", "restrain", "ettrl", "dynamic_rl"]


# -------------------------------------------------- text --------------------------------------------------
def markdown(text: str) -> Markup:
    """HTML of what stands in docs/*.md: links lead from the folder below, wide tables scroll."""
    def moved(link: re.Match) -> str:
        page, _, place = link[1].partition("#")
        if page.removesuffix(".md") in SCRIPTS:
            return f'href="{page[:-3]}.html"'
        stays = not page or "://" in page or page.endswith(".html")
        return f'href="{link[1] if stays else "../" + link[1]}"'

    text = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    text = re.sub(r'href="([^"]+)"', moved, text).replace("\n\n</code>", "\n</code>")
    return Markup(text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>"))


def math(tex: str, display: str = "block") -> Markup:
    return Markup(convert(tex, display=display))


def prose(text: str) -> Markup:
    """Markdown with $TeX$ in it."""
    parts = re.split(r"\$([^$]+)\$", text)
    text = markdown("".join(f"@{i}@" if i % 2 else part for i, part in enumerate(parts)))
    for i in range(1, len(parts), 2):
        text = text.replace(f"@{i}@", math(parts[i], "inline"))
    return text


def section(page: str, heading: str = "") -> str:
    """What stands in docs/PAGE.md under a heading; without one, before the first."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2]))[heading].strip()


def table(text: str) -> list[list[str]]:
    """The rows of the last Markdown table in a text; the header first."""
    rows = []
    for line in text.splitlines():
        if re.match(r"\|(?!---)", line):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


# -------------------------------------------------- code --------------------------------------------------
@functools.cache
def source(path: str) -> tuple[str, ...]:
    return tuple((ROOT / path).read_text(encoding="utf-8").splitlines())


@functools.cache
def comments(path: str) -> dict[int, int]:
    """{line: column} of a file's comments."""
    with (ROOT / path).open(encoding="utf-8") as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    return dict(token.start for token in tokens if token.type == tokenize.COMMENT)


def code(path: str, numbers: list[int]) -> Markup:
    """These lines of a file, as far left as they go, each number a link to the line; comments dim."""
    margin = min(len(line) - len(line.lstrip()) for n in numbers if (line := source(path)[n - 1]))
    shown = []
    for n in numbers:
        line, column = source(path)[n - 1], comments(path).get(n, 999)
        shown.append(Markup('<a href="../../{}#L{}">{:>4}</a>  {}<i>{}</i>').format(
            path, n, n, line[margin:column], line[column:]))
    return Markup('<pre class="code">{}</pre>').format(Markup("\n").join(shown))


def names_of(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement defines: a function, a class, constants."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def statements(path: str) -> dict[str, ast.stmt]:
    """The functions, classes and constants of a file by name."""
    return {name: node for node in ast.parse("\n".join(source(path))).body for name in names_of(node)}


def function(module, name: str) -> dict | None:
    """A function that a page's table names: its place, what its docstring says, its code without that."""
    found = getattr(module, name.rpartition(".")[2], None)
    if not inspect.isfunction(found):
        return None
    path = found.__module__.replace(".", "/") + ".py"
    node = statements(path)[found.__name__]
    numbers = list(range(node.lineno, node.end_lineno + 1))
    if ast.get_docstring(node):
        text = node.body[0]
        numbers = [n for n in numbers if not text.lineno <= n <= text.end_lineno]
    says, _, example = (ast.get_docstring(node) or "").partition("\n>>>")
    return dict(name=found.__name__, link=f"../../{path}#L{node.lineno}", says=says.strip().split("\n\n"),
                order=(path, node.lineno), example=example and ">>>" + example, code=code(path, numbers))


def steps(script: str) -> dict[int, list[int]]:
    """The line numbers of main's seven steps, as its comments number them, without blank lines."""
    node, found, step = statements(f"{script}.py")["main"], {}, 0
    for n in range(node.lineno, node.end_lineno + 1):
        line = source(f"{script}.py")[n - 1]
        if begins := re.match(r" {8}# (\d)\. ", line):
            step = int(begins[1])
        if line.startswith(" " * 8):
            found.setdefault(step, []).append(n)
    return found


def seven_steps() -> list[tuple[int, str]]:
    """(number, what its comment says) of the steps of ttrl.py."""
    text = "\n".join(source("ttrl.py"))
    found = re.findall(r"^ {8}# (\d)\. (.*(?:\n {8}#.*)*)", text, re.MULTILINE)
    return [(int(number), re.sub(r"\n *# *", " ", says)) for number, says in found]


def hunks(script: str, reasons: dict[str, str]) -> list[dict]:
    """The changes of main against ttrl.py, each with the reasons whose keys occur in it.

    Raises ValueError if a hunk has none or a reason no hunk: the texts would no longer tell of this code."""
    nodes = [(path, statements(path)["main"]) for path in ("ttrl.py", f"{script}.py")]
    old, new = (source(path)[node.lineno - 1:node.end_lineno] for path, node in nodes)
    diff = "\n".join(list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:])
    parts, found, left = re.split(r"^@@ .*\+(\d+).*\n", diff, flags=re.MULTILINE), [], set(reasons)
    for start, text in zip(parts[1::2], parts[2::2]):
        lines = text.rstrip().split("\n")
        changed = "\n".join(line for line in lines if line[0] in "+-")
        keys = [key for key in reasons if key in changed]
        if not keys:
            raise ValueError(f"pages/{script}.toml has no reason for this hunk of main:\n{changed}")
        left -= set(keys)
        link = f"../../{script}.py#L{nodes[1][1].lineno + int(start) - 1}"
        found.append(dict(link=link, lines=lines, why=[reasons[key] for key in keys]))
    if left:
        raise ValueError(f"pages/{script}.toml has reasons without a hunk: {', '.join(sorted(left))}")
    return found


# -------------------------------------------------- pages --------------------------------------------------
def content(name: str) -> dict:
    return tomllib.loads((ROOT / f"tools/templates/pages/{name}.toml").read_text(encoding="utf-8"))


def equations(script: str, own: dict) -> list[dict]:
    """The rows of the page's table beside the functions, or the steps of main, that compute them."""
    module, blocks = importlib.import_module(script), {}
    rows = table(section(script, own.get("table", "Equations")))[1:]
    for label, says, names in rows:
        entry = dict(label=label, says=says, tex=own["tex"].get(label, []))
        for name in re.findall(r"`([\w.]+)`", names):
            made = function(module if hasattr(module, name) else common, name)
            if name == "main":
                step = own.get("steps", {}).get(label, 6)
                numbers = steps(script)[step]
                made = dict(name=f"main, step {step}", link=f"../../{script}.py#L{numbers[0]}",
                            order=("~", step), code=code(f"{script}.py", numbers))
            if made:
                blocks.setdefault(made["name"], dict(made, rows=[]))["rows"].append(entry)
    shown = {row["label"] for block in blocks.values() for row in block["rows"]}
    if unseen := set(own["tex"]) - shown:
        raise ValueError(f"pages/{script}.toml has TeX for which docs/{script}.md names no code: {unseen}")
    return list(blocks.values())


def options(script: str) -> list[tuple[str, str, str]]:
    """(name, default, docstring) of the fields of the script's Args."""
    fields, found = statements(f"{script}.py")["Args"].body, []
    for field, text in zip(fields, fields[1:]):
        if isinstance(field, ast.AnnAssign):
            found.append((field.target.id, ast.unparse(field.value), inspect.cleandoc(text.value.value)))
    return found


def one_vote(rows: list[dict]) -> explain.Vote:
    """These responses under all six papers, by the functions of the scripts (tools/explain.py)."""
    def embed(texts: list[str]) -> list[torch.Tensor]:
        return [torch.tensor(rows[int(text or -1)]["embedding"]) for text in texts]  # "": no answer

    responses = [SimpleNamespace(text=str(i), answer=row.get("answer")) for i, row in enumerate(rows)]
    vote = explain.Vote(common.Problem("What is 7 * 13?", "91"), responses, [row["entropy"] for row in rows])
    return explain.explain(vote, embed)


def build() -> dict[str, str]:
    """{file name: HTML} of all pages. The templates call these functions for what they show."""
    functions = [code, equations, hunks, markdown, math, one_vote, options, prose, section, seven_steps,
                 statements, steps, table]
    shared = dict({function.__name__: function for function in functions},
                  scripts={name: content(name)["name"] for name in SCRIPTS})
    made = {}
    for name in ["index", *SCRIPTS]:
        template = TEMPLATES.get_template("index.html" if name == "index" else "page.html")
        made[f"{name}.html"] = template.render(shared, script=name, own=content(name))
    return made


def main() -> None:
    SITE.mkdir(exist_ok=True)
    for name, text in build().items():
        (SITE / name).write_text(text, encoding="utf-8")
        print(SITE / name)


if __name__ == "__main__":
    main()
