#!/bin/bash

#SBATCH --output="/shared/it's 100%% \"mine\" $HOME # no/run-1/submitit/%j_0_log.out"
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --job-name=run-1
#SBATCH --comment="liver run /shared/it's 100% \"mine\" $HOME # no/run-1"
#SBATCH --time=240
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --wait-all-nodes=1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1

export SUBMITIT_EXECUTOR=slurm

exec python3 -P -u -m submitit.core._submit '/shared/it'"'"'s 100% "mine" $HOME # no/run-1/submitit'
