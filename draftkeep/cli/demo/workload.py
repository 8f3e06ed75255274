"""Synthetic traffic of three domains, made from templates and a seed.

SQL questions over varied schemas, arithmetic word problems, and docstrings to be turned into
code. Nothing here is copied from a data set, so the demo and the benches may run anywhere.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

SCHEMAS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("employees", ("name", "department", "city"), ("salary", "age")),
    ("orders", ("customer", "status", "country"), ("total", "quantity")),
    ("flights", ("airline", "origin", "destination"), ("price", "distance")),
    ("books", ("title", "author", "genre"), ("pages", "year")),
    ("students", ("name", "school", "major"), ("grade", "credits")),
    ("products", ("name", "category", "brand"), ("price", "stock")),
    ("cities", ("name", "country", "region"), ("population", "area")),
    ("movies", ("title", "director", "genre"), ("rating", "budget")),
    ("patients", ("name", "hospital", "diagnosis"), ("age", "weight")),
    ("matches", ("home_team", "away_team", "stadium"), ("goals", "attendance")),
    ("invoices", ("supplier", "status", "currency"), ("amount", "tax")),
    ("sensors", ("location", "kind", "owner"), ("temperature", "humidity")),
)
COUNT_NOUNS = ("apples", "tickets", "pencils", "bottles", "stamps", "cards", "shells", "coins")
PEOPLE = ("Ada", "Ben", "Chen", "Dina", "Emre", "Fay", "Gus", "Hana", "Ivo", "June")
CONTAINERS = ("boxes", "bags", "shelves", "crates")

_Maker = Callable[[random.Random], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One kind of traffic: how its prompts are made and how they are sampled.

    `share` is the fraction of requests; `subjects` how many named people send them;
    `max_tokens` the cap on a completion.
    """

    name: str
    system: str
    make: _Maker
    temperature: float
    max_tokens: int
    subjects: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One request of the workload, before it is sent."""

    domain: str
    subject: str
    system: str
    prompt: str
    temperature: float
    max_tokens: int
    seed: int


def _sql(rng: random.Random) -> str:
    table, texts, numbers = rng.choice(SCHEMAS)
    text, other = rng.sample(texts, 2)
    number = rng.choice(numbers)
    bound = rng.choice((5, 10, 20, 50, 100, 500, 1000))
    shapes = (
        f"List every {text} in {table} with {number} greater than {bound}.",
        f"What is the average {number} for each {text} in {table}?",
        f"How many rows of {table} have {number} below {bound}?",
        f"Show {text} and {other} of the {rng.choice((3, 5, 10))} {table} with most {number}.",
        f"Which {text} has the largest total {number}?",
        f"Count the {table} for each {text}, largest count first.",
        f"List the distinct values of {text} in {table} in alphabetical order.",
        f"Find the maximum and minimum {number} for each {other} in {table}.",
    )
    columns = ", ".join(
        [*(f"{name} TEXT" for name in texts), *(f"{name} INTEGER" for name in numbers)]
    )
    return f"CREATE TABLE {table} ({columns});\n{rng.choice(shapes)}"


def _arithmetic(rng: random.Random) -> str:
    who, friend = rng.sample(PEOPLE, 2)
    noun, box = rng.choice(COUNT_NOUNS), rng.choice(CONTAINERS)
    many, few, boxes = rng.randint(20, 90), rng.randint(2, 19), rng.randint(2, 9)
    shapes = (
        f"{who} has {many} {noun} and gives {few} to {friend}. How many {noun} are left?",
        f"{who} buys {boxes} {box} with {few} {noun} each. How many {noun} is that?",
        f"{who} has {many} {noun}. {friend} has {few} more. How many do they have together?",
        f"{who} shares {boxes * few} {noun} equally among {boxes} friends. How many does each get?",
        f"A ticket costs {few} dollars. What do {boxes} tickets cost, and what is left of "
        f"{many + 100} dollars?",
    )
    return rng.choice(shapes)


def _docstring(rng: random.Random) -> str:
    what = rng.choice(("numbers", "words", "lines", "records", "scores", "prices", "names"))
    bound = rng.randint(2, 40)
    shapes = (
        (f"count_{what}", f"Return how many {what} are longer than {bound}."),
        (f"filter_{what}", f"Return the {what} that are greater than {bound}."),
        (f"unique_{what}", f"Return the {what} without duplicates, keeping their order."),
        (f"sum_{what}", f"Return the sum of the first {bound} {what}."),
        (f"reverse_{what}", f"Return the {what} in reverse order."),
        (f"group_{what}", f"Return a dictionary that groups the {what} by length."),
    )
    name, doc = rng.choice(shapes)
    return f'def {name}(items):\n    """{doc}"""'


DOMAINS: tuple[Domain, ...] = (
    Domain(
        name="sql",
        system="Answer with one SQL query.",
        make=_sql,
        temperature=0.0,
        max_tokens=64,
        subjects=120,
        share=0.62,
    ),
    Domain(
        name="arithmetic",
        system="Solve the problem step by step.",
        make=_arithmetic,
        temperature=0.7,
        max_tokens=48,
        subjects=40,
        share=0.19,
    ),
    Domain(
        name="code",
        system="Complete the Python function.",
        make=_docstring,
        temperature=0.0,
        max_tokens=48,
        subjects=40,
        share=0.19,
    ),
)


def generate(*, requests: int, seed: int) -> list[WorkItem]:
    """Make `requests` work items, domains mixed by their share and shuffled.

    The same arguments always give the same list. Every domain gets at least one request, and its
    subjects take turns in the order of the list, so a round that is cut short has still heard
    from as many people as it could.
    """
    rng = random.Random(seed)  # noqa: S311 (a workload, not a secret)
    order = [domain for domain in DOMAINS for _ in range(max(1, round(requests * domain.share)))]
    rng.shuffle(order)
    turns: Counter[str] = Counter()
    items = []
    for domain in order:
        person = turns[domain.name] % domain.subjects
        turns[domain.name] += 1
        items.append(
            WorkItem(
                domain=domain.name,
                subject=f"{domain.name}-user-{person:03d}",
                system=domain.system,
                prompt=domain.make(rng),
                temperature=domain.temperature,
                max_tokens=domain.max_tokens,
                seed=rng.getrandbits(32),
            )
        )
    return items
