#!/bin/bash

#SBATCH --output=/shared/runs/big-20260102-030405/submitit/%j_0_log.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@91
#SBATCH --job-name=big-20260102-030405
#SBATCH --comment="liver run /shared/runs/big-20260102-030405"
#SBATCH --time=240
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --wait-all-nodes=1
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --nodes=2
#SBATCH --partition=stable
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --constraint="ib&a100"
#SBATCH hetjob
#SBATCH --job-name=big-20260102-030405
#SBATCH --comment="liver run /shared/runs/big-20260102-030405"
#SBATCH --time=240
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --wait-all-nodes=1
#SBATCH --account=lab
#SBATCH --qos=low
#SBATCH --nodes=1
#SBATCH --partition=stable
#SBATCH --ntasks-per-node=1
#SBATCH --reservation="my own"

export SUBMITIT_EXECUTOR=slurm

module load cuda/12.4
export NCCL_DEBUG=INFO

exec apptainer exec --nv '/images/my image.sif' python3 -P -u -m submitit.core._submit /shared/runs/big-20260102-030405/submitit
