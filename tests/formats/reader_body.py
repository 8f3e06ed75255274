"""A second reader of trace bodies and remap tables, written from docs/formats.md alone."""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from tests.formats.reader_cbor import FormatError, require

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

MAX_PAYLOAD_BYTES = 16 * 2**20
MAX_ROWS = 2**20
MAX_ENTRIES = 2**24
MAX_BRANCHES = 65_536
UNLISTED = 255
NO_MASS = 65_535
ZSTD_MAGIC = bytes.fromhex("28b52ffd")


class Elements:
    """A cursor over a payload: reads one element after another."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next bytes as they are."""
        require(size <= len(self._data) - self._at, "the payload ends early")
        self._at += size
        return self._data[self._at - size : self._at]

    def u8(self) -> int:
        """One byte."""
        return self.take(1)[0]

    def u64(self) -> int:
        """Eight bytes, little-endian."""
        return int.from_bytes(self.take(8), "little")

    def f64(self) -> float:
        """A double that is not NaN."""
        value = float(struct.unpack("<d", self.take(8))[0])
        require(value == value, "NaN")
        return value

    def varint(self) -> int:
        """Unsigned LEB128 of at most 10 bytes and 64 bits."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.u8()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                require(value < 2**64, "a varint above 64 bits")
                return value
        raise FormatError("a varint above 10 bytes")

    def varints(self) -> tuple[int, ...]:
        """A count, then as many varints."""
        return tuple(self.varint() for _ in range(self.varint()))

    def blob(self) -> bytes:
        """A length, then the bytes."""
        return self.take(self.varint())

    def array(self, entries: int | None = None) -> I64:
        """An array, of a given number of entries where the page fixes it."""
        count, width = self.varint(), self.u8()
        require(1 <= width <= 4, "an array width outside 1 to 4")
        require(entries is None or count == entries, "an array of another length")
        planes = np.frombuffer(self.take(count * width), np.uint8).reshape(width, count)
        value = np.zeros(count, np.int64)
        for j in range(width):
            value += planes[j].astype(np.int64) << (8 * j)
        return value

    def end(self) -> None:
        """Refuse where bytes are left."""
        require(self._at == len(self._data), "bytes after the payload")


@dataclass(frozen=True)
class Settings:
    """How the tokens were drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class DrafterRun:
    """Output positions in a row under one drafter and one context."""

    digest: bytes
    context_start: int
    positions: int


@dataclass(frozen=True)
class Row:
    """A target distribution: ids and levels in rank order, and the mass outside (NaN: unknown)."""

    ids: I64
    levels: I64
    tail: float

    @property
    def logprobs(self) -> F64:
        """The listed log-probabilities in nats."""
        return grid_logprobs(self.levels, 20)


@dataclass(frozen=True)
class Branch:
    """A rejected branch: its start, its drafts, and the target's row after each draft."""

    start: int
    drafts: I64
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Body:
    """A decoded body."""

    prompt_cut: bool
    output_cut: bool
    held_out: bool
    finish: int
    value_kind: int
    remap_digest: bytes
    seed: int | None
    choice: int
    settings: Settings
    template_hash: bytes
    runs: tuple[DrafterRun, ...]
    branches: tuple[Branch, ...]
    ext: bytes
    prompt: I64
    output: I64
    rows: tuple[Row, ...]
    how: I64
    rejected: dict[int, int]
    processed_logp: F64 | None


def grid_logprobs(levels: I64, steps_per_nat: int) -> F64:
    """Level L is -L/steps; 65,535 is minus infinity."""
    require(bool((levels <= NO_MASS).all()), "a level above 65,535")
    return np.where(levels == NO_MASS, -np.inf, -levels / steps_per_nat)


def tail_mass(code: int) -> float:
    """The mass outside a row's list; NaN where it is not known."""
    if code in (0, 254, 255):
        return {0: 0.0, 254: 1.0, 255: float("nan")}[code]
    require(code < 254, "a tail code above 255")
    return float(1 / (1 + np.exp(-(code - 200) / 14)))


def remap_digest(table: bytes) -> bytes:
    """The digest by which a body names its remap table."""
    return hashlib.sha256(b"draftkeep/v1/remap" + table).digest()


def remap_tokens(ranks: I64, table: bytes | None) -> I64:
    """Ranks to token ids; ranks above the table stand for themselves."""
    if table is None:
        return ranks
    ids = np.frombuffer(table, "<u4").astype(np.int64)
    inside = ranks < len(ids)
    return np.where(inside, ids[np.where(inside, ranks, 0)], ranks)


def unpack(body: bytes) -> bytes:
    """The payload in a body: one version byte and exactly one zstd frame."""
    require(body[:1] == b"\x01", "unknown codec version")
    frame = body[1:]
    require(frame[:4] == ZSTD_MAGIC, "not a zstd frame")
    try:
        facts = zstandard.get_frame_parameters(frame)
        require(facts.dict_id == 0, "the frame needs a dictionary")
        require(facts.content_size != zstandard.CONTENTSIZE_UNKNOWN, "no content size")
        require(facts.content_size <= MAX_PAYLOAD_BYTES, "the stated size is above 16 MiB")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as problem:
        raise FormatError("the frame does not unpack") from problem


def _read_settings(source: Elements, ignore_eos: bool) -> Settings:
    """Elements 9 to 14."""
    temperature, top_p, min_p, repetition, presence, frequency = (source.f64() for _ in range(6))
    top_k, min_tokens = source.varint(), source.varint()
    bias = tuple((source.varint(), source.f64()) for _ in range(source.varint()))
    eos_ids, stop_ids = source.varints(), source.varints()
    return Settings(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        top_k=top_k,
        min_tokens=min_tokens,
        bias=bias,
        eos_ids=eos_ids,
        stop_ids=stop_ids,
        ignore_eos=ignore_eos,
    )


def _read_row_lengths(source: Elements, rows: int) -> I64:
    """Element 21: k of every row."""
    runs = [(source.varint(), source.u8()) for _ in range(source.varint())]
    require(sum(count for count, _ in runs) == rows, "the list lengths do not add up to R")
    longest = max((k for _, k in runs), default=0)
    require(rows <= MAX_ROWS and rows * longest <= MAX_ENTRIES, "more rows than this reader takes")
    lengths = np.array([k for _, k in runs], np.int64)
    return np.repeat(lengths, np.array([count for count, _ in runs], np.int64))


def _row_levels(k_R: I64, gaps: I64, heads: I64) -> I64:
    """The levels of all lists, one after another."""
    starts = (np.cumsum(k_R) - k_R)[k_R > 0]
    steps = np.zeros(int(k_R.sum()), np.int64)
    is_head = np.zeros(len(steps), np.bool_)
    is_head[starts] = True
    steps[is_head], steps[~is_head] = heads, gaps
    total = np.cumsum(steps)
    before = (total - steps)[starts]
    levels: I64 = total - np.repeat(before, k_R[k_R > 0])
    return levels


def _read_ids(source: Elements, entries: int, table: bytes | None) -> I64:
    """Elements 22 and 23: the token ids of the stream, of which the first ones are known."""
    dictionary = np.cumsum(source.array())
    require(not len(dictionary) or int(dictionary[-1]) < 2**31, "a rank of 2^31 or above")
    stream = source.array()
    require(len(stream) >= entries, "the id stream ends early")
    require(bool((stream < len(dictionary)).all()), "an id outside the dictionary")
    return remap_tokens(dictionary[stream], table)


def _listed(ranks: I64, positions: I64, rows: tuple[Row, ...], unlisted: I64) -> I64:
    """Tokens by their rank in the list of their position, or from the stream."""
    require(bool((ranks <= UNLISTED).all()), "a rank above 255")
    tokens = np.zeros(len(ranks), np.int64)
    tokens[ranks == UNLISTED] = unlisted
    for n in np.flatnonzero(ranks != UNLISTED):
        row = rows[positions[n]]
        require(bool(ranks[n] < len(row.ids)), "a rank outside its list")
        tokens[n] = row.ids[ranks[n]]
    return tokens


def decode_body(body: bytes, tables: dict[bytes, bytes] | None = None) -> Body:
    """A body; `tables` are remap tables by digest."""
    source = Elements(unpack(body))
    require(source.u8() == 1, "unknown noise version")
    require(source.u8() == 1, "unknown processor version")
    flags, finish, value_kind = source.u8(), source.u8(), source.u8()
    require(flags < 64, "an unknown flag")
    require(finish < 3 and value_kind < 3, "an unknown finish or value kind")
    digest = source.blob()
    require(len(digest) in (0, 32), "a remap digest of another length")
    require(not digest or digest in (tables or {}), "the remap table is not at hand")
    table = tables[digest] if digest and tables else None
    seed = source.u64() if flags & 16 else None
    choice = source.varint()
    settings = _read_settings(source, bool(flags & 8))
    template = source.blob()
    runs = tuple(
        DrafterRun(source.blob(), source.varint(), source.varint()) for _ in range(source.varint())
    )
    spans = [(source.varint(), source.varint()) for _ in range(source.varint())]
    require(len(spans) <= MAX_BRANCHES, "too many branches")
    require(all(drafts >= 1 for _, drafts in spans), "a branch without drafts")
    ext = source.blob()
    tokens = _read_tokens(source, spans, table, bool(flags & 32))
    prompt, output, rows, how, rejected, branches, processed = tokens
    require(not runs or sum(run.positions for run in runs) == len(output), "runs miss positions")
    return Body(
        prompt_cut=bool(flags & 1),
        output_cut=bool(flags & 2),
        held_out=bool(flags & 4),
        finish=finish,
        value_kind=value_kind,
        remap_digest=digest,
        seed=seed,
        choice=choice,
        settings=settings,
        template_hash=template,
        runs=runs,
        branches=branches,
        ext=ext,
        prompt=prompt,
        output=output,
        rows=rows,
        how=how,
        rejected=rejected,
        processed_logp=processed,
    )


def _read_tokens(
    source: Elements, spans: list[tuple[int, int]], table: bytes | None, has_processed: bool
) -> tuple[I64, I64, tuple[Row, ...], I64, dict[int, int], tuple[Branch, ...], F64 | None]:
    """Elements 19 to 30: prompt, output, rows, how, rejected drafts, branches, processed log p."""
    prompt_tokens, positions = source.varint(), source.varint()
    drafts = sum(count for _, count in spans)
    k_R = _read_row_lengths(source, positions + drafts)
    listed = int(k_R.sum())
    ids = _read_ids(source, prompt_tokens + listed + drafts, table)
    heads_expected = int((k_R > 0).sum())
    gaps = source.array(listed - heads_expected)
    levels = _row_levels(k_R, gaps, source.array(heads_expected))
    require(bool((levels <= NO_MASS).all()), "a level above 65,535")
    tails = source.array(positions + drafts)
    ends = np.cumsum(k_R)
    lists = ids[prompt_tokens : prompt_tokens + listed]
    rows = tuple(
        Row(lists[end - k : end], levels[end - k : end], tail_mass(int(code)))
        for end, k, code in zip(ends, k_R, tails, strict=True)
    )
    ranks, how = source.array(positions), source.array(positions)
    require(bool((how <= 3).all()), "an unknown way to a token")
    corrected = np.flatnonzero(how == 1)
    rejected_ranks = source.array(len(corrected))
    processed = grid_logprobs(source.array(positions), 2048) if has_processed else None
    source.end()
    counts = [int((ranks == UNLISTED).sum()), int((rejected_ranks == UNLISTED).sum()), drafts]
    rest = ids[prompt_tokens + listed :]
    require(len(rest) == sum(counts), "the id stream has another length")
    outputs, unlisted, branch_drafts = np.split(rest, np.cumsum(counts)[:2])
    output = _listed(ranks, np.arange(positions), rows, outputs)
    tokens = _listed(rejected_ranks, corrected, rows, unlisted)
    rejected = dict(zip(corrected.tolist(), tokens.tolist(), strict=True))
    branches, at = [], 0
    for start, count in spans:
        own = rows[positions + at : positions + at + count]
        branches.append(Branch(start, branch_drafts[at : at + count], own))
        at += count
    main = rows[:positions]
    return ids[:prompt_tokens], output, main, how, rejected, tuple(branches), processed
