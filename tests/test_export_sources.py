"""Which checkpoints the FP8 export takes: complete ones, under the model's names, with the model's own config."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.layer import refused
from tests.test_export_fp8 import TOML, assets, checkpoint, export, export_job, hardware_check, job  # noqa: F401
from titan_fp8moe.export_fp8.sources import INDEX

D, E, LAYERS = 128, 3, 2
CONFIG = dict(
    num_hidden_layers=LAYERS, hidden_size=D, vocab_size=64, num_experts=E, tie_word_embeddings=False,
    layer_types=["full_attention", "full_attention"],
)  # fmt: skip
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"


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


def without(state: dict[str, torch.Tensor], *parts: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if not any(part in name for part in parts)}


def names(folder: Path) -> set[str]:
    """Of an export's tensors but the scales."""
    found = {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    return {name for name in found if not name.endswith("_scale_inv")}


# --- a checkpoint is what its index and its config say ----------------------------------------------------------------


@pytest.mark.parametrize("lost", [EXPERT, NORM, "model.layers.0.mlp.gate.weight"])
def test_an_index_that_names_more(export, tmp_path, lost):  # noqa: F811
    folder = write(tmp_path / "hf", without(model(), lost))
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(model(), "model.safetensors")}))
    with refused(f"model.safetensors lacks {lost}, which {INDEX} names; complete", error=SystemExit):
        export(folder, tmp_path / "out")


def test_an_index_that_names_less(export, tmp_path):  # noqa: F811
    folder = write(tmp_path / "hf", model(), file="model-00001-of-00001")
    index = {"weight_map": dict.fromkeys(without(model(), NORM), "model-00001-of-00001.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    with refused(f"model-00001-of-00001.safetensors has {NORM}, which {INDEX} does not name", error=SystemExit):
        export(folder, tmp_path / "out")
    write(folder, model())
    with refused("has model.safetensors, which", "does not name; remove one of the two", error=SystemExit):
        export(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("lost", "changes", "said"),
    [
        ((EXPERT,), {}, f"num_experts = 3, but the checkpoint lacks {EXPERT}"),
        (("experts.2.",), {}, "lacks model.layers.0.mlp.experts.2."),
        (("layers.0.mlp.gate.weight",), {}, "lacks layers.0.mlp.gate.weight, which layer 1 has"),
        (("layers.1.self_attn.q_proj",), {}, "lacks layers.1.self_attn.q_proj.weight, which layer 0 has"),
        (("layers.1.mlp.",), {}, "lacks layers.1.mlp.experts.*.down_proj.weight, which layer 0 has"),
        (("layers.1.",), {}, "num_hidden_layers = 2, but the checkpoint lacks layers.1."),
        ((EMBEDDING,), {}, "vocab_size = 64, but the checkpoint lacks the embedding"),
        ((HEAD,), {}, "tie_word_embeddings = false, but the checkpoint lacks lm_head.weight"),
        ((), dict(num_experts=2), "num_experts = 2, but the checkpoint has model.layers.0.mlp.experts.2."),
        ((), dict(num_hidden_layers=1), "num_hidden_layers = 1, but the checkpoint has model.layers.1."),
        ((), dict(hidden_size=64), "hidden_size = 64, but "),
        ((), dict(moe_intermediate_size=64), "moe_intermediate_size = 64, but model.layers.0.mlp.experts.0."),
        ((), dict(tie_word_embeddings=True), "tie_word_embeddings = true, but the checkpoint has lm_head.weight"),
        ((), dict(num_hidden_layers=None), "states no num_hidden_layers; pass the model's own config with --assets"),
    ],
)
def test_config_and_tensors_agree(export, tmp_path, lost, changes, said):  # noqa: F811
    folder = write(tmp_path / "hf", without(model(), *lost), CONFIG | changes)
    with refused(said, *["Complete the checkpoint, or pass"] * bool(lost), error=SystemExit):
        export(folder, tmp_path / "out")


def test_verified_lists_what_was_compared(export, tmp_path):  # noqa: F811
    said = export(write(tmp_path / "hf", model()), tmp_path / "out", "--verify").splitlines()[-1]
    assert said == (
        "verified: 43 tensors are the checkpoint's, bit for bit; it has what config.json states of num_hidden_layers, "
        "vocab_size, tie_word_embeddings, hidden_size, num_experts"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "states no num_hidden_layers"),
        ("[]", "config.json holds no JSON object"),
        ('{"num_hidden_layers": 2', "config.json is no JSON"),
    ],
)
def test_a_config_that_is_none(export, tmp_path, text, said):  # noqa: F811
    folder = write(tmp_path / "hf", model())
    (folder / "config.json").write_text(text)
    with refused(said, error=SystemExit):
        export(folder, tmp_path / "out")


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
    kinds = CONFIG | dict(layer_types=["full", "shared"])
    export(write(tmp_path / "hf", state, kinds), tmp_path / "out", "--verify")
    with refused("lacks layers.1.self_attn.indexer.wk.weight, which layer 0 has", error=SystemExit):
        export(write(tmp_path / "hf", state), tmp_path / "other")


def test_config_of_several_models(export, tmp_path):  # noqa: F811
    """The decoder's values are in text_config."""
    state = {name.replace("model.", "model.language_model."): value for name, value in model().items()}
    config = dict(text_config=CONFIG, vision_config=dict(num_hidden_layers=9, hidden_size=7))
    folder = write(tmp_path / "hf", state, config)
    assert "num_hidden_layers, vocab_size" in export(folder, tmp_path / "out", "--verify")
    config["text_config"] = CONFIG | dict(num_experts=4)
    with refused("num_experts = 4", error=SystemExit):
        export(write(folder, state, config), tmp_path / "other")


# --- other files, other names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["adapter_model", "consolidated", "shard-00001-model-00001-of-00001"])
def test_stray_files(export, tmp_path, file):  # noqa: F811
    """Transformers reads model.safetensors alone. Without it no other file is taken for the model."""
    stray = {"layers.0.feed_forward.experts.0.w1.weight": tensor(D, D)}
    folder = write(write(tmp_path / "hf", stray, file=file), model())
    export(folder, tmp_path / "out", "--verify")
    assert names(tmp_path / "out") == model().keys()
    (folder / "model.safetensors").unlink()
    with refused("has neither", f"but {file}.safetensors; save the model", error=SystemExit):
        export(folder, tmp_path / "other")


def test_numbered_files_without_an_index(export, tmp_path):  # noqa: F811
    """As several ranks of torchtitan save them."""
    halves = [dict([*model().items()][:10]), dict([*model().items()][10:])]
    for i, state in enumerate(halves):
        folder = write(tmp_path / "hf", state, file=f"model-0000{i + 1}-of-00002")
    export(folder, tmp_path / "out", "--verify")
    assert names(tmp_path / "out") == model().keys()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with refused("lacks model-00002-of-00002.safetensors; complete", error=SystemExit):
        export(folder, tmp_path / "other")


@pytest.mark.parametrize(
    ("layer", "root"),
    [
        ("", "_orig_mod."),
        ("", "module."),
        ("_checkpoint_wrapped_module.", ""),
        ("_fsdp_wrapped_module.", "_fsdp_wrapped_module."),
        ("", "base_model.model."),
        ("_checkpoint_wrapped_module._orig_mod.", "module._orig_mod."),
        ("", "base_model.model.module."),
    ],
)
def test_names_of_wrapped_models(export, tmp_path, layer, root):  # noqa: F811
    state = {root + name.replace("layers.1.", f"layers.1.{layer}"): value for name, value in model().items()}
    export(write(tmp_path / "hf", state), tmp_path / "out", "--verify")
    assert names(tmp_path / "out") == model().keys()


ADAPTERS = (
    "self_attn.q_proj.lora_A.default", "self_attn.q_proj.base_layer", "mlp.gate.modules_to_save.default",
    "self_attn.q_proj.lora_magnitude_vector.default",
)  # fmt: skip


@pytest.mark.parametrize("name", [f"model.layers.0.{name}.weight" for name in ADAPTERS])
def test_adapters_that_nobody_merged(export, tmp_path, name):  # noqa: F811
    folder = write(tmp_path / "hf", model() | {name: tensor(D, D)})
    with refused(f"{name} is an adapter", "merge it first", error=SystemExit):
        export(folder, tmp_path / "out")


@pytest.mark.parametrize("part", ["mlp.experts.0.up_proj.parametrizations.weight.original0", "norm.weight_orig"])
def test_parametrized_weights(export, tmp_path, part):  # noqa: F811
    name = f"model.layers.0.{part}"
    mask = {name.replace("_orig", "_mask"): tensor(D)} if "_orig" in name else {}
    with refused(f"{name} is what PyTorch makes", "remove_parametrizations", error=SystemExit):
        export(write(tmp_path / "hf", model() | {name: tensor(D)} | mask), tmp_path / "out")


@pytest.mark.parametrize("root", ["_forward_module.", "policy.", "model.module."])
def test_names_of_unknown_wrappers(export, tmp_path, root):  # noqa: F811
    """And a tensor under two names."""
    folder = write(tmp_path / "hf", {root + name: value for name, value in model().items()})
    with refused(f"{root}lm_head.weight", "of no decoder", "state dict of the model inside", error=SystemExit):
        export(folder, tmp_path / "out")
    write(folder, model() | {f"module.{NORM}": tensor(D)})
    with refused(f"has {NORM} twice", error=SystemExit):
        export(folder, tmp_path / "out")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:4], lambda b: b"version https://git-lfs"])
def test_damaged_safetensors(export, tmp_path, damage):  # noqa: F811
    """The source's, and an export's that is resumed."""
    folder, out = write(tmp_path / "hf", model()), tmp_path / "out"
    export(folder, out)
    shard = out / "model-00001-of-00001.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    for option in ((), ("--verify-only",)):
        with refused(f"error: {shard} cannot be read (", "copy or save it again", error=SystemExit):
            export(folder, out, *option)
    source = folder / "model.safetensors"
    source.write_bytes(damage(source.read_bytes()))
    with refused(f"error: {source} cannot be read (", error=SystemExit):
        export(folder, tmp_path / "other")


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


def test_out_inside_the_checkpoint(export_job, checkpoint):  # noqa: F811
    """The same command resumes, also beside a log that is written there."""
    out = checkpoint / "fp8"
    export_job("--shard-gb", 2e-3, out=out)
    (checkpoint / "export.log").write_text("")
    (out / "model-00002-of-00005.safetensors").unlink()
    assert export_job("--shard-gb", 2e-3, out=out).count("was there") == 4
    (checkpoint / "export.log").unlink()
    shutil.rmtree(out)


def test_files_in_subfolders(export, tmp_path):  # noqa: F811
    """Are copied, but for other kinds and for folders that hold weights; these are named."""
    folder, out = write(tmp_path / "hf", model()), tmp_path / "hf" / "fp8"
    copied = {"additional_chat_templates/tool_use.jinja", "encoding/encoding.py", "encoding/tests/in.json"}
    left = {"README.md", "encoding/README.md", "figures/speed.png"}
    weights = {"checkpoint-5/config.json", "checkpoint-5/model.safetensors", "original/params.json", "original/m.pth"}
    hidden = {".cache/huggingface/in.json", ".gitattributes"}
    for name in copied | left | weights | hidden:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    said = export(folder, out, "--verify")
    assert f"not copied from {folder}: {', '.join(sorted(left | {'checkpoint-5/', 'original/'}))}\n" in said
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == copied | {"config.json", INDEX, "model-00001-of-00001.safetensors"}
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
    index = {"weight_map": dict.fromkeys([*model(), unit], "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "titan_fp8moe.export_fp8", folder, tmp_path / "out", "--verify"]
    done = subprocess.run(command, env=os.environ | locale, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))["author"] == "Ö"
    assert unit in load_file(tmp_path / "out/model-00001-of-00001.safetensors")


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
        (without(state, norm), f"1 missing, such as {norm}"),
        (state | {last: tensor(256, 64)}, f"1 of another shape, such as {last}"),
        (state | {"model.extra.weight": tensor(4)}, "1 unknown, such as model.extra.weight"),
    ):
        with refused("is not a checkpoint of deepseek_v3 tiny", said, error=SystemExit):
            export(write(tmp_path / "hf", changes, config), tmp_path / "other", *options, "--assets", assets)
