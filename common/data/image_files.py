"""Which files are images: by their suffix, or else by their first bytes."""

import os
import re
from mimetypes import MimeTypes

from common.data.images import SUFFIXES
from common.data.notes import Notes
from common.files import open_regular

CAUSE = "they can't be read as images: convert them to JPEG or PNG; for HEIC, pip install pillow-heif will do, too"
_HEAD = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM....\0\0\0\0", re.DOTALL)
_UNREAD_HEAD = re.compile(rb"....ftyp(hei|hev|mif|msf)|II\*\0|MM\0\*|\0\0\0\x0cJXL", re.DOTALL)  # HEIC, TIFF, JPEG XL
_UNREAD_SUFFIXES = re.compile(r"\.(heic|heif|jxl|jxr|raw|dng|cr[23]|nef|arw|orf|rw2)")
_TYPES = MimeTypes()  # without the files of the machine


def has_image_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def is_image_file(path: str, notes: Notes) -> bool:
    """True for a regular file with an image's suffix, or with its first bytes. `notes` count those without the suffix."""
    if has_image_suffix(path):
        return True
    suffix = os.path.splitext(path)[1].lower()
    kind = _TYPES.guess_type(path)[0] or "image"
    head = b""
    if kind.startswith("image"):
        with open_regular(path) as file:
            head = file.read(16)
    name = suffix if re.fullmatch(r"\.[a-z]\w{1,11}", suffix) else "without a suffix"
    if _HEAD.match(head):
        notes.change(f"({name}) are known by their first bytes", path)
        return True
    if _UNREAD_SUFFIXES.fullmatch(suffix) or _UNREAD_HEAD.match(head):
        notes.leave_out(name, path)
    else:
        notes.skip(name, path)
    return False
