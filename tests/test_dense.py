"""FFNs and linears with casts of their own: what they cast and compute, modules, tensor parallelism.
tests/test_any_layer.py has numbers, tests/test_cache.py kept and frozen weights."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.layer import DEVICE, CastCounter, refused
from tests.specs import SETTINGS
from tests.test_any_layer import is_dense, lie, steps
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.nn.parallel import local_of

D, H = 256, 176  # H is padded to 256
DEFAULTS = Fp8FlowMoEConfig()


def leaves():
    """x of 200 tokens, and the weights of an FFN."""
    shapes = (2, 100, D), (H, D), (D, H), (H, D)
    return [(torch.randn(shape, device=DEVICE) * 0.05).requires_grad_() for shape in shapes]


def ffn(inputs, config=DEFAULTS):
    return feed_forward(inputs[0], ExpertWeights(*inputs[1:]), config)


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_two_casts(config):
    inputs, w = leaves(), torch.randn(128, D, device=DEVICE, requires_grad=True)
    for layer in (lambda: ffn(inputs, config), lambda: linear(inputs[0], w, config)):
        with CastCounter() as counter:
            out = layer()
            out.backward(torch.randn_like(out))
        assert counter.ops["quantize_group"] == 2 and not counter.ops["quantize_rows"] and not counter.stray_casts
        assert out.shape[:2] == inputs[0].grad.shape[:2] == (2, 100)


def test_only_what_is_needed_is_computed():
    x = torch.randn(50, 256, device=DEVICE, requires_grad=True)
    w = torch.randn(128, 256, device=DEVICE)
    for needed, op in ((x, "grouped_mm_wgrad"), (w.requires_grad_(), "quantize_weight_transposed")):
        out = linear(x.detach().requires_grad_(needed is x), w.detach().requires_grad_(needed is w), DEFAULTS)
        with CastCounter() as counter:
            out.sum().backward()
        assert counter.ops[op] == 0 and counter.ops["quantize_group"] == 1
        assert (counter.ops["grouped_mm"], counter.ops["grouped_mm_wgrad"]) == ((1, 0) if needed is x else (0, 1))


@pytest.mark.parametrize("alone", range(4))
def test_one_leaf_alone_gets_its_gradient(alone):
    inputs = leaves()
    want = torch.autograd.grad(ffn(inputs).square().sum(), inputs)[alone]
    for i, leaf in enumerate(inputs):
        leaf.requires_grad_(i == alone)
    ffn(inputs).square().sum().backward()
    assert [leaf.grad is None for leaf in inputs] == [i != alone for i in range(4)]
    assert torch.equal(inputs[alone].grad, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_can_change_in_place(dtype):
    """As those of ``nn.Linear``: by an activation or a residual."""
    x, *weights = (t.detach().to(dtype).requires_grad_() for t in leaves())
    square = torch.randn(128, D, device=DEVICE, dtype=dtype, requires_grad=True)
    for layer in (lambda: linear(x, square, DEFAULTS), lambda: ffn([x, *weights])):
        (want,), (got,) = (torch.autograd.grad(out.sum(), x) for out in (layer().relu(), layer().relu_()))
        assert torch.equal(got, want)


def test_modules_keep_their_parameter():
    stock = torch.nn.Linear(256, 128, bias=False, device=DEVICE)
    weight = stock.weight
    Fp8FlowLinear.convert(stock, DEFAULTS)
    assert type(stock) is Fp8FlowLinear and stock.weight is weight and list(stock.state_dict()) == ["weight"]
    assert Fp8FlowLinear(256, 128)(torch.randn(4, 256)).shape == (4, 128)
    with refused("only an nn.Linear without a bias"):
        Fp8FlowLinear.convert(torch.nn.Identity(), DEFAULTS)


def test_autocast_and_evaluation():
    inputs = leaves()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert ffn(inputs).dtype == torch.bfloat16
    for layer in (lambda: linear(inputs[0], torch.randn(128, D, device=DEVICE), DEFAULTS), lambda: ffn(inputs)):
        with refused("the result would be torch.float16"), torch.autocast(DEVICE, torch.float16):
            layer()
    with torch.no_grad():
        assert torch.equal(ffn(inputs), ffn([t.requires_grad_() for t in inputs]))


@pytest.mark.parametrize("how", ["rows", "swapped", "wider"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_tensor_parallel_gradients_are_dense(group, how, placement):
    """And lie as their DTensors say, since fused optimizers read memory by its address."""
    mesh, module = init_device_mesh(DEVICE, (1,)), Fp8FlowLinear(128, 256, device=DEVICE)
    values, x = lie(torch.randn(256, 128, device=DEVICE), how), torch.randn(64, 128, device=DEVICE)
    module.weight = torch.nn.Parameter(DTensor.from_local(values, mesh, [placement], run_check=False))
    x = DTensor.from_local(x, mesh, [Shard(1) if placement == Shard(1) else Replicate()], run_check=False)
    (returned,) = torch.autograd.grad(module(x).full_tensor().sum(), module.weight)
    module(x).full_tensor().sum().backward()
    for grad in (returned, module.weight.grad):
        assert is_dense(local_of(grad)) and steps(local_of(grad)) == steps(grad)
    assert how == "wider" or steps(module.weight.grad) == steps(module.weight)
