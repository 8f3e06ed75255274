"""Ways of serving the same requests in turn, and what each way took."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bench.engine import Served
from bench.serving.intervals import Interval, speed_ratio
from bench.serving.setup import Bench
from draftkeep.kernels.measures import acceptance_rate

Work = TypeVar("Work")
Name = TypeVar("Name")


@dataclass(slots=True)
class Runs:
    """One way's answers. `tokens` and `seconds` have one entry a piece of work: a request, or
    several that were served together; `ids` one an answer."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    passes: int = 0
    decoded: int = 0
    decode_s: float = 0.0
    tested: int = 0
    accepted: int = 0

    def add(self, ids: Sequence[list[int]], seconds: float) -> None:
        """The answers of one piece of work."""
        self.ids += ids
        self.tokens.append(sum(map(len, ids)))
        self.seconds.append(seconds)

    def add_served(self, served: Served, *, extra_s: float = 0.0) -> None:
        """The engine's answers of one piece of work, and seconds it took beside serving."""
        self.add(served.ids, served.seconds + extra_s)
        self.add_decoded(*served.decoded)
        self.passes += served.passes
        self.tested += sum(answer.tested for answer in served.answers)
        self.accepted += sum(answer.accepted for answer in served.answers)

    def add_decoded(self, tokens: int, seconds: float) -> None:
        """Tokens of an answer after its first, and what they alone took."""
        self.decoded += tokens
        self.decode_s += seconds

    def over(self, other: "Runs", ratio: Callable[..., Interval] = speed_ratio) -> Interval:
        """Tokens a second of this way over the other's, by one of the ratios of intervals."""
        return ratio(
            tokens=self.tokens,
            seconds=self.seconds,
            other_tokens=other.tokens,
            other_seconds=other.seconds,
        )

    @property
    def acceptance(self) -> float | None:
        """Accepted over tested drafts; None where none was tested."""
        return acceptance_rate(self.accepted, self.tested) if self.tested else None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def decode_rate(self) -> float:
        """Tokens a second without prefill; 0 where no answer had a second token."""
        return self.decoded / self.decode_s if self.decode_s > 0 else 0.0


def alternate(
    bench: Bench,
    works: Sequence[Work],
    ways: Mapping[str, Callable[[Work, Runs], None]],
    *,
    title: str,
) -> dict[str, Runs]:
    """Do every piece of work in every way, one way right after the other, in `turns`."""
    names = list(ways)
    runs: dict[str, Runs] = defaultdict(Runs)
    with bench.progress() as progress:
        bar = progress.add_task(title, total=len(works) * len(names))
        for number, work in enumerate(works):
            for name in turns(names, number):
                ways[name](work, runs[name])
                progress.advance(bar)
    return runs


def turns(names: Sequence[Name], number: int) -> list[Name]:
    """The ways in the order of piece `number`, which begins one further each time.

    So each way stands in every place equally often; two ways come in the order a b, b a.
    """
    at = number % len(names)
    return [*names[at:], *names[:at]]
