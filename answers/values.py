"""The value of a formula: a Fraction where it is exact, else 60 digits. What is too large is not computed."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from zlib import crc32

import mpmath

from answers.grammar import FUNCTIONS, NotMath, kinds_in, walk

mp = mpmath.mp.clone()  # a context of our own: its precision is nobody else's
mp.dps = 60
# bits of a power; of a number whose root, logarithm or sine is told from its neighbours';
# what is left of a difference by rounding
_LARGE, _EXACT, _TINY = 60_000, 80, mp.mpf(10) ** -50
_LARGEST = dict(factorial=3000, binomial=3000, exp=_LARGE, sinh=40, cosh=40, tanh=20)  # arguments
_KINDS = [*r"+ * inverse ^ | factorial binomial \lfloor \lceil".split(), *FUNCTIONS]
_ROUNDED = (r"\lfloor", r"\lceil")


def name_of(node: tuple) -> str:
    """The name of a symbol. A call and what is rounded are one as a whole."""
    return node[1] if node[0] in ("symbol", "word") else f"{node[1]}({node[0]}{node[2:]}"


def names_in(node: tuple) -> set[str]:
    """The names in a formula."""
    return {name_of(part) for part in walk(node) if part[0] in ("symbol", "call", "word")}


def values_of(node: tuple) -> list:
    """Its values at six points; the only one of a formula without names."""
    points = 6 if names_in(node) else 1
    if points * sum(part[0] in _KINDS[5:] for part in walk(node)) > 150:
        raise NotMath  # for the time
    far = 977 if "|" in kinds_in(node) else 7919  # \tanh x would be 1 there
    return [_value(node, partial(_coordinate, point, far), 2 * _LARGE // points) for point in range(points)]


def _coordinate(point: int, far: int, name: str) -> Fraction:
    r"""A value of either sign, alone and together, near and far: \sqrt{x^2y^2} is not xy, |x-3| not 3-x."""
    sign = (1, -1)[point] if point < 2 else 1 - 2 * (crc32(name.encode()) >> (point - 2) & 1)
    return Fraction(sign * (5000 + crc32(f"{name}{point}".encode()) % 9973), far if point < 2 else 7919)


def real(value):
    """A number as mpmath has it."""
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _value(node: tuple, at: Callable, bits: int):
    """The value where the names have the values at(name). Raises NotMath, also if a number has more bits."""
    kind, *parts = node
    if kind == "number":
        return parts[0]
    if kind in ("symbol", "call") or kind in _ROUNDED and names_in(node):
        name = name_of(node)  # AB is a product, as a value
        return math.prod(map(at, name)) if name.isalpha() and name.isupper() else at(name)
    if kind == "constant" and parts != ["infty"]:
        return dict(pi=+mp.pi, e=mp.exp(1), i=mp.mpc(0, 1))[parts[0]]
    if kind not in _KINDS:
        raise NotMath
    try:
        value = _compute(kind, [_value(part, at, bits) for part in parts], bits)
    except (ZeroDivisionError, ValueError, OverflowError, TypeError):  # no order of complex numbers
        raise NotMath from None
    if not isinstance(value, Fraction) and not mp.isfinite(value):
        raise NotMath
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _compute(kind: str, values: list, bits: int):
    """An operation or a function of numbers. Raises NotMath before the work if the result is too large."""
    if kind == "^":
        return _power(*values, bits // 2)
    exact = all(isinstance(value, Fraction) for value in values)
    values = values if exact else list(map(real, values))
    first, last = values[0], values[-1]
    if kind in ("+", "*") and exact and sum(map(_bits, values)) > bits:
        raise NotMath
    if kind == "+":
        total, sizes = sum(values[1:], first), [*filter(None, map(abs, values))]
        if not exact and sizes and min(sizes) < max(sizes) * 1e-25:
            raise NotMath  # x would be rounded away in x+\sqrt{2}^{2025}
        return total if exact or abs(total) > max(map(abs, values)) * _TINY else Fraction(0)
    if kind == "*":
        return math.prod(values)
    if kind == "inverse":
        return 1 / first
    if kind == "|":
        return abs(first)
    if kind in _ROUNDED and exact:
        return Fraction(math.floor(first) if kind == r"\lfloor" else math.ceil(first))
    if max(map(abs, values)) > _LARGEST.get(kind, 1e15):
        raise NotMath
    if kind == "factorial" and exact and first.denominator == 1 and first >= 0:
        return Fraction(math.factorial(int(first)))
    if kind == "binomial" and exact and last.denominator == 1 and 0 <= last < 200:  # a polynomial of n
        return math.prod(((first - j) / (j + 1) for j in range(int(last))), start=Fraction(1))
    if kind in _ROUNDED or exact and max(map(_bits, values)) > _EXACT:
        raise NotMath  # \cos 10^{-30} is no 1
    return getattr(mp, kind.replace("arc", "a"))(*map(real, values))


def _power(base, exponent, bits: int):
    """A power; an odd root of a negative number is real. Raises NotMath if it has more bits."""
    rational = isinstance(exponent, Fraction)
    exact = rational and isinstance(base, Fraction)
    if abs(exponent) * (_bits(base) - 1 if exact else 1) > bits:
        raise NotMath
    if exact and exponent.denominator == 1:
        return base ** int(exponent)
    if exact and max(_bits(base), _bits(exponent)) > _EXACT:
        raise NotMath  # \sqrt{10^{60}+1} is no 10^{30}
    odd = rational and exponent.denominator % 2 and not mp.im(base) and base < 0
    if exact and base.denominator < 999 < exponent.denominator:
        odd = False  # (-1)^n is no -1
    value = mp.power(real(-base if odd else base), real(exponent))
    return -value if odd and exponent.numerator % 2 else value


def text_of(value) -> str:
    r"""A text that equal values share: of a rational number (also of \log_2 8) exact, else 40 digits."""
    if isinstance(value, Fraction):
        if _bits(value) > 8000:
            raise NotMath
        return str(value)
    size = abs(value)
    parts = [mp.mpf(part) if abs(part) > size * _TINY else mp.mpf(0) for part in (mp.re(value), mp.im(value))]
    simple = Fraction(*mpmath.libmp.to_rational(parts[0]._mpf_)).limit_denominator(10 ** 9)
    near = abs(real(simple) - parts[0]) <= size * _TINY
    if near and not parts[1] and abs(simple.numerator) < 1e19:
        return text_of(simple)
    return " ".join(mp.nstr(part, 40) for part in parts[:1 + bool(parts[1])])
