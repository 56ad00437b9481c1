"""Low-rank adapters (LoRA) of a module of experts; :mod:`titan_fp8moe.layer.lora` computes with them."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_fp8moe.layer.lora import Adapter, Lora
from titan_fp8moe.nn.parallel import local_of, sharded_by_fsdp, spread, uniform_by_expert_
from titan_fp8moe.ops import Fp8Weight


class AddsLora(nn.Module):
    """Mixin of experts with parameters w1, w2 and, if they have a gate, w3, or with weights stored in FP8.

    Attributes:
        lora_A, lora_B: ``nn.ParameterDict`` by the weights' names. A weight (num_experts, N, K) has A (num_experts,
            rank, K) and B (num_experts, N, rank); their names in a state dict are ``lora_A.w1`` and so on.
        lora_scale: alpha / rank; None without adapters.
    """

    ep_group: dist.ProcessGroup | None
    lora_scale: float | None = None

    def add_lora(
        self, rank: int, alpha: float, *, weights: Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Freezes the experts, and adds an adapter to each of their ``weights``: W + alpha / rank * B A.

        Adapters run in bf16 beside the FP8 weights. A is drawn as ``nn.Linear``'s weight and B is zero, so the output
        is unchanged. Call it before ``fully_shard`` and before the optimizer is made. A state dict does not hold alpha:
        before you load one, add adapters with the same.

        Args:
            weights: names, by default of all weights that the experts have.
            rank: of each adapter, usually 4 to 64; products pad it to a multiple of 16.
            dtype: of the adapters, bf16 or fp32; by default the weights', or bf16. Gradients and optimizer states
                follow it.

        Raises:
            KeyError: for another name.
            RuntimeError: for experts that have adapters or that FSDP has sharded, and for experts stored in FP8 on
                several ranks.
        """
        present = self.adaptable()
        w1, chosen = present["w1"], present if weights is None else {name: present[name] for name in weights}
        if self.lora_scale is not None:
            raise RuntimeError("these experts have adapters already; call merge_lora() first, or make new experts")
        stored = isinstance(w1, Fp8Weight)
        if stored and self.ep_group is not None:
            raise RuntimeError(
                "experts stored in FP8 take adapters in one process only; over ep_group give routed_experts(lora=) "
                "the rank's, or adapt bf16 RoutedExperts"
            )
        if sharded_by_fsdp(w1, self.ep_group):
            raise RuntimeError("FSDP has sharded these experts; call add_lora before fully_shard")
        dtype = dtype or (torch.bfloat16 if stored else w1.dtype)
        self.requires_grad_(False)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for name, weight in chosen.items():
            E, N, K = local_of(weight).shape
            for factors, shape in ((self.lora_A, (E, rank, K)), (self.lora_B, (E, N, rank))):
                factor = torch.empty(shape, dtype=dtype, device=weight.device)
                if isinstance(weight, DTensor):
                    factor = spread(factor, weight.device_mesh)
                factors[name] = nn.Parameter(factor)
        self.lora_scale = alpha / rank
        self.reset_lora_parameters()

    def adaptable(self) -> dict[str, Any]:
        """The weights that adapters may have, by the names of :class:`Lora`."""
        return {name: weight for name in Lora._fields if (weight := getattr(self, name)) is not None}

    def reset_lora_parameters(self) -> None:
        """Draws A and sets B to zero. One seed draws the same adapters for any number of ranks."""
        for name, A in self.lora_A.items():
            if not A.is_meta:
                uniform_by_expert_([A], [A.shape[2] ** -0.5], spread=self.ep_group is not None)
                nn.init.zeros_(self.lora_B[name])

    @torch.no_grad()
    def merge_lora(self) -> None:
        """Adds the adapters to the weights, each sum rounded once to the weight's dtype, and removes them. The weights
        stay frozen.

        The merged experts are quantized as a whole, and a step of e4m3 is 6 to 12% of a value. FP8 layers then round
        most of an adapter away that changes the weights by about 1%. Merge for bf16 inference or for a checkpoint;
        train and evaluate in FP8 with the adapters beside.
        """
        if isinstance(self.adaptable()["w1"], Fp8Weight):
            raise RuntimeError(
                "these experts are stored in FP8, which would round most of the adapters away; keep them beside, or "
                "load Fp8Weight.dequantize() into RoutedExperts and merge there"
            )
        if isinstance(self, FSDPModule):
            self.reshard()  # a forward may have left whole copies, of which FSDP would forget the change
        for name, A in self.lora_A.items():
            weight, A, B = (local_of(t) for t in (getattr(self, name), A, self.lora_B[name]))
            for w, a, b in zip(weight, A, B, strict=True):  # an expert at a time, for memory
                w.copy_(torch.addmm(w.float(), b.float(), a.float(), alpha=cast(float, self.lora_scale)))
        del self.lora_A, self.lora_B
        self.lora_scale = None

    def lora(self) -> Lora | None:
        """The adapters of this rank's experts."""
        if self.lora_scale is None:
            return None
        pairs = {name: (local_of(A), local_of(self.lora_B[name])) for name, A in self.lora_A.items()}
        return Lora(**{name: Adapter(*pair, self.lora_scale) for name, pair in pairs.items()})
