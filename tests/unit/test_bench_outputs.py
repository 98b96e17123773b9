# SPDX-License-Identifier: Apache-2.0
"""The files of benchmarks: what can't be written is refused before a run, and an earlier report stays."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_pd.bench import outputs
from vllm_pd.bench.outputs import require_file, require_picture, write_json
from vllm_pd.bench.serve import command
from vllm_pd.bench.serve.settings import ServeBench
from vllm_pd.cli import app
from vllm_pd.errors import ConfigError


@pytest.mark.parametrize("name, cure", [(".", "a folder"), ("no/such", "no such folder.*make it"),
                                        ("file/x", "no such folder")])
def test_b80_what_is_no_file(tmp_path, name, cure):
    (tmp_path / "file").touch()
    for require in (require_file, require_picture):
        with pytest.raises(ConfigError, match=f"--output='{tmp_path / name}'.*{cure}"):
            require("--output", tmp_path / name)
        require("--output", tmp_path / "file")
        require("--output", None)
    require_file("--output", Path("/dev/null"))


def test_b80_what_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="--output=.*may not be written: write another"):
        require_file("--output", tmp_path / "a")


def test_b80_a_picture_needs_what_draws_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--picture=.*pip install matplotlib.*leave the option out"):
        require_picture("--picture", tmp_path / "a.png")
    require_picture("--picture", None)


def test_a_report_that_can_not_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "out.json"
    write_json(path, [1])
    for owner, name in ((outputs.os, "replace"), (Path, "write_text")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(owner, name, refuse)
            write_json(path, [2])
        assert json.loads(path.read_text()) == [1] and list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_json(path, object())
    write_json(path, [3])
    assert json.loads(path.read_text()) == [3] and list(tmp_path.iterdir()) == [path]


def test_a_link_or_a_device_stays_what_it_is(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "out.json")
    write_json(link, [1])
    write_json(Path("/dev/null"), [1])
    assert link.is_symlink() and json.loads((tmp_path / "out.json").read_text()) == [1]
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("arguments", [
    ["share", "trace"], ["serve", "m"], ["handover", "--decode", "http://a", "--prefill", "http://a"], ["router"],
    ["policies", "--tokenizer", "m"], ["dp", "--model", "m"], ["dp-ranks"]])
def test_b80_commands_look_at_their_files_before_they_do_anything(tmp_path, arguments):
    caught = CliRunner().invoke(app, ["bench", *arguments, "--output", str(tmp_path / "no" / "such")]).exception
    assert isinstance(caught, ConfigError) and caught.key == "--output" and "make it" in caught.cure


@pytest.mark.parametrize("key", ["--log", "--output", "--picture"])
def test_b80_bench_serve_looks_at_its_files_before_it_does_anything(tmp_path, key):
    files = {name: tmp_path / "file" for name in ("--log", "--output", "--picture")} | {key: tmp_path}
    with pytest.raises(ConfigError, match=f"{key}='{tmp_path}'.*a folder"):
        command.run(ServeBench("m"), files["--log"], files["--picture"], files["--output"], print, print)
    assert list(tmp_path.iterdir()) == []
