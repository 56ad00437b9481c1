"""Tests without the changes of other packages, and what this package has changed there, found without its list."""

import functools
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.optim import optimizer

from titan_fp8moe import patches

PACKAGES = ("torch", "triton", "torchtitan", "torchao", "transformers", "peft")
STEP_HOOKS = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks  # the hooks of patches.hook
# torch.jit fills its table when it is first used.
NOT_OURS = {"torch.utils.hooks:RemovableHandle.next_id", "torch.jit._builtins:_builtin_table"}


@contextmanager
def undone() -> Iterator[None]:
    """Runs a test without the changes made so far. At the end they are made again, and those of the test undone."""
    before, logged = dict(patches._changes), set(patches._logged)
    stores = [change.undo.args[:2] for change in before.values() if isinstance(change.undo, functools.partial)]
    values = [patches._stored(*store) for store in stores]
    hooks = [(found, found.copy()) for found in STEP_HOOKS]
    patches.undo_all()
    try:
        yield
    finally:
        patches.undo_all()
        for store, value in zip(stores, values, strict=True):
            patches._store(*store, value)
        for found, kept in hooks:
            found.update(kept)
        patches._changes.update(before)
        patches._logged.update(logged)


Place = tuple[int, str]  # an owner and a name there, by which a value is the same under another name
Snapshot = dict[str, tuple[Any, Place]]
NOTHING = (object(), (0, ""))


def snapshot() -> Snapshot:
    """Every attribute of all loaded modules of the packages and of their classes, and what their containers hold."""
    found: Snapshot = {}
    classes: set[type] = set()
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] not in PACKAGES or type(module) is not ModuleType:
            continue
        for name, value in list(vars(module).items()):
            if name == "__builtins__":  # Python's own, in every module
                continue
            found[f"{path}:{name}"] = value, (id(module), name)
            for item, inside in contents(value, is_hooks=name.endswith("_hooks")):
                found[f"{path}:{name}{item}"] = inside, (id(value), item)
            if issubclass(type(value), type) and value.__module__.split(".")[0] in PACKAGES:
                classes |= {value, *(inside for inside in vars(value).values() if type(inside) is type)}
    for cls in classes:
        for name, value in vars(cls).items():
            if name != "__slotnames__":  # the copy module's own memory
                found[f"{cls.__module__}:{cls.__qualname__}.{name}"] = value, (id(cls), name)
    return found


def contents(value: Any, is_hooks: bool) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in (dict, OrderedDict) or kind.__name__.endswith("ExpertsInterface"):  # others import what they list
        for key, item in list(value.items()):
            yield f"[{getattr(item if is_hooks else key, '__qualname__', key)}]", item
    elif issubclass(kind, set):
        yield from ((f"{{{item}}}", True) for item in list(value))


def changed(before: Snapshot, after: Snapshot) -> dict[str, Place]:
    """Names whose values are others, with their places. Modules that were loaded in between count for nothing."""
    modules, places = {name.partition(":")[0] for name in before}, {}
    for name in before.keys() | after.keys():
        (old, at), (new, _) = before.get(name, NOTHING), after.get(name, NOTHING)
        ours = name.partition(":")[0] in modules and name.partition("[")[0] not in NOT_OURS
        if ours and old is not new and type(new) is not ModuleType:
            places[name] = at if name not in after else after[name][1]
    # A container that was replaced counts, and not what it holds.
    inside = {name for name in places if name.endswith(("]", "}"))}
    kept = {name for name in inside if name.split("[")[0].split("{")[0] not in places.keys() - inside}
    return {name: place for name, place in places.items() if name in kept or name not in inside}


def assert_listed_and_undone(before: Snapshot) -> None:
    """What has changed since ``before`` is what the list of changes says, and undoing these restores it."""
    listed = set()
    for line in patches.listed():
        what = line.partition(", by ")[0]
        for when in ("pre", "post"):
            what = what.replace(f"register_optimizer_step_{when}_hook(", f"_global_optimizer_{when}_hooks(")
        listed.add(what.replace("(", "[").replace(")", "]"))
    found = changed(before, snapshot())
    by_list = {found[name] for name in listed & found.keys()}
    assert listed and not listed - found.keys()
    assert not {name for name, place in found.items() if place not in by_list}
    patches.undo_all()
    assert not changed(before, snapshot())
