"""Ops that move tokens through memory that ranks share; :mod:`titan_fp8moe.dispatch.symmetric.exchange` describes the
steps.

An exchange is a dispatch and its end, a start and a finish of the combine, in this order on all ranks. To PyTorch the
ops are functional: what they return is ordinary memory. A result of each is an argument of the next, so that nothing
that reorders operators changes their order.

On a GPU, rows travel beside the kernels that are launched between a dispatch and its end, and between a start and a
finish. The end and the finish take what the transfer reads and writes, whose memory is then not used again before, and
results of those kernels, which a compiled graph then launches before.
"""

from types import ModuleType

import torch
from torch import Tensor

from titan_fp8moe.dispatch.symmetric import exchange, kernels, workspace
from titan_fp8moe.dispatch.symmetric.workspace import COMBINE, DISPATCH, Sizes, capacities
from titan_fp8moe.ops.backend import custom_op, use_kernels
from titan_fp8moe.ops.permute import unpermute_gradients, unpermute_sum
from titan_fp8moe.recipe import FP8, SCALE_TILE


def _impl(x: Tensor) -> ModuleType:
    return kernels if use_kernels(x) else exchange


@custom_op
def symmetric_dispatch(
    q_TD: Tensor,
    scale: Tensor,
    topk_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    token_C: Tensor,
    counts_N: Tensor,
    capacity: float,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A forward's dispatch and permutation.

    Args:
        q_TD, scale: (T, D) e4m3 and (T, D // 128) e8m0.
        topk_ids_TK, topk_scores_TK: (T, K) int32 or int64, and fp32.
        token_C, counts_N: of :func:`titan_fp8moe.ops.dispatch_routing`.
        capacity: room, as a multiple of what uniform routing needs; see
            :func:`titan_fp8moe.dispatch.symmetric.workspace.capacities` for M and C.
        group_name: of the expert-parallel process group.

    Returns:
        rows, scale: (M, D) e4m3 in expert order and (M, D // 128) e8m0, column-major. Without room, no row arrives.
        tokens, scale: (C, D) e4m3 and (C, D // 128) e8m0.
        offsets_E, token_M, score_M, row_CK: of :func:`titan_fp8moe.ops.expert_routing`; a token's rows precede its -1.
        arrived_C, pair_CK: of :func:`titan_fp8moe.dispatch.symmetric.exchange.pull_routing`.
        plan: (2, N + 1) int32, of its ``plan``.

        All in flight, until :func:`symmetric_arrived`.

    Raises:
        ValueError: when the workspace is made, for ranks on several nodes or of unequal sizes.
        RuntimeError: if another exchange is in flight, or a rank has not arrived in time.
    """
    (T, D), K, (N, columns) = q_TD.shape, topk_ids_TK.shape[1], counts_N.shape
    E, impl = columns - 3, _impl(q_TD)
    M, C = capacities(T, K, N, E, capacity)
    at = workspace.begin(group_name, Sizes(N, T, D, K, E), q_TD.device)
    try:
        impl.publish(at, q_TD, scale, (topk_ids_TK, topk_scores_TK), (token_C, counts_N, (M, C)))
        with at.beside():
            plan = impl.plan(at)
            at.planned()
            offsets_E, token_M, score_M, row_CK, arrived_C, pair_CK = impl.pull_routing(at, plan, M, C)
            rows = impl.pull_rows(at, plan, arrived_C, row_CK, token_M, offsets_E, True)
        return *rows, offsets_E, token_M, score_M, row_CK, arrived_C, pair_CK, plan
    except BaseException:
        at.interrupted()
        raise


@symmetric_dispatch.register_fake
def _(q_TD, scale, topk_ids_TK, topk_scores_TK, token_C, counts_N, capacity, group_name):
    (T, D), K, (N, columns) = q_TD.shape, topk_ids_TK.shape[1], counts_N.shape
    M, C = capacities(T, K, N, columns - 3, capacity)

    def ints(*shape):
        return counts_N.new_empty(shape)

    x_scale = scale.new_empty(D // SCALE_TILE, M).t()
    rows = q_TD.new_empty(M, D), x_scale, q_TD.new_empty(C, D), scale.new_empty(C, D // SCALE_TILE)
    routing = ints(columns - 3), ints(M), topk_scores_TK.new_empty(M), ints(C, K)
    return *rows, *routing, ints(C), ints(C, K).to(torch.uint8), ints(2, N + 1)


@custom_op
def symmetric_dispatch_gradients(
    q_TD: Tensor,
    scale: Tensor,
    plan: Tensor,
    arrived_C: Tensor,
    row_CK: Tensor,
    token_M: Tensor,
    offsets_E: Tensor,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """A backward's dispatch: the output's quantized gradient, along the routing of the forward.

    Args:
        q_TD, scale: (T, D) e4m3 and (T, D // 128) e8m0.
        plan, arrived_C, row_CK, token_M, offsets_E: of :func:`symmetric_dispatch`.

    Returns:
        (M, D) e4m3 in expert order, (M, D // 128) e8m0 column-major; in flight, until :func:`symmetric_arrived`.
    """
    (T, D), impl = q_TD.shape, _impl(q_TD)
    sizes = Sizes(plan.shape[1] - 1, T, D, row_CK.shape[1], offsets_E.shape[0])
    at = workspace.begin(group_name, sizes, q_TD.device)
    try:
        impl.publish(at, q_TD, scale, None, None)
        with at.beside():
            impl.wait(at, DISPATCH)
            return impl.pull_rows(at, plan, arrived_C, row_CK, token_M, offsets_E, False)[:2]
    except BaseException:
        at.interrupted()
        raise


@symmetric_dispatch_gradients.register_fake
def _(q_TD, scale, plan, arrived_C, row_CK, token_M, offsets_E, group_name):
    M, D = token_M.shape[0], q_TD.shape[1]
    return q_TD.new_empty(M, D, dtype=FP8), scale.new_empty(D // SCALE_TILE, M).t()


@custom_op
def symmetric_arrived(scale: Tensor, beside: list[Tensor], group_name: str) -> Tensor:
    """Ends a dispatch: what is launched from here on finds its results.

    Args:
        scale: of the rows, in flight.
        beside: the other results of the dispatch and its arguments, and results of what runs beside it.

    Returns:
        The scales: who reads the rows takes these.
    """
    workspace.current(group_name).join()
    return scale.clone()


@symmetric_arrived.register_fake
def _(scale, beside, group_name):
    return torch.empty_like(scale)


@custom_op
def symmetric_start_combine(
    y_MD: Tensor,
    ds_M: Tensor | None,
    row_CK: Tensor,
    pair_CK: Tensor,
    plan: Tensor,
    group_name: str,
    b2: Tensor | None = None,
    score_M: Tensor | None = None,
    offsets_E: Tensor | None = None,
) -> Tensor:
    """Sums each token's rows here, sends the sums back, and waits for those of all ranks.

    Args:
        y_MD: (M, D) bf16; ds_M: (M,) fp32, the gradients of the rows' scores, None in a forward.
        row_CK, pair_CK, plan: of :func:`symmetric_dispatch`.
        b2, score_M, offsets_E: as in :func:`titan_fp8moe.ops.unpermute_sum`.

    Returns:
        An argument for :func:`symmetric_finish_combine`, which orders the two and holds nothing.
    """
    at, impl = workspace.current(group_name), _impl(y_MD)
    with at.beside():
        impl.push_sums(at, plan, y_MD, ds_M, row_CK, pair_CK, b2, score_M, offsets_E)
        impl.wait(at, COMBINE)
    return y_MD.new_empty(0)


@symmetric_start_combine.register_fake
def _(y_MD, ds_M, row_CK, pair_CK, plan, group_name, b2=None, score_M=None, offsets_E=None):
    return y_MD.new_empty(0)


@custom_op
def symmetric_finish_combine(
    started: Tensor,
    sent_TK: Tensor,
    D: int,
    out_dtype: torch.dtype,
    addend_RD: Tensor | None,
    with_gradients: bool,
    beside: list[Tensor],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Adds up all ranks' sums, once they have come, as :func:`titan_fp8moe.ops.unpermute_gradients`.

    Args:
        started: the result of :func:`symmetric_start_combine`.
        sent_TK: of :func:`titan_fp8moe.ops.dispatch_routing`.
        addend_RD: (R, D) bf16, R >= T; its row t is added to token t.
        with_gradients: whether score gradients have been sent.
        beside: the arguments of the start, and results of what runs beside it.

    Returns:
        (T, D) out_dtype and (T, K) fp32, empty without gradients.
    """
    at = workspace.current(group_name)
    at.join()
    sums, out_ds = at.sums(D), started.new_empty(0, dtype=torch.float32)
    if with_gradients:
        out, out_ds = unpermute_gradients(sums, at.view("score_gradients"), sent_TK, out_dtype, addend_RD)
    else:
        out = unpermute_sum(sums, sent_TK, out_dtype, addend_RD)
    at.end()
    return out, out_ds


@symmetric_finish_combine.register_fake
def _(started, sent_TK, D, out_dtype, addend_RD, with_gradients, beside, group_name):
    T, K = sent_TK.shape
    ds_shape = (T, K) if with_gradients else (0,)
    return started.new_empty(T, D, dtype=out_dtype), started.new_empty(ds_shape, dtype=torch.float32)
