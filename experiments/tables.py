"""Writes the tables of the pages from the records, so that no figure is copied by hand.

    python -m experiments.tables            # tables, and the figures in the text
    python -m experiments.tables --check    # fails if a table or another figure is not what its source says
    python -m experiments.tables --prune    # drops the records that no page cites

On a page ``<!-- table: NAME -->`` and ``<!-- end -->`` stand around each table; NAME is a function of ``TABLES``. Below
it are hardware, dates, commits and commands of its records. What was not measured is an empty cell or no row.
:mod:`experiments.check` says where the figures in the text come from.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments import check
from experiments.records import script_parser, write_list
from experiments.timing import AFTER_IDLING, BACK_TO_BACK, WITH_BUSY_SMS

ROOT = Path(__file__).parents[1]
FOLDERS = ("throughput", "kernels", "expert_parallel", "transformers", "numerics", "lora_qwen3_30b", "convergence")
PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    *(f"experiments/{folder}/README.md" for folder in FOLDERS),
]
PEERS = {  # titles of columns, and the references of which each shows the best
    "torchtitan's bf16": ("bf16",),
    "bf16, compiled whole": ("bf16_whole",),
    "bf16, fused": ("bf16_fused",),
    "torchao FP8 experts": ("torchao", "torchao_whole"),
    "FP8, a cast around each GEMM": ("naive_blockwise", "naive_whole"),
}
BF16 = [*PEERS.values()][:3]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
STATES = (BACK_TO_BACK, AFTER_IDLING, WITH_BUSY_SMS)
COPIES = ("copy", "copy of as many bytes")
Record = dict
Found = dict[str, Record]
"""Records of one name and shape, by reference."""


class Records:
    """The records of all experiments, and those that a table used."""

    def __init__(self, records: list[Record]):
        self.all = records
        self.used: list[Record] = []

    def of(self, name: str, shape: str, hardware: str = "", commit: str = "") -> Found:
        """Records of the newest run by reference, on that ``hardware`` and of that ``commit`` if they are given: others
        met another machine or another state."""
        found = [r for r in self.all if r["name"] == name and r["shape"] == shape and hardware in r["hardware"]]
        found = [r for r in found if commit in r["commit"]]
        newest = max(reversed(found), key=lambda r: r["date"], default=None)  # of one date, what was written last
        found = [r for r in found if all(r[key] == newest[key] for key in ("date", "commit", "hardware"))]
        self.used += found
        return {r["reference"]: r for r in found}

    def pair(self, name: str, shape: str, **options: str) -> "Pair":
        """:meth:`of` for speed and for memory."""
        return Pair(*(self.of(f"{name}{kind}", shape, **options) for kind in ("", " memory")))

    def runs(self, name: str, shape: str) -> list[Found]:
        """:meth:`of` each card, split by invocation: the runs of one took turns on one machine."""
        found: dict[tuple[str, str], Found] = {}
        for gpu in dict.fromkeys(r["hardware"] for r in self.all if (r["name"], r["shape"]) == (name, shape)):
            for reference, r in self.of(name, shape, hardware=gpu).items():
                found.setdefault((gpu, r["command"]), {})[reference] = r
        return [*found.values()]

    def shapes(self, name: str, *references: str) -> list[str]:
        """Shapes of that name's records, each once; with ``references``, of those that were compared with one."""
        found = [r for r in self.all if r["name"] == name and (not references or r["reference"] in references)]
        return list(dict.fromkeys(r["shape"] for r in found))

    def names(self, pattern: str) -> list[str]:
        return list(dict.fromkeys(r["name"] for r in self.all if re.fullmatch(pattern, r["name"])))

    def named(self, pattern: str, *references: str) -> Iterator[tuple[str, str]]:
        """Each name and shape."""
        for name in self.names(pattern):
            for shape in self.shapes(name, *references):
                yield name, shape


def read() -> Records:
    return Records([record for path in record_files() for record in json.loads(path.read_text())])


def record_files() -> list[Path]:
    return sorted((ROOT / "experiments").glob("*/results.json"))


# --- cells ------------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def first(found: Found) -> Record:
    return next(iter(found.values()))


def ours(found: Found, *references: str) -> str:
    """Our figure, and the speedups over the references that were measured; bold is the smallest, over the strongest."""
    given = [found[reference]["speedup"] for reference in references if reference in found]
    marks = ["**" if speedup == min(given) else "" for speedup in given]
    shown = ", ".join(f"{mark}{speedup:.2f}x{mark}" for mark, speedup in zip(marks, given, strict=True))
    return (number(first(found)["value"]) if found else "") + (f" ({shown})" if given else "")


def strongest(found: Found, references: Iterable[str]) -> list[str]:
    """The reference over which our speedup is the smallest, if one was measured."""
    return sorted((name for name in references if name in found), key=lambda name: found[name]["speedup"])[:1]


def cell(found: Found, reference: str) -> str:
    return number(found[reference]["reference_value"]) if reference in found else ""


def best(found: Found, names: tuple[str, ...]) -> str:
    """The fastest reference of these names, with whatever options; empty where none was measured."""
    of_names = {key: r["reference_value"] for key, r in found.items() if key.partition(":")[0] in names}
    return max(of_names, key=of_names.__getitem__, default="")


def option(reference: str) -> str:
    """The checkpointing of a variant, and whether other FP8 experts were compiled whole."""
    name, _, options = reference.partition(":")
    whole = "whole" if name.endswith("_whole") and name != "bf16_whole" else ""
    return joined(whole, options.replace("checkpointing=", ""))


def spread(found: Found) -> str:
    """The largest spread of the repetitions of ours and of the references."""
    spreads = [max(r["spread"].values()) for r in found.values() if "spread" in r]
    return f"{max(spreads):.1%}" if spreads else ""


def joined(*cells: str) -> str:
    return ", ".join(filter(None, cells))


def card(record: Record) -> str:
    return record["hardware"].split("NVIDIA ")[-1].split()[0]


class Pair(NamedTuple):
    """Speed and memory of one setting."""

    speed: Found
    memory: Found

    def cell(self, reference: str) -> str:
        return joined(*(cell(found, reference) for found in self))

    def over_strongest(self, references: Iterable[str]) -> list[str]:
        """Our speed and its ratio over the strongest reference, and what both reserve."""
        (peer,) = strongest(self.speed, references) or [""]
        return [ours(self.speed, *[peer] * bool(peer)), cell(self.memory, peer), ours(self.memory)]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table without the columns in which nothing was measured."""
    used = [i for i in range(len(head)) if not rows or any(row[i] for row in rows)]
    lines = ([row[i] for i in used] for row in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in lines)


def script(command: str) -> str:
    """A command up to its script, without the script's options."""
    return re.match(r".*?(-m \S+|\.(py|sh)\b)", command)[0]


def commits_of(record: Record) -> set[str]:
    """The commit of a record, or those of the points that it summarizes."""
    return {point["commit"] for point in record.get("points", {}).values()} or {record["commit"]}


def source(used: list[Record]) -> str:
    """Hardware, dates, commits and commands of a table's records."""

    def unique(key: Callable[[Record], str]) -> str:
        return ", ".join(sorted({key(record) for record in used}))

    hardware = unique(lambda r: r["hardware"].replace("1 x ", "one "))
    commits = ", ".join(f"`{name}`" for name in sorted(set().union(*map(commits_of, used))))
    commands = unique(lambda r: f"`{script(r['command'])}`")
    return f"Measured on {hardware}; {unique(lambda r: r['date'])}; commit {commits}; {commands}."


# --- tables of shapes by the GPU's state ------------------------------------------------------------------------------

_MS, _QUANTIZED = "ms, forward and backward", "with quantizing the weights"
_OURS = "titan_fp8moe"
_OURS_AND_MEMORY = (_OURS, "GiB, strongest", "GiB, ours")
_BF16_LAYERS = ("torchtitan's bf16", "bf16, one graph", "bf16, fused")


def by_state(records: Records, *patterns: str) -> Iterator[tuple[str, str, Callable[..., str]]]:
    """Yields each record's name, its shape without the state, and a function ``show(text, *args)``, which joins the
    texts of so many ``states``. ``of`` names other records of the shape."""
    for name in (name for pattern in patterns for name in records.names(pattern)):
        for shape in (shape for shape in records.shapes(name) if shape.endswith(f", {BACK_TO_BACK}")):
            base = shape.removesuffix(f", {BACK_TO_BACK}")

            def show(text: Callable[..., str], *args: str, of: str = name, base: str = base, states: int = 1) -> str:
                found = [records.of(of, f"{base}, {state}") for state in STATES[:states]]
                return " / ".join(text(each, *args) if each else "" for each in found).rstrip(" /")

            yield name, base, show


def field(found: Found, key: str) -> str:
    return number(first(found)[key])


def tflops(found: Found, reference: str = "") -> str:
    if not reference:
        return f"{first(found)['value']:.0f}"
    return f"{found[reference]['reference_value']:.0f}" if reference in found else ""


def with_gpu_busy(text: Callable[..., str]) -> Callable[..., str]:
    """``text`` of records, then of the time in which the GPU was busy."""

    def both(found: Found, *args: str) -> str:
        busy = {}
        for reference, r in found.items():
            mine, theirs = r["gpu_busy"], r["reference_gpu_busy"]
            busy[reference] = r | dict(value=mine, reference_value=theirs, speedup=theirs / mine)
        return " / ".join(filter(None, (text(each, *args) for each in (found, busy))))

    return both


_TE = [f"TransformerEngine{way}" for way in ("", ", native", ", one weight")]
_FUSED, _KEPT = "bf16 fused", ", {} kept for 4 microbatches"
_PRODUCTS = "bf16, three grouped_mm", "ours, three grouped_mm"
STATED = {  # the names of records, the first column, and the others: what a name ends in, and arguments of ``show``
    "sonicmoe": (
        "routed_experts", _MS,
        {"SonicMoE, bf16": ("", cell, "sonicmoe"), _OURS: ("", ours, "sonicmoe"),
         _QUANTIZED: ("_with_weights", ours, "sonicmoe")},
    ),
    "transformer_engine": (
        "routed_experts_te.*", f"{_MS}, {BACK_TO_BACK} / GPU busy",
        {peer: ("", with_gpu_busy(cell), peer) for peer in _TE} | {_OURS: ("", with_gpu_busy(ours), *_TE)},
    ),
    "routed_vs_fused_bf16": (
        "routed_vs_fused_bf16", _MS,
        {"bf16, fused": ("", cell, _FUSED), _OURS: ("", ours, _FUSED),
         "quantized once for four microbatches, 1 byte a parameter kept": (_KEPT.format("1 byte"), ours, _FUSED),
         "the same, 2 bytes": (_KEPT.format("2 bytes"), ours, _FUSED),
         "without quantizing": ("", field, "weights_cached")},
    ),
    "model_layers": (
        "layer_.*", _MS,
        {"bf16, fused": ("", cell, _FUSED), _OURS: ("", ours, _FUSED),
         "the same with SwiGLU": ("", cell, "ours with SwiGLU")},
    ),
    "grouped_ffn": (
        "grouped_ffn", _MS,
        {"bf16, three `_grouped_mm`": ("", cell, _PRODUCTS[0]), "three `grouped_mm`": ("", cell, _PRODUCTS[1]),
         _OURS: ("", ours, *_PRODUCTS), "of which moves": ("", field, "moves")},
    ),
}  # fmt: skip


def stated(records: Records, names: str, head: str, columns: dict[str, tuple[Any, ...]]) -> str:
    """A table of :data:`STATED`."""
    rows = []
    for name, base, show in by_state(records, names):
        cells = (show(text, *args, of=name + end) for end, text, *args in columns.values())
        rows.append([joined(layer(base), name.partition(", ")[2]), *cells])
    return markdown([head, *columns], rows)


def dense_linears(records: Records) -> str:
    """Linears of dense FFNs and whole FFNs against bf16; of linears also the ratio that a roofline allows."""
    rows = []
    for name, shape in records.named("dense_(linears|ffn).*"):
        found = first(records.of(name, shape))
        bound = found.get("roofline")
        limits = [f"{bound:.2f}x", f"{found['of_roofline']:.0%}"] if bound else ["", ""]
        ratio = f"**{found['speedup']:.2f}x**"
        what = name.replace("dense_linears", "linears").replace("dense_ffn", "FFN")
        rows.append([shape, what, number(found["reference_value"]), number(found["value"]), ratio, *limits])
    return markdown(["dense FFN", "", "bf16, ms", "titan_fp8moe, ms", "ratio", "roofline", "of it"], rows)


def peaks(records: Records) -> str:
    """What the GPU reaches: a copy in GB/s, products in TFLOP/s."""
    rows = []
    for name, shape in records.named("peak (copy|product)"):
        found = records.of(name, shape)
        peers = [cell(found, peer) if name == "peak product" else "" for peer in ("bf16", "fp8 per tensor")]
        rows.append([name.removeprefix("peak "), shape, number(first(found)["value"]), *peers])
    return markdown(["", "shape", "GB/s of a copy, TFLOP/s of ours", "cuBLAS bf16", "cuBLAS FP8 per tensor"], rows)


def gemms(records: Records) -> str:
    """TFLOP/s by state of the GPU. Peers launch for all SMs, so they have no figure with busy ones."""
    references, rows = ("bf16", "torchao rowwise", "deepgemm"), []
    for name, base, show in by_state(records, "grouped_mm", "grouped_mm_wgrad"):
        fp32 = show(tflops, of=f"{name}_fp32", states=3) if name.endswith("wgrad") else ""
        peers = (show(tflops, reference, states=2) for reference in references)
        rows.append([base, show(tflops, states=3), *peers, fp32])
    head = [f"TFLOP/s {' / '.join(STATES)}", _OURS, "bf16 `_grouped_mm`", "rowwise `_scaled_grouped_mm`", "DeepGEMM"]
    return markdown([*head, "ours to fp32"], rows)


# --- training ---------------------------------------------------------------------------------------------------------


SHORT = {
    ", 1 GPU": "",
    ", random routing": "",
    "activation_checkpoint.mode=full": "full checkpointing",
    "parallelism.expert_parallel_degree=1": "FSDP 2",  # not EP 2
    "parallelism.tensor_parallel_degree=2": "TP 2 with EP 2",
}


def setting(shape: str, *left_out: str) -> str:
    """A shape as tables show it, without what all rows of a table share."""
    for text, title in (SHORT | dict.fromkeys(left_out, "")).items():
        shape = shape.replace(text, title)
    return shape


OTHER_SETTINGS = re.compile(r"flex.* 1 GPU$|(forced|model) routing|checkpoint\.mode=full")
"""Shapes that were not measured beside fused bf16."""


_STRONGEST = "bf16_fused:checkpointing=saved,ep=1"


def training(records: Records) -> str:
    """Tokens/s of each setting and GiB of the strongest and ours, a row for an invocation with bf16 or other FP8."""
    rows = []
    for name in records.names(r"train_(16b|qwen3_30b)( dispatch=symmetric(?! memory).*)?(?<! memory)"):
        for shape in records.shapes(name, "bf16", _STRONGEST):
            if OTHER_SETTINGS.search(shape):
                continue
            memories = {first(found)["command"]: found for found in records.runs(f"{name} memory", shape)}
            for speed in records.runs(name, shape):
                if not speed.keys() & {"bf16", "torchao", "torchao_whole", _STRONGEST}:
                    continue  # other checkpointing, which has a table of its own
                run = Pair(speed, memories.get(first(speed)["command"], {}))
                peers = [best(speed, names) for names in PEERS.values()]
                cells = [f"{cell(speed, peer)} {option(peer)}".strip() for peer in peers]
                title = joined(setting(shape), name.partition(" ")[2])
                rows.append([title, card(first(speed)), *cells, *run.over_strongest(peers), spread(speed)])
    return markdown(["tokens/s per GPU", "GPU", *PEERS, *_OURS_AND_MEMORY, "spread"], rows)


TITAN03 = {
    "bf16": "bf16",
    "bf16_outside_fsdp": "bf16, experts outside of FSDP",
    "bf16_fused_swiglu": "bf16, `fused_swiglu`",
    "bf16_strongest": "bf16, both, grouped GEMMs kept",
    "torchao": "torchao FP8 experts",
}


def titan03(records: Records) -> str:
    """Training under torchtitan 0.3, one row for each setting, options of ours, card and commit."""
    rows = []
    for name, shape in records.named(r"train_\S+_titan03( \S+=\S+)*"):
        same = [r for r in records.all if (r["name"], r["shape"]) == (name, shape)]
        for gpu, commit in dict.fromkeys((card(r), r["commit"]) for r in same):
            found = records.pair(name, shape, hardware=gpu, commit=commit)
            title = joined(setting(shape, ", flex", ", forced routing"), *name.split()[1:])
            cells = [cell(found.speed, peer) for peer in TITAN03]
            rows.append([title, gpu, *cells, *found.over_strongest(TITAN03)])
    rows.sort(key=lambda row: "GPUs" in row[0])
    return markdown(["tokens/s per GPU", "GPU", *TITAN03.values(), *_OURS_AND_MEMORY], rows)


def dense(records: Records) -> str:
    """Tokens/s and GiB of dense models, a row for the modules that are FP8."""
    rows, peers = [], {"bf16": "bf16", "float8_tensorwise": "float8 tensorwise", "float8_rowwise": "float8 rowwise"}
    for name, shape in records.named(r"train_llama3_\w+( linear_fqns=\S+)?"):
        run = records.pair(name, shape)
        fp8 = "FFNs and linears of attention" if "linear_fqns" in name else "FFNs"
        title = setting(shape, ", activation_checkpoint.mode=none")
        rows.append([title, fp8, *(run.cell(peer) for peer in peers), *run.over_strongest(peers), spread(run.speed)])
    return markdown(["tokens/s, GiB reserved", "FP8", *peers.values(), *_OURS_AND_MEMORY, "spread"], rows)


def first_steps(records: Records) -> str:
    """Seconds of training's first step with empty caches, and from the launch."""
    rows = []
    for name, shape in records.named("train_.* first step"):
        step, launch = (records.of(name.replace("first step", what), shape) for what in ("first step", "from launch"))
        title = setting(shape, ", forced routing") + ", torchtitan 0.3" * ("titan03" in name)
        bf16 = [cell(found, "bf16") for found in (step, launch)]
        rows.append([title, *bf16, ours(step), ours(launch), spread(step)])
    columns = [f"{who}{what}" for who in ("bf16", "titan_fp8moe") for what in ("", ", from the launch")]
    return markdown(["s", *columns, "spread"], rows)


CHECKPOINTING = {
    "": "per op",
    ":checkpointing=saved": "per op, bf16's grouped GEMMs kept",
    ":checkpointing=none": "none",
    ":checkpointing=full": "full",
}


def checkpointing(records: Records) -> str:
    """Tokens/s and GiB by checkpointing, of bf16 and of ours, one row for a commit."""
    rows = []
    for name in ("train_16b", "train_qwen3_30b"):
        fused = [r for r in records.all if r["name"] == name and r["reference"].startswith("bf16_fused:")]
        for shape in dict.fromkeys(r["shape"] for r in fused if r["reference"].endswith("=none")):
            for options, title in CHECKPOINTING.items():
                for gpu, commit in dict.fromkeys((r["hardware"], r["commit"]) for r in fused if r["shape"] == shape):
                    bf16 = records.pair(name, shape, hardware=gpu, commit=commit)
                    mine = records.pair(name + options.replace(":", " "), shape, hardware=gpu, commit=commit)
                    if any(cells := [bf16.cell(peer + options) for peer, *_ in BF16]):
                        rows.append([setting(shape), title, *cells, joined(*map(ours, mine))])
    return markdown(["tokens/s, GiB reserved", "checkpointing", *[*PEERS][:3], "titan_fp8moe"], rows)


def variants(records: Records) -> str:
    """Our settings against the defaults."""
    rows = []
    for name, shape in records.named(r"train_16b \S+=\S+", "fp8_flow"):
        used = len(records.used)
        speed = records.of(name, shape).get("fp8_flow")
        if not speed:  # the newest run had other references
            del records.used[used:]
        else:
            cells = joined(number(speed["value"]), ours(records.of(f"{name} memory", shape)))
            rows.append([f"`{name.split()[1]}`", setting(shape), cells, f"{speed['speedup']:.3f}x"])
    return markdown(["variant", "setting", "tokens/s per GPU, GiB reserved", "of the defaults' speed"], rows)


def sweep(records: Records) -> str:
    """The fastest point of each precision on a card, over local batch and checkpointing."""
    rows = []
    for name, shape in records.named("train_.* fastest"):
        (found,) = records.of(name, shape).values()
        row = [setting(shape.replace(" 80GB HBM3", ""))]
        for who in ("reference", "ours"):
            p = found["points"][who]
            options = p["variant"].partition(":")[2] or "defaults"
            speed = number(p["tokens_per_second"]) + f" (**{found['speedup']:.2f}x**)" * (who == "ours")
            row += [speed, f"{p['memory_gib']:.1f}", f"batch {p['local_batch']}, {options}"]
        rows.append(row)
    return markdown(["highest tokens/s", "bf16, fused", "GiB", "with", "titan_fp8moe", "GiB", "with"], rows)


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


def layers(records: Records, main: bool = True) -> str:
    """Layers of 8,192 tokens, or all others. Weights are quantized in each microbatch, or once for four."""
    quantizing, kept = "moe_layer_with_weights", "moe_layer with weights kept for 4 microbatches"
    references, rows = ("bf16", "bf16 whole", "bf16 fused"), []
    shapes = [shape for shape in records.shapes(quantizing, "bf16 whole") if shape.endswith(", 1 GPU")]
    fused = [shape for shape in records.shapes(quantizing, "bf16 fused") if layer(shape).endswith("8192 tokens")]
    for shape in by_model([shape for shape in shapes if (shape in fused) == main]):
        once, four, saved = (records.of(name, shape) for name in (quantizing, kept, "moe_layer saved"))
        row = [layer(shape), *(cell(once, reference) for reference in references)]
        row += [ours(found, *strongest(found, references)) for found in (once, four)]
        bytes_saved = [saved["bf16"]["reference_value"], first(saved)["value"]] if saved else []
        rows.append([*row, *([f"{bytes / 1024:.0f}" for bytes in bytes_saved] or ["", ""])])
    head = [_MS, *_BF16_LAYERS, _QUANTIZED, "kept for four microbatches", "KiB saved per token, bf16", "KiB, ours"]
    return markdown(head, rows)


def layer_ablations(records: Records) -> str:
    """The paper's ablations against the defaults of the same run."""
    rows = []
    for variant in ("requantize", "unfused permute"):
        for shape in records.shapes(f"moe_layer {variant}", "fp8"):
            found = records.of(f"moe_layer {variant}", shape)["fp8"]
            rows.append([variant, layer(shape), number(found["value"]), f"{found['speedup']:.3f}x"])
    return markdown(["variant", "layer", "ms", "of the defaults' speed"], rows)


def activations(records: Records, kind: str = "activation_error") -> str:
    """Relative errors of each activation's layer, or of another ``kind`` of records, named ``KIND COLUMN: ROW``."""
    found: dict[str, dict[str, str]] = {}
    of_kind = [r for r in records.all if r["name"].startswith(f"{kind} ")]
    newest = max(reversed(of_kind), key=lambda r: r["date"], default=None)
    for r in (r for r in of_kind if (r["date"], r["commit"]) == (newest["date"], newest["commit"])):
        column, row = r["name"].removeprefix(f"{kind} ").split(": ")
        found.setdefault(row, {})[column] = f"{r['value']:.4f}"
        records.used.append(r)
    columns = list(dict.fromkeys(column for of in found.values() for column in of))
    return markdown(["", *columns], [[name, *(of.get(column, "") for column in columns)] for name, of in found.items()])


def transformers(records: Records, one_token: bool = False) -> str:
    rows = []
    for name in ("transformers_qwen3", "transformers_deepseek_v3"):
        for shape in records.shapes(name):
            if ("forward of one token" in shape) != one_token or "frozen" in shape:
                continue
            for reference, r in records.of(name, shape).items():
                loss = r["unit"] == "nats"
                bf16, mine = (f"{x:.3f}" if loss else number(x) for x in (r["reference_value"], r["value"]))
                more = "" if loss else f" ({r['speedup']:.2f}x)"
                if "gaps" in r:  # of each seed
                    gaps, again = (" / ".join(map("{:+.2%}".format, r[key])) for key in ("gaps", "reference_gaps"))
                    more = f" ({gaps}; bf16 again {again})"
                rows.append([f"{shape}, {r['unit']}", card(r), f"{bf16} ({reference})", mine + more])
    return markdown(["model, figure", "GPU", "bf16", "`fp8_flow`"], rows)


def lora(records: Records) -> str:
    """Adapters of Qwen3-30B-A3B: losses next to bf16, and speed and peak memory with experts in host memory."""
    rows, head = [], ["Qwen3-30B-A3B, or as named", "reference", "its", "experts in FP8, adapters beside them"]
    for shape in records.shapes("lora_qwen3_30b", "bf16"):
        if "loss" in shape:
            r = records.of("lora_qwen3_30b", shape)["bf16"]
            rows.append([shape, "bf16", f"{r['reference_value']:.3f}", f"{r['value']:.3f}"])
    for shape in records.shapes("lora_qwen3_30b", "ours, on the card", "the longer alone"):
        for reference, r in records.of("lora_qwen3_30b", shape).items():
            sides = (("reference_value", "reference_peak_gib"), ("value", "peak_gib"))
            theirs, mine = (f"{number(r[speed])}, {r[memory]:.1f} GiB" for speed, memory in sides)
            alone = "; copies {copy_s:.2f} s, computation {compute_s:.2f} s".format(**r) if "copy_s" in r else ""
            rows.append([f"{shape}, {r['unit']}", reference, theirs, f"{mine} ({r['speedup']:.2f}x){alone}"])
    return markdown(head, rows)


# --- kernels and expert parallelism -----------------------------------------------------------------------------------


def data_movement(records: Records) -> str:
    """Share of a device copy by kernel and layer, with few rows also of a copy of as many bytes. Kernels that compute
    indices move little: their microseconds."""
    found: dict[str, dict[str, Found]] = {}
    columns: dict[str, None] = {}
    for r in records.all:
        if r["reference"] in COPIES and "rows" in r:
            column = f"{r['layer']}, {r['rows']:,} rows, E {r['E']}"
            kernel = r["name"] + r["routing"].removeprefix("balanced")
            found.setdefault(kernel, {}).setdefault(column, {})[r["reference"]] = r
            columns[column] = None
    rows = []
    for kernel, by_column in found.items():
        few = 0 if kernel.endswith("_routing") else 8192
        cells = [by_column.get(column, {}).values() for column in columns]
        cells = [[r for r in cell if r["reference"] == COPIES[0] or r["rows"] < few] for cell in cells]
        records.used += [r for cell in cells for r in cell]
        shown = (lambda r: f"{r['speedup']:.0%}") if few else (lambda r: f"{r['microseconds']:.0f} µs")
        rows.append([kernel, *(", ".join(map(shown, cell)) for cell in cells)])
    return markdown(["share of a device copy", *columns], rows)


def exchange(records: Records) -> str:
    """Milliseconds of dispatch + permute, and of sum + combine."""
    rows = []
    for shape in records.shapes("ep_dispatch"):
        sent = [records.of(f"ep_dispatch{path}", shape)["bf16"] for path in ("", " dispatch=symmetric")]
        summed = records.of("ep_combine dispatch=symmetric", shape)
        dispatch = (f"{r['value']:.2f} ({r['speedup']:.2f}x)" for r in sent)
        combine = (f"{r:.2f}" for r in (summed["all_to_all"]["reference_value"], summed["all_to_all"]["value"]))
        rows.append([shape, f"{sent[0]['reference_value']:.2f}", *dispatch, *combine])
    ways = "FP8 all-to-all", "FP8 symmetric"
    return markdown(["ms", "dispatch: bf16", *ways, *(f"combine: {way}" for way in ways)], rows)


# --- convergence ------------------------------------------------------------------------------------------------------


def pairs(records: Records) -> str:
    """FP8 against bf16, by pairs of runs."""
    rows = []
    for name, shape in records.named("pairs: .*"):
        r = first(records.of(name, shape))
        half_width, needed = r["pairs_for"]
        cells = [f"{r['value']:+.2%}", "1", "", ""]
        if r["pairs"] > 1:
            cells = [f"**{r['value']:+.2%} ± {r['half_width']:.2%}**", str(r["pairs"])]
            cells += [f"{r['deviation']:.2%}", f"{needed:,} (±{half_width:.2%})"]
        model = shape.partition(",")[0].replace("_", " ")
        rows.append([model, name.partition(": ")[2], f"{r['reference_value']:.4f}", *cells])
    return markdown(["model", "", "bf16", "FP8 against it, 95%", "pairs", "deviation of pairs", "pairs for less"], rows)


def long_run(records: Records) -> str:
    """A long run in bf16, the same with one bit of an initial weight changed, and in FP8."""
    rows = []
    for name, shape in records.named("3,000 steps: .*", "bf16"):
        bf16, changed = records.of(name, shape).values()
        digits = ".4f" if bf16["unit"] == "nats" else ",.0f" if "tokens" in bf16["unit"] else ".1f"
        values = bf16["reference_value"], changed["reference_value"], bf16["value"]
        apart = [f"{value / values[0] - 1:+.2%}" for value in values[1:]]
        title = f"{name.partition(': ')[2]}, {bf16['unit']}"
        rows.append([title, *(f"{value:{digits}}" for value in values), *apart])
    names = ["bf16", "bf16, one bit changed", "FP8"]
    return markdown(["", *names, "bf16 from itself", "FP8 from bf16"], rows)


def from_checkpoints(records: Records) -> str:
    """Losses after training on from bf16's checkpoints, relative to bf16's, with intervals of the runs' spread."""
    rows = []
    for name, shape in records.named(".*: final held-out loss"):
        kinds = (name, name.replace("held-out loss", "training loss, last 50 steps"))
        found = [first(records.of(kind, shape)) for kind in kinds]
        cells = [f"{r['value']:+.3%} ± {r['half_width']:.3%}" for r in found]
        model, runs = shape.split(",")[0].replace("_", " "), shape.split(", ")[-1]
        rows.append([joined(model, name.partition(":")[0]), runs, *cells])
    return markdown(["model, what is FP8", "", "held-out loss", "training loss, last 50 steps"], rows)


def gradient_noise(records: Records) -> str:
    """Errors of gradients, and the batch whose noise equals FP8's, at one step after the other."""

    def percent(value: float) -> str:
        return f"{value:.{2 if value < 0.01 else 1}%}"

    def batch(tokens: float | None) -> str:
        return "∞" if tokens is None else f"{float(f'{tokens / 1e6:.3g}'):,.0f}"

    shown = {"value": percent, "reference_value": percent, "critical_tokens": batch}
    rows = []
    for name in records.names("gradient_noise .*"):
        found = [first(records.of(name, shape)) for shape in records.shapes(name)]
        rows.append([name.partition(" ")[2], *(" / ".join(text(r[key]) for r in found) for key, text in shown.items())])
    return markdown(["weights", "FP8's error", "bf16's error", "critical batch, M tokens"], rows)


# --- sources that are no records --------------------------------------------------------------------------------------


def published(records: Records) -> str:
    """Figures of others, which ran on their own hardware."""
    cells = (
        [row["what"], f"{row['value']:,} {row['unit']}".replace(" %", "%"), row["hardware"], f"[link]({row['link']})"]
        for row in check.source("published").values()
    )
    return markdown(["what", "figure", "hardware", "source"], [*cells])


MODELS = {"moe16b": "DeepSeek-V3 16B, local batch 4", "qwen3": "Qwen3-30B-A3B, local batch 2"}
"""Models of ``dry_runs.json``, which a test repeats."""


def dry_runs(records: Records) -> str:
    """Estimates of the peak on eight GPUs, by dispatch."""
    found, rows = check.source("dry_runs"), []
    for model, title in MODELS.items():
        runs = [found[f"{model}_8"], found[f"{model}_8_experts"]]
        cells = [(f"{run['peak']:.1f}", f"{run['least']:.1f} to {run['most']:.1f}") for run in runs]
        rows.append([title, *cells[0], *cells[1]])
    ways = "all-to-all", "symmetric memory"
    return markdown(["GiB of 80, eight GPUs", *ways, *(f'{way}, `recompute = "experts"`' for way in ways)], rows)


def whole_models(records: Records) -> str:
    """Estimates of parameters, gradients and Adam's states, and of the peak."""
    found = check.source("dry_runs")
    rows = [
        [title, gpus, f"{found[f'{model}_{gpus}']['states']:.1f}", f"{found[f'{model}_{gpus}']['peak']:.1f}"]
        for model, title in MODELS.items()
        for gpus in "48"
    ]
    return markdown(["whole model", "GPUs", "GiB of parameters, gradients and Adam on each", "peak"], rows)


# --- the pages --------------------------------------------------------------------------------------------------------

_BATCH = "sdpa, local batch 4, random routing"
_NEVER = ", parallelism.fsdp_reshard_after_forward=never"
HEADLINE = {  # a row of the first table and of the picture: the record's name and shape, and which bf16 it has
    "DeepSeek-V3 16B, 6 layers": ("train_16b checkpointing=none", f"16B, 6 layers, {_BATCH}, 1 GPU", "fused"),
    "Qwen3-30B-A3B, 5 layers": (
        "train_qwen3_30b checkpointing=none",
        f"Qwen3-30B-A3B, 5 layers, {_BATCH}, 1 GPU",
        "fused",
    ),
    "DeepSeek-V3 16B, all 27 layers": (
        "train_16b dispatch=symmetric",
        f"16B, 27 layers, {_BATCH}, 4 GPUs{_NEVER}",
        "fused",
    ),
    "Qwen3-30B-A3B, all 48 layers": (
        "train_qwen3_30b dispatch=symmetric recompute=experts",
        f"Qwen3-30B-A3B, 48 layers, {_BATCH}, 4 GPUs",
        "torchtitan's",
    ),
}


def headline_runs(records: Records) -> Iterator[tuple[str, str, Record, Record]]:
    """Each row's title with its cards, its bf16, and the records of speed and memory beside the strongest one."""
    for title, (name, shape, bf16) in HEADLINE.items():
        found = {key: r for key, r in records.of(name, shape).items() if key.startswith("bf16")}
        for reference in strongest(found, found):
            speed, memory = found[reference], records.of(f"{name} memory", shape)[reference]
            count = int(speed["hardware"].partition(" x ")[0])
            cards = f"{['one', 'two', '', 'four'][count - 1]} {card(speed)}{'s' * (count > 1)}"
            yield f"{title}, {cards}", bf16, speed, memory


def headline(records: Records) -> str:
    """Tokens/s per GPU and GiB of the strongest bf16 of the same invocation, and ours."""
    rows = [
        [
            title,
            f"{number(speed['reference_value'])} ({bf16})",
            number(speed["value"]),
            f"**{speed['speedup']:.2f}x**" if bf16 == "fused" else "",
            number(memory["reference_value"]),
            number(memory["value"]),
        ]
        for title, bf16, speed, memory in headline_runs(records)
    ]
    columns = ["tokens/s per GPU", "strongest bf16", "titan_fp8moe", "ratio", "GiB, bf16", "GiB, ours"]
    return markdown(columns, rows)


TABLES: dict[str, Callable[[Records], str]] = {
    table.__name__: table
    for table in (
        *(headline, training, dense, titan03, checkpointing, variants, sweep, first_steps),
        *(layers, layer_ablations, dense_linears, peaks, activations, transformers, lora),
        *(gemms, data_movement, exchange, pairs, long_run, gradient_noise, from_checkpoints),
        *(published, dry_runs, whole_models),
    )
}
TABLES |= {name: partial(stated, names=n, head=h, columns=c) for name, (n, h, c) in STATED.items()}
TABLES["layer_errors"] = partial(activations, kind="layer_error")
TABLES["double_rounding"] = partial(activations, kind="double_rounding")
TABLES["other_layers"] = partial(layers, main=False)
TABLES["transformers_token"] = partial(transformers, one_token=True)


NO_RECORDS = (published, dry_runs, whole_models)


class Pages:
    """The pages as their sources have them. ``used`` are the records of all tables."""

    def __init__(self, records: Records):
        self.ledger, self.used, self.tables = check.Ledger(records.all), [], {}
        for name, table in TABLES.items():
            records.used = []
            body = table(records)
            self.used += records.used
            if records.used:
                body += f"\n\n{source(records.used)}"
            self.tables[name] = body if records.used or table in NO_RECORDS else "Not measured in this state."

    def page(self, name: str, text: str) -> tuple[str, list[str]]:
        """A page with its tables and figures, and what its ledger and its text lack."""
        text = MARKED.sub(lambda match: f"{match[1]}{self.tables[match[2]]}\n{match[3]}", text)
        return self.ledger.page(name, text)

    def errors(self, name: str, text: str) -> list[str]:
        new, errors = self.page(name, text)
        return errors + ["its figures are not those of their sources; run python -m experiments.tables"] * (new != text)


def prune() -> None:
    """Rewrites the files of records without those that no page cites."""
    files = {path: json.loads(path.read_text()) for path in record_files()}
    pages = Pages(Records([record for found in files.values() for record in found]))
    cited = {id(record) for record in pages.used + pages.ledger.records()}
    for path, found in files.items():
        kept = [r for r in found if id(r) in cited]
        print(f"{path.relative_to(ROOT)}: {len(kept)} of {len(found)} records")
        write_list(path, kept)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--prune", action="store_true", help="drop what no page cites")
    args = parser.parse_args()
    if args.prune:
        prune()
    pages = Pages(read())
    errors = [f"experiments/figures.toml: no page has {name}" for name in pages.ledger.unused()]
    for name in PAGES:
        text = (ROOT / name).read_text()
        new, found = pages.page(name, text)
        errors += [f"{name}: {error}" for error in (pages.errors(name, text) if args.check else found)]
        if not args.check:
            (ROOT / name).write_text(new)
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
