"""The other FP8 recipes of the study, as classes that replace torchtitan's modules in place.

``rowwise`` calls torchao's differentiable fp8 rowwise grouped GEMM, which is what torchtitan's
``quantize.grouped_mm.float8`` runs (that converter itself imports names that torchao 0.18 no longer has). ``naive`` and
the emulation of ``rowwise`` quantize and dequantize the operands of bf16 grouped GEMMs: products of e4m3 values times
their scales, rounded once more to bf16 (relative error 2**-9, against 2**-4 of e4m3) and summed in fp32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchtitan.models.moe.moe import FeedForward, GroupedExperts
from torchtitan.models.moe.utils import indices_padding_wrapper, set_token_group_alignment_size_m

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward

_E4M3_MAX = 448.0


class Recipe(NamedTuple):
    """How operands are rounded to e4m3, each function returning the rounded values in bf16.

    Attributes:
        rows: (M, K) -> (M, K), operand of a GEMM that contracts K.
        cols: (M, K), offsets (E,) -> (M, K), operand of the weight gradient, which contracts an expert's rows.
        weight: (E, N, K), the dim of it that is contracted -> (E, N, K).
        double: whether ``cols`` takes what ``rows`` returned, so that values are rounded twice, or the bf16 tensor.
        alignment: rows that an expert's group is padded to a multiple of.
    """

    rows: Callable[[Tensor], Tensor]
    cols: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Tensor, int], Tensor]
    double: bool
    alignment: int


def _round_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)


def _fp32_scale(amax: Tensor) -> Tensor:
    return amax.clamp(min=1e-30) / _E4M3_MAX


def _power_of_two_scale(amax: Tensor) -> Tensor:
    """torchao's: the scale's inverse is rounded down to a power of two, amax is at least 1e-12."""
    return torch.exp2(-torch.floor(torch.log2(_E4M3_MAX / amax.clamp(min=1e-12))))


def _tile_rows(x: Tensor) -> Tensor:
    tiles = x.float().unflatten(1, (-1, 128))
    return _round_e4m3(tiles, _fp32_scale(tiles.abs().amax(2, keepdim=True))).flatten(1)


def _tile_cols(x: Tensor, offsets: Tensor) -> Tensor:
    tiles = x.float().unflatten(0, (-1, 128))
    return _round_e4m3(tiles, _fp32_scale(tiles.abs().amax(1, keepdim=True))).flatten(0, 1)


def _block_weight(w: Tensor, contracted: int) -> Tensor:
    blocks = w.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    return _round_e4m3(blocks, _fp32_scale(blocks.abs().amax((2, 4), keepdim=True))).flatten(1, 2).flatten(2, 3)


def _whole_rows(x: Tensor) -> Tensor:
    x = x.float()
    return _round_e4m3(x, _power_of_two_scale(x.abs().amax(1, keepdim=True)))


def _group_cols(x: Tensor, offsets: Tensor) -> Tensor:
    # One group more: behind the last offset are rows that no GEMM wrote.
    group = torch.searchsorted(offsets, torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype), right=True)
    x = x.float()
    amax = x.new_zeros(offsets.numel() + 1, x.shape[1]).index_reduce(0, group, x.abs(), "amax")
    return _round_e4m3(x, _power_of_two_scale(amax)[group])


def _whole_weight(w: Tensor, contracted: int) -> Tensor:
    w = w.float()
    return _round_e4m3(w, _power_of_two_scale(w.abs().amax(contracted, keepdim=True)))


def _swiglu(h1: Tensor, h3: Tensor) -> Tensor:
    return (F.silu(h1.float()) * h3.float()).to(torch.bfloat16)


def _swiglu_backward(da: Tensor, h1: Tensor, h3: Tensor) -> tuple[Tensor, Tensor]:
    da, h1, h3 = da.float(), h1.float(), h3.float()
    sigmoid = torch.sigmoid(h1)
    silu = h1 * sigmoid
    dh1 = da * h3 * (sigmoid + silu * (1 - sigmoid))
    return dh1.to(torch.bfloat16), (da * silu).to(torch.bfloat16)


def _recipe(name: str, compiled: bool) -> Recipe:
    """On a GPU compiled, which makes one or two kernels of each function instead of ten."""
    functions = {
        "naive": (_tile_rows, _tile_cols, _block_weight, True, 128),
        "rowwise": (_whole_rows, _group_cols, _whole_weight, False, 16),
    }
    rows, cols, weight, double, alignment = functions[name]
    if compiled:
        rows, cols, weight = (torch.compile(f, dynamic=False) for f in (rows, cols, weight))
    return Recipe(rows, cols, weight, double, alignment)


@torch.no_grad()
def _same_rounding(a: Recipe, b: Recipe, device: str) -> bool:
    """Whether two versions of a recipe round alike, but for one value in a thousand between two neighbours."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2, 256, 256, generator=generator, device=device).bfloat16()
    offsets = torch.tensor([128, 256], dtype=torch.int32, device=device)
    pairs = [(r.rows(x[0]), r.cols(x[0], offsets), r.weight(x, 2), r.weight(x, 1)) for r in (a, b)]
    return all((left != right).float().mean().item() < 1e-3 for left, right in zip(*pairs, strict=True))


class _EmulatedExperts(torch.autograd.Function):
    """SwiGLU experts on rows in expert order, (M, D) bf16 -> (M, D) bf16, weights bf16."""

    @staticmethod
    def forward(ctx, x, w1, w2, w3, offsets, recipe):
        # Detached and without autocast, as in the backward and in evaluations: one compilation serves them all.
        x, w1, w2, w3 = (tensor.detach() for tensor in (x, w1, w2, w3))
        with torch.autocast(x.device.type, enabled=False):
            x_rounded = recipe.rows(x)
            h1, h3 = (_matmul(x_rounded, recipe.weight(w, 2).transpose(1, 2), offsets) for w in (w1, w3))
            y = _matmul(recipe.rows(_swiglu(h1, h3)), recipe.weight(w2, 2).transpose(1, 2), offsets)
        ctx.save_for_backward(x_rounded if recipe.double else x, h1, h3, w1, w2, w3, offsets)
        ctx.recipe = recipe
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, h1, h3, w1, w2, w3, offsets = ctx.saved_tensors
        recipe = ctx.recipe

        def columns(high_precision: Tensor, rounded: Tensor) -> Tensor:
            return recipe.cols(rounded if recipe.double else high_precision, offsets)

        dy = dy.contiguous()
        dy_rounded = recipe.rows(dy)
        da = _matmul(dy_rounded, recipe.weight(w2, 1), offsets)
        dh1, dh3 = _swiglu_backward(da, h1, h3)
        dh1_rounded, dh3_rounded = recipe.rows(dh1), recipe.rows(dh3)
        dx = _matmul(dh1_rounded, recipe.weight(w1, 1), offsets) + _matmul(dh3_rounded, recipe.weight(w3, 1), offsets)

        a = _swiglu(h1, h3)
        a_cols, x_cols = columns(a, recipe.rows(a) if recipe.double else a), recipe.cols(x, offsets)
        dw1 = _matmul(columns(dh1, dh1_rounded).t(), x_cols, offsets)
        dw3 = _matmul(columns(dh3, dh3_rounded).t(), x_cols, offsets)
        dw2 = _matmul(columns(dy, dy_rounded).t(), a_cols, offsets)
        return dx, dw1, dw2, dw3, None, None


def _matmul(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return torch._grouped_mm(a, b, offs=offsets)


class EmulatedGroupedExperts(GroupedExperts):
    """torchtitan's experts with rounded GEMM operands."""

    recipe: Recipe

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Rows sorted by expert, (S, D) -> (S, D)."""
        return indices_padding_wrapper(self._run)(self.w1, self.w2, self.w3, x, num_tokens_per_expert)

    def _run(self, w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts_E: Tensor) -> Tensor:
        offsets = torch.cumsum(counts_E, dim=0, dtype=torch.int32)
        weights = (w.bfloat16() for w in (w1, w2, w3))
        return _EmulatedExperts.apply(x.bfloat16(), *weights, offsets, self.recipe).type_as(x)


class TorchaoRowwiseGroupedExperts(GroupedExperts):
    """torchtitan's experts with torchao's fp8 rowwise grouped GEMMs."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Rows sorted by expert, (S, D) -> (S, D)."""
        return indices_padding_wrapper(self._run)(self.w1, self.w2, self.w3, x, num_tokens_per_expert)

    def _run(self, w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts_E: Tensor) -> Tensor:
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

        offsets = torch.cumsum(counts_E, dim=0, dtype=torch.int32)

        def matmul(a: Tensor, w: Tensor) -> Tensor:
            return _to_fp8_rowwise_then_scaled_grouped_mm(
                a, w.bfloat16().transpose(1, 2), offsets, pad_token_groups_for_grouped_mm=False
            )

        x_rows = x.bfloat16()
        return matmul(F.silu(matmul(x_rows, w1)) * matmul(x_rows, w3), w2).type_as(x)


def convert_experts(model: nn.Module, name: str, emulate: bool) -> str:
    """Makes the routed experts of ``model`` those of recipe ``name`` ("naive" or "rowwise"); returns how they run."""
    emulated = name == "naive" or emulate or not torch.cuda.is_available()
    recipe = _recipe(name, compiled=False)
    set_token_group_alignment_size_m(recipe.alignment)
    how = "torchao _scaled_grouped_mm"
    if not emulated:
        _skip_autotuning()
    elif torch.cuda.is_available() and _same_rounding(compiled := _recipe(name, compiled=True), recipe, "cuda"):
        recipe, how = compiled, "compiled quantize-dequantize over bf16 GEMMs"
    else:
        how = "quantize-dequantize over bf16 GEMMs"
    for experts in (module for module in model.modules() if type(module) is GroupedExperts):
        if emulated:
            experts.__class__, experts.recipe = EmulatedGroupedExperts, recipe
        else:
            experts.__class__ = TorchaoRowwiseGroupedExperts
    return how


def convert_ffns(model: nn.Module) -> None:
    """Makes shared experts and dense FFNs of ``model`` FP8-Flow's, and leaves the routed experts in bf16."""
    for ffn in (module for module in model.modules() if type(module) is FeedForward):
        Fp8FlowFeedForward.convert(ffn, Fp8FlowMoEConfig())


def _skip_autotuning() -> None:
    """torchao tries 36 configurations of one kernel per shape, a minute of compilation; one is enough here."""
    from torchao.prototype.moe_training.kernels import float8_rowwise, jagged_float8_scales

    for module in (float8_rowwise, jagged_float8_scales):
        for kernel in vars(module).values():
            if hasattr(kernel, "configs") and hasattr(kernel, "fn"):
                kernel.configs = kernel.configs[:1]
