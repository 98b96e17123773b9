# SPDX-License-Identifier: Apache-2.0
"""B115: which adapters an engine knows, over files of which each look is the test's: they change, vanish and hang. With
real files and the thread: tests/sockets/test_adapters.py.
"""
import hashlib
from types import SimpleNamespace

import msgspec
import pytest

from vllm_pd.model.adapters import FileLook
from vllm_pd.protocol.messages import Role
from vllm_pd.protocol.scope import MAX_ADAPTERS, NOBODYS, adapter_scope
from vllm_pd.v1 import adapters
from vllm_pd.v1.adapter_files import LOOK_S, STALE_S, AdapterReader
from vllm_pd.v1.adapters import AdapterBook
from vllm_pd.v1.features import scope_of

CONFIG = SimpleNamespace(max_loras=2, max_cpu_loras=4, lora_dtype="auto", target_modules=None)


class Asked(msgspec.Struct):
    """vLLM's LoRARequest."""
    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class Files:
    """A file system with adapters, and a clock. `reading`: is done after a chunk was read."""

    def __init__(self):
        self.now = 100.0
        self.looks, self.error = {}, None
        self.reading = lambda path: None
        self.wakes = 0

    def write(self, path, content="first", **fields):
        seen = {"device": 1, "inode": 1, "size": 8, "mtime_ns": 7, "ctime_ns": 7}
        look = FileLook("adapter_model.bin", **{**seen, **fields})
        self.looks[path] = (look, ), content

    def look(self, folder):
        self.now += 0.001
        if self.error is not None:
            raise self.error
        return self.looks[str(folder)][0]

    def digest(self, folder, look, settings, between):
        if self.error is not None:
            raise self.error
        content = self.looks[str(folder)][1]
        self.reading(str(folder))
        between()
        return hashlib.sha256(f"{settings} {content}".encode()).digest()

    def wake(self):
        self.wakes += 1


class Turns(AdapterReader):
    """Its thread is the test's."""

    def start(self):
        self._thread = None


@pytest.fixture
def files():
    found = Files()
    found.write("a")
    return found


@pytest.fixture
def reader(files):
    return Turns(files.wake, files.look, files.digest, lambda: files.now)


@pytest.fixture
def book(reader):
    return AdapterBook(CONFIG, reader, is_offering=True)


ONE = Asked("one", 1, "a")


def load(book, *asked):
    for one in asked:
        assert book.load(one, lambda request: True)
    book._reader.turn()


def asks(lora, salt=""):
    return SimpleNamespace(cache_salt=salt, lora_request=lora, mm_features=[])


def is_known(book, asked):
    """In each way in which it may be asked."""
    digest = book.digest(asked)
    found = book.is_usable(asked)
    assert not found or digest
    assert found is (adapter_scope(digest) in book.scopes())
    if not found:
        with pytest.raises(ValueError, match="is offered here"):
            book.request(digest)
    return found


def test_what_is_loaded_is_known_once_it_is_read(book, reader, files):
    assert book.load(ONE, lambda request: True)
    assert not is_known(book, ONE) and book.digest(ONE) == b"" and scope_of(asks(ONE), book, None).adapter == NOBODYS
    reader.turn()
    assert is_known(book, ONE) and len(book.digest(ONE)) == 32 and files.wakes
    assert scope_of(asks(ONE, "s"), book, None).needs == {"salt", adapter_scope(book.digest(ONE))}
    assert book.request(book.digest(ONE)) == ONE


def test_adapters_are_told_apart_by_their_files_and_how_they_are_applied(book, files, reader):
    files.write("b")
    files.write("c", "other")
    others = Asked("two", 2, "b"), Asked("one", 3, "c"), Asked("3d", 4, "a", is_3d_lora_weight=True)
    load(book, ONE, *others)
    same, *rest = map(book.digest, others)
    assert same == book.digest(ONE) and len({same, *rest}) == 3 and len(book.scopes()) == 3
    for config in ({"lora_dtype": "float16"}, {"target_modules": ["q_proj"]}):
        other = AdapterBook(SimpleNamespace(**{**vars(CONFIG), **config}), reader, is_offering=True)
        load(other, ONE)
        assert other.digest(ONE) not in (b"", same)


def test_a_job_is_computed_with_what_the_front_end_has_loaded_last(book, files):
    files.write("b")
    again, same = Asked("one", 5, "a"), Asked("two", 2, "b")
    load(book, ONE)
    digest = book.digest(ONE)
    load(book, same)
    assert book.request(digest) == same
    load(book, msgspec.structs.replace(again, load_inplace=True))
    assert book.request(digest) == again, "not loaded again at each step"
    assert is_known(book, ONE), "requests with the number of before go on"


def test_only_what_is_loaded_before_its_first_use_is_known(book):
    book.note_use(ONE)
    load(book, ONE)
    assert not is_known(book, ONE) and scope_of(asks(ONE), book, None).adapter == NOBODYS
    assert not is_known(book, Asked("one", 9, "a")), "nobody has loaded that"


@pytest.mark.parametrize("fails", [RuntimeError, None])
def test_what_vllm_does_not_load_is_not_known(book, fails):
    def rank(request):
        if fails:
            raise fails

    if fails:
        with pytest.raises(fails):
            book.load(ONE, rank)
    else:
        assert not book.load(ONE, rank)
    book._reader.turn()
    assert not is_known(book, ONE)


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns"])
def test_files_that_change_are_never_used_again(book, reader, files, field):
    load(book, ONE)
    digest = book.digest(ONE)
    files.write("a", "second", **{field: 9})
    assert is_known(book, ONE), "nobody has looked"
    reader.turn()
    assert not is_known(book, ONE) and book.digest(ONE) == digest, "a job that was decided keeps its scope"
    files.write("a", "third")
    load(book, msgspec.structs.replace(ONE, load_inplace=True))
    assert not is_known(book, ONE), "vLLM's prefix cache may have blocks of the second one"
    other = Asked("of the changed files", 2, "a")
    load(book, other)
    assert is_known(book, other) and book.digest(other) != digest


def test_a_change_is_seen_when_it_is_loaded_in_place(book, files):
    load(book, ONE)
    files.write("a", "second", ctime_ns=9)
    book.load(msgspec.structs.replace(ONE, load_inplace=True), lambda request: True)
    assert not is_known(book, ONE)


def test_files_that_change_between_load_and_first_look_are_not_known(book, reader, files):
    book.load(ONE, lambda request: files.write("a", "second", ctime_ns=9) is None)
    reader.turn()
    assert not is_known(book, ONE) and book.digest(ONE) == b""


def test_files_that_change_while_they_are_read_are_not_known(book, files):
    files.reading = lambda path: files.write("a", "second", ctime_ns=9)
    load(book, ONE)
    assert not is_known(book, ONE) and book.digest(ONE) == b""


def test_a_look_that_fails_is_forgiven(book, reader, files):
    load(book, ONE)
    files.error = OSError("stale")
    reader.turn()
    assert not is_known(book, ONE)
    book.load(ONE, lambda request: True)
    files.error, before = None, files.wakes
    reader.turn()
    assert is_known(book, ONE) and files.wakes > before, "a job may wait for that"


@pytest.mark.parametrize("error", [FileNotFoundError("away"), NotADirectoryError("away")])
def test_files_that_were_away_are_never_used_again(book, reader, files, error):
    """Others may have been read in their place: with a relative path vLLM would look for them in a hub."""
    load(book, ONE)
    files.error = error
    reader.turn()
    files.error = None
    reader.turn()
    assert not is_known(book, ONE)


@pytest.mark.parametrize("end", [RuntimeError("one rank of two"), KeyboardInterrupt(), None])
@pytest.mark.parametrize("path", ["a", "b"])
def test_a_load_in_place_that_fails_ends_the_use_of_its_number(book, files, end, path):
    """A worker may have what was to be loaded, or a part of it, under the number of what all had."""
    def load_half(request):
        if end:
            raise end

    files.write("b", "other")
    load(book, ONE)
    inplace = Asked("one", 1, path, load_inplace=True)
    if end:
        with pytest.raises(type(end)):
            book.load(inplace, load_half)
    else:
        assert not book.load(inplace, load_half)
    assert not is_known(book, ONE) and not is_known(book, inplace)
    load(book, inplace)
    assert not is_known(book, inplace), "what the workers have under this number is not known"


def test_a_first_load_that_fails_may_be_made_again_under_another_number(book):
    """As a front end does, whose client has written the path wrong. A number of a resolver that has failed does not
    come to stand for what the next one finds."""
    with pytest.raises(OSError):
        book.load(ONE, lambda request: (_ for _ in ()).throw(OSError("half of it is written")))
    load(book, ONE)
    assert not is_known(book, ONE)
    other = Asked("of the same files", 2, "a")
    load(book, other)
    assert is_known(book, other)


def test_a_read_that_fails_is_logged_once(book, reader, files, caplog):
    def fail(path):
        raise PermissionError("not yours")

    files.reading = fail
    load(book, ONE)
    for _ in range(5):
        reader.turn()
    assert caplog.text.count("can't be read") == 1


def test_a_read_that_fails_is_made_again(book, reader, files):
    def fail(path):
        raise OSError("stale")

    files.reading = fail
    load(book, ONE)
    assert not is_known(book, ONE)
    files.reading = lambda path: None
    reader.turn()
    assert is_known(book, ONE)


def test_files_that_nobody_can_look_at_any_more_are_not_used(book, reader, files):
    """Their file system hangs, and with it the thread."""
    load(book, ONE)
    files.now += STALE_S - 0.1
    assert is_known(book, ONE)
    files.now += 0.2
    assert not is_known(book, ONE)
    reader.turn()
    assert is_known(book, ONE)


def test_others_are_looked_at_while_a_large_one_is_read(book, reader, files):
    files.write("b")
    load(book, ONE)

    def read(path):
        files.now += 2 * STALE_S

    files.reading = read
    book.load(Asked("two", 2, "b"), lambda request: True)
    reader.turn()
    assert is_known(book, ONE) and is_known(book, Asked("two", 2, "b"))


def test_the_end_of_a_job_is_known_by_a_look_that_began_after_it(book, reader, files):
    load(book, ONE)
    ended, before = files.now, files.wakes
    assert book.unchanged_since(ONE, ended) is None
    book.look()
    assert book.unchanged_since(ONE, ended) is None
    files.now += 0.001
    reader.turn()
    assert book.unchanged_since(ONE, ended) is True and files.wakes == before + 1
    files.now += LOOK_S
    ended = files.now
    files.error = OSError("stale")
    reader.turn()
    assert book.unchanged_since(ONE, ended) is None
    files.error = None
    files.write("a", "second", ctime_ns=9)
    reader.turn()
    assert book.unchanged_since(ONE, ended) is False
    assert book.unchanged_since(Asked("never loaded", 2, "a"), ended) is False


def test_a_look_that_began_before_the_end_of_a_job_says_nothing(book, reader, files):
    load(book, ONE)
    look, ended = reader.look, []

    def looks(folder):
        found = look(folder)
        ended.append(files.now)
        files.now += 0.001
        return found

    reader.look = looks
    reader.turn()
    assert book.unchanged_since(ONE, ended[0]) is None


def test_two_adapters_under_one_number_stay(book, files):
    """The workers do not load the second one while they have the first, and load either when they have none."""
    files.write("b", "other")
    other = Asked("one", 1, "b", load_inplace=True)
    load(book, ONE)
    digest = book.digest(ONE)
    load(book, other)
    assert not is_known(book, ONE) and not is_known(book, other) and book.digest(ONE) == digest
    load(book, Asked("one", 2, "b"))
    assert not is_known(book, Asked("one", 2, "b")), "what the prefix cache has under this name and path is not known"


def test_only_an_engine_that_prefills_and_nothing_else_offers(reader):
    book = AdapterBook(CONFIG, reader, is_offering=False)
    load(book, ONE)
    assert book.is_usable(ONE) and not book.scopes()
    with pytest.raises(ValueError, match="is offered here"):
        book.request(book.digest(ONE))
    assert [role for role in Role if role.prefills and not role.decodes] == [Role.PREFILL]


def test_as_many_are_offered_as_the_workers_keep(book, files):
    some = []
    for number in range(6):
        files.write(f"{number}", f"content {number}")
        some.append(Asked(f"{number}", number + 1, f"{number}"))
    load(book, *some)
    offered = {adapter_scope(book.digest(one)) for one in some[2:]}
    assert set(book.scopes()) == offered and all(map(book.is_usable, some))
    load(book, some[0])
    assert adapter_scope(book.digest(some[0])) in book.scopes() and len(book.scopes()) == 4


def test_all_is_bounded(book, reader, files, monkeypatch):
    monkeypatch.setattr(adapters, "MAX_NOTED", 2 * (MAX_ADAPTERS + 2))
    some = [Asked(f"{number}", number + 1, "a") for number in range(MAX_ADAPTERS + 3)]
    load(book, *some)
    assert [one.lora_int_id for one in some if not book.is_usable(one)] == [1, 2, MAX_ADAPTERS + 3]
    assert len(reader._watched) == MAX_ADAPTERS and len(book._adapters) == len(book._keys) == MAX_ADAPTERS + 2
    for number in range(9):
        book.note_use(Asked("used", 1, f"path {number}"))
    assert len(book._adapters) == MAX_ADAPTERS + 2
