# a run
sbatch --parsable '/runs/a b%/batch.sh'

# a burst request
sbatch --parsable --job-name=run-burst-1 --partition=preempt --nodes=2 --time=60 --no-requeue --no-kill --wait-all-nodes=1 '--output=/runs/a b%%/logs/burst-%j.log' --open-mode=append --account=physics --qos=cheap --ntasks-per-node=1 --cpus-per-task=32 --gpus-per-node=h100:8 '--constraint=ib&gold' --exclusive '/runs/a b%/burst.sbatch' '/runs/a b%'

# a plain burst request
sbatch --parsable --job-name=run-burst-2 --partition=preempt --nodes=1 --time=5 --no-requeue --no-kill --wait-all-nodes=1 '--output=/runs/a b%%/logs/burst-%j.log' --open-mode=append --ntasks-per-node=1 '/runs/a b%/burst.sbatch' '/runs/a b%'

# a step of one agent
env SLURM_JOB_ID=12 srun --jobid=12 --job-name=liver-a0 --nodelist=n1 --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --cpu-bind=none --input=none --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered --verbose --immediate=5 --mpi=none

# a component's step, with accelerators
env SLURM_JOB_ID=12 srun --jobid=12 --het-group=1 --job-name=liver-a1 --nodelist=n2,n3 --nodes=2 --ntasks=2 --ntasks-per-node=1 --overlap --cpu-bind=none --input=none --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered --verbose --immediate=5 --mpi=none --gpus-per-node=h100:4

# a step beside that, which uses none
env SLURM_JOB_ID=12 srun --jobid=12 --het-group=1 --job-name=liver-a1-kill --nodelist=n2 --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --cpu-bind=none --input=none --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered --verbose --immediate=5 --mpi=none --gres=none

# the end of a job
scancel 12

# a step's signal
scancel --signal=KILL 12.3

# the end of all jobs of a name
scancel --user=1000 --name=run-burst-1

# a requeue
scontrol requeue 12

# the end of all requeues
scontrol update JobId=12,13 Requeue=0

# some jobs
squeue --local --all --noheader --jobs=12,15 '--format=%A|%i|%T|%r|%e|%N|%j'

# jobs of a name
squeue --local --all --noheader --user=1000 --name=run-burst-1 '--format=%A|%i|%T|%r|%e|%N|%j'

# a job's steps
squeue --local --all --noheader --steps --jobs=12,13 '--format=%i|%j'
scontrol --local --all --oneliner show step 12
scontrol --local --all --oneliner show step 13

# states of nodes
sinfo --local --all --noheader --Node --nodes=n1,n2 '--Format=NodeList:|,StateComplete:|'

# names of nodes
scontrol show hostnames 'n[1-3]'

# partitions
scontrol --all --oneliner show partition

# the configuration
scontrol show config
