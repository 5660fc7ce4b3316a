export MODEL=${MODEL:-Qwen3-30B-A3B}
export MBS=1
export SEQ_LEN=4096
export MOE_GROUPED_GEMM=true
export PR=bf16
DISPATCHER=alltoall A2A_OVERLAP=0 TP=2 PP=2 VPP=2 EP=4 NNODES=1 GBS=16 bash ./sbatch_benchmarking.sh --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
