"""Custom ops of the FP8 data flow, one family per file, in the namespace ``torch.ops.titan_fp8moe``.

What is exported here calls the op, or its function where nobody traces or watches (:func:`backend.custom_op`). Each op
runs its Triton kernel on a GPU and :mod:`titan_fp8moe.recipe` elsewhere, and has a fake for torch.compile. None
has a gradient of its own: they are called inside the layer's autograd functions (:mod:`titan_fp8moe.moe`), because
autograd would cast the gradient of an fp8 tensor to fp8. DTensors do not reach them; the modules pass local tensors.
"""

from titan_fp8moe.ops.all_to_all import start_all_to_all, wait
from titan_fp8moe.ops.backend import emulate
from titan_fp8moe.ops.grouped_mm import grouped_mm, grouped_mm_wgrad
from titan_fp8moe.ops.permute import (
    arrival_layout,
    dispatch_layout,
    expert_layout,
    pack_combine,
    pack_dispatch,
    permute_rows,
    unpack_combine,
    unpack_dispatch,
    unpermute_gradients,
    unpermute_sum,
)
from titan_fp8moe.ops.quantize import (
    QuantizedWeight,
    quantize_rows,
    quantize_weight,
    quantize_weight_both,
    quantize_weight_transposed,
)
from titan_fp8moe.ops.swiglu import swiglu_quantize, swiglu_quantize_backward
from titan_fp8moe.ops.transpose import transpose_pair

__all__ = [
    "QuantizedWeight",
    "arrival_layout",
    "dispatch_layout",
    "emulate",
    "expert_layout",
    "grouped_mm",
    "grouped_mm_wgrad",
    "pack_combine",
    "pack_dispatch",
    "permute_rows",
    "quantize_rows",
    "quantize_weight",
    "quantize_weight_both",
    "quantize_weight_transposed",
    "start_all_to_all",
    "swiglu_quantize",
    "swiglu_quantize_backward",
    "transpose_pair",
    "unpack_combine",
    "unpack_dispatch",
    "unpermute_gradients",
    "unpermute_sum",
    "wait",
]
