"""The policy against a GPU with a hidden true condition, judged by that condition and not by the policy's inputs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from _nvplug.hardware import Checkup, GpuEvent, Sign, Xid
from _nvplug.health import Health, judge
from _nvplug.health.policy import XIDS

GPU = "GPU-0"
SWEEP = 5
SILENCE = 30

# How late an event may come, and how late the driver's own word about itself.
LATE = 3

FATAL = sorted(code for code, row in XIDS.items() if not row.action.spares and code != 154)
HARMLESS = sorted(code for code, row in XIDS.items() if row.action.spares)

# What is broken; how it shows; how long it takes at most to be seen where no event gets lost.
BY_EVENT = "by an event"
LOST = "lost"
HANGS = "hangs"
ROWS = "rows"
DETECTION = {BY_EVENT: LATE, LOST: SWEEP, HANGS: SILENCE + SWEEP, ROWS: SWEEP}

# A way back may be damped: evidence must be younger than the error, and a GPU that flaps is held.
RETURN = 10 + LATE + 2 * SWEEP
RETURN_OF_A_FLAPPING_ONE = 300 + RETURN + 2 * SWEEP


@dataclass
class Model:
    """A GPU, and a driver that tells of it.

    Attributes:
        has_field: whether the driver knows the recovery action; only then is it known what a lost event was about.
        loses: whether events get lost.
        broken: how it is broken, in truth; "" if it is not.
    """

    rng: random.Random
    has_field: bool
    loses: bool
    broken: str = ""
    lives: int = 1
    energy: int = 1000
    errors: int = 0
    action_known_at: float = 0.0
    silent_since: float | None = None
    queue: list[tuple[float, GpuEvent]] = field(default_factory=list)

    def breaks(self, now: float, how: str) -> None:
        """From now on it is broken."""
        self.broken = how
        self.silent_since = now if how == HANGS else None
        if how == BY_EVENT:
            self.action_known_at = now + self.rng.uniform(0, LATE)
            self.errors += self.rng.choice((0, 1))
            code = self.rng.choice(FATAL)
            # It may come several times, late, or not at all.
            for _ in range(self.rng.choice((0, 1, 2)) if self.loses else self.rng.choice((1, 2, 3))):
                self.queue.append((now + self.rng.uniform(0, LATE), Xid(GPU, code)))

    def is_repaired(self) -> None:
        """A person resets it, or the hang ends."""
        if self.broken != HANGS:
            self.lives += 1
            self.energy = self.errors = 0
            # Nobody could reset it while somebody was registered for its events.
            self.queue.clear()
        self.broken, self.silent_since = "", None

    def program_fails(self, now: float) -> None:
        """An error of a program."""
        self.queue.append((now + self.rng.uniform(0, LATE), Xid(GPU, self.rng.choice(HARMLESS))))

    def events(self, now: float) -> list[GpuEvent]:
        """What the driver reports by now."""
        due = [event for at, event in self.queue if at <= now]
        self.queue = [(at, event) for at, event in self.queue if at > now]
        return due

    def look(self, now: float) -> GpuEvent | None:
        """What a sweep finds; None if there is no answer yet."""
        self.energy += 1
        if self.silent_since is not None:
            return Sign(GPU, "answer", "no answer") if now - self.silent_since >= SILENCE else None
        if self.broken == LOST:
            return Sign(GPU, "answer", "lost", ends_in_reset=True)
        asks = self.broken == BY_EVENT and now >= self.action_known_at
        return Checkup(
            GPU,
            life=str(self.lives),
            action=int(asks) if self.has_field else None,
            remap_failure=self.broken == ROWS,
            remap_pending=self.rng.random() < 0.5,
            uncorrectable=self.errors,
            energy=self.energy,
        )


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_the_policy_against_the_truth(seed: int, has_field: bool, loses: bool) -> None:
    """No broken GPU is offered beyond the detection time, and no healthy one is out for ever."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    model = Model(rng, has_field, loses)
    health, since, times = Health(), 0.0, 0
    change = rng.uniform(5, 200)
    for now in range(4000):
        if now >= change:
            since = now
            if model.broken:
                model.is_repaired()
            else:
                times += 1
                model.breaks(now, rng.choice(list(DETECTION)))
            change = now + rng.choice((rng.uniform(1, 30), rng.uniform(60, 800)))
        elif rng.random() < 0.05:
            model.program_fails(now)
        found = model.events(now)
        # At intervals, and after each event.
        if (found or now % SWEEP == 0) and (answer := model.look(now)) is not None:
            found.append(answer)
        for event in found:
            health = judge(health, event, now=now)
        offered = health.of(GPU) is None
        lasted = now - since
        if model.broken:
            # Nobody can tell what an old driver reports by one event alone, and that event is lost.
            tells = has_field or not loses or model.broken != BY_EVENT
            slack = LATE + SWEEP + 1 if model.broken == BY_EVENT else 1

            assert not (offered and tells and lasted > DETECTION[model.broken] + slack), (model, lasted)
        else:
            limit = RETURN if times < 3 else RETURN_OF_A_FLAPPING_ONE

            assert offered or lasted <= limit + SWEEP, (model, lasted, health)


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 2**32), st.booleans())
def test_programs_never_take_a_healthy_gpu_away(seed: int, has_field: bool) -> None:
    """However many programs fail on it, a healthy GPU is offered all the time."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    model = Model(rng, has_field, loses=False)
    health = Health()
    for now in range(300):
        model.program_fails(now)
        found = model.events(now)
        if now % SWEEP == 0 and (answer := model.look(now)) is not None:
            found.append(answer)
        for event in found:
            health = judge(health, event, now=now)

        assert health.of(GPU) is None
