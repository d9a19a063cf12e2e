"""Reading answers out of text, and which are equal: tables, real gold answers, properties, hostile input."""

import functools
import itertools
import json
import re
import tempfile
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import classes, equal, extract_answer, gold_answers, key

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared/data"
PAGE = "Let us set $x = \\frac{1}{2}$ and try \\boxed{17} first. {Unbalanced. " * 60


# ------------------------------------------------------ extraction ------------------------------------------
@pytest.mark.parametrize("text, expected", [
    (r"\boxed{5}", "5"),
    (r"The answer is $\boxed{42}$.", "42"),
    (r"\boxed{\frac{\sqrt{a^{2}}}{b}} done", r"\frac{\sqrt{a^{2}}}{b}"),
    (r"\fbox{7}", "7"),
    (r"so \boxed 42.", "42"),
    (r"\boxed{}", None),
    (r"\boxed{1}, and more: \boxed{\frac{1", None),  # truncated: the first box is not the answer
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\left\{ x \right.} end}", r"\left\{ x \right."),  # an escaped brace is no brace
    (r"<think>\boxed{1}</think> so two", None),
    (r"put it in \boxed as asked: \boxed{4}", "4"),
    (r"\boxed{4}. I used \boxed as asked.", "4"),
    (r"\(\boxed{3}\), \(\boxed{5}\), \(\boxed{7}\)", "3, 5, 7"),
    (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"), (r"\boxed{1}; \boxed{2}", "1, 2"),
    (r"$x=\boxed{2}, y=\boxed{3}$", "x=2, y=3"), (r"(\boxed{1}, \boxed{2})", "(1, 2)"),
    (r"First \boxed{3}. After a long check of every case above, the answer is \boxed{4}", "4"),
    (r"\boxed{7}. The final answer is in \boxed{}", "7"),
    (r"\boxed{7}, as in \boxed{\text{your answer}}", "7"),
    ("\\boxed{B}\n\n\\boxed{B}", "B"), (r"$\boxed{\frac12}$ or $\boxed{0.5}$", "0.5"),
    (r"<unused94>thought \boxed{3}", None), (r"<unused94>thought \boxed{3}<unused95>\boxed{4}", "4"),
    (r"\boxed5", "5"), (r"\boxed\frac{1}{2}", r"\frac{1}{2}"), (r"\boxed{5}, so \boxed{5}.", "5"),
    (r"<think>I try \boxed{1} hmm", None), (r"<thinking>\boxed{1}</thinking> two", None),
    (r"<reasoning>\boxed{1}</reasoning> \boxed{2}", "2"), (r"[THINK]\boxed{1}", None),
    (r"<|begin_of_thought|>\boxed{1}", None), (r"<think>a</think> \boxed{3} <think>again \boxed{4}", None),
    ("$\\boxed{6}$ \u548c $\\boxed{8}$", "6, 8"), (r"$\boxed{5}$ cm and $\boxed{12}$ cm", "5, 12"),
    (r"\$\boxed{5}, \$\boxed{6}", "5, 6"), (r"\boxed{3} pears and \boxed{4} apples", "3, 4"),
    (r"$\boxed{91}$, not $\boxed{90}$", "91"), (r"$\boxed{2}$ (instead of $\boxed{3}$)", "2"),
    (r"\boxed{\phantom{12}}", None), (r"\boxed B", "B"), (r"$\boxed\text{D}$", r"\text{D}"),
])
def test_the_answer_of_a_response(text, expected):
    assert extract_answer(text) == expected
    if expected is not None and "think" not in text:
        assert extract_answer(PAGE + text) == expected


@pytest.mark.parametrize("text, expected", [
    (r"\boxed{C}", "C"),
    (r"\boxed{\textbf{(C)}\ 42}", "C"),
    (r"\boxed{C: the mitochondrion}", "C"),
    (r"\boxed{B) 3}", "B"),
    (r"\boxed{C} This is a good answer", "C"),  # the article is no choice, nor anything else outside the box
    ("(C)", None),
    (r"\boxed{A cat}", None),
    (r"\boxed{a}", None),
    (r"\boxed{CO_2}", None),
    (r"\boxed{J. 7}", None),  # of four options, as GPQA has; MMLU-Pro has ten
])
def test_the_choice_of_a_response(text, expected):
    assert extract_answer(text, choices=4) == expected
    assert extract_answer(r"\boxed{J. 7}", choices=10) == "J"


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
1000 | 1,000 | 1{,}000 | 1,\!000 | 1\,000 | 10^3 | 1000.0 | 1000. | \$1000 | \$1,000 | 1e3 | +1000 | 01000
5 | x=5 | x = 5 | 5. | \text{5} | 5\text{ cm} | 5 \text{ cm}^2 | 5\,\mathrm{cm} | 5 cm | 5 inches |
5 \mbox{ inches} | (5) | k=2+3=5 | {5}
90 | 90^\circ | 90^{\circ} | 90DEGREE-SIGN | 90\text{ degrees} | 90\% | 90% | 90 degrees | 90 percent
1\frac{3}{4} | \frac{7}{4} | 1.75 | 1 3/4
-\frac{1}{2} | \frac{-1}{2} | \frac{1}{-2} | -0.5 | MINUS-SIGN0.5 | -1/2 | -\dfrac12
\text{Evelyn} | Evelyn | evelyn | \textbf{Evelyn}
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
\begin{pmatrix} 1/2 \\ 2 \end{pmatrix} | \begin{pmatrix}\frac12\\2\end{pmatrix} |
\begin{bmatrix} 0.5 \\[3pt] \sqrt{4} \end{bmatrix}
y=2x+3 | 2x+3 | 3+2x | f(x)=2x+3 | 2(x+1)+1
5x-7y+11z+4=0 | -5x+7y-11z-4=0 | 5x+11z+4=7y | 10x-14y+22z+8=0
(a+5)(b+2) | ab+2a+5b+10 | (b+2)(a+5)
\binom{2n}{n} | \frac{(2n)!}{n!n!}
\lceil\frac{n}{2}\rceil | \left\lfloor \frac{n+1}{2} \right\rfloor | \lfloor(n+1)/2\rfloor
|x-3| | |3-x| | \lvert x-3 \rvert
\sin^2 x+\cos^2 x | 1
\sin 30^\circ | \frac12
x=1,y=2 | y=2, x=1 | x = 1, y = 2
\frac{dx}{dt}=kx-a | \frac{dx}{dt} = kx - a
""")
DIFFERENT = table(r"""
2^{-99} | 2^{-98} | 0
0.333333 | \frac13 | 0.3333333333333333
3.14 | \pi | \frac{22}{7} | 3.14159265358979
\sqrt2\cdot10^{-30} | \sqrt3\cdot10^{-30} | 0
(1,2) | (2,1) | [1,2] | [1,2) | 1,2 | 12
1,2 | 1,3 | 1,2,3 | 1,2,2 | 1
3R^2 | 3r^2
52_8 | 52 | 42 | 52_9
x>2 | x\ge2 | x<2 | 2
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix} |
\begin{pmatrix} 1 & 2 \end{pmatrix}
12 | 1,2 | 1.2 | 21 | -12
2x+3 | 2x-3 | 3x+2 | 2y+3
\lfloor\frac{n}{2}\rfloor | \lceil\frac{n}{2}\rceil | \frac{n}{2} |
\lfloor\frac{n}{3}\rfloor | \lfloor\frac{n}{2}\rfloor+1
mn-\lfloor\frac{m}{2}\rfloor | mn-\lfloor\frac{n}{2}\rfloor | mn-\lceil\frac{m}{2}\rceil
|xy| | xy | |x|y | x|y| | -xy
e^{\pi\sqrt{163}} | 262537412640768744 | e^{\pi\sqrt{163}}+10^{-12}
\frac{\pi}{1000001} | \frac{\pi}{1000002} | \sqrt{2}+10^{-30} | \sqrt{2}
9^{9^{9^9}} | 9^{9^{9^8}} | 7
""")


def merged(spellings):
    """{spelling: the earlier one that it equals}."""
    numbers = classes(spellings)
    return {spellings[i]: spellings[numbers.index(c)] for i, c in enumerate(numbers) if numbers.index(c) != i}


def test_groups_of_the_table_stay_apart():
    """No spelling of one line equals a spelling of another: every pair is a chance to be too generous."""
    assert merged([group[0] for group in SAME]) == {r"\sin 30^\circ": "0.5"}


def test_classes_are_numbered_by_first_appearance_and_none_is_none():
    spellings = ["7", None, "3", "7.0", r"\frac{6}{2}", "x=7", None]
    assert classes(spellings) == [0, None, 1, 0, 1, 0, None]
    assert not equal(None, None) and not equal("1", None)


@pytest.mark.parametrize("value, expected", [
    (142, ["142"]),
    (None, []),
    ("$1003$", ["$1003$"]),
    (["2", "3"], ["2", "3"]),  # either is right
    (["$69$,$84$"], ["$69$,$84$"]),
    (["4.4e7\n", "4.4e7"], ["4.4e7"]),
    ([], []),
    (True, ["True"]),
    ("['70']", ["70"]), ('["70"]', ["70"]), ("('70',)", ["70"]), ("['70', '71']", ["70", "71"]),
    (r"\fbox{5}", ["5"]), (r"so \boxed{5}", ["5"]), ("work #### 5", ["5"]),
    ("N/A", []), ("nan", []), (float("inf"), []), (float("nan"), []), ("", []),
    (dict(ground_truth="4"), ["4"]),
])
def test_a_gold_answer_is_read(value, expected):
    assert gold_answers(value) == expected


# ------------------------------------- spellings from public bug reports of graders ------------------------
EQUAL_REPORTS = [
    [r"x \not= 3", r"x\ne 3", "x != 3", r"\mathbb{R}\setminus\{3\}"], ["1, 2, ...", r"1, 2, \ldots"],
    ["x >= 5", r"x\ge 5", r"\{x | x \ge 5\}", r"\{x\in\mathbb{R} : x\ge5\}"], ["x**2", "x^2"],
    ["2*x", "2x", "{2}x"], [r"3\text{ million}", "3 million", "3,000,000", "3 000 000"],
    ["3:05 PM", r"3:05\text{ p.m.}", "3:05 pm"], [r"\text{Evelyn}", "Evelyn", r"\operatorname*{Evelyn}"],
    ["No Solution", "no solution"], ["YES", "yes", "\u201cYes\u201d"],
    [r"\sqrt{2} (approximately 1.41)", r"\sqrt{2} \text{ (approx. 1.41)}", r"\sqrt{2}\text{ or about }1.41"],
    [r"2x+c, c\in\mathbb{R}", "2x+c", r"2x+c \text{ for any real } c"], [r"5 \frac{\text{m}}{\text{s}}", "5"],
    ["52 (base 8)", "52_8", "(52)_8", "52_{(8)}", r"52_{\text{eight}}"], ["3 x 10^5", "300000"],
    [r"(1,2) \cup (3,4)", r"(1,2)\cup(3,4)", r"(3,4)\quad\cup\quad(1,2)"], ["1 if x=2", r"1\text{ if }x=2"],
    [r"1,050.", r"1050"], [r"\dot x_0+E_0", r"E_{0}+\dot{x}_{0}"], [r"y^{\prime}+y=0", "y+y'=0"],
    [r"x=12,345", r"12345"], ["\u230an/2\u230b", r"\lfloor\frac n2\rfloor"],
    [r"\text{1,005}", r"1005"], [r"\tau\ln\frac1\Delta", r"-\tau\ln\Delta"],
    [r"n=2, 3, 4", r"2, 3, 4"], [r"m\frac{dv}{dt}+bv=f", r"m\frac{dv}{dt}=f-bv"],
    [r"x_1=2, x_2=3", r"x_1=3, x_2=2", r"2, 3"], [r"2\hat i+\hat j", r"\hat{j}+2\hat{i}"],
    [r"(x,y)=(1,2)", r"(1,2)"], [r"(x,y)\in\{(1,2),(3,4)\}", r"(1,2),(3,4)"], [r"AB = 5", r"5"],
    [r"P(A)=\frac13", r"\frac13"], [r"\text{Area}=5", r"5"], [r"12\times5=60", r"60"],
    [r"\sqrt{2}\approx1.414", r"\sqrt{2}"], [r"x\approx3.46", r"3.46"], [r"**73**", r"73"],
    [r"\textcolor{red}{73}", r"73"], [r"=73", r"73"], [r"\dbinom{5}{2}", r"10"], [r"4\sqrt(2)", r"4\sqrt{2}"],
    [r"\operatorname{arctan}(2)", r"\arctan 2"], [r"\text{sin}(x)", r"\sin x"],
    [r"\left[\begin{matrix}1&2\\3&4\end{matrix}\right]", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"],
    [r"\lbrace 1,2\rbrace", r"\{1,2\}"], [r"x\neq-4", r"(-\infty,-4)\cup(-4,\infty)", r"x\ne-4"],
    [r"-3\lt x\lt 5", r"(-3,5)"], [r"1,2,\ldots,n", r"1,2,\dots,n"],
    [r"f(x)=cx\text{ for any real }c", r"f(x)=cx"], [r"52_{\text{eight}}", r"52_8"],
    ['\uff081\uff0c2\uff09', r"(1,2)"], ['x\xb2+1', r"x^2+1"], ['\xbd', r"\frac12"], ['5\u200b', r"5"],
    [r"5 m/s", r"5"], [r"5\,\mathrm{cm^{2}}", r"5\,\mathrm{cm}^{2}"], [r"5\,\mu\text{m}", r"5"],
    [r"5 gallons", r"5\text{ gallons}"], [r"0.\overline{3}", r"\frac13"], [r"1.5\times10^-3", r"0.0015"],
    [r"(n+1)^{n-1}", r"(1+n)^{n-1}"], [r"2^{2024}-1", r"-1+2^{2024}"],
    [r"\frac{(2n)!}{n!(n+1)!}", r"\frac{1}{n+1}\binom{2n}{n}"], [r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}"],
    [r"2x+4y-3=0", r"y=-\frac12x+\frac34"], [r"y=-1/2x+3", r"y=-\frac12x+3"], [r"(0, 12.5)", r"0 < x < 12.5"],
    [r"m \geq \sqrt{2}", r"m \in [\sqrt{2}, +\infty)"], [r"x<3", r"(-\infty, 3)"], [r"\text{13}", r"13"],
    [r"2/3", r"\frac{2}{3}"], [r"28\%", r"28 percent", r"28"],
    [r"\left(-\infty,-\frac 12\right)\cup \left(-\frac 12,\infty\right)",
     r"(-\frac12,\infty)\cup(-\infty,-1/2)"],
    [r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"],
    [r"0.5+\frac{\pi}{8}", r"\pi \div 8 + 1 \div 2"], [r"\frac{0.5a}{b}/0.5", r"2\frac{a}{2b}"],
    [r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"],
    [r"(-\infty,-5]\cup[5,\infty)", r"[5,\infty)\cup\left(-\infty,-5\right]"], [r"29.00", r"\$29.00", r"29"],
    [r"033", r"33"], [r"016", r"16"], [r"a=1 \text{ or } a=-2", r"-2, 1"],
    [r"\vec{v}=(1,2)", r"(1,2)"], [r"\pi\approx3.14", r"\pi"], [r"a:b=2:3", "2:3"],
    [r"f(x)=ax+b, a,b\in\mathbb{R}", "ax+b"],
    [r"k\pi, k\in\mathbb{Z}", r"k\pi\text{, where }k\text{ is an integer}"],
    [r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.",
     r"\begin{aligned}x&=1\\y&=2\end{aligned}", "x=1,y=2"],
    [r"\text{The answer is }5", r"\text{Answer: 5}", "5"], [r"1/2\pi", r"\frac{\pi}{2}"],
    [r"5 \quad \text{cm}", "5"], [r"\sqrt{2} \text{ (approximately } 1.41)", r"\sqrt2"],
    [r"\text{The area is }25", r"\text{Area: }25", r"\text{Area of } ABC = 25", "25"], ["v=v_0+at", "v_0+at"],
    ["\u221a10", r"\sqrt{10}", r"\sqrt10"], [r"\boldsymbol{90^\circ}", "{x=90}", "90"],
    [r"A=\pi r^2=25\pi", r"25\pi"], ["y=2(x+1)=2x+2", "2x+2"], [r"\langle 1,2\rangle", "(1,2)"], ["5Hz", "5"],
    [r"p\land q", r"p\wedge q"], [r"\varnothing", r"\emptyset", r"\{\}", r"\{ \}"],
    ["5", "5\u5143", "5\\text{\u7c73}", "5 J/(kg K)"],
    [r"\text{Rs. }500", "USD 500", "US\\$500", "500"], [r"7\,\Omega", r"7\text{ m/s}^2", "7"],
    [r"\SI{30}{\meter}", r"\ang{30}", r"\num{30}", "30"], [r"42\quad\blacksquare", r"42 \checkmark", "42"],
    [r"5\text{ (since }5>0)", r"5 \text{ (rounded)}", r"\text{Total: }5", r"\mathbf{Answer:}\ 5", "5"],
    ["1'000'000", "1.000.000", "10,00,000", "1000000"], ["3{,}5", "3{.}5", "3.5"], ["0.(3)", r"\frac13"],
    ["\u0663\u0665", "35"], [r"{3 \over 4}", r"\nicefrac{3}{4}", r"\sfrac34", r"\frac34"],
    ["C_{10}^{3}", r"\binom{10}{3}", "120", "5!=120"], [r"\text{Seven}", "seven", "7"], [r"\text{zero}", "0"],
    [r"x=1 \text{ ou } x=2", "x = 1 oder x = 2", r"1\text{ y }2", "1\u62162", "1, 2"],
    ["]1,2[", "(1,2)"], [r"]-\infty;2]", r"(-\infty,2]", "x\\le 2"],
    [r"[1,\infty[ \cup ]-2,0[", r"(-2,0)\cup[1,\infty)"],
    [r"(0, \text{infinity})", "(0, inf)", "x>0"], [r"(-\infty,-1) \text{ or } (1,\infty)", r"x<-1 \lor x>1"],
    [r"\mathbb R", "\u211d", r"\text{all real numbers}", r"(-\infty,\infty)", r"x\in\mathbb{R}"],
    [r"\cos A=\frac35", r"\sum_{k=1}^n a_k=\frac35", r"\frac35"],
    ["x\u22611 (mod 4)", r"x\equiv 1\pmod 4", r"x\equiv1 \mod 4"], ["3\u22364", r"3\colon4", "3:4"],
    [r"\epsilon_0\phi", r"\varepsilon_0\varphi"], [r"\hat{\imath}", r"\hat{i}"],
    [r"\frac{\Delta y}{\Delta x}", r"\Delta y/\Delta x"], ["V_1:V_2=11:21", "S_{ABC}:S=11:21", "11:21"],
    [r"\Phi (x,  y)=\frac{x+1}{2y}", r"u(x,y)=\frac{x}{2y}+\frac{1}{2y}", r"n_{\gamma}(\nu)=\frac{x+1}{2y}"],
    [r"12^{\mathrm{th}}", r"12\text{th}", "12th", "12"], [r"\\frac{5}{9}", r"$\\dfrac59$", "5/9"],
    [r"2^\sqrt2", r"2^{\sqrt{2}}"], [r"x^\frac12", r"x^{\frac{1}{2}}"], ["\u03a2 x", "\u03a2x"],
    [r"\\begin{matrix}x\\\\2\\end{matrix}", r"\begin{matrix}x\\2\end{matrix}"],
    ["1,143,164,198,242,263,297,341", "143,1,164,198,242,263,297,341"],
    [r"2013(1-(\frac{2012}{2013})^{2013})", r"\frac{2013^{2013}-2012^{2013}}{2013^{2012}}"],
    [r"\begin{pmatrix}1&2\cr3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"],
    [r"\begin{cases}1,& x>0\\ 2,& x\le0\end{cases}", r"\begin{cases}1 & x>0\\ 2 & x\le0\end{cases}"]]
# Equal, but not found to be: a split. Each would need a rule of its own.
KNOWN_MISSES = [[r"\frac{a}{b}=2", "2"],
                [r"\frac12\begin{pmatrix}2\\x\end{pmatrix}", r"\begin{pmatrix}1\\x/2\end{pmatrix}"]]
DIFFERENT_REPORTS = [
    ["a>0, b<0", "a<0, b>0", r"a>0\text{ or }b<0"], [r"x\ge1, y\ge2", r"x\ge2, y\ge1"], ["E_0x", "E_1x"],
    ["m>2 or n<1", "n>2 or m<1"], [r"x\ne1, y\ne2", r"x\ne2, y\ne1"], ["3 to 4", r"4\text{ to }3", "34"],
    [r"1.2\text{ lakh rupees}", "1.2"], ["2 crores", "2"], [r"2\text{ and a half hours}", r"2\text{ hours}"],
    [r"p\land q", r"p\lor q"], [r"\vec{a}\cdot\vec{b}", r"\vec{a}\times\vec{b}"], ["y'=y", "y''=y"],
    [r"\nabla\cdot F", r"\nabla\times F"], ["f^{-1}(x)", r"\frac{1}{f(x)}"], ["2f'(x)=x", "2f'=1"],
    [r"\frac{\Delta y}{\Delta x}", r"\frac{y}{x}"], [r"\emptyset", r"\{\emptyset\}", r"\{\{\emptyset\}\}"],
    [r"\{\{1\}\}", r"\{1\}"], [r"\{1\},\{2\}", r"\{1,2\}", r"\{\{1,2\}\}"], ["AaBb", "AABB", "aabb"],
    [r"\text{all reals except }x=2", r"\text{not }x=2", "2"], [r"\text{odd }n>2", r"\text{even }n>2", "n>2"],
    ["\u221a13", "3", "\u221a15"], ["2\u221a15", "10"], [r"\sqrt13", "3"], ["y=x or y=-x", "y=x, y=1-x"],
    [r"\alpha+\beta=\frac{\pi}{2}", r"\alpha-\beta=\frac{\pi}{2}"], [r"\sigma^2=9", r"\sigma=9"],
    ["y'=y", "y''=y", "y"], [r"\dot{x}=-kx", "x=-kx"], ["a_{n+1}=2a_n", "a_{n+2}=2a_n", "2a_n"],
    ["f(x+1)=x^2", "f(x)=x^2"], ["f(xy)=f(x)f(y)", "f(x+y)=f(x)f(y)"], ["MR=SRMC", "P=SRMC"],
    ["AB=AC", "BC=AC"], ["x=2y=3z", "x=3y=3z", "x=3z"], ["AB=2BC=10", "AB=BC=10"], ["a>b", "a>c"],
    ["a>b>0", "a>c>0"], [r"\operatorname{Re} z>0", r"\operatorname{Im} z>0"], ["x=0 or y=0", "x=0 and y=0"],
    ["u(x,t)=u(x,0)+t", "u(x,t)=u(0,x)+t"], ["2^{2025}+n", "2^{2025}+m", "2^{2025}x+m", "2^{2025}x+n"],
    ["x=1/2 or y=3", "3", "x=1/2 and y=3", r"x=\sqrt2 or y=3"], [r"\sqrt{x}=3", r"\sqrt{y}=3", "3"],
    ["x/y=2", "2"], ["n=k+2^{2025}-m", "n=k-2^{2025}+m"], [r"1 \\ 200", "1200"], ["110,143", "143,110"],
    [r"x\ne1\text{ and }x\ne2", r"x\ne1\text{ or }x\ne2"], ["(1) 3 (2) 4", "(1) 6 (2) 2", "24"],
    ["3 dozen eggs", "3"], [r"5\text{ degrees warmer}", r"5\text{ degrees colder}"],
    [r"(k,k^2), k\in\mathbb{Z}", r"(k,k^2), k\in\mathbb{N}"], ["|z-i|=2", "|z+i|=2"], ["|z|^2=1", "z^2=1"],
    [r"[\frac{n}{2}]", r"\frac{n}{2}"], [r"\langle x^2\rangle-\langle x\rangle^2", "0"],
    ["PDP^{-1}", "P^{-1}DP", "D"], ["A^TA", "AA^T"], ["2020-01-02", "2017"], ["3I", "3i"],
    ["NH_4OCN", "NH_4CNO"], ["f^{(4)}(0)", "f^4(0)"], [r"\pm1\pm\sqrt2", r"\pm(1+\sqrt2)"],
    [r"\lfloor 2x\rfloor", r"2\lfloor x\rfloor"], ["E[X^2]-E[X]^2", "0"], [r"\hat x\hat p", r"\hat p\hat x"],
    ["abc", "ABC"], ["C_1^2x", "C_1^3x"], [r"\text{because of }x", r"\text{because of }y"],
    [r"x\equiv1\pmod4", r"x\equiv-1\pmod4"], ["5\u4e07", "5"], [r"\theta_{\max}", r"\theta_{\min}"],
    [r"S=\sum_{k=1}^{n}k", r"S=\prod_{k=1}^{n}k"], ["X'X", "XX'"],
    [r"f(x)=\begin{cases}1 & x=0\\ 2 & x=1\end{cases}", r"f(x)=\begin{cases}7 & x=0\\ 9 & x=1\end{cases}"],
    [r"a_n=1\text{ if }n=2", r"a_n=7\text{ if }n=2", r"2"],
    [r"3+4\mathrm{i}", r"7"], [r"(\vec a\cdot\vec b)\vec c", r"\vec a(\vec b\cdot\vec c)"],
    [r"3\text{ million}", r"3"], [r"25\text{ (base 6)}", r"25\text{ (base 7)}"],
    [r"3:05\text{ PM}", r"3:05\text{ AM}"], [r"5\mathrm{R}", r"5\mathrm{r}", r"5"], [r"2\quad 3", r"23"],
    [r"x>-3\text{ and }x<5", r"x>-3\text{ or }x<5"], [r"1331 and 1728", r"1728"],
    [r"3*x-1*y+13=0", r"3x+4y+14=0"], [r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"],
    [r"\frac{1}{2004!}", r"\frac{1}{2006!}"], [r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"],
    [r"\pm 2021", r"2021"], [r"12:00", r"1:00"], [r"19, 46, \text{ and } 82", r"21, 36, and 82"],
    [r"\frac{1}{23}", r"\frac{12}{3}"], [r"7 = 11a+c", r"11a+c"],
    ["1, 2, ...", "1, 2"], ["2=1", "1", "2"], [r"\lfloor x\rfloor", r"\lceil x\rceil", r"\lfloor x+1\rfloor"],
    [r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor\sqrt{n-2}\rfloor"]]


@pytest.mark.parametrize("spellings", [*SAME, *EQUAL_REPORTS], ids=str)
def test_spellings_of_one_answer_are_equal(spellings):
    assert classes(spellings) == [0] * len(spellings)


def test_known_misses_are_printed(capsys):
    with capsys.disabled():
        print("\nKnown misses:", *(row for row in KNOWN_MISSES if len({*classes(row)}) > 1), sep="\n  ")
    assert len(KNOWN_MISSES) <= 12


@pytest.mark.parametrize("spellings", [*DIFFERENT, *DIFFERENT_REPORTS], ids=str)
def test_different_answers_differ(spellings):
    assert len(set(classes(spellings))) == len(spellings)


def test_a_thought_that_the_prompt_opened_gives_no_answer_until_it_is_closed():
    assert extract_answer(r"I try \boxed{1} hmm", prompt="<assistant>\n<think>\n") is None
    assert extract_answer(r"I try \boxed{1}</think>\boxed{2}", prompt="<think>\n") == "2"
    assert extract_answer(r"\boxed{2}", prompt="<think>\n\n</think>\n\n") == "2"
    assert extract_answer(r"\boxed{2}", prompt="<|channel|>analysis<|message|>") is None
    assert extract_answer(r"\boxed{2}", prompt="Begin with <think>.\nUser: 1+1?") == "2"


@pytest.mark.parametrize("box, letter", [
    ("E - a polygenic score", "E"), (r"\boldsymbol{A}", "A"), (r"\mathsf{A}", "A"), (r"\rm A", "A"),
    (r"\left(A\right)", "A"), ("A~", "A"), ("(A) or (B)", None), ("A, B", None), ("A and C", None),
    ("Option B", "B"), (r"\text{(D)}", "D"), ("D. c", "D"), ("[C]", "C"), ("\uff08\uff23\uff09", "C"),
    (r"B\quad 12", "B"), (r"\text{B }12", "B"), ("B (12)", "B"), ("B\u300112", "B"), ("B;", "B"),
    (r"\{B\}", "B"), ("\u2018B\u2019", "B"), (r"B \text{ is correct}", "B"), ("Answer = B", "B"),
    ("\u9009\u9879B", "B"), ("\u7b54\u6848\uff1aB", "B"), (r"\text{Antwort B}", "B"),
    (r"\Large C", "C"), (r"\text{B -- x}", "B"), (r"\text{H}_2\text{O}", None),
    ("A cat", None), ("K", None), ("A'", None), ("A:B = 2:3", None), ("C(5,2)", None)])
def test_spellings_of_a_choice(box, letter):
    assert extract_answer(rf"\boxed{{{box}}}", choices=10) == letter


# ------------------------------------------------------ real gold answers -----------------------------------
# The test must mean something without the data files too.
INLINE = [
    r"\left( 3, \frac{\pi}{2} \right)", "p - q", r"\frac{14}{3}", r"\text{Evelyn}", r"90^\circ", "6 - 5i",
    r"3\sqrt{13}", "52_8", "1,-2", "x=5", r"x^5 - x^4 + x^3 - x^2 + x - 1", r"\cot x", r"1 \pm \sqrt{19}",
    r"(3,4]", r"10,\!080", r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", r"\frac{270}7\text{ degrees}",
    ".0000672", r"5x - 7y + 11z + 4 = 0", r"\$32,\!348", r"864 \mbox{ inches}^2", r"1\frac{4}{5}", "025",
    r"x \in [-2,7]", r"(0,9) \cup (9,36)", r"\{1\pm\sqrt{5},-2\}", r"I(0)e^{-\frac{t}{RC}}", "$69$,$84$",
    r"\hbar \omega(v+1 / 2)-\frac{E_{0}^{2} e^{2}}{2 m \omega^{2}}", r"$k\left(4 k^{2}+k-1\right) / 2$",
]
# Pairs of spellings that are one answer (reviewed by hand): what is merged beyond spaces and braces.
EQUAL_GOLDS = table(r"""
x=5 | 5 | 120 | 120^\circ | 30 | 30^\circ | 90 | 90^\circ | 36^\circ | 36 | 10080 | 10,080 | -2,1 | 1,-2
10^-3 | 1\times10^-3 | 4.4\times10^7 | 4.4e7 | -1/3 | -\frac13 | \arcsin\frac1013 | \arcsin\frac11.3
\arcsin(1.3\sin\theta_w) | \arcsin(1.3\sin(\theta_w)) | 1+\sqrt3i | 1+i\sqrt3 | +2 | 2
4.4677\times10^14Hz | 4.4677\times10^14 | 3.61e-10 | 3.61\times10^-10 | 1950^\circC | 1950
3.3e-10 | 3.3\times10^-10 | 1 | k=1 | f(x)=1 | k=1 | k=3 | 3 | N=n | f(n)=n | 8\% | 8 | 4^\circ | 4
2,4,3 | 2,3,4 | 45^\circ | 45 | \frac13 | 1/3 | 44 | 44^\circ
15\mboxcm^2 | 15 | \36 | 36 | \ln2+\fraci\pi3 | \ln2+i\frac\pi3 | 15000 | 15000\textkcalm^-2\textyr^-1
y=cx^-2-\frac\cos(2x)2x^2 | cx^-2-\frac\cos(2x)2x^2 | x=\frace^t3+ce^-2t | \frace^t3+ce^-2t
\frac1mt | \fractm | \fracc\sqrt2 | \frac1\sqrt2c | 6.43\times10^16\textcm^-3 | 6.43\times10^16
\fracv_0r_0\frac1(1+\fracrr_0)^3/2 | \fracv_0r_0\frac1(1+r/r_0)^3/2 |
\frac2-\omega^2-\frac\omega4i\omega^4-\frac6316\omega^2+4 |
\frac2-\omega^2-\frac\omegai4\omega^4-\frac6316\omega^2+4
""")
EQUAL_GOLDS = {pair for row in EQUAL_GOLDS for pair in zip(row[::2], row[1::2])}
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
    """What a model might write for this gold answer."""
    gold = gold.strip("$")
    yield from (f"${gold}$", f"{gold}.", gold.replace("\\frac", "\\dfrac"), "\\displaystyle " + gold)
    yield gold.replace("(", "\\left(").replace(")", "\\right)")
    yield re.sub(r"(?<!\d),", " , ", gold.replace("+", " + ").replace("=", " = ").replace("{", "{ "))
    if not re.search(r"[,=<\[]|\\(in|ge|le)", gold):
        yield f"f(x)={gold}"
    if not re.fullmatch(r"-?\d+(/\d+)?", key(gold)) or re.search(r"[\^e]|text|box", gold):
        return
    value = Fraction(key(gold))
    yield from (gold + "\\,\\mathrm{cm}^2", gold + "^\\circ", f"{value.numerator}/{value.denominator}")
    if value.denominator == 1 and abs(value) < 10**18:
        yield f"{value.numerator:,}".replace(",", ",\\!")
        yield f"{value.numerator}.0"


BENCHMARKS = ["inline", "math500", "aime24", "aime25", "amc", "minerva", "olympiad_bench"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_right_answer_is_graded_right(name):
    """Gold answers as the file has them, and as a model might write them, in a box after a page of text."""
    wrong = []
    for raw in golds_of(name):
        golds = gold_answers(raw)
        texts = [] if isinstance(raw, list) else [str(raw)]
        for text in [*texts, *itertools.chain(*map(rewritings, golds))]:
            answer = extract_answer(PAGE + f"Hence \\[ \\boxed{{{text}}} \\].")
            if not any(equal(answer, gold) for gold in golds):
                wrong.append((golds, text))
    assert wrong == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_different_gold_answers_differ(name):
    """All pairs of a benchmark at once: what is merged differs in spaces and braces, or was reviewed."""
    golds = list(dict.fromkeys(gold for raw in golds_of(name) for gold in gold_answers(raw)[:1]))
    strip = functools.partial(re.sub, r"[\s${}]|\\left|\\right|\\[,!]", "")
    pairs = {tuple(map(strip, pair)) for pair in merged(golds).items()} - EQUAL_GOLDS
    assert [pair for pair in pairs if len({*pair}) > 1] == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_gold_answer_with_another_digit_differs(name):
    """Also in formulas, intervals, matrices and units' numbers."""
    golds = [gold for raw in golds_of(name) for gold in gold_answers(raw) if re.search(r"\d", gold)]
    changed = [re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), gold, count=1) for gold in golds]
    assert [gold for gold, other in zip(golds, changed) if equal(gold, other)] == []


# ------------------------------------------------------ hostile ---------------------------------------------
SENTINEL = Path(tempfile.gettempdir()) / "answers_test_sentinel"
HOSTILE = [
    # what is large to compute
    "9^{9^{9^9}}", "((9^{99})^{99})^{99}", "9^{-999999999}", "x^{x^{x^{x}}}", r"(-1)^{\sqrt{2}}",
    "(x+1)^{999}(x-1)^{999}", "(x+y+z+a+b+c+d)^{99}", "100000000!", "9!!!", r"\binom{100000000}{50000000}",
    r"\sum_{k=1}^{10^9} \frac{1}{k}", r"\int_0^1 x^{x^{x}} dx", r"\zeta(10^9)",
    r"\sin(9^{9^9})", r"\ln(100000!)", r"\lfloor 9^{9^9}\cdot\pi \rfloor", r"\sqrt[9^{9^9}]{2}",
    # long and deep
    "9" * 5000 + "/" + "7" * 5000, "(" * 3000 + "1" + ")" * 3000, r"\frac{1}{" * 60 + "1" + "}" * 60,
    "1+" * 150 + "1", "x^" * 60 + "x", "-" * 390, "," * 390, "\\" * 399, "{" * 399, r"\text{" * 80,
    # code
    f"__import__('os').system('touch {SENTINEL}')", f"\\text{{}}__import__('os').system('touch {SENTINEL}')",
    f"open('{SENTINEL}','w')", f"$(touch {SENTINEL})", f"\\write18{{touch {SENTINEL}}}",
    "().__class__.__bases__[0].__subclasses__()", "1\n2\n3", "[null, true]",
    # numbers that are none, too large or too strange
    "nan", "inf", "1e999999999", "0^{-1}", "\\frac{0}{0}", "\\log 0", "\u0661\u0662\u0663", "\ud800",
    r"\infty-\infty", "0.{3}", "9.9e999/3",
]
PIECES = r"1 x \pi \frac { } ( ) [ ] + - = ^ _ , . \sqrt \text{ cm % \circ $ \, \left < \{ \\ and !".split()


def test_a_hostile_answer_runs_nothing_and_ends():
    SENTINEL.unlink(missing_ok=True)
    numbers = classes(HOSTILE)
    key.cache_clear()
    assert classes(HOSTILE) == numbers
    for answer in HOSTILE:
        extract_answer(f"\\boxed{{{answer}}}")  # no crash, no endless search
    assert not SENTINEL.exists()


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=30))
def test_scribble_does_no_harm(text):
    assert classes([text, None, text, "7"])[:3] == [0, None, 0]
    extract_answer("\\boxed{" + text)
    extract_answer("\\boxed{" + text + "}", choices=4)
