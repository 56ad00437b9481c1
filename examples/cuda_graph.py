"""A whole training step as a CUDA graph: forward, backward and optimizer of a small MoE model with all experts here.

    python examples/cuda_graph.py

The host launches nothing while a graph replays, so small layers run as fast as the GPU can. An eager copy of the model
sees the same data. Every step has other tokens and so another routing; losses and parameters stay equal bit for bit.
What a graph needs of a step:

* Shapes and memory that do not change: new data is copied into the tensors that were captured.
* No host-device sync: all experts in one process, or ``dispatch = "symmetric"``. The all-to-all reads split sizes.
* With ``cache_weights`` a call of each layer before the capture, which makes the buffers.
* An optimizer with ``capturable=True``, which keeps its step count on the GPU.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_fp8moe import RoutedExperts

DIM, HIDDEN_DIM, EXPERTS, TOP_K, TOKENS, LAYERS = 256, 256, 8, 2, 512, 2
WARM_UP = 3  # eager steps: kernels are compiled, the optimizer makes its state


class Block(nn.Module):
    """A pre-norm MoE layer with a softmax router and a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = RoutedExperts(EXPERTS, DIM, HIDDEN_DIM)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, D)"""
        h = self.norm(x)
        scores, ids = self.router(h).softmax(-1).topk(TOP_K)
        return x + self.experts(h, ids, scores)


class TrainingStep:
    """A model, its optimizer, and the tensors that a step reads and writes.

    Attributes:
        x, target: (T, D), the batch; fill them before a step.
        loss: of the last step.
    """

    def __init__(self, device: str):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=True)
        self.x, self.target = (torch.zeros(TOKENS, DIM, device=device) for _ in range(2))
        self.loss = torch.zeros((), device=device)

    def load(self, x: Tensor, target: Tensor) -> None:
        self.x.copy_(x)
        self.target.copy_(target)

    def run(self) -> None:
        self.optimizer.zero_grad()  # sets gradients to None: the backward writes them, and a replay overwrites them
        loss = F.mse_loss(self.model(self.x), self.target)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def capture(step: TrainingStep, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The step as a graph. Capturing runs nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step.run()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("CUDA graphs need a GPU; examples/plain_pytorch.py trains on a CPU")
    eager, graphed = TrainingStep("cuda"), TrainingStep("cuda")
    # One stream for all: autograd would otherwise make the graph wait for the stream of the eager steps.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = None
    with torch.cuda.stream(stream):
        rotation = torch.randn(DIM, DIM, device="cuda") / DIM**0.5
        for i in range(args.steps):
            x = torch.randn(TOKENS, DIM, device="cuda")
            for step in (eager, graphed):
                step.load(x, x @ rotation)
            eager.run()
            if i == WARM_UP:
                graph = capture(graphed, stream)
            graphed.run() if graph is None else graph.replay()
            pairs = zip(graphed.model.parameters(), eager.model.parameters(), strict=True)
            if not torch.equal(graphed.loss, eager.loss) or not all(torch.equal(a, b) for a, b in pairs):
                raise SystemExit(f"step {i + 1}: the graph's numbers differ from the eager step's")
            if i % 5 == 0 or i == args.steps - 1:
                print(f"step {i + 1:>3}  loss {float(eager.loss):.5f}  {'eager' if graph is None else 'graph'}")
    print(f"{args.steps - WARM_UP} replays equal eager steps bit for bit, losses and parameters")


if __name__ == "__main__":
    main()
