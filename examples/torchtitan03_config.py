"""A config of one's own for torchtitan 0.3: ``with_fp8_flow`` makes its MoE layers train in FP8.

    python -m titan_fp8moe.torchtitan03.dry_run --module examples.torchtitan03_config --config my_run
    torchrun --nproc_per_node=1 -m torchtitan.train --module examples.torchtitan03_config --config my_run

``--module`` is any module that Python imports, ``--config`` a function of it. Options follow, as in torchtitan:
``--training.steps 100 --fp8_flow_moe.save_h fp8``. ``tools/build_corpus.py --out outputs/corpus`` makes the text.
"""

from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.trainer import Trainer

from titan_fp8moe import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03.config_registry import with_fp8_flow


def my_run() -> Trainer.Config:
    config = deepseek_v3_debugmodel()
    config.hf_assets_path = "outputs/corpus/tokenizer"
    config.dataloader.dataset, config.dataloader.dataset_path = "c4_test", "outputs/corpus/train"
    config.training.steps = 20
    return with_fp8_flow(config, Fp8FlowMoEConfig(recompute="experts"))
