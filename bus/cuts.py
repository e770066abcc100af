"""Cuts: which states a reader may apply, found in what enters the logs' histories.

Theory of operation. Writers that name each other in their groups are a team. A team has generations: incarnations of
its group, each with its own members. Within a generation a cut is a version vector at which every member has reached
the same step; a writer that is alone makes a cut with every version, whatever its step, since a restarted trainer
counts its steps again. Cuts never put two generations together: of a step that a group published, lost and took again,
no reader gets one half of each. A later generation comes after an earlier one, whatever its steps and members.

Teams are independent of each other but for what their messages say they had applied of other writers. A state is a cut
of each team, such that all of that is in it too.

It has no clock, no randomness and no I/O.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from .message import Message
from .progress import Awaited, Dependence, Progress
from .version import VersionVector

__all__ = ["Cuts", "Reached", "Usable"]

_NOTHING = VersionVector()

Usable = Callable[[str, int], bool]
"""Tells of a writer's version whether it can be had."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A cut of one team, and its place in the order of the team's cuts.

    Attributes:
        generation: Of the group.
        step: That all members have reached.
        state: The members' versions.
        needs: What the members had applied of other writers.
    """

    generation: int
    step: int
    state: VersionVector
    needs: VersionVector

    @property
    def order(self) -> tuple[int, int, tuple[int, ...]]:
        """Grows from one cut to the next."""
        versions = tuple(self.state.values())
        return self.generation, sum(versions), versions


@dataclass(slots=True)
class _Step:
    """What the members of a group published of one step."""

    versions: dict[str, int] = field(default_factory=dict)
    needs: dict[str, VersionVector] = field(default_factory=dict)
    reached: Reached | None = None


@dataclass(slots=True)
class _Team:
    """Writers that belong together.

    Attributes:
        members: Of all generations.
        groups: The members of each generation.
        steps: What is known of each step, by generation and step.
        cuts: In order.
        last: The last step of each writer, by generation and writer.
    """

    members: set[str] = field(default_factory=set)
    groups: dict[int, frozenset[str]] = field(default_factory=dict)
    steps: dict[tuple[int, int], _Step] = field(default_factory=dict)
    cuts: list[Reached] = field(default_factory=list)
    last: dict[tuple[int, str], int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return min(self.members)

    def join(self, other: _Team) -> None:
        self.members |= other.members
        self.groups.update(other.groups)
        self.steps.update(other.steps)
        self.last.update(other.last)
        self.cuts = sorted((*self.cuts, *other.cuts), key=lambda cut: cut.order)


class Cuts:
    """The cuts of a topic.

    Args:
        only: The writers that are followed, so that what rests on others need not wait for them; None is all.
    """

    def __init__(self, only: Collection[str] | None = None) -> None:
        self._only = only
        self._teams: dict[str, _Team] = {}
        self._generations: dict[str, list[tuple[int, int]]] = {}
        self._needs: dict[str, list[tuple[int, VersionVector]]] = {}
        self._newest: dict[str, int] = {}

    def check(self, known: dict[int, frozenset[str]], message: Message) -> str:
        """Return what is wrong with the group that a message names; nothing if all is well.

        Args:
            known: The groups of the writer's team by generation, as the messages checked before left them; extended.
            message: The next message of one log.
        """
        group, generation = message.members, message.generation
        team = self._teams.get(message.writer)
        if _same(known.get(generation), group) or (team is not None and _same(team.groups.get(generation), group)):
            return ""
        teams = {id(team): team for member in sorted(group) if (team := self._teams.get(member)) is not None}
        claims = [*(claim for team in teams.values() for claim in team.groups.items()), (generation, group)]
        for number, members in claims:
            if known.setdefault(number, members) != members:
                ours, theirs = _names(known[number]), _names(members)
                if number == generation:
                    return f"makes a group of {theirs} where generation {number} is a group of {ours}"
                return f"brings {ours} and {theirs} together, which both had a generation {number}"
        return ""

    def claim(self, message: Message) -> None:
        """Note the group that a checked message names, also where the message leads to a version that is there."""
        self._team(message.writer, message.members, message.generation)

    def enter(self, message: Message, needs: VersionVector) -> None:
        """Take the first message that leads to a version, once it is checked.

        Args:
            message: The message.
            needs: What its writer had applied of others by then.
        """
        writer, group, generation = message.writer, message.members, message.generation
        team = self._team(writer, group, generation)
        self._newest[writer] = max(message.version, self._newest.get(writer, 0))
        told = self._generations.setdefault(writer, [])
        if not told or told[-1][1] < generation:
            told.append((message.version, generation))
        known = self._needs.setdefault(writer, [])
        if needs and (not known or known[-1][1] != needs):
            known.append((message.version, needs))
        team.last[generation, writer] = message.step
        if len(group) == 1:
            state = VersionVector({writer: message.version})
            insort(team.cuts, Reached(generation, message.step, state, needs), key=lambda cut: cut.order)
            return
        # Of several versions of a step the newest counts.
        step = team.steps.setdefault((generation, message.step), _Step())
        if step.reached is not None:
            team.cuts.remove(step.reached)
        if message.version > step.versions.get(writer, 0):
            step.versions[writer], step.needs[writer] = message.version, needs
        step.reached = None
        if len(step.versions) == len(group):
            merged = _NOTHING
            for told_of in {id(needs): needs for needs in step.needs.values()}.values():
                merged = merged.merge(told_of) if told_of else merged
            step.reached = Reached(generation, message.step, VersionVector(step.versions), merged)
            insort(team.cuts, step.reached, key=lambda cut: cut.order)

    def forget(self, writer: str, gone: Collection[int]) -> None:
        """Forget the cuts that versions of a writer are part of: they were removed."""
        team = self._teams.get(writer)
        if team is None or not gone:
            return
        team.cuts = [cut for cut in team.cuts if cut.state.of(writer) not in gone]
        for key, step in list(team.steps.items()):
            if step.versions.get(writer) in gone:
                del step.versions[writer], step.needs[writer]
                step.reached = None
                if not step.versions:
                    del team.steps[key]

    def newest(self, after: VersionVector, usable: Usable | None = None) -> tuple[Reached, ...] | None:
        """Return what leads furthest beyond a state: for each team that moves on, its cut; None when none does.

        Args:
            after: The state; nothing when it is empty.
            usable: Tells which versions can be had; None says that all can.
        """
        choices: dict[int, tuple[Reached, Iterator[Reached]]] = {}
        for team in self._distinct():
            rest = self._backwards(team, after, usable)
            first = next(rest, None)
            if first is not None:
                choices[id(team)] = first, rest
        # A cut that rests on something that is not there goes back to an earlier one, until all agree.
        agreed = False
        while choices and not agreed:
            agreed = True
            vector = self._moved(after, (cut for cut, _ in choices.values()))
            for key, (cut, rest) in list(choices.items()):
                if self._rests_on(cut.needs, vector):
                    continue
                agreed = False
                earlier = next(rest, None)
                if earlier is None:
                    del choices[key]
                else:
                    choices[key] = earlier, rest
        return tuple(cut for cut, _ in choices.values()) or None

    def next(self, after: VersionVector) -> tuple[Reached, ...] | None:
        """Return the first cut beyond a state: that of the team whose step is the lowest; None when there is none."""
        found = [cut for team in self._distinct() if (cut := next(self._forwards(team, after), None)) is not None]
        for cut in sorted(found, key=lambda cut: (cut.step, min(cut.state))):
            if self._rests_on(cut.needs, self._moved(after, [cut])):
                return (cut,)
        vector = self._moved(after, found)
        if found and all(self._rests_on(cut.needs, vector) for cut in found):
            return tuple(found)
        return self.newest(after)

    def state(self, after: VersionVector, reached: Iterable[Reached]) -> VersionVector:
        """Return the state once some teams have moved on to these cuts."""
        return self._moved(after, reached)

    def is_cut(self, state: VersionVector) -> bool:
        """Return whether each team that has versions in a state has a cut there, and what these rest on is in it."""
        for team in self._distinct():
            part = VersionVector({writer: state[writer] for writer in team.members if writer in state})
            if not part:
                continue
            cut = next((cut for cut in reversed(team.cuts) if cut.state == part), None)
            if cut is None or not self._rests_on(cut.needs, state):
                return False
        return True

    def generation(self, writer: str, version: int) -> int:
        """Return the generation that a version of a writer belongs to; 0 where nothing is known of it."""
        told = self._generations.get(writer, [])
        place = bisect_right(told, version, key=lambda item: item[0])
        return told[place - 1][1] if place else 0

    def needs(self, writer: str, version: int) -> VersionVector:
        """Return what a writer had applied of others when it published a version."""
        known = self._needs.get(writer, [])
        place = bisect_right(known, version, key=lambda item: item[0])
        return known[place - 1][1] if place else _NOTHING

    def waiting(self, after: VersionVector) -> tuple[Awaited, ...]:
        """Return what keeps steps from a reader that is as far as it can come.

        For each group these are the first step beyond its newest cut that some members have and others lack, and the
        first cut that rests on something that nobody has published.

        Args:
            after: The reader's state.
        """
        found: list[Awaited] = []
        for team in self._distinct():
            generation = max(team.groups)
            group = team.groups[generation]
            reached = next((cut.step for cut in reversed(team.cuts) if cut.generation == generation), None)
            steps = [
                number
                for (at, number), step in team.steps.items()
                if at == generation and step.reached is None and (reached is None or number > reached)
            ]
            if steps:
                step = min(steps)
                missing = sorted(group - team.steps[generation, step].versions.keys())
                last = {writer: team.last.get((generation, writer)) for writer in missing}
                found.append(Progress(step, tuple(missing), len(group), last, team.name, generation))
            cut = next(self._forwards(team, after), None)
            unmet = {} if cut is None else self._unmet(cut, after)
            if cut is not None and unmet:
                newest = {writer: self._newest.get(writer, 0) for writer in unmet}
                found.append(Dependence(cut.step, tuple(sorted(unmet)), unmet, newest, team.name, cut.generation))
        return tuple(found)

    def _distinct(self) -> list[_Team]:
        teams = {id(team): team for team in self._teams.values()}
        return sorted(teams.values(), key=lambda team: team.name) if len(teams) > 1 else list(teams.values())

    def _team(self, writer: str, group: frozenset[str], generation: int) -> _Team:
        """Return a writer's team, with the members of this group in it."""
        team = self._teams.get(writer)
        if team is None or not _same(team.groups.get(generation), group):
            team = team or _Team()
            for member in group:
                other = self._teams.get(member)
                if other is not None and other is not team:
                    team.join(other)
                    self._teams.update((name, team) for name in other.members)
                self._teams[member] = team
            team.members |= group
            team.groups[generation] = group
        return team

    def _place(self, team: _Team, state: VersionVector) -> tuple[int, VersionVector] | None:
        """Return the generation that a state is in, as far as it concerns a team, and its part; None if it has none."""
        writers = [(writer, state[writer]) for writer in team.members if writer in state]
        if not writers:
            return None
        generation = max(self.generation(writer, version) for writer, version in writers)
        group = team.groups.get(generation)
        return generation, VersionVector({w: v for w, v in writers if group is None or w in group})

    def _forwards(self, team: _Team, after: VersionVector) -> Iterator[Reached]:
        place = self._place(team, after)
        if place is None:
            yield from team.cuts
            return
        generation, part = place
        first = bisect_right(team.cuts, (generation, sum(part.values())), key=lambda cut: cut.order[:2])
        for cut in team.cuts[first:]:
            if cut.generation > generation or cut.state.covers(part):
                yield cut

    def _backwards(self, team: _Team, after: VersionVector, usable: Usable | None) -> Iterator[Reached]:
        place = self._place(team, after)
        generation, part = place or (-1, _NOTHING)
        least = generation, sum(part.values())
        for at in range(len(team.cuts) - 1, -1, -1):
            cut = team.cuts[at]
            if cut.order[:2] <= least:
                return
            if cut.generation == generation and not cut.state.covers(part):
                continue
            if usable is None or all(usable(writer, version) for writer, version in cut.state.items()):
                yield cut

    def _moved(self, after: VersionVector, reached: Iterable[Reached]) -> VersionVector:
        """Return a state in which some teams have moved on; members of theirs that left are in it no more."""
        cuts = list(reached)
        moved = {id(self._teams[next(iter(cut.state))]) for cut in cuts}
        versions = {writer: version for writer, version in after.items() if id(self._teams.get(writer)) not in moved}
        for cut in cuts:
            versions.update(cut.state)
        return VersionVector(versions)

    def _rests_on(self, needs: VersionVector, vector: VersionVector) -> bool:
        """Return whether all that is needed of other writers is in a state, or was replaced by a later generation."""
        for writer, version in needs.items():
            if vector.of(writer) >= version or (self._only is not None and writer not in self._only):
                continue
            team = self._teams.get(writer)
            place = None if team is None else self._place(team, vector)
            if place is None or place[0] <= self.generation(writer, version):
                return False
        return True

    def _unmet(self, cut: Reached, vector: VersionVector) -> dict[str, int]:
        """Return what a cut rests on, itself or through others, that nobody has published: versions by writer."""
        unmet: dict[str, int] = {}
        looked, waiting = {id(cut)}, [cut]
        while waiting:
            for writer, version in waiting.pop().needs.items():
                if self._rests_on(VersionVector({writer: version}), vector):
                    continue
                if self._newest.get(writer, 0) < version:
                    unmet[writer] = max(version, unmet.get(writer, 0))
                    continue
                # It is there, and waits itself: for what it rests on, or else for the rest of its group.
                there = next((other for other in self._teams[writer].cuts if other.state.of(writer) >= version), None)
                if there is not None and id(there) not in looked:
                    looked.add(id(there))
                    waiting.append(there)
        return unmet


def _same(one: frozenset[str] | None, other: frozenset[str]) -> bool:
    """Return whether two groups are the same; mostly they are one object, and large."""
    return one is other or one == other


def _names(group: Collection[str]) -> str:
    names = sorted(group)
    return ", ".join(names) if len(names) <= 8 else f"{len(names)} ({', '.join(names[:3])}, ...)"
