"""Where a target's weights go, and in which precision."""

import pytest
import torch

from draftkeep.errors import ModelError
from draftkeep.store.models.target import load_target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_dtype_asked_for(dtype: str) -> None:
    target = load_target("tiny", device="cpu", dtype=dtype)
    kinds = {(weight.dtype, weight.device.type) for weight in target.model.parameters()}
    assert kinds == {(getattr(torch, dtype), "cpu")}


@pytest.mark.parametrize("device", ["nowhere", "cuda:93", "hpu"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(ModelError, match=device):
        load_target("tiny", device=device)


def test_an_unknown_dtype_is_refused_with_the_choices() -> None:
    with pytest.raises(ModelError, match=r"float64.*bfloat16"):
        load_target("tiny", dtype="float64")
