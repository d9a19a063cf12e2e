r"""Equal answers have equal keys: each node of an answer's tree has one.

So equality is symmetric and transitive by construction, and does not depend on the order of the answers or on
which others are present. Numbers are equal if they are exactly equal: 0.5 is \frac12, but 0.333333 is not
\frac13, as a tolerance would not be transitive. Percent signs, degrees and units are dropped: 9\% is 9.
"x = 5" is 5. Lists are unordered, tuples are not.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from answers.grammar import FUNCTIONS, INFINITY, NotMath, Parser, all_but, kinds_in, minus, walk
from answers.latex import to_ascii, tokens_of, unescaped
from answers.values import names_in, real, text_of, values_of

_LONGEST, _LONGEST_KEY = 400, 4000  # characters; what is longer is compared as text
_TEXT = (r"[A-Z]_\{?\d\}?[A-Z]{2}|\d[A-F]+_|^0x"  # chemistry: NH_4OCN; 2AB_{16}
         r"|^\(\w{1,4}\)(?=[^(=,]).*[^-(+*/=^]\(\w{1,4}\)[^(]|^\(\d\d+\)\("  # (a) x (b) y; (12)(34)
         r"|[ACP]_(?:\{\w+\}|[\dn])\^|\\frac\{d(?:\}|\^.*?\}\{d)"  # C_5^2; d^2y/dx^2
         r"|(?<![a-zA-Z\\])d[a-zA-Z]/d[a-zA-Z](?![a-zA-Z])|0\.\d+\(\d+\)$|:0\d"  # dy/dx; 0.1(6)
         r"|(?:^|[,;]|and|or)\(*(?:[\d.]+(?:(?:-|\\sim)[\d.]+)+|\d+/\d+/\d+"  # 10-20, a date
         r"|(?:[A-Z]|[ivx]+)(?:[-/](?:[A-Z]|[ivx]+)){2,})(?=\)*(?:$|[,;]|and|or))")  # A-B-C


def classes(answers: list[str | None], answer_keys: Callable | None = None) -> list[int | None]:
    r"""[N] answers -> [N] classes, numbered in order of first appearance; None (no answer) stays None.

    answer_keys: n answers -> n keys, equal for equal answers (text, numbers), instead of this file's. Raises
    TypeError or ValueError if it does not return one key per answer.

    >>> classes(["0.5", None, r"\frac{1}{2}", "2", r"\sqrt{4}", "2, 3", "3, 2", "(2, 3)"])
    [0, None, 0, 1, 1, 2, 2, 3]
    """
    given = [answer for answer in answers if answer is not None]
    keys = answer_keys(given) if given and answer_keys else map(key, given)
    key_of, numbers = dict(zip(given, keys, strict=True)), {}
    return [None if a is None else numbers.setdefault(key_of[a], len(numbers)) for a in answers]


def majority(classes: list[int | None]) -> int | None:
    """The most frequent class, TTRL Eq. 4: the first seen if several are; None (no answer) never votes."""
    counts = Counter(c for c in classes if c is not None)
    return max(counts, key=counts.get) if counts else None  # max keeps the first of equals


def equal(a: str | None, b: str | None, answer_keys: Callable | None = None) -> bool:
    """Whether both are answers, and of one class. None (no answer) equals nothing, not even None."""
    return None not in (a, b) and classes([a, b], answer_keys) == [0, 0]


@lru_cache(maxsize=100_000)
def key(answer: str) -> str:
    """The key of an answer. What the grammar does not know has its tokens as key."""
    answer = " ".join(answer.split())
    tokens = tokens_of(to_ascii(unescaped(answer))) if len(answer) <= _LONGEST else []
    parser = Parser(tokens)
    rest = tokens[parser.at:]
    try:
        if not rest or re.search(_TEXT, "".join(rest)):
            raise NotMath
        _, node = _definition(parser.items())
        if node[0] == "set" and [part[0] for part in node[1:]] not in ([], ["set"]):
            node = ("list", *node[1:])  # only the outer braces of a list mean nothing
        if len(found := _key(node)) < _LONGEST_KEY:
            return found
    except NotMath:
        pass
    thousands = re.search(r"\d,\d{3}(?!\d)", answer)  # 1,200 apples each are no 1, 200
    said = tokens if re.match(r"\(?[A-J][.)]", answer) else rest  # A. 2, B. 3 without "Answer:"
    plain = re.sub(r"^\{ ([^{}]*) \}$|\{ (\S+) \}", r"\1\2", _lower(said))
    return "text " + "," * bool(thousands) + (plain or answer)


def _lower(words: list[str]) -> str:
    """Evelyn is evelyn, but Aa is not aa, nor Mgh mgh where there are signs."""
    named = r"(?<!\S)(?:(?!Vmat)[A-Z][a-z]{3,}|The|All|Any|Not|No|NO|Yes|YES|TRUE|FALSE|NONE)(?!\S)"
    return re.sub(named, lambda word: word[0].lower(), " ".join(words))


def _key(node: tuple) -> str:
    """The key of a node. Raises NotMath."""
    kind, *parts = node
    if node in (INFINITY, minus(INFINITY)):
        return "oo" if node == INFINITY else "-oo"
    if kind in ("list", "or"):
        return _list_key(kind, parts)
    if kind == "relation":
        ops, *sides = parts
        if ops == ("=",) and not kinds_in(node) & {"group", "set", "list", "matrix", "ratio"}:
            node = ("+", sides[0], minus(sides[1]))
            return "=" + _keys_of(_ratios(node), node)
        return " ".join([*ops, *map(_key, sides)])
    if kind == "group":
        return parts[0] + "; ".join(map(_key, parts[2:])) + parts[1]
    if kind in ("set", r"\cup"):
        return f"{kind}{{{'; '.join(sorted(map(_key, parts)))}}}"
    symbols = parts if kind == "*" else [node]
    if kind == "word" or {part[0] for part in symbols} == {"symbol"}:
        name = "".join(part[1] for part in symbols)
        if kind == "word" or re.fullmatch("[A-Z]{2,}", name):  # alone, ABC and A B C are no BCA
            return "word " + _lower([name])
    if kind == "unit":  # 5 cm is 5
        return _key(parts[0])
    if kind in ("matrix", "row", "ratio"):
        names = sorted(names_in(node)) if parts[-1][0] == "relation" else ""  # of a case
        return f"{kind}({'; '.join(map(_key, parts))}{names})"
    return _keys_of(values_of(node), node)


# ------------------------------------------- names and what they are --------------------------------------
def _definition(node: tuple) -> tuple[str, tuple]:
    r"""(name, value) of x = 5, V = 4\cdot9 = 36, x\in[1, 2], x\ge2; ("", node) of what defines nothing."""
    if node[0] != "relation":
        return "", node
    _, ops, *sides = node = _interval(node)
    if ops[-1] == r"\approx":
        value, rounded = [side[1] if side[0] == "unit" else side for side in sides[-2:]]
        if value[0] == "symbol" and len(ops) == 1:
            ops = ("=",)
        elif names_in(value) or abs(values_of(("*", rounded, ("inverse", value)))[0] - 1) > 0.05:
            return "", node  # 5\approx 9
        else:
            ops, sides = ops[:-1], sides[:-1]
        node = ("relation", ops, *sides) if ops else sides[0]
    sets = ops == (r"\in",) and sides[1][0] in ("group", "set", "list", r"\cup")
    if not ops or {*ops} != {"="} and not sets:
        return "", node
    if not any(map(names_in, sides)):  # 12\cdot5=60; 2=1 is no 1
        return "", sides[-1] if len({*map(_key, sides)}) == 1 else node
    if not names_in(sides[0]):  # 5=x
        sides.reverse()
    name, *between, value = sides
    multiples = [side for side in between if kinds_in(side) - {"*", "number"} == {"symbol"}]  # x=2y=3z
    same = [side for side in sides[1:] if names_in(value) or not names_in(side)]  # A=\pi r^2=2\pi
    if not _is_name(name, value) or multiples or len({*map(_key, same)}) > 1:
        return "", node
    return str(name[1] if len(name) == 2 else name) + " in" * (ops[0] != "="), value


def _is_name(node: tuple, value: tuple) -> bool:
    """Whether it is x, f(x), (x, y) but not (y, x), a:b; of a number also |AB|, AB, m+n that was asked for.
    The value is no other name (a=c) and does not hold this one (y'=y, a_{n+1}=2a_n)."""
    kind, *parts = node
    names = names_in(value)
    if kind in ("group", "ratio"):
        symbols = [part[1] for part in parts if part[0] == "symbol"]
        return len(symbols) == len(parts) - 2 * (kind == "group") and symbols == sorted(symbols)
    if not names and kind in ("|", "+"):
        letters = "[A-Z]{1,2}" if kind == "|" else "[A-Za-w]|[A-Z]{2}"  # |a|=5 is no 5, nor x+y=5
        return all(part[0] == "symbol" and re.fullmatch(letters, part[1]) for part in parts)
    name, *arguments = parts
    if kind not in ("symbol", "call", "word") or re.match("[A-Z]{3}", name) or (
            {part[0] for part in arguments} - {"symbol", "number"}):
        return False
    if names and re.search(r"_.*[-+]|'|^[A-Z]{2}", name) or (
            value[0] == "symbol" and not value[1][0].isdigit() and value not in arguments):
        return False
    base, _, index = name.partition("_")
    alike = [other for other in names if re.split("[_('.]", other)[0] == base]  # but v = v_0 + at
    return all(other != name and re.search(r"_\d+$" if index else "_", other) for other in alike)


def _list_key(kind: str, items: list[tuple]) -> str:
    """Names are kept if there are several, and in x > 1, x < 5. "or" is a union, or a list of numbers."""
    named = [_definition(item) for item in items]
    names = {name for name, _ in named}
    if 1 < len(names - {""}) < len(named):
        raise NotMath  # x=1, y=2 or x=2, y=1: which belong together
    if kind == "list" and "".join(sorted(names)) in ("xy", "xyz"):  # x=1, y=2 is (1,2)
        return "(" + "; ".join(_key(value) for _, value in sorted(named)) + ")"
    same = len(names) == 1 or len(names - {""}) == 1 and named[0][0]  # x=1, x=2; n=1, 2, 3
    same = same and not (kind == "list" and " in" in "".join(names))
    keys = [_key(value) if same or not name else f"{name}={_key(value)}" for name, value in named]
    # no numbers, nor points such as (1, 2) or (2, 1): intervals, words, statements, letters
    sets = re.search(r"oo|[][]| in|word|[=<]|^[\d\W]*~", "".join([*names, *keys]))
    united = kind == "or" and (sets or len(names - {""}) > 1)
    if kind == "or" and len({*keys}) == 1:
        return keys[0]  # 0.5 or 1/2
    return r"\cup" * bool(united) + "{" + "; ".join(sorted(keys)) + "}"


def _interval(node: tuple) -> tuple:
    r"""x\in[2, \infty) for x\ge2, a union for x\ne3; |x|<2 and x<a stay as they are."""
    _, ops, *sides = node
    if len(sides) == 2:
        named = sides[0][0] == "symbol"
        sides = [minus(INFINITY), *sides] if named else [*sides, INFINITY]
        ops = ("<", *ops) if named else (*ops, "<")
    below, name, above = sides if len(sides) == 3 else [node] * 3
    if name[0] != "symbol" or not re.fullmatch(r"\\?[a-z]+(?:_\w+)?|[A-Z]", name[1]) or (
            names_in(below) or names_in(above) or not {*ops} <= {"<", r"\le"} and node[1] != (r"\ne",)):
        return node
    found = ("group", "(["[ops[0] != "<"], ")]"[ops[1] != "<"], below, above)
    if node[1] == (r"\ne",):
        found = all_but(above if below == minus(INFINITY) else below)
    return ("relation", (r"\in",), name, found)


# ------------------------------------------------------ formulas -------------------------------------------
def _ratios(node: tuple) -> list:
    """Its values at the points as multiples of the first: those of an equation with any constant factor."""
    first, *others = values_of(node)
    if not first or not others:
        raise NotMath
    return [real(value) / real(first) for value in others]


def _branches(node: tuple) -> str:
    r"""What has a sign of its own that points may not show: |x-3| is no 3-x, \sqrt{1-\sin^2 x} no \cos x.

    Up to a factor: the sums and functions under roots, in logarithms and inverse functions; all in bars."""
    found = set()
    for kind, *parts in {*walk(node)}:
        branch = kind[:3] in ("|", "ln", "arc") or (
            kind == "^" and getattr(values_of(parts[1])[0], "denominator", 0) != 1)
        if branch and names_in(parts[0]) and (kind == "|" or kinds_in(parts[0]) & {"+", *FUNCTIONS}):
            found.add(" ".join(map(text_of, _ratios(parts[0]))))
    return " in ".join(["", *sorted(found)])


def _keys_of(values: list, node: tuple) -> str:
    """The keys of values at all points; one if they are all the same: sin^2 x + cos^2 x is 1."""
    keys = [text_of(value) for value in values]
    if ("constant", "i") not in walk(node) and not all(" " in text for text in keys):
        keys = ["not real" if " " in text else text for text in keys]  # \sqrt{1/n} is 1/\sqrt n where real
    text = keys[0] if len({*keys}) == 1 else "~" + " ".join(keys)
    return text + _branches(node)
