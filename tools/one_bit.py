"""Trains as ``torchtitan.train`` does, with one bit of one initial weight changed: the last one that bf16 keeps.

    torchrun -m tools.one_bit ARGUMENTS_OF_TORCHTITAN

The losses of such a run part from those of an unchanged one by rounding alone. FP8 cannot come closer than that.
"""

import runpy

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook


def change_one_bit(model: nn.Module) -> None:
    """Changes the first element of the first layer's first weight, on every rank that holds it."""
    weight = next((param for name, param in model.named_parameters() if "layers.0." in name), None)
    if weight is None:
        return  # a later pipeline stage
    if isinstance(weight, DTensor):
        coordinate = weight.device_mesh.get_coordinate()
        assert coordinate is not None
        if any(at and not kind.is_replicate() for at, kind in zip(coordinate, weight.placements, strict=True)):
            return  # another rank's shard begins with it
        weight = weight.to_local()
    weight.detach().view(-1).view(torch.uint8)[2] ^= 1  # bit 16 of an fp32 weight


def change(model: nn.Module, _: tuple) -> None:
    """Runs before the first forward of any module, which is the whole model's."""
    hook.remove()
    change_one_bit(model)


if __name__ == "__main__":
    hook = register_module_forward_pre_hook(change)
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
