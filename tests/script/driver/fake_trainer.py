"""Stands in for pretrain_gpt.py: writes a manifest as a run of the trainer would, and ends as $FAKE_TRAINER says."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

FILES, FILE_BYTES = 5, 1000
REASON = "No space left on device"


def write_run(options: argparse.Namespace, iterations: int) -> None:
    run = Path(options.tensor_save_dir) / options.quant_type / "runs" / f"20260101_000000_{os.getpid():06d}"
    run.mkdir(parents=True)
    with (run / "manifest_rank0.jsonl").open("w") as manifest:
        for iteration in range(iterations):
            for micro_batch in range(options.collect_micro_batches):
                place = {"iteration": iteration, "sample_idx": iteration * 10 + micro_batch, "kind": "tensor"}
                for number in range(FILES + 1):  # the last row refers to another's file
                    row = {**place, "store": "pt", "bytes": FILE_BYTES, "reference": number == FILES}
                    print(json.dumps(row), file=manifest, flush=True)
            if BEHAVIOUR != "torn":
                commit = {"kind": "commit", "iteration": iteration, "scalars": {"lm loss": 3.5 - iteration}}
                print(json.dumps(commit), file=manifest, flush=True)
        if BEHAVIOUR == "stopped":
            print(json.dumps({"kind": "stopped", "reason": REASON}), file=manifest)


BEHAVIOUR = os.environ.get("FAKE_TRAINER", "good")
BROKEN_TYPE = os.environ.get("FAKE_BROKEN_TYPE")
parser = argparse.ArgumentParser()
parser.add_argument("--tensor-save-dir")
parser.add_argument("--quant-type")
parser.add_argument("--control-iter", type=int)
parser.add_argument("--collect-micro-batches", type=int)
options, _ = parser.parse_known_args()

print(" iteration        1/     100 | elapsed time per iteration (ms): 1500.0 | lm loss: 3.5E+00 | grad norm: 2.25 |")
print("arguments:", *sys.argv[1:])
if BEHAVIOUR in ("hang", "family"):
    tree = [os.getpid()]
    if BEHAVIOUR == "family":  # as torchrun: a child in a session of its own, which does not mind SIGTERM
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        tree.append(subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True).pid)
        tree.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    Path(os.environ["FAKE_PIDS"]).write_text(" ".join(map(str, tree)))
    sys.stdout.flush()
    time.sleep(600)
if BEHAVIOUR == "usage":
    print("pretrain_gpt.py: error: --foo is not allowed", file=sys.stderr)
    sys.exit(2)
if "--tensor-dry-run" in sys.argv:
    sys.exit(BEHAVIOUR == "crash")
if BEHAVIOUR == "crash" or options.quant_type == BROKEN_TYPE:
    write_run(options, 0)
    raise RuntimeError("the loss is NaN")
write_run(options, options.control_iter - (BEHAVIOUR == "short"))
