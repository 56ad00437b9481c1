"""Says what works on this machine: ``python -m titan_fp8moe.doctor``.

Prints versions and GPU, compares every kernel with the specification (:func:`titan_fp8moe.self_check`), and measures a
copy, a GEMM and a layer. A bug report needs this output. Exits with 1 if kernels differ.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from triton import knobs

from titan_fp8moe import __version__, ops, recipe, routed_experts
from titan_fp8moe.ops import self_check
from titan_fp8moe.testing import after_idling_ms, environment, make_layer

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 4096, 2048, 1408, 64, 6  # of DeepSeek-V3 16B's layers
SETTINGS = ("CUDA_", "NCCL_", "TORCH", "TRITON_", "PYTORCH_")


def main() -> int:
    env = environment()
    print(f"titan_fp8moe {__version__} (commit {env['commit'] or 'unknown'})")
    print(f"versions     {', '.join(f'{name} {version}' for name, version in _versions(env).items())}")
    print(f"hardware     {env['hardware']}")
    print(f"ptxas        {_ptxas()}")
    settings = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS))
    print(f"environment  {' '.join(settings) or '-'}")
    if not torch.cuda.is_available():
        built = "is built for CUDA, but its driver finds no GPU" if torch.version.cuda else "is built without CUDA"
        print(f"kernels      not run: PyTorch {built}. Layers run the slow reference on the CPU")
        return 0
    where = self_check.combination()
    (major, minor), torch_version, triton_version = where
    tested = "the tests have run on" if where in self_check.TESTED else "NOT among those that the tests have run on:"
    print(f"combination  {tested} compute capability {major}.{minor}, PyTorch {torch_version}, Triton {triton_version}")
    if reason := self_check.why_no_kernels():
        print(f"kernels      not run: {reason}")
        return 1
    wrong = self_check.self_check()
    print(f"kernels      {'differ: ' + ', '.join(wrong) if wrong else 'agree with the specification'}")
    if wrong:
        return 1
    with ops.backend.open_gate():
        for name, value in measure().items():
            print(f"{name:12} {value}")
    return 0


def _versions(env: dict[str, object]) -> dict[str, object]:
    versions = env["versions"]
    assert isinstance(versions, dict)
    return {name: version for name, version in versions.items() if version is not None}


def _ptxas() -> str:
    """The assembler of Triton's kernels on GPUs before Blackwell. ``TRITON_PTXAS_PATH`` replaces Triton's own."""
    try:
        tool = knobs.nvidia.ptxas
    except RuntimeError as error:  # there is none
        return str(error)
    own = Path(tool.path).is_relative_to(Path(knobs.__file__).parent)
    return f"{tool.version}, {'of Triton' if own else tool.path}"


def measure() -> dict[str, str]:
    """Milliseconds after idling, the best of ten, and the rates that follow."""
    x, scores, ids, weights = make_layer(TOKENS, DIM, HIDDEN, EXPERTS, TOP_K, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in (x, scores, *(w.bfloat16() for w in weights))]
    rows = TOKENS * TOP_K // 128 * 128
    offsets_E = torch.full((1,), rows, dtype=torch.int32, device="cuda")
    a, a_scale = ops.quantize_rows(torch.randn(rows, DIM, dtype=torch.float32, device="cuda"))
    b = ops.quantize_weight(torch.randn(1, 2 * HIDDEN, DIM, dtype=torch.float32, device="cuda"))
    source, target = torch.empty(2, 2**28, dtype=torch.uint8, device="cuda")

    def layer() -> None:
        x, scores, w1, w2, w3 = leaves
        out = routed_experts(x, w1, w2, w3, ids, scores)
        torch.autograd.grad(out, leaves, out.detach())

    a_scale = recipe.column_major(a_scale)
    copy = _best_ms(lambda: target.copy_(source))
    gemm = _best_ms(lambda: ops.grouped_mm(a, a_scale, *b, offsets_E, torch.bfloat16))
    return rates(source.numel(), copy, rows, gemm, _best_ms(layer))


def rates(copied_bytes: int, copy_ms: float, rows: int, gemm_ms: float, layer_ms: float) -> dict[str, str]:
    """The rates of :func:`measure`: bytes read and written, and products of GEMM 1 with one expert."""
    flops = 2 * rows * DIM * 2 * HIDDEN
    shape = f"{TOKENS} tokens, {EXPERTS} experts, top {TOP_K}, dims {DIM} and {HIDDEN}"
    return {
        "copy": f"{2 * copied_bytes / copy_ms / 1e9:.2f} TB/s",
        "GEMM": f"{flops / gemm_ms / 1e9:,.0f} TFLOPS ({rows} x {2 * HIDDEN} x {DIM})",
        "layer": f"{layer_ms:.2f} ms forward and backward ({shape})",
    }


def _best_ms(run: Callable[[], object]) -> float:
    run()
    return min(after_idling_ms(run) for _ in range(10))


if __name__ == "__main__":
    sys.exit(main())
