"""One node for a state directory, refused before anything heavy is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftkeep.errors import ConfigError
from draftkeep.serve.only_node import only_node

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )


def test_a_second_node_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{tmp_path}"\n')
    with only_node(tmp_path):
        with pytest.raises(ConfigError, match="another serving node"), only_node(tmp_path):
            pass
        refused = run("-m", "draftkeep", "serve", "--config", str(config))
        assert refused.returncode == 2
        assert "another serving node uses" in refused.stderr
        assert "starting" not in refused.stderr
    with only_node(tmp_path):
        pass


def test_the_lock_does_not_wait_for_torch() -> None:
    code = "import draftkeep.cli.commands, draftkeep.serve.only_node, sys"
    assert run("-c", f"{code}; sys.exit('torch' in sys.modules)").returncode == 0
