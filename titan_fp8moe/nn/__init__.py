"""Modules and functions that any PyTorch model can use in place of its own."""
