"""The experts' activations, one entry of :data:`ACTIVATIONS` each.

An activation maps GEMM 1's output h = [g | u] to GEMM 2's operand, elementwise and in fp32. Without a gate h has one
column per hidden unit: it comes as g, u is None, and so is du. Score, quantization and the loads around it are in
:mod:`titan_fp8moe.recipe` and :mod:`titan_fp8moe.kernels.swiglu`, which are the same for all.

To add an activation, write its functions and add the entry. Nothing else changes: the tests take their activations from
the table. The functions of an entry keep four rules:

* They are functions of Triton, and :func:`_on_tensors` runs the same code on tensors, so that both give the same bits:
  an ulp can become another e4m3 code. Of ``tl`` use what torch has under the same name: sigmoid, where, abs.
* ``backward`` returns derivatives only. The backward pass recomputes the operand with ``forward``, and the compiler
  merges the subexpressions that the two share.
* Inf and NaN of g, u and dout reach the results, except where a clamp, a cap or relu bounds them in the models' code.
  The quantization marks their tiles. ``where`` keeps a NaN where ``tl.minimum`` would drop it.
* Parameters are values of a launch: another limit compiles no other kernel. The functions take all of
  :data:`MAX_PARAMETERS`.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import KernelInterface

MAX_PARAMETERS = 3


class Activation(NamedTuple):
    """The forward and the derivative of an activation, for the kernels and for the reference. Made by :meth:`of`.

    Attributes:
        forward_triton: ``(g, u, *parameters) -> out`` in Triton; kernels inline it, and so the others.
        backward_triton: ``(g, u, dout, *parameters) -> (dg, du)``.
        beyond_triton: ``(g, u, *parameters) -> (bool, bool)``, where g and u are clamped and so have no gradient; None
            for an activation without a clamp. An h that is kept in FP8 stays on its side of the clamp.
        forward, backward, beyond: the same on tensors, with the entry's parameters.
        parameters: names and defaults.
        positive: the parameters that must be greater than 0.
        gated: whether there is a u. One without has no clamp. Its ``backward_triton`` returns dg twice, since tuples
            of Triton 3.6 hold no None.
    """

    forward_triton: KernelInterface
    backward_triton: KernelInterface
    beyond_triton: KernelInterface | None
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, Tensor | None]]
    beyond: Callable[..., tuple[Tensor, Tensor]] | None
    parameters: dict[str, float]
    positive: tuple[str, ...]
    gated: bool

    @classmethod
    def of(
        cls,
        forward: KernelInterface,
        backward: KernelInterface,
        beyond: KernelInterface | None = None,
        *,
        positive: tuple[str, ...] = (),
        gated: bool = True,
        **parameters: float,
    ) -> "Activation":
        """An activation by its functions of Triton, and its ``parameters`` with their defaults."""
        both = _on_tensors(backward)
        plain = both if gated else lambda *args: (both(*args)[0], None)
        sides = None if beyond is None else _on_tensors(beyond)
        return cls(forward, backward, beyond, _on_tensors(forward), plain, sides, parameters, positive, gated)


def _on_tensors(function: Any) -> Callable[..., Any]:
    """A function of Triton as one of tensors: the same code, with torch in the place of ``tl``. Its last arguments, the
    parameters, may be left out."""
    code, names = function.fn.__code__, function.fn.__globals__
    called = {name: _on_tensors(names[name]) for name in code.co_names if hasattr(names.get(name), "fn")}
    defaults = (0.0,) * min(MAX_PARAMETERS, code.co_argcount)
    plain = {"tl": torch, "__builtins__": names["__builtins__"], **called}  # torch.compile looks for the second
    return FunctionType(code, plain, code.co_name, defaults)


# --- swiglu: silu(g) * u, with silu(g) = g * sigmoid(g) ---------------------------------------------------------------


@triton.jit
def _swiglu(g, u, _0, _1, _2):
    return g * tl.sigmoid(g) * u


@triton.jit
def _swiglu_backward(g, u, dout, _0, _1, _2):
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    return dout * u * (sigmoid * (1 + g * (1 - sigmoid))), dout * silu


# --- clamped_swiglu: g sigmoid(alpha g) * (u + offset), g at most the limit and u within it ---------------------------
#
# DeepSeek-V4 and GLM-5.3-Flash clamp at 10 with alpha 1 and no offset; gpt-oss and MiniMax-M3 at 7 with alpha 1.702 and
# offset 1. As in their code (torch.clamp), a value at the limit has a gradient and one beyond it has none.


@triton.jit
def _clamp(g, u, limit):
    u = tl.where(u > limit, limit, u)
    return tl.where(g > limit, limit, g), tl.where(u < -limit, -limit, u)


@triton.jit
def _clamped_swiglu(g, u, limit, alpha, offset):
    g, u = _clamp(g, u, limit)
    return g * tl.sigmoid(alpha * g) * (u + offset)


@triton.jit
def _clamped_swiglu_backward(g, u, dout, limit, alpha, offset):
    beyond_g, beyond_u = _beyond_limit(g, u, limit, alpha, offset)
    g, u = _clamp(g, u, limit)
    sigmoid = tl.sigmoid(alpha * g)
    dg, du = dout * (u + offset) * (sigmoid * (1 + alpha * g * (1 - sigmoid))), dout * (g * sigmoid)
    return tl.where(beyond_g, 0.0, dg), tl.where(beyond_u, 0.0, du)


@triton.jit
def _beyond_limit(g, u, limit, _1, _2):
    return g > limit, tl.abs(u) > limit


# --- geglu_tanh: GELU(g) * u, GELU by its tanh approximation ----------------------------------------------------------
#
# 0.5 g (1 + tanh(z)) = g sigmoid(2 z), with z = sqrt(2 / pi) (g + 0.044715 g^3). The constants are 2 sqrt(2 / pi),
# 0.044715 and three times that.


@triton.jit
def _geglu_tanh(g, u, _0, _1, _2):
    return g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * (g * g * g))) * u


@triton.jit
def _geglu_tanh_backward(g, u, dout, _0, _1, _2):
    sigmoid = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * (g * g * g)))
    slope = 1.5957691216057308 * (1 + 0.134145 * (g * g))
    return dout * u * (sigmoid * (1 + g * (1 - sigmoid) * slope)), dout * (g * sigmoid)


# --- softcapped_swiglu: cap(g) * sigmoid(g) * cap(u), with cap(x) = limit * tanh(x / limit) ---------------------------
#
# Inkling 2's, whose sigmoid sees the raw gate. 2 sigmoid(2 x) - 1 cancels near 0, where tanh is a series.


@triton.jit
def _tanh(x):
    square = x * x
    series = x * (1 - square * (0.33333334 - square * (0.13333334 - square * 0.053968254)))
    return tl.where(tl.abs(x) < 0.15, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _softcapped_swiglu(g, u, gate_cap, up_cap, _2):
    return gate_cap * _tanh(g / gate_cap) * tl.sigmoid(g) * (up_cap * _tanh(u / up_cap))


@triton.jit
def _softcapped_swiglu_backward(g, u, dout, gate_cap, up_cap, _2):
    g_tanh, u_tanh, sigmoid = _tanh(g / gate_cap), _tanh(u / up_cap), tl.sigmoid(g)
    gate, up = gate_cap * g_tanh, up_cap * u_tanh
    dg = dout * up * (sigmoid * (1 - g_tanh * g_tanh + gate * (1 - sigmoid)))
    return dg, dout * (gate * sigmoid) * (1 - u_tanh * u_tanh)


# --- relu2: relu(h)^2, without a gate ---------------------------------------------------------------------------------
#
# Nemotron-3's. As torch.relu has it, an h of 0 has no gradient.


@triton.jit
def _relu2(h, _u, _0, _1, _2):
    relu = tl.where(h < 0, 0.0, h)
    return relu * relu


@triton.jit
def _relu2_backward(h, _u, dout, _0, _1, _2):
    dh = tl.where(h <= 0, 0.0, dout * (2 * h))
    return dh, dh


# ----------------------------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation.of(_swiglu, _swiglu_backward),
    "clamped_swiglu": Activation.of(
        _clamped_swiglu, _clamped_swiglu_backward, _beyond_limit, positive=("limit",), limit=10.0, alpha=1.0, offset=0.0
    ),
    "geglu_tanh": Activation.of(_geglu_tanh, _geglu_tanh_backward),
    "softcapped_swiglu": Activation.of(
        _softcapped_swiglu, _softcapped_swiglu_backward, positive=("gate_cap", "up_cap"), gate_cap=7.0, up_cap=7.0
    ),
    "relu2": Activation.of(_relu2, _relu2_backward, gated=False),
}
