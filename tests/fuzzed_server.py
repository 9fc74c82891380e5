"""A bridge server alone in its process, so that a crash shows, and every byte it keeps.

`python fuzzed_server.py FOLDER` reads {"tcp": …, "public": …, "secret": …, "client": …} from its input, prints its two
addresses, and ends when its input does. Few of its answers say anything: Generated, AdapterLoaded, ServerStatus.
"""

import asyncio
import json
import sys
import time

from bridge import protocol as p
from bridge.security import KeyPair, ServerKeys
from bridge.server import BridgeLimits, BridgeServer, Call

LIMITS = BridgeLimits(max_data_bytes=1 << 20, max_control_bytes=1 << 20, reply_bytes=1 << 20)
"""Answers that nobody acknowledges are kept on purpose: little of that, so that other growth shows."""


class Fuzzed:
    """Answers everything at once."""

    server: BridgeServer
    requests = 0

    async def __call__(self, message: p.DataRequest | p.ControlRequest, call: Call) -> p.Reply:
        self.requests += 1
        match message:
            case p.Hello():
                return self._welcome()
            case p.Generate():
                return p.Generated(version=1, completions=(p.Completion(message.prompt[:100], b"", "stop"),))
            case p.PublishAdapter():
                nbytes = call.buffer.nbytes if call.buffer else 0
                return p.AdapterLoaded(version=message.version, name="a", nbytes=nbytes, spool_s=0, load_s=0)
            case p.Status():
                return self._status()
            case p.Ping() | p.Lease():
                return p.Pulse(version=0, engine_steps=0, in_flight=0, engine="ready")
        return p.Done()

    def _welcome(self) -> p.Welcome:
        return p.Welcome(
            protocol=p.PROTOCOL_VERSION,
            server_uuid="uuid",
            engine="none",
            engine_version="",
            model="",
            capabilities=(),
            limits=p.Limits(max_context=64, max_lora_rank=8, adapter_slots=2, max_in_flight=64),
            version=0,
            epoch=0,
            lease_s=0,
        )

    def _status(self) -> p.ServerStatus:
        """in_use: what is worked on, by socket: 0 the data socket, 1 the control socket."""
        running = [len(socket.running) for socket in self.server._sockets.values()]
        return p.ServerStatus(
            engine="none",
            engine_version="",
            engine_pid=0,
            version=0,
            loaded=(),
            in_use=dict(enumerate(running)),
            restarts=0,
            requests=self.requests,
            generated_tokens=0,
            dropped_frames=self.server.dropped_frames,
            uptime_s=time.monotonic(),
        )


async def main(folder: str) -> None:
    """Serve until the input ends."""
    about = json.loads(sys.stdin.readline())
    own = KeyPair(about["public"], about["secret"])
    keys = ServerKeys(own, frozenset([about["client"]])) if about["tcp"] else None
    data, control = ["tcp://127.0.0.1:0"] * 2 if about["tcp"] else (f"ipc://{folder}/data", f"ipc://{folder}/control")
    handler = Fuzzed()
    handler.server = BridgeServer(handler, data=data, control=control, keys=keys, limits=LIMITS)
    await handler.server.start()
    print(json.dumps([handler.server.data, handler.server.control]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await handler.server.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
