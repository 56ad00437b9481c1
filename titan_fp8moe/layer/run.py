"""The only entry of a MoE layer: :func:`run_layer`, for the modules of all adapters, and :func:`routed_experts`.

A module gives its experts as one record, :class:`Experts`. What is computed of it, and how autograd sees it, is in
:mod:`titan_fp8moe.layer.experts`.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8moe.config import DEFAULTS, RECIPE, TRANSPORT, Fp8FlowMoEConfig, require_config
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.layer import flops  # noqa: F401  registers formulas
from titan_fp8moe.layer.checks import check_biases, check_inputs, check_shared
from titan_fp8moe.layer.experts import Call, ExpertsFunction, run_experts
from titan_fp8moe.layer.host import HostLayer
from titan_fp8moe.layer.lora import Lora, split_lora
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.saved import Inputs, LayerSpec
from titan_fp8moe.layer.weights import NO_WEIGHTS, Biases, ExpertWeights, SharedExperts, are_frozen
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.ops.backend import refuse_export
from titan_fp8moe.spec import ExpertSpec


class Experts(NamedTuple):
    """The experts of one MoE layer, as the modules of all adapters hand them over.

    Attributes:
        weights: this rank's, tensors, DTensors over ``ep_group`` or :class:`titan_fp8moe.Fp8Weight`.
        ep_group: the ranks over which the experts are spread, in order; None where all experts are here.
        cache: keeps quantized copies of the weights; None where nothing is kept.
        frozen: none of the weights is trained.
        biases, lora: None for experts that have none. :func:`run_layer` sets ``expert.biased``.
        check_ids: refuse ids that are no expert's; else they count as -1.
        nan_flags: see :data:`titan_fp8moe.rows.X`; or None.
        host: copies weights stored in FP8 from host memory; None where they are on the device.
    """

    weights: ExpertWeights
    config: Fp8FlowMoEConfig
    ep_group: dist.ProcessGroup | None = None
    expert: ExpertSpec = ExpertSpec()
    cache: WeightCache | None = None
    frozen: bool = False
    biases: Biases[Tensor] | None = None
    lora: Lora | None = None
    check_ids: bool = True
    nan_flags: Tensor | None = None
    host: HostLayer | None = None


class Shared(NamedTuple):
    """Shared experts as a module hands them over. :class:`SharedExperts` is a caller's form, which :func:`run_layer`
    checks and turns into this one.

    Attributes:
        weights: w1 and w3 (H, D), w2 (D, H), without a gate w3 None.
        cache, frozen: as of :class:`Experts`.
        scores: (T,) fp32, by which its output is multiplied; or None.
    """

    weights: ExpertWeights[Tensor]
    cache: WeightCache | None = None
    frozen: bool = False
    scores: Tensor | None = None


def routed_experts(
    x: Tensor,
    w1: Tensor | Fp8Weight,
    w2: Tensor | Fp8Weight,
    w3: Tensor | Fp8Weight | None,
    topk_ids: Tensor,
    topk_scores: Tensor,
    *,
    config: Fp8FlowMoEConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    score_before_experts: bool = False,
    meanwhile: Callable[[], Tensor] | None = None,
    activation: str = "swiglu",
    activation_parameters: dict[str, float] | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    interleaved: bool = False,
    lora: Lora | None = None,
    shared: SharedExperts | None = None,
) -> Tensor:
    """Sum over a token's experts of score * (W2 activation(W1 x + b1, W3 x + b3) + b2), in FP8; by default
    silu(W1 x) * (W3 x) without biases. Experts without a gate compute W2 activation(W1 x + b1) + b2.

    Differentiable once in ``x``, ``topk_scores``, the weights, biases and adapters, and whatever ``meanwhile`` reads.

    Args:
        x: (T, D) bf16 or fp32.
        w1, w2, w3: gate (E, H, D), down (E, D, H) and up (E, H, D) of this rank's E experts, all bf16 or all fp32.
            D and H are multiples of 16; quantized rows and weights pad both to multiples of 128.

            * Gate and up may be one ``w1`` (E, 2H, D), gate first, with ``w3`` None.
            * An activation without a gate, such as ``"relu2"``, has one projection ``w1`` (E, H, D), and ``w3`` None.
            * A ``w1`` with ``w3`` None and w2 may be transposes of contiguous (E, D, 2H) and (E, H, D). They are read
              where they lie, and so lie their gradients.
            * All may be :class:`titan_fp8moe.Fp8Weight`, frozen, which are padded themselves. A forward copies ``w1``
              and ``w3`` into one, unless ``w1`` is fused.
        topk_ids: (T, K) int32 or int64, the experts of each token among the experts of all ranks; -1 for none. Another
            id raises ValueError on a CPU, and ends in a device-side assertion on a GPU.
        topk_scores: (T, K) fp32, the router's score of each. bf16 is accepted with a warning.
        config: the recipe's settings and the transport's, :data:`titan_fp8moe.config.RECIPE` and ``TRANSPORT``; by
            default ``Fp8FlowMoEConfig()``.
        ep_group: the ranks over which the experts are spread, in order; None where all experts are here.
        score_before_experts: multiply the experts' input, not their output, by the score.
        meanwhile: computes a tensor (T, D) that is added after the layer: the sum says the same.
        activation, activation_parameters: a key of :data:`titan_fp8moe.activations.ACTIVATIONS`, and its parameters by
            name, such as ``"clamped_swiglu"`` with ``dict(limit=7, alpha=1.702, offset=1)``.
        b1, b2, b3: biases of gate (E, H), down (E, D) and up (E, H), all bf16 or all fp32. With ``w3`` None one ``b1``
            has all rows of w1, in their order. All or none. Beside :class:`titan_fp8moe.Fp8Weight`, which pads H to a
            multiple of 128, b1 and b3 are padded with zeros to that H; b2 keeps D.
        interleaved: a ``w1`` (E, 2H, D) holds gate and up of a hidden unit side by side, as gpt-oss does.
        lora: low-rank adapters, which run in bf16 beside the weights. Freeze the weights by ``requires_grad_(False)``.
        shared: shared experts, which read the rows that are quantized for the routed ones, in both directions, and add
            to their sums: no cast and no addition of their own.

    Returns:
        (T, D) in the dtype of ``x``.

    Raises:
        ValueError: for shapes, dtypes, devices or numbers of rows that the kernels cannot take.
        RuntimeError: with ``dispatch = "symmetric"``, if a rank is
            later than the timeout of ``ep_group``, or if two layers are in flight. Too little room shows later:
            :func:`titan_fp8moe.check_room`.

    Example::

        scores, ids = router(x).softmax(-1).topk(2)
        y = routed_experts(x, w1, w2, w3, ids, scores) + shared_expert(x)
    """
    if config is not None:
        require_config(config, "routed_experts", *RECIPE, *TRANSPORT)
    expert = ExpertSpec.of(activation, activation_parameters, score_before_experts)._replace(interleaved=interleaved)
    experts = experts_of(ExpertWeights(w1, w2, w3), config, expert, (b1, b2, b3), lora)
    return run_layer(x, topk_ids, topk_scores, experts._replace(ep_group=ep_group), shared, meanwhile)


def experts_of(
    weights: ExpertWeights, config: Fp8FlowMoEConfig | None, expert: ExpertSpec, biases: Any, lora: Lora | None
) -> Experts:
    """The record of experts that are given as the tensors of :func:`routed_experts`. ``biases``: three, or Nones."""
    frozen = isinstance(weights.w1, Fp8Weight) or are_frozen(weights)
    given = None if all(b is None for b in biases) else Biases(*biases)
    return Experts(weights, config or DEFAULTS, expert=expert, frozen=frozen, biases=given, lora=lora)


def run_layer(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    experts: Experts,
    shared: Shared | SharedExperts | None = None,
    meanwhile: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Runs one MoE layer: the entry of :func:`routed_experts` and of every module. ``shared``: a module's, or as a
    caller gives it, which is checked."""
    if topk_scores_TK.dtype == torch.bfloat16:
        _warn_of_bf16_scores()
        topk_scores_TK = topk_scores_TK.float()
    weights, config, ep_group, expert, cache, frozen, biases, lora, check_ids, nan_flags, host = experts
    if host is not None:
        if torch.compiler.is_dynamo_compiling():
            return _run_eagerly(x_TD, topk_ids_TK, topk_scores_TK, experts, shared, meanwhile)
        weights = host.weights(weights)
    check_inputs(x_TD, weights, topk_ids_TK, topk_scores_TK, expert)
    if biases is not None:
        check_biases(biases, weights, x_TD.shape[1])
        expert = expert._replace(biased=True)
    if shared is not None and not isinstance(shared, Shared):
        check_shared(shared, x_TD, expert)
        shared = Shared(shared.weights, None, are_frozen(shared.weights), shared.scores)
    lora_spec, lora_tensors, backward = None, (), config.backward
    if lora is not None:
        lora_spec, lora_tensors = split_lora(lora, cast(Any, weights))
    if frozen:
        backward = backward._replace(weights="frozen" if lora is None else "adapted")
    shared_weights_are = "" if shared is None else "frozen" if shared.frozen else "trained"
    shared = shared or _NO_SHARED
    spec = LayerSpec(
        config.route(ep_group), expert, backward, shared_weights_are, check_ids, lora_spec,
        shared_scored=shared.scores is not None,
    )  # fmt: skip
    stored = weights if isinstance(weights.w1, Fp8Weight) else None
    call = Call(spec, cache, shared.cache, stored)
    inputs = Inputs(
        x_TD, topk_scores_TK.contiguous(), topk_ids_TK.contiguous(), nan_flags, shared.scores,
        weights if stored is None else NO_WEIGHTS, shared.weights, biases, lora_tensors,
    ).flatten()  # fmt: skip
    refuse_export(inputs)
    kind = spec, weights.w2.shape, getattr(shared.weights.w2, "shape", None), stored and stored.w2.scale.dtype
    if warm_up.is_due(kind, x_TD):
        # Without what another process cannot have: caches, and the host's copies behind stored weights.
        alone = call._replace(cache=None, shared_cache=None, stored=stored and ExpertWeights(*stored))
        warm_up.compile_ahead(kind, ExpertsFunction.apply, *inputs, alone)
    out = run_experts(inputs, call)
    return out if meanwhile is None else out + meanwhile()


_NO_SHARED = Shared(NO_WEIGHTS)
_WHY_EAGERLY = "the host orders copies of offloaded experts, which a graph would not repeat"
_run_eagerly = torch.compiler.disable(run_layer, reason=_WHY_EAGERLY)


@torch.compiler.assume_constant_result  # torch.compile calls it when it traces, where it could not trace the warning
def _warn_of_bf16_scores() -> None:
    warnings.warn(
        "topk_scores are bf16, which rounds the router's scores and their gradients; compute them in fp32, and in the "
        "module that calls the experts: FSDP2's MixedPrecisionPolicy casts the arguments of modules that it wraps",
        stacklevel=4,
    )
