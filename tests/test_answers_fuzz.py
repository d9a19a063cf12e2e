"""What a change does to an answer: of a digit, letter, sign, bracket or word, and of the style."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from answers import equal

# Some changes make no other answer: of a name before "=", of a unit, -0, trailing zeros, the order of a list.
# So the answers here have no such name and no unit, no digit becomes 0, and nothing is moved.
WORDS = st.sampled_from("""rise fall upstream against odd even Alice Bob Monday increasing triangle circle
    left right true false profit loss""".split())
PARTS = {  # of a template
    "n": st.integers(1, 99).map(str), "w": WORDS,
    "x": st.sampled_from([*"abcdkmnpqrstuvwyzABFGHKLMRTV", r"\alpha ", r"\lambda ", r"\theta ", r"\omega "])}


def filled(templates):
    """One of the templates, a line each, with <n> a number, <x> a letter and <w> a word."""
    def fill(template):
        pieces = re.split("<(.)>", template)  # every second one is a part's name
        return st.tuples(*(PARTS[p] if i % 2 else st.just(p) for i, p in enumerate(pieces))).map("".join)
    return st.sampled_from(templates.split("\n")).flatmap(fill)


TERMS = filled(r"""<n>
<n>.<n>7
<n><x>
<x>_<n>
<x>_{<x><n>}
<x>^4
\frac{<n>}{<n>}
\frac{<n><x>}{<x>^2}
\sqrt{<n><x>}
\sqrt{\frac{<x>}{<x>}}
\sin <x>
\cos\left(<n><x>\right)
e^{-<x>}
<n><x><x>^2
<n>\pi
(<x>+<n>)^2
|<x>-<n>|
f(<x>)
\dot{<x>}""")
MORE = st.lists(st.sampled_from("+-").flatmap(lambda sign: TERMS.map(sign.__add__)), max_size=2)
ANSWERS = st.tuples(TERMS, MORE.map("".join)).map("".join) | filled(r"""(<n>, <x>)
[<n>, <x>)
(-<n>, <n>)\cup[1<n>, \infty)
<n>:<n>
\{<n>, <x>, 100\}
<n>\equiv <x>\pmod{<n>}
\begin{pmatrix}<n>&<x>\\<n>&2\end{pmatrix}
<n><x>+<n>=<x>^3
<x>>3<x>^2
<x>\in A_<n>
P(<x>|<x>)
\{<x>^<n>\mid <x>>1\}
<n> percent <w>
\text{<w> }<n>
<n>\text{ steps <w>}
\text{<w>}
\text{<w> or <w>}
\text{<w> then <w>}
<n>-<n>
<n>_{<n>}
<n>/<n>/2021
\int_0^<n> <x>\,dx
\sum_{k=<n>}^n <x>_k
\neg <x>\land p
\vec{<x>}\times\vec{F}
\text{<x>}_<n>\text{O}
<n>\text{ R }<n>
<n>\text{ out of }<n>
<n>\text{ dozen}
\text{at least }<n>
\frac{<n>\pm\sqrt{<n>}}{7}""")
SPOT = re.compile(r"\d|(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])|[-+()<>\[\]]"
                  r"|(?<=[{ ])(?!p?matrix)[a-zA-Z]{3,}(?=[ }]|$)")
OTHER = {"+": "-", "-": "+", "(": "[", "[": "(", ")": "]", "]": ")", "<": r"\le ", ">": r"\ge ", "c": "j"}


@st.composite
def one_change(draw):
    """An answer, and what it is with one digit, letter, sign, bracket or word changed."""
    answer = draw(ANSWERS)
    spots = [*SPOT.finditer(answer)]
    if not spots:
        return answer, answer + "+7"
    spot = draw(st.sampled_from(spots))
    old = spot[0]
    if old.isdigit():
        new = str(int(old) % 9 + 1)
    elif len(old) == 1:
        new = OTHER.get(old) or draw(st.sampled_from([old.swapcase(), "c"]))
    else:
        new = draw(WORDS.filter(lambda word: word != old))
    return answer, answer[:spot.start()] + new + answer[spot.end():]


@settings(deadline=None, max_examples=500, derandomize=True)
@given(one_change())
def test_one_change_makes_another_answer(pair):
    assert not equal(*pair)


STYLES = [  # pattern, what means the same
    (r"\\frac", r"\\dfrac"), (r"(?<=[\w)}])([-+=<>])(?=[\w(\\])", r" \1 "), (r"^(.*)$", r"$\1$"),
    (r"^(.*)$", r"\\(\1\\)"), (r"^(.*)$", r"{\1}"), ("$", "."), ("$", " "), ("^", r"\\displaystyle "),
    (r"^(.*)$", r"\\boxed{\1}"), (r"(?<=\d)(?=[a-z](?![a-z]))", r"\\cdot "), (r"^(.*)$", r"\\boldsymbol{\1}"),
    (r"^(.*)$", r"\\textcolor{blue}{\1}"), (r"\\text(?![a-z])", r"\\mathrm"),
    (r"\\text(?![a-z])", r"\\textbf"), (r"\\land", r"\\wedge"), ("^", r"\\text{Answer: }"),
    (r"_(\w)(?![\w{])", r"_{\1}"),
    (r"\^(\d)(?!\d)", r"^{\1}"), (", ", ",")]


@settings(deadline=None, max_examples=500, derandomize=True)
@given(ANSWERS, st.lists(st.sampled_from(STYLES), min_size=1, max_size=2))
def test_a_style_makes_no_other_answer(answer, styles):
    styled = answer
    for pattern, new in styles:
        styled = re.sub(pattern, new, styled)
    assert equal(answer, styled)
