"""Bandwidth of the data-movement kernels at the shapes of DeepSeek-V3 671B and 16B.

    python -m experiments.kernels.data_movement --out experiments/kernels/results.json

A figure is the fewest bytes that the kernel must move, each input read once and each output written once, divided by
the median time of launches back to back. The upper limit is a device-to-device copy of 1 GiB in the same run; a
copy that moves as many bytes as the kernel shows what a kernel of that size can reach. Two kernels also stand next to
what they replace: :func:`alone`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.ablations import requantized_pair
from experiments.records import measure_each, record
from experiments.timing import back_to_back_ms
from titan_fp8moe import recipe
from titan_fp8moe.kernels import permute, quantize, swiglu, transpose
from titan_fp8moe.kernels.routing import dispatch_routing, expert_routing
from titan_fp8moe.ops import pack_combine, pack_dispatch, unpack_dispatch
from titan_fp8moe.recipe import BLOCK
from titan_fp8moe.spec import ExpertSpec

BF16 = torch.bfloat16
SWIGLU = ExpertSpec()


class Layer(NamedTuple):
    """One rank's part of an MoE layer: about R routed pairs for its E experts."""

    name: str
    R: int
    D: int
    H: int
    E: int
    top_k: int
    ranks: int  # that send tokens; 1: this rank's own tokens, otherwise tokens arrive in a payload

    def __str__(self) -> str:
        return "{}, {} rows, D {}, H {}, E {}, top-{}, ranks {}".format(*self)


LAYERS = [
    Layer("671B", 32768, 7168, 2048, 8, 8, 32),
    Layer("16B", 98304, 2048, 1408, 64, 6, 1),
    Layer("16B", 4096, 2048, 1408, 64, 8, 1),
]


class Case(NamedTuple):
    """``run`` moves at least ``bytes``."""

    name: str
    routing: str  # "" where it has no effect
    bytes: int
    run: Callable[[], object]


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


class Routing(NamedTuple):
    """Choices of the tokens that come to this rank, -1 for another rank's experts, and index maps of their rows."""

    ids_TK: Tensor
    scores_TK: Tensor
    R: int  # routed pairs
    offsets_E: Tensor
    token_M: Tensor
    row_TK: Tensor
    rows: int  # in expert order, padding included


def route(layer: Layer) -> Routing:
    """Random routing of the tokens of all ranks to this rank's experts, the first E."""
    E, top_k, ranks = layer.E, layer.top_k, layer.ranks
    topk_ids_TK = torch.rand(layer.R * ranks // top_k, E * ranks, device="cuda").topk(top_k).indices
    served = topk_ids_TK < E
    dispatched_T = served.any(1)  # whether the token comes to this rank
    ids_TK = topk_ids_TK.where(served, -1)[dispatched_T]
    scores_TK, R = torch.rand(ids_TK.shape, device="cuda"), int(served.sum())
    if ranks > 1:
        ids_TK = ids_TK.int()  # as a payload has them
    offsets_E, token_M, _, row_TK = expert_routing(ids_TK, scores_TK, E, recipe.row_capacity(R, E))
    return Routing(ids_TK, scores_TK, R, offsets_E, token_M, row_TK, int(offsets_E[-1]))


def live(routing: Routing, *tensors: Tensor) -> int:
    """Bytes of the rows in use of tensors (M, ...)."""
    return sum(size(t) // t.shape[0] for t in tensors) * routing.rows


def expert_rows(routing: Routing, width: int) -> tuple[Tensor, Tensor]:
    """(M, width) e4m3 of normal values and its scales in expert order."""
    q, scale = quantize.quantize_rows(randn(routing.token_M.shape[0], width))
    return q, recipe.column_major(scale)


def dispatched(layer: Layer, routing: Routing) -> tuple[Tensor, Tensor]:
    """Quantized tokens, in a payload if they come from other ranks."""
    D, (T, top_k) = layer.D, routing.row_TK.shape
    q, scale = quantize.quantize_rows(randn(T, D))
    if layer.ranks > 1:
        payload = torch.empty(T, D + 8 * top_k + D // BLOCK + 16, device="cuda", dtype=torch.uint8)
        payload = payload[:, : payload.shape[1] // 16 * 16].contiguous()
        views = unpack_dispatch(payload, D, top_k)
        views[0].copy_(q)
        views[1].view(torch.uint8).copy_(scale.view(torch.uint8))
        q, scale = views[:2]
    return q, scale


def quantize_cases(layer: Layer, _: Routing) -> Iterator[Case]:
    """Rows in groups, with the flag that training has for NaNs; one group as a shared expert or dense FFN has it, with
    the scales in both layouts; both layouts of gate and up."""
    x, flag = randn(layer.R, layer.D), torch.zeros(16, dtype=torch.uint8, device="cuda")
    yield Case("quantize", "", size(x, *quantize.quantize_rows(x)), partial(quantize.quantize_rows, x, flag))
    run = partial(quantize.quantize_group, x)
    yield Case("quantize_group", "", size(x, *run()), run)
    w13 = [randn(layer.E, layer.H, layer.D) for _ in range(2)]
    run = partial(quantize.quantize_weight, w13, True, True)
    yield Case("weight_quantize", "", size(*w13, *run()), run)


def dispatch_cases(layer: Layer, _: Routing) -> Iterator[Case]:
    """Routing over all ranks, then the payload that a rank sends: values, scales, ids and scores."""
    if layer.ranks == 1:
        return
    T, top_k, D = layer.R // layer.top_k, layer.top_k, layer.D
    ids = torch.rand(T, layer.E * layer.ranks, device="cuda").topk(top_k).indices
    x, scores = randn(T, D), torch.rand(T, top_k, device="cuda")
    run = partial(dispatch_routing, ids, layer.ranks, layer.E)
    sent_TK, token_C, counts_N = run()
    token_C = token_C[: int(counts_N[:, 0].sum())]
    yield Case("dispatch_routing", "", size(ids, sent_TK, token_C, counts_N), run)
    q, scale = quantize.quantize_rows(x)
    pack = partial(pack_dispatch, q, scale, token_C, sent_TK, ids, scores, layer.E)
    moved = size(q, scale, token_C, sent_TK, ids, scores, pack())
    yield Case("pack_dispatch", "", moved, pack)


def transpose_cases(layer: Layer, routing: Routing) -> Iterator[Case]:
    """Cases with x in expert order, and with x in the order of dispatched tokens."""
    x, dy = expert_rows(routing, layer.D), expert_rows(routing, 2 * layer.H)
    tokens, offsets_E = dispatched(layer, routing), routing.offsets_E
    scales = (layer.D + 2 * layer.H) // BLOCK * routing.rows // BLOCK
    written = live(routing, x[0], dy[0]) + scales
    gathered = size(*tokens) + live(routing, *dy, routing.token_M) + written
    for mode in ("balanced", "scaling_aware"):
        in_order = partial(transpose.transpose_pair, *x, *dy, offsets_E, mode)
        yield Case(f"transpose_{mode}", "balanced", live(routing, *x, *dy) + written, in_order)
        by_token = partial(transpose.transpose_pair, *tokens, *dy, offsets_E, mode, routing.token_M)
        yield Case(f"transpose_{mode}", "balanced, x by token", gathered, by_token)


def swiglu_cases(layer: Layer, routing: Routing) -> Iterator[Case]:
    """SwiGLU and its backward; with ``save_h = "fp8"`` the forward also quantizes h, and the backward reads that."""
    M, offsets_E = routing.token_M.shape[0], routing.offsets_E
    h, d, score = randn(M, 2 * layer.H), randn(M, layer.H), torch.rand(M, device="cuda")
    for kind, save_h in (("", False), (" save_h=fp8", True)):
        forward = partial(swiglu.swiglu_quantize, h, score, offsets_E, SWIGLU, save_h)
        outputs = forward() if save_h else forward()[:2]
        yield Case(f"swiglu{kind}", "balanced", live(routing, h, score, *outputs), forward)
        saved = outputs[2:] if save_h else (h, None)
        backward = partial(swiglu.swiglu_quantize_backward, d, *saved, score, offsets_E, SWIGLU, True)
        moved = live(routing, d, *(t for t in saved if t is not None), score, *backward())
        yield Case(f"swiglu_backward{kind}", "balanced", moved, backward)


def permute_cases(layer: Layer, routing: Routing) -> Iterator[Case]:
    """Index maps from choices; rows in expert order; sums in bf16, which are the layer's output for own tokens and the
    combine payload for those of other ranks. In a backward also the score gradients."""
    ids, scores, row_TK, token_M, R = routing.ids_TK, routing.scores_TK, routing.row_TK, routing.token_M, routing.R
    run = partial(expert_routing, ids, scores, layer.E, token_M.shape[0])
    yield Case("expert_routing", "balanced", size(ids, scores, *run()), run)
    q, scale = dispatched(layer, routing)
    run = partial(permute.permute_rows, q, scale, row_TK, token_M, routing.offsets_E)
    yield Case("permute", "balanced", size(q, scale, row_TK) + live(routing, token_M, *run()), run)
    y, ds_M = randn(token_M.shape[0], layer.D), torch.rand(token_M.shape[0], device="cuda")
    forward = partial(permute.unpermute_sum, y, row_TK, BF16)
    backward = partial(permute.unpermute_gradients, y, ds_M.unsqueeze(1), row_TK, BF16)
    sums = forward()
    if layer.ranks > 1:
        forward, backward = (partial(pack_combine, y, gradients_M, row_TK) for gradients_M in (None, ds_M))
    yield Case("unpermute", "balanced", size(y[:R], row_TK, sums), forward)
    gradients = backward() if layer.ranks == 1 else [backward()]
    yield Case("unpermute_gradients", "balanced", size(y[:R], ds_M[:R], row_TK, *gradients), backward)


@torch.compile(dynamic=False)
def swiglu_bf16(h: Tensor, score: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return (F.silu(gate.float()) * up.float() * score.unsqueeze(1)).to(BF16)


def alone(layer: Layer, routing: Routing) -> Iterator[dict]:
    """The transposes of both operands next to dequantizing, transposing and requantizing them, and SwiGLU next to one
    whose output another launch quantizes. What is not ours is PyTorch's code, compiled."""
    offsets_E, rows = routing.offsets_E, routing.rows
    operands = [t[:rows] for width in (layer.D, 2 * layer.H) for t in expert_rows(routing, width)]
    h, score = randn(rows, 2 * layer.H), torch.rand(rows, device="cuda")
    cases = {
        ("transpose alone", "requantized"): (
            partial(transpose.transpose_pair, *operands, offsets_E, "scaling_aware"),
            partial(requantized_pair, *operands, offsets_E, ""),
        ),
        ("swiglu alone", "unfused"): (
            partial(swiglu.swiglu_quantize, h, score, offsets_E, SWIGLU, False),
            lambda: quantize.quantize_rows(swiglu_bf16(h, score)),
        ),
    }
    for (name, reference), runs in cases.items():
        ours, theirs = map(back_to_back_ms, runs)
        yield record(name, str(layer), "ms", ours, reference, theirs)


def gb_per_s(moved: int, run: Callable[[], object]) -> float:
    return moved / back_to_back_ms(run) * 1e-6


def device_copy(moved: int = 1 << 31) -> float:
    source, target = (torch.empty(moved // 2, device="cuda", dtype=torch.uint8) for _ in range(2))
    source.random_(0, 256)
    return gb_per_s(2 * size(source), lambda: target.copy_(source))


def measure(layer: Layer) -> Iterator[dict]:
    """Records in GB/s of the bytes that each case moves."""
    copy, routing = device_copy(), route(layer)
    makers = quantize_cases, dispatch_cases, transpose_cases, swiglu_cases, permute_cases
    for case in (case for make in makers for case in make(layer, routing)):  # one at a time in memory
        speed = gb_per_s(case.bytes, case.run)
        shape = ", ".join(filter(None, [str(layer), case.routing]))
        fields = dict(layer=layer.name, rows=layer.R, E=layer.E, routing=case.routing)
        fields |= dict(microseconds=round(case.bytes / speed * 1e-3, 1))
        for reference, other in (("copy", copy), ("copy of as many bytes", device_copy(case.bytes))):
            yield record(case.name, shape, "GB/s", speed, reference, other, **fields)
    yield from alone(layer, routing)


if __name__ == "__main__":
    measure_each(__doc__, "layer", LAYERS, lambda layer: [*measure(layer)])
