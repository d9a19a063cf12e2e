r"""Reading answers out of responses, and deciding which answers are equal. All label-free methods rest on it.

Every answer is turned into one key string, and two answers are equal if their keys are. So equality is
symmetric and transitive by construction, and does not depend on the order of the answers or on which others
are present. The keys of formulas come from engine/formulas.py.
(math-verify's `verify(gold, answer)` has none of these properties; only its LaTeX parser is used.)

Numbers are equal if they are exactly equal: 0.5 is \frac12, but 0.333333 is not \frac13, as a tolerance would
not be transitive. Percent signs, degrees and units are dropped: 9\% is 9. "x = 5" is 5. Lists are unordered,
tuples are not.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from engine.formulas import formula_key


# ----------------------------------------------- extraction -----------------------------------------------
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|(?<=\s)([-+]?\d[\d.,/]*))")  # \boxed{...} or \boxed 5
_MARKUP = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{|[{}$*]|\\[(),;! ]")
LETTERS = "ABCDEFGHIJ"


def extract_answer(text: str, choices: int = 0) -> str | None:
    r"""The content of the last \boxed{} (or \fbox{}) after the reasoning.

    None if there is no box, or if the last one is left open: there is no fallback such as "the last number",
    as a truncated response must not vote.
    Of a multiple choice with so many options, the letter that the box holds, or None.

    >>> extract_answer(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer(r"\boxed{1} and \boxed{\frac{1}{2") is None
    True
    """
    text = text.rpartition("</think>")[2]
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    answer = _until_closed(text[last.end():]) if last[1] else last[2].rstrip(".,")
    if choices:  # "A. 42" and "(A) 42" are choices, "A cat" is not: an article must not vote
        choice = rf"\(?\s*([{LETTERS[:choices]}])\s*(?:[.:)].*)?"
        match = re.fullmatch(choice, _MARKUP.sub(" ", answer).strip(), re.DOTALL)
        answer = match and match[1]
    return answer or None


def _until_closed(text: str) -> str:
    """The text up to the brace that closes an open one before it; empty if nothing closes it."""
    depths = _depths(re.sub(r"\\.", "..", text, flags=re.DOTALL), "{", "}")  # \{ and \} are no braces
    return text[:depths.index(-1)].strip() if -1 in depths else ""


# -------------------- normal form: one spelling for what LaTeX can write in many ways --------------------
_LONGEST = 400  # characters; longer answers are compared as strings
_UNITS = (
    r"(?:square|sq|cubic|cu|per)?\s*(?:[cmk]?m|meters?|metres?|in|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|"
    r"kmh|degrees?|percent|cents?|dollars?|hours?|hrs?|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|"
    r"years?|[km]?g|grams?|lbs?|pounds?|liters?|litres?|units?|Hz|K|points?|people|ways)"
)
_NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\{[^{}]*\})?(?:\([a-z]\))?"  # x, \theta, m_{max}, f(x)
_UNICODE = str.maketrans({
    "\u2212": "-",  # minus sign
    "\u2013": "-",  # en dash
    "\u03c0": r"\pi ",
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u00b0": r"^\circ ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u222a": r"\cup ",
    "\u2208": r"\in ",
})


# Applied in this order, again and again until nothing changes.
_REWRITES = [
    (r",\\!\s*(?=\d{3})|(?<=\d)\{,\}(?=\d{3})|(?<=\d)\\,(?=\d{3}(?!\d))", ""),  # 10,\!080 10{,}080 10\,080
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|q?quad)(?![a-zA-Z])|(?<!\\)\\[,;:!> ]|~", " "),
    (r"(?<!\\)\\[()\[\]]|\\?\$|\\?%", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(l|g)(?:eq|eqslant)(?![a-zA-Z])", r"\\\1e "),
    (r"\\(?:times|ast)(?![a-zA-Z])|\*", r"\\cdot "),
    (r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{", r"\\text{"),
    # "1, 2 and 3" is a list
    (r"\s*,?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*", ", "),
    # a unit: 5 \text{ cm}^2
    (r"(?<=[\d}i)])(?:[ /]*\\text\{(?! ?(?:if|for|when|where|is|mod|base)\b)[^{}a-zA-Z]*[a-zA-Z][^{}]*\}"
     r"(?: ?\^ ?\{?-?\d\}?)?)+ ?$", ""),
    # a unit: 5 cm
    (rf"(?<=[\d}}])\s*(?:{_UNITS})\s*(?:\^\s*\{{?\d\}}?)?$", ""),
    # 1,000 but not 1,2,3
    (r"^\s*([-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?)\s*$", lambda match: match[1].replace(",", "")),
    (r"^\s*(-?\d+)\s+(\d+)\s*/\s*(\d+)\s*$", r"\1\\frac{\2}{\3}"),  # 1 4/5
    (r"\\text\{([^{}]*)\}", r" \1 "),
    # only the space of "\cot x" means anything
    (r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", "\\1\0"),
    (r"\s+", ""),
    ("\0", " "),
    (r"[,;]", ", "),  # so that the list 100, 200 is not the number 100,200 the next time
    # \frac12 and \sqrt2 and x^2
    (r"\\frac ?([0-9a-zA-Z]|\\[a-zA-Z]+) ?", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\}) ?([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\1{\2}"),
    (r"(\\sqrt|[\^_]) ?([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\1{\2}"),
    (r"(?<![\d.])\.(?=\d)", "0."),  # .5
    (r"(^|[(\[{,=] ?)\+(?=[\d\\])", r"\1"),
    (r"[.,;: ]+$|^[, ]+", ""),
    (r"^[a-zA-Z]{3,}$", lambda match: match[0].lower()),
]


@lru_cache(maxsize=100_000)
def normal_form(answer: str) -> str:
    r"""One spelling of an answer, found by rewriting the string alone. Applied twice it changes nothing more.

    >>> answers = (r"$\dfrac12$", "1,000", r"3\text{ cm}", r"x = \left( 1,2 \right)")
    >>> [normal_form(answer) for answer in answers]
    ['\\frac{1}{2}', '1000', '3', '(1, 2)']
    """
    for _ in range(8):  # until nothing changes, which takes two or three rounds
        before = answer
        answer = " ".join(answer.translate(_UNICODE).split())
        if len(answer.replace(" ", "")) > _LONGEST:  # regular expressions on hostile text take long
            break
        if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", answer):  # \sin 30^\circ is not \sin 30
            answer = re.sub(r"\^\s*\{?\s*\\circ\s*\}?(?:\s*[CF]\b)?|\\degrees?\b", "", answer)
        for pattern, replacement in _REWRITES:
            answer = re.sub(pattern, replacement, answer)
        answer = _without_names(answer)
        if answer == before:
            return answer
    return "".join(answer.split())


def _without_names(answer: str) -> str:
    r"""'5' of 'x=5', '36' of 'V=4\cdot9=36', '1, 2' of 'x=1, x=2'; 'x=1, y=2' keeps the names it needs."""
    named = [re.fullmatch(rf"({_NAME}) ?(?:=|\\in(?![a-zA-Z]) ?)(.+)", part) for part in _split(answer)]
    names = {match and match[1] for match in named}
    if len(names) > 1 or None in names or re.search(r"<|>|\\[lg]e(?![a-zA-Z])", answer):
        return answer
    return ", ".join(match[2].rpartition("=")[2] for match in named)


def _depths(text: str, opening: str = "([{", closing: str = ")]}") -> list[int]:
    """How deep in brackets it is after each character. Any kind closes any other: 0 < x <= 1 is (0, 1]."""
    return list(accumulate((character in opening) - (character in closing) for character in text))


def _split(text: str, separator: str = ",") -> list[str]:
    """Split at the separators that stand outside all brackets."""
    parts = []
    last = 0
    for i, depth in enumerate(_depths(text)):
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[last:i].strip())
            last = i + len(separator)
    return [*parts, text[last:].strip()]


def normal_gold(value, exact: bool = False) -> str | None:
    r"""The gold answer of a data file, of any type, as text: 142 -> '142', ['$2$', '3'] -> '2, 3'.

    None, NaN and empty text are no answer. Of a solution what it ends with counts: its last \boxed{}, or what
    follows #### (GSM8K). A list may spell one answer in several ways (Minerva does); the first spelling of
    each is kept. exact: as it is written, no normal form of it.
    """
    if isinstance(value, dict):  # DAPO's reward_model column
        value = value.get("ground_truth")
    spellings = {}
    for v in value if isinstance(value, list) else [value]:
        if isinstance(v, str):
            v = extract_answer(v) if "\\boxed" in v else v.rpartition("####")[2].strip()
        if v not in (None, "") and v == v:
            text = str(v) if exact else normal_form(str(v))
            spellings.setdefault(text if exact else _key(text), text)
    return ", ".join(spellings.values()) or None


# ---------------------------------- keys: equal answers have equal keys -----------------------------------
def equivalence_classes(answers: list[str | None], same_answer: Callable | None = None) -> list[int | None]:
    r"""[N] answers -> [N] classes, numbered in order of first appearance; None (no answer) stays None.

    same_answer: n answers -> n keys, equal for equal answers (text, numbers), instead of this file's. Raises
    TypeError or ValueError if it does not return one key per answer.

    >>> equivalence_classes(["0.5", None, r"\frac{1}{2}", "2", r"\sqrt{4}", "2, 3", "3, 2", "(2, 3)"])
    [0, None, 0, 1, 1, 2, 2, 3]
    """
    given = [answer for answer in answers if answer is not None]
    keys = same_answer(given) if given and same_answer else [_key(normal_form(answer)) for answer in given]
    key_of, number = dict(zip(given, keys, strict=True)), {}
    return [None if a is None else number.setdefault(key_of[a], len(number)) for a in answers]


def answers_equal(a: str | None, b: str | None, same_answer: Callable | None = None) -> bool:
    """Whether both are answers, and of one class. None (no answer) equals nothing, not even None."""
    return None not in (a, b) and equivalence_classes([a, b], same_answer) == [0, 0]


@lru_cache(maxsize=100_000)
def _key(s: str, depth: int = 0) -> str:
    """Takes lists, tuples, intervals, sets, unions and matrices apart down to numbers, formulas and words."""
    if depth > 4 or len(s) > _LONGEST:
        return "text " + s
    if s.startswith(r"\{") and s.endswith(r"\}") and _enclosed(s[1:]):
        return _key(s[2:-2].strip(), depth + 1)
    plus = s.replace(r"\pm", "+").replace(r"\mp", "-")
    minus = s.replace(r"\pm", "-").replace(r"\mp", "+")
    # 1\pm\sqrt{2} is a list of two
    elements = {*_split(plus), *_split(minus)} if r"\pm" in s else _split(plus)
    if len(elements) > 1:
        return "{" + "; ".join(sorted(_key(element, depth + 1) for element in elements)) + "}"
    union = _split(s, r"\cup")
    if len(union) > 1:
        return "U".join(sorted(_key(part, depth + 1) for part in union))
    if s[:1] in ("(", "[", "{") and _enclosed(s):
        inside = [_key(part, depth + 1) for part in _split(s[1:-1])]
        if len(inside) > 1:
            return s[0] + "; ".join(inside) + s[-1]
        if s[0] != "[":
            return inside[0]
    matrix = re.fullmatch(r"\\begin\{([pb]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", s)
    if matrix:
        rows = []
        for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2].removesuffix("\\\\")):
            rows.append("; ".join(_key(cell, depth + 1) for cell in row.split("&")))
        return "matrix(" + " \\ ".join(rows) + ")"
    if interval := _interval(s):
        return _key(interval, depth + 1)
    if (number := _number(s)) is not None:
        return str(number)
    return formula_key(s) or ("word " if re.fullmatch("[a-zA-Z]+", s) else "text ") + s


def compared_as_text(answer: str) -> bool:
    """Whether an answer, or a part of it, could not be parsed, so that only the same text equals it."""
    return "text " in _key(normal_form(answer))


def _enclosed(s: str) -> bool:
    """Whether the first bracket is closed by the last character, not before."""
    depths = _depths(s)
    return depths[-1] == 0 and 0 not in depths[:-1]


def _interval(s: str) -> str | None:
    r"""x\ge2 is [2, \infty), 0<x\le1 is (0, 1]. Other inequalities are compared as they are written."""
    parts = re.split(r" ?(<|>|\\[lg]e(?![a-zA-Z])) ?", s)
    if ">" in parts or r"\ge" in parts:  # read from right to left
        mirrored = {">": "<", r"\ge": r"\le", "<": ">", r"\le": r"\ge"}
        parts = [mirrored.get(part, part) for part in reversed(parts)]
    if len(parts) == 3:
        parts = [r"-\infty", "<", *parts] if re.fullmatch(_NAME, parts[0]) else [*parts, "<", r"\infty"]
    if len(parts) != 5 or not re.fullmatch(_NAME, parts[2]) or not {parts[1], parts[3]} <= {"<", r"\le"}:
        return None
    start = "(" if parts[1] == "<" else "["
    end = ")" if parts[3] == "<" else "]"
    return f"{start}{parts[0]}, {parts[4]}{end}"


_DECIMAL = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
_FRACTION = rf"([-+]?)(\d*)(?:\\frac\{{({_DECIMAL})\}}\{{({_DECIMAL})\}}|(?<!\d)(\d+)/(\d+))"


def _number(s: str) -> Fraction | None:
    r"""The value of -12, 0.5, 4.5e33, 3/4, \frac{3}{4}, 1\frac{3}{4}; None of others."""
    if len(s) > 60:
        return None
    if re.fullmatch(_DECIMAL, s, re.ASCII):
        return Fraction(s)
    fraction = re.fullmatch(_FRACTION, s, re.ASCII)
    if not fraction:
        return None
    sign, whole, above, below, above_slash, below_slash = fraction.groups()
    numerator = Fraction(above or above_slash)
    denominator = Fraction(below or below_slash)
    if not denominator or whole and not (above + below).isdigit():  # a mixed number has whole parts
        return None
    value = int(whole or 0) + numerator / denominator
    return -value if sign == "-" else value
