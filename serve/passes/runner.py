"""ModelRunner: passes of one model over ragged rows of its slot cache.

Shapes: B rows of the rectangle, W its width, C hidden width, V the head's outputs, N wanted rows,
K positions seen.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkeep.errors import ModelError
from draftkeep.serve.passes import attention
from draftkeep.serve.passes.cache import SlotCache, view_length
from draftkeep.serve.passes.fused import FusedDecoder
from draftkeep.serve.passes.graphs import FixedPasses, Graphs
from draftkeep.serve.passes.likeness import hooked, unlike
from draftkeep.serve.passes.packed import Packing, pack_linears
from draftkeep.serve.passes.rectangle import Segment, lay_out, neighbours
from draftkeep.serve.passes.refusals import refuse
from draftkeep.serve.passes.trial import Trial

PREFILL_CHUNK = 128
_BROKEN = (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError)

# Token ids and last positions seen [B, W], and an additive mask [B, 1, W, K], to hidden [B, W, C].
Decode = Callable[[Tensor, Tensor, Tensor], Tensor]


class ModelRunner:
    """One model, its packed weights and its slot cache. Used by one thread at a time.

    The model belongs to the runner from construction on: its layers are replaced where this engine
    has faster ones that agree with them, and its attention is switched. It stays on its device and
    in its dtype. It must be a decoder whose attention sees the whole past; the runner compares its
    own ragged passes with the model's before it takes over and raises ModelError where they differ,
    so a head with scaling or an attention with a bias is refused, not served wrong.

    `decoder` is "fused" where FusedDecoder runs the layers, or "stock: " and why the model's own
    modules do. Where the fused one was tried and failed or differed, `on_problem` hears of it once.
    Hooks on modules of the decoder and on the head run at every pass: such a decoder is not fused,
    such a layer not packed, and no pass is a graph.

    `graphs`: passes at fixed shapes as CUDA graphs where the model is on a GPU (`auto`), at fixed
    shapes on any device (`fixed`), or not (`never`). Where a capture fails, `on_problem` hears of
    it once and passes go on without graphs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        packing: Packing = "measured",
        graphs: Graphs = "auto",
        on_problem: Callable[[str, BaseException], None] = lambda kind, error: None,
    ) -> None:
        refuse(model, context)
        model.train(False)
        self.model = model
        self.slots = slots
        self.context = context
        self._on_problem = on_problem
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight = cast(Tensor, self._head.weight)
        self.vocab, self.device, self._dtype = len(weight), weight.device, weight.dtype
        self._fixed: FixedPasses | None = None
        self._decode: Decode
        self._parts: list[nn.Module] = [model]
        # A graph replays kernels, not the code between them.
        fixes = not any(hooked(module) for module in model.modules())
        try:
            trial = Trial(model, slots=slots)
            self.decoder = self._take_over(trial)
            self.packed = pack_linears(nn.ModuleList(self._parts), packing)
            self._head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            difference = self._difference(trial)
        except _BROKEN as error:
            raise ModelError(
                f"a trial pass of {type(model).__name__} failed with {type(error).__name__}; it is "
                "of a kind this engine does not serve, or its files do not fit each other"
            ) from error
        if difference is not None:
            raise ModelError(
                f"the model's {difference}; its attention or head is of a kind this engine does "
                "not serve: choose a decoder with full attention and a plain head"
            )
        if fixes and (graphs == "fixed" or (graphs == "auto" and self.device.type == "cuda")):
            self._fixed = FixedPasses(
                self._logits, slots=slots, context=context, device=self.device
            )

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Feed all segments in one pass; return the wanted logits [N, V], segment by segment.

        A segment's tokens see positions 0..start-1 of their slot as they were last written. Slots
        between the segments' lowest and highest that have no segment are left as they were. The
        logits are float32, on the model's device, and the caller's to keep.
        """
        width = max(len(segment.tokens) for segment in segments)
        with torch.inference_mode():
            logits_BWV = self._fixed_pass(segments, width)
            if logits_BWV is not None:
                return logits_BWV[self._wanted(segments, 0)].float()
            hidden_BWC, lo = self._pass(segments, width)
            logits_NV: Tensor = self._head(hidden_BWC[self._wanted(segments, lo)])
            return logits_NV.float()

    def prefill(self, segments: Sequence[Segment]) -> None:
        """Feed segments of any length in chunks, without the head."""
        with torch.inference_mode():
            for group in neighbours(segments):
                longest = max(len(segment.tokens) for segment in group)
                for at in range(0, longest, PREFILL_CHUNK):
                    chunks = [_chunk(piece, at) for piece in group if at < len(piece.tokens)]
                    self._pass(chunks, max(len(chunk.tokens) for chunk in chunks))

    def idle_pass(self, batch: int, width: int) -> None:
        """A whole pass of that shape that changes no slot, for measuring what one costs.

        It has ended when this returns.
        """
        rows = [Segment(slot=slot, tokens=(), start=0) for slot in range(batch)]
        with torch.inference_mode():
            if self._fixed_pass(rows, width) is None:
                hidden_BWC, _ = self._pass(rows, width)
                self._head(hidden_BWC.flatten(0, 1))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Forget every slot, after a pass that failed."""
        self._cache.clear()

    def _fixed_pass(self, segments: Sequence[Segment], width: int) -> Tensor | None:
        """Logits [slots, W, V] at a fixed shape, or None where the pass has to be ragged."""
        if self._fixed is None:
            return None
        logits_BWV = self._fixed.run(segments, width)
        if self._fixed.lost is not None:
            self._on_problem("a CUDA graph", self._fixed.lost)
            self._fixed = None
        return logits_BWV

    def _pass(self, segments: Sequence[Segment], width: int) -> tuple[Tensor, int]:
        """Run the decoder on the rectangle around `segments`; (hidden_BWC, its lowest slot)."""
        lo = min(segment.slot for segment in segments)
        hi = 1 + max(segment.slot for segment in segments)
        rectangle = lay_out(segments, lo=lo, hi=hi, width=width, context=self.context)
        view = view_length(rectangle.longest, self.context)
        return self._hidden(rectangle.on(self.device), lo, view), lo

    def _hidden(self, inputs_3BW: Tensor, lo: int, view: int) -> Tensor:
        ids_BW, seen_BW, places_BW = inputs_3BW
        self._cache.place(lo=lo, hi=lo + len(ids_BW), view=view, places_R=places_BW.flatten())
        keys_K = torch.arange(view, device=self.device)
        unseen_B1WK = (keys_K > seen_BW[:, :, None])[:, None]
        mask_B1WK = torch.zeros(unseen_B1WK.shape, dtype=self._dtype, device=self.device)
        return self._decode(ids_BW, seen_BW, mask_B1WK.masked_fill_(unseen_B1WK, -torch.inf))

    def _logits(self, inputs_3BW: Tensor, view: int) -> Tensor:
        logits_BWV: Tensor = self._head(self._hidden(inputs_3BW, 0, view))
        return logits_BWV

    def _wanted(self, segments: Sequence[Segment], lo: int) -> Any:
        """An index of the wanted columns of the rectangle."""
        rows: list[int] = []
        columns: list[int] = []
        for segment in segments:
            rows += [segment.slot - lo] * segment.want
            columns += range(len(segment.tokens) - segment.want, len(segment.tokens))
        index_2N = torch.tensor([rows, columns], dtype=torch.long)
        if self.device.type == "cuda":
            index_2N = index_2N.pin_memory().to(self.device, non_blocking=True)
        return index_2N[0], index_2N[1]

    def _take_over(self, trial: Trial) -> str:
        """Choose the decoder over its slot cache, fused where it can be and agrees: `decoder`."""
        if (reason := self._fuse(trial)) is None:
            return "fused"
        self._cache = self._new_cache()
        self.model.config._attn_implementation = attention.NAME
        self._decode = StockDecoder(self.model.base_model, self._cache)
        return f"stock: {reason}"

    def _fuse(self, trial: Trial) -> str | None:
        """Take the fused decoder, or return why not; report it where that is a surprise."""
        decoder: Any = self.model.base_model
        self._cache = self._new_cache()
        try:
            if (reason := unlike(decoder)) is not None:
                return reason
            fused = FusedDecoder(decoder, self._cache, self.context)
            self._decode = fused
            difference = self._difference(trial)
        except _BROKEN as error:
            self._on_problem("the fused decoder", error)
            return f"the fused one failed with {type(error).__name__}"
        if difference is not None:
            told = f"the fused decoder's {difference}; the model's own modules run instead, slower"
            self._on_problem("the fused decoder", ModelError(told))
            return f"the fused one's {difference}"
        # The stock layers hold views that would keep alive what packing replaces.
        decoder.layers = nn.ModuleList()
        self._parts.append(fused)
        return None

    def _difference(self, trial: Trial) -> str | None:
        difference = trial.difference(self.prefill, self.forward)
        self.clear()
        return difference

    def _new_cache(self) -> SlotCache:
        layers = int(self.model.config.num_hidden_layers)
        return SlotCache(layers=layers, slots=self.slots, context=self.context)


class StockDecoder:
    """The body of any transformers decoder over the slot cache."""

    def __init__(self, decoder: nn.Module, cache: SlotCache) -> None:
        self._decoder = decoder
        names = inspect.signature(decoder.forward).parameters
        self._cache = {"cache" if "cache" in names else "past_key_values": cache}

    def __call__(self, ids_BW: Tensor, seen_BW: Tensor, mask_B1WK: Tensor) -> Tensor:
        """The hidden states [B, W, C] behind the last norm; the cache must be placed."""
        output = self._decoder(
            input_ids=ids_BW,
            position_ids=seen_BW,
            attention_mask=mask_B1WK,
            use_cache=True,
            **self._cache,
        )
        hidden_BWC: Tensor = output.last_hidden_state
        return hidden_BWC


def _chunk(segment: Segment, at: int) -> Segment:
    tokens = segment.tokens[at : at + PREFILL_CHUNK]
    return Segment(slot=segment.slot, tokens=tokens, start=segment.start + at)
