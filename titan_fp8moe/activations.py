"""The experts' activations, one entry of :data:`ACTIVATIONS` each.

An activation maps GEMM 1's output h = [g | u] to GEMM 2's operand, elementwise and in fp32. Without a gate h has one
column per hidden unit: it comes as g, u is None, and so is du. Score, quantization and the loads around it are in
:mod:`titan_fp8moe.recipe` and :mod:`titan_fp8moe.kernels.swiglu`, which are the same for all.

To add an activation, write its functions and add the entry. Nothing else changes: the tests take their activations from
the table. The functions of an entry keep four rules:

* PyTorch and Triton do the same operations in the same order, so that both give the same bits. An ulp can become
  another e4m3 code. Spell out what PyTorch has in one function: ``g * torch.sigmoid(g)``, not ``F.silu(g)``.
* ``backward`` returns derivatives only. The backward pass recomputes the operand with ``forward``, and the compiler
  merges the subexpressions that the two share.
* Inf and NaN of g, u and dout reach the results, except where a clamp, a cap or relu bounds them in the models' code.
  The quantization marks their tiles. ``torch.where`` keeps a NaN where ``tl.minimum`` would drop it.
* Parameters are values of a launch: another limit compiles no other kernel. Functions of Triton take all of
  :data:`MAX_PARAMETERS`, functions of PyTorch those of the entry.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import KernelInterface

MAX_PARAMETERS = 3


class Activation(NamedTuple):
    """The forward and the derivative of an activation, for the reference and for the kernels.

    Attributes:
        forward: ``(g, u, *parameters) -> out`` in PyTorch.
        backward: ``(g, u, dout, *parameters) -> (dg, du)`` in PyTorch.
        forward_triton, backward_triton: the same two in Triton; kernels inline them.
        parameters: names and defaults.
        positive: the parameters that must be greater than 0.
        beyond, beyond_triton: ``(g, u, *parameters) -> (bool, bool)``, where g and u are clamped and so have no
            gradient; None for an activation without a clamp. An h that is kept in FP8 stays on its side of the clamp.
        gated: whether there is a u. One without has no clamp. Its ``backward_triton`` returns dg twice, since tuples
            of Triton 3.6 hold no None.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, Tensor | None]]
    forward_triton: KernelInterface
    backward_triton: KernelInterface
    parameters: dict[str, float] = {}  # noqa: RUF012  NamedTuple's defaults are never written
    positive: tuple[str, ...] = ()
    beyond: Callable[..., tuple[Tensor, Tensor]] | None = None
    beyond_triton: KernelInterface | None = None
    gated: bool = True


# --- swiglu: silu(g) * u, with silu(g) = g * sigmoid(g) ---------------------------------------------------------------


def _swiglu(g: Tensor, u: Tensor) -> Tensor:
    return g * torch.sigmoid(g) * u


def _swiglu_backward(g: Tensor, u: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(g)
    silu = g * sigmoid
    return dout * u * (sigmoid * (1 + g * (1 - sigmoid))), dout * silu


@triton.jit
def _swiglu_triton(g, u, _0, _1, _2):
    return g * tl.sigmoid(g) * u


@triton.jit
def _swiglu_backward_triton(g, u, dout, _0, _1, _2):
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    return dout * u * (sigmoid * (1 + g * (1 - sigmoid))), dout * silu


# --- clamped_swiglu: g sigmoid(alpha g) * (u + offset), g at most the limit and u within it ---------------------------
#
# DeepSeek-V4 and GLM-5.3-Flash clamp at 10 with alpha 1 and no offset; gpt-oss and MiniMax-M3 at 7 with alpha 1.702 and
# offset 1. As in their code (torch.clamp), a value at the limit has a gradient and one beyond it has none.


def _clamp(g: Tensor, u: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    u = torch.where(u > limit, limit, u)
    return torch.where(g > limit, limit, g), torch.where(u < -limit, -limit, u)


def _clamped_swiglu(g: Tensor, u: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    g, u = _clamp(g, u, limit)
    return g * torch.sigmoid(alpha * g) * (u + offset)


def _clamped_swiglu_backward(
    g: Tensor, u: Tensor, dout: Tensor, limit: float, alpha: float, offset: float
) -> tuple[Tensor, Tensor]:
    beyond_g, beyond_u = _beyond_limit(g, u, limit, alpha, offset)
    g, u = _clamp(g, u, limit)
    sigmoid = torch.sigmoid(alpha * g)
    dg, du = dout * (u + offset) * (sigmoid * (1 + alpha * g * (1 - sigmoid))), dout * (g * sigmoid)
    return torch.where(beyond_g, 0.0, dg), torch.where(beyond_u, 0.0, du)


def _beyond_limit(g: Tensor, u: Tensor, limit: float, alpha: float, offset: float) -> tuple[Tensor, Tensor]:
    return g > limit, u.abs() > limit


@triton.jit
def _clamp_triton(g, u, limit):
    u = tl.where(u > limit, limit, u)
    return tl.where(g > limit, limit, g), tl.where(u < -limit, -limit, u)


@triton.jit
def _clamped_swiglu_triton(g, u, limit, alpha, offset):
    g, u = _clamp_triton(g, u, limit)
    return g * tl.sigmoid(alpha * g) * (u + offset)


@triton.jit
def _clamped_swiglu_backward_triton(g, u, dout, limit, alpha, offset):
    beyond_g, beyond_u = _beyond_limit_triton(g, u, limit, alpha, offset)
    g, u = _clamp_triton(g, u, limit)
    sigmoid = tl.sigmoid(alpha * g)
    dg, du = dout * (u + offset) * (sigmoid * (1 + alpha * g * (1 - sigmoid))), dout * (g * sigmoid)
    return tl.where(beyond_g, 0.0, dg), tl.where(beyond_u, 0.0, du)


@triton.jit
def _beyond_limit_triton(g, u, limit, _1, _2):
    return g > limit, tl.abs(u) > limit


# --- geglu_tanh: GELU(g) * u, GELU by its tanh approximation ----------------------------------------------------------
#
# 0.5 g (1 + tanh(z)) = g sigmoid(2 z), with z = sqrt(2 / pi) (g + 0.044715 g^3). The constants are 2 sqrt(2 / pi),
# 0.044715 and three times that.


def _geglu_tanh(g: Tensor, u: Tensor) -> Tensor:
    return g * torch.sigmoid(1.5957691216057308 * (g + 0.044715 * (g * g * g))) * u


def _geglu_tanh_backward(g: Tensor, u: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(1.5957691216057308 * (g + 0.044715 * (g * g * g)))
    slope = 1.5957691216057308 * (1 + 0.134145 * (g * g))
    return dout * u * (sigmoid * (1 + g * (1 - sigmoid) * slope)), dout * (g * sigmoid)


@triton.jit
def _geglu_tanh_triton(g, u, _0, _1, _2):
    return g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * (g * g * g))) * u


@triton.jit
def _geglu_tanh_backward_triton(g, u, dout, _0, _1, _2):
    sigmoid = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * (g * g * g)))
    slope = 1.5957691216057308 * (1 + 0.134145 * (g * g))
    return dout * u * (sigmoid * (1 + g * (1 - sigmoid) * slope)), dout * (g * sigmoid)


# --- softcapped_swiglu: cap(g) * sigmoid(g) * cap(u), with cap(x) = limit * tanh(x / limit) ---------------------------
#
# Inkling 2's, whose sigmoid sees the raw gate. 2 sigmoid(2 x) - 1 cancels near 0, where tanh is a series.


def _tanh(x: Tensor) -> Tensor:
    square = x * x
    series = x * (1 - square * (0.33333334 - square * (0.13333334 - square * 0.053968254)))
    return torch.where(x.abs() < 0.15, series, 2 * torch.sigmoid(2 * x) - 1)


def _softcapped_swiglu(g: Tensor, u: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    return gate_cap * _tanh(g / gate_cap) * torch.sigmoid(g) * (up_cap * _tanh(u / up_cap))


def _softcapped_swiglu_backward(
    g: Tensor, u: Tensor, dout: Tensor, gate_cap: float, up_cap: float
) -> tuple[Tensor, Tensor]:
    g_tanh, u_tanh, sigmoid = _tanh(g / gate_cap), _tanh(u / up_cap), torch.sigmoid(g)
    gate, up = gate_cap * g_tanh, up_cap * u_tanh
    dg = dout * up * (sigmoid * (1 - g_tanh * g_tanh + gate * (1 - sigmoid)))
    return dg, dout * (gate * sigmoid) * (1 - u_tanh * u_tanh)


@triton.jit
def _tanh_triton(x):
    square = x * x
    series = x * (1 - square * (0.33333334 - square * (0.13333334 - square * 0.053968254)))
    return tl.where(tl.abs(x) < 0.15, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _softcapped_swiglu_triton(g, u, gate_cap, up_cap, _2):
    return gate_cap * _tanh_triton(g / gate_cap) * tl.sigmoid(g) * (up_cap * _tanh_triton(u / up_cap))


@triton.jit
def _softcapped_swiglu_backward_triton(g, u, dout, gate_cap, up_cap, _2):
    g_tanh, u_tanh, sigmoid = _tanh_triton(g / gate_cap), _tanh_triton(u / up_cap), tl.sigmoid(g)
    gate, up = gate_cap * g_tanh, up_cap * u_tanh
    dg = dout * up * (sigmoid * (1 - g_tanh * g_tanh + gate * (1 - sigmoid)))
    return dg, dout * (gate * sigmoid) * (1 - u_tanh * u_tanh)


# --- relu2: relu(h)^2, without a gate ---------------------------------------------------------------------------------
#
# Nemotron-3's. As torch.relu has it, an h of 0 has no gradient.


def _relu2(h: Tensor, _: None) -> Tensor:
    relu = torch.where(h < 0, 0.0, h)
    return relu * relu


def _relu2_backward(h: Tensor, _: None, dout: Tensor) -> tuple[Tensor, None]:
    return torch.where(h <= 0, 0.0, dout * (2 * h)), None


@triton.jit
def _relu2_triton(h, _u, _0, _1, _2):
    relu = tl.where(h < 0, 0.0, h)
    return relu * relu


@triton.jit
def _relu2_backward_triton(h, _u, dout, _0, _1, _2):
    dh = tl.where(h <= 0, 0.0, dout * (2 * h))
    return dh, dh


# ----------------------------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(_swiglu, _swiglu_backward, _swiglu_triton, _swiglu_backward_triton),
    "clamped_swiglu": Activation(
        _clamped_swiglu,
        _clamped_swiglu_backward,
        _clamped_swiglu_triton,
        _clamped_swiglu_backward_triton,
        parameters=dict(limit=10.0, alpha=1.0, offset=0.0),
        positive=("limit",),
        beyond=_beyond_limit,
        beyond_triton=_beyond_limit_triton,
    ),
    "geglu_tanh": Activation(_geglu_tanh, _geglu_tanh_backward, _geglu_tanh_triton, _geglu_tanh_backward_triton),
    "softcapped_swiglu": Activation(
        _softcapped_swiglu,
        _softcapped_swiglu_backward,
        _softcapped_swiglu_triton,
        _softcapped_swiglu_backward_triton,
        parameters=dict(gate_cap=7.0, up_cap=7.0),
        positive=("gate_cap", "up_cap"),
    ),
    "relu2": Activation(_relu2, _relu2_backward, _relu2_triton, _relu2_backward_triton, gated=False),
}
