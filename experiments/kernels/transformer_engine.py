"""The routed part of a MoE layer, forward and backward, next to TransformerEngine's FP8 with scales of 128-blocks.

    LD_PRELOAD=CUBLAS/libcublasLt.so.13:CUBLAS/libcublas.so.13 \\
        python -m experiments.kernels.transformer_engine --out experiments/kernels/results.json

TransformerEngine runs ``moe_permute_and_pad_with_probs``, ``GroupedLinear`` of gate and up as one, SwiGLU times the
scores, ``GroupedLinear`` and ``moe_unpermute``, under ``autocast`` with ``Float8BlockScaling``. By default it pads
groups to 16 rows, on the native path to 128.

Each microbatch quantizes the weights, TransformerEngine's once and ours in each direction. In further records four
microbatches share them, in two layouts as ours with ``cache_weights``: TransformerEngine gets ``is_first_microbatch``.
``gpu_busy`` is the time in which some kernel runs, of one profiled step.

TransformerEngine is not among this project's requirements. Its extension compiles against CUDA, cuDNN and NCCL headers:

    pip install --no-deps --no-build-isolation transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 \\
        transformer-engine-torch==2.20.2
    pip install pydantic==2.14.4 importlib-metadata==10.2.0

The native path needs cuBLAS 13.6, and torch 2.11 brings 13.1. ``LD_PRELOAD`` names 13.8.2's libraries, since torch's
own RPATH precedes ``LD_LIBRARY_PATH``. Both sides run with it.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor

from experiments.kernels.problem import BF16, UNIT, Problem, Step, layer_of, require_same
from experiments.records import measure_each
from experiments.timing import BACK_TO_BACK, busy_ms, median_ms, state_records

SHAPES = (("16B", 16384), ("16B", 6144))  # the native path takes at most 64 experts
OURS, NAME = "ours", "routed_experts_te"
PEERS = {  # options of Layer
    "TransformerEngine": dict(native=False, one_weight=False),
    "TransformerEngine, native": dict(native=True, one_weight=False),
    "TransformerEngine, one weight": dict(native=True, one_weight=True),
}
MICROBATCHES, KEPT, GPU_BUSY = 4, ", weights kept for 4 microbatches", "GPU busy"


class ScaledSwiGLU(torch.autograd.Function):
    """The kernels of TransformerEngine's ``ops.ScaledSwiGLU`` without the host time of its operation fuser."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, scores: Tensor) -> Tensor:
        import transformer_engine_torch as tex

        ctx.save_for_backward(h, scores)
        return tex.scaled_swiglu(h, scores, None, 0)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        import transformer_engine_torch as tex

        return tex.scaled_dswiglu(dout.contiguous(), *ctx.saved_tensors, None, 0, True)


class Layer:
    """TransformerEngine's routed experts on a problem's inputs."""

    def __init__(self, problem: Problem, native: bool, one_weight: bool):
        import transformer_engine.pytorch as engine
        from transformer_engine.common.recipe import Float8BlockScaling

        os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"  # else the experimental option is ignored
        self.problem, self.native, self.engine, self.recipe = problem, native, engine, Float8BlockScaling()
        zeros_TE = torch.zeros(len(problem.x), problem.sizes.E, device=problem.x.device)
        self.scores_TE = zeros_TE.scatter(1, problem.ids, problem.scores.detach()).requires_grad_()
        self.map_TE = zeros_TE.int().scatter_(1, problem.ids, 1)
        self.modules, self.weights = [], []
        for w_ENK in problem.fused_weights():
            E, N, K = w_ENK.shape
            module = engine.GroupedLinear(
                *(E, K, N), bias=False, params_dtype=BF16, use_grouped_tensor=native, single_grouped_weight=one_weight
            )
            weights = [module.weight] if one_weight else [getattr(module, f"weight{i}") for i in range(E)]
            parts = [weights[0].rowwise_data.view(E, N, K)] if one_weight else weights
            with torch.no_grad():
                for part, values in zip(parts, [w_ENK] if one_weight else w_ENK, strict=True):
                    part.copy_(values)
            self.modules.append(module)
            self.weights.append(weights)

    def forward(self, first: bool | None) -> Tensor:
        """``first``: whether it quantizes weights that other microbatches get; None: for itself alone."""
        engine, x, align = self.engine, self.problem.x, 128 if self.native else 16
        x_MD, scores_M, rows, pads, padded_E = engine.moe_permute_and_pad_with_probs(
            x, self.scores_TE, self.map_TE, self.map_TE.sum(0), align
        )
        sizes_E = padded_E if self.native else padded_E.cpu()
        up, down = self.modules
        with engine.autocast(enabled=True, recipe=self.recipe):
            h = up(x_MD, sizes_E, is_first_microbatch=first)
            y_MD = down(ScaledSwiGLU.apply(h, scores_M.to(h.dtype)), sizes_E, is_first_microbatch=first)
        return engine.moe_unpermute(y_MD, rows, None, restore_shape=x.shape, map_type="mask", pad_offsets=pads)

    def step(self, first: bool | None = None) -> list[Tensor]:
        out = self.forward(first)
        leaves = [self.problem.x, self.scores_TE, *self.weights[0], *self.weights[1]]
        return [out, *torch.autograd.grad(out, leaves, self.problem.dout)]

    def microbatches(self) -> None:
        for i in range(MICROBATCHES):
            self.step(i == 0)

    def results(self) -> list[Tensor]:
        """Output, dx, dscores, dw13 and dw2."""
        out, dx, dscores_TE, *dws = self.step()
        found = [out, dx, dscores_TE.gather(1, self.problem.ids)]
        for weight in self.problem.fused_weights():
            count = len(self.weights[0])
            parts, dws = dws[:count], dws[count:]
            data = [getattr(part, "rowwise_data", part) for part in parts]
            found.append(torch.cat([part.flatten() for part in data]).view_as(weight))
        return found


def candidates(problem: Problem) -> dict[str, Step]:
    """Each with its weights quantized in a microbatch, and kept for four."""
    steps: dict[str, Step] = {OURS: problem.ours(), OURS + KEPT: problem.ours("both", MICROBATCHES)}
    for peer, options in PEERS.items():
        layer = Layer(problem, **options)
        require_same(steps[OURS](), layer.results())
        steps |= {peer: layer.step, peer + KEPT: layer.microbatches}
    return steps


def measure(case: tuple[str, int]) -> list[dict]:
    """A record for each peer, state and way with the weights. The times in which the GPU is busy become fields."""
    require_grouped_gemm()
    sizes, shape = layer_of(*case)
    steps, found = candidates(Problem(sizes, case[1])), []
    times = median_ms(steps)
    times[GPU_BUSY] = {name: busy_ms(steps[name]) for name in times[BACK_TO_BACK]}
    for kept, count in {"": 1, KEPT: MICROBATCHES}.items():
        each = {
            state: {who: ms[who + kept] / count for who in (OURS, *PEERS) if who + kept in ms}
            for state, ms in times.items()
        }
        busy = each.pop(GPU_BUSY)
        for r in state_records(NAME + kept, shape, each, OURS, PEERS, UNIT):
            found.append(r | dict(gpu_busy=busy[OURS], reference_gpu_busy=busy[r["reference"]]))
    return found


def require_grouped_gemm() -> None:
    """Ends the program where the native path would silently become a GEMM for each expert."""
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch.module.grouped_linear import is_module_grouped_tensor_path_supported
    from transformer_engine_torch import get_cublasLt_version

    if not is_module_grouped_tensor_path_supported(Float8BlockScaling(), BF16):
        sys.exit(f"error: cuBLASLt {get_cublasLt_version()} has no grouped GEMM for FP8 blocks; preload 13.6 or newer")


if __name__ == "__main__":
    measure_each(__doc__, "shape", SHAPES, measure)
