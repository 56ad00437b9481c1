"""Trains one variant of the convergence study with torchtitan's Trainer on one GPU (or the CPU).

    python -m experiments.convergence.train RECIPE-sSEED[-CHANGE][-again] --work DIR [options] [torchtitan overrides]

A recipe is bf16, balanced (FP8-Flow, all FFNs in FP8), experts_only (with shared experts and dense FFNs in bf16) or
ffns_only (the reverse). The seed decides initialization and data order. A change is a key of ``CHANGES``; ``resume``
takes a number N > 0 behind it. ``again`` multiplies the initial weights by 1 + 2**-9 N(0, 1), the size of bf16
rounding: what a run from scratch is worth.

``DIR/NAME/log.jsonl`` gets settings, loss and gradient norm of each step, and held-out losses and loads as they come: a
run that is cut off can be used as far as it came.

After a few steps the step is captured as a CUDA graph: models of this size otherwise wait for the host. The graph's
loss and gradient norm are compared with an eager step's on the same batch; if they differ, or capture fails, the run
ends: ``--no-graph`` does without.
"""

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.moe import FeedForward, MoE
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools.logging import init_logger, logger
from torchtitan.train import Trainer

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor `tiny`
from experiments.convergence.clamped import adds_shares_to, clamp
from experiments.convergence.data import ShuffledWindows, as_batch, windows
from experiments.provenance import environment
from experiments.records import script_parser
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward

LEFT_IN_BF16 = {"balanced": [], "experts_only": ["shared_experts", "feed_forward"]}  # fp8_flow_moe.filter_fqns
RECIPES = ("bf16", *LEFT_IN_BF16, "ffns_only")

CHANGES = {
    "": "none",
    "highlr": "learning rate x 5",
    "outliers": "embeddings of every 16th token x 1000 in every 128th channel, one per FP8 tile",
    "outliers1e5": "as outliers, x 100,000",
    "tiny": "loss, Adam's eps x 2**-20, no clipping",
    "trunk": "none; stops at 2/3 of the schedule and keeps its state for resume",
    "resume": "from bf16's state of the same seed at 2/3, weights and optimizer; with N, weights perturbed by noise N",
}
TINY = 2.0**-20

LOG_EVERY = 25
EAGER_STEPS = 8

_TINY, _QWEN3 = deepseekv3_args["tiny"], qwen3_args["30B-A3B"]
FLAVORS = {
    "deepseek_v3": {
        "0.1B": replace(
            _TINY,
            moe_args=replace(_TINY.moe_args, num_experts=32, top_k=4),
            vocab_size=8192,
            dim=512,
            inter_dim=2048,
            n_layers=8,
            n_heads=8,
            kv_lora_rank=256,
            # Queries, keys and values of one size: any attention kernel takes them.
            qk_nope_head_dim=32,
        ),
        "tiny": replace(_TINY, vocab_size=8192, qk_nope_head_dim=32),
    },
    "qwen3": {
        "30B-A3B_6_layers": replace(_QWEN3, n_layers=6, vocab_size=8192),
    },
}


class StudyTrainer(Trainer):
    """torchtitan's Trainer with the step of one GPU captured, its own log, evaluation and router statistics."""

    def __init__(self, config: JobConfig, name: str, args: argparse.Namespace):
        variant = self.recipe, seed, self.change, self.noise = parse_name(name)
        self.loss_scale = TINY if self.change == "tiny" else 1.0
        super().__init__(config)
        self.args = args
        self.log_file = (args.work / name / "log.jsonl").open("w")
        model = self.model_parts[0]
        if self.recipe == "ffns_only":
            for ffn in (module for module in model.modules() if type(module) is FeedForward):
                Fp8FlowFeedForward.convert(ffn, Fp8FlowMoEConfig())
        self.moes: list[MoE] = [module for module in model.modules() if isinstance(module, MoE)]
        if args.clamp:
            for moe in self.moes:
                clamp(moe, args.clamp)
        self.state_path = args.work / f"checkpoint-s{seed}.pt"
        self._apply_change(model)

        # Learning rates that a captured step reads: the scheduler fills them in.
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.device)
                group["capturable"] = self.device.type == "cuda"

        end = config.training.steps * 2 // 3 if self.change == "trunk" else config.training.steps
        self.last_step = min(end, self.step + args.stop_after)
        batch = (config.training.local_batch_size, config.training.seq_len)
        self.tokens, self.labels = (torch.zeros(batch, dtype=torch.int64, device=self.device) for _ in range(2))
        self.num_tokens = torch.tensor(self.tokens.numel() / self.loss_scale, device=self.device)
        self.result = torch.zeros(2, device=self.device)
        self.pending: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.use_graph = self.device.type == "cuda" and not args.no_graph
        self.start_time = time.monotonic()

        held_out = windows(args.corpus, "validation", config.training.seq_len)
        count = min(args.eval_windows, len(held_out)) // batch[0] * batch[0]  # one shape, so that nothing is recompiled
        chosen = np.linspace(0, len(held_out) - 1, count).astype(int)
        self.held_out = held_out[chosen]
        experts = "titan_fp8moe" if self.recipe in LEFT_IN_BF16 else "torch._grouped_mm, bf16"
        meta = dict(stage=args.work.name, variant=variant, experts=experts, steps=config.training.steps)
        meta |= dict(last_step=self.last_step, tokens_per_step=self.tokens.numel())
        meta |= dict(clamp=args.clamp, parameters=sum(p.numel() for p in model.parameters()), graph=self.use_graph)
        self._write(meta | dict(config=config.to_dict(), environment=environment()))

    def _apply_change(self, model: nn.Module) -> None:
        with torch.no_grad():
            if self.change.startswith("outliers"):
                model.tok_embeddings.weight[::16, ::128] *= 1e5 if self.change == "outliers1e5" else 1e3
        if self.change == "resume":
            saved = torch.load(self.state_path, map_location="cpu", mmap=True)
            model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step = self.dataloader.skip = saved["step"]
            for scheduler in self.lr_schedulers.schedulers:
                scheduler.last_epoch = self.step - 1
                scheduler.step()
        if self.noise:
            generator = torch.Generator(self.device).manual_seed(self.noise)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1 + 2.0**-9 * torch.randn(param.shape, generator=generator, device=self.device))

    def should_continue_training(self) -> bool:
        return self.step < self.last_step

    def train(self) -> None:
        # Eager and captured steps share a stream: autograd would otherwise make one wait for the other in the graph.
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.evaluate(self.step)
            super().train()

    def train_step(self, data_iterator) -> None:
        input_dict, labels = next(data_iterator)
        self.tokens.copy_(input_dict["input"], non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)
        if self.use_graph and self.graph is None and len(self.pending) == EAGER_STEPS:
            self._capture()
        elif self.graph is not None:
            self.graph.replay()
        else:
            self.optimizers.zero_grad()
            self._step()
        self.pending.append(self.result.clone())
        self.lr_schedulers.step()
        if self.step % LOG_EVERY == 0 or self.step == self.last_step:
            self._flush()
        if self.step % self.args.eval_every == 0 or self.step == self.last_step:
            self.evaluate(self.step)
        if self.change == "trunk" and self.step == self.last_step:
            self._save()

    def _forward_backward(self) -> Tensor:
        return self.forward_backward_step(
            input_dict={"input": self.tokens}, labels=self.labels, global_valid_tokens=self.num_tokens
        ).detach()

    def _step(self) -> None:
        """torchtitan's train_step for one micro-batch without its logging; leaves loss and norm in ``result``."""
        loss = self._forward_backward()
        max_norm = float("inf") if self.change == "tiny" else self.job_config.training.max_norm
        grad_norm = clip_grad_norm_(self.model_parts[0].parameters(), max_norm, foreach=True)
        self.optimizers.step()
        self.result.copy_(torch.stack([loss, grad_norm]) / self.loss_scale)

    def _capture(self) -> None:
        """Captures the step, runs it, and compares it with the eager forward and backward of the same batch."""
        self.optimizers.zero_grad()
        loss = self._forward_backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model_parts[0].parameters()])
        expected = torch.stack([loss, norm]) / self.loss_scale
        self._reset_counts()
        self.optimizers.zero_grad()
        try:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self._step()
            self.graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            raise RuntimeError("the step cannot be captured; pass --no-graph") from error
        (want_loss, want_norm), (loss, norm) = expected.tolist(), self.result.tolist()
        # A stress run may have broken by now.
        if not (np.isclose(loss, want_loss, 1e-3, 0, True) and np.isclose(norm, want_norm, 2e-2, 0, True)):
            difference = f"graph gives loss {loss}, norm {norm}; eager {want_loss}, {want_norm}"
            raise RuntimeError(f"{difference}; pass --no-graph")
        logger.info(f"captured: loss {loss:.6f}, eager {want_loss:.6f}; norm {norm:.5f}, eager {want_norm:.5f}")

    def _reset_counts(self) -> None:
        for moe in self.moes:
            moe.tokens_per_expert.zero_()

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Writes the held-out loss, and the routers' largest load there over the mean of each layer, less 1; with
        ``--clamp`` also each layer's shares of gates and of ups beyond the limit."""
        self._flush()
        counts = torch.zeros(len(self.moes), *self.moes[0].tokens_per_expert.shape, device=self.device)
        routers = zip(self.moes, counts, strict=True)
        hooks = [moe.router.register_forward_hook(_adds_to(counts_E)) for moe, counts_E in routers]
        shares = torch.zeros(len(self.moes), 2, device=self.device)
        if limit := self.args.clamp:
            found = zip(self.moes, shares, strict=True)
            hooks += [moe.router.register_forward_hook(adds_shares_to(of_moe, moe, limit)) for moe, of_moe in found]
        losses = []
        batch_size = self.tokens.shape[0]
        for start in range(0, len(self.held_out), batch_size):
            input_dict, labels = as_batch(self.held_out[start : start + batch_size])
            with self.maybe_enable_amp:
                pred = self.model_parts[0](input_dict["input"].to(self.device))
                targets = labels.to(self.device).flatten()
                losses.append(F.cross_entropy(pred.flatten(0, 1).float(), targets).double())
        for hook in hooks:
            hook.remove()
        self._reset_counts()  # torchtitan's MoE counts evaluated tokens too; the optimizer step has just reset them
        record = {"step": step, "held_out_loss": torch.stack(losses).mean().item()}
        record["max_violation"] = (counts.amax(1) / counts.mean(1) - 1).tolist()
        if self.args.clamp:
            record["clamped"] = (shares / len(losses)).tolist()
        self._write(record)

    def _flush(self) -> None:
        if not self.pending:
            return
        first = self.step - len(self.pending) + 1
        for step, row in enumerate(torch.stack(self.pending).tolist(), first):
            self._write({"step": step} | dict(zip(("loss", "grad_norm"), row, strict=True)))
        self._write({"flushed": self.step, "seconds": time.monotonic() - self.start_time})
        self.pending.clear()

    def _write(self, record: dict) -> None:
        self.log_file.write(json.dumps(record) + "\n")
        self.log_file.flush()

    def _save(self) -> None:
        """Writes the state for variants that resume, under another name first, so that a file there is whole."""
        state = {
            "model": self.model_parts[0].state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        partial = self.state_path.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.state_path)


def _adds_to(counts_E: Tensor) -> Callable:
    """A hook of a router that counts the tokens of each expert. FP8-Flow's MoE counts them in training alone."""

    def hook(router: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        counts_E.add_(output[2])

    return hook


def parse_name(name: str) -> tuple[str, int, str, int]:
    """Recipe, seed, change, and the number of the noise on the weights, 0 for none."""
    changes = "|".join(filter(None, CHANGES))
    match = re.fullmatch(rf"({'|'.join(RECIPES)})-s(\d+)(?:-({changes})((?<=resume)[1-9])?)?(-again)?", name)
    if match is None:
        raise SystemExit(
            f"unknown variant {name}: RECIPE-sSEED[-CHANGE][-again] of {', '.join(RECIPES)}; {', '.join(CHANGES)}"
        )
    return match[1], int(match[2]), match[3] or "", int(match[4] or match[5] is not None)


def make_config(name: str, args: argparse.Namespace, overrides: list[str]) -> JobConfig:
    recipe, seed, change, _ = parse_name(name)
    config = ConfigManager().parse_args([f"--job.config_file={Path(__file__).with_name('config.toml')}", *overrides])
    config.debug.seed = seed
    config.job.dump_folder = str(args.work / name)
    if recipe in LEFT_IN_BF16:
        config.fp8_flow_moe.filter_fqns = LEFT_IN_BF16[recipe]
    else:
        config.model.converters = []
    if change == "highlr":
        config.optimizer.lr *= 5
    if change == "tiny":
        config.optimizer.eps *= TINY
    return config


def register_models(args: argparse.Namespace, seed: int) -> None:
    def build_dataloader(job_config: JobConfig, **kwargs) -> ShuffledWindows:
        t = job_config.training
        return ShuffledWindows(args.corpus, "train", t.seq_len, t.local_batch_size, seed)

    for name, flavors in FLAVORS.items():
        spec = replace(
            get_train_spec(name),
            model_args=flavors,
            build_tokenizer_fn=None,
            build_dataloader_fn=build_dataloader,
        )
        register_train_spec(f"{name}_convergence", spec)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("name", help="RECIPE-sSEED[-CHANGE][-again]")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--corpus", type=Path, required=True, help="corpus with train.npy and validation.npy")
    parser.add_argument("--eval-every", type=int, default=250, help="steps (default: %(default)s)")
    parser.add_argument("--eval-windows", type=int, default=2048, help="of the held-out text (default: %(default)s)")
    parser.add_argument("--stop-after", type=int, default=10**9, help="steps to run of the schedule")
    parser.add_argument("--clamp", type=float, help="limit of clamped_swiglu in routed experts (default: SwiGLU)")
    parser.add_argument("--no-graph", action="store_true", help="do not capture the step")
    args, overrides = parser.parse_known_args()
    (args.work / args.name).mkdir(parents=True, exist_ok=True)

    init_logger()
    config = make_config(args.name, args, overrides)
    register_models(args, config.debug.seed)
    # cuDNN's kernels are left out: FlashAttention's are known to be capturable, and every variant has the same.
    ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = StudyTrainer(config, args.name, args)
        trainer.train()
        trainer.close()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # without waiting for collectives that a failed process will not join
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
