"""The framework-free checks: what they refuse, and the settings and remedies that they name."""

import contextlib
import logging
import re
import subprocess
import sys

import pytest
import torch

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.trainer import preflight


def refused(message: str | None) -> contextlib.AbstractContextManager:
    """Expects a ValueError with exactly this message, or none."""
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$") if message else contextlib.nullcontext()


def test_torchtitan_is_not_imported():
    code = "import sys, titan_fp8moe.trainer.preflight; sys.exit('torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


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


def test_description_has_every_setting_of_a_layer():
    assert Fp8FlowMoEConfig(filter_fqns=["layers.1."]).describe() == (
        "wgrad=balanced, save_h=bf16, recompute=activation, dispatch=auto, dispatch_capacity=1.5, "
        "cache_weights=False, cache_layouts=both, fp8_all_gather=False, statistics_every=0, emulate=False"
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


@pytest.mark.parametrize(("experts", "shards", "fits"), [(8, 1, True), (8, 4, True), (8, 3, False), (8, 16, False)])
def test_experts_divide_over_ranks(experts: int, shards: int, fits: bool):
    message = f"moe: {experts} experts do not divide over {shards} expert-parallel ranks; set EP"
    with refused(None if fits else message):
        preflight.check_experts("moe", experts, shards, remedy="set EP")


@pytest.mark.parametrize(("shards", "fsdp", "fits"), [(2, 4, True), (1, 8, True), (2, 3, False), (2, 8, False)])
def test_whole_experts(shards: int, fsdp: int, fits: bool):
    message = (
        "moe: fp8_flow_moe.fp8_all_gather needs whole experts on each rank, but 8 experts do not divide over "
        f"{shards} expert-parallel x {fsdp} FSDP ranks; set it to false, or replicate"
    )
    with refused(None if fits else message):
        preflight.check_fp8_all_gather("moe", 8, 256, shards, fsdp, remedy="replicate")


def test_fp8_gather_of_padded_weights():
    with refused(
        "moe: fp8_flow_moe.fp8_all_gather needs a hidden dim of multiples of 128 on each rank, got 704; set it to false"
    ):
        preflight.check_fp8_all_gather("moe", 8, 704, 1, 2, remedy="replicate")


@pytest.mark.parametrize(
    ("dim", "hidden_dim", "shards", "message"),
    [
        (256, 1408, 1, None),
        (256, 1408, 11, None),
        (192, 1408, 1, "moe: model dim 192 is not a multiple of 128, the width of an FP8 tile; choose one"),
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
        preflight.check_dims("moe", dim, hidden_dim, shards, remedy="set TP")


def test_rows_of_a_rank():
    preflight.check_rows("moe", MAX_ROWS // 4, 4, remedy="send less")
    tokens = MAX_ROWS // 4 + 1
    with refused(
        f"moe: {tokens} tokens of a microbatch have {4 * tokens} rows for their top-4 experts, but a rank can have "
        f"{MAX_ROWS}; send less"
    ):
        preflight.check_rows("moe", tokens, 4, remedy="send less")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
def test_dtypes(dtype: str):
    message = f"fp8_flow_moe quantizes bf16 or fp32, but DTYPE = {dtype!r}; set it to one of them"
    with refused(message if dtype in ("float16", "float64") else None):
        preflight.check_dtype(dtype, setting="DTYPE")


@pytest.mark.parametrize("conflicting", [False, True])
@pytest.mark.parametrize(
    ("check", "setting", "message"),
    [
        (
            preflight.check_optimizer,
            {"cache_weights": True},
            "fp8_flow_moe.cache_weights keeps quantized weights for a whole step, but with OTHER each microbatch "
            "changes the weights; set one of the two to false",
        ),
        (
            preflight.check_offload,
            {"fp8_all_gather": True},
            "fp8_flow_moe.fp8_all_gather quantizes shards where they are stored, but OTHER stores them on the CPU; set "
            "one of the two to false",
        ),
    ],
)
def test_conflicts_with_the_trainer(check, setting: dict, message: str, conflicting: bool):
    check(Fp8FlowMoEConfig(), conflicting, setting="OTHER")
    with refused(message if conflicting else None):
        check(Fp8FlowMoEConfig(**setting), conflicting, setting="OTHER")


def test_statistics_need_a_logger():
    preflight.check_logging(Fp8FlowMoEConfig(), False, remedy="log")
    preflight.check_logging(Fp8FlowMoEConfig(statistics_every=10), True, remedy="log")
    with refused("fp8_flow_moe.statistics_every = 10, but nothing logs the statistics; log, or set it to 0"):
        preflight.check_logging(Fp8FlowMoEConfig(statistics_every=10), False, remedy="log")


@pytest.mark.parametrize("schedule", ["1F1B", "1f1b", "Interleaved1F1B", "GPipe", "LoopedBFS"])
def test_pipeline_schedules(schedule: str):
    preflight.check_pipeline_schedule(schedule, setting="SCHEDULE")


@pytest.mark.parametrize(
    "schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV", "schedule.csv", "PipelineScheduleMulti", ""]
)
def test_pipeline_schedules_that_may_split_the_backward(schedule: str):
    with refused(
        f"SCHEDULE = {schedule!r} may split the backward, but fp8_flow_moe computes input and weight gradients "
        "together; use 1F1B, Interleaved1F1B, GPipe or LoopedBFS instead"
    ):
        preflight.check_pipeline_schedule(schedule, setting="SCHEDULE")


@pytest.mark.parametrize("built_for", ["13.0", None])
def test_lost_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, built_for: str | None):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert preflight.check_hardware(emulate=False) == "plain PyTorch reference on the CPU"
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

    def check(config: Fp8FlowMoEConfig, ranks: int, local_ranks: int | None) -> None:
        preflight.check_dispatch(
            config, preflight.ExpertLayout(ranks, 1, 1, 64), local_ranks, remedy="lower the degree"
        )

    check(symmetric, 8, 8)
    check(symmetric, 16, None)
    check(Fp8FlowMoEConfig(), 16, 8)
    with pytest.raises(
        ValueError, match='symmetric" needs .* one node, but 16 ranks .* a node has 8; lower the degree'
    ):
        check(symmetric, 16, 8)
    assert not caplog.records
    check(symmetric, 1, 8)
    assert "no effect without expert parallelism" in caplog.text
