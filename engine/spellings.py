"""The tables by which engine/answers.py rewrites answers: one spelling for what can be written in many ways.

Commands that mean the same, LaTeX for Unicode, names and units that are dropped, and REWRITES, with a line
for each kind of spelling. For a new kind, add its line here, and its answers to tests/test_answers.py.
"""

import re
import unicodedata

_SPELLINGS = {  # a command: the commands that mean the same
    "i": "imath", "j": "jmath", r"\\": "cr",
    "": """left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr limits displaystyle
        textstyle scriptstyle rm bf it sf tt tiny small large Large LARGE huge Huge boldsymbol bm pmb mathbf
        mathit mathsf mathtt underline emph boxed fbox ensuremath mathop""",
    r"\text": "textbf textit textrm textnormal textsf texttt mathrm mbox hbox operatorname",
    r"\frac": "dfrac tfrac cfrac nicefrac sfrac", r"\binom": "dbinom tbinom", r"\cdot": "times ast",
    r"\le": "leq leqslant leqq", r"\ge": "geq geqslant geqq", r"\ne": "neq", "<": "lt", ">": "gt",
    "|": "lvert rvert vert mid", r"\emptyset": "varnothing",
    r"\{": "lbrace", r"\}": "rbrace", r"\wedge": "land", r"\lor": "vee", r"\ldots": "dots cdots dotsc",
    r"\approx": "simeq thickapprox approxeq doteq", r"\setminus": "backslash smallsetminus",
    r"\epsilon": "varepsilon", r"\phi": "varphi", ":": "colon",
}
STYLES = "|".join(_SPELLINGS[""].split())
_COMMAND = {other: command + " " for command, others in _SPELLINGS.items() for other in others.split()}
_SIGNS = {
    "\u2044\u00f7": "/", "\u2212\u2010\u2013": "-", "\u00d7": r"\times ", "\u00b7\u22c5\u2217": r"\cdot ",
    "\u00b0\u00ba\u02da": r"^\circ ", "\u221e": r"\infty ", "\u2264\u2266\u2a7d": r"\le ",
    "\u2265\u2267\u2a7e": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ", "\u00b1": r"\pm ", "\u3001": ",",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u221a": r"\sqrt ", "\u2205": r"\emptyset ",
    "\u3002": ".", "\u201c\u201d": '"', "\u6216": r"\text{or}", "\u548c\u4e14": r"\text{and}", "\u2236": ":",
    "\u230a": r"\lfloor ", "\u230b": r"\rfloor ", "\u2308": r"\lceil ", "\u2309": r"\rceil ",
    "\u211d": r"\mathbb{R}", "\u2261": r"\equiv ", "\u2713\u2714\u220e\u25a0": r"\checkmark ",
}
_SIGN = {ord(sign): command for signs, command in _SIGNS.items() for sign in signs}
FUNCTIONS = "(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|sqrt"
_INDEX = r"(?:_\{[^{}]*\})?"
_ARGUMENTS = r"(?:\((?:[a-z]|\\[a-z]+)(?:, (?:[a-z]|\\[a-z]+))*\))?"
_SEGMENT = rf"(?:[a-z]{{1,2}}|[A-Z]{{1,5}}){_INDEX}"
NAME = "(?:" + "|".join([
    # x, a_{1}, f(x, y), \theta, \Delta x, P(A), f^{-1}(3), Area(ABC), AB, m\angle ABC, S_{1}:S_{2}
    rf"[a-zA-Z]{_INDEX}'*{_ARGUMENTS}",
    rf"\\(?!(?:{FUNCTIONS}|frac|mathbb|pi)(?![a-z]))[a-zA-Z]+(?:\{{\w\}})?{_INDEX}(?: ?[a-z]|{_ARGUMENTS})",
    r"(?:[fghFGHPQE]|\\Pr|\\mathbb\{[PE]\})'?(?:\^\{-1\})?[(\[][^()\[\]]*[)\]]",
    r"(?:[A-Za-z]{4,}|[A-Z][a-z]{2})(?:\([^()]*\))?|[A-Za-z]{3,}(?: [A-Za-z]{2,})+",  # Area of ABC
    r"\|[A-Z]{2}\||\[[A-Z]{3,}\]|(?:m? ?\\(?:angle|triangle) ?)?[A-Z]{1,5}",
    rf"\\overline\{{[A-Z]+\}}|\\frac\{{{_SEGMENT}\}}\{{{_SEGMENT}\}}|{_SEGMENT}(?::{_SEGMENT})+",
]) + ")"
NAMES = rf"\({NAME}(?:, {NAME})+\)"
_CHINESE_NUMBERS = "\u4e07\u4ebf\u5343\u767e\u5341\u534a\u5206\u6210\u5146\u6298"
_MAGNITUDE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen""".split()
# "cm", "m/s", "kg m^{2}"; or words, one of them a plural or a known unit: "square feet", "ordered pairs"
_SYMBOL = (
    r"(?:(?:[munpfkMGTcd]|\\mu ?)?(?:m|g|s|L|J|N|W|V|A|K|T|C|F|Hz|eV|Pa|mol|rad|bar|cal)|ml|min|hr?|in|ft|yd"
    r"|mi|lbs?|oz|mph|kmh|yrs?|sec|deg|atm|erg|dyn|AU|pc|[kM]?\\Omega|\\AA)"
)
_POWER = r"(?: ?\^ ?(?:-?\d|\{-?\d\}))?"
SYMBOLS = rf"{_SYMBOL}{_POWER}(?:(?:[ /.(]|\\cdot)+{_SYMBOL}{_POWER}\)?)*"
_WORDS = (
    r"(?![^{}]*\b(?:less|loss|plus|minus|is|has|cos|north|south|east|west|up|down|left|right|above|below|more"
    r"|fewer|ago|before|after|late|early|ahead|behind|tens|greater|smaller|higher|lower|faster|slower|warmer"
    r"|colder|older|younger|taller|shorter|clockwise|(?:for|back)wards?|dozens?|base|half|halves|quarters?"
    r"|\w+ths|thirds|lakhs?|crores?|mil\w*on\w*)\b)"
    r"[a-zA-Z ./-]*"
    r"\b(?:[a-zA-Z]{2,}s|feet|foot|inch|people|men|women|children|percent|pct|percentage|degree|cent|dollar"
    r"|hour|minute|second|day|week|month|year|meter|metre|mile|yard|unit|gram|pound|liter|litre|point"
    r"|way|sq|USD)\b[a-zA-Z ./-]*"
)
_TEXT_UNIT = rf"\\text\{{ ?(?:{SYMBOLS}|{_WORDS}) ?\.?\}}"


# Applied in this order, again and again until nothing changes.
REWRITES = [
    (r"\.\.\.", r"\\ldots "),  # first, as the next one drops the points at the end
    (r"[.,;: \\]+$|^(?:[,= ]|\\(?:approx|therefore|Rightarrow|implies)(?![a-z]))+", ""),
    (r"^([*_\"'`]+)(.+?)\1$", r"\2"),  # **73**
    (r"^((?:\\text)?\{)? ?(?:[Tt]he )?(?:[Ff]inal )?(?:[Aa]nswer(?: is)?|[Tt]otal)[: ]+(\})?",
     lambda match: "" if match[2] else match[1] or ""),
    (r"^(?:\\text\{)? ?[A-Za-z]{3}[A-Za-z ]*(?:: ?|\bis )\}? ?(?=\\?\$?-?\d)", ""),  # The area is 25
    (r"(?:\\|(?<![\\a-z]))sqrt ?(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),  # \sqrt13, sqrt 13
    (r"\\langle([^<>]*,[^<>]*)\\rangle", r"(\1)"),  # \langle 1,2\rangle
    (r"^(?:\\text\{)? ?(?:Rs\.?|INR|USD|EUR|GBP|CNY|RMB|US|HK)[ .]*\}? ?(?=\\?\$? ?\d)", ""),  # USD 500
    (r"\\(?:SI|qty|unit)\{([^{}]*)\}\{[^{}]*\}|\\(?:num|ang)\{([^{}]*)\}", r"\1\2"),  # \SI{30}{\meter}
    (r"[ ,.]*\\(?:checkmark|blacksquare|square|qed)(?![a-z])[ .]*$", ""),  # 42 \blacksquare
    (r"(?<=[\w})\]]),? ?\(? ?\\text\{ ?\(? ?(?:since|because|rounded)\b.*$", ""),  # 5 \text{ (rounded)}
    (r"(?<![\w)}])\*\*|\*\*(?![\w({\\-])|\\(?:left|right)\.", ""),  # **73, \left. x
    (r"\\operatorname\*", r"\\text"),
    (r",\\!\s*(?=\d{3})|(?<=\d)\{,\}(?=\d{3})|(?<=\d)\\[,;: ] ?(?=\d{3}(?!\d))|(?<=\d)['\u2019](?=\d{3})",
     ""),  # 10{,}080, 10'080
    (r"(?<=\d)\{[,.]\}(?=\d)", "."),  # 3{,}5
    # 1.000.000, 1,00,000
    (r"^\d{1,3}(?:\.\d{3}){2,}$|^\d{1,2}(?:,\d{2})+,\d{3}$", lambda match: re.sub("[.,]", "", match[0])),
    (r"(?<=\d) ?(?:\\text\{ ?)?\bto\b ?\}? ?(?=\d)", ":"),  # 3 to 4
    (r"(?<=\\nabla) ?\\times|\\times(?= ?\\(?:vec|mathbf|hat|bm|boldsymbol|overrightarrow)(?![a-z]))",
     r"\\wedge "),
    (r"(?<!\\)\\[,;:!> ]|~|\\[hv]?(?:phantom|space)\{[^{}]*\}", " "),  # \, ~ \hspace{1em}
    (r"\\q?quad(?![a-zA-Z])(?= *(?:\\[a-z]*[tm]|\\q?quad|\\cup))", " "),
    (r"\\q?quad(?![a-zA-Z])", ", "),  # 2 \quad 3
    (r"(?<!\\)\\[()\[\]]|\\?\$|\\?%|\\(?:text)?color(?:box)?\s*\{[^{}]*\}", ""),  # \( 9\% $
    (r"\\([a-zA-Z]+)", lambda match: _COMMAND.get(match[1], match[0])),  # \dfrac
    (r"\\not ?=|(?<![\d)}])!=", r"\\ne "),  # x != 2, but 5!=120
    (r"([<>])=", lambda match: {"<": r"\le ", ">": r"\ge "}[match[1]]),
    (r"\^\{? ?((?:\\prime ?)+)\}?", lambda match: "'" * match[1].count("p")),  # y^{\prime}
    (r"\*\*", "^"),  # x**2
    (r"\*", r"\\cdot "),
    (r"(?<=[a-zA-Z}\]^_]) +(?=\{)", ""),  # \frac {1}
    (r"(?<![\\\w}\]^_])\{([\w.]*)\}", r"\1"),  # {5}
    (r"\\(begin|end)\{(?:(?:[pbB]?|small)matrix|array)\}(?:(?<=n\{array\})\{[^{}]*\})?", r"\\\1{matrix}"),
    (r"[(\[] ?(\\begin\{matrix\}(?:(?!\\end).)*\\end\{matrix\}) ?[)\]]", r"\1"),
    (r",? ?& ?(=?)", lambda match: match[1] or "&"),  # x &= 1
    (r"(?:\\\{ ?)?\\begin\{(matrix|cases|aligned)\}([^&]*=[^&]*)\\end\{\1\}",
     lambda match: match[2].replace("\\\\", ", ")),  # a system's solution
    # 3 million, 3:05 PM, for any real c
    (rf"(?<=[\d}}]) ?(\\text\{{)? ?(?i:({'|'.join(_MAGNITUDE)})s?)(?![a-zA-Z])",
     lambda match: rf"\cdot 10^{{{_MAGNITUDE[match[2].lower()]}}}{match[1] or ''}"),
    (r"(?<=\d)(?: ?\\text\{ ?| )([apAP])\.? ?[mM]\.? ?\}?$",
     lambda match: f" \\text{{at {match[1].lower()}m}}"),
    (r"^\\text\{([^{}]*)\}$", r"\1"),
    (r"(?:,? ?\bor )?(?<![\\a-zA-Z])(?:approximately|approx|about|roughly)(?![a-z])", r"\\approx "),
    (r"\\text\{ *(\(?)\\approx *\}", r"\1\\approx "),
    (r"\( ?\\approx[^()]*\)", ""),  # \sqrt2 (\approx 1.41)
    # sets of real numbers
    (r"^(?:[a-z] ?\\in ?)?(?:\\mathbb ?\{?R\}?|[Aa]ll real(?: number)?s)$", r"(-\\infty, \\infty)"),
    (r"(^|\\cup ?)\](?=[^\[\]]*[\[\]](?: ?\\cup|$))", r"\1("),
    (r"(?<=[\d}a-z]) ?\[(?= ?\\cup|$)", ")"),
    (r"\\\{ ?\\\}", r"\\emptyset "),  # \{ \}
    (r"(?:[a-z] ?\\in ?)?\\mathbb ?\{?R\}? ?(?:\\setminus|-) ?\\\{ ?([^{},]*)\\\}", r"x\\ne \1"),
    (r"^\\\{ ?[a-zA-Z](?: ?\\in ?\\mathbb ?\{?R\}?)? ?[|:] ?(.*)\\\}$", r"\1"),  # \{x | x>1\}
    (r"(?:,|\\forall|\() ?(?:\\forall ?)?(?:[a-z](?:, ?[a-z])* ?\\in ?\\mathbb ?\{?R"
     r"|[kmn](?:, ?[kmn])* ?\\in ?\\mathbb ?\{?Z)\}? ?\)?$", ""),
    (r",? ?(?:\\text\{,? ?|\b)(?:for|where)\b"
     r"(?:\b(?:any|all|every|some|real|arbitrary|numbers?|integers?|constants?|is|are|an|[a-z])\b"
     r"|\\text|\\in ?\\mathbb ?\{?[RZ]\}?|[{}, ])*$", ""),
    (rf"(?<=[\w}})!])(?:(?: |/|\\cdot|\\mu|(?<=\d)-)*{_TEXT_UNIT}{_POWER})+ ?$", ""),  # 5 \text{ cm}^2
    (rf"(?<=[\w}})]) ?\\frac\{{ ?{_TEXT_UNIT} ?\}}\{{ ?{_TEXT_UNIT}{_POWER} ?\}} ?$", ""),
    (rf"(?<=\d) ?(?:\\text\{{)? ?(?:(?![{_CHINESE_NUMBERS}])[\u4e00-\u9fff])+ ?\}}?$", ""),
    (rf"(?<=[\d}}])(?: ?(?:[cmk]m|kg|ft|mph|mL|mol|[kMG]?(?:eV|Hz|Pa)|[kM]?\\Omega){_POWER}"
     rf"| (?:{_WORDS}|in|min|sec|hrs?|yrs?|lbs?|oz|nm|rad){_POWER}"
     rf"| ?{_SYMBOL}(?:[ /]*/ ?{_SYMBOL}{_POWER}|/\({SYMBOLS}\))+)$", ""),  # 5 cm, 5 m/s, 5 gallons
    (r"\\text\{\s*,?\s*(?:and|or|ou|et|y|o|oder|und)\s*\}|(?<![a-zA-Z\\])(?:and|or|oder|und)(?![a-zA-Z])",
     ", "),  # "1, 2 and 3" is a list
    (r"(?<=\d) ?(?:\^ ?\{ ?\\text\{ ?(?:st|nd|rd|th) ?\} ?\}|\^? ?\\text\{ ?(?:st|nd|rd|th) ?\}"
     r"|(?:st|nd|rd|th)(?![a-zA-Z]))", ""),  # 12th
    # conditions stay words, other texts do not
    (r"(?<![a-zA-Z\\{] )(?<![a-zA-Z\\{])(if|when|where|for|otherwise)(?![a-zA-Z])", r"\\text{\1}"),
    (r"\\text\{(?! ?(?:if|when|where|for|otherwise|at)\b)([^{}]*)\}", r" \1 "),
    (rf"(?<![a-zA-Z\\])({FUNCTIONS}|pi)(?![a-zA-Z])", r"\\\1 "),
    (r"(?<=\w) *_? ?[({]* *(?:in )?base *(\w+) ?[)}]*$", r"_{\1}"),  # 52 (base 8)
    (rf"(_\{{?|^) ?({'|'.join(_NUMBERS)}) ?\}}?$",
     lambda match: f"_{{{_NUMBERS.index(match[2])}}}" if match[1] else str(_NUMBERS.index(match[2]))),
    (r"^\(([0-9A-F]+)\)_|^\(([0-9A-F]+_\{?\d+\}?)\)$", lambda match: match[2] or match[1] + "_"),
    (r"_\{\((\d+)\)\}$", r"_{\1}"),  # 52_{(8)}
    # numbers
    (r"^([^,(\[{]*|.*(?:frac|sqrt|\^)\{)(?<![\d.])(\d{1,3}(?:,\d{3}){1,6})(?![\d,])(?=[^,]*$)",
     lambda match: match[1] + match[2].replace(",", "")),  # 1,000 but not 1,2,3
    (r"(?<=\d)(?<!\d{4}) (?=\d{3}(?: \d{3})*(?!\d))", ""),  # 1 000
    (r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?\{?|\()(\d+)[})]?", lambda match: _repeating(*match.groups())),
    (r"^([^a-zA-Z]*)C_ ?\{?(\d+)\}? ?\^ ?\{?(\d+)\}?(?=[^a-zA-Z]*$)", r"\1\\binom{\2}{\3}"),
    (r"\(? ?\\?\b[bp]?mod(?![a-z]) ?\{?(\d+)\}? ?\)?", r"\\pmod{\1}"),
    (r"(?<![\\a-zA-Z])inf(?:inity)?(?![a-zA-Z])", r"\\infty "),  # inf
    (r"(?<=\d) ?x ?(?=10\^)", r"\\cdot "),  # 3 x 10^8
    (r"^\s*(-?\d+)\s+(\d+)\s*/\s*(\d+)\s*$", r"\1\\frac{\2}{\3}"),  # 2 1/2
    (r"(?<![\w.})\]])(\d+)/(\d+)(?=[a-zA-Z]|\\(?:pi|sqrt))", r"\\frac{\1}{\2}"),  # -1/2x
    # \0 marks a space that means something ("\cot x", "2 3", "not x") until the others are gone
    (r"(?<![\\a-zA-Z])([a-zA-Z]{2,}) +(?=[a-zA-Z\\])", "\\1\0"),
    (r"[, ]*\\cup[, ]*", r"\\cup "),
    (r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", "\\1\0"),
    (r"(?<=\d)\s+(?=\d)", "\0"),
    (r"\s+", ""),
    ("\0", " "),
    (r"[,;]+", ", "),  # so that the list 100, 200 is not the number 100,200 the next time
    # \frac12 and \sqrt2 and x^2
    (r"\{([^{}]*)\\(choose|over)(?![a-z]) ?([^{}]*)\}",
     lambda match: rf"\{dict(choose='binom', over='frac')[match[2]]}{{{match[1]}}}{{{match[3]}}}"),
    (r"\\(frac|binom) ?([0-9a-zA-Z]|\\[a-zA-Z]+) ?", r"\\\1{\2}"),  # \frac12
    (r"(\\(?:frac|binom)\{[^{}]*\}) ?([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\1{\2}"),  # \frac{1}2
    (r"(\\sqrt|\^)\(([^()]*)\)", r"\1{\2}"),  # x^(2)
    (r"\^ ?([-+]?\d+|-[a-zA-Z])", r"^{\1}"),  # x^-2
    (r"(\\(?:sqrt|d?dot|hat|bar|vec)(?![a-z])|[\^_]) ?([\da-zA-Z]|\\[a-zA-Z]+(?:\{[^{}]*\})*)", r"\1{\2}"),
    (r"(?<![\d.])\.(?=\d)", "0."),  # .5
    (r"(^|[(\[{,=] ?)\+(?=[\d\\])", r"\1"),  # +5
    (r"^(?=.*[a-z]{2})[A-Z]?[a-z]+(?:(?: [A-Z]?|[A-Z])[a-z]*)*$|^(?i:yes|no|true|false|none)$",
     lambda match: match[0].lower()),
]
REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in REWRITES]


def to_ascii(text: str) -> str:
    """Signs and letters as LaTeX has them: full-width forms, superscripts, Greek; nothing invisible."""
    if text.isascii():
        return text
    text = re.sub(r"(?![0-9])\d", lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = re.sub("[\u00b2\u00b3\u00b9\u2070-\u207f]+", "^{\\g<0>}", text)
    text = re.sub("[\u2080-\u2089]+", "_{\\g<0>}", text)
    text = re.sub("(?<=\\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)  # 3 1/2
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
