"""A name becomes a model, or one line says why not; an exported model loads in plain timm."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from common.errors import Refused
from common.training import batch_norm, drop_path, timm_models
from common.training.timm_models import build_classifier

TRAINED = SimpleNamespace(eval_only="", image_size=0, crop_pct=0.0)
CLASSES = ("daisy", "rose", "007", "tulip & co", "no")
SIZE = 48


def compute_outputs(model: nn.Module, size: int = SIZE) -> torch.Tensor:
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval().to(memory_format=torch.channels_last)(images)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param("test_vit", marks=pytest.mark.smoke), "test_efficientnet", "fbnetc_100"],
)
def test_an_exported_model_is_the_same_in_plain_timm(architecture: str, tmp_path: Path) -> None:
    folder = tmp_path / "best"
    model = build_classifier(architecture, len(CLASSES), image_size=SIZE, drop_path=0.2, drop=0.1)
    batch_norm.convert_batch_norm(model, "group", group_size=2)
    drop_path.convert_drop_layers(model)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.3)  # other statistics than a new model has
    model.to(memory_format=torch.channels_last)
    model.pretrained_cfg["crop_mode"] = "squash"  # as 100 published weights are evaluated
    before = copy.deepcopy(model.state_dict())
    data_config = timm_models.resolve_data_config(model, SIZE, 0.9)
    timm_models.export_classifier(model, CLASSES, data_config, False, {"top1": 0.5}, folder)

    plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(compute_outputs(plain), compute_outputs(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert tuple(plain.pretrained_cfg["label_names"]) == CLASSES
    loaded_config = timm.data.resolve_model_data_config(plain)
    for key, value in data_config.items():
        expected = list(value) if key in ("mean", "std") else value
        assert loaded_config[key] == expected, key
    assert loaded_config["input_size"] == (3, SIZE, SIZE)
    assert loaded_config["crop_pct"] == 0.9
    assert loaded_config["crop_mode"] == "squash"
    assert json.loads((folder / "results.json").read_text()) == {"top1": 0.5}

    # The same folder is a --model.
    loaded = build_classifier(str(folder), len(CLASSES), image_size=SIZE)
    assert torch.equal(compute_outputs(loaded), compute_outputs(model))
    assert timm_models.resolve_data_config(loaded) == loaded_config


@pytest.mark.parametrize("architecture, multi_label", [("test_vit", False), ("test_nfnet", True)])
def test_transformers_gives_the_probabilities_of_timm(architecture, multi_label, tmp_path) -> None:
    """Of another size than the model's; each of several labels has a probability of its own."""
    pipeline = pytest.importorskip("transformers").pipeline
    folder = tmp_path / "best"
    model = build_classifier(architecture, 3, image_size=SIZE)
    with torch.no_grad():
        model.get_classifier().weight.mul_(5)
    timm_models.export_classifier(
        model,
        CLASSES[:3],
        timm_models.resolve_data_config(model, SIZE, 0.9),
        multi_label,
        {},
        folder,
    )
    noise = torch.randint(
        0, 256, (70, 90, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    image = Image.fromarray(noise.numpy())

    plain = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(
        **timm.data.resolve_model_data_config(plain), is_training=False
    )
    with torch.no_grad():
        logits = plain(transform(image)[None])[0]
    probabilities = logits.sigmoid() if multi_label else logits.softmax(0)
    assert probabilities.max() - probabilities.min() > 0.01
    classify = pipeline("image-classification", str(folder), device="cpu")
    scores = {prediction["label"]: prediction["score"] for prediction in classify(image)}
    expected = dict(zip(CLASSES, probabilities.tolist(), strict=False))
    assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("architecture", ["test_vit", "crossvit_9_240"])
def test_a_head_keeps_its_classes_by_name_and_says_so(architecture: str, tmp_path: Path) -> None:
    folder = tmp_path / "best"
    model = build_classifier(architecture, len(CLASSES))
    data_config = timm_models.resolve_data_config(model)
    timm_models.export_classifier(model, CLASSES, data_config, False, {}, folder)
    trained = model.state_dict()
    heads = timm_models._get_head_tensors(model)
    num_tensors = len(trained)
    num_kept = num_tensors - len(heads)
    assert len(heads) == (4 if architecture.startswith("cross") else 2)

    def check(text: str, message: str) -> None:
        names = text.split(", ")
        loaded = build_classifier(str(folder), len(names), seed=1, names=names)
        fresh = build_classifier(architecture, len(names), seed=1).state_dict()
        for key, tensor in loaded.state_dict().items():
            if key not in heads:
                assert torch.equal(tensor, trained[key]), key
                continue
            for row, name in enumerate(names):
                expected = fresh[key][row]
                if name in CLASSES:
                    expected = trained[key][CLASSES.index(name)]
                assert torch.equal(tensor[row], expected), (key, name)
        assert loaded.weights_summary == message.format(f"of {num_tensors} tensors of {folder}")

    check("no, daisy, 007, rose, tulip & co", f"{num_tensors} {{}}")
    # As many classes as before.
    check(
        "cat, dog, no, elk, emu",
        f"{num_kept} {{}}, head new for 4 of 5 classes (cat, dog, elk, emu), kept for no",
    )
    check("rose, cat", f"{num_kept} {{}}, head new for 1 of 2 classes (cat), kept for rose")
    check("cat, dog, elk, emu, gnu", f"{num_kept} {{}}, head new for all classes")
    assert build_classifier(architecture, 3).weights_summary == ""


def test_a_head_without_names_is_kept_for_as_many_classes(tmp_path: Path) -> None:
    model = build_classifier("test_resnet", 3)
    folder = tmp_path / "best"
    data_config = timm_models.resolve_data_config(model)
    timm_models.export_classifier(model, CLASSES[:3], data_config, False, {}, folder)
    content = json.loads((folder / "config.json").read_text())
    del content["label_names"]
    (folder / "config.json").write_text(json.dumps(content))
    loaded = build_classifier(str(folder), 3, names=["cat", "dog", "elk"])
    assert torch.equal(loaded.fc.weight, model.fc.weight)
    assert loaded.weights_summary.endswith(", its head as it is: it does not name its classes")
    smaller = build_classifier(str(folder), 2, names=["cat", "dog"])
    assert smaller.weights_summary.endswith(", head new for all classes")


def test_a_model_that_others_would_load_differently_is_refused(monkeypatch) -> None:
    """timm gives fbnetc_100 another epsilon with pretrained=True, as exported models are loaded."""
    model = build_classifier("fbnetc_100", len(CLASSES))
    timm_models.check_export(TRAINED, model)
    features = timm_models.create_model(
        "fbnetc_100", pretrained=False, seed=0, requested={}, features_only=True
    )
    timm_models.check_features(features, {"model_name": "fbnetc_100", "bn_eps": 1e-3})
    message = "--model fbnetc_100: .*would not rebuild this model"
    with pytest.raises(Refused, match=message):
        timm_models.check_features(features, {"model_name": "fbnetc_100"})
    monkeypatch.setattr(timm_models, "PRETRAINED_OPTIONS", {})
    model = build_classifier("fbnetc_100", len(CLASSES))
    with pytest.raises(Refused, match=message):
        timm_models.check_export(TRAINED, model)


@pytest.mark.parametrize(
    "name, message",
    [
        ("resnett50", r"not a model of timm .*did you mean resnet50, "),
        ("qqqq", r"not a model of timm [0-9.]+; timm.list_models\(\) lists them$"),
        (
            "resnet50.nonsense",
            r"can't be created: Invalid pretrained tag \(nonsense\) for resnet50",
        ),
        ("hf-hub:nobody/nothing", r"can't be created: "),
        (
            "resnet18.a1_in1k",
            r"can't be created with pretrained weights \(is the hub in reach\?\); without --pretrained",
        ),
    ],
)
def test_a_model_that_is_not_there_is_refused_in_one_line(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Refused, match=message) as raised:
        build_classifier(name, 10, pretrained="_in1k" in name)
    assert str(raised.value).startswith(f"--model {name}: ") and "\n" not in str(raised.value)


def test_a_folder_that_is_no_whole_model_is_refused_in_one_line(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(Refused) as raised:
            build_classifier(str(folder), len(CLASSES))
        return str(raised.value)

    folder = tmp_path / "empty"
    folder.mkdir()
    assert "expected a complete timm folder" in refusal()
    folder = tmp_path / "best"
    timm_models.export_classifier(
        build_classifier("test_resnet", len(CLASSES)), CLASSES, {}, False, {}, folder
    )
    weights = (folder / "model.safetensors").read_bytes()
    config = (folder / "config.json").read_text()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "can't be loaded" in refusal()
    for content in ("{", "[]", '{"classes": ["dog"], "detector": "fcos"}'):
        (folder / "config.json").write_text(content)
        assert "(for a detector: --init or --eval_only)" in refusal()
    folder = tmp_path / "best"
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(config)
    for content in (b"", b"no weights", weights[:1000]):
        (folder / "pytorch_model.bin").write_bytes(content)
        assert refusal().endswith(
            ": its weights are no whole file of torch.save; copy the folder again"
        )
    folder = tmp_path / "bestt"
    assert (
        "there is no such folder; did you mean best?; a model of the hub is hf-hub:OWNER/NAME"
        in refusal()
    )


@pytest.mark.parametrize(
    "name", ["best/model.safetensors", "model_best.pth.tar", "model.pth", "weights.bin"]
)
def test_a_file_of_weights_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    """What the message says makes a folder that can be trained on."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    model = timm.create_model("test_resnet", num_classes=4)
    content = {"epoch": 3, "arch": "test_resnet", "state_dict": model.state_dict()}
    if file.suffix == ".safetensors":
        save_file(model.state_dict(), file)
    else:
        torch.save(content, file)
    with pytest.raises(
        Refused, match=f"but a file; .*{re.escape(str(file.parent))}.*checkpoint_path=FILE"
    ) as raised:
        build_classifier(str(file), 4)
    assert "\n" not in str(raised.value)
    loaded = timm.create_model("test_resnet", num_classes=4, checkpoint_path=str(file))
    timm.models.save_for_hf(loaded, str(tmp_path / "folder"), safe_serialization=True)
    built = build_classifier(str(tmp_path / "folder"), 4)
    assert all(
        torch.equal(value, model.state_dict()[key]) for key, value in built.state_dict().items()
    )


def test_without_a_network_the_hub_is_not_tried_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    with pytest.raises(Refused, match="is the hub in reach"):
        build_classifier("resnet18.a1_in1k", 10, pretrained=True)


def test_an_option_that_a_model_lacks_is_refused_if_asked_for() -> None:
    name = "selecsls42"
    with pytest.raises(
        Refused, match="--model selecsls42: does not take --drop_path: leave it out, or take"
    ):
        build_classifier(name, 3, drop_path=0.1)
    model = build_classifier(name, 3, drop=0.2)
    assert (
        model.head_drop.p == 0.2
        and build_classifier("test_vit", 3, drop_path=0.1).blocks[-1].drop_path1.drop_prob
    )
    # Some models drop by default: what is not asked for is off.
    assert build_classifier("efficientnet_lite0", 2).drop_rate == 0.0
    with pytest.raises(
        Refused, match="--grad_checkpointing: selecsls42 does not offer it; lower --max_micro"
    ):
        timm_models.checkpoint_gradients(model, name)
    with pytest.raises(Refused, match="--grad_checkpointing: Linear does not offer it"):
        timm_models.checkpoint_gradients(nn.Linear(1, 1), "mine")


def test_a_module_of_another_kind_has_to_make_logits() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(3 * SIZE**2, 5)).train()
    config = SimpleNamespace(eval_only="", image_size=SIZE, crop_pct=0.0)
    timm_models.check_export(config, model)
    assert model.training and model[1].training
    with pytest.raises(
        Refused,
        match=rf"Conv2d makes \[1, 4, 1, 1\] of images \[1, 3, {SIZE}, {SIZE}\] in evaluation, not",
    ):
        timm_models.check_export(config, nn.Conv2d(3, 4, SIZE))
