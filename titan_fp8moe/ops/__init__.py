"""Custom ops of the FP8 data flow, one family per file, in the namespace ``torch.ops.titan_fp8moe``.

The functions exported here run the op, or its implementation directly when nobody traces (:func:`backend.custom_op`).
On a GPU an op runs its Triton kernel, elsewhere its reference, most often of :mod:`titan_fp8moe.recipe`, which has the
documentation: shapes, layouts, errors. torch.compile traces a fake.

No op has a gradient, because autograd would cast the gradient of an FP8 tensor to FP8. The layer's autograd functions
(:mod:`titan_fp8moe.layer.experts`) call them. DTensors never reach them: the modules pass local tensors.
"""

from titan_fp8moe.ops.all_to_all import start_all_to_all, wait
from titan_fp8moe.ops.backend import emulate
from titan_fp8moe.ops.grouped_mm import grouped_mm, grouped_mm_wgrad
from titan_fp8moe.ops.lora import low_rank, low_rank_grads
from titan_fp8moe.ops.permute import (
    dispatch_routing,
    expert_routing,
    pack_combine,
    pack_dispatch,
    permute_rows,
    unpermute_gradients,
    unpermute_sum,
)
from titan_fp8moe.ops.quantize import (
    Fp8Weight,
    PaddedAsOne,
    after,
    dequantize_rows,
    quantize_group,
    quantize_rows,
    quantize_weight,
    quantize_weight_both,
    quantize_weight_transposed,
    refresh_weight,
    scale_exponents,
)
from titan_fp8moe.ops.swiglu import swiglu_quantize, swiglu_quantize_backward
from titan_fp8moe.ops.transpose import transpose_pair
from titan_fp8moe.recipe import unpack_combine, unpack_dispatch
