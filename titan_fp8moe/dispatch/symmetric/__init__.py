"""Dispatch through memory that the ranks of one node share.

:mod:`~titan_fp8moe.dispatch.symmetric.exchange` specifies the steps, ``kernels`` runs them on a GPU, ``workspace`` owns
the memory, and ``dispatch`` serves the layer.
"""
