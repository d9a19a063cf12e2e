"""Reading answers out of text, and which are equal: tables, real gold answers, properties, hostile input."""

import functools
import itertools
import json
import math
import re
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import classes, equal, extract_answer, gold_answers, key
from answers.latex import REWRITES

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared/data"
PAGE = "Let us set $x = \\frac{1}{2}$ and try \\boxed{17} first. {Unbalanced. " * 60


# ------------------------------------------------------ extraction ------------------------------------------
@pytest.mark.parametrize("text, expected", [
    (r"The answer is $\boxed{42}$.", "42"),
    (r"\boxed{\frac{\sqrt{a^{2}}}{b}} done", r"\frac{\sqrt{a^{2}}}{b}"),
    (r"\fbox{7}", "7"),
    (r"so \boxed 42.", "42"),
    (r"\boxed\frac{1}{2}", r"\frac{1}{2}"),
    (r"\boxed\frac12", r"\frac12"),
    (r"\boxed\frac{\sqrt3}2", r"\frac{\sqrt3}2"),
    (r"\boxed\frac{\sqrt{\frac{1}{2}}}2", None),  # too deep: not \frac
    (r"$x=-\boxed{5}$", "-5"),
    (r"\boxed{\boxed{6}}:", "6"),
    (r"\boxed{1}:\boxed{2}", None),  # one value of two boxes
    (r"\frac{\boxed1}{\boxed2}", None),
    # a box in a formula
    (r"\sqrt{\boxed7}", None), (r"x-\boxed5", None), (r"2\boxed{5}", None), (r"10^{\boxed{2}}", None),
    (r"x = 2 + \boxed{5}", None), (r"x = - \boxed{5}", None), (r"\frac{3}{\boxed{2}}", None),
    (r"\boxed{52}_8", None), (r"\boxed{5}^2", None), (r"\boxed{x^2}+C", None), (r"\sqrt{\boxed{5}-3}", None),
    (r"\text{is }\boxed{5}^\circ", "5"), (r"Part 2: \boxed{5} - or so", "5"), (r"Answer:\boxed{5}", "5"),
    (r"\textcolor{red}{\boxed{5}}", "5"), (r"- \boxed{5}", "5"), (r"_\boxed{5}_", "5"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\left\{ x \right.} end}", r"\left\{ x \right."),  # an escaped brace is no brace
    (r"\boxed{}", None),
    (r"\boxed{\phantom{12}}", None),
    (r"\boxed{1}, and more: \boxed{\frac{1", None),  # truncated: the first box is not the answer
    # a box that is only mentioned, or denied
    (r"\boxed{4}. I used \boxed as asked.", "4"),
    (r"\boxed{7}. The final answer is in \boxed{}", "7"),
    (r"\boxed{7}, as in \boxed{\text{your answer}}", "7"),
    (r"$\boxed{91}$, not $\boxed{90}$", "91"),
    # boxes of one list
    (r"\(\boxed{3}\), \(\boxed{5}\), \(\boxed{7}\)", "3, 5, 7"),
    (r"$x=\boxed{2}, y=\boxed{3}$", "x=2, y=3"),
    (r"(\boxed{1}, \boxed{2})", "(1, 2)"),
    ("$\\boxed{6}$ \u548c $\\boxed{8}$", "6, 8"),
    (r"$\boxed{5}$ cm and $\boxed{12}$ cm", "5, 12"),
    (r"\boxed{3} pears and \boxed{4} apples", "3, 4"),
    ("**Part a:** $\\boxed{5}$\n\n**Part b:** $x=\\boxed{7}$", "5, x=7"),
    (r"(i) \boxed{5} (ii) \boxed{7}", "5, 7"),
    (r"$\boxed{5} \text{ for part (a) and } \boxed{7}$", "5, 7"),
    (r"(a) \boxed{5}. The larger part of it is \boxed{7}", "7"),
    (r"$\boxed{\frac12}$ or $\boxed{0.5}$", "0.5"),  # one answer, said twice
    (r"First \boxed{3}. After a long check of every case above, the answer is \boxed{4}", "4"),
    # a next turn that the model invented
    ("$\\boxed{5}$.\n\nQuestion: What is $2+2$?\nThe answer is $\\boxed{4}$", "5"),
    ("\\boxed{5}\n\n**Problem 2:** \\boxed{6}", "5"),
    ("\\boxed{5}\n[user]\nWhat is 3?\n[assistant]\n\\boxed{6}", "5"),
    ("\\boxed{5}<|im_start|>user\nWhat is 3?\n\\boxed{6}", "5"),
    ("\\boxed{5}\n\nProblem #2: \\boxed{6}", "5"),
    ("\\boxed{5}\n\n### Instruction: \\boxed{6}", "5"),
    ("\\boxed{5}<|endoftext|>Human: \\boxed{6}", "5"),
    ("\\boxed{5}\n[INST] \\boxed{6}", "5"),
    ("whether it converges or not.\n\n\\boxed{A}", "A"),
    ("\\boxed{4} is the question: no.\nThe user asked for more: \\boxed{5}", "5"),
    # thoughts
    (r"<think>I try \boxed{1} hmm", None),
    (r"<think>a</think> \boxed{3} <think>again \boxed{4}", None),
    (r"<reasoning>\boxed{1}</reasoning> \boxed{2}", "2"),
    (r"<|begin_of_thought|>\boxed{1}", None),
    ("<|channel>thought\n" r"\boxed{3}", None),
    ("<|channel>thought\n" r"\boxed{3}<channel|>\boxed{4}", "4"),
    (r"<|channel|>analysis<|message|>\boxed{3}<|channel|>final<|message|>\boxed{4}", "4"),
    (r"<unused94>thought \boxed{3}<unused95>\boxed{4}", "4")])
def test_the_answer_of_a_response(text, expected):
    assert extract_answer(text) == expected
    if expected is not None and "think" not in text:
        assert extract_answer(PAGE + text) == expected


@pytest.mark.parametrize("end_of_prompt", [
    "<think>a</think> b <think>" + "Let us see. " * 99, r"<think>\boxed{7}", "<|channel|>analysis<|message|>",
    "Let me <thi"])
def test_a_thought_that_the_prompt_opened_gives_no_answer_until_it_is_closed(end_of_prompt):
    tag = "nk>" * end_of_prompt.endswith("<thi")
    close = "<|channel|>final<|message|>" if "channel" in end_of_prompt else "</think>"
    assert extract_answer(tag + r"I try \boxed{1}, no, wait", 0, end_of_prompt) is None
    assert extract_answer(tag + rf"I try \boxed{{1}}{close}\boxed{{2}}", 0, end_of_prompt) == "2"
    assert extract_answer(tag + rf"I try \boxed{{1}}{close} no box", 0, end_of_prompt) is None


@pytest.mark.parametrize("end_of_prompt", [
    "<think>\n\n</think>\n\n", r"Not \boxed{7}, but", r"<think>\boxed{7}</think>"])
def test_a_prompt_without_an_open_thought_changes_no_answer(end_of_prompt):
    assert extract_answer(r" is \boxed{2}", 0, end_of_prompt) == "2"
    assert extract_answer(" no box", 0, end_of_prompt) is None


def test_a_question_before_the_first_box_ends_no_response():
    assert extract_answer("The user asks.\n\nQuestion: 2+3?\n\nProblem: we add. \\boxed{5}") == "5"
    assert extract_answer("Put it in \\boxed{}.\n\nProblem: 2+3\n\n\\boxed{5}") == "5"
    assert extract_answer("Put it in \\boxed{}.\n\nProblem: 2+3\n\n\\boxed{5}\n\nProblem: \\boxed{6}") == "6"


# ------------------------------------------------------ equality --------------------------------------------
def table(text):
    """Lines of spellings, parted by " | "; one that ends with " |" goes on in the next. \\u00b0 is a sign."""
    text = re.sub(r"\\u([0-9a-f]{4})", lambda sign: chr(int(sign[1], 16)), text)
    return [line.split(" | ") for line in text.strip().replace(" |\n", " | ").splitlines()]


# Each line is one answer. Most spellings are from public bug reports of graders.
SAME = table(r"""
0.5 | .5 | 0.50 | \frac12 | \dfrac{1}{2}
1000 | 1 000 | 1,000 | 1{,}000 | 1,\!000 | 1\,000 | 10^3 | \text{Answer: }1,000 | {\bf 1,000}
3\text{ million} | 3 million | 3000000
5 | x=5 | 5. | \text{5} | (5) | 5=x
12 | =12 | 3\times4=12 | x\approx12
90 | m\angle ABC=90^\circ | 90\u00b0 | 90\text{ degrees} | 90\%
120 | \frac{10!}{3!7!} | \dbinom{10}{3}
2 | \sqrt{4} | \log_2 4 | \frac{\sqrt{8}}{\sqrt{2}} | (2)(1) | 2(1)
1\frac{3}{4} | \frac{7}{4} | 1 3/4 | \sfrac74
-\frac{1}{2} | \frac{1}{-2} | \u22120.5 | -1/2
0.25 | E[X]=0.25 | P(X=1)=\frac14 | P(A|B)=.25=\frac14 | \mathbb{E}[X]=.25 |
\Pr(A)=\frac14 | \text{Area}=\frac14\text{ cm}^2
\text{no solution} | No solutions | there is no solution
\frac13 | 0.\overline{3} | 0.333\ldots | 0.3333... | P(A)=\frac13
3{,}5 | 3{.}5 | 3\u00bd
2\sqrt5 | \sqrt{20} | 2*\sqrt{5} | \frac{10}{\sqrt5} | 2\sqrt{5}\text{ units}
\sqrt{2} | \sqrt{2} (approximately 1.41)
\cos 30^\circ | \cos(30^\circ) | \frac{\sqrt3}{2}
0.\overline{123456} | \frac{41152}{333333}
9^{999} | 9^{998}\cdot9 | 3^{1998}
1.2\overline{6} | \frac{19}{15} | 1.2666\ldots | x=1.2\bar{6}
2\pi | 2\u03c0 | 2\pi\text{ cm} | A=\pi r^2=2\pi
1/2\pi | \frac{\pi}{2} | \pi \div 4 + 1/4\pi
52_8 | (52)_8 | 52_{\text{eight}}
9:30\text{ am} | 9:30 A.M. | 9:30am
3:05 PM | 3:05\text{ p.m.} | 3:05 pm
11:21 | 11\u223621 | 11\colon21 | V_1:V_2=11:21
\text{Evelyn} | evelyn | **Evelyn** | \operatorname*{Evelyn}
YES | yes | \u201cYes\u201d
1, 2, 3 | 3, 2, 1 | \{1,2,3\} | x=1, x=2, x=3 | 1, 2, \text{ and } 3
1, 2 | x=1 \text{ ou } x=2 | x = 1 oder x = 2 | 1\u62162
1,143,164,198,242,263,297,341 | 143,1,164,198,242,263,297,341
1, 2, ... | 1, 2, \ldots | 1, 2, \dots
(1,2) | x=1, y=2 | y=2, x=1 | \langle1,2\rangle | x=1 \quad y=2 |
\left( 1, 2 \right) | (1.0, \frac{4}{2}) | (1;2) | (x,y)=(1,2) | \vec{v}=(1,2)
(1,2),(3,4) | (x,y)\in\{(1,2),(3,4)\} | (x,y)=(1,2)\text{ or }(x,y)=(3,4)
\emptyset | \varnothing | \{ \}
[2,\infty) | x\ge 2 | 2\le x | \left[2, +\infty\right) | x\in[2,\infty) | 2 \leq x<\infty
(-\infty,2]
(-1,3] | x\in\left(-1,3\right] | 3\ge x>-1 | -1\lt x\le 3
(0,9)\cup(9,36) | (9,36) \cup (0,9) | x\in(0,9)\text{ or }x\in(9,36)
x \ne 3 | \mathbb{R}\setminus\{3\} | (-inf,3)\cup(3,\infty)
\mathbb R | \u211d | \text{all real numbers} | (-\infty,\infty)
1\pm\sqrt2 | 1-\sqrt2,1+\sqrt2 | x=1\pm\sqrt2
\begin{pmatrix} 1/2 \\ 2 \end{pmatrix} | \begin{bmatrix} 0.5 \\[3pt] \sqrt{4} \end{bmatrix} |
\left[\begin{matrix}1/2\\2\end{matrix}\right] | \\begin{matrix}1/2\\\\2\\end{matrix}
\begin{cases}1,& x>0\\ 2,& x\le0\end{cases} | \begin{cases}1 & \text{if }x>0\\ 2 & x\le0\end{cases}
x=2,y=1 | y=1, x=2 | \left\{\begin{array}{l}x=2\\y=1\end{array}\right. |
\begin{aligned}x&=2\\y&=1\end{aligned}
x^2+1 | x\u00b2+1
y=2x+3 | 3+2x | f(x)=2x+3 | y=2(x+1)+1=2x+3
4x-2y+6=0 | y-3=2x | 2x+3-y=0
\frac{1}{\sqrt{x^2+1}} | (1+x^2)^{-1/2} | \frac{2\sqrt{1+x^2}}{2x^2+2} | \frac{2}{\sqrt{4x^2+4}}
|a-b| | |b-a| | \frac12|2b-2a|
e\u02e3 | e^x
x\u1d62 | x_i
\frac{\ln 3}{\ln 2} | \ln 3/\ln 2
v=v_0+at | v\u2080+at
2x+c, c\in\mathbb{R} | 2x+c \text{ for any real } c | f(x)=2x+c, b,c\in\mathbb{R}
k\pi, k\in\mathbb{Z} | k\pi, k \in Z | k\pi\text{, where }k\text{ is an integer}
\left\lfloor \frac{n+1}{2} \right\rfloor | \u230a(n+1)/2\u230b
\sin^2 x+\cos^2 x | 1
\sin x | \text{sin}(x)
\tau\ln\frac1\Delta | -\tau\ln\Delta
mgh | m g h | m\cdot g\cdot h | gmh | W=mgh
\frac12MR^2 | \frac12 M R^2 | \frac{MR^2}{2}
\sqrt{2h/g} | \sqrt{\frac{2h}{g}} | t=\sqrt{2h/g}
2e-1 | 2e - 1 | -1+2e
1234 | \textbf{1,234} | \textcolor{red}{1,234} | {1,234}
7 | 2.5(2)+2 | {7\text{ cm}}
k_BT | k_{B}T | k_{\mathrm{B}}T
\sqrt{2eV/m} | \sqrt{\frac{2eV}{m}}
10-20 | {10-20} | \boxed{10-20}
-2 | \sqrt[3]{-8} | (-8)^{1/3} | -\sqrt[3]{8}
-\sqrt[3]{x-1} | \sqrt[3]{1-x}
\frac{\log 8}{\log 4} | 1.5 | \log_4 8
0.00001 | 1e-5 | 1.0e-5 | 10^{-5}
m\frac{dv}{dt}+bv=f | m\frac{dv}{dt}=f-bv
\hat{\imath} | \hat{i}
19 | nineteen
0.75 | \frac34\text{ cup} | 0.75\text{ or }\frac34 | 0.75\text{ miles per hour}
\text{A} | Option A | \text{Choice A}
(2,5) | x\in(2,5) | 2<x<5 | (x,y)=(2,5)
(-\infty,2)\cup(5,\infty) | x<2 or x>5 | x<2 \lor x>5
3:4 | 3 to 4
91 cm | 91\text{ m} | 91 meters | 91
x\u22611 (mod 4) | x\equiv 1\pmod 4 | x\equiv1\ (\mathrm{mod}\ 4)
2.65 | \text{about }2.65 | x = roughly 2.65 | \sim2.65
3\text{ hours }20\text{ minutes}
5\text{ boys and }3\text{ girls}
\text{Alice and Bob} | Bob, Alice
\text{hyperbola} | A hyperbola | \text{a hyperbola.}
\frac{-1\pm\sqrt{17}}{2} | \frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2} | x=-.5\pm.5\sqrt{17}
(7,\pm2) | (7,2), (7,-2)
36 | \textbf{(D)}\ 36 | \text{D) }36 | (D) 36
293 | m+n=256+37=293 | AB+BC+CA=293
12000, 3500 | 12,000, 3,500 | 12,000\text{ and }3,500 | \$12,000\text{ and }\$3,500
(12000,3500) | (12,000, 3,500)
1200, 300 | 1,200, 300 | 1,200\text{ and }300
12345.67 | 12,345.67 | x=12,345.67
(-1,200) | (-1, 200)
mg(h_1-h_2) | mgh_1-mgh_2
(\ln2)^2 | \ln(2)^2 | \ln^2 2
\arcsin x | \sin^{-1}x
""")
# In each line no answer equals another.
DIFFERENT = table(r"""
x\ge1\frac12 | x\ge.5 | 3\cdot2\frac12 | 3 | \sqrt2\frac12 | \sqrt{2.5} | \frac12\frac34 | 12\frac34
1 1/2 3 | 1 1/23 | 1\frac12 1/2 | 2 1/b | 2 | 2\frac12! | 2\frac12^x | 2.5^x | 2.5! | 2 \u00b2/3
2^{-99} | 2^{-98} | 0 | \sqrt2\cdot10^{-30} | \sqrt{2}+10^{-30}
|x-3|(x-3) | -|x-3|^2 | 2|x-3|+2x-3 | |x-3|+x
0.333333 | \frac13 | 0.333 | 3.14 | \pi | \frac{22}{7}
e^{\pi\sqrt{163}} | 262537412640768744 | e^{\pi\sqrt{163}}+10^{-12}
9^{9^{9^9}} | 9^{9^{9^8}} | 7
12 | 1,2 | 1.2 | 21 | -12 | \frac{1}{23}
1 \\ 200 | 1200 | 110,143 | 143,110 | (1) 3 (2) 4 | (1) 6 (2) 2
\pm1\pm\sqrt2 | \pm(1+\sqrt2) | \frac{3\pm\sqrt{5}}{7} | \frac{5\pm\sqrt{3}}{7}
52_8 | 52 | 42 | 52\text{ (base 6)} | 52\text{ (base 7)}
3\text{ million} | 3 | 3\text{ lakh rupees} | 5 (to the left) | 5 (to the right) |
3\text{ and a half hours} | 3\u4e07 | 3\text{ dozen}
12:00 | 1:00 | 3:05\text{ PM} | 3:05\text{ AM} | 3 to 4 | 4\text{ to }3
3 in 5 | 5 in 3 | 3 by 5 | 3\text{ R }5 | 5\text{ R }3 | 15 | at least 3 | less than 3 | not 3 | twice 3 | 3
(1,2) | (2,1) | [1,2] | [1,2) | 1,2
\{1\},\{2\} | \{1,2\} | \{\{1,2\}\} | \{1\} | \emptyset
x>2 | x\ge2 | x<2 | 2 | \text{odd }x>2
x>-3\text{ and }x<5 | x>-3\text{ or }x<5 | x\ne1\text{ and }x\ne2 | x\ne1\text{ or }x\ne2
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix} |
\begin{pmatrix} 1 & 2 \end{pmatrix}
f(x)=\begin{cases}1 & x=0\\ 2 & x=1\end{cases} | f(x)=\begin{cases}7 & x=0\\ 9 & x=1\end{cases}
7 = 11a+c | 11a+c | 2=1 | 1 | 2 | x/y=2
x=1/2 or y=3 | 3 | x=1/2 and y=3 | x=0 or y=0 | x=0 and y=0
x_1=1, x_2=3 | x_1=3, x_2=1 | 1, 3
AB=AC | BC=AC | AB=2BC=10 | AB=BC=10 | P=SRMC
f(x+1)=x^2 | f(x)=x^2 | f(xy)=f(x)f(y) | u(x,t)=u(x,0)+t | u(x,t)=u(0,x)+t
y'=y | y''=y | y | \dot{x}=-kx | x=-kx
\int y^{(3)}\,dx | \int y^{3}\,dx | \lim f^{(n)}(x) | \lim f^n(x) | \sum_k a_{(k)} | \sum_k a_k
\lfloor\frac{n}{2}\rfloor | \lceil\frac{n}{2}\rceil | \frac{n}{2} | [\frac{n}{2}]
|xy| | xy | |x|y | x|y| | -xy | |z-i|=2
\vec{a}\cdot\vec{b} | \vec{a}\times\vec{b} | (\vec a\cdot\vec b)\vec c | \vec a(\vec b\cdot\vec c)
5 | 5\u7684\u500d\u6570 | 5\u7684\u56e0\u6570 | \u7532\u4e59 | \u4e59\u7532 | 5\u4ee5\u4e0a
5\text{ cents} | 5\text{ cents off} | 7!5 | 75 | x^{10}C_3 | \text{twenty-one}
0.333\ldots | 0.334\ldots | 0.3 | 0.75\text{ or }\frac12 | x=0.3\text{ or }y=0.3
(-\infty,1),(3,\infty) | x<1\text{ and }x>3 | (-\infty,1)\text{ or }(3,\infty)
x\equiv3\pmod7 | x\equiv10\pmod7 | 3\pmod7
p\land q | p\lor q | p\implies q | q\implies p
5 | 5\text{ or about }9 | 5\text{ or about }6 | 2 is about 15 | 2 is about 30
2\text{ hours }15\text{ minutes} | 15\text{ hours }2\text{ minutes} | 30
5\text{ boys and }3\text{ girls} | 3\text{ boys and }5\text{ girls} | 8
5\text{ boys}:3\text{ girls} | 5\text{ girls}:3\text{ boys}
20\%\text{ and }30\text{ kg} | 30\%\text{ and }20\text{ kg} | \$20\text{ and }30\text{ kg}
\text{Alice is }5, \text{Bob is }7 | \text{Carl is }5, \text{Bob is }7
ABC | CAB | \text{BAC} | y=2x+3 | y=3x+2
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{vmatrix}1&2\\3&4\end{vmatrix}
\ln(2)^2 | \ln 4 | \sin(x)^2 | \sin(x^2) | \sin^{-1}x | \frac{1}{\sin x}
g(x+1)-g(x+2) | g(x+3)-g(x+4) | g(f(x)) | f(g(x))
x+y=5 | x+2y=5 | 5 | 2a+3b=5 | 3a+2b=5
\text{Profit: }12 | \text{Loss: }12 | 12 | \text{Profit is }12
\cos A=\frac13 | \sin A=\frac13 | \frac13 | \sum_k a_k=\frac13 | \ln A=\frac13
\lim_{x\to0}f=2 | \lim_{x\to1}f=2 | 2 | \det A=2 | |x|=2
a=c | b=c | c | x\in A | y\in A | A
\sqrt{2h/g} | \sqrt{2g/h} | \sqrt{2s/g} | \sqrt2 | \sqrt{2eV/m} | \sqrt{2m/eV}
\frac13mL^2 | \frac13mL | \frac13 | \frac12MR^2 | \frac12M^2R^2 | RI^2 | R^2I^2
2st+1 | 3 | 3st | 5x+3st | 5x+3
mgh | Mgh | mgl | Mgl
1,234 | 1, 234 | 2.5(4) | 2.5\overline4 | 0.5(12) | 0.5\overline{12}
2e-1 | 0.2 | 3e+1 | 30 | e^2+2e-1 | e^2+0.2 | 1e-12 | 1e-13 | 10^{999} | 1e9999
30^\circ | \frac{\pi}{6} | \frac{\pi}{6}=31^\circ | \sin(30^\circ) | \sin(30) | 25\%=\frac13 | \frac13
10-20 | 30-40 | -10 | 5\u201310 | -5 | 5\sim10 | 510 | 100~200 | 100200 | 1/2/2020 | 2/4/2020
(iv) | (vi) | ix | xi | (ii) | -1
\{2x\mid x>1\} | \{x\mid x>1\} | \{2k\mid k\in[0,2]\} | [0,2] | \{(x,x^2)\mid x>0\} | x>0
X_{(n)} | X_n | X_{(1)} | X_1 | k_BT | k_{BT} | a_nb | a_{nb}
10 percent rise | 10 percent fall | 10 percent | 5\text{ minutes fast} | 5\text{ minutes slow}
\lfloor n/2\rfloor | \lfloor m/2\rfloor | \log 2 | \ln 2 | \log 3 | \ln 3
\sqrt[3]{-8} | 1+i\sqrt3 | 2 | (-8)^{2/3} | \sqrt[3]{1-x} | \sqrt[3]{x-1}
(1,200), (3,400) | 1200, 3400 | (-1,200) | -1200 | (x+1,200) | x+1200 | 1,2,000 | 1, 2, 0 |
1,200 each | 1, 200 each |
0,125 | 125 | 0{,}125 | 0,025 | 0,25
(100,200,300) | 100,200,300 | 5,25,125 | 525125 | 4,16,256 | 416256
HTHTHT | HHHTTT | \text{HHTTTH} | A-B-C-D | A-C-B-D | A/B/C/D | A/C/B/D | A B C D | D C B A
i-ii-iii | i-iii-ii
x=1, y=2\text{ or }x=2, y=1 | x=1, y=1\text{ or }x=2, y=2 | 1, 2; 3, 4 | 1, 3; 2, 4 | 1 and 2, or 3 and 4 |
1 and 3, or 2 and 4
x=\pm1, y=\pm2 | x=\pm1, y=\mp2 | x=1\Rightarrow y=3, x=2\Rightarrow y=5 |
x=1\Rightarrow y=4, x=2\Rightarrow y=5 | n=3, k=2 | (2,3)
x=1, y=2 | a=1, b=2 | p=1, q=2 | 1, 2 | 1, x, c\in\mathbb{R} | 1 | x^2, x, c\in\mathbb{R} | x^2 | x^2, x
x+k, k\in\mathbb{R} | x+k, k\in\mathbb{Z} | x+k, k\in\mathbb{N} | x+k, k\in\{0, 1\} |
x+k\text{ where }k\text{ is odd}
\frac{d}{dx}x | x\frac{d}{dx} | \frac{dy}{dx} | \frac{dx}{dy} | \frac{dy}{dt} | \frac yx | 1
\lfloor a\rfloor | \lceil a\rceil | \lfloor n/100\rfloor | \lfloor n/101\rfloor | 0 |
\lfloor x+.1\rfloor | \lfloor x\rfloor
(y-1)^3=x | y-1=x | |x|+|y|=1 | |x|+y=1 | y''-y=0 | y'' | y'=2y | y'/2
dy/dx | dx/dy | xy | 50\%\cdot\frac12 | 25 | \sqrt{25\%} | 5 | 2^{50\%} | 2^{50} | 5^{th} | (2)\frac12 | 2.5
\frac{dv}{dt}=3v | \frac{dv}{dt}=3t | 3v | 3t | 4 1/2/3 | 4.5/3
x^Tx | xx^T | (12)(34) | 408 | 2ABC_{16} | 2BAC_{16} | 5\text{ for }x | 5\text{ for }y
\sqrt{10^{60}+1} | 10^{30} | \tanh 100 | 1 | \ln(1+10^{-70}) | 0 | (2^{2024}+3^{2024})^{1/2024} | 3
\text{for any real }c | \text{for any real }d
\text{A or B} | \text{A and B} | I or II | I and II | Alice or Bob | Alice and Bob | a=b or c=d | a=b and c=d
2^3 100 | 2^{3100} | x_1 100 | x_{1100} | 0 125 | 125
1\>2 | 12
3:05 | 3:5 | 12:00 | 12:0
1,3,5,\dots | 3,1,5,\dots | 2,4,8,\ldots,256 | 2,8,4,\ldots,256
(i^2x)^3 | x^3 | (\sqrt{x}\sqrt{y})^3 | x_{\ud800}
A. 2, B. 3 | C. 2, B. 3 | 2, 3 | A. 2, B. 4
4\frac32 | 4\frac12+1 | \frac92 | 4 3/2
(-1)^l | -1 | (-1)^C | 1 | (-1)^\theta x | -x | x | (-\frac12)^l | -2^{-l}
\sinh50 | \cosh50 | \sinh100 | \frac{e^{100}}{2}
\frac{d^2y}{dx^2} | \frac{dy}{x^2} | \frac{d^2}{dx^2}y
1A_{16} | A_{16} | 0xFF | 0 | 0x1F
(1) -5, (2) -7 | (1) -6, (2) -6
C_{10}^3C_{10}^2 | C_{10}^5 | C_n^3C_n^2 | C_n^5
x=1, 2, y=3 | x=1, y=3, 2
\sqrt{(x-3)^2} | x-3 | 3-x | |x-3|+|x-5| | 2|x-4| | |a+x| | |a|+|x| | \sqrt{1-\sin^2x} | \cos x | x+|x-3| | 3
\ln((x-3)^2) | 2\ln(3-x) | \arcsin(\sin x) | x | ((x-3)^2)^{n/2} | (3-x)^n | |x-3|=2 | 3-x=2 | |z-i| | |z+i|
|x-3|^2 | |x-5|^2+4x-16 | \sqrt{x^2} | \sqrt{x^2y^2} | xy
\overline A B | \overline{AB} | \bar xy | \overline{xy}
\cos\pi/3 | -1/3 | \frac12 | \cos(\pi)/3+1 | \sin\frac\pi6 x | \frac12x | \sin(\frac\pi6 x)
\sin\omega(t-s) | (t-s)\sin\omega | \ln\sqrt2x | x\ln\sqrt2
e\u02e3 | ex | x\u1d62 | xi | f"(x) | f(x) | 6" | 6
5\text{ pm} | 5 | 9:30 to 10:15 | 9:30:10:15
\mathbf u\times\mathbf v | \mathbf v\times\mathbf u | 2\mathbf u\times3\mathbf v | 3\mathbf v\times2\mathbf u
P(-2)=4 | P(-1)=2 | P(\frac12)=2 | P(\frac14)=1 | g(-2)=4 | g(-1)=2
""")


def merged(spellings):
    """{spelling: the earlier one that it equals}."""
    numbers = classes(spellings)
    return {spellings[i]: spellings[numbers.index(c)] for i, c in enumerate(numbers) if numbers.index(c) != i}


def test_groups_of_the_table_stay_apart():
    """No spelling of one line equals a spelling of another: every pair is a chance to be too generous."""
    assert merged([group[0] for group in SAME]) == {}


def test_classes_are_numbered_by_first_appearance_and_none_is_none():
    spellings = ["7", None, "3", "7.0", r"\frac{6}{2}", "x=7", None]
    assert classes(spellings) == [0, None, 1, 0, 1, 0, None]
    assert not equal(None, None) and not equal("1", None)


@pytest.mark.parametrize("value, expected", [
    (None, []),
    ("$1003$", ["$1003$"]),
    (["2", "3"], ["2", "3"]),  # either is right
    (True, ["True"]),
    ("['70']", ["70"]), ("['70', '71']", ["70", "71"]),
    (r"\fbox{5}", ["5"]), (r"so \boxed{5}", ["5"]), ("work #### 5", ["5"]),
    ("N/A", []), (float("nan"), []),
    (dict(ground_truth="4"), ["4"]),
])
def test_a_gold_answer_is_read(value, expected):
    assert gold_answers(value) == expected


@pytest.mark.parametrize("spellings", SAME, ids=str)
def test_spellings_of_one_answer_are_equal(spellings):
    assert classes(spellings) == [0] * len(spellings)


@pytest.mark.parametrize("spellings", DIFFERENT, ids=str)
def test_different_answers_differ(spellings):
    assert len(set(classes(spellings))) == len(spellings)


@pytest.mark.parametrize("name, example", [rule[:2] for rule in REWRITES], ids=str)
def test_each_rewriting_has_an_example_that_no_earlier_one_changes(name, example):
    changed = [rule[0] for rule in REWRITES if rule[2].sub(rule[3], example) != example]
    assert changed[0] == name


CHOICES = table(r"""
A | A~ | \boldsymbol{A} | \mathsf{A} | \rm A | \left(A\right)
B | B) 3 | B; | B (12) | B\quad 12 | B\u300112 | \text{B }12 | \text{B -- x} | \{B\} | \u2018B\u2019 |
Option B | Answer = B | B \text{ is correct} | \text{Antwort B} | \u9009\u9879B | \u7b54\u6848\uff1aB
C | [C] | \uff08\uff23\uff09 | \Large C | C: the mitochondrion | \textbf{(C)}\ 42
D | D. c | \text{(D)}
E | E - a polygenic score
none | A cat | a | K | A' | CO_2 | \text{H}_2\text{O} | A:B = 2:3 | C(5,2) | (A) or (B) | A, B | A and C
""")


@pytest.mark.parametrize("row", CHOICES, ids=str)
def test_spellings_of_a_choice(row):
    found = [extract_answer(rf"\boxed{{{box}}}", choices=10) for box in row]
    assert found == [None if row[0] == "none" else row[0]] * len(row)


def test_a_choice_is_in_a_box_and_one_of_those_that_there_are():
    assert extract_answer("(C)", choices=4) is None
    assert extract_answer(r"\boxed{C} This is a good answer", choices=4) == "C"
    assert [extract_answer(r"\boxed{J. 7}", choices=n) for n in (4, 10)] == [None, "J"]  # GPQA, MMLU-Pro


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
# Signs that mean nothing, or only what the answer is called: gold answers that differ in these may be equal
SILENT = r"^\$?(?:f\()?[a-zA-Z]\)? ?=|^\+|[\s${}]|\\(?=\$)|\\left|\\right|,?\\[,!]|\\%|\^\{?\\circ ?\}?C?"
# What else is merged, reviewed by hand
EQUAL_GOLDS = table(r"""
-2,1 | 1,-2
2,4,3 | 2,3,4
\frac13 | 1/3
-1/3 | -\frac13
10^-3 | 1\times10^-3
4.4\times10^7 | 4.4e7
3.61e-10 | 3.61\times10^-10
3.3e-10 | 3.3\times10^-10
1+\sqrt3i | 1+i\sqrt3
\arcsin\frac1013 | \arcsin\frac11.3
\arcsin(1.3\sin\theta_w) | \arcsin(1.3\sin(\theta_w))
15\mboxcm^2 | 15
4.4677\times10^14Hz | 4.4677\times10^14
6.43\times10^16\textcm^-3 | 6.43\times10^16
15000\textkcalm^-2\textyr^-1 | 15000
\ln2+\fraci\pi3 | \ln2+i\frac\pi3
\frac1mt | \fractm
\fracc\sqrt2 | \frac1\sqrt2c
\fracv_0r_0\frac1(1+\fracrr_0)^3/2 | \fracv_0r_0\frac1(1+r/r_0)^3/2
\frac2-\omega^2-\frac\omega4i\omega^4-\frac6316\omega^2+4 |
\frac2-\omega^2-\frac\omegai4\omega^4-\frac6316\omega^2+4
""")
EQUAL_GOLDS = {frozenset(row) for row in EQUAL_GOLDS}
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
    if not re.search(r"[,=<\[]|\\(in|ge|le)|^\\?(text\{.*|[a-zA-Z]+)$", gold):  # f(x) = m is no m
        yield f"f(x)={gold}"
    if not re.fullmatch(r"-?\d+(/\d+)?", key(gold)) or re.search(r"[\^e]|text|box", gold):
        return
    value = Fraction(key(gold))
    number = re.sub(r"\\?[$%]", "", gold)  # a price has no other unit
    yield from (number + "\\,\\mathrm{cm}^2", number + "^\\circ", f"{value.numerator}/{value.denominator}")
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
    silent = functools.partial(re.sub, SILENT, "")
    pairs = {frozenset(map(silent, pair)) for pair in merged(golds).items()} - EQUAL_GOLDS
    assert [pair for pair in pairs if len(pair) > 1] == []


# ------------------------------------------------------ hostile ---------------------------------------------
SENTINEL = Path(tempfile.gettempdir()) / "answers_test_sentinel"
HOSTILE = [
    # what is large to compute
    "9^{9^{9^9}}", r"(-1)^{\sqrt{2}}",
    "(x+1)^{999}(x-1)^{999}", "(x+y+z+a+b+c+d)^{99}", "100000000!", r"\binom{100000000}{50000000}",
    r"\sum_{k=1}^{10^9} \frac{1}{k}", r"\int_0^1 x^{x^{x}} dx", r"\zeta(10^9)",
    r"\sin(9^{9^9})", r"\lfloor 9^{9^9}\cdot\pi \rfloor", r"\sqrt[9^{9^9}]{2}",
    # long and deep
    "9" * 5000 + "/" + "7" * 5000, "(" * 3000 + "1" + ")" * 3000, r"\frac{1}{" * 60 + "1" + "}" * 60,
    "1+" * 150 + "1", "x^" * 60 + "x", "-" * 390, "," * 390, "\\" * 399, "{" * 399, r"\text{" * 80,
    # code
    f"__import__('os').system('touch {SENTINEL}')",
    f"open('{SENTINEL}','w')", "1\n2\n3", "[null, true]",
    # numbers that are none, too large or too strange
    "nan", "inf", "1e999999999", "0^{-1}", "\\frac{0}{0}", "\\log 0", "\u0661\u0662\u0663", "\ud800",
    r"\infty-\infty", "0.{3}", "9.9e999/3",
]
PIECES = r"1 x \pi \frac { } ( ) [ ] + - = ^ _ , . \sqrt \text{ cm % \left < \{ \\ and ! / \frac12".split()


def test_a_hostile_answer_runs_nothing_and_ends():
    SENTINEL.unlink(missing_ok=True)
    numbers = classes(HOSTILE)
    key.cache_clear()
    assert classes(HOSTILE) == numbers
    for answer in HOSTILE:
        extract_answer(f"\\boxed{{{answer}}}")  # no crash, no endless search
    assert not SENTINEL.exists()


SPACES = " |1 |\t1|\u00a0|\u3000|\u200b|~|\\ |\\,|\\quad|\\quad |\\!".split("|")
REPEATED = [*SPACES, *"\ufdfa\u00a8\u00bd\u2460\u4e00"] + [piece.replace("-", " ") for piece in r"""
    1 x, {} { ( [ \{ | $ \$ % ^ _{ \frac \frac{1} \sqrt \text{ \text{a} \boxed{ \boxed{1}, + \pm = \approx
    about for-any or, 1,000 1,000,- 0.( \overline{ \mathbb{R} \cup \Rightarrow & \\ \begin{cases} base-2 mod-
    a-is- Answer:- A.- (A)- A-or- <think> kg-m- \circ ! e5 ... \ldots ** \sin- \ln( f( ab-
    """.split()]


@pytest.mark.parametrize("piece", REPEATED)
def test_an_answer_is_read_in_a_tenth_of_a_second(piece):
    """Whatever is repeated in it, up to 20,000 characters, in processor time."""
    for length, form in itertools.product((395, 20_000), ("{}", "1{}2")):
        text = form.format((piece * length)[:length])
        for read in (key.__wrapped__, extract_answer, lambda text: extract_answer(f"\\boxed{{{text}}}", 4)):
            spent = []
            while not spent or min(spent) > 0.1 and len(spent) < 3:  # another process may have disturbed it
                key.cache_clear()
                start = time.process_time()
                read(text)
                spent.append(time.process_time() - start)
            assert min(spent) < 0.1, (length, form)


PRIMES = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101]


@pytest.mark.parametrize("text", [
    "x(" + "+".join(f"{p}^-{int(59_900 / math.log2(p))}" for p in PRIMES) + ")",
    "+".join(f"{p}^-{int(59_900 / math.log2(p))}" for p in PRIMES),
    "*".join(f"{n}!" for n in range(3000, 3060)), "1" + "".join(f"/{n}!" for n in range(3940, 3999)),
    r"\lfloor x\rfloor+3^-37792+5^-25797", r"\lfloor x\rfloor+" + r"x^{1/3}+" * 46 + "1"])
def test_what_would_be_large_is_refused_before_it_is_computed(text):
    """As a sum, a product or a power; no key is over 4 kB."""
    start = time.process_time()
    assert len(key.__wrapped__(text)) <= 4000
    assert time.process_time() - start < 0.2


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join) | st.text(max_size=30))
def test_scribble_does_no_harm(text):
    assert classes([text, None, text, "7"])[:3] == [0, None, 0]
    extract_answer("\\boxed{" + text)
    extract_answer("\\boxed{" + text + "}", choices=4)


# ------------------------------------------------------ tokens ----------------------------------------------
def test_thinking_tags_that_are_special_tokens_are_seen():
    """Also where the prompt ends with one, and the token that ends a response is not in its text."""
    from transformers import AutoTokenizer

    import common
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy")
    tokenizer.add_special_tokens(dict(additional_special_tokens=["<think>", "</think>"]))
    run = SimpleNamespace(tokenizer=tokenizer, args=SimpleNamespace(prompt="plain"))
    for prompt, text, finished, answer in [
            ("Q", r"<think> try \boxed{3} </think> so no box", True, None),
            ("Q", r"<think> try \boxed{3} </think> \boxed{4}", True, "4"),
            ("Q<think>", r"try \boxed{3}, hmm", False, None),
            ("Q", r"\boxed{3}", True, "3")]:
        ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * finished
        response = common.Rollout(tokenizer.encode(prompt, add_special_tokens=False), ids, None, finished)
        common.decode(run, [response], common.Problem("Q"))
        assert (response.answer, response.text) == (answer, text)


@pytest.mark.parametrize("invalid, ends", [(1, False), (3, True)])
def test_single_tokens_without_a_log_prob_are_counted_and_many_end_the_run(invalid, ends):
    import torch
    from transformers import AutoTokenizer

    import common
    from engine.base import Request, UserError
    logp = torch.full([200], -0.5)
    logp[:invalid] = torch.nan
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy")
    sampler = SimpleNamespace(generate=lambda *given, **options: [[([5] * 200, logp, True)]])
    run = SimpleNamespace(args=common.Args(model="M"), tokenizer=tokenizer, sampler=sampler,
                          dtype=torch.float32, log=SimpleNamespace(first_diff=0))
    work = [(common.Problem("Q"), Request([1], 1, 0, 200))]
    if ends:
        with pytest.raises(UserError, match=f"but {invalid} of 200 sampled tokens have the probability NaN"):
            common.generate(run, work, 1.0)
        return
    [[response]] = common.generate(run, work, 1.0)
    response.old_logp = torch.full([200], -0.5)
    assert common.check_sampler(run, [response]) == dict(logp_diff_max=0, logp_diff_mean=0, logp_nan=invalid)
