"""The parallel layouts that tests/distributed checks against one process, as torchtitan command-line overrides."""

from typing import NamedTuple

GLOBAL_BATCH, SEQ_LEN, STEPS = 8, 64, 2
SHORT = 32  # sequences of the layouts

BASE = [
    "--job.custom_config_module=titan_fp8moe.torchtitan",
    "--model.name=deepseek_v3",
    "--model.flavor=tiny",
    f"--training.seq_len={SEQ_LEN}",
    f"--training.global_batch_size={GLOBAL_BATCH}",
    f"--training.steps={STEPS}",
    # In bf16 the layouts would differ by the rounding of every dense layer, and hide what the experts do.
    "--training.mixed_precision_param=float32",
    "--activation_checkpoint.mode=none",
    "--optimizer.lr=1e-3",
    "--lr_scheduler.warmup_steps=1",
    "--debug.seed=1",
]


def _case(local_batch: int, ep=1, tp=1, pp=1, etp=1, replicate=1, **overrides) -> list[str]:
    overrides |= dict(
        training__local_batch_size=local_batch,
        parallelism__expert_parallel_degree=ep,
        parallelism__tensor_parallel_degree=tp,
        parallelism__pipeline_parallel_degree=pp,
        parallelism__expert_tensor_parallel_degree=etp,
        parallelism__data_parallel_replicate_degree=replicate,
    )
    overrides = {"training__seq_len": SHORT, "model__converters": "fp8_flow_moe"} | overrides
    return [f"--{n.replace('__', '.')}" + ("" if value is True else f"={value}") for n, value in overrides.items()]


ONE_IN_BF16 = {"fp8_flow_moe__filter_fqns": "layers.1."}
FP8_GATHER = {"fp8_flow_moe__fp8_all_gather": True}
FULL_AC = {"activation_checkpoint__mode": "full"}
OP_AC = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
COMPILE = {"compile__enable": True, "compile__backend": "aot_eager", "compile__components": "model"}
# A backend that partitions forward and backward as inductor does, by the budget, and compiles nothing.
MEMORY_BUDGET = COMPILE | {
    "activation_checkpoint__mode": "memory_budget",
    "activation_checkpoint__memory_budget": 0.3,
    "compile__backend": "aot_eager_decomp_partition",
}
# Dims that are padded: a rank's part has other tiles of 128 than the whole.
PADDED = {"model__flavor": "tiny_padded"}
GPT_OSS = {"model__name": "gpt_oss", "model__flavor": "tiny_gpt_oss"}
LLAMA = {"model__name": "llama3", "model__flavor": "debugmodel", "fp8_flow_moe__linear_fqns": "attention.wo."}
LINEARS = {"fp8_flow_moe__linear_fqns": "attention.wo.,output."}
CP = {"parallelism__context_parallel_degree": 2, "parallelism__context_parallel_load_balancer": "None"}
SYMMETRIC = {"fp8_flow_moe__dispatch": "symmetric", "fp8_flow_moe__dispatch_capacity": 2}
ALL_TO_ALL = {"fp8_flow_moe__dispatch": "all_to_all"}
LONG = {"training__seq_len": SEQ_LEN}
# Room for 255 of a microbatch's 256 tokens: too little for rows that all have experts on one rank. Some 240 have.
LITTLE_ROOM = SYMMETRIC | LONG | {"fp8_flow_moe__dispatch_capacity": 1.135}
PP = {"parallelism__pipeline_parallel_schedule": "1F1B", "parallelism__pipeline_parallel_microbatch_size": 2}
ZBV = PP | {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"}
INTERLEAVED_ZB = PP | {"parallelism__pipeline_parallel_schedule": "InterleavedZeroBubble"}
ONE_BY_ONE = {"parallelism__pipeline_parallel_microbatch_size": 1}
DUAL = PP | {
    "parallelism__pipeline_parallel_schedule": "DualPipeV",
    "parallelism__no_pipeline_parallel_expert_parallel_overlap": True,
}
INTERLEAVED = PP | {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
SINGLE = {
    "single": _case(8),
    "single_fp32": [flag for flag in _case(8) if "converters" not in flag],
    "single_one_in_bf16": _case(8, **ONE_IN_BF16),
    "single_linears": _case(8, **LINEARS),
    "single_padded": _case(8, **PADDED),
    "single_gpt_oss": _case(8, **GPT_OSS),
    "single_llama3": _case(8, **LLAMA),
    "single_long": _case(8, **LONG),
}
TWO_RANKS = {
    "fsdp2": _case(4),
    "fsdp2_fp8_gather": _case(2, **FP8_GATHER),  # two microbatches
    "fsdp2_fp8_gather_padded": _case(2, **PADDED, **FP8_GATHER),
    "ep2": _case(4, ep=2),
    "ep2_gpt_oss": _case(4, ep=2, **GPT_OSS),
    "ep2_linears": _case(4, ep=2, **LINEARS),
    "tp2": _case(8, tp=2),
    "tp2_linears": _case(8, tp=2, **LINEARS),
    "tp2_padded": _case(8, tp=2, **PADDED),
    "pp2_interleaved": _case(8, pp=2, **INTERLEAVED),
    "pp2_zbv_cached": _case(8, pp=2, fp8_flow_moe__cache_weights=True, **ZBV),
    "pp2_zbv_llama3": _case(8, pp=2, **ZBV, **LLAMA),
    "fsdp2_llama3": _case(4, **LLAMA, **OP_AC),
    "tp2_llama3": _case(8, tp=2, **LLAMA),
    "ep2_full_ac": _case(4, ep=2, fp8_flow_moe__recompute="none", **FULL_AC),
    "ep2_op_ac": _case(4, ep=2, **OP_AC),
    "ep2_op_ac_one_in_bf16": _case(4, ep=2, **ONE_IN_BF16, **OP_AC),  # needs compat
    "ep2_memory_budget": _case(4, ep=2, **MEMORY_BUDGET),
    "ep2_accumulate_cached": _case(2, ep=2, fp8_flow_moe__cache_weights=True),
    "pp2_cached": _case(8, pp=2, fp8_flow_moe__cache_weights=True, **PP),
    "ep2_compile_full_ac": _case(4, ep=2, **COMPILE, **FULL_AC),
    "fsdp2_compile": _case(4, **COMPILE),
    "fsdp2_fp8_gather_compile": _case(2, **COMPILE, **FP8_GATHER),
    "ep2_symmetric_compile": _case(2, ep=2, **COMPILE, **SYMMETRIC),
    "ep2_cpu_offload": _case(4, ep=2, training__enable_cpu_offload=True),
    "cp2_ep2": _case(8, ep=2, **CP),
}
FOUR_RANKS = {
    "ep2_fsdp2": _case(2, ep=2),
    "ep2_fsdp2_fp8_gather": _case(2, ep=2, **FP8_GATHER),
    "ep4": _case(2, ep=4),
    "hsdp2_ep2_fp8_gather": _case(2, ep=2, replicate=2, **FP8_GATHER),  # FSDP has one rank, gathers nothing
    "tp2_ep2": _case(4, tp=2, ep=2),
    "tp2_ep2_etp2": _case(4, tp=2, ep=2, etp=2),
    "tp2_ep2_etp2_gpt_oss": _case(4, tp=2, ep=2, etp=2, **GPT_OSS),
    "pp2_ep2_symmetric_zbv": _case(4, pp=2, ep=2, **SYMMETRIC, **ZBV | ONE_BY_ONE),
    "pp2_ep2_zbv": _case(4, pp=2, ep=2, **ALL_TO_ALL, **ZBV | ONE_BY_ONE),
    "pp2_ep2_interleaved_zb": _case(4, pp=2, ep=2, **ALL_TO_ALL, **INTERLEAVED_ZB | ONE_BY_ONE),
    "pp2_ep2_dualpipev": _case(4, pp=2, ep=2, **ALL_TO_ALL, **DUAL | ONE_BY_ONE),
    "pp2_ep2_op_ac": _case(4, pp=2, ep=2, **PP, **OP_AC),
    "pp2_ep2_symmetric_op_ac_long": _case(4, pp=2, ep=2, **LITTLE_ROOM, **PP, **OP_AC),
    "ep2_fsdp2_op_ac": _case(2, ep=2, fp8_flow_moe__recompute="experts", **OP_AC),
    "ep2_fsdp2_fp8_gather_op_ac": _case(2, ep=2, fp8_flow_moe__recompute="experts", **FP8_GATHER, **OP_AC),
}
CASES = SINGLE | TWO_RANKS | FOUR_RANKS
SLOW = (  # another has most of what they have
    *("tp2_linears", "tp2_padded", "fsdp2_fp8_gather_padded", "fsdp2_fp8_gather_compile", "ep2_compile_full_ac"),
    *("pp2_zbv_llama3", "tp2_ep2_etp2_gpt_oss", "ep2_fsdp2_op_ac", "ep2_fsdp2_fp8_gather_op_ac", "pp2_ep2_op_ac"),
    *("pp2_ep2_zbv", "pp2_ep2_interleaved_zb", "pp2_ep2_dualpipev", "pp2_interleaved", "ep2_op_ac", "tp2_llama3"),
    *("pp2_cached", "tp2", "ep2_linears", "ep4"),
)
FP8_TENSORS = "fsdp2_compile", "ep2_fsdp2"
"""At whose end the model's FP8 tensors are compared with an export's."""


class Auto(NamedTuple):
    """A run of ``dispatch = "auto"``: the steps that begin over symmetric memory, of which one has too ``little`` room.
    In the step ``short`` a rank alone has too little memory for it."""

    ranks: int
    flags: list[str]
    fast: tuple[bool, ...]
    little: int
    short: tuple[int, int] = (0, 0)


AUTO = {  # after two calm steps
    "ep2_compiled": Auto(2, _case(4, ep=2, **COMPILE), (False, False, True, True, False), 4),
    # Halves of a backward.
    "pp2_ep2_zb": Auto(
        4, _case(4, pp=2, ep=2, **INTERLEAVED_ZB | ONE_BY_ONE), (False, False, False, True, False), 4, short=(2, 3)
    ),
}
