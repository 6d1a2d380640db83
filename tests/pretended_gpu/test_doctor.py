"""The doctor sees a GPU, and says why a launch on it would be refused."""

import os

from tests.tools.test_doctor import rows_of

NVIDIA_SMI = "#!/bin/sh\ncase $1 in --query-gpu=driver_version) echo 570.1 ;; *) exit 2 ;; esac\n"


def test_a_gpu_and_its_driver_are_shown_and_too_few_are_refused(gpus, tmp_path) -> None:
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
    assert [check for check, row in rows.items() if row["status"] != "ok"] == ["launch"]
    assert rows["launch"]["way_out"].startswith("2 processes on a machine with 1 GPU")
    assert rows["gpu"]["measured"] == "Pretended GPU, 16.0 of 16.0 GiB free"
    assert "driver 570.1" in rows["versions"]["measured"] and "NCCL 2." in rows["versions"]["measured"]
