"""Tables of true facts, read from facts.txt: elements, words, the calendar, measures, animals, books, states."""

from __future__ import annotations

from pathlib import Path

NO_SINGLE_CONTINENT = "Europe and Asia"


def read_tables() -> dict[str, list[tuple[str, str]]]:
    tables: dict[str, list[tuple[str, str]]] = {}
    for line in Path(__file__).with_name("facts.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            tables[name] = []
        elif line and not line.startswith("#"):
            left, right = line.split(": ")
            tables[name].append((left, right))
    return tables


TABLES = read_tables()
STATES = {name.removeprefix("capitals of "): table for name, table in TABLES.items() if name.startswith("capitals of ")}
CAPITALS = {state: capital for states in STATES.values() for state, capital in states}
CONTINENTS = {
    state: continent for continent, states in STATES.items() if continent != NO_SINGLE_CONTINENT for state, _ in states
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
# fmt: off
ORDINALS = [
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
]
SMALL_NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
# fmt: on
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def number_in_words(number: int) -> str:
    """English words for 0 <= number <= 100 (42 -> "forty-two")."""
    if number < 20:
        return SMALL_NUMBERS[number]
    if number == 100:
        return "one hundred"
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL_NUMBERS[ones]}" if ones else "")


def with_article(noun: str) -> str:
    """ "owl" -> "an owl". Enough for the tables above, which hold no "hour" and no "unicorn"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
