"""The command line: its surface, and how it says no."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftkeep.cli.commands import app, only_tenant
from draftkeep.cli.doctor.run import examine
from draftkeep.cli.drafters import publish_cold
from draftkeep.config import Config, ModelConfig, ServeConfig, TenantConfig, load_config
from draftkeep.errors import ConfigError
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.tenant import Tenants
from draftkeep.store.anchors import ISSUER, publish_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.models.drafter import Drafter, load_drafter

GOLDEN = Path(__file__).parents[1] / "golden" / "cli.txt"
COMMANDS = (
    (),
    ("serve",),
    ("forward",),
    ("compact",),
    ("distill",),
    ("audit",),
    ("erase",),
    ("keygen",),
    ("drafters",),
    ("drafters", "list"),
    ("drafters", "cold"),
    ("drafters", "use"),
    ("nodes",),
    ("nodes", "list"),
    ("nodes", "revoke"),
    ("catalog",),
    ("catalog", "check"),
    ("catalog", "forget-log"),
    ("topic",),
    ("topic", "create"),
    ("topic", "show"),
    ("topic", "delete"),
    ("doctor",),
    ("demo",),
)


def surface() -> str:
    """Every command's help, without colour, 100 columns wide."""
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    parts = []
    for command in COMMANDS:
        result = runner.invoke(app, [*command, "--help"])
        assert result.exit_code == 0, result.output
        parts.append(f"$ draftkeep {' '.join(command)}\n{result.output}")
    lines = "\n".join(parts).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def test_the_surface_is_frozen() -> None:
    assert surface() == GOLDEN.read_text()


def test_a_made_key_is_one_the_configuration_takes() -> None:
    made = []
    for _ in range(2):
        lines = CliRunner().invoke(app, ["keygen"]).output.splitlines()
        (_, key), (_, digest) = (line.split() for line in lines)
        made.append(key)
        tenant = TenantConfig(name="acme", api_key_sha256=digest)
        found = Tenants.from_config(Config(tenants=(tenant,))).authenticate(key, "chat")
        assert found.name == "acme"
    assert made[0] != made[1]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "draftkeep", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )


def test_an_error_is_one_line_and_status_two(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[serve]\nprot = 1\n")
    result = run("compact", "--config", "bad.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "unknown key" in result.stderr
    assert "Traceback" not in result.stderr


def test_audit_wants_a_question_or_a_report_and_not_both(tmp_path: Path) -> None:
    for arguments in ((), ("SELECT 1", "--report", "inventory"), ("--report", "nonsense")):
        result = run("audit", *arguments, cwd=tmp_path)
        assert result.returncode == 2
        assert "inventory" in result.stderr


@pytest.fixture
def config(tmp_path: Path) -> Config:
    digest = hashlib.sha256(b"key").hexdigest()
    path = tmp_path / "config.toml"
    path.write_text(
        f'state_dir = "{tmp_path / "state"}"\n[model]\ntarget = "tiny"\n'
        f'[[tenants]]\nname = "acme"\napi_key_sha256 = "{digest}"\n'
    )
    return load_config(path, {})


def test_a_tenant_is_named_or_the_only_one(config: Config) -> None:
    assert only_tenant(config, None) == "acme"
    assert only_tenant(config, "acme") == "acme"
    with pytest.raises(ConfigError, match="configured: acme"):
        only_tenant(config, "other")
    with pytest.raises(ConfigError, match="none"):
        only_tenant(Config(), None)


def test_doctor_finds_nothing_wrong_with_a_good_configuration(config: Config) -> None:
    findings = {finding.check: finding for finding in examine(config)}
    names = ["tenants", "device", "keys", "log", "catalog", "shards", "disk", "model", "drafter"]
    assert list(findings) == names
    assert not [name for name, finding in findings.items() if finding.status == "fail"]
    assert findings["drafter"].remedy == "draftkeep drafters cold"


def test_doctor_warns_of_keys_that_will_lie_beside_the_data(config: Config) -> None:
    assert not config.keys_path.exists()
    finding = next(item for item in examine(config) if item.check == "keys")
    assert (finding.status, "set keys_dir" in finding.remedy) == ("warn", True)
    # Never the file system of a directory for tests, and nothing is made there.
    elsewhere = config.model_copy(update={"keys_dir": Path("/proc/draftkeep-keys")})
    finding = next(item for item in examine(elsewhere) if item.check == "keys")
    assert finding.status == "ok"


def test_doctor_names_what_is_wrong_and_the_remedy(config: Config, tmp_path: Path) -> None:
    state = tmp_path / "state"
    keys = state / "keys"
    keys.mkdir(parents=True)
    (state / "catalog.db").write_bytes(b"not a database, but long enough to be read as one" * 9)
    (keys / "subject.kek").write_bytes(b"short")
    broken = config.model_copy(
        update={
            "tenants": (),
            "model": config.model.model_copy(update={"target": "no-such-model"}),
        }
    )
    findings = {finding.check: finding for finding in examine(broken)}
    assert findings["tenants"].status == "fail"
    assert "no target named" in findings["model"].detail
    assert findings["keys"].status == "fail"
    assert findings["catalog"].status == "fail"


@pytest.mark.parametrize(
    ("check", "status", "update"),
    [
        ("tenants", "warn", {"serve": ServeConfig(open_metrics=True, host="::")}),
        ("tenants", "ok", {"serve": ServeConfig(open_metrics=True)}),
        ("device", "fail", {"model": ModelConfig(target="tiny", device="cuda:99")}),
        ("device", "warn", {"model": ModelConfig(target="tiny", dtype="float16")}),
    ],
)
def test_doctor_sees_what_nobody_can_mean(
    config: Config, check: str, status: str, update: dict[str, object]
) -> None:
    findings = {item.check: item for item in examine(config.model_copy(update=update))}
    assert findings[check].status == status
    assert bool(findings[check].remedy) == (status != "ok")


def test_doctor_checks_the_drafter_that_would_serve(config: Config) -> None:
    digest = publish_cold(config)
    assert publish_cold(config) == digest
    finding = next(item for item in examine(config) if item.check == "drafter")
    assert finding.status == "ok"
    assert digest.hex()[:12] in finding.detail
    weights = config.state_dir / "drafters" / digest.hex() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    finding = next(item for item in examine(config) if item.check == "drafter")
    assert finding.status == "fail"


def test_doctor_loads_what_a_node_would_load_as_it_would(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_cold(config)
    loaded: list[tuple[torch.device, torch.dtype]] = []

    def watched(directory: Path, **options: Any) -> Drafter:
        drafter = load_drafter(directory, **options)
        loaded.append((drafter.model.device, drafter.model.dtype))
        return drafter

    monkeypatch.setattr("draftkeep.store.models.drafter.load_drafter", watched)
    half = config.model_copy(update={"model": ModelConfig(target="tiny", dtype="bfloat16")})
    finding = next(item for item in examine(half) if item.check == "drafter")
    assert finding.status == "ok"
    assert loaded == [(torch.device("cpu"), torch.bfloat16)]


def test_doctor_says_that_a_device_is_full(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("zebra-canary-77")

    monkeypatch.setattr("draftkeep.store.models.target.load_target", full)
    finding = next(item for item in examine(config) if item.check == "model")
    assert (finding.status, finding.detail) == ("fail", "cpu failed with OutOfMemoryError")
    assert "model.device" in finding.remedy


def test_a_command_that_looks_makes_nothing(config: Config, tmp_path: Path) -> None:
    result = run("audit", "SELECT 1", "--config", "config.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "check state_dir" in result.stderr
    assert not config.state_dir.exists()


def test_a_path_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.toml").write_text('state_dir = "file/state"\n')
    result = run("compact", "--config", "bad.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_erasing_somebody_nobody_has_seen_says_so(config: Config, tmp_path: Path) -> None:
    Catalog.open(config.state_dir / "catalog.db").close()
    Keyring.open(config.keys_path, retention=config.retention, clock=time.time).close()
    result = run("erase", "--subject", "nobody", "--config", "config.toml", cwd=tmp_path)
    assert result.returncode == 0
    assert json.loads(result.stdout)["known"] is False


def test_erasing_without_the_right_keys_is_refused(config: Config, tmp_path: Path) -> None:
    Catalog.open(config.state_dir / "catalog.db").close()
    arguments = ("erase", "--subject", "user-1", "--config", "config.toml")
    refused = run(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    assert "check keys_dir" in refused.stderr
    assert not config.keys_path.exists()
    publish_anchor(config.state_dir, ISSUER, bytes(32))
    Keyring.open(config.keys_path, retention=config.retention, clock=time.time).close()
    refused = run(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    assert "do not belong" in refused.stderr


def test_doctor_misses_keys_that_were_there(config: Config) -> None:
    publish_anchor(config.state_dir, ISSUER, bytes(32))
    finding = next(item for item in examine(config) if item.check == "keys")
    assert finding.status == "fail"


def test_a_cell_is_never_markup(config: Config, tmp_path: Path) -> None:
    Catalog.open(config.state_dir / "catalog.db").close()
    sql = "SELECT '[/x][red]y[/red]' AS \"[z]\", 'FF'::BLOB AS b"
    shown = run("audit", sql, "--config", "config.toml", cwd=tmp_path)
    assert shown.returncode == 0
    assert "[/x][red]y[/red]" in shown.stdout
    assert "[z]" in shown.stdout
    lines = run("audit", sql, "--json", "--config", "config.toml", cwd=tmp_path)
    assert json.loads(lines.stdout) == {"[z]": "[/x][red]y[/red]", "b": "4646"}


def test_json_that_was_cut_off_says_so_beside_it(config: Config, tmp_path: Path) -> None:
    Catalog.open(config.state_dir / "catalog.db").close()
    sql = "SELECT range AS n FROM range(10001)"
    shown = run("audit", sql, "--json", "--config", "config.toml", cwd=tmp_path)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert lines == [{"n": number} for number in range(10_000)]
    assert "only the first 10000 rows" in shown.stderr


def test_doctor_refuses_a_context_the_model_does_not_have(config: Config) -> None:
    wide = config.model_copy(
        update={"serve": config.serve.model_copy(update={"max_context": 10**6})}
    )
    finding = next(item for item in examine(wide) if item.check == "model")
    assert finding.status == "fail"
    assert "set serve.max_context" in finding.remedy
