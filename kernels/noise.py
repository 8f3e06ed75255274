"""Gumbel noise keyed by position, noise version 1.

Whoever knows (seed, choice, output index) gets the same row, in any order, batch or process: that
is what makes an output independent of the drafter and a trace replayable.

V: vocabulary of the target.
"""

import numpy as np
from numpy.typing import NDArray

_WORD = 1 << 64
_BELOW_ONE = 1.0 - 2.0**-53


def gumbel(seed: int, choice: int, index: int, vocab: int) -> NDArray[np.float64]:
    """The standard Gumbel noise G of one output position, one value a target token id.

    Philox4x64-10 (Salmon et al., 2011) with key (seed, choice) and counter
    (id div 4, index, 0, 0); lane id mod 4 gives x, u = ((x >> 11) + 0.5) * 2^-53 and
    G = -ln(-ln u), all in float64. The one x whose u rounds to 1 takes the float64 below 1, so
    every value is finite.

    `seed` and `choice` are taken modulo 2^64; `index` is the absolute output index, from 0. A
    longer row begins with the shorter ones. The result is the caller's. Pure and thread-safe.
    """
    if index < 0 or vocab < 0:
        raise ValueError(f"index and vocab must not be negative; got {index} and {vocab}")
    # NumPy steps the counter before its first block, hence one less than (0, index, 0, 0).
    before = (index * _WORD - 1) % _WORD**4
    stream = np.random.Philox(
        key=np.array([seed % _WORD, choice % _WORD], dtype=np.uint64),
        counter=np.array([before >> shift & (_WORD - 1) for shift in (0, 64, 128, 192)], np.uint64),
    )
    raw_V = stream.random_raw(vocab)
    raw_V >>= np.uint64(11)
    g_V = raw_V.astype(np.float64)
    g_V += 0.5
    g_V *= 2.0**-53
    np.minimum(g_V, _BELOW_ONE, out=g_V)
    np.log(g_V, out=g_V)
    np.negative(g_V, out=g_V)
    np.log(g_V, out=g_V)
    return np.negative(g_V, out=g_V)
