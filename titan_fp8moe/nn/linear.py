"""A linear as a module for any model."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titan_fp8moe.config import CACHE, Fp8FlowMoEConfig, require_config
from titan_fp8moe.layer.group import linear
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.nn.modules import GATHER, add_cache, cache_of, check_dtype, is_replicated
from titan_fp8moe.recipe import BLOCK


class Fp8FlowLinear(nn.Linear):
    """``nn.Linear`` without a bias in FP8, whose dims are multiples of 128 on every rank.

    Large projections gain, small ones lose to the two casts. Under tensor parallelism the weight is a DTensor, and so
    are input and output, placed as ``nn.Linear``'s would be.

    Args:
        in_features, out_features: K and N, multiples of 128.
        config: the recipe's settings, of which ``wgrad`` and ``cache_weights`` apply; by default
            ``Fp8FlowMoEConfig()``.

    Raises:
        ValueError: for a dtype that is not bf16 or fp32, or a setting without effect here; its forward, for other dims.
    """

    config: Fp8FlowMoEConfig
    cache: WeightCache
    nan_flags: Tensor | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: Fp8FlowMoEConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)
        check_dtype(self.weight.dtype)
        self.config = Fp8FlowMoEConfig() if config is None else config
        require_config(self.config, "Fp8FlowLinear", "wgrad", *CACHE)
        add_cache(self)

    @staticmethod
    def convert(module: nn.Linear, config: Fp8FlowMoEConfig) -> None:
        """Turns a linear into this class in place; its parameter stays.

        Raises:
            ValueError: for a subclass of ``nn.Linear``, a bias, or other dims and dtypes.
        """
        if (reason := Fp8FlowLinear.why_not(module)) is not None:
            raise ValueError(f"only {reason} can be Fp8FlowLinear, not {module}")
        module.__class__ = Fp8FlowLinear
        cast(Fp8FlowLinear, module).config = config
        add_cache(module)

    @staticmethod
    def why_not(module: nn.Linear) -> str | None:
        """A linear that :meth:`convert` takes, if it does not take this one."""
        if type(module) is not nn.Linear or module.bias is not None:
            return "an nn.Linear without a bias"
        if module.in_features % BLOCK or module.out_features % BLOCK:
            return f"a linear with dims that are multiples of {BLOCK}"
        return None if module.weight.dtype in (torch.bfloat16, torch.float32) else "a linear in bf16 or fp32"

    def fp8_matrices(self) -> list[str]:
        return ["weight"]

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the dtype of ``input`` or autocast's."""
        x, w, frozen = input, self.weight, not self.weight.requires_grad
        cache = cache_of(self, frozen)
        if not isinstance(w, DTensor):
            return linear(x, w, self.config, cache, self.nan_flags, frozen)
        if not isinstance(x, DTensor):
            raise RuntimeError(f"the weight of Fp8FlowLinear is a DTensor, but its input is none; {GATHER}")
        given, w_grad, x_grad, result = _linear_placements(w, x)
        whole = torch.empty(*x.shape[:-1], w.shape[0], dtype=x.dtype, device="meta")  # ranks may have unequal parts
        x = x.redistribute(placements=given).to_local(grad_placements=x_grad)
        out = linear(x, w.to_local(grad_placements=w_grad), self.config, cache, self.nan_flags, frozen)
        return DTensor.from_local(out, w.device_mesh, result, run_check=False, shape=whole.shape, stride=whole.stride())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config.describe()}"


def _linear_placements(w: DTensor, x: DTensor) -> tuple[Sequence[Placement], ...]:
    """Placements of a linear's input, of the gradients of weight and input, and of the output, as ``nn.Linear``'s."""
    features, replicated = Shard(x.ndim - 1), Replicate()
    if w.placements == (Shard(0),):
        return (replicated,), w.placements, (Partial(),), (features,)
    if w.placements == (Shard(1),):
        return (features,), w.placements, (features,), (Partial(),)
    if not is_replicated(w):
        raise ValueError(f"Fp8FlowLinear takes a weight that is replicated or sharded over one dim, not {w.placements}")
    tokens = [p if isinstance(p, Shard) and p != features else replicated for p in x.placements]
    return tokens, [replicated if p == replicated else Partial() for p in tokens], tokens, tokens
