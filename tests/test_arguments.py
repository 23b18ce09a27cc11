from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from unilab_fabric.arguments import (
    FlagText,
    argument_names,
    argument_types,
    build,
    check_arguments,
    describe,
    read_yaml,
    shown,
)
from unilab_fabric.errors import Problems, UserError


@dataclass(frozen=True, kw_only=True)
class Push:
    speed: float = 0.5
    """Speed [m/s]."""
    every_s: tuple[float, float] = (5.0, 10.0)

    def __post_init__(self):
        if self.speed < 0:
            raise UserError("task.push.speed", self.speed, "allowed: 0 or more")


@dataclass(frozen=True, kw_only=True)
class Limits:
    low: int = 0
    high: int = 10
    name: str = "a"

    def __post_init__(self):
        if self.high < self.low:
            raise UserError("task.high", self.high, f"allowed: {self.low} or more")
        if len(self.name) > 3:
            raise UserError("task.name", self.name, "allowed: 3 letters")


class Base:
    def __init__(self, num_envs: int, *, episode_s: float = 20.0, seed: int = 0):
        self.num_envs = num_envs


class Task(Base):
    def __init__(
        self,
        num_envs: int,
        *,
        physics: Literal["fast", "faithful"] = "fast",
        push: Push = Push(speed=1.0),
        extra: Push | None = None,
        weights: dict[str, float] = {"up": 1.0},  # noqa: B006
        **kwargs: Any,
    ):
        super().__init__(num_envs, **kwargs)


SKIP = frozenset({"seed"})


def checked(cls, **given):
    problems = Problems()
    resolved = check_arguments(cls, given, "task", problems, skip=SKIP if cls is Task else frozenset())
    assert [str(problem) for problem in problems.found] == []
    return resolved


def problems_of(cls, **given):
    problems = Problems()
    check_arguments(cls, given, "task", problems, skip=SKIP if cls is Task else frozenset())
    return [str(problem) for problem in problems.found]


def test_all_arguments_are_filled_in_with_plain_values():
    assert checked(Task, num_envs=4) == {
        "num_envs": 4,
        "physics": "fast",
        "push": {"speed": 1.0, "every_s": [5.0, 10.0]},
        "extra": None,
        "weights": {"up": 1.0},
        "episode_s": 20.0,
    }


def test_a_nested_dataclass_keeps_what_was_not_given():
    assert checked(Task, num_envs=4, push={"every_s": [1, 2]})["push"] == {"speed": 1.0, "every_s": [1.0, 2.0]}
    assert checked(Task, num_envs=4, extra={"speed": 2})["extra"] == {"speed": 2.0, "every_s": [5.0, 10.0]}


def test_texts_of_the_command_line_take_the_type_of_their_argument():
    given = {
        "num_envs": FlagText("4"),
        "push": {"speed": FlagText("1e-1")},
        "extra": FlagText("{speed: 2}"),
        "weights": {"down": FlagText("3")},
    }
    resolved = checked(Task, **given)
    assert resolved["num_envs"] == 4
    assert resolved["push"]["speed"] == 0.1
    assert resolved["extra"]["speed"] == 2.0
    assert resolved["weights"] == {"down": 3.0}
    assert checked(Limits, name=FlagText("123"))["name"] == "123"  # a text stays a text


def test_every_problem_is_told():
    assert problems_of(
        Task, num_envs="many", physics="fas", push={"sped": 1, "every_s": [1]}, extra={"speed": "x"}, episode="1"
    ) == [
        "task.num_envs is many; allowed: a whole number",
        "task.physics is fas; allowed: fast or faithful",
        "task.push.sped is 1; there is no such setting; did you mean task.push.speed?",
        "task.push.every_s is [1]; allowed: [a number, a number]",
        "task.extra.speed is x; allowed: a number",
        "task.episode is 1; there is no such setting; did you mean task.episode_s?",
    ]


def test_a_required_argument_is_asked_for_unless_a_misspelling_may_have_meant_it():
    assert problems_of(Task) == ["task.num_envs is missing; allowed: a whole number"]
    assert problems_of(Task, num_env=3) == ["task.num_env is 3; there is no such setting; did you mean task.num_envs?"]


def test_arguments_that_are_not_the_users_to_set_are_unknown():
    assert problems_of(Task, num_envs=1, seed=3)[0].startswith("task.seed is 3; there is no such setting;")


def test_what_a_nested_dataclass_refuses_is_told_without_building_the_class():
    assert problems_of(Task, num_envs=1, push={"speed": -1}) == ["task.push.speed is -1.0; allowed: 0 or more"]


def test_all_refusals_of_one_dataclass_are_told_one_after_the_other():
    assert problems_of(Limits, low=20, name="long") == [
        "task.high is 10; allowed: 20 or more",
    ]
    assert problems_of(Limits, high=-1, name="long") == [
        "task.high is -1; allowed: 0 or more",
        "task.name is long; allowed: 3 letters",
    ]


def test_values_are_judged_together_not_each_against_the_defaults():
    assert checked(Limits, low=20, high=30)["low"] == 20


def test_a_value_error_of_a_users_dataclass_is_a_problem_too():
    @dataclass(frozen=True)
    class Picky:
        level: int = 1

        def __post_init__(self):
            if self.level > 1:
                raise ValueError("level must be at most 1")

    assert problems_of(Picky, level=2) == ["task is not accepted; level must be at most 1"]


def test_resolved_arguments_build_the_object_they_came_from():
    given = Limits(low=1, high=5, name="b")
    assert build(Limits, {"low": 1, "high": 5, "name": "b"}) == given

    @dataclass(frozen=True)
    class Outer:
        push: Push = field(default_factory=Push)
        sizes: tuple[int, ...] = (1,)

    assert build(Outer, {"push": {"speed": 2.0}, "sizes": [3, 4]}) == Outer(Push(speed=2.0), (3, 4))


def test_names_and_types_reach_through_kwargs_and_nested_dataclasses():
    assert set(argument_types(Task)) == {"num_envs", "physics", "push", "extra", "weights", "episode_s", "seed"}
    assert "task.push.speed" in argument_names(Task, "task")
    assert "task.seed" not in argument_names(Task, "task", SKIP)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "a whole number or null"),
        (Literal["auto", "cpu", "cuda"], "auto, cpu or cuda"),
        (list[list[int]] | None, "a list, each entry a list, each entry a whole number or null"),
        (tuple[float, float], "[a number, a number]"),
        (tuple[int, ...], "a list, each entry a whole number"),
        (dict[str, float], "a mapping, each value a number"),
        (Push | None, "a mapping of settings or null"),
        (bool, "true or false"),
        (complex, "a value of type complex"),
    ],
)
def test_types_in_words(hint, words):
    assert describe(hint) == words


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), ([0, 2], "[0, 2]"), (True, "true"), ("a b", "a b"), ({"a": 1}, "{a: 1}")]
)
def test_values_are_shown_as_yaml(value, text):
    assert shown(value) == text


def test_numbers_with_an_exponent_are_numbers():
    assert read_yaml("1e-3") == 1e-3
    assert read_yaml("2_000") == 2000
