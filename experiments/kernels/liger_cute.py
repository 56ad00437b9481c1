"""Routed experts over several GPUs, forward and backward, next to LigerCute's fused bf16 kernels.

    LD_PRELOAD=NVSHMEM/libnvshmem_host.so.3 NVSHMEM_DISABLE_NVLS=1 NVSHMEM_REMOTE_TRANSPORT=none \\
        torchrun --nproc-per-node 2 --no-python \\
        python -m experiments.kernels.liger_cute --out experiments/kernels/results.json

Both get the same tokens, routing, bf16 scores and bf16 weights, and return gradients of all but the routing. Routing is
random and experts are spread over the ranks. LigerCute's ``moe_fused`` fuses routing, GEMMs and the exchange of tokens
over NVSHMEM. Ours quantizes its weights in each direction and exchanges tokens over symmetric memory or by all-to-all.
Times are the slowest rank's, back to back. A record's ``forward`` and ``reference_forward`` are of forwards alone,
without gradients.

LigerCute takes its tiles from the nearest row of a tuned table. No row has 16B's hidden dim, 1408.

Its packages are not among this project's requirements. They belong into a folder of their own (``--target``) on
``PYTHONPATH``, since their NVSHMEM has the same paths as that of torch:

    pip install --no-deps liger-kernel==0.8.5 liger-cute-kernels==0.8.5 apache-tvm-ffi==0.1.15.post2 \\
        nvidia-nvshmem-cu12==3.6.5 nvidia-cuda-runtime-cu12==12.9.79

NVSHMEM 3.6.5 must be preloaded: torch 2.11 brings 3.4.5, which lacks ``nvshmem_selected_device_transport``.
``LD_LIBRARY_PATH`` must name the CUDA 12 runtime. NVLink multicast is off for both, here and by
``NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1``.
"""

import functools
import os
import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.expert_parallel.exchange import slowest_ms, together
from experiments.kernels.sonicmoe import BF16, UNIT, Problem, Sizes, check, sizes_of
from experiments.records import begin, script_parser, write_records
from experiments.timing import BACK_TO_BACK, in_turn, medians, ms_records, show
from titan_fp8moe import Fp8FlowMoEConfig, routed_experts

SHAPES = (("16B", 16384), ("16B", 4096), ("Qwen3-30B", 8192))  # the last is the one that LigerCute's authors publish
PEER, NAME = "LigerCute", "routed_experts_ep_liger"
OURS = {"ours, all_to_all": NAME, "ours, symmetric": f"{NAME} dispatch=symmetric"}  # candidates, names of records


class EpProblem(Problem):
    """One rank's tokens, routing and experts. LigerCute reads int32 ids and bf16 scores; ours gets the same in fp32."""

    def __init__(self, sizes: Sizes, tokens: int):
        super().__init__(sizes, tokens, ranks=dist.get_world_size())
        self.ids = self.ids.int()
        self.bf16_scores = self.scores.detach().to(BF16).requires_grad_()
        self.scores = self.bf16_scores.detach().float().requires_grad_()

    def forward(self, candidate: str) -> Tensor:
        w1, w2, w3 = self.experts.parameters()  # gate, down, up
        group = dist.group.WORLD
        if candidate == PEER:
            from liger_kernel.ops.cute.ops import moe_fused

            return moe_fused(self.x, self.ids, self.bf16_scores, w1, w3, w2, self.sizes.E, self.sizes.K, group)
        config = Fp8FlowMoEConfig(dispatch=candidate.removeprefix("ours, "))
        return routed_experts(self.x, w1, w2, w3, self.ids, self.scores, config=config, ep_group=group)

    def step(self, candidate: str) -> list[Tensor]:
        out = self.forward(candidate)
        scores = self.bf16_scores if candidate == PEER else self.scores
        return [out, *torch.autograd.grad(out, [self.x, scores, *self.experts.parameters()], self.dout)]

    def results(self) -> list[Tensor]:
        """The peer's, for :func:`check`."""
        out, dx, dscores, dw1, dw2, dw3 = self.step(PEER)
        return [out, dx, dscores, torch.cat((dw1, dw3), 1), dw2]


def in_turn_ms(run: Callable[[str], object]) -> dict[str, float]:
    """Median milliseconds of the slowest rank by candidate, in an order that is the same on all ranks."""
    timers = {n: functools.partial(slowest_ms, functools.partial(run, n)) for n in (PEER, *OURS)}
    return medians(in_turn(timers, 5, random.Random(0)))


def records(shape: str, lines: list[dict]) -> list[dict]:
    """One for each of ours, of lines with a ``candidate``'s ``ms`` and ``forward_ms``."""
    ms = {line["candidate"]: line["ms"] for line in lines}
    ms |= {f"{line['candidate']}, forward": line["forward_ms"] for line in lines}
    found = []
    for ours, name in OURS.items():
        fields = dict(forward=f"{ours}, forward", reference_forward=f"{PEER}, forward")
        found += ms_records(name, shape, {BACK_TO_BACK: ms}, ours, [PEER], UNIT, **fields)
    return found


def configure(problems: list[tuple[Sizes, int]]) -> None:
    """NVSHMEM, and LigerCute's buffers for the largest of the problems."""
    from liger_cute_kernels import MoEConfig, configure

    ranks = dist.get_world_size()
    largest = dict(
        max_tokens=max(tokens for _, tokens in problems), hidden_size=max(sizes.D for sizes, _ in problems),
        num_experts=max(sizes.E for sizes, _ in problems), top_k=max(sizes.K for sizes, _ in problems),
    )  # fmt: skip
    configure(
        process_groups={"ep": dist.group.WORLD},
        device=torch.device("cuda", torch.cuda.current_device()),
        moe=MoEConfig(**largest, num_hosts=1, gpus_per_host=ranks, group="ep"),
    )


def main() -> None:
    args = script_parser(__doc__, out="add the records to this JSON file").parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    begin()
    torch.manual_seed(dist.get_rank())
    configure([(sizes_of(model), tokens) for model, tokens in SHAPES])
    for model, tokens in SHAPES:
        sizes, ranks = sizes_of(model), dist.get_world_size()
        problem = EpProblem(sizes, tokens)
        apart = max(check(functools.partial(problem.step, ours), problem.results) for ours in OURS)
        ms = in_turn_ms(problem.step)
        with torch.no_grad():
            forward_ms = in_turn_ms(problem.forward)
        if dist.get_rank() == 0:
            shape = f"{model}, {sizes.E // ranks} experts per GPU, {tokens} tokens, {ranks} GPUs"
            show(f"{shape}, {apart:.3f} apart", {BACK_TO_BACK: ms, "forward": forward_ms})
            found = [dict(candidate=n, ms=ms[n], forward_ms=forward_ms[n]) for n in ms]
            write_records(args.out, records(shape, found))
        del problem
        torch.cuda.empty_cache()
    together()
    from liger_cute_kernels import nvshmem

    nvshmem.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
