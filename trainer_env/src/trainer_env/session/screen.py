"""Where people look at a session: opened when there is something to say, closed after a training, and opened again."""

from collections.abc import Callable

from trainer_env.config import TrainConfig
from trainer_env.display import Display, Mode, open_display


class Screen:
    """A session's display of the moment. config: the session's, asked for at each opening.

    by_hand: somebody asks first, and may train later; who only asks is told in lines.
    """

    def __init__(self, config: Callable[[], TrainConfig], *, by_hand: bool) -> None:
        self._config = config
        self._by_hand = by_hand
        self._display: Display | None = None

    @property
    def display(self) -> Display:
        """What is open, or is opened now."""
        if self._display is None:
            mode = self._config().tracking.display
            return self._open("plain" if self._by_hand and mode != "none" else mode)
        return self._display

    def say(self, text: str) -> None:
        """Tell people what is going on."""
        self.display.status(text)

    def open_for_training(self) -> None:
        """As the config says, in place of what is open."""
        self.close()
        self._open(self._config().tracking.display)

    def close(self) -> None:
        """Give the terminal back. What is said afterwards opens another one."""
        display, self._display = self._display, None
        if display:
            display.close()

    def _open(self, mode: Mode) -> Display:
        self._display = display = open_display(mode, self._config().grpo.max_steps)
        return display
