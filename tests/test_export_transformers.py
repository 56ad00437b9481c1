"""FP8 exports that Transformers loads: tiny models of its own, saved, exported and read back."""

import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.layer import assert_equal
from titan_fp8moe import recipe
from titan_fp8moe.export_fp8 import fp8_tensors

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from experiments.reference import relative_error  # noqa: E402
from titan_fp8moe.export_fp8 import __main__ as export_fp8  # noqa: E402
from titan_fp8moe.export_fp8.files import INDEX  # noqa: E402


def export(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["export_fp8", *map(str, arguments)])
    export_fp8.main()


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def quantized(value: torch.Tensor) -> torch.Tensor:
    """What the FP8 forward multiplies with, in fp32."""
    N, K = value.shape[-2:]
    q, scale = recipe.quantize_weight(value.view(-1, N, K))
    return recipe.dequantize(q, scale)[:, :N, :K].reshape(value.shape)


SIZES = dict(
    vocab_size=256, hidden_size=128, intermediate_size=160, moe_intermediate_size=144, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts_per_tok=2, num_experts=4,
    num_local_experts=4, n_routed_experts=4, moe_num_experts=4, n_group=1, topk_group=1, pad_token_id=0,
    layer_types=["full_attention"] * 2, mlp_layer_types=["sparse"] * 2, shared_expert_intermediate_size=64,
    qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, kv_lora_rank=64, q_lora_rank=64,
)  # fmt: skip
DENSE = dict(first_k_dense_replace=1)
GATE = "mlp.gate.weight"
FAMILIES: dict[str, tuple[dict[str, object], list[str]]] = {
    # Its config, and tensors that Transformers or a user keeps in fp32.
    "DeepseekV2": (DENSE, [GATE]),
    "DeepseekV3": (DENSE, [GATE, "mlp.gate.e_score_correction_bias"]),
    "Ernie4_5_Moe": ({}, [GATE, "mlp.moe_statics.e_score_correction_bias"]),
    "Glm4Moe": (DENSE, [GATE, "mlp.gate.e_score_correction_bias"]),
    "Lfm2Moe": (dict(num_dense_layers=0), ["feed_forward.expert_bias"]),
    "MiniMaxM2": ({}, []),
    "Mixtral": ({}, []),
    "NemotronH": (dict(layer_types=["moe", "attention"], moe_shared_expert_intermediate_size=64), []),
    "Olmoe": ({}, []),
    "Qwen2Moe": ({}, []),
    "Qwen3Moe": (dict(tie_word_embeddings=True), []),
    "Qwen3Moe, in part fp32": (dict(vocab_size=8192), ["norm.weight", "layers.1.temperature", "embed_tokens.weight"]),
    "Qwen3Next": ({}, []),
    "Qwen3_5MoeText": ({}, []),
}


def config_of(family: str, **changes: object):
    """A tiny config, with those of ``SIZES`` that the family knows."""
    config_class = getattr(transformers, f"{family}Config")
    known = {name for c in config_class.__mro__ for name in getattr(c, "__annotations__", ())}
    sizes = {key: value for key, value in SIZES.items() if key in known | {*config_class.attribute_map}}
    return config_class(**sizes | changes)


def family_model(name: str, folder: Path) -> torch.nn.Module:
    """A bf16 model, saved. Its fp32 tensors have no values of bf16."""
    family, _, fp32 = name.partition(",")
    config = config_of(family, **FAMILIES[name][0])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if fp32:
        model.model.norm.float()
        model.model.embed_tokens.float()  # has more values than the experts
        model.model.layers[1].register_buffer("temperature", torch.rand(3))
    for value in model.state_dict().values():
        if value.dtype == torch.float32:
            value += torch.rand_like(value) * 1e-3
    model.save_pretrained(folder)
    return model


def read_deepseek(folder: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """DeepSeek's format, read as its inference code does, without the package; and the names of what is FP8."""
    stored = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    tensors, fp8 = {}, set()
    for name, value in stored.items():
        if (scale := stored.get(f"{name}_scale_inv")) is not None:
            assert value.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
            N, K = value.shape
            assert scale.shape == (-(-N // 128), -(-K // 128))
            value = value.float() * scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
            fp8.add(name)
        if not name.endswith("_scale_inv"):
            tensors[name] = value
    return tensors, fp8


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_read_back(family, tmp_path, monkeypatch):
    """From files and as a live model's tensors. An e4m3 code is within 1/16 of its value, or half a step of 2**-9 of
    the block's scale, whose largest code is above 224: half of 448. The rest stays, routers in fp32 too."""
    if family == "NemotronH" and TorchVersion(transformers.__version__) < (5, 18):
        pytest.skip("Transformers 5.17 refuses these kinds of layers")
    torch.manual_seed(0)
    model = family_model(family, tmp_path / "hf")
    want, none = read_deepseek(tmp_path / "hf")
    export(monkeypatch, tmp_path / "hf", tmp_path / "fp8", "--verify")
    got, fp8 = read_deepseek(tmp_path / "fp8")
    assert got.keys() == want.keys() and not none
    assert fp8 == {name for name in want if ".experts." in name and name.endswith(".weight")} and fp8
    for name, value in want.items():
        if name not in fp8:
            assert_equal([got[name]], [value])
            continue
        N, K = value.shape
        blocks = torch.nn.functional.pad(value.float().abs(), (0, -K % 128, 0, -N % 128))
        largest = blocks.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3))
        scale = (largest / 224).repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
        error = (got[name] - value.float()).abs()
        assert (error <= torch.maximum(value.float().abs() / 16, scale * 2**-10)).all(), name
        assert error.any()
    fp32 = {name for name, value in want.items() if value.dtype == torch.float32}
    assert all(any(name.endswith(part) for name in fp32) for part in FAMILIES[family][1]), fp32
    live = {name: t for bucket in fp8_tensors(model) for name, t in bucket.items()}
    files = load(tmp_path / "fp8")
    assert live.keys() == files.keys()
    assert_equal(live.values(), [files[name] for name in live])


LAYERS = dict(num_hidden_layers=3, layer_types=["full_attention"] * 3, mlp_layer_types=["sparse"] * 3)
MASTER = LAYERS | dict(intermediate_size=200, moe_intermediate_size=128, first_k_dense_replace=1)


@pytest.fixture(params=["Qwen3Moe", "DeepseekV3"])
def exported(request, tmp_path: Path, monkeypatch):
    """A random model with fp32 master values, the folder of its export, and parts of the names of what is FP8."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(request.param, **MASTER), dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    options = ["--quantized-from", "fp32", "--verify", "--shard-gb", 1e-3]
    parts = [".experts."]
    if request.param == "DeepseekV3":  # and the dense layer, whose hidden dim is no multiple of 128
        parts += [".shared_experts.", ".layers.0.mlp."]
        options += ["--quantize", *parts]
    export(monkeypatch, tmp_path / "saved", tmp_path / "fp8", *options)
    return model, tmp_path / "fp8", parts


def test_read_by_transformers(exported, monkeypatch):
    """On a machine without a GPU Transformers loads the dequantized values, fused per layer; the rest is bf16. The
    modules that serve FP8 are those of the export, with its bytes; bf16 modules stay what they were."""
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    model, folder, parts = exported
    master = model.state_dict()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert master.keys() == loaded.keys()
    assert any("experts.gate_up_proj" in name for name in master)
    for name, value in master.items():
        want = quantized(value) if any(part in name for part in parts) else value
        assert torch.equal(loaded[name], want.bfloat16().to(loaded[name].dtype)), name

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    modules = dict(loaded.named_modules())
    fp8 = {name for name, module in modules.items() if isinstance(module, (FP8Linear, FP8Experts))}
    last = {"model.layers.2.mlp.experts"}
    if len(parts) > 1:
        last |= {f"model.layers.2.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
        assert {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")} <= fp8
    assert {name for name in fp8 if "layers.2" in name} == last
    assert type(modules["lm_head"]) is torch.nn.Linear
    experts = modules["model.layers.2.mlp.experts"]
    for name in ("gate_up_proj", "down_proj"):
        q, scale = recipe.quantize_weight(master[f"model.layers.2.mlp.experts.{name}"])
        got = getattr(experts, name), getattr(experts, f"{name}_scale_inv").float()
        assert_equal(got, (q, recipe.exp2(recipe.exponent(scale))))


@pytest.mark.parametrize(("family", "live"), [("Qwen3Moe", True), ("DeepseekV3", False)])
def test_logits_of_an_engine(family, live, tmp_path, monkeypatch):
    """Transformers' FP8 loading of an export, and of a live model's tensors as a checkpoint, on the same routing. Its
    activations are fp32, so what remains is FP8's error of ours. Wrong scales give ten times as much."""
    from titan_fp8moe import record_routing, replay_routing
    from titan_fp8moe.transformers import register

    register()
    torch.manual_seed(0)
    config = config_of(family, **MASTER)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="fp8_flow"
    ).eval()
    model.save_pretrained(tmp_path / "saved")
    folder = tmp_path / "fp8"
    export(monkeypatch, tmp_path / "saved", folder)
    if live:
        for file in (*folder.glob("*.safetensors"), folder / INDEX):
            file.unlink()
        tensors = {name: t for bucket in fp8_tensors(model) for name, t in bucket.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    options = dict(dtype=torch.float32, experts_implementation="grouped_mm")
    fp8 = transformers.FineGrainedFP8Config(dequantize=True)
    engine = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=fp8, **options).eval()
    tokens = torch.randint(0, 256, (4, 64))
    with torch.no_grad():
        with record_routing(model) as routing:
            want = model.float()(tokens).logits
        with replay_routing(engine, routing.routed_experts()):
            error = relative_error(engine(tokens).logits, want)
            for module in engine.modules():
                if hasattr(module, "gate_up_proj"):
                    module.gate_up_proj.mul_(2)
            wrong = relative_error(engine(tokens).logits, want)
    assert 1e-4 < error < 0.03 and wrong > 10 * error, (error, wrong)


@pytest.mark.parametrize("exported", ["Qwen3Moe"], indirect=True)
def test_experts_stay_in_fp8(exported, monkeypatch):
    """With ``fp8_flow`` the loaded experts run as they are stored: as those that Transformers dequantizes, bit for bit,
    in output and gradients."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    from titan_fp8moe.transformers import converted, register

    register()
    _, folder, _ = exported
    tokens, results = torch.randint(0, 256, (2, 64)), []
    for stored in (False, True):
        if stored:
            monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, experts_implementation="fp8_flow"
        )
        assert len(converted(model)) == 3
        experts = [model.get_submodule(name) for name in converted(model)]
        assert all((e.down_proj.dtype == torch.float8_e4m3fn) == stored for e in experts)
        for module in experts:
            module.requires_grad_(False)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append(grads | {"loss": loss.detach()})
    assert results[0].keys() == results[1].keys()
    assert_equal(*(result.values() for result in results))
