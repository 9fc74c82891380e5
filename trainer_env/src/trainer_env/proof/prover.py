"""The proof of sync of one run: what is asked of both halves, when, and what happens when they disagree.

The weights that sample are proven before the optimizer trains on their samples, and nothing waits for that: the server
scores the probe beside the completions, and the trainer does while it waits for these.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from bridge.errors import BridgeError, SyncMismatch
from bridge.protocol import Canary, CanaryScored, pack_ids, unpack_logprobs
from trainer_env.proof import comparisons
from trainer_env.proof.agreement import Figures
from trainer_env.proof.canary import CanaryWeights, borrowed
from trainer_env.proof.comparisons import Check, Finding, Verdict
from trainer_env.proof.probe import Probe, Scorer, chosen, joined
from trainer_env.publishing.packing import ADAPTER, pack
from trainer_env.serving.server import Server

SIZING_TOKENS = 24
CACHED_EVERY = 10
"""Publishes for one check of the prefix cache."""


class SyncWarning(UserWarning):
    """The halves disagree, and the run goes on as it was told to."""


class Prover:
    """Observes rollouts (see `rollouts.Observer`) and steps. `scorer` is to be set before the first of them.

    model: a PeftModel, unwrapped. folder: of the run, where the probe lies. tell: says something to people, for as long
    as the run lasts. publish_dtype: as of the adapters. timeout_s: for an answer of the server.
    """

    scorer: Scorer

    def __init__(
        self,
        server: Server,
        model: Any,
        folder: Path,
        *,
        on_mismatch: Literal["stop", "warn"] = "stop",
        tell: Callable[[str], None] = lambda _: None,
        publish_dtype: str = "float32",
        timeout_s: float = 300.0,
        cached_every: int = CACHED_EVERY,
    ) -> None:
        self._server = server
        self._model = model
        self._folder = folder
        self._on_mismatch = on_mismatch
        self._tell = tell
        self._dtype = publish_dtype
        self._timeout_s = timeout_s
        self._cached_every = cached_every
        self._probe: Probe | None = None
        self._server_uuid = ""
        self._asked: list[Future[Any]] = []
        self._adapted: list[float] = []
        self._version = 0
        self._proven = 0
        self._verdict: Verdict | None = None
        self._ratio_is_off = False
        self._seconds = 0.0
        self._warned: set[Check] = set()

    # ---- while completions are sampled -------------------------------------------------------------------------------

    def asking(self, step: int) -> None:
        """Completions under version `step` are about to be asked for: first have the server score the probe.

        An engine may have to score without anything else in flight, and waits for completions that came before.
        """
        self._begin_anew_with_another_server()
        if self._probe:
            with self._timed():
                self._ask(self._probe, step)

    def asked(self) -> None:
        """Completions are being sampled: score the probe here meanwhile."""
        if self._probe and self._asked:
            with self._timed():
                self._adapted = self._probe.score()

    def answered(self, step: int, sampled: Sequence[tuple[list[int], list[int]]]) -> None:
        """They are here, as (prompt, completion): say whether they may be trained on.

        A server's first ones begin with the canary.

        Raises SyncMismatch, unless a mismatch is only to be warned of.
        """
        with self._timed():
            self._begin_anew_with_another_server()
            if self._probe is None:
                self._probe = self._begin(sampled)
                self._ask(self._probe, step)
                self._adapted = self._probe.score()
            if self._asked:
                self._judge(self._probe)

    # ---- around an optimizer step ------------------------------------------------------------------------------------

    def before_step(self, figures: Figures, step: int) -> None:
        """Look at the ratio of the batch that is about to be learned from: on-policy it is 1.

        step: optimizer steps taken so far. Raises as `answered` does.
        """
        mean, error, apart = figures.ratio_mean, figures.ratio_error, figures.dlogp_mean_abs
        if mean is None or error is None or apart is None or figures.oldest_version != step:
            return
        found = comparisons.ratio(mean, error, figures.tokens, apart)
        self._ratio_is_off = found.verdict == "disagrees"
        self._conclude([found], step)

    def mismatch(self, error: SyncMismatch) -> None:
        """Raise an error that was found elsewhere, or warn of it."""
        self._raise_or_warn("change", error)

    def take(self) -> tuple[Verdict | None, float]:
        """The verdict on the step that ends, and the milliseconds that the proof took since this was last asked."""
        verdict = "disagrees" if self._ratio_is_off else self._verdict
        milliseconds = 1000 * self._seconds
        self._ratio_is_off, self._seconds = False, 0.0
        return verdict, milliseconds

    # ---- the checks --------------------------------------------------------------------------------------------------

    def _begin_anew_with_another_server(self) -> None:
        """One that took a dead one's place has proven nothing yet."""
        if self._server.welcome.server_uuid != self._server_uuid:
            self._server_uuid = self._server.welcome.server_uuid
            self._probe, self._version, self._asked = None, 0, []

    def _begin(self, sampled: Sequence[tuple[list[int], list[int]]]) -> Probe:
        """Score the probe under the base model, and see what a canary does to it."""
        rows = chosen(self._folder, sampled, self._server.welcome.limits.max_context)
        probe = Probe(rows, self._server, self.scorer, self._model.disable_adapter(), self._timeout_s)
        canary = self._canary(probe)
        self._verdict = comparisons.verdict(canary)
        self._conclude([comparisons.base(probe.trainer_base, probe.server_base), *canary], 0)
        return probe

    def _canary(self, probe: Probe) -> list[Finding]:
        with borrowed(self._model) as parameters:
            weights = CanaryWeights(parameters, _scaling(self._model))
            few = [probe.rows[0][-SIZING_TOKENS:]]
            weights.resize(lambda: self.scorer(few)[0])
            packed = pack(self._model, max_rank=self._server.welcome.limits.max_lora_rank, dtype=self._dtype)
            request = Canary(
                digest=packed.digest,
                adapter_config=packed.adapter_config,
                rows=tuple(map(pack_ids, probe.rows)),
                deadline_s=self._timeout_s,
            )
            answer = self._server.submit(request, packed.payload)
            whole, without = probe.score(), weights.without_each(probe.score)
        try:
            found: CanaryScored = answer.result()
        except BridgeError as error:
            error.what = f"The canary, an adapter that the proof of sync makes, cannot be asked for: {error.what}"
            error.log_path = error.log_path or self._server.welcome.log_path
            raise
        return [
            comparisons.canary(
                trainer_base=probe.trainer_base,
                trainer=whole,
                without=without,
                server_base=joined(found.base),
                server=joined(found.adapted),
            ),
            comparisons.cached_prefix(unpack_logprobs(found.sampled), unpack_logprobs(found.rescored), probe.noise),
        ]

    def _ask(self, probe: Probe, version: int) -> None:
        """Of version 0, the base model, everything has been said. A version is proven once."""
        if version == self._version:
            return
        self._version = version
        self._asked = probe.ask(version)

    def _judge(self, probe: Probe) -> None:
        asked, self._asked = self._asked, []
        findings = [self._shift(probe, asked)]
        if findings[0].verdict == "disagrees":  # Once more: it may have been a passing fault.
            findings = [self._shift(probe, probe.ask(self._version))]
        if self._proven % self._cached_every == 0:
            findings.append(comparisons.cached_prefix(*probe.over_a_cached_prefix(self._version), probe.noise))
        self._proven += 1
        self._verdict = comparisons.verdict(findings)
        self._conclude(findings, self._version)

    def _shift(self, probe: Probe, asked: Sequence[Future[Any]]) -> Finding:
        ours = comparisons.less(self._adapted, probe.trainer_base)
        return comparisons.shift(ours, comparisons.less(probe.answer(asked), probe.server_base), probe.noise)

    # ---- what comes of them ------------------------------------------------------------------------------------------

    def _conclude(self, findings: Sequence[Finding], version: int) -> None:
        for found in findings:
            if found.verdict == "disagrees":
                what = (
                    f"Trainer and server do not compute the same policy, says the {found.check} check of adapter "
                    f"version {version}: {found.what}."
                )
                self._raise_or_warn(found.check, SyncMismatch(what, why=found.why))

    def _raise_or_warn(self, check: Check, error: SyncMismatch) -> None:
        error.log_path = error.log_path or self._server.welcome.log_path
        error.remedy = error.remedy or (
            "Look for the engine's warnings in that log and in engine.log, and compare the base models that "
            'config.toml and server.toml name. rollout.on_sync_mismatch = "warn" goes on all the same.'
        )
        if self._on_mismatch == "stop":
            raise error
        if check not in self._warned:
            self._warned.add(check)
            self._tell(error.what)
            warnings.warn(str(error), SyncWarning, stacklevel=2)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started


def _scaling(model: Any) -> float:
    """What the adapter's product is multiplied by."""
    config = model.peft_config[ADAPTER]
    return config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
