"""Kernels remember what Triton compiled, for exactly the arguments that Triton would find it for."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import jit

from titan_fp8moe.kernels import launch
from titan_fp8moe.kernels.gemm import grouped_mm
from titan_fp8moe.kernels.gemm import launch as gemm_launch
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.recipe import E8M0, FP8


@Kernel
@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["y"])
def three(x, y, z, desc, n, m, SIZE: tl.constexpr, FLAG: tl.constexpr):
    pass


BACKEND = make_backend(GPUTarget("cuda", 90, 32))
BINDER = jit.create_function_from_signature(three.kernel.signature, three.kernel.params, BACKEND)
BUFFER = torch.empty(4096, dtype=torch.uint8)


def no_driver(device=0):
    """A context in which launches find this current device."""
    names = dict(_cuda_getDevice=lambda: device, _cuda_getCurrentRawStream=lambda device: f"stream {device}")
    return patch.multiple(torch._C, create=True, **names)


def of_triton(args, constants):
    """The key under which Triton keeps what it compiled."""
    args = [a.view(torch.uint8) if isinstance(a, torch.Tensor) and a.dtype == E8M0 else a for a in args]
    _, specialization, options = BINDER(*args, **constants)
    return jit.compute_cache_key({}, specialization, options)


tensors = st.builds(
    lambda offset, dtype, parameter: (torch.nn.Parameter if parameter else torch.Tensor.detach)(
        BUFFER[offset : offset + 1024].view(dtype)
    ),
    st.sampled_from([0, 4, 8, 16, 32]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)
scales = st.builds(lambda o, d: BUFFER[o : o + 16].view(d), st.sampled_from([0, 1, 16]), st.sampled_from([E8M0, FP8]))
descriptors = st.builds(
    lambda dtype, make: make(torch.empty(128, 128, dtype=dtype)),
    st.sampled_from([FP8, torch.bfloat16, torch.float32]),
    st.sampled_from([gemm_launch.operand, gemm_launch.result]),
)
numbers = st.sampled_from([0, 1, 2, 15, 16, 17, 48, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**40])
parameters = [tensors | st.none(), tensors | st.none(), scales, descriptors, numbers, numbers]
constants = st.fixed_dictionaries(
    {"SIZE": st.sampled_from([1, 2, 128]), "FLAG": st.booleans()},
    optional={name: st.sampled_from([4, 8]) for name in ("num_warps", "num_stages")},
)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_one_key_is_one_compiled_kernel(data):
    """Of calls that differ in one argument, or in constants."""
    calls = [([data.draw(values) for values in parameters], data.draw(constants))]
    for index, values in enumerate(parameters):
        for _ in range(3):
            args = calls[0][0].copy()
            args[index] = data.draw(values)
            calls.append((args, calls[0][1]))
    calls += [(calls[0][0], data.draw(constants)) for _ in range(3)]
    found = {}
    with no_driver():
        for args, values in calls:
            expected = of_triton(args, values)
            assert found.setdefault(three._key(0, args, values)[0], expected) == expected


class Compiled:
    """Records calls of Triton's JIT, and the arguments of launches of the kernel that it compiled."""

    function, packed_metadata, capturing = "function", "metadata", False

    def __init__(self):
        self.jit_calls, self.launched, self.launched_by_triton = [], [], []

    def run(self, *args):
        self.launched.append(args)

    def __getitem__(self, grid):
        return lambda *args: self.launched_by_triton.append((grid, args))


@pytest.fixture
def recorded(monkeypatch):
    record = Compiled()

    def run(kernel, *args, grid, warmup, **constants):
        record.jit_calls.append((args, constants))
        return record

    three._compiled.clear()
    record.probe = Mock(return_value=torch.tensor([1]))
    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr(launch, "_fast", None)
    monkeypatch.setattr(launch, "launch_probe", record.probe)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: record.capturing)
    with no_driver():
        yield record


def args(n=16, m=3, x=BUFFER):
    return x, BUFFER, BUFFER[:16].view(E8M0), gemm_launch.operand(torch.empty(128, 128, dtype=FP8)), n, m


def test_what_was_compiled_is_launched_with_all_arguments_in_order(recorded):
    three[(5,)](*args(), SIZE=1, FLAG=True, num_warps=4)
    assert len(recorded.jit_calls) == 1 and not recorded.launched  # Triton launches what it compiles
    again = args(n=32, m=2**20)
    three[(7, 2)](*again, num_warps=4, SIZE=1, FLAG=True)
    three[(7, 2)](*again, SIZE=1, FLAG=True, num_warps=4)
    three[(7, 2)](*again, SIZE=1, FLAG=True, num_stages=4)
    assert len(recorded.jit_calls) == 3  # the second names its options in another order, the last another option
    addresses = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in again]
    assert recorded.launched == [(7, 2, 1, "stream 0", "function", "metadata", None, None, None, *addresses, 1, True)]


def test_a_stream_for_launches_alone(recorded, monkeypatch):
    """Triton's own launches are made with it as PyTorch's current stream."""
    entered, side = [], SimpleNamespace(cuda_stream="side")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(entered.append(stream)))
    for stream in (side, None):
        with launch.on_stream(stream):
            for _ in range(2):
                three[(5,)](*args(), SIZE=1 if stream is None else 2, FLAG=True)
    three[(5,)](*args(), SIZE=1, FLAG=True)
    streams = [launched[3] for launched in recorded.launched]
    assert entered == [side, None] and streams == ["side", "stream 0", "stream 0"]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("value", ["in the chain", None, print])
def test_launches_with_hooks_are_left_to_triton(recorded, monkeypatch, hook, value):
    """Also those that are no chain."""
    three[(5,)](*args(), SIZE=1, FLAG=True)
    if value == "in the chain":
        chain = getattr(triton.knobs.runtime, hook)
        monkeypatch.setattr(chain, "calls", [*chain.calls, print])
    else:
        monkeypatch.setattr(triton.knobs.runtime, hook, value)
    three[(5,)](*(again := args()), SIZE=1, FLAG=True)
    assert recorded.launched_by_triton == [((5, 1, 1), (*again, 1, True))] and not recorded.launched


# Triton's JIT rejects memory that the GPU cannot read.
ELSEWHERE = SimpleNamespace(dtype=BUFFER.dtype, data_ptr=BUFFER.data_ptr, get_device=lambda: BUFFER.get_device() + 1)


@pytest.mark.parametrize(("x", "device"), [(ELSEWHERE, 0), (BUFFER, 1)])
def test_launches_on_another_device_go_through_the_jit_again(recorded, x, device):
    three[(1,)](*args(), SIZE=1, FLAG=True)
    with no_driver(device):
        three[(1,)](*args(x=x), SIZE=1, FLAG=True)
    assert len(recorded.jit_calls) == 2
    assert all(passed[2].dtype == torch.uint8 for passed, _ in recorded.jit_calls)  # scales arrive as bytes


@pytest.mark.parametrize("here", [torch.tensor([2]), TypeError("function takes exactly 5 arguments")])
def test_a_launcher_that_has_changed_is_left_to_triton(recorded, here):
    """With one warning, and without another probe."""
    recorded.probe.side_effect = [torch.tensor([1]), here]
    three[(5,)](*args(), SIZE=1, FLAG=True)
    with pytest.warns(UserWarning, match=r"Triton .*'s own launcher.*(\[2\] instead of \[1\]|exactly 5)"):
        three[(5,)](*args(), SIZE=1, FLAG=True)
    for _ in range(2):
        three[(5,)](*args(), SIZE=1, FLAG=True)
    assert len(recorded.jit_calls) == 4 and not recorded.launched


def test_the_launcher_is_compared_once(recorded):
    """Not while a graph is captured, which Triton launches."""
    recorded.capturing = True
    for _ in range(2):
        three[(5,)](*args(), SIZE=1, FLAG=True)
    assert not recorded.probe.called and len(recorded.jit_calls) == 2
    recorded.capturing = False
    for _ in range(3):
        three[(5,)](*args(), SIZE=1, FLAG=True)
    assert recorded.probe.call_count == 2 and len(recorded.jit_calls) == 2 and len(recorded.launched) == 3


def test_descriptors_are_those_of_tritons_constructor():
    x = torch.empty(3, 256, 384, dtype=FP8)
    for make, block in ((gemm_launch.operand, 128), (gemm_launch.result, 64)):
        rows = x.view(-1, 384)
        want = gemm_launch.TensorDescriptor.from_tensor(rows, [block, block], gemm_launch._layout(FP8, block))
        got = make(x)
        assert {**vars(got), "base": None} == {**vars(want), "base": None, "shape": (768, 384), "strides": (384, 1)}
        assert got.base is x and list(got.shape) == list(want.shape) and list(got.strides) == list(want.strides)


def test_recordings_nest_and_threads_record_apart():
    """A trace within a recording adds to its list. Meta tensors, whose launches somebody reads, are no trace. Another
    thread may begin or end its own meanwhile."""

    def record():
        with launch.recording() as launches:
            launch.launch_probe("meta")
            return len(launches)

    with launch.recording() as outer, ThreadPoolExecutor(1) as thread:
        with launch.recording() as inner:
            assert inner is outer
        assert launch.is_recording() and launch.is_tracing(torch.empty(1, device="cpu"))
        assert not launch.is_tracing(torch.empty(1, device="meta"))
        assert grouped_mm.is_hopper(BUFFER)
        assert not thread.submit(launch.is_recording).result()
        assert thread.submit(record).result() == record() == len(outer) == 1
    assert not launch.is_recording() and not launch.is_tracing(torch.empty(1, device="cpu"))
    assert not grouped_mm.is_hopper(BUFFER)
