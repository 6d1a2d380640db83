"""What can't be done is refused in one line that helps, on every rank, and what was there stays as it was.

The table is the page: a command as it is typed, and the only line that is then said. `...` stands
for anything. The commands run in a folder with the files of `a_desk`, on two ranks; a preset of
digits stands before words that name none. Texts of single formats are in the tests of their rooms:
here each stage of a start is shown to refuse on all ranks and to leave nothing behind.
"""

import json
import os
import pickle
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from common.files import CACHE
from tests.harness import several
from tests.harness.drawings import draw_scenes, draw_stripes
from tests.harness.launching import ROOT, Started
from tests.harness.odd_files import Malicious
from tests.harness.outcomes import read

SMALL = (
    "--opt sgd --global_batch_size 8 --batch_norm local --eval_every 1000 --schedule constant "
    "--tracker none --workers 0"
)
FIRST = f"cls --data pets --name first {SMALL} --max_steps 2"
FIRST_DET = (
    "det --data scenes --name boxes --short_sides 64 --long_side 64 --max_steps 2 --tracker none "
    "--workers 0"
)

TABLE = """
-- sizes that do not fit
cls --epochs 0
    --epochs 0.0: no step to make; train longer, or take --eval_only
cls --global_batch_size 1 --batch_norm local
    --global_batch_size 1 leaves some of 2 processes without ...
cls --global_batch_size 2 --batch_norm local
    the model can't make a step: Expected more than 1 value per channel ...; look at --image_size, ...
cls --global_batch_size 7 --mixup 0.2 --batch_norm local
    --global_batch_size 7 does not divide into the 2 samples that belong together (...): take a multiple of 2
cls --model test_vit --image_size 33
    the model can't make a step: Input height (33) should be divisible by ...; look at --image_size, ...
cls --crop_pct 1e-9
    the model's images can't be made ...look at --image_size and ...
det --detector faster_rcnn --variant torchvision_v2 --levels 2-5 --batch_norm group --norm_batch_size 4
    --batch_norm group: the heads of --variant torchvision_v2 see another number of proposals ...
det --width 100
    --width 100: the heads normalise 32 groups of channels; take a multiple of 32

-- models and data
cls --model resnet-50
    --model resnet-50: not a model of timm ...; did you mean resnet50, ...?
cls --data https://example.com/pets.zip
    --data https://example.com/pets.zip: ... is neither a .tar nor a .parquet
det --data resized
    .../resized/train.json: 1 of 25 images have another size than annotated, first ...: 640 x 480 in ...

-- what is to be evaluated, or begun with
cls --eval_only runs/bare
    --eval_only runs/bare: this run has no best/ yet; name a folder in runs/bare/checkpoints
det --eval_only runs/boxes/best --data strangers
    runs/boxes/best does not know 1 of the ... classes of --data strangers (...); it knows 0, 1, 2, ...

-- run folders
cls --output_dir weights.pth
    --output_dir weights.pth: weights.pth/cls-... can't be written (...); name another folder
cls --name my/run
    --name my/run: must be a folder name without slashes; where it lies is --output_dir
FIRST --lr 0.5
    runs/first/...step_00000002 belongs to another run: lr 0.004 there, 0.5 here; give this run another --name
cls --name second --resume runs/first
    --resume runs/first: no checkpoint, no manifest.json is in it; name a folder such as RUN/checkpoints/...
cls --name first --resume never
    --resume never: runs/first holds step_00000002; give this run another --name, or remove that folder
cls --name forged
    runs/forged/...: all 1 checkpoints are damaged; put a copy back, or start a new run with another --name
cls --eval_only runs/forged/checkpoints/step_00000002
    ...: not a whole checkpoint (optimizer.pt was not written with it...
"""
REQUESTS = dict(re.findall(r"^(\w.*)\n {4}(.*)$", TABLE, re.MULTILINE))  # command -> line


def matches(expected: str, line: str) -> bool:
    return bool(re.fullmatch(".*".join(map(re.escape, expected.split("..."))), line))


def split_command(command: str) -> list[str]:
    """The arguments of a row's command, as `several` takes them."""
    recipe, *args = shlex.split(command.replace("FIRST", FIRST).replace(";", r"\;"))
    if not {"--config", "--eval_only"} & set(args):
        preset = "det_digits" if recipe == "det" else "digits"
        args = ["--config", f"recipes/presets/{preset}.yaml"] + args
    return [f"recipes/{recipe}.py"] + args


def enter_folder(folder: Path) -> None:
    os.chdir(folder)
    os.environ["HF_HOME"] = str(folder / "hub")


@pytest.fixture(scope="module")
def a_desk(forks, tmp_path_factory) -> Path:
    """The folder of a beginner: data, weights, settings, a run of each recipe; and files that do harm."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "weights.pth").write_text("weights")
    draw_stripes(desk / "pets", (8, 8))
    for number, name in enumerate(("cat", "dog")):
        (desk / f"pets/stuff_{number}").rename(desk / "pets" / name)
    (desk / "recipes").symlink_to(ROOT / "recipes")
    (desk / "scenes").mkdir()
    draw_scenes(desk / "scenes")
    for name, changed in CHANGED_SCENES.items():
        shutil.copytree(desk / "scenes", desk / name)
        for part in ("train", "val"):
            content = read(desk / "scenes" / f"{part}.json")
            changed(content)
            (desk / name / f"{part}.json").write_text(json.dumps(content))
    for command in (FIRST, FIRST_DET):
        recipe, *args = split_command(command)
        ended = forks.start(
            args, recipe=Path(recipe).stem, before=partial(enter_folder, desk)
        ).end()
        assert ended.code == 0, ended
    shutil.copytree(desk / "runs/first", desk / "runs/forged")
    shutil.copytree(desk / "runs/first", desk / "runs/bare", ignore=shutil.ignore_patterns("best"))
    (desk / "runs/forged/checkpoints/step_00000002/optimizer.pt").write_bytes(
        pickle.dumps(Malicious(desk / "executed"))
    )
    return desk


CHANGED_SCENES: dict[str, Callable[[dict], object]] = {
    "resized": lambda coco: coco["images"][1].update(width=640, height=480),
    "strangers": lambda coco: coco["categories"][0].update(name="emu"),
    "inverted": lambda coco: coco["annotations"][5].update(bbox=[30, 10, -20, 10]),
}


def read_folder(folder: Path) -> dict[str, bytes | None]:
    """Every file below `folder`, and None for a folder; without what may grow: log.txt and the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name not in ("log.txt", ".lock")
    }


@pytest.fixture(scope="module")
def answers(forks, a_desk) -> dict[str, dict]:
    """What each command of the table was answered, by one world of two ranks."""
    before = read_folder(a_desk)
    file = a_desk.parent / "CASES.json"
    file.write_text(json.dumps(list(map(split_command, REQUESTS))))
    main = partial(several.main, Path("recipes/cls.py"), file, False)
    ended = forks.run_main(2, main, {CACHE: None}, partial(enter_folder, a_desk), timeout=600)
    assert ended.returncode == 0 and not ended.stderr.strip(), "more is printed than the refusals"
    assert read_folder(a_desk) == before, "something was left behind"
    return dict(zip(REQUESTS, read(file.with_name("OUTCOMES.json")), strict=True))


@pytest.mark.parametrize("command", REQUESTS)
def test_a_mistake_is_answered_by_one_line_on_all_ranks(answers, command) -> None:
    """Else a user would read a traceback, wait, or find half a run."""
    answer = answers[command]
    assert answer["outcome"] == "refused" and matches(REQUESTS[command], answer["text"]), answer[
        "text"
    ]


@pytest.mark.smoke
def test_what_matches_a_line_of_the_table() -> None:
    assert (
        matches("a ... c", "a b c") and not matches("a ... c", "a b d") and not matches("a", "a b")
    )


# ---- a launch that can't work, and what a person then sees

LAUNCHES = {  # words of a launch, and the line that the recipe says
    "-m accelerate.commands.launch --config_file accelerate_configs/multi_cpu.yaml "
    "recipes/det.py --data inverted": (
        "det.py: ...train.json: 1 of 58 boxes end before they begin ..."
    ),
    # Without a file of accelerate_configs/, Accelerate's own words stand around the line.
    "-m accelerate.commands.launch recipes/cls.py": (
        "cls.py: launched for 1 GPU, but this machine shows none: check the driver and "
        "CUDA_VISIBLE_DEVICES, or train on the CPU with --config_file accelerate_configs/cpu.yaml "
        "before the recipe"
    ),
    # Wrong words need no process group.
    "-m torch.distributed.run --nproc_per_node 2 --rdzv_backend machines recipes/cls.py --lr fast": (
        "cls.py: --lr fast: must be a number"
    ),
}
LATE = "cls.py: no"
FAILS = """
import os, signal, sys, time
from pathlib import Path
from common.errors import Refused
from common.launching import launch

def main():
    kind, refused = sys.argv[1], Path(sys.argv[2])
    if os.environ["RANK"] == "1":
        if kind == "raises":
            raise ValueError("of the test")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "late":
        while not refused.exists():
            time.sleep(0.01)
        time.sleep(2)  # many times the interval at which the launcher looks for a process that failed
    else:
        time.sleep(600)
    refused.touch()
    raise Refused("no")

launch.run(main)
"""


@pytest.fixture(scope="module")
def launches(launch, a_desk, tmp_path_factory) -> Iterator[dict[str, Started]]:
    """Launches that can't work, at once, by the line that the recipe says; the last is refused
    first on the second rank.
    """
    folder = tmp_path_factory.mktemp("launches")
    started = {}
    for command, line in LAUNCHES.items():
        args = [a_desk / word if word == "inverted" else word for word in command.split()]
        env = {"CUDA_VISIBLE_DEVICES": ""}
        started[line] = launch.start_python(args + ["--output_dir", folder / "runs"], env=env)
    (folder / "cls.py").write_text(FAILS)
    started[LATE] = launch.start("multi_cpu", [folder / "cls.py", "late", folder / "refused"])
    yield started
    for each in started.values():
        each.finish()
    assert not any(folder.glob("runs/*")), "half a run was left behind"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("line", list(LAUNCHES.values()) + [LATE])
def test_a_launch_that_cannot_work_is_answered_by_one_line(launches, line) -> None:
    """Whatever launchers and other ranks say about it."""
    done = launches[line].finish()
    has_other_lines = "1 GPU" in line or "--lr" in line
    lines = [
        text
        for text in done.stderr.splitlines()
        if not has_other_lines or text.startswith("cls.py: ")
    ]
    assert len(lines) == 1 and matches(line, lines[0]), done
    assert (done.returncode == 2 and done.stdout == "") or ("1 GPU" in line and done.returncode), (
        done
    )


def test_a_launcher_shows_a_crash_once(launch, tmp_path) -> None:
    """Else the cause would stand between two tracebacks of the launcher."""
    script = tmp_path / "cls.py"
    host = os.uname().nodename
    script.write_text(FAILS)
    started = [launch.start("multi_cpu", [script, kind, tmp_path]) for kind in ("raises", "killed")]
    raised, killed = (each.finish() for each in started)
    assert raised.returncode == killed.returncode == 1
    process = rf"{host}: process \d+ \(local rank 1\)"
    pattern = rf"Traceback .*\nValueError: of the test\non rank 1 \({host}\)\n"
    pattern += rf"{process} failed with exit code 1, see .*"
    assert re.fullmatch(pattern, raised.stderr, re.DOTALL), raised
    assert raised.stderr.count("Traceback") == 1 and raised.stderr.count("\n") < 12
    assert re.fullmatch(rf"{process} was killed by SIGKILL: by a person, or .*\n", killed.stderr), (
        killed
    )


# ---- while it runs


def print_to_a_full_disk() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def test_a_run_outlives_its_terminal(forks, a_desk, tmp_path) -> None:
    args = split_command(FIRST)[1:] + ["--data", a_desk / "pets", "--output_dir", tmp_path]
    ended = forks(args, before=print_to_a_full_disk)
    assert ended.code == 0 and re.fullmatch(
        ".*rest of it is lost.*No space left on device\n", ended.stderr
    ), ended
    assert read(tmp_path / "first/status.json")["status"] == "finished"
    assert "finished  2 steps" in (tmp_path / "first/log.txt").read_text()
