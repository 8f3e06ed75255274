"""What each tenant may use of a node at a time. One tenant at its limit costs no other anything."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from draftkeep.config import LimitsConfig
from draftkeep.errors import BusyError, InputError

# How long a choice under way will take is not known.
CONCURRENT_RETRY_S = 1.0
_MINUTE_S = 60.0
# Whoever comes back after the time it was told finds the level this close at worst.
_ROUNDING = 1e-6


class Bucket:
    """A token bucket of `per_minute`, full at first, whose burst is one minute's worth.

    An amount is taken in advance and what was not needed comes back. What comes back never lifts
    the level, together with what others may still give back, above the burst: time has refilled
    that part already. So what is used of amounts taken within any interval is at most the burst
    and what flows in during it, and a bucket left alone for a minute is full, whatever is out.
    """

    def __init__(self, per_minute: int, *, now_s: float) -> None:
        self.burst = per_minute
        self._per_s = per_minute / _MINUTE_S
        self._level = float(per_minute)
        self._seen_s = now_s
        self._next = 0
        # What each open amount may still give back, oldest first.
        self._open: dict[int, float] = {}

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until `amount` can be taken if nobody else takes any; 0 where it can."""
        self._refill(now_s)
        # A level a rounding below zero is zero: nobody waits longer than the bucket takes to fill.
        lacking = min(amount - self._level, float(self.burst))
        return lacking / self._per_s if lacking > _ROUNDING else 0.0

    def take(self, amount: int, now_s: float) -> int:
        """Take an amount that `wait_s` has no wait for; returns what `settle` wants."""
        self._refill(now_s)
        self._level -= amount
        self._next += 1
        self._open[self._next] = float(amount)
        return self._next

    def settle(self, number: int, unused: int, now_s: float) -> None:
        """Give back what was not needed of an amount taken, once."""
        self._refill(now_s)
        self._level += min(self._open.pop(number), max(0, unused))

    def _refill(self, now_s: float) -> None:
        # A clock that went back refills nothing.
        passed_s = max(0.0, now_s - self._seen_s)
        self._seen_s = max(self._seen_s, now_s)
        self._level = min(float(self.burst), self._level + passed_s * self._per_s)
        excess = self._level + sum(self._open.values()) - self.burst
        for number, amount in self._open.items():
            if excess <= 0:
                break
            self._open[number] = amount - min(amount, excess)
            excess -= amount


@dataclass(slots=True, kw_only=True)
class TenantUse:
    """What one tenant used since start. `running` is the choices under way at the moment.

    `tokens` are those of closed tickets, prompt and output. `refused` counts requests by nothing
    but that a limit of the tenant's own said no.
    """

    requests: int = 0
    tokens: int = 0
    running: int = 0
    refused: int = 0


class Ticket:
    """The right of one request to run. `close` it whatever becomes of the request."""

    def __init__(self, close: Callable[[int], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._closed = False

    def close(self, used_tokens: int) -> None:
        """Give back the choices and the tokens beyond `used_tokens`. The first call counts."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._close(used_tokens)


class Limits:
    """The limits of every tenant, with what it used. Thread-safe; `clock` is monotonic seconds."""

    def __init__(self, limits: Mapping[str, LimitsConfig], *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        now_s = clock()
        self._tenants = {name: _Tenant(limit, now_s) for name, limit in limits.items()}

    def peek(self, tenant: str, *, choices: int, tokens: int) -> None:
        """Refuse what `enter` would refuse with the shortest of prompts, before one is read.

        `tokens` is the fewest that `enter` could be asked for. Nothing is taken; raises as `enter`
        does, with a wait that is long enough for the shortest prompt.
        """
        with self._lock:
            self._tenants[tenant].check(choices, tokens, self._clock())

    def enter(self, tenant: str, *, choices: int, tokens: int) -> Ticket:
        """Let a request in that wants `choices` answers and at most `tokens`, prompts and outputs.

        Raises BusyError with the time after which the same request could enter if the tenant sent
        no other, and InputError for one that is over a limit all by itself. Nothing is taken then.
        """
        with self._lock:
            known, now_s = self._tenants[tenant], self._clock()
            known.check(choices, tokens, now_s)
            number = known.take(choices, tokens, now_s)

        def close(used_tokens: int) -> None:
            with self._lock:
                known.close(number, choices, tokens, used_tokens, self._clock())

        return Ticket(close)

    def most_tokens(self, tenant: str) -> int | None:
        """The most tokens that one request of the tenant may want; None where nothing bounds it."""
        return self._tenants[tenant].most_tokens

    def usage(self) -> dict[str, dict[str, int]]:
        """What each tenant used, for the administrator."""
        with self._lock:
            return {name: asdict(tenant.use) for name, tenant in self._tenants.items()}


class _Tenant:
    """One tenant's buckets and counts; the caller holds the lock."""

    def __init__(self, limits: LimitsConfig, now_s: float) -> None:
        self.use = TenantUse()
        self._concurrent = limits.concurrent
        self._requests = _bucket(limits.requests_per_minute, now_s)
        self._tokens = _bucket(limits.tokens_per_minute, now_s)
        self.most_tokens = limits.tokens_per_minute

    def check(self, choices: int, tokens: int, now_s: float) -> None:
        """Raise where the request may not enter, and count it as refused."""
        try:
            self._check(choices, tokens, now_s)
        except (BusyError, InputError):
            self.use.refused += 1
            raise

    def _check(self, choices: int, tokens: int, now_s: float) -> None:
        if self._concurrent is not None and choices > self._concurrent:
            raise InputError(
                f"{choices} choices are over this tenant's limit of {self._concurrent} at a time; "
                "ask for fewer",
                param="n",
            )
        if self._tokens is not None and tokens > self._tokens.burst:
            raise InputError(
                f"prompt and answers could take {tokens} tokens, over this tenant's limit of "
                f"{self._tokens.burst} a minute; lower max_tokens or n, or shorten the prompt",
                param="max_tokens",
            )
        if self._concurrent is not None and self.use.running + choices > self._concurrent:
            raise BusyError(
                f"{self.use.running} of this tenant's {self._concurrent} answers at a time are "
                "under way; wait for one to end",
                retry_after_s=CONCURRENT_RETRY_S,
            )
        waits = [
            (_wait_s(self._requests, 1, now_s), "requests"),
            (_wait_s(self._tokens, tokens, now_s), "tokens"),
        ]
        wait_s, what = max(waits)
        if wait_s > 0:
            raise BusyError(
                f"this tenant's {what} per minute are used up; repeat the request after "
                f"{wait_s:.1f} seconds",
                retry_after_s=wait_s,
            )

    def take(self, choices: int, tokens: int, now_s: float) -> int | None:
        """Take what `check` allowed; returns the number of the tokens' amount."""
        self.use.requests += 1
        self.use.running += choices
        if self._requests is not None:
            self._requests.settle(self._requests.take(1, now_s), 0, now_s)
        return None if self._tokens is None else self._tokens.take(tokens, now_s)

    def close(
        self, number: int | None, choices: int, tokens: int, used_tokens: int, now_s: float
    ) -> None:
        """Give back what was not used."""
        self.use.running -= choices
        self.use.tokens += used_tokens
        if self._tokens is not None and number is not None:
            self._tokens.settle(number, tokens - used_tokens, now_s)


def _bucket(per_minute: int | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now_s=now_s)


def _wait_s(bucket: Bucket | None, amount: int, now_s: float) -> float:
    return 0.0 if bucket is None else bucket.wait_s(amount, now_s)
