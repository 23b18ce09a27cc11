"""Transitions of one rank, on the learner's device.

A ring of ticks, one row for each environment: observation, action, reward, flag. The next observation of a row is the
observation one tick later, so it is stored once; only where an episode ended does the true last observation differ,
and those few stand in a second ring, `finals`, that grows when it must.

    position   0       1       2       3 (newest)
    row        o0 a0   o1 a1   o2 a2   o3 --        transitions 0, 1, 2 can be drawn

Where the stream of transitions is cut, because a resumed run has new environments, the last transition keeps its true
next observation in `finals` too, as at a time-out, and the new stream begins in the row of the newest observation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unilab_fabric.learners.learner import Batch
from unilab_fabric.loop.transfer import Handover
from unilab_fabric.spaces import TaskSpec

FIELDS = ("actor observation", "critic observation", "action", "reward", "terminated")
"""The parts of a row, in their order."""
_FIRST_FINALS = 1024


class Replay:
    """The last `ticks` ticks of all the rank's environments; N is `spec.num_envs`."""

    def __init__(
        self, spec: TaskSpec, *, ticks: int, n_step: int, discount: float, device: torch.device, seed: int
    ) -> None:
        """`n_step` rewards are summed, discounted by `discount`, before the bootstrap; `seed` is for drawing."""
        self.ticks = ticks
        self.n_step = n_step
        self.device = device
        self.num_envs = spec.num_envs
        self._discount = discount
        self._observation = spec.actor_size + spec.critic_size
        sizes = [spec.actor_size, spec.critic_size, spec.action_size, 1, 1]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._columns = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._length = ticks + 1  # the newest observation has no transition yet
        self._rows = torch.zeros(self._length, self.num_envs, ends[-1], device=device)
        self._final_index = torch.full((self._length, self.num_envs), -1, dtype=torch.long, device=device)
        self._finals = torch.zeros(_FIRST_FINALS, self._observation, device=device)
        self._finals_of_tick = [0] * self._length
        self._finals_head = 0  # finals ever written
        self._finals_tail = 0  # finals no longer needed
        self._newest = -2  # tick of the newest observation; nothing is stored yet
        self._oldest = -1  # tick of the oldest transition
        self.streaming = False
        """Whether the next slot continues the stream; if not, it is to `begin` one."""
        self.generator = torch.Generator(device).manual_seed(seed)
        # what a draw depends on, as tensors, so that a captured cycle sees them change
        self._first_position = torch.zeros((), dtype=torch.long, device=device)
        self._starts = torch.zeros((), dtype=torch.long, device=device)

    @property
    def filled_ticks(self) -> int:
        """Ticks whose transitions can be drawn."""
        return max(0, self._newest - self._oldest)

    def __len__(self) -> int:
        return self.filled_ticks * self.num_envs

    def tensors(self) -> tuple[Tensor, ...]:
        """What a draw reads, for who must know where it lies."""
        return self._rows, self._final_index, self._finals, self._first_position, self._starts

    def begin(self, tick: int, handover: Handover) -> None:
        """Takes the first observation of a stream of transitions, of `tick` where nothing is stored yet."""
        if self.filled_ticks == 0:
            self._newest = self._oldest = tick
        self._store_observation(handover)
        self.streaming = True

    def cut(self) -> None:
        """Ends the stream: what is stored stays as it is, and another stream may begin."""
        self.streaming = False
        if self.filled_ticks == 0:
            return
        last, newest = (self._newest - 1) % self._length, self._newest % self._length
        going = (self._final_index[last] < 0).nonzero().flatten()
        self._append_finals(last, going, self._rows[newest, going, : self._observation])

    def commit(self, handover: Handover) -> None:
        """Adds the transition that led to an observation, and that observation."""
        position = self._newest % self._length
        row = self._rows[position]
        _, _, action, reward, terminated = self._columns
        row[:, action].copy_(handover.action)
        row[:, reward].squeeze(1).copy_(handover.reward)
        row[:, terminated].squeeze(1).copy_(handover.terminated)
        self._store_finals(position, handover)
        self._newest += 1
        if self._newest - self._oldest > self.ticks:
            self._finals_tail += self._finals_of_tick[self._oldest % self._length]
            self._oldest += 1
        self._store_observation(handover)

    def sample(self, batch_size: int) -> Batch:
        """Transitions drawn uniformly with replacement; n-step windows end at the first end of an episode."""
        tick = self._draw(batch_size, self._starts)
        env = self._draw(batch_size, self.num_envs)
        position = (self._first_position + tick) % self._length
        rows, finals = self._rows.flatten(0, 1), self._final_index.flatten()
        row = rows.index_select(0, position * self.num_envs + env)
        actor, critic, action, reward, terminated = (row[:, columns] for columns in self._columns)
        total, flag = reward.squeeze(1), terminated.squeeze(1)
        final = finals.index_select(0, position * self.num_envs + env)
        discount = torch.full_like(total, self._discount)
        for _ in range(1, self.n_step):
            going = final < 0
            position = torch.where(going, (position + 1) % self._length, position)
            row = rows.index_select(0, position * self.num_envs + env)
            step_reward, step_terminated = row[:, self._columns[3]].squeeze(1), row[:, self._columns[4]].squeeze(1)
            total = torch.where(going, total + discount * step_reward, total)
            flag = torch.where(going, step_terminated, flag)
            final = torch.where(going, finals.index_select(0, position * self.num_envs + env), final)
            discount = torch.where(going, discount * self._discount, discount)
        following = (position + 1) % self._length * self.num_envs + env
        after = rows[:, : self._observation].index_select(0, following)
        last = self._finals.index_select(0, final.clamp_min(0))
        after = torch.where((final >= 0).unsqueeze(1), last, after)
        return Batch(
            actor=actor,
            critic=critic,
            action=action,
            reward=total,
            next_actor=after[:, self._columns[0]],
            next_critic=after[:, self._columns[1]],
            terminated=flag > 0.5,
            discount=discount,
        )

    def nonfinite(self, limit: int) -> list[dict[str, object]]:
        """Up to `limit` stored values that are not finite: tick, environment and field of each; reads all of replay."""
        found: list[dict[str, object]] = []
        for tick in range(max(self._oldest, 0), self._newest + 1):
            bad = ~self._rows[tick % self._length].isfinite()  # (N, columns)
            for environment in bad.any(1).nonzero().flatten().tolist():
                fields = [
                    name for name, part in zip(FIELDS, self._columns, strict=True) if bad[environment, part].any()
                ]
                found.append({"tick": tick, "environment": environment, "fields": fields})
                if len(found) == limit:
                    return found
        return found

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, the filled part of the ring only."""
        filled = torch.arange(self._oldest, self._newest + 1) % self._length
        live = torch.arange(self._finals_tail, self._finals_head) % len(self._finals)
        counts = [self._finals_of_tick[tick % self._length] for tick in range(self._oldest, self._newest)]
        return {
            "rows": self._rows[filled].cpu(),
            "final_index": self._final_index[filled].cpu(),
            "finals": self._finals[live].cpu(),
            "finals_of_tick": torch.tensor(counts, dtype=torch.long),
            "counters": torch.tensor([self._oldest, self._newest, self._finals_tail, self._finals_head]),
            "finals_capacity": torch.tensor(len(self._finals)),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continues bit for bit where `state` was called; the ring must hold at least the ticks of that one."""
        self._oldest, self._newest, self._finals_tail, self._finals_head = state["counters"].tolist()
        filled = torch.arange(self._oldest, self._newest + 1) % self._length
        self._rows[filled] = state["rows"].to(self.device)
        self._final_index[filled] = state["final_index"].to(self.device)
        self._finals = torch.zeros(int(state["finals_capacity"]), self._observation, device=self.device)
        live = torch.arange(self._finals_tail, self._finals_head) % len(self._finals)
        self._finals[live] = state["finals"].to(self.device)
        for tick, count in zip(range(self._oldest, self._newest), state["finals_of_tick"].tolist(), strict=True):
            self._finals_of_tick[tick % self._length] = count
        self.streaming = True
        self._publish()

    def joined(self, states: Sequence[dict[str, Tensor]], first: int, last: int) -> dict[str, Tensor]:
        """See `joined_columns`."""
        return joined_columns(states, first, last)

    def _draw(self, count: int, below: Tensor | int) -> Tensor:
        """Uniform integers in [0, below), (count,); a tensor `below` stays on the device."""
        return (torch.rand(count, device=self.device, generator=self.generator) * below).long()

    def _store_observation(self, handover: Handover) -> None:
        row = self._rows[self._newest % self._length]
        row[:, self._columns[0]].copy_(handover.actor)
        row[:, self._columns[1]].copy_(handover.critic)
        self._publish()

    def _publish(self) -> None:
        self._first_position.fill_(self._oldest % self._length)
        self._starts.fill_(max(0, self.filled_ticks - self.n_step + 1))

    def _store_finals(self, position: int, handover: Handover) -> None:
        """Last observations of the episodes that this transition ended."""
        self._final_index[position].fill_(-1)
        self._finals_of_tick[position] = 0
        if len(handover.ended_env):
            last = torch.cat([handover.final_actor, handover.final_critic], dim=1)
            self._append_finals(position, handover.ended_env, last)

    def _append_finals(self, position: int, envs: Tensor, observations: Tensor) -> None:
        """Adds last observations of the newest transition, (n, actor + critic) for the environments (n,)."""
        while self._finals_head - self._finals_tail + len(envs) > len(self._finals):
            self._grow_finals()
        head = self._finals_head + len(envs)
        where = torch.arange(self._finals_head, head, device=self.device) % len(self._finals)
        self._finals[where] = observations
        self._final_index[position, envs] = where
        self._finals_of_tick[position] += len(envs)
        self._finals_head = head

    def _grow_finals(self) -> None:
        """Doubles the ring of last observations, the live ones moved to where the larger ring has them."""
        live = torch.arange(self._finals_tail, self._finals_head, device=self.device)
        old = self._finals
        self._finals = torch.zeros(2 * len(old), self._observation, device=self.device)
        moved = torch.full((len(old),), -1, dtype=torch.long, device=self.device)
        moved[live % len(old)] = live % len(self._finals)
        self._finals[live % len(self._finals)] = old[live % len(old)]
        ends = self._final_index >= 0
        self._final_index[ends] = moved[self._final_index[ends]]


def joined_columns(states: Sequence[dict[str, Tensor]], first: int, last: int) -> dict[str, Tensor]:
    """The state of a replay that holds environments `first` to `last` - 1 of several replays side by side.

    `states` are those of the ranks of one job at one tick, as `Replay.state` gave them, in the order of the ranks.
    """
    rows = torch.cat([state["rows"] for state in states], dim=1)[:, first:last]
    index = torch.cat([_index_in(states, rank) for rank in range(len(states))], dim=1)[:, first:last].clone()
    index[-1] = -1  # the newest observation has no transition; what stands there is of an earlier lap
    has_final = index >= 0
    finals = torch.cat([state["finals"] for state in states])[index[has_final]]
    index[has_final] = torch.arange(len(finals))
    oldest, newest = states[0]["counters"].tolist()[:2]
    return {
        "rows": rows,
        "final_index": index,
        "finals": finals,
        "finals_of_tick": has_final[:-1].sum(1),
        "counters": torch.tensor([oldest, newest, 0, len(finals)]),
        "finals_capacity": torch.tensor(max(_FIRST_FINALS, len(finals))),
    }


def _index_in(states: Sequence[dict[str, Tensor]], rank: int) -> Tensor:
    """(ticks, N): where in all ranks' finals, one after the other, those of a rank stand; -1 where there is none."""
    state = states[rank]
    tail, capacity = int(state["counters"][2]), int(state["finals_capacity"])
    before = sum(len(other["finals"]) for other in states[:rank])
    index = state["final_index"]
    return torch.where(index < 0, -1, (index - tail) % capacity + before)
