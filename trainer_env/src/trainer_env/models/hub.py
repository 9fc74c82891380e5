"""What the Hugging Face libraries are told before they are imported: to send no statistics, and to go offline at once.

Without a network they would try for half a minute first, for each file.
"""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

PATIENCE_S = 5.0


def without_statistics() -> None:
    """Have the hub's client send none, in this process and its children, unless the environment says otherwise.

    To be called before it is imported: it reads that variable once.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def go_offline_unless_reachable() -> str:
    """Set HF_HUB_OFFLINE for this process and its children when the hub cannot be reached; why, or an empty string.

    To be called before a Hugging Face library is imported: each reads that variable once. What is in their caches is
    found in either case.
    """
    why = unreachable()
    if why:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return why


def unreachable() -> str:
    """Why the hub is not to be asked now, or an empty string. Waits PATIENCE_S for it to answer."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set, so that only what is in the local cache is found."
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host = endpoint.hostname or ""
    if {endpoint.scheme, "all"} & getproxies().keys() and not proxy_bypass(host):
        return ""  # Whoever answers for the hub is not to be found by its name.
    try:
        socket.create_connection(
            (host, endpoint.port or (443 if endpoint.scheme == "https" else 80)), PATIENCE_S
        ).close()
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror or error}."
    return ""
