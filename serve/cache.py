"""SlotCache: one static key-value buffer per layer, written at per-row absolute positions.

A slot is a row of the buffer and belongs to one request at a time. Nothing is copied when drafts
are rejected: the owner of the slot writes over the stale positions and masks them until then.

Shapes: B rows of a pass, W its width, H key-value heads, D head width, S positions of a slot.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

VIEW_STEP = 64


class Placement:
    """Where the current pass reads and writes; shared by all layers and set before the pass."""

    __slots__ = ("hi", "lo", "positions_BW", "rows_B1", "view")

    def __init__(self) -> None:
        self.lo = 0
        self.hi = 1
        self.view = VIEW_STEP
        self.positions_BW = torch.zeros(1, 1, dtype=torch.long)
        self.rows_B1 = torch.zeros(1, 1, dtype=torch.long)


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's buffers [slots, H, S + 1, D]; position S takes what padding columns write."""

    is_sliding = False

    def __init__(self, slots: int, context: int, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots
        self.context = context
        self.placement = placement

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate both buffers. Zeros, since a masked NaN would still poison its row."""
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (self.slots, states.shape[1], self.context + 1, states.shape[3])
            setattr(self, name, states.new_zeros(shape))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, W, D] at the placement; return views of its rows cut to the view length."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.placement
        keys = cast(Tensor, self.keys)[at.lo : at.hi]
        values = cast(Tensor, self.values)[at.lo : at.hi]
        keys[at.rows_B1, :, at.positions_BW] = key_states.transpose(1, 2)
        values[at.rows_B1, :, at.positions_BW] = value_states.transpose(1, 2)
        return keys[:, :, : at.view], values[:, :, : at.view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The key range a mask covers; passes bring their own mask, so this only has to exist."""
        return self.placement.view, 0

    def get_seq_length(self) -> int:
        """Always 0: lengths are per row and kept by the owner of the slots."""
        return 0

    def get_max_length(self) -> int:
        """How many positions a slot holds."""
        return self.context


class SlotCache(Cache):
    """The cache of one model: `layers` buffers of `slots` rows with `context` positions each."""

    def __init__(self, *, layers: int, slots: int, context: int) -> None:
        self.placement = Placement()
        self.context = context
        self._slot_layers = [SlotLayer(slots, context, self.placement) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def place(self, *, lo: int, positions_BW: Tensor, longest: int) -> int:
        """Aim the next pass at slots lo..lo+B and return the length of the views it will see.

        positions_BW holds absolute positions, `context` for padding columns. `longest` is one more
        than the highest position any row reads; the views end there, rounded up so that few
        distinct shapes occur.
        """
        at = self.placement
        at.lo, at.hi = lo, lo + positions_BW.shape[0]
        at.positions_BW = positions_BW
        at.rows_B1 = torch.arange(positions_BW.shape[0], device=positions_BW.device)[:, None]
        at.view = min(-(-longest // VIEW_STEP) * VIEW_STEP, self.context)
        return at.view

    def clear(self) -> None:
        """Zero every buffer, after a pass that may have left values that are not numbers."""
        with torch.inference_mode():
            for layer in self._slot_layers:
                if layer.is_initialized:
                    cast(Tensor, layer.keys).zero_()
                    cast(Tensor, layer.values).zero_()
