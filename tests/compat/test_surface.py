"""The Horovod API has the 72 public names of `horovod.torch` 0.28.1, with their parameters, under each of its spellings."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compat.horovod as hvd
from tests.harness.launching import ROOT, free_port, inherited

ALIASES = ROOT / "compat" / "aliases"
_REDUCED = "average name op prescale_factor postscale_factor process_set"
_COMPRESSED = "average name compression op prescale_factor postscale_factor process_set"
_SCATTERED = "name op process_set prescale_factor postscale_factor"
PARAMETERS = {
    "allreduce": f"tensor {_COMPRESSED}",
    "allreduce_": f"tensor {_REDUCED}",
    "allreduce_async": f"tensor {_REDUCED}",
    "allreduce_async_": f"tensor {_REDUCED}",
    "grouped_allreduce": f"tensors {_COMPRESSED}",
    "grouped_allreduce_": f"tensors {_REDUCED}",
    "grouped_allreduce_async": f"tensors {_REDUCED}",
    "grouped_allreduce_async_": f"tensors {_REDUCED}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": f"tensor {_SCATTERED}",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": f"tensors {_SCATTERED}",
    "join": "device",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "init": "comm process_sets",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline": "file_path mark_cycles",
    "stop_timeline": "",
    "size": "",
    "local_size": "",
    "cross_size": "",
    "rank": "",
    "local_rank": "",
    "cross_rank": "",
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor "
    "num_groups groups sparse_as_dense process_set",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
}
VALUES = [
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "global_process_set",
    "Compression",
    "HorovodInternalError",
]
MODULES = ["compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"]


def test_there_are_72_names() -> None:
    assert len({*PARAMETERS, *VALUES, *MODULES}) == 72
    assert {*PARAMETERS, *VALUES, *MODULES} <= {*hvd.__all__}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_function_has_its_parameters(name: str) -> None:
    assert [*inspect.signature(getattr(hvd, name)).parameters] == PARAMETERS[name].split()


def test_values_and_modules_are_there() -> None:
    assert [getattr(hvd, name) for name in VALUES[:6]] == [0, 1, 2, 3, 4, 5]
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert isinstance(hvd.global_process_set, hvd.ProcessSet)
    for name in MODULES:
        assert inspect.ismodule(getattr(hvd, name))
    assert {hvd.elastic.run, hvd.elastic.TorchState, hvd.elastic.ElasticSampler}
    assert hvd.mpi_ops.allreduce is hvd.allreduce


def test_compressors() -> None:
    tensor, whole = torch.rand(3), torch.arange(3)
    assert hvd.Compression.none.compress(tensor)[0] is tensor
    small, context = hvd.Compression.fp16.compress(tensor)
    assert small.dtype == torch.float16
    assert torch.equal(hvd.Compression.fp16.decompress(small, context), tensor.half().float())
    small, context = hvd.Compression.fp16.compress(whole)
    assert hvd.Compression.fp16.decompress(small, context) is small is whole


def test_questions_are_answered_truthfully() -> None:
    assert not any((hvd.mpi_enabled(), hvd.mpi_built(), hvd.ddl_built(), hvd.ccl_built()))
    assert hvd.gloo_built() is hvd.gloo_enabled() is torch.distributed.is_gloo_available() is True
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert bool(hvd.nccl_built()) == torch.distributed.is_nccl_available()
    with pytest.raises(ValueError, match="no MPI"):
        hvd.mpi_threads_supported()


def test_nothing_works_before_init() -> None:
    assert not hvd.is_initialized()
    assert not torch.distributed.is_initialized()
    hvd.shutdown()  # does nothing
    for call in (hvd.size, hvd.rank, hvd.local_rank, hvd.join, hvd.barrier, hvd.stop_timeline):
        with pytest.raises(ValueError, match=r"call hvd\.init"):
            call()
    with pytest.raises(ValueError, match=r"call hvd\.init"):
        hvd.allreduce(torch.ones(2))


def test_what_is_not_there_is_answered_by_name() -> None:
    with pytest.raises(AttributeError, match=r"scripts are started by accelerate launch, torchrun or mpirun"):
        hvd.run  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute nothing"):
        hvd.nothing  # noqa: B018


PERSEUS = """
import horovod, perseus, torch
import perseus.torch.distributed as dist
import perseus.torch.nn as nn
from perseus.torch.nn.parallel import DistributedDataParallel
assert nn is torch.nn and DistributedDataParallel is torch.nn.parallel.DistributedDataParallel
dist.init_process_group("perseus", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert (dist.get_rank(), dist.get_local_rank(), dist.algorithms) == (0, 3, torch.distributed.algorithms)
dist.destroy_process_group()
for module, name in ((horovod, "run"), (perseus, "use_perseus")):
    try:
        getattr(module, name)
    except AttributeError as error:
        print(error)
"""


def test_the_other_interface_of_perseus() -> None:
    variables = {"PERSEUS_ALLREDUCE_DTYPE": "1", "PERSEUS_ALLREDUCE_STREAMS": "6", "LOCAL_RANK": "3"}
    done = run_python(PERSEUS.format(port=free_port()), str(ALIASES), **variables)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "PERSEUS" in line]
    assert line.startswith("PERSEUS_ALLREDUCE_DTYPE, PERSEUS_ALLREDUCE_STREAMS: no effect here")
    started, needless = done.stdout.splitlines()
    assert "torchrun or mpirun" in started and "perseus.use_perseus is not needed" in needless


SPELLINGS = """
import sys
import compat.horovod
{imports}
assert hvd is compat.horovod, hvd
from {name} import allreduce, elastic
from {name}.mpi_ops import allreduce_async_
from {name}.compression import Compression
import {name}.functions
assert allreduce is hvd.allreduce and allreduce_async_ is hvd.allreduce_async_ and Compression is hvd.Compression
assert {name}.functions is compat.horovod.functions and elastic is compat.horovod.elastic
"""


def run_python(program: str, path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = inherited() | {"PYTHONPATH": path} | variables
    return subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_every_spelling_is_the_same_module(tmp_path: Path) -> None:
    """Also with an installed package of the same name: then a line says which one is used."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    names = ["compat.horovod.torch", "horovod.torch", "perseus.torch.horovod"]
    texts = [SPELLINGS.format(imports=f"import {name} as hvd", name=name) for name in names]
    texts.append(
        "from horovod.common.exceptions import HorovodInternalError as E; assert E is hvd.HorovodInternalError"
    )
    program = "\n".join(texts)
    done = run_python(program, f"{ALIASES}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith(f"horovod is installed in {tmp_path}/horovod/__init__.py, but {ALIASES} comes before it")
