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
_LANES = 4
# Constants of Philox4x64-10 (Salmon et al., 2011).
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
# Blocks made one by one; for more ids the whole row is made sooner.
_FEW = 16
_BELOW_ONE = 1.0 - 2.0**-53


class GumbelRow:
    """The Gumbel noise of one output position, worked out only where it is looked at.

    `GumbelRow(...).at(ids)` equals `gumbel(...)[ids]` for the same arguments, bit for bit. Drawing
    from a peaked distribution looks at few ids: for those it makes their blocks alone, and the
    whole row for more. Used by one thread at a time.
    """

    def __init__(
        self, seed: int, choice: int, index: int, vocab: int, stream: int = COUPLED
    ) -> None:
        _check(index, vocab, stream)
        self._place = (seed, choice, index, stream)
        self._vocab = vocab
        self._blocks: dict[int, tuple[int, int, int, int]] = {}
        self._row_V: NDArray[np.int64] | None = None

    def at(self, ids_M: NDArray[np.int64]) -> NDArray[np.float64]:
        """The noise of these ids."""
        if self._row_V is None and len(ids_M) <= _FEW:
            high_M = np.array([self._one(token) for token in ids_M.tolist()], np.int64)
        else:
            high_M = self._high_V[ids_M]
        return _gumbel(_unit(high_M))

    def highest(self) -> float:
        """The largest noise of the row."""
        return float(_gumbel(_unit(self._high_V.max(keepdims=True)))[0])

    @property
    def _high_V(self) -> NDArray[np.int64]:
        if self._row_V is None:
            seed, choice, index, stream = self._place
            self._row_V = _high_bits(seed, choice, index, self._vocab, stream)
        return self._row_V

    def _one(self, token: int) -> int:
        if not 0 <= token < self._vocab:
            raise IndexError(f"id {token} is outside a row of {self._vocab}")
        block, lane = divmod(token, _LANES)
        if block not in self._blocks:
            seed, choice, index, stream = self._place
            self._blocks[block] = _philox((block, index, stream, 0), (seed, choice))
        return self._blocks[block][lane] >> 11


# The noise of one position, as a row to look into or as all its values.
Noise = GumbelRow | NDArray[np.float64]


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
    _check(index, vocab, stream)
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


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox4x64-10: the four words of a counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = (word % _WORD for word in key)
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            second >> 64 ^ c1 ^ k0,
            second & _WORD - 1,
            first >> 64 ^ c3 ^ k1,
            first & _WORD - 1,
        )
        k0, k1 = k0 + _WEYL[0] & _WORD - 1, k1 + _WEYL[1] & _WORD - 1
    return c0, c1, c2, c3


def _check(index: int, vocab: int, stream: int) -> None:
    if min(index, vocab, stream) < 0:
        raise ValueError(
            f"index, vocab and stream must not be negative; got {index}, {vocab} and {stream}"
        )


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
