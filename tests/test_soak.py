"""Layers of :mod:`tests.test_any_layer` in the sizes of models on a GPU, each compared with the specification.

    SOAK=200 SEED_OF_SOAK=0 python -m pytest --slow tests/test_soak.py

A seed is one layer. It runs twice with its number of tokens, which must give the same bits, and once with another
number, which must compile nothing. The reference (``ops.emulate``) runs on the same GPU.
"""

import os
import random

import pytest
import torch

from experiments.reference import relative_error
from tests.test_any_layer import Layer, Tensors, ours
from titan_fp8moe import ops
from titan_fp8moe.kernels import permute, quantize, routing, swiglu, transpose
from titan_fp8moe.kernels.gemm import forward, wgrad
from titan_fp8moe.kernels.launch import Kernel

# bf16 rounding of the GEMMs' results and the codes that it moves: 0.0035 on average. Few rows vary more.
LIMIT, LIMIT_OF_FEW = 0.01, 0.03
FEW = 64
MODULES = (permute, quantize, routing, swiglu, transpose, forward, wgrad)
KERNELS = [value for module in MODULES for value in vars(module).values() if isinstance(value, Kernel)]
KERNELS += [swiglu._forward("swiglu", False, False), swiglu._backward("swiglu", False, False)]
FIRST, COUNT = (int(os.environ.get(name, default)) for name, default in (("SEED_OF_SOAK", 0), ("SOAK", 20)))


def draw(seed: int, largest: int) -> tuple[Layer, int]:
    """The layer of a seed, with at most ``largest`` tokens and tiles of 128 in proportion; another number of tokens."""
    pick, tiles = random.Random(seed), max(largest // 512, 1)
    layer = Layer.draw(seed)._replace(entry="routed_experts", lora=(), travels=False, frozen=(), activation="swiglu")
    if layer.weights != "frozen":
        layer = layer._replace(weights="trained")
    tokens, other = (pick.choice([pick.randint(1, largest), pick.randint(1, 200), 128, largest]) for _ in range(2))
    dim, hidden = (128 * pick.randint(1, tiles) for _ in range(2))
    experts = pick.choice([1, 2, 3, 8, 17, 64])
    top_k = pick.randint(1, min(8, experts))
    return layer._replace(tokens=tokens, dim=dim, hidden=hidden, experts=experts, top_k=top_k), other


def check(layer: Layer, other_tokens: int) -> None:
    tensors = Tensors.of(layer, 0)
    got, again = ours(layer, tensors), ours(layer, tensors)
    assert all(torch.equal(got[name], again[name]) for name in got), "a repetition gave other bits"
    compiled = sum(len(kernel._compiled) for kernel in KERNELS)
    ours(layer, Tensors.of(layer._replace(tokens=other_tokens), 1))
    assert sum(len(kernel._compiled) for kernel in KERNELS) == compiled, "another number of tokens compiled a kernel"
    ops.emulate(True)
    try:
        want = ours(layer, tensors)
    finally:
        ops.emulate(False)
    limit = LIMIT_OF_FEW if int((tensors.ids >= 0).sum()) < FEW else LIMIT
    for name, w in want.items():
        fits = relative_error(got[name], w) < limit if w.any() else not got[name].any()
        assert fits, f"{name} has not the specification's values"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_layer_of_a_seed(seed):
    check(*draw(seed, 4096))
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_stays_what_it_was():
    """Kernels' own buffers, as tile counters, are allocated in the first round."""
    allocated = []
    for seed in (0, 1, 2, 0, 1, 2):
        check(*draw(seed, 512))
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[3:]) <= allocated[2]
