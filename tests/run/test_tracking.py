"""A tracker shows the run and never stops or slows it: without key, network, service, disk or package."""

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from common.errors import Refused
from common.run import tracking
from tests.harness.dashboard import records
from tests.harness.launching import Launcher, free_port

MAIN, OTHER = SimpleNamespace(is_main_process=True), SimpleNamespace(is_main_process=False)

# What a recipe does with its tracker; with "kill" the W&B service dies in mid-run, with "stay" it never ends.
RUN = """
import json, os, sys, time
from pathlib import Path
import psutil
from accelerate import Accelerator
from common.run import tracking

folder, event, first, last, resumed_at, patience = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:])
tracking.INIT_TIMEOUT_S = 2 if event == "fall back" else 60
said, times = [], []
tracker = tracking.Tracker(Accelerator(cpu=True), "wandb", folder=Path(folder), project="recipes", name="mine",
    config={"lr": 0.5, "data": Path("digits"), "betas": (0.9, 0.95), "mixup": None}, run_id="abcd1234",
    rows=[{"step": step, "train/loss": 1 / step} for step in range(1, int(resumed_at) + 1)], say=said.append)
def kill():
    while not tracker.where():
        time.sleep(0.01)
    services = [child for child in psutil.Process().children() if "wandb" in child.name()]
    for service in services:
        service.kill()
        service.wait()
    assert services
for step in range(int(first), int(last) + 1):
    if event == "kill" and step == 3:
        kill()
    began = time.perf_counter()
    tracker.log(step, {"train/loss": 1 / step})
    times.append(time.perf_counter() - began)
while event == "stay":
    time.sleep(1)
tracker.summary({"best/top1": 0.98})
began = time.perf_counter()
tracker.finish(timeout_s=patience)
print(json.dumps({"said": said, "log_s": sorted(times)[len(times) // 2], "finish_s": time.perf_counter() - began,
    "where": tracker.where()}))
"""


def run(launch: Launcher, folder: Path, event="", first=1, last=5, resumed_at=0, patience=60.0, **env: str) -> dict:
    """What the run says of itself; that it ends well and prints nothing else is part of every test."""
    began = time.monotonic()
    ended = launch.start_python("-c", RUN, folder, event, first, last, resumed_at, patience, env=env).finish()
    assert (ended.returncode, ended.stderr, ended.stdout.count("\n")) == (0, "", 1), ended
    return json.loads(ended.stdout) | {"process_s": time.monotonic() - began}


def of_kind(rows: list[dict], kind: str) -> list[dict]:
    return [row[kind] for row in rows if row["type"] == kind]


def steps(rows: list[dict]) -> list[int]:
    return [row["item"]["step"] for row in of_kind(rows, "history")]


BOXES = """
import sys
from pathlib import Path
from accelerate import Accelerator
from PIL import Image
from common.run.tracking import Box, BoxedImage, MistakenImage, Tracker

tracker = Tracker(Accelerator(cpu=True), "wandb", folder=Path(sys.argv[1]), project="p", name="n", config={}, say=print)
tracker.log(7, {"eval/AP": 0.5})
cat = Box((10, 20, 50, 40), 3, "cat")
wide = BoxedImage(Image.new("RGB", (100, 50)), "a/wide one.jpg", {"ground_truth": [cat], "predictions": [
    Box((12.5, 20, 50, 40), 3, "cat", 0.75), Box((0, 0, 100, 50), 5, "dog", 0.25)]})
grey = BoxedImage(Image.new("L", (8, 16)), "grey", {"ground_truth": [], "predictions": []})
tracker.examples(8, [wide, grey])
tracker.examples(9, [MistakenImage(Image.new("RGB", (4, 4)), "7.png", "cat", "dog", 0.75)])
tracker.finish(timeout_s=60)
"""


def test_wandb_gets_boxes_in_its_own_format_and_mistakes_as_a_table(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.start_python("-c", BOXES, tmp_path).finish()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    (rows,) = records(tmp_path)
    *_, row, of_table = (history["item"] for history in of_kind(rows, "history"))
    (folder,) = tmp_path.glob("wandb/offline-run-*/files")
    wide = [row[f"objects/01.{key}"] for key in ("_type", "width", "height", "caption")]
    assert (row["step"], wide) == (8, ["image-file", 100, 50, "a/wide one.jpg"])
    assert all((folder / row[f"objects/{number}.path"]).is_file() for number in ("01", "02"))
    files = (row[f"objects/01.boxes.{name}.path"] for name in ("ground_truth", "predictions"))
    truth, found = (json.loads((folder / file).read_text()) for file in files)
    position = {"minX": 0.1, "minY": 0.4, "maxX": 0.5, "maxY": 0.8}
    labels = {"3": "cat", "5": "dog"}
    assert truth == {"box_data": [{"position": position, "class_id": 3, "box_caption": "cat"}], "class_labels": labels}
    assert [(box["box_caption"], box["scores"]) for box in found["box_data"]] == [
        ("cat 0.75", {"score": 0.75}),
        ("dog 0.25", {"score": 0.25}),
    ]
    assert found["box_data"][0]["position"]["minX"] == 0.125
    (artifact,) = of_kind(rows, "artifact")
    parts = {part["path"]: Path(part["local_path"]) for part in artifact["manifest"]["contents"]}
    assert of_table["step"] == 9 and of_table["mistakes_table.nrows"] == 1
    assert all(path.is_relative_to(tmp_path) for path in parts.values()), "nothing is left in the home folder"
    table = json.loads(parts["mistakes_table.table.json"].read_text())
    ((image, *labels),) = table["data"]
    assert table["columns"] == ["image", "name", "true", "predicted", "confidence"]
    assert labels == ["7.png", "cat", "dog", 0.75] and parts[image["path"]].is_file()


def nothing_listens(port: int) -> dict[str, str]:
    return {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}


def test_without_key_and_terminal_it_is_offline_and_a_resume_continues(launch: Launcher, tmp_path: Path) -> None:
    first = run(launch, tmp_path)
    resumed = run(launch, tmp_path, first=4, last=8, resumed_at=3)
    assert first["said"] == resumed["said"] == []
    assert first["where"] == f"{tmp_path}/wandb (to upload: wandb sync {tmp_path}/wandb/offline-run-*-abcd1234)"

    before, after = records(tmp_path)
    assert (steps(before), steps(after)) == ([1, 2, 3, 4, 5], [6, 7, 8])
    assert [of_kind(rows, "run")[0]["run_id"] for rows in (before, after)] == ["abcd1234"] * 2
    text = json.dumps(before)
    for fact in ('"lr": 0.5', '"data": "digits"', '"betas": [0.9, 0.95]', '"mixup": null', '"best/top1": 0.98'):
        assert fact in text
    assert any(metric.get("step_metric") == "step" for metric in of_kind(before, "metric"))


@pytest.mark.alone
def test_a_dead_service_is_logged_once_and_delays_nothing(launch: Launcher, tmp_path: Path) -> None:
    ended = run(launch, tmp_path, "kill", last=200)
    assert len(ended["said"]) == 1 and ended["said"][0].startswith("wandb failed (")
    assert ended["log_s"] < 1e-3 and ended["finish_s"] < 5


def test_a_killed_run_has_its_rows_on_the_disk(launch: Launcher, tmp_path: Path) -> None:
    started = launch.start_python("-c", RUN, tmp_path, "stay", 1, 5, 0, 60)
    deadline = time.monotonic() + 13
    try:
        while not any(map(steps, records(tmp_path))) and time.monotonic() < deadline:
            assert started.process.poll() is None, started.stderr.read_text()
            time.sleep(0.1)
    finally:
        started.process.kill()
    started.process.wait()
    assert steps(records(tmp_path)[0]) == [1, 2, 3, 4]  # W&B keeps the row of a step open until the next begins


def test_without_network_the_rows_go_to_the_disk(launch: Launcher, tmp_path: Path) -> None:
    ended = run(launch, tmp_path, "fall back", **nothing_listens(free_port()))
    assert len(ended["said"]) == 1 and "offline" in ended["said"][0]
    assert steps(records(tmp_path)[0]) == [1, 2, 3, 4, 5]


@pytest.mark.alone
def test_a_hanging_start_is_left_behind(launch: Launcher, tmp_path: Path) -> None:
    ended = run(launch, tmp_path, patience=0.5, **nothing_listens(free_port()))
    assert len(ended["said"]) == 1 and "0.5 s" in ended["said"][0]
    assert ended["finish_s"] < 2 and ended["process_s"] < 40, "W&B's own exit hook waits 60 s here"


def test_a_wrong_key_a_wrong_mode_and_wandb_turned_off_end_well(launch: Launcher, tmp_path: Path) -> None:
    wrong_key = run(launch, tmp_path / "key", WANDB_API_KEY="not a key")
    assert len(wrong_key["said"]) == 1 and steps(records(tmp_path / "key")[0]) == [1, 2, 3, 4, 5]
    wrong_mode = run(launch, tmp_path / "mode", WANDB_MODE="sometimes")
    assert len(wrong_mode["said"]) == 1 and "sometimes" in wrong_mode["said"][0]
    off = run(launch, tmp_path / "off", WANDB_MODE="disabled")
    assert (off["said"], off["where"]) == ([], "")


class Backend:
    """Stands for a tracker package; `held` makes it hang, `broken` makes every call fail."""

    has_up_to = 0

    def __init__(self) -> None:
        self.open, self.broken, self.rows, self.where = threading.Event(), False, [], "somewhere"
        self.open.set()

    def log(self, step: int, metrics: dict) -> None:
        self.open.wait()
        if self.broken:
            raise OSError("disk full")
        self.rows.append((step, metrics))

    summary = images = lambda self, *arguments: None

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    backend = Backend()
    monkeypatch.setattr(tracking, "_WandB", lambda *arguments: backend)
    yield backend
    backend.open.set()


def tracker_of(folder: Path, say: Callable = print, kind: str = "wandb", accelerator=MAIN) -> tracking.Tracker:
    return tracking.Tracker(accelerator, kind, folder=folder, project="p", name="n", config={}, say=say)


@pytest.mark.parametrize("run_id", ["../../x", "a b", "", 5, ["x"], {}, "x" * 65, "é"])
def test_an_invalid_run_id_is_replaced(tmp_path, run_id) -> None:
    def tracker(run_id):
        return tracking.Tracker(MAIN, "none", folder=tmp_path, project="p", name="n", config={}, run_id=run_id)

    assert len(tracker(run_id).run_id) == 8 and tracker("a1-b_2").run_id == "a1-b_2"


@pytest.mark.alone
def test_a_hanging_tracker_costs_microseconds_and_bounded_memory(backend, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tracking, "MOST_WAITING", 100)
    backend.open.clear()
    said, times = [], []
    tracker = tracker_of(tmp_path, said.append)
    for step in range(1, 1001):
        began = time.perf_counter()
        tracker.log(step, {"train/loss": 1.0})
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 1e-3
    began = time.perf_counter()
    tracker.finish(timeout_s=0.1)
    assert time.perf_counter() - began < 2
    assert len(said) == 1
    backend.open.set()
    tracker._thread.join(10)
    assert 100 <= len(backend.rows) <= 102 and backend.exit_code == 0


def test_one_failing_call_does_not_end_the_tracker(backend, tmp_path) -> None:
    said, settled = [], threading.Event()
    tracker = tracker_of(tmp_path, lambda line: (said.append(line), settled.set()))
    backend.broken = True
    tracker.log(1, {})
    assert settled.wait(10)
    backend.broken = False
    tracker.log(2, {"a": 1.0})
    tracker.finish(exit_code=1)
    assert (backend.rows, backend.exit_code) == ([(2, {"a": 1.0})], 1)
    assert said == ["wandb failed (disk full): training continues, metrics.jsonl has every row"]


def test_boxes_that_a_tracker_refuses_do_not_end_it(backend, tmp_path) -> None:
    said, tracker = [], None

    def refuse(step: int, images: tuple) -> None:
        raise TypeError("no boxes")

    backend.boxed_images = refuse
    tracker = tracker_of(tmp_path, said.append)
    tracker.examples(1, [tracking.BoxedImage(None, "a", {})])
    tracker.log(2, {"a": 1.0})
    tracker.finish()
    assert backend.rows == [(2, {"a": 1.0})]
    assert said == ["wandb failed (no boxes): training continues, metrics.jsonl has every row"]


def test_rows_keep_the_values_at_the_call(backend, tmp_path) -> None:
    backend.open.clear()
    tracker, row = tracker_of(tmp_path), {"a": 1.0}
    tracker.log(1, row)
    row["a"] = 2.0
    backend.open.set()
    tracker.finish()
    assert backend.rows == [(1, {"a": 1.0})]


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("a file where the folder should be")
    said = []
    tracker = tracker_of(tmp_path, said.append)
    tracker.log(1, {"a": 1.0})
    tracker.finish()
    assert len(said) == 1 and str(tmp_path / "wandb") in said[0]
    assert tracker.where() == ""


def test_only_the_main_process_sends_and_none_means_nothing(backend, tmp_path) -> None:
    for tracker in (tracker_of(tmp_path, accelerator=OTHER), tracker_of(tmp_path, kind="none")):
        tracker.log(1, {"a": 1.0})
        tracker.summary({"a": 1.0})
        tracker.images(1, {"a": tmp_path / "a.png"})
        tracker.examples(1, [tracking.BoxedImage(None, "a", {})])
        tracker.finish()
        assert tracker.where() == "" and tracker.run_id
    assert backend.rows == [] and list(tmp_path.iterdir()) == []


def test_a_missing_package_is_refused_at_once_with_the_way_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refused, match="pip install trackio"):
        tracker_of(tmp_path, kind="trackio", accelerator=OTHER)
    with pytest.raises(Refused, match="wandb, tensorboard, trackio, none"):
        tracker_of(tmp_path, kind="mlflow")


def test_tensorboard_gets_rows_results_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.new("RGB", (4, 4)).save(tmp_path / "curves.png")
    said = []
    for first, rows in ((1, []), (3, [{"step": 1}, {"step": 2}])):  # killed after 4, resumed from 2
        tracker = tracking.Tracker(
            Accelerator(cpu=True),
            "tensorboard",
            folder=tmp_path,
            project="p",
            name="n",
            config={"lr": 0.1, "mixup": None},
            rows=rows,
            say=said.append,
        )
        for step in range(first, 5):
            tracker.log(step, {"train/loss": 1 / step})
        tracker.summary({"best/top1": 0.5})
        tracker.images(5, {"curves": tmp_path / "curves.png"})  # of a step whose row comes later
        tracker.examples(5, [tracking.BoxedImage(Image.new("RGB", (4, 4)), "a", {})])  # it knows no boxes
        tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert said == []
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert {event.step for event in events.Images("curves")} == {5}
    assert {"curves"} == set(events.Tags()["images"]) and "summary/best/top1" in events.Tags()["scalars"]
