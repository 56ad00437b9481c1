"""Layers of the package and rooms that stay apart, read from the sources."""

import ast
import graphlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
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


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(room: str) -> dict[str, ast.Module]:
    """The syntax tree of each module of a room."""
    return {module_name(path): ast.parse(path.read_text()) for path in sorted((ROOT / room).rglob("*.py"))}


def is_package(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).is_dir()


def is_module(name: str) -> bool:
    return is_package(name) or (ROOT / f"{name.replace('.', '/')}.py").is_file()


def imports(importer: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, the name taken from it or "") of each import statement, also of those inside functions.

    ``from package import module`` counts as an import of the module.
    """
    package = importer if is_package(importer) else importer.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                child = f"{source}.{alias.name}"
                yield (child, "") if source.split(".")[0] in ROOMS and is_module(child) else (source, alias.name)


def imported(importer: str, tree: ast.AST) -> set[str]:
    return {module for module, _ in imports(importer, tree)}


def layer(module: str) -> int:
    """Index into ``LAYERS`` of a module of the package."""
    child = [*module.split("."), ""][1]
    found = [index for index, names in enumerate(LAYERS) if child in names]
    assert found, f"titan_fp8moe.{child} has no layer; add it to LAYERS in tests/test_rooms.py"
    return found[0]


def is_adapter(module: str) -> bool:
    return module.startswith(tuple(f"titan_fp8moe.{name}" for name in ADAPTERS))


def offenders(room: str, forbidden: Callable[[str, str], bool]) -> dict[str, set[str]]:
    """By module of the room, the imports for which ``forbidden(importer, imported)`` is true."""
    assert modules(room), f"{room} has no modules"
    found = {name: {m for m in imported(name, tree) if forbidden(name, m)} for name, tree in modules(room).items()}
    return {name: imports for name, imports in found.items() if imports}


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_no_import_cycle():
    """Of statements; a package's ``__init__`` that is imported on the way to its modules does not count."""
    package = modules("titan_fp8moe")
    graph = {name: imported(name, tree) & package.keys() for name, tree in package.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_no_upward_import():
    def upward(importer: str, module: str) -> bool:
        return room_of(module) == "titan_fp8moe" and layer(module) > layer(importer)

    assert not offenders("titan_fp8moe", upward)


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


def test_core_imports_torch_and_triton_only():
    def foreign(importer: str, module: str) -> bool:
        return not is_adapter(importer) and room_of(module) not in CORE_PACKAGES

    assert not offenders("titan_fp8moe", foreign)


CLOSED = [
    ("titan_fp8moe", {"experiments", "tests", "tools"}),
    ("experiments", {"tests"}),
    ("tools", {"tests", "experiments"}),
]


@pytest.mark.parametrize("room,closed", CLOSED)
def test_rooms_stay_apart(room: str, closed: set[str]):
    assert not offenders(room, lambda importer, module: room_of(module) in closed)
