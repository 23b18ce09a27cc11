"""What limits a run, and what would help: arithmetic on the times of a tick.

Off-policy, a tick is `commit`, `act`, and then the longer of two chains: the collector's physics, and the learner's
updates, which run beside it. On-policy they take turns, so physics is what the learner waits for. What is left of a
tick, its `slack`, is other work (reports, checkpoints) and ticks whose two chains are longer by turns; the estimates
leave it as it is.

On CUDA updates are launched, and the host goes on: only the collector's idle time says that the device is busier.
Ranks meet in every all-reduce, so the others wait there for a late rank; on CUDA, where that is a part of the update,
a late rank shows in its physics and inference alone.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from unilab_fabric.loop.phases import WORK_OF_COLLECTOR
from unilab_fabric.reporting.runs import FinishedRun, RankTimes

STRAGGLER = 1.1
"""A rank is late whose own work takes this many times the median of the other ranks' ..."""
STRAGGLER_SHARE = 0.7
"""... and, off-policy, fills this share of a tick: else updates beside it take longer, and nobody waits for it."""
EVEN = 0.05
"""What is less than this share of a tick makes no difference: between two waits, or between two ranks."""
CUDA_IDLE = 0.15
"""On CUDA, the collector's idle share of a tick above which the device limits."""
WORDS = {
    "physics": "physics",
    "rewards": "what follows physics (rewards, observations, resets)",
    "copy": "the copy into the slot",
    "update": "the update",
    "act": "inference",
    "commit": "the copy of transitions",
    "other": "what is done between ticks (reports, checkpoints, the vote on stopping)",
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A rank's tick as the model of this module sees it, seconds [s]."""

    tick: float
    physics: float
    """Everything of the collector but waiting."""
    update: float
    """Everything of the learner beside physics, waiting for other ranks included."""
    between_ranks: float
    """Of `update`, what collectives take; 0 where that is not measured."""
    serial: float
    """Commit and act: neither chain goes on meanwhile."""
    wait: float
    """The learner's, for the collector."""
    on_policy: bool
    one_core: bool

    @property
    def idle(self) -> float:
        """The collector's wait, but for commit and act: those it always waits for.

        Not the measured `collector_wait`, which holds the time before the first tick too.
        """
        return max(0.0, self.tick - self.physics - self.serial)

    @property
    def length(self) -> float:
        """What the phases add up to; the tick less its slack."""
        if self.on_policy:
            return self.serial + self.update + self.wait
        return self.serial + (self.physics + self.update if self.one_core else max(self.physics, self.update))

    def tick_with(self, *, physics: float = 1.0, update: float = 1.0, serial: float = 1.0) -> float:
        """Length of a tick if phases took so many times as long; the slack stays."""
        if self.on_policy:  # what of physics goes on beside the storing of transitions stays hidden
            hidden = serial * max(0.0, self.physics - self.wait)
            wait = max(0.0, physics * self.physics - hidden)
            changed = serial * self.serial + update * self.update + wait
        else:
            chains = (physics * self.physics, update * self.update)
            changed = serial * self.serial + (sum(chains) if self.one_core else max(chains))
        return changed + max(0.0, self.tick - self.length)


def work_of(run: FinishedRun, rank: RankTimes) -> Work:
    """The tick of one rank."""
    times = rank.learner_s
    serial, wait = times.get("commit", 0.0) + times.get("act", 0.0), times.get("wait", 0.0)
    update = sum(s for phase, s in times.items() if phase not in ("wait", "commit", "act", "other"))
    physics = rank.stepping_s
    if run.on_cuda and not run.on_policy:
        busy = rank.tick_s - physics > CUDA_IDLE * rank.tick_s
        update, serial = (rank.tick_s if busy else serial + update), 0.0
    one_core = rank.one_core and not run.on_policy
    if one_core:  # each was timed while the other had the core for a part of it
        own = max(0.0, rank.tick_s - serial)
        physics, update = (own * part / (physics + update) if own else 0.0 for part in (physics, update))
    return Work(
        tick=rank.tick_s,
        physics=physics,
        update=update,
        between_ranks=rank.between_ranks_s or 0.0,
        serial=serial,
        wait=wait,
        on_policy=run.on_policy,
        one_core=one_core,
    )


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a run waits for."""

    name: str
    """A phase, `even`, `one core` or `straggler`."""
    rank: str = ""
    """The straggler."""
    text: str
    """The same in a sentence."""


def find_limit(run: FinishedRun) -> Limit:
    """The one thing that would have to be faster."""
    late = _straggler(run)
    if late is not None:
        return late
    rank = slowest(run)
    work, times = work_of(run, rank), rank.learner_s
    if times["other"] > 0.25 * rank.tick_s:
        return Limit(name="other", text=_limits("other", times["other"], rank.tick_s))
    if work.between_ranks > max(0.5 * work.update, 0.25 * rank.tick_s) and work.wait < work.idle:
        text = _limits("all_reduce", work.between_ranks, rank.tick_s) + ", waiting for late ranks included"
        return Limit(name="all_reduce", text=text)
    if work.on_policy:
        parts = {"physics": work.wait} | {p: s for p, s in times.items() if p not in ("wait", "other")}
        name = max(parts, key=lambda phase: parts[phase])
        turns = "the phases take turns, and this is the longest"
        return Limit(name=name, text=f"{_limits(name, parts[name], rank.tick_s)}; {turns}")
    return _longer_chain(run, rank, work)


def _longer_chain(run: FinishedRun, rank: RankTimes, work: Work) -> Limit:
    times, tick = rank.learner_s, rank.tick_s
    if run.on_cuda:
        if work.update < tick:
            name, text = _environments(rank)
            return Limit(name=name, text=text + ", the device waits for it")
        idle = f"the collector is idle for {share(tick - work.physics, tick)}"
        return Limit(name="update", text=f"The update limits: {idle} of a tick, until the device has done its part.")
    if work.one_core:
        parts = f"the update {ms(work.update)} of it, physics {ms(work.physics)}"
        return Limit(
            name="one core", text=f"The core limits: collector and learner take turns on {rank.place}, {parts}."
        )
    if work.serial > max(work.physics, work.update):
        name = "act" if times.get("act", 0.0) > times.get("commit", 0.0) else "commit"
        return Limit(name=name, text=_limits(name, times[name], tick) + ": physics and the update both wait for it")
    if abs(work.wait - work.idle) < EVEN * tick:
        waits = f"learner and collector wait about as long for each other ({ms(work.wait)} and {ms(work.idle)})"
        return Limit(
            name="even", text=f"Physics and the update limit alike: {waits}, so a faster one alone helps little."
        )
    if work.wait > work.idle:
        name, text = _environments(rank)
        return Limit(name=name, text=f"{text}, and the learner waits for it {ms(work.wait)}")
    why = f"the collector is idle for {ms(work.idle)}"
    return Limit(name="update", text=f"{_limits('update', work.update, tick)}, and {why}")


def _environments(rank: RankTimes) -> tuple[str, str]:
    """The collector as the limit: its longest phase, and the sentence."""
    name = max(WORK_OF_COLLECTOR, key=lambda phase: rank.phase_s.get(phase, 0.0))
    text = _limits("physics", rank.stepping_s, rank.tick_s)
    if name != "physics":
        text = f"What the collector does limits: {ms(rank.stepping_s)} of a tick of {ms(rank.tick_s)}, most of it "
        text += WORDS[name]
    return name, text


def slowest(run: FinishedRun) -> RankTimes:
    """The rank whose own work takes longest; in its updates the least is waiting for others."""
    return max(run.ranks, key=lambda rank: sum(own_work(run, rank).values()))


def own_work(run: FinishedRun, rank: RankTimes) -> Mapping[str, float]:
    """Phases that wait for no other rank [s]; off-policy only the longer one of physics and update."""
    own = _parts(rank)
    if "update" in own and not run.on_policy:
        del own[min(("physics", "update"), key=lambda phase: own[phase])]
    return own


def _parts(rank: RankTimes) -> dict[str, float]:
    own = {"physics": rank.stepping_s} | {phase: rank.phase_s.get(phase, 0.0) for phase in ("act", "commit")}
    if rank.between_ranks_s is not None:  # else `update` holds the wait for others
        own["update"] = rank.phase_s.get("update", 0.0)
    return own


def _straggler(run: FinishedRun) -> Limit | None:
    """The rank for which the others wait, if one clearly does more than they."""
    if len(run.ranks) == 1:
        return None
    rank, others = slowest(run), [other for other in run.ranks if other is not slowest(run)]
    own = own_work(run, rank)
    busy, usual = sum(own.values()), statistics.median(sum(own_work(run, other).values()) for other in others)
    hidden = not run.on_policy and busy < STRAGGLER_SHARE * rank.tick_s
    if busy <= STRAGGLER * usual or busy - usual < EVEN * rank.tick_s or hidden:
        return None
    more = {phase: s - statistics.median(_parts(other).get(phase, 0.0) for other in others) for phase, s in own.items()}
    phase = max(more, key=lambda phase: more[phase])
    where = f" on {rank.place}" if rank.place else ""
    return Limit(
        name="straggler",
        rank=rank.name,
        text=f"{rank.name.capitalize()}{where} holds the others up: {WORDS[phase]} takes it {ms(own[phase])} in each "
        f"tick, where the others' median is {ms(own[phase] - more[phase])}.",
    )


def _limits(phase: str, seconds: float, tick_s: float) -> str:
    words = WORDS.get(phase, phase.replace("_", "-"))
    return f"{words[0].upper()}{words[1:]} limits: {ms(seconds)} of a tick of {ms(tick_s)}"


# ---- what would help ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a change would do, if its assumption holds."""

    change: str
    gain: float
    """Environment steps a second, as a multiple of now."""
    updates_gain: float
    """Updates a second, likewise."""
    assumption: str


def estimates(run: FinishedRun) -> list[Estimate]:
    """More cores for physics, more environments, one more rank."""
    rank = slowest(run)
    work = work_of(run, rank)
    return [_more_cores(work), _more_environments(work), _more_ranks(run, rank)]


def _more_cores(work: Work) -> Estimate:
    if work.one_core:
        apart = work.serial + max(work.physics, work.update) + max(0.0, work.tick - work.length)
        text = "physics and the update each get a core and run beside each other"
        gain = work.tick / apart
    else:
        text = "physics takes half as long, all else as now"
        gain = work.tick / work.tick_with(physics=0.5)
    return Estimate(change="twice the cores for physics", gain=gain, updates_gain=gain, assumption=text)


def _more_environments(work: Work) -> Estimate:
    if work.on_policy:
        tick, text = work.tick_with(physics=2, update=2, serial=2), "everything doubles, the updates with the rollout"
    else:
        tick = work.tick_with(physics=2, serial=2)
        text = (
            "physics, inference and copy double, the updates of a tick stay: half as many for each environment step, "
        )
        text += "so it learns differently"
    gain = 2 * work.tick / tick
    return Estimate(change="twice the environments", gain=gain, updates_gain=gain / 2, assumption=text)


def _more_ranks(run: FinishedRun, rank: RankTimes) -> Estimate:
    ranks = run.world_size
    if ranks == 1:
        text = (
            "it has cores and a device of its own; no all-reduce and no wait for the slower rank, unknown to one rank"
        )
    else:
        late = ms(wait_for_slowest_s(run))
        text = f"it has cores and a device of its own; the wait for the slowest rank ({late} a tick)"
        measured = rank.between_ranks_s
        text += f" and the all-reduce ({ms(measured)})" if measured else " and the all-reduce, both within `update`,"
        text += " stay as now"
    gain = (ranks + 1) / ranks
    return Estimate(change="one more rank", gain=gain, updates_gain=gain, assumption=text)


def wait_for_slowest_s(run: FinishedRun) -> float:
    """Seconds [s] of a tick that the mean rank's own work is shorter than the slowest's."""
    busy = [sum(own_work(run, rank).values()) for rank in run.ranks]
    return max(busy) - statistics.fmean(busy)


def share(part: float, whole: float) -> str:
    """As a percentage."""
    return f"{100 * part / whole:.0f}%"


def ms(seconds: float) -> str:
    """Seconds [s] as milliseconds, two digits at least."""
    return f"{two_digits(1e3 * seconds)} ms"


def two_digits(value: float) -> str:
    """A positive number rounded to two digits, without an exponent."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.1f}" if rounded >= 1 else f"{rounded:.2g}"
