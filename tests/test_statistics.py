"""Numerics statistics: counts checked by hand and against the transposes themselves, and when counting happens."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.moe.moe import MoE, MoEArgs

from experiments.reference import make_layer
from tests.jobs import convert, make_config, make_model
from tests.layer import DEVICE
from titan_fp8moe import Fp8FlowLinear, ops, recipe, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.group import feed_forward
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.rows import Rows
from titan_fp8moe.torchtitan.cpu import _histc_with_integers
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE
from titan_fp8moe.trainer.compat import fix_shape_inference


@pytest.fixture(autouse=True)
def clean():
    statistics.take(DEVICE)
    yield
    statistics.take(DEVICE)


def rows(x: torch.Tensor) -> Rows:
    q, scale = recipe.quantize_rows(x)
    return Rows(q, recipe.column_major(scale))


def figures(x, a, dy, dh, weights, token_M, wgrad="balanced") -> dict[str, float]:
    offsets = torch.tensor([token_M.shape[0]], dtype=torch.int32, device=DEVICE)
    x, a, dy, dh = ((kind, rows(t), 1, t.shape[1]) for kind, t in dict(x=x, a=a, dy=dy, dh=dh).items())
    gate, down, up = weights
    statistics.record([(x, dh), (a, dy)], [(gate, up), (down,)], offsets, token_M, wgrad)
    return statistics.summarize(statistics.take(DEVICE))


def make_inputs(M=128, D=256, H=128):
    x, a, dy, dh = (torch.ones(M, n, device=DEVICE) for n in (D, H, D, 2 * H))
    weights = [torch.ones(2, *shape, device=DEVICE) for shape in ((H, D), (D, H), (H, D))]
    return x, a, dy, dh, weights, torch.arange(M, dtype=torch.int32, device=DEVICE)


def test_known_underflow():
    """Exponent 0 throughout: 2**-10 rounds to zero, 2**-9 to 2**-7 are subnormal, 2**-6 is not."""
    x, a, dy, dh, weights, token_M = make_inputs()
    x[:, 0], x[:, 128] = 448, 448
    x[:3, 1] = 2.0**-10
    x[:3, 2], x[:3, 3] = 2.0**-9, 2.0**-7
    x[:3, 4] = 2.0**-6
    x[3, 128:] = 0  # a tile of zeros: nothing underflowed
    x[4, 130] = math.nan
    x[5:7] = math.inf  # padding: whatever it is, it does not count
    token_M[5:7] = -1
    weights[1][1, 0, 0] = 448 * 2.0**20  # in one block: w2 has (2, 256, 128), w1 and w3 (2, 128, 256)
    result = figures(x, a, dy, dh, weights, token_M)
    counted = 126 * 256 - 2 * 128  # two tiles of zeros or NaN
    assert result["x/underflow"] == pytest.approx(3 / counted)
    assert result["x/subnormal"] == pytest.approx(6 / counted)
    assert result["x/nan_tiles"] == 1
    assert result["x/zero_tiles"] == 1 / 251
    assert result["w/underflow"] == pytest.approx((128 * 128 - 1) / (3 * 2 * 128 * 256))
    assert result["w/nan_tiles"] == 0 and result["a/underflow"] == 0
    assert result["w/exponent_max"] == 20 and result["w/exponent_min"] == -8
    assert result["w/row_spread_p99"] == 0  # w2 has one block a row


def test_a_linear_counts_its_operands():
    linear = Fp8FlowLinear(256, 128, device=DEVICE)
    x = torch.ones(128, 256, device=DEVICE)
    x[5, :128] = math.nan
    x[6, 128:] = 0
    statistics.collect()
    linear(x.requires_grad_()).nan_to_num().sum().backward()
    result = statistics.summarize(statistics.take(DEVICE))
    assert result["x/nan_tiles"] == 1 and result["x/zero_tiles"] == 1 / 255
    assert result["dy/exponent_max"] == -8 and "w/exponent_max" in result and "dh/nan_tiles" not in result


@pytest.mark.parametrize("layer", ["ffn", "relu2", "interleaved"])
def test_padding_does_not_count(layer):
    """80 units take 80 of 128 columns, interleaved 160 of 256; none of them is zero, and gradients of padding are."""
    x, scores, ids, weights = make_layer(128, 128, 80, 2, 1, device=DEVICE)
    x, w1, w2, w3 = (t.abs().requires_grad_() for t in (x, *weights))
    statistics.collect()
    if layer == "ffn":
        out = feed_forward(x, ExpertWeights(w1[0], w2[0], w3[0]), Fp8FlowMoEConfig())
    elif layer == "relu2":
        out = routed_experts(x, w1, w2, None, ids, scores, activation="relu2")
    else:
        out = routed_experts(x, torch.cat([w1, w3], 1), w2, None, ids, scores, interleaved=True)
    out.backward(torch.rand_like(out))
    result = statistics.summarize(statistics.take(DEVICE))
    for kind in ("x", "a", "dy", "dh", "w"):
        assert result[f"{kind}/underflow"] < 0.05 and not result[f"{kind}/zero_tiles"], kind


def test_known_shifts():
    """One operand's rows at exponents 0, -3, -10 and -40 beside each other, the other operand all alike."""
    x, a, dy, dh, weights, token_M = make_inputs()
    exponents = torch.tensor([0, -3, -10, -40], device=DEVICE).repeat_interleave(32)
    x[:] = 448 * torch.exp2(exponents.float()).unsqueeze(1)
    for wgrad, kind, shares in (
        ("scaling_aware", "x", [0.25, 0.25, 0, 0.25, 0.25]),
        ("scaling_aware", "dh", [1, 0, 0, 0, 0]),
        # Both operands carry half: shifts of 2, 5 and 20 in x, and 1, 5 and 20 in dh.
        *(("balanced", kind, [0.25, 0.25, 0.25, 0, 0.25]) for kind in ("x", "dh")),
        ("bf16", "x", [1, 0, 0, 0, 0]),
    ):
        result = figures(x, a, dy, dh, weights, token_M, wgrad)
        assert [result[f"{kind}/shift/{name}"] for name in statistics.SHIFTS] == shares, (wgrad, kind)
        if kind == "x" and wgrad != "balanced":
            assert (result["x/flushed"], result["x/rounded"]) == (shares[-1], 0)


@pytest.mark.parametrize("wgrad", recipe.TRANSPOSE_MODES)
def test_flushed_and_rounded_are_what_the_transpose_does(wgrad, monkeypatch):
    monkeypatch.setattr(statistics, "_CHUNK", 1)  # as for operands of many blocks
    torch.manual_seed(0)
    *_, weights, _ = make_inputs()
    M = 384
    sizes = torch.exp2(4 * torch.randn(4, M, 1, device=DEVICE))
    x, a, dy, dh = (torch.randn(M, n, device=DEVICE) * s for n, s in zip((256, 128, 256, 256), sizes, strict=True))
    token_M = torch.arange(M, dtype=torch.int32, device=DEVICE)
    result = figures(x, a, dy, dh, weights, token_M, wgrad)
    offsets = torch.tensor([M], dtype=torch.int32, device=DEVICE)
    for kinds, (left, right) in (("x", "dh"), (rows(x), rows(dh))), (("a", "dy"), (rows(a), rows(dy))):
        transposed = ops.transpose_pair(*left, *right, offsets, wgrad)
        balance = recipe.balance_exponent(left.scale, right.scale) * (wgrad == "balanced")
        results = (left, transposed[:2], -balance), (right, transposed[2:], balance)
        for kind, (source, result_t, moved) in zip(kinds, results, strict=True):
            before = recipe.dequantize(*source) * torch.exp2(moved.float()).unsqueeze(1)
            after = recipe.dequantize(*result_t).t()
            nonzero = before != 0
            flushed, changed = nonzero & (after == 0), nonzero & (after != 0) & (after != before)
            assert flushed.any() and changed.any()
            assert sum(result[f"{kind}/shift/{name}"] for name in statistics.SHIFTS) == pytest.approx(1)
            assert result[f"{kind}/flushed"] == pytest.approx(float(flushed.sum() / nonzero.sum()), rel=1e-6)
            assert result[f"{kind}/rounded"] == pytest.approx(float(changed.sum() / nonzero.sum()), rel=1e-6)


def run_layer(recomputed: bool, recompute: str = "activation") -> None:
    torch.manual_seed(0)
    x, scores, ids, weights = make_layer(200, 128, 128, 4, 2, device=DEVICE)
    layer = functools.partial(routed_experts, config=Fp8FlowMoEConfig(recompute=recompute))
    layer = functools.partial(checkpoint, layer, use_reentrant=False) if recomputed else layer
    layer(*(t.requires_grad_() for t in (x, *weights)), ids, scores.requires_grad_()).sum().backward()


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_recomputation_counts_once(recompute):
    """And what was not asked for not at all. It has no figures, as weights that FSDP gathered in FP8: they are NaN."""
    run_layer(False, recompute)
    nothing, counts = statistics.take(DEVICE), []
    assert not nothing.any() and statistics.summarize(nothing) == {}
    for recomputed in (False, True):
        statistics.collect()
        run_layer(recomputed, recompute)
        counts.append(statistics.take(DEVICE))
    assert torch.equal(*counts)
    exponents = counts[0].split(statistics.SIZES, 1)[1]
    # 400 routed rows of one tile, two tiles in dh; four 128x128 blocks in each weight. Byte 0 stands for padding.
    assert exponents[:, 1:].sum(1).tolist() == [400, 400, 400, 800, 12]


def test_shape_inference_leaves_no_trace(group, monkeypatch):
    """Pipelines run made-up tokens through a stage at first and after each validation. They count nowhere, raise no NaN
    flag, and go to all experts alike."""
    fix_shape_inference()
    monkeypatch.setattr(torch, "histc", _histc_with_integers(torch.histc))
    made_up = lambda self, meta: torch.full(meta.shape, torch.nan).requires_grad_(meta.requires_grad)  # noqa: E731
    monkeypatch.setattr(PipelineStage, "_to_tensor", made_up, raising=False)
    route, routed = ops.expert_routing, []
    monkeypatch.setattr(ops, "expert_routing", lambda ids, *args: routed.append(ids) or route(ids, *args))
    moe = MoE(MoEArgs(num_experts=4, top_k=2), 128, 128)
    with torch.no_grad():
        moe.init_weights(0.05, torch.device("cpu"))
    Fp8FlowMoE.convert(moe, Fp8FlowMoEConfig())
    moe.experts.nan_flags = torch.zeros(2, 16, dtype=torch.uint8)
    stage = PipelineStage(nn.Sequential(checkpoint_wrapper(moe)), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, _: out.sum())
    x = torch.randn(2, 64, 128, requires_grad=True)
    pairs = x.shape[:2].numel() * 2
    for _ in range(2):
        statistics.collect()
        schedule.step(x, target=x)
        _, tiles, _, nan_tiles, _ = statistics.take("cpu").split(statistics.SIZES, 1)
        assert tiles[0, 1:].sum() == pairs and not nan_tiles.any()
        with torch.no_grad():
            schedule.eval(x, target=x)
    assert not moe.experts.nan_flags.any()
    assert torch.equal(torch.bincount(routed[0].flatten()), torch.full((4,), 32))
    assert moe.tokens_per_expert.sum() == 2 * 2 * pairs  # of two steps; each microbatch is recomputed once


def test_ranks_add_their_counts_of_every_second_step(monkeypatch):
    logged, reduced = [], []
    config = make_config("--fp8_flow_moe.statistics_every=2", "--metrics.enable_tensorboard")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda counts, op=None: op or reduced.append(counts.mul_(2)))
    processor = object.__new__(MetricsProcessor)
    processor.job_config, processor.model_parts = config, []
    processor.logger = SimpleNamespace(log=lambda figures, step: logged.append((figures, step)))
    convert(config, make_model(config))
    for step in range(1, 6):
        run_layer(recomputed=False)
        processor.should_log(step)
    assert [(figures["fp8_flow_moe/x/nan_tiles"], step) for figures, step in logged] == [(0, 2), (0, 4)]
    for counts in reduced:
        assert counts.split(statistics.SIZES, 1)[1][:, 1:].sum(1).tolist() == [800, 800, 800, 1600, 24]
