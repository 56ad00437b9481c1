"""The Hopper GEMMs on small shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m experiments.gpu_tests.sanitize

What it said, with racecheck and synccheck as well, is in sanitizer.txt.gz.
"""

import torch

from titan_fp8moe import ops, recipe

SHAPES = [  # N, K, rows of each group
    (256, 384, [128, 0, 256]),
    (384, 128, [256, 128]),
    (640, 512, [0, 128, 128, 384, 0]),
]


def main() -> None:
    for N, K, sizes in SHAPES:
        offsets_E = torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()
        M, E = sum(sizes), len(sizes)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

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
