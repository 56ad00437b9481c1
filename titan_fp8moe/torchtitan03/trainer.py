"""The trainer whose config has the section ``fp8_flow_moe``, so that its settings are options of the command line."""

from dataclasses import dataclass, field, replace
from typing import Any

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03.conversion import Fp8FlowClaim
from titan_fp8moe.torchtitan03.names import MoE, Trainer


class Fp8FlowTrainer(Trainer):
    """torchtitan's trainer, which names the override of this package with the section's settings.

    Raises:
        ValueError: for a job or hardware that cannot work. It names the setting and the remedy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        fp8_flow_moe: Fp8FlowMoEConfig = field(default_factory=Fp8FlowMoEConfig)
        """Settings of the FP8 data flow."""

        def _validate_cuda_graphs(self) -> None:
            # torchtitan looks at dispatchers, which are replaced with the layers. It asks again when these are claimed.
            if self.model_spec is not None and any(self.model_spec.model.traverse(Fp8FlowClaim.Config)):
                Trainer.Config._validate_cuda_graphs(self)

    def __init__(self, config: Config):
        super().__init__(overriding(config))


def overriding(config: Any) -> Any:
    """The config of a :class:`Fp8FlowTrainer` with the override among its imports.

    Raises:
        ValueError: nothing could be overridden.
    """
    if not any(config.model_spec.model.traverse(MoE.Config)):
        raise ValueError("fp8_flow_moe: the model has no MoE layer; choose another, or torchtitan's own config")
    defaults = vars(Fp8FlowMoEConfig())
    settings = {name: value for name, value in vars(config.fp8_flow_moe).items() if value != defaults[name]}
    imports = [*config.override.imports, ("titan_fp8moe.torchtitan03.fp8_flow_moe", settings)]
    return replace(config, override=replace(config.override, imports=imports))
