#!/usr/bin/env bash
# Two nodes of eight GPUs: sbatch examples/slurm.sh. --out must be on a disk that both nodes see.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@900
# Was the job ended? Submit it again with --resume as its argument: it goes on from the newest checkpoint.
# Before the first, on each node: python -m tools.gpu_smoke. This file has not been run on a cluster yet.
# --signal: Slurm tells the run a quarter of an hour before the end of --time. Else it kills after 30 seconds, and all
# steps since the last checkpoint are lost. --shutdown-timeout: torchrun, too, would wait for 30 seconds alone.
# --kill-on-bad-exit: when one node's ranks fail, the other's end.
# If the ranks do not meet, name the network card: export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=... before srun.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" \
    --shutdown-timeout 600 --numa-binding node \
    ttrl.py --model Qwen/Qwen2.5-Math-7B --dataset aime24 --out runs/ttrl-aime24 "$@"
