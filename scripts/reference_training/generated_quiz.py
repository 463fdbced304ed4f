"""Multiple-choice questions: word meanings from WordNet's nouns, and science templates of our own."""

# ruff: noqa: E501 - one template a line reads better than wrapped text
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from .readers import synsets

SCIENCE: list[Callable[[random.Random], tuple[str, float, str, str]]] = [
    lambda r: (lambda m, a: (f"What force gives a body of mass {m} kg an acceleration of {a} m/s^2?", m * a, "N",
        f"Force is mass times acceleration: {m} * {a} = {m * a} N."))(r.randint(2, 60), r.randint(2, 12)),
    lambda r: (lambda v, t: (f"A particle moves at a constant speed of {v} m/s. How far does it move in {t} s?", v * t, "m",
        f"Distance is speed times time: {v} * {t} = {v * t} m."))(r.randint(2, 90), r.randint(2, 40)),
    lambda r: (lambda i, w: (f"A current of {i} A flows through a resistance of {w} ohm. What is the voltage?", i * w, "V",
        f"By Ohm's law the voltage is {i} * {w} = {i * w} V."))(r.randint(2, 12), r.randint(2, 90)),
    lambda r: (lambda u, i: (f"A device draws {i} A at {u} V. What power does it use?", u * i, "W",
        f"Power is voltage times current: {u} * {i} = {u * i} W."))(r.randint(3, 120), r.randint(2, 15)),
    lambda r: (lambda n, m: (f"What is the mass of {n} mol of a compound whose molar mass is {m} g/mol?", n * m, "g",
        f"Mass is amount times molar mass: {n} * {m} = {n * m} g."))(r.randint(2, 12), r.randint(12, 180)),
    lambda r: (lambda c, v: (f"How many moles of solute are in {v} L of a solution of {c} mol/L?", c * v, "mol",
        f"Amount is concentration times volume: {c} * {v} = {c * v} mol."))(r.randint(2, 9), r.randint(2, 25)),
    lambda r: (lambda n: (f"A cell divides once an hour. How many cells descend from one cell after {n} hours?", 2**n, "cells",
        f"The number doubles {n} times: 2^{n} = {2**n} cells."))(r.randint(2, 11)),
    lambda r: (lambda p, k: (f"The half-life of an isotope is {p} years. After {p * k} years, one part in how many is left?", 2**k,
        "parts", f"{p * k} years are {k} half-lives, so one part in 2^{k} = {2**k} is left."))(r.randint(3, 50), r.randint(2, 6)),
    lambda r: (lambda m, h: (f"Taking g = 10 m/s^2, what energy lifts a mass of {m} kg by {h} m?", 10 * m * h, "J",
        f"The energy is m g h = {m} * 10 * {h} = {10 * m * h} J."))(r.randint(2, 40), r.randint(2, 30)),
    lambda r: (lambda f, w: (f"A wave has frequency {f} Hz and wavelength {w} m. What is its speed?", f * w, "m/s",
        f"Speed is frequency times wavelength: {f} * {w} = {f * w} m/s."))(r.randint(2, 90), r.randint(2, 12)),
]  # fmt: skip


def _layout(question: str, options: list[str], right: int, reason: str, r: random.Random) -> str:
    letters = "ABCD"
    lines = [f"({letters[i]}) {option}" for i, option in enumerate(options)]
    style = r.random()
    if style < 0.4:
        return f"Question: {question}\n" + "\n".join(lines) + f"\nAnswer: ({letters[right]}) {reason}"
    if style < 0.7:
        return (
            f"What is the correct answer to this question: {question}\n\nChoices:\n" + "\n".join(lines)
            + f"\n\nThe correct answer is ({letters[right]}). {reason}"
        )  # fmt: skip
    if style < 0.85:
        return f"{question}\n" + "\n".join(lines) + f"\nAnswer: {letters[right]}. {reason}"
    return (
        f"Question: {question}\n"
        + "\n".join(lines)
        + f"\nLet's think step by step: {reason} So the answer is ({letters[right]})."
    )


def _science(r: random.Random) -> str:
    question, value, unit, reason = r.choice(SCIENCE)(r)
    wrong = {value + r.randint(1, 9), value * 2, max(1, value // 2), value * 10, value + 10} - {value}
    options = [*r.sample(sorted(wrong), 3), value]
    r.shuffle(options)
    return _layout(question, [f"{int(o)} {unit}" for o in options], options.index(value), reason, r)


def quiz_documents(seed: int, nouns: Path) -> Iterator[str]:
    """Endless questions. Wrong choices of a word question are other nouns, near ones (neighbours in the file) half the time."""
    r = random.Random(seed)
    entries = [
        (offset, words, gloss.split(";")[0], up) for offset, words, gloss, up in synsets(nouns) if len(gloss) > 20
    ]
    by_offset = {e[0]: e for e in entries}
    while True:
        if r.random() < 0.3:
            yield _science(r)
            continue
        i = r.randrange(20, len(entries) - 20)
        _, words, gloss, up = entries[i]
        near = [entries[i + d] for d in r.sample([d for d in range(-15, 16) if d], 3)]
        others = near if r.random() < 0.5 else r.sample(entries, 3)
        kind = r.random()
        if kind < 0.45:
            question, right, wrong = f"Which term means: {gloss}?", words[0], [o[1][0] for o in others]
            reason = f"The term {words[0]} means {gloss}."
        elif kind < 0.8 or up not in by_offset:
            question, right, wrong = f"What is the meaning of {words[0]}?", gloss, [o[2] for o in others]
            reason = f"The word {words[0]} means {gloss}."
        else:
            parent = by_offset[up]
            question, right = f"Which of the following is a kind of {parent[1][0]}?", words[0]
            wrong = [o[1][0] for o in r.sample(entries, 3)]
            reason = f"A {words[0]} is {gloss}, which is a kind of {parent[1][0]}."
        if right in wrong or len(set(wrong)) < 3:
            continue
        options = [*wrong, right]
        r.shuffle(options)
        yield _layout(question, options, options.index(right), reason, r)
