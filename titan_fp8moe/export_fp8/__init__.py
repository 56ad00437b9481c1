"""Writes a trained model in DeepSeek's FP8 format: ``python -m titan_fp8moe.export_fp8 --help``.

A matrix that training multiplies in FP8 becomes e4m3 values and one power-of-two ``weight_scale_inv`` per 128x128
block: the values that the next training forward would multiply with. Everything else becomes bf16 or stays fp32.

:func:`fp8_tensors` yields the same tensors of a live model, for a rollout engine.

``files`` reads checkpoints and writes and verifies exports, ``model_config`` compares them with config.json,
``__main__`` is the command line, ``live`` is for models in memory, ``format`` is common to both.
"""

from titan_fp8moe.export_fp8.live import fp8_tensors

__all__ = ["fp8_tensors"]
