"""The settings: wrong values, names that match no module, what has no effect. tests/test_titan_jobs.py has jobs."""

import pytest

from tests.layer import refused
from titan_fp8moe import Fp8FlowMoEConfig, RoutedExperts
from titan_fp8moe.trainer import preflight


@pytest.mark.parametrize(("wrong", "remedy"), [
    ({"wgrad": "requantize"}, "one of 'balanced', 'scaling_aware', 'bf16'"),
    ({"save_h": "fp16"}, "one of 'bf16', 'fp8'"),
    ({"recompute": "all"}, "one of 'none', 'activation', 'experts'"),
    ({"cache_weights": 1}, "true or false"),
    ({"statistics_every": 2.5}, "a number of steps, or 0 for never"),
    ({"statistics_every": -1}, "a number of steps, or 0 for never"),
    ({"statistics_every": True}, "a number of steps, or 0 for never"),
    ({"filter_fqns": "layers.1."}, "a list of non-empty strings"),
    ({"filter_fqns": [""]}, "a list of non-empty strings"),
    ({"dispatch_capacity": 0.5}, "a number of at least 1"),
    ({"dispatch_capacity": float("inf")}, "a number of at least 1"),
])  # fmt: skip
def test_wrong_values(wrong: dict, remedy: str):
    ((name, value),) = wrong.items()
    with refused(f"fp8_flow_moe.{name} is {value!r}; set it to {remedy}"):
        Fp8FlowMoEConfig(**wrong)


def test_a_wrong_value_that_is_assigned_later():
    config = Fp8FlowMoEConfig()
    config.recompute = "full"  # type: ignore[assignment]
    with refused("fp8_flow_moe.recompute is 'full'"):
        RoutedExperts(4, 128, 128, config=config)


def test_gathered_weights_are_not_cached():
    with refused("set one to false"):
        Fp8FlowMoEConfig(fp8_all_gather=True, cache_weights=True)


LAYERS = ["layers.1.moe", "layers.2.moe", "layers.11.moe"]


@pytest.mark.parametrize(("parts", "names"), [
    ([], []),
    (["layers.1"], ["layers.1.moe", "layers.11.moe"]),
    (["layers.1.", "layers.2."], ["layers.1.moe", "layers.2.moe"]),
    (["moe."], LAYERS),  # the end of a name counts as a dot
])  # fmt: skip
def test_matching_names(parts: list[str], names: list[str]):
    assert preflight.matching(LAYERS, parts, setting="filter_fqns") == names
    with refused("filter_fqns has 'layers.3.'", "layers.1.moe, layers.2.moe, layers.11.moe", "correct or remove"):
        preflight.matching(LAYERS, [*parts, "layers.3."], setting="filter_fqns")


@pytest.mark.parametrize(("name", "settings"), [
    ("save_h", dict(save_h="fp8", recompute="experts")),
    ("dispatch", dict(dispatch="symmetric")),
    ("dispatch_capacity", dict(dispatch_capacity=2.0)),
    ("cache_layouts", dict(cache_layouts="forward")),
    ("fp8_all_gather", dict(fp8_all_gather=True)),
    (None, dict(save_h="fp8", cache_layouts="forward", cache_weights=True)),
])  # fmt: skip
def test_settings_without_effect_are_named(caplog, name, settings):
    layout = preflight.ExpertLayout(1, 1, 1, 64)
    preflight.warn_of_settings_without_effect(Fp8FlowMoEConfig(**settings), layout)
    assert [line.split(" = ")[0] for line in caplog.messages] == ([f"fp8_flow_moe.{name}"] if name else [])
