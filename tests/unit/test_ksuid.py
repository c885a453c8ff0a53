"""Names that sort by time and never repeat, in threads and forked processes too."""

import itertools
import os
import threading
import time

import pytest

from client import ksuid
from client.errors import InvalidArgument

# Published with the KSUID specification.
KNOWN = "0ujtsYcgvSTl8PAuAdqWYSMnLOv"


def test_a_ksuid_has_27_letters_and_digits() -> None:
    for name in ksuid.take(5_000):
        assert len(name) == 27
        assert name.isascii()
        assert name.isalnum()


def test_the_known_vector_gives_its_time_and_bytes() -> None:
    assert ksuid.time_of(KNOWN) == 1_400_000_000 + 107_608_047
    assert ksuid.raw(KNOWN).hex() == "0669f7efb5a1cd34b5f99d1154fb6853345c9735"


def test_a_ksuid_carries_the_second_that_it_was_made_in() -> None:
    ksuid._start_afresh()  # a clock that counted before may have been ahead of ours
    before = int(time.time())
    names = ksuid.take(10_000)
    after = time.time()
    assert all(before <= ksuid.time_of(name) <= after for name in (names[0], names[-1]))


def test_names_grow_over_batches_of_any_size() -> None:
    names = [name for size in (1, 0, 3_843, 1, 3_844, 10_000, 2) for name in ksuid.take(size)]
    assert len(names) == 17_691
    assert all(first < second for first, second in itertools.pairwise(names))


def test_names_grow_from_second_to_second_and_when_the_clock_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ksuid._start_afresh()  # a client whose cluster is ahead may have taken names before
    made = []
    base = time.time() + 10
    for shift in (0, 1, 2, -3_600, 3):
        monkeypatch.setattr("time.time", lambda shift=shift: base + shift)
        made += ksuid.take(2)
    monkeypatch.undo()
    ksuid._start_afresh()  # what others take is of their own time again
    assert made == sorted(set(made))
    assert ksuid.time_of(made[4]) == ksuid.time_of(made[6]) == int(base + 2)
    assert ksuid.time_of(made[8]) == int(base + 3)


def test_taking_none_gives_none() -> None:
    assert ksuid.take(0) == []


def test_threads_never_share_a_name() -> None:
    taken: list[list[str]] = []

    def work() -> None:
        mine = [name for _ in range(200) for name in ksuid.take(37)]
        taken.append(mine)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [name for mine in taken for name in mine]
    assert len(set(names)) == len(names) == 8 * 200 * 37
    assert all(mine == sorted(mine) for mine in taken)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_never_repeats_a_name_and_never_waits_for_the_parents_lock() -> None:
    ksuid.take(1)
    with ksuid._sequence._lock:  # as if another thread of the parent were taking some just now
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, " ".join(ksuid.take(100)).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        theirs = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert len(theirs) == 100
    assert not set(theirs) & set(ksuid.take(5_000))


@pytest.mark.parametrize("text", ["", "abc", KNOWN + "0", KNOWN[:-1] + "-", KNOWN[:-1] + "é", "z" * 27])
def test_what_is_no_ksuid_is_an_invalid_argument(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a KSUID"):
        ksuid.time_of(text)
