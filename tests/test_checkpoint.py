"""Checkpoints go between bf16 and FP8, between layouts and through Hugging Face's format, with torchtitan's trainer.

The converter adds nothing to a checkpoint and takes nothing away, so what was saved is loaded bit for bit, and the loss
goes on where it was.
"""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor `tiny`
from tests.distributed.cases import CHECKPOINTS_FOUR, CHECKPOINTS_ONE, CHECKPOINTS_TWO
from tests.distributed.conftest import WorkerResults, case_dir  # noqa: F401  case_dir is a fixture

State = dict[str, torch.Tensor]
# Relative difference of losses between bf16 and FP8. With weights that were not loaded it is 5% and more.
TOLERANCE = 0.005


@pytest.fixture(scope="module")
def results(case_dir: Path) -> WorkerResults:  # noqa: F811
    groups = {1: [*CHECKPOINTS_ONE], 2: [*CHECKPOINTS_TWO], 4: [*CHECKPOINTS_FOUR]}
    return WorkerResults(case_dir, ("runner.py", "tests.distributed.training:run_checkpoints"), groups, cpu_only=True)


def model_only(state: State) -> State:
    return {name: value for name, value in state.items() if not name.startswith("optimizer.")}


def read_dcp(path: Path) -> State:
    """The tensors of model and optimizer in a checkpoint."""
    dcp_to_torch_save(path, path / "whole.pt")
    whole = torch.load(path / "whole.pt", weights_only=False)
    optimizer = {f"optimizer.{k}": v for k, v in whole.pop("optimizer", {}).items()}
    return {k: v for k, v in (whole | optimizer).items() if torch.is_tensor(v)}


def assert_same_state(state: State, expected: State) -> None:
    assert state.keys() == expected.keys() and state
    assert not [name for name, value in state.items() if not torch.equal(value, expected[name])]


LOADED = [
    # A run, what it has loaded, its first step, the run that has the same batches and losses so many steps later (after
    # a model alone a run counts from step 1), and their relative difference.
    ("fp8_from_bf16", "bf16/checkpoint/step-2", 3, "bf16", 0, TOLERANCE),
    ("bf16_from_fp8", "fp8_from_bf16/checkpoint/step-4", 5, "bf16", 0, TOLERANCE),
    ("fp8_from_hf", "bf16_to_hf", 1, "bf16", 4, TOLERANCE),
    ("bf16_from_hf", "fp8_to_hf", 1, "bf16", 4, TOLERANCE),
    ("ep2_from_hf", "bf16_to_hf", 1, "bf16", 4, TOLERANCE),
    ("ep4_from_ep2", "ep2/checkpoint/step-2", 3, "ep2", 0, 1e-3),  # the same numbers but for the order of sums
    ("fsdp2_fp8_gather", "bf16/checkpoint/step-2", 3, "bf16", 0, TOLERANCE),
]


@pytest.mark.parametrize(("run", "source", "first", "other", "later", "tolerance"), LOADED)
def test_what_a_run_loads(results: WorkerResults, run, source, first, other, later, tolerance):
    """Parameters and optimizer are what was saved, bit for bit, and the loss has no step."""
    result, reference = results.get(run), results.get(other)["losses"]
    if "checkpoint" in source:
        state = read_dcp(results.out / source)
        assert any(name.startswith("optimizer.") and "experts.w1" in name for name in state)
    else:
        state = model_only(results.get(source)["saved"])
    assert_same_state(result["loaded"], state)
    assert min(result["losses"]) == first
    for step, loss in result["losses"].items():
        assert math.isfinite(loss) and loss == pytest.approx(reference[step + later], rel=tolerance)


def test_what_a_run_saves(results: WorkerResults):
    """The parameters, under the same keys as in bf16, whatever FSDP gathers, also in Hugging Face's format."""
    losses = results.get("bf16")["losses"]
    assert losses[3] < losses[1] * (1 - 10 * TOLERANCE), "a lost checkpoint would not show"
    assert results.get("fp8_from_bf16")["losses"][3] != losses[3], "the converter did nothing"
    paths = [results.out / run / "checkpoint/step-4" for run in ("bf16", "fp8_from_bf16", "fsdp2_fp8_gather")]
    keys = [FileSystemReader(path).read_metadata().state_dict_metadata.keys() for path in paths[:2]]
    assert keys[0] == keys[1]
    for path in paths[1:]:
        assert_same_state(results.get(path.parts[-3])["saved"], read_dcp(path))
    (file,) = (results.out / "ep2/checkpoint/step-4").glob("*.safetensors")
    saved = DeepSeekV3StateDictAdapter(deepseekv3_args["tiny"], None).from_hf(load_file(file))
    assert_same_state(saved, model_only(results.get("ep2")["saved"]))
