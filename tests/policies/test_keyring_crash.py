"""A process killed at any moment leaves a keyring that holds all it had promised."""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from draftkeep.policies.keyring import Keyring

WORKER = """
import itertools, sys, time
from pathlib import Path
from draftkeep.config import RetentionConfig
from draftkeep.policies.keyring import Keyring
retention = RetentionConfig(period_s=100, ttl_s=400)
keyring = Keyring.open(Path(sys.argv[1]), retention=retention, clock=lambda: 1_800_000_005.0)
period_id = keyring.ensure_period("acme", 1_800_000_000).period_id
print(flush=True)
for i in itertools.count():
    name = f"{sys.argv[2]}-{i}"
    key = keyring.node_keys().subject("acme", name, period_id)
    print("made", name, key.alias.hex(), flush=True)
    if i % 3 == 0:
        keyring.destroy_subject("acme", name)
        print("gone", name, "-", flush=True)
"""


def test_killed_before_any_statement(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("keyring_crash_driver.py")
    done = subprocess.run(
        [sys.executable, driver, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_two_writers_killed_at_random_lose_nothing_acknowledged(
    tmp_path: Path, keyring: Keyring, open_keyring: Callable[..., Keyring]
) -> None:
    directory, dice = tmp_path / "keys", random.Random(11)
    acknowledged: dict[str, str] = {}
    for run in range(6):
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, directory, f"{run}{side}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for side in "ab"
        ]
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        time.sleep(dice.uniform(0, 0.1))
        for worker in workers:
            worker.kill()
            # A kill inside `print` leaves a torn last line: nothing was acknowledged by it.
            *lines, _torn = worker.communicate()[0].split("\n")
            for line in lines:
                verb, name, alias = line.split()
                acknowledged[name] = alias if verb == "made" else ""
    survivor = open_keyring()
    (record,) = survivor.periods()
    assert len(acknowledged) > 12
    last = {name.split("-")[0]: name for name in acknowledged}
    for name, alias in acknowledged.items():
        found = [alias.hex() for _, alias in survivor.aliases_of("acme", name)]
        if alias and name == last[name.split("-")[0]]:
            assert found in ([alias], [])  # its destruction may have been under way
        else:
            assert found == ([alias] if alias else [])
    assert survivor.node_keys().subject("acme", "new", record.period_id).kind == 1
