r"""Equal answers have equal keys: each node of an answer's tree has one.

So equality is symmetric and transitive by construction, and does not depend on the order of the answers or on
which others are present. Numbers are equal if they are exactly equal: 0.5 is \frac12, but 0.333333 is not
\frac13, as a tolerance would not be transitive. Percent signs, degrees and units are dropped: 9\% is 9.
"x = 5" is 5. Lists are unordered, tuples are not.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256

from answers.grammar import FLIPPED, INFINITY, NotMath, Parser, minus, number, walk
from answers.latex import to_ascii, tokens_of, unescaped
from answers.values import names_in, real, text_of, values_of

_LONGEST, _LONGEST_KEY = 400, 4000  # characters; longer answers are compared as strings, keys by their hash
_UNREAD = (r"[A-Z]_\{?\d\}?[A-Z]{2}"  # chemistry: NH_4OCN
           r"|^\(\w{1,4}\)(?=[^(=]).*[^-(+*/=^,]\(\w{1,4}\)[^(]")  # (a) x (b) y


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


def equal(a: str | None, b: str | None, answer_keys: Callable | None = None) -> bool:
    """Whether both are answers, and of one class. None (no answer) equals nothing, not even None."""
    return None not in (a, b) and classes([a, b], answer_keys) == [0, 0]


@lru_cache(maxsize=100_000)
def key(answer: str) -> str:
    """The key of an answer. What the grammar does not know has its tokens as key."""
    if answer.isdecimal() and answer.isascii() and answer[0] != "0":  # most answers
        return answer
    answer = " ".join(answer.split())
    text = to_ascii(unescaped(answer)) if len(answer) - answer.count(" ") <= _LONGEST else ""
    tokens = tokens_of(text) if len(text) < 3 * _LONGEST else []
    parser = Parser(tokens)
    tokens = tokens[parser.at:]
    try:
        if not tokens or re.search(_UNREAD, "".join(tokens)):
            raise NotMath
        _, node = _definition(parser.items())
        if node[0] == "set" and node[1:] and [part[0] for part in node[1:]] != ["set"]:
            node = ("list", *node[1:])  # only the outer braces of a list mean nothing
        found = _key(node)
    except NotMath:
        text = re.sub(r"\{ (\S+) \}", r"\1", " ".join(map(_lower, tokens)))
        return "text " + (text or answer)
    return found if len(found) < _LONGEST_KEY else "long " + sha256(found.encode()).hexdigest()


def _lower(word: str) -> str:
    """Evelyn is evelyn, but Aa is not aa, nor Mgh mgh."""
    named = re.fullmatch("(?!Vmat)[A-Z][a-z]{3,}|No|YES|NO|TRUE|FALSE|NONE", word)
    short = getattr(word, "roman", True) and re.fullmatch("[A-Z][a-z]{2}", word)
    return word.lower() if named or short else word


def _key(node: tuple) -> str:
    """The key of a node. Raises NotMath."""
    kind, *parts = node
    if node in (INFINITY, minus(INFINITY)):
        return "oo" if node == INFINITY else "-oo"
    if kind in ("list", "or"):
        return _list_key(kind, parts)
    if kind == "relation":
        return _relation_key(node)
    if kind == "group":
        return parts[0] + "; ".join(map(_key, parts[2:])) + parts[1]
    if kind == "such":
        return f"{{{_key(parts[0])} | {_key(parts[1])} of {sorted(names_in(node))}}}"
    if kind in ("set", r"\cup"):
        kind, sign = ("set", "; ") if kind == "set" else ("", " U ")
        return f"{kind}{{{sign.join(sorted(map(_key, parts)))}}}"
    if kind == "word" or kind == "symbol" and re.fullmatch("[A-Z]{2,}", parts[0]):  # alone, ABC is no BCA
        return "word " + " ".join(map(_lower, parts[0].split()))
    if kind == "phrase" and len(parts) == 2:  # May 5, 5 May
        return " ".join(sorted(map(_key, parts)))
    if kind in ("matrix", "row", "ratio"):
        names = sorted(names_in(node)) if parts[-1][0] == "relation" else ""  # of a case
        return f"{kind}({'; '.join(map(_key, parts))}{names})"
    return _keys_of(values_of(node), node)


# ------------------------------------------- names and what they are --------------------------------------
def _definition(node: tuple) -> tuple[str, tuple]:
    r"""(name, value) of x = 5, V = 4\cdot9 = 36, x\in[1, 2]; ("", node) of what defines nothing."""
    if node[0] != "relation":
        return "", node
    _, ops, *sides = node
    if r"\approx" in ops:
        at = ops.index(r"\approx")
        value, rounded = sides[at:at + 2]
        named = value[0] == "symbol" and len(ops) == 1
        share = ("*", rounded, ("inverse", value))
        if not named and (names_in(value) or abs(values_of(share)[0] - 1) > 0.05):  # 5\approx 9
            return "", node
        ops = ("=",) if named else ops[:at]
        sides = sides[:len(ops) + 1]
    node = ("relation", ops, *sides) if ops else sides[0]
    if not ops or {*ops} != {"="} and (
            ops != (r"\in",) or sides[1][0] not in ("group", "set", "list", r"\cup")):
        return "", node
    if not any(map(names_in, sides)):  # 12\cdot5=60; 2=1 is no 1
        return "", sides[-1] if len({*map(_key, sides)}) == 1 else node
    if not names_in(sides[0]):  # 5=x
        sides.reverse()
    name, *between, value = sides
    multiples = [side for side in between if names_in(side) and {  # x=2y=3z: by the kinds of the factors
        *next(zip(*(side[1:] if side[0] == "*" else [side])))} <= {"symbol", "number", "phrase"}]
    same = [side for side in sides[1:] if names_in(value) or not names_in(side)]  # A=\pi r^2=2\pi
    if not _is_name(name, value) or multiples or len({*map(_key, same)}) > 1:
        return "", node
    return str(name[1:]), value


def _is_name(node: tuple, value: tuple) -> bool:
    """Whether it is x, f(x), (x, y) but not (y, x), a:b; of a number also |AB|, AB, m+n that was asked for.
    The value is no other name (a=c) and does not hold this one (y'=y, a_{n+1}=2a_n)."""
    kind, *parts = node
    if kind in ("group", "ratio"):
        symbols = parts[2:] if kind == "group" else parts
        names = [str(part[1]).strip("\\").lower() + "~" for part in symbols if part[0] == "symbol"]  # S_1:S
        return len(names) == len(symbols) and names == sorted(names)
    if not names_in(value) and kind in ("abs", "+"):
        letters = "[A-Z]{1,2}" if kind == "abs" else "[A-Za-w]|[A-Z]{2}"  # |a|=5 is no 5, nor x+y=5
        tens = ("*", number(10)), ("*", number(100)), ("*", number(1000))  # 100m+n
        parts = [part[2] if part[:2] in tens else part for part in parts]
        return all(part[0] == "symbol" and re.fullmatch(letters, part[1]) for part in parts)
    if kind not in ("symbol", "call") or re.match("[A-Z]{3}", parts[0]) or any(
            part[0] not in ("symbol", "number") for part in parts[1:]):
        return False
    if names_in(value) and re.search(r"_.*[-+]|'|^[A-Z]{2}", parts[0]) or (
            value[0] == "symbol" and not value[1][0].isdigit() and value not in parts):
        return False
    base, *index = re.split("[_(]", parts[0], maxsplit=1)
    for other in names_in(value):
        its_base, *its_index = re.split("[_(]", other.strip("'("), maxsplit=1)
        if its_base == base and (not its_index or {*str(index)} & {*its_index[0]}):  # but v = v_0 + at
            return False
    return True


def _list_key(kind: str, items: list[tuple]) -> str:
    """Names are kept if there are several: x=1, y=2. "or" is a union of inequalities, or of several names."""
    named = [_definition(item) for item in items]
    names = {re.sub(r"_\d+(?=')", "", name) for name, _ in named}
    same = len(names) == 1 or len(names - {""}) == 1 and bool(named[0][0])  # x_1=1, x_2=2; n=1, 2, 3
    intervals = [_interval(value) for _, value in named]
    several = kind == "list" or len({found[0] for found in intervals if found}) > 1
    keys = []
    for (name, value), interval in zip(named, intervals, strict=True):
        own = _interval_key(*interval, several) if interval else _key(value)
        keys.append(own if same or not name else f"{name}={own}")
    united = all(intervals) or len(names - {""}) > 1 or all(value[0] == "group" for _, value in named) and (
        re.search(r"oo|[][]|\('[a-z]',\)", "".join([*names, *keys])))  # but (1, 2) or (2, 1) are points
    if kind == "or" and len({*keys}) == 1:
        return keys[0]  # 0.5 or 1/2
    return "{" + (" U " if kind == "or" and united else "; ").join(sorted(keys)) + "}"


def _interval(node: tuple) -> tuple[str, tuple] | None:
    r"""x\ge2 is ("x", [2, \infty)), x\ne3 is the union of two; None: it is compared as it is."""
    if node[0] != "relation":
        return None
    _, ops, *sides = node
    if ops == (r"\ne",) and "symbol" in (sides[0][0], sides[1][0]):
        name, other = sides if sides[0][0] == "symbol" else sides[::-1]
        below, above = ("group", "(", ")", minus(INFINITY), other), ("group", "(", ")", other, INFINITY)
        return name[1], (r"\cup", below, above)
    if {*ops} & {">", r"\ge"} and {*ops} <= {*FLIPPED}:
        ops, sides = [FLIPPED[op] for op in reversed(ops)], sides[::-1]
    ops, names = list(ops), [side[0] in ("symbol", "call", "abs") for side in sides]
    if len(sides) == 2 and names[0]:
        ops, sides, names = ["<", *ops], [minus(INFINITY), *sides], [False, *names]
    elif len(sides) == 2:
        ops, sides = [*ops, "<"], [*sides, INFINITY]
    if len(sides) != 3 or not names[1] or not {*ops} <= {"<", r"\le"}:
        return None
    brackets = "(" if ops[0] == "<" else "[", ")" if ops[1] == "<" else "]"
    return str(sides[1][1]), ("group", *brackets, sides[0], sides[2])


def _interval_key(name: str, interval: tuple, several: bool = False) -> str:
    """The name is dropped if it is a letter and the only one."""
    plain = re.fullmatch(r"\\?[a-z]+(?:_\w+)?|[A-Z]", name) and not names_in(interval)
    return ("" if plain and not several else f"{name} in ") + _key(interval)


def _relation_key(node: tuple) -> str:
    _, value = _definition(node)
    if value[0] != "relation":
        return _key(value)
    if interval := _interval(value):
        return _interval_key(*interval)
    _, ops, *sides = value
    if ops == ("=",) and not {part[0] for part in walk(value)} & {"group", "set", "list", "matrix", "ratio"}:
        return _equation_key(("+", sides[0], minus(sides[1])))
    return " ".join([*ops, *map(_key, sides)])


# ------------------------------------------------------ formulas -------------------------------------------
def _equation_key(difference: tuple) -> str:
    """A line's key is that of ax + b, however it is written; other equations may have a constant factor."""
    if "y" in names_in(difference) and len(names_in(difference)) > 1:
        zero, one, two = [_with_y(difference, number(y)) for y in range(3)]
        slope = ("+", one, minus(zero))
        slopes = {text_of(value) for value in [*values_of(slope), *values_of(("+", two, minus(one)))]}
        if len(slopes) == 1 and slopes != {"0"}:
            return _key(minus(("*", zero, ("inverse", slope))))
    first, *others = values_of(difference)
    if not first or not others:
        raise NotMath
    return "=" + _keys_of([real(value) / real(first) for value in others], difference)


def _with_y(node: tuple, value: tuple) -> tuple:
    """The node with a value for y."""
    if node == ("symbol", "y"):
        return value
    return tuple(_with_y(part, value) if isinstance(part, tuple) else part for part in node)


def _keys_of(values: list, node: tuple) -> str:
    """The keys of values at all points; one if they are all the same: sin^2 x + cos^2 x is 1."""
    keys = [text_of(value) for value in values]
    if ("constant", "i") not in walk(node) and not all(" " in text for text in keys):
        keys = ["not real" if " " in text else text for text in keys]  # \sqrt{1/n} is 1/\sqrt n where real
    if len({*keys}) == 1:
        return keys[0]
    rounded = sorted(names_in(node)) if len(keys) > 6 else []  # \lfloor n/2\rfloor is not that of m
    return "~" + " ".join([*rounded, *keys])
