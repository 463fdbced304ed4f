"""Small documented Python functions, from templates of our own; running them gives the doctest values.

None of the templates is a HumanEval problem; `corpus.py` drops any text that shares a 13-word run with one.
"""

# ruff: noqa: E501 - one template a line reads better than wrapped text
from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

WORDS = [
    "river",
    "stone",
    "cloud",
    "maple",
    "silver",
    "garden",
    "window",
    "yellow",
    "planet",
    "market",
    "copper",
    "violet",
    "harbor",
    "lemon",
    "canyon",
]


class Template(NamedTuple):
    """name, arguments, docstring, body lines; braces are filled by `fields`."""

    name: str
    args: str
    doc: str
    body: str
    sample: str


TEMPLATES = [
    Template("{adj}_total_above", "{v}: list[int], limit: int", "Return the sum of the numbers in {v} that are greater than limit.",
             "total = 0\nfor item in {v}:\n    if item > limit:\n        total += item\nreturn total", "ints,small"),
    Template("scale_and_shift", "{v}: list[int], factor: int, offset: int", "Multiply every number in {v} by factor and add offset.",
             "return [factor * item + offset for item in {v}]", "ints,small,small"),
    Template("count_multiples", "{v}: list[int], divisor: int", "Count how many numbers in {v} are multiples of divisor.",
             "return sum(1 for item in {v} if item % divisor == 0)", "ints,small"),
    Template("join_with_index", "{w}: list[str]", "Return the words of {w} joined by spaces, each followed by its position.",
             "parts = []\nfor index, word in enumerate({w}):\n    parts.append(f\"{{word}}{{index}}\")\nreturn \" \".join(parts)", "words"),
    Template("words_longer_than", "{w}: list[str], size: int", "Return the words of {w} that have more than size letters.",
             "return [word for word in {w} if len(word) > size]", "words,small"),
    Template("group_by_first_letter", "{w}: list[str]", "Group the words of {w} by their first letter.\n\nThe result maps each letter to a sorted list of words.",
             "groups: dict[str, list[str]] = {{}}\nfor word in {w}:\n    groups.setdefault(word[0], []).append(word)\nreturn {{letter: sorted(group) for letter, group in groups.items()}}", "words"),
    Template("celsius_table", "start: int, stop: int, step: int", "Return pairs of Celsius and Fahrenheit degrees from start to stop, exclusive.",
             "rows = []\nfor degrees in range(start, stop, step):\n    rows.append((degrees, degrees * 9 / 5 + 32))\nreturn rows", "zero,tens,five"),
    Template("running_difference", "{v}: list[int]", "Return the differences between neighbouring numbers of {v}.\n\nThe result is one shorter than the input.",
             "result = []\nfor left, right in zip({v}, {v}[1:]):\n    result.append(right - left)\nreturn result", "ints"),
    Template("clip_values", "{v}: list[int], low: int, high: int", "Limit every number in {v} to the range from low to high.",
             "return [min(max(item, low), high) for item in {v}]", "ints,small,tens"),
    Template("replace_negative", "{v}: list[int], value: int", "Return a copy of {v} where negative numbers are replaced by value.",
             "return [value if item < 0 else item for item in {v}]", "ints,small"),
    Template("weighted_mean", "{v}: list[int], weights: list[int]", "Return the weighted mean of {v}.\n\nBoth lists must have the same length.",
             "if len({v}) != len(weights):\n    raise ValueError(\"lists differ in length\")\ntotal = sum(item * weight for item, weight in zip({v}, weights))\nreturn total / sum(weights)", "three,three"),
    Template("column", "rows: list[list[int]], index: int", "Return the given column of a table that is stored as a list of rows.",
             "return [row[index] for row in rows]", "table,one"),
    Template("swap_ends", "text: str", "Swap the first and the last letter of text.\n\nA text of fewer than two letters is returned as it is.",
             "if len(text) < 2:\n    return text\nreturn text[-1] + text[1:-1] + text[0]", "word"),
    Template("letter_positions", "text: str, letter: str", "Return all positions of letter in text, counted from zero.",
             "return [index for index, char in enumerate(text) if char == letter]", "word,letter"),
    Template("repeat_letters", "text: str, times: int", "Return text with every letter repeated the given number of times.",
             "return \"\".join(char * times for char in text)", "word,small"),
    Template("invert_mapping", "table: dict[str, int]", "Swap keys and values of table.\n\nThe values must be unique.",
             "result = {{}}\nfor key, value in table.items():\n    result[value] = key\nreturn result", "dict"),
    Template("merge_counts", "left: dict[str, int], right: dict[str, int]", "Add up the counts of two dictionaries.",
             "result = dict(left)\nfor key, value in right.items():\n    result[key] = result.get(key, 0) + value\nreturn result", "dict,dict"),
    Template("above_average", "{v}: list[int]", "Return the numbers of {v} that are larger than their mean.",
             "if not {v}:\n    return []\nmean = sum({v}) / len({v})\nreturn [item for item in {v} if item > mean]", "ints"),
    Template("chunks_of", "{v}: list[int], size: int", "Split {v} into parts of the given size; the last part may be shorter.",
             "return [{v}[start:start + size] for start in range(0, len({v}), size)]", "ints,small"),
    Template("interleave", "first: list[int], second: list[int]", "Take elements from first and second in turn until one of them ends.",
             "result = []\nfor left, right in zip(first, second):\n    result.append(left)\n    result.append(right)\nreturn result", "three,three"),
    Template("minutes_to_clock", "minutes: int", "Convert minutes after midnight to a clock time such as 07:05.",
             "hours, rest = divmod(minutes, 60)\nreturn f\"{{hours:02d}}:{{rest:02d}}\"", "minutes"),
    Template("rectangle", "width: int, height: int", "Return area and perimeter of a rectangle as a tuple.",
             "area = width * height\nperimeter = 2 * (width + height)\nreturn area, perimeter", "small,tens"),
    Template("savings_after", "start: int, monthly: int, months: int", "Return the savings after a number of months with a monthly deposit.",
             "balance = start\nfor _ in range(months):\n    balance += monthly\nreturn balance", "tens,small,small"),
    Template("steps_to_one", "number: int", "Count how often number can be halved (rounding down) until it is one.",
             "steps = 0\nwhile number > 1:\n    number //= 2\n    steps += 1\nreturn steps", "tens"),
]  # fmt: skip


def _value(kind: str, r: random.Random) -> object:
    return {
        "ints": lambda: [r.randint(-9, 30) for _ in range(r.randint(3, 6))],
        "three": lambda: [r.randint(1, 9) for _ in range(3)],
        "small": lambda: r.randint(2, 7),
        "tens": lambda: r.randint(10, 60),
        "zero": lambda: 0,
        "one": lambda: r.randint(0, 1),
        "five": lambda: r.choice([5, 10]),
        "minutes": lambda: r.randint(0, 1439),
        "word": lambda: r.choice(WORDS),
        "letter": lambda: r.choice("aeolrn"),
        "words": lambda: r.sample(WORDS, r.randint(2, 4)),
        "table": lambda: [[r.randint(0, 9) for _ in range(2)] for _ in range(3)],
        "dict": lambda: {w: r.randint(1, 9) for w in r.sample(WORDS, 2)},
    }[kind]()


def function_text(template: Template, r: random.Random) -> str:
    """One function with two doctest examples whose results come from running it."""
    fields = {
        "v": r.choice(["numbers", "values", "items", "data", "scores", "sizes"]),
        "w": r.choice(["words", "names", "labels"]),
        "adj": r.choice(["the", "sum", "get", "find"]),
    }
    name = template.name.format(**fields)
    body = template.body.format(**fields)
    indented = "\n".join("    " + line for line in body.splitlines())
    head = f"def {name}({template.args.format(**fields)}):"
    scope: dict[str, object] = {}
    exec(f"{head}\n{indented}", scope)  # our own template
    doc = template.doc.format(**fields)
    examples = []
    for _ in range(r.randint(1, 2)):
        values = [_value(kind, r) for kind in template.sample.split(",")]
        call = ", ".join(map(repr, values))
        result = scope[name](*values)  # type: ignore[operator]
        examples.append(f"    >>> {name}({call})\n    {result!r}")
    lines = "\n".join(("    " + line) if line else "" for line in doc.splitlines()[1:])
    first = f'    """{doc.splitlines()[0]}'
    return "\n".join(filter(None, [head, first, lines, "", *examples])) + f'\n    """\n{indented}'


def code_documents(seed: int) -> Iterator[str]:
    """Endless modules of one to three functions."""
    r = random.Random(seed)
    while True:
        chosen = r.sample(TEMPLATES, r.randint(1, 3))
        yield "\n\n\n".join(function_text(t, r) for t in chosen)
