"""Arguments of the commands other than fit: those of a dataclass, its help made of its docstrings."""

import re
from collections.abc import Sequence
from typing import TypeVar

from jsonargparse import ArgumentParser

from unilab_fabric.arguments import build, check_arguments
from unilab_fabric.errors import Problems
from unilab_fabric.sources import flags_to_tree, parse_flags

PROGRAM = "python -m unilab_fabric"

Options = TypeVar("Options")


def command_options(command: str, cls: type[Options], description: str | None, tokens: Sequence[str]) -> Options | None:
    """The arguments of a command that takes those of a dataclass; None once its help has been shown."""
    problems = Problems()
    flags = parse_flags(tokens, problems, switches=["help"])
    if any(flag.name == "help" for flag in flags):
        parser = ArgumentParser(prog=f"{PROGRAM} {command}", description=description)
        parser.add_class_arguments(cls, None)
        print(help_text(parser))
        return None
    settings = check_arguments(cls, flags_to_tree(flags), "", problems)
    problems.raise_any()
    options: Options = build(cls, settings)
    return options


def help_text(parser: ArgumentParser) -> str:
    """The help text, without what jsonargparse's own command line would offer and ours does not."""
    text = parser.format_help()
    for absent in (
        r"^  --\S+ CONFIG\s+Path to a configuration file\.\n",
        r", --\S+\+ \S+",
        r"\s+\(default: (null|False)\)",
    ):
        text = re.sub(absent, "", text, flags=re.MULTILINE)
    return text
