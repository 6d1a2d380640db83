"""The classification recipe refuses what it can't do in one line on every rank, and leaves what was there as it was.

Every case is the real recipe on two ranks: each must refuse on both with the same single line, which names the value, the
limit and the way out. Some start with `accelerate launch` and the script itself, to see what a person then sees.
"""

import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from common.checkpoints.store import verify
from common.run.folder import RunFolder
from tests.harness.disks import disk, mount
from tests.harness.forked import Ended
from tests.harness.launching import NO_NETWORK, Bad
from tests.harness.outcomes import seal
from tests.harness.waiting import Limit

SMALL = [
    "--model",
    "test_vit",
    "--opt",
    "sgd",
    "--global_batch_size",
    8,
    "--eval_every",
    1000,
    "--schedule",
    "constant",
]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file below `folder`, and None for a folder; without what may grow or change hands: log.txt and the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name not in ("log.txt", ".lock")
    }


# ---- before there is a process group


COMMAND_LINES = {
    "unknown flag": Bad(["--learning_rate", 1], "unknown flag --learning_rate; here it is --lr"),
    "misspelt flag": Bad(
        ["--global_batch_sise=8"], "unknown flag --global_batch_sise; did you mean global_batch_size.*"
    ),
    "negated unknown flag": Bad(["--no_pretraind"], "unknown flag --no_pretraind; did you mean pretrained.*"),
    "ill-typed number": Bad(["--epochs", "ten"], "--epochs ten: must be a number"),
    "fraction for a count": Bad(["--max_steps", "1.5"], "--max_steps 1.5: must be a whole number"),
    "not a number": Bad(["--lr", "nan"], "--lr nan: must be a finite number"),
    "infinite": Bad(["--epochs", "inf"], "--epochs inf: must be a finite number"),
    "infinite in disguise": Bad(["--lr", "1e999"], "--lr inf: must be a finite number"),
    "not a number in the recipe's own fields": Bad(["--drop_path", "nan"], "--drop_path nan: must be a finite number"),
    "negative": Bad(["--max_steps", -1], "--max_steps -1: must be between 0 and 1000000000"),
    "too large": Bad(["--momentum", 2], "--momentum 2.0: must be between 0 and 1"),
    "too large in the recipe's own fields": Bad(["--drop", 1.5], "--drop 1.5: must be between 0 and 1"),
    "negative size": Bad(["--image_size", -3], "--image_size -3: must be between 0 and 8192"),
    "norm groups of none": Bad(["--norm_batch_size", 0], "--norm_batch_size 0: must be at least 2"),
    "huge seed": Bad(["--seed", 10**30], "--seed 10+: must be between 0 and [0-9]+"),
    "unknown choice": Bad(["--batch_norm", "all"], "--batch_norm all: must be one of local, group, .*"),
    "a value for a switch": Bad(["--pretrained", "true"], "--pretrained takes no value: give --pretrained or --no_.*"),
    "no value": Bad(["--lr", "--seed", 1], "--lr needs a value"),
    "a word too many": Bad(["0.1"], "Unrecognized options: 0.1; each value stands behind its flag, .*"),
    "empty value": Bad(["--data", ""], "--data is empty: give it a value, or leave it out for digits"),
    "no preset": Bad(
        ["--config", "recipes/presets/digit.yaml"], ".*digit.yaml: no such file; did you mean .*digits.yaml.*"
    ),
    "a preset from a device": Bad(["--config", "/dev/zero"], "--config /dev/zero: can't be read: not a regular file"),
    "no user": Bad(
        ["--data", "~nosuchuser/x"], "--data ~nosuchuser/x: there is no user nosuchuser; a folder of that .*"
    ),
    "a long name": Bad(["--resume", "x" * 256], "--resume x+: is too long for a path: .*"),
    "two presets": Bad(["--config", "a.yaml", "--config=b.yaml"], "--config is given 2 times: name one file and .*"),
    "no preset named": Bad(["--config"], "--config --name: no such file"),  # the next word on the line
}
PRESETS = {
    "unknown key": ("model: test_vit\nlearning_rate: 1", "unknown key learning_rate; here it is --lr"),
    "misspelt key": ("global_batchsize: 8", "unknown key global_batchsize; did you mean global_batch_size.*"),
    "key given twice": ("lr: 1\nmodel: test_vit\nlr: 2", "not readable as YAML: lr is given twice in .* line 3.*"),
    "ill-typed key": ("epochs: ten", "--epochs ten: must be a number"),
    "text for a switch": ("pretrained: maybe", "pretrained: 'maybe' is not true or false"),
    "a switch for a number": ("lr: yes", "lr: True is not of the right type"),
    "a list": ("lr: [1, 2]", "lr must be a single value, not list"),
    "lists in lists": ("lr: " + "[" * 20_000, "not readable as YAML: nested too deeply .*"),
    "lists of lists": (
        "a: &a [x, x]\nb: &b [*a, *a]\nlr: [*b, *b]",
        r"not readable as YAML: \*a repeats a list or mapping .*",
    ),
    "a typed key": ("lr: !!int abc", "not readable as YAML: unknown tag .*"),
    "nothing": ("lr:", "lr must be a single value, not None"),
    "no mapping": ("just words", "must hold `key: value` lines, found a str"),
    "no YAML": ("lr: [1", "not readable as YAML: .*"),
    "no text": (b"\xff\xfe\x00\x01", "not readable as YAML: .*"),
    "code": (
        "name: !!python/object/apply:os.mkdir [MARKER]",
        "not readable as YAML: unknown tag tag:yaml.org,2002:python/object.*",
    ),
}


@pytest.fixture(scope="module")
def marker(tmp_path_factory) -> Path:
    """A folder that exists once code from a file has been executed."""
    return tmp_path_factory.mktemp("executed") / "yes"


@pytest.fixture(scope="module")
def refused_early(run_several, tmp_path_factory, marker):
    """What became of the command lines and presets above, where no process group can be formed."""
    folder = tmp_path_factory.mktemp("presets")
    cases = {name: bad.words for name, bad in COMMAND_LINES.items()}
    for name, (content, _) in PRESETS.items():
        file = folder / f"{name}.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.replace("MARKER", str(marker)).encode())
        cases[name] = ["--config", file]
    cases["help"] = ["--config", "recipes/presets/digits.yaml", "--lr", 1, "--help"]
    return run_several(2, cases, env=NO_NETWORK | {"COLUMNS": "80"})


@pytest.mark.parametrize("name", [*COMMAND_LINES, *PRESETS])
def test_a_wrong_word_is_refused_before_a_process_group_is_formed(refused_early, marker, name):
    outcome = refused_early[name]
    expected = COMMAND_LINES[name].text if name in COMMAND_LINES else rf"--config .*/{name}\.yaml: {PRESETS[name][1]}"
    assert outcome.outcome == "refused", outcome
    assert re.fullmatch(expected, outcome.text), outcome.text
    assert not outcome.folder.parent.exists() and not marker.exists()


def test_help_fits_a_terminal_and_begins_with_what_matters_most(refused_early):
    outcome = refused_early["help"]
    assert outcome.outcome == "exit" and outcome.text in ("None", "0"), outcome
    flags = re.findall(r"^[^-\w]*(--\w+)", outcome.stdout, flags=re.MULTILINE)
    assert flags[:3] == ["--config", "--data", "--model"] and flags.index("--batch_norm") < flags.index("--epochs")
    assert len(flags) > 60 and max(map(len, outcome.stdout.splitlines())) <= 80
    assert "Traceback" not in outcome.stdout


# ---- when data, model and plan are looked at


def pictures(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for index in range(count):
        Image.new("RGB", (32, 32), (index * 20 % 256, 100, 50)).save(folder / f"{index}.png")


def labelled(file: Path, labels: list[int]) -> Path:
    """A parquet file as of Hugging Face with the classes cat and dog, whatever its labels are."""
    image = Path(file.parent, "fine/cat/0.png").read_bytes()
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    schema = datasets.Features(features).arrow_schema
    rows = {"image": [{"bytes": image, "path": None}] * len(labels), "label": labels}
    pa.parquet.write_table(pa.table(rows, schema=schema), file)
    return file


@pytest.fixture(scope="module")
def bad_data(tmp_path_factory) -> Path:
    """A folder of what can't be trained on."""
    folder = tmp_path_factory.mktemp("bad data")
    pictures(folder / "fine/cat", 8)
    pictures(folder / "fine/dog", 8)
    shutil.copytree(folder / "fine", folder / "an empty class")
    (folder / "an empty class/emu").mkdir()
    pictures(folder / "one class/cat", 8)
    pictures(folder / "no classes", 8)
    (folder / "nothing").mkdir()
    shutil.copytree(folder / "fine", folder / "test only/Test")
    (folder / "gone.csv").write_text("file,class\n" + "".join(f"photos/{n}.png,{n % 2}\n" for n in range(30)))
    shutil.copytree(folder / "fine", folder / "a new class/train")
    shutil.copytree(folder / "fine", folder / "a new class/val")
    pictures(folder / "a new class/val/emu", 1)
    (folder / "shards").mkdir()
    (folder / "shards/train-0000.tar").touch()
    labelled(folder / "beyond.parquet", [0, 1, 0, 7])
    labelled(folder / "below.parquet", [0, 1, 0, -1])
    (folder / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    (folder / "notes.txt").write_text("not data")
    os.mkfifo(folder / "pipe")
    (folder / "zero.parquet").symlink_to("/dev/zero")
    (folder / "piped model").mkdir()
    (folder / "piped model/config.json").write_text('{"architecture": "test_resnet"}')
    (folder / "piped model/model.safetensors").symlink_to("../pipe")
    shutil.copytree(folder / "fine", folder / "hostile/train")
    shutil.copytree(folder / "fine", folder / "hostile/val")
    for part in ("train", "val"):
        place = folder / "hostile" / part / "cat"
        (place / "pipe.jpg").symlink_to("../../../pipe")
        (place / "zero.png").symlink_to("/dev/zero")
        (place / "circle").symlink_to("../dog")
        (place.parent / "dog/circle").symlink_to("../cat")
        (place / "\x1b[2J.png").write_bytes(b"no picture")
        Image.new("RGB", (20_000, 1)).save(place / "stripe.jpg")
    Image.new("1", (89_000_000, 1)).save(folder / "hostile/val/cat/thread.png")
    (folder / "weights.yaml").write_text("cat: 1\nemu: 2")
    (folder / "no weights.yaml").write_text("just words")
    (folder / "ill weights.yaml").write_text("cat: 1\ndog: -2")
    shutil.copytree(folder / "fine", folder / "many broken/train")
    shutil.copytree(folder / "fine", folder / "many broken/val")
    for file in (folder / "many broken/train").glob("*/[0-5].png"):
        file.write_bytes(b"no picture")
    return folder


IN_DATA = {  # DATA stands for the folder above
    "empty class": Bad(
        ["--data", "DATA/an empty class"], "DATA/an empty class/emu: no images in this class folder; add .*"
    ),
    "one class": Bad(["--data", "DATA/one class"], "DATA/one class: only the class folder cat/; .*two classes or more"),
    "no classes": Bad(
        ["--data", "DATA/no classes"], "DATA/no classes: no class folders; images belong in one subfolder per .*"
    ),
    "empty folder": Bad(
        ["--data", "DATA/nothing"], "DATA/nothing: no class folders; images belong in one subfolder per class.*"
    ),
    "no folder": Bad(["--data", "DATA/nowhere"], "--data DATA/nowhere: nothing is there; expected digits, .*"),
    "test without train": Bad(
        ["--data", "DATA/test only"],
        "--data DATA/test only: no part to train on, only Test; rename one to train, or .*",
    ),
    "no such part": Bad(["--split", "tset"], "--split tset: --data digits has no such part; there is train, val"),
    "missing files": Bad(
        ["--data", "DATA/gone.csv"],
        r"--data .*: 30 of 30 images are missing, the first is .*/photos/0.png \(paths start .*",
    ),
    "class in val only": Bad(
        ["--data", "DATA/a new class"], "DATA/a new class/val/emu: a class that .*/train does not have.*"
    ),
    "not data": Bad(
        ["--data", "DATA/notes.txt"], "--data DATA/notes.txt: a file of a kind that is not known; expected .*"
    ),
    "tar shards": Bad(
        ["--data", "DATA/train-{0000..0009}.tar"], ".*shards, .* are not supported yet; extract to an image folder.*"
    ),
    "folder of tar shards": Bad(["--data", "DATA/shards"], "DATA/shards: tar/WebDataset shards, .*convert to parquet"),
    "streaming": Bad(["--data", "streaming:imagenet-1k"], "--data streaming:imagenet-1k: .* are not supported yet; .*"),
    "label beyond": Bad(
        ["--data", "DATA/beyond.parquet"], ".*row 3 has label 7 .*but the 2 classes are 0 to 1; remove .*"
    ),
    "label below": Bad(
        ["--data", "DATA/below.parquet"], ".*row 3 has label -1 .*but the 2 classes are 0 to 1; remove .*"
    ),
    "torn parquet": Bad(
        ["--data", "DATA/torn.parquet"], "--data DATA/torn.parquet: can't be read as a Hugging Face .*"
    ),
    "no such column": Bad(
        ["--data", "DATA/beyond.parquet", "--label_column", "kind"], "--label_column kind: is no column .*"
    ),
    "nothing held out": Bad(["--data", "DATA/fine", "--val_share", 0.01], "--val_share 0.01 of at most 8 .*; raise it"),
    "all held out": Bad(["--data", "DATA/fine", "--val_share", 1], "--val_share 1.0: must lie between 0 and 1, .*"),
    "weights of other classes": Bad(
        ["--data", "DATA/fine", "--class_weights", "DATA/weights.yaml"], ".*one positive weight a class; .*: dog, emu"
    ),
    "words for weights": Bad(
        ["--data", "DATA/fine", "--class_weights", "DATA/no weights.yaml"],
        ".*one positive weight a class; .*: cat, dog",
    ),
    "negative weight": Bad(
        ["--data", "DATA/fine", "--class_weights", "DATA/ill weights.yaml"], ".*one positive weight a class; .*: dog"
    ),
    "no room for a cache": Bad(
        ["--cache", 1_000_000], "--cache 1000000: 1,438 images take up to .* GiB, and memory has .*"
    ),
    "no folder for a cache": Bad(
        ["--cache", 32, "--cache_folder", "DATA/nowhere"], "--cache_folder DATA/nowhere: No such file .*; name a .*"
    ),
    "a policy where the device decodes": Bad(
        ["--decode", "device", "--augment", "rand-m5-n1"], "--decode device: a policy .*; leave out --augment, or .*"
    ),
    "a cache where the device decodes": Bad(["--decode", "device", "--cache", 32], "--decode device: --cache .*"),
    "a folder without a cache": Bad(["--cache_folder", "DATA"], "--cache_folder DATA: nothing is kept there .*"),
    "weights from a FIFO": Bad(
        ["--data", "DATA/fine", "--class_weights", "DATA/pipe"],
        "--class_weights DATA/pipe: can't be read: not a regular .*",
    ),
    "parquet from a device": Bad(
        ["--data", "DATA/zero.parquet"], "--data DATA/zero.parquet: can't be read .*: not a regular file"
    ),
    "no weights": Bad(["--class_weights", "heavy"], "--class_weights heavy: none, sqrt, balanced or a YAML file .*"),
}
IN_SETTINGS = {
    "unknown model": Bad(
        ["--model", "restnet50"], "--model restnet50: not a model of timm .*; did you mean resnet50, .*"
    ),
    "model from a FIFO": Bad(
        ["--model", "DATA/piped model"],
        "--model DATA/piped model: can't be made.*: .*model.safetensors: not a regular file",
    ),
    "a crop without bound": Bad(["--crop_pct", 1e-9], "the model's images can't be made .*look at --image_size and .*"),
    "unknown tag": Bad(["--model", "resnet50.a9"], r"--model resnet50.a9: can't be made: .*a9.*"),
    "no model in folder": Bad(["--model", "recipes"], "--model recipes: the folder has no config.json; .*"),
    "unknown optimizer": Bad(["--opt", "adamww"], "--opt adamww: not an optimizer of timm.*; did you mean adamw, .*"),
    "unknown policy": Bad(
        ["--augment", "brand-m9"], "--augment brand-m9: not a policy of timm .*; examples: rand-m9-.*"
    ),
    "half a policy": Bad(["--augment", "rand-m9-mstdx"], "--augment rand-m9-mstdx: not a policy of timm .*"),
    "batch below processes": Bad(
        ["--global_batch_size", 1], "--global_batch_size 1 leaves some of 2 processes without .*"
    ),
    "odd batch with MixUp": Bad(
        ["--global_batch_size", 15, "--mixup", 0.5], ".* 15 does not divide into the 2 .*take 1[46].*"
    ),
    "odd micro-batch with CutMix": Bad(
        ["--max_micro_batch_size", 1, "--cutmix", 1], "--max_micro_batch_size 1 is less .*"
    ),
    "norm groups in batch": Bad(
        ["--batch_norm", "group", "--norm_batch_size", 12],
        "--global_batch_size 64 does not divide into the 12 samples that belong together .*norm_batch_size.*: take 60 or 72",
    ),
    "norm groups in micro-batch": Bad(
        ["--batch_norm", "group", "--max_micro_batch_size", 8], "--max_micro_batch_size 8 is less than the 16 .*"
    ),
    "global norm in pieces": Bad(
        ["--batch_norm", "global", "--max_micro_batch_size", 8],
        "--batch_norm global needs the whole share .* not 4 micro-steps: raise --max_micro_batch_size to 32, .*",
    ),
    "copies in batch": Bad(["--repeats", 3], "--global_batch_size 64 does not divide by --repeats 3: take 66"),
    "no steps": Bad(["--epochs", 0], "--epochs 0.0: no step to make; .*"),
    "size between patches": Bad(
        ["--model", "test_vit", "--image_size", 33],
        "the model can't make a step: Input height .33. .*; look at --image_size.*",
    ),
    "sizes of no number": Bad(
        ["--image_sizes", "160-224"], "--image_sizes 160-224: must be sides of squares in pixels joined by commas, .*"
    ),
    "sizes that the model can't take": Bad(
        ["--model", "test_vit_relpos", "--image_sizes", "32,48"],
        "--image_sizes: VisionTransformerRelPos can't take images of 48 x 48 pixels: .*; leave out this size, or take .*",
    ),
    "a batch norm of one": Bad(
        ["--global_batch_size", 2], r"the model can't make a step: Expected more than 1 value per channel .*\[1, .*"
    ),
    "name with slash": Bad(["--name", "a/b"], "--name a/b: must be a folder name without slashes; where it lies is .*"),
    "name of the folder above": Bad(["--name", ".."], "--name ..: must be a folder name without slashes; .*"),
    "folder below a file": Bad(
        ["--output_dir", "pyproject.toml/runs"], "--output_dir pyproject.toml/runs: .* can't be written .*"
    ),
    "no checkpoint": Bad(
        ["--resume", "/nowhere/step_00000002"], "--resume /nowhere/step_00000002: no checkpoint, nothing is there.*"
    ),
    "no checkpoint in the folder": Bad(
        ["--resume", "recipes"], "--resume recipes: no checkpoint, no manifest.json is in it; name .*"
    ),
    "nothing to evaluate": Bad(
        ["--eval_only", "/nowhere/best"],
        "--eval_only /nowhere/best: no exported model and no checkpoint, nothing is there; .*",
    ),
}
LATE = IN_DATA | IN_SETTINGS


@pytest.fixture(scope="module")
def refused(run_several, bad_data):
    cases = {name: [str(word).replace("DATA", str(bad_data)) for word in bad.words] for name, bad in LATE.items()}
    cases["hostile"] = [
        *SMALL,
        "--data",
        bad_data / "hostile",
        "--max_steps",
        8,
        "--workers",
        1,
        "--max_broken_share",
        1,
    ]
    return run_several(2, cases, timeout=400)


@pytest.mark.parametrize("name", LATE)
def test_a_request_that_cannot_be_met_is_refused_on_all_ranks_and_leaves_no_trace(refused, bad_data, name):
    outcome = refused[name]
    assert outcome.outcome == "refused", outcome
    assert re.fullmatch(LATE[name].text.replace("DATA", re.escape(str(bad_data))), outcome.text), outcome.text
    if name != "name of the folder above":
        assert not outcome.folder.exists()


def test_images_that_are_made_to_do_harm_are_named_and_training_goes_on(refused, bad_data):
    """FIFOs, devices, stripes that would be enlarged to gigabytes, folders in circles, names that clear a terminal."""
    outcome = refused["hostile"]
    assert outcome.outcome == "ok", outcome
    log = (outcome.folder / "log.txt").read_text()
    for name, why in (
        ("pipe.jpg", "not a regular file"),
        ("zero.png", "not a regular file"),
        (r"\x1b[2J.png", "not an image"),
    ):
        assert log.count(f"can't be read, a stand-in takes its place: {bad_data}/hostile/train/cat/{name}: {why}") == 1
    assert "\x1b" not in log + outcome.stdout
    assert outcome.rows[-1]["eval/count"] == 2 * (8 + 8 + 5)  # each class has what the other one has, by a link


def cache_in(folder: Path) -> None:
    os.environ["HF_HOME"] = str(folder)


def test_each_of_them_is_one_line_on_stderr(forks, bad_data, tmp_path):
    """The same command lines on one process: nothing comes before or after the line, no warning and no traceback."""
    for name, bad in LATE.items():
        if name in ("batch below processes", "a batch norm of one"):
            continue  # fine on one process
        words = [str(word).replace("DATA", str(bad_data)) for word in bad.words]
        words += [] if "--output_dir" in words else ["--output_dir", tmp_path / "runs"]
        ended = forks(*words, before=partial(cache_in, tmp_path))
        assert ended.code == 2 and re.fullmatch("cls.py: [^\n]+\n", ended.stderr), (name, ended)
    assert not any((tmp_path / "runs").glob("*"))


# ---- what a person sees


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that is there to be read: the launcher adds none, and ends as the recipe did where it knows how."""
    one_process = "cpu.yaml" in " ".join(done.args).replace("multi_cpu.yaml", "")
    assert done.returncode == (1 if one_process else 2), done
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("cls.py: "), done.stderr
    return done.stderr.removeprefix("cls.py: ").strip()


@pytest.mark.smoke
def test_a_refusal_of_two_ranks_is_one_line_and_the_launcher_has_no_more_to_say(launch, tmp_path):
    """The real script; what is refused needs the process group, whose ranks both know of it."""
    words = ["--dtype", "float64", "--output_dir", tmp_path / "runs"]
    done = launch("multi_cpu", "recipes/cls.py", *words, flags=["--mixed_precision", "bf16"])
    assert re.fullmatch("--dtype float64 would be computed in bf16, as the launch says: launch with .*", said(done))
    assert done.stdout == "" and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "name, config, flags, words, env, text",
    [
        ("flag", "multi_cpu", [], ["--learning_rate", 1], NO_NETWORK, "unknown flag --learning_rate; here it is --lr"),
        ("fp16", "cpu", ["--mixed_precision", "fp16"], [], {}, "fp16 on a CPU would silently train in fp32: use .*"),
        (
            "no GPU",
            "multi_gpu",
            ["--num_processes", 2],
            [],
            NO_NETWORK | {"CUDA_VISIBLE_DEVICES": ""},
            "launched for .* this machine shows none: .*",
        ),
    ],
)
def test_a_launch_that_cannot_work_is_refused_in_one_line_before_a_process_group_is_formed(
    launch, tmp_path, name, config, flags, words, env, text
):
    done = launch(config, "recipes/cls.py", "--output_dir", tmp_path / "runs", *words, flags=flags, env=env)
    assert re.fullmatch(text, said(done))
    assert not (tmp_path / "runs").exists()


LATE_FIRST_RANK = """
import os, sys, time
from pathlib import Path
from common.launching import launch
from common.errors import Refused

def main():
    refused = Path(sys.argv[1])
    if os.environ["RANK"] == "0":
        while not refused.exists():
            time.sleep(0.01)
        time.sleep(2)  # many times the interval at which the launcher looks for a process that failed
    refused.touch()
    raise Refused("no")

launch.run(main)
"""


def test_the_line_is_not_lost_when_the_rank_that_says_it_is_the_last_to_come_to_it(launch, tmp_path):
    """The launcher ends all ranks as soon as one has ended."""
    script = tmp_path / "cls.py"
    script.write_text(LATE_FIRST_RANK)
    assert said(launch("multi_cpu", script, tmp_path / "refused")) == "no"


ONE_FAILS = """
import os, signal, sys, time
from pathlib import Path
from common.launching import launch

def main():
    if os.environ["RANK"] == "1":
        if sys.argv[1] == "raises":
            raise ValueError("of the test")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

if sys.argv[1] == "asked":  # before it can hear it
    Path(sys.argv[2], os.environ["RANK"]).touch()
    time.sleep(600)
launch.run(main)
"""


def test_a_launcher_shows_a_crash_once_and_ends_without_a_word_where_it_was_asked_to(launch, tmp_path):
    script, host = tmp_path / "cls.py", os.uname().nodename
    script.write_text(ONE_FAILS)
    started = {kind: launch.start("multi_cpu", script, kind, tmp_path) for kind in ("raises", "killed")}
    raised, killed = (each.finish() for each in started.values())
    assert raised.returncode == killed.returncode == 1
    of_rank, process = (
        rf"Traceback .*\nValueError: of the test\non rank 1 \({host}\)\n",
        r"process \d+ \(local rank 1\)",
    )
    assert re.fullmatch(rf"{of_rank}{host}: {process} failed with exit code 1, see .*", raised.stderr, re.DOTALL), (
        raised
    )
    assert raised.stderr.count("Traceback") == 1 and raised.stderr.count("\n") < 12
    assert re.fullmatch(rf"{host}: {process} was killed by SIGKILL: by a person, or .*\n", killed.stderr), killed

    asked = launch.start("multi_cpu", script, "asked", tmp_path)
    for _ in Limit(60).turns():
        if all((tmp_path / str(rank)).exists() for rank in (0, 1)) or asked.process.poll() is not None:
            break
    asked.process.send_signal(signal.SIGINT)
    done = asked.finish()
    assert done.returncode == 75 and done.stderr == done.stdout == "", done


# ---- a run folder that holds something already


class Payload:
    """Makes the folder `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def forge(file: str, sealed: bool) -> Callable[[Path, bytes], None]:
    """Put a pickle in the place of a file of the checkpoint, or beside them."""

    def change(checkpoint: Path, payload: bytes) -> None:
        (checkpoint / file).write_bytes(payload)
        if sealed:
            seal(checkpoint)

    return change


def of_another_model(checkpoint: Path, payload: bytes) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["head.weight"] = torch.zeros(1000, 64)
    tensors["new.bias"] = tensors.pop("norm.bias")
    save_file(tensors, checkpoint / "model.safetensors")
    seal(checkpoint)


def of_another_version(checkpoint: Path, payload: bytes) -> None:
    record = json.loads((checkpoint / "record.json").read_text())
    del record["ledger"]
    (checkpoint / "record.json").write_text(json.dumps(record))
    seal(checkpoint)


def without_optimizer(checkpoint: Path, payload: bytes) -> None:
    (checkpoint / "optimizer.safetensors").unlink()
    seal(checkpoint)


def without_identity(checkpoint: Path, payload: bytes) -> None:
    record = json.loads((checkpoint / "record.json").read_text())
    (checkpoint / "record.json").write_text(json.dumps(record | {"identity": ["none"]}))
    seal(checkpoint)


def link_to_device(checkpoint: Path, payload: bytes) -> None:
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").symlink_to("/dev/zero")


def untouched(checkpoint: Path, payload: bytes) -> None:
    pass


DAMAGED = "RUN/checkpoints: all 1 checkpoints are damaged; put a copy back, or start a new run with another --name"
FILES = ("model.safetensors", "optimizer.safetensors", "record.json", "manifest.json")
STANDING = {  # what is done to the checkpoint of two steps, and what the next start says to it
    **{f"pickle as {file}": (forge(file, False), Bad([], DAMAGED)) for file in FILES},
    **{f"pickle as {file}, sealed": (forge(file, True), Bad([], DAMAGED)) for file in FILES[:-1]},
    "pickle beside": (forge("custom_checkpoint_0.pkl", False), Bad([], DAMAGED)),
    "pickle beside, by path": (
        forge("optimizer.pt", False),
        Bad(
            ["--resume", "RUN/checkpoints/step_00000002"],
            ".*: not a whole checkpoint .optimizer.pt was not written with it.",
        ),
    ),
    "pickle beside, to evaluate": (
        forge("optimizer.pt", False),
        Bad(["--eval_only", "RUN/checkpoints/step_00000002"], ".*: not a whole checkpoint .optimizer.pt was not .*"),
    ),
    "another model": (
        untouched,
        Bad(
            ["--model", "test_convnext"],
            ".*step_00000002 belongs to another run: model test_vit there, test_convnext here; .*",
        ),
    ),
    "another model's tensors": (
        of_another_model,
        Bad(
            [],
            r".* is of another model: head.weight \(\(1000, 64\) there, \(10, 64\) here\), new.bias .*missing here.*, norm.*",
        ),
    ),
    "another model's, to evaluate": (
        untouched,
        Bad(["--model", "test_convnext", "--eval_only", "RUN/checkpoints/step_00000002"], ".* is of another model: .*"),
    ),
    "another version": (of_another_version, Bad([], ".*step_00000002 is not as this version .*KeyError: 'ledger'.*")),
    "no optimizer": (without_optimizer, Bad([], ".*step_00000002 is not as this version .*KeyError: 'optimizer'.*")),
    "no identity": (without_identity, Bad([], ".*step_00000002: its record.json does not say of which run it is; .*")),
    "a device as manifest": (link_to_device, Bad([], DAMAGED)),
    "a new start": (
        untouched,
        Bad(["--resume", "never"], "--resume never: RUN holds step_00000002; give this run another.*"),
    ),
    "no such tracker": (
        untouched,
        Bad(["--tracker", "trackio"], "tracker trackio isn't installed: pip install trackio, or .*"),
    ),
    "two at once": (
        untouched,
        Bad([], r"RUN is in use by process \d+ on .*: wait for it, stop it, or give this run another .*"),
    ),
}


@pytest.fixture(scope="module")
def two_steps(forks, tmp_path_factory) -> Path:
    """The folder of a run of two steps."""
    output = tmp_path_factory.mktemp("good")
    ended = forks(
        *SMALL, "--max_steps", 2, "--tracker", "none", "--workers", 0, "--output_dir", output, "--name", "run"
    )
    assert ended.code == 0, ended
    return output / "run"


@pytest.fixture(scope="module")
def started_again(run_several, two_steps, marker, tmp_path_factory):
    """What became of each start in a copy of that folder: outcome, and the folder before and after."""
    root, cases, before = tmp_path_factory.mktemp("standing"), {}, {}
    held = []
    for name, (change, bad) in STANDING.items():
        run = root / name / "run"
        shutil.copytree(two_steps, run)
        change(run / "checkpoints/step_00000002", pickle.dumps(Payload(marker)))
        words = [str(word).replace("RUN", str(run)) for word in bad.words]
        cases[name] = [*SMALL, "--max_steps", 4, "--output_dir", root / name, "--name", "run", *words]
        before[name] = snapshot(run)
        if name == "two at once":
            held.append(RunFolder(run))
    outcomes = run_several(2, cases)
    held.pop().close()
    return {name: (outcome, before[name], snapshot(outcome.folder)) for name, outcome in outcomes.items()}


@pytest.mark.parametrize("name", STANDING)
def test_a_start_that_is_refused_executes_nothing_and_loses_nothing(started_again, marker, name):
    outcome, before, after = started_again[name]
    assert outcome.outcome == "refused", outcome
    expected = STANDING[name][1].text.replace("RUN", re.escape(str(outcome.folder)))
    assert re.fullmatch(expected, outcome.text), outcome.text
    assert after == before
    assert not marker.exists()


def test_the_pickle_of_these_tests_would_execute(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "yes")))
    assert (tmp_path / "yes").exists()


def test_a_model_folder_with_pickled_weights_executes_nothing(forks, two_steps, marker, tmp_path):
    model = tmp_path / "best"
    shutil.copytree(two_steps / "best", model)
    (model / "model.safetensors").unlink()
    torch.save(Payload(marker), model / "pytorch_model.bin")
    for flag in ("--model", "--eval_only"):
        ended = forks(flag, model, "--output_dir", tmp_path / "runs")
        assert ended.code == 2 and len(ended.stderr.splitlines()) == 1, ended
        assert ended.stderr.startswith(f"cls.py: --model {model}: can't be made"), ended
    assert not marker.exists() and not (tmp_path / "runs/run").exists()


# ---- a disk that takes no more


def test_a_read_only_folder_is_refused_and_left_as_it_is(forks, two_steps, tmp_path):
    with disk(tmp_path / "disk", "8m") as folder:
        shutil.copytree(two_steps, folder / "run")
        before = snapshot(folder)
        mount("mount", "-o", "remount,ro", folder)
        for name in ("run", "new"):
            ended = forks(*SMALL, "--max_steps", 4, "--output_dir", folder, "--name", name)
            assert ended.code == 2 and ended.stderr == (
                f"cls.py: --output_dir {folder}: {folder / name} can't be written (Read-only file system); "
                "name another folder\n"
            )
        assert snapshot(folder) == before


@pytest.mark.long
def test_a_full_disk_stops_all_ranks_with_one_line_and_a_larger_one_goes_on(run_several, forks, two_steps, tmp_path):
    """The disk holds one checkpoint, but not a second, for which the first would have to go before it is there."""
    words = [*SMALL, "--max_steps", 4, "--tracker", "none", "--workers", 0, "--name", "run"]
    with disk(tmp_path / "disk", "5m") as folder, disk(tmp_path / "tiny", "60k") as tiny:
        shutil.copytree(two_steps, folder / "run")
        before = snapshot(folder / "run")
        outcomes = run_several(
            2,
            {
                "full": [*words, "--output_dir", folder],
                "in rows": [*SMALL, "--max_steps", 500, "--log_every", 1, "--output_dir", tiny],
                "from the start": ["--output_dir", tiny],
            },
        )
        full, in_rows, fresh = outcomes.values()
        for outcome in outcomes.values():
            assert outcome.outcome == "refused", outcome
            assert re.fullmatch(".* can't be written .*No space left on device.*", outcome.text), outcome
            assert "\n" not in outcome.text and str(outcome.folder) in outcome.text
        after = snapshot(full.folder)
        assert before.keys() == after.keys()
        checkpoint = [name for name in before if name.startswith("checkpoints/")]
        assert len(checkpoint) == 5 and all(after[name] == before[name] for name in checkpoint)
        assert load_file(full.folder / "best/model.safetensors")
        for picture in full.folder.glob("pictures/*"):
            Image.open(picture).load()
        assert json.loads(after["status.json"])["status"] == "failed"

        steps = [row["step"] for row in in_rows.rows]
        assert steps == [*range(1, len(steps) + 1)] and 20 < len(steps) < 499
        assert not fresh.folder.exists()

        mount("mount", "-o", "remount,size=20m", folder)
        ended = forks(*words, "--output_dir", folder)
        assert ended.code == 0 and "resuming from step 2 of 4" in ended.stdout, ended
        assert [row["step"] for row in full.rows] == [2, 4]


def print_to_a_full_disk() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def test_a_run_outlives_the_terminal_that_it_prints_to(forks, tmp_path):
    words = [*SMALL, "--max_steps", 2, "--tracker", "none", "--workers", 0, "--output_dir", tmp_path, "--name", "run"]
    ended = forks(*words, before=print_to_a_full_disk)
    assert ended.code == 0 and ended.stderr == "", ended
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "finished"
    assert "finished  2 steps" in (tmp_path / "run/log.txt").read_text()


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_limit_on_file_sizes_is_said_and_an_older_checkpoint_stays_whole(forks, two_steps, tmp_path):
    """As a quota would: the checkpoint's small files fit, its tensors don't."""
    shutil.copytree(two_steps, tmp_path / "run")
    words = [*SMALL, "--max_steps", 4, "--tracker", "none", "--workers", 0, "--output_dir", tmp_path, "--name", "run"]
    ended: Ended = forks(*words, before=partial(limit_files, 500_000))
    assert ended.code == 2 and len(ended.stderr.splitlines()) == 1, ended
    assert re.match(
        rf"cls.py: {tmp_path}/run can't be written \(.*File too large.*\): make room, and the same", ended.stderr
    )
    assert verify(tmp_path / "run/checkpoints/step_00000002").step == 2
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000002"]
    ended = forks(*words)
    assert ended.code == 0 and "resuming from step 2 of 4" in ended.stdout, ended
