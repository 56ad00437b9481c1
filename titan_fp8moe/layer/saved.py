"""The tensors that autograd keeps of a layer, as one record.

Ops and autograd take and return flat lists of tensors. The record's parts are named, and :func:`layout` says, from the
layer's specification alone, which fields of them there are and in which order. Packing and unpacking are one loop each,
so a new field is a new field of a record, and nothing else::

    weights, shared_weights   aliases of the parameters, not quantized: FSDP refills them before the backward
    scales                    of weights that are stored in FP8
    biases                    b1 b2 b3 of experts that have them
    lora                      the adapters' tensors, of a layer that has them
    state                     the dispatch's, from which its backward is resumed
    routing                   offsets_E, token_M, score_M, row_TK
    tokens                    one quantized row per token that arrived, or its payload, for GEMM 1 again and dW1; none
                              where weights are frozen, unless recompute = "experts"
    ffn                       h [h_scale]; with recompute = "none" and trained weights also a_q a_scale; nothing with
                              recompute = "experts"
    copies, shared_copies     generations of the quantized weights that a module keeps
    shared_rows               this rank's tokens as one group; without expert parallelism they share q with ``tokens``;
                              with a gate of the shared experts also its scores
    shared_ffn                as ffn, of the shared experts
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8moe.dispatch import BACKENDS, Dispatch, Route
from titan_fp8moe.layer.ffn import SavedFFN, saved_fields
from titan_fp8moe.layer.lora import LoraSpec, LoraTensors
from titan_fp8moe.layer.operands import Generations
from titan_fp8moe.layer.weights import NO_WEIGHTS, Biases, ExpertWeights
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.rows import GroupRows, Routing, Rows
from titan_fp8moe.spec import BackwardSpec, ExpertSpec


class LayerSpec(NamedTuple):
    """A layer apart from its tensors.

    Attributes:
        shared: empty, or of shared experts that read the rows that are quantized for the routed ones, whether their
            weights are ``trained`` or ``frozen``.
        check_ids: refuse ids that are neither -1 nor one of the experts of all ranks.
        lora: of the routed experts' adapters, or None.
        shared_scored: whether the shared experts' output is multiplied by a score per token.
        kept, shared_kept: whether the module keeps quantized copies of the weights.
    """

    route: Route
    expert: ExpertSpec
    backward: BackwardSpec
    shared: str
    check_ids: bool
    lora: LoraSpec | None = None
    shared_scored: bool = False
    kept: bool = False
    shared_kept: bool = False

    @property
    def shared_backward(self) -> BackwardSpec:
        return self.backward if self.shared == self.backward.weights else self.backward._replace(weights=self.shared)

    @property
    def handing(self) -> "LayerSpec":
        """For tensors on the way from one function to the next: shared experts will read their rows, if only once."""
        return self._replace(shared="trained") if self.shared == "frozen" else self

    @property
    def dispatch(self) -> type[Dispatch]:
        return BACKENDS[self.route.backend]


class Layout(NamedTuple):
    """Which tensors some parts of :class:`Saved` have, and where in a flat list.

    Attributes:
        names: (part, field) of each tensor, in order.
        records: for each part of :class:`Saved` its record and where its fields' values are, of which -1 is not there;
            or, if no value is there, the part itself and None.
    """

    names: list[tuple[str, str]]
    records: list[Any]


def layout(spec: LayerSpec, *parts: str) -> Layout:
    """The layout of these parts of a layer's :class:`Saved`."""
    # torch.compile traces the function itself: it would warn of a cache.
    return _layout(spec, parts) if torch.compiler.is_compiling() else _cached_layout(spec, parts)


def _layout(spec: LayerSpec, parts: tuple[str, ...]) -> Layout:
    kind = spec.dispatch
    tokens = kind.Tokens._fields if spec.backward.keeps_rows else ()
    shared_rows = ffn_of_shared = ()
    if spec.shared:
        shared_rows = ("q", "scale", "end") if spec.shared_backward.keeps_rows else ("end",)
        if tokens and not kind.travels:
            shared_rows = tuple(name for name in shared_rows if name != "q")
        if spec.shared_scored:
            shared_rows = ("score", *shared_rows)
        ffn_of_shared = saved_fields(spec.shared_backward)
    fields: dict[str, tuple[Any, tuple[str, ...]]] = {
        "weights": (ExpertWeights, ExpertWeights._fields),
        "scales": (ExpertWeights, ExpertWeights._fields),
        "shared_weights": (ExpertWeights, ExpertWeights._fields),
        "biases": (Biases, Biases._fields if spec.expert.biased else ()),
        "lora": (LoraTensors, () if spec.lora is None else spec.lora.fields),
        "state": (kind.State, kind.State._fields),
        "routing": (Routing, Routing._fields),
        "tokens": (kind.Tokens, tokens),
        "ffn": (SavedFFN, saved_fields(spec.backward)),
        "shared_rows": (GroupRows, shared_rows),
        "copies": (Generations, Generations._fields if spec.kept else ()),
        "shared_ffn": (SavedFFN, ffn_of_shared),
        "shared_copies": (Generations, Generations._fields if spec.shared_kept else ()),
    }
    names = [(part, field) for part in parts for field in fields[part][1]]
    place = {name: at for at, name in enumerate(names)}
    records: list[Any] = []
    for part in Saved._fields:
        record = fields[part][0]
        at = [place.get((part, field), -1) for field in record._fields]
        empty = record(*[None] * len(at)) if part in parts else None
        records.append((record, at) if empty and max(at) >= 0 else (empty, None))
    return Layout(names, records)


_cached_layout = functools.cache(_layout)

_ABSENT: Any = None


class Saved(NamedTuple):
    """See the top of the file. Parts that are not there are None, and so are fields."""

    weights: ExpertWeights[Any] = _ABSENT
    scales: ExpertWeights[Any] = _ABSENT
    shared_weights: ExpertWeights[Any] = _ABSENT
    state: Any = _ABSENT
    routing: Routing = _ABSENT
    tokens: Any = _ABSENT
    ffn: SavedFFN = _ABSENT
    copies: Generations = _ABSENT
    shared_rows: GroupRows = _ABSENT
    shared_ffn: SavedFFN = _ABSENT
    shared_copies: Generations = _ABSENT
    biases: Biases[Any] = _ABSENT
    lora: LoraTensors = _ABSENT

    @property
    def stored_weights(self) -> ExpertWeights[Fp8Weight] | None:
        """The weights of experts that are stored in FP8; None for others."""
        return None if self.scales is None else ExpertWeights.unpack([*self.weights, *self.scales])

    @property
    def rows_of_shared(self) -> GroupRows:
        """``shared_rows``, also where they share their q with ``tokens``."""
        rows = self.shared_rows
        return rows._replace(q=self.tokens.q) if rows.q is None and isinstance(self.tokens, Rows) else rows

    def pack(self, layout: Layout) -> list[Any]:
        return [getattr(getattr(self, part), field) for part, field in layout.names]

    @classmethod
    def unpack(cls, layout: Layout, tensors: Sequence[Tensor | None]) -> "Saved":
        """The inverse of :meth:`pack`."""
        assert len(tensors) == len(layout.names)
        values = [*tensors, None]  # -1 is a field that is not there
        return cls(*[made if at is None else made(*[values[i] for i in at]) for made, at in layout.records])


# --- arguments of the autograd function ------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The first arguments of :class:`titan_fp8moe.layer.experts.ExpertsFunction`, or one value for each: its gradient,
    or whether it needs one."""

    x: Any = None
    topk_scores: Any = None
    topk_ids: Any = None
    nan_flags: Any = None
    shared_scores: Any = None
    weights: ExpertWeights[Any] = NO_WEIGHTS
    shared: ExpertWeights[Any] = NO_WEIGHTS
    biases: Biases[Any] | None = None
    adapters: Any = ()  # a sequence

    def flatten(self) -> tuple[Any, ...]:
        return (*self[:-4], *self.weights, *self.shared, *(self.biases or ()), *self.adapters)

    @classmethod
    def of(cls, values: Sequence[Any], biased: bool) -> "Inputs":
        """The inverse of :meth:`flatten`."""
        x, scores, ids, flags, shared_scores, *rest = values
        weights, shared, rest = ExpertWeights(*rest[:3]), ExpertWeights(*rest[3:6]), rest[6:]
        biases, adapters = (Biases(*rest[:3]), rest[3:]) if biased else (None, rest)
        return cls(x, scores, ids, flags, shared_scores, weights, shared, biases, adapters)
