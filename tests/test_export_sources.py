"""Which folders the FP8 export takes, what of them it refuses, and the files that it writes for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.layer import refused
from tests.test_export_fp8 import TOML, assets, checkpoint, export, export_job, hardware_check, job, load  # noqa: F401
from titan_fp8moe import recipe
from titan_fp8moe.export_fp8.files import INDEX

D, E, LAYERS = 128, 3, 2
CONFIG = dict(
    num_hidden_layers=LAYERS, hidden_size=D, vocab_size=64, num_experts=E, tie_word_embeddings=False,
    layer_types=["full_attention", "full_attention"],
)  # fmt: skip
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
SHARD = "model-00001-of-00001.safetensors"


def tensor(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 0.05).bfloat16()


def model() -> dict[str, torch.Tensor]:
    state = {EMBEDDING: tensor(64, D), HEAD: tensor(64, D), NORM: tensor(D)}
    for layer in range(LAYERS):
        state |= block(f"model.layers.{layer}.")
    return state


def block(prefix: str) -> dict[str, torch.Tensor]:
    parts = [f"mlp.experts.{e}.{part}_proj" for e in range(E) for part in ("gate", "up", "down")]
    state = {f"{prefix}{part}.weight": tensor(D, D) for part in ("self_attn.q_proj", *parts)}
    return state | {f"{prefix}mlp.gate.weight": tensor(E, D)}


def write(folder: Path, state: dict[str, torch.Tensor], config: object = CONFIG, file: str = "model") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / f"{file}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_index(folder: Path, state: dict[str, torch.Tensor], file: str = "model") -> None:
    index = {"weight_map": dict.fromkeys(state, f"{file}.safetensors")}
    (folder / INDEX).write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")


def without(state: dict[str, torch.Tensor], *parts: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if not any(part in name for part in parts)}


def names(folder: Path) -> set[str]:
    """Of an export's tensors but the scales."""
    return {name for name in load(folder) if not name.endswith("_scale_inv")}


# --- refusals ---------------------------------------------------------------------------------------------------------


def cast(dtype: torch.dtype):
    return lambda state: {name: value.to(dtype) for name, value in state.items()}


def put(name: str, value: torch.Tensor):
    return lambda state: state | {name: value}


def lose(*parts: str):
    return lambda state: without(state, *parts)


def stated(**changes: object) -> dict[str, object]:
    return CONFIG | changes


PART = "model.layers.0."
ADAPTERS = (
    "self_attn.q_proj.lora_A.default", "self_attn.q_proj.base_layer", "mlp.gate.modules_to_save.default",
    "self_attn.q_proj.lora_magnitude_vector.default",
)  # fmt: skip
REFUSALS = [
    # What training multiplies, and what it quantized from.
    (None, CONFIG, "--quantized-from fp32", "checkpoint has torch.bfloat16: the values are lost"),
    (cast(torch.float32), CONFIG, "", "is fp32, but training may have quantized it from bf16: pass --config"),
    (cast(torch.float16), CONFIG, "", "is torch.float16; export the bf16 or fp32 checkpoint that training wrote"),
    (put(EXPERT, torch.zeros(D, D).to(recipe.FP8)), CONFIG, "", f"{EXPERT} is torch.float8_e4m3fn; export"),
    (put(EXPERT, torch.full((D, D), torch.nan).bfloat16()), CONFIG, "", f"{EXPERT} holds a NaN or Inf"),
    (put(EXPERT, torch.full((D, D), torch.inf).bfloat16()), CONFIG, "", f"{EXPERT} holds a NaN or Inf"),
    (put(FUSED, tensor(2, 400, D)), CONFIG, "", "has one matrix per expert and no biases"),
    (None, CONFIG, "--quantize .experts. .expert.", "'.expert.' matches no matrix; correct or remove it"),
    (None, CONFIG, "--quantize norm", "'norm' matches no matrix"),
    (None, CONFIG, "--filter-fqns layers.7.", "'layers.7.' matches no matrix"),
    (None, CONFIG, "--filter-fqns layers.", "nothing is quantized"),
    (None, CONFIG, "--filter-fqns experts.1.", "matrices of model.layers.0.mlp.experts would be FP8 and others bf16"),
    (None, CONFIG, "--assets /nowhere", "/nowhere has no config.json; --assets names"),
    (None, CONFIG, "--config nowhere.toml", "No such file or directory: 'nowhere.toml'"),
    # config.json and the tensors.
    (lose(EXPERT), CONFIG, "", f"the checkpoint lacks {EXPERT}"),
    (lose("experts.1."), CONFIG, "", "lacks model.layers.0.mlp.experts.1."),
    (lose("experts.2."), CONFIG, "", "num_experts = 3, but the checkpoint has 2"),
    (lose("0.mlp.experts.2."), CONFIG, "", "lacks model.layers.0.mlp.experts.2."),
    (lose("layers.0.mlp.gate.weight"), CONFIG, "", "lacks layers.0.mlp.gate.weight, which layer 1 has"),
    (lose("layers.1.self_attn.q_proj"), CONFIG, "", "lacks layers.1.self_attn.q_proj.weight, which layer 0 has"),
    (lose("layers.1.mlp."), CONFIG, "", "lacks layers.1.mlp.experts.*.down_proj.weight, which layer 0 has"),
    (lose("layers.1."), CONFIG, "", "lacks layers.1."),
    (lose("layers.0."), stated(layer_types=["full", "other"]), "", "lacks layers.0."),
    (lose(EMBEDDING), CONFIG, "", "vocab_size = 64, but the checkpoint lacks the embedding"),
    (lose(HEAD), CONFIG, "", "tie_word_embeddings = false, but the checkpoint lacks lm_head.weight. Complete"),
    (put(EMBEDDING, tensor(9, D)), CONFIG, "", "vocab_size = 64, but model.embed_tokens.weight has 9"),
    (None, stated(num_experts=2), "", "num_experts = 2, but the checkpoint has 3"),
    (None, stated(num_hidden_layers=1), "", "num_hidden_layers = 1, but the checkpoint has layers.1"),
    (None, stated(num_hidden_layers=3, num_nextn_predict_layers=1), "", "lacks layers.2."),
    (None, stated(hidden_size=64), "", "hidden_size = 64, but "),
    (None, stated(moe_intermediate_size=64), "", "moe_intermediate_size = 64, but model.layers.0.mlp.experts.0."),
    (put(f"{PART}mlp.shared_experts.gate_proj.weight", tensor(D, D)), stated(n_shared_experts=2,
      moe_intermediate_size=D, layer_types=["a", "b"]), "", "n_shared_experts*moe_intermediate_size = 256, but"),
    (None, stated(tie_word_embeddings=True), "", "tie_word_embeddings = true, but the checkpoint has lm_head.weight"),
    (None, stated(num_hidden_layers=None), "", "or pass the model's own config with --assets"),
    (None, stated(hidden_size=7, vocab_size=7), "", "vocab_size = 7, but  ... ; hidden_size = 7, but "),
    # Names.
    *((put(f"{PART}{name}.weight", tensor(D, D)), CONFIG, "", f"{PART}{name}.weight is an adapter ... merge it first")
      for name in ADAPTERS),
    *((put(f"{PART}{name}", tensor(D)), CONFIG, "", f"{name} is what PyTorch makes ... remove_parametrizations")
      for name in ("mlp.experts.0.up_proj.parametrizations.weight.original0", "norm.weight_orig", "norm.weight_g")),
    *((lambda state, root=root: {root + name: value for name, value in state.items()}, CONFIG, "", f"{root}lm_head."
      "weight and the others are of no decoder") for root in ("_forward_module.", "policy.", "model.module.")),
    (put(f"module.{NORM}", tensor(D)), CONFIG, "", f"has {NORM} twice"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "config", "options", "said"), REFUSALS, ids=[case[-1] for case in REFUSALS])
def test_refusals(export, tmp_path, change, config, options, said):  # noqa: F811
    folder = write(tmp_path / "hf", (change or (lambda state: state))(model()), config)
    with refused("error: ", *said.split(" ... "), error=SystemExit):
        export(folder, tmp_path / "out", *options.split())
    assert not (tmp_path / "out/config.json").exists()


def test_an_index_is_what_the_files_hold(export, tmp_path):  # noqa: F811
    """It names no tensor more and none less. model.safetensors beside it is ambiguous, and files may be missing."""
    folder = write(tmp_path / "hf", without(model(), EXPERT))
    write_index(folder, model())
    with refused(f"model.safetensors differ in {EXPERT}; complete", error=SystemExit):
        export(folder, tmp_path / "out")
    file = "model-00001-of-00001"
    folder = write(tmp_path / "numbered", model(), file=file)
    write_index(folder, without(model(), NORM), file)
    with refused(f"{file}.safetensors differ in {NORM}", error=SystemExit):
        export(folder, tmp_path / "out")
    write_index(folder, model(), file)
    export(folder, tmp_path / "out", "--verify")
    write(folder, model())
    with refused("has model.safetensors, which", "does not name; remove one of the two", error=SystemExit):
        export(folder, tmp_path / "other")
    (folder / "model.safetensors").unlink()
    (folder / f"{file}.safetensors").unlink()
    with refused("No such file or directory", file, error=SystemExit):
        export(folder, tmp_path / "other")


@pytest.mark.parametrize("file", ["adapter_model", "consolidated", "shard-00001-model-00001-of-00001"])
def test_stray_files(export, tmp_path, file):  # noqa: F811
    """Transformers reads model.safetensors alone. Without it no other file is taken for the model."""
    stray = {"layers.0.feed_forward.experts.0.w1.weight": tensor(D, D)}
    folder = write(write(tmp_path / "hf", stray, file=file), model())
    export(folder, tmp_path / "out", "--verify")
    assert names(tmp_path / "out") == model().keys()
    (folder / "model.safetensors").unlink()
    with refused("has neither .metadata", "save with save_pretrained, adapters merged", error=SystemExit):
        export(folder, tmp_path / "other")


def test_numbered_files_without_an_index(export, tmp_path):  # noqa: F811
    """As several ranks of torchtitan save them."""
    halves = [dict([*model().items()][:10]), dict([*model().items()][10:])]
    for i, state in enumerate(halves):
        folder = write(tmp_path / "hf", state, file=f"model-0000{i + 1}-of-00002")
    export(folder, tmp_path / "out", "--verify")
    assert names(tmp_path / "out") == model().keys()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with refused("nor", "all files of one model-N-of-M.safetensors; complete", error=SystemExit):
        export(folder, tmp_path / "other")


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:4], lambda b: b"version https://git-lfs"])
def test_damaged_safetensors(export, tmp_path, damage):  # noqa: F811
    """The source's, and an export's that is verified."""
    folder, out = write(tmp_path / "hf", model()), tmp_path / "out"
    export(folder, out)
    for file, option in ((out / SHARD, "--verify-only"), (folder / "model.safetensors", "--verify")):
        file.write_bytes(damage(file.read_bytes()))
        with refused(f"error: {file} cannot be read (", "copy or save it again", error=SystemExit):
            export(folder, out, option)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_damaged_dcp(export_job, checkpoint, tmp_path, file, damage):  # noqa: F811
    kept = (checkpoint / file).read_bytes()
    try:
        (checkpoint / file).write_bytes(kept[: len(kept) // 2])
        if damage == "removed":
            (checkpoint / file).unlink()
        with refused("error: ", file if file != ".metadata" or damage == "cut" else "neither", error=SystemExit):
            export_job(out=tmp_path / "out")
    finally:
        (checkpoint / file).write_bytes(kept)


def test_a_folder_of_the_job(export_job, export, assets, tmp_path):  # noqa: F811
    """With --config the model that the job trains says what is missing."""
    from titan_fp8moe.torchtitan.checkpoint import Job

    shapes = {name: shape for j in [Job(TOML, [])] for key in j.shapes for name, shape in j.hf_shapes(key).items()}
    state = {name: tensor(*shape) for name, shape in shapes.items()}
    config = json.loads((assets / "config.json").read_text())
    options = ("--config", TOML, "--quantized-from", "bf16", "--verify")
    export(write(tmp_path / "hf", state, config), tmp_path / "out", *options, "--assets", assets)
    norm, last = "model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.o_proj.weight"
    for changes, said in (
        (without(state, norm), f"{norm}, None instead of (256,)"),
        (state | {last: tensor(256, 64)}, f"{last}, (256, 64) instead of (256, 256)"),
        (state | {"model.extra.weight": tensor(4)}, "model.extra.weight, (4,) instead of None"),
    ):
        with refused("is not a checkpoint of deepseek_v3 tiny: 1 tensors", said, error=SystemExit):
            export(write(tmp_path / "hf", changes, config), tmp_path / "other", *options, "--assets", assets)


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_verified_lists_what_was_compared(export, tmp_path):  # noqa: F811
    said = export(write(tmp_path / "hf", model()), tmp_path / "out", "--verify").splitlines()[-1]
    assert said == (
        "verified: 43 tensors are the checkpoint's, bit for bit; it has what config.json states of num_hidden_layers, "
        "num_experts, tie_word_embeddings, vocab_size, hidden_size"
    )


@pytest.mark.parametrize(
    ("stack", "changes"),
    [
        ("model.vision_tower.layers.7.", {}),
        ("mtp.layers.0.", {}),
        ("vision_tower.encoder.layers.0.", {}),
        ("model.layers.2.", dict(num_nextn_predict_layers=1)),  # DeepSeek's
    ],
)
def test_other_stacks_are_not_the_decoder(export, tmp_path, stack, changes):  # noqa: F811
    """Their layers are not counted. Their experts are complete, too."""
    more = block(stack)
    folder = write(tmp_path / "hf", model() | more, CONFIG | changes)
    export(folder, tmp_path / "out", "--verify")
    assert names(tmp_path / "out") == {*model(), *more}
    write(folder, model() | without(more, "experts.1.up_proj"), CONFIG | changes)
    with refused(f"lacks {stack}mlp.experts.1.up_proj.weight", error=SystemExit):
        export(folder, tmp_path / "other")


def test_layers_of_several_kinds(export, tmp_path):  # noqa: F811
    """As in models that leave an indexer out of some layers: a list in config.json says which."""
    state = model() | {"model.layers.0.self_attn.indexer.wk.weight": tensor(D, D)}
    kinds = CONFIG | dict(layer_types=["full", "shared"], moe_intermediate_size=[D, D])  # a list is not compared
    export(write(tmp_path / "hf", state, kinds), tmp_path / "out", "--verify")
    with refused("lacks layers.1.self_attn.indexer.wk.weight, which layer 0 has", error=SystemExit):
        export(write(tmp_path / "hf", state), tmp_path / "other")


def test_config_of_several_models(export, tmp_path):  # noqa: F811
    """The decoder's values are in text_config."""
    state = {name.replace("model.", "model.language_model."): value for name, value in model().items()}
    config = dict(text_config=CONFIG, vision_config=dict(num_hidden_layers=9, hidden_size=7))
    folder = write(tmp_path / "hf", state, config)
    assert "num_hidden_layers, num_experts" in export(folder, tmp_path / "out", "--verify")
    config["text_config"] = CONFIG | dict(num_experts=4)
    with refused("num_experts = 4", error=SystemExit):
        export(write(folder, state, config), tmp_path / "other")


@pytest.mark.parametrize(
    ("layer", "root"),
    [
        ("", "_orig_mod."),
        ("_fsdp_wrapped_module.", "_fsdp_wrapped_module."),
        ("_checkpoint_wrapped_module._orig_mod.", "module._orig_mod."),
        ("", "base_model.model.module."),
    ],
)
def test_names_of_wrapped_models(export, tmp_path, layer, root):  # noqa: F811
    state = {root + name.replace("layers.1.", f"layers.1.{layer}"): value for name, value in model().items()}
    export(write(tmp_path / "hf", state), tmp_path / "out", "--verify")
    assert names(tmp_path / "out") == model().keys()


def test_matrices_by_their_names(export, tmp_path):  # noqa: F811
    """Of those that --quantize names, --filter-fqns takes some out. It prints sizes that servers may not expect."""
    state = model() | {f"model.layers.{layer}.mlp.shared_experts.up_proj.weight": tensor(200, D) for layer in (0, 1)}
    options = ("--quantize", ".shared_experts.", "q_proj", "--filter-fqns", "layers.1.")
    said = export(write(tmp_path / "hf", state), tmp_path / "out", *options, "--verify")
    assert "warning: 1 matrices such as model.layers.0.mlp.shared_experts.up_proj.weight have dims" in said
    fp8 = {name for name, value in load(tmp_path / "out").items() if value.dtype == recipe.FP8}
    assert fp8 == {f"{PART}self_attn.q_proj.weight", f"{PART}mlp.shared_experts.up_proj.weight"}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (EXPERT, lambda t: t.view(torch.uint8)[3, 5].add_(1)),
        (f"{EXPERT}_scale_inv", lambda t: t.mul_(2)),
        (NORM, lambda t: t.mul_(2)),
    ],
)
def test_verify_finds_one_wrong_byte(export, tmp_path, name, damage):  # noqa: F811
    out = tmp_path / "out"
    folder = write(tmp_path / "hf", model())
    export(folder, out)
    tensors = load_file(out / SHARD)
    damage(tensors[name])
    save_file(tensors, out / SHARD)
    with refused(f"error: {name} is missing, or differs", error=SystemExit):
        export(folder, out, "--verify-only")


def test_verify_finds_other_tensors_and_another_config(export, tmp_path):  # noqa: F811
    folder, out = write(tmp_path / "hf", model()), tmp_path / "out"
    export(folder, out)
    assert "verified: 43 tensors" in export(folder, out, "--verify-only")
    state = load_file(out / SHARD)
    for changed, said in (
        (without(state, NORM), f"{NORM} is missing, or differs"),
        (state | {"model.extra": torch.ones(1)}, "has 1 tensors that the checkpoint lacks, such as model.extra"),
    ):
        save_file(changed, out / SHARD)
        write_index(out, changed, SHARD.removesuffix(".safetensors"))
        with refused(said, error=SystemExit):
            export(folder, out, "--verify-only")
    path = out / "config.json"
    path.write_text(path.read_text().replace('"ue8m0"', '"none"'))
    with refused("config.json is not what this export writes", error=SystemExit):
        export(folder, out, "--verify-only")
    path.unlink()
    with refused("No such file or directory", "out/config.json", error=SystemExit):
        export(folder, out, "--verify-only")


def test_nothing_of_another_export_stays(export, tmp_path):  # noqa: F811
    """OUT is empty at first: a source of the same size, other shards and an interruption leave nothing there."""
    folder, out = write(tmp_path / "hf", model()), tmp_path / "out"
    out.mkdir()
    export(folder, out, "--verify")
    (out / "config.json").unlink()  # as if it had been interrupted
    write(folder, model())
    for options in ((), ("--shard-gb", 1e-4)):
        with refused(f"{out / SHARD} is there already; choose an empty folder or remove {out}", error=SystemExit):
            export(folder, out, *options)
    with refused("is there already", error=SystemExit):
        export(folder, folder)


def test_out_inside_the_checkpoint(export_job, checkpoint):  # noqa: F811
    export_job("--shard-gb", 2e-3, "--verify", out=checkpoint / "fp8")


def test_files_in_subfolders(export, tmp_path):  # noqa: F811
    """Are copied, but for other kinds and for folders that hold weights; these are named."""
    folder, out = write(tmp_path / "hf", model()), tmp_path / "hf" / "fp8"
    copied = {"additional_chat_templates/tool_use.jinja", "encoding/encoding.py", "encoding/tests/in.json"}
    copied |= {"tokenizer.json", "encoding/other.py", "prompts/nested/in.txt"}
    left = {"README.md", "encoding/README.md", "figures/speed.png"}
    weights = {"checkpoint-5/config.json", "checkpoint-5/model.safetensors", "original/params.json", "original/m.pth"}
    hidden = {".cache/huggingface/in.json", ".gitattributes"}
    for name in copied | left | weights | hidden:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    said = export(folder, out, "--verify")
    assert f"not copied from {folder}: {', '.join(sorted(left | {'checkpoint-5/', 'original/'}))}\n" in said
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == copied | {"config.json", INDEX, SHARD}
    assert all((out / name).read_text() == name for name in copied)


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o002])
def test_files_follow_the_umask(export, tmp_path, mask):  # noqa: F811
    folder = write(tmp_path / "hf", model())
    before = os.umask(mask)
    try:
        export(folder, tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


def test_text_is_utf8_in_any_locale(tmp_path):
    """config.json and the index; the names of tensors come through."""
    unit = "model.größe.weight"
    folder = write(tmp_path / "hf", model() | {unit: tensor(D)})
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(author="Ö"), ensure_ascii=False), encoding="utf-8")
    write_index(folder, model() | {unit: tensor(D)})
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "titan_fp8moe.export_fp8", folder, tmp_path / "out", "--verify"]
    done = subprocess.run(command, env=os.environ | locale, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))["author"] == "Ö"
    assert unit in load_file(tmp_path / "out" / SHARD)
