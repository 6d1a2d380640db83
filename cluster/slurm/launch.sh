#!/bin/bash
# Trains with one `accelerate launch` per machine, which starts a process per GPU and replaces those that die:
#
#   sbatch cluster/slurm/launch.sh --config_file accelerate_configs/2node_bf16.yaml recipes/cls.py --data /shared/photos
#   sbatch --nodes=4 cluster/slurm/launch.sh --config_file accelerate_configs/2node.yaml --num_machines 4 --num_processes 32 recipes/cls.py --data FOLDER
#
# A job that is requeued resumes from its last checkpoint, since it runs the same command again.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1       # the launcher
#SBATCH --cpus-per-task=64
#SBATCH --mem=0                   # all of a machine; a share, such as --mem=200G, if jobs share machines
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180         # 3 minutes before that, all processes are asked to stop: they save, and end with code 75
#SBATCH --requeue                 # after a pre-emption or the loss of a machine
#SBATCH --open-mode=append        # the next start continues the output file

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # becomes the first machine
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))         # of this job alone, if jobs share a machine
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK                           # srun does not take it over from sbatch everywhere

# --kill-on-bad-exit=0: the first launcher to end with code 75 must not end a process that still writes the checkpoint.
srun --kill-on-bad-exit=0 accelerate launch "$@"
code=$?
if ((code == 75)); then
    scontrol requeue "$SLURM_JOB_ID" # stopped before its end, with a checkpoint
fi
exit "$code"
