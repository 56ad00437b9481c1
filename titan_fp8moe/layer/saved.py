"""The records that a layer's autograd function and its ops hand each other, and how they cross an op.

Ops take and return flat lists of tensors. For each record a function says, from the layer's specification, which of its
tensors cross: it returns the record with a flag in place of each. :func:`pack` and :func:`unpack` follow these flags,
depth first.

A forward's op returns the output and :class:`Saved`, which autograd keeps with aliases of the parameters. The first op
of a backward reads both. It returns the gradients of w2 and of its adapter, and :class:`HiddenGradients`. The second
reads all of these, and returns the other gradients. Gradients come as :class:`Inputs`.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from titan_fp8moe.dispatch import BACKENDS, Route
from titan_fp8moe.layer.ffn import Hidden, HiddenGradients, WeightGrads
from titan_fp8moe.layer.lora import LoraSpec
from titan_fp8moe.layer.weights import NO_WEIGHTS, Biases, ExpertWeights
from titan_fp8moe.rows import GroupRows, Routing, Rows
from titan_fp8moe.spec import BackwardSpec, ExpertSpec


class LayerSpec(NamedTuple):
    """A layer apart from its tensors.

    Attributes:
        shared: empty without shared experts, else whether their weights are ``trained`` or ``frozen``.
        check_ids: refuse ids that are neither -1 nor one of the experts of all ranks.
        lora: of the routed experts' adapters, or None.
        shared_scored: whether the shared experts' output is multiplied by a score per token.
        kept, shared_kept: whether a module keeps quantized copies of the weights; the autograd function sets it.
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
    def shared_expert(self) -> ExpertSpec:
        """The shared experts' FFN, which has no router."""
        return self.expert._replace(score_before_experts=False, biased=False, interleaved=False)

    @property
    def shared_backward(self) -> BackwardSpec:
        return self.backward if self.shared == self.backward.weights else self.backward._replace(weights=self.shared)


class Inputs(NamedTuple):
    """The first arguments of :class:`titan_fp8moe.layer.experts.ExpertsFunction`, or one value for each: its gradient,
    or whether it needs one. Weights that are stored in FP8 are not among them, but in
    :class:`titan_fp8moe.layer.experts.Call`."""

    x: Any = None
    topk_scores: Any = None
    topk_ids: Any = None
    nan_flags: Any = None
    shared_scores: Any = None
    weights: Any = NO_WEIGHTS  # gradients from an op are WeightGrads
    shared: Any = NO_WEIGHTS
    biases: Biases | None = None
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


# --- records and flat lists -------------------------------------------------------------------------------------------


def pack(flags: tuple, record: Any) -> list[Tensor]:
    """The tensors of a record, or of records in it, whose flags are true."""
    flat: list[Tensor] = []
    for flag, value in zip(flags, record, strict=True):
        if isinstance(flag, tuple):
            flat += pack(flag, value)
        elif flag:
            flat.append(value)
    return flat


def unpack(flags: Any, values: Iterator[Tensor]) -> Any:
    """The inverse of :func:`pack`, with a list's iterator; None where a flag is false."""
    filled = []
    for flag in flags:
        if isinstance(flag, tuple):
            filled.append(unpack(flag, values))
        else:
            filled.append(next(values) if flag else None)
    return type(flags)(*filled) if hasattr(flags, "_fields") else filled


def _all(record: Any) -> Any:
    return record(*[True] * len(record._fields))


_ROWS: Any = _all(Rows)
_GENERATIONS: Any = (True, True)  # of w13 and w2

# --- what a forward keeps ---------------------------------------------------------------------------------------------


class SavedGroup(NamedTuple):
    """The tensors that the forward of an FFN with one group of rows keeps for its backward. The last two are of GEMM 2:
    a backward cuts them off the flat list after its first op.

    Attributes:
        rows: its input. Shared experts without expert parallelism have its q from ``arrived`` of :class:`Saved`.
        generations: of the copies of weights that the forward read, where a module keeps any.
        a: GEMM 2's operand, with recompute = "none" and trained weights.
        hidden: h, unless recompute = "experts".
    """

    rows: GroupRows
    generations: list[Tensor] | None
    a: Rows | None
    hidden: Hidden | None


class Saved(NamedTuple):
    """The tensors that a layer's forward keeps for its backward, or None.

    The last ones are of GEMM 2, of shared and of routed experts: a backward cuts them off the flat list after its first
    op.

    Attributes:
        state: the dispatch's, from which its backward is resumed.
        routing: of the rows in expert order.
        arrived: one quantized row per token that arrived, or its payload, for GEMM 1 again and dW1. None where
            weights are frozen, unless recompute = "experts".
        generations, a, hidden: as of :class:`SavedGroup`.
        shared: of the shared experts.
    """

    state: Any
    routing: Routing
    arrived: Any
    generations: list[Tensor] | None
    shared: SavedGroup | None
    a: Rows | None
    hidden: Hidden | None

    @property
    def shared_with_q(self) -> SavedGroup:
        """``shared`` with its q, which it may have from ``arrived``."""
        shared = cast(SavedGroup, self.shared)
        if shared.rows.q is not None or not isinstance(self.arrived, Rows):
            return shared
        return shared._replace(rows=shared.rows._replace(q=self.arrived.q))


def _gemm_2_flags(backward: BackwardSpec, of_gemm_2: bool) -> tuple[Any, Any]:
    """The flags of ``a`` and ``hidden``; without ``of_gemm_2`` none."""
    hidden = Hidden(cast(Any, True), cast(Any, backward.save_h == "fp8")) if backward.keeps_h else None
    return (_ROWS if backward.keeps_a else None, hidden) if of_gemm_2 else (None, None)


@functools.cache
def group_flags(
    backward: BackwardSpec, kept: bool, scored: bool = False, shares_q: bool = False, of_gemm_2: bool = True
) -> SavedGroup:
    """A :class:`SavedGroup` of flags; without ``of_gemm_2`` what is left after the backward's first op."""
    keeps: Any = backward.keeps_x
    rows = GroupRows(cast(Any, keeps and not shares_q), keeps, cast(Any, True), cast(Any, scored))
    return SavedGroup(rows, _GENERATIONS if kept else None, *_gemm_2_flags(backward, of_gemm_2))


@functools.cache
def saved_flags(spec: LayerSpec, of_gemm_2: bool = True) -> Saved:
    """A :class:`Saved` of flags; without ``of_gemm_2`` what is left after the backward's first op."""
    kind, backward, shared = BACKENDS[spec.route.backend], spec.backward, None
    if spec.shared:
        shares_q = backward.keeps_x and not kind.travels
        shared = group_flags(spec.shared_backward, spec.shared_kept, spec.shared_scored, shares_q, of_gemm_2)
    arrived, generations = _all(kind.Arrived) if backward.keeps_x else None, _GENERATIONS if spec.kept else None
    last = _gemm_2_flags(backward, of_gemm_2)
    return Saved(_all(kind.State), _all(Routing), arrived, generations, shared, *last)


# --- what a backward hands over ---------------------------------------------------------------------------------------


GROUP_HALFWAY = HiddenGradients(_ROWS)
"""Flags of what the backward of an FFN has between its two ops."""


@functools.cache
def halfway_flags(spec: LayerSpec, needs_dx: bool, needs_dbias: bool) -> tuple[HiddenGradients, HiddenGradients | None]:
    """Flags of what a layer's backward has between its two ops, of the routed experts and of any shared ones."""
    flags: Any = HiddenGradients
    shared = flags(_ROWS, spec.shared_scored, dx=needs_dx) if spec.shared else None
    return flags(_ROWS, True, needs_dbias), shared


def gradients_flags(needs: Inputs, lora: LoraSpec | None) -> tuple[Inputs, Inputs]:
    """Flags of the gradients that each op of a backward makes, of weights a
    :class:`titan_fp8moe.layer.ffn.WeightGrads`: the first those of w2 and its adapter, the second the others."""
    (w1, w2, w3), (shared_w1, shared_w2, shared_w3) = needs.weights, needs.shared
    adapters, of_gemm_1 = tuple(needs.adapters), lora.num_of_gemm_1 if lora else 0
    first = Inputs(weights=WeightGrads(w2=w2), shared=WeightGrads(w2=shared_w2), adapters=adapters[of_gemm_1:])
    dw13, shared_dw13 = WeightGrads(w1 or w3), WeightGrads(shared_w1 or shared_w3)
    return first, needs._replace(weights=dw13, shared=shared_dw13, adapters=adapters[:of_gemm_1])


def join_gradients(first: Inputs, last: Inputs) -> Inputs:
    """The gradients of both ops of a backward in one."""
    return last._replace(
        weights=last.weights._replace(w2=first.weights.w2),
        shared=last.shared._replace(w2=first.shared.w2),
        adapters=[*last.adapters, *first.adapters],
    )
