"""A config of one's own for torchtitan 0.3, whose MoE layers train in FP8.

    pip install -e '.[torchtitan03]'   # in a checkout of this repository
    python -m titan_fp8moe.torchtitan03.dry_run --module examples.torchtitan03_config --config my_run
    torchrun --nproc_per_node=1 -m torchtitan.train --module examples.torchtitan03_config --config my_run

``--module`` is any module that Python imports, ``--config`` a function of it. Options follow, as in torchtitan:
``--training.steps 100``. ``tools/build_corpus.py --out outputs/corpus`` makes the text.
"""

import titan_fp8moe.torchtitan03  # noqa: F401  before torchtitan: it names the extra, and uses the CPU without a GPU

# isort: split
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.trainer import Trainer


def my_run() -> Trainer.Config:
    config = deepseek_v3_debugmodel()
    config.hf_assets_path = "outputs/corpus/tokenizer"
    config.dataloader.dataset, config.dataloader.dataset_path = "c4_test", "outputs/corpus/train"
    config.training.steps = 20
    config.override.imports.append(("titan_fp8moe.torchtitan03.fp8_flow_moe", {"recompute": "experts"}))
    return config
