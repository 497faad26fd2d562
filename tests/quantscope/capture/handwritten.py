"""Captures written without the writer under test: JSON lines, and segments of the safetensors library.

Nothing of `megatron.quantscope.capture` is imported here, so what reads these captures is held to the written format
and not to a writer that may share its mistakes. Offsets come from the header that the library wrote.
"""

import json
import struct
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import xxhash

RUN = "20261121_120000_aaaaaa"
MODULE = "decoder.layers.0.mlp.linear_fc1"
NO_WORD = {"complex128", "complex32"}  # dtypes that safetensors has no word for
BLOCK = 32
AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


def parallel(**given):
    """Coordinates of one process alone, but for what is given."""
    alone = {f"{axis}_{what}": value for axis in AXES for what, value in (("rank", 0), ("size", 1))}
    return alone | given


def metadata(tensor, **given):
    """All fields of a row's metadata."""
    fields = {
        "rank": 0,
        "sample_idx": 0,
        "iteration": 0,
        "layer_type": "linear",
        "operation": "forward",
        "quant_type": "mxfp8",
        "tensor_name": "input",
        "layer_idx": 0,
        "phase": "pre",
        "component": "linear",
        "save_time": "2026-11-21 12:00:01",
        "module": MODULE,
        "gemm": "fprop",
        "sample_indices": [0],
        "document_ids": [[7]],
        "micro_batch": 0,
        "parallel": parallel(),
        "shard": [],
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "stage": "complete",
        "recomputed": False,
        "grad_scale": 1.0,
        "formats": {"fprop": {"x": "mxfp8"}},
        "head_dim": None,
        "softmax_scale": None,
        "routed": False,
        "run_id": RUN,
    }
    return fields | given


def stem(counter, row):
    """The name of a tensor in a segment, and of a `pt` file less its suffix."""
    return (
        f"20261121_120001_{counter:04d}_iter{row['iteration']:03d}_{row['layer_type']}_L{row['layer_idx']}"
        f"_{row['operation']}_{row['phase']}_{row['component']}_{row['quant_type']}_rank{row['rank']}"
        f"_sample{row['sample_idx']}_{row['tensor_name']}"
    )


def raw(tensor):
    """The bytes of a tensor."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def checksum(tensor):
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw(tensor))}"


def statistics(tensor):
    """Enough of a tensor's statistics for readers."""
    if tensor.is_complex() or not tensor.numel():
        return None
    values = tensor.double().numpy()
    exponents = np.unique(np.frexp(np.abs(values[values != 0]))[1] - 1, return_counts=True)
    return {
        "count": values.size,
        "zero": int((values == 0).sum()),
        "nan": 0,
        "inf": 0,
        "min": float(values.min()),
        "max": float(values.max()),
        "sum": float(values.sum()),
        "sum_squares": float(np.square(values).sum()),
        "exponents": {str(exponent): int(count) for exponent, count in zip(*exponents, strict=True)},
    }


def block_map(tensor):
    """uint8 [..., ceil(n / 32)]: the exponent field of the float32 amax of each block along the last dimension."""
    values = np.abs(tensor.float().numpy()).reshape(*(tensor.shape or (1,)))
    last = values.shape[-1]
    blocks = [values[..., begin : begin + BLOCK].max(axis=-1) for begin in range(0, last, BLOCK)]
    return torch.from_numpy((np.stack(blocks, axis=-1).view(np.uint32) >> 23).astype(np.uint8))


class Writer:
    """One rank's part of a run, iteration by iteration: `add` rows, then `commit`."""

    def __init__(self, root, *, rank=0, quant_type="mxfp8", run=RUN, world_size=1, coordinates=None, **info):
        self.folder = Path(root) / quant_type / "runs" / run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fixed = {"rank": rank, "quant_type": quant_type, "run_id": run, "parallel": coordinates or parallel()}
        self.manifest = self.folder / f"manifest_rank{rank}.jsonl"
        self.lines, self.tensors, self.rows, self.known, self.counter = [], {}, [], {}, 0
        record = {
            "run_id": run,
            "quant_type": quant_type,
            "created": "2026-11-21 12:00:00",
            "world_size": world_size,
        } | info
        (self.folder / "run.json").write_text(json.dumps(record))

    def add(self, tensor, *, kept=True, blocks=False, **fields):
        """A row of the running iteration."""
        self.counter += 1
        row = metadata(tensor, **(self.fixed | fields))
        name = stem(self.counter, row)
        place = {"store": "none", "file": None, "offset": None, "bytes": 0, "checksum": None, "reference": False}
        if kept:
            place |= {"store": "segment", "bytes": len(raw(tensor)), "checksum": checksum(tensor)}
            place |= {"reference": not self._put(name, tensor), "tensor": checksum(tensor)}
        place |= {"counter": self.counter, "statistics": statistics(tensor), "blocks": None}
        if blocks:
            found = block_map(tensor)
            self._put(f"{name}.block_exponents", found)
            values, counts = np.unique(found.numpy(), return_counts=True)
            place["blocks"] = {"shape": list(found.shape), "size": BLOCK, "tensor": checksum(found)}
            place["blocks"]["counts"] = {str(value): int(count) for value, count in zip(values, counts, strict=True)}
        self.rows.append(row | place)

    def commit(self, iteration=0, *, committed=True, loss=3.0):
        """Write the iteration's segment and lines."""
        files, size = 0, 0
        if self.tensors:
            path = self.folder / f"iter{iteration:03d}_rank{self.fixed['rank']}_000.safetensors"
            files, size = 1, self._write_segment(path, iteration)
            self.lines.append({"kind": "segment", "file": path.name, "bytes": size, "iteration": iteration})
        for row in self.rows:
            self._place(row)
            if row["blocks"]:
                self._place(row["blocks"])
            self.lines.append({"kind": "tensor", **row})
        counts = {"rows": len(self.rows), "files": files, "bytes": size}
        if committed:
            self.lines.append({"kind": "commit", "iteration": iteration, **counts, "scalars": {"lm loss": loss}})
        self.rows, self.tensors = [], {}
        return self.flush()

    def close(self):
        """End the run in good order."""
        self.lines.append({"kind": "closed", "rows": self.counter, "files": 0, "bytes": 0})
        return self.flush()

    def flush(self):
        self.manifest.write_text("".join(json.dumps({"schema": 2, **line}) + "\n" for line in self.lines))
        return self

    def _put(self, name, tensor):
        """Whether the bytes are new."""
        if checksum(tensor) in self.known:
            return False
        self.known[checksum(tensor)] = name
        no_word = str(tensor.dtype).removeprefix("torch.") in NO_WORD
        content = (
            torch.frombuffer(bytearray(raw(tensor)), dtype=torch.uint8) if no_word else tensor.clone().contiguous()
        )
        self.tensors[name] = content
        return True

    def _write_segment(self, path, iteration):
        labels = {"run_id": self.fixed["run_id"], "quant_type": self.fixed["quant_type"]}
        labels |= {"rank": str(self.fixed["rank"]), "iteration": str(iteration)}
        safetensors.torch.save_file(self.tensors, path, metadata=labels)
        for name, (begin, _) in offsets(path).items():
            key = next(key for key, known in self.known.items() if known == name)
            self.known[key] = (path.name, begin)
        return path.stat().st_size

    def _place(self, entry):
        key = entry.pop("tensor", None)
        if key is not None:
            entry["file"], entry["offset"] = self.known[key]


def offsets(path):
    """Tensor name -> (first byte, byte after the last) in the file."""
    content = Path(path).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return {name: tuple(8 + size + at for at in entry["data_offsets"]) for name, entry in header.items()}
