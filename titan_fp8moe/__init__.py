"""FP8-Flow-MoE: casting-free FP8 training of DeepSeek-V3-style mixture-of-experts layers."""

__version__ = "0.1.0"
