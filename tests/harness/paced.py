"""A recipe at a pace at which machines can come and go before it ends."""

from tests.recipes.copied import ROOT, apply

# Alone it is slower still.
PACED = apply(
    """
@@
+import os
+import time
 from collections.abc import Sequence
@@
-from common.run import Run
+from common.run import Observer, Run
@@
+class Pace(Observer):
+    def on_end_step(self, run, step):
+        time.sleep(0.4 if os.environ["WORLD_SIZE"] == "1" else 0.03)
+
+
 def main() -> None:
@@ main
-    with Run(config) as run:  # joins the other ranks, claims runs/<name>/, handles signals
+    with Run(config, Pace()) as run:
""",
    (ROOT / "recipes/cls.py").read_text(),
)
