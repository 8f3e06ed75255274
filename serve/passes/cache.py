"""SlotCache: one static key-value buffer per layer, written at per-row absolute positions.

A slot belongs to one request at a time. Nothing is copied when drafts are rejected: the owner of
the slot writes over the stale positions and masks them until then.

Shapes: B rows of a pass, W its width, R = B * W its tokens, G key-value heads, D head width,
S positions of a slot, P = slots * (S + 1) places of a buffer, E one place: a token's keys and its
values, G * D each.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

VIEW_STEP = 64


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where the current pass reads and writes; shared by all layers and set before the pass."""

    lo: int = 0
    hi: int = 1
    view: int = VIEW_STEP
    places_R: Tensor | None = None


def view_length(longest: int, context: int) -> int:
    """Positions a pass looks at, `longest` rounded up so that few distinct shapes occur."""
    return min(-(-longest // VIEW_STEP) * VIEW_STEP, context)


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's buffer [P, E]; position S of every slot takes what padding columns write.

    Keys and values of a token lie side by side, so that one copy writes both. `keys` and `values`
    are views [slots, G, S + 1, D] of the buffer.
    """

    is_sliding = False

    def __init__(self, slots: int, context: int, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots
        self.context = context
        self.placement = placement
        self._seen: tuple[int, int, int] | None = None

    def allocate(self, *, heads: int, key_width: int, value_width: int, like: Tensor) -> None:
        """Make the buffer, of the dtype and on the device of `like`.

        Zeros, since a masked NaN would still poison its row.
        """
        self._keys_E = heads * key_width
        rows, whole = self.slots, self._keys_E + heads * value_width
        self.buffer_PE = like.new_zeros((rows * (self.context + 1), whole))
        by_slot = self.buffer_PE.view(rows, self.context + 1, whole)
        keys, values = by_slot[..., : self._keys_E], by_slot[..., self._keys_E :]
        by_head = (rows, self.context + 1, heads, -1)
        self.keys = keys.view(by_head).transpose(1, 2)
        self.values = values.view(by_head).transpose(1, 2)
        self._seen = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for states [B, G, W, D]."""
        self.allocate(
            heads=key_states.shape[1],
            key_width=key_states.shape[3],
            value_width=value_states.shape[3],
            like=key_states,
        )

    def write(self, states_RE: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of the pass's tokens; return what `update` returns."""
        self.buffer_PE.index_copy_(0, cast(Tensor, self.placement.places_R), states_RE)
        return self._views()

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, G, W, D] at the placement; return views of its rows cut to the view length."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        halves = [states.transpose(1, 2).flatten(2) for states in (key_states, value_states)]
        return self.write(torch.cat(halves, dim=-1).flatten(0, 1))

    def _views(self) -> tuple[Tensor, Tensor]:
        at = self.placement
        if self._seen != (at.lo, at.hi, at.view):
            keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
            self._cut = keys[at.lo : at.hi, :, : at.view], values[at.lo : at.hi, :, : at.view]
            self._seen = (at.lo, at.hi, at.view)
        return self._cut

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
        self.slot_layers = [SlotLayer(slots, context, self.placement) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    def place(self, *, lo: int, hi: int, view: int, places_R: Tensor) -> None:
        """Aim the next pass at slots lo..hi, of which it sees the first `view` positions.

        places_R names a place of the buffer for every token of the pass: slot * (S + 1) + position,
        with position S, which no view shows, for padding columns.
        """
        at = self.placement
        at.lo, at.hi, at.view, at.places_R = lo, hi, view, places_R

    def clear(self) -> None:
        """Zero every buffer, after a pass that may have left values that are not numbers."""
        with torch.inference_mode():
            for layer in self.slot_layers:
                if layer.is_initialized:
                    layer.buffer_PE.zero_()
