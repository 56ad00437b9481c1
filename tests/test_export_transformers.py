"""Experts stored in FP8: exports that Transformers loads, of tiny models of its own, and modules that keep bytes."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.torch_version import TorchVersion
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from tests import test_export_fp8
from tests.layer import DEVICE, D, E, H, assert_equal, gradients, make_layer, refused
from tests.test_export_fp8 import load
from tests.test_fp8_tensors import tensors_of
from titan_fp8moe import Fp8Weight, RoutedExperts, recipe, routed_experts
from titan_fp8moe import transformers as adapter

export = test_export_fp8.export
SIZES = dict(
    vocab_size=256, hidden_size=128, intermediate_size=160, moe_intermediate_size=144, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts_per_tok=2, num_experts=4,
    num_local_experts=4, n_routed_experts=4, moe_num_experts=4, n_group=1, topk_group=1, pad_token_id=0,
    layer_types=["full_attention"] * 2, mlp_layer_types=["sparse"] * 2, shared_expert_intermediate_size=64,
    qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, kv_lora_rank=64, q_lora_rank=64,
)  # fmt: skip
DENSE = dict(first_k_dense_replace=1)
PLAIN = "Ernie4_5_Moe", "MiniMaxM2", "Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Next", "Qwen3_5MoeText"
FAMILIES: dict[str, dict[str, object]] = {
    **{family: {} for family in PLAIN},
    **dict.fromkeys(("DeepseekV2", "DeepseekV3", "Glm4Moe"), DENSE),
    "Lfm2Moe": dict(num_dense_layers=0),
    "NemotronH": dict(layer_types=["moe", "attention"], moe_shared_expert_intermediate_size=64),
    "Qwen3Moe": dict(tie_word_embeddings=True),
    "Qwen3Moe, in part fp32": dict(vocab_size=8192),
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
    config = config_of(family, **FAMILIES[name])
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


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(family, tmp_path, export):
    """From files and as a live model's tensors. The rest stays, routers in fp32 too."""
    if family == "NemotronH" and TorchVersion(transformers.__version__) < (5, 18):
        pytest.skip("Transformers 5.17 refuses these kinds of layers")
    torch.manual_seed(0)
    model = family_model(family, tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "fp8", "--verify")
    want, files, live = load(tmp_path / "hf"), load(tmp_path / "fp8"), tensors_of(model)
    fp8 = {name for name in want if ".experts." in name and name.endswith(".weight")}
    assert fp8 == {name for name, value in files.items() if value.dtype == recipe.FP8} and fp8
    assert live.keys() == files.keys() == want.keys() | {f"{name}_scale_inv" for name in fp8}
    assert_equal(live.values(), [files[name] for name in live])
    kept = want.keys() - fp8
    assert_equal([files[name] for name in kept], [want[name] for name in kept])
    fp32 = {name for name in kept if want[name].dtype == torch.float32}
    assert "fp32" not in family or {"model.norm.weight", "model.layers.1.temperature"} <= fp32


@pytest.fixture
def in_fp8(monkeypatch):
    """Transformers keeps FP8 as on a machine with a GPU, on one without it too."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


DENSE_PARTS = "layers.0.mlp", "layers.1.mlp.shared_experts"


@pytest.mark.parametrize(("family", "sparse", "dense"), [("Qwen3Moe", "01", ()), ("DeepseekV3", "1", DENSE_PARTS)])
def test_read_by_transformers(family, sparse, dense, tmp_path, export, request):
    """From fp32 master values. Without a GPU Transformers loads the dequantized values, fused per layer. The modules
    that serve FP8 are those of the export, with its bytes. The dense layer's hidden dim is no multiple of 128."""
    auto, parts = transformers.AutoModelForCausalLM, [".experts.", *dense]
    sizes = dict(intermediate_size=200, moe_intermediate_size=128, first_k_dense_replace=1)
    model = auto.from_config(config_of(family, **sizes), dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    options = "--quantized-from", "fp32", "--verify", "--shard-gb", 1e-3, "--quantize", *parts
    export(tmp_path / "saved", tmp_path / "fp8", *options)

    loaded, master = auto.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16).state_dict(), model.state_dict()
    assert master.keys() == loaded.keys() and "model.layers.1.mlp.experts.gate_up_proj" in master
    for name, want in master.items():
        if any(part in name for part in parts):
            N, K = want.shape[-2:]
            read = recipe.dequantize(*recipe.quantize_weight(want.view(-1, N, K)))
            want = read[:, :N, :K].reshape(want.shape)
        assert torch.equal(loaded[name], want.bfloat16().to(loaded[name].dtype)), name

    request.getfixturevalue("in_fp8")
    loaded = auto.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    modules = dict(loaded.named_modules())
    projections = {f"model.{part}.{name}_proj" for part in dense for name in ("gate", "up", "down")}
    fp8 = {name for name, module in modules.items() if isinstance(module, (FP8Linear, FP8Experts))}
    assert fp8 == projections | {f"model.layers.{layer}.mlp.experts" for layer in sparse}
    experts = modules["model.layers.1.mlp.experts"]
    for name in ("gate_up_proj", "down_proj"):
        q, scale = recipe.quantize_weight(master[f"model.layers.1.mlp.experts.{name}"])
        got = getattr(experts, name), getattr(experts, f"{name}_scale_inv").float()
        assert_equal(got, (q, recipe.exp2(recipe.exponent(scale))))


PUBLISHED = dict(DeepseekV3=torch.float32, Qwen3Moe=torch.bfloat16, Glm4Moe=torch.float32, MiniMaxM2=torch.float32)


@pytest.mark.parametrize(("family", "dtype"), PUBLISHED.items())
def test_published_checkpoints(family, dtype, tmp_path, export, in_fp8):
    """Their scales are no powers of two. Experts run as ``RoutedExperts.from_fp8`` does, and leave as they came."""
    sizes = dict(hidden_size=256, moe_intermediate_size=128, intermediate_size=128, tie_word_embeddings=False)
    config = config_of(family, **FAMILIES[family] | sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "fp8", "--quantize", ".experts.", "self_attn.")
    ((file, written),) = ((file, load_file(file)) for file in (tmp_path / "fp8").glob("*.safetensors"))
    scales = {name: value for name, value in written.items() if name.endswith("_scale_inv")}
    written |= {name: (value * (1 + torch.rand_like(value))).to(dtype) for name, value in scales.items()}
    file.unlink()  # it is mapped
    save_file(written, file, {"format": "pt"})
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    del config["quantization_config"]["scale_fmt"]
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    adapter.register()
    options = dict(dtype=torch.bfloat16, experts_implementation="fp8_flow")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", **options).requires_grad_(False)
    sent = tensors_of(model)
    assert sent.keys() == written.keys()
    # Transformers 5.17 drops dims of 1 from scales, and dtypes of other tensors differ between its versions.
    for name, tensor in sent.items():
        assert tensor.dtype == written[name].dtype or written[name].dtype != torch.float8_e4m3fn, name
        assert torch.equal(tensor.float().view(written[name].shape), written[name].float()), name

    parts = ("w1", "w2", "w3") if family == "MiniMaxM2" else ("gate_proj", "down_proj", "up_proj")
    names = [[n for n in written if re.search(rf"layers\.1\..*\.experts\.\d+\.{part}.weight$", n)] for part in parts]
    stored = [[torch.stack([written[f"{n}{end}"] for n in part]) for end in ("", "_scale_inv")] for part in names]
    x, ids = torch.randn(64, 256, device=DEVICE).bfloat16(), torch.rand(64, 4, device=DEVICE).topk(2).indices
    leaves, dout = (x, torch.rand(64, 2, device=DEVICE)), torch.randn(64, 256, device=DEVICE).bfloat16()
    experts = model.get_submodule(adapter.converted(model)[-1]).to(DEVICE)
    module = RoutedExperts.from_fp8(*(Fp8Weight.of_blocks(q.to(DEVICE), scale.to(DEVICE)) for q, scale in stored))
    assert_equal(*(gradients(lambda x, s, call=call: call(x, ids, s), leaves, dout) for call in (experts, module)))


INTEGERS = {recipe.E8M0: torch.uint8, torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_module_keeps_bytes(dtype: torch.dtype):
    """Through casts, graphs and state dicts, also scales that are no powers of two. It shares a fused weight's memory,
    and reads no other dtype's scales."""
    x, scores, ids, weights = make_layer(dtype=torch.bfloat16)
    ints, powers = INTEGERS[dtype], [Fp8Weight.quantize(w) for w in weights]
    w1, w2, w3 = powers
    if dtype != recipe.E8M0:
        w1, w2, w3 = (Fp8Weight(w.q, (recipe.exp2(recipe.exponent(w.scale)) * 1.3).to(dtype)) for w in powers)
    experts = RoutedExperts.from_fp8(w1, w2, w3)
    want = routed_experts(x, w1, w2, w3, ids, scores)
    state, (w13, w13_scale) = experts.state_dict(), experts.weights()[0]
    scales = torch.cat([w1.scale.view(ints), w3.scale.view(ints)], 1), w2.scale.view(ints)
    assert_equal([w13_scale.view(ints), state["w13_scale"], state["w2_scale"]], [scales[0], *scales])
    assert sum(p.nbytes for p in experts.parameters()) == 3 * E * D * H * (1 + dtype.itemsize / 128**2)
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    other = RoutedExperts.from_fp8(*(Fp8Weight(*map(torch.zeros_like, w)) for w in (w1, w2, w3)))
    torch.save(state, file := io.BytesIO())
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    fused = RoutedExperts.from_fp8(Fp8Weight(w13, w13_scale), w2)
    assert fused.w13.data_ptr() == w13.data_ptr()
    for module in (experts.float().bfloat16(), compiled, other, fused):
        assert torch.equal(module(x, ids, scores), want)
    with pytest.raises(RuntimeError, match="floating point"):
        experts.requires_grad_()
    if dtype != recipe.E8M0:
        with refused(f"w2_scale is {ints}", "from_fp8", error=RuntimeError):
            RoutedExperts.from_fp8(*powers).load_state_dict(state)
        with refused("gate and up must share E, K and the dtype of scales"):
            routed_experts(x, w1, w2, powers[2], ids, scores)


@pytest.mark.parametrize("hidden", [80, 200])
def test_gate_and_up_that_were_padded_as_one_are_refused(hidden: int):
    """They have the padded size of a larger H, of which gate would read rows of up."""
    w1, w2, w3 = (torch.randn(E, *shape, device=DEVICE) for shape in ((hidden, D), (D, hidden), (hidden, D)))
    fused, down = Fp8Weight.quantize(torch.cat([w1, w3], 1)), Fp8Weight.quantize(w2)
    with refused("padded as one", "as w1 and w3"):
        RoutedExperts.from_fp8(fused, down)
    RoutedExperts.from_fp8(Fp8Weight.quantize(w1), down, Fp8Weight.quantize(w3))
