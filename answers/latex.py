r"""An answer's text as tokens. Each table is applied once, and says which spellings mean the same.

A token knows whether it stood in \text{}, whether a space is before it and % or \$ behind it.
"""

import re
import unicodedata
from itertools import groupby

_ALIASES = {  # a command: those that mean the same
    r"\frac": "dfrac tfrac nicefrac sfrac", r"\binom": "dbinom tbinom", r"\cdot": "ast", "/": "div",
    "<": "lt", ">": "gt", r"\le": "leq leqslant", r"\ge": "geq geqslant", r"\ne": "neq",
    "|": "lvert rvert vert mid", r"\{": "lbrace", r"\}": "rbrace", ":": "colon", r"\land": "wedge",
    r"\lor": "vee", r"\ldots": "dots cdots dotsc", "P": "Pr",
    r"\approx": "simeq", r"\epsilon": "varepsilon", r"\phi": "varphi",
    r"\hat": "widehat", r"\vec": "overrightarrow", r"\angle": "measuredangle", r"\cup": "bigcup",
    "i": "imath", "j": "jmath", "'": "prime",
    r"\degree": "degrees textdegree", "%": "%", "$": "$",
    "": """left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr limits displaystyle
        textstyle scriptstyle rm bf it tt small large Large LARGE huge Huge boldsymbol mathbf bm mathit
        mathsf mathord bold normalsize underline emph boxed fbox ensuremath
        checkmark blacksquare therefore nonumber pounds euro""",
    r"\text": "textbf textit textrm mathrm mbox operatorname"}
_ALIAS = {rf"\{other}": command for command, others in _ALIASES.items() for other in others.split()}
_ALIAS |= {"*": r"\cdot", "<=": r"\le", ">=": r"\ge", "inf": r"\infty", "infinity": r"\infty"}
STYLES = "|".join(_ALIASES[""].split())
_SIGNS = """\u2044\u00f7 / \u2212\u2010\u2013\u2014 - \u27e8 \\langle \u27e9 \\rangle \u00d7 \\times
    \u00b7\u22c5\u2217 \\cdot \u00b0\u00ba\u02da ^\\circ \u221e \\infty \u2264\u2266\u2a7d \\le
    \u2265\u2267\u2a7e \\ge \u2260 \\ne \u2248 \\approx \u2261 \\equiv \u00b1 \\pm \u222a \\cup \u2229 \\cap
    \u2208 \\in \u221a \\sqrt \u2205 \\{\\} \u230a \\lfloor \u230b \\rfloor \u2308 \\lceil \u2309 \\rceil
    \u211d \\mathbb{R} \u3001 , \u3002 . \u2236 : \u201c\u201d " \u6216 \\text{~or~}
    \u548c\u4e14 \\text{~and~} \u2713 \\checkmark \u03b1 \\alpha \u03b2 \\beta \u03b8 \\theta
    \u03bb \\lambda \u03bc \\mu \u03c0 \\pi \u03c3 \\sigma \u03c6 \\phi \u03c9 \\omega \u0394 \\Delta
    \u03a9 \\Omega""".split()
_SIGN = {ord(sign): command + " " * ("\\" in command)
         for signs, command in zip(_SIGNS[::2], _SIGNS[1::2]) for sign in signs}
_LEVELS = {"<supe": "^{%s}", "<sub>": "_{%s}"}  # of Unicode
# "cm", "m/s", "kg m^2"; words, one of them a plural or a known unit: "sq feet"; those that need no \text{}
_SI = (r"(?!pm)(?:(?:[munpfkMGTcd]|\\mu ?)?(?:m|g|s|L|J|N|W|V|A|K|T|C|F|Hz|eV|Pa|mol|rad|bar|cal)|ml|min|hr?"
       r"|in|ft|yd|mi|lbs?|oz|mph|kmh|yrs?|sec|deg|atm|erg|AU|kWh|dB|rpm|ppm|mmHg|[kM]?\\Omega"
       r"|\\AA|[\u4e2a\u5143\u5186\u4eba\u5ea6]|(?:\u5e73\u65b9)?\u5398\u7c73)(?:\^\{?-?\d\}?)?")
SYMBOLS = rf"{_SI}(?:(?:[ /.(]|\\cdot)+{_SI}\)?)*"
_KNOWN = (r"(?:percent(?:age)?|pct|degree|cent|dollar|hour|minute|second|day|week|month|year|met(?:er|re)"
          r"|mile|yard|unit|gram|pound|lit(?:er|re)|point|way|USD|cup|yuan|[eE]uro|rupee|gallon|acre|ton"
          r"|ohm)s?|feet|foot|ft|inch(?:es)?|people|men|women|children")
_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen""".split()
# a known word or a plural, but no number, fraction or word such as plus, less, has
_WORD_UNIT = (rf"(?:(?:sq\.?|square|cubic|percentage) ?)?(?:{_KNOWN}|"
              rf"(?!(?:{'|'.join(_NUMBERS)}|\w+th|third|quarter|dozen|score|lakh|crore|\w+wards?|\w*illion"
              r"|thousand|hundred|has|was|co|off|hal(?:f|ve))(?:e?s)?\b)[a-z]{2,}(?<![ius])s)"
              rf"(?: (?:squared|cubed|old)|(?: per |/) ?(?:(?:square|cubic) )?(?:{_KNOWN}))?"
              r"(?:\^\{?\d\}?)?")
UNIT = re.compile(rf" ?(?:{_WORD_UNIT}|{SYMBOLS})(?![a-zA-Z_])\.?"
                  rf"|\\frac\{{ ?(?:{SYMBOLS})\}}\{{ ?(?:{SYMBOLS})\}}")
WORD_UNIT = re.compile(f" {_WORD_UNIT}")
SYMBOL_UNIT = re.compile(r" ?(?:(?:[cmk]m|ft|in|yd|mi)(?:\^\{?\d\}?)?|kg|mph|kWh|rpm|ppm|mmHg|Torr|mL|mol"
                        r"|[kMG]?(?:eV|Hz|Pa)|min|sec|hrs?|yrs?|lbs?|oz|nm|rad|deg|[\u4e2a\u5143\u5186\u4eba\u5ea6]|(?:\u5e73\u65b9)?\u5398\u7c73"
                        r"|(?:[ck]?m|ft|mi)/ ?(?:h|hr|min|s|sec)(?:\^\{?\d\}?)?)")


_OPENED = r"(?:\\(?:text[a-z]*|math(?:rm|sf)|mbox)\{)?"
# What is seen better in text than in tokens: a name, an example, a pattern, what is put there (nothing: the
# match is deleted; \t at the end: a space). Three spaces part the columns, eight at a line's start continue a
# pattern. OPENED stands for \text{ or the like, or nothing; STYLES for the names of commands that say
# nothing. The order matters, as each pattern sees what those before it left: "frame" takes off a box or
# braces around all, so that ^ and $ in later patterns mean the ends of the answer.
_TABLE = r"""
thousands   1{,}000   (?<![\w^])(?!0\D)(\d{1,3})(?:\{,\}|\\[,;: ] ?| )(?=\d{3}(?!\d))   \1
space   5\,x   (?<!\\)\\[,;:> ]|~   \t
nothing   $5$   (?<!\\)(?:\$|\\[()\[\]])|`|\\! ?|\\(?:left|right|displaystyle)(?![a-z])\.?
        |\.(?= ?\\end)
layout   \color{red}5   \\(?:(?:text)?color(?:box)?|[hv]?(?:phantom|space)) ?\{[^{}]*\}
        |(?<=\{array\})\{\w*\}|(?<=\\\\)\[\w*\]|& ?(?==)
bold   **5**   ^[*"]+([^*"]+)[*"]+$   \1
dots   1, ..., 9   \.\.\.   \\ldots\t
comma   x=1\quad y=2   [, ]*(?:\\q?quad[, ]*)+   ,\t
ends   =5.   (?:[.,:; ]|\\(?![{}a-zA-Z%$]))+(\}*)$|^(?:[,;= ]|\\Rightarrow)+   \1
frame   \boxed{5}   ^(?:\\(?:STYLES)(?![a-z]) ?|\{)+((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}+$   \1
degrees   20^\circ\text{C}   \^ ?(?:\{ ?\\circ ?\}|\\circ)(?: ?OPENED ?[CF]\b\}?)?   \\degree\t
all   all reals   ^OPENED[Aa]ll real(?: number)?s\}?$   \\mathbb{R}
none   no roots   (?:[Tt]here (?:is|are) )?\b([Nn]o (?:\w+ )?(?:solution|root))s?\b   \1
reals   \mathbb{R}   \\mathbb ?(?:R|\{ ?R ?\})(?! ?[_^])   (-\\infty,\\infty)
probability   \mathbb{P}(A)   \\mathbb ?\{ ?([EP]) ?\}   \1
point   .5   (?<![\d.])\.(?=\d)   0.
empty set   \emptyset   \\(?:emptyset|varnothing)(?![a-z])   \\{\\}
inverse   \sin^{-1}x   \\(sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|ln|log|exp) ?\^ ?\{?
         ?-1 ?\}?   \\arc\1\t
million   5 million   (?<=\d) ?(?:\\text\{ ?million\}|[Mm]illion\b)   \\cdot 10^{6}
base   (52)_8   ^\(([0-9A-F]+)\)_   \1_
case   1 & \text{if } x>0   & ?\\text\{ ?(?:if|for|when) ?\}   &\t
system   \{\begin{a}1\end{a}   \\\{ ?(\\begin.*\\end\{\w*\})$   \1
vector   \langle1,2\rangle   \\langle([^<>]*,[^<>]*)\\rangle   (\1)
modulus   3 (mod 7)   \(? ?OPENED\\?\b[bp]?mod(?![a-z])[ {}]*(\w+)\}? ?\)?   \\pmod \1
morning   3:05 am   (?<=:\d\d) ?OPENED ?[aA]\.? ?[mM]\.? ?\}?$   :a
evening   3:05 pm   (?<=:\d\d) ?OPENED ?[pP]\.? ?[mM]\.? ?\}?$   :p
decimal comma   3{,}5   (?<=\d)\{[,.]\}(?=\d)|(?<=\b0),(?=0\d)   .
rounding   5 (approx.)   \s?OPENED ?\((?i:approx|rounded|to the nearest)[^()]*\)\}?$
"""
REWRITES = []
for line in re.sub(r"\n {8}", "", _TABLE).strip().splitlines():
    name, example, pattern, *new = re.split(" {3}", line)
    pattern = re.compile(pattern.replace("OPENED", _OPENED).replace("STYLES", STYLES))
    REWRITES.append((name, example, pattern, "".join(new)))
# 1e-5, 2.0e-5, 2e5 and 2e-10 are powers of ten, 2e-1 has Euler's e
_TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|(?:\b1|\d*\.\d+|\d+(?=[eE](?:\d|[-+]\d\d)))[eE][-+]?\d{1,3}(?![\w.])"
                    r"|\d+(?:\.\d+)?|(?<=[_^])[a-zA-Z]|[a-zA-Z]+|[^\W\d_a-z]+"
                    r"|[<>]=|\s+|.", re.DOTALL)


class Token(str):
    r"""A word, a number, a command or a sign. roman: it stood in \text{}; space: white space is before it."""
    roman = space = False


def to_ascii(text: str) -> str:
    """Signs and letters as LaTeX has them: full-width forms, superscripts, Greek; nothing invisible."""
    if text.isascii():
        return text
    text = "".join(_LEVELS.get(level, "%s") % "".join(run) for level, run in groupby(
        text.translate(_SIGN), lambda sign: unicodedata.decomposition(sign)[:5]))
    text = re.sub("(?<=\\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)  # 3 1/2
    text = re.sub("[\u2460-\u249b\u24ea-\u24ff\u2776-\u2793]", r"\\o \g<0> ", text)  # circled
    text = unicodedata.normalize("NFKC", text).translate(_SIGN)  # NFKC makes signs, too
    # Cs: half of a character, which nothing can encode
    return "".join(sign for sign in text if unicodedata.category(sign) not in ("Cf", "Cs", "Sc"))


def unescaped(text: str) -> str:
    """The text with one backslash for two, if all of them are two and a command follows one."""
    halved = text.replace("\\\\", "\\")
    doubled = re.search(r"\\\\[a-zA-Z]{2}", text) and 2 * halved.count("\\") == text.count("\\")
    return halved if doubled else text


def tokens_of(text: str) -> list[Token]:
    """The tokens of an answer without what says nothing: styles, remarks, words before a number, points."""
    for _, _, pattern, new in REWRITES:
        text = " ".join(pattern.sub(new, text).split()) or text  # nothing is no answer
    found, space, braces, begins = [], False, [], False
    for match in _TOKEN.finditer(text):
        t = match[0].rstrip("*") or "*"
        t = str(_NUMBERS.index(t.lower())) if t.lower() in _NUMBERS else _ALIAS.get(t, t)
        if t.isspace():
            space = True
            continue
        if t == "{":
            braces.append(begins)
        dropped = t == "{" and begins or t == "}" and braces and braces.pop()  # those of \text{}
        if t not in ("", r"\text") and not dropped:
            found.append(Token(t))
            found[-1].roman, found[-1].space, space = begins or any(braces), space, False
        begins = t == r"\text"
    return found
