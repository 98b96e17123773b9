# SPDX-License-Identifier: Apache-2.0
"""B82: the operator routes ask for the keys that vLLM's own server asks for."""
from argparse import Namespace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from vllm_pd.events import notice
from vllm_pd.frontend.access import keys_of
from vllm_pd.frontend.attach import attach_events


@pytest.mark.parametrize("given, variable, keys", [
    (None, "", ()), (["a"], "", ("a", )), (["a", "b"], "c", ("a", "b")), (None, "c", ("c", ))])
def test_b82_the_keys_of_vllms_own_server(given, variable, keys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", variable)
    app = Starlette()
    options = Namespace(api_key=given, enable_request_id_headers=False, middleware=[], allowed_origins=["*"],
                        allow_credentials=False, allowed_methods=["*"], allowed_headers=["*"])
    init_entrypoints_middleware(options, app, ("generate", ))
    assert keys_of(app) == keys
    attach_events(app, lambda: notice.EventsNotice("", 16))
    ask = TestClient(app).get
    assert ask("/v1/models").status_code == (401 if keys else 404)
    assert ask(notice.PATH).status_code == (401 if keys else 200)
    for key in keys:
        header = {"Authorization": f"Bearer {key}"}
        assert ask("/v1/models", headers=header).status_code == 404 and ask(notice.PATH, headers=header).is_success
