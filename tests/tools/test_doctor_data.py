"""The doctor's rows about disks and data: each trouble is provoked, on this machine or on network namespaces."""

from pathlib import Path

from tests.tools.test_doctor import exported, rows_of
from tools.doctor import data, plan
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
    (tmp_path / "image.jpg").write_bytes(b"x")
    assert only(data.data_folder(World(), str(tmp_path)))[1].endswith(": 1 files")


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


def test_the_rehearsal_judges_waiting_memory_and_disk() -> None:
    found = {"images_per_second": 160.0, "data_wait": 0.1, "samples": 64, "start_s": 5.0, "memory": 10**9}
    assert plan.steps(found).status == "ok" and plan.steps(found).measured.startswith("0.4 s per step of 64 samples")
    assert plan.slowest(found | {"lag": 0.05, "slowest": 1}, World()) == []
    (late,) = plan.slowest(found | {"lag": 0.38, "slowest": 1}, World(hosts=["a", "b"]))
    assert (late.status, late.place) == ("warning", "rank 1 (b)") and "38% of the time" in late.measured
    slow = plan.steps(found | {"data_wait": 0.5})
    assert (
        slow.status == "warning" and "50% of the time waiting for data" in slow.measured and "--workers" in slow.way_out
    )
    saved = found | {"checkpoint_bytes": 2**30, "verify_s": 0.5}
    assert plan.checkpoint(saved, 2**40).status == "ok" and plan.checkpoint(found, 2**40).status == "failed"
    assert plan.checkpoint(saved, 2**30).status == "failed" and "free 3.0 GiB" in plan.checkpoint(saved, 2**30).way_out
    assert plan.memory(found, 2e9).status == "ok" and plan.memory(found, 1e9).status == "warning"


def test_a_rehearsal_leaves_nothing_and_a_failure_is_its_cause(tmp_path) -> None:
    words = ["--output_dir", str(tmp_path), "--global_batch_size", "16"]
    rows = plan.rehearse(World(words=words, is_met=True))
    assert [row.check for row in rows] == ["rehearsal: steps", "rehearsal: memory", "rehearsal: checkpoint"], rows
    assert rows[0].figures["samples"] == 16 and rows[0].figures["checkpoint_bytes"] > 10**6 and rows[2].status == "ok"
    assert not any(tmp_path.iterdir())
    status, measured, way_out = only(plan.rehearse(World(words=[*words, "--model", "no_such_model"])))
    assert (status, measured) == ("failed", "the recipe made no step") and "no_such_model" in way_out
    assert not any(tmp_path.iterdir())
