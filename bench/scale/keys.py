"""A keyring of many keys: what a first use, a known subject, an erasure and a deadline cost.

The rows are made by the keyring's own code; only the commits of the filling are shared, since a
million of them would measure the disk. A key is a subject and its alias in one of 100 periods.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from sqlite3 import Connection

from bench.scale.points import Took, checkpoints, middle, timed
from bench.scale.run import MS, PER_1000, Run
from bench.scale.traffic import PERIOD_S, START_S, TTL_S
from draftkeep.config import RetentionConfig
from draftkeep.policies import names
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.keyring_db import FILE_NAME, KeyringDb
from draftkeep.policies.keyring_files import SUBJECT_KEK
from draftkeep.policies.node_keys import NodeKeys
from draftkeep.policies.secret_file import KEY_BYTES
from draftkeep.policies.subject_rows import SubjectKind, SubjectRows

PHASE = "keyring"
_TENANT = "tenant-00"
_PERIODS = 100
_CHUNK = 1000
_TIMES = 9
_KNOWN = 25
_RETENTION = RetentionConfig(period_s=PERIOD_S, ttl_s=TTL_S)


class _Bulk(KeyringDb):
    """A keyring file whose writes join the transaction of `together`."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """One commit for all writes of the block."""
        with super().write():
            yield

    @contextmanager
    def write(self) -> Iterator[Connection]:
        yield self._connection


def keyring(run: Run) -> None:
    """Fill a keyring with keys and measure it; goes on from the last checkpoint it passed."""
    directory = run.directory / PHASE
    opened = Keyring.open(directory, retention=_RETENTION, clock=_now)
    bulk = _Bulk(directory, create=False)
    try:
        _Keys(run, directory, opened, bulk).fill(run.sizes.keys)
    finally:
        bulk.close()
        opened.close()


def _now() -> float:
    """In the last period, when all of them live."""
    return START_S + (_PERIODS - 1) * PERIOD_S + 1.0


class _Keys:
    def __init__(self, run: Run, directory: Path, opened: Keyring, bulk: _Bulk) -> None:
        self._run = run
        self._directory = directory
        self._keyring = opened
        self._bulk = bulk
        self._lookup_key = opened.lookup_key(_TENANT)
        self._per_period = max(1, run.sizes.keys // _PERIODS)
        self._rows = SubjectRows(bulk, LocalKek.load(directory / SUBJECT_KEK))
        # Where each run of the bench is to find other subjects to erase, and the same ones again.
        self._draw = random.Random(1)

    def fill(self, total: int) -> None:
        """Keys up to `total`, measured at the checkpoints."""
        done = max((point.at for point in self._run.points.of(PHASE, "expire")), default=0)
        self._run.points.forget(PHASE, beyond=done)
        with self._run.bar(f"{PHASE}: keys", total) as bar:
            for stop in checkpoints(total):
                while done < stop:
                    count = min(_CHUNK, stop - done)
                    self._make(range(done, done + count))
                    done += count
                    bar.at(done)
                if not self._run.points.has(PHASE, "expire", stop):
                    self._measure(stop)

    def _make(self, numbers: Iterable[int]) -> None:
        """Insert or read these subjects, which is why filling again does no harm."""
        by_period: dict[int, list[int]] = {}
        for number in numbers:
            by_period.setdefault(number // self._per_period, []).append(number)
        for period, members in by_period.items():
            record = self._keyring.ensure_period(_TENANT, START_S + period * PERIOD_S)
            with self._bulk.together():
                for number in members:
                    tag = names.subject_tag(self._lookup_key, _name(number))
                    self._rows.first_use(record, SubjectKind.NAMED, tag)

    def _measure(self, at: int) -> None:
        run = self._run
        self._bulk.scrub()
        size_bytes = (self._directory / FILE_NAME).stat().st_size
        keys = self._bulk.read("SELECT count(*) FROM subjects")[0][0]
        run.add_value(PHASE, "bytes_a_key", at, size_bytes / keys, "B")
        run.add(PHASE, "wrap", at, self._wrap(), PER_1000)
        newest = self._keyring.ensure_period(_TENANT, _now())
        use = self._keyring.node_keys().subject
        fresh = [f"fresh-{at}-{number}" for number in range(_KNOWN)]
        took = middle(timed(partial(use, _TENANT, name, newest.period_id))[1] for name in fresh)
        run.add(PHASE, "first_use", at, took, MS)
        run.add(PHASE, "known", at, self._known(at), MS)
        erased = [_name(self._number(at)) for _ in range(_TIMES)]
        took = middle(
            timed(partial(self._keyring.destroy_subject, _TENANT, name))[1] for name in erased
        )
        run.add(PHASE, "erase", at, took, MS)
        self._expire(at)

    def _wrap(self) -> Took:
        """What the re-keying of a bucket would spend on each of its rows."""
        kek = LocalKek(bytes(KEY_BYTES))
        key, context = bytes(KEY_BYTES), bytes(64)
        return timed(lambda: [kek.wrap(key, context) for _ in range(1000)])[1]

    def _known(self, at: int) -> Took:
        """A subject that another process made: read and unwrapped, not from memory."""
        node = NodeKeys.open(self._directory, retention=_RETENTION, clock=_now)
        try:
            periods = {record.start_s: record for record in self._keyring.periods()}
            taken = []
            for _ in range(_KNOWN):
                number = self._number(at)
                period = periods[START_S + number // self._per_period * PERIOD_S]
                ask = partial(node.subject, _TENANT, _name(number), period.period_id)
                taken.append(timed(ask)[1])
            return middle(taken)
        finally:
            node.close()

    def _number(self, at: int) -> int:
        """One of the newer half of the subjects, whose periods no checkpoint has ended."""
        return self._draw.randrange(at // 2, at)

    def _expire(self, at: int) -> None:
        """End the oldest period. `at` keys with it are what says that the checkpoint is passed."""
        oldest = min(self._keyring.periods(), key=lambda record: record.start_s)
        destroyed, took = timed(lambda: self._keyring.destroy_expired(float(oldest.destroy_at_s)))
        self._run.add(PHASE, "expire", at, took.over(destroyed / 1000), PER_1000)
        self._run.add_peak(PHASE, at)


def _name(number: int) -> str:
    return f"subject-{number}"
