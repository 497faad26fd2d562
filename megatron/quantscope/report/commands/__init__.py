"""The sub-commands of tensor_visualizer.py: a module each, with `run(options) -> exit code`."""
