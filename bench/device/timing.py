"""Times on a device that works behind the caller's back, and comparison within a tolerance."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

REPEATS = 20


def median_s(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call, each from an idle device to an idle device."""
    times = []
    for _ in range(REPEATS):
        _synchronise(device)
        started = time.perf_counter()
        work()
        _synchronise(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise AssertionError, saying `what`, where two tensors are further apart anywhere."""
    gap = float(np.abs((found.double() - expected.double()).cpu().numpy()).max())
    if not gap <= tolerance:
        raise AssertionError(f"{what} differ by {gap:.3g}, allowed {tolerance:g}")
