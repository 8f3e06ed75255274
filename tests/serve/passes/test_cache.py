"""The slot cache: writes land at their own row and position, and no rewind copies anything."""

from typing import Any

import pytest
import torch

from draftkeep.serve.passes.cache import VIEW_STEP, SlotCache, view_length

SLOTS, CONTEXT, HEADS, WIDTH = 4, 200, 2, 3


def _states(rows: Any, width: Any, value: Any) -> Any:
    return torch.full((rows, HEADS, width, WIDTH), float(value))


def _cache() -> Any:
    return SlotCache(layers=2, slots=SLOTS, context=CONTEXT)


def _place(cache: Any, lo: Any, positions: Any, longest: Any) -> None:
    """Rows of `positions` from slot `lo` on."""
    slots = torch.arange(lo, lo + len(positions))[:, None]
    cache.place(
        lo=lo,
        hi=lo + len(positions),
        view=view_length(longest, CONTEXT),
        places_R=(slots * (CONTEXT + 1) + torch.tensor(positions)).flatten(),
    )


def test_rows_are_written_at_their_own_positions_and_nowhere_else() -> None:
    cache = _cache()
    _place(cache, 1, [[0, 1], [7, CONTEXT]], 8)
    keys, values = cache.update(_states(2, 2, 5), _states(2, 2, 6), 0)
    assert keys.shape == (2, HEADS, VIEW_STEP, WIDTH)
    written = keys[:, 0, :, 0].nonzero().tolist()
    assert written == [[0, 0], [0, 1], [1, 7]]
    assert (values[keys == 5] == 6).all()
    layer = cache.layers[0]
    assert layer.keys.shape == (SLOTS, HEADS, CONTEXT + 1, WIDTH)
    assert layer.keys[[0, 3]].abs().sum() == 0
    assert layer.keys[1, :, -1].abs().sum() == 0
    assert not cache.layers[1].is_initialized


def test_keys_and_values_of_other_widths_and_of_every_head_stay_apart() -> None:
    cache = _cache()
    _place(cache, 0, [[4, 2]], 5)
    key_states, value_states = torch.rand(1, HEADS, 2, 5), torch.rand(1, HEADS, 2, 7)
    keys, values = cache.update(key_states, value_states, 1)
    assert torch.equal(keys[:, :, [4, 2]], key_states)
    assert torch.equal(values[:, :, [4, 2]], value_states)


def test_views_alias_the_buffer_and_a_rewind_moves_nothing() -> None:
    cache = _cache()
    _place(cache, 0, [[0, 1, 2]], 3)
    cache.update(_states(1, 3, 1), _states(1, 3, 1), 0)
    address = cache.layers[0].keys.data_ptr()
    _place(cache, 0, [[1]], 2)
    keys, _ = cache.update(_states(1, 1, 9), _states(1, 1, 9), 0)
    assert keys.data_ptr() == cache.layers[0].keys.data_ptr() == address
    assert keys[0, 0, :3, 0].tolist() == [1, 9, 1]


@pytest.mark.parametrize(
    ("longest", "view"), [(1, 64), (64, 64), (65, 128), (192, 192), (193, 200), (200, 200)]
)
def test_views_are_cut_to_the_longest_row_and_never_show_the_spare_position(
    longest: Any, view: Any
) -> None:
    cache = _cache()
    for length in (1, longest):
        _place(cache, 0, [[0]], length)
        keys, _ = cache.update(_states(1, 1, 1), _states(1, 1, 1), 0)
    assert keys.shape[2] == view <= CONTEXT


def test_clear_leaves_no_value_behind() -> None:
    cache = _cache()
    _place(cache, 0, [[0]], 1)
    cache.update(_states(1, 1, torch.nan), _states(1, 1, torch.nan), 0)
    cache.clear()
    assert cache.layers[0].keys.abs().sum() == 0
    assert cache.layers[0].values.abs().sum() == 0
    assert cache.layers[0].get_max_length() == CONTEXT
