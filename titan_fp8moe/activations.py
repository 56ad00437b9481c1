"""The experts' activations, one entry of :data:`ACTIVATIONS` each.

An activation maps GEMM 1's output h = [g | u] to GEMM 2's operand, elementwise and in fp32. Score, quantization and the
loads around it are in :mod:`titan_fp8moe.recipe` and :mod:`titan_fp8moe.kernels.swiglu`, which are the same for all.

To add an activation, write its four functions and add the entry. Nothing else changes: the tests take their activations
from the table. The functions of an entry keep three rules:

* PyTorch and Triton do the same operations in the same order, so that both give the same bits. One ulp can change the
  e4m3 code. Spell out fused functions of PyTorch: ``g * torch.sigmoid(g)``, not ``F.silu(g)``.
* ``backward`` returns derivatives only: the backward pass recomputes the operand with ``forward``. Both write what they
  share as the same expression, so that the compiler computes it once.
* Inf and NaN of g, u and dout reach the results, since the quantization marks their tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import KernelInterface


class Activation(NamedTuple):
    """The forward and the derivative of an activation, for the reference and for the kernels.

    Attributes:
        forward: ``(g, u) -> out`` in PyTorch.
        backward: ``(g, u, dout) -> (dg, du)`` in PyTorch.
        forward_triton, backward_triton: the same two in Triton; kernels inline them.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    forward_triton: KernelInterface
    backward_triton: KernelInterface


# --- swiglu: silu(g) * u, with silu(g) = g * sigmoid(g) ---------------------------------------------------------------


def _swiglu(g: Tensor, u: Tensor) -> Tensor:
    return g * torch.sigmoid(g) * u


def _swiglu_backward(g: Tensor, u: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(g)
    silu = g * sigmoid
    return dout * u * (sigmoid * (1 + g * (1 - sigmoid))), dout * silu


@triton.jit
def _swiglu_triton(g, u):
    return g * tl.sigmoid(g) * u


@triton.jit
def _swiglu_backward_triton(g, u, dout):
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    return dout * u * (sigmoid * (1 + g * (1 - sigmoid))), dout * silu


# ----------------------------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(_swiglu, _swiglu_backward, _swiglu_triton, _swiglu_backward_triton),
}
