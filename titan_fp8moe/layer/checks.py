"""Checks of a layer's tensors: each raises ValueError for what the kernels cannot take, with the remedy.

They read shapes, dtypes and devices only, and run in every forward, so their host time counts. Not so
:func:`check_padded_apart`, which reads values where a module is made.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from titan_fp8moe.layer.weights import Biases, ExpertWeights, SharedExperts
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.recipe import BLOCK, FP8, SCALE_BITS, STEP, padded
from titan_fp8moe.spec import ExpertSpec


def check_inputs(
    x_TD: Tensor, weights: ExpertWeights[Any], topk_ids_TK: Tensor, topk_scores_TK: Tensor, expert: ExpertSpec
) -> None:
    """Rejects inputs that would make a kernel access invalid memory."""
    (w1, w2, w3), rows, pairs = weights, x_TD.shape, topk_ids_TK.shape
    stored, sizes = isinstance(w1, Fp8Weight), w1.shape  # stored ones have padded sizes
    dims = len(rows) == len(pairs) == 2 and len(sizes) == 3 and rows[0] == pairs[0]
    kinds = topk_scores_TK.dtype == torch.float32 and topk_ids_TK.dtype in (torch.int32, torch.int64)
    fits = dims and kinds and topk_scores_TK.shape == pairs
    if not fits or (padded(rows[1]) if stored else rows[1]) != sizes[2]:
        got = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x_TD, topk_ids_TK, topk_scores_TK, w1))
        raise ValueError(
            "x must be (T, D), batch dims flattened, topk_ids (T, K) int32 or int64, topk_scores (T, K) fp32 "
            f"(torch.topk returns scores, then ids), and w1 (E, H, D); got {got}"
        )
    E, H, D = sizes
    device, dtype, up = x_TD.device, w1.dtype, w1 if w3 is None else w3
    if not device == topk_ids_TK.device == topk_scores_TK.device == w1.device == w2.device == up.device:
        devices = {t.device for t in (x_TD, topk_ids_TK, topk_scores_TK, w1, w2, up)}
        raise ValueError(f"x, ids, scores and weights must be on one device, got {', '.join(map(str, devices))}")
    gated = expert.gated
    parts = 2 if gated and w3 is None else 1
    even, H = H % parts == 0, H // parts
    fits = even and (up is w1 or up.shape == sizes) and w2.shape == (E, D, H)
    fits = fits and dtype == w2.dtype == up.dtype and (stored or dtype in (torch.bfloat16, torch.float32))
    if not fits or not (gated or w3 is None):
        got = ", ".join("None" if w is None else f"{tuple(w.shape)} {w.dtype}" for w in weights)
        raise ValueError(
            "w1 and w3 must be (E, H, D), or w1 (E, 2H, D) with w3 None, and w2 (E, D, H), all of one dtype, bf16 or "
            f"fp32; without a gate, as of 'relu2', w1 must be (E, H, D) with w3 None; got {got}"
        )
    if expert.interleaved and parts == 1:
        raise ValueError("interleaved says how one w1 (E, 2H, D) holds gate and up; give it with w3 None and a gate")
    D = rows[1]
    if D % STEP or H % STEP:
        raise ValueError(f"D and H must be multiples of {STEP}; got D {D} and H {H}; pad the model with zeros")
    if stored:
        _check_stored(weights)
    check_device(x_TD)


def check_biases(biases: Biases[Any], weights: ExpertWeights[Any], dim: int) -> None:
    """Rejects biases that do not fit the weights and D, ``dim``."""
    E, rows, _ = weights.w1.shape
    shapes = dict(b1=(E, rows), b2=(E, dim)) | ({} if weights.w3 is None else dict(b3=(E, rows)))
    given = {name: b for name, b in zip(Biases._fields, biases, strict=True) if b is not None}
    # One by one: torch.compile cannot compare dicts of sizes that are symbols.
    fit = list(given) == list(shapes) and all(given[name].shape == shape for name, shape in shapes.items())
    if not fit or not _of_one_kind(given, weights.w1.device):
        wanted = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"with these weights, and all bf16 or all fp32 on {weights.w1.device}, the biases must be {wanted}; got "
            f"{_described(given)}"
        )


def _of_one_kind(tensors: dict[str, Tensor], device: torch.device) -> bool:
    """Whether they are all bf16 or all fp32, on the device."""
    kinds = {(t.dtype, t.device) for t in tensors.values()}
    return kinds in ({(torch.bfloat16, device)}, {(torch.float32, device)})


def _described(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(t.shape)} {t.dtype} on {t.device}" for name, t in tensors.items())


def check_shared(shared: SharedExperts, x_TD: Tensor, expert: ExpertSpec) -> None:
    """Rejects shared experts that do not fit the tokens or the activation."""
    (T, D), (w1, w2, w3, scores), device = x_TD.shape, shared, x_TD.device
    parts = 2 if expert.gated and w3 is None else 1
    H = w1.shape[0] // parts
    # Beside interleaved routed experts one w1 would be ambiguous: it would be read with gate first.
    fits = not expert.interleaved if parts == 2 else w3 is None or (expert.gated and w3.shape == w1.shape)
    fits = fits and w1.shape == (parts * H, D) and w2.shape == (D, H) and H % (BLOCK if parts == 2 else STEP) == 0
    fits = fits and (scores is None or (scores.shape, scores.dtype, scores.device) == ((T,), torch.float32, device))
    given = {name: tensor for name, tensor in zip(shared._fields, shared, strict=True) if tensor is not None}
    if not fits or not _of_one_kind({name: w for name, w in given.items() if name != "scores"}, device):
        raise ValueError(
            f"shared must have w1 and w3 (H, {D}), H a multiple of 16, or w1 (2H, {D}) with w3 None, H a multiple of "
            f"128, unless the routed experts are interleaved; without a gate, as of 'relu2', w1 (H, {D}) with w3 None; "
            f"w2 ({D}, H); all bf16 or all fp32 on {device}; scores ({T},) fp32 or None; got {_described(given)}"
        )


def _check_stored(weights: ExpertWeights[Any]) -> None:
    """Rejects weights stored in FP8 that the GEMMs could not read, or that a caller expects to train."""
    for name, w in zip(weights._fields, weights, strict=True):
        if w is None:
            continue
        blocks = w.shape[0], *(size // BLOCK for size in w.shape[1:])
        sizes = w.shape[1] % BLOCK == 0 and w.scale.shape == blocks and w.q.is_contiguous() and w.scale.is_contiguous()
        here = w.q.device == w.scale.device or type(weights) is not ExpertWeights  # another reads values of the host
        if not sizes or not here or w.q.dtype != FP8 or w.scale.dtype not in SCALE_BITS:
            raise ValueError(
                f"{name} must be contiguous e4m3 (E, N, K), N and K multiples of 128, with scales (E, N // 128, "
                f"K // 128) in e8m0, fp32 or bf16 on its device; got {_described(w._asdict())}; Fp8Weight.of_blocks "
                "converts DeepSeek's format"
            )
        if torch.is_grad_enabled() and (w.q.requires_grad or w.scale.requires_grad):
            raise ValueError(
                f"{name} is stored in FP8 and requires a gradient; freeze it with requires_grad_(False), or train bf16"
            )


def check_device(x: Tensor) -> None:
    """Rejects a GPU that is not the current one, on which kernels would run."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(
            f"x is on {x.device}, and kernels run on the current device {torch.cuda.current_device()}; call "
            "torch.cuda.set_device"
        )


def check_padded_apart(w1: Fp8Weight, w2: Fp8Weight) -> None:
    """Rejects gate and up in one ``w1`` that were padded as one: where w2 pads H, gate's half has up's rows."""
    if w1.q.is_meta or isinstance(w1.q, FakeTensor):
        return
    last = slice(w2.shape[2] - STEP, w2.shape[2])
    if w1.q[:, last].view(torch.uint8).any() and not w2.q[:, :, last].view(torch.uint8).any():
        raise ValueError("gate and up of this w1 were padded as one; pass them as w1 and w3, each padded by itself")
