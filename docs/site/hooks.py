"""What MkDocs must know of this repository: code as pages, equations' functions, the notebook, the formulas.

mkdocs.yml names this file; `make docs` runs it in an environment of its own, of requirements/docs.txt.
"""

import json
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
KATEX = ROOT / ".docs/node_modules/katex/dist"
CODE = ["ttrl.py", "evol_rl.py", "scrl.py", "restrain.py", "ettrl.py", "dynamic_rl.py", "common.py"]
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
BADGE = re.compile(r"^\[!\[tests\].*\n", re.MULTILINE)  # of README: its address is only right on GitHub
RENDER = """const katex = require(process.argv[1]), found = JSON.parse(require('fs').readFileSync(0))
console.log(JSON.stringify(found.map(([tex, block]) =>
    katex.renderToString(tex, {displayMode: block, throwOnError: true, strict: false}))))"""


def line_of(script: str, function: str) -> int:
    """The line where a function (or class) of a script begins. Raises ValueError without one."""
    for number, line in enumerate((ROOT / f"{script}.py").read_text().splitlines(), 1):
        if re.match(rf"(def|class) {function}\b", line):
            return number
    raise ValueError(f"{script}.py has no function {function}")


def functions(text: str) -> set[str]:
    """The functions that a page's tables of equations name."""
    tables = re.findall(r"^\|.*function in the script \|\n(?:\|.*\n)+", text, re.MULTILINE)
    return set(re.findall(r"`(\w+)` \|$", "".join(tables), re.MULTILINE))


def source_of(uri: str) -> Path:
    """The file that a page of the site is made from."""
    if uri == "lesson.md":
        return DOCS / "lesson.ipynb"
    return ROOT / uri.removeprefix("code/") if uri.startswith("code/") else DOCS / uri


def page_of(path: Path) -> str:
    """The page that shows a file: its own if it is in docs/, else a listing."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS)).replace(".ipynb", ".md")
    name = str(path.relative_to(ROOT))
    return f"code/{name}" if name.endswith(".md") else f"code/{name}.md"


def targets(path: Path) -> list[Path]:
    """The repository's files that a Markdown file links to."""
    return [(path.parent / target).resolve() for target, _ in LINK.findall(BADGE.sub("", path.read_text()))]


def listing(path: Path) -> str:
    """A page with a file's text, each line with an anchor: #L1, #L2, ..."""
    language = {".py": "python", ".diff": "diff", ".ipynb": "json", ".sh": "bash"}.get(path.suffix, "text")
    return (f"---\nhide: [toc]\nsearch: {{boost: 0.5}}\n---\n# {path.relative_to(ROOT)}\n\n"
            f"`````{language} linenums=\"1\"\n{path.read_text()}`````\n")


def colab(repository: str) -> str:
    """The badge that opens the lesson of a GitHub repository, "owner/name", in Colab."""
    address = f"https://colab.research.google.com/github/{repository}/blob/main/docs/lesson.ipynb"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({address})\n\n"


def notebook(path: Path) -> str:
    """The lesson as a page: its cells, and what they print or draw."""
    repository = os.environ.get("GITHUB_REPOSITORY")  # only the workflow that publishes the site knows it
    text = colab(repository) if repository else ""
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        text += f"```python\n{source}\n```\n\n" if cell["cell_type"] == "code" else f"{source}\n\n"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = data["image/png"].replace("\n", "")
                text += f'<img alt="what the cell draws" src="data:image/png;base64,{picture}">\n\n'
            elif printed := "".join(output.get("text", data.get("text/plain", []))):
                text += f"```text\n{printed}\n```\n\n"
    return text


# ------------------------------------------- what MkDocs calls ----------------------------------------------
def on_files(files, config):
    from mkdocs.structure.files import File
    files.append(File.generated(config, "lesson.md", content=notebook(DOCS / "lesson.ipynb")))
    todo = [ROOT / name for name in CODE]
    for file in files.documentation_pages():
        if file.src_uri != "lesson.md":
            todo += targets(DOCS / file.src_uri)
    while todo:
        path = todo.pop()
        uri = page_of(path)
        if not uri.startswith("code/") or files.get_file_from_path(uri) or not path.is_file():
            continue  # a link that leads nowhere is MkDocs' to report
        if path.suffix == ".md":
            todo += targets(path)
        text = path.read_text() if path.suffix == ".md" else listing(path)
        files.append(File.generated(config, uri, content=text))
    for path in (KATEX / "katex.min.css", *sorted((KATEX / "fonts").glob("*.woff2"))):
        files.append(File.generated(config, f"katex/{path.relative_to(KATEX)}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    source = source_of(uri)
    if uri.startswith("code/") and source.suffix == ".md" and not source.exists():
        return markdown  # a listing
    script = uri.removesuffix(".md")
    for name in functions(markdown):
        address = f'<a href="../code/{script}.py/#L{line_of(script, name)}"><code>{name}</code></a>'
        markdown = markdown.replace(f"| `{name}` |\n", f"| {address} |\n")

    def moved(link):
        target = (source.parent / link[1]).resolve()
        return os.path.relpath(page_of(target), Path(uri).parent) + (link[2] or "")

    markdown = LINK.sub(moved, BADGE.sub("", markdown)).replace("<details>", '<details markdown="1">')
    return markdown.replace("```python\n>>>", "```pycon\n>>>")


def on_page_content(html, page, config, files):
    if page.file.src_uri.startswith("code/"):
        html = re.sub(r"__codelineno-0-(\d+)", r"L\1", html)
        html = re.sub(r'<a href="#L(\d+)">', r'<a href="#L\1" aria-label="line \1">', html)
    formula = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
    found = [(re.sub("&(lt|gt|amp);", lambda e: dict(lt="<", gt=">", amp="&")[e[1]], tex), tag == "div")
             for tag, tex in formula.findall(html)]
    if not found:
        return html
    done = subprocess.run(["node", "-e", RENDER, str(KATEX / "katex.min.js")], input=json.dumps(found),
                          capture_output=True, text=True, check=True)
    drawn = iter(json.loads(done.stdout))
    return formula.sub(lambda f: f'<{f[1]} class="arithmatex">{next(drawn)}</{f[1]}>', html)
