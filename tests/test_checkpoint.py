"""Checkpoints go between bf16 and FP8, between layouts and through Hugging Face's format, with torchtitan's trainer.

The converter adds nothing to a checkpoint and takes nothing away, so what was saved is loaded bit for bit, and the loss
goes on where it was.
"""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor `tiny`
from tests.distributed.checkpoint_worker import COMMON, FOUR_RANKS, ONE_RANK, TWO_RANKS
from tests.distributed.conftest import WorkerResults, case_dir  # noqa: F401  case_dir is a fixture
from tests.processes import run_workers

State = dict[str, torch.Tensor]
# Relative difference of losses between bf16 and FP8. With weights that were not loaded it is 5% and more.
TOLERANCE = 0.005


@pytest.fixture(scope="module")
def out(case_dir: Path) -> Path:  # noqa: F811
    return case_dir


@pytest.fixture(scope="module")
def seed_checkpoint(out: Path) -> Path:
    """Made by torchtitan's command line with the converter on, without a GPU."""
    data = [
        "--training.dataset=c4_test",
        f"--training.dataset_path={out}/data",
        f"--model.hf_assets_path={out}/tokenizer",
    ]
    args = [*COMMON, *data, "--model.converters=fp8_flow_moe", f"--job.dump_folder={out}/seed"]
    run = run_workers("-m", 1, "torchtitan.train", *args, "--checkpoint.create_seed_checkpoint", cpu_only=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return out / "seed/checkpoint/step-0"


@pytest.fixture(scope="module")
def quantized_model(out: Path) -> State:
    """Writes a checkpoint as DeepSeek publishes them to OUT/quantized, and returns its dequantized tensors.

    Matrices of the layers are e4m3 with one fp32 scale per 128x128 block; router, norms, embeddings and output are
    bf16, the routing bias is fp32.
    """
    torch.manual_seed(0)
    args = copy.deepcopy(deepseekv3_args["tiny"])
    args.update_from_config(JobConfig())
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in DeepSeekV3Model(args).state_dict().items()}
    state = {name: torch.randn(shape) * 0.05 for name, shape in shapes.items()}
    stored, expected = {}, {}
    for name, value in DeepSeekV3StateDictAdapter(args, None).to_hf(state).items():
        if name.endswith("_proj.weight") or "kv_a_proj" in name:
            weight, scale = quantize_blocks(value)
            stored |= {name: weight, f"{name}_scale_inv": scale}
            expected[name] = weight.float() * spread_blocks(scale, weight.shape)
        else:
            stored[name] = value if name.endswith("e_score_correction_bias") else value.bfloat16()
            expected[name] = stored[name].float()
    folder = out / "quantized"
    folder.mkdir()
    names = [sorted(stored)[i::2] for i in range(2)]  # scales and weights in different files, too
    files = [f"model-{i + 1:05}-of-00002.safetensors" for i in range(2)]
    for file, part in zip(files, names, strict=True):
        save_file({name: stored[name].contiguous() for name in part}, folder / file)
    weight_map = {name: file for file, part in zip(files, names, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return expected


def spread_blocks(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    padded = torch.nn.functional.pad(weight.abs(), (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128))
    scale = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3)) / 448
    return (weight / spread_blocks(scale, weight.shape)).to(torch.float8_e4m3fn), scale


@pytest.fixture(scope="module")
def results(out: Path, seed_checkpoint: Path, quantized_model: State) -> WorkerResults:
    groups = {1: [*ONE_RANK], 2: [*TWO_RANKS], 4: [*FOUR_RANKS]}
    return WorkerResults(out, "checkpoint_worker.py", groups, cpu_only=True)


def checkpoint(out: Path, run: str, step: int) -> Path:
    return out / run / f"checkpoint/step-{step}"


def assert_same_state(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    assert state, "nothing to compare"
    different = [name for name, value in state.items() if not torch.equal(value, expected[name])]
    assert not different


def model_only(state: State) -> State:
    return {name: value for name, value in state.items() if not name.startswith("optimizer.")}


def assert_continues(losses: dict[int, float], uninterrupted: dict[int, float], steps: range, tolerance: float) -> None:
    assert list(losses) == list(steps)
    assert [losses[i] for i in steps] == pytest.approx([uninterrupted[i] for i in steps], rel=tolerance)


def read_dcp(path: Path, tmp_path: Path) -> State:
    """The tensors of model and optimizer in a checkpoint."""
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    optimizer = {f"optimizer.{k}": v for k, v in whole.pop("optimizer", {}).items()}
    return {k: v for k, v in (whole | optimizer).items() if torch.is_tensor(v)}


def test_bf16_to_fp8_and_back(results: WorkerResults):
    """bf16 for 2 steps, FP8 for 2, bf16 for 2: everything is carried over, and the loss has no step."""
    uninterrupted, fp8, back = (results.get(run) for run in ("bf16", "fp8_from_bf16", "bf16_from_fp8"))
    losses = uninterrupted["losses"]
    assert losses[3] < losses[1] * (1 - 10 * TOLERANCE), "a lost checkpoint would not show"
    assert_continues(fp8["losses"], uninterrupted["losses"], range(3, 5), TOLERANCE)
    assert_continues(back["losses"], uninterrupted["losses"], range(5, 7), TOLERANCE)
    assert fp8["losses"][3] != uninterrupted["losses"][3], "the converter did nothing"
    assert_same_state(back["loaded"], fp8["saved"])

    keys = [
        FileSystemReader(checkpoint(results.out, run, 4)).read_metadata().state_dict_metadata.keys()
        for run in ("bf16", "fp8_from_bf16")
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("saved", "loaded"), [("bf16_to_hf", "fp8_from_hf"), ("fp8_to_hf", "bf16_from_hf"), ("bf16_to_hf", "ep2_from_hf")]
)
def test_through_hugging_face_format(results: WorkerResults, saved: str, loaded: str):
    """Saved after step 4. Only the model is: the next run counts from step 1, which has the batch of step 5."""
    uninterrupted, saved, loaded = (results.get(run) for run in ("bf16", saved, loaded))
    assert_same_state(loaded["loaded"], model_only(saved["saved"]))
    assert loaded["losses"][1] == pytest.approx(uninterrupted["losses"][5], rel=TOLERANCE)


def test_expert_parallel_to_hugging_face_format(results: WorkerResults):
    saved = results.get("ep2")["saved"]
    (file,) = checkpoint(results.out, "ep2", 4).glob("*.safetensors")
    adapter = DeepSeekV3StateDictAdapter(deepseekv3_args["tiny"], None)
    assert_same_state(adapter.from_hf(load_file(file)), model_only(saved))


@pytest.mark.parametrize("run", ["quantized", "ep2_quantized", "fsdp2_quantized"])
def test_deepseek_fp8_checkpoint(results: WorkerResults, quantized_model: State, run: str):
    """initial_load_in_hf_quantized: parameters are the dequantized values, on any layout."""
    result = results.get(run)
    expected = DeepSeekV3StateDictAdapter(deepseekv3_args["tiny"], None).from_hf(quantized_model)
    assert_same_state(result["loaded"], expected)
    for titan, hf in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        experts = [quantized_model[f"model.layers.2.mlp.experts.{e}.{hf}_proj.weight"] for e in range(8)]
        assert torch.equal(result["loaded"][f"layers.2.moe.experts.{titan}"], torch.stack(experts))
    assert math.isfinite(result["losses"][1])


def test_ep2_to_ep4(results: WorkerResults, tmp_path: Path):
    """Twice as many ranks continue: same parameters and optimizer state, bit for bit, and the same losses."""
    ep2, ep4 = results.get("ep2"), results.get("ep4_from_ep2")
    saved = read_dcp(checkpoint(results.out, "ep2", 2), tmp_path)
    assert any(name.startswith("optimizer.") and "experts.w1" in name for name in saved)
    assert_same_state(ep4["loaded"], saved)
    # The same numbers but for the order of sums.
    assert_continues(ep4["losses"], ep2["losses"], range(3, 5), 1e-3)


def test_weights_gathered_in_fp8(results: WorkerResults, tmp_path: Path):
    """Checkpoints hold the parameters, whatever FSDP gathers."""
    run, uninterrupted = results.get("fsdp2_fp8_gather"), results.get("bf16")
    assert_same_state(run["loaded"], read_dcp(checkpoint(results.out, "bf16", 2), tmp_path))
    assert_same_state(run["saved"], read_dcp(checkpoint(results.out, "fsdp2_fp8_gather", 4), tmp_path))
    assert_continues(run["losses"], uninterrupted["losses"], range(3, 5), TOLERANCE)


def test_seed_checkpoint(results: WorkerResults, seed_checkpoint: Path, tmp_path: Path):
    """Made with the converter, it is the model that a bf16 run with the same seed starts with; EP2 loads it."""
    seed = model_only(read_dcp(seed_checkpoint, tmp_path))
    assert_same_state(seed, results.get("bf16")["loaded"])
    loaded = results.get("ep2_from_seed")
    assert_same_state(loaded["loaded"], seed)
    assert loaded["losses"][1] == pytest.approx(results.get("bf16")["losses"][1], rel=TOLERANCE)
