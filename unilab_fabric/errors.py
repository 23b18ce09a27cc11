"""What a user may read before training starts: one line per problem, no traceback."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """One problem with what the user gave: the field, its value and what would have worked."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field = field
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field} is {self.value}; {self.allowed}"


class UserErrors(Exception):
    """All the problems found in one pass; the command line prints one line for each."""

    def __init__(self, problems: Iterable[UserError]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Problems:
    """Gathers problems instead of stopping at the first one."""

    def __init__(self) -> None:
        self.found: list[UserError] = []

    def add(self, field: str, value: object, allowed: str) -> None:
        """One more problem."""
        self.found.append(UserError(field, value, allowed))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A block whose UserError or UserErrors is kept; what follows the block goes on."""
        try:
            yield
        except UserError as problem:
            self.found.append(problem)
        except UserErrors as several:
            self.found += several.problems

    def raise_any(self) -> None:
        """Raises UserErrors if there was a problem; one that was found twice is said once."""
        if self.found:
            raise UserErrors({str(problem): problem for problem in self.found}.values())


class PeerLost(RuntimeError):
    """A collective could not finish, as a rule because another rank has ended; what ended it is told there."""


class PeerStalled(RuntimeError):
    """A rank did not arrive at a collective in time."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names, the nearest first: text for the `allowed` part of an error about a name."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return "allowed: " + ", ".join(names)
