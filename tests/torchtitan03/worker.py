"""Trains cases with torchtitan 0.3 from the same weights and tokens:

    torchrun --nproc_per_node=2 tests/torchtitan03/worker.py OUT_DIR CASE...

Leaves OUT_DIR/CASE.pt: what :mod:`tests.distributed.runner` and :func:`run` have found, or {"error"}.
"""

import dataclasses
import importlib
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
import torchtitan.trainer
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig, to_graph_trainer_config
from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry as graph_model_registry
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
from torchtitan.models.common import attention
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel, deepseek_v3_debugmodel_mtp
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.models.llama3 import model_registry as llama3_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from tests.distributed import runner
from tests.torchtitan03.cases import CASES, FP8_TENSORS, GLOBAL_BATCH, Case
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan03 import cpu, names
from titan_fp8moe.torchtitan03.config_registry import with_fp8_flow
from titan_fp8moe.torchtitan03.converter import Fp8FlowConverter
from titan_fp8moe.torchtitan03.lora import LoRAConverter
from titan_fp8moe.trainer import preflight
from titan_fp8moe.trainer.cpu import compute_dtype
from titan_fp8moe.trainer.plan import plain_name

VOCAB = 2048
# Packages that models import for pictures and for linear attention, which needs a GPU.
LEAVES = (
    *("torchvision.io", "torchvision.transforms.v2.functional", "fla.modules.conv.triton.ops"),
    *("fla.modules.conv.causal_conv1d", "fla.ops.gated_delta_rule.chunk", "fla.ops.gated_delta_rule.fused_recurrent"),
)
ABSENT = {leaf.rsplit(".", n)[0] for leaf in LEAVES for n in range(leaf.count(".") + 1)}


def gpt_oss() -> torchtitan.trainer.Trainer.Config:
    config = gpt_oss_debugmodel_flex()
    for layer in config.model_spec.model.layers:
        experts = layer.moe.routed_experts.inner_experts
        experts.hidden_dim, experts.swiglu_limit = 288, 0.3  # no multiple of 128; clamps
    return config


def multimodal(module: str, flavor: str) -> torchtitan.trainer.Trainer.Config:
    """A model with a vision encoder on text, in the job of another; of Qwen3.5 the layers with full attention."""
    with patch.dict(sys.modules, {name: MagicMock() for name in ABSENT}):
        spec = importlib.import_module(f"torchtitan.models.{module}").model_registry(flavor)
    config, model = deepseek_v3_debugmodel(), spec.model
    if module == "qwen3_5":
        del model.layers[:3]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCAB
    config.model_spec = spec
    return config


MODELS = {  # with so many layers
    "deepseek_v3": (deepseek_v3_debugmodel, 3),
    "mtp": (deepseek_v3_debugmodel_mtp, 2),  # and one that predicts the token after next
    "qwen3": (qwen3_moe_debug, 2),
    "llama3": (llama3_debugmodel, 2),
    "gpt_oss": (gpt_oss, 2),
    "qwen3_5": (lambda: multimodal("qwen3_5", "debugmodel_moe"), 1),
    "kimi_k2_7": (lambda: multimodal("kimi_k2_7", "debugmodel"), 2),
}
LORA = ["wo", "w2", "inner_experts"]
CHECKPOINTING = {
    "none": lambda: None,
    "selective": SelectiveAC.Config,
    "full": FullAC.Config,
    "budget": lambda: MemoryBudgetAC.Config(memory_budget=0.3),
}


def make_config(case: Case, out: Path, dump: str) -> torchtitan.trainer.Trainer.Config:
    make_model, num_layers = MODELS[case.model]
    config = make_model()
    del config.model_spec.model.layers[num_layers:]
    divided = {"expert_parallel_degree", "data_parallel_replicate_degree", "spmd_backend"}
    ranks = dist.get_world_size() if case.parallelism.keys() <= divided else 1
    config.training = dataclasses.replace(
        config.training,
        local_batch_size=GLOBAL_BATCH // ranks // case.accumulates,
        global_batch_size=GLOBAL_BATCH,
        seq_len=case.seq_len,
        steps=case.steps,
        disable_cuda_graphs=True,
        mixed_precision_param=compute_dtype() if case.steps > 1 else "float32",
    )
    config.parallelism = dataclasses.replace(config.parallelism, **case.parallelism)
    config.activation_checkpoint = CHECKPOINTING[case.checkpointing]()
    config.compile = dataclasses.replace(
        config.compile, enable=bool(case.compiles), components=["model"], backend=case.compiles or "inductor"
    )
    config.metrics.enable_tensorboard = bool(case.fp8 and case.fp8.get("statistics_every"))
    config.debug.seed = 1
    config.dump_folder, config.hf_assets_path = dump, f"{out}/tokenizer"
    config.dataloader = dataclasses.replace(config.dataloader, dataset="c4_test", dataset_path=f"{out}/data")
    return config if case.fp8 is None else CONVERTED[case.way](config, case.fp8)


def by_registry(config: torchtitan.trainer.Trainer.Config, fp8: dict, *others) -> torchtitan.trainer.Trainer.Config:
    """torchtitan's own way: a list of converters."""
    spec = llama3_registry if config.model_spec.name == "llama3" else model_registry
    layers = config.model_spec.model.layers
    config.model_spec = spec("debugmodel", converters=[Fp8FlowConverter.Config(**fp8), *others])
    del config.model_spec.model.layers[len(layers) :]
    return config


def of_fault_tolerant_trainer(config: torchtitan.trainer.Trainer.Config, fp8: dict) -> FaultTolerantTrainer.Config:
    checkpoint = derive(config.checkpoint, TorchFTCheckpointManager.Config)
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)  # this trainer does not serve the chunked one
    return by_registry(derive(config, FaultTolerantTrainer.Config, checkpoint=checkpoint, loss=loss), fp8)


def of_graph_trainer(config: torchtitan.trainer.Trainer.Config, fp8: dict) -> torchtitan.trainer.Trainer.Config:
    config = to_graph_trainer_config(config, graph_model_registry)
    config.compile = GraphTrainerCompileConfig(enable=True, enable_passes=False)
    return with_fp8_flow(config, Fp8FlowMoEConfig(**fp8))


def by_flag(config: torchtitan.trainer.Trainer.Config, fp8: dict) -> torchtitan.trainer.Trainer.Config:
    """``--override.imports`` and torchtitan's own config."""
    config.override.imports = [("titan_fp8moe.torchtitan03.fp8_flow_moe", fp8)]
    return config


CONVERTED = {
    "flag": by_flag,
    "section": lambda config, fp8: with_fp8_flow(config, Fp8FlowMoEConfig(**fp8)),
    "converter": by_registry,
    "lora": lambda config, fp8: by_registry(config, fp8, LoRAConverter.Config(rank=4, target_modules=LORA)),
    "fault tolerant": of_fault_tolerant_trainer,
    "graph trainer": of_graph_trainer,
}


def data_of(trainer: torchtitan.trainer.Trainer):
    config, dims = trainer.config, trainer.parallel_dims
    length, size = config.training.seq_len, config.training.local_batch_size
    if dims.pp_enabled:
        size = config.parallelism.pipeline_parallel_microbatch_size
    for inputs, labels in runner.batches(dims, GLOBAL_BATCH, length, size, VOCAB):
        batch = {"input": inputs, "positions": torch.arange(length).expand(inputs.shape[0], -1)}
        if config.model_spec.name == "qwen3_5":
            batch["special_tokens"] = dict.fromkeys(("image_id", "video_id"), VOCAB)  # none
        yield batch, labels


def train(trainer: torchtitan.trainer.Trainer, steps: int) -> dict:
    fast = []

    def before() -> None:
        fast.append(auto.is_fast())
        if auto.is_fast() and trainer.step == 5:
            auto._state.room = "0.5"  # too little

    found = runner.train(trainer, torchtitan.trainer, data_of(trainer), steps, before=before)
    return found | {"fast": fast}


def run(name: str, out: Path) -> dict:
    torch._dynamo.reset()
    counters.clear()
    # Its results name the meshes of the case before, which are equal but not the same; FSDP asks for the same.
    _clear_python_sharding_prop_cache()
    _clear_fast_path_sharding_prop_cache()
    case = CASES[name]
    has_work = (lambda *_: True) if case.in_fsdp else preflight.fsdp_has_work
    calm = patch.object(auto, "CALM_STEPS", 2 if case.steps == 6 else 20)
    budget = torch._functorch.config.patch(activation_memory_budget=1.0)  # torchtitan changes it for the process
    with calm, budget, patch.object(preflight, "fsdp_has_work", has_work), tempfile.TemporaryDirectory() as dump:
        trainer = make_config(case, out, dump).build()
        parameters = runner.load(trainer.model_parts, out / f"seed_{case.model}.pt")
        logged: dict[str, list[int]] = {}
        warnings: list[str] = []
        if name == "single_nan":
            names.logger = SimpleNamespace(warning=warnings.append, info=lambda _: None)
            trainer.model_parts[0].layers["1"].moe.routed_experts.inner_experts.w2_EDF.data[0, 0, 0] = torch.nan
        if case.fp8 and "statistics_every" in case.fp8:
            trainer.metrics_processor.logger.log = lambda values, step: [
                logged.setdefault(key, []).append(step) for key in values
            ]
        saved: list[tuple[int, ...]] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t)
        try:
            with hooks if case.checkpointing == "budget" else nullcontext():
                result = train(trainer, case.steps)
            result["saved"] = saved
            result["logged"] = logged
            if name in FP8_TENSORS:
                spec, part = trainer.config.model_spec, trainer.model_parts[0]
                result["wrong fp8_tensors"] = runner.wrong_fp8_tensors(part, spec.state_dict_adapter(spec.model, None))
            result["keys"] = [plain_name(key) for part in trainer.model_parts for key in part.state_dict()]
            result["trainer"] = type(trainer).__name__
            result["trained"] = [key for key, p in parameters.items() if p.requires_grad]
            last = "layers.2.moe.routed_experts.inner_experts.w2_EDF"
            weights = {key: runner.whole(p).detach().clone() for key, p in parameters.items() if key == last}
            result["weights"] = runner.gather(weights)
            if case.steps > 1:
                del result["grads"]  # nobody compares them, and they are large
            return result
        except RuntimeError as error:
            if name != "single_nan":
                raise
            return {"raised": str(error), "warnings": warnings}
        finally:
            trainer.close()


def compute_as_on_a_cpu() -> None:
    """What a GPU compiles for minutes in fp32, attention, and what torchtitan has for bf16 only, gpt-oss's experts."""
    attention.FlexAttention._compiled_flex_attn = staticmethod(cpu._dense_attention)
    attention._compiled_create_block_mask = create_block_mask
    names.GptOssGroupedExperts.forward = cpu._in_dtype(names.GptOssGroupedExperts.forward)


if __name__ == "__main__":
    if torch.cuda.is_available():
        compute_as_on_a_cpu()
    runner.start()
    runner.run_all(run)
