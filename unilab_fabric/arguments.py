"""The typed arguments of a class: every problem with what was given, the resolved values, the built object.

Types, defaults and help come from the constructor's signature through jsonargparse. It stops at the first problem and
speaks of its own internals, so each given value is checked alone here, and what is said is written here.
"""

import copy
import difflib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, get_loader, set_parsing_settings

from unilab_fabric.errors import Problems, UserError, nearest

set_parsing_settings(docstring_parse_attribute_docstrings=True)

Tree = dict[str, Any]
"""Nested mappings of plain values, as YAML gives them; texts from the command line are `FlagText`."""


_KEY = "it"
"""Where a class's arguments stand in a parser of their own; no message shows it."""
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    types.NoneType: "null",
    list: "a list",
    dict: "a mapping",
}


class FlagText(str):
    """A value as it stands on the command line, its type still open."""

    __slots__ = ()


def read_yaml(text: str) -> Any:
    """A YAML value; unlike YAML 1.1, `1e-3` is a number. Raises yaml.YAMLError."""
    return get_loader("yaml")(str(text))


def read_flag(text: str) -> Any:
    """A value from the command line whose type is not known yet: YAML where it is any, else the text."""
    try:
        return read_yaml(text)
    except yaml.YAMLError:
        return str(text)


def check_arguments(
    cls: type, given: Mapping[str, Any], prefix: str, problems: Problems, *, skip: frozenset[str] = frozenset()
) -> Tree:
    """All arguments of `cls`, given ones and defaults, as plain values; adds every problem with them.

    `prefix` is the section's name in messages, `skip` the arguments that are not the user's to set. What is returned
    means something only if no problem was added.
    """
    found = Problems()
    tree = check_given(cls, given, prefix, found, skip=skip)
    required = _required(cls) - skip
    if set(given) <= set(argument_types(cls)):  # else a misspelt name may have meant one of them
        for name in sorted(required - set(given)):
            found.add(_dotted(prefix, name), "missing", f"allowed: {describe(argument_types(cls)[name])}")
    if required <= set(tree):
        _check_together(class_parser(cls, skip), tree, prefix, found)
    problems.found += found.found
    return {} if found.found else _with_defaults(class_parser(cls, skip), tree)


def check_given(
    cls: type,
    given: Mapping[str, Any],
    prefix: str,
    problems: Problems,
    *,
    skip: frozenset[str] = frozenset(),
    others: bool = False,
) -> Tree:
    """The given arguments alone, each with its type; adds every problem with a name or a value.

    With `others`, names that the constructor does not show are left to it.
    """
    tree: Tree = {}
    for path, hint, value in _leaves(cls, given, (), prefix, skip, others, problems):
        with problems.gathered():
            _put(tree, path, _typed(hint, value, _dotted(prefix, *path)))
    return tree


def build(cls: type, init_args: Mapping[str, Any]) -> Any:
    """An object of a dataclass from resolved arguments, nested dataclasses included."""
    parser = class_parser(cls)
    return parser.instantiate(parser.parse_object({_KEY: dict(init_args)}))[_KEY]


@cache
def class_parser(cls: type, skip: frozenset[str] = frozenset()) -> ArgumentParser:
    """jsonargparse's parser for the arguments of one class."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, _KEY, instantiate=is_dataclass(cls), skip=set(skip), fail_untyped=False)
    return parser


def argument_names(cls: type, prefix: str, skip: frozenset[str] = frozenset()) -> list[str]:
    """Dotted names of all arguments, nested dataclasses taken apart."""
    defaults = class_parser(cls, skip).get_defaults()
    return [_dotted(prefix, name.removeprefix(f"{_KEY}.")) for name, _ in defaults.items()]


def suggest(key: str, siblings: Iterable[str], everywhere: Iterable[str]) -> str:
    """What an unknown name may have meant: text for the `allowed` part of an error."""
    siblings, everywhere = list(siblings), list(everywhere)
    same_ending = [name for name in everywhere if name.split(".")[-1] == key.split(".")[-1]]
    close = (
        difflib.get_close_matches(key, siblings, n=1) or same_ending or difflib.get_close_matches(key, everywhere, n=1)
    )
    return f"there is no such setting; {nearest(key, close[:1] or siblings)}"


def describe(hint: Any) -> str:
    """A type in words, for the `allowed` part of a message."""
    arguments = get_args(hint)
    match get_origin(hint) or hint:
        case origin if origin is Literal:
            return _either([str(value) for value in arguments])
        case origin if origin in (Union, types.UnionType):
            return _either([describe(kind) for kind in arguments])
        case origin if origin is list and arguments:
            return f"a list, each entry {describe(arguments[0])}"
        case origin if origin is tuple and arguments and Ellipsis not in arguments:
            return f"[{', '.join(describe(kind) for kind in arguments)}]"
        case origin if origin is tuple and arguments:
            return f"a list, each entry {describe(arguments[0])}"
        case origin if origin is dict and arguments:
            return f"a mapping, each value {describe(arguments[1])}"
        case other:
            return (
                "a mapping of settings" if is_dataclass(other) else _WORDS.get(other, f"a value of type {_name(other)}")
            )


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def argument_types(cls: type) -> dict[str, Any]:
    """Type of each constructor argument.

    `**kwargs` stand for the arguments of the next class that has a constructor; where they go elsewhere, for those that
    jsonargparse finds there, with any type.
    """
    if is_dataclass(cls):
        hints = get_type_hints(cls)
        return {field.name: hints[field.name] for field in fields(cls) if field.init}
    found: dict[str, Any] = {}
    for constructor in _constructors(cls):
        for parameter in inspect.signature(constructor).parameters.values():
            if parameter.kind in _NAMED:
                found.setdefault(parameter.name, _type_of(parameter, constructor))
    found.pop("self", None)
    return found | dict.fromkeys(_handed_on(cls) - set(found), Any)


def takes_any_argument(cls: type) -> bool:
    """Whether the constructor hands `**kwargs` to where nobody can tell which ones are taken."""
    return not is_dataclass(cls) and _has_kwargs(_constructors(cls)[-1]) and not _handed_on(cls)


def _constructors(cls: type) -> list[Callable[..., None]]:
    """The constructor, and those of base classes that it can hand its `**kwargs` to."""
    found: list[Callable[..., None]] = []
    for base in cls.__mro__:
        if "__init__" in vars(base) and (not found or (_has_kwargs(found[-1]) and base is not object)):
            found.append(vars(base)["__init__"])
    return found


def _has_kwargs(function: Callable[..., None]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values())


def _handed_on(cls: type) -> set[str]:
    """Names that the last constructor's `**kwargs` can hold, as far as its code shows."""
    constructors = _constructors(cls)
    if not _has_kwargs(constructors[-1]):
        return set()
    named = {name for constructor in constructors for name in inspect.signature(constructor).parameters}
    traced = {name.split(".")[1] for name, _ in class_parser(cls).get_defaults().items()}
    return traced - named


def _type_of(parameter: inspect.Parameter, constructor: Callable[..., None]) -> Any:
    """A parameter's type; any type where it has none, or one that exists for type checkers only."""
    if parameter.annotation is parameter.empty:
        return Any
    holder = type("holder", (), {"__annotations__": {parameter.name: parameter.annotation}})
    try:
        return get_type_hints(holder, vars(sys.modules[constructor.__module__]))[parameter.name]
    except NameError:
        return Any


def _leaves(
    cls: type,
    given: Mapping[str, Any],
    path: tuple[str, ...],
    prefix: str,
    skip: frozenset[str],
    others: bool,
    problems: Problems,
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Path, type and value of everything given, dataclasses taken apart; unknown names become problems."""
    types_by_name = {name: hint for name, hint in argument_types(cls).items() if name not in skip}
    for name, value in given.items():
        here = (*path, str(name))
        if name not in types_by_name and others:
            yield here, Any, value
            continue
        if name not in types_by_name:
            key, siblings = _dotted(prefix, *here), [_dotted(prefix, *path, known) for known in types_by_name]
            problems.add(key, shown(value), suggest(key, siblings, siblings))
            continue
        hint = types_by_name[name]
        nested = _dataclass_in(hint)
        if nested and isinstance(value, FlagText):
            value = read_flag(value)
        if nested and isinstance(value, Mapping) and value:
            yield from _leaves(nested, value, here, prefix, frozenset(), False, problems)
        elif nested is hint and not value:  # an empty section in a file
            continue
        elif nested is hint:
            problems.add(_dotted(prefix, *here), shown(value), f"allowed: {describe(hint)}")
        else:
            yield here, hint, value


def _typed(hint: Any, value: Any, key: str) -> Any:
    """The value, converted to its type; raises UserError where it is not of that type."""
    parser = _value_parser(hint)
    try:
        if isinstance(value, FlagText):
            return parser.parse_args([f"--{_KEY}={value}"])[_KEY]
        return parser.parse_object({_KEY: _without_flag_texts(value)})[_KEY]
    except ArgumentError:
        raise UserError(key, shown(value), f"allowed: {describe(hint)}") from None


@cache
def _value_parser(hint: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument(f"--{_KEY}", type=hint)
    return parser


def _without_flag_texts(value: Any) -> Any:
    """Texts from the command line inside a mapping have no type to go by: they are read as YAML."""
    if isinstance(value, Mapping):
        return {key: _without_flag_texts(entry) for key, entry in value.items()}
    return read_flag(value) if isinstance(value, FlagText) else value


def _check_together(parser: ArgumentParser, tree: Tree, prefix: str, problems: Problems) -> None:
    """What dataclasses check when they are made; a refused value is taken out so that the next one shows too."""
    tree = copy.deepcopy(tree)
    while True:
        attempt = Problems()
        try:
            with attempt.gathered():
                parser.instantiate(parser.parse_object({_KEY: tree}))
        except ValueError as error:  # how a dataclass of the user's refuses a value
            if isinstance(error.__cause__, UserError):  # one of ours that may be null: a union to the parser
                attempt.found.append(error.__cause__)
            else:
                attempt.add(prefix, "not accepted", str(error))
        problems.found += attempt.found
        taken = [_take(tree, problem.field.removeprefix(f"{prefix}.").split(".")) for problem in attempt.found]
        if not any(taken):
            return


def _with_defaults(parser: ArgumentParser, tree: Tree) -> Tree:
    resolved: Tree = read_yaml(parser.dump(parser.parse_object({_KEY: tree}), skip_unset=False)) or {}
    return resolved.get(_KEY) or {}


def _required(cls: type) -> set[str]:
    if is_dataclass(cls):
        return {
            field.name
            for field in fields(cls)
            if field.init and field.default is MISSING and field.default_factory is MISSING
        }
    parameters = inspect.signature(cls).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind in _NAMED}


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that a setting holds, also where it may be null."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    return None


def shown(value: Any) -> str:
    """A value as one line of YAML."""
    if isinstance(value, str):
        return str(value)
    text: str = yaml.safe_dump(_without_flag_texts(value), default_flow_style=True, width=10_000)
    return text.split("\n...")[0].strip()


def _dotted(*names: str) -> str:
    return ".".join(filter(None, names))


def _put(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _take(tree: Tree, path: list[str]) -> bool:
    """Removes one value; false if it was not there."""
    for name in path[:-1]:
        tree = tree.get(name, {})
    return tree.pop(path[-1], MISSING) is not MISSING


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by dotted name, as on the command line."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = path if key == "init_args" else f"{path}.{key}".removeprefix(".")
        found |= flat(value, name) if isinstance(value, Mapping) else {name: value}
    return found
