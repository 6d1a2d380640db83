#!/bin/bash
# Trains on the GPUs of one machine without srun, as a script does that also runs outside of SLURM:
#
#   sbatch cluster/slurm/one_machine.sh --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/cls.py
#
# A job that is requeued resumes from its last checkpoint, since it runs the same command again.
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180       # 3 minutes before that. B: to this script, since only srun's processes get it without
#SBATCH --requeue                 # after a pre-emption or the loss of the machine
#SBATCH --open-mode=append        # the next start continues the output file

accelerate launch "$@" & # in the background: bash runs a trap only when a command in the foreground has ended
launcher=$!
trap 'kill -USR1 "$launcher"' USR1 # the processes save, and the launcher ends with code 75
wait "$launcher"                   # until its end, or until a trap has run
wait "$launcher"                   # until its end
code=$?
if ((code == 75)); then
    scontrol requeue "$SLURM_JOB_ID" # stopped before its end, with a checkpoint
fi
exit "$code"
