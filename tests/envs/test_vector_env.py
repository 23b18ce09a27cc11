import io
import logging

import numpy as np
import pytest

from tests.envs.toy import ToyTask
from unilab_fabric.envs.vector_env import control_steps, decode_generator, encode_generator
from unilab_fabric.errors import UserError

NAN, INF = float("nan"), float("inf")


def actions(*values):
    return np.array(values, np.float32)[:, None]


def by_tag(task):
    """Sum and count of each metric."""
    return {metric.name: tuple(total) for metric, total in zip(task.metrics, task.totals.tolist(), strict=True)}


def advance(task, steps, action=0.0):
    for _ in range(steps):
        task.advance(np.full((task.num_envs, 1), action, np.float32))


def test_reward_is_the_weighted_sum_of_terms_times_the_factor():
    task = ToyTask(2)
    task.reset()
    advance(task, 3)
    assert task.reward.tolist() == [0.5 * (2 * 3 - 3 * 1)] * 2


def test_an_ended_episode_shows_its_last_observation_and_the_first_of_the_next():
    task = ToyTask(2, limit=4)
    task.reset()
    advance(task, 4)
    assert task.next_observation["actor"].tolist() == [[4, 0], [4, 1]]
    assert task.observation["actor"].tolist() == [[0, 0], [0, 1]]
    assert task.truncated.tolist() == [True, True]
    assert not task.terminated.any()


def test_failure_on_the_last_step_is_no_time_out():
    task = ToyTask(2, limit=4)
    task.reset()
    advance(task, 3)
    task.advance(actions(0.25, 0.5))
    assert task.terminated.tolist() == [True, False]
    assert task.truncated.tolist() == [False, True]


def test_totals_hold_sum_and_count_over_ended_episodes():
    task = ToyTask(2, limit=4)
    task.reset()
    advance(task, 1)
    task.advance(actions(0.25, 0.0))  # environment 0 ends after 2 steps, environment 1 after 4
    advance(task, 2)
    first = 0.5 * (2 * (1 + 2) - 3 * 2)
    second = 0.5 * (2 * (1 + 2 + 3 + 4) - 3 * 4)
    # environment 0 has then also taken two steps of its second episode, which is not counted yet
    assert by_tag(task) == {
        "Train/mean_reward": (first + second, 2),
        "Train/mean_episode_length": (2 + 4, 2),
        "Episode/steps": (2 * (1 + 2) / 2 + 2 * (1 + 2 + 3 + 4) / 4, 2),
        "Episode/one": (-3 - 3, 2),
        "Episode/environment": (0 + 1, 2),
        "Episode/falls": (1, 2),
        "Env/physics_diverged": (0, 0),
        "Env/nonfinite_action": (0, 0),
        "Env/nonfinite_observation": (0, 0),
        "Env/nonfinite_reward": (0, 0),
    }


def test_infos_have_the_layout_of_gymnasium():
    task = ToyTask(3, limit=4)
    task.reset()
    assert task.step(actions(0, 0, 0))[4] == {}
    infos = task.step(actions(0, 0.25, 0))[4]
    assert infos["_final_obs"].tolist() == infos["_final_info"].tolist() == infos["_episode"].tolist()
    assert infos["_episode"].tolist() == [False, True, False]
    assert infos["final_obs"][0] is None
    assert infos["final_obs"][1]["actor"].tolist() == [2, 1]
    assert infos["final_obs"][1]["critic"].tolist() == [2, 1, 2.5]
    episode = {name: values.tolist() for name, values in infos["episode"].items()}
    assert episode == {
        "r": [0, 0.5 * (2 * 3 - 3 * 2), 0],
        "l": [0, 2, 0],
        "steps": [0, 2 * 3 / 2, 0],
        "one": [0, -3, 0],
        "environment": [0, 1, 0],
        "fell": [False, True, False],
    }


FAULTS = {
    "physics_diverged": lambda task: task.diverges.add(1),
    "nonfinite_reward": lambda task: task.bad_term.update({1: NAN}),
    "nonfinite_observation": lambda task: task.bad_actor.update({1: INF}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_that_environment_alone_and_is_counted(fault):
    task = ToyTask(3, limit=10)
    task.reset()
    advance(task, 2)
    FAULTS[fault](task)
    advance(task, 1)
    assert task.terminated.tolist() == [False, True, False]
    assert not task.truncated.any()
    assert task.reward.tolist() == [1.5, 0, 1.5]
    assert task.observation["actor"].tolist() == [[3, 0], [0, 1], [3, 2]]
    assert task.next_observation["actor"].tolist() == [[3, 0], [2, 1], [3, 2]]  # the one before the fault
    assert by_tag(task)[f"Env/{fault}"] == (1, 1)
    assert by_tag(task)["Train/mean_reward"] == (0.5 * (2 * (1 + 2) - 3 * 2), 1)


def test_a_non_finite_value_in_the_critic_or_in_a_negative_direction_is_found_too():
    task = ToyTask(2)
    task.reset()
    task.bad_critic[0] = -INF
    task.bad_actor[1] = NAN
    advance(task, 1)
    assert by_tag(task)["Env/nonfinite_observation"] == (2, 2)
    assert all(np.isfinite(rows).all() for rows in task.next_observation.values())


def test_a_first_observation_that_is_not_finite_is_counted_and_shown_as_zero():
    task = ToyTask(2, limit=1)
    task.reset()
    task.bad_start[1] = NAN
    advance(task, 1)
    assert task.observation["actor"].tolist() == [[0, 0], [0, 1]]
    assert task.next_observation["actor"].tolist() == [[1, 0], [1, 1]]
    assert by_tag(task)["Env/nonfinite_observation"] == (1, 1)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_non_finite_action_does_not_reach_physics_and_is_counted(value):
    task = ToyTask(3)
    task.reset()
    action = actions(0.5, value, 0.5)
    task.advance(action)
    assert task.action.tolist() == [0.5, 0.0, 0.5]
    assert task.terminated.tolist() == [False, True, False]
    assert by_tag(task)["Env/nonfinite_action"] == (1, 1)
    assert action[1, 0] == 0.0  # in place: replay stores what was done
    given = actions(0.5, value, -0.5)
    task.step(given)
    assert not np.isfinite(given[1, 0])  # a user's own array is left alone


def test_great_values_are_no_faults():
    task = ToyTask(2)
    task.reset()
    task.bad_actor[0] = 3e38
    task.bad_critic[1] = -3e38
    task.advance(actions(1e30, 0))
    assert not task.terminated.any()
    assert task.next_observation["actor"][0, 0] == np.float32(3e38)


def test_an_environment_with_two_faults_in_a_step_counts_once():
    task = ToyTask(2)
    task.reset()
    task.diverges.add(0)
    task.bad_term[0] = NAN
    task.bad_actor[0] = NAN
    advance(task, 1)
    assert {tag: total for tag, total in by_tag(task).items() if tag.startswith("Env/") and total[0]} == {
        "Env/physics_diverged": (1, 1)
    }


def test_training_goes_on_after_a_fault():
    task = ToyTask(2, limit=10)
    task.reset()
    task.bad_term[1] = NAN
    advance(task, 1)
    task.bad_term.clear()
    advance(task, 2)
    assert task.observation["actor"][:, 0].tolist() == [3, 2]
    assert task.reward.tolist() == [1.5, 0.5]
    assert not task.terminated.any()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_the_step_it_came_at(fault, caplog):
    task = ToyTask(3)
    task.reset()
    advance(task, 2)
    FAULTS[fault](task)
    with caplog.at_level(logging.WARNING, "unilab_fabric.envs"):
        advance(task, 1)
    assert "in environment 1 at step 3 of its episode" in caplog.text


def test_a_fault_is_told_once_with_environment_step_and_term(caplog):
    task = ToyTask(3)
    task.reset()
    advance(task, 1)
    task.bad_term[2] = NAN
    with caplog.at_level(logging.WARNING, "unilab_fabric.envs"):
        advance(task, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "the reward is not finite in environment 2 at step 2 of its episode, in one, reward; the episode ends there "
        "(told once, counted as Env/nonfinite_reward)"
    ]


@pytest.mark.parametrize("steps", [2, 3])  # within an episode, and with some ended
def test_state_continues_bit_for_bit_in_another_object(steps):
    straight = ToyTask(3, limit=3, stagger=True, seed=7)
    straight.reset()
    advance(straight, steps)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **straight.get_state())
    file.seek(0)
    resumed = ToyTask(3, limit=3, stagger=True, seed=8)
    with np.load(file, allow_pickle=False) as state:
        resumed.set_state(dict(state))
    for _ in range(7):
        assert resumed.observation["actor"].tolist() == straight.observation["actor"].tolist()
        assert resumed.drawn.tolist() == straight.drawn.tolist()
        assert resumed.totals.tolist() == straight.totals.tolist()
        advance(straight, 1)
        advance(resumed, 1)


def test_the_state_of_other_environments_is_refused():
    state = ToyTask(3).get_state()
    with pytest.raises(ValueError, match=r"; steps has the shape \(3,\) there and \(2,\) here$"):
        ToyTask(2).set_state(state)


def test_a_generator_continues_from_its_words_with_half_a_draw_kept():
    generator = np.random.default_rng(1)
    generator.integers(2**32, dtype=np.uint32)  # leaves half of 64 bits behind
    other = np.random.default_rng(2)
    decode_generator(other, encode_generator(generator))
    assert other.integers(2**32, size=5, dtype=np.uint32).tolist() == (
        generator.integers(2**32, size=5, dtype=np.uint32).tolist()
    )


def test_staggered_first_episodes_end_at_different_times_and_later_ones_after_the_whole_limit():
    task = ToyTask(200, limit=50, stagger=True)
    task.reset()
    advance(task, 1)
    first = by_tag(task)["Train/mean_episode_length"][1]
    advance(task, 48)
    lengths, ended = by_tag(task)["Train/mean_episode_length"]
    assert first < 20
    assert 150 < ended <= 200
    assert 20 < lengths / ended < 30
    advance(task, 50)
    assert by_tag(task)["Train/mean_episode_length"][1] >= 350


def test_episodes_are_whole_unless_staggered():
    task = ToyTask(20, limit=5)
    task.reset()
    advance(task, 4)
    assert by_tag(task)["Train/mean_reward"] == (0, 0)
    advance(task, 1)
    assert by_tag(task)["Train/mean_episode_length"] == (100, 20)


def test_actions_of_another_shape_are_refused():
    task = ToyTask(3)
    task.reset()
    with pytest.raises(ValueError, match=r"actions have the shape \(3,\); this task takes \(3, 1\)"):
        task.advance(np.zeros(3, np.float32))


def test_reset_takes_no_options():
    with pytest.raises(ValueError, match="reset_mask"):
        ToyTask(3).reset(options={"reset_mask": np.ones(3, bool)})


def test_a_task_needs_an_environment():
    with pytest.raises(UserError, match=r"task.num_envs is 0; allowed: 1 or more"):
        ToyTask(0)


@pytest.mark.parametrize(("seconds", "steps"), [(20.0, 1000), (0.02, 1), (0.03, 2)])
def test_a_time_limit_counts_whole_control_steps(seconds, steps):
    assert control_steps(seconds, 0.02) == steps


@pytest.mark.parametrize("seconds", [0.0, 0.01, -1.0, NAN, INF])
def test_a_time_limit_without_a_step_is_refused(seconds):
    with pytest.raises(UserError, match=r"task\.episode_s"):
        control_steps(seconds, 0.02)


def test_the_first_faults_of_each_kind_are_kept_with_their_values():
    task = ToyTask(3)
    task.reset()
    task.bad_term.update({1: NAN, 2: NAN})
    advance(task, 4)
    task.bad_term.clear()
    task.advance(actions(INF, 0, 0))
    assert [(fault.kind, fault.environment) for fault in task.faults] == [
        *[("Env/nonfinite_reward", 1), ("Env/nonfinite_reward", 2)] * 2,
        ("Env/nonfinite_reward", 1),
        ("Env/nonfinite_action", 0),
    ]
    assert task.faults[0].nonfinite == ("one", "reward")
    assert task.faults[-1].nonfinite == ("action",)
    assert task.faults[-1].values == {"action": [INF]}
    assert task.totals[task._fault_row["Env/nonfinite_reward"], 0] == 8  # all are counted
