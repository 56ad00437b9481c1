"""Layers of the package and rooms that stay apart, read from the sources."""

import ast
import graphlib
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ADAPTERS = ("export_fp8", "peft", "torchao", "torchtitan", "torchtitan03", "transformers")
# Children of titan_fp8moe, each layer above those that it may import. "" is titan_fp8moe/__init__.py.
LAYERS = [
    {"patches"},
    {"activations", "recipe", "rows", "spec", "versions"},
    {"kernels", "ops"},
    {"dispatch"},
    {"config"},
    {"layer"},
    {"nn"},
    {""},
    {"doctor", "trainer"},
    set(ADAPTERS) | {"warm_up"},
]
CORE_PACKAGES = {"torch", "triton", "titan_fp8moe", *sys.stdlib_module_names}
ROOMS = ("experiments", "tests", "titan_fp8moe", "tools")


@cache
def modules(room: str) -> dict[str, ast.Module]:
    """The syntax tree of each module of a room."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / room).rglob("*.py"))]
    names = {".".join(path.parts).removesuffix(".__init__"): path for path in paths}
    return {name: ast.parse((ROOT / path).with_suffix(".py").read_text()) for name, path in names.items()}


def room_of(module: str) -> str:
    return module.split(".")[0]


@cache
def imports(room: str) -> dict[str, set[str]]:
    """By module of a room, those that it imports, anywhere; ``from package import module`` imports the module."""
    found: dict[str, set[str]] = {name: set() for name in modules(room)}
    for name, tree in modules(room).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, "imports are absolute"
                children = {f"{node.module}.{alias.name}" for alias in node.names}
                own = modules(room_of(node.module)) if room_of(node.module) in ROOMS else {}
                found[name] |= {child if child in own else node.module for child in children}
    return found


def layer(module: str) -> int:
    """Index into ``LAYERS`` of a module of the package."""
    child = [*module.split("."), ""][1]
    found = [index for index, names in enumerate(LAYERS) if child in names]
    assert found, f"titan_fp8moe.{child} has no layer; add it to LAYERS in tests/test_rooms.py"
    return found[0]


def is_upward(importer: str, module: str) -> bool:
    return room_of(module) == "titan_fp8moe" and layer(module) > layer(importer)


def is_foreign_to_the_core(importer: str, module: str) -> bool:
    is_adapter = importer.startswith(tuple(f"titan_fp8moe.{name}" for name in ADAPTERS))
    return not is_adapter and room_of(module) not in CORE_PACKAGES


@pytest.mark.parametrize(("room", "forbidden"), [
    ("titan_fp8moe", is_upward),
    ("titan_fp8moe", is_foreign_to_the_core),
    ("titan_fp8moe", lambda _, module: room_of(module) in {"experiments", "tests", "tools"}),
    ("experiments", lambda _, module: room_of(module) == "tests"),
    ("tools", lambda _, module: room_of(module) in {"tests", "experiments"}),
])  # fmt: skip
def test_no_forbidden_import(room: str, forbidden: Callable[[str, str], bool]):
    assert imports(room)
    assert not [(name, other) for name, others in imports(room).items() for other in others if forbidden(name, other)]


def test_no_import_cycle():
    """Of statements; a package's ``__init__`` that is imported on the way to its modules does not count."""
    package = imports("titan_fp8moe")
    graphlib.TopologicalSorter({name: others & package.keys() for name, others in package.items()}).prepare()


def test_only_patches_change_other_packages():
    """Assignments to attributes and items of what another package defines, and its global hooks."""
    registers = re.compile(r"register_\w*(optimizer|module_(full_)?(forward|backward|module|buffer|param))\w*_hook")
    found = []
    for name, tree in modules("titan_fp8moe").items():
        foreign = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if room_of(getattr(node, "module", None) or alias.name) not in {*ROOMS, *sys.stdlib_module_names}
        }
        for node in ast.walk(tree):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else []:
                while isinstance(target, ast.Attribute | ast.Subscript):
                    target = target.value
                    if isinstance(target, ast.Name) and target.id in foreign:
                        found.append(f"{name}: {ast.unparse(node)}")
            if isinstance(node, ast.Call) and registers.search(ast.unparse(node.func)):
                found.append(f"{name}: {ast.unparse(node)}")
    assert not found
