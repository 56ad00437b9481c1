"""A small layer for tests: its inputs, a step of it, and a count of what it casts. And how results are compared."""

import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from experiments import reference
from titan_fp8moe import ops
from titan_fp8moe.kernels import launch
from titan_fp8moe.layer.fp8_gather import Fp8GatheredWeight
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.run import Experts, Shared, run_layer
from titan_fp8moe.spec import ExpertSpec

T, D, H, E, K = 300, 256, 128, 8, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_equal(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """Bit for bit. FP8 codes and scales are compared as bytes."""
    for index, pair in enumerate(zip(got, want, strict=True)):
        a, b = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in pair)
        assert pair[0].dtype == pair[1].dtype and torch.equal(a, b), index


@contextlib.contextmanager
def refused(*said: str, error: type[BaseException] = ValueError) -> Iterator[None]:
    """Expects an error that names each setting and remedy in ``said``; no error if there are none."""
    if not said:
        yield
        return
    with pytest.raises(error) as raised:
        yield
    assert not [part for part in said if part not in str(raised.value)], raised.value


def make_layer(tokens=T, experts=E, dtype=torch.float32):
    return reference.make_layer(tokens, D, H, experts, K, dtype, DEVICE)


def gradients(function, leaves, dout):
    """The function's output, and the gradients of copies of the leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def apply_layer(
    x, weights, ids, scores, *, config, score_before_experts=False, meanwhile=None, shared=None, shared_cache=None,
    shared_frozen=False, shared_scores=None, **experts,
):  # fmt: skip
    """:func:`titan_fp8moe.layer.run.run_layer`, which modules call; ``experts``: other fields of Experts."""
    expert = ExpertSpec(score_before_experts=score_before_experts)
    ffn = None if shared is None else Shared(shared, shared_cache, shared_frozen, shared_scores)
    return run_layer(x, ids, scores, Experts(weights, config, expert=expert, **experts), ffn, meanwhile)


def look_into(mode: TorchDispatchMode, op: Any, args: tuple[Any, ...]) -> Any:
    """Runs an op's Python, of which the mode sees each operator."""
    with mode:
        return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)


class CastCounter(TorchDispatchMode):
    """Counts calls of this package's functions by name, and casts to fp8 outside of them. Looks into a layer's ops.

    Attributes:
        args: those of the last call, by name.
    """

    _COUNTED: ClassVar = {
        (ops.quantize if name.endswith("_weights") else ops, name): function
        for name, function in (vars(ops) | vars(ops.quantize)).items()
        if hasattr(function, "__wrapped__") and name[0] != "_"
    }

    def __init__(self):
        super().__init__()
        self.ops, self.args, self.stray_casts, self._depth = Counter(), {}, [], 0

    def __enter__(self):
        for (module, name), function in self._COUNTED.items():
            setattr(module, name, functools.partial(self._counted, name, function))
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._depth -= 1
        for (module, name), function in self._COUNTED.items() if self._depth == 0 else ():
            setattr(module, name, function)

    def _counted(self, name, function, *args, **kwargs):
        self.ops[name] += 1
        self.args[name] = args
        with _disable_current_modes():
            return function(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_fp8moe":
            self.ops[func._opname] += 1
            self.args[func._opname] = args
            return look_into(self, func, args)
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype.itemsize == 1 and out.dtype.is_floating_point:
            self.stray_casts.append(func.name())
        return out


class Checked(CrossRefFakeMode):
    """Compares the results of this package's ops with their fakes', for which graphs are compiled. Asserts that no
    result shares memory with an argument or another result.

    Attributes:
        calls: the ops with their arguments.
    """

    def __init__(self, with_fakes: bool = True):
        super().__init__(ignore_op_fn=lambda op: not with_fakes)
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "titan_fp8moe":
            return func(*args, **(kwargs or {}))
        # Lists are copied, which the caller may empty.
        self.calls.append((func, tree_map_only(Tensor, Tensor.detach, args)))
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        results = super().__torch_dispatch__(func, types, args, kwargs)
        made = [t.untyped_storage()._cdata for t in tree_leaves(results)]
        assert not given & {*made}, f"{func} returns an argument"
        assert len({*made}) == len(made), f"{func} returns a tensor twice"
        return results


class Allocated(TorchDispatchMode):
    """Counts the bytes of all storages that ops see, until they are freed. Looks into a layer's ops, where kernels
    allocate their results and are not launched.

    Attributes:
        peak: the most bytes at a time.
        made: the op, number of values and dtype of each tensor that has a new storage.
        kernels: names of the kernels.
    """

    def __init__(self):
        super().__init__()
        self.storages, self.peak = weakref.WeakValueDictionary(), 0
        self.made, self.kernels = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_fp8moe":
            # What is recorded, and its arguments, would live on.
            noted = lambda kernel, *_, **__: self.kernels.append(kernel.kernel.__name__)  # noqa: E731
            nothing = mock.patch.object(launch.Kernel, "_launch", noted)
            with launch.recording(), nothing:
                return look_into(self, func, args)
        self._see((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self.made += [(func._opname, t.numel(), t.dtype) for t in self._see(out)]
        self.peak = max(self.peak, self.held)
        return out

    def _see(self, tree: Any) -> list[Tensor]:
        """The tensors with storages that no op has seen."""
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and not isinstance(t, DTensor)]
        new = [t for t in tensors if t.untyped_storage()._cdata not in self.storages]
        self.storages |= {t.untyped_storage()._cdata: t.untyped_storage() for t in new}
        return new

    @property
    def held(self) -> int:
        return sum(storage.nbytes() for storage in list(self.storages.values()))


class Lifetimes:
    """Which tensors exist when GEMMs begin.

    Attributes:
        calls: for each GEMM, of each watched op which of its tensors exist.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gemms: Iterable[str], expected: list | None = None):
        self.calls: list[list[list[bool]]] = []
        self._refs: list[list[StorageWeakRef]] = []
        self._patch, self._expected = monkeypatch, expected
        for name in gemms:
            monkeypatch.setattr(ops, name, functools.partial(self._begin, getattr(ops, name)))

    def watch(self, name: str, argument: int | None = None) -> None:
        """The op's argument at this position, or its first result."""
        op, refs = getattr(ops, name), []
        self._refs.append(refs)

        def call(*args):
            out = op(*args)
            tensor = out[0] if argument is None else args[argument]
            if not isinstance(tensor, FakeTensor):  # of a trace
                refs.append(StorageWeakRef(tensor.untyped_storage()))
            return out

        self._patch.setattr(ops, name, call)

    def _begin(self, gemm, *args):
        deadline = time.monotonic() + 5
        while True:  # gloo's thread may own what has arrived for some milliseconds more
            alive = [[not ref.expired() for ref in refs] for refs in self._refs]
            if self._expected is None or alive in self._expected[len(self.calls) :][:1] or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        if not isinstance(args[0], FakeTensor):
            self.calls.append(alive)
        return gemm(*args)


def gathered(weight: Tensor) -> torch.nn.Parameter:
    """A parameter as FSDP makes it of gathered FP8."""
    return torch.nn.Parameter(Fp8GatheredWeight(ops.quantize_weight(weight.detach()), weight.shape[1:], weight.dtype))


def generations(cache: WeightCache) -> list[int]:
    """How many times forwards have quantized each operand of a cache."""
    return [] if cache.copies is None else [int(operand.state[2]) for operand in cache.copies.operands]


def saved_bytes(forward):
    """The result of ``forward()``, and the bytes of the storages that autograd saves in it."""
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return forward(), sum(saved.values())
