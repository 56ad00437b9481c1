"""Low-rank adapters beside FP8 experts, against fp32 experts whose weights are W + scale B A."""

import copy
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cosine_similarity
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from experiments import reference
from tests.layer import DEVICE, CastCounter, assert_equal, gradients, refused
from tests.processes import run_script
from titan_fp8moe import (
    SAVED_OPS,
    Adapter,
    Fp8Weight,
    Lora,
    RoutedExperts,
    ops,
    recipe,
    routed_experts,
)
from titan_fp8moe.layer.lora import lora_operands, split_lora
from titan_fp8moe.ops import lora as lora_ops
from titan_fp8moe.spec import ExpertSpec

T, D, H, E, K = 300, 256, 128, 8, 3
SCALE = 0.5
NAMES = Lora._fields


def make_layer(tokens=T, hidden=H):
    """x, scores, ids and the frozen weights by name."""
    x, scores, ids, weights = reference.make_layer(tokens, D, hidden, E, K, device=DEVICE)
    return x, scores, ids, dict(zip(NAMES, weights, strict=True))


def make_adapter(weight, rank, size=0.3, dtype=torch.float32):
    """An adapter whose scale * B A has ``size`` times the weight's norm."""
    E, N, K = weight.shape
    A, B = torch.randn(E, rank, K, device=DEVICE), torch.randn(E, N, rank, device=DEVICE)
    B *= size * weight.norm() / (SCALE * (B @ A).norm())
    return Adapter(A.to(dtype), B.to(dtype), SCALE)


def make_lora(weights, rank=8, names=NAMES, **options):
    return Lora(**{name: make_adapter(weights[name], rank, **options) for name in names})


def parts(lora):
    return [t for adapter in lora if adapter is not None for t in adapter[:2]]


def with_tensors(lora, tensors):
    rest = iter(tensors)
    return Lora(*(a and Adapter(next(rest), next(rest), a.scale) for a in lora))


def merged(weights, lora, interleaved=False):
    """W + scale B A; gate and up apart."""
    pairs = zip(weights.values(), lora, strict=True)
    w1, w2, w3 = (w if a is None else w + a.scale * a.B.float() @ a.A.float() for w, a in pairs)
    if w3 is None:
        w1, w3 = w1.unflatten(1, (-1, 2)).unbind(2) if interleaved else w1.chunk(2, 1)
    return w1, w2, w3


def step(x, scores, ids, weights, lora, dout, **options):
    """Of the FP8 layer: the output, and gradients of x, scores and the adapters."""

    def layer(x, scores, *tensors):
        return routed_experts(x, *weights.values(), ids, scores, lora=with_tensors(lora, tensors), **options)

    return gradients(layer, [x, scores, *parts(lora)], dout)


def want_of(x, scores, ids, weights, lora, dout, score_before_experts=False, interleaved=False):
    def layer(x, scores, *tensors):
        values = merged(weights, with_tensors(lora, tensors), interleaved)
        return reference.moe_layer(x, scores, ids, *values, score_before_experts)

    return gradients(layer, [x, scores, *parts(lora)], dout)


def cosine(a, b):
    return float(cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


# --- against fp32 -----------------------------------------------------------------------------------------------------


def test_the_adapters_own_products():
    """Before anything rounds their sum with the base's."""
    x, _, _, weights = make_layer(tokens=512)
    ends = torch.arange(128, 513, 128, dtype=torch.int32, device=DEVICE)
    four = {name: w[:4] for name, w in weights.items()}
    lora = make_lora(four, 16)
    operands = lora_operands(*split_lora(lora, list(four.values())), ExpertSpec())
    for name, gemm, rows in (("w1", operands.w13, x), ("w3", operands.w13, x), ("w2", operands.w2, x[:, :H])):
        q, scale = recipe.quantize_rows(rows)
        got = ops.low_rank(q, recipe.column_major(scale), gemm.A, gemm.B, ends)
        if name != "w2":
            got = got.chunk(2, 1)[name == "w3"]
        adapter = getattr(lora, name)
        want = torch.cat([r @ (SCALE * b @ a).T for r, a, b in zip(rows.split(128), *adapter[:2], strict=True)])
        assert cosine(got, want) > 0.999 and reference.relative_error(got, want) < 0.04


def test_products_on_a_gpu_equal_the_recipe():
    """Both ways also on a CPU, which has the grouped GEMMs that a GPU's way calls."""
    ends = torch.tensor([128, 128, 384], dtype=torch.int32, device=DEVICE)
    x, dy = ((q, recipe.column_major(s)) for q, s in map(recipe.quantize_rows, torch.randn(2, 384, 256, device=DEVICE)))
    a, b = (torch.randn(3, *shape, device=DEVICE).bfloat16() / 16 for shape in ((16, 256), (256, 16)))
    got, want = lora_ops._low_rank(*x, a, b, ends), recipe.low_rank(*x, a, b, ends)
    assert reference.relative_error(got, want) < 0.01
    for got, want in zip(
        lora_ops._low_rank_grads(*x, *dy, a, b, ends), recipe.low_rank_grads(*x, *dy, a, b, ends), strict=True
    ):
        assert got.shape == want.shape and reference.relative_error(got, want) < 0.01


def test_effect_on_4096_tokens():
    """The change of the output regressed on the true one. A token's own change through gate and up drowns in the
    rounding of GEMM 2's operand."""
    x, scores, ids, weights = make_layer(tokens=4096)

    def change(lora):
        values = merged(weights, lora)
        true = reference.moe_layer(x, scores, ids, *values, False) - plain
        beside = routed_experts(x, *weights.values(), ids, scores, lora=lora) - base
        return true, beside, routed_experts(x, *values, ids, scores) - base

    with torch.no_grad():
        plain = reference.moe_layer(x, scores, ids, *weights.values(), False)
        base = routed_experts(x, *weights.values(), ids, scores)
        for names, error_merged in (("w2",), 8), (NAMES, 1.5):
            true, beside, requantized = change(make_lora(weights, 16, names, size=0.01))
            assert abs(float((beside * true).sum() / true.square().sum()) - 1) < 0.03
            errors = [reference.relative_error(got, true) for got in (requantized, beside)]
            assert errors[0] > error_merged * errors[1], errors


@pytest.mark.slow
def test_example():
    done = run_script("examples/lora.py", "--steps", "10", gpu=torch.cuda.is_available())
    match = re.search(r"last loss ([+-][\d.]+)% from bf16\nloss ([\d.]+) beside, ([\d.]+) merged", done.stdout)
    assert match, done.stdout + done.stderr
    assert abs(float(match[1])) < 5 and float(match[2]) < float(match[3]) < 0.25


# --- in the layer -----------------------------------------------------------------------------------------------------


def test_no_adapter_and_an_adapter_of_zeros_have_the_same_bits():
    x, scores, ids, weights = make_layer()
    lora, saved = make_lora(weights, size=0.0), {}
    plain = routed_experts(x, *weights.values(), ids, scores)
    assert torch.equal(routed_experts(x, *weights.values(), ids, scores, lora=lora), plain)
    for w in weights.values():  # of frozen weights the rows are saved for the adapters only
        w.requires_grad_()
    for name, option in (("without", None), ("with", with_tensors(lora, [t.requires_grad_() for t in parts(lora)]))):
        saved[name] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=saved[name]: kept.append(t) or t, lambda t: t):
            routed_experts(x.requires_grad_(), *weights.values(), ids, scores, lora=option)
    extra = len(saved["with"]) - len(saved["without"])
    assert extra == 6 and {t.data_ptr() for t in parts(lora)} <= {t.data_ptr() for t in saved["with"]}


def test_frozen_weights_cost_no_gradient():
    x, scores, ids, weights = make_layer()
    with CastCounter() as counter:
        step(x, scores, ids, weights, make_lora(weights), torch.randn_like(x))
    assert counter.ops["grouped_mm"] == 4 and counter.ops["low_rank"] == 4 and counter.ops["low_rank_grads"] == 2
    assert not counter.ops.keys() & {"grouped_mm_wgrad", "transpose_pair"} and not counter.stray_casts


def test_checkpointing_and_compile():
    x, scores, ids, weights = make_layer()
    lora, dout = make_lora(weights), torch.randn_like(x)

    def layer(x, scores, *tensors):
        return routed_experts(x, *weights.values(), ids, scores, lora=with_tensors(lora, tensors))

    leaves = [x, scores, *parts(lora)]
    want = gradients(layer, leaves, dout)

    def per_op():
        return create_selective_checkpoint_contexts(list(SAVED_OPS))

    for options in ({}, {"context_fn": per_op}):
        got = gradients(lambda *a, options=options: checkpoint(layer, *a, use_reentrant=False, **options), leaves, dout)
        assert_equal(got, want)
    assert_equal(gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), leaves, dout), want)


# --- refusals ---------------------------------------------------------------------------------------------------------


WRONG = {  # of a layer whose w1 has shape (8, 128, 256)
    "shape": (dict(B=lambda a: a.B.mT), "got (8, 8, 256) on cpu and (8, 8, 128)"),
    "peft": (
        dict(A=lambda a: a.A.flatten(0, 1), B=lambda a: a.B.permute(1, 2, 0).flatten(1)),
        "got (64, 256) on cpu and (128, 64)",
    ),
    "columns": (dict(A=lambda a: a.A[:, :, :128]), "got (8, 8, 128) on cpu and (8, 128, 8)"),
    "rank": (dict(B=lambda a: a.B[:, :, :4]), "got (8, 8, 256) on cpu and (8, 128, 4)"),
    "no rank": (dict(A=lambda a: a.A[:, :0], B=lambda a: a.B[:, :, :0]), "a finite scale; got (8, 0, 256)"),
    "device": (dict(A=lambda a: a.A.to("meta")), "got (8, 8, 256) on meta"),
    "all ranks": (dict(A=lambda a: torch.cat([a.A] * 2), B=lambda a: torch.cat([a.B] * 2)), "got (16, 8, 256)"),
    "fp16": (dict(B=lambda a: a.B.half()), "torch.float16, scale"),
    "NaN": (dict(scale=lambda a: float("nan")), "a finite scale; got (8, 8, 256)"),
}


@pytest.mark.parametrize(("change", "got"), WRONG.values(), ids=WRONG)
def test_wrong_adapters_are_refused(change, got):
    x, scores, ids, weights = make_layer()
    w1 = make_adapter(weights["w1"], 8)
    wrong = w1._replace(**{name: of(w1) for name, of in change.items()})
    with refused("A (8, r, 256) and B (8, 128, r)", got.replace("cpu", DEVICE)):
        routed_experts(x, *weights.values(), ids, scores, lora=Lora(w1=wrong))


# --- the module -------------------------------------------------------------------------------------------------------


def make_module(**options):
    return RoutedExperts(E, D, H, device=DEVICE, **options)


def fill(module):
    """Adapters that change the output: those of a new module are zero."""
    for B in module.lora_B.values():
        torch.nn.init.normal_(B, std=0.3)


def adapters_of(module, *names):
    return Lora(*(Adapter(module.lora_A[n], module.lora_B[n], module.lora_scale) for n in names))


def test_module_with_adapters():
    x, scores, ids, _ = make_layer()
    module = make_module()
    want = module(x, ids, scores)
    module.add_lora(16, 8, weights=("w1", "w2"))
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert trained == ["lora_A.w1", "lora_A.w2", "lora_B.w1", "lora_B.w2"]
    assert module.lora_scale == 0.5 and module.lora_A["w1"].abs().max() <= D**-0.5 and not module.lora_B["w1"].any()
    assert torch.equal(module(x, ids, scores), want)
    fill(module)
    out = module(x, ids, scores)
    assert not torch.equal(out, want)
    lora = adapters_of(module, "w1", "w2")
    assert torch.equal(out, routed_experts(x, module.w1, module.w2, module.w3, ids, scores, lora=lora))
    out.square().sum().backward()
    assert module.w1.grad is None and all(p.grad.any() for p in module.parameters() if p.requires_grad)
    assert torch.equal(copy.deepcopy(module)(x, ids, scores), out)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, scores), out)


def test_module_stored_in_fp8(group):
    """As adapters of the dequantized weights in one process; over a group and when merged it refuses."""
    x, scores, ids, weights = make_layer()
    stored = [Fp8Weight.quantize(w) for w in weights.values()]
    module = RoutedExperts.from_fp8(*stored)
    want = module(x, ids, scores)
    module.add_lora(8, 4)
    assert torch.equal(module(x, ids, scores), want)
    assert module.lora_A["w1"].dtype == torch.bfloat16 and module.lora_B["w1"].shape == (E, 2 * H, 8)
    fill(module)
    assert module.lora_scale == 0.5
    lora = adapters_of(module, "w1", "w2")
    gate, down, up = (w.dequantize() for w in stored)
    out = module(x, ids, scores)
    assert torch.equal(out, routed_experts(x, torch.cat([gate, up], 1), down, None, ids, scores, lora=lora))
    out.square().sum().backward()
    assert {name for name, p in module.named_parameters() if p.grad is not None} == {
        f"lora_{factor}.{name}" for factor in "AB" for name in ("w1", "w2")
    }
    with refused("stored in FP8", "dequantize() into RoutedExperts", error=RuntimeError):
        module.merge_lora()
    with refused("over ep_group give routed_experts(lora=)", error=RuntimeError):
        RoutedExperts.from_fp8(*stored, ep_group=group).add_lora(8, 4)


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


def test_module_on_the_meta_device():
    """As large models are made: parameters get their values at the end."""
    module = RoutedExperts(E, D, H, device="meta")
    module.add_lora(8, 8)
    module = module.to_empty(device=DEVICE)
    module.reset_parameters()
    assert module.lora_A["w2"].any() and not module.lora_B["w2"].any() and module.w1.any()


@pytest.mark.parametrize("weights", [("gate",), "w1"])
def test_module_refuses(weights):
    with refused(f"weights = {weights!r} must be a list of names among w1, w2, w3"):
        make_module().add_lora(8, 8, weights=weights)


def test_module_refuses_adapters_in_the_wrong_order(group):
    module = make_module()
    module.add_lora(8, 8)
    with refused("have adapters already; call merge_lora() first", error=RuntimeError):
        module.add_lora(8, 8)
    sharded = RoutedExperts(E, D, H)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with refused("call add_lora before fully_shard", error=RuntimeError):
        sharded.add_lora(8, 8)


@pytest.mark.parametrize("policy", [None, torch.bfloat16], ids=["", "mixed precision"])
def test_adapters_under_fsdp(group, policy):
    """FSDP shards trained adapters and frozen experts in one group."""
    x, scores, ids, _ = make_layer()
    torch.manual_seed(0)
    plain = make_module()
    plain.add_lora(8, 8)
    fill(plain)
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh(DEVICE, (1,))
    fully_shard(sharded, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=policy))
    sharded.set_force_sum_reduction_for_comms(True)
    outs = [module(x.to(policy or x.dtype), ids, scores) for module in (plain, sharded)]
    for out in outs:
        out.square().sum().backward()
    assert reference.relative_error(outs[1].detach(), outs[0].detach()) < 0.05
    for n, B in plain.lora_B.items():
        assert reference.relative_error(sharded.lora_B[n].grad.to_local(), B.grad) < 0.1
    assert sharded.w1.grad is None
    sharded(x.to(policy or x.dtype), ids, scores)  # leaves whole copies of the weights
    for module in (plain, sharded):
        module.merge_lora()
    assert torch.equal(sharded.w1.full_tensor(), plain.w1)
