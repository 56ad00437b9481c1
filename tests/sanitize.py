"""Hopper's kernels on small shapes, for compute-sanitizer: the GEMMs, a layer, and what surrounds all-to-alls.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.sanitize

Without the variable tensors share PyTorch's large allocations, and an access past the end of one goes unnoticed.
CONTRIBUTING.md says what the tools report of healthy kernels.
"""

import torch

from experiments.records import require_gpu
from titan_fp8moe import ops, recipe
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.run import routed_experts
from titan_fp8moe.ops import Fp8Weight

SHAPES = [  # N, K, rows of each group
    (256, 384, [128, 0, 256]),
    (384, 128, [256, 128]),
    (640, 512, [0, 128, 128, 384, 0]),
]


TOKENS, TOP_K, EXPERTS, D, H = 200, 3, 5, 384, 256


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def layers() -> None:
    scores = torch.rand(TOKENS, TOP_K, device="cuda")
    experts = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices
    weights = [randn(EXPERTS, *shape).requires_grad_() for shape in ((H, D), (D, H), (H, D))]
    for save_h, recompute in (("bf16", "activation"), ("fp8", "none"), ("bf16", "experts")):
        config = Fp8FlowMoEConfig(save_h=save_h, recompute=recompute)
        for score_before_experts in (False, True):
            x = randn(TOKENS, D).requires_grad_()
            settings = dict(config=config, score_before_experts=score_before_experts)
            routed_experts(x, *weights, experts, scores, **settings).sum().backward()


def exchanges() -> None:
    """What surrounds the all-to-alls, for the tokens of two ranks that both are this one."""
    experts = torch.rand(TOKENS, 2 * EXPERTS, device="cuda").topk(TOP_K).indices
    sent, token, counts = ops.dispatch_routing(experts, 2, EXPERTS)
    C = int(counts[0, 0])
    token, sent = token[:C], sent.where((sent > -2 - C) & (sent < C), -1)  # what goes to the first rank
    q, scale = ops.quantize_rows(randn(TOKENS, D))
    scores = torch.rand(TOKENS, TOP_K, device="cuda")
    ops.pack_dispatch(q, scale, token, sent, None, None, EXPERTS)
    payload = ops.pack_dispatch(q, scale, token, sent, experts, scores, EXPERTS).repeat(2, 1)
    q, scale, experts, scores = ops.unpack_dispatch(payload, D, TOP_K)
    capacity = recipe.row_capacity(2 * int(counts[0, 1:].sum()), EXPERTS)
    offsets, token_M, score, row = ops.expert_routing(experts, scores, EXPERTS, capacity)
    x, x_scale = ops.permute_rows(q, scale, row, token_M, offsets)
    ops.transpose_pair(q, scale, x, x_scale, offsets, "balanced", token_M)
    back = ops.pack_combine(randn(capacity, D), score, row)
    sums, ds = ops.unpack_combine(back, D, TOP_K)
    ops.unpermute_sum(sums, sent, torch.bfloat16)
    ops.unpermute_gradients(sums, ds, sent, torch.bfloat16)


def gathered_weights() -> None:
    quantized = [Fp8Weight(*recipe.quantize_weight(randn(EXPERTS, H, D))) for _ in range(2)]
    ops.quantize_weight(*quantized)
    ops.quantize_weight_transposed(*quantized)
    ops.quantize_weight_both(*quantized)


def main() -> None:
    require_gpu()
    layers()
    exchanges()
    gathered_weights()
    for N, K, sizes in SHAPES:
        offsets_E = torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()
        M, E = sum(sizes), len(sizes)
        (x, x_scale), (dy, dy_scale) = (ops.quantize_rows(randn(M, width)) for width in (K, N))
        x_scale, dy_scale = recipe.column_major(x_scale), recipe.column_major(dy_scale)
        weight = ops.quantize_weight(randn(E, N, K))
        x_t, x_t_scale, dy_t, dy_t_scale = ops.transpose_pair(x, x_scale, dy, dy_scale, offsets_E, "balanced")
        for dtype in (torch.bfloat16, torch.float32):
            ops.grouped_mm(x, x_scale, *weight, offsets_E, dtype)
            ops.grouped_mm_wgrad(dy_t, dy_t_scale, x_t, x_t_scale, offsets_E, dtype)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
