"""What capture costs a node: the whole way from the top-k to the synced log, on the same cores."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.intervals import speed_ratio
from bench.serving_setup import AUTO, SLOTS, Bench, Figure
from bench.serving_work import HOME, Prompt, turns
from draftkeep.config import Config, TenantConfig
from draftkeep.errors import DraftkeepError
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.keyring import Keyring
from draftkeep.serve.capture import Capture, CaptureTag
from draftkeep.serve.outbox import Outbox
from draftkeep.store.catalog import Catalog
from draftkeep.store.models import TargetModel

_TENANT = "bench"
_FLUSH_S = 30.0


class CapturePath:
    """A node's capture: codec, sealer, and log, with requests of a few subjects."""

    def __init__(self, capture: Capture, outbox: Outbox, target: TargetModel) -> None:
        self.capture = capture
        self._outbox = outbox
        self._target = target
        self._numbers = count()

    def tag(self) -> CaptureTag:
        """The tag of one more request; its trace is offered as soon as it has finished."""
        return CaptureTag(
            provenance=Provenance(
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
        catalog = Catalog.open(config.state_dir / "catalog.db")
        outbox = Outbox.build(
            config, keyring=keyring, catalog=catalog, clock=time.time, on_drop=lambda reason: None
        )
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
    """The share of tokens a second that capture costs, by rounds of eight prompts."""
    rounds = bench.sizes.capture_rounds
    tokens: dict[bool, list[int]] = {True: [], False: []}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    waited_s = 0.0
    with capture_path(bench.target, bench.cache_dir) as path, bench.progress() as progress:
        _captured(bench, bench.home(SLOTS, skip=0), path)
        bar = progress.add_task("capture on and off", total=2 * rounds)
        for number in range(rounds):
            prompts = bench.home(SLOTS, skip=SLOTS * number)
            for on in turns((False, True), number):
                if on:
                    made, took_s, flush_s = _captured(bench, prompts, path)
                    waited_s += flush_s
                else:
                    served = bench.engine.serve(prompts, speculation=AUTO, capture=False)
                    made, took_s = served.tokens, served.seconds
                tokens[on].append(made)
                seconds[on].append(took_s)
                progress.advance(bar)
        conditions = {
            "rounds": rounds,
            "at_a_time": SLOTS,
            "acknowledged": path.capture.acknowledged,
            "dropped": path.capture.drops(),
            "waited_for_log_share": waited_s / sum(seconds[True]),
        }
    ratio = speed_ratio(
        tokens=tokens[True],
        seconds=seconds[True],
        other_tokens=tokens[False],
        other_seconds=seconds[False],
    )
    lost = replace(ratio, value=1 - ratio.value, low=1 - ratio.high, high=1 - ratio.low)
    return [
        Figure(
            metric="capture_cost",
            value=lost.value,
            unit="share of tokens/s",
            against="the same requests without capture",
            interval=lost,
            conditions=conditions,
        )
    ]


def _captured(bench: Bench, prompts: list[Prompt], path: CapturePath) -> tuple[int, float, float]:
    """(tokens, seconds until the log has all, seconds of these after the last answer)."""
    clock: Callable[[], float] = bench.clock
    served = bench.engine.serve(
        prompts, speculation=AUTO, tag=path.tag, on_finish=path.capture.finished
    )
    started_s = clock()
    path.flush()
    flush_s = clock() - started_s
    return served.tokens, served.seconds + flush_s, flush_s
