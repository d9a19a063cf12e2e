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
    r"\circ": "degree degrees textdegree",
    "": """left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr limits displaystyle
        textstyle scriptstyle rm bf it sf tt tiny small normalsize large Large LARGE huge Huge boldsymbol bm
        bold pmb mathit mathsf mathtt mathord underline emph boxed fbox ensuremath checkmark blacksquare
        square qed therefore nonumber pounds euro""",
    r"\text": "textbf textit textrm textnormal textsf texttt mathrm mathbf mbox hbox operatorname"}
_ALIAS = {rf"\{other}": command for command, others in _ALIASES.items() for other in others.split()}
_ALIAS |= {"*": r"\cdot", ";": ",", "<=": r"\le", ">=": r"\ge", "inf": r"\infty", "infinity": r"\infty"}
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
       r"|\\AA)(?: ?\^ ?-?\d)?")
SYMBOLS = rf"{_SI}(?:(?:[ /.(]|\\cdot)+{_SI}\)?)*"
_WORDS = (
    r"(?!.*\b(?:less|loss|plus|minus|is|has|cos|off|short|extra|north|south|east|west|up|down|left"
    r"|right|above|below|more|fewer|ago|before|after|late|early|ahead|behind|tens"
    r"|(?!(?:p|\w*met|\w*lit)er\b)\w+er|clockwise|\w+wards?|dozens?|base|mod"
    r"|hal(?:f|ves)|quarters?|\w+ths|thirds|lakhs?|crores?|mil\w*on\w*|\w*creas\w*|if|when|where|for"
    r"|am|pm)\b)"
    r"[a-zA-Z ./-]*\b(?:[a-zA-Z]{2,}s|feet|foot|inch|people|men|women|children|percent|pct|percentage|degree"
    r"|cent|dollar|hour|minute|second|day|week|month|year|meter|metre|mile|yard|unit|gram|pound|liter|litre"
    r"|point|way|sq|USD|cup|yuan|[eE]uro|rupee|gallon|acre|ton)\b[a-zA-Z ./-]*(?: ?\^ ?\d)?")
_ROMAN_UNIT = re.compile(rf" ?(?:{SYMBOLS}|{_WORDS})[ .]*| ?\\frac ?[a-zA-Z][^\\]*")
_BARE_UNIT = re.compile(rf" ?(?:[cmk]m|kg|ft|mph|kWh|rpm|ppm|mmHg|Torr|mL|mol|[kMG]?(?:eV|Hz|Pa)"
                        rf"|[kM]?\\Omega)(?: ?\^ ?-?\d)?| {_WORDS}"
                        rf"| (?:in|min|sec|hrs?|yrs?|lbs?|oz|nm|rad|deg)(?: ?\^ ?\d)?"
                        rf"| ?{_SI} ?/[ (]*{SYMBOLS}\)?")
_UNITS = {other: line.split()[0] for line in """h hr hour|min minute|s sec second|yr year|% percent|$ dollar
    |ft foot feet|in inch inche|lb pound|oz ounce|mi mile|cm centimeter centimetre|m meter metre|km kilometer
    kilometre|g gram|kg kilogram|L liter litre|degree deg""".split("|") for other in line.split()}
_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen""".split()
_MAGNITUDES = dict(hundred=2, thousand=3, million=6, billion=9, trillion=12)
_ROMAN = r"\\(?:text[a-z]*|math(?:bf|rm|sf|it)|mbox)\{"
_TEXT = rf"(?:{_ROMAN})?"
# before anything; before a number
_ANSWER = r"(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)? ?:?"
_LEAD = (rf"(?:{_ANSWER}|[A-Z][a-z]{{2}}[A-Za-z ]*(?: ?:| is)|\(?[A-J]\)|[A-J]\."
         r"|(?:Rs|INR|USD|EUR|GBP|CNY|RMB|US|HK) ?\.?)")
_GROUPED = r"(?:(?!and|or)[^,:;])*?(?<![\d.])\d{1,3}(?:,\d{3}){1,6}(?!\d)(?:(?!and|or)[^,:;])*"
_ABOUT = r"(?i:approximately|approx|about|roughly|around)\b\.?"
_BOLD = r"\\(?:mathbf|boldsymbol|bm|pmb) ?(?:\{ ?[a-zA-Z] ?\}|[a-zA-Z](?![a-zA-Z]))"
_REWRITES = [(re.compile(pattern), new) for pattern, new in (  # what is seen better in text than in tokens
    (r"^([*_\"'`]+)(.+?)\1$", r"\2"),  # **73**
    (r"\.\.\.", r"\\ldots "),
    (r"\\not ?=|(?<!\d)!=", r"\\ne "),  # 5!=120
    (r"\\\\\[\w*\]", r"\\\\"),  # \\[3pt]
    (r"\^([a-zA-Z\d]|\{[^{}]*\})_([a-zA-Z\d]|\{[^{}]*\})", r"_\2^\1"),  # x^2_1
    (r"\+ ?/ ?-", r"\\pm "),
    # what follows from something is the answer, if it has a value: \frac{m}{n}\Rightarrow m+n=204
    (r"^.*\\(?:Rightarrow|implies|therefore)(?![a-zA-Z])(?=[^=]*= ?[^=a-zA-Z]+$)"
     r"|^\\(?:Rightarrow|implies)(?![a-zA-Z])", ""),
    (r" ?,\s*\\!\s*(?=\d{3})|(?<=\d)(?:\{,\}|\\[,;: ] ?)(?=\d{3}(?!\d))|(?<=\d)'(?=\d{3})", ""),
    (r"(?<!\\)\\(?:[,;: ]|thinspace(?![a-z]))|~", " "),
    (r"(?<!\\)\$|(?<![\w}]) ?\\sim ?(?=[\d.])|[\"`]|\\[!>]|\.(?= ?\\end)|\\(?:left|right)\."
     r"|(?<!\\)\\[()\[\]]|(?<![\w)}])\*\*|\*\*(?![\w({\\-])"
     r"|\\(?:(?:text)?color(?:box)?\s*|[hv]?(?:phantom|space))\{[^{}]*\}", ""),
    (r"(\\cup|,)? *(?:\\q?quad *)+(?=(\\cup|\\text|\\math|\\mbox|,|$)?)",  # a comma between values
     lambda match: f"{match[1] or ''} " if match[1] or match[2] is not None else ", "),
    (r"^(?:\\(?:sum|prod|int|lim|max|min|gcd|det|Pr|mathbb\{?[PE]\}?)|[PE]\()(?:[^={}]"
     r"|\{(?:[^{}]|\{[^{}]*\})*\})*=(?=(?:\\[a-z]+|[^=a-zA-Z\\]|(?<![a-zA-Z])e(?![a-zA-Z]))+$)",
     ""),  # \sum_k a_k = 3, P(A|B) = 1/2
    # m+n=256+37=293, 100m+n=204: the sum that was asked for; x+y=5 is a line
    (r"^(?:\\text\{[^{}]*: ?\} ?)?(?:10{0,3})?[A-Za-w]{1,2} ?(?:\+ ?(?:10{0,3})?[A-Za-w]{1,2} ?)+="
     r"(?=(?:\\[a-z]+|[^a-zA-Z\\])+$)", ""),
    (r"\\[dt]?frac ?\{ ?d ?(\\?[a-zA-Z]+) ?\}\{ ?d ?([a-z]) ?\}", r"\\overline{d\1 d\2}"),  # dx/dt
    (r"(?:[a-z] ?\\in ?)?\\mathbb ?\{?R\}? ?(?:\\(?:small)?setminus|\\backslash|-) ?\\\{ ?([^{},]*)\\\}",
     r"x\\ne \1"),
    (r"\\langle([^<>]*,[^<>]*)\\rangle", r"(\1)"),
    # i, j, k as unit vectors; 2\mathbf{F} has no unit; a bold factor of a cross product
    (r"\\(?:vec|overrightarrow|(?:wide)?hat|mathbf|boldsymbol|bm) ?(?:\{ ?\\?([ijk])(?:math)? ?\}"
     r"|\\?([ijk])(?:math)?(?![a-zA-Z]))", r"\\hat{\1\2}"),
    (r"(?<=[\d})]) ?\\mathbf(?= ?\{ ?[a-zA-Z] ?\})", r"\\boldsymbol"),
    (rf"({_BOLD} ?\)?) ?\\times(?![a-z])|\\times(?= ?\(? ?{_BOLD})", r"\1\\crossproduct "),
    (r"\\(?:operatorname|mathrm|text) ?\{ ?((?:arc)?c?tg|gcd|lcm) ?\}", r"\\\1 "),
    (r"\\(max|min|gcd|lcm) ?(?:\\left)? ?\\\{([^{}\\]*)(?:\\right)?\\\}", r"\\\1(\2)"),
    (r"U(?<=[)\] ]U) ?(?=[(\[])", r"\\cup "),
    (r"\\(?:SI|qty|unit)\{([^{}]*)\}\{[^{}]*\}|\\(?:num|ang)\{([^{}]*)\}", r"\1\2"),  # \SI{30}{\meter}
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
    (r"^([^,(\[{]*|.*(?:frac|sqrt|\^|text|boxed)\{)(?<![\d.])(\d{1,3}(?:,\d{3}){1,6})(?![\d,])(?=[^,]*$)",
     lambda match: match[1] + match[2].replace(",", "")),
    # also 1,000, 2,000; but (1,200), (3,400) are points
    (rf"^(?!.*[(\[{{]\d+,\d+\\?[)\]}}]){_GROUPED}(?:(?:, |and|or|[:;])+{_GROUPED})+$",
     lambda match: re.sub(r",(?=\d{3})", "", match[0])),
    (r"(?<=\d)\{[,.]\}(?=\d)", "."),  # 3{,}5
    (r"\.(\d*?)(\d{1,3}?)\2{2,}(?:\\[lc]?dots[cb]?)(?![a-z])", r".\1(\2)"),  # 0.1666\ldots
    (r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?\{?|\()(\d+)[})]?", lambda match: _repeating(*match.groups())),
    (rf"(?<=\d){_TEXT}[eE]([-+]?\d+)(?!\w)\}}?", r"\\cdot 10^{{\1}}"),  # 1e5
    (r"(?<=\d) ?x ?(?=10\^)", r"\\cdot "),
    (r"\*\*", "^"),
    # words before something: \text{Answer: }x+1, \textbf{(D)}\ x; before a number: \text{Area: }12, (D) 36
    (rf"^(?:{_ROMAN} ?{_ANSWER} ?\}} ?|{_ANSWER} |{_ROMAN}\(?[A-J]\) ?\}} ?(?=.*\w)"
     rf"|(?:({_TEXT}) ?{_LEAD}|{_ROMAN} ?{_LEAD} ?\}}|\(\\[a-z]+\{{[A-J]\}}\)) ?"
     r"(?=-|\\\$|\.?\d|\\[dt]?frac|\\sqrt|\\begin))(?!.*(?:[a-zA-Z] ?(?: is|:)|[A-J]\)))"
     rf"|^({_TEXT})(?:[Oo]ption|[Cc]hoice) ?(?=\(?[A-J]\)?\}}?$)", r"\1\2"),
    (rf"(?<=[\d}}]) ?({_TEXT}) ?(?i:({'|'.join(_MAGNITUDES)})s?)(?![a-zA-Z])",  # 3 million
     lambda match: rf"\cdot 10^{{{_MAGNITUDES[match[2].lower()]}}}{match[1]}"),
    (rf"^({_TEXT}) ?(?:[Aa]n?|[Tt]he) (?=[a-z]{{4}})(?!sinh|cosh|tanh|arc)", r"\1"),  # a circle
    # about 5; 5 (rounded); \sqrt2 (about 1.41) is \sqrt2\approx 1.41; 12th, 5 and a unit in Chinese
    (r"\(\\approx([^()]*)\)$", r"\\approx\1"),
    (rf"(^|=|:) ?({_TEXT}) ?(?<![a-zA-Z]){_ABOUT}", r"\1\2"),
    (rf"(?<=[\w}})\]%]),? ?\(?{_TEXT} ?\(?(?:(?:since|because|rounded|to the nearest|\d d\.?p)\b.*"
     rf"|{_ABOUT}\)?\}}?\)?)$", ""),
    (rf"(?<=[\w}})\]%]),? ?\(?,? ?(?:or )?{_TEXT} ?(?:or )?\(?{_ABOUT} ?"
     r"(?:\} ?(.*?)\)?|([^{}]*?)\)?\}?\)?)$", r"\\approx \1\2"),
    (rf"(?<=\d) ?(?:\^ ?)?\{{? ?{_TEXT} ?(?:st|nd|rd|th)(?![a-z]) ?\}}? ?\}}?", " "),
    (rf"(?<=\d) ?{_TEXT} ?(?:(?![\u4e07\u4ebf\u5343\u767e\u5341\u534a\u5206\u6210\u5146\u6298\u4ee5\u4e0a"
     r"\u4e0b\u591a\u5c11\u524d\u540e\u5927\u5c0f\u500d\u7684\u51e0\u4e0d])[\u4e00-\u9fff])+ ?\}?$", ""),
    # for any real c; where k is an integer; c\in\mathbb{R}
    (r",? ?(?:\\text\{,? ?|\b)(?:for|where)\b(?:\b(?:any|all|every|some|real|arbitrary|numbers?|integers?"
     r"|constants?|is|are|an|[a-z])\b|\\text|\\in ?\\mathbb ?\{{?[RZ]\}}?|[{{}}, ])*$", ""),
    (r"(?:,|\\forall|\() ?(?:\\forall ?)?(?:[a-z](?:, ?[a-z])* ?\\in ?(?:\\math(?:bb|bf) ?\{?)?R"
     r"|[kmn](?:, ?[kmn])* ?\\in ?(?:\\math(?:bb|bf) ?\{?)?Z)\}? ?\)?$", ""),
    (r"\\\$ ?(\d+(?:\.\d+)?)", r"\1\\$"),
    (r"(?:[.,:; ]|\)(?<=^[A-J]\))|\\(?![{}a-zA-Z%$]))+(\}*)$"
     r"|^(?:(?:[,;=]|m(?= ?\\angle)|[a-z] ?\\in ?\\mathbb ?\{?R\}? ?,"
     r"|\\(?:approx|displaystyle)(?![a-z])) ?)+", r"\1"))]
_WORD = re.compile(r"\\text|\\[mbvhow]|\\pmod|[^\x00-\x7f]|\d[eE]|[a-zA-Z][.)]|(?<![\\a-zA-Z])[a-zA-Z]{2}")
# for what has no word
_SIGNS_ONLY = [row for row in _REWRITES if not re.search(r"text\[|mathbf|operator", row[0].pattern)]
_TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|\d+(?:\.\d+)?|\.\d+|[a-zA-Z]+|[^\W\d_a-z]+|[<>]=|\s+|.", re.DOTALL)


class Token(str):
    r"""A word, a number, a command or a sign. roman: it stood in \text{}; space: white space is before it."""
    roman = space = False
    sign = ""


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


def unescaped(text: str) -> str:
    """The text with one backslash for two, if all of them are two and a command follows one."""
    halved = text.replace("\\\\", "\\")
    doubled = re.search(r"\\\\[a-zA-Z]{2}", text) and 2 * halved.count("\\") == text.count("\\")
    return halved if doubled else text


def tokens_of(text: str) -> list[Token]:
    """The tokens of an answer without what says nothing: styles, remarks, words before a number, points."""
    for pattern, new in _REWRITES if _WORD.search(text) else _SIGNS_ONLY:
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
        elif found and t in ("%", r"\%", r"\$"):
            found[-1].sign = t[-1]
        elif t and t[-1] not in "%$" and t != r"\text":
            found.append(Token("0" + t if t[0] == "." and len(t) > 1 else t))
            found[-1].roman, found[-1].space, space = begins or any(braces), space, False
        begins = t == r"\text"
    return found


def unit_in(tokens: list[Token], after_number: bool) -> str:
    r"""The unit that it is: in \text{}, or, after a number, a well-known one or words without; else empty."""
    text = "".join(" " * t.space + t for t in tokens if t not in "{}")
    letters = [t.roman for t in tokens if t.isalpha()]
    roman = letters and all(letters)
    if not (roman or after_number) or not (_ROMAN_UNIT if roman else _BARE_UNIT).fullmatch(text):
        return ""
    unit = re.sub(r"(?<=\w\w)s$", "", text.strip(" ."))
    return _UNITS.get(unit, unit)
