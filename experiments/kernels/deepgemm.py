"""DeepGEMM's grouped GEMMs as candidates of :mod:`experiments.kernels.gemm`, from a folder of compiled kernels.

The folder has, next to ``cubins/``, two modules. ``dg_config`` lists the configurations for a shape, and ``COMMIT``,
DeepGEMM's. ``dg_driver`` launches them (``is_built``, ``forward_launch``). The configuration that is
fastest back to back competes. Its TMA descriptors are made in advance.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from experiments.timing import back_to_back_ms
from titan_fp8moe import recipe


def load(folder: Path) -> str:
    """Makes the folder's modules importable; returns DeepGEMM's commit.

    Raises:
        SystemExit: if a module is missing.
    """
    sys.path.insert(0, str(folder.resolve()))
    try:
        import dg_config
        import dg_driver  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"--deepgemm {folder}: {error}; name a folder with dg_config.py, dg_driver.py and cubins/"
        ) from error
    return dg_config.COMMIT[:7]


def forward(operands: tuple[Tensor, ...], offsets_E: Tensor, ours: Callable[[], Tensor]) -> Callable[[], None]:
    """The fastest back to back of DeepGEMM's m-grouped contiguous GEMMs with bf16 output.

    Raises:
        RuntimeError: if none is built, or if one is 5e-3 or more from ours: rounding to bf16 is 1.7e-3.
    """
    import dg_config
    import dg_driver

    (a, a_scale, b, b_scale), (M, K), (E, N, _) = operands, operands[0].shape, operands[2].shape
    rows = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
    a_fp32, b_fp32 = (recipe.exp2(recipe.exponent(scale)) for scale in (a_scale, b_scale))
    inputs = [
        *(a, a_fp32.t().contiguous(), b, b_fp32.contiguous(), out),
        torch.repeat_interleave(torch.arange(E, device="cuda", dtype=torch.int32), rows),
    ]
    addresses = [tensor.data_ptr() for tensor in inputs]
    configs = filter(dg_driver.is_built, dg_config.forward_configs(M, E, N, K))
    expected, times = ours().float(), {}
    for config in configs:
        launch = dg_driver.forward_launch(config, *addresses, 0)

        def run(launch=launch, inputs=inputs) -> None:  # keeps the inputs alive
            launch.launch_config.stream = torch.cuda.current_stream().cuda_stream
            launch()

        out.zero_()
        run()
        apart = float((out.float() - expected).norm() / expected.norm())
        if not apart < 5e-3:
            raise RuntimeError(f"DeepGEMM's result is {apart:.1e} from ours")
        times[run] = back_to_back_ms(run)
    if not times:
        raise RuntimeError("no kernel of DeepGEMM is compiled for this shape")
    return min(times, key=times.__getitem__)
