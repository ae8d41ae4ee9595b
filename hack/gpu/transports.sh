#!/bin/bash
# Check the transports of weights on a machine with one GPU and torch but without a package index. Each check prints one
# JSON line.
#     bash hack/gpu/transports.sh pack     # first, on a machine with an index: download wheels into build/gpu-wheels
#     bash hack/gpu/transports.sh          # then, on the GPU machine, with build/gpu-wheels copied to it
#     bash hack/gpu/transports.sh cpu gloo 64    # the same checks on a CPU
# Runs `benchmarks/weights/on_device.py`, then `benchmarks/weights/transports.py`; takes a minute or two.
set -eu
cd "$(dirname "$0")/../.."
wheels=build/gpu-wheels
if [ "${1:-}" = pack ]; then
    python3 -m pip download --quiet --dest "$wheels" --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
        -c constraints.txt msgspec xxhash psutil pydantic cryptography
    exit
fi
device=${1:-cuda:0} collective=${2:-nccl} mebibytes=${3:-1024} python=${PYTHON:-python3}
if ! "$python" -c 'import msgspec, xxhash, psutil, pydantic, cryptography' 2>/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --target build/gpu-site "$wheels"/*.whl
    export PYTHONPATH="$PWD/build/gpu-site:${PYTHONPATH:-}"
fi
if ! "$python" -c 'import sys; from asyncflow.plugins import installed; sys.exit("ipc" not in installed("asyncflow.transports"))' 2>/dev/null; then
    "$python" -m pip install --quiet --no-deps --no-build-isolation -e .
fi
"$python" -c 'import torch; print(torch.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())'
status=0
"$python" benchmarks/weights/on_device.py --device "$device" --collective "$collective" --mebibytes "$mebibytes" || status=1
"$python" benchmarks/weights/transports.py --kinds host host-tcp host-tls ipc pairs --mebibytes "$mebibytes" || status=1
exit $status
