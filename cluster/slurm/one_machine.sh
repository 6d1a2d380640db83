#!/bin/bash
# Trains on the GPUs of one machine without srun, as a script does that also runs outside of SLURM:
#
#   sbatch cluster/slurm/one_machine.sh --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/cls.py --data FOLDER
#
# A job that is requeued resumes from its last checkpoint, since it runs the same command again.
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0                   # all of a machine; a share, such as --mem=200G, if jobs share machines
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180       # 3 minutes before that. B: to this script, since only srun's processes get it without
#SBATCH --requeue                 # after a pre-emption or the loss of the machine
#SBATCH --open-mode=append        # the next start continues the output file

accelerate launch "$@" & # in the background: bash runs a trap only when a command in the foreground has ended
launcher=$!
requeue=0
trap 'requeue=1; kill -USR1 "$launcher"' USR1 # the processes save, and the launcher ends with code 75
trap 'kill -TERM "$launcher"' TERM            # also; if it is a pre-emption, SLURM itself requeues the job
while kill -0 "$launcher" 2> /dev/null; do
    wait "$launcher" # until its end, or until a trap has run. The end of this script would kill the processes
done
wait "$launcher" # bash still knows its exit code
code=$?
if ((code == 75 && requeue)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
