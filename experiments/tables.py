"""Writes the tables of the pages from the records, so that no figure is copied by hand.

    python -m experiments.tables            # tables, and the figures in the text
    python -m experiments.tables --check    # fails if a table or another figure is not what its source says
    python -m experiments.tables --prune    # drops the records that no page cites

On a page ``<!-- table: NAME -->`` and ``<!-- end -->`` stand around each table, whose rows a function that is marked
:func:`table` yields. Below it are hardware, dates, commits and commands of its records. What was not measured is an
empty cell or no row. :mod:`experiments.check` says where the figures in the text come from.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from experiments import check
from experiments.check import ROOT, Record, newest, place
from experiments.records import script_parser, write_list
from experiments.timing import AFTER_IDLING, BACK_TO_BACK, WITH_BUSY_SMS

PAGES = [
    str(path.relative_to(ROOT))
    for pages in ("README.md", "docs/*.md", "experiments/*/README.md")
    for path in sorted(ROOT.glob(pages))
]
FILES = sorted(ROOT.glob("experiments/*/results.json"))
PEERS = {  # titles of columns, and the references of which each shows the best
    "torchtitan's bf16": ("bf16",),
    "bf16, compiled whole": ("bf16_whole",),
    "bf16, fused": ("bf16_fused",),
    "torchao FP8 experts": ("torchao", "torchao_whole"),
    "FP8, a cast around each GEMM": ("naive_blockwise", "naive_whole"),
}
BF16 = [*PEERS][:3]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SCRIPT = re.compile(r".*?(-m \S+|\.(py|sh)\b)")  # a command without its script's options
STATES = (BACK_TO_BACK, AFTER_IDLING, WITH_BUSY_SMS)
COPIES = ("copy", "copy of as many bytes")
Found = dict[str, Record]  # of one name and shape, by reference
Rows = Iterator[list[str]]


class Records:
    """The records of all experiments, and those that a table used."""

    def __init__(self, records: list[Record]):
        self.all = records
        self.used: list[Record] = []

    def of(self, name: str, shape: str, hardware: str = "", commit: str = "") -> Found:
        """Records of the newest run by reference, on that ``hardware`` and of that ``commit`` if they are given."""
        named = [r for r in self.all if place(r) == (name, shape)]
        found = newest([r for r in named if hardware in r["hardware"] and commit in r["commit"]])
        self.used += found
        return {r["reference"]: r for r in found}

    def pair(self, name: str, shape: str, **options: str) -> tuple[Found, Found]:
        """:meth:`of` for speed and for memory."""
        return (self.of(name, shape, **options), self.of(f"{name} memory", shape, **options))

    def runs(self, name: str, shape: str, older: bool = False) -> list[Found]:
        """:meth:`of` each card, split by invocation: the runs of one took turns on one machine. ``older``: also of
        other commits than the newest."""
        found: dict[tuple[str, str], Found] = {}
        states = ((r["hardware"], r["commit"] if older else "") for r in self.all if place(r) == (name, shape))
        for gpu, commit in dict.fromkeys(states):
            for reference, r in self.of(name, shape, hardware=gpu, commit=commit).items():
                found.setdefault((gpu, r["command"]), {})[reference] = r
        return [*found.values()]

    def named(self, pattern: str, *references: str) -> list[tuple[str, str]]:
        """Each name that matches and each of its shapes; with ``references``, of those that were compared with one."""
        found = [r for r in self.all if re.fullmatch(pattern, r["name"])]
        names = list(dict.fromkeys(r["name"] for r in found))
        places = dict.fromkeys(place(r) for r in found if not references or r["reference"] in references)
        return sorted(places, key=lambda of: names.index(of[0]))


TABLES: dict[str, Callable[[Records], str]] = {}


def table(*head: str, name: str = "", **options: Any) -> Callable[[Callable[..., Rows]], Callable[..., Rows]]:
    """Adds a function that yields a table's rows to :data:`TABLES`. Without ``head`` the first row is the head."""

    def register(rows: Callable[..., Rows]) -> Callable[..., Rows]:
        TABLES[name or rows.__name__] = lambda records: markdown(*[head] * bool(head), *rows(records, **options))
        return rows

    return register


def read() -> Records:
    return Records([record for path in FILES for record in json.loads(path.read_text())])


# --- cells ------------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def first(found: Found) -> Record:
    return next(iter(found.values()))


def ratio(record: Record, digits: int = 2) -> str:
    return f"{record['speedup']:.{digits}f}x"


def ours(found: Found, *references: str) -> str:
    """Our figure, and the speedups over the references that were measured; bold is the smallest, over the strongest."""
    given = [found[reference] for reference in references if reference in found]
    least = min((r["speedup"] for r in given), default=None)
    shown = joined(*(f"**{ratio(r)}**" if r["speedup"] == least else ratio(r) for r in given))
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


def over_strongest(speed: Found, memory: Found, references: Iterable[str]) -> list[str]:
    """Our speed and its ratio over the strongest reference, bold unless that is stock bf16; what both reserve."""
    peers = strongest(speed, references)
    mine = ours(speed, *peers)
    return [mine.replace("**", "") if peers == ["bf16"] else mine, cell(memory, *peers or [""]), ours(memory)]


def markdown(head: list[str], *rows: list[str]) -> str:
    """A Markdown table without the columns in which nothing was measured."""
    used = [i for i in range(len(head)) if not rows or any(row[i] for row in rows)]
    lines = ([row[i] for i in used] for row in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in lines)


def provenance(used: list[Record]) -> str:
    """Hardware, dates, commits and commands of a table's records."""

    def unique(values: Iterable[str]) -> str:
        return ", ".join(sorted(set(values)))

    hardware = unique(r["hardware"].replace("1 x ", "one ") for r in used)
    commits = unique(f"`{of['commit']}`" for r in used for of in r.get("points", {"": r}).values())
    commands = unique(f"`{SCRIPT.match(r['command'])[0]}`" for r in used)
    return f"Measured on {hardware}; {unique(r['date'] for r in used)}; commit {commits}; {commands}."


# --- tables of shapes by the GPU's state ------------------------------------------------------------------------------

_MS, _QUANTIZED = "ms, forward and backward", "with quantizing the weights"
_OURS = "titan_fp8moe"
_TOKENS = "tokens/s per GPU", "GPU"
_OURS_AND_MEMORY = (_OURS, "GiB, strongest", "GiB, ours")


def field(found: Found, key: str) -> str:
    return number(first(found)[key])


def with_gpu_busy(text: Callable[..., str], found: Found, *args: str) -> str:
    """``text`` of records, then of the time in which the GPU was busy."""
    busy = {}
    for reference, r in found.items():
        mine, theirs = r["gpu_busy"], r["reference_gpu_busy"]
        busy[reference] = r | dict(value=mine, reference_value=theirs, speedup=theirs / mine)
    return " / ".join(filter(None, (text(each, *args) for each in (found, busy))))


_TE = [f"TransformerEngine{way}" for way in ("", ", native", ", one weight")]
_FUSED, _KEPT = "bf16 fused", ", {} kept for 4 microbatches"
_PRODUCTS = "bf16, three grouped_mm", "ours, three grouped_mm"
# The names of records, the first column, and the others: of how many states, what a name ends in, a cell's text and the
# text's arguments. Peers of GEMMs launch for all SMs, so they have no figure with busy ones.
STATED = {
    "sonicmoe": (
        "routed_experts", _MS,
        {"SonicMoE, bf16": (1, "", cell, "sonicmoe"), _OURS: (1, "", ours, "sonicmoe"),
         _QUANTIZED: (1, "_with_weights", ours, "sonicmoe")},
    ),
    "transformer_engine": (
        "routed_experts_te.*", f"{_MS}, {BACK_TO_BACK} / GPU busy",
        {peer: (1, "", partial(with_gpu_busy, cell), peer) for peer in _TE}
        | {_OURS: (1, "", partial(with_gpu_busy, ours), *_TE)},
    ),
    "routed_vs_fused_bf16": (
        "routed_vs_fused_bf16", _MS,
        {"bf16, fused": (1, "", cell, _FUSED), _OURS: (1, "", ours, _FUSED),
         "quantized once for four microbatches, 1 byte a parameter kept": (1, _KEPT.format("1 byte"), ours, _FUSED),
         "the same, 2 bytes": (1, _KEPT.format("2 bytes"), ours, _FUSED),
         "without quantizing": (1, "", field, "weights_cached")},
    ),
    "model_layers": (
        "layer_.*", _MS,
        {"bf16, fused": (1, "", cell, _FUSED), _OURS: (1, "", ours, _FUSED),
         "the same with SwiGLU": (1, "", cell, "ours with SwiGLU")},
    ),
    "grouped_ffn": (
        "grouped_ffn", _MS,
        {"bf16, three `_grouped_mm`": (1, "", cell, _PRODUCTS[0]), "three `grouped_mm`": (1, "", cell, _PRODUCTS[1]),
         _OURS: (1, "", ours, *_PRODUCTS), "of which moves": (1, "", field, "moves")},
    ),
    "gemms": (
        "grouped_mm(_wgrad)?", f"TFLOP/s {' / '.join(STATES)}",
        {_OURS: (3, "", ours), "bf16 `_grouped_mm`": (2, "", cell, "bf16"),
         "rowwise `_scaled_grouped_mm`": (2, "", cell, "torchao rowwise"),
         "ours to fp32": (3, "_fp32", ours)},
    ),
}  # fmt: skip


def stated(records: Records, pattern: str, columns: dict[str, tuple[Any, ...]]) -> Rows:
    """Rows of a table of :data:`STATED`."""
    for name, shape in records.named(pattern):
        base, _, state = shape.rpartition(", ")
        if state == BACK_TO_BACK:
            cells = []
            for states, end, text, *args in columns.values():
                found = [records.of(name + end, f"{base}, {state}") for state in STATES[:states]]
                cells.append(" / ".join(text(each, *args) for each in found if each).rstrip(" /"))
            yield [joined(layer(base), name.partition(", ")[2]), *cells]


for _name, (_pattern, _head, _columns) in STATED.items():
    table(_head, *_columns, name=_name, pattern=_pattern, columns=_columns)(stated)


@table("dense FFN", "", "bf16, ms", "titan_fp8moe, ms", "ratio", "roofline", "of it")
def dense_linears(records: Records) -> Rows:
    for name, shape in records.named("dense_(linears|ffn).*"):
        found = first(records.of(name, shape))
        bound = found.get("roofline")
        limits = [f"{bound:.2f}x", f"{found['of_roofline']:.0%}"] if bound else ["", ""]
        what = name.replace("dense_linears", "linears").replace("dense_ffn", "FFN")
        yield [shape, what, number(found["reference_value"]), number(found["value"]), f"**{ratio(found)}**", *limits]


@table("", "shape", "GB/s of a copy, TFLOP/s of ours", "cuBLAS bf16", "cuBLAS FP8 per tensor")
def peaks(records: Records) -> Rows:
    for name, shape in records.named("peak (copy|product)"):
        found = records.of(name, shape)
        yield [name.removeprefix("peak "), shape, ours(found), cell(found, "bf16"), cell(found, "fp8 per tensor")]


# --- training ---------------------------------------------------------------------------------------------------------

SHORT = {
    ", 1 GPU": "",
    ", random routing": "",
    ", forced routing": "",
    "model routing": "own routing",
    "parallelism.expert_parallel_degree=1": "FSDP 2",  # not EP 2
    "parallelism.tensor_parallel_degree=2": "TP 2 with EP 2",
}


def setting(shape: str) -> str:
    """A shape as tables show it."""
    for text, title in SHORT.items():
        shape = shape.replace(text, title)
    return shape


_TRAINED = r"train_(16b|qwen3_30b)( dispatch=symmetric(?! memory).*)?(?<! memory)"
_TRAINED03 = r"train_\S+_titan03( \S+=\S+)*"
_LLAMA = r"train_llama3_\w+(.*=\S+)?"
_DENSE = {name.replace("_", " "): (name,) for name in ("bf16", "float8_tensorwise", "float8_rowwise")}
_TITAN03 = {
    "bf16": ("bf16",),
    "bf16, experts outside of FSDP": ("bf16_outside_fsdp",),
    "bf16, `fused_swiglu`": ("bf16_fused_swiglu",),
    "bf16, both, grouped GEMMs kept": ("bf16_strongest",),
    "torchao FP8 experts": ("torchao",),
}


@table(*_TOKENS, *PEERS, *_OURS_AND_MEMORY, "spread", name="training", pattern=_TRAINED, columns=PEERS)
@table(*_TOKENS, *_DENSE, *_OURS_AND_MEMORY, "spread", name="dense", pattern=_LLAMA, columns=_DENSE)
@table(*_TOKENS, *_TITAN03, *_OURS_AND_MEMORY, name="titan03", pattern=_TRAINED03, columns=_TITAN03, older=True)
def training(records: Records, pattern: str, columns: dict[str, tuple[str, ...]], older: bool = False) -> Rows:
    """Tokens/s of each setting and GiB of the strongest and ours, a row for an invocation with bf16 or other FP8."""
    for name, shape in sorted(records.named(pattern), key=lambda of: "GPUs" in of[1]):
        memories = {first(found)["command"]: found for found in records.runs(f"{name} memory", shape, older)}
        for speed in records.runs(name, shape, older):
            if "checkpointing=none" not in name:
                speed = {key: r for key, r in speed.items() if not re.search("checkpointing=(none|full)", key)}
            peers = [best(speed, names) for names in columns.values()]
            if not any(peers):
                continue  # other checkpointing, which has a table of its own
            memory = memories.get(first(speed)["command"], {})
            cells = [f"{cell(speed, peer)} {option(peer)}".strip() for peer in peers]
            title = joined(setting(shape), name.partition(" ")[2])
            yield [title, card(first(speed)), *cells, *over_strongest(speed, memory, peers), spread(speed)]


@table("s", *(f"{who}{what}" for who in ("bf16", _OURS) for what in ("", ", from the launch")), "spread")
def first_steps(records: Records) -> Rows:
    for name, shape in records.named("train_.* first step"):
        step, launch = (records.of(name.replace("first step", what), shape) for what in ("first step", "from launch"))
        title = setting(shape) + ", torchtitan 0.3" * ("titan03" in name)
        yield [title, cell(step, "bf16"), cell(launch, "bf16"), ours(step), ours(launch), spread(step)]


CHECKPOINTING = {
    "": "per op",
    ":checkpointing=saved": "per op, bf16's grouped GEMMs kept",
    ":checkpointing=none": "none",
    ":checkpointing=full": "full",
}


@table("tokens/s, GiB reserved", "checkpointing", *BF16, _OURS)
def checkpointing(records: Records) -> Rows:
    """Tokens/s and GiB by checkpointing, of bf16 and of ours, one row for a commit."""
    for name, shape in records.named("train_16b|train_qwen3_30b", "bf16_fused:checkpointing=none"):
        fused = [r for r in records.all if place(r) == (name, shape) and r["reference"].startswith("bf16_fused:")]
        for options, title in CHECKPOINTING.items():
            for gpu, commit in dict.fromkeys((r["hardware"], r["commit"]) for r in fused):
                bf16 = records.pair(name, shape, hardware=gpu, commit=commit)
                mine = records.pair(name + options.replace(":", " "), shape, hardware=gpu, commit=commit)
                if any(cells := [joined(*(cell(of, PEERS[peer][0] + options) for of in bf16)) for peer in BF16]):
                    yield [setting(shape), title, *cells, joined(*map(ours, mine))]


@table("variant", "setting", "tokens/s per GPU, GiB reserved", "of the defaults' speed")
def variants(records: Records) -> Rows:
    for name, shape in records.named(r"train_16b \S+=\S+", "fp8_flow"):
        if "fp8_flow" in Records(records.all).of(name, shape):  # or the newest run had other references
            speed, memory = records.pair(name, shape)
            cells = joined(ours(speed), ours(memory)), ratio(speed["fp8_flow"], 3)
            yield [f"`{name.split()[1]}`", setting(shape), *cells]


@table("highest tokens/s", "bf16, fused", "GiB", "with", _OURS, "GiB", "with")
def sweep(records: Records) -> Rows:
    """The fastest point of each precision on a card, over local batch and checkpointing."""
    for name, shape in records.named("train_16b fastest"):
        (found,) = records.of(name, shape).values()
        row = [setting(shape.replace(" 80GB HBM3", ""))]
        for who in ("reference", "ours"):
            p = found["points"][who]
            options = p["variant"].partition(":")[2] or "defaults"
            speed = number(p["tokens_per_second"]) + f" (**{ratio(found)}**)" * (who == "ours")
            row += [speed, f"{p['memory_gib']:.1f}", f"batch {p['local_batch']}, {options}"]
        yield row


# --- one layer --------------------------------------------------------------------------------------------------------


def layer(shape: str) -> str:
    return shape.removesuffix(", 1 GPU").replace(" per GPU", "")


def by_model(shapes: list[str]) -> list[str]:
    """The shapes of a model together, those of more tokens first."""
    models = [shape.split(",")[0] for shape in shapes]
    return sorted(shapes, key=lambda shape: (models.index(shape.split(",")[0]), -int(shape.split(", ")[2].split()[0])))


_BF16_LAYERS = {"bf16": "torchtitan's bf16", "bf16 whole": "bf16, one graph", "bf16 fused": "bf16, fused"}
_KIB = "KiB saved per token, bf16", "KiB, ours"
_LAYERS = _MS, *_BF16_LAYERS.values(), _QUANTIZED, "kept for four microbatches", *_KIB


@table(*_LAYERS, name="other_layers", main=False)
@table(*_LAYERS, name="layers", main=True)
def layers(records: Records, main: bool) -> Rows:
    """Layers of 8,192 tokens, or all others. Weights are quantized in each microbatch, or once for four."""
    quantizing, kept = "moe_layer_with_weights", "moe_layer with weights kept for 4 microbatches"
    shapes = [shape for _, shape in records.named(quantizing, "bf16 whole") if shape.endswith(", 1 GPU")]
    for shape in by_model([shape for shape in shapes if layer(shape).endswith("8192 tokens") == main]):
        once, four, saved = (records.of(name, shape) for name in (quantizing, kept, "moe_layer saved"))
        row = [layer(shape), *(cell(once, reference) for reference in _BF16_LAYERS)]
        row += [ours(found, *strongest(found, _BF16_LAYERS)) for found in (once, four)]
        row += [f"{saved['bf16'][of] / 1024:.0f}" if saved else "" for of in ("reference_value", "value")]
        yield row


@table("variant", "layer", "ms", "of the defaults' speed")
def layer_ablations(records: Records) -> Rows:
    """The paper's ablations against the defaults of the same run."""
    for name, shape in records.named("moe_layer (requantize|unfused permute)", "fp8"):
        found = records.of(name, shape)
        yield [name.removeprefix("moe_layer "), layer(shape), ours(found), ratio(found["fp8"], 3)]


@table(name="activations", kind="activation_error")
@table(name="layer_errors", kind="layer_error")
@table(name="double_rounding", kind="double_rounding")
def errors(records: Records, kind: str) -> Rows:
    """Relative errors of the newest run of a ``kind`` of records, named ``KIND COLUMN: ROW``, under their columns."""
    found: dict[str, dict[str, str]] = {}
    for r in newest([r for r in records.all if r["name"].startswith(f"{kind} ")], of=lambda _: kind):
        column, row = r["name"].removeprefix(f"{kind} ").split(": ")
        found.setdefault(row, {})[column] = f"{r['value']:.4f}"
        records.used.append(r)
    columns = list(dict.fromkeys(column for of in found.values() for column in of))
    yield ["", *columns]
    yield from ([name, *(of.get(column, "") for column in columns)] for name, of in found.items())


_TRANSFORMERS = "model, figure", "GPU", "bf16", "`fp8_flow`"


@table(*_TRANSFORMERS, name="transformers_token", one_token=True)
@table(*_TRANSFORMERS, name="transformers", one_token=False)
def transformers(records: Records, one_token: bool) -> Rows:
    for name, shape in sorted(records.named("transformers_(qwen3|deepseek_v3)"), reverse=True, key=lambda of: of[0]):
        if ("forward of one token" in shape) != one_token:
            continue
        for reference, r in records.of(name, shape).items():
            loss = r["unit"] == "nats"
            bf16, mine = (f"{x:.3f}" if loss else number(x) for x in (r["reference_value"], r["value"]))
            more = "" if loss else f" ({ratio(r)})"
            if "gaps" in r:  # of each seed
                gaps, again = (" / ".join(map("{:+.2%}".format, r[key])) for key in ("gaps", "reference_gaps"))
                more = f" ({gaps}; bf16 again {again})"
            yield [f"{shape}, {r['unit']}", card(r), f"{bf16} ({reference})", mine + more]


@table("Qwen3-30B-A3B, or as named", "reference", "its", "experts in FP8, adapters beside them")
def lora(records: Records) -> Rows:
    for name, shape in records.named("lora_qwen3_30b"):
        for reference, r in records.of(name, shape).items():
            if r["unit"] == "nats":
                yield [shape, reference, f"{r['reference_value']:.3f}", f"{r['value']:.3f}"]
                continue
            sides = (("reference_value", "reference_peak_gib"), ("value", "peak_gib"))
            theirs, mine = (f"{number(r[speed])}, {r[memory]:.1f} GiB" for speed, memory in sides)
            alone = "; copies {copy_s:.2f} s, computation {compute_s:.2f} s".format(**r) if "copy_s" in r else ""
            yield [f"{shape}, {r['unit']}", reference, theirs, f"{mine} ({ratio(r)}){alone}"]


# --- kernels and expert parallelism -----------------------------------------------------------------------------------


@table()
def data_movement(records: Records) -> Rows:
    """Share of a device copy, with few rows also of a copy of as many bytes; microseconds of what computes indices."""
    found: dict[str, dict[str, Found]] = {}
    for r in (r for r in records.all if r["reference"] in COPIES and "rows" in r):
        column = f"{r['layer']}, {r['rows']:,} rows, E {r['E']}"
        kernel = r["name"] + r["routing"].removeprefix("balanced")
        found.setdefault(kernel, {}).setdefault(column, {})[r["reference"]] = r
    columns = list(dict.fromkeys(column for by_column in found.values() for column in by_column))
    yield ["share of a device copy", *columns]
    for kernel, by_column in found.items():
        few = 0 if kernel.endswith("_routing") else 8192
        cells = [by_column.get(column, {}).values() for column in columns]
        cells = [[r for r in cell if r["reference"] == COPIES[0] or r["rows"] < few] for cell in cells]
        records.used += [r for cell in cells for r in cell]
        shown = (lambda r: f"{r['speedup']:.0%}") if few else (lambda r: f"{r['microseconds']:.0f} µs")
        yield [kernel, *(", ".join(map(shown, cell)) for cell in cells)]


@table("ms, alone", "rows", "PyTorch's code, compiled", _OURS)
def alone(records: Records) -> Rows:
    """A kernel next to what it replaces."""
    for name, shape in records.named(".* alone"):
        ((reference, r),) = records.of(name, shape).items()
        yield [
            f"{name.removesuffix(' alone')}, {reference}",
            layer(shape),
            number(r["reference_value"]),
            ours({reference: r}, reference),
        ]


_WAYS = "FP8 all-to-all", "FP8 symmetric"


@table("ms", "dispatch: bf16", *_WAYS, *(f"combine: {way}" for way in _WAYS))
def exchange(records: Records) -> Rows:
    """Milliseconds of dispatch + permute, and of sum + combine."""
    for name, shape in records.named("ep_dispatch"):
        sent = [records.of(f"{name}{path}", shape)["bf16"] for path in ("", " dispatch=symmetric")]
        summed = records.of("ep_combine dispatch=symmetric", shape)["all_to_all"]
        dispatch = (f"{r['value']:.2f} ({ratio(r)})" for r in sent)
        combine = (f"{summed[key]:.2f}" for key in ("reference_value", "value"))
        yield [shape, f"{sent[0]['reference_value']:.2f}", *dispatch, *combine]


# --- convergence ------------------------------------------------------------------------------------------------------


@table("model", "", "bf16", "FP8 against it, 95%", "pairs", "deviation of pairs", "pairs for less")
def pairs(records: Records) -> Rows:
    for name, shape in records.named("pairs: .*"):
        r = first(records.of(name, shape))
        half_width, needed = r["pairs_for"]
        cells = [f"{r['value']:+.2%}", "1", "", ""]
        if r["pairs"] > 1:
            cells = [f"**{r['value']:+.2%} ± {r['half_width']:.2%}**", str(r["pairs"])]
            cells += [f"{r['deviation']:.2%}", f"{needed:,} (±{half_width:.2%})"]
        model = shape.partition(",")[0].replace("_", " ")
        yield [model, name.partition(": ")[2], f"{r['reference_value']:.4f}", *cells]


@table("", "bf16", "bf16, one bit changed", "FP8", "bf16 from itself", "FP8 from bf16")
def long_run(records: Records) -> Rows:
    for name, shape in records.named("3,000 steps: .*", "bf16"):
        bf16, changed = records.of(name, shape).values()
        digits = ".4f" if bf16["unit"] == "nats" else ",.0f" if "tokens" in bf16["unit"] else ".1f"
        values = bf16["reference_value"], changed["reference_value"], bf16["value"]
        apart = [f"{value / values[0] - 1:+.2%}" for value in values[1:]]
        yield [f"{name.partition(': ')[2]}, {bf16['unit']}", *(f"{value:{digits}}" for value in values), *apart]


@table("", "bf16", "FP8 from bf16, 95%", "by seed", "bf16, one bit changed, by seed")
def triples(records: Records) -> Rows:
    for name, shape in records.named("triples: .*"):
        r = first(records.of(name, shape))
        seeds = (", ".join(f"{apart:+.2%}" for apart in r[key]) for key in ("each", "changed"))
        ours = f"{r['value']:+.2%} ± {r['half_width']:.2%}"
        yield [name.partition(": ")[2], f"{r['reference_value']:.4f}", ours, *seeds]


@table("model, what is FP8", "", "held-out loss", "training loss, last 50 steps")
def from_checkpoints(records: Records) -> Rows:
    """Losses after training on from bf16's checkpoints, relative to bf16's, with intervals of the runs' spread."""
    for name, shape in records.named(".*: final held-out loss"):
        kinds = (name, name.replace("held-out loss", "training loss, last 50 steps"))
        found = [first(records.of(kind, shape)) for kind in kinds]
        cells = [f"{r['value']:+.3%} ± {r['half_width']:.3%}" for r in found]
        model, runs = shape.split(",")[0].replace("_", " "), shape.split(", ")[-1]
        yield [joined(model, name.partition(":")[0]), runs, *cells]


@table("weights", "FP8's error", "bf16's error", "critical batch, M tokens")
def gradient_noise(records: Records) -> Rows:
    """Errors of gradients, and the batch whose noise equals FP8's, at one step after the other."""

    def percent(value: float) -> str:
        return f"{value:.{2 if value < 0.01 else 1}%}"

    def batch(tokens: float | None) -> str:
        return "∞" if tokens is None else f"{float(f'{tokens / 1e6:.3g}'):,.0f}"

    shown = {"value": percent, "reference_value": percent, "critical_tokens": batch}
    weights: dict[str, list[Record]] = {}
    for name, shape in records.named("gradient_noise .*"):
        weights.setdefault(name.partition(" ")[2], []).append(first(records.of(name, shape)))
    for name, steps in weights.items():
        yield [name, *(" / ".join(text(r[key]) for r in steps) for key, text in shown.items())]


# --- sources that are no records --------------------------------------------------------------------------------------


@table("what", "figure", "hardware", "source")
def published(records: Records) -> Rows:
    for row in check.source("published").values():
        figure = f"{row['value']:,} {row['unit']}".replace(" %", "%")
        yield [row["what"], figure, row["hardware"], f"[link]({row['link']})"]


MODELS = {"moe16b": "DeepSeek-V3 16B, local batch 4", "qwen3": "Qwen3-30B-A3B, local batch 2"}  # of dry_runs.json
_DISPATCHES = "all-to-all", "symmetric memory"


@table("GiB of 80, eight GPUs", *_DISPATCHES, *(f'{way}, `recompute = "experts"`' for way in _DISPATCHES))
def dry_runs(records: Records) -> Rows:
    for model, title in MODELS.items():
        runs = [check.source("dry_runs")[f"{model}_8{more}"] for more in ("", "_experts")]
        cells = [(f"{run['peak']:.1f}", f"{run['least']:.1f} to {run['most']:.1f}") for run in runs]
        yield [title, *cells[0], *cells[1]]


@table("whole model", "GPUs", "GiB of parameters, gradients and Adam on each", "peak")
def whole_models(records: Records) -> Rows:
    for model, title in MODELS.items():
        for gpus in "48":
            found = check.source("dry_runs")[f"{model}_{gpus}"]
            yield [title, gpus, f"{found['states']:.1f}", f"{found['peak']:.1f}"]


# --- the pages --------------------------------------------------------------------------------------------------------

_BATCH = "sdpa, local batch 4, random routing"
_NEVER = ", parallelism.fsdp_reshard_after_forward=never"
_SIX, _FIVE = f"16B, 6 layers, {_BATCH}, 1 GPU", f"Qwen3-30B-A3B, 5 layers, {_BATCH}, 1 GPU"
_TWO, _QWEN16 = f"16B, 14 layers, {_BATCH}, 2 GPUs{_NEVER}", f"Qwen3-30B-A3B, 16 layers, {_BATCH}, 2 GPUs"
_OWN = f"16B, 14 layers, sdpa, local batch 4, model routing, 2 GPUs{_NEVER}"
_WHOLE = f"16B, 27 layers, {_BATCH}, 4 GPUs{_NEVER}"
HEADLINE = {  # a row of the first table and of the picture: the record's name and shape
    "DeepSeek-V3 16B, 6 layers": ("train_16b checkpointing=none", _SIX),
    "Qwen3-30B-A3B, 5 layers": ("train_qwen3_30b checkpointing=none", _FIVE),
    "DeepSeek-V3 16B, 14 layers": ("train_16b dispatch=symmetric checkpointing=none", _TWO),
    "Qwen3-30B-A3B, 16 layers": ("train_qwen3_30b dispatch=symmetric", _QWEN16),
    "DeepSeek-V3 16B, 14 layers, own routing": ("train_16b", _OWN),
    "DeepSeek-V3 16B, all 27 layers": ("train_16b dispatch=symmetric", _WHOLE),
}


def headline_runs(records: Records) -> Iterator[tuple[str, Record, Record]]:
    """Each row's title with its cards, and the records of speed and memory beside the strongest fused bf16."""
    for title, (name, shape) in HEADLINE.items():
        found = {key: r for key, r in records.of(name, shape).items() if key.startswith("bf16_fused")}
        for reference in strongest(found, found):
            speed, memory = found[reference], records.of(f"{name} memory", shape)[reference]
            count = int(speed["hardware"].partition(" x ")[0])
            cards = f"{['one', 'two', '', 'four'][count - 1]} {card(speed)}{'s' * (count > 1)}"
            yield f"{title}, {cards}", speed, memory


@table("tokens/s per GPU", "fused bf16", _OURS, "ratio", "GiB, bf16", "GiB, ours")
def headline(records: Records) -> Rows:
    for title, speed, memory in headline_runs(records):
        theirs, mine = ([number(r[key]) for r in (speed, memory)] for key in ("reference_value", "value"))
        yield [title, theirs[0], mine[0], f"**{ratio(speed)}**", theirs[1], mine[1]]


class Pages:
    """The pages as their sources have them. ``used`` are the records of all tables."""

    def __init__(self, records: Records):
        self.ledger, self.used, self.tables = check.Ledger(records.all), [], {}
        for name, text in TABLES.items():
            records.used = []
            body = text(records)
            self.used += records.used
            if records.used:
                body += f"\n\n{provenance(records.used)}"
            self.tables[name] = body if body.count("\n") > 1 else "Not measured in this state."  # without a row

    def page(self, name: str, text: str) -> tuple[str, list[str]]:
        """A page with its tables and figures, and what its ledger and its text lack."""
        text = MARKED.sub(lambda match: f"{match[1]}{self.tables[match[2]]}\n{match[3]}", text)
        return self.ledger.page(name, text)

    def errors(self, name: str, text: str) -> list[str]:
        new, errors = self.page(name, text)
        return errors + ["its figures are not those of their sources; run python -m experiments.tables"] * (new != text)


def prune() -> None:
    """Rewrites the files of records without those that no page cites."""
    files = {path: json.loads(path.read_text()) for path in FILES}
    pages = Pages(Records([record for found in files.values() for record in found]))
    cited = {id(record) for records in (pages.used, *pages.ledger.keys.values()) for record in records}
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
