"""What a user may read before training starts: one line per problem, no traceback."""

import difflib
from collections.abc import Iterable


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


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names, the nearest first: text for the `allowed` part of an error about a name."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return "allowed: " + ", ".join(names)
