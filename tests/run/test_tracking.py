"""A tracker shows the run and never stops or slows it: without key, network, service, disk or package.

More of this: tests/faults/test_tracker_faults.py, and runs that are killed and resume in
tests/recipes/test_dashboards.py.
"""

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import Refused
from common.run import tracking
from tests.harness.launching import Launcher, find_free_port

# Sends a row to W&B, which can't be reached.
RUN = """
import sys, time
from pathlib import Path
from accelerate import PartialState
from common.run import tracking

tracking.INIT_TIMEOUT_S, said = 60, []
PartialState(cpu=True)  # which a run has by then
tracker = tracking.Tracker("wandb", folder=Path(sys.argv[1]), config={"project": "p"}, say=said.append)
tracker.log(7, {"eval/AP": 0.5})
began = time.perf_counter()
tracker.finish(timeout_s=0.5)
assert len(said) == 1 and "0.5 s" in said[0] and time.perf_counter() - began < 2, said
"""


@pytest.mark.alone
def test_a_hanging_start_is_left_behind(launch: Launcher, tmp_path: Path) -> None:
    nobody = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{find_free_port()}"}
    began = time.monotonic()
    ended = launch.start_python(["-c", RUN, tmp_path], env=nobody).finish()
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", ""), ended
    assert time.monotonic() - began < 40, "W&B's own exit hook waits 60 s here"


# Sends a table of pictures to W&B offline.
TABLE = """
import sys
from pathlib import Path
from accelerate import PartialState
from PIL import Image
from common.run import tracking

def worst():
    yield "image", "path", "loss"
    for number in range(3):
        yield Image.new("RGB", (8, 8), (number, 0, 0)), f"{number}.png", 3.0 - number

PartialState(cpu=True)  # which a run has by then
tracker = tracking.Tracker("wandb", folder=Path(sys.argv[1]), config={"project": "p"})
tracker.images(7, {"eval/worst": worst})
tracker.log(7, {"eval/top1": 0.5})
tracker.finish()
"""


def test_the_worst_images_are_a_table_with_pictures(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.start_python(["-c", TABLE, tmp_path]).finish()
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", ""), ended
    (file,) = tmp_path.glob("wandb/*run-*/files/media/table/eval/worst_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["image", "path", "loss"]
    assert [row[1:] for row in table["data"]] == [["0.png", 3.0], ["1.png", 2.0], ["2.png", 1.0]]
    # What is uploaded lies in the run folder, too: the table, and its pictures.
    staged = [path.read_bytes() for path in tmp_path.glob("wandb/artifacts/staging/*")]
    assert sum(content.startswith(b"\x89PNG") for content in staged) == 3


class Backend:
    """Stands for a tracker package; `open` lets it go on, `broken` makes every call fail."""

    last_step = 0
    where = "somewhere"

    def __init__(self) -> None:
        self.open = threading.Event()
        self.broken = False
        self.rows = []
        self.open.set()

    def log(self, step: int, metrics: dict) -> None:
        self.open.wait()
        if self.broken:
            raise OSError("disk full")
        self.rows.append((step, metrics))

    def upload(self, model: Path) -> None:
        self.log(0, {"model": model})

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    backend = Backend()
    monkeypatch.setattr(tracking, "_WandB", lambda *arguments: backend)
    yield backend
    backend.open.set()


def build_tracker(
    folder: Path, say: Callable = print, kind: str = "wandb", **options
) -> tracking.Tracker:
    return tracking.Tracker(kind, folder=folder, config={}, say=say, **options)


@pytest.mark.alone
def test_a_hanging_tracker_costs_microseconds_and_little_memory(
    backend, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(tracking, "MAX_WAITING", 100)
    backend.open.clear()
    messages = []
    times = []
    tracker = build_tracker(tmp_path, messages.append)
    for step in range(1, 1001):
        began = time.perf_counter()
        tracker.log(step, {"train/loss": 1.0})
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 1e-3
    began = time.perf_counter()
    tracker.finish(timeout_s=0.1)
    assert time.perf_counter() - began < 2 and len(messages) == 1
    backend.open.set()
    tracker._thread.join(10)
    assert 100 <= len(backend.rows) <= 102 and backend.exit_code == 0


def test_one_failing_call_does_not_end_the_tracker(backend, tmp_path) -> None:
    messages = []
    settled = threading.Event()
    row = {"a": 1.0}
    tracker = build_tracker(tmp_path, lambda line: (messages.append(line), settled.set()))
    backend.broken = True
    tracker.log(1, {})
    assert settled.wait(10)
    backend.broken = False
    backend.open.clear()
    tracker.images(2, {"a": tmp_path / "a.png"})  # which this one refuses
    tracker.log(0, row)  # a step that the dashboard has from a start that was killed
    tracker.log(2, row)
    row["a"] = 2.0
    backend.open.set()
    tracker.finish(exit_code=1)
    assert (backend.rows, backend.exit_code) == ([(2, {"a": 1.0})], 1)
    assert messages == ["wandb failed (disk full): training continues, metrics.jsonl has every row"]


NOT_UPLOADED = "{0} was not uploaded to W&B: `wandb artifact put --type model {0}` does"


def test_a_model_is_uploaded_before_the_end(backend, tmp_path) -> None:
    messages: list[str] = []
    tracker = build_tracker(tmp_path, messages.append)
    tracker.log(1, {"a": 1.0})
    tracker.finish(model=tmp_path)
    assert backend.rows == [(1, {"a": 1.0}), (0, {"model": tmp_path})]
    assert messages == [] and backend.exit_code == 0


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_a_model_that_was_not_uploaded_is_named(backend, tmp_path, monkeypatch, trouble) -> None:
    monkeypatch.setattr(tracking, "UPLOAD_TIMEOUT_S", 0.1)
    messages: list[str] = []
    tracker = build_tracker(tmp_path, messages.append)
    if trouble == "fails":
        backend.broken = True
    else:
        backend.open.clear()
    tracker.finish(timeout_s=30 if trouble == "fails" else 0.1, model=tmp_path)
    assert messages[-1] == NOT_UPLOADED.format(tmp_path)


@pytest.mark.parametrize("kind", ["none", "tensorboard"])
def test_a_model_goes_to_wandb_alone(tmp_path, kind: str) -> None:
    messages: list[str] = []
    build_tracker(tmp_path, messages.append, kind).finish(model=tmp_path)
    assert messages == []


def test_none_means_nothing_and_a_missing_package_is_refused(tmp_path, monkeypatch) -> None:
    tracker = build_tracker(tmp_path, kind="none")
    tracker.log(1, {"a": 1.0})
    tracker.finish()
    assert tracker.where() == "" and tracker.run_id and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refused, match="pip install tensorboard"):
        tracking.require("tensorboard")
