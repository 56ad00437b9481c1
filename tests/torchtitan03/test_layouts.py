"""Layouts of torchtitan 0.3 against one process, and FP8 against bf16, with torchtitan's trainer."""

import pytest
import torch

from tests.distributed.conftest import WorkerResults
from tests.torchtitan03.cases import CASES, FP8_TENSORS, OTHERS, STEPS
from titan_fp8moe.recipe import row_capacity

TOLERANCE = 1e-2
# FP8 linears round more values.
TOLERANCES = {"linears": 0.02}
# Sums of two ranks round otherwise, and one of 256 tokens chooses another expert.
TOLERANCES_OF_MODELS = {"qwen3": 0.05, "gpt_oss": 0.03}
VARIANTS = "linears", "bf16_parts", "bf16_shared", "long", "lora"
GRADIENTS = [
    name
    for name, case in CASES.items()
    if case.steps == 1 and case.fp8 is not None and case.model != "llama3"
    if name not in ("single", "single_nan", "single_lora", "single_long", "qwen3_5_bf16_shared", *OTHERS)
]


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_equal_those_of_one_process(results: WorkerResults, case: str):
    variant = next((v for v in VARIANTS if case.endswith(v)), None)
    if case.startswith("single") and variant:
        results.assert_gradients(case, "single_fp32", 0.15)
        return
    reference, tolerance = f"single_{variant}" if variant else "single", TOLERANCES.get(variant, TOLERANCE)
    if (model := CASES[case].model) in OTHERS:
        reference, tolerance = f"{model}_{variant}" if variant else model, TOLERANCES_OF_MODELS.get(model, TOLERANCE)
    results.assert_same_step(case, reference, tolerance)


def test_what_is_quantized(results: WorkerResults):
    """FP8 noise on FFNs, little elsewhere; none at all on what filter_fqns names."""
    found = results.assert_gradients("single", "single_fp32", 0.12)
    assert max(error for name, error in found.items() if ".moe." in name or ".feed_forward." in name) > 1e-3
    in_bf16 = results.assert_gradients("single_bf16_parts", "single_fp32", 0.15)
    for part in ("layers.2.moe.shared_experts.w2.weight", "layers.2.moe.routed_experts.inner_experts.w2_EDF"):
        assert in_bf16[part] < 0.75 * found[part]


@pytest.mark.parametrize("model", OTHERS)
def test_other_models_are_those_of_torchtitan(results: WorkerResults, model: str):
    """FP8 noise on every parameter of the MoE layers, as on biases and gates of shared experts."""
    found = results.assert_gradients(model, f"{model}_fp32", 0.15)
    assert min(error for name, error in found.items() if ".moe." in name) > 1e-3
    got, want = results.get(model), results.get(f"{model}_fp32")
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-3) and got["keys"] == want["keys"]


def test_a_dense_model(results: WorkerResults):
    """FP8 noise on FFNs and linears that the converter has chosen, and the same on two ranks."""
    found = results.assert_gradients("llama3", "llama3_fp32", 0.15)
    converted = [error for name, error in found.items() if ".feed_forward." in name or ".wo." in name]
    assert len(converted) == 8 and min(converted) > 0.01
    results.assert_gradients("fsdp2_llama3", "llama3", TOLERANCES["linears"])


def test_losses_of_some_steps(results: WorkerResults):
    """A weight cache changes none, with two microbatches a step."""
    cached, plain = results.get("ep2_cached"), results.get("ep2_accumulated")
    assert cached["losses"] == plain["losses"] and cached["norms"] == plain["norms"]
    fp8, bf16 = results.get("ep2_20"), results.get("ep2_20_bf16")
    assert len(fp8["losses"]) == len(bf16["losses"]) == STEPS and fp8["losses"][-1] < fp8["losses"][0] - 0.3
    assert fp8["losses"] == pytest.approx(bf16["losses"], rel=5e-3)
    assert fp8["norms"] == pytest.approx(bf16["norms"], rel=0.1)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.compiles])
def test_blocks_are_graphs_up_to_where_dispatch_reads_sizes(results: WorkerResults, case: str):
    """One for dense and one for MoE blocks, or for what precedes their all-to-all. Shared experts in bf16 have their
    own then, as under TP 2 and with LoRA. Of gpt_oss each of two masks has one; qwen3 has no dense blocks."""
    apart = "ep2_compile_bf16_shared", "tp2_ep2_compile", "ep2_compile_lora"
    graphs = {"qwen3_ep2_compile": 1, "ep2_auto": 4} | dict.fromkeys(apart, 3)
    assert results.get(case)["graphs"] == graphs.get(case, 2)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.checkpointing == "budget"])
def test_a_memory_budget_leaves_the_experts_alone(results: WorkerResults, case: str):
    """``h`` of each of the two layers is kept. In one graph with the experts PyTorch 2.14's partitioner fails."""
    rows = row_capacity(256 * 3, 8) if case.startswith("single") else row_capacity(2 * 128 * 3, 4)
    assert results.get(case)["saved"].count((rows, 2 * 256)) == 2


def test_auto_takes_symmetric_memory_and_loses_no_step(results: WorkerResults):
    """Bit for bit the all-to-all: two steps over it, three over symmetric memory, of which the last has too little room
    and runs again, one over the all-to-all."""
    got, want = results.get("ep2_auto"), results.get("ep2_all_to_all")
    assert got["fast"] == [False, False, True, True, True, False] and not any(want["fast"])
    assert got["losses"] == want["losses"] and [n for n in got["norms"] if n == n] == want["norms"]
    assert got["weights"] and all(torch.equal(w, want["weights"][name]) for name, w in got["weights"].items())


def test_fsdp_gathers_in_fp8(results: WorkerResults):
    for case in ("fsdp2", "fsdp2_ep2"):
        results.assert_gathered_in_fp8(f"{case}_fp8_gather", case)
    assert results.get("hsdp2_fp8_gather")["gathered"] == {"torch.uint8"}
    assert results.get("gpt_oss_fp8_gather")["gathered"] == {"torch.uint8", "torch.float32"}  # its biases


@pytest.mark.parametrize("outside", ["single", "ep2", "ep2_partial_dtensor"])
def test_experts_outside_of_fsdp_train_as_inside(results: WorkerResults, outside: str):
    """Bit for bit, since FSDP's compute dtype here is the parameters': gradients, their norm, and AdamW's step."""
    got, want = results.get(outside), results.get(f"{outside.partition('_')[0]}_in_fsdp")
    assert got["gathered"] == set() and want["gathered"] == {"torch.float32"}
    assert got["keys"] == want["keys"] and got["norms"] == want["norms"]
    for part in ("grads", "weights"):
        assert got[part] and got[part].keys() == want[part].keys()
        assert all(torch.equal(tensor, want[part][name]) for name, tensor in got[part].items())


@pytest.mark.parametrize(("case", "reference", "trainer"), [
    ("single_converter", "single", "Trainer"),
    ("single_statistics_fault_tolerant", "single_statistics", "FaultTolerantTrainer"),
    ("single_graph_trainer", "single", "GraphTrainer"),
])  # fmt: skip
def test_other_trainers_compute_the_same(results: WorkerResults, case: str, reference: str, trainer: str):
    got, want = results.get(case), results.get(reference)
    assert got["trainer"] == trainer and got["logged"] == want["logged"]
    assert got["losses"][0] == pytest.approx(want["losses"][0], rel=1e-6)
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-4)  # one has another kind of loss


@pytest.mark.parametrize("case", FP8_TENSORS)
def test_fp8_tensors_are_those_of_an_export(results: WorkerResults, case: str):
    """Gathered, and each rank its own."""
    assert results.get(case)["wrong fp8_tensors"] == []


def test_lora_trains_its_adapters(results: WorkerResults):
    got = results.get("single_lora")
    assert got["grads"].keys() == {*got["trained"]} and all("lora_" in name for name in got["trained"])
    assert all(grad.abs().max() > 0 for grad in got["grads"].values())
    assert sum("inner_experts.lora_" in name for name in got["trained"]) == 2 * 6  # layers, A and B of three


def test_a_nan_is_named_before_torchtitan_ends_the_job(results: WorkerResults):
    result = results.get("single_nan")
    assert "Loss is not finite" in result["raised"]
    (warning,) = result["warnings"]
    assert "NaN or Inf showed first in layers.2.moe, in its input x, on this rank" in warning


def test_statistics_are_logged(results: WorkerResults):
    logged = results.get("single_statistics")["logged"]
    assert logged and all(name.startswith("fp8_flow_moe/") and steps == [2] for name, steps in logged.items())
    assert results.get("single_statistics_compile")["logged"] == logged
