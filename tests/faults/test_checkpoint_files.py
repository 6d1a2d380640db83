"""Damage, a full disk or a forged file costs a run at most the steps since its last good checkpoint. No file executes code.

More of this: tests/checkpoints/test_store.py, tests/recipes/test_cls_resume.py, tests/recipes/test_refusals.py.
"""

import functools
import io
import json
import os
import pickle
import random
import shutil
import signal
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from common.checkpoints.state import TrainingState
from common.checkpoints.store import Checkpoints, Damaged, verify
from common.training.optimizer import build_optimizer
from tests.harness.disks import disk, mount
from tests.harness.outcomes import Outcome, identical, seal
from tests.harness.resumed import after_step, kill_at_step

STEPS = 12
WORDS = (
    *("--image_size", 16, "--global_batch_size", 8, "--workers", 1, "--tracker", "none", "--max_steps", STEPS),
    *("--log_every", 1, "--checkpoint_every", 4, "--eval_every", 6, "--ema_decay", 0.9),
)
TENSORS = [f"{name}.safetensors" for name in ("model", "optimizer", "ema")]
FILES = (*TENSORS, "record.json", "manifest.json")


def train(forks, data: Path, folder: Path, *words: object, before=None):
    """A run in `folder`, of one process."""
    command = (*WORDS, "--data", data, "--output_dir", folder.parent, "--name", folder.name, *words)
    return forks(*command, before=before)


@pytest.fixture(scope="module")
def whole(forks, data, tmp_path_factory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended = train(forks, data, folder)
    assert ended.code == 0, ended
    return folder


@pytest.fixture(scope="module")
def killed(forks, data, tmp_path_factory) -> Path:
    """The folder of a run that was killed after nine steps: it has the checkpoints of four and eight."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    ended = train(forks, data, folder, before=functools.partial(kill_at_step, 9))
    assert ended.code == -signal.SIGKILL, ended
    return folder


def assert_same_run(folder: Path, whole: Path) -> None:
    one, other = (Outcome("ok", "", "", 0.0, path) for path in (folder, whole))
    assert [row["step"] for row in one.rows] == [*range(1, STEPS + 1)]
    assert (one.column("train/loss") == other.column("train/loss")).all()
    assert all(identical(one.tensors(file), other.tensors(file)) for file in ("model", "optimizer", "ema"))


def truncate(path: Path) -> None:
    os.truncate(path, random.Random(path.name).randrange(path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def test_damage_to_any_file_costs_the_steps_since_the_checkpoint_before(forks, data, whole, killed, tmp_path):
    """Each damage to each file is found; a run is started on one of each, which replaces what was damaged."""
    damages = (truncate, flip, Path.unlink)
    for number, file in enumerate(FILES):
        for damage in damages:
            folder = tmp_path / f"{damage.__name__} {file}"
            shutil.copytree(killed, folder)
            damage(folder / "checkpoints/step_00000008" / file)
            with pytest.raises(Damaged):
                verify(folder / "checkpoints/step_00000008")
        folder = tmp_path / f"{damages[number % len(damages)].__name__} {file}"
        ended = train(forks, data, folder)
        assert ended.code == 0, ended
        assert "step_00000008 is damaged" in ended.stdout and "resuming from step 4 of 12" in ended.stdout, ended.stdout
        assert_same_run(folder, whole)


# --- a disk that takes no more while training goes on


def fill(run) -> None:
    """Something else takes all of the disk but what some rows need."""
    with (run.path.parent / "else").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**16)):
            pass
    os.truncate(file.name, os.stat(file.name).st_size - 200_000)


def make_room(folder: Path) -> None:
    (folder.parent / "else").unlink()


def make_read_only(run) -> None:
    folder = run.path / "checkpoints"
    mount("mount", "--bind", folder, folder)
    mount("mount", "-o", "remount,ro,bind", folder)


def make_writable(folder: Path) -> None:
    mount("umount", "-l", folder / "checkpoints")


FAILURES = {
    "a full disk": (fill, "No space left on device", make_room),
    "a read-only folder": (make_read_only, "Read-only file system", make_writable),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_can_not_be_written_beside_the_training_stops_it(forks, data, whole, tmp_path, failure):
    """Within a few steps, in one line; what was there stays, and once it can be written the same command goes on."""
    act, says, mend = FAILURES[failure]
    flags = ("--checkpoint_every", 5, "--eval_every", STEPS)
    with disk(tmp_path / "disk", "24m") as root:
        folder = root / "run"
        ended = train(forks, data, folder, *flags, before=functools.partial(after_step, act, 6))
        assert ended.code == 2 and len(ended.stderr.splitlines()) == 1, ended
        assert f"{folder} can't be written (" in ended.stderr and says in ended.stderr, ended.stderr
        assert "make room, and the same command resumes" in ended.stderr
        status = json.loads((folder / "status.json").read_text())
        assert status["status"] == "failed" and says in status["cause"] and 10 <= status["step"] <= STEPS, status
        assert [verify(path).step for path in Checkpoints(folder / "checkpoints").paths()] == [5]
        assert not list(folder.rglob(".*.tmp"))
        mend(folder)
        ended = train(forks, data, folder, *flags)
        assert ended.code == 0 and "resuming from step 5 of 12" in ended.stdout, ended
        assert_same_run(folder, whole)


# --- a load that fails


def test_a_failed_load_leaves_weights_untouched(killed):
    """Whatever is missing or odd in the parts that are read besides the weights."""
    from common.config.fields import OptimizationConfig, RunConfig

    class Config(OptimizationConfig, RunConfig):
        pass

    def state() -> TrainingState:
        model = torch.nn.Linear(3, 2)
        return TrainingState(model, build_optimizer(Config(), model), torch.nn.Linear(3, 2))

    trained = state()
    trained.model(torch.ones(1, 3)).sum().backward()
    trained.optimizer.step()
    good = {file: {name: tensor.clone() for name, tensor in each.items()} for file, each in trained.tensors().items()}
    numbers = trained.numbers()
    odd = {"stranger/exp_avg": torch.zeros(2)}
    bad = [
        ({file: tensors for file, tensors in good.items() if file != "optimizer"}, numbers),
        (good | {"optimizer": good["optimizer"] | odd}, numbers),
        *((good, {key: value for key, value in numbers.items() if key != missing}) for missing in numbers),
        (good, numbers | {"group_steps": []}),
    ]
    for files, theirs in bad:
        fresh = state()
        before = {
            file: {name: tensor.clone() for name, tensor in fresh.tensors()[file].items()} for file in ("model", "ema")
        }
        with pytest.raises((KeyError, ValueError)):
            fresh.load(files, theirs)
        assert all(identical(fresh.tensors()[file], before[file]) for file in before)
    fresh = state()
    fresh.load(good, numbers)
    assert identical(fresh.tensors()["model"], good["model"]) and identical(fresh.tensors()["ema"], good["ema"])


# --- files that were made to execute something


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def as_pickle(marker: Path) -> bytes:
    return pickle.dumps(Malicious(marker))


def as_torch(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": Malicious(marker)}, buffer)
    return buffer.getvalue()


def as_yaml(marker: Path) -> bytes:
    return f"!!python/object/apply:os.mkdir [{marker}]\n".encode()


def as_json(marker: Path) -> bytes:
    return json.dumps({"py/reduce": [{"py/function": "os.mkdir"}, {"py/tuple": [str(marker)]}], "step": 8}).encode()


def as_deep_json(marker: Path) -> bytes:
    return b"[" * 100_000


def as_safetensors(marker: Path) -> bytes:
    """A header that promises more than there is, with a pickle for its content."""
    header = {"__metadata__": {"format": "pickle"}, "weight": {"dtype": "F32", "shape": [9], "data_offsets": [0, 9**9]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + as_pickle(marker)


def as_endless_header(marker: Path) -> bytes:
    return struct.pack("<Q", 2**63) + as_pickle(marker)


PAYLOADS = (as_pickle, as_torch, as_yaml, as_json, as_safetensors, as_endless_header)


@pytest.mark.parametrize("file", FILES)
def test_a_payload_in_a_checkpoint_is_damage_and_never_executes(killed, tmp_path, file):
    """Also where whoever put it there has made the manifest fit."""
    marker = tmp_path / "executed"
    for number, payload in enumerate((*PAYLOADS, as_deep_json)):
        for sealed in (False, True):
            folder = tmp_path / f"{number} {sealed}"
            shutil.copytree(killed / "checkpoints", folder)
            newest = folder / "step_00000008"
            (newest / file).write_bytes(payload(marker))
            if sealed and file != "manifest.json":
                seal(newest)
            if sealed and file == "record.json" and payload is as_json:
                continue  # a JSON object with a step: read, and refused as another run's
            said = []
            assert Checkpoints(folder).newest(said.append).step == 4 and len(said) == 1, (payload, sealed)
            assert not marker.exists(), payload


def run_files_with(payload: bytes, folder: Path) -> None:
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "summary.json", "status.json", "tracker.json"):
        (folder / name).write_bytes(payload)
    (folder / "log.txt").write_bytes(payload)


def test_a_payload_in_the_run_folder_or_the_exported_model_never_executes(run_several, data, whole, killed, tmp_path):
    """The run resumes from its checkpoint; an exported model is refused, or read without what is forged."""
    marker, cases = tmp_path / "executed", {}
    small = ["--data", data, "--image_size", 16, "--workers", 1]
    for payload in PAYLOADS:
        name, content = payload.__name__, payload(marker)
        shutil.copytree(killed, tmp_path / name)
        run_files_with(content, tmp_path / name)
        cases[name] = [*WORDS, "--data", data, "--output_dir", tmp_path, "--name", name]
        for file in ("config.json", "model.safetensors", "results.json"):
            exported = tmp_path / f"{name} {file}"
            shutil.copytree(whole / "best", exported)
            (exported / file).write_bytes(content)
            cases[f"{name} {file}"] = [*small, "--eval_only", exported, "--output_dir", tmp_path / "reports"]
    for name, outcome in run_several(1, cases).items():
        if " " in name:
            assert outcome.outcome == ("ok" if "results.json" in name else "refused"), (name, outcome)
            assert "\n" not in outcome.text
        else:
            assert outcome.outcome == "ok" and "resuming from step 8 of 12" in outcome.stdout, outcome
            assert identical(*(Outcome("ok", "", "", 0.0, path).tensors() for path in (outcome.folder, whole)))
    assert not marker.exists()


def test_the_payloads_of_these_tests_would_execute(tmp_path):
    for number, (payload, load) in enumerate(
        (
            (as_pickle, pickle.loads),
            (as_torch, lambda content: torch.load(io.BytesIO(content), weights_only=False)),
            (as_yaml, yaml.unsafe_load),
        )
    ):
        marker = tmp_path / str(number)
        load(payload(marker))
        assert marker.exists()


def test_a_whole_checkpoint_of_these_tests_is_one(killed):
    """Else every damage would be found."""
    assert [verify(path).step for path in Checkpoints(killed / "checkpoints").paths()] == [8, 4]
    assert {path.name for path in (killed / "checkpoints/step_00000008").iterdir()} == set(FILES)
