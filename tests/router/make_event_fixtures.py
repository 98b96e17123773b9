# SPDX-License-Identifier: Apache-2.0
"""Write event_fixtures.json: batches of KV events in the bytes that the encoders of several releases of vLLM write.

    python tests/router/make_event_fixtures.py 0.9.2=vllm-0.9.2/vllm/distributed/kv_events.py 0.32.0=...

Each path is `kv_events.py` as that release has it (from its sdist, `unearth --no-binary --download DIR vllm==VERSION`).
What it imports of vLLM is stubbed, for it needs none of that to encode. The publisher's own thread writes what is
replayed, so that its frames are the release's too. Needs msgspec and pyzmq.
"""
import dataclasses
import importlib.util
import json
import logging
import sys
import time
import types
from pathlib import Path

import msgspec
import zmq

TARGET = Path(__file__).with_name("event_fixtures.json")
SIZE = 4


@dataclasses.dataclass
class Config:
    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = ""
    replay_endpoint: str | None = None
    buffer_steps: int = 10
    hwm: int = 10
    max_queue_size: int = 10
    topic: str = ""


def load(version: str, path: str) -> types.ModuleType:
    """The release's module, with nothing of vLLM around it."""
    for name, members in (("vllm", {}), ("vllm.config", {"KVEventsConfig": Config}),
                          ("vllm.config.kv_events", {"KVEventsConfig": Config}),
                          ("vllm.logger", {"init_logger": logging.getLogger}), ("vllm.utils", {}),
                          ("vllm.utils.network_utils", dict.fromkeys(
                              ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"))),
                          ("vllm.v1", {}), ("vllm.v1.core", {}),
                          ("vllm.v1.core.kv_cache_utils", {"ExternalBlockHash": bytes | int})):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    spec = importlib.util.spec_from_file_location(f"kv_events_{version}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Release:
    """Events with the fields that it has."""

    def __init__(self, version: str, path: str) -> None:
        self.module = load(version, path)
        self.fields = set(self.module.BlockStored.__struct_fields__)
        self.encode = msgspec.msgpack.Encoder().encode

    def stored(self, hashes: list, parent, tokens: range, **more):
        """None where it can't say that."""
        given = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": list(tokens), "block_size": SIZE,
                 "lora_id": None, "medium": "GPU", "lora_name": None}
        if not more.keys() <= self.fields:
            return None
        return self.module.BlockStored(**{name: value for name, value in (given | more).items() if name in self.fields})

    def removed(self, hashes: list, **more):
        fields = set(self.module.BlockRemoved.__struct_fields__)
        if not more.keys() <= fields:
            return None
        given = {"medium": "GPU"} | more
        return self.module.BlockRemoved(block_hashes=hashes, **{k: v for k, v in given.items() if k in fields})

    def batch(self, *events, rank: int | None = 0):
        return self.module.KVEventBatch(ts=1.0, events=list(events), data_parallel_rank=rank)

    def cases(self) -> dict[str, object]:
        """Two blocks of tokens 0 to 7 and what may be told beside them."""
        stored = self.stored([11, 12], None, range(8))
        sha = [bytes([number]) * 32 for number in (1, 2)]
        found = {
            "stored": self.batch(stored),
            "rank_3": self.batch(stored, rank=3),
            "removed": self.batch(self.removed([12])),
            "cleared": self.batch(self.module.AllBlocksCleared()),
            "orphan": self.batch(self.stored([13], 99, range(8, 12))),
            "adapter_id": self.batch(self.stored([11, 12], None, range(8), lora_id=7)),
        }
        if "medium" in self.fields:
            found["bytes"] = self.batch(self.stored(sha, None, range(8)), self.stored([b"\3" * 32], sha[1],
                                                                                      range(8, 12)))
            found["cpu"] = self.batch(stored, self.stored([13], None, range(0), medium="CPU"),
                                      self.removed([12], medium="CPU"))
        if "lora_name" in self.fields:
            found["adapter"] = self.batch(self.stored([11, 12], None, range(8), lora_id=7, lora_name="ada"))
        if "extra_keys" in self.fields:
            found["salt"] = self.batch(self.stored([11, 12], None, range(8), extra_keys=[("pepper",), None]))
            found["image"] = self.batch(self.stored([11, 12], None, range(8), extra_keys=[None, (("image-1", 4),)]))
            found["adapter_keys"] = self.batch(self.stored([11, 12], None, range(8), lora_id=7, lora_name="ada",
                                                           extra_keys=[("ada",), ("ada",)]))
        if "group_idx" in self.fields:
            full = self.stored([11, 12], None, range(8), group_idx=0)
            found["one_group"] = self.batch(full)
            found["two_groups"] = self.batch(full, self.stored([12], None, range(8), group_idx=1))
            found["group_removed"] = self.batch(self.removed([12], group_idx=1))
        if "kv_cache_spec_kind" in self.fields:
            found["kinds"] = self.batch(self.stored([11, 12], None, range(8), group_idx=0,
                                                    kv_cache_spec_kind="full_attention"))
        if "locality" in self.fields:
            found["remote"] = self.batch(stored, self.stored([21, 22], None, range(8, 16), locality="REMOTE"),
                                         self.removed([11, 12], locality="REMOTE"))
        if "session_id" in self.fields:
            found["session"] = self.batch(self.stored([11, 12], None, range(8), session_id="s", ownership="tier"))
        if "lookahead_token_ids" in self.fields:
            found["lookahead"] = self.batch(self.stored([11, 12], None, range(8),
                                                        lookahead_token_ids=[[4, 5], [8, 9]]))
        return found

    def replayed(self) -> list[list[str]]:
        """The frames of a replay of one batch, as a DEALER gets them."""
        context = zmq.Context.instance()
        publisher = self.module.ZmqEventPublisher(0, endpoint="inproc://events*", replay_endpoint="inproc://replay",
                                                  buffer_steps=10, topic="kv-events")
        publisher.publish(self.batch(self.stored([11, 12], None, range(8))))
        socket = context.socket(zmq.DEALER)
        socket.connect("inproc://replay")
        while not publisher._buffer:
            time.sleep(0.01)
        socket.send_multipart([b"", bytes(8)])
        frames = [socket.recv_multipart(), socket.recv_multipart()]
        socket.close()
        publisher.shutdown()
        return [[frame.hex() for frame in one] for one in frames]


def main() -> None:
    found = {}
    for version, _, path in (given.partition("=") for given in sys.argv[1:]):
        release = Release(version, path)
        found[version] = {"batches": {name: release.encode(batch).hex() for name, batch in release.cases().items()},
                          "replay": release.replayed()}
    TARGET.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
