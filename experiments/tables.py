"""Writes the tables of the pages from the records, so that no figure is copied by hand.

    python -m experiments.tables            # of the README, docs/results.md and pages of experiments
    python -m experiments.tables --check    # fails if a table is not what the records say

On a page ``<!-- table: NAME -->`` and ``<!-- end -->`` stand around each table; NAME is a function of ``TABLES``. Below
it are hardware, dates, commits and commands of its records. What was not measured is an empty cell or no row.
"""

import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.records import script_parser
from experiments.timing import AFTER_IDLING, BACK_TO_BACK, WITH_BUSY_SMS

ROOT = Path(__file__).parents[1]
PAGES = (
    *("README.md", "docs/results.md"),
    *("experiments/throughput/README.md", "experiments/kernels/README.md", "experiments/expert_parallel/README.md"),
    *("experiments/transformers/README.md", "experiments/numerics/README.md"),
)
PEERS = {  # titles of columns, and the references of which each shows the best
    "bf16 as torchtitan compiles it": ("bf16",),
    "bf16, blocks compiled whole": ("bf16_whole",),
    "bf16, fused": ("bf16_fused",),
    "torchao FP8 experts": ("torchao", "torchao_whole"),
    "FP8, a cast around each GEMM": ("naive_blockwise", "naive_whole"),
}
BF16 = [*PEERS.values()][:3]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
STATES = (BACK_TO_BACK, AFTER_IDLING, WITH_BUSY_SMS)
PRODUCTS = ("bf16", "torchao rowwise", "ours, FFN of products")
COPIES = ("copy", "copy of as many bytes")
ABLATIONS = {"requantize": "dequantize, transpose, requantize", "unfused_permute": "permute, then pad"}
"""References that ran with the defaults alone, in a run of their own."""

Record = dict
Row = list[str]


class Records:
    """The records of all experiments, and those that a table used."""

    def __init__(self, records: list[Record]):
        self.all = records
        self.used: list[Record] = []

    def of(self, name: str, shape: str, ablation: str | None = None, hardware: str = "") -> dict[str, Record]:
        """By reference, those of the newest run, on that ``hardware`` if it is given: others met another machine or
        another state. Without ``ablation`` none of :data:`ABLATIONS`, else that one alone."""
        found = [r for r in self.all if r["name"] == name and r["shape"] == shape and hardware in r["hardware"]]
        found = [r for r in found if (r["reference"] == ablation if ablation else r["reference"] not in ABLATIONS)]
        newest = max(reversed(found), key=lambda r: r["date"], default=None)  # of one date, what was written last
        found = [r for r in found if all(r[key] == newest[key] for key in ("date", "commit", "hardware"))]
        self.used += found
        return {r["reference"]: r for r in found}

    def runs(self, name: str, shape: str) -> list[dict[str, Record]]:
        """:meth:`of`, split by invocation: the runs of one took turns on one machine."""
        by_command: dict[str, dict[str, Record]] = {}
        for reference, r in self.of(name, shape).items():
            by_command.setdefault(r["command"], {})[reference] = r
        return [*by_command.values()]

    def shapes(self, name: str, *references: str, contains: str = "") -> list[str]:
        """Of the records of that name, each once; if ``references`` are given, those that were compared with one."""
        found = [r for r in self.all if r["name"] == name and contains in r["shape"]]
        return list(dict.fromkeys(r["shape"] for r in found if not references or r["reference"] in references))

    def names(self, pattern: str) -> list[str]:
        return list(dict.fromkeys(r["name"] for r in self.all if re.fullmatch(pattern, r["name"])))

    def bases(self, name: str, *references: str) -> list[str]:
        """:meth:`shapes` without the state of the GPU."""
        return [s.removesuffix(f", {STATES[0]}") for s in self.shapes(name, *references, contains=f", {STATES[0]}")]

    def by_state(self, name: str, base: str, states: tuple[str, ...]) -> list[dict[str, Record]]:
        return [self.of(name, f"{base}, {state}") for state in states]


def read() -> Records:
    paths = sorted((ROOT / "experiments").glob("*/results.json"))
    return Records([record for path in paths for record in json.loads(path.read_text())])


# --- cells ------------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def value(found: dict[str, Record]) -> float:
    return next(iter(found.values()))["value"]


def ours(found: dict[str, Record]) -> str:
    return number(value(found)) if found else ""


def cell(found: dict[str, Record], reference: str) -> str:
    return number(found[reference]["reference_value"]) if reference in found else ""


def best(found: dict[str, Record], names: tuple[str, ...]) -> str:
    """The fastest reference of these names, with whatever options; empty where none was measured."""
    of_names = {key: r["reference_value"] for key, r in found.items() if key.partition(":")[0] in names}
    return max(of_names, key=of_names.__getitem__, default="")


def option(reference: str) -> str:
    """The checkpointing of a variant, and whether other FP8 experts were compiled whole."""
    name, _, options = reference.partition(":")
    whole = "whole" if name.endswith("_whole") and name != "bf16_whole" else ""
    return joined(whole, options.replace("checkpointing=", ""))


def spread(found: dict[str, Record]) -> str:
    """The largest spread of the repetitions of ours and of the references."""
    spreads = [max(r["spread"].values()) for r in found.values() if "spread" in r]
    return f"{max(spreads):.1%}" if spreads else ""


def geometric(speedups: list[float], digits: int) -> Row:
    """The geometric mean and the range."""
    low, mean, high = (f"{s:.{digits}f}x" for s in (min(speedups), statistics.geometric_mean(speedups), max(speedups)))
    return [mean, f"{low} to {high}"]


def joined(*cells: str) -> str:
    return ", ".join(filter(None, cells))


def ratios(found: dict[str, Record], *references: str) -> str:
    """Speedups over the references that were measured; bold is the smallest, over the strongest reference."""
    given = [found[reference]["speedup"] for reference in references if reference in found]
    marks = ["**" if speedup == min(given) else "" for speedup in given]
    shown = ", ".join(f"{mark}{speedup:.2f}x{mark}" for mark, speedup in zip(marks, given, strict=True))
    return f" ({shown})" if given else ""


def card(record: Record) -> str:
    return record["hardware"].split("NVIDIA ")[-1]


def markdown(head: Row, rows: list[Row]) -> str:
    """Without the columns of which nothing was measured."""
    used = [i for i in range(len(head)) if not rows or any(row[i] for row in rows)]
    lines = ([row[i] for i in used] for row in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in lines)


def source(used: list[Record]) -> str:
    """Where the figures of a table come from."""

    def unique(key: Callable[[Record], str]) -> str:
        return ", ".join(sorted({key(record) for record in used}))

    hardware = unique(lambda r: r["hardware"].replace("1 x ", "one "))
    commits = unique(lambda r: f"`{r['commit']}`")
    commands = unique(lambda r: "`" + " ".join(r["command"].split()[:3]) + "`")
    return f"Measured on {hardware}; {unique(lambda r: r['date'])}; commit {commits}; {commands}."


# --- training ---------------------------------------------------------------------------------------------------------


def setting(shape: str) -> str:
    short = shape.replace(", 1 GPU", "").replace(", random routing", "")
    return short.replace("activation_checkpoint.mode=full", "full checkpointing")


def training(records: Records) -> str:
    """Tokens/s and GiB of each setting, one row for an invocation with bf16 or other FP8 experts."""
    rows = []
    for name in ("train_16b", "train_16b dispatch=symmetric", "train_qwen3_30b"):
        for shape in records.shapes(name, "bf16"):
            memories = {next(iter(m.values()))["command"]: m for m in records.runs(f"{name} memory", shape)}
            for speed in records.runs(name, shape):
                if not speed.keys() & {"bf16", "torchao"}:
                    continue  # other checkpointing, which has a table of its own
                memory = memories.get(next(iter(speed.values()))["command"], {})
                title = joined(setting(shape), name.partition(" ")[2])
                peers = [best(speed, names) for names in PEERS.values()]
                cells = [joined(cell(speed, p), cell(memory, p), option(p)) for p in peers]
                mine = joined(ours(speed) + ratios(speed, *(best(speed, names) for names in BF16)), ours(memory))
                rows.append([title, *cells, mine, spread(speed)])
    return markdown(["tokens/s per GPU, GiB reserved", *PEERS, "titan_fp8moe", "spread"], rows)


TITAN03 = {
    "bf16": "bf16",
    "bf16_outside_fsdp": "bf16, experts outside of FSDP",
    "bf16_fused_swiglu": "bf16, `fused_swiglu`",
    "bf16_strongest": "bf16, both, grouped GEMMs kept",
    "torchao": "torchao FP8 experts",
}


def titan03(records: Records) -> str:
    """Training under torchtitan 0.3, one row for each setting and options of ours."""
    rows = []
    for name in records.names(r"train_\S+_titan03( \S+=\S+)*"):
        for shape, card in itertools.product(records.shapes(name), ("H200", "H100")):
            speed, memory = (records.of(f"{name}{kind}", shape, hardware=card) for kind in ("", " memory"))
            if not speed:
                continue
            short = shape.replace(", flex", "").replace(", forced routing", "").replace(", 1 GPU", "")
            title = joined(short.replace("parallelism.expert_parallel_degree=1", "FSDP 2"), *name.split()[1:])
            cells = [joined(cell(speed, reference), cell(memory, reference)) for reference in TITAN03]
            rows.append([title, card, *cells, joined(ours(speed) + ratios(speed, *TITAN03), ours(memory))])
    rows.sort(key=lambda row: "GPUs" in row[0])
    return markdown(["tokens/s per GPU, GiB reserved", "GPU", *TITAN03.values(), "titan_fp8moe"], rows)


CHECKPOINTING = {
    "": "per op",
    ":checkpointing=saved": "per op, bf16's grouped GEMMs kept",
    ":checkpointing=none": "none",
    ":checkpointing=full": "full",
}


def checkpointing(records: Records) -> str:
    """Tokens/s and GiB by checkpointing, of bf16 and of ours."""
    rows = []
    for name in ("train_16b", "train_qwen3_30b"):
        for shape in records.shapes(name, "bf16_fused:checkpointing=none"):
            speed, memory = records.of(name, shape), records.of(f"{name} memory", shape)
            for options, title in CHECKPOINTING.items():
                cells = [joined(cell(speed, peer + options), cell(memory, peer + options)) for peer, *_ in BF16]
                mine = options.replace(":", " ")
                mine = (records.of(f"{name}{mine}", shape), records.of(f"{name}{mine} memory", shape))
                rows.append([setting(shape), title, *cells, joined(*map(ours, mine))])
    return markdown(["tokens/s, GiB reserved", "checkpointing", *[*PEERS][:3], "titan_fp8moe"], rows)


def variants(records: Records) -> str:
    """Our settings and the paper's ablations against the defaults."""
    rows = []
    for reference, title in ABLATIONS.items():
        for shape in records.shapes("train_16b", reference):
            speed, memory = (records.of(name, shape, reference) for name in ("train_16b", "train_16b memory"))
            share = f"{1 / speed[reference]['speedup']:.3f}x"
            rows.append([title, setting(shape), joined(cell(speed, reference), cell(memory, reference)), share])
    for name in records.names(r"train_16b \S+=\S+"):
        for shape in records.shapes(name, "fp8_flow"):
            if (speed := records.of(name, shape).get("fp8_flow")) is None:
                continue  # the newest run had other references
            memory = records.of(f"{name} memory", shape)
            cells = joined(number(speed["value"]), ours(memory)), f"{speed['speedup']:.3f}x"
            rows.append([f"`{name.split()[1]}`", setting(shape), *cells])
    return markdown(["variant", "setting", "tokens/s per GPU, GiB reserved", "of the defaults' speed"], rows)


def largest_batch(records: Records) -> str:
    rows = []
    for name in records.names("train_.* largest local batch"):
        settings = name.removesuffix(" largest local batch").split()[1:]
        for shape in records.shapes(name):
            found = records.of(name, shape)
            rows.append([joined(setting(shape), *settings), cell(found, "bf16"), ours(found)])
    return markdown(["sequences of 4,096 tokens", "bf16", "titan_fp8moe"], rows)


def sweep(records: Records) -> str:
    """The fastest point of each precision on a card, over local batch and checkpointing."""
    rows = []
    for name in records.names("train_.* fastest"):
        for shape in records.shapes(name):
            (found,) = records.of(name, shape).values()
            points = [found["points"][who] for who in ("reference", "ours")]
            cells = [
                f"{number(p['tokens_per_second'])}, {p['memory_gib']:.1f} (local batch {p['local_batch']}, "
                f"{p['variant'].partition(':')[2] or 'defaults'})"
                for p in points
            ]
            rows.append([setting(shape), *cells, f"**{found['speedup']:.2f}x**"])
    return markdown(["highest tokens/s, GiB reserved", "bf16, fused", "titan_fp8moe", "speedup"], rows)


def step(records: Records) -> str:
    """Milliseconds of a step by class of kernel."""
    tables = []
    for shape in records.shapes("host_bound_share"):
        found = records.of("host_bound_share", shape)
        first = next(iter(found.values()))
        classes = [*((r, "reference") for r in found.values()), (first, "ours")]
        columns = [r.get("classes", {}).get(who, {}) for r, who in classes]
        shares = [*(r["reference_value"] for r in found.values()), first["value"]]
        kinds = dict.fromkeys(kind for column in columns for kind in column)
        rows = [[kind, *(f"{column.get(kind, 0):.1f}" for column in columns)] for kind in kinds]
        rows.append(["host-bound share", *(f"{share:.1%}" for share in shares)])
        titles = [
            f"ms: {setting(shape.partition(': ')[2])}",
            *(name.replace("_", " ") for name in found),
            "titan_fp8moe",
        ]
        tables.append(markdown(titles, rows))
    return "\n\n".join(tables)


# --- one layer --------------------------------------------------------------------------------------------------------


def layer(shape: str) -> str:
    return shape.removesuffix(", 1 GPU").replace(" per GPU", "")


def by_model(shapes: list[str]) -> list[str]:
    """The shapes of a model together, those of more tokens first."""
    models = list(dict.fromkeys(shape.split(",")[0] for shape in shapes))

    def place(shape: str) -> tuple[int, int, int]:
        model, experts, tokens = shape.split(", ")[:3]
        return models.index(model), -int(experts.split()[0]), -int(tokens.split()[0])

    return sorted(shapes, key=place)


def layers(records: Records) -> str:
    """Those that were measured next to fused bf16."""
    return _layers(records, lambda found: "bf16 fused" in found)


def layers_without_fused(records: Records) -> str:
    """Older ones, whose bf16 multiplies by the scores in an fp32 bmm."""
    return _layers(records, lambda found: "bf16 fused" not in found)


def _layers(records: Records, chosen: Callable[[dict[str, Record]], bool]) -> str:
    rows = []
    graphed = "as a CUDA graph"
    for name in ("moe_layer", f"moe_layer {graphed}"):
        suffix = name.removeprefix("moe_layer").replace("a CUDA graph", "CUDA graphs")
        bf16 = ("bf16", "bf16 whole", "bf16 fused")
        references = [f"{reference}{name.removeprefix('moe_layer')}" for reference in bf16]
        for shape in by_model(records.shapes(name, references[1])):
            used = len(records.used)
            time = records.of(name, shape)
            if not chosen(time):
                del records.used[used:]
                continue
            row = [layer(shape) + suffix, joined(*(cell(time, reference) for reference in references))]
            row += [f"{number(value(time))}{ratios(time, *references)}", "", ""]
            if name == "moe_layer" and (weights := records.of("moe_layer_with_weights", shape)):
                row[3] = number(value(weights)) + ratios(weights, *references)
            if name == "moe_layer" and (saved := records.of("moe_layer saved", shape)):
                row[4] = f"{saved['bf16']['reference_value'] / 1024:.0f}, {value(saved) / 1024:.0f}"
            rows.append(row)
    head = ["ms, forward and backward", "bf16: torchtitan's, whole, fused", "titan_fp8moe"]
    return markdown([*head, "with quantizing the weights", "KiB saved per token: bf16, ours"], rows)


def layer_ablations(records: Records) -> str:
    """Variants against the defaults of the same run."""
    rows = []
    for name in ("moe_layer requantize", "moe_layer unfused permute", "moe_layer with bf16 shared experts"):
        for shape in records.shapes(name, "fp8"):
            found = records.of(name, shape)["fp8"]
            share = f"{found['speedup']:.3f}x"
            rows.append([name.removeprefix("moe_layer "), layer(shape), number(found["value"]), share])
    return markdown(["variant", "layer", "ms", "of the defaults' speed"], rows)


def sonicmoe(records: Records) -> str:
    """The routed part of a layer against SonicMoE's bf16 kernels."""
    rows = []
    for base in records.bases("routed_experts", "sonicmoe"):
        names = "routed_experts", "routed_experts_with_weights"
        both = [records.of(name, f"{base}, {BACK_TO_BACK}") for name in names]
        rows.append([layer(base), cell(both[0], "sonicmoe"), *(ours(each) + ratios(each, "sonicmoe") for each in both)])
    return markdown(["ms, forward and backward", "SonicMoE, bf16", "titan_fp8moe", "with quantizing the weights"], rows)


def routed_vs_fused_bf16(records: Records) -> str:
    """Routed experts against the strongest bf16: weights quantized in each direction, once for four microbatches, and
    beforehand."""
    rows, fused = [], "bf16 fused"
    for base in records.bases("routed_vs_fused_bf16"):
        names = "", *(f", {bytes} kept for 4 microbatches" for bytes in ("1 byte", "2 bytes"))
        first, *kept = [records.of(f"routed_vs_fused_bf16{name}", f"{base}, {BACK_TO_BACK}") for name in names]
        cells = [ours(found) + ratios(found, fused) if found else "" for found in (first, *kept)]
        rows.append([base, cell(first, fused), *cells, number(next(iter(first.values()))["weights_cached"])])
    kept = "quantized once for four microbatches, 1 byte a parameter kept", "the same, 2 bytes"
    return markdown(["ms, forward and backward", "bf16, fused", "titan_fp8moe", *kept, "without quantizing"], rows)


def model_layers(records: Records) -> str:
    """Layers with other activations than SwiGLU's, next to bf16 as one graph, the strongest bf16, and SwiGLU."""
    rows, peers = [], ("bf16 whole", "bf16 fused")
    for name in records.names("layer_.*"):
        for base in records.bases(name):
            found = records.of(name, f"{base}, {BACK_TO_BACK}")
            cells = [cell(found, peer) for peer in peers]
            rows.append([base, *cells, ours(found) + ratios(found, *peers), cell(found, "ours with SwiGLU")])
    head = ["bf16, one graph", "bf16, fused", "titan_fp8moe", "the same with SwiGLU"]
    return markdown(["ms, forward and backward", *head], rows)


def activations(records: Records) -> str:
    """Relative errors of each activation's layer."""
    found: dict[str, dict[str, str]] = {}
    for r in records.all:
        if r["name"].startswith("activation_error "):
            tensor, activation = r["name"].removeprefix("activation_error ").split(": ")
            found.setdefault(activation, {})[tensor] = f"{r['value']:.4f}"
            records.used.append(r)
    tensors = list(next(iter(found.values()), {}))
    return markdown(["", *tensors], [[name, *(of.get(tensor, "") for tensor in tensors)] for name, of in found.items()])


def ffns(records: Records) -> str:
    """FFNs that see every token, with weights and rows quantized in them; cuBLAS beside them in the record."""
    rows = []
    for base in records.bases("ffn_shared_with_casts"):
        found = records.of("ffn_shared_with_casts", f"{base}, {BACK_TO_BACK}")
        rows.append([base, cell(found, "bf16, compiled"), ours(found) + ratios(found, "bf16, compiled")])
    return markdown(["ms, back to back", "bf16, compiled", "titan_fp8moe"], rows)


ONE_TOKEN = "forward of one token"


def transformers(records: Records) -> str:
    return _transformers(records, lambda shape: ONE_TOKEN not in shape)


def transformers_token(records: Records) -> str:
    return _transformers(records, lambda shape: ONE_TOKEN in shape)


def _transformers(records: Records, chosen: Callable[[str], bool]) -> str:
    rows = []
    for name in ("transformers_qwen3", "transformers_deepseek_v3"):
        for shape in filter(chosen, records.shapes(name)):
            for reference, r in records.of(name, shape).items():
                form = "{:.3f}".format if r["unit"] == "nats" else number
                bf16, mine = form(r["reference_value"]), form(r["value"])
                more = "" if r["unit"] == "nats" else f" ({r['speedup']:.2f}x)"
                if "gaps" in r:  # of each seed
                    gaps, again = (" / ".join(map("{:+.2%}".format, r[key])) for key in ("gaps", "reference_gaps"))
                    more = f" ({gaps}; bf16 again {again})"
                rows.append([f"{shape}, {r['unit']}", card(r), f"{bf16} ({reference})", mine + more])
    return markdown(["model, figure", "GPU", "bf16", "`fp8_flow`"], rows)


def lora(records: Records) -> str:
    """Adapters of Qwen3-30B-A3B: speed and peak memory, and losses after training."""
    rows = []
    for shape in records.shapes("lora_qwen3_30b"):
        for reference, r in records.of("lora_qwen3_30b", shape).items():
            if r["unit"] == "nats":
                rows.append([shape, reference, f"{r['reference_value']:.3f}", f"{r['value']:.3f}"])
            else:
                sides = (("reference_value", "reference_peak_gib"), ("value", "peak_gib"))
                theirs, mine = (f"{number(r[speed])}, {r[memory]:.1f} GiB" for speed, memory in sides)
                rows.append([f"{shape}, {r['unit']}", reference, theirs, f"{mine} ({r['speedup']:.2f}x)"])
    return markdown(["Qwen3-30B-A3B", "reference", "its", "experts in FP8, adapters beside them"], rows)


# --- kernels ----------------------------------------------------------------------------------------------------------


def gemms(records: Records) -> str:
    """TFLOP/s by state of the GPU."""
    rows = []
    peers = ("bf16", "torchao rowwise", "deepgemm")
    titles = {"grouped_mm": "", "grouped_mm_wgrad": "", "grouped_mm_wgrad_fp32": ", fp32 output"}
    for name, title in titles.items():
        for base in records.bases(name):
            by_state = records.by_state(name, base, STATES)
            ours = " / ".join(f"{value(found):.0f}" for found in by_state if found)
            others = [" / ".join(f"{f[p]['reference_value']:.0f}" for f in by_state if p in f) for p in peers]
            rows.append([base + title, ours, *others])
    head = [f"TFLOP/s {' / '.join(STATES)}", "titan_fp8moe", "bf16 `_grouped_mm`", "rowwise `_scaled_grouped_mm`"]
    return markdown([*head, "DeepGEMM"], rows)


EQUAL_WORK = {
    "grouped_mm": "forward",
    "grouped_mm_wgrad": "weight gradient to bf16, DeepGEMM's added to fp32",
    "grouped_mm_wgrad_fp32": "weight gradient to fp32, DeepGEMM's added to it",
    "grouped_mm_wgrad_added": "weight gradient added to fp32 by both",
}


def deepgemm(records: Records) -> str:
    """Geometric means of our speed over DeepGEMM's, and the range. Its kernels are compiled for all SMs: the state with
    busy ones is left out."""
    rows = []
    for name, title in EQUAL_WORK.items():
        for state in STATES[:2]:
            found = [records.of(name, shape).get("deepgemm") for shape in records.shapes(name, contains=f", {state}")]
            if speedups := [r["speedup"] for r in found if r]:
                least = f"{sum(s >= 1 for s in speedups)} of {len(speedups)}"
                rows.append([title, state, *geometric(speedups, 3), least])
    return markdown(["GEMM", "GPU", "over DeepGEMM, geometric mean", "range", "shapes at or above 1"], rows)


def gemm_range(records: Records) -> str:
    """Over all numbers of rows and groups."""
    rows = []
    for name in records.names("grouped_mm.* range"):
        by_reference: dict[str, list[float]] = {}
        for shape in records.shapes(name):
            for reference, r in records.of(name, shape).items():
                by_reference.setdefault(reference, []).append(r["speedup"])
        for reference, speedups in by_reference.items():
            rows.append([name.removesuffix(" range"), reference, str(len(speedups)), *geometric(speedups, 2)])
    return markdown(["GEMM", "over", "measurements", "geometric mean", "range"], rows)


def slashed(by_state: list[dict[str, Record]], get: Callable[[dict[str, Record]], str]) -> str:
    return " / ".join(map(get, by_state))


def expert_ffn(records: Records) -> str:
    rows = []
    for base in records.bases("expert_ffn"):
        found = records.by_state("expert_ffn", base, STATES[:2])
        with_weights = slashed(found, lambda f: number(next(iter(f.values()))["with_weight_quantization"]))
        peers = [slashed(found, lambda f, peer=peer: cell(f, f"{peer}, compiled")) for peer in PRODUCTS[:2]]
        rows.append([base, slashed(found, ours), with_weights, *peers])
    head = [f"ms, {' / '.join(STATES[:2])}", "titan_fp8moe", "with quantizing the weights", "bf16, compiled"]
    return markdown([*head, "torchao rowwise, compiled"], rows)


def products(records: Records) -> str:
    """One product next to its peers, and an FFN of three of them next to :func:`titan_fp8moe.routed_experts`."""
    rows = []
    for base in records.bases("grouped_mm, product"):
        product, ffn = (records.by_state(f"grouped_mm, {kind}", base, STATES[:2]) for kind in ("product", "layer"))
        peers = [slashed(product, lambda f, peer=peer: cell(f, peer)) for peer in PRODUCTS[:2]]
        whole = slashed(ffn, ours), slashed(ffn, lambda f: cell(f, PRODUCTS[2]))
        rows.append([base, slashed(product, ours), *peers, *whole])
    head = [f"ms, {' / '.join(STATES[:2])}", "titan_fp8moe", "bf16", "torchao FP8 rowwise", "`routed_experts`"]
    return markdown([*head, "an FFN of products"], rows)


def data_movement(records: Records) -> str:
    """Share of a device copy by kernel and layer, with few rows also of a copy of as many bytes. Kernels that compute
    indices move little: their microseconds."""
    found: dict[tuple[str, str], dict[str, dict[str, Record]]] = {}
    columns: dict[str, None] = {}
    for r in records.all:
        if r["reference"] in COPIES and "rows" in r and not r["routing"].startswith("skewed"):
            column = f"{r['layer']}, {r['rows']:,} rows, E {r['E']}"
            kernel = r["name"], r["routing"].removeprefix("balanced")
            found.setdefault(kernel, {}).setdefault(column, {})[r["reference"]] = r
            columns[column] = None
    rows = []
    for kernel, by_column in found.items():
        cells = [by_column.get(column, {}) for column in columns]
        records.used += [r for cell in cells for r in cell.values()]
        if kernel[0].endswith("_routing"):
            shares = [f"{cell[COPIES[0]]['microseconds']:.0f} µs" if cell else "" for cell in cells]
        else:
            shown = [[r for r in cell.values() if r["reference"] == COPIES[0] or r["rows"] < 8192] for cell in cells]
            shares = [", ".join(f"{r['speedup']:.0%}" for r in cell) for cell in shown]
        rows.append(["".join(kernel), *shares])
    return markdown(["share of a device copy", *columns], rows)


# --- expert parallelism -----------------------------------------------------------------------------------------------


def exchange(records: Records) -> str:
    """Milliseconds of dispatch + permute, and of sum + combine."""
    rows = []
    for shape in records.shapes("ep_dispatch"):
        cells = []
        for name in ("ep_dispatch", "ep_combine"):
            paths = records.of(name, shape), records.of(f"{name} dispatch=symmetric", shape)
            ours = [f"{value(found):.2f} ({found['bf16']['speedup']:.2f}x)" for found in paths]
            cells.append(f"{paths[0]['bf16']['reference_value']:.2f}, {', '.join(ours)}")
        rows.append([shape, *cells])
    return markdown(["ms", "dispatch: bf16, FP8 all-to-all, FP8 symmetric", "combine: the same"], rows)


# --- the pages --------------------------------------------------------------------------------------------------------

_16B, _QWEN3 = "16B, 6 layers, sdpa, local batch", "Qwen3-30B-A3B, 5 layers, sdpa, local batch"
HEADLINE = {  # a row, the record's name and shape
    "DeepSeek-V3 16B, 6 layers, tokens/s": ("train_16b", f"{_16B} 4, random routing, 1 GPU"),
    "16B without checkpointing, tokens/s": ("train_16b checkpointing=none", f"{_16B} 4, random routing, 1 GPU"),
    "16B with local batch 1, tokens/s": ("train_16b", f"{_16B} 1, random routing, 1 GPU"),
    "Qwen3-30B-A3B, 5 layers, tokens/s": ("train_qwen3_30b", f"{_QWEN3} 4, random routing, 1 GPU"),
    "Qwen3 without checkpointing, tokens/s": (
        "train_qwen3_30b checkpointing=none",
        f"{_QWEN3} 4, random routing, 1 GPU",
    ),
    "MoE layer of GLM-4.5-Air, 128 experts, 8,192 tokens, ms": (
        "moe_layer_with_weights",
        "GLM-4.5-Air, 128 experts per GPU, 8192 tokens, 1 GPU",
    ),
}


def headline(records: Records) -> str:
    """Speedups over bf16 as torchtitan compiles it, and over the strongest bf16 of the same invocation."""
    rows = []
    for title, (name, shape) in HEADLINE.items():
        runs = records.runs(name, shape)
        run = next((run for run in runs if "bf16" in run), runs[0] if runs else {})
        found = {reference.replace(" ", "_"): r for reference, r in run.items()}
        peers = [peer for peer in (best(found, names) for names in BF16) if peer]
        if not peers:
            continue
        strongest = min(peers, key=lambda peer: found[peer]["speedup"])
        chosen = option(strongest) if option(strongest) not in name else ""  # else the row's title says it
        named = joined(strongest.partition(":")[0].removeprefix("bf16_"), chosen)
        common = "bf16" if "bf16" in found else ""
        rows.append(
            [
                title,
                card(found[strongest]),
                cell(found, common),
                f"{cell(found, strongest)} ({named})",
                number(value(found)),
                f"{found[common]['speedup']:.2f}x" if common else "",
                f"**{found[strongest]['speedup']:.2f}x**",
                spread(found),
            ]
        )
    head = ["GPU", "bf16 as torchtitan compiles it", "strongest bf16", "titan_fp8moe", "over torchtitan's bf16"]
    return markdown(["", *head, "over the strongest", "spread"], rows)


TABLES: dict[str, Callable[[Records], str]] = {
    table.__name__: table
    for table in (
        *(headline, training, titan03, checkpointing, variants, sweep, largest_batch, step),
        *(layers, layers_without_fused, layer_ablations, sonicmoe, ffns),
        *(routed_vs_fused_bf16, model_layers, activations, transformers, transformers_token, lora),
        *(gemms, deepgemm, gemm_range, expert_ffn, products, data_movement, exchange),
    )
}


def page(text: str, records: Records) -> str:
    """The page with its tables as the records have them."""

    def table(match: re.Match) -> str:
        begin, name, end = match.groups()
        records.used = []
        body = TABLES[name](records)
        content = f"{body}\n\n{source(records.used)}" if records.used else "Not measured in this state."
        return f"{begin}\n{content}\n{end}"

    return MARKED.sub(table, text)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    records, stale = read(), []
    for name in PAGES:
        text = (ROOT / name).read_text()
        new = page(text, records)
        if new != text:
            stale.append(name)
            if not args.check:
                (ROOT / name).write_text(new)
    if args.check and stale:
        sys.exit(f"{', '.join(stale)}: tables differ from the records; run python -m experiments.tables")


if __name__ == "__main__":
    main()
