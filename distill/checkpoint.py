"""Checkpoint: everything a training run needs to go on where it stopped, in one file.

A safetensors file whose metadata holds the numbers as JSON, so tensors and numbers can never be of
two moments. Written beside the old one and renamed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftkeep.errors import StoreError
from draftkeep.files import write_file

CHECKPOINT_FILE = "checkpoint.safetensors"
_FORMAT = 1
_KEY = "draftkeep"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Where a run stands: after `step` updates and `seconds` of training.

    The next batch is number `batch` of pass `epoch` over the traces. `loss` is the running mean
    the run reports, None before the first update. `run` names the run the checkpoint belongs to,
    and `inputs` what it was learning from at that moment.
    """

    run: str
    inputs: str
    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    loss: float | None = None


def save_checkpoint(directory: Path, state: TrainState, tensors: Mapping[str, Tensor]) -> None:
    """Replace the directory's checkpoint durably; a crash leaves the old or the new one."""
    packed = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"format": _FORMAT, **asdict(state)})
    write_file(
        directory / CHECKPOINT_FILE, bytes(safetensors.torch.save(packed, metadata={_KEY: text}))
    )


def load_checkpoint(directory: Path) -> tuple[TrainState, dict[str, Tensor]] | None:
    """The directory's checkpoint, or None where there is none.

    Raises StoreError on a file that is not a checkpoint of this format.
    """
    path = directory / CHECKPOINT_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            values: Any = json.loads((file.metadata() or {}).get(_KEY, "null"))
            names = {field.name for field in fields(TrainState)}
            if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
                raise ValueError
            if set(values) != names:
                raise ValueError
            return TrainState(**values), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError):
        raise StoreError(
            f"{path} is not a checkpoint of format {_FORMAT}; delete it, the job starts over"
        ) from None


def delete_checkpoint(directory: Path) -> None:
    """Remove the directory's checkpoint, if any."""
    (directory / CHECKPOINT_FILE).unlink(missing_ok=True)
