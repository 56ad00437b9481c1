"""FP8 checkpoints as DeepSeek, Qwen, GLM and MiniMax publish them, whose block scales are no powers of two.

They are small, and written here without the package. Transformers loads them as on a machine with a GPU.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

from transformers.integrations.finegrained_fp8 import FP8Linear  # noqa: E402
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer  # noqa: E402

from experiments.reference import moe_layer, relative_error  # noqa: E402
from tests.layer import DEVICE, assert_equal, refused  # noqa: E402
from tests.patched import undone  # noqa: E402
from tests.processes import run_checks  # noqa: E402
from tests.test_export_transformers import config_of  # noqa: E402
from titan_fp8moe import Fp8Weight, RoutedExperts, routed_experts  # noqa: E402
from titan_fp8moe import transformers as adapter  # noqa: E402
from titan_fp8moe.export_fp8 import fp8_tensors  # noqa: E402

FP8 = torch.float8_e4m3fn
D, H, E, K, T = 256, 128, 4, 2, 96
BF16 = "embed_tokens", "lm_head", ".gate.weight", "norm"  # what none of the four quantizes
SCALES = {
    "DeepseekV3": torch.float32,
    "Qwen3Moe": torch.bfloat16,
    "Glm4Moe": torch.float32,
    "MiniMaxM2": torch.float32,
}


class Model(NamedTuple):
    loaded: Any
    written: dict[str, Tensor]
    experts: str  # the last layer's


def blocks(value: Tensor) -> Tensor:
    """A matrix as blocks (N / 128, 128, K / 128, 128) fp32, padded with zeros."""
    N, K = value.shape
    padded = torch.nn.functional.pad(value.float(), (0, -K % 128, 0, -N % 128))
    return padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))


def stored(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and ``weight_scale_inv`` of a matrix whose blocks differ in size."""
    value = blocks(value)
    value = value * 2 ** torch.randn(value.shape[0], 1, value.shape[2], 1)
    scale = (value.abs().amax((1, 3)) / 448).to(dtype)
    q = (value / scale.float()[:, None, :, None]).clamp(-448, 448).to(FP8)
    return q.flatten(2).flatten(0, 1), scale


def dequantized(q: Tensor, scale: Tensor) -> Tensor:
    """float64 values of (..., N, K)."""
    factors = scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return q.double() * factors[..., : q.shape[-2], : q.shape[-1]]


def write(family: str, folder: Path) -> dict[str, Tensor]:
    dense = dict(first_k_dense_replace=1) if family in ("DeepseekV3", "Glm4Moe") else {}
    config = config_of(family, hidden_size=D, moe_intermediate_size=H, intermediate_size=H, **dense)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors[name] = value
        if value.dim() == 2 and not any(part in name for part in BF16):
            N, K = value.shape
            q, tensors[f"{name}_scale_inv"] = stored(value, SCALES[family])
            tensors[name] = q[:N, :K].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    gates = [name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight")]
    config = json.loads((folder / "config.json").read_text()) | dict(
        quantization_config=dict(
            quant_method="fp8",
            fmt="e4m3",
            activation_scheme="dynamic",
            weight_block_size=[128, 128],
            modules_to_not_convert=["lm_head", *gates],
        )
    )
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture(autouse=True)
def registered():
    with undone():
        adapter.register()
        yield


@pytest.fixture(params=SCALES)
def model(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    torch.manual_seed(0)
    written = write(request.param, tmp_path)
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="fp8_flow"
    )
    return Model(loaded.requires_grad_(False).to(DEVICE), written, adapter.converted(loaded)[-1])


def projections(model: Model) -> list[list[Tensor]]:
    """Gate, down and up of the last layer's experts as they were written: (E, N, K) and their scales."""
    parts = ("w1", "w2", "w3") if any(".w1.weight" in name for name in model.written) else ("gate", "down", "up")
    found = []
    for part in parts:
        names = [name for name in model.written if re.search(rf"layers\.1\..*\.experts\.\d+\.{part}", name)]
        values = [name for name in names if name.endswith(".weight")]
        pairs = values, [f"{name}_scale_inv" for name in values]
        found.append([torch.stack([model.written[name] for name in half]).to(DEVICE) for half in pairs])
    return found


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(T, D, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.rand(T, E, device=DEVICE).topk(K).indices
    return x, ids, torch.rand(T, K, device=DEVICE)


def step(call: Any, x: Tensor, scores: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), scores.detach().requires_grad_()]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def test_values_and_scales_are_moved_bit_for_bit(model: Model):
    """Loaded, with gate and up in one, and sent again. Transformers keeps bf16 scales as fp32 numbers."""
    experts = model.loaded.get_submodule(model.experts)
    gate, down, up = projections(model)
    q = torch.cat([gate[0].view(torch.uint8), up[0].view(torch.uint8)], 1).view(FP8)
    scale = torch.cat([gate[1], up[1]], 1).float()
    assert_equal([experts.gate_up_proj, experts.gate_up_proj_scale_inv], [q, scale])
    assert_equal([experts.down_proj, experts.down_proj_scale_inv], [down[0], down[1].float()])
    sent = {name: t.cpu() for bucket in fp8_tensors(model.loaded) for name, t in bucket.items()}
    assert sent.keys() == model.written.keys()
    written = {n: t.float() if n.endswith("_scale_inv") else t for n, t in model.written.items()}
    assert_equal([sent[name] for name in written], written.values())


def test_output_and_gradients(model: Model):
    """Near those in float64, without a bias: the fitted slope is 1. ``RoutedExperts.from_fp8`` gives the same bits."""
    experts = model.loaded.get_submodule(model.experts)
    weights, (x, ids, scores), dout = projections(model), make_inputs(), torch.randn(T, D, device=DEVICE)
    w1, w2, w3 = (dequantized(*pair) for pair in weights)
    got = step(lambda x, scores: experts(x, ids, scores), x, scores, dout.bfloat16())
    wide = x.double(), scores.double(), dout.bfloat16().double()
    want = step(lambda x, scores: moe_layer(x, scores, ids, w1, w2, w3, False), *wide)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 0.1
        assert float((a.double() * b).sum() / b.square().sum()) == pytest.approx(1, abs=0.01)
    blocks = [Fp8Weight.of_blocks(*pair) for pair in weights]
    module = RoutedExperts.from_fp8(*blocks)
    assert_equal(step(lambda x, scores: module(x, ids, scores), x, scores, dout.bfloat16()), got)


def test_adapters_train(model: Model):
    """50 steps of LoRA beside the stored experts."""
    for module in list(model.loaded.modules()):
        if isinstance(module, FP8Linear):  # which needs a GPU
            values = dequantized(module.weight, module.weight_scale_inv).bfloat16()
            module.weight = torch.nn.Parameter(values, requires_grad=False)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(target_modules=[], target_parameters=parameters, r=8, lora_alpha=16)
    trained = peft.get_peft_model(model.loaded, config).train()
    adapters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(adapters, lr=5e-3)
    tokens, losses = torch.randint(3, 256, (1, 48), device=DEVICE), []
    for _ in range(50):
        loss = trained(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tenths = torch.tensor(losses).view(5, 10).mean(1)
    assert (tenths.diff() < 0).all() and tenths[-1] < 0.9 * tenths[0], losses


# --- the module -------------------------------------------------------------------------------------------------------


def make_weights(dtype: torch.dtype) -> list[Fp8Weight]:
    shapes = (H, D), (D, H), (H, D)
    pairs = [[stored(torch.randn(shape) * 0.05, dtype) for _ in range(E)] for shape in shapes]
    return [Fp8Weight(*(torch.stack(t).to(DEVICE) for t in zip(*pair, strict=True))) for pair in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_keeps_bits_of_scales(dtype: torch.dtype):
    """Through casts, graphs and state dicts. It reads no scales of another dtype as its own."""
    weights, (x, ids, scores) = make_weights(dtype), make_inputs()
    experts = RoutedExperts.from_fp8(*weights)
    want = routed_experts(x, *weights, ids, scores)
    state, ints = experts.state_dict(), torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(experts.bfloat16()(x, ids, scores), want)
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, ids, scores), want)
    assert_equal([state["w13_scale"].view(dtype)], [torch.cat([weights[0].scale, weights[2].scale], 1)])
    assert_equal([state["w2_scale"]], [weights[1].scale.view(ints)])
    assert_equal([w.scale for w in experts.weights()], [state["w13_scale"].view(dtype), weights[1].scale])
    zeros = (Fp8Weight(*map(torch.zeros_like, w)) for w in weights)
    other = RoutedExperts.from_fp8(*zeros)
    other.load_state_dict(state)
    assert torch.equal(other(x, ids, scores), want)
    powers = RoutedExperts.from_fp8(*map(Fp8Weight.quantize, (w.dequantize() for w in weights)))
    with refused(f"w2_scale is {ints}", "from_fp8", error=RuntimeError):
        powers.load_state_dict(state)
    w1, w2, w3 = weights
    with refused("gate and up must share E, K and the dtype of scales"):
        routed_experts(x, w1, w2, Fp8Weight.quantize(w3.dequantize()), ids, scores)


@pytest.mark.parametrize("hidden", [80, 200])
def test_gate_and_up_that_were_padded_as_one_are_refused(hidden: int):
    """They have the padded size of a larger H, of which gate would read rows of up."""
    w1, w2, w3 = (torch.randn(E, *shape, device=DEVICE) for shape in ((hidden, D), (D, hidden), (hidden, D)))
    fused, down = Fp8Weight.quantize(torch.cat([w1, w3], 1)), Fp8Weight.quantize(w2)
    with refused("padded as one", "as w1 and w3"):
        RoutedExperts.from_fp8(fused, down)
    RoutedExperts.from_fp8(Fp8Weight.quantize(w1), down, Fp8Weight.quantize(w3))


EXPERT_PARALLEL = """
import torch, torch.distributed as dist
from tests.layer import assert_equal
from tests.test_fp8_checkpoints import D, E, T, make_inputs, make_weights, step
from titan_fp8moe import Fp8Weight, RoutedExperts

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, weights, (x, ids, scores), dout = dist.get_rank(), make_weights(torch.float32), make_inputs(), torch.randn(T, D)
own = slice(rank * E // 2, (rank + 1) * E // 2)
local = [Fp8Weight(w.q[own].contiguous(), w.scale[own].contiguous()) for w in weights]
results = []
for experts in (RoutedExperts.from_fp8(*weights), RoutedExperts.from_fp8(*local, ep_group=dist.group.WORLD)):
    results.append(step(lambda x, scores: experts(x, ids, scores), x, scores, dout.bfloat16()))
for got, want in zip(results[1], results[0]):  # a token's sums over ranks are rounded to bf16 on the way
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2 * float(want.abs().max()))
print("all checks passed")
dist.destroy_process_group()
"""


def test_expert_parallelism():
    run_checks("-c", 2, EXPERT_PARALLEL, cpu_only=True)
