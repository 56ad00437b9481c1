"""Lets the host keep ahead of the GPU from step to step.

torchtitan begins a step with copies of the batch to the device, and sums the ranks' numbers of tokens. The host waits
for both, and so, on the stream of the computation, for the whole step before. It begins the forward without a lead,
and the GPU waits for it wherever a layer's kernels take less time than their launches. Here both run on a stream of
their own. The sum stays on the device, as in torchtitan 0.3: its communicator also adds up the experts' loads behind
the optimizer, and NCCL runs what a communicator does in order.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from titan_fp8moe import patches


def keep_host_ahead(trainer: type, utils: ModuleType | None = None) -> None:
    """Changes ``train_step`` of torchtitan's ``Trainer``: one wait less.

    0.2.2 divides the loss by a number where several ranks have data, and by a tensor on one rank. Here it is a tensor
    on all. CUDA multiplies by the reciprocal of a number, so the loss may differ in its last bit; it does not where the
    number of tokens is a power of two.

    Args:
        utils: ``torchtitan.distributed.utils`` of 0.2.2. 0.3 sums on the device by itself.
    """
    patches.wrap(trainer, "train_step", _ahead, checked_on="torchtitan 0.2.2 and 0.3.0")
    if utils is not None:
        patches.wrap(utils, "dist_sum", _stays_on_device, checked_on="torchtitan 0.2.2")


class _OnItsWay(Tensor):
    """A tensor of a batch, on the CPU; its copy ``there`` is on its way to the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override] # ordinary results
    there: Tensor

    @classmethod
    def to_device(cls, device: torch.device, tensor: Tensor) -> "_OnItsWay":
        self = tensor.as_subclass(cls)
        self.there = tensor.to(device, non_blocking=True)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The copy, if its device is all that is asked for, as torchtitan does."""
        if args == (self.there.device,) and not kwargs:
            return self.there
        return self.as_subclass(Tensor).to(*args, **kwargs)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)


def _ahead(train_step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(train_step)
    def wrapper(self: Any, data_iterator: Iterator[Any]) -> None:
        if self.device.type != "cuda":
            return train_step(self, data_iterator)
        compute, computing, copying = self.forward_backward_step, torch.cuda.current_stream(), _copying(self.device)
        send, sent = functools.partial(_OnItsWay.to_device, self.device), torch.cuda.Event()

        def batches() -> Iterator[Any]:
            for batch in data_iterator:
                torch.cuda.set_stream(copying)
                on_its_way = tree_map_only(Tensor, send, batch)
                sent.record(copying)
                yield on_its_way

        def forward_backward_step(**batch: Any) -> Tensor:
            torch.cuda.set_stream(computing)
            computing.wait_stream(copying)
            tree_map_only(Tensor, lambda tensor: tensor.record_stream(computing), batch)
            return compute(**batch)

        try:
            with mock.patch.object(self, "forward_backward_step", forward_backward_step):
                return train_step(self, batches())
        finally:
            torch.cuda.set_stream(computing)
            sent.synchronize()  # the next step's loader may write to the same pinned memory

    return wrapper


def _stays_on_device(dist_sum: Callable[..., float]) -> Callable[..., float | Tensor]:
    @functools.wraps(dist_sum)
    def wrapper(x: Tensor, mesh: DeviceMesh | None = None, extra_pg: Any = None) -> float | Tensor:
        of_this_step = x.is_cuda and torch.cuda.current_stream(x.device) == _copying(x.device)
        if mesh is None or extra_pg is not None or not of_this_step:
            return dist_sum(x, mesh, extra_pg)
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", mesh)).float()  # waits on the stream

    return wrapper


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
