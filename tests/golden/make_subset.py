"""Make the small copy of the golden vectors: `python tests/golden/make_subset.py WHOLE_SET TARGET`."""

import argparse
from pathlib import Path

import numpy as np

ELEMENT_STRIDE = 61  # prime, so that no pattern of the whole set is in step with it
BLOCKS_OF_EACH_KIND = 5
TENSORS = 3
ELEMENT_ARRAYS = ("x", "y", "y_sat")
BLOCK_ARRAYS = ("x", "y", "y_rceil", "kind")


def subset(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The part of one file that is kept."""
    if name.startswith("hif8_decode"):
        return arrays
    if name.startswith("nvfp4"):
        return {key: arrays[key][:TENSORS] for key in ("x", "y")}
    if "kind" in arrays:
        rows = np.concatenate(
            [np.flatnonzero(arrays["kind"] == k)[:BLOCKS_OF_EACH_KIND] for k in np.unique(arrays["kind"])]
        )
        kept = {key: arrays[key][rows] for key in BLOCK_ARRAYS if key in arrays}
        return kept | {"kind_names": arrays["kind_names"]}
    return {key: arrays[key][::ELEMENT_STRIDE] for key in ELEMENT_ARRAYS if key in arrays}


def main() -> None:
    """Read the whole set, write the small one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("whole_set", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    for source in sorted(arguments.whole_set.glob("*.npz")):
        with np.load(source) as arrays:
            np.savez_compressed(arguments.target / source.name, **subset(source.name, dict(arrays)))


if __name__ == "__main__":
    main()
