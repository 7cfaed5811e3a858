"""A small explicit-state model of the directory protocol, and the search through all of its states.

What is modelled: the names that a message's file takes (`tmp`, `staged`, `load`, `queue`, `lease`, `delay`, `fail`,
`done`), the commit of a load, which renames the directory of all staged files, a mover of its files, the flock on
its inode, the system calls of two worker processes (one of them with two consumers), of a reaper, of a canceller, of a
requeue of what was cancelled, and of a foreign fsq,
the death and restart of a worker after any call, an error of any rename whether or not it happened, and the passing of
time. Left out: power loss and listings, which have tests of their own.

Each step is one system call, so every interleaving of calls is a path of the search.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

# Owners of a flock that are no consumer's number.
FSQ = 9
NOBODY = -1


class Name(NamedTuple):
    """A file's only name: its directory, and what the protocol writes into it."""

    folder: str
    tries: int = 0
    # Of leases: the process, its incarnation (a new worker file), and the expiry, a number that the process counts up.
    holder: tuple[int, int] | None = None
    expiry: int = 0
    # In fail/: the mark of a cancelled item.
    cancelled: bool = False


class Claim(NamedTuple):
    """What one consumer believes of one message."""

    # locked: has the flock, and renames next. held: its handler runs. unsure: a rename failed; looks for the names
    # next.
    at: str
    name: Name
    target: Name | None = None
    # An end that is under way.
    ending: bool = False
    locked: bool = False
    # By its own clock the lease is over.
    late: bool = False
    # The message was cancelled, so its file has a later time than the token of this lease.
    stale: bool = False


class File(NamedTuple):
    """One message and all that touches it."""

    name: Name | None = None
    # The name is a lease whose time has passed.
    late: bool = False
    lock: int = NOBODY
    # The publisher: new, written (in tmp/), unsure, told (success was reported), dead.
    publisher: str = "new"
    claims: tuple[Claim | None, ...] = ()
    # The name that the reaper has read and will rename.
    seen: Name | None = None
    # idle, opened, running, over (it comes once).
    fsq: str = "idle"
    # The canceller: idle, seen (it has written the reason and will rename `wanted`), unsure, told (success), over.
    canceller: str = "idle"
    wanted: Name | None = None
    # Whether the cancelled message was requeued (it is once).
    requeued: bool = False


class Process(NamedTuple):
    """A worker process."""

    alive: bool = True
    incarnation: int = 0
    # The last expiry given; strictly rising.
    expiry: int = 0


class World(NamedTuple):
    """One state of everything."""

    files: tuple[File, ...]
    processes: tuple[Process, ...] = (Process(), Process())
    faults: int = 0
    crashes: int = 0


class Rules(NamedTuple):
    """The rules of the protocol. The tests break each rule to prove that the search finds a counterexample."""

    rising_expiries: bool = True
    keep_the_flock: bool = True
    reap_the_name_that_was_seen: bool = True
    look_after_an_error: bool = True
    mark_the_cancelled: bool = True
    compare_the_token: bool = True
    requeue_the_cancelled_into_delay: bool = True
    # False: the documented residue, an fsq that stalls between open and flock for longer than a whole lease.
    brisk_fsq: bool = True
    # The bounds of the search: the process of each consumer, expiries per process, tries, and whether there is an fsq.
    consumers: tuple[int, ...] = (0, 0, 1)
    expiries: int = 2
    tries: int = 2
    fsq: bool = True
    # The messages are those of a load, and whether a mover renames them to queue/.
    load: bool = False
    mover: bool = True
    # False: a mover that renames the name of a file that it has not seen staged.
    move_only_staged: bool = True
    # Whether there is a canceller.
    cancelling: bool = False
    # Permanent failure moves a file as ack does, and a release as a retry: left out where the search would be long.
    failing: bool = True
    releasing: bool = True


class Broken(Exception):
    """A promise does not hold; says which, and how to get there."""


def start(rules: Rules, files: int = 1, *, faults: int = 0, crashes: int = 0, published: bool = False) -> World:
    """Nothing done yet, or messages published, and so many errors of renames and deaths of workers to come."""
    file = File(claims=(None,) * len(rules.consumers))
    if published:
        file = file._replace(name=Name("queue"), publisher="told")
    return World(files=(file,) * files, faults=faults, crashes=crashes)


Step = tuple[str, World]


def steps(world: World, rules: Rules) -> Iterator[Step]:
    """Every system call that anybody could make next."""
    for index, file in enumerate(world.files):
        moves = _Moves(world, index, file, rules)
        yield from moves.publisher()
        for consumer, process in enumerate(rules.consumers):
            if world.processes[process].alive:
                yield from moves.consumer(consumer)
        yield from moves.reaper()
        yield from moves.time()
        if rules.load and rules.mover:
            yield from moves.mover()
        if rules.cancelling:
            yield from moves.canceller()
        if rules.fsq:
            yield from moves.fsq()
    yield from _deaths(world, rules)
    if rules.load:
        yield from _commits(world)


def _commits(world: World) -> Iterator[Step]:
    """The commit of a load: the seal is on the disk, and the directory of its files is renamed."""
    if all(file.publisher == "staged" for file in world.files):
        yield "the load is sealed", _each(world, "staged", publisher="sealed")
    if any(file.publisher == "sealed" for file in world.files):
        yield "commit: rename", _each(world, "load", publisher="told")
        # Its process dies: any other one finds the seal, and continues.
        if world.faults:
            yield (
                "commit: rename, reply lost",
                _each(world, "load", publisher="sealed")._replace(faults=world.faults - 1),
            )


def _each(world: World, folder: str, *, publisher: str) -> World:
    """Rename the directory of all staged files. What has left it before stays where it is."""
    files = [
        file._replace(publisher=publisher, name=Name(folder) if file.name == Name("staged") else file.name)
        for file in world.files
    ]
    return world._replace(files=tuple(files))


def _deaths(world: World, rules: Rules) -> Iterator[Step]:
    for number, process in enumerate(world.processes):
        if process.alive and world.crashes:
            files = tuple(_without_process(file, number, rules) for file in world.files)
            yield (
                f"worker {number} dies",
                _with_process(world, number, process._replace(alive=False))._replace(
                    files=files, crashes=world.crashes - 1
                ),
            )
        if not process.alive:
            risen = Process(incarnation=process.incarnation + 1, expiry=process.expiry)
            yield f"worker {number} starts again", _with_process(world, number, risen)


def _without_process(file: File, number: int, rules: Rules) -> File:
    for consumer, process in enumerate(rules.consumers):
        if process == number:
            file = _let_go(file, consumer, rules)
    return file


def _with_process(world: World, number: int, process: Process) -> World:
    processes = list(world.processes)
    processes[number] = process
    return world._replace(processes=tuple(processes))


def _let_go(file: File, consumer: int, rules: Rules) -> File:
    """Close the descriptor, and with it the flock; forget the claim."""
    had = file.claims[consumer]
    file = _with_claim(file, consumer, None)
    if file.lock == consumer:
        file = file._replace(lock=NOBODY)
    if had is not None and rules.brisk_fsq and file.fsq == "opened":
        # An fsq that has opened the file has tried the lock by now, and found it taken.
        file = file._replace(fsq="idle")
    return file


def _with_claim(file: File, consumer: int, claim: Claim | None) -> File:
    claims = list(file.claims)
    claims[consumer] = claim
    return file._replace(claims=tuple(claims))


class _Moves:
    """The next calls about one file."""

    def __init__(self, world: World, index: int, file: File, rules: Rules) -> None:
        self.world = world
        self.index = index
        self.file = file
        self.rules = rules

    def now(self, file: File, *, fault: bool = False) -> World:
        files = list(self.world.files)
        files[self.index] = file
        return self.world._replace(files=tuple(files), faults=self.world.faults - fault)

    # -- the publisher -----------------------------------------------------------------------------------------------

    def publisher(self) -> Iterator[Step]:
        file = self.file
        if self.rules.load:
            if file.publisher == "new":
                yield "stage: write", self.now(file._replace(name=Name("staged"), publisher="staged"))
            return
        if file.publisher == "new":
            yield "publish: write to tmp", self.now(file._replace(name=Name("tmp"), publisher="written"))
        if file.publisher == "written":
            moved = file._replace(name=Name("queue"))
            yield "publish: rename", self.now(moved._replace(publisher="told"))
            yield "publish: dies", self.now(file._replace(publisher="dead"))
            if self.world.faults:
                yield "publish: rename, reply lost", self.now(moved._replace(publisher="unsure"), fault=True)
                yield "publish: rename fails", self.now(file._replace(publisher="unsure"), fault=True)
        if file.publisher == "unsure":
            # The name is unique, so an entry that is gone from tmp/ was renamed, wherever it is by now.
            gone = file.name != Name("tmp")
            yield "publish: look", self.now(file._replace(publisher="told" if gone else "dead"))

    # -- the consumers -----------------------------------------------------------------------------------------------

    def consumer(self, consumer: int) -> Iterator[Step]:
        claim = self.file.claims[consumer]
        if claim is None:
            yield from self.begin(consumer)
        elif claim.at == "locked":
            yield from self.rename(f"{consumer} leases", consumer, claim, self.lease_name(consumer))
        elif claim.at == "held":
            if claim.locked and claim.name != self.file.name:
                # Its own process has reaped it: nobody else has to wait for a lock that protects nothing.
                closed = _with_claim(_let_go(self.file, consumer, self.rules), consumer, claim._replace(locked=False))
                yield f"{consumer} closes", self.now(closed)
            yield from self.extend(consumer, claim)
            yield from self.end(consumer, claim)
        else:
            yield f"{consumer} looks", self.looked(consumer, claim)

    def begin(self, consumer: int) -> Iterator[Step]:
        file, name = self.file, self.file.name
        if name is None or self.world.processes[self.rules.consumers[consumer]].expiry >= self.rules.expiries:
            return
        if name.folder == "queue" and file.lock == NOBODY:
            claim = Claim("locked", name, locked=True)
            yield f"{consumer} opens and locks", self.now(_with_claim(file, consumer, claim)._replace(lock=consumer))
        if name.folder in {"delay", "load"}:
            # No fsq works there; a lock that is taken is that of a holder who was given up, and no veto.
            free = file.lock == NOBODY
            opened = _with_claim(file, consumer, Claim("locked", name, locked=free))
            yield f"{consumer} opens and locks", self.now(opened._replace(lock=consumer) if free else opened)

    def lease_name(self, consumer: int) -> Name:
        number = self.rules.consumers[consumer]
        process = self.world.processes[number]
        claim = self.file.claims[consumer]
        tries = claim.name.tries if claim is not None else self.file.name.tries if self.file.name is not None else 0
        expiry = process.expiry + 1 if self.rules.rising_expiries else 1
        return Name("lease", tries, (number, process.incarnation), expiry)

    def counted(self, world: World, consumer: int) -> World:
        """One more expiry was given."""
        number = self.rules.consumers[consumer]
        process = world.processes[number]
        return _with_process(world, number, process._replace(expiry=process.expiry + 1))

    def rename(self, what: str, consumer: int, claim: Claim, target: Name) -> Iterator[Step]:
        file = self.file
        leasing = target.folder == "lease"

        def after(file: File, claim: Claim, *, fault: bool = False) -> World:
            world = self.now(_with_claim(file, consumer, claim), fault=fault)
            return self.counted(world, consumer) if leasing else world

        unsure = claim._replace(at="unsure", target=target, ending=not leasing)
        if file.name != claim.name:
            yield f"{what}: ENOENT", after(file, unsure)
            return
        moved = file._replace(name=target, late=False)
        yield what, self.done(consumer, after(moved, unsure), unsure)
        if self.world.faults:
            yield f"{what}: reply lost", after(moved, unsure, fault=True)
            yield f"{what}: fails", after(file, unsure, fault=True)

    def done(self, consumer: int, world: World, unsure: Claim) -> World:
        """The rename's reply says that it happened."""
        return _Moves(world, self.index, world.files[self.index], self.rules).settled(consumer, unsure)

    def settled(self, consumer: int, claim: Claim) -> World:
        assert claim.target is not None
        if claim.ending:
            return self.now(_let_go(self.file, consumer, self.rules))
        late = self.file.late and self.file.name == claim.target
        held = Claim("held", claim.target, locked=claim.locked and self.rules.keep_the_flock, late=late)
        file = _with_claim(self.file, consumer, held)
        if not held.locked and file.lock == consumer:
            file = file._replace(lock=NOBODY)
        return self.now(file)

    def looked(self, consumer: int, claim: Claim) -> World:
        """After an error: one's own target means success, one's own old name that nothing happened; neither is loss."""
        happened = self.file.name == claim.target and not (claim.stale and self.rules.compare_the_token)
        if happened or not self.rules.look_after_an_error:
            if not happened and claim.ending:
                raise Broken("an end was reported that has not happened")
            if claim.ending and claim.stale:
                raise Broken("a cancelled message was settled as well")
            return self.settled(consumer, claim)
        if self.file.name == claim.name and claim.name.folder == "lease":
            back = claim._replace(at="held", target=None, ending=False)
            return self.now(_with_claim(self.file, consumer, back))
        return self.now(_let_go(self.file, consumer, self.rules))

    def extend(self, consumer: int, claim: Claim) -> Iterator[Step]:
        if self.world.processes[self.rules.consumers[consumer]].expiry < self.rules.expiries:
            target = self.lease_name(consumer)._replace(tries=claim.name.tries)
            yield from self.rename(f"{consumer} extends", consumer, claim, target)

    def end(self, consumer: int, claim: Claim) -> Iterator[Step]:
        tries = claim.name.tries
        yield from self.rename(f"{consumer} acks", consumer, claim, Name("done", tries))
        if self.rules.failing:
            yield from self.rename(f"{consumer} fails", consumer, claim, Name("fail", tries))
        if self.rules.releasing:
            # A message with tries is in queue/ under no name that a search could know.
            back = Name("queue" if claim.locked and not tries else "delay", tries)
            yield from self.rename(f"{consumer} releases", consumer, claim, back)
        if tries < self.rules.tries:
            yield from self.rename(f"{consumer} retries", consumer, claim, Name("delay", tries + 1))

    # -- everybody else ----------------------------------------------------------------------------------------------

    def time(self) -> Iterator[Step]:
        """The lease's time passes, for its holder as for all."""
        file, name = self.file, self.file.name
        if name is None or name.folder != "lease" or file.late:
            return
        claims = tuple(
            claim._replace(late=True) if claim is not None and name in {claim.name, claim.target} else claim
            for claim in file.claims
        )
        yield "a lease is over", self.now(file._replace(late=True, claims=claims))

    def expired(self, name: Name) -> bool:
        """What the reaper concludes from a name: its holder is dead, or its time has passed."""
        assert name.holder is not None
        number, incarnation = name.holder
        process = self.world.processes[number]
        return self.file.late or not process.alive or process.incarnation != incarnation

    def reaper(self) -> Iterator[Step]:
        file, name = self.file, self.file.name
        if file.seen is None:
            if name is not None and name.folder == "lease" and name.tries < self.rules.tries and self.expired(name):
                yield "the reaper reads a name", self.now(file._replace(seen=name))
            return
        done = file._replace(seen=None)
        same = name == file.seen
        if not self.rules.reap_the_name_that_was_seen:
            same = name is not None and name.folder == "lease"
        if same:
            yield "the reaper renames", self.now(done._replace(name=Name("delay", file.seen.tries + 1), late=False))
        else:
            yield "the reaper finds it gone", self.now(done)

    def mover(self) -> Iterator[Step]:
        """A reaper that renames the staged files of a sealed load to queue/, for programs that see only that."""
        name = self.file.name
        if name == Name("load") or (not self.rules.move_only_staged and name is not None and name.folder == "lease"):
            yield "the mover renames", self.now(self.file._replace(name=Name("queue", name.tries), late=False))

    def canceller(self) -> Iterator[Step]:
        file, name = self.file, self.file.name
        target = Name("fail", 0 if file.wanted is None else file.wanted.tries, cancelled=self.rules.mark_the_cancelled)
        if file.canceller == "idle" and name is not None and name.folder in {"queue", "delay", "lease"}:
            yield "cancel: writes the reason", self.now(file._replace(canceller="seen", wanted=name))
        elif file.canceller == "seen":
            yield "cancel: dies", self.now(file._replace(canceller="over", wanted=None))
            if name != file.wanted:
                yield "cancel: finds it gone", self.now(file._replace(canceller="idle", wanted=None))
                return
            claims = tuple(
                claim._replace(late=True, stale=True)
                if claim is not None and name in {claim.name, claim.target}
                else claim
                for claim in file.claims
            )
            moved = file._replace(name=target, late=False, claims=claims)
            yield "cancel: rename", self.now(moved._replace(canceller="told"))
            if self.world.faults:
                yield "cancel: rename, reply lost", self.now(moved._replace(canceller="unsure"), fault=True)
                yield "cancel: rename fails", self.now(file._replace(canceller="unsure"), fault=True)
        elif file.canceller == "unsure":
            # The caller gets the error and repeats the call, which finds the message cancelled, or cancels it.
            done = name is not None and name.folder == "fail" and name.cancelled
            yield "cancel: looks", self.now(file._replace(canceller="told" if done else "idle", wanted=None))
        elif file.canceller == "told" and not file.requeued and name is not None and name.folder == "fail":
            folder = "delay" if self.rules.requeue_the_cancelled_into_delay else "queue"
            yield "requeue: rename", self.now(file._replace(name=Name(folder), requeued=True))

    def fsq(self) -> Iterator[Step]:
        file, name = self.file, self.file.name
        if file.fsq == "idle" and name is not None and name.folder == "queue":
            yield "fsq opens", self.now(file._replace(fsq="opened"))
        if file.fsq == "opened":
            if file.lock == NOBODY:
                yield "fsq locks", self.now(file._replace(fsq="running", lock=FSQ))
            else:
                yield "fsq finds it locked", self.now(file._replace(fsq="idle"))
        if file.fsq == "running":
            over = file._replace(fsq="over", lock=NOBODY)
            yield "fsq dies", self.now(over)
            if name is not None and name.folder == "queue":
                yield "fsq is done", self.now(over._replace(name=Name("done", name.tries)))
                if name.tries < self.rules.tries:
                    yield "fsq retries", self.now(over._replace(name=Name("queue", name.tries + 1)))


# -- the promises ----------------------------------------------------------------------------------------------------


def check(world: World) -> None:
    """What must hold in every state.

    Raises:
        Broken: it does not.
    """
    for file in world.files:
        if file.publisher == "told" and (file.name is None or file.name.folder in {"tmp", "staged"}):
            raise Broken("a published message is lost")
        if file.publisher == "staged" and file.name != Name("staged"):
            raise Broken("a message of a load that is not sealed is seen")
        running = [claim for claim in file.claims if claim is not None and claim.at != "locked" and not claim.late]
        if file.canceller == "told" and not file.requeued and (file.name is None or file.name.folder != "fail"):
            raise Broken("a cancelled message was settled as well")
        sure = [claim for claim in running if claim.at == "held"]
        # An fsq is not told that its message was cancelled, and requeued: that is the user's decision.
        if len(sure) + (file.fsq == "running" and not file.requeued) > 1:
            raise Broken("a message has two holders")


def check_step(before: World, label: str, after: World) -> None:
    """What must hold of every step.

    Raises:
        Broken: it does not.
    """
    actor = label.split(" ", 1)[0].rstrip("'s")
    for old, new in zip(before.files, after.files, strict=True):
        if old.name == new.name:
            continue
        if old.name is not None and old.name.folder in {"done", "fail"} and actor != "requeue:":
            raise Broken("a message that is finished moved")
        if actor.isdigit() and old.name is not None and old.name.folder == "lease":
            claim = old.claims[int(actor)]
            if claim is None or claim.name != old.name:
                raise Broken("a stale holder changed something")
            others = [c for n, c in enumerate(old.claims) if n != int(actor) and c is not None and c.name == old.name]
            if others:
                raise Broken("a stale holder changed something")
        if (
            actor != "requeue:"
            and new.name is not None
            and old.name is not None
            and not 0 <= new.name.tries - old.name.tries <= 1
        ):
            raise Broken("tries were miscounted")


def recovers(world: World) -> None:
    """After the death of everybody, one new worker finds what was published.

    Raises:
        Broken: it does not.
    """
    for file in world.files:
        name = file.name
        if file.publisher != "told" or name is None:
            continue
        # Dead holders' leases are reaped by name; everything else is where workers look, or is finished.
        if name.folder == "lease" and name.holder is None:
            raise Broken("a lease that nobody can reap")
        if name.folder not in {"load", "queue", "delay", "lease", "fail", "done"}:
            raise Broken("a message where nobody looks")


def explore(first: World, rules: Rules, most: int = 3_000_000) -> int:
    """Visit every state that can be reached; return how many there are.

    Raises:
        Broken: a promise does not hold; its text has the shortest way there.
        MemoryError: there are more than `most`.
    """
    # Nothing of the search is garbage before its end, and looking for it again and again takes most of the time.
    gc.disable()
    try:
        return _explore(first, rules, most)
    finally:
        gc.enable()


def _explore(first: World, rules: Rules, most: int) -> int:
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        try:
            found = list(steps(world, rules))
        except Broken as broken:
            raise Broken(f"{broken}: {_way(came_from, world)}") from broken
        for label, after in found:
            if after in came_from:
                continue
            came_from[after] = (world, label)
            try:
                check_step(world, label, after)
                check(after)
                recovers(after)
            except Broken as broken:
                raise Broken(f"{broken}: {_way(came_from, after)}") from broken
            queue.append(after)
        if len(came_from) > most:
            raise MemoryError(f"more than {most} states")
    return len(came_from)


def _way(came_from: dict[World, tuple[World, str] | None], world: World) -> str:
    labels: list[str] = []
    step = came_from[world]
    while step is not None:
        labels.append(step[1])
        step = came_from[step[0]]
    return "; ".join(reversed(labels))
