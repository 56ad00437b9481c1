"""The model converter, for trainers that take a model spec and apply no overrides, such as the fault-tolerant one.

``model_registry(flavor, converters=[Fp8FlowConverter.Config(save_h="fp8")])`` claims the MoE layers as the override
does. torchtitan's trainers call ``update_from_config(config=job)`` of the model's config before they build it, so the
config that the converter returns knows the job.
"""

from dataclasses import dataclass, fields
from typing import Any

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03 import conversion
from titan_fp8moe.torchtitan03.names import MoE, QuantizationConverter


class Fp8FlowConverter(QuantizationConverter):
    """Converts the MoE layers and FFNs that ``filter_fqns`` does not match, and the linears that ``linear_fqns`` does.

    Its settings are those of :class:`~titan_fp8moe.config.Fp8FlowMoEConfig`. ``model_compile_enabled`` is not read: the
    job says later what is compiled.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config, Fp8FlowMoEConfig):
        pass

    def __init__(self, config: Config):
        self.settings = Fp8FlowMoEConfig(**{f.name: getattr(config, f.name) for f in fields(Fp8FlowMoEConfig)})

    def convert(self, model_config: Any) -> Any:
        """Claims the MoE layers of ``model_config``. The result takes its place.

        Raises:
            ValueError: they are claimed with other settings.
        """
        for place in conversion.places(model_config, MoE.Config).values():
            place.replace(conversion.claim(place.config, self.settings))
        return _root(model_config, self.settings)


def _root(model: Any, settings: Fp8FlowMoEConfig) -> Any:
    """``model`` in a class that converts it when it is built, unless a trainer's config has. LoRAConverter may derive
    from it."""
    base = type(model)

    class Config(base):
        job: Any = None

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            base.update_from_config(self, config=config, **kwargs)
            self.job = config

        def convert(self) -> None:
            if self.job is not None:
                conversion.convert(self, self.job, settings)
            self.job = None

        def build(self, **kwargs: Any) -> Any:
            self.convert()
            return base.build(self, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            if type(self) is not Config:  # LoRAConverter's
                return super().__reduce_ex__(protocol)
            return _root, (base(**_values(self)), settings)  # the class has no name to be found by

    Config.__name__, Config.__qualname__ = f"Fp8Flow{base.__name__}", f"Fp8Flow{base.__qualname__}"
    return Config(**_values(model))


def _values(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config) if f.init}
