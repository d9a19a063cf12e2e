r"""An answer's text as tokens. Each table is applied once, and says which spellings mean the same.

A token knows whether it stood in \text{}, whether a space is before it and % or \$ behind it.
"""

import re
import unicodedata

_ALIASES = {  # a command: those that mean the same
    r"\frac": "dfrac tfrac cfrac nicefrac sfrac", r"\binom": "dbinom tbinom", r"\cdot": "ast", "/": "div",
    "<": "lt", ">": "gt", r"\le": "leq leqslant leqq", r"\ge": "geq geqslant geqq", r"\ne": "neq",
    "|": "lvert rvert vert mid", r"\{": "lbrace", r"\}": "rbrace", ":": "colon", r"\land": "wedge",
    r"\lor": "vee", r"\ldots": "dots cdots dotsc", r"\emptyset": "varnothing", r"\\": "cr",
    r"\approx": "simeq thickapprox approxeq doteq", r"\epsilon": "varepsilon", r"\phi": "varphi",
    r"\hat": "widehat", r"\vec": "overrightarrow", r"\angle": "measuredangle", r"\cup": "bigcup",
    r"\tan": "tg", r"\cot": "ctg", r"\arctan": "arctg", "i": "imath", "j": "jmath", "'": "prime",
    r"\degree": "degrees textdegree", "%": "%", "$": "$",
    "": """left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr limits displaystyle
        textstyle scriptstyle rm bf it sf tt small large Large LARGE huge Huge boldsymbol mathbf bm pmb mathit
        mathsf mathtt mathord bold normalsize underline emph boxed fbox ensuremath
        checkmark blacksquare square qed therefore nonumber pounds euro""",
    r"\text": "textbf textit textrm textnormal textsf texttt mathrm mbox hbox operatorname"}
_ALIAS = {rf"\{other}": command for command, others in _ALIASES.items() for other in others.split()}
_ALIAS |= {"*": r"\cdot", "<=": r"\le", ">=": r"\ge", "inf": r"\infty", "infinity": r"\infty"}
STYLES = "|".join(_ALIASES[""].split())
_SIGNS = """\u2044\u00f7 /
    \u2212\u2010\u2013\u2014 -
    \u27e8 \\langle
    \u27e9 \\rangle
    \u00d7 \\times
    \u00b7\u22c5\u2217 \\cdot
    \u00b0\u00ba\u02da ^\\circ
    \u221e \\infty
    \u2264\u2266\u2a7d \\le
    \u2265\u2267\u2a7e \\ge
    \u2260 \\ne
    \u2248 \\approx
    \u2261 \\equiv
    \u00b1 \\pm
    \u222a \\cup
    \u2229 \\cap
    \u2208 \\in
    \u221a \\sqrt
    \u2205 \\emptyset
    \u230a \\lfloor
    \u230b \\rfloor
    \u2308 \\lceil
    \u2309 \\rceil
    \u211d \\mathbb{R}
    \u3001 ,
    \u3002 .
    \u2236 :
    \u201c\u201d "
    \u6216 \\text{ or }
    \u548c\u4e14 \\text{ and }
    \u2713\u2714\u220e\u25a0 \\checkmark"""
_SIGN = {ord(sign): command + " " * ("\\" in command) for line in _SIGNS.splitlines()
         for signs, command in [line.split(maxsplit=1)] for sign in signs}
# "cm", "m/s", "kg m^2"; words, one of them a plural or a known unit: "sq feet"; those that need no \text{}
_SI = (r"(?:(?:[munpfkMGTcd]|\\mu ?)?(?:m|g|s|L|J|N|W|V|A|K|T|C|F|Hz|eV|Pa|mol|rad|bar|cal)|ml|min|hr?|in|ft"
       r"|yd|mi|lbs?|oz|mph|kmh|yrs?|sec|deg|atm|erg|dyn|AU|pc|kWh|dB|rpm|ppm|mmHg|Torr|gal|[kM]?\\Omega"
       r"|\\AA)(?:\^\{?-?\d\}?)?")
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
_CHINESE = ("(?:(?![\u4e07\u4ebf\u5343\u767e\u5341\u534a\u5206\u6210\u5146\u6298\u4ee5\u4e0a\u4e0b\u591a"
            "\u5c11\u524d\u540e\u5927\u5c0f\u500d\u7684\u51e0\u4e0d])[\u4e00-\u9fff])+")
UNIT = re.compile(rf" ?(?:{_WORD_UNIT}|{SYMBOLS}|{_CHINESE}|st|nd|rd|th)(?![a-zA-Z_])\.?"
                  rf"|\\frac\{{? ?(?:{SYMBOLS}|[a-z]+s)\}}?\{{? ?(?:{SYMBOLS}|{_KNOWN})\}}?")
WORD_UNIT = re.compile(rf" {_WORD_UNIT}| ?{_CHINESE}")
SYMBOL_UNIT = re.compile(r" ?(?:(?:[cmk]m|ft|in|yd|mi)(?:\^\{?\d\}?)?|kg|mph|kWh|rpm|ppm|mmHg|Torr|mL|mol"
                        r"|[kMG]?(?:eV|Hz|Pa)|min|sec|hrs?|yrs?|lbs?|oz|nm|rad|deg|th"
                        r"|(?:[ck]?m|ft|mi)/ ?(?:h|hr|min|s|sec)(?:\^\{?\d\}?)?)")
_UNITS = {other: line.split()[0] for line in """h hr hour|min minute|s sec second|yr year|% percent|$ dollar
    |ft foot feet|in inch inche|lb pound|oz ounce|mi mile|cm centimeter centimetre|m meter metre|km kilometer
    kilometre|g gram|kg kilogram|L liter litre|degree deg circ circC circF degreeC""".split("|")
    for other in line.split()}
_ROMAN = r"\\(?:text[a-z]*|math(?:bf|rm|sf|it)|mbox)\{"
_TEXT = rf"(?:{_ROMAN})?"


def _constants(names: str, word: str, field: str) -> str:
    """The pattern of a remark on names that stand for all numbers of a field."""
    return (rf"(?:,? ?(?:\\text\{{,? ?|\b)(?:for|where)\b(?:\b(?:any|all|every|some|{word}|arbitrary|numbers?"
            rf"|constants?|is|are|an|[{names}])\b|\\text|\\in ?\\mathbb ?\{{?{field}\}}?|[{{}}, ])*"
            rf"|(?:,|\\forall|\() ?(?:\\forall ?)?[{names}](?:, ?[{names}])* ?\\in ?"
            rf"(?:\\math(?:bb|bf) ?\{{?)?{field}\}}? ?\)?)$")


_REWRITES = [(re.compile(pattern), new) for pattern, new in (  # what is seen better in text than in tokens
    (r"(?<!\.)[.\u3002] ?(\}*)$", r"\1"),
    # i, j, k as unit vectors
    (r"\\(?:vec|overrightarrow|(?:wide)?hat|mathbf|boldsymbol|bm) ?(?:\{ ?\\?([ijk])(?:math)? ?\}"
     r"|\\?([ijk])(?:math)?(?![a-zA-Z]))", r"\\hat{\1\2}"),
    # {5}, $5$, \boldsymbol{5}, \textcolor{red}{5}
    (rf"^(?:\\(?:{STYLES})(?![a-z]) ?|\\(?:text)?color(?:box)? ?\{{\w*\}}|[{{$]|\\[(\[])+"
     r"((?!.*\\(?:over|choose)(?![a-z]))(?:[^{}$]|\{(?:[^{}]|\{[^{}]*\})*\})*)(?:[}$]|\\[)\]])+$", r"\1"),
    (r"^([*_\"'`]+)(.+?)\1$", r"\2"),  # **73**
    (r"\{ ?\\rm(?![a-z]) ?", r"\\text{"),
    (r"\.\.\.", r"\\ldots "),
    (r"\\not ?=|(?<!\d)!=", r"\\ne "),  # 5!=120
    (r"\\\\\[\w*\]", r"\\\\"),  # \\[3pt]
    (r"\^([a-zA-Z\d]|\{[^{}]*\})_([a-zA-Z\d]|\{[^{}]*\})", r"_\2^\1"),  # x^2_1
    (r"\+ ?/ ?-", r"\\pm "),
    # what follows from something is the answer, if it has a value: \frac{m}{n}\Rightarrow m+n=204
    (r"^.*\\(?:Rightarrow|implies|therefore)(?![a-zA-Z])(?=[^=]*= ?[^=a-zA-Z]+$)"
     r"|^\\(?:Rightarrow|implies)(?![a-zA-Z])", ""),
    (r" ?,\s*\\!\s*(?=\d{3})|(?<=\d)(?:\{,\}|\\[,;: ] ?)(?=\d{3}(?!\d))|(?<=\d)'(?=\d{3})", ""),
    (r"(?<=\d) ?~ ?(?=\d)", r"\\sim "),
    (r"(?<!\\)\\(?:[,;: ]|thinspace(?![a-z]))|~", " "),
    (r"(?<!\\)\$|(?:^|(?<==)) ?\\sim ?(?=[\d.])|[\"`]|\\[!>]|\.(?= ?\\end)|\\(?:left|right)\."
     r"|(?<!\\)\\[()\[\]]|(?<![\w)}])\*\*|\*\*(?![\w({\\-])"
     r"|\\(?:(?:text)?color(?:box)?\s*|[hv]?(?:phantom|space))\{[^{}]*\}", ""),
    (r"(\\cup|,)? *(?:\\q?quad *)+(?=(\\cup|\\text|\\math|\\mbox|,|$)?)",  # a comma between values
     lambda match: f"{match[1] or ''} " if match[1] or match[2] is not None else ", "),
    (r"\\[dt]?frac ?\{ ?d ?(\\?[a-zA-Z]*) ?\}\{ ?d ?([a-z]) ?\}", r"\\overline{d\1 d\2}'"),  # dx/dt
    (r"(?:[a-z] ?\\in ?)?\\mathbb ?\{?R\}? ?(?:\\(?:small)?setminus|\\backslash|-) ?\\\{ ?([^{},]*)\\\}",
     r"x\\ne \1"),
    (r"\\langle([^<>]*,[^<>]*)\\rangle", r"(\1)"),
    (r"\\(?:operatorname|mathrm|text) ?\{ ?((?:arc)?c?tg|gcd|lcm) ?\}", r"\\\1 "),
    (r"\\(max|min|gcd|lcm) ?(?:\\left)? ?\\\{([^{}\\]*)(?:\\right)?\\\}", r"\\\1(\2)"),
    (r"U(?<=[)\] ]U) ?(?=[(\[])", r"\\cup "),
    (r",? ?& ?(?:\\text\{ ?(?:if|for|when)? ?\} ?)?(=?)|(?<=\{array\})\{\w*\}",  # x &= 1
     lambda match: match[1] or "&" * (match[1] is not None)),
    (rf" ?\(?(?:_\{{)?{_TEXT} ?\(?(?:in )?base ?\}}? ?(\w+)\)?\}}*\)?$", r"_{\1}"),  # 52 (base 8)
    (r"^\(([0-9A-F]+)\)_", r"\1_"),
    (rf"\(? ?{_TEXT}\\?\b[bp]?mod(?![a-z])[ {{}}]*(\w+)\}}? ?\)?", r"\\pmod \1"),
    (r"(?:C_(?<!\wC_) ?\{?(\d+)\}? ?\^|(?:\{\}[_^]|[_^](?<![\w)}\]].)) ?\{?(\d+)\}? ?C ?_) ?"
     r"\{?(\d+)\}?(?![\w\\(])", r"\\binom{\1\2}{\3}"),
    (rf"^{_TEXT}[Aa]ll real(?: number)?s\}}?$", r"\\mathbb{R}"),
    (rf"(?<=:\d\d) ?{_TEXT} ?([apAP])\.? ?[mM]\.? ?\}}?$", lambda match: ":" + match[1].lower()),  # 3:05 p.m.
    # thousands: 1,\!000, 1{,}000, 1\,000, 1'000, 1 000; 1.000.000, 1,00,000; 1,000 but not 1,2,3
    (r"(?<=\d)(?<!\d{4}) (?=\d{3}(?: \d{3})*(?!\d))", ""),
    (r"^\d{1,3}(?:\.\d{3}){2,}$|^\d{1,2}(?:,\d{2})+,\d{3}$", lambda match: re.sub("[.,]", "", match[0])),
    (r"^.*\d,\d{3}.*$", lambda match: _thousands(match[0])),
    (r"(?<=\d)\{[,.]\}(?=\d)", "."),  # 3{,}5
    (r"\.(\d*?)(\d{1,3}?)\2{2,}(?:\\[lc]?dots[cb]?)(?![a-z])|(?<=^0)\.\((\d+)\)$",  # 0.1666\ldots, 0.(6)
     r".\1\\overline{\2\3}"),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot) ?\{?(\d+)\}?", lambda match: _repeating(*match.groups())),
    (r"(?<=\d) ?x ?(?=10\^)", r"\\cdot "),
    (r"(?<=\d) (\d+) ?/ ?(\d+)(?![\d.])", r"\\frac{\1}{\2}"),  # 1 1/2
    # alone, 1e-5, 2.0e-5, 2e5 and 2e-10 are powers of ten; 2e-1 has Euler's e
    (r"((?:^|[=,(]|style) ?-?)((?:1|\d*\.\d+)(?=[eE])|\d+(?=[eE](?:\d|[-+]\d\d)))[eE]([-+]?\d+)"
     r"(?= ?(?:$|[,)]|\\text|\\m|\^\\circ))", r"\1\2\\cdot 10^{\3}"),
    (r"\*\*", "^"),
    # for any real c; where k is an integer; c\in\mathbb{R}
    (_constants("a-jlo-z", "real", "R"), ""),
    (_constants("kmn", "integers?", "Z"), ""),
    (r"(?:[.,:; ]|\)(?<=^[A-J]\))|\\(?![{}a-zA-Z%$]))+(\}*)$"
     r"|^(?:(?:[,;=]|[a-z] ?\\in ?\\mathbb ?\{?R\}? ?,|\\displaystyle(?![a-z])) ?)+", r"\1"))]
_TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|\d+(?:\.\d+)?|\.\d+|(?<=[_^])[a-zA-Z]|[a-zA-Z]+|[^\W\d_a-z]+"
                    r"|[<>]=|\s+|.", re.DOTALL)


class Token(str):
    r"""A word, a number, a command or a sign. roman: it stood in \text{}; space: white space is before it."""
    roman = space = False


def to_ascii(text: str) -> str:
    """Signs and letters as LaTeX has them: full-width forms, superscripts, Greek; nothing invisible."""
    if text.isascii():
        return text
    text = re.sub(r"(?![0-9])\d", lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = re.sub("[\u00b2\u00b3\u00b9\u2070-\u207f]+", "^{\\g<0>}", text)
    text = re.sub("[\u2080-\u2089]+", "_{\\g<0>}", text)
    text = re.sub("(?<=\\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)  # 3 1/2
    text = re.sub("[\u2460-\u249b\u24ea-\u24ff\u2776-\u2793]", r"\\o \g<0> ", text)  # circled
    text = unicodedata.normalize("NFKC", text.translate(_SIGN)).translate(_SIGN)  # NFKC makes signs, too
    text = re.sub("[\u0391-\u03a1\u03a3-\u03c9]", lambda letter: _greek(letter[0]), text)
    return "".join(character for character in text if unicodedata.category(character) not in ("Cf", "Sc"))


def _greek(letter: str) -> str:
    command = unicodedata.name(letter).split()[-1].replace("LAMDA", "LAMBDA").lower()
    return "\\" + (command.capitalize() if letter.isupper() else command) + " "


def _repeating(whole: str, digits: str, period: str) -> str:
    """The fraction of a repeating decimal: of 0.1 and the period 6 it is 15/90."""
    numerator = int(whole + digits + period) - int("0" + whole + digits)
    return rf"\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(digits)}}}"


def _thousands(text: str) -> str:
    """Without the commas of 1,000, if each part has such a number: 1,200, 300 has not, (1,200) is a point."""
    parts = [part for part in re.split(", |and|or|[:;]", text) if re.search(r"\d", part)]
    grouped = all(re.search(r"(?<![\d.,])\d{1,3}(?:,\d{3}){1,6}(?![\d,])", part) for part in parts)
    point = re.search(r"(?:[(\[]|\\\{)\d+,\d+(?:\\right)?\\?[)\]}]", text)
    return re.sub(r"(?<=\d),(?=\d{3})", "", text) if grouped and not point else text


def unescaped(text: str) -> str:
    """The text with one backslash for two, if all of them are two and a command follows one."""
    halved = text.replace("\\\\", "\\")
    doubled = re.search(r"\\\\[a-zA-Z]{2}", text) and 2 * halved.count("\\") == text.count("\\")
    return halved if doubled else text


def tokens_of(text: str) -> list[Token]:
    """The tokens of an answer without what says nothing: styles, remarks, words before a number, points."""
    for pattern, new in _REWRITES:
        if (changed := pattern.sub(new, text)) != text:
            text = " ".join(changed.split()) or text  # nothing is no answer
    found, space, braces, begins = [], False, [], False
    for match in _TOKEN.finditer(text):
        t = match[0].rstrip("*") or "*"
        t = _ALIAS.get(t, t) if t.lower() not in _NUMBERS else str(_NUMBERS.index(t.lower()))
        if t.isspace():
            space = True
            continue
        if t == "{":
            braces.append(begins)
        if t == "{" and begins or t == "}" and braces and braces.pop():
            pass  # those of \text{} are dropped
        elif t and t != r"\text":
            found.append(Token("0" + t if t[0] == "." and len(t) > 1 else t))
            found[-1].roman, found[-1].space, space = begins or any(braces), space, False
        begins = t == r"\text"
    return found


def unit_name(text: str) -> str:
    """The name of a unit: hour for h, hr and hours."""
    unit = re.sub(r"(?<=\w\w)s$", "", re.sub(r"[{}\\]|^[ ^]*|[. ]*$", "", text))
    return _UNITS.get(unit, unit)
