"""Kernels that are compiled ahead are those that a layer launches."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import driver

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from tests.offline_compile import record_launches
from titan_fp8moe import warm_up as worker
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels import swiglu, warm_up
from titan_fp8moe.layer.saved import LayerSpec
from titan_fp8moe.recipe import row_capacity
from titan_fp8moe.spec import ExpertSpec

T, K, E, D, H = 96, 2, 4, 256, 128
SWIGLU = ExpertSpec()


@pytest.fixture
def processes(monkeypatch):
    """Pretends that this is a Hopper machine of five CPUs, and yields what the processes would be told."""
    told, calls = [], []
    monkeypatch.setattr(warm_up, "started", False)
    monkeypatch.setattr(warm_up, "MAX_PROCESSES", 8)
    monkeypatch.setattr(warm_up, "_is_hopper", lambda device: True)
    monkeypatch.setattr(warm_up.os, "sched_getaffinity", lambda _: range(5))

    def popen(args, **kwargs):
        told.append(json.loads(args[-1]))
        calls.append(kwargs)

    monkeypatch.setattr(warm_up, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=None))
    yield told
    assert all(call["env"]["CUDA_VISIBLE_DEVICES"] == "" and "RANK" not in call["env"] for call in calls)


def start(spec: ExpertSpec = SWIGLU, shared: bool = False, flags: bool = False, **settings) -> None:
    config = Fp8FlowMoEConfig(**settings)
    layer = LayerSpec(config.route(None), spec, config.backward, "trained" if shared else "", True)
    shapes = (E, H, D), (E, D, H), (E, H, D)
    weights = [torch.empty(shape) for shape in shapes]
    shared_weights = [torch.empty(1, *shape[1:]) for shape in shapes] if shared else []
    x, ids = torch.empty(T, D, dtype=torch.bfloat16), torch.empty(T, K, dtype=torch.int64)
    nan_flags = torch.zeros(4, dtype=torch.uint8) if flags else None
    warm_up.start(x, ids, nan_flags, weights, shared_weights, layer.encode())


@pytest.mark.parametrize(
    "how",
    [
        {},
        dict(recompute="experts", shared=True, flags=True),
        dict(save_h="fp8", wgrad="scaling_aware"),
        dict(spec=ExpertSpec.of("clamped_swiglu")._replace(biased=True), recompute="none"),
    ],
)
def test_all_kernels_of_a_layer(processes, how):
    start(**how)
    assert warm_up.started and [work["share"] for work in processes] == [[i, 4] for i in range(4)]
    launches = worker.launches_of(processes[0])
    names = [kernel.kernel.__name__ for kernel, *_ in launches]
    gemms = [name for name in names if "hopper" in name]
    assert names[: len(gemms)] == gemms and set(gemms) == {"grouped_mm_hopper_kernel", "wgrad_hopper_kernel"}
    assert {"_quantize_weight_kernel", "_permute_kernel", "_swiglu_kernel", "_swiglu_backward_kernel"} <= {*names}
    unaligned = [name for name, (_, args, _) in zip(names, launches, strict=True) if any(map(is_unaligned, args))]
    assert ("_swiglu_kernel" in unaligned) == ("flags" in how)  # a flag is one of several bytes


def is_unaligned(arg) -> bool:
    return isinstance(arg, worker._Pointer) and arg.data_ptr() % 16 != 0


def swiglu_of_the_layer(count: int, device: str) -> list:
    """The first arguments of the layer's SwiGLU kernel, as its own launch function passes them."""
    rows = row_capacity(T * K, E)
    tensors = [((rows, 2 * H), torch.bfloat16), ((rows,), torch.float32), ((E + 1,), torch.int32)]
    h, score, offsets = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in tensors)
    (launch,) = record_launches(swiglu.swiglu_quantize, h, score, offsets, SWIGLU, False)
    args = [launch.arguments[name] for name in launch.kernel.arg_names[:count]]
    return [torch.empty_like(arg, device=device) if isinstance(arg, torch.Tensor) else arg for arg in args]


def test_a_share_is_what_a_layer_finds(processes, tmp_path, monkeypatch):
    """In Triton's cache on disk, and under the key that tensors in memory have."""
    start()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    work = processes[0]
    launches = worker.launches_of(work)
    index = [kernel.kernel.__name__ for kernel, *_ in launches].index("_swiglu_kernel")
    work["share"] = [index, len(launches)]
    kernel, args, constants = launches[index]
    active = driver._active
    try:
        assert worker.compile_share(work) == ["_swiglu_kernel"]
        found = kernel.kernel.device_caches[0][0]
        known = len(found)
        kernel.compile(tuple(swiglu_of_the_layer(len(args), "cpu")), constants)
        assert len(found) == known == 1
    finally:
        driver.set_active(active)
        kernel.kernel.device_caches.clear()
    assert [*tmp_path.rglob("_swiglu_kernel.cubin")]


def test_other_ranks_leave_it_to_the_first(processes, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    start()
    assert not processes


def test_a_process_that_cannot_start_is_a_warning(processes, monkeypatch, caplog):
    def popen(*args, **kwargs):
        raise OSError("no more processes")

    monkeypatch.setattr(warm_up, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=None))
    start()
    assert "compile one after the other" in caplog.text
