"""A keyring with periods of 100 s and a ttl of 400 s, under a clock that the test moves."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftkeep.config import RetentionConfig
from draftkeep.policies.keyring import Keyring


@pytest.fixture
def now_s() -> list[float]:
    """The time, in its only element. It begins 5 s into a period."""
    return [1_800_000_005.0]


@pytest.fixture
def clock(now_s: list[float]) -> Callable[[], float]:
    return lambda: now_s[0]


@pytest.fixture
def retention() -> RetentionConfig:
    return RetentionConfig(period_s=100, ttl_s=400)


@pytest.fixture
def open_keyring(
    tmp_path: Path, clock: Callable[[], float], retention: RetentionConfig
) -> Iterator[Callable[..., Keyring]]:
    """Opens the same keys directory as often as asked, and closes all at the end."""
    opened: list[Keyring] = []

    def open_again(retention: RetentionConfig = retention) -> Keyring:
        opened.append(Keyring.open(tmp_path / "keys", retention=retention, clock=clock))
        return opened[-1]

    yield open_again
    for keyring in opened:
        keyring.close()


@pytest.fixture
def keyring(open_keyring: Callable[..., Keyring]) -> Keyring:
    return open_keyring()
