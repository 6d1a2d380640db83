"""huggingface_hub, as of 2.4."""

from huggingface_hub import constants


def go_offline() -> None:
    """From here on, take files of the hub from the cache alone: the library would try to reach each
    for half a minute.

    It reads its variable HF_HUB_OFFLINE only when it is imported.
    """
    constants.HF_HUB_OFFLINE = True
