#!/bin/bash
# The transports of weights on a machine with one GPU and torch, without a package index: one JSON line a check.
#     bash hack/gpu/transports.sh
# Runs `benchmarks/weights/on_device.py` and then `benchmarks/weights/transports.py`; a few minutes, most of them imports.
set -u
cd "$(dirname "$0")/../.."
python -m pip install --quiet --no-deps --no-build-isolation -e . || exit 1
python -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
python benchmarks/weights/on_device.py --device cuda:0 --collective nccl --mebibytes 1024
status=$?
python benchmarks/weights/transports.py --kinds host host-tcp host-tls ipc pairs --mebibytes 1024
exit $((status | $?))
