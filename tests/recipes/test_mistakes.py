"""Each usual mistake of a newcomer is answered with a message that helps.

The table is the page: a command as it is typed, and the only line that is then said. `...` stands for anything. The commands
run in a folder with the files of `a_desk`, on one process. Each ends with exit code 2 and leaves nothing behind. What two ranks
say, and files that are made to do harm, are in test_cls_bad_input.py and test_det_bad_input.py.
"""

import json
import os
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.harness import several
from tests.harness.drawings import draw_stripes
from tests.harness.forked import Forks
from tests.harness.launching import ROOT, as_digits

FIRST = "cls --data pets --name first --global_batch_size 8 --max_steps 2 --tracker none --workers 0"

MISTAKES = """
-- flags that other tools have
cls --learning_rate 0.1
    unknown flag --learning_rate; here it is --lr
cls --batch-size 32
    unknown flag --batch-size; here it is --global_batch_size, the total over all processes
cls -b 32
    Unrecognized options: -b, 32; here it is --global_batch_size, the total over all processes
cls epochs=10
    Unrecognized options: epochs=10; a flag begins with two dashes: --epochs 10
cls lr0=0.1
    Unrecognized options: lr0=0.1; a flag begins with two dashes: --lr0 0.1; here it is --lr
cls --wd 0.05
    unknown flag --wd; here it is --weight_decay
cls --imgsz 640
    unknown flag --imgsz; here it is --image_size
det --image_size 640
    unknown flag --image_size; here it is --short_sides
cls --accum_iter 4
    unknown flag --accum_iter; not needed: --max_micro_batch_size limits what a device takes at once, ...
cls --sync_bn
    unknown flag --sync_bn; here it is --batch_norm global for statistics over all processes
cls --model_ema
    unknown flag --model_ema; here it is --ema_decay 0.9999, a decay above 0 turns it on
cls --weights IMAGENET1K_V1
    unknown flag --weights; --model FOLDER for weights of your own, --pretrained for those that timm publishes
det --weights COCO_V1
    unknown flag --weights; here it is --init for a detector of this recipe, --pretrained for a backbone
cls --start-epoch 3
    unknown flag --start-epoch; not needed: the same command resumes (--resume for another checkpoint)
cls --detector fcos
    unknown flag --detector; it is a flag of recipes/det.py
cls --global_batchsize 8
    unknown flag --global_batchsize; did you mean global_batch_size...?
cls /data/imagenet
    Unrecognized options: /data/imagenet; each value stands behind its flag, as in --data FOLDER

-- what the launch decides, given to the recipe
cls --num_processes 2
    unknown flag --num_processes; it is a flag of accelerate launch, which stands before the recipe
cls --multi_gpu
    unknown flag --multi_gpu; it is a flag of accelerate launch, which stands before the recipe
cls --config_file accelerate_configs/cpu.yaml
    unknown flag --config_file; it is a flag of accelerate launch, which stands before the recipe
cls --nproc_per_node 8
    unknown flag --nproc_per_node; accelerate launch starts the processes: its --num_processes stands before the recipe
cls --amp
    unknown flag --amp; the file given to accelerate launch --config_file decides: one that ends in _bf16 or _fp16, ...
cls --device cuda:0
    unknown flag --device; the file given to accelerate launch --config_file decides: accelerate_configs/ has cpu.yaml, ...
cls --dtype bf16
    --dtype bf16: must be one of float32, float64

-- values
cls --lr 0,001
    --lr 0,001: must be a number
cls --lr
    --lr needs a value
cls --lr -0.1
    --lr -0.1: must be between 0 and 1000000
cls --max_steps 1e4
    --max_steps 1e4: must be a whole number
cls --image_size 224x224
    --image_size 224x224: must be a whole number
cls --epochs 0
    --epochs 0.0: no step to make; train longer, or take --eval_only
cls --label_smoothing 10
    --label_smoothing 10.0: must be between 0 and 1
cls --pretrained True
    --pretrained takes no value: give --pretrained or --no_pretrained
cls --batch_norm sync
    --batch_norm sync: must be one of local, group, node, global, frozen
cls --tracker mlflow
    --tracker mlflow: must be one of wandb, tensorboard, trackio, none
cls --schedule cosineannealing
    --schedule cosineannealing: must be one of cosine, linear, step, constant
cls --schedule step --step_epochs 30;60
    --step_epochs 30;60: must be epochs above 0, ...
cls --opt adammw
    --opt adammw: not an optimizer of timm that fits here; did you mean adamw...?
cls --augment randaugment
    --augment randaugment: not a policy of timm (...); examples: rand-m9-mstd0.5, augmix-m3-w3, original, v0, 3a
det --detector yolo
    --detector yolo: must be one of fcos, retinanet, faster_rcnn, mask_rcnn, rtdetr_v2, dfine, deimv2, rf_detr
det --levels 3
    --levels 3: must be two numbers joined by a dash, such as 3-7
det --short_sides 640x640
    --short_sides 640x640: must be lengths in pixels joined by commas, ...

-- sizes that do not fit
cls --global_batch_size 1
    the model can't make a step: Expected more than 1 value per channel ...; look at --image_size, --global_batch_size and ...
cls --global_batch_size 7 --mixup 0.2
    --global_batch_size 7 does not divide into the 2 samples that belong together (...): take 6 or 8
cls --global_batch_size 40 --batch_norm group
    --global_batch_size 40 does not divide into the 16 samples that belong together (...): take 32 or 48
cls --model test_vit --image_size 33
    the model can't make a step: Input height (33) should be divisible by patch size (16); look at --image_size, ...
det --detector faster_rcnn --variant torchvision_v2 --levels 2-5 --batch_norm group
    --batch_norm group: the heads of --variant torchvision_v2 see another number of proposals of each image, ...
det --width 100
    --width 100: the heads normalise 32 groups of channels; take a multiple of 32

-- models
cls --model resnet-50
    --model resnet-50: not a model of timm ...; did you mean resnet50, ...?
cls --model vit
    --model vit: not a model of timm ...; did you mean ...vit...?
cls --model yolov8n
    --model yolov8n: not a model of timm ...; timm.list_models() lists them
cls --model google/vit-base-patch16-224
    --model google/...: not a model of timm ...; there is no such folder, and a model of the hub is hf-hub:google/...
cls --model weights.pth
    --model weights.pth: a file; name the folder of a model that timm saved, such as a run's best/
cls --model empty
    --model empty: the folder has no config.json; one that timm saved has it, as a run's best/ does
det --model detector
    --model detector: its config.json names no architecture of timm; a detector is begun with by --init, ...
cls --model test_resnet --image_size 32 --drop_path 2
    --drop_path 2.0: must be between 0 and 1

-- files of settings
cls --config digits
    --config digits: no such file; did you mean recipes/presets/digits.yaml?
cls --config recipes/presets
    --config recipes/presets: a folder, not a file; did you mean ...?
cls recipes/presets/digits.yaml
    Unrecognized options: recipes/presets/digits.yaml; each value stands behind its flag, as in --data FOLDER
cls --config recipes/presets/coco_fcos_r50.yaml
    --config recipes/presets/coco_fcos_r50.yaml: is for recipes/det.py: cls.py has no detector
det --config runs/first/config.yaml
    --config runs/first/config.yaml: is for recipes/cls.py: det.py has no image_size
cls --config indented.yaml
    --config indented.yaml: not readable as YAML: mapping values are not allowed here ... line 2, ...
cls --config nested.yaml
    --config nested.yaml: unknown key optimizer; here it is --opt
cls --config list.yaml
    --config list.yaml: must hold `key: value` lines, found a list
cls --config mmdet.py
    --config mmdet.py: must hold `key: value` lines, found a str

-- data
cls --data pets/cat/0.png
    --data pets/cat/0.png: a file of a kind that is not known; expected digits, ...
cls --data petss
    --data petss: nothing of this name is here or in the cache of the Hugging Face Hub, ...; did you mean pets?
cls --data ./petz
    --data ./petz: nothing is there; expected digits, ...; did you mean pets?
det --data ./petz
    --data ./petz: nothing is there; expected digits, ...; did you mean pets?
cls --data pets --split test
    --split test: --data pets has no such part; there is ...
cls --data labels.csv
    ...: 2 of 2 images are missing, the first is ...nowhere/0.png (paths start from the folder of the table...
cls --data bare.csv
    bare.csv: its first line must name the columns, such as image,label; it is 'pets/cat/0.png,cat'
cls --eval_only runs/first
    --eval_only runs/first: is a run folder; name runs/first/best or a folder in runs/first/checkpoints
cls --eval_only weights.pth
    --eval_only weights.pth: no exported model and no checkpoint, ...; name a run's best/
det --eval_only runs/first/best
    --eval_only runs/first/best: its run has flags that det.py does not know (...); evaluate it with the recipe that ... cls
cls --eval_only runs/first/best --data digits
    runs/first/best does not know 10 of the 10 classes of --data digits (0, 1, 2, 3, 4, ...); it knows cat, dog: ...
cls --data flat
    .../flat: no class folders; images belong in one subfolder per class, of two classes or more
cls --data https://example.com/pets.zip
    --data https://example.com/pets.zip: tar/WebDataset shards, URLs and streaming are not supported yet; ...
cls --data pets --class_weights 0.3,0.7
    --class_weights 0.3,0.7: none, sqrt, balanced or a YAML file of `class name: weight`, and there is no such file
cls --data pets --val_share 20
    --val_share 20.0: must be between 0 and 1

-- run folders
cls --output_dir weights.pth
    --output_dir weights.pth: weights.pth/cls-... can't be written (...); name another folder
cls --output_dir /proc/runs
    --output_dir /proc/runs: /proc/runs/cls-... can't be written (...); name another folder
cls --name my/run
    --name my/run: must be a folder name without slashes; where it lies is --output_dir
{FIRST} --lr 0.5
    runs/first/checkpoints/step_00000002 belongs to another run: lr 0.004 there, 0.5 here; give this run another --name
cls --name second --resume runs/first
    --resume runs/first: no checkpoint, no manifest.json is in it; name a folder such as RUN/checkpoints/step_00000200
cls --name first --resume never
    --resume never: runs/first holds step_00000002; give this run another --name, or remove that folder
cls --name third --resume true
    --resume true: no checkpoint, nothing is there; name a folder such as RUN/checkpoints/step_00000200
det --init weights.pth
    weights.pth: not a whole file of torch.save; copy it again
""".replace("{FIRST}", FIRST)


def rows() -> dict[str, str]:
    """The table: command -> line."""
    lines = [line for line in MISTAKES.splitlines() if line and not line.startswith("--")]
    assert all(line.startswith("    ") == bool(place % 2) for place, line in enumerate(lines))
    return dict(zip(lines[::2], map(str.strip, lines[1::2]), strict=True))


def matches(expected: str, said: str) -> bool:
    return bool(re.fullmatch(".*".join(map(re.escape, expected.split("..."))), said))


@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Forks:
    return Forks(tmp_path_factory.mktemp("forks"))


@pytest.fixture(scope="module")
def a_desk(forks, tmp_path_factory) -> Path:
    """The folder of somebody who begins: some images, a file of weights, some settings, and one run."""
    folder = tmp_path_factory.mktemp("desk")
    draw_stripes(folder / "pets", (8, 8))
    for number, name in enumerate(("cat", "dog")):
        (folder / f"pets/stuff_{number}").rename(folder / "pets" / name)
    (folder / "flat").mkdir()
    Image.new("RGB", (32, 32)).save(folder / "flat/0.png")
    (folder / "labels.csv").write_text("image,label\nnowhere/0.png,cat\nnowhere/1.png,dog\n")
    (folder / "bare.csv").write_text("pets/cat/0.png,cat\npets/dog/0.png,dog\n")
    (folder / "empty").mkdir()
    (folder / "detector").mkdir()
    (folder / "detector/config.json").write_text('{"detector": "fcos", "classes": ["cat"]}')
    (folder / "weights.pth").write_bytes(b"weights")
    (folder / "indented.yaml").write_text("lr: 0.1\n  epochs: 3\n")
    (folder / "nested.yaml").write_text("optimizer:\n  lr: 0.1\n")
    (folder / "list.yaml").write_text("[]\n")
    (folder / "mmdet.py").write_text("model = dict(type='FCOS')\n")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    recipe, *words = FIRST.split()
    ended = forks.start(*words, recipe=recipe, before=partial(os.chdir, folder)).end()
    assert ended.code == 0, ended
    return folder


def words_of(command: str, scratch: Path) -> list[str]:
    """A row's command for `several`; reports of evaluations go to `scratch`."""
    recipe, *words = shlex.split(command.replace(";", r"\;"))
    words = [*map(str, as_digits(words, recipe))]
    return [f"recipes/{recipe}.py", *words, *(["--output_dir", str(scratch)] if "--eval_only" in words else [])]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file below `folder` but what a start of the run may touch there: its lock and its log."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name not in ("log.txt", ".lock")
    }


def test_there_are_more_than_fifty_and_the_table_can_fail() -> None:
    assert len(rows()) > 70
    assert matches("a ... c", "a b c") and not matches("a ... c", "a b d") and not matches("a", "a b")


def test_each_mistake_is_answered_by_one_line_and_leaves_nothing_behind(forks, a_desk, tmp_path) -> None:
    """All in one process; what a command prints and how it ends is looked at once before and once after the parser."""
    before, cases = snapshot(a_desk), tmp_path / "CASES.json"
    cases.write_text(json.dumps([words_of(command, tmp_path) for command in rows()]))
    recipes = partial(several.main, Path("recipes/cls.py"), cases, "without_pictures")
    ended = forks._start(recipes, partial(os.chdir, a_desk), None, (), False).end()
    assert ended.code == 0, ended
    outcomes = json.loads((tmp_path / "OUTCOMES.json").read_text())
    wrong = [
        f"{command}\n    {line}\n    [{found['outcome']}] {found['text']}"
        for (command, line), found in zip(rows().items(), outcomes, strict=True)
        if found["outcome"] != "refused" or not matches(line, found["text"])
    ]
    assert not wrong, "\n".join(wrong)
    for command in ("cls --lr 0,001", f"{FIRST} --lr 0.5"):
        recipe, *words = command.split()
        ended = forks.start(*words, recipe=recipe, before=partial(os.chdir, a_desk)).end()
        assert ended.code == 2 and matches(f"cls.py: {rows()[command]}\n", ended.stderr), ended
    assert snapshot(a_desk) == before


# Where no file of accelerate_configs/ is named before the recipe, Accelerate's own words stand around the line.
LAUNCHES = {
    "-m accelerate.commands.launch recipes/cls.py": (
        "launched for 1 GPU, but this machine shows none: check the driver and CUDA_VISIBLE_DEVICES, or train on the CPU with "
        "--config_file accelerate_configs/cpu.yaml before the recipe"
    ),
    "-m torch.distributed.run --nproc_per_node 2 --rdzv_backend machines recipes/cls.py --lr fast": (
        "--lr fast: must be a number"
    ),
}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has a GPU")
def test_a_wrong_launch_is_answered_by_one_line_of_the_recipe(launch, tmp_path) -> None:
    started = [launch.start_python(*command.split(), "--output_dir", tmp_path / "runs") for command in LAUNCHES]
    for each, (command, line) in zip(started, LAUNCHES.items(), strict=True):
        done = each.finish()
        said = [word for word in done.stderr.splitlines() if word.startswith("cls.py: ")]
        assert done.returncode and said == [f"cls.py: {line}"], done
        if "accelerate" not in command:
            assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert not (tmp_path / "runs").exists()
