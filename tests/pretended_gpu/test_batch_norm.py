"""Batch norm computes on CUDA what it computes on the CPU, with few kernels and little memory."""

import json

TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}  # a rounding step of each type


def test_all_modes_equal_the_cpu_and_neither_kernels_nor_memory_grow(gpus) -> None:
    """Outputs, gradients and statistics on two GPUs with unequal micro-batches, for all types and memory formats.

    The number of kernels does not grow with the number of groups, and shared statistics make no float32 copies.
    """
    done = gpus.fork("tests/pretended_gpu/batch_norms.py", devices=2)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip())
    assert len(found["errors"]) == 3 * 4 * 4
    for case, error in found["errors"].items():
        assert error < TOLERANCES[case.split()[1]], f"{case}: {error}"
    launches, peaks = ({case: cost[key] for case, cost in found["costs"].items()} for key in ("launches", "peak"))
    for last in ("", " channels_last"):
        assert (
            launches[f"group 2{last}"] == launches[f"group 8{last}"] < 20
        )  # one group after the other: four per group
        assert launches[f"global 1{last}"] == launches[f"node 1{last}"] < 16  # 40 with plain operators
        assert peaks[f"global 1{last}"] <= 2.1  # output and gradient; 11.3 with plain operators
        assert peaks[f"group 8{last}"] <= 4.1
