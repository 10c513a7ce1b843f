"""A conversation: questions, commands, and answers that Ctrl-C stops."""

import time
from collections.abc import Sequence

from jaxspec.errors import JaxspecError
from serve.terminal.screen import Screen, figures
from serve.terminal.talkers import Talker

# How often the figures at the bottom are new.
_DRAW_SECONDS = 0.25
COMMANDS = {
    "/clear": "begins a new conversation",
    "/exit": "ends, as Ctrl-D does",
    "/help": "shows this",
}
_STOPS = "Ctrl-C stops an answer."


class Conversation:
    """
    Args:
        system: a message before all others.
    """

    def __init__(self, talker: Talker, screen: Screen, system: str | None = None):
        self._talker = talker
        self._screen = screen
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def run(self) -> int:
        """Until the user ends it; 1 if the user was no person and an answer has failed.

        Raises:
            KeyboardInterrupt: the user was no person, who could go on after it.
        """
        failed = False
        while True:
            try:
                line = self._screen.ask()
                if line is None or line.strip() == "/exit":
                    return 1 if failed and not self._screen.interactive else 0
                failed |= not self._take(line.strip())
            except KeyboardInterrupt:
                if not self._screen.interactive:
                    raise
                self._screen.note("/exit or Ctrl-D ends.")

    def _take(self, line: str) -> bool:
        """Does what one line asks for; False if that fails."""
        if line == "/clear":
            self._messages = list(self._opening)
            self._screen.note("A new conversation.")
        elif line == "/help":
            for name, text in COMMANDS.items():
                self._screen.note(f"{name:<8} {text}")
            self._screen.note(_STOPS)
        elif line.startswith("/") and line[1:].isalpha():
            self._screen.note(f"There is no command {line}: see /help.")
        elif line:
            return self._answer(line)
        return True

    def _answer(self, question: str) -> bool:
        """Shows an answer. What there is of one that was stopped stays in the conversation."""
        asked = [*self._messages, {"role": "user", "content": question}]
        answer = Answer(self._talker.histogram())
        failure = None
        try:
            with self._screen.status_line() as status:
                for piece in self._talker.answer(asked):
                    self._screen.show(piece.runs)
                    answer.add(piece.text, piece.num_tokens, piece.histogram)
                    if answer.is_due():
                        status.draw(answer.figures(self._talker.histogram()))
        except KeyboardInterrupt:
            if not self._screen.interactive:
                raise
            answer.note = "stopped: "
        except JaxspecError as e:
            failure = str(e)
        self._screen.end_answer()
        if failure is not None:
            self._screen.fail(failure)
            return False
        self._messages = [*asked, {"role": "assistant", "content": answer.text}] if answer.text else self._messages
        self._screen.note(answer.note + answer.figures(self._talker.histogram()))
        return True


class Answer:
    """An answer so far.

    Args:
        baseline: the talker's histogram before it.

    Attributes:
        note: what is special about it.
    """

    def __init__(self, baseline: Sequence[int] | None):
        self.text = ""
        self.note = ""
        self._num_tokens = 0
        self._own: Sequence[int] | None = None
        self._baseline = baseline
        self._started = self._drawn = time.monotonic()

    def add(self, text: str, num_tokens: int, histogram: Sequence[int] | None) -> None:
        self.text += text
        self._num_tokens += num_tokens
        self._own = histogram or self._own

    def is_due(self) -> bool:
        """The figures were not drawn for a while; asked once, they count as drawn."""
        now = time.monotonic()
        due = now - self._drawn >= _DRAW_SECONDS
        self._drawn = now if due else self._drawn
        return due

    def figures(self, histogram: Sequence[int] | None) -> str:
        """
        Args:
            histogram: the talker's now, for an answer that has not told its own.
        """
        since = self._own
        if since is None and histogram:
            since = [now - then for now, then in zip(histogram, self._baseline or [0] * len(histogram), strict=True)]
        return figures(self._num_tokens, time.monotonic() - self._started, since)
