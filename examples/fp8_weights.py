"""Sends a live model's FP8 weights to another process, bucket by bucket.

    pip install -e '.[transformers]'   # in a checkout of this repository
    python examples/fp8_weights.py

Rank 0 stands for the trainer, rank 1 for a rollout engine, which would load each bucket.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from titan_fp8moe.export_fp8 import fp8_tensors

SIZES = dict(hidden_size=256, moe_intermediate_size=128, num_experts=8, num_hidden_layers=2, vocab_size=1024)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def send(model: torch.nn.Module) -> None:
    for bucket in fp8_tensors(model, bucket_bytes=1 << 20):
        dist.broadcast_object_list([[(name, tuple(t.shape), t.dtype) for name, t in bucket.items()]], src=0)
        dist.broadcast(torch.cat([t.flatten().view(torch.uint8) for t in bucket.values()]).cpu(), src=0)
    dist.broadcast_object_list([None], src=0)


def receive() -> dict[str, torch.Tensor]:
    weights, message = {}, [None]
    while dist.broadcast_object_list(message, src=0) or message[0]:
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in message[0]]
        dist.broadcast(flat := torch.empty(sum(sizes), dtype=torch.uint8), src=0)
        for (name, shape, dtype), part in zip(message[0], flat.split(sizes), strict=True):
            weights[name] = part.clone().view(dtype).view(shape)  # an engine would load it here
    return weights


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    if rank == 0:
        send(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(DEVICE, torch.bfloat16))
    else:
        weights = receive()
        in_fp8 = sum(tensor.dtype == torch.float8_e4m3fn for tensor in weights.values())
        print(f"received {len(weights)} tensors, {in_fp8} of them in FP8")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (f"{folder}/store",), nprocs=2)
