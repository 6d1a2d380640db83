"""The doctor says what is wrong with a GPU; a stand-in for nvidia-smi reports it."""

import os

from tests.tools.test_doctor import rows_of

# A GPU that is too hot, has errors in its memory, and is used by somebody else.
NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=driver_version) echo 570.1 ;;
--query-gpu=index,*) echo '0, GPU-0, 690, 1980, 0x0000000000000028, 91, 300.10, 700.00, 3' ;;
--query-compute-apps=*) echo 'GPU-0, 999999999, /usr/bin/other, 9000' ;;
*) exit 2 ;;
esac
"""


def test_a_sick_gpu_is_named_with_each_of_its_troubles_and_too_few_are_refused(gpus, tmp_path) -> None:
    program, file = tmp_path / "nvidia-smi", tmp_path / "found.json"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    done = gpus.start(
        *("multi_gpu", "tools/doctor/__main__.py", "--only", "launch,gpu,versions", "--json", file),
        flags=["--num_processes", 2],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": "."},
    ).finish()
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    rows = {check: row for (check, place), row in rows_of(file).items() if place == "all"}
    assert {check: row["measured"] for check, row in rows.items() if row["status"] == "failed"} == {
        "launch": "refused",
        "gpu: ECC": "3 uncorrected errors",
    }
    assert rows["launch"]["way_out"].startswith("2 processes on a machine with 1 GPU")
    assert {check: row["measured"] for check, row in rows.items() if row["status"] == "warning"} == {
        "gpu: clocks": "690 of 1980 MHz under load, 91 C, 300.10 of 700.00 W",
        "gpu: memory": "process 999999999 (/usr/bin/other) holds 8.8 of 16.0 GiB",
    }
    assert rows["gpu: clocks"]["way_out"].startswith(
        "hardware slowdown (power or temperature), too hot (driver's limit)"
    )
    assert rows["gpu"]["measured"] == "Pretended GPU, 16.0 of 16.0 GiB free"
    assert "driver 570.1" in rows["versions"]["measured"] and "NCCL 2." in rows["versions"]["measured"]
