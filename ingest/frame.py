"""The zstd frame around a payload: one block a plane when written, bounded when read."""

import threading

import zstandard

from draftkeep.errors import CodecError

MAX_PAYLOAD_BYTES = 16 * 1024**2

# A plane at least this long gets a zstd block, and so a Huffman table, of its own.
_OWN_BLOCK_BYTES = 64

# Making one takes as long as unpacking ten kilobytes, and no two threads may share one.
_kept = threading.local()


def compress(parts: list[bytes]) -> bytes:
    """Join and compress the parts of a payload; long parts get a block of their own."""
    size = sum(map(len, parts))
    if size > MAX_PAYLOAD_BYTES:
        raise CodecError(
            f"trace body takes {size} bytes, at most {MAX_PAYLOAD_BYTES} fit; cut its positions"
        )
    # Planes hold no long repeats: short matches only cost bytes, so literals are all but forced.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1,
        source_size=size,
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        write_content_size=True,
        write_checksum=False,
        write_dict_id=False,
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=size)
    blocks: list[bytes] = []
    waiting = False
    for part in parts:
        if waiting and len(part) >= _OWN_BLOCK_BYTES:
            blocks.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        blocks.append(stream.compress(part))
        waiting = True
    blocks.append(stream.flush())
    return b"".join(blocks)


def decompress(frame: bytes) -> bytes:
    """The payload of a frame; CodecError unless it is one frame of a stated, bounded size."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > MAX_PAYLOAD_BYTES:
            raise CodecError(f"trace body does not unpack to at most {MAX_PAYLOAD_BYTES} bytes")
        payload = _decompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError:
        raise CodecError("trace body is not one zstd frame; drop the trace") from None
    if len(payload) != size:
        raise CodecError(f"trace body unpacks to {len(payload)} bytes, expected {size}")
    return payload


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_kept, "decompressor", None)
    if found is None:
        found = _kept.decompressor = zstandard.ZstdDecompressor()
    return found
