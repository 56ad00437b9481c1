"""The FP8 export of folders and of torchtitan's checkpoints: what it writes and verifies, and what it refuses."""

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torchtitan.config import ConfigManager
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.moe import MoE
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.protocols.train_spec import get_train_spec

from experiments.reference import relative_error
from tests.layer import assert_equal, refused
from tests.test_fp8_tensors import tensors_of
from titan_fp8moe import recipe
from titan_fp8moe.export_fp8 import __main__ as export_fp8
from titan_fp8moe.export_fp8.files import INDEX
from titan_fp8moe.torchtitan import dry_run
from titan_fp8moe.torchtitan.checkpoint import Job
from titan_fp8moe.trainer import preflight

State = dict[str, torch.Tensor]
D, E = 128, 3
CONFIG = dict(num_hidden_layers=2, hidden_size=D, vocab_size=64, num_experts=E, tie_word_embeddings=False)
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
PART, EXPERT = "model.layers.0.", "model.layers.1.mlp.experts.2.up_proj.weight"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def export(monkeypatch, capsys) -> Callable[..., str]:
    """Runs the command line; returns what it printed."""

    def run(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["export_fp8", *map(str, arguments)])
        export_fp8.main()
        return "".join(capsys.readouterr())

    return run


def load(folder: Path) -> State:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def tensor(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 0.05).bfloat16()


def block(prefix: str) -> State:
    parts = [f"mlp.experts.{e}.{part}_proj" for e in range(E) for part in ("gate", "up", "down")]
    state = {f"{prefix}{part}.weight": tensor(D, D) for part in ("self_attn.q_proj", *parts)}
    return state | {f"{prefix}mlp.gate.weight": tensor(E, D)}


def model() -> State:
    state = {EMBEDDING: tensor(64, D), HEAD: tensor(64, D), NORM: tensor(D)}
    return state | block(PART) | block("model.layers.1.")


def write(folder: Path, state: State, config: object = CONFIG, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- folders of Hugging Face's ----------------------------------------------------------------------------------------

MTP = CONFIG | dict(num_nextn_predict_layers=1)
SHARED = {f"model.layers.{layer}.mlp.shared_experts.up_proj.weight": tensor(200, D) for layer in (0, 1)}
CHOSEN = "--quantize .shared_experts. q_proj --filter-fqns layers.1."
FOLDERS: list[tuple[str, str, State, dict, str]] = [
    # What wraps layer 1 and the model, further tensors, config.json, options. Other stacks are not the decoder.
    ("", "", block("model.vision_tower.layers.7."), CONFIG, ""),
    ("", "", block("mtp.layers.0."), MTP | dict(moe_intermediate_size=[D, D]), ""),
    ("", "", block("model.layers.2."), MTP, ""),  # DeepSeek's multi-token prediction
    ("", "", {}, dict(text_config=CONFIG, vision_config=dict(num_hidden_layers=9, hidden_size=7)), ""),
    ("_checkpoint_wrapped_module._orig_mod.", "base_model.model.module._fsdp_wrapped_module.", {}, CONFIG, ""),
    ("", "", SHARED, CONFIG, CHOSEN),
]


@pytest.mark.parametrize(("layer", "root", "further", "config", "options"), FOLDERS)
def test_folders(export, tmp_path, layer, root, further, config, options):
    """Names, what is FP8, the modules that are not, and the last line, which lists what was compared."""
    state, out = model() | further, tmp_path / "out"
    stored = {root + name.replace("layers.1.", f"layers.1.{layer}"): value for name, value in state.items()}
    said = export(write(tmp_path / "hf", stored, config), out, "--verify", *options.split()).splitlines()
    fp8 = {name for name in state if ".experts." in name}
    if options:
        fp8 = {f"{PART}self_attn.q_proj.weight", f"{PART}mlp.shared_experts.up_proj.weight"}
    assert said[0] == f"{len(fp8)} matrices in FP8, 0 tensors rounded from fp32 to bf16"
    assert f"verified: {len(state) + len(fp8)} tensors are the checkpoint's, bit for bit" in said[-1]
    assert "num_hidden_layers, num_experts, tie_word_embeddings, vocab_size, hidden_size" in said[-1]
    written = load(out)
    assert {name for name in written if not name.endswith("_scale_inv")} == state.keys()
    assert {name for name, value in written.items() if value.dtype == recipe.FP8} == fp8
    kept = json.loads((out / "config.json").read_bytes())["quantization_config"]["modules_to_not_convert"]
    bf16 = {name.removesuffix(".weight") for name in state.keys() - fp8 - {NORM}}
    assert {*kept} == {name.partition(".experts.")[0] + ".experts" * (".experts." in name) for name in bf16}


@pytest.mark.parametrize("layout", ["single", "index", "numbered"])
def test_files_of_a_folder(export, tmp_path, layout):
    """Those that Transformers would read, or all that several ranks of torchtitan saved; none may be missing."""
    state, folder = model(), tmp_path / "hf"
    for stray in ("adapter_model", "consolidated", "shard-00001-model-00001-of-00001"):
        write(folder, {"layers.0.feed_forward.experts.0.w1.weight": tensor(D, D)}, file=f"{stray}.safetensors")
    files = ["model.safetensors"] if layout == "single" else [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: files[i % len(files)] for i, name in enumerate(state)}
    for file in files:
        write(folder, {name: state[name] for name in state if weight_map[name] == file}, file=file)
    if layout == "index":
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    export(folder, tmp_path / "out", "--verify")
    assert {name for name in load(tmp_path / "out") if not name.endswith("_scale_inv")} == state.keys()
    (folder / files[-1]).unlink()
    with refused(files[-1] if layout == "index" else "has neither .metadata", error=SystemExit):
        export(folder, tmp_path / "other")


def test_other_files(export, tmp_path):
    """Are copied, but for other kinds and for folders that hold weights; these are named. All follow the umask."""
    folder, out = write(tmp_path / "hf", model()), tmp_path / "hf" / "fp8"
    copied = {"chat_templates/tool_use.jinja", "encoding/encoding.py", "tokenizer.json", "prompts/nested/in.txt"}
    weights = {"checkpoint-5/config.json", "checkpoint-5/model.safetensors", "original/params.json", "original/m.pth"}
    for name in copied | weights | {"README.md", "figures/speed.png", ".cache/huggingface/in.json"}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    before = os.umask(0o027)
    try:
        said = export(folder, out, "--verify")
    finally:
        os.umask(before)
    assert f"not copied from {folder}: checkpoint-5/, fp8/, original/, README.md, figures/speed.png\n" in said
    found = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    assert found.keys() == copied | {"config.json", INDEX, SHARD}
    assert all(found[name].read_text() == name for name in copied)
    assert {path.stat().st_mode & 0o777 for path in found.values()} == {0o640}


@pytest.mark.parametrize("name", [EXPERT, f"{EXPERT}_scale_inv", NORM])
def test_verify_finds_what_differs(export, tmp_path, name):
    """One byte, a shape, a tensor, a config, a file that is cut; of shards and of the source."""
    folder, out = write(tmp_path / "hf", model()), tmp_path / "out"
    export(folder, out)
    assert "verified: 43 tensors" in export(folder, out, "--verify-only")
    tensors, right, config = load(out), load(out), (out / "config.json").read_text()
    tensors[name].view(torch.uint8)[-1:].bitwise_xor_(1)
    for changed in (tensors, lose(name)(right), right | {name: right[name].unsqueeze(0)}):
        save_file(changed, out / SHARD)
        with refused(f"error: {name} is missing, or differs", error=SystemExit):
            export(folder, out, "--verify-only")
    save_file(right | {"more": torch.zeros(1)}, out / SHARD)
    with refused("has 44 tensors, and the checkpoint's are 43", error=SystemExit):
        export(folder, out, "--verify-only")
    (out / "config.json").write_text("{}")
    with refused("config.json has another quantization_config", error=SystemExit):
        export(folder, out, "--verify-only")
    for file in (out / SHARD, folder / "model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
        (out / "config.json").write_text(config)
        with refused("error: Error while deserializing header", error=SystemExit):
            export(folder, out, "--verify-only")


def test_nothing_of_another_export_stays(export, checkpoint, tmp_path):
    """OUT is empty at first. What an interruption has left is no export."""
    folder, out = write(tmp_path / "hf", model() | {EXPERT: torch.full((D, D), torch.nan).bfloat16()}), tmp_path / "out"
    out.mkdir()
    with refused(f"{EXPERT} holds a NaN or Inf", error=SystemExit):
        export(folder, out, "--shard-gb", 1e-4)
    assert [*out.glob("*.safetensors")] and not (out / "config.json").exists()
    for target in (out, folder):
        with refused(f"is there already; choose an empty folder or remove {target}", error=SystemExit):
            export(folder, target)
    with refused("name its TOML file with --config", "let it save with checkpoint.last_save_in_hf", error=SystemExit):
        export(checkpoint, out)


# --- torchtitan's checkpoints -----------------------------------------------------------------------------------------

TOML = "train_configs/debug.toml"
FROM_BF16 = "--quantized-from bf16"
TINY = dict(num_hidden_layers=3, hidden_size=256, vocab_size=2048, n_routed_experts=8, torch_dtype="float32")
GATE = "model.layers.1.mlp.gate.weight"


@pytest.fixture(autouse=True)
def hardware_check():
    with preflight.for_other_machines():  # as in the export
        yield


@pytest.fixture(scope="module")
def job():
    """The converted tiny model on the meta device, its adapter, and fp32 values of its parameters."""
    config = ConfigManager().parse_args([f"--job.config_file={TOML}"])
    with preflight.for_other_machines():
        _, args, tiny = dry_run.build_model(config, dry_run.make_parallel_dims(config, 1))
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(v.shape, generator=generator) * 0.05 for name, v in tiny.state_dict().items()}
    return tiny, DeepSeekV3StateDictAdapter(args, None), state


@pytest.fixture(scope="module")
def checkpoint(job, tmp_path_factory) -> Path:
    """As torchtitan saves it, with an optimizer's state."""
    folder = tmp_path_factory.mktemp("run") / "step-7"
    dcp.save({**job[2], "optimizer.state.tok_embeddings.weight.step": torch.zeros(1)}, checkpoint_id=folder)
    return folder


@pytest.fixture
def export_job(export, checkpoint, tmp_path):
    """Exports the job's checkpoint, or a folder, to ``tmp_path / "out"``."""

    def run(*arguments, folder=None, **config) -> str:
        assets = tmp_path / "assets"
        assets.mkdir(exist_ok=True)
        (assets / "config.json").write_text(json.dumps(TINY | config))
        return export(folder or checkpoint, tmp_path / "out", "--config", TOML, "--assets", assets, *arguments)

    return run


def quantized(weight: torch.Tensor) -> torch.Tensor:
    """The values that a forward multiplies with, for experts (E, N, K) or one matrix."""
    return recipe.dequantize(*recipe.quantize_weight(weight.view(-1, *weight.shape[-2:]))).view(weight.shape)


@pytest.mark.parametrize("quantized_from", ["fp32", "fp32-routed", "bf16"])
def test_torchtitan_reads_what_the_forward_multiplies_with(job, export_job, tmp_path, quantized_from):
    """The shards have DeepSeek's names, dtypes and config."""
    out, (_, adapter, state) = tmp_path / "out", job
    said = export_job("--shard-gb", 2e-3, "--quantized-from", quantized_from)
    assert f"57 matrices in FP8 from {quantized_from}, 26 tensors rounded from fp32 to bf16\n" in said
    assert "142 tensors are the checkpoint's" in export_job("--verify-only", "--quantized-from", quantized_from)
    loaded = adapter.to_hf({name: torch.empty_like(value) for name, value in state.items()})
    reader = adapter.get_hf_storage_reader(str(out), from_quantized=True)  # initial_load_in_hf_quantized
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    loaded = adapter.from_hf(loaded)
    for key, value in state.items():
        from_bf16 = quantized_from == "bf16" or (quantized_from == "fp32-routed" and ".moe.experts." not in key)
        want = value if "expert_bias" in key else value.bfloat16()
        if any(part in key for part in (".moe.experts.", ".moe.shared_experts.", ".feed_forward.")):
            want = quantized(value.bfloat16() if from_bf16 else value)
            # Quantized again, as the next run does, it stays what it is, also from bf16.
            assert torch.equal(quantized(loaded[key].bfloat16()), loaded[key])
            assert from_bf16 == torch.equal(loaded[key], quantized(value.bfloat16())), key
        assert torch.equal(loaded[key], want.float()), key
    config, index = (json.loads((out / file).read_bytes()) for file in ("config.json", INDEX))
    assert len(config["quantization_config"].pop("modules_to_not_convert")) == 16
    deepseek = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    assert config == TINY | dict(torch_dtype="bfloat16", quantization_config=deepseek | dict(scale_fmt="ue8m0"))
    files = {(file := f"model-0000{i}-of-00005.safetensors"): load_file(out / file) for i in range(1, 6)}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = [sum(value.nbytes for value in tensors.values()) for tensors in files.values()]
    assert max(sizes) <= 2e6 and index["metadata"]["total_size"] == sum(sizes)
    assert {path.name for path in out.iterdir()} == {*files, INDEX, "config.json"}


def test_the_job_decides(export_job, tmp_path):
    """The ranks tell the precision. It does not matter what the run would resume from, a checkpoint of two ranks."""
    state = {f"dataloader.dp_rank_{rank}": b"" for rank in range(2)} | {"w": torch.zeros(1)}
    dcp.save(state, checkpoint_id=tmp_path / "run/checkpoint/step-8", no_dist=True)
    resumes = ("--checkpoint.enable", f"--job.dump_folder={tmp_path}/run")
    options = ("--fp8_flow_moe.filter_fqns=shared_experts,layers.2.", "--fp8_flow_moe.linear_fqns=attention.wo.")
    assert "30 matrices in FP8 from fp32" in export_job("--world-size", 1, *options, *resumes)
    fp8 = {name for name, value in load(tmp_path / "out").items() if value.dtype == recipe.FP8}
    assert "model.layers.0.self_attn.o_proj.weight" in fp8
    assert not any("shared_experts" in name or "layers.2.mlp" in name for name in fp8)


@pytest.mark.parametrize("damage", [False, True])
def test_what_the_published_model_has_in_fp32(job, export, checkpoint, tmp_path, damage):
    """Stays so, in files and of a live model. Weights that are a pointer of git-lfs say nothing."""
    tiny, adapter, state = job
    hf = {name: value.contiguous() for name, value in adapter.to_hf(state).items()}
    kept, out = set() if damage else {GATE, NORM}, tmp_path / "out"
    assets = write(tmp_path / "hf", {n: v if n in (GATE, NORM) else v.bfloat16() for n, v in hf.items()}, TINY)
    if damage:
        (assets / "model.safetensors").write_text("version https://git-lfs")
    options = ("--config", TOML, "--assets", assets, "--quantized-from", "fp32", "--verify")
    assert f"{26 - len(kept)} tensors rounded from fp32 to bf16\n" in export(checkpoint, out, *options)
    live = copy.deepcopy(tiny).to_empty(device="cpu")
    live.load_state_dict(state)
    sent = tensors_of(live, adapter=DeepSeekV3StateDictAdapter(adapter.model_args, str(assets)))
    written = load(out)
    assert sent.keys() == written.keys()
    assert_equal(sent.values(), [written[name] for name in sent])
    for name in (GATE, NORM, GATE.replace("1", "2"), HEAD):
        assert_equal([sent[name]], [hf[name] if name in kept else hf[name].bfloat16()])


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


@pytest.mark.parametrize(("ranks", "overrides", "told"), RUNS)
def test_what_a_run_quantizes(ranks, overrides, told):
    """As FSDP hands it to the layers: test_converter.py has which experts it manages and gathers in FP8."""
    assert Job(TOML, overrides.split(), ranks).quantized_from == told


def put(name: str, value: torch.Tensor):
    return lambda state: state | {name: value}


def lose(*parts: str):
    return lambda state: {name: value for name, value in state.items() if not any(part in name for part in parts)}


FUSED = f"{PART}mlp.experts.gate_up_proj"
TP2 = "--parallelism.tensor_parallel_degree=2 --parallelism.data_parallel_shard_degree=2"
JOB_NORM, JOB_LAST = "model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.o_proj.weight"
TINY_SAYS = "is not a checkpoint of deepseek_v3 tiny: 1 tensors are missing, unknown or of another shape, such as"
# What is exported, a change of its tensors; changes of config.json; options; words.
REFUSALS: list[tuple[str, Callable[[State], State], dict[str, Any], str, str]] = [
    # What training multiplies, and what it quantized from.
    ("hf", lose(), {}, "--quantized-from fp32", "is torch.bfloat16, and training quantized fp32"),
    ("hf", put(EXPERT, torch.zeros(D, D)), {}, "", "torch.float32, and training quantized bf16, or fp32"),
    ("hf", put(EXPERT, torch.zeros(D, D).to(recipe.FP8)), {}, "", f"{EXPERT} is torch.float8_e4m3fn, and training"),
    ("hf", put(FUSED, tensor(2, 400, D)), {}, "", f"{FUSED} holds all experts of a layer ... one matrix per expert"),
    ("hf", lose(), {}, "--quantize .experts. norm", "'norm' matches no matrix; correct or remove it"),
    ("hf", lose(), {}, "--filter-fqns layers.", "nothing is quantized"),
    ("hf", lose(), {}, "--assets /nowhere", "No such file or directory: '/nowhere/config.json'"),
    ("hf", lose(), {}, "--filter-fqns experts.1.", f"matrices of {PART}mlp.experts would be FP8 and others bf16"),
    *(("hf", put(f"{PART}{name}.weight", tensor(D, D)), {}, "", f"{PART}{name}.weight is an adapter ... merge it first")
      for name in ("q_proj.lora_A.default", "q_proj.base_layer", "q_proj.modules_to_save.default")),
    # config.json and the tensors.
    ("hf", lose(EXPERT), {}, "", f"num_experts = 3, but the checkpoint has 2 of {EXPERT.replace('.2.', '.*.')}"),
    ("hf", lose("layers.0."), {}, "", "num_hidden_layers = 2, but the checkpoint has 1."),
    ("hf", lose(), dict(num_hidden_layers=3, num_nextn_predict_layers=1), "", "num_hidden_layers = 3, but the"),
    ("hf", lose(HEAD), {}, "", "tie_word_embeddings = false, but the checkpoint lacks lm_head.weight. Complete"),
    ("hf", lose(), dict(tie_word_embeddings=True), "", f"tie_word_embeddings = true, but the checkpoint has {HEAD}"),
    ("hf", lose(), dict(hidden_size=64, vocab_size=7), "", "vocab_size = 7, but  ... ; hidden_size = 64, but "),
    ("hf", lose(), dict(moe_intermediate_size=64), "", "moe_intermediate_size = 64, but model.layers.1.mlp.experts.2."),
    # The job's.
    ("dcp", lose(), {}, "", "is torch.float32, and training quantized bf16, or fp32"),
    ("dcp", lose(), dict(rope_parameters=dict(rope_theta=5e6)), FROM_BF16, "rope_theta = 5000000.0, but the model"),
    ("dcp", lose(), {}, "--model.flavor debugmodel", "not a checkpoint of deepseek_v3 debugmodel ... config of its"),
    ("dcp", lose(), {}, f"--model.flavor=odd {TP2}", "parts of [192, 256] on 2 tensor-parallel ranks ... filter_fqns"),
    ("dcp", lose(), {}, "--model.converters=float8", f"{TOML} does not name the converter: add --job.cus"),
    ("dcp", lose(), {}, "--model.converters=fp8_flow_moe,odd", "KeyError: 'odd'"),
    ("job", lose(JOB_NORM), {}, FROM_BF16, f"{TINY_SAYS} {JOB_NORM}, None instead of (256,)"),
    ("job", put(JOB_LAST, tensor(256, 64)), {}, FROM_BF16, f"{TINY_SAYS} {JOB_LAST}, (256, 64) instead of (256, 256)"),
    ("job", put("model.extra", tensor(4)), {}, FROM_BF16, f"{TINY_SAYS} model.extra, (4,) instead of None"),
    # Options that exclude each other.
    ("dcp", lose(), {}, "--world-size 8 --quantized-from bf16", "2"),
    ("dcp", lose(), {}, "--quantize .experts.", "2"),
    ("hf", lose(), {}, "--world-size 8", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "change", "config", "options", "said"), REFUSALS)
def test_refusals(export, export_job, job, tmp_path, monkeypatch, source, change, config, options, said):
    base = deepseekv3_args["tiny"]
    monkeypatch.setitem(deepseekv3_args, "odd", replace(base, moe_inter_dim=192, moe_args=replace(base.moe_args)))
    with refused(*said.split(" ... "), error=SystemExit):
        if source == "hf":
            export(write(tmp_path / "hf", change(model()), CONFIG | config), tmp_path / "out", *options.split())
        else:
            state = {name: value.bfloat16().contiguous() for name, value in job[1].to_hf(job[2]).items()}
            folder = write(tmp_path / "hf", change(state), TINY) if source == "job" else None
            export_job(*options.split(), folder=folder, **config)
    assert not (tmp_path / "out/config.json").exists()


def two_layers(args, moe={}, **changes):  # noqa: B006  never changed
    return replace(args, n_layers=2, moe_args=replace(args.moe_args, num_experts=8, top_k=3, **moe), **changes)


GROUPS = dict(num_expert_groups=4, num_limited_groups=2, route_scale=1.5)
DEEPSEEK = dict(n_group=4, rms_norm_eps=1e-5, scoring_func="sigmoid")
QWEN3 = dict(n_group=1, topk_group=1, rms_norm_eps=1e-6, scoring_func="softmax", tie_word_embeddings=True)


@pytest.mark.parametrize(("model", "args", "settings"), [
    ("deepseek_v3", two_layers(deepseekv3_args["tiny"], GROUPS), DEEPSEEK),
    ("qwen3", two_layers(qwen3_args["debugmodel_moe"], enable_weight_tying=True), QWEN3),
])  # fmt: skip
def test_a_config_to_start_from(export, tmp_path, monkeypatch, model, args, settings):
    """A model from scratch has no config.json. With the one that the refusal prints, Transformers has its logits. Of
    one that is wrong in every key, one error names all. Qwen3's format has no place for torchtitan's router bias."""
    spec, run = get_train_spec(model), tmp_path / "run"
    monkeypatch.setitem(spec.model_args, "small", args)
    overrides = f"--model.name={model}", "--model.flavor=small", "--training.seq_len=64"
    options = "--config", TOML, *overrides, "--assets", tmp_path, "--quantized-from", "fp32", "--verify"
    job, trained = Job(TOML, [*overrides]), spec.model_cls(args)
    torch.manual_seed(0)
    with torch.no_grad():
        trained.init_weights(buffer_device=torch.device("cpu"))
        for matrix in (param for param in trained.parameters() if param.ndim > 1):
            matrix.normal_(std=matrix.shape[-1] ** -0.5)
    dcp.save(trained.state_dict(), checkpoint_id=run)
    with pytest.raises(SystemExit) as refusal:
        export(run, tmp_path / "out", *options)
    printed = str(refusal.value)
    assert printed.startswith(f"error: {tmp_path} has no config.json; name the model's folder with --assets. For a")
    config = json.loads(printed[printed.index("{") :])
    assert config == config | settings

    state = {name: value.contiguous() for name, value in job.adapter.to_hf(trained.state_dict()).items()}
    folder = write(tmp_path / "fp32", state, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (run, folder):
        said = export(source, tmp_path / f"of {source.name}", *options)
        nameless = "warning: 2 tensors such as layers.0.moe.expert_bias have no name" in said
        assert nameless == (model == "qwen3" and source == run)
        keys = {*said.partition(" states of ")[2].partition("\n")[0].split(", ")}
        assert settings.keys() | {"hidden_size", "num_hidden_layers"} <= keys
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(keys, -1)))
    with refused(*(f"{key} = -1, but " for key in keys), ". Complete", error=SystemExit):
        export(run, tmp_path / "other", *options)
    served = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for experts in (module.experts for module in trained.modules() if isinstance(module, MoE)):
        experts.use_grouped_mm = False  # that path is bf16
    tokens = torch.randint(2048, (2, 64))
    with torch.no_grad():
        got, want = served(tokens).logits, trained(tokens)
    assert relative_error(got, want) < 1e-4


# Models that no config.json of ours describes: flavor, overrides, and why.
NO_CONFIG = [
    ("deepseek_v3", "debugmodel", "", "DeepseekV3ForCausalLM multiplies what experts return by sigmoid scores"),
    ("deepseek_v3", "before", "", "DeepseekV3ForCausalLM multiplies what experts return by sigmoid scores"),
    ("deepseek_v3", "tiny", "--training.seq_len=8192", "training.seq_len > 4096 turned YaRN on"),
    ("qwen3", "debugmodel", "", "only deepseek_v3 and qwen3 with experts are known"),
    ("llama3", "debugmodel", "", "only deepseek_v3 and qwen3 with experts are known"),
]


@pytest.mark.parametrize(("model", "flavor", "overrides", "why"), NO_CONFIG)
def test_no_config_to_start_from(monkeypatch, model, flavor, overrides, why):
    before = two_layers(deepseekv3_args["tiny"], dict(score_before_experts=True))
    monkeypatch.setitem(deepseekv3_args, "before", before)
    job = Job(TOML, [f"--model.name={model}", f"--model.flavor={flavor}", *overrides.split()])
    assert job.starting_config == f"None is printed here, because {why}"
