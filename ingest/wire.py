"""The primitives a trace body is written in: varints, fixed numbers, byte strings and planes.

A varint is unsigned LEB128: seven bits a byte, least significant first, the high bit set on every
byte but the last, at most ten bytes and 64 bits. Fixed numbers are little-endian. A byte string is
its length as a varint, then its bytes. An array of unsigned integers is its count as a varint, its
width w in bytes (1 to 4), then w planes: the least significant bytes of all entries, then the next.
"""

import math
import struct

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import CodecError

_F64 = struct.Struct("<d")
# The smallest type of an array more than one byte wide.
_TYPES = {2: np.uint16, 3: np.uint32, 4: np.uint32}
_U64 = struct.Struct("<Q")
_MAX_U64 = 2**64 - 1
# By how much the second byte of a varint is shifted, and the others up to its tenth.
_LATER_SHIFTS = range(7, 70, 7)


class Writer:
    """Collects the parts of a payload. Each plane of an array is a part of its own."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._open = bytearray()

    def u8(self, value: int) -> None:
        """One byte."""
        self._open.append(value)

    def u64(self, value: int) -> None:
        """Eight bytes."""
        self._open += _U64.pack(value)

    def f64(self, value: float) -> None:
        """A float64; NaN is refused, it is no value of any field."""
        if math.isnan(value):
            raise CodecError("a sampling value is NaN; such a request must not have been served")
        self._open += _F64.pack(value)

    def varint(self, value: int) -> None:
        """An unsigned integer below 2^64."""
        if not 0 <= value <= _MAX_U64:
            raise CodecError("an integer of the trace is negative or past 64 bits")
        while value > 0x7F:
            self._open.append(value & 0x7F | 0x80)
            value >>= 7
        self._open.append(value)

    def blob(self, value: bytes) -> None:
        """A byte string with its length."""
        self.varint(len(value))
        self._open += value

    def array(self, values_N: NDArray[np.integer]) -> None:
        """An array of integers in 0 .. 2^32 - 1, as planes."""
        peak = int(values_N.max()) if len(values_N) else 0
        width = max(1, (peak.bit_length() + 7) // 8)
        self.varint(len(values_N))
        self.u8(width)
        planes_WN = values_N.astype("<u4").view(np.uint8).reshape(-1, 4).T[:width]
        self._cut()
        self._parts.extend(plane_N.tobytes() for plane_N in planes_WN)

    def parts(self) -> list[bytes]:
        """The payload in pieces of one kind of data each; joined, they are the payload."""
        self._cut()
        return self._parts

    def _cut(self) -> None:
        if self._open:
            self._parts.append(bytes(self._open))
            self._open.clear()


class Reader:
    """Reads what `Writer` wrote; every shortage or excess is a CodecError.

    Nothing is allocated before the bytes that justify it were seen.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > len(self._data) - self._at:
            raise CodecError("trace body ends early; drop the trace")
        start = self._at
        self._at += count
        return self._data[start : self._at]

    def u8(self) -> int:
        """One byte."""
        at = self._at
        try:
            value = self._data[at]
        except IndexError:
            raise CodecError("trace body ends early; drop the trace") from None
        self._at = at + 1
        return value

    def u64(self) -> int:
        """Eight bytes."""
        return int(_U64.unpack(self.take(8))[0])

    def f64(self) -> float:
        """A float64 that is not NaN."""
        return self.f64s(_F64)[0]

    def f64s(self, form: struct.Struct) -> tuple[float, ...]:
        """Float64s behind one another, none of them NaN; `form` says how many."""
        values: tuple[float, ...] = form.unpack(self.take(form.size))
        if any(map(math.isnan, values)):
            raise CodecError("trace body holds NaN where a sampling value is expected")
        return values

    def varint(self) -> int:
        """An unsigned integer below 2^64."""
        data, at = self._data, self._at
        try:
            value = data[at]
            if value < 0x80:
                self._at = at + 1
                return value
            value &= 0x7F
            for shift in _LATER_SHIFTS:
                at += 1
                byte = data[at]
                value |= (byte & 0x7F) << shift
                if byte < 0x80 and value <= _MAX_U64:
                    self._at = at + 1
                    return value
        except IndexError:
            raise CodecError("trace body ends early; drop the trace") from None
        raise CodecError("trace body holds an integer past 64 bits; drop the trace")

    def count(self, least_bytes: int) -> int:
        """The length of a list whose entries take at least `least_bytes` each."""
        count = self.varint()
        if count * least_bytes > len(self._data) - self._at:
            raise CodecError("trace body promises more entries than it has bytes; drop the trace")
        return count

    def blob(self) -> bytes:
        """A byte string with its length."""
        return self.take(self.varint())

    def array(self, count: int | None = None) -> NDArray[np.unsignedinteger]:
        """An array of integers, of the smallest type that holds its width and often a view.

        `count`, where given, is how many there must be.
        """
        stored = self.varint()
        width = self.u8()
        if not 1 <= width <= 4:
            raise CodecError(f"trace body has an array of width {width}, expected 1 to 4")
        if count is not None and stored != count:
            raise CodecError(f"trace body has an array of {stored}, expected {count} entries")
        start, size = self._at, stored * width
        if size > len(self._data) - start:
            raise CodecError("trace body ends early; drop the trace")
        self._at = start + size
        bytes_S = np.frombuffer(self._data, np.uint8, size, start)
        if width == 1:
            return bytes_S
        planes_WN = bytes_S.reshape(width, stored)
        values_N: NDArray[np.unsignedinteger] = planes_WN[-1].astype(_TYPES[width])
        for plane_N in planes_WN[-2::-1]:
            values_N <<= 8
            values_N |= plane_N
        return values_N

    def end(self) -> None:
        """Raise unless everything was read."""
        if self._at != len(self._data):
            raise CodecError(f"trace body has {len(self._data) - self._at} bytes too many")
