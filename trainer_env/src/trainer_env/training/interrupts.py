"""What Ctrl-C means to a run: once, while it trains, that this step is the last; otherwise, and twice, the end now."""

import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue


class Interrupts:
    """stop: set when the optimizer step that is being taken is to be the last; each training has its own. say: tells
    people.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.stop = threading.Event()
        self.ending = False
        """Whether all is to end: whatever is raised from now on comes of that."""
        self.killing = False
        """Whether all is being killed already."""
        self._say = say
        self._words: SimpleQueue[str | None] = SimpleQueue()
        self._count = 0
        self._stoppable = False

    @property
    def impatient(self) -> bool:
        """Whether it was asked for more than once."""
        return self._count > 1

    def interrupt(self) -> None:
        """One Ctrl-C. Raises KeyboardInterrupt, unless the step is to be taken or everything is being killed."""
        self._count += 1
        if self._stoppable and self._count == 1:
            self.stop.set()
            self._words.put("stopping after this step; once more to stop now")
        elif not self.killing:
            self.ending = True
            raise KeyboardInterrupt

    def forget(self) -> None:
        """What was interrupted is over: it ends nothing that comes after it."""
        self._count = 0
        self.ending = False
        self.stop = threading.Event()

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """A Ctrl-C in here lets the step end.

        That is said by another thread: the handler may have come in the middle of a print, which nobody enters twice.
        """
        context = contextvars.copy_context()  # A notebook knows its cell by it.
        words = self._words = SimpleQueue()
        speaker = threading.Thread(target=context.run, args=(self._speak, words), name="tandem-interrupts", daemon=True)
        try:
            speaker.start()
            self._stoppable = True
            yield
        finally:
            self._stoppable = False
            words.put(None)
            if speaker.is_alive():
                speaker.join()

    def _speak(self, words: "SimpleQueue[str | None]") -> None:
        while (text := words.get()) is not None:
            self._say(text)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """In here Ctrl-C comes to `interrupt`, unless somebody else takes care of it: for notebooks and scripts."""
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self.interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
