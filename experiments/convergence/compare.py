"""What the pairs of runs show: FP8 against bf16, with seeds as random effects.

    python -m experiments.convergence.compare RUNS               # prints how far runs are, and tables
    python -m experiments.convergence.compare RUNS --save FILE   # also writes the logs to one file, a RUNS too
    python -m experiments.convergence.compare RUNS --out DIR     # also adds to DIR/results.json, draws DIR/FLAVOR.png
    python -m experiments.convergence.compare RUNS --earlier FILE ...   # a results.json: with pairs of other texts

RUNS are folders of the logs that pair.py writes, or files of --save, with different seeds. A pair counts when both runs
have ended. They must have had the same weights and tokens. No token was seen twice, so the training loss of the last
quarter is that of new text.
"""

import json
import math
from collections.abc import Iterable
from functools import cache
from itertools import count
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from experiments import tables
from experiments.records import script_parser, write_records, write_text
from experiments.tables import Records, markdown

WANTED = 0.0008  # half the width of an interval that would be narrow enough
SMOOTH = 25  # steps


class Run(NamedTuple):
    """The log of a run, as far as it came."""

    meta: dict[str, Any]
    steps: list[dict[str, float]]
    end: dict[str, Any]
    noise: dict[str, Any]

    @classmethod
    def of(cls, log: list[dict]) -> "Run":
        steps = [line for line in log if "loss" in line]
        noise = {f"{line['step']}": line["noise"] for line in log if "noise" in line}
        return cls(log[0], steps, next((line for line in log if "held_out_loss" in line), {}), noise)

    def column(self, key: str) -> np.ndarray:
        return np.array([step[key] for step in self.steps])

    def last_quarter(self) -> float:
        return float(self.column("loss")[-self.meta["steps"] // 4 :].mean())

    def speed(self) -> float:
        """Tokens/s of the median step, per GPU."""
        return float(np.median(self.column("tokens_per_second")))


FIGURES = {
    "training loss, last quarter": Run.last_quarter,
    "held-out loss": lambda run: run.end["held_out_loss"],
    "median gradient norm": lambda run: float(np.median(run.column("grad_norm"))),
}


class Pair(NamedTuple):
    seed: int
    fp8: Run
    bf16: Run


def read_runs(path: Path) -> dict[str, Run]:
    if path.is_file():
        return {name: Run(*run) for name, run in json.loads(path.read_text()).items()}
    runs = {}
    for file in sorted(path.glob("*/log.jsonl")):  # the last line may be cut off
        log = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        runs |= {file.parent.name: Run.of(log)} if log else {}
    return runs


def pairs_of(runs: dict[str, Run]) -> list[Pair]:
    """The pairs whose runs have ended, by seed.

    Raises:
        SystemExit: for two runs that differ in more than the recipe.
    """
    ended = {name: run for name, run in runs.items() if run.end}
    seeds = sorted(int(name.removeprefix("fp8-s")) for name in ended if name.startswith("fp8-s"))
    pairs = [Pair(seed, ended[f"fp8-s{seed}"], ended[f"bf16-s{seed}"]) for seed in seeds if f"bf16-s{seed}" in ended]
    for pair in pairs:
        facts = [(run.meta["weights"], run.end["tokens_crc"], run.meta["steps"]) for run in (pair.fp8, pair.bf16)]
        if facts[0] != facts[1]:
            raise SystemExit(f"error: the pair of seed {pair.seed} had other weights, tokens or steps: {facts}")
    return pairs


@cache
def student_t(freedom: int) -> float:
    """Half the width of a 95% interval in standard errors."""
    if freedom > 100:  # Cornish and Fisher's first terms
        z = NormalDist().inv_cdf(0.975)
        return z + (z**3 + z) / (4 * freedom)
    x = np.linspace(0, 13, 130_001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(x * x / freedom))
    below = np.cumsum((density[1:] + density[:-1]) / 2) * (x[1] - x[0])
    return float(x[1 + np.searchsorted(below, 0.475)])


class Effect(NamedTuple):
    """The mean deviation of FP8 from bf16, half its 95% interval, the deviation of pairs, and how many. One pair has
    no interval."""

    mean: float
    half_width: float | None
    deviation: float | None
    pairs: int

    @classmethod
    def of(cls, deviations: list[float]) -> "Effect":
        if len(deviations) == 1:
            return cls(*deviations, None, None, 1)
        spread = stdev(deviations)
        half_width = student_t(len(deviations) - 1) * spread / len(deviations) ** 0.5
        return cls(fmean(deviations), half_width, spread, len(deviations))

    def needed(self, half_width: float = WANTED) -> int | None:
        """Pairs of this deviation that would give an interval of this half width."""
        if self.deviation is None:
            return None
        return next(n for n in count(2) if student_t(n - 1) * self.deviation <= half_width * n**0.5)


def deviations(pairs: list[Pair]) -> dict[str, list[float]]:
    """FP8's deviation from bf16 in each pair, for each figure."""
    return {name: [of(pair.fp8) / of(pair.bf16) - 1 for pair in pairs] for name, of in FIGURES.items()}


def format_progress(runs: dict[str, Run]) -> str:
    rows = []
    for name, run in runs.items():
        last = run.steps[-1] if run.steps else {}
        speed = f"{run.speed():,.0f}" if run.steps else ""
        step, loss = f"{last.get('step', 0)} of {run.meta['steps']}", f"{last.get('loss', math.nan):.4f}"
        end = f"{run.end['held_out_loss']:.4f}" if run.end else ""
        rows.append([name, step, loss, speed, f"{last.get('seconds', 0):.0f}", end, ", ".join(run.noise)])
    return markdown(["run", "step", "loss", "tokens/s", "seconds", "held-out loss", "noise at"], rows)


def format_pairs(pairs: list[Pair]) -> str:
    each = zip(*deviations(pairs).values(), strict=True)
    rows = [[str(pair.seed), *map("{:+.2%}".format, row)] for pair, row in zip(pairs, each, strict=True)]
    return markdown(["seed", *FIGURES], rows)


class Shares(NamedTuple):
    """The error of a minibatch's gradient relative to it. Relative to the mean gradient the bias and the noise, None
    where no mean was found; and the batch whose noise equals the error."""

    error: float
    bias: float | None
    noise: float | None
    critical_tokens: float | None

    @classmethod
    def of(cls, found: dict[str, Any]) -> "Shares":
        error, gradient = found["error"], found["gradient"]
        mean, bias = gradient["square_of_mean"], max(error["square_of_mean"], 0.0)
        whole = (error["square_of_mean"] + error["variance"]) / (mean + gradient["variance"])
        bias, noise = ((square / mean) ** 0.5 if mean > 0 else None for square in (bias, gradient["variance"]))
        return cls(whole**0.5, bias, noise, found["critical_tokens"])


def common(run: Run, steps: str = "") -> dict:
    """The fields that all records of a run have."""
    flavor = run.meta["config"]["model"]["flavor"]
    shape = f"{flavor}, {run.meta['parameters']:,} parameters, {run.meta['tokens_per_step']:,} tokens a step, {steps}"
    made = run.meta["environment"]
    if made["hardware"].startswith("1 x "):
        made = made | {"command": "bash experiments/convergence/pairs.sh start"}
    return made | {"shape": f"{shape}{run.meta['steps']} steps", "speedup": None}


def points_of(r: dict) -> dict[str, dict]:
    """The samples of a record, each of one text."""
    if "points" in r:
        return r["points"]
    return {f"{r['date']} {r['commit']}": {key: r[key] for key in ("commit", "reference_value", "each")}}


def pair_records(pairs: list[Pair], earlier: Iterable[dict] = ()) -> list[dict]:
    """Records of the pairs, and of those of ``earlier`` records of the model and its steps, as of one sample."""
    if not pairs:
        return []
    shared, found = common(pairs[0].fp8), []
    for name, each in deviations(pairs).items():
        points = {}
        for r in earlier:
            if r["name"] == f"pairs: {name}" and r["shape"] == shared["shape"]:
                points |= points_of(r)
        of_these = fmean(FIGURES[name](pair.bf16) for pair in pairs)
        points |= points_of(shared | {"reference_value": of_these, "each": each})
        effect = Effect.of([deviation for point in points.values() for deviation in point["each"]])
        bf16 = fmean(point["reference_value"] for point in points.values() for _ in point["each"])
        found.append(
            shared
            | {"name": f"pairs: {name}", "unit": "of bf16's", "value": effect.mean, "half_width": effect.half_width}
            | {"reference": "bf16", "reference_value": bf16, "deviation": effect.deviation, "pairs": effect.pairs}
            | {"pairs_for": [WANTED, effect.needed()], "points": points}
        )
    ours, bf16 = (fmean(getattr(pair, recipe).speed() for pair in pairs) for recipe in ("fp8", "bf16"))
    speed = {"name": "pairs_speed", "unit": "tokens/s/GPU", "value": ours, "reference": "bf16_fused"}
    return [*found, shared | speed | {"reference_value": bf16, "speedup": ours / bf16, "pairs": len(pairs)}]


def noise_records(run: Run) -> list[dict]:
    result = []
    for step, by_error in run.noise.items():
        shared = common(run, f"after {step} of ")
        for kind, measured in by_error["fp8 against bf16"]["by_kind"].items():
            ours, bf16 = Shares.of(measured), Shares.of(by_error["bf16 against fp32"]["by_kind"][kind])
            result.append(
                shared
                | {"name": f"gradient_noise {kind}", "unit": "of a minibatch's gradient", "value": ours.error}
                | {"bias": ours.bias, "noise": ours.noise, "critical_tokens": ours.critical_tokens}
                | {"reference": "bf16 against fp32", "reference_value": bf16.error, "reference_bias": bf16.bias}
                | {"reference_critical_tokens": bf16.critical_tokens, **measured}
                | {key: by_error["fp8 against bf16"][key] for key in ("minibatches", "tokens")}
            )
    return result


def smoothed(values: np.ndarray) -> np.ndarray:
    return np.convolve(values, np.full(SMOOTH, 1 / SMOOTH), "valid")


def draw(pairs: list[Pair], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (losses, differences) = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
    first, tokens = pairs[0], pairs[0].fp8.column("step") * pairs[0].fp8.meta["tokens_per_step"] / 1e6
    losses.plot(tokens, first.bf16.column("loss"), label="bf16", color="#B0B0B0")
    losses.plot(tokens, first.fp8.column("loss"), label="FP8", color="#0072B2", linewidth=0.8)
    losses.set_title(f"training loss, seed {first.seed}", fontsize=10, loc="left")
    losses.legend(frameon=False)
    curves = [100 * (smoothed(p.fp8.column("loss")) / smoothed(p.bf16.column("loss")) - 1) for p in pairs]
    for curve in curves:
        differences.plot(tokens[SMOOTH - 1 :], curve, color="#B0B0B0", linewidth=0.8)
    differences.plot(tokens[SMOOTH - 1 :], np.mean(curves, 0), color="#0072B2")
    differences.axhline(0, color="black", linewidth=0.5)
    of = f": {len(pairs)} pairs and their mean" * (len(pairs) > 1)
    title = f"FP8 against bf16 in %, means of {SMOOTH} steps{of}"
    differences.set_title(title, fontsize=10, loc="left")
    for axis in (losses, differences):
        axis.set_xlabel("million tokens, each seen once")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of the runs' logs, or files of --save")
    parser.add_argument("--save", type=Path, help="file to write the logs to")
    parser.add_argument("--out", type=Path, help="folder of results.json and the picture")
    parser.add_argument("--earlier", type=Path, nargs="+", default=[], help="results.json with pairs of other texts")
    args = parser.parse_args()
    runs = {name: run for path in args.runs for name, run in read_runs(path).items()}
    if args.save:
        write_text(args.save, json.dumps(runs))
    pairs = pairs_of(runs)
    earlier = [record for path in args.earlier for record in json.loads(path.read_text())]
    found = pair_records(pairs, earlier) + [record for run in runs.values() for record in noise_records(run)]
    print(format_progress(runs), format_pairs(pairs), tables.pairs(Records(found)), sep="\n\n", end="\n\n")
    print(tables.gradient_noise(Records(found)))
    if args.out:
        write_records(args.out / "results.json", found)
        if pairs:
            draw(pairs, args.out / f"{pairs[0].fp8.meta['config']['model']['flavor']}.png")


if __name__ == "__main__":
    main()
