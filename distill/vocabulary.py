"""Which of the target's tokens a drafter may propose.

V: the target's vocabulary; D: the drafter's.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from draftkeep.distill.batch import trainable_T
from draftkeep.ingest.trace import Trace


def choose_vocabulary(
    traces: Iterable[Trace], *, size: int, keep: Sequence[int], total: int
) -> Tensor:
    """The ids with the most teacher mass in these traces, int64 ascending: vocab_ids_D.

    `keep` (ending tokens) is always in. Ids without any mass fill the rest from the lowest up,
    which are the frequent pieces of a byte-pair vocabulary; so do ties. `total` is V; the result
    has min(size, V) ids, or more where `keep` alone is longer.
    """
    mass_V = np.zeros(total)
    for trace in traces:
        rows_T = trainable_T(trace)
        ids_NK, logprobs_NK = trace.topk.ids_TK[rows_T], trace.topk.logprobs_TK[rows_T]
        listed_NK = (ids_NK >= 0) & (ids_NK < total)
        np.add.at(mass_V, ids_NK[listed_NK], np.exp(logprobs_NK[listed_NK], dtype=np.float64))
    wanted = [token for token in keep if 0 <= token < total]
    mass_V[wanted] = np.inf
    order_V = np.argsort(-mass_V, kind="stable")
    return torch.from_numpy(np.sort(order_V[: max(size, len(set(wanted)))])).to(torch.int64)
