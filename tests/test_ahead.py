"""A step that begins while the GPU computes the one before, with torchtitan's own ``train_step``."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import utils
from torchtitan.train import Trainer

from tests.patched import undone
from titan_fp8moe.torchtitan.converter import prepare_torchtitan
from titan_fp8moe.trainer import ahead
from titan_fp8moe.trainer.ahead import _OnItsWay, keep_host_ahead


def step(device: str, microbatches: int, busy: Any = None, mesh: DeviceMesh | None = None) -> list[bool]:
    """Runs a step, whose gradient and batches are checked; of each microbatch whether the GPU was still busy. The ranks
    of a ``mesh`` sum their numbers of tokens."""
    was_busy, weight = [], torch.nn.Parameter(torch.ones(4, device=device))
    batches = [({"input": torch.arange(4) + i}, torch.arange(4) - i) for i in range(microbatches)]
    if device == "cuda":
        batches = [({"input": x["input"].pin_memory()}, labels.pin_memory()) for x, labels in batches]

    class StandIn(Trainer):
        def __init__(self):
            self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
            self.gradient_accumulation_steps = microbatches
            self.model_parts = [torch.nn.ParameterList([weight])]
            meshes = dict(get_mesh=lambda _: mesh, get_optional_mesh=lambda _: None)
            self.parallel_dims = SimpleNamespace(dp_enabled=mesh is not None, ep_enabled=False, **meshes)
            self.job_config = SimpleNamespace(training=SimpleNamespace(max_norm=1e9))
            self.optimizers, self.lr_schedulers, self.checkpointer = MagicMock(), MagicMock(), MagicMock()
            self.metrics_processor, self.step = MagicMock(), 1
            self.metrics_processor.should_log.return_value = False

        def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
            i, x = len(was_busy), input_dict["input"]
            was_busy.append(busy is not None and not busy.query())
            loss = (weight * x / global_valid_tokens).sum()
            loss.backward()
            if busy is None:  # the values would be waited for
                assert x.tolist() == [i, i + 1, i + 2, i + 3] and labels.tolist() == [-i, 1 - i, 2 - i, 3 - i]
                assert float(global_valid_tokens) == 4 * microbatches
            assert type(labels) is torch.Tensor and x.device == labels.device == self.device
            return loss

    with undone():
        keep_host_ahead(Trainer, utils)
        trainer = StandIn()
        trainer.train_step(iter(batches))
    assert "forward_backward_step" not in vars(trainer)
    expected = (torch.arange(4.0) * microbatches + sum(range(microbatches))) / (4 * microbatches)
    torch.testing.assert_close(weight.grad.cpu(), expected)
    return was_busy


@pytest.mark.gpu
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("summed", [False, True])
def test_the_host_does_not_wait_for_the_step_before(microbatches, summed, group):
    mesh = init_device_mesh("cuda", (1,)) if summed else None
    step("cuda", microbatches, mesh=mesh)  # compiles nothing, but loads CUDA's modules
    stream, busy = torch.cuda.current_stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    if summed:  # as torchtitan adds up the experts' loads; the next sum follows in NCCL's order
        collectives.all_reduce(torch.ones(4, device="cuda"), "sum", mesh).sum()
    busy.record()
    assert all(step("cuda", microbatches, busy, mesh))
    assert torch.cuda.current_stream() == stream


def test_a_step_on_a_cpu_sums_numbers(group):
    step("cpu", 2)
    with undone():
        plain = utils.dist_sum
        prepare_torchtitan()
        total = utils.dist_sum(torch.tensor(3), init_device_mesh("cpu", (1,)))
        assert type(total) is int and total == 3 and utils.dist_sum is not plain


@pytest.mark.parametrize("use", [
    lambda t: t.to("meta"), lambda t: t.to("cpu", torch.int32), lambda t: t.to(torch.device("meta"), torch.float32),
    lambda t: t[:1], lambda t: torch.tensor(0).to(t.device).add_((t != -100).sum()), lambda t: t.to(torch.ones(1)),
    copy.deepcopy, lambda t: copy.deepcopy([t, t])[1], lambda t: pickle.loads(pickle.dumps(t)),
])  # fmt: skip
def test_other_uses_of_a_batch_are_an_ordinary_tensors(use):
    """As a trainer's own ``post_dataloading_process`` may have them."""
    plain = torch.tensor([1, -100])
    got, want = use(_OnItsWay.to_device(torch.device("meta"), plain)), use(plain)
    assert type(got) is torch.Tensor and (got.dtype, got.device, got.shape) == (want.dtype, want.device, want.shape)
    assert got.is_meta or torch.equal(got, want)


def test_a_computation_waits_for_its_copies_and_a_step_for_all_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """A loader may write to the same pinned memory in the next step."""
    did = Mock()
    computing, copying = did.computing, did.copying
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: did.turn_to(stream))
    monkeypatch.setattr(torch.cuda, "Event", lambda: did.sent)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: did.keep_for(stream))
    monkeypatch.setattr(ahead, "_copying", lambda device: copying)
    monkeypatch.setattr(_OnItsWay, "to_device", lambda device, tensor: did.copy(device) and tensor)

    class StandIn:
        device = torch.device("cuda", 0)

        def train_step(self, data_iterator):
            for batch in [next(data_iterator) for _ in range(2)]:
                self.forward_backward_step(x=batch)

        def forward_backward_step(self, x):
            did.compute()

    with undone():
        keep_host_ahead(StandIn)
        StandIn().train_step(iter(torch.zeros(5, 3)))
    send = [call.turn_to(copying), call.copy(StandIn.device), call.sent.record(copying)]
    compute = [call.turn_to(computing), call.computing.wait_stream(copying), call.keep_for(computing), call.compute()]
    assert did.mock_calls == [*send, *send, *compute, *compute, call.turn_to(computing), call.sent.synchronize()]
