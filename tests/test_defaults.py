"""Nothing depends on the process-wide defaults of dtype and device, which Lightning, vLLM and DeepSpeed change."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "titan_fp8moe"
OF_FLOATS = {"empty", "empty_strided", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
FACTORIES = OF_FLOATS | {"arange", "as_tensor", "asarray", "eye", "randint", "randperm"}
# Parameters of a module are made as nn.Linear's are: where and as the caller's defaults say.
OF_THE_CALLER = {"torchtitan03/lora.py": 1}


def test_every_tensor_states_dtype_and_device():
    silent: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name, stated = node.func.attr, {keyword.arg for keyword in node.keywords}
            needed = {"device", "dtype"} if name in OF_FLOATS else {"device"}
            if ast.unparse(node.func.value) == "torch" and name in FACTORIES and None not in stated and needed - stated:
                place = str(path.relative_to(PACKAGE))
                silent[place] = silent.get(place, 0) + 1
    assert silent == OF_THE_CALLER
