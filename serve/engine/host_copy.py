"""HostCopy: tensors on their way to the host while the device goes on working."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
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
