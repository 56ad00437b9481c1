"""Biases, the activation, the router's score and quantization in one op, forward and backward."""

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import swiglu as kernels
from titan_fp8moe.ops.backend import with_kernel
from titan_fp8moe.spec import ExpertSpec, decode


def _swiglu_quantize(
    h_M2H: Tensor,
    score_M: Tensor | None,
    offsets_E: Tensor,
    expert: ExpertSpec,
    keep_h: bool,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.swiglu_quantize` of rows in expert order; with ``keep_h`` also
    :func:`titan_fp8moe.recipe.quantize_hidden`.

    Args:
        h_M2H: bf16.
        offsets_E: (E,) int32; rows of the results at and past ``offsets_E[-1]`` are undefined.
        gate_bias, up_bias: (E, H') bf16 or fp32 with equal strides, H' at most H; or None. Without a gate the first.

    Returns:
        The operand and h, each with its column-major scales; h's two are empty unless ``keep_h``.
    """
    bias_M2H = _bias_rows(gate_bias, up_bias, offsets_E, h_M2H, expert)
    q, scale = recipe.swiglu_quantize(h_M2H, score_M, expert, bias_M2H)
    if keep_h:
        h_q, h_scale = recipe.quantize_hidden(h_M2H, score_M, expert, bias_M2H)
        return q, scale, h_q, recipe.column_major(h_scale)
    return q, scale, q.new_empty(0), scale.new_empty(0)


def _bias_rows(
    gate: Tensor | None, up: Tensor | None, offsets_E: Tensor, h_M2H: Tensor, expert: ExpertSpec
) -> Tensor | None:
    """(M, 2H) fp32, the biases of each row's expert, padded as h is."""
    if gate is None:
        return None
    M, H = h_M2H.shape[0], h_M2H.shape[1] // expert.rows_per_unit
    padding = 0, H - gate.shape[1]
    gate = torch.nn.functional.pad(gate.float(), padding)
    up = None if up is None else torch.nn.functional.pad(up.float(), padding)
    return recipe.expert_rows(recipe.join_gate_up(gate, up, expert), offsets_E, M)


def _swiglu_quantize_backward(
    d_MH: Tensor,
    h_M2H: Tensor,
    h_scale: Tensor | None,
    score_M: Tensor | None,
    offsets_E: Tensor,
    expert: ExpertSpec,
    recompute_a: bool,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    b2: Tensor | None = None,
    dy: Tensor | None = None,
    dy_scale: Tensor | None = None,
    bias_gradients: bool = False,
) -> list[Tensor]:
    """:func:`titan_fp8moe.recipe.swiglu_quantize_backward` of rows in expert order; arguments as in the forward.

    Args:
        d_MH: bf16.
        h_M2H: bf16, or e4m3 with ``h_scale`` (M, 2H // 128) e8m0.
        recompute_a: whether to return GEMM 2's operand, for a backward that did not save it.
        b2, dy, dy_scale: come with the biases: GEMM 2's bias (E, D'), and the quantized gradient of the output, (M, D)
            e4m3 with column-major scales, of which ds has a part.
        bias_gradients: whether to return the biases' gradients.

    Returns:
        As the recipe, but the operand is empty unless ``recompute_a``, and ds without ``score_M``. The last are, with
        ``bias_gradients`` only, those of gate, up and down in one, (E, 2H' + D') in their dtype.
    """
    h = h_M2H if h_scale is None else recipe.dequantize(h_M2H, h_scale)
    bias_M2H = _bias_rows(gate_bias, up_bias, offsets_E, h, expert)
    dh, dh_scale, a, a_scale, ds, dbias_M2H = recipe.swiglu_quantize_backward(d_MH, h, score_M, expert, bias_M2H)
    if not recompute_a:
        a, a_scale = a.new_empty(0), a_scale.new_empty(0)
    if score_M is None:
        return [dh, dh_scale, a, a_scale, ds.new_empty(0)]
    if gate_bias is None or b2 is None or dy is None or dy_scale is None:
        return [dh, dh_scale, a, a_scale, ds]
    hidden, dim = gate_bias.shape[1], b2.shape[1]
    dy_MD = recipe.dequantize(dy, dy_scale)[:, :dim]
    ds_of_b2, db2_MD = recipe.output_bias_backward(dy_MD, b2, score_M, offsets_E, expert)
    results = [dh, dh_scale, a, a_scale, ds + ds_of_b2]
    if not bias_gradients:
        return results
    dg, du = recipe.split_gate_up(dbias_M2H, expert)
    dg, du = dg[:, :hidden], None if du is None else du[:, :hidden]
    rows = torch.cat([recipe.join_gate_up(dg, du, expert), db2_MD], 1)
    return [*results, recipe.bias_gradient(rows, offsets_E).to(b2.dtype)]


swiglu_quantize = with_kernel(_swiglu_quantize, kernels.swiglu_quantize)
swiglu_quantize_backward = with_kernel(_swiglu_quantize_backward, kernels.swiglu_quantize_backward)


def swiglu_quantize_op(
    h_M2H: Tensor, score_M: Tensor | None, offsets_E: Tensor, spec: str, keep_h: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`swiglu_quantize` as an op, with an encoded specification."""
    return swiglu_quantize(h_M2H, score_M, offsets_E, decode(ExpertSpec, spec), keep_h)
