"""GEMMs over expert groups: picks the kernels in Gluon on Hopper, and those in plain Triton elsewhere.

========================  ==============  ==============================
GEMM                      Hopper (sm_90)  other GPUs, Triton interpreter
========================  ==============  ==============================
:func:`grouped_mm`        ``forward``     ``portable``
:func:`grouped_mm_wgrad`  ``wgrad``       ``portable``
========================  ==============  ==============================

The tensor cores sum the products of a block of 128 with about 14 bits. Blocks are summed in fp32. The functions here
allocate results, and the modules launch kernels that fill them.
"""

import functools

import torch
import triton
from torch import Tensor

from titan_fp8moe.kernels.gemm import forward, portable, wgrad
from titan_fp8moe.kernels.launch import is_recording, is_tracing
from titan_fp8moe.recipe import WGRAD_LAYOUTS, check_wgrad


def is_hopper(x: Tensor) -> bool:
    """Whether the Hopper kernels run on ``x``'s device. They do not with ``TRITON_INTERPRET=1``: Gluon has no
    interpreter."""
    return (x.is_cuda and _is_hopper(x.get_device())) or (is_recording() and not triton.knobs.runtime.interpret)


# Cached, because every GEMM asks and torch looks the device up each time.
@functools.cache
def _is_hopper(device: int) -> bool:
    if triton.knobs.runtime.interpret or device >= torch.cuda.device_count():  # a fake tensor's device need not exist
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def grouped_mm(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype, columns=None):
    """Kernel of :func:`titan_fp8moe.ops.grouped_mm`. Rows of a may be strided, b is contiguous; scales may have any
    strides, and those of a are fast when column-major. TMA drops columns at and past ``columns``."""
    out = torch.empty(a_MK.shape[0], columns or b_ENK.shape[1], dtype=out_dtype, device=a_MK.device)
    launch = _nothing if is_tracing(a_MK) else (forward if is_hopper(a_MK) else portable).launch_forward
    launch(a_MK, a_scale, b_ENK, b_scale, offsets_E, out)
    return out


def grouped_mm_wgrad(
    aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out_dtype, parts=1, rows=None, columns=None, layout="apart"
):
    """Kernel of :func:`titan_fp8moe.ops.grouped_mm_wgrad`. Rows of both operands, and scales, may be strided.

    One launch fills the matrices of all parts if none of their rows is padding. Otherwise each part has a launch, which
    fills its matrices in place: the descriptor has a dim for the experts, so TMA drops the rows past an expert's last.
    """
    launch = _nothing if is_tracing(aT_NM) else (wgrad if is_hopper(aT_NM) else portable).launch_wgrad
    a, a_scale, b, b_scale = aT_NM, aT_scale, bT_KM, bT_scale
    N, K, E, device = a.shape[0], b.shape[0], offsets_E.shape[0], a.device
    rows, columns = check_wgrad(N, K, out_dtype, parts, rows, columns)
    if layout == "transposed" and parts == 1:
        (a, a_scale, b, b_scale), (N, rows, columns), layout = (b, b_scale, a, a_scale), (K, columns, rows), "joined"
    if rows * parts == N and (layout == "apart" or parts == 1):
        out = torch.empty(parts * E, rows, columns, dtype=out_dtype, device=device)
        launch(a, a_scale, b, b_scale, offsets_E, out, parts)
        return out
    axis = WGRAD_LAYOUTS.index(layout)  # along which the parts follow each other
    shape = [E, columns, rows] if layout == "transposed" else [E, rows, columns]
    of_parts = torch.empty(*shape[:axis], parts, *shape[axis:], dtype=out_dtype, device=device)
    shape[axis] *= parts
    for part, part_scale, result in zip(a.chunk(parts), a_scale.chunk(parts), of_parts.unbind(axis), strict=True):
        pair = (b, b_scale, part, part_scale) if layout == "transposed" else (part, part_scale, b, b_scale)
        launch(*pair, offsets_E, result, None)
    return of_parts.view(shape)


def _nothing(*_: object) -> None:
    """In the place of a launch where PyTorch traces: TMA descriptors need addresses."""
