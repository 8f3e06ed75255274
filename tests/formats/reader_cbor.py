"""The CBOR subset of the header, deterministic encoding only, and how a reader refuses."""

from collections.abc import Sequence

CborItem = int | bytes | str | None


class FormatError(ValueError):
    """The bytes are not what the page says they are."""


def require(condition: bool, complaint: str) -> None:
    """Refuse where the condition does not hold."""
    if not condition:
        raise FormatError(complaint)


def _cbor_head(major: int, value: int) -> bytes:
    """The shortest head for a major type and a number."""
    first = major << 5
    if value < 24:
        return bytes([first | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << (8 * size):
            return bytes([first | code]) + value.to_bytes(size, "big")
    raise FormatError("a number does not fit in 8 bytes")


def cbor_encode(items: Sequence[CborItem]) -> bytes:
    """An array of integers, byte strings, texts and nulls in deterministic encoding."""
    parts = [_cbor_head(4, len(items))]
    for item in items:
        if item is None:
            parts.append(b"\xf6")
        elif isinstance(item, int):
            parts.append(_cbor_head(0, item))
        else:
            data = item.encode() if isinstance(item, str) else item
            parts.append(_cbor_head(3 if isinstance(item, str) else 2, len(data)) + data)
    return b"".join(parts)


def _cbor_number(data: bytes, at: int) -> tuple[int, int, int]:
    """Major type and number of the head at an offset, and the offset behind it."""
    require(at < len(data), "the header ends early")
    major, low = data[at] >> 5, data[at] & 31
    if low < 24:
        return major, low, at + 1
    require(low <= 27, "an indefinite length or a reserved head")
    size = 1 << (low - 24)
    require(at + 1 + size <= len(data), "the header ends early")
    value = int.from_bytes(data[at + 1 : at + 1 + size], "big")
    require(value >= (24 if size == 1 else 1 << (4 * size)), "a number is not in its shortest form")
    return major, value, at + 1 + size


def _cbor_item(data: bytes, at: int) -> tuple[CborItem, int]:
    """One item at an offset, and the offset behind it."""
    if data[at : at + 1] == b"\xf6":
        return None, at + 1
    major, value, at = _cbor_number(data, at)
    require(major in (0, 2, 3), f"unexpected CBOR major type {major}")
    if major == 0:
        return value, at
    require(at + value <= len(data), "the header ends early")
    string = data[at : at + value]
    if major == 2:
        return string, at + value
    try:
        return string.decode(), at + value
    except UnicodeDecodeError as problem:
        raise FormatError("a text is not UTF-8") from problem


def cbor_decode(data: bytes) -> list[CborItem]:
    """The items of an array in deterministic encoding that fills the data."""
    major, count, at = _cbor_number(data, 0)
    require(major == 4, "not a CBOR array")
    items: list[CborItem] = []
    for _ in range(count):
        item, at = _cbor_item(data, at)
        items.append(item)
    require(at == len(data), "bytes after the array")
    return items
