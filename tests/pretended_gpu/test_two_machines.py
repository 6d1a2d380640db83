"""Two machines with two GPUs each, and NCCL between them, train what one CPU process trains."""

import json

import numpy as np

from tests.harness.launching import ROOT

WORDS = (
    "--tracker none --workers 2 --log_every 1 --max_steps 3 --eval_every 3 --checkpoint_every 3 --dtype float64".split()
)
VARIED = "--batch_norm global --mixup 0.2 --random_erasing 0.3 --ema_decay 0.9 --clip 1".split()


def column(folder, key):
    return [row[key] for row in map(json.loads, (folder / "metrics.jsonl").open()) if key in row]


def test_two_machines_with_two_gpus_each_train_what_a_cpu_trains(launch, gpus, nodes, tmp_path):
    """In float64, in network namespaces, with the README's command."""
    words = [*WORDS, *VARIED, "--output_dir", tmp_path, "--name"]
    machines = nodes(2)
    flags = ["--main_process_ip", machines[0].address, "--num_processes", 4]
    run = ROOT / "tests/pretended_gpu/run.py"
    env = gpus.environment | {"PRETENDED_GPUS": "2"}
    started = [node.start("2node", run, "recipes/cls.py", *words, "gpus", flags=flags, env=env) for node in machines]
    done = [each.finish(200) for each in started]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert "4 processes on 2 nodes, Pretended GPU (nccl), fp64" in done[0].stdout, done[0].stdout
    assert launch("cpu", "recipes/cls.py", *words, "cpu").returncode == 0
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        np.testing.assert_allclose(column(tmp_path / "gpus", key), column(tmp_path / "cpu", key), rtol=1e-10)
