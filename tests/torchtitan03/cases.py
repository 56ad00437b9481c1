"""What the workers train: DeepSeek-V3's debug model with three layers, the same tokens in every layout."""

from typing import Any, NamedTuple

SEQ_LEN, GLOBAL_BATCH, STEPS = 64, 4, 20


class Case(NamedTuple):
    """A run. ``fp8`` are the settings of fp8_flow_moe, None trains in bf16 with torchtitan's own trainer."""

    fp8: dict[str, Any] | None = {}  # noqa: RUF012  never changed
    parallelism: dict[str, int] = {}  # noqa: RUF012
    checkpointing: str = "none"
    compiles: bool = False
    steps: int = 1
    accumulates: int = 1
    param: str = "bfloat16"


EP2 = {"expert_parallel_degree": 2}
TP2 = {"tensor_parallel_degree": 2}
PP2 = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}
SYMMETRIC = {"dispatch": "symmetric", "dispatch_capacity": 2}

SINGLE = {
    "single": Case(steps=STEPS),
    "single_bf16": Case(None, steps=STEPS),
    "single_selective": Case(checkpointing="selective"),
    "single_full": Case({"recompute": "none"}, checkpointing="full"),
    "single_compile": Case(compiles=True),
    "single_compile_selective": Case(compiles=True, checkpointing="selective"),
    "single_linears": Case({"linear_fqns": ["attention.wo."]}),
    "single_save_h": Case({"save_h": "fp8"}),
    "single_shared_in_bf16": Case({"filter_fqns": ["shared_experts", "layers.2."]}),
    "single_cached": Case({"cache_weights": True}, accumulates=2),
}
TWO_RANKS = {
    "ep2": Case(parallelism=EP2, steps=STEPS),
    "ep2_bf16": Case(None, EP2, steps=STEPS),
    "fsdp2": Case(steps=STEPS),
    "fsdp2_bf16": Case(None, steps=STEPS),
    "ep2_selective": Case({}, EP2, "selective"),
    "ep2_full": Case({"recompute": "none"}, EP2, "full"),
    "ep2_compile": Case({}, EP2, compiles=True),
    "ep2_symmetric_compile": Case(SYMMETRIC, EP2, compiles=True),
    "ep2_shared_in_bf16": Case({"filter_fqns": ["shared_experts"]}, EP2),
    "fsdp2_selective": Case(checkpointing="selective"),
    "fsdp2_compile": Case(compiles=True),
    "fsdp2_fp8_gather": Case({"fp8_all_gather": True}),
    "tp2": Case({}, TP2),
    "pp2": Case({}, PP2),
}
CASES = SINGLE | TWO_RANKS
