"""The FP8 export of torchtitan's checkpoints: what it writes, that torchtitan reads it back, and what a job says."""

import copy
import json
import multiprocessing
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.qwen3 import qwen3_args

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor `tiny`
from tests.layer import assert_equal, refused
from tests.processes import call
from titan_fp8moe import recipe
from titan_fp8moe.export_fp8 import __main__ as export_fp8
from titan_fp8moe.export_fp8 import files, fp8_tensors, model_config
from titan_fp8moe.export_fp8.files import TensorInfo
from titan_fp8moe.nn.modules import fp8_parameters
from titan_fp8moe.torchtitan import dry_run
from titan_fp8moe.torchtitan.checkpoint import Job
from titan_fp8moe.torchtitan.dry_run import build_model
from titan_fp8moe.trainer import preflight

TOML = "train_configs/debug.toml"
CONFIG = dict(num_hidden_layers=3, hidden_size=256, vocab_size=2048, n_routed_experts=8, torch_dtype="float32")
ONE_PROCESS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
EXPERT = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture(autouse=True)
def hardware_check():
    with preflight.for_other_machines():  # as in the export
        yield


@pytest.fixture(scope="module")
def job():
    """The converted tiny model on the meta device, its arguments, and fp32 values of its parameters."""
    with preflight.for_other_machines():
        _, args, model = build_model(ConfigManager().parse_args([f"--job.config_file={TOML}"]), ONE_PROCESS)
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(v.shape, generator=generator) * 0.05 for name, v in model.state_dict().items()}
    return model, args, state


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tf_model.bin").write_text("weights of another model")
    return folder


@pytest.fixture(scope="module")
def checkpoint(job, tmp_path_factory) -> Path:
    """As torchtitan saves it, with an optimizer's state."""
    folder = tmp_path_factory.mktemp("run") / "step-7"
    dcp.save({**job[2], "optimizer.state.tok_embeddings.weight.step": torch.zeros(1)}, checkpoint_id=folder)
    return folder


@pytest.fixture
def export_job(export, checkpoint, assets, tmp_path):
    """Exports the checkpoint of the job to ``tmp_path``, or to another folder."""

    def run(*arguments, quantized_from="fp32", out=tmp_path, assets=assets) -> str:
        told = ["--quantized-from", quantized_from] if quantized_from else []
        return export(checkpoint, out, "--config", TOML, "--assets", assets, *told, *arguments)

    return run


@pytest.fixture
def export(monkeypatch, capsys):
    """Runs the command line; returns what it printed."""

    def run(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["export_fp8", *map(str, arguments)])
        export_fp8.main()
        return "".join(capsys.readouterr())

    return run


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def quantized(weight: torch.Tensor) -> torch.Tensor:
    """What a forward multiplies with, for experts (E, N, K) or one matrix."""
    return recipe.dequantize(*recipe.quantize_weight(weight.view(-1, *weight.shape[-2:]))).view(weight.shape)


def is_fp8(name: str) -> bool:
    return ".moe.experts." in name or ".moe.shared_experts." in name or ".feed_forward." in name


def read_back(folder: Path, job) -> dict[str, torch.Tensor]:
    """As torchtitan loads it with ``initial_load_in_hf_quantized``."""
    _, args, state = job
    adapter = DeepSeekV3StateDictAdapter(args, None)
    loaded = adapter.to_hf({name: torch.empty_like(value) for name, value in state.items()})
    dcp.load(loaded, storage_reader=adapter.get_hf_storage_reader(str(folder), from_quantized=True), no_dist=True)
    return adapter.from_hf(loaded)


@pytest.mark.parametrize("quantized_from", ["fp32", "fp32-routed", "bf16"])
def test_torchtitan_reads_what_the_forward_multiplies_with(job, export_job, tmp_path, quantized_from):
    """``fp32-routed`` takes the routed experts from fp32 and the rest from bf16."""
    output = export_job("--shard-gb", 2e-3, "--verify", quantized_from=quantized_from)
    assert f"57 matrices in FP8 from {quantized_from}" in output
    assert "142 tensors are the checkpoint's, bit for bit" in output
    assert all(key in output.splitlines()[-1] for key in CONFIG if key != "torch_dtype")
    assert len(list(tmp_path.glob("model-*-of-00005.safetensors"))) == 5
    loaded = read_back(tmp_path, job)
    for key, value in job[2].items():
        from_bf16 = quantized_from == "bf16" or (quantized_from == "fp32-routed" and ".moe.experts." not in key)
        want = value if "expert_bias" in key else value.bfloat16()
        if is_fp8(key):
            want = quantized(value.bfloat16() if from_bf16 else value)
        assert torch.equal(loaded[key], want.float()), key
        if is_fp8(key):  # quantized again, as the next run does, it stays what it is, also from bf16
            assert torch.equal(quantized(loaded[key].bfloat16()), loaded[key])
            assert from_bf16 == torch.equal(loaded[key], quantized(value.bfloat16())), key


def test_files(job, export_job, tmp_path):
    """DeepSeek's names, dtypes and config; everything else of the assets but weights."""
    export_job()
    tensors = load(tmp_path)
    q, scale = recipe.quantize_weight(job[2]["layers.1.moe.experts.w1"])
    assert torch.equal(tensors[EXPERT].view(torch.uint8), q[3].view(torch.uint8))
    assert torch.equal(tensors[f"{EXPERT}_scale_inv"], recipe.exp2(recipe.exponent(scale[3])))
    assert tensors[f"{EXPERT}_scale_inv"].dtype == torch.float32
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert not any("optimizer" in name for name in tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == CONFIG | {"torch_dtype": "bfloat16"}
    kept = quantization.pop("modules_to_not_convert")
    assert quantization == files.FORMAT and files.FORMAT["scale_fmt"] == "ue8m0"
    matrices = [name for name, value in tensors.items() if value.dtype == torch.bfloat16 and value.ndim == 2]
    assert sorted(kept) == sorted(name.removesuffix(".weight") for name in matrices) and len(kept) == 16
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"
    ]  # fmt: skip


def test_filters_and_linears_of_the_job(export_job, tmp_path):
    """The converter decides: shared experts stay bf16, and so does a whole layer as one module; linears are FP8."""
    assert "27 matrices in FP8 from fp32" in export_job("--fp8_flow_moe.filter_fqns=shared_experts,layers.2.")
    kept = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.2.mlp.experts" in kept and "model.layers.1.mlp.experts" not in kept
    assert "model.layers.1.mlp.shared_experts.up_proj" in kept
    out = tmp_path / "linears"
    assert "60 matrices in FP8" in export_job("--fp8_flow_moe.linear_fqns=attention.wo.", out=out)
    assert load(out)["model.layers.0.self_attn.o_proj.weight"].dtype == recipe.FP8


@pytest.mark.parametrize("damage", [False, True])
def test_what_the_published_model_has_in_fp32(job, export_job, assets, tmp_path, damage):
    """Stays so, in files and of a live model. Weights that are a pointer of git-lfs say nothing."""
    model, args, state = job
    gate, norm = "model.layers.1.mlp.gate.weight", "model.norm.weight"
    hf = DeepSeekV3StateDictAdapter(args, None).to_hf(state)
    published = {name: value if name in (gate, norm) else value.bfloat16() for name, value in hf.items()}
    folder = shutil.copytree(assets, tmp_path / "published")
    save_file({name: value.contiguous() for name, value in published.items()}, folder / "model.safetensors")
    if damage:
        (folder / "model.safetensors").write_text("version https://git-lfs")
    said = export_job("--verify", assets=folder, out=tmp_path / "out")
    rounded = 26 if damage else 24
    assert f"57 matrices in FP8 from fp32, {rounded} tensors rounded from fp32 to bf16\n" in said
    assert f"142 tensors are the checkpoint's, bit for bit after rounding {rounded} from fp32 to bf16; " in said
    live = copy.deepcopy(model).to_empty(device="cpu")
    live.load_state_dict(state)
    buckets = fp8_tensors(live, adapter=DeepSeekV3StateDictAdapter(args, str(folder)))
    sent, written = {name: value for bucket in buckets for name, value in bucket.items()}, load(tmp_path / "out")
    assert sent.keys() == written.keys()
    assert_equal(sent.values(), [written[name] for name in sent])
    for name in (gate, norm, gate.replace("1", "2"), "lm_head.weight"):
        assert_equal([sent[name]], [hf[name] if name in (gate, norm) and not damage else hf[name].bfloat16()])


def test_one_tensor_at_a_time(export_job, tmp_path, monkeypatch):
    """Each of torchtitan's tensors is read once, alone, although shards cut through a layer's experts."""
    read, original = [], dcp.load

    def spy(state, **kwargs):
        read.append(sorted(state))
        original(state, **kwargs)

    monkeypatch.setattr(dcp, "load", spy)
    export_job("--shard-gb", 1e-3)
    assert all(len(keys) == 1 for keys in read) and len({keys[0] for keys in read}) >= 30
    shards_written = len(list(tmp_path.glob("*.safetensors")))
    assert len(read) <= len({keys[0] for keys in read}) + shards_written


def test_wrong_arguments(checkpoint, export, tmp_path):
    said = "is a checkpoint of torchtitan's: name its TOML file with --config"
    for arguments, error in (
        ([checkpoint], said),
        ([tmp_path], "has neither .metadata"),
        ([checkpoint, "--world-size", "8"], "2"),
        ([checkpoint, "--config", TOML, "--world-size", "8", "--quantized-from", "bf16"], "2"),
        ([checkpoint, "--no-such-option"], "2"),
        ([checkpoint, "--config", TOML, "--quantize", ".experts."], "2"),
        ([checkpoint, "--config", TOML, "--filter-fqns", "layers.1."], "2"),
    ):
        with refused(error, error=SystemExit):
            export(arguments[0], tmp_path / "out", *arguments[1:])


def test_refusals_of_the_job(export_job, tmp_path, monkeypatch):
    """Tensor parallelism with 128 + 64 hidden units would pad each rank's part; another release's rope; a flavor."""
    base = deepseekv3_args["tiny"]
    monkeypatch.setitem(deepseekv3_args, "odd", replace(base, moe_inter_dim=192, moe_args=replace(base.moe_args)))
    with refused("training quantized blocks of 96", "--fp8_flow_moe.filter_fqns=layers.1.moe.", error=SystemExit):
        export_job(
            "--model.flavor=odd", *(f"--parallelism.{p}_degree=2" for p in ("tensor_parallel", "data_parallel_shard"))
        )
    newcomer = dict(moe_intermediate_size=128, intermediate_size=256, kv_lora_rank=32, q_lora_rank=32, n_group=8)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | newcomer))
    told = ("gate_proj.weight has 256", "gate_proj.weight has 512", "with 128", "with null", "with 1;")
    said = (f"{key} = {value}, but " for key, value in newcomer.items())
    with refused(*said, *told, error=SystemExit):
        export_job(assets=tmp_path, out=tmp_path / "out")
    for rope in (dict(rope_theta=5e6), dict(rope_parameters=dict(rope_theta=5e6))):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | rope))
        with refused("rope_theta = 5000000.0, but the model was trained with 10000", error=SystemExit):
            export_job(assets=tmp_path, out=tmp_path / "out")
    with refused("not a checkpoint of deepseek_v3 debugmodel", "Pass the config of", error=SystemExit):
        export_job("--model.flavor", "debugmodel", out=tmp_path / "other")


ROUTER = dict(num_experts_per_tok=3, norm_topk_prob=True, rope_theta=1e4)
DEEPSEEK = ROUTER | dict(
    num_hidden_layers=3, hidden_size=256, vocab_size=2048, n_routed_experts=8, n_shared_experts=1,
    moe_intermediate_size=256, intermediate_size=512, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=128,
    num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
    n_group=1, topk_group=1, routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False,
)  # fmt: skip
QWEN3 = ROUTER | dict(
    num_hidden_layers=2, hidden_size=128, num_experts=8, moe_intermediate_size=768, num_attention_heads=6,
    num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip


OTHER = DEEPSEEK | dict(q_lora_rank=48, v_head_dim=96, first_k_dense_replace=2)
OTHER |= dict(n_shared_experts=2, n_group=4, topk_group=2)
DIFFERENT = [
    ("deepseek_v3", {}, {}, DEEPSEEK),
    ("deepseek_v3", dict(q_lora_rank=48, v_head_dim=96, n_dense_layers=2),
     dict(num_shared_experts=2, num_expert_groups=4, num_limited_groups=2), OTHER),
    ("qwen3", dict(n_layers=2, dim=128, n_heads=6, n_kv_heads=2, head_dim=64, rope_theta=1e4, enable_weight_tying=True),
     dict(num_experts=8, top_k=3, route_norm=True), QWEN3),
]  # fmt: skip


@pytest.mark.parametrize(("model", "args", "moe_args", "config"), DIFFERENT)
def test_every_difference_is_told(tmp_path, monkeypatch, model, args, moe_args, config):
    """The model's own config passes. Of one that is wrong in every key, one error names all."""
    flavors, base = (qwen3_args, "debugmodel_moe") if model == "qwen3" else (deepseekv3_args, "tiny")
    small = replace(flavors[base], **args, moe_args=replace(flavors[base].moe_args, **moe_args))
    monkeypatch.setitem(flavors, "small", small)
    job = Job(TOML, [f"--model.name={model}", "--model.flavor=small"])
    shapes = {name: shape for key in job.shapes for name, shape in job.hf_shapes(key).items()}
    source = SimpleNamespace(tensors={name: TensorInfo(shape, torch.bfloat16) for name, shape in shapes.items()})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_config.check_config(source, job.settings, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(config, -1)))
    settings = (key for key in config if key in job.settings)
    told = [f"{key} = -1, but the model was trained with {json.dumps(config[key])}" for key in settings]
    with refused(*(f"{key} = -1, but " for key in config), *told):
        model_config.check_config(source, job.settings, tmp_path)


def test_tensors_without_a_name_are_told(export, tmp_path, monkeypatch):
    """torchtitan's qwen3 has a router bias for load balancing, which Qwen3's format has no place for."""
    base = qwen3_args["debugmodel_moe"]
    small = replace(base, n_layers=2, dim=128, moe_args=replace(base.moe_args, num_experts=2, top_k=1))
    monkeypatch.setitem(qwen3_args, "small", small)
    options = ["--model.name=qwen3", "--model.flavor=small"]
    job = Job(TOML, options)
    dcp.save({name: torch.zeros(shape) for name, shape in job.shapes.items()}, checkpoint_id=tmp_path / "step-1")
    (tmp_path / "config.json").write_text(json.dumps(dict(num_hidden_layers=2, rope_theta=1e6)))
    options += ["--config", TOML, "--assets", tmp_path, "--quantized-from", "fp32"]
    said = export(tmp_path / "step-1", tmp_path / "out", *options)
    assert "left out are 2 tensors such as layers.0.moe.expert_bias" in said


def _precisions_of_a_run(world_size: int, overrides: list[str]) -> tuple[str, set[str]]:
    """What the export thinks that a run quantizes, and what FSDP hands its layers: of routed and of shared experts."""
    arguments = [f"--job.config_file={TOML}", *overrides]
    told = Job(TOML, overrides, world_size).quantized_from
    _, _, (model,) = dry_run.build(ConfigManager().parse_args(arguments), 0, world_size)
    model.to_empty(device="meta")  # a trainer gives it memory
    handed = {name: "fp32" for name in fp8_parameters(model)}  # what FSDP does not manage stays as it is
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    for param in (param for group in groups if group is not None for param in group.fsdp_params):
        in_fp8 = hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather")
        if (name := names[id(param.sharded_param)]) in handed and not in_fp8:
            handed[name] = {torch.bfloat16: "bf16", torch.float32: "fp32"}[param.mp_policy.param_dtype]
    kinds = {(("routed " if ".experts." in name else "shared ") + dtype) for name, dtype in handed.items()}
    return told, kinds


EP2, EP4 = (f"--parallelism.expert_parallel_degree={ranks}" for ranks in (2, 4))
RUNS = [
    (1, "", "fp32"),
    (4, "", "bf16"),
    (4, EP2, "bf16"),
    (4, EP4, "fp32-routed"),
    (4, f"{EP4} --fp8_flow_moe.filter_fqns=layers.2.", "bf16"),
    (4, f"{EP2} --fp8_flow_moe.fp8_all_gather", "fp32-routed"),
    (4, f"{EP2} --parallelism.data_parallel_replicate_degree=2", "bf16"),
    (4, "--training.mixed_precision_param=float32", "fp32"),
]


def _precisions_of_runs() -> list[tuple[str, set[str]]]:
    """The fake process group can be made once per process. These are forks of one that has imported torchtitan."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        runs = [(world_size, overrides.split()) for world_size, overrides, _ in RUNS]
        return pool.starmap(_precisions_of_a_run, runs, chunksize=1)


@pytest.fixture(scope="module")
def precisions() -> list[tuple[str, set[str]]]:
    return call(_precisions_of_runs)


@pytest.mark.parametrize("index", range(len(RUNS)), ids=lambda index: "{} {}".format(*RUNS[index]))
def test_what_a_run_quantizes(precisions, index):
    told = RUNS[index][2]
    routed, shared = told.removesuffix("-routed"), "bf16" if told == "fp32-routed" else told
    assert precisions[index] == (told, {f"routed {routed}", f"shared {shared}"})


def test_world_size_tells(export_job, tmp_path):
    for ranks, dtype in ((2, "bf16"), (1, "fp32")):
        said = export_job("--world-size", ranks, quantized_from=None, out=tmp_path / str(ranks))
        assert f"57 matrices in FP8 from {dtype}" in said


def test_what_the_run_would_resume_from_does_not_matter(export_job, tmp_path):
    """The newest checkpoint was saved on two ranks; an export without --world-size takes the fewest."""
    state = {f"dataloader.dp_rank_{rank}": b"" for rank in range(2)} | {"w": torch.zeros(1)}
    dcp.save(state, checkpoint_id=tmp_path / "run/checkpoint/step-8", no_dist=True)
    assert "57 matrices" in export_job("--checkpoint.enable", f"--job.dump_folder={tmp_path}/run", out=tmp_path / "out")
