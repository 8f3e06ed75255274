"""FixedPasses: passes at a few fixed shapes, replayed as CUDA graphs where there is a GPU.

A decode step on a GPU is hundreds of small kernels, whose launches cost more than their work. A
graph launches them at once, but only for the shapes and addresses it was captured with; so a pass
is padded to all slots, to one of few widths and to one of few view lengths. On a processor the same
padded pass runs without a graph, which is how it is tested there.

A shape is captured once, by the first pass that needs it, so some steps after a start or a swap
take longer. The thread that loads a drafter cannot do it for them: a capture begins by waiting for
the whole device and emptying the allocator's cache, and would break one under way in the engine's
thread.

Shapes: B = all slots, W one of the widths, V the head's outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftkeep.serve.passes.cache import VIEW_STEP
from draftkeep.serve.passes.rectangle import Rectangle, Segment, lay_out

Graphs = Literal["auto", "never", "fixed"]

# The last takes the token and the drafts of the longest lookahead that can be configured.
WIDTHS = (1, 2, 3, 5, 9, 17)
_WARM_UPS = 3

# inputs_3BW and the view's length to logits [B, W, V], all slots from the first.
Compute = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Static buffers of one shape, and the graph that fills `logits_BWV` from `inputs_3BW`."""

    inputs_3BW: Tensor
    logits_BWV: Tensor | None
    graph: torch.cuda.CUDAGraph | None


class FixedPasses:
    """Runs `compute` over all slots at fixed shapes. Used by one thread at a time.

    `lost` is the error of a capture that failed; from then on every pass is refused.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        slots: int,
        context: int,
        device: torch.device,
        widths: Sequence[int] = WIDTHS,
    ) -> None:
        self.lost: RuntimeError | None = None
        self._compute = compute
        self._slots = slots
        self._context = context
        self._device = device
        self._widths = sorted(widths)
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, segments: Sequence[Segment], width: int) -> Tensor | None:
        """Logits [B, W, V] with W >= `width`, or None where no fixed shape fits or one was lost.

        The tensor is overwritten by the next pass.
        """
        fixed = next((wide for wide in self._widths if wide >= width), None)
        if fixed is None or self.lost is not None:
            return None
        rectangle = lay_out(segments, lo=0, hi=self._slots, width=fixed, context=self._context)
        view = _view(rectangle.longest, self._context)
        shape = self._shapes.get((fixed, view))
        if shape is None:
            try:
                shape = self._shapes[fixed, view] = self._prepare(fixed, view)
            except RuntimeError as error:
                self._drop(error)
                return None
        return self._replay(shape, rectangle, view)

    def _replay(self, shape: _Shape, rectangle: Rectangle, view: int) -> Tensor:
        shape.inputs_3BW.copy_(rectangle.on(self._device))
        if shape.graph is None or shape.logits_BWV is None:
            return self._compute(shape.inputs_3BW, view)
        shape.graph.replay()
        return shape.logits_BWV

    def _prepare(self, width: int, view: int) -> _Shape:
        """Buffers, and on a GPU a graph, captured over columns that hold no token."""
        empty = lay_out([], lo=0, hi=self._slots, width=width, context=self._context)
        inputs_3BW = empty.on(self._device)
        if self._device.type != "cuda":
            return _Shape(inputs_3BW=inputs_3BW, logits_BWV=None, graph=None)
        # Libraries allocate and choose kernels in their first calls, which no graph may hold.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._compute(inputs_3BW, view)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may load a drafter meanwhile: their allocations are not this capture's.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            logits_BWV = self._compute(inputs_3BW, view)
        return _Shape(inputs_3BW=inputs_3BW, logits_BWV=logits_BWV, graph=graph)

    def _drop(self, error: RuntimeError) -> None:
        self.lost = error
        self._shapes.clear()


def _view(longest: int, context: int) -> int:
    """The smallest power of two times the view step that shows `longest`, at most all."""
    view = VIEW_STEP
    while view < longest:
        view *= 2
    return min(view, context)
