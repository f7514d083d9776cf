#!/bin/bash

#SBATCH --output=/shared/runs/big-20260102-030405/submitit/%j_0_log.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --job-name=big-20260102-030405
#SBATCH --comment="liver run /shared/runs/big-20260102-030405"
#SBATCH --time=240
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --wait-all-nodes=1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

export SUBMITIT_EXECUTOR=slurm

exec python3 -P -u -m submitit.core._submit /shared/runs/big-20260102-030405/submitit
