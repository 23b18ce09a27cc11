import numpy as np
import pytest
import torch

from unilab_fabric.loop.slots import NUM_SLOTS, map_slots, slot_bytes
from unilab_fabric.loop.transfer import Handover, SharedTransfer
from unilab_fabric.memory import anonymous_memory
from unilab_fabric.offpolicy.replay import Replay, joined_columns
from unilab_fabric.spaces import TaskSpec

from .counting import CountingEnv

CPU = torch.device("cpu")


class Collected:
    """A replay filled from the counting environment through a real slot, and the plain list of its transitions."""

    def __init__(
        self,
        ticks,
        *,
        capacity=100,
        n_step=1,
        discount=0.5,
        episode_length=3,
        num_envs=3,
        seed=0,
        first_env=0,
        device=CPU,
    ):
        spec = TaskSpec(
            name="counting",
            num_envs=num_envs,
            actor_size=2,
            critic_size=2,
            action_low=(-1.0,),
            action_high=(1.0,),
            metrics=(),
        )
        self.replay = Replay(spec, ticks=capacity, n_step=n_step, discount=discount, device=device, seed=seed)
        self.slot = map_slots(anonymous_memory(NUM_SLOTS * slot_bytes(spec)), spec)[0]
        self.env = CountingEnv(num_envs=num_envs, episode_length=episode_length, first_env=first_env)
        self.transitions = []  # (tick, env) -> what a draw of it must hold
        self.begin_stream()
        for tick in range(ticks):
            self.step(tick)

    def begin_stream(self):
        observation, _ = self.env.reset()
        self._show(observation)
        self.replay.begin(0, self.handover())

    def handover(self):
        """The slot as the runner hands it on."""
        views = vars(SharedTransfer().take(self.slot))
        return Handover(**{name: view.to(self.replay.device) for name, view in views.items()})

    def cut(self):
        """The environments start anew: the newest transition of each ends its episode's rows, as a time-out does."""
        self.replay.cut()
        for one in self.transitions[-self.env.num_envs :]:
            one["ended"] = True
        self.begin_stream()

    def _show(self, observation):
        self.slot.actor[:] = observation["actor"]
        self.slot.critic[:] = observation["critic"]

    def step(self, tick, *, action=None):
        before = self.slot.actor.copy()
        action = np.full((self.env.num_envs, 1), tick if action is None else action, np.float32)
        observation, reward, terminated, truncated, infos = self.env.step(action)
        self.slot.action[:], self.slot.reward[:], self.slot.terminated[:] = action, reward, terminated
        ended = np.flatnonzero(terminated | truncated)
        self.slot.ended[0] = len(ended)
        for row, env in enumerate(ended):
            self.slot.ended_env[row] = env
            self.slot.final_actor[row] = infos["final_obs"][env]["actor"]
            self.slot.final_critic[row] = infos["final_obs"][env]["critic"]
        self._show(observation)
        self.replay.commit(self.handover())
        for env in range(self.env.num_envs):
            last = infos["final_obs"][env]["actor"] if env in ended else observation["actor"][env]
            self.transitions.append(
                {
                    "tick": tick,
                    "env": int(before[env, 1]),
                    "observation": before[env].tolist(),
                    "reward": float(reward[env]),
                    "next": last.tolist(),
                    "terminated": bool(terminated[env]),
                    "ended": env in ended,
                }
            )


def drawn(replay, size=4000):
    """Every distinct transition of a large draw, by (tick, env); the action is the tick."""
    batch = replay.sample(size)
    return {
        (int(batch.action[i]), int(batch.actor[i, 1])): {
            "observation": batch.actor[i].tolist(),
            "reward": float(batch.reward[i]),
            "next": batch.next_actor[i].tolist(),
            "terminated": bool(batch.terminated[i]),
            "discount": float(batch.discount[i]),
        }
        for i in range(size)
    }


def test_replay_holds_the_last_observation_of_an_episode_not_the_first_of_the_next():
    collected = Collected(4, num_envs=1)  # an observation is the steps since the reset; an episode has three
    found = drawn(collected.replay)
    assert [found[tick, 0]["next"][0] for tick in range(4)] == [1, 2, 3, 1]  # at tick 2 the environment shows 0
    assert [found[tick, 0]["observation"][0] for tick in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize(("ticks", "capacity"), [(5, 100), (23, 7), (60, 16)])
def test_a_draw_finds_every_stored_transition_and_no_other(ticks, capacity):
    collected = Collected(ticks, capacity=capacity)
    found = drawn(collected.replay)
    stored = [one for one in collected.transitions if one["tick"] >= ticks - capacity]
    assert set(found) == {(one["tick"], one["env"]) for one in stored}
    for one in stored:
        other = found[one["tick"], one["env"]]
        assert {key: one[key] for key in ("observation", "reward", "next", "terminated")} == {
            key: other[key] for key in ("observation", "reward", "next", "terminated")
        }


@pytest.mark.parametrize("n_step", [2, 3, 5])
def test_n_step_rewards_stop_at_the_first_end_of_an_episode(n_step):
    ticks = 40
    collected = Collected(ticks, capacity=25, n_step=n_step, discount=0.5)
    by_place = {(one["tick"], one["env"]): one for one in collected.transitions}
    found = drawn(collected.replay)
    assert {tick for tick, _ in found} == set(range(ticks - 25, ticks - n_step + 1))
    for (tick, env), other in found.items():
        total, discount = 0.0, 1.0
        for step in range(n_step):
            one = by_place[tick + step, env]
            total, discount = total + discount * one["reward"], discount * 0.5
            if one["ended"]:
                break
        assert other["reward"] == pytest.approx(total)
        assert other["discount"] == pytest.approx(discount)
        assert other["next"] == one["next"]
        assert other["terminated"] == one["terminated"]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("cut_at", [1, 4, 26])
def test_a_cut_keeps_every_transition_and_joins_none_to_the_new_stream(cut_at, n_step):
    collected = Collected(cut_at, capacity=25, n_step=n_step, discount=0.5)
    collected.cut()
    for tick in range(cut_at, 30):
        collected.step(tick)
    by_place = {(one["tick"], one["env"]): one for one in collected.transitions}
    found = drawn(collected.replay)
    assert {tick for tick, _ in found} == set(range(5, 30 - n_step + 1))
    for (tick, env), other in found.items():
        window = [by_place[tick + step, env] for step in range(n_step)]
        last = next((step for step, one in enumerate(window) if one["ended"]), n_step - 1)
        assert other["reward"] == pytest.approx(sum(0.5**step * window[step]["reward"] for step in range(last + 1)))
        assert other["next"] == window[last]["next"]
        assert other["terminated"] == window[last]["terminated"]


def test_a_cut_before_the_first_transition_leaves_nothing():
    collected = Collected(0)
    collected.cut()
    assert len(collected.replay) == 0
    collected.step(0)
    assert {tick for tick, _ in drawn(collected.replay)} == {0}


@pytest.mark.parametrize("ticks", [1, 5, 60])
@pytest.mark.parametrize("parts", [[6], [3, 3], [2, 2, 2]])
def test_the_replays_of_two_ranks_become_those_of_any_other_number(ticks, parts):
    ranks = [Collected(ticks, capacity=16, num_envs=3, first_env=3 * rank) for rank in range(2)]
    states = [one.replay.state() for one in ranks]
    truth = {(one["tick"], one["env"]): one for rank in ranks for one in rank.transitions if one["tick"] >= ticks - 16}
    seen = {}
    for part, size in enumerate(parts):
        other = Collected(0, capacity=16, num_envs=size)
        other.replay.load_state(joined_columns(states, part * size, (part + 1) * size))
        other.replay.cut()
        seen |= drawn(other.replay)
    assert seen.keys() == truth.keys()
    for place, one in truth.items():
        for key in ("observation", "reward", "next", "terminated"):
            assert seen[place][key] == one[key]


def test_last_observations_survive_the_growth_of_their_ring():
    collected = Collected(1200, capacity=1000, episode_length=1, num_envs=4)  # environment 0 ends at every step
    found = drawn(collected.replay, 40_000)
    by_place = {(one["tick"], one["env"]): one for one in collected.transitions}
    assert len(found) > 3900
    assert all(found[place]["next"] == by_place[place]["next"] for place in found)


def test_replay_keeps_its_own_copy_of_a_slot():
    collected = Collected(3, num_envs=2)
    before = drawn(collected.replay)
    for array in (collected.slot.actor, collected.slot.critic, collected.slot.reward, collected.slot.action):
        array[:] = -99.0  # what the collector does two ticks later
    assert drawn(collected.replay) == before


def test_a_restored_replay_draws_what_the_saved_one_would_have_drawn():
    collected = Collected(50, capacity=20, n_step=2)
    saved, generator = collected.replay.state(), collected.replay.generator.get_state()
    other = Collected(3, capacity=20, n_step=2)
    other.replay.load_state(saved)
    other.replay.generator.set_state(generator)
    other.env, other.slot = collected.env, collected.slot
    for tick in range(50, 75):
        batches = [collected.replay.sample(64), other.replay.sample(64)]
        for name in batches[0].__dataclass_fields__:
            assert torch.equal(getattr(batches[0], name), getattr(batches[1], name))
        collected.step(tick)
        other.replay.commit(collected.handover())


def test_draws_are_uniform_over_ticks_and_environments():
    collected = Collected(10, num_envs=4)
    batch = collected.replay.sample(40_000)
    counts = torch.zeros(10, 4)
    counts.index_put_(
        (batch.action[:, 0].long(), batch.actor[:, 1].long()), torch.ones(len(batch.reward)), accumulate=True
    )
    assert (counts - 1000).abs().max() < 6 * 1000**0.5  # six standard deviations of 40 cells
