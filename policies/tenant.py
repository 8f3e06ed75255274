"""Who is calling, and what may be kept of what they send.

Everything here fails closed: no tenants, an unknown key, a missing consent or a coin that is not
a number all mean no.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from draftkeep.config import Config, Scope, TenantConfig
from draftkeep.errors import ConfigError, DeniedError, ForbiddenError

UNKNOWN_DOMAIN = "unknown"
_CEILINGS = {"tenant": 0, "pool": 1, "everyone": 2}


class CaptureReason(StrEnum):
    """Why a request is captured, or why not. The words label the counts of declined requests."""

    OK = "ok"
    DISABLED = "disabled"
    NEVER = "never"
    STORE_FALSE = "store_false"
    NO_CONSENT = "no_consent"
    NOT_SAMPLED = "not_sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureDecision:
    """Whether one request may be captured, and the reason."""

    allowed: bool
    reason: CaptureReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """What one tenant has agreed to.

    `consent_ceiling` is the widest scope its traces may be used in, as headers carry it: 0 tenant,
    1 pool, 2 everyone. `domains` are the labels that may appear in a header.
    """

    name: str
    domains: frozenset[str]
    hide_domain: bool
    capture: Literal["never", "opt_in", "opt_out"]
    capture_enabled: bool
    consent_ceiling: int
    policy_version: int

    def capture_decision(
        self, *, store: bool | None, coin: float, sampling_rate: float
    ) -> CaptureDecision:
        """Decide for one request.

        `store` is what the request said (None: nothing), `coin` a uniform draw from [0, 1).
        A request's `false` always wins; its `true` cannot lift a tenant's `never`.
        """
        reason = self._refusal(store)
        # Written so that a NaN on either side is a refusal.
        if reason is CaptureReason.OK and not coin < sampling_rate:
            reason = CaptureReason.NOT_SAMPLED
        return CaptureDecision(allowed=reason is CaptureReason.OK, reason=reason)

    def domain_for(self, label: str | None) -> str | None:
        """The domain a header may carry for what the request called it.

        None where the tenant hides domains, `unknown` for a label that is not configured: free
        text from a request never reaches a clear header.
        """
        if self.hide_domain:
            return None
        return label if label in self.domains else UNKNOWN_DOMAIN

    def _refusal(self, store: bool | None) -> CaptureReason:
        if not self.capture_enabled:
            return CaptureReason.DISABLED
        if store is False:
            return CaptureReason.STORE_FALSE
        if self.capture == "opt_out" or (self.capture == "opt_in" and store is True):
            return CaptureReason.OK
        return CaptureReason.NO_CONSENT if self.capture == "opt_in" else CaptureReason.NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKey:
    """The hash of one API key, whose it is and what it may be used for."""

    sha256: bytes
    scopes: frozenset[Scope]
    tenant: TenantPolicy


class Tenants:
    """The configured tenants, found by API key. Holds hashes of keys, never keys."""

    def __init__(self, keys: Iterable[TenantKey]) -> None:
        self._keys = tuple(keys)
        if len({key.sha256 for key in self._keys}) != len(self._keys):
            raise ConfigError("one API key is configured twice; give every use a key of its own")

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The tenants of a configuration."""
        keys = []
        for tenant in config.tenants:
            policy = _policy(tenant, config.capture.enabled)
            keys += [
                TenantKey(
                    sha256=bytes.fromhex(key.sha256), scopes=frozenset(key.scopes), tenant=policy
                )
                for key in tenant.all_keys
            ]
        return cls(keys)

    def authenticate(self, api_key: str, scope: Scope | None = None) -> TenantPolicy:
        """The tenant whose key this is.

        DeniedError for a key of no tenant, ForbiddenError for one without `scope` (None: any key
        will do). The time taken does not depend on which key matched, or how nearly.
        """
        digest = hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None:
            raise DeniedError(
                "the API key belongs to no tenant; check the Authorization header and the "
                "configured api_key_sha256 and keys"
            )
        if scope is not None and scope not in found.scopes:
            raise ForbiddenError(
                f"this API key lacks the scope {scope}; use a key that has it, or add the scope to "
                "the key's entry in the configuration"
            )
        return found.tenant


def _policy(tenant: TenantConfig, capture_enabled: bool) -> TenantPolicy:
    return TenantPolicy(
        name=tenant.name,
        domains=frozenset(tenant.domains),
        hide_domain=tenant.hide_domain,
        capture=tenant.capture,
        capture_enabled=capture_enabled,
        consent_ceiling=_CEILINGS[tenant.consent],
        policy_version=tenant.policy_version,
    )
