"""Really sealed traces, from the sealer to the opener, and what each costs by then.

Small random bodies; everything else is the package's own: keyring, sealer, embedded log, compactor,
catalog, shards, reader, opener. Time is a clock that moves with the traces. A subject sends five
traces in a period it is seen in, on average.
"""

import random
from functools import partial

from bench.scale.opening import measure
from bench.scale.points import Took, checkpoints, middle, timed
from bench.scale.run import PER_1000, Run
from bench.scale.traffic import PERIOD_S, START_S, TARGET, TRACES_A_SUBJECT
from bench.scale.world import TENANTS, open_world
from draftkeep.ingest.record import encode_record
from draftkeep.ingest.trace import Provenance
from draftkeep.store.periods import publish_period
from tests.deployment import Deployment

PHASE = "sealed"
BODY_BYTES = 600
_POSITIONS = 12
_PERIODS = 20
_TARGET_BYTES = 32 * 1024**2
_MERGE_EVERY = 8
_APPENDED = 256
_STEPS = ("first_use", "seal", "append", "compact", "merge")


def sealed(run: Run) -> None:
    """Seal, store and open; goes on from what the log has given out."""
    with open_world(run.directory / PHASE) as world:
        _Sealing(run, world).fill(run.sizes.traces)


class _Sealing:
    def __init__(self, run: Run, world: Deployment) -> None:
        self._run = run
        self._world = world
        self._compactor = world.compactor()
        self._per_period = max(1, run.sizes.traces // _PERIODS)
        self._taken: dict[str, list[Took]] = {step: [] for step in _STEPS}
        self._unmerged = 0

    def fill(self, total: int) -> None:
        """Traces up to `total`, measured at the checkpoints."""
        run, done = self._run, self._world.log.bounds()[1]
        self._world.clock.now_s = self._time_of(max(0, done - 1))
        while self._compactor.run_once().read:
            pass
        run.points.forget(PHASE, beyond=done)
        stops = [at for at in checkpoints(total) if not run.points.has(PHASE, "peak_rss", at)]
        window = max(1, checkpoints(total)[0] // run.sizes.batch)
        with run.bar(f"{PHASE}: traces", total) as bar:
            for stop in stops:
                while done < stop:
                    count = min(run.sizes.batch, stop - done)
                    count = min(count, self._per_period - done % self._per_period)
                    self._store(done, count)
                    done += count
                    bar.at(done)
                    if len(self._taken["compact"]) >= window:
                        self._note(done)
                self._note(done)
                measure(run, PHASE, self._world, stop, self._last_users(stop))

    def _time_of(self, number: int) -> float:
        return START_S + number * PERIOD_S / self._per_period

    def _group(self, first: int, count: int) -> list[Provenance]:
        """Whose traces these are. Who is seen in a period is drawn once for all of it."""
        period = first // self._per_period
        subjects = max(1, self._per_period // TRACES_A_SUBJECT)
        seen = random.Random(f"seen {period}").sample(
            range(max(subjects, self._run.sizes.subjects)), subjects
        )
        group = []
        for number in range(first, first + count):
            draw = random.Random(number)
            subject = draw.choice(seen)
            group.append(
                Provenance(
                    tenant=TENANTS[subject % len(TENANTS)],
                    subject=f"subject-{subject}",
                    response_id=draw.randbytes(16),
                    domain="chat",
                    consent=0,
                    policy_version=1,
                    created_s=int(self._time_of(number)),
                    target=TARGET,
                    tokenizer=TARGET,
                )
            )
        return group

    def _store(self, first: int, count: int) -> None:
        world, per = self._world, count / 1000
        world.clock.now_s = self._time_of(first + count - 1)
        periods = {name: world.keyring.ensure_period(name, world.clock.now_s) for name in TENANTS}
        for record in periods.values():
            publish_period(world.catalog, record)
        group = self._group(first, count)
        bodies = [random.Random(-1 - n).randbytes(BODY_BYTES) for n in range(first, first + count)]
        use = world.keyring.node_keys().subject
        users = dict.fromkeys((item.tenant, item.subject) for item in group)
        _, took = timed(lambda: [use(t, s, periods[t].period_id) for t, s in users])
        self._taken["first_use"].append(took.over(per))
        records, took = timed(
            lambda: [self._seal(*pair) for pair in zip(bodies, group, strict=True)]
        )
        self._taken["seal"].append(took.over(per))
        _, took = timed(lambda: self._append(records))
        self._taken["append"].append(took.over(per))
        report, took = timed(self._compactor.run_once)
        self._taken["compact"].append(took.over(report.stored / 1000))
        self._unmerged += count
        if self._unmerged >= _MERGE_EVERY * self._run.sizes.batch:
            _, took = timed(partial(self._world.merge, _TARGET_BYTES))
            self._taken["merge"].append(took.over(self._unmerged / 1000))
            self._unmerged = 0

    def _seal(self, body: bytes, provenance: Provenance) -> bytes:
        return encode_record(
            self._world.sealer.seal(body, provenance, prompt_tokens=50, positions=_POSITIONS)
        )

    def _append(self, records: list[bytes]) -> None:
        for start in range(0, len(records), _APPENDED):
            self._world.log.append(records[start : start + _APPENDED])

    def _last_users(self, at: int) -> list[tuple[str, str]]:
        """Tenant and name of those who sent the last traces, the latest first."""
        first = max(at - self._run.sizes.batch, (at - 1) // self._per_period * self._per_period)
        group = self._group(first, at - first)
        return list(dict.fromkeys((item.tenant, str(item.subject)) for item in reversed(group)))

    def _note(self, at: int) -> None:
        for step, taken in self._taken.items():
            if taken:
                self._run.add(PHASE, step, at, middle(taken), PER_1000)
                taken.clear()
