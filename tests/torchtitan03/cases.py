"""What the workers train: debug models with a few layers, the same tokens in every layout."""

from typing import Any, NamedTuple

GLOBAL_BATCH, STEPS = 4, 20
LONG = 256  # two context-parallel ranks share a sequence in blocks of 128


class Case(NamedTuple):
    """A run. ``fp8`` are the settings of fp8_flow_moe, None trains without, with torchtitan's own trainer. ``compiles``
    is torch.compile's backend. Runs of one step compute in fp32, since layouts would differ by the rounding of every
    dense layer in bf16."""

    fp8: dict[str, Any] | None = {}  # noqa: RUF012  never changed
    parallelism: dict[str, Any] = {}  # noqa: RUF012
    checkpointing: str = "none"
    compiles: str = ""
    steps: int = 1
    accumulates: int = 1
    model: str = "deepseek_v3"
    seq_len: int = 64
    way: str = "section"  # how the model is converted, see worker.CONVERTED
    in_fsdp: bool = False  # experts that could leave FSDP stay in it


EP2 = {"expert_parallel_degree": 2}
TP2 = {"tensor_parallel_degree": 2}
CP2 = {"context_parallel_degree": 2}
HSDP2 = {"data_parallel_replicate_degree": 2}
PARTIAL_DTENSOR = {"spmd_backend": "partial_dtensor"}  # buffers are DTensors then
PP2 = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}
LINEARS = {"linear_fqns": ["attention.wo."]}
BF16_PARTS = {"filter_fqns": ["shared_experts", "layers.2."]}
BF16_SHARED = {"filter_fqns": ["shared_experts"]}
SYMMETRIC = {"dispatch": "symmetric", "dispatch_capacity": 2}

SINGLE = {
    "single": Case(),
    "single_fp32": Case(None),
    "single_compile_selective": Case(compiles="aot_eager", checkpointing="selective"),
    "single_inductor_budget": Case(compiles="inductor", checkpointing="budget"),
    "single_linears": Case(LINEARS),
    "single_bf16_parts": Case(BF16_PARTS),
    "single_bf16_shared": Case(BF16_SHARED),
    "single_statistics": Case({"statistics_every": 2}, steps=3),
    "single_statistics_compile": Case({"statistics_every": 2}, compiles="aot_eager", steps=3),
    "single_long": Case(seq_len=LONG),
    "single_nan": Case(),  # of one weight
    "single_in_fsdp": Case(in_fsdp=True),
    "single_flag": Case(way="flag"),
    "single_converter": Case(way="converter"),
    "single_lora": Case(way="lora"),
    "single_statistics_fault_tolerant": Case({"statistics_every": 2}, steps=3, way="fault tolerant"),
    "single_graph_trainer": Case(way="graph trainer"),
}
OTHERS = "qwen3", "gpt_oss", "qwen3_5", "kimi_k2_7", "mtp"
SINGLE |= {model: Case(model=model, way="flag") for model in OTHERS}
SINGLE |= {f"{model}_fp32": Case(None, model=model) for model in OTHERS}
DENSE = {"llama3": Case(LINEARS, model="llama3", way="converter"), "llama3_fp32": Case(None, model="llama3")}
SINGLE |= DENSE
SINGLE["qwen3_5_bf16_shared"] = Case(BF16_SHARED, model="qwen3_5")
TWO_RANKS = {
    "ep2_20": Case(parallelism=EP2, steps=STEPS),
    "ep2_20_bf16": Case(None, EP2, steps=STEPS),
    "ep2": Case({}, EP2),
    "ep2_in_fsdp": Case({}, EP2, in_fsdp=True),
    "ep2_partial_dtensor": Case({}, EP2 | PARTIAL_DTENSOR),
    "ep2_selective": Case({}, EP2, "selective"),
    "ep2_full": Case({"recompute": "none"}, EP2, "full"),
    "ep2_compile_selective": Case({}, EP2, "selective", compiles="aot_eager"),
    "ep2_inductor_selective": Case({}, EP2, "selective", compiles="inductor", accumulates=2),
    "ep2_compile_full": Case({}, EP2, "full", compiles="aot_eager"),
    "ep2_symmetric_inductor_budget": Case(SYMMETRIC, EP2, "budget", compiles="inductor"),
    "ep2_compile_bf16_shared": Case(BF16_SHARED, EP2, "selective", compiles="aot_eager"),
    "ep2_symmetric_compile": Case(SYMMETRIC, EP2, compiles="aot_eager"),
    "ep2_auto": Case({}, EP2, "selective", compiles="aot_eager", steps=6),
    "ep2_all_to_all": Case({"dispatch": "all_to_all"}, EP2, "selective", compiles="aot_eager", steps=6),
    "ep2_cached": Case({"cache_weights": True}, EP2, steps=3, accumulates=2),
    "ep2_accumulated": Case({}, EP2, steps=3, accumulates=2),
    "ep2_bf16_parts": Case(BF16_PARTS, EP2),
    "ep2_linears": Case(LINEARS, EP2),
    "fsdp2": Case(),
    "fsdp2_lora": Case(way="lora"),
    "fsdp2_llama3": DENSE["llama3"],
    "fsdp2_compile": Case(compiles="aot_eager"),
    "fsdp2_fp8_gather": Case({"fp8_all_gather": True}),
    "tp2_ep2": Case({}, TP2 | EP2),
    "tp2_linears": Case(LINEARS, TP2 | PARTIAL_DTENSOR),
    "tp2_compile": Case({}, TP2, compiles="aot_eager"),
    "pp2": Case({}, PP2),
    "cp2_long": Case({}, CP2, seq_len=LONG),
    "cp2_ep2_long": Case({}, CP2 | EP2, seq_len=LONG),
    "tp2_ep2_compile": Case({}, TP2 | EP2, "selective", compiles="aot_eager"),
    "ep2_compile_lora": Case({}, EP2, "selective", compiles="aot_eager", way="lora"),
    "qwen3_ep2_compile": Case({}, EP2, "selective", compiles="aot_eager", model="qwen3"),
    "gpt_oss_ep2_compile": Case({}, EP2, "selective", compiles="aot_eager", model="gpt_oss"),
    "gpt_oss_tp2": Case({}, TP2, model="gpt_oss"),
    "gpt_oss_fp8_gather": Case({"fp8_all_gather": True}, model="gpt_oss"),
    "qwen3_5_ep2": Case({}, EP2, model="qwen3_5"),
    "qwen3_5_tp2_ep2_compile_bf16_shared": Case(
        BF16_SHARED, TP2 | EP2, "selective", compiles="aot_eager", model="qwen3_5"
    ),
    "mtp_ep2_compile": Case({}, EP2, "selective", compiles="aot_eager", model="mtp"),
}
FOUR_RANKS = {
    "hsdp2_ep2": Case({}, HSDP2 | EP2),
    "hsdp2_fp8_gather": Case({"fp8_all_gather": True}, HSDP2),
    "fsdp2_ep2": Case({}, EP2),
    "fsdp2_ep2_fp8_gather": Case({"fp8_all_gather": True}, EP2),
    "pp2_tp2": Case({}, PP2 | TP2 | PARTIAL_DTENSOR),
}
CASES = SINGLE | TWO_RANKS | FOUR_RANKS
FP8_TENSORS = "fsdp2", "ep2", "ep2_compile_selective", "hsdp2_ep2"
"""At whose end the model's FP8 tensors are compared with an export's."""
