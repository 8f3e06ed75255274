"""One process's share of a topic: a Compactor for each partition it has, and the loop around them.

Who has which partition is somebody else's word (a consumer group's, or the command's). It may be
stale: of two processes with one partition the catalog lets one commit, and the other starts again
from where the first one is.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from draftkeep.errors import ConflictError, LogReplacedError, StoreError
from draftkeep.store.compactor import Compactor, CompactReport

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Round:
    """What one round did: the reports of its batches, rounds lost to rivals, and what failed.

    `failed` is by partition. `lag` is, for each partition that was read, how many offsets were
    left when its last batch began.
    """

    reports: list[CompactReport] = field(default_factory=list)
    conflicts: int = 0
    failed: dict[int, StoreError] = field(default_factory=dict)
    lag: dict[int, int] = field(default_factory=dict)

    def failures(self) -> list[StoreError]:
        """What failed, in one error with the first reason; empty where nothing did."""
        return [
            StoreError(
                f"{len(self.failed)} of the partitions cannot be compacted; partition {partition}: "
                f"{error}"
            )
            for partition, error in sorted(self.failed.items())[:1]
        ]


class CompactorGroup:
    """Compactors of the partitions in hand, opened when they come and closed when they go.

    `open_compactor` makes one for a partition; `committed(partition, offset)` is told after every
    batch how far its log is in shards. Not for several threads at once.
    """

    def __init__(
        self,
        open_compactor: Callable[[int], Compactor],
        *,
        committed: Callable[[int, int], None] = lambda partition, offset: None,
    ) -> None:
        self._open_compactor = open_compactor
        self._committed = committed
        self._open: dict[int, Compactor] = {}

    def run_round(
        self,
        partitions: Callable[[], Collection[int]],
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Round:
        """Read each partition to where its log ended when the round first came to it.

        One batch of each in turn, so that none waits for another's backlog. `partitions` is asked
        before every batch: those that went are left alone, those that came join the round. A
        partition that fails ends its part and is opened anew in the next round. `stopped` ends the
        round after a batch. Raises LogReplacedError, for which only an operator has an answer.
        """
        done = Round()
        ends: dict[int, int] = {}
        finished: set[int] = set()
        waiting: deque[int] = deque()
        while not stopped():
            mine = set(partitions())
            self._close(set(self._open) - mine)
            waiting = deque(item for item in waiting if item in mine)
            waiting.extend(sorted(mine - finished - set(waiting)))
            if not waiting:
                break
            partition = waiting.popleft()
            report = self._batch(partition, done)
            if report is not None:
                ends.setdefault(partition, report.next_offset + report.lag)
            if partition in done.failed or (
                report is not None and report.next_offset >= ends[partition]
            ):
                finished.add(partition)
            else:
                waiting.append(partition)
        return done

    def close(self) -> None:
        """Close every log. Harmless when repeated."""
        self._close(list(self._open))

    def _batch(self, partition: int, done: Round) -> CompactReport | None:
        """One batch of one partition; None where a rival won or it failed, which `done` says."""
        try:
            if partition not in self._open:
                self._open[partition] = self._open_compactor(partition)
            report = self._open[partition].run_once()
        except ConflictError as error:
            _log.info("partition %d: %s", partition, error)
            done.conflicts += 1
            return None
        except LogReplacedError:
            raise
        except StoreError as error:
            done.failed[partition] = error
            self._close([partition])
            return None
        done.reports.append(report)
        done.lag[partition] = report.lag
        self._committed(partition, report.next_offset)
        return report

    def _close(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            compactor = self._open.pop(partition, None)
            if compactor is not None:
                compactor.close()


def does_upkeep(partitions: Collection[int]) -> bool:
    """Whether who has these partitions rewrites, merges and sweeps for all: one process does."""
    return 0 in partitions


def totals(rounds: Round) -> Mapping[str, int]:
    """A round in numbers, for a line of counts."""
    reports = rounds.reports
    return {
        "read": sum(report.read for report in reports),
        "stored": sum(report.stored for report in reports),
        "shards": sum(len(report.shards) for report in reports),
        "duplicates": sum(report.duplicates for report in reports),
        "refused": sum(sum(report.counted.values()) for report in reports),
        "dead_letters": sum(sum(report.dead.values()) for report in reports),
        "gaps": sum(len(report.gaps) for report in reports),
        "lost": sum(report.lost for report in reports),
        "conflicts": rounds.conflicts,
        "lag": sum(rounds.lag.values()),
    }
