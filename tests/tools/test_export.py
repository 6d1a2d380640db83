"""An exported classifier is the model that was measured: in each format, on every validation image,
and without torch.

What differs from the trained model is refused by the images' names, and a refused export leaves
nothing behind.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
import skimage.data
import torch
from PIL import Image

from common.classification.transforms import EvalTransform
from common.errors import Refused
from common.training import batch_norm, timm_models
from tests.harness.launching import ROOT
from tests.harness.runs import copy_run, read
from tests.tools.changed import update_json
from tools.export import classifier, formats, verify
from tools.export.__main__ import load_task, main

QUICK = ["--workers", "0"]


def check(folder: Path, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run verify.py of an export where some packages can't be imported."""
    hidden = folder.parent / "hidden"
    hidden.mkdir(exist_ok=True)
    for package in blocked:
        (hidden / f"{package}.py").write_text(f"raise ImportError('{package} is not there')\n")
    return subprocess.run(
        [sys.executable, folder / "verify.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(hidden) if blocked else ""},
        capture_output=True,
        text=True,
    )


def test_every_format_is_the_model_that_was_measured(trained_classifier, tmp_path) -> None:
    run = tmp_path / "run"
    copy_run(trained_classifier, run)
    recorded = read(run / "best" / "results.json")
    main([str(run), "--to", "onnx", "--workers", "1"])
    for name in ("torch_export", "openvino"):
        main([str(run / "best"), "--to", name] + QUICK)
    assert sorted(path.name for path in (run / "export").iterdir()) == [
        "onnx",
        "openvino",
        "torch_export",
    ]

    without = {
        "onnx": ("torch", "timm", "tools", "common"),
        "openvino": ("torch",),
        "torch_export": (),
    }
    for name, blocked in without.items():
        folder = run / "export" / name
        about = read(folder / "export.json")
        figures = about["validation"]
        assert (
            figures["images"] == 359
            and figures["differing"] == 0
            and figures["largest_difference"] < 1e-4
        )
        assert (
            figures["top1"]
            == figures["top1_exported"]
            == pytest.approx(recorded["top1"], abs=1e-12)
        )
        assert about["classes"] == list("0123456789") and len(about["vectors"]) == 10
        checked = check(folder, blocked)
        assert checked.returncode == 0 and checked.stdout.count("\n") == 1, (
            checked.stdout + checked.stderr
        )
    # The packages were indeed out of reach.
    checked = check(run / "export" / "torch_export", ("torch",))
    assert checked.returncode == 1 and "torch is not there" in checked.stdout

    # Weights that were changed: by the hash, and by what they compute if the hash was changed, too.
    folder = run / "export" / "openvino"
    weights = (folder / "model.bin").read_bytes()
    bias = safetensors.numpy.load_file(run / "best" / "model.safetensors")["fc.bias"]
    assert weights.count(bias.tobytes()) == 1
    weights = weights.replace(
        bias.tobytes(), (bias + (np.arange(10) == 3).astype(np.float32)).tobytes()
    )
    (folder / "model.bin").write_bytes(weights)
    assert "model.bin is not the file that was measured" in check(folder).stdout
    digests = read(folder / "export.json")["files"] | {
        "model.bin": hashlib.sha256(weights).hexdigest()
    }
    update_json(folder / "export.json", files=digests)
    checked = check(folder)
    assert (
        checked.returncode == 1
        and "digits[" in checked.stdout
        and "probabilities differ by" in checked.stdout
    )


def test_another_preprocessing_is_refused_by_image_names(
    trained_classifier, tmp_path, monkeypatch
) -> None:
    digits = load_task(str(trained_classifier), ["--workers", "0"], 0).val
    for index in range(12):
        class_folder = tmp_path / "data" / digits.classes[digits.labels[index]]
        class_folder.mkdir(parents=True, exist_ok=True)
        digits.load_image(index).resize((50, 70)).save(class_folder / f"{index}.png")
    argv = [
        str(trained_classifier),
        "--to",
        "torch_export",
        "--data",
        str(tmp_path / "data"),
    ] + QUICK
    output = tmp_path / "new" / "folder"
    right = classifier.build_preprocessing
    monkeypatch.setattr(
        classifier, "build_preprocessing", lambda config: right(config | {"mean": (0.1, 0.1, 0.1)})
    )
    with pytest.raises(
        Refused,
        match=r"of 12 images differ .*\d+\.png: \d 0\.\d+ -> \d 0\.\d+.*nothing was written",
    ):
        main(argv + ["-o", str(output)])
    assert not output.parent.exists()
    main(argv + ["-o", str(output), "--differing", "12"])
    figures = read(output / "export.json")["validation"]
    assert (
        0 < figures["differing"] <= 12 and figures["largest_difference"] > classifier.MAX_DIFFERENCE
    )
    # The right one is accepted on the same images, and replaces the export.
    monkeypatch.undo()
    main(argv + ["-o", str(output)])
    assert read(output / "export.json")["validation"]["differing"] == 0
    assert [path.name for path in output.parent.iterdir()] == ["folder"]


PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")


@pytest.mark.parametrize(
    "size, crop_pct, kernel, crop_mode",
    [
        ((224, 224), 0.875, "bicubic", "center"),
        ((160, 192), 0.9, "bilinear", "center"),
        ((224, 224), 1.0, "bicubic", "squash"),
        ((160, 192), 0.9, "bilinear", "squash"),
        ((224, 224), 0.95, "bicubic", "border"),
        ((97, 64), 1.0, "bilinear", "border"),
    ],
)
def test_pixels_are_those_of_the_evaluation_to_the_last_level(
    size, crop_pct, kernel, crop_mode
) -> None:
    pictures = [getattr(skimage.data, name)() for name in PHOTOGRAPHS]
    pictures += [pictures[2][:7, :5], pictures[3][:101, :333], pictures[0][:1, :1]]
    if crop_mode != "border":  # the evaluation refuses a stripe that would be thinner than a pixel
        pictures.append(pictures[2][:3, :400])
    mean = torch.tensor([0.4, 0.5, 0.6])
    config = {
        "input_size": (3, *size),
        "crop_pct": crop_pct,
        "interpolation": kernel,
        "crop_mode": crop_mode,
    }
    config |= {"mean": tuple(mean.tolist()), "std": (1 / 255,) * 3}
    exported = classifier.build_preprocessing(config)
    evaluated = EvalTransform(config)
    for picture in pictures:
        pixels = (
            exported(torch.from_numpy(picture.copy()).permute(2, 0, 1)[None])[0]
            + 255 * mean[:, None, None]
        )
        assert torch.equal(
            pixels.round(), torch.as_tensor(evaluated(Image.fromarray(picture))).float()
        )


def test_runtimes_agree_with_torch_on_photographs(tmp_path) -> None:
    model = timm_models.build_classifier("convnext_atto", 10)
    batch_norm.convert_batch_norm(model, "group", group_size=4)
    # Which needs most operations.
    config = timm_models.resolve_data_config(model.eval()) | {"crop_mode": "border"}
    assert config["input_size"] == (3, 224, 224) and config["crop_pct"] < 1
    with torch.no_grad():  # random weights hardly tell pictures apart
        model.get_classifier().weight.mul_(20)
    exported = classifier.Classifier(
        model, classifier.build_preprocessing(config), multi_label=False
    ).eval()
    photographs = [
        np.ascontiguousarray(getattr(skimage.data, name)().transpose(2, 0, 1)[None])
        for name in PHOTOGRAPHS
    ]
    with torch.no_grad():
        expected = [exported(torch.from_numpy(photograph)).numpy() for photograph in photographs]
    assert np.std(expected, 0).max() > 0.05
    formats.write("onnx", exported, True, ["probabilities"], tmp_path)
    for name, limit in (("onnx", 1e-5), ("openvino", 1e-3)):  # which reads the same file
        session = verify.open_model(tmp_path, name, "model.onnx", ["probabilities"])
        for photograph, probabilities in zip(photographs, expected, strict=True):
            assert np.abs(session(photograph)["probabilities"] - probabilities).max() <= limit
        several = session(photographs[1].repeat(3, 0))["probabilities"]
        assert several.shape == (3, 10) and np.abs(several - expected[1]).max() <= limit


def test_several_labels_have_a_probability_each(tmp_path) -> None:
    model = timm_models.build_classifier("test_resnet", 3)
    config = timm_models.resolve_data_config(model, 32, 1.0)
    timm_models.export_classifier(model, ("a", "b", "c"), config, True, {}, tmp_path / "best")
    rows = ["path,a,b,c"]
    for index in range(8):
        pixels = np.random.default_rng(index).integers(0, 256, (40 + index, 50, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
        rows.append(f"{index}.png,{index % 2},{index // 2 % 2},{index // 4}")
    (tmp_path / "8.png").write_bytes(b"no picture")
    (tmp_path / "labels.csv").write_text("\n".join([*rows, "8.png,1,1,1"]))
    flags = [
        "--data",
        tmp_path / "labels.csv",
        "--label_column",
        "a,b,c",
        "--loss",
        "bce",
        "--max_broken_share",
        "0.5",
    ]
    main(
        list(
            map(
                str,
                [tmp_path / "best", "--to", "torch_export"]
                + flags
                + ["-o", tmp_path / "out"]
                + QUICK,
            )
        )
    )
    about = read(tmp_path / "out" / "export.json")
    assert (
        about["multi_label"]
        and about["validation"]["images"] == 8
        and about["validation"]["unreadable"] == 1
    )
    with np.load(tmp_path / "out" / "vectors.npz") as vectors:
        assert abs(vectors["probabilities_0"].sum() - 1) > 0.01
    assert "accuracy" in about["validation"] and verify.find_fault(tmp_path / "out") == ""


def test_a_module_that_a_copied_recipe_defines_is_exported(trained_classifier, tmp_path) -> None:
    module_source = (
        "torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 4), torch.nn.AdaptiveAvgPool2d(2), "
        "torch.nn.Flatten(), "
    )
    module_source += "torch.nn.Linear(16, 10))"
    model = eval(module_source)
    config = {"input_size": (3, 32, 32), "interpolation": "bicubic", "crop_pct": 1.0}
    config |= {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    timm_models.export_classifier(model, list("0123456789"), config, False, {}, tmp_path / "best")
    shutil.copy(trained_classifier / "best" / "run.json", tmp_path / "best")
    update_json(tmp_path / "best" / "run.json", recipe="mine")
    source = (ROOT / "recipes" / "cls.py").read_text()
    begin = source.index("        model = build_classifier(")
    end = source.index("        check_export(")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "mine.py").write_text(
        f"{source[:begin]}        model = {module_source}\n{source[end:]}"
    )
    named = ["--recipe", str(tmp_path / "source" / "mine.py")]
    main([str(tmp_path / "best"), "--to", "torch_export"] + named + QUICK)
    about = read(tmp_path / "export" / "torch_export" / "export.json")
    assert about["validation"]["differing"] == 0 and about["validation"]["images"] == 359


def test_what_cannot_be_exported_is_refused_in_one_line(
    trained_classifier, tmp_path, monkeypatch
) -> None:
    run = str(trained_classifier)
    (tmp_path / "file").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    shutil.copytree(trained_classifier / "best", tmp_path / "best")
    (tmp_path / "best" / "run.json").unlink()
    for args, message in (
        ([run, "-o", tmp_path / "file" / "out"], r"--output .*file.*can't be written"),
        ([run, "-o", tmp_path / "mine"], r"--output .*mine: .*no export"),
        ([tmp_path / "best"], r"--data"),
    ):
        with pytest.raises(Refused, match=message):
            main(list(map(str, args)) + ["--to", "torch_export"] + QUICK)

    class Counting(torch.nn.Module):
        def forward(self, images):
            return images.new_ones(len(images), int(images.sum()) % 7)

    with pytest.raises(
        Refused, match=r"--to torch_export: the model can't be written .*another format"
    ):
        formats.write("torch_export", Counting(), True, ["x"], tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        Refused, match=r"--to openvino: needs .*: pip install openvino onnx onnxscript"
    ):
        main([str(tmp_path / "nowhere"), "--to", "openvino"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "file", "mine"]


def test_a_model_of_other_channels_is_refused_in_one_line() -> None:
    """Else torch prints a traceback before the refusal."""
    model = timm_models.build_classifier("test_vit", 2, image_size=32, in_chans=4)
    config = timm_models.resolve_data_config(model)
    with pytest.raises(Refused, match=r"^the model takes images of 4 channels, .* RGB .*best/"):
        classifier.build_preprocessing(config)


class _Sorted(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().flatten(1).sort(dim=1, descending=True, stable=True).indices


def test_equal_values_keep_their_order_in_onnx(tmp_path) -> None:
    """Proposals of detectors are sorted so. Most of these pixels are equal to others."""
    formats.write("onnx", _Sorted(), batched=False, outputs=["order"], folder=tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    images = torch.from_numpy(skimage.data.astronaut()[None, :61, :50]).permute(0, 3, 1, 2)
    images = images.contiguous()
    (order,) = session.run(None, {"images": images.numpy()})
    assert np.array_equal(order, _Sorted()(images).numpy())
