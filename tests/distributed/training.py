"""Trains a few steps with torchtitan's own trainer in each layout of :mod:`tests.distributed.cases`.

    torchrun --nproc_per_node N tests/distributed/runner.py tests.distributed.training:run_layout OUT_DIR CASE...

All cases see the same global batches. Layouts start from the same weights, OUT_DIR/seed_<flavor>.pt, which the first
single-process run writes. OUT_DIR has the tokenizer and the data.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.train
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torchtitan.models import gpt_oss
from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3_parallelize

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor tiny
from tests.distributed import runner
from tests.distributed.cases import AUTO, BASE, CASES, FP8_TENSORS, GLOBAL_BATCH, STEPS, Auto
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan.cpu import _dense_attention

VOCAB = 2048


class RecordingTrainer(torchtitan.train.Trainer):
    """Feeds fixed random tokens and keeps the gradients of the first step."""

    def batch_generator(self, data_iterable):
        training = self.job_config.training
        sizes = GLOBAL_BATCH, training.seq_len, training.local_batch_size, VOCAB
        for inputs, labels in runner.batches(self.parallel_dims, *sizes):
            yield {"input": inputs}, labels

    def counted(self) -> dict[str, float]:
        """What each rank's routers have counted, times the ranks that see other tokens."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        ranks = 1 if mesh is None else mesh.size()
        counts = {n: float(b.sum()) * ranks for n, b in runner.buffers(self.model_parts, "tokens_per_expert").items()}
        return runner.gather({f"{n} of rank {dist.get_rank()}": count for n, count in counts.items()})

    def record(self, steps: int = STEPS, before: Callable[[], None] = lambda: None) -> dict:
        self.metrics_processor.should_log = lambda step: True
        # torchtitan leaves gradients as token sums under pipeline parallelism.
        tokens = GLOBAL_BATCH * self.job_config.training.seq_len
        scale = 1 / tokens if self.parallel_dims.pp_enabled else 1.0
        found = runner.train(self, torchtitan.train, self.batch_generator(None), steps, scale, before)
        parts = [(i, block) for part in self.model_parts for i, block in part.layers.items()]
        return found | {"whole": [i for i, block in parts if isinstance(block, OptimizedModule)]}


def gather_context(attentions: list[nn.Module], mesh: DeviceMesh, kind: str) -> None:
    """Stands in for torchtitan's ring attention, which is for bf16 on GPUs: each rank gathers all keys and values."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs) -> torch.Tensor:
        k, v = (all_gather_tensor_autograd(t.contiguous(), 2, mesh) for t in (k, v))
        position = torch.arange(k.shape[2], device=q.device)
        seen = position.chunk(mesh.size())[mesh.get_local_rank()].unsqueeze(1) >= position
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, **kwargs)

    for attention in attentions:
        attention.forward = forward


class Fp32GptOss(gpt_oss.GptOssModel):
    """torchtitan's blocks have bf16 parameters, and their routers' biases stay as they are in memory."""

    def __init__(self, *args):
        super().__init__(*args)
        self.float()

    def init_weights(self, **kwargs):
        super().init_weights(**kwargs)
        for layer in self.layers.values():
            nn.init.zeros_(layer.moe.router.gate.bias)


def infer_from_zeros() -> None:
    """Pipeline stages infer shapes from uninitialized memory: here from rows that every router sends to one place."""
    to_tensor = getattr(PipelineStage, "_to_tensor", None)  # zeros on PyTorch 2.11
    if to_tensor is None:
        return

    def zeros(self: PipelineStage, arg: torch.Tensor | object) -> torch.Tensor:
        tensor = to_tensor(self, arg)
        return tensor if isinstance(arg, torch.Tensor) else torch.zeros_like(tensor, requires_grad=tensor.requires_grad)

    PipelineStage._to_tensor = zeros


def prepare() -> None:
    """Stand-ins for what this version of torchtitan, or a CPU, does not have."""
    infer_from_zeros()
    deepseek_v3_parallelize.apply_cp_to_attention_module = gather_context
    tiny = deepseekv3_args["tiny"]
    deepseekv3_args["tiny_padded"] = replace(tiny, moe_args=replace(tiny.moe_args), inter_dim=480, moe_inter_dim=288)
    moe_args = replace(gpt_oss.gptoss_configs["debugmodel"].moe_args)
    sizes = dict(vocab_size=VOCAB, n_layers=2, n_heads=8, n_kv_heads=2, moe_inter_dim=288, moe_args=moe_args)
    gpt_oss.gptoss_configs["tiny_gpt_oss"] = replace(gpt_oss.gptoss_configs["debugmodel"], **sizes)
    gpt_oss.GptOssModel = Fp32GptOss
    FlexAttentionWrapper._compiled_flex_attn = staticmethod(_dense_attention)  # tiny layers, on GPUs too


def run_layout(case: str, out: Path) -> dict:
    torch._dynamo.reset()
    counters.clear()
    torch._functorch.config.activation_memory_budget = 1.0  # torchtitan changes it for the process
    with closed(out, CASES[case]) as trainer:
        runner.load(trainer.model_parts, out / f"seed_{trainer.job_config.model.flavor}.pt")
        result = trainer.record()
        if case in FP8_TENSORS:
            adapter = trainer.train_spec.state_dict_adapter(trainer.model_args, None)
            result["wrong fp8_tensors"] = runner.wrong_fp8_tensors(trainer.model_parts[0], adapter)
        return result


@contextlib.contextmanager
def closed(out: Path, flags: list[str]) -> Iterator[RecordingTrainer]:
    """A trainer, whose dump folder goes."""
    with tempfile.TemporaryDirectory() as dump:
        args = [*BASE, f"--job.dump_folder={dump}", f"--model.hf_assets_path={out}/tokenizer"]
        args += ["--training.dataset=c4_test", f"--training.dataset_path={out}/data", *flags]
        trainer = RecordingTrainer(torchtitan.train.ConfigManager().parse_args(args))
        try:
            yield trainer
        finally:
            trainer.close()


def run_dispatch(row: Auto, dispatch: str, out: Path) -> dict:
    """Adds the final "state", and in which steps the run was "fast"."""
    torch._dynamo.reset()
    counters.clear()
    fast, rank = [], dist.get_rank()
    with closed(out, [*row.flags, f"--fp8_flow_moe.dispatch={dispatch}"]) as trainer:

        def before() -> None:
            assert len({*runner.gather_list(auto.room())}) == 1, f"ranks disagree before step {trainer.step}"
            fast.append(auto.is_fast())
            if auto.is_fast() and trainer.step == row.little and rank < 2:  # one expert-parallel group
                auto._state.room = "0.5"
            auto._has_memory = lambda room: (trainer.step, rank) != row.short

        found = trainer.record(len(row.fast), before)
        state = [t for part in trainer.model_parts for t in part.state_dict().values() if isinstance(t, torch.Tensor)]
        return found | {"fast": tuple(fast), "state": [getattr(t, "_local_tensor", t).clone() for t in state]}


def run_auto(case: str, out: Path) -> dict:
    """Against the all-to-all, bit for bit."""
    auto.CALM_STEPS = 2
    want = run_dispatch(AUTO[case], "all_to_all", out)
    with mock.patch.object(auto.logger, "warning") as warn:
        got = run_dispatch(AUTO[case], "auto", out)
    assert got["fast"] == AUTO[case].fast and not any(want["fast"])
    assert warn.call_count == 1 and "run again" in warn.call_args.args[0], warn.call_args_list
    assert got["losses"] == want["losses"] and [n for n in got["norms"] if n == n] == want["norms"]
    assert all(map(torch.equal, got["state"], want["state"]))
    assert got["graphs"] - want["graphs"] == 2 * ("compiled" in case)  # one for each room, which both layers share
    return {}


prepare()
