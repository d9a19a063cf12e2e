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
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from engine.formulas import formula_key


# ------------------------------------------------------------------------------------------------------------
# Extraction
# ------------------------------------------------------------------------------------------------------------
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|(?<=\s)([-+]?\d[\d.,/]*))")  # \boxed{...} or \boxed 5
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \\. skips the escaped \{ and \}
_MARKUP = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{|[{}$*]|\\[(),;! ]")
# "A. 42" and "(A) 42" are choices, "A cat" is not: an article must not vote
_CHOICE = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*[.:)]|([A-J])$)(?:.*)", re.DOTALL)


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
    if choices:
        answer = _choice(answer, choices)
    return answer or None


def _until_closed(text: str) -> str:
    """The text up to the brace that closes an open one before it; empty if nothing closes it."""
    depth = 1
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return text[:brace.start()].strip()
    return ""


def _choice(answer: str, choices: int) -> str | None:
    match = _CHOICE.fullmatch(_MARKUP.sub(" ", answer).strip())
    letter = match and (match[1] or match[2] or match[3])
    return letter if letter and letter in "ABCDEFGHIJ"[:choices] else None


# ------------------------------------------------------------------------------------------------------------
# Normal form: one spelling for what LaTeX can write in many ways
# ------------------------------------------------------------------------------------------------------------
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
    # .5 and 007
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"(?<![\d.])0+(?=\d)", ""),
    # 142.0 and 0.50
    (r"(?<=\d)\.0+(?![\d.])", ""),
    (r"(?<=\d)(\.\d*?[1-9])0+(?![\d.])", r"\1"),
    (r"^\(([A-Z])\)$", r"\1"),
    (r"(^|[(\[{,=] ?)\+(?=[\d\\])", r"\1"),
    (r"[.,;: ]+$|^[, ]+", ""),
    (r"^[a-zA-Z]{3,}$", lambda match: match[0].lower()),
]
_REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in _REWRITES]


@lru_cache(maxsize=100_000)
def normal_form(answer: str) -> str:
    r"""One spelling of an answer, found by rewriting the string alone. Applied twice it changes nothing more.

    >>> answers = (r"$\dfrac12$", "1,000", "142.0", r"3\text{ cm}", r"x = \left( 1,2 \right)", "(C)")
    >>> [normal_form(answer) for answer in answers]
    ['\\frac{1}{2}', '1000', '142', '3', '(1, 2)', 'C']
    """
    for _ in range(8):  # until nothing changes, which takes two or three rounds
        before = answer
        answer = " ".join(answer.translate(_UNICODE).split())
        if len(answer.replace(" ", "")) > _LONGEST:  # regular expressions on hostile text take long
            break
        if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", answer):  # \sin 30^\circ is not \sin 30
            answer = re.sub(r"\^\s*\{?\s*\\circ\s*\}?(?:\s*[CF]\b)?|\\degrees?\b", "", answer)
        for pattern, replacement in _REWRITES:
            answer = pattern.sub(replacement, answer)
        answer = _without_names(answer)
        if answer == before:
            return answer
    return "".join(answer.split())


def _without_names(answer: str) -> str:
    r"""'5' of 'x=5', '36' of 'V=4\cdot9=36', '1, 2' of 'x=1, x=2'; 'x=1, y=2' keeps the names it needs."""
    named = [re.fullmatch(rf"({_NAME}) ?(?:=|\\in(?![a-zA-Z]) ?)(.+)", part) for part in _split(answer)]
    if not all(named) or re.search(r"<|>|\\[lg]e(?![a-zA-Z])", answer):
        return answer
    if len({match[1] for match in named}) != 1:
        return answer
    return ", ".join(match[2].rpartition("=")[2] for match in named)


def _depth_change(character: str) -> int:
    """How a character changes the depth of brackets. Any kind closes any other: 0 < x <= 1 is (0, 1]."""
    if character in "([{":
        return 1
    return -1 if character in ")]}" else 0


def _split(text: str, separator: str = ",") -> list[str]:
    """Split at the separators that stand outside all brackets."""
    parts = []
    depth = 0
    last = 0
    for i, character in enumerate(text):
        depth += _depth_change(character)
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[last:i].strip())
            last = i + len(separator)
    return [*parts, text[last:].strip()]


def normal_gold(value) -> str | None:
    r"""The gold answer of a data file, of any type: 142.0 -> '142', ['$2$', '3'] -> '2, 3', None -> None.

    A list may spell one answer in several ways (Minerva does); the first spelling of each is kept.
    """
    if isinstance(value, (list, tuple)):
        different = {_key_of(str(v)): normal_gold(v) for v in reversed(value)}
        return ", ".join(reversed(different.values())) or None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value is None else normal_form(str(value))


# ------------------------------------------------------------------------------------------------------------
# Keys: equal answers have equal keys
# ------------------------------------------------------------------------------------------------------------
def equivalence_classes(answers: list[str | None]) -> list[int | None]:
    r"""[N] answers -> [N] classes, numbered in order of first appearance; None (no answer) stays None.

    >>> equivalence_classes(["0.5", None, r"\frac{1}{2}", "2", r"\sqrt{4}", "2, 3", "3, 2", "(2, 3)"])
    [0, None, 0, 1, 1, 2, 2, 3]
    """
    number: dict[str, int] = {}
    return [None if a is None else number.setdefault(_key_of(a), len(number)) for a in answers]


def answers_equal(a: str | None, b: str | None) -> bool:
    """Whether both are answers, and of one class. None (no answer) equals nothing, not even None."""
    return a is not None and b is not None and equivalence_classes([a, b]) == [0, 0]


@lru_cache(maxsize=100_000)
def _key_of(answer: str) -> str:
    return _key(normal_form(answer))


def _key(s: str, depth: int = 0) -> str:
    """Takes lists, tuples, intervals, sets, unions and matrices apart down to numbers, formulas and words."""
    if depth > 4 or len(s) > _LONGEST:
        return s
    if s.startswith(r"\{") and s.endswith(r"\}") and _enclosed(s[1:]):
        return _key(s[2:-2].strip(), depth + 1)
    elements = []
    for part in _split(s):
        elements += _both_signs(part)
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
        rows = re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2].removesuffix("\\\\"))
        return "matrix(" + " \\ ".join(_row_key(row, depth + 1) for row in rows) + ")"
    interval = _interval(s)
    if interval:
        return _key(interval, depth + 1)
    number = _number(s)
    if number is not None:
        return str(number)
    return formula_key(s) or s


def _both_signs(s: str) -> list[str]:
    r"""1\pm\sqrt{2} is a list of two."""
    upper = s.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = s.replace(r"\pm", "-").replace(r"\mp", "+")
    return [upper, lower] if r"\pm" in s else [upper]


def _row_key(row: str, depth: int) -> str:
    return "; ".join(_key(cell, depth) for cell in row.split("&"))


def _enclosed(s: str) -> bool:
    """Whether the first bracket is closed by the last character, not before."""
    depths = list(accumulate(_depth_change(character) for character in s))
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


_DECIMAL = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?", re.ASCII)
_FRACTION = re.compile(r"([-+]?)(\d*)(?:\\frac\{([^{}]+)\}\{([^{}]+)\}|(?<!\d)(\d+)/(\d+))", re.ASCII)
_POWER = re.compile(r"([-+]?)(?:(\d+(?:\.\d+)?)\\cdot )?(\d{1,9})\^\{(-?\d{1,3})\}", re.ASCII)


def _number(s: str) -> Fraction | None:
    r"""The value of -12, 0.5, 4.5e33, 3/4, \frac{3}{4}, 1\frac{3}{4}, 2^{-99}, 8.7\cdot10^{8}; else None."""
    if len(s) > 60:
        return None
    if _DECIMAL.fullmatch(s):
        return Fraction(s)
    fraction = _FRACTION.fullmatch(s)
    if fraction:
        sign, whole, above, below, above_slash, below_slash = fraction.groups()
        numerator = _number(above or above_slash)
        denominator = _number(below or below_slash)
        if numerator is None or not denominator:
            return None
        if whole and not (above + below).isdigit():  # a mixed number has whole parts
            return None
        value = int(whole or 0) + numerator / denominator
        return -value if sign == "-" else value
    power = _POWER.fullmatch(s)
    if power:
        base = int(power[3])
        exponent = int(power[4])
        defined = base or exponent > 0
        if defined and len(power[3]) * abs(exponent) < 4000:
            return Fraction(power[1] + (power[2] or "1")) * Fraction(base) ** exponent
    return None
