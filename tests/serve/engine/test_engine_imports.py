"""The engine runs where none of the pipeline is installed."""

import subprocess
import sys

PIPELINE = ("pyarrow", "sqlalchemy", "cryptography", "cbor2", "duckdb", "fastapi")


def test_the_engine_imports_nothing_of_the_pipeline() -> None:
    program = (
        "import sys, draftkeep.serve.engine.engine; "
        "print(*(name for name in sys.modules if name.startswith('draftkeep.') or name in "
        f"{PIPELINE!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = done.stdout.split()
    assert "draftkeep.serve.engine.engine" in loaded
    rooms = {name.split(".")[1] for name in loaded if name.startswith("draftkeep.")}
    assert rooms == {"breaker", "errors", "kernels", "serve"}
    assert not set(PIPELINE) & set(loaded)
