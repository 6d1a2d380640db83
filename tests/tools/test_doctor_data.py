"""The doctor's rows about disks and data: each trouble is provoked, on this machine or on network namespaces."""

from pathlib import Path

import pytest

from tests.tools.test_doctor import exported, rows_of
from tools.doctor import data, rehearsal
from tools.doctor.world import World

PORT = 20600


def only(findings: list) -> tuple[str, str, str]:
    (finding,) = findings
    return finding.status, finding.measured, finding.way_out


def test_a_run_folder_is_measured_and_left_as_it_was(tmp_path) -> None:
    status, measured, _ = only(data.run_folder(World(), tmp_path / "new" / "runs"))
    assert status == "ok" and "MB/s written" in measured and "ms per fsync" in measured and "GiB free" in measured
    assert not any(tmp_path.iterdir())


def test_a_run_folder_that_cannot_be_written_or_is_lost_with_the_machine_is_named(tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    status, measured, way_out = only(data.run_folder(World(), file / "runs"))
    assert (status, way_out) == (
        "failed",
        "name an --output_dir that you may write to",
    ) and "Not a directory" in measured
    if data.kind_of(Path("/dev/shm")) == "tmpfs":
        status, measured, way_out = only(data.run_folder(World(), Path("/dev/shm/doctor-test")))
        assert status == "warning" and "(tmpfs)" in measured and way_out.startswith("it lies in memory")
    quick = {"kind": "nfs4", "bytes_per_s": 5e6, "sync_s": 0.01, "free": 1e12}
    slow = data.judged_run_folder(tmp_path, [("rank 0 (a)", quick)])
    assert (slow.status, slow.way_out.split(":")[0]) == ("warning", "slow")


def test_data_that_are_missing_or_unreadable_are_named(tmp_path) -> None:
    status, measured, _ = only(data.data_folder(World(host="a"), str(tmp_path / "flowers")))
    assert (status, measured) == ("failed", f"{tmp_path}/flowers: rank 0 (a): nothing is there")
    assert only(data.data_folder(World(), "owner/name"))[0] == "ok"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "image.jpg").write_bytes(b"x" * 100_000)
    files, speed = data.data_folder(World(), str(tmp_path / "broken"))
    assert files.measured.endswith(": 1 files") and speed.check == "data: reading"
    assert speed.figures["1"]["bytes_per_s"] > 0 and speed.figures["4"]["files_per_s"] > 0
    lost = data.attempt(lambda: data.read_all([str(tmp_path / "gone.jpg")], 1))
    row = data.judged_reading("rank 1 (b)", lost, True)
    assert (row.status, row.measured, row.place) == ("failed", "No such file or directory", "rank 1 (b)")


def test_machines_that_see_other_folders_are_named(nodes, tmp_path) -> None:
    """One launch on two machines, of which the second has its own run folder and lacks one image."""
    runs, images = tmp_path / "runs", tmp_path / "images"
    theirs, fewer = tmp_path / "their_runs", tmp_path / "their_images"
    for folder in (runs, theirs):
        folder.mkdir()
    for folder, count in ((images, 5), (fewer, 4)):
        (folder / "a").mkdir(parents=True)
        for number in range(count):
            (folder / "a" / f"{number}.png").write_bytes(b"0" * 1000)
    first, second = nodes(2, own={1: {runs: theirs, images: fewer}})
    words = ["-m", "tools.doctor", "--only", "data", "--json", tmp_path / "found.json"]
    words += ["recipes/cls.py", "--data", images, "--output_dir", runs]
    started = [
        node.start_python(*words, env=exported(rank, 2, PORT, first.address))
        for rank, node in enumerate((first, second))
    ]
    done = [each.finish() for each in started]
    assert [each.returncode for each in done] == [1, 1], done[0].stdout + done[0].stderr
    rows = {check: row for (check, _), row in rows_of(tmp_path / "found.json").items()}
    assert rows["data: run folder"]["status"] == "warning" and "node1" in rows["data: run folder"]["way_out"]
    assert rows["data: files"]["status"] == "failed" and "4 files on rank 1 (node1)" in rows["data: files"]["measured"]
    assert not any(runs.iterdir()) and not any(theirs.iterdir())


def observed(**others) -> dict:
    """What a process of a rehearsal finds."""
    phase = {"micro_steps": 1, "samples": 32.0, "steps": 1, "step_s": 0.5, "data_s": 0.1, "end_s": 0.01}
    phase |= {"earlier_s": None, "last_s": 0.3, "peak": 10**9}
    found = {"rank": 0, "phases": [phase], "workers": 2, "samples_per_core_s": 100.0, "alone_s": 0.2}
    found |= {"plan": {"global_batch_size": 64}, "gradient_bytes": 2**20, "state_bytes": 2**30, "start_s": 1.0}
    return found | {"start_peak": 10**9, "end_peak": 10**9, "save_s": 1.0, "load_s": 0.5, "processes": 2} | others


def test_the_rehearsal_judges_supply_memory_and_disk() -> None:
    two = [observed(), observed(rank=1)]
    parts = rehearsal.steps(two).figures
    assert parts["all_reduce_s"] == pytest.approx(0.1) and parts["forward_backward_s"] == pytest.approx(0.2)
    # The model takes 64 / 0.4 = 160 images/s, 80 of each process: 0.8 workers.
    enough = rehearsal.supply(two, 8)
    assert enough.status == "ok" and enough.figures["workers_needed"] == pytest.approx(0.8)
    slow = [observed(samples_per_core_s=20.0), observed(samples_per_core_s=20.0)]
    assert (rehearsal.supply(slow, 16).status, rehearsal.supply(slow, 16).way_out) == ("warning", "take --workers 4")
    assert rehearsal.supply(slow, 4).way_out.startswith("the cores are too few")
    assert rehearsal.checkpoint(two, 2**40).status == "ok"
    full = rehearsal.checkpoint(two, 2**30)
    assert full.status == "failed" and "free 3.0 GiB" in full.way_out
    assert rehearsal.memory(two, World()).status == "ok"
    assert rehearsal.memory([observed(end_peak=2**50)], World()).status == "warning"


def test_a_rehearsal_leaves_nothing_and_a_failure_is_its_cause(tmp_path) -> None:
    words = ["--output_dir", str(tmp_path), "--workers", "0", "--global_batch_size", "16"]
    rows = rehearsal.rehearse(World(words=words))
    assert [row.check for row in rows] == [
        *("rehearsal: steps", "rehearsal: memory", "rehearsal: checkpoint", "data: supply"),
    ]
    assert rows[0].status == "ok" and rows[0].figures["forward_backward_s"] > 0 and rows[2].figures["load_s"] > 0
    assert not any(tmp_path.iterdir())
    status, measured, way_out = only(rehearsal.rehearse(World(words=[*words, "--model", "no_such_model"])))
    assert (status, measured) == ("failed", "cls.py did not make two steps") and "no_such_model" in way_out
    assert not any(tmp_path.iterdir())
