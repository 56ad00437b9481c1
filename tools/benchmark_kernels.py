"""Bandwidth of the data-movement kernels at the shapes of DeepSeek-V3 671B (one of 32 ranks) and 16B (one rank).

    python tools/benchmark_kernels.py [--only transpose] [--out kernels.json]

A figure is the fewest bytes the kernel must move, each input read once and each output written once, over the median
time of ``triton.testing.do_bench``. The first reference is a device-to-device copy in the same run; quantization is
also compared with torchao's 1x128 quantization where torchao is installed (its scales are fp32, no powers of two).
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import permute, quantize, swiglu, transpose
from titan_fp8moe.ops.permute import payload_width, unpack_dispatch
from titan_fp8moe.recipe import TILE

try:
    from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant as torchao_quantize
except ImportError:
    torchao_quantize = None

BF16, INT32 = torch.bfloat16, torch.int32


@dataclass
class Layer:
    """What one rank sees of an MoE layer; its tokens are the rows it sends, M those its experts compute."""

    name: str
    M: int
    D: int
    H: int
    E: int
    top_k: int
    ranks: int


LAYERS = [Layer("671B", 32768, 7168, 2048, 8, 8, 32), Layer("16B", 98304, 2048, 1408, 64, 6, 1)]


@dataclass
class Case:
    """``run`` moves at least ``bytes``; ``references`` do the same work."""

    name: str
    shape: dict[str, int]
    bytes: int
    run: Callable[[], object]
    references: dict[str, Callable[[], object]] = field(default_factory=dict)


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def fp8_rows(M: int, D: int) -> tuple[Tensor, Tensor]:
    """(M, D) e4m3 of normal values and its scales in expert order."""
    q, scale = quantize.quantize_rows(randn(M, D))
    return q, recipe.column_major(scale)


def kernel_case(name: str, shape: dict[str, int], function: Callable, inputs: list[Tensor], *args) -> Case:
    """A case that reads ``inputs`` and writes what ``function(*args)`` returns."""
    outputs = function(*args)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return Case(name, shape, size(*inputs, *outputs), lambda: function(*args))


def quantize_cases(layer: Layer) -> Iterator[Case]:
    x = randn(layer.M, layer.D)
    case = kernel_case("quantize", {"T": layer.M, "D": layer.D}, quantize.quantize_rows, [x], x)
    if torchao_quantize is not None:
        case.references["torchao 1x128"] = lambda: torchao_quantize(x)
    yield case
    w13 = [randn(layer.E, layer.H, layer.D) for _ in range(2)]
    shape = {"E": layer.E, "N": 2 * layer.H, "K": layer.D}
    yield kernel_case("weight_quantize", shape, quantize.quantize_weight, w13, w13, True, True)


def expert_cases(layer: Layer) -> Iterator[Case]:
    """Kernels between the GEMMs, over M rows without padding."""
    M, D, H = layer.M, layer.D, layer.H
    offsets_E = torch.tensor([M], device="cuda", dtype=INT32)
    x, dy = fp8_rows(M, D), fp8_rows(M, 2 * H)
    args = (*x, *dy, offsets_E, "balanced")
    shape = {"M": M, "D": D, "N": 2 * H}
    yield kernel_case("transpose_balanced", shape, transpose.transpose_pair, [*x, *dy], *args)
    h, d, score = randn(M, 2 * H), randn(M, H), torch.rand(M, device="cuda")
    shape = {"M": M, "H": H}
    yield kernel_case("swiglu", shape, swiglu.swiglu_quantize, [h, score], h, score, offsets_E, False, False)
    args = (d, h, None, score, offsets_E, False)
    yield kernel_case("swiglu_backward", shape, swiglu.swiglu_quantize_backward, [d, h, score], *args)


def permute_cases(layer: Layer) -> Iterator[Case]:
    """Random routing. One rank of several permutes the rows of a payload, a single rank its own tokens."""
    D, E, R, top_k = layer.D, layer.E, layer.M, layer.top_k
    local = layer.ranks == 1
    run_R = torch.randint(layer.ranks * E, (R,), device="cuda")
    counts_SE = torch.bincount(run_R, minlength=layer.ranks * E).to(INT32).view(layer.ranks, E)
    slot_R = torch.randperm(R, device="cuda").to(INT32) if local else None
    score_R, capacity = torch.rand(R, device="cuda"), recipe.row_capacity(R, E)
    args = (counts_SE, score_R, slot_R, R, top_k if local else 1, capacity)
    offsets_E, token_M, _, row_S = permute.expert_layout(*args)
    T = R // top_k if local else R
    q, scale = fp8_rows(T, D)
    scale = scale.contiguous()
    if not local:
        payload = torch.empty(R, payload_width(D), device="cuda", dtype=torch.uint8)
        views = unpack_dispatch(payload, D)
        views[0].copy_(q)
        views[1].view(torch.uint8).copy_(scale.view(torch.uint8))
        q, scale = views[:2]
    rows = int(offsets_E[-1])
    moved = size(q, scale, token_M[:rows]) + rows * (D + D // TILE)
    yield Case(
        "permute", {"T": T, "M": rows, "D": D}, moved, lambda: permute.permute_rows(q, scale, token_M, offsets_E)
    )

    y = randn(capacity, D)
    row_TK = row_S[torch.randperm(R, device="cuda")].view(-1, top_k)
    out = permute.unpermute_sum(y, row_TK, BF16)
    yield Case(
        "unpermute",
        {"T": R // top_k, "K": top_k, "D": D},
        R * D * 2 + size(row_TK, out),
        lambda: permute.unpermute_sum(y, row_TK, BF16),
    )


CASES = [quantize_cases, expert_cases, permute_cases]


def gb_per_s(moved: int, run: Callable[[], object]) -> float:
    return moved / triton.testing.do_bench(run, rep=200, return_mode="median") * 1e-6


def device_copy() -> float:
    source, target = (torch.empty(1 << 30, device="cuda", dtype=torch.uint8) for _ in range(2))
    source.random_(0, 256)
    return gb_per_s(2 * size(source), lambda: target.copy_(source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the kernels whose name contains this")
    parser.add_argument("--out", type=Path, help="write the records here as JSON")
    args = parser.parse_args()
    setting = {
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python " + shlex.join(sys.argv),
    }
    torch.manual_seed(0)
    copy = device_copy()
    print(setting["hardware"], setting["versions"], f"copy {copy:.0f} GB/s")
    print(f"{'':28}{'GB/s':>8}{'of copy':>9}{'µs':>8}")
    records = []
    for layer in LAYERS:
        for case in (case for cases in CASES for case in cases(layer) if args.only in case.name):
            value = gb_per_s(case.bytes, case.run)
            references = {"device copy": copy}
            references |= {name: gb_per_s(case.bytes, run) for name, run in case.references.items()}
            others = "".join(f"  {name} {speed:.0f}" for name, speed in references.items() if name in case.references)
            row = f"{layer.name + ' ' + case.name:28}{value:8.0f}{value / copy:9.0%}{case.bytes / value * 1e-3:8.1f}"
            print(row + others, flush=True)
            for name, speed in references.items():
                records.append(
                    {
                        "name": case.name,
                        "shape": {"layer": layer.name, **case.shape},
                        "value": round(value, 1),
                        "unit": "GB/s",
                        "reference": name,
                        "reference_value": round(speed, 1),
                        "speedup": round(value / speed, 3),
                        **setting,
                    }
                )
    if args.out:
        args.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
