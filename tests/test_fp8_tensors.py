"""FP8 tensors of a live model: Transformers' and torchtitan's, as the files of an export, in buckets, over ranks."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.layer import assert_equal, refused
from tests.processes import forks, run_script
from titan_fp8moe import Fp8FlowMoEConfig, Fp8Weight, RoutedExperts
from titan_fp8moe.export_fp8 import fp8_tensors
from titan_fp8moe.nn.modules import Fp8FFN, Fp8FlowLinear, fp8_parameters
from titan_fp8moe.trainer.plan import plain_name


def test_transformers(tmp_path: Path, monkeypatch):
    """The names and bytes of the export's files, in buckets that are full."""
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    from tests.test_export_transformers import MODELS, export, transformers

    model = transformers.AutoModelForCausalLM.from_config(MODELS["qwen3_moe"](), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    export(monkeypatch, tmp_path / "saved", tmp_path / "fp8")
    want = {k: v for file in (tmp_path / "fp8").glob("*.safetensors") for k, v in load_file(file).items()}
    buckets = list(fp8_tensors(torch.compile(model), bucket_bytes=1 << 18))
    got = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    assert got.keys() == want.keys() and any(name.endswith("_scale_inv") for name in got)
    assert_equal(got.values(), [want[name] for name in got])
    sizes = [sum(t.nbytes for t in bucket.values()) for bucket in buckets]
    assert len(sizes) == 5 and all(size <= 1 << 18 or len(b) == 1 for size, b in zip(sizes, buckets, strict=True))
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.down_proj")[2, 3, 5] = torch.inf
    with refused("layers.1.mlp.experts.2.down_proj.weight holds a NaN or Inf"):
        list(fp8_tensors(model))
    with refused("nothing is quantized"):
        list(fp8_tensors(model, quantize=["missing"]))


def tiny_qwen3(**changes):
    transformers = pytest.importorskip("transformers", "5.17")
    from titan_fp8moe.transformers import register

    register()
    sizes = dict(hidden_size=128, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=1, num_key_value_heads=1, head_dim=128, vocab_size=128)
    config = transformers.Qwen3MoeConfig(**sizes | changes)
    config._experts_implementation = "fp8_flow"
    return transformers.Qwen3MoeForCausalLM(config).bfloat16()


def fp8_names(model) -> set[str]:
    return {name.removesuffix("_scale_inv") for name in _all(fp8_tensors(model)) if name.endswith("_scale_inv")}


def test_modules_name_their_matrices():
    """A linear in FP8 does not take the experts out; layers of experts in bf16 stay so, and so do gates beside FFNs."""
    routed = fp8_names(tiny_qwen3())
    assert len(routed) == 2 * 4 * 3 and all(".experts." in name for name in routed)
    model = tiny_qwen3()
    Fp8FlowLinear.convert(model.model.layers[1].self_attn.q_proj, Fp8FlowMoEConfig())
    q_proj = "model.layers.1.self_attn.q_proj.weight"
    assert fp8_names(model) == routed | {q_proj}
    experts = model.model.layers[0].mlp.experts
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = "grouped_mm"
    assert fp8_names(model) == {name for name in routed if "layers.1." in name} | {q_proj}
    model.set_experts_implementation("eager")
    assert fp8_names(model) == {q_proj}


class GatedFFN(Fp8FFN):
    """As torchtitan 0.3's shared experts of Qwen3.5, whose gate runs in bf16."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (torch.nn.Linear(128, 128, bias=False) for _ in range(3))
        self.gate = torch.nn.Linear(128, 1, bias=False)
        self.config = Fp8FlowMoEConfig()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (GatedFFN, ["w1.weight", "w2.weight", "w3.weight"]),
        (lambda: RoutedExperts(4, 128, 128, bias=True), ["w1", "w2", "w3"]),
        (lambda: RoutedExperts(4, 128, 128, activation="relu2"), ["w1", "w2"]),
        (lambda: Fp8FlowLinear(128, 128), ["weight"]),
    ],
)
def test_names_of_matrices(module, names):
    model = torch.nn.ModuleDict({"ffn": checkpoint_wrapper(module())})
    assert {plain_name(name) for name in fp8_parameters(model)} == {f"ffn.{name}" for name in names}


def test_wrapped_models(group):
    """DDP and compile, in either order: the names, and a tied weight once."""
    model = tiny_qwen3(tie_word_embeddings=True)
    want = _all(fp8_tensors(model))
    assert "model.embed_tokens.weight" in want and "lm_head.weight" not in want
    ddp = torch.nn.parallel.DistributedDataParallel
    for wrapped in (ddp(model), ddp(torch.compile(model)), torch.compile(ddp(model)), torch.nn.DataParallel(model)):
        got = _all(fp8_tensors(wrapped))
        assert got.keys() == want.keys()
        assert_equal(got.values(), want.values())


def test_tied_weights_of_other_models():
    """As torchtitan ties the output to the embedding, for an adapter that names both."""
    model = torch.nn.ModuleDict({"moe": RoutedExperts(4, 128, 128), "output": torch.nn.Linear(128, 64, bias=False)})
    model["embedding"] = torch.nn.Embedding(64, 128)
    model["embedding"].weight = model["output"].weight

    class Both(Adapter):
        @staticmethod
        def to_hf(tensors):
            return Adapter.to_hf(tensors) if "moe" in next(iter(tensors)) else tensors

    got = _all(fp8_tensors(model, adapter=Both))
    assert [name for name in got if "experts" not in name] == ["output.weight"]
    # Transformers' models say which is the copy, also of parameters that they do not have.
    model.all_tied_weights_keys = {"output.weight": "embedding.weight", "output.bias": "embedding.bias"}
    model.all_tied_weights_keys["output.scale"] = "embedding.weight"
    got = _all(fp8_tensors(model, adapter=Both))
    assert [name for name in got if "experts" not in name] == ["embedding.weight"]


def test_tied_weights_of_transformers():
    """One that training has untied, as PEFT's modules_to_save does, is not left out; nor is a layer of two."""
    model = tiny_qwen3(tie_word_embeddings=True)
    want = _all(fp8_tensors(model))
    assert "lm_head.weight" not in want
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert _all(fp8_tensors(model)).keys() == want.keys()
    with torch.no_grad():
        model.lm_head.weight += 1
    with refused("lm_head.weight differs from model.embed_tokens.weight", "config.tie_word_embeddings"):
        next(fp8_tensors(model))
    model = tiny_qwen3()
    want = _all(fp8_tensors(model))
    model.model.layers[1].mlp = model.model.layers[0].mlp
    got = _all(fp8_tensors(model))
    assert got.keys() == want.keys()
    name = "model.layers.{}.mlp.experts.0.up_proj.weight".format
    assert_equal([got[name(1)]], [want[name(0)]])


class Adapter:
    """As torchtitan's: an expert has a name of its own."""

    @staticmethod
    def to_hf(tensors):
        ((key, value),) = tensors.items()
        return {f"model.layers.0.experts.{e}.{key.split('.')[-1]}.weight": w for e, w in enumerate(value.unbind())}


def _worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    whole = RoutedExperts(4, 128, 128)
    experts = RoutedExperts(4, 128, 128, ep_group=mesh["ep"])
    experts.load_state_dict(whole.state_dict())
    model = torch.nn.ModuleDict({"moe": experts})
    want = _all(fp8_tensors(torch.nn.ModuleDict({"moe": whole}), adapter=Adapter))
    with refused("set quantized_from"):
        _all(fp8_tensors(model, adapter=Adapter))
    gathered = _all(fp8_tensors(model, adapter=Adapter, quantized_from=torch.float32))
    own = _all(fp8_tensors(model, adapter=Adapter, quantized_from=torch.float32, gather=False))
    assert gathered.keys() == want.keys() and len(want) == 4 * 3 * 2
    assert own.keys() == {name for name in want if int(name.split(".")[4]) // 2 == rank}
    for got in (gathered, own):
        assert_equal(got.values(), [want[name] for name in got])
    experts.w2 = torch.nn.Parameter(distribute_tensor(whole.w2.detach(), mesh, [Shard(1)]))
    with refused("set gather=True"):
        _all(fp8_tensors(model, adapter=Adapter, quantized_from=torch.float32, gather=False))
    dist.barrier()
    dist.destroy_process_group()


def test_what_cannot_be_sent_as_fp8():
    """Adapters are merged first, else the tensors would lack their change; stored codes are the checkpoint's. Parts of
    weights that are made in each forward have names that an engine passes over, or does not know."""
    parametrized = tiny_qwen3()
    experts = parametrized.model.layers[1].mlp.experts
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", torch.nn.Identity())
    with refused("model.layers.1.", "is what PyTorch makes a weight of", "remove_parametrizations"):
        next(fp8_tensors(parametrized))
    model = torch.nn.ModuleDict({"moe": RoutedExperts(4, 128, 128)})
    model["moe"].add_lora(4, 8)
    with refused("moe.lora_A.w1 is an adapter", "merge_lora()"):
        next(fp8_tensors(model, adapter=Adapter, bucket_bytes=1))
    model["moe"].merge_lora()
    assert len(_all(fp8_tensors(model, adapter=Adapter))) == 4 * 3 * 2
    model["moe"] = RoutedExperts.from_fp8(*(Fp8Weight.quantize(torch.randn(4, 128, 128)) for _ in range(3)))
    with refused("moe.w13 is stored in FP8; send the tensors of the checkpoint"):
        next(fp8_tensors(model, adapter=Adapter))


def _all(buckets):
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def test_over_ranks(tmp_path: Path):
    """Gathered, each rank has all experts; else its own, and together they are all."""
    mp.start_processes(_worker, (str(tmp_path),), nprocs=2, start_method=forks().get_start_method())


@pytest.mark.slow
def test_example():
    pytest.importorskip("transformers", "5.17")
    done = run_script("examples/fp8_weights.py", gpu=torch.cuda.is_available())
    assert done.returncode == 0, done.stderr
    experts = 2 * 8 * 3
    assert f"{experts} of them in FP8" in done.stdout
