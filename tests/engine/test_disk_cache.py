"""The disk behind the prefix cache: engines with a model in plain integers, which shows every wrong block."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from fakes import FakeRunner, continuation, make_embedding_request, make_info, make_request
from in_process import Completion
from waiting import PATIENCE

from quantd.engine import disk_reader
from quantd.engine.block_folder import BlockFolder
from quantd.engine.config import EngineConfig
from quantd.engine.disk_cache import NO_DISK, BlocksOnDisk, kind_of, open_disk_cache
from quantd.engine.disk_reader import Pace
from quantd.engine.loop import EngineLoop, Incoming
from quantd.engine.messages import Abort, Add, Drop, Events, Forget, FromEngine, GetStats, Save, Saved, Stats
from quantd.engine.plan import Plan, Runner, StepOutput
from quantd.engine.prefix_cache import block_keys
from quantd.engine.request import Request, TokenEvent
from quantd.engine.scheduler import Scheduler

BLOCK = 4
INFO = make_info(num_blocks=64, block_size=BLOCK)
PROMPT = [(7 * place) % 59 for place in range(50)]  # 12 full blocks


class Engine:
    """A step loop over a home, stepped by the test; with nothing to do it is idle, and does not wait."""

    num_reserved = 0  # blocks that a step ahead may hold

    def __init__(self, home: Path, runner: Runner | None = None, **options: object) -> None:
        home.mkdir(exist_ok=True)
        model = home / "model"
        if not model.exists():
            model.mkdir()
            (model / "w.safetensors").write_bytes(b"weights")
        config = EngineConfig(
            model_path=str(model), prefix_folder=str(home / "prefixes"), block_size=BLOCK, **options
        )
        self.runner = runner or FakeRunner(INFO)
        self.inbox: SimpleQueue[Incoming] = SimpleQueue()
        self.sent: list[FromEngine] = []
        self.disk = open_disk_cache(config, self.runner, self.inbox.put)
        if isinstance(self.disk, BlocksOnDisk):
            self.disk.note_step = lambda *args: None  # integers are computed faster than any disk is read
        self.scheduler = Scheduler(config, self.runner.info, self.disk)
        self.loop = EngineLoop(self.scheduler, self.runner, self.inbox, self.sent.append, hold_seconds=0.0)

    @property
    def files(self) -> list[Path]:
        return sorted(Path(self.disk._config.prefix_folder).glob("*/" + "?" * 64))

    def step(self) -> None:
        self.loop.step()
        self.scheduler.check(self.num_reserved)

    def is_done(self) -> bool:
        return not self.scheduler.held and not self.scheduler.has_work and self.inbox.empty()

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until something is so. What a thread does may be waited for."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            if self.scheduler.has_work or not self.inbox.empty():
                self.step()
            else:
                time.sleep(0.001)

    def rest(self) -> None:
        """Have nothing to do for long enough to write all that is to be written."""
        cache = self.scheduler.cache
        deadline = time.monotonic() + PATIENCE
        while not self._is_written:
            assert time.monotonic() < deadline
            while self.inbox.empty() and self.disk.turn(cache):
                pass
            try:
                self.inbox.put(self.inbox.get(timeout=0.05))
            except Empty:
                continue
            self.step()

    @property
    def _is_written(self) -> bool:
        writer = self.disk._writer
        if writer is None or not writer._stopped:
            return not self.disk._chains and (writer is None or writer._writing is None)
        return True

    def events(self, start: int = 0) -> list[TokenEvent]:
        """What was told, from a frame on."""
        frames = [frame for frame in self.sent[start:] if isinstance(frame, Events)]
        return [event for frame in frames for event in frame.events]

    def serve(self, *requests: Request) -> list[Completion]:
        """What a model in plain integers says."""
        completions = self.complete(*requests)
        for request, completion in zip(requests, completions, strict=True):
            if request.embedding is None:
                assert completion.token_ids == continuation(request, INFO)[0]
        return completions

    def complete(self, *requests: Request) -> list[Completion]:
        completions = {request.id: Completion() for request in requests}
        for request in requests:
            self.inbox.put(Add(request))
        start = len(self.sent)

        def ended() -> bool:
            return all(completion.finish_reason for completion in completions.values())

        def take() -> bool:
            nonlocal start
            for event in self.events(start):
                completions[event.request_id].add(event)
            start = len(self.sent)
            return ended()

        self.until(take)
        return list(completions.values())

    def cached(self, prompt: Sequence[int] = PROMPT, salt: str = "") -> int:
        """How many tokens of a prompt need not be computed."""
        (completion,) = self.serve(make_request("cached?", prompt, salt, max_tokens=1))
        assert completion.num_cached is not None
        return completion.num_cached


def stored(home: Path, prompt: Sequence[int] = PROMPT, **options: object) -> Engine:
    """An engine that has computed a prompt, and written it."""
    engine = Engine(home, **options)
    engine.serve(make_request("first", prompt, max_tokens=1))
    engine.rest()
    return engine


def test_a_prefix_outlives_its_engine(tmp_path: Path) -> None:
    first = stored(tmp_path)
    assert len(first.files) == 12
    again = Engine(tmp_path)
    assert (again.cached(PROMPT[:30]), again.cached(), again.disk.num_read) == (28, 48, 12)
    assert again.cached([*PROMPT[:20], 1, 2, 3]) == 20
    again.inbox.put(GetStats())
    again.step()
    assert isinstance(again.sent[-1], Stats) and again.sent[-1].disk_hits == 48


def test_the_answer_goes_on_the_disk_too(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    request = make_request("a", PROMPT, max_tokens=20)
    (answer,) = first.serve(request)
    first.rest()
    turn = [*PROMPT, *answer.token_ids, 5, 6]
    assert Engine(tmp_path).cached(turn) == 68


def test_nothing_is_written_while_there_is_work_and_one_block_at_a_time(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.serve(make_request("first", PROMPT, max_tokens=1))
    engine.rest()
    engine.inbox.put(Add(make_request("busy", [1] * 20, max_tokens=40)))
    engine.inbox.put(Add(make_request("short", [2] * 20, max_tokens=1)))
    for _ in range(20):
        engine.step()
    assert len(engine.files) == 12
    engine.until(lambda: not engine.scheduler.has_work)
    turns = 0
    while engine.disk.turn(engine.scheduler.cache):
        turns += 1
    assert len(engine.files) <= 13


def test_salts_are_kept_apart(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.serve(make_request("a", PROMPT, salt="alice", max_tokens=1))
    engine.rest()
    assert Engine(tmp_path).cached(salt="bob") == 0
    assert Engine(tmp_path).cached() == 0
    assert Engine(tmp_path).cached(salt="alice") == 48


def test_what_nobody_comes_back_to_is_not_written(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    request = make_request("once", PROMPT, salt="random", max_tokens=1)
    once = Request(id="once", prompt=PROMPT, sampling=request.sampling, salt="random", lasting=False)
    engine.serve(once, make_embedding_request("text", PROMPT[::-1], pooling="last"))
    engine.serve(make_request("short", PROMPT[:12], max_tokens=1))
    engine.rest()
    assert not engine.files


def test_other_weights_and_other_arithmetic_are_other_blocks(tmp_path: Path) -> None:
    stored(tmp_path)
    runner = FakeRunner(INFO)
    runner.pool_blocks.numerics = "another"
    assert Engine(tmp_path, runner).cached() == 0
    (tmp_path / "model" / "w.safetensors").write_bytes(b"others!")
    changed = Engine(tmp_path)
    assert changed.cached() == 0
    changed.rest()
    assert Engine(tmp_path).cached() == 48
    (tmp_path / "model" / "config.json").write_text("{}")
    assert Engine(tmp_path).cached() == 0
    assert kind_of(b"a", "x") != kind_of(b"b", "x") != kind_of(b"b", "y")


def test_weights_that_change_under_an_engine_are_not_taken_for_its_own(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    (tmp_path / "model" / "w.safetensors").write_bytes(b"new ones")
    engine.cached()
    engine.disk.turn(engine.scheduler.cache)
    engine.disk.flush(engine.scheduler.cache, 20.0)
    assert not engine.files
    assert Engine(tmp_path).cached() == 0


def test_another_copy_of_the_model_finds_its_blocks(tmp_path: Path) -> None:
    stored(tmp_path)
    other = tmp_path / "moved"
    (tmp_path / "model").rename(other)
    (tmp_path / "model").symlink_to(other)
    assert Engine(tmp_path).cached() == 48
    (other / "copy.safetensors").write_bytes((other / "w.safetensors").read_bytes())
    (other / "w.safetensors").unlink()
    engine = Engine(tmp_path)
    assert engine.cached() == 0  # a new file: it is read when there is time
    engine.rest()
    assert Engine(tmp_path).cached() == 48


@pytest.mark.parametrize("place", [0, 5, 11])
def test_what_is_damaged_is_computed(tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture) -> None:
    first = stored(tmp_path)
    name = block_keys(PROMPT, BLOCK, "")[place].hex()
    (damaged,) = (path for path in first.files if path.name == name)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    engine = Engine(tmp_path)
    assert engine.cached() == place * BLOCK
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "checksum" in record.getMessage()
    engine.rest()
    assert Engine(tmp_path).cached() == 48


def test_a_full_disk_is_told_once_and_served_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFolder, "write", full)
    engine = Engine(tmp_path)
    for salt in ("", "a", "b", "c"):
        engine.cached(salt=salt)
        engine.rest()
        engine.disk.flush(engine.scheduler.cache, 1.0)
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert engine.cached() == 48


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "prefixes").write_text("in the way")
    engine = Engine(tmp_path)
    engine.cached()
    engine.rest()
    assert len(caplog.records) == 1 and "no prefixes are kept on disk" in caplog.text


def test_a_long_prefix_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [(11 * place) % 57 for place in range(200)]
    stored(tmp_path, prompt)
    monkeypatch.setattr(disk_reader, "_PIECE_BYTES", 200)
    engine = Engine(tmp_path)
    assert isinstance(engine.disk, BlocksOnDisk)
    for place in (45, 2, 0):
        assert engine.cached(prompt[: 199 - place]) == (198 - place) // BLOCK * BLOCK
    assert engine.disk.num_read == 49


def test_requests_of_one_prefix_read_it_once(tmp_path: Path) -> None:
    stored(tmp_path)
    engine = Engine(tmp_path)
    requests = [make_request(f"r{number}", [*PROMPT, number], max_tokens=4) for number in range(6)]
    requests.append(make_request("other", [3] * 30, max_tokens=4))
    completions = engine.serve(*requests)
    assert [completion.num_cached for completion in completions] == [48] * 6 + [0]
    assert engine.disk.num_read == 12


def test_others_are_served_while_a_request_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path)
    read = BlockFolder.read
    monkeypatch.setattr(BlockFolder, "read", lambda *args: time.sleep(0.02) or read(*args))
    engine = Engine(tmp_path)
    engine.inbox.put(Add(make_request("waits", PROMPT, max_tokens=2)))
    engine.step()
    engine.inbox.put(Add(make_request("short", [9] * 5, max_tokens=3)))
    for _ in range(3):
        engine.step()
    ended = [event.request_id for event in engine.events() if event.finish_reason]
    assert ended == ["short"]
    engine.until(engine.is_done)
    assert engine.disk.num_read == 12


def test_an_abort_while_the_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path)
    read = BlockFolder.read
    monkeypatch.setattr(BlockFolder, "read", lambda *args: time.sleep(0.01) or read(*args))
    engine = Engine(tmp_path)
    for name in ("a", "b", "c"):
        engine.inbox.put(Add(make_request(name, PROMPT, max_tokens=2)))
    engine.inbox.put(Abort("a"))
    engine.inbox.put(Abort("b"))
    engine.until(engine.is_done)
    reasons = {e.request_id: e.finish_reason for e in engine.events() if e.finish_reason}
    assert reasons == {"a": "abort", "b": "abort", "c": "length"}


def test_a_small_pool_takes_what_it_has_room_for(tmp_path: Path) -> None:
    stored(tmp_path)
    info = make_info(num_blocks=16, block_size=BLOCK)
    engine = Engine(tmp_path, FakeRunner(info))
    # The one that runs has most of the pool when the other's blocks come.
    first = make_request("big", [4] * 38, max_tokens=8)
    engine.inbox.put(Add(first))
    engine.step()
    engine.inbox.put(Add(make_request("late", PROMPT, max_tokens=2)))
    engine.until(engine.is_done)
    answers: dict[str, list[int]] = {"big": [], "late": []}
    for event in engine.events():
        answers[event.request_id] += event.token_ids
    assert answers["big"] == continuation(first, info)[0]
    assert answers["late"] == continuation(make_request("late", PROMPT, max_tokens=2), info)[0]


def test_what_is_forgotten_is_gone_from_the_disk(tmp_path: Path) -> None:
    engine = stored(tmp_path)
    engine.serve(make_request("fork", [*PROMPT[:40], 1, 2, 3, 4, 5], max_tokens=1))
    engine.inbox.put(Forget(PROMPT[:45]))
    engine.step()
    engine.rest()
    assert engine.cached() == 0
    assert Engine(tmp_path).cached(PROMPT[:45]) == 0


def test_a_drop_deletes_and_writes_nothing_of_it_again(tmp_path: Path) -> None:
    engine = stored(tmp_path)
    keys = block_keys(PROMPT, BLOCK, "")
    engine.serve(make_request("again", PROMPT, max_tokens=1))
    engine.inbox.put(Drop(keys))
    engine.step()
    engine.rest()
    assert not [path for path in engine.files if bytes.fromhex(path.name) in keys]
    engine.serve(make_request("more", [5] * 40, max_tokens=1))
    engine.inbox.put(Drop(None))
    engine.step()
    engine.rest()
    assert engine.cached([5] * 40) == 0


def test_a_save_writes_what_is_left_before_the_engine_ends(tmp_path: Path) -> None:
    engine = stored(tmp_path, [8] * 20)
    engine.serve(make_request("last", PROMPT, max_tokens=1))
    engine.inbox.put(Save(5.0))
    engine.step()
    assert engine.sent[-1] == Saved()
    assert Engine(tmp_path).cached() == 48


def test_a_save_keeps_to_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(tmp_path, [8] * 20)
    before = len(engine.files)
    engine.serve(make_request("last", PROMPT, max_tokens=1))
    write = BlockFolder.write
    monkeypatch.setattr(BlockFolder, "write", lambda *args: time.sleep(0.05) or write(*args))
    engine.inbox.put(Save(0.12))
    engine.step()
    assert engine.sent[-1] == Saved()
    # From its root on, so that what there is can be found.
    assert 1 <= len(engine.files) - before <= 4
    monkeypatch.setattr(BlockFolder, "write", write)


def test_the_root_of_a_prefix_counts_as_used_after_its_end(tmp_path: Path) -> None:
    engine = stored(tmp_path)
    keys = block_keys(PROMPT, BLOCK, "")
    paths = sorted(engine.files, key=lambda path: keys.index(bytes.fromhex(path.name)))
    for path in paths:
        os.utime(path, (1.0, 1.0))
    Engine(tmp_path).cached()
    used = [path.stat().st_mtime for path in paths]
    assert min(used) > time.time() - 60 and max(used) - min(used) < 50


def test_two_engines_may_share_a_folder(tmp_path: Path) -> None:
    engines = [Engine(tmp_path, disk_cache=1 << 30) for _ in range(2)]
    for engine in engines:
        engine.serve(make_request("a", PROMPT, max_tokens=1))
    for _ in range(2):
        for engine in engines:
            engine.rest()
    assert Engine(tmp_path).cached() == 48


def test_off_means_off(tmp_path: Path) -> None:
    for options in ({"disk_cache": 0}, {"prefix_caching": False}):
        engine = Engine(tmp_path, **options)
        assert engine.disk is NO_DISK
        assert engine.cached() == 0
    runner = FakeRunner(INFO)
    runner.pool_blocks = None
    assert Engine(tmp_path, runner).disk is NO_DISK
    assert not (tmp_path / "prefixes").exists()


def test_a_failed_step_leaves_nothing_to_be_written(tmp_path: Path) -> None:
    class Broken(FakeRunner):
        def run(self, plan: Plan) -> StepOutput:
            if len(self.plans) == 1:
                self.plans.append(plan)
                raise RuntimeError("the step broke")
            return super().run(plan)

    engine = Engine(tmp_path, Broken(INFO))
    engine.inbox.put(Add(make_request("a", PROMPT, max_tokens=4)))
    engine.until(lambda: not engine.scheduler.has_work and engine.inbox.empty())
    assert isinstance(engine.disk, BlocksOnDisk)
    assert not engine.disk._chains


def test_reading_must_be_faster_than_computing() -> None:
    pace = Pace(block_size=16)
    assert pace.reading_wins()
    pace.note_computed(8, 100.0)  # a decode step says nothing
    pace.note_read(10, 1.0)
    assert pace.reading_wins()
    pace.note_computed(640, 2.0)  # 0.05 s a block
    assert not pace.reading_wins()
    assert pace.limit(10) == pytest.approx(0.5)
    for _ in range(20):
        if pace.reading_wins():
            break
    assert pace.reading_wins()  # the disk gets another chance
    pace.note_read(100, 0.1)
    pace.note_read(100, 0.1)
    assert pace.reading_wins()


def test_a_fetch_takes_no_longer_than_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path)
    read = BlockFolder.read
    monkeypatch.setattr(BlockFolder, "read", lambda *args: time.sleep(0.02) or read(*args))
    engine = Engine(tmp_path)
    assert isinstance(engine.disk, BlocksOnDisk)
    BlocksOnDisk.note_step(engine.disk, 1000, 1.0)  # 4 ms a block, 48 ms for all
    assert 0 < engine.cached() < 48
