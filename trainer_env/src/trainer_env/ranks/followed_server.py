"""The server of a run as its trainer's further processes see it: they ask, and the first process looks after it."""

import time
from pathlib import Path
from threading import Event

from bridge.blocking import BlockingClient
from bridge.endpoint import read_connection
from bridge.errors import BridgeError, PeerDied
from trainer_env.serving.lasting_client import LastingClient

POLL_S = 0.2
CONNECT_TIMEOUT_S = 30.0


class FollowedServer:
    """Asked without the lease. server_uuid: of the one that the first process is connected to.

    another_within_s: for the first process to start another server, engine and all.
    """

    def __init__(self, run_dir: Path, server_uuid: str, *, another_within_s: float) -> None:
        self._path = run_dir / "connection.json"
        self._another_within_s = another_within_s
        self._closing = Event()
        connection = read_connection(self._path)
        client = BlockingClient.connect(connection, timeout_s=CONNECT_TIMEOUT_S)
        if client.welcome.server_uuid != server_uuid:
            client.close()
            raise PeerDied("The server of this run has been replaced while its trainer's processes were connecting.")
        self.client = LastingClient(client, self._next)

    def close(self) -> None:
        """Let go of the server; it is not ours to end."""
        self._closing.set()
        self.client.close()

    def _next(self, error: PeerDied, _: int) -> BlockingClient:
        """A client of the server that the first process starts in place of a dead one.

        Raises error if none comes, or when nobody waits for it any more.
        """
        dead = self.client.welcome.server_uuid
        deadline = time.monotonic() + self._another_within_s
        while time.monotonic() < deadline and not self._closing.wait(POLL_S):
            try:
                client = BlockingClient.connect(read_connection(self._path), timeout_s=CONNECT_TIMEOUT_S)
            except BridgeError:
                pass  # It is not there yet, or the dead one's file still is.
            else:
                if client.welcome.server_uuid != dead:
                    return client
                client.close()
        raise error
