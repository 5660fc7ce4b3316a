#!/usr/bin/env bash
# What this project claims, checked on the GPUs of this machine, in at most eight minutes and without a network:
#
#     scripts/gpu_check.sh [FOLDER]
#
# 1 doctor: what is here. 2 verify: every gradient of every strategy, fp32 and bf16, against one device in float64; ranks
# share GPUs where there are fewer. 3 memory, beside it, as neither is timed: one rank of N played by this GPU
# (scenarios/gpu_check.yaml) beside the virtual rank. 4 ranks: NCCL, where there are two GPUs or more. 5 kernels: the
# Triton kernels, right and how far from the roofline. 6 calibrate: this machine's rates.
#
# Writes results/gpu/DATE-GPU (or FOLDER), to be committed, with a summary.md; a part that fails or runs out of its time
# is said there, and makes the exit code 1. PARTS="doctor verify" runs these alone. DEVICE=cpu SCENARIO=my.yaml
# MODELS=bert-tiny tries the script without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

device=${DEVICE:-cuda}
scenario=${SCENARIO:-gpu_check}
models=${MODELS:-bert-tiny,causal-transformer-tiny-gqa,tnl-tiny,st-dit-tiny}
gpus=$(python -c 'import torch; print(torch.cuda.device_count())') || exit 2
if [ "$device" = cuda ] && [ "$gpus" -eq 0 ]; then
    echo "gpu_check: torch sees no GPU here; spbench doctor says why" >&2
    exit 2
fi
name=$(python -c "import torch; print(torch.cuda.get_device_name() if '$device' == 'cuda' else 'cpu')")
name=$(echo "$name" | tr 'A-Z' 'a-z' | tr -cs 'a-z0-9' '-' | sed 's/^-//; s/-$//')
# libraries allocate by the card, so the ranks are played for it where its file is here
case $name in
*h200*) cluster=(--cluster h200-sxm) ;;
*h100*80gb-hbm3*) cluster=(--cluster h100-sxm) ;;
*a100-sxm4-80gb*) cluster=(--cluster a100-sxm-80gb) ;;
*b200*) cluster=(--cluster b200-sxm) ;;
*) cluster=() ;;
esac
out=${1:-results/gpu/$(date +%F)-$name}
mkdir -p "$out"
: >"$out/parts.csv"

# part NAME SECONDS COMMAND...: what it prints goes to NAME.txt and NAME.log, its end to parts.csv
part() {
    local part=$1 limit=$2 begin code
    shift 2
    [[ " ${PARTS:-$part} " == *" $part "* ]] || return 0
    begin=$(date +%s)
    echo "== $part: $*" >&2
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$part.txt" 2>"$out/$part.log"
    code=$?
    tail -n 3 "$out/$part.log" >&2
    echo "$part,$code,$(($(date +%s) - begin)),$limit" >>"$out/parts.csv"
}

# verify by model, each in a process: most of a case is the host's
verify() {
    local model code=0 pids=()
    for model in ${models//,/ }; do
        python -m spbench verify --device "$device" --model "$model" --part model --dtype fp32,bf16 --world-size 2 \
            --output "$out/verified/$model" --format csv >"$out/verify-$model.csv" &
        pids+=($!)
    done
    for model in "${pids[@]}"; do
        wait "$model" || code=$?
    done
    return $code
}
export -f verify
export device models out

part doctor 30 python -m spbench doctor
part verify 200 bash -c verify &
part memory 200 python -m spbench run --scenario "$scenario" "${cluster[@]}" --device "$device" \
    --output "$out/memory" --timeout 60 --format csv
wait
if compgen -G "$out/verify-*.csv" >/dev/null; then
    awk 'FNR > 1 || NR == 1' "$out"/verify-*.csv >"$out/verify.txt"
    rm "$out"/verify-*.csv
fi
if [ "$gpus" -gt 1 ]; then
    part ranks 80 python -m spbench run --scenario "$scenario" --engine distributed --device "$device" \
        --world-size "$gpus" --output "$out/ranks" --timeout 60 --format csv
fi
if [ "$device" = cuda ]; then
    part kernels 150 python scripts/check_kernels_on_gpu.py --output "$out"
fi
part calibrate 80 python -m spbench calibrate --engine emulated --device "$device" --output "$out/machine.yaml"
python scripts/gpu_summary.py "$out"
