"""What an onlooker can tell from a stream: nearest neighbour over event counts, sizes and gaps.

The attacker owns recordings of every prompt (all but the one under attack) and knows nothing else.

Suffixes: S streams, F features, E events.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.streams.client import Event, Stream

Features = Callable[[Stream], NDArray[np.float64]]
# Events closer than this share of a stream's median visible gap left the engine together.
_SAME_STEP = 0.25
_WIDTH = 96


def accuracy(streams: Sequence[Stream], features: Features) -> float:
    """The share of streams whose nearest neighbour, among all others, has the same prompt."""
    vectors_SF = _standardised(np.stack([features(stream) for stream in streams]))
    prompts_S = np.array([stream.prompt for stream in streams])
    distances_SS = np.abs(vectors_SF[:, None] - vectors_SF[None]).mean(axis=2)
    np.fill_diagonal(distances_SS, np.inf)
    nearest_S = distances_SS.argmin(axis=1)
    return float((prompts_S[nearest_S] == prompts_S).mean())


def counts(stream: Stream) -> NDArray[np.float64]:
    """How many events there are, and nothing else."""
    return np.array([float(len(stream.events))])


def sizes(stream: Stream) -> NDArray[np.float64]:
    """The bytes of every event, in order."""
    return _padded([float(event.size) for event in stream.events])


def gaps(stream: Stream) -> NDArray[np.float64]:
    """The time before every event, in units of the stream's own median gap of separate steps."""
    found = _gaps(stream)
    return _padded((np.minimum(found / _step_s(found), 4.0)).tolist())


def everything(stream: Stream) -> NDArray[np.float64]:
    """Counts, sizes and gaps together, as one vector."""
    return np.concatenate([counts(stream), sizes(stream), gaps(stream)])


VIEWS: dict[str, Features] = {
    "count": counts,
    "sizes": sizes,
    "gaps": gaps,
    "all": everything,
}


def stock(stream: Stream) -> Stream:
    """The stream as a server sends it that writes one event a step, with no padding.

    `stream` has one bare event a token. The events of one step leave together, so they are joined
    by their times: one event's envelope around the text of all.
    """
    if len(stream.events) < 2:
        return stream
    found = _gaps(stream)
    near = found < _SAME_STEP * _step_s(found)
    joined: list[Event] = []
    for event, together in zip(stream.events, [False, *near.tolist()], strict=True):
        if together and joined:
            first = joined[-1]
            joined[-1] = replace(
                first,
                size=first.size + len(event.text.encode()),
                text=first.text + event.text,
            )
        else:
            joined.append(event)
    return replace(stream, events=tuple(joined))


def delay_s(later: Stream, earlier: Stream) -> float:
    """The mean of how much later each character of one stream arrived than in the other.

    Both must be of the same text; events without text do not count.
    """
    late, soon = _arrivals(later), _arrivals(earlier)
    shared = min(len(late), len(soon))
    return float((late[:shared] - soon[:shared]).mean()) if shared else float("nan")


def _arrivals(stream: Stream) -> NDArray[np.float64]:
    return np.array([event.at_s for event in stream.events for _ in event.text])


def _gaps(stream: Stream) -> NDArray[np.float64]:
    return np.diff([event.at_s for event in stream.events])


def _step_s(gaps_E: NDArray[np.float64]) -> float:
    """The time of a step: the median of the gaps that are not those within one."""
    if not len(gaps_E):
        return 1.0
    apart = gaps_E[gaps_E > 0.1 * gaps_E.max()]
    return max(float(np.median(apart)), 1e-9)


def _padded(values: Sequence[float]) -> NDArray[np.float64]:
    out_F = np.zeros(_WIDTH)
    used = min(len(values), _WIDTH)
    out_F[:used] = values[:used]
    return out_F


def _standardised(vectors_SF: NDArray[np.float64]) -> NDArray[np.float64]:
    spread_F = vectors_SF.std(axis=0)
    # A feature that never changes tells nothing; rounding must not be blown up into one.
    varies_F = spread_F > 1e-9
    scaled = (vectors_SF - vectors_SF.mean(axis=0)) / np.where(varies_F, spread_F, 1.0)
    return np.where(varies_F, scaled, 0.0)
