"""Trains as ``torchtitan.train`` does, with one bit of one initial weight changed: the last one that bf16 keeps.

    torchrun -m tools.one_bit ARGUMENTS_OF_TORCHTITAN

The losses of such a run part from those of an unchanged one by rounding alone. FP8 cannot come closer than that.
"""

import runpy

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook


def change(model: nn.Module, _: tuple) -> None:
    """Runs before the first forward of any module, which is the whole model's."""
    hook.remove()
    weight = next(model.parameters()).detach()
    shard = weight.to_local() if isinstance(weight, DTensor) else weight
    shard.view(-1).view(torch.uint8)[2] ^= 1  # bit 16 of an fp32 weight


if __name__ == "__main__":
    hook = register_module_forward_pre_hook(change)
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
