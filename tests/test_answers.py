"""Reading answers out of text, and which are equal: tables, real gold answers, properties, hostile input."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import answers, formulas
from engine.answers import (
    answers_equal,
    equivalence_classes,
    extract_answer,
    normal_form,
    normal_gold,
)

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared/data"
PAGE = "Let us set $x = \\frac{1}{2}$ and try \\boxed{17} first. {Unbalanced. " * 60


# ------------------------------------------------------ extraction ------------------------------------------
@pytest.mark.parametrize("text, expected", [
    (r"\boxed{5}", "5"),
    (r"The answer is $\boxed{42}$.", "42"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\frac{\sqrt{a^{2}}}{b}} done", r"\frac{\sqrt{a^{2}}}{b}"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\fbox{7}", "7"),
    (r"\boxed {9}", "9"),
    (r"\boxed 5", "5"),
    (r"so \boxed 42.", "42"),
    (r"\boxed -3$", "-3"),
    (r"\boxed{ 5 }", "5"),
    ("\\boxed{1 +\n 2}", "1 +\n 2"),
    (r"\boxed{}", None),
    (r"\boxed{5} but then \boxed{}", None),
    (r"\boxed{\frac{1}{2}", None),
    (r"\boxed{1}, and more: \boxed{\frac{1", None),  # truncated: the first box is not the answer
    (r"no box at all, 12 apples", None),
    ("", None),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right.} end}", r"\left\{ x \right."),  # an escaped brace is no brace
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\boxed{a}}}}}", "a"),
    (r"}}}{{ \boxed{3}", "3"),
    (r"<think>\boxed{1}</think> so \boxed{2}", "2"),
    (r"<think>\boxed{1}</think> so two", None),
    (r"a</think>\boxed{1}</think>\boxed{3}", "3"),
    (r"put it in \boxed as asked: \boxed{4}", "4"),
    (r"\boxed{4}. I used \boxed as asked.", "4"),
    (r"\boxedx{4}", None),
])
def test_extraction(text, expected):
    assert extract_answer(text) == expected
    if expected is not None and "think" not in text:
        assert extract_answer(PAGE + text) == expected


@pytest.mark.parametrize("text, expected", [
    (r"\boxed{C}", "C"),
    (r"\boxed{(C)}", "C"),
    (r"\boxed{\text{C}}", "C"),
    (r"\boxed{\textbf{(C) }}", "C"),
    (r"\boxed{C. 42}", "C"),
    (r"\boxed{\textbf{(C)}\ 42}", "C"),
    (r"\boxed{C: the mitochondrion}", "C"),
    (r"\boxed{B) 3}", "B"),
    (r"\boxed{(D) a cat}", "D"),
    (r"\boxed{C} This is a good answer", "C"),  # the article is no choice, nor anything else outside the box
    ("A good answer", None),
    (r"\boxed{A cat}", None),
    (r"\boxed{a}", None),
    (r"\boxed{E}", None),
    (r"\boxed{}", None),
    (r"\boxed{C", None),
    ("(C)", None),
    (r"\boxed{CO_2}", None),
    (r"\boxed{A+B}", None),
])
def test_extraction_of_choices(text, expected):
    assert extract_answer(text, choices=4) == expected


def test_only_the_letters_of_the_options_are_choices():
    """MMLU-Pro has ten options, GPQA four: there J is no answer and must not vote."""
    assert extract_answer(r"\boxed{J. 7}", choices=10) == "J"
    assert extract_answer(r"\boxed{J. 7}", choices=4) is None


# ------------------------------------------------------ equality --------------------------------------------
SIGNS = {"DEGREE-SIGN": "\u00b0", "MINUS-SIGN": "\u2212", "PI-SIGN": "\u03c0"}  # this file is ASCII


def table(text):
    """Lines of spellings, parted by " | "; a line that ends with " |" goes on in the next one."""
    for name, sign in SIGNS.items():
        text = text.replace(name, sign)
    return [line.split(" | ") for line in text.strip().replace(" |\n", " | ").splitlines()]


SAME = table(r"""
0.5 | .5 | 0.50 | \frac12 | \frac{1}{2} | \dfrac{1}{2} | \tfrac12 | 1/2 | \frac{2}{4} | 2^{-1} |
$\frac{1}{2}$ | \(\frac12\)
0.25 | 25\times 10^{-2} | 2.5e-1 | \frac14 | 2^{-2} | 0.2500
1000 | 1,000 | 1{,}000 | 1,\!000 | 1\,000 | 10^3 | 1000.0 | 1000. | \$1000 | \$1,000 | 1e3 | +1000 | 01000
5 | x=5 | x = 5 | 5. | \text{5} | 5\text{ cm} | 5 \text{ cm}^2 | 5\,\mathrm{cm} | 5 cm | 5 inches |
5 \mbox{ inches} | (5) | k=2+3=5 | {5}
90 | 90^\circ | 90^{\circ} | 90DEGREE-SIGN | 90\text{ degrees} | 90\% | 90% | 90 degrees | 90 percent
1\frac{3}{4} | \frac{7}{4} | 1.75 | 1 3/4
-\frac{1}{2} | \frac{-1}{2} | \frac{1}{-2} | -0.5 | MINUS-SIGN0.5 | -1/2 | -\dfrac12
C | (C) | \text{C} | \text{(C)} | \textbf{(C)} | \mathrm{C}
\text{Evelyn} | Evelyn | evelyn | \textbf{Evelyn}
\text{no solution} | no solution | No solution
2\sqrt5 | \sqrt{20} | 2 \sqrt{5} | \sqrt 5\cdot2 | 2*\sqrt{5} | \frac{10}{\sqrt5} | 2\sqrt{5}\text{ units} |
y=2\sqrt5
2 | \sqrt{4} | \log_2 4 | \frac{\sqrt{8}}{\sqrt{2}} | 1+1 | (2)(1) | 2(1) | 2!
2\pi | 2 \pi | \pi\cdot 2 | 2PI-SIGN | 2\pi\text{ cm}
1, 2, 3 | 3, 2, 1 | \{1,2,3\} | 1,2,3 | x=1, x=2, x=3 | 1, 2 and 3 | 1, 2, \text{ and } 3
(1,2) | \left( 1, 2 \right) | (1.0, \frac{4}{2}) | \left(1,\,2\right) | (1;2)
[2,\infty) | x\ge 2 | x \geqslant 2 | 2\le x | \left[2, +\infty\right) | x\in[2,\infty) | 2 \leq x<\infty
(-1,3] | -1<x\le3 | x\in\left(-1,3\right] | 3\ge x>-1
(0,9)\cup(9,36) | (9,36) \cup (0,9)
1\pm\sqrt2 | 1+\sqrt2, 1-\sqrt{2} | 1-\sqrt2,1+\sqrt2 | x=1\pm\sqrt2
\{1\pm\sqrt{5},-2\} | -2, 1+\sqrt5, 1-\sqrt5
\begin{pmatrix} 1/2 \\ 2 \end{pmatrix} | \begin{pmatrix}\frac12\\2\end{pmatrix} |
\begin{bmatrix} 0.5 \\[3pt] \sqrt{4} \end{bmatrix}
y=2x+3 | 2x+3 | 3+2x | f(x)=2x+3 | 2(x+1)+1
5x-7y+11z+4=0 | -5x+7y-11z-4=0 | 5x+11z+4=7y | 10x-14y+22z+8=0
(a+5)(b+2) | ab+2a+5b+10 | (b+2)(a+5)
\frac{n(n+1)}{2} | \frac{n^2+n}{2} | \frac12 n(n+1) | \binom{n+1}{2}
\binom{2n}{n} | \frac{(2n)!}{n!n!}
\lceil\frac{n}{2}\rceil | \left\lfloor \frac{n+1}{2} \right\rfloor | \lfloor(n+1)/2\rfloor
|x-3| | |3-x| | \lvert x-3 \rvert
6-5i | -5i+6 | 6 - 5 i
e^{i\pi} | -1
\sin^2 x+\cos^2 x | 1
3R^2 | 3 R^{2} | R^2\cdot3
52_8 | 52_{8} | 52_{ 8 }
\sin 30^\circ | \frac12
2^{100}+1 | 1+2^{100} | 1267650600228229401496703205377
\frac{100!}{99!} | 100
x=1,y=2 | y=2, x=1 | x = 1, y = 2
\frac{dx}{dt}=kx-a | \frac{dx}{dt} = kx - a
0.1\sqrt{2} | \frac{\sqrt2}{10}
8.7 \times 10^{8} | 8.7e8 | 870000000 | 8.7\cdot10^8
""")
DIFFERENT = table(r"""
2^{-99} | 2^{-98} | 0
\frac{1}{2004!} | \frac{1}{2006!}
0.333333 | \frac13 | 0.3333333333333333
3.14 | \pi | \frac{22}{7} | 3.14159265358979
\sqrt2\cdot10^{-30} | \sqrt3\cdot10^{-30} | 0
2^{100}+1 | 2^{100} | 2^{100}+2
(1,2) | (2,1) | [1,2] | [1,2) | 1,2 | 12
1,2 | 1,3 | 1,2,3 | 1,2,2 | 1
100, 200 | 100200 | 100
x=1,y=2 | x=2,y=1
3R^2 | 3r^2
|x| | x | -x
\sqrt{x^2} | x
52_8 | 52 | 42 | 52_9
x>2 | x\ge2 | x<2 | 2
1+\sqrt2 | 1-\sqrt2 | 1\pm\sqrt2
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix} |
\begin{pmatrix} 1 & 2 \end{pmatrix}
east | west | \text{north}
A | B | C
12 | 1,2 | 1.2 | 21 | -12
\frac{1}{2} | \frac{2}{1} | 12 | \frac{1}{3}
2x+3 | 2x-3 | 3x+2 | 2y+3
\lfloor\frac{n}{2}\rfloor | \lceil\frac{n}{2}\rceil | \frac{n}{2} |
\lfloor\frac{n}{3}\rfloor | \lfloor\frac{n}{2}\rfloor+1
\lfloor\frac{2n}{3}\rfloor+1 | \lceil\frac{2n}{3}\rceil | \lfloor\frac{n}{30}\rfloor |
\lfloor\frac{n+1}{30}\rfloor
mn-\lfloor\frac{m}{2}\rfloor | mn-\lfloor\frac{n}{2}\rfloor | mn-\lceil\frac{m}{2}\rceil
|x+2| | x+2 | |x-2| | x-2 | 2-x
|xy| | xy | |x|y | x|y| | -xy
\sqrt{1000001} | \sqrt{1000002} | 1000.0005 | 1000
\sqrt{10^{18}+1} | 10^9 | \sqrt{10^{18}}+10^{-9}
e^{\pi\sqrt{163}} | 262537412640768744 | e^{\pi\sqrt{163}}+10^{-12}
\frac{\pi}{1000001} | \frac{\pi}{1000002} | \sqrt{2}+10^{-30} | \sqrt{2}
x+10^{-12} | x | 1.000000000001x
9^{9^{9^9}} | 9^{9^{9^8}} | 7
\frac{dx}{dt} | 0 | \frac{dy}{dt}
yes | no
""")


def first(group):
    return group[0]


@pytest.mark.parametrize("group", SAME, ids=first)
def test_spellings_of_one_answer(group):
    assert {a: c for a, c in zip(group, equivalence_classes(group)) if c} == {}


@pytest.mark.parametrize("group", DIFFERENT, ids=first)
def test_different_answers(group):
    assert equivalence_classes(group) == list(range(len(group)))


def merged(spellings):
    """{spelling: the earlier one that it equals}."""
    classes = equivalence_classes(spellings)
    return {spellings[i]: spellings[classes.index(c)] for i, c in enumerate(classes) if classes.index(c) != i}


def test_groups_of_the_table_do_not_merge():
    """No spelling of one line equals a spelling of another: 60 * 60 / 2 chances to be too generous."""
    assert merged([group[0] for group in SAME]) == {r"\sin 30^\circ": "0.5"}


def test_classes_are_numbered_by_first_appearance_and_none_stays_none():
    assert equivalence_classes([]) == []
    assert equivalence_classes([None, None]) == [None, None]
    spellings = ["7", None, "3", "7.0", r"\frac{6}{2}", "x=7", None]
    assert equivalence_classes(spellings) == [0, None, 1, 0, 1, 0, None]
    assert not answers_equal(None, None)
    assert not answers_equal("1", None)
    assert not answers_equal(None, "1")


@pytest.mark.parametrize("value, expected", [
    (142.0, "142"),
    (70, "70"),
    ("142.0", "142"),
    ("025", "25"),
    (-4.0, "-4"),
    (0.5, "0.5"),
    (None, None),
    ("$1003$", "1003"),
    ("336^\\circ", "336"),
    (["2"], "2"),
    (["2", "3"], "2, 3"),
    (["$69$,$84$"], "69, 84"),
    (["9.6\n"], "9.6"),
    ([], None),
    (["4.4e7\n", "4.4 \\times 10^7"], "4.4e7"),
    (["2\n", "2"], "2"),
    ("$\\frac{1}{2 n+2}$", "\\frac{1}{2n+2}"),
    (True, "true"),
])
def test_gold_answers_of_any_type(value, expected):
    assert normal_gold(value) == expected


# ------------------------------------------------------ real gold answers -----------------------------------
# The test must mean something without the data files too.
INLINE = [
    r"\left( 3, \frac{\pi}{2} \right)", "p - q", r"\frac{14}{3}", r"\text{Evelyn}", r"90^\circ",
    r"3\sqrt{13}", "6 - 5i", "52_8", r"11\sqrt2", "1,-2", "x=5", r"x^5 - x^4 + x^3 - x^2 + x - 1", r"\cot x",
    r"1 \pm \sqrt{19}",
    r"(3,4]", r"10,\!080", r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", r"\frac{270}7\text{ degrees}",
    ".0000672", r"5x - 7y + 11z + 4 = 0", r"(2,\infty)", r"\$32,\!348", r"864 \mbox{ inches}^2",
    r"1\frac{4}{5}",
    r"\frac{11+9a}{20}", r"x \in [-2,7]", r"(0,9) \cup (9,36)", r"\{1\pm\sqrt{5},-2\}", r"15\mbox{ cm}^2",
    r"I(0)e^{-\frac{t}{RC}}", r"\frac{d !}{2 k(d-k) !}", "025",
    r"\hbar \omega(v+1 / 2)-\frac{E_{0}^{2} e^{2}}{2 m \omega^{2}}", r"$k\left(4 k^{2}+k-1\right) / 2$",
    "$69$,$84$",
]
# Different spellings that are one answer (reviewed by hand), by a representative of each class.
EQUAL_GOLDS = {
    "1, -2": "two problems, one set",
    "2, 3, 4": "two problems, one set",
    "1/3": "",
    "4.4e7": "",
    "3.61\\cdot10^{-10}": "",
    "3.3\\cdot10^{-10}": "",
    "-\\frac{1}{3}": "",
    "1\\cdot10^{-3}": "",
    "\\arcsin{\\frac{1}{1.3}}": "1/1.3 is 10/13",
    "1+i\\sqrt{3}": "",
    "\\ln2+i\\frac{\\pi}{3}": "",
    "\\arcsin(1.3\\sin(\\theta_{w}))": "",
    "\\frac{t}{m}": "",
    "\\frac{1}{\\sqrt{2}}c": "",
    "\\frac{v_{0}}{r_{0}}\\frac{1}{(1+r/r_{0})^{3/2}}": "",
    "\\frac{2-\\omega^{2}-\\frac{\\omega i}{4}}{\\omega^{4}-\\frac{63}{16}\\omega^{2}+4}": "",
}
# Rewritings that change a gold answer for us, and why.
NOT_REWRITTEN: dict[tuple[str, str], str] = {}
FILES = {"math500": "math500.jsonl", "aime24": "aime24.jsonl", "aime25": "aime25.json", "amc": "amc.json"}


def golds_of(name):
    if name == "inline":
        return INLINE
    path = DATA / FILES.get(name, name)
    if not path.exists():
        pytest.skip(f"optional: real gold answers: {path} is not here (never committed); the inline ones are")
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in open(path)]
        return [row.get("Answer") or row["answer"] for row in rows]
    if path.suffix == ".json":
        return [row["answer"] for row in json.loads(path.read_text())]
    from datasets import load_from_disk
    rows = load_from_disk(str(path))["answer"]
    if name == "minerva":  # a list of alternative spellings each
        return list(itertools.chain.from_iterable(rows))
    return list(rows)


def rewritings(gold):
    """(kind, text) of what a model might write for this gold answer."""
    yield "dollars", f"${gold}$"
    yield "full stop", f"{gold}."
    spaced = gold.replace("+", " + ").replace("=", " = ").replace(",", " , ").replace("{", "{ ")
    yield "spaces", f" {spaced} "
    yield "dfrac", gold.replace("\\frac", "\\dfrac")
    yield "tfrac", gold.replace("\\frac", "\\tfrac")
    yield "left", gold.replace("(", "\\left(").replace(")", "\\right)")
    yield "display", "\\displaystyle " + gold
    if "," not in gold and "=" not in gold and not re.search(r"<|\\(in|ge|le)(?![a-z])", gold):
        yield "name", f"x = {gold}"
        yield "function", f"f(x)={gold}"
    value = answers._number(gold)
    if value is not None:
        yield "unit", gold + "\\text{ cm}"
        yield "unit", gold + "\\,\\mathrm{cm}^2"
        yield "degrees", gold + "^\\circ"
        yield "fraction", f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
        yield "slash", f"{value.numerator}/{value.denominator}"
        yield "root", f"\\sqrt{{{abs(value.numerator)}^2}}/{value.denominator}" if value > 0 else gold
        if value.denominator == 1 and abs(value) < 10**18:
            yield "thousands", f"{value.numerator:,}"
            yield "thin", f"{value.numerator:,}".replace(",", ",\\!")
            yield "decimal", f"{value.numerator}.0"
        elif Fraction(f"{float(value):.12f}") == value:
            yield "decimal", f"{float(value):.12f}"
    elif gold.count("\\pi") == 1:
        yield "pi", gold.replace("\\pi", SIGNS["PI-SIGN"])


BENCHMARKS = ["inline", "math500", "aime24", "aime25", "amc", "minerva", "olympiad_bench"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_gold_answers_are_found_and_equal_to_themselves(name):
    wrong = []
    for raw in golds_of(name):
        gold = normal_gold(raw)
        texts = raw if isinstance(raw, list) else [str(raw)]
        if len(texts) == 1:  # as the file has it, in a box after a page of text
            answer = extract_answer(PAGE + "\\[ \\boxed{" + texts[0] + "} \\]")
            if answer != texts[0].strip() or not answers_equal(answer, gold):
                wrong.append(("raw", raw))
        for kind, text in rewritings(gold):
            answer = extract_answer(PAGE + f"Hence $\\boxed{{{text}}}$.")
            if not answers_equal(answer, gold) and (kind, gold) not in NOT_REWRITTEN:
                wrong.append((kind, gold, text))
    assert wrong == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_different_gold_answers_are_different(name):
    """All pairs of a benchmark at once: the reviewed classes have more than one spelling, and no others."""
    golds = list(dict.fromkeys(normal_gold(raw) for raw in golds_of(name)))
    assert set(merged(golds).values()) - set(EQUAL_GOLDS) == set()
    assert [gold for gold in golds if normal_form(gold) != gold] == []


# ------------------------------------------------------ properties ------------------------------------------
WORDS = sorted(set(itertools.chain(INLINE, *SAME, *DIFFERENT)))
PIECES = [
    "1", "2", "10", "x", "y", "\\pi", "\\frac", "{", "}", "(", ")", "[", "]", "+", "-", "=", "^", "_", ",",
    " ", ".", "\\sqrt", "\\text{", "cm", "%", "\\circ", "$", "\\,", "\\!", "\\left", "\\right", "<", "\\le",
    "\\pm", "\\cup", "\\{", "\\}", "\\\\", "and", "0", "i", "!", "/",
]
small_fractions = st.fractions(-3, 3, max_denominator=8)
vocabulary = st.one_of(st.sampled_from(WORDS), st.integers(-20, 20).map(str), small_fractions.map(str))
scribble = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
SLOW = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck), derandomize=True)


@SLOW
@given(st.lists(st.one_of(st.none(), vocabulary), max_size=12), st.randoms(use_true_random=False))
def test_classes_do_not_depend_on_the_order(group, rng):
    order = list(range(len(group)))
    rng.shuffle(order)
    classes = equivalence_classes(group)
    shuffled = dict(zip(order, equivalence_classes([group[i] for i in order])))
    for i, j in itertools.combinations(range(len(group)), 2):
        same = classes[i] is not None and classes[i] == classes[j]
        assert same == (shuffled[i] is not None and shuffled[i] == shuffled[j])  # order
        # symmetry, and whatever else is in the group
        assert same == answers_equal(group[i], group[j]) == answers_equal(group[j], group[i])
    seen = [c for c in classes if c is not None]
    assert list(dict.fromkeys(seen)) == list(range(len(set(seen))))


@SLOW
@given(vocabulary, vocabulary, vocabulary)
def test_equality_is_transitive(a, b, c):
    if answers_equal(a, b) and answers_equal(b, c):
        assert answers_equal(a, c)


@settings(SLOW, max_examples=1500)
@given(st.one_of(vocabulary, scribble, st.text(max_size=30)))
def test_normal_form_is_idempotent(answer):
    assert normal_form(normal_form(answer)) == normal_form(answer)


@settings(SLOW, max_examples=300)
@given(scribble)
def test_scribble_does_no_harm(text):
    assert answers_equal(text, text)
    assert equivalence_classes([text, None, text]) == [0, None, 0]
    extract_answer("\\boxed{" + text)
    extract_answer("\\boxed{" + text + "}", choices=4)


def as_fraction(value):
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def as_percentage(value):
    return f"x = {value}\\%"


@settings(SLOW, max_examples=300)
@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_numbers_are_compared_exactly(a, b):
    for spell, respell in itertools.product([str, as_fraction, as_percentage], repeat=2):
        assert answers_equal(spell(a), respell(b)) == (a == b)
        assert answers_equal(spell(a), respell(a))


# ------------------------------------------------------ hostile ---------------------------------------------
SENTINEL = f"{tempfile.gettempdir()}/answers_test_sentinel"
HOSTILE = [
    # towers
    "9^{9^{9^9}}", "9^9^9^9", "10^{10^{10}}", "((9^{99})^{99})^{99}", "(9^{9})^{(9^{9})}", "2^{10^{9}}",
    "9^{999999999}", "9^{-999999999}", "e^{e^{e^{e^{9}}}}", "x^{x^{x^{x}}}", "(1+x)^{(1+x)^{(1+x)}}",
    "i^{i^{i}}", r"(-1)^{\sqrt{2}}", "(x+1)^{999}(x-1)^{999}", "(x+y+z+a+b+c+d)^{99}",
    # factorials
    "100000000!", "(10^8)!", "((9!)!)!", "9!!!", "(9^9)!", "99999!", r"\frac{1}{100000000!}", "(99999)!!",
    r"\binom{100000000}{50000000}", r"\binom{10^9}{10^8}", r"\binom{99999}{\binom{999}{99}}",
    # operators and functions
    r"\sum_{k=1}^{10^9} \frac{1}{k}", r"\prod_{k=1}^{10^9} k", r"\int_0^1 x^{x^{x}} dx",
    r"\lim_{n\to\infty} n^{n^{n}}", r"\int\int\int e^{-x^2-y^2-z^2}", r"\zeta(10^9)", r"\sin(10^{10^{10}})",
    r"\sin(9^{9^9})", r"\log(9^{9^9})", r"\ln(100000!)", r"\lfloor 9^{9^9}\cdot\pi \rfloor",
    r"\sqrt[9^{9^9}]{2}",
    # long and deep
    "9" * 5000, "0." + "3" * 5000, "9" * 5000 + "/" + "7" * 5000, "(" * 3000 + "1" + ")" * 3000,
    "{" * 200 + "1" + "}" * 200, "[" * 150 + "]" * 150, r"\frac{1}{" * 60 + "1" + "}" * 60,
    r"\sqrt{" * 60 + "2" + "}" * 60, "1+" * 150 + "1", "x^" * 60 + "x",
    "-" * 390, "," * 390, " " * 390, "\\" * 399, "{" * 399, "}" * 399,
    r"\text{" * 80, r"\text{ cm}" * 40 + "!", "1" + r"\text{ m}" * 39, "5" + " " * 380 + "x",
    "1,000" * 70 + ",", "a=" * 190 + "b", "\x00\x01\x02", "\n" * 100,
    # code
    f"__import__('os').system('touch {SENTINEL}')", f"\\text{{}}__import__('os').system('touch {SENTINEL}')",
    f"open('{SENTINEL}','w')", f"exec(\"open('{SENTINEL}','w')\")", f"lambda: open('{SENTINEL}','w')",
    f"$(touch {SENTINEL})", f"`touch {SENTINEL}`",
    f"\\input{{|touch {SENTINEL}}}", f"\\write18{{touch {SENTINEL}}}",
    "().__class__.__bases__[0].__subclasses__()", "x.__class__", "''.__doc__",
    # the worker's protocol
    "1\n2\n3", "\"quoted\"", "null", "ready\n", "['a']", "[null, true]",
    # numbers that are none, too large or too strange
    "nan", "inf", "1e999999999", "1e-999999999", "0^{-1}", "\\frac{1}{0}", "\\frac{0}{0}", "\\log 0", "0^{0}",
    "\U0001f642", "\u0661\u0662\u0663", "\u2177", "\u00bd", "\ud800", r"\tan(\frac{\pi}{2})",
    r"\infty-\infty", r"\frac{\infty}{\infty}", "0.{3}", "1_000", "999999999^{999}", "1e999",
    "9.9e999/3", "\\frac{1e999}{7}",
    "2^{999}\\cdot 3", "9\\cdot 10^{999}",
]


def test_hostile_answers():
    Path(SENTINEL).unlink(missing_ok=True)
    answers_equal("\\sqrt{2}", "\\sqrt{3}")  # the worker runs
    assert len(HOSTILE) >= 60
    classes = equivalence_classes(HOSTILE)
    assert len(formulas.given_up & set(HOSTILE)) <= 8  # of a second each
    computed = formulas._computed.cache_info().misses
    assert equivalence_classes(HOSTILE) == classes
    assert formulas._computed.cache_info().misses == computed  # remembered, those given up included
    assert not Path(SENTINEL).exists()
    assert answers_equal("\\sqrt{8}", "2\\sqrt{2}")  # still at work


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_each_hostile_answer_is_equal_to_itself(answer):
    assert answers_equal(answer, answer)
    assert normal_form(normal_form(answer)) == normal_form(answer)
    extract_answer(f"\\boxed{{{answer}}}")  # no crash, no endless search


def test_what_hangs_is_stopped_and_forgotten():
    """The worker's own limit ends it, the next formula is answered, and the time is spent once."""
    hang = "|10^{9}|!"
    start = time.monotonic()
    assert formulas.formula_key(hang) is None and hang in formulas.given_up
    assert formulas.formula_key("\\sqrt{7}+1") is not None
    assert 0.5 < time.monotonic() - start < 8
    start = time.monotonic()
    assert not answers_equal(hang, "7")
    assert time.monotonic() - start < 0.1


def test_a_killed_worker_is_replaced():
    assert formulas.formula_key("\\sqrt{11}+1")
    os.kill(formulas._worker.pid, signal.SIGKILL)
    formulas._worker.wait()
    assert formulas.formula_key("\\sqrt{11}+2") is not None


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_worker_dies_with_its_parent_and_needs_no_torch():
    code = """
import os, signal, sys
from engine import answers, formulas
assert answers.answers_equal(r"\\sqrt{8}", r"2\\sqrt{2}")
assert "torch" not in sys.modules
print(formulas._worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    worker = int(run_python(code).stdout)
    state = Path(f"/proc/{worker}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the worker outlived its parent")


def test_numbers_need_no_worker():
    """Most benchmarks have integer answers: they cost microseconds and no second process."""
    code = """
from engine import answers, formulas
answers.equivalence_classes(["12", "1/2", "0.5", "2^{-99}", "(1,2)", "C", "1,000"])
assert formulas._worker is None
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
