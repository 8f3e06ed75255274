"""Which ids a drafter may propose to a target, and whether the two vocabularies fit at all.

Families pad their embeddings to different sizes, so sizes alone say nothing: what has to agree is
the ids that name a token.

Shapes: D columns of the drafter's head.
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkeep.errors import ModelError
from draftkeep.serve.engine.drafting import DraftModel


def readable(model: PreTrainedModel) -> int:
    """How many ids a model has embeddings for."""
    return len(cast(Tensor, model.get_input_embeddings().weight))


def draftable(drafter: DraftModel, target_vocab: int) -> NDArray[np.int64]:
    """The target ids of the drafter's leading columns; every column behind them is padding.

    Raises ModelError, naming the first thing that differs, where a token of the drafter is none of
    the target's or the other way round, and where its tensors are damaged.
    """
    model, tokens = drafter.model, drafter.tokens
    ids_D = drafter.vocab_ids.detach().cpu().numpy().astype(np.int64)
    named = target_vocab if tokens is None else tokens
    _check_ids(ids_D, _outputs(model))
    if named > target_vocab:
        raise ModelError(
            f"the drafter's tokenizer names {named} tokens and the target writes {target_vocab} "
            f"ids, so id {target_vocab} is the first the target lacks; choose a drafter of this "
            "target"
        )
    if readable(model) < named:
        raise ModelError(
            f"the drafter reads {readable(model)} ids but {named} name tokens, so id "
            f"{readable(model)} is the first it lacks; it was made for another tokenizer: choose "
            "a drafter of this target"
        )
    if tokens is None and int(ids_D[-1]) >= target_vocab:
        raise ModelError(
            f"the drafter writes id {int(ids_D[-1])} but the target's ids end below "
            f"{target_vocab}; it was made for another tokenizer: choose a drafter of this target"
        )
    kept_D = ids_D[ids_D < named]
    if not len(kept_D):
        raise ModelError(
            f"none of the drafter's {len(ids_D)} ids names a token; export the drafter again"
        )
    _check_finite(model)
    return kept_D


def _outputs(model: PreTrainedModel) -> int:
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return len(cast(Tensor, head.weight))


def _check_ids(ids_D: NDArray[np.int64], outputs: int) -> None:
    if ids_D.ndim != 1 or not ids_D.size:
        raise ModelError(
            f"the drafter's list of ids has shape {ids_D.shape}, expected one id for each output; "
            "export the drafter again"
        )
    ascending = ids_D[0] >= 0 and bool((np.diff(ids_D) > 0).all())
    if not ascending:
        raise ModelError("the drafter's ids must be ascending from 0; export the drafter again")
    # A head over the whole vocabulary may be padded behind it; a trimmed one has no reason to be.
    whole = int(ids_D[-1]) == len(ids_D) - 1
    if outputs != len(ids_D) and not (whole and outputs > len(ids_D)):
        raise ModelError(
            f"the drafter's head has {outputs} outputs but its list names {ids_D.size} ids; "
            "export the drafter again"
        )


def _check_finite(model: PreTrainedModel) -> None:
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                f"the drafter's tensor {name} holds values that are not numbers; its training "
                "diverged or its file is damaged: choose another version"
            )
