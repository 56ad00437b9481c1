"""Fine-tunes a MoE layer with LoRA: with experts frozen in FP8, and the same layer in bf16. On a GPU or a CPU.

    python examples/lora.py

The task: the layer's experts have moved by changes of low rank, which the adapters learn from noisy outputs. Both runs
begin with the same weights and adapters and see the same tokens; their losses are printed side by side, relative to the
outputs' variance. FP8's is higher by about as much at every step, because its rounding is part of the outputs, and no
adapter removes it. At the end the adapters are saved, loaded into a fresh layer, and merged.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_fp8moe import RoutedExperts

DIM, HIDDEN_DIM, EXPERTS, TOP_K, TOKENS, RANK, ALPHA = 256, 256, 8, 2, 512, 8, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOISE = 0.3  # in the targets, relative to them


class MoE(nn.Module):
    """A softmax router and experts in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = RoutedExperts(EXPERTS, DIM, HIDDEN_DIM, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, D)"""
        scores, ids = self.router(x).softmax(-1).topk(TOP_K)
        return self.experts(x, ids, scores)


class ReferenceMoE(MoE):
    """The same layer in bf16, expert by expert, with the adapters beside the weights."""

    def linear(self, name: str, expert: int, x: Tensor) -> Tensor:
        y = x @ getattr(self.experts, name)[expert].T
        if self.experts.lora_scale is None:
            return y
        A, B = self.experts.lora_A[name][expert].bfloat16(), self.experts.lora_B[name][expert].bfloat16()
        return y + self.experts.lora_scale * (x @ A.T) @ B.T

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, k = (ids == e).nonzero(as_tuple=True)
            rows = x[token].bfloat16()
            h = F.silu(self.linear("w1", e, rows)) * self.linear("w3", e, rows)
            out = out.index_add(0, token, scores[token, k].unsqueeze(1) * self.linear("w2", e, h))
        return out


def moved(model: MoE) -> ReferenceMoE:
    """The layer whose outputs are learned: its experts have moved by 30% of their size, with rank 4."""
    target = ReferenceMoE().to(DEVICE)
    target.load_state_dict(model.state_dict())
    for name in ("w1", "w2", "w3"):
        weight = getattr(target.experts, name).data
        E, N, K = weight.shape
        change = torch.randn(E, N, 4, device=DEVICE) @ torch.randn(E, 4, K, device=DEVICE)
        weight += 0.3 * weight.float().norm() / change.norm() * change
    return target


def relative_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target) / target.var()


def train(model: MoE, x: Tensor, target: Tensor, steps: int) -> list[float]:
    """Losses of full-batch steps on the adapters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0), []
    for _ in range(steps):
        loss = relative_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = MoE().to(DEVICE)
    x = torch.randn(TOKENS, DIM, device=DEVICE)
    with torch.no_grad():
        target = moved(model)(x)
    target += NOISE * target.std() * torch.randn_like(target)
    model.router.requires_grad_(False)
    base = copy.deepcopy(model.state_dict())
    model.experts.add_lora(RANK, ALPHA, dtype=torch.float32)  # freezes the experts
    reference = ReferenceMoE().to(DEVICE)
    reference.router.requires_grad_(False)
    reference.experts.add_lora(RANK, ALPHA, dtype=torch.float32)
    reference.load_state_dict(model.state_dict())

    wanted, fp8 = (train(m, x, target, steps) for m in (reference, model))
    print(f"{'step':>4} {'bf16':>9} {'FP8-Flow':>9}")
    for step in sorted({*range(0, steps, 10), steps - 1}):
        print(f"{step + 1:>4} {wanted[step]:>9.4f} {fp8[step]:>9.4f}")
    first, last = (fp8[step] - wanted[step] for step in (0, -1))
    rounding = f"FP8's rounding: {first:+.4f} at step 1, {last:+.4f} at the end"
    print(f"last loss {last / wanted[-1]:+.2%} from bf16, by {rounding}")

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "adapters.pt"
        torch.save({name: t for name, t in model.state_dict().items() if "lora_" in name}, path)
        fresh = MoE().to(DEVICE)
        fresh.load_state_dict(base)
        fresh.experts.add_lora(RANK, ALPHA, dtype=torch.float32)
        fresh.load_state_dict(torch.load(path), strict=False)
        assert torch.equal(fresh(x), model(x))
        fresh.experts.merge_lora()
        print(f"loss {relative_loss(model(x), target):.4f} beside, {relative_loss(fresh(x), target):.4f} merged")


if __name__ == "__main__":
    main()
