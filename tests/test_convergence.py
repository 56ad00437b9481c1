"""The statistics of experiments/convergence: what repeated runs allow to conclude. And its clamped experts."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torchtitan.models.moe.moe import MoE, MoEArgs

from experiments.convergence import analyse, clamped, train
from experiments.convergence.data import ShuffledWindows
from experiments.reference import relative_error
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE


def test_effects_equal_a_two_sample_t_interval():
    cells = [("bf16", "s1")] * 3 + [("balanced", "s1")] * 3
    deviation, freedom, effects = analyse.effects(cells, [2.0, 2.002, 1.998, 2.001, 2.003, 2.005])
    assert freedom == 4
    assert deviation == pytest.approx(0.001)
    # t of 4 degrees of freedom, 97.5%: 2.7764
    assert effects["balanced"].mean == pytest.approx(0.0015)
    assert effects["balanced"].half_width == pytest.approx(2.7764 * 0.001 * (2 / 3) ** 0.5, rel=5e-3)
    assert effects["balanced"].runs == 3


def test_intervals_cover_the_truth():
    """Two checkpoints of different loss, bf16 and balanced repeated, ffns_only once per checkpoint and 0.3% worse."""
    rng = np.random.default_rng(0)
    truth = {"bf16": 0.0, "balanced": 0.0, "ffns_only": 0.003}
    cells = [
        (r, c) for c in ("s1", "s2") for r, n in (("bf16", 4), ("balanced", 4), ("ffns_only", 1)) for _ in range(n)
    ]
    covered = {"balanced": 0, "ffns_only": 0}
    for _ in range(300):
        losses = [{"s1": 3.0, "s2": 2.8}[c] * (1 + truth[r] + 0.001 * rng.standard_normal()) for r, c in cells]
        for recipe, effect in analyse.effects(cells, losses)[2].items():
            covered[recipe] += abs(effect.mean - truth[recipe]) <= effect.half_width
    assert all(0.91 < count / 300 < 0.99 for count in covered.values()), covered


def test_pairs_share_checkpoint_and_noise():
    """What a noise does to both recipes cancels; a run without a partner does not count."""
    cells = [(recipe, "s1", noise) for recipe in ("bf16", "balanced") for noise in ("", "1", "2")] + [
        ("balanced", "s2", "")
    ]
    runs = [SimpleNamespace(recipe=recipe, seed=seed, noise=noise) for recipe, seed, noise in cells]
    losses = [2.0, 3.0, 4.0, 2.0 * 1.001, 3.0 * 1.002, 4.0 * 1.003, 9.0]
    effect = analyse.paired(runs, losses, "balanced")
    assert effect.mean == pytest.approx(0.002) and effect.runs == 3
    # t of 2 degrees of freedom, 97.5%: 4.303
    assert effect.half_width == pytest.approx(4.303 * 0.001 / 3**0.5, rel=5e-3)
    assert analyse.paired(runs[:4], losses[:4], "balanced") is None


def test_effects_need_a_repetition():
    deviation, freedom, effects = analyse.effects([("bf16", "s1"), ("ffns_only", "s1")], [2.0, 2.1])
    assert math.isnan(deviation) and freedom == 0 and effects == {}


def write_run(folder, name, first_step, last_step, loss, evaluated):
    """A log as train.py writes it, with a constant loss, cut off behind the last evaluation."""
    config = {"model": {"flavor": "tiny"}}
    meta = dict(stage="branch", variant=train.parse_name(name), last_step=last_step, steps=last_step, graph=False,
                clamp=None, experts="", parameters=1, tokens_per_step=8, config=config, environment={})  # fmt: skip
    steps = range(first_step + 1, max(evaluated) + 1)
    records = [meta, *({"step": step, "loss": loss, "grad_norm": 1.0} for step in steps)]
    records += [{"step": step, "held_out_loss": loss, "max_violation": [0.5]} for step in evaluated]
    (folder / name).mkdir(parents=True)
    (folder / name / "log.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 1, "lo')


def test_a_branch_that_was_cut_off(tmp_path):
    """Unfinished runs are compared as far as they came and do not count as results."""
    for name, loss, evaluated in (
        ("bf16-s1-resume", 2.0, [200, 250, 300]),
        ("bf16-s1-resume1", 2.002, [200, 250, 300]),
        ("balanced-s1-resume", 2.004, [200, 250, 300]),
        ("ffns_only-s1-resume", 2.2, [200, 250]),
    ):
        write_run(tmp_path, name, 200, 300, loss, evaluated)
    runs = analyse.read_runs(tmp_path)
    assert [run.name for run in runs] == [
        "bf16-s1-resume", "bf16-s1-resume1", "balanced-s1-resume", "ffns_only-s1-resume"
    ]  # fmt: skip
    rows = {row["name"]: row for row in analyse.summarize(runs)}
    assert "reference" not in rows["bf16-s1-resume"]
    assert rows["bf16-s1-resume1"]["reference"] == rows["ffns_only-s1-resume"]["reference"] == "bf16-s1-resume"
    assert rows["ffns_only-s1-resume"]["step"] == 250
    assert rows["ffns_only-s1-resume"]["held_out_deviation"] == pytest.approx(0.1)
    assert rows["balanced-s1-resume"]["final_deviation"] == pytest.approx(0.002)
    table = analyse.format_effects(runs)
    assert "| balanced | 1 |" in table and "ffns_only" not in table
    records = analyse.records(runs, list(rows.values()))
    assert any(record["name"] == "balanced: final held-out loss" for record in records)


def test_broken_runs_give_valid_json(tmp_path):
    write_run(tmp_path, "bf16-s1-highlr", 0, 300, 2.0, [0, 300])
    write_run(tmp_path, "balanced-s1-highlr", 0, 300, math.nan, [0, 300])
    runs = analyse.read_runs(tmp_path)
    records = analyse.records(runs, analyse.summarize(runs))
    assert "NaN" not in json.dumps(records)
    assert {r["value"] for r in records if r["name"].startswith("balanced-s1-highlr held_out_loss")} == {"nan"}


def test_resumed_windows_continue(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(8 * 12 + 1, dtype=np.uint16))
    whole, resumed = (iter(ShuffledWindows(tmp_path, "train", 8, 2, seed=1)) for _ in range(2))
    batches = [next(whole)[1] for _ in range(10)]  # an epoch has 6
    later = ShuffledWindows(tmp_path, "train", 8, 2, seed=1)
    later.skip = 7
    assert (next(iter(later))[1] == batches[7]).all()
    assert not (next(resumed)[1] == batches[7]).all()


@pytest.mark.parametrize(
    ("name", "variant", "reference"),
    [
        ("balanced-s1", ("balanced", 1, "", 0), "bf16-s1"),
        ("bf16-s1-again", ("bf16", 1, "", 1), "bf16-s1"),
        ("bf16-s2-outliers1e5-again", ("bf16", 2, "outliers1e5", 1), "bf16-s2-outliers1e5"),
        ("experts_only-s1-resume3", ("experts_only", 1, "resume", 3), "bf16-s1-resume"),
    ],
)
def test_names_of_runs(tmp_path, name, variant, reference):
    """A repetition is compared with the run that it repeats."""
    assert train.parse_name(name) == variant
    for each in (name, reference):
        write_run(tmp_path, each, 0, 300, 2.0, [0, 300])
    runs = {run.name: run for run in analyse.read_runs(tmp_path)}
    assert analyse.reference_of(runs[name], [*runs.values()]) is runs[reference]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 1.0
PARAMETERS = LIMIT, clamped.ALPHA, clamped.OFFSET


def test_the_clamp_of_bf16_is_the_specification_s():
    """Values on the limit and beyond it included, in fp32, where both are one formula, forward and backward."""
    g, u = (torch.cat([torch.tensor([-LIMIT, LIMIT]), 2 * torch.randn(510)]).requires_grad_() for _ in range(2))
    dout = torch.randn(512)
    entry = ACTIVATIONS["clamped_swiglu"]
    out = clamped.clamped_swiglu(g, u, LIMIT)
    assert_close(out, entry.forward(g, u, *PARAMETERS))
    assert_close(torch.autograd.grad(out, (g, u), dout), entry.backward(g.detach(), u.detach(), dout, *PARAMETERS))


def moe_layer() -> MoE:
    args = MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, score_before_experts=False)
    moe = MoE(args, dim=128, hidden_dim=128).to(DEVICE)
    with torch.no_grad():
        for param in moe.parameters():
            param.copy_(torch.randn(param.shape) / 128**0.5)
    return moe


@pytest.mark.parametrize("fp8", [False, True])
def test_routed_experts_alone_are_clamped(fp8):
    """A layer of each recipe equals the formula in fp32; its shared experts keep SwiGLU."""
    moe = moe_layer()
    x_TD = torch.randn(64, 128, device=DEVICE)
    w1, w2, w3 = (moe.experts.get_parameter(name).detach() for name in ("w1", "w2", "w3"))
    scores_TK, ids_TK, _ = moe.router(x_TD, moe.expert_bias)
    h = (torch.einsum("td,ehd->eth", x_TD, w) for w in (w1, w3))
    out_ETD = torch.einsum("eth,edh->etd", ACTIVATIONS["clamped_swiglu"].forward(*h, *PARAMETERS), w2)
    expected = moe.shared_experts(x_TD)
    expected = expected + (out_ETD[ids_TK, torch.arange(64, device=DEVICE)[:, None]] * scores_TK[..., None]).sum(1)
    if fp8:
        Fp8FlowMoE.convert(moe, Fp8FlowMoEConfig(), fp8_shared=True)
    clamped.clamp(moe, LIMIT)
    shares = torch.zeros(2, device=DEVICE)
    moe.router.register_forward_hook(clamped.adds_shares_to(shares, moe, LIMIT))
    out = moe(x_TD.unsqueeze(0))
    assert relative_error(out[0].detach(), expected.detach()) < (0.08 if fp8 else 0.01)
    # Gates and ups are N(0, 1): 16% are above 1 and 32% beyond -1 or 1.
    assert shares.tolist() == pytest.approx([0.16, 0.32], abs=0.05)
    out.sum().backward()
    assert all(param.grad is not None for param in moe.parameters())
