"""A trace is kept once: after the request finished and its client has the answer."""

import itertools
import threading
from typing import Any

import pytest

from draftkeep.serve.delivery import Delivery

FINISHED: Any = object()


class Ends:
    """A delivery and what became of it."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.dropped: list[str] = []
        self.delivery = Delivery(keep=self.kept.append, drop=self.dropped.append)

    def call(self, name: str) -> None:
        if name == "finish":
            self.delivery.finish(FINISHED)
        elif name == "deliver":
            self.delivery.deliver()
        else:
            self.delivery.abandon("client_gone")


@pytest.mark.parametrize("order", list(itertools.permutations(["finish", "deliver", "abandon"])))
def test_whatever_the_order_it_settles_once(order: tuple[str, ...]) -> None:
    ends = Ends()
    for name in (*order, *order):
        ends.call(name)
    if order.index("abandon") < order.index("deliver"):
        assert (ends.kept, ends.dropped) == ([], ["client_gone"])
    else:
        assert (ends.kept, ends.dropped) == ([FINISHED], [])


@pytest.mark.parametrize("name", ["finish", "deliver"])
def test_one_side_alone_settles_nothing(name: str) -> None:
    ends = Ends()
    ends.call(name)
    assert (ends.kept, ends.dropped) == ([], [])


def test_both_sides_at_once_keep_it_once() -> None:
    for _ in range(200):
        ends, start = Ends(), threading.Barrier(2)

        def side(name: str, ends: Ends = ends, start: threading.Barrier = start) -> None:
            start.wait()
            ends.call(name)

        threads = [threading.Thread(target=side, args=(name,)) for name in ("finish", "deliver")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ends.kept == [FINISHED]
