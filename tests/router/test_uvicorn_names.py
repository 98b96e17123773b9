# SPDX-License-Identifier: Apache-2.0
"""B80: a uvicorn without what the limits for clients stand on is refused at import, not in a client's request."""
import ast
import importlib
import sys
from pathlib import Path

import pytest
import uvicorn

from vllm_pd.errors import ConfigError
from vllm_pd.frontend import edge, uvicorn_names
from vllm_pd.frontend.uvicorn_names import REQUIRED, HttpToolsProtocol, RequestResponseCycle, check, missing_names


def test_this_uvicorn_has_all_names():
    assert missing_names() == []


def test_b80_a_uvicorn_that_lacks_one_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(HttpToolsProtocol, "on_header")
    with pytest.raises(ConfigError, match=f"uvicorn='{uvicorn.__version__}'.*no HttpToolsProtocol.on_header: install"):
        check()
    assert missing_names({RequestResponseCycle: ("keep_alive", "keep_dead")}) == ["RequestResponseCycle.keep_dead"]


def test_b80_a_uvicorn_without_the_module_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    with pytest.raises(ConfigError, match=f"uvicorn='{uvicorn.__version__}'.*install a release"):
        importlib.reload(uvicorn_names)
    monkeypatch.undo()
    importlib.reload(uvicorn_names)


def test_every_method_that_is_overridden_is_required():
    """And so is what is read of a request that is being answered."""
    tree = ast.parse(Path(edge.__file__).read_text())
    [connection] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EdgeConnection"]
    calls = {node.attr for node in ast.walk(connection) if isinstance(node, ast.Attribute)
             and isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"}
    assert calls - {"__init__"} <= set(REQUIRED[HttpToolsProtocol])
    own = {node.name for node in ast.walk(connection) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.attr for node in ast.walk(connection) if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
            and node.attr.startswith("_")}
    read = {node.attr for node in ast.walk(connection) if isinstance(node, ast.Attribute)
            and getattr(node.value, "id", "") == "self"}
    assert read - own - {"refused_s"} <= set(REQUIRED[HttpToolsProtocol])
    cycle = {node.attr for node in ast.walk(connection) if isinstance(node, ast.Attribute)
             and (getattr(node.value, "id", "") in ("cycle", "running")
                  or getattr(node.value, "attr", "") in ("cycle", "_running"))}
    assert cycle and cycle <= set(REQUIRED[RequestResponseCycle])
