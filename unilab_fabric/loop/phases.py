"""Where a tick goes: the names under which the loop measures it, and `report` and the curves tell it. No torch here."""

LEARNER_PHASES = ("wait", "commit", "act", "update", "all_reduce")
"""Of the learner, one after the other: it waits for a slot, stores a transition, infers an action, runs its cycle; what
it spends in collectives meanwhile, waiting for late ranks included, counts as `all_reduce` alone. On CUDA the host
waits for no collective, so there they are part of `update` as the device is, and `all_reduce` is absent."""
WORK_OF_COLLECTOR = ("physics", "rewards", "copy")
"""Of the collector beside it: stepping physics; rewards, observations and the begin of episodes; writing all that into
the slot. Where physics is not ours (Gymnasium), it holds what the environment does."""
COLLECTOR_PHASES = (*WORK_OF_COLLECTOR, "collector_wait")
"""With its wait for the next action."""
PHASES = LEARNER_PHASES + COLLECTOR_PHASES
