"""Compiles the kernels of a job's layers ahead of it: ``python -m titan_fp8moe.warm_up CONFIG``.

Takes the arguments of the dry run: torchtitan 0.2.2's TOML file and overrides, or 0.3's ``--config`` and options. The
kernels go to Triton's cache, ``TRITON_CACHE_DIR`` or ``~/.triton/cache``. No GPU is needed: they are compiled for
Hopper GPUs, by the installed versions of torch and Triton. With Triton 3.6 a C compiler also builds their launchers,
which it links with libcuda; on a node without it they are left to the job.

    python -m titan_fp8moe.warm_up train_configs/deepseek_v3_16b.toml
    python -m titan_fp8moe.warm_up --config deepseek_v3_16b --parallelism.expert_parallel_degree 4

For layers of other models see :func:`titan_fp8moe.kernels.compile.compile_all`.
"""

import importlib
import os
import sys

from triton import knobs

from titan_fp8moe.kernels.compile import compile_all
from titan_fp8moe.kernels.warm_up import use_inductors_ptxas
from titan_fp8moe.trainer.dry_run import layers
from titan_fp8moe.versions import installed


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a dry run of torchtitan 0.3 would begin to use the GPU
    use_inductors_ptxas()
    release = "torchtitan03" if (installed("torchtitan") or "").startswith("0.3") else "torchtitan"
    adapter = importlib.import_module(f"titan_fp8moe.{release}.dry_run")
    built = adapter.from_command_line(__doc__)
    if failed := compile_all(layers(built.parts, built.tokens, built.moe_of)):
        sys.exit(f"error: {len(failed)} kernels failed, the first with {failed[0]!r}; the job compiles what is missing")
    print(f"The job's kernels for Hopper GPUs are in {knobs.cache.dir}")


if __name__ == "__main__":
    main()
