"""`qworker.sqlalchemy` with the real SQLAlchemy on SQLite: calls are sent after the commit of their session."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from qworker import Call, Job, Task, Tasks
from qworker.errors import EnqueueFailed, InvalidArguments, MessageTooLarge, QueueFull, UsageError
from qworker.sqlalchemy import enqueue_on_commit
from qworker_memory import MemoryBackend


class Shop:
    """A database, and an app whose handler `send` reads it."""

    def __init__(self, folder: Path) -> None:
        self.tasks: Tasks[Any] = Tasks(f"memory://{secrets.token_hex(8)}?max_body=1KiB")
        self.path = folder / "shop.sqlite"
        # Without a pool: SQLite is a file, and each session has a connection of its own.
        self.engine: Engine = create_engine(f"sqlite:///{self.path}", poolclass=NullPool)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id INTEGER)"))

        @self.tasks.task
        def send(order: int, note: str = "") -> None: ...

        self.send: Task[..., None] = send

    def insert(self, session: Session | scoped_session[Session], order: int) -> None:
        session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": order})

    def rows(self) -> list[int]:
        with self.engine.connect() as connection:
            return list(connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars())

    def sent(self) -> list[int]:
        """The orders of the calls that wait, sorted."""
        return sorted(int(str(job.args[0])) for job in self.tasks.jobs_sync(queue="default"))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def published(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls of each batch. The rows are committed before their calls are stored."""
    batches: list[int] = []
    publish = MemoryBackend.publish

    async def checked(self: Any, queue: str, drafts: Sequence[Any]) -> list[str]:
        batches.append(len(drafts))
        assert shop.rows(), "nothing is committed yet"
        return await publish(self, queue, drafts)

    monkeypatch.setattr(MemoryBackend, "publish", checked)
    return batches


def test_a_commit_sends_its_calls_as_one_batch_and_a_rollback_drops_them(shop: Shop, published: list[int]) -> None:
    with Session(shop.engine) as session:
        first = enqueue_on_commit(session, shop.send, 1)  # before the first statement
        shop.insert(session, 1)
        given = enqueue_on_commit(session, shop.send.using(id="order-2"), 2)
        enqueue_on_commit(session, shop.send.call(3))
        enqueue_on_commit(session, shop.tasks.named("send"), 4)
        assert (first.existed, given.id, published) == (None, "order-2", [])
        session.commit()
        assert (first.existed, given.existed, published) == (False, None, [4])
        assert shop.sent() == [1, 2, 3, 4]

        enqueue_on_commit(session, shop.send, 5)
        session.rollback()
        session.commit()
        enqueue_on_commit(session, shop.send, 6)
        # `close` without a commit is a rollback.
    with suppress(KeyError), Session(shop.engine) as session, session.begin():
        enqueue_on_commit(session, shop.send, 7)
        raise KeyError
    assert published == [4]


def test_a_savepoint_that_is_rolled_back_drops_its_calls_and_no_other(shop: Shop, published: list[int]) -> None:
    with Session(shop.engine) as session, session.begin():
        shop.insert(session, 1)
        enqueue_on_commit(session, shop.send, 1)
        with session.begin_nested():
            enqueue_on_commit(session, shop.send, 2)
            with session.begin_nested() as inner:
                enqueue_on_commit(session, shop.send, 13)
                inner.rollback()
            enqueue_on_commit(session, shop.send, 3)
        outer = session.begin_nested()
        with session.begin_nested():
            enqueue_on_commit(session, shop.send, 14)
        outer.rollback()  # after the inner one was released
        session.begin_nested().close()
        enqueue_on_commit(session, shop.send, 4)
        session.begin_nested()
        enqueue_on_commit(session, shop.send, 5)
        # The commit releases the savepoint that is still open.
    assert (shop.sent(), published) == ([1, 2, 3, 4, 5], [5])


def test_a_flush_that_fails_drops_the_calls_of_its_transaction(shop: Shop, published: list[int]) -> None:
    with Session(shop.engine) as session:
        enqueue_on_commit(session, shop.send, 1)
        with pytest.raises(OperationalError, match="no such table"):
            session.execute(text("INSERT INTO missing VALUES (1)"))
        session.rollback()
        shop.insert(session, 2)
        enqueue_on_commit(session, shop.send, 2)
        session.commit()
    assert shop.sent() == [2]


def test_two_sessions_and_a_scoped_session_do_not_share_calls(shop: Shop) -> None:
    scoped = scoped_session(sessionmaker(shop.engine))
    # In autocommit mode of the database too, the session says when it commits.
    autocommit = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(shop.engine) as one, Session(autocommit) as two:
        enqueue_on_commit(one, shop.send, 1)
        enqueue_on_commit(two, shop.send, 2)
        enqueue_on_commit(scoped, shop.send, 3)
        two.commit()
        assert shop.sent() == [2]
        scoped.commit()
        assert shop.sent() == [2, 3]
        one.rollback()
    scoped.remove()
    assert shop.sent() == [2, 3]


def test_what_cannot_be_sent_is_refused_at_the_call(shop: Shop) -> None:
    with Session(shop.engine) as session:
        refused: list[tuple[tuple[Any, ...], type[Exception], str]] = [
            ((session, shop.send, "x", "y", "z"), InvalidArguments, "too many positional arguments"),
            ((session, shop.send, 1, "x" * 1024), MessageTooLarge, "more than max_body=1KiB"),
            ((session, len, 1), UsageError, "takes a task or a call"),
            ((session, shop.send.call(1), 2), UsageError, "a call has its own: leave them out"),
            ((shop.engine, shop.send, 1), UsageError, "session is not a SQLAlchemy Session or AsyncSession"),
            ((session, Call("q", shop.send.call(1).draft)), UsageError, "belongs to no app"),
        ]
        for arguments, error, reason in refused:
            with pytest.raises(error, match=reason):
                enqueue_on_commit(*arguments)
        session.commit()
    assert shop.sent() == []


@pytest.mark.parametrize("commits", ["commit", "begin"])
def test_a_store_that_fails_after_the_commit_raises_and_leaves_the_session_usable(
    commits: str, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Any, queue: str, drafts: Sequence[Any]) -> list[str]:
        raise QueueFull("no room")

    jobs: list[Job[Any]] = []

    def order(session: Session) -> None:
        shop.insert(session, 1)
        jobs.append(enqueue_on_commit(session, shop.send, 1))

    def commit(session: Session) -> None:
        if commits == "begin":
            with session.begin():
                order(session)
        else:
            order(session)
            session.commit()

    with Session(shop.engine) as session:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryBackend, "publish", fail)
            with pytest.raises(EnqueueFailed, match="1 of 1 calls may not be stored") as raised:
                commit(session)
        assert (shop.rows(), [job.existed for job in jobs]) == ([1], [None])
        shop.tasks.enqueue_many_sync(raised.value.unsent)
        enqueue_on_commit(session, shop.send, 2)
        session.commit()
    assert shop.sent() == [1, 2]


async def test_an_async_session_sends_without_blocking_the_event_loop(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    engine = create_async_engine(f"sqlite+aiosqlite:///{shop.path}", poolclass=NullPool)
    scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)

    async def sent() -> list[int]:
        return sorted([int(str(job.args[0])) async for job in shop.tasks.jobs(queue="default")])

    async with AsyncSession(engine) as session, session.begin():
        enqueue_on_commit(session, shop.send, 1)
        await session.run_sync(shop.insert, 1)
        await session.run_sync(lambda plain: enqueue_on_commit(plain, shop.send, 2))
        async with session.begin_nested() as savepoint:
            enqueue_on_commit(session, shop.send, 13)
            await savepoint.rollback()
    enqueue_on_commit(scoped, shop.send, 3)
    await scoped.commit()
    enqueue_on_commit(scoped, shop.send, 14)
    await scoped.remove()
    assert (shop.rows(), await sent()) == ([1], [1, 2, 3])
    with Session(shop.engine) as plain, pytest.raises(UsageError, match="or an AsyncSession of SQLAlchemy"):
        enqueue_on_commit(plain, shop.send, 4)
    await engine.dispose()
