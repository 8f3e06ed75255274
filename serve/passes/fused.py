"""FusedDecoder: the body of a Llama-like model in few operations over the same weights.

At small widths most of a stock pass is not products but the operations between them. Here query,
key and value are one product, gate and up another, the residual is added by the product that ends
a branch, and keys and values are written by one copy.

Shapes: B rows, W width, R = B * W tokens, C hidden width, H query heads, G key-value heads, N = H +
G, D head width, K positions seen, S positions of a slot, J = (N + G) * D a token's queries, keys
and values.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftkeep.serve.passes.attention import attend, folded_mask, folds
from draftkeep.serve.passes.cache import SlotCache, SlotLayer
from draftkeep.serve.passes.likeness import eps_of


class RootMeanSquare:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension.

    `weight` may have more dimensions than that one; its last is the width.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.width = weight.shape[-1]
        self.eps = eps
        # torch's own function is one operation on a GPU and six on a processor.
        self.native = weight.is_cuda or weight.dtype != torch.float32
        self.weight = weight if self.native else weight * math.sqrt(self.width)
        self.floor = torch.tensor(math.sqrt(self.width * eps))

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised rows, a new tensor."""
        if self.native:
            return functional.rms_norm(x, (self.width,), None, self.eps).mul_(self.weight)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)
        return (x * self.weight).div_(length)


class FusedLayer(nn.Module):
    """One layer over joined weights, of which the layer it was made from keeps views.

    That layer must be built as Llama's, Qwen2's and Qwen3's are, as `unlike` tells.

    - `head_width`, `query_heads`, `key_heads`: D, H and G; `scale` is what q.k is multiplied by.
    - `qkv`, `gate_up`: the joined projections; `out`, `down`: those that end the two branches.
    - `query_width`: the first columns of `qkv`'s output, the queries; `turned_width`: those and the
      keys, which the rotation turns; the rest are values.
    - `before`, `between`: the norms at the head of the two branches; `head_norm`: of every query
      and key head, None where the layer has none.
    - `inner_width`: the first columns of `gate_up`'s output, which go through `activation`.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.head_width = int(attention.head_dim)
        self.scale = float(attention.scaling)
        outputs = [attention.q_proj.out_features, attention.k_proj.out_features]
        self.query_heads, self.key_heads = (count // self.head_width for count in outputs)
        self.query_width, self.turned_width = outputs[0], sum(outputs)
        self.before = _norm(layer.input_layernorm)
        self.between = _norm(layer.post_attention_layernorm)
        self.head_norm = _head_norm(attention, self.query_heads, self.key_heads)
        self.qkv: nn.Module = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out: nn.Module = _join([attention.o_proj])
        self.gate_up: nn.Module = _join([mlp.gate_proj, mlp.up_proj])
        self.down: nn.Module = _join([mlp.down_proj])
        self.activation: nn.Module = mlp.act_fn
        self.inner_width = mlp.down_proj.in_features

    def forward(
        self, hidden_RC: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, mask: Tensor, slots: SlotLayer
    ) -> None:
        """Turn hidden_RC, in place, into the layer's output."""
        joined_RJ: Tensor = self.qkv(self.before(hidden_RC))
        turned_RND = joined_RJ[:, : self.turned_width].view(len(hidden_RC), -1, self.head_width)
        if self.head_norm is not None:
            turned_RND.copy_(self.head_norm(turned_RND))
        # sin carries the sign of each half, so that rolling is the whole rotation.
        rolled_RND = turned_RND.roll(self.head_width // 2, -1)
        turned_RND.mul_(cos_R1D).addcmul_(rolled_RND, sin_R1D)
        key_BGKD, value_BGKD = slots.write(joined_RJ[:, self.query_width :])
        queries_RHD = turned_RND[:, : self.query_heads]
        query_BWHD = queries_RHD.view(len(key_BGKD), -1, self.query_heads, self.head_width)
        mixed = attend(query_BWHD.transpose(1, 2), key_BGKD, value_BGKD, mask, self.scale)
        _add_product(hidden_RC, mixed.flatten(0, 1), self.out)
        both: Tensor = self.gate_up(self.between(hidden_RC))
        gated = self.activation(both[:, : self.inner_width]).mul_(both[:, self.inner_width :])
        _add_product(hidden_RC, gated, self.down)


class FusedDecoder(nn.Module):
    """Embedding, layers and last norm of a Llama-like `decoder`, writing to `cache`.

    The weights are the decoder's own, joined; it goes on working over views of them. `unlike` must
    have found nothing against it. Whether the two agree is for the caller to see: a build can look
    alike and compute something else.
    """

    def __init__(self, decoder: nn.Module, cache: SlotCache, context: int) -> None:
        super().__init__()
        stock: Any = decoder
        self._embed: nn.Module = stock.embed_tokens
        self._norm = _norm(stock.norm)
        self._cache = cache
        weight_VC = cast(Tensor, stock.embed_tokens.weight)
        self._cos_SD, self._sin_SD = _turns(stock.rotary_emb, weight_VC, context)
        self._layers = nn.ModuleList(FusedLayer(layer) for layer in stock.layers)
        for layer, slots in zip(self.fused, cache.slot_layers, strict=True):
            width = layer.head_width
            slots.allocate(
                heads=layer.key_heads, key_width=width, value_width=width, like=weight_VC
            )

    @property
    def fused(self) -> Sequence[FusedLayer]:
        """The layers, first to last."""
        return cast(Sequence[FusedLayer], self._layers)

    def forward(self, ids_BW: Tensor, seen_BW: Tensor, mask_B1WK: Tensor) -> Tensor:
        """The hidden states [B, W, C] behind the last norm; the cache must be placed."""
        batch, width = ids_BW.shape
        hidden_RC: Tensor = self._embed(ids_BW.flatten())
        seen_R = seen_BW.flatten()
        cos_R1D, sin_R1D = (table[seen_R].unsqueeze(1) for table in (self._cos_SD, self._sin_SD))
        first = self.fused[0]
        mask = mask_B1WK
        if folds(width, hidden_RC.device.type):
            mask = folded_mask(mask, first.query_heads // first.key_heads)
        for layer, slots in zip(self.fused, self._cache.slot_layers, strict=True):
            layer(hidden_RC, cos_R1D, sin_R1D, mask, slots)
        return self._norm(hidden_RC).view(batch, width, -1)


def _add_product(hidden_RC: Tensor, x: Tensor, linear: nn.Module) -> None:
    """hidden_RC += linear(x), by the product itself where the layer is a plain one."""
    if type(linear) is nn.Linear and linear.bias is None:
        hidden_RC.addmm_(x, linear.weight.t())
    else:
        hidden_RC.add_(linear(x))


def _norm(norm: Any) -> RootMeanSquare:
    return RootMeanSquare(norm.weight.detach(), cast(float, eps_of(norm)))


def _head_norm(attention: Any, query_heads: int, key_heads: int) -> RootMeanSquare | None:
    """Qwen3's norms of every query and key head as one of all N heads, or None without them."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm, attention.k_norm
    weight_ND = torch.cat(
        [query.weight.detach().expand(query_heads, -1), key.weight.detach().expand(key_heads, -1)]
    )
    return RootMeanSquare(weight_ND, cast(float, eps_of(query)))


def _join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer of several with one input; theirs become views of its weight and bias."""
    sizes = [linear.out_features for linear in linears]
    biased = linears[0].bias is not None
    joined = nn.Linear(linears[0].in_features, sum(sizes), bias=biased, device="meta")
    for name in ("weight", "bias") if biased else ("weight",):
        whole = torch.cat([getattr(linear, name).detach() for linear in linears])
        setattr(joined, name, nn.Parameter(whole, requires_grad=False))
        for index, linear in enumerate(linears):
            part = whole.narrow(0, sum(sizes[:index]), sizes[index])
            setattr(linear, name, nn.Parameter(part, requires_grad=False))
    return joined


def _turns(rotary: Any, like: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every position, as the model's own module gives them."""
    with torch.inference_mode():
        cos_1SD, sin_1SD = rotary(like, torch.arange(context, device=like.device)[None])
        sign_D = torch.ones(sin_1SD.shape[-1], device=like.device, dtype=like.dtype)
        sign_D[: len(sign_D) // 2] = -1
        return cos_1SD[0], sin_1SD[0] * sign_D
