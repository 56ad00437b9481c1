"""Experts spread over ranks under PyTorch's own tools, against one process that holds all experts.

    torchrun --nproc_per_node N parallel_worker.py OUT_DIR CASE...

A case is a function of this file, with ``_N`` added. Rank 0 writes its result to OUT_DIR.
"""

import contextlib
import copy
import functools
import gc
import io
import re
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.runner import gather_list, run_all, whole
from titan_fp8moe import (
    Fp8FlowMoEConfig,
    RoutedExperts,
    clip_grad_norm_,
    distributed_data_parallel,
    parameter_groups,
)

ROOT = Path(__file__).parents[2]
EXPERTS, D, H, K, TOKENS, STEPS = 8, 128, 128, 2, 1024, 12
MAX_NORM = 0.005  # clips every step
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
CACHED = Fp8FlowMoEConfig(cache_weights=True)


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
    torch.manual_seed(0)
    model = Model(group, config, bias, lora)
    torch.manual_seed(0)
    plain = Model(bias=bias, lora=lora)
    for B in plain.experts.lora_B.values() if lora else ():
        nn.init.normal_(B, std=0.1)
    model.load_state_dict(plain.state_dict())
    return model


def error(a, b) -> float:
    return float((a - b).norm() / b.norm())


def data(group=None, step=0):
    """This rank's tokens, or all."""
    generator = torch.Generator().manual_seed(step % 2)
    x = torch.randn(TOKENS, D, generator=generator)
    target = x @ torch.randn(D, D, generator=torch.Generator().manual_seed(99)) / D**0.5
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    return x.chunk(ranks)[rank], target.chunk(ranks)[rank]


def gradients(group=None, config=None, bias=False, lora=False) -> Model:
    model = make(group, config, bias, lora)
    x, target = data(group)
    (F.mse_loss(model(x), target) / (1 if group is None else group.size())).backward()
    if group is not None:
        dist.all_reduce(model.router.weight.grad, group=group)
    return model


def reference(start: int, model: Model, optimizer: torch.optim.Optimizer):
    """All experts in one process, by torch's own tools."""
    losses, norms = [], []
    for i in range(start, STEPS):
        x, target = data(step=i)
        loss = F.mse_loss(model(x), target)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def page() -> dict:
    """The functions of docs/parallel.md."""
    blocks = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs/parallel.md").read_text())
    names: dict = {}
    exec(blocks[0], names)
    return names


def train(loop: dict, ddp, optimizer, group, start: int, end: int):
    """Losses and norms, each by rank."""
    losses, norms = [], []
    for i in range(start, end):
        loss, norm = loop["step"](ddp, optimizer, group, *data(group, i), MAX_NORM)
        losses.append(gather_list(float(loss)))
        norms.append(gather_list(float(norm)))
    return losses, norms


def loop(out: Path) -> dict:
    group, functions = dist.group.WORLD, page()
    one = make()
    expected = reference(0, one, torch.optim.AdamW(one.parameters(), lr=2e-3))
    model = make(group)
    ddp, optimizer = functions["start"](model, group)
    losses, norms = train(functions, ddp, optimizer, group, 0, STEPS // 2)
    functions["save"](model, optimizer, out / f"saved_{group.size()}")
    more = train(functions, ddp, optimizer, group, STEPS // 2, STEPS)
    routers = gather_list(model.router.weight.detach())
    return {
        "losses": losses + more[0], "norms": norms + more[1], "expected": expected,
        "routers": all(torch.equal(r, routers[0]) for r in routers),
    }  # fmt: skip


def resumed(out: Path) -> dict:
    """From 4 ranks."""
    group, functions = dist.group.WORLD, page()
    torch.manual_seed(7)
    model = Model(group)
    ddp, optimizer = functions["start"](model, group)
    functions["resume"](model, optimizer, out / "saved_4")
    losses, norms = train(functions, ddp, optimizer, group, STEPS // 2, STEPS)
    return {"losses": losses, "norms": norms}


def alone(out: Path) -> dict:
    """From 4 ranks, without a group."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    page()["resume"](model, optimizer, out / "saved_4")
    losses, norms = reference(STEPS // 2, model, optimizer)
    return {"losses": [[loss] for loss in losses], "norms": [[norm] for norm in norms]}


def refusal(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def tools(out: Path) -> dict:
    """What each tool makes of the same gradients; True where it is what one process has, or the words of a refusal."""
    group, results = dist.group.WORLD, {}
    model, alone = gradients(group), gradients()
    experts, want = model.experts, dict(alone.named_parameters())

    def equal(found):
        return all(torch.equal(v, want[k]) for k, v in found.items())

    results["gradients"] = {n: error(whole(p.grad), want[n].grad) for n, p in model.named_parameters()}
    biased, of_all = gradients(group, bias=True), dict(gradients(bias=True).named_parameters())
    results["gradients with biases"] = {n: error(whole(p.grad), of_all[n].grad) for n, p in biased.named_parameters()}
    for norm_type in (2.0, 1.0, float("inf")):
        both = [make(group), make()]
        for m, source in zip(both, (model, alone), strict=True):
            for p, q in zip(m.parameters(), source.parameters(), strict=True):
                p.grad = q.grad.clone()
        got = clip_grad_norm_(both[0].parameters(), 1e-3, norm_type)
        expected = nn.utils.clip_grad_norm_(both[1].parameters(), 1e-3, norm_type)
        clipped = error(both[0].experts.w2.grad.full_tensor(), both[1].experts.w2.grad)
        same = len({float(n) for n in gather_list(float(got))}) == 1
        results[f"clip {norm_type}"] = (
            error(got, expected) < 2e-3 and clipped < 2e-3 and same and type(got) is torch.Tensor
        )
    got, expected = (nn.utils.clip_grad_norm_(m.experts.parameters(), 1e9) for m in (model, alone))
    results["torch's clip of experts alone"] = error(got.full_tensor(), expected) < 2e-3
    results["torch's clip of both"] = refusal(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    results["fully_shard"] = bool(refusal(lambda: fully_shard(make(group), mesh=experts.w1.device_mesh)))

    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=out / f"weights_{group.size()}")
    dcp.load(state, checkpoint_id=out / f"weights_{group.size()}")
    results["checkpoint"] = all(torch.equal(whole(v), want[k]) for k, v in state.items())
    weights = get_model_state_dict(model, options=WHOLE)
    written = safetensors.torch.load(safetensors.torch.save(weights)) if dist.get_rank() == 0 else {}
    results["whole state dict"] = equal(written)
    other = Model(group)
    other.load_state_dict(dict(alone.state_dict()))
    results["load whole"] = equal(get_model_state_dict(other, options=WHOLE))
    other = Model(group)
    source = alone.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(other, source, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    results["load from rank 0"] = torch.equal(other.experts.w1.full_tensor(), want["experts.w1"])
    own = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    results["load a rank's own"] = refusal(lambda: Model(group).load_state_dict(own))
    drawn = []
    for of in (group, None):
        torch.manual_seed(5)
        drawn.append(Model(of, lora=True).experts.parameters())
    results["seed"] = all(torch.equal(a.full_tensor(), b) for a, b in zip(*drawn, strict=True))
    if dist.get_rank() == dist.get_world_size() - 1:
        buffer = io.BytesIO()
        torch.save(experts, buffer)
    messages = [buffer.getvalue() if dist.get_rank() == dist.get_world_size() - 1 else None]
    dist.broadcast_object_list(messages, src=dist.get_world_size() - 1)
    load = refusal(lambda: torch.load(io.BytesIO(messages[0]), weights_only=False))
    results["another rank's module"] = gather_list(load)[0]
    copies = torch.optim.swa_utils.AveragedModel(make(group), avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.5))
    copies.update_parameters(make(group))
    copies.update_parameters(other)
    average = (want["experts.w1"] + other.experts.w1.full_tensor()) / 2
    results["average"] = torch.allclose(copies.module.experts.w1.full_tensor(), average, atol=1e-6)
    x, _ = data(group)
    results["copy"] = torch.equal(copy.deepcopy(other)(x), other(x))
    # The last: some of them step a part of the parameters before torch fails.
    results["ddp"] = refusal(lambda: DistributedDataParallel(model))
    results["ddp of experts"] = refusal(lambda: DistributedDataParallel(experts))
    results["fused"] = refusal(lambda: torch.optim.AdamW(model.parameters(), fused=True).step())
    results["foreach"] = refusal(lambda: torch.optim.SGD(model.parameters(), 1.0, foreach=True).step())
    results["zero"] = refusal(lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW).step())
    return results


def adapters(out: Path) -> dict:
    """Beside experts that are spread: the output, gradients, merged weights and saved adapters of one process."""
    group, results = dist.group.WORLD, {}
    alone = gradients(lora=True)
    with torch.no_grad():
        y, plain = (model(data()[0]) for model in (alone, make()))
    want = dict(alone.named_parameters())
    for dispatch in ("all_to_all", "symmetric"):
        model = gradients(group, Fp8FlowMoEConfig(dispatch=dispatch), lora=True)
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        results[dispatch] = {n: error(whole(p.grad), want[n].grad) for n, p in trained}
        with torch.no_grad():
            got = torch.cat(gather_list(model(data(group)[0])))
        results[dispatch] |= {"output": error(got, y), "change": error(got - plain, y - plain)}
    folder = out / f"adapters_{group.size()}"
    dcp.save(model.state_dict(), checkpoint_id=folder)
    state = Model(lora=True).state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    results["loaded by one process"] = all(torch.equal(t, want[n]) for n, t in state.items())
    weights = get_model_state_dict(model, options=WHOLE)
    results["whole state dict"] = all(torch.equal(t, want[n]) for n, t in weights.items())
    for m in (model, alone):
        m.experts.merge_lora()
    pairs = [*zip(model.parameters(), alone.parameters(), strict=True)]
    results["merged"] = len(pairs) == 4 and all(torch.equal(whole(p), q) for p, q in pairs)
    return results


class Optional(nn.Module):
    """A model, and a linear that some ranks leave out of some backwards."""

    def __init__(self, group=None):
        super().__init__()
        self.model = make(group)
        torch.manual_seed(1)
        self.linear = nn.Linear(D, D)

    def forward(self, x, with_linear=True):
        return self.model(x) + self.linear(x) if with_linear else self.model(x)


def accumulation(out: Path) -> dict:
    """Gradients of several backwards, after each step, against one process. They are reduced in those that are True."""
    group, ranks, results = dist.group.WORLD, dist.get_world_size(), {}

    def run(name, *reduced, unused=False, **kwargs):
        spread, alone = Optional(group), Optional()
        wrap = functools.partial(distributed_data_parallel, process_group=group, find_unused_parameters=unused)
        _earlier, ddp = wrap(spread), wrap(spread, **kwargs)  # as by a notebook's cell that ran twice
        for step in range(2):
            for i, reduces in enumerate(reduced):
                uses = [not unused or i == rank == 0 for rank in range(ranks)]
                for x, uses_linear in zip(data(step=i)[0].chunk(ranks), uses, strict=True):
                    (alone(x, uses_linear).square().mean() / ranks).backward()
                with contextlib.nullcontext() if reduces else ddp.no_sync():
                    (ddp(data(group, i)[0], uses[group.rank()]).square().mean() / ranks).backward()
            want = {n: p.grad for n, p in alone.named_parameters()}
            results[f"{name}, step {step}"] = {n: error(whole(p.grad), want[n]) for n, p in spread.named_parameters()}
            for p in (*spread.parameters(), *alone.parameters()):
                p.grad = None
        return spread, ddp

    run("two", True, True)
    run("no_sync", False, True)
    run("no_sync between", True, False, True)
    run("unused", True, True, unused=True)
    spread, ddp = run("unused views", True, True, unused=True, gradient_as_bucket_view=True)
    del ddp
    gc.collect()
    spread.linear(torch.ones(D)).sum().backward()
    results["without DDP"] = torch.equal(spread.linear.bias.grad, torch.ones(D))
    return results


def optimizers(out: Path) -> dict:
    """Weights after 3 steps, against one process."""
    group, results = dist.group.WORLD, {}

    def run(model, optimizers, group):
        for i in range(3):
            x, target = data(group, i)
            (F.mse_loss(model(x), target) / (1 if group is None else group.size())).backward()
            for p in model.parameters():
                if group is not None and not isinstance(p, DTensor):
                    dist.all_reduce(p.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return get_model_state_dict(model, options=WHOLE)

    def adamw(parameters, kind=torch.optim.AdamW, **kwargs):
        return kind(parameters, lr=1e-2, eps=1e-2, **kwargs)  # this eps: small gradients make small steps

    def zero(parameters):
        replicated, experts = parameter_groups(parameters)
        zero = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
        return [adamw(replicated["params"], zero), adamw(experts["params"])]

    alone = make()
    want, start = run(alone, [adamw(alone.parameters())], None), make().state_dict()
    kinds = {
        "fused": lambda p: [adamw(parameter_groups(p), fused=True)],
        "foreach": lambda p: [adamw(parameter_groups(p), foreach=True)],
        "default": lambda p: [adamw(p)],
        "cached": lambda p: [adamw(p)],
        "zero": zero,
    }
    for name, optimizer in kinds.items():
        model = make(group, CACHED if name == "cached" else None)
        got = run(model, optimizer(list(model.parameters())), group)
        if dist.get_rank() == 0:
            results[name] = {k: error(v - start[k], want[k] - start[k]) for k, v in got.items()}
    return results


def sharded(out: Path) -> dict:
    """Gradients under FSDP of the rest, and with 4 ranks of the experts as well, against one process."""
    group, ranks, results = dist.group.WORLD, dist.get_world_size(), {}

    def run(name, model, rest=False):
        lora = model.experts.lora_scale is not None
        want = dict(gradients(lora=lora).named_parameters())
        fully_shard(model, **({"ignored_params": set(model.experts.parameters())} if rest else {}))
        for m in model.modules():
            if isinstance(m, FSDPModule):
                m.set_gradient_divide_factor(1.0)
                m.set_force_sum_reduction_for_comms(True)  # gloo has no other
        x, target = data(group)
        (F.mse_loss(model(x), target) / ranks).backward()
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        results[name] = {n: error(p.grad.full_tensor(), want[n].grad) for n, p in trained}
        norm = clip_grad_norm_(model.parameters(), 1e9)
        results[f"{name} norm"] = error(norm, nn.utils.clip_grad_norm_(want.values(), 1e9))
        dcp.save(get_model_state_dict(model), checkpoint_id=out / f"fsdp_{name}_{ranks}")
        state = Model(lora=lora).state_dict()
        dcp.load(state, checkpoint_id=out / f"fsdp_{name}_{ranks}", no_dist=True)
        results[f"{name} saved"] = all(torch.equal(v, want[n]) for n, v in state.items())

    run("rest", make(group), rest=True)
    run("rest with adapters", make(group, lora=True), rest=True)
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = make(mesh["ep"])
        results["ddp of half"] = refusal(lambda: distributed_data_parallel(copy.deepcopy(model)))
        fully_shard(model.experts, mesh=mesh["dp"])
        run("both", model)
        model = make(mesh["ep"], lora=True)
        fully_shard(model.experts, mesh=mesh["dp"])
        run("both with adapters", model)
        for name, lora in (("fp8 with adapters", True), ("fp8", False)):
            model = make(mesh["ep"], lora=lora)
            fully_shard(model.experts, mesh=mesh["dp"])
            model.experts.gather_in_fp8()
            run(name, model)
        torch.manual_seed(5)
        one = Model().experts
        torch.manual_seed(5)
        nn.Linear(D, EXPERTS, bias=False)
        model.experts.reset_parameters()
        results["reset"] = torch.equal(model.experts.w1.full_tensor(), one.w1)
    return results


def run(case: str, out: Path) -> dict:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return globals()[case.rsplit("_", 1)[0]](out)


if __name__ == "__main__":
    run_all(run)
