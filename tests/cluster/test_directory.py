import asyncio

import pytest
from cedar.cluster.announcer import Announcer
from cedar.cluster.directory import DirectoryState, Load, View, ViewKeeper, Worker, counts
from cedar.cluster.directory_client import LocalDirectory


def worker(address: str = "h:1", incarnation: int = 1, stage: str = "decode", **more: object) -> Worker:
    return Worker(stage=stage, address=address, incarnation=incarnation, **more)  # type: ignore[arg-type]


def test_first_announcement_registers_and_the_next_refreshes() -> None:
    state = DirectoryState(expire_after_s=3)
    assert state.announce(worker(sequence=1), 0)
    registered = state.version
    assert state.announce(worker(sequence=2, load=Load(active=5)), 1)
    assert state.version == registered, "load alone does not change the version"
    assert state.view().stage("decode")[0].load.active == 5


def test_silent_workers_expire_and_may_come_back() -> None:
    state = DirectoryState(expire_after_s=3)
    state.announce(worker(), 0)
    assert state.expire(3) == []
    assert state.expire(3.1) == [worker()]
    assert state.view().workers == ()
    assert state.announce(worker(sequence=9), 4), "its host may have slept"


def test_a_new_incarnation_replaces_the_old_one_for_good() -> None:
    state = DirectoryState(expire_after_s=3)
    state.announce(worker(incarnation=1), 0)
    state.suspect("h:1", 1)
    assert state.announce(worker(incarnation=2), 1)
    assert not state.announce(worker(incarnation=1, sequence=99), 1.1), "a late word of the dead"
    view = state.view()
    assert [w.incarnation for w in view.stage("decode")] == [2]


def test_late_messages_are_counted_for_nothing() -> None:
    state = DirectoryState(expire_after_s=3)
    state.announce(worker(sequence=5, draining=True), 0)
    assert not state.announce(worker(sequence=4, draining=False), 0.1)
    assert state.view().stage("decode") == ()
    state.leave("h:1", incarnation=7, now_s=0.2)
    state.suspect("h:1", incarnation=7)
    state.suspect("nowhere:1", incarnation=1)
    assert len(state.view().workers) == 1


def test_leaving_is_final_for_that_incarnation() -> None:
    state = DirectoryState(expire_after_s=3)
    state.announce(worker(), 0)
    state.leave("h:1", 1, 1)
    assert state.view().workers == ()
    assert not state.announce(worker(sequence=9), 1.5)


def test_suspicion_holds_until_the_next_announcement() -> None:
    state = DirectoryState(expire_after_s=3)
    state.announce(worker(sequence=1), 0)
    before = state.version
    state.suspect("h:1", 1)
    assert state.version > before
    assert state.view().stage("decode") == ()
    assert len(state.view().all("decode")) == 1
    state.announce(worker(sequence=2), 0.5)
    assert len(state.view().stage("decode")) == 1


def test_memory_of_the_gone_is_bounded() -> None:
    state = DirectoryState(expire_after_s=1)
    for incarnation in range(1000):
        state.announce(worker(incarnation=incarnation), incarnation)
        state.expire(incarnation)
    assert len(state._gone) <= 12


def test_counts() -> None:
    assert counts([worker(), worker("h:2"), worker("h:3", stage="store")]) == {"decode": 2, "store": 1}


def test_clients_keep_their_last_view_while_a_restarted_directory_fills_up() -> None:
    last = View(7, epoch=1, workers=(worker("h:1"), worker("h:2")), suspected=frozenset({("h:2", 1)}))
    fresh = View(1, epoch=2, workers=(worker("h:1", incarnation=5),))
    keeper = ViewKeeper(keep_for_s=3)
    assert keeper.update(last, 10) == last, "the first view is not a restart"
    merged = keeper.update(fresh, 20)
    assert {(w.address, w.incarnation) for w in merged.workers} == {("h:1", 5), ("h:2", 1)}
    assert [w.address for w in merged.stage("decode")] == ["h:1"]
    assert keeper.update(fresh, 22.9) == merged
    assert keeper.update(fresh, 23) == fresh


async def test_announcer_registers_again_after_the_directory_restarted() -> None:
    directory = LocalDirectory()
    announcer = Announcer(directory, worker, heartbeat_s=60)
    await announcer.announce()
    directory.state = DirectoryState(3)
    await announcer.announce()
    assert len((await directory.view()).workers) == 1


async def test_announcer_outlives_an_unreachable_directory() -> None:
    directory = LocalDirectory()
    announcer = Announcer(directory, worker, heartbeat_s=60)
    directory.reachable = False
    await announcer.announce()
    assert announcer.failures == 1
    directory.reachable = True
    await announcer.announce()
    assert len((await directory.view()).workers) == 1


async def test_announcer_tells_its_worker_when_the_store_moves() -> None:
    directory = LocalDirectory()
    told: list[str | None] = []
    announcer = Announcer(directory, worker, heartbeat_s=60, store_moved=told.append)
    await announcer.announce()
    assert told == []
    await directory.announce(worker("s:1", stage="store"))
    await announcer.announce()
    await announcer.announce()
    await directory.leave("s:1", 1)
    await announcer.announce()
    await directory.announce(worker("s:2", stage="store"))
    await announcer.announce()
    assert told == ["s:1", "s:2"]


async def test_an_announcer_that_a_bug_has_ended_says_so() -> None:
    def broken() -> Worker:
        raise RuntimeError("a bug")

    announcer = Announcer(LocalDirectory(), broken, heartbeat_s=60)
    assert not announcer.failed
    announcer.start()
    await asyncio.sleep(0.01)
    assert announcer.failed, "its worker must be replaced"
    well = Announcer(LocalDirectory(), worker, heartbeat_s=60)
    well.start()
    await asyncio.sleep(0.01)
    assert not well.failed
    await well.stop()
    assert not well.failed


async def test_stopped_announcer_says_goodbye() -> None:
    directory = LocalDirectory()
    announcer = Announcer(directory, worker, heartbeat_s=0.01)
    announcer.start()
    await announcer.announce()
    await announcer.stop()
    await announcer.stop()
    assert (await directory.view()).workers == ()


@pytest.mark.parametrize(
    ("load", "pages", "slots"),
    [(Load(), 0.0, 0.0), (Load(pages_total=4, pages_leased=1, slots_total=2, slots_leased=2), 0.25, 1.0)],
)
def test_load_fractions(load: Load, pages: float, slots: float) -> None:
    assert (load.pages_fraction, load.slots_fraction) == (pages, slots)
