"""Does the jobs of a `ForkedTrainer` with a stand-in for TransformerEngine, which core looks for when imported."""

import os
import sys
from pathlib import Path

STAND_IN = Path(__file__).with_name("stand_in")


def serve():
    sys.path.insert(0, str(STAND_IN))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU the real one is tested, and the stand-in knows none
    from megatron.training.main import _import_core
    from tests.end_to_end import forked_ranks

    _import_core()
    from megatron.training import te_layer_spec

    te_layer_spec.has_gpu = lambda: True  # the stand-in needs none
    forked_ranks.serve()


if __name__ == "__main__":
    serve()
