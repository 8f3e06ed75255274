"""One configuration file (TOML), every value of which the environment can override.

`DRAFTKEEP_SERVE__PORT=9000` sets `port` in `[serve]`; arrays and tables are given as TOML
(`DRAFTKEEP_TENANTS='[{...}]'`). Unknown keys, in the file or in the environment, are errors: a
misspelt privacy setting must not be a silent default.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from draftkeep.errors import ConfigError

ENV_PREFIX = "DRAFTKEEP_"
# Read elsewhere, before there is a configuration: the model cache and the config file's own path.
_OTHER_ENV = frozenset({"DRAFTKEEP_CACHE", "DRAFTKEEP_CONFIG"})
MIN_PERIODS_PER_TTL = 4
# A step of the target reads one token more; passes on a GPU have a fixed shape up to that width.
MAX_LOOKAHEAD = 16
Scope = Literal["chat", "completions", "metrics"]
DEFAULT_SCOPES: tuple[Scope, ...] = ("chat", "completions")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """The served model.

    `target` is `smollm2` (the packaged model), `tiny` (a seeded toy), a directory, or a hub name.
    `threads` 0 leaves torch's own choice. `device` is torch's name of where the models live.
    """

    target: str = "smollm2"
    threads: int = Field(default=0, ge=0)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class ServeConfig(_Section):
    """The serving node. Empty hashes mean that nobody has that role.

    `floor` drafts while the channel names no drafter. A request that has waited `preempt_after_s`
    takes the slot that was held longest (0: never). `release` says when a stream's events leave:
    at once, or one every `release_tick_s`. `/metrics` needs a key unless `open_metrics`. Requests
    under way have `grace_s` to finish once the node is told to stop. An engine whose loop has not
    come round for `stall_s` is stuck (0: never).
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    node: str = Field(default="node-1", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    slots: int = Field(default=8, ge=1, le=256)
    max_context: int = Field(default=1024, ge=16)
    queue: int = Field(default=256, ge=1)
    speculation: Literal["auto", "fixed", "off"] = "auto"
    lookahead: int = Field(default=8, ge=1, le=MAX_LOOKAHEAD)
    verification: Literal["coupled", "rejection"] = "coupled"
    floor: Literal["ngram", "none"] = "ngram"
    preempt_after_s: float = Field(default=10.0, ge=0)
    release: Literal["immediate", "paced"] = "immediate"
    release_tick_s: float = Field(default=0.05, gt=0, le=10)
    open_metrics: bool = False
    grace_s: float = Field(default=20.0, ge=0)
    stall_s: float = Field(default=120.0, ge=0)
    channel: str = "stable"
    follow_s: float = Field(default=1.0, gt=0)
    admin_key_sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")


class CaptureConfig(_Section):
    """What a serving node keeps of what the target computed."""

    enabled: bool = True
    k: int = Field(default=32, ge=1, le=255)
    context_tokens: int = Field(default=512, ge=1)
    sampling_rate: float = Field(default=1.0, ge=0, le=1)
    queue_traces: int = Field(default=256, ge=1)
    rejected_branches: bool = False


class LogConfig(_Section):
    """The embedded log: a byte cap at which it refuses loudly, and a file's width in time."""

    cap_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    bucket_s: int = Field(default=600, ge=1)


class _Password(_Section):
    """A password, from the environment, or from the first line of a file."""

    password: SecretStr | None = None
    password_file: Path | None = None

    @model_validator(mode="after")
    def _one_password(self) -> Self:
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file are both set; set one")
        return self

    def read_password(self) -> str | None:
        """The password, where one is set. ConfigError where its file cannot be read."""
        if self.password_file is None:
            return None if self.password is None else self.password.get_secret_value()
        try:
            return self.password_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"password_file {self.password_file} cannot be read; check the path and its "
                "permissions"
            ) from None


class CatalogConfig(_Password):
    """Where the catalog is: SQLite in the state directory, or a PostgreSQL database at `url`.

    The URL holds no password, since messages show it.
    """

    url: str = Field(default="", pattern=r"^(postgresql://.+)?$")

    @model_validator(mode="after")
    def _no_password_in_the_url(self) -> Self:
        parts = urlsplit(self.url)
        if parts.password is not None or {"password", "sslpassword"} & set(parse_qs(parts.query)):
            raise ValueError(
                "url holds a password; leave it out and set password_file, or "
                "DRAFTKEEP_CATALOG__PASSWORD in the environment"
            )
        return self


class KafkaConfig(_Password):
    """The brokers between nodes and compactors.

    `servers` are host:port; without any, compactors read the node's own log. `ca_file` makes the
    connection TLS, `username` logs in by SCRAM-SHA-512 over it. `deadline_s` bounds every call,
    `budget_bytes` what a forwarder has under way. `delete_records` says when records leave the
    topic before its retention does it: `never`; `erasure`, once a subject was erased (everybody's
    compacted records up to that moment go with it); or `compacted`, as soon as they are in shards.
    """

    servers: tuple[Annotated[str, Field(pattern=r"^[^/@\s,]+:[0-9]{1,5}$")], ...] = ()
    topic: str = Field(default="draftkeep-traces", pattern=r"^[a-zA-Z0-9._-]{1,249}$")
    group: str = Field(default="draftkeep-compactor", min_length=1)
    ca_file: Path | None = None
    username: str | None = None
    deadline_s: float = Field(default=30.0, ge=1)
    budget_bytes: int = Field(default=64 * 1024**2, ge=1024**2)
    delete_records: Literal["never", "erasure", "compacted"] = "erasure"

    @model_validator(mode="after")
    def _login_is_safe(self) -> Self:
        has_password = self.password is not None or self.password_file is not None
        if self.username is not None and (self.ca_file is None or not has_password):
            raise ValueError("username needs ca_file and a password: SCRAM goes over TLS")
        return self


class ShardsConfig(_Section):
    """Where shards lie: `shards` in the state directory, or a bucket at `url` (s3://BUCKET/PREFIX).

    `endpoint` (http://HOST:PORT or https://...) is for a store that is not Amazon's. Credentials
    are found as AWS tools find them: environment, shared file, or the machine's role.
    """

    url: str = Field(default="", pattern=r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?)?$")
    endpoint: str = Field(default="", pattern=r"^(https?://[^/@]+)?$")
    region: str = ""


class RetentionConfig(_Section):
    """Deadlines. A trace is readable for at least ttl - period and never past ttl."""

    period_s: int = Field(default=3600, ge=1)
    ttl_s: int = Field(default=7 * 86400, ge=4)

    @model_validator(mode="after")
    def _wide_enough(self) -> "RetentionConfig":
        if self.ttl_s < MIN_PERIODS_PER_TTL * self.period_s:
            raise ValueError(
                f"ttl_s {self.ttl_s} is under {MIN_PERIODS_PER_TTL} periods of {self.period_s} s; "
                "lengthen ttl_s or shorten period_s"
            )
        return self


class DistillConfig(_Section):
    """One training job, and what the gate asks of its result.

    Training ends after `seconds`, or after `steps` updates where that is sooner.
    """

    layers: int = Field(default=2, ge=1)
    vocab: int = Field(default=4096, ge=16)
    seconds: float = Field(default=200.0, gt=0)
    steps: int | None = Field(default=None, ge=1)
    batch_traces: int = Field(default=16, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    min_traces: int = Field(default=64, ge=1)
    checkpoint_s: float = Field(default=30.0, gt=0)
    seed: int = 0
    gate_min_held_out: int = Field(default=8, ge=2)
    gate_margin: float = Field(default=0.05, ge=0, le=1)


class KeyConfig(_Section):
    """One API key of a tenant, stored hashed. `scopes` are what a caller with it may do."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = Field(default=DEFAULT_SCOPES, min_length=1)


class LimitsConfig(_Section):
    """What a tenant may use of one node at a time; None is without limit.

    `concurrent` counts choices queued or running, `tokens_per_minute` prompt and output tokens.
    """

    concurrent: int | None = Field(default=None, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)


class TenantConfig(_Section):
    """A customer: its keys (stored hashed), its limits, its domains and what it consents to.

    `api_key_sha256` is the short form of one key that may chat and complete; `keys` are further
    ones.

    `capture`: `never`; `opt_in` needs `store: true` in a request; `opt_out` captures unless the
    request says `store: false`. `consent` is the widest scope its traces may be used in.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    api_key_sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    keys: tuple[KeyConfig, ...] = ()
    limits: LimitsConfig = LimitsConfig()
    domains: tuple[Annotated[str, Field(max_length=255, pattern=r"^[^\x00]*$")], ...] = ()
    hide_domain: bool = False
    capture: Literal["never", "opt_in", "opt_out"] = "opt_in"
    consent: Literal["tenant", "pool", "everyone"] = "tenant"
    policy_version: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _reachable(self) -> "TenantConfig":
        if not self.all_keys:
            raise ValueError(
                f"tenant {self.name} has no key; set api_key_sha256 or keys (draftkeep keygen "
                "makes one)"
            )
        return self

    @property
    def all_keys(self) -> tuple[KeyConfig, ...]:
        """Every key, the short form's first."""
        short = (KeyConfig(sha256=self.api_key_sha256),) if self.api_key_sha256 else ()
        return short + self.keys


class Config(_Section):
    """Everything a process needs to know. `keys_dir` defaults to `keys` in the state directory."""

    state_dir: Path = Path("draftkeep-state")
    keys_dir: Path | None = None
    model: ModelConfig = ModelConfig()
    serve: ServeConfig = ServeConfig()
    capture: CaptureConfig = CaptureConfig()
    log: LogConfig = LogConfig()
    catalog: CatalogConfig = CatalogConfig()
    kafka: KafkaConfig = KafkaConfig()
    shards: ShardsConfig = ShardsConfig()
    retention: RetentionConfig = RetentionConfig()
    distill: DistillConfig = DistillConfig()
    tenants: tuple[TenantConfig, ...] = ()

    @model_validator(mode="after")
    def _unique_tenants(self) -> "Config":
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) != len(names):
            raise ValueError("two tenants have the same name; names must be unique")
        return self

    @model_validator(mode="after")
    def _unique_keys(self) -> "Config":
        hashes = [key.sha256 for tenant in self.tenants for key in tenant.all_keys]
        if self.serve.admin_key_sha256:
            hashes.append(self.serve.admin_key_sha256)
        if len(set(hashes)) != len(hashes):
            raise ValueError(
                "one key is configured twice among api_key_sha256, keys and "
                "serve.admin_key_sha256; give every use a key of its own"
            )
        return self

    @property
    def keys_path(self) -> Path:
        """Where the keyring and the signing keys lie."""
        return self.keys_dir if self.keys_dir is not None else self.state_dir / "keys"

    @property
    def log_path(self) -> Path:
        """Where the node's own log lies."""
        return self.state_dir / "log" / "traces"


def load_config(path: Path | None, environ: Mapping[str, str] | None = None) -> Config:
    """Read the file (None: defaults only), lay the environment over it, and validate.

    Raises ConfigError that names the file, the key and what was expected.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"cannot read the configuration {path}: {error.strerror}; check --config"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from None
    _overlay(data, os.environ if environ is None else environ)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        where = f"{path} or the environment" if path is not None else "the environment"
        raise ConfigError(f"{where}: {_explain(error)}") from None


def _overlay(data: dict[str, Any], environ: Mapping[str, str]) -> None:
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in _OTHER_ENV:
            continue
        *sections, key = name.removeprefix(ENV_PREFIX).lower().split("__")
        table = data
        for section in sections:
            inner = table.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{name}: {section} is not a section; see docs/operations.md")
            table = inner
        table[key] = _value(text)


def _value(text: str) -> Any:
    """Arrays and tables are TOML; everything else is text, which the field's type reads."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"an environment value that begins like TOML is not: {error}") from None


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False, include_input=False):
        key = ".".join(str(part) for part in item["loc"]) or "configuration"
        reason = "unknown key" if item["type"] == "extra_forbidden" else item["msg"]
        parts.append(f"{key}: {reason}")
    return "; ".join(parts)
