r"""Tokens -> a tree, by descent: items > statement > union > ratio > sum > product > power > primary.

A node is a tuple, its kind and then its parts: ("number", Fraction), ("symbol", name), ("+", node, ...).
Kinds of formulas: number constant symbol call + * inverse ^ | factorial binomial \lfloor \lceil, functions.
Others: list or relation \cup ratio group set matrix row word unit. What else there is is NotMath.
"""

import re
from fractions import Fraction
from itertools import accumulate

from answers.latex import SYMBOL_UNIT, UNIT, WORD_UNIT, Token

FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp".split()
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_RELATIONS = r"= < > \le \ge \ne \in \approx \equiv".split()
_OR = "or ou oder \\lor \u0438\u043b\u0438 \ub610\ub294".split()
_AND = "and et und \u0438 AND".split()
_SEPARATORS = (",", ";", *_AND, *_OR)
_NO_FACTOR = ("", *_RELATIONS, *_SEPARATORS, *r""") ] } + - & : ^ _ ! ' . / to if when where for otherwise
    \cdot \times \} \forall \rfloor \rceil \cup \cap \setminus \land \pm \mp \\ \end \pmod \degree""".split())
_MARKS = r"\dot \ddot \hat \bar \vec \overline \tilde \Delta \angle \triangle".split()  # of a symbol
_LETTERS = ["\\" + name for name in """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu
    nu xi rho sigma tau phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega hbar
    ell""".split()]
_OPEN = (*_NO_FACTOR, *r"| ( [ { \{".split())
_WORDS = "[A-Z][a-z]+|[a-z]{4,}|[ivx]{2,}|no|yes|odd|one|two|six|ten"  # that are no products of letters
_ABOUT = r"(?i:approximately|approx\.?|about|roughly|around)"
# what an answer's value may begin with: "answer", a letter of a choice, a currency, about, an article
_BEFORE = (r"(?i:(?:the)?(?:final)?(?:answer|ans|result|total)(?:is|:|=)+|(?:option|choice)(?=\(?[A-J]\)?$))"
           r"|(?:\(?[A-J]\)|[A-J]\.|(?:Rs|USD?|EUR|RMB)\.?)"
           r"(?=[-\d$]|\\frac|\\sqrt|\\begin)(?!.*[A-J]\))"
           rf"|{_ABOUT}|(?:[Aa]n?|[Tt]he)(?=[a-z]{{4}})(?!.*[=:])|\\approx|\\sim|=|m(?=\\angle)")
# what a constant is, at the end: (c\in\mathbb{R}), where k is an integer, for any real c
_SAID = r"(?:for|where|\\forall|any|all|every|arbitrary|real|integers?|constants?|numbers?|is|an?)"
_IN = r"\\in (?:R|(?:\\mathbb )?(?:Z|\{ Z \})|\( - \\infty , \\infty \))"
_CONSTANT = re.compile(
    r"(?<!\S)(?=.*(?:\\in|all|any|every|some|real|integer|constant))"
    r"(?!(?=.*(?:Z|integer)).*\b[a-jlo-z]\b|(?=.*(?:R|real|infty)).*\b[kmn]\b)"  # integers are k, m and n
    rf"(?:, |\( |(?={_SAID} ))(?:{_SAID} )*"
    r"([a-z]|[a-su-w](?: , [a-su-w])+)"  # not x^2, x, c\in\mathbb{R}
    rf"(?: {_IN}| {_SAID})*(?: \))?$")
_REPEATING = r"(\d+\.\d{0,18}?)(?:(\d{1,3}?)\2{2,}\\ldots|\\(?:overline|bar|dot)\{?(\d{1,18})\}?)"
_GROUPS = r" ?[1-9]\d{0,2}(?:,\d{3}){1,6}(?:\.\d+)?"
# of a mixed number; 1 1/2 3 is none
_PART = r" ?(?:\\frac(?:\{ ?(\d+)\}\{ ?(\d+)\}| ?(\d) ?(\d))|(\d+)/ ?(\d+))(?! ?[\d.])"
_DEEPEST, _MOST = 25, 3000  # brackets in brackets; primaries, also those that are parsed twice
INFINITY = ("constant", "infty")


class NotMath(Exception):
    """The grammar does not know it, or it is too large to compute: it is compared as text."""


def number(value) -> tuple:
    """The node of a number, also from its digits."""
    return ("number", Fraction(value))


def minus(node: tuple) -> tuple:
    """The node of its negative; a unit stays outside."""
    return ("unit", minus(node[1]), node[2]) if node[0] == "unit" else ("*", number(-1), node)


def joined(kind: str, nodes: list[tuple]) -> tuple:
    """A node of this kind, or the only part that it would have."""
    return nodes[0] if len(nodes) == 1 else (kind, *nodes)


def walk(node: tuple):
    """The node and all nodes in it."""
    yield node
    for part in node:
        if isinstance(part, tuple):
            yield from walk(part)


REALS = ("group", "(", ")", minus(INFINITY), INFINITY)


def all_but(one: tuple) -> tuple:
    """The real numbers without one of them."""
    return (r"\cup", ("group", "(", ")", minus(INFINITY), one), ("group", "(", ")", one, INFINITY))


def kinds_in(node: tuple) -> set[str]:
    """The kinds of nodes in a tree."""
    return {part[0] for part in walk(node)}


class Parser:
    """Tokens and a place in them; items() is the tree of all. NotMath is raised by what meets the unknown."""

    def __init__(self, tokens: list[Token]):
        if said := _CONSTANT.search(" ".join(tokens[-16:])):
            before = tokens[:-len(said[0].split())]
            tokens = before if {*said[1]} & {*"".join(filter(str.isalpha, before))} else tokens
        self.tokens, self.at = [*tokens, *[Token("")] * 3], 0  # peek looks up to two back
        self.bars = False  # within |..|
        self.depth = self.parsed = 0
        self.ends = ()  # what closes the list at hand
        while self.match(_BEFORE):
            pass

    def peek(self, ahead: int = 0) -> Token:
        """The token at hand, or one near it; empty if there is none."""
        return self.tokens[self.at + ahead]

    def take(self, *wanted: str) -> Token:
        """The token at hand if it is one of these, and step on; else empty."""
        found = self.peek() if self.peek() in wanted else Token("")
        self.at += bool(found)
        return found

    def expect(self, *wanted: str) -> Token:
        """The token at hand, which must be one of these; without arguments, any."""
        if not (found := self.take(*wanted or [self.peek()])):
            raise NotMath
        return found

    def match(self, pattern: str, step: bool = True, space: str = "") -> re.Match | None:
        """What matches at the beginning of the next 16 tokens, joined without spaces; step over these."""
        near = self.tokens[self.at:self.at + 16]
        near = [space * (t.space and t.isalnum()) + t for t in near] if space else near
        if not (found := re.match(pattern, "".join(near))):
            return None
        ends = [0, *accumulate(map(len, near))]
        if step and found.end() not in ends:  # only a part of a token
            return None
        self.at += step and ends.index(found.end())
        return found

    def items(self, *ends: str, anew: bool = False) -> tuple:
        """Statements up to one of these tokens: ("list" or "or", ...), or the only one."""
        nodes, signs, joint = [], set(), True
        outer, self.ends = self.ends, ends
        while self.peek() not in ("", *ends):
            if not joint:
                raise NotMath
            nodes += self.item(anew or not self.depth)
            joint = False
            while sign := self.take(*_SEPARATORS):
                joint = True
                signs.add("or" if sign in _OR else "and" if sign in _AND else sign)
        if signs & {"and", ","} and ";" in signs or {"and", "or"} <= signs:
            raise NotMath  # 1, 2; 3, 4
        if len({part[2] for part in walk(("list", *nodes)) if part[0] == "unit"}) > 1:
            raise NotMath  # 5 ft, 6 in; 5 boys:3 girls
        self.ends = outer
        return joined("or" if "or" in signs else "list", nodes)

    def item(self, anew: bool) -> list[tuple]:
        r"""A statement; two of one with \pm, which is parsed twice. In brackets \pm is the outer item's."""
        start, nodes = self.at, [self.statement()]
        signs = [at for at in range(start, self.at) if self.tokens[at] in (r"\pm", r"\mp")]
        if anew and signs:
            if signs[1:]:
                raise NotMath
            self.tokens[signs[0]] = Token("-" if self.tokens[signs[0]] == r"\pm" else "+")
            self.at = start
            nodes.append(self.statement())
        return nodes

    def statement(self) -> tuple:
        """Expressions with relations between them."""
        sides, ops = [self.union()], []
        while op := self.take(*_RELATIONS):
            ops.append(op)
            self.match(_ABOUT)
            sides.append(self.union())
        if {*ops} & {">", r"\ge"}:  # x>2 is 2<x
            ops, sides = [_FLIPPED.get(op, op) for op in reversed(ops)], sides[::-1]
        return ("relation", tuple(ops), *sides) if ops else sides[0]

    def union(self) -> tuple:
        r"""Sets: A \cup B \cup C."""
        nodes = [self.ratio()]
        while self.take(r"\cup"):
            nodes.append(self.ratio())
        return joined(r"\cup", nodes)

    def ratio(self) -> tuple:
        """2:3, 3 to 4."""
        nodes, sign = [self.sum()], self.peek()
        while not self.bars and self.peek() in (":", "to"):
            self.expect(sign)  # no 9:30 to 10:15
            nodes.append(self.sum())
        return joined("ratio", nodes)

    def sum(self) -> tuple:
        """Terms with signs."""
        terms = []
        while (op := self.take("+", "-", r"\pm", r"\mp")) or not terms:
            term = self.product()
            terms.append(minus(term) if op in ("-", r"\mp") else term)
        return joined("+", terms)

    def product(self) -> tuple:
        """Factors, with signs between them or without; a unit behind them is passed over. Words are none."""
        factors = [self.power()]
        while not (unit := self.unit(factors[-1])):
            before, t, last = self.peek(-1), self.peek(), factors[-1]
            if op := self.take(r"\cdot", r"\times", "/"):
                if op == r"\times" and "symbol" in str(factors):
                    raise NotMath  # u\times v is no v\times u
                factor = minus(self.power()) if self.take("-") else self.power()
                factors.append(("inverse", factor) if op == "/" else factor)
            elif last[0] == "number" and before.isdigit() and (part := self.match(_PART, space=" ")):
                part = Fraction(*map(int, filter(None, part.groups())))
                if part >= 1:
                    raise NotMath
                factors[-1] = number(last[1] + part)
            elif not self.starts_factor():
                break
            elif t[0].isdigit() and (before not in ")!" or last[0] in ("number", "symbol", "constant")):
                raise NotMath  # 2 3, 7R2, (1) 3 (2) 4; but (n-2)2^n
            else:
                factors.append(self.power())
        if len(factors) > 1 and re.search("'word'|(vec|hat).*(vec|hat)", str(factors)):
            raise NotMath  # 12 by 5, May 5; \hat x\hat p
        node = joined("*", factors)
        return ("unit", node, unit) if unit else node

    def starts_factor(self) -> bool:
        """Whether a factor follows, without a sign before it."""
        return self.peek() not in (*_NO_FACTOR, *"|" * self.bars)

    def unit(self, factor: tuple) -> str:
        """The unit that follows, or nothing; step over it. Without \\text{} it stands in no brackets."""
        if sign := self.take("%", "$", r"\degree"):
            return sign
        start, digits = self.at, self.peek(-1)[:1].isdigit()
        if not (found := self.match(UNIT, space=" ")):
            return ""
        digits = digits and factor[0] in ("number", "inverse") or factor[:2] == ("^", number(10))
        known = WORD_UNIT.fullmatch(found[0]) or SYMBOL_UNIT.fullmatch(found[0]) and digits
        roman = {t.roman for t in self.tokens[start:self.at] if t.isalpha()} == {True}
        if not roman and (self.depth or not known):
            self.at = start
            return ""
        return found[0].strip(" .s")

    def power(self, exponent: bool = True) -> tuple:
        """A primary with factorial or an exponent."""
        node = self.primary()
        if self.take("!"):
            node = ("factorial", node)
        if exponent and self.take("^"):
            base, above = node, self.argument()
            if base[0] == "symbol" and above in (("symbol", "T"), minus(number(1)))[:1 + base[1].isupper()]:
                raise NotMath  # x^TA, PDP^{-1}: the order of matrices counts
            node = ("^", base, above)
        if exponent and self.peek() in ("^", "!"):
            raise NotMath
        return node

    def argument(self) -> tuple:
        r"""What follows ^, \frac or \sqrt: braces, a command, a digit (after ^ a number), a letter."""
        after, t = self.peek(-1), self.peek()
        if self.take("-"):
            return minus(self.primary())
        if t.isdigit() and after != "^" or t.isalpha() and not t.roman:  # \frac12, x^ab
            self.tokens[self.at:self.at + 1] = map(Token, t)
        return self.primary()

    def primary(self) -> tuple:
        """The smallest piece: a number, a symbol, something in brackets, a function with its argument."""
        self.depth, self.parsed = self.depth + 1, self.parsed + 1
        if self.depth > _DEEPEST or self.parsed > _MOST:
            raise NotMath
        t = self.expect()
        name = t.removeprefix("\\")
        if t[0].isdecimal() and self.match(r"_|\^?\{?'", step=False):  # 52_8, 5'
            node = self.symbol(t)
        elif t[0].isdecimal():
            self.at -= 1
            node = self.number()
        elif t == "$":
            node = ("unit", self.product(), "$")
        elif t in ("(", "[", r"\{"):
            node = self.group(t)
            if node == REALS and self.match(r"(?:\\setminus|\\backslash|-)\\\{"):
                node = all_but(self.sum())
                self.expect(r"\}")
        elif t == "{":
            node = self.items("}")
            self.expect("}")
        elif t in ("|", r"\lfloor", r"\lceil"):
            bars, self.bars = self.bars, t == "|"
            node = (t, self.sum())
            self.bars = bars
            self.expect(t.replace(r"\l", r"\r"))
        elif t == r"\frac" and (derivative := self.match(r"\{d\\?[a-zA-Z]+\}\{d[a-z]\}")):
            node = ("symbol", derivative[0] + "'")
        elif t == r"\frac":
            node = ("*", self.argument(), ("inverse", self.argument()))
        elif t == r"\binom":
            node = ("binomial", self.argument(), self.argument())
        elif name == "sqrt":
            degree = self.items("]") if self.take("[") else number(2)
            self.take("]")
            radicand = self.primary() if self.peek().isdigit() else self.argument()  # \sqrt13
            node = ("^", radicand, ("inverse", degree))
        elif name in FUNCTIONS:
            node = self.function(name)
        elif t == r"\begin":
            node = self.environment()
        elif t in _MARKS and (marked := self.match(
                r"\{[^{}]*\}| ?(?:\\[a-zA-Z]+|[A-Z]{3}|[a-zA-Z])(?![a-zA-Z])", space=" ")):  # not \bar xy
            node = self.symbol(f"{t} {marked[0].strip('{} ')}")
        elif name in ("e", "i", "pi", "infty"):
            node = ("constant", name)
        elif t.isalpha():
            node = self.letters(t)
        elif t in _LETTERS:
            node = self.symbol(t)
        else:
            raise NotMath
        self.depth -= 1
        return node

    def number(self) -> tuple:
        r"""5, 1,000, 0.1\overline{6}, 2e5."""
        before, t = self.peek(-1), self.peek()
        behind = "(?=, )" if ")" in self.ends and before != "," else r"(?!,?\d)"  # (1,200) is a point
        if repeating := self.match(_REPEATING):
            start, period = filter(None, repeating.groups())
            value = Fraction(start + 99 * period).limit_denominator(10 ** 40)  # exact
        else:
            listed = before == "," and not t.space  # 4,16,256
            groups = self.peek(1) == "," and not listed and self.match(_GROUPS + behind, space=" ")
            value = Fraction(groups[0].replace(",", "") if groups else self.expect())
        if before == "," and re.fullmatch(r"0\d+", t):
            raise NotMath  # 1,2,000
        return ("number", value)

    def letters(self, t: Token) -> tuple:
        r"""A name (x, AB), a product of letters (xy, AB^2), or words: in \text{}, in a row, or alone."""
        before, after = self.peek(-2), self.peek()
        alone = {before, after} <= {"", "(", ")", *_SEPARATORS}
        words = t.roman or self.is_word() or alone and re.fullmatch(_WORDS, t)
        name = t.isupper() and len(t) < 6 and before in _OPEN and after in {*_OPEN[:-4]} - {"^", "!"}
        if len(t) == 1 or not words and name:
            return self.symbol(t)
        if not words and re.fullmatch("[a-zA-Z]{,3}|[A-Z]{,5}", t):
            self.tokens[self.at - 1:self.at] = map(Token, t)
            self.at -= 1
            return self.primary()
        words = [t]
        while self.is_word():
            words.append(self.expect())
        return ("word", " ".join(words))

    def is_word(self) -> bool:
        """Whether a word follows."""
        t = self.peek()
        return t.isalpha() and len(t) > 1 and t.space and t not in (*_NO_FACTOR, *FUNCTIONS)

    def symbol(self, name: str) -> tuple:
        """A symbol with its index and primes; one with arguments is a call."""
        if self.take("_"):
            braced = self.match(r"\{([^{}]*)\}")
            index = (braced[1] if braced else self.expect()).lstrip("\\")
            name += "_" + index
        if name in ("P", "E") and (event := self.match(r"\([^()]*[=<>|\\][^()]*\)|\[[^][]*\]")):
            return ("symbol", name + event[0])  # P(X=1), E[X]
        if primes := self.match(r"'+|\^\{?'+\}?"):
            name += "'" * primes[0].count("'")
        power = r"\^\{?\(" + r"|\^(?:\{[^{}]*\}|\d)\(" * (name[0] in "fghFGH")
        if self.match(power, step=False):  # a derivative; f^2(x)
            raise NotMath
        simple = r"(?:\d+|[a-zA-Z]|\\(?!sin|cos|tan|ln|log|exp|sqrt)[a-zA-Z]+)\)"
        simple += "(?==)" * ("_" not in name and name[0] not in "fghFGHuvpPQE")
        often = "".join(self.tokens).count(name + "(") > 1  # mg(h-R) is a product, but g(x+1)-g(x) is not
        call = name[0] == "f" or name[0] in "ghFGHpPQuv" and (often or self.match(r"\([^()]*\)=", step=False))
        if not self.match(r"\(" if call else rf"\((?=0\)|[^()]*,[^()]*\)|{simple})"):
            return ("symbol", name)
        arguments = self.items(")")
        self.expect(")")
        return ("call", name, *(arguments[1:] if arguments[0] == "list" else [arguments]))

    def function(self, name: str) -> tuple:
        r"""\sin^2 x, \log_2(8), \ln 2x: the argument is in brackets, or all up to the next function.

        \cos\pi/3, \sin\frac{\pi}6x and \sin\omega(t-s) may mean either."""
        base = self.argument() if self.take("_") else None
        power = self.argument() if self.take("^") else None
        opening = self.peek()
        factors = [self.power(exponent=opening != "(")]  # \ln(2)^2 is (\ln 2)^2
        while opening not in "({" and (self.starts_factor() or self.peek() == "/") and (
                self.peek(self.peek() == "/").removeprefix("\\") not in FUNCTIONS):
            if opening in (r"\frac", r"\sqrt", "|") or self.peek() in "([|/":
                raise NotMath
            factors.append(self.power())
        node = joined("*", factors)
        if node[-1] == r"\degree" or self.take(r"\degree"):
            node = ("*", node[1] if node[0] == "unit" else node, ("constant", "pi"), number(Fraction(1, 180)))
        node = ("ln" if name == "log" else name, node)
        if name == "log" or base:  # the base of \log is not known
            node = ("*", node, ("inverse", ("ln", base)) if base else ("symbol", r"\log"))
        return ("^", node, power) if power else node

    def group(self, opening: str) -> tuple:
        r"""(5), a point, an interval ([1, 2)), a set ({1, 2}, {x | x > 1}), a matrix in brackets."""
        bars, self.bars = self.bars, opening == r"\{"
        node = self.items(")", "]", *["|", ":", r"\}"] * (opening == r"\{"), anew=opening == r"\{")
        closing = self.take(")", "]", r"\}")
        parts = node[1:] if node[0] == "list" else [node]
        if opening == r"\{" and self.take("|", ":"):  # {x | x > 1} is x > 1
            self.bars, rule = False, self.items(r"\}")
            name = node[2] if node[3:] == (REALS,) else node
            node = rule if name[0] == "symbol" and name in walk(rule) else None
            self.expect(r"\}")
        elif opening == r"\{":
            node = ("set", *parts) if closing else None
        elif not closing:
            raise NotMath
        elif node[0] in ("list", "or") or node[0] != "matrix" and opening + closing != "()":
            node = ("group", opening, closing, *parts)
        self.bars = bars
        if not node:
            raise NotMath
        return node

    def environment(self) -> tuple:
        """A matrix (also cases), or the equations of a system as a list."""
        name = self.match(r"\{(?![vV]m)\w+(?:\\cdot)?\}")  # vmatrix is a determinant
        rows, row, t, ends = [], [], "&", ("&", r"\\", r"\end")
        while t != r"\end":
            row.append(self.items(*ends, anew=True))
            t = self.expect(*ends)
            if t != "&":
                rows, row = rows + [("row", *row)] * (row != [("list",)]), []
        if not (name and rows and self.match(re.escape(name[0]))):
            raise NotMath
        if all(len(row) == 2 and row[1][0] == "relation" for row in rows):
            return ("list", *(row[1] for row in rows))
        return ("matrix", *rows)
