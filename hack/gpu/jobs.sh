#!/bin/bash
# Run whole jobs on a machine with one NVIDIA GPU, which their roles share; output goes to FOLDER. `modes` runs only if it
# is named.
#     bash hack/gpu/jobs.sh FOLDER [judged] [algorithms] [bits] [vllm] [modes]
#     DEVICE='{profile: cpu}' bash hack/gpu/jobs.sh FOLDER        # the same on a CPU
# judged:     a classifier scores on the GPU, in its sandbox.
# algorithms: PPO with its critic, once more with deterministic kernels, and DPO with its reference: in bfloat16, with
#             pack sizes that are tried on the GPU.
# bits:       deterministic runs with one and three rollouts must export the same weights.
# vllm:       the quickstart with vLLM.
# modes:      the cost of a slow link with vLLM (benchmarks/update_modes.py, as root).
# The exit status is 1 if a job fails or misses its limit; the other jobs still run.
set -u
cd "$(dirname "$0")/../.."
folder=${1:?folder}
shift
python=${PYTHON:-python3} device=${DEVICE:-{profile: nvidia, count: 1, share: .2\}} status=0
mkdir -p "$folder"
vllm() { echo "{name: vllm, slots: $1, dtype: bfloat16, options: {args: {kv_cache_memory_bytes: 1073741824$2}}}"; }
run() {
    name=$1
    shift
    timeout 300 "$python" -m asyncflow run "$@" --set trainer.accelerator="$device" --output "$folder/$name" --fresh && return
    tail -n 30 "$folder/$name"/logs/*.log
    status=1
}
classifier() {
    "$python" - "$1" <<'END'
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from asyncflow.models.tiny import write_config

folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
write_config(folder)
torch.manual_seed(0)
AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder, num_labels=1)).save_pretrained(folder)
END
}
[ $# -gt 0 ] || set -- judged algorithms bits vllm
for job in "$@"; do
    echo "== $job"
    case $job in
    judged)
        judge=$(realpath "$folder")/judge
        classifier "$judge"
        run judged examples/quickstart.yaml --set algorithm.steps=5 --set reward="{function: reward_model, config: {model: $judge},
            files: [$judge], min: -1000, memory: 16Gi, workers: {max: 1}, role: {accelerator: $device}}"
        ;;
    algorithms)
        for name in ppo dpo; do
            run $name examples/$name.yaml --set algorithm.steps=5 --set trainer.backend.precision=bf16
        done
        run ppo-deterministic examples/ppo.yaml --set algorithm.steps=5 --set trainer.backend.precision=bf16 \
            --set schedule.deterministic=true
        ;;
    bits)
        for rollouts in 1 3; do
            run bits-$rollouts examples/quickstart.yaml --set algorithm.steps=5 --set trainer.backend.precision=bf16 \
                --set schedule.deterministic=true --set rollout.replicas=$rollouts
        done
        sha256sum "$folder"/bits-*/export/model.safetensors
        cmp "$folder"/bits-{1,3}/export/model.safetensors || status=1
        ;;
    vllm)
        run vllm examples/quickstart-vllm.yaml --set rollout.accelerator="$device" --set rollout.engine="$(vllm 64 "")"
        grep -h "paused in\|staged" "$folder"/vllm/logs/rollout-*.log | tail -n 4
        ;;
    modes)
        for mode in delayed staggered; do
            "$python" benchmarks/update_modes.py --engine vllm --modes $mode --output "$folder/modes-$mode" \
                --set "trainer.accelerator=$device" "rollout.accelerator=$device" \
                "rollout.engine=$(vllm 6 ", enforce_eager: true")" >"$folder/$mode.log" 2>&1 &
        done
        wait -n || status=1
        wait -n || status=1
        cat "$folder"/delayed.log "$folder"/staggered.log
        ;;
    *)
        echo "there is no job $job: give judged, algorithms, bits, vllm or modes" >&2
        status=1
        ;;
    esac
done
exit $status
