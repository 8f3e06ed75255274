"""Selection: which traces a job learns from, opened, with everything else counted by reason."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from draftkeep.distill.batch import trainable_T
from draftkeep.errors import DraftkeepError, KeyDestroyedError
from draftkeep.ingest.envelope import Opener
from draftkeep.ingest.header import Header
from draftkeep.ingest.record import SealedTrace
from draftkeep.ingest.trace import Trace
from draftkeep.policies.keyring import JobKeys
from draftkeep.store.catalog import Catalog
from draftkeep.store.jobs import JobInput
from draftkeep.store.models.target import TargetModel
from draftkeep.store.reader import iter_sealed
from draftkeep.store.storage import Storage

# As many as go through the steps together: see `draftkeep.ingest.stages`.
_TOGETHER = 32

# `codec.decode_bodies` with the tables at hand.
Decode = Callable[[Iterable[bytes | DraftkeepError]], list[Trace | DraftkeepError]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A trace in memory with the header it was sealed under. Obeys the same deadline."""

    header: Header
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a job works with. `skipped` counts what it does not, by reason.

    The lists are the only ones that hold the traces; who drops a trace drops it from them.

    One subject's traces are all in `training` or all in `held_out`. Reasons: `key_destroyed`
    (erased or past its deadline), `corrupt`, `foreign_tokenizer`, `wrong_target`, `untrainable`
    (no stored distribution to learn from), `expired`, `erased`.
    """

    training: list[Opened]
    held_out: list[Opened]
    skipped: Mapping[str, int]


def list_sealed(
    catalog: Catalog, storage: Storage, *, tenant: str, target: bytes, now_s: float
) -> list[SealedTrace]:
    """Every live trace of one tenant and target, still sealed, in a fixed order. Needs no key."""
    found = iter_sealed(catalog, storage, tenants=[tenant], target=target, not_after_s=now_s)
    return sorted(found, key=_age)


def inputs_of(headers: Iterable[Header]) -> list[JobInput]:
    """Positions by (tenant, alias, period), in a fixed order."""
    positions: Counter[tuple[str, bytes, bytes]] = Counter()
    for header in headers:
        positions[header.tenant, header.alias, header.period_id] += header.positions
    return [
        JobInput(tenant=tenant, alias=alias, period_id=period_id, positions=count)
        for (tenant, alias, period_id), count in sorted(positions.items())
    ]


def open_all(
    sealed: Iterable[SealedTrace],
    *,
    opener: Opener,
    decode: Decode,
    target: TargetModel,
    progress: Callable[[int], None] = lambda done: None,
) -> Selection:
    """Open, decode and sort into training and held-out; a trace that cannot be used is counted.

    `progress` gets the number of traces gone through.
    """
    training: list[Opened] = []
    held_out: list[Opened] = []
    skipped: Counter[str] = Counter()
    remaining, done = iter(sealed), 0
    while group := list(islice(remaining, _TOGETHER)):
        for found in _open_group(group, opener, decode, target):
            if isinstance(found, str):
                skipped[found] += 1
            else:
                (held_out if found.trace.held_out else training).append(found)
            done += 1
            progress(done)
    return Selection(training=training, held_out=held_out, skipped=dict(skipped))


def _age(sealed: SealedTrace) -> tuple[int, bytes]:
    header = sealed.parsed
    return header.created_s, header.trace_id


def _open_group(
    group: Sequence[SealedTrace], opener: Opener, decode: Decode, target: TargetModel
) -> list[Opened | str]:
    """The trace of each, or why it cannot be used."""
    reasons = [_foreign(item, target) for item in group]
    ours = [item for item, reason in zip(group, reasons, strict=True) if reason is None]
    traces = iter(decode(opener.open_all(ours)))
    return [
        reason or _usable(item, next(traces), target)
        for item, reason in zip(group, reasons, strict=True)
    ]


def _foreign(sealed: SealedTrace, target: TargetModel) -> str | None:
    header = sealed.parsed
    if header.target != target.target_fingerprint:
        return "wrong_target"
    if header.tokenizer != target.tokenizer_fingerprint:
        return "foreign_tokenizer"
    return None


def _usable(
    sealed: SealedTrace, trace: Trace | DraftkeepError, target: TargetModel
) -> Opened | str:
    if isinstance(trace, KeyDestroyedError):
        return "key_destroyed"
    if isinstance(trace, DraftkeepError) or not _ids_fit(trace, target.vocab):
        return "corrupt"
    if not trainable_T(trace).any():
        return "untrainable"
    return Opened(header=sealed.parsed, trace=trace)


def _ids_fit(trace: Trace, vocab: int) -> bool:
    """Whether every token id is one of the target's; padding of the lists is -1."""
    tokens = np.concatenate([trace.prompt_ids_P, trace.output_ids_T])
    listed = trace.topk.ids_TK
    return bool(
        tokens.min(initial=0) >= 0
        and max(tokens.max(initial=0), listed.max(initial=0)) < vocab
        and listed.min(initial=0) >= -1
    )


def living(keys: JobKeys, items: Sequence[Opened]) -> list[Opened]:
    """Those of `items` that may still be read: keys neither erased nor past their deadline."""
    alive: dict[tuple[bytes, bytes], bool] = {}
    for item in items:
        pair = (item.header.alias, item.header.period_id)
        if pair not in alive:
            alive[pair] = _has_key(keys, *pair)
    return [item for item in items if alive[item.header.alias, item.header.period_id]]


def _has_key(keys: JobKeys, alias: bytes, period_id: bytes) -> bool:
    try:
        keys.subject_key_for(alias, period_id)
    except KeyDestroyedError:
        return False
    return True
