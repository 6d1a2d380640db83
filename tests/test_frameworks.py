"""A Keras model in a copy of the recipe, with Keras' torch backend: one process and two train it to the same losses."""

import subprocess
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

from tests.harness.launching import ROOT, Launcher
from tests.harness.outcomes import Outcome
from tests.recipes import copied

KERAS = "keras==3.15.1"
WORDS = (
    *("--image_size", 16, "--global_batch_size", 24, "--workers", 0, "--tracker", "none", "--max_steps", 12),
    *("--log_every", 1, "--eval_every", 12, "--dtype", "float64", "--hflip", 0.5),
)

CHANGE = """\
@@
-import torch
+import os
+os.environ["KERAS_BACKEND"] = "torch"
+import keras
+import torch
@@ build_model
-        model = timm_models.build_classifier(
-            config.model,
-            len(classes),
-            names=classes,
-            pretrained=config.pretrained,
-            image_size=config.image_size,
-            dynamic_size=bool(config.image_sizes),
-            drop=config.drop,
-            drop_path=config.drop_path,
-            seed=config.seed,
-        )
+        keras.config.set_image_data_format("channels_first")  # images here are [B, 3, H, W]
+        keras.config.set_floatx(config.dtype)
+        keras.utils.set_random_seed(config.seed)
+        inputs = keras.Input((3, config.image_size, config.image_size))
+        features = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(16, 3, 4, activation="gelu")(inputs))
+        model = keras.Model(inputs, keras.layers.Dense(len(classes))(features))  # logits, without softmax
"""


@pytest.mark.long
def test_a_keras_model_trains_in_a_copy_of_the_recipe(tmp_path):
    """In an environment of its own, with Keras and what this one has."""
    venv.create(tmp_path / "keras", with_pip=True)
    python = tmp_path / "keras/bin/python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "keras")}))
    (packages / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", KERAS]
    if (done := subprocess.run(install, capture_output=True, text=True)).returncode:
        pytest.skip(f"{KERAS} can't be installed: {done.stderr[-200:]}")
    recipe = copied.copy(tmp_path / "keras_cls.py", CHANGE)
    losses = []
    for config in ("cpu", "multi_cpu"):
        file = ROOT / f"accelerate_configs/{config}.yaml"
        command = [python, "-m", "accelerate.commands.launch", "--config_file", file, recipe, *WORDS]
        ended = Launcher(tmp_path).start_command(*command, "--output_dir", tmp_path, "--name", config).finish()
        assert ended.returncode == 0, ended.stderr
        losses.append(Outcome("ok", "", "", 0.0, tmp_path / config).column("train/loss"))
    assert len(set(losses[0])) == 12
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-7)
