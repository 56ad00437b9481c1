"""Kernels that are compiled ahead are those that a layer launches."""

import ctypes
import functools
import gc
import io
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.offline_compile import record_launches
from tests.processes import call, run_checks, time_limit
from titan_fp8moe import ops, recipe
from titan_fp8moe import warm_up as command
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.base import Route
from titan_fp8moe.dispatch.symmetric import kernels as symmetric
from titan_fp8moe.kernels import launch, swiglu, warm_up
from titan_fp8moe.layer import experts, on_meta, statistics
from titan_fp8moe.layer.group import _FeedForward, feed_forward
from titan_fp8moe.layer.run import Experts, Shared, run_layer
from titan_fp8moe.layer.saved import Inputs, LayerSpec
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.recipe import FP8, row_capacity
from titan_fp8moe.spec import ExpertSpec, encode

T, K, E, D, H = 96, 2, 4, 256, 128
SWIGLU = ExpertSpec()
SHAPES = ((E, H, D), (E, D, H), (E, H, D)), ((H, D), (D, H), (H, D))


def layer_of(spec: ExpertSpec = SWIGLU, shared: bool = False, flags: bool = False, **settings):
    config = Fp8FlowMoEConfig(**settings)
    layer = LayerSpec(config.route(None), spec, config.backward, "trained" if shared else "", True)
    shapes = (E, H, D), (E, D, H), (E, H, D)
    weights = [torch.empty(shape) for shape in shapes]
    shared_weights = [torch.empty(1, *shape[1:]) for shape in shapes] if shared else []
    x, ids = torch.empty(T, D, dtype=torch.bfloat16), torch.empty(T, K, dtype=torch.int64)
    nan_flags = torch.zeros(2, 1, dtype=torch.uint8) if flags else None
    tensors = x, ids, nan_flags, weights, shared_weights
    return functools.partial(on_meta.experts, experts._on_meta, *tensors, layer)


def names(launches) -> list[str]:
    return [kernel.kernel.__name__ for kernel, *_ in launches]


@pytest.mark.parametrize(
    "how",
    [
        {},
        dict(recompute="experts", shared=True, flags=True),
        dict(save_h="fp8", wgrad="scaling_aware"),
        dict(spec=ExpertSpec.of("clamped_swiglu")._replace(biased=True), recompute="none"),
    ],
)
def test_all_kernels_of_a_layer(how):
    launches = warm_up.recorded(layer_of(**how))
    found = names(launches)
    gemms = [name for name in found if "hopper" in name]
    assert found[: len(gemms)] == gemms and set(gemms) == {"grouped_mm_hopper_kernel", "wgrad_hopper_kernel"}
    assert {"_quantize_weight_kernel", "_permute_kernel", "_swiglu_kernel", "_swiglu_backward_kernel"} <= {*found}
    unaligned = [name for name, (_, args, _) in zip(found, launches, strict=True) if any(map(is_unaligned, args))]
    assert ("_quantize_tiles_kernel" in unaligned) == ("flags" in how)  # the second flag is one of two bytes


@pytest.mark.parametrize("shared", ["", "trained", "frozen"])
@pytest.mark.parametrize("weights", ["trained", "frozen", "adapted"])
def test_frozen_weights_have_no_weight_gradients(weights, shared):
    """Adapted ones are taken for trained: adapters read the same operands."""
    layer = layer_of(shared=bool(shared))
    *tensors, spec = layer.args
    spec = spec._replace(backward=spec.backward._replace(weights=weights), shared=shared)
    found = names(warm_up.recorded(functools.partial(layer.func, *tensors, spec)))
    trained = [weights != "frozen", shared == "trained"]
    assert ("wgrad_hopper_kernel" in found) == any(trained)
    x, backward = torch.empty(T, D), spec.backward
    ffn = functools.partial(on_meta.ffn, _FeedForward.apply, x, [torch.empty(1, *s) for s in SHAPES[1]], None)
    if weights != "adapted":
        found = names(warm_up.recorded(functools.partial(ffn, backward, x.dtype)))
        assert ("wgrad_hopper_kernel" in found) == trained[0]


@pytest.mark.parametrize("fused", [True, False], ids=["gate and up in one", "apart"])
@pytest.mark.parametrize("scales", recipe.SCALE_BITS)
def test_weights_that_are_quantized_and_padded(fused, scales):
    """D is 192 and H 80; stored weights have 256 and 128. Their GEMMs are those for their scales; none is quantized."""

    def stored(N: int, K: int) -> list[torch.Tensor]:
        scale = torch.empty(E, N // 128, K // 128, dtype=scales)
        return [torch.empty(E, N, K, dtype=torch.float8_e4m3fn), scale]

    up = [None, None] if fused else stored(128, 256)
    pairs = stored(256 if fused else 128, 256), stored(256, 128), up
    weights = [q for q, _ in pairs] + [scale for _, scale in pairs]
    config = Fp8FlowMoEConfig()
    layer = LayerSpec(config.route(None), SWIGLU, config.backward._replace(weights="frozen"), "", True)
    x, ids = torch.empty(T, 192, dtype=torch.bfloat16), torch.empty(T, K, dtype=torch.int64)
    run = functools.partial(on_meta.experts, experts._on_meta, x, ids, None, weights, [], layer)
    launches = warm_up.recorded(run)
    found = names(launches)
    assert "grouped_mm_hopper_kernel" in found and "wgrad_hopper_kernel" not in found
    assert "_join_weight_kernel" in found and "_quantize_weight_kernel" not in found
    shifts = {constants["B_SHIFT"] for _, _, constants in launches if "B_SHIFT" in constants}
    assert shifts == {recipe.SCALE_BITS[scales][1]}


def test_the_first_op_compiles_shared_experts_whose_tokens_travel(monkeypatch):
    def compile_ahead(kind, tensors, run):
        raise StopIteration(*run.args[-2])

    monkeypatch.setattr(warm_up, "is_due", lambda kind, x: True)
    monkeypatch.setattr(warm_up, "compile_ahead", compile_ahead)
    config, route = Fp8FlowMoEConfig(), Route("all_to_all", 2)
    call = experts.Call(LayerSpec(route, SWIGLU, config.backward, "trained", True), None, None, None)
    routed, shared = (ExpertWeights(*map(torch.empty, matrices)) for matrices in SHAPES)
    pairs = torch.empty(T, K), torch.empty(T, K, dtype=torch.int64)
    with pytest.raises(StopIteration) as compiled:
        experts.run_experts(Inputs(torch.empty(T, D), *pairs, weights=routed, shared=shared).flatten(), call)
    assert [w.shape for w in compiled.value.args] == [(1, *w.shape) for w in shared]


@pytest.mark.parametrize("quantized", [False, True])
def test_all_kernels_of_an_ffn(quantized):
    weights = [torch.empty(1, *shape) for shape in ((H, D), (D, H), (H, D))]
    if quantized:  # gate and up in one
        weights = [torch.empty(1, *shape).to(FP8) for shape in ((2 * H, D), (D, H))] + [None]
    x, backward = torch.empty(T, D, dtype=torch.bfloat16), Fp8FlowMoEConfig().backward
    found = names(
        warm_up.recorded(functools.partial(on_meta.ffn, _FeedForward.apply, x, weights, None, backward, x.dtype))
    )
    assert {"grouped_mm_hopper_kernel", "wgrad_hopper_kernel", "_swiglu_kernel", "_swiglu_backward_kernel"} <= {*found}
    assert "_permute_kernel" not in found


def is_unaligned(arg) -> bool:
    return isinstance(arg, warm_up._Pointer) and arg.data_ptr() % 16 != 0


def swiglu_of_the_layer(count: int, device: str) -> list:
    """The first arguments of the layer's SwiGLU kernel, as its own launch function passes them."""
    rows = row_capacity(T * K, E)
    tensors = [((rows, 2 * H), torch.bfloat16), ((rows,), torch.float32), ((E + 1,), torch.int32)]
    h, score, offsets = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in tensors)
    (launch,) = record_launches(swiglu.swiglu_quantize, h, score, offsets, SWIGLU, False)
    args = [launch.arguments[name] for name in launch.kernel.arg_names[:count]]
    return [torch.empty_like(arg, device=device) if isinstance(arg, torch.Tensor) else arg for arg in args]


@pytest.fixture
def swiglu_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = warm_up.recorded(layer_of())
    launch = launches[names(launches).index("_swiglu_kernel")]
    active = driver._active
    yield launch
    driver.set_active(active)
    launch[0].kernel.device_caches.clear()


def test_a_share_is_what_a_layer_finds(swiglu_launch, tmp_path):
    """In Triton's cache on disk, and under the key that tensors in memory have."""
    kernel, args, constants = swiglu_launch
    warm_up.compile_share([swiglu_launch])
    found = kernel.kernel.device_caches[0][0]
    known = len(found)
    kernel.compile(tuple(swiglu_of_the_layer(len(args), "cpu")), constants)
    assert len(found) == known == 1
    assert [*tmp_path.rglob("_swiglu_kernel.cubin")]


LIBCUDA = (
    "CtxGetCurrent CtxSetCurrent DeviceGet DevicePrimaryCtxRetain FuncSetAttribute GetErrorString PointerGetAttribute"
)


@pytest.mark.skipif(not hasattr(nvidia, "make_launcher"), reason="this Triton has one launcher for all kernels")
def test_a_share_has_its_launchers(swiglu_launch, tmp_path, monkeypatch):
    """A job then starts no C compiler. Without libcuda there are only kernels, and no error."""
    kernel, args, constants = swiglu_launch
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [str(tmp_path)])
    warm_up.compile_share([swiglu_launch])
    assert [*tmp_path.rglob("_swiglu_kernel.cubin")] and not [*tmp_path.rglob("__triton_launcher*.so")]
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text("".join(f"void cu{name}(void) {{}}\n" for name in LIBCUDA.split()))
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    ctypes.CDLL(str(library))
    warm_up.compile_share([swiglu_launch])
    monkeypatch.setattr(build, "_build", None)
    compiled = kernel.compile(args, constants)
    assert callable(nvidia.CudaLauncher(compiled.src, compiled.metadata).launch)


def launched(launches: Iterable[warm_up.Launch]) -> set[str]:
    """Readable keys of launches, the same in every process."""
    return {f"{k.kernel.__name__} {k._key(0, args, constants)[0]}" for k, args, constants in launches}


def kernels_of_job(*arguments: str) -> set[str]:
    """The launches that ``titan_fp8moe.warm_up`` compiles for a job."""
    found: list[warm_up.Launch] = []
    sys.argv = ["warm_up", *arguments]
    warm_up.begin = lambda shares, deadline: found.extend(launch for share in shares for launch in share) or []
    command.main()
    return launched(found)


def matrices_of_16b(E: int, H: int, dtype: torch.dtype, device: str = "meta") -> list[Tensor]:
    D = 2048
    return [torch.empty(shape, dtype=dtype, device=device) for shape in ((E, H, D), (E, D, H), (E, H, D))]


def kernels_of_16b(T: int) -> set[str]:
    """The launches of a MoE layer of 16B and of its dense FFN that a job on eight ranks compiles when they begin. FSDP
    gathers FFNs in bf16. Under EP 8 it leaves experts alone, which are in fp32."""
    matrices = matrices_of_16b
    dist.init_process_group("fake", rank=0, world_size=8)
    config, flags = Fp8FlowMoEConfig(), torch.empty(2, 16, dtype=torch.uint8)
    x = torch.empty(T, 2048, dtype=torch.bfloat16, device="meta")
    layer = LayerSpec(config.route(dist.group.WORLD), SWIGLU, config.backward, "trained", True)
    ids, shared = torch.empty(T, 6, dtype=torch.int64), matrices(1, 2 * 1408, torch.bfloat16)
    tensors = x, ids, flags, matrices(8, 1408, torch.float32), shared
    launches = warm_up.recorded(functools.partial(on_meta.experts, experts._on_meta, *tensors, layer))
    weights = matrices(1, 10944, torch.bfloat16)
    launches += warm_up.recorded(
        functools.partial(on_meta.ffn, _FeedForward.apply, x, weights, flags, config.backward, x.dtype)
    )
    return launched(launches)


def test_the_kernels_of_a_job():
    job = "train_configs/deepseek_v3_16b.toml", "--training.local_batch_size=1", "--training.seq_len=256"
    assert call(kernels_of_job, *job) == call(kernels_of_16b, 256)


def real_launches(run: Callable[[], None]) -> set[str]:
    """The launches of layers whose tensors are on a CPU, which they leave as they are. Only dispatch counts are real.
    For a process of its own."""

    def dispatch_routing(*args):
        count(*args)
        return recipe.dispatch_routing(*args[:4])

    count, ops.dispatch_routing = ops.dispatch_routing, cast(Any, dispatch_routing)
    symmetric.INTERPRETED_SPINS = 0
    for name, module in sys.modules.items():
        if name.startswith("titan_fp8moe") and "use_kernels" in vars(module):
            cast(Any, module).use_kernels = lambda x: True
        if name.startswith("titan_fp8moe") and "is_tracing" in vars(module):
            cast(Any, module).is_tracing = lambda x: False
    found = launched(warm_up.recorded(run))
    ops.dispatch_routing = count
    return found


def leaves(tensors: Iterable[Tensor]) -> ExpertWeights:
    return ExpertWeights(*(t.requires_grad_() for t in tensors))


def real_kernels_of_16b_short(T: int) -> set[str]:
    """Without FSDP the residual stream is fp32, and autocast makes the dense FFN's output bf16."""
    config, flags = Fp8FlowMoEConfig(), torch.zeros(2, 16, dtype=torch.uint8)
    x, scores = torch.zeros(T, 2048, requires_grad=True), torch.ones(T, 6, requires_grad=True)
    ids = torch.zeros(T, 6, dtype=torch.int64)
    routed, shared, ffn = (
        matrices_of_16b(*sizes, torch.float32, "cpu") for sizes in ((64, 1408), (1, 2816), (1, 10944))
    )

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = feed_forward(x, leaves(w[0] for w in ffn), config, nan_flags=flags)
            of_shared, experts = Shared(leaves(w[0] for w in shared)), Experts(leaves(routed), config, nan_flags=flags)
            z = run_layer(x, ids, scores, experts, of_shared)
        y.backward(torch.zeros_like(y))
        z.backward(torch.zeros_like(z))

    return real_launches(run)


def test_the_kernels_of_a_job_on_one_gpu():
    sizes = "--training.local_batch_size=1", "--training.seq_len=256"
    ahead = call(kernels_of_job, "train_configs/deepseek_v3_16b_short.toml", *sizes)
    assert ahead == call(real_kernels_of_16b_short, 256)
    assert "_probe_kernel" in {launch.split()[0] for launch in ahead}


def compare_with_real_layers(tokens: int) -> None:
    """What the ops of a layer on several ranks compile, when they first run, are all kernels that it launches. Rank 0
    alone compiles, as in a job: it would wait for others if it transferred anything."""
    dist.init_process_group("gloo")
    rank, group, flags = dist.get_rank(), dist.group.WORLD, torch.zeros(2, 16, dtype=torch.uint8)
    shapes = (E, H, D), (E, D, H), (E, H, D)
    for backend, hidden_dim in itertools.product(("all_to_all", "symmetric"), (None, 384)):
        T, config = tokens + rank * (backend == "all_to_all"), Fp8FlowMoEConfig(dispatch=backend)
        routed, x, scores = [torch.zeros(shape) for shape in shapes], torch.zeros(T, D).bfloat16(), torch.rand(T, K)
        ids = torch.rand(T, 2 * E).topk(K).indices
        sizes = [] if hidden_dim is None else [(1, hidden_dim, D), (1, D, hidden_dim), (1, hidden_dim, D)]
        shared = [torch.zeros(shape) for shape in sizes]

        def run() -> None:
            of_shared = Shared(leaves(w[0] for w in shared)) if shared else None  # noqa: B023
            experts = Experts(leaves(routed), config, group, nan_flags=flags)  # noqa: B023
            out = run_layer(x.requires_grad_(), ids, scores.requires_grad_(), experts, of_shared)  # noqa: B023
            out.backward(torch.zeros_like(out))

        spec = LayerSpec(config.route(group), SWIGLU, config.backward, "trained" if shared else "", True)
        real = real_launches(run)
        if rank > 0:
            continue
        tensors = x, ids, flags, routed, shared
        ahead = warm_up.recorded(functools.partial(on_meta.experts, experts._on_meta, *tensors, spec))
        assert real == launched(ahead), backend
    print("all checks passed")


@pytest.mark.parametrize("tokens", [1, 96])
def test_the_kernels_of_two_ranks(tokens):
    """Whatever the number of tokens is: 1, a multiple of 16, or one more than these."""
    program = f"from tests.test_warm_up import compare_with_real_layers as compare; compare({tokens})"
    run_checks("-c", 2, program, cpu_only=True)


def test_a_rank_without_fp8(monkeypatch, capsys):
    dry_run = SimpleNamespace(from_command_line=lambda _: None, layers=lambda _: [])
    monkeypatch.setattr(command.importlib, "import_module", lambda _: dry_run)
    command.main()
    assert capsys.readouterr().out == "Nothing to compile: this rank has no layer in FP8\n"


def test_a_line_before_the_first_kernel(monkeypatch):
    """It has left the buffer when the processes begin."""

    def begin(shares, deadline):
        assert sys.stdout.buffer.getvalue() == b"Compiling 5 kernels in 2 processes\n" and deadline == 0
        return []

    monkeypatch.setattr(command.importlib, "import_module", lambda _: SimpleNamespace(from_command_line=lambda _: None))
    monkeypatch.setattr(warm_up, "recorded", lambda _: list(range(5)))
    monkeypatch.setattr(warm_up, "begin", begin)
    monkeypatch.setattr(warm_up, "MAX_PROCESSES", 8)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    command.main()


def test_another_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    with pytest.raises(SystemExit, match="for Hopper GPUs, and this is a NVIDIA L4"):
        command.main()


def test_processes_that_fail_or_hang(swiglu_launch, tmp_path, monkeypatch):
    """The others' kernels are in the cache, and the hanging one is ended, whatever signals this thread blocks. None
    holds what its parent has open."""
    kernel, args, _ = swiglu_launch
    held = os.open(os.devnull, os.O_RDONLY)

    class Hanging:
        def compile(self, *_):
            time.sleep(600)

    class Holding:
        def compile(self, *_):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(held)

    fork, pids = os.fork, []
    monkeypatch.setattr(warm_up.os, "fork", lambda: (pids.append(pid := fork()), pid)[1])
    begin = time.monotonic()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    processes = warm_up.begin([[swiglu_launch], [], [(kernel, args, {"NO_SUCH": 1})], [(Holding(), (), {})]])
    processes += warm_up.begin([[(Hanging(), (), {})]], time_limit(0.5))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.close(held)
    assert processes == pids and os.waitid(os.P_PID, pids[-1], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    assert warm_up.wait(processes) == 2
    assert time.monotonic() - begin < time_limit(15)
    assert [*tmp_path.rglob("_swiglu_kernel.cubin")]
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_layer_that_does_not_run_on_meta_tensors(monkeypatch, caplog):
    monkeypatch.setattr(warm_up, "MAX_PROCESSES", 8)
    monkeypatch.setattr(warm_up, "is_hopper", lambda x: True)
    warm_up.compile_ahead("broken", [torch.empty(1)], lambda: 1 / 0)
    assert "one after the other" in caplog.text and "ZeroDivisionError" in caplog.text


def test_what_leaves_a_layer_on_meta_tensors_alone():
    """Statistics, and compiled autograd: it would wait for the lock of Dynamo, which waits where it traces."""
    alone = launched(warm_up.recorded(layer_of()))
    with compiled_autograd._enable(None):  # as a compiler this fails
        assert launched(warm_up.recorded(layer_of())) == alone
        assert compiled_autograd.compiled_autograd_enabled
    statistics.collect()
    assert launched(warm_up.recorded(layer_of())) == alone
    assert statistics.collecting() and statistics.take("cpu").device.type == "cpu"


def test_threads_record_apart():
    """Each its own launches, also when another begins or ends meanwhile."""

    def record():
        with launch.recording() as launches:
            launch.launch_probe("meta")
            return len(launches)

    with launch.recording() as mine, ThreadPoolExecutor(1) as thread:
        launch.launch_probe("meta")
        assert not thread.submit(launch.is_recording).result()
        assert thread.submit(record).result() == 1 and launch.is_recording()
        launch.launch_probe("meta")
    assert len(mine) == 2 and not launch.is_recording()


class Stuck:
    def compile(self, *_):
        time.sleep(600)


class Dying:
    def compile(self, *_):
        os.kill(os.getpid(), signal.SIGKILL)


def ahead_of(monkeypatch, *kernels) -> None:
    """Lets layers compile these kernels ahead, in a process each, on a GPU that is said to be there."""
    monkeypatch.setattr(warm_up, "MAX_PROCESSES", len(kernels))
    monkeypatch.setattr(warm_up, "seen", set())
    monkeypatch.setattr(warm_up, "_begun", {})
    monkeypatch.setattr(warm_up, "is_hopper", lambda x: True)
    monkeypatch.setattr(warm_up, "recorded", lambda _: [(kernel, (), {}) for kernel in kernels])
    monkeypatch.setattr(warm_up.os, "sched_getaffinity", lambda _: range(64))


def test_processes_that_die_or_hang_are_told_of(monkeypatch, caplog):
    """A call says for what it waits, and how many processes have not done their work."""
    ahead_of(monkeypatch, Dying(), Stuck())
    monkeypatch.setattr(warm_up, "PATIENCE", 0.1)
    monkeypatch.setattr(warm_up.begin, "__defaults__", (1.0,))
    begin = time.monotonic()
    warm_up.compile_ahead("kind", [torch.empty(1)], None)
    assert time.monotonic() - begin < time_limit(20)
    assert "still compile in other processes" in caplog.text and "2 of 2 processes" in caplog.text
    assert warm_up.seen == {"kind"} and not warm_up._begun


def test_a_process_that_hangs_before_it_watches_itself_is_killed():
    """As in the destructor of a gloo group, whose threads a fork does not have."""
    if (pid := os.fork()) == 0:
        while True:
            time.sleep(1)
    assert warm_up.wait([pid], 0.1) == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def hanging_forks() -> int:
    """Of a process that may collect a gloo group at any time."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        gc.set_threshold(1 << 30)
        garbage = [dist.group.WORLD]
        garbage.append(garbage)
        dist.destroy_process_group()
    del garbage
    os.register_at_fork(after_in_child=lambda: gc.isenabled() and gc.collect())
    hanging = warm_up.wait(warm_up.begin([[(SimpleNamespace(compile=print), (), {})]]), time_limit(5))
    assert gc.isenabled()
    return hanging


def test_processes_collect_no_garbage():
    """The destructor of a gloo group waits for threads that a fork does not have."""
    assert call(hanging_forks) == 0


def test_a_layer_that_is_traced_and_never_called_leaves_no_zombies(monkeypatch):
    ahead_of(monkeypatch, Dying(), Dying())
    fork, pids = os.fork, []
    monkeypatch.setattr(warm_up.os, "fork", lambda: (pids.append(pid := fork()), pid)[1])
    with FakeTensorMode():
        x = torch.empty(1)
    warm_up.compile_ahead("kind", [x], None)
    assert len(pids) == 2
    for _ in range(int(time_limit(200))):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.1)
    pytest.fail("processes that nobody has waited for")


class Compiling:
    """In the place of processes, on five CPUs with a Hopper GPU."""

    def __init__(self, monkeypatch):
        self.begun: list = []
        self.waited: list[int] = []
        for name, value in dict(
            seen=set(), _begun={}, MAX_PROCESSES=8, is_hopper=lambda x: True, begin=self.begin, wait=self.waited.extend
        ).items():
            monkeypatch.setattr(warm_up, name, value)
        monkeypatch.setattr(warm_up.os, "sched_getaffinity", lambda _: range(5))

    def begin(self, shares: list) -> list[int]:
        self.begun += shares
        return [*range(len(shares))]


def test_threads_call_a_layer_at_once(monkeypatch):
    """One of them begins the processes. None is forked: that frees what the other threads' locals hold, and hangs where
    it is a gloo group."""
    compiling = Compiling(monkeypatch)
    monkeypatch.setattr(warm_up, "begin", lambda shares: (time.sleep(0.2), compiling.begin(shares))[1])
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(warm_up.compile_ahead, "kind", [torch.empty(1)], layer_of()) for _ in range(4)]:
            done.result()
    assert len(compiling.begun) == len(compiling.waited) == 5 and warm_up.seen == {"kind"} and not warm_up._begun


@pytest.mark.parametrize("make", [torch.Tensor.detach, torch.nn.Parameter], ids=["tensor", "parameter"])
@pytest.mark.parametrize(
    "how", [dict(rank="1"), dict(cpus=1), dict(hopper=False), dict()], ids=lambda how: "".join(how)
)
def test_who_compiles(monkeypatch, how, make):
    """One rank of a node, with CPUs for it and a Hopper GPU. A parameter is no trace."""
    compiling = Compiling(monkeypatch)
    monkeypatch.setattr(warm_up, "is_hopper", lambda x: how.get("hopper", True))
    monkeypatch.setattr(warm_up.os, "sched_getaffinity", lambda _: range(how.get("cpus", 5)))
    monkeypatch.setenv("LOCAL_RANK", how.get("rank", "0"))
    warm_up.compile_ahead("kind", [make(torch.empty(1))], layer_of())
    assert compiling.waited == ([] if how else [*range(5)]) and warm_up.seen == {"kind"} and not warm_up._begun
    launches = [launch for share in compiling.begun for launch in share]
    assert len(compiling.begun) == len(compiling.waited) and len({*map(id, launches)}) == len(launches)


def test_a_traced_layer(monkeypatch):
    """Its kernels begin to compile once, when torch.compile traces it, and are those of a call. That waits for them."""
    compiling, config = Compiling(monkeypatch), Fp8FlowMoEConfig()
    layer = encode(LayerSpec(config.route(None), SWIGLU, config.backward, "trained", True))
    shapes = [(n, *shape) for n in (E, 1) for shape in ((H, D), (D, H), (H, D))]

    def run(x, scores, ids, *weights):
        routed, shared = weights[:3], weights[3:]
        parameters = routed, shared, [], [], None, layer
        return torch.ops.titan_fp8moe.routed_experts_forward(x, scores, ids, None, True, *parameters)

    x, ids = ((T, D), torch.bfloat16), ((T, K), torch.int64)
    inputs = x, ((T, K), torch.float32), ids, *((shape, torch.float32) for shape in shapes)
    compile_ahead = warm_up.compile_ahead

    def and_no_more(*args):  # the rest of the op takes PyTorch with CUDA
        raise StopIteration(compile_ahead(*args))

    with FakeTensorMode(), monkeypatch.context() as tracing:
        tracing.setattr(warm_up, "compile_ahead", and_no_more)
        tracing.setattr(torch.compiler, "_is_compiling_flag", True)  # of the process, in later versions
        for _ in range(2):
            tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in inputs]
            with pytest.raises(StopIteration):
                make_fx(run)(*tensors)
    assert len(compiling.begun) == 5 and not warm_up.seen
    launches = launched(launch for share in compiling.begun for launch in share)
    assert launches == launched(warm_up.recorded(layer_of(shared=True)))
    ((kind, _),) = warm_up._begun.items()
    warm_up.compile_ahead(kind, [torch.empty(1)], layer_of())
    assert len(compiling.begun) == 5 and compiling.waited == [*range(5)] and warm_up.seen == {kind}


def test_a_layer_traced_with_symbols(monkeypatch):
    """Its sizes, also those of weights, are known to the call alone. A kind that has symbols has no hash."""
    compiling = Compiling(monkeypatch)

    def trace(*tensors):
        x = torch.empty(T, D)
        for first, *others in (tensors, (x, None, *tensors)):
            warm_up.compile_ahead(("kind", first.shape, *others), [first, *others], layer_of())
        return x

    make_fx(trace, tracing_mode="symbolic")(torch.empty(T, D), torch.empty(E, H, D))
    assert not compiling.begun and not warm_up.seen
    warm_up.compile_ahead("kind", [torch.empty(1)], layer_of())
    assert len(compiling.begun) == len(compiling.waited) == 5


def test_a_fake_layer_on_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(warm_up, "_begun", {})
    monkeypatch.setattr(warm_up, "MAX_PROCESSES", 8)
    with FakeTensorMode():
        x = torch.empty(1, device=f"cuda:{torch.cuda.device_count()}")
    warm_up.compile_ahead("kind", [x], layer_of())
    assert warm_up._begun == {"kind": None}


def test_what_is_due(monkeypatch):
    monkeypatch.setattr(warm_up, "seen", {"kind"})
    with FakeTensorMode():
        assert warm_up.is_due(["no hash"], torch.empty(1, device="cuda"))
    assert not warm_up.is_due("other", torch.empty(1))
    on_gpu = SimpleNamespace(is_cuda=True)
    assert warm_up.is_due("other", on_gpu) and not warm_up.is_due("kind", on_gpu)


def test_a_process_that_nobody_learns_of(swiglu_launch, monkeypatch):
    """Where SIGCHLD is ignored there is nothing to wait for, and no error. Nor is there one where a process may not
    begin another."""
    kernel, args, _ = swiglu_launch
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert warm_up.wait(warm_up.begin([[(kernel, args, {"NO_SUCH": 1})]])) == 0
    finally:
        signal.signal(signal.SIGCHLD, ignored)
    monkeypatch.setattr(warm_up, "seen", set())
    monkeypatch.setattr(warm_up, "MAX_PROCESSES", 8)
    monkeypatch.setattr(warm_up, "is_hopper", lambda x: True)

    def fork():
        raise BlockingIOError

    monkeypatch.setattr(warm_up.os, "fork", fork)
    warm_up.compile_ahead("kind", [torch.empty(1)], layer_of())
    assert warm_up.seen == {"kind"}
