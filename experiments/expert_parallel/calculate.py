"""What dispatch over symmetric memory should bring, and what it costs in memory: calculated, not measured.

    python -m experiments.expert_parallel.calculate

Times follow from the bytes of uniform routing and from four rates. Three were measured on H200s: reads from a peer over
NVLink, NCCL's all-to-all of four GPUs, and a device copy. InfiniBand was not available: its rate is that of a 400 Gb/s
port for each GPU, less 10%.
"""

from collections.abc import Iterator
from typing import NamedTuple

from experiments.tables import markdown
from titan_fp8moe.dispatch.symmetric.workspace import Sizes, capacities
from titan_fp8moe.recipe import row_capacity

PEER_READ, NCCL, COPY, INFINIBAND = 362e9, 301e9, 4.24e12, 45e9  # bytes per second
NODE = 8  # GPUs that NVLink connects


class Model(NamedTuple):
    """D, K, all experts, their hidden dim, and MoE layers."""

    name: str
    D: int
    K: int
    experts: int
    H: int
    layers: int


MODELS = (Model("16B", 2048, 6, 64, 1408, 26), Model("671B", 7168, 8, 256, 2048, 58))


def dispatched(model: Model, ranks: int) -> float:
    """Dispatched tokens for each token, if routing is uniform."""
    return ranks * (1 - (1 - 1 / ranks) ** model.K)


def on_the_wire(row_bytes: float, ranks: int, nvlink: float) -> float:
    """Seconds for what a rank receives: NVLink within a node and InfiniBand between nodes, at the same time."""
    near, far = min(ranks, NODE) - 1, max(ranks - NODE, 0)
    return max(row_bytes * near / ranks / nvlink, row_bytes * far / ranks / INFINIBAND)


def exchange_us(model: Model, ranks: int, path: str) -> tuple[float, float]:
    """Microseconds per 1,000 tokens of a rank: dispatch + permute, and sum + combine."""
    C, R, D = dispatched(model, ranks), model.K, model.D
    row = D + D / 128 + 8 * model.K
    if path == "all_to_all":  # pack, send, permute; sum, send, sum
        dispatch = 2 * C * D / COPY + on_the_wire(C * row, ranks, NCCL) + (C + R) * D / COPY
        combine = (R + C) * 2 * D / COPY + on_the_wire(2 * C * D, ranks, NCCL) + (C + 1) * 2 * D / COPY
    else:  # publish; pull to all rows, as slow as the slower of link and memory; push sums; sum
        dispatch = 2 * D / COPY + max(on_the_wire(C * row, ranks, PEER_READ), (2 * C + R) * D / COPY)
        combine = max(on_the_wire(2 * C * D, ranks, PEER_READ), (R + C) * 2 * D / COPY) + (C + 1) * 2 * D / COPY
    return dispatch * 1e9, combine * 1e9


def times() -> Iterator[list[str]]:
    for model in MODELS:
        for ranks in (2, 4, 8, 16, 32, 64):
            old = exchange_us(model, ranks, "all_to_all")
            cells = [model.name, str(ranks), f"{old[0]:.0f} + {old[1]:.0f}"]
            if ranks <= NODE:
                new = exchange_us(model, ranks, "symmetric")
                # A layer dispatches and combines in both directions.
                cells += [f"{new[0]:.0f} + {new[1]:.0f}", f"{sum(old) / sum(new):.2f}x"]
            else:
                cells += ["several nodes", "-"]
            yield cells


def memory() -> Iterator[list[str]]:
    for model in MODELS:
        for ranks in (4, 8):
            for T in (4096, 16384):
                E = model.experts // ranks
                workspace = Sizes(ranks, T, model.D, model.K, E).nbytes / 2**30
                cells = [model.name, str(ranks), f"{T:,}", f"{workspace:.2f}"]
                C, M = round(T * dispatched(model, ranks)), row_capacity(T * model.K, E)
                kept = [saved_gib(model, M, C)]
                for factor in (1.2, 1.5, 2.0):
                    kept.append(saved_gib(model, *capacities(T, model.K, ranks, E, factor)))
                yield cells + [f"{gib:.2f}" for gib in kept]


def saved_gib(model: Model, M: int, C: int) -> float:
    """What a layer saves with the default settings: tokens in FP8, h in bf16, the routing."""
    return (C * (model.D + model.D // 128 + 5 * model.K) + M * (4 * model.H + 8)) / 2**30


PAPER = {8: 1176, 16: 1012, 32: 779}  # tokens/s/GPU of FP8-Flow-MoE, 671B on 256 GPUs, full recompute


def beside_the_paper() -> Iterator[list[str]]:
    model = MODELS[1]
    for ranks, measured in PAPER.items():
        token_us = 1e6 / measured
        # Full recomputation: two forwards and a backward, each with a dispatch and a combine.
        old = 3 * model.layers * sum(exchange_us(model, ranks, "all_to_all")) / 1000
        cells = [str(ranks), f"{measured:,}", f"{token_us:.0f}", f"{old:.0f} ({100 * old / token_us:.0f}%)"]
        if ranks <= NODE:
            new = 3 * model.layers * sum(exchange_us(model, ranks, "symmetric")) / 1000
            cells += [f"{new:.0f}", f"{1e6 / (token_us - old + new):,.0f}"]
        else:
            cells += ["several nodes", "-"]
        yield cells


def main() -> None:
    print("Microseconds per 1,000 tokens of a rank, dispatch + permute and sum + combine:\n")
    print(markdown(["model", "EP", "all-to-all", "symmetric", "speedup"], list(times())) + "\n")
    print("GiB of a rank: workspace, once; saved by each layer, all-to-all and symmetric by dispatch_capacity:\n")
    header = ["model", "EP", "tokens", "workspace", "saved, all-to-all", "1.2", "1.5", "2.0"]
    print(markdown(header, list(memory())) + "\n")
    print("671B on 256 GPUs, if the paper's exchange took what this model says; microseconds of a GPU per token:\n")
    header = ["EP", "paper, tokens/s/GPU", "a token", "of it all-to-all", "symmetric", "tokens/s/GPU"]
    print(markdown(header, list(beside_the_paper())) + "\n")


if __name__ == "__main__":
    main()
