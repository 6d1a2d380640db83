"""Agreement: all ranks are told which rank differs from the first, or is missing."""

import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from common.distributed.agreement import check_agreement, collect_facts, describe_differences
from common.errors import Refused

pytestmark = pytest.mark.smoke
SAME = {"--lr": "0.1", "torch": "2.11", "common/data/batch_plan.py": "3f"}


def hear_refusals(
    ranks: dict[int, dict[str, str]], world_size: int, patience_s: float = 20
) -> list[str]:
    """What each of the ranks hears, in threads over one store."""
    store = HashStore()
    patience = timedelta(seconds=patience_s)

    def hear(rank: int) -> str:
        try:
            check_agreement(store, rank, world_size, ranks[rank], patience)
        except Refused as refusal:
            return str(refusal)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(hear, ranks))


def test_all_ranks_are_told_which_rank_differs_or_is_missing() -> None:
    host = socket.gethostname()
    assert hear_refusals(dict.fromkeys(range(3), SAME), 3) == [""] * 3
    message = (
        f"rank 2 on {host} is not as rank 0 on {host}: --lr 0.2 instead of 0.1, "
        "common/data/batch_plan.py is another file"
    )
    assert (
        hear_refusals(
            {0: SAME, 1: SAME, 2: SAME | {"--lr": "0.2", "common/data/batch_plan.py": "4a"}}, 3
        )
        == [message] * 3
    )
    message = (
        f"rank 1, 3 of 4 did not come within 1 s; there are ranks of {host}: see what the others "
        "said"
    )
    assert hear_refusals({0: SAME, 2: SAME}, 4, patience_s=1) == [message] * 2


def test_code_packages_and_settings_are_facts(tmp_path: Path, monkeypatch) -> None:
    @dataclasses.dataclass
    class Config:
        lr: float = 0.1

    def of(folder: str, loss: str, lr: float) -> dict[str, str]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(
            "import loss\nfrom common.data import batch_plan\n"
        )
        (tmp_path / folder / "loss.py").write_text(loss)
        monkeypatch.setattr("sys.argv", [str(tmp_path / folder / "mine.py")])
        # No notebook.
        monkeypatch.setattr("__main__.__file__", str(tmp_path / folder / "mine.py"), raising=False)
        return collect_facts(Config(lr))

    before = of("here", "a = 1", 0.1)
    names = (
        "Python torch timm mine.py loss.py common/data/batch_plan.py "
        "common/detection/models/rcnn.py"
    )
    assert before["--lr"] == "0.1" and set(names.split()) <= before.keys()
    assert (
        describe_differences(of("there", "a = 2", 0.2), before)
        == "--lr 0.2 instead of 0.1, loss.py is another file"
    )
