"""The dry run's estimate of memory: against the peaks that were measured, and what each setting changes."""

import functools
import importlib
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import ConfigManager
from torchtitan.models.moe.moe import FeedForward
from torchtitan.tools.utils import set_default_dtype

from tests.jobs import make_config, make_dims
from tests.layer import Allocated
from tests.processes import call, forks, time_limit
from tests.specs import SETTINGS
from titan_fp8moe import SharedExperts, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.recipe import row_capacity
from titan_fp8moe.torchtitan import dry_run
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward
from titan_fp8moe.trainer import memory, preflight
from titan_fp8moe.trainer.dry_run import MetaMoE
from titan_fp8moe.trainer.memory import estimate

ROOT = Path(__file__).parent.parent
THROUGHPUT = "experiments/throughput/train.toml"
GIB = 2**30
# Runs of experiments/throughput/train.py with balanced routing, and what they reserved at most. Slow: a newer run has
# the same settings and GPUs.
RUNS = [
    pytest.param(run, marks=[pytest.mark.slow] * ("slow" in run), id=str(run["gib"]))
    for run in json.loads((ROOT / "tests/peak_memory.json").read_text())
]
FP8 = "--model.flavor=16B_4_layers_sdpa --model.converters=fp8_flow_moe --training.local_batch_size=4"
PIPELINE = f"{FP8} --parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule"


process = functools.cache(lambda: ProcessPoolExecutor(1, forks()))  # in which all jobs are built


@functools.cache
def run(flags, gpus=1, rank=0, file=THROUGHPUT):
    """The estimate for a rank of a job of the throughput experiment."""
    return process().submit(_estimate, file, gpus, rank, flags.split()).result(time_limit(120))


def _estimate(file, gpus, rank, overrides):
    importlib.import_module("experiments.throughput.setting")  # registers the flavors
    config = ConfigManager().parse_args([f"--job.config_file={ROOT / file}", "--model.name=deepseek_v3", *overrides])
    with preflight.for_other_machines():
        dims, _, parts = dry_run.build(config, rank, gpus)
    found = estimate(dry_run.memory_job(config, dims), parts)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("measured", RUNS)
def test_peaks_are_those_measured(measured):
    found = run(measured["flags"], measured["gpus"], file=measured.get("file", THROUGHPUT)).peak / GIB
    assert found == pytest.approx(measured["gib"], rel=0.1)


def test_what_changes_activations():
    small, large = run(FP8), run(FP8[:-1] + "8")
    assert large.activations == pytest.approx(2 * small.activations, rel=0.02)
    assert large.peak - small.peak > 0.5 * small.activations
    # Every second product is kept: of wq, wkv_a, wkv_b and wo in bf16, 4 layers, 4 x 4096 tokens.
    recomputed = run(f"{FP8} --activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=attention.w")
    assert small.activations - recomputed.activations == 2 * (3072 + 4096) * 4 * 4 * 4096
    for settings in (("mode=none", "mode=selective", "mode=full"), ("selective_ac_option=2", "selective_ac_option=1")):
        kept = [run(f"{FP8} --activation_checkpoint.{setting}").activations for setting in settings]
        assert kept == sorted({*kept}, reverse=True)
    eager = f"{FP8} --compile.no_enable"
    one, two = run(eager), run(f"{eager} --parallelism.tensor_parallel_degree=2", gpus=4)  # with two ranks of FSDP
    assert two.activations == pytest.approx(one.activations / 2, rel=0.05)


@pytest.mark.parametrize(("job", "setting", "gib"), [
    # 2 bytes of 1.8 B experts' and FFNs' parameters, and no quantized copy of one layer in the backward; or 1 byte.
    (FP8, "--fp8_flow_moe.cache_weights", 2.5),
    (FP8, "--fp8_flow_moe.cache_weights --fp8_flow_moe.cache_layouts=forward", 1.5),
    (FP8, "--training.global_batch_size=8", 7),  # gradients of the first microbatch are there at the loss
    # A loss that is not compiled takes 12 bytes per logit instead of 4.
    (f"{FP8} --activation_checkpoint.mode=full --training.global_batch_size=8", "--compile.components=model", 12.5),
])  # fmt: skip
def test_settings_that_raise_the_peak(job, setting, gib):
    assert gib * GIB <= run(f"{job} {setting}").peak - run(job).peak < (gib + 1) * GIB


def test_early_pipeline_stages_hold_more_microbatches():
    first, last = (run(f"{PIPELINE}=1F1B", gpus=2, rank=rank) for rank in (0, 1))
    assert first.activations == pytest.approx(2 * last.activations, rel=0.4)
    gpipe = run(f"{PIPELINE}=GPipe", gpus=2)
    assert gpipe.activations == pytest.approx(2 * first.activations, rel=0.02)  # four microbatches, not two


@pytest.mark.parametrize(("batch", "rank", "held"), [(16, 0, 5.5), (16, 3, 2.5), (10, 0, 5)])
def test_interleaved_stages_hold_their_warm_up_and_one(batch, rank, held):
    """For each of a rank's two stages on average, and no more than there are."""
    pipeline = "pipeline_parallel_schedule=Interleaved1F1B", "pipeline_parallel_microbatch_size=2"
    config = make_config(f"--training.local_batch_size={batch}", *(f"--parallelism.{flag}" for flag in pipeline))
    mesh = SimpleNamespace(get_local_rank=lambda: rank)
    dims: Any = SimpleNamespace(pp_enabled=True, pp=4, get_mesh=lambda _: mesh)
    assert memory._in_flight(config, dims, 2) == held


def allocations(make, dtype=torch.bfloat16):
    """The bytes that a forward keeps, and the most that its backward holds besides. No memory is allocated. ``make``
    returns the forward, whose inputs and weights exist already, and its output's gradient."""
    with set_default_dtype(dtype), FakeTensorMode(), Allocated() as allocated:
        forward, dout = make()
        before = allocated.held
        out = forward()
        kept = allocated.held - before
        allocated.peak = 0
        out.backward(dout)
        return [kept, allocated.peak - before - kept]


def job(T, ep=1):
    config = SimpleNamespace(parallelism=None, training=SimpleNamespace(local_batch_size=1, seq_len=T))
    dims = SimpleNamespace(pp_enabled=False, cp=1, tp=1, ep=ep)
    return memory.Job(config, dims, torch.bfloat16, "", lambda module: None, lambda block, part: 0)


def converted(config, E, D, H, top_k):
    """A MoE layer in FP8, as far as the estimate looks at it."""
    matrices = SimpleNamespace(w2=torch.empty(E, D, H, device="meta"))
    routed: Any = SimpleNamespace(config=config, matrices=lambda: matrices)
    return MetaMoE(routed, routed, None, top_k, True, forward=None)


def assert_estimated(make, part):
    """The estimate of the backward leaves out scales."""
    kept, peak = allocations(make)
    assert kept == pytest.approx(part.everything, rel=1e-5)
    assert peak == pytest.approx(part.backward, rel=0.02)


def parameters(*shapes):
    return [torch.empty(*shape, requires_grad=True) for shape in shapes]


def routed(config, T, D, H, E, top_k, **options):
    x, *weights = parameters((T, D), (E, H, D), (E, D, H), (E, H, D))
    ids, scores = torch.empty(T, top_k, dtype=torch.int64), torch.empty(T, top_k, dtype=torch.float32)
    forward = functools.partial(routed_experts, x, *weights, ids, scores.requires_grad_(), config=config, **options)
    return forward, torch.empty(T, D)


@pytest.mark.parametrize("recompute", ["activation", "experts"])
def test_what_is_held_beside_all_weight_gradients(recompute):
    """With all gradients of large weights there are dx, dh and the transposes of x and dh, but nothing of GEMM 2."""
    T, D, H, E, top_k = 2048, 512, 256, 64, 2
    _, peak = allocations(lambda: routed(Fp8FlowMoEConfig(recompute=recompute), T, D, H, E, top_k))
    rows, gradients, dx = row_capacity(T * top_k, E), E * 3 * H * D * 2, T * D * 2
    assert peak == pytest.approx(gradients + dx + rows * (D + 4 * H), rel=0.02)


@pytest.mark.parametrize(("D", "H"), [(512, 256), (256, 176)])
@pytest.mark.parametrize("config", [*SETTINGS, None], ids=str)
def test_an_ffn_holds_what_is_estimated(D, H, config):
    """An FFN in FP8, and with None in bf16; with many rows, next to which the weights are small."""
    T, ffn = 2**18, FeedForward(D, H)
    if config is not None:
        Fp8FlowFeedForward.convert(ffn, config)

    def make():
        x, *weights = parameters((T, D), (H, D), (D, H), (H, D))
        for linear, weight in zip((ffn.w1, ffn.w2, ffn.w3), weights, strict=True):
            linear.weight = nn.Parameter(weight)
        return lambda: ffn(x), torch.empty(T, D)

    assert_estimated(make, memory.dense(job(T), ffn))


@pytest.mark.parametrize(("D", "H", "top_k"), [(512, 256, 2), (256, 176, 3)])
@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_routed_experts_hold_what_is_estimated(D, H, top_k, config):
    T, E = 2**17, 4
    make = functools.partial(routed, config, T, D, H, E, top_k)
    assert_estimated(make, memory.fp8_experts(job(T), converted(config, E, D, H, top_k)))


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_shared_experts_keep_what_is_estimated(config):
    """Beside routed ones, and the rows' scales once more, column-major; and 4 bytes per token if it has a score."""
    T, D, H, shared_H, E, top_k = 2**17, 512, 256, 384, 4, 2
    ffn = FeedForward(D, shared_H)
    Fp8FlowFeedForward.convert(ffn, config)
    parts = memory.fp8_experts(job(T), converted(config, E, D, H, top_k)), memory.dense(job(T), ffn, joins=True)

    def make(scored):
        scores = torch.empty(T, dtype=torch.float32, requires_grad=True) if scored else None
        shared = SharedExperts(*parameters((shared_H, D), (D, shared_H), (shared_H, D)), scores)
        return routed(config, T, D, H, E, top_k, shared=shared)

    for scored in (False, True):
        kept, _ = allocations(functools.partial(make, scored))
        assert kept == pytest.approx(sum(part.everything for part in parts) + T * (D // 128 + 4 * scored), rel=1e-5)


def routed_experts_of_two_ranks_keep_what_is_estimated():
    """On meta tensors. Each token goes to both ranks, with one of its pairs, and each expert gets as many."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    D, H, E, T, top_k, config = 512, 256, 4, 2**17, 2, Fp8FlowMoEConfig()

    def counts(of):
        of = torch.full(of.shape, T // (E // 2), dtype=of.dtype, device="cpu")
        of[:, :, 0], of[:, :, -1] = T, 1
        return of

    with set_default_dtype(torch.bfloat16), torch.device("meta"), Allocated() as allocated:
        forward, _ = routed(config, T, D, H, E // 2, top_k, ep_group=dist.group.WORLD)
        before = allocated.held
        with mock.patch("titan_fp8moe.dispatch.all_to_all._any_counts", counts):
            out = forward()
        kept = allocated.held - before
    assert out.shape == (T, D)
    with mock.patch.object(memory, "capacities", return_value=(2 * T, 2 * T)):  # rows and dispatched tokens
        estimated = memory.fp8_experts(job(T, ep=2), converted(config, E, D, H, top_k)).everything
    left_out = 2 * T * (12 + 4)  # of dispatched tokens: their payloads' padding, and which tokens they are
    assert kept == pytest.approx(estimated + left_out, rel=1e-5), (kept, estimated)


def test_autocast_holds_what_is_estimated():
    """A weight of fp32 and its copy in bf16; with one token, next to which the weight is large."""
    weight = nn.Parameter(torch.empty(4096, 2048))

    def make():
        leaves = parameters((1, 2048), tuple(weight.shape))
        forward = torch.autocast("cpu", torch.bfloat16)(lambda: nn.functional.linear(*leaves))
        return forward, torch.empty(1, 4096, dtype=torch.bfloat16)

    kept, peak = allocations(make, torch.float32)
    found = memory._weight(weight, None, None)
    assert kept == pytest.approx(found.gathered, rel=0.002)
    assert peak == pytest.approx(found.sharded + found.backward, rel=0.002)


def fsdp_holds_what_is_estimated():
    """Four linears, each a module of FSDP's; in a second microbatch, so that all gradients are there at the loss."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    x = torch.zeros(1, 1024)
    with Allocated() as allocated:
        model(x).sum().backward()
        out = model(x)
        allocated.peak = 0
        out.sum().backward()
    steps = [memory.Step(name, memory.weights_of(linear)) for name, linear in model.named_children()]
    held = 2 * sum(step.weights.sharded for step in steps)
    estimated, where = max(memory._walk(steps, held, accumulates=True))
    assert where == "in the backward of 2"
    assert allocated.peak == pytest.approx(estimated, rel=0.002)


@pytest.mark.parametrize("check", [routed_experts_of_two_ranks_keep_what_is_estimated, fsdp_holds_what_is_estimated])
def test_ranks(check):
    """In a process of their group."""
    call(check)


def test_other_blocks_are_not_estimated():
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": nn.Linear(8, 8)})
    assert estimate(dry_run.memory_job(make_config(), make_dims()), [model]) is None
