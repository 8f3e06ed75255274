"""Tensors on their way to the host: at once, or while the device goes on working.

Shapes: N logit rows of a pass, W of them for one request, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """Copies of tensors, under way from construction on; on the CPU nothing is copied.

    From a GPU they go through pinned memory on the current stream, so neither the device nor the
    caller waits until `arrays` is called. The tensors must not be written to before that.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._host = list(tensors)
            return
        self._host = []
        for tensor in tensors:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.append(pinned.copy_(tensor, non_blocking=True))
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def arrays(self) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """The values, as soon as they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._host]


def host_rows(logits_NV: Tensor, slices: Sequence[slice]) -> Iterator[NDArray[np.float32]]:
    """Those rows of the pass, slice by slice, on the host: on the CPU views, else one copy."""
    if logits_NV.is_cpu:
        return iter([logits_NV[part].numpy() for part in slices])
    return copied_rows(logits_NV, slices)


def copied_rows(logits_NV: Tensor, slices: Sequence[slice]) -> Iterator[NDArray[np.float32]]:
    """Those rows of the pass, slice by slice, through one copy that holds no others."""
    indices = [index for part in slices for index in range(part.start, part.stop)]
    if not indices:
        return iter(())
    whole = len(indices) == len(logits_NV)
    host = (logits_NV if whole else logits_NV[indices]).cpu().numpy()
    ends = np.cumsum([part.stop - part.start for part in slices])
    return iter(np.split(host, ends[:-1]))
