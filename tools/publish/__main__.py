"""Publish: writes a model card from a run folder, and pushes the best model with it to the Hugging Face hub.

    python -m tools.publish runs/cls-d55fba --to owner/name --license apache-2.0 --private
    python -m tools.publish runs/cls-d55fba --to owner/name --dry_run FOLDER

The card says what the model is, its results, its data, how it was trained, its limits, and how to
load it. Published are numbers, switches, choices, names of classes and the run's name; no paths,
notes or commands. --dry_run writes the folder, and pushes nothing.
"""

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import Refused
from tools.command_line import create_parser, refuse_unwritable, run

if TYPE_CHECKING:
    from tools.publish.card import PublishedModel


def write(published: "PublishedModel", card: str, folder: Path) -> None:
    """Write the files to publish: the weights and their description, the card, the pictures."""
    files = published.collect_files()
    files["README.md"] = card.encode()
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, file)
        else:
            file.write_bytes(content)


def push(folder: Path, to: str, private: bool, step: int) -> str:
    """Upload the folder; returns its address.

    Raises `Refused` for whatever the hub or the network say against it.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        hub.create_repo(to, private=private, exist_ok=True)
        message = f"Model of step {step}"
        address = hub.upload_folder(repo_id=to, folder_path=folder, commit_message=message)
        return str(address)
    except Exception as error:  # of its many libraries: no token, no right, no network, no space
        lines = str(error).strip().splitlines()
        reason = lines[0].strip() if lines else type(error).__name__
        raise Refused(
            f"--to {to}: {reason:.300}; log in with `hf auth login`, or look at the folder with "
            "--dry_run"
        ) from None


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = create_parser("publish", __doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--to", required=True, metavar="OWNER/NAME", help="the model on the hub")
    parser.add_argument("--license", default="", help="such as apache-2.0; else the card says so")
    parser.add_argument(
        "--dataset",
        default="",
        metavar="NAME",
        help="what the card calls the data; else it names none",
    )
    parser.add_argument(
        "--private", action="store_true", help="a new model on the hub is only yours to see"
    )
    parser.add_argument(
        "--dry_run", type=Path, metavar="FOLDER", help="write this new folder, and push nothing"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", args.to, re.ASCII):
        raise Refused(f"--to {args.to}: must be OWNER/NAME, of letters, digits, -, _ and .")
    from tools.publish.card import PublishedModel  # takes seconds, which --help need not

    published = PublishedModel(args.run)
    card = published.build_card(args.to, args.license, args.dataset)
    if not args.license:
        print("no --license is given: the card says so", file=sys.stderr)
    if not args.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            write(published, card, Path(folder))
            print(push(Path(folder), args.to, args.private, published.step))
        return
    with refuse_unwritable(f"--dry_run {args.dry_run}"):
        if args.dry_run.exists() and any(args.dry_run.iterdir()):
            raise FileExistsError(0, "is there already")
        write(published, card, args.dry_run)
    print(f"{args.dry_run}: what would be pushed to {args.to}; README.md is the card")


if __name__ == "__main__":
    run(main)
