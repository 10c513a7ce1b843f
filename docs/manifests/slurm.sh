#!/bin/bash
# One server over two hosts with eight GPUs each: sbatch slurm.sh
#SBATCH --job-name=jaxspec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@90
set -eu
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# One process ends: srun ends the others too.
exec srun --kill-on-bad-exit=1 bash -c 'exec jaxspec serve /models/v3-bf16 \
  --host 0.0.0.0 --api-key-file /etc/jaxspec/keys --tensor-parallel-size 16 --num-gpu-blocks-override 8192 \
  --nnodes "$SLURM_NTASKS" --node-rank "$SLURM_PROCID" --coordinator "$1:7000"' jaxspec "$first"
