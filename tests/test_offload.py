"""Experts in host memory: the same bits as on the device, whenever the copies arrive."""

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.layer import assert_equal
from tests.patched import undone
from titan_fp8moe import Fp8FlowMoEConfig, Fp8Weight, RoutedExperts, offload_experts, recipe

D, E, K, T = 256, 4, 2, 48
HIDDEN = 128, 384, 256, 128, 256  # of the layers, unlike in a model


class LateCopies(TorchDispatchMode):
    """Stands for torch.cuda, on a CPU: a device whose copies arrive as late as their events allow.

    Computation runs at once. A copy runs when its event is asked for; from its issue on its target holds NaNs. On a
    GPU it may begin as soon as the events have passed for which its stream has waited, so no later operation may have
    read the target. The log has "c1" where the copy of layer 1 is issued, "u1" where the computation waits for it.
    """

    interrupted = False  # whether the next copy raises

    def __init__(self):
        super().__init__()
        self.names, self.log, self.issued, self.done = {}, [], [], 0
        self.time, self.read, self.Event = 0, {}, Event
        self.current = Stream(self, computes=True)

    def Stream(self, device: torch.device) -> "Stream":
        return Stream(self)

    def current_stream(self, device: torch.device) -> "Stream":
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronized")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.current.computes and func is torch.ops.aten.copy_.default:
            self.issue(*args[:2])
            return args[0]
        if self.current.computes:
            self.time += 1
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self.read[tensor.untyped_storage().data_ptr()] = self.time
        return func(*args, **kwargs or {})

    def issue(self, target: Tensor, source: Tensor) -> None:
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        where, name = target.untyped_storage().data_ptr(), f"c{self.names.get(source.data_ptr())}"
        assert self.read.get(where, 0) <= self.current.behind, "it may overwrite what is still read"
        target.view(torch.uint8).fill_(0x7F)
        self.issued.append((name, target, source))
        if self.log[-1:] != [name]:  # a layer has two weights
            self.log.append(name)


class Stream:
    """The stream of computation, or of copies. ``behind``: the last operation that it has waited for."""

    def __init__(self, device: LateCopies, computes: bool = False):
        self.device, self.computes, self.behind = device, computes, 0

    def wait_event(self, event: "Event") -> None:
        self.behind = max(self.behind, event.behind)
        if not self.computes or not event.copies:
            return
        for _, target, source in self.device.issued[self.device.done : event.copies]:
            target.copy_(source)
        self.device.done = max(self.device.done, event.copies)
        self.device.log.append(f"u{self.device.issued[event.copies - 1][0][1:]}")


class Event:
    copies = behind = 0

    def record(self, stream: Stream) -> None:
        if stream.computes:
            self.behind = stream.device.time
        else:
            self.copies = len(stream.device.issued)


class Layers(nn.Module):
    """MoE layers behind each other, as ``order`` says; all models of a test are equal."""

    cycles = 0

    def __init__(self, recompute="none", lora=False, hidden=HIDDEN, dim=D, device="cpu", **options):
        super().__init__()
        torch.manual_seed(torch.initial_seed())
        self.order, self.checkpointed, self.layers = [*range(len(hidden))], False, nn.ModuleList()
        for H in hidden:
            shapes = (E, 2 * H, dim), (E, dim, H)
            weights = [Fp8Weight.quantize(torch.randn(shape, device=device) * dim**-0.5) for shape in shapes]
            if H == 384:  # a layer whose scales are numbers
                weights = [Fp8Weight(q, 1.3 * recipe.exp2(recipe.exponent(scale))) for q, scale in weights]
            config = Fp8FlowMoEConfig(recompute=recompute)
            self.layers.append(RoutedExperts.from_fp8(*weights, config=config, **options))
        for experts in self.layers if lora else ():
            experts.add_lora(16, 32)
            for B in experts.lora_B.values():
                nn.init.normal_(B, std=0.1)
        self.ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(device)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        for index in self.order:
            call = self.layers[index], x, self.ids, scores
            if self.cycles:
                torch.cuda._sleep(self.cycles)
            if self.checkpointed:
                x = x + checkpoint(*call, use_reentrant=False, preserve_rng_state=False)
            else:
                x = x + call[0](*call[1:])
        return x


def make_inputs(dim: int = D, device: str = "cpu") -> list[Tensor]:
    x = torch.randn(T, dim, dtype=torch.bfloat16, device=device)
    return [x.requires_grad_(), torch.rand(T, K, device=device).requires_grad_()]


def step(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [*inputs, *(p for p in model.parameters() if p.requires_grad)]
    out = model(*inputs)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves, materialize_grads=True)]


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], tuple[Any, LateCopies]]:
    """A model with its experts offloaded, beside the device of late copies that it then needs."""

    def make(model: nn.Module) -> tuple[nn.Module, LateCopies]:
        device = LateCopies()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_device_module", lambda _: device)
            offload_experts(model, "cpu")
        experts = next(host.experts for module in model.modules() if (host := vars(module).get("fp8_host")))
        device.names = {q.data_ptr(): str(index) for index, layer in enumerate(experts.values) for q in layer}
        return model, device

    return make


def twins(offloaded, *args: Any, **kwargs: Any) -> tuple[Any, Any, LateCopies]:
    return Layers(*args, **kwargs), *offloaded(Layers(*args, **kwargs))


def check(there: nn.Module, here: nn.Module, device: LateCopies, *inputs: Tensor) -> None:
    want = step(there, given := [*inputs] or make_inputs())
    with device:
        assert_equal(step(here, given), want)


FORWARD = "c0 c1 u0 c2 u1 c3 u2 c4 u3 u4"
AGAIN = "u0 c2 u1 c3 u2 c4 u3 u4"  # the first two are still there
BACKWARD = "u4 c2 u3 c1 u2 c0 u1 u0"


WAYS = [("none", True, False), ("activation", False, True), ("experts", False, False), ("experts", True, True)]


@pytest.mark.parametrize("recompute, lora, checkpointed", WAYS)
def test_bits_and_order(offloaded, recompute: str, lora: bool, checkpointed: bool):
    """Each layer's copy is issued before the layer ahead of it runs, in both directions, into two buffers. In a pass
    without a backward one copy is late: its first."""
    there, here, device = twins(offloaded, recompute, lora)
    there.checkpointed = here.checkpointed = checkpointed
    backward = re.sub(r"(u\d)", r"\1 \1", BACKWARD) if checkpointed else BACKWARD
    for forward in (FORWARD, AGAIN):
        device.log = []
        check(there, here, device)
        assert device.log == f"{forward} {backward}".split()
    for forward in (AGAIN, FORWARD):
        with torch.no_grad(), device:
            inputs, device.log = make_inputs(), []
            assert torch.equal(here(*inputs), there(*inputs))
            assert device.log == forward.split()
    storages = {target.untyped_storage().data_ptr(): target.untyped_storage() for _, target, _ in device.issued}
    assert [storage.nbytes() for storage in storages.values()] == 2 * [3 * E * D * max(HIDDEN)]


@pytest.mark.parametrize("count, order", [(1, [0]), (2, [0, 1]), (5, [0, 1, 1, 2, 0]), (5, [4, 2, 0, 3, 1])])
def test_other_orders(offloaded, count: int, order: list[int]):
    """A layer used twice, and orders that no guess meets. One or two layers stay on the device."""
    there, here, device = twins(offloaded, "none", lora=True, hidden=HIDDEN[:count])
    there.order = here.order = order
    for checkpointed in (False, True):
        there.checkpointed = here.checkpointed = checkpointed
        check(there, here, device)
    assert count > 2 or sorted(e for e in device.log if e[0] == "c") == ["c0", "c1"][:count]


def test_nothing_is_saved(offloaded):
    """Autograd keeps no values of a buffer, which will hold another layer, nor of the host's memory."""
    here, device = offloaded(Layers("none", lora=True))
    experts, saved = here.layers[0].fp8_host.experts, set()
    pack = lambda t: saved.add(t.untyped_storage().data_ptr()) or t if t.numel() else t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), device:
        here(*make_inputs())
    values = [b.bytes for b in experts.buffers] + [q for layer in experts.values for q in layer]
    assert saved and not saved & {q.untyped_storage().data_ptr() for q in values}


def test_new_values(offloaded):
    """Of a state dict, also where a buffer holds the old ones."""
    there, other = Layers(), Layers()
    here, device = offloaded(Layers())
    other.load_state_dict({name: t.flip(0) for name, t in there.state_dict().items()})
    inputs = make_inputs()
    with device:
        assert torch.equal(here(*inputs), there(*inputs))
        state = {name: tensor.clone() for name, tensor in here.state_dict().items()}
        device.log = []
        here.load_state_dict(other.state_dict())
        assert "synchronized" in device.log  # before values change that pending copies read
        here.order = other.order = [4, 3, 0]  # the buffers hold 3 and 4
        assert_equal(step(here, inputs), step(other, inputs))
        there.order = here.order
        here.load_state_dict(state, assign=True)
        assert_equal(step(here, inputs), step(there, inputs))


def test_changes_between_forward_and_backward(offloaded):
    """Another's weights are used for one call. In place a change is refused, as on the device."""
    there, here, device = twins(offloaded, hidden=HIDDEN[:1])
    (layer,), inputs = here.layers, make_inputs()
    x, scores = inputs
    state = {name: t.flip(0) for name, t in there.layers[0].state_dict().items()}
    want = torch.autograd.grad(there(*inputs).sum(), inputs)
    with device:
        out = here(*inputs)
        torch.func.functional_call(layer, state, (x, here.ids, scores))
        assert_equal(torch.autograd.grad(out.sum(), inputs), want)
        for name in ("w13", "w2_scale"):
            out = here(*inputs)
            getattr(layer, name).zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_interrupted_copy(offloaded):
    """Ctrl-C in a notebook, and the same cell again."""
    there, here, device = twins(offloaded)
    inputs = make_inputs()
    want = step(there, inputs)
    with device:
        device.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            here(*inputs)
        assert_equal(step(here, inputs), want)


def test_again_after_adapters(offloaded):
    here, _ = offloaded(Layers())
    for experts in here.layers:
        experts.add_lora(16, 32)
    there = copy.deepcopy(here)  # not offloaded
    here, device = offloaded(here)
    check(there, here, device)


def test_expert_parallel(offloaded, group):
    """Each rank offloads its own experts. Its tokens travel between two autograd functions."""
    check(*twins(offloaded, ep_group=group))


def test_compiled_code_breaks_its_graph(offloaded):
    """And an export is refused."""
    there, here, device = twins(offloaded)
    inputs = make_inputs()
    check(there, torch.compile(here, backend="aot_eager"), device, *inputs)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="the host orders copies of offloaded experts"):
        torch.compile(here, backend="aot_eager", fullgraph=True)(*inputs)
    with torch.no_grad(), pytest.raises(RuntimeError, match="export before offload_experts"):
        torch.export.export(here, tuple(inputs), strict=False)


def test_ddp_leaves_them_out(offloaded, group):
    """It takes parameters on one kind of device only."""
    here, _ = offloaded(Layers("none", lora=True))
    for experts in here.layers:
        for name in ("w13", "w2"):  # as host memory is to a GPU
            setattr(experts, name, nn.Parameter(getattr(experts, name).to("meta"), requires_grad=False))
    DistributedDataParallel(here, process_group=group)


def test_refusals(monkeypatch: pytest.MonkeyPatch):
    """A model that does not fit is left where it was."""
    with pytest.raises(ValueError, match=r"Linear has no experts stored in FP8.*RoutedExperts\.from_fp8"):
        offload_experts(nn.Linear(2, 2))
    model, ranks = Layers().cpu(), 10**9
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with pytest.raises(MemoryError, match=f"needs {ranks * 3 * E * D * max(HIDDEN):,} bytes .* and [0-9]"):
        offload_experts(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_moved_models(offloaded, tmp_path: Path):
    """All but the values goes, as trainers move them. A copy has memory of its own, ordinary and unknown to the first's
    copies."""
    here, _ = offloaded(Layers(lora=True))
    torch.save(here, tmp_path / "model.pt")
    for other in (copy.deepcopy(here), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert all(experts.fp8_host is None for experts in other.layers)
        assert all(p.is_meta for p in other.to("meta").parameters())
    before = [name for name, _ in here.layers[0].named_parameters()]
    after = {name: p.is_meta for name, p in here.to("meta").layers[0].named_parameters()}
    assert [*after] == before and {name for name, moved in after.items() if not moved} == {"w13", "w2"}


@undone()
def test_transformers(offloaded):
    """Experts of its FP8 checkpoints: output and gradient, and that they are frozen and run here."""
    pytest.importorskip("transformers", "5.17")
    from tests import test_transformers as of_transformers
    from titan_fp8moe.transformers import register

    register()
    there = nn.ModuleList([of_transformers.fp8_experts()[0].cpu().requires_grad_(False)])
    here, device = offloaded(copy.deepcopy(there))
    inputs = [t.cpu() for t in of_transformers.make_inputs(torch.bfloat16)]
    dout = torch.randn_like(inputs[0])
    want = of_transformers.step(there[0], "fp8_flow", inputs, dout)
    with device:
        assert_equal(of_transformers.step(here[0], "fp8_flow", inputs, dout), want)
    assert_equal(here.state_dict().values(), there.state_dict().values())
    here[0].down_proj.requires_grad_(True)
    with pytest.raises(ValueError, match="freeze it with requires_grad_"), device:
        here[0](*inputs)
    here[0].config._experts_implementation = "grouped_mm"
    with pytest.raises(ValueError, match="Quantized would run as grouped_mm, which cannot read host memory"):
        offload_experts(here, "cpu")


@pytest.mark.gpu
def test_on_a_gpu():
    """Bits with copies that are late and with a computation that is; without a sync or an allocation of their own."""
    sizes: dict[str, Any] = dict(hidden=(1024,) * 5, dim=1024, device="cuda")
    there, here = Layers("none", lora=True, **sizes), Layers("none", lora=True, **sizes).cpu()
    before = torch.cuda.memory_allocated()
    offload_experts(here)
    here.to("cuda")
    assert all(q.is_pinned() for layer in here.layers[0].fp8_host.experts.values for q in layer)
    on_card = [p for experts in here.layers for name, p in experts.named_parameters() if name not in ("w13", "w2")]
    assert all(p.is_cuda for p in on_card)
    buffers = 2 * 3 * E * 1024 * 1024
    here.ids = there.ids
    assert torch.cuda.memory_allocated() - before <= buffers + sum(p.nbytes for p in on_card) + 2**20
    for checkpointed, cycles in itertools.product((False, True), (0, 2_000_000)):
        for model in (there, here):
            model.checkpointed, model.cycles = checkpointed, cycles
        for _ in range(3):
            inputs, counts = make_inputs(1024, "cuda"), [torch.cuda.memory_stats()["allocation.all.allocated"]]
            want = step(there, inputs)
            counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
            torch.cuda.set_sync_debug_mode("error")
            try:
                got = step(here, inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
            assert_equal(got, want)
        assert counts[2] - counts[1] == counts[1] - counts[0]
    with torch.no_grad():
        assert torch.equal(here(*inputs), there(*inputs))
