import hashlib
import math
from typing import Any, get_args

import pytest

from draftkeep.config import CaptureConfig, Config, Scope, TenantConfig
from draftkeep.errors import ConfigError, DeniedError, ForbiddenError
from draftkeep.policies.tenant import (
    CaptureDecision,
    CaptureReason,
    TenantKey,
    TenantPolicy,
    Tenants,
)


def tenant(name: str = "acme", key: str = "secret", **fields: Any) -> TenantConfig:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return TenantConfig.model_validate({"name": name, "api_key_sha256": digest, **fields})


def policy(*, enabled: bool = True, **fields: Any) -> TenantPolicy:
    config = Config(tenants=(tenant(**fields),), capture=CaptureConfig(enabled=enabled))
    return Tenants.from_config(config).authenticate("secret")


def test_each_key_finds_its_tenant() -> None:
    tenants = Tenants.from_config(
        Config(tenants=tuple(tenant(f"t{i}", f"key {i}", policy_version=i + 1) for i in range(5)))
    )
    for i in range(5):
        found = tenants.authenticate(f"key {i}")
        assert (found.name, found.policy_version) == (f"t{i}", i + 1)


@pytest.mark.parametrize("key", ["", "secret ", "Secret", "\ud800", "x" * 10_000])
def test_any_other_key_is_denied_and_not_repeated(key: str) -> None:
    for tenants in (
        Tenants.from_config(Config()),
        Tenants.from_config(Config(tenants=(tenant(),))),
    ):
        with pytest.raises(DeniedError) as raised:
            tenants.authenticate(key)
        assert not key or key not in str(raised.value)


def test_one_key_twice_is_refused() -> None:
    key = TenantKey(sha256=b"x" * 32, scopes=frozenset({"chat"}), tenant=policy())
    with pytest.raises(ConfigError, match="configured twice"):
        Tenants([key, key])


def test_a_key_does_what_its_scopes_say_and_no_more() -> None:
    keys = [
        {"sha256": hashlib.sha256(b"reads").hexdigest(), "scopes": ["metrics"]},
        {"sha256": hashlib.sha256(b"chats").hexdigest(), "scopes": ["chat"]},
    ]
    tenants = Tenants.from_config(Config(tenants=(tenant(keys=keys),)))
    allowed = {
        "secret": {"chat", "completions"},
        "reads": {"metrics"},
        "chats": {"chat"},
    }
    for key, scopes in allowed.items():
        assert tenants.authenticate(key).name == "acme"
        for scope in get_args(Scope):
            if scope in scopes:
                assert tenants.authenticate(key, scope).name == "acme"
            else:
                with pytest.raises(ForbiddenError, match=f"lacks the scope {scope};") as refused:
                    tenants.authenticate(key, scope)
                assert key not in str(refused.value)


@pytest.mark.parametrize(
    ("capture", "store", "reason"),
    [
        ("never", None, CaptureReason.NEVER),
        ("never", True, CaptureReason.NEVER),
        ("never", False, CaptureReason.STORE_FALSE),
        ("opt_in", None, CaptureReason.NO_CONSENT),
        ("opt_in", True, CaptureReason.OK),
        ("opt_in", False, CaptureReason.STORE_FALSE),
        ("opt_out", None, CaptureReason.OK),
        ("opt_out", True, CaptureReason.OK),
        ("opt_out", False, CaptureReason.STORE_FALSE),
    ],
)
def test_capture_by_policy_and_request(
    capture: str, store: bool | None, reason: CaptureReason
) -> None:
    allowed = reason is CaptureReason.OK
    decision = policy(capture=capture).capture_decision(store=store, coin=0.0, sampling_rate=1.0)
    assert decision == CaptureDecision(allowed=allowed, reason=reason)
    off = policy(enabled=False, capture=capture)
    decision = off.capture_decision(store=store, coin=0.0, sampling_rate=1.0)
    assert decision == CaptureDecision(allowed=False, reason=CaptureReason.DISABLED)


def test_a_tenant_that_says_nothing_is_not_captured() -> None:
    decision = policy().capture_decision(store=None, coin=0.0, sampling_rate=1.0)
    assert decision.reason is CaptureReason.NO_CONSENT


@pytest.mark.parametrize(
    ("coin", "rate", "allowed"),
    [
        (0.0, 0.0, False),
        (0.249, 0.25, True),
        (0.25, 0.25, False),
        (0.999, 1.0, True),
        (math.nan, 1.0, False),
        (0.0, math.nan, False),
    ],
)
def test_sampling(coin: float, rate: float, allowed: bool) -> None:
    decision = policy(capture="opt_out").capture_decision(store=None, coin=coin, sampling_rate=rate)
    assert decision.allowed is allowed
    assert decision.reason is (CaptureReason.OK if allowed else CaptureReason.NOT_SAMPLED)


def test_only_configured_labels_reach_a_header() -> None:
    shown = policy(domains=["sql", "code"])
    assert shown.domain_for("sql") == "sql"
    assert shown.domain_for("my diagnosis") == shown.domain_for(None) == "unknown"
    assert policy(domains=["sql"], hide_domain=True).domain_for("sql") is None
    assert policy().domain_for("sql") == "unknown"


def test_the_consent_ceiling_is_the_header_s_number() -> None:
    ceilings = [policy(consent=scope).consent_ceiling for scope in ("tenant", "pool", "everyone")]
    assert ceilings == [0, 1, 2]
