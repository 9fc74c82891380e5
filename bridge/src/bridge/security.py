"""Who may talk: the same user on ipc, holders of an allowed CURVE key on tcp.

ZAP fails open: without a domain, or without `zap_enforce_domain`, a socket whose handler is gone lets everybody in.
Both are set on every server socket here, so that a stopped handler refuses.
"""

import os
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from bridge.errors import ConfigError

ZAP_DOMAIN = "tandem"


class KeyPair(NamedTuple):
    """A CURVE key pair, z85 text."""

    public: str
    secret: str


class ServerKeys(NamedTuple):
    """The server's own pair, and the public keys that may connect."""

    own: KeyPair
    allowed: frozenset[str]


def new_keys() -> KeyPair:
    """A fresh CURVE pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


class _AllowList:
    """pyzmq's credentials provider: is this public key one of ours?"""

    def __init__(self, keys: ServerKeys) -> None:
        self._allowed = {key.encode() for key in keys.allowed}

    def callback(self, domain: str, key: bytes) -> bool:
        """key: z85 bytes."""
        return domain == ZAP_DOMAIN and key in self._allowed


class Gatekeeper:
    """The ZAP handler of one zmq context; it must run as long as the sockets it guards."""

    def __init__(self, context: zmq.asyncio.Context, keys: ServerKeys | None) -> None:
        self._keys = keys
        self._handler = AsyncioAuthenticator(context) if keys else None

    def start(self) -> None:
        """Begin to answer; must come before any bind."""
        if self._handler and self._keys:
            self._handler.start()
            self._handler.configure_curve_callback(ZAP_DOMAIN, credentials_provider=_AllowList(self._keys))

    def stop(self) -> None:
        """Stop answering: from now on every new connection is refused."""
        if self._handler:
            self._handler.stop()

    def protect(self, socket: zmq.asyncio.Socket, address: str) -> None:
        """Set up a server socket for an address, before it binds. Raises ConfigError for an open one."""
        if address.startswith("ipc://"):
            socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            return
        if address.startswith(("tcp://*", "tcp://0.0.0.0", "tcp://[::]")):
            raise ConfigError(
                f"{address} would listen on every network of this host.",
                remedy="Name the one address that the trainer uses, for example tcp://10.0.0.5:5555.",
            )
        if self._keys is None:
            raise ConfigError(f"{address} needs CURVE keys: tcp is never open.")
        socket.curve_server = True
        socket.curve_secretkey = self._keys.own.secret.encode()
        socket.curve_publickey = self._keys.own.public.encode()
        socket.zap_domain = ZAP_DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def authenticate(socket: zmq.asyncio.Socket, server_key: str, own: KeyPair | None) -> None:
    """Set up a client socket; nothing to do on ipc (no server key)."""
    if not server_key:
        return
    if own is None or not own.secret:
        raise ConfigError(
            "The connection has a server key but no client key.", remedy="Read the connection file again."
        )
    socket.curve_serverkey = server_key.encode()
    socket.curve_publickey = own.public.encode()
    socket.curve_secretkey = own.secret.encode()
