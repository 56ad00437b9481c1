"""The trainer whose config has the section ``fp8_flow_moe``, so that its settings are options of the command line."""

from dataclasses import asdict, dataclass, field, replace

from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03.conversion import conversion_of
from titan_fp8moe.torchtitan03.converter import Fp8FlowConverter
from titan_fp8moe.torchtitan03.job_checks import bf16_layers


def converted(spec: ModelSpec, settings: Fp8FlowMoEConfig) -> ModelSpec:
    """The spec with its model converted. One that was converted before must have the same settings.

    Raises:
        ValueError: for a model that cannot be converted. It names the setting and the remedy.
    """
    before = conversion_of(spec.model)
    if before is None:
        return replace(spec, model=Fp8FlowConverter.Config(**asdict(settings)).build().convert(spec.model))
    if before.settings != settings:
        raise ValueError(
            f"the model was converted with {before.settings}, but fp8_flow_moe is {settings}; configure one of the two"
        )
    return spec


class Fp8FlowTrainer(Trainer):
    """torchtitan's trainer of a model that it converts first.

    Raises:
        ValueError: for a job or hardware that cannot work. It names the setting and the remedy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        fp8_flow_moe: Fp8FlowMoEConfig = field(default_factory=Fp8FlowMoEConfig)
        """Settings of the FP8 data flow."""

        def _validate_cuda_graphs(self) -> None:
            # torchtitan looks at dispatchers, which the conversion is going to replace; job_checks looks at ours.
            if bf16_layers(self) or self.parallelism.pipeline_parallel_degree > 1:
                Trainer.Config._validate_cuda_graphs(self)

    def __init__(self, config: Config):
        config.model_spec = converted(config.model_spec, config.fp8_flow_moe)
        super().__init__(config)
