"""What capture costs a node: the whole way from the top-k to the synced log, on the same cores."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.peers.peer import SLOTS
from bench.prompts import HOME, Prompt
from bench.serving.intervals import steady_ratio
from bench.serving.runs import Runs, alternate
from bench.serving.setup import AUTO, Bench, Figure
from draftkeep.config import Config, TenantConfig
from draftkeep.errors import DraftkeepError
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.keyring import Keyring
from draftkeep.serve.assembly import open_catalog, open_outbox
from draftkeep.serve.capture import Capture
from draftkeep.serve.delivery import Delivery
from draftkeep.serve.outbox import Outbox
from draftkeep.store.models.target import TargetModel

_TENANT = "bench"
_FLUSH_S = 30.0
_WAVES = 3


class CapturePath:
    """A node's capture: codec, sealer, and log, with requests of a few subjects."""

    def __init__(self, capture: Capture, outbox: Outbox, target: TargetModel) -> None:
        self.capture = capture
        self._outbox = outbox
        self._target = target
        self._numbers = count()

    def tag(self) -> Delivery | None:
        """The tag of one more request; its trace is offered as soon as it has finished."""
        delivery = self.capture.admit(
            Provenance(
                tenant=_TENANT,
                subject=f"subject-{next(self._numbers) % SLOTS}",
                response_id=secrets.token_bytes(16),
                domain=HOME,
                consent=0,
                policy_version=1,
                created_s=int(time.time()),
                target=self._target.target_fingerprint,
                tokenizer=self._target.tokenizer_fingerprint,
            )
        )
        if delivery is not None:
            delivery.deliver()
        return delivery

    def flush(self) -> None:
        """Wait until every trace so far is acknowledged or dropped."""
        if not self._outbox.emitter.flush(_FLUSH_S):
            raise DraftkeepError(f"the log did not take the traces within {_FLUSH_S:.0f} s")


@contextmanager
def capture_path(target: TargetModel, parent: Path) -> Iterator[CapturePath]:
    """A capture path in a temporary directory under `parent`, which says what disk is synced."""
    with TemporaryDirectory(dir=parent) as name:
        config = Config(
            state_dir=Path(name), tenants=(TenantConfig(name=_TENANT, api_key_sha256="0" * 64),)
        )
        keyring = Keyring.open(config.keys_path, retention=config.retention, clock=time.time)
        catalog, signing = open_catalog(config, keyring, clock=time.time)
        outbox = open_outbox(
            config, keyring, signing, catalog, clock=time.time, on_drop=lambda reason: None
        )
        if outbox is None:
            raise DraftkeepError("nothing can be captured here; the log says why")
        try:
            capture = Capture(
                outbox.emitter,
                context_tokens=config.capture.context_tokens,
                chat_template_hash=target.chat_template_hash,
                on_problem=lambda kind, error: None,
            )
            yield CapturePath(capture, outbox, target)
        finally:
            outbox.close(_FLUSH_S)
            keyring.close()
            catalog.close()


def capture_cost(bench: Bench) -> list[Figure]:
    """capture_cost and capture_path_cost: shares of tokens a second lost to capture.

    By rounds of three requests a slot, so that most traces are coded, sealed and logged while
    other requests are served. What is left after a round's last answer is waited for before the
    next begins: `capture_cost` leaves that wait out, `capture_path_cost` counts it.
    """
    rounds, at_once = bench.sizes.capture_rounds, _WAVES * SLOTS
    groups = [bench.home(at_once, skip=at_once * number) for number in range(rounds)]
    whole = Runs()
    with capture_path(bench.target, bench.cache_dir) as path:
        _captured(bench, groups[0], path, Runs(), Runs())
        ways: dict[str, Callable[[list[Prompt], Runs], None]] = {
            "off": lambda prompts, runs: runs.add_served(
                bench.engine.serve(prompts, speculation=AUTO, capture=False)
            ),
            "on": lambda prompts, runs: _captured(bench, prompts, path, runs, whole),
        }
        runs = alternate(bench, groups, ways, title="capture on and off")
        conditions = {
            "rounds": rounds,
            "requests_a_round": at_once,
            "at_a_time": SLOTS,
            "acknowledged": path.capture.acknowledged,
            "dropped": path.capture.drops(),
            "waited_for_log_share": 1 - sum(runs["on"].seconds) / sum(whole.seconds),
        }
    return [
        _lost("capture_cost", runs["on"], runs["off"], conditions),
        _lost("capture_path_cost", whole, runs["off"], conditions),
    ]


def _lost(metric: str, on: Runs, off: Runs, conditions: dict[str, object]) -> Figure:
    ratio = on.over(off, steady_ratio)
    lost = replace(ratio, value=1 - ratio.value, low=1 - ratio.high, high=1 - ratio.low)
    return Figure(
        metric=metric,
        value=lost.value,
        unit="share of tokens/s",
        against="the same requests without capture",
        interval=lost,
        conditions=conditions,
    )


def _captured(
    bench: Bench, prompts: list[Prompt], path: CapturePath, answers: Runs, whole: Runs
) -> None:
    """Serve a round with capture: `answers` until the last answer, `whole` until all is logged."""
    served = bench.engine.serve(
        prompts, speculation=AUTO, tag=path.tag, on_finish=path.capture.finished
    )
    started_s = bench.clock()
    path.flush()
    answers.add_served(served)
    whole.add_served(served, extra_s=bench.clock() - started_s)
