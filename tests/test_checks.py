"""The framework-free checks: what they refuse, and the settings and remedies that they name."""

import contextlib
import logging
import re
from types import SimpleNamespace

import pytest
import torch

from tests.processes import run_script
from titan_fp8moe import Fp8FlowLinear, RoutedExperts, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.trainer import preflight


def refused(message: str | None) -> contextlib.AbstractContextManager:
    """Expects a ValueError with exactly this message, or none."""
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$") if message else contextlib.nullcontext()


def test_torchtitan_is_not_imported():
    code = "import sys, titan_fp8moe.trainer.preflight; sys.exit('torchtitan' in sys.modules)"
    assert run_script("-c", code).returncode == 0


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"wgrad": "requantize"}, "one of 'balanced', 'scaling_aware', 'bf16'"),
        ({"save_h": "fp16"}, "one of 'bf16', 'fp8'"),
        ({"cache_weights": 1}, "true or false"),
        ({"statistics_every": -1}, "a number of steps, or 0 for never"),
        ({"statistics_every": True}, "a number of steps, or 0 for never"),
        ({"filter_fqns": "layers.1."}, "a list of non-empty strings"),
        ({"filter_fqns": [""]}, "a list of non-empty strings"),
    ],
)
def test_wrong_values(wrong: dict, remedy: str):
    ((name, value),) = wrong.items()
    with refused(f"fp8_flow_moe.{name} is {value!r}; set it to {remedy}"):
        Fp8FlowMoEConfig(**wrong)


def test_gathered_weights_are_not_cached():
    with pytest.raises(ValueError, match="set one of the two to false"):
        Fp8FlowMoEConfig(fp8_all_gather=True, cache_weights=True)


CONSUMERS = {
    "routed_experts": lambda config: routed_experts(*[torch.empty(0)] * 6, config=config),
    "RoutedExperts": lambda config: RoutedExperts(4, 128, 128, config=config),
    "Fp8FlowLinear": lambda config: Fp8FlowLinear(128, 128, config=config),
}


@pytest.mark.parametrize(
    ("owner", "setting"),
    [
        ("routed_experts", {"cache_weights": True}),
        ("RoutedExperts", {"fp8_all_gather": True}),
        ("RoutedExperts", {"statistics_every": 5}),
        ("RoutedExperts", {"filter_fqns": ["layers.1."]}),
        ("RoutedExperts", {"linear_fqns": ["wq."]}),
        ("Fp8FlowLinear", {"save_h": "fp8"}),
    ],
)
def test_settings_without_effect_are_refused(owner: str, setting: dict):
    with refused(f"{next(iter(setting))} has no effect on {owner}; leave it out of the config"):
        CONSUMERS[owner](Fp8FlowMoEConfig(**setting))


@pytest.mark.parametrize("owner", CONSUMERS)
def test_config_of_another_type_is_refused(owner: str):
    with refused("config must be an Fp8FlowMoEConfig, got dict; use Fp8FlowMoEConfig(**settings)"):
        CONSUMERS[owner](dict(wgrad="bf16"))


def test_description_has_every_setting_of_a_layer():
    assert Fp8FlowMoEConfig(filter_fqns=["layers.1."]).describe() == (
        "wgrad=balanced, save_h=bf16, recompute=activation, dispatch=auto, dispatch_capacity=1.5, "
        "cache_weights=False, cache_layouts=both, fp8_all_gather=False, statistics_every=0"
    )


LAYERS = ["layers.1.moe", "layers.2.moe", "layers.11.moe"]


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ([], []),
        (["layers.1."], ["layers.1.moe"]),
        (["layers.1"], ["layers.1.moe", "layers.11.moe"]),
        (["layers.1.", "layers.2."], ["layers.1.moe", "layers.2.moe"]),
        (["moe."], LAYERS),  # the end of a name counts as a dot
    ],
)
def test_matching_names(parts: list[str], names: list[str]):
    assert preflight.matching(LAYERS, parts, setting="filter_fqns") == names


def test_filter_that_matches_nothing():
    with refused(
        "fp8_flow_moe.filter_fqns has 'layers.3.', which matches none of layers.1.moe, layers.2.moe, "
        "layers.11.moe; correct or remove it"
    ):
        preflight.matching(LAYERS, ["layers.1.", "layers.3."], setting="filter_fqns")


@pytest.mark.parametrize(
    ("shape", "shards", "fits"), [((256, 512), 2, True), ((256, 512), 4, False), ((64, 128), 1, False)]
)
def test_linears_are_whole_tiles(shape: tuple[int, int], shards: int, fits: bool):
    message = (
        f"fp8_flow_moe.linear_fqns: wq is {shape[0]}x{shape[1]} over {shards} tensor-parallel ranks, not multiples of "
        "128 on each; remove it from the list"
    )
    with refused(None if fits else message):
        preflight.check_linear("wq", *shape, shards)


def check_layer(
    sizes: tuple[int, int, int] = (8, 256, 256), layout: tuple[int, ...] = (1, 1, 1, 64), top_k: int = 2, **settings
) -> None:
    config, sizes_ = Fp8FlowMoEConfig(**settings), preflight.LayerSizes(*sizes, top_k)
    preflight.check_layer("moe", sizes_, config, preflight.ExpertLayout(*layout), sharding_remedy="set TP")


@pytest.mark.parametrize(("experts", "shards", "fits"), [(8, 1, True), (8, 4, True), (8, 3, False), (8, 16, False)])
def test_experts_divide_over_ranks(experts: int, shards: int, fits: bool):
    message = (
        f"moe: {experts} experts do not divide over {shards} expert-parallel ranks; choose a "
        "parallelism.expert_parallel_degree that divides them"
    )
    with refused(None if fits else message):
        check_layer((experts, 256, 256), (shards, 1, 1, 64))


@pytest.mark.parametrize(("shards", "fsdp", "fits"), [(2, 4, True), (1, 8, True), (4, 3, False), (2, 8, False)])
def test_whole_experts(shards: int, fsdp: int, fits: bool):
    message = (
        "moe: fp8_flow_moe.fp8_all_gather needs whole experts on each rank, but 8 experts do not divide over "
        f"{shards} expert-parallel x {fsdp} FSDP ranks; set it to false, or raise "
        "parallelism.data_parallel_replicate_degree until they do"
    )
    check_layer(layout=(shards, 1, fsdp, 64))
    with refused(None if fits else message):
        check_layer(layout=(shards, 1, fsdp, 64), fp8_all_gather=True)


@pytest.mark.parametrize(
    ("dim", "hidden_dim", "shards", "message"),
    [
        (256, 1408, 1, None),
        (256, 1408, 11, None),
        (2880, 2880, 1, None),
        (
            200,
            1408,
            1,
            "moe: model dim 200 is not a multiple of 16; choose one, or leave the layer in bf16 with "
            "fp8_flow_moe.filter_fqns",
        ),
        (
            256,
            200,
            1,
            "moe: expert hidden dim 200 is not a multiple of 16; choose one, or leave the layer in bf16 with "
            "fp8_flow_moe.filter_fqns",
        ),
        (256, 1408, 2, None),  # 704 per rank is padded to 768
        (
            256,
            1408,
            16,
            "moe: expert hidden dim 1408 over 16 tensor-parallel ranks is 88 per rank, not a multiple of 16; set TP",
        ),
        (
            256,
            256,
            3,
            "moe: expert hidden dim 256 over 3 tensor-parallel ranks is 85.3333 per rank, not a multiple of 16; set TP",
        ),
    ],
)
def test_dims_are_whole_tiles(dim: int, hidden_dim: int, shards: int, message: str | None):
    with refused(message):
        check_layer((8, dim, hidden_dim), (1, shards, 1, 64))


def test_rows_of_a_rank():
    check_layer(layout=(1, 1, 1, MAX_ROWS // 4), top_k=4)
    tokens = MAX_ROWS // 4 + 1
    with refused(
        f"moe: {tokens} tokens of a microbatch have {4 * tokens} rows for their top-4 experts, but a rank can have "
        f"{MAX_ROWS}; lower training.local_batch_size or training.seq_len"
    ):
        check_layer(layout=(1, 1, 1, tokens), top_k=4)


def make_job(**changes) -> SimpleNamespace:
    """The settings that preflight reads, each in the table that has it."""
    job = SimpleNamespace(
        metrics=SimpleNamespace(enable_tensorboard=False, enable_wandb=False),
        training=SimpleNamespace(enable_cpu_offload=False, dtype="float32", mixed_precision_param="bfloat16"),
        parallelism=SimpleNamespace(
            pipeline_parallel_degree=1,
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_schedule_csv="",
            context_parallel_degree=1,
        ),
        validation=SimpleNamespace(enable=False),
    )
    for name, value in changes.items():
        (table,) = (t for t in vars(job).values() if hasattr(t, name))
        setattr(table, name, value)
    return job


def check_job(job: SimpleNamespace, **settings) -> None:
    preflight.check_job(job, Fp8FlowMoEConfig(**settings), validation="validation")


@pytest.mark.parametrize("setting", ["dtype", "mixed_precision_param"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
def test_dtypes(setting: str, dtype: str):
    message = f"fp8_flow_moe quantizes bf16 or fp32, but training.{setting} = {dtype!r}; set it to one of them"
    with refused(message if dtype in ("float16", "float64") else None):
        check_job(make_job(**{setting: dtype}))


def test_shards_on_the_cpu_are_not_quantized():
    check_job(make_job(enable_cpu_offload=True))
    check_job(make_job(), fp8_all_gather=True)
    with refused(
        "fp8_flow_moe.fp8_all_gather quantizes shards where they are stored, but training.enable_cpu_offload stores "
        "them on the CPU; set one of the two to false"
    ):
        check_job(make_job(enable_cpu_offload=True), fp8_all_gather=True)


def test_statistics_need_a_logger():
    check_job(make_job(enable_wandb=True), statistics_every=10)
    check_job(make_job(enable_tensorboard=True), statistics_every=10)
    with refused(
        "fp8_flow_moe.statistics_every = 10, but nothing logs the statistics; set metrics.enable_tensorboard or "
        "metrics.enable_wandb, or set it to 0"
    ):
        check_job(make_job(), statistics_every=10)


def test_validation_under_context_parallelism():
    check_job(make_job(context_parallel_degree=2))
    with refused(
        "fp8_flow_moe with validation under context parallelism is untested; set validation.enable = false or "
        "parallelism.context_parallel_degree = 1"
    ):
        check_job(make_job(context_parallel_degree=2, enable=True))


@pytest.mark.parametrize("schedule", ["1F1B", "1f1b", "Interleaved1F1B", "GPipe", "LoopedBFS"])
def test_pipeline_schedules(schedule: str):
    check_job(make_job(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule))


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("", name) for name in ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV", "PipelineScheduleMulti", "")]
    + [("_csv", "schedule.csv")],
)
def test_pipeline_schedules_that_may_split_the_backward(name: str, schedule: str):
    setting = f"pipeline_parallel_schedule{name}"
    check_job(make_job(**{setting: schedule}))  # without a pipeline nobody reads it
    with refused(
        f"parallelism.{setting} = {schedule!r} may split the backward, but fp8_flow_moe computes input and weight "
        "gradients together; use 1F1B, Interleaved1F1B, GPipe or LoopedBFS instead"
    ):
        check_job(make_job(pipeline_parallel_degree=2, **{setting: schedule}))


@pytest.mark.parametrize("built_for", ["13.0", None])
def test_lost_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, built_for: str | None):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert preflight.check_hardware() == "plain PyTorch reference on the CPU"
    assert ("built for CUDA but finds no GPU" in caplog.text) == bool(built_for)


@pytest.mark.parametrize(
    ("settings", "fsdp_shards", "warning"),
    [
        ({}, 1, None),
        ({}, 2, None),
        ({"cache_weights": True}, 1, None),
        ({"cache_weights": True}, 2, "cache_weights keeps quantized weights unsharded, 2 bytes per parameter"),
        (
            {"cache_weights": True, "cache_layouts": "forward"},
            2,
            "cache_weights keeps quantized weights unsharded, 1 byte per parameter",
        ),
        ({"cache_layouts": "forward"}, 2, "cache_layouts has no effect without fp8_flow_moe.cache_weights"),
        ({"save_h": "fp8"}, 2, None),
        ({"recompute": "experts"}, 2, None),
        ({"recompute": "experts", "save_h": "fp8"}, 2, "save_h has no effect with"),
        ({"fp8_all_gather": True}, 2, None),
        ({"fp8_all_gather": True}, 1, "fp8_all_gather has no effect: FSDP shards the experts over one rank"),
    ],
)
def test_warnings(caplog: pytest.LogCaptureFixture, settings: dict, fsdp_shards: int, warning: str | None):
    preflight.warn_about_settings(Fp8FlowMoEConfig(**settings), fsdp_shards)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == bool(warning) and (not warning or f"fp8_flow_moe.{warning}" in warnings[0])


def test_symmetric_dispatch_needs_one_node(caplog: pytest.LogCaptureFixture):
    symmetric = Fp8FlowMoEConfig(dispatch="symmetric")

    def check(config: Fp8FlowMoEConfig, ranks: int, local_ranks: str | None, hidden_dim_shards: int = 1) -> None:
        preflight.check_dispatch(config, preflight.ExpertLayout(ranks, hidden_dim_shards, 1, 64), local_ranks)

    check(symmetric, 8, "8")
    check(symmetric, 16, None)
    check(Fp8FlowMoEConfig(), 16, "8")
    for ranks, hidden_dim_shards in ((16, 1), (8, 2)):
        with pytest.raises(
            ValueError, match='symmetric" needs .* one node, but 16 ranks .* a node has 8; lower parallelism.expert'
        ):
            check(symmetric, ranks, "8", hidden_dim_shards)
    assert not caplog.records
    check(symmetric, 1, "8")
    assert "no effect without expert parallelism" in caplog.text
