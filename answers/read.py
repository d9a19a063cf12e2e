r"""What a response answers: its last box, after its thoughts; and the gold answers of a data set."""

import math
import re

from answers.keys import key
from answers.latex import STYLES, SYMBOLS, to_ascii, unescaped

LETTERS = "ABCDEFGHIJ"
# denied or not: \boxed{...}, \boxed 5, \boxed5, \boxed B, \boxed\frac{1}{2}
_BOX = re.compile(r"(?:\b(not|instead of|rather than)[^\w.\n]{0,4})?((?:(?<![\w)}\]-])-)?)\\(?:boxed|fbox)"
                  r"(?:\s*(\{)|\s*([-+]?\d[\d.,/]*)| +([A-Z])(?![\w'])|"
                  r"(\\(?!begin)[a-zA-Z]++(?:\{(?:[^{}]|\{[^{}]*\})*+\}|\d)*+)(?!\{|\\[a-zA-Z]))")
# Question: or **Problem 2:** at the beginning of a line, <|im_start|>user, [user]
_NEXT_TURN = re.compile(r"(?:\n\W{0,9}|<\|endoftext\|>)(?:human|user|instruction|question|problem|exercise"
                        r"|example|task|q)(?: ?#?\d+)?\W{0,2}:|[<\[]\W?(?:user|inst)\W?[>\]]"
                        r"|<\W?(?:im_start|start_header_id|start_of_turn)\W{1,3}user\b", re.IGNORECASE)
# a box that is only mentioned: \boxed{}, \boxed{...}, \boxed{\text{your answer}}
_EMPTY = re.compile(r"(?:[\s.?_~${}\[\]]|\\[ ,;:!$_]|\\phantom\{\w*\}|"
                    r"\\(?:[lcv]?dots|cdot|square|q?quad|text[a-z]*)(?![a-zA-Z])|"
                    r"\b(?:your|the|my|final|answer|result|here)\b)*", re.IGNORECASE)
_NAMED = r"(?:(?:\\(?:angle|triangle|overline) )?[a-zA-Z\\|](?:[^\s=,;:.()]|\([^\s=,()]*\)){0,20}\s*=\s*)?"
# between the boxes of one list: a unit, separators, numbers of parts, the name of the next one
_GAP = re.compile(rf"(?:\s*(?:\^\\circ|\\?%|{SYMBOLS}|[a-z]{{3,}}s)(?=\s*(?:[,;]|and\b)))?"
                  rf"(?:[\s,;&]|\\\\|\b(?:and|or)\b|(?:(?:for )?[Pp]art )?\((?:[a-e1-9]|i+v?)\):?"
                  rf"|[Pp]art [a-eA-E1-9]:|\n\s*(?:[-\u2022]|[a-e1-9][.)]))*{_NAMED}")
_BEFORE = re.compile(_NAMED + r"\(?\s*$")
_STYLE = re.compile(r"\\(?:text)?color\{[a-z]*\}|\\(?:(?:text|math|bold|under|mbox)[a-z]*|"
                    rf"(?:{STYLES}|q?quad|Rightarrow|implies)(?![a-zA-Z]))\s*|\\[()\[\],;:! ]|~")
# <think>, </thinking>, <|begin_of_thought|>, <|END_THINKING|>, <seed:think>, [/THINK], channels,
# those of Gemma and MedGemma
_THOUGHT = re.compile(
    r"[<\u25c1]\|?(/|end_(?:of_)?)?(?:begin_(?:of_)?|start_)?([\w:]{0,20}?(?:think|thought|reason|reflect|"
    r"scratchpad|analysis)\w{0,12})\s*\|?[>\u25b7]|\[(/?)(THINK)\]|<\|channel\|?>(?:analysis|thought)"
    r"(?:<\|message\|>)?|(<\|channel\|>final(?:<\|message\|>)?|<channel\|>)|<unused9(?:(5)|4)>",
    re.IGNORECASE)
# before and behind a box in a formula: x-\boxed{5}, 2\boxed{5}, \frac{\boxed{1}}{2}, \boxed{5}^2; no unit
_FORMULA_BEFORE = (
    r"(?:[+/^]|[^\W_]_|\\(?:cdot|times|div|pm|mp|[dt]?frac|ln|log|sin|cos|tan|sqrt(?:\[\w*\])?)|\}(?=\{)"
    r"|(?:[\d)}=]|\b[a-zA-Z]) ?-|(?:(?<![\\a-zA-Z])[a-zA-Z]|\d|[\d}]:)(?!\s))\s*\{?\Z")
_FORMULA_BEHIND = r"\}?(?:\s*(?:[+/]|-\s*[\d\\]|\\(?:cdot|times|div))|_[\d{]|\^(?!\{?\s*\\circ)|\{)"
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_LISTED = re.compile(rf"\s*[\[(]\s*(?:{_QUOTED})(?:\s*,\s*(?:{_QUOTED}))*\s*,?\s*[\])]\s*", re.DOTALL)
_MISSING = ("", None, math.inf, -math.inf, *"N/A n/a #N/A <NA> NaN nan None null".split())


def extract_answer(text: str, choices: int = 0, end_of_prompt: str = "") -> str | None:
    r"""What the last \boxed{} (or \fbox{}) after the reasoning holds, or the last few that make one list.

    None if there is no box, or if the last one or a thinking block is left open: there is no fallback such as
    "the last number", as a truncated response must not vote. Of a multiple choice with so many options, the
    letter that the box holds, or None.
    end_of_prompt: what the prompt wrote of the response, behind the header of the last turn; a thought may
    have been opened there, and its boxes are no answer.

    >>> extract_answer(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer(r"$x=\boxed{1}$ and $y=\boxed{2}$")
    'x=1, y=2'
    >>> extract_answer(r"\boxed{1} and \boxed{\frac{1}{2") is None
    True
    """
    text = _after_thoughts(text, end_of_prompt)
    turn = _NEXT_TURN.split(text, 1)[0]  # a base model goes on with the next question
    text = turn if _BOX.search(re.sub(r"\\boxed\{\W*\}", "", turn)) else text
    parts, start = [], len(text)  # from the last box to the first; where the earliest yet begins
    for box in reversed(list(_BOX.finditer(text))[-20:]):
        end = _closed_at(text, box.end()) if box[3] else box.end()
        if end is None:
            break
        content = text[box.end():end - 1].strip() if box[3] else box[box.lastindex].rstrip(".,")
        if box[1] or _EMPTY.fullmatch(content):
            continue
        if parts and not (0 <= start - end <= 60 and _GAP.fullmatch(_plain(text[end:start]))):
            break
        if re.match(_FORMULA_BEHIND, text[end:]) or (
                re.search(_FORMULA_BEFORE, _STYLE.sub(" ", text[max(0, box.start() - 60):box.start()]))):
            return None  # \sqrt{\boxed{7}} is no 7
        start = box.start()
        parts.append((start, box[2] + content))
    answer = parts[0][1] if parts else ""
    found = {}  # an answer that is said twice is one
    for start, content in reversed(parts) if len(parts) > 1 else ():
        name = _BEFORE.search(_plain(text[max(0, start - 60):start]))[0].strip()
        found[name, key(content) if len(content) < 60 else content] = name + content
    if len(found) > 1:
        answer = ", ".join(found.values())
        answer += ")" if next(iter(found))[0].endswith("(") else ""  # (\boxed{1}, \boxed{2}) is a point
    return (read_choice(answer, choices) if choices else answer) or None


def _after_thoughts(text: str, beginning: str) -> str:
    """The text after the last thinking block; none of it if a block is open, also one of its beginning."""
    start, still_open = len(beginning), set()
    for tag in _THOUGHT.finditer(beginning + text):
        name = (tag[2] or tag[4] or "channel").lower()
        if any(tag.group(1, 3, 5, 6)):
            still_open.discard(name)
            start = max(start, tag.end())
        else:
            still_open.add(name)
    return "" if still_open else (beginning + text)[start:]


def _closed_at(text: str, start: int) -> int | None:
    """Just behind the brace that closes the one before start; None if nothing closes it."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):  # \{ and \} are no braces
        depth += (brace[0] == "{") - (brace[0] == "}")
        if not depth:
            return brace.end()
    return None


def _plain(text: str) -> str:
    """The text without LaTeX's and Markdown's styles."""
    return re.sub(r"[{}*`]|\\?\$", "", _STYLE.sub(" ", to_ascii(text)))


def read_choice(text: str, choices: int) -> str | None:
    """The letter that a text chooses: "A. 42", "(A) 42", "Option A"; None of "A cat", "H_2O", "A or B"."""
    letters, text = LETTERS[:choices], re.sub(r"[}$]", "\t", _STYLE.sub("\t", to_ascii(text[:5000])))
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


def gold_answers(value) -> list[str]:
    r"""The gold answer of a data file, of any type, as text: 142 -> ['142'], ['$2$', '3'] -> ['$2$', '3'].

    A list, which may be written as text, holds the allowed answers (Minerva's do): any of them is right.
    None, NaN, infinity, "N/A" and empty text are no answer. Of a solution what it ends with counts: its last
    \boxed{}, or what follows #### (GSM8K)."""
    if isinstance(value, dict):  # DAPO's reward_model column
        value = value.get("ground_truth")
    if isinstance(value, str) and _LISTED.fullmatch(value):
        value = [unescaped(text[1:-1]) for text in re.findall(_QUOTED, value)]
    if isinstance(value, list | tuple):
        return list(dict.fromkeys(gold for v in value for gold in gold_answers(v)))
    if isinstance(value, str):
        value = extract_answer(value) if _BOX.search(value) else value.rpartition("####")[2].strip()
    return [] if value in _MISSING or value != value else [str(value)]
