# SPDX-License-Identifier: Apache-2.0
"""B115: an adapter is known by its files, whatever it is called, and never taken for another one."""
from types import SimpleNamespace

import pytest

from tests.adapters import write_stub
from vllm_pd.protocol.scope import MAX_ADAPTERS, adapter_scope
from vllm_pd.v1 import adapters
from vllm_pd.v1.adapters import FIRST_ID, AdapterBook

CONFIG = SimpleNamespace(max_loras=2, lora_dtype="auto", target_modules=None)


def asked(path, name="one", number=1, is_3d=False):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), is_3d_lora_weight=is_3d)


def made(**fields):
    return SimpleNamespace(**fields)


def listed(book):
    return set(book.scopes())


@pytest.fixture
def book(monkeypatch):
    monkeypatch.setattr(adapters, "LOOK_S", 0.0)  # each look is a new one
    return AdapterBook(CONFIG)


@pytest.fixture
def folder(tmp_path):
    return write_stub(tmp_path / "a", "first")


def test_the_digest_is_that_of_the_files(book, folder, tmp_path):
    same, other = write_stub(tmp_path / "b", "first"), write_stub(tmp_path / "c", "other")
    digest = book.digest(asked(folder))
    assert len(digest) == 32 and book.digest(asked(same, "two", 2)) == digest != book.digest(asked(other, "one", 3))
    config = write_stub(tmp_path / "d", "first") / "adapter_config.json"
    config.write_text('{"r": 16}')
    assert book.digest(asked(tmp_path / "d")) != digest != book.digest(asked(folder, "3d", is_3d=True))
    assert AdapterBook(SimpleNamespace(**{**vars(CONFIG), "lora_dtype": "float16"})).digest(asked(folder)) != digest


@pytest.mark.parametrize("path", ["nowhere", "org/name-of-a-hub"])
def test_one_that_is_no_folder_here_stays(book, tmp_path, path):
    assert book.digest(asked(tmp_path / path)) == b"" and not book.scopes()


def test_what_is_loaded_is_listed_and_computed_under_the_name_of_its_digest(book, folder):
    seen = []
    book.changed = seen.append
    assert book.load(asked(folder), lambda request: True)
    digest = book.digest(asked(folder))
    assert seen == [(adapter_scope(digest), )] == [book.scopes()]
    ours = book.request(digest, made)
    assert (ours.lora_name, ours.lora_path) == (f"pd-{digest.hex()}", str(folder)) and ours.lora_int_id > FIRST_ID
    assert book.request(digest, made) == ours
    book.load(asked(folder), lambda request: True)
    assert len(seen) == 1, "the same again"


def test_what_only_a_request_names_is_not_computed_for_others(book, folder):
    digest = book.digest(asked(folder))
    with pytest.raises(ValueError, match="is loaded here"):
        book.request(digest, made)
    book.load(asked(folder), lambda request: True)
    assert book.request(digest, made) and book.scopes() == (adapter_scope(digest), )


def test_one_that_vllm_does_not_load_is_not_listed(book, folder):
    def fails(request):
        raise RuntimeError("rank")

    with pytest.raises(RuntimeError):
        book.load(asked(folder), fails)
    assert not book.scopes()


def test_files_that_change_are_not_mixed(book, folder):
    """D keeps its prompts from then on; P does not compute the old ones, and the new ones once they are loaded."""
    book.load(asked(folder), lambda request: True)
    before = book.digest(asked(folder))
    old = book.request(before, made)
    write_stub(folder, "second, of another size")
    assert book.digest(asked(folder)) == b""
    with pytest.raises(ValueError, match="changed"):
        book.request(before, made)
    assert not book.scopes()
    book.load(asked(folder), lambda request: True)
    assert book.digest(asked(folder)) == b"", "V1 may have blocks of the old ones under this name and path"
    (scope,) = book.scopes()
    assert scope != adapter_scope(before)
    digest = AdapterBook(CONFIG).digest(asked(folder))
    new = book.request(digest, made)
    write_stub(folder, "third, loaded in place, too")
    book.load(asked(folder), lambda request: True)
    assert len(book.scopes()) == 1 and book.scopes() != (scope, ), "what was at this path before is not offered"
    assert scope == adapter_scope(digest) and new.lora_name != old.lora_name and new.lora_int_id != old.lora_int_id


def test_files_that_change_while_they_are_loaded_are_known_to_nobody(book, folder):
    book.load(asked(folder), lambda request: bool(write_stub(folder, "written meanwhile")))
    assert book.digest(asked(folder)) == b"" and not book.scopes()


def test_a_new_path_is_another_adapter_of_the_same_name(book, folder, tmp_path):
    book.load(asked(folder), lambda request: True)
    other = write_stub(tmp_path / "b", "second")
    book.load(asked(other), lambda request: True)
    digests = {book.digest(asked(folder)), book.digest(asked(other))}
    assert len(digests) == 2 and listed(book) == set(map(adapter_scope, digests))


def test_the_last_ones_are_listed_and_all_is_bounded(book, tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "MAX_NOTED", MAX_ADAPTERS + 2)
    folders = [write_stub(tmp_path / f"{number}", f"content {number}") for number in range(MAX_ADAPTERS + 3)]
    for one in folders:
        book.load(asked(one), lambda request: True)
    assert len(book.scopes()) == MAX_ADAPTERS
    assert book.digest(asked(folders[-1])) == b"" != book.digest(asked(folders[0]))
