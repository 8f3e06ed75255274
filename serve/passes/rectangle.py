"""Rectangle: the tokens of a pass, laid out for one copy to the device.

Shapes: B rows, W width of the rectangle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`tokens` of one slot from absolute position `start`; logits are for the last `want`."""

    slot: int
    tokens: Sequence[int]
    start: int
    want: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Slots lo..lo+B with W columns each.

    inputs_3BW (int64) holds token ids, the position each token reads up to, and the place of the
    cache it writes. A column without a token has id 0, reads position 0 and writes the spare
    position of its slot, so it changes nothing that is ever read. `longest` is one more than the
    highest position read.
    """

    lo: int
    inputs_3BW: NDArray[np.int64]
    longest: int

    def on(self, device: torch.device) -> Tensor:
        """inputs_3BW on the device; from pinned memory and without waiting where it is a GPU."""
        host = torch.from_numpy(self.inputs_3BW)
        if device.type != "cuda":
            return host.to(device)
        return host.pin_memory().to(device, non_blocking=True)


def lay_out(
    segments: Sequence[Segment], *, lo: int, hi: int, width: int, context: int
) -> Rectangle:
    """The rectangle of slots lo..hi around `segments`, of which none is longer than `width`."""
    inputs_3BW = np.zeros((3, hi - lo, width), dtype=np.int64)
    inputs_3BW[2] = (np.arange(lo, hi) * (context + 1) + context)[:, None]
    longest = 1
    for segment in segments:
        count, row = len(segment.tokens), segment.slot - lo
        place = segment.slot * (context + 1) + segment.start
        inputs_3BW[0, row, :count] = segment.tokens
        inputs_3BW[1, row, :count] = np.arange(segment.start, segment.start + count)
        inputs_3BW[2, row, :count] = np.arange(place, place + count)
        longest = max(longest, segment.start + count)
    return Rectangle(lo=lo, inputs_3BW=inputs_3BW, longest=longest)


def neighbours(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments of adjacent slots together, so that no pass pays for idle rows between them."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda segment: segment.slot):
        if groups and groups[-1][-1].slot + 1 == segment.slot:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups
