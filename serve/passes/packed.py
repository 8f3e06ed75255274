"""Linear layers with weights pre-packed for the processor's matrix kernels.

A plain float32 linear re-orders its weight at every call, which on some processors is most of its
cost at the widths of verification and on others nearly nothing. So a shape is packed where that
was measured to be faster. The operators are private to torch: they are taken only where they exist
and agree with the plain layer.

Shapes: O outputs, I inputs.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from draftkeep.serve.passes.likeness import hooked

Packing = Literal["measured", "always", "never"]

PARITY = 1e-4
_PROBE_ROWS = (1, 5, 9, 40)
# Rows of a pass that the packed layout is made for: 8 slots with 4 drafts each.
_EXPECTED_ROWS = 40
_REPEATS = 10
# Timings are noisy: near a tie two starts on one machine would choose differently.
_CLEAR_WIN = 0.9


class PackedLinear(nn.Module):
    """A linear layer over one packed copy of `weight_OI`; the bias is kept by reference.

    The packed weight is no parameter: it does not train, move or save.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias_O = bias_O
        self.packed = torch.ops.mkldnn._reorder_linear_weight(
            weight_OI.detach().contiguous(), _EXPECTED_ROWS
        )

    def forward(self, x: Tensor) -> Tensor:
        """F.linear(x, weight, bias) up to rounding."""
        return cast(
            Tensor,
            torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias_O, "none", [], ""),
        )


def pack_linears(
    model: nn.Module, packing: Packing = "measured", clock: Callable[[], float] = time.perf_counter
) -> int:
    """Replace linear layers of `model` by packed ones; return how many were.

    The model belongs to the caller of this function from here on: layers are replaced in place and
    it can no longer be trained or saved. A weight shared with an embedding is copied into the
    packed form, so the embedding goes on working. Layers off the CPU, not in float32, with hooks,
    without the operators, or off by more than `PARITY` of their own largest output stay as they
    are; with `measured` so do those whose shape is not clearly faster packed: by a tenth, over
    passes of 1, 5, 9 and 40 rows, so that starts on one machine mostly agree.
    """
    if packing == "never":
        return 0
    faster: dict[tuple[int, ...], bool] = {}
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or not faster.get(child.weight.shape, True):
                continue
            if (twin := _packed(child)) is None:
                continue
            if packing == "measured" and child.weight.shape not in faster:
                packed_s, plain_s = _seconds((twin, child), clock)
                faster[child.weight.shape] = packed_s < _CLEAR_WIN * plain_s
            if faster.get(child.weight.shape, True):
                setattr(parent, name, twin)
                packed += 1
    return packed


def _packed(linear: nn.Linear) -> PackedLinear | None:
    """The packed twin of `linear`, or None where it cannot be had or does not agree."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or hooked(linear):
        return None
    try:
        with torch.inference_mode():
            twin = PackedLinear(weight, linear.bias)
            return twin if _agrees(linear, twin) else None
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return None


def _agrees(plain: nn.Linear, twin: PackedLinear) -> bool:
    generator = torch.Generator().manual_seed(0)
    for rows in _PROBE_ROWS:
        x = torch.randn(rows, twin.in_features, generator=generator)
        expected, got = plain(x), twin(x)
        scale = expected.abs().max().clamp_min(1e-6)
        if got.shape != expected.shape or not bool((got - expected).abs().max() <= PARITY * scale):
            return False
    return True


def _seconds(layers: Sequence[PackedLinear | nn.Linear], clock: Callable[[], float]) -> list[float]:
    """Per layer the sum over the probe widths of the fastest of a few calls.

    The layers take turns, so that a busy moment of the machine meets all of them.
    """
    totals = [0.0] * len(layers)
    with torch.inference_mode():
        for rows in _PROBE_ROWS:
            x = torch.zeros(rows, layers[0].in_features)
            best = [math.inf] * len(layers)
            for _ in range(_REPEATS):
                for index, layer in enumerate(layers):
                    start = clock()
                    layer(x)
                    best[index] = min(best[index], clock() - start)
            totals = [total + least for total, least in zip(totals, best, strict=True)]
    return totals
