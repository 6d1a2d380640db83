"""The Horovod API has the names of `horovod.torch` 0.28.1, with their parameters, under each of its
spellings.
"""

import inspect
import subprocess
import sys

import pytest
import torch

import compat.horovod as hvd
from tests.harness.launching import ROOT, inherit_environment

FACTORS = "prescale_factor postscale_factor"
PARAMETERS = {
    f"tensor average name compression op {FACTORS} process_set": "allreduce",
    f"tensor average name op {FACTORS} process_set": "allreduce_ allreduce_async allreduce_async_",
    f"tensors average name compression op {FACTORS} process_set": "grouped_allreduce",
    f"tensors average name op {FACTORS} process_set": (
        "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_"
    ),
    "tensor name process_set": "allgather allgather_async",
    "tensors name process_set": "grouped_allgather grouped_allgather_async",
    "tensor root_rank name process_set": "broadcast broadcast_ broadcast_async broadcast_async_",
    "tensor splits name process_set": "alltoall alltoall_async",
    f"tensor name compression op process_set {FACTORS}": "reducescatter",
    f"tensor name op process_set {FACTORS}": "reducescatter_async",
    f"tensors name compression op process_set {FACTORS}": "grouped_reducescatter",
    f"tensors name op process_set {FACTORS}": "grouped_reducescatter_async",
    "tensor name op process_set": "sparse_allreduce_async",
    "": (
        "shutdown is_initialized stop_timeline size local_size cross_size rank local_rank "
        "cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built "
        "nccl_built ddl_built ccl_built cuda_built rocm_built"
    ),
    "handle": "poll synchronize",
    "device": "join",
    "process_set": "barrier add_process_set remove_process_set",
    "comm process_sets": "init",
    "file_path mark_cycles": "start_timeline",
    "ranks_or_comm": "ProcessSet",
    "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor "
    "num_groups groups "
    "sparse_as_dense process_set": "DistributedOptimizer",
    "params root_rank": "broadcast_parameters",
    "optimizer root_rank model": "broadcast_optimizer_state",
    "obj root_rank name process_set": "broadcast_object",
    "obj name process_set": "allgather_object",
    "num_features eps momentum affine track_running_stats": "SyncBatchNorm",
}


def test_functions_have_their_parameters() -> None:
    for parameters, names in PARAMETERS.items():
        for name in names.split():
            found = list(inspect.signature(getattr(hvd, name)).parameters)
            if name == "SyncBatchNorm":  # torch's own come behind
                found = found[:5]
            assert found == parameters.split(), name
            assert name in hvd.__all__
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]


def test_nothing_but_questions_about_the_build_works_before_init() -> None:
    assert hvd.gloo_built() and not hvd.mpi_built()
    assert bool(hvd.nccl_built()) == torch.distributed.is_nccl_available()
    with pytest.raises(ValueError, match="no MPI"):
        hvd.mpi_threads_supported()
    hvd.shutdown()  # does nothing
    for call in (
        hvd.size,
        hvd.rank,
        hvd.local_rank,
        hvd.join,
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(2)),
    ):
        with pytest.raises(ValueError, match=r"call hvd\.init"):
            call()


SPELLINGS = """
import compat.horovod, horovod
import horovod.torch as second, perseus.torch.horovod as third
assert second is third is compat.horovod
from perseus.torch.horovod.mpi_ops import allreduce_async_ as one
from horovod.torch.mpi_ops import allreduce_async_ as two
from horovod.torch.compression import Compression
import horovod.torch.functions, perseus.torch.horovod.elastic
assert one is two and Compression is second.Compression
assert horovod.torch.functions is compat.horovod.functions
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet
assert HorovodInternalError is second.HorovodInternalError and ProcessSet is second.ProcessSet
try:
    horovod.run
except AttributeError as error:
    assert "torchrun or mpirun" in str(error)
"""


def test_every_spelling_is_the_same_module() -> None:
    environment = inherit_environment() | {"PYTHONPATH": str(ROOT / "compat/aliases")}
    done = subprocess.run(
        [sys.executable, "-c", SPELLINGS], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
