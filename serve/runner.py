"""ModelRunner: passes of one model over ragged rows of its slot cache.

Shapes: B rows of the rectangle, W its width, C hidden width, V the head's outputs, N wanted rows.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkeep.errors import ModelError
from draftkeep.serve import attention
from draftkeep.serve.cache import SlotCache
from draftkeep.serve.packed import Packing, pack_linears

PREFILL_CHUNK = 128
_PROBE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`tokens` of one slot from absolute position `start`; logits are for the last `want`."""

    slot: int
    tokens: Sequence[int]
    start: int
    want: int = 0


class ModelRunner:
    """One model, its packed weights and its slot cache. Used by one thread at a time.

    The model belongs to the runner from construction on: its linear layers are replaced and its
    attention is switched. It must be a decoder whose attention sees the whole past; the runner
    compares its own ragged passes with the model's before it takes over and raises ModelError
    where they differ, so a head with scaling or an attention with a bias is refused, not served
    wrong.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        packing: Packing = "measured",
    ) -> None:
        _refuse(model, context)
        model.train(False)
        self.model = model
        self.slots = slots
        self.context = context
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.vocab = len(cast(Tensor, self._head.weight))
        self.device = cast(Tensor, model.get_input_embeddings().weight).device
        self._cache = SlotCache(layers=model.config.num_hidden_layers, slots=slots, context=context)
        decoder = model.base_model
        names = inspect.signature(decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        expected = self._plain_probe()
        model.config._attn_implementation = attention.NAME
        self.packed = pack_linears(model, packing)
        self._decoder: nn.Module = decoder
        self._head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._check(expected)

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Feed all segments in one pass; return the wanted logits [N, V], segment by segment.

        A segment's tokens see positions 0..start-1 of their slot as they were last written. Slots
        between the segments' lowest and highest that have no segment are left as they were.
        """
        hidden_BWC, lo = self._pass(segments)
        rows: list[int] = []
        columns: list[int] = []
        for segment in segments:
            rows += [segment.slot - lo] * segment.want
            columns += range(len(segment.tokens) - segment.want, len(segment.tokens))
        with torch.inference_mode():
            logits_NV: Tensor = self._head(hidden_BWC[rows, columns])
        return logits_NV.float()

    def prefill(self, segments: Sequence[Segment]) -> None:
        """Feed segments of any length in chunks, without the head."""
        for group in _neighbours(segments):
            longest = max(len(segment.tokens) for segment in group)
            for at in range(0, longest, PREFILL_CHUNK):
                self._pass(
                    [
                        Segment(
                            slot=segment.slot,
                            tokens=segment.tokens[at : at + PREFILL_CHUNK],
                            start=segment.start + at,
                        )
                        for segment in group
                        if at < len(segment.tokens)
                    ]
                )

    def idle_pass(self, batch: int, width: int) -> None:
        """A whole pass of that shape that changes no slot, for measuring what one costs."""
        rows = [Segment(slot=slot, tokens=(), start=0) for slot in range(batch)]
        hidden_BWC, _ = self._pass(rows, width=width)
        with torch.inference_mode():
            self._head(hidden_BWC.reshape(batch * width, -1))

    def clear(self) -> None:
        """Forget every slot, after a pass that failed."""
        self._cache.clear()

    def _pass(self, segments: Sequence[Segment], width: int = 0) -> tuple[Tensor, int]:
        """Run the decoder on the rectangle around `segments`; (hidden_BWC, its lowest slot)."""
        lo = min(segment.slot for segment in segments)
        hi = 1 + max(segment.slot for segment in segments)
        width = width or max(len(segment.tokens) for segment in segments)
        ids_BW = np.zeros((hi - lo, width), dtype=np.int64)
        seen_BW = np.zeros((hi - lo, width), dtype=np.int64)
        written_BW = np.full((hi - lo, width), self.context, dtype=np.int64)
        for segment in segments:
            count, row = len(segment.tokens), segment.slot - lo
            positions = np.arange(segment.start, segment.start + count)
            ids_BW[row, :count] = segment.tokens
            seen_BW[row, :count] = positions
            written_BW[row, :count] = positions
        longest = int(seen_BW.max()) + 1
        ids, seen, written = (self._tensor(array) for array in (ids_BW, seen_BW, written_BW))
        view = self._cache.place(lo=lo, positions_BW=written, longest=longest)
        keys = torch.arange(view, device=self.device)
        with torch.inference_mode():
            output = self._decoder(
                input_ids=ids,
                position_ids=seen,
                attention_mask=(keys <= seen[:, :, None])[:, None],
                use_cache=True,
                **{self._cache_name: self._cache},
            )
        hidden_BWC: Tensor = output.last_hidden_state
        return hidden_BWC, lo

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _probe_ids(self) -> list[int]:
        return [(7 * index + 1) % self.model.config.vocab_size for index in range(6)]

    def _plain_probe(self) -> Tensor:
        with torch.inference_mode():
            ids = torch.tensor([self._probe_ids()], device=self.device)
            logits_TV: Tensor = self.model(input_ids=ids, use_cache=False).logits[0].float()
        if not bool(torch.isfinite(logits_TV).all()):
            raise ModelError(
                "the model gives values that are not numbers for six plain tokens; its weights are "
                "damaged or its precision is too low: load another copy"
            )
        return logits_TV

    def _check(self, expected_TV: Tensor) -> None:
        """Ragged passes, a rewind and a gap between the slots must give the plain logits."""
        ids, last = self._probe_ids(), self.slots - 1
        self.prefill([Segment(slot=0, tokens=ids[:2], start=0)])
        first = Segment(slot=0, tokens=ids[2:], start=2, want=4)
        got, expected = [self.forward([first])], [expected_TV[2:]]
        if last:
            fresh = Segment(slot=last, tokens=ids[:3], start=0, want=3)
            got += [self.forward([first, fresh])]
            got += [self.forward([Segment(slot=last, tokens=ids[2:], start=2, want=4)])]
            expected += [expected_TV[2:], expected_TV[:3], expected_TV[2:]]
        self.clear()
        gap = float((torch.cat(got) - torch.cat(expected)).abs().max())
        gap /= float(expected_TV.abs().max().clamp_min(1e-6))
        if not gap <= _PROBE_TOLERANCE:
            raise ModelError(
                f"the model's cached passes differ from its plain ones by {gap:.2g} of the largest "
                f"logit (allowed {_PROBE_TOLERANCE:g}); its attention or head is of a kind this "
                "engine does not serve: choose a decoder with full attention and a plain head"
            )


def _refuse(model: PreTrainedModel, context: int) -> None:
    """Raise ModelError where the model cannot be served at all."""
    config = model.config
    limit = int(getattr(config, "max_position_embeddings", context))
    if limit < context:
        raise ModelError(
            f"the model reads {limit} positions but {context} were asked for; lower max_context"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        raise ModelError(
            f"the model has layers with {', '.join(sorted(kinds)) or 'a sliding window'}; only "
            "full attention can be rewound by position: choose another model"
        )
    if getattr(config, "_attn_implementation", None) not in ("sdpa", attention.NAME):
        raise ModelError(
            f"the model was loaded with {config._attn_implementation!r} attention, which adds a "
            "boolean mask instead of applying it; load it with attn_implementation='sdpa'"
        )


def _neighbours(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments of adjacent slots together, so that no pass pays for idle rows between them."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda segment: segment.slot):
        if groups and groups[-1][-1].slot + 1 == segment.slot:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups
