"""Periods and deadlines: when a tenant's keys begin and when they must be gone."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from draftkeep.errors import DeniedError
from draftkeep.policies import signing
from draftkeep.policies.names import lp, text

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodRecord:
    """The public half of a tenant's period, as the issuer signed it.

    `start_s` and `destroy_at_s` are Unix seconds: the private key is destroyed at the latter, which
    is also the expiry of every trace sealed in the period. `public_key` is the HPKE public key,
    1,216 bytes (`period_keys`).
    """

    tenant: str
    period_id: bytes
    start_s: int
    destroy_at_s: int
    public_key: bytes
    signature: bytes = b""

    def signed_bytes(self) -> bytes:
        """What the issuer signs.

        "draftkeep/v1/period" || lp(tenant) || lp(period id) || start || destroy_at || lp(public
        key), the two times as unsigned 8-byte big-endian seconds.
        """
        return b"".join(
            (
                b"draftkeep/v1/period",
                lp(text(self.tenant)),
                lp(self.period_id),
                struct.pack(">QQ", self.start_s, self.destroy_at_s),
                lp(self.public_key),
            )
        )

    def verify(self, issuer_public: bytes) -> bool:
        """Whether the issuer signed exactly this record."""
        return signing.verify(issuer_public, self.signature, self.signed_bytes())


def period_start(at_s: float, period_s: int) -> int:
    """The start of the period that contains `at_s`. Periods are aligned to the Unix origin."""
    return math.floor(at_s) // period_s * period_s


def effective_deadline(header_expiry_s: int, destroy_at_s: int) -> int:
    """When a trace stops being readable: the earlier of its header and the period's record.

    So a shortened ttl, which re-dates records, holds for what is already sealed.
    """
    return min(header_expiry_s, destroy_at_s)


def read_clock(clock: Clock) -> float:
    """The time in Unix seconds; DeniedError for a clock that does not tell one.

    Deadlines cannot be kept without a clock, so nothing is allowed without one.
    """
    now_s = clock()
    if not math.isfinite(now_s) or now_s <= 0:
        raise DeniedError("the clock does not tell a time after 1970; set the machine's clock")
    return now_s
