"""Low-rank adapters beside FP8 experts: their effect, cost and modules. tests/test_any_layer.py has their numbers."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from experiments import reference
from tests.layer import DEVICE, CastCounter, D, E, H, gradients, make_layer, refused, saved_bytes
from titan_fp8moe import Adapter, Fp8Weight, Lora, RoutedExperts, recipe, routed_experts
from titan_fp8moe.ops import lora as lora_ops

SCALE = 0.5
NAMES = Lora._fields


def make_lora(weights, rank=8, names=NAMES, size=0.3):
    """Adapters whose scale * B A has ``size`` times the weight's norm."""
    lora = {}
    for name, w in zip(NAMES, weights, strict=True):
        A, B = torch.randn(E, rank, w.shape[2], device=DEVICE), torch.randn(E, w.shape[1], rank, device=DEVICE)
        lora[name] = Adapter(A, B * (size * w.norm() / (SCALE * (B @ A).norm())), SCALE) if name in names else None
    return Lora(**lora)


def parts(lora):
    return [t for adapter in lora for t in adapter[:2]]


def test_products_on_a_gpu_equal_the_recipe():
    """Both ways also on a CPU, which has the grouped GEMMs that a GPU's way calls."""
    ends = torch.tensor([128, 128, 384], dtype=torch.int32, device=DEVICE)
    x, dy = ((q, recipe.column_major(s)) for q, s in map(recipe.quantize_rows, torch.randn(2, 384, 256, device=DEVICE)))
    a, b = (torch.randn(3, *shape, device=DEVICE).bfloat16() / 16 for shape in ((16, 256), (256, 16)))
    got = lora_ops._low_rank(*x, a, b, ends), *lora_ops._low_rank_grads(*x, *dy, a, b, ends)
    want = recipe.low_rank(*x, a, b, ends), *recipe.low_rank_grads(*x, *dy, a, b, ends)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and reference.relative_error(g, w) < 0.01


def test_effect_on_4096_tokens():
    """The change of the output regressed on the true one. A token's own change through gate and up drowns in the
    rounding of GEMM 2's operand."""
    x, scores, ids, weights = make_layer(tokens=4096)
    plain = reference.moe_layer(x, scores, ids, *weights, False)
    base = routed_experts(x, *weights, ids, scores)
    for names, error_merged in (("w2",), 8), (NAMES, 1.5):
        lora = make_lora(weights, 16, names, size=0.01)
        merged = [w if a is None else w + a.scale * a.B @ a.A for w, a in zip(weights, lora, strict=True)]
        true = reference.moe_layer(x, scores, ids, *merged, False) - plain
        beside = routed_experts(x, *weights, ids, scores, lora=lora) - base
        requantized = routed_experts(x, *merged, ids, scores) - base
        assert abs(float((beside * true).sum() / true.square().sum()) - 1) < 0.03
        errors = [reference.relative_error(got, true) for got in (requantized, beside)]
        assert errors[0] > error_merged * errors[1], errors


def test_what_adapters_cost():
    """Frozen weights have no gradient. Adapters of zeros change no bit, and beside trained weights save themselves."""
    x, scores, ids, weights = make_layer()
    lora = make_lora(weights)

    def layer(x, scores, *tensors):
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return routed_experts(x, *weights, ids, scores, lora=Lora(*(Adapter(*pair, SCALE) for pair in pairs)))

    with CastCounter() as counter:
        gradients(layer, [x, scores, *parts(lora)], torch.randn_like(x))
    assert counter.ops["grouped_mm"] == 4 and counter.ops["low_rank"] == 4 and counter.ops["low_rank_grads"] == 2
    assert not counter.ops.keys() & {"grouped_mm_wgrad", "transpose_pair"} and not counter.stray_casts
    for w in weights:  # of frozen weights the rows are saved for the adapters only
        w.requires_grad_()
    zeros = [t.requires_grad_() for t in parts(make_lora(weights, size=0.0))]
    want, without = saved_bytes(lambda: routed_experts(x, *weights, ids, scores))
    got, beside = saved_bytes(lambda: layer(x, scores, *zeros))
    assert torch.equal(got, want) and 0 <= beside - without - sum(t.nbytes for t in zeros) < 1000


# --- the module -------------------------------------------------------------------------------------------------------


def make_module(**options):
    return RoutedExperts(E, D, H, device=DEVICE, **options)


def fill(module):
    """Adapters that change the output: those of a new module are zero."""
    for B in module.lora_B.values():
        torch.nn.init.normal_(B, std=0.3)


@pytest.mark.parametrize("stored", [False, True], ids=["", "stored in FP8"])
def test_module_with_adapters(stored):
    """New ones change nothing. Stored experts have one adapter for gate and up, whose weights are one."""
    x, scores, ids, weights = make_layer()
    module = RoutedExperts.from_fp8(*map(Fp8Weight.quantize, weights)) if stored else make_module()
    want = module(x, ids, scores)
    module.add_lora(16, 8, **{} if stored else dict(weights=("w1", "w2")))
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert trained == ["lora_A.w1", "lora_A.w2", "lora_B.w1", "lora_B.w2"]
    assert module.lora_scale == 0.5 and module.lora_A["w1"].abs().max() <= D**-0.5 and not module.lora_B["w1"].any()
    assert module.lora_A["w1"].dtype == (torch.bfloat16 if stored else torch.float32)
    assert torch.equal(module(x, ids, scores), want)
    fill(module)
    out = module(x, ids, scores)
    assert not torch.equal(out, want)
    out.square().sum().backward()
    assert [name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()] == trained
    assert torch.equal(copy.deepcopy(module)(x, ids, scores), out)


def test_module_saves_and_merges_its_adapters():
    x, scores, ids, _ = make_layer()
    module = make_module(dtype=torch.bfloat16)
    module.add_lora(4, 8, dtype=torch.float32)
    fill(module)
    adapters = {name: t for name, t in module.state_dict().items() if "lora_" in name}
    assert len(adapters) == 6 and adapters["lora_A.w1"].dtype == torch.float32
    other = make_module(dtype=torch.bfloat16)
    other.load_state_dict({name: getattr(module, name) for name in NAMES})
    other.add_lora(4, 8, dtype=torch.float32)
    other.load_state_dict(adapters, strict=False)
    assert torch.equal(other(x, ids, scores), module(x, ids, scores))
    want = [getattr(module, n).float() + 2 * module.lora_B[n] @ module.lora_A[n] for n in NAMES]
    module.merge_lora()
    assert all(torch.equal(getattr(module, n), w.bfloat16()) for n, w in zip(NAMES, want, strict=True))
    assert [*module.state_dict()] == [*NAMES] and module.lora() is None
    module.add_lora(8, 8)


def test_module_refuses(group):
    for weights, options in (("gate",), {}), ("w1", {}), (["w3"], dict(activation="relu2")):
        with refused("", error=KeyError):
            make_module(**options).add_lora(8, 8, weights=weights)
    module = make_module()
    module.add_lora(8, 8)
    with refused("have adapters already; call merge_lora() first", error=RuntimeError):
        module.add_lora(8, 8)
    sharded = RoutedExperts(E, D, H)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with refused("call add_lora before fully_shard", error=RuntimeError):
        sharded.add_lora(8, 8)
    stored = [Fp8Weight.quantize(w) for w in make_layer().weights]
    with refused("stored in FP8", "dequantize() into RoutedExperts", error=RuntimeError):
        RoutedExperts.from_fp8(*stored).merge_lora()
    with refused("over ep_group give routed_experts(lora=)", error=RuntimeError):
        RoutedExperts.from_fp8(*stored, ep_group=group).add_lora(8, 4)


def test_merging_under_fsdp(group):
    """A forward leaves whole copies of the weights. tests/distributed has gradients."""
    x, scores, ids, _ = make_layer()
    plain = make_module()
    plain.add_lora(8, 8)
    fill(plain)
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh(DEVICE, (1,)))
    sharded(x, ids, scores)
    for module in (plain, sharded):
        module.merge_lora()
    assert torch.equal(sharded.w1.full_tensor(), plain.w1)
