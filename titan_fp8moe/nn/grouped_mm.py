"""One grouped matrix product in FP8, for MoE code that keeps its own data flow.

    forward   x --quantize--> pad groups to 128 rows --GEMM--> y, without padding
    backward  dy --quantize--> pad --GEMM--> dx, without padding; dW from both operands, transposed in FP8

:func:`titan_fp8moe.grouped_ffn` is faster for a whole FFN: the activation's kernel quantizes its result. Here every
product casts its own rows, moves them to padded groups, and moves its result back.
"""

import itertools
import warnings
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from titan_fp8moe import ops
from titan_fp8moe.dispatch.base import check_rows
from titan_fp8moe.layer.checks import check_device
from titan_fp8moe.layer.ffn import weight_grads
from titan_fp8moe.ops.backend import custom_op, once_differentiable, refuse_export
from titan_fp8moe.recipe import BLOCK, row_capacity
from titan_fp8moe.rows import Rows


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """``x[m] @ w[e]`` for the expert e whose group holds row m: ``torch._grouped_mm`` in FP8.

    Rows and gradients are quantized in 1x128 tiles, weights in 128x128 blocks, in every call. Differentiable once in
    ``x`` and ``w``. Nothing waits for the GPU, and ``torch.compile`` takes it into one graph.

    Args:
        x: (M, K) bf16, rows sorted by expert.
        w: (E, K, N) bf16 or fp32. A transposed view of weights (E, N, K) costs nothing, and neither does its gradient.
        offs: (E,) int32 on the same device, the end of each expert's rows in x. Groups may be empty and of any size.

    Returns:
        (M, N) bf16. Rows at and past ``offs[-1]`` are zeros, and so are their gradients.

    Raises:
        ValueError: for other shapes, dtypes or devices, DTensors, more rows than the kernels take, or if K or N is no
            multiple of 128. On a CPU also for ``offs`` that decrease or exceed M. A GPU does not check them, which
            would take kernels of its own.
        RuntimeError: in torch.func's transforms, torch.jit.trace, and torch.export with gradients.

    Example::

        h = grouped_mm(x, w13.transpose(1, 2), offs)  # w13 (E, 2H, D)
    """
    check_plain("grouped_mm", "x, offs and w", x, offs, w)
    fits = (x.dim(), w.dim(), offs.dim()) == (2, 3, 1) and x.shape[1] == w.shape[1] and offs.shape[0] == w.shape[0]
    kinds = x.dtype == torch.bfloat16 and w.dtype in (torch.bfloat16, torch.float32)
    if not fits or not kinds or w.shape[1] % BLOCK or w.shape[2] % BLOCK:
        got = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, w, offs))
        raise ValueError(
            "grouped_mm: x must be bf16 (M, K), w bf16 or fp32 (E, K, N) and offs (E,), and K and N must be multiples "
            f"of 128; got {got}. Pass weights (E, N, K) as w.transpose(1, 2), and use torch._grouped_mm for other sizes"
        )
    check_rows("grouped_mm", x.shape[0], row_capacity(x.shape[0], w.shape[0]), w.shape[0])
    check_device(x)
    check_ends("grouped_mm", offs, x.shape[0])
    refuse_export((x, w))
    return _GroupedMM.apply(x, w, offs)


def check_plain(who: str, names: str, x: Tensor, offs: Tensor, *others: Tensor) -> None:
    """Rejects DTensors, tensors on several devices, and ends of groups that are not int32."""
    given = x, offs, *others
    if any(isinstance(t, DTensor) for t in given):
        raise ValueError(f"{who}: {names} must be this rank's plain tensors, got a DTensor; use to_local()")
    if offs.dtype != torch.int32:
        raise ValueError(f"{who}: offs must be int32, got {offs.dtype}; use offs.int()")
    if len(devices := {t.device for t in given}) > 1:
        raise ValueError(f"{who}: {names} must be on one device, got {', '.join(map(str, devices))}")


def check_ends(who: str, offs: Tensor, num_rows: int) -> None:
    """Rejects ends of groups that decrease or exceed the rows. They are read on a CPU only."""
    if type(offs) is not Tensor or offs.device.type != "cpu" or torch.compiler.is_compiling():
        return
    ends = offs.tolist()
    remedy = "offs are the groups' ends, not their counts; use counts.cumsum(0, dtype=torch.int32)"
    if any(a > b for a, b in itertools.pairwise([0, *ends, num_rows])):
        raise ValueError(f"{who}: offs must not decrease and not exceed the {num_rows} rows of x: {remedy}")
    if ends and ends[-1] < num_rows == sum(ends):  # such ends are valid, and the rows after them count as unused
        warnings.warn(f"{who}: offs add up to the {num_rows} rows of x; {remedy}", stacklevel=3)


def expert_of_rows(offs_E: Tensor, num_rows: int) -> Tensor:
    """(M, 1) int32, the expert of each row: the first whose group ends behind it. The rows at and past offs[-1] have
    expert E, which gets no row in :func:`titan_fp8moe.ops.expert_routing`."""
    row_M = torch.arange(num_rows, dtype=torch.int32, device=offs_E.device)
    return torch.searchsorted(offs_E, row_M, right=True, out_int32=True).unsqueeze(1)


def _grouped_linear(x_MK: Tensor, w_EKN: Tensor, offs_E: Tensor) -> list[Tensor]:
    """y (M, N) bf16, and what the backward reads: q and scale of x, and the routing without scores."""
    M, E = x_MK.shape[0], w_EKN.shape[0]
    expert_M1 = expert_of_rows(offs_E, M)
    no_scores_M1 = torch.empty_like(expert_M1, dtype=torch.float32)
    offsets_E, token_P, _, row_M1 = ops.expert_routing(expert_M1, no_scores_M1, E, row_capacity(M, E))
    q, scale = ops.quantize_rows(x_MK)
    padded = ops.permute_rows(q, scale, row_M1, token_P, offsets_E)
    y_PN = ops.grouped_mm(*padded, *ops.quantize_weight(w_EKN.transpose(1, 2)), offsets_E, torch.bfloat16)
    return [ops.unpermute_sum(y_PN, row_M1, torch.bfloat16), q, scale, offsets_E, token_P, row_M1]


def _grouped_linear_backward(
    dy_MN: Tensor, w_EKN: Tensor, saved: list[Tensor | None], needs_dx: bool, needs_dw: bool
) -> list[Tensor]:
    """The gradients that are needed, of x (M, K) and of w, in its memory layout. ``saved``: of the forward; q and scale
    may be None if w needs none."""
    q, scale, offsets_E, token_P, row_M1 = cast(list[Any], saved)
    w = w_EKN.transpose(1, 2)  # a layer's form of a weight, which is read where it lies
    dy = Rows(*ops.permute_rows(*ops.quantize_rows(dy_MN), row_M1, token_P, offsets_E))
    grads = []
    if needs_dx:
        dx_PK = ops.grouped_mm(*dy, *ops.quantize_weight_transposed(w), offsets_E, torch.bfloat16)
        grads.append(ops.unpermute_sum(dx_PK, row_M1, torch.bfloat16))
    if needs_dw:
        grads.append(weight_grads(dy, Rows(q, scale), token_P, offsets_E, "balanced", (w,)).transpose(1, 2))
    return grads


_forward_op, _backward_op = custom_op(_grouped_linear), custom_op(_grouped_linear_backward)


@register_flop_formula(torch.ops.titan_fp8moe.grouped_linear)
def _flops(x_shape, w_shape, *_: Any, **__: Any) -> int:
    """FLOPs of the GEMM, for the rows that its buffer holds."""
    E, K, N = w_shape
    return 2 * row_capacity(x_shape[0], E) * K * N


@register_flop_formula(torch.ops.titan_fp8moe.grouped_linear_backward)
def _backward_flops(dy_shape, w_shape, saved, needs_dx, needs_dw, **_: Any) -> int:
    return (needs_dx + needs_dw) * _flops(dy_shape, w_shape)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_EKN: Tensor, offs_E: Tensor) -> Tensor:
        y_MN, q, scale, *routing = _forward_op(x_MK, w_EKN, offs_E)
        # The weight itself is saved, as FSDP refills it before the backward. Its gradient alone needs the rows.
        rows = (q, scale) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(w_EKN, *rows, *routing)
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor):
        w_EKN, *saved = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        grads = _backward_op(dy_MN, w_EKN, list(saved), needs_dx, needs_dw)
        return grads[0] if needs_dx else None, grads[-1] if needs_dw else None, None
