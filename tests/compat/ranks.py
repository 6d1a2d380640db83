"""Ranks for tests of the Horovod API: forks of a warm process, with the variables that a launcher sets."""

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from tests.harness.launching import free_port
from tests.harness.waiting import Limit, end_with_stacks

IMPORTED_ONCE = ["compat.horovod", "common.launching.launch"]


def run_ranks(
    size: int,
    case: Callable[..., Any],
    *arguments: Any,
    env: Mapping[str, object] | None = None,
    seconds: float = 90,
    dying: int | None = None,
) -> list[Any]:
    """What `case(*arguments)`, a function at the top of a test module, returned on each of `size` ranks; each exits with 0.

    Rank `dying` ends otherwise, without an answer: None stands for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        context.Process(
            target=_be_rank, args=(there, {"RANK": rank, "LOCAL_RANK": rank, **world, **(env or {})}, case, arguments)
        )
        for rank, (_, there) in enumerate(pipes)
    ]
    for rank, (_, there) in zip(ranks, pipes, strict=True):
        rank.start()
        there.close()  # a rank that dies ends its pipe
    limit, answers = Limit(seconds), {}
    while len(answers) < size or any(rank.exitcode is None for rank in ranks):
        if limit.left() <= 0:
            end_with_stacks(psutil.Process(rank.pid) for rank in ranks if rank.exitcode is None)
            raise AssertionError(f"{case.__name__}: no end within {limit}; answers {answers}")
        open_ones = {here: rank for rank, (here, _) in enumerate(pipes) if rank not in answers}
        for here in wait([*open_ones, *(rank.sentinel for rank in ranks if rank.exitcode is None)], 1.0):
            if here in open_ones:
                try:
                    answers[open_ones[here]] = here.recv()
                except EOFError:
                    answers[open_ones[here]] = ("", None)
    if failures := [f"rank {rank}: {text}" for rank, (text, _) in sorted(answers.items()) if text]:
        raise AssertionError("\n".join(failures))
    assert [rank.exitcode for number, rank in enumerate(ranks) if number != dying] == [0] * (size - (dying is not None))
    return [answers[rank][1] for rank in range(size)]


def _be_rank(
    connection: Connection, variables: Mapping[str, object], case: Callable[..., Any], arguments: tuple
) -> None:
    import atexit

    import torch

    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    torch.set_num_threads(1)
    faulthandler.enable()  # for `end_with_stacks`
    try:
        answer = ("", case(*arguments))
    except BaseException:
        answer = (traceback.format_exc(), None)
    connection.send(answer)
    atexit._run_exitfuncs()  # which a fork of multiprocessing ends without
