"""Figures and texts from an analysed capture. Everything here draws what `megatron.quantscope.analysis` computed."""
