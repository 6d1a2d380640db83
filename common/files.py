"""Safe reading of files that may come from strangers.

Data sets, presets, model folders and run folders are copied from elsewhere, and a name in them may
point anywhere. So only regular files are read, up to a size limit: a FIFO would block for ever, a
device has no end, and a few lines of YAML with aliases can expand to gigabytes.
"""

import codecs
import errno
import glob
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import yaml

from common.errors import get_line, redact

CACHE = "VISION_RECIPES_CACHE"  # environment variable that names the folder of `cache_folder`
SMALL = 2**20  # bytes: far more than any preset, record of a run or label file has
MEDIUM = 2**24  # bytes: for lists with one line per class or image
# What systems leave beside pictures, some of it pictures themselves: macOS, Windows, Synology,
# QNAP, file systems.
_JUNK = frozenset(
    [
        "__macosx",
        "thumbs.db",
        "ehthumbs.db",
        "desktop.ini",
        "$recycle.bin",
        "system volume information",
        "lost+found",
        "@eadir",
        "#recycle",
        "@recycle",
        "#snapshot",
        "@recently-snapshot",
    ]
)
_MAX_DEPTH = 9  # levels of nesting in a YAML file, with the values
_MAX_ALIAS_LENGTH = 16  # values of a list that may be an alias
_MAX_INSPECTED = 16  # entries of a folder


class OddFile(OSError):
    """A file that is not read because it is not a regular file, or too large."""

    def __init__(self, path: str | bytes | PathLike, reason: str):
        super().__init__(None, reason, os.fsdecode(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_regular(path: str | bytes | PathLike) -> BufferedReader:
    """Open a file for reading.

    Raises `OddFile` for a FIFO, device or socket, also behind links; else the errors of `open`.
    """
    _check_mode(path, os.stat(path))  # before opening, which can have side effects on a device
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_mode(path, os.fstat(descriptor))  # another file may have taken its place since
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_mode(path: str | bytes | PathLike, status: os.stat_result) -> None:
    """Raise IsADirectoryError for a folder, `OddFile` for anything else that is no regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(path))
    if not stat.S_ISREG(status.st_mode):
        raise OddFile(path, "not a regular file")


def read_bytes(path: str | bytes | PathLike, limit: int) -> bytes:
    """The content of a regular file. Raises `OddFile` beyond `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OddFile(path, f"{size:,} bytes, the limit is {limit:,}")
        return file.read(size)


def read_text(path: str | bytes | PathLike, limit: int) -> str:
    """Like `read_bytes`, as text without a byte order mark. Raises ValueError if it is not UTF-8."""
    content = read_bytes(path, limit)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is in UTF-16; save it in UTF-8")
    return content.decode().removeprefix("\ufeff")


def get_cache_folder() -> Path:
    """The user's folder for caches; it need not exist. Raises RuntimeError without a home."""
    folder = os.environ.get(CACHE)
    if folder:
        return Path(os.path.abspath(Path(folder).expanduser()))
    parent = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(parent):
        return Path(parent) / "vision-recipes"
    return Path.home() / ".cache" / "vision-recipes"


def to_json(content: Any) -> Any:
    """`content` without secrets, and with None for floats that are not finite, which JSON lacks."""
    if isinstance(content, str):
        return redact(content)
    if isinstance(content, Mapping):
        return {key: to_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [to_json(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def check_regular(path: str | PathLike) -> None:
    """Raise `OddFile` if there is anything but files and folders at or below `path`.

    For paths that another library reads.
    """
    paths = [os.fspath(path)]
    if os.path.isdir(path):
        paths = []
        for _, entries in walk(path):
            paths.extend(entry.path for entry in entries)
    for file in paths:
        if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
            raise OddFile(file, "not a regular file")


def match_files(pattern: str) -> list[str]:
    """The paths that match a pattern of *, ?, [...] and **, sorted.

    A folder in it that exists stands for itself: `a [1]/*`.
    """
    folder = pattern
    while folder and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    relative_pattern = pattern.removeprefix(folder)
    return sorted(glob.glob(glob.escape(folder) + relative_pattern, recursive=True))


def get_file_sizes(paths: Iterable[str]) -> list[int]:
    """Size of each file in bytes, -1 for a missing file.

    Uses several threads, since file servers are slow.
    """

    def get_sizes(batch: list[str]) -> list[int]:
        return list(map(_get_file_size, batch))

    paths = iter(paths)
    batches = iter(lambda: list(islice(paths, 1024)), [])
    with ThreadPoolExecutor(16) as pool:
        return list(chain.from_iterable(pool.map(get_sizes, batches)))


def _get_file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):  # ValueError: the name contains NUL
        return -1


def is_junk(name: str) -> bool:
    """True for the name of a file or folder that a system left beside the pictures.

    Such as `._1.jpg`, `@eaDir`, `Thumbs.db`.
    """
    if name.startswith("."):
        return True
    return name.casefold() in _JUNK


def walk(top: str | PathLike) -> Iterator[tuple[str, list[os.DirEntry]]]:
    """`top` and every folder below it, each with its entries sorted by name, without junk (`is_junk`).

    So are run folders of these recipes, if people stand in their data folder: pictures of a run are no data.

    Links are followed, but each real folder is visited once, by its own path if that is below
    `top`. Otherwise folders that link to each other would be walked endlessly.
    """
    visited = set()
    folders = [os.fspath(top)]
    links: list[str] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in visited:
            continue
        visited.add(identity)
        with os.scandir(folder) as scanned:
            entries = [entry for entry in scanned if not is_junk(entry.name)]
        entries.sort(key=lambda entry: entry.name)
        yield folder, entries
        for entry in reversed(entries):
            if entry.is_dir() and not is_run_folder(entry.path):
                if entry.is_symlink():
                    links.append(entry.path)
                else:
                    folders.append(entry.path)


def is_run_folder(path: str | Path) -> bool:
    """True for the folder of one run of these recipes.

    Also of the present run, whose folder is there before its data are read.
    """
    if not os.path.isfile(os.path.join(path, ".lock")):
        return False
    return os.path.isfile(os.path.join(path, "log.txt"))


def has_run_folders(path: str | Path) -> bool:
    """True for a run folder, and for a folder such as runs/, of run folders and reports.

    Quick: it inspects few entries.
    """
    with os.scandir(path) as entries:
        first_entries = list(islice(entries, _MAX_INSPECTED))
    if is_run_folder(path):
        return True
    hidden_or_report = (".", "evaluation")
    folders = [entry.path for entry in first_entries if not entry.name.startswith(hidden_or_report)]
    if not folders:
        return False
    return all(map(is_run_folder, folders))


def read_yaml(path: str | PathLike, limit: int, *, only_text: bool = False) -> Any:
    """The content of a YAML file: strings, and dicts and lists of them. Numbers and dates stay strings.

    Unquoted yes, no, true, ... become True or False, and ~ or an empty value becomes None; with
    `only_text` they are strings, too, since "off" may be a name. Raises ValueError, in one line,
    for anything else: tags, duplicate keys, deep nesting, and aliases of nested or long lists and
    of dicts, a few of which can expand to millions of entries.
    """
    try:
        return yaml.load(read_text(path, limit), _TextLoader if only_text else _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(get_line(error)) from None


_PLAIN_TAGS = (":bool", ":null", ":str", ":seq", ":map")


def _select_resolvers() -> dict[str, list]:
    """PyYAML's patterns of plain values, by first character, without those of numbers and dates."""
    resolvers = {}
    for character, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items():
        resolvers[character] = [pair for pair in pairs if pair[0].endswith(_PLAIN_TAGS)]
    return resolvers


def _select_constructors() -> dict[str | None, Any]:
    """PyYAML's constructors by tag; None stands for all others, which are refused."""
    constructors = yaml.SafeLoader.yaml_constructors
    tags = [tag for tag in constructors if tag is None or tag.endswith(_PLAIN_TAGS)]
    return {tag: constructors[tag] for tag in tags}


class _Loader(yaml.SafeLoader):
    """Of plain values, it recognises only booleans and null, and leaves all others as text."""

    yaml_implicit_resolvers: ClassVar = _select_resolvers()
    yaml_constructors: ClassVar = _select_constructors()
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "nested too deeply", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent) and not _is_short(node):
            problem = f"*{event.anchor} repeats a list or mapping"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        content: dict[str, Any] = {}
        for key, value in node.value:
            problem = ""
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key must be text"
            elif key.value in content:
                problem = f"{key.value} is given twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            content[key.value] = self.construct_object(value, deep=deep)
        return content


class _TextLoader(_Loader):
    """It leaves all plain values as text."""

    yaml_implicit_resolvers: ClassVar = {}


def _is_short(node: yaml.Node | None) -> bool:
    """True for a value, and for a list of a few values.

    PyYAML writes such a list as an alias where a program has it twice.
    """
    values = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if len(values) > _MAX_ALIAS_LENGTH:
        return False
    return all(isinstance(value, yaml.ScalarNode) for value in values)
