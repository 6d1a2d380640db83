"""Gloo processes that run functions of tests: they are started once, not for every case."""

import faulthandler
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.harness.waiting import Limit, end_with_stacks

PATIENCE = 120  # seconds until a case counts as hanging


class Processes:
    """Up to `max_ranks` worker processes, started once; each case gets a fresh process group of the size
    it asks for.
    """

    def __init__(self, max_ranks: int) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["common.distributed.collectives", "torch.distributed", "scipy.stats", "timm"]
        )
        pipes = [context.Pipe() for _ in range(max_ranks)]
        self.connections = [parent_end for parent_end, _ in pipes]
        self.workers = [
            context.Process(target=_serve, args=(worker_end,), daemon=True)
            for _, worker_end in pipes
        ]
        for worker in self.workers:
            worker.start()

    def run(self, case: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """What `case(*arguments)` returned on each of `ranks` ranks; it is a function at the top of
        a test module.
        """
        with tempfile.NamedTemporaryFile() as file:
            for rank, connection in enumerate(self.connections[:ranks]):
                connection.send((case, arguments, f"file://{file.name}.store", rank, ranks))
            answers = []
            for rank, connection in enumerate(self.connections[:ranks]):
                limit = Limit(PATIENCE)
                while not connection.poll(1.0):
                    if limit.left() <= 0:
                        end_with_stacks(psutil.Process(worker.pid) for worker in self.workers)
                        raise AssertionError(
                            f"{case.__name__}: rank {rank} gave no answer in {limit}"
                        )
                answers.append(connection.recv())
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            raise AssertionError("\n".join(failures))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for connection, worker in zip(self.connections, self.workers, strict=True):
            connection.close()  # which ends the worker
            worker.join()


def list_data_workers() -> list[multiprocessing.process.BaseProcess]:
    """The data workers of this process, whose children `Processes` are as well."""
    return [
        child for child in multiprocessing.active_children() if child.name.startswith("_Worker")
    ]


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()  # for `end_with_stacks`
    while True:
        try:
            case, arguments, store, rank, ranks = connection.recv()
        except EOFError:
            return
        dist.init_process_group(
            "gloo", store, timedelta(seconds=PATIENCE), rank=rank, world_size=ranks
        )
        try:
            answer = ("", case(*arguments))
        except BaseException:  # whatever it is, the test has to see it
            answer = (traceback.format_exc(), None)
        dist.destroy_process_group()
        connection.send(answer)
