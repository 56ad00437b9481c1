"""Errors of FP8-Flow's roundings on the tensors of a real run.

    python -m experiments.numerics.run --out experiments/numerics

Trains a DeepSeek-V3-shaped model and captures the routed experts' inputs, gradients, weights and routing in every layer
at three steps. On these tensors, and on normal random data, it computes

* each GEMM's error against float64 products of its operands before quantization,
* the weight gradients' error by transpose mode, and with fp32 scales and a second quantization,
* what that second quantization does to the operands themselves.

Adds to results.json and draws numerics.png. outputs/numerics/raw.json gets every capture's errors, statistics by step,
losses and step times. Without a GPU it trains the flavor ``tiny`` for 20 steps, as a check of the script.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from experiments.ablations import requantized_pair
from experiments.pictures import save
from titan_fp8moe import ops, recipe
from titan_fp8moe.layer.statistics import SHIFTS
from titan_fp8moe.recipe import FP8, FP8_MAX, TILE, row_capacity
from titan_fp8moe.spec import ExpertSpec
from titan_fp8moe.testing import environment, write_records, write_text

ROOT = Path(__file__).parents[2]
TRANSPOSES = ("balanced", "scaling_aware", "requantize", "bf16")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class Capture:
    """One layer's call: x and dout (T, D), weights w1, w2, w3, and the router's scores and experts (T, K)."""

    name: str
    x_TD: Tensor
    weights: list[Tensor]
    topk_scores_TK: Tensor
    topk_ids_TK: Tensor
    dout_TD: Tensor | None = None


def train(flavor: str, steps: int, every: int, folder: str) -> tuple[list[Capture], dict]:
    """Captures from a run of torchtitan's trainer in this process, and its statistics, losses and times by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    sizes = (2, 128) if DEVICE == "cpu" else (4, 4096)
    arguments = {
        "job.config_file": ROOT / "train_configs/debugmodel.toml",
        "job.dump_folder": folder,
        "model.flavor": flavor,
        "training.steps": steps,
        "training.local_batch_size": sizes[0],
        "training.seq_len": sizes[1],
        "optimizer.lr": 3e-4,
        "lr_scheduler.warmup_steps": max(steps // 10, 1),
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": 1,
        "fp8_flow_moe.statistics_every": every,
        "debug.seed": 0,
    }
    os.chdir(ROOT)  # the configuration names the corpus from there
    init_logger()
    config = ConfigManager().parse_args(
        [*(f"--{key}={value}" for key, value in arguments.items()), "--metrics.enable_tensorboard"]
    )

    # Not the steps that collect statistics, which are timed.
    wanted = {steps // 10 + 1, steps // 2 + 1, steps - 1}
    captures, times = [], {}

    class CapturingTrainer(Trainer):
        def train_step(self, data_iterator):
            captures_of_step.clear()
            synchronize()
            start = time.perf_counter()
            super().train_step(data_iterator)
            synchronize()
            times[self.step] = time.perf_counter() - start
            captures.extend(captures_of_step)

    from titan_fp8moe.torchtitan import modules

    captures_of_step: list[Capture] = []
    apply_experts = modules.apply_experts

    def capturing(x_TD, weights, topk_ids_TK, topk_scores_TK, layer, *, meanwhile, **settings):
        out = apply_experts(x_TD, weights, topk_ids_TK, topk_scores_TK, layer, **settings)
        if trainer.step in wanted and torch.is_grad_enabled():
            tensors = [t.detach().clone() for t in (x_TD, *weights, topk_scores_TK, topk_ids_TK)]
            name = f"step {trainer.step}, MoE layer {len(captures_of_step) + 1}"
            capture = Capture(name, tensors[0], tensors[1:4], *tensors[4:])
            captures_of_step.append(capture)
            out.register_hook(lambda dout: setattr(capture, "dout_TD", dout.detach().clone()))
        return out if meanwhile is None else out + meanwhile()

    modules.apply_experts = capturing
    trainer = CapturingTrainer(config)
    trainer.train()
    trainer.close()
    modules.apply_experts = apply_experts
    torch.distributed.destroy_process_group()

    (events_folder,) = (Path(folder) / "tb").iterdir()
    events = EventAccumulator(str(events_folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
        if tag.startswith(("fp8_flow_moe/", "loss_metrics/global_avg"))
    }
    return captures, {"scalars": scalars, "step_seconds": times, "capture_steps": sorted(wanted)}


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def random_like(capture: Capture) -> Capture:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(like: Tensor, scale: float) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=DEVICE).mul(scale).to(like.dtype)

    weights = [normal(w, 0.02) for w in capture.weights]
    route = capture.topk_scores_TK, capture.topk_ids_TK
    return Capture("random", normal(capture.x_TD, 1), weights, *route, normal(capture.dout_TD, 1))


# --- errors -----------------------------------------------------------------------------------------------------------


class Errors:
    """||out - ref|| / ||ref|| of quantities that come in parts."""

    def __init__(self):
        self.sums = defaultdict(lambda: torch.zeros(2, dtype=torch.float64, device=DEVICE))

    def add(self, name: str, out: Tensor, ref: Tensor) -> None:
        out, ref = out.double(), ref.double()
        self.sums[name] += torch.stack([(out - ref).square().sum(), ref.square().sum()])

    def result(self) -> dict[str, float]:
        return {name: float((sums[0] / sums[1]).sqrt()) for name, sums in self.sums.items()}


def quantize_rows(x_MD: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = ops.quantize_rows(x_MD)
    return q, recipe.column_major(scale)


def powers_of_two(x: Tensor) -> Tensor:
    """Quantize-dequantize with the recipe, 1x128 along the last dim."""
    return recipe.dequantize(*recipe.quantize_rows(x.float())).double()


def fp32_scales(x: Tensor) -> Tensor:
    """The same with scales amax / 448 in fp32, the usual recipe."""
    tiles = x.float().unflatten(-1, (-1, TILE))
    scale = tiles.abs().amax(-1, keepdim=True) / FP8_MAX
    scale = torch.where(scale > 0, scale, 1)
    return ((tiles / scale).to(FP8).float() * scale).flatten(-2).double()


def weight_gradient(dy: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor], offsets_E: Tensor, mode: str) -> Tensor:
    """dW = dy^T x of each expert, (E, N, D) fp32, from rows and their scales in expert order."""
    if mode == "bf16":
        dy_NM, x_MD = recipe.dequantize(*dy, torch.bfloat16).t(), recipe.dequantize(*x, torch.bfloat16)
        return torch._grouped_mm(dy_NM, x_MD, offs=offsets_E).float()
    transpose = requantized_pair if mode == "requantize" else ops.transpose_pair
    x_t, x_t_scale, dy_t, dy_t_scale = transpose(*x, *dy, offsets_E, mode)
    return ops.grouped_mm_wgrad(dy_t, dy_t_scale, x_t, x_t_scale, offsets_E, torch.float32)


def analyse(c: Capture) -> dict[str, float]:
    """Relative errors by name, and ``KIND underflow``: the share of nonzero values that quantization makes zero."""
    E = c.weights[0].shape[0]
    capacity = row_capacity(c.topk_ids_TK.numel(), E)
    offsets_E, token_M, score_M, _ = ops.expert_routing(c.topk_ids_TK, c.topk_scores_TK.float(), E, capacity)
    M = int(offsets_E[-1])
    token_M, score_M = token_M[:M].long(), score_M[:M]

    def rows(t_TD: Tensor) -> Tensor:
        return t_TD[token_M.clamp(min=0)].masked_fill((token_M < 0).unsqueeze(1), 0)

    # The layer's own arithmetic, op by op.
    x_MD, dy_MD = rows(c.x_TD), rows(c.dout_TD)
    w1, w2, w3 = c.weights
    x, dy = quantize_rows(x_MD), quantize_rows(dy_MD)
    h = ops.grouped_mm(*x, *ops.quantize_weight(w1, w3), offsets_E, torch.bfloat16)
    spec = ExpertSpec().encode()
    a = ops.swiglu_quantize(h, score_M, offsets_E, spec, False)[:2]
    y = ops.grouped_mm(*a, *ops.quantize_weight(w2), offsets_E, torch.bfloat16)
    d = ops.grouped_mm(*dy, *ops.quantize_weight_transposed(w2), offsets_E, torch.bfloat16)
    dh = ops.swiglu_quantize_backward(d, h, None, score_M, offsets_E, spec, False)[:2]
    dx = ops.grouped_mm(*dh, *ops.quantize_weight_transposed(w1, w3), offsets_E, torch.bfloat16)
    dw13, dw2 = ({mode: weight_gradient(*pair, offsets_E, mode) for mode in TRANSPOSES} for pair in ((dh, x), (dy, a)))

    errors, lost = Errors(), defaultdict(lambda: torch.zeros(2, dtype=torch.float64, device=DEVICE))
    start = 0
    for e, end in enumerate(offsets_E.tolist()):
        if end == start:
            continue
        run, start = slice(start, end), end
        w13_64, w2_64 = torch.cat([w1[e], w3[e]]).double(), w2[e].double()
        # Operands born inside the SwiGLU kernels, as they are there before quantization.
        h64 = h[run].double().requires_grad_()
        g, u = h64.chunk(2, 1)
        a64 = torch.nn.functional.silu(g) * u * score_M[run].double().unsqueeze(1)
        a64.backward(d[run].double())
        exact = {"x": x_MD[run].double(), "a": a64.detach(), "dy": dy_MD[run].double(), "dh": h64.grad}

        errors.add("GEMM 1", h[run], exact["x"] @ w13_64.T)
        errors.add("GEMM 2", y[run], exact["a"] @ w2_64.T)
        errors.add("GEMM 2 dgrad", d[run], exact["dy"] @ w2_64)
        errors.add("GEMM 1 dgrad", dx[run], exact["dh"] @ w13_64)

        flow, once, twice = {}, {}, {}
        for kind, (q, scale) in (("x", x), ("a", a), ("dy", dy), ("dh", dh)):
            value = exact[kind]
            flow[kind] = recipe.dequantize(q[run], scale[run]).double()
            by_rows = fp32_scales(value)
            once[kind] = fp32_scales(value.T).T
            twice[kind] = fp32_scales(by_rows.T).T
            errors.add(f"{kind}: rows, 2^n scales (FP8-Flow)", flow[kind], value)
            errors.add(f"{kind}: rows, fp32 scales", by_rows, value)
            errors.add(f"{kind}: columns, fp32 scales, once", once[kind], value)
            errors.add(f"{kind}: rows then columns, fp32 scales", twice[kind], value)
            errors.add(f"{kind}: rows then columns, 2^n scales", powers_of_two(flow[kind].T).T, value)
            nonzero = value != 0
            lost[kind] += torch.stack([(nonzero & (flow[kind] == 0)).sum(), nonzero.sum()])

        for name, dw, left, right in (("dW1,3", dw13, "dh", "x"), ("dW2", dw2, "dy", "a")):
            reference = exact[left].T @ exact[right]
            for mode in TRANSPOSES:
                errors.add(f"{name}: {mode}", dw[mode][e], reference)
            errors.add(f"{name}: row-wise values, no transpose", flow[left].T @ flow[right], reference)
            errors.add(f"{name}: columns, fp32 scales, once", once[left].T @ once[right], reference)
            errors.add(f"{name}: rows then columns, fp32 scales", twice[left].T @ twice[right], reference)
    assert e + 1 == E
    return errors.result() | {f"{kind}: underflow": float(n[0] / n[1]) for kind, n in lost.items()}


# --- results ----------------------------------------------------------------------------------------------------------


def cost(run: dict, every: int) -> tuple[float, float]:
    """Median seconds of a step that collects statistics, and of one that does not, the first 10% aside."""
    times = {int(step): seconds for step, seconds in run["step_seconds"].items()}
    late = [step for step in times if step > len(times) // 10 and step not in run["capture_steps"]]
    return tuple(
        statistics.median(times[s] for s in late if (s % every == 0) == collects) for collects in (True, False)
    )


def plot(results: dict[str, dict[str, float]], run: dict, out: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(15, 10), constrained_layout=True)
    names = list(results["random"])

    def dots(axis, names, title):
        for row, name in enumerate(names):
            for capture, values in results.items():
                style = dict(marker="x", color="C3") if capture == "random" else dict(marker="o", color="C0", alpha=0.6)
                axis.plot(values[name], row, **style)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.set_title(f"relative error of {title}; dots: captures, crosses: random data", fontsize=10)
        axis.grid(alpha=0.3)

    dots(axes[0, 0], [name for name in names if name.startswith(("GEMM", "dW"))], "products")
    dots(axes[0, 1], [name for name in names if "scales" in name and not name.startswith("dW")], "operands")
    scalars = run["scalars"]
    for i, kind in enumerate(("x", "a", "dy", "dh", "w")):
        for name, style in (("underflow", "-"), ("flushed", "--")):
            if points := scalars.get(f"fp8_flow_moe/{kind}/{name}"):
                axes[1, 0].plot(list(points), list(points.values()), style, color=f"C{i}", label=f"{kind} {name}")
    axes[1, 0].set_yscale("symlog", linthresh=1e-6)
    axes[1, 0].set_title("share of values lost: quantized (underflow) or transposed (flushed) to zero", fontsize=10)
    axes[1, 0].set_xlabel("step")
    axes[1, 0].legend(fontsize=7, ncol=2)
    kinds = ("x", "a", "dy", "dh")
    bottom = [0.0] * len(kinds)
    for name in SHIFTS:
        shares = [list(scalars[f"fp8_flow_moe/{kind}/shift/{name}"].values())[-1] for kind in kinds]
        axes[1, 1].bar(kinds, shares, bottom=bottom, label=name)
        bottom = [b + share for b, share in zip(bottom, shares, strict=True)]
    axes[1, 1].set_title("exponent shifts of nonzero values in the transposes, last step", fontsize=10)
    axes[1, 1].legend(title="shift")
    save(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flavor", default="tiny" if DEVICE == "cpu" else "16B_short")
    parser.add_argument("--steps", type=int, default=20 if DEVICE == "cpu" else 200)
    parser.add_argument("--statistics-every", type=int, default=5 if DEVICE == "cpu" else 10)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if not (ROOT / "outputs/corpus").exists():
        subprocess.run([sys.executable, "tools/build_corpus.py", "--out", "outputs/corpus"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        captures, run = train(args.flavor, args.steps, args.statistics_every, folder)
    gc.collect()
    trained_at = time.perf_counter()
    results = {c.name: analyse(c) for c in [*captures, random_like(captures[-1])]}
    env = environment()
    print(f"training {trained_at - begin:.0f} s, analysis {time.perf_counter() - trained_at:.0f} s")
    write_text(ROOT / "outputs/numerics/raw.json", json.dumps(env | {"errors": results, **run}))

    shape = f"{args.flavor}, {args.steps} steps, {len(captures)} captures"
    random, records = results["random"], []
    trained = [values for name, values in results.items() if name != "random"]
    print(f"\n{shape}, {env['hardware']}")
    print(f"{'relative error':44}{'smallest':>10}{'median':>10}{'largest':>10}{'random':>10}")
    for name in random:
        values = [values[name] for values in trained]
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:44}" + "".join(f"{v:10.5f}" for v in (low, middle, high, random[name])))
        records.append(
            dict(name=f"numerics {name}", shape=shape, value=middle, smallest=low, largest=high,
                 unit="share of nonzero values" if "underflow" in name else "relative error, median of the captures",
                 reference="normal random data", reference_value=random[name], speedup=None)
        )  # fmt: skip
    collecting, other = cost(run, args.statistics_every)
    print(f"\nmedian step: {collecting:.4f} s when statistics are collected, {other:.4f} s otherwise")
    records.append(
        dict(name="numerics step that collects statistics", shape=shape, value=collecting, unit="seconds",
             reference="other steps", reference_value=other, speedup=None)
    )  # fmt: skip
    print("\nstatistics, at the first, middle and last step that collected them")
    for tag, points in run["scalars"].items():
        if tag.startswith("fp8_flow_moe/"):
            values = list(points.values())
            print(f"{tag:36}" + "".join(f"{values[i]:12.6f}" for i in (0, len(values) // 2, -1)))
    write_records(args.out / "results.json", records)
    plot(results, run, args.out / "numerics.png")


if __name__ == "__main__":
    main()
