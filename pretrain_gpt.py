#!/usr/bin/env python3
"""Train a GPT or Llama-type model on megatron-core: `python pretrain_gpt.py FLAGS`, or by torchrun; see --help."""

import sys

if __name__ == "__main__":  # saving a checkpoint starts helper processes that import this file again
    from megatron.training.main import main

    sys.exit(main())
