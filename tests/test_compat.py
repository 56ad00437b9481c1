"""The corrections to PyTorch. ``test_patches.py`` has what they say when a private interface is gone."""

import functools
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import titan_fp8moe.torchtitan  # noqa: F401  installs the corrections
from tests.patched import undone
from titan_fp8moe import RoutedExperts, patches
from titan_fp8moe.trainer import compat


def test_selective_checkpointing_sees_no_range_of_the_profiler():
    """A recomputation may have others."""
    asked = []

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(str(op))
        return CheckpointPolicy.PREFER_RECOMPUTE

    with undone():
        compat.fix_selective_checkpointing()
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        block = torch.profiler.record_function("range")(torch.sin)
        checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False, context_fn=contexts)
    assert "aten.sin.default" in asked and "profiler" not in "".join(asked)


def test_a_compiled_checkpoint_keeps_its_inputs_only():
    """PyTorch 2.11 kept all that an autograd.Function saves."""
    compat.fix_full_checkpointing()
    block = checkpoint_wrapper(RoutedExperts(4, 128, 128), preserve_rng_state=False)
    x, scores = torch.randn(256, 128, requires_grad=True), torch.rand(256, 2, requires_grad=True)
    inputs = x, torch.randint(4, (256, 2)), scores
    kept, saved = {t.untyped_storage().data_ptr() for t in (*inputs, *block.parameters())}, []
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = compiled(*inputs)
    out.sum().backward()
    assert x.grad is not None and saved and kept.issuperset(tensor.untyped_storage().data_ptr() for tensor in saved)


class Doubling(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def test_compiled_modules_are_called_eagerly_for_a_while():
    """Also where an error ends it; what has not been compiled stays so."""
    calls, model, x = [], torch.nn.Sequential(Doubling(), Doubling()), torch.ones(2)
    model[1].compile(backend=lambda graph, _: lambda *args: calls.append(graph) or graph(*args))
    model(x)
    with compat.uncompiled([model]):
        model(x)
    assert len(calls) == 1
    with pytest.raises(KeyError), compat.uncompiled([model]):
        raise KeyError
    model(x)
    assert len(calls) == 2 and model[0]._compiled_call_impl is None


@pytest.mark.parametrize(("before", "after"), [(8, 32), (100, 100)])
def test_the_recompile_limit_is_raised_and_never_lowered(before: int, after: int):
    with undone(), torch._dynamo.config.patch(recompile_limit=before):
        compat.raise_recompile_limit()
        assert torch._dynamo.config.recompile_limit == after
        patches.undo_all()
