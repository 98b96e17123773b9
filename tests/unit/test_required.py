# SPDX-License-Identifier: Apache-2.0
"""B92: how the names that the V1 binding stands on are looked for in a source."""
import pytest

from vllm_pd.model.source_names import Required, missing_names
from vllm_pd.v1.required import REQUIRED

SOURCE = """
class Pool:
    size: int = 0
    def __init__(self, blocks): self.blocks = blocks; self.seen: set[str] = set()
    def touch(self, blocks, owner=None): ...
    @property
    def free(self): return 1
class Struct:
    name: str
    age: int = 0
def made(name, *, age): ...
"""


@pytest.mark.parametrize("name, given, fits", [
    ("Pool", {}, True), ("Pool.size", {}, True), ("Pool.blocks", {}, True), ("Pool.seen", {}, True),
    ("Pool.free", {}, True), ("Pool.gone", {}, False), ("Gone", {}, False), ("Gone.size", {}, False),
    ("Struct.blocks", {}, False), ("Pool.touch", {"takes": ("blocks", )}, True),
    ("Pool.touch", {"takes": ("blocks", "owner")}, True), ("Pool.touch", {"takes": ()}, False),
    ("Pool.touch", {"takes": ("blocks", "other")}, False), ("Pool.touch", {"exactly": ("blocks", )}, False),
    ("Pool.touch", {"exactly": ("blocks", "owner")}, True), ("Struct", {"takes": ("name", )}, True),
    ("Struct", {"takes": ("age", )}, False), ("made", {"takes": ("name", "age")}, True),
    ("made", {"takes": ("name", )}, False), ("made", {}, True),
])
def test_b92_a_name_is_found_with_its_parameters(name, given, fits):
    """B92"""
    found = missing_names({"file.py": (Required(name, "reason", **given), )}, {"file.py": SOURCE}.get)
    assert (found == []) is fits
    assert all(name in text and "vllm/file.py" in text for text in found)


def test_b92_a_missing_file_is_named():
    """B92"""
    assert missing_names({"file.py": (), "gone.py": ()}, {"file.py": ""}.get) == ["vllm/gone.py"]


def test_every_name_has_a_reason():
    assert all(one.reason for names in REQUIRED.values() for one in names)
