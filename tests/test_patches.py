"""Changes of other packages: each is listed and undone, and none is made elsewhere."""

import functools
import importlib
import importlib.util
import logging
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed.expert_parallel import ReordererSequenceParallel
from torchtitan.models.deepseek_v3.infra import parallelize

from tests import jobs
from tests.layer import refused
from tests.patched import assert_listed_and_undone, snapshot, undone
from titan_fp8moe import patches, peft
from titan_fp8moe.torchtitan import compiling, converter, cpu, flavors, metrics, parallel
from titan_fp8moe.trainer import preflight

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
    """Another package, without changes of this process."""
    module: Any = ModuleType("other")
    module.Base, module.number, module.registry, module.ops, module.hooks = Base, 1, {"a": 1}, {"x"}, {}
    sys.modules["other"] = module
    with undone():
        yield module
    del sys.modules["other"]


def twice(function):
    return lambda *args: 2 * function(*args)


def test_each_change_is_listed_once_and_undone(other, caplog):
    static, by = vars(Base)["static"], f"by {__name__}, checked on other 1.0"
    for _ in range(2):
        patches.wrap(Base, "static", lambda f: staticmethod(twice(f)), **ON)
        patches.wrap(Derived, "inherited", twice, **ON)
        patches.wrap(other, "ops", lambda ops: ops | {"y"}, **ON)
        patches.put("other", "number", 2, **ON)
        patches.put("other:registry", "b", 2, **ON)
        with caplog.at_level(logging.INFO):
            patches.log()
    assert Base.static(1) == 2 and Derived().inherited() == "basebase" and Base().inherited() == "base"
    assert other.ops == {"x", "y"} and other.number == 2 and other.registry == {"a": 1, "b": 2}
    names = f"{__name__}:Base.static", f"{__name__}:Derived.inherited", "other:ops", "other:number", "other:registry[b]"
    assert patches.listed() == [f"{name}, {by}" for name in names]
    assert [line for line in caplog.messages if "of other" in line] == [
        "FP8-Flow-MoE changes in this process of other: ops, number, registry[b] (titan_fp8moe/patches.py)"
    ]
    patches.undo_all()
    assert vars(Base)["static"] is static and "inherited" not in vars(Derived)
    assert other.ops == {"x"} and other.number == 1 and other.registry == {"a": 1} and not patches.listed()


def test_a_value_is_put_again(other):
    """The first one is what undoing restores."""
    for value in (2, 3):
        patches.put(other, "number", value, **ON)
        assert other.number == value
    with undone():
        assert other.number == 1
        patches.put(other, "number", 4, **ON)
    assert other.number == 3 and len(patches.listed()) == 1
    patches.undo_all()
    assert other.number == 1


def test_two_modules_change_one_value(other):
    """They are undone from the last to the first, and made again in their order."""
    patches.put(other, "number", 2, **ON)
    elsewhere = FunctionType(patch_number.__code__, globals() | {"__name__": "elsewhere"})
    elsewhere(other, 3)
    assert len(patches.listed()) == 2
    with undone():
        assert other.number == 1
    assert other.number == 3
    patches.undo_all()
    assert other.number == 1


def patch_number(other, value):
    patches.put(other, "number", value, **ON)


def test_hooks_of_optimizers():
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped.append(optimizer)

    stepped, optimizer = [], torch.optim.SGD([nn.Parameter(torch.ones(1))])
    register = "torch.optim.optimizer:register_optimizer_step_post_hook"
    with undone():
        for _ in range(2):
            patches.hook(register, hook, **ON)
        optimizer.step()
        assert len(stepped) == 1
        with undone():
            optimizer.step()
        assert len(stepped) == 1
        optimizer.step()
        assert len(stepped) == 2 and len(patches.listed()) == 1
    optimizer.step()
    assert len(stepped) == 2


def test_what_is_gone_is_named(other):
    for change in (
        lambda: patches.wrap(other, "gone", twice, **ON),
        lambda: patches.put("other", "gone", 1, **ON),
        lambda: patches.hook("other:gone", twice, **ON),
    ):
        with refused("other.gone, which titan_fp8moe needs", "checked on: other 1.0", error=RuntimeError):
            change()
    assert not patches.listed()


@pytest.mark.parametrize("whose", ["before", "after"])
def test_a_users_wrapper_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch, whose: str):
    """``functools.wraps`` copies all attributes of what it wraps, those of our wrapper too."""
    called = []

    def users(apply_compile):
        @functools.wraps(apply_compile)
        def wrapper(*args: Any) -> None:
            called.append("user")
            apply_compile(*args)

        return wrapper

    monkeypatch.setattr(compiling, "why_submodules", lambda block: called.append("ours") or "not converted")
    block = nn.Module()
    block.moe_enabled = False
    model: Any = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    with undone(), monkeypatch.context() as patched:
        patched.setattr(parallelize, "apply_compile", lambda *_: called.append("torchtitan"))
        with undone():
            if whose == "before":
                parallelize.apply_compile = users(parallelize.apply_compile)
            compiling.install(parallelize)
            if whose == "after":
                parallelize.apply_compile = users(parallelize.apply_compile)
            compiling.install(parallelize)
            parallelize.apply_compile(model, None, False)
    order = ["ours", "user"] if whose == "before" else ["user", "ours"]
    assert called == [*order, "torchtitan"]


@pytest.mark.parametrize("name", ["should_log", "_apply", "_activate_lora"])
def test_users_wrappers_stay(name: str):
    """Around what torchtitan or PEFT has, and around what we have put in its place."""

    def users(function):
        return functools.wraps(function)(lambda *args: function(*args))

    if name == "_activate_lora":
        owner, install = pytest.importorskip("peft.tuners.lora").ParamWrapper, lambda: peft.run_beside(lambda _: True)
    elif name == "_apply":
        owner, install = ReordererSequenceParallel, parallel.install
    else:
        owner, install = MetricsProcessor, metrics.look_after_each_step
    with undone(), pytest.MonkeyPatch.context() as patched:
        first = users(getattr(owner, name))
        patched.setattr(owner, name, first)
        with undone():
            install()
            ours = getattr(owner, name)
            assert ours is not first and ours.__wrapped__ is first
            second = users(ours)
            setattr(owner, name, second)
            install()
            assert getattr(owner, name) is second


def test_torchtitan():
    config = jobs.make_config("--fp8_flow_moe.cache_weights")
    model = jobs.make_model(config)
    with undone():
        before = snapshot()
        converter.register()
        flavors.register_flavors()
        if not torch.cuda.is_available():
            cpu.enable_cpu_training()
        jobs.convert(config, model)
        assert_listed_and_undone(before)


def test_transformers_and_peft():
    adapter = pytest.importorskip("titan_fp8moe.transformers")
    if importlib.util.find_spec("peft") is not None:
        importlib.import_module("peft.tuners.lora")
    with undone():
        before = snapshot()
        adapter.register()
        adapter.register()
        assert_listed_and_undone(before)


def test_a_dry_run_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch):
    """A notebook may check a job before it trains one."""
    from titan_fp8moe.torchtitan import dry_run

    monkeypatch.setattr(sys, "argv", ["dry_run", "train_configs/debug.toml", "--rank", "5"])
    with pytest.raises(SystemExit):
        dry_run.from_command_line(None)
    assert preflight.trains_here()
