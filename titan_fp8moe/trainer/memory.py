"""Estimates the most memory that PyTorch reserves on one rank of a job, from the model on the meta device.

Parameters and optimizer states follow from the shards. Activations are counted from the shapes of each block. The peak
is the largest of what a walk through the backward finds:

    loss       parameters, Adam's states, all kept activations, logits
    a block    gradients of later blocks, activations of this and earlier ones, and what its own backward allocates

Gradients replace activations on the way, so the peak can be at either end. Gradients that FSDP reduces do not: FSDP
allocates them on a stream of its own, and the allocator does not give one stream's free memory to another. They count
from the start.

Estimates for 16B and Qwen3-30B-A3B are from 7% below to 1% above the peaks measured with torchtitan 0.2.2: 4 to 27
layers on 1 to 4 GPUs, bf16 and FP8, per-op checkpointing and none. With 0.3.0 and per-op checkpointing they are from
5% below to 5% above. FFNs, routed experts, and weights under autocast and
FSDP agree with counted allocations (tests/test_memory.py). The limits:

* Routing is balanced. The CUDA context and NCCL's buffers, which PyTorch does not count, come on top.
* Inductor decides what a graph keeps. Assumed is what checkpointing asks for; without checkpointing, all inputs of
  products, of attention and of an FFN's activation.
* Tensor and context parallelism divide all activations evenly.
* CPU offload, the buckets of DDP and optimizers other than Adam are not considered.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.auto import ROOMS
from titan_fp8moe.dispatch.symmetric.workspace import Sizes, capacities
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.nn.parallel import local_of
from titan_fp8moe.recipe import SCALE_TILE, group_rows, padded, row_capacity
from titan_fp8moe.trainer import auto_dispatch, preflight
from titan_fp8moe.trainer.dry_run import Built, MetaMoE, converted
from titan_fp8moe.trainer.experts import Fp8FFN, TitanExperts, fsdp_shards

T = TypeVar("T", "Part", "Weights")
BF16, FP32 = torch.bfloat16.itemsize, torch.float32.itemsize

LOGITS = {True: 2 * BF16, False: 3 * FP32}
"""Bytes per logit while the loss is differentiated. A compiled loss (True) reads bf16 logits and writes their gradient.
An eager one has the result of log_softmax and two gradients in fp32: torchtitan's ``cross_entropy(pred.float())``."""

ROUTED_COPIES = 2.5
"""bf16 rows (D,) per routed pair that torchtitan's own MoE keeps without checkpointing, besides the experts' hidden
values: permuted tokens, the experts' outputs and fp32 copies. The saved bytes of bf16 in docs/results.md give 2.1 for
16B, and 2.7 for 671B, Kimi-K2 and GLM-4.5-Air."""


class Part(NamedTuple):
    """Bytes of the activations of an attention, an FFN or a block, for one microbatch.

    Attributes:
        everything: kept for the backward without checkpointing.
        per_op: kept under per-op selective checkpointing.
        backward: allocated while its backward runs.
    """

    everything: float
    per_op: float
    backward: float


class Job(NamedTuple):
    """A job of any release of torchtitan.

    Attributes:
        dims: torchtitan's ``ParallelDims``.
        dtype: of activations.
        head: the model's name of the output layer.
        moe_of: the MoE layer that a module is, if it is a converted one.
        keeps: bytes besides its input that the n-th block keeps under the job's checkpointing, from 1.
        recomputed: parts of names of linears. Per-op checkpointing keeps no product of these shapes.
        hides: whether per-op checkpointing sees no op of a block's attention and FFNs, inside of a graph.
        keeps_exchange: whether it keeps what the all-to-alls of bf16 layers return.
        loss_chunks: parts of the sequence that have logits one after the other.
        keeps_gradients: whether they have memory throughout, as CUDA graphs need it.
    """

    config: Any
    dims: Any
    dtype: torch.dtype
    head: str
    moe_of: Callable[[Any], MetaMoE | None]
    keeps: Callable[[int, Part], float]
    recomputed: Sequence[str] = ()
    hides: Callable[[Any], bool] = lambda block: False
    keeps_exchange: bool = True
    loss_chunks: int = 1
    keeps_gradients: bool = False

    @property
    def tokens(self) -> int:
        """Those of a microbatch on this rank."""
        p, training, dims = self.config.parallelism, self.config.training, self.dims
        sequences = p.pipeline_parallel_microbatch_size if dims.pp_enabled else training.local_batch_size
        return sequences * training.seq_len // (dims.cp * dims.tp)


class Weights(NamedTuple):
    """Bytes of the parameters of a module on this rank.

    Attributes:
        sharded: in ``training.dtype``, which gradients and each Adam state take too.
        reduced: the part of ``sharded`` whose gradients FSDP reduces.
        gathered: as they are multiplied: FSDP's unsharded copy, or autocast's.
        backward: while their gradients are computed: FSDP's in bf16, quantized copies.
        unreduced: the fp32 gradients that FSDP reduces, once it has dropped ``gathered``. It frees them when the next
            block's gradients are there; in a pipeline, after the last microbatch.
        cached: of ``cache_weights``.
    """

    sharded: float = 0
    reduced: float = 0
    gathered: float = 0
    backward: float = 0
    unreduced: float = 0
    cached: float = 0


class Step(NamedTuple):
    """A module's share of a forward and a backward, in bytes.

    Attributes:
        kept: activations from its forward to its backward, for one microbatch.
        backward: activations that only its backward has.
    """

    name: str
    weights: Weights
    kept: float = 0
    backward: float = 0


class Estimate(NamedTuple):
    """Bytes on one rank.

    Attributes:
        activations: all that is kept from forwards to backwards, at most.
        peak: the most that PyTorch reserves.
        where: when that is.
    """

    activations: float
    peak: float
    where: str


def estimate(job: Job, parts: Sequence[nn.Module]) -> Estimate | None:
    """The memory of the rank that holds these parts. None for blocks that are built otherwise than torchtitan's."""
    models, dims, training = cast(list[Any], parts), job.dims, job.config.training
    if not all(_is_known(job, block) for model in models for block in model.layers.children()):
        return None
    steps = [*_steps(job, models)]
    logits = sum(_logits(job, getattr(model, job.head)) for model in models)
    total = _sum([step.weights for step in steps])
    activations = _in_flight(job.config, dims, len(parts)) * sum(step.kept for step in steps)
    held = 3 * total.sharded + total.cached + _workspace(job, models) + activations
    step_of_ranks = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    accumulates = dims.pp_enabled or job.keeps_gradients or training.global_batch_size > step_of_ranks
    held += total.sharded if accumulates else total.reduced
    if dims.pp_enabled:  # until the last microbatch FSDP neither frees what it has gathered nor reduces gradients
        held += total.gathered + total.unreduced
        steps = [step._replace(weights=step.weights._replace(gathered=0, unreduced=0)) for step in steps]
    at_loss = held + logits + (steps[-1].weights.gathered if logits else 0)
    peak, where = max([(at_loss, "at the loss"), *_walk(steps, held, accumulates)])
    return Estimate(activations, peak, where)


def report(job: Job, built: Built, why_all_to_all: str | None) -> list[str]:
    """How tokens travel and what memory that takes, in up to three lines of a dry run's report."""
    lines, changes = [], False
    routed: list[Any] = [
        layer.routed for _, layer in converted(built.parts, built.moe_of) if isinstance(layer, MetaMoE)
    ]
    if routed:
        with preflight.for_other_machines():
            way, changes = auto_dispatch.describe(routed[0].config, built.layout, why_all_to_all)
        lines += [f"dispatch  {way.removeprefix('dispatch ')}"] * bool(way)
    if (found := estimate(job, built.parts)) is None:
        return lines
    memory = f"memory    activations {found.activations / 2**30:.1f} GiB, peak about {found.peak / 2**30:.1f} GiB "
    lines.append(f"{memory}{found.where}, if routing is balanced")
    if changes:
        config, peaks, ends = routed[0].config, [], (ROOMS[0], ROOMS[-1])
        for room in ends:
            for experts in routed:
                experts.config = replace(config, dispatch="symmetric", dispatch_capacity=room)
            peaks.append(f"{cast(Estimate, estimate(job, built.parts)).peak / 2**30:.1f}")
        for experts in routed:
            experts.config = config
        rooms = "room for {} to {} times the rows of balanced routing".format(*ends)
        lines.append(f"          over symmetric memory about {' to '.join(peaks)} GiB: it has {rooms}")
    return lines


def _walk(steps: list[Step], held: float, accumulates: bool) -> Iterator[tuple[float, str]]:
    """The most bytes in the backward of each module, from the last to the first. ``held``: at the loss; with
    ``accumulates`` it has all gradients."""
    reducing = 0  # FSDP frees what it reduces when the next block's gradients are there
    for step, before in zip(reversed(steps), [*reversed(steps[:-1]), Step("", Weights())], strict=True):
        weights = step.weights
        prefetched = before.weights.gathered if before.weights.reduced else 0
        now = step.backward + weights.backward + prefetched + max(weights.gathered + reducing, weights.unreduced)
        held += 0 if accumulates else weights.sharded - weights.reduced
        yield held + now, f"in the backward of {step.name}"
        held -= step.kept
        reducing = weights.unreduced


def _in_flight(config: Any, dims: Any, num_parts: int) -> float:
    """Microbatches whose activations a pipeline rank holds, for each of its stages on average. Schedules that this file
    does not know hold all."""
    if not dims.pp_enabled:
        return 1
    batches = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    later = dims.pp - 1 - dims.get_mesh("pp").get_local_rank()
    interleaved = (2 * later + (num_parts - 1) * dims.pp + 1) / num_parts  # the warm-up, and one that runs
    known = {"1F1B": later + 1, "Interleaved1F1B": interleaved}
    return min(batches, known.get(config.parallelism.pipeline_parallel_schedule, batches))


# --- parameters -------------------------------------------------------------------------------------------------------


def weights_of(*modules: nn.Module) -> Weights:
    """Bytes of all parameters below the modules.

    FSDP gathers bf16, and a bf16 gradient takes fp32 to be reduced. Without FSDP autocast copies fp32 weights to bf16;
    a copy is freed before its gradient, which comes in bf16, becomes fp32. FP8 modules quantize weights as they are,
    and write gradients as they are.
    """
    fp8, outside = {}, set()
    for module in [m for root in modules for m in cast(Any, root).modules()]:
        if isinstance(config := getattr(module, "config", None), Fp8FlowMoEConfig):
            fp8 |= dict.fromkeys(module.parameters(), config)
        if isinstance(module, TitanExperts) and not module.in_fsdp:
            outside |= {*cast(Any, module).parameters()}
    params = [param for root in modules for param in root.parameters()]
    return _sum([Weights(), *(_weight(p, fp8.get(p), None if p in outside else fsdp_shards(p)) for p in params)])


def _weight(param: nn.Parameter, config: Fp8FlowMoEConfig | None, shards: int | None) -> Weights:
    """``config``: of the FP8 module that has the parameter. ``shards``: FSDP's, if it has it."""
    local = local_of(param)
    count, backward, cached = local.numel() * (shards or 1), 0, 0
    if config is not None:
        backward = count * (2 if config.recompute == "experts" else 1)  # the transpose, and the forward's operand again
        if config.cache_weights:
            cached = count * (2 if config.cache_layouts == "both" else 1)
            backward = 2 * count - cached
    if shards is None:
        autocast = param.dtype == torch.float32 and config is None
        return Weights(local.nbytes, gathered=count * BF16 * autocast, backward=backward, cached=cached)
    in_fp8 = config is not None and config.fp8_all_gather and shards > 1 and param.dim() == 3  # routed experts
    gathered = count * (1 if in_fp8 else BF16)
    return Weights(local.nbytes, local.nbytes, gathered, backward + count * BF16, count * FP32, cached)


# --- activations ------------------------------------------------------------------------------------------------------


def _steps(job: Job, models: list[Any]) -> Iterator[Step]:
    """The modules of a forward in order."""
    blocks = 0
    for model in models:
        if model.tok_embeddings is not None:
            yield Step("the embedding", weights_of(model.tok_embeddings))
        for name, block in model.layers.named_children():
            blocks += 1
            part, x = _block(job, name, block), job.dtype.itemsize * job.tokens * block.attention_norm.weight.shape[0]
            kept = job.keeps(blocks, part)
            yield Step(f"layer {name}", weights_of(block), x + kept, max(part.everything - kept, 0) + part.backward)
        if (head := getattr(model, job.head)) is not None:
            kept = 2 * job.dtype.itemsize * job.tokens * head.weight.shape[1]  # the norm's input and output
            yield Step("the output layer", weights_of(model.norm, head), kept)


def _logits(job: Job, head: Any) -> float:
    compiles = job.config.compile
    per_logit = LOGITS[compiles.enable and "loss" in compiles.components]
    return 0 if head is None else job.tokens * head.weight.shape[0] * per_logit / job.loss_chunks


def _block(job: Job, name: str, block: Any) -> Part:
    """A transformer block, without its input: what attention, FFNs and their norms keep, and products."""
    attention, ffn, size = _attention(job, block), _ffn(job, block), job.dtype.itemsize * job.tokens
    everything = attention.everything + ffn.everything + 2 * size * block.attention_norm.weight.shape[0]
    products = 0 if job.hides(block) else size * _saved_products(job, name, block)
    return Part(everything, attention.per_op + ffn.per_op + products, max(attention.backward, ffn.backward))


def _saved_products(job: Job, name: str, block: Any) -> int:
    """The columns that per-op checkpointing saves: those of every second matrix product, but none whose shape is that
    of a linear to recompute. The router's are left out, since they are few."""
    fp8 = {m for ffn in block.modules() if isinstance(ffn, Fp8FFN) for m in ffn.children()}
    fp8 |= {m for m in block.modules() if isinstance(m, Fp8FlowLinear)}
    linears = [(key, m) for key, m in block.named_modules() if isinstance(m, nn.Linear) and m not in fp8]
    for i, pair in enumerate(linears[:-1]):  # an FFN multiplies by w3 before w2
        if pair[0].endswith(".w2") and linears[i + 1][0].endswith(".w3"):
            linears[i : i + 2] = linears[i + 1], pair
    shapes = {m.weight.shape for key, m in linears if any(part in f"layers.{name}.{key}" for part in job.recomputed)}
    saved = [(key, m) for key, m in linears if m.weight.shape not in shapes][::2]
    return sum(m.weight.shape[0] for key, m in saved if ".router." not in key)


def _attention(job: Job, block: Any) -> Part:
    """The norm's result, the projections' results, queries, keys and values after RoPE, and the attention's result in
    its own layout, which per-op checkpointing keeps."""
    linears = [m for m in block.attention.modules() if isinstance(m, nn.Linear)]
    *projections, last = [m.weight.shape for m in linears]
    everything = block.attention_norm.weight.shape[0] + 2 * sum(out for out, _ in projections) + last[1]
    # A compiled graph inside of a checkpoint runs again as a whole, and flex attention is part of it.
    per_op = 0 if job.hides(block) and getattr(block.attention, "attn_type", "sdpa") == "flex" else last[1]
    # An FP8 linear is one op, whose result is kept with its quantized input.
    per_op += sum(m.weight.shape[0] + m.weight.shape[1] / 2 for m in linears if isinstance(m, Fp8FlowLinear))
    size = job.dtype.itemsize * job.tokens
    return Part(size * everything, size * per_op, size * everything)


def _ffn(job: Job, block: Any) -> Part:
    if not getattr(block, "moe_enabled", False):
        return dense(job, block.feed_forward)
    moe, fp8 = block.moe, job.moe_of(block.moe)
    routed = _bf16_experts(job, moe) if fp8 is None else fp8_experts(job, fp8)
    if moe.shared_experts is None:
        return routed
    return _sum([routed, dense(job, moe.shared_experts, joins=fp8 is not None and fp8.shared is not None)])


def dense(job: Job, ffn: Any, joins: bool = False) -> Part:
    """W2 (silu(W1 x) * (W3 x)), of every token. In FP8 it is :mod:`titan_fp8moe.layer.group`, or it joins routed
    experts, which add its result to theirs and without expert parallelism have its rows."""
    hidden, D = ffn.w1.weight.shape
    if not isinstance(ffn, Fp8FFN):
        size = job.dtype.itemsize * job.tokens
        # The gradients of w2's input, and of gate and up, but then not the input itself.
        return Part(size * (4 * hidden + D), 0, size * 2 * hidden)
    rows, has_rows = group_rows(job.tokens), not joins or job.dims.ep > 1
    kept = rows * (has_rows * _quantized(D) + _saved_h(ffn.config, hidden)) + job.tokens * BF16 * D * (not joins)
    of_gemm_2, dh, transposes = _backward(ffn.config, D, hidden)
    return Part(kept, kept, rows * max(of_gemm_2, dh + transposes + D * BF16))  # dx is there before


def _bf16_experts(job: Job, moe: Any) -> Part:
    """torchtitan's own. Per-op checkpointing keeps what both all-to-alls return, if its list has them."""
    _, D, hidden = cast(Any, _down_projection(moe)).shape
    pairs, size = job.tokens * moe.router.top_k, job.dtype.itemsize
    exchanged = 2 * size * pairs * D if job.dims.ep > 1 else 0
    everything = size * pairs * (ROUTED_COPIES * D + 4 * hidden) + exchanged
    return Part(everything, exchanged * job.keeps_exchange, everything)


def fp8_experts(job: Job, moe: MetaMoE) -> Part:
    """The op of :mod:`titan_fp8moe.layer.experts` and what it saves: dispatched tokens, GEMM 1's result, row maps."""
    config, top_k, tokens, ep = cast(Any, moe.routed).config, moe.top_k, job.tokens, job.dims.ep
    experts, D, hidden = moe.experts.matrices().w2.shape
    if ep == 1:
        rows, dispatched = row_capacity(tokens * top_k, experts), tokens
    else:
        factor = config.dispatch_capacity if config.backend.bounded else 1.0
        rows, dispatched = capacities(tokens, top_k, ep, experts // ep, factor)
    # Rows of routed pairs, and each row's token and score. Tokens travel with K experts and scores.
    kept = dispatched * 4 * top_k + rows * 2 * FP32 + tokens * BF16 * D
    kept += (tokens * 4 + dispatched * 8) * top_k if ep > 1 else 0
    kept += rows * _saved_h(config, hidden) + dispatched * _quantized(D)
    of_gemm_2, dh, transposes = _backward(config, D, hidden)
    of_gemm_1 = rows * (dh + max(transposes, D * BF16)) + dispatched * BF16 * D  # dx is summed before
    return Part(kept, kept, max(rows * of_gemm_2, of_gemm_1))


def _workspace(job: Job, models: list[Any]) -> float:
    """Bytes that ``dispatch = "symmetric"`` shares with other ranks; all layers use the same."""
    ep, layers = job.dims.ep, [job.moe_of(module) for model in models for module in model.modules()]
    for moe in [moe for moe in layers if moe is not None and cast(Any, moe.routed).config.backend.bounded and ep > 1]:
        experts, D, _ = moe.experts.matrices().w2.shape
        return Sizes(ep, job.tokens, padded(D), moe.top_k, experts // ep).nbytes
    return 0


def _is_known(job: Job, block: Any) -> bool:
    """Whether the block is torchtitan's: an attention and an FFN of three matrices or a MoE layer, each with a norm.
    gpt_oss's experts are known in FP8 only: in bf16 each row gets copies of its biases."""
    known = hasattr(block, "attention") and hasattr(block, "attention_norm")
    if getattr(block, "moe_enabled", False):
        return known and (job.moe_of(block.moe) is not None or _down_projection(block.moe) is not None)
    return known and all(hasattr(getattr(block, "feed_forward", None), name) for name in ("w1", "w2", "w3"))


def _down_projection(moe: nn.Module) -> nn.Parameter | None:
    """(E, D, H), of torchtitan's own experts."""
    return next((param for name, param in moe.named_parameters() if ".w2" in name and param.dim() == 3), None)


def _sum(records: list[T]) -> T:
    """Parts or weights, added up field by field."""
    return type(records[0])(*(sum(values) for values in zip(*cast(Any, records), strict=True)))


def _quantized(width: int) -> float:
    """Bytes of a quantized row: e4m3, and a scale for each tile."""
    return padded(width) * (1 + 1 / SCALE_TILE)


def _saved_h(config: Fp8FlowMoEConfig, hidden: int) -> float:
    """Bytes per row of h and GEMM 2's operand, where an FFN keeps them."""
    backward, columns = config.backward, 2 * padded(hidden)
    h = _quantized(columns) if config.save_h == "fp8" else columns * BF16
    return backward.keeps_h * h + backward.keeps_a * _quantized(hidden)


def _backward(config: Fp8FlowMoEConfig, D: int, hidden: int) -> tuple[float, float, float]:
    """Bytes per row in an FP8 FFN's backward: the most in its half of GEMM 2; dh; the transposes of x and dh.

    The half of GEMM 2 holds dy, dh and a, unless the forward kept a, with the transposes for w2's gradient, or with da
    and a recomputed h.
    """
    H = padded(hidden)
    operands = D + 2 * H + (H if config.recompute != "none" else 0)
    at_activation = H * BF16 + (2 * H * BF16 if config.recompute == "experts" else 0)
    return operands + max(D + H, at_activation), 2 * H, D + 2 * H
