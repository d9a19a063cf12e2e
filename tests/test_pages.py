"""docs/site is what tools.pages makes of today's files; its links lead somewhere, its exercises are right."""

import html
import importlib
import math
import re

import pytest
import torch
from conftest import ROOT, SCRIPTS
from jinja2 import UndefinedError
from test_report import browse, in_a_browser

pytest.importorskip("latex2mathml", reason="optional: no latex2mathml")

from tools import pages

SITE = ROOT / "docs" / "site"
NAMES = [*SCRIPTS, "index"]


def test_the_pages_are_up_to_date():
    """After a change of a script, of docs/*.md or of a template: make pages."""
    made = pages.build()
    assert sorted(made) == sorted(path.name for path in SITE.iterdir())
    for name, text in made.items():
        assert (SITE / name).read_text(encoding="utf-8") == text, f"docs/site/{name} is stale: make pages"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_answers_of_the_exercises_are_what_the_functions_give(script):
    exercises = pages.content(script)["exercise"]
    known = dict(vars(importlib.import_module(script)), torch=torch, math=math)
    checks = [(*check, item["answer"]) for item in exercises for check in item.get("check", [])]
    assert len(exercises) == 5 and len(checks) >= 5
    for expression, expected, answer in checks:
        value = float(eval(expression, known))
        digits = len(f"{expected:g}".partition(".")[2])
        assert round(value, digits) == expected, f"{expression} is {value}"
        assert expected in (0, 1) or f"{expected:g}" in answer, f"{expected} is not in the answer: {answer}"


def test_every_hunk_needs_a_reason(monkeypatch):
    reasons = pages.content("scrl")["loop"]
    with pytest.raises(ValueError, match="no reason for this hunk"):
        pages.hunks("scrl", {key: reasons[key] for key in list(reasons)[1:]})
    with pytest.raises(ValueError, match="reasons without a hunk: nonsense"):
        pages.hunks("scrl", reasons | {"nonsense": "why"})


def test_no_tex_is_left_out_or_printed_raw(monkeypatch):
    """What the converter does not know it prints, backslash and all; what no block shows nobody sees."""
    for name in NAMES:
        text = (SITE / f"{name}.html").read_text(encoding="utf-8")
        formulas = re.findall(r"<math.*?</math>", text, re.DOTALL)
        assert (formulas or name == "index") and not any("\\" in formula for formula in formulas), name
        assert "\n| " not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL), name  # raw Markdown
    own = pages.content("scrl")
    with pytest.raises(ValueError, match="names no code: .*Eq. 99"):
        pages.equations("scrl", own | dict(tex=own["tex"] | {"Eq. 99": ["x"]}))


def test_a_new_function_needs_an_equation_or_a_reason(monkeypatch):
    content = pages.content
    monkeypatch.setattr(pages, "content", lambda name: dict(content(name), helpers={}))
    with pytest.raises(UndefinedError):
        pages.build()


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere_and_nothing_is_loaded(name):
    text = (SITE / f"{name}.html").read_text(encoding="utf-8")
    assert "<script" not in text and "default-src 'none'" in text
    assert set(re.findall(r'src="([^"]+)"', text)) <= {"../images/compare.png"}
    for target in set(re.findall(r'href="([^"]+)"', text)):
        path, _, place = html.unescape(target).partition("#")
        if path.startswith("https://arxiv.org/"):
            continue
        linked = SITE / (path or f"{name}.html")
        assert linked.is_file(), target
        assert path or f'id="{place}"' in text, target
        if path.endswith(".py") and place:
            assert int(place.removeprefix("L")) <= len(linked.read_text().splitlines())


def test_code_is_shown_as_it_stands():
    """Each numbered line of a page is that line of its file."""
    for script in SCRIPTS:
        text = (SITE / f"{script}.html").read_text(encoding="utf-8")
        found = re.findall(r'<a href="../../([\w/]+\.py)#L(\d+)"> *\d+</a>  (.*)', text)
        assert len(found) > 40
        for path, number, line in found:
            shown = html.unescape(re.sub(r"</?i>|</pre>.*", "", line))
            assert (ROOT / path).read_text().splitlines()[int(number) - 1].strip() == shown.strip()


@in_a_browser
@pytest.mark.parametrize("name", NAMES)
def test_pages_open_without_errors(name, tmp_path):
    document, console = browse(SITE / f"{name}.html", tmp_path)
    assert console == []
    assert name == "index" or "<math" in document
