"""Changes of other packages: each is listed and undone, and none is made elsewhere."""

import functools
import logging
import sys
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.layer import refused
from tests.patched import assert_listed_and_undone, snapshot, undone
from titan_fp8moe import patches

ON = {"checked_on": "other 1.0"}


class Base:
    @staticmethod
    def static(n: int) -> int:
        return n

    def inherited(self) -> str:
        return "base"


class Derived(Base):
    pass


@pytest.fixture
def other():
    module: Any = ModuleType("other")
    module.Base, module.number, module.registry, module.ops = Base, 1, {"a": 1}, {"x"}
    sys.modules["other"] = module
    with undone():
        yield module
    del sys.modules["other"]


def twice(function):
    return lambda *args: 2 * function(*args)


def test_each_change_is_listed_once_and_undone(other, caplog):
    static, by = vars(Base)["static"], f"by {__name__}, checked on other 1.0"
    hooks: list[Any] = []
    other.register = lambda function: hooks.append(function) or SimpleNamespace(remove=hooks.clear)
    for _ in range(2):
        patches.wrap(Base, "static", lambda f: staticmethod(twice(f)), **ON)
        patches.wrap(Derived, "inherited", twice, **ON)
        patches.wrap(other, "ops", lambda ops: ops | {"y"}, **ON)
        patches.put("other", "number", 2, **ON)
        patches.put("other:registry", "b", 2, **ON)
        patches.hook("other:register", twice, **ON)
        with caplog.at_level(logging.INFO):
            patches.log()
    assert Base.static(1) == 2 and Derived().inherited() == "basebase" and Base().inherited() == "base"
    assert other.ops == {"x", "y"} and other.number == 2 and other.registry == {"a": 1, "b": 2} and hooks == [twice]
    names = ["ops", "number", "registry[b]", "register(twice)"]
    listed = [f"{__name__}:Base.static", f"{__name__}:Derived.inherited", *(f"other:{name}" for name in names)]
    assert patches.listed() == [f"{name}, {by}" for name in listed]
    (line,) = [line for line in caplog.messages if "of other" in line]
    assert line == f"FP8-Flow-MoE changes in this process of other: {', '.join(names)} (titan_fp8moe/patches.py)"
    patches.undo_all()
    assert vars(Base)["static"] is static and "inherited" not in vars(Derived)
    assert other.ops == {"x"} and other.number == 1 and other.registry == {"a": 1}
    assert not hooks and not patches.listed()


def test_a_value_that_is_put_twice(other):
    """By one module, or by two. Undoing restores the first value."""
    put = lambda value: patches.put(other, "number", value, **ON)  # noqa: E731
    elsewhere = FunctionType(put.__code__, globals() | {"__name__": "elsewhere"}, closure=put.__closure__)
    for again, listed in ((put, 1), (elsewhere, 2)):
        put(2)
        again(3)
        assert other.number == 3 and len(patches.listed()) == listed
        patches.undo_all()
        assert other.number == 1


def test_a_users_wrapper_is_not_taken_for_ours(other):
    """``functools.wraps`` copies all attributes of what it wraps, those of our wrapper too."""
    wrap = lambda: patches.wrap(other, "function", lambda f: functools.wraps(f)(twice(f)), **ON)  # noqa: E731
    other.function = abs
    wrap()
    ours = other.function
    other.function = functools.wraps(ours)(lambda n: ours(n) + 1)
    wrap()
    assert other.function(3) == 7


@pytest.mark.parametrize("change", [
    lambda: patches.wrap("other", "gone", twice, **ON),
    lambda: patches.put("other", "gone", 1, **ON),
    lambda: patches.hook("other:gone", twice, **ON),
])  # fmt: skip
def test_what_is_gone_is_named(other, change):
    with refused("other.gone, which titan_fp8moe needs", "checked on: other 1.0", error=RuntimeError):
        change()
    assert not patches.listed()


def test_transformers_and_peft():
    adapter = pytest.importorskip("titan_fp8moe.transformers")
    pytest.importorskip("peft.tuners.lora")  # which is changed too
    with undone():
        before = snapshot()
        adapter.register()
        adapter.register()
        assert_listed_and_undone(before)
