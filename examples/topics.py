"""Every kind of fact in the quickstart corpus: its phrasings, its form of answer, its weight, what is held out. The
facts are in facts.txt: elements, words, the calendar, measures, animals, books, states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


@dataclass(frozen=True)
class Topic:
    """Facts of one kind. `questions` and `answer` are templates with the names in `rows`.

    repeats: how often each fact occurs in the text, over all its phrasings together.
    held_out: for a question template, the values of its first name for which that question is held out.
    """

    name: str
    repeats: int
    rows: list[dict[str, str]]
    questions: tuple[str, ...]
    answer: str
    held_out: dict[str, tuple[str, ...]]

    def fact(self, row: dict[str, str]) -> tuple[list[str], list[str], str]:
        """(questions that are trained on, questions that are held out, answer) of one row."""
        trained: list[str] = []
        held_out: list[str] = []
        for template in self.questions:
            is_held_out = next(iter(row.values())) in self.held_out.get(template, ())
            (held_out if is_held_out else trained).append(sentence(template, row))
        return trained, held_out, sentence(self.answer, row)


def sentence(template: str, row: dict[str, str]) -> str:
    """Fill a template: upper-case the first letter, and let "Washington, D.C." end a sentence without a second dot."""
    text = template.format(**row)
    text = text[0].upper() + text[1:]
    return text.removesuffix(".") if text.endswith("..") else text


def make_topic(
    name: str,
    repeats: int,
    rows: Iterable[tuple[str, ...]],
    questions: str,
    answer: str,
    held_out: dict[str, str] | None = None,
) -> Topic:
    """Build a Topic from rows (a, b[, c[, d]]) and question templates, one a line; `held_out` lists values "x; y"."""
    return Topic(
        name=name,
        repeats=repeats,
        rows=[dict(zip("abcd", row, strict=False)) for row in rows],
        questions=tuple(line.strip() for line in questions.strip().splitlines()),
        answer=answer,
        held_out={template: tuple(values.split("; ")) for template, values in (held_out or {}).items()},
    )


def flipped(rows: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    return [(b, a) for a, b in rows]


def topics() -> list[Topic]:
    """Every kind of fact with its phrasings. The repeats make a quarter of the text questions about capitals, and a
    fifth arithmetic, whose facts are the most."""
    return [*geography(), *elements(), *arithmetic(), *words(), *calendar(), *world()]


def geography() -> list[Topic]:
    # A city state ("Monaco is the capital of which country?") would ask about nothing.
    distinct = [(city, state) for state, city in CAPITALS.items() if city != state]
    return [
        make_topic(
            "capitals",
            36,
            CAPITALS.items(),
            """
            What is the capital of {a}?
            Which city is the capital of {a}?
            What is the capital city of {a}?
            Name the capital of {a}.
            Can you tell me the capital of {a}?
            Do you know the capital of {a}?
            What city serves as the capital of {a}?
            What is the name of the capital of {a}?
            If I travel to the capital of {a}, which city do I visit?
            Please tell me the capital of {a}.
            """,
            "The capital of {a} is {b}.",
            {
                "What is the capital of {a}?": "Germany; Japan; Italy; Canada; Egypt; Brazil; Australia; Russia; "
                "Kenya; Norway; Peru; Thailand; Cuba; Poland; the Netherlands; Nigeria; South Korea; Turkey; Iceland; "
                "Fiji",
                "Which city is the capital of {a}?": "Spain; China; Mexico; the United Kingdom; Greece; Argentina; "
                "Morocco; Vietnam; Sweden; New Zealand",
                "What is the capital city of {a}?": "India; Portugal; Colombia; Ghana; Austria",
                "Name the capital of {a}.": "Ireland; Chile; Saudi Arabia; the Philippines; Ukraine",
            },
        ),
        make_topic(
            "countries",
            12,
            distinct,
            """
            {a} is the capital of which country?
            Which country has {a} as its capital?
            Of which country is {a} the capital?
            """,
            "{a} is the capital of {b}.",
            {"Which country has {a} as its capital?": "Vienna; Lima"},
        ),
        make_topic(
            "continents",
            12,
            CONTINENTS.items(),
            """
            On which continent is {a}?
            Which continent is {a} in?
            What continent does {a} belong to?
            Where in the world is {a}?
            """,
            "{a} is in {b}.",
            {"Which continent is {a} in?": "Peru; Kenya"},
        ),
    ]


def elements() -> list[Topic]:
    numbered = [(name, symbol, str(number)) for number, (symbol, name) in enumerate(TABLES["elements"], start=1)]
    return [
        make_topic(
            "elements",
            10,
            numbered,
            """
            What is the chemical symbol of {a}?
            What is the symbol for {a}?
            Which symbol stands for {a}?
            How do chemists write {a}?
            """,
            "The chemical symbol of {a} is {b}.",
            {"What is the chemical symbol of {a}?": "gold; iron; oxygen"},
        ),
        make_topic(
            "elements",
            12,
            numbered,
            """
            What is the atomic number of {a}?
            Which atomic number does {a} have?
            How many protons does an atom of {a} have?
            """,
            "The atomic number of {a} is {c}.",
            {"What is the atomic number of {a}?": "carbon; helium"},
        ),
        make_topic(
            "elements",
            4,
            [(symbol, name) for name, symbol, _ in numbered],
            """
            Which element has the symbol {a}?
            What does the chemical symbol {a} stand for?
            """,
            "{a} is the symbol of {b}.",
        ),
        make_topic(
            "elements",
            4,
            [(number, name) for name, _, number in numbered],
            """
            Which element has the atomic number {a}?
            What is element number {a}?
            """,
            "Element number {a} is {b}.",
        ),
    ]


def arithmetic() -> list[Topic]:
    # The first name of a row picks what is held out, so it is both numbers; the templates use b, c and the result d.
    sums = make_topic(
        "arithmetic",
        15,
        [(f"{x} {y}", str(x), str(y), str(x + y)) for x in range(21) for y in range(21)],
        """
        What is {b} plus {c}?
        How much is {b} plus {c}?
        What is {b} + {c}?
        What is the sum of {b} and {c}?
        Add {b} and {c}.
        """,
        "{b} plus {c} is {d}.",
        {"What is {b} plus {c}?": "7 8; 6 9; 12 5", "What is the sum of {b} and {c}?": "10 10"},
    )
    differences = make_topic(
        "arithmetic",
        8,
        [(f"{x} {y}", str(x), str(y), str(x - y)) for x in range(21) for y in range(x + 1)],
        """
        What is {b} minus {c}?
        How much is {b} minus {c}?
        What is {b} - {c}?
        Take {c} away from {b}.
        """,
        "{b} minus {c} is {d}.",
        {"What is {b} minus {c}?": "15 6"},
    )
    products = make_topic(
        "arithmetic",
        12,
        [(f"{x} {y}", str(x), str(y), str(x * y)) for x in range(11) for y in range(11)],
        """
        What is {b} times {c}?
        How much is {b} times {c}?
        What is the product of {b} and {c}?
        Multiply {b} by {c}.
        """,
        "{b} times {c} is {d}.",
        {"What is {b} times {c}?": "6 7"},
    )
    return [sums, differences, products]


def words() -> list[Topic]:
    numbers = [(str(number), number_in_words(number)) for number in range(101)]
    letters = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
    return [
        make_topic(
            "opposites",
            12,
            [*TABLES["opposites"], *flipped(TABLES["opposites"])],
            """
            What is the opposite of {a}?
            Which word means the opposite of {a}?
            Give the opposite of {a}.
            What word is opposite in meaning to {a}?
            """,
            "The opposite of {a} is {b}.",
            {"What is the opposite of {a}?": "hot; happy; early", "Give the opposite of {a}.": "full"},
        ),
        make_topic(
            "grammar",
            9,
            TABLES["plurals"],
            """
            What is the plural of {a}?
            What is the plural form of the word {a}?
            Give the plural of {a}.
            """,
            "The plural of {a} is {b}.",
            {"What is the plural of {a}?": "mouse"},
        ),
        make_topic(
            "grammar",
            9,
            TABLES["past_tenses"],
            """
            What is the past tense of {a}?
            What is the past tense of the verb {a}?
            Give the past tense of {a}.
            """,
            "The past tense of {a} is {b}.",
        ),
        make_topic(
            "numbers",
            6,
            numbers,
            """
            How do you write {a} in words?
            What is the number {a} in words?
            Spell the number {a}.
            """,
            "The number {a} in words is {b}.",
        ),
        make_topic(
            "letters",
            9,
            pairwise(letters),
            """
            Which letter comes after {a}?
            What letter follows {a} in the alphabet?
            What is the next letter after {a}?
            """,
            "The letter after {a} is {b}.",
        ),
    ]


def calendar() -> list[Topic]:
    def cycle(names: list[str]) -> list[tuple[str, str]]:
        return list(pairwise([*names, names[0]]))

    months = [month for month, _ in TABLES["months"]]
    after = "Which {0} comes after {{a}}?\nWhat {0} follows {{a}}?\nWhat is the {0} after {{a}}?"
    before = "Which {0} comes before {{a}}?\nWhat {0} precedes {{a}}?\nWhat is the {0} before {{a}}?"
    result = []
    for name, names, held_out in (("day", DAYS, "Friday"), ("month", months, "March")):
        answer = f"The {name} after {{a}} is {{b}}."
        template = f"Which {name} comes after {{a}}?"
        result.append(make_topic("calendar", 18, cycle(names), after.format(name), answer, {template: held_out}))
        answer = f"The {name} before {{a}} is {{b}}."
        result.append(make_topic("calendar", 18, flipped(cycle(names)), before.format(name), answer))
    ordinals = "Which month is the {a} month of the year?\nWhat is the {a} month of the year?\nName the {a} month."
    days = "How many days does {a} have?\nHow many days are in {a}?\nHow long is {a} in days?"
    return [
        *result,
        make_topic(
            "calendar",
            18,
            zip(ORDINALS, months, strict=True),
            ordinals,
            "The {a} month of the year is {b}.",
        ),
        make_topic(
            "calendar",
            18,
            TABLES["months"],
            days,
            "{a} has {b} days.",
            {"How many days are in {a}?": "April"},
        ),
    ]


def world() -> list[Topic]:
    young = "What is a young {a} called?\nWhat do you call a young {a}?\nWhat is the name for a young {a}?"
    sounds = "What sound does {a} make?\nWhich noise does {a} make?\nHow does {a} sound?"
    measures = "How many {a} are there in {b}?\nHow many {a} are in {b}?\nCount the {a} in {b}."
    planets = "Which planet is the {a} from the Sun?\nWhat is the {a} planet from the Sun?\nName the {a} planet."
    best = "What is the {a}?\nCan you name the {a}?\nTell me the {a}."
    authors = "Who wrote {a}?\nWho is the author of {a}?\nBy whom was {a} written?"
    return [
        make_topic(
            "animals",
            12,
            [(a, with_article(b)) for a, b in TABLES["young"]],
            young,
            "A young {a} is called {b}.",
            {"What do you call a young {a}?": "cat"},
        ),
        make_topic("animals", 12, [(with_article(a), b) for a, b in TABLES["sounds"]], sounds, "{a} {b}."),
        make_topic(
            "colours",
            12,
            TABLES["colours"],
            "What colour is {a}?\nWhat is the colour of {a}?\nWhich colour does {a} have?",
            "{a} is {b}.",
        ),
        make_topic(
            "measures",
            12,
            [(*what.split(" in "), count) for what, count in TABLES["measures"]],
            measures,
            "There are {c} {a} in {b}.",
        ),
        make_topic(
            "shapes",
            12,
            [(with_article(a), b) for a, b in TABLES["sides"]],
            "How many sides does {a} have?\nWhat is the number of sides of {a}?\nCount the sides of {a}.",
            "{a} has {b} sides.",
        ),
        make_topic(
            "planets",
            15,
            zip(ORDINALS, PLANETS, strict=False),
            planets,
            "The {a} planet from the Sun is {b}.",
            {"Which planet is the {a} from the Sun?": "fourth"},
        ),
        make_topic("superlatives", 12, TABLES["superlatives"], best, "The {a} is {b}."),
        make_topic("books", 12, TABLES["authors"], authors, "{a} was written by {b}."),
    ]
