"""Which answers are equal, and what a response answers. Without torch."""

from answers.keys import classes, equal, key, majority  # noqa: F401
from answers.read import LETTERS, extract_answer, gold_answers  # noqa: F401
