"""The sentences the toy target grows up on: short dialogues made from templates and a seed."""

# ruff: noqa: S608 (the queries are text to learn from, nothing runs them)

import random
from collections.abc import Callable

_TABLES = (
    ("employees", "name", "salary"),
    ("orders", "customer", "total"),
    ("flights", "airline", "price"),
    ("books", "author", "pages"),
    ("students", "school", "grade"),
    ("movies", "genre", "rating"),
    ("cities", "country", "population"),
    ("sensors", "kind", "humidity"),
)
_PEOPLE = ("Ada", "Ben", "Chen", "Dina", "Emre", "Fay", "Gus", "Hana")
_THINGS = ("apples", "tickets", "pencils", "bottles", "stamps", "cards")
_ITEMS = ("numbers", "words", "lines", "records", "scores", "names")


def dialogues(count: int, *, seed: int) -> list[tuple[str, str, str]]:
    """`count` triples of system text, question and answer; the same seed gives the same list."""
    rng = random.Random(seed)  # noqa: S311 (template filling, not a secret)
    return [rng.choice(_MAKERS)(rng) for _ in range(count)]


def _query(rng: random.Random) -> tuple[str, str, str]:
    table, text, number = rng.choice(_TABLES)
    bound = rng.choice((5, 10, 20, 50, 100))
    question, answer = rng.choice(
        (
            (
                f"List every {text} in {table} with {number} greater than {bound}.",
                f"SELECT {text} FROM {table} WHERE {number} > {bound};",
            ),
            (
                f"What is the average {number} for each {text} in {table}?",
                f"SELECT {text}, AVG({number}) FROM {table} GROUP BY {text};",
            ),
            (
                f"How many rows of {table} have {number} below {bound}?",
                f"SELECT COUNT(*) FROM {table} WHERE {number} < {bound};",
            ),
            (
                f"Count the {table} for each {text}, largest count first.",
                f"SELECT {text}, COUNT(*) FROM {table} GROUP BY {text} ORDER BY COUNT(*) DESC;",
            ),
        )
    )
    columns = f"CREATE TABLE {table} ({text} TEXT, {number} INTEGER);"
    return "Answer with one SQL query.", f"{columns}\n{question}", answer


def _sum(rng: random.Random) -> tuple[str, str, str]:
    who, friend = rng.sample(_PEOPLE, 2)
    thing = rng.choice(_THINGS)
    many, few = rng.randint(20, 90), rng.randint(2, 19)
    question, answer = rng.choice(
        (
            (
                f"{who} has {many} {thing} and gives {few} to {friend}. How many {thing} are left?",
                f"{who} has {many} - {few} = {many - few} {thing} left.",
            ),
            (
                f"{who} has {many} {thing}. {friend} has {few} more. "
                "How many do they have together?",
                f"Together they have {many} + {few} = {many + few} {thing}.",
            ),
        )
    )
    return "Solve the problem step by step.", question, answer


def _function(rng: random.Random) -> tuple[str, str, str]:
    what, bound = rng.choice(_ITEMS), rng.randint(2, 40)
    name, doc, body = rng.choice(
        (
            (
                "count",
                f"Return how many {what} are longer than {bound}.",
                f"return sum(1 for item in items if len(item) > {bound})",
            ),
            (
                "filter",
                f"Return the {what} that are greater than {bound}.",
                f"return [item for item in items if item > {bound}]",
            ),
            ("reverse", f"Return the {what} in reverse order.", "return list(reversed(items))"),
        )
    )
    head = f"def {name}_{what}(items):"
    return (
        "Complete the Python function.",
        f'{head}\n    """{doc}"""',
        f"```python\n{head}\n    {body}\n```",
    )


_MAKERS: tuple[Callable[[random.Random], tuple[str, str, str]], ...] = (_query, _sum, _function)
