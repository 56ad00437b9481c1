"""Routing replay: every router of Transformers' registry and torchtitan's, what gradients mean, and what is refused."""

import contextlib
import functools
import importlib
import inspect
import re
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", "5.17")

import titan_fp8moe.torchtitan  # noqa: F401  without a GPU, the router needs its patches
from experiments.reference import relative_error
from tests.layer import DEVICE, D, E, H, K, assert_equal
from tests.processes import run_script
from tests.test_transformers import CLASSES, make_config, make_model, make_tokens
from titan_fp8moe import Fp8Weight, RoutedExperts, record_routing, replay_routing
from titan_fp8moe import transformers as adapter

B, S = 2, 24
EXPERTS, TOP_K = 6, 2  # of the models


@pytest.fixture(autouse=True)
def registered() -> None:
    adapter.register()


def choose(*shape: int, experts: int = EXPERTS, top_k: int = TOP_K) -> Tensor:
    return torch.rand(*shape, experts, device=DEVICE).topk(top_k).indices


def spied(experts: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Ids and scores of each call that is going to come."""
    calls: list[tuple[Tensor, Tensor]] = []
    experts.register_forward_pre_hook(lambda _, args: calls.append(args[1:3]))
    return calls


BLOCKS = dict(
    scoring_func="sigmoid", score_func="sigmoid", expert_selection_fn="sigmoid", topk_method="group_limited_greedy",
    n_group=3, num_group=3, num_expert_groups=3, topk_group=2, mlp_layer_types=["sparse"] * 4, mlp_bias=False,
    moe_k=TOP_K, top_k_experts=TOP_K, moe_topk=TOP_K, router_hidden_size=D, use_expert_bias=True, norm_topk_prob=True,
    n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1, moe_shared_expert_intermediate_size=H,
    shared_expert_intermediate_size=H, shared_intermediate_size=H, shared_experts_intermediate_size=H,
    shared_expert_combination_strategy="sum", routed_scaling_factor=1.5, route_scale=1.5, router_scaling_factor=1.5,
    output_multiplier=1.5, moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=30.0, moe_norm_min=1e-12,
    rms_norm_eps=1e-6, router_jitter_noise=0.0, input_jitter_noise=0.0,
)  # fmt: skip


class BlockConfig(SimpleNamespace):
    """Settings of any MoE block, under all the names that families have; None for others."""

    def __init__(self):
        super().__init__(**BLOCKS | vars(make_config()))

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class RouterAndExperts(nn.Module):
    """Of families whose decoder layer holds both beside attention."""

    def __init__(self, module: Any, config: BlockConfig, experts: str):
        super().__init__()
        self.router = getattr(module, experts.replace("Experts", "Router"))(config)
        self.experts = getattr(module, experts)(config)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, D)
        _, scores, ids = self.router(flat)
        return self.experts(flat, ids, scores).view(x.shape)


def make_block(module_name: str, name: str) -> nn.Module:
    """The block that holds the experts class ``name`` and its router, with random parameters."""
    module = importlib.import_module(module_name)
    made = re.compile(rf"self\.experts = {name}\(")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    holders = [c for c in classes if "__init__" in vars(c) and made.search(inspect.getsource(c.__init__))]
    if "gemma" in module_name:
        block = RouterAndExperts(module, BlockConfig(), name)
    else:
        wanted = inspect.signature(holders[0].__init__).parameters
        given = dict(config=BlockConfig(), layer_idx=1, num_experts=EXPERTS, intermediate_size=H)
        block = holders[0](**{key: value for key, value in given.items() if key in wanted})
    for param in block.parameters():
        nn.init.normal_(param, std=0.05)
    return block.to(DEVICE)


@pytest.mark.parametrize("module,name", CLASSES, ids=[name for _, name in CLASSES])
def test_every_router_of_the_registry(module: str, name: str):
    """Its own choice gives its own bits, another one that one's scores and gradients. Tokens without ids are routed."""
    block, x = make_block(module, name), torch.randn(B, S, D, device=DEVICE)

    def run() -> Tensor:
        out = block(x)
        return out[0] if isinstance(out, tuple) else out

    calls = spied(block.experts)
    with record_routing(block) as routing:
        want = run()
    ids = routing.routed_experts()
    assert ids.shape == (B, S, 1, TOP_K)
    with replay_routing(block, ids):
        assert torch.equal(run(), want)
    if name == "PhimoeExperts":
        with pytest.raises(RuntimeError, match="ran other experts"), replay_routing(block, choose(B, S, 1)):
            run()
        return
    with replay_routing(block, ids.flip(-1)):
        run()
    (own_ids, own_scores), _, (flipped_ids, flipped_scores) = calls
    assert torch.equal(flipped_ids, own_ids.flip(-1))
    torch.testing.assert_close(flipped_scores, own_scores.flip(-1))
    others = choose(B * S)
    others[::3] = -1
    with replay_routing(block, others.view(B, S, 1, TOP_K)):
        out = run()
        (out * torch.randn_like(out)).sum().backward()
    replayed, scores = calls[-1]
    assert torch.equal(replayed, torch.where(others < 0, own_ids, others)) and (scores != 0).all()
    routers = [p for n, p in block.named_parameters() if ("gate" in n or "router" in n) and "expert" not in n]
    assert any(param.grad is not None and param.grad.any() for param in routers)


class Model(nn.Module):
    """Experts of a plain PyTorch model, with ``more`` modules, and ways to choose experts beside those of one topk."""

    def __init__(self, chooses: str = "", **more: nn.Module):
        super().__init__()
        self.router, self.ffn = nn.Linear(D, E, bias=False), RoutedExperts(E, D, H)
        self.chooses = chooses
        self._modules |= more

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        if self.chooses == "table":  # without a topk, as in the first layers of DeepSeek-V4
            ids = torch.arange(len(x) * K, device=x.device).view(-1, K) % E
            return self.ffn(x, ids, scores.gather(-1, ids))
        values, ids = scores.max(-1, keepdim=True) if self.chooses == "max" else scores.topk(K)
        if self.chooses == "sorted and dropped":
            ids, order = ids.sort()
            values = values.gather(-1, order)
            ids = ids.masked_fill(values < values.mean(), -1)
        if self.chooses in ("before noise", "max"):
            self.margin = (scores + torch.rand_like(scores)).topk(K).values
        return self.ffn(x, ids, values)


@pytest.mark.parametrize("stored", [False, True])
def test_plain_pytorch(stored: bool):
    """Gradients are those of the replayed scores. Ids have any int dtype, and may be NumPy's, as vLLM returns them."""
    model, x = Model().to(DEVICE), torch.randn(S, D, device=DEVICE)
    if stored:
        model.ffn = RoutedExperts.from_fp8(*(Fp8Weight.quantize(w) for w in model.ffn.adaptable().values()))
    ids = choose(S, experts=E, top_k=K)
    with replay_routing(model, ids[:0].unsqueeze(-2)):
        assert model(x[:0]).shape == (0, D)
    with replay_routing(model, ids.unsqueeze(-2)):
        got = model(x)
        grad = torch.autograd.grad(got.sum(), model.router.weight)
    want = model.ffn(x, ids, model.router(x).softmax(-1).gather(1, ids))
    assert_equal([got, *grad], [want, *torch.autograd.grad(want.sum(), model.router.weight)])
    for dtype in ("uint8", "uint64", "int16"):
        for given in (ids.cpu().numpy().astype(dtype), ids.to(getattr(torch, dtype))):
            with replay_routing(model, given[:, None]):
                assert torch.equal(model(x), got)
    with record_routing(model) as routing:
        model(x)
    assert routing.routed_experts().shape == (S, 1, K)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_same_experts(reentrant: bool):
    model, ids, results = Model().to(DEVICE), choose(S, 1, experts=E, top_k=K), []
    x, calls = torch.randn(S, D, device=DEVICE, requires_grad=True), spied(model.ffn)
    for run in (model, functools.partial(checkpoint, model, use_reentrant=reentrant)):
        model.zero_grad()
        with replay_routing(model, ids):
            out = run(x)
            out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    assert_equal(*results)
    assert len(calls) == 3  # the backward has repeated it
    assert all(torch.equal(chosen, ids[:, 0]) for chosen, _ in calls)


def test_generation_and_training_agree():
    """The routing of prompt and of single tokens, in the order of the sequence; the last token was never fed."""
    model, prompt = make_model().eval(), make_tokens(length=9)
    model.set_experts_implementation("fp8_flow")
    options = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, output_logits=True)
    with record_routing(model) as routing:
        done = model.generate(prompt, return_dict_in_generate=True, **options)
    routed = routing.routed_experts()
    assert routed.shape == (2, 13, 2, TOP_K)
    routed = F.pad(routed, (0, 0, 0, 0, 0, 1), value=-1)
    with torch.no_grad(), replay_routing(model, routed), record_routing(model) as again:
        logits = model(input_ids=done.sequences).logits
    assert relative_error(logits[:, 8:-1], torch.stack(done.logits, 1)) < 3e-2
    assert again.routed_experts().shape == (2, 14, 2, TOP_K)


@pytest.mark.parametrize(("routed", "said"), [
    (choose(S, experts=E, top_k=K), "must be ids"),
    (choose(S, 1, experts=E, top_k=K) > 2, "must be ids .* torch.bool"),
    (choose(S, 3, experts=E, top_k=K), "of the model's 1 MoE layers"),
    (choose(S - 1, 1, experts=E, top_k=K), "got 24 tokens, but routed_experts has 23"),
    (choose(S, 1, experts=E, top_k=2), "ran other experts"),
])  # fmt: skip
def test_routing_that_does_not_fit_is_refused(routed: Tensor, said: str):
    model = Model().to(DEVICE)
    with pytest.raises((ValueError, RuntimeError), match=said), replay_routing(model, routed.to(DEVICE)):
        model(torch.randn(S, D, device=DEVICE))
    assert "forward" not in vars(model)


@pytest.mark.parametrize(("model", "said"), [
    (nn.Sequential(OrderedDict(experts=nn.Linear(D, D))), "experts ran other experts"),  # without ids
    (nn.Linear(D, D), "Linear has no RoutedExperts"),
    (Model(second_ffn=RoutedExperts(E, D, H)), "ffn and second_ffn are chosen in one module's forward"),
    (Model(second=Model()), "ffn and second.ffn are chosen in one module's forward"),
])  # fmt: skip
def test_models_that_cannot_be_followed_are_refused(model: nn.Module, said: str):
    """Of two routers in one forward a record would hold the second one's choice twice."""
    ids = choose(S, 1, experts=E, top_k=K).to("cpu")
    for context in (record_routing(model), replay_routing(model, ids)):
        with pytest.raises((ValueError, RuntimeError), match=said), context:
            model(torch.randn(S, D))


def test_where_forwards_and_backwards_belong():
    model, ids = Model(), choose(S, 1, experts=E, top_k=K)
    with replay_routing(model, ids):
        model(torch.randn(S, D))
        with pytest.raises(RuntimeError, match="leave the other replay_routing first"):
            replay_routing(model, ids).__enter__()
    with pytest.raises(RuntimeError, match="no routing was replayed in ffn"), replay_routing(model, ids):
        pass
    with replay_routing(model, ids):
        out = model(torch.randn(S, D))
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside"):
        out.sum().backward()


def test_experts_in_a_wrapper_are_one_layer():
    model = Model()
    model.experts = torch.compile(model.ffn, backend="eager")
    del model.ffn
    model.forward = lambda x: model.experts(x, *model.router(x).softmax(-1).topk(K)[::-1])
    ids, x = choose(S, 1, experts=E, top_k=K), torch.randn(S, D)
    with replay_routing(model, ids), record_routing(model) as routing:
        model(x)
    assert torch.equal(routing.routed_experts().to(ids), ids)


@pytest.mark.parametrize(("chooses", "recorded", "replayed"), [
    ("before noise", False, True), ("max", False, False), ("sorted and dropped", True, True), ("table", True, False),
])  # fmt: skip
def test_a_topk_that_is_not_the_choice(chooses: str, recorded: bool, replayed: bool):
    """It is neither recorded nor replayed for the router's. Order and dropped tokens do not matter."""
    model, x, ids = Model(chooses), torch.randn(S, D), choose(S, 1, experts=E, top_k=K)
    other = pytest.raises(RuntimeError, match="ffn ran other experts")
    with contextlib.nullcontext() if recorded else other, record_routing(model) as routing:
        out = model(x)
        assert routing.routed_experts().shape == (S, 1, K)
    with contextlib.nullcontext() if replayed else other, replay_routing(model, ids):
        model(x)
    if recorded:
        with replay_routing(model, routing.routed_experts()):
            assert torch.equal(model(x), out)


@pytest.mark.slow
def test_blocks_of_compiled_models_run_eagerly():
    model, tokens = make_model(num_hidden_layers=1).eval(), make_tokens()
    model.set_experts_implementation("fp8_flow")
    compiled, routed = torch.compile(model, backend="aot_eager"), choose(*tokens.shape, 1)
    with torch.no_grad():
        live = compiled(tokens).logits
        with replay_routing(model, routed):
            want, got = model(tokens).logits, compiled(tokens).logits
        assert torch.equal(compiled(tokens).logits, live)
    assert relative_error(got, want) < 1e-2 < relative_error(got, live)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="torch.compiler.disable"), replay_routing(model, routed):
        whole(tokens)


@pytest.mark.slow
def test_example():
    """Sampling with the training's experts agrees far better, and replay takes the largest differences away."""
    done = run_script("examples/grpo_step.py", gpu=torch.cuda.is_available())
    rows = re.findall(r"^ *(fp8_flow|batched_mm) +(no|yes) +([\d.]+) +([\d.]+)", done.stdout, re.MULTILINE)
    assert len(rows) == 4, done.stdout + done.stderr
    mean = {(sampled, replay): float(value) for sampled, replay, value, _ in rows}
    largest = {(sampled, replay): float(value) for sampled, replay, _, value in rows}
    assert mean["fp8_flow", "yes"] < 0.1 * mean["batched_mm", "yes"] < 0.1 * mean["batched_mm", "no"]
    assert largest["batched_mm", "yes"] < 0.7 * largest["batched_mm", "no"]
