"""Trains a recipe as a job of submitit, on SLURM or, with --cluster local, in processes of this machine.

    python cluster/slurm/submitit_cls.py --nodes 2 --gpus_per_node 8 recipes/cls.py --data /shared/photos

A job that is pre-empted or near its time limit saves a checkpoint, is submitted again, and resumes. It needs submitit.
"""

import argparse
import os
import runpy
import signal
import sys

os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # which a recipe handles; submitit's own default is USR2

import submitit
from submitit.helpers import DelayedSubmission, TorchDistributedEnvironment

from common.launching.exit_codes import RESUMABLE


class Training:
    """A recipe with its command line: `Training(["recipes/cls.py", "--epochs", "20"])`. Each process of the job calls it."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __call__(self) -> None:
        # RANK and so on. Each process sees all GPUs of its machine, as the recipe expects.
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        sys.argv = self.words
        try:
            runpy.run_path(self.words[0], run_name="__main__")
        except SystemExit as end:
            if end.code == RESUMABLE:  # asked to stop by USR1, and saved
                signal.raise_signal(signal.SIGUSR1)  # now to submitit, whose first process submits the job again
            raise

    def checkpoint(self) -> DelayedSubmission:
        """What to submit again: the same command, which resumes from the last checkpoint."""
        return DelayedSubmission(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--folder", default="runs/submitit", help="output of the jobs; all machines must see it")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus_per_node", type=int, default=8)
    parser.add_argument("--tasks_per_node", type=int, help="default: one per GPU")
    parser.add_argument("--cpus_per_task", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=24 * 60, help="time limit of one start")
    parser.add_argument("--partition")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="recipes/cls.py ...")
    given = parser.parse_args()
    # By default submitit gives up at the fourth time limit.
    executor = submitit.AutoExecutor(
        given.folder, given.cluster, slurm_max_num_timeout=1000, local_max_num_timeout=1000
    )
    executor.update_parameters(
        name="training",
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        tasks_per_node=given.tasks_per_node or given.gpus_per_node,
        cpus_per_task=given.cpus_per_task,
        timeout_min=given.minutes,
        slurm_signal_delay_s=180,  # the processes are asked to stop 3 minutes before the time limit
        **{"slurm_partition": given.partition} if given.partition else {},
    )
    job = executor.submit(Training(given.words))
    print(f"job {job.job_id}: {job.paths.stdout}", flush=True)
    if given.cluster == "local":
        job.results()  # waits


if __name__ == "__main__":
    main()
