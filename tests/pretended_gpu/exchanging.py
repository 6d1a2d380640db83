r"""Makes every call that torch makes of NCCL on three ranks, and checks the results. For test_runtime.py.

    accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 3 \
        tests/pretended_gpu/run.py tests/pretended_gpu/exchanging.py COUNT

COUNT is how many numbers one exchange has. At the end rank 2 is killed.
"""

import os
import signal
import sys
import warnings

import psutil
import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", ".* is deprecated", FutureWarning)  # older torch lacks the new names
count = int(sys.argv[1])
rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
size = dist.get_world_size()


def numbers(of: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The numbers of a rank: small integers, exact in every type."""
    return (torch.arange(count, device=device) % 5 + of + 1).to(dtype)


def expect(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert torch.equal(got, wanted), f"rank {rank}: {what} gave {got} instead of {wanted}"


everyone = [numbers(of) for of in range(size)]
summed = sum(everyone)
reductions = {
    dist.ReduceOp.SUM: summed,
    dist.ReduceOp.PRODUCT: everyone[0] * everyone[1] * everyone[2],
    dist.ReduceOp.MAX: everyone[2],
    dist.ReduceOp.MIN: everyone[0],
    dist.ReduceOp.AVG: summed / size,
}
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
    for operation, wanted in reductions.items():
        dist.all_reduce(mine := numbers(rank, dtype), operation)
        if operation == dist.ReduceOp.AVG and dtype.is_floating_point:
            wanted = sum((each * torch.tensor(1 / size, dtype=dtype)).to(dtype).double() for each in everyone)
            assert (mine.double() - wanted).abs().max() <= 8 * torch.finfo(dtype).eps, f"{dtype}: {mine} {wanted}"
        else:
            expect(mine, wanted.to(dtype), f"{operation} in {dtype}")
dist.all_reduce(mine := numbers(rank), dist._make_nccl_premul_sum(0.25))
expect(mine, summed / 4, "a sum that was multiplied before")
dist.all_reduce(mine := torch.full((4,), 60000.0, dtype=torch.float16, device=device))
assert mine.isinf().all(), "a sum in half precision overflows"
dist.all_reduce(mine := torch.full((4,), 60000.0, dtype=torch.float16, device=device), dist.ReduceOp.AVG)
assert mine.isfinite().all(), "and an average does not"
dist.all_reduce(mine := torch.tensor([1.0, float("nan")], device=device)[[0, int(rank == 1)]], dist.ReduceOp.MAX)
assert mine[1].isnan(), "a maximum with NaN"

mine = numbers(rank)
dist.broadcast(mine, src=1)
expect(mine, everyone[1], "broadcast")
dist.reduce(mine := numbers(rank), dst=2)
if rank == 2:
    expect(mine, summed, "reduce")
got = [torch.empty_like(summed) for _ in range(size)]
dist.all_gather(got, numbers(rank))
expect(torch.cat(got), torch.cat(everyone), "all_gather")
dist.all_gather_into_tensor(got := torch.empty(size * count, dtype=torch.float64, device=device), numbers(rank))
expect(got, torch.cat(everyone), "all_gather_into_tensor")
parts = [numbers(rank) + part for part in range(size)]
dist.reduce_scatter_tensor(got := torch.empty_like(summed), torch.cat(parts))
expect(got, summed + size * rank, "reduce_scatter_tensor")
dist.all_to_all_single(got := torch.empty(size * count, dtype=torch.float64, device=device), torch.cat(parts))
expect(got, torch.cat([each + rank for each in everyone]), "all_to_all_single")
gathered = [torch.empty_like(summed) for _ in range(size)] if rank == 1 else None
dist.gather(numbers(rank), gathered, dst=1)
if rank == 1:
    expect(torch.cat(gathered), torch.cat(everyone), "gather")
dist.scatter(got := torch.empty_like(summed), parts if rank == 0 else None, src=0)
expect(got, everyone[0] + rank, "scatter")
following, before = (rank + 1) % size, (rank - 1) % size
messages = [dist.P2POp(dist.isend, numbers(rank), following), dist.P2POp(dist.irecv, got, before)]
for message in dist.batch_isend_irecv(messages):
    message.wait()
expect(got, everyone[before], "sends around a ring")

pair = dist.split_group(split_ranks=[[0, 2], [1]])  # NCCL's own split
dist.all_reduce(mine := numbers(rank), group=pair)
expect(mine, everyone[1] if rank == 1 else everyone[0] + everyone[2], "a group that was split off")
last = dist.new_group([1, 2])
if rank:
    dist.all_reduce(mine := numbers(rank), group=last)
    expect(mine, everyone[1] + everyone[2], "a group of its own")
    dist.destroy_process_group(last)
with dist._coalescing_manager(device=device):
    several = [numbers(rank), numbers(rank) + 1]
    for each in several:
        dist.all_reduce(each)
expect(several[0], summed, "several at once")
expect(several[1], summed + size, "the second of several")

# A collective runs in the background, and waiting for its stream waits for it.
dist.all_gather_object(processes := [None] * size, os.getpid())


def until_stopped() -> None:
    while psutil.Process(processes[2]).status() != psutil.STATUS_STOPPED:
        pass


if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 has checked
work = dist.all_reduce(mine := numbers(rank), async_op=True)
if rank == 0:
    until_stopped()
    assert not work.is_completed(), "a collective that lacks a rank is not done"
    os.kill(processes[2], signal.SIGCONT)
work.wait()
expect(mine, summed, "an asynchronous collective")

# The others are not told of a rank that hangs or dies, but they can abort.
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
work = dist.all_reduce(mine, async_op=True)
until_stopped()
assert not work.is_completed()
dist.distributed_c10d._abort_process_group()
if rank == 0:
    print("all is exchanged", flush=True)
    os.kill(processes[2], signal.SIGKILL)
