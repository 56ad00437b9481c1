"""The settings of the recipe, one dataclass shared by the functional API and torchtitan's ``[fp8_flow_moe]`` table."""

from dataclasses import dataclass, field, fields
from typing import Literal, get_args, get_type_hints


@dataclass
class Fp8FlowMoEConfig:
    """The recipe's settings. A ValueError, with what to set, for a value that there is not, and for settings that
    exclude each other."""

    wgrad: Literal["balanced", "scaling_aware", "requantize", "bf16"] = "balanced"
    """How the weight gradient's fp8 operands are transposed. ``balanced`` shares each token's scale between the two
    operands first, which keeps small tokens under any scale pattern; ``scaling_aware`` is the paper's;
    ``requantize`` quantizes columns anew; ``bf16`` multiplies the dequantized rows, for debugging."""

    save_h: Literal["bf16", "fp8"] = "bf16"
    """Precision in which GEMM 1's output is kept for the backward."""

    recompute: Literal["none", "activation", "experts"] = "activation"
    """What the backward recomputes instead of keeping it: nothing; the SwiGLU output, from GEMM 1's output; or also
    GEMM 1's output, from the dispatched fp8 rows (``save_h`` then has no effect). These are then kept in expert order,
    once for each of a token's experts here, so that nothing is permuted again; otherwise as they arrived."""

    combine: Literal["sum", "rows"] = "sum"
    """What an expert-parallel rank sends back for a token: ``sum``, one row, its experts' outputs added up in fp32 and
    rounded to bf16; ``rows``, one row per expert, which moves more bytes and gives bit for bit the same output on any
    number of ranks."""

    cache_weights: bool = False
    """Quantize the experts' weights once per step instead of once per microbatch and direction. Takes 2 bytes per
    expert parameter of an expert-parallel rank, of all of them also where FSDP shards them further; worth it with
    pipeline parallelism or gradient accumulation. A step is one of a ``torch.optim`` optimizer. Who changes weights in
    another way between two microbatches clears ``experts.cache`` of each layer, or FSDP's would be stale."""

    fp8_all_gather: bool = False
    """Where FSDP shards experts over several ranks, quantize each rank's shard and gather the weights in FP8: half the
    bytes of bf16, half the memory while they are whole, and a share of the quantization. FSDP must shard whole experts:
    their number must be a multiple of the expert-parallel degree times the ranks that FSDP shards an expert-parallel
    rank's experts over. Not with ``cache_weights``: what is gathered is quantized already. ``statistics_every`` counts
    no weights then."""

    filter_fqns: list[str] = field(default_factory=list)
    """MoE layers whose fully qualified name contains one of these strings stay in bf16, e.g. ``layers.1.``."""

    emulate: bool = False
    """Run the plain PyTorch reference on a GPU the kernels do not support (anything but compute capability 9.0). For
    the whole process, and read by the converter; the functional API has :func:`titan_fp8moe.ops.emulate`."""

    statistics_every: int = 0
    """Every so many steps, count underflow, scales and transpose shifts (:mod:`titan_fp8moe.statistics`) and log them
    to TensorBoard or W&B. 0: never. The first step of a run is not counted."""

    def describe(self) -> str:
        """What each layer does, for logs: every setting but which layers."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "filter_fqns")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            hint, value = hints[f.name], getattr(self, f.name)
            if hint is bool:
                ok, expected = isinstance(value, bool), "true or false"
            elif hint is int:
                ok, expected = type(value) is int and value >= 0, "a number of steps, or 0 for never"
            elif hint == list[str]:
                # An empty string, which an empty command-line value gives, would match every layer.
                ok = isinstance(value, list) and all(isinstance(v, str) and v for v in value)
                expected = "a list of non-empty strings"
            else:
                ok, expected = value in get_args(hint), "one of " + ", ".join(repr(a) for a in get_args(hint))
            if not ok:
                raise ValueError(f"fp8_flow_moe.{f.name} is {value!r}; set it to {expected}")
        if self.fp8_all_gather and self.cache_weights:
            raise ValueError(
                "fp8_flow_moe.fp8_all_gather gathers quantized weights, fp8_flow_moe.cache_weights keeps weights to be "
                "quantized once; set one of the two to false"
            )
