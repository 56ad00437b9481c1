"""Jobs of torchtitan, of the release that is installed: what is refused, what is converted, what a CPU needs."""

import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.conftest import case_dir  # noqa: F401  a fixture
from tests.layer import refused
from tests.patched import assert_listed_and_undone, snapshot, undone
from tests.processes import call, ended_well, run_script, run_workers
from titan_fp8moe import record_routing, replay_routing
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.trainer import cpu, plan, preflight
from titan_fp8moe.trainer.experts import Fp8FFN, TitanExperts, gpt_oss_expert
from titan_fp8moe.versions import installed

RELEASE = str(installed("torchtitan"))
jobs: Any = importlib.import_module("tests.torchtitan03.jobs" if RELEASE.startswith("0.3") else "tests.jobs")
if hasattr(jobs, "cpu_only"):
    cpu_only = jobs.cpu_only


def degrees(**kinds: int) -> dict[str, Any]:
    return {f"parallelism.{kind}_parallel_degree": degree for kind, degree in kinds.items()}


def schedule(name: str) -> dict[str, Any]:
    return {"parallelism.pipeline_parallel_schedule": name}


def of_this_release(cases: list[tuple]) -> list[tuple]:
    """Without their first entries, the beginnings of the releases that they are for."""
    return [case[1:] for case in cases if RELEASE.startswith(case[0])]


PP2, CP2, EP2, EP3 = degrees(pipeline=2), degrees(context=2), degrees(expert=2), degrees(expert=3)
ETP = "parallelism.expert_tensor_parallel_degree"
CSV = {"parallelism.pipeline_parallel_schedule_csv": "a.csv"}
VALIDATES, OFFLOADS = {f"{jobs.VALIDATION}.enable": True}, {"training.enable_cpu_offload": True}
COMPILES, LOGS = {"compile.enable": True}, {"metrics.enable_tensorboard": True}
OVERLAP, CONVERTERS = "parallelism.pipeline_parallel_expert_parallel_overlap", "model.converters"
GATHER, COUNT, SYMMETRIC = {"fp8_all_gather": True}, {"statistics_every": 5}, {"dispatch": "symmetric"}
WO, FLOAT8_LINEARS = {"linear_fqns": ["attention.wo."]}, {CONVERTERS: ["quantize.linear.float8", "fp8_flow_moe"]}
# Releases, ranks, settings of the job, of fp8_flow_moe, the experts' dims, and what the error says; None if it works.
REFUSED: list[tuple] = [
    ("", 1, OFFLOADS, GATHER, {}, "training.enable_cpu_offload"),
    ("", 1, {}, COUNT, {}, "metrics.enable_tensorboard"),
    ("", 2, VALIDATES | CP2, {}, {}, f"{jobs.VALIDATION}.enable = false"),
    ("", 1, OFFLOADS | LOGS | VALIDATES, COUNT, {}, None),
    ("", 2, CP2, {}, {}, None),
    *(("", 4, PP2 | EP2 | schedule(name), {}, {}, None) for name in ("1f1b", "Interleaved1F1B", "GPipe")),
    ("0.2", 4, PP2 | EP2 | schedule("ZBVZeroBubble"), {}, {}, None),
    ("0.2", 4, PP2 | EP2 | CSV, {"dispatch": "all_to_all"}, {}, None),
    ("0.2", 2, PP2 | schedule("dualpipev") | {OVERLAP: True}, {}, {}, f"{OVERLAP} = false"),
    ("0.2", 2, PP2 | schedule("DualPipeV") | {OVERLAP: False}, {}, {}, None),
    ("0.3", 2, PP2 | schedule("ZBVZeroBubble"), {}, {}, "may split the backward"),
    ("0.3", 2, PP2 | CSV, {}, {}, "schedule_csv = 'a.csv'"),
    ("", 3, EP3, {}, {}, "8 experts do not divide over 3"),
    ("", 16, {}, GATHER, {}, "8 experts do not divide over 1 expert-parallel x 16 FSDP"),
    ("", 8, EP2, GATHER, {}, None),
    ("", 1, {}, {}, {"dim": 200}, "layers.1.moe: model dim 200"),
    ("", 1, {}, {}, {"hidden_dim": 200}, "layers.1.moe: hidden dim 200 is no multiple"),
    ("", 16, degrees(tensor=16), {}, {"hidden_dim": 1408},  # 88 * 16, which 16 ranks cannot share
     "16 tensor-parallel ranks is no multiple of 16; leave the layer in bf16 with fp8_flow_moe.filter_fqns, or lower"),
    ("", 1, {}, {"filter_fqns": ["layers.1.", "layers.7."]}, {}, "filter_fqns has 'layers.7.'"),
    ("", 1, {}, {"linear_fqns": ["w2"]}, {}, "linear_fqns has 'w2', which matches none"),
    ("", 1, {}, {"linear_fqns": ["attention.wkv_a."]}, {}, "attention.wkv_a is"),
    ("", 4, degrees(tensor=4), WO, {}, "over 4 tensor-parallel ranks"),
    ("", 1, {}, SYMMETRIC, {}, None),
    ("", 2, EP2, SYMMETRIC, {}, "needs all expert-parallel ranks on one node"),
    ("0.2", 4, degrees(tensor=2, expert=2) | {ETP: 2}, SYMMETRIC, {}, "4 ranks share the experts and a node has 1"),
    ("0.2", 1, {"optimizer.early_step_in_backward": True}, {"cache_weights": True}, {}, "early_step_in_backward"),
    ("0.2", 1, {CONVERTERS: ["fp8_flow_moe", "quantize.grouped_mm.mx"]}, {}, {}, f"keep one of them in {CONVERTERS}"),
    ("0.2", 1, FLOAT8_LINEARS, WO, {}, "both convert linears"),
    ("0.2", 1, FLOAT8_LINEARS, {}, {}, None),
    ("0.2", 1, COMPILES | LOGS, WO | COUNT, {}, "leave out one of the three"),
    ("0.3", 1, LOGS | {"training.disable_cuda_graphs": False}, COUNT, {}, "training.disable_cuda_graphs = true"),
    ("0.3", 1, COMPILES, GATHER, {}, "fp8_all_gather works outside of graphs"),
    ("0.3", 1, {"parallelism.spmd_backend": "full_dtensor"}, {}, {}, "'partial_dtensor'"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "settings", "fp8", "dims", "said"), of_this_release(REFUSED))
def test_jobs_that_cannot_work_are_refused(monkeypatch, ranks: int, settings: dict, fp8: dict, dims: dict, said):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with refused(*[said] * bool(said)):
        model = jobs.start(jobs.make_job(settings, **fp8), ranks, **dims)
        assert any(isinstance(module, TitanExperts) for module in model.modules())


@pytest.mark.parametrize(("ranks", "settings", "layout"), [
    (2, degrees(tensor=2), (1, 2, 1, 1024)),  # whose ranks have all tokens
    (4, CP2 | EP2, (2, 1, 2, 512)),  # context parallelism's ranks count for FSDP
    (8, degrees(tensor=2, expert=4), (4, 1, 2, 1024 if RELEASE < "0.3" else 512)),  # which spans TP's ranks
    *[(8, degrees(tensor=2, expert=4) | {ETP: 2}, (4, 2, 1, 1024))] * (RELEASE < "0.3"),
    (2, PP2, (1, 1, 1, 256)),
])  # fmt: skip
def test_layout_of_the_experts(ranks: int, settings: dict, layout: tuple[int, ...]):
    job = jobs.make_job(settings | {"training.seq_len": 256, "training.local_batch_size": 4})
    assert jobs.layout(job, ranks) == layout


@pytest.mark.parametrize(("ranks", "settings", "inside"), [
    (1, {}, False), (2, EP2, False), (2, PP2, False), (2, {}, True), (4, EP2, True), (1, OFFLOADS, True),
    (2, {"parallelism.data_parallel_replicate_degree": 2}, True), (1, {"training.dtype": "bfloat16"}, True),
    (1, {"fp8_flow_moe.filter_fqns": ["layers.1."]}, RELEASE < "0.3"),  # clipping needs the gradients on one mesh
    *[(1, {"fault_tolerance.enable": True}, True)] * (RELEASE < "0.3"),  # TorchFT averages what FSDP reduces
])  # fmt: skip
def test_experts_leave_fsdp_where_it_has_no_work(ranks: int, settings: dict, inside: bool):
    job = jobs.make_job()
    model = jobs.start(jobs.set_all(job, settings), ranks)
    assert {m.in_fsdp for m in model.modules() if isinstance(m, TitanExperts)} == {inside}
    assert RELEASE < "0.3" or ("experts outside of FSDP" in plan.announced[0]) != inside


# Releases, ranks, settings of the job and of fp8_flow_moe, the reason why some stay in bf16, and which.
PLANS: list[tuple] = [
    ("", 1, {}, {}, "", ()),
    ("", 2, EP2, {}, "", ()),
    ("", 2, EP2, SYMMETRIC, "", ()),
    ("", 1, {}, {"filter_fqns": ["layers.1.", "layers.2.moe.shared_experts"], **WO}, "fp8_flow_moe.filter_fqns",
     ("layers.1.moe", "layers.1.moe.shared_experts", "layers.2.moe.shared_experts")),
    ("0.2", 1, FLOAT8_LINEARS, {}, "quantize.linear", ("shared_experts", "feed_forward")),
    ("0.2", 128, degrees(tensor=32, expert=4), {}, "256 over 32 tensor-parallel ranks", ("shared_experts",)),
]  # fmt: skip


@pytest.mark.parametrize("door", jobs.DOORS)
@pytest.mark.parametrize(("ranks", "settings", "fp8", "reason", "stay"), of_this_release(PLANS))
def test_what_is_converted(door: str, ranks: int, settings: dict, fp8: dict, reason: str, stay: tuple[str, ...]):
    """The log counts what is in FP8, and says why the rest is not, and how tokens travel."""
    before = {name: (t.shape, t.dtype) for name, t in jobs.plain_model().state_dict().items()}
    model = jobs.start(jobs.make_job(settings, door=door, **fp8), ranks)
    assert {name: (t.shape, t.dtype) for name, t in model.state_dict().items()} == before
    modules = dict(model.named_modules())
    kinds = "moe", "shared_experts", "feed_forward"
    want = {name for name in modules if name.endswith(kinds) and not name.endswith(stay or "none")}
    want |= {name for name in modules if name.endswith("attention.wo") and "linear_fqns" in fp8}
    got = {name for name, m in modules.items() if isinstance(m, jobs.Fp8FlowMoE | Fp8FFN | Fp8FlowLinear)}
    assert got == want
    for name in [name for name in want if name.endswith(".moe")]:
        assert modules[name].fp8_shared == (f"{name}.shared_experts" in want)
    counts = [sum(name.endswith(kind) for name in want) for kind in (*kinds, "attention.wo")]
    first, *others = plan.announced
    assert first.startswith("{} MoE layers, {} shared experts, {} dense FFNs, {} linears in FP8; ".format(*counts))
    way = "symmetric memory" if "dispatch" in fp8 else "all-to-all"
    assert (f"; dispatch over {way}" in first) == any("expert" in setting for setting in settings)
    described = Fp8FlowMoEConfig(**fp8).describe()
    assert first.endswith(described) and described in repr(model) and bool(others) == bool(stay)
    assert all(name.endswith(stay) for line in others for name in line.split(": ")[1].split(", "))
    assert all(reason in line for line in others)


def test_the_activation_of_gpt_oss():
    spec, (gate, up) = gpt_oss_expert(5.0), 8 * torch.randn(2, 64, 32)
    got = ACTIVATIONS[spec.activation].forward(gate, up, *spec.parameters)
    torch.testing.assert_close(got, jobs.swiglu(torch.stack((gate, up), -1).flatten(1), limit=5.0))


def test_changes_of_other_packages_are_listed_and_undone():
    with undone():
        before = snapshot()
        jobs.register()
        jobs.start(jobs.make_job(cache_weights=True))
        assert_listed_and_undone(before)


FLAG = "--override.imports=titan_fp8moe.torchtitan03.fp8_flow_moe"
DEEPSEEK = "--module=deepseek_v3", *jobs.DRY_RUN
MISTAKES: list[tuple] = [  # releases, arguments of a dry run, what its error begins with
    ("", [*jobs.DRY_RUN, "--rank=1"], "--world-size 1 has no rank 1"),
    ("", [*jobs.DRY_RUN, "--parallelism.expert_parallel_degree=3"], "layers.1.moe: 8 experts do not divide over 3"),
    ("0.2", [*jobs.DRY_RUN, "--model.flavor=tinny"], "model.flavor = 'tinny'"),
    ("0.2", [*jobs.DRY_RUN, "--model.converters=a"], "KeyError: 'a'"),
    ("0.2", [*jobs.DRY_RUN, "--model.converters=quantize.grouped_mm.float8,fp8_flow_moe"],  # which asks for a GPU
     "fp8_flow_moe and quantize.grouped_mm.float8 convert the same experts; keep one of them"),
    ("0.2", ["none.toml"], "[Errno 2] No such file or directory: 'none.toml'"),
    ("0.3", [*jobs.DRY_RUN, "--training.global_batch_size=7"], "global batch size must be multiple of local"),
    ("0.3", ["--config=no_such"], "Config function 'no_such' not found in titan_fp8moe.torchtitan03.config_registry"),
    ("0.3", [*jobs.DRY_RUN, "--override.imports=torchtitan.overrides.fused_swiglu.fused_swiglu"], "Override 'titan"),
    ("0.3", [*DEEPSEEK, f'{FLAG}={{"h": 1}}'], "Fp8FlowMoEConfig.__init__() got an unexpected keyword argument 'h'"),
    ("0.3", [*DEEPSEEK, f'{FLAG}={{"save_h": 1}}'], "fp8_flow_moe.save_h is 1; set it to one of"),
]  # fmt: skip


def test_dry_runs_end_with_the_mistake_and_leave_the_process_as_it_was():
    """A notebook may check jobs before it trains one."""
    assert call(_left_by_dry_runs) == {}


def _left_by_dry_runs() -> dict[str, str]:
    dry_run, before = importlib.import_module(f"{jobs.ADAPTER}.dry_run"), dict(os.environ)
    for arguments, said in of_this_release(MISTAKES):
        sys.argv = ["dry_run", *arguments]
        with pytest.raises(SystemExit, match=f"^error: {re.escape(said)}"):
            dry_run.from_command_line(None)
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.argv = ["dry_run", *jobs.DRY_RUN, "--parallelism.expert_parallel_degree=2"]
    assert dry_run.from_command_line(None).dims.ep == 2 and preflight.trains_here()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


VALIDATION = [f"--{jobs.VALIDATION}.{option}" for option in ("enable", "freq=2", "steps=1")]
# At the end torchtitan's first rank sleeps for two seconds.
WITHOUT_PAUSE = """
import runpy, time
time.sleep = lambda seconds: None
runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
"""
DONE = "for other ranks to complete"  # what rank 0 says at the end


def train(data: Path, folder: Path, steps: int, *flags: str, ep: int = 2) -> str:
    """The first rank's log."""
    folder.mkdir(exist_ok=True)
    options = f"""
        --training.steps={steps} --training.seq_len=64 --training.local_batch_size=2 --debug.seed=1
        --parallelism.expert_parallel_degree={ep} --metrics.log_freq=1 --metrics.disable_color_printing
        --checkpoint.enable --checkpoint.interval=2 --debug.deterministic
    """
    command = *jobs.training(data, folder), *options.split(), *flags
    run = run_workers("-c", 2, WITHOUT_PAUSE, *command, cpu_only=True)
    log = run.stdout + run.stderr
    assert ended_well(run) and DONE in run.stdout, log[-6000:]
    return log[: log.index(DONE)]


def logged(log: str, kind: str = "step", what: str = "loss") -> list[float]:
    return [float(value) for value in re.findall(rf"INFO - {kind}: +\d+ .*{what}: +(\S+)", log)]


@pytest.fixture(scope="module")
def trained(case_dir: Path) -> tuple[Path, list[float]]:  # noqa: F811
    """A folder with FP8's checkpoints after step 2, and after step 4 as it is and in Hugging Face's format; losses."""
    folder, fp8 = case_dir / "fp8", jobs.fp8_flags(save_h="fp8")
    log = train(case_dir, folder, 4, *fp8, *VALIDATION)
    assert f"{jobs.CONVERTED} in FP8" in log and "save_h=fp8" in log
    loss, validation = logged(log), logged(log, "validate step")
    assert len(loss) == 4 and loss[-1] < loss[0] - 2 and validation[-1] < validation[0] - 2
    saved = folder / "checkpoint"
    (saved / "step-4").rename(saved / "whole")
    in_hf = "--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"
    assert logged(train(case_dir, folder, 4, *fp8, *in_hf)) == loss[2:], "it does not go on bit for bit"
    return saved, loss


def test_bf16_and_fp8_go_on_with_each_others_checkpoints(case_dir: Path, tmp_path: Path, trained):  # noqa: F811
    """Over other ranks too. A filter of all layers leaves bf16's digits."""
    (saved, loss), folder = trained, tmp_path / "bf16"
    resume = f"--checkpoint.initial_load_path={saved}/step-2", "--checkpoint.no_initial_load_model_only"
    bf16 = train(case_dir, folder, 5, *resume, ep=1)
    assert logged(bf16)[:2] == pytest.approx(loss[2:], rel=5e-3)
    off = train(case_dir, tmp_path / "off", 4, *resume, *jobs.fp8_flags(filter_fqns=jobs.ALL_LAYERS), ep=1)
    assert "0 MoE layers, 0 shared experts, 0 dense FFNs, 0 linears in FP8" in off
    assert all(logged(off, what=what) == logged(bf16, what=what)[:2] for what in ("loss", "grad_norm"))
    shutil.rmtree(folder / "checkpoint/step-5")
    gathered = train(case_dir, folder, 5, *jobs.fp8_flags(fp8_all_gather=True), ep=1)
    assert logged(gathered) == pytest.approx(logged(bf16)[2:], rel=2e-2)


@pytest.mark.skipif(RELEASE < "0.3", reason="tests/test_export_fp8.py has this release's")
def test_export(tmp_path: Path, trained):
    def export(*args: str | Path) -> str:
        done = run_script("-m", "titan_fp8moe.export_fp8", *args)
        return done.stdout + done.stderr

    (saved, _), out = trained, tmp_path / "fp8"
    said = export(saved / "step-2", out, "--config", "train_configs/debug.toml")
    assert said.splitlines()[-1].startswith("error: titan_fp8moe.torchtitan is for torchtitan 0.2.2")
    (tmp_path / "config.json").write_text(json.dumps(dict(num_hidden_layers=2, hidden_size=256, n_routed_experts=8)))
    said = export(saved / "step-4", out, "--assets", tmp_path, "--quantized-from", "bf16", "--verify")
    assert "24 matrices in FP8 from bf16" in said and "are the checkpoint's, bit for bit" in said, said


@pytest.mark.parametrize(("gpu", "launched", "fast", "expected"), [
    (False, True, False, "float32"), (True, True, False, "bfloat16"), (False, True, True, "bfloat16"),
    (False, False, False, "bfloat16"),  # a dry run or an export, of a job on GPUs
])  # fmt: skip
def test_a_rank_on_a_cpu_without_fast_bf16_computes_in_float32(monkeypatch, gpu, launched, fast, expected):
    """Unless the job names a precision."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: launched)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    cpu.compute_dtype.cache_clear()
    try:
        job, named = jobs.parse(), jobs.parse("--training.mixed_precision_param=bfloat16")
    finally:
        cpu.compute_dtype.cache_clear()
    assert (job.training.mixed_precision_param, named.training.mixed_precision_param) == (expected, "bfloat16")
    assert RELEASE >= "0.3" or job.training.seq_len == 256  # the other settings of the table are the file's


def test_masks_of_flex_attention_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """A CUDA build names its accelerator without a driver too, and masks are made there by default."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("meta"))
    mask = jobs.create_attention_mask(lambda b, h, i, j: i >= j, 1, None, 16, 16)
    assert mask.kv_num_blocks.device.type == "cpu"


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("groups", [None, 4][: 2 if RELEASE < "0.3" else 1])
def test_routing_replay(fp8: bool, groups: int | None):
    """The load that the expert bias is to balance is the replayed one, and the router gets gradients."""
    if not fp8 and torch.cuda.device_count():
        pytest.skip("where there is a GPU torchtitan's bf16 experts run a Triton kernel")
    layer, counts = jobs.moe_layer(fp8, groups)
    E, K = layer.router.num_experts, layer.router.top_k
    x, others = torch.randn(2, 24, layer.router.gate.weight.shape[1]), torch.rand(2, 24, 1, E).topk(K).indices
    with record_routing(layer) as routing:
        want = layer(x)
    ids = routing.routed_experts()
    with replay_routing(layer, ids):
        assert torch.equal(layer(x), want)
    getattr(layer, counts).zero_()
    with replay_routing(layer, others):
        out = layer(x)
        out.square().sum().backward()
    assert torch.equal(getattr(layer, counts).long(), others.flatten().bincount(minlength=E))
    if fp8:
        assert layer.router.gate.weight.grad.any() and (out - want).norm() > 0.1 * want.norm()
