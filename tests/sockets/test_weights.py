# SPDX-License-Identifier: Apache-2.0
"""B42: a digest of weights in which every tensor counts, in each format, wherever the checkpoint lies."""
import json
import os
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from vllm_pd.cli import app
from vllm_pd.errors import ConfigError
from vllm_pd.model import weights
from vllm_pd.model.fingerprint import weights_state
from vllm_pd.model.weights import OPAQUE_EVERY_BYTES, PIECE_BYTES, Stretch, digest_weights, weight_files
from vllm_pd.store.worker import model_of

LAYERS = 6
SHAPES = {"embed": (1000, 64)} | {f"layers.{n}.{name}": shape for n in range(LAYERS)
                                   for name, shape in (("norm", (64, )), ("up", (256, 64)), ("bias", (3, )))}


def tensors() -> dict[str, np.ndarray]:
    dice = np.random.default_rng(1)
    return {name: dice.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


def write_safetensors(folder: Path, values: dict[str, np.ndarray]) -> Path:
    save_file(values, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_torch(folder: Path, values: dict[str, np.ndarray]) -> Path:
    torch.save({name: torch.from_numpy(value) for name, value in values.items()}, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def write_gguf(folder: Path, values: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "d" * 300])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_uint64("some.number", 7)
    writer.add_bool("some.flag", True)
    writer.add_custom_alignment(64)
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


WRITERS = [write_safetensors, write_torch, write_gguf]


@pytest.fixture(params=WRITERS, ids=lambda write: write.__name__)
def write(request):
    return request.param


def place(file: Path, value: np.ndarray) -> int:
    """Where the tensor's bytes lie in the file."""
    data = file.read_bytes()
    assert data.count(value.tobytes()) == 1
    return data.index(value.tobytes())


def test_b42_every_tensor_counts(tmp_path, write):
    """A fine-tune of any one tensor, first value or last, has another digest."""
    values = tensors()
    file = write(tmp_path, values)
    digests = {digest_weights(tmp_path)}
    for value in values.values():
        at = place(file, value)
        for byte in (at, at + value.nbytes - 1):
            content = bytearray(file.read_bytes())
            content[byte] ^= 1
            other = tmp_path / "other"
            other.mkdir(exist_ok=True)
            (other / file.name).write_bytes(content)
            digests.add(digest_weights(other))
    assert len(digests) == 1 + 2 * len(values)


def test_b42_names_shapes_and_types_count(tmp_path, write):
    values = tensors()
    digests = []
    for change in ({}, {"layers.1.up": values["layers.1.up"].reshape(64, 256)},
                   {"layers.1.up": values["layers.2.up"], "layers.2.up": values["layers.1.up"]},
                   {"layers.1.norm": values["layers.1.norm"].view(np.int32)}):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        write(folder, values | change)
        digests.append(digest_weights(folder))
    assert len(set(digests)) == len(digests)


def test_the_folder_and_the_time_do_not_count(tmp_path, write):
    for name in ("a", "b/c"):
        (tmp_path / name).mkdir(parents=True)
    file = write(tmp_path / "a", tensors())
    (tmp_path / "a" / "README.md").write_text("not a weight")
    shutil.copy(file, tmp_path / "b/c")
    assert digest_weights(tmp_path / "a") == digest_weights(tmp_path / "b/c")
    assert digest_weights(file) == digest_weights(tmp_path / "b/c" / file.name)


def test_a_link_counts_as_what_it_leads_to(tmp_path):
    """The hub's cache is made of links."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    file = write_safetensors(tmp_path / "a", tensors())
    (tmp_path / "b" / file.name).symlink_to(file)
    assert digest_weights(tmp_path / "a") == digest_weights(tmp_path / "b")


def test_more_files_and_the_index_count(tmp_path):
    write_safetensors(tmp_path, tensors())
    digests = [digest_weights(tmp_path)]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    digests.append(digest_weights(tmp_path))
    (tmp_path / "model-2.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    digests.append(digest_weights(tmp_path))
    assert len(set(digests)) == 3
    assert [file.name for file in weight_files(tmp_path)] == ["model-2.safetensors", "model.safetensors"]


def test_of_an_unknown_file_no_stretch_of_a_mebibyte_is_unseen(tmp_path):
    """Neither in a pickle of old, nor in a file that is not what its name says."""
    content = np.random.default_rng(2).bytes(5 * OPAQUE_EVERY_BYTES + 12345)
    for name in ("old.bin", "broken.safetensors", "broken.gguf"):
        head = b"GGUF" if name.endswith("gguf") else b""
        file = tmp_path / name
        file.write_bytes(head + content)
        digests = {digest_weights(file)}
        for start in (0, OPAQUE_EVERY_BYTES // 2, 2 * OPAQUE_EVERY_BYTES + 77, len(content) - OPAQUE_EVERY_BYTES):
            changed = np.frombuffer(content, dtype=np.uint8).copy()
            changed[start:start + OPAQUE_EVERY_BYTES] ^= 1
            file.write_bytes(head + changed.tobytes())
            digests.add(digest_weights(file))
        assert len(digests) == 5
        file.write_bytes(head + content[:-1])
        assert digest_weights(file) not in digests
        file.unlink()


def test_a_large_tensor_has_pieces_at_both_ends_and_between(tmp_path):
    pieces = list(weights._pieces(Stretch(1000, 200 << 20, 64 << 20)))
    assert [start - 1000 for start, _ in pieces] == [0, 64 << 20, 128 << 20, 192 << 20, (200 << 20) - PIECE_BYTES]
    assert {size for _, size in pieces} == {PIECE_BYTES}
    assert list(weights._pieces(Stretch(8, 5, 64 << 20))) == [(8, 5)]


def test_reads_are_few(tmp_path):
    """Two for each tensor that is larger than a piece, one for any other, and the header."""
    write_safetensors(tmp_path, tensors())
    size = (tmp_path / "model.safetensors").stat().st_size
    header = size - sum(value.nbytes for value in tensors().values())
    larger = sum(value.nbytes > PIECE_BYTES for value in tensors().values())
    stretches = weights._stretches(tmp_path / "model.safetensors")
    reads = sum(len(list(weights._pieces(stretch))) for stretch in stretches)
    assert reads == len(SHAPES) + larger + -(-header // PIECE_BYTES)


def test_a_gguf_header_is_understood_as_by_its_library(tmp_path):
    file = write_gguf(tmp_path, tensors())
    reader = gguf.GGUFReader(file)
    header, *stretches = weights._gguf(file, file.stat().st_size)
    assert header == (0, reader.data_offset, PIECE_BYTES)
    assert [stretch.start for stretch in stretches] == sorted(int(tensor.data_offset) for tensor in reader.tensors)


def test_a_torch_file_without_checksums_counts_too(tmp_path):
    """Its directory has a checksum of each tensor, but a writer may leave them out; then the pieces count."""
    values = {name: torch.from_numpy(value) for name, value in tensors().items()}
    torch.serialization.set_crc32_options(False)
    try:
        digests = set()
        for name in (None, *values):
            torch.save(values | ({name: values[name] + 1} if name else {}), tmp_path / "model.pt")
            digests.add(digest_weights(tmp_path))
    finally:
        torch.serialization.set_crc32_options(True)
    assert len(digests) == 1 + len(values)
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert len(archive.infolist()) >= len(values)


def test_what_is_read_is_what_was_saved(tmp_path):
    file = write_safetensors(tmp_path, tensors())
    stretches = weights._safetensors(file)[1:]
    data = file.read_bytes()
    assert {data[s.start:s.start + s.size] for s in stretches} == {v.tobytes() for v in load_file(file).values()}


def test_b42_the_command_prints_the_digest_of_a_folder_or_file(tmp_path):
    file = write_safetensors(tmp_path, tensors())
    for named in (tmp_path, file):
        result = CliRunner().invoke(app, ["digest", str(named)])
        assert result.exit_code == 0 and result.stdout == f"{digest_weights(named).hex()}\n"
    file.unlink()
    for named in (tmp_path, file):
        result = CliRunner().invoke(app, ["digest", str(named)])
        assert isinstance(result.exception, ConfigError) and str(named) in str(result.exception)


def stored_as(model: Path | str, load_format: str = "auto") -> bytes:
    """The name of this model in the KV store, for engines that are otherwise equal."""
    return model_of("an engine", 0, "0.32.0", weights_state(SimpleNamespace(
        model_config=SimpleNamespace(model=str(model)), load_config=SimpleNamespace(load_format=load_format))))


def test_b104_other_weights_of_equal_size_have_another_name_in_the_store(tmp_path, write):
    """B104: also where they differ only in bytes that the digest does not read."""
    folder = tmp_path / "model"
    folder.mkdir()
    file = write(folder, {"embed": np.zeros((1000, 64), np.float32)})
    os.utime(file, (1, 1))
    before, digest = stored_as(folder), digest_weights(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")  # with the times
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / file.name).symlink_to(file)  # as a hub's cache has them
    assert before == stored_as(copy) == stored_as(tmp_path / "links")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert digest_weights(folder) == digest
    assert before != stored_as(folder) == stored_as(tmp_path / "links")


def test_b104_all_that_decides_about_the_weights_is_in_the_name(tmp_path):
    """B104: index files, a model's own code, the files that are read; for a hub's model its commit does."""
    file = write_safetensors(tmp_path, tensors())
    names = [stored_as(tmp_path), stored_as(tmp_path, "dummy")]
    for path, content in (("a.index.json", "{}"), ("modeling.py", "a = 1"), ("modeling.py", "a = 2")):
        (tmp_path / path).write_text(content)
        names.append(stored_as(tmp_path))
    names.append(stored_as(tmp_path, "dummy"))
    assert len(set(names)) == len(names)
    os.utime(tmp_path / "modeling.py", (1, 1))
    assert stored_as(tmp_path) == names[-2]
    os.utime(file, (1, 1))
    assert stored_as(tmp_path, "dummy") == names[-1] and stored_as(tmp_path) not in names
    assert stored_as("some/model") == model_of("an engine", 0, "0.32.0", "")
