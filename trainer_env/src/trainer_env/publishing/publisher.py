"""Makes the server serve the trained adapter, one version after the other."""

import time
from dataclasses import dataclass
from typing import Any

from bridge.errors import BridgeError, Refused, StaleVersion, SyncMismatch
from bridge.protocol import AdapterLoaded, PublishAdapter
from trainer_env.publishing.packing import Packer, adapter_tensors
from trainer_env.serving.server import Server


@dataclass(frozen=True)
class Published:
    """What became of one publish. Times in milliseconds; load_ms is the engine's share of publish_ms.

    repeated: the trained weights are those of the version before.
    """

    loaded: AdapterLoaded
    fingerprint: tuple[float, float] | None
    publish_ms: float
    load_ms: float
    repeated: bool = False


class Publisher:
    """Sends one adapter a version, in rising order; a version that is asked for again is not sent again.

    Version 0 is the server's base model, and what an adapter that has not been trained yet computes: it is never sent.
    """

    def __init__(self, server: Server, *, timeout_s: float = 60.0, dtype: str = "float32") -> None:
        self.server = server
        self._timeout_s = timeout_s
        self._dtype = dtype
        self._packer: Packer | None = None
        self.last: Published | None = None

    def publish(self, version: int, model: Any) -> AdapterLoaded:
        """Make the server serve the model's adapter as `version`. Returns once new requests use it.

        model: a PeftModel, unwrapped, the same each time. Raises Refused for an adapter that the server cannot
        represent, StaleVersion for a version older than the last, and whatever error the server answers with.
        """
        if self.last is not None and version <= self.last.loaded.version:
            if version == self.last.loaded.version:
                return self.last.loaded
            raise StaleVersion(
                f"Adapter version {version} was to be published after version {self.last.loaded.version}.",
                why="Versions are optimizer steps, and those only rise within a run.",
            )
        if version == 0:
            self.last = Published(_base_model(model), None, 0.0, 0.0)
            return self.last.loaded
        started = time.perf_counter()
        if self._packer is None:
            limits = self.server.welcome.limits
            self._packer = Packer(model, max_rank=limits.max_lora_rank, dtype=self._dtype)
        packed = self._packer.pack()
        request = PublishAdapter(
            version=version,
            digest=packed.digest,
            adapter_config=packed.adapter_config,
            deadline_s=self._timeout_s,
        )
        try:
            loaded: AdapterLoaded = self.server.ask(request, packed.payload)
        except BridgeError as error:
            error.what = f"Adapter version {version} does not serve: {error.what}"
            error.log_path = error.log_path or self.server.welcome.log_path
            error.remedy = error.remedy or "That log says more. `--resume` goes on from the last checkpoint."
            raise
        if loaded.version != version:
            raise SyncMismatch(
                f"Adapter version {version} was published, and the server loaded version {loaded.version}."
            )
        self.last = Published(
            loaded,
            packed.fingerprint,
            publish_ms=(time.perf_counter() - started) * 1000,
            load_ms=loaded.load_s * 1000,
            repeated=self.last is not None and self.last.fingerprint == packed.fingerprint,
        )
        return loaded

    def require_change(self, *, learning_rate: float, grad_norm: float) -> None:
        """Raise SyncMismatch when a step that must have moved the weights published those of the version before."""
        if self.last and self.last.repeated and learning_rate > 0 and grad_norm > 0:
            raise SyncMismatch(
                f"Adapter version {self.last.loaded.version} has the very weights of the version before it, "
                f"after a step with learning rate {learning_rate:g} and gradient norm {grad_norm:g}.",
                why="The optimizer trains other weights than the ones that are published.",
                remedy="Report this with the versions of unsloth, trl and peft that scripts/doctor.py prints.",
            )


def _base_model(model: Any) -> AdapterLoaded:
    """The answer for version 0. Raises Refused when the adapter already differs from the base model."""
    if any(tensor.any() for name, tensor in adapter_tensors(model).items() if ".lora_B." in name):
        raise Refused(
            "Version 0 is the base model, and this adapter already differs from it.",
            remedy="Leave lora.init_lora_weights at true, or go on from a checkpoint with --resume.",
        )
    return AdapterLoaded(version=0, name="", nbytes=0, spool_s=0.0, load_s=0.0)
