"""Changes of other packages by the adapter for torchtitan 0.3: each is listed and undone."""

import ast
import pkgutil
import re
from pathlib import Path

import torch

from tests.patched import assert_listed_and_undone, snapshot, undone
from tests.torchtitan03.test_converter import convert, make_job
from titan_fp8moe.torchtitan03 import cpu, names


def test_torchtitan():
    with undone():
        before = snapshot()
        if not torch.cuda.is_available():
            cpu.enable_cpu_training()
        convert(make_job())
        assert_listed_and_undone(before)


def test_names_of_torchtitan_are_in_one_file():
    """That imports them, and lists those that torchtitan does not promise, each of which exists."""
    for path in Path(names.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            assert path.name == "names.py" or not str(module).startswith("torchtitan."), path
    private = re.findall(r"torchtitan\.[\w.]+:[\w.]+", names.__doc__)
    assert len(private) == 14 and None not in map(pkgutil.resolve_name, private)
