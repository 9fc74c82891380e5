"""Who may talk: the same user on ipc, holders of an allowed CURVE key on tcp.

ZAP fails open: without a domain, or without `zap_enforce_domain`, a socket whose handler is gone lets everybody in.
Both are set on every server socket here, so that a stopped handler refuses.
"""

import os
from ipaddress import ip_address
from socket import AI_NUMERICHOST, getaddrinfo
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from bridge.errors import ConfigError

ZAP_DOMAIN = "tandem"

HANDSHAKE_MS = 5000
"""A handshake that is not over by then is begun anew, where zmq waits 30 s. A handler that is stopped while it is being
asked leaves one without an answer."""


class KeyPair(NamedTuple):
    """A CURVE key pair, z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        """Without the secret, which would end in a log."""
        return f"KeyPair(public={self.public!r})"


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
        scheme, _, place = address.partition("://")
        if scheme == "ipc":
            socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            return
        if scheme != "tcp":
            raise ConfigError(f"Cannot listen on {address}: expected an ipc:// or tcp:// address.")
        if _is_every_network(place.rpartition(":")[0]):
            raise ConfigError(
                f"{address} would listen on every network of this host.",
                remedy="Name the one address that the trainer uses, for example tcp://10.0.0.5:5555.",
            )
        if self._keys is None:
            raise ConfigError(f"{address} needs CURVE keys: tcp is never open.")
        socket.curve_server = True
        _use(socket, self._keys.own)
        socket.zap_domain = ZAP_DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def authenticate(socket: zmq.asyncio.Socket, address: str, server_key: str, own: KeyPair) -> None:
    """Set up a client socket, before it connects; nothing to do on ipc. Raises ConfigError for an open tcp address."""
    if address.startswith("ipc://"):
        return
    if not server_key or not own.secret:
        raise ConfigError(
            f"The connection to {address} has no CURVE keys: tcp is never open.",
            remedy="Use the connection file that the server wrote.",
        )
    _use(socket, own)
    try:
        socket.curve_serverkey = server_key.encode()
    except zmq.ZMQError:
        raise ConfigError("The server key of the connection is no CURVE key.") from None


def _use(socket: zmq.asyncio.Socket, own: KeyPair) -> None:
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    try:
        socket.curve_publickey = own.public.encode()
        socket.curve_secretkey = own.secret.encode()
    except zmq.ZMQError:
        raise ConfigError(f"{own} is no pair of CURVE keys (40 characters of z85 each).") from None


def _is_every_network(host: str) -> bool:
    """Whether binding to a host would listen on all interfaces, however it is spelled."""
    host = host.strip("[]")
    if host in ("", "*"):
        return True
    try:
        found = getaddrinfo(host, None, flags=AI_NUMERICHOST)
    except OSError:
        return False  # The name of an interface, or nothing that can be bound.
    addresses = [ip_address(str(info[4][0]).partition("%")[0]) for info in found]
    return any((getattr(address, "ipv4_mapped", None) or address).is_unspecified for address in addresses)
