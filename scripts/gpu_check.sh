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
# is said there, and makes the exit code 1. PARTS="doctor verify" runs these alone. Others run only if they are named
# there: third, more and first (the ranks of one_gpu_third.yaml, one_gpu_more.yaml and one_gpu.yaml, each predicted before
# in results/gpu), experts (verify of models with experts), copies (to and from the host), unaligned (matmuls), host
# (small steps by operator, a large one by layer) and rates (kernels by shape). DEVICE=cpu SCENARIO=my.yaml
# MODELS=bert-tiny tries the script without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

device=${DEVICE:-cuda}
scenario=${SCENARIO:-gpu_check}
models=${MODELS:-bert-tiny,causal-transformer-tiny-gqa,tnl-tiny,st-dit-tiny}
parts=${PARTS:-doctor verify memory ranks kernels calibrate}
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
    [[ " $parts " == *" $part "* ]] || return 0
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

# collected PART: the verdicts of all models, also of those that ran out of time
collected() {
    compgen -G "$out/verify-*.csv" >/dev/null || return 0
    awk 'FNR > 1 || NR == 1' "$out"/verify-*.csv >"$out/$1.txt"
    rm "$out"/verify-*.csv
}

# the scenario of one of these parts
played() {
    [ "$1" = first ] && echo one_gpu || echo "one_gpu_$1"
}
export device models out

part doctor 30 python -m spbench doctor
part verify 200 bash -c verify &
part memory 200 python -m spbench run --scenario "$scenario" "${cluster[@]}" --device "$device" \
    --output "$out/memory" --timeout 60 --format csv
wait
collected verify
if [ "$gpus" -gt 1 ]; then
    part ranks 80 python -m spbench run --scenario "$scenario" --engine distributed --device "$device" \
        --world-size "$gpus" --output "$out/ranks" --timeout 60 --format csv
fi
if [ "$device" = cuda ]; then
    part kernels 150 python scripts/check_kernels_on_gpu.py --output "$out"
fi
for scenario in third more first; do
    part $scenario 330 python -m spbench run --scenario "$(played $scenario)" "${cluster[@]}" --engine emulated \
        --device "$device" --output "$out/$scenario" --timeout 60 --format csv
done
part copies 75 python scripts/host_copies.py "$out" --device "$device"
part unaligned 60 python scripts/kernel_rates.py "$out" --kind "unaligned matmul"
part host 90 python scripts/host_time.py "$out" --device "$device"
part experts 150 bash -c 'models=moe-tiny,mla-tiny,causal-transformer-tiny-gqa && verify'
collected experts
part rates 100 python scripts/kernel_rates.py "$out"
part calibrate 80 python -m spbench calibrate --engine emulated --device "$device" --output "$out/machine.yaml"
python scripts/gpu_summary.py "$out"
