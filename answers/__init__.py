"""Which answers are equal, and what a response answers. Without torch."""

from answers.keys import classes as classes, equal as equal, key as key, majority as majority
from answers.read import LETTERS as LETTERS, extract_answer as extract_answer, gold_answers as gold_answers
