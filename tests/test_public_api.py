"""What a user without a trainer meets: the module, the example, determinism."""

import copy
import itertools
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.layer import DEVICE, CastCounter, D, E, H, K, T, make_layer
from tests.processes import ROOT, run_script, run_workers
from titan_fp8moe import Adapter, Fp8FlowMoEConfig, Lora, RoutedExperts, SharedExperts, recipe, routed_experts
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.nn.parallel import local_of

LOSS = r"last loss ([+-][\d.]+)% from (?:bf16|fp32)"
EXAMPLES = [  # what each prints, with the largest of its numbers
    ("plain_pytorch", "", LOSS, [2]),
    pytest.param("plain_pytorch", "--compile", LOSS, [2], marks=pytest.mark.slow),  # test_compiling.py has Inductor
    ("finetune_transformers", "--steps 6 --tiny", LOSS, [2]),
    pytest.param("lora", "--steps 10", rf"{LOSS}[\s\S]* ([\d.]+) merged", [5, 0.25], marks=pytest.mark.slow),
    pytest.param("fp8_weights", "", f"\\b{2 * 8 * 3} of them in FP8", [], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options", "said", "most"), EXAMPLES)
def test_examples(name, options, said, most):
    done = run_script(f"examples/{name}.py", *options.split(), gpu=torch.cuda.is_available())
    match = re.search(said, done.stdout)
    assert done.returncode == 0 and match, done.stdout + done.stderr
    assert all(abs(float(number)) < bound for number, bound in zip(match.groups(), most, strict=True))


def test_example_on_two_processes():
    done = run_workers(str(ROOT / "examples/plain_pytorch.py"), 2)
    match = re.search(LOSS, done.stdout)
    assert match and abs(float(match[1])) < 2, done.stdout + done.stderr


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_what_a_module_draws(group, activation, bias):
    """As nn.Linear: the same for any number of experts, over a group, and beside biases or a gate. Experts differ, and
    what is drawn next does not depend on their number."""

    def draw(num_experts=E, **options):
        torch.manual_seed(0)
        return RoutedExperts(num_experts, D, H, **(dict(activation=activation, bias=bias) | options)), torch.rand(1)

    (module, after), one, spread = draw(), draw(1), draw(ep_group=group)
    others = draw(bias=False), draw(activation="swiglu")
    assert torch.equal(one[1], after) and torch.equal(spread[1], after)
    for (other, _), name in itertools.product((one, spread, *others), ("w1", "w2")):
        assert torch.equal(local_of(other.get_parameter(name))[0], module.get_parameter(name)[0])
    for name, p in module.named_parameters():
        assert 0.9 < p.abs().max() * (H if name in ("w2", "b2") else D) ** 0.5 <= 1
    rows = [w.flatten()[:8] for p in module.parameters() for w in p]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


class ScaledExperts(RoutedExperts):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.gate = torch.nn.Parameter(torch.ones(1))
        self.reset_parameters()

    def forward(self, x, topk_ids, topk_scores, **options):
        return super().forward(x, topk_ids, topk_scores * 2.0, **options)


def test_forward_takes_plain_tensors():
    """As checkpoint(experts.forward, ...), subclasses and hooks call it. A subclass initializes its own parameters."""
    x, scores, ids, _ = make_layer()
    module = ScaledExperts(E, D, H, device=DEVICE)
    assert module.gate == 1
    want = routed_experts(x, module.w1, module.w2, module.w3, ids, scores * 2)
    assert torch.equal(module(x, ids, scores), want)
    assert torch.equal(checkpoint(module.forward, x, ids, scores, use_reentrant=False), want)
    handle = module.register_forward_pre_hook(lambda module, args: (*args[:2], args[2] / 2), prepend=True)
    assert torch.equal(module(x, ids, scores * 2), want)
    handle.remove()
    assert torch.equal(copy.deepcopy(module)(x, ids, scores), want)
    assert torch.equal(module(x, ids, scores, meanwhile=lambda: x), want + x)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(D, E, bias=False), ScaledExperts(E, D, H)
        self.shared = [torch.randn(shape) / 10 for shape in ((H, D), (D, H), (H, D))]

    def forward(self, x):
        scores, ids = self.router(x).float().softmax(-1).topk(K)
        return self.experts(x, ids, topk_scores=scores, shared=SharedExperts(*self.shared, scores[:, 0]))


@pytest.mark.parametrize("sharded", [["experts"], [""], ["experts", ""]], ids=["experts", "block", "both"])
@pytest.mark.parametrize("early", [True, False], ids=["hook_first", "fsdp_first"])
def test_scores_stay_fp32_under_fsdp(group, sharded, early):
    """FSDP2's mixed precision casts a module's floating-point arguments, but not the module's scores: for hooks, for
    subclasses and for the layer."""
    block, seen, mesh = Block(), [], init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def hook(_, args, kwargs):
        seen.append([args[0].dtype, args[2].dtype])
        return (*args[:2], args[2] * 1.0), kwargs

    if early:
        block.experts.register_forward_pre_hook(hook, with_kwargs=True)
    for module in map(block.get_submodule, sharded):
        fully_shard(module, mesh=mesh, mp_policy=policy).set_force_sum_reduction_for_comms(True)
    if not early:
        block.experts.register_forward_pre_hook(hook, with_kwargs=True)
    with CastCounter() as counter:
        out = block(torch.randn(16, D))
    seen.append([t.dtype for t in counter.args["routed_experts_forward"][:2]])
    assert counter.args["routed_experts_forward"][3].dtype == torch.float32  # scores of shared experts
    out.sum().backward()
    assert seen == [[torch.bfloat16, torch.float32]] * 2
    assert all(local_of(weight.grad).any() for weight in (block.experts.w1, block.router.weight))


def quantized(rows: int, columns: int):
    q, scale = recipe.quantize_rows(torch.randn(rows, columns, device=DEVICE))
    return q, recipe.column_major(scale)


def flops(run):
    """The result of ``run()``, and what PyTorch counts in it."""
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        return run(), counter.get_total_flops()


def test_flops_are_counted():
    """Of all rows that there is room for. A backward multiplies twice as much, besides the GEMM that it repeats."""
    x, scores, ids, weights = make_layer()
    x, *weights = (t.requires_grad_() for t in (x, *weights))
    dense = ExpertWeights(*(w[0] for w in weights))
    lora = Lora(*(Adapter(w.new_zeros(E, 8, w.shape[2]), w.new_zeros(E, w.shape[1], 8), 1.0) for w in weights))
    rows, tokens, config = recipe.row_capacity(T * K, E), recipe.group_rows(T), Fp8FlowMoEConfig()
    one, both = rows * H * D, (rows + tokens) * H * D
    shared, again = SharedExperts(*dense), Fp8FlowMoEConfig(recompute="experts")
    ends, (x_q, dy_q) = torch.full((E,), 128, dtype=torch.int32, device=DEVICE), (quantized(256, n) for n in (D, H))
    grouped, wgrad = torch.ops.titan_fp8moe.grouped_mm, torch.ops.titan_fp8moe.grouped_mm_wgrad
    w_q, transposed = recipe.quantize_weight(weights[0].detach()), recipe.transpose_pair(*x_q, *dy_q, ends)
    for layer, forward, backward in (
        (lambda: routed_experts(x, *weights, ids, scores), 3 * one, 6 * one),
        (lambda: routed_experts(x, *weights, ids, scores, config=again), 3 * one, 8 * one),
        (lambda: routed_experts(x, *weights, ids, scores, lora=lora), 3 * (one + 8 * rows * (H + D)), None),
        (lambda: routed_experts(x, *weights, ids, scores, shared=shared), 3 * both, 6 * both),
        (lambda: feed_forward(x, dense, config), 3 * tokens * H * D, 6 * tokens * H * D),
        (lambda: linear(x, dense.w1, config), tokens * H * D, 2 * tokens * H * D),
        (lambda: grouped(*x_q, *w_q, ends, torch.bfloat16), 256 * H * D, None),  # whatever rows are in use
        (lambda: wgrad(*transposed[2:], *transposed[:2], ends, torch.bfloat16), 256 * H * D, None),
    ):
        out, counted = flops(layer)
        assert counted == 2 * forward
        if backward is not None:
            assert flops(out.sum().backward)[1] == 2 * backward
