#!/bin/bash
# Trains with one process per GPU, started by srun, on one or several machines:
#
#   sbatch cluster/slurm/train.sh recipes/cls.py --data /shared/photos
#   sbatch --nodes=1 --array=0-4 cluster/slurm/train.sh recipes/cls.py --data /shared/photos     one run per seed
#
# A job that is requeued resumes from its last checkpoint, since it runs the same command again.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8       # one per GPU; not --gpus-per-task, which hides a machine's other GPUs from a process
#SBATCH --cpus-per-task=8         # at least one more than --workers
#SBATCH --mem=0                   # all of a machine; a share, such as --mem=200G, if jobs share machines
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180         # 3 minutes before that, all processes are asked to stop: they save, and end with code 75
#SBATCH --requeue                 # after a pre-emption or the loss of a machine
#SBATCH --open-mode=append        # the next start continues the output file

export ACCELERATE_MIXED_PRECISION=no           # or bf16, fp16
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it over from sbatch everywhere

# --kill-on-bad-exit=0: the first process to end with code 75 must not end the one that still writes the checkpoint.
srun --kill-on-bad-exit=0 python "$@" ${SLURM_ARRAY_TASK_ID:+--seed "$SLURM_ARRAY_TASK_ID"}
code=$?
if ((code == 75)); then
    scontrol requeue "$SLURM_JOB_ID" # stopped before its end, with a checkpoint
fi
exit "$code"
