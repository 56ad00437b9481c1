"""Estimates the most memory that PyTorch reserves on one rank of a job, from the model on the meta device.

Parameters and optimizer states follow from the shards. Activations are counted from the shapes of each block. The peak
is the largest of what a walk through the backward finds:

    loss       parameters, Adam's states, all kept activations, logits
    a block    gradients of later blocks, activations of this and earlier ones, and what its own backward allocates

Gradients replace activations on the way, so the peak can be at either end. Gradients that FSDP reduces do not: FSDP
allocates them on a stream of its own, and the allocator does not give one stream's free memory to another. They count
from the start.

Estimates for 16B and Qwen3-30B-A3B are from 7% below to 1% above the peaks measured: 4 to 27 layers on 1 to 4 GPUs,
bf16 and FP8, per-op checkpointing and none. FFNs, routed experts, and weights under autocast and FSDP agree with
counted allocations (tests/test_memory.py). The limits:

* Routing is balanced. The CUDA context and NCCL's buffers, which PyTorch does not count, come on top.
* Inductor decides what a graph keeps. Assumed is what checkpointing asks for; without checkpointing, all inputs of
  products, of attention and of an FFN's activation.
* Tensor and context parallelism divide all activations evenly.
* CPU offload, the buckets of DDP and optimizers other than Adam are not considered.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.moe.moe import MoE

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.symmetric.workspace import Sizes, capacities
from titan_fp8moe.nn.modules import Fp8FlowLinear
from titan_fp8moe.nn.parallel import local_of
from titan_fp8moe.recipe import TILE, group_rows, padded, row_capacity
from titan_fp8moe.torchtitan.compiling import why_eager, why_submodules
from titan_fp8moe.torchtitan.modules import Fp8FlowExperts, Fp8FlowFeedForward, Fp8FlowMoE, down_projection
from titan_fp8moe.trainer.experts import fsdp_shards

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
    """Bytes of the activations of an attention or an FFN, for one microbatch.

    Attributes:
        everything: kept for the backward without checkpointing.
        per_op: kept under per-op selective checkpointing.
        backward: allocated while its backward runs.
    """

    everything: float
    per_op: float
    backward: float


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


def estimate(config: JobConfig, dims: ParallelDims, parts: list[nn.Module]) -> Estimate | None:
    """The memory of the rank that holds these model parts, :func:`titan_fp8moe.torchtitan.dry_run.build`'s.

    None for blocks that are built differently than torchtitan's.
    """
    if not all(_is_known(block) for part in cast(list[Any], parts) for block in part.layers.children()):
        return None
    counted = _Activations(config, dims)
    steps, logits = counted.steps(parts)
    total = _sum([step.weights for _, step in steps])
    constant = 3 * total.sharded + total.cached + counted.workspace
    batches = _in_flight(config, dims, len(parts))
    activations = batches * sum(step.kept for _, step in steps)
    step_of_ranks = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    accumulates = dims.pp_enabled or config.training.global_batch_size > step_of_ranks
    held = constant + activations + (total.sharded if accumulates else total.reduced)
    if dims.pp_enabled:  # until the last microbatch FSDP neither frees what it has gathered nor reduces gradients
        held += total.gathered + total.unreduced
        steps = [(name, step._replace(weights=step.weights._replace(gathered=0, unreduced=0))) for name, step in steps]
    at_loss = held + logits + (steps[-1][1].weights.gathered if logits else 0)
    peak, where = max([(at_loss, "at the loss"), *_walk(steps, held, accumulates)])
    return Estimate(activations, peak, where)


def _walk(steps: list[tuple[str, Step]], held: float, accumulates: bool) -> Iterator[tuple[float, str]]:
    """The most bytes in the backward of each module, from the last to the first. ``held``: at the loss; with
    ``accumulates`` it has all gradients."""
    reducing = 0  # FSDP frees what it reduces when the next block's gradients are there
    for index, (name, step) in reversed([*enumerate(steps)]):
        weights, before = step.weights, steps[index - 1][1].weights if index else Weights()
        prefetched = before.gathered if before.reduced else 0
        now = step.backward + weights.backward + prefetched + max(weights.gathered + reducing, weights.unreduced)
        held += 0 if accumulates else weights.sharded - weights.reduced
        yield held + now, f"in the backward of {name}"
        held -= step.kept
        reducing = weights.unreduced


def _in_flight(config: JobConfig, dims: ParallelDims, num_parts: int) -> float:
    """Microbatches whose activations a pipeline rank holds, for each of its stages on average. Schedules that this file
    does not know hold all."""
    p = config.parallelism
    if not dims.pp_enabled:
        return 1
    batches = config.training.local_batch_size // p.pipeline_parallel_microbatch_size
    later = dims.pp - 1 - dims.get_mesh("pp").get_local_rank()
    if p.pipeline_parallel_schedule == "1F1B":
        return min(batches, later + 1)
    if p.pipeline_parallel_schedule == "Interleaved1F1B":  # its warm-up, and one that runs
        return min(batches, (2 * later + (num_parts - 1) * dims.pp + 1) / num_parts)
    return batches


# --- parameters -------------------------------------------------------------------------------------------------------


def _weights(*modules: nn.Module) -> Weights:
    """Bytes of all parameters below the modules.

    FSDP gathers bf16, and a bf16 gradient takes fp32 to be reduced. Without FSDP autocast copies fp32 weights to bf16;
    a copy is freed before its gradient, which comes in bf16, becomes fp32. FP8 modules quantize weights as they are,
    and write gradients as they are.
    """
    fp8 = {}
    for module in [m for root in modules for m in root.modules()]:
        if isinstance(module, Fp8FlowExperts | Fp8FlowFeedForward | Fp8FlowLinear):
            fp8 |= dict.fromkeys(module.parameters(), module)
    return _sum([Weights(), *(_weight(fp8.get(param), param) for root in modules for param in root.parameters())])


def _weight(module: Any, param: nn.Parameter) -> Weights:
    local = local_of(param)
    shards = fsdp_shards(param)
    count, config = local.numel() * (shards or 1), None if module is None else cast(Fp8FlowMoEConfig, module.config)
    gathered = backward = unreduced = cached = 0
    if shards is not None:
        in_fp8 = isinstance(module, Fp8FlowExperts) and module.config.fp8_all_gather and shards > 1
        gathered = count * (1 if in_fp8 else BF16)
        backward, unreduced = count * BF16, count * FP32
    elif param.dtype == torch.float32 and config is None:
        gathered = count * BF16
    if config is not None:
        in_backward = 2 if config.recompute == "experts" else 1  # the transpose, and the forward's operand again
        if config.cache_weights:
            kept = 2 if config.cache_layouts == "both" else 1
            cached, in_backward = kept * count, 2 - kept
        backward += count * in_backward
    sharded = local.numel() * local.dtype.itemsize
    return Weights(sharded, 0 if shards is None else sharded, gathered, backward, unreduced, cached)


# --- activations ------------------------------------------------------------------------------------------------------


class _Activations:
    """Counts the blocks of a job.

    Attributes:
        tokens: of a microbatch on this rank.
        workspace: bytes that ``dispatch = "symmetric"`` shares with other ranks.
    """

    def __init__(self, config: JobConfig, dims: ParallelDims):
        p, training = config.parallelism, config.training
        sequences = p.pipeline_parallel_microbatch_size if dims.pp_enabled else training.local_batch_size
        self.tokens = sequences * training.seq_len // (dims.cp * dims.tp)
        self.ep = dims.ep
        self.keeps_exchange = config.model.name != "qwen3"  # whose list of ops in torchtitan 0.2.2 lacks it
        self.checkpoint = config.activation_checkpoint
        components = config.compile.components if config.compile.enable else []
        self.compiles, self.compiles_loss = "model" in components, "loss" in components
        self.workspace = 0
        self.blocks = 0
        # torchtitan autocasts neither under tensor nor under pipeline parallelism, if FSDP does not cast.
        casts = dims.fsdp_enabled or dims.ep_enabled or not (dims.tp_enabled or dims.pp_enabled)
        self.itemsize = TORCH_DTYPE_MAP[training.mixed_precision_param if casts else training.dtype].itemsize

    def steps(self, parts: list[nn.Module]) -> tuple[list[tuple[str, Step]], float]:
        """The modules of a forward in order, with names, and the bytes of the logits."""
        steps, logits = [], 0
        for part in cast(list[Any], parts):
            if part.tok_embeddings is not None:
                steps.append(("the embedding", Step(_weights(part.tok_embeddings))))
            steps += [(f"layer {name}", self.block(name, block)) for name, block in part.layers.named_children()]
            if part.output is not None:
                vocabulary, dim = part.output.weight.shape
                logits = self.tokens * vocabulary * LOGITS[self.compiles_loss]
                kept = 2 * self.itemsize * self.tokens * dim  # the norm's input and output
                steps.append(("the output layer", Step(_weights(part.norm, part.output), kept)))
        return steps, logits

    def block(self, name: str, block: Any) -> Step:
        """A transformer block under the job's activation checkpointing."""
        self.blocks += 1
        visible = self._shows_products(block)
        products = self._saved_products(name, block) if visible else set()
        parts = [self._attention(block, products, visible), self._ffn(block, products)]
        x = self.itemsize * self.tokens * block.attention_norm.weight.shape[0]
        everything, per_op = x + sum(part.everything for part in parts), x + sum(part.per_op for part in parts)
        mode, option = self.checkpoint.mode, self.checkpoint.selective_ac_option
        if mode == "none":
            kept = everything
        elif mode == "selective" and option == "op":
            kept = per_op
        elif mode == "selective":  # every n-th block is checkpointed as a whole; 0 means every block
            kept = everything if int(option) and self.blocks % int(option) else x
        elif mode == "memory_budget":
            kept = x + self.checkpoint.memory_budget * (everything - x)
        else:
            kept = x
        recomputed = max(everything - kept, 0)
        return Step(_weights(block), kept, recomputed + max(part.backward for part in parts))

    def _shows_products(self, block: Any) -> bool:
        """Whether per-op checkpointing sees matrix products. A graph inside of a checkpoint hides them; one around it
        does not."""
        moe = getattr(block, "moe_enabled", False)
        if not self.compiles or not hasattr(block, "moe_enabled"):
            return True
        if not moe and not isinstance(block.feed_forward, Fp8FlowFeedForward):
            return True
        return why_submodules(block) is None and why_eager(block) is None

    def _saved_products(self, name: str, block: Any) -> set[nn.Module]:
        """torchtitan's per-op checkpointing saves every second matrix product, but none whose shape
        ``per_op_sac_force_recompute_mm_shapes_by_fqns`` names."""
        fp8 = {m for ffn in block.modules() if isinstance(ffn, Fp8FlowFeedForward) for m in ffn.children()}
        linears = [(key, m) for key, m in block.named_modules() if type(m) is nn.Linear and m not in fp8]
        for i, pair in enumerate(linears[:-1]):  # an FFN multiplies by w3 before w2
            if pair[0].endswith(".w2") and linears[i + 1][0].endswith(".w3"):
                linears[i : i + 2] = linears[i + 1], pair
        skipped = self.checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
        shapes = {m.weight.shape for key, m in linears if any(fqn in f"layers.{name}.{key}" for fqn in skipped)}
        return {m for m in [m for _, m in linears if m.weight.shape not in shapes][::2]}

    def _attention(self, block: Any, products: set[nn.Module], visible: bool) -> Part:
        """The norm's result, the projections' results, queries, keys and values after RoPE, and the attention's result
        in its own layout, which per-op checkpointing keeps."""
        D = block.attention_norm.weight.shape[0]
        linears = [m for m in block.attention.modules() if isinstance(m, nn.Linear)]
        *projections, last = [m.weight.shape for m in linears]
        projected, result = sum(out for out, _ in projections), last[1]
        everything = D + 2 * projected + result
        # A compiled graph inside of a checkpoint runs again as a whole, and flex attention is part of it.
        per_op = result if visible or getattr(block.attention, "attn_type", "sdpa") != "flex" else 0
        per_op += sum(m.weight.shape[0] for m in linears if m in products)
        # An FP8 linear is one op, whose result is kept with its quantized input.
        per_op += sum(m.weight.shape[0] + m.weight.shape[1] / 2 for m in linears if isinstance(m, Fp8FlowLinear))
        size = self.itemsize * self.tokens
        return Part(size * everything, size * per_op, size * everything)

    def _ffn(self, block: Any, products: set[nn.Module]) -> Part:
        D = block.attention_norm.weight.shape[0]
        x = self.itemsize * self.tokens * 2 * D  # the residual, and the norm's result
        if not getattr(block, "moe_enabled", False):
            part = self._dense(block.feed_forward, products)
        elif isinstance(block.moe, Fp8FlowMoE):
            part = self._fp8_moe(block.moe, products)
        else:
            part = self._moe(block.moe, products)
        return part._replace(everything=part.everything + x)

    def _dense(self, ffn: Any, products: set[nn.Module]) -> Part:
        """W2 (silu(W1 x) * (W3 x))."""
        hidden, D = ffn.w1.weight.shape
        if isinstance(ffn, Fp8FlowFeedForward):
            return self._group(ffn.config, D, hidden, with_rows=True, with_result=True)
        size = self.itemsize * self.tokens
        kept = sum(m.weight.shape[0] for m in (ffn.w1, ffn.w3, ffn.w2) if m in products)
        # The gradients of w2's input, and of gate and up, but then not the input itself.
        return Part(size * (4 * hidden + D), size * kept, size * 2 * hidden)

    def _group(self, config: Fp8FlowMoEConfig, D: int, hidden: int, with_rows: bool, with_result: bool) -> Part:
        """An FP8 FFN of every token: :mod:`titan_fp8moe.layer.group`."""
        rows = group_rows(self.tokens)
        kept = rows * (with_rows * _quantized(D) + _saved_h(config, hidden))
        kept += self.tokens * BF16 * D * with_result
        operands, transposes, activation = _backward(config, D, hidden)
        return Part(kept, kept, rows * max(operands + transposes + D * BF16, activation))  # dx is there before

    def _moe(self, moe: Any, products: set[nn.Module]) -> Part:
        """torchtitan's bf16 layer. Per-op checkpointing keeps what both all-to-alls return, if its list has them."""
        _, D, hidden = down_projection(moe.experts).shape
        pairs, size = self.tokens * moe.router.top_k, self.itemsize
        exchanged = 2 * size * pairs * D if self.ep > 1 else 0
        everything = size * pairs * (ROUTED_COPIES * D + 4 * hidden) + exchanged
        routed = Part(everything, exchanged * self.keeps_exchange, everything)
        return routed if moe.shared_experts is None else _sum([routed, self._dense(moe.shared_experts, products)])

    def _fp8_moe(self, moe: Any, products: set[nn.Module]) -> Part:
        """The op of :mod:`titan_fp8moe.layer.experts` and what it saves: dispatched tokens, GEMM 1's result, row
        maps."""
        config, top_k = moe.experts.config, moe.router.top_k
        experts, D, hidden = down_projection(moe.experts).shape
        experts //= self.ep
        if self.ep == 1:
            rows, dispatched = row_capacity(self.tokens * top_k, experts), self.tokens
        else:
            factor = config.dispatch_capacity if config.backend.bounded else 1.0
            rows, dispatched = capacities(self.tokens, top_k, self.ep, experts, factor)
            if config.backend.bounded:
                self.workspace = Sizes(self.ep, self.tokens, padded(D), top_k, experts).nbytes
        # Rows of routed pairs, and each row's token and score. Tokens travel with K experts and scores.
        kept = dispatched * 4 * top_k + rows * 2 * FP32
        kept += (self.tokens * 4 + dispatched * 8) * top_k if self.ep > 1 else 0
        kept += rows * _saved_h(config, hidden) + dispatched * _quantized(D)
        kept += self.tokens * BF16 * D
        operands, transposes, activation = _backward(config, D, hidden)
        # dx is summed before the weight gradients.
        at_weights = rows * (operands + max(transposes, D * BF16)) + dispatched * BF16 * D
        routed = Part(kept, kept, max(at_weights, rows * activation))
        if moe.shared_experts is None:
            return routed
        if not moe.fp8_shared:
            return _sum([routed, self._dense(moe.shared_experts, products)])
        hidden = moe.shared_experts.w1.weight.shape[0]
        return _sum([routed, self._group(config, D, hidden, with_rows=self.ep > 1, with_result=False)])


def _is_known(block: Any) -> bool:
    """Whether the block is torchtitan's: an attention and an FFN of three matrices or a MoE layer, each with a norm.
    gpt_oss's experts are known in FP8 only: in bf16 each row gets copies of its biases."""
    names = "attention", "attention_norm", "moe" if getattr(block, "moe_enabled", False) else "feed_forward"
    if not all(hasattr(block, name) for name in names):
        return False
    ffn = getattr(block, names[-1])
    if isinstance(ffn, MoE):
        return type(ffn.experts) is not GptOssGroupedExperts
    return all(hasattr(ffn, name) for name in ("w1", "w2", "w3"))


def _sum(records: list[T]) -> T:
    """Parts or weights, added up field by field."""
    return type(records[0])(*(sum(values) for values in zip(*cast(Any, records), strict=True)))


def _quantized(width: int) -> float:
    """Bytes of a quantized row: e4m3, and a scale for each tile."""
    return padded(width) * (1 + 1 / TILE)


def _saved_h(config: Fp8FlowMoEConfig, hidden: int) -> float:
    """Bytes per row of h and GEMM 2's operand, where an FFN keeps them."""
    backward, columns = config.backward, 2 * padded(hidden)
    h = _quantized(columns) if config.save_h == "fp8" else columns * BF16
    return backward.keeps_hidden * h + backward.keeps_operand * _quantized(hidden)


def _backward(config: Fp8FlowMoEConfig, D: int, hidden: int) -> tuple[float, float, float]:
    """Bytes per row that an FP8 FFN's backward holds: operands, and transposes for GEMM 1's weight gradient.

    Operands are dy, dh and GEMM 2's, unless the forward has kept that. The third number counts the operands, da and a
    recomputed h at the activation's backward; 0 where h was kept.
    """
    H = padded(hidden)
    operands = D + 2 * H + (H if config.recompute != "none" else 0)
    return operands, D + 2 * H, operands + 3 * H * BF16 if config.recompute == "experts" else 0
