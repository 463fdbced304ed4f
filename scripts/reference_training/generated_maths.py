"""Grade-school word problems with worked answers, from templates of our own."""

# ruff: noqa: E501 - one template a line reads better than wrapped text
from __future__ import annotations

import random
from collections.abc import Iterator

NAMES = [
    "Ann",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jack",
    "Kira",
    "Liam",
    "Mona",
    "Noah",
    "Olga",
    "Paul",
    "Rita",
    "Sam",
    "Tara",
    "Victor",
]
THINGS = [
    "apples",
    "books",
    "pencils",
    "marbles",
    "stickers",
    "cookies",
    "cards",
    "oranges",
    "shells",
    "stamps",
    "coins",
    "candles",
    "flowers",
    "cups",
]
PLACES = ["market", "school", "library", "farm", "bakery", "museum", "garden", "factory", "shop", "fair"]


def _shopping(r: random.Random) -> tuple[str, list[str], int]:
    who, thing, other = r.choice(NAMES), *r.sample(THINGS, 2)
    n, p, m, q = r.randint(2, 12), r.randint(2, 9), r.randint(2, 9), r.randint(2, 9)
    return (
        f"{who} buys {n} {thing} for ${p} each and {m} {other} for ${q} each at the {r.choice(PLACES)}. "
        f"How much money does {who} spend in total?",
        [f"The {thing} cost {n} * {p} = ${n * p}.", f"The {other} cost {m} * {q} = ${m * q}.",
         f"In total {who} spends {n * p} + {m * q} = ${n * p + m * q}."],
        n * p + m * q,
    )  # fmt: skip


def _giving(r: random.Random) -> tuple[str, list[str], int]:
    who, friend = r.sample(NAMES, 2)
    thing, n, a = r.choice(THINGS), r.randint(20, 90), r.randint(2, 9)
    b = r.randint(2, n - a - 2)
    return (
        f"{who} has {n} {thing}. {who} gives {a} of them to {friend} and loses {b}. How many {thing} are left?",
        [f"After giving away {a}, {who} has {n} - {a} = {n - a} {thing}.",
         f"After losing {b}, {who} has {n - a} - {b} = {n - a - b} {thing}."],
        n - a - b,
    )  # fmt: skip


def _weekly(r: random.Random) -> tuple[str, list[str], int]:
    who, hours, pay, weeks = r.choice(NAMES), r.randint(2, 8), r.randint(8, 25), r.randint(2, 6)
    days = r.randint(3, 6)
    week = hours * days
    return (
        f"{who} works {hours} hours a day, {days} days a week, and earns ${pay} per hour. "
        f"How much does {who} earn in {weeks} weeks?",
        [f"{who} works {hours} * {days} = {week} hours a week.", f"That is {week} * {pay} = ${week * pay} a week.",
         f"In {weeks} weeks {who} earns {week * pay} * {weeks} = ${week * pay * weeks}."],
        week * pay * weeks,
    )  # fmt: skip


def _sharing(r: random.Random) -> tuple[str, list[str], int]:
    thing, boxes, friends = r.choice(THINGS), r.randint(2, 9), r.randint(2, 6)
    each = r.randint(2, 9) * friends
    total = boxes * each
    return (
        f"There are {boxes} boxes with {each} {thing} in each box. {friends} friends share all the {thing} equally. "
        f"How many {thing} does each friend get?",
        [f"There are {boxes} * {each} = {total} {thing} in total.",
         f"Each friend gets {total} / {friends} = {total // friends} {thing}."],
        total // friends,
    )  # fmt: skip


def _percent(r: random.Random) -> tuple[str, list[str], int]:
    who, share, unit = r.choice(NAMES), r.choice([10, 20, 25, 30, 40, 50, 60, 75]), r.randint(2, 20)
    total = unit * 20
    part = total * share // 100
    thing = r.choice(THINGS)
    return (
        f"A {r.choice(PLACES)} has {total} {thing}. {who} takes {share}% of them. How many {thing} remain?",
        [f"{who} takes {total} * {share} / 100 = {part} {thing}.", f"There remain {total} - {part} = {total - part} {thing}."],
        total - part,
    )  # fmt: skip


def _ages(r: random.Random) -> tuple[str, list[str], int]:
    who, friend = r.sample(NAMES, 2)
    age, times, years = r.randint(4, 14), r.randint(2, 4), r.randint(2, 12)
    return (
        f"{friend} is {age} years old. {who} is {times} times as old as {friend}. How old will {who} be in {years} years?",
        [f"{who} is {age} * {times} = {age * times} years old now.",
         f"In {years} years {who} will be {age * times} + {years} = {age * times + years} years old."],
        age * times + years,
    )  # fmt: skip


def _travel(r: random.Random) -> tuple[str, list[str], int]:
    who, v, w, a, b = r.choice(NAMES), r.randint(3, 60), r.randint(3, 60), r.randint(2, 6), r.randint(2, 6)
    return (
        f"{who} travels for {a} hours at {v} miles per hour and then for {b} hours at {w} miles per hour. "
        f"How many miles does {who} travel?",
        [f"The first part is {a} * {v} = {a * v} miles.", f"The second part is {b} * {w} = {b * w} miles.",
         f"Altogether {who} travels {a * v} + {b * w} = {a * v + b * w} miles."],
        a * v + b * w,
    )  # fmt: skip


TEMPLATES = [_shopping, _giving, _weekly, _sharing, _percent, _ages, _travel]


def maths_documents(seed: int) -> Iterator[str]:
    """Endless problems; the last line of each is '#### N' as in GSM8K's answers."""
    r = random.Random(seed)
    while True:
        question, steps, answer = r.choice(TEMPLATES)(r)
        yield f"Question: {question}\nAnswer: " + "\n".join([*steps, f"#### {answer}"])
