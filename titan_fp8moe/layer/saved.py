"""The records that a layer's autograd function and its ops hand each other, and how they cross an op.

Ops take and return flat lists of tensors. For each record a function says, from the layer's specification, which of its
tensors there are: it returns the record with flags in their place. :func:`pack` and :func:`unpack` follow these flags,
depth first.

A forward's op returns the output and :class:`Saved`, which autograd keeps with aliases of the parameters. From both the
first op of a backward makes :class:`Halfway`, and from all of these the second makes :class:`Gradients`.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from titan_fp8moe.dispatch import BACKENDS, Route
from titan_fp8moe.layer.ffn import Hidden, HiddenGradients, WeightGrads
from titan_fp8moe.layer.lora import LoraSpec
from titan_fp8moe.layer.operands import Generations
from titan_fp8moe.layer.weights import NO_WEIGHTS, Biases, ExpertWeights
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


# --- records and flat lists -------------------------------------------------------------------------------------------


def pack(there: tuple, record: Any) -> list[Tensor]:
    """The tensors of a record, or of records in it, for which ``there`` has a true flag."""
    flat: list[Tensor] = []
    for flag, value in zip(there, record, strict=True):
        if isinstance(flag, tuple):
            flat += pack(flag, value)
        elif flag:
            flat.append(value)
    return flat


def unpack(there: Any, values: Iterator[Tensor]) -> Any:
    """The inverse of :func:`pack`, with a list's iterator; None for what is not there."""
    filled = []
    for flag in there:
        if isinstance(flag, tuple):
            filled.append(unpack(flag, values))
        else:
            filled.append(next(values) if flag else None)
    return type(there)(*filled) if hasattr(there, "_fields") else filled


def _all(record: Any) -> Any:
    return record(*[True] * len(record._fields))


_ROWS = Rows(*cast(Any, (True, True)))


def _rows(there: bool) -> Any:
    return _ROWS if there else None


# --- what a forward keeps ---------------------------------------------------------------------------------------------


class SavedGroup(NamedTuple):
    """The tensors that the forward of an FFN with one group of rows keeps for its backward.

    Attributes:
        rows: its input. Shared experts without expert parallelism have its q from ``arrived`` of :class:`Saved`.
        a: GEMM 2's operand, with recompute = "none" and trained weights.
        copies: generations of the quantized weights that a module keeps.
        hidden: h, unless recompute = "experts".
    """

    rows: GroupRows
    a: Rows | None
    copies: Generations | None
    hidden: Hidden | None


class Saved(NamedTuple):
    """The tensors that a layer's forward keeps for its backward; parts that are not there are None.

    The last ones, h of shared and of routed experts, are read by the first op of the backward alone.

    Attributes:
        state: the dispatch's, from which its backward is resumed.
        routing: of the rows in expert order.
        arrived: one quantized row per token that arrived, or its payload, for GEMM 1 again and dW1. Not there where
            weights are frozen, unless recompute = "experts".
        a, copies, hidden: as of :class:`SavedGroup`.
        shared: of the shared experts.
    """

    state: Any
    routing: Routing
    arrived: Any
    a: Rows | None
    copies: Generations | None
    shared: SavedGroup | None
    hidden: Hidden | None

    @property
    def of_shared(self) -> SavedGroup:
        """``shared`` with its q, which it may have from ``arrived``."""
        shared = cast(SavedGroup, self.shared)
        if shared.rows.q is not None or not isinstance(self.arrived, Rows):
            return shared
        return shared._replace(rows=shared.rows._replace(q=self.arrived.q))


def _hidden_there(backward: BackwardSpec) -> Any:
    return Hidden(cast(Any, True), cast(Any, backward.save_h == "fp8")) if backward.keeps_hidden else None


@functools.cache
def group_there(
    backward: BackwardSpec, kept: bool, scored: bool = False, shares_q: bool = False, hidden: bool = True
) -> SavedGroup:
    """The parts of :class:`SavedGroup`; without ``hidden`` what is left after the backward's first op."""
    keeps: Any = backward.keeps_rows
    rows = GroupRows(cast(Any, keeps and not shares_q), keeps, cast(Any, True), cast(Any, scored))
    copies = _all(Generations) if kept else None
    return SavedGroup(rows, _rows(backward.keeps_operand), copies, _hidden_there(backward) if hidden else None)


@functools.cache
def saved_there(spec: LayerSpec, hidden: bool = True) -> Saved:
    """The parts of :class:`Saved`; without ``hidden`` what is left after the backward's first op."""
    kind, backward, shared = BACKENDS[spec.route.backend], spec.backward, None
    if spec.shared:
        shares_q = backward.keeps_rows and not kind.travels
        shared = group_there(spec.shared_backward, spec.shared_kept, spec.shared_scored, shares_q, hidden)
    return Saved(
        state=_all(kind.State),
        routing=_all(Routing),
        arrived=_all(kind.Arrived) if backward.keeps_rows else None,
        a=_rows(backward.keeps_operand),
        copies=_all(Generations) if spec.kept else None,
        shared=shared,
        hidden=_hidden_there(backward) if hidden else None,
    )


def num_hidden(backward: BackwardSpec, shared: str = "") -> int:
    """How many of the saved tensors are h, of an FFN and of any shared experts."""
    if backward.recompute == "experts":
        return 0
    return (2 if backward.save_h == "fp8" else 1) * (2 if shared else 1)


# --- what a backward hands over ---------------------------------------------------------------------------------------


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


class Halfway(NamedTuple):
    """A backward between its two ops, of the routed experts and of any shared ones."""

    routed: HiddenGradients
    shared: HiddenGradients | None


def hidden_gradients_there(backward: BackwardSpec, scored: bool, **more: Any) -> HiddenGradients:
    """The parts of an op's :class:`titan_fp8moe.layer.ffn.HiddenGradients`; ``more``: its last fields."""
    made = backward.weights != "frozen" and not backward.keeps_operand
    return HiddenGradients(_ROWS, _ROWS, _rows(made), cast(Any, scored), **more)


@functools.cache
def halfway_there(spec: LayerSpec, needs_dx: bool, needs_dbias: bool) -> Halfway:
    """The parts of :class:`Halfway`."""
    routed = hidden_gradients_there(spec.backward, True, dbias=needs_dbias)
    shared = hidden_gradients_there(spec.shared_backward, spec.shared_scored, dx=needs_dx) if spec.shared else None
    return Halfway(routed, shared)


class Gradients(NamedTuple):
    """The gradients that the second op of a backward makes.

    Attributes:
        x: (T, D); topk_scores: (T, K); shared_scores: (T,).
        weights, shared: of the routed and the shared experts.
        biases, adapters: one for each.
    """

    x: Tensor | None
    topk_scores: Tensor | None
    shared_scores: Tensor | None
    weights: WeightGrads
    shared: WeightGrads
    biases: Biases[Any] | None
    adapters: Any


def gradients_there(needs: Inputs) -> Gradients:
    """The parts of :class:`Gradients`."""
    x, topk_scores, _, _, shared_scores, weights, shared, biases, adapters = needs
    of_weights = weight_grads_there(weights), weight_grads_there(shared)
    return Gradients(x, topk_scores, shared_scores, *of_weights, biases, tuple(adapters))


def weight_grads_there(needs: ExpertWeights[Any]) -> WeightGrads:
    """The weight gradients of an FFN, of whose weights these are needed."""
    return WeightGrads(needs.w1 or needs.w3, needs.w2)
