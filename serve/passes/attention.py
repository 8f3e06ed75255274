"""Attention over shared key-value heads without copying them.

The stock sdpa path of transformers repeats the keys and values of a grouped-query model for every
query head wherever a mask is given, which at batch 8 costs more than the attention itself.

Shapes: B rows, H query heads, G key-value heads, W query positions, K key positions, D head width,
Q = H / G query heads of a group, which share one key-value head.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "draftkeep_sdpa"


def folds(width: int, device_type: str) -> bool:
    """Whether `attend` lays the query heads of one key-value head side by side as positions.

    Then keys and values are read once and few large products replace many small ones. The query
    has to be copied for it where a row holds several positions, and a processor then has too few
    products for its threads; graphics kernels with a mask take no shared heads otherwise.
    """
    return width == 1 or device_type != "cpu"


def folded_mask(mask_B1WK: Tensor, group: int) -> Tensor:
    """The mask of folded queries [B, 1, Q * W, K], or the same where one row serves all."""
    return mask_B1WK if mask_B1WK.shape[2] == 1 else mask_B1WK.repeat(1, 1, group, 1)


def attend(
    query_BHWD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Scaled dot-product attention [B, W, H * D] under an additive mask.

    `mask` is [B, 1, W, K], passed through `folded_mask` where `folds` says so.
    """
    batch, heads, width, depth = query_BHWD.shape
    group = heads // key_BGKD.shape[1]
    fold = group > 1 and folds(width, query_BHWD.device.type)
    if fold:
        query_BHWD = query_BHWD.reshape(batch, -1, group * width, depth)
    output = scaled_dot_product_attention(
        query_BHWD,
        key_BGKD,
        value_BGKD,
        attn_mask=mask,
        scale=scale,
        enable_gqa=group > 1 and not fold,
    )
    if fold:
        output = output.reshape(batch, heads, width, -1)
    return output.transpose(1, 2).flatten(2)


def grouped_attention(
    module: nn.Module,
    query_BHWD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attend` as transformers calls it; returns (output [B, W, H, D], None)."""
    if attention_mask is None:
        raise ValueError(f"{type(module).__name__} attends without the mask it was given")
    batch, heads, width = query_BHWD.shape[:3]
    group = heads // key_BGKD.shape[1]
    if group > 1 and folds(width, query_BHWD.device.type):
        attention_mask = folded_mask(attention_mask, group)
    output = attend(query_BHWD, key_BGKD, value_BGKD, attention_mask, scaling)
    return output.view(batch, width, heads, -1), None


AttentionInterface.register(NAME, grouped_attention)
