"""Every parallel layout against one process, with torchtitan's own trainer and real process groups.

All layouts start from the same weights and see the same global batches, in fp32 compute. What they may differ by is the
order of floating-point sums; where such a difference moves a value over an fp8 rounding boundary it becomes visible, at
a fraction of a percent. A missing or doubled reduction is off by 30% and more.
"""

from collections.abc import Iterable

import pytest

from tests.distributed import cases
from tests.distributed.conftest import WorkerResults

# Tensor parallelism sums partial products in another order, so more values cross a boundary; in the weight gradients
# the 128-token blocks differ as well. Measured: at most 5e-3.
TOLERANCE = 1e-2
# Where dims are padded, a rank's tiles are others. FP8 linears round more values: measured 1.05e-2.
TOLERANCES = {"padded": 0.1, "linears": 0.02, "llama3": 0.02}
FIRST_LOSS = {"linears": 1e-4}  # they round other sums: 1.5e-5 with torch 2.11


@pytest.fixture(scope="session")
def results(case_dir, request) -> WorkerResults:
    kept = [item for item in request.session.items if hasattr(item, "callspec") and not item.get_closest_marker("skip")]
    asked = {item.callspec.params.get("case") for item in kept}
    two, four = ([c for c in of if c in asked or c not in cases.SLOW] for of in (cases.TWO_RANKS, cases.FOUR_RANKS))
    references = {"single_fp32", *(reference(case)[0] for case in two + four)}
    groups = {1: [case for case in cases.SINGLE if case in references], 2: two, 4: four}
    return WorkerResults(case_dir, ("runner.py", "tests.distributed.training:run_layout"), groups)


def reference(case: str) -> tuple[str, str | None]:
    """The case of one process with which it is compared, and the variant of the model that both train."""
    variants = "one_in_bf16", "linears", "padded", "gpt_oss", "llama3", "long"
    variant = next((v for v in variants if case.endswith(v)), None)
    return f"single_{variant}" if variant else "single", variant


def marked(names: Iterable[str]) -> list:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in cases.SLOW)) for name in names]


@pytest.mark.parametrize("case", marked(cases.TWO_RANKS | cases.FOUR_RANKS))
def test_layout_equals_one_process(results, case):
    single, variant = reference(case)
    results.assert_same_step(case, single, TOLERANCES.get(variant, TOLERANCE))
    got, want = results.get(case), results.get(single, beside=case)
    assert got["losses"][0] == pytest.approx(want["losses"][0], rel=FIRST_LOSS.get(variant, 1e-5))
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-3)
    if variant == "llama3":  # has no router
        return
    # Every token once; twice with checkpointing, for which torchtitan divides by two.
    expected = max(want["counted"].values()) * (2 if "ac" in case.split("_") else 1)
    assert set(got["counted"].values()) == {expected}


@pytest.mark.parametrize("case", marked(case for case in cases.CASES if "compile" in case or "memory_budget" in case))
def test_blocks_of_a_kind_share_one_graph(results, case):
    """One for dense and one for MoE blocks, whole or up to the FFN; FSDP's hooks are outside."""
    result = results.get(case)
    assert result["graphs"] == 2
    all_whole = case in ("fsdp2_compile", "ep2_symmetric_compile")
    assert result["whole"] == (["0", "1", "2"] if all_whole else ["0"] * ("memory_budget" not in case))


@pytest.mark.parametrize("case", marked(["ep2_fsdp2", "ep2_fsdp2_op_ac"]))
def test_fsdp_gathers_in_fp8(results, case):
    """Over replicas alone it gathers nothing."""
    results.assert_gathered_in_fp8(case.replace("fsdp2", "fsdp2_fp8_gather"), case)
    assert results.get("hsdp2_ep2_fp8_gather")["gathered"] == {"torch.float32"}


@pytest.mark.parametrize("case", cases.FP8_TENSORS)
def test_fp8_tensors_are_those_of_an_export(results, case):
    """Gathered, and each rank its own."""
    assert results.get(case)["wrong fp8_tensors"] == []


def test_gradients_are_those_of_the_unquantized_model(results):
    """One process in FP8-Flow against one in fp32: fp8 noise on the MoE layers, little elsewhere."""
    errors = results.assert_gradients("single", "single_fp32", 0.12)
    experts = [error for name, error in errors.items() if ".experts.w" in name]
    assert len(experts) == 6 and min(experts) > 1e-3, "the experts were not quantized"
