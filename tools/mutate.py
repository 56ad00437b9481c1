"""Breaks the package on purpose, one small change at a time, and runs the tests that should notice.

    python tools/mutate.py --seed 1 --count 60 --out outputs/mutations.jsonl

A seed names the same mutations each time; those that the file already has are not run again. Mutations swap operators,
shift integers by one, negate conditions, and drop ``not``, ``.contiguous()`` or a call whose result nobody uses. Each
runs in a copy of the checkout. A mutation that survives is printed as a diff: either it changes no result, or a test
is missing.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titan_fp8moe"
TIMEOUT = 400  # seconds for the tests of one mutation; one that hangs is noticed
CORE = ["test_any_layer.py", "test_moe.py", "test_ops.py", "test_recipe.py", "test_costs.py"]
ADAPTER = ["test_titan_jobs.py", "test_converter.py"]
# By the beginning of a path below titan_fp8moe: test files, those in kernels/ in Triton's interpreter.
TESTS = {
    "kernels/gemm/": ["kernels/test_grouped_mm.py", "test_gemm_order.py", "test_launch.py", "test_gemm_compile.py"],
    "kernels/launch": ["test_launch.py", "kernels/test_layer.py"],
    "kernels/permute": ["kernels/test_permute.py"],
    "kernels/quantize": ["kernels/test_quantize.py", "kernels/test_swiglu.py"],
    "kernels/routing": ["kernels/test_permute.py", "kernels/test_swiglu.py"],
    "dispatch/symmetric/kernels": ["kernels/test_exchange.py", "test_kernels_compile.py"],
    "dispatch/symmetric/": [
        *("test_workspace.py", "kernels/test_exchange.py", "test_overlap.py", "test_ops.py", "test_refusals.py"),
        "distributed/test_layers.py",
    ],
    "kernels/swiglu": ["kernels/test_swiglu.py"],
    "kernels/transpose": ["kernels/test_transpose.py"],
    "kernels/warm_up": ["test_warm_up.py"],
    "kernels/compile": ["test_warm_up.py"],
    "layer/host": ["test_offload.py"],
    "nn/offload": ["test_offload.py"],
    "warm_up": ["test_warm_up.py"],
    "kernels/": ["test_kernels_compile.py"],
    "dispatch/auto": ["test_auto.py", "distributed/test_auto.py"],
    "trainer/auto_dispatch": ["test_auto.py", "distributed/test_auto.py"],
    "trainer/ahead": ["test_ahead.py"],
    "trainer/measure": ["test_measure.py"],
    "trainer/nan_watch": ["test_nan_watch.py"],
    "patches": ["test_patches.py"],
    "torchtitan/dry_run": ["test_titan_jobs.py", "test_train_configs.py", "test_warm_up.py"],
    "trainer/dry_run": ["test_titan_jobs.py", "test_train_configs.py", "test_warm_up.py"],
    "trainer/memory": ["test_memory.py"],
    "torchtitan/cpu": [*ADAPTER, "test_package.py"],
    "torchtitan/first_hour": ["test_train_configs.py"],
    "torchtitan/metrics": ["test_statistics.py", "test_nan_watch.py"],
    "torchtitan/checkpoint": [*ADAPTER, "test_export_fp8.py", "distributed/test_layouts.py"],
    "torchtitan/flavors": ["test_converter.py"],
    "torchtitan/parallel": [*ADAPTER, "test_patches.py", "test_modules.py", "test_overlap.py"],
    "torchtitan/compiling": ["test_compiling.py", "test_modules.py", "test_overlap.py", "distributed/test_auto.py"],
    "torchtitan/": [*ADAPTER, "test_modules.py", "test_compiling.py", "test_overlap.py"],
    "layer/statistics": ["test_statistics.py"],
    "layer/lora": ["test_lora.py"],
    "layer/ffn": ["test_lora.py", *CORE, "test_grouped.py", "test_statistics.py"],
    "kernels/sizes": ["kernels/test_swiglu.py"],
    "layer/operands": ["test_cache.py", "test_fp8_weights.py", "test_grouped.py"],
    "ops/lora": ["test_lora.py"],
    "ops/swiglu": ["test_ops.py", "test_any_layer.py"],
    "ops/quantize": ["test_ops.py", "test_cache.py", "test_fp8_weights.py"],
    "activations": ["test_recipe.py", "kernels/test_swiglu.py"],
    "nn/lora": ["test_lora.py"],
    "trainer/preflight": ["test_refusals.py", "test_titan_jobs.py"],
    "trainer/cpu": [*ADAPTER, "test_package.py"],
    "trainer/experts": [*ADAPTER, "distributed/test_layouts.py"],
    "trainer/plan": [*ADAPTER, "test_refusals.py", "test_export_fp8.py"],
    "trainer/": [*ADAPTER, "test_refusals.py"],
    "config": ["test_refusals.py", "test_converter.py", "test_moe.py"],
    "dispatch/": ["test_moe.py", "test_overlap.py", "test_warm_up.py", "distributed/test_layers.py"],
    "layer/checks": ["test_refusals.py", *CORE, "test_fp8_weights.py"],
    "layer/flops": ["test_public_api.py"],
    "layer/group": [*CORE, "test_statistics.py"],
    "layer/run": [*CORE, "test_refusals.py"],
    "layer/weights": CORE,
    "layer/experts": ["test_any_layer.py", "test_costs.py", "test_public_api.py", "test_overlap.py"],
    "nn/grouped": ["test_grouped.py", "test_refusals.py"],
    "nn/routing_replay": ["test_routing_replay.py"],
    "nn/parallel": ["test_parallel.py", "distributed/test_parallel.py"],
    "nn/linear": ["test_moe.py", "test_parallel.py"],
    "nn/modules": ["test_public_api.py", "test_moe.py", "test_parallel.py", "test_fp8_weights.py", "test_cache.py"],
    "ops/backend": ["test_ops.py", "test_moe.py", "test_graphs.py"],
    "ops/self_check": ["test_doctor.py"],
    "spec": ["test_refusals.py", *CORE],
    "recipe": [*CORE, "kernels/test_permute.py", "distributed/test_layers.py"],
    "doctor": ["test_doctor.py"],
    "versions": ["test_package.py"],
    "": CORE,
}
# They train nothing by themselves, or their tests need torchtitan 0.3.
LEFT_OUT = ("transformers.py", "peft.py", "torchao.py", "export_fp8", "__init__.py", "torchtitan03")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


class Mutation(NamedTuple):
    """``new`` replaces the source between two (line, column) positions of ``path``, a file of the package."""

    path: str
    start: tuple[int, int]
    end: tuple[int, int]
    new: str

    def apply(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        offsets = [sum(len(line.encode()) for line in lines[: row - 1]) for row in (self.start[0], self.end[0])]
        data = source.encode()
        return (data[: offsets[0] + self.start[1]] + self.new.encode() + data[offsets[1] + self.end[1] :]).decode()


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What could stand in place of an expression or a statement."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "contiguous":
        yield node.func.value
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def left_alone(tree: ast.AST) -> Iterator[ast.AST]:
    """Annotations, decorators and messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.JoinedStr):
            yield node
        parts = [getattr(node, field, None) for field in ("annotation", "returns")]
        yield from filter(None, [*parts, *getattr(node, "decorator_list", ())])


def mutations(path: Path) -> list[Mutation]:
    tree = ast.parse(path.read_text())
    skipped = {id(child) for root in left_alone(tree) for child in ast.walk(root)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped or not hasattr(node, "end_lineno"):
            continue
        for new in replacements(node):
            text = ast.unparse(ast.fix_missing_locations(new))
            text = text if isinstance(new, ast.Pass) else f"({text})"
            start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            found.append(Mutation(str(path.relative_to(ROOT)), start, end, text))
    return found


def sample(seed: int, count: int) -> list[Mutation]:
    """``count`` mutations, spread over files by the root of their sizes."""
    files = [p for p in sorted(PACKAGE.rglob("*.py")) if not any(part in str(p) for part in LEFT_OUT)]
    by_file = {path: found for path in files if (found := mutations(path))}
    generator, chosen = random.Random(seed), []
    weights = [len(found) ** 0.5 for found in by_file.values()]
    while len(chosen) < count:
        path = generator.choices(list(by_file), weights)[0]
        mutation = generator.choice(by_file[path])
        if mutation not in chosen:
            chosen.append(mutation)
    return chosen


def notice(copy: Path, mutation: Mutation) -> str | None:
    """The first test file that fails on the mutated copy, or None."""
    below = str(Path(mutation.path).relative_to("titan_fp8moe"))
    names = next(tests for beginning, tests in TESTS.items() if below.startswith(beginning))
    for name in names:
        env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        env |= {"TRITON_INTERPRET": "1"} if name.startswith("kernels/") else {}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{name}"]
        try:
            done = subprocess.run(command, cwd=copy, env=env, capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"{name} (hangs)"
        if done.returncode not in (0, 5):
            return name
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/mutations.jsonl")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if args.out.exists():
        records = map(json.loads, args.out.read_text().splitlines())
        known = {json.dumps(record["mutation"]): record["noticed_by"] for record in records}
    chosen = sample(args.seed, args.count)
    sources = {mutation.path: (ROOT / mutation.path).read_text() for mutation in chosen}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv*", "outputs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutation in chosen:
            key = json.dumps(mutation)
            if key not in known:
                source = sources[mutation.path]
                (copy / mutation.path).write_text(mutation.apply(source))
                known[key] = notice(copy, mutation)
                (copy / mutation.path).write_text(source)
                with args.out.open("a") as file:
                    print(json.dumps({"mutation": mutation, "noticed_by": known[key]}), file=file)
            line = sources[mutation.path].splitlines()[mutation.start[0] - 1].strip()
            print(
                f"{known[key] or 'SURVIVED':32} {mutation.path}:{mutation.start[0]}  {line}  ->  {mutation.new}",
                flush=True,
            )
    killed = sum(known[json.dumps(mutation)] is not None for mutation in chosen)
    print(f"{killed} of {len(chosen)} mutations were noticed")


if __name__ == "__main__":
    main()
