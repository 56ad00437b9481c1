"""Experts of an ``ep_group`` under PyTorch's own tools: each gives what one process gives that holds all experts, or
refuses."""

import contextlib
import copy
import functools
import gc
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from experiments.reference import relative_error
from tests.distributed.runner import Place, gather_list, on_ranks, whole
from tests.layer import refused
from tests.processes import ROOT
from titan_fp8moe import (
    Fp8FlowMoEConfig,
    Fp8Weight,
    RoutedExperts,
    clip_grad_norm_,
    distributed_data_parallel,
    offload_experts,
)
from titan_fp8moe.nn import routing_replay

CPU_ONLY = True
EXPERTS, D, H, K, TOKENS, STEPS = 8, 128, 128, 2, 512, 8
MAX_NORM = 0.005  # clips every step
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Model(nn.Module):
    def __init__(self, group=None, config=None, bias=False, lora=False):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.experts = RoutedExperts(EXPERTS, D, H, ep_group=group, config=config, bias=bias)
        if lora:
            self.experts.add_lora(8, 16)

    def forward(self, x):
        scores, ids = self.router(x).softmax(-1).topk(K)
        return self.experts(x, ids, scores)


def make(group=None, config=None, bias=False, lora=False) -> Model:
    """The same weights, and adapters that change something, for any group."""
    model = Model(group, config, bias, lora)
    torch.manual_seed(0)
    plain = Model(bias=bias, lora=lora)
    for B in plain.experts.lora_B.values() if lora else ():
        nn.init.normal_(B, std=0.1)
    model.load_state_dict(plain.state_dict())
    return model


def stored(group=None) -> nn.Module:
    """The same model with its experts stored in FP8, with other scales each."""
    model, (ranks, rank) = make(), (1, 0) if group is None else (group.size(), group.rank())
    factors = torch.exp2(torch.arange(EXPERTS) % 3).view(-1, 1, 1)
    weights = [Fp8Weight.quantize(w * factors) for w in model.experts.adaptable().values()]
    own = [Fp8Weight(*(t.chunk(ranks)[rank] for t in w)) for w in weights]
    model.experts = RoutedExperts.from_fp8(*own, ep_group=group)
    return model


def data(group=None, step=0) -> tuple[Tensor, Tensor]:
    """This rank's tokens, or all."""
    generator = torch.Generator().manual_seed(step % 2)
    x = torch.randn(TOKENS, D, generator=generator)
    target = x @ torch.randn(D, D, generator=torch.Generator().manual_seed(99)) / D**0.5
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    return x.chunk(ranks)[rank], target.chunk(ranks)[rank]


def backward(model: nn.Module, group=None, step=0) -> Tensor:
    """This rank's loss."""
    x, target = data(group, step)
    loss = F.mse_loss(model(x), target)
    (loss / (1 if group is None else group.size())).backward()
    return loss.detach()


def with_gradients(group=None, config=None, bias=False, lora=False) -> Model:
    backward(model := make(group, config, bias, lora), group)
    if group is not None:
        dist.all_reduce(model.router.weight.grad, group=group)
    return model


def assert_gradients(model: nn.Module, alone: nn.Module, bound: float, count: int) -> None:
    """The two have other tokens in a 128-token block of a weight gradient, and round partial sums to bf16."""
    want = {name: p.grad for name, p in alone.named_parameters() if p.requires_grad}
    got = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    errors = {name: relative_error(grad, want[name]) for name, grad in got.items()}
    assert len(errors) == count and all(error < bound for error in errors.values()), errors


def assert_state(state: dict[str, Any], model: nn.Module) -> None:
    want = model.state_dict()
    assert state.keys() == want.keys() and all(torch.equal(whole(t), want[name]) for name, t in state.items())


def assert_checkpoint(model: nn.Module, into: nn.Module, alone: nn.Module) -> None:
    """A distributed checkpoint of all ranks' model, which ranks read, or each process for itself."""
    state = {name: torch.zeros_like(t) for name, t in into.state_dict().items()}
    with folder() as saved:
        dcp.save(get_model_state_dict(model), checkpoint_id=saved)
        dcp.load(state, checkpoint_id=saved, no_dist=not any(isinstance(t, DTensor) for t in state.values()))
    assert_state(state, alone)


def reference(start: int, model: Model, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    """Loss and norm of each step with all experts in one process, by torch's own tools."""
    run = []
    for i in range(start, STEPS):
        loss = backward(model, step=i)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        run.append((float(loss), float(norm)))
    return run


def assert_steps(run: list[tuple[float, float]], want: list[tuple[float, float]]) -> None:
    """The ranks' mean loss, and the norm on every rank, to 1e-3."""
    ranks = gather_list(run)
    for step, (loss, norm) in enumerate(want[-len(run) :]):
        losses, norms = zip(*(rank[step] for rank in ranks), strict=True)
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-3)
        assert len({*norms}) == 1 and norms[0] == pytest.approx(norm, rel=1e-3)


@contextlib.contextmanager
def folder():
    """One of all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(gather_list(own)[0])
        dist.barrier()


@on_ranks(2, pytest.param(Place(4), marks=pytest.mark.slow, id="4"))
def test_the_pages_loop():
    """The functions of docs/parallel.md, against one process; it, and half as many ranks, resume what is saved."""
    page: dict[str, Any] = {}
    exec(re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs/parallel.md").read_text())[0], page)
    middle = STEPS // 2

    def train(ddp, optimizer, group, first, last):
        steps = [page["step"](ddp, optimizer, group, *data(group, i), MAX_NORM) for i in range(first, last)]
        return [(float(loss), float(norm)) for loss, norm in steps]

    want = reference(0, model := make(), torch.optim.AdamW(model.parameters(), lr=2e-3))
    losses, norms = zip(*want, strict=True)
    assert min(norms) > MAX_NORM and losses[-1] < 0.98 * losses[1]  # it learns, and always clips
    model = make(dist.group.WORLD, Fp8FlowMoEConfig(cache_weights=True))
    ddp, optimizer = page["start"](model, dist.group.WORLD)
    first = train(ddp, optimizer, dist.group.WORLD, 0, middle)
    with folder() as saved:
        page["save"](model, optimizer, saved)
        assert_steps(first + train(ddp, optimizer, dist.group.WORLD, middle, STEPS), want)
        routers = gather_list(model.router.weight.detach())
        assert all(torch.equal(router, routers[0]) for router in routers)
        alone = Model()
        optimizer = torch.optim.AdamW(alone.parameters(), lr=2e-3)
        page["resume"](alone, optimizer, saved)
        assert_steps(reference(middle, alone, optimizer), want)
        half, _ = dist.new_subgroups(dist.get_world_size() // 2)
        torch.manual_seed(7)
        ddp, optimizer = page["start"](model := Model(half), half)
        page["resume"](model, optimizer, saved)
        assert_steps(train(ddp, optimizer, half, middle, STEPS), want)


@on_ranks(2, rows={"2": 2.0, "1": 1.0, "inf": float("inf")})
def test_clipping(norm_type: float):
    """Of experts with biases, and of plain parameters, also in another dtype, in which torch adds their squares."""
    models = with_gradients(dist.group.WORLD, bias=True), with_gradients(bias=True)
    for model in models:
        model.other = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
        model.other.grad = torch.full_like(model.other, 1e-3)
    got = clip_grad_norm_(iter([*models[0].parameters()]), 1e-3, norm_type)
    want = nn.utils.clip_grad_norm_(models[1].parameters(), 1e-3, norm_type)
    assert type(got) is Tensor and relative_error(got, want) < 2e-3 and len({*map(float, gather_list(got))}) == 1
    assert_gradients(*models, 0.01, 8)


@on_ranks(2)
def test_states():
    """Loaded whole and by rank 0, which saves it as a file. A copy and a seed are those of one process. Another rank's
    module is refused."""
    group, alone = dist.group.WORLD, make()
    weights = get_model_state_dict(make(group), options=WHOLE)
    if dist.get_rank() == 0:
        assert_state(safetensors.torch.load(safetensors.torch.save(weights)), alone)
    other = Model(group)
    other.load_state_dict(dict(alone.state_dict()))
    assert_state(other.state_dict(), alone)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other = Model(group)
    set_model_state_dict(other, alone.state_dict() if dist.get_rank() == 0 else {}, options=options)
    assert_state(other.state_dict(), alone)
    x, _ = data(group)
    assert torch.equal(copy.deepcopy(other)(x), other(x))
    drawn = []
    for of in (group, None):
        torch.manual_seed(5)
        drawn.append(Model(of, lora=True).experts.parameters())
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(*drawn, strict=True))
    torch.save(other.experts, buffer := io.BytesIO())
    module = gather_list(buffer.getvalue())[1 - dist.get_rank()]
    with refused("save state dicts with torch.distributed.checkpoint", error=RuntimeError):
        torch.load(io.BytesIO(module), weights_only=False)


@on_ranks(2)
def test_experts_stored_in_fp8():
    """In this process, and offloaded: the checkpoint, the whole state and copies of the model."""
    group, alone = dist.group.WORLD, stored()
    model, (x, _) = stored(group), data(group)
    want = model(x)
    assert relative_error(torch.cat(gather_list(want)), alone(data()[0])) < 5e-3  # ranks' sums are rounded to bf16
    for offloads in (False, True):
        if offloads:
            offload_experts(model, "cpu")
        assert_checkpoint(model, model, alone)
        weights = get_model_state_dict(model, options=WHOLE)
        if dist.get_rank() == 0:
            assert_state(weights, alone)
        model.load_state_dict(alone.state_dict())
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        # The last ranks' experts are views behind the first's.
        for other in (model, copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            assert other.experts.ep_group is group and torch.equal(other(x), want)
    # Routing replay tells a choice of experts from one of groups by the number of all ranks' experts.
    assert [layer.num_experts for layer in routing_replay._layers(model)] == [EXPERTS]
    distributed_data_parallel(stored(dist.new_subgroups(1)[0]))  # of all ranks, beside replicas that do not train


@on_ranks(2, rows={"all_to_all": "all_to_all", "symmetric": "symmetric"})
def test_adapters(dispatch: str):
    """With experts that are spread: the output, gradients, merged weights and saved adapters of one process."""
    group, alone = dist.group.WORLD, with_gradients(lora=True)
    model = with_gradients(group, Fp8FlowMoEConfig(dispatch=dispatch), lora=True)
    assert_gradients(model, alone, 0.01, 7)  # router, A and B of three
    with torch.no_grad():
        y, plain = (m(data()[0]) for m in (alone, make()))
        got = torch.cat(gather_list(model(data(group)[0])))
    assert relative_error(got, y) < 0.01 and relative_error(got - plain, y - plain) < 0.01
    assert_checkpoint(model, Model(lora=True), alone)
    weights = get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        assert_state(weights, alone)
    for m in (model, alone):
        m.experts.merge_lora()
    assert len(alone.state_dict()) == 4
    assert_state(model.state_dict(), alone)


class Optional(nn.Module):
    """A model, and a linear that some ranks leave out of some backwards."""

    def __init__(self, group=None):
        super().__init__()
        self.model = make(group)
        torch.manual_seed(1)
        self.linear = nn.Linear(D, D)

    def forward(self, x, with_linear=True):
        return self.model(x) + self.linear(x) if with_linear else self.model(x)


# In which of a step's backwards gradients are reduced, and whether some leave the linear out.
ACCUMULATED = {"no_sync": ((False, True, True), False), "unused": ((True, True), True)}


@on_ranks(2, rows=ACCUMULATED)
def test_accumulation_under_ddp(row: tuple[tuple[bool, ...], bool]):
    (reduced, unused), group, ranks = row, dist.group.WORLD, dist.get_world_size()
    spread, alone = Optional(group), Optional()
    wrap = functools.partial(distributed_data_parallel, process_group=group, find_unused_parameters=unused)
    _earlier = wrap(spread)  # as by a notebook's cell that ran twice
    ddp = wrap(spread, gradient_as_bucket_view=unused)
    for _ in range(2):
        for i, reduces in enumerate(reduced):
            uses = [not unused or i == rank == 0 for rank in range(ranks)]
            for x, uses_linear in zip(data(step=i)[0].chunk(ranks), uses, strict=True):
                (alone(x, uses_linear).square().mean() / ranks).backward()
            with contextlib.nullcontext() if reduces else ddp.no_sync():
                (ddp(data(group, i)[0], uses[group.rank()]).square().mean() / ranks).backward()
        assert_gradients(spread.linear, alone.linear, 1e-3, 2)
        assert_gradients(spread.model, alone.model, 0.01, 4)
        for p in (*spread.parameters(), *alone.parameters()):
            p.grad = None
    del ddp, _earlier
    gc.collect()
    spread.linear(torch.ones(D)).sum().backward()
    assert torch.equal(spread.linear.bias.grad, torch.ones(D))


SHARDED = {"rest": ("rest", False), "both_lora": ("both", True), "fp8": ("fp8", False), "fp8_lora": ("fp8", True)}


@on_ranks(4, rows=SHARDED)
def test_fsdp(row: tuple[str, bool]):
    """Of all but the experts; of both, over a mesh with two dims, and gathered in FP8."""
    kind, lora = row
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = make(dist.group.WORLD if kind == "rest" else mesh["ep"], lora=lora)
    if kind != "rest":
        with refused("fully_shard"):
            distributed_data_parallel(copy.deepcopy(model))
        fully_shard(model.experts, mesh=mesh["dp"])
    if kind == "fp8":
        model.experts.gather_in_fp8()
    fully_shard(model, **({"ignored_params": set(model.experts.parameters())} if kind == "rest" else {}))
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)  # gloo has no other
    backward(model, dist.group.WORLD)
    alone = with_gradients(lora=lora)
    assert_gradients(model, alone, 0.01 if lora else 5e-3, 7 if lora else 4)
    assert relative_error(clip_grad_norm_(model.parameters(), 1e9), clip_grad_norm_(alone.parameters(), 1e9)) < 1e-3
    assert_checkpoint(model, Model(lora=lora), alone)
    if kind == "fp8" and not lora:
        torch.manual_seed(5)
        one = RoutedExperts(EXPERTS, D, H)
        torch.manual_seed(5)
        model.experts.reset_parameters()
        assert torch.equal(model.experts.w1.full_tensor(), one.w1)
