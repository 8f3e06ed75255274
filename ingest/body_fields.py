"""The single values of a trace body: everything that is not an array of tokens or positions."""

import struct
from dataclasses import dataclass
from typing import TypeVar

from draftkeep.errors import CodecError
from draftkeep.ingest.tables import DIGEST_BYTES
from draftkeep.ingest.trace import DrafterRun, Finish, Trace, ValueKind
from draftkeep.ingest.wire import Reader, Writer
from draftkeep.kernels.sampling import Sampling

NOISE_VERSION = 1
PROCESSOR_VERSION = 1

_Code = TypeVar("_Code", Finish, ValueKind)
_SIX_F64 = struct.Struct("<6d")


# Bits of the flags byte; plain numbers, since every trace that is read asks for each of them.
_PROMPT_CUT = 1
_OUTPUT_CUT = 2
_HELD_OUT = 4
_IGNORE_EOS = 8
_SEED_KNOWN = 16
_PROCESSED = 32
_ALL_FLAGS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The single values, in encoding order. `branches` holds (start, drafts) of each branch."""

    prompt_cut: bool
    output_cut: bool
    held_out: bool
    has_processed: bool
    finish: Finish
    value_kind: ValueKind
    table: bytes
    seed: int | None
    choice: int
    sampling: Sampling
    chat_template_hash: bytes
    drafters: tuple[DrafterRun, ...]
    branches: tuple[tuple[int, int], ...]
    ext: bytes


def fields_of(trace: Trace, table: bytes) -> Fields:
    """The single values of a trace packed with the table of this digest."""
    return Fields(
        prompt_cut=trace.prompt_cut,
        output_cut=trace.output_cut,
        held_out=trace.held_out,
        has_processed=trace.processed_logprob_T is not None,
        finish=trace.finish,
        value_kind=trace.value_kind,
        table=table,
        seed=trace.seed,
        choice=trace.choice,
        sampling=trace.sampling,
        chat_template_hash=trace.chat_template_hash,
        drafters=trace.drafters,
        branches=tuple((branch.start, len(branch.draft_ids_N)) for branch in trace.branches),
        ext=trace.ext,
    )


def write_fields(writer: Writer, fields: Fields) -> None:
    """Write the single values; CodecError where one is out of its range."""
    writer.u8(NOISE_VERSION)
    writer.u8(PROCESSOR_VERSION)
    writer.u8(_flags(fields))
    writer.u8(fields.finish)
    writer.u8(fields.value_kind)
    writer.blob(fields.table)
    if fields.seed is not None:
        if not 0 <= fields.seed < 2**64:
            raise CodecError("the seed of the trace is not an unsigned 64-bit integer")
        writer.u64(fields.seed)
    writer.varint(fields.choice)
    _write_sampling(writer, fields.sampling)
    writer.blob(fields.chat_template_hash)
    writer.varint(len(fields.drafters))
    for run in fields.drafters:
        writer.blob(run.drafter)
        writer.varint(run.context_start)
        writer.varint(run.positions)
    writer.varint(len(fields.branches))
    for start, drafts in fields.branches:
        writer.varint(start)
        writer.varint(drafts)
    writer.blob(fields.ext)


def read_fields(reader: Reader) -> Fields:
    """Read what `write_fields` wrote; CodecError on anything else."""
    noise, processor, flags, finish, value_kind = reader.take(5)
    _check_version("noise", noise, NOISE_VERSION)
    _check_version("processor", processor, PROCESSOR_VERSION)
    if flags > _ALL_FLAGS:
        raise CodecError(f"trace body has unknown flags {flags:#x}; drop the trace")
    table = reader.blob()
    if len(table) not in (0, DIGEST_BYTES):
        raise CodecError(f"trace body names a remap table in {len(table)} bytes, expected 0 or 32")
    return Fields(
        prompt_cut=bool(flags & _PROMPT_CUT),
        output_cut=bool(flags & _OUTPUT_CUT),
        held_out=bool(flags & _HELD_OUT),
        has_processed=bool(flags & _PROCESSED),
        finish=_code(Finish, finish),
        value_kind=_code(ValueKind, value_kind),
        table=table,
        seed=reader.u64() if flags & _SEED_KNOWN else None,
        choice=reader.varint(),
        sampling=_read_sampling(reader, ignore_eos=bool(flags & _IGNORE_EOS)),
        chat_template_hash=reader.blob(),
        drafters=tuple([_read_run(reader) for _ in range(reader.count(3))]),
        branches=tuple([(reader.varint(), reader.varint()) for _ in range(reader.count(2))]),
        ext=reader.blob(),
    )


def _flags(fields: Fields) -> int:
    chosen = {
        _PROMPT_CUT: fields.prompt_cut,
        _OUTPUT_CUT: fields.output_cut,
        _HELD_OUT: fields.held_out,
        _IGNORE_EOS: fields.sampling.ignore_eos,
        _SEED_KNOWN: fields.seed is not None,
        _PROCESSED: fields.has_processed,
    }
    return sum(flag for flag, is_set in chosen.items() if is_set)


def _write_sampling(writer: Writer, sampling: Sampling) -> None:
    writer.f64(sampling.temperature)
    writer.f64(sampling.top_p)
    writer.f64(sampling.min_p)
    writer.f64(sampling.repetition_penalty)
    writer.f64(sampling.presence_penalty)
    writer.f64(sampling.frequency_penalty)
    writer.varint(sampling.top_k)
    writer.varint(sampling.min_tokens)
    writer.varint(len(sampling.logit_bias))
    for token, bias in sampling.logit_bias:
        writer.varint(token)
        writer.f64(bias)
    for ids in (sampling.eos_ids, sampling.stop_ids):
        writer.varint(len(ids))
        for token in ids:
            writer.varint(token)


def _read_sampling(reader: Reader, *, ignore_eos: bool) -> Sampling:
    temperature, top_p, min_p, repetition, presence, frequency = reader.f64s(_SIX_F64)
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        top_k=reader.varint(),
        min_tokens=reader.varint(),
        logit_bias=tuple([(reader.varint(), reader.f64()) for _ in range(reader.count(9))]),
        eos_ids=tuple([reader.varint() for _ in range(reader.count(1))]),
        stop_ids=tuple([reader.varint() for _ in range(reader.count(1))]),
        ignore_eos=ignore_eos,
    )


def _read_run(reader: Reader) -> DrafterRun:
    return DrafterRun(
        drafter=reader.blob(), context_start=reader.varint(), positions=reader.varint()
    )


def _check_version(what: str, got: int, expected: int) -> None:
    if got != expected:
        raise CodecError(
            f"trace body has {what} version {got}, expected {expected}; "
            "read it with a draftkeep that knows that version"
        )


def _code(kind: type[_Code], value: int) -> _Code:
    try:
        return kind(value)
    except ValueError:
        raise CodecError(f"trace body has {kind.__name__} {value}, which is not defined") from None
