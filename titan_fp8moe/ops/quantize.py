"""Quantization ops: 1x128 tiles for activations and gradients, 128x128 blocks for weights."""

from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import quantize as kernels
from titan_fp8moe.ops.backend import with_kernel
from titan_fp8moe.recipe import BLOCK, E8M0, FP8, SCALE_BITS

quantize_rows = with_kernel(recipe.quantize_rows, kernels.quantize_rows)
quantize_group = with_kernel(recipe.quantize_group, kernels.quantize_group)
dequantize_rows = with_kernel(recipe.dequantize_rows, kernels.dequantize_rows)


class Fp8Weight(NamedTuple):
    """Weights of all local experts in FP8: operands of the GEMMs, and a form in which to store frozen weights.

    N and K of other sizes are padded with zeros. Quantize gate and up apart unless H is a multiple of 128: a layer
    looks for padding behind each of the two.

    Attributes:
        q: (E, N, K) e4m3, contiguous, N and K multiples of 128.
        scale: (E, N // 128, K // 128), a number for each 128x128 block: a power of two in e8m0, as :meth:`quantize`
            makes it, or any in fp32 or bf16.
    """

    q: Tensor
    scale: Tensor

    @classmethod
    def quantize(cls, w: Tensor) -> "Fp8Weight":
        """The FP8 form of (E, N, K) bf16 or fp32, as a forward quantizes it."""
        return quantize_weight(w.detach())

    @classmethod
    def of_blocks(cls, q: Tensor, scale: Tensor, *, scales: Literal["exact", "round"] = "exact") -> "Fp8Weight":
        """Weights in the format of DeepSeek's checkpoints; ``scale`` is their ``weight_scale_inv``.

        Args:
            q: (E, N, K) e4m3, which is copied unless it is contiguous, and N and K are multiples of 128.
            scale: (E, ceil(N / 128), ceil(K / 128)) fp32 or bf16, or e8m0 exponents, also as their bytes in uint8.
            scales: ``exact`` takes them as they are. ``round`` quantizes the values of scales in fp32 or bf16 anew, to
                powers of two, with one more rounding to e4m3 where they were none.

        Raises:
            ValueError: for other shapes or dtypes.
        """
        sizes, scale = [recipe.padded(size) for size in q.shape[1:]], block_scales(scale)
        fits = q.dim() == 3 and scale.shape == (q.shape[0], *(size // BLOCK for size in sizes))
        if not fits or q.dtype != FP8 or scale.dtype not in SCALE_BITS:
            raise ValueError(
                "FP8 weights must be (E, N, K) e4m3 with one scale per 128x128 block, in fp32, bf16 or e8m0, or its "
                f"bytes; got {tuple(q.shape)} {q.dtype} and {tuple(scale.shape)} {scale.dtype}"
            )
        if sizes != [*q.shape[1:]]:
            padding = 0, sizes[1] - q.shape[2], 0, sizes[0] - q.shape[1]
            q = torch.nn.functional.pad(q.detach().view(torch.uint8), padding).view(FP8)
        weight = cls(q.detach().contiguous(), scale)
        if scales == "exact" or weight.scale.dtype == E8M0:
            return weight
        rounded = cls(torch.empty_like(weight.q), torch.empty_like(weight.scale, dtype=E8M0))
        for e in range(q.shape[0]):  # one expert's fp32 values at a time
            values = cls(*(t[e : e + 1] for t in weight)).dequantize(torch.float32)
            for kept, new in zip(rounded, cls.quantize(values), strict=True):
                kept[e].view(torch.uint8).copy_(new[0].view(torch.uint8))
        return rounded

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The values. With powers of two every one is a bf16 number; with other scales bf16 rounds them, and fp32 in
        its last bit."""
        return recipe.dequantize(self.q, self.scale, dtype)

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """Where it is used: an offloaded weight's values are in host memory, its scales are not."""
        return self.scale.device


def block_scales(scale: Tensor) -> Tensor:
    """A checkpoint's block scales as the GEMMs read them, by their dtype: numbers in fp32 or bf16, or exponents in e8m0
    or uint8."""
    scale = scale.detach().contiguous()
    return scale.view(E8M0) if scale.dtype == torch.uint8 else scale


def _quantize_weight(weights: list[Tensor], plain: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.quantize_weight` of one or two weights, which the results have side by side along N.

    Returns:
        q (E, N, K), empty unless ``plain``; its transpose, empty unless ``transposed``; and the scales.
    """
    first, *others = map(recipe.quantize_weight, weights)
    q, q_t, scale = _join_weight(*first, *(others[0] if others else (None, None)), plain, transposed)
    if kernels.stored_transposed(weights):
        scale = scale.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E8M0)
    return q, q_t, scale


def _refresh_weight(
    weights: list[Tensor],
    q: Tensor,
    q_t: Tensor | None,
    scale: Tensor,
    state: Tensor,
    steps: Tensor | None,
    force: bool,
    generation: Tensor | None,
) -> Tensor:
    """Quantizes weights into buffers that are kept, unless these are the copies that a forward or backward needs.

    The device decides, by :func:`titan_fp8moe.recipe.seen_weights`, so that a replay of a CUDA graph decides anew.

    Args:
        weights: one or two (E, N, K) of one shape, as for :func:`quantize_weight`.
        q, q_t, scale: the buffers, as its results; ``q_t`` None where the transpose is not kept.
        state, steps, force, generation: as in the recipe.

    Returns:
        (2,) int32, the copies' generation, and 1 if they were made.
    """
    made, after = recipe.seen_weights(weights, state, steps, force, generation)
    if made:
        # .data: without a new version, as kernels write.
        got, got_t, got_scale = _quantize_weight(weights, True, q_t is not None)
        q.data.copy_(got)
        scale.data.copy_(got_scale)
        if q_t is not None:
            q_t.data.copy_(got_t)
    state.data.copy_(after)
    return state.new_tensor([after[1], made])


def _join_weight(
    w: Tensor, w_scale: Tensor, last_w: Tensor | None, last_scale: Tensor | None, plain: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_quantize_weight`, of weights that are quantized."""
    bits, _ = SCALE_BITS[w_scale.dtype]
    q, scale = w.view(torch.uint8), w_scale.view(bits)
    if last_w is not None and last_scale is not None:
        q, scale = torch.cat([q, last_w.view(torch.uint8)], 1), torch.cat([scale, last_scale.view(bits)], 1)
    q, scale = q.clone().view(FP8), scale.clone().view(w_scale.dtype)
    return q if plain else q.new_empty(0), q.transpose(1, 2).contiguous() if transposed else q.new_empty(0), scale


quantize_weights = with_kernel(_quantize_weight, kernels.quantize_weight)
join_weights = with_kernel(_join_weight, kernels.join_weight)
refresh_weight = with_kernel(_refresh_weight, kernels.refresh_weight)


def _operands(weights: tuple[Tensor | Fp8Weight, ...], plain: bool, transposed: bool) -> tuple[Tensor, ...]:
    first, *others = weights
    if isinstance(first, Fp8Weight):
        last, last_scale = cast(Fp8Weight, others[0]) if others else (None, None)
        alike = [(w.shape[0], w.shape[2], w.scale.dtype) for w in cast(tuple[Fp8Weight, ...], weights)]
        if alike[0] != alike[-1]:  # a kernel would read other memory
            raise ValueError(f"quantize_weight: gate and up must share E, K and the dtype of scales; got {alike}")
        return join_weights(first.q, first.scale, last, last_scale, plain, transposed)
    return quantize_weights(cast(list[Tensor], list(weights)), plain, transposed)


def quantize_weight(*weights: Tensor | Fp8Weight) -> Fp8Weight:
    """Quantizes one or two weights in 128x128 blocks into one operand, concatenated along N.

    Args:
        weights: (E, N_i, K) of one dtype, bf16 or fp32, each padded with zeros to multiples of 128. Or already
            quantized (``fp8_all_gather``); those are only concatenated.

    Returns:
        The operand (E, sum of padded N_i, padded K).
    """
    if len(weights) == 1 and isinstance(weights[0], Fp8Weight):
        return weights[0]
    q, _, scale = _operands(weights, True, False)
    return Fp8Weight(q, scale)


def quantize_weight_transposed(*weights: Tensor | Fp8Weight) -> Fp8Weight:
    """The transpose of :func:`quantize_weight`, an operand (E, K, sum of N_i); its scale is a strided view."""
    _, q, scale = _operands(weights, False, True)
    return Fp8Weight(q, scale.transpose(1, 2))
