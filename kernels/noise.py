"""Keyed noise, version 1: randomness that depends on where it is used and on nothing else.

Whoever knows (seed, choice, output index, stream) gets the same row, in any order, batch or
process: that is what makes an output repeatable and a trace replayable.

V: vocabulary of the target.
"""

import numpy as np
from numpy.typing import NDArray

# One stream for each use, so that no draw ever looks at another's noise.
COUPLED, DRAFT, ACCEPT, RECOVERY = 0, 1, 2, 3

_WORD = 1 << 64
_BELOW_ONE = 1.0 - 2.0**-53


class GumbelRow:
    """The Gumbel noise of one output position, worked out only where it is looked at.

    `GumbelRow(...).at(ids)` equals `gumbel(...)[ids]` for the same arguments, bit for bit. Drawing
    from a peaked distribution looks at few ids, and two logarithms an id are most of the cost of a
    row. Immutable and thread-safe.
    """

    def __init__(
        self, seed: int, choice: int, index: int, vocab: int, stream: int = COUPLED
    ) -> None:
        self._high_V = _high_bits(seed, choice, index, vocab, stream)

    def at(self, ids_M: NDArray[np.int64]) -> NDArray[np.float64]:
        """The noise of these ids."""
        return _gumbel(_unit(self._high_V[ids_M]))

    def all(self) -> NDArray[np.float64]:
        """The noise of every id."""
        return _gumbel(_unit(self._high_V))

    def highest(self) -> float:
        """The largest noise of the row."""
        return float(_gumbel(_unit(self._high_V.max(keepdims=True)))[0])


def gumbel(
    seed: int, choice: int, index: int, vocab: int, stream: int = COUPLED
) -> NDArray[np.float64]:
    """The standard Gumbel noise G of one output position, one value a target token id.

    Philox4x64-10 (Salmon et al., 2011) with key (seed, choice) and counter
    (id div 4, index, stream, 0); lane id mod 4 gives x, u = ((x >> 11) + 0.5) * 2^-53 and
    G = -ln(-ln u), all in float64. The one x whose u rounds to 1 takes the float64 below 1, so
    every value is finite.

    `seed` and `choice` are taken modulo 2^64; `index` is the absolute output index, from 0. A
    longer row begins with the shorter ones. The result is the caller's. Pure and thread-safe.
    """
    return _gumbel(_unit(_high_bits(seed, choice, index, vocab, stream)))


def uniform(seed: int, choice: int, index: int, stream: int) -> float:
    """One number of the open interval (0, 1): the u of token id 0 that `gumbel` would use."""
    return float(_unit(_high_bits(seed, choice, index, 1, stream))[0])


def _high_bits(seed: int, choice: int, index: int, vocab: int, stream: int) -> NDArray[np.int64]:
    """x >> 11 for every id."""
    if min(index, vocab, stream) < 0:
        raise ValueError(
            f"index, vocab and stream must not be negative; got {index}, {vocab} and {stream}"
        )
    # NumPy steps the counter before its first block, hence one less than (0, index, stream, 0).
    before = (index * _WORD + stream * _WORD**2 - 1) % _WORD**4
    generator = np.random.Philox(
        key=np.array([seed % _WORD, choice % _WORD], dtype=np.uint64),
        counter=np.array([before >> shift & (_WORD - 1) for shift in (0, 64, 128, 192)], np.uint64),
    )
    raw_V = generator.random_raw(vocab)
    raw_V >>= np.uint64(11)
    # 53 bits fit either type, and a signed one converts to float64 far faster.
    return raw_V.view(np.int64)


def _unit(high_M: NDArray[np.int64]) -> NDArray[np.float64]:
    u_M: NDArray[np.float64] = high_M.astype(np.float64)
    u_M += 0.5
    u_M *= 2.0**-53
    return np.minimum(u_M, _BELOW_ONE, out=u_M)


def _gumbel(u_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """-ln(-ln u), in place."""
    np.log(u_M, out=u_M)
    np.negative(u_M, out=u_M)
    np.log(u_M, out=u_M)
    return np.negative(u_M, out=u_M)
