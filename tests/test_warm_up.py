"""Kernels that are compiled ahead are those that a layer launches."""

import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from tests.conftest import begin
from tests.offline_compile import each
from tests.processes import call, ended_well, run_workers, time_limit
from titan_fp8moe import Adapter, Lora, ops, recipe
from titan_fp8moe import warm_up as command
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.symmetric import kernels as symmetric
from titan_fp8moe.kernels import compile as worker
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.kernels.gemm import forward as forward_gemm
from titan_fp8moe.kernels.gemm import wgrad
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.run import Experts, Shared, experts_of, run_layer
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.ops import Fp8Weight, backend
from titan_fp8moe.spec import ExpertSpec

T, K, E, D, H = 96, 2, 4, 256, 128


def launched(launches: Iterable[worker.Launch]) -> set[str]:
    """Readable keys of launches, the same in every process."""
    return {f"{k.kernel.__name__} {k._key(0, args, constants)[0]}" for k, args, constants in launches}


def matrices(E: int, H: int, D: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ExpertWeights:
    shapes = (E, H, D), (E, D, H), (E, H, D)
    return each(lambda shape: torch.zeros(shape, dtype=dtype, device=device, requires_grad=True), shapes)


def one(*sizes: Any, **options: Any) -> ExpertWeights:
    """The matrices of a single FFN."""
    return each(lambda w: w[0].detach().requires_grad_(), matrices(1, *sizes, **options))


# --- layers -----------------------------------------------------------------------------------------------------------


def forward(T: int, experts: Experts, shared: Any = None) -> Tensor:
    x = torch.zeros(T, D, dtype=torch.bfloat16, requires_grad=True)
    ids, scores = torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K, requires_grad=True)
    return run_layer(x, ids, scores, experts, shared)


def a_layer(spec: Any = None, biases: Any = (None, None, None), lora: Any = None, weights: Any = None, **settings: Any):
    weights = weights or matrices(E, H, D)
    return experts_of(weights, Fp8FlowMoEConfig(**settings), spec or ExpertSpec(), biases, lora)


def layers() -> dict[str, Callable[[], Tensor]]:
    """Layers by what is special about them, on a CPU."""
    run, flags = functools.partial(forward, T), torch.zeros(2, 1, dtype=torch.uint8)
    frozen = each(Tensor.detach, matrices(E, H, D))
    stored = each(Fp8Weight.quantize, frozen)
    fp32 = each(lambda w: w._replace(scale=w.scale.float()), stored)
    biases = [torch.zeros(E, n).requires_grad_() for n in (H, D, H)]
    factors = [(torch.zeros(E, 16, k), torch.zeros(E, n, 16)) for n, k in ((H, D), (D, H), (H, D))]
    lora = Lora(*(Adapter(a.requires_grad_(), b.requires_grad_(), 1.0) for a, b in factors))
    x = torch.zeros(T, D).requires_grad_()
    return {
        "plain": lambda: run(a_layer()),
        "shared": lambda: run(a_layer(recompute="experts")._replace(nan_flags=flags), Shared(one(384, D))),
        "FP8 h": lambda: run(a_layer(save_h="fp8", wgrad="scaling_aware")),
        "biases": lambda: run(a_layer(ExpertSpec.of("clamped_swiglu"), biases, recompute="none")),
        "stored": lambda: run(a_layer(weights=stored)),
        "stored with fp32 scales": lambda: run(a_layer(weights=fp32)),
        "adapters": lambda: run(a_layer(weights=frozen, lora=lora)),
        "FFN": lambda: feed_forward(x, one(H, D), Fp8FlowMoEConfig()),
        "linear": lambda: linear(x, torch.zeros(H, D).requires_grad_(), Fp8FlowMoEConfig()),
    }


def told_to(sent: list[bytes]) -> Any:
    """In the place of the process that compiles: its input goes to the list."""
    return SimpleNamespace(stdin=SimpleNamespace(write=sent.append, close=lambda: sent.append(b"")))


def ahead(told: bytes) -> set[str]:
    """The launches that the process compiles from this input."""
    return launched(worker.apply_message(pickle.loads(told)[1]))


def real_and_told(layer: Callable[[], Tensor]) -> tuple[set[str], bytes]:
    """The launches of a layer whose tensors are on a CPU, which they leave as they are, and what it tells a process.
    Only dispatch counts are real. For a process of its own."""

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
    sent: list[bytes] = []
    warm_up.is_due = lambda kind, x: not x.is_meta
    warm_up.begin = lambda: told_to(sent)
    real = launched(worker.recorded([layer]))
    ops.dispatch_routing = count
    return real, sent[0]


def real_and_told_of(name: str) -> tuple[set[str], bytes]:
    return real_and_told(layers()[name])


@pytest.mark.parametrize("name", list(layers()))
def test_the_kernels_of_a_layer(name):
    real, told = call(real_and_told_of, name)
    assert ahead(told) == real and {"grouped_mm_hopper_kernel", "_probe_kernel"} < {key.split()[0] for key in real}


@pytest.mark.parametrize("name", ["shared", "FFN"])
def test_the_kernels_of_a_compiled_layer(name, monkeypatch):
    """Each op sends a message when it is traced for a GPU, once."""
    sent: list[bytes] = []

    def traced(*call: Any) -> None:
        with monkeypatch.context() as patches:
            patches.setattr(FakeTensor, "is_cuda", True, raising=False)
            warm_up.compile_traced(*call)

    monkeypatch.setattr(warm_up, "begin", lambda: told_to(sent))
    monkeypatch.setattr(warm_up, "seen", set())
    monkeypatch.setattr(warm_up, "use_inductors_ptxas", lambda: monkeypatch.setenv("TRITON_PTXAS_PATH", "Inductor's"))
    monkeypatch.setattr(backend, "compile_traced", traced)
    layer = layers()[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for _ in range(2):
            out = layer()
            out.backward(torch.empty_like(out))
    assert len(sent) == 3
    for told in sent:  # by another ptxas's kernels the job's launches would find nothing
        assert pickle.loads(pickle.loads(told)[1])[0]["TRITON_PTXAS_PATH"] == "Inductor's"
    real, _ = call(real_and_told_of, name)
    assert set().union(*map(ahead, sent)) == real


def compare_on_two_ranks() -> None:
    """A process that compiles has no group. Whatever the number of tokens is: 1, a multiple of 16, or one more."""
    dist.init_process_group("gloo")
    mesh, found = init_device_mesh("cpu", (2,)), []
    sharded = each(lambda w: DTensor.from_local(w, mesh, [Shard(0)]), matrices(E, H, D))
    for dispatch, tokens in itertools.product(("all_to_all", "symmetric"), (1, 96)):
        tokens += dist.get_rank() * (dispatch == "all_to_all")
        for weights, shared in ((None, None), (sharded, Shared(one(384, D)))):
            experts = a_layer(weights=weights, dispatch=dispatch)._replace(ep_group=dist.group.WORLD)
            found.append(real_and_told(functools.partial(forward, tokens, experts, shared)))
    dist.destroy_process_group()
    for real, told in found:
        assert ahead(told) == real
    print("all kernels are equal")


def test_the_kernels_of_two_ranks():
    done = run_workers("-c", 2, "from tests.test_warm_up import compare_on_two_ranks as run; run()", cpu_only=True)
    assert ended_well(done) and done.stdout.count("all kernels are equal") == 2, done.stdout + done.stderr


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def layer(tmp_path, monkeypatch):
    """With a frozen weight, on meta tensors. What it launches is compiled into an empty cache."""
    active = driver._active
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, w = (torch.zeros(n, D, device="meta", requires_grad=n == T) for n in (T, H))
    yield functools.partial(linear, x, w, Fp8FlowMoEConfig(), frozen=True)
    driver.set_active(active)


def test_a_launch_finds_its_kernel(layer, monkeypatch):
    """In Triton's cache on disk: of layers that a job announces and of a traced op, whose message has another form."""
    monkeypatch.setattr(warm_up.grouped_mm, "_is_hopper", lambda device: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(FakeTensor, "is_cuda", True, raising=False)
    sent, process = [], begin.__wrapped__()
    monkeypatch.setattr(warm_up, "begin", lambda: told_to(sent))
    monkeypatch.setattr(warm_up, "seen", set())
    with FakeTensorMode():
        warm_up.compile_traced("quantize_rows", (torch.empty(T, D),), {})
    warm_up.compile_job([layer])
    launches = worker.recorded([layer, lambda: ops.quantize_rows(torch.empty(T, D, device="meta"))])
    process.communicate(b"".join(sent), time_limit(200))
    assert process.returncode == 0
    driver.set_active(worker.NO_GPU)
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **found: hits.append(found["cache_hit"]))
    for kernel, args, constants in launches:
        kernel.compile(args, constants)
    assert len(hits) > 5 and all(hits)


def hashes(first: int) -> list[str]:
    """Triton's of the GEMMs' kernels, of which it hashes one first."""
    kernels = [forward_gemm.grouped_mm_hopper_kernel.kernel, wgrad.wgrad_hopper_kernel.kernel]
    _ = kernels[first].cache_key
    return [kernel.cache_key for kernel in kernels]


def test_a_kernel_has_one_hash_in_all_processes():
    """Triton 3.6's depends on the order of hashing."""
    assert call(hashes, 0) == call(hashes, 1)


def test_a_kernel_that_fails(layer, tmp_path, monkeypatch):
    """The others are in the cache. With Triton 3.6 they have launchers, so that a job starts no C compiler."""
    kernel, *args = next(found for found in worker.recorded([layer]) if "tiles" in found[0].kernel.__name__)
    kernel.kernel.device_caches.clear()
    built = tmp_path / "built"
    if hasattr(nvidia, "make_launcher"):
        monkeypatch.setattr(nvidia, "CudaLauncher", lambda src, metadata: built.touch() or 1 / 0)
    monkeypatch.setattr(worker, "recorded", lambda _: [(kernel, args[0], {"NO_SUCH": 1}), (kernel, *args)])
    assert len(worker.compile_all([])) == 1
    assert [*tmp_path.rglob("_quantize_tiles_kernel.cubin")]
    assert built.exists() == hasattr(nvidia, "make_launcher")


@pytest.mark.parametrize("how", [dict(), dict(rank="1"), dict(cpus=1), dict(gpus=0)], ids=str)
def test_who_begins(how, monkeypatch):
    """One rank of a node of Hopper GPUs, with CPUs to spare. Its process sees none."""
    begun, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **io: begun.append(env) or popen("/bin/cat", **io))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(how.get("cpus", 2)))
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": how.get("rank", "0")})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: how.get("gpus", 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(warm_up.grouped_mm, "_is_hopper", warm_up.grouped_mm._is_hopper.__wrapped__)  # nothing cached
    process = begin.__wrapped__()
    assert os.environ.get("TRITON_CACHE_DIR") == (None if "gpus" in how else triton.knobs.cache.dir)
    expected = {"LOCAL_RANK": "0", "TRITON_CACHE_DIR": triton.knobs.cache.dir, "CUDA_VISIBLE_DEVICES": ""}
    assert begun == ([] if how else [expected])
    if process is not None:  # it ends with this process, though a fork of it goes on
        assert not os.get_blocking(process.stdin.fileno())
        if (fork := os.fork()) == 0:
            time.sleep(time_limit(60))
            os._exit(0)
        process.stdin.close()
        assert process.wait(time_limit(20)) == 0
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_a_process_that_has_ended_costs_nothing(monkeypatch):
    ended = subprocess.Popen(["true"], stdin=subprocess.PIPE, bufsize=0)
    ended.wait()
    monkeypatch.setattr(warm_up, "begin", lambda: ended)
    warm_up.compile_ahead("kind", torch.neg, torch.empty(1))
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert warm_up.is_due("another", on_gpu) and not warm_up.is_due("kind", on_gpu)
    assert not warm_up.is_due("another", torch.empty(1))


def test_a_job_goes_on_without_what_cannot_be_recorded(monkeypatch, caplog):
    sent: list[bytes] = []
    monkeypatch.setattr(warm_up, "begin", lambda: told_to(sent))
    warm_up.compile_job([lambda: 1 / 0])
    assert "ZeroDivisionError" in caplog.text and sent == [b""]


# --- jobs -------------------------------------------------------------------------------------------------------------


def kernels_of_job(*arguments: str) -> set[str]:
    """The launches that ``titan_fp8moe.warm_up`` compiles for a job."""
    found: list[worker.Launch] = []
    sys.argv = ["warm_up", *arguments]
    command.compile_all = lambda layers: found.extend(worker.recorded(layers))
    command.main()
    return launched(found)


def announced_kernels(*arguments: str) -> set[str]:
    """The launches of which a job tells the process when its model is converted."""
    from titan_fp8moe.torchtitan import converter, dry_run  # tests for torchtitan 0.3 import this file

    sent: list[bytes] = []
    converter.preflight.trains_here = lambda: True
    warm_up.begin = lambda: told_to(sent)
    sys.argv = ["dry_run", *arguments]
    dry_run.from_command_line("")
    warm_up.begin = begin
    assert sent.pop() == b""  # the process ends with them
    return set().union(*map(ahead, sent))


def kernels_of_16b(T: int) -> set[str]:
    """The launches of a MoE layer of 16B and of its dense FFN on one of eight ranks. FSDP gathers FFNs in bf16. Under
    EP 8 it leaves experts alone, which are in fp32."""
    dist.init_process_group("fake", rank=0, world_size=8)
    with torch.device("meta"):
        flags, ids = torch.empty(2, 16, dtype=torch.uint8), torch.empty(T, 6, dtype=torch.int64)
        x = torch.empty(T, 2048, dtype=torch.bfloat16, requires_grad=True)
        scores = torch.empty(T, 6, requires_grad=True)
    shared, ffn = (one(H, 2048, dtype=torch.bfloat16, device="meta") for H in (2816, 10944))
    layers = [functools.partial(feed_forward, x, ffn, Fp8FlowMoEConfig(), nan_flags=flags)]
    for dispatch in ("all_to_all", "symmetric"):  # auto may take both
        over, weights = Fp8FlowMoEConfig(dispatch=dispatch), matrices(8, 1408, 2048, device="meta")
        experts = Experts(weights, over, dist.group.WORLD, nan_flags=flags)
        layers.append(functools.partial(run_layer, x, ids, scores, experts, Shared(shared)))
    return launched(worker.recorded(layers))


def test_the_kernels_of_a_job():
    job = "train_configs/deepseek_v3_16b.toml", "--training.local_batch_size=1", "--training.seq_len=256"
    assert call(kernels_of_job, *job) == call(kernels_of_16b, 256)


@pytest.mark.parametrize("name, ranks", [("deepseek_v3_16b", 2), ("qwen3_30b_a3b", 1)])
def test_a_job_announces_its_kernels(name, ranks):
    job = f"train_configs/{name}.toml", f"--world-size={ranks}", "--parallelism.expert_parallel_degree=1"
    assert call(announced_kernels, *job) == call(kernels_of_job, *job)
