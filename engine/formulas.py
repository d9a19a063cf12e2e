r"""The keys of formulas: their values at a few points, found in another process that may hang or die.

Every formula is computed once (the last 100,000 are remembered), within one second of processor time; one
that takes longer is compared as text, and another process is started, which takes a few seconds. Honest
formulas take 2 to 300 ms. There is no other bound: a policy that learned to write slow formulas could take
these seconds of every step for each of them.
"""

import os
import re
import subprocess
import sys
from fractions import Fraction
from functools import lru_cache
from zlib import crc32

_COMMANDS = set("""frac sqrt cdot div pi sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh
    ln log exp lfloor rfloor lceil rceil binom circ hbar alpha beta gamma delta epsilon zeta eta theta kappa
    lambda mu nu xi rho sigma tau phi chi psi omega Delta Theta Lambda Sigma Phi Psi Omega""".split())
_REFUSED = re.compile(r"""[^\w\s+\-*/^{}()\[\]|!.=\\'] | \d_ | \d[ ]\d | \d{41} | =.*=
    | (?<![\\a-zA-Z])[a-zA-Z]{3}[a-zA-Z ] | ^([A-E]|[a-zA-Z]{3})$           # words, the letter of a choice
    | \^\{[^{}]*\d\^ | \^\{[^{}]*\^\{[^{}]*\^ | \^\{?[-(]*\d{5}             # towers and large exponents
    | \d{4}\)?! | !! | [}!]\)! | m\{\d+[\d^]{4}                           # factorials, \binom{10000}{5000}
    | [f-hF-H]\^\{-1\}\( | \^\{\( | [A-Z][a-z]?_\{?\d\}?[A-Z]               # inverse, derivative, chemistry
    | [\dA-Z]' | '(\(|[^-+=]*[A-Z]) | \\(hat|vec)\{[^+-]*\\(hat|vec)\{      # 5', X'X, f'(x), vectors
    | [A-Za-z]\^\{T\} | [A-Z]\^\{-1\}[A-Z] | [A-Z][^+]*[A-Z]\^\{-1\}        # products of matrices
    | (?<!sqrt)\[[^()\[\]]*\] | -0\d | ^\((\d|[a-e]|i+)\)[^()+*/^-]+\(        # floors, dates, labels of parts
    """, re.VERBOSE | re.ASCII)
given_up: set[str] = set()
"""Formulas that took more than their second, or killed the worker; evaluate.py prints how many there are."""
_worker: subprocess.Popen | None = None


@lru_cache(maxsize=100_000)
def formula_key(formula: str) -> str | None:
    """The key of a formula or an equation; None if it cannot be computed: compared by normal form then.

    Refused at once: words, numbers in other bases (52_8), sums, integrals, towers, large factorials.
    """
    # symbols: \dot{x}_{0}, dx/dt, y'
    s = re.sub(r"\\(d?dot|hat|bar|vec)\{([a-zA-Z]|\\[a-zA-Z]+)\}(?:_\{(\w+)\})?", r"\2_{\1\3}", formula)
    s = re.sub(r"\\frac\{d([a-zA-Z]|\\[a-zA-Z]+)\}\{d([a-z])\}", r"\1_{d\2}", s)
    s = re.sub("'+", lambda primes: f"_{{prime{len(primes[0])}}}", s)
    if len(formula) > 200 or _REFUSED.search(formula) or set(re.findall(r"\\([a-zA-Z]+|.)", s)) - _COMMANDS:
        return None
    # 0.1 is \frac{01}{10}, not a float
    s = re.sub(r"(\d+)\.(\d+)", lambda d: rf"\frac{{{d[1]}{d[2]}}}{{1{'0' * len(d[2])}}}", s)
    # the parser reads 3(4) and (3)4 as 3+4
    s = re.sub(r"(?<=[\d)])(?=\()|(?<=\))(?=\d|\\frac)", r"\\cdot ", s)
    s = re.sub(r"\\Delta ?([a-zA-Z])", r"\1_{D}", s)  # no product
    # no function, no matrix; i is imaginary, I is not
    s = s.replace(r"\gamma", r"\varpi ").replace("E", r"\Xi ").replace("I", r"\Upsilon ")
    global _worker
    if _worker is None or _worker.poll() is not None:
        command = [sys.executable, __file__]
        _worker = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if _worker.stdout.readline() != "ready\n":
            raise RuntimeError("The answer checker did not start: pip install 'math-verify[antlr4_13_2]'")
    try:
        print(s, file=_worker.stdin, flush=True)
        reply = _worker.stdout.readline()
    except BaseException:  # never read the reply to this question as the reply to the next one
        _worker.kill()
        raise
    if not reply:
        given_up.add(formula)
        _worker.wait()
    return reply.strip() or None


# -------------------------------------- from here on: inside the worker ------------------------------------
if __name__ == "__main__":  # the training process has no need of these
    import resource
    import signal
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy.core.function import AppliedUndef


def _value_key(latex: str) -> str | None:
    """An exact rational, or 40 digits of the value; with symbols, of the values at six points.

    Both sides of an equation may be multiplied by a constant: the values are divided by the first.
    """
    config = ConversionConfig(lowercase_symbols=False)
    options = dict(convert_degrees=True, normalization_config=None, conversion_config=config)
    sides = [latex2sympy(side, **options) for side in latex.split("=")]
    is_equation = len(sides) == 2
    expr = sides[0] - sides[1] if is_equation else sides[0]
    if expr.has(sympy.Derivative):  # dx/dt would be 0
        return None
    expr = expr.doit()
    # symbols without assumptions; f(x) is one unknown; i is the imaginary unit
    symbols = {x: sympy.Symbol(str(x)) for x in expr.free_symbols | expr.atoms(AppliedUndef)}
    expr = expr.xreplace(symbols).xreplace({sympy.Symbol("i"): sympy.I})
    if expr.is_Rational and not is_equation:
        return str(expr)
    slope = expr.diff(sympy.Symbol("y"))
    if is_equation and slope.is_number and slope != 0 and len(expr.free_symbols) > 1:
        expr = -expr.subs("y", 0) / slope  # a line is y=..., however it is written
        is_equation = False
    values = _values_at_points(expr)
    if expr.free_symbols and min(map(abs, values)) > 10**20:  # n+2^{2025}: n would be rounded away
        return None
    if is_equation:
        values = [(v / values[0]).evalf(60) for v in values[1:]] if expr.free_symbols else [sympy.nan]
    if not all(v.is_number and v.is_finite for v in values):
        return None
    parts = [_real_and_imaginary(v) for v in values]
    keys = [str(sympy.Float(real, 40)) + " " + str(sympy.Float(imaginary, 40)) for real, imaginary in parts]
    real = [not imaginary for _, imaginary in parts]
    if sum(real) > 1 and not expr.has(sympy.I):  # \sqrt{1/n} is 1/\sqrt{n}, where it is real
        keys = [key if is_real else "not real" for key, is_real in zip(keys, real, strict=True)]
    if len(set(keys)) == 1:
        keys = keys[:1]  # a constant: \sin^2x+\cos^2x
    if len(keys) == 1 and not is_equation and not parts[0][1]:  # a rational number after all: \log_28
        value = Fraction(str(parts[0][0]))
        simple = value.limit_denominator(10**9)
        if abs(value - simple) < abs(value) * Fraction(1, 10**35) or not value:
            return str(simple)
    return ("=" if is_equation else "~") + " ".join(keys)


def _values_at_points(expr) -> list:
    """70 digits at each of six points (60 if something is rounded); a single value without symbols."""
    whole = expr.has(sympy.floor, sympy.ceiling)
    alone = len(expr.free_symbols) == 1
    values = []
    for point in range(60 if whole else 6) if expr.free_symbols else [0]:
        coordinates = {x: _coordinate(x.name, point, whole, alone) for x in expr.free_symbols}
        if expr.has(sympy.Abs):  # |z-i| is not |z+i|
            coordinates |= {x: v * (1 + sympy.I / 2) for x, v in coordinates.items() if x.name in ("z", "w")}
        # floors need exact points; elsewhere xreplace would compute huge exact powers first
        values.append(expr.xreplace(coordinates).evalf(70) if whole else expr.evalf(70, subs=coordinates))
    return values


def _coordinate(name: str, point: int, whole: bool, alone: bool):
    """The value of the symbol `name` at a point, the same in every formula; alone: it has no other symbol."""
    seed = crc32(name.encode())
    if whole:  # if something is rounded, n is an integer: \lceil n/2\rceil is \lfloor(n+1)/2\rfloor
        between = sympy.Rational((0, 3, 5)[point % 3], 8) if name in ("x", "y", "z", "t") else 0
        return 1 + seed % 50 + point * (1 if alone else (1, 7, 11, 13)[seed % 4]) + between
    if point < 2:
        sign = (1, -1)[point]  # |x| is not x,
    else:
        sign = 1 - 2 * (seed >> (point - 2) & 1)  # |xy| is not xy,
    size = 5000 + crc32(f"{name}{point}".encode()) % 9973
    return sympy.Rational(sign * size * (1, 37)[point % 2], 7919)  # near and far: |x+2| is not x+2


def _real_and_imaginary(value) -> list:
    """[real part, imaginary part]."""
    # evalf marks a difference that cancelled to nothing by a precision of one bit
    return [p if p.is_Float and p._prec > 1 else sympy.Float(0) for p in value.as_real_imag()]


def _serve() -> None:
    """The worker process: a formula per line in; out its key, an empty line if it has none.

    One that hangs, in a tower of powers, ends the process after one second of processor time. (A handler in
    Python could not interrupt a multiplication of huge integers; processor time does not depend on who else
    runs.)
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends when its parent does: its input is closed
    _value_key(r"\frac{1}{2}x^{2}+\sqrt{2}-\sin(x)\cdot\pi")  # fills the parser's tables
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    sys.set_int_max_str_digits(0)  # 2013^{2013} has 6,650 digits
    print("ready", flush=True)
    replies = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, 1.0)
        try:
            key = _value_key(line.strip())
        except Exception:
            key = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(key or "", file=replies, flush=True)


if __name__ == "__main__":
    _serve()
