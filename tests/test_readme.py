"""Everything that README.md tells a newcomer to type works, and the flags, files and links of the
pages in docs/ exist.

Blocks of bash and Python are run unchanged, from top to bottom in one terminal. A block that needs
hardware or the network says so in a comment above it and is only parsed. A block that a comment
attributes to a file must stand in that file. `PRELUDE` has the only differences from a newcomer's
terminal.
"""

import dataclasses
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from accelerate.commands.launch import launch_command_parser
from PIL import Image
from torch.distributed.run import get_args_parser

from common.config.parsing import parse
from tests.harness.outcomes import read, read_rows
from tests.harness.several import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ADDRESS = "<address of this repository>"
# The flags that other programs rely on: none of them may go.
PROMISED = set(
    "config data model global_batch_size max_micro_batch_size epochs max_steps lr opt mixup "
    "batch_norm norm_batch_size "
    "dtype seed output_dir name resume checkpoint_every eval_every log_every workers tracker".split()
)
# To a file, to a heading of it, or to a heading of the page itself.
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]+))?\)")

# Each launch is a few steps long, two more than the one before, so that what goes on has somewhere
# to go. The environment is the one these tests run in: installing it is what `make test` did to get
# here.
PRELUDE = """
set -eux
steps=2
short() { steps=$((steps + 2)); SHORT="--max_steps $steps --log_every 1 --workers 0"; }
accelerate() {
    case "$*" in *tools.*) command accelerate "$@"; return ;; esac
    short
    command accelerate "$@" $SHORT --tracker none
}
python() {
    case "$1" in recipes/*) ;; *) command python "$@"; return ;; esac
    short
    command python "$@" $SHORT --tracker none
}
make() {
    short
    ln -s "$ENVIRONMENT" .venv
    command make RUN_STAMP=requirements.txt ARGS="$SHORT" "$@"
}
"""


@dataclass
class Block:
    """A block of README.md: its language, its text, what it needs, and the file that it is taken
    from ("" for none).
    """

    language: str
    text: str
    needs: str
    file: str


def read_blocks() -> list[Block]:
    pattern = r"(?:<!-- needs: (.+?) -->\n|<!-- from: (.+?) -->\n)?^```(\w*)\n(.*?)^```$"
    matches = re.findall(pattern, README, re.MULTILINE | re.DOTALL)
    assert 2 * len(matches) == README.count("```"), (
        "a block that is not understood here would go untested"
    )
    return [Block(language, text, needs, file) for needs, file, language, text in matches]


@pytest.mark.smoke
def test_every_block_is_run_or_says_what_it_needs() -> None:
    blocks = read_blocks()
    assert {block.language for block in blocks} == {"bash", "python"}
    needs = [block.needs for block in blocks if block.needs]
    assert README.count("<!-- needs:") == len(needs) > 0
    files = [block.file for block in blocks if block.file]
    assert README.count("<!-- from:") == len(files) == 1


@pytest.mark.smoke
def test_the_loop_stands_in_the_recipe() -> None:
    """In the same order and depth; comments may differ, and ... stands for the rest."""
    [loop] = [block for block in read_blocks() if block.file]
    indent = " " * 8  # in `main`, inside `with Run(...)`
    recipe_lines = iter(remove_comments((ROOT / loop.file).read_text()))
    for line in remove_comments(loop.text):
        if line.strip() != "...":
            assert indent + line in recipe_lines, "not in the recipe, or in another order"


def remove_comments(text: str) -> list[str]:
    return [line.partition("  # ")[0] for line in text.splitlines()]


@pytest.mark.smoke
def test_commands_that_need_hardware_exist(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    text = "".join(block.text for block in read_blocks() if block.needs)
    for line in text.splitlines():
        args = shlex.split(line)
        assert args[:2] == ["accelerate", "launch"], line
        launched = launch_command_parser().parse_args(args[2:])
        assert Path(launched.config_file).is_file(), line
        assert Path(launched.training_script).is_file(), line
        parse(load_recipe(Path(launched.training_script)).Config, launched.training_script_args)


@pytest.mark.smoke
def test_links_lead_to_files_and_headings() -> None:
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "cluster/README.md")
    pages = [ROOT / name for name in names] + sorted((ROOT / "docs").glob("*.md"))
    missing = []
    for page in pages:
        for target, anchor in LINK.findall(page.read_text()):
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in find_anchors(file.read_text())):
                missing.append(f"{page.relative_to(ROOT)}: {target}#{anchor}".rstrip("#"))
    assert not missing


def find_anchors(page: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.smoke
def test_every_flag_that_a_page_names_exists() -> None:
    flags = {"config", "help"}
    changeable = set()
    for path in (ROOT / "recipes").glob("*.py"):
        for field in dataclasses.fields(load_recipe(path).Config):
            flags.add(field.name)
            if field.metadata.get("may_change"):
                changeable.add(field.name)
    parsers = [launch_command_parser(), get_args_parser()]  # accelerate launch, torchrun
    for path in (ROOT / "tools").glob("*/__main__.py"):
        tool = importlib.import_module(f"tools.{path.parent.name}.__main__")
        parsers.append(tool.build_parser())
    # --recipe of tools.trained, --ntasks-per-node of srun; mpirun, debugpy.
    foreign_flags = {"recipe", "nodes", "ntasks", "gpus", "hostfile", "listen", "wait"}
    for parser in parsers:
        for action in parser._actions:
            foreign_flags |= {option.lstrip("-") for option in action.option_strings}
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/after_training.md",
        "docs/run_folder.md",
        "docs/layouts.md",
        "docs/data.md",
        "docs/design.md",
        "docs/detectors.md",
        "docs/ideas.md",
        "docs/coming_from_elsewhere.md",
    ):
        text = (ROOT / page).read_text()
        if page.endswith("from_elsewhere.md"):  # the last column of its tables is ours
            text = "\n".join(re.findall(r"^\|.*\|(.+)\|$", text, re.MULTILINE))
        named = {flag.removeprefix("no_") for flag in re.findall(r"(?<![\w-])--([a-z]\w+)", text)}
        assert named <= flags | foreign_flags, f"{page}: {named - flags - foreign_flags}"
    contract = (ROOT / "docs" / "run_folder.md").read_text()
    table = cut_between(contract, "## Flags that programs may rely on", "A switch is")
    assert flags >= set(re.findall(r"--(\w+)", table)) >= PROMISED
    text = cut_between(contract, "**What may change**", "Any other change")
    assert set(re.findall(r"--(\w+)", text)) == changeable


def cut_between(text: str, first: str, last: str) -> str:
    return text[text.index(first) : text.index(last)]


@pytest.fixture
def repository(tmp_path) -> Path:
    """A git repository that holds what lies in this checkout, committed or not."""
    folder = tmp_path / "repository"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    author = ["-c", "user.name=reader", "-c", "user.email=reader@example.org"]
    for args in (
        ["init", "--quiet"],
        ["add", "--all"],
        (author + ["commit", "--quiet", "--message", "all"]),
    ):
        subprocess.run(["git"] + args, cwd=folder, check=True)
    return folder


@pytest.fixture
def home(tmp_path) -> Path:
    """A home with ~/flowers: one subfolder per class."""
    pixels = np.random.default_rng(0).integers(0, 255, (3, 12, 64, 64, 3), dtype=np.uint8)
    for name, images in zip(("daisy", "rose", "tulip"), pixels, strict=True):
        folder = tmp_path / "home" / "flowers" / name
        folder.mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / f"{number}.png")
    return tmp_path / "home"


def test_a_newcomer_can_type_the_readme_from_top_to_bottom(repository, home, tmp_path) -> None:
    typed = [PRELUDE]
    for block in read_blocks():
        if block.needs or block.file:
            continue
        if block.language == "python":
            typed.append(f"python - << 'END'\n{block.text}END\n")
        else:
            typed.append(block.text.replace(ADDRESS, str(repository)))
    env = {"HOME": str(home), "ENVIRONMENT": sys.prefix, "OMP_NUM_THREADS": "1"}
    for name in ("PATH", "LANG", "LD_LIBRARY_PATH"):
        if name in os.environ:
            env[name] = os.environ[name]
    done = subprocess.run(
        ["bash", "-c", "\n".join(typed)],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output

    clone = tmp_path / "vision-recipes"
    demo = next((clone / "runs").glob("cls-*"))
    contract = (ROOT / "docs" / "run_folder.md").read_text()
    promised = cut_between(README, "    best/", "W&B records")
    for run in (demo, clone / "runs" / "digits", clone / "runs" / "flowers"):
        for name in re.findall(r"[\w.]+(?:/|\.\w+)", promised):
            if name != "wandb/" or run == demo:  # the others ran without a tracker
                assert (run / name).exists(), f"{run / name} is promised\n{output}"
        names = {path.name for path in run.iterdir() if not path.name.startswith(".")}
        for row in read_rows(run / "metrics.jsonl"):
            names |= {re.sub("_class/.*", "_class/", key) for key in row}
        names |= read(run / "summary.json").keys() | read(run / "status.json").keys()
        for name in names:
            assert f"`{name}" in contract, "docs/run_folder.md must name everything"
    for name in ("curves.png", "confusion.png", "mistakes.png"):
        assert (demo / "pictures" / name).is_file(), output
    model = demo / "best" / "model.safetensors"
    assert model.stat().st_mode & 0o777 == (demo / "summary.json").stat().st_mode & 0o777, (
        "for more than its owner"
    )
    assert "resuming from step" in done.stdout, "the run that is given more epochs must go on"
    assert not list((home / "experiment").glob("runs/*")), "a dry run must leave nothing behind"
