"""FP8 tensors of a live model: what is FP8, in buckets. ``test_export_*.py`` compare their bytes with files, and
``distributed/`` over ranks."""

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.layer import assert_equal, refused
from tests.test_transformers import make_model
from titan_fp8moe import Fp8FlowMoEConfig, Fp8Weight, RoutedExperts
from titan_fp8moe.export_fp8 import fp8_tensors
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.nn.modules import fp8_parameters
from titan_fp8moe.recipe import FP8
from titan_fp8moe.trainer.plan import plain_name
from titan_fp8moe.transformers import register

FP32, BF16 = torch.float32, torch.bfloat16


def tiny_qwen3(**changes):
    register()
    return make_model(experts_implementation="fp8_flow", **changes).bfloat16()


class Adapter:
    """As torchtitan's: an expert has a name of its own."""

    @staticmethod
    def to_hf(tensors):
        ((key, value),) = tensors.items()
        return {f"model.layers.0.experts.{e}.{key.split('.')[-1]}.weight": w for e, w in enumerate(value.unbind())}


def tensors_of(model, **options) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in fp8_tensors(model, **options) for name, tensor in bucket.items()}


def fp8_names(model) -> set[str]:
    return {name for name, tensor in tensors_of(model).items() if tensor.dtype == FP8}


def test_buckets():
    """Are full, and hold everything once, in the same order. A larger tensor is one of its own."""
    model = tiny_qwen3(vocab_size=2048)
    want, most = tensors_of(model), 1 << 18
    buckets = list(fp8_tensors(model, bucket_bytes=most))
    assert [name for bucket in buckets for name in bucket] == [*want]
    assert_equal([tensor for bucket in buckets for tensor in bucket.values()], want.values())
    sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in buckets]
    assert sorted(len(bucket) for bucket, size in zip(buckets, sizes, strict=True) if size > most) == [1, 1]
    firsts = [next(iter(bucket.values())).nbytes for bucket in buckets]
    assert all(size + first > most for size, first in zip(sizes, firsts[1:], strict=False))


def test_modules_name_their_matrices():
    """A linear in FP8 does not take the experts out; layers of experts in bf16 stay so."""
    routed = fp8_names(tiny_qwen3())
    assert len(routed) == 2 * 6 * 3 and all(".experts." in name for name in routed)
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


@pytest.mark.parametrize(("options", "names"), [(dict(bias=True), "w1 w2 w3"), (dict(activation="relu2"), "w1 w2")])
def test_names_below_a_checkpoints_wrapper(options, names):
    model = torch.nn.ModuleDict({"ffn": checkpoint_wrapper(RoutedExperts(4, 128, 128, **options))})
    assert {plain_name(name) for name in fp8_parameters(model)} == {f"ffn.{name}" for name in names.split()}


def test_wrapped_and_tied_models(group):
    """DDP and compile, in either order: the names, and a tied weight once. Layers that share a module are apart."""
    model = tiny_qwen3(tie_word_embeddings=True)
    want = tensors_of(model)
    assert "model.embed_tokens.weight" in want and "lm_head.weight" not in want
    ddp = torch.nn.parallel.DistributedDataParallel
    for wrapped in (ddp(model), ddp(torch.compile(model)), torch.compile(ddp(model)), torch.nn.DataParallel(model)):
        got = tensors_of(wrapped)
        assert got.keys() == want.keys()
        assert_equal(got.values(), want.values())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # the same values still
    model.model.layers[1].mlp = model.model.layers[0].mlp
    got = tensors_of(model)
    assert got.keys() == want.keys()
    name = "model.layers.{}.mlp.experts.0.up_proj.weight".format
    assert_equal([got[name(1)]], [want[name(0)]])


def test_routed_experts_alone_from_fp32():
    """Where expert parallelism spans all ranks, FSDP gathers everything else in bf16."""
    model, parts = make_model(), [".experts.", "q_proj"]
    both, fp32, bf16 = (tensors_of(model, quantize=parts, quantized_from=p) for p in ("fp32-routed", FP32, BF16))
    for name, tensor in both.items():
        assert_equal([tensor], [(fp32 if ".experts." in name else bf16)[name]])


def experts(stored=False, lora=False):
    weights = [Fp8Weight.quantize(torch.randn(4, 128, 128)) for _ in range(3)]
    layer = RoutedExperts.from_fp8(*weights) if stored else RoutedExperts(4, 128, 128)
    if lora:
        layer.add_lora(4, 8)
    return torch.nn.ModuleDict({"moe": layer})


def sharded(dim: int):
    model, mesh = experts(), init_device_mesh("cpu", (1,))
    model["moe"].w2 = torch.nn.Parameter(distribute_tensor(model["moe"].w2.detach(), mesh, [Shard(dim)]))
    return model


def untied():
    model = tiny_qwen3(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    return model


REFUSALS = [
    (untied, {}, "lm_head.weight differs from model.embed_tok"),
    (tiny_qwen3, dict(quantize=["up_proj", "missing"]), "no matrix has 'missing' in its name"),
    (lambda: torch.nn.ModuleDict({"w": torch.nn.Linear(4, 4)}), dict(adapter=Adapter), "'.experts.' ... set quantize"),
    (lambda: experts(lora=True), dict(adapter=Adapter), "moe.lora_A.w1 is an adapter"),
    (lambda: experts(stored=True), dict(adapter=Adapter), "moe.w13 is stored in FP8; send the"),
    (lambda: sharded(0), dict(adapter=Adapter), "fp32 and sharded ... set quantized_from"),
    (lambda: sharded(1), dict(adapter=Adapter, quantized_from=FP32, gather=False), "set gather=True"),
]


@pytest.mark.parametrize(("model", "options", "said"), REFUSALS)
def test_refusals(group, model, options, said):
    with refused(*said.split(" ... ")):
        tensors_of(model(), **options)
