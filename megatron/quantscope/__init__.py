"""Quantscope: what a low-precision number format does to every tensor of a Megatron model.

Imports run one way, report -> analysis -> capture -> formats and gemm -> formats; `flags` imports the standard library
only, so that `--help` answers at once. Nothing here imports megatron.core or megatron.training.
"""
