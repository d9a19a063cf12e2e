r"""Reading answers out of responses, and deciding which answers are equal. All label-free methods rest on it.

Every answer is turned into one key string, and two answers are equal if their keys are. So equality is
symmetric and transitive by construction, and does not depend on the order of the answers or on which others
are present. First the answer is rewritten to one spelling, by the tables of engine/spellings.py; the keys of
formulas come from engine/formulas.py.
(math-verify's `verify(gold, answer)` has none of these properties; only its LaTeX parser is used.)

Numbers are equal if they are exactly equal: 0.5 is \frac12, but 0.333333 is not \frac13, as a tolerance would
not be transitive. Percent signs, degrees and units are dropped: 9\% is 9. "x = 5" is 5. Lists are unordered,
tuples are not.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from engine.formulas import formula_key
from engine.spellings import FUNCTIONS, NAME, NAMES, REWRITES, STYLES, SYMBOLS, to_ascii


# ----------------------------------------------- extraction -----------------------------------------------
# \boxed{...}, \boxed 5, \boxed5, \boxed B, \boxed\frac{1}{2}
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(\{)|\s*([-+]?\d[\d.,/]*)| +([A-Z])(?![\w'])|"
                  r"(\\(?!begin)[a-zA-Z]+(?:\{[^{}]*\})*))")
# a box that is only mentioned: \boxed{}, \boxed{...}, \boxed{\text{your answer}}
_EMPTY = re.compile(r"(?:[\s.?_~${}\[\]]|\\[ ,;:!$_]|\\phantom\{\w*\}|"
                    r"\\(?:[lcv]?dots|cdot|square|q?quad|text[a-z]*)(?![a-zA-Z])|"
                    r"\b(?:your|the|my|final|answer|result|here)\b)*", re.IGNORECASE)
_NAMED = r"(?:(?:\\(?:angle|triangle|overline) )?[a-zA-Z\\|](?:[^\s=,;:.()]|\([^\s=,()]*\)){0,20}\s*=\s*)?"
_DENIED = re.compile(r"\b(?:not|instead of|rather than)\W{0,4}$")  # not \boxed{3}
# between the boxes of one list: a unit, separators, numbers of parts, the name of the next one
_GAP = re.compile(rf"(?:\s*(?:\^\\circ|\\?%|{SYMBOLS}|[a-z]{{3,}}s)(?=\s*(?:[,;]|and\b)))?"
                  rf"(?:[\s,;&]|\\\\|\b(?:and|or)\b|\([a-e]\)|\n\s*(?:[-\u2022]|[a-e1-9][.)]))*{_NAMED}")
_BEFORE = re.compile(_NAMED + r"\(?\s*$")
_STYLE = re.compile(r"\\(?:text)?color\{[a-z]*\}|\\(?:(?:text|math|bold|under|mbox)[a-z]*|"
                    rf"(?:{STYLES}|q?quad)(?![a-zA-Z]))\s*|\\[()\[\],;:! ]|~")
# <think>, </thinking>, <|begin_of_thought|>, <|END_THINKING|>, <seed:think>, [/THINK], gpt-oss's channels
_THOUGHT = re.compile(
    r"[<\u25c1]\|?(/|end_(?:of_)?)?(?:begin_(?:of_)?|start_)?([\w:]{0,20}?(?:think|thought|reason|reflect|"
    r"scratchpad|analysis)\w{0,12})\s*\|?[>\u25b7]|\[(/?)(THINK)\]|<\|channel\|>(?:(final)|analysis)"
    r"(?:<\|message\|>)?|<unused9(?:(5)|4)>",  # MedGemma's
    re.IGNORECASE)
LETTERS = "ABCDEFGHIJ"


def extract_answer(text: str, choices: int = 0, prompt: str = "") -> str | None:
    r"""What the last \boxed{} (or \fbox{}) after the reasoning holds, or the last few that make one list.

    None if there is no box, or if the last one or a thinking block is left open: there is no fallback such as
    "the last number", as a truncated response must not vote. prompt: a tag that it ends with opens a block.
    Of a multiple choice with so many options, the letter that the box holds, or None.

    >>> extract_answer(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer(r"$x=\boxed{1}$ and $y=\boxed{2}$")
    'x=1, y=2'
    >>> extract_answer(r"\boxed{1} and \boxed{\frac{1}{2") is None
    True
    """
    text = _after_thoughts(text, prompt)
    parts, start = [], len(text)  # from the last box to the first; where the earliest yet begins
    for box in reversed(list(_BOX.finditer(text))):
        end = _closed_at(text, box.end()) if box[1] else box.end()
        if end is None:
            break
        content = text[box.end():end - 1].strip() if box[1] else (box[2] or box[3] or box[4]).rstrip(".,")
        if _EMPTY.fullmatch(content) or _DENIED.search(text[max(0, box.start() - 20):box.start()]):
            continue
        if parts and not (0 <= start - end <= 60 and _GAP.fullmatch(_plain(text[end:start]))):
            break
        start = box.start()
        parts.append((start, content))
    answer = parts[0][1] if parts else ""
    found = {}  # an answer that is said twice is one
    for start, content in reversed(parts) if len(parts) > 1 else ():
        name = _BEFORE.search(_plain(text[max(0, start - 60):start]))[0].strip()
        found[name, _key(normal_form(content))] = name + content
    if len(found) > 1:
        answer = ", ".join(found.values())
        answer += ")" if next(iter(found))[0].endswith("(") else ""  # (\boxed{1}, \boxed{2}) is a point
    return (read_choice(answer, choices) if choices else answer) or None


def _after_thoughts(text: str, prompt: str) -> str:
    """The text after the last thinking block; none of it if a block is open."""
    start, still_open = len(prompt), set()
    for tag in _THOUGHT.finditer(prompt + text):
        name = (tag[2] or tag[4] or "channel").lower()
        if tag[1] or tag[3] or tag[5] or tag[6]:
            still_open.discard(name)
            start = max(start, tag.end())
        elif tag.end() >= len(prompt.rstrip()):  # one that a prompt mentions opens nothing
            still_open.add(name)
    return "" if still_open else (prompt + text)[start:]


def _closed_at(text: str, start: int) -> int | None:
    """Just behind the brace that closes the one before start; None if nothing closes it."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):  # \{ and \} are no braces
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.end()
    return None


def _plain(text: str) -> str:
    """The text without LaTeX's and Markdown's styles."""
    return re.sub(r"[{}*`]|\\?\$", "", _STYLE.sub(" ", to_ascii(text)))


def read_choice(text: str, choices: int) -> str | None:
    """The letter that a text chooses: "A. 42", "(A) 42", "Option A"; None of "A cat", "H_2O", "A or B"."""
    letters, text = LETTERS[:choices], re.sub(r"[}$]", "\t", _STYLE.sub("\t", to_ascii(text)))
    text = re.sub(r"[{*`\\]", "", text).strip(" \t\n\"\u2018\u2019") + "\n"
    words = (r"(?:(?i:the|my|final|correct|best|right|option|choice|statement|answer|ans|respuesta|antwort"
             r"|is)\b[\s:.=]*|[\u9009\u9879\u7b54\u6848\u662f]+[\s:]*)*")
    behind = r"([.:;)\]]+|\s[-\u2013]\s|\s*(?:\u2014|--)|,(?=\s+[a-z]{2}|\d)|\s*[\t\n](?![_^])|\s+(?=\())"
    match = re.fullmatch(rf"{words}([(\[]?)\s*([{letters}])\s*{behind}(.*)", text, re.DOTALL)
    if not match:
        return None
    opened, letter, closed, rest = match.groups()
    other, joined = f"(?!{letter})[{letters}]", "" if opened else r"(?:\b(?:or|and)\b|[,;/&\n])\s*"
    labelled = joined + re.escape(opened) + other + (r"[.:)\]]" if closed[0] in ".:)]" else "(?!)")
    undecided = rf"{labelled}|^{other}\b|^(?:\W|or\b|and\b)*{other}(?:\W|or\b|and\b|[{letters}]\b)*$"
    return None if re.search(undecided, rest) else letter


# -------------------------------- normal form: one spelling of an answer ----------------------------------
_LONGEST = 400  # characters; longer answers are compared as strings
# what REWRITES leave as it is, to save time: 12, 0.5, -\frac{1}{2}, (3\sqrt{2}, x^{2}-4)
_PLAIN = re.compile(r"(?:\d|(?<=\d)\.(?=\d+(?![\d.(\\]))|[a-zA-Z](?![a-zA-Z\d])|\\pi|\\sqrt\{"
                    r"|\\frac\{(?![^{}]*\}[^{])|\^\{|\}\{?|[()-]|(?<=[\w)}])(?:\+|, (?=\S)))+", re.ASCII)
_IN = re.compile(rf"^({NAME}|{NAMES}) ?\\(?:in|approx)(?![a-zA-Z])")  # x\in(1, 2)


@lru_cache(maxsize=100_000)
def normal_form(answer: str) -> str:
    r"""One spelling of an answer, found by rewriting the string alone. Applied twice it changes nothing more.

    >>> answers = (r"$\dfrac12$", "1,000", r"3\text{ cm}", r"x = \left( 1,2 \right)")
    >>> [normal_form(answer) for answer in answers]
    ['\\frac{1}{2}', '1000', '3', '(1, 2)']
    """
    if re.search(r"\\\\[a-zA-Z]{2}", answer):  # \\frac
        answer = _unescaped(answer)
    for _ in range(8):  # until nothing changes, which takes two or three rounds
        before = answer
        answer = " ".join(to_ascii(answer).split())
        if len(answer.replace(" ", "")) > _LONGEST:  # regular expressions on hostile text take long
            break
        if _PLAIN.fullmatch(answer):
            return answer
        if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", answer):  # \sin 30^\circ is not \sin 30
            answer = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)(?:\s*[CF]\b)?|\\degrees?\b", "", answer)
        if answer.startswith("{") and _enclosed(answer) and not re.search(r"\\(?:over|choose)", answer):
            answer = answer[1:-1]
        # "or" is a union between inequalities (x<1 or x>2) and \lor between several names (x=0 or y=0); else
        # REWRITES make it a comma (x=1 or x=2)
        relation = re.search(r"[<>]|\\(?:[lg](?:e|t|eq|eqslant)|neq?|infty)(?![a-z])", answer)
        if relation or "=" in answer:  # of statements, the logical signs join
            answer = re.sub(r"\\(?:lor|vee)(?![a-z])", r"\\text{or}", answer)
            answer = re.sub(r"\\(?:land|wedge)(?![a-z])", r"\\text{and}", answer)
        if relation or len(set(re.findall(r"([a-zA-Z]\w*)\s*=", answer))) > 1:
            either = r"\\text\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])"
            answer = re.sub(either, r"\\cup " if relation else r"\\lor ", answer)
        for pattern, replacement in REWRITES:
            answer = pattern.sub(replacement, answer)
        answer = _without_names(answer)
        if answer == before:
            return answer
    return "".join(answer.split())


def _without_names(answer: str) -> str:
    r"""'5' of 'x=5', '36' of 'V=4\cdot9=36', '1, 2' of 'x=1, x=2'; 'x=1, y=2' keeps the names it needs."""
    if any(len(_split(answer, sign)) > 1 for sign in ("<", ">", r"\le", r"\ge", r"\ne", r"\lor")):
        return answer
    parts = [_name_and_value(part) for part in _split(answer)]
    names = {re.sub(r"_\{\d+\}$", "", name) for name, _ in parts if name}
    if len(names) != 1 or not parts[0][0] or any("=" in value for name, value in parts if not name):
        return ", ".join(f"{name}={value}" if name else value for name, value in parts)
    return ", ".join(value for _, value in parts)


def _closed(text: str) -> bool:
    """Whether there are numbers alone in it, no symbols."""
    known = rf"\\(?:{FUNCTIONS}|frac|cdot|div|pi|binom|infty|cup)(?![a-zA-Z])"
    return not re.search("[a-zA-Z]", re.sub(known, "", text))


def _name_and_value(part: str) -> tuple[str, str]:
    """What is before the first = and behind the last; no name and the part, if it is no value of a name."""
    part = _IN.sub(r"\1=", part)
    exact = next(filter(None, _split(part, r"\approx")), "")
    sides = _split(exact, "=")
    if len(sides) > 2 and r"\text" in part:  # 1 if n=2
        return "", part
    name, value = sides[0], sides[-1]
    names = re.findall(NAME, name) if re.fullmatch(NAMES, name) else [name]
    alphabetical = sorted(names, key=lambda x: x.strip("\\").lower())  # not (y, x)=(1, 2), which is (2, 1)
    named = names == alphabetical and (len(names) > 1 or re.fullmatch(NAME, name))
    if re.match(rf"\\(?!sqrt)(?:{FUNCTIONS}|lim|sum|prod|int|max|min|gcd|det)(?!\^|[a-z])", name):
        named = _number(value) is not None  # \cos A = 3/5
    if named and not _closed(value):
        named = all(_key(side) == _key(value) for side in sides[1:-1]) and not _is_equation(name, value)
    chained = any(re.fullmatch(rf"-?\d*{NAME}", side) for side in sides[1:-1])  # AB=2BC=10
    if named and not chained and len(sides) > 1:
        return name, value
    numbers = {_number(side) for side in sides} - {None}  # 2=1 is no 1
    return "", value if len(numbers) < 2 and _closed("".join(sides)) else "=".join(sides)  # 12\cdot5=60


def _is_equation(name: str, value: str) -> bool:
    """Whether name = value is like y'=y, a_{n+1}=2a_{n}, f(x+1)=x^2, AB=AC; v=v_{0}+at says what v is."""
    symbol = re.search(r"\\(?!d?dot|frac|vec|overline)[a-zA-Z]+|[a-ce-zA-Z]", name)
    index = re.search(r"(?:[_(]\{?(.*?)[)}]?)?$", name)[1] or ""
    found = re.findall(r"\\[a-zA-Z]+|[a-zA-Z](?:_\{[^{}]*\})?", value)
    own = [x for x in found if symbol and x.split("_")[0] == symbol[0]]
    own = [x for x in own if x == symbol[0] or {*index} & {*x[3:-1]}]
    return bool(own or re.search(r"[-+]|\d[a-z]", index) or re.fullmatch("[A-Z]{2,}", value))


def _depths(text: str) -> list[int]:
    """How deep in brackets it is after each character. Any kind closes any other: 0 < x <= 1 is (0, 1]."""
    text = text.replace(r"\begin", "(begin").replace(r"\end", ")end")  # of the same length
    return list(accumulate((character in "([{") - (character in ")]}") for character in text))


def _split(text: str, separator: str = ",") -> list[str]:
    """Split at the separators that stand outside all brackets."""
    depths = _depths(text) if separator in text else []
    ends = [i for i, depth in enumerate(depths) if depth == 0 and text.startswith(separator, i)]
    starts = [0, *(end + len(separator) for end in ends)]
    return [text[start:end].strip() for start, end in zip(starts, [*ends, None], strict=True)]


_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_LISTED = re.compile(rf"\s*[\[(]\s*(?:{_QUOTED})(?:\s*,\s*(?:{_QUOTED}))*\s*,?\s*[\])]\s*", re.DOTALL)
_MISSING = ("", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "None", "null", None, math.inf, -math.inf)


def normal_golds(value, exact: bool = False) -> list[str]:
    r"""The gold answer of a data file, of any type, as text: 142 -> ['142'], ['$2$', '3'] -> ['2', '3'].

    A list, which may be written as text, holds the allowed answers (Minerva's do): any of them is right; of
    spellings of one answer the first is kept. None, NaN, infinity, "N/A" and empty text are no answer. Of a
    solution what it ends with counts: its last \boxed{}, or what follows #### (GSM8K). exact: as it is
    written, no normal form of it.
    """
    if isinstance(value, dict):  # DAPO's reward_model column
        value = value.get("ground_truth")
    if isinstance(value, str) and _LISTED.fullmatch(value):
        value = [_unescaped(text[1:-1]) for text in re.findall(_QUOTED, value)]
    if isinstance(value, list | tuple):
        found = [gold for v in value for gold in normal_golds(v, exact)]
        return list({gold if exact else _key(gold): gold for gold in reversed(found)}.values())[::-1]
    if isinstance(value, str):
        value = extract_answer(value) if _BOX.search(value) else value.rpartition("####")[2].strip()
    if value in _MISSING or value != value:
        return []
    return [str(value) if exact else normal_form(str(value))]


def _unescaped(text: str) -> str:
    """The text with one backslash for two, if all of them are two."""
    halved = text.replace("\\\\", "\\")
    return halved if 2 * halved.count("\\") == text.count("\\") else text


# ---------------------------------- keys: equal answers have equal keys -----------------------------------
def equivalence_classes(answers: list[str | None], answer_keys: Callable | None = None) -> list[int | None]:
    r"""[N] answers -> [N] classes, numbered in order of first appearance; None (no answer) stays None.

    answer_keys: n answers -> n keys, equal for equal answers (text, numbers), instead of this file's. Raises
    TypeError or ValueError if it does not return one key per answer.

    >>> equivalence_classes(["0.5", None, r"\frac{1}{2}", "2", r"\sqrt{4}", "2, 3", "3, 2", "(2, 3)"])
    [0, None, 0, 1, 1, 2, 2, 3]
    """
    given = [answer for answer in answers if answer is not None]
    if given and answer_keys:
        keys = answer_keys(given)
    else:
        keys = [normal_form(answer) for answer in given]
        if len(set(keys)) > 1:  # else they are equal as they are
            keys = [_key(form) for form in keys]
    key_of, number = dict(zip(given, keys, strict=True)), {}
    return [None if a is None else number.setdefault(key_of[a], len(number)) for a in answers]


def answers_equal(a: str | None, b: str | None, answer_keys: Callable | None = None) -> bool:
    """Whether both are answers, and of one class. None (no answer) equals nothing, not even None."""
    return None not in (a, b) and equivalence_classes([a, b], answer_keys) == [0, 0]


@lru_cache(maxsize=100_000)
def _key(s: str, depth: int = 0, named: bool = False) -> str:
    """Takes lists, tuples, intervals, sets, unions and matrices apart down to numbers, formulas and words."""
    if depth > 4 or len(s) > _LONGEST:
        return "text " + s
    if s.startswith(r"\{") and s.endswith(r"\}") and _enclosed(s[1:]):
        inside = s[2:-2].strip()
        key = _key(inside, depth + 1)  # only the outer braces of a list mean nothing
        return f"set({key})" if depth or inside.startswith((r"\{", r"\emptyset")) else key
    elements = []
    for element in _split(s):  # 1\pm\sqrt{2} is a list of two
        upper, lower = [re.sub(r"\\([pm])[pm](?![a-z])", lambda sign: signs[sign[1] == "m"], element)
                        for signs in ("+-", "-+")]
        elements += [upper, lower] if element.count(r"\pm") == 1 and upper != lower else [element]
    for parts, sign in ((_split(s, r"\lor"), " or "), (elements, "; "), (_split(s, r"\cup"), " U ")):
        if len(parts) > 1:  # of several names, each part keeps its own
            several = len({_interval(part)[0] for part in parts}) > 1
            return "{" + sign.join(sorted(_key(part, depth + 1, several) for part in parts)) + "}"
    if s[:1] in ("(", "[", "{") and _enclosed(s):
        inside = [_key(part, depth + 1) for part in _split(s[1:-1])]
        if len(inside) > 1:
            return s[0] + "; ".join(inside) + s[-1]
        if s[0] != "[":
            return inside[0]
    matrix = re.fullmatch(r"([-\w\\{}/.]*?)\\begin\{matrix\}(.*)\\end\{matrix\}", s)
    if matrix:
        rows = []
        for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2].removesuffix("\\\\")):
            rows.append("; ".join(_key(f"{matrix[1]}({cell})", depth + 1) for cell in row.split("&")))
        return "matrix(" + " \\ ".join(rows) + ")"
    name, interval = _interval(s)
    if interval:  # x>2 is (2, \infty), whatever its name; among several names it keeps its own
        named = named or not _closed(interval) or not re.fullmatch(r"\\?[a-z]+(?:_\{\w+\})?|[A-Z]", name)
        return (f"{name} in " if named else "") + _key(interval, depth + 1)
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


def _interval(s: str) -> tuple[str, str]:
    r"""x\ge2 is ('x', '[2, \infty)'). Other inequalities, ('', ''), are compared as they are written."""
    parts = re.split(r" ?(<|>|\\(?:[lg]e|ne)(?![a-zA-Z])) ?", s)
    if len(parts) == 3 and parts[1] == r"\ne":
        name, _, value = parts if re.fullmatch(NAME, parts[0]) else parts[::-1]
        either = rf"(-\infty, {value})\cup({value}, \infty)"
        return (name, either) if re.fullmatch(NAME, name) else ("", "")
    if ">" in parts or r"\ge" in parts:  # read from right to left
        mirrored = {">": "<", r"\ge": r"\le", "<": ">", r"\le": r"\ge"}
        parts = [mirrored.get(part, part) for part in reversed(parts)]
    if len(parts) == 3:
        parts = [r"-\infty", "<", *parts] if re.fullmatch(NAME, parts[0]) else [*parts, "<", r"\infty"]
    if len(parts) != 5 or not re.fullmatch(NAME, parts[2]) or not {parts[1], parts[3]} <= {"<", r"\le"}:
        return "", ""
    start = "(" if parts[1] == "<" else "["
    end = ")" if parts[3] == "<" else "]"
    return parts[2], f"{start}{parts[0]}, {parts[4]}{end}"


_DECIMAL = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
_FRACTION = rf"([-+]?)(\d*)\\frac\{{({_DECIMAL})\}}\{{({_DECIMAL})\}}"


def _number(s: str) -> Fraction | None:
    r"""The value of -12, 0.5, 4.5e33, 3/4, \frac{3}{4}, 1\frac{3}{4}; None of others."""
    if len(s) > 60:
        return None
    if re.fullmatch(rf"{_DECIMAL}|[-+]?\d+/0*[1-9]\d*", s, re.ASCII):
        return Fraction(s)
    fraction = re.fullmatch(_FRACTION, s, re.ASCII)
    if not fraction:
        return None
    sign, whole, above, below = fraction.groups()
    if not Fraction(below) or whole and not (above + below).isdigit():  # a mixed number has whole parts
        return None
    return (-1 if sign == "-" else 1) * (int(whole or 0) + Fraction(above) / Fraction(below))
