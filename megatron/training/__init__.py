"""A lean trainer on megatron-core with Megatron-LM's flag names (`pretrain_gpt.py` is its command).

This package has an `__init__.py` on purpose: megatron-core >= 0.17 ships a `megatron/training` of its own, and only a
regular package that comes first on `sys.path` shadows it fully. Nothing heavy is imported here.
"""
