"""Layers whose ranks exchange tokens through shared memory, against the all-to-all path, bit for bit.

    torchrun --nproc_per_node N symmetric_worker.py [ROUTINGS]

On a CPU the memory is shared files and gloo makes the group. On one GPU, processes share it: set
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.distributed.runner import check, end
from tests.layer import apply_layer
from titan_fp8moe import SAVED_OPS, Fp8FlowMoEConfig, ops, routed_experts
from titan_fp8moe.dispatch.symmetric import exchange, kernels, workspace
from titan_fp8moe.layer.ffn import FFN
from titan_fp8moe.layer.weights import Biases, ExpertWeights

D, H, EXPERTS, TOP_K, TOKENS = 256, 128, 8, 3, 70


def device_of_this_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def all_to_all_through_the_host(
    rows: torch.Tensor, output_splits: list[int], input_splits: list[int], group_name: str
) -> torch.Tensor:
    """The reference where processes share a GPU, which NCCL refuses and gloo cannot."""
    received = torch.empty(sum(output_splits), *rows.shape[1:], dtype=rows.dtype)
    dist.all_to_all_single(received, rows.cpu(), output_splits, input_splits)
    return received.to(rows.device)


def make_ids(kind: str, T: int, K: int, experts: int) -> torch.Tensor:
    scores = torch.rand(T, experts)
    if kind == "one_expert":
        return torch.full((T, K), experts - 1)
    if kind == "idle_rank":
        scores[:, : experts // dist.get_world_size()] = -1
    if kind == "skewed":
        scores[:, :2] += 0.4
    ids = scores.topk(K).indices
    return ids.masked_fill(torch.rand(T, K) < 0.2, -1) if kind == "missing" else ids


def make_batch(
    kind: str, T: int = TOKENS, K: int = TOP_K, experts: int = EXPERTS, dtype=torch.float32, device=None, dims=(D, H)
):
    """x, scores, ids, this rank's w1, w2, w3 and shared experts, and the gradient of the output."""
    local, (D, H) = experts // dist.get_world_size(), dims
    shapes = [(local, H, D), (local, D, H), (local, H, D), (H, D), (D, H), (H, D)]
    weights = [(torch.randn(shape) * 0.05).to(device, dtype) for shape in shapes]
    x, dout = (torch.randn(T, D).to(device, dtype) for _ in range(2))
    return x, torch.rand(T, K).to(device), make_ids(kind, T, K, experts).to(device), weights, dout


def run(batch, config: Fp8FlowMoEConfig, shared: bool = False, before: bool = False, call=None) -> list[torch.Tensor]:
    """Output and gradients."""
    x, scores, ids, weights, dout = batch
    leaves = [t.clone().requires_grad_() for t in (x, scores, *weights[: 6 if shared else 3])]
    options = dict(config=config, ep_group=dist.group.WORLD, score_before_experts=before)
    if shared:
        options["shared"] = ExpertWeights(*leaves[5:])
    args = leaves[0], ExpertWeights(*leaves[2:5]), ids, leaves[1]
    out = (call or apply_layer)(*args, **options)
    out.backward(dout)
    return [out.detach(), *[leaf.grad for leaf in leaves]]


def with_frozen_input(frozen: bool, x, weights, ids, scores, **options) -> torch.Tensor:
    if frozen:
        x, scores = x.detach(), scores.detach()
    return apply_layer(x, weights, ids, scores, **options)


def with_biases(biases: list[torch.Tensor], x, weights, ids, scores, **options) -> torch.Tensor:
    return apply_layer(x, weights, ids, scores, biases=Biases(*biases), **options)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(s, t) and s.dtype == t.dtype for s, t in zip(a, b, strict=True))


def check_routings(routings: int, device: torch.device) -> None:
    ranks = dist.get_world_size()
    default = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=ranks)
    settings = [
        (default, False, False),
        (dataclasses.replace(default, recompute="experts"), True, False),
        (dataclasses.replace(default, save_h="fp8", recompute="none"), True, True),
        (dataclasses.replace(default, wgrad="scaling_aware"), True, False),
    ]
    kinds = ("uniform", "skewed", "one_expert", "idle_rank", "missing")
    for i in range(routings):
        config, shared, before = settings[i % len(settings)]
        # The most tokens first: with more, ranks would make another workspace, which takes seconds on a GPU.
        T, K = TOKENS if i < 33 else TOKENS - i % TOKENS, TOP_K if i < 30 else 1 + i % TOP_K
        dtype = torch.bfloat16 if i % 3 == 1 else torch.float32
        batch = make_batch(kinds[i % len(kinds)], T, K, dtype=dtype, device=device)
        want = run(batch, dataclasses.replace(config, dispatch="all_to_all"), shared, before)
        ok = same(run(batch, config, shared, before), want)
        check(f"routing {i}: {kinds[i % len(kinds)]}, {T} tokens, top {K}, {config.recompute}, shared {shared}", ok)
    batch = make_batch("uniform", 3, 4, 64 * ranks, device=device)
    want = run(batch, Fp8FlowMoEConfig())
    with torch.inference_mode():  # makes the workspace
        run_forward = functools.partial(apply_layer, config=default, ep_group=dist.group.WORLD)
        out = run_forward(batch[0], ExpertWeights(*batch[3][:3]), batch[2], batch[1])
    check("inference", torch.equal(out, want[0]))
    check("more experts than tokens", same(run(batch, default), want))
    batch = make_batch("uniform", device=device)
    for before in (False, True):
        call = functools.partial(with_biases, [torch.randn(w.shape[:2], device=device) for w in batch[3][:3]])
        want = run(batch, Fp8FlowMoEConfig(), before=before, call=call)
        check(f"biases, score before {before}", same(run(batch, default, before=before, call=call), want))
    padded = make_batch("uniform", device=device, dims=(192, 80))
    want = run(padded, Fp8FlowMoEConfig(), shared=True)
    check("padded sizes", same(run(padded, default, shared=True), want))
    frozen = run(batch, default, call=functools.partial(with_frozen_input, dist.get_rank() == 0))
    want = run(batch, Fp8FlowMoEConfig(), call=functools.partial(with_frozen_input, dist.get_rank() == 0))
    check("one rank's input is frozen", frozen[1] is want[1] is None or same(frozen[1:2], want[1:2]))
    check("its weights' gradients", same(frozen[3:], want[3:]))


def check_compile(device: torch.device) -> None:
    """A layer is one graph, and has the same bits."""
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2.5)
    compiled = torch.compile(routed_experts, backend="aot_eager", fullgraph=True)

    def call(x, weights, ids, scores, **options):
        return compiled(x, *weights, ids, scores, **options)

    for _ in range(2):
        batch = make_batch("uniform", device=device)
        check("compiled with fullgraph=True", same(run(batch, config, call=call), run(batch, Fp8FlowMoEConfig())))


def check_deterministic(device: torch.device) -> None:
    """``torch.use_deterministic_algorithms`` fills new memory, on the layer's stream: not over what has arrived."""
    config, batch = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2.5), make_batch("uniform", device=device)
    want, beside = run(batch, config), workspace.Workspace.beside

    @contextlib.contextmanager
    def behind_a_busy_stream(self):
        with beside(self):
            if device.type == "cuda":
                torch.cuda._sleep(20_000_000)  # cycles, 10 ms
            yield

    workspace.Workspace.beside = behind_a_busy_stream
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check("deterministic algorithms", same(run(batch, config), want))
    finally:
        torch.use_deterministic_algorithms(False)
        workspace.Workspace.beside = beside


def check_graph(device: torch.device) -> None:
    """Two layers, forward and backward, as a CUDA graph: replayed with new routings they have an eager step's bits."""
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=dist.get_world_size())
    static = make_batch("uniform", dtype=torch.bfloat16, device=device)
    x, scores, ids, weights, dout = static
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]

    def step() -> list[torch.Tensor]:
        def layer(x: torch.Tensor) -> torch.Tensor:
            args = x, ExpertWeights(*leaves[2:5]), ids, leaves[1]
            return apply_layer(*args, config=config, ep_group=dist.group.WORLD, shared=ExpertWeights(*leaves[5:]))

        out = layer(layer(leaves[0]))
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    for kind in ("skewed", "one_expert", "idle_rank", "missing", "uniform"):
        with torch.no_grad():
            for old, new in zip(static[:3], make_batch(kind, dtype=torch.bfloat16, device=device), strict=False):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check(f"a graph of two layers, {kind}", same([t.clone() for t in captured], step()))


def check_checkpointing(device: torch.device) -> None:
    """A recomputed layer exchanges tokens again, or not at all; a layer may run in another's ``meanwhile``."""
    config, batch = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2.5), make_batch("uniform", device=device)
    per_op = functools.partial(create_selective_checkpoint_contexts, list(SAVED_OPS))

    def two_layers(layer, x, weights, ids, scores, **options):
        return layer(layer(x, weights, ids, scores, **options) + x, weights, ids, scores, **options)

    def nested(x, weights, ids, scores, **options):
        inner = functools.partial(apply_layer, x, weights, ids, scores, **options)
        return apply_layer(x, weights, ids, scores, meanwhile=inner, **options)

    variants = {
        "full checkpointing": functools.partial(checkpoint, apply_layer, use_reentrant=False),
        "per-op checkpointing": functools.partial(checkpoint, apply_layer, use_reentrant=False, context_fn=per_op),
    }
    want = run(batch, Fp8FlowMoEConfig(), call=functools.partial(two_layers, apply_layer))
    for name, layer in variants.items():
        check(name, same(run(batch, config, call=functools.partial(two_layers, layer)), want))
    check(
        "a layer in another's meanwhile",
        same(run(batch, config, call=nested), run(batch, Fp8FlowMoEConfig(), call=nested)),
    )


def message_of(kind: type[Exception], call: Callable, *args) -> str:
    """What the error of this call says; nothing without one."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    return ""


def check_overflow(device: torch.device) -> None:
    """Loud before the optimizer changes a weight, on all ranks."""
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=1)
    x, scores, ids, weights, dout = make_batch("one_expert", 300, device=device)
    w = torch.nn.Parameter(weights[0])
    optimizer, before = torch.optim.SGD([w], lr=1.0), w.detach().clone()
    out = routed_experts(x, w, *weights[1:3], ids, scores, config=config, ep_group=dist.group.WORLD)
    out.backward(dout)
    check("without room the output is NaN", bool(out.isnan().all()))
    said = message_of(RuntimeError, optimizer.step)
    check("the optimizer's step raises", "larger dispatch_capacity" in said and "needed " in said)
    check("no weight has changed", torch.equal(w, before))
    workspace.check_room()
    ids = make_ids("uniform", 300, TOP_K, EXPERTS).to(device)
    config = dataclasses.replace(config, dispatch_capacity=2.5)
    out = routed_experts(x, w, *weights[1:3], ids, scores, config=config, ep_group=dist.group.WORLD)
    check("afterwards layers work again", bool(out.isfinite().all()))
    out.sum().backward()


def check_overflow_of_replays(device: torch.device) -> None:
    """As :func:`check_overflow`, of two graphs whose replays the host leaves behind before they reach a dispatch."""
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=1.5)
    x, scores, ids, weights, dout = make_batch("uniform", 300, device=device)
    w = torch.nn.Parameter(weights[0])
    optimizer = torch.optim.SGD([w], lr=1.0)

    def step() -> None:
        options = dict(config=config, ep_group=dist.group.WORLD)
        hidden = routed_experts(x, w, *weights[1:3], ids, scores, **options)
        routed_experts(hidden, w, *weights[1:3], fits, scores, **options).backward(dout)

    fits, graphs = ids.clone(), [torch.cuda.CUDAGraph() for _ in range(2)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    for graph in graphs:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            torch.cuda._sleep(500_000_000)  # cycles, a quarter of a second
            step()
    optimizer.zero_grad(set_to_none=False)
    for name, call in (("an optimizer's step", optimizer.step), ("check_room", workspace.check_room)):
        for kind in ("one_expert", "uniform"):
            ids.copy_(make_ids(kind, 300, TOP_K, EXPERTS))
            before = w.detach().clone()
            torch.cuda.synchronize()
            dist.barrier()
            for graph in graphs:
                graph.replay()
            said = message_of(RuntimeError, call)
            torch.cuda.synchronize()
            ok = ("larger dispatch_capacity" in said) == (kind == "one_expert")
            check(f"{name} after replays, {kind}: {said[:40]}", ok)
            check("nothing is left to report", not message_of(RuntimeError, workspace.check_room))
            if kind == "one_expert":
                check("no weight has changed", torch.equal(w, before))
                w.grad.zero_()


def check_unlike_settings(device: torch.device) -> None:
    """Ranks that disagree get an error, by the next optimizer step at the latest."""
    save_h = "fp8" if dist.get_rank() else "bf16"
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2.5, save_h=save_h)
    check(
        "with unlike settings the output is NaN",
        bool(run(make_batch("uniform", device=device), config)[0].isnan().all()),
    )
    said = message_of(RuntimeError, workspace.check_room)
    check("and an error says so", "other settings of fp8_flow_moe" in said)


def check_unlike_sizes(device: torch.device) -> None:
    """Ranks with unequal numbers of tokens get an error where they would make a workspace."""
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2.5)
    said = message_of(ValueError, run, make_batch("uniform", 1000 + dist.get_rank(), device=device), config)
    check("with unequal numbers of tokens an error says so", "equal numbers of tokens" in said)


class Broken(Exception):
    """Raised on all ranks between a dispatch and its combine, as when memory is short."""


def check_interrupted(device: torch.device) -> None:
    """All ranks go on after an error that met them alike, in a forward or a backward, in any of their ops."""
    config, batch = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2.5), make_batch("uniform", device=device)
    want = run(batch, config)
    impl = kernels if device.type == "cuda" else exchange
    places = (FFN, "product", 0), (FFN, "product", 3), (FFN, "hidden_gradients", 0), (FFN, "weight_grads", 0)
    for owner, name, after in (*places, (impl, "pull_routing", 0), (impl, "push_sums", 1)):
        whole, calls = getattr(owner, name), itertools.count()

        def broken(*args, _whole=whole, _calls=calls, _after=after, **kwargs):
            if next(_calls) == _after:
                raise Broken
            return _whole(*args, **kwargs)

        setattr(owner, name, broken)
        try:
            run(batch, config)
            check(f"an error in {name}", False)
        except Broken:
            setattr(owner, name, whole)
        check(f"after an error in {name} that has been called {after} times", same(run(batch, config), want))


def mapped_bytes() -> int:
    """Of this process's workspaces on a CPU."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    lines = [line.split()[0].split("-") for line in lines if "titan_fp8moe_" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in lines)


def check_memory() -> None:
    """A workspace for more tokens takes the place of the others, and none is left of a group that is destroyed."""
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2.5)
    for tokens in (200, 300, 400):
        run(make_batch("uniform", tokens, dims=(384, H)), config)
    found = [w.sizes.tokens for w in workspace._workspaces[dist.group.WORLD] if w.sizes.dim == 384]
    check(f"one workspace of these dims, for {found} tokens", found == [400])


def check_later_group(device: torch.device) -> None:
    """A group of the same name that comes later has a workspace of its own, not that of ranks that may be gone."""
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2.5)
    # A store of its own: in the first group's, a rank would find its peer's old address and wait there for ever.
    store = dist.PrefixStore("later", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    batch = make_batch("uniform", device=device)
    check("a later group of that name", same(run(batch, config), run(batch, Fp8FlowMoEConfig())))
    later = workspace._workspaces[dist.group.WORLD]
    check("has its own workspace", len(later) == 1)
    gc.collect()
    own = later[0].sizes.num_ranks * -(-later[0].sizes.nbytes // 4096) * 4096
    check(f"nothing is left of the other: {mapped_bytes()} bytes, {own}", mapped_bytes() <= own)


def main() -> None:
    torch.set_num_threads(1)
    device = device_of_this_rank()
    several = device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if several else "gloo")
    if device.type == "cuda" and not several:
        ops.start_all_to_all, ops.wait = all_to_all_through_the_host, lambda rows: rows
    torch.manual_seed(int(os.environ.get("SEED", 0)) * 100 + dist.get_rank())
    check_routings(int(sys.argv[1]) if len(sys.argv) > 1 else 30, device)
    check_compile(device)
    check_deterministic(device)
    check_checkpointing(device)
    if device.type == "cuda":
        check_graph(device)
    check_overflow(device)
    if device.type == "cuda":
        check_overflow_of_replays(device)
    check_unlike_settings(device)
    check_unlike_sizes(device)
    check_interrupted(device)
    if device.type == "cpu":
        check_memory()
        check_later_group(device)
    dist.barrier()
    if device.type == "cpu":
        return end()
    print("all checks passed", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
