"""The configuration: file, environment over it, and nothing unknown."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from draftkeep.config import Config, load_config
from draftkeep.errors import ConfigError

KEY = "0" * 64


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "draftkeep.toml"
    path.write_text(text)
    return path


def test_defaults_need_no_file() -> None:
    assert load_config(None, {}) == Config()


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of the configuration."""
    found = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += leaves(kind, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


# One value other than the default for each key, as the environment gives it.
OVERRIDES = {
    "state_dir": "/elsewhere",
    "keys_dir": "/keys",
    "model.target": "tiny",
    "model.threads": "3",
    "model.device": "cuda:1",
    "model.dtype": "bfloat16",
    "serve.host": "0.0.0.0",  # noqa: S104 (a value to read, nothing binds it)
    "serve.port": "9000",
    "serve.node": "node-9",
    "serve.slots": "2",
    "serve.max_context": "64",
    "serve.queue": "7",
    "serve.speculation": "off",
    "serve.lookahead": "2",
    "serve.verification": "rejection",
    "serve.floor": "none",
    "serve.preempt_after_s": "0",
    "serve.release": "paced",
    "serve.release_tick_s": "0.2",
    "serve.open_metrics": "true",
    "serve.grace_s": "90",
    "serve.stall_s": "30",
    "serve.channel": "canary",
    "serve.follow_s": "0.5",
    "serve.admin_key_sha256": "ab" * 32,
    "capture.enabled": "false",
    "capture.k": "8",
    "capture.context_tokens": "16",
    "capture.sampling_rate": "0.25",
    "capture.queue_traces": "5",
    "capture.rejected_branches": "true",
    "log.cap_bytes": "1048576",
    "log.bucket_s": "60",
    "catalog.url": "postgresql://draftkeep@db.example/draftkeep",
    "catalog.password": "word",
    "catalog.password_file": "/run/secrets/catalog",
    "kafka.servers": '["broker-1:9092", "broker-2:9092"]',
    "kafka.topic": "traces",
    "kafka.group": "compactors",
    "kafka.ca_file": "/etc/kafka/ca.pem",
    "kafka.username": "draftkeep",
    "kafka.password": "word",
    "kafka.password_file": "/run/secrets/kafka",
    "kafka.deadline_s": "10",
    "kafka.budget_bytes": "1048576",
    "kafka.delete_records": "never",
    "shards.url": "s3://traces/shards",
    "shards.endpoint": "http://store.example:9000",
    "shards.region": "eu-central-1",
    "retention.period_s": "60",
    "retention.ttl_s": "86400",
    "distill.layers": "1",
    "distill.vocab": "512",
    "distill.seconds": "5.5",
    "distill.steps": "90",
    "distill.batch_traces": "4",
    "distill.learning_rate": "0.01",
    "distill.min_traces": "2",
    "distill.checkpoint_s": "1.5",
    "distill.seed": "9",
    "distill.gate_min_held_out": "3",
    "distill.gate_margin": "0.2",
    "tenants": f'[{{name = "acme", api_key_sha256 = "{KEY}"}}]',
}


# What a value is refused without.
COMPANIONS = {
    "kafka.username": {
        "DRAFTKEEP_KAFKA__CA_FILE": "/etc/kafka/ca.pem",
        "DRAFTKEEP_KAFKA__PASSWORD": "word",
    }
}


@pytest.mark.parametrize("key", leaves(Config))
def test_every_value_is_overridable_by_the_environment(key: str) -> None:
    name = "DRAFTKEEP_" + key.upper().replace(".", "__")
    changed = load_config(None, {name: OVERRIDES[key], **COMPANIONS.get(key, {})})
    value: object = changed
    default: object = Config()
    for part in key.split("."):
        value, default = getattr(value, part), getattr(default, part)
    assert value != default


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[serve]\nport = 1\nslots = 3\n")
    config = load_config(path, {"DRAFTKEEP_SERVE__PORT": "2"})
    assert (config.serve.port, config.serve.slots) == (2, 3)


@pytest.mark.parametrize("text", ["prot = 1\n", "[serve]\nprot = 1\n", "[server]\nport = 1\n"])
def test_an_unknown_key_in_the_file_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(write(tmp_path, text), {})


@pytest.mark.parametrize("name", ["DRAFTKEEP_SERVE__PROT", "DRAFTKEEP_PORT"])
def test_an_unknown_key_in_the_environment_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(None, {name: "1"})


@pytest.mark.parametrize("domain", ["a" * 256, "code\\u0000"])
def test_a_domain_that_no_header_holds_is_refused(tmp_path: Path, domain: str) -> None:
    sha256 = "0" * 64
    text = f'[[tenants]]\nname = "acme"\napi_key_sha256 = "{sha256}"\ndomains = ["{domain}"]\n'
    with pytest.raises(ConfigError, match="domains"):
        load_config(write(tmp_path, text), {})
    load_config(write(tmp_path, text.replace(domain, "a" * 255)), {})


def test_a_ttl_under_four_periods_is_refused() -> None:
    with pytest.raises(ConfigError, match="lengthen ttl_s"):
        load_config(None, {"DRAFTKEEP_RETENTION__TTL_S": "14399"})
    load_config(None, {"DRAFTKEEP_RETENTION__TTL_S": "14400"})


def test_the_catalogs_password_is_read_and_never_shown(tmp_path: Path) -> None:
    url = {
        "DRAFTKEEP_CATALOG__URL": "postgresql://draftkeep@db.example:5432/traces?sslmode=require"
    }
    config = load_config(None, url | {"DRAFTKEEP_CATALOG__PASSWORD": "tell-nobody"})
    assert config.catalog.read_password() == "tell-nobody"
    assert "tell-nobody" not in repr(config) + config.model_dump_json()
    file = tmp_path / "password"
    file.write_text("from-a-file\n")
    config = load_config(None, url | {"DRAFTKEEP_CATALOG__PASSWORD_FILE": str(file)})
    assert config.catalog.read_password() == "from-a-file"
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        config.catalog.read_password()
    assert load_config(None, url).catalog.read_password() is None


@pytest.mark.parametrize(
    "settings",
    [
        {"username": "draftkeep", "password": "tell-nobody"},
        {"username": "draftkeep", "ca_file": "/etc/kafka/ca.pem"},
    ],
)
def test_a_kafka_login_without_tls_or_password_is_refused(settings: dict[str, str]) -> None:
    environ = {f"DRAFTKEEP_KAFKA__{key.upper()}": value for key, value in settings.items()}
    with pytest.raises(ConfigError, match="SCRAM goes over TLS") as caught:
        load_config(None, environ)
    assert "tell-nobody" not in str(caught.value)


@pytest.mark.parametrize("server", ["broker-1", "broker-1:http", "kafka://broker-1:9092", ""])
def test_a_broker_is_a_host_and_a_port(server: str) -> None:
    with pytest.raises(ConfigError, match=r"kafka\.servers"):
        load_config(None, {"DRAFTKEEP_KAFKA__SERVERS": f'["{server}"]'})


@pytest.mark.parametrize(
    "url", ["s3://", "s3://UPPER/x", "gs://traces/x", "s3://key:secret@traces/x", "/shards"]
)
def test_shards_lie_in_the_state_directory_or_in_a_bucket(url: str) -> None:
    with pytest.raises(ConfigError, match=r"shards\.url"):
        load_config(None, {"DRAFTKEEP_SHARDS__URL": url})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"url": "postgresql://draftkeep:tell-nobody@db/traces"}, "url holds a password"),
        ({"url": "postgresql://db/traces?password=tell-nobody"}, "url holds a password"),
        ({"url": "mysql://draftkeep:tell-nobody@db/traces"}, "catalog.url"),
        ({"password": "tell-nobody", "password_file": "/tell-nobody"}, "set one"),
    ],
)
def test_a_password_in_the_wrong_place_is_refused_and_not_shown(
    settings: dict[str, str], reason: str
) -> None:
    environ = {f"DRAFTKEEP_CATALOG__{key.upper()}": value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(None, environ)
    assert "tell-nobody" not in str(caught.value)


def test_two_tenants_of_one_name_are_refused() -> None:
    tenants = [f'{{name = "acme", api_key_sha256 = "{key * 64}"}}' for key in "01"]
    with pytest.raises(ConfigError, match="unique"):
        load_config(None, {"DRAFTKEEP_TENANTS": f"[{', '.join(tenants)}]"})


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("tenants", "reason"),
    [
        ('{name = "acme"}', "has no key"),
        ('{name = "acme", keys = []}', "has no key"),
        (f'{{name = "acme", keys = [{{sha256 = "{A}", scopes = []}}]}}', "scopes"),
        (f'{{name = "acme", keys = [{{sha256 = "{A}", scopes = ["all"]}}]}}', "scopes"),
        (f'{{name = "acme", keys = [{{sha256 = "{A}", scope = ["chat"]}}]}}', "unknown key"),
        (f'{{name = "acme", keys = [{{sha256 = "{A[1:]}"}}]}}', "sha256"),
        (f'{{name = "acme", api_key_sha256 = "{A}", keys = [{{sha256 = "{A}"}}]}}', "twice"),
        (
            f'{{name = "a", api_key_sha256 = "{A}"}}, {{name = "b", keys = [{{sha256 = "{A}"}}]}}',
            "twice",
        ),
        (f'{{name = "acme", api_key_sha256 = "{B}"}}', "twice"),
        (f'{{name = "acme", api_key_sha256 = "{A}", limits = {{concurrent = 0}}}}', "concurrent"),
    ],
)
def test_keys_and_limits_that_cannot_be_meant_are_refused(tenants: str, reason: str) -> None:
    environ = {"DRAFTKEEP_TENANTS": f"[{tenants}]", "DRAFTKEEP_SERVE__ADMIN_KEY_SHA256": B}
    with pytest.raises(ConfigError, match=reason) as raised:
        load_config(None, environ)
    assert A[1:] not in str(raised.value)


def test_the_short_form_of_a_key_may_chat_and_complete() -> None:
    further = f'{{sha256 = "{B}", scopes = ["metrics"]}}'
    tenants = f'[{{name = "acme", api_key_sha256 = "{A}", keys = [{further}]}}]'
    (acme,) = load_config(None, {"DRAFTKEEP_TENANTS": tenants}).tenants
    assert [(key.sha256, key.scopes) for key in acme.all_keys] == [
        (A, ("chat", "completions")),
        (B, ("metrics",)),
    ]


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check --config"):
        load_config(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(write(tmp_path, "serve = ["), {})


def test_every_documented_key_exists_and_every_key_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    documented = {
        part
        for line in page.splitlines()
        if line.startswith("| `")
        for part in line.split("|")[1].replace("`", "").replace(" ", "").split(",")
    }
    for key in leaves(Config):
        assert key in documented or (key == "tenants" and "[[tenants]]" in page), key


def test_the_readmes_block_makes_a_key_and_a_valid_configuration(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    block = readme.split("## Serve your own model")[1].split("```sh\n")[1]
    pasted = block[block.index("draftkeep keygen") : block.index("draftkeep doctor")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-ec", pasted], cwd=tmp_path, env={"PATH": path}, check=True)
    (tenant,) = load_config(tmp_path / "draftkeep.toml").tenants
    key = (tmp_path / "acme.key").read_text().split()[1]
    assert tenant.api_key_sha256 == hashlib.sha256(key.encode()).hexdigest()
