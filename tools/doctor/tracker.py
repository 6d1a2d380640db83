"""Tracker: whether W&B can be reached and knows this user, or works offline. Never takes longer than a few seconds."""

import base64
import json
import netrc
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from tools.doctor.finding import Finding
from tools.doctor.world import World

PATIENCE_S = 5.0
OFFLINE = ("offline", "disabled", "dryrun")


def tracker(world: World) -> list[Finding]:
    """A row on rank 0, which alone sends to W&B. What is missing is a warning: the run then writes its rows offline."""
    if not world.is_main:
        return []
    name = "W&B"
    mode = os.environ.get("WANDB_MODE", "online")
    if mode in OFFLINE:
        return [Finding(name, "ok", f"{mode} (WANDB_MODE)")]
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/")
    key = _key(base, os.environ)
    answer: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: answer.append(_ask(base, key)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)  # looking a name up has no time limit of its own
    state, said = answer[0] if answer else ("unreachable", f"no answer within {PATIENCE_S:.0f} s")
    offline = "the run writes offline and says how to upload; export WANDB_MODE=offline if that is meant"
    if state == "unreachable":
        return [Finding(name, "warning", f"{base} can't be reached ({said})", offline)]
    if not key:
        return [
            Finding(name, "warning", f"{base} is reachable, but nobody is logged in", f"wandb login; else {offline}")
        ]
    if state == "refused":
        return [
            Finding(name, "failed", f"{base} refuses the key ({said})", "wandb login --relogin, or fix WANDB_API_KEY")
        ]
    return [Finding(name, "ok", f"reachable, logged in{said}")]


def _key(base: str, environ: Mapping[str, str]) -> str:
    if key := environ.get("WANDB_API_KEY"):
        return key
    try:
        entry = netrc.netrc(environ.get("NETRC")).authenticators(urlsplit(base).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return ""
    return (entry[2] or "") if entry else ""


def _ask(base: str, key: str) -> tuple[str, str]:
    """("known", who), ("refused", why) or ("unreachable", why); asks who the key belongs to, as `wandb login` does."""
    query = json.dumps({"query": "query { viewer { username } }"}).encode()
    request = urllib.request.Request(f"{base}/graphql", query, {"Content-Type": "application/json"})
    if key:
        request.add_header("Authorization", "Basic " + base64.b64encode(f"api:{key}".encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S - 1) as response:
            viewer = json.load(response)["data"]["viewer"]
    except urllib.error.HTTPError as error:
        return ("refused", f"HTTP {error.code}") if error.code < 500 else ("unreachable", f"HTTP {error.code}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return "unreachable", str(getattr(error, "reason", error))
    return ("known", f" as {viewer['username']}") if viewer else ("refused", "unknown key")
