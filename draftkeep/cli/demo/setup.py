"""What a demo run is made of: how much traffic, how much training, and its configuration file."""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from draftkeep.cli.demo.workload import DOMAINS
from draftkeep.config import load_config
from draftkeep.errors import ConfigError
from draftkeep.files import write_file

TENANT = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The size of a run.

    A round ends with its requests, or at its budget; round one goes on past the budget until
    `round_one_least` requests were answered, so that enough people were heard to judge by.
    """

    model: str
    round_one_requests: int
    round_one_least: int
    round_one_budget_s: float
    round_two_requests: int
    round_two_budget_s: float
    speed_prompts: int
    max_tokens: int
    train_s: float
    train_steps: int | None
    threads: int
    vocab: int
    layers: int
    workers: int = 16


def profile_for(model: str) -> Profile:
    """The run that suits a model: under ten minutes for a real one, under one for `tiny`."""
    if model == "tiny":
        return Profile(
            model=model,
            round_one_requests=220,
            round_one_least=220,
            round_one_budget_s=30,
            round_two_requests=60,
            round_two_budget_s=10,
            speed_prompts=4,
            max_tokens=24,
            train_s=60,
            # So small a model gains nothing from a second thread, and loses to a busy neighbour.
            train_steps=80,
            threads=1,
            vocab=256,
            layers=1,
        )
    return Profile(
        model=model,
        round_one_requests=480,
        round_one_least=216,
        round_one_budget_s=150,
        round_two_requests=120,
        round_two_budget_s=45,
        speed_prompts=6,
        max_tokens=64,
        train_s=110,
        train_steps=None,
        threads=0,
        vocab=4096,
        layers=2,
    )


def prepare(state_dir: Path, profile: Profile, kafka_servers: tuple[str, ...]) -> Path:
    """Write the demo's configuration and keys once, and return the configuration's path.

    A second call changes nothing. ConfigError where the directory holds a demo of another model,
    or over another log.
    """
    folder = state_dir / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    config_path = state_dir / "config.toml"
    if config_path.exists():
        made = load_config(config_path)
        _require_same(state_dir, "--model", made.model.target, profile.model)
        _require_same(state_dir, "--log", _log_url(made.kafka.servers), _log_url(kafka_servers))
    else:
        text = _config(
            state_dir, profile, _secret(folder / "api.key"), _secret(folder / "admin.key")
        )
        if kafka_servers:
            text += _kafka(kafka_servers, topic=f"draftkeep-demo-{secrets.token_hex(4)}")
        write_file(config_path, text.encode())
    return config_path


def _require_same(state_dir: Path, option: str, made_with: str, given: str) -> None:
    if made_with != given:
        raise ConfigError(
            f"{state_dir} holds a demo of {option} {made_with!r}, got {given!r}; add --fresh to "
            "start over, or choose another --state-dir"
        )


def _log_url(kafka_servers: tuple[str, ...]) -> str:
    return f"kafka://{','.join(kafka_servers)}" if kafka_servers else ""


def _secret(path: Path) -> str:
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.touch(mode=0o600)
        temporary.write_text(secrets.token_urlsafe(32))
        temporary.replace(path)
    return path.read_text()


def _config(state_dir: Path, profile: Profile, api_key: str, admin_key: str) -> str:
    domains = ", ".join(f'"{domain.name}"' for domain in DOMAINS)
    return f"""\
# Written by `draftkeep demo`. Every value can be overridden by the environment, for example
# DRAFTKEEP_SERVE__PORT=9000. The two API keys lie beside this file in demo/*.key.
state_dir = {_quote(str(state_dir.resolve()))}

[model]
target = {_quote(profile.model)}
threads = {profile.threads}

[serve]
port = 0
slots = {profile.workers}
max_context = 512
admin_key_sha256 = "{_sha256(admin_key)}"

[distill]
layers = {profile.layers}
vocab = {profile.vocab}
seconds = {profile.train_s}
{f"steps = {profile.train_steps}" if profile.train_steps else ""}

[[tenants]]
name = "{TENANT}"
api_key_sha256 = "{_sha256(api_key)}"
domains = [{domains}]
capture = "opt_in"
"""


def _kafka(servers: tuple[str, ...], *, topic: str) -> str:
    return f"""
[kafka]
servers = [{", ".join(map(_quote, servers))}]
topic = "{topic}"
"""


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
